"""What is sampled is what the policy says: the right distribution, the right continuation, the
right stop."""

import functools
import sys
from types import SimpleNamespace

import conftest
import pytest
import torch
from conftest import (
    ARCHITECTURES,
    SILENT_LOG,
    VOCABULARY,
    clear_choices,
    gradient,
    make_config,
    make_policy,
    make_trajectories,
    plain_loss,
    relative_error,
)
from processes import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import main
from machinery import metrics, sampling
from machinery.errors import UserError
from machinery.prompts import CACHE_ROOM
from machinery.ranks import random_stream
from machinery.tasks import Questions, encode_prompt

sys.path.append(str(ROOT / "bench"))
import continuous

pytestmark = pytest.mark.mathematics
make_model = functools.partial(conftest.make_model, spread=0.25)  # with clear choices
# ragged, so that two of them are padded
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [3, 4], [2, 9, 2, 9, 2]]


class Tokenizer:
    """As much of a tokenizer as sampling uses, over the random models' vocabulary."""

    def __init__(self, eos: int):
        self.eos_token_id = eos

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def sampling_run(model, eos=0, **overrides):
    """What `sample` uses of a run."""
    config = make_config(**{"model__precision": "float32", **overrides})
    tokenizer = Tokenizer(eos)
    return SimpleNamespace(config=config, tokenizer=tokenizer, log=SILENT_LOG,
                           stop_ids=main.find_stop_ids(model, tokenizer),
                           sampler=main.make_sampler(model, config))


def sample_from(run, prompts, num_samples):
    """The answers of all groups, one after the other."""
    questions = [main.Question({}, prompt) for prompt in prompts]
    groups = main.sample(run, questions, num_samples)
    for question, group in zip(questions, groups, strict=True):
        assert len(group) == num_samples and all(each.question is question for each in group)
    return [answer for group in groups for answer in group]


def sample(model, prompts, num_samples, **how):
    return sample_from(sampling_run(model, **how), prompts, num_samples)


@pytest.fixture
def engine(request, monkeypatch):
    """What answers are sampled with: `main.generate`, or what bench/continuous.py puts there."""
    if request.param == "continuous":
        monkeypatch.setattr(main, "generate", continuous.generate)
    return request.param


BOTH_ENGINES = pytest.mark.parametrize("engine", ["generate", "continuous"], indirect=True)


@BOTH_ENGINES
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_samples_follow_the_models_softmax_whatever_its_generation_config_says(
        engine, temperature, tmp_path):
    model = make_model()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.3, top_k=1, top_p=0.5,
                                               min_p=0.3, typical_p=0.5, repetition_penalty=2.0,
                                               no_repeat_ngram_size=1, eos_token_id=0)
    # a call of the other costs half a second before it begins, and the square of its rows
    num_samples, at_once = {"generate": (6000, 6000), "continuous": (1500, 500)}[engine]
    trajectories = sample(model, [PROMPTS[0]], num_samples, sampling__temperature=temperature,
                          training__max_new_gen_tokens=2, sampling__max_rows=at_once)
    # Every pair of tokens, the second after the first: a repetition penalty would show in the
    # second only.
    expected = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for first in range(VOCABULARY):
        logits = (model(torch.tensor([PROMPTS[0] + [first]])).logits[0, -2:].detach().double()
                  / temperature)
        expected[first] = torch.softmax(logits[0], -1)[first] * torch.softmax(logits[1], -1)
    # token 0 ends the answer
    expected[0] = torch.tensor([expected[0].sum()] + [0.0] * (VOCABULARY - 1))
    observed = torch.zeros_like(expected)
    for trajectory in trajectories:
        first, second = (trajectory.completion_ids + [0])[:2]
        observed[first, second] += 1
    common = expected * num_samples >= 5  # the rest together as one cell
    cells = [(observed[common], expected[common] * num_samples),
             (observed[~common].sum()[None], expected[~common].sum()[None] * num_samples)]
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in cells)
    freedom = int(common.sum())
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)

    assert model.generation_config.temperature == 0.3
    model.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).repetition_penalty == 2.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
# tokens that the cache has room for, and more
@pytest.mark.parametrize("at_once", [5, CACHE_ROOM + 4])
def test_prefix_sharing_padding_and_leaving_early_change_no_token(
        architecture, at_once, monkeypatch):
    """Greedy answers (top_k 1) to ragged prompts are what one pass without padding or cache would
    choose."""
    monkeypatch.setattr(sampling, "TOKENS_PER_SLICE", at_once)
    model, L = make_model(architecture), 40
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    prompts = [*PROMPTS, *([token] * 3 for token in range(18, 24))]

    def answers(stop, max_rows):
        trajectories = sample(model, prompts, 3, eos=stop, sampling__top_k=1,
                              training__max_new_gen_tokens=L, sampling__max_rows=max_rows)
        for trajectory in trajectories:
            prompt, completion = trajectory.prompt_ids, trajectory.completion_ids
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:-1]
            assert clear_choices(logits) == completion
            assert stop not in completion[:-1]
            assert trajectory.is_truncated == (completion[-1] != stop)
            assert len(completion) == L if trajectory.is_truncated else len(completion) <= L
        assert ([t.prompt_ids for t in trajectories]
                == [prompt for prompt in prompts for _ in range(3)])
        return [t.completion_ids for t in trajectories]

    endless = answers(1000, 100)  # no such token: all run to the limit
    stop = next(ids[i] for ids in endless for i in range(3, 12)
                if 0 < sum(ids[i] in other for other in endless) < len(endless))
    ended = answers(stop, 100)
    assert len({len(ids) for ids in ended}) > 1  # some left early while others went on
    assert answers(stop, 5) == ended  # five rows a call: groups are split between calls


def test_sampling_stops_at_any_of_the_models_stop_tokens_and_keeps_the_one_sampled():
    model = make_model()
    model.generation_config.eos_token_id = [3, 4]
    trajectories = sample(model, PROMPTS, 40, eos=5, training__max_new_gen_tokens=30)
    stops = {0, 3, 4, 5}  # 0 comes from the model's own config
    assert {t.completion_ids[-1] for t in trajectories if not t.is_truncated} == stops
    for trajectory in trajectories:
        assert not stops & set(trajectory.completion_ids[:-1])
        ids = trajectory.completion_ids
        text_ids = ids if trajectory.is_truncated else ids[:-1]
        assert trajectory.completion == " ".join(map(str, text_ids))


def test_the_stop_token_is_trained_on_and_padding_is_not_where_both_are_one_id(one_rank):
    """Pad, end of sequence and end of text are all 0 here, and the learner pads with 0 too."""
    model = make_model("gpt2", torch.float64)
    trajectories = sample(model, PROMPTS, 8, eos=0, training__max_new_gen_tokens=30)
    assert any(not t.is_truncated for t in trajectories)
    assert len({len(t.completion_ids) for t in trajectories}) > 3
    for i, trajectory in enumerate(trajectories):
        trajectory.advantage = float(not trajectory.is_truncated) * (1 + i % 3)
    config = make_config(training__num_samples_per_step=3, training__max_new_gen_tokens=30,
                         training__max_grad_norm=None, model__precision="float32")
    _, targets = main.states_before_tokens(model, trajectories)
    completions = [t.completion_ids for t in trajectories]
    assert targets.tolist() == [token for completion in completions for token in completion]

    main.policy_gradient(make_policy(model, config), trajectories)
    reference = make_model("gpt2", torch.float64)
    plain_loss(reference, trajectories, 3 * 8, 30, 1.0).backward()
    assert relative_error(gradient(model), gradient(reference)) < 1e-11
    # the same without the stop tokens is another gradient: they do count
    for trajectory in trajectories:
        trajectory.completion_ids = [
            token for token in trajectory.completion_ids if token != 0] or [1]
    reference = make_model("gpt2", torch.float64)
    plain_loss(reference, trajectories, 3 * 8, 30, 1.0).backward()
    assert relative_error(gradient(model), gradient(reference)) > 1e-3


def test_sampling_is_repeated_by_the_same_seed_step_and_rank_and_by_nothing_else():
    def draw(seed, step, purpose):
        torch.manual_seed(random_stream(seed, step, purpose).getrandbits(63))
        return [t.completion_ids
                for t in sample(model, PROMPTS[:1], 4, training__max_new_gen_tokens=8)]
    model = make_model()
    assert draw(0, 1, "train") == draw(0, 1, "train")
    others = [draw(1, 1, "train"), draw(0, 2, "train"), draw(0, 1, "evaluate")]
    assert all(other != draw(0, 1, "train") for other in others)


class Sampled(Exception):
    """Holds the seed of PyTorch's random numbers."""


@pytest.mark.parametrize("phase", [main.training_step, main.evaluate])
def test_a_step_and_an_evaluation_sample_with_numbers_of_their_own(phase, monkeypatch):
    def sample(run, questions, group_size):
        raise Sampled(torch.initial_seed())

    def seed(step, **keys):
        torch.seed()
        questions = [main.Question({}, [number]) for number in range(20)]
        run = SimpleNamespace(config=make_config(**keys), step=step, log=SILENT_LOG,
                              training_questions=questions, validation_questions=questions)
        with pytest.raises(Sampled) as raised:
            phase(run)
        return raised.value.args[0]

    monkeypatch.setattr(main, "sample", sample)
    assert seed(1) == seed(1)
    other_phase = main.random_stream(0, 1, "another phase").getrandbits(63)
    seeds = {seed(1), seed(2), seed(1, training__seed=1), other_phase}
    monkeypatch.setattr("machinery.ranks.RANK", 1)
    assert len(seeds | {seed(1)}) == 5


def test_a_prompt_is_encoded_when_it_is_first_asked_for_and_then_kept():
    encoded = []

    def encode(row):
        encoded.append(row["number"])
        return [row["number"]]

    questions = Questions([{"number": number} for number in range(6)], encode)
    assert len(questions) == 6 and encoded == []
    assert [question.prompt_ids for question in questions[1::3]] == [[1], [4]]
    assert questions[4] is questions[4] and questions[4].row is questions.rows[4]
    assert encoded == [1, 4]
    assert [question.row["number"] for question in questions] == [0, 1, 2, 3, 4, 5]
    assert sorted(encoded) == [0, 1, 2, 3, 4, 5]


def test_sampling_works_with_gradient_checkpointing_on_and_learning_is_in_train_mode_all_the_same(
        one_rank):
    model = make_model().train()
    settings = model.generation_config.to_dict()
    torch.manual_seed(0)
    plain = [t.completion_ids for t in sample(model, PROMPTS, 2, training__max_new_gen_tokens=12)]
    model.activation_checkpointing_enable()
    torch.manual_seed(0)
    assert [t.completion_ids
            for t in sample(model, PROMPTS, 2, training__max_new_gen_tokens=12)] == plain
    assert model.generation_config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    # what has the activations of each layer computed again
    modes = []
    model.base_model.register_forward_pre_hook(
        lambda *_: modes.append({module.training for module in model.modules()}))
    main.policy_gradient(make_policy(model, make_config(model__precision="float32")),
                         make_trajectories(4))
    assert modes and all(mode == {True} for mode in modes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_may_be_a_single_token(architecture):
    model = make_model(architecture)
    trajectory, = sample(model, [[5]], 1, eos=1000, sampling__top_k=1,
                         training__max_new_gen_tokens=6)
    logits = model(torch.tensor([[5, *trajectory.completion_ids]])).logits[0]
    assert clear_choices(logits[:-1]) == trajectory.completion_ids
    logprobs, _ = main.Policy(model, make_config(model__precision="float32"))([trajectory])
    assert torch.allclose(logprobs, logits[:-1].log_softmax(-1).gather(
        -1, torch.tensor(trajectory.completion_ids)[:, None])[:, 0], atol=1e-5)


@BOTH_ENGINES
def test_each_call_samples_from_the_weights_as_they_are_and_leaves_the_model_as_it_was(engine):
    model = make_model().train()
    settings = model.generation_config.to_dict()
    run = sampling_run(model, sampling__top_k=1, training__max_new_gen_tokens=20)

    def answers():
        main.refresh_sampler(run.sampler, model)  # as after a step: here there is nothing to copy
        return [t.completion_ids for t in sample_from(run, PROMPTS, 2)]

    def greedy(prompt):
        ids = list(prompt)
        for _ in range(20):
            ids += clear_choices(model(torch.tensor([ids])).logits[0, -1:])
            if ids[-1] == 0:
                break
        return ids[len(prompt):]

    before = answers()
    with torch.no_grad():  # as an optimizer step does, in place
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    after = answers()
    assert after != before and after == [greedy(prompt) for prompt in PROMPTS for _ in range(2)]
    assert (model.generation_config.to_dict() == settings
            and model.config._attn_implementation == "sdpa")
    # nothing of inference mode is left behind in it
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()


def test_continuous_batching_repeats_itself_with_the_seed_and_only_with_it(monkeypatch):
    def draw(seed):
        torch.manual_seed(random_stream(seed, 1, "train").getrandbits(63))
        answers = sample(model, PROMPTS, 3, training__max_new_gen_tokens=10)
        return [answer.completion_ids for answer in answers]
    monkeypatch.setattr(main, "generate", continuous.generate)
    model = make_model()
    assert draw(0) == draw(0) != draw(1)


def test_an_answer_that_continuous_batching_has_lost_stops_the_run(monkeypatch):
    model = make_model()
    complete = type(model).generate_batch
    monkeypatch.setattr(type(model), "generate_batch",
                        lambda *arguments: dict(list(complete(*arguments).items())[1:]))
    monkeypatch.setattr(main, "generate", continuous.generate)
    with pytest.raises(UserError, match="continuous batching returned 5 of 6 answers"):
        sample(model, PROMPTS, 2, training__max_new_gen_tokens=4)


def test_the_chat_style_puts_the_same_question_through_the_template():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    task = main.load_task(make_config())
    row = {"prompt": task.generate_prompt([3, 7, 25], 88)}
    base = tokenizer.decode(encode_prompt(row, task, tokenizer, make_config()))
    assert base == row["prompt"] and base.endswith("<think>")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]")
    chat = tokenizer.decode(
        encode_prompt(row, task, tokenizer, make_config(data__prompt_style="chat")))
    assert chat == (f"[system]{task.SYSTEM_MESSAGE}\n"
                    f"[user]{base.removesuffix('<think>').strip()}\n[assistant]<think>")


def test_the_embedded_model_loads_as_any_other():
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "model")
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 1_800_000


class CountingLog:
    """Counts by how much the bar is to move."""

    def __init__(self):
        self.done = 0

    def advance(self, count):
        self.done += count


@BOTH_ENGINES
def test_the_bar_of_sampling_ends_at_its_total(engine):
    """Also where answers are truncated, and where they are sampled in several calls."""
    run = sampling_run(make_model(), training__max_new_gen_tokens=3, sampling__max_rows=10)
    run.log = CountingLog()
    answers = sample_from(run, PROMPTS, 8)
    assert any(answer.is_truncated for answer in answers)
    assert not all(answer.is_truncated for answer in answers)
    assert run.log.done == len(answers)


def test_the_bar_of_learning_ends_at_its_total(one_rank, monkeypatch):
    """Also where a rank with nothing to learn makes a backward pass all the same."""
    trajectories = make_trajectories(12)
    for trajectory in trajectories:
        trajectory.advantage = 0.0
    run = make_policy(make_model(), make_config(model__precision="float32"))

    def sum_over_ranks(values):  # as if another rank had something to learn
        return {name: value + 1.0 for name, value in values.items()}

    for module in (main, metrics):
        monkeypatch.setattr(module, "sum_over_ranks", sum_over_ranks)
    for learned in (0, 5):
        for trajectory in trajectories[:learned]:
            trajectory.advantage = 1.0
        run.log = CountingLog()
        main.policy_gradient(run, trajectories)
        assert run.log.done == len(trajectories)


def test_a_sampler_of_another_shape_is_never_refreshed_in_part():
    model, sampler = make_model(), make_model()
    sampler.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="shorter|longer"):
        main.refresh_sampler(sampler, model)
