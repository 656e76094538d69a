"""Estimates the memory that a rank needs, from the settings alone.

    .venv/bin/python bench/memory.py --config my.yaml
    .venv/bin/python bench/memory.py --shape qwen2.5-3b training.num_samples_per_step=32 \\
        'training.k_best_of_n=[16,16]'
    .venv/bin/python bench/memory.py --measure --shape small --prompt 48 sampling.max_rows=64

The first needs the model's configuration, on this computer or from the hub. The last also runs a
step and measures it.

*Allocated* memory is what tensors hold. Weights, gradients and AdamW's moments are counted by their
types. Activations are counted on the CPU for small cases and scaled up.

*Reserved* memory is what a GPU's allocator takes for them. Nobody has measured this rule on a GPU
yet. A tensor that grows is copied behind its smaller self, which leaves a hole. So the largest
tensor that comes and goes in a phase counts twice. Sharded weights are gathered on a stream of
their own, whose memory serves no other stream. Libraries and CUDA take about 1 GB more."""

import argparse
import contextlib
import json

import harness
from harness import DEVICE, LiveBytes, main, say, torch, transformers

from machinery.batches import MOST_TOKENS
from machinery.disk import beside_main
from machinery.model import add_adapters, make_masters, where_it_is
from machinery.policy import ANSWERS_PER_PASS, LOGITS_PER_CHUNK
from machinery.prompts import CACHE_ROOM
from machinery.settings import load_config

WEIGHT_BYTES = {"float32": 4, "mixed": 4, "bfloat16": 2}   # of a weight that learns
COMPUTE_BYTES = {"float32": 4, "mixed": 2, "bfloat16": 2}  # of a number that is computed
MOVING = "KV cache of a layer, copied"


# ---------------------------------------------------------------- activations

class Shapes(LiveBytes):
    """Counts bytes without products of matrices, because nothing here needs their values."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.addmm.default):
            left, right = arguments[-2:]
            product = left.new_empty(left.shape[0], right.shape[1])
            self.see(product.untyped_storage())
            return product
        return super().__torch_dispatch__(function, types, arguments, named)


def small_model(config, model_config, layers: int):
    """Returns the model with so many layers and a small vocabulary."""
    settings = model_config.to_dict() | {
        "num_hidden_layers": layers, "vocab_size": 64, "layer_types": None, "eos_token_id": 0,
        "pad_token_id": 0, "bos_token_id": 0}
    dtype = torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(
        type(model_config).from_dict(settings), dtype=dtype)
    if config.model.lora_rank:
        add_adapters(model, config)
    make_masters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def kept_and_more(config, model_config, prompt: int, layers: int, rows: int) -> tuple[int, int]:
    """Returns the bytes that so many answers to one question keep for the backward pass, and what
    that pass needs besides at its peak."""
    question = main.Question({}, [1] * prompt)
    completion = [2] * config.training.max_new_gen_tokens
    batch = [main.Trajectory(question, completion, "", True) for _ in range(rows)]
    with Shapes() as live:
        model = small_model(config, model_config, layers)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # as in DDP's buckets
        before = live.now
        log_probs, _ = main.Policy(model, config, one_pass=config.training.shard)(batch)
        kept = live.now - before
        live.peak = live.now
        log_probs.sum().backward()
        more = live.peak - before - kept
    if config.model.precision == "mixed" and not config.model.gradient_checkpointing:
        kept -= 2 * learning_weights(model)  # `learning_parts` counts these weights in bfloat16.
    return kept, more


def activations(config, model_config, prompt: int, rows: int) -> tuple[float, float]:
    """Returns the bytes that a micro-batch of so many rows keeps for the backward pass, and what
    that pass needs besides for one layer."""
    kept = {}
    more = {}
    # With one answer the peak of the backward pass would be elsewhere.
    for layers in (1, 2):
        for answers in (2, 4):
            kept[layers, answers], more[layers, answers] = kept_and_more(
                config, model_config, prompt, layers, answers)
    of_a_row = []
    of_a_question = []
    for layers in (1, 2):
        row = (kept[layers, 4] - kept[layers, 2]) / 2
        of_a_row.append(row)
        of_a_question.append(kept[layers, 2] - 2 * row)

    def with_all_layers(one: float, two: float) -> float:
        return one + (model_config.num_hidden_layers - 1) * (two - one)

    questions = min(rows, config.training.num_samples_per_step)
    rows_in_a_pass = rows if config.training.shard else min(rows, ANSWERS_PER_PASS)
    return (rows * with_all_layers(*of_a_row) + questions * with_all_layers(*of_a_question),
            rows_in_a_pass * max(0, more[2, 4] - more[2, 2]) / 2)


# ---------------------------------------------------------------- by phase

def learning_weights(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def gathered(config, model_config, model) -> tuple[float, float, float]:
    """Returns the bytes of sharded weights that are gathered: of the output projection, of the
    embeddings unless they are the same, and of a layer."""
    if not config.training.shard or config.model.lora_rank:  # Adapters are small.
        return 0, 0, 0
    projection = model.get_output_embeddings().weight.numel()
    embeddings = model.get_input_embeddings().weight.numel()
    if model_config.tie_word_embeddings:
        embeddings = 0
    layers = learning_weights(model) - projection - embeddings
    width = WEIGHT_BYTES[config.model.precision]
    return projection * width, embeddings * width, layers * width / model_config.num_hidden_layers


def learning_parts(config, model_config, model, prompt: int) -> tuple[dict[str, float], float]:
    """Returns what is allocated at the highest of five moments, and how much more is reserved."""
    training = config.training
    is_mixed = config.model.precision == "mixed"
    max_tokens = training.tokens_per_micro_batch or MOST_TOKENS
    rows = min(max(1, max_tokens // (prompt + training.max_new_gen_tokens)),
               training.num_samples_per_step * training.k_best_of_n[0])
    kept, at_a_layer = activations(config, model_config, prompt, rows)
    logits = rows * training.max_new_gen_tokens * model_config.vocab_size
    has_chunks = logits > LOGITS_PER_CHUNK
    # Three tensors in float32: the logits, over the temperature, and their log softmax.
    chunk = 3 * 4 * min(LOGITS_PER_CHUNK, logits)
    gradient = model.get_output_embeddings().weight.numel() * WEIGHT_BYTES[config.model.precision]
    if config.model.lora_rank:
        gradient = 0
    # Autocast keeps weights in bfloat16 for its forward pass. Without checkpointing the graph holds
    # them longer. Sharded weights are cast anew.
    casts = 2 * learning_weights(model) if is_mixed else 0
    held = 0 if config.model.gradient_checkpointing else casts
    # The gradient of a chunk, and its sum with those so far.
    of_a_chunk = 2 * gradient * has_chunks
    if training.shard:
        casts = max(held, gradient / 2 if is_mixed else 0)
    if training.shard and is_mixed:
        of_a_chunk = 1.5 * gradient * has_chunks
    projection, embeddings, layer = gathered(config, model_config, model)
    always = {"activations": kept, "projection, gathered": projection}
    # Of each moment, what is allocated, and the largest tensor that comes and goes.
    moments = [
        ({**always, "chunk of logits": chunk, "weights in bfloat16": casts}, chunk / 3),
        ({**always, "chunk of logits": chunk, "weights in bfloat16": held,
          "gradient of the projection": gradient * has_chunks}, chunk / 3),
        ({**always, "weights in bfloat16": held, "layer, gathered": layer,
          "gradient of the projection": gradient, "gradient of a chunk": of_a_chunk},
         gradient * has_chunks),
        # Of a sharded layer: its weights, those of the next one as they come and as they are laid
        # out, and its gradients as they are and as they are sent.
        ({**always, "layer, in the backward pass": at_a_layer + 5 * layer,
          "weights in bfloat16": held, "gradient of the projection": gradient}, 0),
        # At the end no activations are left. Sharded gradients are sent.
        ({"projection, gathered": projection, "gradient of the projection": projection,
          "gradient of the embeddings": 2 * embeddings or projection}, 0),
    ]
    highest, _ = max(moments, key=lambda moment: sum(moment[0].values()))
    reserved = max(sum(parts.values()) + moving for parts, moving in moments)
    return highest, reserved - sum(highest.values())


def sampling_parts(config, model_config, prompt: int, num_answers: int) -> dict[str, float]:
    rows = min(num_answers, config.sampling.max_rows)
    head_width = (getattr(model_config, "head_dim", None)
                  or model_config.hidden_size // model_config.num_attention_heads)
    time = prompt + config.training.max_new_gen_tokens + CACHE_ROOM
    width = COMPUTE_BYTES[config.model.precision]
    layer = 2 * model_config.num_key_value_heads * head_width * width * rows * time
    # While rows leave, a layer's keys are done when its values are copied. Softmax is in float32.
    return {"KV cache": layer * model_config.num_hidden_layers, MOVING: 0.75 * layer,
            "logits": rows * model_config.vocab_size * (width + 3 * 4)}


def reference_bytes(config, model) -> int:
    """With LoRA the reference model is the model without its adapters, and needs no memory. In
    mixed precision its linear layers but the output are in bfloat16."""
    if not config.training.kl_beta or config.model.lora_rank:
        return 0
    size = sum(map(torch.numel, model.parameters())) * WEIGHT_BYTES[config.model.precision]
    if config.model.precision == "mixed":
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings():
                size -= 2 * layer.weight.numel()
    return size


def estimate(config, model_config, prompt: int, ranks: int = 1) -> dict[str, dict[str, float]]:
    """Returns GB a rank, by phase and by what they are for."""
    training = config.training
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
        if config.model.lora_rank:
            add_adapters(model, config)
        make_masters(model, config)
    learning = learning_weights(model)
    frozen = sum(map(torch.numel, model.parameters())) - learning
    width = WEIGHT_BYTES[config.model.precision]
    compute = COMPUTE_BYTES[config.model.precision]
    own = learning * width / (ranks if training.shard else 1)
    has_copy = config.model.precision == "mixed" or training.shard
    always = {"weights": own + frozen * compute, "gradients": own, "AdamW's moments": 2 * own,
              "sampling copy": compute * learning if has_copy else 0,
              "reference model": reference_bytes(config, model)}
    num_sampled = training.num_samples_per_step * training.k_best_of_n[1]
    num_evaluated = -(-config.data.num_validation // ranks) * config.validation.best_of_n
    learning_peak, moving = learning_parts(config, model_config, model, prompt)
    phases = {"always": always,
              "while sampling": sampling_parts(config, model_config, prompt, num_sampled),
              "while evaluating": sampling_parts(config, model_config, prompt, num_evaluated),
              "while learning": learning_peak,
              "reserved besides": {
                  "where weights are gathered": sum(gathered(config, model_config, model)[:2]),
                  "while learning, what comes and goes": moving}}
    return {phase: {name: size / 1e9 for name, size in parts.items() if size}
            for phase, parts in phases.items()}


def peaks(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns GB allocated and reserved, by phase."""
    besides = table["reserved besides"]
    result = {"allocated": {}, "reserved": {}}
    for phase in ("sampling", "evaluating", "learning"):
        parts = table[f"while {phase}"]
        moving = parts.get(MOVING, besides.get("while learning, what comes and goes", 0))
        allocated = sum(table["always"].values()) + sum(parts.values())
        reserved = allocated + besides.get("where weights are gathered", 0) + moving
        result["allocated"][phase] = round(allocated, 4)
        result["reserved"][phase] = round(reserved, 4)
    return result


def measured_step(arguments: list[str], shape: str | None) -> dict[str, float]:
    """Returns what bench/step.py finds of one step, in which all answers reach the length limit."""
    from step import measure
    with LiveBytes() if DEVICE.type == "cpu" else contextlib.nullcontext():
        run = harness.make_run(arguments, shape)
        harness.never_stop(run)
        return measure(run, steps=1, warm_up=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=harness.SHAPES,
                        help="instead of the model that the settings name")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--ranks", type=int, default=1, help="that share an evaluation, or weights")
    parser.add_argument("--measure", action="store_true", help="also run a step and measure it")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("keys", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args()
    arguments = list(options.keys)
    for path in options.config:
        arguments += ["--config", path]
    settings = load_config(arguments)
    if options.measure and settings.training.shard and DEVICE.type == "cpu":
        parser.error("sharded weights cannot be counted on a CPU")
    if options.shape:
        model_config = transformers.Qwen2Config(**harness.SHAPES[options.shape])
    else:
        name = beside_main(settings.model.name)
        model_config = transformers.AutoConfig.from_pretrained(**where_it_is(name))
        model_config = model_config.get_text_config()
    table = estimate(settings, model_config, options.prompt, options.ranks)
    for phase, parts in table.items():
        say(f"{phase}: {sum(parts.values()):.2f} GB")
        for name, size in parts.items():
            say(f"    {name:<46} {size:8.2f} GB")
    total = peaks(table)
    for kind, phases in total.items():
        say(f"{kind}, peak: {max(phases.values()):.2f} GB, while {max(phases, key=phases.get)}")
    result = {"estimate_gb": total["allocated"], "estimate_reserved_gb": total["reserved"],
              "parts_gb": table}
    if options.measure:
        measured = measured_step(arguments, options.shape)
        result["measured"] = measured
        result["measured_gb"] = {"sampling": round(measured["sample_memory_gb"], 4),
                                 "learning": round(measured["learn_memory_gb"], 4)}
        say(f"measured: {result['measured_gb']}, estimated: {result['estimate_gb']}")
        harness.finish(result)
    say(json.dumps(result))
