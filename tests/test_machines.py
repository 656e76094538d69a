"""Two network namespaces as two machines, one rank each, that meet over the link between them. Only
the machine of rank 0 has the folder of the run."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import SMALL, outcome, uninterrupted
from processes import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="making network namespaces takes root, and ip from iproute2")]
STEPS = ["checkpoint.every=1", "validation.every=3", "training.max_steps=8"]


@pytest.fixture
def machines():
    """Names of two namespaces that reach each other as 10.199.0.1 and 10.199.0.2, by an interface
    called `wire`."""
    names = [f"grpo-{os.getpid()}-{i}" for i in (1, 2)]

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire",
           "netns", names[1])
        for i, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.199.0.{i}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Machine:
    """torchrun on one machine, writing to a folder of its own, its output to a file."""

    def __init__(self, name, number, run_dir: Path, log: Path):
        self.log = log
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
                   "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
                   "--rdzv-endpoint=10.199.0.1:29500", "--rdzv-id=test",
                   f"--local-addr=10.199.0.{number}",
                   # torchrun finds this out by host names, of which there are none here.
                   f"--rdzv-conf=is_host={number == 1}",
                   "main.py", *SMALL, *STEPS, f"run.dir={run_dir}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "wire",
                       "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(log, "a") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output,
                                            env=environment, start_new_session=True)

    def kill(self):
        """As when its power goes: torchrun and its rank together."""
        process = psutil.Process(self.process.pid)
        for each in [process, *process.children(recursive=True)]:
            each.kill()
        self.process.wait()

    def wait_for(self, text):
        while text not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def end(self):
        assert self.process.wait() == 0, self.log.read_text()


def test_two_machines_train_as_one_and_one_that_is_killed_and_started_again_goes_on(
        machines, tmp_path):
    expected = uninterrupted(2, tmp_path / "whole", *STEPS)
    # Of two machines, torchrun gives rank 0 to the one with the lower address.
    first = Machine(machines[0], 1, tmp_path / "disk-1", tmp_path / "log-1")
    second = Machine(machines[1], 2, tmp_path / "disk-2", tmp_path / "log-2")
    first.wait_for("step    3 ")
    second.kill()
    second = Machine(machines[1], 2, tmp_path / "disk-2", tmp_path / "log-2")
    first.end()
    second.end()

    assert "resuming from" in first.log.read_text()
    assert outcome(tmp_path / "disk-1" / "a") == expected
    assert not (tmp_path / "disk-2").exists()
