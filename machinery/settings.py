"""The settings of a run: config.yaml, then files, then key=value, checked and frozen."""

import argparse
import difflib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import pydantic
import torch
import yaml
from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from machinery.errors import UserError, as_user_error, shortened
from machinery.ranks import DEVICE, LOCAL_WORLD_SIZE, NUM_GPUS, WORLD_SIZE, end_process, tell

ROOT = Path(__file__).resolve().parent.parent  # the folder of main.py
# No number may be larger, including a reward. Sums of squares stay within float32.
MOST = 1e9
# It changes when the same settings mean a different experiment, or a run's folder looks different.
VERSION = 5


def refuse_boolean(value: object) -> object:
    if isinstance(value, bool):  # Pydantic takes `yes` for 1.0.
        raise ValueError("it must be a number")  # noqa: TRY004, because pydantic wants it
    return value


Natural = Annotated[StrictInt, Field(ge=0)]
Count = Annotated[StrictInt, Field(ge=1)]
# A number may be written as 1e-4, which YAML reads as a string because it has no dot.
Number = Annotated[float, BeforeValidator(refuse_boolean),
                   Field(allow_inf_nan=False, ge=-MOST, le=MOST)]
Positive = Annotated[Number, Field(gt=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[StrictStr, Field(min_length=1)]
FolderName = Annotated[StrictStr, Field(pattern=r"^\w[^/]*$")]


class Section(BaseModel, extra="forbid", frozen=True):
    """Refuses unknown keys, and cannot be changed."""


class ModelSettings(Section):
    name: Text
    device: Literal["cuda"] | None
    precision: Literal["mixed", "bfloat16", "float32"]
    attention: Text | None
    gradient_checkpointing: StrictBool
    lora_rank: Natural
    lora_alpha: Positive
    lora_targets: list[Text] | None
    check: Literal["refuse", "warn"]


class TaskSettings(Section):
    name: Text
    reward_weights: Annotated[dict[str, Number], Field(min_length=1)] | None


class DataSettings(Section):
    dataset: Text
    validation: Text | None
    num_validation: Count
    max_rows: Count | None
    max_prompt_tokens: Count | None
    prompt_style: Literal["base", "chat"]


class TrainingSettings(Section, extra="allow"):  # for keys of your own, see `check_values`
    learning_type: Literal["grpo", "sil", "distill"]
    teacher: Text | None
    scale_rewards: Literal["none", "group"]
    loss_normalizer: Literal["max_length", "tokens", "sequence"]
    updates_per_batch: Count
    clip: tuple[Positive, Positive] | None
    kl_beta: Annotated[Number, Field(ge=0)]
    kl_in: Literal["reward", "loss"]
    num_samples_per_step: Count
    k_best_of_n: tuple[Count, Count]
    max_new_gen_tokens: Count
    max_steps: Natural
    learning_rate: Positive
    warmup_steps: Natural
    decay_steps: Count | None
    adam_betas: tuple[Decay, Decay]
    weight_decay: Decay
    max_grad_norm: Positive | None
    tokens_per_micro_batch: Count
    shard: StrictBool
    seed: Natural

    @property
    def group_size(self) -> int:
        """How many answers are sampled for each question."""
        return self.k_best_of_n[1]

    @property
    def has_reference(self) -> bool:
        """Whether a second model takes part: a teacher, or the reference of a KL penalty."""
        return self.learning_type == "distill" or self.kl_beta > 0

    @property
    def kl_weight(self) -> float:
        """How much log-probabilities of the reference count next to rewards."""
        return 1.0 if self.learning_type == "distill" else self.kl_beta


class SamplingSettings(Section):
    # At a lower temperature, dividing the logits by it would leave the range of float32.
    temperature: Annotated[Number, Field(ge=0.001)]
    top_p: Annotated[Number, Field(gt=0, le=1)]
    top_k: Natural
    max_rows: Count


class ValidationSettings(Section):
    every: Count
    best_of_n: Count


class CheckpointSettings(Section):
    every: Count


class RunSettings(Section):
    dir: Text
    name: FolderName | None
    code: Text | None


class LoggingSettings(Section):
    mlflow: StrictBool


class Config(Section):
    model: ModelSettings
    task: TaskSettings
    data: DataSettings
    training: TrainingSettings
    sampling: SamplingSettings
    validation: ValidationSettings
    checkpoint: CheckpointSettings
    run: RunSettings
    logging: LoggingSettings


KEYS = [f"{section}.{key}" for section, field in Config.model_fields.items()
        for key in field.annotation.model_fields]
OWN = "training.my_"  # Keys of your own begin with this. config.yaml or another file declares them.
# What used to be a setting, and the diff in changes/ that does the same now.
NOW_DIFFS = {
    "training.ratio=sequence": "gspo.diff",
    "training.ratio=cispo": "cispo.diff",
    "training.mask_truncated=True": "overlong-filter.diff",
    "training.scale_rewards=mean": "maxrl.diff",
}
# These keys may change between two starts of a run. All others define the experiment.
FREE_KEYS = {
    "model.device", "model.attention", "model.gradient_checkpointing", "model.check",
    "training.max_steps", "training.tokens_per_micro_batch", "training.shard",
    "sampling.max_rows", "validation.every", "checkpoint.every",
    "run.dir", "run.name", "run.code", "logging.mlflow",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: main.py [--config file.yaml] [section.key=value ...]")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Ends the process after --help, because `launch` takes sys.exit() for a failure."""
        end_process(status)


def load_config(arguments: list[str]) -> Config:
    """Returns the settings. A file overrides config.yaml, and the command line overrides both."""
    parser = Parser("main.py", description="GRPO in one file: reinforcement learning of language "
                    "models, from question to update. config.yaml explains every key.")
    parser.add_argument("--config", metavar="file.yaml", action="append", default=[],
                        help="a file whose settings override those in config.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*",
                        help="a setting that overrides those in all files")
    options = parser.parse_intermixed_args(arguments)

    values = read_yaml(ROOT / "config.yaml")
    for path in options.config:
        values |= read_yaml(path)
    own_keys = [key for key in values if key.startswith(OWN)]  # declared by the files
    for override in options.overrides:
        with as_user_error(
                f"{override!r} is not of the form section.key=value, or its value is not YAML"):
            key, text = override.split("=", 1)
            values[key] = yaml.safe_load(text)
    values["model.precision"] = choose_precision(values.get("model.precision"))
    config = check_values(values, own_keys)
    check_device(config)
    return config


def check_device(config: Config) -> None:
    """Refuses a CPU if a GPU is required. Says why GPUs aren't used, and how to use them."""
    is_required = config.model.device == "cuda"
    if DEVICE.type == "cuda" or not (is_required or NUM_GPUS):
        return
    reason = (f"{LOCAL_WORLD_SIZE} process{'es' * (LOCAL_WORLD_SIZE > 1)}, but {NUM_GPUS or 'no'} "
              f"GPU{'s' * (NUM_GPUS != 1)}")
    remedy = "to train on the CPU anyway, add model.device=null"
    if NUM_GPUS:
        num_questions = config.training.num_samples_per_step * LOCAL_WORLD_SIZE
        remedy = (f"to use GPUs, start at most {NUM_GPUS} on this machine. For the same batch, "
                  f"they need {num_questions} questions together (training.num_samples_per_step)")
    if is_required:
        raise UserError(f"model.device=cuda: {reason}; {remedy}")
    tell(f"{reason}, so this run uses the CPU; {remedy}")


def choose_precision(wanted: str | None) -> str:
    """Returns the precision that is wanted, or the best one that the device computes quickly."""
    # By default PyTorch says yes even if it can only emulate bfloat16, which is slow.
    is_fast = DEVICE.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return wanted or ("mixed" if is_fast else "float32")


def check_values(values: dict[str, Any], own_keys: Sequence[str] = ()) -> Config:
    """Turns {"section.key": value} into a Config, or says in one line what's wrong."""
    sections: dict[str, dict[str, Any]] = {}
    known = [*KEYS, *own_keys]
    for key, value in values.items():
        diff = NOW_DIFFS.get(f"{key}={value}")
        if diff:
            raise UserError(f"{key}={value} is no longer a setting: leave it out, and run git "
                            f"apply changes/{diff} (docs/change.md#all-changes)")
        if key in ("training.ratio", "training.mask_truncated"):
            raise UserError(f"{key}={value}: this is no longer a key, and it changes nothing: "
                            "leave it out")
        if key not in known:
            [nearest] = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(f"{key}={value!r}: there is no such key. Did you mean {nearest}?")
        if key.startswith(OWN) and re.fullmatch(r"[-+]?\d+\.?\d*e[-+]?\d{1,2}", str(value)):
            value = float(value)
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    try:
        config = Config.model_validate(sections)
    except pydantic.ValidationError as error:
        mistakes = [describe_mistake(mistake) for mistake in error.errors()]
        raise UserError("; ".join(mistakes)) from None

    training = config.training
    check_learning_type(training)
    if training.decay_steps and training.max_steps > training.warmup_steps + training.decay_steps:
        last = training.warmup_steps + training.decay_steps
        raise UserError(
            f"training.max_steps={training.max_steps}: with training.decay_steps="
            f"{training.decay_steps}, the learning rate is 0 from step {last + 1} onwards. Set "
            f"training.max_steps to at most {last}, or raise training.decay_steps "
            "(docs/run.md#stop-and-resume)")
    return config


def check_learning_type(training: TrainingSettings) -> None:
    """Refuses keys that don't go with the learning type."""
    k, n = training.k_best_of_n
    if training.learning_type == "grpo":
        is_valid = k == n and n >= 2
    elif training.learning_type == "sil":
        is_valid = k < n
    else:
        is_valid = k == n  # With a teacher, answers aren't compared, so one is enough.
    if not is_valid:
        raise UserError(f"training.k_best_of_n={[k, n]}: set it to [G, G] (such as [8, 8]) for "
                        "grpo, to [k, n] (such as [2, 8]) for sil, and to [G, G] or [1, 1] for "
                        "distill")
    if training.learning_type != "distill":
        if training.teacher is not None:
            raise UserError(f"training.teacher={training.teacher!r}: set training.learning_type to "
                            "distill, because no other learning type uses a teacher")
        return
    if training.teacher is None:
        raise UserError("training.learning_type=distill: set training.teacher to a folder with a "
                        "model and its tokenizer, or to a hub id")
    for key, default in (("kl_beta", 0.0), ("kl_in", "reward"), ("scale_rewards", "none")):
        value = getattr(training, key)
        if value != default:
            raise UserError(f"training.{key}={value}: set it to {default} with distill, where "
                            "the teacher alone decides what is learned")


def describe_mistake(mistake: dict[str, Any]) -> str:
    """Returns what pydantic has found, in one line that names the key and its value."""
    key = ".".join(str(name) for name in mistake["loc"])
    value = shortened(repr(mistake["input"]), 80)
    if key == "model.device":
        return (f"{key}={value}: set it to cuda or null. To train on the CPU of a machine with "
                "GPUs, set it to null, and put CUDA_VISIBLE_DEVICES= before the command")
    return f"{key}={value}: {mistake['msg']}"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the keys of a YAML file as {"section.key": value}."""
    with as_user_error(
            f"the config file {path} does not exist, or is not YAML with keys in sections"):
        return flatten(yaml.safe_load(Path(path).read_text(encoding="utf-8")))


def flatten(config: Config | dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns settings as {"section.key": value}."""
    sections = config if isinstance(config, dict) else config.model_dump(mode="json")
    flat = {}
    for section, keys in sections.items():
        for key, value in keys.items():
            flat[f"{section}.{key}"] = value
    return flat


def is_due(step: int, every: int, config: Config) -> bool:
    """Whether something that's due every few steps, and after the last, is due now."""
    return step % every == 0 or step == config.training.max_steps


def experiment(config: Config) -> dict[str, Any]:
    """Returns the settings that define an experiment. What counts is how many questions all ranks
    take together per step, not how many each of them takes."""
    settings = {}
    for key, value in flatten(config).items():
        if key not in FREE_KEYS:
            settings[key] = value
    settings["training.num_samples_per_step"] *= WORLD_SIZE
    settings["version"] = VERSION
    return settings


def default_run_name(config: Config, code_digest: str) -> str:
    """Returns the learning type, a digest of the settings, and a digest of the code."""
    text = json.dumps(experiment(config), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{config.training.learning_type}-{digest[:8]}-{code_digest}"


def beside_main(path: str) -> str:
    """Returns a path that starts in the working directory, or else in the folder of main.py. If it
    exists in neither, it's returned as it is: it may be an id on the Hugging Face hub."""
    path = os.path.expanduser(path)
    if os.path.exists(ROOT / path) and not os.path.exists(path):
        return str(ROOT / path)
    return path
