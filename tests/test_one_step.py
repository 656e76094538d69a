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
from conftest import make_config, run_script, stay
from processes import ROOT, ranks

import countdown
import main
from machinery.errors import UserError
from machinery.text import shortened, visible

sys.path.append(str(ROOT / "examples"))
import ask
import one_step

FEW = {"data__max_rows": 60, "data__num_validation": 4, "model__precision": "float32"}
MOVED = 1e-6  # a change of log-probability below this is rounding
# Rounding in float32 comes to 1.5e-5 in a log-probability, and to 3e-7 where little changes.
BOUND, NEAR = 2e-4, 3e-6


def data_of(html: str) -> dict:
    """What the page holds, as the browser reads it: up to the first thing that ends the script."""
    return json.loads(html.split('<script id="data" type="application/json">')[1]
                      .split("</script")[0])


def four_numbers(weighed: list[tuple[float, float]], within: float):
    """The four, of changes with their advantages; the first as the least and the largest that it
    may be, where changes are known up to `within`. And how many of them may be on either side."""
    moved = [change * A > 0 for change, A in weighed if abs(change) > MOVED + within]
    unsure = sum(abs(abs(change) - MOVED) <= within for change, _ in weighed)
    shares = [each / (len(moved) + unsure) for each in (sum(moved), sum(moved) + unsure)]
    meant = sum(abs(change) for change, A in weighed if change * A > 0)
    rewarded, punished = ([change for change, A in weighed if A * sign > 0] for sign in (1, -1))
    return (shares, meant / sum(abs(change) for change, _ in weighed),
            *(fmean(own) if own else math.nan for own in (rewarded, punished)), unsure)


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


def with_answers(folder, **keys):
    """What `prepare` makes of a model, and made-up answers, of ragged lengths, the shortest a
    single token; every third is truncated. And those of them that count in B."""
    run = one_step.prepare(make_config(**{**FEW, **keys}, model__name=str(folder)))
    stream, question = random.Random(0), run.training_questions[0]
    completions = [[stream.randrange(len(run.tokenizer)) for _ in range(1 + 2 * i)]
                   for i in range(len(REWARDS))]
    answers = [main.Trajectory(question, ids, "", i % 3 == 1, {}, reward)
               for i, (ids, reward) in enumerate(zip(completions, REWARDS))]
    return run, answers, main.compute_advantages(answers, run.config.training, random.Random(0))


def plainly(model, answers: list, temperature: float):
    """log pi and entropy of each token, each sequence on its own, unpadded and in float64."""
    model, logprobs, entropies = copy.deepcopy(model).double().eval(), [], []
    for answer in answers:
        first = len(answer.prompt_ids)
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt_ids + answer.completion_ids])).logits[0]
        shares = [torch.softmax(logits[first + t - 1] / temperature, dim=-1).tolist()
                  for t in range(len(answer.completion_ids))]
        logprobs.append([math.log(own[token])
                         for own, token in zip(shares, answer.completion_ids)])
        entropies.append([-sum(p * math.log(p) for p in own if p) for own in shares])
    return logprobs, entropies


def step_against_plain_loops(run, answers: list, chosen: list):
    """One update. Returns its numbers; the changes, a list for each answer; how many of those that
    count may have moved or not; and a copy of the model from before."""
    before = copy.deepcopy(run.model)
    numbers = one_step.one_step(run, answers, chosen)
    (old, old_entropies), (new, new_entropies) = (
        plainly(model, answers, run.config.sampling.temperature) for model in (before, run.model))
    for name, expected in (("before", old), ("after", new), ("before_entropies", old_entropies),
                           ("after_entropies", new_entropies)):
        for answer, own in zip(answers, expected, strict=True):
            assert getattr(answer, name).tolist() == pytest.approx(own, abs=BOUND)
    changes = [[late - early for early, late in zip(*each)] for each in zip(old, new)]
    weighed = [(change, answer.advantage) for answer, own in zip(answers, changes)
               if any(answer is other for other in chosen) and answer.advantage
               and not (run.config.training.mask_truncated and answer.is_truncated)
               for change in own]
    (least, most), *others, unsure = four_numbers(weighed, NEAR)
    assert least - 1e-9 <= numbers["moved_as_meant"] <= most + 1e-9
    for name, expected in zip(one_step.NUMBERS[1:], others, strict=True):
        assert numbers[name] == pytest.approx(expected, abs=BOUND, nan_ok=True)
    return numbers, changes, unsure, before


@pytest.mark.mathematics
@pytest.mark.parametrize("name", VARIANTS)
def test_every_change_and_the_four_numbers_equal_those_of_plain_loops(name, model_folder, one_rank):
    """For every token of every answer, also of those that nothing is learned from."""
    rate = 1e-3
    run, answers, chosen = with_answers(
        model_folder("qwen2"), **VARIANTS[name], training__learning_rate=rate,
        sampling__temperature=0.7)
    _, changes, unsure, before = step_against_plain_loops(run, answers, chosen)
    assert 0.01 < max(abs(change) for own in changes for change in own) < 5
    assert unsure == 0

    updates = run.config.training.updates_per_batch
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
    answers, chosen, (rows, step, place) = next(one_step.groups_with_signal(run, None))
    assert len({answer.reward for answer in answers}) > 1 and chosen == answers
    again, _ = one_step.sampled(run, rows, step)[place]  # the same random numbers
    assert [each.completion for each in again] == [each.completion for each in answers]
    numbers, changes, unsure, _ = step_against_plain_loops(run, answers, chosen)
    assert unsure < 0.1 * sum(map(len, changes))

    columns = [("before", answers), ("later", again[:2])]
    data = data_of(one_step.page(run, answers, numbers, columns, "of a test"))
    assert data["settings"] == "of a test"
    assert data["question"] == answers[0].question.row["prompt"]
    assert [data[name] for name in one_step.NUMBERS] == [numbers[n] for n in one_step.NUMBERS]
    assert (data["rule"], data["normalizer"], data["L"]) == ("none", "max_length", 192)
    for answer, own, shown in zip(answers, changes, data["answers"], strict=True):
        texts, first, change, entropy = zip(*shown["tokens"])
        assert "".join(texts) == run.tokenizer.decode(answer.completion_ids)
        assert first == pytest.approx(answer.before.tolist(), abs=6e-6)  # as rounded
        assert change == pytest.approx(own, abs=BOUND)
        assert entropy == pytest.approx(answer.before_entropies.tolist(), abs=6e-5)
        assert shown["change"] == pytest.approx(fmean(own), abs=BOUND)
        parts = countdown.reward_function(answer.completion, answer.question.row)
        assert [shown[name] for name in ("reward", "advantage", "length", "verdict", "parts")] == [
            sum(weight * parts[part] for part, weight in countdown.REWARD_WEIGHTS.items()),
            answer.advantage, len(answer.completion_ids), ask.verdict(answer),
            ", ".join(f"{part} {value:.2f}" for part, value in parts.items())]
    right = sum(answer.reward_parts["answer"] == 1 for answer in answers)
    assert data["again"][0] == {"title": f"before: {right} of 8 right", "answers": [
        {"text": answer.completion.strip(), "verdict": ask.verdict(answer)}
        for answer in answers[:4]]}
    assert len(data["again"][1]["answers"]) == 2


def test_the_model_before_the_update_is_the_one_that_was_loaded(one_rank):
    """Also where weights decay: the step in which AdamW's moments come into being moves nothing.
    The update itself has the full learning rate, whatever schedule a run would have."""
    run = one_step.prepare(make_config(
        **FEW, training__weight_decay=0.5, training__learning_rate=1e-4, training__warmup_steps=10,
        training__decay_steps=5, training__num_samples_per_step=1))
    loaded, _ = main.load_model(run.config)
    for weight, own in zip(loaded.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(weight, own)
    for answers, chosen, place in itertools.islice(one_step.groups_with_signal(run, None), 2):
        one_step.one_step(run, answers, chosen)
        assert run.optimizer.param_groups[0]["lr"] == 1e-4
    assert place.step > 1  # whose learning rate is another in a run


def test_what_is_sampled_from_has_learned_too_where_it_is_a_copy(model_folder, one_rank):
    """In mixed precision; else the second column would be the first."""
    run, *group = with_answers(model_folder("qwen2"), model__precision="mixed")
    before = copy.deepcopy(run.sampler)
    one_step.one_step(run, *group)
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
    cut_off, random_bytes = ids[:-1], [stream.randrange(len(tokenizer)) for _ in range(200)]
    for own in (cut_off, random_bytes, ids):
        texts = one_step.texts_of_tokens(tokenizer, own)
        assert "".join(texts) == tokenizer.decode(own) and len(texts) == len(own)
    assert "".join(texts) == text
    assert all(own in ("", tokenizer.decode([token])) for token, own in zip(ids, texts)
               if token < 256 and own.isascii())


# ---------------------------------------------------------------- the command line

DIGITS = """
import countdown
REWARD_WEIGHTS = {"digits": 1.0}
SOLVED = "digits"
def load(dataset, max_rows):
    return [{"prompt": countdown.generate_prompt([3, 7, 25], i)} for i in range(40)]
def reward_function(completion, row):
    return {"digits": min(1.0, sum(each.isdigit() for each in completion) / 20)}
"""
QUICK = ["task.name=digits.py", "training.max_new_gen_tokens=12", "data.num_validation=4"]
TASK = ["data.max_rows=60", "data.num_validation=4"]
GSM8K = ["task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl", TASK[1]]
MASKED = "training.mask_truncated=true"


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """The command line, in this process, from a folder of its own that has a task: exit code, what
    was said on stdout and on stderr, and what the pages hold that it has left, by their names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)

    def call(*words):
        try:
            code = one_step.command([*map(str, words)])
        finally:
            stay(0)
        pages = {}
        for path in tmp_path.glob("*.html"):
            pages[path.name] = data_of(path.read_text(encoding="utf-8"))
            path.unlink()
        return code, *capfd.readouterr(), pages

    return call


def test_a_question_of_ones_own_and_any_key_also_for_the_model_of_a_run(command, tmp_path):
    """The third column is asked in the same way as the first: here it is the same model."""
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "runs" / "x" / "best")
    code, out, err, pages = command("3", "7", "25", "=", "68", *TASK, "sampling.temperature=0.9",
                                    "training.learning_rate=1e-3", "training.seed=1")
    assert code == 0 and err == "" and out.splitlines()[-1].startswith("one_step.html shows")
    data = pages["one_step.html"]
    assert data["question"] == countdown.generate_prompt([3, 7, 25], 68)
    assert re.search(r"^tiny/model, one update at learning rate 0.001 on 8 answers, sampled at "
                     r"temperature 0.9. training.seed 1, step \d+, question 1$", data["settings"])
    assert out.splitlines()[0] == ", ".join(
        f"{name} {data[name]:.4f}" for name in one_step.NUMBERS)
    before, after, trained = data["again"]
    assert [column["title"].split(":")[0] for column in data["again"]] == [
        "before", "after this one update", "runs/x/best"]
    assert trained["answers"] == before["answers"] != after["answers"]


@pytest.mark.parametrize("keys", [
    [*QUICK, "training.learning_type=sil", "training.k_best_of_n=[2,6]"],
    [*TASK, MASKED, "training.max_new_gen_tokens=48"],
    [*QUICK, "training.kl_beta=0.04", "training.updates_per_batch=2"],
    [*QUICK, "training.scale_rewards=group", "training.loss_normalizer=tokens",
     "model.lora_rank=4"]], ids=["SIL", "masked", "KL", "LoRA"])
def test_it_makes_the_update_of_any_variant(keys, command):
    code, out, err, pages = command(*keys, "--out", "here.html")
    assert code == 0, err
    data = pages["here.html"]
    answers = data["answers"]
    assert not any(math.isnan(data[name] or 0) for name in one_step.NUMBERS)
    advantages = [answer["advantage"] for answer in answers]
    if "training.learning_type=sil" in keys:
        assert (data["rule"], data["k"], len(answers), data["change_punished"]) == (
            "sil", 2, 6, None) and "change_punished none" in out
        assert sorted(advantages) == [0, 0, 0, 0, 1, 1]
    else:
        rewards = [answer["reward"] for answer in answers]
        scale = stdev(rewards) + 1e-4 if data["rule"] == "group" else 1
        assert advantages == pytest.approx(
            [(reward - fmean(rewards)) / scale for reward in rewards])
    truncated = [answer["verdict"].startswith("truncated") for answer in answers]
    assert [answer["learned"] for answer in answers] == [
        A != 0 and not cut for A, cut in zip(advantages, truncated)]
    assert any(truncated) == (MASKED in keys)


def test_another_task_is_judged_by_its_own_parts(command, tmp_path):
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "runs" / "x" / "best")
    code, out, err, pages = command(*QUICK)
    assert code == 0 and err == "" and "shows every token" in out
    for answer in pages["one_step.html"]["answers"]:
        text = "".join(token[0] for token in answer["tokens"])
        assert answer["reward"] == sum(each.isdigit() for each in text) / 20
        assert answer["parts"] == answer["verdict"] == f"digits {answer['reward']:.2f}"
    assert len(pages["one_step.html"]["again"]) == 2  # what runs/ holds is about something else


def test_each_mistake_and_nothing_to_learn_end_in_one_line_that_says_what_to_do(command, tmp_path):
    """No page says that nothing has moved."""
    adapters = tmp_path / "runs" / "lora" / "best"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").write_text("{}")
    no_folder, nothing = "model.name='runs/none': there is no such folder", "error: 50 groups, and"
    for words, says in (
            ([*QUICK, "training.learningrate=1"], "Did you mean training.learning_rate?"),
            ([*QUICK, "training.learning_rate=fast"], "training.learning_rate='fast'"),
            ([*QUICK, "--model", "runs/none"], no_folder),
            ([*QUICK, "--trained", "runs/none"], no_folder),
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
            ([*QUICK, "training.learning_rate=1e9"], "lower training.learning_rate"),
            # what the model cannot do at all; and where no answer ends within four tokens
            ([*GSM8K, "training.max_new_gen_tokens=16"], f"{nothing} in none of them do answers"),
            ([*QUICK, MASKED, "training.kl_beta=0.04", "training.k_best_of_n=[4,4]",
              "training.max_new_gen_tokens=4"], nothing)):
        code, out, err, pages = command(*words)
        assert (code, out, pages) == (2, "", {}) and re.fullmatch(r"error: .*\n", err), err
        assert says in err


def test_all_averages_over_groups_each_from_the_model_as_it_was_loaded(command):
    """So each of them is what a fresh start makes of that group, the third as the first: neither
    weights nor AdamW's moments are those that the group before has left."""
    code, line, err, pages = command(*QUICK, "--all", 4)
    assert code == 0 and line.count("\n") == 1 and err == "" and pages == {}
    single, expected = [], {"groups": 4}
    for i in range(4):
        one_step.join()
        run = one_step.prepare(main.load_config(QUICK))
        answers, chosen, _ = list(itertools.islice(one_step.groups_with_signal(run, None), 4))[i]
        single.append(one_step.one_step(run, answers, chosen))
        stay(0)
    for name in one_step.NUMBERS:
        own = [numbers[name] for numbers in single]
        expected |= {name: fmean(own), f"{name}_std": stdev(own)}
    assert json.loads(line) == pytest.approx(expected, abs=6e-5)

    assert command(*QUICK, "--all", 4)[1] == line
    first, data = json.loads(command(*QUICK, "--all", 1)[1]), command(*QUICK)[3]["one_step.html"]
    for name in one_step.NUMBERS:
        assert first[name] == round(data[name], 4) and first[f"{name}_std"] is None


# ---------------------------------------------------------------- the page

SIZES = {"phone": (390, 844), "laptop": (1200, 900)}
of_each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
in_each_light = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def in_a_browser(test):
    """.ci/run installs Debian's chromium before the soak tests."""
    missing = shutil.which("chromedriver") is None
    return pytest.mark.soak(pytest.mark.skipif(missing, reason="no Chromium and its driver here")(
        test))


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
    return path, data_of(path.read_text(encoding="utf-8"))


def opened(browser, page: tuple, *size, **how) -> dict:
    path, data = page
    browser.open(path, *size, **how)
    return data


def is_quiet(browser) -> bool:
    """No message, no request but for the page itself, and nothing to be scrolled sideways."""
    width, room, address = browser.run("const root = document.documentElement; "
                                       "return [root.scrollWidth, root.clientWidth, location.href]")
    assert browser.console() == [] and browser.requests() == [address] and width <= room
    return True


def texts(browser, css: str) -> list[str]:
    return browser.run("return [...document.querySelectorAll(arguments[0])].map("
                       "each => each.textContent)", css)


def parts_of(browser, css: str) -> list[list[str]]:
    """The texts of what is inside of each."""
    return browser.run("return [...document.querySelectorAll(arguments[0])].map("
                       "each => [...each.children].map(part => part.textContent))", css)


def fixed(number: float, digits: int) -> str:
    """As many digits as JavaScript's toFixed shows: of two that are as near the larger."""
    unit = decimal.Decimal(1).scaleb(-digits)
    return str(decimal.Decimal(number).quantize(unit, decimal.ROUND_HALF_UP))


def signed(number: float, digits: int) -> str:
    return ("-" if number < 0 else "+") + fixed(abs(number), digits)


def check_bars(browser, css: str, values: list[float]):
    """From the middle to the right, or, below 0, to the left; the largest fills its half."""
    bars = browser.run("return [...document.querySelectorAll(arguments[0])].map("
                       "bar => [bar.style.left, bar.style.width].map(parseFloat))", css)
    largest = max(map(abs, values)) or 1
    for (left, width), value in zip(bars, values, strict=True):
        share = 50 * abs(value) / largest
        assert width == pytest.approx(share, abs=0.01)
        assert left == pytest.approx(50 - share * (value < 0), abs=0.01)


def weights(data: dict, rule: str, normalizer: str):
    """A and A / Z of each answer of a page, by main.py: what pulls at a token is the gradient of
    the loss with respect to its log-probability. Of equal answers those are taken for the best
    that were learned from, and else the first."""
    sil, answers = rule == "sil", data["answers"]
    training = make_config(
        training__learning_type="sil" if sil else "grpo", training__loss_normalizer=normalizer,
        training__scale_rewards="none" if sil else rule, training__max_new_gen_tokens=data["L"],
        training__k_best_of_n=[data["k"] if sil else len(answers), len(answers)]).training
    question = main.Question({}, [0])
    group = [main.Trajectory(question, [0] * answer["length"], "", False, reward=answer["reward"])
             for answer in answers]
    order = iter([(answer["learned"], -i) for i, answer in enumerate(answers)])
    chosen = main.compute_advantages(group, training, SimpleNamespace(random=order.__next__))
    T, pulls = sum(len(answer.completion_ids) for answer in chosen), {}
    for answer in chosen:
        logprobs = torch.zeros(len(answer.completion_ids), dtype=torch.float64, requires_grad=True)
        loss, _ = main.policy_loss(logprobs, [answer], len(chosen), T, training)
        pulls[id(answer)] = -float(torch.autograd.grad(loss, logprobs)[0][0])
    return ([answer.advantage for answer in group],
            [pulls.get(id(answer), 0.0) for answer in group])


@in_a_browser
@in_each_light
@of_each_size
def test_the_page_asks_for_nothing_complains_of_nothing_and_fits(size, dark, made, browser):
    opened(browser, made, *size, dark=dark)
    assert is_quiet(browser)
    assert browser.run("return innerWidth") == size[0]
    colours = browser.run("const style = getComputedStyle(document.body); "
                          "return [style.backgroundColor, style.color]")
    page, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (page < text) == dark
    for css in ("[value=meant]", "[value=against]", "[value=happened]", "#with-numbers"):
        browser.click(css)
    browser.click("#rule")
    assert is_quiet(browser)  # still, with the widest that it shows


@in_a_browser
def test_every_number_shown_is_that_of_the_data(made, browser):
    """And those of the data are those of the changes of its tokens, which are rounded."""
    data = opened(browser, made)
    answers = data["answers"]
    weighed = [[(token[2], answer["advantage"]) for token in answer["tokens"]]
               for answer in answers if answer["advantage"]]
    shares = [answer["as_meant"] for answer in answers if answer["advantage"]]
    assert all(answer["as_meant"] is None for answer in answers if not answer["advantage"])
    for own, share in zip([*weighed, list(itertools.chain(*weighed))],
                          [*shares, data["moved_as_meant"]], strict=True):
        (least, most), as_meant, *means, _ = four_numbers(own, 0.6 * MOVED)
        assert least - 1e-6 <= share <= most + 1e-6
    assert as_meant == pytest.approx(data["change_as_meant"], abs=0.00051)  # of all of them
    assert means == pytest.approx([data["change_rewarded"], data["change_punished"]], abs=2e-6)
    assert texts(browser, "h1, #settings, #question") == [
        "One step, token by token", data["settings"], data["question"]]
    assert texts(browser, "#numbers b") == [
        fixed(100 * data["moved_as_meant"], 1) + " %",
        fixed(100 * data["change_as_meant"], 1) + " %",
        signed(data["change_rewarded"], 4), signed(data["change_punished"], 4)]
    *_, total = itertools.accumulate(answer["reward"] for answer in answers)  # as JavaScript adds
    mean = total / len(answers)
    for i, (answer, head) in enumerate(zip(answers, parts_of(browser, ".head"), strict=True), 1):
        share = answer["as_meant"]
        assert head == [
            f"answer {i}", f"reward {fixed(answer['reward'], 2)} ({answer['parts']})",
            f"mean {fixed(mean, 2)}", f"A {signed(answer['reward'] - mean, 3)}",
            answer["verdict"], f"{len(answer['tokens'])} tokens",
            f"mean change {signed(answer['change'], 4)}",
            "" if share is None else f"{fixed(100 * share, 0)} % as meant"]
    check_bars(browser, ".answer .bar i", [answer["advantage"] for answer in answers])
    assert parts_of(browser, "#again > .card") == [[column["title"], *itertools.chain(*(
        (own["text"], f"-> {own['verdict']}") for own in column["answers"]))]
        for column in data["again"]]


TOKENS = """return [...document.querySelectorAll(".token")].map(span => {
  const style = getComputedStyle(span)
  return {text: span.textContent, up: span.classList.contains("up"),
          down: span.classList.contains("down"), colour: style.backgroundColor,
          line: style.borderBottomWidth + style.borderBottomStyle,
          number: getComputedStyle(span, "::after").content.replaceAll('"', "")} })"""


@in_a_browser
@in_each_light
def test_the_switch_colours_the_tokens_that_it_says_and_numbers_them(dark, made, browser):
    """Blue and underlined what went up, or was meant to; orange and dotted what went down; nothing
    where there is next to nothing. The full colour is that of all but the largest twentieth."""
    data = opened(browser, made, dark=dark)
    rgb = {name: tuple(map(int, browser.run(
        "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])",
        f"--{name}").split())) for name in ("up", "down")}
    assert rgb["up"][2] > rgb["up"][0] and rgb["down"][0] > rgb["down"][2]  # blue, orange
    _, pulls = weights(data, "none", "max_length")
    tokens = [(text, change, pull) for answer, pull in zip(data["answers"], pulls)
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
        coloured = 0
        for (text, change, pull), token in zip(tokens, browser.run(TOKENS), strict=True):
            assert token["text"] == text.replace("\n", "\u21b5")
            value = value_of(change, pull)
            strength = min(1, math.sqrt(abs(value) / full))
            *colour, alpha = map(float, re.findall(r"[\d.]+", token["colour"]))
            assert alpha == pytest.approx(0.65 * strength, abs=0.005)
            assert tuple(colour) == rgb["down" if value < 0 else "up"] or alpha == 0
            if abs(strength - 0.1) > 1e-6:
                shown = strength > 0.1
                assert (token["up"], token["down"]) == (shown and value > 0, shown and value < 0)
                assert token["line"] == ("0pxnone" if not shown else "2pxsolid" if value > 0
                                         else "2pxdotted")
                assert token["number"] == (signed(value, digits) if shown else "")
                coloured += shown
        assert coloured > 0
    browser.click("#with-numbers")
    assert not any(token["number"] for token in browser.run(TOKENS))


def tells(browser, data: dict, place: int) -> bool:
    """Whether the page says of this token what it shall."""
    places = [(i, answer["advantage"], *token) for i, answer in enumerate(data["answers"], 1)
              for token in answer["tokens"] if token[1] is not None]
    i, A, text, before, change, entropy = places[place]
    meant, happened = ("up" if number > least else "down" if number < -least else "nothing"
                       for number, least in ((A, 0), (change, MOVED)))
    (told,) = texts(browser, "#inspector")
    assert told == (
        f"{json.dumps(text, ensure_ascii=False)} of answer {i}: p {fixed(math.exp(before), 4)} -> "
        f"{fixed(math.exp(before + change), 4)}, log p {signed(change, 4)}; A {signed(A, 3)}, "
        f"entropy {fixed(entropy, 3)}; meant {meant}, happened {happened}")
    return True


@in_a_browser
@of_each_size
def test_a_token_pointed_at_or_tapped_tells_its_numbers(size, made, browser):
    data = opened(browser, made, *size)
    last = sum(len(answer["tokens"]) for answer in data["answers"]) - 1
    for place, reach in ((7, browser.hover), (30, browser.click), (last, browser.click),
                         (len(data["answers"][0]["tokens"]), browser.hover)):
        reach(f"[data-place='{place}']")
        assert tells(browser, data, place)
        assert browser.run("return [...document.querySelectorAll('.chosen')].map("
                           "each => +each.dataset.place)") == [place]
    assert is_quiet(browser)


@in_a_browser
def test_with_the_keyboard_alone_everything_can_be_reached_and_arrow_keys_go_on(made, browser):
    data = opened(browser, made)
    labels = browser.run(
        "return [...document.querySelectorAll('input, select, button, a, [tabindex]')].map("
        "each => [...each.labels].map(label => label.textContent.trim()))")
    assert len(labels) == 6 and all(len(own) == 1 and own[0] for own in labels)
    last = len(texts(browser, ".token")) - 1
    browser.click(f"[data-place='{last}']")
    browser.key("ArrowRight")
    assert tells(browser, data, last)  # there is no next
    browser.key("ArrowLeft")
    assert tells(browser, data, last - 1)
    opened(browser, made)
    for place in range(151):
        browser.key("ArrowRight")  # from the first token on
        assert place % 50 or tells(browser, data, place)
    token, below = browser.run(
        "return ['.chosen', '#inspector'].map(css => document.querySelector(css)"
        ".getBoundingClientRect()).map((box, i) => i ? box.top : box.bottom)")
    assert 0 < token <= below  # in sight, and not behind the inspector

    # from the top: Chromium 150 goes on from what was last scrolled into view
    browser.run("scrollTo(0, 0); document.body.tabIndex = -1; document.body.focus()")
    for keys, reached in ((["Tab"], ["mode", "happened", True]),
                          (["ArrowRight"], ["mode", "against", True]),
                          (["Tab", " "], ["with-numbers", "on", True]),
                          (["Tab", "ArrowDown"], ["rule", "group", None]),
                          (["Tab", "ArrowDown"], ["normalizer", "tokens", None])):
        for key in keys:
            browser.key(key)
        assert browser.run("const it = document.activeElement; "
                           "return [it.name || it.id, it.value, it.checked]") == reached
        assert tells(browser, data, 150)  # the key was the control's own
    assert any(token["number"] for token in browser.run(TOKENS))
    (formula,) = texts(browser, "#formula")
    assert "std r" in formula and "DAPO" in formula and is_quiet(browser)


def check_family(browser, data: dict):
    """The table, for each choice of advantages and normaliser, against main.py."""
    answers, lengths = data["answers"], [answer["length"] for answer in data["answers"]]
    for rule, normalizer in itertools.product(("none", "group", "mean", "sil"),
                                              ("max_length", "tokens", "sequence")):
        browser.run("""for (const [id, value] of Object.entries(arguments[0])) {
            document.getElementById(id).value = value
            document.getElementById(id).dispatchEvent(new Event("change", {bubbles: true})) }""",
                    {"rule": rule, "normalizer": normalizer})
        head, *rows = parts_of(browser, "#family tr")
        assert head == ["answer", "r", "tokens", "A", "A / Z, each token", "all its tokens", ""]
        A, pulls = weights(data, rule, normalizer)
        totals = [pull * length for pull, length in zip(pulls, lengths)]
        for i, row in enumerate(rows):
            assert row[:3] == [str(i + 1), fixed(answers[i]["reward"], 2), str(lengths[i])]
            for text, number, digits in zip(row[3:], (A[i], pulls[i], totals[i]), (3, 6, 4)):
                assert re.fullmatch(rf"[+-]\d+\.\d{{{digits}}}", text)
                assert float(text) == pytest.approx(number, rel=0, abs=0.5 * 10**-digits + 1e-9)
            assert row[6:] == [""]
        check_bars(browser, "#family i", totals)
        assert len(rows) == len(answers)


# ---------------------------------------------------------------- a page of anything

def made_up_page(tmp_path, rewards: list, columns=(), *, tokens=None, prompt="Go:",
                 completion="it went", parts=("right",), settings="of a test",
                 numbers=(0.5, 0.75, 0.25, None), **keys):
    """A page of made-up answers. `tokens`: the texts of each answer's. Returns its path, and its
    data."""
    config = make_config(task__name="made_up.py", **keys)
    tokens = tokens or [[f"w{i} " for i in range(3 + j % 4)] for j in range(len(rewards))]
    words, ids = list(itertools.chain(*tokens)), itertools.count()
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(words[i] for i in ids))
    run = SimpleNamespace(config=config, tokenizer=tokenizer, task=SimpleNamespace(SOLVED=parts[0]))
    question = main.Question({"prompt": prompt}, [0])
    answers = [main.Trajectory(question, list(itertools.islice(ids, len(own))), completion, False,
                               dict.fromkeys(parts, reward), reward)
               for reward, own in zip(rewards, tokens, strict=True)]
    main.compute_advantages(answers, config.training, random.Random(1))
    for i, answer in enumerate(answers):
        stream, length = torch.Generator().manual_seed(i), len(answer.completion_ids)
        answer.before = -3 * torch.rand(length, generator=stream)
        answer.before_entropies = torch.rand(length, generator=stream)
        answer.after = answer.before + 0.1 * torch.randn(length, generator=stream)
        answer.new_log_probs = answer.after if answer.advantage else None
    html = one_step.page(run, answers, dict(zip(one_step.NUMBERS, numbers)),
                         [(title, answers) for title in columns], settings)
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    assert len(html.encode()) <= 300_000
    return path, data_of(html)


@in_a_browser
@pytest.mark.parametrize("rewards", [
    None, [1.0, 0.0], [0.0, 0.0, 0.0], [0.3, 0.3, 0.3, 0.3], [-1.0, -2.0, -2.0, -0.5],
    [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [1e9, -1e9, 0.1, 0.2, 1e-9]], ids=str)
def test_the_family_table_is_what_main_py_makes_of_the_same_rewards(
        rewards, made, browser, tmp_path):
    """Of the page as made, or of any others; at first as the run itself has weighed them."""
    pages = [made] if rewards is None else (made_up_page(tmp_path, rewards, **keys) for keys in (
        {}, {"training__learning_type": "sil", "training__k_best_of_n": [1, len(rewards)],
             "training__loss_normalizer": "tokens"}))
    for page in pages:
        data = opened(browser, page)
        assert browser.run("return [...document.querySelectorAll('select')].map("
                           "each => each.value)") == [data["rule"], data["normalizer"]]
        check_family(browser, data)
        assert is_quiet(browser)


@in_a_browser
def test_of_equal_answers_the_table_takes_those_that_self_imitation_has_chosen(browser, tmp_path):
    """It chooses among them by chance: the first would be others than the page has coloured."""
    data = opened(browser, made_up_page(
        tmp_path, [1.0] * 6, training__learning_type="sil", training__k_best_of_n=[2, 6],
        training__loss_normalizer="tokens"))
    A = [answer["advantage"] for answer in data["answers"]]
    assert sorted(A) == [0, 0, 0, 0, 1, 1] and A[:2] != [1, 1]
    pull = 1 / sum(answer["length"] for answer in data["answers"] if answer["advantage"])
    rows = parts_of(browser, "#family tr")[1:]
    assert [row[3:5] for row in rows] == [[signed(each, 3), signed(each * pull, 6)] for each in A]
    browser.click("[value=meant]")
    browser.click("#with-numbers")
    assert [token["number"] for token in browser.run(TOKENS)] == [
        signed(pull, 5) if each else ""
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
    def page_of(words):
        every = "".join(words)
        return made_up_page(
            tmp_path, [1.0, 0.0, 0.5], [f"runs/{word[:300]}" for word in words[:3]],
            tokens=[words, words[:5], words[5:]], prompt=every, completion=every, parts=words,
            settings=every[:2000])

    opened(browser, page_of([f"word{i}" for i in range(len(HOSTILE))]))
    harmless = browser.run(SHAPE)
    assert harmless["scripts"] == 2 and harmless["hacked"] is None

    page = page_of(HOSTILE)
    for size in SIZES.values():
        data = opened(browser, page, *size)
        assert browser.run(SHAPE) == harmless and is_quiet(browser)
    assert [token["text"] for token in browser.run(TOKENS)] == [
        shortened(visible(word), 40).replace("\n", "\u21b5")
        for word in [*HOSTILE, *HOSTILE[:5], *HOSTILE[5:]]]
    shown = "".join(texts(browser, "#question, .token, #again pre, .head"))
    assert set("\0\x1b\x7f\r\u202e\u2066\u200f\u061c\u2028\ud800").isdisjoint(shown)
    assert texts(browser, "#question") == [shortened(visible("".join(HOSTILE)), 8192)]
    for place in range(len(HOSTILE)):
        browser.click(f"[data-place='{place}']")
        assert tells(browser, data, place)
    for mode in ("meant", "against", "happened"):
        browser.click(f"[value={mode}]")
        assert any(token["up"] or token["down"] for token in browser.run(TOKENS))
    check_family(browser, data)
    assert browser.run(SHAPE)["hacked"] is None and is_quiet(browser)


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
    data = opened(browser, made_up_page(
        tmp_path, [float(i % 3) for i in range(64)], ["before", "after"],
        tokens=[[stream.choice(words) for _ in range(4096)] for _ in range(64)],
        numbers=(0.51236, 0.7, 0.1, -0.00012)))
    assert texts(browser, "#numbers b") == ["51.2 %", "70.0 %", "+0.1000", "-0.0001"]
    for answer, head, kept, left_out in zip(
            data["answers"], parts_of(browser, ".head"), parts_of(browser, ".answer > .mono"),
            texts(browser, ".answer > .mono > .soft"), strict=True):
        assert len(kept) > 16 and left_out in kept and str(4096 - len(kept) + 1) in left_out
        assert head[5:7] == ["4096 tokens", f"mean change {signed(answer['change'], 4)}"]
        assert abs(answer["change"]) < 0.02  # of all 4096, and not of the few that are shown
    browser.click("[data-place='20']")
    assert tells(browser, data, 20)
    check_family(browser, data)
    assert is_quiet(browser)


def test_a_page_of_too_many_answers_is_refused_and_never_tried_for_ever(tmp_path):
    with pytest.raises(UserError, match="2000 answers are too many for a page"):
        made_up_page(tmp_path, [float(i % 2) for i in range(2000)])
