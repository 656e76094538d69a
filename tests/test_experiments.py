"""What bench/experiments.py makes of runs."""

import sys
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from processes import ROOT

sys.path.append(str(ROOT / "bench"))
import experiments

CLAIM = experiments.Claim("x is better", "0000.00000", "solved", "G = 2", experiments.DEFAULT)
OPTIONS = SimpleNamespace(keys=[], seeds=[0, 1, 2])


def record_of(solved_at_the_end: float) -> dict:
    return {"minutes": 1.0, "answers": 4, "curve": [
        {"step": 0, "solved": 0.0, "right": "0400"},
        {"step": 1, "solved": solved_at_the_end, "right": "1430"}]}


@pytest.mark.parametrize("more, verdict", [
    ([0.5, 0.6, 0.58], "seen"),
    ([0.1, 0.2, 0.18], "the opposite"),
    ([0.5, 0.6, 0.1], "not seen here")])
def test_an_effect_has_an_interval_and_a_verdict(more, verdict):
    less = [0.3, 0.4, 0.4]
    known = {f"G = 2 seed {seed}": record_of(more[seed]) for seed in range(3)}
    for seed in range(3):
        known[f"{experiments.DEFAULT} seed {seed}"] = record_of(less[seed])

    effect, half = experiments.effect_of(CLAIM, known, OPTIONS)

    differences = [more[seed] - less[seed] for seed in range(3)]
    assert effect == pytest.approx(fmean(differences))
    assert half == pytest.approx(4.303 * stdev(differences) / 3 ** 0.5)
    assert experiments.verdict_of(effect, half) == verdict


def test_the_hardest_questions_are_those_never_solved_before():
    points = experiments.series(record_of(0.5), experiments.HARDEST)

    assert points == [(0, 0.0), (1, pytest.approx((1 + 3 + 0) / 3 / 4))]


def test_every_claim_compares_two_runs_that_there_are():
    for claim in experiments.CLAIMS:
        assert {claim.more, claim.less} <= set(experiments.RUNS)
        assert claim.more != claim.less
