"""main.py with transformers' continuous batching in place of its own sampling: a finished row
leaves at once, keys and values lie in pages, and a GPU runs CUDA graphs. On CPUs it takes three to
four times as long; on GPUs nobody has measured it yet, and if it pays there its place is in
main.py.

    .venv/bin/python bench/continuous.py training.max_steps=3
        any arguments of main.py; look at seconds/sample in metrics.jsonl
    .venv/bin/python bench/step.py --continuous ...
        a step, as bench/README.md measures it"""

import copy
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

import main


def complete(sampler, prompts: list[list[int]], L: int, bar) -> list[list[int]]:
    """In place of `main.complete`. It is set up anew for each call, or it would go on using keys of
    old weights; blocks of equal prompts are shared by the library."""
    attention, settings = sampler.config._attn_implementation, copy.copy(sampler.generation_config)
    settings.max_new_tokens = L
    batching = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=len(prompts), max_batch_tokens=max(2 * len(prompts), 256),
        seed=int(torch.randint(2**31, ())))
    # As much memory as these may need; left to itself it would take nearly all that is free.
    longest = max(map(len, prompts)) + L
    batching.num_blocks = len(prompts) * math.ceil(longest / batching.page_size)
    try:
        results = list(sampler.generate_batch(prompts, settings, batching).values())
    finally:
        sampler.set_attn_implementation(attention)
    # What goes wrong inside is logged, not raised, and the answers that there are come back.
    errors = {result.error for result in results if result.error}
    if errors or len(results) < len(prompts):
        kind = torch.OutOfMemoryError if "out of memory" in str(errors) else main.UserError
        raise kind(f"continuous batching returned {len(results)} of {len(prompts)} answers, with "
                   f"{sorted(errors)}")
    bar.update(len(results))
    return [result.generated_tokens for result in results]


if __name__ == "__main__":
    main.complete = complete
    main.launch(main.main)
