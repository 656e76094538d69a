"""How the process of a rank begins and ends: errors, signals, exit codes."""

import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist

from machinery.errors import Stopped, UserError, said
from machinery.ranks import RANK, SharedError, join, over_ranks


def stop_signals() -> Callable[[], Stopped | None]:
    """From now on SIGTERM, SIGINT and SIGHUP wait for the end of a step; a second Ctrl-C does not.
    The function returned says on all ranks whether one has come to any of them."""
    came, own_process = [], os.getpid()

    def heed(number, frame):
        if os.getpid() != own_process:  # in one that a reward has forked: the signal is not ours
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def stop_requested() -> Stopped | None:
        number, = over_ranks([*came, 0][:1], dist.ReduceOp.MAX)
        return Stopped(signal.Signals(int(number))) if number else None

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, heed)
    return stop_requested


class Screen(io.FileIO):
    """A screen that is full, broken or gone costs what would have been seen, and never the run."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)  # None where it would have to wait
        return len(data)


def launch(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Ends with 0 once `main` is through, 2 after a user's mistake, 128 + a stop signal, else 1."""
    code = 1
    for number, name in ((1, "stdout"), (2, "stderr")):
        own = getattr(sys, f"__{name}__")
        if getattr(sys, name) is own:  # else it is someone else's
            raw = io.BufferedWriter(Screen(number, "w", closefd=False))
            stream = io.TextIOWrapper(raw, own.encoding if own else "utf-8", "backslashreplace",
                                      line_buffering=True)
            stream.close = stream.flush  # it is not a task's to close
            setattr(sys, name, stream)
    faulthandler.enable(2)  # says where, when C code ends the process
    try:
        join()
        main(sys.argv[1:] if arguments is None else arguments)
        dist.barrier()
        code = 0
    except Stopped as stop:
        dist.barrier()  # none leaves before rank 0 has saved
        code = 128 + stop.args[0]
    except UserError as error:
        line = f"error: {in_one_line(error)}"
        _tell_torchrun(line)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        if isinstance(error, SharedError):
            with suppress(RuntimeError):
                dist.barrier()  # torchrun ends the others once one has left: all have told it
        if RANK != 0:  # rank 0 says it, unless only this rank has met it; then torchrun ends all
            time.sleep(10)
        print(line, file=sys.stderr)
        code = 2
    except BaseException as error:  # noqa: BLE001, whatever it is, the process ends through `leave`
        if isinstance(error, dist.DistError) or "gloo" in said(error):  # a consequence, not a cause
            print(f"rank {RANK}: another rank has left ({said(error)})", file=sys.stderr)
        else:
            _tell_torchrun(f"{type(error).__name__}: {said(error)}")
            traceback.print_exc()
    return leave(code)


def in_one_line(error: UserError) -> str:
    """At most 300 characters; what does not fit, and what has led to it, is left in a file."""
    more = ""
    with suppress(OSError, AttributeError):  # a full disk; or there is no folder of a run yet
        if error.__cause__ or said(error, 290) != str(error):
            path = error.folder / f"error-{RANK}.txt"
            path.write_text("".join(traceback.format_exception(error)), "utf-8", "replace")
            more = f" (more in {path})"
    return said(error, max(150, 290 - len(more))) + more


def _tell_torchrun(message: str) -> None:
    """For its own report, which comes last on the screen."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)


def leave(code: int) -> NoReturn:
    """Without Python's own clean-up, which would free DDP, and so wait for gloo's threads, while
    they may be waiting for the interpreter lock. (nccl's would wait for ranks that never come.)"""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
