"""A task, its rows, its prompts, its grades: everything that comes from the user's own file."""

import ast
import faulthandler
import hashlib
import importlib.util
import json
import pickle
import random
import re
import sys
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import torch

from machinery.disk import beside_main
from machinery.errors import UserError, blame, theirs
from machinery.ranks import WORLD_SIZE
from machinery.settings import MOST, ROOT, Config

SECONDS_FOR_A_REWARD = 60  # after these one shows where it stands
# Names that metrics and samples.jsonl have for something else than a part of the reward.
TAKEN = {"reward", "truncated", "completion_length", "best_of_n", "solved", "step", "question",
         "prompt", "completion", "solved_low", "solved_high", "best_of_n_low", "best_of_n_high"}


def load_task(config: Config) -> SimpleNamespace:
    """`countdown`, or a Python file with the same names: see the head of countdown.py."""
    name, chosen = config.task.name, config.task.reward_weights
    path = ROOT / "countdown.py" if name == "countdown" else Path(beside_main(name))
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"task.name={name!r}: write countdown, or the path of a Python file")
    other = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if other and not (other.has_location and path.samefile(other.origin)):
        raise UserError(f"task.name={name!r}: Python has a module {path.stem}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    task = importlib.util.module_from_spec(spec)
    with theirs(f"task.name={name!r} cannot be imported"):
        sys.modules[spec.name] = task  # where dataclasses and pickle look for a module's classes
        sys.path.append(str(path.parent))  # a task may import what lies beside it
        spec.loader.exec_module(task)
    with theirs(f"task.name={name!r} has to define load(), reward_function(), REWARD_WEIGHTS, like "
                "{'right': 1.0}, SOLVED, which names one of them, and nothing but text as "
                "SYSTEM_MESSAGE and REPLY_START"):
        weights = {part: float(each + 0.0) for part, each in task.REWARD_WEIGHTS.items()}  # no text
        parts, solved = list(weights), task.SOLVED
        for text in ("SYSTEM_MESSAGE", "REPLY_START"):
            (getattr(task, text, None) or "").encode()
        if not (callable(task.load) and callable(task.reward_function) and solved in parts
                and all(abs(weight) <= MOST for weight in weights.values())):
            raise TypeError(f"SOLVED={solved!r}, REWARD_WEIGHTS={task.REWARD_WEIGHTS!r}")
        if taken := [part for part in parts if part in TAKEN and not part == solved == "solved"
                     or part.endswith("_std") or not re.fullmatch(r"[\w .-]+", part)]:
            raise ValueError(f"{taken} name metrics, or have more than letters, digits, - and .")
    if unknown := ", ".join(sorted(set(chosen or {}) - set(parts))):
        raise UserError(f"task.reward_weights: no {unknown} among the parts {', '.join(parts)}")
    return SimpleNamespace(**{**vars(task), "REWARD_WEIGHTS": dict(chosen or weights)})


def encode_prompt(row: dict, task, tokenizer, config: Config) -> list[int]:
    """The question as the model reads it: as plain text, or as the user's turn of a chat."""
    if config.data.prompt_style == "base":
        return tokenizer(row["prompt"])["input_ids"]
    reply_start = getattr(task, "REPLY_START", None) or ""
    messages = [{"role": "user", "content": row["prompt"].removesuffix(reply_start).rstrip()}]
    if system := getattr(task, "SYSTEM_MESSAGE", None):
        messages.insert(0, {"role": "system", "content": system})
    with blame("data.prompt_style: no chat template here takes this task's messages; write base"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not text.rstrip().endswith(reply_start):  # some templates open the thinking themselves
        text += reply_start
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them


def load_questions(task, tokenizer, config: Config, say) -> tuple[list[dict], list[dict]]:
    """Training and validation rows, the same on every rank, with no problem on both sides."""
    data, load = config.data, f"task.name={config.task.name!r}: its load()"
    with theirs(f"{load} fails, or gives no dictionaries with a prompt"):
        try:
            rows = list(task.load(beside_main(data.dataset), data.max_rows))
        except ValueError as error:
            raise UserError(str(error)) from error
        for number, row in enumerate(rows, start=1):
            if not isinstance(row["prompt"], str) or not row["prompt"]:
                raise UserError(f"{load}: the prompt of row {number} is {row['prompt']!r}, no text")
            row["prompt"].encode()  # half a character, as JSON may hold it, is none
        if longest := data.max_prompt_tokens:
            lengths = [len(encode_prompt(row, task, tokenizer, config)) for row in rows]
            rows = [row for row, length in zip(rows, lengths) if length <= longest]
            say(f"data.max_prompt_tokens={longest} leaves out {len(lengths) - len(rows):,} of "
                f"{len(lengths):,} questions")
        by_problem: dict[object, list[dict]] = {}
        for row in rows:
            problem = row.get("problem", row["prompt"])
            with blame(f"{load}: the problem {problem!r} has no hash, as a text or a tuple has",
                       (TypeError,)):
                by_problem.setdefault(problem, []).append(row)
    problems = list(by_problem)
    random.Random(f"{config.training.seed} split").shuffle(problems)
    held_out, learned = problems[:data.num_validation], problems[data.num_validation:]
    if not learned:
        raise UserError(f"data.num_validation={data.num_validation}: of {len(problems)} different "
                        f"problems that task.name={config.task.name!r} gives, none is left to "
                        f"train on (data.max_prompt_tokens={longest})")
    validation = [by_problem[problem][0] for problem in held_out]
    training = [row for problem in learned for row in by_problem[problem]]
    with blame(f"{load}: a row holds what cannot go from one process to another"):
        pickle.dumps(validation)  # as an evaluation gathers them
    if WORLD_SIZE > min(len(training), len(validation)):
        raise UserError(f"{WORLD_SIZE} ranks for {len(training)} training and {len(validation)} "
                        "validation questions: start fewer ranks, or raise data.num_validation")
    return training, validation


def check_lengths(rows: list[dict], model, task, tokenizer, config: Config) -> None:
    """A prompt and the longest answer to it have to fit into what the model can read."""
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:  # which does no harm where none of the others comes up
        highest = max(tokenizer.eos_token_id, max(max(
            encode_prompt(row, task, tokenizer, config), default=0) for row in rows))
        if highest >= known:
            raise UserError(f"model.name={config.model.name!r}: its tokenizer writes token "
                            f"{highest}, and the model knows {known:,}: take the tokenizer that it "
                            "was trained with")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 10**9)
    L = config.training.max_new_gen_tokens
    # No token is shorter than a byte: only prompts of more bytes than there is room are counted.
    around = len(encode_prompt(rows[0], task, tokenizer, config))  # as much as a template may add
    doubtful = [row for row in rows if len(row["prompt"].encode()) + around + L > context]
    longest = max((len(encode_prompt(row, task, tokenizer, config)) for row in doubtful), default=0)
    if longest + L > context:
        raise UserError(f"training.max_new_gen_tokens={L}: with a prompt of {longest} tokens it "
                        f"exceeds the {context} that {config.model.name!r} can read: write at most "
                        f"{max(0, context - longest)}, or set data.max_prompt_tokens")


def grade(task, answer) -> dict[str, float]:
    """The parts of an answer's reward. A reward that does not answer shows where it stands."""
    with theirs("reward_function failed"):
        faulthandler.dump_traceback_later(SECONDS_FOR_A_REWARD, repeat=True, file=2)
        try:
            parts = task.reward_function(answer.completion, deepcopy(answer.row))
            names = dict.fromkeys([*task.REWARD_WEIGHTS, task.SOLVED])
            values = {}
            with suppress(Exception):
                values = {part: float(parts[part]) for part in names}
            if not values or not all(abs(value) <= MOST for value in values.values()):
                raise TypeError(f"it returned {parts!r}, not a number up to {MOST:g} for each of "
                                f"{', '.join(names)}")
            if not 0 <= values[task.SOLVED] <= 1:
                raise ValueError(f"SOLVED, {task.SOLVED}, is {values[task.SOLVED]:g}, not from 0 "
                                 "to 1; let REWARD_WEIGHTS say what it pays")
            return values
        except BaseException as error:
            error.add_note(f"on the completion {answer.completion!r} to {answer.row!r}")
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()


def contents_of(task, rows: list[dict], model, tokenizer, config: Config) -> dict[str, str]:
    """What a run stands on and no checkpoint holds, by content, to be known again."""
    prompts = [encode_prompt(row, task, tokenizer, config) for row in rows[:8]]
    texts = {f"task.name: the code of {config.task.name!r}":
             ast.dump(ast.parse(Path(task.__file__).read_bytes())),
             "data.dataset: a question": json.dumps(rows, skipkeys=True, default=lambda value: (
                 getattr(value, "tolist", type(value).__name__.__str__)())),
             "model.name: how the tokenizer reads a question": json.dumps(prompts),
             "model.name: a weight": str([
                 torch.hash_tensor(each).view(torch.int64).item() for each in model.parameters()
                 if not (config.model.lora_rank and each.requires_grad)])}
    return {what: hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
            for what, text in texts.items()}
