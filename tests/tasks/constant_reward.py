"""Countdown in which every answer earns the same.
Nothing can be learned from it, so no weight may change."""

import countdown
from countdown import REPLY_START, SOLVED, SYSTEM_MESSAGE, load

__all__ = ["REPLY_START", "REWARD_WEIGHTS", "SOLVED", "SYSTEM_MESSAGE", "load", "reward_function"]
# The honest parts are measured, but pay nothing.
REWARD_WEIGHTS = {"constant": 1.0, "format": 0.0, "answer": 0.0}


def reward_function(completion: str, row: dict) -> dict[str, float]:
    return {"constant": 0.1, **countdown.reward_function(completion, row)}
