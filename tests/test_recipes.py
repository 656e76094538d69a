"""The recipes in their smallest form, and the job for Slurm."""

import os
import signal
import subprocess

import pytest
from conftest import read_jsonl, start
from processes import ROOT, inherited_environment

from machinery.settings import read_yaml

RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
# As much of Slurm's commands as the job uses, and a trainer. srun kills its step at SIGTERM.
STUBS = {"srun": '"$@" & trap "kill -KILL $!" TERM; wait $!',
         "torchrun": 'trap "kill $!; touch ended" TERM; sleep 60 & echo $$ >step; echo >pipe; wait',
         "scancel": '[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat step)',
         "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" > asked'}


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_runs_for_a_step_with_all_its_keys_but_those_of_size(recipe, tmp_path):
    data = "tiny/countdown.parquet"
    if "gsm8k" in recipe:
        data = "examples/gsm8k.jsonl"
    if "-cpu" in recipe:
        data = "numbers=2"
    size = {"model.name": "tiny/model", "model.device": "null", "data.dataset": data,
            "data.max_rows": 200, "data.num_validation": 2, "data.max_prompt_tokens": 490,
            "data.validation": "null", "training.max_new_gen_tokens": 20,
            "training.num_samples_per_step": 2, "training.max_steps": 1, "validation.best_of_n": 2,
            "run.dir": str(tmp_path), "run.name": "a"}

    if "training.teacher" in read_yaml(ROOT / "recipes" / recipe):
        size["training.teacher"] = "tiny/lab/model"
    small = [f"{key}={value}" for key, value in size.items()]
    assert start(["--config", f"recipes/{recipe}", *small]) == 0

    evaluation, step, _ = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert "eval/solved" in evaluation and step["step"] == 1 and step["non_finite"] == 0
    used = read_yaml(tmp_path / "a" / "config.yaml")
    for key, value in read_yaml(ROOT / "recipes" / recipe).items():
        assert key in size or used[key] == value


def test_the_slurm_job_ends_the_trainer_and_is_queued_again_when_it_is_preempted(tmp_path):
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    environment = {**inherited_environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}",
                   "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "here",
                   "SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1"}

    job = subprocess.Popen([ROOT / "recipes" / "slurm.sh"], env=environment)
    (tmp_path / "pipe").read_text()  # It waits for the trainer.
    job.send_signal(signal.SIGTERM)

    assert job.wait() == 0
    assert (tmp_path / "ended").exists() and (tmp_path / "asked").read_text() == "requeue 7\n"
