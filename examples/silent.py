"""Stand-ins for a run's log and its folder when main.py is used as a library."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from machinery.runs import NEW


class SilentLog:
    """Replaces logger.Logger. It prints and writes nothing. It keeps the metrics of the last step,
    and how long each phase took the last time."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started

    def progress(self, items: Sequence) -> Iterator:
        return iter(items)

    def counter(self, total: int) -> Callable[[int], object]:
        return lambda count: None

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        self.metrics = metrics


class NoFolder:
    """Replaces runs.RunFolder. It checks nothing, and starts a run from `state`."""

    def __init__(self, **state: Any):
        self.state = {**copy.deepcopy(NEW), **state}

    def check_data(self, *compared: Any) -> None:
        pass

    def restore(self, *restored: Any) -> dict[str, Any]:
        return self.state
