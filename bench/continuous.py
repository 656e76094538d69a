"""main.py with transformers' continuous batching in place of its own sampling: a finished row
leaves at once, keys and values lie in pages, and a GPU runs CUDA graphs. On CPUs it takes three to
four times as long; on GPUs nobody has measured it yet, and if it pays there its place is in
main.py.

    .venv/bin/python bench/continuous.py training.max_steps=3
        any arguments of main.py; look at seconds/sample in metrics.jsonl
    .venv/bin/python bench/step.py --continuous ...
        a step, as bench/README.md measures it"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import main
from machinery.errors import UserError


def generate(sampler, prompts: list[list[int]], settings, max_rows: int,
             on_ended: Callable[[int], object]) -> list[list[int]]:
    """In place of `main.generate`."""
    sampler.eval()
    completions = []
    for start in range(0, len(prompts), max_rows):
        completions += generate_rows(sampler, prompts[start:start + max_rows], settings)
        on_ended(len(completions) - start)
    return completions


def generate_rows(sampler, prompts: list[list[int]], settings) -> list[list[int]]:
    """It is set up anew for each call, or it would go on using keys of old weights; blocks of equal
    prompts are shared by the library."""
    attention = sampler.config._attn_implementation
    batching = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=len(prompts), max_batch_tokens=max(2 * len(prompts), 256),
        seed=int(torch.randint(2**31, ())))
    # As much memory as these may need; left to itself it would take nearly all that is free.
    longest = max(map(len, prompts)) + settings.max_new_tokens
    batching.num_blocks = len(prompts) * math.ceil(longest / batching.page_size)
    try:
        results = list(sampler.generate_batch(prompts, settings, batching).values())
    finally:
        sampler.set_attn_implementation(attention)
    # What goes wrong inside is logged, not raised, and the answers that there are come back.
    errors = {result.error for result in results if result.error}
    if errors or len(results) < len(prompts):
        kind = torch.OutOfMemoryError if "out of memory" in str(errors) else UserError
        raise kind(f"continuous batching returned {len(results)} of {len(prompts)} answers, with "
                   f"{sorted(errors)}")
    return [result.generated_tokens for result in results]


if __name__ == "__main__":
    main.generate = generate
    main.launch(main.main)
