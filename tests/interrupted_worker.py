"""main.py as torchrun starts it, except that it is struck at a point of a plan: `interrupted_worker.py PLAN FOLDER arguments...`

PLAN is a JSON list with an entry for each start: which rank strikes, at which point, at its how manyth passing, and how: "kill" (SIGKILL
to that rank), "kill all" (to every rank at once, as when the power goes), "stop" (SIGTERM to torchrun, and then this rank stays inside
a C call that does not return), "stop and go on". torchrun starts the ranks again after a "kill". After a "kill all" they start
again as children of a process that has imported everything already, which takes a second instead of seven."""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import conftest  # noqa: F401, finds main.py and sets the threads

import logger
import main

plan, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
strike: dict = {"rank": None}
start = passed = 0


def at(point):
    global passed
    if (strike["rank"], strike.get("point")) != (main.RANK, point):
        return
    passed += 1
    if passed != strike.get("passing", 1):
        return
    (folder / "struck").open("a").write(f"{time.time()} {point}\n")
    if strike["how"] == "kill all":
        for rank in range(main.WORLD_SIZE):
            if rank != main.RANK:
                os.kill(int((folder / f"pid-{start}-{rank}").read_text()), signal.SIGKILL)
    if strike["how"].startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGTERM)
    if strike["how"] == "stop":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # the second never returns, and no signal wakes it
            ctypes.CDLL(None).pthread_mutex_lock(mutex)


def with_a_child(function):
    """A reward may fork a process and stop it when its time is up: that must stop the child, and not the run."""
    def replacement(*arguments):
        if not strike.get("how", "").startswith("stop"):
            return function(*arguments)
        ready, tell = os.pipe()
        if (child := os.fork()) == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it must not outlive the rank, with its pipes
            os.write(tell, b".")
            signal.pause()
            os._exit(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        os.close(ready)
        os.close(tell)
        return function(*arguments)

    return replacement


def passing(module, name, before=None, after=None, when=lambda *_: True):
    """Replaces a function by one that passes a point before or after it does its work."""
    original = getattr(module, name)

    def replacement(*arguments, **named):
        counts = when(*arguments)
        if before and counts:
            at(before)
        result = original(*arguments, **named)
        if after and counts:
            at(after)
        return result

    setattr(module, name, replacement)


main.questions = with_a_child(main.questions)
passing(main, "questions", after="sampling")
passing(main, "policy_loss", after="learning")
passing(main, "step_metrics", before="updated", after="logging")
passing(main, "evaluate", before="evaluating")
passing(main, "evaluation_metrics", after="evaluated")
passing(main, "save_file", after="saving: tensors")
passing(logger, "_checksums", after="saving: checksums", when=lambda folder: folder.suffix == ".unfinished")
passing(logger, "_sync_to_disk", before="saving: synced", after="saving: renamed", when=lambda folder: folder.name == "checkpoints")
passing(shutil, "rmtree", before="saving: removal", after="saving: removed", when=lambda folder, *_: folder.name.startswith("step-"))
passing(logger, "_sync_to_disk", after="saving: best", when=lambda folder: folder.name.startswith("best-"))
passing(Path, "replace", after="saving: linked")
signal.signal(signal.SIGALRM, lambda *_: None)  # as a reward with a time limit has it


def run():
    """Does not return: main.main ends the process."""
    global strike
    strike = plan[start] if start < len(plan) else strike
    (folder / f"pid-{start}-{main.RANK}").write_text(str(os.getpid()))
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    main.main(sys.argv[3:])


if not all(strike["how"] == "kill all" for strike in plan):
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run()
for start in range(len(plan) + 1):
    if (child := os.fork()) == 0:
        run()
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != -signal.SIGKILL:
        sys.exit(code)
