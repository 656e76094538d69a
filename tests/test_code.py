"""A run knows its code and its data: whatever has not made it is never trained into it, and nothing
is reported from it."""

import json
import linecache
import os
import py_compile
import shutil
import subprocess
import sys
from copy import copy
from dataclasses import replace
from datetime import date
from decimal import Decimal

import numpy
import pytest
from conftest import SMALL, make_config, read_jsonl, run_without_curves, start
from processes import ROOT, ranks

import main
from machinery import keep_source, tasks
from machinery.code import MAIN, TASK, code_of, digest_of, meaning
from machinery.errors import UserError
from machinery.metrics import evaluation_metrics
from machinery.ranks import RANK
from machinery.runs import step_of
from machinery.settings import load_config
from machinery.tasks import split

TINY = [*SMALL, "training.max_new_gen_tokens=16"]
ONE_STEP = "training.max_steps=1"
EDIT = "\nEDITED = 1\n"


def edited(addition: str, name: str = MAIN):
    """In place of `code_of`, as if the file said this too."""
    def code_of_edited(function, config):
        code = code_of(function, config)
        texts = {**code.texts, name: code.texts[name] + addition}
        return replace(code, texts=texts)
    return code_of_edited


def say(capsys) -> str:
    """What was printed, in one line."""
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


# ---------------------------------------------------------------- what counts as code

@pytest.mark.parametrize(("name", "text", "same"), [
    (MAIN, "def f():\n    'Says.'\n    return 1  # Why?\n", True),
    (MAIN, "def f():\n\n    return (1)\n", True),
    (MAIN, "def f():\n    return 2\n", False),
    (TASK, "def f():\n    return 1  # Why?\n", True),
    (TASK, "def f():\n    'Says.'\n    return 1\n", False)])  # It may be a prompt.
def test_comments_and_line_breaks_are_no_code_and_a_docstring_only_in_a_task(name, text, same):
    assert (meaning(name, "def f():\n    return 1\n") == meaning(name, text)) == same


def test_a_digest_is_never_read_as_a_number():
    for number in range(30):
        text = load_config([f"run.code={digest_of({MAIN: f'x = {number}'})}"]).run.code
        assert text == digest_of({MAIN: f"x = {number}"})


EDITED_WHILE_IT_STARTS = """
import sys
sys.path.insert(0, sys.argv[1])
import machinery
from pathlib import Path
Path(__file__).write_text("# edited")
import inspect
def answer(): return 42
print(inspect.getsource(answer))
"""


def test_the_source_is_what_python_has_read_and_no_later_edit(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(EDITED_WHILE_IT_STARTS)

    said = subprocess.run([sys.executable, str(script), str(ROOT)], check=True, text=True,
                          stdout=subprocess.PIPE).stdout

    assert "def answer(): return 42" in said
    assert script.read_text() == "# edited"


def test_code_is_what_runs_also_under_another_name(tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text((ROOT / "main.py").read_text() + EDIT)
    module = tasks.import_task(str(mine))
    text = mine.read_text()
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    keep_source(str(mine))  # As when main.py imports machinery.

    mine.write_text("x = 1\n")  # Edited while the imports take their time.

    assert code_of(module.main, make_config()).texts[MAIN] == text


# ---------------------------------------------------------------- edited code

def test_the_same_command_with_edited_code_is_a_new_run_that_names_the_old_one(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    command = [*TINY, ONE_STEP, "run.name=null", f"run.dir={tmp_path}"]
    assert start(command) == 0
    [old] = tmp_path.iterdir()
    assert "the same settings" not in say(capsys)
    monkeypatch.setattr(main, "code_of", edited("# Why?\n"))
    assert start(command) == 0
    assert "this run has finished" in say(capsys)

    monkeypatch.setattr(main, "code_of", edited(EDIT))
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(variable, "1")
        assert start([*command, "training.max_steps=2"]) == 2
        assert f"automatic restart, but it would begin a new run: {old}, at step 1" in say(capsys)
        monkeypatch.setenv(variable, "0")
    assert start(command) == 0

    said = say(capsys)
    [new] = set(tmp_path.iterdir()) - {old}
    digest = new.name.rpartition("-")[2]
    assert said.count(f"{old}, at step 1, has the same settings and a different main.py") == 2
    assert said.count(f"one_run.py {new} {old} ") == 2
    assert f"To continue that run instead, add run.name={old.name} run.code={digest}" in said
    assert [entry["step"] for entry in read_jsonl(new / "metrics.jsonl")] == [0, 1, 1]
    # Once the old one has continued with this code, its own command would begin at step 0 again.
    shutil.rmtree(new)
    assert start([*command, f"run.name={old.name}", f"run.code={digest}", ONE_STEP]) == 0
    assert EDIT not in (old / MAIN).read_text()  # Nothing was trained with it.
    assert start([*command, f"run.name={old.name}", f"run.code={digest}",
                  "training.max_steps=2"]) == 0
    say(capsys)
    assert start(command) == 0
    said = say(capsys)
    assert f"{old}, at step 2, has the same settings and the same code" in said
    assert f"To continue that run instead, add run.name={old.name} " in said
    assert "run.code=" not in said
    assert EDIT in (new / MAIN).read_text()


def test_an_edit_that_leaves_the_gradient_as_it_was_is_said_in_step_1(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    command = [*SMALL, ONE_STEP, "training.seed=3", "training.max_new_gen_tokens=80",
               "training.num_samples_per_step=4", "training.k_best_of_n=[8,8]",
               f"run.dir={tmp_path}"]
    same = f"grad_norm equals {tmp_path / 'a'}'s to six digits, so the edit hasn't changed"
    assert start(command) == 0
    assert same not in say(capsys)
    for code, is_said in ((edited("# Why?\n"), False), (edited(EDIT), True)):
        monkeypatch.setattr(main, "code_of", code)
        assert start([*command, "run.name=b"]) == 0
        assert (same in say(capsys)) == is_said
        shutil.rmtree(tmp_path / "b")
    metrics = tmp_path / "a" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"grad_norm": ', '"grad_norm": 1'))
    assert start([*command, "run.name=b"]) == 0
    assert same not in say(capsys)


@pytest.mark.parametrize(("name", "path"), [
    (MAIN, ROOT / "main.py"), (TASK, ROOT / "countdown.py")])
def test_a_named_run_that_other_code_has_made_continues_only_with_the_code_that_is_accepted(
        name, path, tmp_path, capsys, monkeypatch):
    command = [*TINY, f"run.dir={tmp_path}"]
    folder = tmp_path / "a"
    assert start([*command, ONE_STEP]) == 0
    before = (folder / "metrics.jsonl").read_text()
    monkeypatch.setattr(main, "code_of", edited(EDIT, name))
    digest = digest_of(main.code_of(main.main, make_config()).texts)
    # As if a start that was accepted had been killed before its first checkpoint.
    (folder / name).write_text("newer")
    capsys.readouterr()

    for more in ([], ["run.code=c0000000"]):
        assert start([*command, *more]) == 2

        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {folder} was made with a different {name}, up to step 1.")
        assert f"diff {folder / name} {path}." in line and f"run.code={digest}" in line
        assert (folder / name).read_text() == path.read_text()
        assert (folder / "metrics.jsonl").read_text() == before

    assert start([*command, f"run.code={digest}", "training.max_steps=2"]) == 0
    assert f"from here on, it runs a different {name}" in say(capsys)
    assert EDIT in (folder / name).read_text()
    assert start(command) == 0  # From now on this is the code of the run.

    records = read_jsonl(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 1, 1, 2, 2, 3, 3]
    assert [record for record in records if "code_changed" in record] == [
        {"step": 1, "code_changed": [name]}]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["first"]["step"] == 0 and summary["last"]["step"] == 3


def test_a_run_says_that_the_machinery_has_changed_and_goes_on(tmp_path, capsys, monkeypatch):
    command = [*TINY, f"run.dir={tmp_path}"]
    assert start([*command, ONE_STEP]) == 0
    other = replace(code_of(main.main, make_config()), trainer="c0000000")
    monkeypatch.setattr(main, "code_of", lambda function, config: other)
    assert start([*command, ONE_STEP]) == 0  # It has finished, so nothing runs with this code.

    for max_steps, is_said in ((2, True), (3, False)):
        capsys.readouterr()
        assert start([*command, f"training.max_steps={max_steps}"]) == 0
        assert ("it runs a different trainer (machinery/ or logger.py)" in say(capsys)) == is_said

    records = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert [record["step"] for record in records if "code_changed" in record] == [1]


def test_the_trainer_is_logger_py_and_every_file_of_machinery(tmp_path, monkeypatch):
    (tmp_path / "machinery").mkdir()
    monkeypatch.setattr("machinery.code.ROOT", tmp_path)
    digests = set()
    for name in ("logger.py", "machinery/a.py", "machinery/b.py", "machinery/a.py"):
        (tmp_path / "logger.py").touch()
        (tmp_path / name).write_text(f"x = {len(digests)}")
        digests.add(code_of(main.main, make_config()).trainer)
    assert len(digests) == 4


def test_a_task_that_runs_is_the_text_that_is_kept(tmp_path):
    """Python would take an older version from its cache: it has the same size and time."""
    path = tmp_path / "mine.py"
    for answer in "12":
        path.write_text(f"ANSWER = {answer}")
        os.utime(path, (1, 1))
        py_compile.compile(str(path))
        path.write_text(f"ANSWER = {int(answer) + 2}")
        os.utime(path, (1, 1))
        assert tasks.import_task(str(path)).ANSWER == int(answer) + 2


@pytest.mark.parametrize("text", [b"x = (", b"return 1", "x = 'é'".encode("latin-1")])
def test_a_task_that_is_not_python_is_named_by_its_path(text, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_bytes(text)

    assert start([*TINY, f"run.dir={tmp_path}", f"task.name={path}"]) == 2

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: task.name='{path}' cannot be read as Python")


def run_with_code_of_its_own(folder: str):
    if RANK == 1:
        main.code_of = edited(EDIT)
    run_without_curves(*TINY, f"run.dir={folder}")


def test_ranks_with_different_code_are_refused(tmp_path):
    result = ranks(2, run_with_code_of_its_own, str(tmp_path))

    assert result.codes == [2, 2]
    assert "error: the ranks run different code: make sure that main.py" in result.stderr
    assert not (tmp_path / "a").exists()


def run_with_settings_of_its_own(folder: str):
    """A model may be in another place on each machine, so its name may differ."""
    own = []
    if RANK == 1:
        own = ["sampling.temperature=0.5", f"model.name={ROOT / 'tiny' / 'model'}"]
    run_without_curves(*TINY, f"run.dir={folder}", *own)


def test_ranks_with_different_settings_are_refused(tmp_path):
    result = ranks(2, run_with_settings_of_its_own, str(tmp_path))

    assert result.codes == [2, 2]
    assert "error: the ranks have different settings (sampling.temperature)" in result.stderr
    assert not (tmp_path / "a").exists()


# ---------------------------------------------------------------- older checkpoints

def change_state(folder, change) -> None:
    for path in folder.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        change(state["experiment"])
        path.write_text(json.dumps(state))


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path, capsys):
    command = [*TINY, ONE_STEP, f"run.dir={tmp_path}"]
    assert start(command) == 0

    change_state(tmp_path / "a", lambda experiment: experiment.update(version=2))

    assert start(command) == 2
    assert "belongs to a different experiment (version of this trainer: 2 -> " in say(capsys)
    assert start([*command, "run.name=b"]) == 0
    said = say(capsys)
    assert "has the same settings and a different version of this trainer" in said
    assert "To continue that run" not in said


# ---------------------------------------------------------------- data

def write_rows(path, numbers, target=10):
    lines = [json.dumps({"nums": [number, 7, 3], "target": target}) for number in numbers]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize(("numbers", "target", "says"), [
    (range(2, 60), 10, "questions to train on: 34 -> 52; their digest: "),
    (range(3, 43), 10, "belongs to a different experiment (their digest: "),
    (range(2, 42), 11, "belongs to a different experiment (their digest: "),
    (reversed(range(2, 42)), 10, None)])  # The order in the file means nothing.
def test_a_run_resumes_with_the_questions_it_was_trained_with_or_not_at_all(
        numbers, target, says, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    command = [*TINY, f"run.dir={tmp_path}", f"data.dataset={data}"]
    write_rows(data, range(2, 42))
    assert start([*command, ONE_STEP]) == 0
    write_rows(data, numbers, target)
    before = (tmp_path / "a" / "metrics.jsonl").read_text()
    capsys.readouterr()

    code = start(command)

    said = say(capsys)
    assert code == (2 if says else 0) and (says or "resuming") in said
    assert ((tmp_path / "a" / "metrics.jsonl").read_text() == before) == bool(says)


def test_values_that_json_does_not_know_count_too():
    def digest(value):
        return tasks.describe_data([{"value": value}], [])["their digest"]

    for one, other in ((numpy.int64(1), numpy.int64(2)), (numpy.ones(2), numpy.zeros(2)),
                       (Decimal("0.1"), Decimal("0.2")), (b"a", b"b"), ({"a"}, {"b"}),
                       (date(2026, 1, 1), date(2026, 1, 2))):
        assert digest(one) == digest(copy(one)) != digest(other)


TASK_OF_A_RANK = """
import os
from countdown import *
from countdown import load as load_all
def load(dataset, max_rows):
    return load_all(dataset, max_rows)[int(os.environ["RANK"]):]
"""


def test_a_task_that_loads_different_rows_on_different_ranks_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(TASK_OF_A_RANK)

    result = ranks(2, run_without_curves, *TINY, f"run.dir={tmp_path}",
                   f"task.name={tmp_path / 'mine.py'}")

    assert result.codes == [2, 2]
    assert "load returns different rows, or a different order, on different ranks" in result.stderr


def test_a_file_of_its_own_is_evaluated_on_and_what_is_in_both_is_not_trained_on(
        tmp_path, capsys):
    learned = write_rows(tmp_path / "learned.jsonl", range(2, 42))
    held_out = write_rows(tmp_path / "held_out.jsonl", range(40, 50))
    command = [*TINY, ONE_STEP, f"run.dir={tmp_path}", f"data.dataset={learned}"]

    assert start([*command, f"data.validation={held_out}"]) == 0

    said = say(capsys)
    note = "2 of the training problems are also held out, so they are left out of training"
    assert f"note: {note}" in said
    assert "38 questions to train on" in said and "6 questions are held out" in said
    asked = {sample["prompt"] for sample in read_jsonl(tmp_path / "a" / "samples.jsonl")}
    assert len(asked) == 6
    for prompt in asked:
        assert any(f"numbers {number}, 7, 3 " in prompt for number in range(40, 50))
    assert start([*command, "data.validation=none.jsonl", "run.name=b"]) == 2
    assert "data.validation: cannot load 'none.jsonl'" in say(capsys)


def test_a_task_may_mark_the_questions_that_are_held_out():
    rows = [{"prompt": str(number)} for number in range(30)]
    for row in rows[:10]:
        row["held_out"] = True
    rows += [{"prompt": str(number)} for number in range(10)]

    training, validation = split(rows, make_config(data__num_validation=4))

    assert len(validation) == 4 and all(row["held_out"] for row in validation)
    assert {row["prompt"] for row in training} == {str(number) for number in range(10, 30)}
    with pytest.raises(UserError, match="leaves 0 training"):
        split(rows[:10], make_config(data__num_validation=4))
    with pytest.raises(UserError, match="20 training questions and 0 validation"):  # None made up.
        split(rows[10:30], make_config(data__num_validation=4, data__validation="x"))


def test_a_hub_data_set_is_read_with_its_split(monkeypatch):
    asked = []

    def load_dataset(hub_id, name, split):
        asked.append((hub_id, name, split))
        return SimpleRows()

    class SimpleRows:
        def to_list(self):
            return [{"question": "1 + 1?", "answer": "#### 2"}]

    gsm8k = tasks.import_task("examples/gsm8k.py")
    monkeypatch.setattr("countdown.load_dataset", load_dataset)
    gsm8k.load("openai/gsm8k", None)
    gsm8k.load("openai/gsm8k:test", None)

    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


# ---------------------------------------------------------------- the last model

def test_the_last_model_is_kept_beside_the_best(tmp_path, monkeypatch):
    solved, best_of_n = iter([0.2, 0.5, 0.3, 0.3]), iter([1.0, 0.9, 0.8, 0.7])
    in_truth = evaluation_metrics
    monkeypatch.setattr(main, "evaluation_metrics", lambda *of: {
        **in_truth(*of), "eval/solved": next(solved), "eval/best_of_n": next(best_of_n)})

    assert start([*TINY, f"run.dir={tmp_path}", "validation.every=1"]) == 0

    folder = tmp_path / "a"
    assert [step_of(folder / name) for name in ("best", "last")] == [1, 3]
    training = json.loads((folder / "last" / "training.json").read_text())
    assert training["step"] == 3 and training["before_training"]["eval/solved"] == 0.2
