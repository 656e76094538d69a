"""A trainer in processes of its own, which takes its turn when told: what versus_trl.py and
speedrun.py compare."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def layout(text: str) -> tuple[int, int]:
    ranks, threads = map(int, text.split("x"))
    if min(ranks, threads) < 1:
        raise ValueError
    return ranks, threads


class Side:
    """One trainer in one layout: a process for each rank, each waiting for a line on its standard
    input before its next step, or its next so many (speedrun.py)."""

    def __init__(self, python: str, side: str, pace: str, passes: int, ranks: int, threads: int,
                 keys: list[str], root: Path = ROOT):
        self.name = f"{side}, {ranks} x {threads} threads"
        # A torchrun around this one has a store for its own ranks.
        outer = {key: value for key, value in os.environ.items()
                 if not key.startswith("TORCHELASTIC")}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [subprocess.Popen(
            [python, root / "bench" / "versus_trl_side.py", side, pace, str(passes), *keys],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=None if os.environ.get("SHOW_ERRORS") else subprocess.DEVNULL, text=True,
            cwd=root,
            env={**outer, "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                 "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"})
            for rank in range(ranks)]
        self.answers: list[dict] = []

    def step(self) -> dict:
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended: what it last said comes next
                process.stdin.write("\n")
                process.stdin.flush()
        for line in self.processes[0].stdout:
            if line.startswith('{"error"'):
                sys.exit(f"error: {json.loads(line)['error']}")
            if line.startswith('{"seconds"'):
                self.answers.append(json.loads(line))
                return self.answers[-1]
        sys.exit(f"{self.name} ended before its step: run again with SHOW_ERRORS=1")

    def median(self, key: str, warm_up: int) -> float:
        return statistics.median(answer[key] for answer in self.answers[warm_up:])

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
