"""Questions that teach nothing make room for others: which ones, and what is counted."""

from types import SimpleNamespace

import pytest
import torch
from conftest import SILENT_LOG, make_config, read_jsonl, start
from test_run import SHORT, training_steps

import main

QUESTIONS = [main.Question({"number": i}, [i]) for i in range(1000)]
TASK = SimpleNamespace(REWARD_WEIGHTS={"right": 1.0, "form": 0.1}, SOLVED="right")


def group_of(right: list[int], question=QUESTIONS[0]):
    """Of different form, so that every group has different rewards."""
    return [main.Trajectory(question, [0], "", False, {"right": value, "form": i}, value + 0.1 * i)
            for i, value in enumerate(right)]


def teaches(question) -> bool:
    return question.row["number"] % 3 == 0


@pytest.fixture
def refill(monkeypatch):
    """The groups that main.refill learns from and those it replaces, where answers are alike unless
    the question's number can be divided by three. And the questions of each round, with the seed
    that PyTorch samples with."""
    asked, seeds = [], []

    def sample(run, questions, group_size):
        assert questions and group_size == 2
        asked.append(questions)
        seeds.append(torch.initial_seed())
        return [group_of([1, 0] if teaches(each) else [0, 0], each) for each in questions]

    monkeypatch.setattr(main, "sample", sample)
    monkeypatch.setattr(main, "score", lambda run, groups: None)

    def refilled(groups, step=5, **keys):
        asked.clear()
        seeds.clear()
        config = make_config(training__k_best_of_n=[2, 2], **keys)
        run = SimpleNamespace(config=config, task=TASK, training_questions=QUESTIONS, step=step,
                              log=SILENT_LOG)
        batch, all_groups = main.refill(run, groups)
        assert all_groups[:len(batch)] == batch
        return batch, all_groups[len(batch):], [*asked], [*seeds]
    return refilled


def test_groups_alike_in_what_is_solved_are_replaced_and_no_others(refill):
    groups = [group_of(right) for right in ([1, 1], [0, 1], [0, 0], [1, 0], [0, 0])]
    before = list(groups)
    batch, replaced, asked, _ = refill(groups, training__refill=1)
    assert groups == before and batch[1] is groups[1] and batch[3] is groups[3]
    assert replaced == [groups[0], groups[2], groups[4]]
    assert [batch[i][0].question for i in (0, 2, 4)] == asked[0] and len(asked) == 1
    assert refill(groups)[:2] == (groups, [])  # by default none is


def test_rounds_go_on_until_all_teach_or_they_are_used_up(refill):
    groups = [group_of([0, 0]) for _ in range(40)]
    left = 40
    batch, replaced, asked, _ = refill(groups, training__refill=4)
    for questions in asked:
        assert len(questions) == left
        left -= sum(map(teaches, questions))
    assert 0 < left < 20 and len(replaced) == sum(map(len, asked))
    assert sum(len({answer.reward_parts["right"] for answer in group}) == 1
               for group in batch) == left
    # every group that was sampled is either learned from or counted
    assert len({id(group) for group in [*batch, *replaced]}) == 40 + len(replaced)


def test_rounds_end_once_every_group_teaches(refill):
    batch, replaced, asked, _ = refill([group_of([0, 0]), group_of([0, 1])], training__refill=10**9)
    assert len(asked) == len(replaced) < 50 and asked[-1][0] is batch[0][0].question


def test_what_a_round_draws_depends_on_seed_step_rank_and_round_alone(refill, monkeypatch):
    def drawn(num_groups=30, **how):
        """The questions of each round, and the seeds."""
        _, _, asked, seeds = refill([group_of([0, 0]) for _ in range(num_groups)],
                                    **{"training__refill": 2, **how})
        return asked, seeds

    first, seeds = drawn()
    assert first[0][:len(first[1])] != first[1] and seeds[0] != seeds[1]
    torch.manual_seed(1)
    assert drawn() == (first, seeds) and drawn(training__refill=1) == (first[:1], seeds[:1])
    assert drawn(num_groups=7)[0][0] == first[0][:7]
    others = [drawn(step=6), drawn(training__seed=1)]
    monkeypatch.setattr("machinery.ranks.RANK", 1)
    others.append(drawn())
    for asked, own_seeds in others:
        assert asked[0] != first[0] and own_seeds[0] != seeds[0]


def test_a_run_that_refills_learns_from_more_and_counts_what_it_has_sampled(tmp_path):
    steps = {}
    for rounds in (0, 3):
        assert start([*SHORT, f"run.dir={tmp_path}", f"run.name=r{rounds}",
                      f"training.refill={rounds}", "training.max_new_gen_tokens=150"]) == 0
        steps[rounds] = training_steps(tmp_path / f"r{rounds}")
    without, refilled = (steps[rounds][0] for rounds in (0, 3))
    assert without["refilled"] == 0 < refilled["refilled"]
    # what is said of the answers is said of those to the step's own questions
    for name in ("solved", "reward", "completion_length", "groups_none_solved"):
        assert without[name] == refilled[name]
    assert refilled["learned"] > without["learned"]
    N, G = 2, 4
    for step in (without, refilled):
        assert step["sampled_per_learned"] == pytest.approx(
            N * G * (1 + step["refilled"]) / max(1, step["learned"]))
    seconds = [entry["seconds/refill"] for entry in read_jsonl(tmp_path / "r3" / "metrics.jsonl")
               if "reward" in entry]
    assert seconds[0] > 0.05
