"""Rewards and tasks beside Countdown, alone and in whole runs. And examples/from_gguf.py."""

import math
import re
import sys
import time
from fractions import Fraction
from types import SimpleNamespace

import from_gguf
import gguf
import pytest
import torch
import transformers
from conftest import SIZES, SMALL, made_up_run, make_config, make_model, read_jsonl, start
from processes import ROOT

import main
from machinery import tasks
from machinery.model import load_model
from machinery.tasks import Question, load_questions, load_task

task = load_task(make_config(task__name="examples/gsm8k.py"))
rewards = task.rewards
R1 = "<think>Two and two.</think><answer>4</answer>"
LINES = "<think>\nTwo and two.\n</think>\n<answer>\n4\n</answer>"


# ---------------------------------------------------------------- rewards

@pytest.mark.parametrize(("text", "value"), [
    ("-7", -7), ("\N{MINUS SIGN}7", -7), ("$1,234.50", Fraction("1234.5")), ("x = 12.", 12),
    ("", None), ("four", None), ("1,2345", None), ("3/4", None), ("4 or 5", None), ("10-3", None)])
def test_the_one_number_in_a_text(text, value):
    assert rewards.number(text) == value


@pytest.mark.parametrize(("completion", "value"), [
    (R1, 1.0), ("<think>a</think> so <answer>$4.00</answer>", 1.0), ("<answer>4.</answer>", 1.0),
    ("<think>a</think><answer>5</answer>", 0.0), ("<think>a</think>4", 0.0),
    ("<think><answer>4</answer></think>", 0.0),
    ("<think>a</think><answer>5</answer><answer>4</answer>", 0.0),
    ("<think>a</think><answer>4 or 5</answer>", 0.0), ("<think>a</think><answer>4", 0.0)])
def test_accuracy_pays_for_the_number_in_the_one_answer_after_the_thinking(completion, value):
    assert rewards.accuracy(completion, "4.0") == value


@pytest.mark.parametrize(("completion", "r1", "strict", "tags"), [
    (R1, 1, 0, 0), (LINES, 1, 1, 1), (R1 + " and more", 0, 0, 0), (LINES + LINES, 0, 0, 0),
    (LINES.replace("<answer>\n", "<answer>"), 1, 0, 0.75), ("<think>\nabc", 0, 0, 0.25)])
def test_the_three_rewards_of_the_format(completion, r1, strict, tags):
    assert rewards.format_r1(completion) == r1
    assert rewards.format_strict(completion) == strict
    assert rewards.tag_count(completion) == tags


def test_the_rewards_of_steps_length_and_repetition_have_their_published_values():
    assert rewards.reasoning_steps("Step 1: add.\nStep 2: halve.\n3. or\nFinally, done.") == 1
    assert rewards.reasoning_steps("First, add.\nFinally, done.") == pytest.approx(2 / 3)
    # Right answers earn less the longer they are, and wrong ones more.
    for correct, length, value in ((True, 0, 1.0), (True, 500, 0.75), (True, 9999, 0.5),
                                   (False, 0, -0.5), (False, 500, -0.25), (False, 1000, 0.0)):
        assert rewards.cosine(correct, length, 1000) == pytest.approx(value, abs=1e-12)
    expected = 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2
    assert rewards.cosine(True, 250, 1000) == pytest.approx(expected, abs=1e-12)
    assert rewards.repetition("one two") == rewards.repetition("one two three four") == 0
    # One of its four runs of three words has been said before.
    assert rewards.repetition("A b c a B c") == pytest.approx(-1 / 4)


def test_a_reward_model_pays_the_probability_of_the_label_that_is_named(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    sizes = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen2Config(**sizes, num_labels=2)
    model = transformers.Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0]

    judge = rewards.RewardModel(str(tmp_path), "LABEL_1")

    assert judge("1+1?", "2") == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-6)
    # Of a text that's too long it reads the end.
    longest = tokenizer.model_max_length
    messages = [{"role": "user", "content": "1+1? " * longest},
                {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logits = model(input_ids=torch.tensor([ids[-longest:]])).logits[0]
    expected = pytest.approx(logits.softmax(-1)[1].item(), abs=1e-6)
    assert len(ids) > longest and judge("1+1? " * longest, "2") == expected
    with pytest.raises(ValueError, match="LABEL_0, LABEL_1"):
        rewards.RewardModel(str(tmp_path))


# ---------------------------------------------------------------- GSM8K

def test_gsm8k_trains_as_a_chat_on_the_parts_that_are_chosen_and_measures_what_is_solved(tmp_path):
    assert start([*SMALL, "task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl",
                  "data.num_validation=3", "data.prompt_style=chat", "training.max_steps=1",
                  "training.max_new_gen_tokens=16", f"run.dir={tmp_path}",
                  "task.reward_weights={cosine: 0.5, repetition: 0.25}"]) == 0

    evaluation, step, _ = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert "eval/reward/cosine" in evaluation and "eval/solved" in evaluation
    parts = {name for name in step if re.fullmatch(r"reward/[a-z]+", name)}
    assert parts == {"reward/cosine", "reward/repetition"} and "solved" in step
    weighted = 0.5 * step["reward/cosine"] + 0.25 * step["reward/repetition"]
    assert step["reward"] == pytest.approx(weighted) and step["updated"] == 1


def test_questions_that_are_too_long_are_left_out():
    rows = task.load(str(ROOT / "examples" / "gsm8k.jsonl"), None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    lengths = sorted(len(tokenizer(row["prompt"])["input_ids"]) for row in rows)
    config = make_config(data__dataset="examples/gsm8k.jsonl", data__num_validation=3,
                         data__max_prompt_tokens=lengths[8], training__max_new_gen_tokens=48)

    model = make_model(vocab_size=len(tokenizer))
    training, validation = load_questions(task, model, None, tokenizer, config)

    kept = sorted(len(tokenizer(row["prompt"])["input_ids"]) for row in training + validation)
    assert kept == lengths[:9]


# ---------------------------------------------------------------- plugging in

def match_for_long():
    """A regular expression that takes about a second, and holds on to the interpreter."""
    re.match(r"(a+)+$", "a" * 24 + "b")


def test_a_reward_that_hangs_shows_again_and_again_where_it_stands(monkeypatch, capfd):
    def reward_function(completion, row):
        match_for_long()
        return {"right": 1.0}

    monkeypatch.setattr(tasks, "SECONDS_FOR_A_REWARD", 0.05)
    own = SimpleNamespace(reward_function=reward_function, REWARD_WEIGHTS={"right": 1.0},
                          SOLVED="right")
    answer = main.Trajectory(Question({}, []), [0], "", False)

    main.score(made_up_run(task=own), [[answer]])

    assert answer.reward == 1.0
    assert capfd.readouterr().err.count("in match_for_long") >= 3
    time.sleep(0.3)
    assert capfd.readouterr().err == ""  # It has answered.


# ---------------------------------------------------------------- sums

arithmetic = load_task(make_config(task__name="examples/arithmetic.py"))


def test_sums_are_right_always_the_same_and_one_problem_in_any_order_of_their_numbers():
    rows = arithmetic.load("numbers=2 low=1 high=3 signs=+-", None)

    assert rows == arithmetic.load("numbers=2 low=1 high=3 signs=+-", None)
    problem_of = {row["prompt"]: row["problem"] for row in rows}
    assert len(rows) == len(problem_of) == 2 * 3 * 3
    assert problem_of["1 + 3 ="] == problem_of["3 + 1 ="]
    assert problem_of["1 - 3 ="] != problem_of["3 - 1 ="]
    for row in arithmetic.load("numbers=3 low=1 high=99 signs=+-", 50):
        first, *rest = row["prompt"].removesuffix(" =").replace("- ", "-").replace("+ ", "").split()
        assert row["result"] == int(first) + sum(int(number) for number in rest)
    with pytest.raises(ValueError, match="is not like numbers=2"):
        arithmetic.load("numbers=two", None)


@pytest.mark.parametrize("reply, strict, lenient, format_", [
    (" 64", 1, 1, 1), ("64.", 0, 1, 0), ("17 + 47 = 64", 0, 1, 0), ("63", 0, 0, 1),
    ("64 apples and 2", 0, 0, 0), ("064", 0, 1, 1), ("", 0, 0, 0)])
def test_a_sum_is_graded_strictly_leniently_and_by_its_format(reply, strict, lenient, format_):
    parts = arithmetic.reward_function(reply, {"result": 64})
    assert parts == {"strict": strict, "lenient": lenient, "format": format_}


# ---------------------------------------------------------------- reasoning-gym

gym = load_task(make_config(task__name="examples/gym.py"))


class Doubling(list):
    """In place of a dataset of reasoning-gym. Its grader fails at what is no number."""

    def __init__(self, name, seed, size, most=9):
        numbers = [1 + (seed + i) % most for i in range(size)]
        super().__init__({"question": f"Twice {number}?", "answer": str(2 * number)}
                         for number in numbers)

    def score_answer(self, answer, entry):
        difference = abs(int(answer) - int(entry["answer"]))
        return 1.0 if difference == 0 else 0.25 if difference == 1 else 0.0


@pytest.fixture
def reasoning_gym(monkeypatch):
    library = SimpleNamespace(create_dataset=Doubling,
                              factory=SimpleNamespace(DATASETS=["doubling", "word_ladder"]))
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)


@pytest.mark.parametrize(("reply", "strict", "generous"), [
    (" 8\n", 1, 1), ("8.", 0, 1), ("Twice 4 is\n8", 0, 1), ("4 * 2 = 8", 0, 1),
    ("<answer>8</answer> Done.", 0, 1), ("8, of course", 0, 1), ("9", 0, 0.25), ("many", 0, 0),
    ("", 0, 0)])
def test_gym_has_the_librarys_questions_and_its_mark_for_the_reply_and_for_its_best_reading(
        reply, strict, generous, reasoning_gym):
    rows = gym.load("doubling most=5 seed=1", 3)
    assert [row["prompt"] for row in rows] == ["Twice 2?", "Twice 3?", "Twice 4?"]
    assert gym.reward_function(reply, rows[2]) == {"strict": strict, "generous": generous}


# ---------------------------------------------------------------- GGUF

def write_gguf(model, tokenizer, path) -> None:
    """Writes a Qwen 2 as llama.cpp does, without rounding."""
    config = model.config
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    values = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"], "tokenizer_model": "gpt2",
        "token_list": tokens, "token_types": [gguf.TokenType.NORMAL] * len(tokens),
        "token_scores": [0.0] * len(tokens), "eos_token_id": tokenizer.eos_token_id}
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    names_in_file = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        name_in_file = names_in_file.get_name(name, (".weight", ".bias"))
        writer.add_tensor(name_in_file, weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_that_can_learn(tmp_path):
    folder = ROOT / "tiny" / "model"
    original = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    write_gguf(original, tokenizer, tmp_path / "tiny.gguf")

    from_gguf.convert(tmp_path / "tiny.gguf", tmp_path / "folder")

    config = make_config(model__name=str(tmp_path / "folder"), model__precision="float32")
    loaded, loaded_tokenizer = load_model(config)
    for name, weight in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert loaded_tokenizer("30 + 26 = 56")["input_ids"] == tokenizer("30 + 26 = 56")["input_ids"]
