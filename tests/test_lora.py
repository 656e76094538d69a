"""Adapters: what learns, what stays, what is sampled from, and what is left in best/."""

import re
import runpy
import sys
from types import SimpleNamespace

import ask
import pytest
import torch
import transformers
from conftest import (
    BOUND,
    GROUP,
    QUESTIONS,
    SILENT_LOG,
    SMALL,
    TEMPERATURE,
    L,
    as_numbers,
    clear_choices,
    digest,
    make_config,
    make_policy,
    make_trajectories,
    plain_logprobs,
    plain_loss,
    relative_error,
    sample_from,
    start,
    training_steps,
)
from processes import ROOT

import main
from machinery.errors import UserError
from machinery.tasks import encode_prompt

LORA = ["model.lora_rank=4", "model.lora_alpha=8"]


def with_adapters(size=0.1, **more):
    """A model whose adapters have learned something already. Fresh ones add nothing."""
    config = make_config(model__lora_rank=4, **{"model__precision": "float32", **more})
    model, tokenizer = main.load_model(config)
    change_adapters(model, size)
    return model.cpu().eval(), tokenizer, config


@torch.no_grad()
def change_adapters(model, size=0.1):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, size)


def learning_parameters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_of_adapters(model):
    return torch.cat([parameter.grad.flatten() for parameter in learning_parameters(model)])


# ---------------------------------------------------------------- what learns

@pytest.mark.mathematics
@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_adapters_learn_and_the_kl_term_measures_from_the_model_without_them(
        checkpointing, one_rank, model_folder):
    """The reference of the plain formula is the model that the adapters were added to."""
    folder = model_folder("gpt2")
    model, _, config = with_adapters(
        0.02, model__name=str(folder), training__kl_beta=0.5, training__max_new_gen_tokens=L,
        sampling__temperature=TEMPERATURE, training__max_grad_norm=None,
        training__tokens_per_micro_batch=60, model__gradient_checkpointing=checkpointing)
    model = model.double()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()
    trajectories = make_trajectories(QUESTIONS * GROUP)
    reference = as_numbers(plain_logprobs(base, trajectories, TEMPERATURE))
    plain_loss(model, trajectories, QUESTIONS * GROUP, L, TEMPERATURE, beta=0.5,
               reference=reference).backward()
    expected = gradient_of_adapters(model)
    model.zero_grad()

    run = make_policy(model, config)
    run.reference = main.Policy(main.make_reference(model, config), config)
    [metrics] = main.learn(run, trajectories)

    assert 1e-3 < metrics["kl"] < 0.3  # As in training.
    assert relative_error(gradient_of_adapters(model), expected) < BOUND[torch.float64]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        assert parameter.requires_grad or parameter.grad is None


@pytest.mark.mathematics
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("precision", ["mixed", "float32", "bfloat16"])
def test_the_kl_is_exactly_zero_as_long_as_nothing_was_learned(lora_rank, precision):
    config = make_config(
        model__precision=precision, model__lora_rank=lora_rank, training__kl_beta=0.1)
    model, _ = main.load_model(config)
    trajectories = make_trajectories(12)

    logprobs, _ = main.Policy(model.train(), config)(trajectories)
    reference = main.Policy(main.make_reference(model, config), config)
    reference_logprobs, _ = reference(trajectories)

    assert torch.equal(reference_logprobs, logprobs) and not reference_logprobs.requires_grad


def test_lora_targets_names_the_layers_that_get_adapters():
    model, _, _ = with_adapters(model__lora_targets=["q_proj", "v_proj"])

    layers = set()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.add(name.split(".")[-4])
    assert layers == {"q_proj", "v_proj"}


def test_without_peft_the_one_line_says_what_to_install(monkeypatch):
    assert transformers.utils.is_peft_available()  # It remembers that, for later tests too.
    monkeypatch.setitem(sys.modules, "peft", None)

    with pytest.raises(UserError, match="pip install peft"):
        with_adapters()


# ---------------------------------------------------------------- what is sampled from

def test_in_mixed_precision_what_does_not_learn_is_in_bfloat16_and_shared_with_the_sampler():
    model, _, config = with_adapters(model__precision="mixed")
    sampler = main.make_sampler(model, config)
    with torch.no_grad():
        for parameter in learning_parameters(model):
            parameter += 0.37
    main.refresh_sampler(sampler, model)

    for parameter, copied in zip(model.parameters(), sampler.parameters(), strict=True):
        dtype = torch.float32 if parameter.requires_grad else torch.bfloat16
        assert parameter.dtype == dtype and copied.dtype == torch.bfloat16
        assert torch.equal(copied, parameter.to(torch.bfloat16)) and not copied.requires_grad
        assert (parameter.data_ptr() == copied.data_ptr()) == (not parameter.requires_grad)


@pytest.mark.mathematics
def test_answers_are_sampled_through_the_adapters():
    """At top_k 1 there is one answer: that of the model's own logits."""
    model, tokenizer, config = with_adapters(sampling__top_k=1, training__max_new_gen_tokens=24)
    task = main.load_task(config)
    rows = task.load(str(ROOT / "tiny" / "countdown.parquet"), 4)
    prompts = [encode_prompt(row, task, tokenizer, config) for row in rows]
    run = SimpleNamespace(config=config, tokenizer=tokenizer, log=SILENT_LOG,
                          stop_ids=main.find_stop_ids(model, tokenizer),
                          sampler=main.make_sampler(model, config))

    for answer in sample_from(run, prompts, 2):
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        logits = model(ids).logits[0, len(answer.prompt_ids) - 1:-1]
        assert clear_choices(logits) == answer.completion_ids


# ---------------------------------------------------------------- what is left

def plain_model_of(best, folder):
    """What the lines of docs/models.md make of adapters, loaded as any other model."""
    page = (ROOT / "docs" / "models.md").read_text()
    lines = re.search(r"```python\n(from peft .*?)```", page, re.DOTALL)[1]
    for shown, meant in (("runs/<name>/best", best), ("merged", folder)):
        assert lines.count(f'"{shown}"') == 2
        lines = lines.replace(f'"{shown}"', repr(str(meant)))
    (folder.parent / "merge.py").write_text(lines)
    runpy.run_path(str(folder.parent / "merge.py"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_best_is_an_adapter_that_loads_from_anywhere_and_that_peft_makes_a_plain_model_of(
        tmp_path, monkeypatch, capsys):
    def train(run):
        """In place of main.train: the first evaluation, of adapters that are not fresh."""
        change_adapters(run.model)
        main.evaluate_and_keep_best(run)

    monkeypatch.setattr(main, "train", train)
    assert start([*SMALL, *LORA, f"run.dir={tmp_path}"]) == 0
    monkeypatch.chdir("/")
    best, merged = tmp_path / "a" / "best", tmp_path / "merged"

    adapted = transformers.AutoModelForCausalLM.from_pretrained(best).eval()
    plain = plain_model_of(best, merged)
    base = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model").eval()

    assert (best / "adapter_model.safetensors").exists()
    assert not (best / "model.safetensors").exists()
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


@pytest.mark.parametrize("more", [[], LORA], ids=["full", "LoRA"])
def test_a_resumed_run_with_a_kl_term_ends_as_an_uninterrupted_one(more, tmp_path):
    """The reference stays the model that the run began with."""
    settings = [*SMALL, *more, "training.kl_beta=0.05", "training.updates_per_batch=2",
                "checkpoint.every=2", "validation.every=2"]
    whole, resumed = f"run.dir={tmp_path / 'whole'}", f"run.dir={tmp_path / 'resumed'}"

    assert start([*settings, whole, "training.max_steps=4"]) == 0
    for max_steps in (2, 4):
        assert start([*settings, resumed, f"training.max_steps={max_steps}"]) == 0

    ends = []
    for name in ("whole", "resumed"):
        checkpoint = tmp_path / name / "a" / "checkpoints" / "step-000004"
        ends.append((training_steps(tmp_path / name / "a"),
                     digest(checkpoint / "tensors-1.safetensors")))
    assert ends[0] == ends[1]
    steps, _ = ends[0]
    assert [step["updated"] for step in steps] == [2] * 4 and steps[0]["kl"] < steps[-1]["kl"]
