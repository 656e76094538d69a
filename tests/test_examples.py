"""Rewards and tasks beside Countdown: at their published values, and plugged into whole runs. And
examples/from_gguf.py."""

import json
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
from conftest import SILENT_LOG, SIZES, SMALL, make_config, make_model, read_jsonl, start
from processes import ROOT

import main
from machinery import tasks

GSM8K = ["task.name=examples/gsm8k.py", "data.dataset=examples/gsm8k.jsonl",
         "data.num_validation=3", "training.max_steps=2", "training.max_new_gen_tokens=16"]
task = main.load_task(make_config(task__name="examples/gsm8k.py"))
rewards = task.rewards
R1 = "<think>Two and two.</think><answer>4</answer>"
LINES = "<think>\nTwo and two.\n</think>\n<answer>\n4\n</answer>"


# ---------------------------------------------------------------- rewards

@pytest.mark.parametrize(("text", "value"), [
    (" 4. ", 4), ("-7", -7), ("\N{MINUS SIGN}7", -7), ("$1,234.50", Fraction("1234.5")),
    (".5", Fraction(1, 2)), ("x = 12", 12), ("1,234,567", 1234567), ("9" * 150, int("9" * 150)),
    ("", None), ("four", None), ("1,2345", None), ("3/4", None), ("1.2.3", None),
    ("4 or 5", None), ("10-3", None), ("1e5", None)])
def test_the_one_number_in_a_text(text, value):
    assert rewards.number(text) == value


@pytest.mark.parametrize(("completion", "value"), [
    (R1, 1.0), (LINES, 1.0), ("<think>a</think> so <answer>$4.00</answer>", 1.0),
    ("<answer>4.</answer>", 1.0), ("<think>a</think><answer>5</answer>", 0.0),
    ("<think>a</think>4", 0.0), ("<think><answer>4</answer></think>", 0.0),
    ("<think>a</think><answer>5</answer><answer>4</answer>", 0.0),
    ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
    ("<think>a</think><answer>4 or 5</answer>", 0.0), ("<think>a</think><answer>4", 0.0)])
def test_accuracy_pays_for_the_number_in_the_one_answer_after_the_thinking(completion, value):
    assert rewards.accuracy(completion, "4.0") == value


def test_accuracy_refuses_a_data_set_whose_answer_is_no_number():
    with pytest.raises(ValueError, match="many"):
        rewards.accuracy(R1, "many")


@pytest.mark.parametrize(("completion", "r1", "strict", "tags"), [
    (R1, 1, 0, 0), (LINES, 1, 1, 1), (LINES + "\n", 1, 1, 1), ("<answer>4</answer>", 0, 0, 0),
    (R1 + " and more", 0, 0, 0), (R1 + R1, 0, 0, 0), (LINES + LINES, 0, 0, 0),
    (LINES.replace("<answer>\n", "<answer>"), 1, 0, 0.75), ("<think>\nabc", 0, 0, 0.25),
    (LINES + "\n</answer>", 0, 0, 0.75)])
def test_the_three_rewards_of_the_format(completion, r1, strict, tags):
    assert rewards.format_r1(completion) == r1
    assert rewards.format_strict(completion) == strict
    assert rewards.tag_count(completion) == tags


@pytest.mark.parametrize(("completion", "value"), [
    ("Step 1: add.\nStep 2: halve.\nStep 3: done.", 1), ("1. add\n2. halve\n3. do\n4. rest", 1),
    ("First, add.\nFinally, done.", 2 / 3), ("- add", 1 / 3), ("Nothing of the kind.", 0)])
def test_a_third_for_each_step_of_reasoning(completion, value):
    assert rewards.reasoning_steps(completion) == pytest.approx(value)


@pytest.mark.parametrize(("correct", "length", "value"), [
    (True, 0, 1.0), (True, 250, 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2), (True, 500, 0.75),
    (True, 9999, 0.5), (False, 0, -0.5), (False, 500, -0.25), (False, 1000, 0.0)])
def test_the_cosine_falls_with_the_length_of_right_answers_and_rises_with_that_of_wrong_ones(
        correct, length, value):
    assert rewards.cosine(correct, length, 1000) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("completion", "value"), [
    ("one two", 0), ("one two three four", 0), ("A b c a B c", -1 / 4), ("a a a a a", -2 / 3)])
def test_repetition_costs_the_share_of_runs_of_three_words_said_before(completion, value):
    assert rewards.repetition(completion) == pytest.approx(value)


def test_a_reward_model_pays_the_logit_of_its_one_label_or_the_probability_of_the_one_named(
        tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    sizes = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    one, two = tmp_path / "one", tmp_path / "two"
    for path, num_labels in ((one, 1), (two, 2)):
        torch.manual_seed(0)
        config = transformers.Qwen2Config(**sizes, num_labels=num_labels)
        model = transformers.Qwen2ForSequenceClassification(config)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor([tokenizer(text)["input_ids"]])

    model = transformers.AutoModelForSequenceClassification.from_pretrained(one).eval()
    assert rewards.RewardModel(str(one))("1+1?", "2") == pytest.approx(
        model(input_ids=ids).logits.item(), abs=1e-6)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(two).eval()
    assert rewards.RewardModel(str(two), "LABEL_1")("1+1?", "2") == pytest.approx(
        model(input_ids=ids).logits.softmax(-1)[0, 1].item(), abs=1e-6)
    with pytest.raises(ValueError, match="LABEL_0, LABEL_1"):
        rewards.RewardModel(str(two))


# ---------------------------------------------------------------- GSM8K

def test_gsm8k_rows_keep_their_columns_and_their_final_numbers():
    rows = task.load(str(ROOT / "examples" / "gsm8k.jsonl"), None)
    finals = [rewards.number(row["final"]) for row in rows]
    completion = "<think>85*14</think><answer>1190</answer>"

    parts = task.reward_function(completion, rows[1])

    assert finals[:5] == [9, 1190, Fraction("13.5"), -8, 14] and None not in finals
    assert all(row["written"] == "by hand" for row in rows)
    assert all(row["question"].strip() in row["prompt"] for row in rows)
    assert parts == {"accuracy": 1.0, "format": 1.0, "format_strict": 0.0, "tag_count": 0.0,
                     "reasoning_steps": 0.0, "cosine": pytest.approx(1.0, abs=1e-3),
                     "repetition": 0.0}


@pytest.mark.parametrize("row", [{"question": "1+1?"}, {"question": "1+1?", "answer": "2"},
                                 {"question": "1+1?", "answer": "#### two"}])
def test_a_row_that_is_none_of_gsm8k_is_named(row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    with pytest.raises(ValueError, match="row 1"):
        task.load(str(tmp_path / "rows.jsonl"), None)


def test_gsm8k_trains_as_a_chat_on_the_parts_that_are_chosen_and_measures_what_is_solved(tmp_path):
    assert start([*SMALL, *GSM8K, f"run.dir={tmp_path}", "data.prompt_style=chat",
                  "task.reward_weights={cosine: 0.5, repetition: 0.25}"]) == 0

    entries = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    steps = [entry for entry in entries if "reward" in entry]
    assert len(steps) == 2 and "eval/reward/cosine" in entries[0] and "eval/solved" in entries[0]
    for step in steps:
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

    training, validation = main.load_questions(task, make_model(), tokenizer, config)

    kept = sorted(len(tokenizer(row["prompt"])["input_ids"]) for row in training + validation)
    assert kept == lengths[:9]


# ---------------------------------------------------------------- plugging in

def match_for_long():
    """A regular expression that takes about a second, and holds on to the interpreter."""
    re.match(r"(a+)+$", "a" * 24 + "b")


def test_a_reward_that_hangs_shows_again_and_again_where_it_stands(monkeypatch, capfd):
    def reward_function(completion, row):
        if row["is_slow"]:
            match_for_long()
        return {"right": 1.0}

    monkeypatch.setattr(tasks, "SECONDS_FOR_A_REWARD", 0.05)
    own = SimpleNamespace(reward_function=reward_function, REWARD_WEIGHTS={"right": 1.0},
                          SOLVED="right")
    questions = [main.Question({"is_slow": i == 1}, []) for i in range(3)]
    group = [main.Trajectory(question, [0], "", False) for question in questions]

    main.score(SimpleNamespace(task=own, log=SILENT_LOG), [group])

    assert [answer.reward for answer in group] == [1.0] * 3
    assert capfd.readouterr().err.count("in match_for_long") >= 3
    time.sleep(0.3)
    assert capfd.readouterr().err == ""  # It has answered.


def test_a_task_does_not_take_the_place_of_another_module(tmp_path):
    (tmp_path / "math.py").write_text("from countdown import *")
    module = sys.modules["math"]

    assert tasks.import_task(str(tmp_path / "math.py")).SOLVED == "answer"

    assert sys.modules["math"] is module


# ---------------------------------------------------------------- sums

arithmetic = main.load_task(make_config(task__name="examples/arithmetic.py"))


def test_sums_are_made_up_by_the_settings_and_are_always_the_same():
    rows = arithmetic.load("numbers=3 low=1 high=9 signs=+-", 50)

    assert rows == arithmetic.load("numbers=3 low=1 high=9 signs=+-", 50) and len(rows) == 50
    for row in rows:
        text = row["prompt"].removesuffix(" =")
        assert re.fullmatch(r"[1-9] [+-] [1-9] [+-] [1-9]", text)
        assert row["result"] == eval(text)
    assert len({row["prompt"] for row in rows}) == 50


def test_the_order_of_its_numbers_does_not_make_another_sum():
    rows = arithmetic.load("numbers=2 low=1 high=3 signs=+-", None)

    problem_of = {row["prompt"]: row["problem"] for row in rows}
    assert len(problem_of) == 2 * 3 * 3
    assert problem_of["1 + 3 ="] == problem_of["3 + 1 ="]
    assert problem_of["1 - 3 ="] != problem_of["3 - 1 ="]


@pytest.mark.parametrize("sum_, carries", [
    ("12 + 34", 0), ("17 + 34", 1), ("71 + 34", 1), ("77 + 34", 2), ("95 + 5", 2), ("5 + 4", 0)])
def test_the_group_of_a_sum_is_how_often_one_carries(sum_, carries):
    numbers = [int(number) for number in sum_.split(" + ")]
    assert sys.modules["arithmetic"].num_carries(numbers) == carries


@pytest.mark.parametrize("reply, strict, lenient, format_", [
    (" 64", 1, 1, 1), ("64", 1, 1, 1), ("64.", 0, 1, 0), ("17 + 47 = 64", 0, 1, 0),
    ("63", 0, 0, 1), ("64 apples and 2", 0, 0, 0), ("064", 0, 1, 1), ("", 0, 0, 0)])
def test_a_sum_is_graded_strictly_leniently_and_by_its_format(reply, strict, lenient, format_):
    parts = arithmetic.reward_function(reply, {"result": 64})
    assert parts == {"strict": strict, "lenient": lenient, "format": format_}


@pytest.mark.parametrize("dataset", ["tiny/data", "numbers=two", "signs=*", "high"])
def test_a_setting_of_sums_that_is_wrong_is_named(dataset):
    with pytest.raises(ValueError, match="is not like numbers=2"):
        arithmetic.load(dataset, None)


# ---------------------------------------------------------------- reasoning-gym

gym = main.load_task(make_config(task__name="examples/gym.py"))


class Doubling(list):
    """In place of a dataset of reasoning-gym. Its grader fails at what is no number."""

    def __init__(self, seed, size, most=9):
        if most < 1:
            raise AssertionError("most must be >= 1")
        super().__init__({"question": f"Twice {1 + (seed + i) % most}?", "answer":
                          str(2 * (1 + (seed + i) % most))} for i in range(size))

    def score_answer(self, answer, entry):
        difference = abs(int(answer) - int(entry["answer"]))
        return 1.0 if difference == 0 else 0.25 if difference == 1 else 0.0


@pytest.fixture
def reasoning_gym(monkeypatch):
    def create_dataset(name, **parameters):
        return Doubling(**parameters)

    library = SimpleNamespace(create_dataset=create_dataset,
                              factory=SimpleNamespace(DATASETS=["doubling", "word_ladder"]))
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)


def test_a_dataset_of_reasoning_gym_gets_its_parameters(reasoning_gym):
    assert [row["prompt"] for row in gym.load("doubling most=2", 3)] == [
        "Twice 1?", "Twice 2?", "Twice 1?"]
    assert gym.load("doubling seed=4", 1)[0]["problem"] == "Twice 5?"
    assert len(gym.load("doubling", None)) == 1000


@pytest.mark.parametrize(("reply", "strict", "generous"), [
    ("8", 1, 1), (" 8\n", 1, 1), ("8.", 0, 1), ("Twice 4 is\n8", 0, 1), ("4 * 2 = 8", 0, 1),
    ("The answer is 8", 0, 1), ("Answer: 8.", 0, 1), ("<answer>8</answer>", 0, 1),
    ("<answer>8</answer> Done.", 0, 1), ("8, of course", 0, 1), ("8 or 9", 0, 0.25),
    ("9", 0, 0.25), ("many", 0, 0), ("", 0, 0)])
def test_its_grader_marks_the_reply_as_it_stands_and_the_best_reading_of_it(
        reply, strict, generous, reasoning_gym):
    row = gym.load("doubling", 4)[3]
    assert gym.reward_function(reply, row) == {"strict": strict, "generous": generous}


@pytest.mark.parametrize(("dataset", "says"), [
    ("dubling", "reasoning-gym has no 'dubling', but doubling"), ("", "has no ''"),
    ("doubling many=3", "unexpected keyword argument 'many'"),
    ("doubling most=0", "most must be >= 1"), ("doubling most", "'most' is not like max_terms=2"),
    ("doubling most=[2", "but got '<stream end>'"), ("word_ladder", "each process gets other")])
def test_a_dataset_that_it_cannot_give_is_named_in_one_line(dataset, says, reasoning_gym):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        gym.load(dataset, None)
    assert "\n" not in str(caught.value)


def test_without_reasoning_gym_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="needs: pip install reasoning-gym"):
        gym.load("doubling", None)


@pytest.mark.soak
def test_datasets_of_the_real_library_are_graded():
    pytest.importorskip("reasoning_gym", reason="needs: pip install reasoning-gym")
    for name in ("chain_sum", "spell_backward", "countdown", "number_sorting"):
        row = gym.load(f"{name} seed=7", 2)[1]
        assert gym.reward_function(row["entry"]["answer"], row)["strict"] == 1
        assert gym.reward_function("no idea", row)["strict"] == 0


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
    loaded, loaded_tokenizer = main.load_model(config)
    for name, weight in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert loaded_tokenizer("30 + 26 = 56")["input_ids"] == tokenizer("30 + 26 = 56")["input_ids"]
