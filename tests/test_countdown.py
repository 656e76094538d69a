"""countdown.py: exact arithmetic, a grader that cannot be fooled, and checks of the data."""

import json
import random
import re
import time
from fractions import Fraction

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import countdown
from countdown import (
    answer_reward_function,
    evaluate_expression,
    format_reward_function,
    generate_prompt,
    load,
    reward_function,
)


def grade(expression: str, nums: list[int], target: int) -> float:
    return answer_reward_function(f"sum</think><answer>{expression}</answer>", nums, target)


# ---------------------------------------------------------------- expressions

@pytest.mark.parametrize("text, nums, target", [
    ("", [1, 2], 0), ("2**3", [2, 3], 8), ("7//2", [7, 2], 3), ("1e2", [1, 2], 100),
    ("1.5*2", [1, 5, 2], 3), ("1_0+2", [10, 2], 12), ("007+1", [7, 1], 8), ("1 2+3", [1, 2, 3], 15),
    ("-1+2", [1, 2], 1), ("2(3)", [2, 3], 6), ("(1+2", [1, 2], 3), ("1+2)", [1, 2], 3),
    ("(1+)2", [1, 2], 3), ("1+2 # sum", [1, 2], 3), ("1/0", [1, 0], 0),
    ("3+1/(2/2-1)", [3, 1, 2, 2, 1], 3),
    ("\u0661+2", [1, 2], 3),   # an Arabic-Indic 1
    ("2\u22121", [1, 2], 1),   # a minus sign
    ("1+\u00a02", [1, 2], 3),  # a non-breaking space
], ids=ascii)
def test_what_is_no_expression_is_never_paid(text, nums, target):
    """The numbers and the target are such that a careless grader would pay."""
    assert evaluate_expression(text) is None
    assert grade(text, nums, target) == 0.0


@pytest.mark.parametrize("expression", [
    "99**98**97",
    "(" * 400 + "1+2" + ")" * 400,
    "9" * 1_000_000 + "+1",
    "1/7-" * 249 + "1/3",
    "1+2" + "=3" * 500_000,
    "1+2</answer>" + "<answer>" * 100_000,
], ids=lambda expression: expression[:9])
def test_a_hostile_answer_costs_no_time(expression):
    row = {"nums": [1, 2], "target": 4}
    start = time.thread_time()

    evaluate_expression(expression)
    parts = reward_function(f"sum</think><answer>{expression}</answer>", row)

    assert time.thread_time() - start < 0.1  # seconds
    assert parts["answer"] == 0.0


# ---------------------------------------------------------------- made-up answers

def random_expression(stream: random.Random) -> str:
    """Two to six numbers, each joined to the others before or behind them."""
    text = str(stream.randint(0, 30))
    for _ in range(stream.randint(1, 5)):
        other = f"{stream.choice(['', ' '])}{stream.choice([0, 1, 2, 77])}"
        sign = stream.choice("+-*/")
        text = stream.choice([f"{text}{sign}{other}", f"({text}){sign}{other}",
                              f"{other}{sign}{text}", f"{other}{sign}({text})"])
    return text


def exact_value(text: str) -> Fraction | None:
    """By Python's own rules, with fractions in place of its numbers."""
    try:
        return eval(re.sub("([0-9]+)", r"Fraction(\1)", " ".join(text.split())))
    except ZeroDivisionError:
        return None


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "(", ")", "+", "-", "*", "/", "**", "//",
          "=", " ", "\n", "0", "1", "7", "007", "1.5", "1e3", "1_0", "\u0661", "\u00b2", "x",
          "9" * 50, "\x00", "\ud800", "\r"]


def fuzzed_completion(stream: random.Random, expression: str) -> str:
    """A right completion with pieces put in, taken out, repeated and cut."""
    pieces = ["12-4=8 no\n", "</think>", "\n", "<answer>", expression, "</answer>"]
    for _ in range(stream.choice([0, 1, 1, 2, 5])):
        place = stream.randrange(len(pieces))
        piece = pieces[place]
        if stream.random() < 0.6:
            pieces.insert(place, stream.choice(PIECES))
        else:
            pieces[place] = stream.choice(["", piece * 2, piece[:len(piece) // 2]])
    return "".join(pieces)


def test_whatever_is_written_only_the_given_numbers_that_make_the_target_are_paid():
    stream, count = random.Random(1), 5000
    num_paid = 0
    for _ in range(count):
        expression = random_expression(stream)
        value = exact_value(expression)
        nums = [int(number) for number in re.findall("[0-9]+", expression)]
        target = stream.randint(-5, 99) if value is None else int(value)
        completion = fuzzed_completion(stream, expression)

        parts = reward_function(completion, {"nums": nums, "target": target})

        assert evaluate_expression(expression) == value, expression
        assert grade(expression, nums, target) == float(value == target), expression
        assert 0 <= parts["format"] <= 1 and parts["answer"] in (0, 1)
        if parts["answer"] == 1:
            num_paid += 1
            answer = completion.rpartition("<answer>")[2].partition("</answer>")[0]
            paid = answer.partition("=")[0]
            assert re.fullmatch(r"[-+*/()0-9 \n\r]+", paid), completion
            assert sorted(re.findall("[0-9]+", paid)) == sorted(map(str, nums)), completion
            assert exact_value(paid) == target, completion
    assert count / 20 < num_paid < 0.95 * count


# ---------------------------------------------------------------- rewards

@pytest.mark.parametrize("answer, nums, target, reward", [
    ("1+2", [1, 2], 3, 1.0), ("\n2 + 1\n", [1, 2], 3, 1.0), ("5*5-1", [5, 1, 5], 24, 1.0),
    # the value
    ("1+2", [1, 2], 4, 0.0), ("7/2", [7, 2], 3, 0.0),
    ("1/3*3000000000000000000000/1000", [1, 3, 3 * 10**21, 1000], 10**18 + 1, 0.0),
    # the result that an answer may claim
    ("1-3 = -2", [3, 1], -2, 1.0), ("1+2 = 99", [1, 2], 3, 0.0), ("1+2 = 99", [1, 2], 99, 0.0),
    ("1+2 =", [1, 2], 3, 0.0), ("1+2 = 3 = 3", [1, 2], 3, 0.0), ("= 3", [1, 2], 3, 0.0),
    # every number exactly once
    ("3", [1, 2], 3, 0.0), ("1+2+2-2", [1, 2], 3, 0.0), ("5-1", [5, 1, 5], 4, 0.0),
    ("12", [1, 2], 12, 0.0),
])
def test_an_answer_is_paid_if_it_makes_the_target_of_every_number_once(
        answer, nums, target, reward):
    assert grade(answer, nums, target) == reward


@pytest.mark.parametrize("completion, reward", [
    ("sum</think> I say <answer>1+2</answer> and that is it.", 1.0),
    ("Is it <answer>2-1</answer>? No.</think><answer>1+2</answer>", 1.0),
    ("sum</think>1+2", 0.0),
    ("<answer>1+2</answer>", 0.0),
    ("sum <answer>1+2</answer></think><answer>2-1</answer>", 0.0),
    ("a</think><answer>1+2</answer></think>", 0.0),
    ("a</think><think><answer>1+2</answer>", 0.0),
    ("sum</think><answer>2-1</answer><answer>1+2</answer>", 0.0),
    ("sum</think><answer>1+2</answer>2-1</answer>", 0.0),
    ("sum</think></answer><answer>1+2", 0.0),
])
def test_only_one_answer_after_the_thinking_is_paid(completion, reward):
    assert answer_reward_function(completion, [1, 2], 3) == reward


@pytest.mark.parametrize("completion, reward", [
    # thinking, one answer block, and nothing else
    ("sum</think><answer>1+2</answer>", 1.0),
    ("several\nlines\n</think>\n \t<answer>\n1+2\n</answer>\n\n", 1.0),
    ("</think><answer>wrong = 99</answer>", 1.0),
    # closed thinking and an answer block, but something else too
    ("sum</think> so <answer>1+2</answer>", 0.6),
    ("sum</think><answer>1+2</answer> is my answer", 0.6),
    ("sum</think><answer>1+2</answer><answer>1+2</answer>", 0.6),
    ("a</think><answer>1</think>+2</answer>", 0.6),
    # an answer block alone, closed thinking alone, and neither
    ("sum <answer>1+2</answer> done", 0.5),
    ("sum</think></answer>1+2<answer>", 0.1),
    ("sum<answer>1+2", 0.0),
])
def test_the_format_is_graded_in_the_steps_that_are_documented(completion, reward):
    assert format_reward_function(completion) == pytest.approx(reward, abs=1e-12)


def test_the_reward_is_a_tenth_of_the_format_plus_the_answer_which_says_what_is_solved():
    parts = reward_function("sum</think> so <answer>1+2</answer>", {"nums": [1, 2], "target": 3})

    assert parts == {"format": pytest.approx(0.6), "answer": 1.0}
    assert countdown.REWARD_WEIGHTS == {"format": 0.1, "answer": 1.0}
    assert countdown.SOLVED == "answer"


# ---------------------------------------------------------------- data

GOOD = {"nums": [1, 2], "target": 3}
BOTH_FORMATS = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])


def write(path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@BOTH_FORMATS
def test_rows_carry_their_prompt_group_problem_and_every_other_column(suffix, tmp_path):
    rows = load(write(tmp_path / f"train[1] *{suffix}", [
        {"nums": [3, 11, 2], "target": 35, "source": "é"},
        {"nums": [2, 3, 11], "target": 35, "source": "b"},
        {"nums": [2, 3, 11], "target": 36, "source": "c"},
        {"nums": [2, 2, 3, 3], "target": -1, "source": "d"},
        {"nums": [2, 3, 3, 3], "target": -1, "source": "e"}]), None)

    assert [row["nums"] for row in rows[::3]] == [[3, 11, 2], [2, 2, 3, 3]]
    assert [row["target"] for row in rows] == [35, 35, 36, -1, -1]
    assert [row["source"] for row in rows] == ["é", "b", "c", "d", "e"]
    assert [row["group"] for row in rows] == [3, 3, 3, 4, 4]
    assert all(row["prompt"] == generate_prompt(row["nums"], row["target"]) for row in rows)
    # The first two are one problem, and the others are different ones.
    assert rows[0]["problem"] == rows[1]["problem"] and len({row["problem"] for row in rows}) == 4


def test_a_folder_is_all_its_files_in_the_order_of_their_names_up_to_max_rows(tmp_path):
    folder = tmp_path / "folder"
    for target in (4, 2, 7, 5, 0, 3, 6, 1):
        suffix = ".parquet" if target % 2 else ".jsonl"
        write(folder / f"{target}{suffix}", [{"nums": [1, 2], "target": target}])
    (folder / "README.md").write_text("not data")

    for max_rows in (None, 1, 3, 8, 99):
        targets = [row["target"] for row in load(str(folder), max_rows)]
        assert targets == list(range(8))[:max_rows]


@pytest.mark.parametrize("line", [
    '{"nums": [1, 2.5], "target": 3}',
    '{"nums": [true, 2], "target": 3}',
    '{"nums": [1, 2], "response": "3"}',
    '{"nums": [1, 2], "target": NaN}',
    '{"nums": [3], "target": 3}',
    '{"nums": "12", "target": 3}',
    '{"nums": [5, -2], "target": 3}',
    '{"nums": [1, 2]}',
    '"nums\\ntarget"',
    '{"nums": [1, 2], "tar',
])
def test_a_row_that_cannot_be_used_is_one_line_that_names_it(line, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD)}\n")

    with pytest.raises(ValueError, match=r"^data\.dataset: .*(row|line) 2\b.*$") as raised:
        load(str(path), None)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name, content", [
    ("missing.jsonl", None),
    ("empty.jsonl", b"\n \n"),
    ("no-table.parquet", b"not a table"),
    ("latin-1.jsonl", b'{"nums": [1, 2], "target": 3, "note": "\xe9"}\n'),
    ("table.csv", b"nums,target\n"),
    ("folder", b""),
])
def test_a_data_set_that_cannot_be_read_is_one_line_that_names_it(name, content, tmp_path):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)

    with pytest.raises(ValueError, match=rf"^data\.dataset: .*{name}.*$") as raised:
        load(str(path), None)

    assert "\n" not in str(raised.value)


def test_lines_may_have_a_response_whole_floats_blanks_and_any_character(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = '{"nums":[1,2],"target":3,"note":"a\u2028b"}\r\n\n {"response": 3.0, "nums": [1, 2.0]}'
    path.write_bytes(lines.encode("utf-8-sig"))  # as editors of Windows begin a file

    first, second = load(str(path), None)

    assert (second["nums"], second["target"], second["prompt"]) == (
        first["nums"], first["target"], first["prompt"]) == ([1, 2], 3, generate_prompt([1, 2], 3))
    assert first["note"] == "a\u2028b"


def test_any_other_name_is_the_train_split_of_a_hub_data_set(monkeypatch):
    def hub(name, configuration, split):
        assert (name, configuration, split) == ("someone/countdown", None, "train")
        return datasets.Dataset.from_list([{**GOOD, "id": 7}, {**GOOD, "id": 8}])

    monkeypatch.setattr(countdown, "load_dataset", hub)

    assert [row["id"] for row in load("someone/countdown", None)] == [7, 8]
    assert [row["id"] for row in load("someone/countdown", 1)] == [7]
