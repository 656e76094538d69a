"""A page about one or several runs: curves, answers to the same questions, and settings.

    .venv/bin/python examples/one_run.py runs/<name>
        writes one_run.html about one run, finished or not
    .venv/bin/python examples/one_run.py runs/<name> runs/<another> --out compared.html
        compares several runs, and lists what differs in their settings and their code

The page opens from the disk, without a server or a network. The script reads the files that a run
leaves in its folder, and needs neither the model nor PyTorch. If there are too many answers, it
leaves out evaluations and questions, at even intervals, and the page says so.
"""

import argparse
import difflib
import json
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("one_run_page.html")
MOST_EVALUATIONS = 13  # whose answers are shown
MOST_CHARACTERS = 4_000_000  # of all answers
MOST_DIFF_LINES = 200  # of a file
# These settings say nothing about the experiment.
OWN_SETTINGS = ("run.name", "run.dir", "run.code")
CODE_FILES = ("main.py", "task.py")  # A run keeps copies of the code that made it.

Groups = dict[str, list[dict]]  # the answers of one evaluation, by prompt
Curve = dict[str, list[float | None]]  # its numbers, by name


@dataclass(frozen=True)
class RunData:
    """What a page needs to know about a run."""

    name: str
    settings: dict[str, Any]
    command: str  # the one that repeats the run
    curves: list[Curve]  # of training steps, of evaluations, and of the answers
    code_changes: list[dict]  # where the run was resumed with different code
    evaluations: dict[int, Groups]  # by step
    code: dict[str, list[str]]  # the lines of each file


# ---------------------------------------------------------------- reading a run

def read_settings(path: Path) -> dict[str, Any]:
    """Returns the settings in a config.yaml, by their full names, like `training.seed`."""
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {f"{section}.{key}": value
            for section, keys in sections.items() for key, value in keys.items()}


def read_lines(path: Path) -> list[dict]:
    """Returns what a file of JSON lines holds. The run may be writing the last line right now."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def read_run(folder: Path) -> RunData:
    settings = read_settings(folder / "config.yaml")
    answers: dict[int, Groups] = {}
    # A run writes the metrics of an evaluation before its answers, so we read them after these.
    for sample in read_lines(folder / "samples.jsonl"):
        groups = answers.setdefault(sample["step"], {})
        groups.setdefault(sample["prompt"], []).append(sample)
    training, evaluations, code_changes = read_metrics(folder / "metrics.jsonl")
    num_ranks = read_num_ranks(folder, settings)
    code = {name: (folder / name).read_text(encoding="utf-8").splitlines() for name in CODE_FILES}
    spent = {point["step"]: point["spent"] for point in evaluations}
    about = [describe(step, spent[step], groups) for step, groups in answers.items()]
    return RunData(
        name=folder.resolve().name,
        settings=settings | {"ranks": num_ranks},
        command=command_of(settings, num_ranks),
        curves=[curve_of(points) for points in (training, evaluations, about)],
        code_changes=code_changes,
        evaluations=answers,
        code=code,
    )


def read_metrics(path: Path) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns the points of training steps, of evaluations and of changes of the code. Each has the
    seconds spent on training until then."""
    training = []
    evaluations = []
    code_changes = []
    spent = 0.0
    for line in read_lines(path):
        if "code_changed" in line:
            names = " and ".join(line["code_changed"])
            code_changes.append({"step": line["step"], "spent": spent, "code_changed": names})
            continue
        spent += sum(value for name, value in line.items() if name.startswith("seconds/"))
        point = {name.removeprefix("eval/"): value for name, value in line.items()}
        point["spent"] = spent
        if "eval/solved" in line:
            evaluations.append(point)
        else:
            training.append(point)
    return training, evaluations, code_changes


def read_num_ranks(folder: Path, settings: dict[str, Any]) -> int | None:
    """Returns the number of ranks, or None if the run has no checkpoint."""
    states = sorted(folder.glob("checkpoints/step-*/state.json"))
    if not states:
        return None
    state = json.loads(states[-1].read_text(encoding="utf-8"))
    # Settings count the questions of one rank, and an experiment those of all ranks.
    key = "training.num_samples_per_step"
    return state["experiment"][key] // settings[key]


def command_of(settings: dict[str, Any], num_ranks: int | None) -> str:
    """Returns the command that repeats a run, on whatever device it finds."""
    words = ["torchrun", f"--nproc-per-node={num_ranks or 'RANKS'}", "main.py"]
    if num_ranks == 1:
        words = ["python", "main.py"]
    defaults = read_settings(ROOT / "config.yaml")
    for key, value in settings.items():
        if key not in OWN_SETTINGS and (key not in defaults or value != defaults[key]):
            text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
            text = text.removesuffix("...\n")  # YAML puts three dots after a plain value.
            words.append(f"{key}={text.strip()}")
    return shlex.join(words)


def describe(step: int, spent: float, groups: Groups) -> dict[str, float | None]:
    """Returns a point computed from the answers of an evaluation."""
    lengths: dict[str, list[int]] = {"right": [], "other": []}
    distinct = []
    for group in groups.values():
        distinct.append(len({answer["completion"] for answer in group}) / len(group))
        for answer in group:
            kind = "right" if answer["solved"] >= 1 else "other"
            lengths[kind].append(answer["completion_length"])
    return {
        "step": step,
        "spent": spent,
        "length of right answers": fmean(lengths["right"]) if lengths["right"] else None,
        "length of other answers": fmean(lengths["other"]) if lengths["other"] else None,
        "distinct answers to a question, as a share": fmean(distinct),
    }


def curve_of(points: list[dict]) -> Curve:
    """Returns the points as columns. Some metrics begin after the first point."""
    names = dict.fromkeys(name for point in points for name in point)
    return {name: [rounded(point.get(name)) for point in points] for name in names}


def rounded(value: Any) -> float | None:
    """Returns None for what no curve can show, such as NaN, which JSON doesn't know."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


# ---------------------------------------------------------------- what differs

def differing_settings(runs: list[RunData]) -> list[list[str]]:
    """Returns a row for each setting that differs: its key, and its value in each run."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [json.dumps(run.settings.get(key)) for run in runs]
        if key not in OWN_SETTINGS and len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def differing_code(runs: list[RunData]) -> list[tuple[int, str, str]]:
    """Returns how files differ from those of the first run: the run's number, the file, the diff.
    """
    first, *others = runs
    found = []
    for number, run in enumerate(others, start=1):
        for name in CODE_FILES:
            diff = list(difflib.unified_diff(
                first.code[name], run.code[name], f"{first.name}/{name}", f"{run.name}/{name}",
                lineterm=""))
            num_left_out = len(diff) - MOST_DIFF_LINES
            if num_left_out > 0:
                diff = [*diff[:MOST_DIFF_LINES], f"... {num_left_out} more lines"]
            if diff:
                found.append((number, name, "\n".join(diff)))
    return found


# ---------------------------------------------------------------- the page

def thinned(items: list, most: int) -> list:
    """Returns at most this many items, evenly spaced, with the first and the last."""
    last = len(items) - 1
    if last < most:
        return items
    return [items[round(i * last / (most - 1))] for i in range(most)]


def shown_steps(run: RunData) -> list[int]:
    """Returns the evaluations whose answers the page has room for."""
    return thinned(list(run.evaluations), MOST_EVALUATIONS)


def shown_questions(runs: list[RunData]) -> list[str]:
    """Returns the prompts whose answers the page has room for."""
    prompts: dict[str, int] = {}  # the number of characters of each, and of the answers to it
    for run in runs:
        for step in shown_steps(run):
            for prompt, group in run.evaluations[step].items():
                size = sum(len(answer["completion"]) for answer in group)
                prompts[prompt] = prompts.get(prompt, len(prompt)) + size
    share = MOST_CHARACTERS / max(1, sum(prompts.values()))
    return thinned(list(prompts), max(2, int(share * len(prompts))))


def shown_run(run: RunData, prompts: list[str]) -> dict[str, Any]:
    """Returns a run as the page stores it, with the numbers of the prompts instead of their words.
    """
    steps = shown_steps(run)
    answers = []
    for prompt in prompts:
        # Not every run asks every question.
        groups = [run.evaluations[step].get(prompt, []) for step in steps]
        answers.append([[shown_answer(answer) for answer in group] for group in groups])
    return {
        "name": run.name,
        "command": run.command,
        "settings": [f"{key}: {json.dumps(value)}" for key, value in run.settings.items()],
        "curves": run.curves,
        "code_changes": run.code_changes,
        "steps": steps,
        "answers": answers,
    }


def shown_answer(answer: dict) -> list:
    verdict = f"reward {answer['reward']:.4g}"
    for name, value in answer["reward_parts"].items():
        verdict += f", {name} {value:.4g}"
    verdict += f", {answer['completion_length']} tokens"
    if answer["truncated"]:
        verdict += ", truncated"
    return [answer["solved"], verdict, answer["completion"]]


def labels(prompts: list[str]) -> list[str]:
    """Returns the prompts without the words that all of them begin and end with."""
    texts = [prompt.split() for prompt in prompts]
    start = len(os.path.commonprefix(texts))
    end = len(os.path.commonprefix([words[::-1] for words in texts]))
    return [" ".join(words[start:len(words) - end] or words)[:200] for words in texts]


def left_out(runs: list[RunData], num_shown: int) -> list[str]:
    """Returns what the page lacks, in words."""
    prompts = {prompt for run in runs for groups in run.evaluations.values() for prompt in groups}
    lines = []
    for run in runs:
        num_steps = len(run.evaluations) - len(shown_steps(run))
        if num_steps > 0:
            lines.append(f"the answers of {num_steps} evaluations of {run.name}")
    if len(prompts) > num_shown:
        lines.append(f"the answers to {len(prompts) - num_shown} of {len(prompts)} questions")
    return lines


def page(runs: list[RunData]) -> str:
    """Returns one_run_page.html with the data of these runs in it."""
    prompts = shown_questions(runs)
    data = {
        "runs": [shown_run(run, prompts) for run in runs],
        "prompts": prompts,
        "labels": labels(prompts),
        "differs": differing_settings(runs),
        "diffs": differing_code(runs),
        "left_out": left_out(runs, len(prompts)),
    }
    text = json.dumps(data, separators=(",", ":"))
    # Nothing in it can end the script that it's put into.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e")
    return TEMPLATE.read_text(encoding="utf-8").replace("DATA", text, 1)


def main(arguments: list[str]) -> int:
    """Writes the page, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders, like runs/<name>")
    parser.add_argument("--out", type=Path, default=Path("one_run.html"))
    options = parser.parse_args(arguments)
    for folder in options.runs:
        for name in ("config.yaml", *CODE_FILES):
            if not (folder / name).exists():
                print(f"error: {folder} is not the folder of a run that has begun: it has no "
                      f"{name}", file=sys.stderr)
                return 2
    options.out.write_text(page([read_run(folder) for folder in options.runs]), encoding="utf-8")
    print(f"{options.out}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
