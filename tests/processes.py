"""The processes that tests start: ranks, and commands as a user types them.

`ranks` forks its processes from one that has imported everything, so a rank is there in a tenth of
a second, where torchrun takes ten. The ranks meet in a store that outlives them, as under torchrun,
and once a rank has failed the others are told to end. Real torchrun is for what torchrun itself
does: restarts, signals, exit codes, what is on the screen."""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

# Before torch, transformers and pyarrow are imported, here and in the processes that tests start.
# Models this small lose by sharing their work between threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# pyarrow's own thread: a process that forks must have only one.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
# The server that forks has imported these and nothing of ours, so each rank imports main.py with
# its own RANK in the environment.
IMPORTED = ["pytest", "torch.distributed", "transformers.models.qwen2.modeling_qwen2",
            "transformers.models.gpt2.modeling_gpt2", "transformers.models.auto.modeling_auto",
            "transformers.generation.utils", "datasets", "pyarrow.parquet",
            "matplotlib.backends.backend_agg", "peft", "mlflow"]
SECONDS_TO_END = 30  # as long as torchrun waits after SIGTERM


class Result(NamedTuple):
    returncode: int  # of the first rank that failed, or 0
    codes: list[int]
    stdout: str
    stderr: str


def inherited_environment() -> dict[str, str]:
    """The environment of every process that a test starts: no MLflow server, and no hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def ranks(num_ranks: int, work, *arguments, cwd: Path = ROOT, **environment) -> Result:
    """Calls `work(*arguments)` on each of `num_ranks` ranks. It is at the top of a test file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # Port 0 is any free port.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = inherited_environment() | {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
    with tempfile.TemporaryDirectory() as folder:
        processes, outputs = [], []
        for rank in range(num_ranks):
            own_outputs = [Path(folder, f"{stream}-{rank}") for stream in ("stdout", "stderr")]
            own_environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=_rank, args=(
                own_environment, cwd, own_outputs, work.__module__, work.__name__, arguments)))
            outputs.append(own_outputs)
        pids: list[int] = []
        with ending_what_is_left(pids, [path for own in outputs for path in own]):
            for process in processes:
                process.start()
                pids.append(process.pid)
            first = _wait_as_torchrun_does(processes)
        stdout = "".join(path.read_text(errors="replace") for path, _ in outputs)
        stderr = "".join(path.read_text(errors="replace") for _, path in outputs)
    return Result(first, [process.exitcode for process in processes], stdout, stderr)


def _rank(environment: dict, cwd: Path, outputs: list[Path], module: str, name: str,
          arguments: tuple) -> None:
    threads = os.listdir(f"/proc/{os.getppid()}/task") if os.path.exists("/proc") else [0]
    assert len(threads) == 1, "a process that has threads must not be forked"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, descriptor in zip(outputs, (1, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()  # SIGABRT shows where the process stands.
    getattr(importlib.import_module(module), name)(*arguments)


def _wait_as_torchrun_does(processes: list) -> int:
    waiting, first, end = list(processes), 0, None
    while waiting:
        for process in list(waiting):
            if process.exitcode is None:
                continue
            waiting.remove(process)
            if process.exitcode and not first:
                first, end = process.exitcode, time.monotonic() + SECONDS_TO_END
                for other in waiting:
                    other.terminate()
        if end and time.monotonic() > end:
            for process in waiting:
                process.kill()
        if waiting:
            wait([process.sentinel for process in waiting], timeout=1)
    return first


def torchrun(num_ranks: int, *arguments, torchrun_options=(),
             **environment) -> subprocess.CompletedProcess:
    """A script of this repository under a real torchrun, on a free port."""
    return run(sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={num_ranks}", *torchrun_options, *arguments, **environment)


def run(*command, cwd: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    """A command to its end, with all that it has said."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        with open(outputs[0], "w") as stdout, open(outputs[1], "w") as stderr:
            process = subprocess.Popen(
                list(map(str, command)), cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**inherited_environment(), "PYTHONFAULTHANDLER": "1", **environment})
            with ending_what_is_left([process.pid], outputs):
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode,
                                           *(path.read_text(errors="replace") for path in outputs))


@contextlib.contextmanager
def ending_what_is_left(pids: list[int], outputs):
    """If the test's time is up inside, every process of these families shows its stack and ends,
    and the test shows what all of them have said."""
    try:
        yield
    except BaseException:
        family = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family += [process, *process.children(recursive=True)]
        for last_signal in (signal.SIGABRT, signal.SIGKILL):
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(last_signal)
            psutil.wait_procs(family, timeout=3)
        for path in sorted(outputs, key=lambda path: path.name):  # the stacks, on stderr, first
            if path.exists():
                print(f"---------- {path.name}\n{path.read_text(errors='replace')}")
        raise
