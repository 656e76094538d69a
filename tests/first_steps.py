"""Makes tests/first_steps.jsonl: the first step of six healthy kinds of run, with 20 seeds each. On
these, the lines below step 1 must say that nothing is off (tests/test_first_step.py).

    .venv/bin/python tests/first_steps.py models/smollm2 runs/<name>/best
        adds what the file lacks, in an hour on one core. It takes the model of
        recipes/smollm2-135m-cpu.yaml, and a teacher: the best model of the first run
    .venv/bin/python tests/first_steps.py models/smollm2 runs/<name>/best lab sil
        the same for these kinds alone
"""

import json
import random
import sys
from pathlib import Path

from conftest import ROOT, read_jsonl  # isort: skip  It sets paths.

import torch
from silent import NoFolder, SilentLog

import main
from machinery.metrics import evaluation_metrics
from machinery.ranks import join
from machinery.settings import load_config

FILE = ROOT / "tests" / "first_steps.jsonl"
NUM_SEEDS = 20
# One process takes the batch of two.
BATCH = "training.num_samples_per_step=16"
KINDS = {
    "default": [],
    "lab": ["--config", str(ROOT / "recipes/lab.yaml")],
    "sil": ["training.learning_type=sil", "training.k_best_of_n=[2, 8]"],
    "random rewards": [],
    "distill": ["training.learning_type=distill"],
    "smollm2": ["--config", str(ROOT / "recipes/smollm2-135m-cpu.yaml")],
}


def settings_of(kind: str, seed: int) -> list[str]:
    """Returns the settings that the lines below step 1 depend on."""
    teacher = ["training.teacher=any"] if kind == "distill" else []
    return [*KINDS[kind], *teacher, BATCH, "model.precision=float32", f"training.seed={seed}"]


def first_step(kind: str, seed: int, models: dict[str, list[str]]) -> dict[str, float | None]:
    """Returns the metrics of an evaluation before training, and of step 1."""
    config = load_config([*settings_of(kind, seed), *models.get(kind, [])])
    run = main.prepare(config, NoFolder(), SilentLog())
    if kind == "random rewards":
        stream = random.Random(seed)
        run.task.reward_function = lambda completion, row: {
            "format": stream.random(), "answer": float(stream.random() < 0.5)}
    before = evaluation_metrics(main.evaluate(run), run.task)
    main.training_step(run)
    record = {"kind": kind, "seed": seed}
    for name, value in (before | run.log.metrics).items():
        if name == "eval/solved" or name.startswith("eval/reward/") or not name.startswith("eval/"):
            record[name] = value and float(f"{value:.6g}")
    return record


def make(models: dict[str, list[str]], kinds: list[str]) -> None:
    torch.set_num_threads(1)
    join()
    FILE.touch()
    known = [(record["kind"], record["seed"]) for record in read_jsonl(FILE)]
    for kind in kinds:
        for seed in range(NUM_SEEDS):
            if (kind, seed) not in known:
                record = first_step(kind, seed, models)
                with open(FILE, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(kind, seed, flush=True)


if __name__ == "__main__":
    model, teacher, *chosen = sys.argv[1:]
    make({"smollm2": [f"model.name={Path(model).resolve()}"],
          "distill": [f"training.teacher={Path(teacher).resolve()}"]}, chosen or list(KINDS))
