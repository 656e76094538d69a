"""Checks a model before it's trained: does everything here compute what the model itself computes?

`own_logits` is the model's own forward pass, one answer at a time, without padding or cache, and it
shares no line with main.py. `Policy`, `generate_plain` and `generate_fast` are compared with it;
`FastPolicy`, the policy being trained and the reference are compared with `Policy`. A teacher is
compared with its own forward pass. If any of them were inexact, a run would learn from wrong
numbers, and nothing would say so."""

import inspect
import textwrap
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from machinery.code import MAIN, digest_of
from machinery.errors import UserError, as_user_error
from machinery.fast import FastPolicy
from machinery.passes import MadeUpAnswer
from machinery.ranks import errors_on_all_ranks, tell
from machinery.sampling import generate_fast
from machinery.settings import Config

# The mean absolute difference may be this many nats per token. Rounding causes 1e-7 to 2e-5 in
# float32, and 0.002 to 0.06 in mixed and bfloat16, which keep 8 bits of a number.
ALLOWED = {"float32": 1e-3, "mixed": 0.2, "bfloat16": 0.2}
# Between FastPolicy and Policy, with the same weights and in the same precision.
ALLOWED_FAST = {"float32": 1e-4, "mixed": 0.1, "bfloat16": 0.1}
NUM_SAMPLED = 20  # more than the 16 tokens after which `generate_fast` continues from its cache
NO_STOP = [2**31 - 1]  # No token has this id, so all rows go on to the end.

OF_PLAIN = "log-probabilities of Policy differ from the model's own"
OF_FAST = "log-probabilities of FastPolicy differ from Policy's"
WITH_TEACHER = " with the teacher's weights"  # follows one of these two
NOTED = "log-probabilities recorded by {} differ from the model's own"
SAMPLED = "logits of the tokens that {} sampled greedily differ from the highest logits"

# Digests of the functions of main.py that the fast way was written for. It does the same as the
# first two, so they may not be edited with model.fast=true. It calls the third.
FORWARD, GENERATE, LOG_PROBS = "Policy.forward", "generate_plain", "Policy.log_probs_of_tokens"
AS_WRITTEN = {
    FORWARD: "c5617763",
    GENERATE: "c8366b31",
    LOG_PROBS: "c959cae8",
}


@torch.no_grad()
def check_model(
    plain: nn.Module, policy: nn.Module, reference: nn.Module | None, generate_plain: Callable,
    prompt: list[int], stop_id: int, config: Config,
) -> None:
    """Ends the run if one of the comparisons above fails. Collective.

    `plain` is the sampler's plain policy, which is whole on each rank, even if the policy is
    sharded. In mixed precision it's a copy in bfloat16. `prompt` is any prompt."""
    name = type(plain.model).__name__
    edited = edited_parts(type(plain), generate_plain)
    # 50 tokens of the prompt, or all it has. If it doesn't even have 10, it's repeated.
    text = list(islice(cycle(prompt), max(10, min(50, len(prompt)))))
    hint = " with model.fast=true" if config.model.fast else ""
    with errors_on_all_ranks(), as_user_error(f"{name} cannot be trained here{hint}"):
        follow_edits(edited, config)
        differences = compare_policies(plain, policy, reference, text, stop_id, config)
        differences |= compare_sampling(generate_plain, plain, text, config)
        if config.model.fast:
            differences |= compare_sampling(generate_fast, plain, text, config)
        for what, (difference, allowed) in differences.items():
            if difference <= allowed:  # It may be nan.
                continue
            line = (f"{what} by {difference:.2g} nats per token on average, but only "
                    f"{allowed:.2g} is allowed for rounding")
            causes = [part for part in edited if what in explained_by(part)]
            if causes and not config.model.fast:
                tell(line)
            elif causes:
                raise UserError(f"{line}: you have edited {' and '.join(causes)} in main.py. If "
                                "the difference is intended, set model.fast=false")
            else:
                raise UserError(f"{name} cannot be trained here{hint}: {line} "
                                "(docs/models.md#which-models-work)")


# ---------------------------------------------------------------- edits of main.py

def digest_of_function(function: Callable) -> str:
    """Returns a digest of what its code means."""
    return digest_of({MAIN: textwrap.dedent(inspect.getsource(function))})


def edited_parts(policy_class: type, generate_plain: Callable) -> list[str]:
    digests = {
        FORWARD: digest_of_function(policy_class.forward),
        GENERATE: digest_of_function(generate_plain),
        LOG_PROBS: digest_of_function(policy_class.log_probs_of_tokens),
    }
    return [name for name, digest in digests.items() if digest != AS_WRITTEN[name]]


def explained_by(part: str) -> list[str]:
    """Returns the comparisons that an edit of this part may spoil. It excuses no other."""
    if part == GENERATE:
        return [NOTED.format("generate_plain"), SAMPLED.format("generate_plain")]
    return [OF_PLAIN, OF_FAST, OF_PLAIN + WITH_TEACHER, OF_FAST + WITH_TEACHER]


def follow_edits(edited: list[str], config: Config) -> None:
    """Refuses an edit that the fast way would ignore."""
    if not config.model.fast:
        for name in edited:
            tell(f"{name} in main.py has been edited, and this run uses the edited version")
    else:
        for name in edited:
            if name != LOG_PROBS:
                raise UserError(f"{name} in main.py has been edited, but the faster code that runs "
                                "by default ignores the edit: set model.fast=false to run main.py "
                                "as you have edited it")


# ---------------------------------------------------------------- log-probabilities

def compare_policies(
    plain: nn.Module, policy: nn.Module, reference: nn.Module | None, text: list[int], stop_id: int,
    config: Config,
) -> dict[str, tuple[float, float]]:
    """Compares the log-probabilities of three answers of different lengths, two of them to the same
    prompt. Returns how far apart they are, and how far apart they may be.

    The reference has the weights of `plain`, unless it's a teacher."""
    long, short = split_text(text)
    answers = [
        MadeUpAnswer(long, [*text[len(long):], stop_id]),
        MadeUpAnswer(long, [text[len(long)], stop_id]),
        MadeUpAnswer(short, [*text[len(short):len(short) + 5], stop_id]),
    ]
    allowed = ALLOWED[config.model.precision]
    temperature = config.sampling.temperature
    # They may share their modules, so the mode is set before each.
    plain.eval()
    found = compare_with_own(plain, answers, config)
    of_plain, _, _ = found[OF_PLAIN]
    policy.train()  # In train mode a model may add noise.
    of_policy, _ = policy(answers)
    found["log-probabilities computed while learning differ from the sampler's"] = (
        of_policy, of_plain, allowed)
    if config.training.teacher is not None:
        teacher = reference.plain if config.model.fast else reference
        with as_user_error(f"training.teacher={config.training.teacher!r} cannot be used here"):
            of_teacher = compare_with_own(teacher, answers, config)
        for what, values in of_teacher.items():
            found[what + WITH_TEACHER] = values
    elif reference is not None:
        of_reference, _ = reference(answers)
        found["log-probabilities of the reference model differ from the sampler's"] = (
            of_reference, of_plain, allowed)
    # Dividing logits by a low temperature makes their differences larger.
    scale = min(1.0, temperature)
    return {what: (scale * mean_difference(one, other), most)
            for what, (one, other, most) in found.items()}


def compare_with_own(
    plain: nn.Module, answers: list, config: Config
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Returns, for each comparison, both log-probabilities of each token and how far apart they may
    be."""
    of_model = own_log_probs(plain.model, answers, config.sampling.temperature)
    of_plain, _ = plain(answers)
    found = {OF_PLAIN: (of_plain, of_model, ALLOWED[config.model.precision])}
    if config.model.fast:
        of_fast, _ = FastPolicy(plain)(answers)
        found[OF_FAST] = (of_fast, of_plain, ALLOWED_FAST[config.model.precision])
    return found


def split_text(text: list[int]) -> tuple[list[int], list[int]]:
    """Returns two prompts of different lengths, both of them beginnings of the text."""
    return text[:len(text) * 4 // 5], text[:len(text) // 2]


def own_log_probs(model: Any, answers: list, temperature: float) -> torch.Tensor:
    """Returns the log-probability of each token of each answer, (tokens,)."""
    found = []
    for answer in answers:
        logits = own_logits(model, answer.prompt_ids, answer.completion_ids) / temperature
        found.append(of_tokens(logits.log_softmax(-1), answer.completion_ids))
    return torch.cat(found)


def own_logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the logits from which the model predicts each token of one answer."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1:-1]


def of_tokens(values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Returns the value of each token, (tokens,), from the values of the vocabulary at its place.
    """
    return values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


# ---------------------------------------------------------------- sampling

def compare_sampling(
    generate: Callable, plain: nn.Module, text: list[int], config: Config
) -> dict[str, tuple[float, float]]:
    """Samples the likeliest tokens. Compares the log-probabilities noted for them with the model's
    own, and their logits with the highest. Rounding may lead to a different token, but only to one
    with nearly the same logit."""
    long, short = split_text(text)
    prompts = [long, short, long]
    temperature = config.sampling.temperature
    greedy = GenerationConfig(
        do_sample=True, top_k=1, top_p=1.0, temperature=temperature, eos_token_id=NO_STOP,
        pad_token_id=0, max_new_tokens=min(NUM_SAMPLED, config.training.max_new_gen_tokens))
    completions = generate(plain.model, prompts, greedy, lambda num_ended: None)
    noted = []
    own = []
    behind_likeliest = []
    for prompt, (tokens, log_probs) in zip(prompts, completions, strict=True):
        logits = own_logits(plain.model, prompt, tokens)
        own.append(of_tokens((logits / temperature).log_softmax(-1), tokens).cpu())
        noted.append(torch.tensor(log_probs))
        behind_likeliest.append(logits.amax(-1) - of_tokens(logits, tokens))
    allowed = ALLOWED[config.model.precision]
    scale = min(1.0, temperature)
    return {
        NOTED.format(generate.__name__): (
            scale * mean_difference(torch.cat(noted), torch.cat(own)), allowed),
        SAMPLED.format(generate.__name__): (float(torch.cat(behind_likeliest).mean()), allowed),
    }
