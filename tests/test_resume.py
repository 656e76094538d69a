"""A run that is interrupted, by whatever it is, ends as the one that is not: tolerance 0."""

import hashlib
import json
import random
import re
import shutil
import signal
import time

import pytest
from conftest import draw_nothing, read_jsonl, run_main
from interrupted_worker import run_and_be_struck
from processes import ranks, torchrun
from test_run import TIMES

import logger
import main

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
            "state": [state[key] for key in ("step", "evaluated", "best", "bad_steps")],
            "tensors": digest(checkpoint / "tensors.safetensors"),
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

SAVING = [f"saving: {point}" for point in ("tensors", "checksums", "synced", "renamed", "removal",
                                           "removed", "best", "linked")]


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("learning", [[], SIL], ids=["grpo", "sil"])
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
                         *steps)  # rank 0 in a collective
    assert ("step-000002\n" in result.stdout
            and result.codes == [128 + signal.SIGTERM] * 2), result.stderr
    assert_stopped(result, folder, saved=3)
    result = interrupted(2, {}, folder, *steps)
    assert "step-000003\n" in result.stdout and result.returncode == 0, result.stderr
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
    strikes = [{"rank": 1, "point": "sampling", "passing": 3, "how": "kill"},
               {"rank": 0, "point": "learning", "passing": 1, "how": "kill"},
               # rank 0 waits in a collective
               {"rank": 1, "point": "sampling", "passing": 2, "how": "stop"}]
    result = torchrun(2, "tests/interrupted_worker.py", json.dumps(strikes), folder, *SMALL, *steps,
                      f"run.dir={folder}", torchrun_options=["--max-restarts=2"])
    assert len(struck(folder)) == 3 and "step-000002\n" in result.stdout, result.stderr
    assert_stopped(result, folder, saved=3)
    result = interrupted(2, {}, folder, *steps)
    assert result.returncode == 0 and "step-000003\n" in result.stdout, result.stderr
    assert without_files(outcome(folder / "a")) == without_files(expected)


# ---------------------------------------------------------------- SIGTERM

def assert_stopped(result, folder, saved):
    when, _ = struck(folder)[-1]
    assert time.time() - float(when) < 20  # torchrun would kill after 30
    said = (f"stopped by SIGTERM; saved up to {folder}/a/checkpoints/step-{saved:06d}; "
            "the same command goes on from there")
    assert said in result.stdout, (result.stdout, result.stderr)
    assert "/main.py\", line" not in result.stderr  # no traceback of ours


@pytest.mark.soak
@pytest.mark.parametrize("learning", [[], SIL], ids=["grpo", "sil"])
def test_sigterm_in_any_phase_saves_the_last_step_in_time_and_the_next_start_goes_on(
        learning, tmp_path):
    # nothing but the signal saves
    steps = [*learning, "validation.every=2", "training.max_steps=8", "checkpoint.every=100"]
    expected = uninterrupted(2, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    for strike, saved in [
            ({"rank": 0, "point": "sampling", "passing": 2, "how": "stop"}, 1),
            # rank 0 waits in a collective
            ({"rank": 1, "point": "sampling", "passing": 2, "how": "stop"}, 2),
            ({"rank": 0, "point": "learning", "passing": 2, "how": "stop"}, 3),
            ({"rank": 1, "point": "evaluating", "passing": 1, "how": "stop"}, 4),
            ({"rank": 0, "point": "updated", "passing": 2, "how": "stop and go on"}, 6),
            ({"rank": 0, "point": "saving: tensors", "passing": 1, "how": "stop and go on"}, 8)]:
        result = interrupted(2, strike, folder, *steps)
        # A rank that has left the loop, where its last step has been saved, ends as any process
        # does.
        assert set(result.codes) <= {128 + signal.SIGTERM, -signal.SIGTERM}, (strike, result.stderr)
        assert_stopped(result, folder, saved)
    result = interrupted(2, {}, folder, *steps)
    assert result.returncode == 0, result.stderr
    assert without_files(outcome(folder / "a")) == without_files(expected)
    assert ("this run has finished before" in result.stdout
            and json.loads(result.stdout.splitlines()[-1])["steps"] == 8)


@pytest.mark.soak
def test_a_step_that_cannot_be_saved_in_time_leaves_the_last_periodic_checkpoint_and_says_so(
        tmp_path):
    steps = ["training.max_steps=9", "checkpoint.every=2"]
    result = interrupted(2, {"rank": 0, "point": "saving: tensors", "passing": 2, "how": "stop"},
                         tmp_path, *steps)
    (when, _), = struck(tmp_path)
    assert main.GRACE <= time.time() - float(when) < 30
    assert (f"stopped by SIGTERM, and {main.GRACE} s were not enough to save step 4; "
            f"saved up to {tmp_path}/a/checkpoints/step-000002"
            in result.stdout), (result.stdout, result.stderr)
    result = interrupted(2, {}, tmp_path, *steps)
    assert result.returncode == 0 and "step-000002\n" in result.stdout, result.stderr
    assert not list((tmp_path / "a").rglob("*.unfinished"))


# ---------------------------------------------------------------- damage

def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on_to_the_same_end(
        tmp_path, capsys):
    assert main.main([*SMALL, *EVERY_STEP, "training.max_steps=3",
                      f"run.dir={tmp_path / 'whole'}"]) == 0
    expected = outcome(tmp_path / "whole" / "a")
    names = sorted(path.name
                   for path in (tmp_path / "whole" / "a" / "checkpoints" / "step-000003").iterdir())
    assert names == ["SHA256SUMS", "state.json", "tensors.safetensors"]

    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[random.Random(path.name).randrange(len(content))] ^= 1
        path.write_bytes(content)

    for name in names:
        for damage in (truncate, flip, lambda path: path.write_bytes(b""),
                       lambda path: path.unlink()):
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(tmp_path / "whole" / "a", tmp_path / "damaged" / "a", symlinks=True)
            damage(tmp_path / "damaged" / "a" / "checkpoints" / "step-000003" / name)
            capsys.readouterr()
            assert main.main([*SMALL, *EVERY_STEP, "training.max_steps=3",
                              f"run.dir={tmp_path / 'damaged'}"]) == 0
            said = capsys.readouterr()
            assert ("step-000003 is damaged and is set aside" in said.err
                    and "step-000002\n" in said.out)
            found = outcome(tmp_path / "damaged" / "a")
            assert "damaged-step-000003" in found["files"]
            assert without_files(found) == without_files(expected)
