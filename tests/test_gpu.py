"""The driver of the measurements on a GPU: whatever becomes of a part, it leaves its row, and the
next one runs. (The parts themselves: `bench/gpu.py --small`, in .ci/run.)"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import ROOT, run

sys.path.append(str(ROOT / "bench"))
import gpu

PARTS_THAT_FAIL = '''\
import os, signal, subprocess, sys
name = sys.argv[1]
print("no figure", '{"told": {"by": 1.5}}', sep="\\n", flush=True)
if name == "raises":
    raise ValueError("what was wrong")
if name == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                     stdout=open(os.environ.get("ALIVE", os.devnull), "w"))
    signal.pause()
if name == "kills itself":
    os.kill(os.getpid(), signal.SIGKILL)
print('{"small": %s}' % str("--small" in sys.argv).lower())
'''
FIGURES = {"told": {"by": 1.5}}


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS_THAT_FAIL)
    return tmp_path / "parts.py"


def rows_of(path) -> dict[str, dict]:
    return {row["part"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_a_part_that_raises_hangs_or_dies_leaves_its_row_and_the_next_one_runs(
        script, tmp_path, capsys, monkeypatch):
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("ALIVE", str(tmp_path / "alive"))
    names = ("raises", "hangs", "kills itself", "is well")
    parts = {name: gpu.Part("A", f"it {name}", 3 if name == "hangs" else 100) for name in names}
    out = tmp_path / "gpu.jsonl"
    assert not gpu.measure(parts, 60, out=out, script=script)
    rows = rows_of(out)
    assert list(rows) == list(names)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*rows.values()]
    for name, error in (("raises", "exit code 1: .*ValueError: what was wrong"),
                        ("hangs", "not through after 3 s"), ("kills itself", "SIGKILL")):
        row = rows[name]
        assert not row["passed"] and re.match(error, row["error"]), row
        # what it had found out by then
        assert row["figures"].items() >= FIGURES.items() and row["what"] == f"it {name}"
    assert 3 <= rows["hangs"]["seconds"] < 30
    os.set_blocking(alive, True)
    assert os.read(alive, 1) == b""  # once what it had started has ended with it
    os.close(alive)
    assert rows["is well"]["passed"] and "error" not in rows["is well"]
    assert rows["is well"]["figures"] == {**FIGURES, "small": False}


def test_a_call_ends_inside_its_minutes_with_a_row_for_what_it_did_not_come_to(script, tmp_path):
    parts = {name: gpu.Part("A", name, 100) for name in ("hangs", "is well")}
    out, started, seconds = tmp_path / "gpu.jsonl", time.monotonic(), gpu.SECONDS_TO_END + 2
    assert not gpu.measure(parts, seconds / 60, out=out, script=script)
    assert time.monotonic() - started < seconds
    rows = rows_of(out)
    assert rows["hangs"]["error"].startswith("not through after 2 s")
    assert rows["is well"]["error"] == "the minutes of the call were over"


def test_when_all_is_well_the_call_says_so(script, tmp_path):
    parts = {"is well": gpu.Part("A", "all", 100)}
    assert gpu.measure(parts, 60, small=True, script=script)
    assert list(tmp_path.iterdir()) == [script]  # a rehearsal leaves nothing unless asked to


def test_the_table_has_each_row_and_the_page_the_same_head(tmp_path):
    rows = [{"part": "A1", "what": "one thing " * 8, "passed": True, "seconds": 1.0,
             "figures": {"a": {"b": 1.5, "c": None, "d": [1]}}},
            {"part": "B6", "what": "another", "figures": {f"figure {i}": i for i in range(30)},
             "passed": False, "seconds": 2.0, "error": "it failed"}]
    path = tmp_path / "gpu.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(sys.executable, ROOT / "bench" / "gpu.py", "--table", path)
    assert result.returncode == 0, result.stderr
    head, _, *lines = result.stdout.splitlines()
    assert f"{head}\n| --- " in (ROOT / "bench" / "README.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(each) == 4 for each in cells) and max(map(len, lines)) <= 100
    assert [(each[0], each[3]) for each in cells if each[0]] == [("A1", "yes"), ("B6", "no")]
    told = " ".join(each[2] for each in cells)
    assert "a: b 1.5, d [1]" in told and "figure 29 29; error it failed" in told


def test_every_part_is_known_to_both_files_and_belongs_to_a_call():
    source = (ROOT / "bench" / "gpu_parts.py").read_text()
    known = set(re.findall(r'"(\w+)": [a-z]\w+', source[source.index("\nPARTS = "):]))
    assert set(gpu.PARTS) == known & {*gpu.PARTS} and len(gpu.PARTS) == 13
    for call, minutes in gpu.MINUTES.items():
        numbers = [name for name, part in gpu.PARTS.items() if part.call == call]
        assert len(numbers) >= 3 and all(name[0] == call for name in numbers)
        assert 0 < minutes < 10


def test_the_pack_holds_what_main_py_needs_beside_torch_and_names_no_host():
    lines = gpu.pinned("3.12")
    names = {gpu.plain_name(line.split("==")[0]) for line in lines}
    assert set(lines) <= set((ROOT / "requirements.txt").read_text().splitlines())
    assert {"transformers", "tokenizers", "huggingface-hub", "pydantic-core", "peft", "accelerate",
            "psutil", "tqdm", "python-dotenv", "pyyaml", "regex"} <= names
    assert not names & {"torch", "numpy", "safetensors", "datasets", "pyarrow", "sympy"}
    for name in ("gpu.py", "gpu_parts.py"):
        source = (ROOT / "bench" / name).read_text()
        assert not re.search(r"https?:|index-url|find-links|pypi|\.(org|com|net)\b", source)


def test_a_call_that_is_told_to_stop_takes_its_part_along(tmp_path):
    """As a machine's own limit may do."""
    script, pipe = tmp_path / "parts.py", tmp_path / "told"
    os.mkfifo(pipe)
    script.write_text(f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); "
                      "signal.pause()")
    call = f"import gpu, pathlib; gpu.main(['--small'], pathlib.Path({str(script)!r}))"
    process = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT / "bench")
    part = int(pipe.read_text())  # waits for it
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    with pytest.raises(ProcessLookupError):
        os.kill(part, 0)


def test_where_not_even_the_machine_can_be_told_nothing_else_is_tried(tmp_path):
    script, out = tmp_path / "parts.py", tmp_path / "gpu.jsonl"
    script.write_text("raise SystemExit('there is no GPU here')")
    with pytest.raises(SystemExit) as end:
        gpu.main(["A", "--out", str(out)], script)
    assert end.value.code == 1
    assert "there is no GPU here" in rows_of(out)["machine"]["error"] and len(rows_of(out)) == 1
