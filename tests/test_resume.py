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
from machinery import on_ctrl_c

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
            "state": [state[key] for key in ("step", "best", "last_evaluation")],
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
    # In step 5.
    result = interrupted(2, {"rank": 0, "point": "sampling", "passing": 3, "how": "SIGTERM"},
                         folder, *steps)
    assert "step-000002\n" in result.stdout, result.stderr
    assert_ended_at_once(result, folder, "SIGTERM")
    result = interrupted(2, {}, folder, *steps)
    assert "step-000004\n" in result.stdout and result.returncode == 0, result.stderr
    assert outcome(folder / "a") == expected


@pytest.mark.soak
def test_a_run_that_torchrun_starts_again_and_that_is_then_stopped_equals_the_uninterrupted_one(
        tmp_path):
    """torchrun starts all ranks again when one has died, and they resume from the last checkpoint
    without being told. torchrun's SIGTERM ends all of them."""
    steps = ["training.max_steps=5", "checkpoint.every=2", "validation.every=3"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "interrupted"
    folder.mkdir()
    strikes = [{"rank": 0, "point": "sampling", "passing": 3, "how": "kill"},  # it has saved step 2
               {"rank": 1, "point": "learning", "passing": 1, "how": "kill"},
               {"rank": 1, "point": "sampling", "passing": 2, "how": "SIGTERM"}]
    result = torchrun(2, "tests/interrupted_worker.py", json.dumps(strikes), folder, *SMALL, *steps,
                      f"run.dir={folder}", torchrun_options=["--max-restarts=2"])
    assert time.time() - when_struck(folder) < 20  # torchrun would kill after 30
    assert result.returncode != 0 and "/main.py\", line" not in result.stderr
    assert len(struck(folder)) == 3 and "step-000002\n" in result.stdout, result.stderr
    result = interrupted(2, {}, folder, *steps)
    assert result.returncode == 0, result.stderr
    assert outcome(folder / "a") == expected


# ---------------------------------------------------------------- stop signals

SECONDS_AT_ONCE = 5


def when_struck(folder):
    return float(struck(folder)[-1][0])


def assert_ended_at_once(result, folder, how):
    """By the signal itself. But for Ctrl-C rank 0 prints one line, and ends with 130."""
    assert time.time() - when_struck(folder) < SECONDS_AT_ONCE
    codes = [-signal.Signals[how]] * len(result.codes)
    said = []
    if how == "SIGINT":
        codes[0] = 130
        said = [newest_saved(folder)]
    assert result.codes == codes, result.stderr
    assert re.findall("\nstopped by Ctrl-C; (.*)\n", result.stderr) == said, result.stderr
    assert "Traceback" not in result.stderr


def newest_saved(folder):
    """What a run that was struck knows of its checkpoints."""
    saved = sorted((folder / "a").glob("checkpoints/step-*"))
    if struck(folder)[-1][1] in ("saving: renamed", "saving: synced"):
        saved.pop()  # That one is not known to be on the disk.
    if not saved:
        return "nothing is saved yet"
    return f"saved up to {saved[-1]}; the same command resumes from there"


@pytest.mark.parametrize(("how", "num_ranks"), [("SIGTERM", 1), ("SIGHUP", 2), ("SIGINT", 2)])
def test_a_stop_signal_ends_every_process_at_once_and_the_next_start_resumes(
        how, num_ranks, tmp_path):
    steps = ["checkpoint.every=1", "validation.every=2", "training.max_steps=3"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    # Nothing is saved yet, then step 1 is.
    for strike in ({"rank": 0, "point": "evaluating", "how": how},
                   {"rank": 0, "point": "sampling", "passing": 2, "how": how}):
        result = interrupted(num_ranks, strike, folder, *steps)
        assert_ended_at_once(result, folder, how)
    result = interrupted(num_ranks, {}, folder, *steps)
    assert result.returncode == 0 and "step-000001\n" in result.stdout, result.stderr
    assert outcome(folder / "a") == expected


@pytest.mark.soak
@pytest.mark.parametrize(("how", "learning"), [("SIGTERM", SIL), ("SIGHUP", []), ("SIGINT", [])],
                         ids=["SIGTERM", "SIGHUP", "Ctrl-C"])
def test_a_stop_signal_in_any_phase_ends_every_process_at_once_and_the_next_start_resumes(
        how, learning, tmp_path):
    steps = [*learning, *EVERY_STEP, "training.max_steps=16"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    points = ["sampling", "learning", "updated", "evaluating", "logging", "evaluated", *SAVING]
    # See the test of SIGKILL.
    points.sort(key=lambda point: point not in ("saving: best", "saving: linked"))
    anywhere = ("sampling", "learning", "updated", "evaluating")
    for number, point in enumerate(points):
        strike = {"rank": number % 2 if point in anywhere else 0, "point": point, "how": how}
        result = interrupted(2, strike, folder, *steps)
        assert_ended_at_once(result, folder, how)
    assert [point for _, point in struck(folder)] == points
    result = interrupted(2, {"rank": 0, "point": "finishing", "how": how}, folder, *steps)
    assert_ended_at_once(result, folder, how)
    result = interrupted(2, {}, folder, *steps)
    assert "this run has finished before" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 16
    assert outcome(folder / "a") == expected


@pytest.mark.soak
def test_ctrl_c_under_torchrun_is_one_line_and_ends_all(tmp_path):
    """torchrun hands on the signal to its ranks, which are not the terminal's."""
    strike = {"rank": 1, "point": "learning", "passing": 2, "how": "SIGINT"}
    result = torchrun(3, "tests/interrupted_worker.py", json.dumps([strike]), tmp_path, *SMALL,
                      *EVERY_STEP, f"run.dir={tmp_path}")
    assert time.time() - when_struck(tmp_path) < 20  # torchrun would kill after 30
    assert result.returncode != 0 and "/main.py\", line" not in result.stderr
    said, = re.findall("\nstopped by Ctrl-C; (.*)\n", result.stderr)
    assert said == newest_saved(tmp_path)


def fork_and_press_ctrl_c():
    """As a reward may fork, and as a terminal sends SIGINT to all processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_ctrl_c(lambda: "nothing is saved yet")
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, b"here")  # a signal that comes sooner is lost in the fork
        time.sleep(100)
        os._exit(0)
    os.read(readable, 4)
    os.kill(child, signal.SIGINT)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_is_one_line_also_where_a_reward_has_forked():
    result = ranks(1, fork_and_press_ctrl_c)
    assert result.returncode == 130
    assert result.stderr == "\nstopped by Ctrl-C; nothing is saved yet\n"


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

    for name in names:
        for damage in (truncate, garble, lambda path: path.write_text("{}"),
                       lambda path: path.write_text("[]"), lambda path: path.write_bytes(b""),
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
