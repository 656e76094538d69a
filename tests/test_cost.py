"""What a step costs, in tokens that the model processes and in the largest tensor. This is counted,
so it is the same on any computer. And the measurements of bench/ run."""

import json

import pytest
import step
import torch
from conftest import (
    PROMPTS,
    learning_config,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    run_script,
    sample,
)
from processes import ranks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

import main
from machinery import prompts, sampling
from machinery.sampling import CACHE_ROOM, RoomyLayer


def shapes_processed(model) -> list[tuple[int, int]]:
    """The shapes, (rows, time), of what the model processes from now on."""
    shapes = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, arguments, output: shapes.append(tuple(arguments[0].shape)))
    return shapes


def num_tokens(shapes: list[tuple[int, int]]) -> int:
    return sum(rows * time for rows, time in shapes)


PREFILL = (len(PROMPTS), max(map(len, PROMPTS)) - 1)  # each prompt once, without its last token


def test_sampling_processes_each_prompt_once_and_finished_answers_no_further(monkeypatch):
    monkeypatch.setattr(sampling, "TOKENS_PER_SLICE", 4)
    model = make_model()
    shapes = shapes_processed(model)

    answers = sample(model, PROMPTS, 16, training__max_new_gen_tokens=40)

    lengths = [answer.num_tokens for answer in answers]
    assert len(set(lengths)) > 5
    assert shapes[0] == PREFILL
    assert all(time == 1 for _, time in shapes[1:])
    # An answer stays to the end of its slice.
    assert sum(lengths) <= num_tokens(shapes[1:]) < sum(lengths) + 4 * len(lengths)


def test_learning_processes_each_prompt_once_a_micro_batch_and_pads_little(one_rank, monkeypatch):
    monkeypatch.setattr(prompts, "ROWS_PER_PASS", 4)
    answers = make_trajectories(48, longest=40)
    for i, answer in enumerate(answers):
        answer.question = main.Question({}, PROMPTS[i // 16])
        answer.advantage = 1.0
    model = make_model()
    shapes = shapes_processed(model)

    main.learn(
        make_policy(model, learning_config(training__tokens_per_micro_batch=10_000)), answers)

    useful = sum(answer.num_tokens for answer in answers)
    assert shapes[0] == PREFILL
    assert len(shapes) == 1 + 48 // 4
    assert useful <= num_tokens(shapes[1:]) < 1.1 * useful


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_logits_for_all_tokens_never_exist_together(one_rank, monkeypatch):
    vocabulary = 5000
    chunk = vocabulary * 40
    monkeypatch.setattr(main, "LOGITS_PER_CHUNK", chunk)
    answers = make_trajectories(32, longest=60)
    assert sum(answer.num_tokens for answer in answers) * vocabulary > 10 * chunk
    model = make_model(vocab_size=vocabulary)
    run = make_policy(model, learning_config(training__tokens_per_micro_batch=10**6))

    with LargestTensor() as largest:
        main.learn(run, answers)

    # The gradient of all weights is one tensor in DDP's bucket.
    assert largest.numel == max(chunk, model.num_parameters())


def test_the_kv_cache_is_copied_only_where_there_is_no_room_left():
    layer = DynamicLayer()
    layer.keys = torch.randn(2, 1, 5, 4)  # (rows, heads, time, width)
    layer.values = torch.randn(2, 1, 5, 4)
    roomy = RoomyLayer(layer)
    roomy.batch_select_indices(torch.tensor([1, 0, 1]))
    expected_keys = layer.keys[[1, 0, 1]]
    addresses = []
    for _ in range(3 * CACHE_ROOM):
        new = torch.randn(3, 1, 1, 4)
        expected_keys = torch.cat([expected_keys, new], dim=2)
        keys, values = roomy.update(new, -new)
        addresses.append((keys.data_ptr(), values.data_ptr()))

    assert torch.equal(keys, expected_keys)
    assert torch.equal(values[:, :, 5:], -expected_keys[:, :, 5:])
    assert roomy.get_seq_length() == 5 + 3 * CACHE_ROOM
    assert len(set(addresses)) == 3  # once in CACHE_ROOM tokens


@pytest.mark.mathematics
def test_plain_sampling_and_learning_do_the_same_work(monkeypatch):
    """What the bench compares with is right itself."""
    model = make_model(spread=0.25)
    greedy = {"sampling__top_k": 1, "training__max_new_gen_tokens": 12}
    expected = [answer.completion_ids for answer in sample(model, PROMPTS, 2, **greedy)]
    monkeypatch.setattr(main, "generate", step.plain_generate)

    plain = [answer.completion_ids for answer in sample(model, PROMPTS, 2, **greedy)]

    assert plain == expected
    learner = main.Policy(model, make_config(sampling__temperature=0.7))
    answers = make_trajectories(8)
    for ours, theirs in zip(learner(answers), step.plain_forward(learner, answers), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


FEW = ["training.max_steps=1", "training.num_samples_per_step=2", "data.num_validation=4",
       "training.max_new_gen_tokens=16", "training.k_best_of_n=[4,4]", "validation.best_of_n=2"]


@pytest.mark.parametrize("command", [
    ["step.py", "--steps", "1", "--endless", "--plain", "--shape", "small", *FEW],
    pytest.param(["estimators.py", "--questions", "4", "--answers", "8", "--batches", "0",
                  "--data", "{}/data.json", "--picture", "{}/picture.png",
                  "training.max_new_gen_tokens=64"], marks=pytest.mark.soak),
    pytest.param(["experiments.py", "--run", "divided by the mean (MaxRL)", "--seeds", "1",
                  "--out", "{}", "--data", "{}/data.json", "--picture", "{}/picture.png", *FEW],
                 marks=pytest.mark.soak),
    pytest.param(["variants.py", "sgd", "run.dir={}", *FEW], marks=pytest.mark.soak),
    pytest.param(["speedrun.py", "--seeds", "1", "--target", "1.0", *FEW],
                 marks=pytest.mark.soak),
], ids=lambda command: command[0])
def test_each_measurement_runs_and_ends_with_one_json_line(command, tmp_path):
    script, *arguments = [word.format(tmp_path) for word in command]

    result = ranks(1, run_script, f"bench/{script}", *arguments)

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])
    if "--picture" in command:
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
