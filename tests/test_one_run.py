"""examples/one_run.py: what its page holds, against plain loops over the files of the runs."""

import json
import random
import shlex
import shutil
import sys
from statistics import fmean

import one_run
import pytest
import yaml
from browser import HOSTILE, Browser, data_of
from conftest import make_config, read_jsonl
from processes import ROOT, run

from machinery.settings import flatten, load_config

N = 3  # answers to each question


def write_run(folder, name="a", text="because", kinds=9, questions=5, steps=12, every=4, **keys):
    """A folder as a run of Countdown leaves it, of made-up numbers. The answers are `text` and one
    of so many kinds of endings."""
    stream, path = random.Random(name), folder / name
    config = make_config(run__name=name, validation__every=every, **keys).model_dump(mode="json")
    points, samples = [], []
    for step in range(steps + 1):
        if step > 0:
            points.append({
                "step": step, "reward": stream.random(), "solved": stream.random(),
                "reward/answer": stream.random(), "learned": step,
                "seconds/sample": 1.5, "seconds/learn": 0.25})
        if step % every == 0:
            solved = stream.random()
            points.append({"step": step, "eval/solved": solved, "eval/solved_low": solved - 0.1,
                           "eval/solved_high": solved + 0.1, "eval/best_of_n": stream.random()})
            for i in range(questions * N):
                right = float(stream.random() < (step + 1) / (steps + 2))
                samples.append({
                    "step": step, "question": i // N, "prompt": f"What is {i // N} and one?",
                    "completion": f"{text} {stream.randrange(kinds)}", "solved": right,
                    "reward": right + 0.1, "reward_parts": {"format": 1.0, "answer": right},
                    "truncated": stream.random() < 0.2,
                    "completion_length": stream.randrange(1, 99)})
    checkpoint = path / "checkpoints" / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    experiment = {"training.num_samples_per_step": 16}  # by two ranks
    (checkpoint / "state.json").write_text(json.dumps({"experiment": experiment}))
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for file, records in (("metrics.jsonl", points), ("samples.jsonl", samples)):
        (path / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def page_of(*folders) -> str:
    html = one_run.page([one_run.read_run(folder) for folder in folders])
    assert len(html.encode()) <= 2_000_000
    return html


def near(number):
    return pytest.approx(number, rel=1e-5)


def test_the_curves_are_those_of_the_files(tmp_path):
    folder = write_run(tmp_path)
    training, evaluations, _ = data_of(page_of(folder))["runs"][0]["curves"]

    points = read_jsonl(folder / "metrics.jsonl")
    steps = [point for point in points if "reward" in point]
    evaluated = [point for point in points if "eval/solved" in point]
    for name in steps[0]:
        assert training[name] == near([point[name] for point in steps])
    assert training["spent"] == near([1.75 * step for step in range(1, 13)])
    for name in ("solved", "solved_low", "solved_high", "best_of_n"):
        assert evaluations[name] == near([point[f"eval/{name}"] for point in evaluated])
    assert evaluations["step"] == [0, 4, 8, 12]
    assert evaluations["spent"] == near([0, 7, 14, 21])


def test_lengths_and_distinct_answers_are_what_plain_loops_find(tmp_path):
    folder = write_run(tmp_path, questions=40)
    curve = data_of(page_of(folder))["runs"][0]["curves"][2]

    samples = read_jsonl(folder / "samples.jsonl")
    assert curve["step"] == [0, 4, 8, 12]
    for place, step in enumerate(curve["step"]):
        lengths, distinct = {0.0: [], 1.0: []}, {}
        for sample in samples:
            if sample["step"] == step:
                lengths[sample["solved"]].append(sample["completion_length"])
                distinct.setdefault(sample["question"], set()).add(sample["completion"])
        assert curve["length of right answers"][place] == near(fmean(lengths[1.0]))
        assert curve["length of wrong answers"][place] == near(fmean(lengths[0.0]))
        shares = [len(texts) / N for texts in distinct.values()]
        name = "distinct answers to a question, as a share"
        assert curve[name][place] == near(fmean(shares))


def test_what_becomes_of_questions_is_what_plain_loops_find(tmp_path):
    folder = write_run(tmp_path, questions=40)
    curve = data_of(page_of(folder))["runs"][0]["curves"][2]

    shares = {}  # of right answers, for each step and question
    for sample in read_jsonl(folder / "samples.jsonl"):
        place = sample["step"], sample["question"]
        shares[place] = shares.get(place, 0) + sample["solved"] / N
    for place, step in enumerate([0, 4, 8, 12]):
        began, became = {"none": [], "some": [], "all": []}, {"right": 0, "wrong": 0}
        for question in range(40):
            first, now = shares[0, question], shares[step, question]
            word = "none" if first < 0.01 else "all" if first > 0.99 else "some"
            began[word].append(now)
            if step > 0:
                before = shares[step - 4, question]
                became["right"] += before < 0.5 <= now
                became["wrong"] += now < 0.5 <= before
        for word, own in began.items():
            expected = near(fmean(own)) if own else None
            assert curve[f"solved, of questions that began with {word} right"][place] == expected
        for word, count in became.items():
            expected = near(count / 40) if step > 0 else None
            assert curve[f"became {word} since the evaluation before"][place] == expected


def test_every_answer_is_that_of_the_file_whatever_is_in_it(tmp_path):
    folders = [write_run(tmp_path), write_run(tmp_path, "b", HOSTILE, questions=7)]
    data = data_of(page_of(*folders))

    assert data["left_out"] == [] and len(data["prompts"]) == 7
    assert [label for label, _ in data["prompts"].values()] == list("0123456")
    for folder, own in zip(folders, data["runs"]):
        assert own["steps"] == [0, 4, 8, 12] and own["parts"] == ["format", "answer"]
        expected = {}
        for sample in read_jsonl(folder / "samples.jsonl"):
            expected.setdefault((sample["step"], sample["prompt"]), []).append([
                sample["completion"], sample["solved"], near(sample["reward"]),
                list(sample["reward_parts"].values()), int(sample["truncated"]),
                sample["completion_length"]])
        found = {}
        for place, groups in own["answers"].items():
            for step, group, share in zip(own["steps"], groups, own["shares"][place]):
                answers = [[data["texts"][text], *more] for text, *more in group]
                found[step, data["prompts"][place][1]] = answers
                assert share == near(fmean(answer[1] for answer in answers))
        assert found == expected


def test_the_settings_that_differ_are_told_and_the_command_makes_the_same_run(tmp_path):
    keys = {"training__learning_rate": 1e-7, "training__k_best_of_n": [2, 8],
            "training__learning_type": "sil", "data__dataset": "my data.jsonl",
            "task__reward_weights": {"answer": 1.0, "format": 0.5}, "data__max_rows": 60}
    folders = [write_run(tmp_path), write_run(tmp_path, "2024", **keys)]
    data = data_of(page_of(*folders))

    differs = {key: values for key, *values in data["differs"]}
    assert differs.keys() == {key.replace("__", ".") for key in keys}
    assert differs["training.learning_rate"] == ["3e-05", "1e-07"]
    command = shlex.split(data["runs"][1]["command"])
    assert command[:3] == ["torchrun", "--nproc-per-node=2", "main.py"]
    expected = flatten(make_config(run__name="2024", validation__every=4, **keys))
    assert flatten(load_config(command[3:])) == expected


def test_a_run_that_is_being_written_or_has_just_begun_is_shown_as_far_as_it_goes(tmp_path):
    folder = write_run(tmp_path)
    whole = data_of(page_of(folder))["runs"][0]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "reward": NaN, "moved": 1}\n{"step": 1e999}\n[1]\n{"step": 1, "')
    with open(folder / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 16}\n\xff\xfe\n{"step": 16, "question": 0, "prompt": "Wh')

    data = data_of(page_of(folder))
    assert data["left_out"] == ["6 damaged or older lines of a"]
    assert data["runs"][0]["curves"][0]["reward"] == [*whole["curves"][0]["reward"], None]
    assert data["runs"][0]["answers"] == whole["answers"]

    for name in ("metrics.jsonl", "samples.jsonl", "checkpoints/step-000012/state.json"):
        (folder / name).unlink()
    begun = data_of(page_of(folder))["runs"][0]
    assert begun["curves"] == [{}, {}, {}] and begun["answers"] == {}
    assert begun["command"].startswith("torchrun --nproc-per-node=RANKS main.py")


def test_however_much_a_run_keeps_the_page_stays_small_and_says_what_it_lacks(tmp_path):
    folder = write_run(tmp_path, text="x" * 3000, kinds=10**9, questions=60, steps=1000, every=40)
    data = data_of(page_of(folder))

    said = " ".join(data["left_out"])
    assert "of 60 questions' answers" in said and "evaluations' answers" in said
    assert all("left out" in text for text in data["texts"])
    (own,) = data["runs"]
    assert (own["steps"][0], own["steps"][-1]) == (0, 1000)
    assert set(own["answers"]) == set(data["prompts"]) and len(own["shares"]) == 60
    assert own["curves"][1]["step"] == list(range(0, 1001, 40))


def test_a_folder_that_is_no_run_is_one_line_and_exit_code_two(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("[")
    for wrong in (tmp_path, tmp_path / "none"):
        assert one_run.main([str(wrong), "--out", str(tmp_path / "x.html")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {wrong / 'config.yaml'} is not there")
        assert said.count("\n") == 1

    assert one_run.main([str(write_run(tmp_path)), "--out", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_it_starts_without_pytorch(tmp_path):
    write_run(tmp_path)
    code = ("import runpy, sys; sys.argv = [sys.argv[1], 'a']\n"
            "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "finally: assert not {'torch', 'transformers', 'main'} & set(sys.modules)")
    said = run(sys.executable, "-c", code, ROOT / "examples" / "one_run.py", cwd=tmp_path)

    assert said.returncode == 0 and (tmp_path / "one_run.html").exists(), said.stderr


@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no Chromium and its driver here")
def test_the_page_opens_without_a_message_and_whatever_runs_have_written_is_text(tmp_path):
    hostile = write_run(tmp_path, "h", HOSTILE, data__dataset=HOSTILE)
    metrics = hostile / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("learned", "<img src=x>"))
    folders = [hostile, write_run(tmp_path, "o")]
    page = tmp_path / "page.html"
    page.write_text(page_of(*folders))

    with Browser() as browser:
        browser.open(page)

        assert browser.messages() == [] and browser.requests() == [page.as_uri()]
        assert browser.run("return document.title") == "h, o"
        assert browser.run("return document.images.length + document.scripts.length") == 2
        assert HOSTILE in browser.texts("#sides .answer pre")[0]
        rows = browser.texts("#differs tr")
    for folder in folders:
        last = read_jsonl(folder / "metrics.jsonl")[-1]
        low, value, high = [last[f"eval/solved{end}"] for end in ("_low", "", "_high")]
        assert f"{value:.3f} ({low:.3f}–{high:.3f}) at step 12" in rows[-2]
