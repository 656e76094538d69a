"""The runs of the tiny and the lab model behind the figures of README.md and docs/.

    .venv/bin/python bench/runs.py --list
        what docs/runs.json has, and what it lacks
    .venv/bin/python bench/runs.py
        makes what it lacks, in hours, two runs at once with one thread each. It may be stopped

bench/plan.json has the protocol, and what we expected. Both were committed before the first run.
"""

import argparse
import json
import sys

import experiments
import kept
import mistakes
from experiments import ROOT, RUNS

PLAN = json.loads((ROOT / "bench" / "plan.json").read_text())
DATA = ROOT / "docs" / "runs.json"
OPTIONS = argparse.Namespace(keys=[], out="runs/all")


def planned() -> list[tuple[str, int]]:
    """Returns each run and its seed, in the order in which they're made. A teacher comes before its
    students, which all learn from the one of seed 0."""
    names = [experiments.DEFAULT, experiments.LAB_TEACHER, *mistakes.MEASURED, *mistakes.COMPARED]
    names += [name for name in RUNS if name not in [*names, *PLAN["not made again"]]]
    first = [(name, seed) for seed in PLAN["seeds"] for name in names]
    return [*first, *((name, seed) for name, seeds in PLAN["more seeds"].items() for seed in seeds)]


def record_of(name: str, seed: int) -> dict:
    if name == experiments.DEFAULT:  # This way, it's also evaluated with other sampling settings.
        return mistakes.record_of("default", seed, OPTIONS)
    if name in mistakes.MISTAKES:
        return mistakes.record_of(name, seed, OPTIONS)
    return experiments.record_of(name, seed, OPTIONS)


def main(words: list[str]) -> None:
    wanted = {f"{name} seed {seed}": (name, seed) for name, seed in planned()}
    if words == ["--list"]:
        known = kept.read(DATA)
        for title in wanted:
            print("there  " if title in known else "missing", title)
    else:
        kept.run_missing(DATA, wanted, lambda each: record_of(*each))


if __name__ == "__main__":
    main(sys.argv[1:])
