"""What bench/memory.py estimates is what is there, byte by byte."""

import json

import harness
import memory
import pytest
import torch
import transformers
from conftest import make_config, run_script
from processes import ranks

import main

SMALL = transformers.Qwen2Config(**harness.SHAPES["small"])
PROMPT, L = 20, 12
NUM_ANSWERS = 4
NUM_TOKENS = NUM_ANSWERS * (PROMPT + L - 1)  # The last token is not processed.


def saved_bytes(layers: int, config) -> int:
    """Adds up the tensors that autograd saves for the backward pass, without the weights."""
    model = memory.small_model(config, SMALL, layers)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # It is held, so no other takes its address.
        return tensor

    question = main.Question({}, [1] * PROMPT)
    batch = [main.Trajectory(question, [2] * L, "", True) for _ in range(NUM_ANSWERS)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        main.Policy(model, config)(batch)
    return sum(storage.nbytes() for storage in saved.values())


def estimated_activations(layers: int, config) -> float:
    settings = {**SMALL.to_dict(), "num_hidden_layers": layers, "layer_types": None}
    shape = transformers.Qwen2Config(**settings)
    return memory.activations(config, shape, PROMPT, NUM_ANSWERS)[0]


@pytest.mark.parametrize("precision, lora_rank, width", [
    ("float32", 0, 4),
    ("mixed", 0, 4),  # Autocast computes in bfloat16, but layers add up in float32.
    ("bfloat16", 0, 2),
    ("mixed", 4, 2),  # The frozen embeddings are in bfloat16.
])
def test_checkpointing_keeps_the_input_of_a_layer_and_the_estimate_counts_it(
        precision, lora_rank, width):
    config = make_config(training__max_new_gen_tokens=L, training__num_samples_per_step=1,
                         model__gradient_checkpointing=True, model__precision=precision,
                         model__lora_rank=lora_rank)
    of_a_layer = NUM_TOKENS * SMALL.hidden_size * width

    saved = saved_bytes(3, config) - saved_bytes(2, config)
    estimated = estimated_activations(3, config) - estimated_activations(2, config)

    assert saved == of_a_layer
    assert estimated == pytest.approx(of_a_layer, rel=0.02)


def test_with_lora_only_adapters_have_gradients():
    config = make_config(model__lora_rank=4, model__precision="mixed")
    model, _ = harness.model_of_shape("small")(config)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = sum(parameter.numel() for parameter in learning)
    frozen = model.num_parameters() - adapters

    always = memory.estimate(config, SMALL, PROMPT)["always"]

    assert 0 < adapters < 0.1 * frozen
    assert always["gradients"] == 4 * adapters / 1e9
    assert always["weights"] == (4 * adapters + 2 * frozen) / 1e9


def test_live_bytes_counts_shared_storage_once_and_forgets_what_is_freed():
    with harness.LiveBytes() as live:
        held = torch.zeros(1000)
        view = held[:10]
        other = torch.ones(500)
        assert live.now == 6000 and view.sum() == 0

        del other
        assert live.now == 4000
        assert harness.peak_memory()["memory_gb"] >= 6000 / 1e9  # The sum was a tensor, too.
        assert harness.peak_memory()["memory_gb"] == 4000 / 1e9


def test_reserved_is_allocated_and_what_moves_once_more():
    phase = {memory.MOVING: 2.0, "logits": 4.0}
    table = {"always": {"weights": 10.0}, "while sampling": phase, "while evaluating": phase,
             "while learning": {"activations": 8.0},
             "reserved besides": {"while learning, what comes and goes": 3.0}}

    total = memory.peaks(table)

    assert total["allocated"] == {"sampling": 16.0, "evaluating": 16.0, "learning": 18.0}
    assert total["reserved"] == {"sampling": 18.0, "evaluating": 18.0, "learning": 21.0}


@pytest.mark.parametrize("more", [
    [],
    pytest.param(["model.gradient_checkpointing=true"], marks=pytest.mark.soak),
    pytest.param(["training.kl_beta=0.04"], marks=pytest.mark.soak),
    pytest.param(["model.lora_rank=16"], marks=pytest.mark.soak),
    pytest.param(["model.precision=mixed", "model.gradient_checkpointing=true"],
                 marks=pytest.mark.soak),
])
def test_estimate_and_measurement_are_within_a_twentieth(more):
    result = ranks(1, run_script, "bench/memory.py", "--measure", "--shape", "small", "--prompt",
                   "48", "training.num_samples_per_step=2", "training.k_best_of_n=[8,8]",
                   "training.max_new_gen_tokens=32", *more)

    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    for phase in ("sampling", "learning"):
        assert answer["estimate_gb"][phase] == pytest.approx(answer["measured_gb"][phase], rel=0.05)
