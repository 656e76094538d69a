"""Loss and gradient against a formula in plain loops, the update, advantages, what is due when."""

import math
import random

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
    relative_error,
    sample,
)

import main
from machinery import prompts
from machinery.errors import SharedError
from machinery.metrics import count_skipped
from machinery.model import make_sampler, warm_up
from machinery.passes import output_logits, pad_right, split_into_micro_batches
from machinery.settings import is_due
from machinery.tasks import Question

pytestmark = pytest.mark.mathematics
SYSTEM_MESSAGE = list(range(2, 18))  # longer than what follows it in any prompt


# ---------------------------------------------------------------- the gradient

@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    """The logits of most micro-batches come in many pieces."""
    monkeypatch.setattr("machinery.prompts.MOST_LOGITS", 10 * VOCABULARY)


def make_pairs(beginning: list[int] = ()) -> list:
    """Two answers to each question. So its prompt is processed once for both. The first is as short
    as a prompt can be, unless all have a `beginning`. Two answers are equal but for the advantage,
    and another begins like them."""
    answers = make_trajectories()
    for first, second in zip(answers[::2], answers[1::2]):
        second.question = first.question
    answers[1].completion_ids[:] = answers[0].completion_ids[:1]
    answers[5].completion_ids = answers[4].completion_ids
    answers[0].question.prompt_ids[:] = [5]
    for answer in answers[::2]:
        answer.question.prompt_ids[:0] = beginning
    return answers


@pytest.mark.parametrize(("architecture", "dtype"), [
    ("gpt2", torch.float64), ("qwen2", torch.float32), ("gemma2", torch.float32)], ids=str)
@pytest.mark.parametrize(("tokens_per_micro_batch", "beginning"), [
    (1, []), (50, []), (100_000, []), (100, SYSTEM_MESSAGE), (100_000, SYSTEM_MESSAGE)])
def test_loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size(
        tokens_per_micro_batch, beginning, architecture, dtype, one_rank):
    answers = make_pairs(beginning)
    expected_loss, expected = learn_in_plain_loops(answers, architecture, dtype)
    random.Random(1).shuffle(answers)  # Their order does not matter either.
    model = make_model(architecture, dtype)

    metrics = learn(model, answers, training__tokens_per_micro_batch=tokens_per_micro_batch)

    assert relative_error(gradient(model), expected) < BOUND[dtype]
    # The loss is a sum of numbers near 1 and -1.
    assert metrics["loss"] == pytest.approx(expected_loss, abs=BOUND[dtype])


def test_learning_puts_the_model_back_into_train_mode_after_sampling(one_rank):
    """In eval mode gradient checkpointing has no effect."""
    model = make_model()
    sample(model, PROMPTS, 1)
    assert not model.training

    learn(model, make_trajectories())

    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_entropies_are_those_of_each_answer_alone(architecture):
    """The expected ones come from the model's own logits, without any padding."""
    answers = make_pairs()
    model = make_model(architecture)
    expected = []
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        logits = model(ids).logits[0, len(answer.prompt_ids) - 1:-1]
        p = torch.softmax(logits / TEMPERATURE, dim=-1)
        expected.append((-p * p.log()).sum(-1))

    _, entropies = main.Policy(model, learning_config())(answers)

    assert torch.allclose(entropies, torch.cat(expected), rtol=0, atol=BOUND[torch.float32])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("branches", [True, False], ids=["prompts read once", "whole rows"])
def test_states_at_marked_places_become_the_models_own_logits_there(
        architecture, branches, monkeypatch):
    """Two rows have the same prompt, one has a prompt of one token, and one has no marked place."""
    monkeypatch.setattr(prompts, "can_branch", lambda model: branches)
    model = make_model(architecture)
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [2, 4, 4, 4], [9, 9]]
    is_before = [[0, 0, 1, 1], [0, 0, 1], [1, 1, 1], [0]]
    ids, mask = pad_right(rows, model.device)
    where, _ = pad_right([[*row, 0] for row in is_before], model.device)

    states = prompts.states_at(model, ids, mask, where.bool())

    expected = []
    for row, marks in zip(rows, is_before, strict=True):
        logits = model(torch.tensor([row])).logits[0]
        expected += [logits[t] for t, mark in enumerate(marks) if mark]
    assert torch.allclose(output_logits(model, states), torch.stack(expected), rtol=0, atol=1e-5)


def test_only_answers_with_an_advantage_are_processed_and_gradients_are_shared_once_an_update(
        one_rank):
    answers = make_trajectories()
    run = make_policy(make_model(), learning_config(training__tokens_per_micro_batch=1))
    processed, buckets = [], []

    def share(state, bucket):
        buckets.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    run.policy.register_comm_hook(None, share)
    run.policy.register_forward_pre_hook(
        lambda module, arguments: processed.extend(id(answer) for answer in arguments[0]))
    main.learn(run, answers)

    with_advantage = [id(answer) for answer in answers if answer.advantage != 0]
    assert sorted(processed) == sorted(with_advantage)
    learned = [id(answer) for answer in answers if answer.old_log_probs is not None]
    assert sorted(learned) == sorted(with_advantage) and len(learned) < len(answers)
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


# ---------------------------------------------------------------- the update

def run_that_learns(model, **overrides):
    """What `main.learn` uses of a run, in its second step."""
    config = learning_config(training__learning_rate=0.1, training__warmup_steps=4, **overrides)
    run = make_policy(model, config)
    run.sampler, run.step = make_sampler(model, config), 2
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.0)
    return run


def test_the_sampler_has_the_new_weights_after_updates_at_the_learning_rate_of_the_step(one_rank):
    run = run_that_learns(make_model(), model__precision="mixed", training__updates_per_batch=2)
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
    warm_up(run.policy, run.optimizer)

    update, = main.learn(run, answers)

    assert (update["updated"], update["loss"]) == (0, 0.0)
    assert math.isnan(update["grad_norm"]) and math.isnan(update["entropy"])
    for state in run.optimizer.state.values():
        assert state["step"] == 0  # A step of AdamW would decay the weights.
    for parameter, unchanged in zip(run.model.parameters(), make_model().parameters()):
        assert torch.equal(parameter, unchanged)


def test_mixed_precision_computes_in_bfloat16_and_keeps_masters_in_float32(one_rank):
    model = make_model()
    _, expected = learn_in_plain_loops(make_trajectories(), "qwen2")

    sampler = make_sampler(model, make_config(model__precision="mixed"))
    learn(model, make_trajectories(), model__precision="mixed", training__learning_rate=1e-30)

    assert {parameter.dtype for parameter in sampler.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for parameter, unchanged in zip(model.parameters(), make_model().parameters()):
        assert torch.allclose(parameter, unchanged, rtol=0, atol=1e-25)  # They were not rounded.
    # bfloat16 has 8 bits.
    assert 1e-4 < relative_error(gradient(model), expected) < 0.08


# ---------------------------------------------------------------- advantages

def make_group(rewards: list[float]) -> list:
    question = Question({}, [])
    return [main.Trajectory(question, [0], "", False, reward=reward) for reward in rewards]


def advantages_of(rewards: list[float], **overrides) -> list[float]:
    group = make_group(rewards)
    main.compute_advantages([group], make_config(**overrides).training)
    return [answer.advantage for answer in group]


def test_the_advantage_is_the_reward_less_the_mean_of_its_group(one_rank):
    assert advantages_of([1.1, 0.1, 0.1, 0.0]) == pytest.approx([0.775, -0.225, -0.225, -0.325])


def test_equal_rewards_mean_an_advantage_of_exactly_zero(one_rank):
    for size in (2, 3, 7, 32):  # The mean of some of these would be rounded.
        assert advantages_of([0.1] * size) == [0.0] * size


BY_DEVIATION = {"training__scale_rewards": "group"}


def test_advantages_of_grpo_are_divided_by_the_groups_standard_deviation(one_rank):
    rewards = [1.1, 0.1, 0.1, 0.0]
    mean = sum(rewards) / 4
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
    expected = [(reward - mean) / (deviation + 1e-4) for reward in rewards]

    assert advantages_of(rewards, **BY_DEVIATION) == pytest.approx(expected, rel=1e-12)
    assert advantages_of([0.1] * 7, **BY_DEVIATION) == [0.0] * 7  # Also where rewards are equal.


SIL = {"training__learning_type": "sil", "training__k_best_of_n": [2, 4]}


def test_sil_imitates_the_k_best_and_nothing_that_earned_nothing(one_rank):
    assert advantages_of([0.1, 1.1, 0.0, 0.6], **SIL) == [0, 1, 0, 1]
    assert advantages_of([0.0, 1.1, 0.0, 0.0], **SIL) == [0, 1, 0, 0]
    assert advantages_of([0.0] * 4, **SIL) == [0, 0, 0, 0]
    # The reward for the right format counts like any other.
    assert advantages_of([0.1, 0.1, 0.0, 0.0], **SIL) == [1, 1, 0, 0]
    # Of equal answers the first ones count.
    assert advantages_of([0.1, 1.1, 0.1, 0.1], **SIL) == [1, 1, 0, 0]


def test_only_the_answers_that_sil_imitates_count_in_the_normalizer(one_rank):
    group = make_group([0.1, 1.1, 0.0, 0.6])
    learned = main.compute_advantages([group], make_config(**SIL).training)
    assert sorted(map(id, learned)) == sorted(map(id, group[1::2]))
    assert main.compute_advantages([group], make_config().training) == group


# ---------------------------------------------------------------- what is due when

def test_micro_batches_hold_every_answer_once_within_the_budget():
    answers = make_trajectories(50)
    for budget in (1, 60):
        training = make_config(training__tokens_per_micro_batch=budget).training

        batches = split_into_micro_batches(answers, training)

        ids = [id(answer) for batch in batches for answer in batch]
        assert sorted(ids) == sorted(map(id, answers))
        for batch in batches:
            longest = max(len(answer.prompt_ids) + answer.num_tokens for answer in batch)
            # An answer over the budget goes alone.
            assert len(batch) * longest <= budget or len(batch) == 1


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
    bad = {"non_finite": 1, "updated": 0}
    good = {"non_finite": 0, "updated": 1}
    empty = {"non_finite": 0, "updated": 0}  # It had nothing to learn from.

    counts = [count_skipped(3, update, 9) for update in (bad, good, empty)]
    assert counts == [4, 0, 3]
    with pytest.raises(SharedError, match="not finite in 5 steps in a row, up to step 9"):
        count_skipped(4, bad, 9)
