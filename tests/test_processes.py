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
    (folder / f"hangs-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(10_000)


HANG_AS_A_CHILD = """
import pathlib, subprocess, sys
subprocess.run([sys.executable, "-c", "import os, pathlib, time; \
pathlib.Path(sys.argv[1], 'hangs-0').write_text(str(os.getpid())); time.sleep(10_000)"
                .replace("sys.argv[1]", repr(sys.argv[1]))])
"""


@pytest.mark.parametrize(("start", "num_processes"), [
    (lambda folder: ranks(2, hang, folder), 2),
    (lambda folder: run(sys.executable, "-c", HANG_AS_A_CHILD, folder), 1)],
    ids=["ranks", "a command with a child"])
def test_when_the_time_is_up_every_process_shows_its_stack_and_ends(
        start, num_processes, tmp_path, capsys):
    def time_is_up():
        while len(list(tmp_path.glob("hangs-*"))) < num_processes:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=time_is_up, daemon=True).start()
    with pytest.raises(pytest.fail.Exception, match="this test has not ended"):
        start(tmp_path)
    said = capsys.readouterr().out
    assert said.count("Fatal Python error: Aborted") == 2  # both ranks; the command and its child
    assert said.count(
        "in hang" if num_processes == 2 else 'File "<string>", line 1') == num_processes
    assert not any(map(is_running, [int(path.read_text()) for path in tmp_path.glob("hangs-*")]))


def is_running(pid):
    try:
        # which nobody has waited for yet
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
