"""The driver of the measurements on a GPU. Whatever becomes of a part, it leaves its row, and the
next one runs. (`bench/gpu.py --small` in .ci/run rehearses the parts themselves.)"""

import os
import signal
import subprocess
import sys
import time

import gpu
import gpu_parts
import psutil
import pytest
from conftest import read_jsonl
from processes import ROOT

# What it prints before it fails stays known. "hangs" ignores SIGTERM and starts another process.
PARTS_THAT_FAIL = """\
import os, signal, subprocess, sys
name = sys.argv[1]
print("no figure", '{"told": 1.5}', sep="\\n", flush=True)
if name == "raises":
    raise ValueError("what was wrong")
if name == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pause = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print('{"child": %d}' % pause.pid, flush=True)
    signal.pause()
if name == "kills itself":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "parts.py"
    path.write_text(PARTS_THAT_FAIL)
    return path


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def measured(script, names, minutes=1.0):
    """Whether all parts passed, and their rows."""
    parts = {name: gpu.Part("A", "", 3) for name in names}
    out = script.with_name("gpu.jsonl")
    passed = gpu.measure(parts, minutes, out=out, script=script)
    return passed, {row["part"]: row for row in read_jsonl(out)}


def test_a_part_that_raises_hangs_or_dies_leaves_its_row_and_the_next_one_runs(script):
    passed, rows = measured(script, ["raises", "hangs", "kills itself", "is well"])

    assert not passed
    assert "exit code 1" in rows["raises"]["error"]
    assert "ValueError: what was wrong" in rows["raises"]["error"]
    assert "not through after 3 s" in rows["hangs"]["error"]
    assert "SIGKILL" in rows["kills itself"]["error"]
    for row in rows.values():
        assert row["figures"]["told"] == 1.5
        assert row["passed"] == (row["part"] == "is well")
    assert has_ended(rows["hangs"]["figures"]["child"])


def test_a_call_ends_inside_its_minutes_with_a_row_for_every_part(script):
    seconds = gpu.SECONDS_TO_END + 2
    started = time.monotonic()

    _, rows = measured(script, ["hangs", "is well"], seconds / 60)

    assert time.monotonic() - started < seconds
    assert "not through after 2 s" in rows["hangs"]["error"]
    assert "minutes" in rows["is well"]["error"]


def test_a_call_that_is_told_to_stop_takes_its_part_along(tmp_path):
    script = tmp_path / "parts.py"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script.write_text(f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); "
                      "signal.pause()")
    call = f"import gpu, pathlib; gpu.main(['--small'], pathlib.Path({str(script)!r}))"
    process = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT / "bench")
    pid_of_part = int(pipe.read_text())  # It waits for the part.

    process.send_signal(signal.SIGTERM)

    assert process.wait() == 143
    assert has_ended(pid_of_part)


def test_nothing_else_is_tried_on_a_machine_without_a_gpu(tmp_path, monkeypatch):
    script = tmp_path / "parts.py"
    script.write_text("raise SystemExit('there is no GPU here')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    with pytest.raises(SystemExit) as end:
        gpu.main(["A"], script)

    row, = read_jsonl(tmp_path / "gpu.jsonl")
    assert end.value.code == 1
    assert row["part"] == "machine" and "there is no GPU here" in row["error"]


def test_the_table_has_a_line_for_each_row():
    rows = [{"part": "A1", "what": "it joins", "figures": {"a": {"b": 1, "c": None}},
             "passed": True},
            {"part": "B6", "what": "", "figures": {}, "passed": False, "error": "what | was wrong"}]

    _, _, first, second = gpu.table(rows).splitlines()

    assert first == "| A1 | it joins | a (b 1) | yes |"
    assert second == "| B6 |  | error what / was wrong | no |"


def test_both_files_know_the_same_parts():
    assert set(gpu.PARTS) == set(gpu_parts.PARTS)


def test_the_pack_has_what_main_py_needs_beside_torch():
    names = {line.split("==")[0] for line in gpu.pinned("3.12")}

    assert {"transformers", "tokenizers", "huggingface-hub", "pydantic-core", "peft", "accelerate",
            "psutil", "python-dotenv", "pyyaml"} <= names
    assert not names & {"torch", "numpy", "safetensors", "datasets", "pyarrow", "sympy"}
