"""What bench/variants.py changes, and that it changes nothing else."""

import sys

import pytest
import torch
from conftest import (
    gradient,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    plain_loss,
    relative_error,
)
from processes import ROOT

import main

sys.path.append(str(ROOT / "bench"))
import variants


@pytest.fixture
def changed(monkeypatch):
    for name in (*variants.plain, "refresh_sampler"):
        monkeypatch.setattr(main, name, getattr(main, name))  # to be put back
    return lambda name: variants.VARIANTS[name]()


@pytest.mark.parametrize("name, sign", [("rewarded", 1), ("punished", -1)])
def test_only_one_sign_of_advantages_is_left(name, sign, changed):
    plain, own = make_trajectories(8), make_trajectories(8)
    for i, (one, other) in enumerate(zip(plain, own)):
        one.reward = other.reward = i % 3
    training = make_config().training
    main.compute_advantages(plain, training, None)
    changed(name)
    assert len(main.compute_advantages(own, training, None)) == 8  # all of them count in the loss
    assert [each.advantage for each in own] == [
        each.advantage if each.advantage * sign > 0 else 0 for each in plain]
    assert 0 < sum(each.advantage != 0 for each in own) < 8


def test_four_bits_are_fifteen_values_a_row_and_none_is_far_from_its_own():
    weights = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    coarse = variants.four_bits(weights)
    assert all(len(row.unique()) <= 15 for row in coarse)
    step = weights.abs().amax(1, keepdim=True) / 7
    assert ((coarse - weights).abs() <= 0.5001 * step).all()
    assert torch.equal(variants.four_bits(torch.zeros(3)), torch.zeros(3))


def test_the_sampler_is_eight_updates_behind_and_the_evaluated_model_is_not(changed, monkeypatch):
    model = make_model()
    model.generation_config.temperature = 0.3
    monkeypatch.setitem(variants.plain, "evaluate",
                        lambda run: [each.clone() for each in run.sampler.parameters()])
    changed("behind")
    sampler = main.make_sampler(model, make_config())
    assert sampler.generation_config.temperature != 0.3  # never the model's own
    run = type("Run", (), {"model": model, "sampler": sampler})
    first = next(model.parameters()).detach().clone()
    for update in range(1, 20):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        main.refresh_sampler(sampler, model)
        behind = next(sampler.parameters()) - first
        assert torch.allclose(behind, torch.full_like(behind, max(0, update - 8)), atol=1e-4)
        assert torch.equal(main.evaluate(run)[0], next(model.parameters()))
        assert torch.allclose(next(sampler.parameters()) - first, behind)


@pytest.mark.mathematics
def test_weights_make_up_for_what_answers_were_drawn_with(changed, one_rank):
    """Against plain loops, in which rho is pi over the probability that the sampler gave it."""
    config = make_config(training__max_new_gen_tokens=12, training__max_grad_norm=None)
    model, sampler = make_model(dtype=torch.float64), make_model(dtype=torch.float64, spread=0.12)
    answers = make_trajectories(6)
    T = config.sampling.temperature
    drawn_with = [[each.item() for each in own] for own in plain_logprobs(sampler, answers, T)]
    plain_loss(model, answers, B=6, L=12, temperature=T, old=drawn_with).backward()
    expected = gradient(model).clone()

    changed("behind-weighted")
    run = make_policy(model, config)
    run.model, run.sampler = model, sampler
    run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.0)
    run.step = 1
    main.learn(run, answers)
    assert relative_error(gradient(model), expected) < 1e-9
