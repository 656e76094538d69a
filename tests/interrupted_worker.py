"""main.py, struck at a point of its work.

A strike names a rank, a point of its work, and which passing of that point counts. It also says
how: "kill all" (SIGKILL, as when the power goes), "kill one" (that rank alone), "kill one, others
busy" (in C code that takes minutes), or the name of a stop signal, which every rank gets."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from conftest import run_without_curves

import main
from machinery import on_ctrl_c, runs
from machinery.ranks import RANK, WORLD_SIZE


class Striker:
    """Counts how often this rank passes the point of its strike, and strikes."""

    def __init__(self, strike: dict, folder: Path):
        self.strike = strike
        self.folder = folder
        self.passed = 0
        (folder / f"pid-{RANK}").write_text(str(os.getpid()))

    def at(self, point: str) -> None:
        if self.strike.get("point") != point:
            return
        self.passed += 1
        if self.passed != self.strike.get("passing", 1):
            return
        how = self.strike["how"]
        if self.strike["rank"] == RANK:
            self.hit(point, how)
        elif how == "kill one, others busy":
            # A signal does not interrupt this. A handler in Python would run only after it.
            hashlib.pbkdf2_hmac("sha512", b"", b"", iterations=2**31 - 1)

    def hit(self, point: str, how: str) -> None:
        with open(self.folder / "struck", "a") as file:
            file.write(f"{point}\n")
        if how.startswith("kill one"):
            time.sleep(0.3)  # The others can get there. If one does not, less is tested.
            os.kill(os.getpid(), signal.SIGKILL)
        others = [rank for rank in range(WORLD_SIZE) if rank != RANK]
        pids = [int((self.folder / f"pid-{rank}").read_text()) for rank in others]
        for pid in [*pids, os.getpid()]:
            os.kill(pid, signal.Signals["SIGKILL" if how == "kill all" else how])

    def passing(self, module, name, before=None, after=None, when=lambda *_: True) -> None:
        """Replaces a function by one that passes a point before or after it does its work."""
        original = getattr(module, name)

        def replacement(*arguments, **named):
            counts = when(*arguments)
            if before and counts:
                self.at(before)
            result = original(*arguments, **named)
            if after and counts:
                self.at(after)
            return result

        setattr(module, name, replacement)


def run_and_be_struck(strike: dict, folder: str, arguments: list[str]):
    """Does not return: `launch` ends the process."""
    passing = Striker(strike, Path(folder)).passing
    passing(main, "questions", after="sampling")
    passing(main, "policy_loss", after="learning")
    passing(main, "step_metrics", before="updated", after="logging")
    passing(main, "evaluate", before="evaluating")
    passing(main, "evaluation_metrics", after="evaluated")
    passing(runs, "save_file", after="saving: tensors")
    passing(runs, "sync_to_disk", before="saving: written",
            when=lambda path: path.name == "state.json")
    passing(runs, "sync_to_disk", before="saving: renamed", after="saving: synced",
            when=lambda path: path.name == "checkpoints")
    passing(runs, "throw_away", before="saving: removal",
            when=lambda folder: folder.name.startswith("step-") and folder.exists())
    passing(shutil, "rmtree", before="saving: thrown away", after="saving: removed",
            when=lambda folder, *_: folder.parent.name == "checkpoints" and folder.exists())
    passing(runs, "sync_to_disk", after="model: written",
            when=lambda path: path.name == "unfinished" and path.parent.name != "checkpoints")
    passing(Path, "rename", before="model: leaves", after="model: left",
            when=lambda path, there: there.name.endswith(".before"))
    passing(Path, "rename", after="model: there",
            when=lambda path, there: there.name in runs.MODELS)
    passing(runs, "throw_away", before="model: goes", after="model: gone",
            when=lambda path: path.name.endswith(".before") and path.exists())
    # As main.py has it. A shell lets its background jobs, and so the tests there, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    on_ctrl_c()
    signal.signal(signal.SIGALRM, lambda *_: None)  # as a reward with a time limit has it
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    run_without_curves(*arguments)


if __name__ == "__main__":  # Under torchrun, which may start it again. Then no strike comes.
    text, folder, *arguments = sys.argv[1:]
    is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    run_and_be_struck({} if is_restarted else json.loads(text), folder, arguments)
