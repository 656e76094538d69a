"""examples/ask.py: several answers, each with the grader's verdict."""

import shutil
import sys

import pytest
from conftest import run_script
from processes import ROOT, ranks, run

import main

sys.path.append(str(ROOT / "examples"))
import ask

ROW = {"nums": [3, 7, 25], "target": 88}


@pytest.mark.parametrize(("completion", "verdict"), [
    ("25-3=22\n</think>\n<answer>(25-3)*4</answer>", "wrong: it uses 3, 4, 25"),
    ("a</think><answer>7*3+25</answer>", "wrong: 7*3+25 makes 46"),
    ("a</think><answer>no idea</answer>", "wrong: no answer that can be computed"),
    ("a</think>", "wrong: no answer that can be computed"),
    ("a</think>\n<answer>3*(25+7)-8</answer>", "wrong: it uses 3, 7, 8, 25"),
    ("a</think><answer>3*25+7+6</answer>", "wrong: it uses 3, 6, 7, 25")])
def test_the_verdict_says_what_is_wrong(completion, verdict):
    assert ask.verdict(main.Trajectory(ROW, [], [1], completion, False)) == verdict


def test_a_right_answer_is_right_and_one_that_was_cut_off_is_said_to_be():
    row = {"nums": [3, 7, 25], "target": 68}
    assert (ask.verdict(main.Trajectory(row, [], [1], "a</think>\n<answer>25*3-7</answer>", False))
            == "right")
    assert (ask.verdict(main.Trajectory(row, [], [1], "<answer>25*3-7</answer>", False))
            == "wrong: right, but not written as asked")
    assert ask.verdict(main.Trajectory(row, [], [1] * 9, "3*7", True)) == "cut off after 9 tokens"


def test_it_asks_best_of_the_newest_run_or_the_model_named(tmp_path, monkeypatch, capsys):
    """The first time with the command line that the README shows, from a folder that has a run."""
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "runs" / "a" / "best-000001")
    (tmp_path / "runs" / "a" / "best").symlink_to("best-000001")

    newest = ranks(1, run_script, str(ROOT / "examples" / "ask.py"), "3", "7", "25", "=", "88",
                   cwd=tmp_path)
    assert newest.returncode == 0, newest.stderr
    assert (newest.stdout.startswith("runs/a/best\n") and newest.stdout.count("--- answer") == 4
            and "Combine the numbers 3, 7, 25" in newest.stdout)
    assert (newest.stdout.count(": wrong") + newest.stdout.count(": right")
            + newest.stdout.count(": cut off") == 4 and " of 4 right" in newest.stdout)
    monkeypatch.chdir(tmp_path)
    assert ask.ask(["--model", str(ROOT / "tiny" / "model"), "--answers", "2",
                    "3", "7", "25", "=", "88"]) == 0
    assert capsys.readouterr().out.count("--- answer") == 2
    for words, says in ((["3", "7"], "3 7"), (["3", "x", "=", "5"], "3 x = 5"),
                        (["--model", "none", "3", "7", "=", "10"], "none")):
        assert ask.ask(words) == 2 and says in capsys.readouterr().err
    sums = tmp_path / "runs" / "sums"
    shutil.copytree(ROOT / "tiny" / "model", sums / "best")
    (sums / "config.yaml").write_text("task: {name: sums.py}\ntraining: {max_new_gen_tokens: 8, "
                                      "shard: true}\n")
    asked = ask.load(sums / "best")  # alone, with nobody to share with: its weights once
    assert not asked.config.training.shard
    assert ask.newest_best() == ask.Path("runs/a/best")  # the newest of Countdown
    assert ask.ask(["--model", "runs/sums/best", "3", "7", "25", "=", "88"]) == 0
    said = capsys.readouterr().out
    assert "note: this model was trained on sums.py, and not on Countdown" in said
    shutil.rmtree(tmp_path / "runs")
    assert ask.ask(["3", "7", "=", "10"]) == 2 and "train first" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ask.py", "one_step.py"])
def test_the_first_words_come_before_the_libraries(name):
    result = run(sys.executable, ROOT / "examples" / name, "--help")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("importing PyTorch and transformers") and second.startswith("usage")
