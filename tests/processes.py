"""The processes that tests start: ranks forked from one that has imported everything, and commands
as a user types them.

A rank of `ranks` is there in a tenth of a second, where torchrun takes ten. It meets the others as
under torchrun, in a store that outlives it, and once a rank has failed the others are told to end.
Real torchrun is for what torchrun itself does: restarts, signals, exit codes, what is on the
screen."""

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


def inherited() -> dict[str, str]:
    """What a process that a test starts has of the environment: no MLflow server, and no hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def ranks(num_ranks: int, work, *arguments, cwd: Path = ROOT, **environment) -> Result:
    """`work(*arguments)` on each of so many ranks; `work` is a function at the top of a test
    file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # any free port
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = inherited() | {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{stream}-{rank}") for stream in ("stdout", "stderr")]
                   for rank in range(num_ranks)]
        processes = [context.Process(target=_rank, args=(
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd, own,
            (work.__module__, work.__name__), arguments))
            for rank, own in enumerate(outputs)]
        pids: list[int] = []
        with stacks_on_the_way_out(pids, [path for own in outputs for path in own]):
            for process in processes:
                process.start()
                pids.append(process.pid)
            first = _wait_as_torchrun_does(processes)
        texts = [[path.read_text(errors="replace") if path.exists() else "" for path in own]
                 for own in outputs]
    stdout, stderr = ("".join(stream) for stream in zip(*texts))
    return Result(first, [process.exitcode for process in processes], stdout, stderr)


def _rank(environment: dict, cwd: Path, outputs: list[Path], work: tuple[str, str],
          arguments: tuple) -> None:
    threads = os.listdir(f"/proc/{os.getppid()}/task") if os.path.exists("/proc") else [0]
    assert len(threads) == 1, "a process that has threads must not be forked"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, descriptor in zip(outputs, (1, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()  # SIGABRT shows where it stands
    module, name = work
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
                env={**inherited(), "PYTHONFAULTHANDLER": "1", **environment})
            with stacks_on_the_way_out([process.pid], outputs):
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode,
                                           *(path.read_text(errors="replace") for path in outputs))


@contextlib.contextmanager
def stacks_on_the_way_out(pids: list[int], outputs):
    """If the test ends inside, because its time is up, every process of these families says where
    it stands and is ended, and what all have said is shown."""
    try:
        yield
    except BaseException:
        family = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family += [process, *process.children(recursive=True)]
        for deadly in (signal.SIGABRT, signal.SIGKILL):
            # one by one, since they may write to one file, and parents first, or they might go on
            # and end
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(deadly)
                psutil.wait_procs([process], timeout=3)
        for path in outputs:
            if Path(path).exists() and (said := Path(path).read_text(errors="replace")):
                print(f"---------- {Path(path).name}\n{said}")
        raise
