"""What published models of 135 M and 0.5 B parameters learn on two CPU cores.

    .venv/bin/python bench/real_models.py train a 0 --model models/smollm2
    .venv/bin/python bench/real_models.py transfer 0 --model models/smollm2
    .venv/bin/python bench/real_models.py tables
    .venv/bin/python bench/real_models.py draw

`train` trains one of three recipes with a seed. `transfer` asks the result of recipe a, and the
model before training, questions that weren't trained on. Everything measured is kept in
docs/real_models.json, and isn't measured again. `tables` prints it as Markdown, and `draw` turns it
into docs/real_models.png."""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import kept
import yaml
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
# {what we ask before and after training on sums of two numbers: the task, and its questions}
ASKED = {
    "sums of two numbers (trained)": ("arithmetic", "numbers=2 low=10 high=99 signs=+"),
    "sums of three numbers": ("arithmetic", "numbers=3 low=10 high=99 signs=+"),
    "differences": ("arithmetic", "numbers=2 low=10 high=99 signs=-"),
    "sums of larger numbers": ("arithmetic", "numbers=2 low=100 high=999 signs=+"),
    "words spelled backward": ("gym", "spell_backward min_word_len=3 max_word_len=4"),
    "letters counted": ("gym", "letter_counting min_words=3 max_words=5"),
    "syllogisms": ("gym", "syllogism"),
}
KEYS_OF_TASK = {
    "arithmetic": ["data.num_validation=128"],
    "gym": ["data.num_validation=64", "training.max_new_gen_tokens=32"],
}
SCORES = ["eval/reward/strict", "eval/solved_low", "eval/solved_high", "eval/reward/lenient",
          "eval/reward/generous", "eval/pass_at_4", "eval/truncated", "eval/completion_length"]
CURVES = ["reward", "entropy", "completion_length", "groups_without_signal", "seconds/sample",
          "seconds/learn"]  # of each training step


# ---------------------------------------------------------------- runs

def run_main(folder: Path, keys: list[str]) -> list[float]:
    """Runs main.py with two ranks. Returns after how many minutes each evaluation arrived, and the
    run ended."""
    torchrun = Path(sys.executable).parent / "torchrun"
    command = [torchrun, "--nproc-per-node=2", "main.py", *keys, f"run.dir={RUNS}",
               f"run.name={folder.name}"]
    minutes = []
    started = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("evaluation at step"):
                minutes.append(round((time.monotonic() - started) / 60, 2))
    if process.returncode:
        sys.exit(f"error: {folder.name} ended with exit code {process.returncode}")
    minutes.append(round((time.monotonic() - started) / 60, 2))
    return minutes


def rounded(value: float | str | None) -> float | str | None:
    return round(value, 4) if isinstance(value, float) else value


def chosen(entry: dict, names: list[str]) -> dict:
    found = {}
    for name in names:
        short = name.removeprefix("eval/").removeprefix("reward/")
        found[short] = rounded(entry.get(name))
    return found


def train(options: argparse.Namespace) -> None:
    title = f"train {options.recipe} {options.seed}"
    if title in kept.read(options.file):
        return
    folder = ROOT / RUNS / f"{options.recipe}-{options.seed}"
    if folder.exists():
        sys.exit(f"error: {folder} exists, and a resumed run has no times: remove the folder")
    recipe = RECIPES[options.recipe]
    keys = ["--config", recipe, f"training.seed={options.seed}", *options.keys]
    weights = "as published"
    if options.model:
        keys.append(f"model.name={options.model}")
        weights = Path(options.model).name
    minutes = run_main(folder, keys)
    kept.keep(options.file, title, {
        "weights": weights, "recipe": yaml.safe_load((ROOT / recipe).read_text()),
        "keys": options.keys, "minutes": minutes[-1], **curves_of(folder, minutes),
        **trace_of(folder)})


def curves_of(folder: Path, minutes: list[float]) -> dict:
    """Returns what a run measured, with the seconds that its steps had taken until then."""
    evaluations = []
    steps = []
    seconds = 0.0
    for entry in kept.read_lines(folder / "metrics.jsonl"):
        seconds += sum(value for name, value in entry.items() if name.startswith("seconds/"))
        if "eval/solved" in entry:
            names = ["step", *(name for name in entry if name.startswith("eval/"))]
            evaluations.append({"minutes": minutes[len(evaluations)], "seconds": round(seconds, 1),
                                **chosen(entry, names)})
        else:
            steps.append(entry)
    columns = {}
    for name in CURVES:
        columns[name] = [rounded(step[name]) for step in steps]
    return {"evaluations": evaluations, "memory_gb": max(step["memory_gb"] for step in steps),
            "steps": columns}


def trace_of(folder: Path) -> dict:
    """Returns the first answer to the first held-out question, before and after training."""
    samples = kept.read_lines(folder / "samples.jsonl")
    first_answers = {}
    for sample in samples:
        if sample["question"] == 0:
            first_answers.setdefault(sample["step"], chosen(sample, ["prompt", "completion"]))
    first, last = samples[0]["step"], samples[-1]["step"]
    return {"before": first_answers[first], "after": first_answers[last]}


def transfer(options: argparse.Namespace) -> None:
    seed = options.seed
    keys = ["--config", RECIPES["a"], f"training.seed={seed}", *options.keys]
    before = [f"model.name={options.model}"] if options.model else []
    after = [f"model.name={ROOT / RUNS / f'a-{seed}' / 'best'}"]
    for asked in ASKED:
        ask(f"transfer before: {asked}", asked, [*keys, *before], options.file)
    for asked in ASKED:
        ask(f"transfer after {seed}: {asked}", asked, [*keys, *after], options.file)


def ask(title: str, asked: str, keys: list[str], file: Path) -> None:
    """Evaluates a model without training it, and keeps its scores."""
    if title in kept.read(file):
        return
    task, dataset = ASKED[asked]
    folder = ROOT / RUNS / "".join(filter(str.isalnum, title))
    run_main(folder, [
        *keys, f"task.name=examples/{task}.py", f"data.dataset={dataset}", "data.prompt_style=chat",
        "training.max_steps=0", "validation.best_of_n=4", *KEYS_OF_TASK[task]])
    [evaluation] = kept.read_lines(folder / "metrics.jsonl")
    kept.keep(file, title, chosen(evaluation, SCORES))
    shutil.rmtree(folder)  # It contains a copy of the model.


# ---------------------------------------------------------------- tables

def tables(options: argparse.Namespace) -> None:
    known = kept.read(options.file)
    print_trainings(known)
    print_transfer(known)


def print_trainings(known: dict) -> None:
    print("| recipe, seed | solved before | after | lenient | best of 4 | minutes | GB per rank |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for title, run in known.items():
        if title.startswith("train "):
            first, last = run["evaluations"][0], run["evaluations"][-1]
            print(f"| {title.removeprefix('train ')} | {with_interval(first)} | "
                  f"{with_interval(last)} | {first['lenient']:.2f} → {last['lenient']:.2f} | "
                  f"{first['best_of_n']:.2f} → {last['best_of_n']:.2f} | {run['minutes']:.1f} | "
                  f"{run['memory_gb']:.1f} |")


def print_transfer(known: dict) -> None:
    print("\n| asked | before: strict (lenient) | after, one per seed |\n| --- | --- | --- |")
    for title in ASKED:
        before = known.get(f"transfer before: {title}")
        after = [both_marks(known[key]) for key in known
                 if key.startswith("transfer after") and key.endswith(f": {title}")]
        if before and after:
            print(f"| {title} | {both_marks(before)} | {', '.join(after)} |")


def with_interval(entry: dict) -> str:
    return f"{entry['solved']:.2f} ({entry['solved_low']:.2f}–{entry['solved_high']:.2f})"


def both_marks(found: dict) -> str:
    lenient = found["generous"] if found["lenient"] is None else found["lenient"]
    return f"{found['strict']:.2f} ({lenient:.2f})"


# ---------------------------------------------------------------- the picture

def draw(options: argparse.Namespace) -> None:
    """Makes a panel for each recipe. The picture is next to the file."""
    known = kept.read(options.file)
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    all_axes = figure.subplots(1, len(RECIPES), sharey=True)
    for axes, recipe in zip(all_axes, RECIPES):
        axes.set_title(TITLES[recipe], fontsize=11)
        axes.set_xlabel("minutes", fontsize=11)
        axes.set_xlim(0, 32)
        axes.set_xticks(range(0, 33, 8))
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        runs = [run for title, run in known.items() if title.startswith(f"train {recipe} ")]
        for run in runs:
            axes.plot(*zip(*points_of(run, "solved")), color="#c2410c", linewidth=0.7, alpha=0.6)
        axes.plot(*mean_points(runs, "solved"), color="#c2410c", linewidth=2,
                  label="solved: the right number alone")
        axes.plot(*mean_points(runs, "lenient"), color="#1c1917", linewidth=2, linestyle=":",
                  label="the answer ends in the right number")
    all_axes[0].set_ylabel("share of held-out answers", fontsize=11)
    lines, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=11,
                  title="thick: the mean of the seeds, thin: one seed, solved", title_fontsize=11)
    figure.savefig(options.file.with_suffix(".png"), dpi=140)


def points_of(run: dict, metric: str) -> list[tuple[float, float]]:
    return [(point["minutes"], point[metric]) for point in run["evaluations"]]


def mean_points(runs: list[dict], metric: str) -> tuple[list[float], list[float]]:
    """Returns the means over seeds of the minutes and of the metric."""
    mean_minutes = []
    means = []
    for points in zip(*[points_of(run, metric) for run in runs]):
        minutes, values = zip(*points)
        mean_minutes.append(statistics.fmean(minutes))
        means.append(statistics.fmean(values))
    return mean_minutes, means


# ---------------------------------------------------------------- the command line

def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for work in (train, transfer, tables, draw):
        command = commands.add_parser(work.__name__)
        command.set_defaults(work=work)
        command.add_argument("--file", type=Path, default=ROOT / "docs" / "real_models.json")
        if work is train:
            command.add_argument("recipe", choices=RECIPES)
        if work in (train, transfer):
            command.add_argument("seed", type=int)
            command.add_argument("--model", help="a folder, instead of the recipe's model")
            command.add_argument("--keys", nargs="+", default=[], help="section.key=value")
    return parser.parse_args()


if __name__ == "__main__":
    options = read_arguments()
    options.work(options)
