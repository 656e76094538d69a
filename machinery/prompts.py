"""Prompts that are processed once for all of their answers, and the KV cache that comes of it."""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

CACHE_ROOM = 16  # So many tokens can be appended to a layer of the cache without copying it.


def position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it is padded. `generate` does the same."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_prompts(
    prompts: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes each different prompt once, and pads on the left. Returns ids and attention mask, both
    (different prompts, time), and which of them each prompt is, (prompts,)."""
    index_of: dict[tuple[int, ...], int] = {}
    which = []
    for prompt in prompts:
        key = tuple(prompt)
        index_of.setdefault(key, len(index_of))
        which.append(index_of[key])
    # At least two tokens: one to process ahead, and one from which the model continues.
    longest = max(2, *[len(prompt) for prompt in index_of])
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


def body_of(model: nn.Module) -> nn.Module:
    """Returns the part of the model that its own forward pass calls, before its output layer."""
    body = model.base_model
    if body is model:  # Llama 4 does not say which part it is.
        body = model.model
    return getattr(body, "decoder", body)  # OPT calls the decoder within its base model.


def has_running_state(model: nn.Module) -> bool:
    """Whether some layers, like Mamba's or a convolution, keep a state in place of keys and values.

    Such a state can go on from a prompt, but it cannot go back to it."""
    layers = DynamicCache(config=model.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def prefill(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """Returns the KV cache of all tokens of these prompts but the last."""
    mask = mask[:, :-1]
    output = body_of(model)(
        input_ids=ids[:, :-1],
        attention_mask=mask,
        position_ids=position_ids(mask),
        use_cache=True,
    )
    if getattr(output, "past_key_values", None) is None:
        raise ValueError("it returns no cache of keys and values to go on from")
    return output.past_key_values


def prefill_for_generate(
    model: nn.Module, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """Returns what `generate` continues from: ids and mask, (prompts, time), and the KV cache of
    all tokens but the last. Equal prompts are processed once."""
    ids, mask, which = pad_prompts(prompts, model.device)
    cache = prefill(model, ids, mask)
    for i, layer in enumerate(cache.layers):
        # Layers with a sliding window stay the library's own, and so do those that stay empty.
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = RoomyLayer(layer)
    keep_rows(cache, which)
    return ids[which], mask[which], cache


def keep_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Leaves these rows in the cache, in this order."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reorder_cache(rows)  # The library has no other name for it here.
        else:
            layer.batch_select_indices(rows)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, time, width), with room for more tokens.

    The library's own layer copies all that it holds for each new token. That takes longer than the
    attention itself."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys = layer.keys
        self.values = layer.values
        self.is_initialized = True
        self.roomy_keys = layer.keys
        self.roomy_values = layer.values

    def batch_select_indices(self, indices: torch.Tensor | slice, room: int = CACHE_ROOM) -> None:
        """Keeps these rows, and makes room behind them."""
        time = self.keys.shape[2]
        self.roomy_keys = pad(self.keys[indices], (0, 0, 0, room))
        self.roomy_values = pad(self.values[indices], (0, 0, 0, room))
        self.keys = self.roomy_keys[:, :, :time]
        self.values = self.roomy_values[:, :, :time]

    def update(self, key_states, value_states, *args, **kwargs):
        time = self.keys.shape[2]
        num_new = key_states.shape[2]
        if time + num_new > self.roomy_keys.shape[2]:
            self.batch_select_indices(slice(None), max(CACHE_ROOM, num_new))
        self.roomy_keys[:, :, time:time + num_new] = key_states
        self.roomy_values[:, :, time:time + num_new] = value_states
        self.keys = self.roomy_keys[:, :, :time + num_new]
        self.values = self.roomy_values[:, :, :time + num_new]
        return self.keys, self.values
