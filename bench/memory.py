"""Forecasts what a rank needs, from the settings alone.

    .venv/bin/python bench/memory.py --config my.yaml
        the model's configuration has to be within reach
    .venv/bin/python bench/memory.py --shape qwen2.5-3b training.num_samples_per_step=32 \\
        'training.k_best_of_n=[16,16]'
    .venv/bin/python bench/memory.py --measure --shape small --prompt 48 sampling.max_rows=64
        and a step of it, to compare

Weights, gradients and AdamW's moments are counted by their types. Activations are what the backward
pass of one and of two layers keeps for a few rows, weighed on the CPU and scaled up. Not in it: the
1 GB or so of a process with its libraries, and what an allocator holds back."""

import argparse
import json
import os
from pathlib import Path

from harness import (
    SHAPES,
    finish,
    main,
    make_run,
    never_stop,
    random,
    say,
    torch,
    transformers,
)

from machinery.model import add_adapters
from machinery.policy import LOGITS_PER_CHUNK, ROOM
from machinery.settings import beside_main, load_config


def activations_per_token(config, model_config, prompt: int) -> tuple[float, float]:
    """Bytes that the backward pass needs for a token of a row: of all that is not a layer, and of
    one layer."""
    kept, L, precision = [], config.training.max_new_gen_tokens, config.model.precision
    for layers in (1, 2):
        small = type(model_config).from_dict({
            **model_config.to_dict(), "num_hidden_layers": layers, "vocab_size": 64,
            "layer_types": None, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0})
        model = transformers.AutoModelForCausalLM.from_config(
            small, dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages = {}

        def pack(tensor, storages=storages, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                # kept, so that no other takes its address
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        rows = [main.Trajectory({}, [random.randrange(64) for _ in range(prompt)],
                                [random.randrange(64) for _ in range(L)], "", True)
                for _ in range(2)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            main.Policy(model, config)(rows)
        # In mixed precision the weights' casts are kept too, once; they are counted as such.
        casts = (sum(parameter.numel() * 2 for parameter in model.parameters())
                 if precision == "mixed" else 0)
        kept.append((sum(size for size, _ in storages.values()) - casts) / (2 * (prompt + L)))
    layer = kept[1] - kept[0]
    return kept[0] - layer, layer


def forecast(config, model_config, prompt: int) -> dict[str, dict[str, float]]:
    """GB a rank, by phase and by what they are for."""
    training, precision = config.training, config.model.precision
    L, rows = training.max_new_gen_tokens, training.num_samples_per_step * training.k_best_of_n[1]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
        if config.model.lora_rank:
            add_adapters(model, config)
    weights, head = (sum(parameter.numel() for parameter in model.parameters()),
                     model.get_output_embeddings().weight.numel())
    learning_weights = sum(parameter.numel() for parameter in model.parameters()
                           if parameter.requires_grad)
    width = {"float32": 4, "mixed": 4, "bfloat16": 2}[precision]
    compute = 4 if precision == "float32" else 2
    # with LoRA; in mixed precision they lie in bfloat16, and the sampling copy shares them
    frozen = weights - learning_weights
    always = {"weights": learning_weights * width + frozen * compute,
              "gradients": learning_weights * width,
              "AdamW's moments": 2 * learning_weights * width,
              "sampling copy": 2 * learning_weights if precision == "mixed" else 0,
              "reference model": (weights * compute
                                  if training.kl_beta and not config.model.lora_rank else 0)}

    at_once = min(rows, config.sampling.max_rows)
    head_width = (getattr(model_config, "head_dim", None)
                  or model_config.hidden_size // model_config.num_attention_heads)
    layers, vocabulary = model_config.num_hidden_layers, model_config.vocab_size
    layer_cache = (2 * model_config.num_key_value_heads * head_width * compute * at_once
                   * (prompt + L + ROOM))
    sampling = {"keys and values": layer_cache * layers, "a layer's, while rows leave": layer_cache,
                "logits": at_once * vocabulary * (compute + 3 * 4)}

    rest, layer = activations_per_token(config, model_config, prompt)
    tokens = max(prompt + L, min(training.tokens_per_micro_batch, rows * (prompt + L)))
    kept = rest + layers * layer
    # a layer keeps its input alone, and one at a time is computed again
    if config.model.gradient_checkpointing:
        kept = rest + layers * model_config.hidden_size * compute + layer
    chunk = min(LOGITS_PER_CHUNK, tokens * vocabulary)
    learning = {"activations": kept * tokens,
                "logits, a chunk": chunk * (5 * 4 + (2 if compute == 2 else 0)),
                "gradients of the projection": 0 if config.model.lora_rank else 2 * head * width,
                "weights cast to bfloat16": 2 * learning_weights if precision == "mixed" else 0}
    return {phase: {name: size / 1e9 for name, size in parts.items() if size}
            for phase, parts in (("always", always), ("while sampling", sampling),
                                 ("while learning", learning))}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--shape", choices=SHAPES, help="instead of the model that the settings name")
parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
parser.add_argument("--measure", action="store_true",
                    help="also run a step, all of whose answers run to the limit")
parser.add_argument("--config", action="append", default=[])
parser.add_argument("keys", nargs="*", help="section.key=value")
options = parser.parse_intermixed_args()
arguments = [*(part for path in options.config for part in ("--config", path)), *options.keys]
settings = load_config(arguments)
shape = (transformers.Qwen2Config(**SHAPES[options.shape]) if options.shape else
         transformers.AutoConfig.from_pretrained(
             beside_main(settings.model.name)).get_text_config())
table = forecast(settings, shape, options.prompt)
for phase, parts in table.items():
    say(f"{phase}: {sum(parts.values()):.2f} GB")
    for name, size in parts.items():
        say(f"    {name:<32} {size:8.2f} GB")
total = {phase: sum(table["always"].values()) + sum(table[f"while {phase}"].values())
         for phase in ("sampling", "learning")}
say(f"peak: {max(total.values()):.2f} GB, while {max(total, key=total.get)}")
result = {"forecast_gb": {phase: round(size, 3) for phase, size in total.items()},
          "parts_gb": table}
if options.measure:
    before = (0.0 if torch.cuda.is_available()
              else int(Path("/proc/self/statm").read_text().split()[1])
              * os.sysconf("SC_PAGE_SIZE") / 1e9)
    run = make_run(arguments, options.shape)
    never_stop(run)
    from step import measure
    # later steps would show what the first has left on the heap
    measured = measure(run, steps=1, warm_up=0)
    result["measured_gb"] = {phase: round(measured[f"{key}_memory_gb"] - before, 3)
                             for phase, key in (("sampling", "sample"), ("learning", "learn"))}
    say(f"measured: {json.dumps(result['measured_gb'])} "
        f"(forecast {json.dumps(result['forecast_gb'])})")
    finish(result)
say(json.dumps(result))
