"""The driver of the measurements on a GPU: whatever becomes of a part, the next one runs.
(`bench/gpu.py --small` in .ci/run rehearses the parts themselves.)"""

import os
import signal
import subprocess
import sys
import time

import gpu
import psutil
import pytest
from processes import ROOT

# "hangs" ignores SIGTERM and starts another process, whose id it writes.
PART = """\
import os, signal, subprocess, sys
name = sys.argv[1]
if name == "raises":
    raise ValueError("what was wrong")
if name == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pause = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    open(sys.argv[2], "w").write(str(pause.pid))
    signal.pause()
if name == "kills itself":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def has_ended(pid: int) -> bool:
    """A process that is killed takes a moment to end."""
    for _ in range(50):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("name", ["raises", "hangs", "kills itself", "is well"])
def test_a_part_that_raises_hangs_or_dies_has_failed_and_leaves_nothing_behind(
        name, tmp_path, capfd):
    pid_file = tmp_path / "pid"

    passed = gpu.run_part(name, 5, [sys.executable, "-c", PART, name, str(pid_file)])

    output, errors = capfd.readouterr()
    assert passed == (name == "is well")
    assert output.startswith(f"{name}: {'passed' if passed else 'FAILED'} after ")
    assert ("ValueError: what was wrong" in errors) == (name == "raises")
    if name == "hangs":
        assert has_ended(int(pid_file.read_text()))


def test_a_call_runs_every_part_and_names_those_that_have_failed(monkeypatch):
    tried = []
    monkeypatch.setattr(gpu, "run_part", lambda name, *_: tried.append(name) or name != "gradient")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    with pytest.raises(SystemExit, match="failed: gradient"):
        gpu.call(["--small"])

    assert tried == list(gpu.PARTS)


def test_a_call_that_is_told_to_stop_takes_its_part_along(tmp_path):
    script = tmp_path / "part.py"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script.write_text(f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); "
                      "signal.pause()")
    call = f"import gpu; gpu.__file__ = {str(script)!r}; gpu.call(['--small'])"
    process = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT / "bench")
    pid_of_part = int(pipe.read_text())  # It waits for the part.

    process.send_signal(signal.SIGTERM)

    assert process.wait() == 143
    assert has_ended(pid_of_part)


@pytest.mark.skipif(gpu.CUDA, reason="there is a GPU")
def test_nothing_is_tried_on_a_machine_without_a_gpu(capsys):
    with pytest.raises(SystemExit) as end:
        gpu.call([])

    assert end.value.code == 2 and "there is no GPU here" in capsys.readouterr().err
