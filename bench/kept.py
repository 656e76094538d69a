"""What takes long is kept as it ends, one line each in a JSON file, and not run again."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, known: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(title)}: {json.dumps(found)}" for title, found in known.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run_missing(path: Path, wanted: dict, work: Callable, at_once: int, told: Callable) -> dict:
    """All that is known, once `work` has been done on each wanted value whose title is not in the
    file; a line for each says what is `told` of what it has found."""
    known = read(path)
    missing = [title for title in wanted if title not in known]
    with ThreadPoolExecutor(at_once) as pool:
        for title, found in zip(missing, pool.map(lambda title: work(wanted[title]), missing)):
            known[title] = found
            write(path, known)
            print(f"{title}: {told(found)}", flush=True)
    return known
