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


def content(nums, target):
    return tuple(sorted(nums)), target


@pytest.fixture(scope="module")
def rows():
    return countdown.load(str(TINY / "countdown.parquet"), None)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "model")


def values(numbers: list[Fraction]) -> set[Fraction]:
    """All that can be made of all the numbers,
    by taking any two and putting back what they make."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for a, b in itertools.permutations(range(len(numbers)), 2):
        rest = [number for i, number in enumerate(numbers) if i not in (a, b)]
        x, y = numbers[a], numbers[b]
        for made in [x + y, x - y, x * y] + ([x / y] if y else []):
            found |= values([*rest, made])
    return found


def test_the_problems_are_many_distinct_and_solvable(rows):
    assert len(rows) == len({row["problem"] for row in rows}) >= 20_000
    assert all(len(row["nums"]) == 3 and 1 <= min(row["nums"]) and max(row["nums"]) <= 30
               for row in rows)
    for row in random.Random(0).sample(rows, 300):
        assert row["target"] in values([Fraction(number) for number in row["nums"]])


def test_no_problem_of_the_dataset_is_in_the_supervised_traces_in_any_order(rows, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["build.py"])
    arguments = build.parse_arguments()
    problems = build.make_problems(arguments)
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
def test_what_can_be_reached_is_what_a_whole_search_hits(numbers):
    stream = random.Random(0)
    for _ in range(100 // numbers ** 2):
        nums = tuple(sorted(stream.randint(1, 30) for _ in range(numbers)))
        hit = {target for target in build.TARGETS
               if any(hit for *_, hit in build.tries(nums, target, 99))}
        assert hit == build.reachable(nums, 99) & set(build.TARGETS)


def test_the_tokenizer_gives_every_digit_its_own_token_and_loses_nothing(rows, tokenizer):
    traces = build.Traces({}, argparse.Namespace(seed=1, steps=10, batch_size=20, numbers=[3],
                                                 largest=30, largest_result=99, practice=0.5))
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


def test_the_folder_and_the_model_are_of_the_promised_size():
    assert sum(file.stat().st_size for file in TINY.rglob("*")
               if file.is_file() and "__pycache__" not in file.parts) <= 8_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    assert model.config.model_type == "qwen2"
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_800_000


def test_validation_problems_are_in_neither_kind_of_training(rows):
    training, validation = main.load_questions(countdown, None, make_config(), print)
    assert len(validation) >= 256
    assert not {row["problem"] for row in training} & {row["problem"] for row in validation}


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
