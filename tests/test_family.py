"""The relatives of Dr. GRPO, each a few keys away: against the papers' formulas in plain loops, on
any number of ranks."""

import itertools
import json
import random
import sys

import pytest
import torch
from conftest import gradient, make_config, make_model, make_trajectories, relative_error, start
from processes import ROOT, ranks
from safetensors.torch import load_file
from test_learning import (
    ARCHITECTURE,
    BOUND,
    GROUP,
    QUESTIONS,
    advantages_of,
    learn,
    make_case,
    reference,
)

import main
from machinery.launch import end_process
from machinery.ranks import RANK, WORLD_SIZE, join, leave_group

sys.path.append(str(ROOT / "bench"))
from kl import measured

pytestmark = pytest.mark.mathematics
GRPO = {"training__loss_normalizer": "sequence"}
PUBLISHED = {"Dr. GRPO": {}, "GRPO": GRPO, "DAPO": {"training__loss_normalizer": "tokens"}}
KL = {"training__kl_beta": 0.04}
KL_IN_LOSS = {**KL, "training__kl_in": "loss"}
CLIP = {"training__clip": [0.2, 0.28]}
MASK = {"training__mask_truncated": True}
TWICE = {"training__updates_per_batch": 2}
RATIOS = {"GSPO": {"training__ratio": "sequence"}, "CISPO": {"training__ratio": "cispo"}}


def as_in_plain_loops(dtype, **keys):
    """Metrics and gradient of the last update on made-up answers, once they equal the formula's."""
    trajectories = make_trajectories(QUESTIONS * GROUP)
    model = make_model(ARCHITECTURE[dtype], dtype)
    metrics = learn(model, trajectories, **keys)
    expected_loss, expected = reference(trajectories, ARCHITECTURE[dtype], **keys)
    assert relative_error(gradient(model), expected) < BOUND[dtype]
    # the sum of what is near 1 and -1
    assert metrics["loss"] == pytest.approx(expected_loss, abs=BOUND[dtype])
    return metrics, gradient(model)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("mu", [1, 2])
@pytest.mark.parametrize("clip", [{}, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("kl", [{}, KL, KL_IN_LOSS], ids=["no KL", "KL", "KL in the loss"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_loss_and_gradient_of_each_published_variant_equal_the_plain_formula(
        name, kl, clip, mu, dtype, one_rank):
    keys = {**PUBLISHED[name], **kl, **clip, "training__updates_per_batch": mu}
    metrics, _ = as_in_plain_loops(dtype, **keys)
    assert ("kl" in metrics) == bool(kl) and ("clipped" in metrics) == (bool(clip) and mu == 2)
    # of the size that occurs in training
    assert 1e-3 < metrics.get("kl", 0.1) < 0.3 and 0.05 < metrics.get("clipped", 0.1) < 0.5


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("clip", [{}, {"training__clip": [0.1, 0.1]}, CLIP],
                         ids=["unclipped", "closely", "clipped"])
@pytest.mark.parametrize("kl", [{}, KL, KL_IN_LOSS], ids=["no KL", "KL", "KL in the loss"])
@pytest.mark.parametrize("name", RATIOS)
def test_a_second_update_with_another_ratio_equals_the_plain_formula(
        name, kl, clip, dtype, one_rank):
    keys = {**GRPO, **kl, **clip, **TWICE, **RATIOS[name]}
    metrics, found = as_in_plain_loops(dtype, **keys)
    if clip:  # it does limit something
        assert 0.02 < metrics["clipped"] < 0.9
        _, unclipped = as_in_plain_loops(dtype, **{**keys, "training__clip": None})
        assert relative_error(found, unclipped) > 1e-3


@pytest.mark.parametrize("ratio", RATIOS.values(), ids=RATIOS)
def test_with_one_update_a_batch_all_ratios_are_the_same(ratio, one_rank):
    gradients = []
    for keys in ({}, ratio):
        model = make_model("gpt2", torch.float64)
        learn(model, make_trajectories(QUESTIONS * GROUP), **keys, **CLIP)
        gradients.append(gradient(model))
    assert torch.equal(*gradients)


def all_combinations():
    """Each with every other: what holds for the default holds for all of them."""
    for normalizer, *switches in itertools.product(PUBLISHED.values(), ({}, KL), ({}, MASK),
                                                   ({}, TWICE, {**TWICE, **CLIP})):
        keys = dict(normalizer)
        for switch in switches:
            keys |= switch
        yield keys
        if not keys.keys() & (MASK.keys() | TWICE.keys()) and KL.keys() <= keys.keys():
            yield keys | KL_IN_LOSS
            yield keys | KL_IN_LOSS | TWICE | CLIP
        if TWICE.keys() | CLIP.keys() <= keys.keys() and not MASK.keys() & keys.keys():
            yield from (keys | ratio for ratio in RATIOS.values())


def learn_from_shares(folder, cases):
    """Each rank learns from its share of one batch, in every case;
    rank 0 leaves the gradients behind."""
    join()
    for number, case in enumerate(cases):
        batch = make_case(case["idle_share"])
        share = batch[RANK * len(batch) // WORLD_SIZE:(RANK + 1) * len(batch) // WORLD_SIZE]
        assert len(share) == QUESTIONS * GROUP // WORLD_SIZE
        dtype = getattr(torch, case["dtype"])
        model = make_model(ARCHITECTURE[dtype], dtype)
        metrics = learn(model, share, training__tokens_per_micro_batch=60, **case["keys"])
        if RANK == 0:
            torch.save(gradient(model).clone(), folder / f"{number}.pt")
            (folder / f"{number}.json").write_text(json.dumps(metrics))
    leave_group()
    end_process(0)


@pytest.mark.parametrize("idle", [False, True], ids=["all learn", "one idle"])
def test_the_gradient_is_the_same_on_any_number_of_ranks(idle, tmp_path):
    """For every combination, also with one rank that has nothing to learn from; micro-batches are
    small, so that there are several."""
    cases = [{"keys": keys, "dtype": "float64", "idle_share": idle} for keys in all_combinations()]
    cases += [{"keys": {}, "dtype": "float32", "idle_share": idle}]
    expected = [reference(make_case(case["idle_share"]),
                          ARCHITECTURE[getattr(torch, case["dtype"])], **case["keys"])
                for case in cases]
    for num_ranks in (1, 2, 3):
        result = ranks(num_ranks, learn_from_shares, tmp_path, cases)
        assert result.returncode == 0, result.stderr
        for number, (case, (loss, plain)) in enumerate(zip(cases, expected, strict=True)):
            dtype = getattr(torch, case["dtype"])
            assert relative_error(torch.load(tmp_path / f"{number}.pt", weights_only=True),
                                  plain) < BOUND[dtype], (num_ranks, case)
            metrics = json.loads((tmp_path / f"{number}.json").read_text())
            assert metrics["loss"] == pytest.approx(loss, abs=BOUND[dtype]), (num_ranks, case)


@pytest.mark.parametrize("keys", list(all_combinations()), ids=str)
def test_neither_micro_batches_nor_the_order_of_rows_change_the_gradient(keys, one_rank):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    gradients = []
    for tokens in (1, 50, 100_000):
        random.Random(tokens).shuffle(trajectories)
        model = make_model("gpt2", torch.float64)
        learn(model, trajectories, training__tokens_per_micro_batch=tokens, **keys)
        gradients.append(gradient(model).clone())
    assert (relative_error(gradients[1], gradients[0]) < 1e-11
            and relative_error(gradients[2], gradients[0]) < 1e-11)


def test_with_a_kl_term_a_step_without_signal_still_updates(one_rank):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    for trajectory in trajectories:
        trajectory.advantage = 0.0
    model = make_model()
    metrics = learn(model, trajectories, **KL)
    assert metrics["updated"] == 1 and metrics["kl"] > 0 and gradient(model).norm() > 0


@pytest.mark.parametrize("distance", [0.1, 1.0])
def test_the_mean_of_the_kl_reward_is_the_gradient_of_kl_and_that_of_the_published_form_is_not(
        distance):
    """Over all answers that there are, each weighed by its probability. Of one token: of several,
    KL's own gradient also holds each token to the KL of what comes after it."""
    of_one = measured(L=1, distance=distance)
    assert of_one["probability"] == pytest.approx(1, abs=1e-12)
    assert of_one["estimate / kl"] == pytest.approx(1, abs=1e-11)
    assert of_one["cosine reward"] == pytest.approx(1, abs=1e-11)
    assert of_one["length reward"] == pytest.approx(1, abs=1e-11)
    assert of_one["cosine loss"] < 0.9995
    of_three = measured(L=3, distance=distance)
    assert of_three["probability"] == pytest.approx(1, abs=1e-12)
    assert of_three["estimate / kl"] == pytest.approx(1, abs=1e-11)
    assert of_three["cosine loss"] < of_three["cosine reward"] < 0.999


def test_the_page_shows_what_the_kl_script_says():
    page = (ROOT / "docs" / "coming-from.md").read_text()
    for length, name in ((1, "one token"), (4, "up to four")):
        row = measured(L=length, distance=0.3)
        assert (f"| {name} | {row['kl']:.3f} | {row['estimate / kl']:.6f} "
                f"| {row['cosine reward']:.6f} | {row['cosine loss']:.6f} |") in page


def test_scaled_advantages_are_those_of_grpo_and_still_exactly_zero_without_spread():
    rewards = [1.1, 0.1, 0.1, 0.0]
    mean = sum(rewards) / 4
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
    scaled = advantages_of(rewards, training__scale_rewards="group")
    assert scaled == pytest.approx([(reward - mean) / (deviation + 1e-4) for reward in rewards],
                                   rel=1e-12)
    for size in (2, 7, 16):
        assert advantages_of([0.1] * size, training__scale_rewards="group") == [0.0] * size


def test_advantages_over_the_mean_are_those_of_maxrl():
    """Of rewards of 0 and 1: 1 / p - 1 for what is right, -1 for what is wrong."""
    over_mean = {"training__scale_rewards": "mean"}
    assert advantages_of([1.0, 0.0, 0.0, 0.0], **over_mean) == [3, -1, -1, -1]
    assert advantages_of([1.0, 1.0, 0.0, 1.0], **over_mean) == pytest.approx([1/3, 1/3, -1, 1/3])
    assert advantages_of([0.0] * 4, **over_mean) == [0.0] * 4
    assert advantages_of([1.1, 0.1, 0.1, 0.1], **over_mean) == pytest.approx(
        [0.75 / 0.35, *[-0.25 / 0.35] * 3], rel=1e-12)  # a reward for form takes the edge off
    # below 0 it is the mean of their sizes: nothing is divided by 0, and no sign is turned
    assert advantages_of([-1.0, 0.0], **over_mean) == [-1, 1]
    assert advantages_of([-1.0, 1.0], **over_mean) == [-1, 1]


def test_sil_learns_from_the_k_best_alone_whatever_the_normaliser_counts():
    config = make_config(training__learning_type="sil", training__k_best_of_n=[2, 4])
    question = main.Question({}, [])
    group = [main.Trajectory(question, [0] * length, "", False, reward=reward)
             for length, reward in ((1, 0.1), (2, 1.1), (3, 0.0), (4, 0.6))]
    assert (main.compute_advantages(group, config.training, random.Random(0))
            == [group[1], group[3]])
    everything = make_config()
    assert main.compute_advantages(group, everything.training, random.Random(0)) == group


def test_a_later_update_that_is_not_finite_is_skipped_and_said_and_the_one_before_it_stays(
        tmp_path, monkeypatch, capsys):
    keys = ["training.max_steps=2", "training.max_new_gen_tokens=24",
            "training.num_samples_per_step=2", "training.k_best_of_n=[4,4]",
            "data.num_validation=4", "data.max_rows=100", "validation.best_of_n=2",
            "training.updates_per_batch=2", f"run.dir={tmp_path}", "training.kl_beta=0.1",
            "checkpoint.every=1"]
    policy_loss, calls = main.policy_loss, []

    def bad_at_the_fourth(*arguments):
        calls.append(arguments)
        loss, watched = policy_loss(*arguments)
        return loss * (float("nan") if len(calls) == 4 else 1.0), watched

    # the second update of the second step
    monkeypatch.setattr(main, "policy_loss", bad_at_the_fourth)
    assert start([*keys, "run.name=a"]) == 0
    steps = [json.loads(line)
             for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
             if '"reward"' in line]
    assert [(step["updated"], step["non_finite"]) for step in steps] == [(2, 0), (1, 1)]
    assert steps[1]["kl"] is not None and "step    2" in capsys.readouterr().out
    first, second = (load_file(tmp_path / "a" / "checkpoints" / f"step-00000{step}"
                               / "tensors-1.safetensors") for step in (1, 2))
    assert all(tensor.isfinite().all() for tensor in second.values())
    counts = [{float(tensor) for name, tensor in tensors.items() if name.endswith("/step")}
              for tensors in (first, second)]
    assert counts == [{2}, {3}] and any(not torch.equal(first[name], second[name])
                                        for name in first if "/" not in name)
