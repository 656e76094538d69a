"""This trainer and TRL's GRPOTrainer take turns at the same steps on the same machine.

    python3 -m venv bench/.venv && bench/.venv/bin/pip install -r bench/requirements.txt
    .venv/bin/python bench/versus_trl.py --trl-python bench/.venv/bin/python

Both get the same 16 questions in each step. The learning rate is practically 0, so both keep the
same weights. Groups, length and loss (Dr. GRPO without KL) come from config.yaml and the keys you
add. Each side runs in each layout, TRL also with a rank's rows in 4 micro-batches, and the fastest
layout of each side counts. All sides are in memory at the same time. For a 135 M-parameter model,
24 GB isn't enough for that, so set --ranks 2 --passes 1."""

import argparse
import json
from statistics import median

from sides import Side

QUESTIONS, WARM_UP = 16, 3  # questions per step, over all ranks; steps that don't count
CORES = 2


def start(options: argparse.Namespace) -> tuple[list[Side], list[Side]]:
    """Returns this trainer in all layouts, and TRL in all layouts."""
    ours = []
    trl = []
    for ranks in options.ranks:
        threads = CORES // ranks
        keys = [*options.keys, f"training.num_samples_per_step={QUESTIONS // ranks}",
                f"training.max_steps={WARM_UP + options.pairs}", "training.learning_rate=1.0e-30",
                "validation.every=1"]
        ours.append(Side("ours", "steps", ranks, threads, keys))
        for passes in options.passes:
            side = Side("trl", "steps", ranks, threads, keys, options.trl_python, passes=passes)
            side.name += f", micro-batches: {passes}"
            trl.append(side)
    return ours, trl


def seconds_of(side: Side) -> float:
    return median(answer["seconds"] for answer in side.answers[WARM_UP:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True,
                        help="the Python of an environment with bench/requirements.txt")
    parser.add_argument("--pairs", type=int, default=10, help="steps of each side that count")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="the layouts to try")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 4],
                        help="how many micro-batches TRL may split a rank's rows into")
    parser.add_argument("keys", nargs="*", help="section.key=value, for both sides")
    options = parser.parse_intermixed_args()

    ours, trl = start(options)
    for step in range(1, WARM_UP + options.pairs + 1):
        for side in ours + trl:
            seconds = side.turn()["seconds"]
            print(f"step {step:>2}  {side.name:<40} {seconds:6.3f} s", flush=True)
    for side in ours + trl:
        side.end()

    mine = min(ours, key=seconds_of)
    theirs = min(trl, key=seconds_of)
    print(f"\nthe fastest: {mine.name}; {theirs.name}")
    ratios = []
    for one, other in list(zip(mine.answers, theirs.answers))[WARM_UP:]:
        ratios.append(other["seconds"] / one["seconds"])
    print(json.dumps({
        "times_as_fast": round(median(ratios), 3),
        "seconds": {side.name: round(seconds_of(side), 3) for side in ours + trl}}))
