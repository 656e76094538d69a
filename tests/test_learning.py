"""The loss and its gradient against a formula in plain loops, the update, advantages, and what is
due when."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    BOUND,
    PROMPTS,
    TEMPERATURE,
    VOCABULARY,
    gradient,
    learn,
    learn_in_plain_loops,
    learning_config,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    relative_error,
    sample,
)

import main
from machinery.errors import SharedError
from machinery.metrics import count_skipped, pass_at_k
from machinery.passes import split_into_micro_batches
from machinery.settings import is_due

pytestmark = pytest.mark.mathematics


# ---------------------------------------------------------------- the gradient

@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    """A micro-batch of all answers needs three passes, and its logits many chunks."""
    monkeypatch.setattr("machinery.prompts.ROWS_PER_PASS", 5)
    monkeypatch.setattr("machinery.passes.LOGITS_PER_CHUNK", 10 * VOCABULARY)


def make_pairs() -> list:
    """Two answers to each question. So its prompt is processed once for both. The first is as short
    as a prompt can be."""
    answers = make_trajectories()
    for first, second in zip(answers[::2], answers[1::2]):
        second.question = first.question
    answers[0].question.prompt_ids[:] = [5]
    return answers


# The types are those in which all of a model computes.
GRADIENTS = [("gpt2", torch.float64), ("qwen2", torch.float32), ("llama", torch.float32),
             ("gemma2", torch.float32)]


@pytest.mark.parametrize(("architecture", "dtype"), GRADIENTS, ids=str)
@pytest.mark.parametrize("tokens_per_micro_batch", [1, 50, 100_000])
def test_loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size(
        tokens_per_micro_batch, architecture, dtype, one_rank):
    answers = make_pairs()
    expected_loss, expected = learn_in_plain_loops(answers, architecture, dtype)
    random.Random(1).shuffle(answers)  # Their order does not matter either.
    model = make_model(architecture, dtype)

    metrics = learn(model, answers, training__tokens_per_micro_batch=tokens_per_micro_batch)

    assert relative_error(gradient(model), expected) < BOUND[dtype]
    # The loss is a sum of numbers near 1 and -1.
    assert metrics["loss"] == pytest.approx(expected_loss, abs=BOUND[dtype])


def test_gradient_checkpointing_does_not_change_the_gradient(one_rank):
    model = make_model("gpt2", torch.float64)
    model.activation_checkpointing_enable()
    _, expected = learn_in_plain_loops(make_pairs(), "gpt2")

    learn(model, make_pairs())

    assert relative_error(gradient(model), expected) < BOUND[torch.float64]


def test_learning_puts_the_model_back_into_train_mode_after_sampling(one_rank):
    """In eval mode gradient checkpointing has no effect."""
    model = make_model()
    sample(model, PROMPTS, 1)
    assert not model.training

    learn(model, make_trajectories())

    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_and_entropies_are_those_of_each_answer_alone(
        architecture, checkpointing):
    """The expected ones come from the model's own logits, without any padding."""
    answers = make_pairs()
    model = make_model(architecture).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    expected_log_probs, expected_entropies = [], []
    for answer, log_probs in zip(answers, plain_logprobs(model, answers, TEMPERATURE)):
        expected_log_probs += log_probs
        ids = answer.prompt_ids + answer.completion_ids
        logits = model(torch.tensor([ids])).logits[0, len(answer.prompt_ids) - 1:-1]
        p = torch.softmax(logits / TEMPERATURE, dim=-1)
        expected_entropies += (-p * p.log()).sum(-1)

    log_probs, entropies = main.Policy(model, learning_config())(answers)

    near = {"rtol": 0, "atol": BOUND[torch.float32]}
    assert torch.allclose(log_probs, torch.stack(expected_log_probs), **near)
    assert torch.allclose(entropies, torch.stack(expected_entropies), **near)


def test_dropout_is_off_whatever_the_models_config_says(model_folder):
    folder = model_folder("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model, _ = main.load_model(make_config(model__name=str(folder), model__precision="float32"))
    ids = torch.arange(2, 12, device=model.device)[None]

    model.train()

    assert torch.equal(model(ids).logits, model(ids).logits)


def test_only_answers_with_an_advantage_go_through_the_model(one_rank):
    answers = make_trajectories()
    run = make_policy(make_model(), learning_config(training__tokens_per_micro_batch=60))
    passed = []
    run.policy.register_forward_pre_hook(
        lambda module, arguments: passed.extend(id(answer) for answer in arguments[0]))

    [update] = main.learn(run, answers)

    with_advantage = [id(answer) for answer in answers if answer.advantage != 0]
    assert sorted(passed) == sorted(with_advantage)
    assert update["learned"] == len(with_advantage) < len(answers)


def test_gradients_are_shared_once_an_update_however_many_micro_batches_there_are(one_rank):
    run = make_policy(make_model(), learning_config(training__tokens_per_micro_batch=1))
    buckets = []

    def share(state, bucket):
        buckets.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    run.policy.register_comm_hook(None, share)
    main.learn(run, make_trajectories())

    assert buckets == [0]  # The model is so small that one bucket holds all gradients.


def test_an_update_does_not_add_to_the_gradient_of_the_one_before(one_rank):
    run = make_policy(make_model(), learning_config(training__learning_rate=1e-30))
    norms = [main.learn(run, make_trajectories())[0]["grad_norm"] for _ in range(2)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_norm_of_the_gradient_is_limited_and_told_as_it_was_before(one_rank):
    free, limited = make_model(), make_model()
    learn(free, make_trajectories())
    norm = gradient(free).norm().item()

    metrics = learn(limited, make_trajectories(), training__max_grad_norm=norm / 4)

    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert relative_error(gradient(limited), gradient(free) / 4) < 1e-4


@pytest.mark.parametrize("keys", [{}, {
    "training__loss_normalizer": "sequence", "training__kl_beta": 0.04, "training__kl_in": "loss",
    "training__updates_per_batch": 2, "training__ratio": "sequence"}], ids=["Dr. GRPO", "GRPO"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gradient_of_an_answer_without_tokens_is_exactly_0(architecture, keys):
    """A rank that has nothing to learn from computes that of a made-up answer."""
    config = learning_config(**keys)
    policy = main.Policy(make_model(architecture).train(), config)
    batch, = split_into_micro_batches([], config.training)

    log_probs, _ = policy(batch)
    loss, _ = main.policy_loss(log_probs, batch, {"answers": 4, "tokens": 9}, config.training)
    loss.backward()

    assert loss == 0 and (gradient(policy) == 0).all()


# ---------------------------------------------------------------- the update

def run_that_learns(model, **overrides):
    """What `main.learn` uses of a run, in its second step."""
    config = learning_config(training__learning_rate=0.1, training__warmup_steps=4, **overrides)
    run = make_policy(model, config)
    run.sampler, run.step = main.make_sampler(model, config), 2
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.0)
    return run


@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_the_sampler_has_the_new_weights_after_updates_at_the_learning_rate_of_the_step(
        precision, one_rank):
    run = run_that_learns(
        make_model(), model__precision=precision, training__updates_per_batch=2)
    before = [copied.clone() for copied in run.sampler.parameters()]

    updates = main.learn(run, make_trajectories())

    assert [update["updated"] for update in updates] == [1, 1]
    assert run.optimizer.param_groups[0]["lr"] == 0.1 * 2 / 4
    for copied, parameter, old in zip(run.sampler.parameters(), run.model.parameters(), before):
        assert torch.equal(copied, parameter.to(copied.dtype))
        assert not torch.equal(copied, old)


def test_a_step_without_signal_changes_nothing(one_rank):
    answers = make_trajectories()
    for answer in answers:
        answer.advantage = 0.0
    run = run_that_learns(make_model())
    main.warm_up(run.policy, run.optimizer)

    update, = main.learn(run, answers)

    assert (update["learned"], update["updated"], update["loss"]) == (0, 0, 0.0)
    assert math.isnan(update["grad_norm"]) and math.isnan(update["entropy"])
    for state in run.optimizer.state.values():
        assert state["step"] == 0  # A step of AdamW would decay the weights.
    for parameter, unchanged in zip(run.model.parameters(), make_model().parameters()):
        assert torch.equal(parameter, unchanged)


def test_mixed_precision_computes_in_bfloat16_and_keeps_masters_in_float32(one_rank):
    model = make_model()
    _, expected = learn_in_plain_loops(make_trajectories(), "qwen2")

    sampler = main.make_sampler(model, make_config(model__precision="mixed"))
    learn(model, make_trajectories(), model__precision="mixed", training__learning_rate=1e-30)

    assert {parameter.dtype for parameter in sampler.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for parameter, unchanged in zip(model.parameters(), make_model().parameters()):
        assert torch.allclose(parameter, unchanged, rtol=0, atol=1e-25)  # They were not rounded.
    # bfloat16 has 8 bits.
    assert 1e-4 < relative_error(gradient(model), expected) < 0.08


# ---------------------------------------------------------------- advantages

def make_group(rewards: list[float]) -> list:
    question = main.Question({}, [])
    return [main.Trajectory(question, [0], "", False, reward=reward) for reward in rewards]


def advantages_of(rewards: list[float], **overrides) -> list[float]:
    group = make_group(rewards)
    main.compute_advantages(group, make_config(**overrides).training)
    return [answer.advantage for answer in group]


def test_the_advantage_is_the_reward_less_the_mean_of_its_group():
    assert advantages_of([1.1, 0.1, 0.1, 0.0]) == pytest.approx([0.775, -0.225, -0.225, -0.325])


@pytest.mark.parametrize("size", [2, 3, 7, 32])
def test_equal_rewards_mean_an_advantage_of_exactly_zero(size):
    assert advantages_of([0.1] * size) == [0.0] * size


SIL = {"training__learning_type": "sil", "training__k_best_of_n": [2, 4]}


def test_sil_imitates_the_k_best_and_nothing_that_earned_nothing():
    assert advantages_of([0.1, 1.1, 0.0, 0.6], **SIL) == [0, 1, 0, 1]
    assert advantages_of([0.0, 1.1, 0.0, 0.0], **SIL) == [0, 1, 0, 0]
    assert advantages_of([0.0] * 4, **SIL) == [0, 0, 0, 0]
    # The reward for the right format counts like any other.
    assert advantages_of([0.1, 0.1, 0.0, 0.0], **SIL) == [1, 1, 0, 0]
    # Of equal answers the first ones count.
    assert advantages_of([0.1, 1.1, 0.1, 0.1], **SIL) == [1, 1, 0, 0]


def test_only_the_answers_that_sil_imitates_count_in_the_normalizer():
    group = make_group([0.1, 1.1, 0.0, 0.6])
    learned = main.compute_advantages(group, make_config(**SIL).training)
    assert sorted(map(id, learned)) == sorted(map(id, group[1::2]))
    assert main.compute_advantages(group, make_config().training) == group


# ---------------------------------------------------------------- what is due when

def test_micro_batches_hold_every_answer_once_within_the_budget():
    answers = make_trajectories(50)

    def split(tokens):
        training = make_config(training__tokens_per_micro_batch=tokens).training
        return split_into_micro_batches(answers, training)

    batches = split(60)

    ids = [id(answer) for batch in batches for answer in batch]
    assert sorted(ids) == sorted(map(id, answers))
    for batch in batches:
        longest = max(len(answer.prompt_ids) + answer.num_tokens for answer in batch)
        assert len(batch) * longest <= 60
    # An answer over the budget goes alone.
    assert [len(batch) for batch in split(1)] == [1] * 50


def test_the_learning_rate_warms_up_and_then_stays_or_decays():
    def rates(steps, **overrides):
        training = make_config(training__learning_rate=1.0, **overrides).training
        return [main.learning_rate_at(step, training) for step in steps]

    assert rates([1, 2], training__warmup_steps=0) == [1, 1]
    assert rates([1, 2, 4, 5, 900], training__warmup_steps=4) == [0.25, 0.5, 1, 1, 1]
    # The last of the 4 + 8 steps still learns.
    decaying = rates([1, 4, 5, 6, 9, 12, 13, 900],
                     training__warmup_steps=4, training__decay_steps=8,
                     training__max_steps=12)
    assert decaying == [0.25, 1, 1, 0.875, 0.5, 0.125, 0, 0]


def test_what_happens_every_so_many_steps_also_happens_after_the_last():
    config = make_config(training__max_steps=11)
    assert [step for step in range(1, 12) if is_due(step, 4, config)] == [4, 8, 11]
    assert [step for step in range(1, 12) if is_due(step, 100, config)] == [11]


def test_five_skipped_steps_in_a_row_end_the_run_and_a_good_one_between_them_does_not():
    bad, good = {"non_finite": 1}, {"non_finite": 0}
    counts = [0]
    for step, update in enumerate([bad, bad, good, bad, bad, bad, bad], start=1):
        counts.append(count_skipped(counts[-1], update, step))

    assert counts == [0, 1, 2, 0, 1, 2, 3, 4]
    with pytest.raises(SharedError, match="not finite in 5 steps in a row, up to step 9"):
        count_skipped(4, bad, 9)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(n, ks):
    groups = []
    for num_right in range(n + 1):
        right = [float(i < num_right) for i in range(n)]
        groups.append([SimpleNamespace(reward_parts={"right": value}) for value in right])
    expected = {}
    for k in ks:
        shares = []
        for group in groups:
            choices = list(itertools.combinations(group, k))
            right = [any(answer.reward_parts["right"] for answer in choice) for choice in choices]
            shares.append(sum(right) / len(right))
        expected[f"eval/pass_at_{k}"] = pytest.approx(sum(shares) / len(shares))

    assert pass_at_k(groups, SimpleNamespace(SOLVED="right")) == expected
