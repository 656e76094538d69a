"""A page about one or several runs: curves, answers to the same questions, and settings.

    .venv/bin/python examples/one_run.py runs/<name>
        writes one_run.html about one run, finished or not
    .venv/bin/python examples/one_run.py runs/<name> runs/<another> --out compared.html
        compares several runs, and lists what differs in their settings and their code

The page opens from the disk, without a server or a network. The script reads the files that a run
leaves in its folder, and needs neither the model nor PyTorch. If runs are too long for a page, it
leaves out points of curves, evaluations and questions evenly, and the page says so.
"""

import argparse
import difflib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import yaml

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("one_run_page.html")
MOST_BYTES = 2_000_000  # of a page
MOST_NUMBERS = 80_000  # in all curves of a page
RIGHT = 0.5  # A question counts as solved if this share of its answers is right.
# These settings say where a run is, and nothing about the experiment.
OWN_SETTINGS = ("run.name", "run.dir")
CODE_FILES = ("main.py", "task.py")  # copies of the code that made a run, in its folder
MOST_DIFF_LINES = 200  # of one file in one run
MOST_DIFF_CHARACTERS = 300  # of a line


class UserError(Exception):
    """A mistake that the user can fix. It ends in one line and exit code 2."""


class Limits(NamedTuple):
    """How much of the answers a page shows."""

    questions: int
    evaluations: int
    characters: int  # of an answer


# We use the first limits whose page is small enough.
LIMITS = [
    Limits(4096, 200, 4000),
    Limits(512, 50, 4000),
    Limits(256, 25, 4000),
    Limits(128, 25, 2000),
    Limits(96, 13, 2000),
    Limits(64, 13, 2000),
    Limits(48, 13, 1000),
    Limits(32, 13, 1000),
    Limits(32, 9, 600),
    Limits(16, 9, 600),
    Limits(16, 5, 300),
    Limits(8, 5, 200),
    Limits(4, 3, 100),
]


@dataclass(frozen=True)
class Answer:
    """An answer to a held-out question, like a line of samples.jsonl."""

    step: int
    question: int
    prompt: str
    completion: str
    solved: float
    reward: float | None
    truncated: bool
    completion_length: int
    parts: dict[str, float | None]  # of the reward, by name


Groups = dict[str, list[Answer]]  # the answers of one evaluation, by prompt
Point = dict[str, float | str | None]  # the metrics of one step, by name, or changed code


@dataclass(frozen=True)
class RunData:
    """What a page needs to know about a run."""

    name: str
    settings: dict[str, Any]
    command: str  # that repeats the run
    curves: list[list[Point]]  # of training steps, of evaluations, and of the answers
    evaluations: dict[int, Groups]  # by step
    code: dict[str, list[str]]  # the lines of each file that the folder has a copy of
    code_changes: list[Point]  # where the run was resumed with different code
    damage: str  # how many lines we couldn't read, in words, or an empty string


# ---------------------------------------------------------------- read the files of a run

def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a config.yaml, by their full names, like `training.seed`."""
    settings = {}
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        for section, keys in sections.items():
            for key, value in keys.items():
                settings[f"{section}.{key}"] = value
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} does not exist, or does not have the settings of a run "
            f"({type(error).__name__}): name folders of runs, like runs/<name>"
        ) from None
    return settings


def read_code(folder: Path) -> dict[str, list[str]]:
    """The lines of the code that made the run, by file. Older runs have no copy of it."""
    code = {}
    for name in CODE_FILES:
        with suppress(FileNotFoundError):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            code[name] = text.splitlines()
    return code


def read_lines(path: Path, convert: Callable[[dict], T]) -> tuple[list[T], int]:
    """What `convert` makes of each JSON line of a file, and the number of damaged lines."""
    found = []
    num_damaged = 0
    if not path.exists():
        return found, num_damaged
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found.append(convert(json.loads(line)))
            # The run may be writing this line right now, or an older version wrote it.
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                num_damaged += 1
    return found, num_damaged


def rounded(value: float | None) -> float | None:
    """A number with six digits, or None for infinity and NaN, which JSON doesn't know."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def to_point(line: dict) -> Point:
    """A line of metrics.jsonl with rounded numbers, and with the step in front.

    If the code changed at this step, the line has the names of the files instead of numbers.
    """
    point = {"step": int(line.pop("step"))}
    for name, value in line.items():
        point[name] = " and ".join(value) if name == "code_changed" else rounded(value)
    return point


def to_answer(line: dict) -> Answer:
    """A line of samples.jsonl. A missing field raises an error."""
    return Answer(
        step=int(line["step"]),
        question=int(line["question"]),
        prompt=str(line["prompt"]),
        completion=str(line["completion"]),
        solved=rounded(float(line["solved"])) or 0.0,
        reward=rounded(float(line["reward"])),
        truncated=bool(line["truncated"]),
        completion_length=int(line["completion_length"]),
        parts={name: rounded(value) for name, value in line["reward_parts"].items()},
    )


def read_num_ranks(folder: Path, settings: dict[str, Any]) -> int | None:
    """The number of ranks at the newest readable checkpoint, or None if there is none."""
    questions = "training.num_samples_per_step"  # per rank in the settings of a run
    num_ranks = None
    for path in sorted(folder.glob("checkpoints/step-*/state.json")):
        with suppress(OSError, ValueError, TypeError, LookupError):
            state = json.loads(path.read_text(encoding="utf-8"))
            # An experiment counts the questions of all ranks together.
            num_ranks = state["experiment"][questions] // settings[questions]
    return num_ranks


def split_points(points: list[Point]) -> tuple[list[Point], list[Point], list[Point]]:
    """The points of training steps, of evaluations and of code changes, each with the seconds spent
    so far."""
    training = []
    evaluations = []
    code_changes = []
    spent = 0.0
    for point in points:
        seconds = [value or 0 for name, value in point.items() if name.startswith("seconds/")]
        spent += sum(seconds)
        timed = {"spent": rounded(spent)}
        for name, value in point.items():
            timed[name.removeprefix("eval/")] = value
        if "eval/solved" in point:
            evaluations.append(timed)
        elif "code_changed" in point:
            code_changes.append(timed)
        else:
            training.append(timed)
    return training, evaluations, code_changes


def group_answers(answers: list[Answer]) -> dict[int, Groups]:
    """Answers by step and prompt, in the order of the file."""
    evaluations: dict[int, Groups] = {}
    for answer in answers:
        groups = evaluations.setdefault(answer.step, {})
        groups.setdefault(answer.prompt, []).append(answer)
    return evaluations


def repeat_command(settings: dict[str, Any], num_ranks: int | None) -> str:
    """The command that repeats this run, on whatever device it finds."""
    if num_ranks == 1:
        words = ["python", "main.py"]
    else:
        words = ["torchrun", f"--nproc-per-node={num_ranks or 'RANKS'}", "main.py"]
    defaults = read_settings(ROOT / "config.yaml")
    for key, value in settings.items():
        if key not in defaults or value != defaults[key]:
            text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
            text = text.removesuffix("...\n")  # YAML puts three dots after a plain value.
            words.append(f"{key}={text.strip()}")
    return shlex.join(words)


def read_run(folder: Path) -> RunData:
    """Everything a page needs from the folder of a run, finished or not."""
    settings = read_settings(folder / "config.yaml")
    points, num_damaged_points = read_lines(folder / "metrics.jsonl", to_point)
    answers, num_damaged_answers = read_lines(folder / "samples.jsonl", to_answer)
    num_ranks = read_num_ranks(folder, settings)
    training, evaluation, code_changes = split_points(points)
    evaluations = group_answers(answers)
    name = str(settings.get("run.name") or folder.resolve().name)
    num_damaged = num_damaged_points + num_damaged_answers
    damage = f"{num_damaged} damaged or older lines of {name}" if num_damaged else ""
    return RunData(
        name=name,
        settings=settings | {"ranks": num_ranks},
        command=repeat_command(settings, num_ranks),
        curves=[training, evaluation, describe_evaluations(evaluations, evaluation)],
        evaluations=evaluations,
        code=read_code(folder),
        code_changes=code_changes,
        damage=damage,
    )


# ---------------------------------------------------------------- what the answers are like

def mean(values: list) -> float | None:
    """The rounded mean, or None if there are no values."""
    return rounded(fmean(values)) if values else None


def shares_solved(groups: Groups) -> dict[str, float]:
    """The share of right answers to each question."""
    shares = {}
    for prompt, group in groups.items():
        shares[prompt] = fmean(answer.solved for answer in group)
    return shares


def describe_evaluations(evaluations: dict[int, Groups], measured: list[Point]) -> list[Point]:
    """Numbers that only the answers themselves can tell, for each evaluation.

    `measured` has the metrics of the evaluations, which know how many seconds were spent.
    """
    seconds = {point["step"]: point["spent"] for point in measured}
    points = []
    first = None
    before = None
    for step, groups in evaluations.items():
        shares = shares_solved(groups)
        if first is None:
            first = shares
        point = {"step": step, "spent": seconds.get(step, 0.0)}
        point.update(describe_answers(groups))
        point.update(solved_by_start(first, shares))
        if before is not None:
            point.update(changes(before, shares))
        points.append(point)
        before = shares
    return points


def describe_answers(groups: Groups) -> Point:
    """Lengths of right and wrong answers, and how many answers to a question are distinct."""
    right_lengths = []
    wrong_lengths = []
    distinct_shares = []
    for group in groups.values():
        completions = {answer.completion for answer in group}
        distinct_shares.append(len(completions) / len(group))
        for answer in group:
            if answer.solved >= 1:
                right_lengths.append(answer.completion_length)
            if answer.solved <= 0:
                wrong_lengths.append(answer.completion_length)
    return {
        "length of right answers": mean(right_lengths),
        "length of wrong answers": mean(wrong_lengths),
        "distinct answers to a question, as a share": mean(distinct_shares),
    }


def solved_by_start(first: dict[str, float], now: dict[str, float]) -> Point:
    """The share solved now of the questions with none, all or some right at first."""
    began_none = []
    began_all = []
    began_some = []
    for prompt, share in now.items():
        if prompt not in first:
            continue
        if first[prompt] <= 0:
            began_none.append(share)
        elif first[prompt] >= 1:
            began_all.append(share)
        else:
            began_some.append(share)
    return {
        "solved, of questions that began with none right": mean(began_none),
        "solved, of questions that began with all right": mean(began_all),
        "solved, of questions that began with some right": mean(began_some),
    }


def changes(before: dict[str, float], now: dict[str, float]) -> Point:
    """The shares of questions that became right and wrong between two evaluations."""
    became_right = []
    became_wrong = []
    for prompt, share in now.items():
        if prompt in before:
            was_right = before[prompt] >= RIGHT
            is_right = share >= RIGHT
            became_right.append(is_right and not was_right)
            became_wrong.append(was_right and not is_right)
    return {
        "became right since the evaluation before": mean(became_right),
        "became wrong since the evaluation before": mean(became_wrong),
    }


# ---------------------------------------------------------------- what a page shows of a run

def distinct(items: Iterable[T]) -> list[T]:
    """The items without repetitions, in order of first appearance."""
    return list(dict.fromkeys(items))


def thinned(items: list[T], most: int) -> list[T]:
    """At most this many items, evenly spaced, with the first and the last."""
    last = len(items) - 1
    if last < most:
        return items
    return [items[round(i * last / (most - 1))] for i in range(most)]


def metric_names(points: list[Point]) -> list[str]:
    """The names of all metrics in a curve. Some of them begin after its first point."""
    return distinct(name for point in points for name in point)


def curve_columns(points: list[Point], most: int) -> dict[str, list[float | None]]:
    """The numbers of a curve, by name, at no more than this many points."""
    kept = thinned(points, most)
    columns = {}
    for name in metric_names(points):
        columns[name] = [point.get(name) for point in kept]
    return columns


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it's longer than this many characters."""
    half = most // 2
    num_left_out = len(text) - 2 * half
    if num_left_out <= 0:
        return text
    return f"{text[:half]} ... {num_left_out} left out ... {text[-half:]}"


def part_names(evaluations: list[Groups]) -> list[str]:
    """The parts of the reward that any of these answers have."""
    names: dict[str, None] = {}
    for groups in evaluations:
        for group in groups.values():
            for answer in group:
                names.update(dict.fromkeys(answer.parts))
    return list(names)


@dataclass
class Layout:
    """What a page has room for, and the numbers that represent questions and texts in it."""

    limits: Limits
    num_points: int  # of a curve
    questions: dict[str, int]  # the number of each question, by its prompt
    kept: set[int]  # the questions whose answers are shown
    texts: dict[str, int]  # the number of each text, which the page stores only once


def answer_row(answer: Answer, parts: list[str], layout: Layout) -> list:
    """An answer as the page stores it, with the number of its text instead of the text."""
    text = shortened(answer.completion, layout.limits.characters)
    return [
        layout.texts.setdefault(text, len(layout.texts)),
        answer.solved,
        answer.reward,
        [answer.parts.get(part) for part in parts],
        int(answer.truncated),
        answer.completion_length,
    ]


def shown_run(run: RunData, layout: Layout) -> dict[str, Any]:
    """A run as the page stores it. The texts of its answers are added to the layout."""
    steps = thinned(list(run.evaluations), layout.limits.evaluations)
    evaluations = [run.evaluations[step] for step in steps]
    parts = part_names(evaluations)
    shares = {}
    answers = {}
    for prompt in distinct(prompt for groups in evaluations for prompt in groups):
        question = layout.questions[prompt]
        shares[question] = []
        rows_of_evaluations = []
        for groups in evaluations:
            group = groups.get(prompt, [])  # Not every evaluation asked this question.
            shares[question].append(mean([answer.solved for answer in group]))
            if question in layout.kept:
                rows = [answer_row(answer, parts, layout) for answer in group]
                rows_of_evaluations.append(rows)
        if question in layout.kept:
            answers[question] = rows_of_evaluations
    return {
        "name": run.name,
        "command": run.command,
        "steps": steps,
        "parts": parts,
        "settings": [f"{key}: {json.dumps(value)}" for key, value in run.settings.items()],
        "curves": [curve_columns(points, layout.num_points) for points in run.curves],
        "code_changes": run.code_changes,
        "shares": shares,
        "answers": answers,
    }


# ---------------------------------------------------------------- the page

def labels(prompts: list[str]) -> list[str]:
    """The words of each prompt, without the words that all prompts begin and end with."""
    texts = [prompt.split() for prompt in prompts]
    reversed_texts = [words[::-1] for words in texts]
    num_before = len(os.path.commonprefix(texts))
    num_after = len(os.path.commonprefix(reversed_texts))
    found = []
    for words in texts:
        own_words = words[num_before:len(words) - num_after]
        label = " ".join(own_words or words)
        found.append(label[:200])
    return found


def differing_settings(runs: list[RunData]) -> list[list[str]]:
    """Rows of a key and its value in each run, for the settings that differ."""
    rows = []
    for key in distinct(key for run in runs for key in run.settings):
        if key in OWN_SETTINGS:
            continue
        values = [json.dumps(run.settings.get(key)) for run in runs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return rows


def code_diff(name: str, first: RunData, run: RunData) -> list[str]:
    """The unified diff of a file between two runs, with no lines if it's the same in both."""
    diff = difflib.unified_diff(
        first.code[name],
        run.code[name],
        f"{first.name}/{name}",
        f"{run.name}/{name}",
        lineterm="",
    )
    return list(diff)


def shown_diff(lines: list[str]) -> str:
    """A diff as the page shows it: its first lines, and how many more there are."""
    shown = [shortened(line, MOST_DIFF_CHARACTERS) for line in lines[:MOST_DIFF_LINES]]
    num_left_out = len(lines) - len(shown)
    if num_left_out > 0:
        shown.append(f"... lines left out: {num_left_out:,}")
    return "\n".join(shown)


def differing_code(runs: list[RunData]) -> tuple[list[list[str]], list[tuple[int, str, str]]]:
    """Rows like the ones for differing settings, for the files of code, and the diffs behind them.

    A diff comes with the number of its run, which is compared with the first run that has a copy,
    and with the name of the file.
    """
    rows = []
    diffs = []
    for name in CODE_FILES:
        copies = [run.code.get(name) for run in runs]
        if all(copy == copies[0] for copy in copies):
            continue
        first = next(run for run in runs if name in run.code)
        row = [name]
        for number, run in enumerate(runs):
            diff = code_diff(name, first, run) if name in run.code else []
            if name not in run.code:
                row.append("not known")
            elif run is first:
                row.append(f"{len(run.code[name]):,} lines")
            elif not diff:
                row.append(f"as in {first.name}")
            else:
                body = diff[2:]  # without the names of both files
                num_added = sum(line.startswith("+") for line in body)
                num_removed = sum(line.startswith("-") for line in body)
                row.append(f"differs: +{num_added} -{num_removed} lines")
                diffs.append((number, name, shown_diff(diff)))
        rows.append(row)
    return rows, diffs


def points_per_curve(runs: list[RunData]) -> int:
    """How many points each curve may have, so that all curves fit the page."""
    num_curves = 0
    for run in runs:
        for points in run.curves:
            num_curves += len(metric_names(points))
    return max(20, MOST_NUMBERS // max(1, num_curves))


def left_out(runs: list[RunData], layout: Layout) -> list[str]:
    """What the page lacks, in words."""
    limits = layout.limits
    most_steps = max(len(run.curves[0]) for run in runs)
    most_evaluations = max(len(run.evaluations) for run in runs)
    lines = [run.damage for run in runs if run.damage]
    for what, there, shown in [
        ("steps of a curve", most_steps, layout.num_points),
        ("evaluations' answers", most_evaluations, limits.evaluations),
        ("questions' answers", len(layout.questions), limits.questions),
    ]:
        if there > shown:
            lines.append(f"{there - shown:,} of {there:,} {what}, evenly")
    return lines


def as_script(data: dict[str, Any]) -> str:
    """JSON that can be put into a script of the page, because nothing in it can end the script."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def page(runs: list[RunData]) -> str:
    """one_run_page.html with the data of these runs in it."""
    template = TEMPLATE.read_text(encoding="utf-8")
    prompts = distinct(
        prompt for run in runs for groups in run.evaluations.values() for prompt in groups)
    questions = {prompt: number for number, prompt in enumerate(prompts)}
    all_labels = labels(prompts)
    num_points = points_per_curve(runs)
    code_rows, diffs = differing_code(runs)
    differs = differing_settings(runs) + code_rows
    for limits in LIMITS:
        kept = thinned(list(questions.values()), limits.questions)
        layout = Layout(limits, num_points, questions, set(kept), texts={})
        data = {
            "runs": [shown_run(run, layout) for run in runs],
            "prompts": {number: [all_labels[number], prompts[number]] for number in kept},
            "texts": list(layout.texts),
            "differs": differs,
            "diffs": diffs,
            "right": RIGHT,
            "left_out": left_out(runs, layout),
        }
        text = as_script(data)
        if len(template.encode()) + len(text) <= MOST_BYTES:
            return template.replace("DATA", text, 1)
    raise UserError(f"{len(runs)} runs are too many for a page of {MOST_BYTES:,} bytes: name fewer")


def main(arguments: list[str]) -> int:
    """Writes the page, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders, like runs/<name>")
    parser.add_argument("--out", type=Path, default=Path("one_run.html"))
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
        options.out.write_text(page(runs), encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
