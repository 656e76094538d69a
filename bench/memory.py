"""Forecasts what a rank needs, from the settings alone.

    .venv/bin/python bench/memory.py --config my.yaml
        the model's configuration has to be within reach
    .venv/bin/python bench/memory.py --shape qwen2.5-3b training.num_samples_per_step=32 \\
        'training.k_best_of_n=[16,16]'
    .venv/bin/python bench/memory.py --measure --shape small --prompt 48 sampling.max_rows=64
        and a step of it, to compare

*Allocated* is what tensors hold. Weights, gradients and AdamW's moments are counted by their types;
activations are what one and two layers keep for one and for two rows, counted on the CPU and scaled
up. Of learning the peak is the highest of a few moments, see `learning_parts`.

*Reserved* is what the allocator of a GPU takes for it, by a rule that nobody has measured on a GPU
yet. With expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True) what is freed joins the
free memory beside it, so one phase takes up what another has left, and pieces of all sizes fit. But
what is asked for while its forerunner, a little smaller, is still held lies behind it, and leaves a
hole. So of each phase the largest piece that comes and goes counts once more: a layer's keys and
values, which move to a larger place every 16 tokens; a gradient of the projection, or a chunk of
logits. And what was asked for on one stream serves no other: sharded weights come through a buffer
of a stream of their own, which holds the projection and the embeddings. Not in either: the 1 GB or
so of a process with its libraries and CUDA's context.

`--measure` compares allocated with allocated: on a CPU each operation's tensors are counted as they
come and go, see `LiveBytes`; nothing is reserved there."""

import argparse
import contextlib
import json

from harness import (
    DEVICE,
    SHAPES,
    LiveBytes,
    finish,
    main,
    make_run,
    never_stop,
    random,
    say,
    torch,
    transformers,
)

from machinery.disk import beside_main
from machinery.model import add_adapters
from machinery.policy import ANSWERS_PER_PASS, LOGITS_PER_CHUNK
from machinery.prompts import CACHE_ROOM
from machinery.settings import load_config

WIDTH = {"float32": 4, "mixed": 4, "bfloat16": 2}  # bytes of a weight that learns
COMPUTE = {"float32": 4, "mixed": 2, "bfloat16": 2}  # and of what is computed in


class Shapes(LiveBytes):
    """Counts bytes without what takes the time, since nothing here asks for values: products of
    matrices, and attention's backward pass."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.addmm.default):
            left, right = arguments[-2:]
            results = [left.new_empty(left.shape[0], right.shape[1])]
        elif function is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            _, *read = arguments[:4]  # queries, keys, values
            results = [torch.empty_like(each) for each in read]
        else:
            return super().__torch_dispatch__(function, types, arguments, named)
        for result in results:
            self.see(result.untyped_storage())
        return results[0] if len(results) == 1 else tuple(results)


def small_model(config, model_config, layers: int):
    small = type(model_config).from_dict({
        **model_config.to_dict(), "num_hidden_layers": layers, "vocab_size": 64,
        "layer_types": None, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0})
    model = transformers.AutoModelForCausalLM.from_config(
        small, dtype=torch.bfloat16 if config.model.precision == "bfloat16" else torch.float32)
    if config.model.lora_rank:
        add_adapters(model, config)
    if config.model.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def kept_and_more(config, model_config, prompt: int, layers: int, rows: int) -> tuple[int, int]:
    """Bytes that so many answers to one question keep for the backward pass, and what that pass
    needs besides at its peak."""
    prompt_ids, *answers = ([random.randrange(64) for _ in range(length)]
                            for length in [prompt] + [config.training.max_new_gen_tokens] * rows)
    question = main.Question({}, prompt_ids)
    batch = [main.Trajectory(question, answer, "", True) for answer in answers]
    with Shapes() as live:
        model = small_model(config, model_config, layers)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # as in DDP's buckets
        before = live.now
        log_probs, _ = main.Policy(model, config, one_pass=config.training.shard)(batch)
        kept, live.peak = live.now - before, live.now
        log_probs.sum().backward()
        more = live.peak - before - kept
    if config.model.precision == "mixed" and not config.model.gradient_checkpointing:
        kept -= 2 * learning_weights(model)  # in bfloat16, which `learning_parts` counts
    return kept, more


def whole_while_it_runs(config, model_config, model) -> tuple[float, float, float]:
    """With sharded weights, bytes of the projection, of embeddings that are not its own, and of a
    layer."""
    if not config.training.shard or config.model.lora_rank:  # adapters are small
        return 0, 0, 0
    projection, embeddings = (each.weight.numel() for each in (model.get_output_embeddings(),
                                                               model.get_input_embeddings()))
    if model_config.tie_word_embeddings:
        embeddings = 0
    layers = learning_weights(model) - projection - embeddings
    width = WIDTH[config.model.precision]
    return projection * width, embeddings * width, layers * width / model_config.num_hidden_layers


def learning_weights(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def activations(config, model_config, prompt: int, rows: int) -> tuple[float, float]:
    """Bytes of a micro-batch of so many rows: kept for the backward pass, and what that needs
    besides for the layer at which it stands."""
    # with one layer and with two, for two answers and for four; with one answer the peak of the
    # backward pass is elsewhere
    (one, _), (one_doubled, _), (two, more), (two_doubled, more_doubled) = (
        kept_and_more(config, model_config, prompt, layers, answers)
        for layers in (1, 2) for answers in (2, 4))
    layers, questions = (model_config.num_hidden_layers,
                         min(rows, config.training.num_samples_per_step))
    at_once = rows if config.training.shard else min(rows, ANSWERS_PER_PASS)
    # what a row adds, with one layer and with two, and from these with all; a question likewise
    row, row_of_two = (one_doubled - one) / 2, (two_doubled - two) / 2
    question, question_of_two = one - 2 * row, two - 2 * row_of_two
    return (rows * (row + (layers - 1) * (row_of_two - row))
            + questions * (question + (layers - 1) * (question_of_two - question)),
            at_once * max(0, more_doubled - more) / 2)


def learning_parts(config, model_config, model, prompt: int) -> tuple[dict[str, float], float]:
    """At the highest of five moments: a chunk of logits in the forward pass; one in the backward
    pass; the projection's gradients; a layer's backward pass; and, with sharded weights, its end,
    when no activations are left. And how much more is reserved, perhaps at another."""
    training, precision = config.training, config.model.precision
    length, vocabulary = prompt + training.max_new_gen_tokens, model_config.vocab_size
    rows = min(max(1, training.tokens_per_micro_batch // length),
               training.num_samples_per_step * training.k_best_of_n[0])
    kept, at_a_layer = activations(config, model_config, prompt, rows)
    logits = rows * training.max_new_gen_tokens * vocabulary
    # three of them, in float32 even from bfloat16: as they are, over the temperature, log softmax
    chunk = 3 * 4 * min(LOGITS_PER_CHUNK, logits)
    gradient = 0 if config.model.lora_rank else (
        model.get_output_embeddings().weight.numel() * WIDTH[precision])
    casts = 2 * learning_weights(model) if precision == "mixed" else 0
    # autocast keeps them for its forward pass; the graph holds them longer, but for checkpoints
    held = 0 if config.model.gradient_checkpointing else casts
    projection, embeddings, layer = whole_while_it_runs(config, model_config, model)
    if config.training.shard:  # where each is cast anew
        casts = max(held, gradient / 2 if precision == "mixed" else 0)
    # that of a chunk, and the sum with those so far; cast anew it comes in bfloat16, and is added
    more = gradient * (1.5 if config.training.shard and precision == "mixed" else 2)
    always = {"activations": kept, "the projection, whole": projection}
    moments = ({**always, "logits, a chunk": chunk, "weights cast to bfloat16": casts},
               {**always, "logits, a chunk": chunk, "weights cast to bfloat16": held,
                "gradient of the projection": gradient * (logits > LOGITS_PER_CHUNK)},
               {**always, "weights cast to bfloat16": held, "a layer, ahead of time": layer,
                "gradient of the projection": gradient,
                "that of a chunk, as it is added": more * (logits > LOGITS_PER_CHUNK)},
               # of a sharded one the weights, those of the next, as they come and as they are laid
               # out, and twice its gradients, as they are and as they are sent
               {**always, "a layer, in the backward pass": at_a_layer + 5 * layer,
                "weights cast to bfloat16": held, "gradient of the projection": gradient},
               {"the projection, whole": projection, "gradient of the projection": projection,
                "embeddings, their gradient, and as it is sent": 2 * embeddings or projection})

    def moves(moment: dict[str, float]) -> float:
        return max(moment.get("logits, a chunk", 0) / 3, moment["gradient of the projection"]
                   if moment.get("that of a chunk, as it is added") else 0)

    highest = max(moments, key=lambda moment: sum(moment.values()))
    reserved = max(sum(moment.values()) + moves(moment) for moment in moments)
    return highest, reserved - sum(highest.values())


def sampling_parts(config, model_config, prompt: int, rows: int) -> dict[str, float]:
    compute, at_once = COMPUTE[config.model.precision], min(rows, config.sampling.max_rows)
    head_width = (getattr(model_config, "head_dim", None)
                  or model_config.hidden_size // model_config.num_attention_heads)
    layer = (2 * model_config.num_key_value_heads * head_width * compute * at_once
             * (prompt + config.training.max_new_gen_tokens + CACHE_ROOM))
    return {"keys and values": layer * model_config.num_hidden_layers,
            "a layer's, while rows leave": 0.75 * layer,  # its keys are done when its values come
            "logits": at_once * model_config.vocab_size * (compute + 3 * 4)}


def forecast(config, model_config, prompt: int, ranks: int = 1) -> dict[str, dict[str, float]]:
    """GB a rank, by phase and by what they are for."""
    training, precision = config.training, config.model.precision
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(model_config)
        if config.model.lora_rank:
            add_adapters(model, config)
    weights, learning = sum(map(torch.numel, model.parameters())), learning_weights(model)
    width, compute = WIDTH[precision], COMPUTE[precision]
    # with LoRA; in mixed precision they lie in bfloat16, and the sampling copy shares them
    frozen = weights - learning
    shards = ranks if training.shard else 1
    always = {"weights": learning * width / shards + frozen * compute,
              "gradients": learning * width / shards,
              "AdamW's moments": 2 * learning * width / shards,
              "sampling copy": compute * learning if precision == "mixed" or training.shard else 0,
              "reference model": reference_bytes(config, model)}
    held_out = -(-config.data.num_validation // ranks) * config.validation.best_of_n
    sampled = training.num_samples_per_step * training.k_best_of_n[1]
    learning_peak, moves = learning_parts(config, model_config, model, prompt)
    phases = {"always": always,
              "while sampling": sampling_parts(config, model_config, prompt, sampled),
              "while evaluating": sampling_parts(config, model_config, prompt, held_out),
              "while learning": learning_peak,
              "reserved besides": {
                  "where weights are gathered": sum(
                      whole_while_it_runs(config, model_config, model)[:2]),
                  "while learning, what comes and goes": moves}}
    return {phase: {name: size / 1e9 for name, size in parts.items() if size}
            for phase, parts in phases.items()}


def reference_bytes(config, model) -> int:
    """Of its own: with LoRA it is the model with its adapters off. In mixed precision linear layers
    but the output lie in bfloat16."""
    if not config.training.kl_beta or config.model.lora_rank:
        return 0
    output = model.get_output_embeddings().weight
    low = sum(layer.weight.numel() for layer in model.modules() if isinstance(
        layer, torch.nn.Linear) and layer.weight is not output)
    return (sum(map(torch.numel, model.parameters())) * WIDTH[config.model.precision]
            - (2 * low if config.model.precision == "mixed" else 0))


def peaks(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """GB allocated and reserved, by phase: see the head."""
    always, besides = sum(table["always"].values()), table["reserved besides"]
    result = {"allocated": {}, "reserved": {}}
    for phase in ("sampling", "evaluating", "learning"):
        parts = table[f"while {phase}"]
        more = besides.get("where weights are gathered", 0) + (
            besides.get("while learning, what comes and goes", 0) if phase == "learning"
            else parts["a layer's, while rows leave"])
        result["allocated"][phase] = round(always + sum(parts.values()), 4)
        result["reserved"][phase] = round(always + sum(parts.values()) + more, 4)
    return result


def measured_peaks(arguments: list[str], shape: str | None) -> dict:
    """Of one step, all of whose answers run to the limit, by phase."""
    from step import measure
    kinds = {"measured_gb": "memory_gb"}
    if DEVICE.type == "cuda":
        kinds["measured_reserved_gb"] = "reserved_gb"
    with LiveBytes() if DEVICE.type == "cpu" else contextlib.nullcontext():
        run = make_run(arguments, shape)
        never_stop(run)
        measured = measure(run, steps=1, warm_up=0)
    result = {name: {"sampling": round(measured[f"sample_{kind}"], 4),
                     "learning": round(measured[f"learn_{kind}"], 4)}
              for name, kind in kinds.items()}
    if DEVICE.type == "cuda":
        result["alloc_retries"] = measured["alloc_retries"]
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES,
                        help="instead of the model that the settings name")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--ranks", type=int, default=1, help="that share an evaluation, or weights")
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
    table = forecast(settings, shape, options.prompt, options.ranks)
    for phase, parts in table.items():
        say(f"{phase}: {sum(parts.values()):.2f} GB")
        for name, size in parts.items():
            say(f"    {name:<46} {size:8.2f} GB")
    total = peaks(table)
    for kind, phases in total.items():
        say(f"{kind}, peak: {max(phases.values()):.2f} GB, while {max(phases, key=phases.get)}")
    result = {"forecast_gb": total["allocated"], "forecast_reserved_gb": total["reserved"],
              "parts_gb": table}
    if options.measure and settings.training.shard and DEVICE.type == "cpu":
        parser.error("what is sharded cannot be counted on a CPU: see bench/sharding.py --memory")
    if options.measure:
        result |= measured_peaks(arguments, options.shape)
        say(f"measured: {json.dumps(result['measured_gb'])} "
            f"(forecast {json.dumps(result['forecast_gb'])})")
        finish(result)
    say(json.dumps(result))
