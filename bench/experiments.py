"""Claims about the algorithm, each tested in runs, and a picture of what matters most.

    .venv/bin/python bench/experiments.py --show --data docs/experiments.json \
        --picture docs/experiments.png
        the tables and the picture of docs/experiments.md, from the runs in the file, in seconds
        (with --data docs/teachers.json --seeds 0 --picture docs/teachers.png the ones about
        teachers, and with changes.json and changing.png the ones in docs/changing.md)
    .venv/bin/python bench/experiments.py --run "Dr. GRPO, G = 8" --run "G = 2" --seeds 0
        these runs, in minutes; runs already in the --data file aren't repeated
    .venv/bin/python bench/experiments.py
        all runs, in hours

A claim says which of two runs has more of something at the last evaluation. Its effect is the mean
difference over seeds. The verdict uses the wider of two 95 % intervals, one between seeds and one
between questions. Both runs of a seed get the same questions in the same order. Each run is one
process, which takes the questions of two ranks."""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import kept
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machinery.code import MAIN, digest_of

PROGRAM, CONFIG = "program", "config"
QUESTIONS, GROUP = "training.num_samples_per_step", "training.k_best_of_n"
TEACHER = "training.teacher"

# ---------------------------------------------------------------- runs

DEFAULT, TINY = "Dr. GRPO, G = 8", "tiny model, default"
STANDARD_DEVIATION = "divided by the standard deviation"
ANSWER_LENGTH = "divided by the answer length"
MEAN = "divided by the mean (MaxRL)"
SIL = "SIL, 2 best of 8"
BOTH = "divided by both, as in GRPO"
PUBLISHED = "GRPO as published"
LAB_TEACHER = "Dr. GRPO, 120 steps"
DISTILLED = "distilled"
TEACHERS_ANSWERS = "fine-tuned on the teacher's answers"
MASKED = "truncated answers masked"
# A second name after it says what else differs from the default.
ANSWER_PAYS = "only the answer pays"

USUAL = {PROGRAM: ["main.py"], CONFIG: "recipes/lab.yaml", QUESTIONS: 16}
ON_TINY = {CONFIG: "config.yaml", "training.max_steps": 100}
FOUR_UPDATES = {"training.updates_per_batch": 4, "training.learning_rate": "1.0e-4",
                "training.max_steps": 30}
# A part with weight 0.0 earns nothing, but is measured. A part that's left out isn't measured.
NO_FORMAT = {"task.reward_weights": "{answer: 1.0, format: 0.0}"}

# `record_of` fills in where the teacher is.
DISTILL = {"training.learning_type": "distill", TEACHER: LAB_TEACHER}

# {run: its keys, for all ranks together, which override the usual ones}
RUNS: dict[str, dict] = {
    DEFAULT: {},
    "G = 2": {QUESTIONS: 64, GROUP: "[2,2]"},
    "G = 32": {QUESTIONS: 4, GROUP: "[32,32]"},
    STANDARD_DEVIATION: {"training.scale_rewards": "group"},
    ANSWER_LENGTH: {"training.loss_normalizer": "sequence"},
    BOTH: {"training.scale_rewards": "group", "training.loss_normalizer": "sequence"},
    PUBLISHED: {"training.scale_rewards": "group", "training.loss_normalizer": "sequence",
                "training.kl_beta": 0.04, "training.kl_in": "loss"},
    MEAN: {"training.scale_rewards": "mean"},
    SIL: {"training.learning_type": "sil", GROUP: "[2,8]"},
    ANSWER_PAYS: NO_FORMAT,
}
for run in (STANDARD_DEVIATION, PUBLISHED, MEAN, SIL):
    RUNS[f"{ANSWER_PAYS}, {run}"] = RUNS[run] | NO_FORMAT
RUNS |= {
    MASKED: {"training.mask_truncated": "true"},
    "only positive advantages": {PROGRAM: ["bench/changed.py", "mistakes/rewarded"]},
    "only negative advantages": {PROGRAM: ["bench/changed.py", "mistakes/punished"]},
    "four updates": FOUR_UPDATES,
    "four updates, clipped": FOUR_UPDATES | {"training.clip": "[0.2,0.2]"},
    "KL 0.02 in the reward": {"training.kl_beta": 0.02},
    "yes is enough": {"task.name": "examples/yes_is_enough.py"},
    TINY: ON_TINY,
    "ten times the learning rate": ON_TINY | {"training.learning_rate": "3.0e-4"},
    "a hundred times the learning rate": ON_TINY | {"training.learning_rate": "3.0e-3"},
    "shuffled rewards": ON_TINY | {"task.name": "examples/shuffled_reward.py"},
    LAB_TEACHER: {"training.max_steps": 120},
    DISTILLED: DISTILL,
    f"{DISTILLED}, groups of one": DISTILL | {QUESTIONS: 128, GROUP: "[1,1]"},
    f"{DISTILLED}, three times the learning rate": DISTILL | {"training.learning_rate": "1.5e-4"},
    TEACHERS_ANSWERS: DISTILL | {PROGRAM: ["bench/changed.py", "mistakes/teachers-answers"]},
    "only the format pays": ON_TINY | {"task.reward_weights": "{answer: 0.0, format: 1.0}"},
}
CHANGES = sorted(path.stem for path in (ROOT / "changes").glob("*.diff"))
RUNS |= {name: {PROGRAM: ["bench/changed.py", name]} for name in CHANGES}
# With 256 tokens, two turns would be longer than the lab model can read.
RUNS["two-turns"] |= {"training.max_new_gen_tokens": 192}
TINY_CHANGED = "tiny model, weak positives"
RUNS[TINY_CHANGED] = ON_TINY | RUNS["weak-positives"]

# ---------------------------------------------------------------- claims

SOLVED, HARDEST = "solved", "solved of the hardest"
WRONG, ENTROPY = "characters of wrong answers", "entropy"
# The ones that an evaluation measures, and what it calls them.
METRICS = {"step": "step", SOLVED: "eval/solved", "answer length": "eval/completion_length",
           "truncated": "eval/truncated", "format": "eval/reward/format"}


@dataclass(frozen=True)
class Claim:
    says: str
    paper: str  # that makes the claim, or gives the reason for it
    metric: str
    more: str  # which run has more of the metric, if the claim is right
    less: str


CLAIMS = [
    Claim("groups of 2 fall behind", "", SOLVED, DEFAULT, "G = 2"),
    Claim("groups of 32 lift the hardest questions more than groups of 2", "", HARDEST,
          "G = 32", "G = 2"),
    Claim("dividing by the standard deviation falls behind", "", SOLVED,
          DEFAULT, STANDARD_DEVIATION),
    Claim("dividing by the standard deviation falls behind, where only the answer pays",
          "2503.20783", SOLVED, ANSWER_PAYS, f"{ANSWER_PAYS}, {STANDARD_DEVIATION}"),
    Claim("dividing by the answer length makes wrong answers longer", "2503.20783", WRONG,
          ANSWER_LENGTH, DEFAULT),
    Claim("dividing by both falls behind", "", SOLVED, DEFAULT, BOTH),
    Claim("GRPO as published falls behind", "2503.20783", SOLVED, DEFAULT, PUBLISHED),
    Claim("GRPO as published falls behind, where only the answer pays", "2503.20783", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {PUBLISHED}"),
    Claim("the KL term of GRPO as published holds it back", "2503.20783", SOLVED, BOTH, PUBLISHED),
    Claim("masking truncated answers helps", "2503.14476", SOLVED, MASKED, DEFAULT),
    Claim("dividing by the mean falls behind", "", SOLVED, DEFAULT, MEAN),
    Claim("dividing by the mean falls behind, where only the answer pays", "", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {MEAN}"),
    Claim("dividing by the mean lifts the hardest questions", "", HARDEST, MEAN, DEFAULT),
    Claim("dividing by the mean lifts the hardest questions, where only the answer pays",
          "2602.02710", HARDEST, f"{ANSWER_PAYS}, {MEAN}", ANSWER_PAYS),
    Claim("self-imitation falls behind", "", SOLVED, DEFAULT, SIL),
    Claim("self-imitation falls behind, where only the answer pays", "", SOLVED,
          ANSWER_PAYS, f"{ANSWER_PAYS}, {SIL}"),
    Claim("a small reward for the format helps", "", SOLVED, DEFAULT, ANSWER_PAYS),
    Claim("only positive advantages lower the entropy", "2506.01347", ENTROPY,
          DEFAULT, "only positive advantages"),
    Claim("only negative advantages raise the entropy", "2506.01347", ENTROPY,
          "only negative advantages", DEFAULT),
    Claim("negative advantages alone teach less than positive ones", "", SOLVED,
          "only positive advantages", "only negative advantages"),
    Claim("a KL term holds back", "2503.14476", SOLVED, DEFAULT, "KL 0.02 in the reward"),
    Claim("a reward that can be fooled teaches less", "2209.13085", SOLVED,
          DEFAULT, "yes is enough"),
    Claim("several updates need clipping", "1707.06347", SOLVED, "four updates, clipped",
          "four updates"),
    Claim("ten times the learning rate ends lower", "", SOLVED,
          TINY, "ten times the learning rate"),
    Claim("a hundred times the learning rate ends lower", "", SOLVED,
          TINY, "a hundred times the learning rate"),
    Claim("shuffled rewards teach too", "2506.10947", SOLVED, "shuffled rewards",
          "only the format pays"),
    Claim("a reward that every answer earns teaches less", "", SOLVED,
          TINY, "only the format pays"),
]

# ---------------------------------------------------------------- one run


def title_of(run: str, seed: int, options: argparse.Namespace) -> str:
    return " ".join([run, *options.keys, f"seed {seed}"])


def record_of(
    run: str, seed: int, options: argparse.Namespace, own_keys: dict | None = None
) -> dict:
    """Returns what the run's evaluations measured. An interrupted run resumes."""
    keys = USUAL | (own_keys or RUNS[run])
    if TEACHER in keys:  # The keys name its run, which learned with seed 0.
        keys[TEACHER] = f"{options.out}/{folder_of(keys[TEACHER], 0)}/best"
    words = [*keys.pop(PROGRAM), "--config", keys.pop(CONFIG)]
    words += [f"{key}={value}" for key, value in keys.items()]
    words += [*options.keys, f"training.seed={seed}"]
    place = [f"run.dir={options.out}", f"run.name={folder_of(run, seed)}"]
    threads = str(max(1, os.cpu_count() // kept.AT_ONCE))
    ended = subprocess.run([sys.executable, *words, *place], cwd=ROOT, check=True, text=True,
                           stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": threads})
    summary = json.loads(ended.stdout.splitlines()[-1])
    folder = ROOT / summary["folder"]
    samples = samples_of(folder)
    curve = []
    entropies = []
    for entry in kept.read_lines(folder / "metrics.jsonl"):
        if "reward" not in entry:
            curve.append(of_evaluation(entry, samples[entry["step"]], entropies))
            entropies = []
        elif entry["updated"]:  # A step that learns nothing has no entropy.
            entropies.append(entry["entropy"])
    return {
        "commit": commit(),
        "code": digest_of({MAIN: (folder / MAIN).read_text()}),
        "settings": shlex.join(words).replace(f"{ROOT}/", ""),
        "arithmetic": torch.backends.cpu.get_cpu_capability().lower(),
        "minutes": round(summary["seconds"] / 60, 1),
        "answers": len(samples[0][0]),
        "curve": curve,
    }


def commit() -> str:
    """Returns the commit of what runs."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE).stdout.strip()


def folder_of(run: str, seed: int) -> str:
    return f"{''.join(filter(str.isalnum, run))}-{seed}"


def samples_of(folder: Path) -> dict[int, dict[int, list[dict]]]:
    """Returns {step: {question: its answers}}."""
    samples: dict[int, dict[int, list[dict]]] = {}
    for sample in kept.read_lines(folder / "samples.jsonl"):
        of_step = samples.setdefault(sample["step"], {})
        of_step.setdefault(sample["question"], []).append(sample)
    return samples


def of_evaluation(entry: dict, samples: dict[int, list[dict]], entropies: list[float]) -> dict:
    """Returns its metrics, the mean entropy of the steps before it, the mean number of characters
    in wrong answers, and a digit for each question: the number of its right answers."""
    wrong = []
    right = ""
    for answers in samples.values():
        wrong += [len(answer["completion"]) for answer in answers if not answer["solved"]]
        right += str(int(sum(answer["solved"] for answer in answers)))
    found = {name: round(entry[key], 4) for name, key in METRICS.items()}
    found[ENTROPY] = round(statistics.fmean(entropies), 4) if entropies else None
    found[WRONG] = round(statistics.fmean(wrong or [0]), 1)
    found["right"] = right
    return found


def shares_of(record: dict) -> list[float]:
    """Returns the final share of right answers to each question."""
    return [int(right) / record["answers"] for right in record["curve"][-1]["right"]]


def hardest_of(record: dict) -> list[int]:
    """Returns the places of the questions that had no right answer before training."""
    return [i for i, right in enumerate(record["curve"][0]["right"]) if right == "0"]


def end_of(record: dict, metric: str) -> float:
    """Returns the metric at the last evaluation."""
    if metric != HARDEST:
        return record["curve"][-1][metric]
    shares = shares_of(record)
    return statistics.fmean(shares[i] for i in hardest_of(record))


# ---------------------------------------------------------------- effects and verdicts

# Quantiles for half of a 95 % interval: {seeds: Student's}, and the normal one.
STUDENT = {1: math.inf, 2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
NORMAL = 1.96


@dataclass(frozen=True)
class Effect:
    more: float  # mean over seeds
    less: float
    seeds: float             # half of the 95 % interval between seeds
    questions: float | None  # and of the one between questions

    @property
    def difference(self) -> float:
        return self.more - self.less

    @property
    def half_width(self) -> float:
        return max(self.seeds, self.questions or 0.0)

    @property
    def verdict(self) -> str:
        if abs(self.difference) <= self.half_width:
            return "could be chance"
        return "holds" if self.difference > 0 else "the opposite"


def effect_of(claim: Claim, known: dict, options: argparse.Namespace) -> Effect:
    """Returns what came of the claim. There's an interval between questions only for shares whose
    records count the right answers to each question."""
    pairs = []
    for seed in options.seeds:
        more = known[title_of(claim.more, seed, options)]
        less = known[title_of(claim.less, seed, options)]
        pairs.append((more, less))
    ends_of_more = [end_of(more, claim.metric) for more, _ in pairs]
    ends_of_less = [end_of(less, claim.metric) for _, less in pairs]
    differences = [a - b for a, b in zip(ends_of_more, ends_of_less)]
    seeds = half_width_of(differences, STUDENT[len(pairs)])
    questions = None
    if claim.metric in (SOLVED, HARDEST) and "right" in pairs[0][0]["curve"][0]:
        questions = between_questions(pairs, claim.metric)
    return Effect(
        statistics.fmean(ends_of_more), statistics.fmean(ends_of_less), seeds, questions)


def half_width_of(values: list[float], quantile: float) -> float:
    """Returns half the width of the interval of their mean."""
    if len(values) < 2:
        return math.inf
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def between_questions(pairs: list[tuple[dict, dict]], metric: str) -> float:
    """Returns half the width of the evaluation's own interval. Both runs of a seed answer the same
    held-out questions, so each question gives one difference between two shares of right answers.
    Questions of different seeds count as different questions."""
    differences = []
    for more, less in pairs:
        shares_of_more = shares_of(more)
        shares_of_less = shares_of(less)
        places = hardest_of(more) if metric == HARDEST else range(len(shares_of_more))
        differences += [shares_of_more[i] - shares_of_less[i] for i in places]
    return half_width_of(differences, NORMAL)


# ---------------------------------------------------------------- tables

# What an evaluation measures besides `solved`, and how we print it.
OTHERS = {"answer length": ".0f", "truncated": ".2f", "format": ".2f", ENTROPY: ".2f"}
BEFORE = {DEFAULT: "lab model before training", TINY: "tiny model before training"}
UNITS = {SOLVED: "", HARDEST: " of the hardest", WRONG: " characters", ENTROPY: " nats"}


def show_runs(chosen: list[str], known: dict, options: argparse.Namespace) -> None:
    """Prints means over seeds, and for each model a row from before training."""
    print(f"| run | solved | {' | '.join(OTHERS)} | minutes |\n"
          f"|{' --- |' * (len(OTHERS) + 3)}")
    for run in chosen:
        records = [known[title_of(run, seed, options)] for seed in options.seeds]
        num_evaluations = min(len(record["curve"]) for record in records)
        four = dict.fromkeys(round(third * (num_evaluations - 1) / 3) for third in range(4))
        minutes = mean_or_empty([record["minutes"] for record in records], ".1f")
        if run in BEFORE:
            print(row_of(BEFORE[run], records, [0], ""))
        print(row_of(run, records, list(four), minutes))


def row_of(title: str, records: list[dict], places: list[int], minutes: str) -> str:
    """Returns `solved` at these places of the curves, and the other figures at the last place."""
    solved = []
    for i in places:
        solved.append(mean_or_empty([record["curve"][i][SOLVED] for record in records], ".2f"))
    cells = [title, " ".join(solved)]
    for name, digits in OTHERS.items():
        values = [record["curve"][places[-1]].get(name) for record in records]
        cells.append(mean_or_empty(values, digits))
    return f"| {' | '.join([*cells, minutes])} |"


def mean_or_empty(values: list[float | None], digits: str) -> str:
    measured = [value for value in values if value is not None]
    return format(statistics.fmean(measured), digits) if measured else ""


def show_claims(claims: list[Claim], known: dict, options: argparse.Namespace) -> dict:
    """Prints a row for each claim. Returns {what it says: [the difference, its ±]}."""
    print("\n| claim | should have more | should have less | difference | ± seeds | ± questions "
          f"| verdict |\n|{' --- |' * 7}")
    effects = {}
    for claim in claims:
        effect = effect_of(claim, known, options)
        effects[claim.says] = [round(effect.difference, 4), round(effect.half_width, 4)]
        says = f"{claim.says} ([{claim.paper}])" if claim.paper else claim.says
        digits = 0 if claim.metric == WRONG else 3
        unit = UNITS[claim.metric]
        questions = mean_or_empty([effect.questions], f".{digits}f")
        verdict = effect.verdict
        if verdict == "could be chance":
            verdict += f", up to {effect.difference + effect.half_width:.{digits}f} could hide"
        print(f"| {says} | {claim.more}: {effect.more:.{digits}f}{unit} "
              f"| {claim.less}: {effect.less:.{digits}f}{unit} "
              f"| {effect.difference:+.{digits}f} | {effect.seeds:.{digits}f} | {questions} "
              f"| {verdict} |")
    return effects


# ---------------------------------------------------------------- the picture

# Of the first run of a panel, the second, and so on.
COLOURS = ["#525252", "#d55e00", "#0072b2", "#009e73", "#cc79a7"]
# {title of a panel: its runs}
PANELS = {
    "The answer pays 1.0, and the format 0.1": [
        DEFAULT, MEAN, SIL, STANDARD_DEVIATION, PUBLISHED],
    "Only the answer pays": [
        ANSWER_PAYS,
        *[f"{ANSWER_PAYS}, {run}" for run in (MEAN, SIL, STANDARD_DEVIATION, PUBLISHED)]],
    "Who teaches": [LAB_TEACHER, SIL, DISTILLED, TEACHERS_ANSWERS],
    "One half of the advantages": [
        DEFAULT, "only positive advantages", "only negative advantages"],
    "Four updates, twice the learning rate": [DEFAULT, "four updates, clipped", "four updates"],
    "One change: right answers weigh a tenth": [TINY, TINY_CHANGED],
    "The tiny model (up to 1.0, and 100 steps)": [
        TINY, "shuffled rewards", "a hundred times the learning rate"],
}


def draw(chosen: list[str], known: dict, options: argparse.Namespace) -> None:
    """Draws the share solved by the chosen runs, in one panel for each entry of PANELS whose runs
    were all chosen."""
    panels = [(title, runs) for title, runs in PANELS.items() if set(runs) <= set(chosen)]
    figure = Figure(figsize=(6, 2 * max(1, len(panels)) + 0.4), layout="constrained")
    all_axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axes, (title, runs) in zip(all_axes, panels):
        axes.set_title(title, fontsize=13, fontweight="bold", loc="left")
        axes.set_ylim(0, 1 if TINY in runs else 0.5)
        axes.grid(alpha=0.3)
        draw_runs(axes, runs, known, options)
    curves = " (thin: one seed, thick: their mean)" if len(options.seeds) > 1 else ""
    figure.supxlabel(f"training step, of 128 answers{curves}", fontsize=12)
    figure.supylabel("share solved (lab model, unless stated)" if len(panels) > 1 else "solved",
                     fontsize=12)
    figure.savefig(options.picture, dpi=160)


def draw_runs(axes: Axes, runs: list[str], known: dict, options: argparse.Namespace) -> None:
    """Draws each seed of the runs thin and their mean thick. The legend has the mean's end."""
    for run, colour in zip(runs, COLOURS):
        curves = []
        for seed in options.seeds:
            curve = known[title_of(run, seed, options)]["curve"]
            steps = [entry["step"] for entry in curve]
            curves.append([entry[SOLVED] for entry in curve])
            axes.plot(steps, curves[-1], color=colour, linewidth=0.8, alpha=0.6)
        means = [statistics.fmean(values) for values in zip(*curves)]
        name = DEFAULT if run == ANSWER_PAYS else run.removeprefix(f"{ANSWER_PAYS}, ")
        label = textwrap.fill(f"{means[-1]:.2f}, {name}", width=24)
        axes.plot(steps, means, color=colour, linewidth=2.5, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1.08), fontsize=12, frameon=False,
                handlelength=1, labelspacing=0.3)


# ---------------------------------------------------------------- the command

def command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=RUNS, action="append", help="all, if you name none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/experiments", help="folder of the runs")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "experiments.json")
    parser.add_argument("--show", action="store_true", help="run nothing, only show --data")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
    options = parser.parse_intermixed_args(arguments)

    chosen = options.run or list(RUNS)
    if options.show:
        known = kept.read(options.data)
        chosen = [run for run in chosen
                  if all(title_of(run, seed, options) in known for seed in options.seeds)]
    else:
        wanted = {title_of(run, seed, options): (run, seed)
                  for run in chosen for seed in options.seeds}
        for has_teacher in (False, True):  # Teachers are trained first.
            these = {title: each for title, each in wanted.items()
                     if (TEACHER in RUNS[each[0]]) == has_teacher}
            known = kept.run_missing(
                options.data, these, lambda each: record_of(*each, options))
    show_runs(chosen, known, options)
    claims = [claim for claim in CLAIMS if {claim.more, claim.less} <= set(chosen)]
    effects = show_claims(claims, known, options)
    if options.picture:
        draw(chosen, known, options)
    print(json.dumps(effects))


if __name__ == "__main__":
    command(sys.argv[1:])
