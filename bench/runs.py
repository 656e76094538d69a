"""The runs of the tiny and the lab model behind the figures of README.md and docs/.

    .venv/bin/python bench/runs.py
        makes what docs/runs.json lacks, in hours, two runs at once with one thread each. It may be
        stopped
    .venv/bin/python bench/runs.py --list
        what docs/runs.json has, and what it lacks
    .venv/bin/python bench/runs.py --effects
        the difference of each pair of runs that it has, with its interval

bench/plan.json has the protocol, and what we expected. Both were committed before any result that
wasn't known already.
"""

import argparse
import json
import math
import statistics
import sys

import experiments
import kept
import mistakes
from experiments import HARDEST, NORMAL, ROOT, RUNS, SOLVED, TEACHER, Claim, Effect
from scipy.stats import t as student

PLAN = json.loads((ROOT / "bench" / "plan.json").read_text())
DATA = ROOT / "docs" / "runs.json"
OPTIONS = argparse.Namespace(keys=[], out="runs/all")
AGAIN = " again"
MOST_SEEDS = 9

# ---------------------------------------------------------------- the runs


def planned() -> list[tuple[str, int]]:
    """Returns each run and its seed. All students learn from the teacher of seed 0."""
    names = [experiments.DEFAULT, experiments.LAB_TEACHER, *mistakes.MEASURED, *mistakes.COMPARED]
    for name in RUNS:
        if name not in names and name not in PLAN["not made again"]:
            names.append(name)
    wanted = []
    for name, seed in PLAN["made again as a check"].items():
        wanted.append((name + AGAIN, seed))
    for seed in PLAN["seeds"]:
        for name in names:
            wanted.append((name, seed))
    for name, seeds in PLAN["more seeds"].items():
        for seed in seeds:
            wanted.append((name, seed))
    return wanted


def record_of(name: str, seed: int) -> dict:
    name = name.removesuffix(AGAIN)
    if name == experiments.DEFAULT:  # This way, it's also evaluated with other sampling settings.
        return mistakes.record_of("default", seed, OPTIONS)
    if name in mistakes.MISTAKES:
        return mistakes.record_of(name, seed, OPTIONS)
    return experiments.record_of(name, seed, OPTIONS)


# ---------------------------------------------------------------- what comes of them

def effect_of(claim: Claim, known: dict) -> Effect | None:
    """Returns what came of the claim, or None if fewer than two seeds of a run are known."""
    more = records_of(claim.more, known)
    less = records_of(claim.less, known)
    if min(len(more), len(less)) < 2:
        return None
    ends_of_more = [experiments.end_of(record, claim.metric) for record in more]
    ends_of_less = [experiments.end_of(record, claim.metric) for record in less]
    questions = None
    if claim.metric in (SOLVED, HARDEST):
        questions = between_questions(more, less, claim.metric)
    return Effect(statistics.fmean(ends_of_more), statistics.fmean(ends_of_less),
                  between_seeds(ends_of_more, ends_of_less), questions)


def records_of(name: str, known: dict) -> list[dict]:
    titles = [f"{name} seed {seed}" for seed in range(MOST_SEEDS)]
    return [known[title] for title in titles if title in known]


def between_seeds(more: list[float], less: list[float]) -> float:
    """Returns half the width of Welch's 95 % interval of the difference of means."""
    of_more = statistics.variance(more) / len(more)
    of_less = statistics.variance(less) / len(less)
    variance = of_more + of_less  # of the difference
    if variance == 0:
        return 0.0
    freedom = variance ** 2 / (of_more ** 2 / (len(more) - 1) + of_less ** 2 / (len(less) - 1))
    return float(student.ppf(0.975, freedom)) * math.sqrt(variance)


def between_questions(more: list[dict], less: list[dict], metric: str) -> float:
    """Returns half the width of the interval between questions. All seeds have the same held-out
    questions, so each question gives one difference, of its mean shares over the seeds."""
    shares_of_more = mean_shares(more, metric)
    shares_of_less = mean_shares(less, metric)
    differences = []
    for question in shares_of_more.keys() & shares_of_less.keys():
        differences.append(shares_of_more[question] - shares_of_less[question])
    return experiments.half_width_of(differences, NORMAL)


def mean_shares(records: list[dict], metric: str) -> dict[int, float]:
    """Returns each question's mean share of right answers, over the runs in which it counts."""
    shares: dict[int, list[float]] = {}
    for record in records:
        of_record = experiments.shares_of(record)
        questions = range(len(of_record))
        if metric == HARDEST:
            questions = experiments.hardest_of(record)
        for question in questions:
            shares.setdefault(question, []).append(of_record[question])
    return {question: statistics.fmean(values) for question, values in shares.items()}


def show_effects(known: dict) -> None:
    claims = [claim for claim in experiments.CLAIMS if claim.says in PLAN["expected"]["claims"]]
    names = [*mistakes.MEASURED, *mistakes.COMPARED, *experiments.CHANGES]
    claims += [Claim(name, "", SOLVED, name, experiments.DEFAULT) for name in names]
    for claim in claims:
        effect = effect_of(claim, known)
        if effect:
            print(f"{effect.difference:+.3f} ± {effect.half_width:.3f}  {effect.verdict}: "
                  f"{claim.says}")


# ---------------------------------------------------------------- the command

def make_missing(wanted: dict[str, tuple[str, int]]) -> None:
    """Makes what the file lacks. Students come last, because they need their teacher's weights."""
    students = {title: (name, seed) for title, (name, seed) in wanted.items()
                if TEACHER in RUNS.get(name, {})}
    others = {title: wanted[title] for title in wanted if title not in students}
    known = kept.run_missing(DATA, others, lambda each: record_of(*each))
    if students.keys() <= known.keys():
        return
    teacher = ROOT / OPTIONS.out / experiments.folder_of(experiments.LAB_TEACHER, 0)
    if not (teacher / "summary.json").exists():  # It's known, but was made on another machine.
        record_of(experiments.LAB_TEACHER, 0)
    kept.run_missing(DATA, students, lambda each: record_of(*each))


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--effects", action="store_true")
    options = parser.parse_args(words)
    known = kept.read(DATA)
    wanted = {f"{name} seed {seed}": (name, seed) for name, seed in planned()}
    if options.list:
        for title in wanted:
            print("there  " if title in known else "missing", title)
    elif options.effects:
        show_effects(known)
    else:
        make_missing(wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
