"""What a person sees of a run and what is kept of it. Nothing in here decides about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward, length and the like over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best; also the last line shown

Beside them lie runs/<name>/checkpoints/ and the link runs/<name>/best: machinery/checkpoints.py.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import yaml

from machinery.errors import Stopped, UserError, is_out_of_memory
from machinery.ranks import DEVICE, RANK, WORLD_SIZE
from machinery.settings import flatten

HERE = Path(__file__).resolve().parent
SECONDS_BETWEEN_PROGRESS_LINES = 30  # where stdout is not a terminal
SECONDS_BETWEEN_DRAWINGS = 60
SECONDS_TO_END_MLFLOW = {"FINISHED": 60, "FAILED": 5, "KILLED": 5}  # what it has not been told yet
KEPT = ("metrics.jsonl", "samples.jsonl")  # they grow, and are cut back when a run goes on
REMEDIES = {  # where memory runs out in a phase: what costs least first
    "read": "take a smaller model, or lower data.max_rows ({data.max_rows})",
    "prepare": "set model.lora_rank ({model.lora_rank}) to 32, say, or model.precision "
               "({model.precision}) to bfloat16, or take a smaller model",
    "sample": "lower sampling.max_rows ({sampling.max_rows}), then training.max_new_gen_tokens "
              "({training.max_new_gen_tokens})",
    "learn": "lower training.tokens_per_micro_batch ({training.tokens_per_micro_batch}), then set "
             "model.gradient_checkpointing ({model.gradient_checkpointing}) to true, then "
             "model.precision ({model.precision}) to bfloat16"}
REMEDIES["evaluate"] = REMEDIES["sample"]


class Logger:
    """Rank 0 speaks and writes; on the others its methods show and write nothing."""

    def __init__(self, config, folder):
        self.config, self.folder, self.path = config, folder, folder.path
        self.history: list[dict] = []  # what metrics.jsonl holds
        self.seconds: dict[str, float] = {}  # of each phase when it last ran
        self.started = self.drawn = time.time()
        self.is_terminal = sys.stdout.isatty()
        self.mlflow: ThreadPoolExecutor | None = None  # see `_tell_mlflow`
        self.mlflow_run_id: str | None = None
        if RANK == 0:
            sys.stdout.reconfigure(line_buffering=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        stopped = isinstance(error, Stopped)
        if stopped and RANK == 0:
            saved = f"saved up to {self.folder.saved}; the same command goes on from there"
            print(f"\nstopped by {error.args[0].name}; "
                  f"{saved if self.folder.saved else 'nothing is saved yet'}")
        self._end_mlflow("KILLED" if stopped else "FAILED")

    def start(self, run) -> None:
        if RANK != 0:
            return
        settings = self.config.model_dump(mode="json")
        settings["run"]["name"] = self.path.name
        bookmark = {"seconds": 0, "bytes": dict.fromkeys(KEPT, 0), "mlflow_run_id": None}
        with self.folder.writing():
            (self.path / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
            (self.path / "summary.json").unlink(missing_ok=True)
            if self.folder.checkpoint:
                bookmark = self._go_on(*self.folder.checkpoint)
            self.started -= bookmark["seconds"]
            for name in KEPT:
                self._cut_back(name, bookmark["bytes"][name])
        with open(self.path / "metrics.jsonl", encoding="utf-8") as file:
            self.history = [json.loads(line) for line in file]
        for section, keys in settings.items():
            print(f"{section}: " + ", ".join(f"{key}={value}" for key, value in keys.items()))
        parameters = sum(parameter.numel() for parameter in run.model.parameters())
        print(f"{parameters / 1e6:,.1f} M parameters on {WORLD_SIZE} x {DEVICE.type}; "
              f"{len(run.training_rows):,} questions to train on, {len(run.validation_rows):,} "
              f"held out; files in {self.path}")
        if self.config.logging.mlflow:
            self.mlflow = ThreadPoolExecutor(max_workers=1)
            self._tell_mlflow(self._start_mlflow, bookmark["mlflow_run_id"])

    def _go_on(self, path: Path, rank: int, saved: dict) -> dict:
        """Says from where; returns where our files stood."""
        bookmark, origin, told = saved["log"], path.parent.parent, self.path / ".mlflow"
        branches = origin.resolve() != self.path.resolve()
        if branches:  # into an MLflow run of its own
            bookmark["mlflow_run_id"] = None
        elif told.exists():  # at times MLflow has told us only after the checkpoint
            bookmark["mlflow_run_id"] = told.read_text()
        print(f"going on from {path}")
        for change in self.folder.changes:
            print(f"changed since the checkpoint: {change}")
        if saved["num_ranks"] != WORLD_SIZE:
            print(f"{WORLD_SIZE} ranks now, {saved['num_ranks']} at the checkpoint: the questions "
                  "stay the same, the answers that are sampled will differ")
        if saved["step"] >= self.config.training.max_steps:
            print("this run has finished before: raise training.max_steps to go on with it, or set "
                  "run.name to a new name to run it anew")
        for name in KEPT:
            if branches and not (self.path / name).exists() and (origin / name).exists():
                shutil.copyfile(origin / name, self.path / name)
        return bookmark

    def _cut_back(self, name: str, size: int) -> None:
        with open(self.path / name, "ab") as file:
            if file.tell() < size:
                print(f"warning: {self.path / name} is shorter than at the checkpoint; what it has "
                      "lost is not made up for")
            file.truncate(min(size, file.tell()))

    def bookmark(self) -> dict:
        """Where our files stand, safely on disk, for `start` to cut them back to."""
        for name in KEPT:
            with open(self.path / name, "rb") as file:
                os.fsync(file.fileno())
        return {"seconds": time.time() - self.started, "mlflow_run_id": self.mlflow_run_id,
                "bytes": {name: (self.path / name).stat().st_size for name in KEPT}}

    # ------------------------------------------------------------ while it runs

    @contextlib.contextmanager
    def phase(self, name: str, total: int = 0):
        """A bar, the phase's seconds, and if memory runs out the keys to change."""
        started, bar = time.perf_counter(), Bar(name, total, self.is_terminal)
        try:
            yield bar
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            remedy = REMEDIES[name].format(**dict(self.config))
            raise UserError(f"out of memory in phase {name}: {remedy}") from error
        finally:
            bar.wipe()
            self.seconds[name] = time.perf_counter() - started

    def say(self, text: str) -> None:
        if RANK == 0:
            print(text)

    def step(self, step: int, metrics: dict) -> None:
        if RANK != 0:
            return
        self._keep(step, metrics)
        seconds = metrics["seconds/sample"] + metrics["seconds/learn"]
        learned = "nothing to learn from"
        if metrics["updated"]:
            learned = f"entropy {metrics['entropy']:5.3f}  grad {metrics['grad_norm']:6.3f}"
        elif metrics["non_finite"]:
            learned = "skipped: the gradient is not finite"
        print(f"step {step:>5}  reward {metrics['reward']:6.3f}  solved {metrics['solved']:5.3f}  "
              f"no signal {metrics['groups_without_signal']:4.2f}  "
              f"length {metrics['completion_length']:6.1f}  truncated {metrics['truncated']:4.2f}  "
              f"{learned}  {seconds:5.2f} s  {metrics['tokens_per_second']:7,.0f} tok/s")
        if time.time() - self.drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw_curves()

    def evaluation(self, step: int, metrics: dict, groups: list) -> None:
        """`groups`: for each held-out question its answers. Rank 0 alone has them."""
        self._keep(step, metrics)
        samples = [{"step": step, "question": i, "prompt": answer.row["prompt"],
                    "completion": answer.completion, "reward": answer.reward, **answer.parts,
                    "truncated": answer.truncated}
                   for i, group in enumerate(groups) for answer in group]
        self._append("samples.jsonl", samples)
        n, length = self.config.validation.best_of_n, metrics["eval/completion_length"]
        solved, best = (_interval(metrics, f"eval/{name}") for name in ("solved", "best_of_n"))
        print(self._bold(f"evaluation at step {step}: solved {solved}, best of {n} {best}, "
                         f"length {length:.1f}"))
        for group in groups[:3]:
            answer = group[0]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
            said = _shorten(answer.completion).strip().replace("\n", "\n    ")
            print(f"  {answer.row['prompt'].strip()}\n    {said}\n    -> reward "
                  f"{answer.reward:.2f} ({parts})")
        self._draw_curves()
        columns = {key: [sample[key] for sample in samples] for key in samples[0]}
        self._tell_mlflow("log_table", columns, f"samples/step-{step:06d}.json")

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

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        if RANK != 0:
            return
        evaluations = [entry for entry in self.history if "eval/solved" in entry]
        first, last = evaluations[0], evaluations[-1]
        # A run that branched off has the other's history, but a best/ of its own, once evaluated.
        kept = re.match(r"best-(\d+)", (self.path / "best").resolve().name)
        of_it = [entry for entry in evaluations if kept and entry["step"] == int(kept[1])]
        best = max(of_it or evaluations, key=lambda entry: entry["eval/best_of_n"])
        summary = {"run": self.path.name, "folder": str(self.path), "steps": last["step"],
                   "seconds": round(time.time() - self.started, 1),
                   "first": first, "last": last, "best": best}
        with self.folder.writing():
            (self.path / "summary.json").write_text(json.dumps(summary) + "\n")
        names = {"solved": "solved", "best_of_n": f"best of {self.config.validation.best_of_n}",
                 "reward": "reward"}
        rose = ", ".join(f"{said} {first[f'eval/{name}']:.3f} -> {last[f'eval/{name}']:.3f}"
                         for name, said in names.items())
        print(self._bold(f"{rose}, in {last['step']} steps and {summary['seconds']:,.0f} s"))
        if kept:
            ask = [sys.executable, os.path.relpath(HERE / "examples" / "ask.py"), "--model",
                   str(self.path / "best"), "3", "7", "25", "=", "68"]
            ending = f"; try it: {shlex.join(ask)}" if self.config.task.name == "countdown" else ""
            print(f"the best model, of step {best['step']}, is in {self.path / 'best'}{ending}")
        for name in ("config.yaml", *KEPT, "curves.png", "summary.json"):
            if (self.path / name).exists():  # a branch of a finished run has drawn nothing
                self._tell_mlflow("log_artifact", str(self.path / name))
        if self.config.logging.mlflow_model and kept:
            self._tell_mlflow("log_artifacts", str((self.path / "best").resolve()), "best")
        self._end_mlflow("FINISHED")
        print(json.dumps(summary))

    def card(self, folder: Path, step: int, metrics: dict, prompt: str) -> None:
        """README.md of a model: what it came from, how, how well it does and how to use it."""
        config = self.config
        first = next((entry for entry in self.history if "eval/solved" in entry), metrics)
        base = "" if Path(config.model.name).exists() else f"base_model: {config.model.name}\n"
        results = "\n".join(f"| {name} | {_interval(first, name)} | {_interval(metrics, name)} |"
                            for name in ("eval/solved", "eval/best_of_n"))
        template = (HERE / "machinery" / "card.md").read_text(encoding="utf-8")
        (folder / "README.md").write_text(template.format(
            base=base, name=self.path.name, model=config.model.name, step=step, results=results,
            dataset=config.data.dataset, task=config.task.name, prompt=json.dumps(prompt),
            learning=config.training.learning_type, n=config.validation.best_of_n,
            held_out=config.data.num_validation, folder=self.path / "best",
            L=config.training.max_new_gen_tokens, temperature=config.sampling.temperature,
            top_k=config.sampling.top_k, top_p=config.sampling.top_p,
            settings=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)),
            encoding="utf-8")

    def _draw_curves(self) -> None:
        import matplotlib  # here, because importing it takes a second and only this needs it

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.drawn = time.time()
        figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
        for axis, name in zip(axes.flat, ("solved", "best_of_n", "reward", "completion_length",
                                          "truncated", "groups_without_signal")):
            axis.set(title=name.replace("_", " "), xlabel="step")
            for metric, style in (
                    (name, {"label": "training", "color": "0.6", "linewidth": 1}),
                    (f"eval/{name}", {"label": "held out", "color": "0", "marker": "o"})):
                points = [(entry["step"], entry[metric], entry.get(f"{metric}_ci95") or 0.0)
                          for entry in self.history if metric in entry]
                if points:
                    steps, values, intervals = zip(*points)
                    axis.plot(steps, values, **style)
                    axis.legend(fontsize=8)
                    if any(intervals):
                        low, high = ([value + sign * width for _, value, width in points]
                                     for sign in (-1, 1))
                        axis.fill_between(steps, low, high, color="0", alpha=0.12, linewidth=0)
        with self.folder.writing():
            figure.savefig(self.path / "curves.png", dpi=110)
        pyplot.close(figure)

    # ------------------------------------------------------------ MLflow

    def _tell_mlflow(self, what, *arguments, **named):
        """In a thread of its own, so that no server, slow or gone, can hold up training: what it
        does not take, the files of the run still hold. `what`: a function, or the name of one."""
        def tell() -> None:
            if self.mlflow is None:  # it has failed before
                return
            try:
                import mlflow

                call = getattr(mlflow, what) if isinstance(what, str) else what
                call(*arguments, **named)
            except Exception as error:  # noqa: BLE001, whatever it is, it must not reach training
                self.mlflow = None
                message = _without_password(" ".join(str(error).split()))[:200]
                print(f"warning: MLflow failed ({type(error).__name__}: {message}); this run goes "
                      f"on without it, its files are in {self.path}")

        return self.mlflow and self.mlflow.submit(tell)

    def _end_mlflow(self, status: str) -> None:
        if ended := self._tell_mlflow("end_run", status):
            if not wait([ended], SECONDS_TO_END_MLFLOW[status]).done:
                print("warning: MLflow is slow to answer and lacks the end of this run; its files "
                      f"are in {self.path}")
            self.mlflow = None

    def _start_mlflow(self, run_id: str | None) -> None:
        import mlflow

        # Its client retries a dead server for minutes by default.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for name in ("mlflow", "alembic"):  # which tell of every table they make
            logging.getLogger(name).setLevel(logging.WARNING)
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            mlflow.set_experiment("onefile-grpo")
        has_psutil = importlib.util.find_spec("psutil") is not None  # what reads system metrics
        run = mlflow.start_run(run_id=run_id, run_name=self.path.name,
                               log_system_metrics=has_psutil)
        self.mlflow_run_id = run.info.run_id
        (self.path / ".mlflow").write_text(self.mlflow_run_id)
        page = where = mlflow.get_tracking_uri()
        if not where.startswith("http"):
            page = f"http://127.0.0.1:5000 after `mlflow ui --backend-store-uri {where}`"
        more = "" if has_psutil else "; for system metrics, pip install psutil"
        print(f"MLflow: {_without_password(page)} shows this run{more}")
        flat = flatten(self.config) | {"run.name": self.path.name}
        # Those that it has from before cannot be changed.
        mlflow.log_params({key: flat[key] for key in flat.keys() - run.data.params.keys()})


class Bar:
    """A bar on a terminal, now and then a line elsewhere. Rank 0 shows its own share."""

    def __init__(self, name: str, total: int, is_terminal: bool):
        self.name, self.total, self.is_terminal, self.done = name, total, is_terminal, 0
        self.started = self.shown = time.time()

    def update(self, n: int) -> None:
        self.done += n
        now, between = time.time(), 0.2 if self.is_terminal else SECONDS_BETWEEN_PROGRESS_LINES
        if RANK != 0 or now - self.shown < between:
            return
        self.shown = now
        rate = self.done / (now - self.started)
        left = f", {rate:.1f}/s, {(self.total - self.done) / rate:.0f} s left" if rate else ""
        text = f"{self.name} {self.done}/{self.total}{left}"
        if self.is_terminal:
            bar = "#" * (20 * self.done // self.total)
            print(f"\r[{bar:<20}] {text:<60}", end="", flush=True)
        else:
            print(text)

    def wipe(self) -> None:
        if RANK == 0 and self.is_terminal and self.total:
            print("\r" + " " * 84 + "\r", end="", flush=True)


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"


def _interval(metrics: dict, name: str) -> str:
    interval = metrics[f"{name}_ci95"]
    return f"{metrics[name]:.3f}" + ("" if interval is None else f" ± {interval:.3f}")


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # http://user:password@server
