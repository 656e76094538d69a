"""A prompt is read once for all of its answers, both in sampling and in learning."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from machinery.passes import at_least_float32, body_of, output_logits, pad_left, pad_right

MOST_LOGITS = 2**25  # tokens x vocabulary that exist at once, which take 128 MiB in float32


# ---------------------------------------------------------------- in learning

def states_at(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, where: torch.Tensor
) -> torch.Tensor:
    """Returns the model's last hidden states at the marked places, (places, width), one row after
    the other. The model's output layer turns them into `model(ids, mask).logits[where]`.

    All three tensors are (rows, time), padded on the right, and a row's marked places follow each
    other. What comes before them is its prompt. Equal prompts are read once, if the model can
    continue from there for each of their rows."""
    if not (keeps_cache(model) and can_branch(model)):
        output = body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
        return output.last_hidden_state[where]
    # For a prompt p0 p1 p2 and an answer a0 a1, p2 and a0 are marked, because they predict a0 and
    # a1. So the prompt that is read once is p0 p1, and the rest of the row is p2 a0. A row without
    # marked places still has something to read.
    prompts = []
    rests = []
    firsts = where.int().argmax(1).tolist()
    counts = where.sum(1).clamp(min=1).tolist()
    for row, first, count in zip(ids.tolist(), firsts, counts, strict=True):
        prompts.append(row[:first])
        rests.append(row[first:first + count])
    cache, prompt_mask = read_prompts(model, prompts)
    rest_ids, is_rest = pad_right(rests, ids.device)  # (rows, longest rest)
    whole_mask = torch.cat([prompt_mask, is_rest], 1)
    output = body_of(model)(
        input_ids=rest_ids,
        attention_mask=whole_mask,
        position_ids=positions(whole_mask)[:, -rest_ids.shape[1]:],
        past_key_values=cache,
        use_cache=True,
    )
    is_marked = is_rest & where.any(1)[:, None]
    return output.last_hidden_state[is_marked]


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


def read_prompts(model: Any, prompts: list[list[int]]) -> tuple[Cache, torch.Tensor]:
    """Returns the KV cache of these prompts, and their mask, (prompts, time), with padding on the
    left. Equal prompts are read once."""
    index_of: dict[tuple[int, ...], int] = {}
    which = []
    for prompt in prompts:
        which.append(index_of.setdefault(tuple(prompt), len(index_of)))
    ids, mask = pad_left([list(prompt) for prompt in index_of], model.device)
    cache = empty_cache(model)
    body_of(model)(
        input_ids=ids, attention_mask=mask, position_ids=positions(mask), past_key_values=cache,
        use_cache=True)
    rows = torch.tensor(which, device=model.device)
    keep_rows(cache, rows)
    return cache, mask[rows]


def empty_cache(model: Any) -> Cache:
    """Returns the cache that `generate` would begin with."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it's padded. `generate` does the same."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def keep_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keeps only these rows in the cache, in this order."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reorder_cache(rows)  # The library has no other name for it here.
        else:
            layer.batch_select_indices(rows)
