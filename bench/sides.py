"""A trainer in its own processes, which takes its turn when told to. versus_trl.py and speedrun.py
compare such trainers."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Side:
    """One trainer, with a process for each rank. Before its next turn, each process waits for a
    line on its standard input."""

    def __init__(self, side: str, pace: str, ranks: int, threads: int, keys: list[str],
                 python: str = sys.executable, root: Path = ROOT, passes: int = 1):
        self.name = f"{side}, {ranks} x {threads} threads"
        self.answers: list[dict] = []
        self.processes = []
        # A torchrun around this process has a store for its own ranks.
        outer = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            layout = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks,
                      "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                      "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": 1}
            self.processes.append(subprocess.Popen(
                [python, root / "bench" / "versus_trl_side.py", side, pace, str(passes), *keys],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root,
                env=outer | {key: str(value) for key, value in layout.items()}))

    def turn(self) -> dict:
        """Lets it take its turn, and returns what it reports."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # It has exited, and said why.
                process.stdin.write("\n")
                process.stdin.flush()
        for line in self.processes[0].stdout:
            if line.startswith('{"seconds"'):
                self.answers.append(json.loads(line))
                return self.answers[-1]
        sys.exit(f"error: {self.name} exited before its turn")

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
