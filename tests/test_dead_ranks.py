"""A rank that dies takes the others along within seconds, whatever they are doing, and one line
says which it was; and nobody is missed who has ended as a rank should."""

import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import draw_nothing, run_main
from processes import ranks, torchrun
from test_resume import SMALL, outcome, uninterrupted

import logger
import main
from machinery import checkpoints, launch

SECONDS = 5  # in which all have to be gone
STEPS = ["training.max_steps=2", "validation.every=2", "checkpoint.every=1"]
PLACES = {"sampling": (main, "complete"), "scoring": (main, "grade"),
          "learning": (main, "policy_loss"), "evaluating": (main, "evaluation_step"),
          "saving": (checkpoints.RunFolder, "save"), "parting": (launch, "part")}


def run_and_die(place, dead, asleep, folder, arguments):
    """main.py, except that one rank is killed where it enters a place in its second step (or at its
    end). The others sleep there in C, where no signal and no error reaches them, or go on and wait
    for it."""
    logger.Logger._draw_curves = draw_nothing
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


CASES = [(place, num_ranks, dead, asleep) for place in PLACES
         for num_ranks, dead in ((2, 1), (3, 0), (4, 2)) for asleep in (False, True)]
FAST = [("scoring", 2, 1, True), ("scoring", 3, 0, True), ("learning", 4, 2, False),
        ("parting", 2, 0, False)]


@pytest.mark.parametrize(("place", "num_ranks", "dead", "asleep"), [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.soak) for case in CASES])
def test_all_end_soon_after_one_and_one_line_says_which(place, num_ranks, dead, asleep, tmp_path):
    result = ranks(num_ranks, run_and_die, place, dead, asleep, tmp_path,
                   [*SMALL, *STEPS, f"run.dir={tmp_path}"])
    assert time.time() - float((tmp_path / "died").read_text()) < SECONDS
    assert result.codes == [-signal.SIGKILL if rank == dead else 1 for rank in range(num_ranks)]
    lines = [line for line in result.stderr.splitlines() if "has left" in line or "rank " in line]
    assert lines == [f"rank {dead} has left: all ranks end"], result.stderr


def die_with_a_child(folder, arguments):
    """As above, and the rank that dies has forked a child, which lives on with all that it had
    open."""
    grade = main.grade

    def struck(*arguments):
        if main.RANK == 1:
            if (child := os.fork()) == 0:
                ctypes.CDLL(None).sleep(100)
            (folder / "child").write_text(str(child))
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.CDLL(None).sleep(100)
        return grade(*arguments)

    questions = main.questions

    def first_step(*arguments):  # from which on SIGTERM, which the test sends too, ends no rank
        main.grade = struck
        return questions(*arguments)

    main.questions = first_step
    run_main(*arguments)


def test_a_rank_is_missed_also_where_a_child_of_its_lives_on(tmp_path):
    try:
        result = ranks(2, die_with_a_child, tmp_path, [*SMALL, *STEPS, f"run.dir={tmp_path}"])
    finally:
        ended = time.time()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert ended - float((tmp_path / "died").read_text()) < SECONDS
    assert result.codes == [1, -signal.SIGKILL]
    assert "rank 1 has left: all ranks end" in result.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "dead"), [(2, 1), (3, 0), (4, 2)])
def test_under_torchrun_all_start_again_and_end_as_if_nothing_had_been(num_ranks, dead, tmp_path):
    """Where torchrun alone would kill the sleepers, here after ten minutes."""
    expected = uninterrupted(num_ranks, tmp_path / "whole", *STEPS)
    result = torchrun(num_ranks, __file__, dead, tmp_path, *SMALL, *STEPS,
                      f"run.dir={tmp_path / 'killed'}", torchrun_options=["--max-restarts=1"],
                      TORCH_ELASTIC_SHUTDOWN_TIMEOUT="600")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"rank {dead} has left: all ranks end\n") == 1
    died, begun = (float((tmp_path / name).read_text()) for name in ("died", "begun"))
    assert begun - died < 300  # importing PyTorch included, on a busy machine
    assert outcome(tmp_path / "killed" / "a") == expected


RUNS = int(os.environ.get("RUNS", "20"))


def run_and_be_stopped(seconds, folder, arguments):
    """main.py, except that rank 0 stops all ranks after so many seconds."""
    logger.Logger._draw_curves = draw_nothing
    (folder / f"pid-{main.RANK}").write_text(str(os.getpid()))

    def stop():
        for rank in reversed(range(main.WORLD_SIZE)):  # itself at last
            os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGTERM)

    if main.RANK == 0 and seconds:
        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        join = launch.join
        launch.join = lambda: (join(), timer.start())  # all are there
    run_main(*arguments)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_run_that_ends_is_stopped_or_started_again_raises_an_alarm(num_ranks, tmp_path):
    """RUNS=100 in the environment: so many runs."""
    stream, said, codes = random.Random(num_ranks), "", []
    small = [*SMALL, *STEPS, "data.num_validation=3", "training.max_new_gen_tokens=16"]
    for run in range(RUNS // 2):
        seconds = stream.choice([0, stream.uniform(0.01, 4)])  # 0: to its end
        for part in (seconds, 0):  # which goes on where the first was stopped
            result = ranks(num_ranks, run_and_be_stopped, part, tmp_path,
                           [*small, f"run.dir={tmp_path}", f"run.name=run-{run}"])
            said += result.stderr
            codes.append(set(result.codes))
    assert "has left" not in said and "reach" not in said, said
    stopped = {128 + signal.SIGTERM, -signal.SIGTERM}  # at the end of a step; before the first
    assert codes.count({0}) >= RUNS // 2 and all(
        each == {0} or each <= stopped for each in codes), codes


def run_and_be_stopped_early(late, folder, arguments):
    """main.py, except that one rank is late where all begin to heed signals, and that the other
    stops both while it waits there."""
    stop_signals = main.stop_signals
    (folder / f"pid-{main.RANK}").write_text(str(os.getpid()))

    def stop():
        for rank in (late, main.RANK):
            os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGTERM)

    def replaced():
        if main.RANK == late:
            time.sleep(100)
        threading.Timer(0.5, stop).start()
        return stop_signals()

    main.stop_signals = replaced
    run_main(*arguments)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_a_signal_ends_sooner_than_another_is_not_missed(late, tmp_path):
    result = ranks(2, run_and_be_stopped_early, late, tmp_path,
                   [*SMALL, *STEPS, f"run.dir={tmp_path}"])
    assert result.codes[late] == -signal.SIGTERM
    assert result.codes[1 - late] == 128 + signal.SIGTERM and result.stderr == ""


def alarmed(*arguments):
    """A rank that leaves without a word to the others, and that is no rank that dies."""
    if main.RANK == 1:
        main.load_questions = None  # a TypeError
    run_main(*arguments)


def test_a_mistake_of_our_own_on_one_rank_is_shown_and_the_others_end(tmp_path):
    result = ranks(2, alarmed, *SMALL, f"run.dir={tmp_path}")
    # Before the first step a SIGTERM, as torchrun sends it to the others, may be quicker than the
    # line, or come between the line and the end.
    assert result.codes in ([1, 1], [-signal.SIGTERM, 1])
    assert "TypeError: 'NoneType' object is not callable" in result.stderr
    told = result.stderr.count("rank 1 has left: all ranks end")
    assert told == 1 if result.codes[0] == 1 else told <= 1


if __name__ == "__main__":
    dead, folder, *arguments = sys.argv[1:]
    folder = Path(folder)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        run_and_die("scoring", int(dead), True, folder, arguments)
    (folder / "begun").write_text(str(time.time()))
    logger.Logger._draw_curves = draw_nothing
    run_main(*arguments)
