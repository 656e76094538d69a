"""Estimators of the policy gradient against the gradient they estimate: which way each points, and
how much of one batch is noise.

    .venv/bin/python bench/estimators.py
        the embedded model, as it stands: a minute on two cores
    .venv/bin/python bench/estimators.py --model before=tiny/model --model after=runs/<name>/best
        and after its training, with the settings of that run but for those that make an estimator

With one update a batch every estimator of the family is a weighted sum of gradients of log pi, one
for each answer. So one pool of answers with their gradients serves them all: main.py's own
`compute_advantages` and `policy_loss` say the weights, and nothing is run again. A gradient is kept
as a sketch, random signs in 4,096 buckets, which leaves cosines as they are to about 0.02.

Whatever is said of a length or an angle comes from products of *different* questions: the mean over
all pairs of a question's mean gradient with another's is the square of the true length, without the
noise that both would share. The cosine of one batch is the mean product of a batch with the truth
over the root of its mean square. Intervals are those of a jackknife over the questions."""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import ask
import one_step

import main
from machinery.errors import UserError
from machinery.ranks import join

BUCKETS = 4096
BATCH = 128  # answers, for whatever is said of one batch
REWARD, SOLVED = "the reward", "what is solved"  # two truths


def as_it_is(advantage: float, reward: float, G: int) -> float:
    return advantage


# {name: (G, keys, what becomes of an advantage)}
ESTIMATORS: dict[str, tuple[int, dict, Callable[[float, float, int], float]]] = {
    **{f"G = {G}": (G, {}, as_it_is) for G in (2, 4, 8, 16, 32, 64)},
    "no baseline": (8, {}, lambda advantage, reward, G: reward),
    "leave one out (RLOO)": (8, {}, lambda advantage, reward, G: advantage * G / (G - 1)),
    "over the deviation": (8, {"scale_rewards": "group"}, as_it_is),
    "over the own length": (8, {"loss_normalizer": "sequence"}, as_it_is),
    "GRPO as published (both)": (
        8, {"scale_rewards": "group", "loss_normalizer": "sequence"}, as_it_is),
    "over the mean (MaxRL)": (8, {"scale_rewards": "mean"}, as_it_is),
    "cut-off answers masked": (8, {"mask_truncated": True}, as_it_is),
    "only what is rewarded": (8, {}, lambda advantage, reward, G: max(advantage, 0.0)),
    "only what is punished": (8, {}, lambda advantage, reward, G: min(advantage, 0.0)),
    **{f"SIL, {k} best of 8": (8, {"learning_type": "sil", "k_best_of_n": [k, 8]}, as_it_is)
       for k in (1, 2, 4)}}


# ---------------------------------------------------------------- a pool of answers

class Sketch:
    """Gradients of a model, each in BUCKETS numbers."""

    def __init__(self, model: torch.nn.Module):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        size = sum(each.numel() for each in self.parameters)
        stream = torch.Generator().manual_seed(0)
        self.buckets = torch.randint(BUCKETS, (size,), generator=stream)
        self.signs = torch.randint(2, (size,), generator=stream).float() * 2 - 1

    def of(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([each.flatten() for each in gradients]).cpu() * self.signs
        return flat.new_zeros(BUCKETS).index_add_(0, self.buckets, flat)

    def of_log_pi(self, policy: torch.nn.Module, answer: main.Trajectory) -> torch.Tensor:
        logprobs, _ = policy([answer])
        return self.of(torch.autograd.grad(logprobs.sum(), self.parameters))


def pool_of(config, num_questions: int, answers_each: int) -> tuple[list[list], torch.Tensor]:
    """Groups of answers, and the sketch of the gradient of each answer's log pi: (questions,
    answers, BUCKETS). Equal answers to a question have equal gradients."""
    run = one_step.prepare(config)
    if num_questions > len(run.training_rows):
        raise UserError(f"{num_questions} questions are asked for, and there are "
                        f"{len(run.training_rows)} to train on: see --questions")
    main.random_stream(config.training.seed, 0, "estimators")
    rows = random.Random(config.training.seed).sample(run.training_rows, num_questions)
    answers = main.sample(run, rows, answers_each, one_step.NO_BAR)
    main.score(answers, run.task, one_step.NO_BAR)
    sketch, policy, found = Sketch(run.model), run.policy.module.eval(), {}
    for i, answer in enumerate(tqdm(answers, desc="gradients", mininterval=10)):
        key = i // answers_each, tuple(answer.completion_ids)
        if key not in found:
            found[key] = sketch.of_log_pi(policy, answer)
        answer.sketch = found[key]
    groups = [answers[i:i + answers_each] for i in range(0, len(answers), answers_each)]
    return groups, torch.stack([torch.stack([each.sketch for each in group]) for group in groups])


# ---------------------------------------------------------------- an estimator on it

def training_of(config, G: int, keys: dict):
    """Dr. GRPO but for `keys`, whatever the run was."""
    plain = {"learning_type": "grpo", "scale_rewards": "none", "loss_normalizer": "max_length",
             "updates_per_batch": 1, "kl_beta": 0.0, "mask_truncated": False,
             "k_best_of_n": [G, G]}
    return config.training.model_copy(update=plain | keys)


def with_advantages(groups: list[list], training, change: Callable, stream) -> list:
    """The answers that count in B."""
    for group in groups:
        for answer in group:
            answer.advantage = 0.0
    counted = [answer for group in groups
               for answer in main.compute_advantages(group, training, stream)]
    for answer in counted:
        answer.advantage = change(answer.advantage, answer.reward, training.k_best_of_n[1])
    return counted


def weights_of(groups: list[list], training, change: Callable, stream) -> list[float]:
    """How much of its gradient of log pi each answer of a batch adds to what is ascended."""
    counted, weights = with_advantages(groups, training, change, stream), {}
    if learned := main.learned_from(counted, training):
        lengths = [len(answer.completion_ids) for answer in learned]
        logprobs = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        tokens = sum(len(answer.completion_ids) for answer in counted)
        loss, _ = main.policy_loss(logprobs, learned, len(counted), tokens, training)
        loss.backward()
        # one number for all tokens of an answer
        own = [each[0].item() for each in logprobs.grad.split(lengths)]
        weights = {id(answer): -weight for answer, weight in zip(learned, own, strict=True)}
    return [weights.get(id(answer), 0.0) for group in groups for answer in group]


def by_question(groups: list[list], sketches: torch.Tensor, training, change: Callable,
                rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each question's mean gradient over groups of G that are drawn from its answers without
    putting back, `rounds` times over: (questions, BUCKETS); and the mean square of their lengths:
    (questions,)."""
    G, stream = training.k_best_of_n[1], random.Random(0)
    means, squares = [], []
    for group, own in zip(groups, sketches, strict=True):
        drawn = []
        for _ in range(rounds):
            order = stream.sample(range(len(group)), len(group))
            for start in range(0, len(order) - G + 1, G):
                chosen = order[start:start + G]
                weights = weights_of([[group[i] for i in chosen]], training, change, stream)
                drawn.append(torch.tensor(weights, dtype=own.dtype) @ own[chosen])
        drawn = torch.stack(drawn)
        means.append(drawn.mean(0))
        squares.append(drawn.square().sum(1).mean())
    return torch.stack(means), torch.stack(squares)


def truth_of(values: list[list[float]], sketches: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean of a value, question by question: (questions, BUCKETS)."""
    values = torch.tensor(values, dtype=sketches.dtype)
    advantages = values - values.mean(1, keepdim=True)
    return torch.einsum("qk,qkm->qm", advantages, sketches) / (values.shape[1] - 1)


def figures_of(means, squares, truths: dict, groups_a_batch: float) -> dict[str, float]:
    """From products of different questions alone, but for the squares."""
    def product(a, b):
        all_pairs = a.sum(0) @ b.sum(0) - (a * b).sum()
        return (all_pairs / (len(a) * (len(a) - 1))).item()

    signal = max(product(means, means), 1e-30)  # where there is none, the intervals say so
    noise = max(squares.mean().item() - signal, 0.0) / groups_a_batch
    found = {"noise": math.sqrt(noise / signal)}
    for name, truth in truths.items():
        along = product(means, truth) / math.sqrt(max(product(truth, truth), 1e-30))
        found[f"mean, {name}"] = along / math.sqrt(signal)
        found[f"batch, {name}"] = along / math.sqrt(signal + noise)
    return found


def with_intervals(means, squares, truths: dict, groups_a_batch: float) -> dict[str, list[float]]:
    """{figure: [value, half of its 95 % interval]}, by leaving out one question after the other."""
    whole = figures_of(means, squares, truths, groups_a_batch)
    kept = [[j for j in range(len(means)) if j != i] for i in range(len(means))]
    parts = [figures_of(means[some], squares[some],
                        {name: truth[some] for name, truth in truths.items()}, groups_a_batch)
             for some in kept]
    found = {}
    for name, value in whole.items():
        each = torch.tensor([part[name] for part in parts])
        spread = (each - each.mean()).square().sum() * (len(each) - 1) / len(each)
        found[name] = [round(value, 4), round(1.96 * spread.sqrt().item(), 4)]
    return found


def measured(config, num_questions: int, answers_each: int, rounds: int) -> dict:
    groups, sketches = pool_of(config, num_questions, answers_each)
    task = main.load_task(config)
    truths = {REWARD: truth_of([[each.reward for each in group] for group in groups], sketches),
              SOLVED: truth_of([[each.parts[task.SOLVED] for each in group] for group in groups],
                               sketches)}
    solved = [sum(each.parts[task.SOLVED] for each in group) / answers_each for group in groups]
    answers = [each for group in groups for each in group]
    found = {"solved": sorted(round(each, 3) for each in solved),
             "different": round(sum(len({tuple(each.completion_ids) for each in group})
                                    for group in groups) / len(answers), 3),
             "cut off": round(sum(each.truncated for each in answers) / len(answers), 3),
             "tokens": round(sum(len(each.completion_ids) for each in answers) / len(answers), 1),
             "estimators": {}}
    for name, (G, keys, change) in ESTIMATORS.items():
        if G <= answers_each:
            training = training_of(config, G, keys)
            means, squares = by_question(groups, sketches, training, change, rounds)
            found["estimators"][name] = with_intervals(means, squares, truths, BATCH / G)
    return found


def show(name: str, found: dict) -> None:
    solved = found["solved"]
    hard = sum(each < 0.1 for each in solved)
    print(f"{name}: {100 * found['different']:.0f} % of answers differ, "
          f"{sum(solved) / len(solved):.2f} are right; {hard} of {len(solved)} questions are "
          "solved less than one time in ten\n\n"
          "| estimator | cosine of its mean | of one batch | noise over signal "
          "| answers until 0.9 |\n| --- | --- | --- | --- | --- |")
    for estimator, row in found["estimators"].items():
        along, noise = row[f"mean, {REWARD}"][0], row["noise"][0]
        needed = BATCH * noise ** 2 / ((along / 0.9) ** 2 - 1) if along > 0.9 else math.inf
        shown = [f"{row[key][0]:.2f} ± {row[key][1]:.2f}"
                 for key in (f"mean, {REWARD}", f"batch, {REWARD}", "noise")]
        print(f"| {estimator} | {' | '.join(shown)} "
              f"| {'never' if math.isinf(needed) else f'{needed:,.0f}'} |", flush=True)


def draw(known: dict, path: Path) -> None:
    """Bars are the cosine of one batch with the truth, dots that of the mean of many; a panel for
    each model. G = 8 is what others are compared with."""
    names = [name for name in ESTIMATORS
             if all(name in found["estimators"] for found in known.values())]
    figure = Figure(figsize=(3 + 3.2 * len(known), 0.28 * len(names) + 1.2), layout="constrained")
    for axes, (model, found) in zip(figure.subplots(1, len(known), sharey=True, squeeze=False)[0],
                                    known.items()):
        rows = [found["estimators"][name] for name in names]
        one, many = ([row[key] for row in rows] for key in (f"batch, {REWARD}", f"mean, {REWARD}"))
        places = range(len(names))
        axes.barh(places, [value for value, _ in one], xerr=[half for _, half in one],
                  color=["#a3a3a3" if name == "G = 8" else "#fdba74" for name in names],
                  ecolor="#737373", label="one batch of 128 answers")
        axes.errorbar([value for value, _ in many], places, xerr=[half for _, half in many],
                      fmt="o", color="#1d4ed8", label="the mean of many")
        axes.axvline(one[names.index("G = 8")][0], color="#a3a3a3", linewidth=0.8)
        axes.set_yticks(places, names)
        axes.set_xlim(0, 1.1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"{model}: {100 * found['different']:.0f} % of answers differ")
    axes.invert_yaxis()
    figure.supxlabel("cosine with the true gradient of the expected reward")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2,
                  frameon=False)
    figure.savefig(path, dpi=80)


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", metavar="NAME=FOLDER",
                        help="whose answers; may be given again (first=tiny/model)")
    parser.add_argument("--questions", type=int, default=64, help="at least 3")
    parser.add_argument("--answers", type=int, default=64, help="to each question, at least 8")
    parser.add_argument("--rounds", type=int, default=2, help="how often a pool is dealt out")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "estimators.json",
                        help="what it holds under a NAME is not measured again")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.questions < 3 or options.answers < 8 or options.rounds < 1:
        parser.error("3 questions with 8 answers each, dealt out once, are the least")
    models = [model.partition("=") for model in options.model or ["first=tiny/model"]]
    if not all(folder for _, _, folder in models):
        parser.error("--model NAME=FOLDER, like before=tiny/model")
    torch.manual_seed(0)
    known = json.loads(options.data.read_text()) if options.data.exists() else {}
    try:
        join()
        for name, _, folder in models:
            if name not in known:
                keys = [*ask.settings_of(Path(folder))[0], f"model.name={json.dumps(folder)}"]
                config = main.load_config([*keys, *options.keys])
                known[name] = measured(config, options.questions, options.answers, options.rounds)
                options.data.parent.mkdir(parents=True, exist_ok=True)
                options.data.write_text(json.dumps(known, indent=1) + "\n")
            show(name, known[name])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.picture:
        draw(known, options.picture)
    print(json.dumps({name: found["estimators"] for name, found in known.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
