"""Models that people bring: they are right here, or a run ends with one line at its start. The
tiny models are of tiny_models.py, and `examine` of architectures.py compares them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import (
    LONG,
    begin,
    examine,
    learned_gradient,
    plain_log_probs,
    save_with_tokenizer,
)
from conftest import SMALL, make_config, make_trajectories, relative_error, start
from processes import ranks
from tiny_models import tiny_config, tiny_model

import main
from machinery import check, model, prompts, sampling, settings, tasks
from machinery.errors import UserError
from machinery.model import find_stop_ids
from machinery.ranks import join
from machinery.sharding import unsharded

# Attention beside convolution, linear attention or Mamba, text beside images, a router with noise,
# a decoder within a base model, and a base model without a name. architectures.py tries all.
THAT_MATTER = ["lfm2", "qwen3_5", "falcon_h1", "granitemoehybrid", "gemma3", "gemma4", "llama4",
               "opt", "phimoe", "qwen3_moe"]
SHARDED = ["lfm2", "gemma3", "llama4"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that saves a tiny model once, and returns its folder."""
    folders = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            save_with_tokenizer(tiny_model(name), folders[name])
        return folders[name]

    return save


# ---------------------------------------------------------------- architectures

@pytest.mark.mathematics
@pytest.mark.parametrize("name", THAT_MATTER)
def test_samples_log_probabilities_and_gradients_are_those_of_plain_passes(
        name, tmp_path, one_rank):
    finding = examine(name, tmp_path)

    assert not finding.refusal and not finding.wrong, finding


def compare_shards(folders: list[str]):
    """On each rank: the gradient that sharded weights get, and that of a plain pass."""
    join()
    answers = make_trajectories(4)
    for folder in folders:
        plain = begin(Path(folder))
        plain.model.eval()
        plain_log_probs(plain.model, answers).sum().backward()

        run = begin(Path(folder), training__shard=True)  # It is checked, too.
        run.policy.train()
        log_probs, _ = run.policy(answers)
        log_probs.sum().backward()
        gradients = [unsharded(parameter.grad).flatten() for parameter in run.model.parameters()
                     if parameter.requires_grad]
        error = relative_error(torch.cat(gradients), learned_gradient(plain.model))
        assert error < 1e-4, (folder, error)


@pytest.mark.mathematics
def test_sharded_weights_of_two_ranks_get_the_gradient_of_plain_passes(folder_of):
    result = ranks(2, compare_shards, [str(folder_of(name)) for name in SHARDED])

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name, reason", [
    ("bart", ": log-probabilities of Policy differ from the model's own by"),
    # The library's own cache of it is wrong.
    ("zamba2", ": log-probabilities noted by generate differ from the model's own by"),
])
def test_what_cannot_be_trained_is_one_line_that_names_the_architecture(
        name, reason, folder_of, tmp_path, capsys):
    code = start([*SMALL, f"model.name={folder_of(name)}", f"run.dir={tmp_path}"])

    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said
    assert f"{name.title()}ForCausalLM cannot be trained here" in said
    assert reason in said


# ---------------------------------------------------------------- the check

def ignore_padding(monkeypatch):
    def pad_left(rows, device):
        ids, mask = own_pad_left(rows, device)
        return ids, torch.ones_like(mask)

    own_pad_left = prompts.pad_left
    monkeypatch.setattr(prompts, "pad_left", pad_left)


def scale_logits(monkeypatch, factor):
    def log_probs_of_tokens(policy, logits, tokens):
        return own(policy, logits * factor, tokens)

    own = main.Policy.log_probs_of_tokens
    monkeypatch.setattr(main.Policy, "log_probs_of_tokens", log_probs_of_tokens)


def forget_the_temperature(monkeypatch):
    scale_logits(monkeypatch, 0.7)  # The runs below sample at 0.7.


def learn_a_little_warmer(monkeypatch):
    scale_logits(monkeypatch, 0.999)


def shift_by_one(monkeypatch):
    def forward(policy, answers):
        log_probs, entropies = own_forward(policy, answers)
        return log_probs.roll(1), entropies

    own_forward = main.Policy.forward
    monkeypatch.setattr(main.Policy, "forward", forward)


def mix_rows_up(monkeypatch):
    def read_prompts(model, rows):
        cache, mask = own_read_prompts(model, rows)
        cache.reorder_cache(torch.arange(len(rows)).roll(1))
        return cache, mask

    own_read_prompts = sampling.read_prompts
    monkeypatch.setattr(sampling, "read_prompts", read_prompts)


OF_POLICY = "log-probabilities of Policy differ from the model's own"
OF_SAMPLING = "log-probabilities noted by generate differ from the model's own"


@pytest.mark.parametrize("fault, what", [
    (ignore_padding, OF_POLICY),
    (forget_the_temperature, OF_POLICY),
    (shift_by_one, OF_POLICY),
    (mix_rows_up, OF_SAMPLING),
])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_check_notices_a_fault_in_any_precision(
        fault, what, precision, monkeypatch, tmp_path, capsys):
    """In the run that everyone starts with, but for a temperature."""
    fault(monkeypatch)

    code = start([*SMALL, f"model.precision={precision}", "sampling.temperature=0.7",
                  f"run.dir={tmp_path}"])

    assert code == 2
    assert what in capsys.readouterr().err


def test_in_mixed_precision_rounding_hides_no_fault(monkeypatch, tmp_path, capsys):
    """It's within what rounding may cause, so the check has to compute in float32, too."""
    learn_a_little_warmer(monkeypatch)

    code = start([*SMALL, "model.precision=mixed", f"run.dir={tmp_path}"])

    assert code == 2
    assert f"{OF_POLICY} in float32" in capsys.readouterr().err


@pytest.mark.parametrize("edit, code", [(shift_by_one, 0), (mix_rows_up, 2)])
def test_a_policy_may_differ_on_purpose_but_samples_may_not(
        edit, code, monkeypatch, tmp_path, capsys):
    edit(monkeypatch)

    assert code == start([*SMALL, "training.max_steps=0", "model.check=warn",
                          f"run.dir={tmp_path}"])

    said = capsys.readouterr()
    assert f"note: {OF_POLICY}" in said.out if code == 0 else OF_SAMPLING in said.err


def test_the_check_notices_noise_that_a_model_adds_only_while_it_learns(folder_of, one_rank):
    run = begin(folder_of("phimoe"))
    for layer in run.model.modules():
        if hasattr(layer, "router_jitter_noise"):
            layer.router_jitter_noise = 0.3

    sampled = main.Policy(run.sampler, run.config)
    with pytest.raises(UserError, match="PhimoeForCausalLM cannot be trained here.*while learning"):
        check.check_model(sampled, run.policy, None, LONG, 0, run.config)


def test_the_check_looks_at_a_teacher_too(folder_of, one_rank):
    """This one answers otherwise if it reads several rows together."""
    run = begin(folder_of("qwen3_moe"))
    config = make_config(training__learning_type="distill", training__teacher="made up",
                         model__precision="float32",
                         sampling__temperature=run.config.sampling.temperature)
    teacher = tiny_model("gemma3").eval()
    reference = main.Policy(teacher, config)
    sampled = main.Policy(run.sampler, run.config)
    arguments = (sampled, run.policy, reference, LONG, 0, config)
    check.check_model(*arguments)
    body = teacher.base_model
    forward = body.forward

    def otherwise(**keys):
        output = forward(**keys)
        if keys.get("input_ids") is not None and len(keys["input_ids"]) > 1:
            output.last_hidden_state = output.last_hidden_state * 2
        return output

    body.forward = otherwise
    with pytest.raises(UserError, match="of Policy differ from .* with the teacher's weights by"):
        check.check_model(*arguments)


# ---------------------------------------------------------------- parts that no text goes through

def test_a_tower_for_images_does_not_learn_is_told_of_and_gets_no_adapters(
        folder_of, one_rank, capsys):
    full = begin(folder_of("gemma3")).model
    said = capsys.readouterr().out
    adapted = begin(folder_of("gemma3"), model__lora_rank=2).model

    assert "such as model.vision_tower" in said and "they are not trained" in said
    for name, parameter in full.named_parameters():
        assert parameter.requires_grad == ("language_model" in name), name
    adapters = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert adapters and all("language_model" in name for name in adapters)


def test_with_adapters_mixed_precision_loads_no_float32_masters_of_frozen_weights():
    full, adapted = [make_config(model__precision="mixed", model__lora_rank=rank).model
                     for rank in (0, 4)]

    assert model.type_when_loaded(full) == torch.float32
    assert model.type_when_loaded(adapted) == torch.bfloat16


# ---------------------------------------------------------------- loading

def test_dropout_and_the_noise_of_routers_are_off(folder_of, one_rank):
    assert tiny_config("gpt2").resid_pdrop > 0 and tiny_config("phimoe").router_jitter_noise > 0

    for name in ("gpt2", "phimoe"):
        for layer in begin(folder_of(name)).model.modules():
            assert getattr(layer, "router_jitter_noise", 0) == 0
            assert getattr(layer, "p", 0) == 0  # of nn.Dropout


def test_a_model_that_cannot_end_an_answer_is_refused(folder_of):
    model = tiny_model("qwen3_moe")
    model.config.eos_token_id = model.generation_config.eos_token_id = None

    with pytest.raises(UserError, match="has no token that ends an answer: set eos_token_id"):
        find_stop_ids(model, SimpleNamespace(eos_token_id=None))


def test_longrope_models_end_where_the_frequencies_of_all_rows_would_change():
    phi = tiny_model("phi3")

    assert tasks.longest_text(phi) == 128
    phi.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 50}
    assert tasks.longest_text(phi) == 50


@pytest.mark.parametrize("has_bfloat16, wanted, precision", [
    (True, None, "mixed"), (False, None, "float32"), (False, "mixed", "mixed")])
def test_a_gpu_without_bfloat16_takes_float32(has_bfloat16, wanted, precision, monkeypatch):
    def is_supported(including_emulation=True):
        return has_bfloat16 or including_emulation

    monkeypatch.setattr(settings, "DEVICE", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)

    assert settings.choose_precision(wanted) == precision
