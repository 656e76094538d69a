"""What bench/experiments.py and bench/pass_at_k.py make of runs and answers."""

import itertools
import sys
from types import SimpleNamespace

import pytest
from processes import ROOT

sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "examples")]
import experiments
import pass_at_k

CLAIM = experiments.Claim("x is better", "0000.00000", "solved", "G = 2", experiments.DEFAULT)


def known_of(more: list[float], less: list[float]) -> dict:
    def record(value):
        return {"minutes": 1.0, "answers": 4, "curve": [
            {"step": 0, "solved": 0.0, "right": "0400"},
            {"step": 1, "solved": value, "right": "1430"}]}

    return {f"{run} seed {seed}": record(value)
            for run, values in ((CLAIM.more, more), (CLAIM.less, less))
            for seed, value in enumerate(values)}


@pytest.mark.parametrize("more, verdict", [
    ([0.5, 0.6, 0.58], "seen"), ([0.1, 0.2, 0.18], "the opposite"), ([0.5, 0.6, 0.1], None)])
def test_an_effect_has_an_interval_and_a_verdict(more, verdict):
    less, options = [0.3, 0.4, 0.4], SimpleNamespace(keys=[], seeds=[0, 1, 2])
    effect, half = experiments.effect_of(CLAIM, known_of(more, less), options)
    differences = [a - b for a, b in zip(more, less)]
    mean = sum(differences) / 3
    spread = (sum((each - mean) ** 2 for each in differences) / 2) ** 0.5
    assert effect == pytest.approx(mean) and half == pytest.approx(4.303 * spread / 3 ** 0.5)
    assert experiments.verdict_of(effect, half) == (verdict or "not seen here")


def test_the_hardest_questions_are_those_never_solved_before():
    record = known_of([0.5], [0.5])["G = 2 seed 0"]
    assert experiments.series(record, experiments.HARDEST) == [
        (0, 0.0), (1, pytest.approx((1 + 3 + 0) / 3 / 4))]
    assert experiments.series(record, "solved") == [(0, 0.0), (1, 0.5)]


def test_every_claim_compares_two_runs_that_there_are():
    for claim in experiments.CLAIMS:
        assert {claim.more, claim.less} <= {*experiments.RUNS} and claim.more != claim.less
    names = ["".join(filter(str.isalnum, run)) for run in experiments.RUNS]
    assert len({*names}) == len(names)  # each has a folder of its own


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer():
    for n, right, k in itertools.product([6], range(7), range(1, 7)):
        draws = list(itertools.combinations([i < right for i in range(n)], k))
        share = sum(map(any, draws)) / len(draws)
        assert pass_at_k.pass_at(k, n, [right]) == [pytest.approx(share)]


def test_the_interval_of_pass_at_k_is_that_of_other_questions():
    values = [0.0, 1.0] * 50
    mean, low, high = pass_at_k.with_interval(values)
    assert mean == 0.5 and low == pytest.approx(0.4, abs=0.03) and high == pytest.approx(
        0.6, abs=0.03)
