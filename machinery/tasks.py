"""A task, its rows, its prompts, its grades: everything that comes from the user's own file."""

import importlib.util
import math
import random
import signal
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from machinery.errors import UserError, blame
from machinery.ranks import RANK, WORLD_SIZE
from machinery.settings import ROOT, Config, beside_main

SECONDS_FOR_A_REWARD = 60  # after these a slow one is named
# Names that metrics and samples.jsonl have for something else than a part of the reward.
TAKEN = {"reward", "truncated", "completion_length", "best_of_n", "solved", "step", "question",
         "prompt", "completion"}


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
    with blame(f"task.name={name!r} cannot be imported"):
        sys.modules[spec.name] = task  # where dataclasses and pickle look for a module's classes
        sys.path.append(str(path.parent))  # a task may import what lies beside it
        spec.loader.exec_module(task)
    if missing := {"load", "reward_function", "REWARD_WEIGHTS", "SOLVED"} - set(vars(task)):
        raise UserError(f"task.name={name!r} does not define {', '.join(sorted(missing))}")
    parts = list(task.REWARD_WEIGHTS)
    if task.SOLVED not in parts:
        raise UserError(f"task.name={name!r}: SOLVED={task.SOLVED!r} is not one of {parts}")
    if taken := TAKEN & {part for part in parts if part != task.SOLVED or part != "solved"}:
        raise UserError(f"task.name={name!r}: {taken} name metrics, not parts of a reward")
    if unknown := ", ".join(sorted(set(chosen or {}) - set(parts))):
        raise UserError(f"task.reward_weights: no {unknown} among the parts {', '.join(parts)}")
    return SimpleNamespace(**{**vars(task), "REWARD_WEIGHTS": chosen or task.REWARD_WEIGHTS})


def encode_prompt(row: dict, task, tokenizer, config: Config) -> list[int]:
    """The question as the model reads it: as plain text, or as the user's turn of a chat."""
    if config.data.prompt_style == "base":
        return tokenizer(row["prompt"])["input_ids"]
    reply_start = getattr(task, "REPLY_START", "")
    messages = [{"role": "user", "content": row["prompt"].removesuffix(reply_start).rstrip()}]
    if system := getattr(task, "SYSTEM_MESSAGE", None):
        messages.insert(0, {"role": "system", "content": system})
    with blame("data.prompt_style: this tokenizer's template does not take this task's messages"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not text.rstrip().endswith(reply_start):  # some templates open the thinking themselves
        text += reply_start
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them


def load_questions(task, tokenizer, config: Config, say) -> tuple[list[dict], list[dict]]:
    """Training and validation rows, the same on every rank, with no problem on both sides."""
    data, load = config.data, f"task.name={config.task.name!r}: its load()"
    with blame(f"{load} fails on {data.dataset!r}, or gives no dictionaries with a prompt"):
        try:
            rows = task.load(beside_main(data.dataset), data.max_rows)
        except ValueError as error:
            raise UserError(str(error)) from error
        for place, row in enumerate(rows, start=1):
            if not isinstance(row["prompt"], str):
                raise UserError(f"{load}: the prompt of row {place} is {row['prompt']!r}, no text")
        if longest := data.max_prompt_tokens:
            lengths = [len(encode_prompt(row, task, tokenizer, config)) for row in rows]
            rows = [row for row, length in zip(rows, lengths) if length <= longest]
            say(f"data.max_prompt_tokens={longest} leaves out {len(lengths) - len(rows):,} of "
                f"{len(lengths):,} questions")
        by_problem: dict[object, list[dict]] = {}
        for row in rows:
            by_problem.setdefault(row.get("problem", row["prompt"]), []).append(row)
    problems = list(by_problem)
    random.Random(f"{config.training.seed} split").shuffle(problems)
    held_out, learned = problems[:data.num_validation], problems[data.num_validation:]
    if not learned:
        raise UserError(f"data.num_validation={data.num_validation}: of {len(problems)} different "
                        f"problems in data.dataset={data.dataset!r} none is left to train on "
                        f"(data.max_prompt_tokens={longest})")
    validation = [by_problem[problem][0] for problem in held_out]
    training = [row for problem in learned for row in by_problem[problem]]
    if WORLD_SIZE > min(len(training), len(validation)):
        raise UserError(f"{WORLD_SIZE} ranks for {len(training)} training and {len(validation)} "
                        "validation questions: start fewer ranks, or raise data.num_validation")
    return training, validation


def check_lengths(rows: list[dict], model, task, tokenizer, config: Config) -> None:
    """A prompt and the longest answer to it have to fit into what the model can read."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    L = config.training.max_new_gen_tokens
    if context is None:
        return
    # No token is shorter than a byte, so only prompts of more bytes than there is room are counted.
    around = len(encode_prompt(rows[0], task, tokenizer, config))  # as much as a template may add
    doubtful = [row for row in rows if len(row["prompt"].encode()) + around + L > context]
    longest = max((len(encode_prompt(row, task, tokenizer, config)) for row in doubtful), default=0)
    if longest + L > context:
        raise UserError(f"training.max_new_gen_tokens={L}: with a prompt of {longest} tokens it "
                        f"exceeds the {context} that {config.model.name!r} can read: write at most "
                        f"{max(0, context - longest)}, or set data.max_prompt_tokens")


def grade(task, answer) -> dict[str, float]:
    """The parts of an answer's reward. A reward that fails ends the run, and says on what."""
    try:
        with named_if_slow(answer.row):
            parts = task.reward_function(answer.completion, answer.row)
        names = dict.fromkeys([*task.REWARD_WEIGHTS, task.SOLVED])
        values = {part: float(parts[part]) for part in names}
        if not all(map(math.isfinite, values.values())):
            raise ValueError(f"it returned {parts}")
        return values
    except Exception as error:
        calls = [frame for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename != __file__]
        place = f" at line {calls[-1].lineno} of {calls[-1].filename}" if calls else ""
        raise UserError(f"reward_function failed{place} ({type(error).__name__}: {error}) on the "
                        f"completion {answer.completion[:200]!r} to {answer.row}"[:900]) from error


@contextmanager
def named_if_slow(row: dict):
    """A reward that does not answer is named, again and again: else a run waits without a word."""
    if signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:  # the task has time limits of its own
        yield
        return

    def speak(number, frame):
        stack = traceback.extract_stack(frame)
        inside = max(i for i, each in enumerate(stack[:-1]) if each.filename == __file__) + 1
        print(f"\nthe reward has not answered for {SECONDS_FOR_A_REWARD} s (rank {RANK}, line "
              f"{stack[inside].lineno} of {stack[inside].filename}), and the run waits for it; the "
              f"question: {' '.join(row['prompt'].split())[:600]}", flush=True)

    signal.signal(signal.SIGALRM, speak)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_A_REWARD, SECONDS_FOR_A_REWARD)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
