"""main.py, struck at a point of its work.

A strike says which rank strikes, at which point, at its how manyth passing, and how: "kill"
(SIGKILL to that rank), "kill all" (to every rank at once, as when the power goes), or the name of a
stop signal (to every rank; under torchrun to torchrun, which ends its ranks). As a script, which is
what torchrun starts, it takes a list of them, one for each start: `interrupted_worker.py STRIKES
FOLDER arguments...`"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from conftest import draw_nothing, run_main

import logger
import main
from machinery import checkpoints, disk, metrics, on_ctrl_c


def run_and_be_struck(strike: dict, folder: str, arguments: list[str]):
    """Does not return: `launch` ends the process."""
    folder, passed = Path(folder), 0
    (folder / f"pid-{main.RANK}").write_text(str(os.getpid()))

    def at(point):
        nonlocal passed
        if (strike.get("rank"), strike.get("point")) != (main.RANK, point):
            return
        passed += 1
        if passed != strike.get("passing", 1):
            return
        with open(folder / "struck", "a") as file:
            file.write(f"{time.time()} {point}\n")
        others = [int((folder / f"pid-{rank}").read_text())
                  for rank in range(main.WORLD_SIZE) if rank != main.RANK]
        if strike["how"] == "kill":
            struck = [os.getpid()]
        elif strike["how"] != "kill all" and "TORCHELASTIC_RUN_ID" in os.environ:
            struck = [os.getppid()]  # torchrun tells its ranks
        else:
            struck = [*others, os.getpid()]
        name = "SIGKILL" if strike["how"].startswith("kill") else strike["how"]
        for pid in struck:
            os.kill(pid, signal.Signals[name])

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

    passing(main, "questions", after="sampling")
    passing(main, "policy_loss", after="learning")
    passing(metrics.StepReport, "metrics", before="updated", after="logging")
    passing(main, "evaluate", before="evaluating")
    passing(main, "evaluation_metrics", after="evaluated")
    passing(checkpoints, "save_file", after="saving: tensors")
    passing(disk, "sync_to_disk", before="saving: written",
            when=lambda path: path.name == "state.json")
    passing(disk, "sync_to_disk", before="saving: renamed", after="saving: synced",
            when=lambda path: path.name == "checkpoints")
    passing(shutil, "rmtree", before="saving: removal", after="saving: removed",
            when=lambda folder, *_: folder.name.startswith("step-"))
    passing(disk, "sync_to_disk", after="saving: best",
            when=lambda path: path.name == "unfinished" and path.parent.name != "checkpoints")
    passing(Path, "replace", after="saving: linked")
    passing(logger.Logger, "finish", before="finishing")
    logger.Logger._draw_curves = draw_nothing
    # As main.py has it. A shell lets its background jobs, and so the tests there, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_ctrl_c(lambda: "nothing is saved yet")
    signal.signal(signal.SIGALRM, lambda *_: None)  # as a reward with a time limit has it
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    run_main(*arguments)


if __name__ == "__main__":
    strikes, start = json.loads(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run_and_be_struck(strikes[start] if start < len(strikes) else {}, sys.argv[2], sys.argv[3:])
