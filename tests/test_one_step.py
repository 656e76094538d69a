"""examples/one_step.py: what it measures, against plain loops; its command line; and its page."""

import copy
import itertools
import json
import math
import random
import shutil
from statistics import fmean, stdev
from types import SimpleNamespace

import ask
import one_step
import pytest
import torch
import transformers
from browser import HOSTILE, Browser, data_of
from conftest import as_numbers, make_config, plain_logprobs, stay
from processes import ROOT

import countdown
import main
from machinery.errors import UserError

FEW = {"data__max_rows": 60, "data__num_validation": 4, "model__precision": "float32"}
MOVED = 1e-6  # A token moved if its log-probability changed by more than this.
# Rounding in float32 comes to 1.5e-5 in a log-probability.
BOUND = 2e-4


# ---------------------------------------------------------------- what is measured

REWARDS = [1.0, 0.0, 0.5, 0.25, 1.0, 0.5, 0.0, 0.75]  # Two of them equal the mean.
VARIANTS = {
    "Dr. GRPO": {},
    "KL and two updates": {"training__kl_beta": 0.1, "training__updates_per_batch": 2},
    "masked": {"training__mask_truncated": True},
    "SIL": {"training__learning_type": "sil", "training__k_best_of_n": [3, 8]},
    "in pieces": {"training__tokens_per_micro_batch": 30}}


def run_with_answers(folder, **keys):
    """A run, made-up answers of ragged lengths, some truncated, and those that count."""
    run = one_step.prepare(make_config(**{**FEW, **keys, "model__name": str(folder)}))
    stream, question = random.Random(0), main.make_question(run, run.training_rows[0])
    answers = []
    for i, reward in enumerate(REWARDS):
        ids = [stream.randrange(len(run.tokenizer)) for _ in range(1 + 2 * i)]
        answers.append(main.Trajectory(question, ids, "", i % 3 == 1, {}, reward))
    return run, answers, main.compute_advantages(answers, run.config.training)


def measured_plainly(model, answers, temperature):
    """log pi and entropy of each token, each answer alone, in float64."""
    model = copy.deepcopy(model).double().eval()
    entropies = []
    with torch.no_grad():
        log_probs = as_numbers(plain_logprobs(model, answers, temperature))
        for answer in answers:
            first = len(answer.prompt_ids) - 1
            logits = model(torch.tensor([answer.prompt_ids + answer.completion_ids])).logits[0]
            of_answer = []
            for t in range(answer.num_tokens):
                shares = torch.softmax(logits[first + t] / temperature, dim=-1).tolist()
                of_answer.append(-sum(p * math.log(p) for p in shares if p > 0))
            entropies.append(of_answer)
    return log_probs, entropies


def three_numbers(changes: list[float], advantages: list[float]) -> list[float]:
    as_meant, rewarded, punished = 0.0, [], []
    for change, A in zip(changes, advantages, strict=True):
        if change * A > 0:
            as_meant += abs(change)
        (rewarded if A > 0 else punished).append(change)
    total = sum(abs(change) for change in changes)
    return [as_meant / total, fmean(rewarded), fmean(punished) if punished else math.nan]


@pytest.mark.mathematics
@pytest.mark.parametrize("name", VARIANTS)
def test_all_changes_and_the_three_numbers_equal_those_of_plain_loops(name, model_folder, one_rank):
    """For every token of every answer, also of those that nothing is learned from."""
    run, answers, counted = run_with_answers(
        model_folder("qwen2"), **VARIANTS[name], training__learning_rate=1e-3,
        sampling__temperature=0.7)
    before, before_entropies = measured_plainly(run.model, answers, 0.7)

    numbers = one_step.one_step(run, answers, counted)

    after, after_entropies = measured_plainly(run.model, answers, 0.7)
    changes, advantages = [], []
    for i, answer in enumerate(answers):
        assert answer.before.tolist() == pytest.approx(before[i], abs=BOUND)
        assert answer.after.tolist() == pytest.approx(after[i], abs=BOUND)
        assert answer.before_entropies.tolist() == pytest.approx(before_entropies[i], abs=BOUND)
        assert answer.after_entropies.tolist() == pytest.approx(after_entropies[i], abs=BOUND)
        is_masked = name == "masked" and answer.is_truncated
        if answer.advantage != 0 and not is_masked:
            changes += [new - old for old, new in zip(before[i], after[i])]
            advantages += answer.num_tokens * [answer.advantage]
    expected = three_numbers(changes, advantages)
    for key, value in zip(one_step.NUMBERS, expected):
        assert numbers[key] == pytest.approx(value, abs=BOUND, nan_ok=True)
    assert 0.01 < max(abs(change) for change in changes) < 5
    updates = run.config.training.updates_per_batch
    assert {float(moments["step"]) for moments in run.optimizer.state.values()} == {updates}


def test_the_model_before_the_update_is_the_one_that_was_loaded(one_rank):
    """Also where weights decay. The update has the full learning rate, whatever the schedule."""
    run = one_step.prepare(make_config(
        **FEW, training__weight_decay=0.5, training__learning_rate=1e-4, training__warmup_steps=10,
        training__decay_steps=50, training__num_samples_per_step=1))
    loaded, _ = main.load_model(run.config)
    for weight, own in zip(loaded.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(weight, own)

    groups = one_step.groups_with_signal(run, None)
    for answers, counted, place in itertools.islice(groups, 2):
        one_step.one_step(run, answers, counted)
        assert run.optimizer.param_groups[0]["lr"] == 1e-4
    assert place.step > 1  # In a run, its learning rate is another one.


@pytest.mark.parametrize("text", [
    "30+26=56 yes\n</think>\n<answer>(29-3)+30</answer>", "\u00e9\U0001f642\u65e5 x\n",
    "a\ufffdb"], ids=ascii)
def test_the_texts_of_the_tokens_make_the_text_however_characters_are_cut(text):
    """The tokens of tiny/model are bytes. A character of four bytes comes with the last one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    stream, ids = random.Random(0), tokenizer(text)["input_ids"]
    random_bytes = [stream.randrange(len(tokenizer)) for _ in range(200)]

    for own in (ids, ids[:-1], random_bytes):
        texts = one_step.texts_of_tokens(tokenizer, own)
        assert len(texts) == len(own) and "".join(texts) == tokenizer.decode(own)


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
MASKED = "training.mask_truncated=true"


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """The command line, in a folder with a task and a trained model. Returns the exit code, stdout,
    stderr, and the data of the page if one was written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "runs" / "x" / "best")

    def call(*words):
        try:
            code = one_step.command([str(word) for word in words])
        finally:
            stay(0)
        data = None
        for path in tmp_path.glob("*.html"):
            data = data_of(path.read_text(encoding="utf-8"))
            path.unlink()
        return code, *capfd.readouterr(), data

    return call


def test_the_terminal_and_the_page_show_the_same_numbers(command):
    """The third column is the same model as the first one here, and is asked in the same way."""
    code, out, err, data = command("3", "7", "25", "=", "68", *TASK, "sampling.temperature=0.9",
                                   "training.learning_rate=1e-3", "training.seed=1")

    assert code == 0 and err == ""
    told = ", ".join(f"{name} {data[name]:.4f}" for name in one_step.NUMBERS)
    assert out.splitlines()[0] == told
    assert data["question"] == countdown.generate_prompt([3, 7, 25], 68)
    for words in ("learning rate 0.001 ", "8 answers", "temperature 0.9.", "seed 1,"):
        assert words in data["settings"]
    before, after, trained = data["again"]
    assert trained["title"].startswith("runs/x/best: ")
    assert trained["answers"] == before["answers"] != after["answers"]


def test_masked_answers_are_not_learned_from(command):
    code, _, err, data = command(*TASK, MASKED, "training.max_new_gen_tokens=40")

    assert code == 0, err
    truncated = [answer["verdict"].startswith("truncated") for answer in data["answers"]]
    assert any(truncated)
    for answer, is_truncated in zip(data["answers"], truncated):
        assert answer["learned"] == (answer["advantage"] != 0 and not is_truncated)


def test_another_task_and_learning_type_are_shown_as_they_are(command):
    code, out, err, data = command(*QUICK, "training.learning_type=sil",
                                   "training.k_best_of_n=[2,6]", "model.lora_rank=4")

    assert code == 0 and "change_punished none" in out, err
    assert (data["rule"], data["k"], data["change_punished"]) == ("sil", 2, None)
    assert sorted(answer["advantage"] for answer in data["answers"]) == [0, 0, 0, 0, 1, 1]
    for answer in data["answers"]:
        text = "".join(token[0] for token in answer["tokens"])
        assert answer["reward"] == sum(each.isdigit() for each in text) / 20
        assert answer["parts"] == answer["verdict"] == f"digits {answer['reward']:.2f}"
    assert len(data["again"]) == 2  # The model in runs/ is about another task.


@pytest.mark.parametrize(("words", "says"), [
    ([*QUICK, "--model", "runs/none"], "model.name='runs/none' cannot be loaded"),
    ([*QUICK, "--out", "none/x.html"], "--out none/x.html cannot be written"),
    ([*TASK, "--all", "2", "3", "7", "=", "10"], "--all N averages"),
    (["3", "7", "=", "10", *QUICK], "'3 7 = 10' is a question of Countdown"),
    (["--model", "lora", *TASK], "make a plain model of them first"),
    ([*QUICK, "training.learning_rate=1e9"], "lower training.learning_rate"),
    # No answer ends within four tokens.
    ([*QUICK, MASKED, "training.k_best_of_n=[4,4]", "training.max_new_gen_tokens=4"],
     "50 groups, and in none of them")], ids=str)
def test_a_mistake_or_nothing_to_learn_is_one_line_and_no_page(words, says, command, tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")

    code, out, err, data = command(*words)

    assert (code, out, data) == (2, "", None)
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


def test_all_averages_over_groups_each_from_the_model_as_it_was_loaded(command):
    """So each of its groups gives the numbers that a fresh start gives for it."""
    code, line, err, data = command(*QUICK, "--all", 3)
    assert code == 0 and err == "" and data is None

    found = []
    for i in range(3):
        one_step.join()
        run = one_step.prepare(main.load_config(QUICK))
        groups = one_step.groups_with_signal(run, None)
        answers, counted, _ = next(itertools.islice(groups, i, None))
        found.append(one_step.one_step(run, answers, counted))
        stay(0)
    expected = {"groups": 3}
    for name in one_step.NUMBERS:
        values = [numbers[name] for numbers in found]
        expected |= {name: fmean(values), f"{name}_std": stdev(values)}
    assert json.loads(line) == pytest.approx(expected, abs=6e-5)


# ---------------------------------------------------------------- the page

def test_the_page_holds_what_was_measured_of_a_group(one_rank):
    run = one_step.prepare(make_config(**FEW, training__learning_rate=1e-2))
    answers, counted, (rows, step, place) = next(one_step.groups_with_signal(run, None))
    again, _ = one_step.sampled(run, rows, step)[place]  # with the same random numbers
    assert [answer.completion for answer in again] == [answer.completion for answer in answers]
    numbers = one_step.one_step(run, answers, counted)
    data = data_of(one_step.page(run, answers, numbers, [("before", answers)], "of a test"))

    assert data["question"] == answers[0].question.row["prompt"]
    assert (data["rule"], data["normalizer"], data["L"]) == ("none", "max_length", 192)
    for name in one_step.NUMBERS:
        assert data[name] == numbers[name]
    for answer, shown in zip(answers, data["answers"], strict=True):
        texts, before, change, entropy = zip(*shown["tokens"])
        changes = (answer.after - answer.before).tolist()
        assert "".join(texts) == run.tokenizer.decode(answer.completion_ids)
        assert before == pytest.approx(answer.before.tolist(), abs=6e-6)
        assert change == pytest.approx(changes, abs=6e-7)
        assert entropy == pytest.approx(answer.before_entropies.tolist(), abs=6e-5)
        assert shown["change"] == pytest.approx(fmean(changes), abs=1e-6)
        moved = [value * answer.advantage > 0 for value in changes if abs(value) > MOVED]
        assert shown["as_meant"] == (
            pytest.approx(fmean(moved)) if answer.advantage and moved else None)
        assert shown["advantage"] == answer.advantage and shown["length"] == answer.num_tokens
        parts = countdown.reward_function(answer.completion, answer.question.row)
        weighted = [countdown.REWARD_WEIGHTS[part] * value for part, value in parts.items()]
        assert shown["reward"] == sum(weighted)
        assert shown["verdict"] == ask.verdict(answer)
    right = sum(answer.reward_parts["answer"] == 1 for answer in answers)
    (column,) = data["again"]
    assert column["title"] == f"before: {right} of 8 right"
    assert [own["text"] for own in column["answers"]] == [
        answer.completion.strip() for answer in answers[:4]]


def made_up_page(rewards, words=("went ",) * 5, text="it went") -> str:
    """A page of made-up answers. All texts in it are `text`, but for the tokens, which are `words`.
    Each answer has one token less than the one before it."""
    config = make_config(task__name="made_up.py")
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(words[i] for i in ids))
    run = SimpleNamespace(config=config, tokenizer=tokenizer, task=SimpleNamespace(SOLVED=text))
    question = main.Question({"prompt": text}, [0])
    answers = []
    for i, reward in enumerate(rewards):
        ids = list(range(max(1, len(words) - i)))
        answers.append(main.Trajectory(question, ids, text, False, {text: reward}, reward))
    main.compute_advantages(answers, config.training)
    for answer in answers:
        answer.before = -3 * torch.rand(answer.num_tokens)
        answer.before_entropies = torch.rand(answer.num_tokens)
        answer.after = answer.before + 0.1 * torch.randn(answer.num_tokens)
        answer.new_log_probs = answer.after
    numbers = dict(zip(one_step.NUMBERS, (0.75, 0.25, None)))
    html = one_step.page(run, answers, numbers, [(text, answers)], text)
    assert len(html.encode()) <= 300_000
    return html


def test_of_long_answers_a_part_is_shown_and_too_many_are_refused():
    rewards = [float(i % 3) for i in range(16)]
    data = data_of(made_up_page(rewards, ["much "] * 2048, HOSTILE))
    assert data["settings"] == HOSTILE
    for i, answer in enumerate(data["answers"]):
        texts = [token[0] for token in answer["tokens"]]
        (gap,) = [text for text in texts if "left out" in text]
        assert len(texts) > 16 and f" {2048 - i - len(texts) + 1} left out" in gap
        assert answer["length"] == 2048 - i
        assert abs(answer["change"]) < 0.02  # of all tokens, and not only of those that are shown

    with pytest.raises(UserError, match="2000 answers are too many for a page"):
        made_up_page([float(i % 2) for i in range(2000)])


def check_variants(browser, data, rewards):
    """The page computes this table itself: main.py has to agree."""
    for rule, normalizer in itertools.product(("none", "group", "mean", "sil"),
                                              ("max_length", "tokens", "sequence")):
        keys = {"training__scale_rewards": rule}
        if rule == "sil":
            keys = {"training__learning_type": "sil", "training__k_best_of_n": [data["k"], 4]}
        group = [main.Trajectory(None, [0] * answer["length"], "", False, reward=reward)
                 for answer, reward in zip(data["answers"], rewards, strict=True)]
        counted = main.compute_advantages(group, make_config(**keys).training)
        num_tokens = sum(answer.num_tokens for answer in counted)
        browser.run("[find('rule').value, find('normalizer').value] = arguments; family()",
                    rule, normalizer)
        rows = browser.run("return [...document.querySelectorAll('#family tr')].map("
                           "row => [...row.children].map(cell => cell.textContent))")
        for answer, row in zip(group, rows[1:], strict=True):
            Z = {"max_length": len(counted) * data["L"], "tokens": num_tokens,
                 "sequence": len(counted) * answer.num_tokens}[normalizer]
            A, of_token, of_answer = [float(number) for number in row[3:6]]
            assert A == pytest.approx(answer.advantage, abs=5.1e-4)
            assert of_token == pytest.approx(answer.advantage / Z, abs=5.1e-7)
            expected = answer.advantage / Z * answer.num_tokens
            assert of_answer == pytest.approx(expected, abs=5.1e-5)


@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no Chromium and its driver here")
def test_the_page_opens_without_a_message_and_whatever_is_written_is_text(tmp_path):
    rewards = [1.0, 0.0, 0.5, 0.125]
    words = [HOSTILE[i:i + 20] for i in range(0, len(HOSTILE), 20)]
    page = tmp_path / "page.html"
    page.write_text(made_up_page(rewards, words, HOSTILE), encoding="utf-8")
    data = data_of(page.read_text(encoding="utf-8"))
    shown = HOSTILE.replace("\u2028", "\\u2028")

    with Browser() as browser:
        browser.open(page)

        assert browser.texts("#settings") == [HOSTILE] and browser.texts("#question") == [shown]
        assert shown in browser.texts("#again pre") and shown in browser.texts(".head")[0]
        tokens = "".join(browser.texts(".answer:first-child .token"))
        assert tokens == shown
        assert browser.texts("#numbers b") == ["75.0 %", "+0.2500", "none"]
        assert "A +0.594" in browser.texts(".head span")
        check_variants(browser, data, rewards)
        assert browser.run("return document.title") == "One step, token by token"
        assert browser.run("return document.images.length + document.scripts.length") == 2
        assert browser.messages() == [] and browser.requests() == [page.as_uri()]
