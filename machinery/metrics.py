"""What is measured of a step and of an evaluation, over all ranks: docs/numbers.md says it."""

import math
import resource
import sys
from statistics import fmean, pstdev, stdev

import torch
import torch.distributed as dist

from machinery.ranks import DEVICE, WORLD_SIZE, over_ranks


def step_metrics(run, groups: list[list], updates: list[dict], measured: dict) -> dict:
    """Means over groups, answers or updates, of all ranks; and what else was `measured`."""
    answers = [answer for group in groups for answer in group]
    rewards = [[answer.reward for answer in group] for group in groups]
    parts, solved = list(run.task.REWARD_WEIGHTS), run.task.SOLVED
    seconds = {f"seconds/{phase}": run.log.seconds[phase] for phase in ("sample", "score", "learn")}
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
        **{name: [value] for name, value in seconds.items()}}
    sums = over_ranks([fmean(each) for each in values.values()])  # of as many on each
    metrics = {name: total / WORLD_SIZE for name, total in zip(values, sums)}
    num_tokens = metrics["completion_length"] * len(answers) * WORLD_SIZE
    metrics["tokens_per_second"] = num_tokens / sum(metrics[name] for name in seconds)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    peak = (torch.cuda.max_memory_allocated() if DEVICE.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    metrics["memory_gb"] = over_ranks([peak], dist.ReduceOp.MAX)[0] / 1e9
    metrics["learning_rate"] = run.optimizer.param_groups[0]["lr"]
    made = [update for update in updates if update["updated"]] or updates
    means = {name: fmean(update[name] for update in made) for name in made[0]}
    means |= {"updated": sum(update["updated"] for update in updates),
              "non_finite": updates[-1]["non_finite"], **measured}
    # What there is no number for is null in the file: JSON has no NaN.
    numbers = {name: value if math.isfinite(value) else None for name, value in means.items()}
    return metrics | numbers


def evaluation_metrics(best: list[float], solved: list[float], groups: list[list],
                       task) -> dict[str, float | None]:
    """`best`, `solved`: for each question whether its best answer solves it, and how many do."""
    answers = [answer for group in groups for answer in group]
    values = {**{part: [answer.parts[part] for answer in answers] for part in task.REWARD_WEIGHTS},
              "reward": [answer.reward for answer in answers],
              "completion_length": [len(answer.completion_ids) for answer in answers],
              "truncated": [answer.truncated for answer in answers]}
    metrics: dict[str, float | None] = {}
    for name, each in (("best_of_n", best), ("solved", solved)):
        metrics[f"eval/{name}"] = fmean(each)
        interval = 1.96 * stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
        metrics[f"eval/{name}_ci95"] = interval
    kinds = [str(group[0].row.get("group", "")) for group in groups]
    for kind in sorted(set(kinds) - {""}):
        own = [value for value, of in zip(solved, kinds) if of == kind]
        metrics[f"eval/solved/{kind}"] = fmean(own)
    return metrics | {f"eval/{name}": fmean(each) for name, each in values.items()}
