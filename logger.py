"""What a person sees of a run and what is kept of it. Nothing in here decides anything about training.

    runs/<name>/config.yaml      every setting, resolved
    runs/<name>/metrics.jsonl    one object per step and per evaluation
    runs/<name>/samples.jsonl    the answers of each evaluation with their rewards
    runs/<name>/curves.png       accuracy, reward and length over the steps
    runs/<name>/summary.json     how it began, how it ended, what was best; also the last line on stdout
"""

import dataclasses
import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path

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
    def progress(self, label: str, total: int):
        """Yields a function to call with how much is done: a bar on a terminal, now and then a line elsewhere."""
        started = last_shown = time.time()

        def show(done: int) -> None:
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
        print(f"evaluation at step {step}: solved {metrics['eval/solved']:.3f} ± {metrics['eval/solved_ci95']:.3f}, "
              f"best of {self.config.validation.best_of_n} {metrics['eval/best_of_n']:.3f} ± {metrics['eval/best_of_n_ci95']:.3f}, "
              f"length {metrics['eval/completion_length']:.1f}")
        for group in groups[:3]:
            answer = group[0]
            parts = ", ".join(f"{name} {value:.2f}" for name, value in answer.parts.items())
            print(f"  {answer.row['prompt'].strip()}\n    " + _shorten(answer.completion).strip().replace("\n", "\n    ")
                  + f"\n    -> reward {answer.reward:.2f} ({parts})")
        self._draw_curves()
        if self.mlflow:
            self.mlflow.log_table({key: [sample[key] for sample in samples] for key in samples[0]}, f"samples/step-{step:06d}.json")

    def _keep(self, step: int, metrics: dict) -> None:
        self.history.append({"step": step, **metrics})
        self._append("metrics.jsonl", [self.history[-1]])
        if self.mlflow:
            self.mlflow.log_metrics({name: value for name, value in metrics.items() if value is not None}, step=step)

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
        if self.mlflow:
            for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "curves.png", "summary.json"):
                self.mlflow.log_artifact(str(self.folder / name))
            self.mlflow.end_run()
            self.mlflow = None
        print(json.dumps(summary))

    def close(self) -> None:
        if self.mlflow:  # finish() was never reached
            self.mlflow.end_run("FAILED")
            self.mlflow = None

    # ------------------------------------------------------------ curves and MLflow

    def _draw_curves(self) -> None:
        import matplotlib  # here, because importing it takes a second and only this needs it

        matplotlib.use("Agg")
        from matplotlib import pyplot

        panels = [("solved", "eval/solved", "solved, held out"), ("reward", "eval/best_of_n", "best of n, held out"),
                  ("completion_length", "eval/completion_length", "length, held out")]
        figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3), layout="constrained")
        for axis, (metric, eval_metric, eval_label) in zip(axes, panels):
            for name, label, style in ((metric, f"{metric.replace('_', ' ')}, training", {"color": "0.6", "linewidth": 1}),
                                       (eval_metric, eval_label, {"color": "0.0", "marker": "o"})):
                points = [(entry["step"], entry[name]) for entry in self.history if name in entry]
                axis.plot(*zip(*points) if points else ((), ()), label=label, **style)
            axis.set_xlabel("step")
            axis.legend(fontsize=8)
        figure.savefig(self.folder / "curves.png", dpi=110)
        pyplot.close(figure)

    def _start_mlflow(self, parameters: dict) -> None:
        import mlflow

        mlflow.set_experiment("onefile-grpo")
        mlflow.start_run(run_name=self.config.run.name)
        mlflow.log_params(parameters)
        self.mlflow = mlflow


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit // 2]} ... {text[-limit // 2:]}"
