"""What to do when something is off: which settings to look at, in words.

Each text names the key of a setting, and behind it what the setting is now. A bad sign in the first
step begins with an exclamation mark."""

import math

from machinery.settings import Config, flatten

OUT_OF_RANGE = (
    "the model gives no probabilities any more: lower training.learning_rate, or raise "
    "sampling.temperature. The saved checkpoints are not affected"
)
NO_NUMBERS = (  # Before anything was learned.
    "the model gives no probabilities as it was loaded: see model.name, whose weights may be "
    "damaged, model.precision, and sampling.temperature"
)


def with_values(text: str, config: Config) -> str:
    """Returns the text with `training.seed (0)` in place of `{training.seed}`."""
    for key, value in flatten(config).items():
        text = text.replace(f"{{{key}}}", f"{key} ({value})")
    return text


def out_of_memory(phase: str, config: Config) -> str:
    """Returns what to change, the change that costs least first."""
    if phase == "score":
        text = "it is the task's reward that needs the memory"
    elif phase in ("sample", "refill", "evaluate"):
        text = "lower {sampling.max_rows}, then {training.max_new_gen_tokens}"
    elif phase in ("learn", "measure"):
        text = (
            "lower {training.tokens_per_micro_batch}, then set {model.gradient_checkpointing} to "
            "true, then {model.precision} to bfloat16. With several GPUs set {training.shard} to "
            "true")
    elif phase == "save":
        text = (
            "a checkpoint passes through the computer's RAM, 2 GB or one tensor at a time. See "
            "what else needs RAM. With {model.lora_rank} at 32, for example, it is small")
    else:
        text = (
            "with several GPUs set {training.shard} to true. Or set {model.lora_rank} to 32, for "
            "example, take a smaller model, or lower {data.max_rows}")
    return with_values(text, config)


def slow_saving(saving: float, step: float, config: Config) -> str | None:
    """Returns how often to save, if saving takes more than a fifth of the time of the steps. Both
    times are in seconds."""
    if saving <= config.checkpoint.every * step / 5:
        return None
    rarer = math.ceil(20 * saving / step)
    text = (
        f"saving took {saving:.1f} s, and a step {step:.1f} s. With {{checkpoint.every}} at "
        f"{rarer} saving would take a twentieth of the time")
    return with_values(text, config)


def notes_on_sharding(config: Config, num_ranks: int) -> list[str]:
    """Returns what `training.shard` cannot do for this run."""
    notes = []
    if config.training.shard and num_ranks == 1:
        notes.append("training.shard saves no memory on one rank alone")
    if config.training.shard and config.model.lora_rank:
        notes.append(with_values(
            "training.shard splits only the weights that are trained. With {model.lora_rank} "
            "these are the adapters, and each GPU holds all other weights in full", config))
    return notes


# ------------------------------------------------------------ the first step

def look_at_first_step(metrics: dict[str, float | None], config: Config) -> list[str]:
    """Returns the lines that are printed under the first step: what was measured, and what is off.
    A run that learns nothing would not say so by itself. A metric without a number is None."""
    # All comparisons with nan are false, so that a missing number is no sign of anything.
    numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
    signs = signs_of_answers(numbers) + signs_of_rewards(numbers)
    signs += signs_of_update(numbers) + signs_of_sampler(numbers)
    if not any(sign.startswith("!") for sign in signs):
        is_known = not math.isnan(numbers["moved"])
        signs.append("nothing is off" if is_known else "no numbers to judge by")
    return measured(numbers) + [with_values(sign, config) for sign in signs]


def measured(numbers: dict[str, float]) -> list[str]:
    truncation = "{truncated:.0%} of the answers are truncated, the others end by themselves"
    groups = (
        "{groups_without_signal:.0%} of the groups have no signal. In {groups_all_solved:.0%} all "
        "answers are right, in {groups_none_solved:.0%} none")
    change = (
        "log p of a token changed on average by {change_rewarded:+.5f} in answers with a positive "
        "advantage, and by {change_punished:+.5f} in answers with a negative advantage. "
        "{change_as_meant:.0%} of all change goes the way the advantage points")
    changes = (numbers["change_rewarded"], numbers["change_punished"], numbers["change_as_meant"])
    if all(math.isnan(number) for number in changes):
        change = "there was nothing to learn from, so no log p has changed"
    sampler = (
        "the sampler and the policy differ by {sampler_distance:.4f} in log p of a token. The "
        "sampled tokens differ by {sampler_gap:.3f} from what the policy samples, beyond chance")
    lines = []
    for line in (truncation, groups, change, sampler):
        filled = line.format(**numbers)
        for missing in ("+nan", "nan%", "nan"):
            filled = filled.replace(missing, "n/a")
        lines.append(filled)
    return lines


def signs_of_answers(numbers: dict[str, float]) -> list[str]:
    signs = []
    if numbers["truncated"] >= 0.5:
        signs.append(
            "! too many answers are truncated: raise {training.max_new_gen_tokens}. Or the model "
            "does not know its stop token. For a chat model set {data.prompt_style} to chat")
    return signs


def signs_of_rewards(numbers: dict[str, float]) -> list[str]:
    signs = []
    for name, value in numbers.items():
        is_part = name.startswith("reward/") and not name.endswith("_std")
        if is_part and value == 0:
            signs.append(
                f"! {name} is 0 on average: if it is 0 for every answer, see the task's "
                "reward_function, {task.reward_weights}, {sampling.temperature}, and whether "
                "{data.prompt_style} suits the model")
        if is_part and value == 1:
            signs.append(
                f"{name} is 1 on average: if it is 1 for every answer, it does not tell answers "
                "apart")
    if numbers["groups_none_solved"] >= 0.9:
        signs.append(
            "! the questions are too hard to learn from: take easier ones with {data.dataset}, a "
            "better model with {model.name}, or more answers to each with {training.k_best_of_n}")
    if numbers["groups_all_solved"] >= 0.9:
        signs.append(
            "! the questions are too easy to learn from: take harder ones with {data.dataset}")
    if numbers["groups_without_signal"] >= 0.9:
        signs.append(
            "! equal rewards in a group teach grpo nothing, whatever the learning rate: see "
            "{task.reward_weights}, {training.k_best_of_n} and {data.dataset}")
    return signs


def signs_of_update(numbers: dict[str, float]) -> list[str]:
    """Returns at most one sign, because an earlier one explains the later ones."""
    signs = []
    if numbers["non_finite"] == 1:
        signs.append(
            "! the gradient is not finite, and the update was skipped: see {model.precision}, and "
            "whether {model.name} gives finite numbers")
    elif numbers["grad_norm"] == 0:
        signs.append(
            "! the gradient is 0: there was nothing to learn, or the answers do not depend on the "
            "weights that are trained. See {model.lora_rank} and {model.lora_targets}")
    elif numbers["moved"] <= 0.01:
        signs.append(
            "! almost nothing has changed: see {training.learning_rate}, {training.warmup_steps} "
            "and {model.precision}")
    elif numbers["change_rewarded"] <= -0.02 or numbers["change_as_meant"] <= 0.3:
        signs.append(
            "! answers with a positive advantage became less likely: lower "
            "{training.learning_rate}. If that does not help, check the signs in policy_loss. "
            "It may also be rounding, if {model.precision} is not float32")
    return signs


def signs_of_sampler(numbers: dict[str, float]) -> list[str]:
    signs = []
    if numbers["sampler_gap"] >= 0.005:
        signs.append(
            "! the answers were not sampled from the policy that is trained: see "
            "{sampling.temperature}, {sampling.top_p} and {sampling.top_k}. A top_p below 1 and a "
            "top_k above 0 have this effect")
    return signs
