"""What a person sees of a run and what is kept of it. Nothing in here decides about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward, length and the like over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best
    runs/<name>/error-0.txt      what has ended it, where one line could not hold all
"""

import contextlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import yaml
from tqdm.std import TRLock, tqdm

from machinery.errors import (
    Lines,
    Stopped,
    UserError,
    block,
    columns,
    fitting,
    is_out_of_memory,
    said,
    shortened,
)
from machinery.ranks import DEVICE, RANK, WORLD_SIZE
from machinery.settings import ADVICE, ROOT, flatten

tqdm.monitor_interval = 0  # no thread
tqdm.set_lock(TRLock())  # no lock between processes
SECONDS_BETWEEN_PROGRESS_LINES = 30  # where stdout is not a terminal
SECONDS_BETWEEN_DRAWINGS = 60
SECONDS_TO_END_MLFLOW = {"FINISHED": 60, "FAILED": 5, "KILLED": 5}  # what it has not been told yet
KEPT = ("metrics.jsonl", "samples.jsonl")  # they grow, and are cut back when a run goes on
CURVES = {"solved": "share", "best_of_n": "share", "reward": "points",  # and their units
          "completion_length": "tokens", "truncated": "share", "groups_without_signal": "share"}


class Logger:
    """Rank 0 speaks and writes; on the others its methods show and write nothing."""

    def __init__(self, config, folder):
        self.config, self.folder, self.path = config, folder, folder.path
        self.history: list[dict] = []  # what metrics.jsonl holds
        self.seconds: dict[str, float] = {}  # of each phase when it last ran
        self.started = self.drawn = time.monotonic()  # a clock may be set back
        self.has_weighed_saving = False
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.mlflow: ThreadPoolExecutor | None = None  # see `_tell_mlflow`
        self.say(f"reading {config.model.name}, and the data of {config.task.name} ...")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Stopped) and RANK == 0:
            saved = f"saved up to {self.folder.saved}; the same command goes on from there"
            print(f"\nstopped by {error.args[0].name}; "
                  f"{saved if self.folder.saved else 'nothing is saved yet'}", file=sys.stderr)
        self._end_mlflow("KILLED" if isinstance(error, Stopped) else "FAILED")

    def start(self, run) -> None:
        if RANK != 0:
            return
        self.solved, settings = run.task.SOLVED, self.config.model_dump(mode="json")
        settings["run"]["name"] = self.path.name
        bookmark = {"seconds": 0, "bytes": dict.fromkeys(KEPT, 0)}
        with self.folder.writing():
            (self.path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
            (self.path / "summary.json").unlink(missing_ok=True)
            if self.folder.checkpoint:
                bookmark = self._go_on(*self.folder.checkpoint)
            self.started -= bookmark["seconds"]
            for name in KEPT:
                self._cut_back(self.path / name, bookmark["bytes"].get(name, sys.maxsize))
            lines = (self.path / "metrics.jsonl").read_text(errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError):  # one that someone has cut
                self.history += [json.loads(line)] if line.startswith('{"step": ') else []
        parameters = sum(parameter.numel() for parameter in run.model.parameters()) / 1e6
        N, (_, G) = self.config.training.num_samples_per_step, self.config.training.k_best_of_n
        print(block(f"{parameters:,.1f} M parameters on {WORLD_SIZE} x {DEVICE.type}; "
                     f"{len(run.training_rows):,} questions to train on, {N} x {WORLD_SIZE} a step "
                     f"with {G} answers each, and {len(run.validation_rows):,} held out; "
                     f"every setting is in {self.path / 'config.yaml'}"))
        for case, holds in (("alone", WORLD_SIZE == 1), ("adapters", self.config.model.lora_rank)):
            if self.config.training.shard and holds:
                print(block(ADVICE["shard"][case].format(**dict(self.config))))
        if self.config.logging.mlflow:
            self.mlflow = ThreadPoolExecutor(max_workers=1)
            self._tell_mlflow(self._start_mlflow)

    def _go_on(self, path: Path, rank: int, saved: dict) -> dict:
        bookmark, origin = saved["log"], path.parent.parent
        branches = origin.resolve() != self.path.resolve()
        if not branches and not (self.path / "best").exists():
            print(f"warning: {self.path / 'best'} is missing; the next evaluation makes another")
        print(f"going on from {path}")
        for change in self.folder.changes:
            print(f"changed since the checkpoint: {change}")
        if saved["num_ranks"] != WORLD_SIZE:
            print(f"ranks: {saved['num_ranks']} then, {WORLD_SIZE} now: other answers are sampled")
        if saved["step"] >= self.config.training.max_steps:
            print("this run has finished before: raise training.max_steps, or set run.name anew")
        for name in KEPT if branches else ():
            if not (self.path / name).exists() and (origin / name).exists():
                shutil.copyfile(origin / name, self.path / name)
        return bookmark

    def _cut_back(self, path: Path, size: int) -> None:
        with open(path, "ab+") as file:
            if file.tell() < size:
                print(f"warning: {path} has lost a part, which is not made up for")
                file.seek(0)
                size = file.read().rfind(b"\n") + 1  # whole lines
            file.truncate(size)

    def evaluated(self, step: int) -> bool:
        return any(entry["step"] == step and "eval/solved" in entry for entry in self.history)

    def bookmark(self) -> dict:
        """Where our files stand, safely on disk, for `start` to cut them back to."""
        for name in KEPT:
            with open(self.path / name, "ab") as file:
                os.fsync(file.fileno())
        return {"seconds": time.monotonic() - self.started,
                "bytes": {name: (self.path / name).stat().st_size for name in KEPT}}

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 0):
        """A bar, the phase's seconds, and if memory runs out the keys to change."""
        started, bar = time.perf_counter(), tqdm(
            total=total, desc=name, disable=RANK != 0 or not total, leave=False, delay=0.2,
            mininterval=0.2 if self.is_terminal else SECONDS_BETWEEN_PROGRESS_LINES, miniters=1,
            file=sys.stdout if self.is_terminal else Lines(), ncols=min(59, columns()), nrows=24,
            bar_format="{desc} {n_fmt}/{total_fmt} [{bar:16}] {rate_fmt}, {remaining} left")
        try:
            yield bar
        except Exception as error:
            if is_out_of_memory(error):
                remedy = ADVICE["out_of_memory"][name].format(**dict(self.config))
                raise UserError(f"out of memory in phase {name}: {remedy}") from error
            if re.search("probability tensor contains|device-side assert", str(error)):
                after = f"after step {self.history[-1]['step']} " if self.history else ""  # rank 0
                advice = "out_of_range" if after or RANK else "no_numbers"
                raise UserError(f"{after}{ADVICE[advice]}") from error
            raise
        finally:
            bar.close()
            self.seconds[name] = time.perf_counter() - started

    def say(self, text: str) -> None:
        if RANK == 0:
            print(text)

    def step(self, step: int, metrics: dict) -> None:
        if RANK != 0:
            return
        self._keep(step, metrics)
        seconds = sum(metrics[name] for name in metrics if name.startswith("seconds/"))
        fields = [f"step {step:>4}", f"reward {metrics['reward']:.3f}",
                  f"solved {metrics['solved']:.3f}", f"length {metrics['completion_length']:3.0f}",
                  f"{seconds:4.1f} s", f"no signal {metrics['groups_without_signal']:.2f}",
                  f"truncated {metrics['truncated']:.2f}"]
        if metrics["updated"]:
            fields += [f"entropy {metrics['entropy']:.3f}", f"grad {metrics['grad_norm']:.3f}"]
        else:
            fields.insert(1, "skipped: the gradient is not finite" if metrics["non_finite"]
                          else "nothing to learn from")
        print(fitting([*fields, f"{metrics['tokens_per_second']:,.0f} tok/s"]))
        if step == 1:
            self._look_at(metrics)
        if "save" in self.seconds and not self.has_weighed_saving:
            self.has_weighed_saving, saving = True, self.seconds["save"]
            if saving > self.config.checkpoint.every * seconds / 5:
                print(block(ADVICE["slow_saving"].format(
                    **dict(self.config), saving=saving, step=seconds,
                    rarer=math.ceil(20 * saving / seconds)), "  "))
        if time.monotonic() - self.drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw_curves()

    def _look_at(self, metrics: dict) -> None:
        """Of the first step, since a run that learns nothing says nothing by itself."""
        numbers = {name: value for name, value in metrics.items() if value is not None}
        shown = dict.fromkeys(metrics, math.nan) | numbers
        looks = []
        for topic in ADVICE["first_step"]:
            says = topic["says"].format(**shown)
            if says.count("nan") == topic["says"].count("{"):  # no number of it
                says = topic.get("without", says)
            print(block(says.replace("nan", "n/a"), "  "))
            looks += [look.format(name=name, **dict(self.config))
                      for sign, low, high, look in topic["signs"] for name in numbers
                      if re.fullmatch(sign, name) and low <= numbers[name] <= high][:topic["most"]]
        if not any(look.startswith("!") for look in looks):
            looks.append("nothing is off" if "moved" in numbers else "no numbers to judge by")
        print(block("\n".join(looks), "  "))

    def evaluation(self, step: int, metrics: dict, groups: list) -> None:
        self._keep(step, metrics)
        samples = [{"step": step, "question": i, "prompt": answer.row["prompt"],
                    "completion": answer.completion, "solved": answer.parts[self.solved],
                    "reward": answer.reward, **answer.parts, "truncated": answer.truncated,
                    "completion_length": len(answer.completion_ids)}
                   for i, group in enumerate(groups) for answer in group]
        self._append("samples.jsonl", samples)
        print(self._bold(fitting([
            f"evaluation at step {step}:", f"solved {_interval(metrics, 'eval/solved')}",
            f"best of {self.config.validation.best_of_n} {metrics['eval/best_of_n']:.3f}",
            f"length {metrics['eval/completion_length']:.0f}"])))
        if step == 0:
            print(block(f"a question as the model reads it:\n{samples[0]['prompt']}", "  "))
        # The first answer to each of three; of a question what it does not share with the others.
        shown = [group[0] for group in groups[:3]]
        prompts = [answer.row["prompt"].split() for answer in shown]
        before = len(os.path.commonprefix(prompts))
        after = len(os.path.commonprefix([prompt[::-1] for prompt in prompts]))
        for prompt, answer in zip(prompts, shown):
            parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
            print(block(" ".join(prompt[before:len(prompt) - after] or prompt), "  "))
            print(block(shortened(answer.completion.strip(), 600), "    "))
            print(block(f"-> reward {answer.reward:.2f} ({parts})", "    "))
        self._draw_curves()
        table = {key: [sample[key] for sample in samples] for key in samples[0]}
        self._tell_mlflow("log_table", table, f"samples/step-{step:06d}.json")

    def _bold(self, text: str) -> str:
        plain = not self.is_terminal or os.environ.get("NO_COLOR")
        return text if plain else f"\033[1m{text}\033[0m"

    def _keep(self, step: int, metrics: dict) -> None:
        self.history.append({"step": step, **metrics})
        self._append("metrics.jsonl", [self.history[-1]])
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self._tell_mlflow("log_metrics", numbers, step=step)

    def _append(self, name: str, records: list[dict]) -> None:
        with self.folder.writing(), open(self.path / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def finish(self, bad_steps: int) -> None:
        """`bad_steps`: so many were not finite since the last update."""
        if RANK != 0:
            return
        summary, folder = self._summary(), self.path / "best"
        first, last, best = (summary[name] for name in ("first", "last", "best"))
        with self.folder.writing():
            (self.path / "summary.json").write_text(json.dumps(summary) + "\n")
        rose = [f"{name} " + (f"{first[f'eval/{key}']:.3f}" if first else "unknown")
                + f" -> {last[f'eval/{key}']:.3f}" for name, key in (
                    ("solved", "solved"), ("reward", "reward"),
                    (f"best of {self.config.validation.best_of_n}", "best_of_n"))]
        print(self._bold(block(f"{', '.join(rose)}, in {last['step']} steps and "
                                f"{summary['seconds']:,.0f} s")))
        if best and best["step"] == 0 < last["step"]:
            print("no evaluation was better than that before training, so that is what best/ holds")
        print(f"the best model, of step {best['step']}, is in {folder}" if best else
              f"warning: {folder} is missing, or not of this run")
        if bad_steps:
            print(block("warning: since the newest checkpoint no gradient was finite, so nothing "
                         f"of what came after it is saved: {self.folder.saved or 'there is none'}"))
        look, ask = ([sys.executable, os.path.relpath(ROOT / "examples" / script)]
                     for script in ("one_run.py", "ask.py"))
        print(f"look at it: {shlex.join([*look, str(self.path)])}")
        if best and self.config.task.name == "countdown":
            ask += ["--model", str(folder), "3", "7", "25", "=", "68"]
            print(f"try it: {shlex.join(ask)}")
        for name in ("config.yaml", *KEPT, "curves.png", "summary.json"):
            if (self.path / name).exists():  # a branch of a finished run has drawn nothing
                self._tell_mlflow("log_artifact", str(self.path / name))
        if self.config.logging.mlflow_model and best:
            self._tell_mlflow("log_artifacts", str(folder.resolve()), "best")
        self._end_mlflow("FINISHED")
        if not self.is_terminal:
            print(json.dumps(summary))

    def _summary(self) -> dict:
        evaluations = {entry["step"]: entry for entry in self.history if "eval/solved" in entry}
        # A run that branched off has the other's history, but a best/ of its own, once evaluated.
        folder, last = self.path / "best", self.history[-1]
        kept = folder.exists() and re.match(r"best-(\d+)", folder.resolve().name)
        best = evaluations.get(int(kept[1]), {"step": int(kept[1])}) if kept else None
        return {"run": self.path.name, "folder": str(self.path), "steps": last["step"],
                "seconds": round(time.monotonic() - self.started, 1),
                "first": evaluations.get(0),  # None where it was cut off
                "last": last, "best": best}

    def card(self, folder: Path, step: int, metrics: dict, prompt: str) -> None:
        """README.md of a model: what it came from, how, how well it does and how to use it."""
        config = self.config
        first = next((entry for entry in self.history if entry["step"] == 0), None)
        base = "" if Path(config.model.name).exists() else f"base_model: {config.model.name}\n"
        results = "\n".join(f"| {name} | {_interval(first, name)} | {_interval(metrics, name)} |"
                            for name in ("eval/solved", "eval/best_of_n"))
        template = (ROOT / "machinery" / "card.md").read_text(encoding="utf-8")
        (folder / "README.md").write_text(template.format(
            base=base, name=self.path.name, step=step, results=results, prompt=json.dumps(prompt),
            folder=self.path / "best", **dict(config),
            settings=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)),
            encoding="utf-8")

    def _draw_curves(self) -> None:
        from matplotlib.figure import Figure  # here, because importing it takes a second
        self.drawn, figure = time.monotonic(), Figure(figsize=(12, 6), layout="constrained")
        for axis, (name, unit) in zip(axes := figure.subplots(2, 3).flat, CURVES.items()):
            axis.set(title=name.replace("_", " "), xlabel="step", ylabel=unit)
            axis.locator_params("x", integer=True)
            for metric, label, color, marker in ((name, "training", "0.6", ""),
                                                 (f"eval/{name}", "held out", "0", "o")):
                points = [(entry["step"], entry[metric], *(
                    abs(entry.get(f"{metric}_{end}", entry[metric]) - entry[metric])
                    for end in ("low", "high"))) for entry in self.history if metric in entry]
                if points:
                    steps, values, *around = zip(*points)
                    axis.errorbar(steps, values, around, label=label, color=color, marker=marker)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        with self.folder.writing():
            figure.savefig(self.path / "curves.png", dpi=110)

    # ------------------------------------------------------------ MLflow

    def _tell_mlflow(self, what, *arguments, **named):
        """In a thread of its own, so that no server can hold up training. `what`: a function, or
        the name of one of MLflow's."""
        def tell() -> None:
            if self.mlflow is None:  # it has failed before
                return
            try:
                import mlflow

                call = getattr(mlflow, what) if isinstance(what, str) else what
                call(*arguments, **named)
            except Exception as error:  # noqa: BLE001, whatever it is, it must not reach training
                self.mlflow = None
                print(_without_password(f"warning: MLflow failed ({type(error).__name__}: "
                                        f"{said(error)}); this run goes on without it"))

        return self.mlflow and self.mlflow.submit(tell)

    def _end_mlflow(self, status: str) -> None:
        ended = self._tell_mlflow("end_run", status)
        if ended and not wait([ended], SECONDS_TO_END_MLFLOW[status]).done:
            print("warning: MLflow is slow to answer, and lacks the end of this run")
        self.mlflow = None

    def _start_mlflow(self) -> None:
        import mlflow

        # Its client retries a dead server for minutes by default.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for name in ("mlflow", "alembic"):  # which tell of every table they make
            logging.getLogger(name).setLevel(logging.WARNING)
        number = os.environ.get("MLFLOW_EXPERIMENT_ID")
        name = None if number else os.environ.get("MLFLOW_EXPERIMENT_NAME", "onefile-grpo")
        experiment, told = mlflow.set_experiment(name, number), self.path / ".mlflow"
        if not told.exists():  # or its duration would lack what has gone before
            began = time.time() - (time.monotonic() - self.started)
            told.write_text(mlflow.MlflowClient().create_run(
                experiment.experiment_id, int(began * 1000), run_name=self.path.name,
                tags=mlflow.tracking.context.registry.resolve_tags()).info.run_id)
        run = mlflow.start_run(told.read_text(), log_system_metrics=True)
        where = mlflow.get_tracking_uri()
        server = where if where.startswith("http") else "http://127.0.0.1:5000"
        page = f"{server}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        first = "" if server == where else f" after `mlflow ui --backend-store-uri {where}`"
        print(f"MLflow: {_without_password(page + first)} shows this run")
        flat = flatten(self.config) | {"run.name": self.path.name}
        # Those that it has from before cannot be changed.
        mlflow.log_params({key: flat[key] for key in flat.keys() - run.data.params.keys()})


def _interval(metrics: dict | None, name: str) -> str:
    if metrics is None:
        return "unknown"
    return f"{metrics[name]:.3f} ({metrics[f'{name}_low']:.3f}–{metrics[f'{name}_high']:.3f})"


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # http://user:password@server
