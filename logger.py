"""What a person sees of a run and what is kept of it. Nothing in here decides anything about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward, length and the like over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best; also the last line on stdout

and, filled by main.py, runs/<name>/checkpoints/ and the link runs/<name>/best (with a model card from here), whose mechanics are
at the end of this file.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import transformers
import yaml

SECONDS_BETWEEN_PROGRESS_LINES = 30  # where stdout is not a terminal
SECONDS_BETWEEN_DRAWINGS = 60
SECONDS_FOR_A_REWARD = 60  # after these, and again after as many more, the one that has not answered is named
SECONDS_TO_END_MLFLOW = {"FINISHED": 60, "FAILED": 5, "KILLED": 5}  # for what it has not been told yet
KEPT = ("metrics.jsonl", "samples.jsonl")  # files that grow, and are cut back when a run goes on from a checkpoint


class Logger:
    """Rank 0 speaks and writes; on the others (`active` false) its methods show and write nothing."""

    def __init__(self, config, active: bool):
        self.config, self.active = config, active
        self.folder = Path(config.run.dir) / config.run.name
        self.history: list[dict] = []  # what metrics.jsonl holds
        self.started = time.time()
        self.mlflow_run_id: str | None = None
        self.mlflow_calls: queue.Queue | None = None  # for the thread that talks to MLflow; None without it
        self.mlflow_thread: threading.Thread | None = None
        self.is_terminal = sys.stdout.isatty()
        self.drawn = self.started  # when the curves were
        if not (active and self.is_terminal):
            transformers.utils.logging.disable_progress_bar()
        if active:
            sys.stdout.reconfigure(line_buffering=True)

    def start(self, model, num_training: int, num_validation: int, num_ranks: int,
              checkpoint: tuple[Path, int, dict] | None) -> None:
        """`checkpoint`: the one that the run goes on from; its contents hold a `bookmark` of ours under "log"."""
        if not self.active:
            return
        settings = dataclasses.asdict(self.config)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        (self.folder / "summary.json").unlink(missing_ok=True)
        bookmark, mlflow_run_id = {"seconds": 0, "bytes": dict.fromkeys(KEPT, 0)}, None
        if checkpoint:
            path, _, saved = checkpoint
            bookmark, origin = saved["log"], path.parent.parent
            if origin.resolve() == self.folder.resolve():  # else it branches off, into an MLflow run of its own
                told = self.folder / ".mlflow"  # at times only after the checkpoint; but this may be another machine
                mlflow_run_id = told.read_text(encoding="utf-8") if told.exists() else bookmark["mlflow_run_id"]
            print(f"going on from {path}")
            for name in KEPT:
                if not (self.folder / name).exists() and (origin / name).exists():  # it branches off from another run
                    shutil.copyfile(origin / name, self.folder / name)
            if saved["step"] >= self.config.training.max_steps and saved["evaluated"]:
                print("this run has finished before: raise training.max_steps to go on with it, or set run.resume=never to run "
                      "it anew")
        self.started -= bookmark["seconds"]
        for name in KEPT:
            self._cut_back(name, bookmark["bytes"][name])
        with open(self.folder / "metrics.jsonl", encoding="utf-8") as file:
            self.history = [json.loads(line) for line in file]
        for section, keys in settings.items():
            print(f"{section}: " + ", ".join(f"{key}={value}" for key, value in keys.items()))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters / 1e6:,.1f} M parameters on {num_ranks} x {model.device.type}; {num_training:,} questions to train "
              f"on, {num_validation:,} held out; files in {self.folder}")
        if self.config.logging.mlflow:
            parameters = {f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()}
            self._start_mlflow(parameters, mlflow_run_id)

    def say(self, text: str) -> None:
        if self.active:
            print(text)

    def bookmark(self) -> dict:
        """Where our files stand, safely on disk, for `start` to cut them back to."""
        for name in KEPT:
            with open(self.folder / name, "rb") as file:
                os.fsync(file.fileno())
        return {"seconds": time.time() - self.started, "mlflow_run_id": self.mlflow_run_id,
                "bytes": {name: (self.folder / name).stat().st_size for name in KEPT}}

    def _cut_back(self, name: str, size: int) -> None:
        with open(self.folder / name, "ab") as file:
            if file.tell() < size:
                print(f"warning: {self.folder / name} is shorter than at the checkpoint; what it has lost is not made up for")
            file.truncate(min(size, file.tell()))

    # ------------------------------------------------------------ while it runs

    @contextlib.contextmanager
    def progress(self, label: str):
        """Yields a function to call with how much is done of how much: a bar on a terminal, now and then a line elsewhere."""
        started = last_shown = time.time()

        def show(done: int, total: int) -> None:
            nonlocal last_shown
            now = time.time()
            if not self.active or now - last_shown < (0.2 if self.is_terminal else SECONDS_BETWEEN_PROGRESS_LINES):
                return
            last_shown = now
            rate = done / (now - started)
            left = f"{label} {done}/{total}, {rate:.1f}/s, {(total - done) / rate:.0f} s left" if rate else label
            if self.is_terminal:
                bar = "#" * (20 * done // total)
                print(f"\r[{bar:<20}] {left:<60}", end="", flush=True)
            else:
                print(left)

        try:
            yield show
        finally:
            if self.active and self.is_terminal:
                print("\r" + " " * 84 + "\r", end="", flush=True)

    def step(self, step: int, metrics: dict) -> None:
        if not self.active:
            return
        self._keep(step, metrics)
        seconds = metrics["seconds/sample"] + metrics["seconds/learn"]
        learned = (f"entropy {metrics['entropy']:5.3f}  grad {metrics['grad_norm']:6.3f}" if metrics["updated"] else
                   "skipped: the gradient is not finite" if metrics["non_finite"] else "nothing to learn from")
        print(f"step {step:>5}  reward {metrics['reward']:6.3f}  solved {metrics['solved']:5.3f}  "
              f"no signal {metrics['groups_without_signal']:4.2f}  length {metrics['completion_length']:6.1f}  "
              f"truncated {metrics['truncated']:4.2f}  {learned}  {seconds:5.2f} s  {metrics['tokens_per_second']:7,.0f} tok/s")
        if time.time() - self.drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw_curves()

    def evaluation(self, step: int, metrics: dict, groups: list) -> None:
        """`groups`: for each held-out question its answers."""
        if not self.active:
            return
        self._keep(step, metrics)
        samples = [{"step": step, "question": i, "prompt": answer.row["prompt"], "completion": answer.completion,
                    "reward": answer.reward, **answer.parts, "truncated": answer.truncated}
                   for i, group in enumerate(groups) for answer in group]
        self._append("samples.jsonl", samples)
        print(self._bold(f"evaluation at step {step}: solved {_with_interval(metrics, 'eval/solved')}, best of "
                         f"{self.config.validation.best_of_n} {_with_interval(metrics, 'eval/best_of_n')}, "
                         f"length {metrics['eval/completion_length']:.1f}"))
        for group in groups[:3]:
            answer = group[0]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
            print(f"  {answer.row['prompt'].strip()}\n    " + _shorten(answer.completion).strip().replace("\n", "\n    ")
                  + f"\n    -> reward {answer.reward:.2f} ({parts})")
        self._draw_curves()
        columns = {key: [sample[key] for sample in samples] for key in samples[0]}
        self._mlflow("log_table", columns, f"samples/step-{step:06d}.json")

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self.is_terminal and not os.environ.get("NO_COLOR") else text

    def _keep(self, step: int, metrics: dict) -> None:
        self.history.append({"step": step, **metrics})
        self._append("metrics.jsonl", [self.history[-1]])
        self._mlflow("log_metrics", {name: value for name, value in metrics.items() if value is not None}, step=step)

    def _append(self, name: str, records: list[dict]) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        if not self.active:
            return
        evaluations = [entry for entry in self.history if "eval/solved" in entry]
        first, last = evaluations[0], evaluations[-1]
        # A run that branched off from another has that one's history, but a best/ of its own, if it has evaluated.
        kept = re.match(r"best-(\d+)", (self.folder / "best").resolve().name)
        best = max([entry for entry in evaluations if kept and entry["step"] == int(kept[1])] or evaluations,
                   key=lambda entry: (entry["eval/best_of_n"], entry["eval/solved"]))
        summary = {"run": self.config.run.name, "folder": str(self.folder), "steps": last["step"],
                   "seconds": round(time.time() - self.started, 1), "first": first, "last": last, "best": best}
        (self.folder / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
        n = self.config.validation.best_of_n
        names = {"eval/solved": "solved", "eval/best_of_n": f"best of {n}", "eval/reward": "reward"}
        rose = ", ".join(f"{name} {first[metric]:.3f} -> {last[metric]:.3f}" for metric, name in names.items())
        print(self._bold(f"{rose}, in {last['step']} steps and {summary['seconds']:,.0f} s"))
        if kept:
            print(f"the best model, of step {best['step']}, is in {self.folder / 'best'}"
                  + (f"; try it: {sys.executable} examples/ask.py --model {self.folder / 'best'} 3 7 25 = 68"
                     if self.config.task.name == "countdown" else ""))
        for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json"):
            if (self.folder / name).exists():  # a branch of a finished run has drawn nothing
                self._mlflow("log_artifact", str(self.folder / name))
        if self.config.logging.mlflow_model and kept:
            self._mlflow("log_artifacts", str((self.folder / "best").resolve()), "best")
        self._end_mlflow("FINISHED")
        print(json.dumps(summary))

    def stopped(self, reason: str) -> None:
        """The last words of a run that a signal ends."""
        if self.active:
            again = "the same command" if self.config.run.resume == "auto" else f"run.name={self.config.run.name} run.resume=auto"
            saved = [f"saved up to {path}; {again} goes on from there" for path in _checkpoints(self.folder)]
            print(f"\nstopped by {reason}; {[*saved, 'nothing is saved yet'][0]}", flush=True)
            self._end_mlflow("KILLED")

    def close(self) -> None:
        self._end_mlflow("FAILED")  # unless it has ended already

    # ------------------------------------------------------------ curves and MLflow

    def _draw_curves(self) -> None:
        import matplotlib  # here, because importing it takes a second and only this needs it

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.drawn = time.time()
        panels = {"solved": ("solved", "eval/solved"), "best of n": ("eval/best_of_n",), "reward": ("reward", "eval/reward"),
                  "completion length": ("completion_length", "eval/completion_length"),
                  "truncated": ("truncated", "eval/truncated"), "groups without signal": ("groups_without_signal",)}
        styles = {"training": {"color": "0.6", "linewidth": 1}, "held out": {"color": "0", "marker": "o"}}
        figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
        for axis, (title, metrics) in zip(axes.flat, panels.items()):
            for metric in metrics:
                points = [(entry["step"], entry[metric], entry.get(f"{metric}_ci95") or 0.0)
                          for entry in self.history if metric in entry]
                steps, values, intervals = zip(*points) if points else ((), (), ())
                label = "held out" if metric.startswith("eval/") else "training"
                axis.plot(steps, values, label=label, **styles[label])
                if any(intervals):
                    axis.fill_between(steps, [value - interval for value, interval in zip(values, intervals)],
                                      [value + interval for value, interval in zip(values, intervals)],
                                      color="0", alpha=0.12, linewidth=0)
            axis.set(title=title, xlabel="step")
            axis.legend(fontsize=8)
        figure.savefig(self.folder / "curves.png", dpi=110)
        pyplot.close(figure)

    def card(self, folder: Path, step: int, metrics: dict, prompt: str) -> None:
        """README.md of a model: what it came from, how, how well it does and how to use it."""
        config, first = self.config, next((entry for entry in self.history if "eval/solved" in entry), metrics)
        is_local = Path(config.model.name).exists()
        results = "\n".join(f"| {name} | {_with_interval(first, name)} | {_with_interval(metrics, name)} |"
                            for name in ("eval/solved", "eval/best_of_n"))
        settings = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        (folder / "README.md").write_text(CARD.format(
            base="" if is_local else f"base_model: {config.model.name}\n", name=config.run.name, model=config.model.name,
            step=step, dataset=config.data.dataset, task=config.task.name, learning=config.training.learning_type,
            n=config.validation.best_of_n, held_out=config.data.num_validation, results=results, settings=settings,
            prompt=json.dumps(prompt), folder=self.folder / "best", L=config.training.max_new_gen_tokens,
            temperature=config.sampling.temperature, top_k=config.sampling.top_k, top_p=config.sampling.top_p), encoding="utf-8")

    def _start_mlflow(self, parameters: dict, run_id: str | None) -> None:
        # Its client retries a dead server for minutes by default.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self.mlflow_calls = queue.Queue()
        self.mlflow_thread = threading.Thread(target=self._talk_to_mlflow, args=(parameters, run_id), daemon=True)
        self.mlflow_thread.start()

    def _talk_to_mlflow(self, parameters: dict, run_id: str | None) -> None:
        """In a thread of its own, so that no server, slow or gone, can hold up training. What it does not take, the files of the
        run still hold."""
        import mlflow

        for name in ("mlflow", "alembic"):  # which tell of every table they make
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
                mlflow.set_experiment("onefile-grpo")
            has_psutil = importlib.util.find_spec("psutil") is not None  # what system metrics are read with
            run = mlflow.start_run(run_id=run_id, run_name=self.config.run.name, log_system_metrics=has_psutil)
            self.mlflow_run_id = run.info.run_id
            (self.folder / ".mlflow").write_text(self.mlflow_run_id, encoding="utf-8")
            where = mlflow.get_tracking_uri()
            page = where if where.startswith("http") else f"http://127.0.0.1:5000 after `mlflow ui --backend-store-uri {where}`"
            more = "" if has_psutil else "; for system metrics, pip install psutil"
            print(f"MLflow: {_without_password(page)} shows this run{more}")
            new = parameters.keys() - run.data.params.keys()  # the others cannot be changed
            mlflow.log_params({key: parameters[key] for key in new})
            while mlflow.active_run():
                function, arguments, named = self.mlflow_calls.get()
                getattr(mlflow, function)(*arguments, **named)
        except (mlflow.exceptions.MlflowException, OSError) as error:
            message = _without_password(" ".join(str(error).split()))[:200]
            print(f"warning: MLflow failed ({type(error).__name__}: {message}); this run goes on without it, its files are in "
                  f"{self.folder}")
            self.mlflow_calls = None

    def _mlflow(self, function: str, *arguments, **named) -> None:
        if self.mlflow_calls is not None:
            self.mlflow_calls.put((function, arguments, named))

    def _end_mlflow(self, status: str) -> None:
        if self.mlflow_calls is not None:
            self._mlflow("end_run", status)
            self.mlflow_thread.join(SECONDS_TO_END_MLFLOW[status])
            if self.mlflow_thread.is_alive():
                print(f"warning: MLflow is slow to answer and lacks the end of this run; its files are in {self.folder}")
            self.mlflow_calls = None


@contextlib.contextmanager
def name_slow_rewards(config, rank: int):
    """Yields a function to call with each row before it is graded. A reward that does not answer is named, with its question and
    where it stands, again and again: the run waits for it, and nothing else would say why."""
    graded, over, grading = ({"prompt": ""}, time.monotonic()), threading.Event(), threading.get_ident()

    def grades(row: dict) -> None:
        nonlocal graded
        graded = row, time.monotonic()

    def watch() -> None:
        named = 0.0  # when
        while not over.wait(max(graded[1], named) + SECONDS_FOR_A_REWARD - time.monotonic()):
            row, started = graded
            if time.monotonic() - max(started, named) >= SECONDS_FOR_A_REWARD:  # else it has gone on to another row
                named = time.monotonic()
                stack = traceback.extract_stack(sys._current_frames()[grading])
                place = [frame for frame in stack if frame.filename != __file__][-1]  # not the handler of the signal below
                print(f"\ntask.name={config.task.name!r}: its reward has not answered for {named - started:.0f} s, and the run "
                      f"waits for it (rank {rank}, at line {place.lineno} of {place.filename}); the question: "
                      f"{_shorten(' '.join(row['prompt'].split()))}", flush=True)

    # A regular expression that never ends lets no other thread run, but it heeds signals: this one lets the watcher speak.
    handler = signal.signal(signal.SIGVTALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_FOR_A_REWARD / 10, SECONDS_FOR_A_REWARD / 10)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield grades
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)
        over.set()
        watcher.join()


def keep_failed_reward(config, rank: int, completion: str, row: dict) -> Path:
    """What a reward function has failed on just now, to look at."""
    path = Path(config.run.dir, config.run.name, f"failed-reward-{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)  # on machines other than rank 0's
    failure = {"completion": completion, "row": row, "error": traceback.format_exc()}
    path.write_text(json.dumps(failure, default=repr, indent=1), encoding="utf-8")
    return path


# ---------------------------------------------------------------- the folder of a run
# What is in it is complete or absent, whenever the machine may stop: written beside, synced to disk, then renamed into place.

def lock_folder(folder: Path):
    """Makes the folder, and takes it for as long as the returned file is open or the process lives, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "a+", encoding="utf-8")  # noqa: SIM115, it is the caller's to close
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise BlockingIOError(lock.read()) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock


def add_checkpoint(folder: Path, step: int, write, keep: int) -> None:
    """`write(folder)` puts its files into checkpoints/step-NNNNNN; then all but the newest `keep` checkpoints go."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    if path.exists():  # a stop signal has had this step saved already, before its evaluation
        return
    for unfinished in path.parent.glob("*.unfinished"):
        shutil.rmtree(unfinished)
    unfinished = path.with_suffix(".unfinished")
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        (unfinished / "SHA256SUMS").write_text(_checksums(unfinished), encoding="utf-8")
        _sync_to_disk(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # a full disk has better use for the space
        raise
    unfinished.rename(path)
    _sync_to_disk(path.parent)
    for old in _checkpoints(folder)[keep:]:
        shutil.rmtree(old)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete one of a run, or `folder` itself if it is one. Damaged ones are set aside, under a name that says
    so."""
    if _is_complete(folder):
        return folder
    for path in _checkpoints(folder):
        if _is_complete(path):
            return path
        print(f"warning: {path} is damaged and is set aside", file=sys.stderr, flush=True)
        with contextlib.suppress(FileNotFoundError):  # another machine that shares the folder was quicker
            path.rename(path.with_name(f"damaged-{path.name}"))
    return None


def _is_complete(checkpoint: Path) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (checkpoint / "SHA256SUMS").read_text(encoding="utf-8") == _checksums(checkpoint)
    return False


def switch_best(folder: Path, step: int, write) -> None:
    """`write(folder)` puts its files into best-NNNNNN; then the link `best` points there, and what it pointed to goes."""
    version = _free_version(folder / f"best-{step:06d}")
    version.mkdir()
    write(version)
    _sync_to_disk(version)
    link = folder / "best.unfinished"
    link.unlink(missing_ok=True)
    link.symlink_to(version.name)
    link.replace(folder / "best")
    for old in folder.glob("best-*"):
        if old != version:
            shutil.rmtree(old)


def new_folder(path: Path) -> Path:
    """`path`, or path-2, path-3 ..., for a run that begins anew. But after a crash or a preemption the command is repeated as it
    was: then the folder that it began in is taken up again."""
    if any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")):
        return [path, *itertools.takewhile(Path.exists, _versions(path))][-1]
    return _free_version(path)


def _free_version(path: Path) -> Path:
    return next(version for version in _versions(path) if not version.exists())


def _versions(path: Path):
    return itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))


def _checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    found = (path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def _checksums(folder: Path) -> str:
    """As `sha256sum -c SHA256SUMS` reads them."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name != "SHA256SUMS":
            with open(path, "rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def _sync_to_disk(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---------------------------------------------------------------- text

def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"


def _with_interval(metrics: dict, name: str) -> str:
    interval = metrics[f"{name}_ci95"]
    return f"{metrics[name]:.3f}" + ("" if interval is None else f" ± {interval:.3f}")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # http://user:password@server


CARD = """---
library_name: transformers
{base}tags: [reinforcement-learning, grpo]
---
# {name}

`{model}` after {step} steps of {learning} on the task `{task}` (`{dataset}`), trained with onefile-grpo.

| on {held_out} questions held out, {n} answers each | before | this model |
| --- | --- | --- |
{results}

`eval/solved` is the share of single answers that solve their question, `eval/best_of_n` that of questions whose best answer
does, each ± half the width of its 95 % interval. This is the model of the best of several evaluations, on the same questions, so
a little of its lead is luck.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{folder}"), AutoModelForCausalLM.from_pretrained("{folder}")
prompt = tokenizer({prompt}, add_special_tokens=False, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens={L}, do_sample=True, temperature={temperature}, top_k={top_k}, top_p={top_p})
print(tokenizer.decode(answer[0], skip_special_tokens=True))
```

## Settings

```yaml
{settings}```
"""
