"""The instruments: what is measured of a step and of an evaluation, over all ranks. They change
nothing; docs/numbers.md says what each number is."""

import math
import resource
import sys
from statistics import fmean, pstdev, stdev

import torch
import torch.distributed as dist

from machinery.policy import NOTHING, hand_to_answers, in_step, make_micro_batches
from machinery.ranks import DEVICE, WORLD_SIZE, over_ranks
from machinery.sharding import whole

MOVED = 1e-6  # nats: a token whose log pi has changed by less has not moved


def step_metrics(run, groups: list[list], sampled: list[list], updates: list[dict],
                 measured: dict) -> dict:
    """Means over groups, answers or updates, of all ranks; what else was `measured`. `sampled` are
    these groups and those of a refill. Collective."""
    answers = [answer for group in groups for answer in group]
    rewards = [[answer.reward for answer in group] for group in groups]
    parts, solved = list(run.task.REWARD_WEIGHTS), run.task.SOLVED
    seconds = {f"seconds/{phase}": run.log.seconds[phase]
               for phase in ("sample", "score", "refill", "learn")}
    values = {
        "reward": [answer.reward for answer in answers],
        "reward_std": [pstdev(group) for group in rewards],
        **{f"reward/{part}": [answer.parts[part] for answer in answers] for part in parts},
        **{f"reward/{part}_std": [pstdev(answer.parts[part] for answer in group)
                                  for group in groups] for part in parts},
        "solved": [answer.parts[solved] for answer in answers],
        "groups_all_solved": [min(each.parts[solved] for each in group) >= 1 for group in groups],
        "groups_none_solved": [max(each.parts[solved] for each in group) <= 0 for group in groups],
        "groups_without_signal": [max(group) == min(group) for group in rewards],
        "completion_length": [len(answer.completion_ids) for answer in answers],
        "truncated": [answer.truncated for answer in answers],
        "refilled": [len(sampled) / len(groups) - 1],
        "tokens": [sum(len(answer.completion_ids) for group in sampled for answer in group)],
        **{name: [value] for name, value in seconds.items()}}
    sums = over_ranks([fmean(each) for each in values.values()])  # of as many on each
    metrics = {name: total / WORLD_SIZE for name, total in zip(values, sums)}
    num_tokens = metrics.pop("tokens") * WORLD_SIZE
    metrics["tokens_per_second"] = num_tokens / sum(metrics[name] for name in seconds)
    num_sampled, num_learned = (1 + metrics["refilled"]) * len(answers), updates[0]["learned"]
    metrics["sampled_per_learned"] = num_sampled * WORLD_SIZE / max(1, num_learned)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peaks = ([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
             if DEVICE.type == "cuda"
             else [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit] * 2)
    peaks = [peak / 1e9 for peak in over_ranks(peaks, dist.ReduceOp.MAX)]
    metrics["memory_gb"], metrics["memory_reserved_gb"] = peaks
    metrics["learning_rate"] = run.optimizer.param_groups[0]["lr"]
    made = [update for update in updates if update["updated"]] or updates
    means = {name: fmean(update[name] for update in made) for name in made[0]}
    means |= {"updated": sum(update["updated"] for update in updates),
              "non_finite": updates[-1]["non_finite"], **measured}
    # What there is no number for is null in the file: JSON has no NaN.
    numbers = {name: value if math.isfinite(value) else None for name, value in means.items()}
    return metrics | numbers


def interval(values: list[float], most: int) -> tuple[float, float]:
    """Wilson's, of 95 %, for the mean of values from 0 to 1. It is that of n draws of 0 or 1, where
    n is how many have as much variance: at least one for each value, and `most` at most."""
    p, m = fmean(values), len(values)
    variance = stdev(values) ** 2 if m > 1 else 0.0
    n = min(most, max(m, p * (1 - p) * m / variance)) if variance else m
    z = 1.96**2 / n
    centre, half = (p + z / 2) / (1 + z), math.sqrt(z * p * (1 - p) + z**2 / 4) / (1 + z)
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluation_metrics(groups: list[list], task) -> dict[str, float | None]:
    """Of all answers to the held-out questions, a group for each."""
    # A question counts as solved when its answer of highest reward solves it: best of n.
    best = [max(group, key=lambda answer: answer.reward).parts[task.SOLVED] for group in groups]
    solved = [fmean(answer.parts[task.SOLVED] for answer in group) for group in groups]
    answers = [answer for group in groups for answer in group]
    values = {**{part: [answer.parts[part] for answer in answers] for part in task.REWARD_WEIGHTS},
              "reward": [answer.reward for answer in answers],
              "completion_length": [len(answer.completion_ids) for answer in answers],
              "truncated": [answer.truncated for answer in answers]}
    metrics: dict[str, float | None] = {}
    for name, each in (("best_of_n", best), ("solved", solved)):
        metrics[f"eval/{name}"] = fmean(each)
        metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"] = interval(each, len(answers))
    n, right = len(groups[0]), [sum(answer.parts[task.SOLVED] >= 1 for answer in group)
                                for group in groups]
    for k in sorted({n, *(2**i for i in range(n.bit_length()) if 2**i <= n)}):
        # Of k answers drawn from these n without putting back, is one right?
        metrics[f"eval/pass_at_{k}"] = 1 - fmean(
            math.comb(n - each, k) / math.comb(n, k) for each in right)
    kinds = [str(group[0].row.get("group", "")) for group in groups]
    for kind in sorted(set(kinds) - {""}):
        metrics[f"eval/solved/{kind}"] = fmean(x for x, of in zip(solved, kinds) if of == kind)
    return metrics | {f"eval/{name}": fmean(each) for name, each in values.items()}


@torch.no_grad()
def logprobs_now(run, answers: list, policy=None) -> list[tuple]:
    """Micro-batches; and log pi and entropy of their tokens as the weights are now, (tokens,)."""
    batches = make_micro_batches(answers, run.config.training.tokens_per_micro_batch)
    padded = in_step(batches, [NOTHING], run.config.training.shard and not policy)
    return [(batch, *(policy or run.policy.module)(batch)) for batch in padded][:len(batches)]


def sampler_metrics(run, answers: list) -> dict[str, float]:
    """How far what these were drawn from is from what learns: how far -log pi of their tokens is on
    average from its entropy, less four standard errors; and the mean of |log p - log pi|, which
    also sees symmetric noise. Collective."""
    now = logprobs_now(run, answers)
    logprobs, entropies = (torch.cat(each) for each in list(zip(*now))[1:])  # (tokens,) each
    excess, distance = -logprobs - entropies, torch.zeros_like(logprobs)
    if any(copied is not own for copied, own in zip(run.sampler.parameters(),
                                                    run.model.parameters(), strict=True)):
        sampler = type(run.policy.module)(run.sampler, run.config)
        sampler.mixed = False  # it is low in precision itself
        drawn_with = torch.cat([each for _, each, _ in logprobs_now(run, answers, sampler)])
        distance = (drawn_with - logprobs).abs()
    sums = [excess.sum(), (excess**2).sum(), distance.sum()]
    n, total, squares, distance = over_ranks([len(excess), *map(float, sums)])
    beyond_chance = abs(total) - 4 * math.sqrt(squares)
    return {"sampler_gap": 0.0 if beyond_chance <= 0 else beyond_chance / n,  # nan stays nan
            "sampler_distance": distance / n}


def change_metrics(run, learned: list) -> dict[str, float]:
    """How log pi of the tokens learned from has changed, and whether as meant. Collective."""
    for batch, logprobs, _ in logprobs_now(run, learned):
        hand_to_answers(batch, new_logprobs=logprobs)
    pushed = [answer for answer in learned if answer.advantage]  # not for a KL term alone
    none = torch.zeros(0)
    change = torch.cat([none, *((each.new_logprobs - each.old_logprobs).cpu() for each in pushed)])
    A = torch.tensor([each.advantage for each in pushed for _ in each.completion_ids])  # (tokens,)
    moved, meant = change.abs() > MOVED, change * A > 0
    stale = [copied for copied, own in zip(run.sampler.parameters(), run.model.parameters(),
                                           strict=True)
             if not torch.equal(copied, whole(own, copied.dtype).to(copied.dtype))]
    shares = {"moved": (moved.sum() if change.isfinite().all() else math.nan, len(change)),
              "moved_as_meant": ((moved & meant).sum(), moved.sum()),
              "change_as_meant": (change[meant].abs().sum(), change.abs().sum()),
              "change_rewarded": (change[A > 0].sum(), (A > 0).sum()),
              "change_punished": (change[A < 0].sum(), (A < 0).sum()),
              "sampler_stale": (len(stale), 1)}
    parts, wholes = (over_ranks([float(each) for each in side]) for side in zip(*shares.values()))
    return {name: part / whole if whole else math.nan
            for name, part, whole in zip(shares, parts, wholes)}
