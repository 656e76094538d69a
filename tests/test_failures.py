"""What a user, a task, a disk or another rank can do wrong. A mistake is one line that says what to
write, a fault of a task is Python's own traceback, and nothing ends in a hang or as a success."""

import json
import math
import resource
import shutil
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from conftest import (
    PROMPTS,
    SMALL,
    make_config,
    make_model,
    outcome,
    read_jsonl,
    run_folder,
    run_without_curves,
    sample,
    start,
    training_steps,
)
from processes import ROOT, ranks, torchrun
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import main
from machinery import ranks as ranks_of_machinery
from machinery import sampling
from machinery.errors import UserError, errors_of_phase, is_out_of_memory
from machinery.ranks import RANK
from machinery.runs import step_of
from machinery.tasks import grade, load_task

TINY = [*SMALL, "training.max_new_gen_tokens=16"]


def the_only_error(said: str) -> str:
    """The line that tells a mistake."""
    assert "Traceback" not in said
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    return line


# ---------------------------------------------------------------- mistakes

@pytest.mark.parametrize("argument", [
    "model.name=someone/model", "data.num_validation=9999", "data.dataset=none.parquet",
    "training.max_new_gen_tokens=500", "task.name=none.py", "task.reward_weights={form: 1}",
    "run.dir=/dev/null"])
def test_a_mistake_is_one_line_with_its_key_and_its_value(argument, tmp_path, capsys):
    assert start([*TINY, f"run.dir={tmp_path}", argument]) == 2

    line = the_only_error(capsys.readouterr().err)
    key, value = argument.split("=")
    assert key in line and value.strip("{}").partition(":")[0] in line
    assert not (tmp_path / "a" / "checkpoints").exists()


def test_code_that_a_model_brings_is_never_run(tmp_path, capsys):
    folder = shutil.copytree(ROOT / "tiny" / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'it has run')!r}, 'w')\n")

    assert start([*TINY, f"run.dir={tmp_path}", f"model.name={folder}"]) == 2

    assert f"model.name='{folder}'" in the_only_error(capsys.readouterr().err)
    assert not (tmp_path / "it has run").exists()


NCCL = "NCCL error in: NCCLUtils.cpp:77, "
SHM = NCCL + "unhandled system error: Error while creating shared memory segment /dev/shm/nccl-Ly7"


@pytest.mark.parametrize("error, expected", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_SUBLIBRARY_ALLOCATION_FAILED"), True),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
    (torch.distributed.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"), True),
    (torch.distributed.DistBackendError(SHM), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False)],
    ids=lambda value: str(value)[:40])
def test_running_out_of_memory_is_known_by_its_many_names(error, expected):
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("large_vocabulary", [1, 10**9], ids=["fast", "generate's own"])
def test_a_model_that_gives_no_probabilities_is_blamed_on_the_learning_rate(
        large_vocabulary, monkeypatch):
    monkeypatch.setattr(sampling, "LARGE_VOCABULARY", large_vocabulary)
    model = make_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)

    with (pytest.raises(UserError, match="step 3, .* training.learning_rate"),
          errors_of_phase("sample", 3)):
        sample(model, PROMPTS, 1)


# ---------------------------------------------------------------- prompts and data

def test_a_value_error_of_a_tasks_load_keeps_its_file_and_line(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("from countdown import *\n\ndef load(dataset, max_rows):\n"
                   "    return [{'prompt': int('ten')}]\n")

    assert start([*TINY, f"task.name={own}", f"run.dir={tmp_path}"]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert line == "error: invalid literal for int() with base 10: 'ten' (at own.py:4)"


@pytest.mark.parametrize(("arguments", "is_told"), [
    (["training.clip=[0.2,0.2]"], True), ([], False),
    (["training.clip=[0.2,0.2]", "training.updates_per_batch=2"], False)])
def test_a_clip_without_a_second_update_is_said_to_change_nothing(
        arguments, is_told, tmp_path, capsys):
    assert start([*TINY, *arguments, "training.max_steps=0", f"run.dir={tmp_path}"]) == 0

    assert ("note: training.clip " in capsys.readouterr().out) == is_told


def test_an_empty_prompt_is_refused_at_the_start(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("import countdown\nfrom countdown import *\n\ndef load(dataset, max_rows):\n"
                   "    rows = countdown.load(dataset, max_rows)\n"
                   "    return [*rows, {**rows[0], 'prompt': '', 'problem': 'empty'}]\n")

    assert start([*TINY, f"task.name={own}", f"run.dir={tmp_path}"]) == 2

    assert "data.dataset: the prompt ''" in the_only_error(capsys.readouterr().err)


def test_a_tokenizer_that_ends_each_prompt_is_refused(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    folder = shutil.copytree(ROOT / "tiny" / "model", tmp_path / "model")
    tokenizer.save_pretrained(folder)

    assert start([*TINY, f"model.name={folder}", f"run.dir={tmp_path}"]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert f"model.name='{folder}'" in line and end in line


# ---------------------------------------------------------------- the folder of a run

@pytest.fixture
def settings(tmp_path):
    """The settings of a run that has finished in `tmp_path`."""
    settings = [*TINY, "training.max_steps=1", f"run.dir={tmp_path}"]
    assert start(settings) == 0
    return settings


def test_a_run_that_has_finished_says_so_and_takes_more_steps(tmp_path, capsys, monkeypatch):
    only_evaluate = [*TINY, f"run.dir={tmp_path}", "training.max_steps=0"]
    assert start(only_evaluate) == 0
    with monkeypatch.context() as patch:  # It is never begun anew, and not evaluated again.
        patch.delattr(main, "evaluate")
        assert start(only_evaluate) == 0
    assert "this run has finished" in capsys.readouterr().out

    shutil.rmtree(tmp_path / "a" / "best")  # The next evaluation makes another.
    assert start([*only_evaluate, "training.max_steps=1", "validation.every=3"]) == 0

    assert step_of(tmp_path / "a" / "best") == 1

    lines = [line["step"] for line in read_jsonl(tmp_path / "a" / "metrics.jsonl")]
    assert lines == [0, 1, 1]


def test_a_start_in_a_folder_that_is_not_its_own_is_refused_and_changes_nothing_there(
        settings, tmp_path, capsys):
    """The folder of a run that lives, of another experiment, or with files of unknown origin."""
    def refusal(*more):
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert start([*settings, *more]) == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
        return the_only_error(capsys.readouterr().err)

    folder = run_folder(make_config(run__dir=str(tmp_path), run__name="a"))
    with folder.take_lock():
        assert f"{tmp_path / 'a'} is in use" in refusal()
    changes = "(model.precision: float32 -> bfloat16; training.seed: 0 -> 1)"
    assert changes in refusal("training.seed=1", "model.precision=bfloat16")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert "no checkpoint" in refusal()


def test_a_run_may_be_copied_like_any_folder(settings, tmp_path):
    shutil.copytree(tmp_path / "a", tmp_path / "copied" / "a")

    resumed = [*settings, f"run.dir={tmp_path / 'copied'}", "training.max_steps=2"]
    assert start(resumed) == 0

    assert step_of(tmp_path / "copied" / "a" / "last") == 2


def with_a_folder_of_its_own(folder, *arguments):
    """A rank on a machine whose disk the other machines don't share."""
    run_without_curves(*arguments, f"run.dir={folder}/{RANK}")


def test_ranks_refuse_to_begin_again_where_another_machine_has_a_newer_checkpoint(
        settings, tmp_path):
    """After a restart a machine with an older checkpoint may be the first. One with an older one
    that isn't the first is no harm, because only rank 0 reads."""
    shutil.copytree(tmp_path / "a", tmp_path / "1" / "a")

    result = ranks(2, with_a_folder_of_its_own, str(tmp_path), *TINY)

    assert result.codes == [2, 2]
    line = the_only_error(result.stderr)
    assert "rank 1 " in line and "step 1 " in line and f"{tmp_path / '0' / 'a'}" in line
    assert not (tmp_path / "0" / "a" / "checkpoints").exists()


def with_small_files(limit, *arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_without_curves(*arguments)


def test_a_disk_that_takes_no_more_is_one_line_and_the_former_checkpoints_stay(settings, tmp_path):
    before = outcome(tmp_path / "a")

    # A limit on the size of a file stands for a full disk. The weights in best/, 5.5 MB, still fit.
    # A checkpoint, which has two moments of each weight too, does not.
    limit = 8_000_000
    result = ranks(1, with_small_files, limit, *settings, "training.max_steps=3")

    assert result.returncode == 2
    assert f"{tmp_path / 'a'} " in the_only_error(result.stderr)
    saved = sorted(path.name for path in tmp_path.glob("a/checkpoints/step-*"))
    assert saved == ["step-000000", "step-000001"]
    assert outcome(tmp_path / "a")["tensors"] == before["tensors"]


# ---------------------------------------------------------------- tasks that fail

@pytest.mark.parametrize(("fault", "says"), [
    ("def load(*_):\n    __import__('sys').exit(0)\n", "line 3, in load\n"),
    ("def reward_function(*_):\n    raise OSError(5, 'mine')\n", "The completion was")])
def test_a_task_that_leaves_or_fails_is_shown_with_its_line_and_is_no_success(
        fault, says, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"from countdown import *\n{fault}")

    assert start([*TINY, f"task.name={tmp_path / 'own.py'}", f"run.dir={tmp_path}"]) == 1

    said = capsys.readouterr().err
    assert said.count("Traceback") == 1
    assert 'own.py", line 3, in ' in said and says in said
    assert "cannot be written" not in said  # An OSError of a task is none of the run's folder.
    assert not (tmp_path / "a" / "summary.json").exists()


@pytest.mark.parametrize(("parts", "says"), [
    ({"format": math.nan, "answer": 0}, "nan for format"),
    ({"format": 0, "answer": -2e9}, "-2000000000.0 for answer"),
    ({"format": 0, "answer": -1}, "-1.0 for answer"),
    ({"format": 0.5}, "answer")], ids=str)
def test_a_reward_without_a_number_up_to_1e9_for_each_part_is_an_error_with_the_completion(
        parts, says):
    task = load_task(make_config())
    task.reward_function = lambda completion, row: parts

    with pytest.raises((KeyError, ValueError, UserError), match=says) as raised:
        grade(task, "said", {})

    assert "'said'" in raised.value.__notes__[0]


# ---------------------------------------------------------------- numbers that are not finite

def with_one_bad_rank(*arguments):
    """main.py, except that on rank 1 no gradient is finite but those of steps 1 and 3, and that
    step 6 has nothing to learn from."""
    learn = main.learn

    def bad_learn(run, answers):
        if RANK == 1 and run.step not in (1, 3):
            answers[0].advantage = math.inf
        if run.step == 6:  # There's nothing to learn from, which is no sign that all is well.
            answers = [replace(answer, advantage=0.0) for answer in answers]
        return learn(run, answers)

    main.learn = bad_learn
    run_without_curves(*arguments)


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_five_end_the_run(tmp_path):
    """Each save checks that all ranks have the same finite weights."""
    result = ranks(2, with_one_bad_rank, *SMALL, f"run.dir={tmp_path}", "training.max_steps=20",
                   "training.num_samples_per_step=4")  # So there is a signal in steps 1 and 3.

    assert result.codes == [2, 2], result.stderr
    line = the_only_error(result.stderr)
    assert "step 9: " in line and "training.learning_rate" in line
    steps = training_steps(tmp_path / "a")
    assert [step["updated"] for step in steps] == [1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert (steps[1]["loss"], steps[1]["grad_norm"]) == (None, None)


# Who notices after the step: the check in `save`, or else the sampling of the next step.
@pytest.mark.parametrize("every", [1, 100], ids=["as it is saved", "as it is sampled from"])
def test_weights_out_of_range_end_in_one_line_and_are_never_saved(
        every, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        main, "learning_rate_at", lambda step, training: 1e-4 if step < 3 else 1e9)

    assert start([*SMALL, f"run.dir={tmp_path}", "training.max_steps=9",
                  f"checkpoint.every={every}"]) == 2

    line = the_only_error(capsys.readouterr().err)
    assert "training.learning_rate" in line
    saved = [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()]
    assert sorted(saved) == (["step-000001", "step-000002"] if every == 1 else ["step-000000"])


# ---------------------------------------------------------------- ranks and GPUs

def test_on_a_gpu_attention_is_not_cudnns_and_a_slow_rank_is_waited_for(monkeypatch):
    asked = {}
    switches = []
    monkeypatch.setattr(ranks_of_machinery, "DEVICE", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switches.append)
    monkeypatch.setattr(torch.distributed, "init_process_group",
                        lambda backend, **how: asked.update(how, backend=backend))

    ranks_of_machinery.join()

    assert switches == [False]
    assert asked["backend"] == "cpu:gloo,cuda:nccl"
    assert asked["timeout"] > timedelta(minutes=30)  # as gloo has it; nccl's is 10 minutes


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


def test_one_ranks_mistake_is_said_once_and_again_in_torchruns_report(tmp_path):
    """Here one rank lacks memory, which is a mistake too, because the user can mend it."""
    (tmp_path / "own.py").write_text(
        "import os\nfrom countdown import *\ndef load(*_):\n"
        "    if os.environ['RANK'] == '1': raise MemoryError\n"
        "    return [{'prompt': str(i)} for i in range(99)]\n")

    result = torchrun(2, "main.py", *TINY, f"task.name={tmp_path / 'own.py'}",
                      f"run.dir={tmp_path}")

    assert result.returncode == 1  # This is torchrun's own.
    lines = result.stderr.splitlines()
    assert sum(line.startswith("error: out of memory in phase read") for line in lines) == 1
    assert result.stderr.count("traceback : error: out of memory in phase read") == 2
    assert result.stderr.count("exitcode  : 2") == result.stderr.count("exitcode  : ") == 2


# ---------------------------------------------------------------- secrets

def test_nothing_of_the_environment_is_written_or_said(tmp_path):
    """Neither the password of MLflow, which is used, nor the environment as a whole. A server that
    is not there costs one warning, and no training."""
    secret = "hunter2-hunter2"

    # Nobody listens on port 9, so MLflow has an error to tell.
    result = ranks(1, run_without_curves, *TINY, f"run.dir={tmp_path}", "logging.mlflow=true",
                   "training.max_steps=1",
                   HF_TOKEN=secret, SOME_PASSWORD=secret, MLFLOW_TRACKING_PASSWORD=secret,
                   MLFLOW_TRACKING_URI=f"http://me:{secret}@127.0.0.1:9")

    assert result.returncode == 0
    assert result.stdout.count("warning: MLflow failed") == 1
    assert secret not in result.stdout + result.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()
