"""What a run measures and says of its first step: the numbers are right, a healthy run is called
healthy, and each illness is named. An ill run ends without an error, and learns nothing."""

import dataclasses
import json
import math
import re
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHANGE,
    GROUP,
    PROMPTS,
    QUESTIONS,
    SMALL,
    TEMPERATURE,
    as_numbers,
    learning_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    read_jsonl,
    sample_from,
    sampling_run,
    start,
    start_of,
)
from processes import ranks

import main
from machinery.errors import UserError, errors_of_phase
from machinery.metrics import (
    PHASES,
    change_metrics,
    look_at_first_step,
    sampler_metrics,
    sampling_metrics,
)
from machinery.ranks import RANK, WORLD_SIZE, end_process, join, leave_group
from machinery.settings import KEYS

KL = {"training__kl_beta": 0.04}
MASK = {"training__mask_truncated": True}
TWICE = {"training__updates_per_batch": 2, "training__clip": [0.2, 0.28]}
TINY_RATE = 3e-7  # Some tokens then change by more than what counts as moved, and some by less.
# Both sides compute in float64. That differs by 1e-15 in a token's change of about 1e-6.
NEAR = {"rel": 1e-5, "nan_ok": True}
GAP_LIMIT = 0.005  # From here on, `sampler_gap` is a bad sign.


# ---------------------------------------------------------------- how log pi has changed

def update(trajectories, **overrides):
    """Returns the model after the updates on one batch, by plain gradient descent, what is measured
    of their change, and of the last update."""
    config = learning_config(training__tokens_per_micro_batch=60,
                             training__learning_rate=TINY_RATE, **overrides)
    model = make_model("gpt2", torch.float64)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    if config.training.kl_beta:
        run.reference = main.Policy(main.make_reference(start_of(model), config), config)
    answers = [dataclasses.replace(trajectory) for trajectory in trajectories]
    metrics = main.learn(run, answers)[-1]
    return model, change_metrics(run.policy.module, answers, config.training), metrics


def plain_change(model, trajectories, mask_truncated=False):
    """The same in plain loops, from the logits of the model before and after."""
    start = make_model("gpt2", torch.float64)
    before = as_numbers(plain_logprobs(start, trajectories, TEMPERATURE))
    after = as_numbers(plain_logprobs(model, trajectories, TEMPERATURE))
    rewarded, punished = [], []  # how much the log pi of each token has changed
    for trajectory, old, new in zip(trajectories, before, after, strict=True):
        if mask_truncated and trajectory.is_truncated:
            continue
        for old_logprob, new_logprob in zip(old, new, strict=True):
            if trajectory.advantage > 0:
                rewarded.append(new_logprob - old_logprob)
            if trajectory.advantage < 0:
                punished.append(new_logprob - old_logprob)
    as_meant = [change for change in rewarded if change > 0]
    as_meant += [change for change in punished if change < 0]
    moved = [change for change in rewarded + punished if abs(change) > 1e-6]
    return {"moved": len(moved) / len(rewarded + punished),
            "change_as_meant": sum(map(abs, as_meant)) / sum(map(abs, rewarded + punished)),
            "change_rewarded": fmean(rewarded), "change_punished": fmean(punished)}


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, MASK, KL, {**TWICE, **MASK, **KL}], ids=str)
def test_the_change_of_log_pi_is_that_from_the_models_logits_before_and_after(keys, one_rank):
    """Of answers of ragged lengths, from some of which nothing is learned."""
    trajectories = make_trajectories(QUESTIONS * GROUP)

    model, measured, _ = update(trajectories, **keys)

    expected = plain_change(model, trajectories, mask_truncated=keys.keys() >= MASK.keys())
    assert measured == pytest.approx(expected, **NEAR)
    # This batch tells the shares apart: none is 0 or 1, and all differ.
    shares = [expected[name] for name in ("moved", "change_as_meant")]
    assert all(0.1 < share < 0.97 for share in shares) and len(set(shares)) == 2


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, KL], ids=str)
def test_where_nothing_is_learned_from_an_answer_there_is_no_number_for_a_change(keys, one_rank):
    """Also where the KL term alone has changed the model."""
    trajectories = [dataclasses.replace(trajectory, advantage=0.0)
                    for trajectory in make_trajectories(8)]

    _, measured, metrics = update(trajectories, **keys)

    assert metrics["updated"] == len(keys)
    assert measured == pytest.approx(dict.fromkeys(CHANGE, math.nan), nan_ok=True)


# ---------------------------------------------------------------- the sampler and the policy

def plain_gap(model, temperature, answers):
    """What `sampler_gap` is, in plain loops: how far the mean of -log pi - entropy is from 0, less
    four standard errors."""
    excess = []
    for answer in answers:
        prompt, completion = answer.prompt_ids, answer.completion_ids
        logits = model(torch.tensor([prompt + completion])).logits[0].detach().double()
        for t, token in enumerate(completion):
            pi = torch.softmax(logits[len(prompt) + t - 1] / temperature, -1)
            entropy = sum(-p * math.log(p) for p in pi.tolist())
            excess.append(-math.log(pi[token]) - entropy)
    standard_error = math.sqrt(sum(value ** 2 for value in excess)) / len(excess)
    return max(0.0, abs(fmean(excess)) - 4 * standard_error)


def measured_gap(model, temperature, answers):
    """Of a sampler that shares the weights of the policy, which has this temperature."""
    config = learning_config(training__tokens_per_micro_batch=2000,
                             sampling__temperature=temperature)
    return sampler_metrics(main.Policy(model, config), answers, config.training)["sampler_gap"]


def sample_many(model, **sampling):
    torch.manual_seed(0)
    run = sampling_run(model, training__max_new_gen_tokens=40, **sampling)
    answers = sample_from(run, PROMPTS, 120)
    assert sum(answer.num_tokens for answer in answers) > 3000
    return answers


@pytest.mark.mathematics
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_sampled_from_the_policy_show_no_gap(temperature, one_rank):
    model = make_model(spread=0.25)
    answers = sample_many(model, sampling__temperature=temperature)

    assert measured_gap(model, temperature, answers) == 0


@pytest.mark.mathematics
@pytest.mark.parametrize(("temperature", "sampling"), [
    (0.6, {}), (1.4, {}), (1.0, {"sampling__top_p": 0.7}), (1.0, {"sampling__top_k": 4})], ids=str)
def test_answers_sampled_from_something_else_show_a_gap(temperature, sampling, one_rank):
    """It is far more than what is called bad. `temperature` is that of the policy."""
    model = make_model(spread=0.25)
    answers = sample_many(model, **sampling)

    assert measured_gap(model, temperature, answers) > 5 * GAP_LIMIT
    few = answers[:50]
    assert measured_gap(model, temperature, few) == pytest.approx(
        plain_gap(model, temperature, few), abs=1e-5)


# ---------------------------------------------------------------- groups, and all ranks

def made_up_groups():
    """Eight groups of two answers. Of each answer whether it is solved, and its reward."""
    groups = []
    for values in [
        [(1, 0.0), (1, 1.0)], [(1, 0.5), (1, 0.5)], [(1, 0.0), (2, 0.0)],      # all are solved
        [(0, 0.0), (0, 1.0)], [(0, 1.0), (-1, 1.0)],                           # none
        [(1, 1.0), (0, 1.0)], [(0, 0.0), (1, 0.0)], [(0.5, 1.0), (0.9, 1.0)],  # some, or by halves
    ]:
        group = []
        for solved, reward in values:
            parts = {"right": solved, "style": reward}
            group.append(main.Trajectory(main.Question({}, []), [0], "", False, parts, reward))
        groups.append(group)
    return groups


def group_metrics(groups):
    task = SimpleNamespace(REWARD_WEIGHTS={"style": 1.0}, SOLVED="right")
    return sampling_metrics(groups, task, dict.fromkeys(PHASES, 1.0))


def test_groups_are_all_or_none_solved_by_the_solved_part_and_have_a_signal_by_rewards(one_rank):
    metrics = group_metrics(made_up_groups())

    assert metrics["groups_all_solved"] == 3 / 8
    assert metrics["groups_none_solved"] == 2 / 8
    assert metrics["groups_without_signal"] == 6 / 8
    assert metrics["reward"] == 9 / 16 and metrics["reward_std"] == 2 * 0.5 / 8


# How many of the batch's last answers have no advantage, and the settings.
CASES = [(0, {}), (0, {**MASK, **TWICE}), (6, {}), (6, KL), (12, KL)]


def measure_share():
    """Returns what this rank measures, for each case, of its share of a batch."""
    found = []
    for num_idle, keys in CASES:
        batch = make_trajectories(QUESTIONS * GROUP)
        for trajectory in batch[len(batch) - num_idle:]:
            trajectory.advantage = 0.0
        num_own = len(batch) // WORLD_SIZE
        share = batch[RANK * num_own:(RANK + 1) * num_own]
        _, of_change, of_update = update(share, **keys)
        gap = measured_gap(make_model("gpt2", torch.float64), TEMPERATURE, share)
        of_groups = group_metrics(made_up_groups()[RANK::WORLD_SIZE])
        found.append({**of_change, **of_update, **of_groups, "sampler_gap": gap})
    return found


def measure_on_a_rank(folder):
    join()
    found = measure_share()
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    leave_group()
    end_process(0)


@pytest.mark.mathematics
def test_two_ranks_measure_the_whole_batch_also_where_one_has_nothing_to_learn_from(
        one_rank, tmp_path):
    expected = measure_share()

    result = ranks(2, measure_on_a_rank, tmp_path)

    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for case, metrics, expected_metrics in zip(CASES, found, expected, strict=True):
            assert metrics == pytest.approx(expected_metrics, **NEAR), (rank, case)


# ---------------------------------------------------------------- made-up first steps

HEALTHY = {
    "truncated": 0.1, "groups_without_signal": 0.3, "groups_all_solved": 0.1,
    "groups_none_solved": 0.2, "reward/answer": 0.4, "reward_std/answer": 0.2,
    "reward/format": 0.9, "reward_std/format": 0.0, "learned": 20, "non_finite": 0,
    "grad_norm": 0.5, "moved": 0.4, "change_rewarded": 0.004, "change_punished": -0.004,
    "change_as_meant": 0.8, "sampler_gap": 0.0}
JUST = 1e-9
NOTHING_OFF = "nothing is off"
# Each bad sign, by words that no other sign has.
SIGNS = {
    "truncated": "stop token", "reward": "reward_function", "none_solved": "too hard",
    "all_solved": "too easy", "without_signal": "equal rewards", "sampler_gap": "not sampled from",
    "non_finite": "gradient is not finite", "grad_norm": "gradient is 0",
    "no_number": "not finite after", "moved": "almost nothing has changed", "change": "less likely"}


def look(**numbers):
    """What is said of a healthy first step in which these metrics are something else."""
    return look_at_first_step({**HEALTHY, **numbers})


def bad_signs(lines):
    """Returns which of the signs these lines are, in their order."""
    signs = []
    for line in lines:
        if line.startswith("! "):
            signs += [sign for sign, words in SIGNS.items() if words in line]
    assert len(signs) == sum(line.startswith("! ") for line in lines)
    return signs


@pytest.mark.parametrize(("metric", "last_good", "first_bad", "sign", "keys"), [
    ("truncated", 0.5 - JUST, 0.5, "truncated",
     ["training.max_new_gen_tokens", "data.prompt_style"]),
    ("reward/answer", JUST, 0, "reward", ["task.reward_weights", "sampling.temperature"]),
    ("groups_none_solved", 0.9 - JUST, 0.9, "none_solved", ["data.dataset", "model.name"]),
    ("groups_all_solved", 0.9 - JUST, 0.9, "all_solved", ["data.dataset"]),
    ("groups_without_signal", 0.9 - JUST, 0.9, "without_signal", ["training.k_best_of_n"]),
    ("non_finite", 0, 1, "non_finite", ["model.precision"]),
    ("grad_norm", JUST, 0, "grad_norm", ["model.lora_targets"]),
    ("moved", 0.01 + JUST, 0.01, "moved", ["training.learning_rate", "training.warmup_steps"]),
    ("change_rewarded", -0.02 + JUST, -0.02, "change", ["training.learning_rate"]),
    ("change_as_meant", 0.3 + JUST, 0.3, "change", ["training.learning_rate"]),
    ("sampler_gap", GAP_LIMIT - JUST, GAP_LIMIT, "sampler_gap", ["sampling.top_p"])])
def test_each_sign_begins_where_it_should_and_names_the_settings(
        metric, last_good, first_bad, sign, keys):
    good, bad = look(**{metric: last_good}), look(**{metric: first_bad})

    assert bad_signs(good) == [] and good[-1] == NOTHING_OFF
    assert bad_signs(bad) == [sign] and NOTHING_OFF not in bad
    named = set(re.findall(r"[a-z]+\.[a-z_]+", bad[-1]))
    assert set(keys) <= named <= set(KEYS)
    # None is no number, and a sign of nothing. But how tokens have moved should be known.
    assert bad_signs(look(**{metric: None})) == ["no_number"] * (metric == "moved")


def test_of_several_signs_of_an_update_the_first_is_said_because_it_explains_the_others():
    wrong = {"change_as_meant": 0.1, "moved": 0.0, "grad_norm": 0, "non_finite": 1}

    for metric in ("non_finite", "grad_norm", "moved"):
        assert bad_signs(look(**wrong)) == [metric]
        del wrong[metric]
    assert bad_signs(look(**wrong, truncated=1, sampler_gap=1)) == [
        "truncated", "sampler_gap", "change"]


def test_what_has_no_number_is_shown_as_that():
    """For example with sil, where no answer has a negative advantage."""
    said = " ".join(look(change_rewarded=-12.3456, change_punished=None))

    assert "-12.34560" in said and "by n/a" in said and "nan" not in said


def test_a_step_without_anything_to_learn_or_without_numbers_is_not_called_healthy():
    nothing = dict.fromkeys(
        ["moved", "change_rewarded", "change_punished", "change_as_meant", "grad_norm"])
    nothing_learned = look(**nothing, learned=0, groups_without_signal=1.0)

    assert "nothing to learn from" in nothing_learned[2]
    assert bad_signs(nothing_learned) == ["without_signal"]
    assert bad_signs(look(moved=None, change_as_meant=None)) == ["no_number"]


# ---------------------------------------------------------------- first steps of real runs

QUICK = ["training.num_samples_per_step=4", "training.max_new_gen_tokens=80",
         "training.max_steps=1", "training.seed=3", "validation.best_of_n=1",
         "data.num_validation=1", "data.max_rows=2000", "run.name=a"]
# The metrics that the first four lines show, in their order.
SHOWN = [
    ["truncated"],
    ["groups_without_signal", "groups_all_solved", "groups_none_solved"],
    ["change_rewarded", "change_punished", "change_as_meant"],
    ["sampler_gap"],
]


@pytest.fixture
def first_step(tmp_path, monkeypatch, capsys):
    """A function that runs main.py for a step. Returns the lines below that of the step, and its
    metrics."""
    monkeypatch.setenv("COLUMNS", "1000")  # Each text is one line.

    def run(*more):
        assert start([*QUICK, *more, f"run.dir={tmp_path}"]) == 0
        _, below = capsys.readouterr().out.split("\nstep    1 ")
        lines = below[:below.index("\nevaluation at step 1:")].splitlines()[1:]
        metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
        return [line.removeprefix("  ") for line in lines], metrics

    return run


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_a_healthy_run_is_called_healthy_and_shows_what_it_measures(precision, first_step):
    """In mixed precision the sampler has weights of its own."""
    lines, metrics = first_step(f"model.precision={precision}")

    assert lines[-1] == NOTHING_OFF and bad_signs(lines) == []
    assert metrics["change_rewarded"] > 0 > metrics["change_punished"]
    for names, line in zip(SHOWN, lines):
        shown = []
        for number, percent in re.findall(r"([-+]?\d+(?:\.\d+)?)(%?)", line):
            shown.append(float(number) / (100 if percent else 1))
        assert shown == pytest.approx([metrics[name] for name in names], rel=0.01, abs=0.005)
    # All that the advice speaks of is measured.
    assert set(HEALTHY) <= set(metrics)


def test_a_step_without_a_signal_is_found_and_the_learning_rate_is_not_blamed(first_step):
    lines, metrics = first_step("task.name=tests/tasks/constant_reward.py",
                                "training.learning_rate=1e-30")

    assert bad_signs(lines) == ["without_signal"]
    assert metrics["updated"] == 0 and metrics["grad_norm"] is None
    assert {metrics[name] for name in CHANGE} == {None}


def test_only_the_first_step_is_looked_at_and_not_again_after_a_resume(tmp_path, capsys):
    said = []
    for max_steps in (1, 3):
        assert start([*SMALL, "validation.every=100", "checkpoint.every=100",
                      f"run.dir={tmp_path}", f"training.max_steps={max_steps}"]) == 0
        said.append(capsys.readouterr().out)

    assert "sampled tokens differ" in said[0] and "sampled tokens differ" not in said[1]
    assert "resuming from " in said[1] and "\nstep    3 " in said[1]
    measured = []
    for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl"):
        if "reward" in entry:
            measured.append(set(entry) & (CHANGE | {"sampler_gap"}))
    # The change is measured where the model is evaluated, too.
    assert measured == [CHANGE | {"sampler_gap"}, set(), CHANGE]


@pytest.mark.parametrize(("phase", "needs"), [
    ("read", "training.shard"), ("prepare", "training.shard"), ("sample", "sampling.max_rows"),
    ("evaluate", "sampling.max_rows"), ("score", "task's reward"),
    ("measure", "training.tokens_per_micro_batch"), ("learn", "training.tokens_per_micro_batch"),
    ("save", "RAM")])
def test_out_of_memory_each_phase_is_told_what_needs_the_memory(phase, needs):
    with pytest.raises(UserError) as raised, errors_of_phase(phase, 0):
        raise torch.OutOfMemoryError

    said = str(raised.value)
    assert said.startswith(f"out of memory in phase {phase}: ") and needs in said
    assert set(re.findall(r"[a-z]+\.[a-z_]+", said)) <= set(KEYS)
