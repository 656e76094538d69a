"""examples/ask.py: several answers, each with the grader's verdict."""

import os
import shutil

import ask
import pytest
from processes import ROOT

import main
from machinery.tasks import Question

MODEL = ROOT / "tiny" / "model"
QUESTION = ["3", "7", "25", "=", "68"]


@pytest.mark.parametrize(("completion", "verdict"), [
    ("a</think>\n<answer>25*3-7</answer>", "right"),
    ("a</think><answer>7*3+25 = 68</answer>", "wrong: 7*3+25 makes 46"),
    ("a</think><answer>3*(25+7)-28</answer>", "wrong: it uses 3, 7, 25, 28"),
    ("a</think>", "wrong: no expression that can be computed"),
    ("<answer>25*3-7</answer>", "wrong: the expression is right, but the format is not")])
def test_the_verdict_says_what_is_wrong(completion, verdict):
    question = Question(ask.read_question(QUESTION), [])

    assert ask.verdict(main.Trajectory(question, [1], completion, False)) == verdict
    assert ask.verdict(main.Trajectory(question, [1] * 9, "3*7", True)).startswith("truncated")


def test_it_asks_the_best_model_of_the_newest_run_of_countdown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("sums", "newest", "older")):
        best = tmp_path / "runs" / name / "best"
        shutil.copytree(MODEL, best)
        os.utime(best, (10**9 - age, 10**9 - age))
    (tmp_path / "runs" / "sums" / "config.yaml").write_text("task: {name: sums.py}\n")
    # What was trained on a GPU can be asked without one.
    (tmp_path / "runs" / "newest" / "config.yaml").write_text(
        "model: {device: cuda}\ntask: {name: countdown}\n")

    assert ask.ask(QUESTION) == 0

    said = capsys.readouterr().out
    lines = said.splitlines()
    verdicts = [line for line in lines if line.startswith("--- answer")]
    num_right = sum(line.endswith(": right") for line in verdicts)
    assert lines[0] == "runs/newest/best" and "Combine the numbers 3, 7, 25" in said
    assert len(verdicts) == 4 and lines[-1] == f"{num_right} of 4 right"
