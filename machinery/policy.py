"""Answers in, log-probabilities of their tokens out; and how a prompt is read once for them all."""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicLayer

from machinery.errors import UserError, blame
from machinery.settings import Config

NOTHING = SimpleNamespace(prompt_ids=[0], completion_ids=[0])  # an answer, as small as they come
HALF = torch.bfloat16  # what mixed precision computes in, and samples from
LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary in one piece: 128 MiB in float32
ROOM = 16  # tokens that a layer of keys and values has place for behind what it holds
ROWS_PER_PASS = 16  # through the model at once; those of a micro-batch are sorted by length


class Policy(nn.Module):
    """The model as the learner sees it. All of it happens inside the module that DDP wraps, since
    gradients of anything computed outside are not shared between ranks."""

    def __init__(self, model, config: Config):
        super().__init__()
        self.model, self.temperature = model, config.sampling.temperature
        self.mixed = config.model.precision == "mixed"

    def forward(self, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each token sampled, (tokens,), answer after answer."""
        device = self.model.device
        ids, mask, which = pad_prompts([answer.prompt_ids for answer in answers], device)
        with torch.autocast(device.type, HALF, enabled=self.mixed):
            # With gradient checkpointing layers refuse a cache: every row reads its prompt itself.
            rereads = self.model.is_activation_checkpointing
            cache = None if rereads else read_prefix(self.model, ids, mask)
            states = []
            for start in range(0, len(answers), ROWS_PER_PASS):
                rows = which[start:start + ROWS_PER_PASS]
                completions = [each.completion_ids for each in answers[start:start + ROWS_PER_PASS]]
                states.append(self.states(ids[rows], mask[rows], completions, cache, rows))
            hidden, targets = (torch.cat(pieces) for pieces in zip(*states))
            # Only these reach the projection to the vocabulary, in chunks whose logits the backward
            # pass computes anew: those of all tokens would be by far the largest tensor of all.
            size = max(1, LOGITS_PER_CHUNK // self.model.config.get_text_config().vocab_size)
            chunks = [checkpoint(self.token_logprobs, *chunk, use_reentrant=False)
                      for chunk in zip(hidden.split(size), targets.split(size))]
            return tuple(torch.cat(pieces) for pieces in zip(*chunks))

    def states(self, prompt_ids, prompt_mask, completions: list[list[int]], cache, rows):
        """Prompts, (rows, prompt time), and their completions -> the state that predicts each token
        of these, (tokens, width), and that token. Masks come from lengths."""
        device, time = prompt_ids.device, max(map(len, completions))
        lengths = torch.tensor([len(completion) for completion in completions], device=device)
        completion_mask = torch.arange(time, device=device) < lengths[:, None]  # (rows, time)
        completion_ids = torch.tensor([completion + [0] * (time - len(completion))
                                       for completion in completions], device=device)
        # The state at t predicts the token at t + 1: the last token of all is not read.
        ids = torch.cat([prompt_ids, completion_ids[:, :-1]], 1)  # (rows, prompt time + time - 1)
        mask = torch.cat([prompt_mask, completion_mask[:, :-1]], 1)
        places = positions(mask)
        if cache is not None:
            ids, places = ids[:, -time:], places[:, -time:]
            cache = copy.copy(cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            cache.batch_select_indices(rows)
        output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=places,
                                       past_key_values=cache, use_cache=cache is not None)
        self.output_class = type(output)
        return output.last_hidden_state[:, -time:][completion_mask], completion_ids[completion_mask]

    def token_logprobs(self, hidden, targets):
        """(tokens, width) and (tokens,) -> log-probability and entropy at the sampling temperature,
        (tokens,) each."""
        # The model's own forward, with its body swapped out: whatever it does after the projection
        # (Gemma 2 caps its logits, others scale them) is done here as well.
        body = self.model.base_model
        body.forward = lambda *_, inputs_embeds, **__: self.output_class(
            last_hidden_state=inputs_embeds)
        try:
            logits = self.model(inputs_embeds=hidden[None]).logits[0]  # (tokens, vocabulary)
        finally:
            del body.forward
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = (logits / self.temperature).log_softmax(-1)
        with torch.no_grad():
            entropies = -logprobs.exp().mul_(logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def warm_up(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two backward passes and one step of nothing. With the second forward pass DDP cuts its
    buckets anew: that changes the last bit of sums, and takes the memory of all gradients once
    more as long as the old ones are held. AdamW's moments come into being at its first step."""
    policy.train()
    with blame("the model cannot learn: see model.attention"):
        for _ in range(2):
            policy.zero_grad(set_to_none=True)
            logprobs, _ = policy([NOTHING])
            logprobs.sum().backward()
            if unused := [name for name, parameter in policy.module.model.named_parameters()
                          if parameter.requires_grad and parameter.grad is None]:
                raise UserError(f"model.name: {len(unused)} of its parameters, like {unused[0]}, "
                                "take no part in an answer, so they cannot learn: take a model of "
                                "text alone, or set model.lora_rank and model.lora_targets")
    policy.zero_grad(set_to_none=False)
    optimizer.step()
    for moments in optimizer.state.values():
        moments["step"].zero_()


def make_micro_batches(answers: list, budget: int) -> list[list]:
    """As many rows together as the budget of padded tokens allows; the longest completions first,
    those of similar length side by side."""
    batches: list[list] = [[]]
    for answer in sorted(answers, key=lambda answer: len(answer.completion_ids), reverse=True):
        longest = max(row.length for row in [*batches[-1], answer])
        if batches[-1] and (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
        batches[-1].append(answer)
    return batches if answers else []


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
    padding = [longest - len(prompt) for prompt in different]
    ids = [[0] * pad + [*prompt] for prompt, pad in zip(different, padding)]
    mask = [[False] * pad + [True] * len(prompt) for prompt, pad in zip(different, padding)]
    which = [different[tuple(prompt)] for prompt in prompts]
    return tuple(torch.tensor(each, device=device) for each in (ids, mask, which))


def read_prefix(model, ids: torch.Tensor, mask: torch.Tensor):
    """Keys and values of every prompt token but the last, with which whoever goes on starts."""
    mask = mask[:, :-1]
    output = model.base_model(input_ids=ids[:, :-1], attention_mask=mask,
                              position_ids=positions(mask), use_cache=True)
    return output.past_key_values


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
        self.roomy = []
        for held in (self.keys[indices], self.values[indices]):
            rows, heads, time, width = held.shape
            self.roomy.append(held.new_empty(rows, heads, time + room, width))
            self.roomy[-1][:, :, :time] = held
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
