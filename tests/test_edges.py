"""What the first users ran into: code that leaves, screens and files that are broken, numbers that
leave the range. Nothing of it may end in a traceback, in a hang, or with 0 for a run that is not
through."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import make_config, make_model, read_jsonl, run_main, start
from processes import ROOT, inherited, ranks
from test_resume import SMALL, outcome, run_without_curves, without_files

import countdown
import main
from machinery.errors import theirs

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
                                 "os._exit(0)", "os._exit(5)", "raise KeyboardInterrupt",
                                 "raise GeneratorExit", "raise BaseException('mine')"])
@pytest.mark.parametrize(("place", "says"), [("import", "cannot be imported"),
                                             ("load", "its load() fails"),
                                             ("reward", "reward_function failed")])
def test_a_task_that_leaves_is_named_with_the_line_and_the_run_has_not_succeeded(
        place, says, how, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    real_exit = os._exit
    assert start([*TINY, write_task(tmp_path, place=place, how=how), "run.dir=."]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) <= 301 and "own.py" in said, said
    assert said.startswith("error: ") and says in said and " at line 14 of " in said
    assert os._exit is real_exit and not (tmp_path / "a" / "summary.json").exists()


@pytest.mark.parametrize(("place", "calls"), [("load", 0), ("reward", 0), ("reward", 28)],
                         ids=["load", "first evaluation", "training"])
@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", "os.abort()"])
def test_one_rank_that_leaves_takes_all_along_and_what_was_saved_is_kept(
        place, calls, how, tmp_path):
    """Also where C code ends the process, of which only its stack can tell."""
    task = write_task(tmp_path, place=place, how=how, rank=1, calls=calls)
    tiny = [f"model.name={ROOT / 'tiny' / 'model'}"]
    result = ranks(2, run_without_curves, *TINY, task, *tiny, "run.dir=.", "training.max_steps=9",
                   cwd=tmp_path)
    assert all(result.codes) and "\nTraceback (most recent call last)" not in result.stderr
    if how == "os.abort()":
        assert "Fatal Python error: Aborted" in result.stderr and "own.py" in result.stderr
    else:
        assert "own.py" in result.stderr and "(SystemExit: 0)" in result.stderr, result.stderr
    assert not (tmp_path / "a" / "summary.json").exists()
    saved = [path.name for path in (tmp_path / "a").glob("checkpoints/*")]
    assert all(name.startswith("step-") for name in saved) and len(saved) == 2 * bool(calls)


# ---------------------------------------------------------------- tasks

@pytest.mark.parametrize(("code", "says"), [
    ("REWARD_WEIGHTS = ['answer']", "REWARD_WEIGHTS"), ("REWARD_WEIGHTS = {}", "REWARD_WEIGHTS"),
    ("REWARD_WEIGHTS = {'answer': '1'}", "REWARD_WEIGHTS"),
    ("REWARD_WEIGHTS = {'answer': 2j}", "REWARD_WEIGHTS"),
    ("raise RuntimeError('gloo')", "RuntimeError: gloo"),
    ("REWARD_WEIGHTS = {'answer': float('inf')}", "REWARD_WEIGHTS={'answer': inf}"),
    ("REWARD_WEIGHTS = {3: 1.0}; SOLVED = 3", "REWARD_WEIGHTS"), ("SOLVED = None", "SOLVED=None"),
    ("REWARD_WEIGHTS = {'answer': 1, 'answer_std': 1}", "['answer_std'] name metrics"),
    ("REWARD_WEIGHTS = {'answer': 1, 'solved/3': 1}", "['solved/3'] name metrics"),
    ("del SOLVED", "no attribute 'SOLVED'"), ("load = 3", "has to define load()"),
    ("reward_function = None", "reward_function()"), ("REPLY_START = 1", "REPLY_START"),
    ("SYSTEM_MESSAGE = ['Be brief.']", "SYSTEM_MESSAGE"),
    ("SYSTEM_MESSAGE = '\\ud800'", "surrogates not allowed"),
    ("REWARD_WEIGHTS = {'answer': 1, 'right?': 1}", "more than letters"),
    ("def load(*_):\n    yield {'prompt': 'half a \\ud800'}", "surrogates not allowed"),
    ("def load(*_):\n    return [{'prompt': ''}] * 9", "the prompt of row 1 is '', no text"),
    ("def load(*_):\n    return [{'prompt': str(i), 'problem': (i, [i])} for i in range(99)]",
     "the problem (0, [0]) has no hash"),
    ("def load(*_):\n    return None", "its load() fails"),
    ("def load(*_):\n    return []", "0 different problems"),
    ("def load(*_):\n    return [{'prompt': str(i), 'f': lambda: 0} for i in range(99)]",
     "cannot go from one process to another")])
def test_wrong_names_and_rows_of_a_task_are_found_before_the_first_sample(
        code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "sample", None)
    (tmp_path / "own.py").write_text(f"from countdown import *\n{code}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said and "own.py" in said and len(said) <= 301, said


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


MOVES = """
import os, signal, torch
from countdown import *
def move():
    os.chdir("elsewhere" if os.path.isdir("elsewhere") else "/")
    os.umask(0o777)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
move()
own_load, own_reward = load, reward_function
def load(*arguments):
    rows = own_load(*arguments)
    move()
    return rows
def reward_function(*arguments):
    move()
    return own_reward(*arguments)
"""


def test_what_a_task_moves_of_the_process_is_put_back(tmp_path, monkeypatch):
    """Its folder, what files may be read by, torch's defaults, who heeds a stop signal. A run of
    the same name where the task goes to is not touched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere" / "a").mkdir(parents=True)
    (tmp_path / "still.py").write_text("from countdown import *\n")
    (tmp_path / "moves.py").write_text(MOVES)
    settings = [*TINY, "training.max_steps=1"]
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    heeds = []

    def ask(self):
        heeds.append([callable(signal.getsignal(number)) for number in numbers])

    monkeypatch.setattr(main.Logger, "_draw_curves", ask)
    assert start([*settings, "task.name=still.py", "run.dir=still"]) == 0
    before = heeds[-1]
    mask = os.umask(0o022)
    try:
        assert start([*settings, "task.name=moves.py", "run.dir=moved"]) == 0
    finally:
        assert os.umask(mask) == 0o022
    assert heeds[-1] == before and before[0]
    assert outcome(tmp_path / "moved" / "a") == outcome(tmp_path / "still" / "a") | {
        "files": outcome(tmp_path / "moved" / "a")["files"]}
    assert not list((tmp_path / "elsewhere" / "a").iterdir())
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert torch.get_default_device().type == "cpu"


def test_a_ctrl_c_that_comes_in_a_reward_still_makes_way_for_a_second_one():
    """What `heed` does then is not the task's to be put back."""
    def ours(*_):
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGINT, ours)
    signal.signal(signal.SIGTERM, ours)
    with theirs("reward_function failed"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == ours


@pytest.mark.parametrize("value", ["-1.0", "2", "1.001"])
def test_a_share_solved_is_from_0_to_1(value, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from countdown import *\ndef reward_function(completion, row):\n"
        f"    return {{'format': -3.0, 'answer': {value}}}\n")
    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"answer, is {float(value):g}, not from 0 to 1; " in said, said


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

def with_stdout(kind, *arguments):
    if kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    if kind == "gone":
        readable, writable = os.pipe()
        os.dup2(writable, 1)
        os.close(readable)
    if kind == "ascii":
        sys.stdout.reconfigure(encoding="ascii", errors="strict")
    run_without_curves(*arguments)


@pytest.mark.parametrize("kind", ["full", "gone", "ascii"])
def test_a_screen_that_is_full_gone_or_of_few_characters_costs_what_would_be_seen_and_no_run(
        kind, tmp_path):
    """Also what a reward prints."""
    (tmp_path / "own.py").write_text(
        "import countdown, sys\nfrom countdown import *\n"
        "def reward_function(completion, row):\n"
        "    print('é' * 10_000)\n    sys.stdout.close()\n"
        "    return countdown.reward_function(completion, row)\n")
    result = ranks(1, with_stdout, kind, *TINY, f"task.name={tmp_path / 'own.py'}",
                   f"run.dir={tmp_path}", "training.max_steps=1")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 1
    assert kind != "ascii" or "\\u2013" in result.stdout  # of 0.5 (0.1–0.9)


def test_closed_streams_cost_no_run_and_the_first_words_come_before_the_libraries(tmp_path):
    """A descriptor that is closed would be the next file's, and what is printed written there."""
    command = [sys.executable, ROOT / "main.py", *TINY, f"run.dir={tmp_path}",
               "training.max_steps=1"]
    line = " ".join(f"'{word}'" for word in command)
    both = [subprocess.run(["sh", "-c", f"{line} run.name={name} {how}"], env=inherited(),
                           cwd=tmp_path, capture_output=True, text=True, check=False)
            for name, how in (("a", ">&- 2>&- <&-"), ("b", ""))]
    assert [result.returncode for result in both] == [0, 0], both
    assert both[0].stdout == both[0].stderr == ""
    assert both[1].stdout.startswith("importing PyTorch and transformers")
    for name in "ab":
        assert len(read_jsonl(tmp_path / name / "metrics.jsonl")) == 3


def test_an_env_file_that_is_no_text_is_one_line(tmp_path):
    shutil.copytree(ROOT / "machinery", tmp_path / "machinery")
    (tmp_path / ".env").write_bytes(b"HF_TOKEN=\xff\n")
    result = subprocess.run([sys.executable, "-c", "import machinery"], cwd=tmp_path, text=True,
                            capture_output=True, check=False)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert f"error: {tmp_path / '.env'} cannot be read as UTF-8 text" in result.stderr


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
    monkeypatch.setattr("logger.SECONDS_BETWEEN_PROGRESS_LINES", 0.2)
    (tmp_path / "own.py").write_text(
        "import countdown, time\nfrom countdown import *\ndef reward_function(completion, row):\n"
        "    time.sleep(0.1)\n    return countdown.reward_function(completion, row)\n")
    assert start([*TINY, "task.name=own.py", "run.dir=.", "training.max_steps=1"]) == 0
    said = capsys.readouterr().out
    assert said.count("\nscore ") >= 4 and "s/it" in said or "it/s" in said
    assert read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]["seconds/score"] > 0.7


# ---------------------------------------------------------------- numbers

def test_weights_that_leave_the_range_end_in_one_line_and_no_checkpoint_is_made_of_them(
        tmp_path, capsys):
    settings = [*TINY, f"run.dir={tmp_path}", "training.max_new_gen_tokens=48"]
    assert start([*settings, "training.max_steps=2"]) == 0
    good = outcome(tmp_path / "a")
    capsys.readouterr()
    for every in (1, 100):  # found as it is saved, or as it is sampled from
        assert start([*settings, "training.max_steps=9", "training.learning_rate=1e9",
                      "run.resume_anyway=true", f"checkpoint.every={every}"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "lower training.learning_rate" in said, said
        assert "step 3 has left" in said or re.search(r"after step \d the model", said)
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
                answer.reward = answer.parts["answer"] = 1.0
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
    for name in ("a/b", "/tmp/x", ".", "..", "...", "", "a\0b"):
        with pytest.raises(main.UserError, match="plain name"):
            make_config(run__name=name, run__dir=str(tmp_path))
    assert not list(tmp_path.iterdir())
    folder = main.RunFolder(make_config(run__name="a b é", run__dir=str(tmp_path)))
    assert folder.path == tmp_path / "a b é"


def test_a_run_where_the_locale_knows_no_unicode_is_as_any_other(tmp_path):
    """But for a name that it cannot read, which is said."""
    def start_there(*arguments):
        return subprocess.run(
            [sys.executable, ROOT / "main.py", *TINY, f"run.dir={tmp_path}", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**inherited(), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})

    result = start_there("training.max_steps=1")
    assert result.returncode == 0 and "\\u2013" in result.stdout, result.stderr
    result = start_there("run.name=Jürgen".encode())
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "is not in this locale's alphabet: set LC_ALL=C.UTF-8" in result.stderr


def test_help_is_no_mistake():
    result = ranks(1, run_main, "--help")
    assert result.returncode == 0 and "--config file.yaml" in result.stdout and not result.stderr
