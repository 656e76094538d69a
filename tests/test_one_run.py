"""examples/one_run.py: what its page holds, and what a browser shows of it."""

import json
import random
import shlex

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
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for file, records in (("metrics.jsonl", points), ("samples.jsonl", samples)):
        (path / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_code(folder, main, task="TASK = 1\n"):
    (folder / "main.py").write_text(main)
    (folder / "task.py").write_text(task)


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
    write_code(folders[0], "step()\n")
    write_code(folders[1], f"step()  # {HOSTILE}\n")
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
        for place, groups in own["answers"].items():
            for step, group in zip(own["steps"], groups, strict=True):
                found += [(step, data["prompts"][place][1], data["texts"][text], solved)
                          for text, solved, *_ in group]
        samples = [(sample["step"], sample["prompt"], sample["completion"], sample["solved"])
                   for sample in read_jsonl(folder / "samples.jsonl")]
        assert sorted(found) == sorted(samples)
    text = shown_by_chromium(page, tmp_path)
    assert "<title>h, o</title>" in text and HOSTILE in text
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
    assert flatten(load_config(command[3:])) == expected


def test_a_change_of_the_code_is_told_and_marked_in_the_curves_and_is_no_point(tmp_path):
    folders = [write_run(tmp_path, "plain"), write_run(tmp_path, "changed")]
    change_code(folders[1], 7, "main.py", "task.py")
    page = page_of(*folders)
    data = data_of(page)

    assert data["left_out"] == []
    plain, changed = data["runs"]
    assert plain["code_changes"] == []
    assert changed["code_changes"] == [
        {"step": 7, "spent": 7 * 0.25, "code_changed": "main.py and task.py"}]
    for of_plain, of_changed in zip(plain["curves"], changed["curves"], strict=True):
        assert of_plain["step"] == of_changed["step"] and of_plain.keys() == of_changed.keys()
    text = shown_by_chromium(page, tmp_path)
    assert text.count("(main.py and task.py changed after step 7)") == 1
    first_panel = text.split("<svg")[1].split("</svg>")[0]
    assert first_panel.count(">b: main.py and task.py changed</text>") == 1
    assert first_panel.count('class="changed"') == 1


def test_code_that_differs_is_told_with_its_diff_and_equal_code_is_not(tmp_path):
    old, first, same, other = [
        write_run(tmp_path, name) for name in ("old", "first", "same", "other")]
    lines = [f"line {i}\n" for i in range(20)]
    for folder in (first, same):
        write_code(folder, "".join(lines))
    long = "x" * 999
    main = [*lines[:9], "one\n", f"{long}\n", *lines[10:]]
    write_code(other, "".join(main), task="TASK = 2\n" * 300)
    data = data_of(page_of(old, first, same, other))

    assert data["differs"] == [
        ["main.py", "not known", "20 lines", "as in first", "differs: +2 -1 lines"],
        ["task.py", "not known", "1 lines", "as in first", "differs: +300 -1 lines"]]
    (of_main, name, diff), (of_task, task_name, task_diff) = data["diffs"]
    assert (of_main, name, of_task, task_name) == (3, "main.py", 3, "task.py")
    *shown, long_line, line_10, line_11, line_12 = diff.split("\n")
    assert shown == ["--- first/main.py", "+++ other/main.py", "@@ -7,7 +7,8 @@",
                     " line 6", " line 7", " line 8", "-line 9", "+one"]
    assert long_line.startswith("+xxx") and "700 left out" in long_line
    assert [line_10, line_11, line_12] == [" line 10", " line 11", " line 12"]
    *task_lines, left_out = task_diff.split("\n")
    assert len(task_lines) == 200 and left_out == f"... lines left out: {3 + 301 - 200}"
    data = data_of(page_of(first, same))
    assert data["differs"] == [] and data["diffs"] == []
