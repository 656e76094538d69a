"""config.yaml <- files <- key=value: one Config, typed, checked and frozen."""

import argparse
import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, Field, FiniteFloat, StrictBool, StrictInt, StrictStr

from machinery.errors import UserError, blame
from machinery.ranks import DEVICE, WORLD_SIZE

ROOT = Path(__file__).resolve().parent.parent  # where main.py lies
FREE = "may differ between two starts of one experiment"  # all other keys make a run's default name

Natural = Annotated[StrictInt, Field(ge=0)]
Count = Annotated[StrictInt, Field(ge=1)]
Positive = Annotated[FiniteFloat, Field(gt=0)]  # also the text 1e-4, as YAML reads it without a dot
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(gt=0, le=1)]
Decay = Annotated[FiniteFloat, Field(ge=0, lt=1)]
PlainName = Annotated[StrictStr, Field(pattern="^[^/]*[^/.][^/]*$")]  # and not just dots


class Section(BaseModel, extra="forbid", frozen=True):
    pass

class ModelSettings(Section):
    name: StrictStr
    precision: Literal["mixed", "bfloat16", "float32"]
    attention: Annotated[StrictStr | None, FREE]
    gradient_checkpointing: Annotated[StrictBool, FREE]
    lora_rank: Natural
    lora_alpha: Positive
    lora_targets: list[StrictStr] | None
    lora_merged: Annotated[StrictBool, FREE]

class TaskSettings(Section):
    name: StrictStr
    reward_weights: Annotated[dict[str, FiniteFloat], Field(min_length=1)] | None

class DataSettings(Section):
    dataset: StrictStr
    num_validation: Count
    max_rows: Count | None
    max_prompt_tokens: Count | None
    prompt_style: Literal["base", "chat"]

class TrainingSettings(Section):
    learning_type: Literal["grpo", "sil"]
    scale_rewards: Literal["none", "group"]
    loss_normalizer: Literal["max_length", "tokens", "sequence"]
    updates_per_batch: Count
    clip: tuple[Positive, Positive] | None
    kl_beta: NotNegative
    mask_truncated: StrictBool
    num_samples_per_step: Count
    k_best_of_n: tuple[Count, Count]
    max_new_gen_tokens: Count
    max_steps: Annotated[Natural, FREE]
    learning_rate: Positive
    warmup_steps: Natural
    decay_steps: Count | None
    adam_betas: tuple[Decay, Decay]
    weight_decay: Decay
    max_grad_norm: Positive | None
    tokens_per_micro_batch: Annotated[Count, FREE]
    max_bad_steps: Annotated[Count, FREE]
    seed: Natural

class SamplingSettings(Section):
    engine: Annotated[Literal["generate", "continuous"], FREE]
    temperature: Positive
    top_p: Share
    top_k: Natural
    max_rows: Annotated[Count, FREE]

class ValidationSettings(Section):
    every: Annotated[Count, FREE]
    best_of_n: Count

class CheckpointSettings(Section):
    every: Annotated[Count, FREE]
    keep: Annotated[Count, FREE]

class RunSettings(Section):
    dir: Annotated[StrictStr, FREE]
    name: Annotated[PlainName | None, FREE]
    resume: Annotated[StrictStr, FREE]
    resume_anyway: Annotated[StrictBool, FREE]

class LoggingSettings(Section):
    mlflow: Annotated[StrictBool, FREE]
    mlflow_model: Annotated[StrictBool, FREE]

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


KEYS = {f"{name}.{key}": field.metadata for name, section in Config.model_fields.items()
        for key, field in section.annotation.model_fields.items()}
FREE_KEYS = {key for key, metadata in KEYS.items() if FREE in metadata}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; usage: main.py [--config file.yaml] [section.key=value ...]")


def load_config(arguments: list[str]) -> Config:
    parser = Parser(description="Trains a language model by Dr. GRPO or SIL: see config.yaml.")
    parser.add_argument("--config", metavar="file.yaml", action="append", default=[],
                        help="keys laid over config.yaml")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="and over those")
    options = parser.parse_intermixed_args(arguments)

    values = read_yaml(ROOT / "config.yaml")
    for path in options.config:
        values |= read_yaml(path)
    for override in options.overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"{override!r} is not of the form section.key=value")
        with blame(f"{override} is not YAML"):
            values[key] = yaml.safe_load(text)
    if missing := KEYS.keys() - values.keys():
        raise UserError(f"{ROOT / 'config.yaml'} lacks {', '.join(sorted(missing))}")
    if values["model.precision"] is None:
        values["model.precision"] = "mixed" if DEVICE.type == "cuda" else "float32"

    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key not in KEYS:
            nearest, = difflib.get_close_matches(key, KEYS, 1, 0.0)
            raise UserError(f"{key}={value!r}: there is no such key; the nearest is {nearest}")
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    try:
        config = Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError("; ".join(map(said, error.errors()))) from None
    k, n = config.training.k_best_of_n
    if not (k == n >= 2 if config.training.learning_type == "grpo" else k < n):
        raise UserError(f"training.k_best_of_n={[k, n]}: grpo learns from all answers of a group: "
                        "write [G, G], like [8, 8]; sil imitates the k best of n: write [k, n], "
                        "like [2, 8]; or change training.learning_type")
    return config


PAIR, WEIGHTS = "a list of two, like [first, second]", "names with numbers, like {answer: 1.0}"
WORDS = {"tuple_type": PAIR, "missing": PAIR, "too_long": PAIR, "dict_type": WEIGHTS,
         "too_short": WEIGHTS, "string_pattern_mismatch": "one plain name, without a slash"}


def said(error: dict) -> str:
    """A mistake that pydantic has found: the key, the value seen and what would do."""
    key = ".".join(map(str, error["loc"]))
    wanted = WORDS.get(error["type"], error["msg"].removeprefix("Input should be "))
    return f"{key}={error['input']!r}: it must be {wanted}"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A file's two levels of keys as {"section.key": value}."""
    with blame(f"cannot read the config file {path}: not there, or not YAML"):
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or not all(isinstance(keys, dict) for keys in tree.values()):
        raise UserError(f"{path} must hold sections with keys: `training:`, under it `  seed: 1`")
    return {f"{section}.{key}": value for section, keys in tree.items()
            for key, value in keys.items()}


def beside_main(path: str) -> str:
    """Relative paths hold from the working directory, or else from where main.py lies."""
    return str(ROOT / path) if not Path(path).exists() and (ROOT / path).exists() else path


def flatten(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.model_dump(mode="json").items()
            for key, value in keys.items()}


def default_run_name(config: Config) -> str:
    """The same experiment finds the same folder, however many ranks share its questions."""
    experiment = {key: value for key, value in flatten(config).items() if key not in FREE_KEYS}
    experiment["training.num_samples_per_step"] *= WORLD_SIZE
    digest = hashlib.sha256(json.dumps(experiment, sort_keys=True).encode()).hexdigest()
    return f"{config.training.learning_type}-{digest[:8]}"
