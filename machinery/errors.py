"""What a user can mend becomes one line, never a traceback; and lines that fit the screen."""

import io
import json
import os
import re
import shutil
import signal
import textwrap
import time
import traceback
from contextlib import chdir, contextmanager

import torch
import torch.distributed as dist

from machinery import STOP_SIGNALS


class UserError(Exception): ...  # what whoever started the run can mend: one line, exit code 2

class SharedError(UserError): ...  # one that every rank raises

class Stopped(Exception): ...  # by this signal; the step in which it came is done and saved


def visible(text: str) -> str:
    """With an escape in place of each character that would change the screen, or has no shape."""
    return "".join(each if each.isprintable() or each == "\n"
                   else each.encode("unicode_escape").decode() for each in text)


def said(error: BaseException, most: int = 300) -> str:
    """What an exception carries, which may be many lines or cannot be shown at all, as one."""
    try:
        return shortened(" ".join(visible(str(error)).split()), most)
    except Exception:  # noqa: BLE001, whatever its own __str__ raises
        return "it cannot be shown"


def shortened(text: str, most: int) -> str:
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


class Lines(io.StringIO):  # where there is no terminal, a bar is a line, and wiping it nothing
    def write(self, text: str) -> None:
        print(text.strip(), end="\n" if text.strip() else "")


def columns() -> int:
    return shutil.get_terminal_size().columns - 1  # 79 where nobody knows


def fitting(fields: list[str]) -> str:
    """As many as one line takes, the first ones first."""
    while len("  ".join(fields)) > columns() and len(fields) > 1:
        fields = fields[:-1]
    return "  ".join(fields)


def block(text: str, indent: str = "") -> str:
    """Lines that fit, with nothing in them that would change the screen."""
    return "\n".join(textwrap.fill(line, max(40, columns()), break_on_hyphens=False,
                                   initial_indent=indent, subsequent_indent=indent)
                     for line in visible(text).split("\n"))


@contextmanager
def blame(what: str, kinds: tuple[type[BaseException], ...] = (Exception,)):
    """Whatever goes wrong inside (of these `kinds`) is about something the user has named, `what`.
    Running out of memory is left to whoever knows the phase: `Logger.phase`."""
    try:
        yield
    except kinds as error:  # libraries raise many unrelated types
        if isinstance(error, UserError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        raise UserError(f"{what} ({type(error).__name__}: {said(error, 105)})") from error


@contextmanager
def theirs(what: str):
    """As `blame`, for code of the user's: says where; and it may try to leave, which would end the
    run without a word, or as if it had succeeded. What a process has but one of, and such code may
    move, is afterwards as before."""
    process, leave, mask, dtype = os.getpid(), os._exit, os.umask(0), torch.get_default_dtype()
    os.umask(mask)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    grad, device = torch.set_grad_enabled(torch.is_grad_enabled()), torch.get_default_device()

    def refuse(code):
        if os.getpid() != process:  # one that it has forked
            leave(code)
        raise SystemExit(code)

    os._exit = refuse
    try:
        with chdir(os.curdir), grad, device:
            yield
    except BaseException as error:
        calls = [call for call in traceback.extract_tb(error.__traceback__)
                 if os.path.dirname(call.filename) not in (os.path.dirname(__file__), "")]
        place = "".join(f" at line {call.lineno} of {call.filename}" for call in calls[-1:])
        with blame(what + place, (BaseException,)):
            raise
    finally:
        os._exit = leave
        os.umask(mask)
        torch.set_default_dtype(dtype)
        for number, handler in handlers.items():
            now = signal.getsignal(number)
            # a Ctrl-C that came meanwhile has made way for the second: see `stop_signals`
            if now != handler and (number, now) != (signal.SIGINT, signal.SIG_DFL):
                signal.signal(number, handler)


def is_out_of_memory(error: BaseException) -> bool:
    """In the words of PyTorch, of CUDA and its libraries, and of the system."""
    words = "allocate memory|out of memory|ALLOC(ATION)?_FAILED"
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or re.search(words, said(error, 10_000)) is not None)


def is_lost_rank(error: BaseException) -> bool:
    """A consequence of what has happened to another rank, or between them; never a cause."""
    gloos = isinstance(error, RuntimeError) and "gloo/" in said(error)  # it names its file
    return dist.is_initialized() and (isinstance(error, dist.DistError) or gloos)


def tell_torchrun(message: str) -> None:
    """For its own report, which comes last on the screen."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)
