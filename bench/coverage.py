"""How often does the interval of bench/experiments.py contain the true difference? By simulation.

    .venv/bin/python bench/coverage.py

Each question has its own chance of a right answer, which is that of the default. Each run shifts
all chances a little (between seeds), and a mistake shifts each question's on its own (effect)."""

import json

import numpy
from experiments import DATA, DEFAULT, NORMAL, records_of, shares_of
from scipy.stats import t as student

QUESTIONS, ANSWERS, TRIES = 256, 4, 4000
random = numpy.random.default_rng(0)


def run_means(chances, seeds: int, spread: float):
    """Returns the share of right answers to each question in each run, (seeds, questions)."""
    shifts = random.normal(0, spread, (seeds, 1))
    return random.binomial(ANSWERS, numpy.clip(chances + shifts, 0, 1)) / ANSWERS


def half_widths(more, less) -> tuple[float, float]:
    of_more = more.mean(1).var(ddof=1) / len(more)
    of_less = less.mean(1).var(ddof=1) / len(less)
    variance = of_more + of_less
    freedom = variance ** 2 / (of_more ** 2 / (len(more) - 1) + of_less ** 2 / (len(less) - 1))
    differences = more.mean(0) - less.mean(0)
    return (student.ppf(0.975, freedom) * variance ** 0.5,
            NORMAL * differences.std(ddof=1) / QUESTIONS ** 0.5)


def coverage(spread: float, other_spread: float, effect: float, seeds: int) -> tuple[float, ...]:
    """Returns how often the wider interval, that of seeds and that of questions are right."""
    found = []
    for _ in range(TRIES):
        chances = 0.03 + 0.9 * random.choice(CHANCES, QUESTIONS)  # away from 0 and 1
        less = run_means(chances, 9, spread)
        more = run_means(chances + random.normal(0, effect, QUESTIONS), seeds, other_spread)
        found.append((more.mean() - less.mean(), *half_widths(more, less)))
    differences, of_seeds, of_questions = numpy.array(found).T
    errors = abs(differences - differences.mean())
    return ((errors <= numpy.maximum(of_seeds, of_questions)).mean(),
            (errors <= of_seeds).mean(), (errors <= of_questions).mean())


runs = json.loads(DATA.read_text())
CHANCES = numpy.mean([shares_of(record) for record in records_of(DEFAULT, runs)], 0)
print("sd of the default, of the other run, of the effect on questions, seeds of the other run: "
      "coverage of the wider interval, of that between seeds, of that between questions")
for spreads in ((0.005, 0.005), (0.01, 0.01), (0.015, 0.015), (0.025, 0.025), (0.015, 0.06)):
    for effect in (0.0, 0.1, 0.2):
        for seeds in (3, 9):
            shares = " ".join(f"{share:.3f}" for share in coverage(*spreads, effect, seeds))
            print(*spreads, effect, seeds, shares, flush=True)
