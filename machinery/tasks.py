"""A task: its file, its questions, their prompts, and what it says about an answer."""

import faulthandler
import importlib.util
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from machinery.errors import UserError, as_user_error, describe, shortened
from machinery.ranks import WORLD_SIZE, tell
from machinery.settings import MOST, ROOT, Config, beside_main, flatten

SECONDS_FOR_A_REWARD = 60
Task = SimpleNamespace  # It has the names that the top of countdown.py explains.


@dataclass(frozen=True)
class Question:
    """A row of the task, and its prompt as tokens."""

    row: dict
    prompt_ids: list[int]


# ---------------------------------------------------------------- the task's file

def load_task(config: Config) -> Task:
    """Imports the file that `task.name` names. A setting may replace its REWARD_WEIGHTS."""
    name = config.task.name
    module = import_task(name)
    weights = config.task.reward_weights or module.REWARD_WEIGHTS
    unknown = set(weights) - set(module.REWARD_WEIGHTS)
    if unknown:
        raise UserError(f"task.reward_weights: {name} has no part named "
                        f"{', '.join(sorted(unknown))}: use the names in its REWARD_WEIGHTS")
    optional = {"SYSTEM_MESSAGE": "", "REPLY_START": ""}
    return Task(**{**optional, **vars(module), "REWARD_WEIGHTS": weights})


def task_file(name: str) -> Path:
    path = ROOT / "countdown.py" if name == "countdown" else Path(beside_main(name))
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"task.name={name!r}: set it to countdown, or to the path of a Python file")
    return path


def task_text(path: Path) -> str:
    with as_user_error(f"task.name={str(path)!r} cannot be read as Python in UTF-8"):
        text = path.read_text(encoding="utf-8-sig")
        compile(text, path, "exec")
    return text


def import_task(name: str) -> ModuleType:
    """Runs a task's file. An error in it shows its own traceback."""
    path = task_file(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look there for a module's classes. A math.py doesn't replace Python's.
    sys.modules.setdefault(path.stem, module)
    sys.path.append(str(path.parent))  # A task may import the files next to it.
    # Not by `exec_module`, which may run an older version from a cache.
    exec(compile(task_text(path), module.__file__, "exec"), vars(module))  # noqa: S102
    return module


# ---------------------------------------------------------------- questions

def load_questions(
    task: Task, model: PreTrainedModel, teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase, config: Config,
) -> tuple[list[dict], list[dict]]:
    """Returns the rows to train on and the rows that are held out, the same on every rank."""
    def num_tokens(row: dict) -> int:
        return len(encode_prompt(row, task, tokenizer, config))

    rows = load_rows("data.dataset", task, config.data.max_rows, config)
    if config.data.validation is not None:
        rows = [row for row in rows if not row.get("held_out")]  # These come from elsewhere.
        for row in load_rows("data.validation", task, None, config):
            rows.append({**row, "held_out": True})
    most = config.data.max_prompt_tokens
    if most is not None:
        rows = [row for row in rows if num_tokens(row) <= most]
    training, validation = split(rows, config)
    context = longest_text(model)
    if teacher is not None:
        context = min(context, longest_text(teacher))
    asked = training + validation
    check_prompt_lengths(asked, num_tokens, context, config)
    check_prompt_tokens(asked, task, tokenizer, config)
    return training, validation


def load_rows(key: str, task: Task, max_rows: int | None, config: Config) -> list[dict]:
    """Returns what the task makes of the data set that this key names."""
    try:
        return list(task.load(beside_main(flatten(config)[key]), max_rows))
    except ValueError as error:
        # The last line that isn't a library's.
        frames = traceback.extract_tb(error.__traceback__)
        files = (getattr(task, "__file__", None), str(ROOT / "countdown.py"))
        place = [frame for frame in frames if frame.filename in files] or frames
        where = f"{Path(place[-1].filename).name}:{place[-1].lineno}"
        raise UserError(f"{describe(error).replace('data.dataset', key)} (at {where})") from error


def split(rows: list[dict], config: Config) -> tuple[list[dict], list[dict]]:
    """Returns the rows to train on and the rows that are held out. No problem is in both, and the
    held-out rows have each problem once.

    If any rows are marked with "held_out", their problems are the candidates, otherwise all
    problems are. The ones with the smallest hashes are held out, whatever the seed and the order of
    the rows. So if the data grow, nothing is held out that was trained on before."""
    unmarked = by_problem([row for row in rows if not row.get("held_out")])
    marked = by_problem([row for row in rows if row.get("held_out")])
    candidates = marked if marked or config.data.validation else unmarked
    chosen = in_fixed_order(candidates)[:config.data.num_validation]
    validation = [candidates[problem][0] for problem in chosen]
    not_trained_on = set(marked or chosen)
    training = []
    for problem in in_fixed_order(unmarked):
        if problem not in not_trained_on:
            training += unmarked[problem]
    num_in_both = len(marked.keys() & unmarked.keys())
    if num_in_both:
        tell(f"{num_in_both} of the training problems are also held out, so they are left out of "
             "training")
    if WORLD_SIZE > min(len(training), len(validation)):
        raise UserError(
            f"data.num_validation={config.data.num_validation} leaves {len(training)} training "
            f"questions and {len(validation)} validation questions out of {len(rows)}, but there "
            f"must be at least as many of each as there are ranks ({WORLD_SIZE}): change "
            "data.num_validation, or start fewer ranks")
    return training, validation


def by_problem(rows: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for row in rows:
        problem = json.dumps(row.get("problem", row["prompt"]), sort_keys=True)
        found.setdefault(problem, []).append(row)
    return found


def in_fixed_order(problems: Iterable[str]) -> list[str]:
    return sorted(problems, key=lambda text: sha256(text.encode()).digest())


def describe_data(training: list[dict], validation: list[dict]) -> dict[str, Any]:
    """Returns how many rows there are, and a digest of what they hold, in their order."""
    digest = sha256()
    rows = training + validation
    for row in rows:
        digest.update(json.dumps(row, default=repr, sort_keys=True).encode())
    return {"questions to train on": len(training), "questions held out": len(validation),
            "their digest": digest.hexdigest()[:16]}


def check_prompt_lengths(
    rows: list[dict], num_tokens: Callable[[dict], int], context: float, config: Config
) -> None:
    """Refuses a prompt that leaves no room for its answer."""
    L = config.training.max_new_gen_tokens
    # Encoding all prompts takes long. A token has at least one byte, so prompts of few bytes fit.
    template_length = num_tokens(rows[0])  # at least as much as a chat template adds
    longest = 0
    for row in rows:
        num_bytes = len(row["prompt"].encode())
        if num_bytes + template_length + L > context:
            longest = max(longest, num_tokens(row))
    if longest + L > context:
        names = (config.model.name, config.training.teacher)
        models = " and ".join(repr(name) for name in names if name)
        raise UserError(f"training.max_new_gen_tokens={L}: with a prompt of {longest} tokens, it "
                        f"exceeds the {context} that {models} can process: set it to at most "
                        f"{max(0, context - longest)}, or set data.max_prompt_tokens")


def check_prompt_tokens(
    rows: list[dict], task: Task, tokenizer: PreTrainedTokenizerBase, config: Config
) -> None:
    """Refuses prompts without tokens, or with a stop token that the tokenizer adds."""
    for row in rows:
        if not row["prompt"].strip():
            encode_prompt(row, task, tokenizer, config)
    text = rows[0]["prompt"]
    ids = tokenizer(text)["input_ids"]
    is_added = ids[1:] and ids[-1:] != tokenizer(text, add_special_tokens=False)["input_ids"][-1:]
    if config.data.prompt_style == "base" and is_added and ids[-1] == tokenizer.eos_token_id:
        raise UserError(f"model.name={config.model.name!r}: its tokenizer adds the stop token "
                        f"{tokenizer.eos_token} to each prompt, so the text has ended before the "
                        "answer begins: set add_eos_token to false in its tokenizer_config.json, "
                        "or take the token out of post_processor in its tokenizer.json")


def encode_prompt(row: dict, task: Task, tokenizer: PreTrainedTokenizerBase,
                  config: Config) -> list[int]:
    """Returns the tokens of a prompt, as plain text or as the user's turn of a chat."""
    if config.data.prompt_style == "base":
        return refuse_empty(tokenizer(row["prompt"])["input_ids"], row)
    question = row["prompt"].removesuffix(task.REPLY_START).rstrip()
    messages = [{"role": "user", "content": question}]
    if task.SYSTEM_MESSAGE:
        messages.insert(0, {"role": "system", "content": task.SYSTEM_MESSAGE})
    with as_user_error("data.prompt_style: the model has no chat template, or its template refuses "
                       "this task's messages; set data.prompt_style to base"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # Some templates open the thinking themselves.
    if not text.rstrip().endswith(task.REPLY_START.rstrip()):
        text += task.REPLY_START
    # The template has already added all special tokens.
    return refuse_empty(tokenizer(text, add_special_tokens=False)["input_ids"], row)


def refuse_empty(ids: list[int], row: dict) -> list[int]:
    if not ids:
        raise UserError(f"data.dataset: the prompt {row['prompt']!r} has no tokens: fix its row")
    return ids


def longest_text(model: PreTrainedModel) -> float:
    """Returns up to how many tokens the model computes a text the same way in any batch."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # A longer text would change the others in its batch.
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", math.inf)


# ---------------------------------------------------------------- rewards

def grade(task: Task, completion: str, row: dict) -> dict[str, float]:
    """Returns the parts of an answer's reward. An error in the task's code keeps its traceback."""
    # If a reward hangs, this prints every minute which line it's at.
    faulthandler.dump_traceback_later(SECONDS_FOR_A_REWARD, repeat=True, file=2)
    try:
        # Each answer gets a copy of the row, so no reward can change what a later one sees.
        parts = task.reward_function(completion, deepcopy(row))
        return check_parts(task, parts)
    except Exception as error:
        error.add_note(f"The completion was {shortened(completion, 500)!r}")
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_parts(task: Task, parts: dict[str, float]) -> dict[str, float]:
    """Returns the parts as floats. A number that isn't finite would spoil the weights."""
    values = {}
    for name in {**task.REWARD_WEIGHTS, task.SOLVED: 0.0}:
        values[name] = float(parts[name])
        if not abs(values[name]) <= MOST:  # This also refuses nan.
            raise ValueError(f"reward_function returned {parts[name]!r} for {name}, which is too "
                             "large or not a finite number")
    if not 0 <= values[task.SOLVED] <= 1:
        raise UserError(f"reward_function returned {values[task.SOLVED]} for {task.SOLVED}, which "
                        "must be between 0 and 1, because SOLVED names it as the part that says "
                        "whether the question is solved")
    return values
