"""The model that learns, its first pass, and its copies: to sample from, and for the KL penalty."""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    modeling_gguf_pytorch_utils,
)

from machinery.batches import DUMMY_ANSWER
from machinery.disk import beside_main
from machinery.errors import UserError, as_user_error
from machinery.memory import check_optimizer_fits
from machinery.policy import HALF_PRECISION, output_logits, states_before_tokens
from machinery.ranks import DEVICE, RANK
from machinery.settings import ROOT, Config, Section
from machinery.sharding import unsharded


def load_model(config: Config) -> tuple[Any, Any]:
    """Returns the model, on this rank's device, and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, desc: tensors  # This is a bar, too.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # It tells of each attempt.
    name = beside_main(config.model.name)
    check_model_name(name)
    with as_user_error(
            f"model.name={name!r} cannot be loaded with "
            f"model.attention={config.model.attention!r}; give a folder with a model and its "
            "tokenizer, a GGUF file, or a hub id within reach"):
        # With trust_remote_code=None the library would ask, and wait for an answer.
        source = {**where_it_is(name), "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model, loading_info = load_weights(source, config)
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise UserError(f"model.name={name!r} lacks the weights {', '.join(missing[:3])}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name={name!r}: no answer could end without an end-of-text token")
    if name.endswith(".gguf"):
        say_it_was_rounded(name)
        model.name_or_path = name  # The library names the folder.
    if getattr(model, "is_quantized", False):
        raise UserError(f"model.name={name!r} is quantized, and such weights cannot learn here: "
                        "take the model as it was before")
    if config.model.lora_rank or not config.training.shard:
        model.to(DEVICE)  # A sharded model moves there layer by layer.
    # First what no text reaches is frozen, then adapters come, and of these the same is frozen.
    with as_user_error(f"{type(model).__name__} cannot be trained here"):
        unreached = find_unreached(model, config)
    freeze(model, unreached)
    if config.model.lora_rank:
        add_adapters(model, config, unreached)
        with as_user_error(f"{type(model).__name__} cannot be trained with "
                           f"model.lora_targets={config.model.lora_targets}"):
            freeze(model, find_unreached(model, config))  # Not all linear layers are called.
    make_masters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model, tokenizer


def check_model_name(name: str) -> None:
    """Refuses a folder of adapters, which is what LoRA saves. Also refuses what looks like a folder
    and is none, because the library would ask the hub for it."""
    folder = Path(name)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(f"model.name={name!r} holds adapters and no model. docs/running.md shows "
                        "how to merge them into one")
    if os.path.isdir(name) or (os.path.isfile(name) and name.endswith(".gguf")):
        return
    parts = Path(name).parts or (".",)
    looks_like_path = name.startswith((".", "/")) or len(parts) > 2 or os.path.exists(name)
    if looks_like_path or parts[0] == "runs" or (ROOT / parts[0]).is_dir():
        raise UserError(f"model.name={name!r}: there is no such folder, and no hub id is like it")


def where_it_is(name: str) -> dict[str, str]:
    """Returns the arguments of `from_pretrained` that say where a model is."""
    if name.endswith(".gguf"):
        folder, file = os.path.split(os.path.abspath(name))
        return {"pretrained_model_name_or_path": folder, "gguf_file": file}
    return {"pretrained_model_name_or_path": name}


def load_weights(source: dict[str, Any], config: Config) -> tuple[Any, dict[str, Any]]:
    model_config = AutoConfig.from_pretrained(**source)
    for part in (model_config, model_config.get_text_config()):
        for key in vars(part):
            # With noise, what is learned from would not be what was sampled.
            if "dropout" in key or key.endswith(("pdrop", "layerdrop", "jitter_noise")):
                setattr(part, key, 0.0)
    # Without `device_map` each rank of a machine would first hold a whole model in its RAM.
    has_accelerate = transformers.utils.is_accelerate_available()
    to_gpu = DEVICE.type == "cuda" and has_accelerate and not config.training.shard
    # The library can keep the weights of a GGUF file packed in a few bits. These could not learn.
    unpack = transformers.GgufConfig(dequantize=True) if "gguf_file" in source else None
    return AutoModelForCausalLM.from_pretrained(
        **source,
        config=model_config,
        quantization_config=unpack,
        dtype=type_when_loaded(config.model),
        device_map={"": DEVICE} if to_gpu else None,
        attn_implementation=config.model.attention,
        output_loading_info=True,
    )


def type_when_loaded(settings: Section) -> torch.dtype:
    """Returns the type in which weights are loaded."""
    # With LoRA nearly all weights are frozen, and need no float32 masters.
    if settings.precision == "bfloat16" or (settings.precision == "mixed" and settings.lora_rank):
        return HALF_PRECISION
    return torch.float32


def say_it_was_rounded(name: str) -> None:
    if RANK == 0:
        print(f"{name}: its weights were rounded to a few bits each. Training begins at these "
              "values, and all that is saved is unquantized")


def find_unreached(model: Any, config: Config) -> list[str]:
    """Returns the names of parameters that would learn but get no gradient from an answer, like
    those of a tower that reads images, or a router's bias that is balanced in another way."""
    learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
    reached = set()

    def note(parameter: nn.Parameter) -> None:
        reached.add(parameter)
        parameter.grad = None  # All gradients together would take much memory.

    hooks = [value.register_post_accumulate_grad_hook(note) for value in learning.values()]
    own_kinds = kinds_of_attention(model.config)
    if model.device != DEVICE:
        model.set_attn_implementation("eager")  # Others may need the GPU.
    model.train()  # Gemma 3n uses its layer `correction_coefs` in another way in this mode.
    answer = SimpleNamespace(prompt_ids=list(range(8)), completion_ids=list(range(8, 16)))
    # Some kinds of attention want half precision. Beside a whole model in the computer's RAM it
    # would only take memory.
    use_half = config.model.precision == "mixed" and model.device == DEVICE
    with torch.autocast(model.device.type, HALF_PRECISION, enabled=use_half):
        states, _ = states_before_tokens(model, [answer])
        output_logits(model, states).sum().backward()
    if model.device != DEVICE:
        model.set_attn_implementation(own_kinds)
    for hook in hooks:
        hook.remove()
    return [name for name, parameter in learning.items() if parameter not in reached]


def kinds_of_attention(config: Any) -> dict[str, str]:
    """Returns the kind of the whole model, under "", and that of each part, like its tower."""
    kinds = {"": config._attn_implementation}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            kinds[name] = part._attn_implementation
    return kinds


def freeze(model: Any, names: list[str]) -> None:
    """Keeps these parameters as they are, and says so."""
    for name in names:
        model.get_parameter(name).requires_grad = False
    if RANK == 0 and names:
        print(f"{len(names)} parameters of {type(model).__name__}, like {names[0]}, get no "
              "gradient from text, so they stay as they are")


def add_adapters(model: Any, config: Config, unreached: Sequence[str] = ()) -> None:
    """LoRA: a matrix of shape (out, in) gets the product of two thin ones added. Only these
    learn."""
    settings = config.model
    with as_user_error(
            f"model.lora_rank={settings.lora_rank} needs: pip install peft", (ImportError,)):
        import peft  # Nothing else needs it.
    if Path(model.name_or_path).exists():
        # best/ names the model that its adapters belong to, and has to find it from anywhere.
        model.name_or_path = str(Path(model.name_or_path).resolve())
    # When adapters are saved, PEFT looks for the config.json of the model that they belong to. A
    # GGUF file has none. PEFT only asks whether the vocabulary was resized, and it was not.
    warnings.filterwarnings("ignore", message="Could not find a config file")
    check_lora_targets(model, settings.lora_targets or [])
    torch.manual_seed(config.training.seed)  # All ranks start with the same adapters.
    with as_user_error(f"model.lora_targets={settings.lora_targets} does not fit this model"):
        model.add_adapter(peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=settings.lora_targets or "all-linear",
            exclude_modules=[name.removesuffix(".weight") for name in unreached] or None,
            task_type="CAUSAL_LM",
        ))


def make_masters(model: Any, config: Config) -> None:
    """In mixed precision what learns, like adapters, has a float32 master. Frozen matrices are in
    half precision. Frozen vectors stay as loaded: a router's bias may have to be in float32."""
    if config.model.precision != "mixed":
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
        elif parameter.ndim > 1:
            parameter.data = parameter.data.to(HALF_PRECISION)


def check_lora_targets(model: nn.Module, targets: list[str]) -> None:
    layers = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise UserError(f"model.lora_targets: the model has no layer named {target}")


def find_stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """Returns the tokens that end an answer. Chat models have several, and any of them does."""
    stop_ids = {tokenizer.eos_token_id}
    for config in (model.config.get_text_config(), model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, list):
            stop_ids.update(eos)
        elif eos is not None:
            stop_ids.add(eos)
    return sorted(stop_ids)


def frozen_copy(model: Any, type_of: Callable[[nn.Parameter], torch.dtype]) -> Any:
    """Returns a copy that does not learn, on this rank's device.

    `type_of` says which type each parameter has in the copy. A parameter that learns is copied.
    The others are shared if they already have this type. Buffers keep theirs."""
    copies = {}
    for parameter in model.parameters():
        data = parameter.detach().to(DEVICE, type_of(parameter), copy=parameter.requires_grad)
        copies[id(parameter)] = nn.Parameter(data, requires_grad=False)
    return copy.deepcopy(model, copies).to(DEVICE)


def make_sampler(model: Any, config: Config) -> Any:
    """Returns the model that answers are sampled from.

    In mixed precision it is a bfloat16 copy, because autocast would cast every weight for each
    token. Otherwise it shares the weights of the model. Its own generation config is empty: from
    there `generate` would take all that is left open, like the temperature of a chat model."""
    if config.model.precision == "mixed":
        def type_of(parameter: nn.Parameter) -> torch.dtype:
            is_matrix = parameter.ndim > 1
            return HALF_PRECISION if is_matrix or parameter.requires_grad else parameter.dtype

        sampler = frozen_copy(model, type_of)
    elif config.training.shard:
        sampler = frozen_copy(model, lambda parameter: parameter.dtype)
    else:
        sampler = copy.copy(model)
    sampler.generation_config = GenerationConfig()
    return sampler


def make_reference(policy_class: type, model: Any, config: Config) -> Callable:
    """Returns what the KL penalty compares with: a `Policy` of the model as it was loaded, and with
    LoRA without its adapters.

    In mixed precision its linear layers, but for the output, are kept in bfloat16. Autocast would
    cast them to that anyway, so no bit differs."""
    output_layer = model.get_output_embeddings()
    in_half = set()
    if config.model.precision == "mixed":
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and layer is not output_layer:
                in_half.add(id(layer.weight))

    def type_of(parameter: nn.Parameter) -> torch.dtype:
        return HALF_PRECISION if id(parameter) in in_half else parameter.dtype

    as_loaded = frozen_copy(model, type_of)
    if config.model.lora_rank:
        as_loaded.disable_adapters()  # Those of this copy.
    policy = policy_class(as_loaded, config)
    return torch.no_grad()(policy.forward)


@torch.no_grad()
def refresh_sampler(sampler: nn.Module, model: nn.Module) -> None:
    """Gives the sampler the new weights after an update, unless it shares them. Collective if
    weights are sharded."""
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        if copied is not parameter and parameter.requires_grad:
            copied.copy_(unsharded(parameter, copied.dtype))


def warm_up(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes two backward passes and a step that change no weight (the learning rate is 0).

    At the second pass DistributedDataParallel arranges its buckets anew, which changes the last bit
    of sums. A resumed run has to have that behind it, as the interrupted one had. AdamW's optimizer
    state comes into being at its first step."""
    policy.train()
    model = policy.module.model
    check_optimizer_fits(model)
    with as_user_error(f"{type(model).__name__} cannot be trained here"):
        for _ in range(2):
            policy.zero_grad(set_to_none=True)
            token_log_probs, _ = policy([DUMMY_ANSWER])
            token_log_probs.sum().backward()
            check_all_learn(model)
    policy.zero_grad(set_to_none=False)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()


def check_all_learn(model: nn.Module) -> None:
    unused = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            unused.append(name)
    if unused:
        raise UserError(f"model.name: {len(unused)} of its parameters, like {unused[0]}, take no "
                        "part in an answer, so they cannot learn: set model.lora_rank and "
                        "model.lora_targets")
