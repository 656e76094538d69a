"""main.py where only advantages of one sign count. No key of config.yaml does that.

    .venv/bin/torchrun --nproc-per-node=2 bench/variants.py punished --config recipes/lab.yaml

- rewarded: only positive advantages count.
- punished: only negative advantages count."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import main
from machinery.settings import TrainingSettings

SIGNS = {"rewarded": 1, "punished": -1}


def keep_sign(answers: list[main.Trajectory], sign: int) -> None:
    """Sets advantages of the other sign to 0."""
    for answer in answers:
        answer.advantage = sign * max(0.0, sign * answer.advantage)


def count_only(sign: int) -> None:
    """From now on, main.py's `compute_advantages` has only advantages of this sign."""
    plain_advantages = main.compute_advantages

    def compute_advantages(
        group: list[main.Trajectory], training: TrainingSettings
    ) -> list[main.Trajectory]:
        answers = plain_advantages(group, training)
        keep_sign(answers, sign)
        return answers

    main.compute_advantages = compute_advantages


if __name__ == "__main__":
    count_only(SIGNS[sys.argv.pop(1)])
    main.launch(main.main)
