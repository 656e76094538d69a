"""What a user can mend becomes one line, never a traceback."""

from contextlib import contextmanager

import torch


class UserError(Exception):
    """Something the person who started the run can mend: one line, and exit code 2."""


class Stopped(Exception):
    """This signal has asked for the end, and the step in which it came is done and saved."""


@contextmanager
def blame(what: str, kinds: tuple[type[Exception], ...] = (Exception,)):
    """Whatever goes wrong inside (of these `kinds`) is about something the user has named, `what`.
    Running out of memory is left to whoever knows the phase: `Logger.phase`."""
    try:
        yield
    except kinds as error:  # libraries raise many unrelated types, with messages of many lines
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:300]
        raise UserError(f"{what} ({type(error).__name__}: {said})") from error


def is_out_of_memory(error: Exception) -> bool:
    words = ("can't allocate memory", "Cannot allocate memory")  # PyTorch's, and the system's
    return (isinstance(error, torch.OutOfMemoryError | MemoryError)
            or any(each in str(error) for each in words))
