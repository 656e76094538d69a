"""What bench/memory.py forecasts is what is there, byte by byte."""

import json
import sys

import pytest
import torch
import transformers
from conftest import make_config, run_script
from processes import ROOT, ranks

import main

sys.path.append(str(ROOT / "bench"))
import harness
import memory

SMALL = transformers.Qwen2Config(**harness.SHAPES["small"])
PROMPT, L = 20, 12


def kept_a_token(rows: int = 4, **settings) -> float:
    """Bytes that layers' inputs take, by the saved tensors themselves: with three layers more than
    with two."""
    sizes = []
    for layers in (2, 3):
        config = make_config(training__max_new_gen_tokens=L, model__gradient_checkpointing=True,
                             **settings)
        model, kept = memory.small_model(config, SMALL, layers), {}
        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}

        def pack(tensor, kept=kept, parameters=parameters):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # so none takes its address
            return tensor

        question = main.Question({}, [1] * PROMPT)
        batch = [main.Trajectory(question, [2] * L, "", True) for _ in range(rows)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            main.Policy(model, config)(batch)
        sizes.append(sum(size for size, _ in kept.values()))
    return (sizes[1] - sizes[0]) / (rows * (PROMPT + L - 1))  # the last token is not read


@pytest.mark.parametrize("settings, width", [
    ({"model__precision": "float32"}, 4),
    ({"model__precision": "mixed"}, 4),  # autocast computes in bfloat16, layers add up in float32
    ({"model__precision": "bfloat16"}, 2),
    ({"model__precision": "mixed", "model__lora_rank": 4}, 2),  # as the frozen embedding lies there
])
def test_checkpointing_keeps_a_layers_input_and_the_forecast_counts_it(settings, width):
    assert kept_a_token(**settings) == SMALL.hidden_size * width
    config = make_config(training__max_new_gen_tokens=L, model__gradient_checkpointing=True,
                         training__num_samples_per_step=1, **settings)

    def forecast(layers):
        shape = transformers.Qwen2Config(**{**SMALL.to_dict(), "num_hidden_layers": layers,
                                            "layer_types": None})
        return memory.activations(config, shape, PROMPT, rows=4)[0]

    tokens = 4 * (PROMPT + L - 1)
    assert forecast(3) - forecast(2) == pytest.approx(tokens * SMALL.hidden_size * width, rel=0.02)


def test_of_a_shape_with_lora_only_adapters_learn():
    config = make_config(model__lora_rank=4, model__gradient_checkpointing=True,
                         model__precision="mixed")
    model, _ = harness.model_of_shape("small")(config)
    learning = {name for name, each in model.named_parameters() if each.requires_grad}
    assert learning and all("lora_" in name for name in learning)
    assert model.is_activation_checkpointing
    with torch.device("meta"):
        full = transformers.AutoModelForCausalLM.from_config(SMALL)
    always = memory.forecast(config, SMALL, PROMPT)["always"]
    adapters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert always["gradients"] == 4 * adapters / 1e9
    assert always["weights"] == (4 * adapters + 2 * full.num_parameters()) / 1e9


def test_live_bytes_counts_what_is_held_once_and_forgets_what_is_let_go():
    with harness.LiveBytes() as live:
        held = torch.zeros(1000)
        view, other = held[:10], torch.ones(500)
        assert live.now == 6000 and view.sum() == 0
        del other
        assert live.now == 4000
        assert harness.peak_memory()["memory_gb"] >= 6000 / 1e9
        assert harness.peak_memory()["memory_gb"] == 4000 / 1e9


def test_reserved_is_allocated_and_the_largest_piece_that_moves_once_more():
    table = memory.forecast(make_config(), SMALL, PROMPT)
    total, kinds = memory.peaks(table), ("allocated", "reserved")
    for phase, pieces in (("sampling", "a layer's, while rows leave"),
                          ("learning", "logits, a chunk")):
        parts, always = table[f"while {phase}"], sum(table["always"].values())
        allocated, reserved = (total[kind][phase] for kind in kinds)
        assert allocated == pytest.approx(always + sum(parts.values()), abs=1e-3)
        moved = parts[pieces] / (3 if phase == "learning" else 1)
        assert reserved - allocated == pytest.approx(moved, abs=2e-3)


@pytest.mark.soak
@pytest.mark.parametrize("more", [
    [], ["model.gradient_checkpointing=true"], ["training.kl_beta=0.04"], ["model.lora_rank=16"],
    ["model.precision=mixed", "model.gradient_checkpointing=true"]])
def test_forecast_and_measured_are_within_a_twentieth(more):
    result = ranks(1, run_script, "bench/memory.py", "--measure", "--shape", "small", "--prompt",
                   "48", "training.num_samples_per_step=2", "training.k_best_of_n=[8,8]",
                   "training.max_new_gen_tokens=32", *more)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    for phase in ("sampling", "learning"):
        assert answer["forecast_gb"][phase] == pytest.approx(answer["measured_gb"][phase], rel=0.05)
