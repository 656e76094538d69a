"""How the ranks meet, agree, add up and draw random numbers: on one process or many, CPU or GPU."""

import os
import random
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from machinery.errors import SharedError, UserError, blame, tell_torchrun

# torchrun sets these; without it this is the only rank. LOCAL_RANK picks the device, RANK the data.
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
TIME_TO_MEET = timedelta(minutes=10)
TIME_TO_WAIT = timedelta(hours=2)  # for the slowest, with an evaluation or a save
# After so many silent seconds the system asks a peer whether it is there, so often, so many times.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 3}
leaving = threading.Event()  # from then on no rank is missed by this one
end_process = os._exit  # which rewards see replaced: see `theirs`


def join() -> None:
    """Meets the other ranks: nccl between GPUs, gloo for what lives on the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if DEVICE.type == "cuda":
        if local_ranks > (gpus := torch.cuda.device_count()):
            raise UserError(f"{local_ranks} processes, and {gpus} GPUs: start one for each GPU")
        torch.cuda.set_device(DEVICE)
        # Where there is a mask cuDNN's attention comes first on Hopper and Blackwell, and its
        # gradient can be nan (pytorch issue 196678), its decoding wrong (193893), and each new
        # length costs a plan that stays (190388).
        torch.backends.cuda.enable_cudnn_sdp(False)
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
    if WORLD_SIZE > 1:
        _watch()


def part() -> None:
    """The counterpart of `join`: none leaves before all are here, and then none is missed."""
    dist.barrier()
    leaving.set()
    dist.barrier()


def _watch() -> None:
    """Each rank listens to the next, which says nothing as long as all are well. The one thread of
    the trainer, because no error reaches a rank whose main thread stands in C: in nccl, waiting for
    one that has died, or in a reward."""
    before = _open_sockets()
    group = dist.new_group(backend="gloo")
    for number in _open_sockets() - before:
        # A child that outlives its rank would keep these open, and the rank seem alive.
        os.set_inheritable(number, False)
        os.register_at_fork(after_in_child=lambda number=number: os.closerange(number, number + 1))
        with socket.socket(fileno=os.dup(number)) as own:  # of a machine whose power goes
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in KEEPALIVE.keys() & vars(socket).keys():
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEPALIVE[name])
    threading.Thread(target=_end_with_the_next, args=(group,), daemon=True).start()


def _open_sockets() -> set[int]:
    return {int(each.name) for each in Path("/dev/fd").iterdir() if each.is_socket()}


def _end_with_the_next(group) -> None:
    """Once the next rank has gone, or passes on which one has: says so to the one before, and ends
    this process, wherever its main thread stands."""
    next_one, one_before = (RANK + 1) % WORLD_SIZE, (RANK - 1) % WORLD_SIZE
    gone = torch.tensor([next_one])
    try:
        dist.irecv(gone, next_one, group).wait(timedelta(days=3650))  # longer than any run
        line = None  # another has said it
    except RuntimeError:
        line = f"rank {next_one} has left: all ranks end"
    if leaving.is_set():
        return
    if line:
        os.write(2, f"{line}\n".encode())  # the main thread may hold Python's own stream
        tell_torchrun(line)
    with suppress(RuntimeError):
        dist.send(gone, one_before, group)
    end_process(1)


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


@contextmanager
def errors_shared(in_turn: bool = False):
    """A user error on one rank becomes the same error on all: none is left waiting. With `in_turn`
    one rank of a machine comes after the other, so that but one of them has the whole model in the
    machine's memory. Collective."""
    last, = over_ranks([LOCAL_RANK], dist.ReduceOp.MAX) if in_turn else [0]
    own = cause = None
    for turn in range(int(last) + 1):
        try:
            if turn == LOCAL_RANK or not in_turn:
                yield
        except UserError as error:
            own, cause = str(error), error.__cause__
        errors = [None] * WORLD_SIZE
        dist.all_gather_object(errors, own)
        if any(errors):
            raise SharedError(next(filter(None, errors))) from cause


def over_ranks(values: list[float], operation=dist.ReduceOp.SUM) -> list[float]:  # collective
    result = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(result, operation)
    return result.tolist()


def random_stream(seed: int, step: int, purpose: str) -> random.Random:
    """Randomness is a pure function of (seed, step, rank, purpose): no state to save, and
    evaluating does not disturb training. Seeds torch, on every device, as well."""
    stream = random.Random(f"{seed} {step} {RANK} {purpose}")
    torch.manual_seed(stream.getrandbits(63))
    return stream


@lru_cache(maxsize=2)  # a step may reach from one epoch into the next
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """In which an epoch goes through the rows, the same on every rank."""
    order = list(range(num_rows))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order
