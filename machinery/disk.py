"""Folders on a disk: complete or absent, and found again."""

import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from machinery.ranks import RANK
from machinery.settings import ROOT


def beside_main(path: str) -> str:
    """Relative paths hold from the working directory, or else from where main.py lies."""
    path = os.path.expanduser(path)
    return str(ROOT / path) if os.path.exists(ROOT / path) and not os.path.exists(path) else path


def find_checkpoints(folder: Path) -> list[Path]:  # the newest first
    found = [path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def newest_checkpoint(folder: Path, is_ours: bool) -> tuple[Path, int, dict] | None:
    """The newest complete one of a run, or `folder` itself if it is one: path, rank, state.json."""
    for path in find_checkpoints(folder) or [folder]:
        with suppress(OSError, ValueError, TypeError, LookupError, SafetensorError):
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            sum([state["step"], state["num_ranks"], state["log"]["seconds"], state["best"][1],
                 state["config"]["training.num_samples_per_step"]])  # all are there, and numbers
            if files_of(path, state) and (not is_ours or path.name == f"step-{state['step']:06d}"):
                return path, RANK, state
        if path != folder and is_ours:
            print(f"warning: {path} is damaged and is set aside")
            with suppress(OSError):  # another machine that shares the folder was quicker
                path.rename(path.with_name(f"damaged-{path.lstat().st_mtime_ns}-{path.name}"))
    return None


def files_of(checkpoint: Path, state: dict) -> dict:
    """The file of each of its tensors, read when asked for. Refuses one missing, cut or garbled."""
    names = state.get("files", ["tensors.safetensors"])  # one was all, before 2026-11-24
    files = [safe_open(checkpoint / name, "pt") for name in names]
    return {tensor: file for file in files for tensor in file.offset_keys()}


@contextmanager
def appearing(path: Path):
    """A folder to write into, which is at `path` once it is complete and on the disk."""
    unfinished = path.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for written in unfinished.iterdir():  # readable by whom the umask lets, as the folder is
            written.chmod(unfinished.stat().st_mode & 0o666)
            sync_to_disk(written)
        sync_to_disk(unfinished)
        unfinished.rename(path)
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk has better use for the space


def sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
