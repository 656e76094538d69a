"""Whether a checkpoint and the settings of this start belong to the same experiment."""

from machinery.disk import Checkpoint
from machinery.errors import UserError
from machinery.ranks import WORLD_SIZE
from machinery.settings import FREE_KEYS, Config, flatten

BATCH_KEY = "training.num_samples_per_step"


def compare_settings(checkpoint: Checkpoint, config: Config) -> list[str]:
    """Returns what has changed since the checkpoint, like "training.max_steps: 20 -> 30". Refuses a
    change that makes it another experiment."""
    then = dict(checkpoint.state["config"])
    now = flatten(config)
    # What counts is how many questions all ranks take together.
    total = then[BATCH_KEY] * checkpoint.state["num_ranks"]
    then[BATCH_KEY] = f"{total} over all ranks"
    now[BATCH_KEY] = f"{now[BATCH_KEY] * WORLD_SIZE} over all ranks"
    changes = {}
    for key, value in sorted(now.items()):
        if value != then.get(key) and not key.startswith("run."):
            changes[key] = f"{key}: {then.get(key)} -> {value}"
    refused = [change for key, change in changes.items() if key not in FREE_KEYS]
    if refused:
        way_out = "set run.name, without run.resume, to begin anew"
        if refused == [changes.get(BATCH_KEY)] and total % WORLD_SIZE == 0:
            way_out += f", or {BATCH_KEY}={total // WORLD_SIZE} to resume with the same batch"
        raise UserError(f"{checkpoint.path} is of another experiment ({'; '.join(refused)}): "
                        f"{way_out}")
    return list(changes.values())
