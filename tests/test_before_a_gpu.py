"""What only shows on a GPU, as far as a CPU can show it: the switch that is set, the words that are
recognised, the order of what takes memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import make_config, make_model, make_policy, make_trajectories, start
from processes import ROOT
from test_logger import make_logger
from test_resume import SMALL

import main
from machinery import errors, launch, metrics, model, ranks
from machinery.batches import DUMMY_ANSWER

TINY = [*SMALL, "training.max_new_gen_tokens=16", "training.max_steps=1"]


# ---------------------------------------------------------------- how it is set up

def test_on_a_gpu_attention_is_not_cudnns(monkeypatch):
    monkeypatch.setattr(ranks, "DEVICE", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    chosen = {}
    monkeypatch.setattr(ranks.dist, "init_process_group",
                        lambda backend, **_: chosen.update(backend=backend))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert before and torch.backends.cuda.mem_efficient_sdp_enabled()
    try:
        ranks.join()
        assert chosen == {"backend": "cpu:gloo,cuda:nccl"}
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("chosen", "expected"), [
    ({}, [None, "expandable_segments:True"]),
    ({"PYTORCH_ALLOC_CONF": "a:b"}, [None, "a:b"]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "a:b"}, ["a:b", None])], ids=str)
def test_memory_comes_in_segments_that_grow_unless_the_user_has_chosen(chosen, expected):
    names = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
    environment = {key: value for key, value in os.environ.items() if key not in names} | chosen
    code = f"import json, machinery, os; print(json.dumps([*map(os.environ.get, {names})]))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True,
                          capture_output=True, check=True).stdout
    assert json.loads(said) == expected


@pytest.mark.parametrize("has_accelerate", [True, False])
def test_a_model_is_read_straight_to_a_gpu_where_the_library_can(has_accelerate, monkeypatch):
    """Else each rank of a machine would first hold all of it in the machine's memory."""
    load, asked = model.AutoModelForCausalLM.from_pretrained, []

    def load_here(*arguments, device_map, **named):
        asked.append(device_map)
        return load(*arguments, device_map=device_map and {"": "cpu"}, **named)

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(model, "DEVICE", gpu)
    monkeypatch.setattr(model.AutoModelForCausalLM, "from_pretrained", load_here)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    monkeypatch.setattr(model.transformers.utils, "is_accelerate_available", lambda: has_accelerate)
    loaded, _ = main.load_model(make_config())
    assert asked == [{"": gpu} if has_accelerate else None]
    monkeypatch.setattr(model, "DEVICE", torch.device("cpu"))
    usual, _ = main.load_model(make_config())
    assert asked[1] is None and not hasattr(loaded, "hf_device_map")
    for (name, parameter), (_, other) in zip(loaded.named_parameters(), usual.named_parameters(),
                                             strict=True):
        assert torch.equal(parameter, other), name


# ---------------------------------------------------------------- the first pass

def test_ddp_has_cut_its_buckets_for_good_before_there_are_moments(one_rank):
    """Cut anew while weights, gradients and moments are there, they would take as much memory again
    as all gradients."""
    run = make_policy(make_model(), make_config(), gradient_as_bucket_view=True)
    parameters = list(run.policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.0)
    places, states = [], []

    def passed(*_):
        states.append(len(optimizer.state))

    run.policy.register_forward_hook(passed)
    main.warm_up(run.policy, optimizer)
    for _ in range(3):
        places.append([parameter.grad.data_ptr() for parameter in parameters])
        log_probs, _ = run.policy(make_trajectories(4))
        log_probs.sum().backward()
    assert places[0] == places[1] == places[2] and states[:2] == [0, 0]
    assert len(states) == 5 and len(optimizer.state) == len(parameters)
    # and one pass would not have done
    run = make_policy(make_model(), make_config(), gradient_as_bucket_view=True)
    buckets = []
    for _ in range(3):
        run.policy([DUMMY_ANSWER])[0].sum().backward()
        buckets.append([parameter.grad.data_ptr() for parameter in run.policy.parameters()])
    assert buckets[0] != buckets[1] == buckets[2]


def test_a_parameter_that_takes_no_part_is_one_line_before_the_first_step(
        tmp_path, monkeypatch, capsys):
    load_model = main.load_model

    def with_a_tower(config):
        loaded, tokenizer = load_model(config)
        loaded.tower = torch.nn.Linear(3, 3)
        return loaded, tokenizer

    monkeypatch.setattr(main, "load_model", with_a_tower)
    assert start([*TINY, f"run.dir={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "error: model.name: 2 of its parameters, like tower.weight, take no part" in said


# ---------------------------------------------------------------- errors

CUDA = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CUDNN = "cuDNN error: CUDNN_STATUS_SUBLIBRARY_ALLOCATION_FAILED"
NCCL = ("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error. ncclUnhandledCudaError: Call to "
        "CUDA function failed. Last error:\nCuda failure 2 'out of memory'")
SHM = ("NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for "
       "details). Last error:\nError while creating shared memory segment /dev/shm/nccl-Ly7 "
       "(size 9637888)")


@pytest.mark.parametrize("error", [
    torch.AcceleratorError(CUDA), RuntimeError(CUBLAS), RuntimeError(CUDNN),
    torch.distributed.DistBackendError(NCCL), torch.OutOfMemoryError("CUDA out of memory. Tried")],
    ids=lambda error: str(error)[:40])
def test_running_out_of_memory_is_known_by_its_many_names(error, tmp_path):
    log = make_logger(tmp_path, is_terminal=False)
    with pytest.raises(errors.UserError) as raised, log.phase("learn"):
        raise error
    assert str(raised.value).startswith("out of memory in phase learn: lower training.tokens_per")


def test_other_failures_are_not_taken_for_it():
    for text in (SHM, "CUDA error: device-side assert triggered", "CUBLAS_STATUS_EXECUTION_FAILED"):
        assert not errors.is_out_of_memory(RuntimeError(text))


def test_what_nccl_fails_at_is_not_blamed_on_the_user(tmp_path, monkeypatch, capsys):
    """Where no other rank says why, the line says how to find out."""
    def fail(*_):
        raise torch.distributed.DistBackendError(SHM)

    monkeypatch.setattr(launch, "SECONDS_FOR_THE_CAUSE", 0)
    for module, name in ((main, "policy_gradient"), (main.Policy, "forward")):  # also in `warm_up`
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            assert start([*TINY, f"run.dir={tmp_path}", f"run.name={name}"]) == 1
        said = capsys.readouterr().err
        assert said.startswith("rank 0 cannot reach another rank any more (NCCL error in")
        assert "/dev/shm" in said  # as nccl says
        assert "NCCL_DEBUG=INFO" in said and "--shm-size" in said
        assert "Traceback" not in said and not said.startswith("error: ")


# ---------------------------------------------------------------- saving

def test_saving_that_takes_long_is_said_once_with_the_key(tmp_path, capsys):
    metrics = {"reward": 1.0, "solved": 1.0, "completion_length": 1.0, "groups_without_signal": 0.0,
               "truncated": 0.0, "updated": 0, "non_finite": 0, "tokens_per_second": 1.0,
               "seconds/sample": 6.0, "seconds/score": 1.0, "seconds/learn": 3.0}
    for every, saving, said in ((1, 2.5, 5), (1, 1.9, None), (5, 2.5, None), (5, 11.0, 22)):
        log = make_logger(tmp_path, is_terminal=False)
        log.config = make_config(checkpoint__every=every)
        capsys.readouterr()
        log._keep = lambda *_: None
        log.step(2, metrics)
        log.seconds["save"] = saving
        log.step(3, metrics)
        log.step(4, metrics)
        out = " ".join(capsys.readouterr().out.split())
        expected = (f"saving took {saving} s, and a step 10.0 s. With checkpoint.every ({every}) "
                    f"at {said} saving would take a twentieth of the time")
        assert (out.count("saving took") == 1 and expected in out) if said else (
            "saving took" not in out)


def test_memory_is_told_as_the_tensors_need_it_and_as_it_is_held(monkeypatch, one_rank):
    monkeypatch.setattr(metrics, "DEVICE", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 4e9)
    measured = metrics.memory_metrics()
    assert (measured["memory_gb"], measured["memory_reserved_gb"]) == (3.0, 4.0)
