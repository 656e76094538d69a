"""Run by torchrun from test_family.py and test_learning.py: each rank learns from its share of one batch, in every case of a list; rank 0
leaves the gradients behind."""

import json
import sys
from pathlib import Path

import torch
from conftest import gradient, make_model
from test_learning import ARCHITECTURE, GROUP, QUESTIONS, learn, make_case

import main

folder = Path(sys.argv[1])
device, _ = main.setup_distributed()
for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
    batch = make_case(case["idle_share"])
    share = batch[main.RANK * len(batch) // main.WORLD_SIZE:(main.RANK + 1) * len(batch) // main.WORLD_SIZE]
    assert len(share) == QUESTIONS * GROUP // main.WORLD_SIZE
    dtype = getattr(torch, case["dtype"])
    model = make_model(ARCHITECTURE[dtype], dtype)
    metrics = learn(model, share, device, training__tokens_per_micro_batch=60, **case["keys"])
    if main.RANK == 0:
        torch.save(gradient(model).clone(), folder / f"{number}.pt")
        (folder / f"{number}.json").write_text(json.dumps(metrics))
main.leave(0)
