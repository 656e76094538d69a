"""What fits into the memory that is free is found out before the first step."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import learning_config, make_model, make_policy
from processes import ranks
from torch import nn

import main
from machinery import memory
from machinery.errors import UserError
from machinery.ranks import join

GB = 10**9


def make_run(free: float, monkeypatch, checkpoint=None, questions=40, **keys):
    """What `fit_into_memory` needs of a run, with so many bytes free. Its longest prompt has 20
    tokens."""
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    model = make_model()
    run = make_policy(model, learning_config(**keys))
    rows = [{"prompt": "x" * length} for length in (3, 20, 7)]
    run.training_questions = main.Questions(rows, lambda row: [5] * len(row["prompt"]))
    run.validation_questions = [None] * questions
    run.model = run.sampler = model
    run.folder = SimpleNamespace(checkpoint=checkpoint, notes=[])
    return run


@pytest.mark.parametrize(("free", "expected"), [
    (0, 1), (99, 1), (2 * 100, 2), (399, 2), (400, 4), (8191 * 100, 4096), (8192 * 100, 8192),
    (10**12, 8192)])
def test_a_micro_batch_is_a_power_of_two_that_fits_and_at_most_8192(free, expected):
    assert memory.tokens_that_fit(free, of_a_token=100) == expected


def test_an_open_key_is_chosen_from_the_free_memory_and_one_line_says_so(
        one_rank, monkeypatch):
    plenty = make_run(100 * GB, monkeypatch, training__tokens_per_micro_batch=None)
    of_a_token, besides = memory.learning_bytes(plenty)
    memory.fit_into_memory(plenty)
    assert plenty.config.training.tokens_per_micro_batch == memory.MOST_TOKENS
    assert plenty.folder.notes == [
        "learning takes 8,192 tokens at a time (training.tokens_per_micro_batch)"]

    free = (besides + 1500 * of_a_token) * memory.TAKEN
    little = make_run(free, monkeypatch, training__tokens_per_micro_batch=None)
    memory.fit_into_memory(little)
    assert little.config.training.tokens_per_micro_batch == 1024
    [said] = little.folder.notes
    assert " ".join(said.split()) == (
        f"learning takes 1,024 tokens at a time, as each rank has {free / GB:.1f} GB "
        "(training.tokens_per_micro_batch)")


def test_a_key_that_is_set_stays_and_nothing_is_said(one_rank, monkeypatch):
    run = make_run(100 * GB, monkeypatch, training__tokens_per_micro_batch=777)
    memory.fit_into_memory(run)
    assert run.config.training.tokens_per_micro_batch == 777
    assert run.folder.notes == []


def test_a_resumed_run_keeps_what_it_had(one_rank, monkeypatch):
    """With other micro-batches sums would be rounded in another way."""
    checkpoint = SimpleNamespace(state={"tokens_per_micro_batch": 256})
    run = make_run(
        100 * GB, monkeypatch, checkpoint, training__tokens_per_micro_batch=None)
    memory.fit_into_memory(run)
    assert run.config.training.tokens_per_micro_batch == 256


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_learning_holds_grows_with_its_tokens_as_estimated(one_rank, checkpointing):
    model = make_model()
    if checkpointing:
        model.activation_checkpointing_enable()
    run = make_policy(model, learning_config())
    run.model = model
    of_a_token, besides = memory.learning_bytes(run)
    answers = []
    for prompt_token in (3, 4, 5, 6):  # Equal prompts would be processed once.
        question = main.Question({}, [prompt_token] * 60)
        answers.append(main.Trajectory(question, [7] * 60, "", False))
    with memory.LiveBytes() as live, run.policy.no_sync():
        results = run.policy(answers)
        held = live.now
        results[0].sum().backward()
    assert 0.85 < of_a_token * 480 / held < 1.1
    assert live.peak < of_a_token * 480 + besides


@pytest.mark.skipif(not memory.MEMINFO.exists(), reason="only Linux tells what a process holds")
def test_learning_takes_no_more_memory_than_is_planned_for():
    """An allocator leaves holes between tensors of many sizes."""
    result = ranks(1, learn_and_measure)
    assert result.returncode == 0, result.stderr
    of_tensors, taken = map(float, result.stdout.splitlines()[-1].split())
    assert 0.5 * of_tensors < taken < 2 * of_tensors  # as memory.TAKEN says for a CPU


def learn_and_measure():
    """Prints what the tensors of three micro-batches hold, as estimated, and the bytes taken."""
    join()
    model = make_model(num_hidden_layers=16, hidden_size=192, intermediate_size=512)
    run = make_policy(model, learning_config())
    run.model = model
    of_a_token, _ = memory.learning_bytes(run)  # Logits of so few words are small.
    lowest = resident_bytes()
    batches = []
    for num_tokens in (150, 200, 170):
        questions = [main.Question({}, [token] * 60) for token in range(8)]
        batches.append([main.Trajectory(question, [7] * num_tokens, "", False)
                        for question in questions])
    for batch in batches:
        token_log_probs, _ = run.policy(batch)
        token_log_probs.sum().backward()
        del token_log_probs
    print(of_a_token * 8 * 260, resident_bytes("VmHWM") - lowest)


def resident_bytes(name: str = "VmRSS") -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


def test_sampling_holds_a_cache_that_grows_with_its_tokens_as_estimated(one_rank):
    model = make_model()
    run = SimpleNamespace(sampler=model, model=model)
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    of_a_token = (2 * config.num_hidden_layers * config.num_key_value_heads * width
                  * model.dtype.itemsize)
    for num_tokens in (10, 1000):
        expected = num_tokens * of_a_token + 16 * config.vocab_size
        assert memory.sampling_bytes(run, num_tokens) == pytest.approx(expected, rel=0.05)


def test_what_may_not_fit_is_said_with_the_key_to_lower(one_rank, monkeypatch):
    free = 500_000
    run = make_run(free, monkeypatch, questions=10**6, sampling__max_rows=10**7)
    memory.fit_into_memory(run)
    _, learning, sampling = run.folder.notes
    assert "lower training.tokens_per_micro_batch" in " ".join(learning.split())
    assert "4000000 answers of up to 32 tokens" in " ".join(sampling.split())
    fitting = int(sampling.split()[-1])
    assert fitting == int(free / memory.TAKEN / memory.sampling_bytes(run, 32)) > 1


def test_a_model_whose_optimizer_state_does_not_fit_is_refused(monkeypatch):
    model = nn.Linear(1000, 1000, bias=False)
    monkeypatch.setattr(memory, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(memory, "free_memory", lambda: 12e6)
    memory.check_optimizer_fits(model)  # A gradient and two moments of 4 MB.
    monkeypatch.setattr(memory, "free_memory", lambda: 11e6)
    with pytest.raises(UserError, match="set model.lora_rank"):
        memory.check_optimizer_fits(model)


def test_the_computers_ram_is_shared_by_its_ranks(one_rank, monkeypatch):
    monkeypatch.setattr(memory, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(memory, "free_ram", lambda: 12 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert memory.free_memory() == 4 * GB


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:  8000000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    assert memory.free_ram() == 8_192_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_ram() == 8_192_000_000
    (tmp_path / "memory.max").write_text("4000000000\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    (tmp_path / "memory.stat").write_text("anon 2\ninactive_file 500000000\n")
    assert memory.free_ram() == 1_500_000_000
