"""The estimators of bench/estimators.py are main.py's own, and their truth is the truth."""

import dataclasses
import random
import sys

import pytest
import torch
from conftest import (
    NO_BAR,
    VOCABULARY,
    gradient,
    make_config,
    make_model,
    make_policy,
    relative_error,
    run_script,
)
from processes import ROOT, ranks

import main

sys.path.append(str(ROOT / "bench"))
import estimators
import kl

pytestmark = pytest.mark.mathematics


def answers_of(count: int, stream: random.Random) -> list[main.Trajectory]:
    """To one question, some of them equal; rewarded for being right, for form, or not at all."""
    prompt = [stream.randrange(VOCABULARY) for _ in range(4)]
    answers = []
    for _ in range(count):
        if answers and stream.random() < 0.2:
            answers.append(dataclasses.replace(stream.choice(answers)))
            continue
        ids = [stream.randrange(VOCABULARY) for _ in range(stream.randint(1, 12))]
        parts = {"right": float(stream.random() < 0.4), "form": float(stream.random() < 0.7)}
        answers.append(main.Trajectory({}, prompt, ids, "", stream.random() < 0.2, parts,
                                       parts["right"] + 0.1 * parts["form"]))
    return answers


@pytest.mark.parametrize("normalizer", ["as named", "tokens"])
@pytest.mark.parametrize("name", estimators.ESTIMATORS)
def test_the_weighted_sketches_of_a_batch_are_the_sketch_of_main_pys_gradient(
        name, normalizer, one_rank):
    G, keys, change = estimators.ESTIMATORS[name]
    keys = keys | ({"loss_normalizer": "tokens"} if normalizer == "tokens" else {})
    config = make_config(training__max_grad_norm=None, training__max_new_gen_tokens=12)
    training = estimators.training_of(config, G, keys)
    config = config.model_copy(update={"training": training})
    stream, model = random.Random(3), make_model("gpt2", torch.float64)
    groups = [answers_of(G, stream) for _ in range(3 if G < 64 else 1)]
    sketch = estimators.Sketch(model)
    sketch.signs = sketch.signs.double()
    run = make_policy(model, config)
    policy = run.policy.module.eval()
    own = torch.stack([sketch.of_log_pi(policy, answer) for group in groups for answer in group])

    weights = estimators.weights_of(groups, training, change, random.Random(0))
    from_pool = torch.tensor(weights, dtype=torch.float64) @ own

    # the same stream: it decides between equals
    counted = estimators.with_advantages(groups, training, change, random.Random(0))
    assert main.policy_gradient(run, counted, NO_BAR)["updated"] == 1
    assert relative_error(from_pool, -sketch.of([gradient(model)])) < 1e-11
    assert from_pool.norm() > 1e-3


def pools(K: int, num_questions: int):
    """Answers drawn from models so small that all answers can be listed: `num_questions` models
    stand for as many questions; and the exact gradient of the probability to be right."""
    everything, right = kl.all_answers(2), lambda answer: float(answer.completion_ids[:1] == [2])
    model, exact, groups, sketches = kl.small_model(0.4), [], [], []
    config = make_config(training__max_new_gen_tokens=2)
    policy, sketch = main.Policy(model, config), estimators.Sketch(model)
    sketch.signs = sketch.signs.double()
    stream = random.Random(0)
    for question in range(num_questions):
        for answer in everything:
            answer.prompt_ids = [1 + question % 5, 1 + question // 5, 3]
        logprobs, _ = policy(everything)
        log_p = torch.stack([own.sum() for own in logprobs.split(
            [len(answer.completion_ids) for answer in everything])])
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
    truth = estimators.truth_of(values, sketches).double()
    found = torch.cosine_similarity(truth.mean(0), exact.mean(0), dim=0)
    length = truth.mean(0).norm() / exact.mean(0).norm()
    assert found > 0.99 and 0.95 < length < 1.05
    # what is said of Dr. GRPO, from groups of 8 with the truth held to be unknown
    means, squares = estimators.by_question(
        groups, sketches, estimators.training_of(config, 8, {}), estimators.as_it_is, rounds=2)
    row = estimators.with_intervals(means, squares, {
        estimators.REWARD: truth, estimators.SOLVED: exact}, groups_a_batch=16)
    for name in ("mean, the reward", "mean, what is solved"):
        value, half = row[name]
        assert abs(value - 1) < max(half, 0.02) and half < 0.1
    # the cosine of one batch, drawn in fact, with the exact gradient
    stream, cosines = random.Random(1), []
    for _ in range(200):
        batch = torch.zeros(estimators.BUCKETS, dtype=torch.float64)
        for question in stream.choices(range(10), k=16):
            chosen = stream.sample(range(400), 8)
            weights = estimators.weights_of([[groups[question][i] for i in chosen]],
                                            estimators.training_of(config, 8, {}),
                                            estimators.as_it_is, stream)
            batch += torch.tensor(weights, dtype=torch.float64) @ sketches[question][chosen]
        cosines.append(torch.cosine_similarity(batch, exact.mean(0), dim=0).item())
    assert sum(cosines) / len(cosines) == pytest.approx(row["batch, what is solved"][0], abs=0.04)


@pytest.mark.parametrize("said, words", [
    ("NAME=FOLDER", ["--model", "tiny/model"]), ("are the least", ["--questions", "2"]),
    ("see --questions", ["--model", "a=tiny/model", "data.max_rows=20", "data.num_validation=4"]),
    ("/nowhere", ["--model", "a=/nowhere"])])
def test_a_mistake_is_one_line_and_no_traceback(said, words, tmp_path):
    result = ranks(1, run_script, "bench/estimators.py", "--data", str(tmp_path / "a"), *words)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "a").exists()
