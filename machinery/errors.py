"""A user's mistake ends in one line that says what to do. All else ends in Python's traceback."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

OUT_OF_RANGE = (
    "the model gives no probabilities any more: lower training.learning_rate, or raise "
    "sampling.temperature. The saved checkpoints are not affected"
)
# What needs less memory, the change that costs least first.
SAMPLE_IN_LESS_MEMORY = "lower sampling.max_rows, then training.max_new_gen_tokens"
LEARN_IN_LESS_MEMORY = (
    "lower training.tokens_per_micro_batch, then set model.gradient_checkpointing to true, then "
    "model.lora_rank to 32. With several GPUs set training.shard to true"
)
LOAD_IN_LESS_MEMORY = (
    "set model.lora_rank to 32, for example, use a smaller model or teacher, or start fewer ranks. "
    "With several GPUs set training.shard to true"
)
REMEDY_OF_PHASE = {
    "sample": SAMPLE_IN_LESS_MEMORY,
    "evaluate": SAMPLE_IN_LESS_MEMORY,
    "score": "it is the task's reward that needs the memory",
    "learn": LEARN_IN_LESS_MEMORY,
    "measure": LEARN_IN_LESS_MEMORY,
    "save": "saving takes 2 GB of the computer's RAM, or as much as the largest tensor",
}
KILLED = (
    "exit code -9 (SIGKILL) most often means that the computer ran out of memory: lower "
    "training.tokens_per_micro_batch, then sampling.max_rows, or start fewer ranks"
)


class UserError(Exception):
    """Something that the user can mend. It ends in one line and exit code 2."""


class SharedError(UserError):
    """A user error that every rank raises."""


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
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {describe(error, 105)}"
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise UserError(f"{what} ({reason}, at {where})") from error


@contextmanager
def errors_of_phase(phase: str, steps_done: int) -> Iterator[None]:
    """Turns what a lack of memory, or a model without probabilities, has caused into advice."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            remedy = REMEDY_OF_PHASE.get(phase, LOAD_IN_LESS_MEMORY)
            raise UserError(f"out of memory in phase {phase}: {remedy}") from error
        is_sampling = phase in ("sample", "evaluate")
        if "probability tensor contains" in str(error):
            raise UserError(f"after step {steps_done} {OUT_OF_RANGE}") from error
        if is_sampling and "device-side assert" in str(error):
            raise UserError(f"after step {steps_done} the GPU stopped while sampling, and "
                            "CUDA_LAUNCH_BLOCKING=1 shows where. Most often "
                            f"{OUT_OF_RANGE}") from error
        raise


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


# ---------------------------------------------------------------- texts in one line

def describe(error: BaseException, most: int = 300) -> str:
    """Returns the text of an exception, which may have many lines, as one line."""
    return shortened(" ".join(visible(str(error)).split()), most)


def visible(text: str) -> str:
    """Returns the text with an escape for each character that has no shape of its own."""
    def escape(character: re.Match) -> str:
        return character[0] if character[0].isprintable() else ascii(character[0])[1:-1]

    return re.sub(r"[^\n]", escape, text)


def shortened(text: str, most: int) -> str:
    """Returns at most so many characters of the text, by leaving out its middle."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"
