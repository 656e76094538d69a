"""Weights that are sharded over the ranks: a run comes to the same as without sharding."""

import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    SILENT_LOG,
    SMALL,
    interrupted,
    learning_config,
    make_config,
    make_model,
    make_trajectories,
    outcome,
    relative_error,
    run_without_curves,
    start,
    training_steps,
    uninterrupted,
)
from processes import ranks
from safetensors.torch import load_file

import logger
import main
from machinery import runs
from machinery.errors import UserError
from machinery.model import add_adapters, make_masters
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
    ("gpt2", FLOAT64, LORA, 1e-9),
    ("qwen2", FLOAT32, CHECKPOINTING, 1e-5),
    ("qwen2", FLOAT32, MIXED, 0.03),
    ("qwen2", FLOAT32, {**MIXED, **LORA, **KL}, 0.03)]


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
    run = SimpleNamespace(config=config, model=model, log=SILENT_LOG)
    run.sampler = main.make_sampler(model, config)
    run.reference = main.Policy(main.make_reference(model, config), config)
    wrap = Sharded if shard else torch.nn.parallel.DistributedDataParallel
    run.policy = wrap(main.Policy(model, config))
    run.optimizer = torch.optim.AdamW(run.policy.parameters())
    return run


def after_four_steps(run):
    """Returns a tensor for each thing that the steps come to: the metrics, the weights, and each
    part of the optimizer state."""
    metrics = []
    for run.step in (1, 2, 3, 4):
        for update in main.learn(run, own_answers(run.step)):
            metrics += [update["loss"], update["entropy"], update["grad_norm"]]
            metrics.append(update.get("kl", 0.0))
        check_sampler(run)
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


def learn_both_ways():
    join()
    for architecture, dtype, settings, bound in VARIANTS:
        plain = run_with_model(False, architecture, dtype, settings)
        sharded = run_with_model(True, architecture, dtype, settings)
        check_parts(sharded.policy)
        expected, found = after_four_steps(plain), after_four_steps(sharded)
        assert found.keys() == expected.keys()
        for kind in expected:
            error = relative_error(found[kind], expected[kind])
            assert error < bound, (architecture, settings, kind, error)
    leave_group()
    end_process(0)


@pytest.mark.mathematics
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loss_gradient_weights_and_optimizer_state_are_those_without_sharding(num_ranks):
    result = ranks(num_ranks, learn_both_ways)

    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- runs

RUN = [*SMALL, "checkpoint.every=2", "validation.every=100"]
SHARD = "training.shard=true"


def questions_per_rank(num_ranks):
    """A step has six questions, however many ranks there are."""
    return f"training.num_samples_per_step={6 // num_ranks}"


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in checkpoint.glob("tensors-*"):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder of a run on two ranks that is sharded, and of one that is not."""
    folders = []
    for shard in ("true", "false"):
        folder = tmp_path_factory.mktemp("runs")
        uninterrupted(2, folder, *RUN, questions_per_rank(2), f"training.shard={shard}")
        folders.append(folder)
    return folders


def test_a_sharded_run_is_the_same_run(both):
    sharded, plain = [folder / "a" for folder in both]

    for step, expected in zip(training_steps(sharded), training_steps(plain), strict=True):
        assert step == pytest.approx(expected, rel=0.01, abs=1e-4)
    for path in ("checkpoints/step-000003/tensors-1.safetensors", "best/model.safetensors"):
        found, expected = load_file(sharded / path), load_file(plain / path)
        assert found.keys() == expected.keys() and len(found) > 20
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.allclose(found[name], tensor, atol=1e-3)


def restore_and_save(*arguments):
    """What a start has read, as the checkpoint of a step that is 100 later."""
    join()
    config = main.load_config(list(arguments))
    with main.RunFolder(config) as folder, logger.Logger(config, folder) as log:
        run = main.prepare(config, folder, log)
        log.start(run.step, run.task, run.model, 0, 0)
        folder.save(run.model, run.optimizer, step=run.step + 100, best=run.best,
                    last_evaluation=run.last_evaluation)
    leave_group()
    end_process(0)


def test_a_checkpoint_is_read_to_the_bit_by_any_number_of_ranks_sharded_or_not(both, tmp_path):
    shutil.copytree(both[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    folder = tmp_path / "a" / "checkpoints"
    expected = load_tensors(folder / "step-000003")

    for num_ranks, shard, newest in ((1, "false", 103), (3, "true", 203)):
        result = ranks(num_ranks, restore_and_save, *RUN, questions_per_rank(num_ranks),
                       f"training.shard={shard}", f"run.dir={tmp_path}")

        assert result.returncode == 0, result.stderr
        found = load_tensors(folder / f"step-{newest:06d}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_sharded_run_that_was_stopped_ends_as_the_uninterrupted_one(both, tmp_path):
    settings = [*RUN, questions_per_rank(2), SHARD]
    strike = {"rank": 0, "point": "sampling", "passing": 3, "how": "SIGTERM"}

    result = interrupted(2, strike, tmp_path, *settings)
    assert result.codes == [-signal.SIGTERM] * 2, result.stderr
    result = interrupted(2, {}, tmp_path, *settings)

    assert result.returncode == 0 and "step-000002\n" in result.stdout, result.stderr
    assert outcome(tmp_path / "a") == outcome(both[0] / "a")


def test_a_large_checkpoint_has_several_files_and_a_run_resumes_from_them(tmp_path, monkeypatch):
    assert start([*RUN, "checkpoint.every=1", f"run.dir={tmp_path / 'whole'}"]) == 0
    expected = load_tensors(tmp_path / "whole" / "a" / "checkpoints" / "step-000003")
    monkeypatch.setattr(runs, "BYTES_OF_A_FILE", 10**6)
    settings = [*RUN, "checkpoint.every=1", f"run.dir={tmp_path}"]
    folder = tmp_path / "a" / "checkpoints"

    assert start([*settings, "training.max_steps=2"]) == 0
    files = sorted((folder / "step-000002").glob("tensors-*"))
    assert len(files) > 9 and all(file.stat().st_size < 1.1e6 for file in files)
    assert start(settings) == 0

    found = load_tensors(folder / "step-000003")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(list((tmp_path / "a" / "best").glob("model-*.safetensors"))) > 3


# ---------------------------------------------------------------- when something goes wrong

def run_without_disk(*arguments):
    """Rank 0 has no disk left in the middle of a save, in which all ranks take part."""
    runs.BYTES_OF_A_FILE = 10**6
    save_file, calls = runs.save_file, []

    def save_two_files(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save_file(*arguments)

    runs.save_file = save_two_files
    run_without_curves(*arguments)


def test_a_full_disk_in_the_middle_of_a_save_is_one_line_and_no_rank_hangs(tmp_path):
    result = ranks(2, run_without_disk, *RUN, "training.max_steps=1", SHARD, f"run.dir={tmp_path}")

    assert 2 in result.codes and "cannot be written to" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.glob("a/checkpoints/step-*")] == ["step-000000"]


def test_a_model_that_cannot_be_cut_up_is_a_users_mistake(one_rank):
    of_two_types = make_model()
    of_two_types.model.norm.double()

    with pytest.raises(UserError, match="training.shard.*cannot be cut up.*several types"):
        Sharded(main.Policy(of_two_types, make_config(training__shard=True)))
    with pytest.raises(UserError, match="training.shard.*cannot be cut up.*no layers"):
        Sharded(torch.nn.Linear(2, 2))


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


@pytest.mark.parametrize("shard", ["false", "true"])
def test_ranks_with_different_weights_save_nothing_and_end_in_one_line(shard, tmp_path):
    result = ranks(2, run_with_another_weight, *SMALL, f"training.shard={shard}",
                   f"run.dir={tmp_path}")

    assert result.codes == [2, 2], result.stderr
    assert result.stderr.count("the ranks have different weights") == 1
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.glob("a/checkpoints/*")] == ["step-000000"]
