"""The Countdown task: combine the given numbers with + - * / so that they make the target, each
number exactly once.

This file is all that the trainer knows of the task. `main.py` uses these names of it, and any other
file that has them can take its place (`task.name` in config.yaml):

    load(dataset, max_rows) -> rows   dictionaries; each has its "prompt" and whatever the rewards
                                      need
    reward_function(completion, row)  named reward parts of one completion
    REWARD_WEIGHTS                    what each part counts in the reward, unless
                                      task.reward_weights says otherwise; 0.0: it is watched only
    SOLVED                            the part that says whether the problem is solved (1.0) or not
    SYSTEM_MESSAGE, REPLY_START       optional: for `data.prompt_style: chat`; how every reply
                                      begins

A reward that needs a process starts it with `subprocess`, or with multiprocessing's "spawn" or
"forkserver". Never with `os.fork`, which is multiprocessing's "fork", on Linux its default before
Python 3.14: the trainer has threads, and a process forked from one that has can wait for ever for a
lock that another thread held. The trainer waits for a reward that takes long (where there are
several ranks, two hours), and after each minute of one it shows the line where it stands.

A row may also carry "group" (evaluation is broken down by it) and "problem" (rows with an equal one
are the same problem and never stand on both sides of the validation split).
"""

import json
import re
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet
from datasets import load_dataset

REWARD_WEIGHTS = {"format": 0.1, "answer": 1.0}
SOLVED = "answer"
SYSTEM_MESSAGE = ("You solve number puzzles. First you reason in the open, then you give one final "
                  "answer.")
REPLY_START = "<think>"


# ---------------------------------------------------------------- prompt

def generate_prompt(nums: list[int], target: int) -> str:
    """The question as plain text. It ends with an opened <think>, so the model's first word is
    already reasoning."""
    numbers = ", ".join(map(str, nums))
    return (
        f"Combine the numbers {numbers} into an expression that equals {target}. Use + - * / and "
        "parentheses, and every number exactly once. Reason inside <think> </think>, then write "
        "only the expression inside <answer> </answer>, "
        f"like <answer>(1 + 2) / 3</answer>.\n{REPLY_START}"
    )


# ---------------------------------------------------------------- data

def load(dataset: str, max_rows: int | None) -> list[dict]:
    """Rows of a hub dataset, a local .parquet or .jsonl file, or a folder of such files. A wrong
    value is a ValueError."""
    return [_checked_row(number, raw)
            for number, raw in enumerate(read_rows(dataset, max_rows), start=1)]


def read_rows(dataset: str, max_rows: int | None, name: str | None = None) -> list[dict]:
    """The rows as they are stored. `name`: which of its configurations, where a hub dataset has
    several. Other tasks may use this."""
    path, files = Path(dataset), []
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".parquet", ".jsonl"))
        if not files:
            raise ValueError(f"data.dataset: the folder {dataset!r} holds no .parquet or .jsonl "
                             "file")
    # a file name is never looked up on the hub
    elif (path.suffix in (".parquet", ".jsonl") or path.is_file() or len(path.parts) > 2
          or dataset.startswith((".", "/", "~", "runs/"))):
        if not path.is_file():
            raise ValueError(f"data.dataset: there is no file or folder {dataset!r}")
        files = [path]
    try:
        tables = ([_read_file(file) for file in files]
                  or [load_dataset(dataset, name, split="train").to_list()])
    # the readers raise a dozen unrelated types, and some of their messages are many lines or none
    except Exception as error:
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise ValueError(
            f"data.dataset: cannot load {dataset!r} ({type(error).__name__}: {reason}); "
            "give a hub id, or a local .parquet or .jsonl file or folder") from error
    rows = [row for table in tables for row in table][:max_rows]
    if not rows:
        raise ValueError(f"data.dataset: {dataset!r} holds no rows")
    return rows


def _read_file(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    if path.suffix != ".jsonl":
        raise ValueError(f"{path.name} ends in neither .parquet nor .jsonl")
    # Read here, not by a table reader, which would turn a whole column into floats or text for the
    # sake of one value.
    rows = []
    # splitlines() also cuts inside strings
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:  # a number of thousands of digits among them
                raise ValueError(f"line {number} of {path.name} is not JSON: {error}") from error
    return rows


def _checked_row(number: int, raw: dict) -> dict:
    if not isinstance(raw, dict) or "nums" not in raw or not ("target" in raw or "response" in raw):
        fields = sorted(raw) if isinstance(raw, dict) else repr(raw)
        raise ValueError(f"data.dataset: row {number} needs the fields nums and target (or "
                         f"response); it has {fields}")
    if not isinstance(raw["nums"], list) or len(raw["nums"]) < 2:
        raise ValueError(f"data.dataset: row {number}: nums must be a list of two or more "
                         f"integers, not {raw['nums']!r}")
    nums = [_integer(number, "nums", value) for value in raw["nums"]]
    target = _integer(number, "target", raw["target"] if "target" in raw else raw["response"])
    if min(nums) < 0:
        raise ValueError(f"data.dataset: row {number}: nums must not be negative, but are {nums}")
    problem = (tuple(sorted(nums)), target)
    return {**raw, "nums": nums, "target": target, "prompt": generate_prompt(nums, target),
            "group": len(nums), "problem": problem}


def _integer(number: int, field: str, value) -> int:
    # 3.0 counts as 3: in a column where one value is 2.5, a table reader has made floats of all its
    # neighbours.
    if (isinstance(value, bool) or not isinstance(value, (int, float))
            or value != value // 1):  # nan and inf too
        raise ValueError(f"data.dataset: row {number}: {field} must hold integers, not {value!r}")
    return int(value)


# ---------------------------------------------------------------- exact arithmetic

MAX_EXPRESSION_LENGTH = 1000  # characters; bounds the time a hostile answer can take
SPACE = " \t\r\n\f\v"  # `str.strip()` and r"\s" would let Unicode's many others pass as well
TOKEN = re.compile(rf"[{SPACE}]*([0-9]+|[-+*/()])[{SPACE}]*")
PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2}


def _tokenize(text: str) -> list[str] | None:
    """Integers, operators and parentheses; None where anything else stands, or an integer with a
    leading zero."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        return None
    tokens, position = [], 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or re.match("0[0-9]", match[1]):
            return None
        tokens.append(match[1])
        position = match.end()
    return tokens


def _evaluate(tokens: list[str]) -> Fraction | None:
    """Shunting-yard over two stacks: no recursion, so nesting cannot exhaust anything."""
    values: list[Fraction] = []
    operators: list[str] = []

    def apply_operators(precedence: int) -> bool:
        while operators and PRECEDENCE[operators[-1]] >= precedence:
            operator, right, left = operators.pop(), values.pop(), values.pop()
            if operator == "/" and right == 0:
                return False
            values.append(left + right if operator == "+" else left - right if operator == "-"
                          else left * right if operator == "*" else left / right)
        return True

    operand_expected = True
    for token in tokens:
        if operand_expected != (token == "(" or token.isdigit()):
            return None
        if token.isdigit():
            values.append(Fraction(int(token)))
            operand_expected = False
        elif token == "(":
            operators.append(token)
        elif token == ")":
            if not apply_operators(1) or not operators:
                return None
            operators.pop()  # the matching "("
        else:
            if not apply_operators(PRECEDENCE[token]):
                return None
            operators.append(token)
            operand_expected = True
    # what is left over is an unclosed "("
    whole = not operand_expected and apply_operators(1) and not operators
    return values[0] if whole else None


def evaluate_expression(text: str) -> Fraction | None:
    """The exact value of an expression of non-negative integers, + - * / and parentheses; None for
    anything else."""
    tokens = _tokenize(text)
    return None if tokens is None else _evaluate(tokens)


# ---------------------------------------------------------------- rewards
# A completion begins inside the thinking: the prompt has opened <think>. The stop token is already
# gone.

def _answer(text: str) -> str | None:
    """What stands in the one <answer>...</answer>; None where there is none, or more than one tag
    of a kind."""
    before, opening, rest = text.partition("<answer>")
    inside, closing, after = rest.partition("</answer>")
    one = opening and closing and not any(tag in part for tag in ("<answer>", "</answer>")
                                          for part in (before, inside, after))
    return inside if one else None


def format_reward_function(completion: str) -> float:
    """1.0 for thinking, then one answer block, and nothing else; else 0.1 for closed thinking plus
    0.5 for an answer."""
    _, closed, rest = completion.partition("</think>")
    rest = rest.strip(SPACE)
    if (closed and "</think>" not in rest and _answer(rest) is not None
            and rest.startswith("<answer>") and rest.endswith("</answer>")):
        return 1.0
    has_answer = "</answer>" in completion.partition("<answer>")[2]
    return 0.1 * bool(closed) + 0.5 * has_answer


def answer_reward_function(completion: str, nums: list[int], target: int) -> float:
    """1.0 when the one answer after the thinking uses exactly the given numbers and equals the
    target, else 0.0."""
    _, closed, rest = completion.partition("</think>")
    answer = _answer(rest)
    # a thinking opened again is not over
    if not closed or "<think>" in rest or "</think>" in rest or answer is None:
        return 0.0
    expression, equals, claimed = answer.partition("=")
    if equals and claimed.strip(SPACE) != str(target):
        return 0.0
    tokens = _tokenize(expression)
    # The numbers are compared, as text, before any arithmetic: nothing but the given numbers is
    # ever computed with.
    if (tokens is None
            or sorted(token for token in tokens if token.isdigit()) != sorted(map(str, nums))):
        return 0.0
    return float(_evaluate(tokens) == target)


def reward_function(completion: str, row: dict) -> dict[str, float]:
    return {
        "format": format_reward_function(completion),
        "answer": answer_reward_function(completion, row["nums"], row["target"]),
    }
