"""A model is checked before it is trained: does all that makes it fast here leave it as it is?

`Policy` reads padded answers together, and a prompt once for several of them. `generate` continues
from a cache. Where a model is not exact in one of these, a run would learn from wrong numbers, and
nothing would say so. So both are compared with plain forward passes of the sampler: one row at a
time, without padding and without a cache."""

from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from machinery.errors import UserError, as_user_error
from machinery.passes import MadeUpAnswer
from machinery.ranks import errors_on_all_ranks
from machinery.sampling import generate
from machinery.settings import Config

# The mean absolute difference, over 11 to 60 tokens, may be so many nats. In float32 rounding makes
# 1e-7 to 2e-5. In mixed and bfloat16, which keep 8 bits of a number, it makes 0.002 to 0.06.
ALLOWED = {"float32": 1e-3, "mixed": 0.2, "bfloat16": 0.2}
NUM_SAMPLED = 20  # more than the 16 tokens after which `generate` continues from its cache
NO_STOP = [2**31 - 1]  # No token has this id, so all rows stay to the end.


@torch.no_grad()
def check_model(
    policy: nn.Module, sampler: Any, prompt: list[int], stop_id: int, config: Config
) -> None:
    """Refuses a model that is not the same in `policy`, or in `generate`, as by itself. Collective.

    The sampler stands for the model by itself, because it is whole on each rank, also where the
    policy is sharded. In mixed precision it is a copy in bfloat16. `prompt` is any prompt."""
    name = type(sampler).__name__
    allowed = ALLOWED[config.model.precision]
    # 50 tokens of a prompt, or all that it has. One that has not even 10 is repeated.
    text = list(islice(cycle(prompt), max(10, min(50, len(prompt)))))
    with errors_on_all_ranks(), as_user_error(f"{name} cannot be trained here"):
        differences = compare_policy(policy, sampler, text, stop_id, config.sampling.temperature)
        num_sampled = min(NUM_SAMPLED, config.training.max_new_gen_tokens)
        differences |= compare_sampling(sampler, text, num_sampled)
        for what, difference in differences.items():
            if not difference <= allowed:  # It may be nan.
                raise UserError(
                    f"{name} cannot be trained here: {what} differ from its own forward pass by "
                    f"{difference:.2g} in the mean, and {allowed:.2g} is allowed for rounding "
                    "(docs/models.md#which-models-work)")


def split_text(text: list[int]) -> tuple[list[int], list[int]]:
    """Returns two prompts of different length that the text begins with."""
    return text[:len(text) * 4 // 5], text[:len(text) // 2]


def compare_policy(
    policy: nn.Module, sampler: Any, text: list[int], stop_id: int, temperature: float
) -> dict[str, float]:
    """Compares log-probabilities of three answers that differ in length. Two of them have the same
    prompt."""
    long, short = split_text(text)
    answers = [
        MadeUpAnswer(long, [*text[len(long):], stop_id]),
        MadeUpAnswer(long, [text[len(long)], stop_id]),
        MadeUpAnswer(short, [*text[len(short):len(short) + 5], stop_id]),
    ]
    # The sampler may consist of the same modules, so the mode is set before each.
    policy.train()  # In train mode a model may add noise.
    log_probs, _ = policy(answers)
    sampler.eval()
    own_log_probs = []
    for answer in answers:
        logits = own_logits(sampler, answer.prompt_ids, answer.completion_ids)
        of_all = (logits / temperature).log_softmax(-1)  # (tokens, vocabulary)
        own_log_probs.append(of_tokens(of_all, answer.completion_ids))
    # Logits that are divided by a low temperature differ by more.
    scale = min(1.0, temperature)
    return {"log-probabilities": scale * mean_difference(log_probs, own_log_probs)}


def compare_sampling(sampler: Any, text: list[int], num_sampled: int) -> dict[str, float]:
    """Samples greedily. Compares log-probabilities in this, and the tokens with the likeliest ones.
    Rounding may choose another token, but only one with nearly the same logit."""
    long, short = split_text(text)
    prompts = [long, short, long]
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=num_sampled, eos_token_id=NO_STOP, pad_token_id=0)
    logits_of_steps = []  # each (rows, vocabulary)

    # `generate` here returns tokens alone, so a hook notes the logits, once for each token. The
    # prompts are processed by the body alone, which the hook does not see.
    def note(module: nn.Module, arguments: tuple, output: Any) -> None:
        logits_of_steps.append(output.logits[:, -1].float())

    hook = sampler.register_forward_hook(note)
    completions = generate(sampler, prompts, greedy, len(prompts), lambda num_ended: None)
    hook.remove()
    logits_while_sampling = torch.stack(logits_of_steps, 1)  # (rows, tokens, vocabulary)
    log_probs = []
    own_log_probs = []
    behind_likeliest = []
    for prompt, completion, logits in zip(prompts, completions, logits_while_sampling, strict=True):
        own = own_logits(sampler, prompt, completion)
        log_probs.append(of_tokens(logits.log_softmax(-1), completion))
        own_log_probs.append(of_tokens(own.log_softmax(-1), completion))
        behind_likeliest.append(own.amax(-1) - of_tokens(own, completion))
    return {
        "log-probabilities while sampling": mean_difference(torch.cat(log_probs), own_log_probs),
        "logits of greedily sampled tokens": float(torch.cat(behind_likeliest).mean()),
    }


def own_logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the logits from which the model predicts each token of one answer."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1:-1]


def of_tokens(values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Returns the value of each token, (tokens,), from those of the vocabulary at its place."""
    return values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


def mean_difference(values: torch.Tensor, own_values: list[torch.Tensor]) -> float:
    return float((values - torch.cat(own_values)).abs().mean())
