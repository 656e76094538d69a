"""What is due after a step, the learning rate of a step, and when a run is given up."""

from machinery.errors import SharedError
from machinery.settings import Config, TrainingSettings

MOST_SKIPPED_STEPS = 5  # in a row


def is_due(step: int, every: int, config: Config) -> bool:
    """Whether something that happens every so many steps, and after the last, happens now."""
    return step % every == 0 or step == config.training.max_steps


def learning_rate_at(step: int, training: TrainingSettings) -> float:
    """It rises over `warmup_steps`. Then it stays, or falls to 0 over `decay_steps`."""
    rising = step / max(1, training.warmup_steps)
    falling = 1.0
    if training.decay_steps:
        falling = 1 - (step - 1 - training.warmup_steps) / training.decay_steps
    return training.learning_rate * max(0.0, min(1.0, rising, falling))


def count_skipped(num_skipped: int, update: dict[str, float], step: int) -> int:
    """Returns how many steps in a row were skipped because the gradient was not finite. Too many
    end the run, because it would go on without learning anything. A step in which there was nothing
    to learn does not count."""
    if not update["learned"]:
        return num_skipped
    if not update["non_finite"]:
        return 0
    num_skipped += 1
    if num_skipped == MOST_SKIPPED_STEPS:
        raise SharedError(
            f"the gradient was not finite in {num_skipped} steps in a row, up to step {step}: "
            "lower training.learning_rate, and start again under another run.name")
    return num_skipped
