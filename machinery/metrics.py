"""The instruments: what's measured in a step and in an evaluation, and what the first step says.

They change nothing. docs/read.md says what each number means."""

import math
import resource
import sys
from collections.abc import Iterator
from itertools import chain, islice
from statistics import fmean, pstdev, stdev
from typing import Any, ClassVar

import torch
from torch import nn

from machinery.errors import SharedError
from machinery.passes import measure_in_batches
from machinery.ranks import DEVICE, WORLD_SIZE, max_over_ranks, sum_over_ranks
from machinery.settings import Config, TrainingSettings, is_due
from machinery.sharding import unsharded
from machinery.tasks import Task, grade

# At this mean gap (in nats) or more, sampler and policy are different models (docs/read.md).
LARGE_GAP = {"float32": 1e-3, "mixed": 0.05, "bfloat16": 0.05}
MOVED = 1e-6  # A token moved if its log-probability changed by more than this.
GROUPS_GRADED_AGAIN = 4  # on each rank, with two answers of each group
MOST_SKIPPED_STEPS = 5  # in a row
MOST_GROUPS = 0.95  # A step of 16 groups may learn from a single one.


# ---------------------------------------------------------------- of an update

class UpdateStatistics:
    """Adds up over micro-batches what is reported about an update."""

    OF_NOTHING: ClassVar[dict[str, float]] = {  # where there was nothing to learn from
        "loss": 0.0,
        "entropy": math.nan,
        "grad_norm": math.nan,
        "updated": 0,
        "non_finite": 0,
    }

    def __init__(self):
        self.sums: dict[str, Any] = {}

    @torch.no_grad()
    def add(
        self, loss: torch.Tensor, entropies: torch.Tensor, watched: dict[str, torch.Tensor]
    ) -> None:
        """Adds a micro-batch. `entropies` has one value per token, (tokens,)."""
        values = {"loss": loss, "entropy": entropies.sum(), "tokens": len(entropies), **watched}
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def summary(self, grad_norm: torch.Tensor) -> dict[str, float]:
        """Returns the update's statistics over all ranks. Entropy, KL and the clipped share are
        means over the tokens that were learned from. Collective."""
        grad_norm = float(unsharded(grad_norm))
        totals = sum_over_ranks({name: float(total) for name, total in self.sums.items()})
        loss = totals.pop("loss")
        num_tokens = totals.pop("tokens")
        is_finite = math.isfinite(grad_norm) and math.isfinite(loss)  # The same on every rank.
        return {
            "loss": loss,
            **{name: total / num_tokens for name, total in totals.items()},
            "grad_norm": grad_norm,
            "updated": int(is_finite),
            "non_finite": int(not is_finite),
        }


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns means over the updates made on one batch."""
    made = [update for update in updates if update["updated"]] or updates
    means = {}
    for name in made[0]:
        means[name] = fmean(update[name] for update in made)
    if "kl" in means:  # Its estimate is right only for the policy that sampled the answers.
        means["kl"] = made[0]["kl"]
    means["updated"] = sum(update["updated"] for update in updates)
    means["non_finite"] = updates[-1]["non_finite"]
    return means


def count_skipped(num_skipped: int, update: dict[str, float], step: int) -> int:
    """Returns how many steps in a row had a gradient that isn't finite. Too many end the run. A
    step with nothing to learn from doesn't count."""
    if not update["non_finite"]:
        return 0 if update["updated"] else num_skipped
    num_skipped += 1
    if num_skipped == MOST_SKIPPED_STEPS:
        raise SharedError(
            f"the gradient was not finite in {num_skipped} steps in a row, up to step {step}: "
            "lower training.learning_rate, and start over with a new run.name")
    return num_skipped


# ---------------------------------------------------------------- of a step

def step_metrics(
    run: Any, groups: list[list], answers: list, updates: list[dict[str, float]]
) -> dict[str, float | None]:
    """Returns the metrics of a step over all ranks. `answers` are the ones that count in the loss.
    In step 1, and before an evaluation, it makes one more forward pass. In step 1 it also grades a
    few answers again. Collective."""
    learned = [answer for answer in answers if answer.old_log_probs is not None]
    metrics = sampling_metrics(groups, run.task) | memory_metrics()
    metrics |= update_metrics(updates) | sampler_metrics(learned)
    if run.step == 1 or is_due(run.step, run.config.validation.every, run.config):
        metrics |= change_metrics(run.policy.module, groups, learned, run.config.training)
    if run.step == 1:
        metrics |= grading_metrics(run.task, groups)
    for name, value in metrics.items():
        if not math.isfinite(value):
            metrics[name] = None  # JSON has no NaN.
    return metrics


def sampling_metrics(groups: list[list], task: Task) -> dict[str, float]:
    """Returns means over the step's questions or answers on all ranks. Collective."""
    answers = list(chain(*groups))
    rewards = [[answer.reward for answer in group] for group in groups]
    means = {
        "reward": fmean(answer.reward for answer in answers),
        "reward_std": fmean(pstdev(values) for values in rewards),
    }
    for part in task.REWARD_WEIGHTS:
        means[f"reward/{part}"] = fmean(parts_of(answers, part))
        means[f"reward_std/{part}"] = fmean(pstdev(parts_of(group, part)) for group in groups)
    solved = [parts_of(group, task.SOLVED) for group in groups]
    means["solved"] = fmean(parts_of(answers, task.SOLVED))
    means["groups_all_solved"] = fmean(min(parts) >= 1 for parts in solved)
    means["groups_none_solved"] = fmean(max(parts) <= 0 for parts in solved)
    means["groups_without_signal"] = fmean(min(values) == max(values) for values in rewards)
    means["completion_length"] = fmean(answer.num_tokens for answer in answers)
    means["truncated"] = fmean(answer.is_truncated for answer in answers)
    means["tokens"] = sum(answer.num_tokens for answer in answers)
    # All ranks have equally many questions, so the mean of their means is the overall mean.
    totals = sum_over_ranks(means)
    metrics = {name: total / WORLD_SIZE for name, total in totals.items()}
    metrics["tokens"] = totals["tokens"]
    return metrics


def memory_metrics() -> dict[str, float]:
    """Returns the most memory that any rank has needed so far, in GB. Collective."""
    if DEVICE.type == "cuda":
        num_bytes = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes.
        num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max_over_ranks({"memory_gb": num_bytes / 1e9})


def sampler_metrics(learned: list) -> dict[str, float]:
    """Compares the log-probabilities that the sampler and the policy give the tokens being learned
    from, before the update. Returns the mean and the largest difference. Collective."""
    differences = [torch.zeros(0)]
    for answer in learned:
        differences.append((answer.sampler_log_probs - answer.old_log_probs.cpu()).abs())
    difference = torch.cat(differences).double()  # (tokens,)
    sums = sum_over_ranks({
        "learned": len(learned), "tokens": len(difference), "difference": float(difference.sum())})
    largest = float(difference.max()) if len(difference) else 0.0
    largest = max_over_ranks({"largest": largest})["largest"]
    return {
        "learned": sums["learned"],
        "sampler_gap": share(sums["difference"], sums["tokens"]),
        "sampler_gap_max": largest if sums["tokens"] else math.nan,
    }


def change_metrics(
    policy: nn.Module, groups: list[list], learned: list, training: TrainingSettings
) -> dict[str, float]:
    """Returns how the update changed the log-probabilities of answers above and below their group's
    mean reward, or with `distill`, of tokens that the teacher likes better or less. It doesn't look
    at advantages, because the code that computed them may be what's wrong. Collective."""
    directions = reward_directions(groups)
    raised = []   # changes of the tokens that should become more likely
    lowered = []  # changes of the tokens that should become less likely
    for batch, log_probs, _ in measure_in_batches(policy, learned, training):
        lengths = [answer.num_tokens for answer in batch]
        for answer, log_probs_now in zip(batch, log_probs.split(lengths), strict=True):
            change = log_probs_now - answer.old_log_probs
            direction = torch.full_like(change, directions.get(id(answer), 0.0))
            if training.learning_type == "distill":
                direction = answer.reference_log_probs - answer.old_log_probs
            raised.append(change[direction > 0])
            lowered.append(change[direction < 0])
    raised = torch.cat(raised)
    lowered = torch.cat(lowered)
    # If all rewards of a group are equal, its direction is 0, and it's left out. It may still learn
    # from a KL penalty.
    changes = torch.cat([raised, lowered])
    sums = sum_over_ranks({
        "tokens": len(changes),
        "not_finite": float((~changes.isfinite()).sum()),
        "moved": float((changes.abs() > MOVED).sum()),
        "change": float(changes.abs().sum()),
        "change_as_meant": float(raised.relu().sum() + (-lowered).relu().sum()),
        "rewarded": len(raised),
        "change_rewarded": float(raised.sum()),
        "punished": len(lowered),
        "change_punished": float(lowered.sum()),
    })
    return {
        "change_not_finite": share(sums["not_finite"], sums["tokens"]),
        "moved": share(sums["moved"], sums["tokens"]),
        "change_size": share(sums["change"], sums["tokens"]),
        "change_as_meant": share(sums["change_as_meant"], sums["change"]),
        "change_rewarded": share(sums["change_rewarded"], sums["rewarded"]),
        "change_punished": share(sums["change_punished"], sums["punished"]),
    }


def reward_directions(groups: list[list]) -> dict[int, float]:
    """Returns, by the id of the answer, its reward minus its group's mean. If all rewards of a
    group are equal, that's exactly 0."""
    directions = {}
    for group in groups:
        rewards = [answer.reward for answer in group]
        mean_reward = rewards[0] if max(rewards) == min(rewards) else fmean(rewards)
        for answer in group:
            directions[id(answer)] = answer.reward - mean_reward
    return directions


def grading_metrics(task: Task, groups: list[list]) -> dict[str, float]:
    """Grades a few answers twice more. Returns the share whose reward isn't what training used, or
    nan if the reward is random, so that two gradings may differ. Collective."""
    sums = {"graded": 0, "wrong": 0, "random": 0}
    # Where all rewards are equal, exchanging them would change nothing.
    most_spread = sorted(groups, key=spread_of_rewards, reverse=True)
    for group in most_spread[:GROUPS_GRADED_AGAIN]:
        ranked = sorted(group, key=lambda answer: answer.reward)
        for answer in (ranked[0], ranked[-1]):
            parts = grade(task, answer.completion, answer.question.row)
            reward = sum(weight * parts[part] for part, weight in task.REWARD_WEIGHTS.items())
            is_same = math.isclose(reward, answer.reward, abs_tol=1e-9)
            sums["graded"] += 1
            sums["wrong"] += parts != answer.reward_parts or not is_same
            sums["random"] += parts != grade(task, answer.completion, answer.question.row)
    sums = sum_over_ranks(sums)
    wrong = math.nan if sums["random"] else share(sums["wrong"], sums["graded"])
    return {"graded_wrongly": wrong}


def spread_of_rewards(group: list) -> float:
    rewards = [answer.reward for answer in group]
    return max(rewards) - min(rewards)


def share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def parts_of(answers: list, part: str) -> list[float]:
    return [answer.reward_parts[part] for answer in answers]


# ---------------------------------------------------------------- of an evaluation

def evaluation_metrics(groups: list[list], task: Task) -> dict[str, float]:
    """Returns the metrics of all answers to the held-out questions, one group per question."""
    answers = list(chain(*groups))
    best = []
    solved = []
    for group in groups:
        best_answer = max(group, key=lambda answer: answer.reward)
        best.append(best_answer.reward_parts[task.SOLVED])
        solved.append(fmean(parts_of(group, task.SOLVED)))
    metrics = {}
    for name, values in (("best_of_n", best), ("solved", solved)):
        low, high = wilson_interval(values, len(answers))
        metrics[f"eval/{name}"] = fmean(values)
        metrics[f"eval/{name}_low"] = low
        metrics[f"eval/{name}_high"] = high
    metrics |= pass_at_k(groups, task)
    metrics |= solved_by_kind(groups, solved)
    for part in task.REWARD_WEIGHTS:
        metrics[f"eval/reward/{part}"] = fmean(parts_of(answers, part))
    metrics["eval/reward"] = fmean(answer.reward for answer in answers)
    metrics["eval/completion_length"] = fmean(answer.num_tokens for answer in answers)
    metrics["eval/truncated"] = fmean(answer.is_truncated for answer in answers)
    return metrics


def wilson_interval(values: list[float], most: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval for the mean of values from 0 to 1.

    It's the interval of n samples of 0 or 1, where n is how many such samples would vary as much as
    these values: at least one for each value, and at most `most`."""
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


def pass_at_k(groups: list[list], task: Task) -> dict[str, float]:
    """Of k answers chosen from the n to a question, is at least one right? Returns the share of
    questions for k = 1, 2, 4, ... and n."""
    n = len(groups[0])
    num_right = []
    for group in groups:
        num_right.append(sum(value >= 1 for value in parts_of(group, task.SOLVED)))
    metrics = {}
    powers_of_2 = [2**i for i in range(n.bit_length())]  # up to n
    for k in sorted({*powers_of_2, n}):
        num_choices = math.comb(n, k)
        all_wrong = [math.comb(n - right, k) / num_choices for right in num_right]
        metrics[f"eval/pass_at_{k}"] = 1 - fmean(all_wrong)
    return metrics


def solved_by_kind(groups: list[list], solved: list[float]) -> dict[str, float]:
    """Returns the share of solved answers for each value of "group" in the rows."""
    by_kind: dict[str, list[float]] = {}
    for group, solved_of_group in zip(groups, solved, strict=True):
        kind = str(group[0].question.row.get("group", ""))
        by_kind.setdefault(kind, []).append(solved_of_group)
    return {f"eval/solved/{kind}": fmean(by_kind[kind]) for kind in sorted(by_kind) if kind}


# ---------------------------------------------------------------- what the first step says

def look_at_first_step(metrics: dict[str, float | None], config: Config) -> list[str]:
    """Returns the lines below the first step: what was measured, and what's off. `metrics` has the
    numbers of the step and of the evaluation before it."""
    # All comparisons with nan are false, so a missing number is never a bad sign.
    numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
    signs = list(signs_of_answers(numbers, config))
    # Of the update there's at most one, because an earlier one explains the later ones.
    signs += islice(signs_of_update(numbers, config), 1)
    return measured(numbers, config) + ([f"! {sign}" for sign in signs] or ["nothing is off"])


def measured(numbers: dict[str, float], config: Config) -> list[str]:
    def shown(name: str, form: str) -> str:
        value = numbers.get(name, math.nan)
        return "n/a" if math.isnan(value) else format(value, form)

    rise = shown("change_rewarded", "+.5f")
    fall = shown("change_punished", "+.5f")
    as_meant = shown("change_as_meant", ".0%")
    if config.training.learning_type == "distill":
        groups = (
            f"KL(student || teacher) is {shown('kl', '.2g')} nats per token on average. "
            f"{shown('teacher_lower', '.0%')} of the tokens are less likely under the teacher than "
            "under the student")
        change = (
            f"on average, log p of a token changed by {rise} where the teacher gives it a higher "
            f"probability, and by {fall} where the teacher gives it a lower one. {as_meant} of the "
            "total change is toward the teacher")
    else:
        groups = (
            f"{shown('groups_without_signal', '.0%')} of the groups have no signal. All answers "
            f"are right in {shown('groups_all_solved', '.0%')} of the groups, and none in "
            f"{shown('groups_none_solved', '.0%')}")
        change = (
            f"on average, log p of a token changed by {rise} in answers above their group's mean "
            f"reward, and by {fall} in answers below it. {as_meant} of the total change is in the "
            "direction of the reward")
    if not numbers["learned"]:
        change = "this step had nothing to learn from, so no log p has changed"
    truncation = (
        f"{shown('truncated', '.0%')} of the answers are truncated; the others end on their own")
    sampler = (
        f"in log p of a sampled token, sampler and policy differ by {shown('sampler_gap', '.1g')} "
        f"nats on average, and by at most {shown('sampler_gap_max', '.1g')}")
    return [truncation, groups, change, sampler]


def is_large_gap(sampler_gap: float, config: Config) -> bool:
    return sampler_gap >= LARGE_GAP[config.model.precision]


# Each sign names the keys to look at.

def signs_of_answers(numbers: dict[str, float], config: Config) -> Iterator[str]:
    if numbers["truncated"] >= 0.9:
        yield ("too many answers are truncated: raise training.max_new_gen_tokens. It may also be "
               "that the model does not know its stop token: for a chat model, set "
               "data.prompt_style to chat")
    if is_large_gap(numbers["sampler_gap"], config):
        yield ("the answers were not sampled from the policy being trained: check model.precision "
               "and model.attention, and whether log_probs_of_tokens divides the logits by "
               "sampling.temperature")
    if config.training.learning_type == "distill":  # There, rewards teach nothing.
        if numbers.get("kl", math.nan) <= 1e-6:
            yield ("the teacher gives the same probabilities as the student: check that "
                   "training.teacher names the right model")
        return
    # The evaluation before it asked more questions. If that solved a few per cent, a step that
    # solved none had bad luck.
    solved_before = numbers.get("eval/solved", math.nan)
    is_bad_luck = config.data.validation is None and 0.01 <= solved_before <= 0.1
    if numbers["groups_none_solved"] >= MOST_GROUPS and not is_bad_luck:
        yield ("hardly any question was solved by any of its answers. If this continues, the "
               "questions are too hard: use easier ones (data.dataset), a better model "
               "(model.name), or more answers to each question (training.k_best_of_n)")
    if numbers["groups_all_solved"] >= MOST_GROUPS:
        yield ("nearly every question was solved by all of its answers. If this continues, the "
               "questions are too easy: use harder ones (data.dataset)")
    is_compared = config.training.learning_type == "grpo"
    if is_compared and numbers["groups_without_signal"] >= MOST_GROUPS and not is_bad_luck:
        yield ("in nearly all groups, the answers have equal rewards, which teach grpo nothing, "
               "whatever the learning rate. If this continues, check task.reward_weights, "
               "training.k_best_of_n and data.dataset")
    if numbers["graded_wrongly"] >= 0.2:  # Fewer may be a reward that's sometimes random.
        yield (f"{numbers['graded_wrongly']:.0%} of the answers that were graded again got a "
               "different reward: check in score that each answer has the reward that the task "
               "gives it. If your code changes rewards, this may be intended")
    for name, mean in numbers.items():
        some_before = is_bad_luck and numbers.get(f"eval/{name}", 0) > 0
        if name.startswith("reward/") and mean == 0 and not some_before:
            yield (f"{name} is 0 on average: if it is 0 for every answer, check the task's "
                   "reward_function, task.reward_weights, sampling.temperature, and whether "
                   "data.prompt_style suits the model")


def signs_of_update(numbers: dict[str, float], config: Config) -> Iterator[str]:
    at_full_rate = numbers["change_size"] * max(1, config.training.warmup_steps)
    is_small = at_full_rate <= 2e-4  # The smallest we saw in a healthy run is 6e-4.
    is_exact = config.model.precision == "float32"  # Elsewhere rounding hides small changes.
    liked, where = "answers above their group's mean reward", "compute_advantages"
    if config.training.learning_type == "distill":
        liked, where = "tokens that the teacher prefers", "reference_advantages"
    if numbers["non_finite"] == 1:
        yield ("the gradient is not finite, so the update was skipped: check model.precision, and "
               "whether the model in model.name gives finite numbers")
    if numbers["learned"] == 0 and numbers["groups_without_signal"] < 1:
        yield ("rewards differ, but no answer was learned from: check compute_advantages and "
               "is_learned_from. With sil, an answer needs a reward above 0")
    if numbers["grad_norm"] == 0:
        yield ("the gradient is 0: either there was nothing to learn, or the answers do not depend "
               "on the weights being trained. Check model.lora_rank and model.lora_targets")
    if numbers["change_not_finite"] > 0:
        yield "log-probabilities are not finite after the update: lower training.learning_rate"
    if config.model.precision == "bfloat16" and not config.model.lora_rank:
        yield "weights in bfloat16 lose small updates: set model.precision to mixed"
    if numbers["moved"] <= 0.01 or (is_exact and is_small):
        yield ("almost nothing has changed: check training.learning_rate, training.warmup_steps "
               "and model.precision")
    if numbers["change_rewarded"] <= -0.02 or numbers["change_as_meant"] <= 0.3:
        yield (f"{liked} became less likely: check the signs in {where} and policy_loss, or lower "
               "training.learning_rate. Unless model.precision is float32, rounding may also be "
               "the cause. If you have changed the advantage, this may be intended")
