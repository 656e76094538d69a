"""What only shows on a GPU, as far as a CPU can show it: the switch that is set, the words that are
recognised, the order of what takes memory."""

import sys

import pytest
import torch
from conftest import SMALL, make_config, make_model, make_policy, make_trajectories, start
from processes import run

import main
from machinery import errors, metrics, model, ranks

GPU = torch.device("cuda", 0)


def test_on_a_gpu_attention_is_not_cudnns(monkeypatch):
    backends = []
    switches = []
    monkeypatch.setattr(ranks, "DEVICE", GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switches.append)
    monkeypatch.setattr(ranks.dist, "init_process_group",
                        lambda backend, **_: backends.append(backend))

    ranks.join()

    assert switches == [False]
    assert backends == ["cpu:gloo,cuda:nccl"]


@pytest.mark.parametrize("chosen, expected", [
    ({}, "None expandable_segments:True"),
    ({"PYTORCH_ALLOC_CONF": "a:b"}, "None a:b"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, "a:b None"),
], ids=str)
def test_memory_comes_in_segments_that_grow_unless_the_user_has_chosen(
        chosen, expected, monkeypatch):
    names = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    for name in names:
        monkeypatch.delenv(name, raising=False)

    code = f"import machinery, os; print(*[os.environ.get(name) for name in {names}])"
    result = run(sys.executable, "-c", code, **chosen)

    assert result.stdout.strip() == expected


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_a_model_is_read_straight_to_a_gpu_where_the_library_can(has_accelerate, monkeypatch):
    """Else each rank would first hold all of it in the computer's RAM."""
    load = model.AutoModelForCausalLM.from_pretrained
    places = []

    def load_here(*arguments, device_map, **named):
        places.append(device_map)
        return load(*arguments, device_map=None, **named)

    monkeypatch.setattr(model, "DEVICE", GPU)
    monkeypatch.setattr(model.AutoModelForCausalLM, "from_pretrained", load_here)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    monkeypatch.setattr(model.transformers.utils, "is_accelerate_available", lambda: has_accelerate)

    main.load_model(make_config())

    assert places == [{"": GPU} if has_accelerate else None]


def test_ddp_has_its_last_buckets_before_there_is_optimizer_state(one_rank):
    """DDP makes new buckets after its first pass. Beside weights, gradients and optimizer state
    they would take as much memory again as all gradients."""
    wrapped = make_policy(make_model(), make_config(), gradient_as_bucket_view=True).policy
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.0)
    states = []
    wrapped.register_forward_hook(lambda *_: states.append(len(optimizer.state)))

    def addresses_after_a_pass():
        wrapped(make_trajectories(4))[0].sum().backward()
        return [parameter.grad.data_ptr() for parameter in wrapped.parameters()]

    main.warm_up(wrapped, optimizer)

    assert states == [0, 0]
    assert len(optimizer.state) == len(list(wrapped.parameters()))
    before = [parameter.grad.data_ptr() for parameter in wrapped.parameters()]
    assert addresses_after_a_pass() == addresses_after_a_pass() == before


def test_a_parameter_that_takes_no_part_is_one_line_before_the_first_step(
        tmp_path, monkeypatch, capsys):
    load_model = main.load_model

    def load_with_a_tower(config):
        loaded, tokenizer = load_model(config)
        loaded.tower = torch.nn.Linear(3, 3)
        return loaded, tokenizer

    monkeypatch.setattr(main, "load_model", load_with_a_tower)

    assert start([*SMALL, f"run.dir={tmp_path}"]) == 2

    said = capsys.readouterr().err
    assert "error: Qwen2ForCausalLM cannot be trained here" in said and "Traceback" not in said


NCCL = "NCCL error in: NCCLUtils.cpp:77, "
SHM = NCCL + "unhandled system error: Error while creating shared memory segment /dev/shm/nccl-Ly7"


@pytest.mark.parametrize("error, expected", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_SUBLIBRARY_ALLOCATION_FAILED"), True),
    (torch.distributed.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"), True),
    (torch.distributed.DistBackendError(SHM), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
], ids=lambda value: str(value)[:40])
def test_running_out_of_memory_is_known_by_its_many_names(error, expected):
    assert errors.is_out_of_memory(error) == expected


@pytest.mark.parametrize("module, name", [(main, "policy_gradient"), (main.Policy, "forward")])
def test_a_failure_of_nccl_says_how_to_find_out_more(module, name, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise torch.distributed.DistBackendError(SHM)

    monkeypatch.setattr(ranks, "SECONDS_FOR_THE_CAUSE", 0)
    monkeypatch.setattr(module, name, fail)

    assert start([*SMALL, f"run.dir={tmp_path}"]) == 1

    said = capsys.readouterr().err
    assert "/dev/shm" in said  # as nccl says
    assert "NCCL_DEBUG=INFO" in said and "--shm-size" in said
    assert "Traceback" not in said and not said.startswith("error: ")


def test_memory_is_told_as_tensors_hold_it(monkeypatch, one_rank):
    monkeypatch.setattr(metrics, "DEVICE", GPU)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)

    assert metrics.memory_metrics() == {"memory_gb": 3.0}
