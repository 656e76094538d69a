"""How the ranks meet, agree, add up and draw random numbers: on one process or many, CPU or GPU."""

import os
import random
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.errors import UserError, blame

# torchrun sets these; without it this is the only rank. LOCAL_RANK picks the device, RANK the data.
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
TIME_TO_MEET = timedelta(minutes=10)
TIME_TO_WAIT = timedelta(hours=2)  # for the slowest, with an evaluation or a save


def join() -> None:
    """Meets the other ranks: nccl between GPUs, gloo for what lives on the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if DEVICE.type == "cuda":
        if local_ranks > (gpus := torch.cuda.device_count()):
            raise UserError(f"{local_ranks} processes, and {gpus} GPUs: start one for each GPU")
        torch.cuda.set_device(DEVICE)
    elif local_ranks > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        parent = Path(f"/proc/{os.getppid()}/environ")  # torchrun sets it unless it finds it set
        if not os.access(parent, os.R_OK) or b"OMP_NUM_THREADS=" not in parent.read_bytes():
            allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)
            torch.set_num_threads(max(1, len(allowed) // local_ranks))
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    with blame("the ranks cannot reach each other; on several machines see --rdzv-endpoint of "
               "torchrun, and GLOO_SOCKET_IFNAME"):
        dist.init_process_group(backend, store=_meet(), rank=RANK, world_size=WORLD_SIZE,
                                timeout=TIME_TO_WAIT)


def _meet() -> dist.Store:
    """Where the ranks leave their addresses for each other, once all of them are there."""
    if WORLD_SIZE == 1 and "RANK" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=TIME_TO_MEET))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # This store outlives the ranks, and holds the addresses of those before a restart.
        machines, restarts = map(os.environ.get, ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
        if machines not in (None, "1") and restarts not in (None, "0"):
            raise UserError("restarts on several machines need a store of their own: write, on "
                            "each, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    store.set(f"rank {RANK} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(WORLD_SIZE)], TIME_TO_MEET)
    store.set_timeout(TIME_TO_WAIT)
    return store


class SharedError(UserError): ...  # one that every rank raises


@contextmanager
def together():
    """A user error on one rank becomes the same error on all of them: none is left waiting."""
    own = cause = None
    try:
        yield
    except UserError as error:
        own, cause = str(error), error.__cause__
    errors = [None] * WORLD_SIZE
    dist.all_gather_object(errors, own)
    if any(errors):
        raise SharedError(next(filter(None, errors))) from cause


def over_ranks(values: list[float], operation=dist.ReduceOp.SUM) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(result, operation)
    return result.tolist()


def random_stream(seed: int, step: int, purpose: str) -> random.Random:
    """Randomness is a pure function of (seed, step, rank, purpose): no state to save, and
    evaluating does not disturb training. Seeds torch, on every device, as well."""
    stream = random.Random(f"{seed} {step} {RANK} {purpose}")
    torch.manual_seed(stream.getrandbits(63))
    return stream
