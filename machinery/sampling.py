"""Hugging Face's `generate`, made faster: equal prompts are processed once, and answers that have
ended leave the batch."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import GenerationConfig

from machinery.prompts import keep_rows, prefill_for_generate

TOKENS_PER_SLICE = 16  # After so many tokens the answers that have ended leave the batch.


@torch.inference_mode()
def generate(
    sampler: nn.Module,
    prompts: list[list[int]],
    settings: GenerationConfig,
    max_rows: int,
    on_ended: Callable[[int], object],
) -> list[list[int]]:
    """Returns one completion of each prompt, its stop token included. They are what
    `sampler.generate` returns with these settings. At most `max_rows` are sampled together.
    `on_ended` is called with the number of answers that have just ended."""
    sampler.eval()  # In train mode gradient checkpointing would drop the KV cache.
    completions = []
    for start in range(0, len(prompts), max_rows):
        rows = prompts[start:start + max_rows]
        completions += generate_in_slices(sampler, rows, settings, on_ended)
    return completions


def generate_in_slices(
    sampler: nn.Module,
    prompts: list[list[int]],
    settings: GenerationConfig,
    on_ended: Callable[[int], object],
) -> list[list[int]]:
    """Calls `sampler.generate` for a few tokens at a time."""
    stop_ids = set(settings.eos_token_id)
    slice_settings = copy.copy(settings)
    ids, mask, cache = prefill_for_generate(sampler, prompts)  # (rows, time), padded on the left
    completions: list[list[int]] = [[] for _ in prompts]
    completion_of_row = list(range(len(prompts)))
    for num_done in range(0, settings.max_new_tokens, TOKENS_PER_SLICE):
        slice_settings.max_new_tokens = min(TOKENS_PER_SLICE, settings.max_new_tokens - num_done)
        sequences = sampler.generate(
            ids, attention_mask=mask, past_key_values=cache, generation_config=slice_settings)
        new_ids = sequences[:, ids.shape[1]:]  # (rows, slice), padding after a stop token
        still_open = []
        for row, row_ids in enumerate(new_ids.tolist()):
            new_tokens = up_to_stop(row_ids, stop_ids)
            completions[completion_of_row[row]] += new_tokens
            if new_tokens[-1] not in stop_ids:
                still_open.append(row)
        on_ended(len(completion_of_row) - len(still_open))
        completion_of_row = [completion_of_row[row] for row in still_open]
        if not still_open:
            break
        ids = sequences[still_open]
        mask = pad(mask, (0, new_ids.shape[1]), value=True)[still_open]
        keep_rows(cache, torch.tensor(still_open, device=ids.device))
    on_ended(len(completion_of_row))  # These are truncated.
    return completions


def up_to_stop(ids: list[int], stop_ids: set[int]) -> list[int]:
    """Returns the tokens up to the first stop token, which is included."""
    for t, token in enumerate(ids):
        if token in stop_ids:
            return ids[:t + 1]
    return ids
