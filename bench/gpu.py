"""What to measure on the first GPU, in an order in which the first minutes tell the most.

    .venv/bin/python bench/gpu.py A        is it right: six minutes
    .venv/bin/python bench/gpu.py B        does 3 B fit into 80 GB, how fast is it: nine minutes
    .venv/bin/python bench/gpu.py C        saving, adapters, running out of memory: five minutes
    .venv/bin/python bench/gpu.py A2 A3 B6 --minutes 5    the parts that tell most
    .venv/bin/python bench/gpu.py --table gpu.jsonl       what they have found, for bench/README.md
    .venv/bin/python bench/gpu.py --small                 a rehearsal of all of it on a CPU
    .venv/bin/python bench/gpu.py --pack FOLDER           what a machine without network needs

Each part is a process of its own (gpu_parts.py), with a limit to its seconds: one that fails, hangs
or leaves CUDA broken does not stop the next, and the call ends inside its minutes. Each leaves one
line in gpu.jsonl as soon as it ends: its figures, and whether they are right."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from itertools import zip_longest
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
    "A1": Part("A", "ranks join, agree, add up and part, alone and under torchrun", 60),
    "A2": Part("A", "attention with a mask and with rows that see nothing, against float32", 60),
    "A3": Part("A", "20 steps of the default with cuDNN's attention off and on; bfloat16 and "
                    "float16 in the sampler", 140),
    "A4": Part("A", "the gradient of one batch against a CPU's in float32", 40),
    "A5": Part("A", "ten steps: kill -9 and resumption", 120),
    "B6": Part("B", "decoding with 3 B: 128 rows x 256 tokens", 90),
    "B9": Part("B", "other ways to sample the same", 150),
    "B8": Part("B", "3 B with larger chunks, micro-batches and batches of rows", 150),
    # last, as it takes what is left
    "B7": Part("B", "a step of recipes/qwen2.5-3b-grpo.yaml, against the forecast", 400),
    "C12": Part("C", "memory that runs out while sampling and while learning", 60),
    "C11": Part("C", "adapters of rank 32 on 1.5 B in 24 GB, merged or not to sample", 90),
    "C10": Part("C", "saving and restoring a checkpoint of 3 B", 200),
}
MINUTES = {"A": 6.0, "B": 9.0, "C": 5.0}
SECONDS_TO_END = 5  # of a call's, for what a part needs to end once it is told


# ---------------------------------------------------------------- a call

def end(process: subprocess.Popen) -> None:
    """With all that it has started."""
    for deadly in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, deadly)
            process.wait(2)
        except ProcessLookupError:  # there is none left
            return
        except subprocess.TimeoutExpired:
            pass
    process.wait()


def run_part(name: str, part: Part, small: bool, seconds: float, script: Path) -> dict:
    """Its row. The figures of a part are the lines of JSON that it has said, however it ended."""
    row = {"part": name, "what": part.what, "figures": {}, "passed": False}
    # A rehearsal may be on any machine, however slow and busy.
    seconds, started = min(seconds, 300 if small else part.seconds), time.monotonic()
    if seconds < 1:
        return {**row, "seconds": 0.0, "error": "the minutes of the call were over"}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SECONDS_FOR_THIS_PART": str(seconds)}
    if small:  # models this small lose by sharing their work among threads
        environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), name, *["--small"] * small], stdin=subprocess.DEVNULL,
            stdout=out, stderr=errors, env=environment, start_new_session=True)
        try:
            code = process.wait(seconds)
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        except subprocess.TimeoutExpired:
            code, how = None, f"not through after {seconds:.0f} s"
        finally:
            end(process)
        out.seek(0)
        errors.seek(0)
        for line in out:
            if line.startswith("{"):
                row["figures"] |= json.loads(line)
        said = " ".join(errors.read().strip().splitlines()[-3:])
    row |= {"passed": code == 0, "seconds": round(time.monotonic() - started, 1)}
    return row if code == 0 else {**row, "error": f"{how}: {said[-600:]}"}


def measure(parts: dict[str, Part], minutes: float, small: bool = False, out: Path | None = None,
            script: Path = SCRIPT) -> bool:
    """Whether all has passed."""
    ends = time.monotonic() + 60 * minutes - SECONDS_TO_END
    passed = True
    for name, part in parts.items():
        row = run_part(name, part, small, ends - time.monotonic(), script)
        passed &= row["passed"]
        print(json.dumps(row), flush=True)
        if out:
            with open(out, "a", encoding="utf-8") as file:
                print(json.dumps(row), file=file, flush=True)
                os.fsync(file.fileno())
        if name == "machine" and not row["passed"]:  # nor would anything else
            break
    return passed


def table(rows: list[dict]) -> str:
    """Of Markdown, whose lines are as wide as all others: a row may take several."""
    lines = ["| part | what | figures | passed |", "| --- | --- | --- | --- |"]

    def shown(value, between=", ") -> str:
        if not isinstance(value, dict):
            return str(value).replace("|", "/")
        return between.join(f"{name}{':' * isinstance(each, dict)} {shown(each)}"
                            for name, each in value.items() if each is not None)

    for row in rows:
        told = row["figures"] | ({"error": row["error"]} if "error" in row else {})
        cells = [[row["part"]], textwrap.wrap(row["what"], 26),
                 textwrap.wrap(shown(told, "; "), 50), ["yes" if row["passed"] else "no"]]
        lines += [f"| {' | '.join(each)} |" for each in zip_longest(*cells, fillvalue="")]
    return "\n".join(lines)


# ---------------------------------------------------------------- for a machine without network

ROOTS = ["transformers", "peft", "accelerate", "pydantic", "python-dotenv", "pyyaml", "tqdm"]
THERE = {"torch", "numpy", "safetensors"}  # with what they bring along
MOST_MIB = 64
STUBS = {
    "datasets/datasets.py": '''\
def load_dataset(*arguments, **named):
    raise ImportError("this is no more than a name: take a .jsonl file as data.dataset")
''',
    "pyarrow/pyarrow/__init__.py": "",
    "pyarrow/pyarrow/parquet.py": '''\
"""Reads what the pack has as lines of JSON under the same name, and no real .parquet file."""
import json
from pathlib import Path


class ParquetFile:
    def __init__(self, path):
        pack = Path(__file__).resolve().parents[3]
        self.lines = (pack / Path(path).with_suffix(".jsonl").name).read_text().splitlines()

    def read(self):
        return self

    def to_pylist(self):
        return [json.loads(line) for line in self.lines]
''',
    "../run.sh": '''\
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
export PYTHONPATH="$pack/site"
for name in datasets pyarrow; do
    python3 -c "import $name" 2> /dev/null || PYTHONPATH="$PYTHONPATH:$pack/stubs/$name"
done
exec python3 bench/gpu.py "$@"
''',
}


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(python: str) -> list[str]:
    """Name and version of each package that the roots need, as requirements.txt pins them."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.txt").read_text().splitlines()
    versions = {plain_name(line.split("==")[0]): line for line in lines if "==" in line}
    names, todo = set(), [plain_name(name) for name in ROOTS]
    while todo:
        name = todo.pop()
        if name not in names | THERE:
            names.add(name)
            needs = map(Requirement, requires(name) or [])
            todo += [plain_name(need.name) for need in needs if not need.marker
                     or need.marker.evaluate({"extra": "", "python_version": python})]
    return [versions[name] for name in sorted(names)]


def pack(folder: Path, python: str) -> None:
    """Wheels, stand-ins for what is only imported, the questions, and what puts them to use."""
    import pyarrow.parquet

    if folder.exists():  # two versions of a package would stop the installation
        sys.exit(f"error: {folder} is there already")
    kind = os.uname().machine
    # pip takes a tag for itself alone, not for all older ones. The first ones run in most places.
    tags = ["1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 40))]
    subprocess.run([
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", python, "-d", folder / "wheels",
        *(word for tag in tags for word in ("--platform", f"manylinux{tag}_{kind}")),
        *pinned(python)], check=True)
    for name, text in STUBS.items():
        path = folder / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rows = pyarrow.parquet.ParquetFile(ROOT / "tiny" / "countdown.parquet").read().to_pylist()
    (folder / "countdown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    size = f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB, for Python {python}"
    if sum(sizes) > MOST_MIB * 2**20:
        sys.exit(f"error: {size}, more than {MOST_MIB}")
    print(f"{folder}: {size}; there, from the root of a checkout: sh {folder}/run.sh --small")


def main(arguments: list[str] | None = None, script: Path = SCRIPT) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", help="A, B, C, or parts, like A2 A3 B6")
    parser.add_argument("--small", action="store_true", help="tiny shapes, as a CPU can do them")
    parser.add_argument("--out", type=Path, help="gpu.jsonl; with --small nowhere")
    parser.add_argument("--minutes", type=float, help="that the call may take")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}",
                        help="which the packed wheels are for")
    parser.add_argument("--table", type=Path, metavar="gpu.jsonl")
    options = parser.parse_args(arguments)
    if options.pack:
        pack(options.pack, options.python)
    elif options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
    elif (options.calls or options.small) and set(options.calls) <= {*MINUTES, *PARTS}:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or its part would outlive it
        calls = options.calls or ["A", "B", "C"]
        parts = {name: part for name, part in PARTS.items()
                 if name == "machine" or {name, part.call} & {*calls}}
        minutes = options.minutes or sum(MINUTES.get(each) or PARTS[each].seconds / 60 + 1
                                         for each in calls)
        out = options.out or (None if options.small else Path("gpu.jsonl"))
        sys.exit(not measure(parts, minutes, options.small, out, script))
    else:
        parser.error(f"which of {', '.join([*MINUTES, *PARTS])}; or --small, --pack or --table")


if __name__ == "__main__":
    main()
