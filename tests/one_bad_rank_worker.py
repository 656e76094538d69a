"""main.py, except that on rank 1 the gradient of step 2 is not finite; each rank leaves a digest of its weights after every step."""

import hashlib
import sys
from pathlib import Path

import conftest  # noqa: F401, finds main.py and sets the threads

import main

folder = Path(next(argument for argument in sys.argv if argument.startswith("run.dir=")).removeprefix("run.dir="))
training_step, policy_loss = main.training_step, main.policy_loss
step = 0


def recorded(run):
    global step
    step = run.state.step + 1
    training_step(run)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in run.model.parameters())
    with open(folder / f"weights-{main.RANK}", "a") as file:
        print(hashlib.sha256(weights).hexdigest(), file=file)


main.training_step = recorded


def bad_loss(*arguments):
    loss, watched = policy_loss(*arguments)
    return loss * (float("inf") if (main.RANK, step) == (1, 2) else 1.0), watched


main.policy_loss = bad_loss
main.main(sys.argv[1:])
