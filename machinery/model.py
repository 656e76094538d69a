"""The model that learns, its first pass, and its copies: to sample from, to measure the KL from."""

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from machinery.disk import beside_main
from machinery.errors import UserError, blame
from machinery.policy import HALF, NOTHING
from machinery.ranks import DEVICE
from machinery.settings import ROOT, Config
from machinery.sharding import whole


def load_model(config: Config):
    """The model, on this rank's device, and its tokenizer."""
    transformers.utils.logging.disable_progress_bar()  # of each file that is read or written
    name = beside_main(config.model.name)
    first, *more = Path(name).parts or "."
    if not os.path.isdir(name) and (name[0] in "./" or len(more) > 1 or os.path.exists(name)
                                    or first == "runs" or (ROOT / first).is_dir()):
        raise UserError(f"model.name={name!r}: there is no such folder, and no hub id is like it")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # of each attempt to reach it
    dtype = torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32
    attention = config.model.attention
    with blame(f"model.name={name!r} cannot be loaded with model.attention={attention!r}; give a "
               "folder with a model and its tokenizer, or a hub id within reach"):
        # trust_remote_code: or the library would ask whether to run a model's own code, and wait.
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model_config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        for key in vars(model_config):  # or what is learned from would not be what was sampled
            if "dropout" in key or key.endswith("pdrop"):
                setattr(model_config, key, 0.0)
        # Straight to the GPU, if the library can (with accelerate): else each rank of a machine
        # would first hold a whole model in its memory.
        straight = (DEVICE.type == "cuda" and transformers.utils.is_accelerate_available()
                    and not config.training.shard)
        model, loading = AutoModelForCausalLM.from_pretrained(
            name, config=model_config, dtype=dtype, output_loading_info=True,
            device_map={"": DEVICE} if straight else None, attn_implementation=attention,
            trust_remote_code=False)
    if missing := sorted(loading["missing_keys"])[:3]:
        raise UserError(f"model.name={name!r} lacks the weights {', '.join(missing)}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.name={name!r}: no answer could end without an end-of-text token")
    if config.model.lora_rank:
        add_adapters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    if config.model.lora_rank or not config.training.shard:  # else `shard` does, layer by layer
        model.to(DEVICE)
    return model, tokenizer


def add_adapters(model, config: Config) -> None:
    """LoRA: to matrices, (out, in), is added the product of two thin ones, which alone learn."""
    settings = config.model
    with blame(f"model.lora_rank={settings.lora_rank} needs: pip install peft", (ImportError,)):
        import peft  # here, because only this needs it
    if Path(model.name_or_path).exists():  # for best/, which points there, to load from anywhere
        model.name_or_path = str(Path(model.name_or_path).resolve())
    layers = [f".{name}" for name, _ in model.named_modules()]
    if unknown := [target for target in settings.lora_targets or []
                   if not any(layer.endswith(f".{target}") for layer in layers)]:
        raise UserError(f"model.lora_targets: the model has no layers named {', '.join(unknown)}")
    torch.manual_seed(config.training.seed)  # the same adapters on all ranks
    with blame(f"model.lora_targets={settings.lora_targets}: not all are linear layers of "
               f"{settings.name!r}"):
        model.add_adapter(peft.LoraConfig(
            r=settings.lora_rank, lora_alpha=settings.lora_alpha, task_type="CAUSAL_LM",
            target_modules=settings.lora_targets or "all-linear"))
    if settings.precision == "mixed":
        for parameter in model.parameters():  # what does not learn needs no float32 master
            dtype = torch.float32 if parameter.requires_grad else HALF
            parameter.data = parameter.data.to(dtype)


def frozen_copy(model, convert: Callable):
    """A copy that does not learn, on this rank's device. Each parameter is of the type that
    `convert` returns for the model's; one that learns is copied, the others shared, if they are of
    that type. Buffers, like rotary frequencies, keep theirs."""
    return copy.deepcopy(model, {
        id(parameter): nn.Parameter(parameter.detach().to(
            DEVICE, convert(parameter), copy=parameter.requires_grad), requires_grad=False)
        for parameter in model.parameters()}).to(DEVICE)


def make_sampler(model, tokenizer, config: Config):
    """What answers are drawn from: in mixed precision a bfloat16 copy, since autocast would cast
    every weight for each token, else a twin that shares the model's weights. Its settings are its
    own: `generate` fills what is left open from the model's, whose temperature would be another."""
    sampler, mixed = copy.copy(model), config.model.precision == "mixed"
    if mixed or config.training.shard:
        sampler = frozen_copy(model, lambda each: HALF if mixed else each.dtype)
    stop_ids = {tokenizer.eos_token_id}  # chat models have several: any of them ends an answer
    for eos in (model.config.eos_token_id, model.generation_config.eos_token_id):
        stop_ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    sampler.generation_config = GenerationConfig(
        do_sample=True, temperature=config.sampling.temperature, top_p=config.sampling.top_p,
        top_k=config.sampling.top_k, eos_token_id=sorted(stop_ids), pad_token_id=min(stop_ids))
    return sampler


def make_reference(policy_class: type, model, config: Config) -> Callable:
    """What the KL term measures from: a `Policy` of the model as it was loaded, with LoRA without
    its adapters. In mixed precision linear layers, but for the output, are kept in bfloat16, as
    autocast would cast them anyway: until something is learned no bit differs."""
    output = model.get_output_embeddings()
    low = {id(layer.weight) for layer in model.modules() if config.model.precision == "mixed"
           and isinstance(layer, nn.Linear) and layer is not output}
    as_loaded = frozen_copy(model, lambda each: HALF if id(each) in low else each.dtype)
    if config.model.lora_rank:
        as_loaded.disable_adapters()  # of this copy, which shares all other weights
    return torch.no_grad()(policy_class(as_loaded, config).forward)


@torch.no_grad()
def refresh_sampler(sampler, model) -> None:
    """After an update. (A sampler that shares the model's weights has them already.)"""
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        if copied is not parameter and parameter.requires_grad:
            copied.copy_(whole(parameter, copied.dtype))


def warm_up(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two backward passes and one step of nothing. With the second forward pass DDP cuts its
    buckets anew: that changes the last bit of sums, and takes the memory of all gradients once
    more as long as the old ones are held. AdamW's moments come into being at its first step."""
    policy.train()
    with blame("the model cannot learn: see model.attention"):
        for _ in range(2):
            policy.zero_grad(set_to_none=True)
            logprobs, _ = policy([NOTHING])
            logprobs.sum().backward()
            if unused := [name for name, parameter in policy.module.model.named_parameters()
                          if parameter.requires_grad and parameter.grad is None]:
                raise UserError(f"model.name: {len(unused)} of its parameters, like {unused[0]}, "
                                "take no part in an answer, so they cannot learn: take a model of "
                                "text alone, or set model.lora_rank and model.lora_targets")
    policy.zero_grad(set_to_none=False)
    optimizer.step()
    for moments in optimizer.state.values():
        moments["step"].zero_()
