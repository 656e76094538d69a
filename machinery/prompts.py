"""A prompt is read once for all of its answers, both in sampling and in learning."""

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from machinery.passes import at_least_float32, body_of, output_logits, pad_left, pad_right

MOST_LOGITS = 2**25  # tokens x vocabulary that exist at once, which take 128 MiB in float32
SHORTEST_SHARED = 16  # A shorter beginning isn't worth a pass of its own.


# ---------------------------------------------------------------- in learning

def states_at(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, where: torch.Tensor
) -> torch.Tensor:
    """Returns the model's last hidden states at the marked places, (places, width), one row after
    the other. The model's output layer turns them into `model(ids, mask).logits[where]`.

    All three tensors are (rows, time), padded on the right, and a row's marked places follow each
    other. What comes before them is its prompt. Equal prompts and equal rows are read once, if the
    model can continue from a prompt for each of its rows."""
    if not (keeps_cache(model) and can_branch(model)):
        output = body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
        return output.last_hidden_state[where]
    # For a prompt p0 p1 p2 and an answer a0 a1, p2 and a0 are marked, because they predict a0 and
    # a1. So the prompt that is read once is p0 p1, and the rest of the row is p2 a0. A row without
    # marked places still has something to read.
    rows = []
    firsts = where.int().argmax(1).tolist()
    counts = where.sum(1).clamp(min=1).tolist()
    for row, first, count in zip(ids.tolist(), firsts, counts, strict=True):
        rows.append((tuple(row[:first]), tuple(row[first:first + count])))
    different, which = without_repeats(rows)
    prompts, rests = zip(*different, strict=True)
    cache, prompt_mask = read_prompts(model, prompts)
    rest_ids, is_rest = pad_right(rests, ids.device)  # (different rows, longest rest)
    whole_mask = torch.cat([prompt_mask, is_rest], 1)
    output = body_of(model)(
        input_ids=rest_ids,
        attention_mask=whole_mask,
        position_ids=positions(whole_mask)[:, -rest_ids.shape[1]:],
        past_key_values=cache,
        use_cache=True,
    )
    place = torch.tensor(which, device=ids.device)  # (rows,)
    states = output.last_hidden_state.index_select(0, place)  # (rows, longest rest, width)
    is_marked = is_rest[place] & where.any(1)[:, None]  # (rows, longest rest)
    return states[is_marked]


def in_pieces(
    function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    model: Any,
    states: torch.Tensor,  # (tokens, width)
    tokens: torch.Tensor,  # (tokens,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `function(logits, tokens)`, two tensors of shape (tokens,), where the logits are what
    the model's output layer makes of the states.

    The logits of all tokens may be by far the largest tensor. If there are more than MOST_LOGITS,
    they're computed for a piece of the tokens at a time, and again in the backward pass."""
    def of_piece(states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return function(at_least_float32(output_logits(model, states)), tokens)

    size = MOST_LOGITS // model.config.get_text_config().vocab_size
    if len(tokens) <= size:
        return of_piece(states, tokens)
    firsts = []
    seconds = []
    for some_states, some_tokens in zip(states.split(size), tokens.split(size), strict=True):
        first, second = checkpoint(of_piece, some_states, some_tokens, use_reentrant=False)
        firsts.append(first)
        seconds.append(second)
    return torch.cat(firsts), torch.cat(seconds)


# ---------------------------------------------------------------- prompts and their cache

def keeps_cache(model: Any) -> bool:
    """Whether the model can continue from the library's KV cache. The first GPT keeps none, and
    Mamba and MiniMax keep caches of their own."""
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    return takes_cache and model._supports_default_dynamic_cache()


def can_branch(model: Any) -> bool:
    """Whether several rows can continue from one pass over their prompt, while learning.

    With gradient checkpointing, transformers turns the cache off. Layers like Mamba's or a
    convolution keep a running state, which can continue from a prompt but can't go back to it. And
    sharded weights are gathered again for each pass, so fewer passes are better."""
    layers = empty_cache(model).layers
    has_running_state = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return not (model.is_activation_checkpointing or has_running_state or is_sharded)


def read_prompts(
    model: Any, prompts: Sequence[Sequence[int]]
) -> tuple[Cache, torch.Tensor]:
    """Returns the KV cache of these prompts, and their mask, (prompts, time), with padding on the
    left. Equal prompts are read once, and so is a long beginning that all of them share, such as a
    system message."""
    different, which = without_repeats([tuple(prompt) for prompt in prompts])
    ids, mask = pad_left(different, model.device)
    cache = empty_cache(model)
    num_read = 0  # so many columns of `ids` are in the cache already
    shared = os.path.commonprefix(different)  # It's made for paths, but takes any sequences.
    if len(different) > 1 and is_worth_sharing(len(shared), ids.shape[1], cache):
        read_shared(model, shared, mask, cache)
        num_read = len(shared)
    body_of(model)(
        input_ids=ids[:, num_read:], attention_mask=mask,
        position_ids=positions(mask)[:, num_read:], past_key_values=cache, use_cache=True)
    rows = torch.tensor(which, device=model.device)
    cache.reorder_cache(rows)
    return cache, mask[rows]


def without_repeats(items: list) -> tuple[list, list[int]]:
    """Returns the different items, and where among them each item is."""
    place_of: dict = {}
    places = [place_of.setdefault(item, len(place_of)) for item in items]
    return list(place_of), places


def is_worth_sharing(num_shared: int, longest: int, cache: Cache) -> bool:
    # Other layers have a sliding window, for example, or a running state.
    keeps_all_tokens = all(type(layer) is DynamicLayer for layer in cache.layers)
    return keeps_all_tokens and num_shared >= max(SHORTEST_SHARED, longest / 2)


def read_shared(model: Any, shared: Sequence[int], mask: torch.Tensor, cache: Cache) -> None:
    """Fills the first columns of the cache with the beginning that all prompts share. It's read
    once, and then moved to the right in each row, by as much padding as the row begins with:

        p0 p1 p2 | x3 x4    What is left of the bar is in the cache, and the rest is yet to be read.
        -- p0 p1 | p2 y3    This prompt is shorter, so it reads p2 again.

    So padding never comes between two tokens. Some models would count it as distance."""
    ids = torch.tensor([shared], device=model.device)
    body_of(model)(input_ids=ids, past_key_values=cache, use_cache=True)
    places = positions(mask)[:, :len(shared)]  # (prompts, shared)
    for layer in cache.layers:
        if layer.is_initialized:
            layer.keys = moved(layer.keys, places)
            layer.values = moved(layer.values, places)


def moved(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns the states at these places, (prompts, heads, shared, width), of those of one row, (1,
    heads, shared, width)."""
    chosen = states[0].index_select(1, places.flatten())  # (heads, prompts * shared, width)
    return chosen.unflatten(1, places.shape).transpose(0, 1)


def empty_cache(model: Any) -> Cache:
    """Returns the cache that `generate` would begin with."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it's padded. `generate` does the same."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
