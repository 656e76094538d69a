"""What lies in tiny/ and tiny/lab/ is what build.py makes, and what their cards say."""

import random
import re
import sys
from collections import Counter

import pytest
from conftest import SMALL, read_jsonl, start
from processes import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from tiny import build

# The arguments that stand in the first lines of build.py.
ARGUMENTS = {"tiny": [],
             "tiny/lab": re.search(r"--out tiny/lab .*", build.__doc__)[0].split(),
             "four numbers": ["--numbers", "3", "4"]}


@pytest.fixture
def arguments_of(monkeypatch):
    def parse(name: str):
        monkeypatch.setattr(sys, "argv", ["build.py", *ARGUMENTS[name]])
        return build.parse_arguments()

    return parse


def sample_of(traces, count: int) -> list[tuple]:
    """From all along the traces: the index, the problem and the trace as (nums, target, text)."""
    found = []
    for index in range(0, len(traces), len(traces) // count):
        prompt, text = traces[index]
        numbers, target = re.search(r"numbers ([\d, ]+) into .* equals (\d+)", prompt).groups()
        found.append((index, [int(number) for number in numbers.split(", ")], int(target), text))
    return found


def lines_of(text: str) -> list[tuple[list, str]]:
    """The thinking of a trace: the calculations of each line, with their results, and its yes or
    no."""
    found = []
    for line in text.split("\n</think>\n")[0].split("\n"):
        sums, verdict = line.rsplit(" ", 1)
        found.append(([calculation.split("=") for calculation in sums.split(", ")], verdict))
    return found


@pytest.mark.parametrize("folder", ["tiny", "tiny/lab"])
def test_the_data_is_what_build_makes_and_no_trace_has_one_of_its_problems(folder, arguments_of):
    arguments = arguments_of(folder)
    arguments.problems = 2000  # Making all of them would take ten seconds.
    made = build.make_problems(arguments)

    rows = countdown.load(str(ROOT / folder / "countdown.parquet"), None)
    problems = {row["problem"]: row["nums"] for row in rows}
    assert len(rows) == len(problems) == 24_000
    assert [(key, list(nums)) for key, nums in made.items()] == list(problems.items())[:2000]
    traces = build.Traces(problems, arguments)
    for index, nums, target, text in sample_of(traces, 1000):
        assert (tuple(sorted(nums)), target) not in problems
        assert countdown.format_reward_function(text) == 1.0
    assert traces[index][1] == text  # The same again, whatever came before.


@pytest.mark.parametrize("folder", ["tiny", "tiny/lab"])
def test_the_problems_are_solvable(folder):
    rows = countdown.load(str(ROOT / folder / "countdown.parquet"), None)

    for row in random.Random(0).sample(rows, 300):
        guesses = build.guesses(tuple(sorted(row["nums"])), 99)
        solutions = [expression for _, expression, made in guesses if made == row["target"]]
        trace = f"</think><answer>{solutions[0]}</answer>"
        assert countdown.reward_function(trace, row)["answer"] == 1.0


@pytest.mark.parametrize("name", ["tiny/lab", "four numbers"])
def test_traces_calculate_rightly_but_for_the_slips_of_the_lab_and_end_once_they_have_it(
        name, arguments_of):
    traces = build.Traces({}, arguments_of(name))
    seen = Counter()
    for _, nums, target, text in sample_of(traces, 1000):
        lines = lines_of(text)
        for calculations, verdict in lines:
            for calculation, result in calculations:
                seen["slips"] += countdown.evaluate_expression(calculation) != int(result)
            results = [int(result) for _, result in calculations]
            wanted = target if name == "tiny/lab" else results[-2]
            assert verdict == ("yes" if results[-1] == wanted else "no")
        assert "yes" not in [verdict for _, verdict in lines[:-1]]
        seen["lines"] += len(lines)
        seen["again"] += len(lines) - len({str(line) for line in lines})
        seen["right"] += countdown.answer_reward_function(text, nums, target) == 1.0
    assert 300 < seen["right"] < 900
    if name == "tiny/lab":
        assert 0.01 < seen["slips"] / seen["lines"] < 0.06 and seen["again"] > 0
    else:
        assert seen["slips"] == seen["again"] == 0


@pytest.mark.parametrize("folder", ["tiny", "tiny/lab"])
def test_the_models_are_small_and_their_tokenizers_give_every_digit_a_token(folder, arguments_of):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / folder / "model")
    model = AutoModelForCausalLM.from_pretrained(ROOT / folder / "model")
    traces = build.Traces({}, arguments_of(folder))
    texts = ["Any other text: é 漢字 \n\t", "0123456789"]
    for i in range(100):
        texts += traces[i]

    for text in texts:
        ids = tokenizer(text)["input_ids"]
        pieces = [tokenizer.decode([token]) for token in ids]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert all(len(piece) == 1 for piece in pieces if re.search(r"\d", piece))
    assert len(tokenizer("<think></think><answer></answer>")["input_ids"]) == 4
    assert model.config.model_type == "qwen2" and model.num_parameters() < 1_800_000


def test_a_much_smaller_one_is_built_by_the_same_code_and_trains_a_step(
        tmp_path, monkeypatch, capsys):
    toy = tmp_path / "toy"
    monkeypatch.setattr(sys, "argv", ["build.py", "--out", str(toy), "--problems", "60", "--steps",
                                      "3", "--batch-size", "4", "--hidden", "32", "--layers", "1"])

    build.main()
    code = start([*SMALL, f"model.name={toy / 'model'}", "training.max_steps=1",
                  f"data.dataset={toy / 'countdown.parquet'}", f"run.dir={tmp_path}"])

    assert "at temperature 1: solved" in capsys.readouterr().out
    assert code == 0 and len(read_jsonl(tmp_path / "a" / "metrics.jsonl")) == 3
