"""Asks a trained model, and says what the grader thinks of each of its answers.

    .venv/bin/python examples/ask.py 3 7 25 = 68
        best/ of the newest run of Countdown
    .venv/bin/python examples/ask.py --model tiny/model --answers 8 3 7 25 = 68
        any model, here the one before training
"""

import argparse
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import machinery  # noqa: F401, I001  says what is being loaded, before it is
import transformers
from tqdm import tqdm

import countdown
import main
from machinery.settings import read_yaml


def settings_of(model: Path) -> tuple[list[str], str]:
    """The run that this best/ belongs to: its settings, for `load_config`, and what it was about.
    A model of no run may be asked as well."""
    settings = model.resolve().parent / "config.yaml"
    if not settings.exists():
        return [], "countdown"
    return ["--config", str(settings)], read_yaml(settings)["task.name"]


def bests() -> list[Path]:
    """best/ of the runs of Countdown, the newest first."""
    found = sorted(Path("runs").glob("*/best"), key=lambda path: path.stat().st_mtime)
    return [best for best in reversed(found) if settings_of(best)[1] == "countdown"]


def newest_best() -> Path:
    if not (found := bests()):
        raise main.UserError("no run of Countdown in runs/ has a best/ yet: train first, or name a "
                             "model with --model")
    return found[0]


def load(path: Path) -> SimpleNamespace:
    """What `main.sample` and `main.score` need of a model, asked as it was while it learned."""
    settings, _ = settings_of(path)
    adapters = path / "adapter_config.json"
    name = (json.loads(adapters.read_text())["base_model_name_or_path"] if adapters.exists()
            else str(path))
    config = main.load_config([
        *settings, f"model.name={json.dumps(name)}", "model.lora_rank=0",
        "model.precision=float32", "model.attention=null", "training.shard=false"])
    model, tokenizer = main.load_model(config)
    if adapters.exists():
        model.load_adapter(str(path))
    return SimpleNamespace(config=config, task=countdown, tokenizer=tokenizer,
                           sampler=main.make_sampler(model, tokenizer, config))


def read_question(words: list[str]) -> dict:
    *numbers, equals, target = words if len(words) > 3 else [*words, "", ""]
    if (equals != "=" or not all(word.isdigit() for word in numbers)
            or not target.lstrip("-").isdigit()):
        raise main.UserError(f"{' '.join(words)!r}: write two or more numbers, = and the number to "
                             "make of them, like 3 7 25 = 68")
    nums = [int(number) for number in numbers]
    return {"nums": nums, "target": int(target),
            "prompt": countdown.generate_prompt(nums, int(target))}


def verdict(answer: main.Trajectory) -> str:
    if answer.truncated:
        return f"cut off after {len(answer.completion_ids)} tokens"
    if countdown.reward_function(answer.completion, answer.row)["answer"] == 1.0:
        return "right"
    said = (answer.completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
            if "<answer>" in answer.completion else "")
    value = countdown.evaluate_expression(said.partition("=")[0])
    if value is None:
        return "wrong: no answer that can be computed"
    if ((used := sorted(map(int, re.findall(r"\d+", said.partition("=")[0]))))
            != sorted(answer.row["nums"])):
        return f"wrong: it uses {', '.join(map(str, used))}"
    return (f"wrong: {said} makes {value}" if value != answer.row["target"]
            else "wrong: right, but not written as asked")


def ask(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path,
                        help="a folder, or a hub id; else best/ of the newest Countdown run")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("question", nargs="+", help="numbers, =, and the number to make of them")
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        row = read_question(options.question)
        path = options.model or newest_best()
        asked = load(path)
        main.random_stream(asked.config.training.seed, 0, f"ask {options.question}")
        answers = main.sample(asked, [row], options.answers, tqdm(disable=True))
    except main.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path}\n")
    if (task_name := settings_of(path)[1]) != "countdown":
        print(f"note: this model was trained on {task_name}, and not on Countdown\n")
    print(row["prompt"])
    for number, answer in enumerate(answers, start=1):
        print(f"\n--- answer {number}: {verdict(answer)}\n{answer.completion}")
    right = sum(verdict(answer) == "right" for answer in answers)
    print(f"\n{right} of {len(answers)} right")
    return 0


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1:]))
