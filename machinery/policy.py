"""The forward pass of answers: hidden states before their tokens, and logits in chunks."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from machinery.prompts import pad_prompts, position_ids, prefill

HALF_PRECISION = torch.bfloat16  # Mixed precision computes in this type, and samples from it.
LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary, which are 128 MiB in float32
ANSWERS_PER_PASS = 16  # A micro-batch is sorted by length, so few together have little padding.


def states_before_tokens(
    model: nn.Module, answers: list, one_pass: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the hidden states from which the model predicts each token of the answers, (tokens,
    width), and these tokens, (tokens,), one answer after the other.

    A prompt with several answers is processed once. With `one_pass` it is not, and all answers go
    through the model together: sharded weights are gathered anew in each pass."""
    prompts = [answer.prompt_ids for answer in answers]
    prompt_ids, prompt_mask, which = pad_prompts(prompts, model.device)
    cache = None
    # With gradient checkpointing a layer refuses to use a cache.
    if not one_pass and not model.is_activation_checkpointing:
        cache = prefill(model, prompt_ids, prompt_mask)
    answers_per_pass = len(answers) if one_pass else ANSWERS_PER_PASS
    states = []
    tokens = []
    for start in range(0, len(answers), answers_per_pass):
        prompts_of_pass = which[start:start + answers_per_pass]  # (answers of this pass,)
        completions = []
        for answer in answers[start:start + answers_per_pass]:
            completions.append(answer.completion_ids)
        states_of_pass, tokens_of_pass = forward_pass(
            model,
            prompt_ids[prompts_of_pass],
            prompt_mask[prompts_of_pass],
            completions,
            select_rows(cache, prompts_of_pass),
        )
        states.append(states_of_pass)
        tokens.append(tokens_of_pass)
    return torch.cat(states), torch.cat(tokens)


def select_rows(cache: Cache | None, rows: torch.Tensor) -> Cache | None:
    """Returns a copy of the cache that holds these rows. The original stays as it is."""
    if cache is None:
        return None
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def forward_pass(
    model: nn.Module,
    prompt_ids: torch.Tensor,   # (answers, prompt time), padded on the left
    prompt_mask: torch.Tensor,  # (answers, prompt time)
    completions: list[list[int]],
    cache: Cache | None,        # of all prompt tokens but the last
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `states_before_tokens` does, for one pass through the model."""
    device = prompt_ids.device
    lengths = torch.tensor([len(completion) for completion in completions], device=device)
    time = int(lengths.max())
    padded = [completion + [0] * (time - len(completion)) for completion in completions]
    completion_ids = torch.tensor(padded, device=device)  # (answers, time)
    completion_mask = torch.arange(time, device=device) < lengths[:, None]  # (answers, time)
    # The state at position t predicts the token at t + 1, so no state of the last token is needed.
    ids = torch.cat([prompt_ids, completion_ids[:, :-1]], 1)  # (answers, prompt time + time - 1)
    mask = torch.cat([prompt_mask, completion_mask[:, :-1]], 1)
    positions = position_ids(mask)
    if cache is not None:
        # Only the last prompt token and the completion are left to process.
        ids = ids[:, -time:]
        positions = positions[:, -time:]
    output = model.base_model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    states = output.last_hidden_state[:, -time:]  # (answers, time, width)
    return states[completion_mask], completion_ids[completion_mask]


def compute_in_chunks(
    function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    states: torch.Tensor,  # (tokens, width)
    tokens: torch.Tensor,  # (tokens,)
    vocabulary_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `function` makes of all states and tokens, two tensors of shape (tokens,).

    The logits of all tokens would be by far the largest tensor. So they are computed for a chunk
    of tokens at a time, and once more in the backward pass."""
    chunk_size = max(1, LOGITS_PER_CHUNK // vocabulary_size)
    log_probs = []
    entropies = []
    chunks = zip(states.split(chunk_size), tokens.split(chunk_size), strict=True)
    for states_of_chunk, tokens_of_chunk in chunks:
        results = checkpoint(function, states_of_chunk, tokens_of_chunk, use_reentrant=False)
        log_probs.append(results[0])
        entropies.append(results[1])
    return torch.cat(log_probs), torch.cat(entropies)


class BodyOutput:
    """What a model's head needs of the output of its body: the hidden states, and nothing else."""

    def __init__(self, states: torch.Tensor):
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # for example router logits, which are wanted for other losses


def output_logits(model: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Turns hidden states, (tokens, width), into logits, (tokens, vocabulary), in float32 at least.

    It calls the model's own forward pass, with the model's body replaced by one that returns these
    states. So whatever a model does after its last projection, like Gemma 2's capping, is done."""
    body = model.base_model
    body.forward = lambda *_, inputs_embeds, **__: BodyOutput(inputs_embeds)
    try:
        logits = model(inputs_embeds=states[None]).logits[0]
    finally:
        del body.forward
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
