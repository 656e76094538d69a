"""A rank that dies takes the others along, whatever they are doing."""

import hashlib
import os
import signal
import sys
import time

import pytest
from conftest import SMALL, outcome, run_without_curves, uninterrupted
from processes import ranks, torchrun

import main
from machinery import ranks as ranks_of_machinery
from machinery import runs
from machinery.errors import KILLED

STEPS = [*SMALL, "training.max_steps=2", "validation.every=2"]
PLACES = {"sampling": (main, "generate"), "scoring": (main, "grade"),
          "learning": (main, "policy_loss"), "evaluating": (main, "evaluate"),
          "saving": (runs.RunFolder, "save"), "leaving": (ranks_of_machinery, "leave_group")}


def run_and_die(place, dead, others, arguments):
    """main.py, except that one rank is killed where it enters a place in its second step, or at its
    end. The others are "busy" there, in C code that takes minutes, or go on and are "waiting" for
    the dead one."""
    questions, step = main.questions, 0

    def counted(*arguments):
        nonlocal step
        step += 1
        return questions(*arguments)

    main.questions = counted
    module, name = PLACES[place]
    original = getattr(module, name)

    def struck(*arguments, **named):
        if step == 2 and main.RANK == dead:
            time.sleep(0.3)  # The others can get there. If one does not, less is tested.
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and others == "busy":
            # A signal does not interrupt this. A handler in Python would run only after it.
            hashlib.pbkdf2_hmac("sha512", b"", b"", iterations=2**31 - 1)
        return original(*arguments, **named)

    setattr(module, name, struck)
    run_without_curves(*arguments)


def soak(*case):
    return pytest.param(*case, marks=pytest.mark.soak)


@pytest.mark.parametrize(("place", "num_ranks", "dead", "others", "shard"), [
    ("scoring", 2, 1, "busy", "false"), ("learning", 2, 0, "waiting", "false"),
    soak("sampling", 3, 0, "busy", "true"), soak("sampling", 4, 2, "waiting", "true"),
    soak("learning", 3, 2, "waiting", "true"), soak("evaluating", 3, 0, "waiting", "true"),
    soak("saving", 3, 0, "waiting", "true"), soak("leaving", 2, 1, "waiting", "false")])
def test_when_a_rank_is_killed_sigterm_ends_the_others_whatever_they_do(
        place, num_ranks, dead, others, shard, tmp_path):
    """When one rank has died, torchrun sends SIGTERM to the others, and so does `ranks`. Nothing in
    a rank may hold that up. `ranks` kills one that resists after SECONDS_TO_END."""
    result = ranks(num_ranks, run_and_die, place, dead, others,
                   [*STEPS, f"training.shard={shard}", f"run.dir={tmp_path}"])

    assert result.codes.pop(dead) == -signal.SIGKILL
    assert -signal.SIGKILL not in result.codes  # None has resisted.
    assert 0 not in result.codes


@pytest.mark.parametrize(("num_ranks", "dead", "shard"), [(2, 1, "false"), soak(4, 2, "true")])
def test_torchrun_starts_all_again_and_the_run_ends_as_if_nothing_had_been(
        num_ranks, dead, shard, tmp_path):
    steps = [*STEPS, f"training.shard={shard}"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)

    result = torchrun(num_ranks, __file__, dead, *steps, f"run.dir={tmp_path / 'killed'}",
                      torchrun_options=["--max-restarts=1"])

    assert result.returncode == 0, result.stderr
    run_folder = tmp_path / "killed" / "a"
    # Step 1, which was saved before the strike, is not repeated.
    assert f"resuming from {run_folder / 'checkpoints' / 'step-000001'}\n" in result.stdout
    assert outcome(run_folder) == expected


def test_torchruns_report_says_why_a_rank_may_have_been_killed(tmp_path):
    """A rank that the system kills for its memory cannot say so itself."""
    result = torchrun(1, __file__, 0, *STEPS, f"run.dir={tmp_path}")

    assert result.returncode == 1
    report = result.stderr[result.stderr.rindex("Root Cause"):]
    assert "(SIGKILL)" in report
    assert KILLED in report
    assert "training.tokens_per_micro_batch" in KILLED


if __name__ == "__main__":
    dead, *arguments = sys.argv[1:]
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        run_and_die("scoring", int(dead), "busy", arguments)
    run_without_curves(*arguments)
