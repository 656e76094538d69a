"""Where the time of a run on a CPU goes, and what the matrix products of each part take alone.

    .venv/bin/torchrun --nproc-per-node=2 bench/where.py run.dir=/tmp/where training.max_steps=10
"""

import time
from collections import Counter

from harness import dist, main, say, torch
from torch.utils.benchmark import Timer

from machinery import prompts, ranks, sampling

TIMED = [(main, "prepare", "start"), (main, "rollout", "sampling"), (main, "learn", "learning"),
         (main, "evaluate", "evaluation"), (main, "save", "saving"),
         (main.RunFolder, "save_model", "saving"), (main, "generate", "between passes"),
         (sampling, "read_prompts", "prompts"), (prompts, "read_prompts", "prompts"),
         (torch.nn.functional, "scaled_dot_product_attention", "attention"),
         (sampling.RoomyLayer, "update", "cache"), (torch.optim.AdamW, "step", "AdamW"),
         (main, "policy_gradient", "loss and norm"), (torch.Tensor, "backward", "backward")]
# {part: without the parts within it}
seconds: Counter = Counter({"start: imports": time.process_time()})
products: Counter = Counter()  # {(part, rows, in, out): how many matrix products}
running: list[list] = []       # [name, seconds of the parts within it], the outermost first


def part() -> str:
    names = [name for name, _ in running]
    return f"{names[0]}: {'prompts' if 'prompts' in names else names[-1]}"


def timed(where, attribute: str, name: str) -> None:
    own = getattr(where, attribute)

    def function(*arguments, **named):
        running.append([name, 0.0])
        current = part()
        started = time.perf_counter()
        result = own(*arguments, **named)
        spent = time.perf_counter() - started
        seconds[current] += spent - running.pop()[1]
        if running:
            running[-1][1] += spent
        return result
    setattr(where, attribute, function)


def multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if running:
        products[part(), x.numel() // x.shape[-1], x.shape[-1], len(layer.weight)] += 1
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


def alone(statement: str, **values) -> float:
    return Timer(statement, globals=values, num_threads=torch.get_num_threads()).timeit(2).mean


def train(run) -> None:
    timed(type(prompts.body_of(run.model)), "forward", "layers")
    timed(run.model.get_output_embeddings(), "forward", "head")
    own_train(run)
    limit = Counter()
    for (name, rows, width_in, width_out), count in products.items():
        all_w = torch.ones(1 + 4 * 10**6 // (width_in * width_out), width_out, width_in)  # 16 MB
        spent = alone("for w in all_w: x @ w.T", x=torch.ones(rows, width_in), all_w=all_w)
        limit[name] += count * spent / len(all_w)
    # Backward makes two products for one. AdamW reads or writes seven numbers, and a copy two.
    w = torch.ones(sum(p.numel() for p in run.optimizer.param_groups[0]["params"]))
    forward = sum(limit[name] for name in limit if name.startswith("learning"))
    limit["learning: backward"] = 2 * forward + run.step * alone("d.all_reduce(w)", d=dist, w=w)
    limit["learning: AdamW"] = run.step * 3.5 * alone("x.copy_(y)", x=w, y=w + 1)
    say(f"{'part':32} seconds   alone   ratio")
    for name, spent in sorted(seconds.items()):
        say(f"{name:32}{spent:8.1f}{limit[name]:8.1f}{spent / (limit[name] or torch.nan):8.1f}")


own_train, main.train, torch.nn.Linear.forward = main.train, train, multiply
for where, attribute, name in TIMED:
    timed(where, attribute, name)
ranks.launch(main.main)
