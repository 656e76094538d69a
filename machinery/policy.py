"""The forward pass of answers: hidden states before their tokens, and logits in chunks."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from machinery.prompts import (
    body_of,
    has_running_state,
    keep_rows,
    pad_prompts,
    position_ids,
    prefill,
)

HALF_PRECISION = torch.bfloat16  # Mixed precision computes in this type, and samples from it.
LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary, which are 128 MiB in float32
ANSWERS_PER_PASS = 16  # A micro-batch is sorted by length, so few together have little padding.


def states_before_tokens(
    model: nn.Module, answers: list, one_pass: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the hidden states from which the model predicts each token of the answers, (tokens,
    width), and these tokens, (tokens,), one answer after the other.

    A prompt with several answers is processed once, if the model can go back to its end for each of
    them. With `one_pass` all answers go through the model together, each with its own prompt:
    sharded weights are gathered anew in each pass."""
    if one_pass:
        return read_with_prompts(model, answers)
    parts = []
    for start in range(0, len(answers), ANSWERS_PER_PASS):
        parts.append(answers[start:start + ANSWERS_PER_PASS])
    # With gradient checkpointing transformers turns the cache off.
    if model.is_activation_checkpointing or has_running_state(model):
        results = [read_with_prompts(model, part) for part in parts]
    else:
        results = continue_prompts(model, parts)
    states, tokens = zip(*results, strict=True)
    return torch.cat(states), torch.cat(tokens)


def read_with_prompts(
    model: nn.Module, answers: list
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `states_before_tokens` does. Each answer stands in a row behind its prompt.

    Rows are padded on the right. There padding can reach no token of a causal model."""
    # The state at position t predicts the token at t + 1, so the last token is not read.
    rows = [[*answer.prompt_ids, *answer.completion_ids[:-1]] for answer in answers]
    ids, mask = pad_right(rows, model.device)  # (answers, time)
    output = body_of(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    states = []
    tokens = []
    for row, answer in enumerate(answers):
        first = len(answer.prompt_ids) - 1
        states.append(output.last_hidden_state[row, first:len(rows[row])])
        tokens += answer.completion_ids
    return torch.cat(states), ids.new_tensor(tokens)


def continue_prompts(
    model: nn.Module, parts: list[list]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns what `states_before_tokens` does, for each part of the answers. Each part is a pass
    that goes on from the KV cache of its prompts."""
    prompts = [answer.prompt_ids for part in parts for answer in part]
    prompt_ids, prompt_mask, which = pad_prompts(prompts, model.device)
    cache = prefill(model, prompt_ids, prompt_mask)  # of all tokens of the prompts but the last
    results = []
    for part, rows in zip(parts, which.split(ANSWERS_PER_PASS), strict=True):
        completions = [answer.completion_ids for answer in part]
        tokens, is_token = pad_right(completions, model.device)  # (answers, time)
        mask = torch.cat([prompt_mask[rows], is_token[:, :-1]], 1)
        time = tokens.shape[1]
        # The last token of the prompt predicts the first of the answer, and so on.
        ids = torch.cat([prompt_ids[rows, -1:], tokens[:, :-1]], 1)  # (answers, time)
        output = body_of(model)(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask)[:, -time:],
            past_key_values=select_rows(cache, rows),
            use_cache=True,
        )
        results.append((output.last_hidden_state[is_token], tokens[is_token]))
    return results


def select_rows(cache: Cache, rows: torch.Tensor) -> Cache:
    """Returns a copy of the cache that holds these rows. The original stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    keep_rows(selected, rows)
    return selected


def pad_right(
    rows: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows as one tensor, and which of its places are no padding, both (rows, time)."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    time = int(lengths.max())
    padded = [row + [0] * (time - len(row)) for row in rows]
    return (
        torch.tensor(padded, device=device),
        torch.arange(time, device=device) < lengths[:, None],
    )


def compute_in_chunks(
    function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    states: torch.Tensor,  # (tokens, width)
    tokens: torch.Tensor,  # (tokens,)
    model: nn.Module,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `function` makes of all states and tokens, two tensors of shape (tokens,).

    The logits of all tokens would be by far the largest tensor. So they are computed for a chunk
    of tokens at a time, and once more in the backward pass."""
    vocabulary_size = model.config.get_text_config().vocab_size
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
    body = body_of(model)
    body.forward = lambda *_, inputs_embeds, **__: BodyOutput(inputs_embeds)
    try:
        logits = model(inputs_embeds=states[None]).logits[0]
    finally:
        del body.forward
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
