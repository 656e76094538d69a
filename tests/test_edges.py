"""What the first users ran into: code that leaves, characters and files that are broken, numbers
that leave the range. Nothing of it may end in a hang, or with 0 for a run that is not through."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import transformers
from conftest import make_config, make_model, read_jsonl, run_main, start
from processes import ROOT, inherited, ranks, run
from test_resume import SMALL, outcome, run_without_curves, without_files

import countdown
import main
from machinery import text
from machinery.checkpoints import RunFolder
from machinery.errors import UserError

TINY = [*SMALL, "training.max_new_gen_tokens=16", "checkpoint.every=1"]


# ---------------------------------------------------------------- ends

TASK = '''
import os, signal, sys
import countdown
from countdown import *

calls = 0
RANK = int(os.environ.get("RANK", "0"))


def leave(place):
    global calls
    calls += 1
    if place == {place!r} and RANK >= {rank} and calls > {calls}:
        {how}


leave("import")


def load(dataset, max_rows):
    leave("load")
    return countdown.load(dataset, max_rows)


def reward_function(completion, row):
    leave("reward")
    return countdown.reward_function(completion, row)
'''


def write_task(folder, **how):
    (folder / "own.py").write_text(TASK.format(**{"rank": 0, "calls": 0, **how}))
    return "task.name=own.py"


@pytest.mark.parametrize("how", ["sys.exit()", "sys.exit(0)", "sys.exit('enough')", "exit(3)",
                                 "raise RuntimeError('mine')", "raise KeyboardInterrupt",
                                 "raise GeneratorExit", "raise BaseException('mine')"])
@pytest.mark.parametrize("place", ["import", "load", "reward"])
def test_a_task_that_leaves_or_fails_is_shown_with_the_line_and_the_run_has_not_succeeded(
        place, how, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert start([*TINY, write_task(tmp_path, place=place, how=how), "run.dir=."]) == 1
    said = capsys.readouterr().err
    assert said.count("Traceback") == 1 and 'own.py", line 14, in leave\n' in said, said
    assert not (tmp_path / "a" / "summary.json").exists()


def test_an_error_of_a_reward_comes_with_the_completion(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    completions = []
    grade = main.grade

    def remember(task, answer):
        completions.append(answer.completion)
        return grade(task, answer)

    monkeypatch.setattr(main, "grade", remember)
    task = write_task(tmp_path, place="reward", how="raise ValueError('mine')", calls=2)
    assert start([*TINY, task, "run.dir=."]) == 1
    said = capsys.readouterr().err
    completion = text.shortened(completions[-1], 500)
    assert said.endswith(f"ValueError: mine\nThe completion was {completion!r}\n"), said


@pytest.mark.parametrize(("place", "calls"), [("load", 0), ("reward", 0), ("reward", 28)],
                         ids=["load", "first evaluation", "training"])
@pytest.mark.parametrize("how", ["sys.exit(0)", "raise OSError(5, 'mine')", "os.abort()"])
def test_one_rank_that_leaves_takes_all_along_and_what_was_saved_is_kept(
        place, calls, how, tmp_path):
    """Also where C code ends the process, of which only its stack can tell."""
    task = write_task(tmp_path, place=place, how=how, rank=1, calls=calls)
    tiny = [f"model.name={ROOT / 'tiny' / 'model'}"]
    result = ranks(2, run_without_curves, *TINY, task, *tiny, "run.dir=.", "training.max_steps=9",
                   cwd=tmp_path)
    assert all(result.codes) and 'own.py", line 14' in result.stderr, result.stderr
    if how == "os.abort()":
        assert "Fatal Python error: Aborted" in result.stderr
    else:
        assert result.stderr.count("\nTraceback") + result.stderr.startswith("Traceback") == 1
    assert not (tmp_path / "a" / "summary.json").exists()
    saved = [path.name for path in (tmp_path / "a").glob("checkpoints/*")]
    assert all(name.startswith("step-") for name in saved) and len(saved) == 2 * bool(calls)


# ---------------------------------------------------------------- tasks

@pytest.mark.parametrize(("code", "says"), [
    ("REWARD_WEIGHTS = ['answer']", "REWARD_WEIGHTS has to be names with numbers"),
    ("REWARD_WEIGHTS = {}", "REWARD_WEIGHTS"),
    ("REWARD_WEIGHTS = {'answer': '1'}", "not {'answer': '1'}"),
    ("REWARD_WEIGHTS = {'answer': 2j}", "not {'answer': 2j}"),
    ("REWARD_WEIGHTS = {'answer': float('inf')}", "not {'answer': inf}"),
    ("REWARD_WEIGHTS = {3: 1.0}; SOLVED = 3", "not {3: 1.0}"), ("SOLVED = None", "SOLVED=None"),
    ("REWARD_WEIGHTS = {'answer': 1, 'answer_std': 1}", "a metric has the name 'answer_std'"),
    ("REWARD_WEIGHTS = {'answer': 1, 'solved': 1}", "a metric has the name 'solved'"),
    ("del SOLVED", "has to define SOLVED"), ("del load", "has to define load"),
    ("del reward_function", "has to define reward_function"),
    ("def load(*_):\n    return [{'prompt': ''}] * 9", "row 1 is {'prompt': ''}"),
    ("def load(*_):\n    return ['a'] * 9", "row 1 is 'a'"),
    ("def load(*_):\n    return []", "0 different problems"),
    ("def load(*_):\n    raise ValueError('own.py wants\\nanother file')",
     "error: own.py wants another file")])
def test_wrong_names_and_rows_of_a_task_are_one_line_before_the_first_sample(
        code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "sample", None)
    (tmp_path / "own.py").write_text(f"from countdown import *\n{code}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said and "own.py" in said and len(said) <= 301, said


@pytest.mark.parametrize(("code", "says"), [
    ("raise RuntimeError('gloo')", "RuntimeError: gloo"), ("load = 3", "not callable"),
    ("def load(*_):\n    return None", "not iterable"),
    ("def load(*_):\n    return [{'prompt': str(i), 'problem': (i, [i])} for i in range(99)]",
     "unhashable type"),
    ("def load(*_):\n    return [{'prompt': str(i) + '\\ud800' * (i == 70)} for i in range(99)]",
     "surrogates not allowed")])
def test_other_mistakes_of_a_task_are_pythons_own_error_before_the_first_sample(
        code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "sample", None)
    (tmp_path / "own.py").write_text(f"from countdown import *\n{code}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 1
    said = capsys.readouterr().err
    assert says in said.splitlines()[-1], said


def test_rows_may_come_from_a_generator_and_parts_be_any_kind_of_number(tmp_path, monkeypatch):
    """And what a reward does to its row, however deep, stays there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import numpy, torch\nSOLVED = 'right'\n"
        "REWARD_WEIGHTS = {'right': numpy.float32(1), 'long': True}\n"
        "def load(dataset, max_rows):\n"
        "    return ({'prompt': str(i), 'hints': [{'at': [i]}]} for i in range(99))\n"
        "def reward_function(completion, row):\n"
        "    hint, = row['hints'][0]['at']\n"
        "    assert str(hint) == row['prompt']\n"
        "    row['hints'][0]['at'].append(7)\n    row.clear()\n"
        "    return {'right': numpy.float32(len(completion) % 2), 'long': torch.tensor(0.5)}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=.", "training.max_steps=1"]) == 0
    assert read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]["reward/long"] == 0.5


@pytest.mark.parametrize("value", ["-1.0", "2", "1.001"])
def test_a_share_solved_is_from_0_to_1(value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from countdown import *\ndef reward_function(completion, row):\n"
        f"    return {{'format': -3.0, 'answer': {value}}}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 1
    said = capsys.readouterr().err
    returned = f"\nValueError: reward_function returned {float(value):g} as answer. SOLVED "
    assert returned in said, said


@pytest.mark.parametrize("what", ["a weight", "all weights"])
def test_a_model_without_numbers_as_it_is_loaded_is_said_to_be_so(what, tmp_path, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    model = make_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    for parameter in [*model.parameters()][:1 if what == "a weight" else None]:
        parameter.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert start([*TINY, f"model.name={tmp_path / 'model'}", f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "as it was loaded" in said and "any more" not in said, said


@pytest.mark.parametrize(("spare", "code"), [(1, 0), (0, 2)])
def test_a_tokenizer_with_tokens_that_the_model_lacks_is_named_where_a_prompt_has_them(
        spare, code, tmp_path, capsys):
    """Those that no prompt has do no harm."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    rows = countdown.load(str(ROOT / "tiny" / "countdown.parquet"), 200)
    highest = max(max(tokenizer(row["prompt"])["input_ids"]) for row in rows)
    assert tokenizer.eos_token_id < highest < len(tokenizer) - 1
    model = make_model("llama", vocab_size=highest + spare, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # the library's bar, where no model has been loaded before
    assert start([*TINY, f"model.name={tmp_path / 'model'}", "training.max_steps=1",
                  f"run.dir={tmp_path}"]) == code
    said = capsys.readouterr().err
    assert (said.count("\n") == 1 and "its tokenizer writes token" in said) == (code == 2), said


# ---------------------------------------------------------------- the screen

def with_few_characters(*arguments):
    sys.stdout.reconfigure(encoding="ascii", errors="strict")
    run_without_curves(*arguments)


def test_a_screen_of_few_characters_ends_no_run(tmp_path):
    """Also where a reward prints more than it has."""
    (tmp_path / "own.py").write_text(
        "import countdown\nfrom countdown import *\n"
        "def reward_function(completion, row):\n"
        "    print('é')\n    return countdown.reward_function(completion, row)\n")
    result = ranks(1, with_few_characters, *TINY, f"task.name={tmp_path / 'own.py'}",
                   f"run.dir={tmp_path}", "training.max_steps=1")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 1
    assert "\\xe9" in result.stdout and "\\u2013" in result.stdout  # of 0.5 (0.1–0.9)


def test_the_first_words_come_before_the_libraries(tmp_path):
    result = run(sys.executable, ROOT / "main.py", "training.seed=x", cwd=tmp_path)
    assert result.stdout.startswith("importing PyTorch and transformers") and result.returncode == 2


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_every_line_fits_the_screen_and_nothing_on_it_moves_the_cursor(
        columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "SOLVED = 'right'\nREWARD_WEIGHTS = {'right': 1.0}\n"
        "def load(dataset, max_rows):\n"
        "    return [{'prompt': f'Do \\x1b[2J\\r add {i} and one, ' + 'word ' * 40 + '\\u202e'}\n"
        "            for i in range(99)]\n"
        "def reward_function(completion, row):\n    return {'right': float(len(completion) % 2)}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=.", "training.max_steps=3"]) == 0
    *lines, command, summary = capsys.readouterr().out.splitlines()
    assert json.loads(summary)["steps"] == 3  # where stdout is no terminal
    assert command.startswith("look at it: ")  # one line, however long, as it is to be pasted
    assert max(map(len, lines)) <= columns - 1, lines
    assert all(line.isprintable() for line in lines) and any("\\x1b[2J" in line for line in lines)
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3 and all(("tok/s" in line) == (columns == 200) for line in steps)
    # the words that all questions share are shown once
    assert sum("word word" in line for line in lines) == sum(
        "word word" in line for line in lines[:lines.index(steps[0])]) > 0


def test_scoring_that_takes_its_time_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(text, "SECONDS_BETWEEN_PROGRESS_LINES", 0.2)
    (tmp_path / "own.py").write_text(
        "import countdown, time\nfrom countdown import *\ndef reward_function(completion, row):\n"
        "    time.sleep(0.1)\n    return countdown.reward_function(completion, row)\n")
    assert start([*TINY, "task.name=own.py", "run.dir=.", "training.max_steps=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("\nscore ") >= 4 and "s/it" in said or "it/s" in said
    assert read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]["seconds/score"] > 0.7


# ---------------------------------------------------------------- numbers

def test_weights_that_leave_the_range_end_in_one_line_and_no_checkpoint_is_made_of_them(
        tmp_path, monkeypatch, capsys):
    settings = [*TINY, f"run.dir={tmp_path}", "training.max_new_gen_tokens=48"]
    assert start([*settings, "training.max_steps=2"]) == 0
    good = outcome(tmp_path / "a")
    capsys.readouterr()
    for every in (1, 100):  # found as it is saved, or as it is sampled from
        with monkeypatch.context() as patch:
            patch.setattr(main, "learning_rate_at", lambda step, training: 1e9)
            assert start([*settings, "training.max_steps=9", f"checkpoint.every={every}"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "lower training.learning_rate" in said, said
        assert re.search(r"after step \d the model gives no probabilities any more", said)
        assert every == 100 or "after step 3" in said
        assert outcome(tmp_path / "a")["tensors"] == good["tensors"]
    assert start([*settings, "training.max_steps=3"]) == 0


# ---------------------------------------------------------------- files that someone has changed

def truncated(path, size):
    os.truncate(path, size)


def emptied(path, _):
    path.write_bytes(b"")


def deleted(path, _):
    path.unlink()


def garbled(path, size):
    path.write_bytes(path.read_bytes()[:size] + b"\xff\x00{" + path.read_bytes()[size + 3:])


@pytest.mark.parametrize("damage", [truncated, emptied, deleted, garbled])
@pytest.mark.parametrize("max_steps", [2, 3], ids=["finished", "goes on"])
def test_metrics_and_samples_that_were_cut_are_missed_and_the_run_goes_on(
        damage, max_steps, tmp_path, capsys):
    settings = [*TINY, f"run.dir={tmp_path}", "validation.every=1"]
    assert start([*settings, "training.max_steps=2"]) == 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        damage(tmp_path / "a" / name, 700)
    capsys.readouterr()
    assert start([*settings, f"training.max_steps={max_steps}"]) == 0
    said = capsys.readouterr().out
    assert damage is garbled or said.count("has lost a part") == 2
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    lines = (tmp_path / "a" / "metrics.jsonl").read_text(errors="replace").splitlines()
    assert summary["last"] == json.loads(lines[-1]) and summary["steps"] == max_steps
    if damage in (emptied, deleted):  # how it began is not known any more, and not made up
        assert summary["first"] is None and "solved unknown -> " in said
    if max_steps == 3:
        assert [json.loads(line)["step"] for line in lines[-2:]] == [3, 3]


@pytest.mark.parametrize("how", ["deleted", "its folder deleted", "a folder of one's own"])
def test_best_that_is_missing_or_in_the_way_is_said_and_made_anew_by_a_better_evaluation(
        how, tmp_path, monkeypatch, capsys):
    settings = [*TINY, f"run.dir={tmp_path}", "validation.every=1"]
    assert start([*settings, "training.max_steps=1"]) == 0
    best = tmp_path / "a" / "best"
    capsys.readouterr()
    folder = best.resolve()
    if how != "its folder deleted":
        best.unlink()
    if how == "a folder of one's own":
        shutil.copytree(folder, best)
        (best / "note").touch()
    else:
        shutil.rmtree(folder, ignore_errors=how == "deleted")
    assert start([*settings, "training.max_steps=1"]) == 0
    said, missing = capsys.readouterr().out, how != "a folder of one's own"
    assert said.count(f"warning: {best} is missing") == 1 + missing
    assert (json.loads((tmp_path / "a" / "summary.json").read_text())["best"] is None)
    evaluate = main.evaluate

    def better(run):  # an evaluation that is better than any
        groups = evaluate(run)
        for group in groups:
            for answer in group:
                answer.reward = answer.reward_parts["answer"] = 1.0
        return groups

    monkeypatch.setattr(main, "evaluate", better)
    assert start([*settings, "training.max_steps=2"]) == 0
    assert best.is_symlink() and best.resolve().name == "best-000002"
    assert missing or (tmp_path / "a" / "copy-of-best-000002" / "note").exists()
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["best"]["step"] == 2


def test_a_run_without_its_checkpoints_or_config_begins_anew_or_goes_on(tmp_path):
    settings = [*TINY, f"run.dir={tmp_path}", "training.max_steps=2"]
    assert start(settings) == 0
    whole = outcome(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").unlink()
    assert start(settings) == 0 and (tmp_path / "a" / "config.yaml").exists()
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert start(settings) == 0
    assert without_files(outcome(tmp_path / "a")) == without_files(whole)


def test_the_name_of_a_run_is_one_plain_name_and_nothing_is_touched_otherwise(tmp_path):
    for name in ("a/b", "/tmp/x", ".", "..", "...", ""):
        with pytest.raises(UserError, match="run.name="):
            make_config(run__name=name, run__dir=str(tmp_path))
    assert not list(tmp_path.iterdir())
    folder = RunFolder(make_config(run__name="a b é", run__dir=str(tmp_path)))
    assert folder.path == tmp_path / "a b é"


def test_a_run_where_the_locale_knows_no_unicode_is_as_any_other(tmp_path):
    """But for a name that it cannot read, which is one line."""
    def start_there(*arguments):
        return subprocess.run(
            [sys.executable, ROOT / "main.py", *TINY, f"run.dir={tmp_path}", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**inherited(), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})

    result = start_there("training.max_steps=1")
    assert result.returncode == 0 and "\\u2013" in result.stdout, result.stderr
    result = start_there("run.name=Jürgen".encode())
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: 'run.name=J")


def test_help_is_no_mistake():
    result = ranks(1, run_main, "--help")
    assert result.returncode == 0 and "--config file.yaml" in result.stdout and not result.stderr
