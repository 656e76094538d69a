"""Runs, seen: how they rose, what they answered to the same questions, and what sets them apart.

    .venv/bin/python examples/one_run.py runs/<name>
        one run, finished or not -> one_run.html, which opens from the disk and asks nobody anything
    .venv/bin/python examples/one_run.py runs/<name> runs/<another> --out compared.html
        several over each other, with the settings that differ

It reads what a run keeps, and needs neither its model nor PyTorch. Where that is too much for a
page, points of curves, evaluations and questions are left out evenly, and the page says so.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import yaml

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2_000_000  # of a page
MOST_NUMBERS = 80_000  # in all curves
# At most so many questions, evaluations of each, and characters of an answer: the first that fit.
AMOUNTS = [(4096, 200, 4000), (512, 50, 4000), (256, 25, 4000), (128, 25, 2000), (96, 13, 2000),
           (64, 13, 2000), (48, 13, 1000), (32, 13, 1000), (32, 9, 600), (16, 9, 600),
           (16, 5, 300), (8, 5, 200), (4, 3, 100)]
OF_ITS_OWN = ("run.name", "run.dir", "run.resume", "run.resume_anyway")  # not of the experiment
FIELDS = {"step": int, "question": int, "prompt": str, "completion": str, "solved": float,
          "reward": float, "truncated": bool, "completion_length": int}  # others: reward parts
RIGHT = 0.5  # of the answers to a question, for it to count as solved


class Mistake(Exception): ...  # of whoever asks for a page: one line, exit code 2


# ---------------------------------------------------------------- what a run keeps

def flatten(path: Path) -> dict[str, object]:
    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {f"{name}.{key}": value for name, keys in sections.items()
                for key, value in keys.items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise Mistake(f"{path} is not there, or not the settings of a run "
                      f"({type(error).__name__}): give folders of runs, like runs/<name>") from None


def read_lines(path: Path, check: Callable) -> tuple[list[dict], int]:
    """The objects of a file, which may be being written, or cut; and how many lines are none."""
    found, bad = [], 0
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    found.append(check(json.loads(line)))
                except Exception:  # noqa: BLE001, whatever is wrong with it
                    bad += 1
    return found, bad


def number(value) -> float | None:  # as the page has it: JSON knows neither nan nor inf
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def entry_of(line: dict) -> dict:
    return {"step": int(line.pop("step")), **{name: number(line[name]) for name in line}}


def sample_of(line: dict) -> dict:
    known = {name: kind(line.pop(name)) for name, kind in FIELDS.items()}
    return {**known, "solved": number(known["solved"]) or 0.0,
            "parts": {name: number(line[name]) for name in line}}


def read_run(folder: Path) -> dict:
    settings, spent = flatten(folder / "config.yaml"), 0.0
    entries, bad = read_lines(folder / "metrics.jsonl", entry_of)
    samples, lost = read_lines(folder / "samples.jsonl", sample_of)
    steps, evaluations, answers = [], [], {}  # answers: {step: {prompt: [answer, ...]}}
    for entry in entries:
        spent += sum(entry[name] or 0 for name in entry if name.startswith("seconds/"))
        (evaluations if "eval/solved" in entry else steps).append({"spent": number(spent)} | {
            name.removeprefix("eval/"): entry[name] for name in entry})
    seconds = {each["step"]: each["spent"] for each in evaluations}
    for sample in samples:
        group = answers.setdefault(sample["step"], {}).setdefault(sample["prompt"], [])
        group.append(sample)
    ranks = None  # before the first checkpoint
    for path in sorted(folder.glob("checkpoints/step-*/state.json")):
        with suppress(OSError, ValueError, TypeError, LookupError):
            ranks = int(json.loads(path.read_text(encoding="utf-8"))["num_ranks"])
    about = [{"step": step, "spent": seconds.get(step, 0.0), **numbers}
             for step, numbers in about_answers(answers).items()]
    name = str(settings.get("run.name") or folder.resolve().name)
    return {"name": name, "settings": settings | {"ranks": ranks}, "answers": answers,
            "command": command(settings, ranks), "curves": [steps, evaluations, about],
            "lost": f"{bad + lost} damaged or older lines of {name}" if bad + lost else ""}


def command(settings: dict, ranks: int | None) -> str:
    """That makes this run again, whatever device it finds."""
    defaults = flatten(ROOT / "config.yaml")
    start = ["python"] if ranks == 1 else ["torchrun", f"--nproc-per-node={ranks or 'RANKS'}"]
    keys = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=math.inf)}"
            for key, value in settings.items() if key not in defaults or value != defaults[key]]
    return shlex.join([*start, "main.py", *(key.removesuffix("...\n").strip() for key in keys)])


# ---------------------------------------------------------------- what its answers are like

def share_right(group: list[dict]) -> float:
    return fmean(answer["solved"] for answer in group)


def mean(values) -> float | None:
    return number(fmean(values)) if (values := list(values)) else None


def about_answers(answers: dict[int, dict[str, list[dict]]]) -> dict[int, dict]:
    """Of each evaluation, by step: numbers that only the answers themselves can tell."""
    found: dict[int, dict] = {}
    begun = {prompt: share_right(group)
             for prompt, group in next(iter(answers.values()), {}).items()}
    for step, groups in answers.items():
        every = [answer for group in groups.values() for answer in group]
        now = {prompt: share_right(group) for prompt, group in groups.items()}
        found[step] = {
            "length of right answers": mean(answer["completion_length"] for answer in every
                                            if answer["solved"] >= 1),
            "length of wrong answers": mean(answer["completion_length"] for answer in every
                                            if answer["solved"] <= 0),
            "distinct answers to a question, as a share": mean(
                len({answer["completion"] for answer in group}) / len(group)
                for group in groups.values())}
        for name, belongs in (("none", lambda share: share <= 0), ("all", lambda share: share >= 1),
                              ("some", lambda share: 0 < share < 1)):
            found[step][f"solved, of questions that began with {name} right"] = mean(
                now[prompt] for prompt in now if prompt in begun and belongs(begun[prompt]))
    for (_, before), (step, after) in pairwise(answers.items()):
        both = [tuple(share_right(groups[prompt]) >= RIGHT for groups in (before, after))
                for prompt in after if prompt in before]
        for word, change in (("right", (False, True)), ("wrong", (True, False))):
            found[step][f"became {word} since the evaluation before"] = mean(
                each == change for each in both)
    return found


# ---------------------------------------------------------------- the page

def thinned(items: list, most: int) -> list:
    """At most so many, evenly, with the first and the last."""
    last = len(items) - 1
    return items if last < most else [items[round(i * last / (most - 1))] for i in range(most)]


def as_series(entries: list[dict], most: int) -> dict:
    kept = thinned(entries, most)
    return {name: [entry.get(name) for entry in kept]
            for name in dict.fromkeys(name for entry in entries for name in entry)}


def shown_run(run: dict, places: dict[str, int], kept: set[int], texts: dict[str, int],
              amounts: tuple, points: int) -> dict:
    steps = thinned(list(run["answers"]), amounts[1])
    groups = [run["answers"][step] for step in steps]
    parts = list(dict.fromkeys(part for each in groups for group in each.values()
                               for answer in group for part in answer["parts"]))

    def shown(answer: dict) -> list:
        text, half = answer["completion"], amounts[2] // 2
        if len(text) > 2 * half:
            text = f"{text[:half]} ... {len(text) - 2 * half} left out ... {text[-half:]}"
        return [texts.setdefault(text, len(texts)), answer["solved"], number(answer["reward"]),
                [answer["parts"].get(part) for part in parts], int(answer["truncated"]),
                answer["completion_length"]]

    own = dict.fromkeys(prompt for each in groups for prompt in each)  # its questions
    return {"name": run["name"], "command": run["command"], "steps": steps, "parts": parts,
            "settings": [f"{key}: {json.dumps(run['settings'][key])}" for key in run["settings"]],
            "curves": [as_series(entries, points) for entries in run["curves"]],
            "shares": {places[prompt]: [mean(answer["solved"] for answer in each.get(prompt, []))
                                        for each in groups] for prompt in own},
            "answers": {places[prompt]: [[shown(answer) for answer in each.get(prompt, [])]
                                         for each in groups]
                        for prompt in own if places[prompt] in kept}}


def labels(prompts: list[str]) -> list[str]:
    """Of each question what it does not share with the others."""
    words = [prompt.split() for prompt in prompts]
    before = len(os.path.commonprefix(words))
    after = len(os.path.commonprefix([each[::-1] for each in words]))
    return [" ".join(each[before:len(each) - after] or each)[:200] for each in words]


def page(runs: list[dict]) -> str:
    """one_run_page.html with the numbers put in, as JSON in which nothing can end the script that
    holds it."""
    template = Path(__file__).with_name("one_run_page.html").read_text(encoding="utf-8")
    prompts = list(dict.fromkeys(prompt for run in runs for groups in run["answers"].values()
                                 for prompt in groups))
    places, names = {prompt: place for place, prompt in enumerate(prompts)}, labels(prompts)
    num_series = sum(len({name for entry in entries for name in entry})
                     for run in runs for entries in run["curves"])
    points = max(20, MOST_NUMBERS // max(1, num_series))
    keys = dict.fromkeys(key for run in runs for key in run["settings"] if key not in OF_ITS_OWN)
    differs = [[key, *(json.dumps(run["settings"].get(key)) for run in runs)] for key in keys]
    most = [max(len(run["curves"][0]) for run in runs), max(len(run["answers"]) for run in runs)]
    for amounts in AMOUNTS:
        kept = set(thinned(list(range(len(prompts))), amounts[0]))
        left_out = [run["lost"] for run in runs if run["lost"]]
        left_out += [f"{there - shown:,} of {there:,} {what}, evenly" for what, there, shown in (
            ("steps of a curve", most[0], points), ("evaluations' answers", most[1], amounts[1]),
            ("questions' answers", len(prompts), amounts[0])) if there > shown]
        texts: dict[str, int] = {}  # as many are said again and again
        data = {"runs": [shown_run(run, places, kept, texts, amounts, points) for run in runs],
                "prompts": {place: [names[place], prompts[place]] for place in sorted(kept)},
                "texts": list(texts),
                "differs": [row for row in differs if len(set(row[1:])) > 1],
                "right": RIGHT, "left_out": left_out}
        text = json.dumps(data, separators=(",", ":"))
        text = text.replace("<", "\\u003c").replace(">", "\\u003e")
        if len(template.encode()) + len(text) <= MOST_BYTES:
            return template.replace("DATA", text, 1)
    raise Mistake(f"{len(runs)} runs are too many for a page of {MOST_BYTES:,} bytes: give fewer")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders, like runs/<name>")
    parser.add_argument("--out", type=Path, default=Path("one_run.html"))
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(folder) for folder in options.runs]
        options.out.write_text(page(runs), encoding="utf-8")
    except (Mistake, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
