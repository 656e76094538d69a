"""A prompt is processed once for all of its answers, both in sampling and in learning."""

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from machinery.passes import body_of, pad_right

ROWS_PER_PASS = 16  # A micro-batch is sorted by length, so a few rows together need little padding.


# ---------------------------------------------------------------- in learning

def hidden_states(
    model: Any, prompts: list[list[int]], inputs: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """Returns the hidden states at the inputs, (tokens, width), one row after the other.

    Each row of `inputs`, (rows, time), follows its prompt. `is_token` has the same shape, and says
    which inputs are wanted. Equal prompts are processed once, if the model can continue from there
    for each of their rows."""
    if can_continue(model):
        return continue_prompts(model, prompts, inputs, is_token)
    return process_whole_rows(model, prompts, inputs, is_token)


def process_whole_rows(
    model: Any, prompts: list[list[int]], inputs: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """The plain way: each row is a prompt followed by its inputs, padded on the right."""
    num_wanted = is_token.sum(1).tolist()  # in each row
    rows = []
    for prompt, ids_of_row, count in zip(prompts, inputs.tolist(), num_wanted, strict=True):
        rows.append(prompt + ids_of_row[:max(1, count)])
    ids, mask = pad_right(rows, model.device)  # (rows, time)
    output = body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    states = []
    for row, (prompt, count) in enumerate(zip(prompts, num_wanted, strict=True)):
        states.append(output.last_hidden_state[row, len(prompt):len(prompt) + count])
    return torch.cat(states)


def can_continue(model: Any) -> bool:
    """Whether several rows can continue from one pass over their prompt, while learning.

    With gradient checkpointing, transformers turns the cache off. Layers like Mamba's or a
    convolution keep a running state, which can continue from a prompt but can't go back to it. And
    sharded weights are gathered again for each pass, so fewer passes are better."""
    layers = DynamicCache(config=model.config).layers
    has_running_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return not (model.is_activation_checkpointing or has_running_state or is_sharded)


def continue_prompts(
    model: Any, prompts: list[list[int]], inputs: torch.Tensor, is_token: torch.Tensor
) -> torch.Tensor:
    """The fast way: one pass over the different prompts, then passes over a few rows of inputs."""
    prompt_ids, prompt_mask, prompt_of_row = pad_prompts(prompts, model.device)
    cache = prefill(model, prompt_ids, prompt_mask)
    states = []
    for start in range(0, len(prompts), ROWS_PER_PASS):
        few = slice(start, start + ROWS_PER_PASS)
        rows = prompt_of_row[few]
        # As long as the longest of these rows, and at least one input.
        num_inputs = max(1, int(is_token[few].sum(1).max()))
        ids = inputs[few, :num_inputs]  # (rows, inputs)
        is_wanted = is_token[few, :num_inputs]
        # The first input is always there, the next one only if a token came before it: 110 -> 111.
        is_input = is_wanted.roll(1, dims=1)
        is_input[:, 0] = True
        mask = torch.cat([prompt_mask[rows], is_input], 1)  # (rows, time)
        output = body_of(model)(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask)[:, -num_inputs:],
            past_key_values=select_rows(cache, rows),
            use_cache=True,
        )
        states.append(output.last_hidden_state[is_wanted])
    return torch.cat(states)


# ---------------------------------------------------------------- prompts and their cache

def pad_prompts(
    prompts: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes each different prompt once, and pads on the left. Returns their ids and attention mask,
    both (different prompts, time), and which of them each prompt is, (prompts,)."""
    index_of: dict[tuple[int, ...], int] = {}
    which = []
    for prompt in prompts:
        key = tuple(prompt)
        index_of.setdefault(key, len(index_of))
        which.append(index_of[key])
    longest = max(1, *[len(prompt) for prompt in index_of])
    ids = []
    mask = []
    for prompt in index_of:
        padding = longest - len(prompt)
        ids.append([0] * padding + list(prompt))
        mask.append([False] * padding + [True] * len(prompt))
    return (
        torch.tensor(ids, device=device),
        torch.tensor(mask, device=device),
        torch.tensor(which, device=device),
    )


def prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """Returns the KV cache of these prompts. Ids and mask are (prompts, time)."""
    output = body_of(model)(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids(mask),
        use_cache=True,
    )
    if getattr(output, "past_key_values", None) is None:
        raise ValueError("the model returns no KV cache to continue from")
    return output.past_key_values


def position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it's padded. `generate` does the same."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def select_rows(cache: Cache, rows: torch.Tensor) -> Cache:
    """Returns a copy of the cache with only these rows. The original stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    keep_rows(selected, rows)
    return selected


def keep_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keeps only these rows in the cache, in this order."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reorder_cache(rows)  # The library has no other name for it here.
        else:
            layer.batch_select_indices(rows)
