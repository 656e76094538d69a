"""Whole runs of main.py: what they leave behind, what they say, and what must not change from one
to another."""

import json
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from conftest import ARCHITECTURES, SILENT_LOG, make_config, read_jsonl, run_main, start
from processes import ROOT, ranks, torchrun
from processes import run as run_command

import main
from machinery import metrics as measuring
from machinery import ranks as ranks_of_machinery
from machinery.launch import end_process

SHORT = ["training.max_steps=3", "training.max_new_gen_tokens=24",
         "training.num_samples_per_step=2", "training.k_best_of_n=[4,4]",
         "data.num_validation=6", "data.max_rows=200", "validation.best_of_n=2"]
TIMES = {"tokens_per_second", "seconds/sample", "seconds/score", "seconds/refill", "seconds/learn",
         "memory_gb", "memory_reserved_gb"}
# measured of the first step, and of each that is evaluated
CHANGE = {"moved", "moved_as_meant", "change_as_meant", "change_rewarded", "change_punished"}


def run(num_ranks, folder, *more,
        start=lambda num_ranks, *arguments: ranks(num_ranks, run_main, *arguments)):
    result = start(num_ranks, *SHORT, f"run.dir={folder}", "run.name=a", *more)
    assert result.returncode == 0, result.stderr
    return result, folder / "a"


def training_steps(folder):
    """The training part of metrics.jsonl, without what depends on the clock."""
    return [{key: value for key, value in entry.items() if key not in TIMES}
            for entry in read_jsonl(folder / "metrics.jsonl") if "reward" in entry]


def test_a_run_of_two_ranks_leaves_everything_it_promises(tmp_path):
    result, folder = run(
        2, tmp_path, "logging.mlflow=false", "validation.every=2",
        start=lambda num_ranks, *arguments: torchrun(num_ranks, "main.py", *arguments))
    entries = read_jsonl(folder / "metrics.jsonl")
    assert [(entry["step"], "reward" in entry) for entry in entries] == [
        (0, False), (1, True), (2, True), (2, False), (3, True), (3, False)]
    every_step = TIMES | {
        "step", "reward", "reward_std", "reward/format", "reward/format_std", "reward/answer",
        "reward/answer_std", "solved", "groups_all_solved", "groups_none_solved",
        "groups_without_signal", "completion_length", "truncated", "entropy", "grad_norm",
        "learning_rate", "loss", "updated", "non_finite", "learned", "refilled",
        "sampled_per_learned"}
    assert set(entries[1]) == every_step | CHANGE | {"sampler_gap", "sampler_distance"}
    assert set(entries[2]) == set(entries[4]) == every_step | CHANGE
    assert set(entries[0]) == {
        "step", "eval/best_of_n", "eval/best_of_n_low", "eval/best_of_n_high", "eval/solved",
        "eval/solved_low", "eval/solved_high", "eval/solved/3", "eval/format", "eval/answer",
        "eval/reward", "eval/completion_length", "eval/truncated", "eval/pass_at_1",
        "eval/pass_at_2"}
    assert all(entry[key] > 0 for entry in entries if "reward" in entry for key in TIMES)

    samples = read_jsonl(folder / "samples.jsonl")
    assert len(samples) == 3 * 6 * 2
    assert ([(s["step"], s["question"]) for s in samples]
            == [(step, q) for step in (0, 2, 3) for q in range(6) for _ in range(2)])
    countdown = main.load_task(make_config())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "best")
    for sample in samples:
        numbers = sample["prompt"].split("numbers ")[1].split(" into")[0]
        target = int(sample["prompt"].split("equals ")[1].split(".")[0])
        row = {"nums": [int(number) for number in numbers.split(",")], "target": target}
        assert (countdown.reward_function(sample["completion"], row)
                == {"format": sample["format"], "answer": sample["answer"]})
        assert sample["solved"] == sample["answer"]
        ids = tokenizer(sample["completion"])["input_ids"]
        assert sample["completion_length"] == len(ids) + (not sample["truncated"])

    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["training"]["max_steps"] == 3 and settings["model"]["precision"] == "float32"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(result.stdout.splitlines()[-1]) == summary
    assert summary["first"] == entries[0] and summary["last"] == entries[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "best")
    assert (len(transformers.AutoTokenizer.from_pretrained(folder / "best"))
            == model.config.vocab_size)
    # three completions an evaluation, plain lines
    assert "\r" not in result.stdout and result.stdout.count("-> reward") == 9
    assert sum(line.startswith("step ") for line in result.stdout.splitlines()) == 3

    # Evaluating at another rhythm, and cutting the batch otherwise, change no training metric
    # beyond rounding (which decides whether some few tokens count as moved).
    _, other = run(2, tmp_path / "other", "validation.every=1",
                   "training.tokens_per_micro_batch=100")
    for ours, theirs in zip(training_steps(folder), training_steps(other), strict=True):
        assert ours == {
            key: pytest.approx(value, abs=0.05) if key in ("moved", "moved_as_meant")
            else pytest.approx(value, rel=1e-3 if key in CHANGE else 1e-4, abs=1e-7)
            for key, value in theirs.items()}


def test_sil_on_three_ranks_and_evaluation_alone(tmp_path):
    _, folder = run(3, tmp_path, "training.learning_type=sil", "training.k_best_of_n=[1,4]",
                    "training.max_steps=1")
    assert len(training_steps(folder)) == 1
    result = run_command(sys.executable, ROOT / "main.py", *SHORT, "training.max_steps=0",
                         "run.dir=.", "run.name=b",
                         cwd=tmp_path)  # plain python is one rank, from anywhere
    assert result.returncode == 0, result.stderr
    assert [list(entry)[:2] for entry in read_jsonl(tmp_path / "b" / "metrics.jsonl")] == [
        ["step", "eval/best_of_n"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains_a_step(architecture, model_folder, tmp_path, capsys):
    folder = model_folder(architecture)
    assert start([*SHORT, "training.max_steps=1", f"model.name={folder}", f"run.dir={tmp_path}",
                  "run.name=a"]) == 0
    entry = training_steps(tmp_path / "a")[0]
    assert entry["completion_length"] > 1
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "best"))
            is type(before))


def test_a_users_mistake_is_one_line_and_exit_code_two_on_every_rank(tmp_path):
    result = torchrun(2, "main.py", "training.learning_rat=1", f"run.dir={tmp_path}")
    assert result.returncode == 1  # torchrun's own
    assert ("error: training.learning_rat=1: there is no such key. "
            "Did you mean training.learning_rate?\n" in result.stderr)
    # Rank 0 says it, and torchrun's report says it again for each rank, last of all.
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert result.stderr.count("traceback : error: training.learning_rat=1: there is") == 2
    assert "error: training.learning_rat=1" in "".join(result.stderr.splitlines()[-2:])
    assert (result.stderr.count("exitcode  : 2") == 2
            and "exitcode  : 1" not in result.stderr.replace("exitcode  : 2", ""))
    assert "Traceback (most recent call last):\n  File \"" + str(ROOT) not in result.stderr


# ---------------------------------------------------------------- data and evaluation

def test_the_split_is_by_content_and_the_order_by_seed_alone(tmp_path, monkeypatch):
    problems = [([a, b, 7], 10 + a) for a in range(1, 9) for b in range(1, 9)]
    (tmp_path / "data.jsonl").write_text("".join(
        json.dumps({"nums": nums, "target": target}) + "\n" for nums, target in problems))
    # a and b swapped is another problem only when the target differs; each is also given once more
    # in another order
    with open(tmp_path / "data.jsonl", "a") as file:
        file.writelines(json.dumps({"nums": nums[::-1], "target": target}) + "\n"
                        for nums, target in problems)
    settings = {"data__dataset": str(tmp_path / "data.jsonl"), "data__num_validation": 10}
    task = main.load_task(make_config())

    def content(rows):
        return [(tuple(sorted(row["nums"])), row["target"]) for row in rows]

    questions = main.load_questions(task, None, make_config(**settings))
    training, validation = (of_split.rows for of_split in questions)
    assert len(validation) == len(set(content(validation))) == 10
    assert not set(content(training)) & set(content(validation))
    assert (set(content(training)) | set(content(validation))
            == {(tuple(sorted(nums)), target) for nums, target in problems})

    def batches(num_ranks, per_rank, steps, **more):
        config = make_config(**settings, **more, training__num_samples_per_step=per_rank)
        run = SimpleNamespace(
            config=config, training_questions=main.Questions(training, lambda row: [0]))
        monkeypatch.setattr(main, "WORLD_SIZE", num_ranks)
        result = []
        for run.step in range(1, steps + 1):
            for rank in range(num_ranks):
                monkeypatch.setattr(main, "RANK", rank)
                result += [id(question.row) for question in main.questions(run)]
        return result

    order = batches(1, 12, 30)
    assert order == batches(2, 6, 30) == batches(3, 4, 30)
    epoch = len(training)
    assert sorted(order[:epoch]) == sorted(map(id, training)) == sorted(order[epoch:2 * epoch])
    assert order[:epoch] != order[epoch:2 * epoch]
    assert batches(1, 12, 30, training__seed=1) != order


class Kept(SimpleNamespace):
    """In place of a run's folder and its log."""

    def __init__(self):
        super().__init__(**{**vars(SILENT_LOG), "seconds": {}})
        self.first_evaluation = None
        self.evaluations, self.saved = [], []

    def evaluation(self, *what):
        self.evaluations.append(what)

    def save_best(self, run, card):
        self.saved.append(card)


def wilson(share: float, n: float, side: int) -> float:
    """The farthest truth on that side that `share` of n draws is 1.96 standard errors from."""
    inside, outside = share, float(side > 0)
    for _ in range(60):
        middle = (inside + outside) / 2
        far = abs(share - middle) > 1.96 * math.sqrt(middle * (1 - middle) / n)
        inside, outside = (inside, middle) if far else (middle, outside)
    return inside


@pytest.mark.parametrize(("groups", "low", "high"), [
    ([[0, 0]] * 32, 0.0, wilson(0, 32, 1)), ([[1, 1]] * 8, wilson(1, 8, -1), 1.0),
    ([[1, 0]] * 8, wilson(0.5, 8, -1), wilson(0.5, 8, 1)),
    # a little less even than that: as much as each answer counts, and no more
    ([[1, 0]] * 9 + [[1, 1], [0, 0]], wilson(0.5, 22, -1), wilson(0.5, 22, 1)),
    ([[1, 1]], wilson(1, 1, -1), 1.0), ([[1, 1]] * 7 + [[0, 0]], wilson(7 / 8, 8, -1),
                                        wilson(7 / 8, 8, 1))])
def test_the_interval_stays_within_0_and_1_and_is_never_a_point(groups, low, high):
    answers = [[main.Trajectory(main.Question({}, []), [0], "", False,
                                {"format": 1.0, "answer": value})
                for value in group] for group in groups]
    metrics = main.evaluation_metrics(answers, main.load_task(make_config()))
    assert metrics["eval/solved_low"] == pytest.approx(low, abs=1e-9)
    assert metrics["eval/solved_high"] == pytest.approx(high, abs=1e-9)


def test_best_of_n_and_mean_accuracy_by_hand():
    task = main.load_task(make_config())
    solved = [[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]
    groups = [[main.Trajectory(main.Question({"group": 3 + (i > 2)}, []), [0] * (j + 1), "", j == 2,
                               {"format": 0.5, "answer": float(value)}, value + 0.05)
               for j, value in enumerate(values)] for i, values in enumerate(solved)]
    run = SimpleNamespace(task=task, step=7, best=(0.0, 0.0), folder=Kept(), log=Kept())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "evaluate", lambda run: groups)
        patch.setattr(main, "model_card", lambda run, before, now: now)
        main.evaluate_and_keep_best(run)
        main.evaluate_and_keep_best(run)
    (step, metrics, answers), again = run.log.evaluations
    assert (step, answers) == (7, groups) and again == run.log.evaluations[0]
    assert run.best == pytest.approx((3 / 5, 6 / 15)) and run.folder.saved == [metrics]  # once
    assert run.last_evaluation == 7
    # so many draws of 0 or 1 have as much variance as the mean over the five questions
    variance = ((1 / 3 - .4) ** 2 + .16 + .36 + (2 / 3 - .4) ** 2 + .16) / 4
    n = .4 * .6 / (variance / 5)
    assert 5 < n < 15
    assert metrics == pytest.approx({
        "eval/best_of_n": 3 / 5, "eval/solved": 6 / 15, "eval/solved/3": 4 / 9,
        "eval/solved/4": 2 / 6,
        # of one answer drawn, of two, of all three: question by question
        "eval/pass_at_1": 6 / 15, "eval/pass_at_2": (2 / 3 + 0 + 1 + 1 + 0) / 5,
        "eval/pass_at_3": 3 / 5,
        "eval/best_of_n_low": wilson(3 / 5, 5, -1), "eval/best_of_n_high": wilson(3 / 5, 5, 1),
        "eval/solved_low": wilson(6 / 15, n, -1), "eval/solved_high": wilson(6 / 15, n, 1),
        "eval/format": 0.5, "eval/answer": 0.4, "eval/reward": 0.45, "eval/completion_length": 2,
        "eval/truncated": 1 / 3})


def evaluate_made_up_answers(folder):
    """Rank 0 leaves what it gathered behind."""
    def answers(run, questions, group_size):
        return [[main.Trajectory(question, [0], str(j < question.row["solved_by"]), False)
                 for j in range(group_size)] for question in questions]

    task = SimpleNamespace(
        REWARD_WEIGHTS={"right": 1.0}, SOLVED="right",
        reward_function=lambda completion, row: {"right": float(completion == "True")})
    ranks_of_machinery.join()
    main.sample = answers
    main.model_card = lambda *_: ""
    rows = [{"prompt": "", "question": i, "solved_by": i} for i in range(5)]
    run = SimpleNamespace(config=make_config(validation__best_of_n=3), task=task, step=0,
                          best=(0.0, 0.0), folder=Kept(), log=Kept(),
                          validation_questions=main.Questions(rows, lambda row: [0]))
    main.evaluate_and_keep_best(run)
    assert run.last_evaluation == 0
    assert len(run.log.evaluations) == (main.RANK == 0)
    for _, metrics, groups in run.log.evaluations:
        order = [[answer.question.row["question"] for answer in group] for group in groups]
        (folder / "evaluation.json").write_text(json.dumps({"metrics": metrics, "order": order}))
    ranks_of_machinery.leave_group()
    end_process(0)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_five_questions_are_evaluated_and_gathered_in_order_on_any_number_of_ranks(
        num_ranks, tmp_path):
    result = ranks(num_ranks, evaluate_made_up_answers, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["order"] == [[question, question, question] for question in range(5)]
    # Question i is solved by i of its answers, at most 3: 0, 1, 2, 3, 3 of 3.
    assert found["metrics"]["eval/best_of_n"] == pytest.approx(4 / 5)
    assert found["metrics"]["eval/solved"] == pytest.approx(9 / 15)


def test_step_metrics_are_means_over_groups_and_answers(one_rank):
    stream = random.Random(0)
    groups = [[main.Trajectory(main.Question({}, []), [0] * stream.randint(1, 9), "", False,
                               {"format": 1.0, "answer": 0.0}, reward)
               for reward in rewards] for rewards in ([0.1, 0.1], [0.0, 1.0], [1.1, 0.1])]
    trajectories = [trajectory for group in groups for trajectory in group]
    # Step 2 is not evaluated, so nothing but what is patched in here is measured.
    run = SimpleNamespace(task=main.load_task(make_config()), log=Kept(), config=make_config(),
                          step=2, optimizer=SimpleNamespace(param_groups=[{"lr": 0.125}]))
    run.log.seconds = {"sample": 1.25, "score": 0.25, "refill": 0.0, "learn": 0.5, "evaluate": 9.0}
    update = {"loss": 2.0, "entropy": 0.5, "grad_norm": 1.0, "learned": 4, "updated": 1,
              "non_finite": 0}
    bad = {**update, "loss": math.inf, "grad_norm": math.nan, "updated": 0, "non_finite": 1}
    updates = [update, {**update, "loss": 4.0}, bad]
    report = measuring.StepReport(run, groups, groups)
    report.measured = {"sampler_gap": 0.25, "moved": math.nan}
    metrics = report.metrics(trajectories, updates)
    assert (metrics["loss"], metrics["updated"], metrics["non_finite"]) == (3.0, 2, 1)
    assert metrics["learning_rate"] == 0.125
    assert (metrics["sampler_gap"], metrics["moved"]) == (0.25, None)
    without = measuring.StepReport(run, groups, groups).metrics(
        trajectories, [measuring.NOTHING_LEARNED])
    assert (without["loss"], without["entropy"], without["grad_norm"]) == (0.0, None, None)
    assert metrics["reward"] == pytest.approx(2.4 / 6)
    assert metrics["reward_std"] == pytest.approx((0 + 0.5 + 0.5) / 3)
    assert metrics["groups_without_signal"] == pytest.approx(1 / 3)
    tokens = sum(len(t.completion_ids) for t in trajectories)
    assert metrics["completion_length"] == pytest.approx(tokens / 6)
    assert metrics["tokens_per_second"] == pytest.approx(tokens / 2)


def test_a_reward_that_is_the_same_for_every_answer_changes_no_weight(tmp_path, monkeypatch):
    """And the real reward does change them, so that it is the reward that makes the difference."""
    load_model, loaded = main.load_model, []

    def remember(*arguments):
        loaded.append(load_model(*arguments))
        return loaded[-1]

    monkeypatch.setattr(main, "load_model", remember)
    before = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model").state_dict()
    for task, learns in (("tests/tasks/constant_reward.py", False), ("countdown", True)):
        arguments = [*SHORT, "training.max_new_gen_tokens=60", f"task.name={task}",
                     f"run.dir={tmp_path}", f"run.name=learns-{learns}"]
        assert start(arguments) == 0
        steps = training_steps(tmp_path / f"learns-{learns}")
        assert any(entry["updated"] for entry in steps) == learns
        assert learns or [entry["reward"] for entry in steps] == pytest.approx([0.1] * 3)
        assert learns or all(entry["groups_without_signal"] == 1 for entry in steps)
        after = loaded.pop()[0].state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items()) != learns


def test_shuffled_rewards_are_as_frequent_as_the_real_ones_and_tell_nothing():
    task = main.load_task(
        make_config(task__name=str(ROOT / "tests" / "tasks" / "shuffled_reward.py")))
    row, stream = {"nums": [1, 2], "target": 3}, random.Random(1)
    answers = [stream.random() < 0.3 for _ in range(4000)]
    parts = [task.reward_function(f"</think><answer>{'1+2' if right else '2-1'}</answer>", row)
             for right in answers]
    paid = [part["shuffled"] for part in parts]
    assert sum(value > 1 for value in paid) == pytest.approx(sum(answers), abs=100)
    paid_when_right = [value > 1 for value, right in zip(paid, answers) if right]
    assert sum(paid_when_right) / len(paid_when_right) == pytest.approx(0.3, abs=0.05)
