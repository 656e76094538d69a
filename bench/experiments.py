"""Ten things to try with the embedded default, each with three seeds, and one picture of them all.

    .venv/bin/python bench/experiments.py --picture experiments.png
        all of them: two hours on two cores. What it has run before is not run again
    .venv/bin/python bench/experiments.py --only "KL term" --seeds 0
        one of them beside the default, in minutes
    .venv/bin/python bench/experiments.py --data docs/experiments.json --picture experiments.png
        the runs that docs/experiments.md tells of

Each run is one process that takes the questions of two ranks; two runs at once keep two cores
busier than one run of two ranks does. --data holds what each of their evaluations said."""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "the default"
RANKS, QUESTIONS = 2, "training.num_samples_per_step"
# what is tried: {which variant of it: its keys under torchrun --nproc-per-node=2}
EXPERIMENTS = {
    "size of the group": {
        "G = 2": {QUESTIONS: 32, "training.k_best_of_n": "[2,2]"},
        "G = 32": {QUESTIONS: 2, "training.k_best_of_n": "[32,32]"}},
    "learning rate": {
        "ten times": {"training.learning_rate": "3.0e-4"},
        "a hundred times": {"training.learning_rate": "3.0e-3"}},
    "shuffled rewards": {"": {"task.name": "tests/tasks/shuffled_reward.py"}},
    "self-imitation": {"": {"training.learning_type": "sil", "training.k_best_of_n": "[2,8]"}},
    "scaled advantages": {"": {"training.scale_rewards": "group"}},
    "four updates a batch": {
        "unclipped": {"training.updates_per_batch": 4},
        "clipped": {"training.updates_per_batch": 4, "training.clip": "[0.2,0.2]"}},
    "only the form pays": {"": {"task.reward_weights": "{answer: 0.0, format: 1.0}"}},
    "temperature": {"0.5": {"sampling.temperature": 0.5}},
    "questions a step": {"a quarter": {QUESTIONS: 2}},
    "KL term": {
        "in the reward": {"training.kl_beta": 0.04},
        "in the loss": {"training.kl_beta": 0.04, "training.kl_in": "loss"}},
}
NUMBERED = {name: f"{number}. {name}" for number, name in enumerate(EXPERIMENTS, start=1)}
KEPT = ("step", "eval/solved", "eval/best_of_n", "eval/completion_length", "eval/truncated",
        "eval/format")
COLOURS = ["#c2410c", "#1d4ed8"]


def title_of(keys: dict, seed: int, options: argparse.Namespace) -> str:
    words = [*(f"{key}={value}" for key, value in keys.items()), *options.keys, f"seed {seed}"]
    return " ".join(words)


def curve_of(keys: dict, seed: int, options: argparse.Namespace) -> list[dict]:
    """What the evaluations of a run said; it goes on from where it was stopped."""
    keys = {QUESTIONS: 8, **keys}
    keys[QUESTIONS] *= RANKS
    command = [sys.executable, "main.py", *(f"{key}={value}" for key, value in keys.items()),
               *options.keys, f"training.seed={seed}", f"run.dir={options.out}"]
    threads = str(max(1, os.cpu_count() // options.at_once))
    ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"OMP_NUM_THREADS": threads})
    folder = ROOT / json.loads(ended.stdout.splitlines()[-1])["folder"]
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: round(entry[key], 4) for key in KEPT}
            for entry in entries if "eval/solved" in entry]


def at_the_end(runs: list[list[dict]], key: str, digits: int = 2) -> str:
    return " ".join(f"{run[-1][key]:.{digits}f}" for run in runs)


def draw(curves: dict[str, dict[str, list[list[dict]]]], path: Path) -> None:
    """A small picture of each experiment: seeds thin, their mean thick, the default in grey."""
    def line(axes, runs, colour, label):
        steps = [entry["step"] for entry in runs[0]]
        solved = [[entry["eval/solved"] for entry in run] for run in runs]
        for run in solved:
            axes.plot(steps, run, color=colour, linewidth=0.7, alpha=0.5)
        axes.plot(steps, [statistics.fmean(at) for at in zip(*solved)], color=colour, linewidth=2,
                  label=label)

    shown = {name: variants for name, variants in curves.items() if name != DEFAULT}
    rows, columns = math.ceil(len(shown) / 5), min(5, len(shown))
    figure = Figure(figsize=(3 * columns, 3 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes in all_axes[len(shown):]:
        axes.axis("off")
    for axes, (name, variants) in zip(all_axes, shown.items()):
        line(axes, curves[DEFAULT][""], "#a3a3a3", None)
        for colour, (variant, runs) in zip(COLOURS, variants.items()):
            line(axes, runs, colour, variant)
        axes.set_title(NUMBERED[name])
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        if any(variants):
            axes.legend(loc="lower right", frameon=False)
    figure.supxlabel("step")
    figure.supylabel("eval/solved")
    figure.savefig(path, dpi=80)


def command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="these alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--out", default="runs/experiments", help="folder of the runs")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "experiments.json")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
    options = parser.parse_intermixed_args(arguments)

    chosen = {DEFAULT: {"": {}}}
    chosen |= {name: EXPERIMENTS[name] for name in options.only or EXPERIMENTS}
    known = json.loads(options.data.read_text()) if options.data.exists() else {}
    wanted = {title_of(keys, seed, options): (keys, seed) for variants in chosen.values()
              for keys in variants.values() for seed in options.seeds}
    missing = [title for title in wanted if title not in known]
    with ThreadPoolExecutor(options.at_once) as pool:
        for title, curve in zip(missing, pool.map(
                lambda title: curve_of(*wanted[title], options), missing)):
            known[title] = curve
            options.data.parent.mkdir(parents=True, exist_ok=True)
            lines = (f"{json.dumps(title)}: {json.dumps(curve)}" for title, curve in known.items())
            options.data.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{title}: solved {curve[-1]['eval/solved']:.3f}", flush=True)

    curves = {name: {variant: [known[title_of(keys, seed, options)] for seed in options.seeds]
                     for variant, keys in variants.items()} for name, variants in chosen.items()}
    print("| experiment | solved | tokens | cut off | form |\n| --- | --- | --- | --- | --- |")
    for name, variants in curves.items():
        for variant, runs in variants.items():
            title = NUMBERED.get(name, name) + (f": {variant}" if variant else "")
            print(f"| {title} | {at_the_end(runs, 'eval/solved')} "
                  f"| {at_the_end(runs, 'eval/completion_length', digits=0)} "
                  f"| {at_the_end(runs, 'eval/truncated')} | {at_the_end(runs, 'eval/format')} |")
    if options.picture:
        draw(curves, options.picture)
    print(json.dumps({name: {variant: [run[-1]["eval/solved"] for run in runs]
                             for variant, runs in variants.items()}
                      for name, variants in curves.items()}))


if __name__ == "__main__":
    command(sys.argv[1:])
