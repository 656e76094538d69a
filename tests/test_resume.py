"""A run that is interrupted, by whatever it is, ends as the one that is not: tolerance 0."""

import json
import os
import random
import re
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
    without_files,
)
from processes import ranks

from machinery import disk, on_ctrl_c

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
    struck_at, point = (folder / "struck").read_text().splitlines()[-1].split(" ", 1)
    assert time.time() - float(struck_at) < 20  # torchrun would kill after 30.
    codes = [-signal.Signals[how]] * len(result.codes)
    if how == "SIGINT":
        # `ranks` ends the others as soon as one is gone, so SIGTERM may be faster than its own end.
        assert result.codes[0] in (130, -signal.SIGTERM)
        codes[0] = result.codes[0]
        assert f"\nstopped by Ctrl-C; {newest_saved(folder, point)}" in result.stderr
    assert result.codes == codes, result.stderr
    assert result.stderr.count("stopped by") == (how == "SIGINT")
    assert "Traceback" not in result.stderr


def newest_saved(folder, point):
    """What a run that was struck at this point knows of its checkpoints."""
    saved = sorted((folder / "a").glob("checkpoints/step-*"))
    if point in ("saving: renamed", "saving: synced"):
        saved.pop()  # That one is not known to be on the disk.
    return f"saved up to {saved[-1]};" if saved else "nothing is saved yet"


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
    ("kill all", 1, []), ("kill all", 2, [*SIL, "training.refill=2"]),
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


def fork_and_press_ctrl_c():
    """As a reward may fork, and as a terminal sends SIGINT to all processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_ctrl_c(lambda: "nothing is saved yet")
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, b"here")  # A signal that comes sooner is lost in the fork.
        while True:  # A signal just before a long sleep would wait for its end.
            time.sleep(0.01)
    os.read(readable, 4)
    os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_one_line_also_where_a_reward_has_forked():
    result = ranks(1, fork_and_press_ctrl_c)

    assert result.returncode == 130
    assert result.stderr == "\nstopped by Ctrl-C; nothing is saved yet\n"


# ---------------------------------------------------------------- damage

@pytest.mark.parametrize("name", ["state.json", "tensors-1.safetensors"])
def test_a_damaged_checkpoint_does_not_pass_for_a_whole_one(name, copied):
    checkpoint = copied / "checkpoints" / "step-000003"
    content = (checkpoint / name).read_bytes()
    assert disk.read_checkpoint(checkpoint) is not None

    for damaged in (b"", b"{}", b"[]", content[:-1], random.Random(0).randbytes(len(content))):
        (checkpoint / name).write_bytes(damaged)
        assert disk.read_checkpoint(checkpoint) is None
    (checkpoint / name).unlink()
    assert disk.read_checkpoint(checkpoint) is None


def test_a_damaged_checkpoint_is_set_aside_and_the_run_ends_the_same(whole, copied, tmp_path):
    os.truncate(copied / "checkpoints" / "step-000003" / "tensors-1.safetensors", 99)

    result = ranks(2, run_without_curves, *SMALL, *STEPS, f"run.dir={tmp_path}")

    assert result.returncode == 0, result.stderr
    assert "step-000003 is damaged" in result.stdout
    assert "step-000002\n" in result.stdout
    found = outcome(copied)
    assert any(re.fullmatch(r"damaged-\d+-step-000003", name) for name in found["files"])
    assert without_files(found) == without_files(outcome(whole))


@pytest.mark.parametrize("lost", ["link", "folder"])
def test_a_best_model_that_is_gone_is_told_of_and_a_lost_link_is_found_again(
        lost, whole, copied, tmp_path, capsys):
    if lost == "folder":
        shutil.rmtree((copied / "best").resolve())
    (copied / "best").unlink()
    (copied / "best-mine").mkdir()

    assert start([*SMALL, *STEPS, *ONE_RANK, f"run.dir={tmp_path}"]) == 0

    is_lost = lost == "folder"
    assert ("best is missing" in capsys.readouterr().out) == is_lost
    assert (json.loads((copied / "summary.json").read_text())["best"] is None) == is_lost
    if not is_lost:
        assert outcome(copied) == {**outcome(whole), "files": outcome(copied)["files"]}


def test_a_users_own_folders_are_not_taken_for_ours(tmp_path):
    for name in ("best-mine", "best-1", "best-000007", "best-000012-2", "best-000012"):
        (tmp_path / name).mkdir()

    found = [path.name for path in disk.numbered_folders(tmp_path, "best")]

    assert found == ["best-000012-2", "best-000012", "best-000007"]


# ---------------------------------------------------------------- branches and other ranks

def test_a_branch_continues_as_its_origin_did_and_leaves_it_as_it_is(whole, copied, tmp_path):
    (copied / "checkpoints" / "step-000003" / "state.json").unlink()
    before = sorted(copied.rglob("*"))
    branch = [*SMALL, *STEPS, "run.name=b", f"run.resume={copied}", f"run.dir={tmp_path}"]

    result = ranks(2, run_without_curves, *branch)

    assert result.returncode == 0, result.stderr
    assert f"resuming from {copied / 'checkpoints' / 'step-000002'}\n" in result.stdout
    assert sorted(copied.rglob("*")) == before
    branched, origin = outcome(tmp_path / "b"), outcome(whole)
    for same in ("metrics", "samples", "tensors", "step"):
        assert branched[same] == origin[same]
    # Its best model is one of its own.
    assert (tmp_path / "b" / "best").resolve().name == "best-000003"


def test_a_branch_resumes_from_its_own_checkpoints_and_is_evaluated_where_it_ends(
        copied, tmp_path, capsys):
    settings = [*SMALL, *STEPS, *ONE_RANK, "validation.every=9", "run.name=b",
                f"run.dir={tmp_path}", f"run.resume={copied / 'checkpoints' / 'step-000002'}"]

    for max_steps in (3, 4):
        capsys.readouterr()
        assert start([*settings, f"training.max_steps={max_steps}"]) == 0

    said = capsys.readouterr().out
    assert f"resuming from {tmp_path / 'b' / 'checkpoints' / 'step-000003'}\n" in said
    last = read_jsonl(tmp_path / "b" / "metrics.jsonl")[-1]
    assert (last["step"], "eval/solved" in last) == (4, True)


def test_another_number_of_ranks_resumes_with_the_same_batch_alone(copied, tmp_path, capsys):
    settings = [*SMALL, *STEPS, f"run.dir={tmp_path}", "training.max_steps=4"]

    assert start(settings) == 2
    assert "training.num_samples_per_step=4 to resume" in capsys.readouterr().err
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Its handler holds the folder.
    assert start([*settings, *ONE_RANK]) == 0

    assert "ranks: 2 then, 1 now" in capsys.readouterr().out
    steps = [entry["step"] for entry in read_jsonl(copied / "metrics.jsonl") if "reward" in entry]
    assert steps == [1, 2, 3, 4]
