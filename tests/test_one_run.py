"""examples/one_run.py: what its page holds, and what a browser shows of it."""

import json
import random
import shlex
from statistics import fmean

import one_run
import pytest
import yaml
from browser import HOSTILE, data_of, shown_by_chromium
from conftest import make_config, read_jsonl

from machinery.settings import flatten, load_config


def write_run(folder, name, text="because", **keys):
    """A folder as a run of Countdown leaves it after twelve steps on two ranks. Numbers and answers
    are made up. The answers begin with `text`."""
    stream, path = random.Random(name), folder / name
    config = make_config(run__name=name, **keys).model_dump(mode="json")
    points, samples = [], []
    for step in range(13):
        if step > 0:
            points.append({"step": step, "reward": stream.random(), "seconds/learn": 0.25})
        if step % 4 == 0:
            solved = stream.random()
            points.append({"step": step, "eval/solved": solved, "eval/solved_low": solved - 0.1,
                           "eval/solved_high": solved + 0.1})
            for i in range(6):
                right = float(stream.random() < 0.5)
                samples.append({
                    "step": step, "question": i // 2, "prompt": f"What is {i // 2} and one?",
                    "completion": f"{text} {i}", "solved": right, "reward": right + 0.1,
                    "reward_parts": {"format": 1.0, "answer": right}, "truncated": i == 5,
                    "completion_length": i + 1})
    checkpoint = path / "checkpoints" / "step-000012"
    checkpoint.mkdir(parents=True)
    experiment = {"training.num_samples_per_step": 16}  # by two ranks
    (checkpoint / "state.json").write_text(json.dumps({"experiment": experiment}))
    (path / "main.py").write_text("step()\n")
    (path / "task.py").write_text("TASK = 1\n")
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for file, records in (("metrics.jsonl", points), ("samples.jsonl", samples)):
        (path / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def change_code(folder, step, *names):
    """As if the run had been resumed after that step, with other code in these files."""
    records = read_jsonl(folder / "metrics.jsonl")
    place = sum(record["step"] <= step for record in records)
    records.insert(place, {"step": step, "code_changed": names})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def page_of(*folders):
    page = folders[0].parent / "page.html"
    assert one_run.main([*map(str, folders), "--out", str(page)]) == 0
    return page


def test_the_page_shows_what_is_in_the_files_and_whatever_runs_have_written_is_text(tmp_path):
    folders = [write_run(tmp_path, "h", HOSTILE, data__dataset=HOSTILE), write_run(tmp_path, "o")]
    (folders[1] / "main.py").write_text(f"step()  # {HOSTILE}\n")
    change_code(folders[1], 8, HOSTILE)
    page = page_of(*folders)
    data = data_of(page)

    assert data["left_out"] == [] and len(data["prompts"]) == 3
    ends = []
    for folder, own in zip(folders, data["runs"], strict=True):
        points = [point for point in read_jsonl(folder / "metrics.jsonl") if "eval/solved" in point]
        solved = [point["eval/solved"] for point in points]
        assert own["curves"][1]["solved"] == pytest.approx(solved, rel=1e-5)
        low, high = points[-1]["eval/solved_low"], points[-1]["eval/solved_high"]
        ends.append(f"{solved[-1]:.3f} ({low:.3f}–{high:.3f}) at step 12")
        found = []
        for prompt, groups in zip(data["prompts"], own["answers"], strict=True):
            for step, group in zip(own["steps"], groups, strict=True):
                found += [(step, prompt, text, solved) for solved, _, text in group]
        samples = [(sample["step"], sample["prompt"], sample["completion"], sample["solved"])
                   for sample in read_jsonl(folder / "samples.jsonl")]
        assert sorted(found) == sorted(samples)
        last = [sample for sample in read_jsonl(folder / "samples.jsonl") if sample["step"] == 12]
        for name, solved in (("right", 1.0), ("other", 0.0)):
            lengths = [each["completion_length"] for each in last if each["solved"] == solved]
            mean = pytest.approx(fmean(lengths), rel=1e-5) if lengths else None
            assert own["curves"][2][f"length of {name} answers"][-1] == mean
    text = shown_by_chromium(page, tmp_path)
    assert "<title>h, o</title>" in text and f"{HOSTILE} 0</pre>" in text
    assert all(end in text for end in ends)
    assert "-step()\n+step()  # " + HOSTILE.splitlines()[0] in text


def test_the_settings_that_differ_are_told_and_the_command_makes_the_same_run(tmp_path):
    keys = {"training__learning_rate": 1e-7, "training__k_best_of_n": [2, 8],
            "training__learning_type": "sil", "data__dataset": "my data.jsonl",
            "task__reward_weights": {"answer": 1.0, "format": 0.5}, "data__max_rows": 60}
    data = data_of(page_of(write_run(tmp_path, "a"), write_run(tmp_path, "2024", **keys)))

    differs = {key: values for key, *values in data["differs"]}
    assert differs.keys() == {key.replace("__", ".") for key in keys}
    assert differs["training.learning_rate"] == ["3e-05", "1e-07"]
    command = shlex.split(data["runs"][1]["command"])
    assert command[:3] == ["torchrun", "--nproc-per-node=2", "main.py"]
    expected = flatten(make_config(run__name="2024", **keys))
    assert flatten(load_config([*command[3:], "run.name='2024'"])) == expected


def test_code_that_differs_and_code_that_changed_during_a_run_are_told(tmp_path):
    first, same, other = (write_run(tmp_path, name) for name in ("first", "same", "other"))
    (other / "main.py").write_text("".join(f"line {i}\n" for i in range(300)))
    change_code(other, 7, "main.py", "task.py")
    page = page_of(first, same, other)
    data = data_of(page)

    [(number, name, diff)] = data["diffs"]
    assert (number, name) == (2, "main.py")
    lines = diff.split("\n")
    assert lines[:5] == ["--- first/main.py", "+++ other/main.py", "@@ -1 +1,300 @@", "-step()",
                         "+line 0"]
    assert len(lines) == 201 and lines[-1] == f"... {3 + 301 - 200} more lines"
    assert [run["code_changes"] for run in data["runs"]] == [
        [], [], [{"step": 7, "spent": 7 * 0.25, "code_changed": "main.py and task.py"}]]
    for curve, of_changed in zip(data["runs"][0]["curves"], data["runs"][2]["curves"]):
        assert curve["step"] == of_changed["step"] and curve.keys() == of_changed.keys()
    text = shown_by_chromium(page, tmp_path)
    assert text.count("(main.py and task.py changed after step 7)") == 1
    first_panel = text.split("<svg")[1].split("</svg>")[0]
    assert first_panel.count("c: main.py and task.py changed") == 1


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    assert one_run.main([str(tmp_path)]) == 2

    assert capsys.readouterr().err.count("\n") == 1


def test_answers_that_are_too_many_are_left_out_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(one_run, "MOST_CHARACTERS", 100)
    monkeypatch.setattr(one_run, "MOST_EVALUATIONS", 2)

    data = data_of(page_of(write_run(tmp_path, "a")))

    assert data["left_out"] == ["the answers of 2 evaluations of a",
                                "the answers to 1 of 3 questions"]
    assert data["runs"][0]["steps"] == [0, 12]
    assert data["prompts"] == ["What is 0 and one?", "What is 2 and one?"]
    assert data["labels"] == ["0", "2"]
