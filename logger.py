"""What a person sees of a run, and what's kept of it. Nothing in here decides about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/main.py          the code, and task.py, the task's
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward, length and so on over the steps
    runs/<name>/summary.json     how it began, how it ended, and what was best
"""

import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

import yaml
from torch import nn
from tqdm.std import TRLock, tqdm

from machinery.errors import describe, errors_of_phase, shortened, visible
from machinery.metrics import is_large_gap, look_at_first_step
from machinery.ranks import DEVICE, RANK, WORLD_SIZE
from machinery.runs import FILES, TRAINER, RunFolder
from machinery.settings import ROOT, Config, flatten
from machinery.tasks import Task

SECONDS_BETWEEN_DRAWINGS = 60
# What a step's seconds consist of. "save" is the checkpoint before the step.
PHASES = ("sample", "score", "learn", "measure", "save")
LONG = 600  # If this many seconds are left, a line says so.
SECONDS_TO_END_MLFLOW = {"FINISHED": 60, "FAILED": 5}  # to tell it everything still missing
CURVES = {  # {metric: its title, as in the lines of a run, and its unit}
    "solved": ("solved", "share"), "best_of_n": ("best of {n}", "share"),
    "reward": ("reward", "points"), "completion_length": ("length", "tokens"),
    "truncated": ("truncated", "share"), "groups_without_signal": ("no signal", "share")}
tqdm.monitor_interval = 0  # no thread to watch the bars
tqdm.set_lock(TRLock())  # no lock that a reward's processes would share


class Logger:
    """Rank 0 prints and writes. On the other ranks the same methods do neither."""

    def __init__(self, config: Config, folder: RunFolder):
        self.config = config
        self.folder = folder
        self.path = folder.path
        self.history: list[dict] = []  # what metrics.jsonl holds
        self.steps_done = 0
        self.first_step: int | None = None  # in this start
        self.first_step_ended = 0.0
        self.running = ""  # the phase that is running
        self.bar = tqdm(disable=True)  # its bar
        self.seconds: dict[str, float] = {}  # in each phase since the last step or evaluation
        self.last_drawing = time.monotonic()
        self.mlflow: Thread | None = None
        self.mlflow_calls: SimpleQueue = SimpleQueue()  # what its thread still has to do
        if RANK == 0:
            print(f"loading {config.model.name} and the data for {config.task.name} ...")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error:
            self._end_mlflow("FAILED")

    def start(
        self, step: int, task: Task, model: nn.Module, num_training: int, num_validation: int
    ) -> None:
        """Writes the settings, and says what kind of run this is."""
        self.steps_done = step
        self.solved = task.SOLVED
        if RANK != 0:
            return
        settings = self.config.model_dump(mode="json")
        settings["run"]["name"] = self.path.name
        self.folder.write("config.yaml", yaml.safe_dump(settings, sort_keys=False))
        (self.path / "summary.json").unlink(missing_ok=True)  # from an earlier start
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.history = [json.loads(line) for line in lines]
        if not self.folder.checkpoint:
            self._tell_of_relative("To continue that run instead, add")
        else:
            print(f"resuming from {self.folder.checkpoint}")
            if step >= self.config.training.max_steps:
                print("this run has finished: raise training.max_steps to train further")
            elif self.folder.code_changed:
                print(f"from here on, it runs a different {' and '.join(self.folder.code_changed)}")
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        print(wrap(
            f"{num_parameters / 1e6:,.1f} M parameters in {self.config.model.precision} on "
            f"{WORLD_SIZE} x {DEVICE.type}. "
            f"{num_training:,} questions to train on, "
            f"{self.config.training.num_samples_per_step} x {WORLD_SIZE} per step with "
            f"{self.config.training.group_size} answers to each. "
            f"{num_validation:,} questions are held out. "
            f"Every setting is in {self.path / 'config.yaml'}"))
        training = self.config.training
        if training.updates_per_batch == 1 and training.clip:
            print("note: training.clip has no effect with one update per batch")
        if self.config.logging.mlflow:
            self.mlflow = Thread(target=self._serve_mlflow, daemon=True)
            self.mlflow.start()

    def _tell_of_relative(self, how_to_continue: str = "") -> None:
        """Says which other run has the same settings, and how to compare the two or continue that
        one. Otherwise, after an update of the trainer, a restarted job would begin at step 0
        unnoticed."""
        relatives = self.folder.relatives()
        if not relatives:
            return
        path, step, names = relatives[0]
        code = f"a different {' and '.join(names)}" if names else "the same code"
        print(wrap(f"{path}, at step {step}, has the same settings and {code}. To compare "
                   "the two (with one seed each), run:"))
        print(shlex.join([sys.executable, str(ROOT / "examples/one_run.py"), str(self.path),
                          str(path)]))
        if how_to_continue and TRAINER not in names:  # With another version, it can't.
            accepted = f" run.code={self.folder.code_digest}" if names else ""
            print(f"{how_to_continue} run.name={path.name}{accepted}")

    def _tell_of_same_gradient(self, grad_norm: float | None) -> None:
        """Names a run of different code whose step 1 had the same gradient. An edit may then have
        no effect, like a term of the loss that has no gradient."""
        for path, _, names in self.folder.relatives():
            # That run may be writing right now.
            with suppress(OSError, ValueError, LookupError, TypeError):
                lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                firsts = [entry for entry in map(json.loads, lines) if entry["step"] == 1]
                others = [entry["grad_norm"] for entry in firsts if entry.get("grad_norm")]
                if names and any(math.isclose(grad_norm or 0, x, rel_tol=1e-6) for x in others):
                    print(wrap(f"grad_norm equals {path}'s to six digits, so the edit hasn't "
                               "changed the gradient of step 1, or has changed only its sign",
                               "  "))
                    return

    # ------------------------------------------------------------ while it runs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the seconds of a phase. Some errors get advice."""
        started = time.perf_counter()
        self.running = name
        try:
            with errors_of_phase(name, self.steps_done):
                yield
        finally:
            self.bar.close()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def progress(self, items: Sequence) -> Iterator:
        """Yields the items, and shows how many of them the running phase has done."""
        advance = self.counter(len(items))
        for item in items:
            yield item
            advance(1)

    def counter(self, total: int) -> Callable[[int], object]:
        """Shows a bar for the running phase, on a terminal. Returns a function that moves it."""
        self.bar.close()
        self.bar = tqdm(
            desc=self.running,
            total=total,
            disable=RANK != 0 or not sys.stdout.isatty(),
            file=sys.stdout,
            miniters=1,
            delay=0.2,
            leave=False,
            ncols=min(59, columns()),
            bar_format="{desc} {n_fmt}/{total_fmt} [{bar:16}] {rate_fmt}, {remaining} left",
        )
        return self.bar.update

    def step(self, step: int, metrics: dict[str, float | None]) -> None:
        self.steps_done = step
        if RANK != 0:
            return
        seconds = {f"seconds/{name}": self.seconds.get(name, 0.0) for name in PHASES}
        self.seconds.clear()
        speed = {"tokens_per_second": metrics["tokens"] / sum(seconds.values())}
        metrics = {**metrics, **seconds, **speed}
        self._keep(step, metrics)
        print(step_line(step, metrics))
        if self.first_step is None:
            self.first_step = step
            self.first_step_ended = time.monotonic()
        elif step == self.first_step + 1:
            self._tell_of_time_left()
        if step == 1:
            before = dict(*self._evaluations()[:1])
            self._tell_of_same_gradient(metrics["grad_norm"])
            for line in look_at_first_step({**before, **metrics}, self.config):
                print(wrap(line, "  "))
        elif self._is_first_large_gap():
            print(wrap(
                f"! from here on, sampler_gap is large ({metrics['sampler_gap']:.1g}). The answers "
                "were not sampled from the policy being trained: check refresh_sampler, and "
                "whether they come from an earlier step. If you have changed that, it may be "
                "intended", "  "))
        if time.monotonic() - self.last_drawing > SECONDS_BETWEEN_DRAWINGS:
            self._draw_curves()

    def _is_first_large_gap(self) -> bool:
        """Whether the gap of this step is large, and no gap was before. A sampler with weights of
        its own may differ from the policy only after some updates."""
        large = []
        for entry in self.history:
            if is_large_gap(entry.get("sampler_gap") or 0.0, self.config):
                large.append(entry)
        return large == self.history[-1:]

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[list]) -> None:
        """Only rank 0 calls this, because it has the answers of all ranks."""
        self.seconds.clear()  # They belong to no step.
        self._keep(step, metrics)
        self._keep_samples(step, groups)
        print(evaluation_line(step, self.config.validation.best_of_n, metrics))
        self._tell_of_time_left()
        if step == 0:
            print(wrap(f"the first question:\n{groups[0][0].question.row['prompt']}", "  "))
        for group in groups[:3]:
            print(answer_lines(group[0].question.row["prompt"], group[0]))
        self._draw_curves()

    def _tell_of_time_left(self) -> None:
        """The first step of a start doesn't count, because it's slower than the others."""
        if self.first_step is None or self.steps_done == self.first_step:
            return
        seconds_so_far = time.monotonic() - self.first_step_ended
        seconds_of_a_step = seconds_so_far / (self.steps_done - self.first_step)
        seconds = seconds_of_a_step * (self.config.training.max_steps - self.steps_done)
        if seconds > LONG:
            print(f"  about {seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min left")

    def how_it_was_made(self, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        """Returns the settings, this evaluation, and the one before training."""
        evaluation = {"step": step, **metrics}
        return {**evaluation, "before_training": [*self._evaluations(), evaluation][0],
                "settings": self.config.model_dump(mode="json")}

    # ------------------------------------------------------------ what is kept

    def _keep(self, step: int, metrics: dict[str, float | None]) -> None:
        self.history.append({"step": step, **metrics})
        self.folder.append("metrics.jsonl", self.history[-1:])
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self._tell_mlflow("log_metrics", numbers, step=step)

    def _keep_samples(self, step: int, groups: list[list]) -> None:
        samples = []
        for i, group in enumerate(groups):
            for answer in group:
                samples.append({
                    "step": step, "question": i, "prompt": answer.question.row["prompt"],
                    "completion": answer.completion, "solved": answer.reward_parts[self.solved],
                    "reward": answer.reward, "reward_parts": answer.reward_parts,
                    "truncated": answer.is_truncated, "completion_length": answer.num_tokens})
        self.folder.append("samples.jsonl", samples)

    def finish(self) -> None:
        """Says what the run has gained, where its best model is, and what to do with it."""
        if RANK != 0:
            return
        summary = self._summary()
        self.folder.write("summary.json", json.dumps(summary) + "\n")
        print(result_line(summary, self.config.validation.best_of_n))
        folder = self.path / "best"
        if summary["best"]["step"] == 0 < summary["steps"]:
            print("no evaluation was better than the one before training")
        where = f"is in {folder}" if folder.exists() else "is missing"
        print(f"the best model, from step {summary['best']['step']}, {where}")
        look = [sys.executable, str(ROOT / "examples/one_run.py"), str(self.path)]
        print(f"to look at the run: {shlex.join(look)}")
        self._tell_of_relative()
        if self.config.task.name == "countdown":
            ask = [sys.executable, str(ROOT / "examples/ask.py"), "--model", str(folder)]
            print(f"to try the model: {shlex.join([*ask, '3', '7', '25', '=', '68'])}")
        for name in FILES:
            self._tell_mlflow("log_artifact", str(self.path / name))
        self._end_mlflow("FINISHED")
        if not sys.stdout.isatty():
            print(json.dumps(summary))

    def _evaluations(self) -> list[dict]:
        return [entry for entry in self.history if "eval/solved" in entry]

    def _summary(self) -> dict[str, Any]:
        evaluations = self._evaluations()
        best = max(evaluations, key=lambda entry: (entry["eval/solved"], entry["eval/best_of_n"]))
        if (self.path / "best" / "training.json").exists():  # It may be worse, if deleted.
            step = json.loads((self.path / "best" / "training.json").read_text())["step"]
            best = [entry for entry in evaluations if entry["step"] == step][-1]
        return {"run": self.path.name, "folder": str(self.path), "steps": self.history[-1]["step"],
                "seconds": round(self.folder.seconds(), 1),
                "first": evaluations[0], "last": evaluations[-1], "best": best}

    def _draw_curves(self) -> None:
        from matplotlib.figure import Figure  # Importing it takes a second.
        self.last_drawing = time.monotonic()
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")  # legible on a phone
        axes = figure.subplots(2, 3).flatten()
        curves = list(CURVES.items())
        if self.config.training.learning_type == "distill":  # There, rewards teach nothing.
            curves[-1] = ("kl", ("KL to the teacher", "nats"))
        for axis, (name, (title, unit)) in zip(axes, curves):
            axis.set_title(title.format(n=self.config.validation.best_of_n))
            axis.set(xlabel="step", ylabel=unit)
            axis.locator_params("x", integer=True, nbins=4)
            if unit == "share":
                axis.set_ylim(-0.05, 1.05)
            self._draw_curve(axis, name, label="training", color="0.6", zorder=3)
            self._draw_curve(axis, f"eval/{name}", label="held out, with 95 % interval",
                             color="0", marker="o", markersize=4)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        with self.folder.writing():
            figure.savefig(self.path / "curves.png", dpi=140)

    def _draw_curve(self, axis: Any, metric: str, **style: Any) -> None:
        """Draws a metric over the steps, with its 95 % interval where there is one."""
        # A number that wasn't finite is None.
        entries = [entry for entry in self.history if entry.get(metric) is not None]
        values = [entry[metric] for entry in entries]
        ends = []
        for end in ("low", "high"):
            bounds = [entry.get(f"{metric}_{end}", entry[metric]) for entry in entries]
            ends.append([abs(bound - value) for bound, value in zip(bounds, values)])
        if entries:
            axis.errorbar([entry["step"] for entry in entries], values, ends, **style)

    def _tell_mlflow(self, function: str, *arguments: Any, **named: Any) -> None:
        """Calls a function of MLflow in a separate thread, so that no server can hold up training.
        If anything fails there, it costs one line of warning, and the run continues."""
        if self.mlflow and self.mlflow.is_alive():
            self.mlflow_calls.put((function, arguments, named))

    def _end_mlflow(self, status: str) -> None:
        self._tell_mlflow("end_run", status)
        self.mlflow_calls.put(None)
        if self.mlflow:
            self.mlflow.join(SECONDS_TO_END_MLFLOW[status])
            if self.mlflow.is_alive():
                print("warning: MLflow is slow to answer, so the end of this run is missing there")

    def _serve_mlflow(self) -> None:
        try:
            import mlflow
            self._start_mlflow(mlflow)
            for function, arguments, named in iter(self.mlflow_calls.get, None):
                getattr(mlflow, function)(*arguments, **named)
        except Exception as error:  # noqa: BLE001, whatever it is, it must not reach training
            reason = f"{type(error).__name__}: {without_password(describe(error))}"
            print(f"warning: MLflow failed ({reason}); the run continues without it")

    def _start_mlflow(self, mlflow: Any) -> None:
        """Starts a run of MLflow. A resumed run continues its own run there."""
        # By default its client keeps asking a dead server for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for name in ("mlflow", "alembic"):  # They report every table they create.
            logging.getLogger(name).setLevel(logging.WARNING)
        if not os.environ.get("MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "onefile-grpo"))
        id_file = self.path / ".mlflow"
        run_id = id_file.read_text() if id_file.exists() else None
        run = mlflow.start_run(run_id, run_name=self.path.name, log_system_metrics=True)
        id_file.write_text(run.info.run_id)
        where = mlflow.get_tracking_uri()
        print(f"MLflow: run {run.info.run_id} at {without_password(where)}")
        settings = flatten(self.config) | {"run.name": self.path.name}
        new_keys = settings.keys() - run.data.params.keys()  # The others can't be changed there.
        mlflow.log_params({key: settings[key] for key in new_keys})


# ---------------------------------------------------------------- lines

def step_line(step: int, metrics: dict[str, float | None]) -> str:
    """Returns what matters most about a step, in 79 columns. metrics.jsonl has the rest."""
    note = f"no signal {metrics['groups_without_signal']:.2f}"
    if metrics.get("kl") is not None and "teacher_lower" in metrics:
        note = f"KL {metrics['kl']:.2g}"  # With a teacher, rewards aren't the signal.
    if metrics["non_finite"]:
        note = "gradient not finite"
    elif not metrics["updated"]:
        note = "nothing to learn from"
    seconds = sum(metrics[name] for name in metrics if name.startswith("seconds/"))
    return (
        f"step {step:>4}  reward {metrics['reward']:.3f}  solved {metrics['solved']:.3f}  "
        f"length {metrics['completion_length']:3.0f}  {seconds:4.1f} s  {note}")


def evaluation_line(step: int, best_of_n: int, metrics: dict[str, float]) -> str:
    return (
        f"evaluation at step {step}:  solved {with_interval(metrics, 'eval/solved')}  "
        f"best of {best_of_n} {metrics['eval/best_of_n']:.3f}  "
        f"length {metrics['eval/completion_length']:.0f}")


def with_interval(metrics: dict[str, float], name: str) -> str:
    """Returns a metric with its 95 % interval, like 0.388 (0.351–0.425)."""
    low = metrics[f"{name}_low"]
    high = metrics[f"{name}_high"]
    return f"{metrics[name]:.3f} ({low:.3f}–{high:.3f})"


def answer_lines(prompt: str, answer: Any) -> str:
    """Returns both ends of a prompt, an answer to it, and its rewards."""
    parts = [f"{name} {value:.2f}" for name, value in answer.reward_parts.items()]
    return "\n".join([
        "  " + shortened(" ".join(visible(prompt).split()), columns() - 2),
        wrap(shortened(answer.completion.strip(), 600), "    "),
        wrap(f"-> reward {answer.reward:.2f} ({', '.join(parts)})", "    "),
    ])


def result_line(summary: dict[str, Any], best_of_n: int) -> str:
    """Returns what a run has gained."""
    labels = {"solved": "solved", "reward": "reward", "best_of_n": f"best of {best_of_n}"}
    gains = []
    for name, label in labels.items():
        first, last = (summary[when][f"eval/{name}"] for when in ("first", "last"))
        gains.append(f"{label} {first:.3f} -> {last:.3f}")
    return wrap(f"{', '.join(gains)}, in {summary['steps']} steps and {summary['seconds']:,.0f} s")


def without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # as in http://user:password@server


def columns() -> int:
    """Returns how many characters fit in a line, or 79 if the width isn't known."""
    return shutil.get_terminal_size().columns - 1


def wrap(text: str, indent: str = "") -> str:
    """Returns the text as indented lines that fit the screen."""
    lines = []
    for line in visible(text).split("\n"):
        lines.append(textwrap.fill(
            line,
            width=max(40, columns()),
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        ))
    return "\n".join(lines)
