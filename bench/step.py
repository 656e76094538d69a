"""Measures the phases of a training step: seconds, tokens per second, and memory.

    .venv/bin/python bench/step.py                                         the default on one rank
    .venv/bin/torchrun --nproc-per-node=2 bench/step.py training.seed=1    any ranks, any keys
    .venv/bin/python bench/step.py --shape qwen2.5-3b --endless \\
        training.num_samples_per_step=32 'training.k_best_of_n=[16,16]' \\
        training.max_new_gen_tokens=1024 training.tokens_per_micro_batch=16384 \\
        model.gradient_checkpointing=true   for an 80 GB GPU

On a CPU, memory means the process's. On a GPU it's what tensors hold, and what the allocator
reserved for them. `alloc_retries` is how often the allocator had to give memory back."""

import argparse
import time
from collections import defaultdict

import harness
from harness import DEVICE, main, median, peak_memory, say, torch

from machinery.ranks import WORLD_SIZE


class Watch:
    """Notes how many tokens a step has sampled, and the peak memory of each phase."""

    def __init__(self):
        self.num_tokens = 0
        self.peaks = {}
        self.own_sample = main.sample
        self.own_gradient = main.policy_gradient
        main.sample = self.sample
        main.policy_gradient = self.policy_gradient

    def sample(self, *arguments):
        peak_memory()
        groups = self.own_sample(*arguments)
        self.num_tokens = sum(answer.num_tokens for group in groups for answer in group)
        self.peaks["sample"] = peak_memory()
        return groups

    def policy_gradient(self, run, learned, totals):
        peak_memory()
        update = self.own_gradient(run, learned, totals)
        self.peaks["learn"] = peak_memory()
        return update


def seconds_of_a_step(run) -> float:
    harness.synchronise()
    started = time.perf_counter()
    main.training_step(run)
    harness.synchronise()
    return time.perf_counter() - started


def measure(run, steps: int, warm_up: int = 1) -> dict:
    """Returns medians over the steps of what each phase takes on rank 0."""
    found: dict[str, list[float]] = defaultdict(list)
    watch = Watch()
    for _ in range(warm_up):
        seconds_of_a_step(run)
    for _ in range(steps):
        found["step"].append(seconds_of_a_step(run))
        for phase in ("sample", "learn"):
            found[phase].append(run.log.seconds[phase])
            for kind, peak in watch.peaks[phase].items():
                found[f"{phase}_{kind}"].append(peak)
    result = {name: median(values) for name, values in found.items()}
    result["tokens_per_second"] = watch.num_tokens / result["step"] * WORLD_SIZE
    if DEVICE.type == "cuda":
        result["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="random weights of a published shape, and random rewards")
    parser.add_argument("--endless", action="store_true", help="all answers reach the length limit")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("keys", nargs="*",
                        help="section.key=value, or --config files, as for main.py")
    options, more = parser.parse_known_intermixed_args()
    run = harness.make_run([*more, *options.keys], options.shape)
    if options.endless:
        harness.never_stop(run)
    result = measure(run, options.steps)
    rounded = {name: round(value, 4) for name, value in result.items()}
    for phase in ("sample", "learn"):
        say(f"{phase:<8} {result[phase]:8.3f} s   {result[f'{phase}_memory_gb']:6.2f} GB")
    say(f"step     {result['step']:8.3f} s   {result['tokens_per_second']:8,.0f} tokens/s")
    harness.finish({"ranks": WORLD_SIZE, "shape": options.shape, **rounded})
