"""Which device a rank gets, and what is said where that isn't the one that was meant. The GPUs here
are made up: torch is told that it sees them while machinery/ranks.py is imported."""

import sys

import pytest
import torch
from conftest import make_config
from processes import ranks, run

from machinery import ranks as ranks_of_machinery
from machinery import settings
from machinery.errors import UserError

# What each of these ranks gets: (ranks of the machine, rank, GPUs, device).
CASES = [(1, 0, 0, "cpu"), (1, 0, 1, "cuda:0"), (2, 0, 1, "cpu"), (4, 3, 8, "cuda:3"),
         (8, 0, 4, "cpu")]
IMPORTS = """
import os, sys, torch
torch.cuda.is_available = lambda: True
for num_ranks, rank, num_gpus in eval(sys.argv[1]):
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    torch.cuda.device_count = lambda: num_gpus
    sys.modules.pop("machinery.ranks", None)
    from machinery.ranks import DEVICE
    print(DEVICE)
"""


def test_each_rank_has_a_gpu_of_its_own_or_none_has_one():
    result = run(sys.executable, "-c", IMPORTS, [case[:3] for case in CASES])

    assert result.stdout.split() == [device for *_, device in CASES], result.stderr


@pytest.fixture
def on_a_cpu(monkeypatch):
    """As where there are fewer GPUs than ranks, whatever this computer has."""
    monkeypatch.setattr(settings, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(ranks_of_machinery, "NUM_GPUS", 0)


@pytest.mark.parametrize(("num_gpus", "says"), [
    (4, "8 processes, but 4 GPUs; to use GPUs, start at most 4 on this machine"),
    (0, "8 processes, but no GPUs; to train on the CPU anyway, add model.device=null")])
def test_a_recipe_for_gpus_is_never_trained_on_a_cpu(num_gpus, says, on_a_cpu, monkeypatch):
    recipe = ["--config", "recipes/qwen2.5-3b-grpo.yaml", "training.seed=1"]
    monkeypatch.setattr(settings, "LOCAL_WORLD_SIZE", 8)
    monkeypatch.setattr(settings, "NUM_GPUS", num_gpus)

    with pytest.raises(UserError) as raised:
        settings.load_config(recipe)

    assert str(raised.value).startswith(f"model.device=cuda: {says}")
    assert settings.load_config([*recipe, "model.device=null"]).model.device is None
    monkeypatch.setattr(settings, "DEVICE", torch.device("cuda", 0))
    assert settings.load_config(recipe).model.device == "cuda"


def test_the_device_is_no_part_of_the_experiment():
    assert "model.device" not in settings.experiment(make_config())


# ---------------------------------------------------------------- GPUs that cannot be used

@pytest.fixture
def with_driver(on_a_cpu, monkeypatch, tmp_path):
    """A machine that has the file of an NVIDIA GPU, which torch does not see."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(ranks_of_machinery, "DRIVER_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("cuda", "says"), [
    ("13.0", "update its driver, because CUDA 13.0 needs a newer one"),
    (None, "install a PyTorch build for CUDA (")])
def test_a_gpu_that_torch_cannot_use_is_refused_unless_it_is_hidden(
        cuda, says, with_driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)

    with pytest.raises(UserError, match="cannot use this machine's GPU") as raised:
        ranks_of_machinery.join()

    assert says in str(raised.value) and "set CUDA_VISIBLE_DEVICES=" in str(raised.value)
    for hidden in ("", "-1", "NoDevFiles", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        ranks_of_machinery.refuse_unusable_gpu()


# ---------------------------------------------------------------- machines of two kinds

def meet_with_a_gpu_on_rank_1():
    torch.cuda.set_device = print
    ranks_of_machinery.DEVICE = torch.device("cuda" if ranks_of_machinery.RANK == 1 else "cpu")
    ranks_of_machinery.launch(print)


def test_ranks_on_gpus_and_ranks_on_a_cpu_do_not_train_together():
    result = ranks(2, meet_with_a_gpu_on_rank_1)

    assert result.returncode == 2
    assert "error: ranks [0] train on a CPU, and the others train on GPUs: " in result.stderr
