"""Checks a model before it's trained: does everything here compute what the model itself computes?

`own_logits` is the model's own forward pass, one answer at a time, without padding or cache, and it
shares no line with what it checks: `Policy` of main.py, and `generate`. If one of them were
inexact, a run would learn from wrong numbers, and nothing would say so."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from machinery.errors import UserError, as_user_error
from machinery.passes import MadeUpAnswer
from machinery.ranks import errors_on_all_ranks, tell
from machinery.sampling import generate
from machinery.settings import Config

# The mean absolute difference may be this many nats per token. Rounding causes 1e-7 to 2e-5 in
# float32, and 0.002 to 0.06 in mixed and bfloat16, which keep 8 bits of a number.
ALLOWED = {"float32": 1e-3, "mixed": 0.2, "bfloat16": 0.2}
NUM_SAMPLED = 20  # more than the 16 tokens after which `generate` continues from its cache
NO_STOP = [2**31 - 1]  # No token has this id, so all rows go on to the end.


@dataclass
class Comparison:
    """Two values of each token, both (tokens,), that should be equal but for rounding."""

    what: str
    one: torch.Tensor
    other: torch.Tensor
    precision: str  # says how much rounding is allowed
    may_be_meant: bool  # An edit of main.py may be the cause.


@torch.no_grad()
def check_model(
    sampled: nn.Module, policy: nn.Module, reference: nn.Module | None, prompt: list[int],
    stop_id: int, config: Config,
) -> None:
    """Ends the run if log-probabilities of `Policy` or `generate`, at the sampling temperature,
    differ from the model's own by more than rounding. With model.check=warn it only says so, unless
    it's about `generate`. Collective.

    `sampled` is a Policy of the sampler, which is whole on each rank, even if `policy` is sharded.
    In mixed precision it's a copy in bfloat16. `prompt` is any prompt."""
    name = type(sampled.model).__name__
    # 50 tokens of the prompt, or all it has. If it doesn't even have 10, it's repeated.
    text = list(islice(cycle(prompt), max(10, min(50, len(prompt)))))
    # Dividing logits by a low temperature makes their differences larger.
    scale = min(1.0, config.sampling.temperature)
    with errors_on_all_ranks(), as_user_error(f"{name} cannot be trained here"):
        for compared in comparisons(sampled, policy, reference, text, stop_id, config):
            difference = scale * float((compared.one - compared.other).abs().mean())
            allowed = ALLOWED[compared.precision]
            if difference <= allowed:  # It may be nan.
                continue
            line = (f"{compared.what} by {difference:.2g} nats per token on average, but only "
                    f"{allowed:.2g} is allowed for rounding")
            if not compared.may_be_meant:
                raise UserError(f"{name} cannot be trained here: {line} "
                                "(docs/run.md#which-models-work)")
            if config.model.check == "refuse":
                raise UserError(f"{name} cannot be trained here: {line} "
                                "(docs/run.md#which-models-work). If you have edited main.py "
                                "and this is intended, set model.check=warn")
            tell(f"{line}. Because of model.check=warn, the run goes on")


def comparisons(
    sampled: nn.Module, policy: nn.Module, reference: nn.Module | None, text: list[int],
    stop_id: int, config: Config,
) -> Iterator[Comparison]:
    """Yields what is compared, for three answers of different lengths, two of them to the same
    prompt."""
    long, short = split_text(text)
    answers = [
        MadeUpAnswer(long, [*text[len(long):], stop_id]),
        MadeUpAnswer(long, [text[len(long)], stop_id]),
        MadeUpAnswer(short, [*text[len(short):len(short) + 5], stop_id]),
    ]
    precision = config.model.precision
    # This is collective if weights are sharded, so it comes before anything that may end the run on
    # one rank. Both may share their modules, so the mode is set before each.
    policy.train()  # In train mode a model may add noise.
    of_policy, _ = policy(answers)
    sampled.eval()
    of_sampled, _ = sampled(answers)
    yield from with_own(sampled, answers, "", precision)
    yield from of_generate(sampled, text, precision)
    if precision != "float32" and can_be_exact(policy.module.model, config):
        # Rounding hides small faults, so compare once more without it.
        exact = exact_policy(policy.module, config)
        yield from with_own(exact, answers, " in float32", "float32")
        yield from of_generate(exact, text, "float32")
    yield Comparison("log-probabilities computed while learning differ from the sampler's",
                     of_policy, of_sampled, precision, may_be_meant=True)
    if config.training.teacher is not None:
        with as_user_error(f"training.teacher={config.training.teacher!r} cannot be used here"):
            yield from with_own(reference, answers, " with the teacher's weights", precision)
    elif reference is not None:
        of_reference, _ = reference(answers)
        yield Comparison("log-probabilities of the reference model differ from the sampler's",
                         of_reference, of_sampled, precision, may_be_meant=True)


def split_text(text: list[int]) -> tuple[list[int], list[int]]:
    """Returns two prompts of different lengths, both of them beginnings of the text."""
    return text[:len(text) * 4 // 5], text[:len(text) // 2]


def can_be_exact(model: Any, config: Config) -> bool:
    """Whether the model can compute in float32: it holds all weights in it, and whole, and no
    kernel for attention refuses it."""
    weights = list(model.parameters())
    is_whole = not any(isinstance(weight, DTensor) for weight in weights)
    is_float32 = all(weight.dtype == torch.float32 for weight in weights)
    return is_whole and is_float32 and config.model.attention in (None, "sdpa", "eager")


def exact_policy(policy: nn.Module, config: Config) -> nn.Module:
    """Returns the policy as it is in float32, without autocast. It shares its weights."""
    in_float32 = config.model.model_copy(update={"precision": "float32"})
    model = copy.copy(policy.model)
    model.generation_config = GenerationConfig()  # as in a sampler
    return type(policy)(model, config.model_copy(update={"model": in_float32})).eval()


# ---------------------------------------------------------------- log-probabilities

def with_own(
    policy: nn.Module, answers: list, where: str, precision: str
) -> Iterator[Comparison]:
    """Compares the log-probabilities of a Policy with its model's own."""
    own = []
    for answer in answers:
        logits = own_logits(policy.model, answer.prompt_ids, answer.completion_ids)
        logits = logits / policy.config.sampling.temperature
        own.append(of_tokens(logits.log_softmax(-1), answer.completion_ids))
    of_policy, _ = policy(answers)
    yield Comparison(f"log-probabilities of Policy differ from the model's own{where}",
                     of_policy, torch.cat(own), precision, may_be_meant=True)


def own_logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the logits from which the model predicts each token of one answer."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1:-1]


def of_tokens(values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Returns the value of each token, (tokens,), from the values of the vocabulary at its place.
    """
    return values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


# ---------------------------------------------------------------- sampling

def of_generate(policy: nn.Module, text: list[int], precision: str) -> Iterator[Comparison]:
    """Samples the likeliest tokens. Compares the log-probabilities noted for them with the model's
    own, and their logits with the highest. Rounding may lead to a different token, but only to one
    with nearly the same logit."""
    long, short = split_text(text)
    # Both begin alike, and `read_prompts` could share that. So one of them begins a token later.
    prompts = [long, short[1:], long]
    temperature = policy.config.sampling.temperature
    most = policy.config.training.max_new_gen_tokens
    greedy = GenerationConfig(
        do_sample=True, top_k=1, top_p=1.0, temperature=temperature, eos_token_id=NO_STOP,
        pad_token_id=0, max_new_tokens=min(NUM_SAMPLED, most))
    completions = generate(policy.model, prompts, greedy, lambda num_ended: None)
    noted = []
    own = []
    of_sampled = []
    highest = []
    for prompt, (tokens, log_probs) in zip(prompts, completions, strict=True):
        logits = own_logits(policy.model, prompt, tokens) / temperature
        own.append(of_tokens(logits.log_softmax(-1), tokens).cpu())
        noted.append(torch.tensor(log_probs))
        of_sampled.append(of_tokens(logits, tokens))
        highest.append(logits.amax(-1))
    yield Comparison("log-probabilities noted by generate differ from the model's own",
                     torch.cat(noted), torch.cat(own), precision, may_be_meant=False)
    yield Comparison(
        "logits of the tokens that generate sampled greedily differ from the highest logits",
        torch.cat(of_sampled), torch.cat(highest), precision, may_be_meant=False)
