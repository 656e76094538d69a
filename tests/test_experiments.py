"""What bench/experiments.py makes of runs."""

import json
from statistics import fmean, stdev
from types import SimpleNamespace

import experiments
import pytest
from processes import ROOT

from machinery.settings import load_config
from machinery.tasks import load_task

CLAIM = experiments.Claim("x is better", "0000.00000", "solved", "G = 2", experiments.DEFAULT)
OPTIONS = SimpleNamespace(keys=[], seeds=[0, 1, 2])


def record_of(solved_at_the_end: float, right_at_the_end: str = "1430") -> dict:
    return {"minutes": 1.0, "answers": 4, "curve": [
        {"step": 0, "solved": 0.0, "right": "0400"},
        {"step": 1, "solved": solved_at_the_end, "right": right_at_the_end}]}


def effect_of_records(more: list[dict], less: list[dict]) -> experiments.Effect:
    known = {}
    for seed in OPTIONS.seeds:
        known[f"{CLAIM.more} seed {seed}"] = more[seed]
        known[f"{CLAIM.less} seed {seed}"] = less[seed]
    return experiments.effect_of(CLAIM, known, OPTIONS)


@pytest.mark.parametrize("more, verdict", [
    ([0.5, 0.6, 0.58], "holds"),
    ([0.1, 0.2, 0.18], "the opposite"),
    ([0.5, 0.6, 0.1], "could be chance")])
def test_an_effect_has_an_interval_between_seeds_and_a_verdict(more, verdict):
    less = [0.3, 0.4, 0.4]

    effect = effect_of_records([record_of(solved) for solved in more],
                               [record_of(solved) for solved in less])

    differences = [more[seed] - less[seed] for seed in range(3)]
    assert effect.difference == pytest.approx(fmean(differences))
    assert effect.half_width == effect.seeds
    assert effect.seeds == pytest.approx(4.303 * stdev(differences) / 3 ** 0.5)
    assert effect.verdict == verdict


def test_seeds_that_agree_by_luck_do_not_make_the_interval_narrower_than_the_questions_do():
    rights = ["4400", "0440", "4040"]

    effect = effect_of_records([record_of(0.5, right) for right in rights],
                               [record_of(0.4, "2222") for _ in rights])

    # The differences of all twelve questions: six times 4/4 - 2/4, and six times 0/4 - 2/4.
    half_width = 1.96 * stdev([0.5, -0.5] * 6) / 12 ** 0.5
    assert effect.half_width == effect.questions == pytest.approx(half_width)
    assert effect.difference == pytest.approx(0.1)
    assert effect.verdict == "could be chance"


def test_without_counts_all_answers_to_a_question_are_taken_to_agree():
    records = [record_of(0.5), record_of(0.1)]
    for record in records:
        for entry in record["curve"]:
            del entry["right"]

    effect = effect_of_records([records[0]] * 3, [records[1]] * 3)

    # 3 x 256 questions, each of which is right or wrong as a whole, in two independent runs.
    half_width = 1.96 * ((0.5 * 0.5 + 0.1 * 0.9) / (3 * 256)) ** 0.5
    assert effect.half_width == effect.questions == pytest.approx(half_width)


def test_one_seed_is_never_enough_for_a_verdict():
    known = {f"{CLAIM.more} seed 0": record_of(1.0), f"{CLAIM.less} seed 0": record_of(0.0)}

    effect = experiments.effect_of(CLAIM, known, SimpleNamespace(keys=[], seeds=[0]))

    assert effect.verdict == "could be chance"


def test_the_hardest_questions_are_those_never_solved_before():
    points = experiments.series(record_of(0.5), experiments.HARDEST)

    assert points == [(0, 0.0), (1, pytest.approx((1 + 3 + 0) / 3 / 4))]


def test_every_claim_compares_two_runs_that_there_are():
    for claim in experiments.CLAIMS:
        assert {claim.more, claim.less} <= set(experiments.RUNS)
        assert claim.more != claim.less


def test_every_panel_draws_runs_that_there_are():
    assert len(experiments.PANELS) <= 6
    for runs in experiments.PANELS.values():
        assert set(runs) <= set(experiments.RUNS)
        assert len(runs) <= len(experiments.COLOURS)


def test_every_run_has_settings_that_are_understood_and_measures_answer_and_format():
    """A part of the reward that has no weight, not even 0.0, would not be measured."""
    for run, its_keys in experiments.RUNS.items():
        keys = experiments.USUAL | its_keys
        program = keys.pop(experiments.PROGRAM)
        assert (ROOT / program[0]).exists(), run
        words = ["--config", str(ROOT / keys.pop(experiments.CONFIG))]
        words += [f"{key}={value}" for key, value in keys.items()]
        assert {"answer", "format"} <= set(load_task(load_config(words)).REWARD_WEIGHTS), run


def test_what_is_shown_is_what_the_file_has(tmp_path, capsys):
    known = {f"{run} seed {seed}": record_of(0.5)
             for run in (CLAIM.more, CLAIM.less) for seed in OPTIONS.seeds}
    for record in known.values():
        for entry in record["curve"]:
            entry.update({"answer length": 9.0, "truncated": 0.0, "format": 1.0})
    data, picture = tmp_path / "data.json", tmp_path / "picture.png"
    data.write_text(json.dumps(known))

    experiments.command(["--show", "--data", str(data), "--picture", str(picture)])

    *tables, found = capsys.readouterr().out.splitlines()
    assert json.loads(found) == {"groups of 2 fall behind": [0.0, 0.0]}
    assert "| lab model before training | 0.00 | 9 | 0.00 | 1.00 |  |  |" in tables
    assert "| Dr. GRPO, G = 8 | 0.00 0.50 | 9 | 0.00 | 1.00 |  | 1.0 |" in tables
    assert ("| groups of 2 fall behind | Dr. GRPO, G = 8: 0.500 | G = 2: 0.500 | +0.000 | 0.000 "
            "| 0.000 | could be chance |") in tables
    assert not picture.exists()  # No panel has two of these runs.
