"""How answers go through a model: the states before their tokens, and logits in chunks."""

import copy

import torch
from torch.utils.checkpoint import checkpoint

from machinery.batches import pad_prompts, positions, read_prefix

HALF = torch.bfloat16  # what mixed precision computes in, and samples from
LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary in one piece: 128 MiB in float32
ANSWERS_PER_PASS = 16  # through the model at once; a micro-batch is sorted by length


def states_before(model, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
    """The states from which the model predicts each token of the answers, (tokens, width), and
    these tokens, (tokens,), answer after answer. Equal prompts are read once."""
    ids, mask, which = pad_prompts([answer.prompt_ids for answer in answers], model.device)
    # With gradient checkpointing layers refuse a cache: every answer reads its prompt itself.
    cache = None if model.is_activation_checkpointing else read_prefix(model, ids, mask)
    states = []
    for start in range(0, len(answers), ANSWERS_PER_PASS):
        own = which[start:start + ANSWERS_PER_PASS]  # prompts
        completions = [each.completion_ids for each in answers[start:start + ANSWERS_PER_PASS]]
        part = copy.copy(cache)  # their keys and values
        if part is not None:
            part.layers = [copy.copy(layer) for layer in cache.layers]
            part.batch_select_indices(own)
        states.append(_one_pass(model, ids[own], mask[own], completions, part))
    return tuple(torch.cat(pieces) for pieces in zip(*states, strict=True))


def _one_pass(model, prompt_ids, prompt_mask, completions: list[list[int]], cache):
    """The same of prompts, (answers, prompt time), that may have been read into the cache, and a
    completion of each."""
    device, time = prompt_ids.device, max(map(len, completions))
    lengths = torch.tensor([len(completion) for completion in completions], device=device)
    completion_mask = torch.arange(time, device=device) < lengths[:, None]  # (answers, time)
    completion_ids = torch.tensor([completion + [0] * (time - len(completion))
                                   for completion in completions], device=device)
    # The state at t predicts the token at t + 1: the last token of all is not read.
    ids = torch.cat([prompt_ids, completion_ids[:, :-1]], 1)  # (answers, prompt time + time - 1)
    mask = torch.cat([prompt_mask, completion_mask[:, :-1]], 1)
    places = positions(mask)
    if cache is not None:
        ids, places = ids[:, -time:], places[:, -time:]
    output = model.base_model(input_ids=ids, attention_mask=mask, position_ids=places,
                              past_key_values=cache, use_cache=cache is not None)
    model.output_class = type(output)  # for `project`
    return output.last_hidden_state[:, -time:][completion_mask], completion_ids[completion_mask]


def in_chunks(log_pi, model, states: torch.Tensor, tokens: torch.Tensor):
    """What `log_pi` makes of all states and tokens. The logits of a chunk are computed again in the
    backward pass: those of all tokens would be by far the largest tensor of all."""
    size = max(1, LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
    chunks = [checkpoint(log_pi, *chunk, use_reentrant=False)
              for chunk in zip(states.split(size), tokens.split(size), strict=True)]
    return tuple(torch.cat(pieces) for pieces in zip(*chunks, strict=True))


def project(model, states: torch.Tensor) -> torch.Tensor:
    """(tokens, width) -> logits, (tokens, vocabulary), in float32 at least. By the model's own
    forward, with its body swapped out: whatever it does after the projection (Gemma 2 caps its
    logits, others scale them) is done here as well."""
    body = model.base_model
    body.forward = lambda *_, inputs_embeds, **__: model.output_class(
        last_hidden_state=inputs_embeds)
    try:
        logits = model(inputs_embeds=states[None]).logits[0]
    finally:
        del body.forward
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
