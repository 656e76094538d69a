"""A user's mistake ends in one line. Everything else ends in Python's own traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from machinery.text import shortened, visible


class UserError(Exception):
    """Something that the user can mend. It ends in one line and exit code 2."""


class SharedError(UserError):
    """A user error that every rank raises."""


def describe(error: BaseException, most: int = 300) -> str:
    """Returns the text of an exception, which may have many lines, as one line."""
    return shortened(" ".join(visible(str(error)).split()), most)


@contextmanager
def as_user_error(
    what: str, kinds: tuple[type[BaseException], ...] = (Exception,)
) -> Iterator[None]:
    """Turns an error of these kinds into a user error about `what`, which the user has named."""
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        reason = describe(error, 105)
        raise UserError(f"{what} ({type(error).__name__}: {reason})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Knows the words of PyTorch, of CUDA and its libraries, and of the system."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = "allocate memory|out of memory|ALLOC(ATION)?_FAILED"
    return re.search(words, str(error)) is not None


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone, or cannot be reached."""
    if not dist.is_initialized():
        return False
    # An error of gloo is a plain RuntimeError that names gloo's source file.
    is_from_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return is_from_gloo or isinstance(error, dist.DistError)
