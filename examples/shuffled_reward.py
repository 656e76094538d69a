"""Countdown in which every answer gets the reward of some other answer. These rewards are as
frequent as the real ones, but say nothing. A trainer that improves on them is fooling itself."""

import random

import countdown
from countdown import REPLY_START, SOLVED, SYSTEM_MESSAGE, load

__all__ = ["REPLY_START", "REWARD_WEIGHTS", "SOLVED", "SYSTEM_MESSAGE", "load", "reward_function"]
# The honest parts are measured, but earn nothing.
REWARD_WEIGHTS = {"shuffled": 1.0, "format": 0.0, "answer": 0.0}
POOL_SIZE = 256
pool: list[float] = []
stream = random.Random(0)


def reward_function(completion: str, row: dict) -> dict[str, float]:
    parts = countdown.reward_function(completion, row)
    earned = sum(weight * parts[part] for part, weight in countdown.REWARD_WEIGHTS.items())
    if len(pool) < POOL_SIZE:
        pool.append(earned)
        stream.shuffle(pool)
    place = stream.randrange(len(pool))
    paid = pool[place]
    pool[place] = earned  # for some other answer
    return {"shuffled": paid, **parts}
