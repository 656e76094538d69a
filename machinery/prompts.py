"""Prompts that are processed once for all of their answers, and the KV cache that comes of it."""

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

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


def prefill(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """Returns the KV cache of all tokens of these prompts but the last."""
    mask = mask[:, :-1]
    output = model.base_model(
        input_ids=ids[:, :-1],
        attention_mask=mask,
        position_ids=position_ids(mask),
        use_cache=True,
    )
    return output.past_key_values


def prefill_for_generate(
    model: nn.Module, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """Returns what `generate` continues from: ids and mask, (prompts, time), and the KV cache of
    all tokens but the last. Equal prompts are processed once."""
    ids, mask, which = pad_prompts(prompts, model.device)
    cache = prefill(model, ids, mask)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:  # Layers with a sliding window stay the library's own.
            cache.layers[i] = RoomyLayer(layer)
    cache.batch_select_indices(which)
    return ids[which], mask[which], cache


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
