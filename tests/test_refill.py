"""Questions that teach nothing make room for others: which ones, and what is counted."""

from types import SimpleNamespace

import pytest
from conftest import NO_BAR, make_config, read_jsonl, start
from test_run import SHORT, training_steps

import main

ROWS = [{"prompt": str(i)} for i in range(1000)]
TASK = SimpleNamespace(REWARD_WEIGHTS={"right": 1.0, "form": 0.1}, SOLVED="right")


def group_of(right: list[int], row=None):
    """Of different form, so that every group has different rewards."""
    return [main.Trajectory(row, [], [0], "", False, {"right": value, "form": i}, value + 0.1 * i)
            for i, value in enumerate(right)]


@pytest.fixture
def refill(monkeypatch):
    """main.refill, where the answers to question i are alike unless it can be divided by three. And
    the questions of each call of `sample`."""
    asked = []

    def sample(run, rows, num_answers, bar):
        asked.append(rows)
        return [answer for row in rows for answer in group_of(
            [1, 0] if int(row["prompt"]) % 3 == 0 else [0, 0], row)]

    monkeypatch.setattr(main, "sample", sample)
    monkeypatch.setattr(main, "score", lambda answers, task, bar: None)

    def refilled(groups, step=5, **keys):
        asked.clear()
        config = make_config(training__k_best_of_n=[2, 2], **keys)
        run = SimpleNamespace(config=config, task=TASK, training_rows=ROWS)
        return *main.refill(run, groups, step, NO_BAR), [*asked]
    return refilled


def test_groups_alike_in_what_is_solved_are_replaced_and_no_others(refill):
    groups = [group_of(right) for right in ([1, 1], [0, 1], [0, 0], [1, 0], [0, 0])]
    before = list(groups)
    batch, replaced, asked = refill(groups, training__refill=1)
    assert groups == before and batch[1] is groups[1] and batch[3] is groups[3]
    assert replaced == [groups[0], groups[2], groups[4]]
    assert [batch[i][0].row for i in (0, 2, 4)] == asked[0] and len(asked) == 1
    assert refill(groups)[:2] == (groups, [])  # by default none is


def test_rounds_go_on_until_all_teach_or_they_are_used_up(refill):
    groups = [group_of([0, 0]) for _ in range(40)]
    left = 40
    batch, replaced, asked = refill(groups, training__refill=4)
    for rows in asked:
        assert len(rows) == left
        left -= sum(int(row["prompt"]) % 3 == 0 for row in rows)
    assert 0 < left < 20 and len(replaced) == sum(map(len, asked))
    assert sum(len({answer.parts["right"] for answer in group}) == 1 for group in batch) == left
    # every group that was sampled is either learned from or counted
    assert len({id(group) for group in [*batch, *replaced]}) == 40 + len(replaced)


def test_rounds_end_once_every_group_teaches(refill):
    batch, replaced, asked = refill([group_of([0, 0]), group_of([0, 1])], training__refill=10**9)
    assert len(asked) == len(replaced) < 50 and asked[-1][0] is batch[0][0].row


def test_what_a_round_draws_depends_on_seed_step_rank_and_round_alone(refill, monkeypatch):
    def asked(num_groups=30, **how):
        return refill([group_of([0, 0]) for _ in range(num_groups)],
                      **{"training__refill": 2, **how})[2]

    first = asked()
    assert first[0][:len(first[1])] != first[1]
    assert asked() == first and asked(training__refill=1) == first[:1]
    assert asked(num_groups=7)[0] == first[0][:7]
    assert asked(step=6)[0] != first[0] and asked(training__seed=1)[0] != first[0]
    monkeypatch.setattr("machinery.ranks.RANK", 1)
    assert asked()[0] != first[0]


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
