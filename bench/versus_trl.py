"""This trainer and TRL's GRPOTrainer do the same steps in turn on the same machine, and the ratio \
of their times is printed pair by pair.

    python3 -m venv bench/.venv && bench/.venv/bin/pip install -r bench/requirements.txt
    .venv/bin/python bench/versus_trl.py --trl-python bench/.venv/bin/python

Both begin every step with the same weights and answer the same questions, with groups, length,
learning rate and loss (dr_grpo, no KL) from config.yaml and the keys given. On CPUs each side runs
in every layout of its cores, and its better one counts."""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Side:
    """One trainer in one layout: a process for each rank, each waiting for a line on its standard
    input before its next step, or its next so many (speedrun.py)."""

    def __init__(self, python: str, side: str, pace: str, passes: int, ranks: int, threads: int,
                 keys: list[str], root: Path = HERE.parent):
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


if __name__ == "__main__":  # speedrun.py imports the class alone
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True,
                        help="the Python of an environment with bench/requirements.txt")
    parser.add_argument("--questions", type=int, default=16, help="per step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--tokens", type=int, default=96, help="the longest answer")
    parser.add_argument("--layouts", nargs="+", default=["1x2", "2x1"],
                        help="ranks x threads of each")
    parser.add_argument("--trl-passes", nargs="+", type=int, default=[1, 4],
                        help="micro-batches in which TRL takes a rank's rows")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("keys", nargs="*", help="section.key=value, for both sides")
    options = parser.parse_intermixed_args()

    steps = options.warm_up + options.pairs
    sides: dict[str, list[Side]] = {"ours": [], "trl": []}
    for layout in options.layouts:
        ranks, threads = map(int, layout.split("x"))
        keys = [f"training.num_samples_per_step={options.questions // ranks}",
                f"training.k_best_of_n=[{options.samples},{options.samples}]",
                f"training.max_new_gen_tokens={options.tokens}", "training.warmup_steps=0",
                *options.keys, f"training.max_steps={steps}"]
        sides["ours"].append(Side(sys.executable, "ours", "steps", 1, ranks, threads, keys))
        for passes in options.trl_passes:
            side = Side(options.trl_python, "trl", "steps", passes, ranks, threads, keys)
            side.name += f", {passes} micro-batch{'es' * (passes > 1)}"
            sides["trl"].append(side)

    for i in range(steps):
        for side in (*sides["ours"], *sides["trl"]):
            answer = side.step()
            print(f"{'warm-up' if i < options.warm_up else 'pair'} {i + 1:>2}  {side.name:<40} "
                  f"{answer['seconds']:6.3f} s  "
                  f"{answer['tokens'] / answer['seconds']:8.0f} tokens/s", flush=True)
    best = {name: min(each, key=lambda side: side.median("seconds", options.warm_up))
            for name, each in sides.items()}
    print(f"\nthe better layouts: {best['ours'].name}; {best['trl'].name}")
    per_step, per_token = [], []
    for mine, theirs in list(zip(best["ours"].answers, best["trl"].answers))[options.warm_up:]:
        per_step.append(theirs["seconds"] / mine["seconds"])
        per_token.append(per_step[-1] * mine["tokens"] / theirs["tokens"])
        print(f"{mine['seconds']:6.3f} s and {theirs['seconds']:6.3f} s: {per_step[-1]:5.2f} times "
              f"as fast per step, {per_token[-1]:5.2f} per completion token")
    for side in (*sides["ours"], *sides["trl"]):
        side.end()
    print(json.dumps({
        "per_step": round(statistics.median(per_step), 3),
        "per_token": round(statistics.median(per_token), 3),
        "seconds": {side.name: round(side.median("seconds", options.warm_up), 3)
                    for each in sides.values() for side in each},
        "sample": round(best["ours"].median("sample", options.warm_up), 3),
        "learn": round(best["ours"].median("learn", options.warm_up), 3),
        "questions": options.questions, "samples": options.samples, "tokens": options.tokens,
        "pairs": options.pairs}))
