"""How ranks find each other, agree, add up and draw random numbers, on a CPU or on GPUs."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.errors import SharedError, UserError, as_user_error

# torchrun sets these three. Without torchrun this process is the only rank.
RANK = int(os.environ.get("RANK", "0"))              # decides which data are this rank's
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # decides which GPU is this rank's
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
TIME_TO_MEET = timedelta(minutes=10)
TIME_TO_WAIT = timedelta(hours=2)  # for the slowest rank, which may be saving or evaluating


def join() -> None:
    """Connects this rank with the others: by nccl between GPUs, by gloo for data on the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if DEVICE.type == "cuda":
        prepare_gpu(local_ranks)
    else:
        share_cores(local_ranks)
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    with as_user_error("the ranks cannot reach each other; with several machines see "
                       "--rdzv-endpoint of torchrun, and GLOO_SOCKET_IFNAME"):
        dist.init_process_group(
            backend, store=meet(), rank=RANK, world_size=WORLD_SIZE, timeout=TIME_TO_WAIT)


def leave_group() -> None:
    """The counterpart of `join`. No rank ends before all have come here. Collective."""
    dist.barrier()


def prepare_gpu(local_ranks: int) -> None:
    num_gpus = torch.cuda.device_count()
    if local_ranks > num_gpus:
        raise UserError(
            f"{local_ranks} processes, but {num_gpus} GPUs: start one process for each GPU")
    torch.cuda.set_device(DEVICE)
    # With a mask PyTorch takes cuDNN's attention first on Hopper and Blackwell. Its gradient can be
    # nan (pytorch issue 196678), its decoding can be wrong (193893), and it keeps a plan in memory
    # for each new length (190388).
    torch.backends.cuda.enable_cudnn_sdp(False)


def share_cores(local_ranks: int) -> None:
    """Shares the CPU's cores among the ranks. torchrun gives each rank a single thread, unless the
    user has set OMP_NUM_THREADS."""
    if local_ranks == 1 or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    torchruns_own = Path(f"/proc/{os.getppid()}/environ")
    if os.access(torchruns_own, os.R_OK) and b"OMP_NUM_THREADS=" in torchruns_own.read_bytes():
        return  # The user has set it to 1.
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, num_cores // local_ranks))


def meet() -> dist.Store:
    """Returns the store in which ranks leave their addresses for each other, once all are there."""
    if WORLD_SIZE == 1 and "RANK" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=TIME_TO_MEET))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # This store outlives the ranks, so it still has the addresses of those before a restart.
        num_machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        num_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if num_machines != "1" and num_restarts != "0":
            raise UserError("restarts on several machines need a store of their own: write, on "
                            "each, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    store.set(f"rank {RANK} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(WORLD_SIZE)], TIME_TO_MEET)
    store.set_timeout(TIME_TO_WAIT)
    return store


@contextmanager
def errors_on_all_ranks(in_turn: bool = False) -> Iterator[None]:
    """A user error on one rank becomes the same error on all, so that no rank is left waiting.

    With `in_turn`, the ranks of a machine run the block one after the other. Then only one of them
    at a time has a whole model in the machine's memory. Collective."""
    num_turns = 1
    if in_turn:
        num_turns = int(max_over_ranks({"local_rank": LOCAL_RANK})["local_rank"]) + 1
    own_message = None
    cause = None
    for turn in range(num_turns):
        try:
            if turn == LOCAL_RANK or not in_turn:
                yield
        except UserError as error:
            own_message = str(error)
            cause = error.__cause__
        messages = [None] * WORLD_SIZE
        dist.all_gather_object(messages, own_message)
        for message in messages:
            if message is not None:
                raise SharedError(message) from cause


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Returns the sum of each value over all ranks. Collective."""
    return reduce_over_ranks(values, dist.ReduceOp.SUM)


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Returns the largest of each value on any rank. Collective."""
    return reduce_over_ranks(values, dist.ReduceOp.MAX)


def reduce_over_ranks(values: dict[str, float], operation: dist.ReduceOp) -> dict[str, float]:
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)  # on the CPU, by gloo
    dist.all_reduce(tensor, operation)
    return dict(zip(values, tensor.tolist(), strict=True))


def random_stream(seed: int, step: int, purpose: str) -> random.Random:
    """Returns random numbers that depend on the seed, the step, this rank and the purpose alone.

    So a run has no state of random numbers to save, and evaluating does not disturb training."""
    return random.Random(f"{seed} {step} {RANK} {purpose}")


@lru_cache(maxsize=2)  # A step may reach from one epoch into the next.
def shuffled_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Returns the order in which an epoch goes through the rows. It is the same on every rank."""
    order = list(range(num_rows))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order
