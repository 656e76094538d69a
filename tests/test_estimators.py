"""The estimators of bench/estimators.py are main.py's own, and their truth is the truth."""

import dataclasses
import random
import sys

import pytest
import torch
from conftest import (
    VOCABULARY,
    gradient,
    make_config,
    make_model,
    make_policy,
    relative_error,
    run_script,
)
from processes import ROOT, ranks

import countdown
import main

sys.path.append(str(ROOT / "bench"))
import estimators
import kl

pytestmark = pytest.mark.mathematics


def answers_of(count: int, stream: random.Random) -> list[main.Trajectory]:
    """To one question, some of them equal; rewarded for being right, for form, or not at all."""
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


@pytest.mark.parametrize("name, normalizer", [
    *((name, "as named") for name in estimators.ESTIMATORS),
    # a KL term's own gradient is kept over the number of answers times the longest
    *((name, "tokens") for name, each in estimators.ESTIMATORS.items() if "kl_in" not in each.keys)
])
def test_the_weighted_sketches_of_a_batch_are_the_sketch_of_main_pys_gradient(
        name, normalizer, one_rank):
    estimator = estimators.ESTIMATORS[name]
    if normalizer == "tokens":
        estimator = dataclasses.replace(
            estimator, keys=estimator.keys | {"loss_normalizer": "tokens"})
    config = make_config(training__max_grad_norm=None, training__max_new_gen_tokens=12)
    training = estimators.training_of(config, estimator)
    config = config.model_copy(update={"training": training})
    stream, model = random.Random(3), make_model("gpt2", torch.float64)
    groups = [answers_of(estimator.G, stream) for _ in range(3 if estimator.G < 64 else 1)]
    answers = [answer for group in groups for answer in group]
    for answer in answers:
        answer.reward = estimators.reward_of(answer, countdown, estimator)
        answer.reference_log_probs = torch.tensor(
            [stream.gauss(-3, 1) for _ in answer.completion_ids], dtype=torch.float64)
    sketch = estimators.Sketch(model)
    sketch.signs = sketch.signs.double()
    run = make_policy(model, config)
    policy = run.policy.module.eval()
    own = torch.stack([sketch.of_log_pi(policy([answer])[0]) for answer in answers])

    weights = estimators.weights_of(groups, training, estimator.change, random.Random(0))
    from_pool = torch.tensor(weights, dtype=torch.float64) @ own
    if beta := training.kl_beta:
        penalties = [sketch.of_penalty(policy([answer])[0], answer, training, training.kl_in)
                     for answer in answers]
        from_pool += beta * torch.stack(penalties).sum(0) / len(answers)

    # the same stream: it decides between equals
    counted = estimators.with_advantages(groups, training, estimator.change, random.Random(0))
    assert main.policy_gradient(run, counted)["updated"] == 1
    assert relative_error(from_pool, -sketch.of([gradient(model)])) < 1e-11
    assert from_pool.norm() > 1e-3


def test_a_later_update_is_that_of_a_run_with_several(one_rank):
    """By hand: the same batch, learned from twice by main.py, and the gradient it leaves."""
    config = make_config(training__max_new_gen_tokens=12, training__updates_per_batch=2,
                         training__clip=[0.2, 0.2], training__max_grad_norm=None,
                         training__learning_rate=0.01)
    stream, model = random.Random(3), make_model("gpt2", torch.float64)
    answers = answers_of(8, stream)
    for answer in answers:
        answer.reward = estimators.reward_of(answer, countdown, estimators.Estimator())
    run = make_policy(model, config)
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.01)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    sampled = [answer for _ in range(16) for answer in map(dataclasses.replace, answers)]
    groups = [sampled[i:i + 8] for i in range(0, 128, 8)]
    for group in groups:
        main.compute_advantages(group, config.training, stream)
    for _ in range(2):
        main.policy_gradient(run, sampled)
        expected = -gradient(model)
        run.optimizer.step()

    model.load_state_dict(kept)
    run.optimizer = torch.optim.AdamW(run.policy.parameters(), lr=0.01)
    run.model, run.task = model, countdown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "sample", lambda run, questions, G: [
            [dataclasses.replace(answer) for answer in answers] for _ in questions])
        patch.setattr(main, "score", lambda run, groups: [
            setattr(each, "reward", estimators.reward_of(each, run.task, estimators.Estimator()))
            for group in groups for each in group])
        patch.setattr(estimators.Sketch, "of", lambda sketch, gradients: torch.cat(
            [each.flatten().clone() for each in gradients]))
        found = estimators.later_updates(run, [answers[0].question] * 32)
    assert all(value.shape[0] == 2 for value in found.values())
    assert relative_error(found["second update, clipped"][0], expected) < 1e-11
    assert relative_error(found["second update, clipped"][1], expected) < 1e-11  # it begins anew
    assert relative_error(found["fourth update"][0], found["second update"][0]) > 1e-3
    assert relative_error(found["fourth update"][0], found["fourth update, clipped"][0]) > 1e-3


def pools(K: int, num_questions: int):
    """Answers to as many questions, drawn from a model so small that all of them can be listed,
    with their sketches; and the exact gradient of the probability to be right."""
    everything, right = kl.all_answers(2), lambda answer: float(answer.completion_ids[:1] == [2])
    model, exact, groups, sketches = kl.small_model(0.4), [], [], []
    config = make_config(training__max_new_gen_tokens=2)
    policy, sketch = main.Policy(model, config), estimators.Sketch(model)
    sketch.signs = sketch.signs.double()
    stream = random.Random(0)
    for question in range(num_questions):
        for answer in everything:
            answer.question = main.Question({}, [1 + question % 5, 1 + question // 5, 3])
        log_probs, _ = policy(everything)
        log_p = torch.stack([own.sum() for own in log_probs.split(
            [answer.num_tokens for answer in everything])])
        value = sum(p * right(answer) for p, answer in zip(log_p.exp(), everything))
        exact.append(sketch.of(torch.autograd.grad(value, sketch.parameters, retain_graph=True)))
        each = [sketch.of(torch.autograd.grad(one, sketch.parameters, retain_graph=True))
                for one in log_p]
        drawn = stream.choices(range(len(everything)), log_p.exp().tolist(), k=K)
        groups.append([dataclasses.replace(everything[i], reward=right(everything[i]))
                       for i in drawn])
        sketches.append(torch.stack([each[i] for i in drawn]))
    return config, groups, torch.stack(sketches), torch.stack(exact)


def test_the_truth_of_a_pool_is_that_from_all_answers_listed():
    config, groups, sketches, exact = pools(K=400, num_questions=10)
    values = [[answer.reward for answer in group] for group in groups]
    truth = estimators.truth_of(values, sketches)
    found = torch.cosine_similarity(truth.mean(0), exact.mean(0), dim=0)
    length = truth.mean(0).norm() / exact.mean(0).norm()
    assert found > 0.99 and 0.95 < length < 1.05
    # what is said of Dr. GRPO, from groups of 8 with the truth held to be unknown
    training = estimators.training_of(config, estimators.Estimator())
    means, squares = estimators.by_question(
        estimators.Pool(groups, sketches, {}), training, estimators.as_it_is, rounds=2)
    truths = {estimators.OWN: truth, estimators.SOLVED: exact}
    row, beside = estimators.with_intervals(means, squares, truths, groups_a_batch=16)
    for name in ("mean, what it optimises", "mean, what is solved"):
        value, half = row[name]
        assert abs(value - 1) < max(half, 0.02) and half < 0.1
    # the cosine of one batch, drawn in fact, with the exact gradient
    stream, cosines = random.Random(1), []
    for _ in range(200):
        batch = torch.zeros(estimators.BUCKETS, dtype=torch.float64)
        for question in stream.choices(range(10), k=16):
            chosen = stream.sample(range(400), 8)
            weights = estimators.weights_of([[groups[question][i] for i in chosen]],
                                            training, estimators.as_it_is, stream)
            batch += torch.tensor(weights, dtype=torch.float64) @ sketches[question][chosen]
        cosines.append(torch.cosine_similarity(batch, exact.mean(0), dim=0).item())
    assert sum(cosines) / len(cosines) == pytest.approx(row["batch, what is solved"][0], abs=0.04)

    # and what is the same but for its length is as good; what has half the answers is not
    twice, _ = estimators.with_intervals(2 * means, 4 * squares, truths, 16, beside)
    assert twice[estimators.BEYOND] == [0, 0]
    fewer, _ = estimators.with_intervals(means, squares, truths, 8, beside)
    less, half = fewer[estimators.BEYOND]
    own, other = (each["batch, what it optimises"] for each in (fewer, row))
    assert less == pytest.approx(own[0] - other[0], abs=1e-3) and less + half < 0
    assert half < own[1] < other[1] + own[1]  # they have the same questions


@pytest.mark.parametrize("said, words", [
    ("NAME=FOLDER", ["--model", "tiny/model"]), ("are the least", ["--questions", "2"]),
    ("see --questions", ["--model", "a=tiny/model", "data.max_rows=20", "data.num_validation=4"]),
    ("/nowhere", ["--model", "a=/nowhere"])])
def test_a_mistake_is_one_line_and_no_traceback(said, words, tmp_path):
    result = ranks(1, run_script, "bench/estimators.py", "--data", str(tmp_path / "a"), *words)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "a").exists()
