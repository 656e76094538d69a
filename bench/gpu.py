"""Measures on the first GPU what we most need to know. The first minutes tell the most.

    .venv/bin/python bench/gpu.py A        is it right: six minutes
    .venv/bin/python bench/gpu.py B        does 3 B fit into 80 GB, how fast is it: nine minutes
    .venv/bin/python bench/gpu.py C        saving, adapters, running out of memory: five minutes
    .venv/bin/python bench/gpu.py A2 A3 B6 --minutes 5    the parts that tell most
    .venv/bin/python bench/gpu.py --table gpu.jsonl       the rows, for bench/README.md
    .venv/bin/python bench/gpu.py --small                 a rehearsal of all of it on a CPU
    .venv/bin/python bench/gpu.py --pack FOLDER           what a machine without network needs

Each part is a process of its own (gpu_parts.py), and its time is limited. So a part that fails,
hangs or breaks CUDA does not stop the next one. As soon as a part ends, its row is in gpu.jsonl,
with its figures and whether they are right."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench" / "gpu_parts.py"


class Part(NamedTuple):
    call: str
    what: str
    seconds: int  # at most


PARTS = {
    "machine": Part("", "the machine and its libraries", 60),
    "A1": Part("A", "ranks join, agree, add up and leave, alone and under torchrun", 60),
    "A2": Part("A", "attention with a mask, against float32", 60),
    "A3": Part("A", "20 steps of the default, bfloat16 and float16, cuDNN off and on", 140),
    "A4": Part("A", "the gradient of one batch against a CPU's in float32", 40),
    "A5": Part("A", "ten steps, kill -9 and resumption", 120),
    "B6": Part("B", "decoding with 3 B, 128 answers of 256 tokens", 90),
    "B9": Part("B", "the library's own generate", 90),
    "B8": Part("B", "3 B with larger chunks, micro-batches and batches of rows", 150),
    "B7": Part("B", "a step of recipes/qwen2.5-3b-grpo.yaml, against the estimate", 400),
    "C12": Part("C", "memory that runs out while sampling and while learning", 60),
    "C11": Part("C", "adapters of rank 32 on 1.5 B in 24 GB", 90),
    "C10": Part("C", "saving and restoring a checkpoint of 3 B", 200),
}
MINUTES = {"A": 6.0, "B": 9.0, "C": 5.0}
SECONDS_TO_END = 5  # A part may need them to end once it is told.
SECONDS_OF_A_REHEARSAL = 300  # The same for every part. The machine may be slow or busy.


# ---------------------------------------------------------------- a call

def end(process: subprocess.Popen) -> None:
    """Ends the process and all that it has started."""
    for deadly in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, deadly)
            process.wait(2)
        except ProcessLookupError:  # None is left.
            return
        except subprocess.TimeoutExpired:
            pass
    process.wait()


def run_part(name: str, part: Part, small: bool, seconds: float, script: Path) -> dict:
    """Returns the row of a part. Its figures are the lines of JSON that it printed before it ended,
    in whatever way it ended."""
    row = {"part": name, "what": part.what, "figures": {}, "passed": False, "seconds": 0.0}
    seconds = min(seconds, SECONDS_OF_A_REHEARSAL if small else part.seconds)
    if seconds < 1:
        row["error"] = "the minutes of the call were over"
        return row
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SECONDS_FOR_THIS_PART": str(seconds)}
    command = [sys.executable, str(script), name]
    if small:
        command.append("--small")
        environment.setdefault("OMP_NUM_THREADS", "1")  # Threads do not help models this small.
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                                   env=environment, start_new_session=True)
        try:
            code = process.wait(seconds)
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            code = None
            how = f"not through after {seconds:.0f} s"
        finally:
            end(process)
        out.seek(0)
        errors.seek(0)
        for line in out:
            if line.startswith("{"):
                row["figures"] |= json.loads(line)
        last_lines = " ".join(errors.read().strip().splitlines()[-3:])
    row["passed"] = code == 0
    row["seconds"] = round(time.monotonic() - started, 1)
    if code != 0:
        row["error"] = f"{how}: {last_lines[-600:]}"
    return row


def measure(parts: dict[str, Part], minutes: float, small: bool = False, out: Path | None = None,
            script: Path = SCRIPT) -> bool:
    """Returns whether all parts have passed."""
    ends = time.monotonic() + 60 * minutes - SECONDS_TO_END
    all_passed = True
    for name, part in parts.items():
        row = run_part(name, part, small, ends - time.monotonic(), script)
        all_passed = all_passed and row["passed"]
        print(json.dumps(row), flush=True)
        if out:
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if name == "machine" and not row["passed"]:
            break  # Nothing else would work either.
    return all_passed


def as_text(value: object) -> str:
    """Shows figures in a cell of a table. What is null is left out."""
    if not isinstance(value, dict):
        return str(value).replace("|", "/")
    shown = []
    for name, each in value.items():
        if isinstance(each, dict):
            shown.append(f"{name} ({as_text(each)})")
        elif each is not None:
            shown.append(f"{name} {as_text(each)}")
    return ", ".join(shown)


def table(rows: list[dict]) -> str:
    lines = ["| part | what | figures | passed |", "| --- | --- | --- | --- |"]
    for row in rows:
        figures = as_text(row["figures"] | {"error": row.get("error")})
        passed = "yes" if row["passed"] else "no"
        lines.append(f"| {row['part']} | {row['what']} | {figures} | {passed} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- for a machine without network

ROOTS = ["transformers", "peft", "accelerate", "pydantic", "python-dotenv", "pyyaml", "tqdm"]
ALREADY_THERE = {"torch", "numpy", "safetensors"}
# The stubs stand for datasets and pyarrow, which are large. They read the questions as JSON.
FILES = {
    "stubs/datasets.py": "load_dataset = None\n",
    "stubs/pyarrow/__init__.py": "",
    "stubs/pyarrow/parquet.py": '''\
import json
from pathlib import Path


class ParquetFile:
    def __init__(self, path):
        self.path = Path(__file__).resolve().parents[2] / Path(path).with_suffix(".jsonl").name

    def read(self):
        return self

    def to_pylist(self):
        return [json.loads(line) for line in self.path.open()]
''',
    "run.sh": '''\
#!/bin/sh
# From the root of a checkout, with a python3 that has torch, numpy and safetensors:
#     sh FOLDER/run.sh A
set -e
pack=$(cd "$(dirname "$0")" && pwd)
if [ ! -e "$pack/site/complete" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade \\
        --target "$pack/site" "$pack"/wheels/*.whl
    touch "$pack/site/complete"
fi
PYTHONPATH="$pack/site:$pack/stubs" exec python3 bench/gpu.py "$@"
''',
}


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(python: str) -> list[str]:
    """Returns name and version of each package that the roots need, as requirements.txt pins it."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    versions = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        versions[plain_name(line.split("==")[0])] = line
    names = set()
    todo = [plain_name(name) for name in ROOTS]
    while todo:
        name = todo.pop()
        if name in names or name in ALREADY_THERE:
            continue
        names.add(name)
        for line in requires(name) or []:
            need = Requirement(line)
            here = {"extra": "", "python_version": python}
            if need.marker is None or need.marker.evaluate(here):
                todo.append(plain_name(need.name))
    return [versions[name] for name in sorted(names)]


def pack(folder: Path, python: str) -> None:
    """Fills the folder with wheels, stubs, the questions, and a script that puts them to use."""
    import pyarrow.parquet

    if folder.exists():  # Two versions of a package would stop the installation.
        sys.exit(f"error: {folder} is there already")
    # pip takes a tag for itself alone, and not for all older ones. "1" runs in most places.
    platforms = []
    for tag in ["1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 40))]:
        platforms += ["--platform", f"manylinux{tag}_{os.uname().machine}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
         "--implementation", "cp", "--python-version", python, "-d", folder / "wheels",
         *platforms, *pinned(python)], check=True)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    questions = pyarrow.parquet.read_table(ROOT / "tiny" / "countdown.parquet").to_pylist()
    lines = [json.dumps(row) + "\n" for row in questions]
    (folder / "countdown.jsonl").write_text("".join(lines))
    print(f"{folder} is complete; on the machine, run sh {folder}/run.sh --small")


def main(arguments: list[str] | None = None, script: Path = SCRIPT) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", help="A, B, C, or parts, like A2 A3 B6")
    parser.add_argument("--small", action="store_true", help="tiny shapes, as a CPU can do them")
    parser.add_argument("--minutes", type=float, help="that the call may take")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="which the packed wheels are for")
    parser.add_argument("--table", type=Path, metavar="gpu.jsonl")
    options = parser.parse_args(arguments)
    if options.pack:
        return pack(options.pack, options.python)
    if options.table:
        return print(table([json.loads(line) for line in options.table.open()]))
    calls = options.calls or list(MINUTES) * options.small
    if not calls or not set(calls) <= {*MINUTES, *PARTS}:
        parser.error(f"which of {', '.join([*MINUTES, *PARTS])}; or --small, --pack or --table")
    parts = {}
    minutes = 0.0
    for name, part in PARTS.items():
        if name == "machine" or name in calls or part.call in calls:
            parts[name] = part
    for call in calls:
        minutes += MINUTES.get(call) or PARTS[call].seconds / 60 + 1
    out = None if options.small else Path("gpu.jsonl")
    # Else a call that is told to stop would leave its part behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(not measure(parts, options.minutes or minutes, options.small, out, script))


if __name__ == "__main__":
    main()
