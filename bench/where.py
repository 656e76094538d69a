"""Where the time of a run on a CPU goes, and what the matrix products of each part take alone.

    .venv/bin/torchrun --nproc-per-node=2 bench/where.py run.dir=/tmp/where training.max_steps=10

It expects one update per step and no gradient checkpointing, as with the default settings.
"""

import time
from collections import Counter

from harness import dist, main, say, torch
from torch.utils.benchmark import Timer

from machinery import prompts, ranks, sampling

# Where a function stands, its name there, and the part of the table that it is.
TIMED = [
    (main, "prepare", "start"),
    (main, "rollout", "sampling"),
    (main, "learn", "learning"),
    (main, "evaluate", "evaluation"),
    (main, "save", "saving"),
    (main.RunFolder, "save_model", "saving"),
    (main, "generate", "between passes"),
    (sampling, "read_prompts", "reading prompts"),
    (prompts, "read_prompts", "reading prompts"),
    (torch.nn.functional, "scaled_dot_product_attention", "attention"),
    (sampling.RoomyLayer, "update", "cache"),
    (torch.optim.AdamW, "step", "AdamW"),
    (main, "policy_gradient", "loss and norm"),
    (torch.Tensor, "backward", "backward"),
]
seconds: Counter = Counter()   # {part: without the parts within it}
products: Counter = Counter()  # {(part, rows, in, out): how many matrix products}
running: list[list] = []       # [name, seconds of the parts within it], the outermost first


def part() -> str:
    """What's running now: the outermost part, and the innermost. All that runs while
    prompts are read counts as reading prompts."""
    names = [name for name, _ in running]
    innermost = "reading prompts" if "reading prompts" in names else names[-1]
    return f"{names[0]}: {innermost}"


def timed(where, attribute: str, name: str) -> None:
    own = getattr(where, attribute)

    def function(*arguments, **named):
        running.append([name, 0.0])
        current = part()
        started = time.perf_counter()
        result = own(*arguments, **named)
        spent = time.perf_counter() - started
        _, spent_within = running.pop()
        seconds[current] += spent - spent_within
        if running:
            running[-1][1] += spent
        return result

    setattr(where, attribute, function)


def multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if running:
        width_in = x.shape[-1]
        rows = x.numel() // width_in
        products[part(), rows, width_in, len(layer.weight)] += 1
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def alone(statement: str, **values) -> float:
    """The seconds that a statement takes alone."""
    return Timer(statement, globals=values, num_threads=torch.get_num_threads()).timeit(2).mean


def seconds_alone(run) -> Counter:
    """What the counted products take alone, and what backward passes and AdamW do besides."""
    limits = Counter()
    for (name, rows, width_in, width_out), count in products.items():
        # Enough weights to overflow a cache: 16 MB.
        num_weights = 1 + 4 * 10**6 // (width_in * width_out)
        weights = torch.ones(num_weights, width_out, width_in)
        x = torch.ones(rows, width_in)
        spent = alone("for w in weights: x @ w.T", x=x, weights=weights)
        limits[name] += count * spent / num_weights

    learned = sum(weight.numel() for weight in run.optimizer.param_groups[0]["params"])
    numbers = torch.ones(learned)
    # A backward pass makes two products for each one before it, and shares the gradients.
    forward = sum(limits[name] for name in limits if name.startswith("learning"))
    sharing = alone("dist.all_reduce(numbers)", dist=dist, numbers=numbers)
    limits["learning: backward"] = 2 * forward + run.step * sharing
    # For each weight, AdamW reads or writes seven numbers, and a copy reads or writes two.
    copying = alone("there.copy_(numbers)", there=numbers + 1, numbers=numbers)
    limits["learning: AdamW"] = run.step * copying * 7 / 2
    return limits


def train(run) -> None:
    timed(type(prompts.body_of(run.model)), "forward", "layers")
    timed(run.model.get_output_embeddings(), "forward", "output layer")
    own_train(run)
    limits = seconds_alone(run)
    say(f"{'part':32} seconds   alone   ratio")
    for name, spent in sorted(seconds.items()):
        limit = limits[name]
        ratio = f"{spent / limit:8.1f}" if limit else ""
        say(f"{name:32}{spent:8.1f}{limit:8.1f}{ratio}")


seconds["start: imports"] = time.process_time()  # The clock began before this script did.
own_train = main.train
main.train = train
torch.nn.Linear.forward = multiply
for where, attribute, name in TIMED:
    timed(where, attribute, name)
ranks.launch(main.main)
