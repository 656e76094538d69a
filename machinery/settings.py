"""config.yaml <- files <- key=value: one Config, typed, checked and frozen."""

import argparse
import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

from machinery.errors import UserError, blame
from machinery.ranks import DEVICE, WORLD_SIZE

ROOT = Path(__file__).resolve().parent.parent  # where main.py lies
ADVICE = yaml.safe_load((ROOT / "machinery" / "advice.yaml").read_text(encoding="utf-8"))
MOST = 1e9  # of any number, a reward's too: sums and squares of it stay within float32
FREE = "may differ between two starts of one experiment"  # all other keys make a run's default name

Natural = Annotated[StrictInt, Field(ge=0)]
Count = Annotated[StrictInt, Field(ge=1)]
# Also the text 1e-4, as YAML reads it without a dot; but true is no 1.0.
NotTrue = pydantic.BeforeValidator(lambda value: "true" if value is True else value)
Number = Annotated[float, Field(allow_inf_nan=False, ge=-MOST, le=MOST), NotTrue]
Positive = Annotated[Number, Field(gt=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[StrictStr, Field(pattern=r"^[^\x00]+$")]  # what a path may be
PlainName = Annotated[StrictStr, Field(  # on one line, and not just dots
    pattern=r"^[^/\x00-\x1f]*[^/.\x00-\x1f][^/\x00-\x1f]*$")]


class Section(BaseModel, extra="forbid", frozen=True): ...

class ModelSettings(Section):
    name: Text
    precision: Literal["mixed", "bfloat16", "float32"]
    attention: Annotated[Text | None, FREE]
    gradient_checkpointing: Annotated[StrictBool, FREE]
    lora_rank: Natural
    lora_alpha: Positive
    lora_targets: list[Text] | None

class TaskSettings(Section):
    name: Text
    reward_weights: Annotated[dict[str, Number], Field(min_length=1)] | None

class DataSettings(Section):
    dataset: Text
    num_validation: Count
    max_rows: Count | None
    max_prompt_tokens: Count | None
    prompt_style: Literal["base", "chat"]

class TrainingSettings(Section):
    learning_type: Literal["grpo", "sil"]
    scale_rewards: Literal["none", "group", "mean"]
    loss_normalizer: Literal["max_length", "tokens", "sequence"]
    updates_per_batch: Count
    clip: tuple[Positive, Positive] | None
    ratio: Literal["token", "sequence", "cispo"]
    kl_beta: Annotated[Number, Field(ge=0)]
    kl_in: Literal["reward", "loss"]
    refill: Natural
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
    shard: Annotated[StrictBool, FREE]
    max_bad_steps: Annotated[Count, FREE]
    seed: Natural

class SamplingSettings(Section):
    temperature: Annotated[Number, Field(ge=0.001)]  # less leaves the range
    top_p: Annotated[Number, Field(gt=0, le=1)]
    top_k: Natural
    max_rows: Annotated[Count, FREE]

class ValidationSettings(Section):
    every: Annotated[Count, FREE]
    best_of_n: Count

class CheckpointSettings(Section):
    every: Annotated[Count, FREE]
    keep: Annotated[Count, FREE]

class RunSettings(Section):
    dir: Annotated[Text, FREE]
    name: Annotated[PlainName | None, FREE]
    resume: Annotated[Text, FREE]
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


def load_config(arguments: list[str]) -> Config:
    def refuse(message):
        raise UserError(f"{message}; usage: main.py [--config file.yaml] [section.key=value ...]")

    parser = argparse.ArgumentParser("main.py", description=ADVICE["help"])
    parser.error, parser.exit = refuse, lambda *_: os._exit(0)  # after --help
    parser.add_argument("--config", metavar="file.yaml", action="append", help="keys laid over it")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="and over those")
    options = parser.parse_intermixed_args(arguments)
    values = read_yaml(ROOT / "config.yaml")
    for path in options.config or []:
        values |= read_yaml(path)
    for override in options.overrides:
        if re.search("[\udc80-\udcff]", override):  # bytes that are no text here
            raise UserError(f"{override!r} is not in this locale's alphabet: set LC_ALL=C.UTF-8")
        with blame(f"{override!r} is not of the form section.key=value, or the value not YAML"):
            key, text = override.split("=", 1)
            values[key] = yaml.load(text, Loader)
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
        raise UserError("; ".join(map(explained, error.errors()))) from None
    k, n = config.training.k_best_of_n
    if not (k == n >= 2 if config.training.learning_type == "grpo" else k < n):
        raise UserError(f"training.k_best_of_n={[k, n]}: write [G, G], like [8, 8], for grpo, and "
                        "[k, n], like [2, 8], for sil")
    return config


def explained(error: dict) -> str:  # a mistake that pydantic has found
    key = ".".join(map(str, error["loc"]))
    wanted = ADVICE["settings"].get(error["type"], error["msg"].removeprefix("Input should be "))
    return f"{key}={error['input']!r}: it must be {wanted}"


class Loader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:  # else the last would win
            raise yaml.YAMLError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A file's two levels of keys as {"section.key": value}."""
    with blame(f"the config file {path} is not there, or not YAML of sections with keys"):
        return flatten(yaml.load(Path(path).read_text(encoding="utf-8"), Loader))


def flatten(config: Config | dict) -> dict[str, Any]:
    tree = config if isinstance(config, dict) else config.model_dump(mode="json")
    return {f"{name}.{key}": value for name, keys in tree.items() for key, value in keys.items()}


def default_run_name(config: Config) -> str:
    """The same experiment finds the same folder, however many ranks share its questions."""
    experiment = {key: value for key, value in flatten(config).items() if key not in FREE_KEYS}
    experiment["training.num_samples_per_step"] *= WORLD_SIZE
    text = json.dumps(experiment, sort_keys=True).encode()
    return f"{config.training.learning_type}-{hashlib.sha256(text).hexdigest()[:8]}"
