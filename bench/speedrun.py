"""Seconds of training until so many of the held-out questions are solved, beyond doubt: the lower
bound of the interval counts. This trainer, and beside it TRL's GRPOTrainer or another checkout of
this one.

    .venv/bin/python bench/speedrun.py
        this trainer alone, on the laboratory's base
    .venv/bin/python bench/speedrun.py --trl-python bench/.venv/bin/python
        and TRL; for its environment see versus_trl.py
    .venv/bin/python bench/speedrun.py --beside ../unchanged
        and the trainer in that folder, with its own settings; says which of them differ

For each seed the sides take turns on the same cores, validation.every steps at a time, so that what
else the machine does hits all of them. The seconds count all that a step does. Before the first
turn and after each the clock stands while eval/solved is measured, for TRL by main.py's evaluation
as well, on a copy of its weights. TRL has the same weights to begin with, the same questions in the
same order, groups, length, learning rates and loss (dr_grpo, no KL), from --config and the keys
given."""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from sides import ROOT, Side, layout

parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
parser.add_argument("--trl-python", help="the Python of an environment with bench/requirements.txt")
parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
parser.add_argument("--target", type=float, default=0.3,
                    help="for the lower bound of eval/solved to reach")
parser.add_argument("--config", default="recipes/lab.yaml")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--layout", type=layout, default=(2, 1), help="ranks x threads, like 2x1")
parser.add_argument("--trl-passes", type=int, default=1,
                    help="micro-batches in which TRL takes a rank's rows")
parser.add_argument("keys", nargs="*", help="section.key=value, for all sides")
options = parser.parse_intermixed_args()
given = ["--config", options.config, *options.keys]


def start(seed: int) -> dict[str, Side]:
    keys = [*given, f"training.seed={seed}"]
    sides = {"ours": Side(sys.executable, "ours", "training", 1, *options.layout, keys)}
    try:
        if options.trl_python:
            sides["trl"] = Side(options.trl_python, "trl", "training", options.trl_passes,
                                *options.layout, keys)
        if options.beside:
            sides["beside"] = Side(sys.executable, "ours", "training", 1, *options.layout, keys,
                                   options.beside.resolve())
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}")
    return sides


def reached(answer: dict) -> bool:
    return answer["low"] >= options.target


def settings(root: Path) -> dict[str, object]:
    """{key: value} of that checkout."""
    tell = ("import json, sys; from machinery.settings import flatten, load_config; "
            "print(json.dumps(flatten(load_config(sys.argv[1:]))))")
    return json.loads(subprocess.run([sys.executable, "-c", tell, *given], cwd=root, check=True,
                                     text=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def check(answer: dict, ours: list[dict], is_trl: bool) -> None:
    """Nothing is compared that does not begin alike, or is not given the same."""
    if answer["step"] == 0 and reached(answer):
        sys.exit(f"error: --target {options.target}: before any training {answer['solved']:.3f} of "
                 "the questions are solved")
    same_step = [each for each in ours if each["step"] == answer["step"]]
    if is_trl and same_step:  # else this trainer was there before
        if answer["step"] == 0 and answer["solved"] != same_step[0]["solved"]:
            sys.exit(f"error: before any training TRL's side solves {answer['solved']:.4f} of the "
                     f"questions, this trainer {same_step[0]['solved']:.4f}: install the same "
                     "torch and transformers in both environments")
        if answer["seen"] != same_step[0]["seen"]:
            sys.exit(f"error: up to step {answer['step']} TRL's side has had other questions, or "
                     "another learning rate, than this trainer")


def race(seed: int) -> dict[str, dict]:
    """For each side where it reached the target, if it did, and its curve."""
    sides = start(seed)
    racing = dict(sides)
    while racing:
        for name, side in list(racing.items()):
            answer = side.step()
            print(f"seed {seed}  {name:<6}  step {answer['step']:>4}  {answer['seconds']:8.1f} s  "
                  f"solved {answer['solved']:.3f}, at least {answer['low']:.3f}", flush=True)
            check(answer, sides["ours"].answers, name == "trl")
            if reached(answer) or not answer["left"]:
                racing.pop(name).end()
    results = {}
    for name, side in sides.items():
        last = side.answers[-1]
        there = reached(last)
        results[name] = {"steps": last["step"] if there else None,
                         "seconds": round(last["seconds"], 2) if there else None,
                         "curve": [[each["step"], round(each["seconds"], 2), each["solved"]]
                                   for each in side.answers]}
    return results


def ratio(result: dict, rival: str) -> float | None:
    mine, theirs = result["ours"]["seconds"], result[rival]["seconds"]
    return round(theirs / mine, 3) if mine and theirs else None


def median(values: list[float | None]) -> float | None:
    """None where a run has not reached the target: what is left would look better than it is."""
    return None if None in values else round(statistics.median(values), 3)


def cell(value: float | None, form: str = "") -> str:
    return "not reached" if value is None else format(value, form)


results = {seed: race(seed) for seed in options.seeds}
titles = {"ours": "this trainer", "trl": "TRL", "beside": "the other checkout"}
names = list(results[options.seeds[0]])
rivals = names[1:]
columns = ["seed", *(f"{titles[name]}: {what}" for name in names for what in ("steps", "seconds")),
           *(f"{titles[rival]} / {titles['ours']}" for rival in rivals)]
print("", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", sep="\n")
for seed, result in results.items():
    cells = [str(seed)]
    for name in names:
        cells += [cell(result[name]["steps"]), cell(result[name]["seconds"], ".1f")]
    cells += [cell(ratio(result, rival), ".2f") for rival in rivals]
    print(f"| {' | '.join(cells)} |")
medians = {rival: median([ratio(result, rival) for result in results.values()])
           for rival in rivals}
print()
for rival in rivals:
    print(f"median of {titles[rival]} / {titles['ours']}: {cell(medians[rival], '.2f')}")
if options.beside:
    mine, theirs = settings(ROOT), settings(options.beside.resolve())
    print("\n| key | the other checkout | this one |\n| --- | --- | --- |")
    for key in sorted({*mine, *theirs}):
        if mine.get(key) != theirs.get(key):
            print(f"| `{key}` | {theirs.get(key)} | {mine.get(key)} |")
print(json.dumps({
    "target": options.target, "layout": "x".join(map(str, options.layout)), "keys": options.keys,
    "median_ratio": medians,
    "median_seconds": {name: median([result[name]["seconds"] for result in results.values()])
                       for name in names},
    "seeds": results}))
