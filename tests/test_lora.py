"""Adapters: what learns, what stays, what is sampled from, and what is left in best/."""

import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    SILENT_LOG,
    clear_choices,
    make_config,
    make_policy,
    make_trajectories,
    plain_logprobs,
    plain_loss,
    read_jsonl,
    relative_error,
    start,
)
from processes import ROOT, ranks
from test_learning import BOUND, GROUP, QUESTIONS, TEMPERATURE, L
from test_resume import SMALL, digest, run_without_curves
from test_run import TIMES

import main
from machinery.errors import UserError
from machinery.tasks import encode_prompt

sys.path.extend([str(ROOT / "bench"), str(ROOT / "examples")])
import ask
import continuous

LORA = ["model.lora_rank=4", "model.lora_alpha=8"]
FAMILY = ["training.kl_beta=0.05", "training.updates_per_batch=2", "training.clip=[0.2,0.2]",
          "training.scale_rewards=group", "training.loss_normalizer=tokens",
          "training.mask_truncated=true"]


def with_adapters(size=0.1, **more):
    """A model whose adapters have learned something already: fresh ones add nothing. `size`: of
    what they have learned."""
    config = make_config(model__lora_rank=4, model__precision="float32", **more)
    model, tokenizer = main.load_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, size)
    return model.cpu().eval(), tokenizer, config


def plain_model_of(best, folder):
    """What the lines of docs/running.md make of adapters, loaded as any other model."""
    page = (ROOT / "docs" / "running.md").read_text()
    lines = re.search(r"```python\n(from peft .*?)```", page, re.DOTALL)[1]
    for shown, meant in (("runs/<name>/best", best), ("merged", folder)):
        assert lines.count(f'"{shown}"') == 2
        lines = lines.replace(f'"{shown}"', repr(str(meant)))
    (folder.parent / "merge.py").write_text(lines)
    runpy.run_path(str(folder.parent / "merge.py"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.mathematics
def test_only_the_adapters_learn_and_the_kl_term_measures_from_the_model_without_them(
        one_rank, model_folder):
    """Against the plain formula, whose reference is the model that the adapters were added to. In
    float64, which GPT-2 computes in throughout."""
    folder = model_folder("gpt2")
    model, _, config = with_adapters(
        0.02, model__name=str(folder), training__kl_beta=0.5, training__max_new_gen_tokens=L,
        sampling__temperature=TEMPERATURE, training__max_grad_norm=None,
        training__tokens_per_micro_batch=60)
    base, model = (transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval(),
                   model.double())
    trajectories = make_trajectories(QUESTIONS * GROUP)
    against = [[value.item() for value in row]
               for row in plain_logprobs(base, trajectories, TEMPERATURE)]
    plain_loss(model, trajectories, QUESTIONS * GROUP, L, TEMPERATURE, beta=0.5,
               reference=against).backward()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.cat([parameter.grad.flatten() for parameter in learning])
    model.zero_grad()
    run = make_policy(model, config)
    run.reference = main.make_reference(main.Policy, model, config)
    metrics = main.policy_gradient(run, trajectories)
    assert 1e-3 < metrics["kl"] < 0.3  # as in training
    assert relative_error(torch.cat([parameter.grad.flatten() for parameter in learning]),
                          expected) < BOUND[torch.float64]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert (names and all("lora_" in name for name in names)
            and not any("lm_head" in name for name in names))


def test_lora_targets_names_the_layers_that_get_adapters():
    model, _, _ = with_adapters(model__lora_targets=["q_proj", "v_proj"])
    assert {name.split(".")[-4] for name, parameter in model.named_parameters()
            if parameter.requires_grad} == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match="model.lora_targets: the model has no layer named v_prj"):
        with_adapters(model__lora_targets=["q_proj", "v_prj"])
    with pytest.raises(UserError, match="model.lora_targets: the model has no layer named no_such"):
        with_adapters(model__lora_targets=["no_such", "q_proj", "v_prj"])


def test_without_peft_the_one_line_says_what_to_install(monkeypatch):
    assert transformers.utils.is_peft_available()  # which it remembers, for later tests too
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="pip install peft"):
        with_adapters()


@pytest.mark.mathematics
def test_answers_are_sampled_through_the_adapters_also_by_continuous_batching(
        tmp_path, monkeypatch):
    """At top_k 1 there is one answer: that of the model with the adapters added in, and not that of
    the model without them."""
    greedy = {"sampling__top_k": 1, "training__max_new_gen_tokens": 24}
    model, tokenizer, config = with_adapters(**greedy)
    task = main.load_task(config)
    rows = task.load(str(ROOT / "tiny" / "countdown.parquet"), 4)
    questions = [main.Question(row, encode_prompt(row, task, tokenizer, config)) for row in rows]

    def answers(model):
        run = SimpleNamespace(config=config, task=task, tokenizer=tokenizer, log=SILENT_LOG,
                              stop_ids=main.find_stop_ids(model, tokenizer),
                              sampler=main.make_sampler(model, config))
        groups = main.sample(run, questions, 2)
        return [answer.completion_ids for group in groups for answer in group]

    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "best")
    whole = plain_model_of(tmp_path / "best", tmp_path / "whole")
    expected = answers(whole)
    for row, completion in zip([row for row in rows for _ in range(2)], expected, strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert clear_choices(
            whole(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]) == completion
    assert answers(model) == expected
    assert expected != answers(
        transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model"))
    monkeypatch.setattr(main, "generate", continuous.generate)
    assert answers(model) == expected


def test_best_is_an_adapter_that_loads_from_anywhere_and_that_peft_makes_a_plain_model_of(
        tmp_path, monkeypatch):
    def train(run):
        """In place of main.train: the first evaluation, of adapters that are not fresh."""
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        main.evaluate_and_keep_best(run)

    monkeypatch.setattr(main, "train", train)
    assert start([*SMALL, *LORA, f"run.dir={tmp_path}"]) == 0
    monkeypatch.chdir("/")
    best, folder, ids = tmp_path / "a" / "best", tmp_path / "merged", torch.arange(2, 30)[None]
    adapted = transformers.AutoModelForCausalLM.from_pretrained(best).eval()
    assert any("lora_" in name for name, _ in adapted.named_parameters())
    assert ((best / "adapter_model.safetensors").exists()
            and not (best / "model.safetensors").exists())
    logits = [model(ids).logits for model in (
        plain_model_of(best, folder), adapted,
        transformers.AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model").eval())]
    monkeypatch.setitem(sys.modules, "peft", None)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert not any("lora_" in name for name, _ in plain.named_parameters())
    assert torch.equal(plain(ids).logits, logits[0])
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert not torch.allclose(logits[1], logits[2], atol=0.1)
    assert len(transformers.AutoTokenizer.from_pretrained(folder)) == plain.config.vocab_size


@pytest.mark.parametrize("more", [[], LORA], ids=["full", "LoRA"])
def test_with_the_whole_family_switched_on_a_resumed_run_ends_as_an_uninterrupted_one(
        more, tmp_path):
    """On two ranks. The reference stays the model that the run began with, and not what it had
    become by the checkpoint."""
    def outcome(folder, *steps):
        for max_steps in steps:
            result = ranks(2, run_without_curves, *SMALL, *FAMILY, *more,
                           f"training.max_steps={max_steps}", "checkpoint.every=2",
                           "validation.every=2", f"run.dir={folder}")
            assert result.returncode == 0, result.stderr
        metrics = [{key: value for key, value in entry.items() if key not in TIMES}
                   for entry in read_jsonl(folder / "a" / "metrics.jsonl")]
        checkpoint = folder / "a" / "checkpoints" / "step-000004"
        return metrics, digest(checkpoint / "tensors-1.safetensors")

    metrics, tensors = outcome(tmp_path / "whole", 4)
    assert outcome(tmp_path / "twice", 2, 4) == (metrics, tensors)
    last = metrics[-2]
    assert last["updated"] == 2 and last["kl"] > 0 and 0 <= last["clipped"] <= 1
    assert metrics[1]["kl"] < last["kl"]


def test_the_frozen_copy_for_mixed_precision_is_refreshed_where_the_model_learns(one_rank):
    model, _, _ = with_adapters()
    sampler = main.make_sampler(model, make_config(model__precision="mixed"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.37 * parameter.requires_grad
    main.refresh_sampler(sampler, model)
    for copied, parameter in zip(sampler.parameters(), model.parameters(), strict=True):
        assert torch.equal(copied, parameter.to(torch.bfloat16)) and not copied.requires_grad


@pytest.mark.mathematics
def test_gradient_checkpointing_changes_nothing_about_adapters(one_rank):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model, _, config = with_adapters(model__gradient_checkpointing=checkpointing,
                                         training__max_grad_norm=None,
                                         sampling__temperature=TEMPERATURE)
        main.policy_gradient(make_policy(model.double().train(), config),
                             make_trajectories(QUESTIONS * GROUP))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()
                                    if parameter.requires_grad]))
    assert relative_error(gradients[1], gradients[0]) < BOUND[torch.float64]


def test_in_mixed_precision_what_does_not_learn_lies_in_bfloat16_and_is_shared_with_the_sampler():
    config = make_config(model__lora_rank=4, model__precision="mixed")
    model, _ = main.load_model(config)
    sampler = main.make_sampler(model, config)
    for parameter, copied in zip(model.parameters(), sampler.parameters(), strict=True):
        assert (parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
                and copied.dtype == torch.bfloat16)
        assert (parameter.data_ptr() == copied.data_ptr()) == (not parameter.requires_grad)


@pytest.mark.mathematics
@pytest.mark.parametrize("more", [{}, {"model__lora_rank": 4}], ids=["full", "LoRA"])
@pytest.mark.parametrize("precision", ["mixed", "float32", "bfloat16"])
def test_the_kl_is_exactly_zero_as_long_as_nothing_was_learned(more, precision):
    config = make_config(model__precision=precision, training__kl_beta=0.1, **more)
    model, _ = main.load_model(config)
    trajectories = make_trajectories(12)
    logprobs, _ = main.Policy(model.train(), config)(trajectories)
    reference = main.make_reference(main.Policy, model, config)
    assert torch.equal(reference(trajectories)[0], logprobs)
    assert not reference(trajectories)[0].requires_grad


def test_asking_best_of_a_run_with_adapters(tmp_path, capsys):
    assert start([*SMALL, *LORA, "training.max_steps=1", "training.learning_rate=0.02",
                  f"run.dir={tmp_path}"]) == 0
    capsys.readouterr()
    assert ask.ask(["--model", str(tmp_path / "a" / "best"), "3", "7", "25", "=", "88"]) == 0
    assert capsys.readouterr().out.count("--- answer") == 4
