"""The instruments: what is measured of a step. They change nothing, and docs/numbers.md says what
each number means."""

import math
import resource
import sys
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import nn

from machinery.batches import measure_in_batches, store_in_answers
from machinery.ranks import DEVICE, WORLD_SIZE, max_over_ranks, sum_over_ranks
from machinery.schedule import is_due
from machinery.settings import TrainingSettings

PHASES = ("sample", "score", "refill", "learn")
MOVED = 1e-6  # A token moved if its log-probability changed by more than this.
NOTHING_LEARNED = {
    "loss": 0.0,
    "entropy": math.nan,
    "grad_norm": math.nan,
    "learned": 0,
    "updated": 0,
    "non_finite": 0,
}


class UpdateStatistics:
    """Adds up over micro-batches what is told of an update."""

    def __init__(self, training: TrainingSettings):
        self.sums: dict[str, Any] = {"loss": 0.0, "entropy": 0.0, "tokens": 0.0}
        if training.kl_beta:
            self.sums["kl"] = 0.0
        if training.clip and training.updates_per_batch > 1:
            self.sums["clipped"] = 0.0

    @torch.no_grad()
    def add(self, **values: torch.Tensor | int) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value

    def summary(self, num_learned: float, grad_norm: float) -> dict[str, float]:
        """Returns what the update was like over all ranks. Entropy, KL and the clipped share are
        means over the tokens that were learned from. Collective."""
        totals = sum_over_ranks({name: float(total) for name, total in self.sums.items()})
        loss = totals.pop("loss")
        num_tokens = totals.pop("tokens")
        update = {"loss": loss}
        for name, total in totals.items():
            update[name] = total / num_tokens
        is_finite = math.isfinite(grad_norm) and math.isfinite(loss)  # The same on every rank.
        update["grad_norm"] = grad_norm
        update["learned"] = num_learned
        update["updated"] = int(is_finite)
        update["non_finite"] = int(not is_finite)
        return update


class StepReport:
    """The metrics of a step. It is made before the update. In step 1 it measures something there.

    `groups` were sampled first, and `all_groups` also has those of a refill. Collective."""

    def __init__(self, run: Any, groups: list[list], all_groups: list[list]):
        self.run = run
        self.groups = groups
        self.all_groups = all_groups
        self.measured: dict[str, float] = {}
        if run.step == 1:
            with run.log.phase("measure"):
                self.measured = sampler_metrics(run, flat(groups))

    def metrics(
        self, answers: list, updates: list[dict[str, float]]
    ) -> dict[str, float | None]:
        """Returns the metrics after the update. `answers` are those that count in the loss.
        Collective."""
        run = self.run
        measured = dict(self.measured)
        if run.step == 1 or is_due(run.step, run.config.validation.every, run.config):
            with run.log.phase("measure"):
                measured |= change_metrics(run, answers)
        metrics = sampling_metrics(run, self.groups, self.all_groups)
        num_sampled = (1 + metrics["refilled"]) * len(flat(self.groups)) * WORLD_SIZE
        metrics["sampled_per_learned"] = num_sampled / max(1, updates[0]["learned"])
        metrics |= memory_metrics()
        metrics["learning_rate"] = run.optimizer.param_groups[0]["lr"]
        metrics |= update_metrics(updates)
        metrics |= measured
        for name, value in metrics.items():
            if not math.isfinite(value):
                metrics[name] = None  # JSON has no NaN.
        return metrics


def sampling_metrics(run: Any, groups: list[list], all_groups: list[list]) -> dict[str, float]:
    """Returns means over the step's questions or answers, of all ranks. Collective."""
    answers = flat(groups)
    solved = run.task.SOLVED
    reward_stds = []
    all_solved = []
    none_solved = []
    without_signal = []
    for group in groups:
        rewards = rewards_of(group)
        solved_of_group = parts_of(group, solved)
        reward_stds.append(pstdev(rewards))
        all_solved.append(min(solved_of_group) >= 1)
        none_solved.append(max(solved_of_group) <= 0)
        without_signal.append(min(rewards) == max(rewards))
    means = {
        "reward": fmean(rewards_of(answers)),
        "reward_std": fmean(reward_stds),
    }
    for part in run.task.REWARD_WEIGHTS:
        means[f"reward/{part}"] = fmean(parts_of(answers, part))
    for part in run.task.REWARD_WEIGHTS:
        means[f"reward/{part}_std"] = fmean(pstdev(parts_of(group, part)) for group in groups)
    means["solved"] = fmean(parts_of(answers, solved))
    means["groups_all_solved"] = fmean(all_solved)
    means["groups_none_solved"] = fmean(none_solved)
    means["groups_without_signal"] = fmean(without_signal)
    means["completion_length"] = fmean(answer.num_tokens for answer in answers)
    means["truncated"] = fmean(answer.is_truncated for answer in answers)
    means["refilled"] = len(all_groups) / len(groups) - 1
    for phase in PHASES:
        means[f"seconds/{phase}"] = run.log.seconds.get(phase, 0.0)
    means["tokens"] = sum(answer.num_tokens for answer in flat(all_groups))
    # Every rank has as many questions as the others, so the mean of their means is that of all.
    totals = sum_over_ranks(means)
    metrics = {name: total / WORLD_SIZE for name, total in totals.items()}
    num_tokens = metrics.pop("tokens") * WORLD_SIZE
    seconds = sum(metrics[f"seconds/{phase}"] for phase in PHASES)
    metrics["tokens_per_second"] = num_tokens / seconds
    return metrics


def memory_metrics() -> dict[str, float]:
    """Returns the most memory that any rank has needed so far, in GB. Collective."""
    if DEVICE.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes.
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    most = max_over_ranks({"memory_gb": allocated, "memory_reserved_gb": reserved})
    return {name: num_bytes / 1e9 for name, num_bytes in most.items()}


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns means over the updates that were made on one batch."""
    made = [update for update in updates if update["updated"]]
    if not made:
        made = updates
    means = {}
    for name in made[0]:
        means[name] = fmean(update[name] for update in made)
    means["updated"] = sum(update["updated"] for update in updates)
    means["non_finite"] = updates[-1]["non_finite"]
    return means


def sampler_metrics(run: Any, answers: list) -> dict[str, float]:
    """Compares the sampler with the policy, on answers that were just sampled. Collective.

    `sampler_gap` is how far the mean of -log p of the sampled tokens is from the policy's entropy,
    less four standard errors. `sampler_distance` is the mean of |log p - log p|, between the two,
    of a sampled token. It also sees noise that goes both ways."""
    training = run.config.training
    sums = {"tokens": 0.0, "excess": 0.0, "squares": 0.0, "distance": 0.0}
    policy_log_probs = []
    excesses = []
    for _, log_probs, entropies in measure_in_batches(run.policy.module, answers, training):
        policy_log_probs.append(log_probs)
        excesses.append(-log_probs - entropies)
    excess = torch.cat(excesses)  # (tokens,)
    sums["tokens"] = len(excess)
    sums["excess"] = float(excess.sum())
    sums["squares"] = float((excess**2).sum())
    if has_own_weights(run.sampler, run.model):
        sampler_policy = type(run.policy.module)(run.sampler, run.config)
        sampler_policy.use_autocast = False  # Its weights are in half precision themselves.
        sampler_log_probs = []
        for _, log_probs, _ in measure_in_batches(sampler_policy, answers, training):
            sampler_log_probs.append(log_probs)
        distance = (torch.cat(sampler_log_probs) - torch.cat(policy_log_probs)).abs()
        sums["distance"] = float(distance.sum())
    sums = sum_over_ranks(sums)
    gap = abs(sums["excess"]) - 4 * math.sqrt(sums["squares"])
    if gap <= 0:  # It may be chance. A gap that is nan stays nan.
        gap = 0.0
    return {
        "sampler_gap": gap / sums["tokens"],
        "sampler_distance": sums["distance"] / sums["tokens"],
    }


def has_own_weights(sampler: nn.Module, model: nn.Module) -> bool:
    """Whether the sampler is a copy of the model, and does not share its weights."""
    pairs = zip(sampler.parameters(), model.parameters(), strict=True)
    return any(copied is not parameter for copied, parameter in pairs)


def change_metrics(run: Any, answers: list) -> dict[str, float]:
    """Returns how the update has changed the log-probabilities of the tokens that it was to change,
    and whether each has moved the way its advantage points. Collective."""
    training = run.config.training
    learned = [answer for answer in answers if answer.old_log_probs is not None]
    for batch, log_probs, _ in measure_in_batches(run.policy.module, learned, training):
        store_in_answers(batch, new_log_probs=log_probs)
    changes = [torch.zeros(0)]
    advantages = []  # of each token
    for answer in learned:
        if answer.advantage != 0:  # It is 0 where only a KL penalty was to be learned.
            changes.append((answer.new_log_probs - answer.old_log_probs).cpu())
            advantages += [answer.advantage] * answer.num_tokens
    change = torch.cat(changes)  # (tokens,)
    advantage = torch.tensor(advantages)  # (tokens,)
    has_moved = change.abs() > MOVED
    is_as_meant = change * advantage > 0
    sums = sum_over_ranks({
        "tokens": len(change),
        "moved": float(has_moved.sum()) if change.isfinite().all() else math.nan,
        "moved_any": float(has_moved.sum()),
        "moved_as_meant": float((has_moved & is_as_meant).sum()),
        "change": float(change.abs().sum()),
        "change_as_meant": float(change[is_as_meant].abs().sum()),
        "rewarded": float((advantage > 0).sum()),
        "change_rewarded": float(change[advantage > 0].sum()),
        "punished": float((advantage < 0).sum()),
        "change_punished": float(change[advantage < 0].sum()),
    })
    return {
        "moved": share(sums["moved"], sums["tokens"]),
        "moved_as_meant": share(sums["moved_as_meant"], sums["moved_any"]),
        "change_as_meant": share(sums["change_as_meant"], sums["change"]),
        "change_rewarded": share(sums["change_rewarded"], sums["rewarded"]),
        "change_punished": share(sums["change_punished"], sums["punished"]),
    }


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def flat(groups: list[list]) -> list:
    return [answer for group in groups for answer in group]


def rewards_of(answers: list) -> list[float]:
    return [answer.reward for answer in answers]


def parts_of(answers: list, part: str) -> list[float]:
    return [answer.reward_parts[part] for answer in answers]
