"""How the process of a rank begins and ends: errors, signals, exit codes."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from machinery.errors import Stopped, UserError
from machinery.ranks import RANK, join, over_ranks


@contextmanager
def stop_signals():
    """SIGTERM, SIGINT and SIGHUP wait for the end of a step; a second Ctrl-C does not. Yields a
    function that returns a `Stopped` on all ranks once one has reached any of them, else None."""
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

    before = {number: signal.signal(number, heed)
              for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
              if signal.getsignal(number) != signal.SIG_IGN}  # as nohup has it
    try:
        yield stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:  # while the last step was saved: there is no step to wait for any more
        os.kill(os.getpid(), came[0])


def launch(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Ends with code 0, 2 after a user's mistake, 128 + the signal when stopped, else 1."""
    code = 1
    try:
        join()
        main(sys.argv[1:] if arguments is None else arguments)
        dist.barrier()
        code = 0
    except Stopped as stop:
        dist.barrier()  # none leaves before rank 0 has saved
        code = 128 + stop.args[0]
    except UserError as error:
        _tell_torchrun(f"error: {error}")
        if RANK != 0:  # rank 0 says it, unless only this rank has met it; then torchrun ends all
            signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted before or after training; what was saved is intact", file=sys.stderr)
        code = 130
    except Exception as error:  # noqa: BLE001, whatever it is, the process ends through `leave`
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # a consequence, not a cause
            print(f"rank {RANK}: another rank has left ({str(error)[:200]!r})", file=sys.stderr)
        else:
            _tell_torchrun(f"{type(error).__name__}: {error}")
            traceback.print_exc()
    return leave(code)


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
