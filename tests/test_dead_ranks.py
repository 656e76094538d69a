"""A rank that dies takes the others along within seconds, whatever they are doing: torchrun ends
them, and nothing in them holds it up."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import draw_nothing, run_main
from processes import ranks, torchrun
from test_resume import SMALL, outcome, uninterrupted

import logger
import main
from machinery import checkpoints, launch

SECONDS = 5  # in which all have to be gone
STEPS = ["training.max_steps=2", "validation.every=2", "checkpoint.every=1"]
PLACES = {"sampling": (main, "generate"), "scoring": (main, "grade"),
          "learning": (main, "policy_loss"), "evaluating": (main, "evaluate"),
          "saving": (checkpoints.RunFolder, "save"), "leaving": (launch, "leave_group")}


def run_and_die(place, dead, asleep, folder, arguments):
    """main.py, except that one rank is killed where it enters a place in its second step (or at its
    end). The others sleep there in C, where no error reaches them, or go on and wait for it."""
    logger.Logger._draw_curves = draw_nothing
    (folder / f"pid-{main.RANK}").write_text(str(os.getpid()))
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
            time.sleep(0.3)  # the others are there by then, or are missed no less
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and asleep:
            ctypes.CDLL(None).sleep(100)
        return original(*arguments)

    setattr(module, name, struck)
    run_main(*arguments)


@pytest.mark.parametrize(("place", "num_ranks", "dead", "asleep"), [
    ("scoring", 2, 1, True), ("learning", 2, 0, False), *(
        pytest.param(*case, marks=pytest.mark.soak) for case in [
            ("scoring", 4, 2, True), ("sampling", 3, 0, True), ("sampling", 3, 0, False),
            ("scoring", 2, 1, False), ("learning", 4, 2, False), ("evaluating", 3, 0, False),
            ("saving", 3, 0, False), ("leaving", 2, 1, False), ("leaving", 3, 0, False)])])
def test_all_end_soon_after_one_also_where_they_sleep_in_c_or_wait_for_it(
        place, num_ranks, dead, asleep, tmp_path):
    result = torchrun(num_ranks, __file__, place, dead, int(asleep), tmp_path, *SMALL, *STEPS,
                      f"run.dir={tmp_path}")
    assert time.time() - float((tmp_path / "died").read_text()) < SECONDS
    assert result.returncode != 0 and f"rank: {dead} " in result.stderr, result.stderr
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(num_ranks)]
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "dead"), [(2, 1), (3, 0), (4, 2)])
def test_under_torchrun_all_start_again_and_end_as_if_nothing_had_been(num_ranks, dead, tmp_path):
    """Where torchrun would kill sleepers that heed no SIGTERM after ten minutes."""
    expected = uninterrupted(num_ranks, tmp_path / "whole", *STEPS)
    result = torchrun(num_ranks, __file__, "scoring", dead, 1, tmp_path, *SMALL, *STEPS,
                      f"run.dir={tmp_path / 'killed'}", torchrun_options=["--max-restarts=1"],
                      TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600")
    assert result.returncode == 0, result.stderr
    died, begun = (float((tmp_path / name).read_text()) for name in ("died", "begun"))
    assert begun - died < 300  # importing PyTorch included, on a busy machine
    assert outcome(tmp_path / "killed" / "a") == expected


def with_a_fault_of_our_own(*arguments):
    """main.py, except that rank 1 ends without a word to the others."""
    if main.RANK == 1:
        main.load_questions = None  # a TypeError
    run_main(*arguments)


def test_a_mistake_of_our_own_on_one_rank_is_shown_and_the_others_end(tmp_path):
    result = ranks(2, with_a_fault_of_our_own, *SMALL, f"run.dir={tmp_path}")
    assert result.codes == [-signal.SIGTERM, 1], result.stderr
    assert "TypeError: 'NoneType' object is not callable" in result.stderr
    assert result.stderr.count("Traceback") == 1


if __name__ == "__main__":
    place, dead, asleep, folder, *arguments = sys.argv[1:]
    folder = Path(folder)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        run_and_die(place, int(dead), asleep == "1", folder, arguments)
    (folder / "begun").write_text(str(time.time()))
    logger.Logger._draw_curves = draw_nothing
    run_main(*arguments)
