"""How answers go through a model: micro-batches, prompts read once for all their answers, states
before their tokens, logits in chunks."""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicLayer

from machinery.ranks import over_ranks

HALF = torch.bfloat16  # what mixed precision computes in, and samples from
LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary in one piece: 128 MiB in float32
ANSWERS_PER_PASS = 16  # through the model at once; a micro-batch is sorted by length
NOTHING = SimpleNamespace(prompt_ids=[0], completion_ids=[0])  # an answer, as small as they come
ROOM = 16  # tokens that a layer of keys and values has place for behind what it holds


def make_micro_batches(answers: list, budget: int) -> list[list]:
    """As many rows together as the budget of padded tokens allows, those of similar length."""
    batches: list[list] = [[]]
    for answer in sorted(answers, key=lambda answer: len(answer.completion_ids), reverse=True):
        longest = max(len(row.prompt_ids + row.completion_ids) for row in [*batches[-1], answer])
        if batches[-1] and (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
        batches[-1].append(answer)
    return batches if answers else []


def in_step(batches: list[list], idle: list, sharded: bool) -> list[list]:
    """Filled up with `idle`: to one, for the backward pass that every rank owes the others; where
    weights are sharded, and so each pass meets them, to as many as any rank has. Collective."""
    most, = over_ranks([len(batches)], dist.ReduceOp.MAX) if sharded else [1]
    return batches + [idle] * (int(most) - len(batches))


def hand_to_answers(batch: list, **values: torch.Tensor) -> None:
    """Gives each answer its own part of (tokens,), under the name that it is passed by."""
    lengths = [len(answer.completion_ids) for answer in batch]
    for name, tokens in values.items():
        for answer, own in zip(batch, tokens.detach().split(lengths), strict=True):
            setattr(answer, name, own)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it is padded. `generate` does the same."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_prompts(prompts: list[list[int]], device: torch.device):
    """Each different prompt once, padded on the left: ids and mask, (different, time), and which
    each prompt is, (prompts,)."""
    different = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    longest = max(2, *map(len, different))  # one token to read ahead, and one to start from
    ids = [[0] * (longest - len(prompt)) + [*prompt] for prompt in different]
    mask = [[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in different]
    which = [different[tuple(prompt)] for prompt in prompts]
    return tuple(torch.tensor(each, device=device) for each in (ids, mask, which))


def read_prefix(model, ids: torch.Tensor, mask: torch.Tensor):
    """Keys and values of every prompt token but the last, with which whoever goes on starts."""
    mask = mask[:, :-1]
    return model.base_model(input_ids=ids[:, :-1], attention_mask=mask,
                            position_ids=positions(mask), use_cache=True).past_key_values


def read_prompts(model, prompts: list[list[int]]):
    """What `generate` goes on from: ids and mask, (prompts, time), and keys and values of all but
    the last token. Equal prompts are read once."""
    ids, mask, which = pad_prompts(prompts, model.device)
    cache = read_prefix(model, ids, mask)
    # Layers with a sliding window stay the library's own.
    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer
                    for layer in cache.layers]
    cache.batch_select_indices(which)
    return ids[which], mask[which], cache


class RoomyLayer(DynamicLayer):
    """Keys and values of a layer, (rows, heads, time, width), with room behind them: the library's
    own copies all it holds to append a token, which takes longer than attending."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys, self.values, self.is_initialized = layer.keys, layer.values, True
        self.roomy = [layer.keys, layer.values]

    def batch_select_indices(self, indices, room: int = ROOM) -> None:
        """Keeps these rows, and makes room behind them."""
        time = self.keys.shape[2]
        self.roomy = [pad(held[indices], (0, 0, 0, room)) for held in (self.keys, self.values)]
        self.keys, self.values = (roomy[:, :, :time] for roomy in self.roomy)

    def update(self, keys, values, *args, **kwargs):
        time = self.keys.shape[2]
        new_time = time + keys.shape[2]
        if new_time > self.roomy[0].shape[2]:
            self.batch_select_indices(slice(None), max(ROOM, new_time - time))
        for roomy, new in zip(self.roomy, (keys, values)):
            roomy[:, :, time:new_time] = new
        self.keys, self.values = (roomy[:, :, :new_time] for roomy in self.roomy)
        return self.keys, self.values


def states_before(model, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
    """The states from which the model predicts each token of the answers, (tokens, width), and
    these tokens, (tokens,), answer after answer. Equal prompts are read once."""
    ids, mask, which = pad_prompts([answer.prompt_ids for answer in answers], model.device)
    # With gradient checkpointing layers refuse a cache: every answer reads its prompt itself.
    # Sharded ones meet the other ranks at each pass: of a micro-batch all make one, and no more.
    once = getattr(model, "is_sharded", False)
    cache = None if once or model.is_activation_checkpointing else read_prefix(model, ids, mask)
    states, at_once = [], len(answers) if once else ANSWERS_PER_PASS
    for start in range(0, len(answers), at_once):
        own = which[start:start + at_once]  # prompts
        completions = [each.completion_ids for each in answers[start:start + at_once]]
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
