"""What runs by default instead of the plain way of main.py: the same numbers, in less time."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from machinery.passes import autocast, output_logits, pad_right
from machinery.prompts import hidden_states

LOGITS_PER_CHUNK = 2**25  # tokens x vocabulary, which take 128 MiB in float32


class FastPolicy(nn.Module):
    """Computes what the plain policy does. But it reads a prompt once for all of its answers (if
    the model can continue from there), and never holds the logits of all tokens at once."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.plain = plain
        vocabulary = plain.model.config.get_text_config().vocab_size
        self.chunk_size = LOGITS_PER_CHUNK // vocabulary  # in tokens

    @property
    def model(self) -> nn.Module:
        return self.plain.model

    def forward(self, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
        # For a prompt p0 p1 p2 and an answer a0 a1 a2:
        #     prefix  p0 p1
        #     inputs        p2 a0 a1
        #     ids           a0 a1 a2    Each is predicted at the input above it.
        # Padding is on the right. An answer without tokens still has one column.
        ids, is_token = pad_right([answer.completion_ids for answer in answers], self.model.device)
        last_of_prompt = ids.new_tensor([answer.prompt_ids[-1:] for answer in answers])
        inputs = torch.cat([last_of_prompt, ids[:, :-1]], 1)  # like ids, (answers, longest answer)
        prefixes = [answer.prompt_ids[:-1] for answer in answers]
        with autocast(self.plain.config):
            states = hidden_states(self.model, prefixes, inputs, is_token)  # (tokens, width)
            return compute_in_chunks(
                self.log_probs_of_chunk, states, ids[is_token], self.chunk_size)

    def log_probs_of_chunk(
        self, states: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.plain.log_probs_of_tokens(output_logits(self.model, states), tokens)


def compute_in_chunks(
    function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    states: torch.Tensor,  # (tokens, width)
    tokens: torch.Tensor,  # (tokens,)
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `function` makes of all states and tokens, two tensors of shape (tokens,).

    The logits of all tokens would be by far the largest tensor, so they're computed for a chunk of
    tokens at a time, and again in the backward pass."""
    log_probs = []
    entropies = []
    chunks = zip(states.split(chunk_size), tokens.split(chunk_size), strict=True)
    for states_of_chunk, tokens_of_chunk in chunks:
        results = checkpoint(function, states_of_chunk, tokens_of_chunk, use_reentrant=False)
        log_probs.append(results[0])
        entropies.append(results[1])
    return torch.cat(log_probs), torch.cat(entropies)
