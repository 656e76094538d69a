"""Hugging Face's `generate`, made faster: equal prompts are read once, and answers leave the batch
as soon as they've ended."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationConfig, LogitsProcessor
from transformers.cache_utils import Cache, DynamicLayer

from machinery.prompts import keep_rows, pad_prompts, prefill

TOKENS_PER_SLICE = 16  # After this many tokens, the answers that have ended leave the batch.
CACHE_ROOM = 16  # This many tokens can be appended to a layer of the cache without copying it.


class NotedLogProbs(LogitsProcessor):
    """Notes the log-probability of every token that `generate` samples, at this temperature and
    before top_p and top_k.

    `generate` shows a processor the logits of the next token and all tokens before it. So a token
    is looked up one call later, and only one token's logits are kept."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.logits: torch.Tensor | None = None  # (rows, vocabulary)
        self.log_probs: list[torch.Tensor] = []  # (rows,) of each token

    def __call__(self, sequences: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.look_up(sequences)
        self.logits = logits
        return logits

    def look_up(self, sequences: torch.Tensor) -> None:
        if self.logits is not None:
            logits = self.logits if self.temperature == 1 else self.logits / self.temperature
            self.log_probs.append(cross_entropy(logits, sequences[:, -1], reduction="none"))

    def of_tokens(self, sequences: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of all sampled tokens, (rows, tokens)."""
        self.look_up(sequences)
        return -torch.stack(self.log_probs, 1)


@torch.inference_mode()
def generate_fast(
    sampler: nn.Module,
    prompts: list[list[int]],
    settings: GenerationConfig,
    on_ended: Callable[[int], object],
) -> list[tuple[list[int], list[float]]]:
    """Calls `sampler.generate` for a few tokens at a time. Returns the tokens of an answer to each
    prompt, including the stop token, and the log-probabilities they were sampled with. `on_ended`
    is told how many more answers have ended."""
    sampler.eval()  # In train mode, gradient checkpointing would drop the KV cache.
    stop_ids = set(settings.eos_token_id)
    slice_settings = copy.copy(settings)
    ids, mask, cache = prefill_for_generate(sampler, prompts)  # (rows, time), padded on the left
    completions: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    completion_of_row = list(range(len(prompts)))
    for num_done in range(0, settings.max_new_tokens, TOKENS_PER_SLICE):
        slice_settings.max_new_tokens = min(TOKENS_PER_SLICE, settings.max_new_tokens - num_done)
        noted = NotedLogProbs(settings.temperature)
        sequences = sampler.generate(
            ids, attention_mask=mask, past_key_values=cache, generation_config=slice_settings,
            logits_processor=[noted])
        new_ids = sequences[:, ids.shape[1]:]  # (rows, slice), padding after a stop token
        log_probs = noted.of_tokens(sequences).tolist()  # of these
        still_open = []
        for row, row_ids in enumerate(new_ids.tolist()):
            new_tokens = up_to_stop(row_ids, stop_ids)
            tokens_of_answer, log_probs_of_answer = completions[completion_of_row[row]]
            tokens_of_answer += new_tokens
            log_probs_of_answer += log_probs[row][:len(new_tokens)]
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
    """Returns the tokens up to and including the first stop token."""
    for t, token in enumerate(ids):
        if token in stop_ids:
            return ids[:t + 1]
    return ids


def prefill_for_generate(
    model: nn.Module, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """Returns what `generate` continues from: ids and mask, (prompts, time), and the KV cache of
    all tokens but the last. Equal prompts are processed once."""
    prefixes = [prompt[:-1] for prompt in prompts]
    prefix_ids, prefix_mask, which = pad_prompts(prefixes, model.device)
    cache = prefill(model, prefix_ids, prefix_mask)
    for i, layer in enumerate(cache.layers):
        # Layers with a sliding window stay the library's own, and so do layers that stay empty.
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = RoomyLayer(layer)
    keep_rows(cache, which)
    last_ids = prefix_ids.new_tensor([prompt[-1:] for prompt in prompts])  # (prompts, 1)
    ids = torch.cat([prefix_ids[which], last_ids], 1)
    mask = pad(prefix_mask[which], (0, 1), value=True)
    return ids, mask, cache


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, time, width), with room for more tokens.

    The library's own layer copies everything it holds for each new token, which takes longer than
    the attention itself."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys = layer.keys
        self.values = layer.values
        self.is_initialized = True
        self.roomy_keys = layer.keys
        self.roomy_values = layer.values

    def batch_select_indices(self, indices: torch.Tensor | slice, room: int = CACHE_ROOM) -> None:
        """Keeps these rows, and makes room after their tokens."""
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
