"""The relatives of Dr. GRPO against the papers' formulas in plain loops, on any number of ranks."""

import math
from pathlib import Path

import pytest
import torch
from conftest import (
    ARCHITECTURE,
    BOUND,
    DISTILL,
    gradient,
    learn,
    learn_in_plain_loops,
    learning_config,
    make_model,
    make_policy,
    make_trajectories,
    relative_error,
)
from processes import ranks
from torch.nn.utils import parameters_to_vector

import main
from machinery.ranks import RANK, WORLD_SIZE, end_process, join, leave_group

pytestmark = pytest.mark.mathematics
GRPO = {"training__loss_normalizer": "sequence"}
PUBLISHED = {"Dr. GRPO": {}, "GRPO": GRPO, "DAPO": {"training__loss_normalizer": "tokens"}}
KL = {"training__kl_beta": 0.04}
KLS = {"no KL": {}, "KL": KL, "KL in the loss": {**KL, "training__kl_in": "loss"},
       "teacher": DISTILL}
CLIPS = {"unclipped": {}, "clipped": {"training__clip": [0.2, 0.28]}}
TWICE = {"training__updates_per_batch": 2}
TWICE_CLIPPED = {**TWICE, **CLIPS["clipped"]}


# ---------------------------------------------------------------- the loss

def learn_as_in_plain_loops(keys: dict) -> dict:
    """Learns from made-up answers in several micro-batches. Returns the metrics of the last update,
    once its loss and gradient equal the formula's."""
    expected_loss, expected = learn_in_plain_loops(make_trajectories(), "gpt2", **keys)
    model = make_model("gpt2", torch.float64)

    metrics = learn(model, make_trajectories(), training__tokens_per_micro_batch=60, **keys)

    assert relative_error(gradient(model), expected) < BOUND[torch.float64]
    # The loss is a sum of numbers near 1 and -1.
    assert metrics["loss"] == pytest.approx(expected_loss, abs=BOUND[torch.float64])
    return metrics


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_loss_and_gradient_of_each_published_variant_equal_the_plain_formula(
        name, kl, clip, updates, one_rank):
    keys = {**PUBLISHED[name], **KLS[kl], **CLIPS[clip], "training__updates_per_batch": updates}

    metrics = learn_as_in_plain_loops(keys)

    assert ("kl" in metrics) == (kl != "no KL")
    assert ("clipped" in metrics) == (clip == "clipped" and updates == 2)
    # Both are as large as in training.
    assert 1e-3 < metrics.get("kl", 0.1) < 0.3
    assert 0.05 < metrics.get("clipped", 0.1) < 0.5


def test_an_update_that_is_not_finite_is_skipped_and_the_one_before_it_stays(
        one_rank, monkeypatch):
    model = make_model()
    run = make_policy(model, learning_config(**TWICE))
    policy_loss, factors, weights = main.policy_loss, [1.0, math.nan], []

    def policy_loss_bad_in_the_second_update(*arguments):
        loss, watched = policy_loss(*arguments)
        return loss * factors.pop(0), watched

    monkeypatch.setattr(main, "policy_loss", policy_loss_bad_in_the_second_update)
    run.optimizer.register_step_post_hook(
        lambda *unused: weights.append(parameters_to_vector(model.parameters())))
    updates = main.learn(run, make_trajectories())

    assert [update["updated"] for update in updates] == [1, 0]
    assert [update["non_finite"] for update in updates] == [0, 1]
    after_the_first, = weights
    assert torch.equal(parameters_to_vector(model.parameters()), after_the_first)


# ---------------------------------------------------------------- ranks

def make_batch(half_learns: bool) -> list:
    """The batch that all ranks together have. If one half learns, the last of two or three ranks
    has nothing to learn from."""
    batch = make_trajectories()
    for answer in batch[len(batch) // 2:] if half_learns else []:
        answer.advantage = 0.0
    return batch


def cases_on_ranks() -> list[tuple[dict, torch.dtype, bool]]:
    """Keys, type of the weights, and whether one half of the batch learns. Each way to set a key
    meets each way to set any other one."""
    cases = [({}, torch.float32, False)]
    for i, normalizer in enumerate(PUBLISHED.values()):
        cases.append(({**normalizer, **TWICE_CLIPPED}, torch.float64, True))
        for j, kl in enumerate(KLS.values()):
            updates = [{}, TWICE, TWICE_CLIPPED][(i + j) % 3]
            cases.append(({**normalizer, **updates, **kl}, torch.float64, False))
    return cases


def learn_from_shares(path: Path, cases: list):
    """Each rank learns from its share of the batch. Rank 0 leaves loss and gradient behind."""
    join()
    found = []
    for keys, dtype, half_learns in cases:
        batch = make_batch(half_learns)
        size = len(batch) // WORLD_SIZE
        model = make_model(ARCHITECTURE[dtype], dtype)
        metrics = learn(model, batch[RANK * size:(RANK + 1) * size],
                        training__tokens_per_micro_batch=60, **keys)
        found.append((metrics["loss"], gradient(model)))
    if RANK == 0:
        torch.save(found, path)
    leave_group()
    end_process(0)


def test_the_gradient_is_the_same_on_any_number_of_ranks(tmp_path):
    cases = cases_on_ranks()
    expected = [learn_in_plain_loops(make_batch(half_learns), ARCHITECTURE[dtype], **keys)
                for keys, dtype, half_learns in cases]
    for num_ranks in (2, 3):  # One rank is that of the other tests.

        result = ranks(num_ranks, learn_from_shares, tmp_path / "found.pt", cases)

        assert result.returncode == 0, result.stderr
        found = torch.load(tmp_path / "found.pt", weights_only=True)
        for case, own, plain in zip(cases, found, expected, strict=True):
            bound = BOUND[case[1]]
            assert own[0] == pytest.approx(plain[0], abs=bound), (num_ranks, case)
            assert relative_error(own[1], plain[1]) < bound, (num_ranks, case)
