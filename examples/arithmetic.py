"""Sums and differences of whole numbers, for small chat models that know a little of them.

    .venv/bin/python main.py --config recipes/smollm2-135m-cpu.yaml

`data.dataset` says which questions: how many numbers, from which range, and with which signs. The
recipe has "numbers=2 low=10 high=99 signs=+", and "signs=+-" asks for differences, too. The
questions are made up here. The top of countdown.py explains the names below.
"""

import random
import re

# `strict` rewards only the bare number, and `lenient` also a reply that ends in it. So the two tell
# whether a model learns to calculate or to write what it's asked for.
REWARD_WEIGHTS = {"strict": 1.0, "lenient": 0.0, "format": 0.0}
SOLVED = "strict"
SYSTEM_MESSAGE = "You are a calculator. You write the result of a sum and nothing else."
REPLY_START = "="  # It opens every reply. Without it a small model starts to explain.
DEFAULTS = {"numbers": "2", "low": "10", "high": "99", "signs": "+"}
MOST_ROWS = 4000


def load(dataset: str, max_rows: int | None) -> list[dict]:
    """Returns random questions, always the same ones. A group is how often you have to carry."""
    settings = read_settings(dataset)
    count = int(settings["numbers"])
    low = int(settings["low"])
    high = int(settings["high"])
    stream = random.Random(dataset)
    rows = {}
    for _ in range(10 * MOST_ROWS):
        numbers = [stream.randint(low, high) for _ in range(count)]
        signs = [stream.choice(settings["signs"]) for _ in numbers[1:]]
        text = str(numbers[0])
        for sign, number in zip(signs, numbers[1:], strict=True):
            text += f" {sign} {number}"
        terms = signed(numbers, signs)
        rows[text] = {
            "prompt": f"{text} =",
            "result": sum(terms),
            "group": f"{num_carries(numbers)} carried",
            "problem": sorted(terms),  # 47 + 12 and 12 + 47 are one problem.
        }
        if len(rows) == min(MOST_ROWS, max_rows or MOST_ROWS):
            break
    return list(rows.values())


def read_settings(dataset: str) -> dict[str, str]:
    settings = dict(DEFAULTS)
    for word in dataset.split():
        name, _, value = word.partition("=")
        is_right = re.fullmatch(r"[+-]+", value) if name == "signs" else value.isdecimal()
        if name not in DEFAULTS or not is_right:
            raise ValueError(f"data.dataset={dataset!r}: {word!r} is not like numbers=2, low=10, "
                             "high=99 or signs=+-")
        settings[name] = value
    return settings


def signed(numbers: list[int], signs: list[str]) -> list[int]:
    """Returns the numbers to add up: [47, -12] for 47 - 12."""
    terms = [numbers[0]]
    for sign, number in zip(signs, numbers[1:], strict=True):
        terms.append(number if sign == "+" else -number)
    return terms


def num_carries(numbers: list[int]) -> int:
    """Returns how many times you carry when you add these numbers by hand."""
    count = 0
    carried = 0
    digits = max(len(str(number)) for number in numbers)
    for place in range(digits):
        column = carried + sum(number // 10**place % 10 for number in numbers)
        carried = column // 10
        count += carried > 0
    return count


def reward_function(completion: str, row: dict) -> dict[str, float]:
    reply = completion.strip()
    found = re.findall(r"-?\d+", reply.replace(",", ""))
    return {
        "strict": float(reply == str(row["result"])),
        "lenient": float(bool(found) and int(found[-1]) == row["result"]),
        "format": float(re.fullmatch(r"-?\d+", reply) is not None),
    }
