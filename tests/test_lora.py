"""Adapters: what learns, what stays, what is sampled from, and what is left in best/."""

import re
import runpy
import sys

import ask
import pytest
import torch
import transformers
from architectures import save_with_tokenizer
from conftest import (
    BOUND,
    GROUP,
    QUESTIONS,
    SMALL,
    TEMPERATURE,
    L,
    as_numbers,
    as_sampled_from,
    digest,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    plain_loss,
    relative_error,
    start,
    training_steps,
)
from processes import ROOT
from tiny_models import VOCABULARY

import main
from machinery.errors import UserError
from machinery.model import load_model, make_reference, make_sampler, refresh_sampler

LORA = ["model.lora_rank=4", "model.lora_alpha=8"]


def with_adapters(size=0.1, **more):
    """A model whose adapters have learned something already. Fresh ones add nothing."""
    config = make_config(model__lora_rank=4, **{"model__precision": "float32", **more})
    model, tokenizer = load_model(config)
    change_adapters(model, size)
    return model.cpu().eval(), tokenizer, config


@torch.no_grad()
def change_adapters(model, size=0.1):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, size)


def gradient_of_adapters(model) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([gradient.flatten() for gradient in gradients])


# ---------------------------------------------------------------- what learns

@pytest.mark.mathematics
def test_only_the_adapters_learn_and_the_kl_term_measures_from_the_model_without_them(
        one_rank, tmp_path):
    """The reference of the plain formula is the model that the adapters were added to."""
    save_with_tokenizer(make_model("gpt2", vocab_size=VOCABULARY), tmp_path)
    model, _, config = with_adapters(
        0.02, model__name=str(tmp_path), training__kl_beta=0.5, training__max_new_gen_tokens=L,
        sampling__temperature=TEMPERATURE, training__max_grad_norm=None,
        training__tokens_per_micro_batch=60, model__gradient_checkpointing=True)
    model = model.double()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).double().eval()
    trajectories = as_sampled_from(model, make_trajectories(QUESTIONS * GROUP))
    reference = as_numbers(plain_logprobs(base, trajectories, TEMPERATURE))
    plain_loss(model, trajectories, QUESTIONS * GROUP, L, TEMPERATURE, beta=0.5,
               reference=reference).backward()
    expected = gradient_of_adapters(model)
    model.zero_grad()

    run = make_policy(model, config)
    run.reference = main.Policy(make_reference(model, config), config)
    [metrics] = main.learn(run, trajectories)

    assert 1e-3 < metrics["kl"] < 0.3  # As in training.
    assert relative_error(gradient_of_adapters(model), expected) < BOUND[torch.float64]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.requires_grad or parameter.grad is None


@pytest.mark.mathematics
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_the_kl_is_exactly_zero_as_long_as_nothing_was_learned(lora_rank, precision):
    config = make_config(
        model__precision=precision, model__lora_rank=lora_rank, training__kl_beta=0.1)
    model, _ = load_model(config)
    trajectories = make_trajectories(12)

    logprobs, _ = main.Policy(model.train(), config)(trajectories)
    reference = main.Policy(make_reference(model, config), config)
    reference_logprobs, _ = reference(trajectories)

    assert torch.equal(reference_logprobs, logprobs) and not reference_logprobs.requires_grad


def test_without_peft_the_one_line_says_what_to_install(monkeypatch):
    assert transformers.utils.is_peft_available()  # It remembers that, for later tests too.
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(UserError, match="pip install peft"):
        with_adapters()


def test_a_target_that_no_layer_has_is_refused_though_others_have_theirs():
    says = "no layer is called v_porj. Choose from the linear layers: .*v_proj"
    with pytest.raises(UserError, match=says):
        with_adapters(model__lora_targets=["q_proj", "v_porj"])


# ---------------------------------------------------------------- what is sampled from

def test_in_mixed_precision_what_does_not_learn_is_in_bfloat16_and_shared_with_the_sampler():
    model, _, config = with_adapters(model__precision="mixed", model__lora_alpha=5)
    adapters = model.peft_config["default"]
    assert (adapters.r, adapters.lora_alpha) == (4, 5)
    sampler = make_sampler(model, config)
    change_adapters(model)
    refresh_sampler(sampler, model)

    for parameter, copied in zip(model.parameters(), sampler.parameters(), strict=True):
        dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == dtype and copied.dtype == torch.bfloat16
        assert torch.equal(copied, parameter.to(torch.bfloat16)) and not copied.requires_grad
        assert (parameter.data_ptr() == copied.data_ptr()) == (not parameter.requires_grad)


# ---------------------------------------------------------------- what is left

def test_best_is_an_adapter_that_loads_from_anywhere_and_can_be_made_a_plain_model(
        tmp_path, monkeypatch, capsys):
    def train(run):
        """In place of main.train: the first evaluation, of adapters that are not fresh."""
        change_adapters(run.model)
        main.evaluate_and_keep_best(run)

    monkeypatch.setattr(main, "train", train)
    assert start([*SMALL, *LORA, f"run.dir={tmp_path}"]) == 0
    monkeypatch.chdir("/")
    best, merged = tmp_path / "a" / "best", tmp_path / "merged"
    # The lines of docs/run.md.
    page = (ROOT / "docs" / "run.md").read_text()
    lines = re.search(r"```python\n(from peft .*?)```", page, re.DOTALL)[1]
    lines = lines.replace("runs/<name>/best", str(best)).replace('"merged"', f'"{merged}"')
    (tmp_path / "merge.py").write_text(lines)
    runpy.run_path(str(tmp_path / "merge.py"))

    adapted, plain, base = [
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        for folder in (best, merged, ROOT / "tiny" / "model")]

    assert not any("lora_" in name for name, _ in plain.named_parameters())
    assert len(transformers.AutoTokenizer.from_pretrained(merged)) == plain.config.vocab_size
    ids = torch.arange(2, 30)[None]
    assert torch.allclose(plain(ids).logits, adapted(ids).logits, atol=1e-4)
    assert not torch.allclose(base(ids).logits, adapted(ids).logits, atol=0.1)
    # It can be asked as any other model.
    assert ask.ask(["--model", str(best), "3", "7", "25", "=", "88"]) == 0
    assert capsys.readouterr().out.count("--- answer") == 4
    # But it is no model to train.
    assert start([*SMALL, *LORA, f"run.dir={tmp_path}", "run.name=b", f"model.name={best}"]) == 2
    assert "cannot be loaded with" in capsys.readouterr().err


KL = ["training.kl_beta=0.05"]
TAUGHT = ["training.learning_type=distill", "training.teacher=tiny/lab/model"]


@pytest.mark.parametrize("more", [KL, TAUGHT + LORA], ids=["full", "LoRA and a teacher"])
def test_a_resumed_run_with_a_reference_ends_as_an_uninterrupted_one(more, tmp_path):
    """The reference stays the model that the run began with, or the teacher."""
    settings = [*SMALL, *more, "training.updates_per_batch=2", "checkpoint.every=1",
                "validation.every=1"]
    for name, max_steps in (("whole", 2), ("resumed", 1), ("resumed", 2)):
        assert start([*settings, f"run.dir={tmp_path / name}",
                      f"training.max_steps={max_steps}"]) == 0

    whole, resumed = tmp_path / "whole" / "a", tmp_path / "resumed" / "a"
    first, second = training_steps(whole)
    assert training_steps(resumed) == [first, second] and second["kl"] > 0
    tensors = "checkpoints/step-000002/tensors-1.safetensors"
    assert digest(whole / tensors) == digest(resumed / tensors)
