"""GRPO in one file: reinforcement learning that teaches a language model to reason, on one process or many.

The algorithm, once per step:
  1. take the next N questions (each rank its own)          questions
  2. sample a group of G answers to each                    sample_trajectories
  3. score every answer with the task's rewards             score
  4. compare each answer with its group: A_ij = r_ij - mean_j r_ij         compute_advantages
  5. raise the log-probability of the better ones and lower that of the worse:
         loss = -sum_i sum_j sum_t A_ij log pi(a_ij[t] | q_i, a_ij[<t]) / (B L)         policy_loss
     where B is the number of answers in the batch of all ranks, and L the longest answer allowed
  6. an AdamW step on the gradient that all ranks share     policy_gradient, training_step
  7. now and then, measure on questions never trained on    evaluate
     and save all that going on from here takes             save_checkpoint

That is Dr. GRPO. What it leaves out of GRPO as first published, why, and the key of `training` that brings it back: the division
by the group's standard deviation (it favours questions that are nearly always or nearly never solved; scale_rewards), the
division by each answer's length (it favours long wrong answers; loss_normalizer), the KL penalty (it needs a second model, and
rewards computed from the answer leave no reward model to fool; kl_beta), and the clipped ratio (with one update per batch the
ratio is always 1; updates_per_batch, clip). With `learning_type: sil` step 4 becomes self-imitation: the k best of n answers get
advantage 1 and are all that is learned from.

    torchrun --nproc-per-node=4 main.py                       four ranks: four GPUs, or four processes on the CPU
    python main.py training.max_steps=20 training.seed=1      one rank; any key of config.yaml can be set like this
    torchrun --nproc-per-node=4 main.py --config my.yaml      a file of keys laid over config.yaml
"""

import argparse
import copy
import difflib
import hashlib
import importlib.util
import json
import math
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import typing
import uuid
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev, stdev
from types import SimpleNamespace, UnionType
from typing import Annotated, Literal

from dotenv import load_dotenv

# Before transformers and datasets are imported: they read HF_HUB_OFFLINE, HF_HOME and the like as they load.
load_dotenv(Path(__file__).with_name(".env"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning about forks; threads would gain nothing here

import torch
import torch.distributed as dist
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.cache_utils import DynamicLayer

import logger
from logger import Logger

HERE = Path(__file__).resolve().parent
# torchrun sets these; without it the process is the only rank. LOCAL_RANK picks the device, RANK picks the data.
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class UserError(Exception):
    """Something the person who started the run can mend. Becomes one line and exit code 2, never a traceback."""


@contextmanager
def blame(what: str, kinds: tuple[type[Exception], ...] = (Exception,)):
    """Whatever goes wrong inside (of these `kinds`) is about something the user has named: `what` says which. Running out of
    memory is left to `enough_memory`."""
    try:
        yield
    except kinds as error:  # libraries raise a dozen unrelated types, some of whose messages are many lines long
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        raise UserError(f"{what} ({type(error).__name__}: {' '.join(str(error).split())[:300]})") from error


def is_out_of_memory(error: Exception) -> bool:
    words = ("can't allocate memory", "Cannot allocate memory")  # PyTorch's on a CPU, and the operating system's
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(each in str(error) for each in words)


@contextmanager
def enough_memory(advice: str):
    """Running out of memory is no mystery to the user either: `advice` says which key to change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory while {advice}") from error


# ================================================================ configuration
# config.yaml <- --config files <- section.key=value. config.yaml holds every default; these classes hold types and bounds.

# What a key may hold: its Python type, the same in words, and a test of the value.
Natural = Annotated[int, "an integer of at least 0", lambda value: value >= 0]
Count = Annotated[int, "an integer of at least 1", lambda value: value >= 1]
Positive = Annotated[float, "a number above 0", lambda value: 0 < value < math.inf]
Share = Annotated[float, "a number above 0 and up to 1", lambda value: 0 < value <= 1]
Decay = Annotated[float, "a number from 0 to below 1", lambda value: 0 <= value < 1]
Weight = Annotated[float, "a number", math.isfinite]
NotNegative = Annotated[float, "a number of at least 0", lambda value: 0 <= value < math.inf]
Text = Annotated[str, "a text, in quotes if need be", lambda value: True]
Flag = Annotated[bool, "true or false", lambda value: True]

@dataclass
class ModelConfig:
    name: Text
    precision: Literal["mixed", "bfloat16", "float32"] | None
    attention: Text | None
    gradient_checkpointing: Flag
    lora_rank: Natural
    lora_alpha: Positive
    lora_targets: list[Text] | None
    lora_merged: Flag

@dataclass
class TaskConfig:
    name: Text
    reward_weights: dict[str, Weight] | None

@dataclass
class DataConfig:
    dataset: Text
    num_validation: Count
    max_rows: Count | None
    max_prompt_tokens: Count | None
    prompt_style: Literal["base", "chat"]

@dataclass
class TrainingConfig:
    learning_type: Literal["grpo", "sil"]
    scale_rewards: Literal["none", "group"]
    loss_normalizer: Literal["max_length", "tokens", "sequence"]
    updates_per_batch: Count
    clip: tuple[Positive, Positive] | None
    kl_beta: NotNegative
    mask_truncated: Flag
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
    max_bad_steps: Count
    seed: Natural

@dataclass
class SamplingConfig:
    engine: Literal["generate", "continuous", "auto"]
    temperature: Positive
    top_p: Share
    top_k: Natural
    max_rows: Count

@dataclass
class ValidationConfig:
    every: Count
    best_of_n: Count

@dataclass
class CheckpointConfig:
    every: Count
    keep: Count

@dataclass
class RunConfig:
    dir: Text
    name: Text | None
    resume: Text
    resume_anyway: Flag

@dataclass
class LoggingConfig:
    mlflow: Flag
    mlflow_model: Flag

@dataclass
class Config:
    model: ModelConfig
    task: TaskConfig
    data: DataConfig
    training: TrainingConfig
    sampling: SamplingConfig
    validation: ValidationConfig
    checkpoint: CheckpointConfig
    run: RunConfig
    logging: LoggingConfig

# What may differ between two starts of one experiment. A run's default name is made of all the other keys.
NOT_THE_EXPERIMENT = {
    "model.attention", "model.gradient_checkpointing", "model.lora_merged", "training.max_steps", "training.max_bad_steps",
    "training.tokens_per_micro_batch", "sampling.engine", "sampling.max_rows", "validation.every", "checkpoint.every",
    "checkpoint.keep", "run.dir", "run.name", "run.resume", "run.resume_anyway", "logging.mlflow", "logging.mlflow_model"}


def load_config(arguments: list[str]) -> Config:
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; usage: main.py [--config file.yaml] [section.key=value ...]")

    parser = Parser(description="Train a language model with Dr. GRPO or SIL. Every key is explained in config.yaml.")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="keys laid over config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="the same, from the command line")
    options = parser.parse_intermixed_args(arguments)

    values = {}
    for path in [HERE / "config.yaml", *options.config]:
        values |= read_yaml(path)
    for override in options.overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"{override!r} is not of the form section.key=value")
        with blame(f"{override} is not YAML"):
            values[key] = yaml.safe_load(text)

    sections = typing.get_type_hints(Config)
    hints = {f"{name}.{key}": hint for name, section in sections.items()
             for key, hint in typing.get_type_hints(section, include_extras=True).items()}
    for key, value in values.items():
        if key not in hints:
            nearest, = difflib.get_close_matches(key, hints, 1, 0.0)
            raise UserError(f"{key}={value!r}: there is no such key; the nearest is {nearest}")
    if missing := hints.keys() - values.keys():
        raise UserError(f"{HERE / 'config.yaml'} lacks {', '.join(sorted(missing))}")
    config = Config(**{
        name: section(*(checked(key, values[key], hint) for key, hint in hints.items() if key.startswith(f"{name}.")))
        for name, section in sections.items()})
    k, n = config.training.k_best_of_n
    if config.training.learning_type == "grpo" and not k == n >= 2:
        raise UserError(f"training.k_best_of_n={config.training.k_best_of_n}: grpo learns from all answers of a group of two "
                        "or more; write [G, G], like [8, 8], or set training.learning_type to sil")
    if config.training.learning_type == "sil" and not k < n:
        raise UserError(f"training.k_best_of_n={config.training.k_best_of_n}: sil imitates the k best of n answers; write "
                        "[k, n] with k below n, like [2, 8], or set training.learning_type to grpo")
    return config


def read_yaml(path: str | Path) -> dict[str, object]:
    """A file's two levels of keys as {"section.key": value}."""
    with blame(f"cannot read the config file {path}: not there, or not YAML"):
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(tree, dict) or not all(isinstance(keys, dict) for keys in tree.values()):
        raise UserError(f"{path} must hold sections with keys, like `training:` and under it `  seed: 1`")
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def checked(key: str, value, hint):
    """`value` as the type `hint` asks for, or an error that says what would do."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    kind, or_null = kinds[0], " or null" if type(None) in kinds else ""
    if value is None and or_null:
        return None
    if typing.get_origin(kind) in (list, tuple):
        items = typing.get_args(kind)
        if isinstance(value, list) and len(items) in (1, len(value)):
            return [checked(key, item, items[0]) for item in value]
        of_two = " of two" if len(items) == 2 else ""
        raise UserError(f"{key}={value!r}: it must be a list{of_two}, like [first, second]{or_null}")
    if typing.get_origin(kind) is dict:
        if isinstance(value, dict) and value:
            return {str(name): checked(f"{key}.{name}", item, typing.get_args(kind)[1]) for name, item in value.items()}
        raise UserError(f"{key}={value!r}: it must be names with a number each, like {{answer: 1.0, format: 0.5}}{or_null}")
    if typing.get_origin(kind) is Literal:
        kind = Annotated[str, " or ".join(typing.get_args(kind)), typing.get_args(kind).__contains__]
    python_type, description, within = typing.get_args(kind)
    if python_type is float and type(value) in (int, str):
        with suppress(ValueError, OverflowError):  # YAML reads 1e-4 as text, for want of the dot in 1.0e-4
            value = float(value)
    if type(value) is python_type and within(value):
        return value
    raise UserError(f"{key}={value!r}: it must be {description}{or_null}")


def flatten(config: Config) -> dict[str, object]:
    return {f"{section}.{key}": value for section, keys in asdict(config).items() for key, value in keys.items()}


def default_run_name(config: Config) -> str:
    """The same experiment finds the same folder. What counts is the questions per step, not how ranks share them."""
    experiment = {key: value for key, value in flatten(config).items() if key not in NOT_THE_EXPERIMENT}
    experiment["training.num_samples_per_step"] *= WORLD_SIZE
    digest = hashlib.sha256(json.dumps(experiment, sort_keys=True).encode()).hexdigest()
    return f"{config.training.learning_type}-{digest[:8]}"


# ================================================================ ranks and randomness

def setup_distributed() -> tuple[torch.device, dist.Store]:
    """One code path for 1 or many ranks, on CPU (gloo) and CUDA (nccl; gloo carries what lives on the CPU)."""
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        if local_ranks > torch.cuda.device_count():
            raise UserError(f"{local_ranks} processes on a machine with {torch.cuda.device_count()} GPUs: start one for each GPU")
        torch.cuda.set_device(device)
    elif local_ranks > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's default, whatever the number of cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // local_ranks))
    # A rank waits for the slowest: long enough for an evaluation or a save on one of them, which take minutes at most.
    timeout = timedelta(hours=2)
    with blame("the ranks cannot reach each other; on several machines see --rdzv-endpoint of torchrun, and GLOO_SOCKET_IFNAME"):
        store = fresh_store(timeout) if "RANK" in os.environ else dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout, store=store,
                                rank=RANK, world_size=WORLD_SIZE)
    return device, store


def fresh_store(timeout: timedelta) -> dist.Store:
    """torchrun's store outlives its workers, so after a restart the addresses of the dead are still in it. Rank 0 therefore makes
    up a prefix for this start alone, and tells it to each rank that says hello until that rank has confirmed it."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    name = uuid.uuid4().hex
    if RANK != 0:
        store.set(f"hello from {RANK}", name)
        prefix = store.get(f"prefix for {name}").decode()  # waits for rank 0
        store.set(f"{prefix} is known to {RANK}", "")
        return dist.PrefixStore(prefix, store)
    for rank in range(1, WORLD_SIZE):
        while not store.check([f"{name} is known to {rank}"]):
            if store.check([f"hello from {rank}"]):  # a dead one's, perhaps, until the living one writes its own
                store.set(f"prefix for {store.get(f'hello from {rank}').decode()}", name)
            time.sleep(0.02)
    return dist.PrefixStore(name, store)


def random_stream(seed: int, step: int, purpose: str) -> random.Random:
    """Randomness is a pure function of (seed, step, rank, purpose): nothing to save, and evaluating does not disturb training."""
    stream = random.Random(f"{seed} {step} {RANK} {purpose}")
    torch.manual_seed(stream.getrandbits(63))  # on every device
    return stream


@contextmanager
def together():
    """A user error on one rank becomes the same error on all of them: none is left waiting for it in a later collective."""
    error = None
    try:
        yield
    except UserError as own_error:
        error = str(own_error)
    errors = [None] * WORLD_SIZE
    dist.all_gather_object(errors, error)
    if any(errors):
        raise UserError(next(filter(None, errors)))


def over_ranks(values: list[float], device: torch.device, operation=dist.ReduceOp.SUM) -> list[float]:
    result = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(result, operation)
    return result.tolist()


# ================================================================ task, data, model

def beside_main(path: str) -> str:
    """Relative paths, like those of config.yaml, hold from the working directory or else from where this file lies."""
    return str(HERE / path) if not Path(path).exists() and (HERE / path).exists() else path


def load_task(config: TaskConfig) -> SimpleNamespace:
    """`countdown`, or a Python file with the same names: see the head of countdown.py."""
    name = config.name
    path = HERE / "countdown.py" if name == "countdown" else Path(beside_main(name))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        raise UserError(f"task.name={name!r}: write countdown, or the path of a Python file")
    task = importlib.util.module_from_spec(spec)
    with blame(f"task.name={name!r} cannot be imported"):
        sys.modules[spec.name] = task  # where dataclasses and pickle look for a module's classes
        sys.path.append(str(path.parent))  # a task may import what lies beside it
        spec.loader.exec_module(task)
    if missing := [key for key in ("load", "reward_function", "REWARD_WEIGHTS", "SOLVED") if not hasattr(task, key)]:
        raise UserError(f"task.name={name!r}: the file does not define {', '.join(missing)}")
    if task.SOLVED not in task.REWARD_WEIGHTS:
        raise UserError(f"task.name={name!r}: SOLVED={task.SOLVED!r} is not one of {list(task.REWARD_WEIGHTS)}")
    if unknown := (config.reward_weights or {}).keys() - task.REWARD_WEIGHTS.keys():
        raise UserError(f"task.reward_weights: {name} has no {', '.join(sorted(unknown))}; its parts are "
                        f"{', '.join(task.REWARD_WEIGHTS)}")
    return SimpleNamespace(**{**vars(task), "REWARD_WEIGHTS": config.reward_weights or task.REWARD_WEIGHTS})


def encode_prompt(row: dict, task, tokenizer, config: Config) -> list[int]:
    """The question as the model reads it: as plain text, or as the user's turn of a chat."""
    if config.data.prompt_style == "base":
        return tokenizer(row["prompt"])["input_ids"]
    reply_start = getattr(task, "REPLY_START", "")
    messages = [{"role": "user", "content": row["prompt"].removesuffix(reply_start).rstrip()}]
    if system := getattr(task, "SYSTEM_MESSAGE", None):
        messages.insert(0, {"role": "system", "content": system})
    with blame("data.prompt_style: the chat template of this tokenizer does not take the messages of this task"):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text += "" if text.rstrip().endswith(reply_start) else reply_start  # some templates open the thinking themselves
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has put the special tokens in


def load_questions(task, tokenizer, config: Config, log: Logger) -> tuple[list[dict], list[dict]]:
    """Training and validation rows, the same on every rank. Equal problems never stand on both sides."""
    by_problem: dict[object, list[dict]] = {}
    with blame(f"task.name={config.task.name!r}: its load() fails on {config.data.dataset!r}, or gives no dictionaries with a "
               "prompt"):
        try:
            rows = task.load(beside_main(config.data.dataset), config.data.max_rows)
        except ValueError as error:
            raise UserError(str(error)) from error
        for place, row in enumerate(rows, start=1):
            if not isinstance(row["prompt"], str):
                raise UserError(f"task.name={config.task.name!r}: the prompt of row {place} of its load() is {row['prompt']!r}, "
                                "not a text")
        if (longest := config.data.max_prompt_tokens) is not None:
            fitting = [row for row in rows if len(encode_prompt(row, task, tokenizer, config)) <= longest]
            if not fitting:
                raise UserError(f"data.max_prompt_tokens={longest}: each of the {len(rows):,} questions is longer")
            log.say(f"data.max_prompt_tokens={longest} leaves out {len(rows) - len(fitting):,} of {len(rows):,} questions")
            rows = fitting
        for row in rows:
            by_problem.setdefault(row.get("problem", row["prompt"]), []).append(row)
    problems = list(by_problem)
    random.Random(f"{config.training.seed} split").shuffle(problems)
    validation = [by_problem[problem][0] for problem in problems[:config.data.num_validation]]
    training = [row for problem in problems[config.data.num_validation:] for row in by_problem[problem]]
    if not training:
        raise UserError(f"data.num_validation={config.data.num_validation}: data.dataset={config.data.dataset!r} holds only "
                        f"{len(problems)} different problems, so none would be left to train on")
    if WORLD_SIZE > min(len(training), len(validation)):
        raise UserError(f"{WORLD_SIZE} ranks are more than the {len(training)} training or {len(validation)} validation "
                        "questions: start fewer ranks, or raise data.num_validation")
    return training, validation


def check_lengths(rows: list[dict], model, task, tokenizer, config: Config) -> None:
    """A prompt and the longest answer to it have to fit into what the model can read."""
    longest_texts = sorted(rows, key=lambda row: len(row["prompt"]))[-100:]  # tokenising all could take minutes
    longest = max(len(encode_prompt(row, task, tokenizer, config)) for row in longest_texts)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and longest + config.training.max_new_gen_tokens > context:
        raise UserError(f"training.max_new_gen_tokens={config.training.max_new_gen_tokens}: with a prompt of {longest} tokens "
                        f"it exceeds the {context} that {config.model.name!r} can read"
                        + (f"; write at most {context - longest}" if longest < context else ""))


@lru_cache(maxsize=2)  # a step may reach from one epoch into the next
def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order


def questions(rows: list[dict], step: int, config: Config) -> list[dict]:
    """This rank's N questions of a step. The whole batch depends on seed and step, not on how many ranks share it."""
    N = config.training.num_samples_per_step
    first = ((step - 1) * WORLD_SIZE + RANK) * N
    places = [divmod(position, len(rows)) for position in range(first, first + N)]
    return [rows[epoch_order(len(rows), config.training.seed, epoch)[offset]] for epoch, offset in places]


def load_model(config: Config, device: torch.device):
    """The model that learns, and its tokenizer."""
    name = beside_main(config.model.name)
    dtype = torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32
    attention = f" with model.attention={config.model.attention!r}" if config.model.attention else ""
    with blame(f"model.name={name!r} cannot be loaded{attention}; give a folder with a model and its tokenizer, or a hub id "
               "within reach"):
        # trust_remote_code: false, or the library would ask whether to run a model's own code, and wait for an answer.
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        # Dropout would make the log-probabilities learned from differ from those sampled from.
        for key in vars(model_config):
            if "dropout" in key or key.endswith("pdrop"):
                setattr(model_config, key, 0.0)
        model, loading = AutoModelForCausalLM.from_pretrained(name, config=model_config, dtype=dtype, output_loading_info=True,
                                                              attn_implementation=config.model.attention, trust_remote_code=False)
    if loading["missing_keys"]:
        raise UserError(f"model.name={name!r} lacks the weights {', '.join(sorted(loading['missing_keys'])[:3])}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name={name!r}: its tokenizer has no end-of-text token, so no answer could ever end")
    if config.data.prompt_style == "chat" and not tokenizer.chat_template:
        raise UserError(f"data.prompt_style='chat': the tokenizer of {name!r} has no chat template; write base")
    if config.model.lora_rank:
        add_adapters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.to(device), tokenizer


def add_adapters(model, config: Config) -> None:
    """LoRA: to the matrices named, (out, in), is added the product of two thin ones, (out, rank) and (rank, in), and only those
    learn."""
    try:
        import peft  # here, because only this needs it
    except ImportError:
        raise UserError(f"model.lora_rank={config.model.lora_rank} needs one package more: pip install peft") from None
    if Path(model.name_or_path).exists():  # best/ points to what its adapters belong to, from wherever it is loaded
        model.name_or_path = str(Path(model.name_or_path).resolve())
    if unknown := [target for target in config.model.lora_targets or []
                   if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules())]:
        raise UserError(f"model.lora_targets: {config.model.name!r} has no layers named {', '.join(unknown)}")
    random_stream(config.training.seed, 0, "adapters")  # DDP gives all ranks those of rank 0
    with blame(f"model.lora_targets={config.model.lora_targets}: not all are linear layers of {config.model.name!r}"):
        model.add_adapter(peft.LoraConfig(r=config.model.lora_rank, lora_alpha=config.model.lora_alpha, task_type="CAUSAL_LM",
                                          target_modules=config.model.lora_targets or "all-linear"))
    if config.model.precision == "mixed":  # what does not learn needs no float32 master, which each pass would cast anew
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)


def frozen_copy(model, convert):
    """A copy that does not learn. Each parameter is what `convert` returns for the model's; one that it returns unchanged is
    shared. Buffers, like rotary frequencies, keep their type."""
    return copy.deepcopy(model, {id(parameter): nn.Parameter(convert(parameter).detach(), requires_grad=False)
                                 for parameter in model.parameters()})


def make_sampler(model, config: Config):
    """What answers are drawn from: in mixed precision a bfloat16 copy, since autocast would cast every weight anew for each
    token."""
    if config.model.precision != "mixed":
        return model
    return frozen_copy(model, lambda parameter: parameter.to(torch.bfloat16, copy=parameter.requires_grad))


@torch.no_grad()
def refresh_sampler(sampler, model) -> None:
    if sampler is not model:
        for copied, parameter in zip(sampler.parameters(), model.parameters()):
            if parameter.requires_grad:
                copied.copy_(parameter)


# ================================================================ sampling

@dataclass
class Trajectory:
    """One sampled answer. It carries its own lengths: masks are made of them, never by looking for pad or stop tokens,
    which are one and the same id in many base models."""

    row: dict
    prompt_ids: list[int]
    completion_ids: list[int]  # the sampled stop token included
    completion: str            # the text without it
    truncated: bool            # no stop token within max_new_gen_tokens
    parts: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


def make_generation_config(model, tokenizer, config: Config) -> GenerationConfig:
    """The fields that shape the distribution are set: `generate` fills those left None from the model's own config, and answers
    sampled at that config's temperature and top_k would not be the policy's. (What has no neutral value but None, like min_p, is
    not filled in either: this very object stands in for the model's own while answers are sampled.)"""
    stop_ids = {tokenizer.eos_token_id}  # chat models have several: stop on any, train on the one that was sampled
    for eos in (model.config.eos_token_id, model.generation_config.eos_token_id):
        stop_ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return GenerationConfig(
        do_sample=True, num_beams=1, use_cache=True, temperature=config.sampling.temperature, top_p=config.sampling.top_p,
        top_k=config.sampling.top_k, min_p=None, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, repetition_penalty=1.0,
        encoder_repetition_penalty=1.0, no_repeat_ngram_size=0, min_length=0, guidance_scale=1.0, renormalize_logits=False,
        remove_invalid_values=False, eos_token_id=sorted(stop_ids),
        pad_token_id=min(stop_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0, however it is padded. `generate` does the same."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pad_prompts(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each different prompt once, padded on the left: ids and mask, (different, time), and which of them each prompt is,
    (prompts,)."""
    different = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    longest = max(2, *map(len, different))  # one token to read ahead, and one to start from
    padding = [longest - len(prompt) for prompt in different]
    ids = torch.tensor([[0] * pad + [*prompt] for prompt, pad in zip(different, padding)], device=device)
    mask = torch.tensor([[False] * pad + [True] * len(prompt) for prompt, pad in zip(different, padding)], device=device)
    return ids, mask, torch.tensor([different[tuple(prompt)] for prompt in prompts], device=device)


def read_prompts(model, ids: torch.Tensor, mask: torch.Tensor):
    """Keys and values of every prompt token but the last, (different, time - 1). The last is left to whoever goes on from here,
    any number of times: `generate`, or the learner, needs one token to start with."""
    mask = mask[:, :-1]
    output = model.base_model(input_ids=ids[:, :-1], attention_mask=mask, position_ids=positions(mask), use_cache=True)
    return output.past_key_values


TOKENS_PER_SLICE = 16  # after so many tokens the finished answers leave the batch


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, time, width), with room behind them for a slice. The library's own layer copies
    all it holds to append a token, which takes longer than to attend to it."""

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.keys, self.values, self.is_initialized = layer.keys, layer.values, True

    def batch_select_indices(self, indices):
        self.roomy = []
        for held in (self.keys, self.values):
            rows, heads, time, width = len(indices), *held.shape[1:]
            self.roomy.append(held.new_empty(rows, heads, time + TOKENS_PER_SLICE, width))
            self.roomy[-1][:, :, :time] = held[indices]
        self.keys, self.values = (roomy[:, :, :time] for roomy in self.roomy)

    def update(self, keys, values, *args, **kwargs):
        time, new_time = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        for roomy, new in zip(self.roomy, (keys, values)):
            roomy[:, :, time:new_time] = new
        self.keys, self.values = (roomy[:, :, :new_time] for roomy in self.roomy)
        return self.keys, self.values


@torch.inference_mode()
def generate_completions(model, prompts: list[list[int]], generation_config, max_new_tokens: int, progress) -> list[list[int]]:
    """One completion for each entry of `prompts`. Each different prompt is read once, its cache repeated."""
    stop_ids = set(generation_config.eos_token_id)
    ids, mask, rows = pad_prompts(prompts, model.device)
    cache = read_prompts(model, ids, mask)
    # Layers with a sliding window stay the library's own.
    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    completions: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))  # the completion that each row of the batch belongs to
    new_tokens = 0
    while unfinished and new_tokens < max_new_tokens:
        ids, mask = ids[rows], mask[rows]
        cache.batch_select_indices(rows)
        generation_config.max_new_tokens = min(TOKENS_PER_SLICE, max_new_tokens - new_tokens)
        sequences = model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=generation_config)
        new_ids = sequences[:, ids.shape[1]:]  # (rows, slice); after its stop token a row holds only padding
        new_tokens += new_ids.shape[1]
        going_on = []
        for row, row_ids in enumerate(new_ids.tolist()):
            end = next((i + 1 for i, token in enumerate(row_ids) if token in stop_ids), None)
            completions[unfinished[row]] += row_ids[:end]
            if end is None:
                going_on.append(row)
        ids, mask = sequences, torch.cat([mask, mask.new_ones(new_ids.shape)], dim=1)
        unfinished = [unfinished[row] for row in going_on]
        rows = torch.tensor(going_on, dtype=torch.long, device=model.device)
        progress(len(completions) - len(unfinished))
    return completions


def generate_continuously(model, prompts: list[list[int]], num_answers: int, generation_config,
                          config: Config) -> list[list[int]]:
    """`num_answers` completions of each prompt by transformers' continuous batching: a finished row makes room for the next at
    once, keys and values lie in pages, and a GPU runs CUDA graphs. It is set up anew for each call, or it would go on using keys
    of old weights."""
    attention = model.config._attn_implementation
    generation_config.max_new_tokens, generation_config.num_return_sequences = config.training.max_new_gen_tokens, num_answers
    at_once = min(config.sampling.max_rows, len(prompts) * num_answers)
    seed = int(torch.randint(2**31, ()))
    batching = ContinuousBatchingConfig(max_requests_per_batch=at_once, max_batch_tokens=max(2 * at_once, 256), seed=seed)
    # As much memory as these may need; left to itself it would take nearly all that is free.
    longest = max(map(len, prompts)) + generation_config.max_new_tokens
    batching.num_blocks = at_once * math.ceil(longest / batching.page_size)
    try:
        results = list(model.generate_batch(prompts, generation_config, batching).values())
    finally:
        model.set_attn_implementation(attention)
    # What goes wrong inside is logged, not raised, and the answers that there are come back.
    errors = {result.error for result in results if result.error}
    if errors or len(results) < len(prompts) * num_answers:
        kind = torch.OutOfMemoryError if "out of memory" in str(errors) else UserError
        raise kind(f"sampling.engine=continuous returned {len(results)} of {len(prompts) * num_answers} answers, with the errors "
                   f"{str(sorted(errors))[:300]}; set sampling.engine to generate")
    return [result.generated_tokens for result in results]


def sample_trajectories(model, tokenizer, task, rows: list[dict], num_answers: int, config: Config, progress) -> list[Trajectory]:
    """`num_answers` answers to each row, those to one row side by side, at most `sampling.max_rows` at a time."""
    generation_config = make_generation_config(model, tokenizer, config)
    own_generation_config, was_training = model.generation_config, model.training
    model.generation_config = generation_config  # so that `generate` finds nothing else to inherit
    model.eval()  # in train mode gradient checkpointing drops the cache
    prompts = [encode_prompt(row, task, tokenizer, config) for row in rows]
    asked = [prompt for prompt in prompts for _ in range(num_answers)]
    completions, total = [], len(asked)
    at_once, L = min(config.sampling.max_rows, total), config.training.max_new_gen_tokens
    advice = (f"lower sampling.max_rows from {config.sampling.max_rows} to {at_once // 2}" if at_once > 1 else
              f"lower training.max_new_gen_tokens from {L} to {L // 2}")
    try:
        with enough_memory(f"sampling: {advice}"):
            if config.sampling.engine == "continuous":
                completions = generate_continuously(model, prompts, num_answers, copy.copy(generation_config), config)
            for start in range(len(completions), total, config.sampling.max_rows):
                some = asked[start:start + config.sampling.max_rows]
                completions += generate_completions(model, some, copy.copy(generation_config), L,
                                                    lambda finished, start=start: progress(start + finished, total))
    finally:
        model.generation_config = own_generation_config  # `save_pretrained` writes it
        model.train(was_training)
    trajectories = []
    for i, completion_ids in enumerate(completions):
        truncated = completion_ids[-1] not in generation_config.eos_token_id
        text = tokenizer.decode(completion_ids if truncated else completion_ids[:-1], clean_up_tokenization_spaces=False)
        trajectories.append(Trajectory(rows[i // num_answers], asked[i], completion_ids, text, truncated))
    return trajectories


# ================================================================ rewards and advantages

def score(trajectories: list[Trajectory], task, config: Config) -> None:
    """The task's reward parts, and their weighted sum."""
    with logger.name_slow_rewards(config, RANK) as grades:
        for trajectory in trajectories:
            grades(trajectory.row)
            try:
                parts = task.reward_function(trajectory.completion, trajectory.row)
                trajectory.parts = {part: float(parts[part]) for part in dict.fromkeys([*task.REWARD_WEIGHTS, task.SOLVED])}
                if not all(map(math.isfinite, trajectory.parts.values())):
                    raise ValueError(f"it returned {parts}")
            except Exception as error:
                path = logger.keep_failed_reward(config, RANK, trajectory.completion, trajectory.row)
                calls = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
                what = f"{' > '.join(calls or ['reward_function'])} failed ({type(error).__name__}: {error})"
                raise UserError(f"task.name={config.task.name!r}: {what}; the completion, its row and the traceback are in "
                                f"{path}") from error
            trajectory.reward = sum(weight * trajectory.parts[part] for part, weight in task.REWARD_WEIGHTS.items())


def compute_advantages(group: list[Trajectory], config: Config, stream: random.Random) -> list[Trajectory]:
    """Sets A_ij for the answers j of one question i. Returns those that B counts: all of them, or with sil the k best."""
    rewards = [trajectory.reward for trajectory in group]
    if config.training.learning_type == "sil":
        k, _ = config.training.k_best_of_n
        best = sorted(group, key=lambda trajectory: (trajectory.reward, stream.random()), reverse=True)[:k]
        for trajectory in best:
            trajectory.advantage = float(trajectory.reward > 0)  # nothing that earned nothing is imitated
        return best
    if max(rewards) > min(rewards):  # else all stay exactly 0, where a float mean would leave 1e-9 behind
        mean = sum(rewards) / len(rewards)
        scale = stdev(rewards) + 1e-4 if config.training.scale_rewards == "group" else 1.0
        for trajectory in group:
            trajectory.advantage = (trajectory.reward - mean) / scale
    return group


# ================================================================ learning

LOGITS_PER_CHUNK = 2**25  # token positions x vocabulary in one piece: 128 MiB in float32


class Policy(nn.Module):
    """The model as the learner sees it: token ids in, log-probabilities of the sampled tokens out. All of it happens inside
    the module that DDP wraps, since gradients of anything computed outside are not shared between ranks."""

    def __init__(self, model, temperature: float, mixed: bool):
        super().__init__()
        self.model, self.temperature, self.mixed = model, temperature, mixed

    def forward(self, prompt_ids, prompt_mask, passes):
        """As `collate` makes them -> log-probability and entropy of each completion token, (tokens,), row after row."""
        with torch.autocast(prompt_ids.device.type, torch.bfloat16, enabled=self.mixed):
            # With gradient checkpointing the model's layers refuse a cache, so every row has to read its prompt itself.
            cache = None if self.model.is_activation_checkpointing else read_prompts(self.model, prompt_ids, prompt_mask)
            states = [self.completion_states(prompt_ids[rows], prompt_mask[rows], completion_ids, completion_mask, cache, rows)
                      for rows, completion_ids, completion_mask in passes]
            hidden, targets = (torch.cat(pieces) for pieces in zip(*states))
            # Only these reach the vocabulary projection, in chunks whose logits are dropped and recomputed in the backward pass,
            # so that logits for all tokens, by far the largest tensor of all, never exist at once.
            size = max(1, LOGITS_PER_CHUNK // self.model.config.get_text_config().vocab_size)
            chunks = [checkpoint(self.token_logprobs, some_hidden, some_targets, use_reentrant=False)
                      for some_hidden, some_targets in zip(hidden.split(size), targets.split(size))]
            return tuple(torch.cat(pieces) for pieces in zip(*chunks))

    def completion_states(self, prompt_ids, prompt_mask, completion_ids, completion_mask, cache, rows):
        """(rows, prompt time) and (rows, time) -> the state that predicts each completion token, (tokens, width), and that
        token."""
        # The state at t predicts the token at t + 1: the last prompt token counts, and the last of all is not read.
        ids = torch.cat([prompt_ids, completion_ids[:, :-1]], 1)  # (rows, prompt time + time - 1)
        mask = torch.cat([prompt_mask, completion_mask[:, :-1]], 1)
        places, time = positions(mask), completion_ids.shape[1]
        if cache is not None:
            ids, places = ids[:, -time:], places[:, -time:]
            cache = copy.copy(cache)
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            cache.batch_select_indices(rows)
        output = self.model.base_model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache,
                                       use_cache=cache is not None)
        self.output_class = type(output)
        return output.last_hidden_state[:, -time:][completion_mask], completion_ids[completion_mask]

    def token_logprobs(self, hidden, targets):
        """(tokens, width) and (tokens,) -> log-probability and entropy, (tokens,) each, at the sampling temperature."""
        # The model's own forward, with its body swapped out, so that whatever it does after the projection (Gemma 2
        # caps its logits, others scale them) is done here as well.
        body = self.model.base_model
        body.forward = lambda *_, inputs_embeds, **__: self.output_class(last_hidden_state=inputs_embeds)
        try:
            logits = self.model(inputs_embeds=hidden[None]).logits[0]  # (tokens, vocabulary)
        finally:
            del body.forward
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs = (logits / self.temperature).log_softmax(-1)
        with torch.no_grad():
            entropies = -logprobs.exp().mul_(logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def make_reference(model, config: Config):
    """What the KL term measures from: log-probabilities of the model as it was loaded, which with LoRA is the same one with its
    adapters off. In mixed precision its linear layers, but for the output, are kept in bfloat16, as autocast would cast them
    anyway: so it agrees with the policy to the last bit until something is learned."""
    has_adapters, mixed = config.model.lora_rank > 0, config.model.precision == "mixed"
    low = {id(layer.weight) for layer in model.modules()
           if mixed and isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()}
    loaded = model if has_adapters else frozen_copy(model, lambda parameter: parameter.to(
        torch.bfloat16 if id(parameter) in low else parameter.dtype, copy=parameter.requires_grad))
    frozen = Policy(loaded, config.sampling.temperature, mixed)

    @torch.no_grad()
    def reference(**batch) -> torch.Tensor:
        if has_adapters:
            model.disable_adapters()
        logprobs, _ = frozen(**batch)
        if has_adapters:
            model.enable_adapters()
        return logprobs

    return reference


def make_micro_batches(trajectories: list[Trajectory], tokens_per_micro_batch: int) -> list[list[Trajectory]]:
    """As many rows together as the budget of padded tokens allows; the longest completions first, those of similar length side by
    side."""
    batches: list[list[Trajectory]] = [[]]
    for trajectory in sorted(trajectories, key=lambda trajectory: len(trajectory.completion_ids), reverse=True):
        longest = max(row.length for row in [*batches[-1], trajectory])
        if batches[-1] and (len(batches[-1]) + 1) * longest > tokens_per_micro_batch:
            batches.append([])
        batches[-1].append(trajectory)
    return batches


ROWS_PER_PASS = 16  # rows that the learner takes through the model at once; those of a micro-batch are sorted by length


def collate(trajectories: list[Trajectory], device: torch.device) -> dict[str, torch.Tensor | list]:
    """Each different prompt once, (prompts, prompt time). Then for each pass which prompt each row has, (rows,), and its
    completion, padded on the right, (rows, time), with its mask. Masks come from lengths."""
    prompt_ids, prompt_mask, which = pad_prompts([trajectory.prompt_ids for trajectory in trajectories], device)
    passes = []
    for start in range(0, len(trajectories), ROWS_PER_PASS):
        completions = [trajectory.completion_ids for trajectory in trajectories[start:start + ROWS_PER_PASS]]
        lengths = torch.tensor([len(completion) for completion in completions], device=device)
        longest = max(map(len, completions))
        padded = [completion + [0] * (longest - len(completion)) for completion in completions]
        completion_mask = torch.arange(longest, device=device) < lengths[:, None]  # (rows, time)
        passes.append((which[start:start + ROWS_PER_PASS], torch.tensor(padded, device=device), completion_mask))
    return {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "passes": passes}


def policy_loss(logprobs, old_logprobs, reference_logprobs, advantages, lengths, B: int, T: int,
                training: TrainingConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum_i sum_j sum_t (min(rho A_ij, clip(rho, 1 - low, 1 + high) A_ij) - beta KL) / Z, where rho is
    pi(a_ij[t] | q_i, a_ij[<t]) over what it was before the step's first update; with one update per batch log pi stands in for
    it. The batch of all ranks has B answers, of T tokens in all. All tensors are (tokens,); `lengths` says for each token how
    long its answer is. Returns what to watch as well.

    A sum, whose normaliser Z is settled before the first micro-batch: how rows are split into micro-batches, ordered or shared
    among ranks changes it only by rounding."""
    watched = {}
    if training.updates_per_batch == 1:
        gains = advantages * logprobs  # rho would be 1, and its gradient is that of the log-probability
    else:
        rho = (logprobs - old_logprobs).exp()
        gains = advantages * rho
        if training.clip:
            low, high = training.clip
            clipped = advantages * rho.clamp(1 - low, 1 + high)
            watched["clipped"] = (clipped < gains).sum()
            gains = torch.minimum(gains, clipped)
    if beta := training.kl_beta:
        d = reference_logprobs - logprobs
        kl = d.exp() - d - 1  # the estimator k3: never negative, and right on average
        watched["kl"] = kl.sum()
        gains = gains - beta * kl
    L = training.max_new_gen_tokens
    Z = {"max_length": B * L, "tokens": T, "sequence": B * lengths}[training.loss_normalizer]  # Dr. GRPO, DAPO, GRPO
    return -(gains / Z).sum(), {name: value.detach() for name, value in watched.items()}


def policy_gradient(policy: DistributedDataParallel, trajectories: list[Trajectory], config: Config, device: torch.device,
                    progress, reference=None, kept: dict | None = None) -> dict[str, float | None]:
    """Leaves the gradient of the whole batch in the parameters of every rank, clipped. Returns what it was like, over all ranks.
    `kept`: an empty dictionary at the first update of a batch, the same one at its others. It holds, for each micro-batch (all
    updates cut them alike), the log-probabilities before the first update and those of the reference."""
    training = config.training
    # Where the advantage is 0 so is the gradient, but for a KL term: such rows are not run at all. A rank left with none runs one
    # of them all the same, because every rank owes the others exactly one synchronised backward pass.
    learned = [trajectory for trajectory in trajectories
               if (trajectory.advantage != 0 or training.kl_beta) and not (training.mask_truncated and trajectory.truncated)]
    num_tokens = sum(len(trajectory.completion_ids) for trajectory in trajectories)
    num_learned, num_tokens = over_ranks([len(learned), num_tokens], device)
    if num_learned == 0:
        return {"loss": 0.0, "entropy": None, "grad_norm": None, "updated": 0, "non_finite": 0}
    micro_batches = make_micro_batches(learned or trajectories[:1], training.tokens_per_micro_batch)
    B, T = len(trajectories) * WORLD_SIZE, int(num_tokens)  # what is skipped counts too
    kept = {} if kept is None else kept
    policy.zero_grad(set_to_none=False)  # the gradients are views of DDP's buckets: None would make it hold them twice
    totals: dict[str, torch.Tensor | float] = {}
    for i, micro_batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else policy.no_sync():  # around forward and backward: gradients meet once, at the last
            batch = collate(micro_batch, device)
            if reference and ("reference", i) not in kept:  # before the policy's pass, whose activations stay
                kept["reference", i] = reference(**batch)
            logprobs, entropies = policy(**batch)
            lengths = torch.tensor([len(trajectory.completion_ids) for trajectory in micro_batch], device=device)
            advantages = torch.tensor([trajectory.advantage for trajectory in micro_batch], device=device, dtype=logprobs.dtype)
            loss, watched = policy_loss(
                logprobs, kept.setdefault(("old", i), logprobs.detach()), kept.get(("reference", i)),
                advantages.repeat_interleave(lengths), lengths.repeat_interleave(lengths), B, T, training)  # (rows,) -> (tokens,)
            loss = loss * bool(learned)
            (loss * WORLD_SIZE).backward()  # DDP takes the mean over ranks, the formula the sum
        progress(i + 1, len(micro_batches))
        seen = {"loss": loss.detach(), "tokens": len(entropies), "entropy": entropies.sum(), **watched}
        totals = {name: totals.get(name, 0.0) + value * bool(learned) for name, value in seen.items()}
    grad_norm = float(nn.utils.clip_grad_norm_(policy.parameters(), training.max_grad_norm or math.inf))
    totals = dict(zip(totals, over_ranks([float(total) for total in totals.values()], device)))
    loss, num_tokens = totals.pop("loss"), totals.pop("tokens")
    # Both are the same on every rank, so all of them take the step or none does.
    if not math.isfinite(grad_norm) or not math.isfinite(loss):
        return {"loss": None, "grad_norm": None, **dict.fromkeys(totals), "updated": 0, "non_finite": 1}
    means = {name: total / num_tokens for name, total in totals.items()}
    return {"loss": loss, "grad_norm": grad_norm, **means, "updated": 1, "non_finite": 0}


def learning_advice(trajectories: list[Trajectory], config: Config) -> str:
    """For when memory runs out: what costs least first."""
    longest, total = max(trajectory.length for trajectory in trajectories), sum(trajectory.length for trajectory in trajectories)
    budget, L = config.training.tokens_per_micro_batch, config.training.max_new_gen_tokens
    if (fits := min(budget, total) // 2) >= longest:
        return f"lower training.tokens_per_micro_batch from {budget} to {fits}"
    if not config.model.gradient_checkpointing:
        return "change model.gradient_checkpointing from false to true"
    if config.model.precision != "bfloat16":
        return f"change model.precision from {config.model.precision} to bfloat16"
    return f"lower training.max_new_gen_tokens from {L} to {L // 2}"


def scheduled_learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then constant, or a linear decay to 0 over `decay_steps`."""
    training = config.training
    factor = min(1.0, step / max(1, training.warmup_steps))
    if training.decay_steps is not None and step > training.warmup_steps:
        factor = max(0.0, 1 - (step - training.warmup_steps) / training.decay_steps)
    return training.learning_rate * factor


# ================================================================ evaluation

def evaluate(model, tokenizer, task, rows: list[dict], step: int, config: Config,
             progress) -> tuple[dict[str, float], list[list[Trajectory]]] | None:
    """Best-of-n and mean accuracy on the held-out rows: metrics and answers on rank 0, None elsewhere."""
    random_stream(config.training.seed, step, "evaluate")
    n = config.validation.best_of_n
    trajectories = sample_trajectories(model, tokenizer, task, rows[RANK::WORLD_SIZE], n, config, progress)
    score(trajectories, task, config)
    gathered: list | None = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(trajectories, gathered)
    if RANK != 0:
        return None
    # Row i was answered by rank i % WORLD_SIZE as its (i // WORLD_SIZE)-th; the last ranks may have had one row fewer.
    groups = [gathered[i % WORLD_SIZE][i // WORLD_SIZE * n:(i // WORLD_SIZE + 1) * n] for i in range(len(rows))]
    return evaluation_metrics(groups, task), groups


def evaluation_metrics(groups: list[list[Trajectory]], task) -> dict[str, float]:
    """`groups`: for each question its answers. `_ci95` is half the width of the 95 % interval of the mean over questions."""
    answers = [answer for group in groups for answer in group]
    # The best answer is the one of highest reward; its question counts as solved when that one solves it.
    best = [max(group, key=lambda answer: answer.reward).parts[task.SOLVED] for group in groups]
    solved = [fmean(answer.parts[task.SOLVED] for answer in group) for group in groups]
    metrics = {}
    for name, values in (("best_of_n", best), ("solved", solved)):
        metrics[f"eval/{name}"] = fmean(values)
        metrics[f"eval/{name}_ci95"] = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    for name in sorted({str(group[0].row["group"]) for group in groups if "group" in group[0].row}):
        metrics[f"eval/solved/{name}"] = fmean(value for value, group in zip(solved, groups)
                                               if str(group[0].row.get("group")) == name)
    values = {**{part: [answer.parts[part] for answer in answers] for part in task.REWARD_WEIGHTS},
              "reward": [answer.reward for answer in answers],
              "completion_length": [len(answer.completion_ids) for answer in answers],
              "truncated": [answer.truncated for answer in answers]}
    metrics |= {f"eval/{name}": fmean(each) for name, each in values.items()}
    return metrics


# ================================================================ a run and its checkpoints

@dataclass
class State:
    """Where a run stands. With the weights, AdamW's moments and the settings it is all that resuming needs: see random_stream."""

    step: int = 0                             # training steps done
    evaluated: bool = False                   # whether the evaluation due after that step is done too
    best: tuple[float, float] = (-1.0, -1.0)  # best-of-n accuracy, then mean accuracy, of what is in best/
    bad_steps: int = 0                        # steps in a row that were skipped because the gradient was not finite


@dataclass
class Run:
    """What a run consists of. Whoever changes the state holds `lock`: when it is free, and `settled` true, weights, moments,
    state and the logger's files belong to the same step and can be saved."""

    config: Config
    device: torch.device
    log: Logger
    task: SimpleNamespace
    training_rows: list[dict]
    validation_rows: list[dict]
    tokenizer: typing.Any
    model: nn.Module
    sampler: nn.Module
    policy: DistributedDataParallel
    reference: typing.Callable | None
    optimizer: torch.optim.Optimizer
    state: State = field(default_factory=State)
    lock: threading.Lock = field(default_factory=threading.Lock)
    settled: bool = True

    @contextmanager
    def settling(self):
        """Around every change of the state and of what is on disk."""
        what = f"{self.log.folder} cannot be written to; what was saved before is intact"
        with self.lock, blame(what, (OSError, SafetensorError)):
            self.settled = False
            yield
            self.settled = True  # not after an exception: what is half changed is never saved


PREPARING = "preparing: take a smaller model, set model.lora_rank to 32, say, or change model.precision to bfloat16"


@enough_memory(PREPARING)
def prepare(config: Config, device: torch.device, log: Logger) -> Run:
    with together(), enough_memory(PREPARING):
        task = load_task(config.task)
        model, tokenizer = load_model(config, device)
    for first in (True, False):  # one rank a machine prepares the data, then the others find it prepared
        with together(), enough_memory("reading the questions: set data.max_rows, or lower it"):
            if first == (LOCAL_RANK == 0):
                training_rows, validation_rows = load_questions(task, tokenizer, config, log)
    with together():
        check_lengths(training_rows + validation_rows, model, task, tokenizer, config)
    policy = DistributedDataParallel(Policy(model, config.sampling.temperature, config.model.precision == "mixed"),
                                     device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    reference = make_reference(model, config) if config.training.kl_beta else None  # before a checkpoint is loaded into the model
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=tuple(config.training.adam_betas),
                                  weight_decay=config.training.weight_decay, fused=True)
    # One backward pass and one step of nothing, so that a fresh run starts out as a resumed one does: DDP arranges its buckets
    # anew after its first pass, and from three ranks on sums then differ in the last bit; AdamW's first step makes its moments.
    policy.train()
    logprobs, _ = policy(**collate([Trajectory({}, [0], [0], "", False)], device))
    logprobs.sum().backward()
    policy.zero_grad(set_to_none=False)
    optimizer.step()
    for moments in optimizer.state.values():
        moments["step"].zero_()
    sampler = make_sampler(model, config)
    return Run(config, device, log, task, training_rows, validation_rows, tokenizer, model, sampler, policy, reference, optimizer)


def choose_engine(run: Run) -> None:
    """sampling.engine=auto: each engine answers the first step's questions, and the faster one on rank 0 is taken, for good."""
    seconds = {}
    for engine in ("generate", "continuous"):
        run.config.sampling.engine = engine
        started = time.perf_counter()
        sample_trajectories(run.sampler, run.tokenizer, run.task, questions(run.training_rows, 1, run.config),
                            run.config.training.k_best_of_n[1], run.config, lambda *_: None)
        seconds[engine] = time.perf_counter() - started
    fastest = [min(seconds, key=seconds.get)]
    dist.broadcast_object_list(fastest)
    run.config.sampling.engine, = fastest
    measured = ", ".join(f"{engine} {each:.1f} s" for engine, each in seconds.items())
    run.log.say(f"sampling.engine=auto: {measured}; takes {fastest[0]}")


def state_tensors(run: Run) -> dict[str, torch.Tensor]:
    """What learns, by name, and AdamW's moments of each: {"w": ..., "w/step": ..., "w/exp_avg": ..., "w/exp_avg_sq": ...}."""
    tensors = {}
    for name, parameter in run.model.named_parameters():
        if parameter in run.optimizer.state:  # those that learn
            tensors[name] = parameter.data
            tensors |= {f"{name}/{moment}": value for moment, value in run.optimizer.state[parameter].items()}
    return tensors


def save_checkpoint(run: Run) -> None:
    """All that going on from here needs. Nothing at step 0, nor after steps whose gradient was not finite: a run goes on from
    before those."""
    if run.state.step == 0 or run.state.bad_steps:
        return

    def write(folder: Path) -> None:
        # On a stream of its own: the usual one may be waiting for another rank when a stop signal asks for this.
        with torch.cuda.stream(torch.cuda.Stream()) if run.device.type == "cuda" else nullcontext():
            tensors = {name: tensor.cpu().contiguous() for name, tensor in state_tensors(run).items()}
        save_file(tensors, folder / "tensors.safetensors")
        contents = {**asdict(run.state), "num_ranks": WORLD_SIZE, "config": flatten(run.config), "log": run.log.bookmark()}
        (folder / "state.json").write_text(json.dumps(contents, indent=1), encoding="utf-8")

    logger.add_checkpoint(run.log.folder, run.state.step, write, run.config.checkpoint.keep)


def save_best(run: Run, metrics: dict[str, float]) -> None:
    """The model as a folder that `from_pretrained` reads."""
    def write(folder: Path) -> None:
        model = merged(run.model) if run.config.model.lora_rank and run.config.model.lora_merged else run.model
        model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
        prompt_ids = encode_prompt(run.validation_rows[0], run.task, run.tokenizer, run.config)
        run.log.card(folder, run.state.step, metrics, run.tokenizer.decode(prompt_ids))

    logger.switch_best(run.log.folder, run.state.step, write)


def merged(model):
    """A copy whose adapters are added to the matrices they belong to: a plain model, without need of peft. On the CPU, where
    there is room, and in float32, or the little that was learned might be rounded away."""
    model = frozen_copy(model, lambda parameter: parameter.to("cpu", torch.float32, copy=True))
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    model._hf_peft_config_loaded = False  # what makes `save_pretrained` write adapters alone
    return model


def claim_run_folder(config: Config) -> typing.TextIO:
    """Settles the run's name and takes its folder for this run alone, as long as the returned file is open."""
    folder = Path(config.run.dir) / (config.run.name or default_run_name(config))
    if config.run.resume == "never":
        folder = logger.new_folder(folder)
    config.run.name = folder.name
    with blame(f"run.dir={config.run.dir!r} cannot be written to", (OSError,)):
        try:
            return logger.lock_folder(folder)
        except BlockingIOError as error:
            raise UserError(f"{folder} is in use by {error}: wait for its end, or set run.name to another name") from None


def find_checkpoint(config: Config, folder: Path) -> tuple[Path, int, dict] | None:
    """The newest complete checkpoint on any machine, the rank that can read it, and what its state.json says."""
    given = Path(config.run.resume) if config.run.resume not in ("auto", "never") else None
    offer = None
    if LOCAL_RANK == 0:  # one rank looks for its machine
        # Where the run itself has one, it has been started like this before.
        path = logger.newest_checkpoint(folder) or (given and logger.newest_checkpoint(given))
        if path:
            offer = (path, RANK, json.loads((path / "state.json").read_text(encoding="utf-8")))
    offers: list = [None] * WORLD_SIZE
    dist.all_gather_object(offers, offer)
    if given and not any(offers):
        raise UserError(f"run.resume={config.run.resume!r} is neither a complete checkpoint nor the folder of a run that has "
                        "one; write auto, never, or a path like runs/<name>/checkpoints/step-000100")
    return max(filter(None, offers), key=lambda found: (found[2]["step"], -found[1]), default=None)


def adopt_settings(saved: dict, config: Config, log: Logger) -> None:
    """Takes over what the run once chose from its machine, and refuses settings that would make it another experiment."""
    config.model.precision = config.model.precision or saved["config"]["model.precision"]
    if config.sampling.engine == "auto":
        config.sampling.engine = saved["config"]["sampling.engine"]
    # Keys that are younger than the checkpoint had their default.
    then, now = read_yaml(HERE / "config.yaml") | saved["config"], flatten(config)
    for settings, num_ranks in ((then, saved["num_ranks"]), (now, WORLD_SIZE)):
        settings["training.num_samples_per_step"] = f"{settings['training.num_samples_per_step'] * num_ranks} over all ranks"
    changed = {key: f"{key}: {then[key]} -> {now[key]}" for key in sorted(now)
               if then[key] != now[key] and not key.startswith("run.")}
    refused = [change for key, change in changed.items() if key not in NOT_THE_EXPERIMENT]
    if refused and not config.run.resume_anyway:
        raise UserError(f"the checkpoint to go on from belongs to another experiment ({'; '.join(refused)}): set run.name to a "
                        "new name to start this one afresh, or run.resume_anyway=true to go on all the same")
    for change in changed.values():
        log.say(f"changed since the checkpoint: {change}")
    if saved["num_ranks"] != WORLD_SIZE:
        log.say(f"{WORLD_SIZE} ranks now, {saved['num_ranks']} at the checkpoint: the questions stay the same, the answers that "
                "are sampled will differ")


def load_checkpoint(run: Run, path: Path, reader: int, saved: dict) -> None:
    """Into every rank from the disk of one, since machines need not share a file system."""
    run.state = State(**{key: saved[key] for key in asdict(run.state)})
    if not (run.log.folder / "best").exists():  # this folder is new to the run: the next evaluation is the best in it
        run.state.best = State.best
    tensors = state_tensors(run)
    with safe_open(path / "tensors.safetensors", "pt") if RANK == reader else nullcontext() as file:
        other = f"{path} holds the weights of another model than model.name={run.config.model.name!r}"
        with together(), blame(other, (SafetensorError,)):
            if RANK == reader and any(file.get_slice(name).get_shape() != list(tensor.shape) for name, tensor in tensors.items()):
                raise SafetensorError("other shapes")
        for name, tensor in tensors.items():
            if RANK == reader:
                tensor.copy_(file.get_tensor(name))
            dist.broadcast(tensor, reader)
    refresh_sampler(run.sampler, run.model)


# ================================================================ stopping

GRACE = 20  # seconds that waiting for the lock and saving may take after a stop signal: torchrun kills after 30


@contextmanager
def stop_signals(run: Run, store: dist.Store):
    """SIGTERM, SIGINT and SIGHUP save the last completed step and end the process. A thread waits for them, woken through a pipe,
    because Python's own handlers do not run while the main thread is inside a collective or a kernel."""
    pipe_out, pipe_in = os.pipe()
    os.set_blocking(pipe_in, False)
    heeded = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    stopping, broken = threading.Event(), threading.Event()

    def watch() -> None:
        while (number := os.read(pipe_out, 1)[0]) not in heeded:  # another signal with a handler, like the alarm of a reward
            if number == 0:  # written below
                return
        stopping.set()
        try:
            stop(run, store, signal.Signals(number).name, broken)
        finally:
            os._exit(128 + number)

    def forget() -> None:
        """In a process that a reward forks, though it should not: its signals are not ours."""
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    handlers = {number: signal.signal(number, lambda *_: None) for number in heeded}
    signal.set_wakeup_fd(pipe_in)
    os.register_at_fork(after_in_child=forget)
    try:
        yield
    except UserError:
        raise
    except Exception:  # as a rule another rank has left, and torchrun's SIGTERM is on its way: then this rank ends without a word
        broken.set()
        stopping.wait(3)
        raise
    finally:
        if stopping.is_set():
            watcher.join()  # never returns: the watcher ends the process
        forget()
        os.write(pipe_in, b"\0")  # lets the watcher go
        watcher.join()
        os.close(pipe_in)
        os.close(pipe_out)


def stop(run: Run, store: dist.Store, reason: str, broken: threading.Event) -> None:
    """Rank 0 saves; the others live until it has, since nccl would end rank 0 if they did not."""
    def give_up() -> None:
        run.log.stopped(f"{reason}, and {GRACE} s were not enough to save step {run.state.step}")
        os._exit(1)

    timer = threading.Timer(GRACE, give_up)
    timer.daemon = True
    timer.start()
    if RANK == 0:
        try:
            with run.lock:
                if run.settled:
                    with blame(f"{run.log.folder} cannot be written to", (OSError, SafetensorError)):
                        save_checkpoint(run)
        except UserError as error:
            reason = f"{reason}, and {error}"
        timer.cancel()
        run.log.stopped(reason)
        store.set("rank 0 has stopped", "")
    else:
        while not broken.is_set() and not store.check(["rank 0 has stopped"]):
            time.sleep(0.1)


# ================================================================ the loop

def step_metrics(groups: list[list[Trajectory]], seconds: dict[str, float], task, device: torch.device) -> dict[str, float]:
    """What every rank saw in this step; means are over the groups or answers of all ranks."""
    answers = [answer for group in groups for answer in group]
    rewards = [[answer.reward for answer in group] for group in groups]
    values = {
        "reward": [answer.reward for answer in answers],
        "reward_std": [pstdev(group) for group in rewards],
        **{f"reward/{part}": [answer.parts[part] for answer in answers] for part in task.REWARD_WEIGHTS},
        **{f"reward/{part}_std": [pstdev(answer.parts[part] for answer in group) for group in groups]
           for part in task.REWARD_WEIGHTS},
        "solved": [answer.parts[task.SOLVED] for answer in answers],
        "groups_without_signal": [max(group) == min(group) for group in rewards],
        "completion_length": [len(answer.completion_ids) for answer in answers],
        "truncated": [answer.truncated for answer in answers],
        **{f"seconds/{phase}": [value] for phase, value in seconds.items()},
    }
    sums = over_ranks([fmean(each) for each in values.values()], device)
    metrics = {name: total / WORLD_SIZE for name, total in zip(values, sums)}  # each rank has as many as the others
    num_tokens = metrics["completion_length"] * len(answers) * WORLD_SIZE
    metrics["tokens_per_second"] = num_tokens / sum(metrics[f"seconds/{phase}"] for phase in seconds)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else kilobytes * 1024
    metrics["memory_gb"] = over_ranks([peak], device, dist.ReduceOp.MAX)[0] / 1e9  # of the rank that needed most
    return metrics


def evaluation_step(run: Run) -> None:
    with run.log.progress("evaluating") as progress:
        evaluation = evaluate(run.sampler, run.tokenizer, run.task, run.validation_rows, run.state.step, run.config, progress)
    with run.settling():
        run.state.evaluated = True
        if evaluation is not None:
            metrics, answers = evaluation
            quality = (metrics["eval/best_of_n"], metrics["eval/solved"])
            if quality > tuple(run.state.best):
                run.state.best = quality
                save_best(run, metrics)
            run.log.evaluation(run.state.step, metrics, answers)


def training_step(run: Run) -> None:
    """The algorithm of the head of this file, step by step."""
    config, step, G = run.config, run.state.step + 1, run.config.training.k_best_of_n[1]
    stream = random_stream(config.training.seed, step, "train")
    started = time.perf_counter()
    rows = questions(run.training_rows, step, config)  # 1.
    with run.log.progress("sampling") as progress:
        trajectories = sample_trajectories(run.sampler, run.tokenizer, run.task, rows, G, config, progress)  # 2.
    score(trajectories, run.task, config)  # 3.
    sampled = time.perf_counter()
    groups = [trajectories[i:i + G] for i in range(0, len(trajectories), G)]
    candidates = [trajectory for group in groups for trajectory in compute_advantages(group, config, stream)]  # 4.
    learning_rate = scheduled_learning_rate(step, config)
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = learning_rate

    kept: dict = {}

    def gradient() -> dict:
        with run.log.progress("learning") as progress, enough_memory(f"learning: {learning_advice(candidates, config)}"):
            return policy_gradient(run.policy, candidates, config, run.device, progress, run.reference, kept)  # 5. and 6.

    updates = [gradient()]
    with run.settling():  # between two updates of one batch the weights belong to no step
        while updates[-1]["updated"]:
            run.optimizer.step()
            if len(updates) == config.training.updates_per_batch:  # mu
                break
            updates.append(gradient())
        made = [update for update in updates if update["updated"]] or updates
        learning = {name: None if value is None else fmean(update[name] for update in made) for name, value in made[0].items()}
        learning |= {"updated": sum(update["updated"] for update in updates), "non_finite": updates[-1]["non_finite"]}
        refresh_sampler(run.sampler, run.model)
        seconds = {"sample": sampled - started, "learn": time.perf_counter() - sampled}
        run.log.step(step, {**step_metrics(groups, seconds, run.task, run.device), "learning_rate": learning_rate, **learning})
        run.state.step, run.state.evaluated = step, False
        run.state.bad_steps = run.state.bad_steps + 1 if learning["non_finite"] else 0
    if run.state.bad_steps >= config.training.max_bad_steps:
        raise UserError(f"the gradient was not finite in {run.state.bad_steps} steps in a row, up to step {step}; they were "
                        "skipped and no checkpoint was made of them. Lower training.learning_rate, and start again under another "
                        "run.name")


def train(run: Run) -> None:
    """From where the run stands to its last step. It evaluates before it saves, so that going on from there does not do so
    again."""
    config, state = run.config, run.state
    while True:
        finished = state.step >= config.training.max_steps
        if not state.evaluated and (finished or state.step % config.validation.every == 0):
            evaluation_step(run)
        if RANK == 0 and (finished or state.step % config.checkpoint.every == 0):
            with run.settling():
                save_checkpoint(run)
        if finished:
            break
        training_step(run)


def main(arguments: list[str]) -> int:
    log = lock = None
    code = 0
    try:
        device, store = setup_distributed()
        with together():
            config = load_config(arguments)
            lock = claim_run_folder(config) if RANK == 0 else None
        name = [config.run.name]
        dist.broadcast_object_list(name)
        config.run.name, = name
        log = Logger(config, active=RANK == 0)
        checkpoint = find_checkpoint(config, log.folder)
        if checkpoint:
            _, _, saved = checkpoint
            adopt_settings(saved, config, log)
        config.model.precision = config.model.precision or ("mixed" if device.type == "cuda" else "float32")
        run = prepare(config, device, log)
        if checkpoint:
            load_checkpoint(run, *checkpoint)
        if config.sampling.engine == "auto":
            choose_engine(run)
        log.start(run.model, len(run.training_rows), len(run.validation_rows), WORLD_SIZE, checkpoint)
        with stop_signals(run, store):
            train(run)
        dist.barrier()
        with run.settling():
            log.finish()
    except KeyboardInterrupt:
        print("interrupted before or after training; what was saved is intact", file=sys.stderr)
        code = 130
    except UserError as error:
        # Rank 0 says what is wrong. torchrun ends the others once the first has left, so they wait for rank 0 to be heard;
        # if it has nothing to say, because only this rank has met the error, they say it themselves.
        if RANK != 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
            time.sleep(10)
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except Exception:  # noqa: BLE001, whatever it is, the process has to end through `leave`
        traceback.print_exc()
        code = 1
    if log is not None:
        log.close()
    if lock is not None:
        lock.close()
    return leave(code)


def leave(code: int) -> typing.NoReturn:
    """Ends the process without Python's own clean-up. That would free DDP, and so wait for gloo's threads, while they may be
    waiting for the interpreter lock: a rank that is done would hang for ever. (nccl's would wait for ranks that may never
    come.)"""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
