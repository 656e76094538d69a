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
from tiny_models import names, tiny_config, tiny_model

import main
from machinery import check, model, prompts, sampling, settings, tasks
from machinery.errors import UserError
from machinery.ranks import join
from machinery.sharding import unsharded

# Attention beside convolution, linear attention or Mamba, text beside images, a router with noise,
# a decoder within a base model, and a base model without a name.
THAT_MATTER = ["lfm2", "qwen3_5", "falcon_h1", "granitemoehybrid", "gemma3", "gemma4", "llama4",
               "opt", "phimoe", "qwen3_moe"]
SHARDED = ["lfm2", "gemma3", "llama4"]
OTHERS = [name for name in names() if name not in THAT_MATTER]


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


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_every_architecture_is_right_or_refused(name, tmp_path, one_rank):
    finding = examine(name, tmp_path)

    assert not finding.wrong, finding


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


@pytest.fixture
def not_edited(monkeypatch):
    """What main.py says now counts as not edited, whatever it is."""
    parts = {check.FORWARD: main.Policy.forward, check.GENERATE: main.generate_plain,
             check.LOG_PROBS: main.Policy.log_probs_of_tokens}
    digests = {name: check.digest_of_function(part) for name, part in parts.items()}
    monkeypatch.setattr(check, "AS_WRITTEN", digests)
    return digests


@pytest.mark.parametrize("name, reason", [
    ("mamba", "(ValueError: the model returns no KV cache"),
    ("bart", ": log-probabilities of FastPolicy differ from Policy's by"),
    # The library's own cache of it is wrong.
    ("zamba2", ": log-probabilities recorded by generate_plain differ from the model's own by"),
])
def test_what_cannot_be_trained_is_one_line_that_names_the_architecture(
        name, reason, folder_of, not_edited, tmp_path, capsys):
    code = start([*SMALL, f"model.name={folder_of(name)}", f"run.dir={tmp_path}"])

    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said
    assert f"{name.title()}ForCausalLM cannot be trained here with model.fast=true" in said
    assert reason in said


# ---------------------------------------------------------------- the check

def ignore_padding(monkeypatch):
    def prefill_all(model, ids, mask):
        return sampling.prefill(model, ids, torch.ones_like(mask))

    monkeypatch.setattr(prompts, "prefill", prefill_all)


def forget_the_temperature(monkeypatch):
    def log_probs_of_tokens(policy, logits, tokens):
        log_probs = logits.float().log_softmax(-1)
        return log_probs.gather(-1, tokens[:, None])[:, 0], logits.sum(-1)

    monkeypatch.setattr(main.Policy, "log_probs_of_tokens", log_probs_of_tokens)


def shift_by_one(monkeypatch):
    def forward(policy, answers):
        log_probs, entropies = own_forward(policy, answers)
        return log_probs.roll(1), entropies

    own_forward = main.Policy.forward
    monkeypatch.setattr(main.Policy, "forward", forward)


def take_the_likeliest(monkeypatch):
    def generate_plain(sampler, prompts, settings, on_ended):
        settings.top_k = 1
        return own_generate(sampler, prompts, settings, on_ended)

    own_generate = main.generate_plain
    monkeypatch.setattr(main, "generate_plain", generate_plain)


def drop_the_stop_token(monkeypatch):
    def generate_plain(sampler, prompts, settings, on_ended):
        completions = own_generate(sampler, prompts, settings, on_ended)
        return [(ids[:-1] or ids, log_probs[:-1] or log_probs) for ids, log_probs in completions]

    own_generate = main.generate_plain
    monkeypatch.setattr(main, "generate_plain", generate_plain)


def mix_rows_up(monkeypatch):
    keep_rows = sampling.keep_rows
    monkeypatch.setattr(sampling, "keep_rows", lambda cache, rows: keep_rows(cache, rows.roll(1)))


OF_POLICY = "log-probabilities of Policy differ from the model's own"
OF_SAMPLING = "log-probabilities recorded by generate_fast differ from the model's own"


@pytest.mark.parametrize("fault, what", [
    (ignore_padding, "log-probabilities of FastPolicy differ from Policy's"),
    (forget_the_temperature, OF_POLICY),
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


EDITED = "generate_plain in main.py has been edited"


@pytest.mark.parametrize("edit, fast_says, plain_says", [
    (forget_the_temperature, "you have edited Policy.log_probs_of_tokens in main.py", OF_POLICY),
    (shift_by_one, "Policy.forward in main.py has been edited", OF_POLICY),
    (take_the_likeliest, EDITED, EDITED),
    (drop_the_stop_token, EDITED, EDITED),
])
def test_an_edit_of_the_plain_way_ends_a_fast_run_and_a_plain_run_tells_of_it(
        edit, fast_says, plain_says, monkeypatch, tmp_path, capsys):
    edit(monkeypatch)
    keys = [*SMALL, "training.max_steps=0", "sampling.temperature=0.7", f"run.dir={tmp_path}"]

    fast = start(keys)
    said_fast = capsys.readouterr().err
    plain = start([*keys, "model.fast=false"])
    said_plain = capsys.readouterr().out

    assert fast == 2 and fast_says in said_fast and "set model.fast=false" in said_fast
    assert plain == 0 and f"note: {plain_says}" in said_plain


@pytest.mark.house
def test_the_fast_way_was_written_for_the_plain_way_of_main_py(request):
    """If main.py has changed on purpose, see that machinery/fast.py still does what it says. Then
    write the new digests into machinery/check.py."""
    as_written = check.AS_WRITTEN
    assert request.getfixturevalue("not_edited") == as_written


def test_the_check_notices_noise_that_a_model_adds_only_while_it_learns(
        folder_of, not_edited, one_rank):
    run = begin(folder_of("phimoe"))
    for layer in run.model.modules():
        if hasattr(layer, "router_jitter_noise"):
            layer.router_jitter_noise = 0.3

    plain = main.Policy(run.sampler, run.config)
    with pytest.raises(UserError, match="PhimoeForCausalLM cannot be trained here.*while learning"):
        check.check_model(plain, run.policy, None, main.generate_plain, LONG, 0, run.config)


def test_the_check_looks_at_a_teacher_too(folder_of, not_edited, one_rank):
    """This one answers otherwise if it reads several rows together."""
    run = begin(folder_of("qwen3_moe"))
    config = make_config(training__learning_type="distill", training__teacher="made up",
                         model__precision="float32",
                         sampling__temperature=run.config.sampling.temperature)
    teacher = tiny_model("gemma3").eval()
    reference = main.make_policy(teacher, config)
    plain = main.Policy(run.sampler, config)
    arguments = (plain, run.policy, reference, main.generate_plain, LONG, 0, config)
    check.check_model(*arguments)
    forward = teacher.forward

    def otherwise(**keys):
        output = forward(**keys)
        if keys.get("input_ids") is not None and len(keys["input_ids"]) > 1:
            output.logits = output.logits * 2
        return output

    teacher.forward = otherwise
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
        main.find_stop_ids(model, SimpleNamespace(eos_token_id=None))


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
