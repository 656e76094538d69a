"""Rewards and tasks beside Countdown: at their published values, and plugged into whole runs."""

import json
import math
import re
import signal
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import SILENT_LOG, SIZES, make_config, read_jsonl, shown_file, start, write_own_task
from processes import ROOT

import main
from machinery import tasks
from machinery.errors import UserError

task = main.load_task(make_config(task__name="examples/gsm8k.py"))
rewards = task.rewards
SMALL = ["training.max_steps=2", "training.max_new_gen_tokens=16",
         "training.num_samples_per_step=2", "training.k_best_of_n=[4,4]", "data.num_validation=3",
         "validation.best_of_n=2", "run.name=a"]
R1 = "<think>Two and two.</think><answer>4</answer>"
LINES = "<think>\nTwo and two.\n</think>\n<answer>\n4\n</answer>"


# ---------------------------------------------------------------- rewards

@pytest.mark.parametrize(("text", "value"), [
    ("4", 4), (" 4 ", 4), ("4.", 4), ("-7", -7), ("\N{MINUS SIGN}7", -7), ("+7", 7),
    ("1,234", 1234), ("$1,234.50", Fraction("1234.5")), ("0.5", Fraction(1, 2)),
    (".5", Fraction(1, 2)), ("18 dollars.", 18), ("x = 12", 12), ("1,234,567", 1234567),
    ("007", 7), ("9" * 150, int("9" * 150)), ("", None), ("four", None), ("-", None), ("1,2", None),
    ("1,2345", None), ("3/4", None), ("1.2.3", None), ("4 or 5", None), ("10-3", None),
    ("1e5", None), ("1 000", None)])
def test_the_one_number_in_a_text(text, value):
    assert rewards.number(text) == value


@pytest.mark.parametrize(("completion", "value"), [
    (R1, 1.0), (LINES, 1.0), ("<think>a</think> so <answer>$4.00</answer>", 1.0),
    ("<answer>4.</answer>", 1.0),
    ("<think>a</think><answer>5</answer>", 0.0), ("<think>a</think>4", 0.0),
    ("<think><answer>4</answer>", 0.0), ("<think><answer>4</answer></think>", 0.0),
    ("<think>a</think><answer>5</answer><answer>4</answer>", 0.0),
    ("<think>a</think><answer>4 or 5</answer>", 0.0),
    ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
    ("<think>a</think><answer><answer>4</answer>", 0.0),
    ("<think>a</think><answer>4", 0.0), ("", 0.0)])
def test_accuracy_pays_for_the_number_in_the_one_answer_after_the_thinking(completion, value):
    assert rewards.accuracy(completion, "4") == value


def test_accuracy_compares_numbers_not_texts_and_refuses_an_answer_without_one():
    for answer, said in (("1,190", "1190"), ("13.50", "13.5"), ("-8", "\N{MINUS SIGN}8.0"),
                         ("14.", "14")):
        assert rewards.accuracy(f"<answer>{said}</answer>", answer) == 1.0
    with pytest.raises(ValueError, match="no number, or several: 'many'"):
        rewards.accuracy(R1, "many")


@pytest.mark.parametrize(("completion", "r1", "strict"), [
    (R1, 1, 0), (LINES, 1, 1), (LINES + "\n", 1, 1),
    ("<think>a\nb</think>\n\n<answer>4</answer>", 1, 0), ("<answer>4</answer>", 0, 0),
    (R1 + " and more", 0, 0), ("well, " + R1, 0, 0), (R1 + R1, 0, 0),
    ("<think>a</think>b<answer>4</answer>", 0, 0), ("", 0, 0),
    (LINES.replace("<answer>\n", "<answer>"), 1, 0)])
def test_the_two_format_rewards(completion, r1, strict):
    assert (rewards.format_r1(completion), rewards.format_strict(completion)) == (r1, strict)


@pytest.mark.parametrize(("completion", "value"), [
    (LINES, 1.0), (LINES.replace("<think>\n", ""), 0.75),
    ("\n</think>\n<answer>\n4\n</answer>", 0.75), ("<think>\nabc", 0.25), ("abc", 0.0), (R1, 0.0),
    (LINES + "\n</answer>", 0.75), (LINES + LINES, 0.0)])
def test_a_quarter_for_each_tag_at_its_place(completion, value):
    assert rewards.tag_count(completion) == value


@pytest.mark.parametrize(("completion", "value"), [
    ("Step 1: add.\nStep 2: halve.\nStep 3: done.", 1),
    ("First, add.\nSecond, halve.\nFinally, done.", 1), ("1. add\n2. halve\n3. done\n4. rest", 1),
    ("Step 1: add.", 1 / 3), ("First, add.\nFinally, done.", 2 / 3), ("- add\n* halve", 2 / 3),
    ("Nothing of the kind.", 0)])
def test_a_third_for_each_step_of_reasoning(completion, value):
    assert rewards.reasoning_steps(completion) == pytest.approx(value)


@pytest.mark.parametrize(("correct", "length", "value"), [
    (True, 0, 1.0), (True, 500, 0.75), (True, 1000, 0.5), (True, 9999, 0.5),
    (False, 0, -0.5), (False, 500, -0.25), (False, 1000, 0.0),
    (True, 250, 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2)])
def test_the_cosine_falls_with_the_length_of_right_answers_and_rises_with_that_of_wrong_ones(
        correct, length, value):
    assert rewards.cosine(correct, length, 1000) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("completion", "value"), [
    ("", 0), ("one two", 0), ("one two three four", 0), ("a b c a b c", -(1 - 3 / 4)),
    ("a a a a a", -(1 - 1 / 3)), ("A b C a B c", -(1 - 3 / 4))])
def test_repetition_costs_the_share_of_runs_of_three_words_said_before(completion, value):
    assert rewards.repetition(completion) == pytest.approx(value)


def test_a_reward_model_pays_the_logit_of_its_one_label_or_the_probability_of_the_one_named(
        tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    for labels in (1, 2):
        torch.manual_seed(0)
        config = transformers.Qwen2Config(**{
            **SIZES, "vocab_size": len(tokenizer), "num_labels": labels,
            "pad_token_id": tokenizer.pad_token_id})
        transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / str(labels))
        tokenizer.save_pretrained(tmp_path / str(labels))
    judge = rewards.RewardModel(str(tmp_path / "1"))
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.apply_chat_template(
        messages, return_tensors="pt", return_dict=True)["input_ids"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "1").eval()
    assert judge("1+1?", "2") == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-6)
    assert judge("1+1?", "2") != judge("1+1?", "3")
    first, second = (rewards.RewardModel(str(tmp_path / "2"), label)("1+1?", "2")
                     for label in ("LABEL_0", "LABEL_1"))
    assert first + second == pytest.approx(1.0) and first != second
    with pytest.raises(ValueError, match="LABEL_0, LABEL_1: say which"):
        rewards.RewardModel(str(tmp_path / "2"))


# ---------------------------------------------------------------- GSM8K

def test_gsm8k_rows_keep_their_columns_and_their_final_numbers():
    rows = task.load(str(ROOT / "examples" / "gsm8k.jsonl"), None)
    finals = [rewards.number(row["final"]) for row in rows]
    assert finals[:5] == [9, 1190, Fraction("13.5"), -8, 14] and None not in finals
    assert all(row["written"] == "by hand" and row["question"].strip() in row["prompt"]
               for row in rows)
    row = rows[1]
    parts = task.reward_function("<think>85*14</think><answer>1,190</answer>", row)
    assert parts == {"accuracy": 1.0, "format": 1.0, "format_strict": 0.0, "tag_count": 0.0,
                     "reasoning_steps": 0.0, "cosine": pytest.approx(1.0, abs=1e-3),
                     "repetition": 0.0}
    assert set(parts) == set(task.REWARD_WEIGHTS)


@pytest.mark.parametrize("row", [
    {"question": "1+1?"}, {"question": "1+1?", "answer": "2"},
    {"question": "1+1?", "answer": "#### two"}, {"question": 1, "answer": "#### 2"}])
def test_a_row_that_is_none_of_gsm8k_is_named(row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="row 1"):
        task.load(str(tmp_path / "rows.jsonl"), None)


def test_gsm8k_trains_end_to_end_without_the_hub(tmp_path):
    arguments = ["task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl",
                 "data.prompt_style=chat", f"run.dir={tmp_path}"]
    assert start([*SMALL, *arguments,
                  "task.reward_weights={accuracy: 1, cosine: 0.5, repetition: 0.25}",
                  "training.learning_rate=0.01"]) == 0
    entries = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    steps = [entry for entry in entries if "reward" in entry]
    assert len(steps) == 2 and all(entry["updated"] == 1 for entry in steps)
    assert {name for name in steps[0] if name.startswith("reward/")} == {
        f"reward/{part}{ending}" for part in ("accuracy", "cosine", "repetition")
        for ending in ("", "_std")}
    for entry in steps:
        assert entry["reward"] == pytest.approx(
            entry["reward/accuracy"] + 0.5 * entry["reward/cosine"]
            + 0.25 * entry["reward/repetition"])
    assert "eval/format" not in entries[0] and "eval/cosine" in entries[0]


# ---------------------------------------------------------------- plugging in

def test_weights_choose_the_parts_but_what_counts_as_solved_is_always_measured(tmp_path):
    assert start([*SMALL, f"run.dir={tmp_path}", "data.max_rows=100",
                  "task.reward_weights={format: 2}"]) == 0
    entries = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert (entries[1]["reward"] == pytest.approx(2 * entries[1]["reward/format"])
            and "reward/answer" not in entries[1])
    assert entries[0]["eval/solved"] >= 0 and "solved" in entries[1]


def test_questions_that_are_too_long_are_left_out_and_counted(tmp_path, capsys):
    rows = task.load(str(ROOT / "examples" / "gsm8k.jsonl"), None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    lengths = sorted(len(tokenizer(row["prompt"])["input_ids"]) for row in rows)
    limit = lengths[8]
    arguments = ["task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl",
                 f"run.dir={tmp_path}", "training.max_steps=0"]
    assert start([*SMALL, *arguments, f"data.max_prompt_tokens={limit}"]) == 0
    assert f"data.max_prompt_tokens={limit} leaves out 3 of 12 questions" in capsys.readouterr().out
    assert start([*SMALL, *arguments, "run.name=b", "data.max_prompt_tokens=5"]) == 2
    assert "data.max_prompt_tokens=5" in capsys.readouterr().err


BROKEN = '''
from countdown import SOLVED, REWARD_WEIGHTS, load


def steps(completion):
    {failure}


def reward_function(completion, row):
    return {{"answer": 0.0, "format": steps(completion)}}
'''


@pytest.mark.parametrize(("failure", "says"), [
    ('raise KeyError("steps")', "KeyError: 'steps'"),
    ("return 1 + None", "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'"),
    ("import sys; sys.exit(0)", "SystemExit: 0"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise ValueError('many words ' * 10_000 + 'at its end')", "at its end")])
def test_a_reward_that_fails_ends_the_run_with_its_own_traceback_and_the_completion(
        failure, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN.format(failure=failure))
    assert start([*SMALL, "task.name=broken.py", "data.max_rows=100", "run.dir=runs"]) == 1
    said = capsys.readouterr().err
    place = f'File "{tmp_path / "broken.py"}", line 6, in steps\n    {failure}\n'
    assert said.startswith("Traceback") and place in said
    after = said.partition(place)[2]
    assert says in after
    if "SystemExit" not in says and "KeyboardInterrupt" not in says:
        assert re.search(r"\nThe completion was '\d+", after)
    assert not list(tmp_path.glob("runs/a/error*"))


@pytest.mark.parametrize(("failure", "value"), [
    ('return float("nan")', "nan"), ("return 1e308", "1e+308"), ("return None", "None")])
def test_a_reward_that_is_no_number_ends_the_run_with_what_it_was_and_the_completion(
        failure, value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN.format(failure=failure))
    assert start([*SMALL, "task.name=broken.py", "data.max_rows=100", "run.dir=runs"]) == 1
    assert re.search(rf"\nTypeError: reward_function returned \{{'answer': 0.0, 'format': "
                     rf"{re.escape(value)}\}}, and not a number up to 1e\+09 for each of format, "
                     r"answer\nThe completion was '\d+", capsys.readouterr().err)


class Enough(Exception):
    pass


def wait():
    time.sleep(0.4)


def match_without_end():
    """A regular expression that takes some centuries, and holds on to the interpreter."""
    def end(*_):
        raise Enough

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.4)
    with pytest.raises(Enough):
        re.match(r"(a+)+$", "a" * 60 + "b")
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("hang", [wait, match_without_end])
def test_a_reward_that_does_not_answer_shows_again_and_again_where_it_stands_until_it_does(
        hang, monkeypatch, capfd):
    monkeypatch.setattr(tasks, "SECONDS_FOR_A_REWARD", 0.1)
    alarm = signal.getsignal(signal.SIGALRM)

    def reward_function(completion, row):
        if row["slow"]:
            hang()
        return {"right": 1.0}

    group = [main.Trajectory(main.Question({"slow": i == 1}, []), [0], "", False) for i in range(3)]
    own = SimpleNamespace(reward_function=reward_function, REWARD_WEIGHTS={"right": 1.0},
                          SOLVED="right")
    main.score(SimpleNamespace(task=own, log=SILENT_LOG), [group])
    assert [trajectory.reward for trajectory in group] == [1.0] * 3
    said = capfd.readouterr().err
    assert said.count(f"in {hang.__name__}") >= 3
    assert re.search(rf'File "{__file__}", line \d+ in {hang.__name__}', said)
    time.sleep(0.3)
    assert capfd.readouterr().err == ""  # it has answered
    assert signal.getsignal(signal.SIGALRM) == alarm  # a task may have time limits of its own


@pytest.mark.parametrize("name", ["math", "datasets", "torch"])
def test_a_task_cannot_take_the_place_of_another_module(name, tmp_path, capsys):
    (tmp_path / f"{name}.py").write_text("from countdown import *")
    module = sys.modules[name]
    assert start([*SMALL, f"task.name={tmp_path / name}.py", f"run.dir={tmp_path}"]) == 2
    assert f"Python has a module {name}; rename the file" in capsys.readouterr().err
    assert sys.modules[name] is module


@pytest.mark.parametrize("part", ["reward", "truncated", "completion_length", "best_of_n",
                                  "solved"])
def test_a_part_of_the_reward_cannot_have_the_name_of_a_metric(part, tmp_path):
    """It would be overwritten, or decide which model is the best."""
    (tmp_path / "own.py").write_text(
        "from countdown import load\n\nSOLVED = 'right'\n"
        f"REWARD_WEIGHTS = {{'right': 1.0, '{part}': 0.5}}\n"
        "def reward_function(completion, row):\n    return dict.fromkeys(REWARD_WEIGHTS, 0.0)\n")
    with pytest.raises(UserError, match=f"own.py': a metric has the name '{part}'; call this part"):
        main.load_task(make_config(task__name=str(tmp_path / "own.py")))


def start_with(load, folder):
    """Of a task whose `load` has this body."""
    (folder / "broken.py").write_text(
        "from countdown import SOLVED, REWARD_WEIGHTS, reward_function\n\n\n"
        "def load(dataset, max_rows):\n    " + load)
    return start([*SMALL, "task.name=broken.py", "run.dir=runs"])


@pytest.mark.parametrize(("load", "says"), [
    ("return [{'question': 1}]", ("task.name='broken.py': load() has to return dictionaries with a "
                                  "text as prompt, and row 1 is {'question': 1}")),
    ("raise ValueError('data.dataset: no\\nsuch column')", "data.dataset: no such column")])
def test_what_a_tasks_load_refuses_or_should_have_returned_is_one_line(
        load, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert start_with(load, tmp_path) == 2
    assert capsys.readouterr().err == f"error: {says}\n"


@pytest.mark.parametrize(("load", "says"), [
    ("return sum(None)", "TypeError: 'NoneType' object is not iterable"),
    ("raise KeyError('column')", "KeyError: 'column'")])
def test_a_tasks_load_that_fails_shows_its_own_traceback(load, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert start_with(load, tmp_path) == 1
    said = capsys.readouterr().err
    assert f'File "{tmp_path / "broken.py"}", line 5, in load\n    {load}\n' in said
    assert said.startswith("Traceback") and said.endswith(f"{says}\n")


def test_the_own_task_of_the_docs_runs_as_it_stands(tmp_path):
    assert len(shown_file("mytask.py").strip().splitlines()) <= 25
    write_own_task(tmp_path)
    rows = read_jsonl(tmp_path / "mine.jsonl")
    assert len(rows) == 99 * 11
    assert all(eval(row["question"]) == int(row["answer"]) for row in rows)
    assert start([*SMALL, f"task.name={tmp_path / 'mytask.py'}", f"run.dir={tmp_path}",
                  f"data.dataset={tmp_path / 'mine.jsonl'}"]) == 0
    step = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
    assert {"reward/digits", "reward/right", "reward/right_std"} <= set(step)
    own = main.load_task(make_config(task__name=str(tmp_path / "mytask.py")))
    row = own.load(str(tmp_path / "mine.jsonl"), 1)[0]
    assert own.reward_function(row["answer"], row) == {"digits": 1.0, "right": 1.0}
    assert own.reward_function("no idea", row) == {"digits": 0.0, "right": 0.0}


def test_the_reward_of_the_docs_for_countdown_runs_as_it_stands(tmp_path):
    (tmp_path / "terse.py").write_text(shown_file("terse.py"))
    assert start([*SMALL, f"task.name={tmp_path / 'terse.py'}", f"run.dir={tmp_path}",
                  "data.prompt_style=chat"]) == 0
    assert 0 < read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]["reward/brevity"] <= 1
    terse = main.load_task(make_config(task__name=str(tmp_path / "terse.py")))
    assert terse.reward_function(
        "</think>\n<answer>3+4</answer>" + " " * 71, {"nums": [3, 4], "target": 7}) == {
            "format": 1.0, "answer": 1.0, "brevity": 0.8}
