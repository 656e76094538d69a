"""How the process of a rank begins and ends: errors and exit codes."""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from machinery.errors import SharedError, UserError, describe, is_lost_rank
from machinery.ranks import RANK, join, leave_group

SECONDS_FOR_THE_CAUSE = 5
KILLED = (
    "exit code -9 (SIGKILL) most often means that the computer ran out of memory: lower "
    "training.tokens_per_micro_batch, then sampling.max_rows, or start fewer ranks"
)
LATEST_TIME = 2**31 - 1  # torchrun takes the earliest failure for the cause.


def launch(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Runs `main`, and ends the process: with 0 once `main` is through, with 2 after a user's
    mistake, with 130 after Ctrl-C, and otherwise with 1."""
    # A token that the terminal's alphabet lacks must not end a run.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    faulthandler.enable(2)  # It says where, when C code ends the process.
    # torchrun shows this if a signal ends the rank. Other errors put theirs in its place.
    tell_torchrun(KILLED, LATEST_TIME)
    try:
        join()
        main(sys.argv[1:] if arguments is None else arguments)
        leave_group()
        code = 0
    except UserError as error:
        code = tell_mistake(error)
    except BaseException as error:  # noqa: BLE001  A task that calls sys.exit() is no success.
        code = tell_failure(error)
    return end_process(code)


def tell_mistake(error: UserError) -> int:
    line = f"error: {describe(error, 600)}"
    tell_torchrun(line)
    if isinstance(error, SharedError):
        # All ranks have this error, and rank 0 prints it. The others wait until it has, because
        # torchrun ends all ranks as soon as one has left.
        if RANK == 0:
            print(line, file=sys.stderr, flush=True)
        leave_group()
    else:
        if RANK != 0:
            # Rank 0 may have the same error and say it. Then torchrun ends this rank.
            time.sleep(SECONDS_FOR_THE_CAUSE)
        print(line, file=sys.stderr, flush=True)
    return 2


def tell_failure(error: BaseException) -> int:
    if is_lost_rank(error):
        # The other rank's own message says why it has ended. torchrun ends this rank too, usually
        # before it has waited to the end.
        time.sleep(SECONDS_FOR_THE_CAUSE)
        line = (f"rank {RANK} cannot reach another rank any more ({describe(error)}). If no rank "
                f"says why: {KILLED}; with NCCL_DEBUG=INFO nccl says what it does; a container may "
                "need --shm-size=1g")
        print(line, file=sys.stderr)
    else:
        line = f"{type(error).__name__}: {describe(error)}"
        traceback.print_exception(error)
    tell_torchrun(line)
    return 1


def tell_torchrun(message: str, when: float | None = None) -> None:
    """Hands a message to torchrun, whose own report comes last on the screen."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(when or time.time())}, file)


def end_process(code: int) -> NoReturn:
    """Ends without Python's own clean-up. That would wait for threads of gloo or nccl, and these
    may be waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
