"""The relatives of Dr. GRPO on the embedded default: same seed, same number of samples, same \
questions held out.

    .venv/bin/python bench/family.py
        about six minutes a row on two cores
    .venv/bin/python bench/family.py --only LoRA training.seed=1
        more keys go to every run"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAMILY = {
    "Dr. GRPO": [],
    "GRPO": ["training.scale_rewards=group", "training.loss_normalizer=sequence",
             "training.kl_beta=0.04"],
    "DAPO's normaliser": ["training.loss_normalizer=tokens"],
    "mu = 2, clipped": ["training.updates_per_batch=2", "training.clip=[0.2,0.2]"],
    "SIL, 2 best of 8": ["training.learning_type=sil", "training.k_best_of_n=[2,8]"],
    "LoRA, rank 16": ["model.lora_rank=16", "training.learning_rate=1.0e-3"],
}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--only", choices=FAMILY, action="append", help="these rows alone")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("keys", nargs="*", help="section.key=value, for every run")
options = parser.parse_intermixed_args()
results = {}
print(f"{'':<20} {'solved before':>15} {'after':>15} {'best of n':>15} {'tokens':>13} "
      f"{'seconds':>8}   keys", flush=True)
for name in options.only or FAMILY:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={options.ranks}", "main.py", *FAMILY[name], *options.keys,
                   f"run.dir={folder}"]
        ended = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    summary = json.loads(ended.stdout.splitlines()[-1])
    first, last = summary["first"], summary["last"]
    results[name] = {"seconds": summary["seconds"], "first": first, "last": last,
                     "best": summary["best"]}

    def pair(key, first=first, last=last):
        return f"{first[key]:.3f} -> {last[key]:.3f}"
    print(f"{name:<20} {first['eval/solved']:.3f} ± {first['eval/solved_ci95']:.3f}   "
          f"{last['eval/solved']:.3f} ± {last['eval/solved_ci95']:.3f}  "
          f"{pair('eval/best_of_n')}  {first['eval/completion_length']:5.1f} -> "
          f"{last['eval/completion_length']:5.1f} {summary['seconds']:6.0f}   "
          f"{' '.join(FAMILY[name])}", flush=True)
print(json.dumps(results))
