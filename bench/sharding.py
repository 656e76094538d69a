"""What sharding costs and saves: memory of each rank, time of a step, traffic.

    torchrun --nproc-per-node=2 bench/sharding.py --memory /tmp/shard --shape 300m \\
        training.shard=true
        peak memory of a rank, and of all, in each phase of a run of one step that loads, restores,
        samples, learns and saves; the folder keeps the model and the run: called twice, it resumes
    torchrun --nproc-per-node=2 bench/sharding.py --steps 10 [--shape 300m]
        seconds of a step beside that of DistributedDataParallel, the two in turn
    .venv/bin/python bench/sharding.py --traffic --shape qwen2.5-7b --ranks 4
        bytes that a GPU sends in a step, by arithmetic

On a CPU memory is what the process has for itself, without libraries, pages of files, and what it
had before it loaded anything."""

import argparse
import contextlib
import json
import threading
import time
from pathlib import Path

import psutil
from harness import (
    DEVICE,
    NEVER_EVALUATE,
    NO_FOLDER,
    RANK,
    SHAPES,
    SilentLog,
    dist,
    finish,
    join,
    load_config,
    main,
    make_run,
    median,
    model_of_shape,
    never_stop,
    random_rewards,
    say,
    synchronise,
    torch,
    transformers,
)

from machinery.ranks import WORLD_SIZE

NVLINK, NETWORK = 450e9, 50e9  # bytes/s that a GPU can send: H100 within a machine, 400 Gbit/s out


class Watch:
    """What all ranks of this machine have for themselves, every 10 ms, seen from rank 0."""

    def __init__(self):
        pids = [None] * WORLD_SIZE
        dist.all_gather_object(pids, psutil.Process().pid)
        self.processes = [psutil.Process(pid) for pid in pids]
        self.before, self.phase, self.peaks = self.own(), "", {}
        if RANK == 0:
            threading.Thread(target=self.look, daemon=True).start()

    def own(self) -> list[float]:
        sizes = [process.memory_info() for process in self.processes]
        return [(size.rss - size.shared) / 1e9 for size in sizes]

    def look(self) -> None:
        while True:
            own = [now - before for now, before in zip(self.own(), self.before)]
            rank, total = self.peaks.get(self.phase, (0.0, 0.0))
            self.peaks[self.phase] = max(rank, *own), max(total, sum(own))
            time.sleep(0.01)

    @contextlib.contextmanager
    def during(self, phase: str):
        dist.barrier()
        before, self.phase = self.phase, phase
        yield
        dist.barrier()
        self.phase = before


class WatchedLog(SilentLog):
    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def phase(self, name, total=0):
        outer = self.watch.during(name) if name in ("sample", "learn") else contextlib.nullcontext()
        inner = super().phase(name, total)

        @contextlib.contextmanager
        def both():
            with outer, inner:
                yield
        return both()


def keep_model(folder: Path, shape: str) -> None:
    """Random weights as a folder to load from."""
    if RANK == 0 and not (folder / "model").exists():
        model, tokenizer = model_of_shape(shape)(load_config(["model.precision=float32"]))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    dist.barrier()


def memory(folder: Path, shape: str, arguments: list[str]) -> dict:
    join()
    torch.set_num_threads(1)
    keep_model(folder, shape)
    watch = Watch()
    config = load_config([*arguments, *NEVER_EVALUATE, f"model.name={folder / 'model'}",
                          f"run.dir={folder}"])
    main.score = random_rewards
    with main.RunFolder(config) as runs:
        restore = runs.restore

        def restore_watched(run):
            with watch.during("restore" if runs.checkpoint else "nothing to restore"):
                restore(run)
        runs.restore = restore_watched
        with watch.during("load"):
            run = main.prepare(config, runs, WatchedLog(watch))
        with watch.during("idle"):
            time.sleep(0.1)
        never_stop(run)
        main.training_step(run)
        with watch.during("save"):
            runs.save(run)
    names = ("load", "restore", "idle", "sample", "learn", "save")
    peaks = {name: [round(each, 3) for each in watch.peaks[name]]
             for name in names if name in watch.peaks}
    for name, (rank, total) in peaks.items():
        say(f"{name:<8} {rank:7.2f} GB a rank {total:7.2f} GB in all")
    return {"peak_gb": {name: rank for name, (rank, _) in peaks.items()},
            "machine_gb": {name: total for name, (_, total) in peaks.items()}}


def timed(shape: str | None, steps: int, arguments: list[str]) -> dict:
    """Both in the same processes, in turn; the first pair does not count."""
    whole = make_run([*arguments, "training.shard=false"], shape)
    sharded = main.prepare(load_config([*arguments, *NEVER_EVALUATE, "training.shard=true"]),
                           NO_FOLDER, SilentLog())
    seconds = {name: [] for name in ("whole", "sharded", "learn_whole", "learn_sharded")}
    for _ in range(steps + 1):
        for name, run in (("whole", whole), ("sharded", sharded)):
            torch.set_autocast_cache_enabled(name == "whole")  # which `Sharded` has switched off
            synchronise()
            started = time.perf_counter()
            main.training_step(run)
            synchronise()
            seconds[name].append(time.perf_counter() - started)
            seconds[f"learn_{name}"].append(run.log.metrics["seconds/learn"])
    result = {name: round(median(each[1:]), 3) for name, each in seconds.items()}
    for part, one, other in (("step", "whole", "sharded"),
                             ("learn", "learn_whole", "learn_sharded")):
        ratios = [b / a for a, b in zip(seconds[one][1:], seconds[other][1:])]
        result[f"{part}_ratio"] = round(median(ratios), 3)
        say(f"{part:<6} whole {result[one]:.2f} s, sharded {result[other]:.2f} s: "
            f"{result[f'{part}_ratio']:.2f} times (from {min(ratios):.2f} to {max(ratios):.2f})")
    return result


def traffic(shape: str, ranks: int, micro_batches: int) -> None:
    """GB that a GPU sends in a step with one update. A sum over all is a ring: 2 (R - 1) / R of a
    tensor; to gather or to scatter one is half that."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**SHAPES[shape]))
    weights = sum(map(torch.numel, model.parameters()))
    share, once = (ranks - 1) / ranks * weights / 1e9, 0.0
    if not model.config.tie_word_embeddings:  # they are gathered for the forward pass alone
        once = model.get_input_embeddings().weight.numel() / weights
    # Forward and backward pass gather float32 weights, and its gradients are scattered.
    kinds = {"DistributedDataParallel": 2 * 4 * share,
             "sharded, weights": (2 - once) * 4 * share * micro_batches,
             "sharded, gradients": 4 * share * micro_batches, "sharded, sampler": 2 * share}
    for kind, size in kinds.items():
        say(f"{kind:<26} {size:7.1f} GB: {size * 1e9 / NVLINK:6.2f} s at {NVLINK / 1e9:.0f} GB/s, "
            f"{size * 1e9 / NETWORK:6.2f} s at {NETWORK / 1e9:.0f} GB/s")
    say(json.dumps({kind: round(size, 2) for kind, size in kinds.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--memory", type=Path, metavar="FOLDER")
    kinds.add_argument("--traffic", action="store_true")
    parser.add_argument("--ranks", type=int, default=4, help="for --traffic")
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step, for --traffic")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args()
    if options.traffic:
        traffic(options.shape, options.ranks, options.micro_batches)
    else:
        result = (memory(options.memory, options.shape, options.keys) if options.memory
                  else timed(options.shape, options.steps, options.keys))
        finish({"ranks": WORLD_SIZE, "device": DEVICE.type, "keys": options.keys, **result})
