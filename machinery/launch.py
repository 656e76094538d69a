"""How the process of a rank begins and ends: errors, signals, exit codes."""

import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from machinery import STOP_SIGNALS
from machinery.errors import SharedError, Stopped, UserError, is_lost_rank, said, tell_torchrun
from machinery.ranks import RANK, join, leaving, over_ranks, part

SECONDS_TO_HEAR = 5  # which rank has left, from all the others that pass it on


def stop_signals() -> Callable[[], Stopped | None]:
    """From now on SIGTERM, SIGINT and SIGHUP wait for the end of a step; a second Ctrl-C does not.
    The function returned says on all ranks whether one has come to any of them. Collective."""
    came, all_heed, own_process = [], False, os.getpid()

    def heed(number, frame):
        if os.getpid() != own_process:  # in one that a reward has forked: the signal is not ours
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not all_heed:  # it ends the ranks that do not: none of them is missed
            leaving.set()
        elif RANK == 0 and not came:
            os.write(2, b"\nstopping after this step; Ctrl-C again to stop now\n")
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def stop_requested() -> Stopped | None:
        number, = over_ranks([*came, 0][:1], dist.ReduceOp.MAX)
        return Stopped(signal.Signals(int(number))) if number else None

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, heed)
    meeting = dist.all_reduce(torch.zeros(1), async_op=True)
    while not meeting.is_completed():  # `heed` would wait for the end of a wait in C
        time.sleep(0.01)
    with suppress(RuntimeError):
        meeting.wait()
        all_heed = True  # before the next line, whose lock `heed` must not wait for
        leaving.clear()
    if came and not all_heed:
        leave(128 + came[0])
    return stop_requested


class Screen(io.FileIO):
    """A screen that is full, broken or gone costs what would have been seen, and never the run."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)  # None where it would have to wait
        return len(data)


def launch(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Ends with 0 once `main` is through, 2 after a user's mistake, 128 + a stop signal, else 1."""
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
        try:
            main(sys.argv[1:] if arguments is None else arguments)
            code = 0
        except Stopped as stop:
            code = 128 + stop.args[0]
        part()  # none leaves before rank 0 has saved
    except UserError as error:
        code = 2
        leaving.set()
        line = f"error: {in_one_line(error)}"
        tell_torchrun(line)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        if isinstance(error, SharedError):
            with suppress(RuntimeError):
                part()  # torchrun ends the others once one has left: all have told it
        if RANK != 0:  # rank 0 says it, unless only this rank has met it; then torchrun ends all
            time.sleep(10)
        print(line, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001, whatever it is, the process ends through `leave`
        code = 1
        if is_lost_rank(error):
            time.sleep(SECONDS_TO_HEAR)  # the thread of `_watch` says which rank, and ends this one
            line = (f"rank {RANK}: no rank has left, but they reach each other no more "
                    f"({said(error)}). With NCCL_DEBUG=INFO nccl says why; in a container it may "
                    "be a small /dev/shm (docker run --shm-size=1g)")
            print(line, file=sys.stderr)
        else:
            leaving.set()
            line = f"{type(error).__name__}: {said(error)}"
            traceback.print_exc()
        tell_torchrun(line)
    return leave(code)


def in_one_line(error: UserError) -> str:
    """At most 300 characters; what does not fit, and what has led to it, is left in a file."""
    more = ""
    with suppress(OSError, AttributeError):  # a full disk; or there is no folder of a run yet
        if error.__cause__ or said(error, 290) != str(error):
            path = error.folder / f"error-{RANK}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(traceback.format_exception(error)), "utf-8", "replace")
            more = f" (more in {path})"
    return said(error, max(150, 290 - len(more))) + more


def leave(code: int) -> NoReturn:
    """Without Python's own clean-up, which would free DDP, and so wait for gloo's threads, while
    they may be waiting for the interpreter lock. (nccl's would wait for ranks that never come.)"""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
