"""Seconds of training until the lower bound of eval/solved reaches a target. This trainer races
alone, or against TRL's GRPOTrainer, or against another checkout of this trainer.

    .venv/bin/python bench/speedrun.py
    .venv/bin/python bench/speedrun.py --trl-python bench/.venv/bin/python
    .venv/bin/python bench/speedrun.py --beside ../unchanged

For each seed the sides take turns on the same cores, validation.every steps at a time. The clock
stops during evaluations. main.evaluate evaluates TRL's model too, on a copy of its weights. TRL
begins with the same weights. It gets the same questions in the same order, and the same group size,
length limit, learning rates and loss (Dr. GRPO without KL), from --config and the keys that you
give. The other checkout has its own settings, and the keys that you give."""

import argparse
import json
import statistics
import sys
from pathlib import Path

from sides import Side

RANKS, THREADS = 2, 1
TITLES = {"ours": "this trainer", "trl": "TRL", "beside": "the other checkout"}

parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
parser.add_argument("--trl-python", help="the Python of an environment with bench/requirements.txt")
parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
parser.add_argument("--target", type=float, default=0.3, help="for the lower bound of eval/solved")
parser.add_argument("--config", default="recipes/lab.yaml")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("keys", nargs="*", help="section.key=value, for all sides")
options = parser.parse_intermixed_args()


def start(seed: int) -> dict[str, Side]:
    keys = ["--config", options.config, *options.keys, f"training.seed={seed}"]
    sides = {"ours": Side("ours", "training", RANKS, THREADS, keys)}
    if options.trl_python:
        sides["trl"] = Side("trl", "training", RANKS, THREADS, keys, python=options.trl_python)
    if options.beside:
        sides["beside"] = Side("ours", "training", RANKS, THREADS, keys,
                               root=options.beside.resolve())
    return sides


def check_same_start(ours: dict, trl: dict) -> None:
    """Nothing is compared that does not begin alike, or does not get the same."""
    if trl["step"] == 0 and trl["solved"] != ours["solved"]:
        sys.exit(f"error: before any training TRL's side solves {trl['solved']:.4f} of the "
                 f"questions, this trainer {ours['solved']:.4f}: install the same torch and "
                 "transformers in both environments")
    if trl["seen"] != ours["seen"]:
        sys.exit(f"error: up to step {trl['step']} TRL's side has had other questions, or another "
                 "learning rate, than this trainer")


def race(seed: int) -> dict[str, dict]:
    """Returns for each side where it reached the target, or None, and its curve."""
    sides = start(seed)
    racing = dict(sides)
    while racing:
        for name, side in list(racing.items()):
            answer = side.turn()
            step, solved, low = answer["step"], answer["solved"], answer["low"]
            print(f"seed {seed}  {name:<6}  step {step:>4}  {answer['seconds']:8.1f} s more  "
                  f"solved {solved:.3f}, at least {low:.3f}", flush=True)
            if step == 0 and low >= options.target:
                sys.exit(f"error: --target {options.target}: {solved:.3f} are solved before any "
                         "training")
            for own in sides["ours"].answers:
                if name == "trl" and own["step"] == step:
                    check_same_start(own, answer)
            if low >= options.target or not answer["left"]:
                racing.pop(name).end()
    return {name: result_of(side.answers) for name, side in sides.items()}


def result_of(answers: list[dict]) -> dict:
    curve, seconds = [], 0.0
    for answer in answers:
        seconds += answer["seconds"]
        curve.append([answer["step"], round(seconds, 2), answer["solved"]])
    reached = answers[-1]["low"] >= options.target
    return {"steps": answers[-1]["step"] if reached else None,
            "seconds": round(seconds, 2) if reached else None, "curve": curve}


def ratio(result: dict, rival: str) -> float | None:
    """Returns how many times as long the rival took."""
    mine, theirs = result["ours"]["seconds"], result[rival]["seconds"]
    return round(theirs / mine, 3) if mine and theirs else None


def cell(value: float | None) -> str:
    return "not reached" if value is None else f"{value:g}"


results = {}
for seed in options.seeds:
    results[seed] = race(seed)

names = list(results[options.seeds[0]])
titles = ["seed"]
for name in names:
    titles += [f"{TITLES[name]}: steps", "seconds"]
titles += [f"{TITLES[name]} / this trainer" for name in names[1:]]
print(f"\n| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
for seed, result in results.items():
    cells = [str(seed)]
    for name in names:
        cells += [cell(result[name]["steps"]), cell(result[name]["seconds"])]
    cells += [cell(ratio(result, name)) for name in names[1:]]
    print(f"| {' | '.join(cells)} |")

medians = {}
for name in names[1:]:
    ratios = [ratio(result, name) for result in results.values()]
    # Without the runs that never reached the target it would look better than it is.
    medians[name] = None if None in ratios else statistics.median(ratios)
print(json.dumps({"median_ratio": medians, "seeds": results}))
