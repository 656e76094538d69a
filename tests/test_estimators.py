"""The estimators of bench/estimators.py are main.py's own, and their truth is the truth."""

import dataclasses
import random

import estimators
import kl
import pytest
import torch
from conftest import VOCABULARY, gradient, make_config, make_model, make_policy, relative_error

import countdown
import main

pytestmark = pytest.mark.mathematics


def answers_of(count: int, stream: random.Random) -> list[main.Trajectory]:
    """Random answers to one question. Some are equal."""
    question = main.Question({}, [stream.randrange(VOCABULARY) for _ in range(4)])
    answers = []
    for _ in range(count):
        if answers and stream.random() < 0.2:
            answers.append(dataclasses.replace(stream.choice(answers)))
            continue
        ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, 12))]
        parts = {"answer": float(stream.random() < 0.4), "format": float(stream.random() < 0.7)}
        answers.append(main.Trajectory(question, ids, "", stream.random() < 0.2, parts))
    return answers


def exact_sketch(model) -> estimators.Sketch:
    sketch = estimators.Sketch(model)
    sketch.signs = sketch.signs.double()
    return sketch


@pytest.mark.parametrize("name", estimators.ESTIMATORS)
def test_the_weighted_sketches_of_a_group_are_the_sketch_of_main_pys_gradient(name, one_rank):
    estimator = estimators.ESTIMATORS[name]
    config = make_config(training__max_grad_norm=None, training__max_new_gen_tokens=12)
    training = estimators.training_of(config, estimator)
    run = make_policy(make_model("gpt2", torch.float64),
                      config.model_copy(update={"training": training}))
    sketch = exact_sketch(run.policy.module.model)
    stream = random.Random(3)
    group = answers_of(estimator.G, stream)
    for answer in group:
        answer.reward = estimators.reward_of(answer, countdown, estimator)
        answer.reference_log_probs = torch.tensor(
            [stream.gauss(-3, 1) for _ in answer.completion_ids], dtype=torch.float64)

    weights = estimators.weights_of(group, training, estimator.change)
    found = torch.zeros(estimators.BUCKETS, dtype=torch.float64)
    for answer, weight in zip(group, weights, strict=True):
        log_probs, _ = run.policy.module([answer])
        found += weight * sketch.of_value(log_probs.sum())
        if training.kl_beta:
            penalty = sketch.of_penalty(log_probs, answer, training, training.kl_in)
            found += training.kl_beta * penalty / len(group)

    counted = estimators.counted_answers(group, training, estimator.change)
    learned, totals = estimators.learned_and_totals(counted, training)
    assert main.policy_gradient(run, learned, totals)["updated"] == 1
    assert relative_error(found, -sketch.of([gradient(run.policy)])) < 1e-11
    assert found.norm() > 1e-3


def test_a_later_update_is_that_of_a_run_with_several(one_rank, monkeypatch):
    config = make_config(training__max_new_gen_tokens=12, training__updates_per_batch=2,
                         training__clip=[0.2, 0.2], training__max_grad_norm=None,
                         training__learning_rate=0.01)
    run = make_policy(make_model("gpt2", torch.float64), config)
    run.model = run.policy.module.model
    run.task = countdown
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.01)
    answers = answers_of(8, random.Random(3))
    for answer in answers:
        answer.reward = estimators.reward_of(answer, countdown, estimators.Estimator())
    monkeypatch.setattr(main, "score", lambda run, groups: None)
    monkeypatch.setattr(main, "sample", lambda run, questions, G: [
        [dataclasses.replace(answer) for answer in answers] for _ in questions])
    monkeypatch.setattr(estimators.Sketch, "of", lambda sketch, gradients: torch.cat(
        [each.flatten().clone() for each in gradients]))

    found = estimators.later_updates(run, [answers[0].question] * 32)  # two batches

    main.compute_advantages(answers, config.training)
    batch = [dataclasses.replace(answer) for _ in range(16) for answer in answers]
    learned, totals = estimators.learned_and_totals(batch, config.training)
    for _ in range(2):
        main.policy_gradient(run, learned, totals)
        expected = -gradient(run.policy)
        run.optimizer.step()
    clipped = found["second update, clipped"]
    assert relative_error(clipped[0], expected) < 1e-11
    assert relative_error(clipped[1], expected) < 1e-11  # The second batch begins anew.
    assert relative_error(found["second update"][0], expected) > 1e-3
    assert relative_error(found["fourth update"][0], found["second update"][0]) > 1e-3
    assert relative_error(found["fourth update"][0], found["fourth update, clipped"][0]) > 1e-3


@pytest.fixture(scope="module")
def listed():
    """A pool of a model so small that all its answers can be listed, with the exact gradient of the
    probability to be right, (questions, BUCKETS)."""
    model = kl.small_model(0.4)
    sketch = exact_sketch(model)
    policy = main.Policy(model, make_config(training__max_new_gen_tokens=2))
    stream = random.Random(0)
    groups, sketches, exact = [], [], []
    for number in range(10):
        answers = kl.all_answers(2)
        for answer in answers:
            answer.question = main.Question({}, [1 + number % 5, 1 + number // 5, 3])
            answer.reward = float(answer.completion_ids[:1] == [2])
        log_probs, _ = policy(answers)
        lengths = [answer.num_tokens for answer in answers]
        log_p = torch.stack([own.sum() for own in log_probs.split(lengths)])  # (answers,)
        rewards = torch.tensor([answer.reward for answer in answers], dtype=log_p.dtype)
        exact.append(sketch.of_value(log_p.exp() @ rewards))
        gradients = [sketch.of_value(each) for each in log_p]
        sampled = stream.choices(range(len(answers)), log_p.exp().tolist(), k=400)
        groups.append([dataclasses.replace(answers[i]) for i in sampled])
        sketches.append(torch.stack([gradients[i] for i in sampled]))
    pool = estimators.Pool(groups, {"log pi": torch.stack(sketches)})
    rewards = [[answer.reward for answer in group] for group in groups]
    return pool, estimators.truth_of(rewards, pool.sketches["log pi"]), torch.stack(exact)


TRAINING = estimators.training_of(
    make_config(training__max_new_gen_tokens=2), estimators.Estimator())


def test_the_truth_of_a_pool_is_that_from_all_answers_listed(listed):
    _, truth, exact = listed

    assert torch.cosine_similarity(truth.mean(0), exact.mean(0), dim=0) > 0.99
    assert truth.mean(0).norm() / exact.mean(0).norm() == pytest.approx(1, abs=0.05)


def test_the_cosine_of_a_batch_is_that_of_batches_that_are_sampled(listed):
    pool, truth, exact = listed
    truths = {estimators.OWN: truth, estimators.SOLVED: exact}
    means, squares = estimators.by_question(pool, TRAINING, "")
    row, _ = estimators.with_intervals(means, squares, truths, groups_a_batch=16)
    stream = random.Random(1)
    cosines = []
    for _ in range(200):
        batch = torch.zeros(estimators.BUCKETS, dtype=torch.float64)
        for question in stream.choices(range(10), k=16):
            chosen = stream.sample(range(400), 8)
            batch += estimators.gradient_of_group(pool, question, chosen, TRAINING, "")
        cosines.append(torch.cosine_similarity(batch, exact.mean(0), dim=0).item())

    assert row["batch, what is solved"][0] == pytest.approx(sum(cosines) / 200, abs=0.04)
    for name in ("mean, what it optimises", "mean, what is solved"):
        value, half = row[name]
        assert abs(value - 1) < max(half, 0.02) and half < 0.1  # Dr. GRPO has no bias.


def test_a_longer_gradient_is_as_good_and_half_the_answers_are_worse(listed):
    pool, truth, exact = listed
    truths = {estimators.OWN: truth, estimators.SOLVED: exact}
    means, squares = estimators.by_question(pool, TRAINING, "")
    row, beside = estimators.with_intervals(means, squares, truths, 16)

    twice, _ = estimators.with_intervals(2 * means, 4 * squares, truths, 16, beside)
    fewer, _ = estimators.with_intervals(means, squares, truths, 8, beside)

    assert twice[estimators.DIFFERENCE] == [0, 0]
    less, half = fewer[estimators.DIFFERENCE]
    own, other = fewer["batch, what it optimises"], row["batch, what it optimises"]
    assert less == pytest.approx(own[0] - other[0], abs=1e-3)
    assert less + half < 0
    assert half < own[1]  # Both come from the same questions.
