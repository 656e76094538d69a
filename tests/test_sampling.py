"""What is sampled is what the policy says: its distribution, its continuation, its stop."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ARCHITECTURES,
    BOUND,
    PROMPTS,
    VOCABULARY,
    clear_choices,
    gradient,
    learning_config,
    made_up_run,
    make_config,
    make_model,
    make_policy,
    plain_loss,
    relative_error,
    sample,
    sample_from,
    sampling_run,
)
from processes import ROOT
from transformers import AutoTokenizer, GenerationConfig

import main
from machinery import sampling
from machinery.errors import UserError
from machinery.tasks import Question, check_prompt_lengths, encode_prompt, load_task

mathematics = pytest.mark.mathematics
make_clear_model = functools.partial(make_model, spread=0.25)  # It has clear choices.
NO_TOKEN = 1000  # No model here has it. As the stop token it lets no answer end.


# ---------------------------------------------------------------- the distribution

def probabilities_of_pairs(model, temperature: float) -> torch.Tensor:
    """Those of the first two tokens after PROMPTS[0], (first, second). After a 0 comes a 0."""
    pairs = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for first in range(VOCABULARY):
        logits = model(torch.tensor([PROMPTS[0] + [first]])).logits[0, -2:].double()
        of_first, of_second = torch.softmax(logits / temperature, dim=-1).detach()
        if first == 0:
            pairs[0, 0] = of_first[0]
        else:
            pairs[first] = of_first[first] * of_second
    return pairs


@mathematics
@pytest.mark.parametrize("draws", ["generate's own", "fast"])
def test_samples_follow_the_models_softmax_whatever_its_generation_config_says(draws, monkeypatch):
    if draws == "fast":
        monkeypatch.setattr(sampling, "LARGE_VOCABULARY", VOCABULARY)
    model, temperature, num_samples = make_clear_model(), 0.6, 6000
    # A repetition penalty, for example, would show in the second token.
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=1, top_p=0.5, min_p=0.3, typical_p=0.5,
        repetition_penalty=2.0, no_repeat_ngram_size=1)

    answers = sample(model, [PROMPTS[0]], num_samples, sampling__temperature=temperature,
                     training__max_new_gen_tokens=2, sampling__max_rows=num_samples)

    observed = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for answer in answers:
        first, second = (answer.completion_ids + [0])[:2]
        observed[first, second] += 1
    # Pearson's chi-squared test. Rare pairs are one cell together.
    expected = probabilities_of_pairs(model, temperature) * num_samples
    common = expected >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert freedom > 20
    standard_deviation = (2 * freedom) ** 0.5  # of chi-squared, whose mean is `freedom`
    assert statistic < freedom + 4 * standard_deviation
    assert model.generation_config.temperature == 0.3  # It will be saved with the model.


def test_what_is_sampled_depends_on_seed_step_rank_and_phase_alone(monkeypatch):
    def end(*arguments):
        raise InterruptedError

    def seeds(step, **keys):
        """PyTorch's seed when a training step samples, and when an evaluation does."""
        found = []
        for phase in (main.training_step, main.evaluate):
            run = made_up_run(config=make_config(**keys), step=step, training_rows=rows,
                              validation_rows=rows)
            torch.seed()
            with pytest.raises(InterruptedError):
                phase(run)
            found.append(torch.initial_seed())
        return found

    rows = [{} for _ in range(20)]
    monkeypatch.setattr(main, "make_question", lambda run, row: Question(row, [0]))
    monkeypatch.setattr(main, "sample", end)
    assert seeds(1) == seeds(1)
    different = [*seeds(1), *seeds(2), *seeds(1, training__seed=1)]
    monkeypatch.setattr("machinery.ranks.RANK", 1)
    different += seeds(1)
    assert len(set(different)) == 8


# ---------------------------------------------------------------- the tokens

def greedy(model, prompt: list[int], length: int, stop: int) -> list[int]:
    """The likeliest tokens by passes without padding or cache."""
    ids = list(prompt)
    for _ in range(length):
        ids += clear_choices(model(torch.tensor([ids])).logits[0, -1:])
        if ids[-1] == stop:
            break
    return ids[len(prompt):]


def greedy_samples(model, prompts, stop, max_rows=100) -> list[list[int]]:
    """Sampling as main.py does it, of nothing but the likeliest token."""
    answers = sample(model, prompts, 3, eos=stop, sampling__top_k=1, sampling__max_rows=max_rows,
                     training__max_new_gen_tokens=40)
    return [answer.completion_ids for answer in answers]


SLICES = [(name, 5) for name in ARCHITECTURES]
SLICES.append(("qwen2", sampling.CACHE_ROOM + 4))  # more tokens than the cache has room for


@mathematics
@pytest.mark.parametrize(("architecture", "tokens_per_slice"), SLICES)
def test_prefix_sharing_padding_and_leaving_early_change_no_token(
        architecture, tokens_per_slice, monkeypatch):
    monkeypatch.setattr(sampling, "TOKENS_PER_SLICE", tokens_per_slice)
    model = make_clear_model(architecture)
    # The model's own stop token would end answers too.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    more_prompts = [[token] * 3 for token in range(18, VOCABULARY)]  # for more different lengths
    prompts = PROMPTS + more_prompts
    endless = greedy_samples(model, prompts, NO_TOKEN)
    # The stop token is one that some answers have early, but not at once, and others do not have.
    early = [token for answer in endless for token in answer[3:12]]
    stop = next(token for token in early if not all(token in answer for answer in endless))
    expected = []
    for prompt in prompts:
        expected += [greedy(model, prompt, 40, stop)] * 3
    assert len({len(ids) for ids in expected}) > 1  # Some leave while others continue.

    assert greedy_samples(model, prompts, stop) == expected
    # Five rows a call. So groups are split between calls.
    assert greedy_samples(model, prompts, stop, max_rows=5) == expected
    # All prompts begin with the same text, and go on for different lengths.
    beginning = list(range(2, 18))
    assert greedy_samples(model, [beginning + prompt for prompt in PROMPTS], NO_TOKEN) == [
        greedy(model, beginning + prompt, 40, NO_TOKEN) for prompt in PROMPTS for _ in range(3)]
    # The shortest prompt that there can be, with no longer one beside it.
    assert greedy_samples(model, [[5]], stop) == [greedy(model, [5], 40, stop)] * 3


def test_settings_that_would_count_anew_in_each_slice_are_refused():
    settings = GenerationConfig(do_sample=True, min_new_tokens=24, eos_token_id=[0])

    with pytest.raises(UserError, match="sets min_new_tokens"):
        sampling.generate(make_clear_model(), PROMPTS, settings, lambda num_ended: None)


# ---------------------------------------------------------------- stop tokens

@mathematics
def test_an_answer_ends_with_any_of_the_models_stop_tokens_or_is_truncated():
    stops = {0, 3, 4, 5}  # 0 is in the model's config, and 5 is the tokenizer's.
    model = make_clear_model()
    model.generation_config.eos_token_id = [3, 4]

    answers = sample(model, PROMPTS, 200, eos=5, training__max_new_gen_tokens=6)

    assert stops < {answer.completion_ids[-1] for answer in answers}
    lengths_of_ended = set()
    for answer in answers:
        *before, last = answer.completion_ids
        assert not stops & set(before)
        assert answer.is_truncated == (last not in stops)
        text_ids = answer.completion_ids if answer.is_truncated else before
        assert answer.completion == " ".join(map(str, text_ids))
        if answer.is_truncated:
            assert answer.num_tokens == 6
        else:
            lengths_of_ended.add(answer.num_tokens)
    assert max(lengths_of_ended) == 6  # with the stop token in the last place


@mathematics
def test_the_stop_token_is_learned_and_padding_is_not_where_both_are_one_id(one_rank):
    """The stop token is 0 here, and the learner pads with 0 too."""
    max_tokens = 30
    model = make_clear_model("gpt2", torch.float64)
    answers = sample(model, PROMPTS, 8, eos=0, training__max_new_gen_tokens=max_tokens)
    assert len({answer.num_tokens for answer in answers}) > 3
    for answer in answers:
        # Nothing is learned from truncated answers, which have no stop token.
        answer.advantage = 0.0 if answer.is_truncated else 1.0
    reference = make_clear_model("gpt2", torch.float64)
    plain_loss(reference, answers, B=len(answers), L=max_tokens, temperature=1.0).backward()

    config = learning_config(training__max_new_gen_tokens=max_tokens, sampling__temperature=1.0)
    main.learn(make_policy(model, config), answers)

    assert relative_error(gradient(model), gradient(reference)) < BOUND[torch.float64]


# ---------------------------------------------------------------- prompts

def test_only_prompts_that_might_be_too_long_are_encoded_when_a_run_starts():
    """Otherwise a run with a large data set would start late."""
    encoded = []

    def num_tokens(row):
        encoded.append(row["prompt"][0])
        return len(row["prompt"]) // 2

    rows = [{"prompt": letter * length} for letter, length in zip("abcd", (40, 190, 250, 200))]

    check_prompt_lengths(rows, num_tokens, 256, make_config(training__max_new_gen_tokens=20))

    assert encoded == ["a", "c"]  # The first one shows what a template adds.


TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}OPENING{% endif %}")


@pytest.mark.parametrize(("opening", "end"), [
    ("[assistant]", "[assistant]<think>"), ("[assistant]<think>\n", "[assistant]<think>\n")],
    ids=["the template does not open the thinking", "it does"])
def test_the_chat_style_puts_the_same_question_through_the_template_and_opens_the_thinking_once(
        opening, end):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    task = load_task(make_config())
    row = {"prompt": task.generate_prompt([3, 7, 25], 88)}
    base = tokenizer.decode(encode_prompt(row, task, tokenizer, make_config()))
    tokenizer.chat_template = TEMPLATE.replace("OPENING", opening)

    in_chat = make_config(data__prompt_style="chat")
    chat = tokenizer.decode(encode_prompt(row, task, tokenizer, in_chat))

    assert base == row["prompt"]
    assert base.endswith("<think>")
    question = base.removesuffix("<think>").strip()
    assert chat == f"[system]{task.SYSTEM_MESSAGE}\n[user]{question}\n{end}"


def test_a_prompt_without_tokens_is_an_error():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    config = make_config()

    with pytest.raises(UserError, match="the prompt '' has no tokens"):
        encode_prompt({"prompt": ""}, load_task(config), tokenizer, config)


def test_the_bar_of_sampling_ends_at_its_total():
    """Also where some answers are truncated, and where they are sampled in several calls."""
    run = sampling_run(make_clear_model(), training__max_new_gen_tokens=3, sampling__max_rows=10)
    totals, done = [], []
    run.log = SimpleNamespace(counter=lambda total: totals.append(total) or done.append)

    answers = sample_from(run, PROMPTS, 8)

    assert {answer.is_truncated for answer in answers} == {False, True}
    assert totals == [sum(done)] == [len(answers)]
