"""The folder of a run: what is saved in it, and how a run resumes from there."""

import copy
import fcntl
import json
import os
import shutil
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from machinery import disk, on_ctrl_c
from machinery.advice import OUT_OF_RANGE
from machinery.batches import DUMMY_ANSWER
from machinery.errors import UserError, as_user_error
from machinery.experiment import compare_settings
from machinery.ranks import LOCAL_RANK, RANK, WORLD_SIZE, errors_on_all_ranks, max_over_ranks
from machinery.settings import Config, default_run_name, flatten
from machinery.sharding import fill, gathered

GROWING_FILES = ("metrics.jsonl", "samples.jsonl")
KEPT_CHECKPOINTS = 2
BYTES_OF_A_FILE = 2 * 10**9  # While saving, so much or one tensor is in the computer's RAM.


class RunFolder:
    """runs/<name>, with checkpoints/step-NNNNNN and the link best. Rank 0 writes to it.

    However a run was interrupted, the same command starts it again from its newest checkpoint. All
    that was written after that checkpoint is cut off, and then written again."""

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.run.dir) / (config.run.name or default_run_name(config))
        self.checkpoint: disk.Checkpoint | None = None  # what this start resumes from
        self.saved: Path | None = None  # the newest checkpoint
        self.notes: list[str] = []  # for the user, about this start
        self.started = time.monotonic()
        self.lock: TextIO | None = None

    def __enter__(self) -> Self:
        with errors_on_all_ranks():
            if RANK == 0:
                self.lock = self.take_lock()
                on_ctrl_c(self.describe_saved)
        self.checkpoint = self.find_checkpoint()
        if self.checkpoint is not None:
            with errors_on_all_ranks():
                self.resume_from(self.checkpoint)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.lock is None:
            return
        if not (self.path / "config.yaml").exists():  # The start was refused, and leaves no folder.
            for name in (".lock", *GROWING_FILES):
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # Something else is in the folder.
                self.path.rmdir()
        self.lock.close()

    def take_lock(self) -> TextIO:
        """Returns a file. As long as it is open, the folder belongs to this process."""
        with as_user_error(f"run.dir={self.config.run.dir!r} cannot be written to", (OSError,)):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UserError(f"{self.path} is in use by {lock.read()}: wait for its end, or set "
                                "run.name to another name") from None
            lock.truncate(0)
            print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=lock, flush=True)
        return lock

    def describe_saved(self) -> str:
        if self.saved is None:
            return "nothing is saved yet"
        return f"saved up to {self.saved}; the same command resumes from there"

    def seconds(self) -> float:
        """Returns how long this run has taken so far, earlier starts included."""
        return time.monotonic() - self.started

    def writing(self) -> AbstractContextManager[None]:
        """Turns an error of the disk into one line for the user."""
        return as_user_error(f"{self.path} cannot be written to; what was saved before is intact",
                             (OSError, SafetensorError))

    def write(self, name: str, text: str) -> None:
        with self.writing():
            (self.path / name).write_text(text, encoding="utf-8")

    def append(self, name: str, records: list[dict]) -> None:
        """Adds records to a file of the run, each as one line of JSON."""
        with self.writing(), open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def read(self, name: str) -> list[dict]:
        """Returns the records that `append` has written to a file."""
        records = []
        text = (self.path / name).read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            with suppress(ValueError):  # Someone has damaged this line.
                records.append(json.loads(line))
        return records

    # ------------------------------------------------------------ resuming

    def find_checkpoint(self) -> disk.Checkpoint | None:
        """Returns the newest checkpoint of this run on the disk of any machine, or else the one
        that `run.resume` names. Collective."""
        resume = self.config.run.resume
        offer = None
        with errors_on_all_ranks():
            if LOCAL_RANK == 0:  # One rank looks on the disk of its machine.
                offer = disk.newest_checkpoint(self.path, is_ours=True)
                if offer is None and resume != "auto":
                    offer = disk.newest_checkpoint(Path(resume), is_ours=False)
        offers = [None] * WORLD_SIZE
        dist.all_gather_object(offers, offer)
        found = [offer for offer in offers if offer is not None]
        with errors_on_all_ranks():
            if resume != "auto" and not found:
                raise UserError(
                    f"run.resume={resume!r} is neither a complete checkpoint nor the folder of a "
                    "run that has one, nor auto; to begin anew, set run.name")
        return max(found, key=lambda checkpoint: checkpoint.state["step"], default=None)

    def resume_from(self, checkpoint: disk.Checkpoint) -> None:
        """Refuses a checkpoint of another experiment, and notes what has changed since."""
        state = checkpoint.state
        self.saved = checkpoint.path
        self.notes.append(f"resuming from {checkpoint.path}")
        with as_user_error(f"{checkpoint.path} is of another version: set run.name to begin anew",
                           (KeyError,)):
            self.started -= state["seconds"]
            for change in compare_settings(checkpoint, self.config):
                self.notes.append(f"changed since the checkpoint: {change}")
        if state["num_ranks"] != WORLD_SIZE:
            self.notes.append(f"ranks: {state['num_ranks']} then, {WORLD_SIZE} now, so other "
                              "answers are sampled")
        if state["step"] >= self.config.training.max_steps:
            self.notes.append("this run has finished before: raise training.max_steps, or set "
                              "run.name to begin anew")

    def restore(self, run: Any) -> None:
        """Puts a run that is at its beginning where its checkpoint left it. Collective."""
        if self.checkpoint is not None:
            self.load_tensors(run, self.checkpoint)
            run.step = self.checkpoint.state["step"]
            run.last_evaluation = self.checkpoint.state["last_evaluation"]
        num_damaged = 0
        with errors_on_all_ranks(), self.writing():
            if RANK == 0:
                num_damaged = self.restore_files(run)
        if max_over_ranks({"damaged": num_damaged})["damaged"] > 0:
            run.last_evaluation = None  # A run that has finished is evaluated once more.

    def load_tensors(self, run: Any, checkpoint: disk.Checkpoint) -> None:
        """One rank reads the tensors and gives them to the others. Collective."""
        is_reader = RANK == checkpoint.rank
        with as_user_error(f"{checkpoint.path} does not fit the model {self.config.model.name!r}, "
                           "or cannot be read"):
            files = disk.open_tensors(checkpoint) if is_reader else {}
            for name, tensor in state_tensors(run.model, run.optimizer).items():
                values = files[name].get_tensor(name) if is_reader else None
                fill(tensor, checkpoint.rank, values)

    def restore_files(self, run: Any) -> int:
        """Cuts off what was written after the checkpoint, or everything if there is none. Returns
        how many files have lost a part of what was written before."""
        sizes = dict.fromkeys(GROWING_FILES, 0)
        if self.checkpoint is not None:
            sizes = self.checkpoint.state["bytes"]
            origin = self.checkpoint.path.parent.parent
            if origin.resolve() == self.path.resolve():
                self.restore_best(run, self.checkpoint)
            else:  # This run branches from another one. It has its history, but no best/ yet.
                for name in GROWING_FILES:
                    if (origin / name).exists():
                        shutil.copyfile(origin / name, self.path / name)
        num_damaged = 0
        for name in GROWING_FILES:
            with open(self.path / name, "ab+") as file:
                size = sizes[name]
                if file.tell() < size:
                    self.notes.append(f"warning: {file.name} has lost a part")
                    num_damaged += 1
                    file.seek(0)
                    size = file.read().rfind(b"\n") + 1  # whole lines
                file.truncate(size)
        return num_damaged

    def restore_best(self, run: Any, checkpoint: disk.Checkpoint) -> None:
        """Sets how good the model in best/ is."""
        best = self.path / "best"
        folders = disk.numbered_folders(self.path, "best")
        if folders and not best.exists():  # Some tools do not copy links.
            self.link_best(folders[0])
        if best.exists():
            run.best = tuple(checkpoint.state["best"])
        else:
            self.notes.append(f"warning: {best} is missing; the next evaluation makes another")

    # ------------------------------------------------------------ saving

    def save(self, run: Any) -> None:
        """Saves all that resuming needs. Random numbers have no state. Collective."""
        with errors_on_all_ranks(), torch.no_grad():
            log_probs, _ = run.policy.module([DUMMY_ANSWER])
            if not log_probs.isfinite().all():
                raise UserError(f"after step {run.step} {OUT_OF_RANGE}")
        parts = gathered(state_tensors(run.model, run.optimizer), BYTES_OF_A_FILE)
        if RANK != 0:
            list(parts)  # There are no parts on this rank, but it helps to gather them.
            return
        path = self.path / "checkpoints" / f"step-{run.step:06d}"
        with self.writing():
            with disk.appearing(path) as folder:
                for number, part in enumerate(parts, start=1):
                    save_file(part, folder / f"tensors-{number}.safetensors")
                state = {
                    "step": run.step,
                    "best": run.best,
                    "last_evaluation": run.last_evaluation,
                    "num_ranks": WORLD_SIZE,
                    "config": flatten(self.config),
                    "tokens_per_micro_batch": run.config.training.tokens_per_micro_batch,
                    "seconds": self.seconds(),
                    "bytes": self.sync_growing_files(),
                    "files": sorted(os.listdir(folder)),
                }
                (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            self.saved = path
            for old in disk.numbered_folders(path.parent, "step")[KEPT_CHECKPOINTS:]:
                shutil.rmtree(old)

    def sync_growing_files(self) -> dict[str, int]:
        """Returns how long the files are that grow, once so much of them is on the disk."""
        sizes = {}
        for name in GROWING_FILES:
            with open(self.path / name, "ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    def save_best(self, run: Any, card: str) -> None:
        """Saves the model for `from_pretrained`, and lets the link best point to it. Rank 0 alone
        does this, because the sampler, which was evaluated, is never sharded."""
        old_folders = disk.numbered_folders(self.path, "best")
        path = self.path / f"best-{run.step:06d}"
        while path.exists():  # A process that was killed before it saved this step has left it.
            path = path.with_name(f"{path.name}-2")
        model = copy.copy(run.sampler)
        model.generation_config = run.model.generation_config
        with self.writing():
            with disk.appearing(path) as folder:
                model.save_pretrained(folder, max_shard_size=BYTES_OF_A_FILE)
                run.tokenizer.save_pretrained(folder)
                (folder / "README.md").write_text(card, encoding="utf-8")
            self.link_best(path)
            for old in old_folders:
                shutil.rmtree(old, ignore_errors=True)

    def link_best(self, folder: Path) -> None:
        """Lets the link best point to this folder. There is no moment without a link."""
        best = self.path / "best"
        if best.is_dir() and not best.is_symlink():  # Some tools copy a link as a folder.
            best.rename(self.path / f"copy-of-{folder.name}")
        link = self.path / "best.unfinished"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(best)


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Returns the weights that learn, and the optimizer state of each, like "lm_head/exp_avg"."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:  # A frozen weight is not.
            tensors[name] = parameter.data
            for key, value in optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
    return tensors
