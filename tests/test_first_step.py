"""What a run says of its first step: right numbers, and a name for each illness."""

import dataclasses
import json
import math
import random
import re
from collections import Counter
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHANGE,
    GROUP,
    PROMPTS,
    QUESTIONS,
    ROOT,
    SMALL,
    TEMPERATURE,
    as_numbers,
    as_sampled_from,
    learning_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    read_jsonl,
    reference_of,
    sample_from,
    sampling_run,
    start,
)
from first_steps import KINDS, NUM_SEEDS, settings_of
from processes import ranks

import main
from machinery.metrics import (
    change_metrics,
    grading_metrics,
    look_at_first_step,
    sampler_metrics,
    sampling_metrics,
    update_metrics,
)
from machinery.model import make_reference
from machinery.ranks import RANK, WORLD_SIZE, end_process, join, leave_group
from machinery.settings import KEYS, load_config
from machinery.tasks import Question

KL = {"training__kl_beta": 0.04}
TWICE = {"training__updates_per_batch": 2, "training__clip": [0.2, 0.28]}
TINY_RATE = 3e-7  # Some tokens then change by more than what counts as moved, and some by less.
# Both sides compute in float64. That differs by 1e-15 in a token's change of about 1e-6.
NEAR = {"rel": 1e-5}
GAP_LIMIT = 0.001  # From here on, `sampler_gap` is a bad sign in float32.


# ---------------------------------------------------------------- how log pi has changed

def update(trajectories, **overrides):
    """The model after updates on one batch, by plain gradient descent, and what is measured."""
    config = learning_config(training__tokens_per_micro_batch=60,
                             training__learning_rate=TINY_RATE, **overrides)
    model = make_model("gpt2", torch.float64)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    if config.training.has_reference:
        run.reference = main.Policy(make_reference(reference_of(model), config), config)
    answers = as_sampled_from(model, trajectories)
    metrics = main.learn(run, answers)[-1]
    learned = [answer for answer in answers if answer.old_log_probs is not None]
    groups = []  # Rewards point where the advantages do, and are all that the instrument sees.
    for answer in answers:
        answer.reward = answer.advantage
        groups.append([answer, dataclasses.replace(answer, reward=-answer.advantage)])
        answer.advantage = 0.0
    metrics |= change_metrics(run.policy.module, groups, learned, config.training)
    return model, metrics | sampler_metrics(learned)


def plain_change(model, trajectories):
    """The same in plain loops, from the logits of the model before and after."""
    start = make_model("gpt2", torch.float64)
    before = as_numbers(plain_logprobs(start, trajectories, TEMPERATURE))
    after = as_numbers(plain_logprobs(model, trajectories, TEMPERATURE))
    rewarded, punished = [], []  # how much the log pi of each token has changed
    for trajectory, old, new in zip(trajectories, before, after, strict=True):
        for old_logprob, new_logprob in zip(old, new, strict=True):
            if trajectory.advantage > 0:
                rewarded.append(new_logprob - old_logprob)
            if trajectory.advantage < 0:
                punished.append(new_logprob - old_logprob)
    as_meant = [change for change in rewarded if change > 0]
    as_meant += [change for change in punished if change < 0]
    moved = [change for change in rewarded + punished if abs(change) > 1e-6]
    return {"moved": len(moved) / len(rewarded + punished),
            "change_size": sum(map(abs, rewarded + punished)) / len(rewarded + punished),
            "change_as_meant": sum(map(abs, as_meant)) / sum(map(abs, rewarded + punished)),
            "change_rewarded": fmean(rewarded), "change_punished": fmean(punished)}


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, {**TWICE, **KL}], ids=str)
def test_the_change_of_log_pi_is_that_from_the_models_logits_before_and_after(keys, one_rank):
    """Of answers of ragged lengths, from some of which nothing is learned."""
    trajectories = make_trajectories(QUESTIONS * GROUP)

    model, measured = update(trajectories, **keys)

    expected = plain_change(model, trajectories)
    assert {name: measured[name] for name in CHANGE} == pytest.approx(expected, **NEAR)
    # This batch tells the shares apart: none is 0 or 1, and all differ.
    shares = [expected[name] for name in ("moved", "change_as_meant")]
    assert all(0.1 < share < 0.97 for share in shares) and len(set(shares)) == 2


# ---------------------------------------------------------------- the sampler and the policy

def sample_and_learn(temperature, **sampling):
    """Answers that were sampled in this way, and learned from at this temperature."""
    torch.manual_seed(0)
    model = make_model(spread=0.25)
    run = sampling_run(model, training__max_new_gen_tokens=40, **sampling)
    answers = sample_from(run, PROMPTS, 20)
    for answer in answers:
        answer.advantage = 1.0
    config = learning_config(sampling__temperature=temperature, training__learning_rate=1e-30)
    main.learn(make_policy(model, config), answers)
    return model, answers


@pytest.mark.mathematics
@pytest.mark.parametrize(("temperature", "sampling", "has_gap"), [
    (0.6, {"sampling__temperature": 0.6}, False),
    (0.6, {}, True),
    # They are noted before both of these.
    (1.0, {"sampling__top_p": 0.7, "sampling__top_k": 5}, False)], ids=str)
def test_the_gap_is_that_of_log_pi_while_sampling_and_while_learning(
        temperature, sampling, has_gap, one_rank):
    model, answers = sample_and_learn(temperature, **sampling)
    sampled_at = sampling.get("sampling__temperature", 1.0)
    noted, learned = [plain_logprobs(model, answers, t) for t in (sampled_at, temperature)]
    for answer, of_answer in zip(answers, noted, strict=True):
        assert answer.sampler_log_probs.tolist() == pytest.approx(
            [value.item() for value in of_answer], abs=1e-5)
    gaps = [abs((a - b).item()) for rows in zip(noted, learned, strict=True)
            for a, b in zip(*rows, strict=True)]

    measured = sampler_metrics(answers)

    assert measured["sampler_gap"] == pytest.approx(fmean(gaps), abs=1e-5)
    assert measured["sampler_gap_max"] == pytest.approx(max(gaps), abs=1e-4)
    assert (measured["sampler_gap"] > 5 * GAP_LIMIT) == has_gap


# ---------------------------------------------------------------- groups, and all ranks

def made_up_groups():
    """Four groups of two answers. Of each answer whether it is solved, and its reward."""
    groups = []
    for values in [[(1, 0.0), (2, 1.0)], [(1, 0.5), (1, 0.5)],   # all are solved
                   [(-1, 1.0), (0, 1.0)],                        # none
                   [(0.5, 1.0), (0.9, 1.0)]]:                    # by halves
        group = []
        for solved, reward in values:
            parts = {"right": solved, "style": reward}
            group.append(main.Trajectory(Question({}, []), [0], "", False, parts, reward))
        groups.append(group)
    return groups


def group_metrics(groups):
    task = SimpleNamespace(REWARD_WEIGHTS={"style": 1.0}, SOLVED="right")
    return sampling_metrics(groups, task)


def test_groups_are_all_or_none_solved_by_the_solved_part_and_have_a_signal_by_rewards(one_rank):
    metrics = group_metrics(made_up_groups())

    assert metrics["groups_all_solved"] == 2 / 4
    assert metrics["groups_none_solved"] == 1 / 4
    assert metrics["groups_without_signal"] == 3 / 4
    assert metrics["reward"] == 6 / 8 and metrics["reward_std"] == 0.5 / 4


def measure_share():
    """What this rank measures of its share. The second of two ranks has nothing to learn from."""
    batch = make_trajectories(QUESTIONS * GROUP)
    for trajectory in batch[len(batch) // 2:]:
        trajectory.advantage = 0.0
    num_own = len(batch) // WORLD_SIZE
    share = batch[RANK * num_own:(RANK + 1) * num_own]
    _, of_update = update(share, **TWICE)
    of_groups = group_metrics(made_up_groups()[RANK::WORLD_SIZE])
    return {**of_update, **of_groups}


def measure_on_a_rank(folder):
    join()
    (folder / f"{RANK}.json").write_text(json.dumps(measure_share()))
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
        assert found == pytest.approx(expected, **NEAR), rank


# ---------------------------------------------------------------- made-up first steps

HEALTHY = {
    "truncated": 0.1, "groups_without_signal": 0.3, "groups_all_solved": 0.1,
    "groups_none_solved": 0.2, "reward/answer": 0.4, "reward_std/answer": 0.2,
    "reward/format": 0.9, "reward_std/format": 0.0, "learned": 20, "non_finite": 0,
    "grad_norm": 0.5, "moved": 0.4, "change_rewarded": 0.004, "change_punished": -0.004,
    "change_size": 0.005,
    "change_not_finite": 0.0, "change_as_meant": 0.8, "graded_wrongly": 0.0,
    "sampler_gap": 1e-6, "sampler_gap_max": 1e-5,
    # The evaluation before solved nothing, so it excuses nothing.
    "eval/solved": 0.0, "eval/reward/answer": 0.0, "eval/reward/format": 0.9}
JUST = 1e-9
NOTHING_OFF = "nothing is off"


def look(**numbers):
    """What is said of a healthy first step in which these metrics are something else."""
    return look_at_first_step({**HEALTHY, **numbers}, learning_config(training__warmup_steps=10))


def bad_signs(lines):
    return [line for line in lines if line.startswith("! ")]


@pytest.mark.parametrize(("metric", "last_good", "first_bad", "says"), [
    ("truncated", 0.9 - JUST, 0.9, "stop token"),
    ("reward/answer", JUST, 0, "reward_function"),
    ("groups_none_solved", 0.95 - JUST, 0.95, "too hard"),
    ("groups_all_solved", 0.95 - JUST, 0.95, "too easy"),
    ("groups_without_signal", 0.95 - JUST, 0.95, "equal rewards"),
    ("sampler_gap", GAP_LIMIT - JUST, GAP_LIMIT, "not sampled from"),
    ("non_finite", 0, 1, "gradient is not finite"),
    ("grad_norm", JUST, 0, "gradient is 0"),
    ("moved", 0.01 + JUST, 0.01, "almost nothing has changed"),
    ("change_not_finite", None, JUST, "not finite after the update"),
    ("graded_wrongly", 0.2 - JUST, 0.2, "graded again"),
    ("change_rewarded", -0.02 + JUST, -0.02, "became less likely"),
    ("change_as_meant", 0.3 + JUST, 0.3, "became less likely")])
def test_each_sign_begins_where_it_should_and_names_real_settings(
        metric, last_good, first_bad, says):
    good, bad = look(**{metric: last_good}), look(**{metric: first_bad})

    assert bad_signs(good) == [] and good[-1] == NOTHING_OFF
    [sign] = bad_signs(bad)
    assert says in sign and NOTHING_OFF not in bad
    assert set(re.findall(r"[a-z]+\.[a-z_]+", sign)) <= set(KEYS)


def test_a_step_of_bad_luck_is_no_sign_if_the_evaluation_before_it_had_solved_something():
    bad_luck = {"groups_none_solved": 1.0, "groups_without_signal": 1.0, "reward/answer": 0.0}
    assert len(bad_signs(look(**bad_luck))) == 3
    for solved, num_signs in ((0.01 - JUST, 3), (0.01, 0), (0.1, 0), (0.1 + JUST, 3)):
        before = {"eval/solved": solved, "eval/reward/answer": solved}
        assert len(bad_signs(look(**bad_luck, **before))) == num_signs, solved
    # Other questions than those of training say nothing of it.
    config = learning_config(data__validation="other.jsonl")
    metrics = {**HEALTHY, **bad_luck, "eval/solved": 0.05, "eval/reward/answer": 0.05}
    assert len(bad_signs(look_at_first_step(metrics, config))) == 3


def test_small_changes_are_named_and_changes_that_cancel_are_not():
    [sign] = bad_signs(look(change_size=2e-5 - JUST))
    assert "almost nothing has changed" in sign
    # Random rewards move tokens up and down alike.
    assert bad_signs(look(change_size=2e-5 + JUST, change_rewarded=0, change_punished=0)) == []


def test_weights_in_bfloat16_are_named_unless_adapters_learn():
    for lora_rank, num_signs in ((0, 1), (8, 0)):
        config = learning_config(model__precision="bfloat16", model__lora_rank=lora_rank)
        assert len(bad_signs(look_at_first_step(HEALTHY, config))) == num_signs


def test_a_step_without_anything_to_learn_is_not_called_healthy():
    nothing = dict.fromkeys(
        ["moved", "change_rewarded", "change_punished", "change_as_meant", "grad_norm"])

    lines = look(**nothing, learned=0, groups_without_signal=1.0)

    assert "nothing to learn from" in lines[2]
    assert len(bad_signs(lines)) == 1 and NOTHING_OFF not in lines


def test_rewards_that_differ_and_teach_nothing_are_named():
    """As with `sil` if all rewards are negative, or if advantages are rounded down to 0."""
    nothing = dict.fromkeys(
        ["moved", "change_rewarded", "change_punished", "change_as_meant", "grad_norm"])

    [sign] = bad_signs(look(**nothing, learned=0))

    assert "rewards differ, but no answer was learned from" in sign


def test_healthy_first_steps_raise_no_false_alarm():
    """Of each kind of run there are 20 seeds, made by first_steps.py."""
    kinds = Counter()
    configs = {kind: load_config(settings_of(kind, 0)) for kind in KINDS}
    for record in read_jsonl(ROOT / "tests" / "first_steps.jsonl"):
        assert look_at_first_step(record, configs[record["kind"]])[-1] == NOTHING_OFF, record
        kinds[record["kind"]] += 1
    assert kinds == dict.fromkeys(KINDS, NUM_SEEDS)


def test_kl_is_measured_where_the_policy_is_the_one_that_sampled():
    update = {"loss": 1.0, "updated": 1, "non_finite": 0}

    first, second = {**update, "kl": 0.1, "entropy": 1}, {**update, "kl": 9, "entropy": 3}
    metrics = update_metrics([first, second])

    assert metrics["kl"] == 0.1 and metrics["entropy"] == 2


def test_a_sampler_that_falls_behind_is_named_once(tmp_path, monkeypatch, capsys):
    """In step 1, its weights are still the policy's. With `shard` it has its own."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(main, "refresh_sampler", lambda sampler, model: None)

    assert start([*SMALL, "training.shard=true", "training.warmup_steps=0",
                  f"run.dir={tmp_path}"]) == 0

    said = capsys.readouterr().out
    assert said.count("! from here on, sampler_gap is large (") == 1
    assert f"\n  {NOTHING_OFF}\n" in said  # in step 1


# ---------------------------------------------------------------- a real first step

FIRST_STEP = [
    "training.num_samples_per_step=4", "training.seed=3", "training.max_new_gen_tokens=80",
    "training.max_steps=1", "validation.best_of_n=1", "data.num_validation=1",
    "data.max_rows=2000", "run.name=a"]


def flipped(compute_advantages):
    """The sign of every advantage is wrong."""
    def compute(groups, training):
        answers = compute_advantages(groups, training)
        for answer in answers:
            answer.advantage = -answer.advantage
        return answers
    return compute


def exchanged(score):
    """Every answer has the reward of its neighbour."""
    def score_neighbours(run, groups):
        score(run, groups)
        for group in groups:
            rewards = [(answer.reward, answer.reward_parts) for answer in group]
            for answer, earned in zip(group, rewards[1:] + rewards[:1], strict=True):
                answer.reward, answer.reward_parts = earned
    return score_neighbours


@pytest.mark.parametrize(("name", "mistake", "says"), [
    ("compute_advantages", flipped, "became less likely"),
    ("score", exchanged, "graded again got a different reward")])
def test_the_report_believes_neither_the_advantages_nor_the_rewards_of_the_code(
        name, mistake, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(main, name, mistake(getattr(main, name)))

    assert start([*FIRST_STEP, f"run.dir={tmp_path}"]) == 0

    said = capsys.readouterr().out
    assert any(says in line for line in said.splitlines() if line.startswith("  ! "))
    assert NOTHING_OFF not in said


def test_exchanged_rewards_are_found_where_few_groups_have_different_ones(one_rank):
    """Exchanging equal rewards changes nothing, so groups of equal rewards can't show it."""
    task = SimpleNamespace(
        REWARD_WEIGHTS={"style": 1.0}, SOLVED="style",
        reward_function=lambda completion, row: {"style": float(completion == "good")})
    groups = []
    for texts in [["bad", "bad"]] * 9 + [["bad", "good"]]:
        group = []
        for text, graded in zip(texts, reversed(texts), strict=True):
            parts = task.reward_function(graded, {})
            group.append(main.Trajectory(
                Question({}, []), [0], text, False, parts, parts["style"]))
        groups.append(group)

    assert grading_metrics(task, groups)["graded_wrongly"] == 2 / 8


def test_a_random_reward_is_not_called_wrong(one_rank):
    """A fair coin: of two gradings, every second pair agrees."""
    stream = random.Random(0)
    task = SimpleNamespace(
        REWARD_WEIGHTS={"style": 1.0}, SOLVED="style",
        reward_function=lambda completion, row: {"style": stream.choice((0.0, 1.0))})

    assert math.isnan(grading_metrics(task, made_up_groups())["graded_wrongly"])


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_a_healthy_run_is_called_healthy_and_shows_what_it_measures(
        precision, tmp_path, monkeypatch, capsys):
    """In mixed precision the sampler has weights of its own."""
    monkeypatch.setenv("COLUMNS", "1000")  # Each text is one line.

    assert start([*FIRST_STEP, f"model.precision={precision}", f"run.dir={tmp_path}"]) == 0

    said = capsys.readouterr().out
    metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
    assert f"\n  {NOTHING_OFF}\n" in said and "\n  ! " not in said
    assert metrics["change_rewarded"] > 0 > metrics["change_punished"]
    assert f"\n  {metrics['truncated']:.0%} of the answers are truncated" in said
    assert f"All answers are right in {metrics['groups_all_solved']:.0%} of the groups" in said
    assert f"on average, log p of a token changed by {metrics['change_rewarded']:+.5f} in" in said
    # All that the advice speaks of is measured.
    assert {name for name in HEALTHY if not name.startswith("eval/")} <= set(metrics)
