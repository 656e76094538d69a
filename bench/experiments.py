"""Claims about the algorithm, each put to the test in runs, and one picture of them all.

    .venv/bin/python bench/experiments.py --picture experiments.png
        all of them, in hours. What it has run before is not run again
    .venv/bin/python bench/experiments.py --run "G = 2" --seeds 0
        one of their runs beside the default, in minutes
    .venv/bin/python bench/experiments.py --data docs/experiments.json --picture experiments.png
        the runs that docs/experiments.md tells of

A claim says which of two runs has more of something. Its effect is the mean difference over seeds
at the last evaluation; the two runs of a seed have the same questions in the same order. Intervals
are Student's, of 95 %. Each run is one process that takes the questions of two ranks; two runs at
once keep two cores busy. --data holds what each of their evaluations said."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kept import run_missing
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
    "sampler behind": {PROGRAM: ["bench/variants.py", "behind"]},
    "sampler behind, weighted": {PROGRAM: ["bench/variants.py", "behind-weighted"]},
    "coarse sampler": {PROGRAM: ["bench/variants.py", "coarse"]},
    "coarse sampler, weighted": {PROGRAM: ["bench/variants.py", "coarse-weighted"]},
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
    Claim("a sampler eight steps behind bends the run", "2410.18252", "solved", DEFAULT,
          "sampler behind"),
    Claim("weights bring it back", "2410.18252", "solved", "sampler behind, weighted",
          "sampler behind"),
    Claim("a coarse sampler bends the run", "2510.26788", "solved", DEFAULT, "coarse sampler"),
    Claim("weights bring that back", "2510.26788", "solved", "coarse sampler, weighted",
          "coarse sampler"),
    Claim("ten times the rate ends lower", "", "solved", FIRST, "ten times the rate"),
    Claim("a hundred times the rate ends it", "", "solved", FIRST, "a hundred times the rate"),
    Claim("random rewards teach too", "2506.10947", "solved", "shuffled rewards",
          "only the form pays"),
    Claim("what all earn teaches none", "", "solved", FIRST, "only the form pays"),
]
OF_EVALUATIONS = {"step": "step", "solved": "eval/solved", "best of n": "eval/best_of_n",
                  "tokens": "eval/completion_length", "cut off": "eval/truncated",
                  "form": "eval/format"}
OF_STEPS = {"entropy": "entropy", "no signal": "groups_without_signal"}  # means since the last one
UNITS = {"entropy": ", nats", WRONG: ""}  # of the others: a share
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # 97.5 % of n - 1 degrees


def title_of(run: str, seed: int, options: argparse.Namespace) -> str:
    return " ".join([run, *options.keys, f"seed {seed}"])


def record_of(run: str, seed: int, options: argparse.Namespace) -> dict:
    """What a run's evaluations said; it goes on from where it was stopped."""
    keys = USUAL | RUNS[run]
    command = [sys.executable, *keys.pop(PROGRAM), "--config", keys.pop(CONFIG),
               *(f"{key}={value}" for key, value in keys.items()), *options.keys,
               f"training.seed={seed}", f"run.dir={options.out}",
               f"run.name={''.join(filter(str.isalnum, run))}-{seed}"]
    threads = str(max(1, os.cpu_count() // options.at_once))
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": threads})
    summary = json.loads(ended.stdout.splitlines()[-1])
    folder = ROOT / summary["folder"]
    samples: dict[int, dict[int, list[dict]]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        samples.setdefault(sample["step"], {}).setdefault(sample["question"], []).append(sample)
    curve, steps = [], []
    for entry in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "reward" in entry:
            steps.append(entry)
            continue
        answers = samples[entry["step"]]
        wrong = [len(each["completion"]) for group in answers.values() for each in group
                 if not each["answer"]]
        means = {name: [step[key] for step in steps if step[key] is not None]
                 for name, key in OF_STEPS.items()}
        curve.append(
            {name: round(entry[key], 4) for name, key in OF_EVALUATIONS.items()}
            | {name: round(statistics.fmean(each), 4) if each else None
               for name, each in means.items()}
            | {WRONG: round(statistics.fmean(wrong or [0]), 1),
               "right": "".join(str(int(sum(each["answer"] for each in group)))
                                for _, group in sorted(answers.items()))})
        steps = []
    n = max(len(group) for group in samples[0].values())
    return {"minutes": round(summary["seconds"] / 60, 1), "answers": n, "curve": curve}


def series(record: dict, metric: str) -> list[tuple[int, float]]:
    """(step, value) of each evaluation. The hardest questions: those none of whose answers were
    right before training."""
    if metric != HARDEST:
        return [(entry["step"], entry[metric]) for entry in record["curve"]
                if entry.get(metric) is not None]
    hardest = [i for i, right in enumerate(record["curve"][0]["right"]) if right == "0"]
    return [(entry["step"], statistics.fmean(int(entry["right"][i]) for i in hardest)
             / record["answers"]) for entry in record["curve"]]


def ends_of(claim: Claim, known: dict, options: argparse.Namespace) -> list[list[float]]:
    """Of the run that should have more, and of the other, a value for each seed."""
    return [[series(known[title_of(run, seed, options)], claim.metric)[-1][1]
             for seed in options.seeds] for run in (claim.more, claim.less)]


def effect_of(claim: Claim, known: dict, options: argparse.Namespace) -> tuple[float, float]:
    """By how much there is more, and half its interval."""
    differences = [more - less for more, less in zip(*ends_of(claim, known, options))]
    if (n := len(differences)) < 2:
        return differences[0], math.inf
    half = STUDENT[n] * statistics.stdev(differences) / math.sqrt(n)
    return statistics.fmean(differences), half


def verdict_of(effect: float, half: float) -> str:
    return "not seen here" if abs(effect) <= half else "seen" if effect > 0 else "the opposite"


def shown(claim: Claim, known: dict, options: argparse.Namespace) -> str:
    more, less = (statistics.fmean(each) for each in ends_of(claim, known, options))
    effect, half = effect_of(claim, known, options)
    digits = 0 if claim.metric == WRONG else 3
    return (f"{more:.{digits}f} against {less:.{digits}f} "
            f"({effect:+.{digits}f} ± {half:.{digits}f})")


def show_runs(chosen: list[str], known: dict, options: argparse.Namespace) -> None:
    """Means over seeds: solved at four evaluations, first and last among them, the rest at last."""
    forms = {"tokens": ".0f", "cut off": ".2f", "form": ".2f", "entropy": ".2f"}
    print(f"| run | solved | {' | '.join(forms)} | minutes |\n|{' --- |' * (len(forms) + 3)}")
    for run in chosen:
        records = [known[title_of(run, seed, options)] for seed in options.seeds]
        solved = [statistics.fmean(entry["solved"] for entry in at)
                  for at in zip(*(record["curve"] for record in records))]
        places = dict.fromkeys(round(i * (len(solved) - 1) / 3) for i in range(4))
        cells = [run, " ".join(f"{solved[place]:.2f}" for place in places)]
        for name, form in forms.items():
            last = [value for record in records for _, value in series(record, name)[-1:]]
            cells.append(format(statistics.fmean(last), form) if last else "")
        minutes = [record["minutes"] for record in records if record["minutes"]]
        cells.append(f"{statistics.fmean(minutes):.1f}" if minutes else "")
        print(f"| {' | '.join(cells)} |")


def show_claims(claims: list[Claim], known: dict, options: argparse.Namespace) -> dict:
    """And returns the effects."""
    print("\n| claim | what came of it | verdict |\n| --- | --- | --- |")
    effects = {}
    for claim in claims:
        effects[claim.says] = effect, half = effect_of(claim, known, options)
        says = f"{claim.says} ([{claim.paper}])" if claim.paper else claim.says
        print(f"| {says} | {shown(claim, known, options)} | {verdict_of(effect, half)} |")
    print()
    for paper in sorted({claim.paper for claim in claims} - {""}):
        print(f"[{paper}]: https://arxiv.org/abs/{paper}")
    return effects


def draw(claims: list[Claim], known: dict, options: argparse.Namespace) -> None:
    """A small picture of each claim: seeds thin, their mean thick; the default in grey."""
    rows, columns = math.ceil(len(claims) / 4), min(4, len(claims))
    figure = Figure(figsize=(3.6 * columns, 2.9 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in all_axes[len(claims):]:
        axes.axis("off")
    for axes, claim in zip(all_axes, claims):
        colours = iter(["#c2410c", "#1d4ed8"])
        for run in (claim.more, claim.less):
            colour = "#a3a3a3" if run in (DEFAULT, FIRST) else next(colours)
            own = [series(known[title_of(run, seed, options)], claim.metric)
                   for seed in options.seeds]
            for each in own:
                axes.plot(*zip(*each), color=colour, linewidth=0.7, alpha=0.5)
            steps = [step for step, _ in own[0]]
            means = [statistics.fmean(value for _, value in at) for at in zip(*own)]
            axes.plot(steps, means, color=colour, linewidth=2, label=run)
        found = effect_of(claim, known, options)
        axes.set_title(f"{claim.says}\n{shown(claim, known, options)}: {verdict_of(*found)}",
                       fontsize=9)
        axes.set_ylabel(f"{claim.metric}{UNITS.get(claim.metric, ', share')}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel("step")
    figure.savefig(options.picture, dpi=80)


def command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=RUNS, action="append", help="these and the default alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--out", default="runs/experiments", help="folder of the runs")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "experiments.json")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
    options = parser.parse_intermixed_args(arguments)

    chosen = list(RUNS)
    if options.run:
        defaults = (FIRST if RUNS[run].items() >= ON_FIRST.items() else DEFAULT
                    for run in options.run)
        chosen = list(dict.fromkeys([*defaults, *options.run]))
    wanted = {title_of(run, seed, options): (run, seed) for run in chosen for seed in options.seeds}
    known = run_missing(
        options.data, wanted, lambda each: record_of(*each, options), options.at_once,
        lambda record: f"solved {record['curve'][-1]['solved']:.3f} in {record['minutes']} minutes")
    show_runs(chosen, known, options)
    claims = [claim for claim in CLAIMS if {claim.more, claim.less} <= {*chosen}]
    effects = show_claims(claims, known, options)
    if options.picture and claims:
        draw(claims, known, options)
    print(json.dumps({says: [round(each, 4) for each in effect] if math.isfinite(effect[1])
                      else [round(effect[0], 4), None] for says, effect in effects.items()}))


if __name__ == "__main__":
    command(sys.argv[1:])
