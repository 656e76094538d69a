"""The recipes, and the keys of each paper, in their smallest form."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import read_jsonl, start
from processes import ROOT
from test_resume import SMALL

from machinery.settings import read_yaml

STUBS = {"srun": '#!/bin/bash\n"$@" &\necho $! > "$STUB_LOG-step"\n'
                 'trap "kill -KILL $!" TERM\nwait $!\n',  # a SIGTERM of its own kills the step
         "scancel": '#!/bin/bash\n[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] '
                    '&& kill -TERM $(cat "$STUB_LOG-step")\n',
         "scontrol": '#!/bin/bash\n[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> "$STUB_LOG"\n'}


@pytest.mark.parametrize("recipe", sorted(path.name for path in (ROOT / "recipes").glob("*.yaml")))
def test_each_recipe_runs_for_a_step_with_a_tiny_model(recipe, tmp_path):
    """With all its keys but those of size: its model and data, which a test cannot fetch, and how
    many tokens and questions."""
    data = "examples/gsm8k.jsonl" if "gsm8k" in recipe else "tiny/countdown.parquet"
    small = ["model.name=tiny/model", f"data.dataset={data}", "data.max_rows=200",
             "data.num_validation=4", "data.max_prompt_tokens=490",
             "training.max_new_gen_tokens=20", "training.num_samples_per_step=2",
             "training.max_steps=1", "validation.best_of_n=2"]
    assert start(["--config", f"recipes/{recipe}", *small, f"run.dir={tmp_path}",
                  "run.name=a"]) == 0
    evaluation, step, _ = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert "eval/solved" in evaluation and step["step"] == 1 and step["non_finite"] == 0
    keys, left = (read_yaml(ROOT / "recipes" / recipe),
                  read_yaml(tmp_path / "a" / "config.yaml"))
    assert {key: left[key] for key in keys
            if not any(argument.startswith(f"{key}=") for argument in small)} == {
                key: value for key, value in keys.items()
                if not any(argument.startswith(f"{key}=") for argument in small)}
    # what it is meant for
    assert "GB" in (ROOT / "recipes" / recipe).read_text().split("\nmodel:")[0]


PAPERS = re.findall(r"^- \[(.*?)\]\(https://arxiv[^)]*\)(.*?)(?=^- |^$)", (
    ROOT / "docs" / "coming-from.md").read_text().split("## Papers as keys")[1].split("\n## ")[0],
    re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("paper, row", PAPERS, ids=[paper for paper, _ in PAPERS])
def test_the_keys_of_each_paper_make_a_step(paper, row, tmp_path):
    keys = [f"training.{key}" for key in re.findall(r"`(\w+=.*?)`", row)]
    assert len(PAPERS) == 10 and (keys or paper in ("Dr. GRPO", "RLOO"))
    if any("updates_per_batch" in key for key in keys):
        assert any("clip" in key for key in keys)
    assert start(["training.max_steps=1", "training.max_new_gen_tokens=100",
                  "training.num_samples_per_step=2", "data.num_validation=2", "data.max_rows=50",
                  "validation.best_of_n=1", f"run.dir={tmp_path}", "run.name=a", *keys]) == 0
    step = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
    assert step["updated"] == 2 if "updates_per_batch=2" in row else step["updated"] == 1


@pytest.mark.soak
def test_the_slurm_job_asks_to_be_queued_again_when_preempted_and_then_resumes(tmp_path):
    """With one machine and one rank; srun, scancel and scontrol are stubs."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ,
                   "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                   "STUB_LOG": str(tmp_path / "stub"), "SLURM_SUBMIT_DIR": str(ROOT),
                   "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(os.getpid()),
                   "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "1",
                   "HF_HUB_OFFLINE": "1"}
    output = tmp_path / "output"

    def submit(*settings, **more):
        with open(output, "a") as file:
            return subprocess.Popen([ROOT / "recipes" / "slurm.sh", *SMALL, f"run.dir={tmp_path}",
                                     *settings], stdout=file, stderr=file,
                                    env={**environment, **more})

    job = submit("training.max_steps=100000")
    try:
        end = time.time() + 120
        while "step    2 " not in output.read_text():
            assert job.poll() is None and time.time() < end, output.read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=30) == 0
    finally:
        job.terminate()  # or, where something above has failed, it would never end
    assert (tmp_path / "stub").read_text() == f"requeue {os.getpid()}\n"
    saved = max((tmp_path / "a" / "checkpoints").glob("step-*"))
    job = submit(f"training.max_steps={int(saved.name[5:]) + 1}", SLURM_RESTART_COUNT="1")
    assert job.wait(timeout=120) == 0, output.read_text()
    assert f"resuming from {saved}" in output.read_text()
