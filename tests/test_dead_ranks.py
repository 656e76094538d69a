"""A rank that dies takes the others along within seconds, whatever they are doing."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL, outcome, run_without_curves, uninterrupted
from processes import ranks, torchrun

import main
from machinery import checkpoints, launch

STEPS = [*SMALL, "training.max_steps=2", "validation.every=2"]
PLACES = {"sampling": (main, "generate"), "scoring": (main, "grade"),
          "learning": (main, "policy_loss"), "evaluating": (main, "evaluate"),
          "saving": (checkpoints.RunFolder, "save"), "leaving": (launch, "leave_group")}


def run_and_die(place, dead, asleep, folder, arguments):
    """main.py, except that one rank is killed where it enters a place in its second step, or at its
    end. The others sleep there in C, where no error reaches them, or go on and wait for it."""
    questions, step = main.questions, 0

    def counted(*arguments):
        nonlocal step
        step += 1
        return questions(*arguments)

    main.questions = counted
    module, name = PLACES[place]
    original = getattr(module, name)

    def struck(*arguments):
        if step == 2 and main.RANK == dead:
            time.sleep(0.3)  # The others are there by then, or are missed no less.
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and asleep:
            ctypes.CDLL(None).sleep(100)
        return original(*arguments)

    setattr(module, name, struck)
    run_without_curves(*arguments)


def soak(*case):
    return pytest.param(*case, marks=pytest.mark.soak)


@pytest.mark.parametrize(("place", "num_ranks", "dead", "asleep"), [
    ("scoring", 2, 1, True), ("learning", 2, 0, False), soak("sampling", 3, 0, True),
    soak("sampling", 4, 2, False), soak("learning", 3, 2, False), soak("evaluating", 3, 0, False),
    soak("saving", 3, 0, False), soak("leaving", 2, 1, False)])
def test_all_end_soon_after_one_also_where_they_sleep_in_c_or_wait_for_it(
        place, num_ranks, dead, asleep, tmp_path):
    shard = ["training.shard=true"] if num_ranks > 2 else []

    result = ranks(num_ranks, run_and_die, place, dead, asleep, tmp_path,
                   [*STEPS, *shard, f"run.dir={tmp_path}"])

    assert time.time() - float((tmp_path / "died").read_text()) < 20
    assert result.codes[dead] == -signal.SIGKILL
    assert 0 not in result.codes


@pytest.mark.parametrize(("num_ranks", "dead", "shard"), [
    (2, 1, "false"), pytest.param(4, 2, "true", marks=pytest.mark.soak)])
def test_torchrun_starts_all_again_and_the_run_ends_as_if_nothing_had_been(
        num_ranks, dead, shard, tmp_path):
    steps = [*STEPS, f"training.shard={shard}"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)

    # torchrun would wait so long for sleepers that heed no SIGTERM.
    result = torchrun(num_ranks, __file__, dead, tmp_path, *steps, f"run.dir={tmp_path / 'killed'}",
                      torchrun_options=["--max-restarts=1"], TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600")

    assert result.returncode == 0, result.stderr
    assert "step-000001\n" in result.stdout  # Nothing of step 1 was lost.
    assert outcome(tmp_path / "killed" / "a") == expected


if __name__ == "__main__":
    dead, folder, *arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        run_and_die("scoring", int(dead), True, Path(folder), arguments)
    run_without_curves(*arguments)
