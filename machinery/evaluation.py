"""What is measured of an evaluation: means, their intervals, best of n and pass at k."""

import math
from statistics import fmean, stdev

from machinery.metrics import flat, parts_of, rewards_of
from machinery.tasks import Task


def evaluation_metrics(groups: list[list], task: Task) -> dict[str, float]:
    """Returns the metrics of all answers to the held-out questions, one group for each question."""
    answers = flat(groups)
    best = []
    solved = []
    num_right = []
    for group in groups:
        # Best of n: does the answer with the highest reward solve the question?
        best_answer = max(group, key=lambda answer: answer.reward)
        best.append(best_answer.reward_parts[task.SOLVED])
        solved_of_group = parts_of(group, task.SOLVED)
        solved.append(fmean(solved_of_group))
        num_right.append(sum(value >= 1 for value in solved_of_group))

    metrics = {}
    for name, values in (("best_of_n", best), ("solved", solved)):
        low, high = wilson_interval(values, len(answers))
        metrics[f"eval/{name}"] = fmean(values)
        metrics[f"eval/{name}_low"] = low
        metrics[f"eval/{name}_high"] = high
    metrics |= pass_at_k(num_right, len(groups[0]))
    metrics |= solved_by_kind(groups, solved)
    for part in task.REWARD_WEIGHTS:
        metrics[f"eval/{part}"] = fmean(parts_of(answers, part))
    metrics["eval/reward"] = fmean(rewards_of(answers))
    metrics["eval/completion_length"] = fmean(answer.num_tokens for answer in answers)
    metrics["eval/truncated"] = fmean(answer.is_truncated for answer in answers)
    return metrics


def wilson_interval(values: list[float], most: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval for the mean of values from 0 to 1.

    It is the interval of n samples of 0 or 1, where n is how many such samples would have as much
    variance as these values: at least one for each value, and at most `most`."""
    mean = fmean(values)
    n = len(values)
    variance = stdev(values) ** 2 if len(values) > 1 else 0.0
    if variance:
        n = min(most, max(n, mean * (1 - mean) * n / variance))
    z = 1.96**2 / n
    spread = z * mean * (1 - mean) + z**2 / 4
    centre = (mean + z / 2) / (1 + z)
    half_width = math.sqrt(spread) / (1 + z)
    low = max(0.0, centre - half_width)
    high = min(1.0, centre + half_width)
    return low, high


def pass_at_k(num_right: list[int], n: int) -> dict[str, float]:
    """Of k answers chosen from the n to a question, is at least one right? Returns the share of
    questions for k = 1, 2, 4, ... and n."""
    ks = []
    k = 1
    while k < n:
        ks.append(k)
        k *= 2
    ks.append(n)
    metrics = {}
    for k in ks:
        num_choices = math.comb(n, k)
        all_wrong = [math.comb(n - right, k) / num_choices for right in num_right]
        metrics[f"eval/pass_at_{k}"] = 1 - fmean(all_wrong)
    return metrics


def solved_by_kind(groups: list[list], solved: list[float]) -> dict[str, float]:
    """Returns the share of solved answers for each value of "group" in the rows."""
    by_kind: dict[str, list[float]] = {}
    for group, solved_of_group in zip(groups, solved, strict=True):
        kind = str(group[0].question.row.get("group", ""))
        if kind:
            by_kind.setdefault(kind, []).append(solved_of_group)
    metrics = {}
    for kind in sorted(by_kind):
        metrics[f"eval/solved/{kind}"] = fmean(by_kind[kind])
    return metrics
