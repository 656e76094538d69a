"""examples/one_step.py: what it measures, against plain loops; its command line; and its page in a
real browser, whatever the model has written."""

import copy
import decimal
import itertools
import json
import math
import random
import re
import shutil
import sys
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
import transformers
from browser import Browser
from conftest import make_config, plain_logprobs, run_script, stay
from processes import ROOT, ranks

import countdown
import main
from machinery.errors import UserError, shortened, visible

sys.path.append(str(ROOT / "examples"))
import ask
import one_step

FEW = {"data__max_rows": 60, "data__num_validation": 4, "model__precision": "float32"}
MOVED = 1e-6  # a change of log-probability below this is rounding
# Rounding in float32 comes to 1.5e-5 in a log-probability, and to 3e-7 where little changes.
BOUND, NEAR = 2e-4, 3e-6


def in_a_browser(test):
    """.ci/run installs Debian's chromium before the soak tests."""
    missing = shutil.which("chromedriver") is None
    return pytest.mark.soak(pytest.mark.skipif(missing, reason="no Chromium and its driver here")(
        test))


def data_of(html: str) -> dict:
    """What the page holds, as the browser reads it: up to the first thing that ends the script."""
    return json.loads(html.split('<script id="data" type="application/json">')[1]
                      .split("</script")[0])


# ---------------------------------------------------------------- what is measured

REWARDS = [1.0, 0.0, 0.5, 0.25, 1.0, 0.5, 0.0, 0.75]  # whose mean is 0.5: two advantages are 0
VARIANTS = {
    "Dr. GRPO": {},
    "GRPO": {"training__scale_rewards": "group", "training__loss_normalizer": "sequence"},
    "two updates": {"training__updates_per_batch": 2, "training__clip": [0.2, 0.2]},
    "KL": {"training__kl_beta": 0.1, "training__updates_per_batch": 2},
    "masked": {"training__mask_truncated": True},
    "SIL": {"training__learning_type": "sil", "training__k_best_of_n": [3, 8]},
    "in pieces": {"training__tokens_per_micro_batch": 30}}


def made_up_answers(run) -> list:
    """Of ragged lengths, the shortest a single token; every third is cut off."""
    stream, row = random.Random(0), run.rows[0]
    prompt = main.encode_prompt(row, run.task, run.tokenizer, run.config)
    completions = [[stream.randrange(len(run.tokenizer)) for _ in range(1 + 2 * i)]
                   for i in range(len(REWARDS))]
    return [main.Trajectory(row, prompt, ids, "", i % 3 == 1, {}, reward)
            for i, (ids, reward) in enumerate(zip(completions, REWARDS))]


def plainly(model, answers: list, temperature: float):
    """log pi and entropy of each token, each sequence on its own, unpadded and in float64."""
    model = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logprobs = [[float(each) for each in own]
                    for own in plain_logprobs(model, answers, temperature)]
        entropies = []
        for answer in answers:
            first = len(answer.prompt_ids)
            logits = model(torch.tensor([answer.prompt_ids + answer.completion_ids])).logits[0]
            shares = [torch.softmax(logits[first + t - 1] / temperature, dim=-1).tolist()
                      for t in range(len(answer.completion_ids))]
            entropies.append([-sum(p * math.log(p) for p in own if p) for own in shares])
    return logprobs, entropies


def check_against_plain_loops(run, before, answers: list, chosen: list, numbers: dict):
    """`before`: a copy of the model from before the update. Returns the changes, a list for each
    answer."""
    temperature, training = run.config.sampling.temperature, run.config.training
    old, old_entropies = plainly(before, answers, temperature)
    new, new_entropies = plainly(run.model, answers, temperature)
    for i, answer in enumerate(answers):
        for measured, expected in ((answer.before, old), (answer.after, new),
                                   (answer.before_entropies, old_entropies),
                                   (answer.after_entropies, new_entropies)):
            assert measured.tolist() == pytest.approx(expected[i], abs=BOUND)
    changes = [[late - early for early, late in zip(*each)] for each in zip(old, new)]
    sure = unsure = as_meant = 0
    moves, meant_moves, rewarded, punished = [], [], [], []
    for answer, own in zip(answers, changes):
        counted = any(answer is other for other in chosen)
        if (not counted or answer.advantage == 0
                or training.mask_truncated and answer.truncated):
            continue
        for change in own:
            up = answer.advantage > 0
            (rewarded if up else punished).append(change)
            moves.append(abs(change))
            if (change > 0) == up:
                meant_moves.append(abs(change))
            if abs(abs(change) - MOVED) < NEAR:  # in float32 it may be on either side
                unsure += 1
            elif abs(change) > MOVED:
                sure += 1
                as_meant += (change > 0) == up
    least, most = as_meant / (sure + unsure), (as_meant + unsure) / (sure + unsure)
    assert least - 1e-9 <= numbers["moved_as_meant"] <= most + 1e-9
    assert numbers["change_as_meant"] == pytest.approx(sum(meant_moves) / sum(moves), abs=BOUND)
    for name, own in (("change_rewarded", rewarded), ("change_punished", punished)):
        assert numbers[name] == pytest.approx(fmean(own), abs=BOUND) if own else math.isnan(
            numbers[name])
    return changes, unsure


@pytest.mark.mathematics
@pytest.mark.parametrize("name", VARIANTS)
def test_every_change_and_the_four_numbers_equal_those_of_plain_loops(name, model_folder, one_rank):
    """For every token of every answer, also of those that nothing is learned from."""
    rate = 1e-3
    config = make_config(**FEW, **VARIANTS[name], model__name=str(model_folder("qwen2")),
                         training__learning_rate=rate, sampling__temperature=0.7)
    run = one_step.prepare(config)
    before, answers = copy.deepcopy(run.model), made_up_answers(run)
    chosen = main.compute_advantages(answers, config.training, random.Random(0))
    numbers = one_step.one_step(run, answers, chosen)
    changes, unsure = check_against_plain_loops(run, before, answers, chosen, numbers)
    assert 0.01 < max(abs(change) for own in changes for change in own) < 5
    assert unsure == 0

    updates = config.training.updates_per_batch
    assert {float(moments["step"]) for moments in run.optimizer.state.values()} == {updates}
    with torch.no_grad():
        moved = max(float((new - old).abs().max())
                    for new, old in zip(run.model.parameters(), before.parameters()))
    # Adam's first update moves every weight by the learning rate, whatever its gradient is
    assert (moved == pytest.approx(rate, rel=0.01)) if updates == 1 else rate < moved < 2.1 * rate


@pytest.mark.mathematics
def test_so_they_do_for_a_group_of_the_small_model_and_the_page_holds_them(one_rank):
    """Most of whose tokens hardly move, because there is nothing else it would have written."""
    run = one_step.prepare(make_config(**FEW, training__learning_rate=1e-2))
    before = copy.deepcopy(run.model)
    answers, chosen, (rows, step, place) = next(one_step.groups_with_signal(run, None))
    assert len({answer.reward for answer in answers}) > 1 and chosen == answers
    again, _ = one_step.sampled(run, rows, step)[place]  # the same random numbers
    assert [each.completion for each in again] == [each.completion for each in answers]
    numbers = one_step.one_step(run, answers, chosen)
    changes, unsure = check_against_plain_loops(run, before, answers, chosen, numbers)
    assert unsure < 0.1 * sum(map(len, changes))

    columns = [("before", answers), ("later", again[:2])]
    data = data_of(one_step.page(run, answers, numbers, columns, "of a test"))
    assert data["settings"] == "of a test" and data["question"] == answers[0].row["prompt"]
    assert [data[name] for name in one_step.NUMBERS] == [numbers[n] for n in one_step.NUMBERS]
    assert (data["rule"], data["normalizer"], data["L"]) == ("none", "max_length", 192)
    for answer, own, shown in zip(answers, changes, data["answers"], strict=True):
        texts, first, change, entropy = zip(*shown["tokens"])
        assert "".join(texts) == run.tokenizer.decode(answer.completion_ids)
        assert first == pytest.approx(answer.before.tolist(), abs=6e-6)  # as rounded
        assert change == pytest.approx(own, abs=BOUND)
        assert entropy == pytest.approx(answer.before_entropies.tolist(), abs=6e-5)
        assert shown["reward"] == answer.reward and shown["advantage"] == answer.advantage
        assert shown["length"] == len(answer.completion_ids)
        assert shown["verdict"] == ask.verdict(answer)
        assert shown["change"] == pytest.approx(fmean(own), abs=BOUND)
    right = sum(answer.parts["answer"] == 1 for answer in answers)
    assert data["again"][0] == {"title": f"before: {right} of 8 right", "answers": [
        {"text": answer.completion.strip(), "verdict": ask.verdict(answer)}
        for answer in answers[:4]]}
    assert len(data["again"][1]["answers"]) == 2


def test_the_model_before_the_update_is_the_one_that_was_loaded(one_rank):
    """Also where weights decay: the step in which AdamW's moments come into being moves nothing."""
    run = one_step.prepare(make_config(**FEW, training__weight_decay=0.5,
                                       training__learning_rate=0.1))
    loaded, _ = main.load_model(run.config)
    for weight, own in zip(loaded.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(weight, own)
    assert run.optimizer.param_groups[0]["lr"] == 0.1  # from now on


def test_what_is_sampled_from_has_learned_too_where_it_is_a_copy(model_folder, one_rank):
    """In mixed precision; else the second column would be the first."""
    run = one_step.prepare(make_config(**{**FEW, "model__precision": "mixed"},
                                       model__name=str(model_folder("qwen2"))))
    before, answers = copy.deepcopy(run.sampler), made_up_answers(run)
    chosen = main.compute_advantages(answers, run.config.training, random.Random(0))
    assert one_step.one_step(run, answers, chosen)["sampler_stale"] == 0
    for old, now, learned in zip(before.parameters(), run.sampler.parameters(),
                                 run.model.parameters(), strict=True):
        assert torch.equal(now, learned.bfloat16())
    assert not torch.equal(old, now)


@pytest.mark.parametrize("text", [
    "29-3=26, 30+26=56 yes\n</think>\n<answer>(29-3)+30</answer>", "\u00e9\U0001f642\u65e5 x\n",
    "\U0001f469\u200d\U0001f469\u200d\U0001f466", "a\ufffdb", "\ufffd"], ids=ascii)
def test_the_texts_of_the_tokens_make_the_text_however_characters_are_cut(text):
    """The tokens of tiny/model are bytes: a character of four is the last one's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    ids, stream = tokenizer(text)["input_ids"], random.Random(0)
    texts = one_step.texts_of_tokens(tokenizer, ids)
    assert "".join(texts) == text
    assert all(own in ("", tokenizer.decode([token])) for token, own in zip(ids, texts)
               if token < 256 and own.isascii())
    cut_off, random_bytes = ids[:-1], [stream.randrange(len(tokenizer)) for _ in range(200)]
    for own in (ids, cut_off, random_bytes):
        texts = one_step.texts_of_tokens(tokenizer, own)
        assert "".join(texts) == tokenizer.decode(own) and len(texts) == len(own)


# ---------------------------------------------------------------- the command line

DIGITS = """
import countdown
REWARD_WEIGHTS = {"digits": 1.0}
SOLVED = "digits"
def load(dataset, max_rows):
    return [{"prompt": countdown.generate_prompt([3, 7, 25], i)} for i in range(40)]
def reward_function(completion, row):
    return {"digits": sum(each.isdigit() for each in completion)}
"""
QUICK = ["task.name=digits.py", "training.max_new_gen_tokens=12", "data.num_validation=4"]
TASK = ["data.max_rows=60", "data.num_validation=4"]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """The command line, in this process, from a folder of its own that has a task: exit code, and
    what was said on stdout and on stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)

    def call(*words):
        try:
            code = one_step.command([*map(str, words)])
        finally:
            stay(0)
        return code, *capfd.readouterr()

    return call


def page_of(path) -> dict:
    return data_of(path.read_text(encoding="utf-8"))


def test_a_question_of_ones_own_and_any_key_also_for_the_model_of_a_run(command, tmp_path):
    """The third column is asked in the same way as the first: here it is the same model."""
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "runs" / "x" / "best")
    code, out, err = command("3", "7", "25", "=", "68", *TASK, "sampling.temperature=0.9",
                             "training.learning_rate=1e-3", "training.seed=1")
    assert code == 0 and err == "" and out.splitlines()[-1].startswith("one_step.html has")
    data = page_of(tmp_path / "one_step.html")
    assert data["question"] == countdown.generate_prompt([3, 7, 25], 68)
    assert re.search(r"^tiny/model, one update at learning rate 0.001 on 8 answers sampled at "
                     r"temperature 0.9; training.seed 1, step \d+, question 1$", data["settings"])
    assert out.splitlines()[0] == ", ".join(
        f"{name} {data[name]:.4f}" for name in one_step.NUMBERS)
    before, after, trained = data["again"]
    assert trained["title"].startswith("runs/x/best: ")
    assert trained["answers"] == before["answers"] != after["answers"]


@pytest.mark.parametrize("keys", [
    ["training.learning_type=sil", "training.k_best_of_n=[2,6]"],
    ["training.mask_truncated=true", "training.max_new_gen_tokens=48"],
    ["training.kl_beta=0.04", "training.updates_per_batch=2"],
    ["training.scale_rewards=group", "training.loss_normalizer=tokens", "model.lora_rank=4"]],
    ids=["SIL", "masked", "KL", "LoRA"])
def test_it_makes_the_update_of_any_relative(keys, command, tmp_path):
    code, out, err = command(*(TASK if "training.mask_truncated=true" in keys else QUICK), *keys,
                             "--out", "here.html")
    assert code == 0, err
    data = page_of(tmp_path / "here.html")
    answers = data["answers"]
    assert not any(math.isnan(data[name] or 0) for name in one_step.NUMBERS)
    if "training.learning_type=sil" in keys:
        assert (data["rule"], data["k"], len(answers), data["change_punished"]) == (
            "sil", 2, 6, None) and "change_punished none" in out
        assert sorted(answer["advantage"] for answer in answers) == [0, 0, 0, 0, 1, 1]
    else:
        rewards = [answer["reward"] for answer in answers]
        scale = stdev(rewards) + 1e-4 if data["rule"] == "group" else 1
        assert [answer["advantage"] for answer in answers] == pytest.approx(
            [(reward - fmean(rewards)) / scale for reward in rewards])
    cut_off = [answer["verdict"].startswith("cut off") for answer in answers]
    assert [answer["learned"] for answer in answers] == [
        answer["advantage"] != 0 and not cut for answer, cut in zip(answers, cut_off)]
    assert any(cut_off) == ("training.mask_truncated=true" in keys)


def test_another_task_and_one_that_the_model_cannot_do_at_all(command, tmp_path, monkeypatch):
    code, out, err = command(*QUICK)
    assert code == 0 and err == "" and "every token of it" in out
    data = page_of(tmp_path / "one_step.html")
    for answer in data["answers"]:
        text = "".join(token[0] for token in answer["tokens"])
        assert answer["reward"] == sum(each.isdigit() for each in text)
        assert answer["parts"] == answer["verdict"] == f"digits {answer['reward']:.2f}"
    assert len(data["again"]) == 2  # what runs/ holds is about something else

    (tmp_path / "one_step.html").unlink()
    monkeypatch.setattr(one_step, "TRIES", 12)
    code, out, err = command("task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl",
                             "data.num_validation=4", "training.max_new_gen_tokens=16")
    assert (code, out) == (2, "") and not (tmp_path / "one_step.html").exists()
    assert re.fullmatch(r"error: 12 groups, and in none of them do answers differ .*\n", err)


def test_nothing_can_be_learned_where_all_that_differ_were_cut_off(command, tmp_path):
    """And mask_truncated is set: no page says that nothing has moved. No answer to a question of
    Countdown ends within twelve tokens."""
    code, out, err = command(*QUICK, "training.mask_truncated=true", "training.kl_beta=0.04",
                             "training.k_best_of_n=[4,4]", "training.max_new_gen_tokens=4")
    assert (code, out) == (2, "") and re.fullmatch("error: 50 groups, .*\n", err)


def test_each_mistake_ends_in_one_line_that_says_what_to_do(command, tmp_path):
    adapters = tmp_path / "runs" / "lora" / "best"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").write_text("{}")
    for words, says in (
            ([*QUICK, "training.learningrate=1"], "the nearest is training.learning_rate"),
            ([*QUICK, "training.learning_rate=fast"], "training.learning_rate='fast'"),
            ([*QUICK, "--model", "runs/none"], "model.name='runs/none': there is no such folder"),
            ([*QUICK, "--trained", "runs/none"], "model.name='runs/none': there is no such folder"),
            ([*QUICK, "--out", "."], "--out . cannot be written"),
            ([*QUICK, "--out", "none/x.html"], "--out none/x.html cannot be written"),
            ([*QUICK, "--all", "0"], "--all N averages over N >= 1 questions"),
            ([*TASK, "--all", "2", "3", "7", "=", "10"], "--all N averages"),
            (["3", "7", "=", "10", *QUICK], "'3 7 = 10' is a question of Countdown"),
            (["3", "x", "=", "5"], "'3 x = 5': write two or more numbers"),
            (["3 7 25 = 68"], "write two or more numbers"),
            (["training.seed", "1"], "'training.seed 1': write two or more numbers"),
            (["task.name=none.py"], "task.name='none.py'"),
            (["--model", adapters, *TASK], "make a plain model of them first"),
            ([*QUICK, "training.learning_rate=1e9"], "lower training.learning_rate")):
        code, out, err = command(*words)
        assert (code, out) == (2, "") and re.fullmatch(r"error: .*\n", err) and says in err, err
        assert not (tmp_path / "one_step.html").exists()


def test_all_averages_over_groups_each_from_the_model_as_it_was_loaded(command, tmp_path):
    """So each of them is what a fresh start makes of that group, the third as the first: neither
    weights nor AdamW's moments are those that the group before has left."""
    code, line, err = command(*QUICK, "--all", 4)
    assert code == 0 and line.count("\n") == 1 and err == ""
    assert not (tmp_path / "one_step.html").exists()
    found, single = json.loads(line), []
    for i in range(4):
        one_step.join()
        run = one_step.prepare(main.load_config(QUICK))
        answers, chosen, _ = list(itertools.islice(one_step.groups_with_signal(run, None), 4))[i]
        single.append(one_step.one_step(run, answers, chosen))
        stay(0)
    assert found.pop("groups") == 4
    for name in one_step.NUMBERS:
        own = [numbers[name] for numbers in single]
        assert found.pop(name) == pytest.approx(fmean(own), abs=6e-5)
        assert found.pop(f"{name}_std") == pytest.approx(stdev(own), abs=6e-5)
    assert found == {}

    assert command(*QUICK, "--all", 4)[1] == line
    first = json.loads(command(*QUICK, "--all", 1)[1])
    assert command(*QUICK)[0] == 0
    data = page_of(tmp_path / "one_step.html")
    for name in one_step.NUMBERS:
        assert first[name] == round(data[name], 4) and first[f"{name}_std"] is None


# ---------------------------------------------------------------- the page

def fixed(number: float, digits: int) -> str:
    """As many digits as JavaScript's toFixed shows: of two that are as near the larger."""
    unit = decimal.Decimal(1).scaleb(-digits)
    return str(decimal.Decimal(number).quantize(unit, decimal.ROUND_HALF_UP))


def signed(number: float, digits: int) -> str:
    return ("-" if number < 0 else "+") + fixed(abs(number), digits)


def shows(text: str, number: float, digits: int, within: float = 1e-9) -> bool:
    """Whether a text shows a number that is known but for rounding, with its sign."""
    return (re.fullmatch(rf"[+-]\d+\.\d{{{digits}}}", text) is not None
            and abs(float(text) - number) <= 0.5 * 10**-digits + within)


def plain_sum(numbers) -> float:
    total = 0.0
    for number in numbers:  # where `sum` would compensate for rounding, unlike JavaScript
        total += number
    return total


def weights(answers: list[dict], rule: str, normalizer: str, k: int, L: int):
    """A and A / Z of each answer of a page, by main.py: what pulls at a token is the gradient of
    the loss with respect to its log-probability. Of equal answers those are taken for the best
    that were learned from, and else the first."""
    sil, rewards = rule == "sil", [answer["reward"] for answer in answers]
    config = make_config(
        training__learning_type="sil" if sil else "grpo", training__loss_normalizer=normalizer,
        training__scale_rewards="none" if sil else rule, training__max_new_gen_tokens=L,
        training__k_best_of_n=[k if sil else len(rewards), len(rewards)])
    group = [main.Trajectory({}, [0], [0] * answer["length"], "", False, reward=answer["reward"])
             for answer in answers]
    order = iter([(answer["learned"], -i) for i, answer in enumerate(answers)])
    by_order = SimpleNamespace(random=order.__next__)
    chosen = main.compute_advantages(group, config.training, by_order)
    logprobs = torch.zeros(sum(len(answer.completion_ids) for answer in chosen),
                           dtype=torch.float64, requires_grad=True)
    loss, _ = main.policy_loss(logprobs, chosen, len(chosen), len(logprobs), config.training)
    pulls = (-torch.autograd.grad(loss, logprobs)[0]).split([len(answer.completion_ids)
                                                            for answer in chosen])
    by_answer = {id(answer): float(pull[0]) for answer, pull in zip(chosen, pulls)}
    return ([answer.advantage for answer in group],
            [by_answer.get(id(answer), 0.0) for answer in group])


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page as a user makes it, without a question, in a folder that holds a run."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "tiny" / "model", folder / "runs" / "x" / "best")
    said = ranks(1, run_script, str(ROOT / "examples" / "one_step.py"), cwd=folder)
    assert said.returncode == 0, said.stderr
    path = folder / "one_step.html"
    assert path.stat().st_size < 300_000
    return path, page_of(path)


def texts(browser, css: str) -> list[str]:
    return browser.run("return [...document.querySelectorAll(arguments[0])].map("
                       "each => each.textContent)", css)


def is_quiet(browser, path) -> bool:
    """No message, no request but for the page itself, and nothing to be scrolled sideways."""
    width, room = browser.run("const root = document.documentElement; "
                              "return [root.scrollWidth, root.clientWidth]")
    assert browser.console() == [] and browser.requests() == [path.as_uri()] and width <= room
    return True


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1200, 900)], ids=["phone", "laptop"])
def test_the_page_asks_for_nothing_complains_of_nothing_and_fits(size, dark, made, browser):
    path, _ = made
    browser.open(path, *size, dark=dark)
    assert is_quiet(browser, path)
    assert browser.run("return innerWidth") == size[0]
    background, text = browser.run("const style = getComputedStyle(document.body); "
                                   "return [style.backgroundColor, style.color]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (background, text)]
    assert (light[0] < light[1]) == dark
    for mode in ("meant", "against", "happened"):
        browser.click(f"[value={mode}]")
    browser.click("#with-numbers")
    for place in (0, 40, len(texts(browser, ".token")) - 1):
        browser.hover(f"[data-place='{place}']")
        browser.click(f"[data-place='{place}']")
    browser.click("#rule")
    assert is_quiet(browser, path)  # still, with the widest that it shows


def share_as_meant(weighed: list[tuple[float, float]]) -> tuple[float, float]:
    """Of changes with their advantages: the least and the largest share of those that moved which
    it may be, since in the page changes are rounded."""
    moved = [[change * advantage > 0 for change, advantage in weighed if abs(change) > limit]
             for limit in (0.4 * MOVED, 1.6 * MOVED)]  # also those that may have, and without them
    return sum(moved[1]) / len(moved[0]), sum(moved[0]) / len(moved[1])


@in_a_browser
def test_every_number_shown_is_that_of_the_data(made, browser):
    """And the data is what the grader makes of the texts of the tokens."""
    path, data = made
    browser.open(path)
    answers, changes = data["answers"], [[token[2] for token in answer["tokens"]]
                                         for answer in data["answers"]]
    (nums, target), = re.findall(r"the numbers (.*?) into .* equals (-?\d+)\.", data["question"])
    row = {"nums": [int(each) for each in nums.split(", ")], "target": int(target)}
    assert texts(browser, "#settings, #question") == [data["settings"], data["question"]]
    assert texts(browser, "h1")[0] == "One step, seen"

    # the four numbers on top, from the changes of the tokens, which are rounded
    weighed = [(change, answer["advantage"]) for answer, own in zip(answers, changes)
               for change in own if answer["advantage"]]
    shown = texts(browser, "#numbers b")
    percent = [float(re.fullmatch(r"(\d+\.\d) %", text)[1]) for text in shown[:2]]
    least, most = share_as_meant(weighed)
    assert 100 * least - 0.051 <= percent[0] <= 100 * most + 0.051
    movement = plain_sum(abs(change) for change, _ in weighed)
    meant = plain_sum(abs(change) for change, advantage in weighed if change * advantage > 0)
    assert abs(percent[1] - 100 * meant / movement) <= 0.051
    for text, up in zip(shown[2:], (True, False)):
        own = [change for change, advantage in weighed if (advantage > 0) == up]
        assert shows(text, fmean(own), 4, within=2e-6)
    assert shown == [fixed(100 * data["moved_as_meant"], 1) + " %",
                     fixed(100 * data["change_as_meant"], 1) + " %",
                     signed(data["change_rewarded"], 4), signed(data["change_punished"], 4)]

    # each answer
    mean = plain_sum(answer["reward"] for answer in answers) / len(answers)
    heads = browser.run("return [...document.querySelectorAll('.head')].map("
                        "head => [...head.children].map(each => each.textContent))")
    for number, (answer, own, head) in enumerate(zip(answers, changes, heads, strict=True), 1):
        text = "".join(token[0] for token in answer["tokens"])
        ended = text.endswith("<|endoftext|>")
        graded = main.Trajectory(row, [], own, text.removesuffix("<|endoftext|>"), not ended)
        graded.parts = countdown.reward_function(graded.completion, row)
        reward = sum(weight * graded.parts[part]
                     for part, weight in countdown.REWARD_WEIGHTS.items())
        least, most = share_as_meant([(change, answer["advantage"]) for change in own])
        parts = ", ".join(f"{part} {value:.2f}" for part, value in graded.parts.items())
        assert head[:6] == [f"answer {number}", f"reward {fixed(reward, 2)} ({parts})",
                            f"mean {fixed(mean, 2)}", f"A {signed(reward - mean, 3)}",
                            ask.verdict(graded), f"{len(own)} tokens"]
        assert shows(head[6].removeprefix("mean change "), fmean(own), 4, within=1e-6)
        if (share := answer["as_meant"]) is None:
            assert answer["advantage"] == 0 and head[7] == ""
        else:
            assert least <= share <= most and head[7] == f"{fixed(100 * share, 0)} % as meant"
    largest = max(abs(answer["advantage"]) for answer in answers)
    bars = browser.run("return [...document.querySelectorAll('.answer .bar i')].map("
                       "bar => [bar.style.left, bar.style.width].map(parseFloat))")
    for (left, width), answer in zip(bars, answers, strict=True):
        expected = 50 * abs(answer["advantage"]) / largest
        assert width == pytest.approx(expected, abs=0.01)
        assert left == pytest.approx(50 - expected * (answer["advantage"] < 0), abs=0.01)

    # the same question answered again: "x" is the model that there was before
    columns = browser.run("return [...document.querySelectorAll('#again > .card')].map("
                          "card => [...card.children].map(each => each.textContent))")
    right = sum("right" in head for head in heads)
    assert [column[0].split(":")[0] for column in columns] == [
        "before", "after this one update", "runs/x/best"]
    assert columns[0][0] == f"before: {right} of 8 right" and columns[2][1:] == columns[0][1:]
    for column in columns:
        for text, said in zip(column[1::2], column[2::2], strict=True):
            assert said == "-> " + ask.verdict(main.Trajectory(row, [], [0], text, False)) or (
                "cut off" in said)
    assert columns[0][2::2] == ["-> " + answer["verdict"] for answer in answers[:4]]


TOKENS = """return [...document.querySelectorAll(".token")].map(span => {
  const style = getComputedStyle(span)
  return {text: span.textContent, up: span.classList.contains("up"),
          down: span.classList.contains("down"), colour: style.backgroundColor,
          line: style.borderBottomWidth + style.borderBottomStyle,
          number: getComputedStyle(span, "::after").content} })"""


@in_a_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_switch_colours_the_tokens_that_it_says_and_numbers_them(dark, made, browser):
    """Blue and underlined what went up, or was meant to; orange and dotted what went down; nothing
    where there is next to nothing. The full colour is that of all but the largest twentieth."""
    path, data = made
    browser.open(path, dark=dark)
    rgb = {name: tuple(map(int, browser.run(
        "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])",
        f"--{name}").split())) for name in ("up", "down")}
    assert rgb["up"][2] > rgb["up"][0] and rgb["down"][0] > rgb["down"][2]  # blue, orange
    answers = data["answers"]
    _, pulls = weights(answers, "none", "max_length", 2, 192)
    tokens = [(text, change, pull) for answer, pull in zip(answers, pulls)
              for text, _, change, _ in answer["tokens"]]
    modes = {"meant": lambda change, pull: pull, "happened": lambda change, pull: change,
             "against": lambda change, pull: change * (abs(change) > MOVED and change * pull < 0)}
    browser.click("#with-numbers")
    for mode, value_of in modes.items():
        browser.click(f"[value={mode}]")
        digits = 5 if mode == "meant" else 3
        sizes = sorted(abs(pull if mode == "meant" else change) for _, change, pull in tokens)
        sizes = [size for size in sizes if size]
        full = sizes[math.floor(0.95 * (len(sizes) - 1))]
        assert texts(browser, "#low, #high") == [signed(-full, digits), signed(full, digits)]
        seen = browser.run(TOKENS)
        coloured = 0
        for (text, change, pull), token in zip(tokens, seen, strict=True):
            assert token["text"] == text.replace("\n", "\u21b5")
            value = value_of(change, pull)
            strength = min(1, math.sqrt(abs(value) / full))
            name = "down" if value < 0 else "up"
            *colour, alpha = map(float, re.findall(r"[\d.]+", token["colour"]))
            assert alpha == pytest.approx(0.65 * strength, abs=0.005)
            assert tuple(colour) == rgb[name] or alpha == 0
            if abs(strength - 0.1) > 1e-6:
                shown = strength > 0.1
                assert (token["up"], token["down"]) == (shown and value > 0, shown and value < 0)
                assert token["line"] == ("0pxnone" if not shown else "2pxsolid" if value > 0
                                         else "2pxdotted")
                assert token["number"].strip('"') == (signed(value, digits) if shown else "")
                coloured += shown
        assert coloured > 0
    browser.click("#with-numbers")
    assert not any(token["number"].strip('"') for token in browser.run(TOKENS))


def told(data: dict, place: int) -> str:
    """What the page shall say of a token."""
    places = [(i, token) for i, answer in enumerate(data["answers"]) for token in answer["tokens"]
              if token[1] is not None]
    i, (text, before, change, entropy) = places[place]
    A = data["answers"][i]["advantage"]
    happened = "up" if change > MOVED else "down" if change < -MOVED else "nothing"
    quoted = json.dumps(text, ensure_ascii=False)
    return (f"{quoted} of answer {i + 1}: p {fixed(math.exp(before), 4)} -> "
            f"{fixed(math.exp(before + change), 4)}, log p {signed(change, 4)}; "
            f"A {signed(A, 3)}, entropy {fixed(entropy, 3)}; "
            f"meant {'up' if A > 0 else 'down' if A < 0 else 'nothing'}, happened {happened}")


@in_a_browser
@pytest.mark.parametrize("size", [(390, 844), (1200, 900)], ids=["phone", "laptop"])
def test_a_token_pointed_at_or_tapped_tells_its_numbers_and_arrow_keys_go_on(size, made, browser):
    path, data = made
    browser.open(path, *size)
    last = sum(len(answer["tokens"]) for answer in data["answers"]) - 1
    for place, reach in ((7, Browser.hover), (30, Browser.click), (last, Browser.click),
                         (len(data["answers"][0]["tokens"]), Browser.hover)):
        reach(browser, f"[data-place='{place}']")
        assert texts(browser, "#inspector") == [told(data, place)]
        assert browser.run("return [...document.querySelectorAll('.chosen')].map("
                           "each => +each.dataset.place)") == [place]
    browser.key("ArrowRight")
    assert texts(browser, "#inspector") == [told(data, place + 1)]
    for _ in range(3):
        browser.key("ArrowLeft")
    assert texts(browser, "#inspector") == [told(data, place - 2)]
    browser.click(f"[data-place='{last}']")
    browser.key("ArrowRight")
    assert texts(browser, "#inspector") == [told(data, last)]  # there is no next
    assert is_quiet(browser, path)


@in_a_browser
def test_with_the_keyboard_alone_everything_can_be_reached(made, browser):
    path, data = made
    browser.open(path)
    labels = browser.run(
        "return [...document.querySelectorAll('input, select, button, a, [tabindex]')].map("
        "each => [...each.labels].map(label => label.textContent.trim()))")
    assert len(labels) == 6 and all(len(own) == 1 and own[0] for own in labels)
    active = "const it = document.activeElement; return [it.name || it.id, it.value, it.checked]"
    browser.key("ArrowRight")  # from the first token on
    assert texts(browser, "#inspector") == [told(data, 0)]
    for _ in range(150):
        browser.key("ArrowRight")
    assert texts(browser, "#inspector") == [told(data, 150)]
    token, below = browser.run(
        "return ['.chosen', '#inspector'].map(css => document.querySelector(css)"
        ".getBoundingClientRect()).map((box, i) => i ? box.top : box.bottom)")
    assert 0 < token <= below  # in sight, and not behind the inspector

    browser.run("scrollTo(0, 0); document.body.focus()")
    browser.key("Tab")
    assert browser.run(active) == ["mode", "happened", True]
    chosen = texts(browser, "#inspector")
    browser.key("ArrowRight")
    assert browser.run(active) == ["mode", "against", True]
    assert texts(browser, "#inspector") == chosen  # the key was the switch's own
    assert sum(token["up"] or token["down"] for token in browser.run(TOKENS)) > 0
    browser.key("Tab")
    browser.key(" ")
    assert browser.run(active) == ["with-numbers", "on", True]
    assert any(token["number"].strip('"') for token in browser.run(TOKENS))
    for name, value in (("rule", "group"), ("normalizer", "tokens")):
        browser.key("Tab")
        browser.key("ArrowDown")
        assert browser.run(active)[:2] == [name, value]
    assert "std r" in texts(browser, "#formula")[0] and "DAPO" in texts(browser, "#formula")[0]
    assert is_quiet(browser, path)


FAMILY = """const found = {}
for (const rule of ["none", "group", "sil"])
  for (const normalizer of ["max_length", "tokens", "sequence"]) {
    for (const [id, value] of [["rule", rule], ["normalizer", normalizer]]) {
      document.getElementById(id).value = value
      document.getElementById(id).dispatchEvent(new Event("change", {bubbles: true})) }
    found[rule + " " + normalizer] = [...document.querySelectorAll("#family tr")].map(
      row => [...row.children].map(cell => cell.textContent).concat(
        [...row.querySelectorAll("i")].flatMap(
          bar => [parseFloat(bar.style.left), parseFloat(bar.style.width)]))) }
return found"""


def check_family(browser, data: dict):
    """The table, for each choice of advantages and normaliser, against main.py."""
    answers, found = data["answers"], browser.run(FAMILY)
    lengths = [answer["length"] for answer in answers]
    assert len(found) == 9
    for choice, (head, *rows) in found.items():
        rule, normalizer = choice.split()
        A, pulls = weights(answers, rule, normalizer, data["k"], data["L"])
        largest = max(abs(pull * length) for pull, length in zip(pulls, lengths))
        assert head == ["answer", "r", "tokens", "A", "A / Z, each token", "all its tokens", ""]
        for i, row in enumerate(rows):
            number, reward, length, advantage, pull, total, empty, left, width = row
            assert [number, reward, length] == [
                str(i + 1), fixed(answers[i]["reward"], 2), str(lengths[i])]
            assert shows(advantage, A[i], 3) and shows(pull, pulls[i], 6)
            assert shows(total, pulls[i] * lengths[i], 4) and empty == ""
            share = 50 * abs(pulls[i]) * lengths[i] / largest if largest else 0
            assert width == pytest.approx(share, abs=0.01)
            assert left == pytest.approx(50 - share * (pulls[i] < 0), abs=0.01)
        assert len(rows) == len(answers)


@in_a_browser
def test_the_family_table_is_what_main_py_makes_of_the_same_rewards(made, browser):
    path, data = made
    browser.open(path)
    assert browser.run("return [...document.querySelectorAll('select')].map(each => each.value)"
                       ) == ["none", "max_length"]
    check_family(browser, data)


# ---------------------------------------------------------------- a page of anything

def made_up_page(tmp_path, rewards: list, columns=(), *, chosen=None, tokens=None, prompt="Go:",
                 completion="it went", parts=("right",), settings="of a test", moved=None, **keys):
    """A page of made-up answers. `tokens`: the texts of each answer's; `chosen`: which answers were
    learned from, where not all that differ from the mean. Returns its path, and its data."""
    config = make_config(task__name="made_up.py", **keys)
    tokens = tokens or [[f"w{i} " for i in range(3 + j % 4)] for j in range(len(rewards))]
    names = list(dict.fromkeys(itertools.chain(*tokens)))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(names[i] for i in ids))
    run = SimpleNamespace(config=config, tokenizer=tokenizer, task=SimpleNamespace(SOLVED=parts[0]))
    answers, places = [], {name: i for i, name in enumerate(names)}
    for reward, own in zip(rewards, tokens, strict=True):
        answers.append(main.Trajectory({"prompt": prompt}, [0], [places[text] for text in own],
                                       completion, False, dict.fromkeys(parts, reward), reward))
    main.compute_advantages(answers, config.training, random.Random(1))
    for i, answer in enumerate(answers):
        stream = torch.Generator().manual_seed(i)
        length = len(answer.completion_ids)
        answer.before = -3 * torch.rand(length, generator=stream)
        answer.before_entropies = torch.rand(length, generator=stream)
        answer.after = answer.before + 0.1 * torch.randn(length, generator=stream)
        if answer.advantage:
            answer.new_logprobs = answer.after
    numbers = moved or {"moved_as_meant": 0.5, "change_as_meant": 0.75, "change_rewarded": 0.25,
                        "change_punished": None}
    html = one_step.page(run, answers, numbers, [(title, answers) for title in columns], settings)
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    assert len(html.encode()) <= 300_000
    return path, data_of(html)


@in_a_browser
@pytest.mark.parametrize("rewards", [
    [1.0, 0.0], [0.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3], [-1.0, -2.0, -2.0, -0.5],
    [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [1e9, -1e9, 0.1, 0.2, 1e-9]], ids=str)
def test_so_it_is_for_any_other_rewards(rewards, browser, tmp_path):
    n = len(rewards)
    for keys in ({}, {"training__learning_type": "sil", "training__k_best_of_n": [1, n],
                      "training__loss_normalizer": "tokens"}):
        path, data = made_up_page(tmp_path, rewards, **keys)
        browser.open(path)
        check_family(browser, data)
        assert is_quiet(browser, path)


@in_a_browser
def test_of_equal_answers_the_table_takes_those_that_self_imitation_has_chosen(browser, tmp_path):
    """It chooses among them by chance: the first would be others than the page has coloured."""
    path, data = made_up_page(
        tmp_path, [1.0] * 6, training__learning_type="sil", training__k_best_of_n=[2, 6],
        training__loss_normalizer="tokens")
    A = [answer["advantage"] for answer in data["answers"]]
    assert sorted(A) == [0, 0, 0, 0, 1, 1] and A[:2] != [1, 1]
    lengths = [answer["length"] for answer in data["answers"] if answer["advantage"]]
    browser.open(path)
    rows = browser.run(FAMILY)["sil tokens"][1:]
    assert [row[3] for row in rows] == [signed(each, 3) for each in A]
    assert {row[4] for row in rows} == {"+0.000000", signed(1 / sum(lengths), 6)}
    browser.click("[value=meant]")
    browser.click("#with-numbers")
    shown = [token["number"].strip('"') for token in browser.run(TOKENS)]
    assert shown == [signed(1 / sum(lengths), 5) if each else ""
                     for each, answer in zip(A, data["answers"]) for _ in answer["tokens"]]


SCRIPT = "</script><script>window.hacked=1</script>"
HOSTILE = [
    SCRIPT, "<img src=x onerror=window.hacked=1>", "<!--<script>", "]]><svg onload=hacked=1>",
    "\u202e\u2066\u200f\u061c drow", "\u2028\u2029", "\0\x01\x1b[2J\x7f\x9f\r\t\n", "\ud800",
    "__proto__", "constructor", "'\"\\`${window.hacked=1}", "&lt;&amp;&#60;b>", "DATA",
    "javascript:window.hacked=1", "\u05d0\u0628\U0001f642\u0301", " ", "x" * 1_000_000]
SHAPE = """const all = [...document.querySelectorAll("*")]
return {tags: all.map(each => each.tagName),
  names: [...new Set(all.flatMap(each => each.getAttributeNames()))],
  comment: document.createNodeIterator(document, NodeFilter.SHOW_COMMENT).nextNode(),
  hacked: window.hacked, polluted: ({}).hacked, scripts: document.scripts.length}"""


@in_a_browser
def test_whatever_the_model_the_data_and_the_task_have_written_is_only_text(browser, tmp_path):
    """The page has the elements of one with harmless words in the same places, and no other."""
    def page_of_words(words):
        columns = [f"runs/{word[:300]}" for word in words[:3]]
        return made_up_page(
            tmp_path, [1.0, 0.0, 0.5], columns, tokens=[words, words[:5], words[5:]],
            prompt="".join(words), completion="".join(words), parts=words,
            settings="".join(words)[:2000])

    path, _ = page_of_words([f"word{i}" for i in range(len(HOSTILE))])
    browser.open(path)
    harmless = browser.run(SHAPE)
    assert harmless["scripts"] == 2 and harmless["hacked"] is None

    path, data = page_of_words(HOSTILE)
    for size in ((390, 844), (1200, 900)):
        browser.open(path, *size)
        assert browser.run(SHAPE) == harmless and is_quiet(browser, path)
    seen, expected = browser.run(TOKENS), []
    for word in [*HOSTILE, *HOSTILE[:5], *HOSTILE[5:]]:
        expected.append(shortened(visible(word), 40).replace("\n", "\u21b5"))
    assert [token["text"] for token in seen] == expected
    shown = "".join(texts(browser, "#question, .token, #again pre, .head"))
    assert set("\0\x1b\x7f\r\u202e\u2066\u200f\u061c\u2028\ud800").isdisjoint(shown)
    assert texts(browser, "#question") == [shortened(visible("".join(HOSTILE)), 8192)]
    for place in range(len(HOSTILE)):
        browser.click(f"[data-place='{place}']")
        assert texts(browser, "#inspector") == [told(data, place)]
    for mode in ("meant", "against", "happened"):
        browser.click(f"[value={mode}]")
        assert any(token["up"] or token["down"] for token in browser.run(TOKENS))
    check_family(browser, data)
    assert browser.run(SHAPE)["hacked"] is None and is_quiet(browser, path)


@in_a_browser
def test_that_such_words_would_do_something_in_a_page_that_did_not_escape_them(browser, tmp_path):
    """So that the test above can fail."""
    template = (ROOT / "examples" / "one_step_page.html").read_text()
    path = tmp_path / "open.html"
    path.write_text(template.replace("DATA", f"{SCRIPT}{HOSTILE[1]}", 1))
    browser.open(path)
    found = browser.run(SHAPE)
    assert found["hacked"] == 1 and found["scripts"] == 3 and "IMG" in found["tags"]
    assert browser.console() != []


@in_a_browser
def test_of_64_answers_of_4096_tokens_some_are_shown_and_all_are_counted(browser, tmp_path):
    stream = random.Random(0)
    words = [f" {stream.choice(HOSTILE[:-1])}{i}" for i in range(500)]
    path, data = made_up_page(
        tmp_path, [float(i % 3) for i in range(64)], ["before", "after"],
        tokens=[[stream.choice(words) for _ in range(4096)] for _ in range(64)],
        moved={"moved_as_meant": 0.51236, "change_as_meant": 0.7, "change_rewarded": 0.1,
               "change_punished": -0.00012})
    browser.open(path)
    assert texts(browser, "#numbers b") == ["51.2 %", "70.0 %", "+0.1000", "-0.0001"]
    heads = browser.run("return [...document.querySelectorAll('.head')].map("
                        "head => [...head.children].map(each => each.textContent))")
    assert len(heads) == 64 and {head[5] for head in heads} == {"4096 tokens"}
    spans = browser.run("return [...document.querySelectorAll('.answer > .mono')].map("
                        "row => [...row.children].map(each => [each.className, each.textContent]))")
    for answer, head, row in zip(data["answers"], heads, spans, strict=True):
        kept = [text for kind, text in row if kind.startswith("token")]
        (left_out,) = [text for kind, text in row if kind == "soft"]
        assert len(kept) >= 16 and str(4096 - len(kept)) in left_out
        assert head[6] == f"mean change {signed(answer['change'], 4)}"
        assert abs(answer["change"]) < 0.02  # of all 4096, and not of the few that are shown
    browser.click("[data-place='20']")
    assert texts(browser, "#inspector") == [told(data, 20)]
    check_family(browser, data)
    assert is_quiet(browser, path)


def test_a_page_of_too_many_answers_is_refused_and_never_tried_for_ever(tmp_path):
    with pytest.raises(UserError, match="2000 answers are too many for a page"):
        made_up_page(tmp_path, [float(i % 2) for i in range(2000)])
