"""A test that hangs is a failure that shows where every process of it stands."""

import os
import signal
import sys
import threading
import time

import psutil
import pytest
from processes import ranks, run


def hang(folder):
    (folder / f"hangs-{os.environ['RANK']}").touch()
    time.sleep(10_000)


HANG_AS_A_CHILD = """
import pathlib, subprocess, sys
subprocess.run([sys.executable, "-c", "import pathlib, time; pathlib.Path(sys.argv[1], 'hangs-0').touch(); time.sleep(10_000)"
                .replace("sys.argv[1]", repr(sys.argv[1]))])
"""


@pytest.mark.parametrize(("start", "num_processes"), [
    (lambda folder: ranks(2, hang, folder), 2), (lambda folder: run(sys.executable, "-c", HANG_AS_A_CHILD, folder), 1)],
    ids=["ranks", "a command with a child"])
def test_when_the_time_is_up_every_process_shows_its_stack_and_ends(start, num_processes, tmp_path, capsys):
    def time_is_up():
        while len(list(tmp_path.glob("hangs-*"))) < num_processes:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=time_is_up, daemon=True).start()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(TimeoutError, match="this test has not ended"):
        start(tmp_path)
    said = capsys.readouterr().out
    assert said.count("Fatal Python error: Aborted") == 2  # both ranks; the command and its child
    assert said.count("in hang" if num_processes == 2 else 'File "<string>", line 1') == num_processes
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert all("multiprocessing" in " ".join(psutil.Process(pid).cmdline()) for pid in left)  # the server that forks may be new
