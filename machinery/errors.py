"""A user's mistake ends in one line that says what to do; everything else in a Python traceback."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

OUT_OF_RANGE = (
    "the model no longer gives valid probabilities: lower training.learning_rate, or raise "
    "sampling.temperature. The saved checkpoints are not affected"
)
# Ways to need less memory, cheapest first.
SAMPLE_IN_LESS_MEMORY = (
    "lower sampling.max_rows first. If that is not enough, lower training.max_new_gen_tokens"
)
LEARN_IN_LESS_MEMORY = (
    "lower training.tokens_per_micro_batch first. If that is not enough, set "
    "model.gradient_checkpointing to true, and then model.lora_rank to 32. With several GPUs, you "
    "can also set training.shard to true"
)
LOAD_IN_LESS_MEMORY = (
    "set model.lora_rank (to 32, for example), use a smaller model or teacher, or start fewer "
    "ranks. With several GPUs, you can also set training.shard to true"
)
REMEDY_OF_PHASE = {
    "sample": SAMPLE_IN_LESS_MEMORY,
    "evaluate": SAMPLE_IN_LESS_MEMORY,
    "score": "the task's reward function needs this memory, so make it use less",
    "learn": LEARN_IN_LESS_MEMORY,
    "measure": LEARN_IN_LESS_MEMORY,
    "save": "saving needs 2 GB of memory, or more if the largest tensor is larger: free that much",
}
KILLED = (
    "exit code -9 (SIGKILL) usually means that the computer ran out of memory: lower "
    "training.tokens_per_micro_batch first and then sampling.max_rows, or start fewer ranks"
)


class UserError(Exception):
    """Something the user can fix. It ends in one line and exit code 2."""


class SharedError(UserError):
    """A user error that all ranks raise."""


@contextmanager
def as_user_error(
    what: str, kinds: tuple[type[BaseException], ...] = (Exception,)
) -> Iterator[None]:
    """Turns an error of these kinds into a user error about `what`, which names the culprit."""
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {describe(error, 105)}"
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise UserError(f"{what} ({reason}, at {where})") from error


@contextmanager
def errors_of_phase(phase: str, steps_done: int) -> Iterator[None]:
    """Turns a lack of memory, or a model without valid probabilities, into advice."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            remedy = REMEDY_OF_PHASE.get(phase, LOAD_IN_LESS_MEMORY)
            raise UserError(f"out of memory in phase {phase}: {remedy}") from error
        # `torch.multinomial` says one or the other.
        if re.search("probability tensor contains|invalid multinomial dist", str(error)):
            raise UserError(f"after step {steps_done}, {OUT_OF_RANGE}") from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Recognizes the messages of PyTorch, of CUDA and its libraries, and of the system."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = "allocate memory|out of memory|ALLOC(ATION)?_FAILED"
    return re.search(words, str(error)) is not None


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or can't be reached."""
    if not dist.is_initialized():
        return False
    # gloo raises a plain RuntimeError that names its source file.
    is_from_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return is_from_gloo or isinstance(error, dist.DistError)


# ---------------------------------------------------------------- one-line messages

def describe(error: BaseException, most: int = 300) -> str:
    """Returns the message of an exception, which may have many lines, as one line."""
    return shortened(" ".join(visible(str(error)).split()), most)


def visible(text: str) -> str:
    """Returns the text with every unprintable character escaped."""
    def escape(character: re.Match) -> str:
        return character[0] if character[0].isprintable() else ascii(character[0])[1:-1]

    return re.sub(r"[^\n]", escape, text)


def shortened(text: str, most: int) -> str:
    """Returns at most this many characters of the text, leaving out its middle."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
