"""What mistakes cost: main.py with one of the mistakes of bench/mistakes.diff.

    .venv/bin/python bench/mistakes.py
        lists the mistakes
    .venv/bin/python bench/mistakes.py no-mean --config recipes/lab.yaml
        trains with a mistake. The keys are those of main.py. If a check refuses the mistake, write
        past-the-checks behind its name
    .venv/bin/python bench/mistakes.py --guess
        trains the lab model with one that it does not name, and tells at the end which it was
    .venv/bin/python bench/mistakes.py --table
        the table and the picture of docs/mistakes.md, from docs/mistakes.json
    .venv/bin/python bench/mistakes.py --measure no-mean stale
        measures them, in hours (all that are missing in the file, if you name none)"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
LAB = ["--config", "recipes/lab.yaml", "training.num_samples_per_step=16"]


@dataclass(frozen=True)
class Mistake:
    facts: dict[str, str]
    hunks: list[tuple[str, str]]  # what stands in main.py, and what takes its place

    @property
    def keys(self) -> list[str]:
        return self.facts.get("keys", "").split()

    @property
    def ranks(self) -> int:
        return int(self.facts.get("ranks", 1))


def read_mistakes() -> dict[str, Mistake]:
    mistakes = {}
    for section in (BENCH / "mistakes.diff").read_text().split("\n=== ")[1:]:
        head, *hunks = re.split(r"^@@.*\n", section, flags=re.MULTILINE)
        name, *facts = re.split(r"\n+", head.strip())
        facts = dict(fact.split(": ", 1) for fact in facts if ": " in fact)
        mistakes[name] = Mistake(facts, [(side(hunk, "-"), side(hunk, "+")) for hunk in hunks])
    return mistakes


def side(hunk: str, sign: str) -> str:
    """Returns the lines before (-) or after (+), with those that both have."""
    lines = hunk.splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] in (" ", sign))


MISTAKES = read_mistakes()
MEASURED = [name for name, mistake in MISTAKES.items() if "expected" in mistake.facts]


def main_with(*names: str) -> types.ModuleType:
    """Returns main.py with these mistakes, as the module `main`."""
    source = (ROOT / "main.py").read_text()
    for name in names:
        for before, after in MISTAKES[name].hunks:
            assert source.count(before) == 1, f"main.py has not once: {before}"
            source = source.replace(before, after)
    sys.path[:0] = [str(ROOT), str(BENCH)]
    module = types.ModuleType("main")
    module.__file__ = str(ROOT / "main.py")
    sys.modules["main"] = module
    exec(compile(source, "main.py", "exec"), module.__dict__)  # noqa: S102
    return module


# ---------------------------------------------------------------- to play with

def train_with(name: str, arguments: list[str]) -> None:
    ranks = MISTAKES[name].ranks
    if int(os.environ.get("WORLD_SIZE", "1")) < ranks:
        sys.exit(f"{name} shows on {ranks} ranks: use torchrun --nproc-per-node={ranks}")
    names = [name]
    if "past-the-checks" in arguments:
        names.append(arguments.pop(arguments.index("past-the-checks")))
    main = main_with(*names)
    sys.argv[1:] = [f"run.name={name}", *arguments, *MISTAKES[name].keys]
    main.launch(main.main)


def guess(arguments: list[str]) -> None:
    """One of those in the code that cost something, or none. The checks are left out, as they would
    tell. A number behind --guess resumes the run that printed it."""
    costly = [row["name"] for row in rows_of(json.loads(DATA.read_text()))
              if row["costs"] in COLOURS and MISTAKES[row["name"]].hunks]
    number = random.randrange(1_000_000)
    if arguments and arguments[0].isdigit():
        number = int(arguments.pop(0))
    print(f"This is --guess {number}.", flush=True)
    name = random.Random(number).choice([*costly, "default"])
    main = main_with(name, "past-the-checks")
    sys.argv[1:] = [*LAB, f"run.name=guess-{number}", *arguments, *MISTAKES[name].keys]

    def main_and_answer(words: list[str]) -> None:
        main.main(words)
        print(f"It was {name} ({MISTAKES[name].facts['fault']}), of {', '.join(sorted(costly))} "
              "and default.")

    main.launch(main_and_answer)


# ---------------------------------------------------------------- a run

# How training samples with some mistakes. The right model is evaluated in all of these ways, too.
AS_SAMPLED = {
    "hot-loss": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "warm-loss": {"temperature": 0.7},
    "top-k": {"top_k": 50},
}
AS_DEFAULT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def run_measured(name: str, arguments: list[str]) -> None:
    """Trains, and evaluates as the default samples. In the end it evaluates as this one samples,
    too, which is written down as if it were the step after the last."""
    main = main_with(name, "past-the-checks")
    plain_evaluate, plain_train = main.evaluate, main.train

    def evaluate_with(run, settings: dict):
        sampling = run.config.sampling.model_copy(update=settings)
        return plain_evaluate(replace(run, config=run.config.model_copy(
            update={"sampling": sampling})))

    def train(run) -> None:
        plain_train(run)
        wanted = AS_SAMPLED if name == "default" else {name} & set(AS_SAMPLED)
        for i, sampled_by in enumerate(wanted):
            groups = evaluate_with(run, AS_SAMPLED[sampled_by])
            metrics = main.evaluation_metrics(groups, run.task)
            run.log.evaluation(run.step + 1 + i, metrics, groups)

    main.evaluate = lambda run: evaluate_with(run, AS_DEFAULT)
    main.train = train
    sys.argv[1:] = [*arguments, *MISTAKES[name].keys]
    main.launch(main.main)


# ---------------------------------------------------------------- its gradient

def write_gradients(name: str, path: str, arguments: list[str]) -> None:
    main_with(name, "past-the-checks")
    import gradients
    import harness

    run = harness.make_run([*arguments, *MISTAKES[name].keys, "training.max_grad_norm=null"])
    sketches = gradients.gradients_of(run, harness.main.training_step)
    if harness.RANK == 0:
        harness.torch.save(sketches, path)
    harness.finish({"gradients": path})


# ---------------------------------------------------------------- all of them

DATA = ROOT / "docs" / "mistakes.json"
RUNS = ROOT / "runs" / "mistakes"
SEEDS = argparse.Namespace(keys=[], out="runs/mistakes", seeds=[0, 1, 2])
LUCK = 0.05  # We trust no smaller difference of a single seed.
BEFORE, AFTER = "before training", "after 20 steps"
MODELS = {BEFORE: ROOT / "tiny" / "lab" / "model", AFTER: RUNS / "lab-20" / "best"}
# These show only while weights move. While a gradient is measured, they stand still.
NO_GRADIENT = ("stale", "staler", "slow", "bfloat16-slow", "forgetful")


def command_of(name: str, *words: str) -> list[str]:
    """Returns how Python runs this file with these words, on as many ranks as the mistake needs."""
    ranks = MISTAKES[name].ranks
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*(torchrun if ranks > 1 else []), "bench/mistakes.py", *words]


def measure(title: tuple[str, str | int]) -> dict:
    """Returns what docs/mistakes.json holds of a mistake with a seed, or of its gradient."""
    import experiments

    name, of = title
    questions = 16 // MISTAKES[name].ranks
    if of in MODELS:
        return gradient_figures(name, of)
    experiments.RUNS[name] = {experiments.PROGRAM: command_of(name, "--run", name),
                              experiments.QUESTIONS: questions}
    record = experiments.record_of(name, of, SEEDS)
    last = max(entry["step"] for entry in record["curve"] if entry["step"] % 20 == 0)
    as_sampled = [entry["solved"] for entry in record["curve"] if entry["step"] > last]
    record["curve"] = [entry for entry in record["curve"] if entry["step"] <= last]
    return record | {"as sampled": as_sampled}


def gradient_figures(name: str, model: str) -> dict:
    import gradients

    return gradients.figures_of(sketches_of(name, model), sketches_of("default", model))


def sketches_of(name: str, model: str):
    """Returns the sketches of its batches, (batches, buckets). They are made once."""
    import torch

    path = RUNS / f"{name} {model}.pt"
    if not path.exists():
        part = path.with_suffix(".part")
        words = ["--config", "recipes/lab.yaml", f"model.name={json.dumps(str(MODELS[model]))}",
                 f"training.num_samples_per_step={16 // MISTAKES[name].ranks}"]
        run_python(command_of(name, "--gradients", name, str(part), *words))
        part.rename(path)
    return torch.load(path)


def run_python(words: list[str]) -> None:
    threads = {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, env=os.environ | threads,
                   stdout=subprocess.DEVNULL)


def measure_missing(names: list[str]) -> None:
    import kept

    unknown = set(names) - set(MISTAKES)
    if unknown:
        sys.exit(f"there is no mistake {', '.join(unknown)}")
    RUNS.mkdir(parents=True, exist_ok=True)
    if not (RUNS / "lab-20" / "summary.json").exists():
        run_python(["main.py", *LAB, "training.max_steps=20", "run.name=lab-20",
                    "run.dir=runs/mistakes"])
    wanted = {}
    for of in (*MODELS, *SEEDS.seeds):
        for name in ["default", *(names or [*MEASURED, "std"])]:
            if of in MODELS and name not in NO_GRADIENT:
                wanted[f"{name} {of}"] = (name, of)
            elif of in SEEDS.seeds:
                wanted[f"{name} seed {of}"] = (name, of)
    known = kept.read(DATA)
    for model in {of for title, (_, of) in wanted.items() if title not in known} & set(MODELS):
        sketches_of("default", model)  # The others are compared with it.
    kept.run_missing(DATA, wanted, measure)


# ---------------------------------------------------------------- the table and the picture

def seeds_of(name: str, known: dict) -> list[int]:
    """Returns all seeds, or the first if one of them is missing. Two would tell no interval."""
    own = [seed for seed in SEEDS.seeds
           if {f"{name} seed {seed}", f"default seed {seed}"} <= known.keys()]
    return own if len(own) == len(SEEDS.seeds) else own[:1]


def rows_of(known: dict) -> list[dict]:
    """Returns a row for each mistake that has runs, those that cost most first."""
    import experiments

    rows = []
    for name in [*MEASURED, "std"]:
        options = argparse.Namespace(keys=[], seeds=seeds_of(name, known))
        if not options.seeds:
            continue
        claim = experiments.Claim("", "", "solved", more=name, less="default")
        effect = experiments.effect_of(claim, known, options)
        if len(options.seeds) == 1:
            effect = replace(effect, seeds=LUCK)
        before = fmean(known[f"default seed {seed}"]["curve"][0]["solved"]
                       for seed in options.seeds)
        ends = [known[f"{name} seed {seed}"]["curve"][-1]["solved"] for seed in options.seeds]
        rows.append({
            "name": name, "effect": effect, "ends": ends,
            "costs": cost_of(effect, before),
            "cosines": {model: known.get(f"{name} {model}") for model in MODELS},
        })
    return sorted(rows, key=lambda row: row["effect"].more)


def cost_of(effect, before: float) -> str:
    """Returns what the mistake costs. It costs everything if not a quarter of the gain is left."""
    if effect.verdict == "could be chance":
        return "could be chance"
    if effect.verdict == "holds":
        return "nothing, it ends higher"
    gained = (effect.more - before) / (effect.less - before)
    return "everything" if gained < 0.25 else "something"


EXPECTED = {"lost": "everything", "lower": "something", "level": "could be chance"}


def show_table(rows: list[dict]) -> None:
    print("| mistake | costs | solved | difference | ± seeds | ± questions "
          "| cosine before training | after 20 steps | what shows it |\n|" + " --- |" * 9)
    num_right = 0
    for row in rows:
        name, effect = row["name"], row["effect"]
        facts = MISTAKES[name].facts
        cosines = [cosine_as_text(row["cosines"][model]) for model in MODELS]
        of_seeds = f"{effect.seeds:.3f}" if len(row["ends"]) > 1 else "one seed"
        print(f"| `{name}`, {facts['fault']} | {row['costs']} | {effect.more:.3f} "
              f"| {effect.difference:+.3f} | {of_seeds} | {effect.questions:.3f} "
              f"| {' | '.join(cosines)} | {facts.get('shown by', 'nothing')} |")
        num_right += EXPECTED.get(facts.get("expected")) == row["costs"]
    num_expected = sum("expected" in MISTAKES[row["name"]].facts for row in rows)
    print(f"\nBefore the runs we expected what {num_right} of {num_expected} cost.")


def cosine_as_text(figures: dict | None) -> str:
    if figures is None:
        return ""
    value, half = figures["cosine of many batches"]
    return "no gradient" if value is None else f"{value:.2f} ± {half:.2f}"


def show_as_sampled(known: dict) -> None:
    """Prints how a right run and a wrong one end, evaluated as training has sampled."""
    print("| sampled with | the default | the mistake |\n| --- | --- | --- |")
    for place, (name, settings) in enumerate(AS_SAMPLED.items()):
        seeds = seeds_of(name, known)
        of_mistake = [known[f"{name} seed {seed}"]["as sampled"][0] for seed in seeds]
        of_default = [known[f"default seed {seed}"]["as sampled"][place] for seed in seeds]
        says = ", ".join(f"{key} {value}" for key, value in settings.items())
        print(f"| {says} | {fmean(of_default):.3f} | {fmean(of_mistake):.3f} |")


COLOURS = {"everything": "#d55e00", "something": "#e69f00"}  # The others are grey.


def draw(rows: list[dict], known: dict, path: Path) -> None:
    """Draws what each mistake leaves of a run, a circle for each seed, beside its gradient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.4 * len(rows) + 1.4), layout="constrained")
    ends, cosines = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    right = [known[f"default seed {seed}"]["curve"] for seed in seeds_of("hot-loss", known)]
    for place, label in ((0, "before training"), (-1, "without a mistake")):
        ends.axvline(fmean(curve[place]["solved"] for curve in right), color="#525252",
                     linestyle=":" if place == 0 else "--", label=label)
    places = range(len(rows), 0, -1)  # The first row is at the top.
    for place, row in zip(places, rows):
        colour = COLOURS.get(row["costs"], "#525252")
        ends.plot(row["ends"], [place] * len(row["ends"]), "o", color=colour,
                  markerfacecolor="none", markersize=8)
        figures = row["cosines"][AFTER]
        if figures and figures["cosine of many batches"][0] is not None:
            value, half = figures["cosine of many batches"]
            cosines.errorbar(value, place, xerr=half, fmt="s", color=colour)
    faults = [textwrap.fill(MISTAKES[row["name"]].facts["fault"], 38) for row in rows]
    ends.set_yticks(places, faults, fontsize=9)
    ends.set_title("solved after 60 steps", fontsize=10)
    cosines.set_title("cosine after 20 steps", fontsize=10)
    cosines.set_xlim(-1, 1.1)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=160)


# ---------------------------------------------------------------- the command

def command(words: list[str]) -> None:
    first, rest = (words[0], words[1:]) if words else ("", [])
    if first in MISTAKES:
        train_with(first, rest)
    elif first == "--guess":
        guess(rest)
    elif first == "--run":
        run_measured(rest[0], rest[1:])
    elif first == "--gradients":
        write_gradients(*rest[:2], rest[2:])
    elif first == "--measure":
        measure_missing(rest)
    elif first == "--table":
        known = json.loads(DATA.read_text())
        rows = rows_of(known)
        show_table(rows)
        show_as_sampled(known)
        draw(rows, known, DATA.with_suffix(".png"))
    else:
        print(__doc__)
        for name, mistake in MISTAKES.items():
            print(f"{name:<16} {mistake.facts['fault']}")


if __name__ == "__main__":
    command(sys.argv[1:])
