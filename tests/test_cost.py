"""What a step costs, in tokens that the model reads and in the largest tensor, counted and so the
same on any machine."""

import json

import pytest
import torch
from conftest import (
    VOCABULARY,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    read_jsonl,
    run_script,
)
from processes import ROOT, ranks
from test_run import SHORT
from test_sampling import PROMPTS, sample
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

import main
from machinery import policy, sampling
from machinery.prompts import CACHE_ROOM, RoomyLayer


def tokens_read(model):
    """The shapes, (rows, time), of what the model reads from now on."""
    shapes = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, arguments, output: shapes.append(tuple(arguments[0].shape)))
    return shapes


def test_sampling_reads_each_prompt_once_and_finished_answers_no_further(monkeypatch):
    monkeypatch.setattr(sampling, "TOKENS_PER_SLICE", 4)
    model = make_model()
    shapes = tokens_read(model)
    trajectories = sample(model, PROMPTS, 16, training__max_new_gen_tokens=40)
    assert shapes[0] == (len(PROMPTS), max(map(len, PROMPTS)) - 1)
    lengths = [len(trajectory.completion_ids) for trajectory in trajectories]
    assert len(set(lengths)) > 5
    read = sum(rows * time for rows, time in shapes[1:])
    # an answer stays to the end of its slice
    assert sum(lengths) <= read < sum(lengths) + 4 * len(lengths)
    assert all(time == 1 for _, time in shapes[1:])


def test_learning_reads_each_prompt_once_a_micro_batch_and_pads_little(one_rank, monkeypatch):
    monkeypatch.setattr(policy, "ANSWERS_PER_PASS", 4)
    trajectories = [main.Trajectory(main.Question({}, PROMPTS[i // 16]), t.completion_ids, "",
                                    False, advantage=1.0)
                    for i, t in enumerate(make_trajectories(48, longest=40))]
    model = make_model()
    shapes = tokens_read(model)
    run = make_policy(model, make_config(model__precision="float32",
                                         training__tokens_per_micro_batch=10_000))
    main.policy_gradient(run, trajectories)
    assert shapes[0] == (len(PROMPTS), max(map(len, PROMPTS)) - 1)
    assert len(shapes) == 1 + 48 // 4
    useful = sum(len(trajectory.completion_ids) for trajectory in trajectories)
    assert useful <= sum(rows * time for rows, time in shapes[1:]) < 1.1 * useful


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        self.numel = max([self.numel, *(
            tensor.numel() for tensor in torch.utils._pytree.tree_leaves(result)
            if isinstance(tensor, torch.Tensor))])
        return result


def test_logits_for_all_tokens_never_exist_at_once(one_rank, monkeypatch):
    vocabulary, chunk = 5000, 5000 * 40
    monkeypatch.setattr(policy, "LOGITS_PER_CHUNK", chunk)
    trajectories = make_trajectories(32, longest=60)
    tokens = sum(len(t.completion_ids) for t in trajectories)
    model = make_model(vocab_size=vocabulary)
    assert tokens * vocabulary > 10 * chunk
    run = make_policy(model, make_config(model__precision="float32",
                                         training__tokens_per_micro_batch=10**6))
    with LargestTensor() as largest:
        main.policy_gradient(run, trajectories)
    # The weights' gradient, all in one in DDP's bucket, and a chunk are the largest.
    assert largest.numel == max(chunk, sum(parameter.numel() for parameter in model.parameters()))
    with LargestTensor() as largest:
        model(torch.tensor([trajectories[0].prompt_ids * 50])).logits.sum()
    assert largest.numel >= 50 * vocabulary  # it does see logits where they are


@pytest.mark.parametrize("rows", [[1, 0, 1], None])  # None: nobody has made room yet
def test_keys_and_values_are_not_copied_for_each_token(rows):
    """Only once in `CACHE_ROOM` tokens, where there is no room left."""
    held = DynamicLayer()
    held.keys, held.values = torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 4)
    before = expected = [held.keys.clone(), held.values.clone()]
    layer, places = RoomyLayer(held), []
    if rows:
        layer.batch_select_indices(torch.tensor(rows))
        expected = [each[rows] for each in expected]
    for _ in range(3 * CACHE_ROOM):
        new = [torch.randn(*expected[0].shape[:2], 1, 4) for _ in range(2)]
        keys, values = layer.update(*new)
        expected = [torch.cat(pair, dim=2) for pair in zip(expected, new)]
        assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
        places.append((keys.data_ptr(), values.data_ptr()))
    for which in (0, 1):  # keys move when they have to, and so do values
        moved = [t for t in range(1, 3 * CACHE_ROOM) if places[t][which] != places[t - 1][which]]
        assert moved == [CACHE_ROOM, 2 * CACHE_ROOM]
    assert layer.get_seq_length() == 5 + 3 * CACHE_ROOM
    assert torch.equal(held.keys, before[0]) and torch.equal(held.values, before[1])


@pytest.mark.parametrize("command", [
    ["step.py", "--steps", "1", "--endless", "--shape", "small", "training.num_samples_per_step=2",
     "training.k_best_of_n=[2,2]", "training.max_new_gen_tokens=16"],
    ["step.py", "--steps", "1", "--plain", "--shape", "small", "training.num_samples_per_step=2",
     "training.max_new_gen_tokens=16"],
    ["step.py", "--steps", "1", "--continuous", "--shape", "small",
     "training.num_samples_per_step=2", "training.k_best_of_n=[2,2]",
     "training.max_new_gen_tokens=16"],
    pytest.param(["memory.py", "--measure", "--shape", "small", "--prompt", "48",
                  "training.max_new_gen_tokens=64"], marks=pytest.mark.soak),
    pytest.param(["estimators.py", "--questions", "4", "--answers", "8", "--rounds", "1",
                  "--batches", "3", "training.max_new_gen_tokens=64",
                  "--data", "{}/data.json", "--picture", "{}/picture.png"], marks=pytest.mark.soak),
    pytest.param(["experiments.py", "--run", "over the mean (MaxRL)", "--seeds", "1", "2",
                  "--out", "{}", "--data", "{}/data.json", "--picture", "{}/picture.png",
                  "training.max_steps=1",
                  "training.max_new_gen_tokens=16", "training.num_samples_per_step=2",
                  "data.num_validation=4", "validation.best_of_n=2"], marks=pytest.mark.soak),
    pytest.param(["pass_at_k.py", "--model", "before=tiny/model", "--model", "after=tiny/model",
                  "--questions", "3", "--answers", "8", "--data", "{}/data.json",
                  "--picture", "{}/picture.png"], marks=pytest.mark.soak),
    pytest.param(["variants.py", "sgd", "training.learning_rate=1.0", "run.dir={}", "run.name=a",
                  *SHORT], marks=pytest.mark.soak),
    pytest.param(["refill.py", "--seeds", "1", "--steps", "1", "--tried", "400", "--out", "{}",
                  "--data", "{}/data.json", "data.num_validation=4",
                  "training.max_new_gen_tokens=16"], marks=pytest.mark.soak),
    pytest.param(["speedrun.py", "--seeds", "1", "--target", "1.0", "validation.every=2",
                  "training.max_steps=3", "training.max_new_gen_tokens=16",
                  "training.num_samples_per_step=2", "data.num_validation=4"],
                 marks=pytest.mark.soak),
    ["sharding.py", "--memory", "{}", "--shape", "small", "training.shard=true", *SHORT],
    pytest.param(["sharding.py", "--steps", "1", "--shape", "small", *SHORT],
                 marks=pytest.mark.soak),
    ["sharding.py", "--traffic", "--shape", "qwen2.5-7b", "--ranks", "4"],
    pytest.param(["vocabulary.py", "--rows", "2", "--tokens", "16", "--shape", "small"],
                 marks=pytest.mark.soak),
])
def test_each_measurement_runs_and_ends_with_one_json_line(command, tmp_path):
    result = ranks(1, run_script, *(word.format(tmp_path) for word in (f"bench/{command[0]}",
                                                                       *command[1:])))
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    if command[0] == "step.py":
        phases = answer["sample"] + answer["score"] + answer["learn"]
        assert 0 < phases <= 1.1 * answer["step"]
        assert (answer["plain"], answer["continuous"]) == (
            "--plain" in command, "--continuous" in command)
        assert (0 < answer["sample_share_of_ceiling"] < 1
                and 0 < answer["learn_share_of_ceiling"] < 1)
    elif command[0] == "memory.py":
        assert answer["forecast_gb"]["learning"] == pytest.approx(answer["measured_gb"]["learning"],
                                                                  rel=0.4)
    elif command[0] == "estimators.py":
        kept = json.loads((tmp_path / "data.json").read_text())
        assert [*kept] == ["first"] and "Dr. GRPO, G = 8" in answer["first"]
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    elif command[0] == "experiments.py":
        kept = json.loads((tmp_path / "data.json").read_text())
        assert len(kept) == 4 and all(
            [entry["step"] for entry in record["curve"]] == [0, 1] for record in kept.values())
        assert len(answer["the mean lifts the hardest"]) == 2
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    elif command[0] == "pass_at_k.py":
        kept = json.loads((tmp_path / "data.json").read_text())
        assert kept["before"] == kept["after"] and len(kept["before"]["right"]) == 3
        assert len(answer["after"]) == 4 and answer["after"] == sorted(answer["after"])
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    elif command[0] == "variants.py":
        last = read_jsonl(tmp_path / "a" / "metrics.jsonl")[-1]
        assert answer["steps"] == last["step"] == 3 and not list(tmp_path.glob("a/checkpoints/*"))
    elif command[0] == "refill.py":
        kept = json.loads((tmp_path / "data.json").read_text())
        assert answer["runs"] == len(kept) == 10
        assert all([entry["step"] for entry in curve] == [0, 1] for curve in kept.values())
    elif command[0] == "speedrun.py":
        steps, seconds, _ = zip(*answer["seeds"]["1"]["ours"]["curve"])
        assert steps == (0, 2, 3) and 0 == seconds[0] < seconds[1] < seconds[2]
    elif "--traffic" in command:
        weights, embeddings = 7.6156e9 * 3 / 4, 152064 * 3584 * 3 / 4
        assert answer["DistributedDataParallel"] == pytest.approx(8 * weights / 1e9, rel=1e-3)
        # an embedding's gradient takes no weights
        assert answer["sharded, weights"] == pytest.approx(
            16 * 4 * (2 * weights - embeddings) / 1e9, rel=1e-3)
    elif command[0] == "sharding.py":
        assert answer["step_ratio"] > 0 if "--steps" in command else answer["peak_gb"]["learn"] > 0
    else:
        assert answer["chunked"]["gradient_error"] < 1e-4 and VOCABULARY < 8192


@pytest.mark.mathematics
def test_plain_sampling_and_learning_do_the_same_work(monkeypatch):
    """What the bench compares with is right itself: greedy answers are the same, and so are the
    log-probabilities."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    import step

    model = make_model(spread=0.25)
    settings = {"sampling__top_k": 1, "training__max_new_gen_tokens": 12}
    expected = [t.completion_ids for t in sample(model, PROMPTS, 2, **settings)]
    monkeypatch.setattr(main, "generate", step.plain_generate)
    assert [t.completion_ids for t in sample(model, PROMPTS, 2, **settings)] == expected
    answers = make_trajectories(8)
    learner = main.Policy(model, make_config(model__precision="float32",
                                             sampling__temperature=0.7))
    for ours, plain in zip(learner(answers), step.plain_forward(learner, answers), strict=True):
        assert torch.allclose(ours, plain, atol=1e-5)
