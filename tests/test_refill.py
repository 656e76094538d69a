"""Groups that teach nothing make room for others: which ones, and what is counted."""

from types import SimpleNamespace

import pytest
import torch
from conftest import SILENT_LOG, SMALL, make_config, read_jsonl, start

import main

QUESTIONS = [main.Question({"number": i}, [i]) for i in range(1000)]
TASK = SimpleNamespace(REWARD_WEIGHTS={"right": 1.0, "format": 0.1}, SOLVED="right")


def group_of(right: list[int], question=QUESTIONS[0]) -> list:
    """The format differs. So all groups have different rewards."""
    answers = []
    for i, value in enumerate(right):
        parts = {"right": value, "format": i}
        answers.append(main.Trajectory(question, [0], "", False, parts, value + 0.1 * i))
    return answers


def teaches(question) -> bool:
    return question.row["number"] % 3 == 0


@pytest.fixture
def refill(monkeypatch):
    """A function that returns what main.refill learns from, what it replaces, the questions of each
    round, and PyTorch's seed in each. Both answers to a question are wrong unless it teaches."""
    asked, seeds = [], []

    def sample(run, questions, group_size):
        asked.append(questions)
        seeds.append(torch.initial_seed())
        return [group_of([1, 0] if teaches(question) else [0, 0], question)
                for question in questions]

    def refilled(groups, rounds, step=5, **keys):
        asked.clear()
        seeds.clear()
        config = make_config(training__k_best_of_n=[2, 2], training__refill=rounds, **keys)
        run = SimpleNamespace(config=config, task=TASK, training_questions=QUESTIONS, step=step,
                              log=SILENT_LOG)
        batch, all_groups = main.refill(run, groups)
        assert all_groups[:len(batch)] == batch
        return batch, all_groups[len(batch):], list(asked), list(seeds)

    monkeypatch.setattr(main, "sample", sample)
    monkeypatch.setattr(main, "score", lambda run, groups: None)
    return refilled


def test_groups_with_all_or_none_solved_are_replaced_and_no_others(refill):
    groups = [group_of(right) for right in ([1, 1], [0, 1], [0, 0], [1, 0])]
    before = list(groups)

    batch, replaced, asked, _ = refill(groups, rounds=1)

    assert groups == before
    assert batch[1] is groups[1] and batch[3] is groups[3]
    assert replaced == [groups[0], groups[2]]
    assert asked == [[batch[0][0].question, batch[2][0].question]]


def test_rounds_continue_until_all_groups_teach_or_the_rounds_are_used_up(refill):
    groups = [group_of([0, 0]) for _ in range(40)]
    for rounds in (0, 4, 10**9):

        batch, replaced, asked, _ = refill(groups, rounds)

        left = 40
        for questions in asked:
            assert len(questions) == left
            left -= sum(teaches(question) for question in questions)
        alike = [group for group in batch if main.all_or_none(group, TASK)]
        assert len(alike) == left
        assert len(asked) == rounds or left == 0
        # Every group that was sampled is either learned from or counted.
        assert len({id(group) for group in batch + replaced}) == 40 + sum(map(len, asked))


def test_what_a_round_samples_depends_on_seed_step_rank_and_round_alone(refill, monkeypatch):
    def sampled(num_groups=30, **how):
        _, _, asked, seeds = refill([group_of([0, 0])] * num_groups, rounds=2, **how)
        return asked, seeds

    questions, seeds = sampled()
    torch.manual_seed(1)
    assert sampled() == (questions, seeds)
    assert sampled(num_groups=7)[0][0] == questions[0][:7]
    others = [sampled(step=6), sampled(training__seed=1)]
    monkeypatch.setattr("machinery.ranks.RANK", 1)
    others.append(sampled())

    assert seeds[0] != seeds[1] and questions[0][:len(questions[1])] != questions[1]
    for other_questions, other_seeds in others:
        assert other_questions[0] != questions[0]
        assert other_seeds[0] != seeds[0]


def test_a_run_that_refills_learns_from_more_and_counts_what_it_has_sampled(tmp_path):
    steps = []
    for rounds in (0, 3):
        assert start([*SMALL, "training.max_steps=1", "training.max_new_gen_tokens=150",
                      "data.num_validation=2", f"training.refill={rounds}",
                      f"run.dir={tmp_path / str(rounds)}"]) == 0
        entries = read_jsonl(tmp_path / str(rounds) / "a" / "metrics.jsonl")
        steps += [entry for entry in entries if "reward" in entry]
    plain, refilled = steps

    assert plain["refilled"] == 0 < refilled["refilled"]
    assert plain["learned"] < refilled["learned"]
    assert refilled["seconds/refill"] > 0.05
    for step in steps:
        num_sampled = 8 * (1 + step["refilled"])
        assert step["sampled_per_learned"] == pytest.approx(num_sampled / max(1, step["learned"]))
    # What is told of the answers is told of those to the step's own questions.
    for name in ("solved", "reward", "completion_length", "groups_none_solved"):
        assert plain[name] == refilled[name]
