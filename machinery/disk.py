"""Folders on a disk: complete or absent, found again, and never mistaken for a user's own."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from machinery.errors import UserError
from machinery.ranks import RANK
from machinery.settings import ROOT


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    rank: int  # a rank that can read it: machines need not share a disk
    state: dict[str, Any]  # what its state.json holds


def beside_main(path: str) -> str:
    """Returns a path that starts in the working directory, or else in the folder of main.py."""
    path = os.path.expanduser(path)
    if os.path.exists(ROOT / path) and not os.path.exists(path):
        return str(ROOT / path)
    return path


def numbered_folders(parent: Path, word: str) -> list[Path]:
    """Returns the folders that we have named, like step-000012, the newest first. A user's own
    folders, like best-mine, are not among them."""
    pattern = re.compile(rf"{word}-\d{{6,7}}(-2)*")
    folders = [path for path in parent.glob(f"{word}-*") if pattern.fullmatch(path.name)]
    return sorted(folders, key=lambda path: (len(path.name), path.name), reverse=True)


def newest_checkpoint(run_folder: Path, is_ours: bool) -> Checkpoint | None:
    """Returns the newest complete checkpoint of a run, or of the folder itself if it is one. In a
    run of ours, damaged checkpoints that are newer are renamed."""
    damaged = []
    for path in numbered_folders(run_folder / "checkpoints", "step"):
        checkpoint = read_checkpoint(path)
        if checkpoint is None:
            damaged.append(path)
            continue
        for newer in damaged if is_ours else []:
            print(f"warning: {newer} is damaged and is set aside")
            with suppress(OSError):  # Another machine that shares the folder was quicker.
                newer.rename(newer.with_name(f"damaged-{time.time_ns()}-{newer.name}"))
        return checkpoint
    if damaged:
        raise UserError(f"no checkpoint of {run_folder} can be read: set run.name to begin anew")
    return read_checkpoint(run_folder)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """Returns the checkpoint in a folder, or None if there is none or it is damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, SafetensorError):
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        checkpoint = Checkpoint(path, RANK, state)
        open_tensors(checkpoint)
        return checkpoint
    return None


def open_tensors(checkpoint: Checkpoint) -> dict[str, safe_open]:
    """Returns the file of each tensor. A file that is missing, cut or garbled is an error."""
    file_of = {}
    for file_name in checkpoint.state["files"]:
        file = safe_open(checkpoint.path / file_name, "pt")
        for tensor_name in file.offset_keys():
            file_of[tensor_name] = file
    return file_of


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yields a folder to write into. It is at `path` once it is complete and on the disk."""
    unfinished = path.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        mode = unfinished.stat().st_mode & 0o666  # Some libraries do not ask the umask.
        for written in unfinished.rglob("*"):
            if written.is_file():
                written.chmod(mode)
                sync_to_disk(written)
        sync_to_disk(unfinished)
        unfinished.rename(path)
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # After an error, the disk may be full.


def sync_to_disk(path: Path) -> None:
    """Waits until what was written to this file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
