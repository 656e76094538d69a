"""The data in tiny/ and tiny/lab/ are what build.py makes, and it makes models that can learn."""

import re
import sys

import pytest
from conftest import SMALL, read_jsonl, start
from processes import ROOT

import countdown
from tiny import build


def arguments_of(folder: str, monkeypatch):
    """Those in the first lines of build.py. For tiny/ there are none."""
    words = re.search(r"--out tiny/lab .*", build.__doc__)[0].split()
    monkeypatch.setattr(sys, "argv", ["build.py", *(words if folder == "tiny/lab" else [])])
    return build.parse_arguments()


@pytest.mark.parametrize("folder", ["tiny", "tiny/lab"])
def test_the_data_is_what_build_makes_and_no_trace_has_one_of_its_problems(folder, monkeypatch):
    arguments = arguments_of(folder, monkeypatch)
    arguments.problems = 2000  # Making all of them would take ten seconds.
    made = build.make_problems(arguments)

    rows = countdown.load(str(ROOT / folder / "countdown.parquet"), None)
    problems = {row["problem"]: row["nums"] for row in rows}
    assert len(rows) == len(problems) == 24_000
    assert [(key, list(nums)) for key, nums in made.items()] == list(problems.items())[:2000]
    traces = build.Traces(problems, arguments)
    for index in range(0, len(traces), len(traces) // 500):
        prompt, text = traces[index]
        numbers, target = re.search(r"numbers ([\d, ]+) into .* equals (\d+)", prompt).groups()
        nums = sorted(int(number) for number in numbers.split(", "))
        assert (tuple(nums), int(target)) not in problems
        assert countdown.format_reward_function(text) == 1.0
    assert traces[index][1] == text  # The same again, whatever came before.


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
