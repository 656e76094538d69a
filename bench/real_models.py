"""What published models of 135 M and 0.5 B parameters learn on two CPU cores.

    .venv/bin/python bench/real_models.py train a 0 --model models/smollm2
    .venv/bin/python bench/real_models.py transfer 0 --model models/smollm2
    .venv/bin/python bench/real_models.py tasks smollm2-135m --model models/smollm2
    .venv/bin/python bench/real_models.py tables
    .venv/bin/python bench/real_models.py draw

`train` trains one of three recipes with a seed. `transfer` asks the result of recipe a, and the
model before training, what was not trained. `tasks` asks a model questions of reasoning-gym. All
that was measured is kept in docs/real_models.json, and not measured again without --again. `tables`
prints it as Markdown, and `draw` makes docs/real_models.png of it."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import kept
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RUNS = "runs/real_models"
RECIPES = {
    "a": "recipes/smollm2-135m-cpu.yaml",
    "b": "recipes/smollm2-135m-lora-cpu.yaml",
    "c": "recipes/qwen2.5-coder-0.5b-cpu.yaml",
}
TITLES = {
    "a": "SmolLM2-135M,\nall weights,\nsums of two numbers",
    "b": "SmolLM2-135M,\nadapters,\nsums of two numbers",
    "c": "Qwen2.5-Coder-0.5B,\nadapters,\nsums of three numbers",
}
# What is asked before and after training on sums of two numbers from 10 to 99.
SUMS = {
    "sums of two numbers (trained)": "numbers=2 low=10 high=99 signs=+",
    "sums of three numbers": "numbers=3 low=10 high=99 signs=+",
    "differences": "numbers=2 low=10 high=99 signs=-",
    "sums of larger numbers": "numbers=2 low=100 high=999 signs=+",
}
UNRELATED = {
    "words spelled backward": "spell_backward min_word_len=3 max_word_len=4",
    "letters counted": "letter_counting min_words=3 max_words=5",
    "syllogisms": "syllogism",
}
GYM = [
    "basic_arithmetic min_terms=2 max_terms=2 min_digits=1 max_digits=1",
    "chain_sum min_terms=2 max_terms=2 min_digits=1 max_digits=1",
    "chain_sum min_terms=2 max_terms=2 min_digits=2 max_digits=2",
    "products min_terms=2 max_terms=2 min_digits=1 max_digits=1",
    "simple_equations min_terms=2 max_terms=2 min_value=1 max_value=9",
    "gcd min_value=1 max_value=20", "lcm min_value=1 max_value=9",
    "fraction_simplification min_value=1 max_value=9 min_factor=2 max_factor=4 styles=[plain]",
    "count_bits min_n=1 max_n=200", "base_conversion min_base=2 max_base=4 max_value=50",
    "number_sequence max_terms=5 max_complexity=1",
    "number_sorting min_numbers=3 max_numbers=3 max_decimals=0",
    "number_filtering min_numbers=3 max_numbers=4 max_decimals=0",
    "countdown min_numbers=2 max_numbers=3",
    "word_sorting min_words=2 max_words=3", "spell_backward min_word_len=3 max_word_len=4",
    "letter_counting min_words=3 max_words=5", "caesar_cipher min_words=1 max_words=2",
    "coin_flip", "leg_counting min_animals=1 max_animals=2", "calendar_arithmetic", "aiw",
    "family_relationships min_family_size=4 max_family_size=4", "syllogism",
    "propositional_logic min_vars=2 max_vars=2 min_statements=2 max_statements=2",
    "knights_knaves n_people=2 depth_constraint=2 width_constraint=2",
]
CURVES = ["reward", "entropy", "completion_length", "groups_without_signal", "seconds/sample",
          "seconds/learn"]  # of each training step


# ---------------------------------------------------------------- runs

def run_main(name: str, keys: list[str]) -> tuple[Path, list[float]]:
    """Runs main.py with two ranks. Returns the folder of the run, and after how many minutes each
    evaluation was there, and the end."""
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node=2", "main.py", *keys, f"run.dir={RUNS}",
               f"run.name={name}"]
    minutes = []
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("evaluation at step"):
                minutes.append(round((time.monotonic() - started) / 60, 2))
    if process.returncode:
        sys.exit(f"error: {name} ended with {process.returncode}")
    minutes.append(round((time.monotonic() - started) / 60, 2))
    return ROOT / RUNS / name, minutes


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chosen(entry: dict, names: list[str]) -> dict:
    found = {}
    for name in names:
        value = entry.get(name)
        short = name.removeprefix("eval/").removeprefix("reward/")
        found[short] = round(value, 4) if isinstance(value, float) else value
    return found


def train(options: argparse.Namespace) -> None:
    recipe, seed = options.recipe, options.seed
    title = f"train {recipe} {seed}"
    folder = ROOT / RUNS / f"{recipe}-{seed}"
    if is_known(title, options):
        return
    if folder.exists():
        sys.exit(f"error: {folder} is there. A run that resumes has no times: remove the folder")
    keys = ["--config", RECIPES[recipe], f"training.seed={seed}", *options.keys]
    if options.model:
        keys.append(f"model.name={options.model}")
    _, minutes = run_main(folder.name, keys)
    keep(title, {
        "weights": Path(options.model).name if options.model else "as published",
        "recipe": yaml.safe_load((ROOT / RECIPES[recipe]).read_text()), "keys": options.keys,
        "minutes": minutes[-1], **curves_of(folder, minutes), **trace_of(folder)}, options)


def curves_of(folder: Path, minutes: list[float]) -> dict:
    """Returns what a run measured, with the seconds that its steps took until then."""
    evaluations = []
    steps = []
    seconds = 0.0
    for entry in read_lines(folder / "metrics.jsonl"):
        seconds += sum(value for name, value in entry.items() if name.startswith("seconds/"))
        if "eval/solved" in entry:
            names = ["step", *(name for name in entry if name.startswith("eval/"))]
            evaluations.append({"minutes": minutes[len(evaluations)], "seconds": round(seconds, 1),
                                **chosen(entry, names)})
        else:
            steps.append(entry)
    # A step that learns nothing has no entropy.
    columns = {name: [chosen(step, [name])[name] for step in steps] for name in CURVES}
    return {"evaluations": evaluations, "memory_gb": max(step["memory_gb"] for step in steps),
            "steps": columns}


def trace_of(folder: Path) -> dict:
    """Returns the first answer to the first held-out question, at both ends of the training."""
    samples = read_lines(folder / "samples.jsonl")
    first_answers = {}
    for sample in samples:
        if sample["question"] == 0:
            first_answers.setdefault(sample["step"], chosen(sample, ["prompt", "completion"]))
    first, last = samples[0]["step"], samples[-1]["step"]
    return {"before": first_answers[first], "after": first_answers[last]}


def ask(name: str, task: str, dataset: str, questions: int, answers: int,
        keys: list[str]) -> dict:
    """Evaluates a model on one task. Returns its scores."""
    folder, _ = run_main(name, [
        *keys, f"task.name=examples/{task}.py", f"data.dataset={dataset}", "training.max_steps=0",
        f"data.num_validation={questions}", f"validation.best_of_n={answers}",
        "data.prompt_style=chat"])
    [evaluation] = read_lines(folder / "metrics.jsonl")
    shutil.rmtree(folder)  # It holds a copy of the model.
    return chosen(evaluation, [
        "eval/reward/strict", "eval/solved_low", "eval/solved_high", "eval/reward/lenient",
        "eval/reward/generous", f"eval/pass_at_{answers}", "eval/truncated",
        "eval/completion_length"])


def transfer(options: argparse.Namespace) -> None:
    after = ROOT / RUNS / f"a-{options.seed}" / "best"
    for which, model in (("before", options.model), (f"after {options.seed}", after)):
        keys = ["--config", RECIPES["a"], f"training.seed={options.seed}", *options.keys]
        if model:
            keys.append(f"model.name={model}")
        for title, dataset in {**SUMS, **UNRELATED}.items():
            if is_known(f"transfer {which}: {title}", options):
                continue
            is_sum = title in SUMS
            task, questions = ("arithmetic", 128) if is_sum else ("gym", 64)
            length = [] if is_sum else ["training.max_new_gen_tokens=32"]
            name = f"transfer-{which.replace(' ', '-')}-{title.replace(' ', '-')}"
            found = ask(name, task, dataset, questions, 4, [*keys, *length])
            keep(f"transfer {which}: {title}", found, options)


def tasks(options: argparse.Namespace) -> None:
    for number, dataset in enumerate(GYM):
        title = f"tasks {options.label}: {dataset}"
        if (options.only and options.only not in dataset) or is_known(title, options):
            continue
        keys = [f"model.name={options.model}", "training.max_new_gen_tokens=48", *options.keys]
        found = ask(f"tasks-{options.label}-{number}", "gym", dataset, 64, 8, keys)
        keep(title, found, options)


def is_known(title: str, options: argparse.Namespace) -> bool:
    return title in kept.read(options.file) and not options.again


def keep(title: str, found: dict, options: argparse.Namespace) -> None:
    known = kept.read(options.file)
    known[title] = found
    kept.write(options.file, known)
    print(f"{title} is in {options.file}", flush=True)


# ---------------------------------------------------------------- tables

def tables(options: argparse.Namespace) -> None:
    known = kept.read(options.file)
    print_trainings(known)
    print_transfer(known)
    print_tasks(known)


def print_trainings(known: dict) -> None:
    print("| recipe, seed | solved before | after | lenient | best of 4 | minutes | GB a rank |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, run in known.items():
        if title.startswith("train "):
            first, last = run["evaluations"][0], run["evaluations"][-1]
            print(f"| {title.removeprefix('train ')} | {with_interval(first)} | "
                  f"{with_interval(last)} | {first['lenient']:.2f} → {last['lenient']:.2f} | "
                  f"{first['best_of_n']:.2f} → {last['best_of_n']:.2f} | {run['minutes']:.1f} | "
                  f"{run['memory_gb']:.1f} |")


def print_transfer(known: dict) -> None:
    print("\n| asked | before: strict (lenient) | after, a seed each |\n| --- | --- | --- |")
    for title in {**SUMS, **UNRELATED}:
        before = known.get(f"transfer before: {title}")
        after = [both_marks(known[key]) for key in known
                 if key.startswith("transfer after") and key.endswith(f": {title}")]
        if before and after:
            print(f"| {title} | {both_marks(before)} | {', '.join(after)} |")


def print_tasks(known: dict) -> None:
    labels = sorted({title.split()[1][:-1] for title in known if title.startswith("tasks ")})
    if not labels:
        return
    titles = [f"{label}: {which}" for label in labels for which in ("pass@1", "pass@8", "generous")]
    print(f"\n| task | {' | '.join(titles)} |\n| --- |{' --- |' * len(titles)}")
    for dataset in GYM:
        cells = []
        for label in labels:
            found = known.get(f"tasks {label}: {dataset}", {})
            for name in ("strict", "pass_at_8", "generous"):
                cells.append(f"{found[name]:.2f}" if found else "")
        print(f"| {dataset} | {' | '.join(cells)} |")


def with_interval(entry: dict) -> str:
    return f"{entry['solved']:.2f} ({entry['solved_low']:.2f}–{entry['solved_high']:.2f})"


def both_marks(found: dict) -> str:
    lenient = found["generous"] if found["lenient"] is None else found["lenient"]
    return f"{found['strict']:.2f} ({lenient:.2f})"


# ---------------------------------------------------------------- the picture

def draw(options: argparse.Namespace) -> None:
    known = kept.read(options.file)
    runs_of = {recipe: [run for title, run in known.items()
                        if title.startswith(f"train {recipe} ")] for recipe in RECIPES}
    drawn = [recipe for recipe in RECIPES if runs_of[recipe]]
    if not drawn:
        sys.exit(f"error: {options.file} has no training yet")
    figure = Figure(figsize=(2.5 * len(drawn), 4), layout="constrained")
    all_axes = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for axes, recipe in zip(all_axes, drawn):
        runs = runs_of[recipe]
        draw_seeds(axes, runs)
        draw_mean(axes, runs, "solved", "#c2410c", "-", "solved: the right number alone")
        draw_mean(axes, runs, "lenient", "#1c1917", ":", "the answer ends in the right number")
        axes.set_title(TITLES[recipe], fontsize=11)
        axes.set_xlabel("minutes", fontsize=11)
        axes.set_xlim(0, 32)
        axes.set_xticks(range(0, 33, 8))
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("share of held-out answers", fontsize=11)
    lines, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=11,
                  title="thick: the mean of the seeds, thin: one seed, solved", title_fontsize=11)
    figure.savefig(options.picture, dpi=140)


def points_of(run: dict, metric: str) -> list[tuple[float, float]]:
    return [(point["minutes"], point[metric]) for point in run["evaluations"]]


def draw_seeds(axes: Axes, runs: list[dict]) -> None:
    for run in runs:
        axes.plot(*zip(*points_of(run, "solved")), color="#c2410c", linewidth=0.7, alpha=0.6)


def draw_mean(axes: Axes, runs: list[dict], metric: str, colour: str, style: str,
              label: str) -> None:
    """Draws the mean over seeds, at the mean of their minutes."""
    means = []
    for points in zip(*[points_of(run, metric) for run in runs]):
        minutes, values = zip(*points)
        means.append((statistics.fmean(minutes), statistics.fmean(values)))
    axes.plot(*zip(*means), color=colour, linestyle=style, linewidth=2, label=label)


# ---------------------------------------------------------------- the command line

def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for work in (train, transfer, tasks, tables, draw):
        command = commands.add_parser(work.__name__)
        command.set_defaults(work=work)
        command.add_argument("--file", type=Path, default=ROOT / "docs" / "real_models.json")
        if work is train:
            command.add_argument("recipe", choices=RECIPES)
        if work in (train, transfer):
            command.add_argument("seed", type=int)
        if work is tasks:
            command.add_argument("label", help="what the table calls the model, one word")
            command.add_argument("--only", help="tasks whose name has this in it")
        if work in (train, transfer, tasks):
            command.add_argument("--model", required=work is tasks,
                                 help="a folder, instead of the recipe's model")
            command.add_argument("--keys", nargs="+", default=[], help="section.key=value")
            command.add_argument("--again", action="store_true", help="also what is in the file")
        if work is draw:
            command.add_argument("--picture", type=Path, default=ROOT / "docs" / "real_models.png")
    return parser.parse_args()


if __name__ == "__main__":
    options = read_arguments()
    options.work(options)
