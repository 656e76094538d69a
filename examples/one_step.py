"""One update, seen: which tokens of which answers became likelier, and was that what was meant?

    .venv/bin/python examples/one_step.py
        the first question of a run's first step whose answers differ in reward -> one_step.html
    .venv/bin/python examples/one_step.py --model runs/<name>/best 3 7 25 = 68 training.seed=1
        another model, a question of your own, any key of config.yaml
    .venv/bin/python examples/one_step.py --all 20
        no page, but the same numbers averaged over 20 questions, as one line of JSON

main.py is used as a library here: `one_step` is its `training_step` for one group. The page is
one_step_page.html with the numbers put in.
"""

import argparse
import copy
import itertools
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import ask  # beside this file; it puts main.py on the path, and says what is being loaded
import transformers
from tqdm import tqdm

import main
from machinery.errors import UserError, blame, shortened, visible
from machinery.metrics import MOVED, logprobs_now
from machinery.ranks import join

NUMBERS = ("moved_as_meant", "change_as_meant", "change_rewarded", "change_punished")
TRIES = 50  # groups, until one has a signal
MOST_BYTES = 300_000  # of a page
NO_BAR = tqdm(disable=True)


def prepare(config) -> main.Run:
    """What main.py's functions share, without the folder and the log of a run."""
    folder = SimpleNamespace(restore=lambda *_: (0, (0.0, 0.0)))
    log = SimpleNamespace(phase=lambda name: nullcontext(), say=lambda text: None)
    run = main.prepare(config, folder, log)
    run.optimizer.param_groups[0]["lr"] = config.training.learning_rate
    return run


def sampled(run: main.Run, rows: list[dict], step: int) -> list[tuple[list, list]]:
    """For each row its group of answers, and those of them that count in B. They are drawn with the
    random numbers of that step of training, so what differs later differs because of an update."""
    training = run.config.training
    stream, G = main.random_stream(training.seed, step, "train"), training.k_best_of_n[1]
    answers = main.sample(run, rows, G, NO_BAR)
    main.score(answers, run.task, NO_BAR)
    groups = [answers[i:i + G] for i in range(0, len(answers), G)]
    return [(group, main.compute_advantages(group, training, stream)) for group in groups]


def groups_with_signal(run: main.Run, row: dict | None):
    """Those to learn from, as training would meet them, or of one question asked again and again:
    the answers, those of them that count in B, and where they stand (rows, step, place)."""
    training, barren = run.config.training, 0
    for step in itertools.count(1):
        rows = [row] if row else main.questions(run.training_rows, step, run.config)
        for place, (answers, chosen) in enumerate(sampled(run, rows, step)):
            barren += 1
            if any(answer.advantage for answer in main.learned_from(chosen, training)):
                yield answers, chosen, (rows, step, place)
                barren = 0
            if barren == TRIES:
                raise UserError(
                    f"{TRIES} groups, and in none of them do answers differ in reward: nothing can "
                    "be learned from that; ask something easier or harder, or another model")


def look(run: main.Run, answers: list, name: str) -> None:
    """Log-probabilities and entropies of all tokens as they are now: also those of answers that
    equal the mean, which nothing is learned from, but which move with the others."""
    for batch, logprobs, entropies in logprobs_now(run, answers):
        if not logprobs.isfinite().all():
            raise UserError(f"{name} the update log p is not finite: lower training.learning_rate")
        main.hand_to_answers(batch, **{name: logprobs, f"{name}_entropies": entropies})


def one_step(run: main.Run, answers: list, chosen: list) -> dict[str, float]:
    """One update on a group, and what it did to each token: `before` and `after` in the answers."""
    look(run, answers, "before")
    main.learn(run, chosen, NO_BAR)
    look(run, answers, "after")
    return main.change_metrics(run, main.learned_from(chosen, run.config.training))


# ---------------------------------------------------------------- the page

def texts_of_tokens(tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text. One that ends inside a character adds nothing yet."""
    texts, done = [], 0  # so many tokens are in the texts
    for end in range(1, len(ids) + 1):
        before, longer = (tokenizer.decode(ids[max(0, done - 4):to]) for to in (done, end))
        if longer.endswith("\N{REPLACEMENT CHARACTER}") and done + 8 > end < len(ids):
            texts.append("")
        else:
            texts.append(longer[len(before):])
            done = end
    return texts


def verdict(run: main.Run, answer) -> str:
    said = (ask.verdict(answer) if run.config.task.name == "countdown"
            else f"{run.task.SOLVED} {answer.parts[run.task.SOLVED]:.2f}")
    return shortened(visible(said), 100)


def shown_answer(run: main.Run, answer, most: int) -> dict:
    """An answer for the page, with at most so many of its tokens."""
    learned = answer.new_logprobs is not None and answer.advantage != 0
    moved = (change := answer.after - answer.before).abs() > MOVED  # (tokens,)
    tokens = [[shortened(visible(text), 40), round(before, 5), round(by, 6), round(entropy, 4)]
              for text, before, by, entropy in zip(
                  texts_of_tokens(run.tokenizer, answer.completion_ids), answer.before.tolist(),
                  change.tolist(), answer.before_entropies.tolist())]
    if (left_out := len(tokens) - most) > 0:
        tokens[most // 2:most // 2 + left_out] = [[f" ... {left_out} left out ... ", *3 * [None]]]
    as_meant = (change * answer.advantage > 0)[moved].float().mean()
    parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
    return {"reward": answer.reward, "advantage": answer.advantage,
            "parts": shortened(visible(parts), 200), "length": len(change),
            "verdict": verdict(run, answer), "change": float(change.mean()),
            "as_meant": float(as_meant) if learned and moved.any() else None,
            "tokens": tokens, "learned": learned}


def again(run: main.Run, title: str, answers: list, most: int) -> dict:
    """The same question answered by the model at another time, for a column of the page."""
    right = sum(answer.parts[run.task.SOLVED] >= 1 for answer in answers)
    return {"title": f"{title}: {right} of {len(answers)} right", "answers": [
        {"text": shortened(visible(answer.completion.strip()), most),
         "verdict": verdict(run, answer)} for answer in answers[:4]]}


def page(run: main.Run, answers: list, numbers: dict, columns: list, settings: str) -> str:
    """one_step_page.html with the numbers put in, as JSON in which nothing can end the script that
    holds it. Where the answers are long, as many of their tokens as MOST_BYTES allow."""
    template = (Path(__file__).parent / "one_step_page.html").read_text(encoding="utf-8")
    training, most = run.config.training, 8192
    rule = "sil" if training.learning_type == "sil" else training.scale_rewards
    while True:
        data = {"settings": settings, "rounding": MOVED, "rule": rule, **numbers,
                "question": shortened(visible(answers[0].row["prompt"]), most),
                "normalizer": training.loss_normalizer, "L": training.max_new_gen_tokens,
                "k": training.k_best_of_n[0] if rule == "sil" else max(1, len(answers) // 4),
                "answers": [shown_answer(run, answer, most // len(answers)) for answer in answers],
                "again": [again(run, *column, most // 8) for column in columns]}
        text = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e")
        if len(template) + len(text) <= MOST_BYTES:
            return template.replace("DATA", text, 1)
        if (most := most // 2) < 64:
            raise UserError(f"{len(answers)} answers are too many for a page: see k_best_of_n")


def write_page(run: main.Run, row: dict | None, trained: Path | None, out: Path) -> None:
    config = run.config
    answers, chosen, (rows, step, place) = next(groups_with_signal(run, row))
    numbers = one_step(run, answers, chosen)
    numbers = {name: numbers[name] if numbers[name] == numbers[name] else None for name in NUMBERS}
    columns = [("before", answers), ("after this one update", sampled(run, rows, step)[place][0])]
    if trained:
        other = ask.load(trained)
        other.config, other.task = run.config, run.task  # it is asked the same in the same way
        other.sampler = main.make_sampler(other.sampler, other.tokenizer, config)
        columns.append((str(trained), sampled(other, rows, step)[place][0]))
    settings = (
        f"{config.model.name}, one update at learning rate {config.training.learning_rate:g} on "
        f"{len(answers)} answers sampled at temperature {config.sampling.temperature:g}; "
        f"training.seed {config.training.seed}, step {step}, question {place + 1}")
    with blame(f"--out {out} cannot be written", (OSError,)):
        out.write_text(page(run, answers, numbers, columns, settings), encoding="utf-8")
    print(", ".join(f"{name} {'none' if number is None else f'{number:.4f}'}"
                    for name, number in numbers.items()))
    print(f"{out} has every token of it: open it in a browser")


def average(run: main.Run, num_groups: int) -> dict:
    """The numbers of as many groups, each from the model as it was loaded; mean and spread."""
    weights, moments = (copy.deepcopy(each.state_dict()) for each in (run.model, run.optimizer))
    found = []
    for answers, chosen, _ in itertools.islice(groups_with_signal(run, None), num_groups):
        found.append(one_step(run, answers, chosen))
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(copy.deepcopy(moments))  # which it takes as its own
        main.refresh_sampler(run.sampler, run.model)
    means = {"groups": num_groups}
    for name in NUMBERS:
        each = [numbers[name] for numbers in found if numbers[name] == numbers[name]]
        means[name] = round(fmean(each), 4) if each else None
        means[f"{name}_std"] = round(stdev(each), 4) if len(each) > 1 else None
    return means


def command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("tiny/model"), help="a folder")
    parser.add_argument("--trained", type=Path, help="a third column; else best/ of the newest run")
    parser.add_argument("--all", type=int, metavar="N", help="average over N questions, no page")
    parser.add_argument("--out", type=Path, default=Path("one_step.html"))
    parser.add_argument("words", nargs="*", metavar="3 7 25 = 68 or section.key=value")
    options = parser.parse_intermixed_args(arguments)
    keys = [word for word in options.words if re.match(r"\w+\.\w+=", word)]
    question = [word for word in options.words if word not in keys]
    transformers.utils.logging.disable_progress_bar()
    try:
        if (options.model / "adapter_config.json").exists():
            raise UserError(f"{options.model} holds adapters: make a plain model of them first, as "
                            "docs/running.md says under The trained model")
        if options.all is not None and (options.all < 1 or question):
            raise UserError("--all N averages over N >= 1 questions of the training set")
        row = ask.read_question(question) if question else None
        model = f"model.name={json.dumps(str(options.model))}"
        config = main.load_config([*ask.settings_of(options.model)[0], model, *keys])
        of_countdown = config.task.name == "countdown"
        if row and not of_countdown:
            raise UserError(f"{' '.join(question)!r} is a question of Countdown, and task.name is "
                            f"{config.task.name!r}: leave it out, and a training question is taken")
        join()
        run = prepare(config)
        if options.all is not None:
            print(json.dumps(average(run, options.all)))
        else:
            bests = ask.bests() if of_countdown else []
            write_page(run, row, options.trained or next(iter(bests), None), options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
