"""What a user, a disk, a server or another rank can do wrong: each answered in one line in all, by
all ranks, soon, and nothing lost."""

import contextlib
import gc
import hashlib
import io
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import matplotlib.figure
import pytest
import safetensors.torch
import torch
from conftest import DRAW_CURVES, make_config, read_jsonl, run_main, start, stay
from processes import ROOT, ranks
from test_resume import SMALL, outcome, run_without_curves, uninterrupted, without_files
from torch.distributed import distributed_c10d

import logger
import main
from machinery import checkpoints, launch
from machinery import ranks as ranks_of_machinery

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
         ["training.learning_rat=1", "Did you mean training.learning_rate?"]),
        (["model.attention=flash_attention_9"],
         ["model.name=", "model.attention='flash_attention_9'"]),
        (["training.max_steps=many"], ["training.max_steps='many'", "integer"]),
        (["training.learning_rate=.nan"], ["training.learning_rate=nan", "finite number"]),
        (["training.k_best_of_n=[1,1]"], ["training.k_best_of_n=[1, 1]", "[G, G]"]),
        (["training.learning_type=sil", "training.k_best_of_n=[4,4]"],
         ["training.k_best_of_n=[4, 4]", "[k, n], like [2, 8]"]),
        (["--config", str(folder / "none.yaml")], ["none.yaml", "not there"]),
        (["--config", write("broken.yaml", "training: [")], ["broken.yaml", "not YAML"]),
        (["task.name=none.py"], ["task.name='none.py'"]),
        (["task.name=" + write("no_text.py",
                               task.format(load="return [{'prompt': None, 'problem': 1}]"))],
         ["no_text.py", "row 1", "None"]),
        (["task.name=" + write("greedy.py", task.format(load=greedy))],
         ["out of memory in phase read", "data.max_rows (200)"]),
        (["task.reward_weights={answer: 1, form: 1}"],
         ["task.reward_weights", "form", "format, answer"]),
        (["model.lora_rank=4", "model.lora_targets=[q]"],
         ["model.lora_targets", "no layer named q"]),
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
        ([f"model.name={folder / 'none'}"], ["model.name", str(folder / "none"), "no such folder"]),
        (["model.name=empty model"], ["model.name", "empty model", "folder with a model"]),
        (["model.name=no weights"], ["model.name", "no weights", "cannot be loaded"]),
        (["model.name=someone/model"], ["model.name", "someone/model", "within reach"]),
        *(([f"model.name={name}"], [f"model.name={shown!r}", "no such folder"])
          for name, shown in (("tiny/modle", "tiny/modle"), ("./nope", "./nope"),
                              ("runs/a/best", "runs/a/best"), ("a/b/c", "a/b/c"), ("file", "file"),
                              ("~/nope", str(Path("~/nope").expanduser())))),
        *(([f"data.dataset={name}"], ["data.dataset", f"no file or folder '{name}'"])
          for name in ("./nope", "a/b/c", "runs/nope", "/nope", "nope.parquet")),
        ([f"model.name={no_eos}"], ["model.name", "end-of-text"]),
        ([f"model.name={no_template}", "data.prompt_style=chat"],
         ["prompt_style", "chat template", "base"]),
        ([f"model.name={own_code}"], ["model.name", "own code", "cannot be loaded"]),
        (["training.max_new_gen_tokens=500"],
         ["training.max_new_gen_tokens=500", "512", "at most 46"]),
        ([f"run.dir={in_the_way}"], ["run.dir", in_the_way]),
        ([f"run.resume={folder / 'none'}"], ["run.resume", str(folder / "none"), "checkpoint"]),
        (["run.resume=never"], ["run.resume='never'", "to begin anew, set run.name"]),
        (["run.name=group/one"], ["run.name='group/one'", "should match pattern"]),
        ([f"run.resume={folder / 'runs' / 'other'}", f"model.name={no_template}"],
         ["another experiment", "model.name: ", "set run.name, without run.resume, to begin"]),
    ]


def forget_the_folder():
    """After a start that was refused. The folder is taken as long as its lock is an open file, and
    what Ctrl-C does has hold of it. In a process of its own both end with the start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.collect()


def make_each_mistake(all_arguments, folder):
    """On each rank: leaves what main.py answered, and how soon."""
    end_process, launch.end_process = launch.end_process, stay
    answers = []
    for number, arguments in enumerate(all_arguments):
        said, started = io.StringIO(), time.time()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each start meets anew
        with contextlib.redirect_stderr(said):
            code = start(arguments)
        forget_the_folder()
        answers.append({"code": code, "said": said.getvalue(), "seconds": time.time() - started})
    (folder / f"answers-{main.RANK}.json").write_text(json.dumps(answers))
    end_process(0)


def test_a_mistake_that_ranks_share_is_one_line_in_all_with_the_value_and_the_remedy(tmp_path):
    mistakes = make_mistakes(tmp_path)
    assert start([*TINY, "training.max_steps=1", f"run.dir={tmp_path / 'runs'}",
                  "run.name=other", "training.num_samples_per_step=4"]) == 0
    mistake_arguments = [[*TINY, "run.dir=runs", "training.max_steps=1", *arguments]
                         for arguments, _ in mistakes]
    result = ranks(2, make_each_mistake, mistake_arguments, tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    answers = [json.loads((tmp_path / f"answers-{rank}.json").read_text()) for rank in (0, 1)]
    for (arguments, expected), *of_ranks in zip(mistakes, *answers, strict=True):
        said = "".join(answer["said"] for answer in of_ranks)
        assert [answer["code"] for answer in of_ranks] == [2, 2], (arguments, said)
        # Rank 0 says it, whichever rank has met it.
        last = of_ranks[0]["said"].splitlines()[-1]
        assert last.startswith("error: ") and all(piece in last for piece in expected), (
            arguments, said)
        assert said.count("error: ") == 1 and "Traceback" not in said, (arguments, said)
        # nobody waits for anybody
        assert max(answer["seconds"] for answer in of_ranks) < 60
    assert (not list((tmp_path / "runs" / "a").glob("checkpoints/*"))
            and not (tmp_path / "it has run").exists())


def test_a_prompt_too_long_in_tokens_is_found_however_short_it_is_in_characters(tmp_path, capsys):
    """Before the first step: with learned positions it would end in an index error in mid-run."""
    (tmp_path / "own.py").write_text(
        "from countdown import REWARD_WEIGHTS, SOLVED, reward_function\n"
        "def load(dataset, max_rows):\n"
        "    prompts = [f'Combine the numbers {i}, 7, 8. ' * 8 for i in range(200)]\n"
        "    return [{'prompt': prompt} for prompt in [*prompts, chr(0x1F600) * 150]]\n")
    assert start([*TINY, f"task.name={tmp_path / 'own.py'}", f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "with a prompt of 600 tokens it exceeds the 512 that 'tiny/model' can process" in said


def test_a_checkpoint_of_another_model_under_the_same_name_is_one_line(tmp_path, model_folder):
    """Which only the rank that reads it finds out."""
    settings = [*TINY, f"run.dir={tmp_path}", f"model.name={tmp_path / 'model'}"]
    shutil.copytree(model_folder("llama"), tmp_path / "model")
    assert start([*settings, "training.max_steps=1", "training.num_samples_per_step=4"]) == 0
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(model_folder("gpt2"), tmp_path / "model")
    result = ranks(2, run_without_curves, *settings, "training.max_steps=2")
    assert result.codes == [2, -signal.SIGTERM], result.stderr
    assert (f"error: {tmp_path}/a/checkpoints/step-000001 does not fit the model "
            f"'{tmp_path}/model', or cannot be read" in result.stderr)
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(tmp_path):
    folder = checkpoints.RunFolder(make_config(run__dir=str(tmp_path), run__name="a"))
    lock = folder.take_lock()
    result = ranks(2, run_without_curves, *TINY, f"run.dir={tmp_path}")
    assert result.stderr.count("error: ") == 1 and result.codes == [2, 2]
    assert (f"error: {tmp_path / 'a'} is in use by process {os.getpid()} on {socket.gethostname()}"
            ": wait for its end" in result.stderr)
    assert "main.py\", line" not in result.stderr
    lock.close()
    assert start([*TINY, "training.max_steps=0", f"run.dir={tmp_path}"]) == 0


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
    run_main(*arguments)


@pytest.mark.skipif(sys.platform != "linux",
                    reason="only Linux says how much address space a process uses")
@pytest.mark.parametrize(("function", "num_ranks", "questions", "advice"), [
    ("generate", 1, 64, "sample: lower sampling.max_rows (1024), then training.max_new_gen"),
    ("policy_gradient", 2, 16, "learn: lower training.tokens_per_micro_batch (100000), then set"),
])
def test_running_out_of_memory_ends_with_the_key_to_lower_on_whichever_rank_it_happens(
        function, num_ranks, questions, advice, tmp_path):
    result = ranks(num_ranks, short_of_memory, function, *TINY, f"run.dir={tmp_path}",
                   "sampling.max_rows=1024", f"training.num_samples_per_step={questions}",
                   "training.k_best_of_n=[16,16]", "training.max_new_gen_tokens=64",
                   "training.tokens_per_micro_batch=100000", "validation.best_of_n=1")
    assert f"error: out of memory in phase {advice}" in result.stderr, result.stderr
    assert "main.py\", line" not in result.stderr and result.stderr.count("error: ") == 1


# ---------------------------------------------------------------- disk

def with_small_files(limit, *arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run_without_curves(*arguments)


def test_a_disk_that_takes_no_more_is_one_line_and_the_former_checkpoint_stays(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["checkpoint.every=1", "run.dir=."]
    assert start([*TINY, *settings, "training.max_steps=2"]) == 0
    before = outcome(tmp_path / "a")
    # bytes in one file: more than metrics and samples need, less than a checkpoint
    limit = 8 * 2**20
    result = ranks(1, with_small_files, limit, *TINY, *settings, "training.max_steps=4",
                   cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert (last.startswith("error: a cannot be written to; "
                            "what was saved before is intact")
            and "Traceback" not in result.stderr)
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == [
        "step-000001", "step-000002"]
    assert outcome(tmp_path / "a")["tensors"] == before["tensors"]
    assert start([*TINY, *settings, "training.max_steps=4"]) == 0
    assert without_files(outcome(tmp_path / "a"))["step"] == "step-000004"


def test_a_full_disk_is_one_line_wherever_it_strikes(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def open_but_not_to_append(path, mode="r", **how):
        return full() if mode == "a" else open(path, mode, **how)

    monkeypatch.setattr(logger.Logger, "_draw_curves", DRAW_CURVES)
    for module, name, replacement in (
            (checkpoints, "open", open_but_not_to_append), (Path, "write_text", full),
            (matplotlib.figure.Figure, "savefig", full), (Path, "symlink_to", full),
            (os, "fsync", full), (checkpoints, "save_file", full)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, replacement, raising=False)
            assert start([*TINY, "training.max_steps=1", f"run.dir={tmp_path}",
                          f"run.name={name}"]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert (last.startswith(f"error: {tmp_path / name} cannot be written to")
                and "No space left on device" in last)


def test_an_error_that_has_nothing_to_do_with_the_folder_is_not_blamed_on_it_and_shown_at_once(
        tmp_path, monkeypatch, capsys):
    def gone(*_):
        raise OSError("no route to host")

    def doze(seconds, sleep=launch.time.sleep):
        assert seconds < 1
        sleep(seconds)

    monkeypatch.setattr(main, "compute_advantages", gone)
    monkeypatch.setattr(launch.time, "sleep", doze)
    assert start([*TINY, "training.max_steps=1", f"run.dir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said.endswith("OSError: no route to host\n") and "written" not in said


# ---------------------------------------------------------------- numbers

class Broken(main.Policy):
    """Makes the gradient of chosen update passes not finite, on one rank."""

    when, passes = (), 0

    def forward(self, answers):
        logprobs, entropies = super().forward(answers)
        if not torch.is_grad_enabled():  # as where a save looks at the model
            return logprobs, entropies
        Broken.passes += 1
        return logprobs * (float("nan") if Broken.passes in Broken.when else 1.0), entropies


def test_a_gradient_that_is_not_finite_is_skipped_and_counted_and_five_in_a_row_end_the_run(
        tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "Policy", Broken)
    settings = [*SMALL, "checkpoint.every=1", f"run.dir={tmp_path}",
                "training.num_samples_per_step=8"]  # so that there is a signal in each step
    Broken.when, Broken.passes = (4, 5), 0  # the first two are the warm-up's
    assert start([*settings, "training.max_steps=5"]) == 0
    assert "skipped: the gradient is not finite" in capsys.readouterr().out
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "reward" in entry]
    assert ([entry["non_finite"] for entry in steps] == [0, 1, 1, 0, 0]
            and [entry["updated"] for entry in steps] == [1, 0, 0, 1, 1])
    assert steps[1]["loss"] is None and steps[1]["grad_norm"] is None
    tensors = outcome(tmp_path / "a")["tensors"]
    saved = safetensors.torch.load_file(
        tmp_path / "a" / "checkpoints" / "step-000005" / "tensors-1.safetensors")
    assert all(torch.isfinite(value).all() for value in saved.values())

    Broken.when, Broken.passes = range(3, 100), 0
    assert start([*settings, "training.max_steps=20"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert (message.startswith("error: the gradient was not finite in 5 steps in a row, up "
                               "to step 10: lower training.learning_rate"))
    assert outcome(tmp_path / "a")["tensors"] == tensors


def without_signal(steps, monkeypatch):
    """In these steps no answer has an advantage, so nothing is run, and `Broken` counts no pass."""
    questions, compute_advantages, now = main.questions, main.compute_advantages, 0

    def counted(run):
        nonlocal now
        now = run.step
        return questions(run)

    def advantages(group, training, stream):
        answers = compute_advantages(group, training, stream)
        for answer in answers if now in steps else ():
            answer.advantage = 0.0
        return answers

    monkeypatch.setattr(main, "questions", counted)
    monkeypatch.setattr(main, "compute_advantages", advantages)


def test_a_step_without_a_signal_makes_up_for_none_that_was_not_finite(
        tmp_path, monkeypatch, capsys):
    """It neither counts among them, nor resets their count."""
    monkeypatch.setattr(main, "Policy", Broken)
    without_signal((3, 4), monkeypatch)
    Broken.when, Broken.passes = (4, 5, 6, 7, 8), 0  # steps 2, 5, 6, 7 and 8
    assert start([*SMALL, "checkpoint.every=1", f"run.dir={tmp_path}", "training.max_steps=9",
                  "training.num_samples_per_step=8"]) == 2
    said = capsys.readouterr().err
    assert "the gradient was not finite in 5 steps in a row, up to step 8" in said


def overflow_where_nothing_is_learned(folder, *arguments):
    """main.py, except that rank 1 has no signal, and the answer that it runs all the same has a
    loss that overflows, as a ratio or a KL term may."""
    compute_advantages, policy_loss = main.compute_advantages, main.policy_loss

    def none(*arguments):
        answers = compute_advantages(*arguments)
        for answer in answers if main.RANK == 1 else ():
            answer.advantage = 0.0
        return answers

    def overflowing(logprobs, *arguments):
        loss, watched = policy_loss(logprobs, *arguments)
        if main.RANK == 1:
            loss, watched = loss + logprobs.sum() * math.inf, {"clipped": torch.tensor(math.nan)}
        return loss, watched

    main.compute_advantages, main.policy_loss = none, overflowing
    run_main(*arguments)


def test_an_answer_run_for_the_sake_of_others_cannot_spoil_their_step(tmp_path):
    result = ranks(2, overflow_where_nothing_is_learned, tmp_path, *SMALL, "training.max_steps=1",
                   "training.num_samples_per_step=8", "training.updates_per_batch=2",
                   "training.clip=[0.2,0.2]", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    step, = (entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "reward" in entry)
    assert (step["updated"], step["non_finite"]) == (2, 0) and 0 <= step["clipped"] <= 1


def with_one_bad_rank(folder, *arguments):
    """main.py, except that on rank 1 the gradient of step 2 is not finite; each rank leaves a
    digest of its weights after every step."""
    training_step, policy_loss, step = main.training_step, main.policy_loss, 0

    def recorded(run):
        nonlocal step
        step = run.step + 1
        finite = training_step(run)
        weights = b"".join(parameter.detach().numpy().tobytes()
                           for parameter in run.model.parameters())
        with open(folder / f"weights-{main.RANK}", "a") as file:
            print(hashlib.sha256(weights).hexdigest(), file=file)
        return finite

    def bad_loss(*arguments):
        loss, watched = policy_loss(*arguments)
        return loss * (float("inf") if (main.RANK, step) == (1, 2) else 1.0), watched

    main.training_step, main.policy_loss = recorded, bad_loss
    run_main(*arguments)


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
    run_main(*arguments)


def test_a_rank_slower_than_the_default_timeout_is_waited_for(tmp_path):
    result = ranks(2, with_a_slow_rank, *TINY, "training.max_steps=1", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr


def test_going_on_with_other_settings(tmp_path, capsys):
    settings = [*TINY, "checkpoint.every=2", f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=2"]) == 0
    capsys.readouterr()
    assert start([*settings, "training.max_steps=2"]) == 0  # a finished run
    said = capsys.readouterr().out
    assert ("this run has finished before: raise training.max_steps, or set run.name to begin anew"
            in said)
    assert json.loads(said.splitlines()[-1]) == json.loads(
        (tmp_path / "a" / "summary.json").read_text())

    assert start([*settings, "training.max_steps=3", "training.tokens_per_micro_batch=100",
                  "validation.every=3"]) == 0
    said = capsys.readouterr().out
    for change in ("training.max_steps: 2 -> 3", "training.tokens_per_micro_batch: 8192 -> 100",
                   "validation.every: 10 -> 3"):
        assert f"changed since the checkpoint: {change}\n" in said
    assert "changed since the checkpoint: run." not in said

    assert start([*settings, "training.max_steps=4", "training.seed=1",
                  "training.learning_rate=0.01"]) == 2
    said = capsys.readouterr().err
    assert "(training.learning_rate: 0.001 -> 0.01; training.seed: 0 -> 1)" in said
    assert said.endswith(": set run.name, without run.resume, to begin anew\n")
    forget_the_folder()
    assert start([*settings, "training.max_steps=4"]) == 0
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")
            if "reward" in entry] == [1, 2, 3, 4]


def test_a_branch_that_ends_where_it_begins_is_evaluated_there(tmp_path, capsys):
    settings = [*TINY, "checkpoint.every=1", f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=3"]) == 0
    earlier = f"run.resume={tmp_path / 'a' / 'checkpoints' / 'step-000002'}"
    assert start([*settings, "run.name=b", earlier, "training.max_steps=2"]) == 0
    for name, step in (("a", 3), ("b", 2)):
        entries = read_jsonl(tmp_path / name / "metrics.jsonl")
        assert entries[-1]["step"] == step and "eval/solved" in entries[-1]
        assert json.loads((tmp_path / name / "summary.json").read_text())["steps"] == step
    assert (tmp_path / "b" / "best").resolve().name == "best-000002"


def test_folders_that_killed_processes_have_left_are_never_in_the_way_of_best(tmp_path):
    """And a user's own folders stay."""
    for name in ("best-000000", "best-000000-2", "best-mine", "best-1"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "model.safetensors").touch()
    assert start([*TINY, "training.max_steps=0", f"run.dir={tmp_path}"]) == 0
    best, = (tmp_path / "a").glob("best-0*")
    assert (tmp_path / "a" / "best").resolve() == best.resolve()
    assert (best / "model.safetensors").stat().st_size > 0
    for name in ("best-mine", "best-1"):
        assert (tmp_path / "a" / name / "model.safetensors").exists()


def test_a_link_to_best_that_is_lost_is_found_again(tmp_path, capsys):
    """As where a tool that copies no links has copied the run."""
    settings = [*TINY, f"run.dir={tmp_path}", "training.max_steps=1", "validation.every=1"]
    assert start(settings) == 0
    before = outcome(tmp_path / "a")
    (tmp_path / "a" / "best").unlink()
    (tmp_path / "a" / "best-mine").mkdir()
    assert start(settings) == 0
    assert outcome(tmp_path / "a")["best"] == before["best"]
    assert "is missing" not in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["best"] is not None


def test_a_start_that_is_refused_leaves_no_folder(tmp_path):
    settings = [*TINY, f"run.dir={tmp_path / 'runs'}", "training.max_steps=1"]
    assert start([*settings, "data.num_validation=999999"]) == 2
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('mine')")
    assert start([*settings, f"task.name={broken}"]) == 1
    assert not list((tmp_path / "runs").iterdir())


def test_what_is_saved_can_be_read_by_whom_the_umask_lets(tmp_path):
    mask = os.umask(0o027)
    try:
        assert start([*TINY, f"run.dir={tmp_path}", "training.max_steps=1",
                      "checkpoint.every=1"]) == 0
    finally:
        os.umask(mask)
    saved = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert {"model.safetensors", "tensors-1.safetensors"} <= {path.name for path in saved}
    assert {path.name: path.stat().st_mode & 0o777 for path in saved} == {
        path.name: 0o640 for path in saved}


def test_a_checkpoint_by_path_begins_a_branch_that_then_goes_on_by_itself(tmp_path, capsys):
    settings = [*TINY, "checkpoint.every=1", "validation.every=1", f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=3"]) == 0
    branch = [*settings, "run.name=b",
              f"run.resume={tmp_path / 'a' / 'checkpoints' / 'step-000002'}"]
    assert start([*branch, "training.max_steps=3"]) == 0
    branched, origin = outcome(tmp_path / "b"), outcome(tmp_path / "a")
    for same in ("metrics", "samples", "tensors", "step"):
        assert branched[same] == origin[same]
    best = json.loads((tmp_path / "b" / "summary.json").read_text())["best"]
    # not one of the origin's
    assert best["step"] == 3 and (tmp_path / "b" / "best").resolve().name == "best-000003"
    capsys.readouterr()
    assert start([*branch, "training.max_steps=4"]) == 0
    assert (f"resuming from {tmp_path / 'b' / 'checkpoints' / 'step-000003'}"
            in capsys.readouterr().out)


def test_other_ranks_with_the_same_batch_go_on_and_with_another_batch_do_not(tmp_path):
    uninterrupted(2, tmp_path, "training.max_steps=1")
    settings = [*SMALL, "training.max_steps=2", f"run.dir={tmp_path}"]
    result = ranks(1, run_without_curves, *settings)
    assert (result.returncode == 2 and
            "training.num_samples_per_step: 4 over all ranks -> 2 over all ranks" in result.stderr
            and "set run.name, without run.resume, to begin anew, or "
                "training.num_samples_per_step=4 to resume with the same batch" in result.stderr)
    result = ranks(1, run_without_curves, *settings, "training.num_samples_per_step=4")
    assert result.returncode == 0, result.stderr
    assert "ranks: 2 then, 1 now, so other answers are sampled" in result.stdout
    assert [entry["step"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")
            if "reward" in entry] == [1, 2]


def test_a_branch_leaves_the_run_that_it_comes_from_as_it_is(tmp_path, capfd):
    """Even where its newest checkpoint is damaged, or half deleted by its owner just now."""
    settings = [*TINY, "checkpoint.every=1", f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=2"]) == 0
    (tmp_path / "a" / "checkpoints" / "step-000002" / "state.json").unlink()
    before = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*"))
    branch = ["run.name=b", f"run.resume={tmp_path / 'a'}", "training.max_steps=2"]
    assert start([*settings, *branch]) == 0
    checkpoint = tmp_path / "a" / "checkpoints" / "step-000001"
    assert f"resuming from {checkpoint}\n" in capfd.readouterr().out
    assert before == sorted(path.relative_to(tmp_path / "a")
                            for path in (tmp_path / "a").rglob("*"))


def test_precision_that_follows_from_the_device_is_part_of_the_experiment(tmp_path, capsys):
    settings = [*TINY, f"run.dir={tmp_path}"]
    assert start([*settings, "training.max_steps=1", "model.precision=bfloat16"]) == 0
    assert "precision: bfloat16" in (tmp_path / "a" / "config.yaml").read_text()
    assert start([*settings, "training.max_steps=2"]) == 2
    assert "(model.precision: bfloat16 -> float32)" in capsys.readouterr().err


def meet_too_few(*arguments):
    ranks_of_machinery.TIME_TO_MEET = timedelta(seconds=1)
    os.environ["WORLD_SIZE"] = "3"
    ranks_of_machinery.WORLD_SIZE = 3
    run_main(*arguments)


def test_a_rank_that_never_comes_ends_the_others_with_one_line():
    result = ranks(2, meet_too_few, *TINY)
    assert result.codes[0] == 2 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "error: the ranks cannot reach each other" in result.stderr


def test_restarts_on_several_machines_ask_for_a_store_of_their_own():
    result = ranks(3, run_main, *TINY, GROUP_WORLD_SIZE="2", TORCHELASTIC_MAX_RESTARTS="3")
    assert result.returncode == 2 and result.stderr.count("error: ") == 1, result.stderr
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torchrun's default is taken for it")
@pytest.mark.parametrize(("chosen", "threads"), [({}, 2), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_ranks_share_the_cores_unless_the_user_says_how_many_threads(chosen, threads, monkeypatch):
    """Under torchrun, which sets OMP_NUM_THREADS=1 for its ranks where nobody has set it."""
    started_with = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    rank = ("import os, torch; from machinery import ranks; ranks.dist.init_process_group = "
            "lambda *_, **__: None; os.sched_getaffinity = lambda _: range(4); ranks.meet = "
            "lambda: None; ranks.join(); print(torch.get_num_threads())")
    torchrun = ("import os, subprocess, sys; os.environ.setdefault('OMP_NUM_THREADS', '1'); "
                f"subprocess.run([sys.executable, '-c', {rank!r}], check=True)")
    result = subprocess.run([sys.executable, "-c", torchrun], cwd=ROOT, capture_output=True,
                            text=True, check=True, env={**started_with, **chosen, "RANK": "0",
                                                        "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2",
                                                        "TORCHELASTIC_RUN_ID": "test"})
    assert int(result.stdout) == threads


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
