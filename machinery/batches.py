"""Micro-batches of answers, and the passes that keep ranks together when one has fewer of them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from machinery.ranks import max_over_ranks
from machinery.settings import TrainingSettings

MOST_TOKENS = 8192  # of a micro-batch, if the settings leave its size open
# The smallest possible answer. It stands in where a rank has none.
DUMMY_ANSWER = SimpleNamespace(prompt_ids=[0], completion_ids=[0])


def make_micro_batches(answers: list, max_tokens: int) -> list[list]:
    """Splits the answers into batches of similar length. A batch has as many answers as fit into
    `max_tokens`, padding included."""
    batches = []
    batch = []
    longest = 0
    by_length = sorted(answers, key=lambda answer: len(answer.completion_ids), reverse=True)
    for answer in by_length:
        length = len(answer.prompt_ids) + len(answer.completion_ids)
        if batch and (len(batch) + 1) * max(longest, length) > max_tokens:
            batches.append(batch)
            batch = []
            longest = 0
        batch.append(answer)
        longest = max(longest, length)
    if batch:
        batches.append(batch)
    return batches


def batches_in_step(answers: list, training: TrainingSettings) -> tuple[list[list], int]:
    """Returns this rank's micro-batches, and how many idle passes it has to add to those over them.

    Every rank has to take part in the one backward pass in which gradients are shared. With sharded
    weights every pass gathers weights from all ranks, so all make equally many passes. The ranks
    agree on that here, before the first pass. Collective."""
    batches = make_micro_batches(answers, training.tokens_per_micro_batch or MOST_TOKENS)
    most = 1
    if training.shard:
        most = int(max_over_ranks({"batches": len(batches)})["batches"])
    return batches, max(0, most - len(batches))


def backward_idly(policy: nn.Module, num_passes: int) -> None:
    """Makes the backward passes that this rank owes the others. Their gradient is 0. Collective."""
    for _ in range(num_passes):
        token_log_probs, _ = policy([DUMMY_ANSWER])
        (0 * token_log_probs.sum()).backward()


@torch.no_grad()
def measure_in_batches(
    policy: nn.Module, answers: list, training: TrainingSettings
) -> Iterator[tuple[list, torch.Tensor, torch.Tensor]]:
    """Yields each micro-batch, and log-probabilities and entropies of its tokens, (tokens,), with
    the weights as they are now. Collective if they are sharded."""
    batches, num_idle = batches_in_step(answers, training)
    for batch in batches:
        token_log_probs, entropies = policy(batch)
        yield batch, token_log_probs, entropies
    for _ in range(num_idle):
        policy([DUMMY_ANSWER])


def store_in_answers(batch: list[Any], **values: torch.Tensor) -> None:
    """Splits a tensor of shape (tokens,) among the answers, and stores it under its name."""
    lengths = [len(answer.completion_ids) for answer in batch]
    for name, values_of_tokens in values.items():
        parts = values_of_tokens.detach().split(lengths)
        for answer, part in zip(batch, parts, strict=True):
            setattr(answer, name, part)
