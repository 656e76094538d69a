"""The folder of a run: taken by one process, and what a start finds in it and goes on from."""

import copy
import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from machinery.disk import appearing, files_of, find_checkpoints, newest_checkpoint
from machinery.errors import UserError, blame
from machinery.policy import NOTHING
from machinery.ranks import LOCAL_RANK, RANK, WORLD_SIZE, errors_shared
from machinery.settings import ADVICE, FREE_KEYS, Config, default_run_name, flatten
from machinery.sharding import fill, gathered
from machinery.tasks import encode_prompt

NONE_KEPT = (-1e10, -1e10)  # as the quality of what is in best/
BYTES_OF_A_FILE = 2 * 10**9  # or one tensor: so much lies in the machine's memory while it is saved


class RunFolder:
    """runs/<name>, with checkpoints/step-NNNNNN and the link best. Rank 0 writes."""

    def __init__(self, config: Config):
        self.config = config
        self.path = Path(config.run.dir) / (config.run.name or default_run_name(config))

    def __enter__(self):
        with errors_shared():
            self.lock = self._take() if RANK == 0 else None
        with errors_shared():
            self.checkpoint = self._find_checkpoint()  # path, rank that can read it, state.json
            self.saved, *_ = self.checkpoint or [None]
            self.changes = self._compare_settings() if self.checkpoint else []
        return self

    def __exit__(self, kind, error, traceback):
        if error:
            error.folder = self.path  # for `launch`, which leaves there what one line cannot hold
        if self.lock:
            if not (self.path / "config.yaml").exists():  # refused before it began
                (self.path / ".lock").unlink(missing_ok=True)
                with suppress(OSError):  # there was more in it before
                    self.path.rmdir()
            self.lock.close()

    def writing(self):
        return blame(f"{self.path} cannot be written to; what was saved before is intact",
                     (OSError, SafetensorError))

    def _take(self):
        """Ours as long as the returned file is open."""
        with blame(f"run.dir={self.config.run.dir!r} cannot be written to", (OSError,)):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise UserError(f"{self.path} is in use by {lock.read()}: wait for its end, or set "
                                "run.name to another name") from None
            lock.truncate(0)
            for old in self.path.glob("error-*.txt"):
                old.unlink()
            print(f"process {os.getpid()} on {os.uname().nodename}", end="", file=lock, flush=True)
            return lock

    def _find_checkpoint(self) -> tuple[Path, int, dict] | None:
        """The newest complete one on any machine; one of this run's own before `run.resume`."""
        resume, offer, offers = self.config.run.resume, None, [None] * WORLD_SIZE
        if LOCAL_RANK == 0:  # one rank looks for its machine
            offer = newest_checkpoint(self.path, is_ours=True)
            if not offer and resume != "auto":
                offer = newest_checkpoint(Path(resume), is_ours=False)
        dist.all_gather_object(offers, offer)
        if resume != "auto" and not any(offers):
            raise UserError(f"run.resume={resume!r} is neither a complete checkpoint nor the folder"
                            " of a run that has one, nor auto; to begin anew, set run.name")
        return max(filter(None, offers), key=lambda each: (each[2]["step"], -each[1]), default=None)

    def _compare_settings(self) -> list[str]:
        """What has changed since the checkpoint; refuses what would make it another experiment."""
        saved, now = self.checkpoint[2], flatten(self.config)
        then, N = dict(saved["config"]), "training.num_samples_per_step"
        total = then[N] * saved["num_ranks"]
        then[N], now[N] = (f"{each} over all ranks" for each in (total, now[N] * WORLD_SIZE))
        changed = {key: f"{key}: {then.get(key, 'no such key')} -> {value}"
                   for key, value in sorted(now.items()) if not key.startswith("run.")
                   and (key not in then or then[key] != value)}
        refused = [changed[key] for key in changed if key in then and key not in FREE_KEYS]
        remedy = f"{N}={total // WORLD_SIZE} to go on as it was, " if N in changed and not (
            total % WORLD_SIZE) else ""
        self._refuse(refused, remedy)
        return list(changed.values())

    def _refuse(self, changed: list[str], remedy: str = "") -> None:
        if changed and not self.config.run.resume_anyway:
            raise UserError(f"the checkpoint is of another experiment ({'; '.join(changed)}): set "
                            f"{remedy}run.name to begin anew, or run.resume_anyway=true to go on")

    def restore(self, model, optimizer, contents: dict[str, str]) -> tuple[int, tuple]:
        """Loads the checkpoint, if any, from the disk of one rank: its step, how good best/ is.
        `contents`, see `contents_of`, have to be those of all ranks, and as they were."""
        self.contents, of_ranks = contents, [None] * WORLD_SIZE
        dist.all_gather_object(of_ranks, contents)
        with errors_shared():
            for rank, others in enumerate(of_ranks):
                if odd := [what for what in contents if others[what] != contents[what]]:
                    raise UserError(f"{odd[0]} is not the same on rank {rank} as on rank {RANK}")
        if not (self.config.model.lora_rank or self.config.training.kl_beta):
            contents.pop("model.name: a weight", None)  # the checkpoint holds all of them
        if self.checkpoint is None:
            return 0, NONE_KEPT
        (path, reader, saved), tensors = self.checkpoint, state_tensors(model, optimizer)
        then = contents | saved.get("contents", {})
        other = [f"{what} is not what it was" for what in contents if then[what] != contents[what]]
        with errors_shared():
            self._refuse(other)
        self.changes += other
        with errors_shared(), blame(f"{path} is of another model than {self.config.model.name!r}"):
            files = files_of(path, saved) if RANK == reader else {}
            for name, tensor in tensors.items() if files else ():
                if files[name].get_slice(name).get_shape() != list(tensor.shape):
                    raise ValueError(f"{name} has another shape")
        with blame(f"{path} cannot be read", (OSError, SafetensorError)):
            for name, tensor in tensors.items():
                fill(tensor, reader, lambda name=name: files[name].get_tensor(name))
        return saved["step"], tuple(saved["best"]) if (self.path / "best").exists() else NONE_KEPT

    def save(self, run) -> None:
        """All that going on from here takes; random numbers have no state."""
        path = self.path / "checkpoints" / f"step-{run.step:06d}"
        with torch.no_grad():
            logprobs, _ = run.policy.module([NOTHING])
        if not logprobs.isfinite().all():  # on every rank, or on none
            raise UserError(f"after step {run.step} {ADVICE['out_of_range']}")
        parts = gathered(state_tensors(run.model, run.optimizer), BYTES_OF_A_FILE)
        if RANK != 0:
            list(parts)  # takes part; there are none here
            return
        with self.writing():
            with appearing(path) as folder:
                for number, part in enumerate(parts, start=1):
                    save_file(part, folder / f"tensors-{number}.safetensors")
                state = {"step": run.step, "best": run.best, "num_ranks": WORLD_SIZE,
                         "config": flatten(self.config), "contents": self.contents,
                         "log": run.log.bookmark(), "files": sorted(os.listdir(folder))}
                (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            self.saved = path
            for old in find_checkpoints(self.path)[self.config.checkpoint.keep:]:
                shutil.rmtree(old)

    def save_best(self, run, metrics: dict[str, float]) -> None:
        """The model as a folder that `from_pretrained` reads, to which the link `best` points."""
        path, others = self.path / f"best-{run.step:06d}", list(self.path.glob("best-*"))
        while path in others:  # of processes that were killed before they could save this step
            path = path.with_name(f"{path.name}-2")
        with self.writing():
            with appearing(path) as folder:
                model = copy.copy(run.sampler)  # what was measured, whole on each rank
                model.generation_config = run.model.generation_config
                model.save_pretrained(folder, max_shard_size=BYTES_OF_A_FILE)
                run.tokenizer.save_pretrained(folder)
                prompt = encode_prompt(run.validation_rows[0], run.task, run.tokenizer, self.config)
                run.log.card(folder, run.step, metrics, run.tokenizer.decode(prompt))
            if (best := self.path / "best").is_dir() and not best.is_symlink():
                best.rename(path.with_name(f"copy-of-{path.name}"))  # someone's copy
            link = self.path / "best.unfinished"
            link.unlink(missing_ok=True)
            link.symlink_to(path.name)
            link.replace(best)
            for old in others:
                shutil.rmtree(old, ignore_errors=True)


def state_tensors(model, optimizer) -> dict[str, torch.Tensor]:
    """What learns, by name, and AdamW's moments of each: {"w": ..., "w/exp_avg": ..., ...}."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:  # those that learn
            moments = optimizer.state[parameter].items()
            tensors |= {name: parameter.data, **{f"{name}/{key}": value for key, value in moments}}
    return tensors
