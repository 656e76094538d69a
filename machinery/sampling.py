"""Hugging Face's `generate`, called for a few tokens at a time: what prompts have in common is read
once, and answers leave the batch as soon as they've ended."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationConfig, LogitsProcessor
from transformers.cache_utils import Cache, DynamicLayer

from machinery.errors import UserError
from machinery.passes import pad_left
from machinery.prompts import keeps_cache, read_prompts

TOKENS_PER_SLICE = 16  # After this many tokens, the answers that have ended leave the batch.
LARGE_VOCABULARY = 2**14  # From here on it pays to draw tokens with `fast_draws`.
CACHE_ROOM = 16  # This many tokens can be appended to a layer of the cache without copying it.
# What `sample` sets. Other settings may count from the beginning of an answer, and would count anew
# in each slice.
KNOWN_SETTINGS = {"do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "eos_token_id",
                  "pad_token_id", "transformers_version"}


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
def generate(
    sampler: nn.Module,
    prompts: list[list[int]],
    settings: GenerationConfig,
    on_ended: Callable[[int], object],
) -> list[tuple[list[int], list[float]]]:
    """Samples an answer to each prompt. Returns its tokens, up to and including the first stop
    token, and their log-probabilities at the sampling temperature, before top_p and top_k.
    `on_ended` is told how many more answers have ended."""
    refuse_other_settings(settings)
    sampler.eval()  # In train mode, gradient checkpointing would drop the KV cache.
    stop_ids = set(settings.eos_token_id)
    slice_settings = copy.copy(settings)
    ids, mask = pad_left(prompts, sampler.device)  # (answers, longest prompt)
    cache = None  # `generate` then makes one of its own, anew for each slice.
    if keeps_cache(sampler) and ids.shape[1] > 1:
        cache = roomy_cache(sampler, prompts)
    completions: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    completion_of_row = list(range(len(prompts)))
    for num_done in range(0, settings.max_new_tokens, TOKENS_PER_SLICE):
        slice_settings.max_new_tokens = min(TOKENS_PER_SLICE, settings.max_new_tokens - num_done)
        noted = NotedLogProbs(settings.temperature)
        with fast_draws(sampler):
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
        if cache is not None:
            cache.reorder_cache(torch.tensor(still_open, device=ids.device))
    on_ended(len(completion_of_row))  # These are truncated.
    return completions


@contextmanager
def fast_draws(model: nn.Module) -> Iterator[None]:
    """Within it, `torch.multinomial`, with which `generate` draws a token for each row, is fast on
    a CPU, too. For a single draw, PyTorch makes a random number for each token of the vocabulary,
    and with 49,152 tokens this takes twice as long as the output layer. For two draws with
    replacement it makes two random numbers, so we ask for two and take the first."""
    own = torch.multinomial

    def draw(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        # PyTorch sums them up from left to right, so in float32 it would lose rare tokens.
        return own(probabilities.double(), num_samples + 1, replacement=True)[:, :num_samples]

    if model.device.type == "cpu" and model.config.get_text_config().vocab_size >= LARGE_VOCABULARY:
        torch.multinomial = draw
    try:
        yield
    finally:
        torch.multinomial = own


def refuse_other_settings(settings: GenerationConfig) -> None:
    others = sorted(settings.to_diff_dict().keys() - KNOWN_SETTINGS)
    if others:
        raise UserError(f"sample in main.py sets {', '.join(others)}, but answers are sampled "
                        f"{TOKENS_PER_SLICE} tokens at a time, and it would begin again with each "
                        f"of these slices: set no more than {', '.join(sorted(KNOWN_SETTINGS))}")


def up_to_stop(ids: list[int], stop_ids: set[int]) -> list[int]:
    """Returns the tokens up to and including the first stop token."""
    for t, token in enumerate(ids):
        if token in stop_ids:
            return ids[:t + 1]
    return ids


def roomy_cache(model: nn.Module, prompts: list[list[int]]) -> Cache:
    """Returns what `generate` continues from: the KV cache of all tokens but each prompt's last."""
    cache, _ = read_prompts(model, [prompt[:-1] for prompt in prompts])
    for i, layer in enumerate(cache.layers):
        # Layers with a sliding window stay the library's own, and so do layers that stay empty.
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = RoomyLayer(layer)
    return cache


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

    def reorder_cache(self, rows: torch.Tensor) -> None:
        """Keeps these rows, and makes room after their tokens."""
        self.keys = self.keys[rows]
        self.values = self.values[rows]
        self.make_room(CACHE_ROOM)

    def make_room(self, room: int) -> None:
        time = self.keys.shape[2]
        self.roomy_keys = pad(self.keys, (0, 0, 0, room))
        self.roomy_values = pad(self.values, (0, 0, 0, room))
        self.keys = self.roomy_keys[:, :, :time]
        self.values = self.roomy_values[:, :, :time]

    def update(self, key_states, value_states, *args, **kwargs):
        time = self.keys.shape[2]
        num_new = key_states.shape[2]
        if time + num_new > self.roomy_keys.shape[2]:
            self.make_room(max(CACHE_ROOM, num_new))
        self.roomy_keys[:, :, time:time + num_new] = key_states
        self.roomy_values[:, :, time:time + num_new] = value_states
        self.keys = self.roomy_keys[:, :, :time + num_new]
        self.values = self.roomy_values[:, :, :time + num_new]
        return self.keys, self.values
