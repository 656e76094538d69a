"""bench/variants.py changes what it says."""

import pytest
import variants
from conftest import make_config, make_trajectories

import main


@pytest.mark.parametrize(("name", "sign"), [("rewarded", 1), ("punished", -1)])
def test_only_advantages_of_one_sign_count(name, sign, monkeypatch):
    monkeypatch.setattr(main, "compute_advantages", main.compute_advantages)  # It is put back.
    training = make_config().training
    plain, changed = make_trajectories(8), make_trajectories(8)
    for i in range(8):
        plain[i].reward = changed[i].reward = i % 3
    main.compute_advantages(plain, training)

    variants.VARIANTS[name]()
    answers = main.compute_advantages(changed, training)

    assert answers == changed  # All of them count in the normalizer.
    for before, after in zip(plain, changed):
        assert after.advantage == (before.advantage if before.advantage * sign > 0 else 0)
    assert 0 < sum(answer.advantage != 0 for answer in changed) < 8
