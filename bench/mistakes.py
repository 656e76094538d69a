"""What mistakes cost. Each one is a diff of main.py in changes/mistakes/.

    .venv/bin/python bench/changed.py mistakes/no-mean --config recipes/lab.yaml
        trains with a mistake. If you add mistakes/past-the-checks, no check refuses it
    .venv/bin/python bench/mistakes.py --guess
        trains the lab model with one that it doesn't name, and says at the end which it was
    .venv/bin/python bench/mistakes.py --table
        the tables and the picture of docs/evidence.md, from docs/runs.json

bench/runs.py makes the runs."""

import contextlib
import json
import random
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import changed

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = 16  # per step, for all ranks together
LAB = ["--config", "recipes/lab.yaml", f"training.num_samples_per_step={QUESTIONS}"]
PREFIX = "mistakes/"
PAST_THE_CHECKS = PREFIX + "past-the-checks"


@dataclass(frozen=True)
class Mistake:
    facts: dict[str, str]
    has_code: bool  # Otherwise it's a setting.

    @property
    def keys(self) -> list[str]:
        return self.facts.get("keys", "").split()

    @property
    def ranks(self) -> int:
        return int(self.facts.get("ranks", 1))


MISTAKES = {"default": Mistake({"fault": "none"}, has_code=False)}
for path in sorted((changed.CHANGES / PREFIX).glob("*.diff")):
    MISTAKES[path.stem] = Mistake(changed.facts_of(path), has_code=bool(changed.read(path)[1]))
MEASURED = [name for name, mistake in MISTAKES.items() if "expected" in mistake.facts]
COMPARED = ["std", "hot"]  # They aren't mistakes.


def tree_past_the_checks(name: str) -> contextlib.AbstractContextManager[Path]:
    """Makes a folder with the mistake, where no check ends the run."""
    mistake = [] if name == "default" else [PREFIX + name]
    return changed.tree_with([*mistake, PAST_THE_CHECKS])


def import_main(tree: str) -> Any:
    """Imports this folder's main.py, here and for everything imported later."""
    sys.path.insert(0, tree)
    import main
    assert Path(main.__file__).parent == Path(tree), "main.py without the mistake would be measured"
    return main


# ---------------------------------------------------------------- to play with

def guess(arguments: list[str]) -> int:
    """Trains with a mistake that costs something, or with none, and without checks that would end
    the run. The report of step 1 may still give a hint."""
    hidden = ["default"]
    for row in rows_of(results()):
        mistake = MISTAKES[row.name]
        # A mistake without code would be visible in config.yaml. Some only show on several ranks.
        if row.costs in COLOURS and mistake.has_code and mistake.ranks == 1:
            hidden.append(row.name)
    name = random.choice(hidden)
    folder = f"guess-{random.randrange(10**6)}"  # The name must not reveal the mistake.
    keys = [*LAB, f"run.name={folder}", *arguments, *MISTAKES[name].keys]
    with tree_past_the_checks(name) as tree:
        code = changed.call([sys.executable, str(tree / "main.py"), *keys])
    if code == 0:
        print(f"It was {name}, {MISTAKES[name].facts['fault']}, of {', '.join(sorted(hidden))}.")
    return code


# ---------------------------------------------------------------- a run

# Some train on answers sampled in one of these ways. The default is evaluated in each of them.
WAYS = [
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 0.7},
    {"top_k": 50},
]
WAY_OF = {"hot-loss": 0, "hot": 0, "warm-loss": 1, "top-k": 2}
AS_DEFAULT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def run_measured(tree: str, name: str, arguments: list[str]) -> None:
    """Trains, and evaluates with the default's sampling. At the end it also evaluates with its own
    sampling, and records that as if it were the step after the last."""
    main = import_main(tree)
    plain_evaluate, plain_train = main.evaluate, main.train

    def evaluate_with(run, settings: dict):
        sampling = run.config.sampling.model_copy(update=settings)
        config = run.config.model_copy(update={"sampling": sampling})
        return plain_evaluate(replace(run, config=config))

    def train(run) -> None:
        plain_train(run)
        step = run.step
        for way, settings in enumerate(WAYS):
            if name == "default" or way == WAY_OF.get(name):
                step += 1
                groups = evaluate_with(run, settings)
                run.log.evaluation(step, main.evaluation_metrics(groups, run.task), groups)

    main.evaluate = lambda run: evaluate_with(run, AS_DEFAULT)
    main.train = train
    sys.argv[1:] = [*arguments, *MISTAKES[name].keys]
    main.launch(main.main)


# ---------------------------------------------------------------- its record

STEPS = 60


def command_of(name: str, tree: str) -> list[str]:
    """Returns what trains with the mistake that is in the tree, but for its keys."""
    return changed.command_with(
        MISTAKES[name].ranks, ["bench/mistakes.py", "--train", tree, name])


def record_of(name: str, seed: int, out: str) -> dict:
    """Returns what docs/runs.json holds of a run."""
    import experiments

    ranks = MISTAKES[name].ranks
    with tree_past_the_checks(name) as tree:
        _, *program = command_of(name, str(tree))
        keys = {experiments.PROGRAM: program, experiments.QUESTIONS: QUESTIONS // ranks}
        record = experiments.record_of(name, seed, out, keys)
    curve = record["curve"]
    record["curve"] = [entry for entry in curve if entry["step"] <= STEPS]
    record["as sampled"] = [entry["solved"] for entry in curve if entry["step"] > STEPS]
    record["settings"] = record["settings"].replace(str(tree), "TREE")  # with the diff applied
    return record


# ---------------------------------------------------------------- the table and the picture

@dataclass(frozen=True)
class Row:
    name: str
    effect: Any  # experiments.Effect: the mistake less the default
    ends: list[float]  # what each seed solves in the end
    costs: str


def results() -> dict:
    """Returns the runs."""
    import experiments

    return json.loads(experiments.DATA.read_text())


def rows_of(runs: dict) -> list[Row]:
    """Returns a row for each mistake, the costliest first."""
    import experiments

    rows = []
    for name in [*MEASURED, *COMPARED]:
        claim = experiments.Claim("", "", "solved", more=name, less=experiments.DEFAULT)
        effect = experiments.effect_of(claim, runs)
        ends = [record["curve"][-1]["solved"] for record in experiments.records_of(name, runs)]
        rows.append(Row(name, effect, ends, cost_of(name, effect, runs)))
    return sorted(rows, key=lambda row: row.effect.more)


def cost_of(name: str, effect: Any, runs: dict) -> str:
    """Returns what the mistake costs: everything, if not even a third of the gain is left."""
    import experiments

    if effect.verdict == "could be chance":
        return "could be chance"
    if effect.verdict == "holds":
        return "nothing, it ends higher"
    gain = gain_of(name, runs)
    usual_gain = gain_of(experiments.DEFAULT, runs)
    return "everything" if 3 * gain < usual_gain else "something"


def gain_of(run: str, runs: dict) -> float:
    """Returns by how much its share of solved questions rose, as the mean over seeds. All runs
    start from one model, so what the default's nine runs solve before training counts for all."""
    import experiments

    before = experiments.mean_curve(experiments.DEFAULT, runs)[0]
    return experiments.mean_curve(run, runs)[-1] - before


# What the table calls a cost, if it has another name there.
IN_WORDS = {"everything": "most", "something": "part"}


def show_costs(rows: list[Row]) -> None:
    print("| mistake | solved | difference | of the gain, it costs | what the run reports |\n|"
          + " --- |" * 5)
    for row in rows:
        facts = MISTAKES[row.name].facts
        seeds = "" if len(row.ends) == 3 else f", {len(row.ends)} seeds"
        print(f"| `{row.name}`, {facts['fault']} | {row.effect.more:.3f}{seeds} "
              f"| {row.effect.difference:+.3f} ± {row.effect.half_width:.3f} "
              f"| {IN_WORDS.get(row.costs, row.costs)} | {facts.get('shown by', 'nothing')} |")


def evaluated_as_it_samples(name: str, runs: dict) -> tuple[float, float, str]:
    """Returns what it and the default solve in the end with its own sampling settings, and the
    difference."""
    import experiments

    own = [record["as sampled"][0] for record in experiments.records_of(name, runs)]
    default = [record["as sampled"][WAY_OF[name]]
               for record in experiments.records_of(experiments.DEFAULT, runs)]
    half_width = experiments.between_seeds(own, default)
    return fmean(own), fmean(default), f"{fmean(own) - fmean(default):+.3f} ± {half_width:.3f}"


def show_tables(runs: dict) -> None:
    """Prints what docs/evidence.md has of the results, with an empty line between two parts."""
    rows = rows_of(runs)
    show_costs([row for row in rows if row.name not in COMPARED])
    print()
    show_costs([row for row in rows if row.name in COMPARED])
    hot, default, difference = evaluated_as_it_samples("hot", runs)
    print(f"\nEvaluated at 0.6, `hot`, which also learns at 0.6, solves as much as the default "
          f"does: {hot:.3f} and {default:.3f} ({difference}).", end=" ")
    hot, _, difference = evaluated_as_it_samples("hot-loss", runs)
    print("`hot-loss`, which forgets the temperature in its loss, solves "
          f"{hot:.3f} ({difference}).")


COLOURS = {"everything": "#d55e00", "something": "#e69f00"}
GREY = "#525252"  # of the others


def draw(rows: list[Row], runs: dict, path: Path) -> None:
    """Draws what each mistake leaves of a run, with a circle for each seed."""
    import experiments
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.34 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    before, *_, after = experiments.mean_curve(experiments.DEFAULT, runs)
    axes.axvline(before, color=GREY, linestyle=":", label="before training")
    axes.axvline(after, color=GREY, linestyle="--", label="without a mistake")
    places = range(len(rows), 0, -1)  # The first row is at the top.
    for place, row in zip(places, rows):
        colour = COLOURS.get(row.costs, GREY)
        axes.plot(row.ends, [place] * len(row.ends), "o", color=colour, markerfacecolor="none",
                  markersize=8)
    faults = [textwrap.fill(MISTAKES[row.name].facts["fault"], 44) for row in rows]
    axes.set_yticks(places, faults, fontsize=8)
    axes.set_xlim(left=0)
    axes.set_xlabel("solved after 60 steps")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=160)


# ---------------------------------------------------------------- the command

def command(words: list[str]) -> int:
    first, rest = (words[0], words[1:]) if words else ("", [])
    if first == "--guess":
        return guess(rest)
    if first == "--train":
        run_measured(*rest[:2], rest[2:])
    elif first == "--table":
        runs = results()
        show_tables(runs)
        draw(rows_of(runs), runs, ROOT / "docs" / "mistakes.png")
    else:
        print(__doc__)
        return bool(words)
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
