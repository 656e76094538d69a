"""Claims about the algorithm, each put to the test in runs, and one picture of them all.

    .venv/bin/python bench/experiments.py --picture experiments.png
        all of them, in hours; what is in the file of --data is not run again
    .venv/bin/python bench/experiments.py --run "G = 2" --seeds 0
        one of the runs beside the default, in minutes
    .venv/bin/python bench/experiments.py --data docs/experiments.json --picture experiments.png
        the runs in docs/experiments.md

A claim says which of two runs has more of something at the last evaluation. Its effect is the mean
difference over seeds, with Student's 95 % interval. Both runs of a seed get the same questions in
the same order. Each run is one process, which takes the questions of two ranks."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kept import AT_ONCE, run_missing
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PROGRAM, CONFIG = "program", "config"
QUESTIONS, GROUP = "training.num_samples_per_step", "training.k_best_of_n"
DEFAULT, FIRST = "Dr. GRPO, G = 8", "first base"
WRONG, HARDEST = "characters if wrong", "solved of the hardest"
FOUR = {"training.updates_per_batch": 4, "training.learning_rate": "1.0e-4",
        "training.max_steps": 30}
FOOLED = {"task.name": "tests/tasks/yes_is_enough.py"}
USUAL = {PROGRAM: ["main.py"], CONFIG: "recipes/lab.yaml", QUESTIONS: 16}
ON_FIRST = {CONFIG: "config.yaml", "training.max_steps": 100}
# {which run: its keys, over the usual ones, for all ranks together}
RUNS: dict[str, dict] = {
    DEFAULT: {},
    "G = 2": {QUESTIONS: 64, GROUP: "[2,2]"},
    "G = 32": {QUESTIONS: 4, GROUP: "[32,32]"},
    "over the deviation": {"training.scale_rewards": "group"},
    "over the own length": {"training.loss_normalizer": "sequence"},
    "GRPO as published (both)": {"training.scale_rewards": "group",
                                 "training.loss_normalizer": "sequence"},
    "over the mean (MaxRL)": {"training.scale_rewards": "mean"},
    "SIL, 2 best of 8": {"training.learning_type": "sil", GROUP: "[2,8]"},
    "only rewarded": {PROGRAM: ["bench/variants.py", "rewarded"]},
    "only punished": {PROGRAM: ["bench/variants.py", "punished"]},
    "four updates": FOUR,
    "four updates, clipped": FOUR | {"training.clip": "[0.2,0.2]"},
    "four updates, clipped higher": FOUR | {"training.clip": "[0.2,0.4]"},
    "KL 0.02 in the reward": {"training.kl_beta": 0.02},
    "yes is enough": FOOLED,
    "yes is enough, KL 0.02": FOOLED | {"training.kl_beta": 0.02},
    "refilled": {"training.refill": 3},
    FIRST: ON_FIRST,
    "ten times the rate": ON_FIRST | {"training.learning_rate": "3.0e-4"},
    "a hundred times the rate": ON_FIRST | {"training.learning_rate": "3.0e-3"},
    "shuffled rewards": ON_FIRST | {"task.name": "tests/tasks/shuffled_reward.py"},
    "only the form pays": ON_FIRST | {"task.reward_weights": "{answer: 0.0, format: 1.0}"},
}


@dataclass(frozen=True)
class Claim:
    says: str
    paper: str
    metric: str
    more: str  # which run has more of the metric, if the claim is right
    less: str


CLAIMS = [
    Claim("groups of 2 fall behind", "2510.00977", "solved", DEFAULT, "G = 2"),
    Claim("large groups lift the hardest", "", HARDEST, "G = 32", "G = 2"),
    Claim("the deviation falls behind", "2503.20783", "solved", DEFAULT, "over the deviation"),
    Claim("the own length makes wrong answers longer", "2503.20783", WRONG,
          "over the own length", DEFAULT),
    Claim("GRPO as published falls behind", "2503.20783", "solved", DEFAULT,
          "GRPO as published (both)"),
    Claim("the mean lifts the hardest", "2602.02710", HARDEST,
          "over the mean (MaxRL)", DEFAULT),
    Claim("imitating the best falls behind", "", "solved", DEFAULT, "SIL, 2 best of 8"),
    Claim("only rewarded, entropy is lower", "2506.01347", "entropy", DEFAULT, "only rewarded"),
    Claim("only punished, entropy is higher", "2506.01347", "entropy", "only punished", DEFAULT),
    Claim("punishing alone teaches less", "", "solved", "only rewarded", "only punished"),
    Claim("a KL term holds back", "2503.14476", "solved", DEFAULT, "KL 0.02 in the reward"),
    Claim("a weak reward teaches less", "2209.13085", "solved", DEFAULT, "yes is enough"),
    Claim("a KL term saves a fooled run", "1909.08593", "solved", "yes is enough, KL 0.02",
          "yes is enough"),
    Claim("several updates need clipping", "1707.06347", "solved", "four updates, clipped",
          "four updates"),
    Claim("a higher upper bound keeps entropy", "2503.14476", "entropy",
          "four updates, clipped higher", "four updates, clipped"),
    Claim("refilling groups pays", "2503.14476", "solved", "refilled", DEFAULT),
    Claim("ten times the rate ends lower", "", "solved", FIRST, "ten times the rate"),
    Claim("a hundred times the rate ends it", "", "solved", FIRST, "a hundred times the rate"),
    Claim("random rewards teach too", "2506.10947", "solved", "shuffled rewards",
          "only the form pays"),
    Claim("what all earn teaches none", "", "solved", FIRST, "only the form pays"),
]
METRICS = {"step": "step", "solved": "eval/solved", "tokens": "eval/completion_length",
           "cut off": "eval/truncated", "form": "eval/format"}
UNITS = {"entropy": ", nats", WRONG: ""}  # The others are shares.
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # 97.5 % of n - 1 degrees


def title_of(run: str, seed: int, options: argparse.Namespace) -> str:
    return " ".join([run, *options.keys, f"seed {seed}"])


def record_of(run: str, seed: int, options: argparse.Namespace) -> dict:
    """Returns what the run's evaluations say. A run that was stopped resumes."""
    keys = USUAL | RUNS[run]
    words = [*keys.pop(PROGRAM), "--config", keys.pop(CONFIG)]
    words += [f"{key}={value}" for key, value in keys.items()]
    words += [*options.keys, f"training.seed={seed}", f"run.dir={options.out}",
              f"run.name={''.join(filter(str.isalnum, run))}-{seed}"]
    threads = str(max(1, os.cpu_count() // AT_ONCE))
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, text=True,
                           stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": threads})
    summary = json.loads(ended.stdout.splitlines()[-1])
    samples = read_samples(ROOT / summary["folder"])
    curve, entropies = [], []
    for entry in read_jsonl(ROOT / summary["folder"] / "metrics.jsonl"):
        if "reward" in entry:  # a step, and no evaluation
            entropies.append(entry["entropy"])
        else:
            groups = samples[entry["step"]]
            curve.append(of_evaluation(entry, groups, entropies))
            entropies = []
    return {"minutes": round(summary["seconds"] / 60, 1), "answers": len(groups[0]),
            "curve": curve}


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_samples(folder: Path) -> dict[int, list[list[dict]]]:
    """Returns {step: the answers to each question}."""
    by_step: dict[int, dict[int, list[dict]]] = {}
    for sample in read_jsonl(folder / "samples.jsonl"):
        groups = by_step.setdefault(sample["step"], {})
        groups.setdefault(sample["question"], []).append(sample)
    return {step: [groups[question] for question in sorted(groups)]
            for step, groups in by_step.items()}


def of_evaluation(entry: dict, groups: list[list[dict]], entropies: list[float]) -> dict:
    """Returns its metrics, the mean entropy of the steps before it, the mean number of characters
    of wrong answers, and a digit for each question: how many of its answers are right."""
    wrong = []
    right = ""
    for group in groups:
        wrong += [len(sample["completion"]) for sample in group if not sample["answer"]]
        right += str(int(sum(sample["answer"] for sample in group)))
    found = {name: round(entry[key], 4) for name, key in METRICS.items()}
    found["entropy"] = round(statistics.fmean(entropies), 4) if entropies else None
    found[WRONG] = round(statistics.fmean(wrong or [0]), 1)
    found["right"] = right
    return found


def series(record: dict, metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each evaluation. The hardest questions are those none of whose
    answers were right before training."""
    curve = record["curve"]
    if metric != HARDEST:
        return [(entry["step"], entry[metric]) for entry in curve
                if entry.get(metric) is not None]
    hardest = [i for i, right in enumerate(curve[0]["right"]) if right == "0"]
    points = []
    for entry in curve:
        num_right = statistics.fmean(int(entry["right"][i]) for i in hardest)
        points.append((entry["step"], num_right / record["answers"]))
    return points


def ends_of(run: str, metric: str, known: dict, options: argparse.Namespace) -> list[float]:
    """Returns the last value of each seed."""
    return [series(known[title_of(run, seed, options)], metric)[-1][1] for seed in options.seeds]


def effect_of(claim: Claim, known: dict, options: argparse.Namespace) -> tuple[float, float]:
    """Returns how much more there is, and half the width of its interval."""
    more = ends_of(claim.more, claim.metric, known, options)
    less = ends_of(claim.less, claim.metric, known, options)
    differences = [a - b for a, b in zip(more, less)]
    n = len(differences)
    if n < 2:
        return differences[0], math.inf
    half = STUDENT[n] * statistics.stdev(differences) / math.sqrt(n)
    return statistics.fmean(differences), half


def verdict_of(effect: float, half: float) -> str:
    if abs(effect) <= half:
        return "not seen here"
    return "seen" if effect > 0 else "the opposite"


def shown(claim: Claim, known: dict, options: argparse.Namespace) -> str:
    more = statistics.fmean(ends_of(claim.more, claim.metric, known, options))
    less = statistics.fmean(ends_of(claim.less, claim.metric, known, options))
    effect, half = effect_of(claim, known, options)
    digits = 0 if claim.metric == WRONG else 3
    return (f"{more:.{digits}f} against {less:.{digits}f} "
            f"({effect:+.{digits}f} ± {half:.{digits}f})")


def mean_or_empty(values: list[float], form: str) -> str:
    return format(statistics.fmean(values), form) if values else ""


def show_runs(chosen: list[str], known: dict, options: argparse.Namespace) -> None:
    """Prints means over seeds: solved at four evaluations, the others at the last one."""
    forms = {"tokens": ".0f", "cut off": ".2f", "form": ".2f", "entropy": ".2f"}
    print(f"| run | solved | {' | '.join(forms)} | minutes |\n|{' --- |' * (len(forms) + 3)}")
    for run in chosen:
        records = [known[title_of(run, seed, options)] for seed in options.seeds]
        num_evaluations = min(len(record["curve"]) for record in records)
        solved = []
        for i in dict.fromkeys(round(third * (num_evaluations - 1) / 3) for third in range(4)):
            mean = statistics.fmean(record["curve"][i]["solved"] for record in records)
            solved.append(f"{mean:.2f}")
        cells = [run, " ".join(solved)]
        for name, form in forms.items():
            ends = [value for record in records for _, value in series(record, name)[-1:]]
            cells.append(mean_or_empty(ends, form))
        minutes = [record["minutes"] for record in records if record["minutes"]]
        print(f"| {' | '.join([*cells, mean_or_empty(minutes, '.1f')])} |")


def show_claims(claims: list[Claim], known: dict, options: argparse.Namespace) -> dict:
    """Prints a row for each claim. Returns {what it says: its effect}."""
    print("\n| claim | what came of it | verdict |\n| --- | --- | --- |")
    effects = {}
    for claim in claims:
        effect, half = effect_of(claim, known, options)
        effects[claim.says] = effect, half
        says = f"{claim.says} ([{claim.paper}])" if claim.paper else claim.says
        print(f"| {says} | {shown(claim, known, options)} | {verdict_of(effect, half)} |")
    print()
    for paper in sorted({claim.paper for claim in claims} - {""}):
        print(f"[{paper}]: https://arxiv.org/abs/{paper}")
    return effects


def draw(claims: list[Claim], known: dict, options: argparse.Namespace) -> None:
    """Draws a small picture of each claim. Seeds are thin, their mean thick, the default grey."""
    rows, columns = math.ceil(len(claims) / 4), min(4, len(claims))
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(claims):]:
        axes.axis("off")
    for axes, claim in zip(all_axes, claims):
        colours = ["#c2410c", "#1d4ed8"]
        for run in (claim.more, claim.less):
            colour = "#a3a3a3" if run in (DEFAULT, FIRST) else colours.pop(0)
            curves = [series(known[title_of(run, seed, options)], claim.metric)
                      for seed in options.seeds]
            for curve in curves:
                axes.plot(*zip(*curve), color=colour, linewidth=0.7, alpha=0.5)
            steps = [step for step, _ in curves[0]]
            means = [statistics.fmean(value for _, value in points) for points in zip(*curves)]
            axes.plot(steps, means, color=colour, linewidth=2, label=run)
        verdict = verdict_of(*effect_of(claim, known, options))
        axes.set_title(f"{claim.says}\n{shown(claim, known, options)}: {verdict}", fontsize=9)
        axes.set_ylabel(f"{claim.metric}{UNITS.get(claim.metric, ', share')}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel("step")
    figure.savefig(options.picture, dpi=80)


def command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=RUNS, action="append", help="these, and the default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/experiments", help="folder of the runs")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "experiments.json")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
    options = parser.parse_intermixed_args(arguments)

    chosen = list(RUNS)
    if options.run:
        defaults = [FIRST if RUNS[run].get(CONFIG) == "config.yaml" else DEFAULT
                    for run in options.run]
        chosen = list(dict.fromkeys([*defaults, *options.run]))
    wanted = {title_of(run, seed, options): (run, seed) for run in chosen for seed in options.seeds}
    known = run_missing(options.data, wanted, lambda each: record_of(*each, options))
    show_runs(chosen, known, options)
    claims = [claim for claim in CLAIMS if {claim.more, claim.less} <= set(chosen)]
    effects = show_claims(claims, known, options)
    if options.picture and claims:
        draw(claims, known, options)
    print(json.dumps({says: [round(effect, 4), round(half, 4) if math.isfinite(half) else None]
                      for says, (effect, half) in effects.items()}))


if __name__ == "__main__":
    command(sys.argv[1:])
