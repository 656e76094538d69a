"""A model is checked before it is trained: does all that makes it fast here leave it as it is?

`Policy` reads padded answers together, and a prompt once for several of them. `generate` continues
from a cache. Where a model is not exact in one of these, a run would learn from wrong numbers, and
nothing would say so. So both are compared with plain forward passes of the sampler: one row at a
time, without padding and without a cache."""

from itertools import cycle, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from machinery.errors import UserError, as_user_error
from machinery.ranks import errors_on_all_ranks
from machinery.sampling import generate

# The mean absolute difference, over 11 to 60 tokens, may be so many nats. In float32 rounding makes
# 1e-7 to 2e-5. In mixed and bfloat16, which keep 8 bits of a number, it makes 0.002 to 0.06.
ALLOWED = {"float32": 1e-3, "mixed": 0.2, "bfloat16": 0.2}
NUM_SAMPLED = 20  # more than the 16 tokens after which `generate` continues from its cache
NO_STOP = [2**31 - 1]  # No token has this id, so all rows stay to the end.


@torch.no_grad()
def check_model(run: Any) -> None:
    """Refuses a model that is not the same in `Policy`, or in `generate`, as by itself. Collective.

    The sampler stands for the model by itself, because it is whole on each rank, also where the
    policy is sharded. In mixed precision it is a copy in bfloat16."""
    name = type(run.model).__name__
    allowed = ALLOWED[run.config.model.precision]
    with errors_on_all_ranks(), as_user_error(f"{name} cannot be trained here"):
        differences = {**compare_policy(run), **compare_sampling(run)}
        for what, difference in differences.items():
            if not difference <= allowed:  # It may be nan.
                raise UserError(
                    f"{name} cannot be trained here: {what} differ from its own forward pass by "
                    f"{difference:.2g} in the mean, and {allowed:.2g} is allowed for rounding "
                    "(docs/running.md#models)")


def compare_policy(run: Any) -> dict[str, float]:
    """Compares log-probabilities and entropies of three answers that differ in length. Two of them
    have the same prompt."""
    text, long, short = text_and_prompts(run)
    stop = run.stop_ids[:1]
    answers = [
        SimpleNamespace(prompt_ids=long, completion_ids=text[len(long):] + stop),
        SimpleNamespace(prompt_ids=long, completion_ids=text[len(long):len(long) + 1] + stop),
        SimpleNamespace(prompt_ids=short, completion_ids=text[len(short):len(short) + 5] + stop),
    ]
    # The sampler may consist of the same modules, so the mode is set before each.
    run.policy.train()  # In train mode a model may add noise.
    log_probs, entropies = run.policy(answers)
    run.sampler.eval()
    own_log_probs = []
    own_entropies = []
    for answer in answers:
        logits = own_logits(run.sampler, answer.prompt_ids, answer.completion_ids)
        of_all = (logits / run.config.sampling.temperature).log_softmax(-1)  # (tokens, vocabulary)
        own_log_probs.append(of_tokens(of_all, answer.completion_ids))
        own_entropies.append(-(of_all.exp() * of_all).sum(-1))
    # Logits that are divided by a low temperature differ by more.
    scale = min(1.0, run.config.sampling.temperature)
    return {
        "log-probabilities": scale * mean_difference(log_probs, torch.cat(own_log_probs)),
        "entropies": scale * mean_difference(entropies, torch.cat(own_entropies)),
    }


def compare_sampling(run: Any) -> dict[str, float]:
    """Samples greedily. Compares log-probabilities in this, and the tokens with the likeliest ones.
    Rounding may choose another token, but only one with nearly the same logit."""
    _, long, short = text_and_prompts(run)
    prompts = [long, short, long]
    num_sampled = min(NUM_SAMPLED, run.config.training.max_new_gen_tokens)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=num_sampled, eos_token_id=NO_STOP, pad_token_id=0)
    logits_of_steps = []  # each (rows, vocabulary)

    # `generate` here returns tokens alone, so a hook notes the logits, once for each token. The
    # prompts are read ahead by the body alone, which the hook does not see.
    def note(module: nn.Module, arguments: tuple, output: Any) -> None:
        logits_of_steps.append(output.logits[:, -1].float())

    hook = run.sampler.register_forward_hook(note)
    completions = generate(run.sampler, prompts, greedy, len(prompts), lambda num_ended: None)
    hook.remove()
    differences = []
    behind_likeliest = []
    rows = torch.stack(logits_of_steps, 1)  # (rows, tokens, vocabulary)
    for prompt, completion, logits in zip(prompts, completions, rows, strict=True):
        own = own_logits(run.sampler, prompt, completion)
        behind_likeliest.append(own.amax(-1) - of_tokens(own, completion))
        differences.append(of_tokens(own.log_softmax(-1) - logits.log_softmax(-1), completion))
    return {
        "log-probabilities while sampling": float(torch.cat(differences).abs().mean()),
        "logits of greedily sampled tokens": float(torch.cat(behind_likeliest).mean()),
    }


def text_and_prompts(run: Any) -> tuple[list[int], list[int], list[int]]:
    """Returns the first 50 tokens of a prompt, or all that it has, and two prompts that these begin
    with: four fifths of them, and their half. A prompt that has not even 10 tokens is repeated."""
    prompt = run.training_questions[0].prompt_ids
    text = list(islice(cycle(prompt), max(10, min(50, len(prompt)))))
    return text, text[:len(text) * 4 // 5], text[:len(text) // 2]


def own_logits(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Returns the logits from which the model predicts each token of one answer."""
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits[len(prompt) - 1:-1]


def of_tokens(values: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Returns the value of each token, (tokens,), from those of the vocabulary at its place."""
    return values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])[:, 0]


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())
