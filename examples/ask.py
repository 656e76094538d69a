"""Asks a model a Countdown question, and shows what the grader says about each answer.

    .venv/bin/python examples/ask.py 3 7 25 = 68
        asks the best model of the newest Countdown run
    .venv/bin/python examples/ask.py --model tiny/model 3 7 25 = 68 --answers 8
        asks any model for 8 answers, here the tiny model before training
"""

import argparse
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machinery  # noqa: F401, I001  Says what's being loaded, before that takes its time.
import torch

import countdown
from silent import SilentLog
from machinery.errors import UserError
from machinery.model import find_stop_ids, load_model, make_sampler
from machinery.ranks import random_seed
from machinery.settings import load_config, read_yaml
from main import Trajectory, make_question, sample

# The settings of a model's run are for training it. These are for asking it.
FOR_ASKING = ["model.lora_rank=0", "model.precision=float32", "model.attention=null",
              "model.device=null", "training.shard=false"]


# ---------------------------------------------------------------- the model

def settings_file(model: Path) -> Path | None:
    """Returns the config.yaml of the run whose best model this is, or None for any other model."""
    path = model.resolve().parent / "config.yaml"
    return path if path.exists() else None


def settings_of(model: Path) -> list[str]:
    """Returns arguments for `load_config`: the settings of the run whose best model this is."""
    path = settings_file(model)
    return ["--config", str(path)] if path else []


def task_of(model: Path) -> str:
    """Returns the task that a model was trained on. Without a run, we assume Countdown."""
    path = settings_file(model)
    return read_yaml(path)["task.name"] if path else "countdown"


def best_models() -> list[Path]:
    """Returns the folders best/ of all Countdown runs in runs/, newest first."""
    folders = sorted(Path("runs").glob("*/best"), key=modification_time, reverse=True)
    return [folder for folder in folders if task_of(folder) == "countdown"]


def modification_time(path: Path) -> float:
    return path.stat().st_mtime


def newest_best_model() -> Path:
    folders = best_models()
    if not folders:
        raise UserError("no Countdown run in runs/ has a best/ yet: train first, or name a model "
                        "with --model")
    return folders[0]


def load(path: Path) -> SimpleNamespace:
    """Returns what `sample` needs of a run, for a model with its own run's settings."""
    name = str(path)
    adapters = path / "adapter_config.json"
    if adapters.exists():
        name = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
    config = load_config([*settings_of(path), f"model.name={json.dumps(name)}", *FOR_ASKING])
    model, tokenizer = load_model(config)
    if adapters.exists():
        model.load_adapter(str(path))
    return SimpleNamespace(
        config=config,
        task=countdown,
        tokenizer=tokenizer,
        stop_ids=find_stop_ids(model, tokenizer),
        model=model,
        sampler=make_sampler(model, config),
        log=SilentLog(),
    )


# ---------------------------------------------------------------- the question and its answers

def read_question(words: list[str]) -> dict:
    """Returns the Countdown row for words like 3 7 25 = 68."""
    numbers = words[:-2]
    target = words[-1]
    is_complete = len(numbers) >= 2 and words[-2] == "="
    digits = [*numbers, target.removeprefix("-")]
    if not is_complete or not all(word.isdecimal() for word in digits):
        raise UserError(f"{' '.join(words)!r}: write two or more numbers, = and the number to "
                        "reach, like 3 7 25 = 68")
    nums = [int(number) for number in numbers]
    prompt = countdown.generate_prompt(nums, int(target))
    return {"nums": nums, "target": int(target), "prompt": prompt}


def sample_answers(model: Path, row: dict, num_answers: int) -> list[Trajectory]:
    run = load(model)
    words = [str(word) for word in (*row["nums"], "=", row["target"])]
    torch.manual_seed(random_seed(run.config.training.seed, 0, f"ask {words}"))
    return sample(run, [make_question(run, row)], num_answers, run.config.sampling)[0]


def last_expression(completion: str) -> str:
    """Returns what's inside the last <answer>, without any result stated after "="."""
    _, opened, rest = completion.rpartition("<answer>")
    expression = rest.partition("</answer>")[0] if opened else ""
    return expression.partition("=")[0].strip()


def verdict(answer: Trajectory) -> str:
    """Returns "right", or what's wrong with an answer."""
    row = answer.question.row
    if answer.is_truncated:
        return f"truncated after {answer.num_tokens} tokens"
    if countdown.reward_function(answer.completion, row)["answer"] == 1.0:
        return "right"
    expression = last_expression(answer.completion)
    value = countdown.evaluate_expression(expression)
    if value is None:
        return "wrong: no expression that can be computed"
    used = sorted(int(number) for number in re.findall(r"\d+", expression))
    if used != sorted(row["nums"]):
        return f"wrong: it uses {', '.join(str(number) for number in used)}"
    if value != row["target"]:
        return f"wrong: {expression} makes {value}"
    return "wrong: the expression is right, but the format is not"


def show(model: Path, row: dict, answers: list[Trajectory]) -> None:
    print(f"{model}\n")
    task = task_of(model)
    if task != "countdown":
        print(f"note: this model was trained on {task}, not on Countdown\n")
    print(row["prompt"])
    verdicts = [verdict(answer) for answer in answers]
    for number, answer in enumerate(answers, start=1):
        print(f"\n--- answer {number}: {verdicts[number - 1]}\n{answer.completion}")
    print(f"\n{verdicts.count('right')} of {len(answers)} right")


def ask(arguments: list[str]) -> int:
    """Carries out the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path,
        help="a folder, or an id on the Hugging Face hub; by default best/ of the newest run")
    parser.add_argument("--answers", type=int, default=4, help="how many answers; by default 4")
    parser.add_argument("question", nargs="+", help="numbers, =, and the number to reach")
    options = parser.parse_args(arguments)
    try:
        row = read_question(options.question)
        model = options.model or newest_best_model()
        answers = sample_answers(model, row, options.answers)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(model, row, answers)
    return 0


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1:]))
