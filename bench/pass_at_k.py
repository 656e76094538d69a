"""Does training teach anything new? How many of the held-out questions one of k answers solves, for
models before and after, and by how hard a question is for the first of them.

    .venv/bin/python bench/pass_at_k.py --config recipes/lab.yaml --model before=tiny/lab/model \
            --model after=runs/<name>/best --picture pass_at_k.png

pass@k is the chance that of k answers, drawn from those sampled without putting back, one is right.
How hard a question is, is told by 64 answers of their own, or a question would count as hard for
its bad luck. Intervals are of 95 %, by drawing the questions anew."""

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import ask
import kept
import one_step

import main
from machinery.errors import UserError
from machinery.ranks import join, random_stream

TO_SORT = 64  # answers that say how hard a question is
# {what the picture calls it: (from, below) which share solved by the first model}
HARDNESS = {"all questions": (0.0, 1.1), "hard: solved less than one time in 20": (0.0, 0.05),
            "middling": (0.05, 0.3), "easy: 3 times in 10 or more": (0.3, 1.1)}
COLOURS = ["#a3a3a3", "#c2410c", "#1d4ed8"]
DRAWN_ANEW = 1000


def right_of(folder: Path, num_questions: int, num_answers: int, keys: list[str]) -> dict:
    """For each question how many answers are right: of TO_SORT, and of `num_answers`."""
    config = main.load_config([*ask.settings_of(folder), *keys,
                               f"model.name={json.dumps(str(folder))}"])
    run = one_step.prepare(config)
    num_held_out = len(run.validation_questions)
    if num_questions > num_held_out:
        raise UserError(f"{num_questions} questions are asked for, and {num_held_out} are held "
                        "out: see --questions and data.num_validation")
    found = {}
    for name, n in (("to sort", TO_SORT), ("right", num_answers)):
        stream = random_stream(config.training.seed, 0, f"pass at k: {name}")
        torch.manual_seed(stream.getrandbits(63))
        found[name] = []
        for question in run.validation_questions[:num_questions]:
            groups = main.sample(run, [question], n)
            main.score(run, groups)
            found[name].append(
                sum(each.reward_parts[run.task.SOLVED] >= 1 for each in groups[0]))
    return found


def pass_at(k: int, n: int, right: list[int]) -> list[float]:
    """Of each question."""
    return [1 - math.comb(n - each, k) / math.comb(n, k) for each in right]


def with_interval(values: list[float]) -> tuple[float, float, float]:
    """Their mean, and its bounds if the questions were others."""
    stream = random.Random(0)
    drawn = sorted(statistics.fmean(stream.choices(values, k=len(values)))
                   for _ in range(DRAWN_ANEW))
    return statistics.fmean(values), drawn[DRAWN_ANEW // 40], drawn[-DRAWN_ANEW // 40]


def curve(right: list[int], n: int) -> list[tuple[int, float, float, float]]:
    """(k, pass@k, its bounds) for k = 1, 2, 4 and so on, up to n."""
    return [(k, *with_interval(pass_at(k, n, right)))
            for k in (2**i for i in range(n.bit_length()))]


def draw(known: dict, n: int, path: Path) -> None:
    first = next(iter(known.values()))
    figure = Figure(figsize=(3.2 * len(HARDNESS), 3.4), layout="constrained")
    all_axes = figure.subplots(1, len(HARDNESS), sharey=True)
    for axes, (name, (low, high)) in zip(all_axes, HARDNESS.items()):
        places = [i for i, each in enumerate(first["to sort"]) if low <= each / TO_SORT < high]
        axes.set_title(f"{name}\n({len(places)} questions)", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        for colour, (model, found) in zip(COLOURS, known.items()):
            if places:
                ks, values, lows, highs = zip(*curve([found["right"][i] for i in places], n))
                axes.plot(ks, values, color=colour, label=model)
                axes.fill_between(ks, lows, highs, color=colour, alpha=0.2, linewidth=0)
    all_axes[0].legend(frameon=False, loc="lower right")
    figure.supxlabel("k, answers to a question")
    figure.supylabel("pass@k")
    figure.savefig(path, dpi=80)


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", action="append", metavar="NAME=FOLDER", required=True,
                        help="the one before training first")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--answers", type=int, default=256, help="to each question: 2, 4, 8 ...")
    parser.add_argument("--config", action="append", default=[], help="as for main.py")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "pass_at_k.json",
                        help="what it holds under a NAME is not sampled again")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args(arguments)
    models = [model.partition("=") for model in options.model]
    if not all(folder for _, _, folder in models) or options.questions < 1 or options.answers < 2:
        parser.error("--model NAME=FOLDER, like before=tiny/lab/model; a question, two answers")
    keys = [word for path in options.config for word in ("--config", path)] + options.keys
    known = kept.read(options.data)
    try:
        join()
        for name, _, folder in models:
            if name not in known:
                known[name] = right_of(Path(folder), options.questions, options.answers, keys)
                kept.write(options.data, known)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    n = options.answers
    print("| k | " + " | ".join(known) + " |\n| --- |" + " --- |" * len(known))
    curves = [curve(found["right"], n) for found in known.values()]
    for at in zip(*curves):
        print(f"| {at[0][0]} | " + " | ".join(
            f"{value:.2f} ({low:.2f} to {high:.2f})" for _, value, low, high in at) + " |")
    before, *others = [found["right"] for found in known.values()]
    for name, after in zip(list(known)[1:], others):
        for k in (1, n):
            pairs = zip(pass_at(k, n, before), pass_at(k, n, after))
            value, low, high = with_interval([late - early for early, late in pairs])
            print(f"{name}: pass@{k} {value:+.3f} ({low:+.3f} to {high:+.3f})")
        print(f"{name}: solves {sum(not b and a > 0 for b, a in zip(before, after))} questions of "
              f"which no answer before was right, and none any more of "
              f"{sum(b > 0 and not a for b, a in zip(before, after))}")
    if options.picture:
        draw(known, n, options.picture)
    print(json.dumps({name: [round(value, 4) for _, value, _, _ in each]
                      for name, each in zip(known, curves)}))
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
