"""Weights spread over the ranks: whatever a run comes to, it comes to without sharding, too."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import read_jsonl, relative_error, run_main
from processes import ranks
from safetensors.torch import load_file

import main
from machinery.ranks import RANK

SMALL = ["training.max_new_gen_tokens=48", "training.num_samples_per_step=3",
         "training.k_best_of_n=[4,4]", "data.num_validation=6", "data.max_rows=200",
         "validation.best_of_n=2", "validation.every=100", "training.max_steps=3",
         "training.warmup_steps=0", "checkpoint.keep=9", "run.name=a"]
MIXED, MANY = "model.precision=mixed", "training.tokens_per_micro_batch=400"
KL = ["training.kl_beta=0.1", "training.kl_in=loss"]
WITHIN = 1e-4  # rounding, with an order of magnitude to spare
VARIANTS = {
    "default": [MANY],
    "checkpointing": [MANY, "model.gradient_checkpointing=true"],
    "mixed": [MANY, MIXED, "model.gradient_checkpointing=true"],
    "kl": [MANY, *KL, "training.updates_per_batch=2"],
    "lora": [MANY, "model.lora_rank=4", "training.learning_rate=0.001"],
    "lora-mixed-kl": [MANY, MIXED, *KL, "model.lora_rank=4", "model.gradient_checkpointing=true"],
    "two-updates": [MANY, "training.updates_per_batch=2", "training.clip=[0.2,0.3]"],
    "refill": [MANY, "training.refill=1", "training.loss_normalizer=tokens"],
    "sil": [MANY, "training.learning_type=sil", "training.k_best_of_n=[1,4]"],
}


def run_with_odd_rewards(*arguments):
    """One rank has no signal in the first step, and in the second none has; in the third ranks have
    different numbers of answers to learn from."""
    score = main.score

    def odd_rewards(answers, task, bar):
        score(answers, task, bar)
        step = odd_rewards.calls = getattr(odd_rewards, "calls", 0) + 1
        for i, answer in enumerate(answers):
            flat = step == 3 or step == 2 and RANK == 0 or step == 4 and i >= 4 * (RANK + 1)
            answer.reward = 0.1 if flat else float(i % 3) if step != 1 else answer.reward

    main.score = odd_rewards
    run_main(*arguments)


def outcome(folder: Path) -> tuple[list[dict], list[dict]]:
    """What each step was like, and what it left."""
    steps = [entry for entry in read_jsonl(folder / "a" / "metrics.jsonl") if "loss" in entry]
    return steps, [load_tensors(folder / "a" / "checkpoints" / f"step-{step:06d}")
                   for step in (1, 2, 3)]


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = json.loads((checkpoint / "state.json").read_text())["files"]
    return {name: tensor for file in files for name, tensor in load_file(checkpoint / file).items()}


def compare(num_ranks, folder, settings, work=run_main) -> dict[str, float]:
    """The largest relative errors of a sharded run from one that is not."""
    outcomes = {}
    for sharded in (False, True):
        result = ranks(num_ranks, work, *SMALL, *settings, f"training.shard={str(sharded).lower()}",
                       f"run.dir={folder / str(sharded)}")
        assert result.returncode == 0, result.stderr
        outcomes[sharded] = outcome(folder / str(sharded))
    (steps, tensors), (own_steps, own_tensors) = outcomes[False], outcomes[True]
    worst = {}

    def note(kind, error):
        worst[kind] = max(worst.get(kind, 0.0), error)

    for one, other in zip(steps, own_steps, strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy"):
            if one.get(name):
                note(name, abs(other[name] / one[name] - 1))
        for name in ("reward", "solved", "completion_length", "learned", "updated"):
            assert one[name] == other[name]
    for one, other in zip(tensors, own_tensors, strict=True):
        assert ({name: tensor.dtype for name, tensor in one.items()}
                == {name: tensor.dtype for name, tensor in other.items()})
        for kind in ("", "/exp_avg", "/exp_avg_sq", "/step"):
            own, others = (torch.cat([tensor.flatten() for name, tensor in each.items()
                                      if name.partition("/")[2] == kind[1:]])
                           for each in (one, other))
            note(kind or "weights", relative_error(others, own))
    equal = sum(torch.equal(other[name], one[name]) for one, other in zip(tensors, own_tensors)
                for name in one) / sum(map(len, tensors))
    if "SHOW" in os.environ:
        print(num_ranks, settings, {name: f"{error:.1e}" for name, error in worst.items()},
              f"equal {equal:.2f}")
    return worst


ALL = [pytest.param(num_ranks, variant, marks=() if (num_ranks, variant) in {
    (2, "default"), (3, "kl"), (2, "lora-mixed-kl"), (1, "mixed")} else pytest.mark.soak)
    for num_ranks in (1, 2, 3, 4) for variant in VARIANTS]


@pytest.mark.parametrize(("num_ranks", "variant"), ALL)
def test_a_sharded_run_is_the_same_run(num_ranks, variant, tmp_path):
    errors = compare(num_ranks, tmp_path, VARIANTS[variant])
    assert max(errors.values()) < WITHIN, errors


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.soak), 2,
                                       pytest.param(3, marks=pytest.mark.soak),
                                       pytest.param(4, marks=pytest.mark.soak)])
def test_with_ranks_that_have_less_to_learn_or_nothing(num_ranks, tmp_path):
    errors = compare(num_ranks, tmp_path, [MANY, "training.updates_per_batch=2"],
                     run_with_odd_rewards)
    assert max(errors.values()) < WITHIN, errors
