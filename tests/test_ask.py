"""examples/ask.py: several answers, each with the grader's verdict."""

import shutil
import sys

import pytest
import yaml
from conftest import run_script
from processes import ROOT, ranks, run

import main

sys.path.append(str(ROOT / "examples"))
import ask

ROW = {"nums": [3, 7, 25], "target": 88}


def answer_to(row, completion, num_tokens=1, is_truncated=False):
    return main.Trajectory(main.Question(row, []), [1] * num_tokens, completion, is_truncated)


@pytest.mark.parametrize(("completion", "verdict"), [
    ("25-3=22\n</think>\n<answer>(25-3)*4</answer>", "wrong: it uses 3, 4, 25"),
    ("a</think><answer>7*3+25</answer>", "wrong: 7*3+25 makes 46"),
    ("a</think><answer>7*3+25 = 88</answer>", "wrong: 7*3+25 makes 46"),
    ("a</think><answer>no idea</answer>", "wrong: no expression that can be computed"),
    ("a</think>", "wrong: no expression that can be computed"),
    ("a</think>\n<answer>3*(25+7)-8</answer>", "wrong: it uses 3, 7, 8, 25"),
    ("a</think><answer>3*25+7+6</answer>", "wrong: it uses 3, 6, 7, 25")])
def test_the_verdict_says_what_is_wrong(completion, verdict):
    assert ask.verdict(answer_to(ROW, completion)) == verdict


def test_a_right_answer_is_right_and_one_that_was_truncated_is_said_to_be():
    row = {"nums": [3, 7, 25], "target": 68}
    assert ask.verdict(answer_to(row, "a</think>\n<answer>25*3-7</answer>")) == "right"
    assert (ask.verdict(answer_to(row, "<answer>25*3-7</answer>"))
            == "wrong: the expression is right, but the format is not")
    truncated = answer_to(row, "3*7", num_tokens=9, is_truncated=True)
    assert ask.verdict(truncated) == "truncated after 9 tokens"


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
            + newest.stdout.count(": truncated") == 4 and " of 4 right" in newest.stdout)
    monkeypatch.chdir(tmp_path)
    assert ask.ask(["--model", str(ROOT / "tiny" / "model"), "--answers", "2",
                    "3", "7", "25", "=", "88"]) == 0
    assert capsys.readouterr().out.count("--- answer") == 2
    for words, says in ((["3", "7"], "3 7"), (["3", "x", "=", "5"], "3 x = 5"),
                        (["3", "=", "3"], "3 = 3"), (["3", "7", "=", "--10"], "3 7 = --10"),
                        (["--model", "none", "3", "7", "=", "10"], "none")):
        assert ask.ask(["--", *words] if "--10" in words else words) == 2
        assert says in capsys.readouterr().err
    sums = tmp_path / "runs" / "sums"
    shutil.copytree(ROOT / "tiny" / "model", sums / "best")
    (sums / "config.yaml").write_text("task: {name: sums.py}\ntraining: {max_new_gen_tokens: 8, "
                                      "shard: true}\n")
    asked = ask.load(sums / "best")  # alone, with nobody to share with: its weights once
    assert not asked.config.training.shard
    assert ask.newest_best_model() == ask.Path("runs/a/best")  # the newest of Countdown
    assert ask.ask(["--model", "runs/sums/best", "3", "7", "25", "=", "88"]) == 0
    said = capsys.readouterr().out
    assert "note: this model was trained on sums.py, and not on Countdown" in said
    shutil.rmtree(tmp_path / "runs")
    assert ask.ask(["3", "7", "=", "10"]) == 2 and "train first" in capsys.readouterr().err


def test_a_model_is_asked_with_the_settings_of_its_run(tmp_path):
    """Its temperature and its limit, say. What it was trained with does not matter here."""
    best = tmp_path / "a" / "best"
    shutil.copytree(ROOT / "tiny" / "model", best)
    settings = {"training": {"max_new_gen_tokens": 3, "learning_rate": 0.5},
                "sampling": {"temperature": 0.25}, "model": {"precision": "bfloat16"}}
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(settings))
    config = ask.load(best).config
    assert (config.training.max_new_gen_tokens, config.sampling.temperature) == (3, 0.25)
    assert (config.model.name, config.model.precision) == (str(best), "float32")
    answers = ask.sample_answers(best, ask.read_question(["3", "7", "25", "=", "68"]), 5)
    assert [answer.num_tokens for answer in answers] == [3] * 5
    again = ask.sample_answers(best, ask.read_question(["3", "7", "25", "=", "68"]), 5)
    assert [answer.completion for answer in again] == [answer.completion for answer in answers]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ask.py", "one_step.py"])
def test_the_first_words_come_before_the_libraries(name):
    result = run(sys.executable, ROOT / "examples" / name, "--help")
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("importing PyTorch and transformers") and second.startswith("usage")
