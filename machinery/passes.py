"""What a forward pass of answers is made of: micro-batches, padded rows, and the output layer."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from machinery.ranks import DEVICE, max_over_ranks
from machinery.settings import Config, TrainingSettings

HALF_PRECISION = torch.bfloat16  # Mixed precision computes in this type and samples from it.


class MadeUpAnswer:
    """What a forward pass needs of an answer. It stands in where no model has sampled one."""

    def __init__(self, prompt_ids: Sequence[int] = (0, 0), completion_ids: Sequence[int] = ()):
        self.prompt_ids = list(prompt_ids)
        self.completion_ids = list(completion_ids)
        self.num_tokens = len(completion_ids)
        self.token_advantages = torch.zeros(self.num_tokens)
        self.sampler_log_probs = self.token_advantages
        self.old_log_probs = torch.zeros(self.num_tokens, device=DEVICE)
        self.reference_log_probs = self.old_log_probs


# ---------------------------------------------------------------- micro-batches

def split_into_micro_batches(answers: list, training: TrainingSettings) -> list[list]:
    """Splits answers into batches of similar length, each with as many answers as fit into
    `tokens_per_micro_batch`, padding included. There's at least one batch, because every rank has
    to take part in the backward pass in which gradients are shared.

    With `shard`, gradients are shared in each pass, so all ranks make equally many passes, and this
    is collective."""
    batches: list[list] = []
    batch: list = []
    longest = 0
    for answer in sorted(answers, key=lambda answer: len(answer.completion_ids), reverse=True):
        length = len(answer.prompt_ids) + len(answer.completion_ids)
        longest = max(longest, length)
        if batch and (len(batch) + 1) * longest > training.tokens_per_micro_batch:
            batches.append(batch)
            batch = []
            longest = length
        batch.append(answer)
    batches.append(batch or [MadeUpAnswer()])
    if training.shard:
        most = int(max_over_ranks({"batches": len(batches)})["batches"])
        while len(batches) < most:
            batches.append([MadeUpAnswer()])
    return batches


@torch.no_grad()
def measure_in_batches(
    policy: nn.Module, answers: list, training: TrainingSettings
) -> Iterator[tuple[list, torch.Tensor, torch.Tensor]]:
    """Yields each micro-batch with the log-probabilities and entropies of its tokens, (tokens,),
    under the current weights. Collective if they are sharded."""
    for batch in split_into_micro_batches(answers, training):
        log_probs, entropies = policy(batch)
        yield batch, log_probs, entropies


def store_in_answers(batch: list[Any], **values: torch.Tensor) -> None:
    """Splits a tensor of shape (tokens,) among the answers, and stores the parts under its name."""
    lengths = [len(answer.completion_ids) for answer in batch]
    for name, values_of_tokens in values.items():
        parts = values_of_tokens.detach().split(lengths)
        for answer, part in zip(batch, parts, strict=True):
            setattr(answer, name, part)


# ---------------------------------------------------------------- a forward pass

def pad_right(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows as one tensor, and which of its places aren't padding, both (rows, time).
    There's at least one place: an empty row gets one of padding."""
    ids = pad_sequence([torch.tensor(row or [0]) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    is_token = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), is_token.to(device)


def pad_left(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `pad_right`, with the padding before each row."""
    ids, is_token = pad_right([row[::-1] for row in rows], device)
    return ids.flip(1), is_token.flip(1)


def autocast(config: Config) -> torch.autocast:
    """Within it, models in mixed precision compute in bfloat16."""
    return torch.autocast(DEVICE.type, HALF_PRECISION, enabled=config.model.precision == "mixed")


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def body_of(model: Any) -> Any:
    """Returns the part of the model that its own forward pass calls, before its output layer."""
    body = model.base_model
    if body is model:  # Llama 4 doesn't say which part it is.
        body = model.model
    return getattr(body, "decoder", body)  # OPT calls the decoder within its base model.


class BodyOutput:
    """What a model's head needs of the output of its body: the hidden states, and nothing else."""

    def __init__(self, states: torch.Tensor):
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None  # for example router logits, which only other losses need


def output_logits(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Turns hidden states, (tokens, width), into logits, (tokens, vocabulary).

    It calls the model's own forward pass, with the model's body replaced by one that returns these
    states. So whatever a model does after its last projection, like Gemma 2's capping, gets done.
    """
    body = body_of(model)
    body.forward = lambda *_, inputs_embeds, **__: BodyOutput(inputs_embeds)
    try:
        return model(inputs_embeds=states[None]).logits[0]
    finally:
        del body.forward
