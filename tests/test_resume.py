"""A run that is interrupted, by whatever it is, ends as the one that is not: tolerance 0."""

import json
import os
import random
import shutil
import signal
import time

import pytest
from conftest import (
    EVERY_STEP,
    SIL,
    SMALL,
    interrupted,
    outcome,
    read_jsonl,
    run_without_curves,
    start,
    uninterrupted,
)
from processes import ranks

import main
from machinery import on_ctrl_c
from machinery.runs import numbered_folders

# In mixed precision the sampler has weights of its own, which a resumed run has to make anew.
STEPS = [*EVERY_STEP, "model.precision=mixed"]
ONE_RANK = ["training.num_samples_per_step=4"]  # The same batch as that of two ranks.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run of three steps on two ranks. Tests work on copies."""
    folder = tmp_path_factory.mktemp("whole")
    uninterrupted(2, folder, *STEPS)
    return folder / "a"


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "a", symlinks=True)


# ---------------------------------------------------------------- SIGKILL and stop signals

def test_a_killed_run_equals_the_uninterrupted_one(whole, tmp_path):
    strikes = [{"rank": 0, "point": "saving: linked"},  # The best model, before step 1.
               {"rank": 1, "point": "learning"},
               {"rank": 0, "point": "saving: written", "passing": 2},  # The checkpoint of step 2.
               {"rank": 0, "point": "sampling", "passing": 2}]  # In step 3.
    for strike in strikes:
        result = interrupted(2, {**strike, "how": "kill all"}, tmp_path, *STEPS)
        assert result.codes == [-signal.SIGKILL] * 2, (strike, result.stderr)

    result = interrupted(2, {}, tmp_path, *STEPS)

    assert result.returncode == 0, result.stderr
    assert "step-000002\n" in result.stdout
    assert outcome(tmp_path / "a") == outcome(whole)


def assert_ended_by(how, result, folder):
    """All ranks end by the signal itself, soon. Only for Ctrl-C rank 0 prints a line."""
    struck_at, _ = (folder / "struck").read_text().splitlines()[-1].split(" ", 1)
    assert time.time() - float(struck_at) < 20  # torchrun would kill after 30.
    codes = [-signal.Signals[how]] * len(result.codes)
    if how == "SIGINT":
        # `ranks` ends the others as soon as one is gone, so SIGTERM may be faster than its own end.
        assert result.codes[0] in (130, -signal.SIGTERM)
        codes[0] = result.codes[0]
    assert result.codes == codes, result.stderr
    assert (result.codes[0] == 130) <= result.stderr.count("stopped by") <= (how == "SIGINT")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_a_stop_signal_ends_every_rank_at_once_and_the_next_start_resumes(how, whole, tmp_path):
    strike = {"rank": 0, "point": "sampling", "passing": 2, "how": how}  # In step 2.

    stopped = interrupted(2, strike, tmp_path, *STEPS)
    assert_ended_by(how, stopped, tmp_path)
    result = interrupted(2, {}, tmp_path, *STEPS)

    assert result.returncode == 0, result.stderr
    assert "step-000001\n" in result.stdout
    assert outcome(tmp_path / "a") == outcome(whole)


SAVING_BEST = ["saving: best", "saving: linked"]
SAVING = ["saving: tensors", "saving: written", "saving: renamed", "saving: synced",
          "saving: removal", "saving: removed"]
ON_ANY_RANK = ["sampling", "learning", "updated", "evaluating"]
POINTS = [*SAVING, *ON_ANY_RANK, *ON_ANY_RANK, "sampling", "sampling", "logging", "evaluated"]


@pytest.mark.soak
@pytest.mark.parametrize(("how", "num_ranks", "learning"), [
    ("kill all", 1, []), ("kill all", 2, SIL),
    ("kill all", 3, ["training.shard=true"]), ("SIGINT", 2, []), ("SIGHUP", 2, SIL)], ids=str)
def test_a_run_struck_twenty_times_equals_the_uninterrupted_one(how, num_ranks, learning, tmp_path):
    stream = random.Random(f"{how} {num_ranks} {learning}")
    steps = [*learning, *EVERY_STEP, "training.max_steps=24"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)
    # The first evaluation always is the best so far. A better one may never come.
    for point in [*SAVING_BEST, *stream.sample(POINTS, len(POINTS))]:
        once = point in SAVING_BEST or point.startswith("eval")
        strike = {"point": point, "how": how, "passing": 1 if once else stream.choice([1, 2]),
                  "rank": stream.randrange(num_ranks) if point in ON_ANY_RANK else 0}
        result = interrupted(num_ranks, strike, tmp_path / "struck", *steps)
        if how == "kill all":
            assert result.codes == [-signal.SIGKILL] * num_ranks, (strike, result.stderr)
        else:
            assert_ended_by(how, result, tmp_path / "struck")

    result = interrupted(num_ranks, {}, tmp_path / "struck", *steps)

    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "struck" / "struck").read_text().splitlines()) == 20
    assert outcome(tmp_path / "struck" / "a") == expected


def press_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_ctrl_c()
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_one_line():
    result = ranks(1, press_ctrl_c)

    assert result.returncode == 130
    assert result.stderr == "\nstopped by Ctrl-C; the same command resumes what was saved\n"


# ---------------------------------------------------------------- damage

@pytest.mark.parametrize("name", ["state.json", "tensors-1.safetensors"])
def test_a_damaged_checkpoint_does_not_pass_for_a_whole_one(name, copied, tmp_path, capsys):
    path = copied / "checkpoints" / "step-000003" / name
    content = path.read_bytes()

    for damaged in (b"", content[:-1], random.Random(0).randbytes(len(content)), None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert start([*SMALL, *STEPS, *ONE_RANK, f"run.dir={tmp_path}"]) == 2

    said = capsys.readouterr().err
    assert said.count(str(path.parent)) == said.count("error: ") == said.count("\n") == 4


# ---------------------------------------------------------------- the best model

def evaluate_as(qualities: str, folder: str, more: str):
    """Each evaluation finds these values of best_of_n. Step 3 is the last, and is not saved."""
    values = iter(json.loads(qualities))
    in_truth = main.evaluation_metrics
    main.evaluation_metrics = lambda *of: {**in_truth(*of), "eval/best_of_n": next(values)}
    run_without_curves(*SMALL, f"run.dir={folder}", "training.max_steps=4", "validation.every=1",
                       "checkpoint.every=2", *json.loads(more))


def test_best_is_never_of_a_step_that_was_undone(tmp_path):
    """Step 3 is the best, and is not saved. After the kill it comes out worse, because other
    samples are drawn."""
    folder = tmp_path / "a"
    ranks(1, evaluate_as, "[0.1, 0.2, 0.3, 0.9]", str(tmp_path), "[]")  # It fails in step 4.
    assert (folder / "best").resolve().name == "best-000003"

    result = ranks(1, evaluate_as, "[0.15, 0.25]", str(tmp_path), '["sampling.max_rows=3"]')

    assert result.returncode == 0, result.stderr
    summary = json.loads((folder / "summary.json").read_text())
    training = json.loads((folder / "best" / "training.json").read_text())
    assert summary["best"]["step"] == training["step"] == 2
    assert summary["best"]["eval/best_of_n"] == training["eval/best_of_n"] == 0.3


def test_a_best_model_that_is_gone_is_made_by_the_next_evaluation(copied, tmp_path):
    shutil.rmtree((copied / "best").resolve())

    assert start([*SMALL, *STEPS, *ONE_RANK, f"run.dir={tmp_path}", "training.max_steps=4"]) == 0

    assert (copied / "best").resolve().name == "best-000004"


def test_a_users_own_folders_are_not_taken_for_ours(tmp_path):
    for name in ("best-mine", "best-1", "best-000007", "best-000012-2", "best-000012"):
        (tmp_path / name).mkdir()

    found = [path.name for path in numbered_folders(tmp_path, "best")]

    assert found == ["best-000012", "best-000007"]


# ---------------------------------------------------------------- other ranks

def test_another_number_of_ranks_resumes_with_the_same_batch_alone(copied, tmp_path, capsys):
    settings = [*SMALL, *STEPS, f"run.dir={tmp_path}", "training.max_steps=4"]

    assert start(settings) == 2
    assert "training.num_samples_per_step: 4 -> 2" in capsys.readouterr().err
    assert start([*settings, *ONE_RANK]) == 0

    steps = [entry["step"] for entry in read_jsonl(copied / "metrics.jsonl") if "reward" in entry]
    assert steps == [1, 2, 3, 4]
