"""How the cost of a step grows with the answers a question, their length, the ranks, and the spread of lengths.

    .venv/bin/python bench/scaling.py              the embedded default on one thread a rank; ends with one JSON line and bench/scaling.png
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import finish, main, make_run, median, never_stop, random_rewards, say, torch
from step import measure

GROUPS, LENGTHS = (4, 8, 16, 32), (64, 128, 256)
HERE = Path(__file__).resolve().parent


def grid() -> dict[str, dict[str, float]]:
    """Seconds of each phase for each G and L; all answers run to the limit and all are learned from."""
    run = make_run(["training.num_samples_per_step=4", "sampling.max_rows=1024"])
    make_generation_config, score = main.make_generation_config, main.score
    never_stop()
    main.score = random_rewards
    times = {}
    for L in LENGTHS:
        for G in GROUPS:
            run.config.training.k_best_of_n, run.config.training.max_new_gen_tokens = [G, G], L
            result = measure(run, steps=3)
            times[f"{G} x {L}"] = {key: result[key] for key in ("sample", "learn", "step")}
            say(f"G {G:>3}  L {L:>4}  sample {result['sample']:7.3f} s  learn {result['learn']:7.3f} s  step {result['step']:7.3f} s  "
                f"{1e3 * result['step'] / (4 * G * L):6.3f} ms a token")
    main.make_generation_config, main.score = make_generation_config, score
    draw(times)
    return times


def draw(times) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    for axis, phase in zip(axes, ("sample", "learn")):
        for L, marker, grey in zip(LENGTHS, "os^", ("0.6", "0.3", "0")):
            axis.plot(GROUPS, [times[f"{G} x {L}"][phase] for G in GROUPS], marker=marker, color=grey, label=f"L = {L}")
        axis.set(title=f"seconds to {phase}, 4 questions", xlabel="G, answers a question", ylim=(0, None), xlim=(0, None))
        axis.legend(fontsize=8)
    figure.savefig(HERE / "scaling.png", dpi=110)


def mixed_lengths(run) -> dict[str, float]:
    """Seconds per useful token where lengths are spread evenly from L/10 to L, over that where all are as long as their mean. The first token
    of an answer is drawn evenly and decides where it stops, so that nothing but lengths differs."""
    L, stop = run.config.training.max_new_gen_tokens, run.tokenizer.eos_token_id
    length_of = {"mixed": lambda first: L * (first % 10 + 1) // 10, "equal": lambda first: torch.full_like(first, 11 * L // 20)}
    original, results = run.sampler.generate, {}
    for name in ("equal", "mixed", "equal", "mixed", "equal", "mixed"):
        def processor(input_ids, logits, name=name):
            generated = input_ids.shape[1] - prompt_time
            if generated == 0:
                forced = torch.zeros_like(logits)
                forced[:, stop] = -torch.inf
                return forced
            ends = length_of[name](input_ids[:, prompt_time]) <= generated + 1
            logits = logits.index_fill(1, torch.tensor([stop], device=logits.device), -torch.inf)
            only_stop = torch.full_like(logits, -torch.inf)
            only_stop[:, stop] = 0.0
            return torch.where(ends[:, None], only_stop, logits)

        def read_prompts(model, ids, mask):
            nonlocal prompt_time
            prompt_time = ids.shape[1] if torch.is_inference_mode_enabled() else prompt_time
            return own_read_prompts(model, ids, mask)

        prompt_time, own_read_prompts = 0, main.read_prompts
        main.read_prompts = read_prompts
        run.sampler.generate = lambda *arguments, processor=processor, **named: original(*arguments, logits_processor=[processor], **named)
        result = measure(run, steps=2)
        main.read_prompts = own_read_prompts
        tokens = result["tokens_per_second"] * result["step"]
        results.setdefault(name, []).append(result["step"] / tokens * 1e3)
        say(f"{name} lengths: {results[name][-1]:.3f} ms a token, {tokens:,.0f} tokens in {result['step']:.2f} s "
            f"(sample {result['sample']:.2f}, learn {result['learn']:.2f})")
    del run.sampler.generate
    return {name: median(values) for name, values in results.items()}


def ranks() -> list[dict]:
    """The share of a step that reducing takes, each rank with the default's 8 questions."""
    found = []
    for count in (1, 2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", HERE / "step.py", "--steps", "3"]
        result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.splitlines()[-1])
        found.append({key: result[key] for key in ("ranks", "step", "reduce", "tokens_per_second")})
        say(f"{count} ranks: step {result['step']:.3f} s, reduce {result['reduce'] * 1e3:.1f} ms, {result['reduce'] / result['step']:.2%} of it")
    return found


if __name__ == "__main__":
    over_ranks = ranks()
    times = grid()
    main.dist.destroy_process_group()
    run = make_run(["training.num_samples_per_step=16", "training.max_new_gen_tokens=160"])
    main.score = random_rewards
    lengths = mixed_lengths(run)
    say(f"mixed lengths cost {lengths['mixed'] / lengths['equal']:.2f} times as much a token")
    growth = {phase: times[f"32 x {L}"][phase] / times[f"4 x {L}"][phase] for L in LENGTHS for phase in ("sample", "learn")}
    finish({"seconds": times, "growth_of_8_times_the_rows_at_the_largest_L": growth, "ms_per_token": lengths, "ranks": over_ranks})
