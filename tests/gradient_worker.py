"""Run by torchrun from test_learning.py: each rank learns from its share of one batch; rank 0 leaves the gradients behind."""

import json
import sys
from pathlib import Path

import torch
from conftest import gradient, make_config, make_model
from test_learning import ARCHITECTURE, GROUP, QUESTIONS, TEMPERATURE, L, make_case
from torch.nn.parallel import DistributedDataParallel

import main

folder = Path(sys.argv[1])
config = make_config(training__num_samples_per_step=QUESTIONS // main.WORLD_SIZE, training__k_best_of_n=[GROUP, GROUP],
                     training__max_new_gen_tokens=L, training__max_grad_norm=None, training__tokens_per_micro_batch=60)
device, _ = main.setup_distributed()
cases = []
for dtype in (torch.float32, torch.float64):
    for idle_share in (False, True):
        model = make_model(ARCHITECTURE[dtype], dtype)
        policy = DistributedDataParallel(main.Policy(model, TEMPERATURE, mixed=False), gradient_as_bucket_view=True)
        batch = make_case(idle_share)
        share = batch[main.RANK * len(batch) // main.WORLD_SIZE:(main.RANK + 1) * len(batch) // main.WORLD_SIZE]
        metrics = main.policy_gradient(policy, share, config, device, lambda *_: None)
        cases.append({"idle_share": idle_share, "file": f"{len(cases)}.pt", "metrics": metrics})
        if main.RANK == 0:
            torch.save(gradient(model).clone(), folder / cases[-1]["file"])
if main.RANK == 0:
    (folder / "cases.json").write_text(json.dumps(cases))
main.leave(0)
