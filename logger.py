"""What a person sees of a run and what is kept of it. Nothing in here decides about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward, length and the like over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best
"""

import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

import yaml

from machinery import advice, text
from machinery.checkpoints import RunFolder
from machinery.errors import UserError, describe, is_out_of_memory
from machinery.ranks import DEVICE, RANK, WORLD_SIZE
from machinery.settings import ROOT, Config, flatten

SECONDS_BETWEEN_DRAWINGS = 60
SECONDS_TO_END_MLFLOW = {"FINISHED": 60, "FAILED": 5}  # For all that it has not been told yet.
ARTIFACTS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json")
CURVES = {  # {metric: its title, as in the lines of a run, and its unit}
    "solved": ("solved", "share"), "best_of_n": ("best of {n}", "share"),
    "reward": ("reward", "points"), "completion_length": ("length", "tokens"),
    "truncated": ("truncated", "share"), "groups_without_signal": ("no signal", "share")}


class Logger:
    """Rank 0 prints and writes. On the other ranks the same methods print and write nothing."""

    def __init__(self, config: Config, folder: RunFolder):
        self.config = config
        self.folder = folder
        self.path = folder.path
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.history: list[dict] = []  # What metrics.jsonl holds.
        self.steps_done = 0
        self.seconds: dict[str, float] = {}  # Of each phase when it last ran.
        self.bar = text.progress_bar("", 0, self.is_terminal)  # Of the phase that is running.
        self.last_drawing = time.monotonic()
        self.has_weighed_saving = False
        self.mlflow: Thread | None = None
        self.mlflow_calls: SimpleQueue = SimpleQueue()  # What the thread is still to do.
        self.say(f"loading {config.model.name} and the data of {config.task.name} ...")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error:
            self._end_mlflow("FAILED")

    def say(self, line: str) -> None:
        if RANK == 0:
            print(line)

    def start(self, run: Any) -> None:
        """Writes the settings, and says what kind of run this is."""
        self.steps_done = run.step
        if RANK != 0:
            return
        self.solved = run.task.SOLVED
        settings = self.config.model_dump(mode="json")
        settings["run"]["name"] = self.path.name
        self.folder.write("config.yaml", yaml.safe_dump(settings, sort_keys=False))
        (self.path / "summary.json").unlink(missing_ok=True)  # Of an earlier start.
        self.config = run.config  # Now it has the size of a micro-batch.
        self.history = self.folder.read("metrics.jsonl")
        for note in self.folder.notes:
            print(note)
        print(text.start_lines(run, WORLD_SIZE, DEVICE.type))
        for note in advice.notes_on_sharding(self.config, WORLD_SIZE):
            print(text.wrap(note))
        if self.config.logging.mlflow:
            self.mlflow = Thread(target=self._serve_mlflow, daemon=True)
            self.mlflow.start()

    @property
    def first_evaluation(self) -> dict | None:
        """The evaluation at step 0, before training."""
        return next((entry for entry in self.history if entry["step"] == 0), None)

    @contextmanager
    def phase(self, name: str, total: int = 0) -> Iterator[None]:
        """Shows how far a phase is, and measures its seconds. Some errors come with advice."""
        started = time.perf_counter()
        self.bar = text.progress_bar(name, total if RANK == 0 else 0, self.is_terminal)
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                remedy = advice.out_of_memory(name, self.config)
                raise UserError(f"out of memory in phase {name}: {remedy}") from error
            if re.search("probability tensor contains|device-side assert", str(error)):
                after = f"after step {self.steps_done} {advice.OUT_OF_RANGE}"
                raise UserError(after if self.steps_done else advice.NO_NUMBERS) from error
            raise
        finally:
            self.bar.close()
            self.seconds[name] = time.perf_counter() - started

    def advance(self, count: int) -> None:
        """Moves the bar of the phase that is running."""
        self.bar.update(count)

    def step(self, step: int, metrics: dict[str, float | None]) -> None:
        self.steps_done = step
        if RANK != 0:
            return
        self._keep(step, metrics)
        seconds = sum(metrics[name] for name in metrics if name.startswith("seconds/"))
        print(text.step_line(step, seconds, metrics))
        if step == 1:
            for line in advice.look_at_first_step(metrics, self.config):
                print(text.wrap(line, "  "))
        if "save" in self.seconds and not self.has_weighed_saving:
            self.has_weighed_saving = True
            remark = advice.slow_saving(self.seconds["save"], seconds, self.config)
            if remark:
                print(text.wrap(remark, "  "))
        if time.monotonic() - self.last_drawing > SECONDS_BETWEEN_DRAWINGS:
            self._draw_curves()

    def evaluation(self, step: int, metrics: dict[str, float], groups: list[list]) -> None:
        """Rank 0 alone calls this, because it has the answers of all ranks."""
        self._keep(step, metrics)
        self._keep_samples(step, groups)
        line = text.evaluation_line(step, self.config.validation.best_of_n, metrics)
        print(text.bold(line, self.is_terminal))
        answers = [group[0] for group in groups[:3]]
        prompts = [answer.question.row["prompt"] for answer in answers]
        if step == 0:
            print(text.wrap(f"a question as the model sees it:\n{prompts[0]}", "  "))
        for answer, prompt in zip(answers, text.without_shared_words(prompts)):
            print(text.answer_lines(prompt, answer))
        self._draw_curves()

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
                    "reward": answer.reward, **answer.reward_parts,
                    "truncated": answer.is_truncated, "completion_length": answer.num_tokens})
        self.folder.append("samples.jsonl", samples)
        table: dict[str, list] = {}
        for key in samples[0]:
            table[key] = [sample[key] for sample in samples]
        self._tell_mlflow("log_table", table, f"samples/step-{step:06d}.json")

    def finish(self) -> None:
        """Says what the run has gained, where its best model is, and what to do with it."""
        if RANK != 0:
            return
        summary = self._summary()
        self.folder.write("summary.json", json.dumps(summary) + "\n")
        result = text.result_lines(summary, self.config.validation.best_of_n)
        print(text.bold(result, self.is_terminal))
        best = summary["best"]
        folder = self.path / "best"
        if best is None:
            print(f"warning: {folder} is missing, or belongs to another run")
        else:
            if best["step"] == 0 < summary["steps"]:
                print("no evaluation was better than the one before training")
            print(f"the best model, of step {best['step']}, is in {folder}")
        examples = os.path.relpath(ROOT / "examples")
        look = [sys.executable, f"{examples}/one_run.py", str(self.path)]
        print(f"look at it: {shlex.join(look)}")
        if best and self.config.task.name == "countdown":
            ask = [sys.executable, f"{examples}/ask.py", "--model", str(folder)]
            print(f"try it: {shlex.join([*ask, '3', '7', '25', '=', '68'])}")
        for name in ARTIFACTS:
            if (self.path / name).exists():  # A branch of a finished run has drawn no curves.
                self._tell_mlflow("log_artifact", str(self.path / name))
        self._end_mlflow("FINISHED")
        if not self.is_terminal:
            print(json.dumps(summary))

    def _summary(self) -> dict[str, Any]:
        evaluations = {entry["step"]: entry for entry in self.history if "eval/solved" in entry}
        # A branch has the history of another run, so only the link knows what is in best/.
        folder = self.path / "best"
        saved = re.match(r"best-(\d+)", folder.resolve().name) if folder.exists() else None
        step = int(saved[1]) if saved else None
        last = self.history[-1]
        return {"run": self.path.name, "folder": str(self.path), "steps": last["step"],
                "seconds": round(self.folder.seconds(), 1),
                "first": self.first_evaluation, "last": last,
                "best": evaluations.get(step, {"step": step}) if saved else None}

    def _draw_curves(self) -> None:
        from matplotlib.figure import Figure  # Importing it takes a second.
        self.last_drawing = time.monotonic()
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")  # legible on a phone
        axes = figure.subplots(2, 3).flatten()
        for axis, (name, (title, unit)) in zip(axes, CURVES.items()):
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
        entries = [entry for entry in self.history if metric in entry]
        values = [entry[metric] for entry in entries]
        ends = []
        for end in ("low", "high"):
            bounds = [entry.get(f"{metric}_{end}", entry[metric]) for entry in entries]
            ends.append([abs(bound - value) for bound, value in zip(bounds, values)])
        if entries:
            axis.errorbar([entry["step"] for entry in entries], values, ends, **style)

    def _tell_mlflow(self, function: str, *arguments: Any, **named: Any) -> None:
        """Has a function of MLflow called in a thread of its own, so that no server can hold up
        training. Whatever fails there costs one line of warning, and the run continues."""
        if self.mlflow and self.mlflow.is_alive():
            self.mlflow_calls.put((function, arguments, named))

    def _end_mlflow(self, status: str) -> None:
        self._tell_mlflow("end_run", status)
        self.mlflow_calls.put(None)
        if self.mlflow:
            self.mlflow.join(SECONDS_TO_END_MLFLOW[status])
            if self.mlflow.is_alive():
                print("warning: MLflow is slow to answer, and lacks the end of this run")

    def _serve_mlflow(self) -> None:
        try:
            import mlflow
            self._start_mlflow(mlflow)
            for function, arguments, named in iter(self.mlflow_calls.get, None):
                getattr(mlflow, function)(*arguments, **named)
        except Exception as error:  # noqa: BLE001, whatever it is, it must not reach training
            reason = f"{type(error).__name__}: {text.without_password(describe(error))}"
            print(f"warning: MLflow failed ({reason}), and the run continues without it")

    def _start_mlflow(self, mlflow: Any) -> None:
        """Starts a run of MLflow. A run that is resumed continues in the same run there."""
        # By default its client asks a dead server again for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for name in ("mlflow", "alembic"):  # They tell of every table that they make.
            logging.getLogger(name).setLevel(logging.WARNING)
        if not os.environ.get("MLFLOW_EXPERIMENT_ID"):
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "onefile-grpo"))
        id_file = self.path / ".mlflow"
        run_id = id_file.read_text() if id_file.exists() else None
        run = mlflow.start_run(run_id, run_name=self.path.name, log_system_metrics=True)
        id_file.write_text(run.info.run_id)
        where = mlflow.get_tracking_uri()
        page = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        if where.startswith("http"):
            print(f"MLflow: {text.without_password(where)}/{page} shows this run")
        else:
            print(f"MLflow: http://127.0.0.1:5000/{page} after "
                  f"`mlflow ui --backend-store-uri {where}` shows this run")
        settings = flatten(self.config) | {"run.name": self.path.name}
        new_keys = settings.keys() - run.data.params.keys()  # The others cannot be changed there.
        mlflow.log_params({key: settings[key] for key in new_keys})
