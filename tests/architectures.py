"""Which architectures are right here? Tries tiny random models of all that transformers knows, and
prints what docs/architectures.json says of each.

    .venv/bin/python tests/architectures.py            all of them
    .venv/bin/python tests/architectures.py lfm2 opt   these alone

Each model is saved, loaded as a run loads it, and checked as a run checks it. What is then trained
is compared once more with loops that share no code with the trainer: 40 greedy tokens, and
log-probabilities and gradients in float32. All of this with gradient checkpointing and with LoRA,
too."""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from conftest import make_config, relative_error  # isort: skip  It sets paths.

import torch
from processes import ROOT
from tiny_models import names, tiny_model
from transformers import AutoTokenizer, GenerationConfig

import main
from machinery.check import check_model
from machinery.errors import UserError
from machinery.model import find_stop_ids, load_model, make_sampler
from machinery.prompts import can_branch, keeps_cache
from machinery.ranks import join
from machinery.sampling import generate
from machinery.sharding import Sharded
from machinery.tasks import Question

BOUND = 1e-4
# What is noted while sampling. With padded prompts and a cache, the library's own `generate` of
# these is 0.014 nats off on single tokens, which the check at the start allows in the mean.
INEXACT = {"nemotron_h": 0.02}
NUM_GREEDY = 40
TEMPERATURE = 0.7
NO_STOP = [10**6]  # Answers do not end, so all 40 tokens are compared.
LONG = [36, 80, 78, 67, 74, 79, 70, 222, 85]
PROMPTS = [LONG, [73, 70, 5], LONG]


@dataclass
class Finding:
    name: str
    refusal: str = ""  # the line with which a run ends
    notes: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        found = []
        for what, value in self.differences.items():
            is_noted = what.endswith("noted log-probabilities")
            if not value <= (INEXACT.get(self.name, BOUND) if is_noted else BOUND):
                found.append(what)
        return found


def examine(name: str, folder: Path) -> Finding:
    """Tries a model as it is, with gradient checkpointing, and with LoRA."""
    finding = Finding(name)
    save_with_tokenizer(tiny_model(name), folder)
    try:
        run = begin(folder)
    except UserError as error:
        finding.refusal = str(error)
        return finding
    if not (keeps_cache(run.model) and can_branch(run.model)):
        finding.notes.append("each answer processes its prompt itself")
    finding.differences = compare(run, "")
    if run.model.supports_gradient_checkpointing:
        run.model.activation_checkpointing_enable()
        finding.differences |= compare_learning(run, "checkpointing: ")
    adapted = begin_with_adapters(finding, folder)
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    finding.differences |= compare(adapted, "LoRA: ")
    return finding


class Unwrapped(torch.nn.Module):
    """Stands in for DistributedDataParallel, which wants every weight to get a gradient."""

    def __init__(self, policy: torch.nn.Module):
        super().__init__()
        self.module = policy
        self.forward = policy.forward


def save_with_tokenizer(model, folder: Path) -> None:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "tiny" / "model").save_pretrained(folder)


def begin(folder: Path, **overrides) -> SimpleNamespace:
    """Loads and checks a model as `prepare` does. Returns what that needs of a run."""
    config = make_config(**{"model__name": str(folder), "model__precision": "float32",
                            "sampling__temperature": TEMPERATURE, **overrides})
    model, tokenizer = load_model(config)
    sampler = make_sampler(model, config)
    policy = main.Policy(model, config)
    policy = Sharded(policy) if config.training.shard else Unwrapped(policy)
    check_model(main.Policy(sampler, config), policy, None, LONG,
                find_stop_ids(model, tokenizer)[0], config)
    return SimpleNamespace(config=config, model=model, policy=policy, sampler=sampler)


def begin_with_adapters(finding: Finding, folder: Path) -> SimpleNamespace:
    try:
        return begin(folder, model__lora_rank=4)
    except UserError as error:
        assert "model.lora_targets" in str(error), error
        finding.notes.append("LoRA needs model.lora_targets")
        targets = ["in_proj"] if "mamba" in finding.name else ["q_proj", "v_proj"]
        return begin(folder, model__lora_rank=4, model__lora_targets=targets)


def compare(run, label: str) -> dict[str, float]:
    differences = {**compare_sampling(run, label), **compare_learning(run, label)}
    if max(differences.values()) > BOUND:
        # In float64 rounding is gone, and a fault is not.
        run.model.set_experts_implementation("eager")  # The fused ones do not know float64.
        run.model.double()
        differences = {**compare_sampling(run, label), **compare_learning(run, label)}
    return differences


def compare_sampling(run, label: str) -> dict[str, float]:
    """How far the logits of sampled tokens are from the highest, by full passes of single rows."""
    greedy = GenerationConfig(do_sample=True, top_k=1, top_p=1.0, temperature=TEMPERATURE,
                              max_new_tokens=NUM_GREEDY, eos_token_id=NO_STOP, pad_token_id=0)
    completions = generate(run.sampler, PROMPTS, greedy, lambda num_ended: None)
    farthest = farthest_noted = 0.0
    run.model.eval()
    for prompt, (completion, log_probs) in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            logits = run.model(torch.tensor([prompt + completion]), use_cache=False).logits[0]
        for t, (token, noted) in enumerate(zip(completion, log_probs, strict=True)):
            of_token = logits[len(prompt) - 1 + t]
            farthest = max(farthest, float(of_token.max() - of_token[token]))
            log_prob = (of_token / TEMPERATURE).log_softmax(-1)[token]
            farthest_noted = max(farthest_noted, abs(noted - float(log_prob)))
    return {f"{label}sampled tokens": farthest, f"{label}noted log-probabilities": farthest_noted}


def compare_learning(run, label: str) -> dict[str, float]:
    """Compares log-probabilities, and the gradient of a weighted sum of them."""
    answers = []
    for i, length in enumerate((7, 1, 12, 4, 9)):
        completion = [(11 * i + 7 * t) % 250 + 3 for t in range(length)]
        answers.append(main.Trajectory(Question({}, PROMPTS[i % 3]), completion, "", False))
    num_tokens = sum(answer.num_tokens for answer in answers)
    weights = torch.linspace(-1, 1, num_tokens)

    run.model.train()
    run.model.zero_grad()
    log_probs, _ = run.policy(answers)
    (weights * log_probs).sum().backward()
    own_gradient = learned_gradient(run.model)

    run.model.eval()
    run.model.zero_grad()
    plain = plain_log_probs(run.model, answers)
    (weights * plain).sum().backward()
    differences = (log_probs - plain).detach().abs()
    return {
        f"{label}log-probabilities": differences.max().item(),
        f"{label}gradient": relative_error(own_gradient, learned_gradient(run.model)),
    }


def plain_log_probs(model, answers: list) -> torch.Tensor:
    """One answer at a time, by the model's own forward pass without padding."""
    values = []
    for answer in answers:
        logits = model(torch.tensor([answer.prompt_ids + answer.completion_ids])).logits[0]
        for t, token in enumerate(answer.completion_ids):
            of_token = logits[len(answer.prompt_ids) + t - 1] / TEMPERATURE
            values.append(of_token[token] - of_token.logsumexp(-1))
    return torch.stack(values)


def learned_gradient(model) -> torch.Tensor:
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients.append(parameter.grad.flatten())
    return torch.cat(gradients)


def main_program() -> int:
    join()
    num_wrong = 0
    for name in sys.argv[1:] or names():
        with tempfile.TemporaryDirectory() as folder:
            finding = examine(name, Path(folder))
        verdict = finding.refusal or ", ".join(finding.wrong or ["right", *finding.notes])
        print(f"{name}: {verdict}", flush=True)
        num_wrong += bool(finding.wrong)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main_program())
