"""The folder of a run: what is saved in it, and how a run resumes from there.

A checkpoint is complete or absent. Whatever has interrupted a run, starting it again is the only
way to recover. Everything written after the checkpoint is cut off and then written again. A new run
saves its first checkpoint before anything else, and at step 0 it needs no tensors. So a folder with
other files but without a checkpoint isn't ours, or isn't a whole run, and is refused."""

import copy
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from machinery.code import MAIN, TASK, Code, changed_files, digest_of
from machinery.errors import OUT_OF_RANGE, SharedError, UserError, as_user_error
from machinery.ranks import DEVICE, RANK, errors_on_all_ranks, gather
from machinery.settings import VERSION, Config, default_run_name, experiment, flatten
from machinery.sharding import fill, gathered
from machinery.tasks import describe_data

# How a run begins. No evaluation is worse than this best one.
NEW = {"step": 0, "best": [-1.0, -1.0], "last_evaluation": None, "own_state": {}}
GROWING_FILES = ("metrics.jsonl", "samples.jsonl")
FILES = ("config.yaml", MAIN, TASK, *GROWING_FILES, "curves.png", "summary.json")
MODELS = ("best", "last")  # folders for `from_pretrained`
TRAINER = "version of this trainer"
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # torchrun and Slurm count them.
STEP = r"step-\d{6,7}"  # a checkpoint's name
KEPT_CHECKPOINTS = 2
BYTES_OF_A_FILE = 2 * 10**9  # While saving, this much (or one tensor) is in RAM.


class RunFolder:
    """runs/<name>, with checkpoints/step-NNNNNN and the models best and last. Rank 0 reads and
    writes it."""

    def __init__(self, config: Config, code: Code):
        self.config = config
        self.code = code
        self.code_digest = digest_of(code.texts)
        name = config.run.name or default_run_name(config, self.code_digest)
        self.path = Path(config.run.dir).expanduser() / name
        self.checkpoint: Path | None = None  # what this start resumes from
        self.state: dict[str, Any] = {}      # what its state.json says
        self.code_changed: list[str] = []    # files that differ from those at the checkpoint
        self.data: dict[str, Any] = {}       # what `describe_data` says about the rows
        self.started = time.monotonic()
        self.lock: TextIO | None = None

    def __enter__(self) -> Self:
        """Claims the folder, and finds the newest checkpoint in it. Collective."""
        refuse_different_ranks(self.code_digest + self.code.trainer, self.config)
        steps = gather(newest_step(self.path))
        with errors_on_all_ranks():
            if RANK == 0:
                self.refuse_newer_elsewhere(steps)
                if self.config.run.name is None and not self.path.exists():
                    self.refuse_to_start_over()
                refuse_links(self.path)
                self.lock = self.take_lock()
                self.checkpoint = newest_checkpoint(self.path)
                if self.checkpoint is not None:
                    self.state = read_state(self.checkpoint)
                    refuse_differences(self.path, self.state.get("experiment", {}),
                                       experiment(self.config))
                    self.refuse_other_code()
                    if self.state.get("trainer") != self.code.trainer:
                        self.code_changed.append("trainer (machinery/ or logger.py)")
        self.checkpoint, self.state = gather((self.checkpoint, self.state))[0]
        self.started -= self.state.get("seconds", 0)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.lock is not None:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # A task's process may still have it open.
            self.lock.close()

    def refuse_newer_elsewhere(self, steps: list[int]) -> None:
        """Refuses to start if another machine has a newer checkpoint than rank 0, because there's
        no shared disk and a different machine came first after a restart. `steps` has the step of
        each rank's newest checkpoint."""
        if max(steps) > steps[0]:
            raise UserError(
                f"rank {steps.index(max(steps))} has a checkpoint from step {max(steps)} in "
                f"{self.path}, but rank 0 does not. Set run.dir to a folder that all machines "
                f"share, or copy {self.path} to rank 0's machine. If the newer checkpoint is "
                "damaged, delete it from the machine that has it")

    def refuse_to_start_over(self) -> None:
        """Refuses an automatic restart that would begin a new run, because somebody has edited the
        code in the meantime. The run that was interrupted would stay where it is."""
        if {os.environ.get(name, "0") for name in RESTARTS} == {"0"}:
            return
        for path, step, names in self.relatives():
            if names and step < self.config.training.max_steps:
                raise UserError(
                    f"this is an automatic restart, but it would begin a new run: {path}, at step "
                    f"{step}, has the same settings and a different {' and '.join(names)}. To "
                    "resume that run, undo the edit. To begin a new one, start it by hand")

    def take_lock(self) -> TextIO:
        """Returns a file. The folder belongs to this process as long as the file is open."""
        with as_user_error(f"run.dir={self.config.run.dir!r} cannot be written to", (OSError,)):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a", encoding="utf-8")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path} is in use by another process: wait for that process "
                                "to finish, or set run.name to another name") from None
        return lock

    def refuse_other_code(self) -> None:
        """Refuses code that didn't make this run, unless the user has accepted exactly this code.
        """
        then = self.state["code"]
        self.code_changed = changed_files(then, self.code.texts)
        if not self.code_changed or self.config.run.code == self.code_digest:
            return
        self.write_code(then)  # A start that was killed may have left newer code there.
        names = " and ".join(self.code_changed)
        commands = []
        for name in self.code_changed:
            commands.append(f"diff {self.path / name} {self.code.paths[name]}")
        raise UserError(
            f"{self.path} was made with a different {names}, up to step {self.state['step']}. To "
            f"see the difference, run {' and '.join(commands)}. To start over, set run.name to "
            f"another name. To continue with this code anyway, add run.code={self.code_digest}")

    def write_code(self, texts: dict[str, str]) -> None:
        for name in (MAIN, TASK):
            self.write(name, texts[name])

    def check_data(
        self, training: list[dict], validation: list[dict],
        model: nn.Module, teacher: nn.Module | None
    ) -> None:
        """Refuses questions, a teacher or frozen weights that differ from those on other ranks, or
        from those that the run began with. Collective."""
        self.data = describe_data(training, validation)
        weights = self.state.get("data", {}).get("weights of model.name")
        if self.state.get("step", 0) == 0:  # Later, the checkpoint has the weights that learn.
            weights = checksum(model.parameters())
        self.data["weights of model.name"] = weights
        self.data["frozen weights of model.name"] = checksum(fixed_weights(model, self.config))
        if teacher is not None:
            self.data["weights of training.teacher"] = checksum(teacher.parameters())
        if any(data != self.data for data in gather(self.data)):
            raise SharedError(f"task.name={self.config.task.name!r}: load returns different rows, "
                              "or a different order, on different ranks (or the ranks have "
                              "different models): make them the same on all ranks")
        refuse_differences(self.path, self.state.get("data", self.data), self.data)

    def relatives(self) -> list[tuple[Path, int, list[str]]]:
        """Returns the other runs with the same settings, newest first: the folder, the step of its
        checkpoint, and what is different there."""
        found = []
        now = experiment(self.config)
        for checkpoints in self.path.parent.glob("*/checkpoints"):
            # Its run may be saving right now, or this Python can't read its code.
            with suppress(OSError, ValueError, LookupError, SyntaxError, TypeError, AttributeError):
                [newest, *_] = newest_first(checkpoints)
                state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
                then = {key: state["experiment"].get(key) for key in now}  # Older ones have more.
                if then | {"version": VERSION} == now and checkpoints.parent != self.path:
                    names = changed_files(state["code"], self.code.texts)
                    if then != now:
                        names.append(TRAINER)
                    found.append((newest.stat().st_mtime, checkpoints.parent, state["step"], names))
        return [tuple(relative) for _, *relative in sorted(found, reverse=True)]

    def seconds(self) -> float:
        """Returns how long this run has taken so far, earlier starts included."""
        return time.monotonic() - self.started

    # ------------------------------------------------------------ files

    def writing(self) -> AbstractContextManager[None]:
        """Turns a disk error into one line for the user."""
        return as_user_error(f"{self.path} cannot be written to; everything saved before is intact",
                             (OSError, SafetensorError))

    def write(self, name: str, text: str) -> None:
        with self.writing():
            (self.path / name).write_text(text, encoding="utf-8")

    def append(self, name: str, records: list[dict]) -> None:
        """Adds records to a file of the run, one line of JSON each."""
        with self.writing(), open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def cut_growing_files(self, sizes: dict[str, int]) -> None:
        """Cuts the growing files back to the sizes they had at the checkpoint."""
        for name in GROWING_FILES:
            with open(self.path / name, "ab") as file:
                if file.tell() < sizes[name]:
                    raise UserError(f"{file.name} has lost data since the checkpoint was saved: "
                                    "set run.name to another name to start over")
                file.truncate(sizes[name])

    def sync_growing_files(self) -> dict[str, int]:
        """Returns the sizes of the growing files. All of that is on the disk by then."""
        sizes = {}
        for name in GROWING_FILES:
            with open(self.path / name, "ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    # ------------------------------------------------------------ checkpoints

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores a run, or saves step 0 of a new one. Returns the values that NEW names.
        Collective."""
        if self.checkpoint is None:
            self.save(model, optimizer, **NEW)
            if RANK == 0:
                self.write_code(self.code.texts)
            return copy.deepcopy(NEW)
        self.restore_tensors(model, optimizer)
        restored = {name: self.state[name] for name in NEW}
        with errors_on_all_ranks(), self.writing():
            if RANK == 0:
                self.cut_growing_files(self.state["bytes"])
                if self.will_change():
                    self.write_code(self.code.texts)
                    if self.code_changed:
                        record = {"step": self.state["step"], "code_changed": self.code_changed}
                        self.append("metrics.jsonl", [record])
                for name in MODELS:
                    self.restore_model(name)
                remove_rubbish(self.path, self.path / "checkpoints")
                if not (self.path / "best").exists():
                    restored["best"] = NEW["best"]  # The next evaluation makes a new one.
        return restored

    def restore_tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills the weights and the optimizer's state from the checkpoint. Collective."""
        tensors = state_tensors(model, optimizer, self.state["step"])
        files = {}
        with errors_on_all_ranks(), as_user_error(
                f"{self.checkpoint} does not match model.name={self.config.model.name!r}, or "
                "cannot be read"):
            if RANK == 0:
                files = open_tensors(self.checkpoint)
                if files.keys() != tensors.keys():
                    raise ValueError("it has the state of other weights")
                for name, tensor in tensors.items():
                    shape = files[name].get_slice(name).get_shape()
                    if shape != list(tensor.shape):
                        raise ValueError(f"{name} has the shape {shape}")
        for name, tensor in tensors.items():
            fill(tensor, files[name].get_tensor(name) if RANK == 0 else None)

    def will_change(self) -> bool:
        """Whether this start trains or evaluates, and so continues the run with its own code."""
        step, last_step = self.state["step"], self.config.training.max_steps
        return step < last_step or (step == last_step and self.state["last_evaluation"] != step)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> None:
        """Saves everything needed to resume. Random numbers have no state. Collective."""
        check_own_state(state["own_state"])
        parts = gathered(state_tensors(model, optimizer, state["step"]), BYTES_OF_A_FILE)
        if RANK != 0:
            list(parts)  # This rank gets no parts, but takes part in gathering them.
            return
        path = self.path / "checkpoints" / f"step-{state['step']:06d}"
        with self.writing():
            state |= {
                "models": {name: step_of(self.path / name) for name in MODELS},
                "experiment": experiment(self.config),
                "code": self.code.texts,
                "trainer": self.code.trainer,
                "data": self.data,
                "seconds": self.seconds(),
                "bytes": self.sync_growing_files(),
            }
            text = json.dumps(state, indent=1)
            if path.exists():  # This step was saved and then evaluated.
                list(parts)
                unfinished = path / "state.unfinished"
                unfinished.write_text(text, encoding="utf-8")
                sync_to_disk(unfinished)
                unfinished.replace(path / "state.json")
                sync_to_disk(path)
            else:
                with appearing(path, throw_away) as folder:
                    for number, part in enumerate(parts, start=1):
                        save_file(part, folder / f"tensors-{number}.safetensors")
                    (folder / "state.json").write_text(text, encoding="utf-8")
            for name in MODELS:  # Its models are the present ones.
                throw_away(before(self.path / name))
            for old in newest_first(self.path / "checkpoints")[KEPT_CHECKPOINTS:]:
                throw_away(old)
            remove_rubbish(self.path, self.path / "checkpoints")

    # ------------------------------------------------------------ the best and the last model

    def save_model(
        self, sampler: Any, generation_config: Any, tokenizer: Any, training: dict[str, Any],
        is_best: bool,
    ) -> None:
        """Saves a model for `from_pretrained` as last/, with training.json, which says how it was
        made. If it's the best, saves a copy as best/. Only rank 0 calls it."""
        model = copy.copy(sampler)
        model.generation_config = generation_config  # The sampler's is empty.
        with self.writing():
            with appearing(self.path / "last", put_aside) as folder:
                model.save_pretrained(folder, max_shard_size=BYTES_OF_A_FILE)
                tokenizer.save_pretrained(folder)
                (folder / "training.json").write_text(json.dumps(training, indent=1))
            if is_best:
                with appearing(self.path / "best", put_aside) as folder:
                    shutil.copytree(self.path / "last", folder, dirs_exist_ok=True)
            remove_rubbish(self.path)

    def restore_model(self, name: str) -> None:
        """Brings back the model that the checkpoint knows, if there's another one instead."""
        path = self.path / name
        step = self.state["models"][name]
        if step_of(path) != step:
            throw_away(path)
            if step is not None and step_of(before(path)) == step:
                before(path).rename(path)
        throw_away(before(path))


# ---------------------------------------------------------------- what a checkpoint holds

def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> dict[str, torch.Tensor]:
    """Returns the weights that learn, and the optimizer state of each, as "norm.weight/exp_avg". At
    step 0 it returns nothing, because every start makes all of that."""
    if step == 0:
        return {}
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:  # A frozen weight isn't.
            tensors[name] = parameter.data
            for key, value in optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
    return tensors


@torch.no_grad()
def check_weights(model: nn.Module, sampler: nn.Module, step: int) -> None:
    """Refuses weights that give no probabilities, and ranks whose weights differ. Collective."""
    with errors_on_all_ranks():
        tokens = torch.arange(16, device=DEVICE)[None]
        if not sampler(input_ids=tokens, use_cache=False).logits.isfinite().all():
            raise UserError(f"after step {step}, {OUT_OF_RANGE}")
    weights = {*model.parameters(), *sampler.parameters()}  # They may share some.
    if len(set(gather(checksum(weights)))) > 1:
        raise SharedError(
            f"after step {step}, the ranks have different weights: either their gradients were not "
            "shared, or the ranks compute differently. This step was not saved")


def check_own_state(own_state: dict[str, Any]) -> None:
    """Refuses a state that a checkpoint wouldn't give back as it is, to every rank. Collective."""
    with errors_on_all_ranks(), as_user_error("own_state cannot be saved as JSON"):
        text = json.dumps(own_state)
        if json.loads(text) != own_state:
            raise UserError("own_state would not come back from a checkpoint as it is: use lists "
                            "instead of tuples, and strings as the keys of dictionaries")
    if any(other != own_state for other in gather(own_state)):
        raise SharedError("the ranks have different values in own_state. A checkpoint keeps those "
                          "of rank 0: compute them from something that all ranks share, for "
                          "example with sum_over_ranks")


def checksum(weights: Iterable[torch.Tensor]) -> int:
    """Returns a sum over these weights, taken as integers, so that no rounding hides a difference.
    Sharded weights are left out, because no other rank has them; the sampler then has all of them.
    """
    total = 0
    for weight in weights:
        if not isinstance(weight, DTensor):
            bits = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)
            # A sum in 64 bits copies what it adds, so it gets a part of a large weight at a time.
            for part in bits.flatten().split(2**24):
                total += int(part.sum(dtype=torch.int64))
    return total


def fixed_weights(model: nn.Module, config: Config) -> list[nn.Parameter]:
    """Returns the weights that no checkpoint has: the frozen ones, such as those below adapters,
    and with a KL penalty those of the reference, which is the model before training."""
    is_reference = config.training.kl_beta > 0 and not config.model.lora_rank
    return [weight for weight in model.parameters() if is_reference or not weight.requires_grad]


# These settings name places, which may differ from machine to machine. What's there is compared
# once it's loaded.
PLACES = ("run.dir", "model.name", "task.name", "data.dataset", "data.validation",
          "training.teacher")


def refuse_different_ranks(code_digest: str, config: Config) -> None:
    """Refuses ranks that run different code or have different settings. Collective."""
    if len(set(gather(code_digest))) > 1:
        raise SharedError("the ranks run different code: make sure that main.py, logger.py, "
                          "machinery/ and the task's file are the same on all machines")
    first, *others = gather(flatten(config))
    different = set()
    for other in others:
        for key in first.keys() | other.keys():
            if key not in PLACES and first.get(key) != other.get(key):
                different.add(key)
    if different:
        raise SharedError(f"the ranks have different settings ({', '.join(sorted(different))}): "
                          "start all of them with the same config file and the same words after "
                          "main.py")


def refuse_differences(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses settings, questions, weights or a version with which this run wasn't made."""
    changes = []
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            name = TRAINER if key == "version" else key
            changes.append(f"{name}: {then.get(key)} -> {now.get(key)}")
    if changes:
        raise SharedError(f"{folder} belongs to a different experiment ({'; '.join(changes)}): "
                          "set run.name to another name to start over")


# ---------------------------------------------------------------- folders on a disk

def refuse_links(folder: Path) -> None:
    """Refuses a folder in which we would write elsewhere: somebody else may have made it."""
    ours = {*FILES, *MODELS, "checkpoints", "unfinished", ".mlflow", ".lock"}
    for parent, folders, files in os.walk(folder):  # It ignores what another process deletes.
        for path in [Path(parent, name) for name in folders + files]:
            top, *_ = path.relative_to(folder).parts
            if path.is_symlink() and top.removesuffix(".before") in ours:
                raise UserError(f"{path} is a link, but a run's folder has to hold its own files: "
                                "put what it points to in its place, or set run.dir to where it "
                                "should be")


def newest_first(checkpoints: Path) -> list[Path]:
    """Returns the checkpoints in a folder. A user's own folders, like step-mine, aren't among them.
    """
    folders = [path for path in checkpoints.glob("step-*") if re.fullmatch(STEP, path.name)]
    return sorted(folders, key=lambda path: (len(path.name), path.name), reverse=True)


def newest_step(run_folder: Path) -> int:
    """Returns the step of the newest checkpoint that this rank sees, or -1."""
    checkpoints = newest_first(run_folder / "checkpoints")
    return int(checkpoints[0].name.removeprefix("step-")) if checkpoints else -1


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Returns None for a new folder. Refuses one with files but without a checkpoint."""
    checkpoints = newest_first(run_folder / "checkpoints")
    if checkpoints:
        return checkpoints[0]
    for path in [run_folder / name for name in (*FILES, *MODELS)]:
        if path.exists() and path.stat().st_size > 0:  # Saving step 0 begins with empty files.
            raise UserError(f"{run_folder} has {path.name}, but no checkpoint to resume from: set "
                            "run.name to another name to start over")
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    with as_user_error(f"{checkpoint} is damaged: delete it to resume from the previous one"):
        return json.loads((checkpoint / "state.json").read_text())


def open_tensors(checkpoint: Path) -> dict[str, safe_open]:
    """Returns the file of each tensor. A truncated or garbled file is an error."""
    file_of = {}
    for path in checkpoint.glob("tensors-*.safetensors"):
        file = safe_open(path, "pt")
        for tensor_name in file.offset_keys():
            file_of[tensor_name] = file
    return file_of


@contextmanager
def appearing(path: Path, make_room: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a folder to write into. It appears at `path` once it's complete and on the disk, and
    `make_room` has taken away what was there."""
    unfinished = path.with_name("unfinished")
    throw_away(unfinished)
    unfinished.mkdir(parents=True)
    yield unfinished
    for written in [*unfinished.rglob("*"), unfinished]:
        sync_to_disk(written)
    make_room(path)
    unfinished.rename(path)
    sync_to_disk(path.parent)


# If `best.before` is there, `best` is newer than the newest checkpoint, and `best.before` is what
# was there when the checkpoint was made. The same goes for `last`.

def before(model: Path) -> Path:
    return model.with_name(f"{model.name}.before")


def put_aside(model: Path) -> None:
    """Makes room for a new model, and keeps the one that the checkpoint knows."""
    if before(model).exists():
        throw_away(model)
    elif model.exists():
        model.rename(before(model))


def step_of(model: Path) -> int | None:
    """Returns the step after which a model was saved, or None if there's no model."""
    path = model / "training.json"
    if not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["step"]


def throw_away(folder: Path) -> None:
    """Frees the folder's name at once, so what has a name that we know is always whole."""
    if folder.exists():
        folder.rename(folder.with_name(f"deleted-{time.time_ns()}"))


def remove_rubbish(*folders: Path) -> None:
    for folder in folders:
        for rubbish in folder.glob("deleted-[0-9]*"):
            shutil.rmtree(rubbish, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Waits until whatever was written to this file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
