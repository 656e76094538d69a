"""Compares estimators of the policy gradient with the gradient that they estimate.

    .venv/bin/python bench/estimators.py
        the tiny model, before training: a minute on two cores
    .venv/bin/python bench/estimators.py --config recipes/lab.yaml \\
            --model before=tiny/lab/model --model after=runs/<name>/best
        the lab model before and after its training

With one update a batch, every estimator is a weighted sum of gradients of log pi, one for each
answer. So one pool of answers with their gradients serves them all. The weights come from main.py's
own `compute_advantages` and `policy_loss`. A gradient is kept as a sketch: random signs in 4,096
buckets, which changes a cosine by about 0.02.

Noise must not count as signal. So squared lengths and products are means over pairs of *different*
questions. Intervals of 95 % come from leaving out one question after the other (a jackknife)."""

import argparse
import json
import math
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pvariance

import experiments
import harness
import kept
import variants
from harness import ROOT, load_config, main, torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

from machinery.ranks import random_seed
from machinery.settings import Config, TrainingSettings

BUCKETS = 4096
BATCH = 128  # answers in what we call one batch
ROUNDS = 2   # The answers of a pool are dealt into groups so often.
# The figures of an estimator. Both cosines are with the true gradient of what it optimises.
COSINE = "batch, what it optimises"
MEAN = "mean, what it optimises"  # of many batches
DIFFERENCE = "batch, difference from Dr. GRPO"
LOST = [None, None]  # A figure of which only noise is known.


@dataclass(frozen=True)
class Estimator:
    G: int = 8
    keys: dict = field(default_factory=dict)  # of `training`, over Dr. GRPO's
    sign: int = 0                             # 1 or -1: Only advantages of this sign count.
    pays: dict = field(default_factory=dict)  # over the task's REWARD_WEIGHTS


DEFAULT = "Dr. GRPO, G = 8"
BY_STANDARD_DEVIATION = {"scale_rewards": "group"}
BY_ANSWER_LENGTH = {"loss_normalizer": "sequence"}
BY_MEAN = {"scale_rewards": "mean"}
SIL = {"learning_type": "sil", "k_best_of_n": [2, 8]}
NO_FORMAT = {"format": 0.0}
ESTIMATORS = {
    DEFAULT: Estimator(),
    "G = 2": Estimator(G=2),
    "G = 32": Estimator(G=32),
    "divided by the standard deviation": Estimator(keys=BY_STANDARD_DEVIATION),
    "divided by the answer length": Estimator(keys=BY_ANSWER_LENGTH),
    "divided by both, as in GRPO": Estimator(keys=BY_STANDARD_DEVIATION | BY_ANSWER_LENGTH),
    "divided by the mean (MaxRL)": Estimator(keys=BY_MEAN),
    "truncated answers masked": Estimator(keys={"mask_truncated": True}),
    "only positive advantages": Estimator(sign=1),
    "only negative advantages": Estimator(sign=-1),
    "SIL, 2 best of 8": Estimator(keys=SIL),
    "format pays 0.0": Estimator(pays=NO_FORMAT),
    "format pays 0.0, divided by the standard deviation": Estimator(
        keys=BY_STANDARD_DEVIATION, pays=NO_FORMAT),
    "format pays 0.0, divided by the mean (MaxRL)": Estimator(keys=BY_MEAN, pays=NO_FORMAT),
    "format pays 0.0, SIL, 2 best of 8": Estimator(keys=SIL, pays=NO_FORMAT),
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

    def of_value(self, value: torch.Tensor) -> torch.Tensor:
        """Returns that of the value's gradient, (BUCKETS,)."""
        gradients = torch.autograd.grad(value, self.parameters)
        flat = torch.cat([gradient.flatten() for gradient in gradients]).cpu()
        sums = flat.new_zeros(BUCKETS)
        return sums.index_add_(0, self.buckets, flat * self.signs)


@dataclass
class Pool:
    """Groups of answers, and the sketch of each answer's gradient of log pi."""

    groups: list[list[main.Trajectory]]
    sketches: torch.Tensor  # (questions, answers, BUCKETS)


def pool_of(run: main.Run, num_questions: int, num_answers: int) -> Pool:
    seed = run.config.training.seed
    rows = random.Random(seed).sample(run.training_rows, num_questions)
    questions = [main.make_question(run, row) for row in rows]
    torch.manual_seed(random_seed(seed, 0, "estimators"))
    groups = main.sample(run, questions, num_answers)
    main.score(run, groups)
    sketch = Sketch(run.model)
    policy = run.policy.module.eval()
    sketches = []
    for group in tqdm(groups, desc="gradients", mininterval=10):
        known = {}  # Equal answers to a question have equal gradients.
        for answer in group:
            key = tuple(answer.completion_ids)
            if key not in known:
                log_probs, _ = policy([answer])
                known[key] = sketch.of_value(log_probs.sum())
            sketches.append(known[key])
    return Pool(groups, torch.stack(sketches).view(num_questions, num_answers, BUCKETS))


# ---------------------------------------------------------------- an estimator on a pool

def training_of(config: Config, estimator: Estimator) -> TrainingSettings:
    """Returns the settings of Dr. GRPO and the estimator's keys, whatever the run was."""
    plain = {"learning_type": "grpo", "scale_rewards": "none", "loss_normalizer": "max_length",
             "updates_per_batch": 1, "kl_beta": 0.0, "mask_truncated": False,
             "k_best_of_n": [estimator.G, estimator.G]}
    return config.training.model_copy(update=plain | estimator.keys)


def set_rewards(pool: Pool, weights: dict[str, float]) -> None:
    for group in pool.groups:
        for answer in group:
            answer.reward = 0.0
            for part, weight in weights.items():
                answer.reward += weight * answer.reward_parts[part]


def weights_of(group: list[main.Trajectory], training: TrainingSettings, sign: int) -> list[float]:
    """Returns by how much a batch of this group multiplies each answer's gradient of log pi."""
    for answer in group:
        answer.advantage = 0.0
    counted = main.compute_advantages(group, training)
    if sign:
        variants.keep_sign(counted, sign)
    learned = [answer for answer in counted if main.is_learned_from(answer, training)]
    num_tokens = sum(answer.num_tokens for answer in counted)
    totals = {"answers": len(counted), "tokens": num_tokens, "learned": len(learned)}
    weights = dict.fromkeys(map(id, group), 0.0)
    if learned:
        lengths = [answer.num_tokens for answer in learned]
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        loss, _ = main.policy_loss(log_probs, learned, totals, training)
        loss.backward()
        for answer, of_tokens in zip(learned, log_probs.grad.split(lengths), strict=True):
            weights[id(answer)] = -of_tokens[0].item()  # It is the same for all its tokens.
    return list(weights.values())


def gradient_of_group(pool: Pool, question: int, chosen: list[int], training: TrainingSettings,
                      sign: int) -> torch.Tensor:
    """Returns the gradient of these answers to a question, (BUCKETS,)."""
    group = [pool.groups[question][i] for i in chosen]
    sketches = pool.sketches[question, chosen]  # (G, BUCKETS)
    return torch.tensor(weights_of(group, training, sign), dtype=sketches.dtype) @ sketches


def by_question(pool: Pool, training: TrainingSettings,
                sign: int) -> tuple[torch.Tensor, torch.Tensor]:
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
                gradients.append(gradient_of_group(pool, question, chosen, training, sign))
        of_question = torch.stack(gradients)  # (groups, BUCKETS)
        means.append(of_question.mean(0))
        squares.append(of_question.square().sum(1).mean())
    return torch.stack(means), torch.stack(squares)


def true_gradient(pool: Pool, training: TrainingSettings) -> torch.Tensor:
    """Returns the gradient of the expected reward, (questions, BUCKETS), divided by L as in the
    loss."""
    rewards = []
    for group in pool.groups:
        rewards.append([answer.reward for answer in group])
    rewards = torch.tensor(rewards, dtype=pool.sketches.dtype)  # (questions, answers)
    advantages = rewards - rewards.mean(1, keepdim=True)
    sums = torch.einsum("qk,qkm->qm", advantages, pool.sketches)
    num_others = rewards.shape[1] - 1
    return sums / num_others / training.max_new_gen_tokens


# ---------------------------------------------------------------- signal and noise

def product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean product over all pairs of different questions."""
    products = a.sum(0) @ b.sum(0) - (a * b).sum()
    num_pairs = len(a) * (len(a) - 1)
    return (products / num_pairs).item()


def along(means: torch.Tensor, truth: torch.Tensor) -> float:
    return product(means, truth) / math.sqrt(product(truth, truth))


def cosine_of_mean(means: torch.Tensor, truth: torch.Tensor) -> float:
    return along(means, truth) / math.sqrt(product(means, means))


def cosine_of_batch(groups_a_batch: float, means: torch.Tensor, squares: torch.Tensor,
                    truth: torch.Tensor) -> float:
    signal = product(means, means)
    noise = (squares.mean().item() - signal) / groups_a_batch
    return along(means, truth) / math.sqrt(max(signal, 0.0) + noise)


def leave_one_out(figure_of: Callable[..., float], *tensors: torch.Tensor) -> list[float]:
    """Returns a figure from all questions, and then from all but each one."""
    values = [figure_of(*tensors)]
    num_questions = len(tensors[0])
    for i in range(num_questions):
        others = torch.arange(num_questions) != i
        values.append(figure_of(*[tensor[others] for tensor in tensors]))
    return values


def half_interval(values: list[float]) -> float:
    """Returns half of the 95 % interval of a figure that `leave_one_out` has made."""
    variance = (len(values) - 2) * pvariance(values[1:])
    return 1.96 * math.sqrt(variance)


def with_interval(values: list[float]) -> list[float]:
    return [round(values[0], 4), round(half_interval(values), 4)]


def is_lost(gradients: torch.Tensor) -> bool:
    """Says whether the interval of the squared length reaches 0."""
    lengths = leave_one_out(product, gradients, gradients)
    return lengths[0] <= half_interval(lengths)


def figures_of(means: torch.Tensor, squares: torch.Tensor, truth: torch.Tensor,
               groups_a_batch: float, beside: list[float] | None = None
               ) -> tuple[dict[str, list], list[float] | None]:
    """Returns {figure: [value, half of its interval]}, and the cosine of a batch with all questions
    and without each. `beside` are these cosines of Dr. GRPO. Both come from the same questions, so
    their difference is known better than either."""
    if is_lost(truth):
        return {COSINE: LOST, MEAN: LOST}, None
    cosines = leave_one_out(partial(cosine_of_batch, groups_a_batch), means, squares, truth)
    found = {COSINE: with_interval(cosines), MEAN: LOST}
    if not is_lost(means):
        found[MEAN] = with_interval(leave_one_out(cosine_of_mean, means, truth))
    if beside:
        differences = [own - other for own, other in zip(cosines, beside, strict=True)]
        found[DIFFERENCE] = with_interval(differences)
    return found, cosines


# ---------------------------------------------------------------- a model

def measured(config: Config, num_questions: int, num_answers: int) -> dict:
    """Returns what docs/estimators.json holds of a model."""
    run = harness.prepare(config)
    pool = pool_of(run, num_questions, num_answers)
    figures = {}
    cosines_of_default = None
    for name, estimator in ESTIMATORS.items():
        if estimator.G > num_answers:
            continue
        training = training_of(config, estimator)
        set_rewards(pool, run.task.REWARD_WEIGHTS | estimator.pays)
        means, squares = by_question(pool, training, estimator.sign)
        figures[name], cosines = figures_of(means, squares, true_gradient(pool, training),
                                            BATCH / estimator.G, cosines_of_default)
        if name == DEFAULT:
            cosines_of_default = cosines
    solved = []
    num_different = 0
    for group in pool.groups:
        solved.append(round(fmean(answer.reward_parts[run.task.SOLVED] for answer in group), 3))
        num_different += len({tuple(answer.completion_ids) for answer in group})
    different = round(num_different / num_questions / num_answers, 3)
    return {"solved": sorted(solved), "different": different, "estimators": figures}


# ---------------------------------------------------------------- tables

def description(found: dict) -> str:
    solved = found["solved"]
    num_hard = sum(share < 0.1 for share in solved)
    return (f"{100 * found['different']:.0f} % of answers differ, {fmean(solved):.2f} are right, "
            f"{num_hard} of {len(solved)} questions are solved less than one time in ten")


def as_text(figure: list | None) -> str:
    if figure is None:
        return ""
    if figure == LOST:
        return "lost in noise"
    return f"{figure[0]:+.3f} ± {figure[1]:.3f}"


def as_table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{' --- |' * len(rows[0])}")
    return "\n".join(lines)


def cosines_table(figures: dict[str, dict]) -> str:
    """Returns a row for each estimator on a model."""
    rows = [["estimator", "cosine of one batch", "difference from Dr. GRPO", "of many batches"]]
    for name, found in figures.items():
        rows.append([name, *[as_text(found.get(key)) for key in (COSINE, DIFFERENCE, MEAN)]])
    return as_table(rows)


# ---------------------------------------------------------------- what runs made of it

# The seeds of the runs, as bench/experiments.py looks them up.
SEEDS = argparse.Namespace(keys=[], seeds=[0, 1, 2])


def run_of(estimator: str) -> str:
    return estimator.replace("format pays 0.0", experiments.ANSWER_PAYS)


def ends_of_runs(estimators: list[str], records: dict) -> dict[str, list[float]]:
    """Returns {estimator: the share of held-out answers that its run solved in the end, with each
    seed}, best first, of the estimators that have runs."""
    ends = {}
    for name in estimators:
        titles = [experiments.title_of(run_of(name), seed, SEEDS) for seed in SEEDS.seeds]
        if all(title in records for title in titles):
            ends[name] = [records[title]["curve"][-1]["solved"] for title in titles]
    return dict(sorted(ends.items(), key=lambda item: -fmean(item[1])))


def verdict_of(difference: float, half_width: float) -> str:
    if abs(difference) <= half_width:
        return "could be chance"
    return "higher" if difference > 0 else "lower"


def verdicts_table(figures: dict[str, dict], records: dict) -> str:
    """Returns a row for each estimator that has runs. Its cosine and the share that its run solved
    are compared with those of Dr. GRPO."""
    rows = [["estimator", "cosine of one batch", "share solved", "do they agree?", "each seed"]]
    compared = [name for name in figures if DIFFERENCE in figures[name]]
    for name, ends in ends_of_runs(compared, records).items():
        claim = experiments.Claim("", "", experiments.SOLVED, more=run_of(name), less=DEFAULT)
        effect = experiments.effect_of(claim, records, SEEDS)
        end = [effect.difference, effect.half_width]
        cosine = figures[name][DIFFERENCE]
        of_cosine, of_run = verdict_of(*cosine), verdict_of(*end)
        rows.append([
            name,
            f"{as_text(cosine)}, {of_cosine}",
            f"{as_text(end)}, {of_run}",
            "yes" if of_cosine == of_run else "no",
            " ".join(f"{share:.3f}" for share in ends),
        ])
    return as_table(rows)


# ---------------------------------------------------------------- the picture

MODEL_COLOURS = ["#fcd34d", "#ea580c"]  # of the bars
DASHED = {"color": "#525252", "linestyle": "--", "linewidth": 1}


def draw(models: dict[str, dict], records: dict, path: Path) -> None:
    """Draws the cosine of one batch for each estimator that has runs, sorted by that of the last
    model. Beside it is what the runs made of it, a circle for each seed."""
    *_, last = models.values()
    ends = ends_of_runs([name for name in last if last[name][COSINE] != LOST], records)
    names = sorted(ends, key=lambda name: last[name][COSINE])  # The last one is at the top.
    figure = Figure(figsize=(6, 0.55 * len(names) + 2), layout="constrained")
    cosines, runs = figure.subplots(1, 2, sharey=True)
    for number, (title, figures) in enumerate(models.items()):
        draw_bars(cosines, title, figures, names, number)
    for row, name in enumerate(names):
        runs.plot(ends[name], [row] * len(ends[name]), "o", markersize=9, markerfacecolor="none",
                  color="#1d4ed8")
    if DEFAULT in ends:
        cosines.axvline(last[DEFAULT][COSINE][0], label="Dr. GRPO", **DASHED)
        runs.axvline(fmean(ends[DEFAULT]), **DASHED)
    cosines.set_yticks(range(len(names)), [textwrap.fill(name, width=20) for name in names])
    cosines.set_title("Cosine of one batch\nwith the true gradient\n(lines: 95 % intervals)")
    runs.set_title("Solved after 60\nsteps, one circle\nfor each seed")
    runs.set_xlim(0, 0.5)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=160)


def draw_bars(axes: Axes, title: str, figures: dict, names: list[str], number: int) -> None:
    """Draws those of a model, with their intervals. The first model is above the second."""
    rows, values, halves = [], [], []
    for row, name in enumerate(names):
        value, half = figures.get(name, {}).get(COSINE, LOST)
        if value is not None:
            rows.append(row + 0.2 - 0.4 * number)
            values.append(value)
            halves.append(half)
    axes.barh(rows, values, 0.4, xerr=halves, label=title, color=MODEL_COLOURS[number])


# ---------------------------------------------------------------- the command

def command() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="--config and section.key=value are as for main.py")
    parser.add_argument("--model", action="append", metavar="NAME=FOLDER",
                        help="may be given twice (default: tiny=tiny/model)")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--answers", type=int, default=64, help="to each question")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "estimators.json",
                        help="what it holds under a NAME is not measured again")
    parser.add_argument("--picture", type=Path, help="where the bars are drawn")
    parser.add_argument("--runs", type=Path, help="what bench/experiments.py keeps, to set beside")
    options, keys = parser.parse_known_args()
    known = kept.read(options.data)
    records = kept.read(options.runs) if options.runs else {}
    models = {}
    for model in options.model or ["tiny=tiny/model"]:
        name, folder = model.split("=", 1)
        if name not in known:
            config = load_config([*keys, f"model.name={json.dumps(folder)}"])
            known[name] = measured(config, options.questions, options.answers)
            kept.write(options.data, known)
        models[name] = known[name]["estimators"]
        print(f"{name}: {description(known[name])}\n\n{cosines_table(models[name])}\n")
        if records:
            print(f"{verdicts_table(models[name], records)}\n")
    if options.picture:
        draw(models, records, options.picture)
    print(json.dumps(models))


if __name__ == "__main__":
    command()
