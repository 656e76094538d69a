"""What a user, a disk, a server or another rank can do wrong: each answered in one line, by all
ranks, soon, and nothing lost."""

import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import socket
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from conftest import read_jsonl, stay
from processes import ROOT, ranks
from test_resume import SMALL, outcome, run_without_curves, uninterrupted, without_files
from torch.distributed import distributed_c10d

import logger
import main

TINY = [*SMALL, "training.max_new_gen_tokens=16"]


# ---------------------------------------------------------------- mistakes

def make_mistakes(folder):
    """Arguments that are wrong, with what the answer must contain."""
    def write(name, text):
        (folder / name).write_text(text)
        return str(folder / name)

    model = ROOT / "tiny" / "model"
    shutil.copytree(model, folder / "no weights", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "empty model").mkdir()
    no_eos, no_template = folder / "no eos", folder / "no template"
    for path in (no_eos, no_template):
        shutil.copytree(model, path)
    settings = json.loads((no_eos / "tokenizer_config.json").read_text())
    (no_eos / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    (no_template / "chat_template.jinja").unlink()
    own_code = folder / "own code"
    shutil.copytree(model, own_code)
    settings = json.loads((own_code / "config.json").read_text())
    (own_code / "config.json").write_text(json.dumps({
        **settings, "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}}))
    (own_code / "mine.py").write_text(
        f"open({str(folder / 'it has run')!r}, 'w')\nclass MyConfig: pass\nclass MyModel: pass\n")
    problem, other = '{"nums": [1, 2, 3], "target": 6}\n', '{"nums": [1, 2, 4], "target": 7}\n'
    in_the_way = write("file", "")
    greedy = ("if os.environ['RANK'] == '1': raise MemoryError\n"
              "    return [{'prompt': str(i)} for i in range(999)]")
    task = ("import os\nfrom countdown import REWARD_WEIGHTS, SOLVED, reward_function\n"
            "def load(dataset, max_rows):\n    {load}\n")
    return [
        (["training.learning_rat=1"],
         ["training.learning_rat=1", "nearest is training.learning_rate"]),
        (["model.attention=flash_attention_9"],
         ["model.name=", "model.attention='flash_attention_9'"]),
        (["training.max_steps=many"], ["training.max_steps='many'", "integer"]),
        (["training.learning_rate=.nan"], ["training.learning_rate=nan", "number above 0"]),
        (["training.k_best_of_n=[1,1]"], ["training.k_best_of_n=[1, 1]", "[G, G]"]),
        (["training.learning_type=sil", "training.k_best_of_n=[4,4]"],
         ["training.k_best_of_n=[4, 4]", "k below n"]),
        (["--config", str(folder / "none.yaml")], ["none.yaml", "not there"]),
        (["--config", write("broken.yaml", "training: [")], ["broken.yaml", "not YAML"]),
        (["task.name=none.py"], ["task.name='none.py'"]),
        (["task.name=" + write("no_text.py",
                               task.format(load="return [{'prompt': None, 'problem': 1}]"))],
         ["no_text.py", "row 1", "None"]),
        (["task.name=" + write("greedy.py", task.format(load=greedy))],
         ["out of memory while reading the questions", "data.max_rows"]),
        (["task.reward_weights={answer: 1, form: 1}"],
         ["task.reward_weights", "form", "format, answer"]),
        (["model.lora_rank=4", "model.lora_targets=[q]"],
         ["model.lora_targets", "no layers named q"]),
        ([f"data.dataset={folder / 'none.jsonl'}"], ["data.dataset", "none.jsonl", "no file"]),
        (["data.dataset=" + write("empty.jsonl", "")], ["empty.jsonl", "no rows"]),
        (["data.dataset=" + write("other.jsonl", '{"question": 1}\n')],
         ["row 1", "nums and target"]),
        (["data.dataset=" + write("half.jsonl", problem + '{"nums": [1, 2.5], "target": 3}\n')],
         ["row 2", "2.5", "integers"]),
        (["data.dataset=" + write("two.jsonl", problem + other), "data.num_validation=2"],
         ["data.num_validation=2", "2 different problems"]),
        (["data.dataset=" + write("two.jsonl", problem + other), "data.num_validation=1"],
         ["2 ranks", "fewer"]),
        (["data.dataset=someone/numbers"], ["data.dataset", "someone/numbers", "hub"]),
        ([f"model.name={folder / 'none'}"], ["model.name", str(folder / "none"), "hub id"]),
        ([f"model.name={folder / 'empty model'}"],
         ["model.name", "empty model", "folder with a model"]),
        ([f"model.name={folder / 'no weights'}"], ["model.name", "no weights", "cannot be loaded"]),
        (["model.name=someone/model"], ["model.name", "someone/model", "within reach"]),
        ([f"model.name={no_eos}"], ["model.name", "end-of-text"]),
        ([f"model.name={no_template}", "data.prompt_style=chat"],
         ["prompt_style", "chat template", "base"]),
        ([f"model.name={own_code}"], ["model.name", "own code", "cannot be loaded"]),
        (["training.max_new_gen_tokens=500"],
         ["training.max_new_gen_tokens=500", "512", "at most 46"]),
        ([f"run.dir={in_the_way}"], ["run.dir", in_the_way]),
        ([f"run.resume={folder / 'none'}"], ["run.resume", str(folder / "none"), "checkpoint"]),
        ([f"run.resume={folder / 'runs' / 'other'}", f"model.name={no_template}"],
         ["another experiment", "model.name", "run.resume_anyway"]),
        ([f"run.resume={folder / 'runs' / 'other'}", "run.resume_anyway=true",
          f"model.name={folder / 'gpt2'}"],
         ["the weights of another model", "gpt2"]),
    ]


def make_each_mistake(all_arguments, folder):
    """On each rank: leaves what main.py answered, and how soon."""
    leave, main.leave = main.leave, stay
    # Rank 1 would wait here for rank 0 to speak first and torchrun to end both; but now they are to
    # go on to the next mistake.
    main.time = SimpleNamespace(sleep=lambda seconds: None if seconds >= 1 else time.sleep(seconds),
                                perf_counter=time.perf_counter)
    answers = []
    for arguments in all_arguments:
        said, started = io.StringIO(), time.time()
        with contextlib.redirect_stderr(said):
            code = main.main(arguments)
        answers.append({"code": code, "said": said.getvalue(), "seconds": time.time() - started})
    (folder / f"answers-{main.RANK}.json").write_text(json.dumps(answers))
    leave(0)


def test_a_mistake_is_one_line_with_the_value_and_the_remedy_on_every_rank(tmp_path, model_folder):
    mistakes = make_mistakes(tmp_path)
    shutil.copytree(model_folder("gpt2"), tmp_path / "gpt2")
    assert main.main([*TINY, "training.max_steps=1", f"run.dir={tmp_path / 'runs'}",
                      "run.name=other", "training.num_samples_per_step=4"]) == 0
    mistake_arguments = [[*TINY, f"run.dir={tmp_path / 'runs'}", "training.max_steps=1", *arguments]
                         for arguments, _ in mistakes]
    result = ranks(2, make_each_mistake, mistake_arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        answers = json.loads((tmp_path / f"answers-{rank}.json").read_text())
        for (arguments, expected), answer in zip(mistakes, answers, strict=True):
            assert answer["code"] == 2, (arguments, answer)
            last = answer["said"].splitlines()[-1]
            assert last.startswith("error: ") and all(piece in last for piece in expected), (
                arguments, answer)
            # nobody waits for anybody
            assert "Traceback" not in answer["said"] and answer["seconds"] < 60
    assert (not list((tmp_path / "runs" / "a").glob("checkpoints/*"))
            and not (tmp_path / "it has run").exists())


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives_and_every_rank_leaves_with_code_two(
        tmp_path):
    lock = logger.lock_folder(tmp_path / "a")
    result = ranks(2, run_without_curves, *TINY, f"run.dir={tmp_path}")
    assert result.stderr.count("error: ") == 1 and result.codes[0] == 2
    assert (f"error: {tmp_path / 'a'} is in use by process {os.getpid()} on {socket.gethostname()}"
            ": wait for its end" in result.stderr)
    assert "main.py\", line" not in result.stderr
    lock.close()
    assert main.main([*TINY, "training.max_steps=0", f"run.dir={tmp_path}"]) == 0


# ---------------------------------------------------------------- memory

def short_of_memory(function, *arguments):
    """main.py, except that on the last rank hardly any memory is left for one phase."""
    original = getattr(main, function)

    def with_little_memory(*arguments):
        if main.RANK == main.WORLD_SIZE - 1:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000, -1))
        try:
            return original(*arguments)
        finally:  # or what comes after, like drawing curves, would have none either
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    setattr(main, function, with_little_memory)
    main.main(list(arguments))


@pytest.mark.skipif(sys.platform != "linux",
                    reason="only Linux says how much address space a process uses")
@pytest.mark.parametrize(("function", "num_ranks", "questions", "advice"), [
    ("generate_completions", 1, 64, "sampling: lower sampling.max_rows from 1024 to 512"),
    ("policy_gradient", 2, 16, "learning: lower training.tokens_per_micro_batch from 100000 to "),
])
def test_running_out_of_memory_ends_with_the_key_to_lower_on_whichever_rank_it_happens(
        function, num_ranks, questions, advice, tmp_path):
    result = ranks(num_ranks, short_of_memory, function, *TINY, f"run.dir={tmp_path}",
                   "sampling.max_rows=1024", f"training.num_samples_per_step={questions}",
                   "training.k_best_of_n=[16,16]", "training.max_new_gen_tokens=64",
                   "training.tokens_per_micro_batch=100000", "validation.best_of_n=1")
    assert f"error: out of memory while {advice}" in result.stderr, result.stderr
    assert "main.py\", line" not in result.stderr and result.stderr.count("error: ") == 1


# ---------------------------------------------------------------- disk

def with_small_files(limit, *arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_without_curves(*arguments)


def test_a_disk_that_takes_no_more_is_one_line_and_the_former_checkpoint_stays(tmp_path):
    settings = ["checkpoint.every=1", f"run.dir={tmp_path}"]
    assert main.main([*TINY, *settings, "training.max_steps=2"]) == 0
    before = outcome(tmp_path / "a")
    # bytes in one file: more than metrics and samples need, less than a checkpoint
    limit = 8 * 2**20
    result = ranks(1, with_small_files, limit, *TINY, *settings, "training.max_steps=4")
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert (last.startswith(f"error: {tmp_path / 'a'} cannot be written to; "
                            "what was saved before is intact")
            and "Traceback" not in result.stderr)
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == [
        "step-000001", "step-000002"]
    assert outcome(tmp_path / "a")["tensors"] == before["tensors"]
    assert main.main([*TINY, *settings, "training.max_steps=4"]) == 0
    assert without_files(outcome(tmp_path / "a"))["step"] == "step-000004"


def test_a_full_disk_is_one_line_wherever_it_strikes(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    for module, name in ((logger.Logger, "_append"), (logger.Logger, "_draw_curves"),
                         (logger, "switch_best"), (logger.os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            assert main.main([*TINY, "training.max_steps=1", f"run.dir={tmp_path}",
                              f"run.name={name}"]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert (last.startswith("error: ") and str(tmp_path / name) in last
                and "No space left on device" in last)


# ---------------------------------------------------------------- numbers

class Broken(main.Policy):
    """Makes the gradient of chosen update passes not finite, on one rank."""

    when, passes = (), 0

    def forward(self, **batch):
        logprobs, entropies = super().forward(**batch)
        Broken.passes += 1
        return (logprobs * (float("nan") if Broken.passes in Broken.when else 1.0), entropies)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_and_too_many_in_a_row_end_the_run(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "Policy", Broken)
    settings = [*SMALL, "checkpoint.every=1", f"run.dir={tmp_path}", "training.max_bad_steps=3"]
    Broken.when, Broken.passes = (3, 4), 0  # the first is the warm-up's
    assert main.main([*settings, "training.max_steps=5"]) == 0
    assert "skipped: the gradient is not finite" in capsys.readouterr().out
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "reward" in entry]
    assert ([entry["non_finite"] for entry in steps] == [0, 1, 1, 0, 0]
            and [entry["updated"] for entry in steps] == [1, 0, 0, 1, 1])
    assert steps[1]["loss"] is None and steps[1]["grad_norm"] is None
    tensors = outcome(tmp_path / "a")["tensors"]
    saved = safetensors.torch.load_file(
        tmp_path / "a" / "checkpoints" / "step-000005" / "tensors.safetensors")
    assert all(torch.isfinite(value).all() for value in saved.values())

    Broken.when, Broken.passes = range(2, 100), 0
    assert main.main([*settings, "training.max_steps=20"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert (message.startswith("error: the gradient was not finite in 3 steps in a row")
            and "training.learning_rate" in message)
    assert (outcome(tmp_path / "a")["tensors"] == tensors
            and outcome(tmp_path / "a")["step"] == "step-000005")


def with_one_bad_rank(folder, *arguments):
    """main.py, except that on rank 1 the gradient of step 2 is not finite; each rank leaves a
    digest of its weights after every step."""
    training_step, policy_loss, step = main.training_step, main.policy_loss, 0

    def recorded(run):
        nonlocal step
        step = run.state.step + 1
        training_step(run)
        weights = b"".join(parameter.detach().numpy().tobytes()
                           for parameter in run.model.parameters())
        with open(folder / f"weights-{main.RANK}", "a") as file:
            print(hashlib.sha256(weights).hexdigest(), file=file)

    def bad_loss(*arguments):
        loss, watched = policy_loss(*arguments)
        return loss * (float("inf") if (main.RANK, step) == (1, 2) else 1.0), watched

    main.training_step, main.policy_loss = recorded, bad_loss
    main.main(list(arguments))


def test_a_rank_whose_gradient_is_not_finite_keeps_all_ranks_from_stepping(tmp_path):
    result = ranks(2, with_one_bad_rank, tmp_path, *SMALL, "training.max_steps=3",
                   f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "reward" in entry]
    assert [entry["non_finite"] for entry in steps] == [0, 1, 0]
    digests = [(tmp_path / f"weights-{rank}").read_text().split() for rank in (0, 1)]
    # after step 1, 2 and 3
    assert digests[0] == digests[1] and digests[0][0] == digests[0][1] != digests[0][2]


# ---------------------------------------------------------------- ranks and settings

def with_a_slow_rank(*arguments):
    """main.py on two ranks, the second of which takes two seconds to score, where the library by
    itself waits for one."""
    assert distributed_c10d._get_default_timeout("gloo") > timedelta(minutes=1)
    distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=1)
    score = main.score

    def slow_score(*arguments):
        if main.RANK == 1:
            time.sleep(2)
        score(*arguments)

    main.score = slow_score
    main.main(list(arguments))


def test_a_rank_slower_than_the_default_timeout_is_waited_for(tmp_path):
    result = ranks(2, with_a_slow_rank, *TINY, "training.max_steps=1", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr


def test_going_on_with_other_settings(tmp_path, capsys):
    settings = [*TINY, "checkpoint.every=2", f"run.dir={tmp_path}"]
    assert main.main([*settings, "training.max_steps=2"]) == 0
    capsys.readouterr()
    assert main.main([*settings, "training.max_steps=2"]) == 0  # a finished run
    said = capsys.readouterr().out
    assert ("this run has finished before: raise training.max_steps to go on with it, "
            "or set run.resume=never to run it anew" in said)
    assert json.loads(said.splitlines()[-1]) == json.loads(
        (tmp_path / "a" / "summary.json").read_text())

    assert main.main([*settings, "training.max_steps=3", "training.tokens_per_micro_batch=100",
                      "validation.every=3"]) == 0
    said = capsys.readouterr().out
    for change in ("training.max_steps: 2 -> 3", "training.tokens_per_micro_batch: 8192 -> 100",
                   "validation.every: 50 -> 3"):
        assert f"changed since the checkpoint: {change}\n" in said
    assert "changed since the checkpoint: run." not in said

    assert main.main([*settings, "training.max_steps=4", "training.seed=1",
                      "training.learning_rate=0.01"]) == 2
    assert ("(training.learning_rate: 0.001 -> 0.01; training.seed: 0 -> 1)"
            in capsys.readouterr().err)
    assert main.main([*settings, "training.max_steps=4", "training.learning_rate=0.01",
                      "run.resume_anyway=true"]) == 0
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")
            if "reward" in entry] == [1, 2, 3, 4]

    assert main.main([*settings, "training.max_steps=1", "run.resume=never"]) == 0
    assert main.main([*settings, "training.max_steps=1", "run.resume=never"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a-2", "a-3"}
    assert read_jsonl(tmp_path / "a-2" / "metrics.jsonl")[-1]["step"] == 1


def test_never_begins_anew_once_and_a_restart_of_it_goes_on(tmp_path, monkeypatch, capsys):
    settings = [*TINY, "checkpoint.every=1", f"run.dir={tmp_path}", "run.resume=never"]
    assert main.main([*settings, "training.max_steps=1"]) == 0
    assert main.main([*settings, "training.max_steps=1"]) == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    capsys.readouterr()
    assert main.main([*settings, "training.max_steps=2"]) == 0
    assert (f"going on from {tmp_path / 'a-2' / 'checkpoints' / 'step-000001'}"
            in capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a-2"}


def test_a_checkpoint_by_path_begins_a_branch_that_then_goes_on_by_itself(tmp_path, capsys):
    settings = [*TINY, "checkpoint.every=1", "checkpoint.keep=3", "validation.every=1",
                f"run.dir={tmp_path}"]
    assert main.main([*settings, "training.max_steps=3"]) == 0
    branch = [*settings, "run.name=b",
              f"run.resume={tmp_path / 'a' / 'checkpoints' / 'step-000002'}"]
    assert main.main([*branch, "training.max_steps=3"]) == 0
    branched, origin = outcome(tmp_path / "b"), outcome(tmp_path / "a")
    for same in ("metrics", "samples", "tensors", "step"):
        assert branched[same] == origin[same]
    best = json.loads((tmp_path / "b" / "summary.json").read_text())["best"]
    # not one of the origin's
    assert best["step"] == 3 and (tmp_path / "b" / "best").resolve().name == "best-000003"
    capsys.readouterr()
    assert main.main([*branch, "training.max_steps=4"]) == 0
    assert (f"going on from {tmp_path / 'b' / 'checkpoints' / 'step-000003'}"
            in capsys.readouterr().out)


def test_other_ranks_with_the_same_batch_go_on_and_with_another_batch_do_not(tmp_path):
    uninterrupted(2, tmp_path, "training.max_steps=1")
    settings = [*SMALL, "training.max_steps=2", f"run.dir={tmp_path}"]
    result = ranks(1, run_without_curves, *settings)
    assert (result.returncode == 2 and
            "training.num_samples_per_step: 4 over all ranks -> 2 over all ranks" in result.stderr)
    result = ranks(1, run_without_curves, *settings, "training.num_samples_per_step=4")
    assert result.returncode == 0, result.stderr
    assert ("1 ranks now, 2 at the checkpoint: the questions stay the same, "
            "the answers that are sampled will differ" in result.stdout)
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")
            if "reward" in entry] == [1, 2]


def test_what_a_run_chose_from_its_machine_it_keeps(tmp_path):
    settings = [*TINY, f"run.dir={tmp_path}"]
    assert main.main([*settings, "training.max_steps=1", "model.precision=bfloat16"]) == 0
    assert main.main([*settings, "training.max_steps=2"]) == 0
    assert "precision: bfloat16" in (tmp_path / "a" / "config.yaml").read_text()


# ---------------------------------------------------------------- secrets

def test_nothing_of_the_environment_is_written_or_said(tmp_path, nobody_listens):
    secret = "hunter2-hunter2"
    secrets = {"HF_TOKEN": secret, "SOME_PASSWORD": secret, "MLFLOW_TRACKING_PASSWORD": secret}
    settings = [*TINY, "training.max_steps=1", f"run.dir={tmp_path}", "logging.mlflow=true"]
    result = ranks(1, run_without_curves, *settings, **secrets,
                   MLFLOW_TRACKING_URI=f"http://me:{secret}@{nobody_listens}")
    assert result.returncode == 0 and "MLflow failed" in result.stdout
    assert secret not in result.stdout + result.stderr
    result = ranks(1, run_without_curves, *settings, "run.name=b", **secrets, cwd=tmp_path,
                   MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (result.returncode == 0 and "MLflow failed" not in result.stdout
            and secret not in result.stdout + result.stderr)
    assert (tmp_path / "mlflow.db").stat().st_size > 0
    assert not any(secret.encode() in path.read_bytes()
                   for path in tmp_path.rglob("*") if path.is_file())
