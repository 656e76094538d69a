"""A run that is interrupted, by whatever it is, ends as the one that is not: tolerance 0."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import time

import pytest
from conftest import draw_nothing, read_jsonl, run_main, start
from interrupted_worker import run_and_be_struck
from processes import ranks, torchrun
from test_run import TIMES

import logger
from machinery.launch import stop_signals
from machinery.ranks import join

SMALL = ["training.max_new_gen_tokens=48", "training.num_samples_per_step=2",
         "training.k_best_of_n=[4,4]", "data.num_validation=6", "data.max_rows=200",
         "validation.best_of_n=2", "training.learning_rate=0.001", "run.name=a"]
SIL = ["training.learning_type=sil", "training.k_best_of_n=[2,4]"]
EVERY_STEP = ["checkpoint.every=1", "validation.every=2"]


def outcome(folder):
    """All that a run has come to, times aside."""
    metrics = [{key: value for key, value in entry.items() if key not in TIMES}
               for entry in read_jsonl(folder / "metrics.jsonl")]
    checkpoint = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((checkpoint / "state.json").read_text())
    return {"metrics": metrics, "samples": read_jsonl(folder / "samples.jsonl"),
            "step": checkpoint.name,
            "state": [state[key] for key in ("step", "best")],
            "tensors": digest(checkpoint / "tensors-1.safetensors"),
            "best": digest(folder / "best" / "model.safetensors"),
            "best of": version(folder / "best"),
            "files": sorted(version(path) for path in [*folder.iterdir(),
                                                       *(folder / "checkpoints").iterdir()]
                            if path.name != "best")}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def version(path):
    """A run killed after it had switched best/ switches it again, to the same in a folder
    best-000004-2, say: the number does not count."""
    return re.sub(r"^(best-\d+)-\d+$", r"\1", path.resolve().name)


def without_files(outcome):
    return {**outcome, "files": None}


def run_without_curves(*arguments):
    logger.Logger._draw_curves = draw_nothing
    run_main(*arguments)


def uninterrupted(num_ranks, folder, *settings):
    result = ranks(num_ranks, run_without_curves, *SMALL, *settings, f"run.dir={folder}")
    assert result.returncode == 0, result.stderr
    return outcome(folder / "a")


def interrupted(num_ranks, strike, folder, *settings):
    """One start, which `strike` may end."""
    folder.mkdir(exist_ok=True)
    return ranks(num_ranks, run_and_be_struck, strike, str(folder),
                 [*SMALL, *settings, f"run.dir={folder}"])


def struck(folder):
    return [line.split(" ", 1) for line in (folder / "struck").read_text().splitlines()]


# ---------------------------------------------------------------- SIGKILL

SAVING = [f"saving: {point}" for point in ("tensors", "written", "renamed", "synced", "removal",
                                           "removed", "best", "linked")]


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "learning"), [
    *((n, learning) for n in (1, 2, 3) for learning in ([], [*SIL, "training.refill=2"])),
    (2, ["training.shard=true"]), (3, ["training.shard=true"])], ids=str)
def test_a_run_killed_twenty_times_equals_the_uninterrupted_one(num_ranks, learning, tmp_path):
    stream = random.Random(f"{num_ranks} {learning}")
    phases = {"sampling": ["sampling"] * 4,
              "learning": ["learning", "learning", "updated", "logging"],
              "evaluating": ["evaluating", "evaluating", "evaluated", "evaluated"],
              "saving": SAVING}
    points = [point for phase in phases.values() for point in phase]
    stream.shuffle(points)
    # the other points are passed on rank 0 alone
    anywhere = ("sampling", "learning", "updated", "evaluating")
    plan = [{"point": point, "how": "kill all",
             "rank": stream.randrange(num_ranks) if point in anywhere else 0,
             "passing": (1 if point.startswith(("saving: b", "saving: l", "eval"))
                         else stream.choice([1, 2]))} for point in points]
    # A better evaluation may never come: what is struck while best/ is switched is struck at the
    # first, which always is the best so far.
    plan.sort(key=lambda strike: strike["point"] not in ("saving: best", "saving: linked"))
    steps = [*learning, *EVERY_STEP, "training.max_steps=24"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)
    for strike in plan:
        result = interrupted(num_ranks, strike, tmp_path / "killed", *steps)
        assert result.codes == [-signal.SIGKILL] * num_ranks, (strike, result.stderr)
    result = interrupted(num_ranks, {}, tmp_path / "killed", *steps)
    assert result.returncode == 0, result.stderr
    assert ([point for _, point in struck(tmp_path / "killed")]
            == [strike["point"] for strike in plan] and len(plan) == 20)
    assert outcome(tmp_path / "killed" / "a") == expected


def test_a_run_that_is_killed_and_then_stopped_equals_the_uninterrupted_one(tmp_path):
    steps = ["training.max_steps=5", "checkpoint.every=2", "validation.every=3"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "interrupted"
    result = interrupted(2, {"rank": 1, "point": "learning", "passing": 3, "how": "kill all"},
                         folder, *steps)
    assert result.codes == [-signal.SIGKILL] * 2, result.stderr
    result = interrupted(2, {"rank": 1, "point": "sampling", "passing": 2, "how": "stop"}, folder,
                         *steps)
    assert ("step-000002\n" in result.stdout
            and result.codes == [128 + signal.SIGTERM] * 2), result.stderr
    assert_stopped(result, folder, saved=4)
    result = interrupted(2, {}, folder, *steps)
    assert "step-000004\n" in result.stdout and result.returncode == 0, result.stderr
    # a stop signal leaves a checkpoint of its own
    assert without_files(outcome(folder / "a")) == without_files(expected)


@pytest.mark.soak
def test_a_run_that_torchrun_starts_again_and_that_is_then_stopped_equals_the_uninterrupted_one(
        tmp_path):
    """torchrun starts all ranks again when one has died, and they go on from the last checkpoint
    without being told; and it tells all of them of its signal."""
    steps = ["training.max_steps=5", "checkpoint.every=2", "validation.every=3"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "interrupted"
    folder.mkdir()
    strikes = [{"rank": 0, "point": "sampling", "passing": 3, "how": "kill"},  # it has saved step 2
               {"rank": 1, "point": "learning", "passing": 1, "how": "kill"},
               {"rank": 1, "point": "sampling", "passing": 2, "how": "stop"}]
    result = torchrun(2, "tests/interrupted_worker.py", json.dumps(strikes), folder, *SMALL, *steps,
                      f"run.dir={folder}", torchrun_options=["--max-restarts=2"])
    assert len(struck(folder)) == 3 and "step-000002\n" in result.stdout, result.stderr
    assert_stopped(result, folder, saved=4)
    result = interrupted(2, {}, folder, *steps)
    assert result.returncode == 0 and "step-000004\n" in result.stdout, result.stderr
    assert without_files(outcome(folder / "a")) == without_files(expected)


# ---------------------------------------------------------------- SIGTERM

def assert_stopped(result, folder, saved, name="SIGTERM"):
    when, _ = struck(folder)[-1]
    assert time.time() - float(when) < 20  # torchrun would kill after 30
    said = (f"stopped by {name}; saved up to {folder}/a/checkpoints/step-{saved:06d}; "
            "the same command goes on from there")
    assert said in result.stderr, (result.stdout, result.stderr)
    assert "/main.py\", line" not in result.stderr  # no traceback of ours


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_stop_signal_waits_for_the_end_of_the_step_and_saves_it(num_ranks, tmp_path):
    """Two ranks: see above."""
    steps = ["validation.every=2", "training.max_steps=3", "checkpoint.every=100"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    strike = {"rank": num_ranks - 1, "point": "sampling", "passing": 2, "how": "stop"}
    result = interrupted(num_ranks, strike, folder, *steps)
    assert result.codes == [128 + signal.SIGTERM] * num_ranks, result.stderr
    assert_stopped(result, folder, saved=2)
    result = interrupted(num_ranks, {}, folder, *steps)
    assert result.returncode == 0, result.stderr
    assert without_files(outcome(folder / "a")) == without_files(expected)


@pytest.mark.soak
@pytest.mark.parametrize("learning", [[], SIL], ids=["grpo", "sil"])
def test_sigterm_in_any_phase_saves_that_step_and_the_next_start_goes_on(learning, tmp_path):
    # Nothing but the signal saves, and the last step.
    steps = [*learning, "validation.every=2", "training.max_steps=12", "checkpoint.every=100"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    for rank, point, passing, saved in [
            (0, "sampling", 2, 2), (1, "sampling", 2, 4), (0, "learning", 2, 6),
            (1, "evaluating", 1, 8), (0, "updated", 2, 10), (0, "logging", 1, 11)]:
        strike = {"rank": rank, "point": point, "passing": passing, "how": "stop"}
        result = interrupted(2, strike, folder, *steps)
        assert result.codes == [128 + signal.SIGTERM] * 2, (strike, result.stderr)
        assert_stopped(result, folder, saved)
    # While the last step is being saved there is no other to leave out.
    strike = {"rank": 0, "point": "saving: tensors", "passing": 1, "how": "stop"}
    result = interrupted(2, strike, folder, *steps)
    assert result.codes == [0, 0], result.stderr
    assert without_files(outcome(folder / "a")) == without_files(expected)
    result = interrupted(2, {}, folder, *steps)
    assert "this run has finished before" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 12


@pytest.mark.parametrize("point", ["evaluating", "finishing"])
def test_before_the_first_step_a_signal_ends_the_run_at_once_and_after_the_last_it_is_through(
        point, tmp_path):
    strike = {"rank": 0, "point": point, "how": "stop"}
    result = interrupted(2, strike, tmp_path, "training.max_steps=1")
    (when, _), = struck(tmp_path)
    through = point == "finishing"
    assert set(result.codes) == {0 if through else -signal.SIGTERM}, result.stderr
    assert time.time() - float(when) < 5
    assert (tmp_path / "a" / "summary.json").exists() == through
    assert len(list((tmp_path / "a").glob("checkpoints/step-*"))) == through


@pytest.mark.parametrize(("how", "code", "saved"), [("Ctrl-C", 130, True),
                                                    ("Ctrl-C twice", -signal.SIGINT, False)])
def test_ctrl_c_saves_the_step_and_a_second_one_ends_the_run_at_once(how, code, saved, tmp_path):
    strike = {"rank": 0, "point": "sampling", "passing": 2, "how": how}
    result = interrupted(1, strike, tmp_path, "training.max_steps=9", "checkpoint.every=100")
    assert result.codes == [code] and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("\nstopping after this step; Ctrl-C again to stop now\n") == 1
    if saved:
        assert_stopped(result, tmp_path, saved=2, name="SIGINT")
    assert list((tmp_path / "a").glob("checkpoints/step-*")) == [
        tmp_path / "a" / "checkpoints" / "step-000002"] * saved


def stop_a_forked_child():
    readable, writable = os.pipe()
    join()
    stop_signals()
    child = os.fork()
    if child == 0:
        os.write(writable, b"here")  # a signal that comes sooner is lost in the fork
        time.sleep(100)
        os._exit(0)
    os.read(readable, 4)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_the_signal_for_a_process_that_a_reward_has_forked_ends_it_alone():
    result = ranks(1, stop_a_forked_child)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- damage

def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on_to_the_same_end(
        tmp_path, capsys):
    assert start([*SMALL, *EVERY_STEP, "training.max_steps=3",
                  f"run.dir={tmp_path / 'whole'}"]) == 0
    expected = outcome(tmp_path / "whole" / "a")
    names = sorted(path.name
                   for path in (tmp_path / "whole" / "a" / "checkpoints" / "step-000003").iterdir())
    assert names == ["state.json", "tensors-1.safetensors"]

    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1])

    def garble(path):
        path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))

    def falsify(path):  # JSON all the same
        state = json.loads(path.read_text()) if path.name == "state.json" else {}
        path.write_text(json.dumps({**state, random.Random(path.parent.name).choice(
            ["step", "best", "num_ranks", "config", "log"]): {}}))

    for name in names:
        for damage in (truncate, garble, falsify, lambda path: path.write_text("[]"),
                       lambda path: path.write_bytes(b""),
                       lambda path: path.unlink()):
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(tmp_path / "whole" / "a", tmp_path / "damaged" / "a", symlinks=True)
            damage(tmp_path / "damaged" / "a" / "checkpoints" / "step-000003" / name)
            capsys.readouterr()
            assert start([*SMALL, *EVERY_STEP, "training.max_steps=3",
                          f"run.dir={tmp_path / 'damaged'}"]) == 0
            said = capsys.readouterr()
            assert ("step-000003 is damaged and is set aside" in said.out
                    and "step-000002\n" in said.out)
            found = outcome(tmp_path / "damaged" / "a")
            assert any(re.fullmatch(r"damaged-\d+-step-000003", name) for name in found["files"])
            assert without_files(found) == without_files(expected)
