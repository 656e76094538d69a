"""main.py with plain SGD, without moments, in place of AdamW: the same command line.

    .venv/bin/torchrun --nproc-per-node=2 bench/sgd.py training.learning_rate=1.0

Nothing is saved, as a checkpoint of main.py holds AdamW's moments."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.checkpoints import RunFolder

torch.optim.AdamW = lambda parameters, lr, **unused: torch.optim.SGD(parameters, lr)
RunFolder.save = lambda folder, run: None

if __name__ == "__main__":
    main.launch(main.main)
