"""Shows one update: which tokens of which answers became more likely, and whether they should have.

    .venv/bin/python examples/one_step.py
        takes the first question of a run whose answers differ in reward, and writes one_step.html
    .venv/bin/python examples/one_step.py --model runs/<name>/best 3 7 25 = 68 training.seed=1
        takes a different model, your own question, and any key of config.yaml
    .venv/bin/python examples/one_step.py --all 20
        writes no page, but prints means of the same numbers over 20 questions, as a line of JSON

This file uses main.py as a library. `one_step` is its `training_step` for one group of answers, at
the full learning rate. The page is one_step_page.html with the numbers filled in.
"""

import argparse
import copy
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import ask  # It's next to this file. It makes main.py importable, and says what's being loaded.
import torch
from silent import NoFolder, SilentLog
from transformers import PreTrainedTokenizerBase

import main
from machinery.errors import UserError, as_user_error, shortened, visible
from machinery.metrics import MOVED, change_metrics
from machinery.model import make_sampler, refresh_sampler
from machinery.passes import measure_in_batches, store_in_answers
from machinery.ranks import join, random_seed
from machinery.settings import Config, load_config
from main import Run, Trajectory

TEMPLATE = Path(__file__).with_name("one_step_page.html")
NUMBERS = ("change_as_meant", "change_rewarded", "change_punished")
MOST_TRIES = 50  # groups in a row without a signal
MOST_BYTES = 300_000  # of a page
# A page has at most this many tokens of all answers, and this many characters of a question. We
# use the first number whose page is small enough.
MOST_TOKENS = (8192, 4096, 2048, 1024, 512, 256, 128, 64)
SHOWN_ANSWERS = 4  # in a column of the page


# ---------------------------------------------------------------- a run of one step

def prepare(config: Config) -> Run:
    """Returns a run without a folder or a log, at the full learning rate."""
    if config.training.learning_type == "distill":
        raise UserError("training.learning_type=distill: this page shows what rewards do. Add "
                        "training.learning_type=grpo training.teacher=null "
                        "'training.k_best_of_n=[8,8]'")
    training = config.training.model_copy(update={"warmup_steps": 0, "decay_steps": None})
    config = config.model_copy(update={"training": training})
    # The learning rate of step 0 is 0.
    return main.prepare(config, NoFolder(step=1), SilentLog())


class Place(NamedTuple):
    """Where in training a group of answers is. The random numbers of its answers depend on it."""

    rows: list[dict]  # the questions of the step
    step: int
    index: int        # of the group's question among the questions of the step


def sampled(run: Any, rows: list[dict], step: int) -> list[tuple[list, list]]:
    """Samples a group of answers for each row. Returns each group, and those of its answers that
    count in the loss.

    The random numbers are the ones of this step of training. So if something differs when it's
    called again, it differs because of an update."""
    training = run.config.training
    torch.manual_seed(random_seed(training.seed, step, "train"))
    questions = [main.make_question(run, row) for row in rows]
    groups = main.rollout(run, questions, training.group_size, run.config.sampling, "sample")
    return [(group, main.compute_advantages([group], training)) for group in groups]


def groups_with_signal(run: Run, row: dict | None) -> Iterator[tuple[list, list, Place]]:
    """Yields groups that something can be learned from, in the order in which training meets them.
    With a row, all groups answer this row. A group comes with the answers of it that count in the
    loss, and with its place."""
    num_tries = 0
    for run.step in itertools.count(1):
        rows = [row] if row else [question.row for question in main.questions(run)]
        for index, (group, counted) in enumerate(sampled(run, rows, run.step)):
            num_tries += 1
            if has_signal(run, counted):
                num_tries = 0
                yield group, counted, Place(rows, run.step, index)
            if num_tries == MOST_TRIES:
                raise UserError(
                    f"in each of {MOST_TRIES} groups in a row, all answers earned the same reward, "
                    "so there is nothing to learn: ask something easier or harder, or a different "
                    "model")


def has_signal(run: Run, answers: list[Trajectory]) -> bool:
    for answer in answers:
        if answer.token_advantages.any() and main.is_learned_from(answer, run.config.training):
            return True
    return False


def measure(run: Run, answers: list[Trajectory], name: str) -> None:
    """Stores the log-probabilities and entropies of all tokens in the answers, under this name.
    Answers that nothing is learned from change along with the others, so it measures them too."""
    batches = measure_in_batches(run.policy.module, answers, run.config.training)
    for batch, log_probs, entropies in batches:
        if not log_probs.isfinite().all():
            raise UserError(f"{name} the update log p is not finite: lower training.learning_rate")
        store_in_answers(batch, **{name: log_probs, f"{name}_entropies": entropies})


def one_step(run: Run, group: list[Trajectory], counted: list[Trajectory]) -> dict[str, float]:
    """Makes one update with a group, and returns how its tokens have changed. After that every
    answer has the log-probabilities `before` and `after`."""
    measure(run, group, "before")
    main.learn(run, counted)
    measure(run, group, "after")
    learned = [answer for answer in counted if answer.old_log_probs is not None]
    return change_metrics(run.policy.module, [group], learned, run.config.training)


# ---------------------------------------------------------------- many groups

def average(run: Run, num_groups: int) -> dict[str, float | None]:
    """Returns mean and standard deviation of the numbers over this many groups. Each group updates
    the model as loaded."""
    weights = copy.deepcopy(run.model.state_dict())
    optimizer_state = copy.deepcopy(run.optimizer.state_dict())
    found = []
    groups = groups_with_signal(run, None)
    for group, counted, _ in itertools.islice(groups, num_groups):
        found.append(one_step(run, group, counted))
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # It keeps what it's given.
        refresh_sampler(run.sampler, run.model)
    means: dict[str, float | None] = {"groups": num_groups}
    for name in NUMBERS:
        values = [numbers[name] for numbers in found if not math.isnan(numbers[name])]
        means[name] = round(fmean(values), 4) if values else None
        means[f"{name}_std"] = round(stdev(values), 4) if len(values) > 1 else None
    return means


# ---------------------------------------------------------------- what the page shows

def texts_of_tokens(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Returns what each token adds to the text. A token that ends inside a character adds nothing,
    and a later token adds the whole character."""
    texts = []
    num_done = 0  # how many tokens have their text complete
    for end in range(1, len(ids) + 1):
        start = max(0, num_done - 4)
        before = tokenizer.decode(ids[start:num_done], clean_up_tokenization_spaces=False)
        longer = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        ends_within = longer.endswith("\N{REPLACEMENT CHARACTER}")
        if ends_within and end < len(ids) and end - num_done < 8:
            texts.append("")
        else:
            texts.append(longer[len(before):])
            num_done = end
    return texts


def describe_parts(answer: Trajectory) -> str:
    parts = [f"{name} {value:.2f}" for name, value in answer.reward_parts.items()]
    return shortened(visible(", ".join(parts)), 200)


def verdict(run: Run, answer: Trajectory) -> str:
    if run.config.task.name == "countdown":
        said = ask.verdict(answer)
    else:
        solved = run.task.SOLVED
        said = f"{solved} {answer.reward_parts[solved]:.2f}"
    return shortened(visible(said), 100)


def shown_tokens(run: Run, answer: Trajectory, most: int) -> list[list]:
    """Returns text, log p before, its change and entropy for at most this many tokens of an answer.
    A text without numbers represents the ones left out."""
    columns = zip(
        texts_of_tokens(run.tokenizer, answer.completion_ids),
        answer.before.tolist(),
        (answer.after - answer.before).tolist(),
        answer.before_entropies.tolist(),
        strict=True)
    tokens = []
    for text, before, change, entropy in columns:
        tokens.append([
            shortened(visible(text), 40), round(before, 5), round(change, 6), round(entropy, 4)])
    num_left_out = len(tokens) - most
    if num_left_out > 0:
        half = most // 2
        gap = [f" ... {num_left_out} left out ... ", None, None, None]
        tokens[half:half + num_left_out] = [gap]
    return tokens


def shown_answer(run: Run, answer: Trajectory, most: int) -> dict[str, Any]:
    """Returns an answer as the page stores it, with at most this many of its tokens."""
    change = answer.after - answer.before  # (tokens,)
    has_moved = change.abs() > MOVED
    is_learned = answer.old_log_probs is not None and bool(answer.token_advantages.any())
    share_as_meant = None
    if is_learned and has_moved.any():
        is_as_meant = change * answer.token_advantages.to(change) > 0
        share_as_meant = float(is_as_meant[has_moved].float().mean())
    return {
        "reward": answer.reward,
        "parts": describe_parts(answer),
        "advantage": float(answer.token_advantages.mean()),  # By default all tokens have the same.
        "verdict": verdict(run, answer),
        "length": answer.num_tokens,
        "change": float(change.mean()),
        "as_meant": share_as_meant,
        "learned": is_learned,
        "tokens": shown_tokens(run, answer, most),
    }


def shown_column(run: Run, title: str, answers: list[Trajectory], most: int) -> dict[str, Any]:
    """Returns a column of the page: how a model at another time answers the same question."""
    num_right = 0
    for answer in answers:
        num_right += answer.reward_parts[run.task.SOLVED] >= 1
    shown = []
    for answer in answers[:SHOWN_ANSWERS]:
        text = shortened(visible(answer.completion.strip()), most)
        shown.append({"text": text, "verdict": verdict(run, answer)})
    return {"title": f"{title}: {num_right} of {len(answers)} right", "answers": shown}


def page(
    run: Run,
    answers: list[Trajectory],
    numbers: dict[str, float | None],
    columns: list[tuple[str, list[Trajectory]]],
    settings: str,
) -> str:
    """Returns one_step_page.html with the numbers filled in. It shows long answers only in part."""
    template = TEMPLATE.read_text(encoding="utf-8")
    training = run.config.training
    rule = training.scale_rewards
    num_best = max(1, len(answers) // 4)  # how many the page counts as the best, if you choose sil
    if training.learning_type == "sil":
        rule = "sil"
        num_best = training.k_best_of_n[0]
    prompt = answers[0].question.row["prompt"]
    for most in MOST_TOKENS:
        most_of_answer = most // len(answers)
        text = as_script({
            "settings": settings,
            "question": shortened(visible(prompt), most),
            **numbers,
            "rounding": MOVED,
            "rule": rule,
            "k": num_best,
            "normalizer": training.loss_normalizer,
            "L": training.max_new_gen_tokens,
            "answers": [shown_answer(run, answer, most_of_answer) for answer in answers],
            "again": [shown_column(run, *column, most // 8) for column in columns],
        })
        if len(template) + len(text) <= MOST_BYTES:
            return template.replace("DATA", text, 1)
    raise UserError(f"{len(answers)} answers are too many for a page: lower training.k_best_of_n")


def as_script(data: dict[str, Any]) -> str:
    """Returns JSON that can be put into a script of the page. Nothing in it can end the script."""
    text = json.dumps(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


# ---------------------------------------------------------------- the command

def answers_of_other_model(run: Run, model: Path, place: Place) -> list[Trajectory]:
    """Asks a different model the same question, with the same settings and random numbers."""
    other = ask.load(model)
    other.config = run.config
    other.task = run.task
    other.sampler = make_sampler(other.model, run.config)
    group, _ = sampled(other, place.rows, place.step)[place.index]
    return group


def write_page(run: Run, row: dict | None, trained: Path | None, out: Path) -> None:
    config = run.config
    answers, counted, place = next(groups_with_signal(run, row))
    numbers: dict[str, float | None] = {}
    for name, value in one_step(run, answers, counted).items():
        if name in NUMBERS:
            numbers[name] = None if math.isnan(value) else value
    updated, _ = sampled(run, place.rows, place.step)[place.index]
    columns = [("before", answers), ("after this one update", updated)]
    if trained:
        columns.append((str(trained), answers_of_other_model(run, trained, place)))
    settings = (
        f"{config.model.name}, one update at learning rate {config.training.learning_rate:g} on "
        f"{len(answers)} answers, sampled at temperature {config.sampling.temperature:g}. "
        f"training.seed {config.training.seed}, step {place.step}, question {place.index + 1}")
    with as_user_error(f"--out {out} cannot be written", (OSError,)):
        out.write_text(page(run, answers, numbers, columns, settings), encoding="utf-8")
    told = []
    for name, value in numbers.items():
        told.append(f"{name} none" if value is None else f"{name} {value:.4f}")
    print(", ".join(told))
    print(f"{out} shows every token: open it in a browser")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Returns the options, with their words split into `keys` and `question`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("tiny/model"), help="a folder")
    parser.add_argument(
        "--trained", type=Path,
        help="another model for a third column; by default best/ of the newest Countdown run")
    parser.add_argument(
        "--all", type=int, metavar="N", help="print means over N questions, and write no page")
    parser.add_argument("--out", type=Path, default=Path("one_step.html"))
    parser.add_argument("words", nargs="*", metavar="3 7 25 = 68 or section.key=value")
    options = parser.parse_intermixed_args(arguments)
    options.keys = [word for word in options.words if re.match(r"\w+\.\w+=", word)]
    options.question = [word for word in options.words if word not in options.keys]
    return options


def check_options(options: argparse.Namespace) -> None:
    if (options.model / "adapter_config.json").exists():
        raise UserError(f"{options.model} holds adapters: first turn them into a plain model, as "
                        "described in docs/run.md under After LoRA")
    if options.all is not None and (options.all < 1 or options.question):
        raise UserError("--all N averages over training questions: set N to 1 or more, and ask no "
                        "question")


def start(options: argparse.Namespace) -> None:
    """Carries out the command line. A user's mistake ends in a UserError."""
    check_options(options)
    row = ask.read_question(options.question) if options.question else None
    model = f"model.name={json.dumps(str(options.model))}"
    config = load_config([*ask.settings_of(options.model), "model.device=null", model,
                          *options.keys])
    is_countdown = config.task.name == "countdown"
    if row and not is_countdown:
        words = " ".join(options.question)
        raise UserError(f"{words!r} is a Countdown question, but task.name is "
                        f"{config.task.name!r}: leave it out to use a training question")
    join()
    run = prepare(config)
    if options.all is not None:
        print(json.dumps(average(run, options.all)))
        return
    trained = options.trained
    if trained is None and is_countdown:
        trained = next(iter(ask.best_models()), None)
    write_page(run, row, trained, options.out)


def command(arguments: list[str]) -> int:
    """Runs the command line, and returns the exit code."""
    options = parse_arguments(arguments)
    try:
        start(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
