"""Weights spread over the ranks: whatever a run comes to, it comes to without sharding, too."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import read_jsonl, relative_error, run_main, start
from processes import ranks
from safetensors.torch import load_file
from test_dead_ranks import STEPS, run_and_die
from test_resume import interrupted, outcome, uninterrupted

import logger
import main
from machinery import checkpoints, sharding
from machinery.launch import end_process
from machinery.ranks import RANK, WORLD_SIZE, join, leave_group

SMALL = ["training.max_new_gen_tokens=48", "training.num_samples_per_step=3",
         "training.k_best_of_n=[4,4]", "data.num_validation=6", "data.max_rows=200",
         "validation.best_of_n=2", "validation.every=100", "training.max_steps=3",
         "training.warmup_steps=0", "run.name=a"]
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


def run_and_keep_all(*arguments):
    checkpoints.KEPT_CHECKPOINTS = 9
    run_main(*arguments)


def run_with_odd_rewards(*arguments):
    """One rank has no signal in the first step, and in the second none has; in the third ranks have
    different numbers of answers to learn from."""
    score = main.score

    def odd_rewards(run, groups):
        score(run, groups)
        step = odd_rewards.calls = getattr(odd_rewards, "calls", 0) + 1
        for i, answer in enumerate(answer for group in groups for answer in group):
            flat = step == 3 or step == 2 and RANK == 0 or step == 4 and i >= 4 * (RANK + 1)
            answer.reward = 0.1 if flat else float(i % 3) if step != 1 else answer.reward

    main.score = odd_rewards
    run_and_keep_all(*arguments)


def steps_and_tensors(folder: Path) -> tuple[list[dict], list[dict]]:
    """What each step was like, and what it left."""
    steps = [entry for entry in read_jsonl(folder / "a" / "metrics.jsonl") if "loss" in entry]
    return steps, [load_tensors(folder / "a" / "checkpoints" / f"step-{step:06d}")
                   for step in (1, 2, 3)]


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = json.loads((checkpoint / "state.json").read_text())["files"]
    return {name: tensor for file in files for name, tensor in load_file(checkpoint / file).items()}


def compare(num_ranks, folder, settings, work=run_and_keep_all) -> dict[str, float]:
    """The largest relative errors of a sharded run from one that is not."""
    outcomes = {}
    for sharded in (False, True):
        result = ranks(num_ranks, work, *SMALL, *settings, f"training.shard={str(sharded).lower()}",
                       f"run.dir={folder / str(sharded)}")
        assert result.returncode == 0, result.stderr
        outcomes[sharded] = steps_and_tensors(folder / str(sharded))
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


@pytest.mark.parametrize("keys", [
    [], pytest.param([MIXED], marks=pytest.mark.soak),
    pytest.param(["model.lora_rank=4", "model.lora_targets=[embed_tokens,q_proj]"],
                 marks=pytest.mark.soak)], ids=str)
def test_of_a_model_whose_embeddings_are_not_its_projection(keys, tmp_path, model_folder):
    """They are gathered for the forward pass alone, unless adapters need them in the other, too."""
    settings = [MANY, f"model.name={model_folder('llama')}", "model.gradient_checkpointing=true"]
    errors = compare(2, tmp_path, [*settings, *keys], run_with_odd_rewards)
    assert max(errors.values()) < WITHIN, errors


def run_and_look_at_the_sampler(folder, *arguments):
    """Leaves behind after how many updates each rank's sampler had the new weights."""
    learn, fresh = main.learn, 0

    def learn_and_look(run, answers):
        nonlocal fresh
        before = [copied.clone() for copied in run.sampler.parameters()]
        updates = learn(run, answers)
        pairs = list(zip(run.sampler.parameters(), run.model.parameters(), strict=True))
        stale = [copied for copied, own in pairs
                 if not torch.equal(copied, sharding.unsharded(own, copied.dtype).to(copied.dtype))]
        changed = [copied for (copied, _), old in zip(pairs, before)
                   if not torch.equal(copied, old)]
        fresh += not stale and len(changed) > 0
        (folder / f"fresh-{RANK}-of-{WORLD_SIZE}").write_text(str(fresh))
        return updates

    main.learn = learn_and_look
    run_main(*arguments)


@pytest.mark.parametrize("keys", [[], [MIXED], ["model.lora_rank=4"]], ids=str)
def test_after_each_update_every_rank_samples_from_the_new_weights(keys, tmp_path):
    result = ranks(2, run_and_look_at_the_sampler, tmp_path, *SMALL, *keys, "training.shard=true",
                   "training.max_new_gen_tokens=96", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "loss" in entry]
    made = str(sum(entry["updated"] for entry in steps))
    assert made != "0" and [(tmp_path / f"fresh-{rank}-of-2").read_text()
                            for rank in (0, 1)] == [made] * 2


# ---------------------------------------------------------------- its folder

def restore_and_save(*arguments):
    """What a start has read, under another step's name."""
    checkpoints.KEPT_CHECKPOINTS = 9
    join()
    config = main.load_config(list(arguments))
    with main.RunFolder(config) as folder, logger.Logger(config, folder) as log:
        run = main.prepare(config, folder, log)
        log.start(run)
        run.step += 100
        folder.save(run)
    leave_group()
    end_process(0)


def test_a_checkpoint_is_the_same_for_any_number_of_ranks_sharded_or_not(tmp_path):
    """Weights and moments go from each layout to the next, and no bit changes."""
    def keys(num_ranks, sharded):  # with as many questions a step, however many ranks there are
        return [*SMALL, MANY, f"run.dir={tmp_path}", f"training.shard={sharded}",
                f"training.num_samples_per_step={12 // num_ranks}"]

    assert ranks(2, run_main, *keys(2, "true")).returncode == 0
    step, folder = 3, tmp_path / "a" / "checkpoints"
    expected = load_tensors(folder / "step-000003")
    assert len(expected) > 100 and all(each.any() for name, each in expected.items()
                                       if name.endswith("exp_avg"))
    for num_ranks, sharded in ((4, "true"), (3, "false"), (1, "true"), (2, "false"), (3, "true")):
        result = ranks(num_ranks, restore_and_save, *keys(num_ranks, sharded))
        assert result.returncode == 0 and f"step-{step:06d}\n" in result.stdout, result.stderr
        step += 100
        found = load_tensors(folder / f"step-{step:06d}")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_large_checkpoint_has_several_files_and_one_that_is_damaged_is_not_read(
        tmp_path, monkeypatch, capsys):
    whole = [*SMALL, f"run.dir={tmp_path / 'whole'}", "training.max_steps=3"]
    assert start(whole) == 0
    monkeypatch.setattr(checkpoints, "BYTES_OF_A_FILE", 10**6)
    keys = [*SMALL, f"run.dir={tmp_path}"]
    assert start([*keys, "training.max_steps=2"]) == 0
    newest = tmp_path / "a" / "checkpoints" / "step-000002"
    files = json.loads((newest / "state.json").read_text())["files"]
    assert len(files) > 9 and set(files) == {
        f"tensors-{i + 1}.safetensors" for i in range(len(files))}
    assert sorted(path.name for path in newest.iterdir()) == sorted([*files, "state.json"])
    assert all((newest / file).stat().st_size < 1.1e6 for file in files)
    assert len(list((tmp_path / "a" / "best").glob("model-*.safetensors"))) > 3
    (newest / files[4]).write_bytes((newest / files[4]).read_bytes()[:-1])
    assert start([*keys, "training.max_steps=3"]) == 0
    assert "step-000002 is damaged and is set aside" in capsys.readouterr().out
    found, expected = (load_tensors(path / "a" / "checkpoints" / "step-000003")
                       for path in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---------------------------------------------------------------- when something goes wrong

def test_a_sharded_run_that_was_stopped_ends_as_the_uninterrupted_one(tmp_path):
    steps = ["training.shard=true", "validation.every=2", "training.max_steps=3",
             "checkpoint.every=2"]
    expected = uninterrupted(3, tmp_path / "whole", *steps)
    folder = tmp_path / "stopped"
    strike = {"rank": 0, "point": "sampling", "passing": 3, "how": "SIGTERM"}
    result = interrupted(3, strike, folder, *steps)
    assert result.codes == [-signal.SIGTERM] * 3, result.stderr
    result = interrupted(3, {}, folder, *steps)
    assert result.returncode == 0 and "step-000002\n" in result.stdout, result.stderr
    assert outcome(folder / "a") == expected


@pytest.mark.parametrize(("place", "dead"), [("learning", 2), ("saving", 0), ("sampling", 1)])
def test_a_rank_that_dies_takes_the_others_along(place, dead, tmp_path):
    result = ranks(3, run_and_die, place, dead, False, tmp_path,
                   [*SMALL, *STEPS, "training.shard=true", f"run.dir={tmp_path}"])
    assert time.time() - float((tmp_path / "died").read_text()) < 10
    assert all(result.codes) and result.codes[dead] == -signal.SIGKILL
    assert "Traceback" not in result.stderr


def run_without(what, *arguments):
    """One rank has no memory left in a backward pass, or no disk in the middle of a save."""
    def raises(error, rank, original, call):
        calls = []

        def replacement(*arguments, **named):
            calls.append(0)
            if RANK == rank and len(calls) == call:
                raise error
            return original(*arguments, **named)
        return replacement

    checkpoints.BYTES_OF_A_FILE = 10**6
    if what == "memory":
        main.policy_loss = raises(torch.OutOfMemoryError("CUDA out of memory. Tried"), 1,
                                  main.policy_loss, 2)
    else:
        checkpoints.save_file = raises(OSError(28, "No space left on device"), 0,
                                       checkpoints.save_file, 3)
    run_main(*arguments)


@pytest.mark.parametrize(("what", "says"), [
    ("memory", "out of memory in phase learn"), ("disk", "cannot be written to")])
def test_a_rank_without_memory_or_disk_is_one_line_and_no_rank_hangs(what, says, tmp_path):
    result = ranks(2, run_without, what, *SMALL, MANY, "training.shard=true",
                   f"run.dir={tmp_path}")
    assert set(result.codes) <= {1, 2, -signal.SIGTERM} and 2 in result.codes, result.codes
    assert says in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert not list((tmp_path / "a").glob("checkpoints/*"))


def test_a_model_that_cannot_be_cut_up_and_a_wrong_value_are_one_line(
        tmp_path, monkeypatch, capsys):
    assert start([*SMALL, f"run.dir={tmp_path}", "training.shard=4"]) == 2
    assert "error: training.shard=4: Input should be a valid boolean" in capsys.readouterr().err
    load_model = main.load_model

    def with_a_scalar(config):
        model, tokenizer = load_model(config)
        model.register_parameter("scale", torch.nn.Parameter(torch.ones(())))
        return model, tokenizer

    monkeypatch.setattr(main, "load_model", with_a_scalar)
    assert start([*SMALL, f"run.dir={tmp_path}", "training.shard=true"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: training.shard: this model cannot be cut up (")

    def of_two_types(config):
        model, tokenizer = load_model(config)
        model.model.norm.float()
        return model, tokenizer

    monkeypatch.setattr(main, "load_model", of_two_types)
    keys = [*SMALL, f"run.dir={tmp_path}", "training.shard=true", "model.precision=bfloat16"]
    assert start(keys) == 2
    assert ("cut up (ValueError: it holds several types; model.precision=mixed has but one)"
            in capsys.readouterr().err)
    monkeypatch.setattr(main, "load_model", load_model)
    monkeypatch.setattr(sharding, "GradientCheckpointingLayer", type("OfNoModel", (), {}))
    assert start([*SMALL, f"run.dir={tmp_path}", "training.shard=true"]) == 2
    assert ("error: training.shard: this model cannot be cut up (ValueError: it has no layers)"
            in capsys.readouterr().err)


def test_where_there_is_nothing_to_spread_or_only_adapters_one_line_says_so(tmp_path, capsys):
    keys = [*SMALL, f"run.dir={tmp_path}", "training.shard=true", "training.max_steps=0"]
    assert start(keys) == 0
    nothing = "\ntraining.shard saves no memory on one rank alone\n"
    assert nothing in capsys.readouterr().out
    result = ranks(2, run_main, *keys, "run.name=b", "model.lora_rank=4")
    assert result.returncode == 0 and nothing not in result.stdout
    assert ("training.shard splits only the weights that are trained. With model.lora_rank (4) "
            "these are the adapters, and each GPU holds all other weights in full"
            ) in " ".join(result.stdout.split())
