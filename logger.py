"""What a person sees of a run and what is kept of it. Nothing in here decides anything about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward and length over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best; also the last line on stdout
"""

import dataclasses
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import transformers
import yaml

SECONDS_BETWEEN_PROGRESS_LINES = 30  # where stdout is not a terminal


class Logger:
    """Rank 0 speaks and writes; on the other ranks (`active` false) every method does nothing."""

    def __init__(self, config, active: bool):
        self.config, self.active = config, active
        self.folder = Path(config.run.dir) / config.run.name
        self.history: list[dict] = []  # what metrics.jsonl holds
        self.mlflow = None
        self.started = time.time()
        self.is_terminal = sys.stdout.isatty()
        if not (active and self.is_terminal):
            transformers.utils.logging.disable_progress_bar()
        if active:
            sys.stdout.reconfigure(line_buffering=True)
            self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, model, num_training: int, num_validation: int, num_ranks: int) -> None:
        if not self.active:
            return
        settings = dataclasses.asdict(self.config)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        for name in ("metrics.jsonl", "samples.jsonl"):
            (self.folder / name).write_text("", encoding="utf-8")
        for section, keys in settings.items():
            print(f"{section}: " + ", ".join(f"{key}={value}" for key, value in keys.items()))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters / 1e6:,.1f} M parameters on {num_ranks} x {model.device.type}; {num_training:,} questions to train "
              f"on, {num_validation:,} held out; files in {self.folder}")
        if self.config.logging.mlflow:
            self._start_mlflow({f"{section}.{key}": value for section, keys in settings.items() for key, value in keys.items()})

    # ------------------------------------------------------------ while it runs

    @contextmanager
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

        yield show
        if self.active and self.is_terminal:
            print("\r" + " " * 84 + "\r", end="", flush=True)

    def step(self, step: int, metrics: dict) -> None:
        if not self.active:
            return
        self._keep(step, metrics)
        seconds = metrics["seconds/sample"] + metrics["seconds/learn"]
        learned = (f"entropy {metrics['entropy']:5.3f}  grad {metrics['grad_norm']:6.3f}" if metrics["updated"]
                   else "nothing to learn from")
        print(f"step {step:>5}  reward {metrics['reward']:6.3f}  solved {metrics['solved']:5.3f}  "
              f"no signal {metrics['groups_without_signal']:4.2f}  length {metrics['completion_length']:6.1f}  "
              f"truncated {metrics['truncated']:4.2f}  {learned}  {seconds:5.2f} s  {metrics['tokens_per_second']:7,.0f} tok/s")

    def evaluation(self, step: int, metrics: dict, groups: list) -> None:
        """`groups`: for each held-out question its answers."""
        if not self.active:
            return
        self._keep(step, metrics)
        samples = [{"step": step, "question": i, "prompt": answer.row["prompt"], "completion": answer.completion,
                    "reward": answer.reward, **answer.parts, "truncated": answer.truncated}
                   for i, group in enumerate(groups) for answer in group]
        self._append("samples.jsonl", samples)
        print(f"evaluation at step {step}: solved {_with_interval(metrics, 'eval/solved')}, best of "
              f"{self.config.validation.best_of_n} {_with_interval(metrics, 'eval/best_of_n')}, "
              f"length {metrics['eval/completion_length']:.1f}")
        for group in groups[:3]:
            answer = group[0]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
            print(f"  {answer.row['prompt'].strip()}\n    " + _shorten(answer.completion).strip().replace("\n", "\n    ")
                  + f"\n    -> reward {answer.reward:.2f} ({parts})")
        self._draw_curves()
        self._mlflow("log_table", {key: [sample[key] for sample in samples] for key in samples[0]}, f"samples/step-{step:06d}.json")

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
        best = max(evaluations, key=lambda entry: (entry["eval/best_of_n"], entry["eval/solved"]))
        summary = {"run": self.config.run.name, "folder": str(self.folder), "steps": last["step"],
                   "seconds": round(time.time() - self.started, 1), "first": first, "last": last, "best": best}
        (self.folder / "summary.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
        print(f"solved {first['eval/solved']:.3f} -> {last['eval/solved']:.3f}, best of {self.config.validation.best_of_n} "
              f"{first['eval/best_of_n']:.3f} -> {last['eval/best_of_n']:.3f}; the best model is in {self.folder / 'best'}")
        for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json"):
            self._mlflow("log_artifact", str(self.folder / name))
        self._mlflow("end_run")
        self.mlflow = None
        print(json.dumps(summary))

    def close(self) -> None:
        self._mlflow("end_run", "FAILED")  # unless finish() has ended it already

    # ------------------------------------------------------------ curves and MLflow

    def _draw_curves(self) -> None:
        import matplotlib  # here, because importing it takes a second and only this needs it

        matplotlib.use("Agg")
        from matplotlib import pyplot

        panels = {"accuracy": {"solved": "training", "eval/solved": "held out", "eval/best_of_n": "held out, best of n"},
                  "reward": {"reward": "training", "eval/reward": "held out"},
                  "completion length": {"completion_length": "training", "eval/completion_length": "held out"}}
        styles = [{"color": "0.65", "linewidth": 1}, {"color": "0", "marker": "o"}, {"color": "0.35", "marker": "s", "linestyle": "--"}]
        figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3), layout="constrained")
        for axis, (title, lines) in zip(axes, panels.items()):
            for (metric, label), style in zip(lines.items(), styles):
                points = [(entry["step"], entry[metric]) for entry in self.history if metric in entry]
                axis.plot([step for step, _ in points], [value for _, value in points], label=label, **style)
            axis.set(title=title, xlabel="step")
            axis.legend(fontsize=8)
        figure.savefig(self.folder / "curves.png", dpi=110)
        pyplot.close(figure)

    def _start_mlflow(self, parameters: dict) -> None:
        # Its client retries a dead server for minutes by default, in which nothing would be trained.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow

        self.mlflow = mlflow
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            self._mlflow("set_experiment", "onefile-grpo")
        self._mlflow("start_run", run_name=self.config.run.name)
        self._mlflow("log_params", parameters)

    def _mlflow(self, function: str, *arguments, **named) -> None:
        """Tracking must never stop training: what it cannot take, the files of the run still hold."""
        if self.mlflow:
            try:
                getattr(self.mlflow, function)(*arguments, **named)
            except (self.mlflow.exceptions.MlflowException, OSError) as error:
                self.mlflow = None
                print(f"warning: MLflow failed ({type(error).__name__}: {' '.join(str(error).split())[:200]}); "
                      f"this run goes on without it, its files are in {self.folder}")


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"


def _with_interval(metrics: dict, name: str) -> str:
    interval = metrics[f"{name}_ci95"]
    return f"{metrics[name]:.3f}" + ("" if interval is None else f" ± {interval:.3f}")
