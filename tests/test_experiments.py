"""bench/experiments.py: effects, their intervals and verdicts, and the picture, of made-up runs."""

import random
from statistics import fmean, stdev

import experiments
import mistakes
import pytest
from experiments import HARDEST, SOLVED, Claim
from scipy.stats import t as student

ANSWERS, QUESTIONS = 4, 40


def made_up(chances: list[float], seed: int) -> dict:
    """A record whose questions are answered with these chances at the end, and half of them
    before."""
    stream = random.Random(seed)
    curve = []
    for step, factor in ((0, 0.5), (60, 1.0)):
        right = [sum(stream.random() < factor * chance for _ in range(ANSWERS))
                 for chance in chances]
        curve.append({"step": step, "solved": sum(right) / ANSWERS / QUESTIONS,
                      "right": "".join(map(str, right))})
    return {"answers": ANSWERS, "curve": curve}


@pytest.fixture
def known() -> dict:
    good = [i / QUESTIONS for i in range(QUESTIONS)]
    bad = [0.8 * chance for chance in good]
    runs = {}
    for seed in range(3):
        runs[f"good seed {seed}"] = made_up(good, seed)
        runs[f"bad seed {seed}"] = made_up(bad, 10 + seed)
    for seed in range(3, 9):
        runs[f"good seed {seed}"] = made_up(good, seed)
    return runs


def test_an_effect_takes_the_wider_of_two_intervals(known):
    effect = experiments.effect_of(Claim("", "", SOLVED, "good", "bad"), known)

    goods = [known[f"good seed {seed}"] for seed in range(9)]
    bads = [known[f"bad seed {seed}"] for seed in range(3)]
    ends = [[record["curve"][1]["solved"] for record in records] for records in (goods, bads)]
    assert effect.difference == pytest.approx(fmean(ends[0]) - fmean(ends[1]))
    # Welch's formula for the degrees of freedom.
    parts = [stdev(values) ** 2 / len(values) for values in ends]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 8 + parts[1] ** 2 / 2)
    assert effect.seeds == pytest.approx(student.ppf(0.975, freedom) * sum(parts) ** 0.5)

    differences = []
    for question in range(QUESTIONS):
        good = fmean(int(record["curve"][1]["right"][question]) for record in goods)
        bad = fmean(int(record["curve"][1]["right"][question]) for record in bads)
        differences.append((good - bad) / ANSWERS)
    assert effect.questions == pytest.approx(1.96 * stdev(differences) / QUESTIONS ** 0.5)
    assert effect.half_width == max(effect.seeds, effect.questions)
    assert effect.verdict == "holds"
    assert experiments.effect_of(
        Claim("", "", SOLVED, "bad", "good"), known).verdict == "the opposite"
    assert experiments.effect_of(
        Claim("", "", SOLVED, "good", "good"), known).verdict == "could be chance"


def test_the_hardest_questions_are_those_without_a_right_answer_before_training(known):
    record = known["good seed 0"]
    before, after = (entry["right"] for entry in record["curve"])
    shares = [int(right) / ANSWERS for first, right in zip(before, after) if first == "0"]
    assert experiments.end_of(record, HARDEST) == pytest.approx(fmean(shares))
    assert 0 < len(shares) < QUESTIONS


def test_a_mistake_that_leaves_less_than_a_third_of_the_gain_costs_everything(
        known, monkeypatch):
    monkeypatch.setattr(experiments, "DEFAULT", "good")
    for seed in range(3):
        flat = known[f"bad seed {seed}"]["curve"][0]
        known[f"flat seed {seed}"] = {"answers": ANSWERS, "curve": [flat, flat]}
    cost = {}
    for name in ("bad", "flat", "good"):
        effect = experiments.effect_of(Claim("", "", SOLVED, name, "good"), known)
        cost[name] = mistakes.cost_of(name, effect, known)
    gains = [mistakes.gain_of(name, known) for name in ("bad", "good")]
    assert 0.33 * gains[1] < gains[0] < 0.8 * gains[1]
    assert cost == {"bad": "something", "flat": "everything", "good": "could be chance"}


def test_the_picture_has_a_panel_for_each_entry(known, tmp_path):
    experiments.draw(tmp_path / "a.png", {"one": ["good", "bad"]}, known)
    experiments.draw(tmp_path / "b.png", {"one": ["good"], "two": ["bad"]}, known)
    heights = []
    for name in ("a.png", "b.png"):
        image = (tmp_path / name).read_bytes()
        assert image.startswith(b"\x89PNG")
        heights.append(int.from_bytes(image[20:24]))
    assert heights[1] > heights[0]
