"""The tasks of reasoning-gym: 98 kinds of puzzles, each with its own grader.

    .venv/bin/pip install reasoning-gym
    .venv/bin/torchrun --nproc-per-node=2 main.py task.name=examples/gym.py \\
        data.dataset="chain_sum min_terms=2 max_terms=2 min_digits=2 max_digits=2" \\
        data.prompt_style=chat model.name=Qwen/Qwen2.5-Coder-0.5B-Instruct

`data.dataset` is the name of a task followed by its parameters, as the library takes them. The top
of countdown.py explains the names below.
"""

import difflib
import re
from collections.abc import Iterator
from typing import Any

import yaml

# `strict` is earned if the library gives the reply full marks exactly as it is. `generous` is the
# library's mark, from 0 to 1, for the best of several readings of the reply.
REWARD_WEIGHTS = {"strict": 1.0, "generous": 0.0}
SOLVED = "strict"
SYSTEM_MESSAGE = "You answer with the result alone, without any explanation."
NUM_ROWS = 1000
# Their questions depend on more than the seed, like the order of a set, so ranks wouldn't agree.
UNSTABLE = ("codeio", "isomorphic_strings", "knight_swap", "list_functions",
            "polynomial_multiplication", "ransom_note", "word_ladder")

tasks: dict[str, Any] = {}  # A row only names its task, because it's copied for each answer.


def load(dataset: str, max_rows: int | None) -> list[dict]:
    """Returns the questions of one task, always the same for the same parameters."""
    try:
        import reasoning_gym  # Nothing else needs it, and it takes a second.
    except ImportError:
        raise ValueError("examples/gym.py needs: pip install reasoning-gym") from None
    name, *words = dataset.split() or [""]
    known = reasoning_gym.factory.DATASETS
    if name not in known:
        close = ", ".join(difflib.get_close_matches(name, known, cutoff=0.0))
        raise ValueError(f"data.dataset={dataset!r}: reasoning-gym has no {name!r}, but {close} "
                         "and others")
    if name in UNSTABLE:
        raise ValueError(f"data.dataset={dataset!r}: choose another task, because here each "
                         "process gets different questions, even with the same seed")
    parameters = {"seed": 0, "size": max_rows or NUM_ROWS}
    try:
        for word in words:
            key, _, value = word.partition("=")
            if not value:
                raise ValueError(f"{word!r} is not like max_terms=2")
            parameters[key] = yaml.safe_load(value)
        tasks[dataset] = reasoning_gym.create_dataset(name, **parameters)
        entries = list(tasks[dataset])
    except Exception as error:  # noqa: BLE001  The library has no error type of its own.
        reason = " ".join(str(error).split())
        raise ValueError(f"data.dataset={dataset!r}: {reason}") from None
    return [{"prompt": entry["question"], "problem": entry["question"], "entry": entry,
             "task": dataset} for entry in entries]


def reward_function(completion: str, row: dict) -> dict[str, float]:
    marks = [mark(reading.strip().removesuffix("."), row) for reading in readings(completion)]
    return {"strict": float(mark(completion.strip(), row) == 1.0), "generous": max(marks)}


def readings(completion: str) -> Iterator[str]:
    """Yields what may be meant as the answer."""
    yield completion
    yield completion.rstrip().rpartition("\n")[2]  # the last line
    for sign in ("answer is", ":", "=", "<answer>"):
        if sign in completion:
            yield completion.rpartition(sign)[2].partition("</answer>")[0]
    numbers = re.findall(r"-?\d+(?:[.,/]\d+)*", completion)
    yield from numbers[-1:]


def mark(answer: str, row: dict) -> float:
    """Returns the library's mark. Some of its graders fail on an answer they can't read."""
    try:
        return float(tasks[row["task"]].score_answer(answer, row["entry"]))
    except Exception:  # noqa: BLE001
        return 0.0
