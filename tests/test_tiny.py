"""The embedded default: what lies in tiny/ is what its card says, and build.py makes such a thing
from nothing."""

import argparse
import itertools
import random
import re
import sys
from collections import Counter
from fractions import Fraction

import pytest
from conftest import make_config, read_jsonl, run_script, start
from processes import ROOT, ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
import main
from tiny import build

TINY = ROOT / "tiny"
# the arguments that built it: they stand in the first lines of build.py
LAB_ARGUMENTS = re.search(r"--out tiny/lab .*", build.__doc__)[0].split()


def content(nums, target):
    return tuple(sorted(nums)), target


@pytest.fixture(scope="module")
def rows():
    return countdown.load(str(TINY / "countdown.parquet"), None)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "model")


def values(numbers: list[Fraction], allowed=lambda made: True) -> set[Fraction]:
    """All that can be made of all the numbers,
    by taking any two and putting back what they make, if it is allowed."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for a, b in itertools.permutations(range(len(numbers)), 2):
        rest = [number for i, number in enumerate(numbers) if i not in (a, b)]
        x, y = numbers[a], numbers[b]
        for made in [x + y, x - y, x * y] + ([x / y] if y else []):
            if allowed(made):
                found |= values([*rest, made], allowed)
    return found


def test_the_problems_are_many_distinct_and_solvable(rows):
    assert len(rows) == len({row["problem"] for row in rows}) >= 20_000
    assert all(len(row["nums"]) == 3 and 1 <= min(row["nums"]) and max(row["nums"]) <= 30
               for row in rows)
    for row in random.Random(0).sample(rows, 300):
        assert row["target"] in values([Fraction(number) for number in row["nums"]])


@pytest.mark.parametrize("folder, arguments", [("", []), ("lab", LAB_ARGUMENTS)])
def test_no_problem_of_the_dataset_is_in_the_supervised_traces_in_any_order(
        folder, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["build.py", *arguments])
    arguments = build.parse_arguments()
    problems = build.make_problems(arguments)
    rows = countdown.load(str(TINY / folder / "countdown.parquet"), None)
    assert {row["problem"] for row in rows} == set(problems)  # the very data this code makes
    traces = build.Traces(problems, arguments)
    for index in range(0, len(traces), len(traces) // 2000):
        prompt, trace = traces[index]
        numbers, target = (prompt.split("numbers ")[1].split(" into")[0],
                           prompt.split("equals ")[1].split(".")[0])
        assert content(map(int, numbers.split(", ")), int(target)) not in problems
        assert countdown.format_reward_function(trace) == 1.0


def test_every_line_of_a_trace_is_true_and_none_comes_twice(monkeypatch):
    """Also with four numbers, where a search undoes two of them."""
    monkeypatch.setattr(sys, "argv", ["build.py", "--numbers", "3", "4"])
    traces = build.Traces({}, build.parse_arguments())
    solved = []
    for prompt, trace in map(traces.__getitem__, range(0, len(traces), len(traces) // 300)):
        numbers, target = re.search(r"numbers ([\d, ]+) into .* equals (\d+)", prompt).groups()
        nums, (thinking, answer) = numbers.split(", "), trace.split("\n</think>\n")
        lines = thinking.split("\n")
        assert len(lines) == len(set(lines))
        for line in lines:
            sums, verdict = line.rsplit(" ", 1)
            used = [target]
            for calculation, result in (sum_.split("=") for sum_ in sums.split(", ")):
                assert countdown.evaluate_expression(calculation) == int(result)
                used += re.split(r"\D", calculation)
            wanted, made = re.findall(r"=(\d+)", line)[-2:]
            assert verdict == ("yes" if wanted == made else "no")
            assert not Counter([*nums, target]) - Counter(used)  # each number is used
        last = countdown.answer_reward_function(trace, list(map(int, nums)), int(target))
        assert last == lines[-1].endswith("yes") and "yes" not in "".join(lines[:-1])
        assert sorted(re.findall(r"\d+", answer)) == sorted(nums)
        solved.append(last)
    assert 0.3 < sum(solved) / len(solved) < 0.9


@pytest.mark.parametrize("numbers", [3, 4])
def test_guesses_are_all_that_can_be_made(numbers):
    stream = random.Random(0)
    for _ in range(100 // numbers ** 2):
        nums = tuple(sorted(stream.randint(1, 30) for _ in range(numbers)))
        guesses = build.guesses(nums, 99)
        assert {made for *_, made in guesses} == values(
            [Fraction(number) for number in nums],
            lambda made: made.denominator == 1 and 0 <= made <= 99)
        for calculations, expression, made in guesses:
            assert countdown.evaluate_expression(expression) == made
            assert calculations[-1].endswith(f"={made}")
            assert sorted(map(int, re.findall(r"\d+", expression))) == list(nums)


def test_guesses_are_true_but_for_slips_and_some_come_again(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["build.py", *LAB_ARGUMENTS])
    traces = build.Traces({}, build.parse_arguments())
    seen = Counter()
    for index in range(0, len(traces), len(traces) // 1000):
        prompt, trace = traces[index]
        practice = index < len(traces) / 2
        numbers, target = re.search(r"numbers ([\d, ]+) into .* equals (\d+)", prompt).groups()
        lines = trace.split("\n</think>\n")[0].split("\n")
        for line in lines:
            sums, verdict = line.rsplit(" ", 1)
            made = sums.rsplit("=", 1)[1]
            assert verdict == ("yes" if made == target else "no")
            for calculation, result in (sum_.split("=") for sum_ in sums.split(", ")):
                true = countdown.evaluate_expression(calculation) == int(result)
                assert true or not practice and calculation in sums.rsplit(", ", 1)[-1]
                seen["wrong"] += not true
                a, b = map(int, re.split(r"\D", calculation))
                seen["turned"] += a < b
            seen["lines"] += not practice
        seen["again"] += len(lines) - len({"".join(sorted(line)) for line in lines})
        solved = countdown.answer_reward_function(trace, list(map(int, numbers.split(", "))),
                                                  int(target))
        seen[f"right, practice {practice}"] += bool(solved)
        assert "yes" not in "".join(lines[:-1])
    assert 0.02 < seen["wrong"] / seen["lines"] < 0.06
    assert 0.02 < seen["again"] / seen["lines"] < 0.08 and seen["turned"]
    assert seen["right, practice True"] > 1.5 * seen["right, practice False"] > 100


@pytest.mark.parametrize("numbers", [3, 4])
def test_what_can_be_reached_is_what_a_whole_search_hits(numbers):
    stream = random.Random(0)
    for _ in range(100 // numbers ** 2):
        nums = tuple(sorted(stream.randint(1, 30) for _ in range(numbers)))
        hit = {target for target in build.TARGETS
               if any(hit for *_, hit in build.tries(nums, target, 99))}
        assert hit == build.reachable(nums, 99) & set(build.TARGETS)


def test_the_tokenizer_gives_every_digit_its_own_token_and_loses_nothing(rows, tokenizer):
    traces = build.Traces({}, argparse.Namespace(
        seed=1, steps=10, batch_size=20, search="backwards", numbers=[3], largest=30,
        largest_result=99, practice=0.5))
    for text in [text for i in range(200) for text in traces[i]] + [
            "Any other text: é 漢字 \n\t", "0123456789"]:
        ids = tokenizer(text)["input_ids"]
        pieces = [tokenizer.decode([token]) for token in ids]
        assert tokenizer.decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=True)
        assert all(len(piece) == 1 for piece in pieces
                   if any(character.isdigit() for character in piece))
    assert all(40 <= len(tokenizer(row["prompt"])["input_ids"]) <= 60 for row in rows[::50])
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert len(tokenizer(tag)["input_ids"]) == 1
    assert tokenizer.eos_token_id != tokenizer.pad_token_id and tokenizer.padding_side == "left"


@pytest.mark.parametrize("folder", ["", "lab"])
def test_the_folder_and_the_model_are_of_the_promised_size(folder):
    files = [TINY / folder / "countdown.parquet", *(TINY / folder / "model").iterdir()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY / folder / "model")
    assert model.config.model_type == "qwen2"
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_800_000


def test_validation_problems_are_in_neither_kind_of_training(rows):
    training, validation = main.load_questions(countdown, None, make_config())
    assert len(validation) >= 256
    problems = [{row["problem"] for row in questions.rows} for questions in (training, validation)]
    assert not problems[0] & problems[1]


def test_a_much_smaller_one_is_built_by_the_same_code_and_trains_a_step(tmp_path):
    arguments = ["--out", str(tmp_path / "toy"), "--problems", "60", "--steps", "3",
                 "--batch-size", "4", "--hidden", "32", "--layers", "1", "--numbers", "3", "4"]
    result = ranks(1, run_script, "tiny/build.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert "at temperature 1: solved" in result.stdout
    assert start([f"model.name={tmp_path / 'toy' / 'model'}",
                  f"data.dataset={tmp_path / 'toy' / 'countdown.parquet'}",
                  "data.num_validation=4", "validation.best_of_n=2", "training.max_steps=1",
                  "training.num_samples_per_step=2", "training.max_new_gen_tokens=20",
                  f"run.dir={tmp_path}", "run.name=a"]) == 0
    entries = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [0, 1, 1]
