"""A rank, from first line to last: it starts, meets the others, agrees with them, and exits.

A rank is one process, with a GPU of its own or a share of the CPU's cores."""

import faulthandler
import glob
import json
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import NoReturn

import torch
import torch.distributed as dist

from machinery.errors import KILLED, SharedError, UserError, as_user_error, describe, is_lost_rank

# torchrun sets these. Without torchrun this process is the only rank.
RANK = int(os.environ.get("RANK", "0"))              # decides which data this rank gets
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # decides which GPU this rank gets
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks of this machine
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# Each rank has its own GPU, or all of this machine's ranks share its CPU.
DEVICE = torch.device("cuda", LOCAL_RANK) if LOCAL_WORLD_SIZE <= NUM_GPUS else torch.device("cpu")
DRIVER_FILES = "/dev/nvidia[0-9]*"  # one for each NVIDIA GPU
TIME_TO_MEET = timedelta(minutes=10)
TIME_TO_WAIT = timedelta(hours=2)  # for the slowest rank, which may be saving or evaluating
SECONDS_FOR_THE_CAUSE = 5
LATEST_TIME = 2**31 - 1  # torchrun takes the earliest failure as the cause.


# ---------------------------------------------------------------- from start to exit

def launch(main: Callable[[list[str]], None], arguments: list[str] | None = None) -> NoReturn:
    """Runs `main` and exits: with 0 once `main` is done, with 2 after a user's mistake, and
    otherwise with 1."""
    # A token that the terminal's encoding lacks must not end a run.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    faulthandler.enable(2)  # If C code ends the process, it says where.
    # torchrun shows this if a signal ends the rank. Other errors replace it with their own.
    tell_torchrun(KILLED, LATEST_TIME)
    try:
        join()
        main(sys.argv[1:] if arguments is None else arguments)
        leave_group()
        code = 0
    except UserError as error:
        code = tell_mistake(error)
    except BaseException as error:  # noqa: BLE001  A task that calls sys.exit() is no success.
        code = tell_failure(error)
    return end_process(code)


def tell_mistake(error: UserError) -> int:
    line = f"error: {describe(error, 600)}"
    tell_torchrun(line)
    if isinstance(error, SharedError):
        # All ranks have this error, and rank 0 prints it. The others wait until it has, because
        # torchrun ends all ranks as soon as one has exited.
        if RANK == 0:
            print(line, file=sys.stderr, flush=True)
        leave_group()
    else:
        if RANK != 0:
            # Rank 0 may have the same error and print it. Then torchrun ends this rank.
            time.sleep(SECONDS_FOR_THE_CAUSE)
        print(line, file=sys.stderr, flush=True)
    return 2


def tell_failure(error: BaseException) -> int:
    if is_lost_rank(error):
        # The other rank says why it ended. Meanwhile torchrun ends this one, too.
        time.sleep(SECONDS_FOR_THE_CAUSE)
        line = (f"rank {RANK} can no longer reach another rank ({describe(error)}). If no rank "
                f"has printed a reason: {KILLED}. With NCCL_DEBUG=INFO, NCCL prints what it does; "
                "a container may need --shm-size=1g")
        print(line, file=sys.stderr)
    else:
        line = f"{type(error).__name__}: {describe(error)}"
        traceback.print_exception(error)
    tell_torchrun(line)
    return 1


def tell_torchrun(message: str, when: float | None = None) -> None:
    """Passes a message to torchrun, whose own report is the last thing on the screen."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(when or time.time())}, file)


def end_process(code: int) -> NoReturn:
    """Exits without Python's own cleanup, which would wait for threads of gloo or nccl. These may
    in turn be waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- meeting

def join() -> None:
    """Connects this rank to the others: with nccl between GPUs, with gloo for data on the CPU."""
    refuse_unusable_gpu()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        # With a mask, PyTorch prefers cuDNN's attention on Hopper and Blackwell. Its gradient can
        # be nan (pytorch issue 196678), its decoding can be wrong (193893), and it keeps a plan in
        # memory for each new length (190388).
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif LOCAL_WORLD_SIZE > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # torchrun sets OMP_NUM_THREADS to 1, unless the user has set it to something else.
        has_affinity = hasattr(os, "sched_getaffinity")  # macOS doesn't have it.
        num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        torch.set_num_threads(max(1, num_cores // LOCAL_WORLD_SIZE))
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    with as_user_error("the ranks cannot reach each other: with several machines, check torchrun's "
                       "--rdzv-endpoint and the variable GLOO_SOCKET_IFNAME"):
        dist.init_process_group(
            backend, store=meet(), rank=RANK, world_size=WORLD_SIZE, timeout=TIME_TO_WAIT)


def leave_group() -> None:
    """The counterpart of `join`. No rank exits before all have arrived here. Collective."""
    dist.barrier()


def refuse_unusable_gpu() -> None:
    """Refuses a GPU that this PyTorch can't use; the run would quietly use the CPU instead."""
    # Slurm writes NoDevFiles if a job hasn't asked for a GPU, or may not open one.
    is_hidden = not re.match(r"\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    can_open = any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob(DRIVER_FILES))
    if NUM_GPUS or is_hidden or not can_open:
        return
    remedy = "install a PyTorch build for CUDA"
    if torch.version.cuda:
        remedy = (f"update its driver, because CUDA {torch.version.cuda} needs a newer one, or "
                  "install a PyTorch build for an older CUDA")
    raise UserError(f"PyTorch {torch.__version__} cannot use this machine's GPU: {remedy} "
                    "(docs/run.md#the-driver). It may also be that CUDA_VISIBLE_DEVICES names "
                    "a GPU that does not exist, or that a container was started without --gpus "
                    "all or --nv. To train on the CPU, set CUDA_VISIBLE_DEVICES=")


def meet() -> dist.Store:
    """Returns the store in which ranks leave each other their addresses, once all have arrived."""
    if WORLD_SIZE == 1 and "RANK" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=TIME_TO_MEET))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # This store outlives the ranks, so it still has their addresses from before a restart.
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    store.set(f"rank {RANK} is here", DEVICE.type)
    all_ranks = [f"rank {rank} is here" for rank in range(WORLD_SIZE)]
    store.wait(all_ranks, TIME_TO_MEET)
    on_cpu = [rank for rank, name in enumerate(all_ranks) if store.get(name) == b"cpu"]
    if 0 < len(on_cpu) < WORLD_SIZE:
        if RANK == 0:  # This process may host the store, and the others are still reading.
            time.sleep(SECONDS_FOR_THE_CAUSE)
        raise UserError(f"ranks {on_cpu} train on a CPU, and the others train on GPUs: start "
                        "one process per GPU on all machines, or set CUDA_VISIBLE_DEVICES= on all "
                        "of them")
    store.set_timeout(TIME_TO_WAIT)
    return store


def tell(line: str) -> None:
    """Prints a note, on rank 0."""
    if RANK == 0:
        print(f"note: {line}", flush=True)


# ---------------------------------------------------------------- agreeing

@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Turns a user error on one rank into the same error on all, so none is left waiting.
    Collective."""
    own_message = None
    cause = None
    try:
        yield
    except UserError as error:
        own_message = str(error)
        cause = error.__cause__
    for message in gather(own_message):
        if message is not None:
            raise SharedError(message) from cause


def gather(value: object) -> list:
    """Returns every rank's value, on all ranks. Collective."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Returns the sum of each value over all ranks. Collective."""
    return reduce_over_ranks(values, dist.ReduceOp.SUM)


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Returns the maximum of each value over all ranks. Collective."""
    return reduce_over_ranks(values, dist.ReduceOp.MAX)


def reduce_over_ranks(values: dict[str, float], operation: dist.ReduceOp) -> dict[str, float]:
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)  # on the CPU, with gloo
    dist.all_reduce(tensor, operation)
    return dict(zip(values, tensor.tolist(), strict=True))


# ---------------------------------------------------------------- random numbers

def random_seed(seed: int, step: int, purpose: str) -> int:
    """Returns a number that depends only on the seed, the step, this rank and the purpose.

    So a run has no random state to save, and evaluating doesn't disturb training."""
    return random.Random(f"{seed} {step} {RANK} {purpose}").getrandbits(63)


@lru_cache(maxsize=2)  # A step may extend from one epoch into the next.
def shuffled_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Returns the order in which an epoch goes through the rows, the same on every rank."""
    order = list(range(num_rows))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order
