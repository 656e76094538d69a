"""The Countdown task: combine the given numbers, each exactly once, so that they equal a target.

This file is all the trainer knows about the task. Any Python file with the same names can replace
it: set `task.name` to its path. docs/task.md shows a short one.

    load(dataset, max_rows)           returns the questions as rows. A row is a dictionary with a
                                      "prompt" and whatever the reward needs.
    reward_function(completion, row)  returns the named parts of an answer's reward. The completion
                                      is the answer's text, without the prompt and stop token.
    REWARD_WEIGHTS                    says how much each part counts. The reward is the weighted
                                      sum. A part with weight 0.0 is only measured.
    SOLVED                            names the part that is 1.0 if the question is solved, or 0.0.
    SYSTEM_MESSAGE, REPLY_START       are optional, for `data.prompt_style: chat`. The first comes
                                      before the question, and every answer begins with the second.

A row may also have a "group", which the evaluation reports separately, and a "problem": rows with
the same problem are never split between training and validation. If rows have "held_out": True, the
evaluation takes its questions from them, and training uses the others.
"""

import ast
import json
import operator
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import load_dataset

REWARD_WEIGHTS = {"format": 0.1, "answer": 1.0}
SOLVED = "answer"
SYSTEM_MESSAGE = (
    "You solve number puzzles. First you reason in the open, then you give one final answer.")
REPLY_START = "<think>"


# ---------------------------------------------------------------- prompt

def generate_prompt(nums: list[int], target: int) -> str:
    """Returns the question as text. It opens <think>, so the model begins with its reasoning."""
    numbers = ", ".join(str(num) for num in nums)
    return (
        f"Combine the numbers {numbers} into an expression that equals {target}. Use + - * / and "
        "parentheses, and every number exactly once. Reason inside <think> </think>, then write "
        "only the expression inside <answer> </answer>, "
        f"like <answer>(1 + 2) / 3</answer>.\n{REPLY_START}"
    )


# ---------------------------------------------------------------- data

def load(dataset: str, max_rows: int | None) -> list[dict]:
    """Returns the rows of a data set, checked. A wrong value in it is a ValueError."""
    rows = read_rows(dataset, max_rows)
    return [_checked_row(number, raw) for number, raw in enumerate(rows, start=1)]


def read_rows(dataset: str, max_rows: int | None, name: str | None = None) -> list[dict]:
    """Returns the stored rows of a .parquet or .jsonl file, a folder of such files, or a hub data
    set, given as id or id:split. `name` chooses a configuration of a hub data set. Other tasks may
    use this function too."""
    files = _local_files(dataset)
    rows = []
    try:
        for file in files:
            rows += _read_file(file)
        if not files:
            hub_id, _, hub_split = dataset.partition(":")
            rows = load_dataset(hub_id, name, split=hub_split or "train").to_list()
    except Exception as error:  # Some messages have many lines, or none.
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise ValueError(
            f"data.dataset: cannot load {dataset!r} ({type(error).__name__}: {reason}); "
            "set it to a hub id, or to a local .parquet or .jsonl file or folder") from error
    if not rows[:max_rows]:
        raise ValueError(f"data.dataset: {dataset!r} has no rows")
    return rows[:max_rows]


def _local_files(dataset: str) -> list[Path]:
    """Returns the files that `dataset` means, or none if it's the name of a hub data set."""
    path = Path(dataset)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".parquet", ".jsonl"))
        if not files:
            raise ValueError(f"data.dataset: folder {dataset!r} has no .parquet or .jsonl file")
        return files
    return [path] if path.is_file() else []


def _read_file(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    if path.suffix != ".jsonl":
        raise ValueError(f"{path.name} ends in neither .parquet nor .jsonl")
    # A table reader would turn a whole column into floats or strings because of one value.
    rows = []
    lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() also splits strings.
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # A number with thousands of digits is one too.
            raise ValueError(f"line {number} of {path.name} is not JSON: {error}") from error
    return rows


def _checked_row(number: int, raw: Any) -> dict:
    """Returns a row with its prompt, its group and its problem."""
    place = f"data.dataset: row {number}"
    if not isinstance(raw, dict) or "nums" not in raw or not ("target" in raw or "response" in raw):
        raise ValueError(f"{place} needs the fields nums and target (or response), but is {raw!r}")
    if not isinstance(raw["nums"], list) or len(raw["nums"]) < 2:
        raise ValueError(f"{place}: nums must be two or more integers, not {raw['nums']!r}")
    nums = [_integer(f"{place}: nums", value) for value in raw["nums"]]
    target = _integer(f"{place}: target", raw["target"] if "target" in raw else raw["response"])
    if min(nums) < 0:
        raise ValueError(f"{place}: nums must not be negative, but are {nums}")
    problem = (tuple(sorted(nums)), target)
    return {**raw, "nums": nums, "target": target, "prompt": generate_prompt(nums, target),
            "group": len(nums), "problem": problem}


def _integer(place: str, value: Any) -> int:
    # 3.0 counts as 3, because a table reader turns a column into floats if one value is 2.5.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value // 1:  # This refuses nan and infinity too.
        raise ValueError(f"{place} must hold integers, not {value!r}")
    return int(value)


# ---------------------------------------------------------------- exact arithmetic

MAX_EXPRESSION_LENGTH = 1000  # in characters; bounds the time that a hostile answer can take
SPACE = " \t\r\n\f\v"  # `str.strip()` and r"\s" would accept many other Unicode spaces.
TOKEN = re.compile(rf"[{SPACE}]*([0-9]+|[-+*/()])[{SPACE}]*")
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv}


def evaluate_expression(text: str) -> Fraction | None:
    """Returns the exact value of an expression of integers, + - * / and parentheses, or None."""
    return _evaluate(_tokenize(text) or [])


def _tokenize(text: str) -> list[str] | None:
    """Returns integers, operators and parentheses, or None if the text has anything else."""
    if len(text) > MAX_EXPRESSION_LENGTH:
        return None
    tokens = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or re.match("0[0-9]", match[1]):  # 007 isn't an integer.
            return None
        tokens.append(match[1])
        position = match.end()
    return tokens


def _evaluate(tokens: list[str]) -> Fraction | None:
    """Returns the value of an expression, or None if it isn't one or divides by zero. Python only
    parses it. What it would compute doesn't matter, because nothing but integers and four operators
    has a value here."""
    try:
        return _value(ast.parse(" ".join(tokens), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an integer, and not one of the four operators")


# ---------------------------------------------------------------- rewards
# A completion begins inside the thinking, because the prompt has already opened <think>.

def reward_function(completion: str, row: dict) -> dict[str, float]:
    return {
        "format": format_reward_function(completion),
        "answer": answer_reward_function(completion, row["nums"], row["target"]),
    }


def format_reward_function(completion: str) -> float:
    """Returns 1.0 for thinking, then one answer block, and nothing else. Otherwise it returns 0.1
    for closed thinking plus 0.5 for any answer block."""
    _, closed, rest = completion.partition("</think>")
    rest = rest.strip(SPACE)
    is_block = rest.startswith("<answer>") and rest.endswith("</answer>")
    if closed and is_block and "</think>" not in rest and _expression(rest) is not None:
        return 1.0
    has_answer = "</answer>" in completion.partition("<answer>")[2]
    return 0.1 * bool(closed) + 0.5 * has_answer


def answer_reward_function(completion: str, nums: list[int], target: int) -> float:
    """Returns 1.0 if the one answer after the thinking uses exactly the given numbers and equals
    the target, and 0.0 otherwise."""
    _, closed, rest = completion.partition("</think>")
    answer = _expression(rest)
    is_thinking = not closed or "<think>" in rest or "</think>" in rest
    if is_thinking or answer is None:
        return 0.0
    # An answer may state its own result, like 1+2 = 3, which then has to be the target.
    expression, equals, claimed = answer.partition("=")
    if equals and claimed.strip(SPACE) != str(target):
        return 0.0
    tokens = _tokenize(expression) or []
    # We compare the numbers as strings before any arithmetic, so we never compute with others.
    used = sorted(token for token in tokens if token.isdigit())
    given = sorted(str(num) for num in nums)
    return float(used == given and _evaluate(tokens) == target)


def _expression(text: str) -> str | None:
    """Returns what's inside the one <answer>...</answer>. Returns None if either tag is missing or
    appears more than once."""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    _, _, rest = text.partition("<answer>")
    expression, closing, _ = rest.partition("</answer>")
    return expression if closing else None
