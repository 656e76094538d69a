"""What a user, a task, a disk or another rank can do wrong. A mistake is one line that says what to
write, a fault of a task is Python's own traceback, and nothing ends in a hang or as a success."""

import json
import math
import os
import resource
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from conftest import (
    SMALL,
    make_config,
    make_model,
    outcome,
    read_jsonl,
    run_main,
    run_without_curves,
    start,
    training_steps,
)
from processes import ROOT, ranks, torchrun

import main
from machinery import ranks as ranks_of_machinery
from machinery import runs

TINY = [*SMALL, "training.max_new_gen_tokens=16"]
TINY_MODEL = ROOT / "tiny" / "model"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of its own to start from."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_lines(said: str) -> list[str]:
    """The lines that tell a mistake. There is at least one."""
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert lines
    return lines


def the_only_error(said: str) -> str:
    [line] = error_lines(said)
    return line


# ---------------------------------------------------------------- mistakes

@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder with models that cannot be used, and a file that is in the way."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("no template", "own code"):
        shutil.copytree(TINY_MODEL, folder / name)
    (folder / "no template" / "chat_template.jinja").unlink()
    config = json.loads((folder / "own code" / "config.json").read_text())
    config |= {"model_type": "mine",
               "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "own code" / "config.json").write_text(json.dumps(config))
    (folder / "own code" / "mine.py").write_text(
        f"open({str(folder / 'it has run')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")

    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    no_numbers = make_model("llama", vocab_size=len(tokenizer))
    no_numbers.lm_head.weight.data.fill_(math.nan)
    no_numbers.save_pretrained(folder / "no numbers")
    tokenizer.save_pretrained(folder / "no numbers")
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize(("arguments", "says"), [
    (["model.attention=flash_9"], ["model.name=", "model.attention='flash_9'"]),
    (["model.lora_rank=4", "model.lora_targets=[q]"], ["cannot be trained", "lora_targets=['q']"]),
    (["model.name=someone/model"], ["model.name='someone/model'", "hub id within reach"]),
    (["model.name=own code"], ["model.name='own code'", "cannot be loaded"]),
    (["model.name=no numbers"], ["LlamaForCausalLM cannot be trained here", "nan in the mean"]),
    (["model.name=no template", "data.prompt_style=chat"],
     ["data.prompt_style", "chat template", "write base"]),
    (["data.num_validation=9999"], ["data.num_validation=9999 leaves 0 training"]),
    (["training.max_new_gen_tokens=500"], ["training.max_new_gen_tokens=500", "512", "at most"]),
    (["task.name=none.py"], ["task.name='none.py'"]),
    (["task.reward_weights={form: 1}"], ["task.reward_weights", "has no part form"]),
    (["run.dir=file"], ["run.dir='file'"]),
])
def test_a_mistake_is_one_line_with_what_was_seen_and_what_to_write(
        arguments, says, broken, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(broken)

    assert start([*TINY, f"run.dir={tmp_path}", *arguments]) == 2

    line = the_only_error(capsys.readouterr().err)
    for piece in says:
        assert piece in line
    assert not (tmp_path / "a" / "checkpoints").exists()
    assert not (broken / "it has run").exists()


def test_a_task_that_refuses_its_data_is_one_line(here, capsys):
    (here / "own.py").write_text(
        "from countdown import *\ndef load(*_): raise ValueError('own.py wants\\nanother file')\n")

    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 2

    assert "own.py wants another file" in the_only_error(capsys.readouterr().err)


def test_a_mistake_that_one_rank_meets_ends_all_with_one_line(tmp_path):
    """Here one rank lacks memory, which is a mistake too, because the user can mend it."""
    (tmp_path / "own.py").write_text(
        "import os\nfrom countdown import *\ndef load(*_):\n"
        "    if os.environ['RANK'] == '1': raise MemoryError\n"
        "    return [{'prompt': str(i)} for i in range(99)]\n")

    result = ranks(2, run_main, *TINY, f"task.name={tmp_path / 'own.py'}", f"run.dir={tmp_path}")

    assert result.codes == [2, 2]
    assert "out of memory in phase read" in the_only_error(result.stderr)


def test_under_torchrun_a_mistake_is_said_once_and_again_in_torchruns_report(tmp_path):
    result = torchrun(2, "main.py", "training.learning_rat=1", f"run.dir={tmp_path}")

    assert result.returncode == 1  # This is torchrun's own.
    lines = result.stderr.splitlines()
    assert sum(line.startswith("error: training.learning_rat=1") for line in lines) == 1
    assert result.stderr.count("traceback : error: training.learning_rat=1") == 2
    assert result.stderr.count("exitcode  : ") == 2  # of two ranks
    assert result.stderr.count("exitcode  : 2") == 2


# ---------------------------------------------------------------- the folder of a run

def test_a_run_that_has_finished_says_so_and_takes_more_steps(tmp_path, capsys, monkeypatch):
    settings = [*TINY, f"run.dir={tmp_path}"]
    for max_steps in (0, 1):
        assert start([*settings, f"training.max_steps={max_steps}"]) == 0
        with monkeypatch.context() as patch:  # It is never begun anew, and not evaluated again.
            patch.delattr(main, "evaluate")
            capsys.readouterr()
            assert start([*settings, f"training.max_steps={max_steps}"]) == 0
        assert "this run has finished" in capsys.readouterr().out

    assert start([*settings, "training.max_steps=2", "validation.every=3"]) == 0
    lines = [line["step"] for line in read_jsonl(tmp_path / "a" / "metrics.jsonl")]
    assert lines == [0, 1, 1, 2, 2]


def test_another_experiment_in_the_same_folder_is_refused_with_the_keys_that_differ(
        tmp_path, capsys):
    settings = [*TINY, f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=1"]) == 0
    before = outcome(tmp_path / "a")

    assert start([*settings, "training.seed=1", "model.precision=bfloat16"]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert "(model.precision: float32 -> bfloat16; training.seed: 0 -> 1)" in line
    assert "set run.name" in line
    assert outcome(tmp_path / "a") == before


@pytest.mark.parametrize("now", [[], ["training.seed=1"], ["training.max_steps=0"]], ids=str)
def test_a_start_leaves_files_without_a_checkpoint_as_they_are(now, tmp_path, capsys):
    """They may be of another experiment, or of a run that has finished."""
    settings = [*TINY, f"run.dir={tmp_path}", "training.max_steps=1"]
    assert start(settings) == 0
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    assert start([*settings, *now]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert "no checkpoint to resume from: set run.name" in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(tmp_path, capsys):
    folder = runs.RunFolder(make_config(run__dir=str(tmp_path), run__name="a"))
    lock = folder.take_lock()

    assert start([*TINY, f"run.dir={tmp_path}"]) == 2
    line = the_only_error(capsys.readouterr().err)
    assert f"{tmp_path / 'a'} is in use by another process" in line

    lock.close()
    assert start([*TINY, "training.max_steps=0", f"run.dir={tmp_path}"]) == 0


# ---------------------------------------------------------------- memory and disk

# Learning from all 256 answers of a rank at once takes more than ten times as much.
BYTES_LEFT = 60_000_000


def short_of_memory(*arguments):
    """main.py, except that rank 1 has hardly any memory left when it learns."""
    policy_gradient = main.policy_gradient

    def with_little_memory(*arguments):
        if main.RANK == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0])
            limit = used * os.sysconf("SC_PAGE_SIZE") + BYTES_LEFT
            resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
        return policy_gradient(*arguments)

    main.policy_gradient = with_little_memory
    run_without_curves(*arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the address space in use")
def test_running_out_of_memory_on_one_rank_ends_all_with_the_key_to_lower(tmp_path):
    result = ranks(2, short_of_memory, *SMALL, f"run.dir={tmp_path}", "validation.best_of_n=1",
                   "training.num_samples_per_step=16", "training.k_best_of_n=[16,16]",
                   "training.tokens_per_micro_batch=100000")  # more than 256 answers have

    line = the_only_error(result.stderr)
    assert "out of memory in phase learn: lower training.tokens_per_micro_batch," in line
    assert result.codes[1] == 2
    assert result.codes[0] != 0  # It waits for rank 1. SIGTERM ends it, or an error of gloo.


def with_small_files(limit, *arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_without_curves(*arguments)


def test_a_disk_that_takes_no_more_is_one_line_and_the_former_checkpoints_stay(tmp_path):
    settings = [*TINY, f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=2"]) == 0
    before = outcome(tmp_path / "a")

    # A limit on the size of a file stands for a full disk. The weights in best/, 5.5 MB, still fit.
    # A checkpoint, which has two moments of each weight too, does not.
    limit = 8_000_000
    result = ranks(1, with_small_files, limit, *settings, "training.max_steps=4")

    assert result.returncode == 2
    assert f"{tmp_path / 'a'} cannot be written to" in the_only_error(result.stderr)
    saved = sorted(path.name for path in tmp_path.glob("a/checkpoints/step-*"))
    assert saved == ["step-000001", "step-000002"]
    assert outcome(tmp_path / "a")["tensors"] == before["tensors"]


# ---------------------------------------------------------------- tasks that fail

# Countdown, but on one rank {how} is called at the nth passing of a place.
TASK = """
import collections, os, sys
import countdown
from countdown import *

passed = collections.Counter()

def at(place):
    passed[place] += 1
    if (place, passed[place], os.environ.get("RANK", "0")) == ({place!r}, {nth}, "{rank}"):
        {how}

at("import")

def load(*arguments):
    at("load")
    return countdown.load(*arguments)

def reward_function(completion, row):
    at("reward")
    return countdown.reward_function(completion, row)
"""
LINE_OF_HOW = 1 + TASK.splitlines().index("        {how}")


@pytest.mark.parametrize(("place", "how", "shows_completion"), [
    ("import", "sys.exit(0)", False),
    ("load", "raise RuntimeError('mine')", False),
    ("reward", "raise KeyboardInterrupt", False),  # Only an Exception gets a note.
    ("reward", "raise OSError(5, 'mine')", True)])
def test_a_task_that_leaves_or_fails_is_shown_with_its_line_and_is_no_success(
        place, how, shows_completion, here, capsys):
    (here / "own.py").write_text(TASK.format(place=place, nth=1, rank=0, how=how))

    assert start([*TINY, "task.name=own.py", "run.dir=."]) == 1

    said = capsys.readouterr().err
    assert said.count("Traceback") == 1
    assert f'own.py", line {LINE_OF_HOW}, in at\n' in said
    assert "cannot be written" not in said  # An OSError of a task is none of the run's folder.
    assert ("The completion was" in said) == shows_completion
    assert not (here / "a" / "summary.json").exists()


@pytest.mark.parametrize(("place", "nth", "how", "num_tracebacks", "saved"), [
    pytest.param("load", 1, "sys.exit(0)", 1, [], id="reading"),
    # In step 3. A rank grades 6 answers in the evaluation before step 1, and 8 in each step.
    # Rank 0 may still be saving step 2 then, so the other rank waits a little.
    pytest.param("reward", 6 + 8 + 8 + 1, "__import__('time').sleep(2), os.abort()", 0,
                 ["step-000001", "step-000002"], id="in C")])
def test_one_rank_that_leaves_takes_all_along_and_what_was_saved_is_kept(
        place, nth, how, num_tracebacks, saved, tmp_path):
    (tmp_path / "own.py").write_text(TASK.format(place=place, nth=nth, rank=1, how=how))

    result = ranks(2, run_without_curves, *TINY, f"task.name={tmp_path / 'own.py'}",
                   f"run.dir={tmp_path}", "training.max_steps=9")

    assert 0 not in result.codes
    assert f'own.py", line {LINE_OF_HOW}' in result.stderr  # After abort() faulthandler shows it.
    assert result.stderr.count("Traceback") == num_tracebacks
    assert not (tmp_path / "a" / "summary.json").exists()
    checkpoints_left = (tmp_path / "a").glob("checkpoints/*")
    assert sorted(path.name for path in checkpoints_left) == saved


@pytest.mark.parametrize(("parts", "says"), [
    ({"format": math.nan, "answer": 0}, "reward_function returned nan as format"),
    ({"format": 0, "answer": -2e9}, "reward_function returned -2000000000.0 as answer"),
    ({"format": 0.5}, "answer"), ({"format": "a", "answer": 0}, "could not convert"),
    (1.0, "not subscriptable")], ids=str)
def test_a_reward_without_a_number_up_to_1e9_for_each_part_is_an_error_with_the_completion(
        parts, says):
    task = main.load_task(make_config())
    task.reward_function = lambda completion, row: parts

    with pytest.raises((KeyError, TypeError, ValueError), match=says) as raised:
        main.grade(task, "said", {})

    assert "'said'" in raised.value.__notes__[0]


# ---------------------------------------------------------------- numbers that are not finite

def with_one_bad_rank(folder, *arguments):
    """main.py, except that on rank 1 the gradient is not finite in step 2 and from step 4 on. Each
    rank keeps its weights as they are in the end."""
    learn, train = main.learn, main.train

    def bad_learn(run, answers):
        if main.RANK == 1 and run.step in (2, 4, 5, 6, 7, 8):
            answers[0].advantage = math.inf
        return learn(run, answers)

    def keeping_train(run):
        try:
            train(run)
        finally:
            safetensors.torch.save_model(run.model, folder / f"weights-{main.RANK}")

    main.learn, main.train = bad_learn, keeping_train
    run_without_curves(*arguments)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_five_end_the_run(tmp_path):
    result = ranks(2, with_one_bad_rank, tmp_path, *SMALL, f"run.dir={tmp_path}",
                   "training.num_samples_per_step=4",  # So there is a signal in steps 1 and 3.
                   "training.max_steps=20")

    assert result.codes == [2, 2], result.stderr
    assert "up to step 8: lower training.learning_rate" in the_only_error(result.stderr)
    assert result.stdout.count("skipped: not finite") == 6
    steps = training_steps(tmp_path / "a")
    assert [step["non_finite"] for step in steps] == [0, 1, 0, 1, 1, 1, 1, 1]
    assert [step["updated"] for step in steps] == [1, 0, 1, 0, 0, 0, 0, 0]
    assert (steps[1]["loss"], steps[1]["grad_norm"]) == (None, None)
    weights = safetensors.torch.load_file(tmp_path / "weights-0")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert (tmp_path / "weights-0").read_bytes() == (tmp_path / "weights-1").read_bytes()


# Who notices after the step: the check in `save`, or else the sampling of the next step.
@pytest.mark.parametrize("every", [1, 100], ids=["as it is saved", "as it is sampled from"])
def test_weights_out_of_range_end_in_one_line_and_are_never_saved(
        every, tmp_path, monkeypatch, capsys):
    settings = [*SMALL, f"run.dir={tmp_path}"]
    monkeypatch.setattr(
        main, "learning_rate_at", lambda step, training: 1e-4 if step < 3 else 1e9)
    assert start([*settings, "training.max_steps=9", f"checkpoint.every={every}"]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert "no probabilities any more" in line
    assert "lower training.learning_rate" in line
    saved = [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()]
    assert sorted(saved) == (["step-000001", "step-000002"] if every == 1 else ["step-000000"])


# ---------------------------------------------------------------- ranks

def test_a_slow_rank_is_waited_for_longer_than_the_libraries_do(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _, **how: asked.update(how))

    ranks_of_machinery.join()

    timeout_of_gloo = timedelta(minutes=30)  # nccl's is 10 minutes.
    assert asked["timeout"] > timeout_of_gloo


def meet_for_a_second(*arguments):
    ranks_of_machinery.TIME_TO_MEET = timedelta(seconds=1)
    run_main(*arguments)


def test_a_rank_that_never_comes_ends_the_others_with_one_line():
    result = ranks(2, meet_for_a_second, *TINY, WORLD_SIZE="3")

    assert result.returncode == 2
    # Each rank has this error. What one says ends the other, which may have said it too by then.
    assert 0 not in result.codes
    for line in error_lines(result.stderr):
        assert "the ranks cannot reach each other" in line


def test_after_a_restart_the_ranks_find_no_address_from_before(monkeypatch):
    torchruns_store = torch.distributed.HashStore()
    monkeypatch.setattr(
        torch.distributed, "rendezvous", lambda *_, **__: iter([(torchruns_store, 0, 1)]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)

        store = ranks_of_machinery.meet()

        assert not store.check(["address"])
        store.set("address", "")


# ---------------------------------------------------------------- secrets

def test_nothing_of_the_environment_is_written_or_said(tmp_path):
    """Neither the password of MLflow, which is used, nor the environment as a whole."""
    secret = "hunter2-hunter2"

    # Nobody listens on port 9, so MLflow has an error to tell.
    result = ranks(1, run_without_curves, *TINY, f"run.dir={tmp_path}", "logging.mlflow=true",
                   HF_TOKEN=secret, SOME_PASSWORD=secret, MLFLOW_TRACKING_PASSWORD=secret,
                   MLFLOW_TRACKING_URI=f"http://me:{secret}@127.0.0.1:9")

    assert result.returncode == 0
    assert "MLflow failed" in result.stdout
    assert secret not in result.stdout + result.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()
