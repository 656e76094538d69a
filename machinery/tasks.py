"""A task: its file, its questions, their prompts, and what it says of an answer."""

import faulthandler
import importlib.util
import random
import sys
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast, overload

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from machinery.disk import beside_main
from machinery.errors import UserError, as_user_error, describe
from machinery.ranks import RANK, WORLD_SIZE
from machinery.settings import MOST, ROOT, Config
from machinery.text import shortened

SECONDS_FOR_A_REWARD = 60
# Metrics and samples.jsonl use these names for something else than a part of the reward.
TAKEN = {"reward", "truncated", "completion_length", "best_of_n", "solved", "step", "question",
         "prompt", "completion", "solved_low", "solved_high", "best_of_n_low", "best_of_n_high"}


class Task(Protocol):
    """What the trainer needs of a task. A task is a Python file that defines these names.

    `countdown.py` is such a file. `task.name=mytask.py` puts your own in its place.

    REWARD_WEIGHTS says how much each part of the reward counts. The reward of an answer is the
    weighted sum of its parts. A part with weight 0.0 is only measured.

    SOLVED names one of these parts. That part is 1.0 if the answer solves the question, 0.0 if it
    does not, or something between.

    SYSTEM_MESSAGE and REPLY_START are for `data.prompt_style: chat`, and a file may leave them out.
    The system message stands before the question. REPLY_START opens every answer, like "<think>".
    """

    REWARD_WEIGHTS: dict[str, float]
    SOLVED: str
    SYSTEM_MESSAGE: str
    REPLY_START: str

    def load(self, dataset: str, max_rows: int | None) -> list[dict]:
        """Returns the questions as rows, in the same order on every rank.

        A row has a "prompt" and all that the reward needs. It may have a "group", because the
        evaluation reports each group apart. It may have a "problem", a text, number or tuple. Rows
        of one problem are never split between training and validation. A ValueError is shown to
        the user as one line."""

    def reward_function(self, completion: str, row: dict) -> dict[str, float]:
        """Returns the parts of an answer's reward.

        The completion is the sampled text, without the prompt and without the stop token. The row
        is a copy of the one that `load` returned."""


@dataclass(frozen=True)
class Question:
    """A row of the task, and its prompt as tokens."""

    row: dict
    prompt_ids: list[int]


class Questions(Sequence[Question]):
    """Rows of a task as questions. Encodes a prompt when it is first asked for, and keeps it."""

    def __init__(self, rows: list[dict], encode: Callable[[dict], list[int]]) -> None:
        self.rows = rows
        self.encode = encode
        self._questions: dict[int, Question] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Question: ...

    @overload
    def __getitem__(self, place: slice) -> list[Question]: ...

    def __getitem__(self, place: int | slice) -> Question | list[Question]:
        if isinstance(place, slice):
            places = range(len(self))[place]
            return [self[i] for i in places]
        if place not in self._questions:
            row = self.rows[place]
            self._questions[place] = Question(row, self.encode(row))
        return self._questions[place]


# ---------------------------------------------------------------- the task's file

def load_task(config: Config) -> Task:
    """Imports the file that `task.name` says, and checks the names that it defines."""
    name = config.task.name
    module = import_task(name)
    own_weights = check_names(module, f"task.name={name!r}")
    weights = config.task.reward_weights or own_weights
    unknown = sorted(set(weights) - set(own_weights))
    if unknown:
        raise UserError(f"task.reward_weights: no {', '.join(unknown)} among the parts "
                        f"{', '.join(own_weights)}")
    names = {
        **vars(module),
        "REWARD_WEIGHTS": dict(weights),
        "SYSTEM_MESSAGE": getattr(module, "SYSTEM_MESSAGE", None) or "",
        "REPLY_START": getattr(module, "REPLY_START", None) or "",
    }
    return cast(Task, SimpleNamespace(**names))


def import_task(name: str) -> ModuleType:
    """Runs a task's file. An error in it shows its own traceback."""
    path = ROOT / "countdown.py" if name == "countdown" else Path(beside_main(name))
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"task.name={name!r}: write countdown, or the path of a Python file")
    if path.stem.isidentifier():
        known = importlib.util.find_spec(path.stem)
        if known and not (known.has_location and path.samefile(known.origin)):
            raise UserError(f"task.name={name!r}: Python has a module {path.stem}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Dataclasses and pickle look for a module's classes there.
    sys.path.append(str(path.parent))  # A task may import the files beside it.
    spec.loader.exec_module(module)
    return module


def check_names(module: ModuleType, source: str) -> dict[str, float]:
    """Checks what a task's file defines, and returns its weights as floats."""
    for name in ("load", "reward_function", "REWARD_WEIGHTS", "SOLVED"):
        if not hasattr(module, name):
            raise UserError(f"{source} has to define {name}; docs/tasks.md shows a whole task")
    weights = module.REWARD_WEIGHTS
    solved = module.SOLVED
    refusal = (f"{source}: REWARD_WEIGHTS has to be names with numbers, like {{'right': 1.0}}, and "
               f"not {shortened(repr(weights), 80)}")
    if not isinstance(weights, dict):
        raise UserError(refusal)
    for part, weight in weights.items():
        is_number = isinstance(weight, Real) and abs(weight) <= MOST
        if not isinstance(part, str) or not is_number:
            raise UserError(refusal)
        is_taken = part in TAKEN or part.endswith("_std") or "/" in part
        is_solved = part == "solved" and solved == "solved"  # The metric has the same value.
        if is_taken and not is_solved:
            raise UserError(f"{source}: a metric has the name {part!r}; call this part of the "
                            "reward something else")
    if solved not in weights:
        raise UserError(f"{source}: SOLVED={solved!r} has to name a part of REWARD_WEIGHTS")
    return {part: float(weight) for part, weight in weights.items()}


# ---------------------------------------------------------------- questions

def load_questions(task: Task, tokenizer: PreTrainedTokenizerBase,
                   config: Config) -> tuple[Questions, Questions]:
    """Returns the training and the validation questions, the same on every rank.

    No problem is in both. Each problem of the validation questions stands there once."""
    data = config.data

    def encode(row: dict) -> list[int]:
        return encode_prompt(row, task, tokenizer, config)

    rows = load_rows(task, config)
    if data.max_prompt_tokens is not None:
        num_loaded = len(rows)
        rows = [row for row in rows if len(encode(row)) <= data.max_prompt_tokens]
        if RANK == 0:
            print(f"data.max_prompt_tokens={data.max_prompt_tokens} leaves out "
                  f"{num_loaded - len(rows):,} of {num_loaded:,} questions")

    rows_by_problem: dict[Hashable, list[dict]] = {}
    for row in rows:
        problem = row.get("problem", row["prompt"])
        rows_by_problem.setdefault(problem, []).append(row)
    problems = list(rows_by_problem)
    random.Random(f"{config.training.seed} split").shuffle(problems)
    validation = [rows_by_problem[problem][0] for problem in problems[:data.num_validation]]
    training = []
    for problem in problems[data.num_validation:]:
        training += rows_by_problem[problem]

    if not training:
        raise UserError(f"data.num_validation={data.num_validation}: of {len(problems)} different "
                        f"problems that task.name={config.task.name!r} gives, none is left to "
                        f"train on (data.max_prompt_tokens={data.max_prompt_tokens})")
    if WORLD_SIZE > min(len(training), len(validation)):
        raise UserError(f"{WORLD_SIZE} ranks for {len(training)} training and {len(validation)} "
                        "validation questions: start fewer ranks, or raise data.num_validation")
    return Questions(training, encode), Questions(validation, encode)


def load_rows(task: Task, config: Config) -> list[dict]:
    """Returns the task's rows. Each is known to have a prompt."""
    try:
        rows = list(task.load(beside_main(config.data.dataset), config.data.max_rows))
    except ValueError as error:
        raise UserError(describe(error)) from error
    for number, row in enumerate(rows, start=1):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"task.name={config.task.name!r}: load() has to return dictionaries "
                            f"with a text as prompt, and row {number} is "
                            f"{shortened(repr(row), 80)}")
    return rows


def encode_prompt(row: dict, task: Task, tokenizer: PreTrainedTokenizerBase,
                  config: Config) -> list[int]:
    """Returns the tokens of a prompt, as plain text or as the user's turn of a chat."""
    if config.data.prompt_style == "base":
        return tokenizer(row["prompt"])["input_ids"]
    question = row["prompt"].removesuffix(task.REPLY_START).rstrip()
    messages = [{"role": "user", "content": question}]
    if task.SYSTEM_MESSAGE:
        messages.insert(0, {"role": "system", "content": task.SYSTEM_MESSAGE})
    with as_user_error("data.prompt_style: the model has no chat template, or its template refuses "
                       "this task's messages; write base"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Some templates open the thinking themselves.
    if not text.rstrip().endswith(task.REPLY_START):
        text += task.REPLY_START
    # The template has added all special tokens.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_prompt_lengths(parts: list[Questions], model: PreTrainedModel,
                         tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Refuses a prompt that has no room for its answer, or tokens that the model does not know."""
    encode = parts[0].encode
    rows = [row for questions in parts for row in questions.rows]
    # A tokenizer with more tokens than the model does no harm, as long as none of them comes up.
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        highest = tokenizer.eos_token_id
        for row in rows:
            highest = max(highest, *encode(row))
        if highest >= vocabulary:
            raise UserError(f"model.name={config.model.name!r}: its tokenizer writes token "
                            f"{highest}, and the model knows {vocabulary:,}: take the tokenizer "
                            "that it was trained with")

    context = longest_text(model.config.get_text_config())
    L = config.training.max_new_gen_tokens
    # Encoding all prompts takes long. A token has at least one byte, so prompts of few bytes fit.
    template_length = len(encode(rows[0]))  # No less than what a chat template adds.
    longest = 0
    for row in rows:
        num_bytes = len(row["prompt"].encode())
        if num_bytes + template_length + L > context:
            longest = max(longest, len(encode(row)))
    if longest + L > context:
        raise UserError(f"training.max_new_gen_tokens={L}: with a prompt of {longest} tokens it "
                        f"exceeds the {context} that {config.model.name!r} can process: write at "
                        f"most {max(0, context - longest)}, or set data.max_prompt_tokens")


def longest_text(config: Any) -> int:
    """Returns up to how many tokens a text means the same to the model in whatever batch it is."""
    limits = [getattr(config, "max_position_embeddings", 10**9)]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # A longer text would change the frequencies of all texts in its batch.
        limits.append(rope["original_max_position_embeddings"])
    return min(limits)


# ---------------------------------------------------------------- rewards

def grade(task: Task, answer: Any) -> dict[str, float]:
    """Returns the parts of an answer's reward. An error in the task's code keeps its traceback."""
    # A reward that hangs prints after each minute which line it is at.
    faulthandler.dump_traceback_later(SECONDS_FOR_A_REWARD, repeat=True, file=2)
    try:
        # Each answer gets a copy of the row, so no reward can change what a later one sees.
        parts = task.reward_function(answer.completion, deepcopy(answer.question.row))
        return check_parts(task, parts)
    except Exception as error:
        error.add_note(f"The completion was {shortened(answer.completion, 500)!r}")
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_parts(task: Task, parts: dict[str, float]) -> dict[str, float]:
    """Returns what a reward function has returned as floats, or raises an error."""
    names = list(task.REWARD_WEIGHTS)
    if task.SOLVED not in names:
        names.append(task.SOLVED)
    refusal = (f"reward_function returned {shortened(repr(parts), 200)}, and not a number up to "
               f"{MOST:g} for each of {', '.join(names)}")
    try:
        values = {name: float(parts[name]) for name in names}
    except (LookupError, TypeError, ValueError) as error:
        raise TypeError(refusal) from error
    for value in values.values():
        if not abs(value) <= MOST:  # This also refuses nan.
            raise TypeError(refusal)
    solved = values[task.SOLVED]
    if not 0 <= solved <= 1:
        raise ValueError(f"reward_function returned {solved:g} as {task.SOLVED}. SOLVED names this "
                         "part, so it is from 0 to 1. REWARD_WEIGHTS says what it counts")
    return values
