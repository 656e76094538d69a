"""The runs of the tiny and the lab model behind the figures of README.md and docs/.

    .venv/bin/python bench/runs.py
        makes what docs/runs.json lacks, in hours, two runs at once with one thread each. It may be
        stopped
    .venv/bin/python bench/runs.py --list
        what docs/runs.json has, and what it lacks
    .venv/bin/python bench/runs.py 'G = 2 seed 0' 'dropout seed 1'
        makes these runs in runs/again, in minutes, and compares each with ours
    .venv/bin/python bench/runs.py --cost 'tiny seed 0' runs/<name>
        keeps what a run needed for what it solved, in docs/costs.json

bench/plan.json has the protocol, and what we expected. It was committed before any result that
wasn't known already, but for the seeds that its own rule added. bench/experiments.py and
bench/mistakes.py show what came of it."""

import argparse
import sys
from pathlib import Path

import experiments
import kept
import mistakes
from experiments import DATA, PLAN, ROOT, RUNS, SOLVED, TEACHER

OUT = "runs/all"
AGAIN = " again"

# ---------------------------------------------------------------- the runs


def planned() -> list[tuple[str, int]]:
    """Returns each run and its seed. All students learn from the teacher of seed 0."""
    names = [experiments.DEFAULT, experiments.LAB_TEACHER, *mistakes.MEASURED, *mistakes.COMPARED]
    for name in RUNS:
        if name not in names:
            names.append(name)
    wanted = []
    for name, seed in PLAN["made again"].items():
        wanted.append((name + AGAIN, seed))
    for seed in PLAN["seeds"]:
        for name in names:
            if seed == 0 or name not in PLAN["one seed"]:
                wanted.append((name, seed))
    for name, seeds in PLAN["more seeds"].items():
        for seed in seeds:
            wanted.append((name, seed))
    return wanted


def record_of(name: str, seed: int, out: str = OUT) -> dict:
    """Returns what docs/runs.json holds of a run."""
    name = name.removesuffix(AGAIN)
    if name == experiments.DEFAULT:  # This way, it's also evaluated with other sampling settings.
        return mistakes.record_of("default", seed, out)
    if name in mistakes.MISTAKES:
        return mistakes.record_of(name, seed, out)
    return experiments.record_of(name, seed, out)


# ---------------------------------------------------------------- what a run costs

def cost_of(folder: Path) -> dict:
    """Returns what the steps before each evaluation needed, and what it solved. The seconds are
    those of the steps: evaluations and the start aren't part of them."""
    spent = {"answers": 0, "tokens": 0, "seconds": 0.0}
    curve = []
    for entry in kept.read_lines(folder / "metrics.jsonl"):
        if "reward" in entry:
            spent["answers"] += round(entry["tokens"] / entry["completion_length"])
            spent["tokens"] += int(entry["tokens"])
            spent["seconds"] += sum(value for name, value in entry.items()
                                    if name.startswith("seconds/"))
        else:
            curve.append({"step": entry["step"], SOLVED: round(entry["eval/solved"], 4), **spent,
                          "seconds": round(spent["seconds"], 1)})
    return {"commit": experiments.commit(), "curve": curve}


# ---------------------------------------------------------------- the command

def make_missing(wanted: dict[str, tuple[str, int]]) -> None:
    """Makes what the file lacks. Students come last, because they need their teacher's weights."""
    students = {title: (name, seed) for title, (name, seed) in wanted.items() if is_student(name)}
    others = {title: wanted[title] for title in wanted if title not in students}
    known = kept.run_missing(DATA, others, lambda each: record_of(*each))
    if students.keys() <= known.keys():
        return
    make_teacher(OUT)
    kept.run_missing(DATA, students, lambda each: record_of(*each))


def is_student(name: str) -> bool:
    return TEACHER in RUNS.get(name.removesuffix(AGAIN), {})


def make_teacher(out: str) -> None:
    """Trains the teacher, if its weights aren't there."""
    teacher = ROOT / out / experiments.folder_of(experiments.LAB_TEACHER, 0)
    if not (teacher / "summary.json").exists():
        record_of(experiments.LAB_TEACHER, 0, out)


def make_again(chosen: list[tuple[str, int]], ours: dict, out: str) -> None:
    """Makes these runs, and prints what each of them and ours solved."""
    for name, seed in chosen:
        title = f"{name} seed {seed}"
        if is_student(name):
            make_teacher(out)
        solved = solved_by(record_of(name, seed, out))
        print(f"{title} solved {solved}", flush=True)
        if title in ours:
            print(f"ours solved {solved_by(ours[title])}", flush=True)


def solved_by(record: dict) -> dict[int, float]:
    """Returns {step: the share solved}."""
    return {entry["step"]: entry[SOLVED] for entry in record["curve"]}


def main(words: list[str]) -> None:
    known = kept.read(DATA)
    wanted = {f"{name} seed {seed}": (name, seed) for name, seed in planned()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", default="runs/again", help="folder of runs made again")
    parser.add_argument("--cost", nargs=2, metavar=("'NAME seed SEED'", "FOLDER"))
    parser.add_argument("run", nargs="*", metavar="'NAME seed SEED'")
    options = parser.parse_args(words)
    if options.cost:
        title, folder = options.cost
        kept.keep(experiments.COSTS, title, cost_of(Path(folder)))
        return
    for title in options.run:
        if title not in wanted:
            parser.error(f"there is no run {title!r}. --list has all of them")
    if options.list:
        for title in wanted:
            print("there  " if title in known else "missing", title)
    elif options.run:
        make_again([wanted[title] for title in options.run], known, options.out)
    else:
        make_missing(wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
