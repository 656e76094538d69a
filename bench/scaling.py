"""How the cost of a step grows with the answers a question, their length, the ranks, and the spread
of lengths.

    .venv/bin/python bench/scaling.py
        the embedded default on one thread a rank; ends with one JSON line and bench/scaling.png
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import dist, finish, main, make_run, median, never_stop, random_rewards, say, torch
from step import measure

from machinery import sampling

GROUPS, LENGTHS = (4, 8, 16, 32), (64, 128, 256)
HERE = Path(__file__).resolve().parent


def grid() -> dict[str, dict[str, float]]:
    """Seconds of each phase for each G and L; all answers run to the limit and all are learned
    from."""
    run = make_run(["training.num_samples_per_step=4", "sampling.max_rows=1024"])
    never_stop(run)
    score, main.score = main.score, random_rewards
    times = {}
    for L in LENGTHS:
        for G in GROUPS:
            training = run.config.training.model_copy(
                update={"k_best_of_n": (G, G), "max_new_gen_tokens": L})
            run.config = run.config.model_copy(update={"training": training})
            result = measure(run, steps=3)
            times[f"{G} x {L}"] = {key: result[key] for key in ("sample", "learn", "step")}
            say(f"G {G:>3}  L {L:>4}  sample {result['sample']:7.3f} s  "
                f"learn {result['learn']:7.3f} s  step {result['step']:7.3f} s  "
                f"{1e3 * result['step'] / (4 * G * L):6.3f} ms a token")
    main.score = score
    draw(times)
    return times


def draw(times) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    for axis, phase in zip(axes, ("sample", "learn")):
        for L, marker, grey in zip(LENGTHS, "os^", ("0.6", "0.3", "0")):
            axis.plot(GROUPS, [times[f"{G} x {L}"][phase] for G in GROUPS], marker=marker,
                      color=grey, label=f"L = {L}")
        axis.set(title=f"seconds to {phase}, 4 questions", xlabel="G, answers a question",
                 xlim=(0, None))
        axis.legend(fontsize=8)
    axes[0].set_ylim(bottom=0)  # shared, so after both have their lines
    figure.savefig(HERE / "scaling.png", dpi=110)


class ForcedLengths:
    """A logits processor: the first token of an answer is drawn evenly, and with it its length,
    `length_of(token)`."""

    def __init__(self, length_of, stop: int):
        self.length_of, self.stop, self.prompt_time = length_of, stop, 0
        self.prefill = sampling.prefill_for_generate

    def watch_prompts(self, sampler, prompts):
        """In place of sampling.prefill_for_generate."""
        ids, mask, cache = self.prefill(sampler, prompts)
        self.prompt_time = ids.shape[1]
        return ids, mask, cache

    def __call__(self, input_ids, logits):
        generated = input_ids.shape[1] - self.prompt_time
        if generated == 0:
            forced = torch.zeros_like(logits)
        else:
            forced = logits.clone()
        forced[:, self.stop] = -torch.inf
        if generated > 0:
            ends = self.length_of(input_ids[:, self.prompt_time]) <= generated + 1
            forced[ends] = -torch.inf
            forced[ends, self.stop] = 0.0
        return forced


def mixed_lengths(pairs: int = 5) -> dict[str, float]:
    """Milliseconds per useful token where lengths are spread evenly from L/10 to L, and where all
    are as long as their mean."""
    run = make_run(["training.num_samples_per_step=16", "training.max_new_gen_tokens=160"])
    main.score = random_rewards
    L, stop = run.config.training.max_new_gen_tokens, run.tokenizer.eos_token_id
    forced = {"equal": ForcedLengths(lambda first: torch.full_like(first, 11 * L // 20), stop),
              "mixed": ForcedLengths(lambda first: L * (first % 10 + 1) // 10, stop)}
    generate, per_token = run.sampler.generate, {"equal": [], "mixed": []}
    for _ in range(pairs):
        for name, processor in forced.items():
            sampling.prefill_for_generate = processor.watch_prompts
            run.sampler.generate = partial(generate, logits_processor=[processor])
            result = measure(run, steps=1, warm_up=0)
            tokens = result["tokens_per_second"] * result["step"]
            per_token[name].append(result["step"] / tokens * 1e3)
            say(f"{name} lengths: {per_token[name][-1]:.3f} ms a token, "
                f"{tokens:,.0f} tokens in {result['step']:.2f} s "
                f"(sample {result['sample']:.2f}, learn {result['learn']:.2f})")
    ratio = median(mixed / equal
                   for equal, mixed in zip(per_token["equal"][1:], per_token["mixed"][1:]))
    say(f"mixed lengths cost {ratio:.2f} times as much a token, median of {pairs - 1} pairs after "
        "one to warm up")
    return {**{name: median(values[1:]) for name, values in per_token.items()}, "ratio": ratio}


def ranks() -> list[dict]:
    """The share of a step that reducing takes, each rank with the default's 8 questions."""
    found = []
    for count in (1, 2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={count}", HERE / "step.py"]
        printed = subprocess.run([*command, "--steps", "3"], check=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True).stdout
        result = json.loads(printed.splitlines()[-1])
        found.append({key: result[key] for key in ("ranks", "step", "reduce", "tokens_per_second")})
        say(f"{count} ranks: step {result['step']:.3f} s, reduce {result['reduce'] * 1e3:.1f} ms, "
            f"{result['reduce'] / result['step']:.2%} of it")
    return found


if __name__ == "__main__":
    lengths = mixed_lengths()
    dist.destroy_process_group()
    over_ranks = ranks()
    times = grid()
    few, many = (times[f"{G} x {LENGTHS[-1]}"] for G in (GROUPS[0], GROUPS[-1]))
    growth = {phase: many[phase] / few[phase] for phase in ("sample", "learn")}
    finish({"seconds": times, "growth_from_the_smallest_to_the_largest_G": growth,
            "ms_per_token": lengths, "ranks": over_ranks})
