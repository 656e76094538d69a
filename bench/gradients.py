"""The gradient of a run's batches, and the angle between two of them.

A gradient is kept as a sketch: random signs in 4,096 buckets, which changes a cosine by about 0.02.
Noise must not count as signal, so squared lengths and products are means over pairs of *different*
batches. The 95 % intervals come from leaving out one batch at a time (a jackknife)."""

import math
from collections.abc import Callable
from statistics import pvariance

import torch

BUCKETS = 4096
BATCHES = 32
# The figures of a gradient. Both cosines are with the right gradient, the mean of many batches.
OF_BATCH = "cosine of one batch"
OF_MEAN = "cosine of many batches"
LOST = [None, None]  # a figure of which we only know noise


class Keep:
    """Replaces the optimizer. It keeps each batch's gradient, and no weight moves."""

    def __init__(self, model: torch.nn.Module):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        size = sum(each.numel() for each in self.parameters)
        stream = torch.Generator().manual_seed(0)
        self.buckets = torch.randint(BUCKETS, (size,), generator=stream)
        zeros_and_ones = torch.randint(2, (size,), generator=stream)
        self.signs = 2 * zeros_and_ones.float() - 1
        self.param_groups = [{}]
        self.sketches: list[torch.Tensor] = []

    def step(self) -> None:
        gradients = [each.grad.flatten().float() for each in self.parameters]
        sums = torch.zeros(BUCKETS)
        self.sketches.append(sums.index_add_(0, self.buckets, torch.cat(gradients) * self.signs))


def gradients_of(run, training_step: Callable) -> torch.Tensor:
    """Returns the sketches of batches, (BATCHES, BUCKETS), with 0 where nothing was learned."""
    run.optimizer = Keep(run.model)
    kept = run.optimizer.sketches
    while len(kept) < BATCHES:
        num_kept = len(kept)
        training_step(run)
        if len(kept) == num_kept:
            kept.append(torch.zeros(BUCKETS))
    return torch.stack(kept)


# ---------------------------------------------------------------- signal and noise

def product(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean product over all pairs of different batches."""
    products = a.sum(0) @ b.sum(0) - (a * b).sum()
    num_pairs = len(a) * (len(a) - 1)
    return (products / num_pairs).item()


def cosine_of_mean(gradients: torch.Tensor, right: torch.Tensor) -> float:
    lengths = product(right, right) * product(gradients, gradients)
    return product(gradients, right) / math.sqrt(lengths)


def cosine_of_batch(gradients: torch.Tensor, right: torch.Tensor) -> float:
    lengths = product(right, right) * gradients.square().sum(1).mean().item()
    return product(gradients, right) / math.sqrt(lengths)


def leave_one_out(figure_of: Callable[..., float], *tensors: torch.Tensor) -> list[float]:
    """Returns a figure from all batches, and then from all but each one in turn."""
    values = [figure_of(*tensors)]
    num_batches = len(tensors[0])
    for i in range(num_batches):
        others = torch.arange(num_batches) != i
        values.append(figure_of(*[tensor[others] for tensor in tensors]))
    return values


def half_interval(values: list[float]) -> float:
    """Returns half of the 95 % interval of a figure that `leave_one_out` computed."""
    variance = (len(values) - 2) * pvariance(values[1:])
    return 1.96 * math.sqrt(variance)


def is_lost(gradients: torch.Tensor) -> bool:
    """Whether the interval of the squared length reaches 0."""
    lengths = leave_one_out(product, gradients, gradients)
    return lengths[0] <= half_interval(lengths)


def figures_of(gradients: torch.Tensor, right: torch.Tensor) -> dict[str, list]:
    """Returns {figure: [value, half of its interval]}."""
    found = {}
    for name, figure_of in ((OF_BATCH, cosine_of_batch), (OF_MEAN, cosine_of_mean)):
        if is_lost(gradients) or is_lost(right):
            found[name] = LOST
        else:
            values = leave_one_out(figure_of, gradients, right)
            found[name] = [round(values[0], 4), round(half_interval(values), 4)]
    return found
