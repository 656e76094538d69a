"""Estimators of the policy gradient against the gradient they estimate: which way each points, and
how much of one batch is noise.

    .venv/bin/python bench/estimators.py
        the embedded model, as it stands: a minute on two cores
    .venv/bin/python bench/estimators.py --config recipes/lab.yaml --model before=tiny/lab/model \
            --model after=runs/<name>/best
        another, and after its training, with the settings of that run but for those that make an
        estimator; the reference of the KL terms is the model that the run began with

With one update a batch every estimator of the family is a weighted sum of gradients of log pi, one
for each answer. So one pool of answers with their gradients serves them all: main.py's own
`compute_advantages` and `policy_loss` say the weights, and nothing is run again. A gradient is kept
as a sketch, random signs in 4,096 buckets, which leaves cosines as they are to about 0.02.

Two kinds are more than that: a KL term adds its own gradient for each answer, sketched too, and
later updates of the same batch are made in fact, with AdamW from rest, on other questions.

Whatever is said of a length or an angle comes from products of *different* questions: the mean over
all pairs of a question's mean gradient with another's is the square of the true length, without the
noise that both would share. The cosine of one batch is the mean product of a batch with the truth
over the root of its mean square. Intervals are those of a jackknife over the questions."""

import argparse
import copy
import dataclasses
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
import kept
import one_step

import main
from machinery.errors import UserError
from machinery.ranks import join, random_stream
from machinery.settings import load_config

BUCKETS = 4096
BATCH = 128  # answers, for whatever is said of one batch
OWN, SOLVED = "what it optimises", "what is solved"  # two truths
BEYOND = "batch, beyond Dr. GRPO's"
LOST = [None, None]  # in the noise


def as_it_is(advantage: float, reward: float, G: int) -> float:
    return advantage


@dataclasses.dataclass(frozen=True)
class Estimator:
    G: int = 8
    keys: dict = dataclasses.field(default_factory=dict)         # of `training`, over Dr. GRPO's
    change: Callable[[float, float, int], float] = as_it_is      # what becomes of an advantage
    pays: dict = dataclasses.field(default_factory=dict)         # over the task's REWARD_WEIGHTS
    temperature: float | None = None                             # at which answers are drawn


DEFAULT = "Dr. GRPO, G = 8"
FAMILIES: dict[str, dict[str, Estimator]] = {
    "size of the group": {f"G = {G}" if G != 8 else DEFAULT: Estimator(G)
                          for G in (2, 4, 8, 16, 32, 64)},
    "baseline": {
        "no baseline": Estimator(change=lambda advantage, reward, G: reward),
        "leave one out (RLOO)": Estimator(change=lambda advantage, reward, G:
                                          advantage * G / (G - 1))},
    "division": {
        "over the deviation": Estimator(keys={"scale_rewards": "group"}),
        "over the own length": Estimator(keys={"loss_normalizer": "sequence"}),
        "GRPO as published (both)": Estimator(
            keys={"scale_rewards": "group", "loss_normalizer": "sequence"}),
        "over the mean (MaxRL)": Estimator(keys={"scale_rewards": "mean"})},
    "which answers": {
        "cut-off answers masked": Estimator(keys={"mask_truncated": True}),
        "only rewarded": Estimator(change=lambda advantage, reward, G: max(advantage, 0.0)),
        "only punished": Estimator(change=lambda advantage, reward, G: min(advantage, 0.0)),
        **{f"SIL, {k} best of 8": Estimator(keys={"learning_type": "sil", "k_best_of_n": [k, 8]})
           for k in (1, 2, 4)}},
    "rewards and sampling": {
        **{f"form pays {weight}": Estimator(pays={"format": weight}) for weight in (0.0, 1.0)},
        **{f"temperature {value}": Estimator(temperature=value) for value in (0.6, 1.4)},
        **{f"KL 0.02 in the {where}": Estimator(keys={"kl_beta": 0.02, "kl_in": where})
           for where in ("reward", "loss")}}}
ESTIMATORS = {name: each for family in FAMILIES.values() for name, each in family.items()}
# {name: (which update of a batch, clip)}
LATER = {"second update": (2, None), "second update, clipped": (2, (0.2, 0.2)),
         "fourth update": (4, None), "fourth update, clipped": (4, (0.2, 0.2))}


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

    def of_log_pi(self, log_probs: torch.Tensor) -> torch.Tensor:
        return self.of(torch.autograd.grad(log_probs.sum(), self.parameters, retain_graph=True))

    def of_penalty(self, log_probs: torch.Tensor, answer: main.Trajectory, training,
                   where: str) -> torch.Tensor:
        """What a KL term of weight 1 adds to what is ascended, in a batch of this answer alone."""
        with_kl = training.model_copy(update={"kl_beta": 1.0, "kl_in": where})
        blank = dataclasses.replace(answer, advantage=0.0)
        loss, _ = main.policy_loss(log_probs, [blank], 1, len(log_probs), with_kl)
        return -self.of(torch.autograd.grad(loss, self.parameters, retain_graph=True))


@dataclasses.dataclass
class Pool:
    """Groups of answers, and for each answer the sketch of the gradient of its log pi, and of its
    KL terms: (questions, answers, BUCKETS). Equal answers to a question have equal gradients."""

    groups: list[list[main.Trajectory]]
    sketches: torch.Tensor
    penalties: dict[str, torch.Tensor]  # {kl_in: ...}; none without a reference


def questions_of(run: main.Run, count: int) -> list[main.Question]:
    questions = run.training_questions
    if count > len(questions):
        raise UserError(f"{count} questions are asked for, and there are {len(questions)} to train "
                        "on: see --questions")
    places = random.Random(run.config.training.seed).sample(range(len(questions)), count)
    return [questions[place] for place in places]


def seed_sampling(run: main.Run, purpose: str) -> None:
    torch.manual_seed(random_stream(run.config.training.seed, 0, purpose).getrandbits(63))


def pool_of(run: main.Run, questions: list[main.Question], answers_each: int,
            reference: Callable | None = None) -> Pool:
    seed_sampling(run, "estimators")
    groups = main.sample(run, questions, answers_each)
    main.score(run, groups)
    answers = [answer for group in groups for answer in group]
    training = training_of(run.config, Estimator())
    sketch, policy, found = Sketch(run.model), run.policy.module.eval(), {}
    sketches: dict[str, list] = {"log pi": []} | ({"reward": [], "loss": []} if reference else {})
    for i, answer in enumerate(tqdm(answers, desc="gradients", mininterval=10)):
        key = i // answers_each, tuple(answer.completion_ids)
        if key not in found:
            log_probs, _ = policy([answer])
            found[key] = {"log pi": sketch.of_log_pi(log_probs)}
            if reference:
                answer.reference_log_probs = reference([answer])[0]
                found[key] |= {where: sketch.of_penalty(log_probs, answer, training, where)
                               for where in ("reward", "loss")}
        for name, own in sketches.items():
            own.append(found[key][name])
    stacked = {name: torch.stack(own).view(len(questions), answers_each, BUCKETS)
               for name, own in sketches.items()}
    return Pool(groups, stacked.pop("log pi"), stacked)


# ---------------------------------------------------------------- an estimator on it

def training_of(config, estimator: Estimator):
    """Dr. GRPO but for the estimator's keys, whatever the run was."""
    plain = {"learning_type": "grpo", "scale_rewards": "none", "loss_normalizer": "max_length",
             "updates_per_batch": 1, "kl_beta": 0.0, "mask_truncated": False,
             "k_best_of_n": [estimator.G, estimator.G]}
    return config.training.model_copy(update=plain | estimator.keys)


def reward_of(answer: main.Trajectory, task, estimator: Estimator) -> float:
    weights = task.REWARD_WEIGHTS | estimator.pays
    return sum(weight * answer.reward_parts[part] for part, weight in weights.items())


def with_advantages(groups: list[list], training, change: Callable, stream) -> list:
    """The answers that count in the loss."""
    for group in groups:
        for answer in group:
            answer.advantage = 0.0
    counted = [answer for group in groups
               for answer in main.compute_advantages(group, training, stream)]
    for answer in counted:
        answer.advantage = change(answer.advantage, answer.reward, training.group_size)
    return counted


def weights_of(groups: list[list], training, change: Callable, stream) -> list[float]:
    """How much of its gradient of log pi each answer of a batch adds to what is ascended, KL terms
    aside."""
    training = training.model_copy(update={"kl_beta": 0.0})
    counted, weights = with_advantages(groups, training, change, stream), {}
    if learned := [answer for answer in counted if main.is_learned_from(answer, training)]:
        lengths = [answer.num_tokens for answer in learned]
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        tokens = sum(answer.num_tokens for answer in counted)
        loss, _ = main.policy_loss(log_probs, learned, len(counted), tokens, training)
        loss.backward()
        # one number for all tokens of an answer
        own = [each[0].item() for each in log_probs.grad.split(lengths)]
        weights = {id(answer): -weight for answer, weight in zip(learned, own, strict=True)}
    return [weights.get(id(answer), 0.0) for group in groups for answer in group]


def by_question(pool: Pool, training, change: Callable,
                rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each question's mean gradient over groups of G that are drawn from its answers without
    putting back, `rounds` times over: (questions, BUCKETS); and the mean square of their lengths:
    (questions,)."""
    G, stream = training.group_size, random.Random(0)
    means, squares = [], []
    for question, (group, own) in enumerate(zip(pool.groups, pool.sketches, strict=True)):
        drawn = []
        for _ in range(rounds):
            order = stream.sample(range(len(group)), len(group))
            for start in range(0, len(order) - G + 1, G):
                chosen = order[start:start + G]
                weights = weights_of([[group[i] for i in chosen]], training, change, stream)
                drawn.append(torch.tensor(weights, dtype=own.dtype) @ own[chosen])
                if beta := training.kl_beta:
                    drawn[-1] += beta * pool.penalties[training.kl_in][question, chosen].mean(0)
        drawn = torch.stack(drawn)
        means.append(drawn.mean(0))
        squares.append(drawn.square().sum(1).mean())
    return torch.stack(means), torch.stack(squares)


def truth_of(values: list[list[float]], sketches: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean of a value, question by question: (questions, BUCKETS)."""
    values = torch.tensor(values, dtype=sketches.dtype)
    advantages = values - values.mean(1, keepdim=True)
    return torch.einsum("qk,qkm->qm", advantages, sketches) / (values.shape[1] - 1)


def later_updates(run: main.Run, questions: list[main.Question]) -> dict[str, torch.Tensor]:
    """What is ascended in the later updates of LATER, for batches of these questions: (batches,
    BUCKETS). Each batch begins with the same weights, and an optimizer at rest."""
    sketch, G = Sketch(run.model), Estimator().G
    run.optimizer.param_groups[0]["lr"] = run.config.training.learning_rate
    before = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    found: dict[str, list] = {name: [] for name in LATER}
    seed_sampling(run, "later updates")
    for start in tqdm(range(0, len(questions), BATCH // G), desc="later updates", mininterval=10):
        groups = main.sample(run, questions[start:start + BATCH // G], G)
        main.score(run, groups)
        for clip in {clip for _, clip in LATER.values()}:
            training = training_of(run.config, Estimator(keys={
                "updates_per_batch": 4, "clip": clip, "max_grad_norm": None, "ratio": "token"}))
            own = copy.copy(run)
            own.config = run.config.model_copy(update={"training": training})
            counted = with_advantages(groups, training, as_it_is, random.Random(0))
            for answer in (answer for group in groups for answer in group):
                answer.old_log_probs = None
            for update in range(1, training.updates_per_batch + 1):
                main.policy_gradient(own, counted)
                for name, which in LATER.items():
                    if which == (update, clip):
                        found[name].append(-sketch.of([each.grad for each in sketch.parameters]))
                run.optimizer.step()
            run.model.load_state_dict(before[0])
            run.optimizer.load_state_dict(copy.deepcopy(before[1]))
    return {name: torch.stack(own) for name, own in found.items()}


def product(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean over all pairs of different questions."""
    all_pairs = a.sum(0) @ b.sum(0)
    if len(a) != len(b):  # they are of other questions anyway
        return (all_pairs / (len(a) * len(b))).item()
    return ((all_pairs - (a * b).sum()) / (len(a) * (len(a) - 1))).item()


def figures_of(means, squares, truths: dict, groups_a_batch: float) -> dict[str, float]:
    signal = product(means, means)
    noise = max(squares.mean().item() - signal, 0.0) / groups_a_batch
    signal = max(signal, 1e-9 * noise, 1e-30)
    found = {"noise": math.sqrt(noise / signal)}
    for name, truth in truths.items():
        along = product(means, truth) / math.sqrt(max(product(truth, truth), 1e-30))
        found[f"mean, {name}"] = along / math.sqrt(signal)
        found[f"batch, {name}"] = along / math.sqrt(signal + noise)
    return found


def half_interval(values: list[float]) -> float:
    """Of a figure, by what it is without one question after the other: a jackknife, of 95 %."""
    values = torch.tensor(values, dtype=torch.float64)
    spread = (values - values.mean()).square().sum() * (len(values) - 1) / len(values)
    return 1.96 * spread.sqrt().item()


def without_each(count: int) -> list[list[int]]:
    return [[j for j in range(count) if j != i] for i in range(count)]


def is_lost(gradients: torch.Tensor) -> bool:
    """In the noise: the interval of its squared length reaches 0."""
    lengths = [product(gradients[kept], gradients[kept]) for kept in without_each(len(gradients))]
    return product(gradients, gradients) <= half_interval(lengths)


def with_intervals(means, squares, truths: dict, groups_a_batch: float,
                   beside: list[float] | None = None) -> tuple[dict[str, list], list[float]]:
    """{figure: [value, half of its interval]}, from questions, or from batches of questions that
    are not those of the truths. Of what is lost in noise no direction is told. And the cosine of a
    batch, as it is and without each question: what the next estimator is held `beside`, so that
    what the choice of questions does to both is not counted."""
    known = {name: truth for name, truth in truths.items() if not is_lost(truth)}
    whole = figures_of(means, squares, known, groups_a_batch)
    parts = [figures_of(means[kept], squares[kept], {
        name: truth[kept] if len(truth) == len(means) else truth
        for name, truth in known.items()}, groups_a_batch) for kept in without_each(len(means))]
    found = {name: [round(value, 4), round(half_interval([part[name] for part in parts]), 4)]
             for name, value in whole.items()}
    lost = {name for name in truths if name not in known}
    nowhere = is_lost(means)
    for name in ("noise", *(f"{of}, {name}" for of in ("mean", "batch") for name in truths)):
        if name.partition(", ")[2] in lost or nowhere and not name.startswith("batch"):
            found[name] = LOST
    cosines = [each.get(f"batch, {OWN}", math.nan) for each in (whole, *parts)]
    if beside and not math.isnan(beside[0]) and found[f"batch, {OWN}"] != LOST:
        if len(beside) == len(cosines):
            half = half_interval([own - other for own, other in zip(cosines[1:], beside[1:])])
        else:  # they are of other questions
            half = math.hypot(half_interval(cosines[1:]), half_interval(beside[1:]))
        found[BEYOND] = [round(cosines[0] - beside[0], 4), round(half, 4)]
    return found, cosines


def known_to(truth: torch.Tensor) -> float:
    """The cosine of a truth that so many questions tell with that of all questions."""
    return math.sqrt(max(0.0, product(truth, truth)) / truth.mean(0).square().sum().item())


def own_truth(pool: Pool, task, estimator: Estimator, training) -> torch.Tensor:
    """The gradient of the expected reward that the estimator is paid, at the temperature at which
    it draws, less its KL term; over L, as in the loss."""
    rewards = [[reward_of(each, task, estimator) for each in group] for group in pool.groups]
    truth = truth_of(rewards, pool.sketches) / training.max_new_gen_tokens
    if beta := training.kl_beta:
        truth = truth + beta * pool.penalties[training.kl_in].mean(1)
    return truth


def measured(config, num_questions: int, answers_each: int, rounds: int, num_batches: int,
             begun_as: str) -> dict:
    run, pools = one_step.prepare(config), {}
    questions = questions_of(run, num_questions + num_batches * BATCH // Estimator().G)
    reference = None
    if begun_as != config.model.name:  # else there is no KL yet
        model = config.model.model_copy(update={"name": begun_as})
        begun, _ = main.load_model(config.model_copy(update={"model": model}))
        reference = main.make_reference(main.Policy, begun, config)
    for temperature in (None, *{each.temperature for each in ESTIMATORS.values()} - {None}):
        own = run
        if temperature is not None:
            sampling = config.sampling.model_copy(update={"temperature": temperature})
            own = one_step.prepare(config.model_copy(update={"sampling": sampling}))
        pools[temperature] = pool_of(own, questions[:num_questions],
                                     answers_each // (2 if temperature else 1))
    with_kl = reference and pool_of(run, questions[:num_questions], answers_each // 4, reference)
    pool, task = pools[None], run.task
    right = [[each.reward_parts[task.SOLVED] for each in group] for group in pool.groups]
    solved = truth_of(right, pool.sketches)
    answers = [each for group in pool.groups for each in group]
    found = {"solved": sorted(round(sum(each) / answers_each, 3) for each in right),
             "different": round(sum(len({tuple(each.completion_ids) for each in group})
                                    for group in pool.groups) / len(answers), 3),
             "cut off": round(sum(each.is_truncated for each in answers) / len(answers), 3),
             "tokens": round(sum(each.num_tokens for each in answers) / len(answers), 1),
             "known to": {}, "estimators": {}}
    beside = None
    for name, estimator in sorted(ESTIMATORS.items(), key=lambda each: each[0] != DEFAULT):
        training = training_of(config, estimator)
        own = with_kl if training.kl_beta else pools[estimator.temperature]
        if not own or estimator.G > len(own.groups[0]):
            continue
        for each in (each for group in own.groups for each in group):
            each.reward = reward_of(each, task, estimator)
        truths = {OWN: own_truth(own, task, estimator, training), SOLVED: solved}
        means, squares = by_question(own, training, estimator.change, rounds)
        found["estimators"][name], cosines = with_intervals(means, squares, truths,
                                                            BATCH / estimator.G, beside)
        beside = beside or cosines
    truths = {OWN: own_truth(pool, task, Estimator(), training_of(config, Estimator())),
              SOLVED: solved}
    found["known to"] = {name: round(known_to(truth), 3) for name, truth in truths.items()}
    later = later_updates(run, questions[num_questions:]) if num_batches else {}
    for name, batches in later.items():
        found["estimators"][name], _ = with_intervals(batches, batches.square().sum(1), truths, 1,
                                                      beside)
    return found


def show(name: str, found: dict) -> None:
    solved = found["solved"]
    hard = sum(each < 0.1 for each in solved)
    print(f"{name}: {100 * found['different']:.0f} % of answers differ, "
          f"{sum(solved) / len(solved):.2f} are right; {hard} of {len(solved)} questions are "
          "solved less than one time in ten; the cosine of the truth as known with the whole truth "
          f"is {found['known to'][OWN]:.2f}\n\n"
          f"| estimator | mean | with {SOLVED} | one batch | beyond Dr. GRPO | noise / signal "
          f"| answers |\n|{' --- |' * 7}")
    for estimator in [*ESTIMATORS, *LATER]:
        if estimator not in found["estimators"]:
            continue
        row = {BEYOND: LOST, **found["estimators"][estimator]}
        along, noise = row[f"mean, {OWN}"][0], row["noise"][0]
        needed = ("" if along is None else "never" if along <= 0.9 else
                  f"{float(f'{BATCH * noise ** 2 / ((along / 0.9) ** 2 - 1):.2g}'):,.0f}")
        shown = ["" if (estimator, key) == (DEFAULT, BEYOND) else "lost in noise"
                 if row[key] == LOST else f"{row[key][0]:{sign}.2f} ± {row[key][1]:.2f}"
                 for key, sign in ((f"mean, {OWN}", ""), (f"mean, {SOLVED}", ""),
                                   (f"batch, {OWN}", ""), (BEYOND, "+"))]
        shown += ["" if noise is None else f"{noise:.1f}", needed]
        print(f"| {estimator} | {' | '.join(shown)} |", flush=True)


def runs_of(path: Path | None) -> dict[str, list[tuple[float, float]]]:
    """{estimator: what share each run that learned with it solved before and in the end}, from what
    bench/experiments.py keeps."""
    runs: dict[str, list] = {}
    for title, record in kept.read(path).items() if path else ():
        name = title.rpartition(" seed ")[0]
        if name in ESTIMATORS:
            runs.setdefault(name, []).append(
                (record["curve"][0]["solved"], record["curve"][-1]["solved"]))
    return runs


def show_ends(known: dict, runs: dict[str, list[tuple[float, float]]]) -> None:
    """What runs made of it, the best first."""
    print(f"\n| | cosine of a batch at {', '.join(known)} | solved in the end |\n|{' --- |' * 3}")
    ends = {name: [end for _, end in own] for name, own in runs.items()}
    for name in sorted(ends, key=lambda name: -sum(ends[name])):
        cosines = [found["estimators"].get(name, {}).get(f"batch, {OWN}")
                   for found in known.values()]
        shown = ["none" if each is None else "lost in noise" if each == LOST else f"{each[0]:.2f}"
                 for each in cosines]
        print(f"| {name} | {', '.join(shown)} | {' '.join(f'{end:.2f}' for end in ends[name])} |")


def draw(known: dict, runs: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Bars are the cosine of one batch with the truth, dots that of the mean of many; a panel for
    each model, unless all is lost there, and one for what runs made of it."""
    known = {model: found for model, found in known.items()
             if found["estimators"][DEFAULT][f"batch, {OWN}"] != LOST} or known
    places, place = {}, 0.0
    for family in (*FAMILIES.values(), LATER):
        for name in family:
            if any(name in found["estimators"] for found in known.values()):
                places[name] = place = place + 1
        place += 0.7
    figure = Figure(figsize=(3 + 3.2 * len(known) + 2 * bool(runs), 0.28 * place + 1.2),
                    layout="constrained")
    panels = figure.subplots(1, len(known) + bool(runs), sharey=True, squeeze=False, width_ratios=[
        3] * len(known) + [2] * bool(runs))[0]
    for axes, (model, found) in zip(panels, known.items()):
        for name, place in places.items():
            draw_row(axes, place, found["estimators"].get(name, {}), name == DEFAULT)
        axes.set(title=f"{model}: {100 * found['different']:.0f} % of answers differ",
                 xlabel=f"cosine with the true gradient\nof {OWN}", xlim=(0, 1.25))
    if runs:
        for name, own in runs.items():
            panels[-1].plot([end for _, end in own], [places[name]] * len(own), "|", markersize=11,
                            markeredgewidth=2, color="#737373" if name == DEFAULT else "#15803d")
        for style, shares in zip(":-", zip(*runs[DEFAULT])):  # before, and in the end
            panels[-1].axvline(sum(shares) / len(shares), color="#a3a3a3", linestyle=style,
                               linewidth=0.8)
        panels[-1].set(xlim=(0, None), title="runs of 60 steps",
                       xlabel="share solved, each seed\n(dotted: before)")
    for axes in panels:
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks([*places.values()], [*places])
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    each_once = dict(zip(labels, handles))
    figure.legend(each_once.values(), each_once.keys(), loc="outside upper center", ncols=3,
                  frameon=False)
    figure.savefig(path, dpi=80)


def draw_row(axes, place: float, row: dict, is_default: bool) -> None:
    (one, half), (many, spread) = (row.get(f"{of}, {OWN}", LOST) for of in ("batch", "mean"))
    if one is not None:
        axes.barh(place, one, xerr=half, ecolor="#737373",
                  label="Dr. GRPO's" if is_default else f"one batch of {BATCH} answers",
                  color="#a3a3a3" if is_default else "#fdba74")
        if is_default:
            axes.axvline(one, color="#a3a3a3", linewidth=0.8)
    if many is not None:
        axes.errorbar(many, place, xerr=spread, fmt="o", color="#1d4ed8",
                      label="the mean of many batches")
    else:
        axes.text(1, place, "lost in noise" if row else "not measured", color="#737373",
                  ha="center", va="center", fontsize=8)


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", metavar="NAME=FOLDER",
                        help="whose answers; may be given again (first=tiny/model)")
    parser.add_argument("--questions", type=int, default=64, help="at least 3")
    parser.add_argument("--answers", type=int, default=64, help="to each question, at least 8")
    parser.add_argument("--rounds", type=int, default=2, help="how often a pool is dealt out")
    parser.add_argument("--batches", type=int, default=8, help="for the later updates; 0: none")
    parser.add_argument("--config", action="append", default=[], help="as for main.py")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "estimators.json",
                        help="what it holds under a NAME is not measured again")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--runs", type=Path, help="what bench/experiments.py keeps, to set beside")
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    if (options.questions < 3 or options.answers < 8 or options.rounds < 1
            or options.batches in (1, 2, options.questions)):
        parser.error("3 questions with 8 answers each, dealt out once, are the least, and 3 "
                     "batches (but not as many as questions)")
    models = [model.partition("=") for model in options.model or ["first=tiny/model"]]
    if not all(folder for _, _, folder in models):
        parser.error("--model NAME=FOLDER, like before=tiny/model")
    torch.manual_seed(0)
    known = kept.read(options.data)
    try:
        join()
        for name, _, folder in models:
            if name not in known:
                own = ask.settings_of(Path(folder))
                keys = [*(word for path in options.config for word in ("--config", path)),
                        *own, *options.keys]
                config = load_config([*keys, f"model.name={json.dumps(folder)}",
                                      "training.shard=false"])
                known[name] = measured(
                    config, options.questions, options.answers, options.rounds, options.batches,
                    load_config(keys).model.name if own else folder)
                kept.write(options.data, known)
            show(name, known[name])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shown, runs = {name: known[name] for name, _, _ in models}, runs_of(options.runs)
    if runs:
        show_ends(shown, runs)
    if options.picture:
        draw(shown, runs, options.picture)
    print(json.dumps({name: found["estimators"] for name, found in shown.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
