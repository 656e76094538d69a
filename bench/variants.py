"""main.py with one thing changed that no key of config.yaml changes.

    .venv/bin/torchrun --nproc-per-node=2 bench/variants.py punished --config recipes/lab.yaml

- sgd: SGD takes the place of AdamW. Only step 0 is saved, because other checkpoints hold AdamW's
  state.
- rewarded, punished: only positive, or only negative, advantages count."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.runs import RunFolder

plain_advantages = main.compute_advantages


def sgd() -> None:
    torch.optim.AdamW = lambda parameters, lr, **unused: torch.optim.SGD(parameters, lr)
    save = RunFolder.save

    def save_step_0(folder, *models, step, **state):
        if step == 0:
            save(folder, *models, step=step, **state)

    RunFolder.save = save_step_0


def only(sign: int) -> None:
    def compute_advantages(group, training):
        answers = plain_advantages(group, training)
        for answer in answers:
            answer.advantage = sign * max(0.0, sign * answer.advantage)
        return answers

    main.compute_advantages = compute_advantages


VARIANTS: dict[str, Callable[[], None]] = {
    "sgd": sgd,
    "rewarded": partial(only, 1),
    "punished": partial(only, -1),
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        sys.exit(f"error: the first word is one of {', '.join(VARIANTS)}")
    VARIANTS[sys.argv.pop(1)]()
    main.launch(main.main)
