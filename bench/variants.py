"""main.py with one thing changed that no key of config.yaml changes; else the same command line.

    .venv/bin/torchrun --nproc-per-node=2 bench/variants.py sgd training.learning_rate=1.0
    .venv/bin/torchrun --nproc-per-node=2 bench/variants.py punished --config recipes/lab.yaml

`sgd`: no moments (nothing is saved, as a checkpoint of main.py holds AdamW's). `rewarded`,
`punished`: only positive, only negative advantages. `behind`: answers are drawn from the model as
it was eight steps ago, `coarse`: from a copy with four bits a weight; and `behind-weighted`,
`coarse-weighted`: the same, with each token weighed by pi over the probability it was drawn with,
as the keys `clip` and `ratio` say. What is evaluated is always the model itself."""

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.batches import measure_in_batches, store_in_answers
from machinery.checkpoints import RunFolder
from machinery.model import frozen_copy

plain = {name: getattr(main, name) for name in (
    "compute_advantages", "evaluate", "learn", "make_sampler", "policy_loss",
    "UpdateStatistics")}


def sgd() -> None:
    torch.optim.AdamW = lambda parameters, lr, **unused: torch.optim.SGD(parameters, lr)
    RunFolder.save = lambda folder, run: None


def only(sign: int) -> None:
    def compute_advantages(group, training, stream):
        counted = plain["compute_advantages"](group, training, stream)
        for answer in counted:
            answer.advantage = sign * max(0.0, sign * answer.advantage)
        return counted

    main.compute_advantages = compute_advantages


def as_it_is(weights: torch.Tensor) -> torch.Tensor:
    return weights


def four_bits(weights: torch.Tensor) -> torch.Tensor:
    """Each row of a matrix, or a vector, in steps of a seventh of its largest entry."""
    step = weights.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    return (weights / step).round() * step


@torch.no_grad()
def fill(sampler, weights: list[torch.Tensor], convert: Callable = as_it_is) -> None:
    for own, value in zip(sampler.parameters(), weights, strict=True):
        own.copy_(convert(value))


def draw_from(convert: Callable = as_it_is, behind: int = 0, weighted: bool = False) -> None:
    """From what `convert` makes of the model as it was so many steps ago."""
    past: deque[list[torch.Tensor]] = deque(maxlen=behind + 1)

    def refresh_sampler(sampler, model):
        past.append([each.detach().clone() for each in model.parameters()])
        fill(sampler, past[0], convert)

    def make_sampler(model, config):
        sampler = frozen_copy(model, lambda each: each.dtype)
        sampler.generation_config = plain["make_sampler"](model, config).generation_config
        refresh_sampler(sampler, model)
        return sampler

    def evaluate(run):
        fill(run.sampler, list(run.model.parameters()))
        groups = plain["evaluate"](run)
        fill(run.sampler, past[0], convert)
        return groups

    def learn(run, answers):
        drawn_with = main.Policy(run.sampler, run.config)
        for batch, log_probs, _ in measure_in_batches(drawn_with, answers, run.config.training):
            store_in_answers(batch, old_log_probs=log_probs)
        return plain["learn"](run, answers)

    def with_ratio(training):
        return training.model_copy(update={"updates_per_batch": 2})

    def policy_loss(token_log_probs, batch, num_answers, num_tokens, training):
        return plain["policy_loss"](
            token_log_probs, batch, num_answers, num_tokens, with_ratio(training))

    def statistics(training):
        return plain["UpdateStatistics"](with_ratio(training))

    main.make_sampler, main.refresh_sampler, main.evaluate = make_sampler, refresh_sampler, evaluate
    if weighted:
        main.learn, main.policy_loss, main.UpdateStatistics = learn, policy_loss, statistics


VARIANTS: dict[str, Callable[[], None]] = {
    "sgd": sgd, "rewarded": lambda: only(1), "punished": lambda: only(-1),
    "behind": lambda: draw_from(behind=8), "coarse": lambda: draw_from(four_bits),
    "behind-weighted": lambda: draw_from(behind=8, weighted=True),
    "coarse-weighted": lambda: draw_from(four_bits, weighted=True)}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        sys.exit(f"error: the first word is one of {', '.join(VARIANTS)}")
    VARIANTS[sys.argv.pop(1)]()
    main.launch(main.main)
