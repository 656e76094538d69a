"""What takes long is kept as soon as it ends, one line each in a JSON file, and isn't run again."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AT_ONCE = 2


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def read_lines(path: Path) -> list[dict]:
    """Returns the objects of a file that has one per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, known: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(title)}: {json.dumps(found)}" for title, found in known.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def keep(path: Path, title: str, found: dict) -> None:
    known = read(path)
    known[title] = found
    write(path, known)
    print(f"{title} is in {path}", flush=True)


def run_missing(path: Path, wanted: dict, work: Callable) -> dict:
    """Does `work` on the wanted values whose titles aren't in the file. Returns everything in it.
    """
    known = read(path)
    missing = []
    for title in wanted:
        if title not in known:
            missing.append(title)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda title: work(wanted[title]), missing)
        for title, found in zip(missing, results):
            keep(path, title, found)
    return read(path)
