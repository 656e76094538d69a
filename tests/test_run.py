"""What a run leaves behind, which questions it takes, and what it measures."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import transformers
import yaml
from conftest import (
    CHANGE,
    SMALL,
    TIMES,
    digest,
    made_up_run,
    make_config,
    read_jsonl,
    training_steps,
    uninterrupted,
)
from processes import ROOT, ranks, run, torchrun
from silent import NoFolder, SilentLog

import countdown
import main
from machinery.metrics import evaluation_metrics
from machinery.ranks import RANK, end_process, join, leave_group, max_over_ranks, sum_over_ranks
from machinery.runs import step_of
from machinery.tasks import Question, grade, load_task, split

# ---------------------------------------------------------------- what a run leaves behind

@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A run on two ranks under torchrun: its folder, and what it has said."""
    folder = tmp_path_factory.mktemp("two_ranks")
    result = torchrun(2, "main.py", *SMALL, "validation.every=2", f"run.dir={folder}")
    assert result.returncode == 0, result.stderr
    return folder / "a", result.stdout


def test_every_step_and_every_evaluation_has_all_of_its_metrics(two_ranks):
    folder, _ = two_ranks

    entries = read_jsonl(folder / "metrics.jsonl")

    kinds = [(entry["step"], "reward" in entry) for entry in entries]
    assert kinds == [(0, False), (1, True), (2, True), (2, False), (3, True), (3, False)]
    before, step, second, after_second, third, after_third = entries
    assert set(before) == set(after_second) == set(after_third)
    assert set(second) == set(third) > TIMES | CHANGE
    assert set(step) == {*second, "graded_wrongly"}
    seconds = sum(step[name] for name in step if name.startswith("seconds/"))
    assert step["tokens"] == pytest.approx(16 * step["completion_length"])
    assert step["tokens_per_second"] == pytest.approx(step["tokens"] / seconds)
    assert step["memory_gb"] > 0


@pytest.mark.house
def test_each_metric_has_its_meaning_in_the_docs_and_no_other_has(two_ranks):
    measured = set()
    for line in read_jsonl(two_ranks[0] / "metrics.jsonl"):
        for name in line:
            name = re.sub(r"/(format|answer)$", "/<part>", name)
            name = re.sub(r"^eval/solved/\d+$", "eval/solved/<group>", name)
            name = re.sub(r"pass_at_\d+", "pass_at_<k>", name)
            if not name.endswith(("_low", "_high")):
                measured.add(name)

    page = (ROOT / "docs" / "read.md").read_text()
    chapter = page.split("## Every metric\n")[1].split("\n## ")[0]
    explained = {"loss", "learning_rate"}
    for line in re.findall(r"^- (`.*?):[ \n]", f"{chapter}\n", re.MULTILINE):
        explained |= set(re.findall("`(.*?)`", line))

    assert measured - explained == {"step"}
    assert explained - measured == {"kl", "clipped", "teacher_lower"}  # They need other settings.


def test_samples_hold_every_answer_graded_as_the_task_grades_it(two_ranks):
    folder, _ = two_ranks

    samples = read_jsonl(folder / "samples.jsonl")

    places = [(step, question) for step in (0, 2, 3) for question in range(6) for _ in range(2)]
    assert [(sample["step"], sample["question"]) for sample in samples] == places
    for sample in samples:
        asked = re.search(r"numbers (.*?) into .*equals (\d+)\.", sample["prompt"], re.DOTALL)
        row = {"nums": json.loads(f"[{asked[1]}]"), "target": int(asked[2])}
        parts = countdown.reward_function(sample["completion"], row)
        assert parts == sample["reward_parts"]
        assert sample["solved"] == parts["answer"]
        assert sample["reward"] == pytest.approx(0.1 * parts["format"] + parts["answer"])


def test_the_best_model_is_kept_and_loads_as_any_other(two_ranks):
    folder, _ = two_ranks
    evaluations = [entry for entry in read_jsonl(folder / "metrics.jsonl") if "reward" not in entry]

    best = transformers.AutoModelForCausalLM.from_pretrained(folder / "best")

    original = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model")
    assert best.generation_config.to_diff_dict() == original.generation_config.to_diff_dict()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "best")
    assert len(tokenizer) == best.config.vocab_size
    best_evaluation = max(
        evaluations, key=lambda entry: (entry["eval/solved"], entry["eval/best_of_n"]))
    assert step_of(folder / "best") == best_evaluation["step"]
    assert step_of(folder / "last") == 3


def test_the_resolved_settings_the_curves_and_a_summary_are_kept_and_answers_are_shown(two_ranks):
    folder, said = two_ranks

    settings = yaml.safe_load((folder / "config.yaml").read_text())

    assert settings["training"]["max_steps"] == 3
    assert settings["model"]["precision"] == "float32"  # Not the null of config.yaml.
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[-1] == (folder / "summary.json").read_text().strip()
    line = r"evaluation at step 3:  solved \S+ \(\S+\)  best of 2 \S+  length \d+\n"
    assert re.search(line, said) and said.count("-> reward ") == 9  # three after each evaluation


def test_more_evaluations_change_no_training_metric_and_no_weight(two_ranks, tmp_path):
    folder, _ = two_ranks

    uninterrupted(2, tmp_path, "validation.every=1")

    assert training_steps(tmp_path / "a") == training_steps(folder)
    tensors = "checkpoints/step-000003/tensors-1.safetensors"
    assert digest(tmp_path / "a" / tensors) == digest(folder / tensors)


def test_plain_python_is_one_rank_from_any_folder_and_with_the_poorest_alphabet(tmp_path):
    result = run(sys.executable, ROOT / "main.py", *SMALL, "training.max_steps=0", "run.dir=.",
                 cwd=tmp_path, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("importing PyTorch and transformers")
    assert "\\u2013" in result.stdout  # The dash in an interval, which this alphabet lacks.
    [entry] = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert "eval/solved" in entry


# ---------------------------------------------------------------- questions

def test_no_problem_is_in_both_splits_in_whatever_order_of_its_numbers(tmp_path):
    problems = [{"nums": [a, b, 7], "target": 10 + a} for a in range(1, 9) for b in range(1, 9)]
    turned = [{**problem, "nums": problem["nums"][::-1]} for problem in problems]
    lines = [json.dumps(row) + "\n" for row in problems + turned]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    config = make_config(data__dataset=str(tmp_path / "data.jsonl"), data__num_validation=10)

    rows = load_task(config).load(config.data.dataset, None)
    training, validation = split(rows, config)

    def content(rows):
        return {(tuple(sorted(row["nums"])), row["target"]) for row in rows}

    assert len(validation) == len(content(validation)) == 10
    assert not content(training) & content(validation)
    assert content(training) | content(validation) == content(problems)


def test_neither_a_seed_nor_more_data_trains_on_what_was_held_out():
    """So training further with another seed, or with rows that were added, is still measured on
    questions that the model has never seen."""
    def problems_of(numbers, seed=0):
        rows = [{"prompt": f"{number} + 1 =", "problem": [1, number]} for number in numbers]
        config = make_config(data__num_validation=20, training__seed=seed)
        return [{row["prompt"] for row in part} for part in split(rows, config)]

    learned, held_out = problems_of(range(200))
    assert len(held_out) == 20
    assert problems_of(range(200), seed=1) == [learned, held_out]
    assert problems_of(reversed(range(200))) == [learned, held_out]
    _, held_out_of_more = problems_of(range(300))
    assert len(held_out_of_more) == 20 and held_out_of_more != held_out
    assert not held_out_of_more & learned


def order_of_questions(num_ranks, num_per_rank, monkeypatch, seed=0):
    """What all ranks together are asked in thirty steps, of fifty questions."""
    config = make_config(training__num_samples_per_step=num_per_rank, training__seed=seed)
    rows = [{"prompt": str(i)} for i in range(50)]
    asking = made_up_run(config=config, training_rows=rows)
    monkeypatch.setattr(main, "make_question", lambda run, row: Question(row, [0]))
    monkeypatch.setattr(main, "WORLD_SIZE", num_ranks)
    order = []
    for step in range(1, 31):
        asking.step = step
        for rank in range(num_ranks):
            monkeypatch.setattr(main, "RANK", rank)
            order += [question.row["prompt"] for question in main.questions(asking)]
    return order


def test_the_order_of_questions_depends_on_seed_and_epoch_alone(monkeypatch):
    order = order_of_questions(1, 12, monkeypatch)

    assert order == order_of_questions(3, 4, monkeypatch)
    assert order != order_of_questions(1, 12, monkeypatch, seed=1)
    assert len(set(order[:50])) == len(set(order[50:100])) == 50
    assert order[:50] != order[50:100]


def test_no_reward_can_change_the_row_that_the_next_answer_is_graded_with():
    def greedy(completion, row):
        parts = {"format": 0.0, "answer": float(len(row["nums"][0]) == 1)}
        row["nums"][0].append(7)
        return parts

    task = load_task(make_config())
    task.reward_function = greedy
    row = {"nums": [[3]]}

    for _ in range(2):
        assert grade(task, "", row)["answer"] == 1.0


# ---------------------------------------------------------------- evaluation

def wilson(share: float, n: float, side: int) -> float:
    """The farthest truth on that side that `share` of n draws is 1.96 standard errors from."""
    inside, outside = share, float(side > 0)
    for _ in range(60):
        middle = (inside + outside) / 2
        if abs(share - middle) > 1.96 * math.sqrt(middle * (1 - middle) / n):
            outside = middle
        else:
            inside = middle
    return inside


def graded(value: float, row: dict | None = None, **more) -> main.Trajectory:
    parts = {"format": 0.5, "answer": float(value)}
    return main.Trajectory(Question(row or {}, []), **{
        "completion_ids": [0], "completion": "", "is_truncated": False, "reward_parts": parts,
        "reward": value + 0.05, **more})


@pytest.mark.parametrize(("groups", "n"), [
    ([[0, 0]] * 32, 32),
    ([[1, 1]], 1),
    ([[1, 0]] * 9 + [[1, 1], [0, 0]], 22),  # Each answer counts as much as a draw, and no more.
])
def test_the_interval_is_wilsons_and_never_a_point(groups, n):
    answers = [[graded(value) for value in group] for group in groups]
    share = sum(sum(group) for group in groups) / (2 * len(groups))

    metrics = evaluation_metrics(answers, load_task(make_config()))

    assert metrics["eval/solved_low"] == pytest.approx(wilson(share, n, -1), abs=1e-9)
    assert metrics["eval/solved_high"] == pytest.approx(wilson(share, n, 1), abs=1e-9)


def test_best_of_n_and_all_means_of_an_evaluation_by_hand():
    solved = [[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]
    groups = []
    for i, values in enumerate(solved):
        row = {"group": 3 + (i > 2)}
        groups.append([graded(value, row, completion_ids=[0] * (j + 1), is_truncated=j == 2)
                       for j, value in enumerate(values)])
    # The best of three is what earns most, and here that is a wrong answer.
    groups[0][1].reward = 2.0

    metrics = evaluation_metrics(groups, load_task(make_config()))

    # So many draws of 0 or 1 have as much variance as the mean over the five questions.
    variance = ((1 / 3 - .4) ** 2 + .16 + .36 + (2 / 3 - .4) ** 2 + .16) / 4
    n = .4 * .6 / (variance / 5)
    assert 5 < n < 15
    assert metrics == pytest.approx({
        "eval/best_of_n": 2 / 5, "eval/solved": 6 / 15, "eval/solved/3": 4 / 9,
        "eval/solved/4": 2 / 6,
        # A right one among one, two or all three answers, question by question.
        "eval/pass_at_1": 6 / 15, "eval/pass_at_2": (2 / 3 + 0 + 1 + 1 + 0) / 5,
        "eval/pass_at_3": 3 / 5,
        "eval/best_of_n_low": wilson(2 / 5, 5, -1), "eval/best_of_n_high": wilson(2 / 5, 5, 1),
        "eval/solved_low": wilson(6 / 15, n, -1), "eval/solved_high": wilson(6 / 15, n, 1),
        "eval/reward/format": 0.5, "eval/reward/answer": 0.4,
        "eval/reward": (6 + 2 + 14 * 0.05) / 15,
        "eval/completion_length": 2, "eval/truncated": 1 / 3})


def evaluate_made_up_answers():
    """Question i is solved by the first i of its three answers."""
    def sample(run, questions, group_size, sampling):
        return [[main.Trajectory(question, [0], str(j), False) for j in range(group_size)]
                for question in questions]

    def reward_function(completion, row):
        return {"right": float(int(completion) < row["number"])}

    task = SimpleNamespace(
        REWARD_WEIGHTS={"right": 1.0}, SOLVED="right", reward_function=reward_function)
    join()
    main.sample = sample
    main.make_question = lambda run, row: Question(row, [0])
    groups = main.evaluate(made_up_run(
        config=make_config(validation__best_of_n=3), task=task, step=0,
        training_rows=[{"number": 9}] * 5, validation_rows=[{"number": i} for i in range(5)]))
    if RANK == 0:
        rewards = [[answer.reward for answer in group] for group in groups]
        assert rewards == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
        assert [group[0].question.row["number"] for group in groups] == [0, 1, 2, 3, 4]
    else:
        assert groups is None
    leave_group()
    end_process(0)


def test_ranks_share_an_evaluation_and_gather_it_in_the_order_of_the_questions():
    result = ranks(2, evaluate_made_up_answers)

    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- metrics of a step

def add_up_over_ranks():
    join()
    assert sum_over_ranks({"a": RANK + 1, "b": -2 * RANK}) == {"a": 3, "b": -2}
    assert max_over_ranks({"a": RANK + 1, "b": -2 * RANK}) == {"a": 2, "b": 0}
    leave_group()
    end_process(0)


def test_sums_and_maxima_are_those_of_all_ranks_on_each():
    result = ranks(2, add_up_over_ranks)

    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- AdamW

def test_a_step_is_adamws_with_the_betas_and_the_decay_of_the_settings(one_rank):
    """Two steps of one weight, by the formula of Loshchilov and Hutter 2019."""
    betas, decay, rate = (0.5, 0.8), 0.1, 0.01
    config = make_config(training__adam_betas=betas, training__weight_decay=decay,
                         model__precision="float32", data__max_rows=300)
    made = main.prepare(config, NoFolder(), SilentLog())
    weights = next(made.policy.parameters())
    made.optimizer.param_groups[0]["lr"] = rate
    expected, first, second = weights.flatten()[0].item(), 0.0, 0.0
    for step, slope in enumerate((0.3, -0.7), start=1):
        for parameter in made.policy.parameters():
            parameter.grad.zero_()
        weights.grad.view(-1)[0] = slope
        made.optimizer.step()

        first = betas[0] * first + (1 - betas[0]) * slope
        second = betas[1] * second + (1 - betas[1]) * slope**2
        unbiased = first / (1 - betas[0]**step), second / (1 - betas[1]**step)
        expected -= rate * decay * expected + rate * unbiased[0] / (math.sqrt(unbiased[1]) + 1e-8)
        assert weights.flatten()[0].item() == pytest.approx(expected, rel=1e-5)
