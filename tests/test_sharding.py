"""Weights that are sharded over the ranks: a run comes to the same as without sharding."""

import math
from pathlib import Path

import pytest
import torch
from conftest import (
    DISTILL,
    SMALL,
    learning_config,
    made_up_run,
    make_model,
    make_trajectories,
    relative_error,
    run_folder,
    run_without_curves,
)
from processes import ranks
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import main
from machinery import runs
from machinery.model import add_adapters, make_masters, make_reference, make_sampler, warm_up
from machinery.passes import measure_in_batches
from machinery.ranks import RANK, WORLD_SIZE, end_process, join, leave_group
from machinery.sharding import Sharded, unsharded

# ---------------------------------------------------------------- steps

CHECKPOINTING = {"model__gradient_checkpointing": True}
MIXED = {"model__precision": "mixed", **CHECKPOINTING}
LORA = {"model__lora_rank": 4}
KL = {"training__kl_beta": 0.1, "training__kl_in": "loss", "training__updates_per_batch": 2}
FLOAT64, FLOAT32 = torch.float64, torch.float32
# Each with a bound of its rounding errors. In bfloat16 a last bit is 0.4 %.
VARIANTS = [  # In gpt2 the embeddings are the output layer, too.
    ("gpt2", FLOAT64, KL, 1e-9),
    ("qwen2", FLOAT32, CHECKPOINTING, 1e-5),
    ("qwen2", FLOAT32, MIXED, 0.03),
    ("qwen2", FLOAT32, {**MIXED, **LORA, **KL}, 0.03),
    ("qwen2", FLOAT32, {**CHECKPOINTING, **DISTILL}, 1e-5)]


def own_answers(step):
    """In step 2 rank 0 has nothing to learn from, and in step 3 no rank has. In step 4 ranks have
    different numbers of answers to learn from."""
    answers = make_trajectories(6, seed=10 * step + RANK)
    for i, answer in enumerate(answers):
        if (step == 2 and RANK == 0) or step == 3 or (step == 4 and i > RANK):
            answer.advantage = 0.0
    return answers


def run_with_model(shard, architecture, dtype, settings):
    """What `learn` uses of a run, made as `prepare` makes it."""
    config = learning_config(
        training__shard=shard, training__tokens_per_micro_batch=60, training__max_grad_norm=0.1,
        training__learning_rate=0.001, **settings)
    model = make_model(architecture, dtype)
    if config.model.lora_rank:
        add_adapters(model, config)
    make_masters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    run = made_up_run(config=config, model=model)
    run.sampler = make_sampler(model, config)
    run.reference = main.Policy(make_reference(model, config), config)
    wrap = Sharded if shard else torch.nn.parallel.DistributedDataParallel
    run.policy = wrap(main.Policy(model, config))
    run.optimizer = torch.optim.AdamW(run.policy.parameters())
    return run


def after_four_steps(run):
    """Returns what the steps come to, as tensors: metrics, weights, and the optimizer's state."""
    metrics = []
    for run.step in (1, 2, 3, 4):
        answers = own_answers(run.step)
        if run.config.training.has_reference:  # It has something to say of every answer.
            answers = [answer for answer in answers if answer.advantage]
        for update in main.learn(run, answers):
            metrics += [update["loss"], update["entropy"], update["grad_norm"]]
            metrics.append(update.get("kl", 0.0))
        check_sampler(run)
        # As `step_metrics` does. No backward pass follows it.
        list(measure_in_batches(run.policy.module, answers, run.config.training))
    kinds = {"metrics": [torch.tensor(metrics, dtype=FLOAT64).nan_to_num()]}
    for name, tensor in runs.state_tensors(run.model, run.optimizer, run.step).items():
        _, _, kind = name.partition("/")
        kinds.setdefault(kind or "weights", []).append(unsharded(tensor).flatten())
    return {kind: torch.cat(tensors) for kind, tensors in kinds.items()}


def check_sampler(run):
    """After each step every rank has to sample from the new weights."""
    for copied, parameter in zip(run.sampler.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(copied, unsharded(parameter, copied.dtype).to(copied.dtype))


def check_parts(policy):
    """A rank keeps no more than its part of each weight that learns."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            largest = math.ceil(len(parameter) / WORLD_SIZE)
            assert len(parameter.to_local()) <= largest


class Collectives(TorchDispatchMode):
    """Notes the names of the collectives that are called within it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        if DTensor in types:
            return NotImplemented  # Its collectives come here afterwards.
        if "c10d" in operation.name():
            self.names.add(operation.name())
        return operation(*arguments, **(named or {}))


def learn_both_ways():
    join()
    for architecture, dtype, settings, bound in VARIANTS:
        plain = run_with_model(False, architecture, dtype, settings)
        sharded = run_with_model(True, architecture, dtype, settings)
        check_parts(sharded.policy)
        expected = after_four_steps(plain)
        with Collectives() as collectives:
            found = after_four_steps(sharded)
        # gloo could free this one's name twice: see `unsharded`.
        assert "_c10d_functional::all_gather_into_tensor" not in collectives.names
        assert "c10d::_allgather_base_" in collectives.names  # It did note collectives.
        assert found.keys() == expected.keys()
        for kind in expected:
            error = relative_error(found[kind], expected[kind])
            assert error < bound, (architecture, settings, kind, error)
    leave_group()
    end_process(0)


@pytest.mark.mathematics
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_loss_gradient_weights_and_optimizer_state_are_those_without_sharding(num_ranks):
    result = ranks(num_ranks, learn_both_ways)

    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- checkpoints

def learn_and_save(folder: str, shard: bool, steps: list[int]):
    """Restores the run in the folder, if there is one, learns these steps, and saves the result as
    a step that is 10 later. As with a large model, a checkpoint needs several files."""
    runs.BYTES_OF_A_FILE = 20_000
    join()
    run = run_with_model(shard, "qwen2", FLOAT32, {
        "run__dir": folder, "run__name": "a", "training__num_samples_per_step": 6 // WORLD_SIZE})
    warm_up(run.policy, run.optimizer)
    with run_folder(run.config) as folder_of_run:
        restored = folder_of_run.restore(run.model, run.optimizer)
        for run.step in steps:
            main.learn(run, own_answers(run.step))
        folder_of_run.save(run.model, run.optimizer, **{**restored, "step": restored["step"] + 10})
    leave_group()
    end_process(0)


def saved_by(num_ranks: int, folder: Path, shard: bool, steps: list[int]) -> dict:
    """The tensors of the checkpoint that so many ranks save."""
    result = ranks(num_ranks, learn_and_save, str(folder), shard, steps)
    assert result.returncode == 0, result.stderr
    files = list(runs.newest_checkpoint(folder / "a").glob("tensors-*"))
    assert len(files) > 3
    tensors = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def assert_same_bits(found: dict, expected: dict):
    assert found.keys() == expected.keys() and len(found) > 20
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_sharded_checkpoint_resumes_to_the_bit_and_any_number_of_ranks_reads_it_sharded_or_not(
        tmp_path):
    at_once = saved_by(2, tmp_path / "at once", True, [1, 2, 4])
    saved_by(2, tmp_path / "in parts", True, [1, 2])

    resumed = saved_by(2, tmp_path / "in parts", True, [4])

    assert_same_bits(resumed, at_once)
    for num_ranks, shard in ((1, False), (3, True)):
        assert_same_bits(saved_by(num_ranks, tmp_path / "in parts", shard, []), resumed)


# ---------------------------------------------------------------- when something goes wrong

def run_with_another_weight(*arguments):
    """After its first step, rank 1 has another last bit in one of the weights it samples with."""
    learn = main.learn

    def learn_and_change(run, answers):
        updates = learn(run, answers)
        if RANK == 1:
            weights = next(run.sampler.parameters()).data.flatten()
            weights[7] = torch.nextafter(weights[7], torch.tensor(9.0))
        return updates

    main.learn = learn_and_change
    run_without_curves(*arguments)


def test_ranks_with_different_weights_save_nothing_and_end_in_one_line(tmp_path):
    result = ranks(2, run_with_another_weight, *SMALL, f"run.dir={tmp_path}")

    assert result.codes == [2, 2], result.stderr
    assert result.stderr.count("the ranks have different weights") == 1
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.glob("a/checkpoints/*")] == ["step-000000"]
