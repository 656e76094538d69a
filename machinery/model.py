"""The model that learns, its copies (to sample from, and for a KL penalty), and its teacher."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from machinery.errors import UserError, as_user_error
from machinery.passes import HALF_PRECISION, MadeUpAnswer, autocast, body_of, output_logits
from machinery.ranks import DEVICE, RANK
from machinery.settings import Config, ModelSettings, beside_main
from machinery.sharding import unsharded

# ---------------------------------------------------------------- loading

def load_model(config: Config) -> tuple[Any, Any]:
    """Returns the model, on this rank's device, and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # It reports every attempt.
    model, tokenizer = load_folder("model.name", config.model.name, type_when_loaded(config.model),
                                   not config.training.shard, config)
    if config.model.lora_rank or not config.training.shard:
        model.to(DEVICE)  # A sharded model moves there layer by layer.
    # Freeze what no text reaches, then add adapters, and freeze what no text reaches in these.
    with as_user_error(f"{type(model).__name__} cannot be trained here with "
                       f"model.lora_targets={config.model.lora_targets}"):
        unreached = find_unreached(model, config)
        freeze(model, unreached)
        if config.model.lora_rank:
            add_adapters(model, config, unreached)
            freeze(model, find_unreached(model, config))  # Not all linear layers are called.
    make_masters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model, tokenizer


def load_folder(
    key: str, name: str, dtype: torch.dtype, to_device: bool, config: Config
) -> tuple[Any, Any]:
    """Returns a model and its tokenizer, from the folder or hub id that `key` names."""
    name = beside_main(name)
    with as_user_error(
            f"{key}={name!r} cannot be loaded with model.attention={config.model.attention!r}: "
            f"set {key} to a folder with a model and its tokenizer, or to a hub id that can be "
            "reached from here (docs/run.md#which-models-work)"):
        # With trust_remote_code=None the library would ask, and wait for a reply.
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, loading_info = load_weights(name, dtype, to_device, config)
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise UserError(f"{key}={name!r} lacks the weights {', '.join(missing[:3])}: use a "
                        "complete model")
    if getattr(model, "is_quantized", False):
        raise UserError(f"{key}={name!r} is quantized, which is not supported: use the "
                        "unquantized model")
    return model, tokenizer


def load_weights(
    name: str, dtype: torch.dtype, to_device: bool, config: Config
) -> tuple[Any, dict[str, Any]]:
    model_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    for part in (model_config, model_config.get_text_config()):
        for key in vars(part):
            # With noise, we wouldn't learn from what was sampled.
            if "dropout" in key or key.endswith(("pdrop", "layerdrop", "jitter_noise")):
                setattr(part, key, 0.0)
    # Without `device_map`, each rank of a machine would first hold a whole model in RAM.
    has_accelerate = transformers.utils.is_accelerate_available()
    to_gpu = DEVICE.type == "cuda" and has_accelerate and to_device
    return AutoModelForCausalLM.from_pretrained(
        name,
        config=model_config,
        trust_remote_code=False,
        dtype=dtype,
        device_map={"": DEVICE} if to_gpu else None,
        attn_implementation=config.model.attention,
        output_loading_info=True,
    )


def load_teacher(student: Any, tokenizer: Any, config: Config) -> Any | None:
    """Returns the model that `distill` learns from, whole on each rank, or None. It doesn't learn,
    so with `mixed` it's in bfloat16, without float32 masters."""
    name = config.training.teacher
    if name is None:
        return None
    dtype = torch.float32 if config.model.precision == "float32" else HALF_PRECISION
    teacher, its_tokenizer = load_folder("training.teacher", name, dtype, True, config)
    check_tokens(teacher, its_tokenizer, student, tokenizer, name)
    return teacher.requires_grad_(False).eval().to(DEVICE)


def check_tokens(
    teacher: Any, its_tokenizer: Any, student: Any, tokenizer: Any, name: str
) -> None:
    """Refuses a teacher for which one of the student's tokens means something else. Its matrices
    may have more rows than the student's, as those of larger models often do: no token uses them.
    """
    # It may have more tokens than the student: no answer contains them.
    different = tokenizer.get_vocab().items() - its_tokenizer.get_vocab().items()
    if different:
        raise UserError(f"training.teacher={name!r} and model.name have different tokens, such as "
                        f"{min(different)[0]!r}: use a teacher that has the model's own tokenizer")
    stop_ids = find_stop_ids(student, tokenizer)
    its_stop_ids = find_stop_ids(teacher, its_tokenizer)
    if its_stop_ids != stop_ids:
        raise UserError(f"training.teacher={name!r} ends its answers with the tokens "
                        f"{its_stop_ids}, but model.name ends them with {stop_ids}: use a teacher "
                        "with the same stop tokens")
    num_rows = student.config.get_text_config().vocab_size
    its_num_rows = teacher.config.get_text_config().vocab_size
    if its_num_rows < num_rows:
        raise UserError(f"training.teacher={name!r} knows {its_num_rows} tokens, but model.name "
                        f"can generate {num_rows}: use a teacher that knows at least as many")


def find_unreached(model: Any, config: Config) -> list[str]:
    """Returns the names of parameters that would learn but get no gradient from an answer, such as
    a tower that reads images, or a router's bias that is balanced in a different way."""
    learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
    reached = set()

    def note(parameter: nn.Parameter) -> None:
        reached.add(parameter)
        parameter.grad = None  # All gradients together would take a lot of memory.

    hooks = [value.register_post_accumulate_grad_hook(note) for value in learning.values()]
    with as_in_training(model, config):
        ids = torch.arange(16, device=model.device)[None]
        states = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        output_logits(model, states).sum().backward()
    for hook in hooks:
        hook.remove()
    return [name for name, parameter in learning.items() if parameter not in reached]


@contextmanager
def as_in_training(model: Any, config: Config) -> Iterator[None]:
    """Within it, the model computes as it will in training, if it's on this rank's device. One that
    will be sharded is still in RAM, where attention kernels may not work."""
    model.train()  # In this mode Gemma 3n uses its layer `correction_coefs` differently.
    if model.device == DEVICE:
        with autocast(config):
            yield
        return
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)


def freeze(model: Any, names: list[str]) -> None:
    """Keeps these parameters fixed, and says so."""
    for name in names:
        model.get_parameter(name).requires_grad = False
    if RANK == 0 and names:
        print(f"{len(names)} parameters of {type(model).__name__}, such as {names[0]}, get no "
              "gradient from text, so they are not trained")


def find_stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer. Chat models have several, any of which will do."""
    stop_ids = {tokenizer.eos_token_id}
    for config in (model.config.get_text_config(), model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, list):
            stop_ids.update(eos)
        elif eos is not None:
            stop_ids.add(eos)
    stop_ids.discard(None)
    if not stop_ids:
        raise UserError(f"the model {model.name_or_path!r} has no token that ends an answer: set "
                        "eos_token_id in its generation_config.json")
    return sorted(stop_ids)


# ---------------------------------------------------------------- LoRA

def add_adapters(model: Any, config: Config, unreached: Sequence[str] = ()) -> None:
    """LoRA: the product of two thin matrices is added to each matrix of shape (out, in). Only the
    thin ones learn."""
    settings = config.model
    with as_user_error(
            f"model.lora_rank={settings.lora_rank} needs peft: run pip install peft",
            (ImportError,)):
        import peft  # Nothing else needs it.
    if Path(model.name_or_path).exists():
        # best/ names the model that its adapters belong to, which must be found from anywhere.
        model.name_or_path = str(Path(model.name_or_path).resolve())
    # For experts that share a tensor, peft knows names that no layer has any more.
    has_experts = any(".experts" in name for name, _ in model.named_parameters())
    layers = [name for name, _ in model.named_modules()]
    for target in settings.lora_targets or []:
        # This is how peft compares them.
        is_known = any(f".{name}".endswith(f".{target}") for name in layers)
        if not is_known and not has_experts:
            names = sorted({name.rpartition(".")[2] for name, layer in model.named_modules()
                            if isinstance(layer, nn.Linear)})
            raise UserError(f"model.lora_targets={settings.lora_targets}: no layer is called "
                            f"{target}. Choose from the linear layers: {', '.join(names)}")
    torch.manual_seed(config.training.seed)  # All ranks start with the same adapters.
    model.add_adapter(peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=settings.lora_targets or "all-linear",
        exclude_modules=[name.removesuffix(".weight") for name in unreached] or None,
        task_type="CAUSAL_LM",
    ))


# ---------------------------------------------------------------- precision
# `mixed` keeps float32 masters of everything that learns, and `Policy` computes under autocast, in
# bfloat16. Whatever doesn't learn is itself in bfloat16, because autocast would cast it each time:
# the frozen matrices next to adapters, the sampler, and the linear layers of the reference. Frozen
# vectors stay as loaded, because a router's bias may have to be in float32.

def type_when_loaded(settings: ModelSettings) -> torch.dtype:
    # With LoRA nearly all weights are frozen, so they need no float32 masters.
    if settings.precision == "bfloat16" or (settings.precision == "mixed" and settings.lora_rank):
        return HALF_PRECISION
    return torch.float32


def make_masters(model: Any, config: Config) -> None:
    if config.model.precision != "mixed":
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
        elif parameter.ndim > 1:
            parameter.data = parameter.data.to(HALF_PRECISION)


def type_in_sampler(parameter: nn.Parameter) -> torch.dtype:
    is_matrix = parameter.ndim > 1
    return HALF_PRECISION if is_matrix or parameter.requires_grad else parameter.dtype


# ---------------------------------------------------------------- copies of the model

def make_sampler(model: Any, config: Config) -> Any:
    """Returns the model that answers are sampled from.

    In mixed precision it's a copy in bfloat16, and if the model is sharded, it's a whole copy on
    each rank. Otherwise it shares the model's weights. Its own generation config is empty, because
    `generate` would take from there everything left open, like a chat model's temperature."""
    if config.model.precision == "mixed":
        sampler = frozen_copy(model, type_in_sampler)
    elif config.training.shard:
        sampler = frozen_copy(model, lambda parameter: parameter.dtype)
    else:
        sampler = copy.copy(model)
    sampler.generation_config = GenerationConfig()
    return sampler


@torch.no_grad()
def refresh_sampler(sampler: nn.Module, model: nn.Module) -> None:
    """Gives the sampler the new weights after an update, unless it shares them. Collective if
    weights are sharded."""
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        if copied is not parameter and parameter.requires_grad:
            copied.copy_(unsharded(parameter, copied.dtype))


def make_reference(model: Any, config: Config) -> Any:
    """Returns the model that a KL penalty compares with: the model as it was loaded, without any
    adapters. So it's made before a checkpoint is restored."""
    in_half = set()
    if config.model.precision == "mixed":
        # Autocast computes with these values in bfloat16 anyway, so no bit differs. The output
        # layer's matrix may also be the embeddings, whose rows aren't rounded.
        linear = {layer for layer in model.modules() if isinstance(layer, nn.Linear)}
        in_half = {layer.weight for layer in linear - {model.get_output_embeddings()}}

    def type_of(parameter: nn.Parameter) -> torch.dtype:
        return HALF_PRECISION if parameter in in_half else parameter.dtype

    reference = frozen_copy(model, type_of)
    if config.model.lora_rank:
        reference.disable_adapters()  # only in this copy
    return reference


def frozen_copy(model: Any, type_of: Callable[[nn.Parameter], torch.dtype]) -> Any:
    """Returns a copy that doesn't learn, on this rank's device. `type_of` says which type each
    parameter gets there. Frozen ones are shared if they have it already."""
    copies = {}  # {id of a parameter: what `deepcopy` puts in its place}
    for parameter in model.parameters():
        data = parameter.detach().to(DEVICE, type_of(parameter), copy=parameter.requires_grad)
        copies[id(parameter)] = nn.Parameter(data, requires_grad=False)
    return copy.deepcopy(model, copies).to(DEVICE)


# ---------------------------------------------------------------- the first pass

def warm_up(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes two backward passes and a step that change no weight (the learning rate is 0), and
    aren't counted.

    At the second pass DistributedDataParallel rearranges its buckets, which changes the last bit of
    sums. A resumed run must have this behind it, as the interrupted one had. And AdamW creates its
    state at its first step: all zeros, which a checkpoint can fill."""
    policy.train()
    with as_user_error(f"{type(policy.module.model).__name__} cannot be trained here"):
        for _ in range(2):
            policy.zero_grad(set_to_none=True)
            token_log_probs, _ = policy([MadeUpAnswer()])
            token_log_probs.sum().backward()
    policy.zero_grad(set_to_none=False)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()
