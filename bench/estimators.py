"""Compares estimators of the policy gradient with the gradient that they estimate.

    .venv/bin/python bench/estimators.py
        the tiny model, before training: a minute on two cores
    .venv/bin/python bench/estimators.py --config recipes/lab.yaml \\
            --model before=tiny/lab/model --model after=runs/<name>/best
        the lab model before and after its training, in tables

With one update a batch, every estimator is a weighted sum of gradients of log pi, one for each
answer. So one pool of answers with their gradients serves them all. The weights come from main.py's
own `compute_advantages` and `policy_loss`. A gradient is kept as a sketch: random signs in 4,096
buckets, which changes a cosine by about 0.02. Later updates of a batch are no such sums. They are
really made, with AdamW, from other questions.

Noise must not count as signal. So squared lengths and products are means over pairs of *different*
questions. Intervals of 95 % come from leaving out one question after the other (a jackknife)."""

import argparse
import copy
import dataclasses
import json
import math
import random
import sys
import textwrap
from pathlib import Path
from statistics import fmean, pvariance

import experiments
import harness
import kept
from harness import ROOT, load_config, main, torch
from matplotlib.figure import Figure
from tqdm import tqdm

from machinery.errors import UserError
from machinery.ranks import random_seed

BUCKETS = 4096
BATCH = 128  # answers in what we call one batch
ROUNDS = 2   # The answers of a pool are dealt into groups so often.
OWN = "what it optimises"
SOLVED = "what is solved"
COSINE, MEAN = f"batch, {OWN}", f"mean, {OWN}"  # with the true gradient
DIFFERENCE = "batch, difference from Dr. GRPO"
LOST = [None, None]  # A figure of which only noise is known.
MODEL_COLOURS = ["#fcd34d", "#ea580c", "#7c2d12"]  # of the bars
RUN_COLOUR, GREY = "#1d4ed8", "#525252"
DASHED = {"color": GREY, "linestyle": "--", "linewidth": 1, "zorder": 0.5}  # behind the bars
DPI = 160
# Whose bars are drawn.
SHOWN = ["divided by the answer length", "truncated answers masked", "format pays 0.0",
         "format pays 0.0, divided by the standard deviation",
         "format pays 0.0, divided by the mean (MaxRL)", "format pays 0.0, SIL, 2 best of 8",
         "KL 0.02 in the reward", "Dr. GRPO, G = 8", "G = 32", "only positive advantages",
         "divided by both, as in GRPO", "G = 2", "only negative advantages",
         "divided by the mean (MaxRL)", "SIL, 2 best of 8", "divided by the standard deviation"]
# The seeds of the runs, as bench/experiments.py looks them up.
SEEDS = argparse.Namespace(keys=[], seeds=[0, 1, 2])


@dataclasses.dataclass(frozen=True)
class Estimator:
    G: int = 8
    keys: dict = dataclasses.field(default_factory=dict)  # of `training`, over Dr. GRPO's
    change: str = ""                                      # of the advantages, see `changed`
    pays: dict = dataclasses.field(default_factory=dict)  # over the task's REWARD_WEIGHTS
    temperature: float | None = None                      # at which answers are sampled


def sil(k: int) -> Estimator:
    return Estimator(keys={"learning_type": "sil", "k_best_of_n": [k, 8]})


DEFAULT = "Dr. GRPO, G = 8"
NO_FORMAT = {"format": 0.0}
ESTIMATORS = {
    "G = 2": Estimator(2),
    "G = 4": Estimator(4),
    DEFAULT: Estimator(8),
    "G = 16": Estimator(16),
    "G = 32": Estimator(32),
    "G = 64": Estimator(64),
    "no baseline": Estimator(change="no baseline"),
    "leave one out (RLOO)": Estimator(change="leave one out"),
    "divided by the standard deviation": Estimator(keys={"scale_rewards": "group"}),
    "divided by the answer length": Estimator(keys={"loss_normalizer": "sequence"}),
    "divided by both, as in GRPO": Estimator(
        keys={"scale_rewards": "group", "loss_normalizer": "sequence"}),
    "divided by the mean (MaxRL)": Estimator(keys={"scale_rewards": "mean"}),
    "truncated answers masked": Estimator(keys={"mask_truncated": True}),
    "only positive advantages": Estimator(change="only positive"),
    "only negative advantages": Estimator(change="only negative"),
    "SIL, 1 best of 8": sil(1),
    "SIL, 2 best of 8": sil(2),
    "SIL, 4 best of 8": sil(4),
    "format pays 0.0": Estimator(pays=NO_FORMAT),
    "format pays 0.0, divided by the standard deviation": Estimator(
        keys={"scale_rewards": "group"}, pays=NO_FORMAT),
    "format pays 0.0, divided by the mean (MaxRL)": Estimator(
        keys={"scale_rewards": "mean"}, pays=NO_FORMAT),
    "format pays 0.0, SIL, 2 best of 8": dataclasses.replace(sil(2), pays=NO_FORMAT),
    "format pays 1.0": Estimator(pays={"format": 1.0}),
    "temperature 0.6": Estimator(temperature=0.6),
    "temperature 1.4": Estimator(temperature=1.4),
    "KL 0.02 in the reward": Estimator(keys={"kl_beta": 0.02, "kl_in": "reward"}),
    "KL 0.02 in the loss": Estimator(keys={"kl_beta": 0.02, "kl_in": "loss"}),
}
# Which update of a batch, and `training.clip`.
LATER = {
    "second update": (2, None),
    "second update, clipped": (2, (0.2, 0.2)),
    "fourth update": (4, None),
    "fourth update, clipped": (4, (0.2, 0.2)),
}


# ---------------------------------------------------------------- a pool of answers

class Sketch:
    """Turns a model's gradients into BUCKETS numbers each."""

    def __init__(self, model: torch.nn.Module):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        size = sum(each.numel() for each in self.parameters)
        stream = torch.Generator().manual_seed(0)
        self.buckets = torch.randint(BUCKETS, (size,), generator=stream)
        zeros_and_ones = torch.randint(2, (size,), generator=stream)
        self.signs = 2 * zeros_and_ones.float() - 1

    def of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
        sums = flat.new_zeros(BUCKETS)
        return sums.index_add_(0, self.buckets, flat * self.signs)

    def of_value(self, value: torch.Tensor) -> torch.Tensor:
        return self.of(torch.autograd.grad(value, self.parameters, retain_graph=True))

    def of_penalty(self, log_probs: torch.Tensor, answer: main.Trajectory, training,
                   kl_in: str) -> torch.Tensor:
        """Returns what a KL term of weight 1 adds in a batch of this answer alone."""
        with_kl = training.model_copy(update={"kl_beta": 1.0, "kl_in": kl_in})
        blank = dataclasses.replace(answer, advantage=0.0)
        totals = {"answers": 1, "tokens": answer.num_tokens}
        loss, _ = main.policy_loss(log_probs, [blank], totals, with_kl)
        return self.of_value(-loss)


@dataclasses.dataclass
class Pool:
    """Groups of answers. `sketches` has "log pi" of each answer, and with a reference model its KL
    terms, "reward" and "loss": (questions, answers, BUCKETS)."""

    groups: list[list[main.Trajectory]]
    sketches: dict[str, torch.Tensor]


def questions_of(run: main.Run, count: int) -> list[main.Question]:
    rows = run.training_rows
    if count > len(rows):
        raise UserError(
            f"{count} questions are needed, and there are {len(rows)} to train on: see --questions")
    chosen = random.Random(run.config.training.seed).sample(range(len(rows)), count)
    return [main.make_question(run, rows[index]) for index in chosen]


def sampled_groups(run: main.Run, questions: list, G: int) -> list[list[main.Trajectory]]:
    groups = main.sample(run, questions, G)
    main.score(run, groups)
    return groups


def seed_sampling(run: main.Run, purpose: str) -> None:
    torch.manual_seed(random_seed(run.config.training.seed, 0, purpose))


def pool_of(run: main.Run, questions: list, num_answers: int, reference=None) -> Pool:
    seed_sampling(run, "estimators")
    groups = sampled_groups(run, questions, num_answers)
    training = training_of(run.config, Estimator())
    sketch = Sketch(run.model)
    policy = run.policy.module.eval()
    sketches = {"log pi": [], "reward": [], "loss": []} if reference else {"log pi": []}
    for group in tqdm(groups, desc="gradients", mininterval=10):
        known = {}  # Equal answers to a question have equal gradients.
        for answer in group:
            key = tuple(answer.completion_ids)
            if key not in known:
                log_probs, _ = policy([answer])
                known[key] = {"log pi": sketch.of_value(log_probs.sum())}
                if reference:
                    answer.reference_log_probs, _ = reference([answer])
                    for kl_in in ("reward", "loss"):
                        known[key][kl_in] = sketch.of_penalty(log_probs, answer, training, kl_in)
            for name, own in known[key].items():
                sketches[name].append(own)
    shape = (len(questions), num_answers, BUCKETS)
    return Pool(groups, {name: torch.stack(own).view(shape) for name, own in sketches.items()})


# ---------------------------------------------------------------- an estimator on a pool

def training_of(config, estimator: Estimator):
    """Returns the settings of Dr. GRPO and the estimator's keys, whatever the run was."""
    plain = {"learning_type": "grpo", "scale_rewards": "none", "loss_normalizer": "max_length",
             "updates_per_batch": 1, "kl_beta": 0.0, "mask_truncated": False,
             "k_best_of_n": [estimator.G, estimator.G]}
    return config.training.model_copy(update=plain | estimator.keys)


def reward_of(answer: main.Trajectory, task, estimator: Estimator) -> float:
    reward = 0.0
    for part, weight in (task.REWARD_WEIGHTS | estimator.pays).items():
        reward += weight * answer.reward_parts[part]
    return reward


def changed(answer: main.Trajectory, G: int, change: str) -> float:
    if change == "no baseline":
        return answer.reward
    if change == "leave one out":
        return answer.advantage * G / (G - 1)
    if change == "only positive":
        return max(answer.advantage, 0.0)
    if change == "only negative":
        return min(answer.advantage, 0.0)
    return answer.advantage


def counted_answers(group: list, training, change: str) -> list[main.Trajectory]:
    """Sets the advantages of a group. Returns the answers that count in the loss."""
    for answer in group:
        answer.advantage = 0.0
    counted = main.compute_advantages(group, training)
    for answer in counted:
        answer.advantage = changed(answer, training.group_size, change)
    return counted


def learned_and_totals(counted: list, training) -> tuple[list[main.Trajectory], dict]:
    """Returns what `main.learn` hands to `policy_gradient`."""
    learned = [answer for answer in counted if main.is_learned_from(answer, training)]
    num_tokens = sum(answer.num_tokens for answer in counted)
    return learned, {"answers": len(counted), "tokens": num_tokens, "learned": len(learned)}


def weights_of(group: list, training, change: str) -> list[float]:
    """Returns by how much a batch of this group multiplies each answer's gradient of log pi. KL
    terms are left out."""
    training = training.model_copy(update={"kl_beta": 0.0})
    counted = counted_answers(group, training, change)
    learned, totals = learned_and_totals(counted, training)
    weights = dict.fromkeys(map(id, group), 0.0)
    if learned:
        lengths = [answer.num_tokens for answer in learned]
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        loss, _ = main.policy_loss(log_probs, learned, totals, training)
        loss.backward()
        for answer, of_tokens in zip(learned, log_probs.grad.split(lengths), strict=True):
            weights[id(answer)] = -of_tokens[0].item()  # It is the same for all its tokens.
    return list(weights.values())


def by_question(pool: Pool, training, change: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Deals each question's answers into groups of G. Returns the mean gradient of the groups,
    (questions, BUCKETS), and the mean of their squared lengths, (questions,)."""
    G = training.group_size
    stream = random.Random(0)
    means = []
    squares = []
    for question, group in enumerate(pool.groups):
        gradients = []
        for _ in range(ROUNDS):
            order = stream.sample(range(len(group)), len(group))
            for start in range(0, len(order) - G + 1, G):
                chosen = order[start:start + G]
                gradients.append(gradient_of_group(pool, question, chosen, training, change))
        of_question = torch.stack(gradients)  # (groups, BUCKETS)
        means.append(of_question.mean(0))
        squares.append(of_question.square().sum(1).mean())
    return torch.stack(means), torch.stack(squares)


def gradient_of_group(
    pool: Pool, question: int, chosen: list[int], training, change: str
) -> torch.Tensor:
    """Returns the gradient of these answers to a question, (BUCKETS,)."""
    group = [pool.groups[question][i] for i in chosen]
    sketches = pool.sketches["log pi"][question, chosen]  # (G, BUCKETS)
    weights = torch.tensor(weights_of(group, training, change), dtype=sketches.dtype)
    gradient = weights @ sketches
    if training.kl_beta:
        penalties = pool.sketches[training.kl_in][question, chosen]  # (G, BUCKETS)
        gradient += training.kl_beta * penalties.mean(0)
    return gradient


def truth_of(values: list[list[float]], sketches: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the mean of a value, (questions, BUCKETS)."""
    values = torch.tensor(values, dtype=sketches.dtype)  # (questions, answers)
    advantages = values - values.mean(1, keepdim=True)
    sums = torch.einsum("qk,qkm->qm", advantages, sketches)
    num_answers = values.shape[1]
    return sums / (num_answers - 1)


def own_truth(pool: Pool, task, estimator: Estimator, training) -> torch.Tensor:
    """Returns the gradient of what the estimator optimises: its expected reward, at its own
    temperature, less its KL term. It is divided by L as in the loss."""
    rewards = []
    for group in pool.groups:
        rewards.append([reward_of(answer, task, estimator) for answer in group])
    truth = truth_of(rewards, pool.sketches["log pi"]) / training.max_new_gen_tokens
    if training.kl_beta:
        truth = truth + training.kl_beta * pool.sketches[training.kl_in].mean(1)
    return truth


def later_updates(run: main.Run, questions: list[main.Question]) -> dict[str, torch.Tensor]:
    """Returns the gradients of the updates in LATER, (batches, BUCKETS). Each batch begins with the
    same weights and a new optimizer."""
    run.optimizer.param_groups[0]["lr"] = run.config.training.learning_rate
    weights = copy.deepcopy(run.model.state_dict())
    new_optimizer = copy.deepcopy(run.optimizer.state_dict())
    found = {name: [] for name in LATER}
    seed_sampling(run, "later updates")
    for start in tqdm(range(0, len(questions), BATCH // 8), desc="later updates", mininterval=10):
        groups = sampled_groups(run, questions[start:start + BATCH // 8], 8)
        for clip in (None, (0.2, 0.2)):
            sketches = four_updates(run, groups, clip)
            for name, (update, own_clip) in LATER.items():
                if own_clip == clip:
                    found[name].append(sketches[update - 1])
            run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(copy.deepcopy(new_optimizer))
    return {name: torch.stack(sketches) for name, sketches in found.items()}


def four_updates(run: main.Run, groups: list, clip: tuple | None) -> list[torch.Tensor]:
    """Makes four updates with one batch. Returns the gradient of each, (BUCKETS,)."""
    sketch = Sketch(run.model)
    training = training_of(run.config, Estimator(keys={
        "updates_per_batch": 4, "clip": clip, "max_grad_norm": None, "ratio": "token"}))
    own_run = copy.copy(run)
    own_run.config = run.config.model_copy(update={"training": training})
    answers = []
    for group in groups:
        answers += counted_answers(group, training, "")
    for answer in answers:
        answer.old_log_probs = None
    learned, totals = learned_and_totals(answers, training)
    gradients = []
    for _ in range(4):
        main.policy_gradient(own_run, learned, totals)
        gradients.append(-sketch.of([parameter.grad for parameter in sketch.parameters]))
        run.optimizer.step()
    return gradients


# ---------------------------------------------------------------- signal and noise

def product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean product over all pairs of different questions. Two that are not equally many
    have no question in common."""
    products = a.sum(0) @ b.sum(0)
    num_pairs = len(a) * len(b)
    if len(a) == len(b):
        products -= (a * b).sum()
        num_pairs -= len(a)
    return (products / num_pairs).item()


def figures_of(means, squares, truths: dict, groups_a_batch: float) -> dict[str, float]:
    """Returns noise over signal of a batch, and cosines with the truths: of the mean of many
    batches, and of one batch."""
    signal = product(means, means)
    noise = max(squares.mean().item() - signal, 0.0) / groups_a_batch
    signal = max(signal, 1e-9 * noise, 1e-30)
    figures = {"noise": math.sqrt(noise / signal)}
    for name, truth in truths.items():
        along = product(means, truth) / math.sqrt(max(product(truth, truth), 1e-30))
        figures[f"mean, {name}"] = along / math.sqrt(signal)
        figures[f"batch, {name}"] = along / math.sqrt(signal + noise)
    return figures


def half_interval(values: list[float]) -> float:
    """Returns half of a figure's 95 % interval, from its values without one question each."""
    variance = (len(values) - 1) * pvariance(values)
    return 1.96 * math.sqrt(variance)


def without(i: int, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:i], tensor[i + 1:]])


def is_lost(gradients: torch.Tensor) -> bool:
    """Says whether the interval of the squared length reaches 0."""
    lengths = []
    for i in range(len(gradients)):
        others = without(i, gradients)
        lengths.append(product(others, others))
    return product(gradients, gradients) <= half_interval(lengths)


def with_intervals(means, squares, truths: dict, groups_a_batch: float,
                   beside: list[float] | None = None) -> tuple[dict, list[float] | None]:
    """Returns {figure: [value, half of its interval]}, and the cosine of a batch with all questions
    and without each. `beside` are these cosines of Dr. GRPO. Their difference is known better than
    either, if both come from the same questions."""
    whole = figures_of(means, squares, truths, groups_a_batch)
    parts = []
    for i in range(len(means)):
        known = {}
        for name, truth in truths.items():
            known[name] = without(i, truth) if len(truth) == len(means) else truth
        parts.append(figures_of(without(i, means), without(i, squares), known, groups_a_batch))
    found = {}
    for name, value in whole.items():
        half = half_interval([part[name] for part in parts])
        found[name] = [round(value, 4), round(half, 4)]
    if is_lost(means):
        for name in ("noise", *[f"mean, {name}" for name in truths]):
            found[name] = LOST
    for name, truth in truths.items():
        if is_lost(truth):
            found[f"mean, {name}"] = found[f"batch, {name}"] = LOST
    if found[COSINE] == LOST:
        return found, None
    cosines = [figures[COSINE] for figures in (whole, *parts)]
    if beside:
        if len(beside) == len(cosines):
            half = half_interval([a - b for a, b in zip(cosines[1:], beside[1:], strict=True)])
        else:
            half = math.hypot(half_interval(cosines[1:]), half_interval(beside[1:]))
        found[DIFFERENCE] = [round(cosines[0] - beside[0], 4), round(half, 4)]
    return found, cosines


# ---------------------------------------------------------------- a model

def pools_of(config, questions: list, num_answers: int, begun_as: str) -> dict:
    """Returns pools by temperature, and one with KL terms if the model has been trained."""
    run = harness.prepare(config)
    pools = {None: pool_of(run, questions, num_answers)}
    for temperature in (0.6, 1.4):
        sampling = config.sampling.model_copy(update={"temperature": temperature})
        own = harness.prepare(config.model_copy(update={"sampling": sampling}))
        pools[temperature] = pool_of(own, questions, num_answers // 2)
    if begun_as != config.model.name:
        model = config.model.model_copy(update={"name": begun_as})
        begun, _ = main.load_model(config.model_copy(update={"model": model}))
        reference = main.Policy(main.make_reference(begun, config), config)
        pools["KL"] = pool_of(run, questions, num_answers // 4, reference)
    return pools


def description_of(pool: Pool, right: list[list[float]]) -> dict:
    answers = []
    num_different = 0
    for group in pool.groups:
        answers += group
        num_different += len({tuple(answer.completion_ids) for answer in group})
    return {
        "solved": sorted(round(fmean(values), 3) for values in right),
        "different": round(num_different / len(answers), 3),
        "truncated": round(fmean(answer.is_truncated for answer in answers), 3),
        "tokens": round(fmean(answer.num_tokens for answer in answers), 1),
    }


def measured(config, num_questions: int, num_answers: int, num_batches: int,
             begun_as: str) -> dict:
    """Returns what docs/estimators.json holds of a model."""
    run = harness.prepare(config)
    questions = questions_of(run, num_questions + num_batches * BATCH // 8)
    pools = pools_of(config, questions[:num_questions], num_answers, begun_as)
    pool = pools[None]
    right = []
    for group in pool.groups:
        right.append([answer.reward_parts[run.task.SOLVED] for answer in group])
    solved = truth_of(right, pool.sketches["log pi"])
    figures, truths, beside = {}, {}, None
    for name in (DEFAULT, *[name for name in ESTIMATORS if name != DEFAULT]):
        estimator = ESTIMATORS[name]
        training = training_of(config, estimator)
        own_pool = pools.get("KL" if training.kl_beta else estimator.temperature)
        if own_pool is None or estimator.G > len(own_pool.groups[0]):
            continue
        own = own_truth(own_pool, run.task, estimator, training)
        truths[name] = {OWN: own, SOLVED: solved}
        set_rewards(own_pool, run.task, estimator)
        means, squares = by_question(own_pool, training, estimator.change)
        figures[name], cosines = with_intervals(
            means, squares, truths[name], BATCH / estimator.G, beside)
        if name == DEFAULT:
            beside = cosines
    later = later_updates(run, questions[num_questions:]) if num_batches else {}
    for name, batches in later.items():
        figures[name], _ = with_intervals(
            batches, batches.square().sum(1), truths[DEFAULT], 1, beside)
    known_to = {name: known_part(truth) for name, truth in truths[DEFAULT].items()}
    return description_of(pool, right) | {"known to": known_to, "estimators": figures}


def set_rewards(pool: Pool, task, estimator: Estimator) -> None:
    for group in pool.groups:
        for answer in group:
            answer.reward = reward_of(answer, task, estimator)


def known_part(truth: torch.Tensor) -> float:
    """Returns the cosine of what so many questions tell with what all questions would."""
    length = truth.mean(0).square().sum().item()
    return round(math.sqrt(max(0.0, product(truth, truth)) / length), 3)


# ---------------------------------------------------------------- tables

def description(found: dict) -> str:
    solved = found["solved"]
    hard = sum(each < 0.1 for each in solved)
    return (f"{100 * found['different']:.0f} % of answers differ, {fmean(solved):.2f} are right; "
            f"{hard} of {len(solved)} questions are solved less than one time in ten; the cosine "
            f"of the truth as known with the whole truth is {found['known to'][OWN]:.2f}")


def as_text(figure: list | None, style: str = ".2f") -> str:
    if figure is None:
        return ""
    if figure == LOST:
        return "lost in noise"
    return f"{figure[0]:{style}} ± {figure[1]:{style.lstrip('+')}}"


def as_table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(rows[0])}")
    return "\n".join(lines)


def table_of(models: dict[str, dict], first: str, second: str, heading: str, style: str) -> str:
    """Returns a row for each estimator, with two figures on each model."""
    head = ["estimator"]
    for title in models:
        head += [title, heading]
    rows = [head]
    for name in [*ESTIMATORS, *LATER]:
        row = [name]
        for figures in models.values():
            found = figures.get(name, {})
            row += [as_text(found.get(first)), as_text(found.get(second), style)]
        rows.append(row)
    return as_table(rows)


def cosines_table(models: dict[str, dict]) -> str:
    """Of one batch. The difference is that from Dr. GRPO."""
    return table_of(models, COSINE, DIFFERENCE, "difference", "+.3f")


def means_table(models: dict[str, dict]) -> str:
    """Of the mean of many batches."""
    return table_of(models, MEAN, "noise", "noise / signal", ".1f")


# ---------------------------------------------------------------- what runs made of it

# {estimator: its run}
RUN_OF = {name: name.replace("format pays 0.0", experiments.ANSWER_PAYS) for name in ESTIMATORS}


def ends_of_runs(records: dict) -> dict[str, list[float]]:
    """Returns {estimator: the share of held-out answers that its run solved in the end, with each
    seed}, best first, from what bench/experiments.py keeps."""
    ends = {}
    for name in ESTIMATORS:
        run = RUN_OF[name]
        titles = [experiments.title_of(run, seed, SEEDS) for seed in SEEDS.seeds]
        if all(title in records for title in titles):
            ends[name] = [records[title]["curve"][-1]["solved"] for title in titles]
    return dict(sorted(ends.items(), key=lambda item: -fmean(item[1])))


def verdict_of(difference: float, half_width: float) -> str:
    if abs(difference) <= half_width:
        return "could be chance"
    return "higher" if difference > 0 else "lower"


def verdicts_table(figures: dict, records: dict) -> str:
    """Returns a row for each estimator that has runs. Its cosine and the share that its run solved
    are compared with those of Dr. GRPO."""
    rows = [["estimator", "cosine of one batch", "share solved", "do they agree?", "each seed"]]
    for name, ends in ends_of_runs(records).items():
        if DIFFERENCE not in figures.get(name, {}):
            continue
        run = RUN_OF[name]
        claim = experiments.Claim("", "", experiments.SOLVED, more=run, less=DEFAULT)
        effect = experiments.effect_of(claim, records, SEEDS)
        end = [effect.difference, effect.half_width]
        cosine = figures[name][DIFFERENCE]
        of_cosine, of_run = verdict_of(*cosine), verdict_of(*end)
        rows.append([name, f"{as_text(cosine, '+.3f')}, {of_cosine}",
                     f"{as_text(end, '+.3f')}, {of_run}", "yes" if of_cosine == of_run else "no",
                     " ".join(f"{share:.3f}" for share in ends)])
    return as_table(rows)


# ---------------------------------------------------------------- pictures

def draw(models: dict[str, dict], records: dict, path: Path) -> None:
    """Draws the cosine of one batch for the estimators in SHOWN, sorted by that of the last model.
    Beside it is what the runs made of it."""
    last = list(models.values())[-1]
    names = sorted([name for name in SHOWN if name in last],
                   key=lambda name: last[name][COSINE][0] or 0.0, reverse=True)
    figure = Figure(figsize=(6, 0.55 * len(names) + 2), layout="constrained", facecolor="white")
    cosines, runs = figure.subplots(1, 2, sharey=True)
    draw_cosines(cosines, models, names)
    draw_runs(runs, ends_of_runs(records), names)
    for axes in (cosines, runs):
        axes.grid(axis="x", color="#d4d4d4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=12)
    cosines.set_ylim(len(names) - 0.4, -0.6)  # the first is at the top
    figure.legend(loc="outside lower center", ncols=3, fontsize=12, frameon=False)
    figure.savefig(path, dpi=DPI)


def draw_cosines(axes, models: dict[str, dict], names: list[str]) -> None:
    """Draws a bar for each estimator and model, with its interval."""
    thickness = 0.8 / len(models)
    for number, (title, figures) in enumerate(models.items()):
        shift = (number + 0.5) * thickness - 0.4
        bars = []
        for row, name in enumerate(names):
            figure = figures[name][COSINE] if name in figures else None
            if figure is None or figure == LOST:
                text = "lost in noise" if figure else "no KL term yet"
                axes.text(0.02, row + shift, text, va="center", fontsize=12, color=GREY,
                          bbox={"color": "white", "pad": 0})
            else:
                bars.append([row + shift, *figure])
        places, values, halves = zip(*bars) if bars else ([], [], [])
        axes.barh(places, values, thickness, xerr=halves, label=title,
                  color=MODEL_COLOURS[number % len(MODEL_COLOURS)])
    last = list(models.values())[-1]
    axes.axvline(last[DEFAULT][COSINE][0] or 0.0, label="Dr. GRPO", **DASHED)
    axes.axvline(0, color=GREY, linewidth=0.8)
    title = "Cosine of one batch\nwith the true gradient\n(lines: 95 % intervals)"
    axes.set_title(title, fontsize=12)
    axes.set_yticks(range(len(names)), [textwrap.fill(name, width=20) for name in names])


def draw_runs(axes, ends: dict[str, list[float]], names: list[str]) -> None:
    """Draws a circle for each seed of each run."""
    for row, name in enumerate(names):
        if name in ends:
            axes.plot(ends[name], [row] * len(ends[name]), "o", markersize=9, markeredgewidth=1.5,
                      markerfacecolor="none", color=RUN_COLOUR)
        else:
            axes.text(0.02, row, "no run", va="center", fontsize=12, color=GREY)
    if DEFAULT in ends:
        axes.axvline(fmean(ends[DEFAULT]), **DASHED)
    axes.set_title("Solved after 60\nsteps, one circle\nfor each seed", fontsize=12)
    axes.set_xlim(0, 0.5)


# ---------------------------------------------------------------- the command

def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", metavar="NAME=FOLDER",
                        help="may be given several times (default: tiny=tiny/model)")
    parser.add_argument("--questions", type=int, default=64, help="at least 3")
    parser.add_argument("--answers", type=int, default=64, help="to each question, at least 8")
    parser.add_argument("--batches", type=int, default=8, help="for later updates, 0 or at least 3")
    parser.add_argument("--config", action="append", default=[], help="as for main.py")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "estimators.json",
                        help="what it holds under a NAME is not measured again")
    parser.add_argument("--picture", type=Path, help="where the bars are drawn")
    parser.add_argument("--runs", type=Path, help="what bench/experiments.py keeps, to set beside")
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    if (options.questions < 3 or options.answers < 8
            or options.batches in (1, 2, options.questions)):
        parser.error("at least 3 questions, 8 answers, and 3 batches, not as many as questions")
    models = options.model or ["tiny=tiny/model"]
    if not all("=" in model for model in models):
        parser.error("--model NAME=FOLDER, like before=tiny/model")
    options.folders = dict(model.split("=", 1) for model in models)
    return options


def config_of(folder: str, options: argparse.Namespace) -> tuple:
    """Returns a model's settings, and the name of the model that its run began with, which is its
    reference. A trained model has the settings of its run."""
    arguments = []
    for path in options.config:
        arguments += ["--config", path]
    settings_of_run = Path(folder).resolve().parent / "config.yaml"
    if settings_of_run.exists():
        arguments += ["--config", str(settings_of_run)]
    arguments += options.keys
    begun_as = load_config(arguments).model.name if settings_of_run.exists() else folder
    name = f"model.name={json.dumps(folder)}"
    return load_config([*arguments, name, "training.shard=false"]), begun_as


def command(arguments: list[str]) -> int:
    options = parse(arguments)
    known = kept.read(options.data)
    models = {}
    try:
        for name, folder in options.folders.items():
            if name not in known:
                config, begun_as = config_of(folder, options)
                known[name] = measured(config, options.questions, options.answers,
                                       options.batches, begun_as)
                kept.write(options.data, known)
            models[name] = known[name]["estimators"]
            print(f"{name}: {description(known[name])}", flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{cosines_table(models)}\n\n{means_table(models)}\n")
    records = kept.read(options.runs) if options.runs else {}
    if records:
        for name, figures in models.items():
            print(f"{name}\n\n{verdicts_table(figures, records)}\n")
    if options.picture:
        draw(models, records, options.picture)
    print(json.dumps(models))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
