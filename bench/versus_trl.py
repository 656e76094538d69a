"""This trainer and TRL's GRPOTrainer do the same steps in turn on the same machine, and the ratio \
of their times is printed pair by pair.

    python3 -m venv bench/.venv && bench/.venv/bin/pip install -r bench/requirements.txt
    .venv/bin/python bench/versus_trl.py --trl-python bench/.venv/bin/python

Both begin every step with the same weights and answer the same questions, with groups, length,
learning rate and loss (dr_grpo, no KL) from config.yaml and the keys given. On CPUs each side runs
in every layout of its cores, and its better one counts."""

import argparse
import json
import statistics
import sys

from sides import Side, layout

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--trl-python", required=True,
                    help="the Python of an environment with bench/requirements.txt")
parser.add_argument("--questions", type=int, default=16, help="per step, over all ranks")
parser.add_argument("--samples", type=int, default=8, help="answers to each")
parser.add_argument("--tokens", type=int, default=192, help="the longest answer")
parser.add_argument("--layouts", nargs="+", type=layout, default=[(1, 2), (2, 1)],
                    help="ranks x threads of each, like 1x2 2x1")
parser.add_argument("--trl-passes", nargs="+", type=int, default=[1, 4],
                    help="micro-batches in which TRL takes a rank's rows")
parser.add_argument("--pairs", type=int, default=10)
parser.add_argument("--warm-up", type=int, default=3)
parser.add_argument("keys", nargs="*", help="section.key=value, for both sides")
options = parser.parse_intermixed_args()

steps = options.warm_up + options.pairs
sides: dict[str, list[Side]] = {"ours": [], "trl": []}
for ranks, threads in options.layouts:
    keys = [f"training.num_samples_per_step={options.questions // ranks}",
            f"training.k_best_of_n=[{options.samples},{options.samples}]",
            f"training.max_new_gen_tokens={options.tokens}", "training.warmup_steps=0",
            *options.keys, f"training.max_steps={steps}"]
    sides["ours"].append(Side(sys.executable, "ours", "steps", 1, ranks, threads, keys))
    for passes in options.trl_passes:
        side = Side(options.trl_python, "trl", "steps", passes, ranks, threads, keys)
        side.name += f", {passes} micro-batch{'es' * (passes > 1)}"
        sides["trl"].append(side)

for i in range(steps):
    for side in (*sides["ours"], *sides["trl"]):
        answer = side.step()
        print(f"{'warm-up' if i < options.warm_up else 'pair'} {i + 1:>2}  {side.name:<40} "
              f"{answer['seconds']:6.3f} s  "
              f"{answer['tokens'] / answer['seconds']:8.0f} tokens/s", flush=True)
best = {name: min(each, key=lambda side: side.median("seconds", options.warm_up))
        for name, each in sides.items()}
print(f"\nthe better layouts: {best['ours'].name}; {best['trl'].name}")
per_step, per_token = [], []
for mine, theirs in list(zip(best["ours"].answers, best["trl"].answers))[options.warm_up:]:
    per_step.append(theirs["seconds"] / mine["seconds"])
    per_token.append(per_step[-1] * mine["tokens"] / theirs["tokens"])
    print(f"{mine['seconds']:6.3f} s and {theirs['seconds']:6.3f} s: {per_step[-1]:5.2f} times "
          f"as fast per step, {per_token[-1]:5.2f} per completion token")
for side in (*sides["ours"], *sides["trl"]):
    side.end()
print(json.dumps({
    "per_step": round(statistics.median(per_step), 3),
    "per_token": round(statistics.median(per_token), 3),
    "seconds": {side.name: round(side.median("seconds", options.warm_up), 3)
                for each in sides.values() for side in each},
    "sample": round(best["ours"].median("sample", options.warm_up), 3),
    "learn": round(best["ours"].median("learn", options.warm_up), 3),
    "questions": options.questions, "samples": options.samples, "tokens": options.tokens,
    "pairs": options.pairs}))
