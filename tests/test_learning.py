"""The gradient: against a formula in plain loops, and the same however the batch is cut, ordered,
padded or shared."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    gradient,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    plain_loss,
    relative_error,
)

import main
from machinery import policy
from machinery.batches import make_micro_batches
from machinery.errors import SharedError
from machinery.evaluation import pass_at_k
from machinery.schedule import count_skipped, is_due, learning_rate_at

pytestmark = pytest.mark.mathematics
TEMPERATURE, L, QUESTIONS, GROUP = 0.7, 12, 6, 2
SGD_RATE = 0.06
# What is compared with is computed in float64. Rounding then comes to 1e-14 in float64 and to 1e-6
# in float32, a little more or less on another processor; a wrong formula changes the gradient by
# 1e-2 and more.
BOUND = {torch.float32: 1e-5, torch.float64: 1e-11}
ARCHITECTURE = {torch.float64: "gpt2", torch.float32: "qwen2"}
# Gemma 2's cannot mix
DTYPE = {name: torch.float32 if name == "gemma2" else torch.float64 for name in ARCHITECTURES}


def start_of(model):
    """What `model` shall have been before it learned:
    the same architecture, somewhat other weights."""
    reference = make_model(model.config.model_type, model.dtype)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.97)
    return reference


def go_on(model):
    """In place of AdamW's, between two updates: a step large enough for ratios to leave the
    clipping range."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(SGD_RATE * parameter.grad)


def learning_config(**overrides):
    return make_config(**{"training__max_new_gen_tokens": L, "training__max_grad_norm": None,
                          "sampling__temperature": TEMPERATURE, "model__precision": "float32",
                          **overrides})


def learn(model, trajectories, **overrides):
    """The updates on one batch, as a run of these settings makes them; returns the last one's
    metrics. Its gradient stays in `model`. The trajectories stay as fresh as they come."""
    config = learning_config(**overrides)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    if config.training.kl_beta:
        run.reference = main.make_reference(main.Policy, start_of(model), config)
    answers = [dataclasses.replace(trajectory) for trajectory in trajectories]
    assert all(answer.old_log_probs is answer.reference_log_probs is None for answer in answers)
    for update in range(config.training.updates_per_batch):
        if update > 0:
            go_on(model)
        metrics = main.policy_gradient(run, answers)
    return metrics


def reference(trajectories, architecture, **overrides):
    """The same in plain loops and in float64: loss and gradient of the last update."""
    training = make_config(**overrides).training
    model, old = make_model(architecture, DTYPE[architecture]), None
    if training.updates_per_batch > 1:
        old = [[value.item() for value in row]
               for row in plain_logprobs(model, trajectories, TEMPERATURE)]
    if training.kl_beta:
        against = [[value.item() for value in row]
                   for row in plain_logprobs(start_of(model), trajectories, TEMPERATURE)]
    for update in range(training.updates_per_batch):
        if update > 0:
            go_on(model)
        model.zero_grad()
        loss = plain_loss(model, trajectories, QUESTIONS * GROUP, L, TEMPERATURE,
                          normalizer=training.loss_normalizer, clip=training.clip, old=old,
                          ratio=training.ratio, beta=training.kl_beta, kl_in=training.kl_in,
                          reference=against if training.kl_beta else None,
                          mask_truncated=training.mask_truncated)
        loss.backward()
    return loss.item(), gradient(model)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("tokens_per_micro_batch", [1, 50, 100_000])
def test_loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size(
        one_rank, dtype, tokens_per_micro_batch):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    expected_loss, expected = reference(trajectories, ARCHITECTURE[dtype])
    model = make_model(ARCHITECTURE[dtype], dtype)
    metrics = learn(model, trajectories, training__tokens_per_micro_batch=tokens_per_micro_batch)
    assert relative_error(gradient(model), expected) < BOUND[dtype]
    # the sum of what is near 1 and -1
    assert metrics["loss"] == pytest.approx(expected_loss, abs=BOUND[dtype])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_and_gradient_equal_those_from_the_models_own_logits(
        one_rank, architecture, monkeypatch):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    # ten tokens at a time, so the chunked path is the one tested
    monkeypatch.setattr("machinery.policy.LOGITS_PER_CHUNK", 24 * 10)
    model, bound = make_model(architecture, DTYPE[architecture]), BOUND[DTYPE[architecture]]
    logprobs, entropies = main.Policy(model, learning_config())(trajectories)
    place = 0
    for trajectory in trajectories:
        prompt_ids = trajectory.prompt_ids
        logits = (model(torch.tensor([prompt_ids + trajectory.completion_ids])).logits[0]
                  / TEMPERATURE)
        for t, token in enumerate(trajectory.completion_ids):
            distribution = torch.softmax(logits[len(prompt_ids) + t - 1], dim=-1)
            assert logprobs[place].item() == pytest.approx(
                distribution[token].log().item(), abs=bound)
            assert entropies[place].item() == pytest.approx(
                torch.distributions.Categorical(distribution).entropy().item(), abs=bound)
            place += 1
    assert place == len(logprobs)
    learn(model, trajectories)
    _, expected = reference(trajectories, architecture)
    assert relative_error(gradient(model), expected) < bound


def test_the_order_of_rows_and_gradient_checkpointing_do_not_change_the_gradient(one_rank):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    _, expected = reference(trajectories, "gpt2")
    random.Random(1).shuffle(trajectories)
    model = make_model("gpt2", torch.float64)
    model.activation_checkpointing_enable()
    learn(model.train(), trajectories, training__tokens_per_micro_batch=60)
    assert relative_error(gradient(model), expected) < BOUND[torch.float64]


def watch(monkeypatch, name, calls):
    """Keeps the arguments of each call to this function of machinery/policy.py."""
    original = getattr(policy, name)

    def watched(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(policy, name, watched)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_rows_log_probabilities_do_not_depend_on_the_rows_beside_it(
        architecture, checkpointing, monkeypatch):
    """On longer prompts and completions, which pad its own, or on the same prompt, which is read
    once for all its rows."""
    trajectories = make_trajectories(8)
    trajectories += [dataclasses.replace(t, completion_ids=t.completion_ids[::-1])
                     for t in trajectories[:4]]
    model = make_model(architecture, DTYPE[architecture]).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    learner = main.Policy(model, learning_config())
    alone = torch.cat([learner([trajectory])[0] for trajectory in trajectories])
    monkeypatch.setattr(policy, "ANSWERS_PER_PASS", 5)
    passes, readings = [], []
    watch(monkeypatch, "forward_pass", passes)
    watch(monkeypatch, "prefill", readings)
    together, _ = learner(trajectories)
    _, _, prompt_masks, completions, caches = zip(*passes)
    assert list(map(len, completions)) == [5, 5, 2]
    assert not prompt_masks[0].all() and len(set(map(len, completions[0]))) > 1
    # 8 prompts, read once for all passes
    assert [ids.shape[0] for _, ids, _ in readings] == ([] if checkpointing else [8])
    assert [cache and cache.layers[0].keys.shape[0] for cache in caches] == (
        [None] * 3 if checkpointing else [5, 5, 2])
    assert torch.allclose(together, alone, rtol=0, atol=BOUND[DTYPE[architecture]])


def test_dropout_is_off_whatever_the_models_config_says(model_folder):
    folder = model_folder("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model, _ = main.load_model(make_config(model__name=str(folder), model__precision="float32"))
    ids = torch.arange(2, 12, device=model.device)[None]
    assert torch.equal(model.train()(ids).logits, model.train()(ids).logits)


def test_skipping_rows_of_zero_advantage_does_not_change_the_gradient(one_rank):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    model = make_model("gpt2", torch.float64)
    learn(model, trajectories)
    skipped = gradient(model)
    everything = make_model("gpt2", torch.float64)
    logprobs, _ = main.Policy(everything, learning_config())(trajectories)
    loss, _ = main.policy_loss(logprobs, trajectories, QUESTIONS * GROUP, 1,
                               learning_config().training)
    loss.backward()
    assert any(trajectory.advantage == 0 for trajectory in trajectories)
    assert relative_error(skipped, gradient(everything)) < BOUND[torch.float64]


def test_a_step_without_signal_changes_nothing(one_rank):
    trajectories = make_trajectories(QUESTIONS * GROUP)
    for trajectory in trajectories:
        trajectory.advantage = 0.0
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = make_policy(model, make_config(model__precision="float32"))
    metrics = dict(main.policy_gradient(run, trajectories))
    assert math.isnan(metrics.pop("entropy")) and math.isnan(metrics.pop("grad_norm"))
    assert metrics == {"loss": 0.0, "learned": 0, "updated": 0, "non_finite": 0}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mixed_precision_keeps_float32_masters_and_samples_from_a_bfloat16_copy(one_rank):
    model = make_model()
    sampler = main.make_sampler(model, make_config(model__precision="mixed"))
    with torch.no_grad():
        model.model.norm.weight += 0.37
    main.refresh_sampler(sampler, model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        assert torch.equal(copied, parameter.to(torch.bfloat16))

    trajectories = make_trajectories(QUESTIONS * GROUP)
    _, expected = reference(trajectories, "qwen2")
    mixed = make_model()
    config = learning_config(training__num_samples_per_step=QUESTIONS,
                             training__k_best_of_n=[GROUP, GROUP], model__precision="mixed")
    main.policy_gradient(make_policy(mixed, config), trajectories)
    assert gradient(mixed).dtype == torch.float32
    # it did run in bfloat16, and is near
    assert 1e-4 < relative_error(gradient(mixed), expected) < 0.08


@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_after_each_update_the_sampler_has_the_new_weights(precision, one_rank):
    model, trajectories = make_model(), make_trajectories(8)
    config = make_config(model__precision=precision, training__updates_per_batch=2,
                         training__warmup_steps=0, training__learning_rate=0.1)
    run = make_policy(model, config)
    run.model, run.sampler, run.step = model, main.make_sampler(model, config), 1
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.0)
    before = [copied.clone() for copied in run.sampler.parameters()]
    assert [update["updated"] for update in main.learn(run, trajectories)] == [1, 1]
    for copied, parameter, old in zip(run.sampler.parameters(), model.parameters(), before):
        assert torch.equal(copied, parameter.to(copied.dtype)) and not torch.equal(copied, old)


def make_case(idle_share: bool):
    """The batch that all ranks together hold; with `idle_share` its last third teaches nothing."""
    trajectories = make_trajectories(QUESTIONS * GROUP)
    for trajectory in trajectories[2 * len(trajectories) // 3:] if idle_share else []:
        trajectory.advantage = 0.0
    return trajectories


# ---------------------------------------------------------------- advantages

def group_of(rewards):
    question = main.Question({}, [])
    return [main.Trajectory(question, [0], "", False, reward=reward) for reward in rewards]


def advantages_of(rewards, seed=0, **overrides):
    group = group_of(rewards)
    main.compute_advantages(group, make_config(**overrides).training, random.Random(seed))
    return [trajectory.advantage for trajectory in group]


def test_the_advantage_is_the_reward_less_the_mean_of_its_group():
    assert advantages_of([1.1, 0.1, 0.1, 0.0]) == pytest.approx([0.775, -0.225, -0.225, -0.325])


@pytest.mark.parametrize("size", [2, 3, 7, 8, 16, 32])
def test_equal_rewards_mean_an_advantage_of_exactly_zero(size):
    assert advantages_of([0.1] * size) == [0.0] * size


def test_sil_imitates_the_k_best_and_nothing_that_earned_nothing():
    sil = {"training__learning_type": "sil", "training__k_best_of_n": [2, 4]}
    assert advantages_of([0.1, 1.1, 0.0, 0.6], **sil) == [0, 1, 0, 1]
    assert advantages_of([0.0, 1.1, 0.0, 0.0], **sil) == [0, 1, 0, 0]
    assert advantages_of([0.0] * 4, **sil) == [0, 0, 0, 0]
    # what was paid for its form alone is imitated like any other, as `imitate_best` says
    assert advantages_of([0.1, 0.1, 0.0, 0.0], **sil) == [1, 1, 0, 0]
    ties = [advantages_of([1.0] * 4, seed=seed, **sil) for seed in range(40)]
    assert all(sum(tie) == 2 for tie in ties)
    # the seed breaks ties, nothing else
    assert ties == [advantages_of([1.0] * 4, seed=seed, **sil) for seed in range(40)]
    assert all(any(tie[place] for tie in ties) for place in range(4))


def test_micro_batches_hold_every_row_once_within_the_budget():
    trajectories = make_trajectories(50)
    batches = make_micro_batches(trajectories, 60)
    assert (sorted(id(trajectory) for batch in batches for trajectory in batch)
            == sorted(map(id, trajectories)))
    assert all(len(batch) * max(len(t.prompt_ids) + len(t.completion_ids) for t in batch) <= 60
               for batch in batches)
    # a row over the budget goes alone
    assert [len(batch) for batch in make_micro_batches(trajectories, 1)] == [1] * 50


def test_the_learning_rate_warms_up_then_stays_or_decays():
    def rates(steps, **overrides):
        training = make_config(training__learning_rate=1.0, **overrides).training
        return [learning_rate_at(step, training) for step in steps]
    assert rates([1, 2, 4, 5, 900], training__warmup_steps=4) == [0.25, 0.5, 1, 1, 1]
    decaying = {"training__warmup_steps": 4, "training__decay_steps": 8}
    assert rates([1, 4, 5, 6, 9, 12, 13, 900], **decaying) == [
        0.25, 1, 1, 0.875, 0.5, 0.125, 0, 0]
    assert all(rate > 0 for rate in rates(range(1, 4 + 8 + 1), **decaying))  # none is for nothing
    assert rates([1, 2], training__warmup_steps=0) == [1, 1]


def test_what_happens_every_so_many_steps_also_happens_after_the_last():
    config = make_config(training__max_steps=11)
    assert [step for step in range(1, 12) if is_due(step, 4, config)] == [4, 8, 11]
    assert [step for step in range(1, 12) if is_due(step, 100, config)] == [11]


def test_five_skipped_steps_in_a_row_end_the_run_and_a_good_one_between_them_does_not():
    bad, good = {"non_finite": 1, "learned": 3}, {"non_finite": 0, "learned": 3}
    assert count_skipped(3, {"non_finite": 0, "learned": 0}, 1) == 3  # there was nothing to learn
    num_skipped = 0
    for step, update in enumerate([*[bad] * 4, good, *[bad] * 4, good], start=1):
        num_skipped = count_skipped(num_skipped, update, step)
    assert num_skipped == 0
    for step in range(11, 15):
        num_skipped = count_skipped(num_skipped, bad, step)
    with pytest.raises(SharedError, match="not finite in 5 steps in a row, up to step 15"):
        count_skipped(num_skipped, bad, 15)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(n, ks):
    shares = {}
    for k in ks:
        of_questions = []
        for num_right in range(n + 1):
            choices = list(itertools.combinations([i < num_right for i in range(n)], k))
            of_questions.append(sum(map(any, choices)) / len(choices))
        shares[f"eval/pass_at_{k}"] = pytest.approx(sum(of_questions) / (n + 1))
    assert pass_at_k(list(range(n + 1)), n) == shares
