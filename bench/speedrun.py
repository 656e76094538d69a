"""Seconds of training until the lower bound of eval/solved reaches a target. This trainer races
alone, against TRL's GRPOTrainer, or against another checkout of itself.

    .venv/bin/python bench/speedrun.py
    .venv/bin/python bench/speedrun.py --trl-python bench/.venv/bin/python
    .venv/bin/python bench/speedrun.py --beside ../unchanged

For each seed the sides take turns on the same cores, validation.every steps at a time. The clock
stops during evaluations. main.evaluate evaluates TRL's model too, on a copy of its weights. TRL
begins with the same weights. From --config and the keys you add, it gets the same questions in the
same order, and the same group size, length limit, learning rates and loss (Dr. GRPO without KL).
The other checkout uses its own settings, and the keys you add."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from sides import Side

OURS, TRL, BESIDE = "this trainer", "TRL", "the other checkout"
RANKS, THREADS = 2, 1


def start(seed: int, options: argparse.Namespace) -> dict[str, Side]:
    keys = ["--config", options.config, *options.keys, f"training.seed={seed}"]
    sides = {OURS: Side("ours", "training", RANKS, THREADS, keys)}
    if options.trl_python:
        sides[TRL] = Side("trl", "training", RANKS, THREADS, keys, python=options.trl_python)
    if options.beside:
        root = options.beside.resolve()
        sides[BESIDE] = Side("ours", "training", RANKS, THREADS, keys, root=root)
    return sides


def race(seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns {side: [steps, seconds] until the target}, for the sides that have reached it."""
    sides = start(seed, options)
    reached = {}
    racing = list(sides)
    while racing:
        for name in list(racing):
            side = sides[name]
            answer = side.turn()
            step, seconds, low = answer["step"], answer["seconds"], answer["low"]
            print(f"seed {seed}, {name}: step {step}, {seconds:.1f} s more, "
                  f"solved {answer['solved']:.3f}, at least {low:.3f}", flush=True)
            assert step > 0 or low < options.target, "the target was reached before training"
            if low >= options.target:
                seconds = sum(turn["seconds"] for turn in side.answers)
                reached[name] = [step, round(seconds, 2)]
            if name in reached or not answer["left"]:
                side.end()
                racing.remove(name)
    if TRL in sides:
        check_same_start(sides[OURS].answers, sides[TRL].answers)
    return reached


def check_same_start(ours: list[dict], trl: list[dict]) -> None:
    assert ours[0]["solved"] == trl[0]["solved"], "TRL's side began with a different model"
    for mine, theirs in zip(ours, trl):
        assert mine["seen"] == theirs["seen"], "TRL's side had other questions or learning rates"


def ratio_of(reached: dict[str, list[float]], rival: str) -> float:
    """Returns how many times as long the rival took, or nan if either side is missing."""
    not_reached = [0, math.nan]
    _, mine = reached.get(OURS, not_reached)
    _, theirs = reached.get(rival, not_reached)
    return round(theirs / mine, 3)


def print_table(results: dict[int, dict], rivals: list[str]) -> None:
    titles = ["seed"]
    for name in [OURS, *rivals]:
        titles += [f"{name}: steps", "seconds"]
    for rival in rivals:
        titles.append(f"{rival} / {OURS}")
    print(f"\n| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for seed, reached in results.items():
        cells = [seed]
        for name in [OURS, *rivals]:
            cells += reached.get(name, ["not reached", ""])
        for rival in rivals:
            cells.append(ratio_of(reached, rival))
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trl-python", help="of an environment with bench/requirements.txt")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--target", type=float, default=0.3, help="for eval/solved's lower bound")
    parser.add_argument("--config", default="recipes/lab.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("keys", nargs="*", help="section.key=value, for all sides")
    options = parser.parse_intermixed_args()

    results = {}
    for seed in options.seeds:
        results[seed] = race(seed, options)
    rivals = []
    if options.trl_python:
        rivals.append(TRL)
    if options.beside:
        rivals.append(BESIDE)
    print_table(results, rivals)
    medians = {}
    for rival in rivals:
        # It's nan if a run hasn't reached the target. Without that run it would look better.
        medians[rival] = np.median([ratio_of(reached, rival) for reached in results.values()])
    print(json.dumps({"median_ratio": medians, "seeds": results}))
