"""Countdown in which the reward is a number made of the answer's text. So every group has a signal,
with any model, and learning takes the memory and the time that it takes where rewards differ."""

import zlib

import countdown
from countdown import REPLY_START, SOLVED, SYSTEM_MESSAGE, load

__all__ = ["REPLY_START", "REWARD_WEIGHTS", "SOLVED", "SYSTEM_MESSAGE", "load", "reward_function"]
REWARD_WEIGHTS = {"random": 1.0, "format": 0.0, "answer": 0.0}


def reward_function(completion: str, row: dict) -> dict[str, float]:
    parts = countdown.reward_function(completion, row)
    return {"random": zlib.crc32(completion.encode()) / 2**32, **parts}
