"""What a run says of its first step: the numbers are right, a healthy run is called healthy, and
each of several illnesses is found and named. All of them end without an error and learn nothing, or
nothing good, so that nobody else would say so."""

import copy
import dataclasses
import inspect
import json
import math
import re
import shutil
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    plain_logprobs,
    read_jsonl,
    start,
)
from processes import ROOT, ranks
from test_learning import GROUP, QUESTIONS, TEMPERATURE, learning_config, start_of
from test_run import CHANGE, SHORT
from test_sampling import PROMPTS, sample_from, sampling_run

import main
from machinery import advice
from machinery.launch import end_process
from machinery.metrics import change_metrics, sampler_metrics, sampling_metrics
from machinery.model import add_adapters
from machinery.ranks import RANK, WORLD_SIZE, join, leave_group
from machinery.settings import KEYS

KL = {"training__kl_beta": 0.04}
MASK = {"training__mask_truncated": True}
TWICE = {"training__updates_per_batch": 2, "training__clip": [0.2, 0.28]}
TINY_RATE = 3e-7  # some tokens then change by more than what counts as moved, and some by less
# What both sides compute in float64 differs by 1e-15 in each token's change, which is some 1e-6.
NEAR = {"rel": 1e-5, "nan_ok": True}
GAP_LIMIT = 0.005  # from here on, `sampler_gap` is a bad sign


# ---------------------------------------------------------------- how log pi has changed

def updated(trajectories, **overrides):
    """The model after the updates on one batch, by plain gradient descent, and what is then
    measured of the change."""
    config = learning_config(training__tokens_per_micro_batch=60, **overrides)
    model = make_model("gpt2", torch.float64)
    run = make_policy(model, config, gradient_as_bucket_view=True)
    run.model = run.sampler = model
    if config.training.kl_beta:
        run.reference = main.make_reference(main.Policy, start_of(model), config)
    optimizer = torch.optim.SGD(run.policy.parameters(), TINY_RATE)
    answers = [dataclasses.replace(trajectory) for trajectory in trajectories]
    for _ in range(config.training.updates_per_batch):
        if main.policy_gradient(run, answers)["updated"]:
            optimizer.step()
    return model, change_metrics(run, answers)


def plain_change(model, trajectories, mask_truncated=False):
    """The same in plain loops, from the logits of the model before and after."""
    before = plain_logprobs(make_model("gpt2", torch.float64), trajectories, TEMPERATURE)
    after = plain_logprobs(model, trajectories, TEMPERATURE)
    moved = moved_as_meant = 0
    all_change, as_meant, rewarded, punished = [], [], [], []
    for trajectory, old, new in zip(trajectories, before, after, strict=True):
        if mask_truncated and trajectory.is_truncated:
            continue
        for t in range(len(trajectory.completion_ids)):
            change = new[t].item() - old[t].item()
            if trajectory.advantage == 0:
                continue
            all_change.append(abs(change))
            (rewarded if trajectory.advantage > 0 else punished).append(change)
            meant = change > 0 if trajectory.advantage > 0 else change < 0
            if meant:
                as_meant.append(abs(change))
            if abs(change) > 1e-6:
                moved, moved_as_meant = moved + 1, moved_as_meant + meant
            assert abs(abs(change) - 1e-6) > 1e-11  # no rounding decides whether it has
    if not all_change:
        return dict.fromkeys(CHANGE, math.nan)
    return {"moved": moved / len(all_change), "moved_as_meant": moved_as_meant / moved,
            "change_as_meant": sum(as_meant) / sum(all_change),
            "change_rewarded": sum(rewarded) / len(rewarded),
            "change_punished": sum(punished) / len(punished)}


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, MASK, KL, {**MASK, **KL}, TWICE, {**TWICE, **MASK, **KL}],
                         ids=str)
def test_the_change_of_log_pi_is_that_from_the_models_logits_before_and_after(keys, one_rank):
    """Of answers of ragged lengths, from some of which nothing is learned."""
    trajectories = make_trajectories(QUESTIONS * GROUP)
    assert len({len(trajectory.completion_ids) for trajectory in trajectories}) > 5
    kinds = {(trajectory.advantage == 0, trajectory.is_truncated) for trajectory in trajectories}
    assert kinds >= {(False, False), (False, True), (True, False)}
    model, measured = updated(trajectories, **keys)
    expected = plain_change(model, trajectories, mask_truncated=keys.keys() >= MASK.keys())
    assert set(measured) == CHANGE and measured == pytest.approx(expected, **NEAR)
    # The case tells them apart: none is 0 or 1, and each is another.
    shares = [expected[name] for name in ("moved", "moved_as_meant", "change_as_meant")]
    assert all(0.1 < share < 0.97 for share in shares) and len(set(shares)) == 3
    others = [plain_change(model, trajectories, mask_truncated=mask) for mask in (False, True)]
    assert others[0] != pytest.approx(others[1], **NEAR)


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, KL, {**MASK, **TWICE}], ids=str)
def test_where_nothing_is_learned_from_an_answer_there_is_no_number_for_a_change(keys, one_rank):
    """Also where the KL term alone has changed the model."""
    trajectories = [dataclasses.replace(trajectory, advantage=0.0)
                    for trajectory in make_trajectories(8)]
    model, measured = updated(trajectories, **keys)
    assert measured == pytest.approx(plain_change(model, trajectories), **NEAR)
    start = make_model("gpt2", torch.float64)
    assert ("training__kl_beta" in keys) != all(
        torch.equal(*pair) for pair in zip(model.parameters(), start.parameters()))


def batch_of(num_idle):
    """What all ranks hold together; its last so many answers teach nothing."""
    trajectories = make_trajectories(QUESTIONS * GROUP)
    for trajectory in trajectories[len(trajectories) - num_idle:]:
        trajectory.advantage = 0.0
    return trajectories


def measured_gap(run, answers):
    """Where the sampler shares the weights of the model that learns."""
    run.model = run.sampler = run.policy.module.model
    measured = sampler_metrics(run, answers)
    assert measured["sampler_distance"] == 0
    return measured["sampler_gap"]


def measure_shares(folder, cases):
    """Each rank learns from its share of a batch, and leaves behind what it measures."""
    join()
    found = []
    for num_idle, keys in cases:
        batch = batch_of(num_idle)
        share = batch[RANK * len(batch) // WORLD_SIZE:(RANK + 1) * len(batch) // WORLD_SIZE]
        model = make_model("gpt2", torch.float64)
        gap = measured_gap(make_policy(model, learning_config()), share)
        found.append(updated(share, **keys)[1] | {"sampler_gap": gap})
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    leave_group()
    end_process(0)


@pytest.mark.mathematics
def test_two_ranks_measure_the_whole_batch_also_where_one_has_nothing_to_learn_from(
        one_rank, tmp_path):
    everyone = QUESTIONS * GROUP
    cases = [(0, {}), (0, {**MASK, **TWICE}), (everyone // 2, {}), (everyone // 2, KL),
             (everyone, KL)]
    result = ranks(2, measure_shares, tmp_path, cases)
    assert result.returncode == 0, result.stderr
    found, on_the_other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for (num_idle, keys), measured, there in zip(cases, found, on_the_other, strict=True):
        assert measured == pytest.approx(there, rel=0, abs=0, nan_ok=True)
        trajectories = batch_of(num_idle)
        model, _ = updated(trajectories, **keys)
        assert measured.pop("sampler_gap") == pytest.approx(plain_gap(trajectories), rel=1e-9)
        assert measured == pytest.approx(
            plain_change(model, trajectories, keys.keys() >= MASK.keys()), **NEAR), (num_idle, keys)


@pytest.mark.parametrize("refreshed", [True, False])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("precision", ["mixed", "float32"])
def test_after_learning_the_sampler_has_the_weights_of_the_model(
        precision, lora_rank, refreshed, one_rank, monkeypatch):
    """In mixed precision it has them in bfloat16; else it shares them. Where it is a copy, it would
    stay as it was, if `learn` did not refresh it."""
    config = make_config(
        model__precision=precision, model__lora_rank=lora_rank, training__warmup_steps=0,
        training__learning_rate=0.01, training__updates_per_batch=2)
    model = make_model()
    if lora_rank:
        add_adapters(model, config)
    run = make_policy(model, config)
    run.model, run.sampler, run.step = model, main.make_sampler(model, config), 1
    run.optimizer = torch.optim.AdamW(run.policy.parameters())
    before = [parameter.detach().clone() for parameter in run.sampler.parameters()]
    if not refreshed:
        monkeypatch.setattr(main, "refresh_sampler", lambda sampler, model: None)
    updates = main.learn(run, make_trajectories(8))
    assert [update["updated"] for update in updates] == [1, 1]
    is_copy = precision == "mixed"
    for sampled_from, learned, old in zip(
            run.sampler.parameters(), model.parameters(), before, strict=True):
        assert sampled_from.dtype == (torch.bfloat16 if is_copy else torch.float32)
        assert (sampled_from is learned) == (not is_copy)
        is_equal = torch.equal(sampled_from, learned.to(sampled_from.dtype))
        assert is_equal == (refreshed or not is_copy or not learned.requires_grad)
        assert torch.equal(sampled_from, old) == (not is_equal or not learned.requires_grad)


# ---------------------------------------------------------------- the sampler and the learner

def plain_gap(trajectories, temperature=TEMPERATURE, model=None):
    """What `sampler_gap` is, in plain loops: of the mean of -log pi - entropy, what is beyond four
    standard errors."""
    model = model or make_model("gpt2", torch.float64)
    excess = []
    for trajectory in trajectories:
        prompt, completion = trajectory.prompt_ids, trajectory.completion_ids
        logits = model(torch.tensor([prompt + completion])).logits[0].detach().double()
        for t, token in enumerate(completion):
            pi = torch.softmax(logits[len(prompt) + t - 1] / temperature, -1)
            entropy = sum(-p * math.log(p) for p in pi.tolist())
            excess.append(-math.log(pi[token]) - entropy)
    mean = sum(excess) / len(excess)
    standard_error = math.sqrt(sum(each ** 2 for each in excess)) / len(excess)
    return max(0.0, abs(mean) - 4 * standard_error)


@pytest.mark.mathematics
def test_answers_really_sampled_show_no_gap_and_those_of_another_policy_do(one_rank):
    """Another temperature on either side, a cut softmax, other weights; by far more than what is
    called bad. What chance can do is taken off: were there no gap, one would be seen in one of
    16,000 runs."""
    model = make_model(spread=0.25)
    other = make_model(spread=0.25)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def gap(sampled_from=model, learned_from=model, learner=None, **sampling):
        torch.manual_seed(0)
        answers = sample_from(sampling_run(sampled_from, training__max_new_gen_tokens=40,
                                           **sampling), PROMPTS, 120)
        assert sum(len(answer.completion_ids) for answer in answers) > 3000
        config = make_config(model__precision="float32", training__tokens_per_micro_batch=2000,
                             sampling__temperature=learner or 1.0)
        measured = measured_gap(make_policy(learned_from, config), answers)
        plain = plain_gap(answers[:50], config.sampling.temperature, learned_from)
        part = measured_gap(make_policy(learned_from, config), answers[:50])
        assert part == pytest.approx(plain, abs=1e-5)
        return measured

    for temperature in (1.0, 0.6, 1.4):
        assert gap(learner=temperature, sampling__temperature=temperature) == 0
    assert gap(other, other) == 0
    for different in ({"learner": 0.6}, {"learner": 1.4}, {"sampling__temperature": 0.6},
                      {"sampling__temperature": 1.4}, {"sampling__top_k": 4},
                      {"sampling__top_p": 0.7}, {"learned_from": other}):
        assert gap(**different) > 5 * GAP_LIMIT, different


@pytest.mark.mathematics
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_distance_is_that_of_the_samplers_own_logits_from_the_learners(lora_rank, one_rank):
    """In plain loops over the tokens. Noise of either sign, which cancels in the gap, is seen."""
    config = make_config(model__precision="mixed", model__lora_rank=lora_rank)
    model = make_model(spread=0.25)
    if lora_rank:
        add_adapters(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    run = make_policy(model, config)
    run.model, run.sampler = model, main.make_sampler(model, config)
    torch.manual_seed(0)
    answers = sample_from(sampling_run(run.sampler, training__max_new_gen_tokens=20), PROMPTS, 40)
    measured = sampler_metrics(run, answers)
    expected = []
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        with torch.no_grad():
            sampled_from = run.sampler(ids).logits[0].double().log_softmax(-1)
            with torch.autocast("cpu", torch.bfloat16):
                learner = model(ids).logits[0].double().log_softmax(-1)
        for t, token in enumerate(answer.completion_ids, start=len(answer.prompt_ids) - 1):
            expected.append(abs(float(sampled_from[t, token] - learner[t, token])))
    # processing each prompt once, and rows side by side, rounds otherwise in bfloat16
    assert measured["sampler_distance"] == pytest.approx(fmean(expected), rel=0.2, abs=1e-3)
    # frozen weights, and so all that is computed, are bfloat16 on both sides
    assert measured["sampler_gap"] == 0 and (fmean(expected) < 1e-3) == (lora_rank > 0)

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in run.sampler.parameters():
            parameter += torch.randn_like(parameter) * 0.02 * parameter.std()
    noisy = sampler_metrics(run, answers)
    assert noisy["sampler_distance"] > 2 * measured["sampler_distance"] + 0.01


# ---------------------------------------------------------------- groups

def test_groups_are_all_or_none_solved_by_the_solved_part_and_not_by_their_rewards(one_rank):
    task = SimpleNamespace(REWARD_WEIGHTS={"style": 1.0}, SOLVED="right")  # which pays nothing
    question = main.Question({}, [])
    groups = [[main.Trajectory(question, [0], "", False, {"right": right, "style": style}, style)
               for right, style in group] for group in [
        [(1, 0.0), (1, 1.0)], [(1, 0.5), (1, 0.5)], [(1, 0.0), (2, 0.0)],     # all
        [(0, 0.0), (0, 1.0)], [(0, 1.0), (-1, 1.0)],                          # none
        [(1, 1.0), (0, 1.0)], [(0, 0.0), (1, 0.0)], [(0.5, 1.0), (0.9, 1.0)]  # some, or by halves
    ]]
    seconds = {"sample": 1.0, "score": 1.0, "refill": 0.0, "learn": 1.0}
    run = SimpleNamespace(task=task, log=SimpleNamespace(seconds=seconds))
    metrics = sampling_metrics(run, groups, groups)
    assert metrics["groups_all_solved"] == 3 / 8 and metrics["groups_none_solved"] == 2 / 8
    assert metrics["groups_without_signal"] == 6 / 8


# ---------------------------------------------------------------- what is said of it

QUICK = ["training.num_samples_per_step=4", "training.max_new_gen_tokens=80",
         "training.max_steps=1", "training.seed=6", "validation.best_of_n=1",
         "data.num_validation=1", "data.max_rows=2000"]
NOTHING_OFF = "  nothing is off"
# how each bad sign begins
SIGNS = {
    "truncated": "! too many answers are truncated",
    "reward/right": "! reward/right is 0 on average",
    "reward/answer": "! reward/answer is 0 on average",
    "groups_none_solved": "! the questions are too hard",
    "groups_all_solved": "! the questions are too easy",
    "groups_without_signal": "! equal rewards in a group",
    "non_finite": "! the gradient is not finite",
    "grad_norm": "! the gradient is 0",
    "moved": "! almost nothing has changed",
    "change": "! answers with a positive advantage became less likely",
    "sampler_gap": "! the answers were not sampled from the policy that is trained",
}
# which metrics the four lines show that every first step gets, in their order
SHOWN = [
    ["truncated"],
    ["groups_without_signal", "groups_all_solved", "groups_none_solved"],
    ["change_rewarded", "change_punished", "change_as_meant"],
    ["sampler_distance", "sampler_gap"],
]


def bad_signs(lines):
    """Which of the signs these lines are, each with what is said of it. All others are no signs."""
    signs = {}
    for line in lines:
        if line.startswith("! "):
            [sign] = [name for name, begin in SIGNS.items() if line.startswith(begin)]
            assert sign not in signs
            signs[sign] = line
    return signs


@pytest.fixture
def first_step(tmp_path, monkeypatch, capsys):
    """A function that runs main.py for a step. Returns the bad signs that it names, each with what
    is said of it (the other signs are only said); the metrics of that step; and all that is said
    below its line."""
    monkeypatch.setenv("COLUMNS", "1000")  # a line for each sign

    def run(*more):
        assert start([*QUICK, *more, f"run.dir={tmp_path}", "run.name=a"]) == 0
        out = capsys.readouterr().out
        _, below = out.split("\nstep    1 ")
        lines = below[:below.index("\nevaluation at step 1:")].splitlines()[1:]
        metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
        assert all(line.startswith("  ") for line in lines)
        measured, said = lines[:len(SHOWN)], lines[len(SHOWN):]
        signs = bad_signs([line.removeprefix("  ") for line in said])
        assert (said[-1] == NOTHING_OFF) == (not signs)
        harmless = [line for line in said if not line.startswith("  ! ") and line != NOTHING_OFF]
        assert all(" is 1 on average" in line for line in harmless)
        assert out.count("\n  ! ") == len(signs) and "nan" not in "".join(measured)
        return signs, metrics, "\n".join(lines)

    return run


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_of_a_healthy_run_it_is_said_that_nothing_is_off(precision, first_step):
    """In mixed precision the sampler has weights of its own."""
    signs, metrics, said = first_step(f"model.precision={precision}")
    assert not signs and said.endswith(f"\n{NOTHING_OFF}")
    assert metrics["change_rewarded"] > 0 > metrics["change_punished"]
    # What is shown is what is measured.
    for names, line in zip(SHOWN, said.splitlines()):
        shown = [float(number) / (100 if percent else 1)
                 for number, percent in re.findall(r"([-+]?\d+(?:\.\d+)?)(%?)", line)]
        assert shown == pytest.approx([metrics[name] for name in names], rel=0.01, abs=0.005)
    # All that the advice speaks of is measured.
    assert set(HEALTHY) <= set(metrics)


# ---------------------------------------------------------------- made-up first steps

HEALTHY = {
    "truncated": 0.1, "groups_without_signal": 0.3, "groups_all_solved": 0.1,
    "groups_none_solved": 0.2, "reward/answer": 0.4, "reward/answer_std": 0.2,
    "reward/format": 0.9, "reward/format_std": 0.0, "non_finite": 0, "grad_norm": 0.5,
    "moved": 0.4, "change_rewarded": 0.004, "change_punished": -0.004, "change_as_meant": 0.8,
    "sampler_distance": 0.003, "sampler_gap": 0.0}
JUST = 1e-9


def look(**numbers):
    """What is said of a healthy first step in which these metrics are something else."""
    return advice.look_at_first_step({**HEALTHY, **numbers}, make_config())


def test_a_made_up_healthy_step_has_no_sign():
    assert look()[len(SHOWN):] == ["nothing is off"]


@pytest.mark.parametrize(("metric", "last_good", "first_bad", "sign"), [
    ("truncated", 0.5 - JUST, 0.5, "truncated"),
    ("truncated", 0.5 - JUST, 1.0, "truncated"),
    ("reward/answer", JUST, 0, "reward/answer"),
    ("groups_none_solved", 0.9 - JUST, 0.9, "groups_none_solved"),
    ("groups_all_solved", 0.9 - JUST, 0.9, "groups_all_solved"),
    ("groups_without_signal", 0.9 - JUST, 0.9, "groups_without_signal"),
    ("non_finite", 0, 1, "non_finite"),
    ("grad_norm", JUST, 0, "grad_norm"),
    ("moved", 0.01 + JUST, 0.01, "moved"),
    ("moved", 0.01 + JUST, 0.0, "moved"),
    ("change_rewarded", -0.02 + JUST, -0.02, "change"),
    ("change_rewarded", 1e9, -1e9, "change"),
    ("change_as_meant", 0.3 + JUST, 0.3, "change"),
    ("change_as_meant", 1.0, 0.0, "change"),
    ("sampler_gap", GAP_LIMIT - JUST, GAP_LIMIT, "sampler_gap"),
    ("sampler_gap", GAP_LIMIT - JUST, 1e9, "sampler_gap")])
def test_each_sign_begins_where_it_should(metric, last_good, first_bad, sign):
    assert bad_signs(look(**{metric: last_good})) == {}
    assert look(**{metric: last_good})[-1] == "nothing is off"
    assert set(bad_signs(look(**{metric: first_bad}))) == {sign}
    assert "nothing is off" not in look(**{metric: first_bad})
    assert bad_signs(look(**{metric: None})) == {}  # None is no number, and no sign of anything.


def test_of_several_signs_of_an_update_the_first_is_said_because_it_explains_the_others():
    wrong = {"change_as_meant": 0.1, "moved": 0.0, "grad_norm": 0, "non_finite": 1}
    for metric, sign in (("non_finite", "non_finite"), ("grad_norm", "grad_norm"),
                         ("moved", "moved"), ("change_as_meant", "change")):
        assert set(bad_signs(look(**wrong))) == {sign}
        del wrong[metric]
    assert set(bad_signs(look(change_as_meant=0.1, truncated=1, sampler_gap=1))) == {
        "truncated", "change", "sampler_gap"}


def test_a_reward_that_is_1_on_average_is_told_and_is_no_bad_sign():
    said = look(**{"reward/format": 1})
    assert said[-2].startswith("reward/format is 1 on average") and said[-1] == "nothing is off"
    # Its spread is no part of the reward.
    assert look(**{"reward/format_std": 1}) == look(**{"reward/format_std": 0}) == look()


def named(line, *keys):
    """Whether it says to look there."""
    return all(key in line for key in keys)


def test_what_has_no_number_is_shown_as_that():
    said = " ".join(look(truncated=1.0, change_rewarded=-12.3456, change_punished=None,
                         groups_none_solved=0.125))
    assert "100%" in said and "12%" in said and " -12.34560 " in said
    assert "by n/a in answers with a negative advantage" in said and "nan" not in said


def test_where_nothing_was_learned_no_change_is_told():
    nothing = dict.fromkeys(
        ["moved", "change_rewarded", "change_punished", "change_as_meant", "grad_norm"])
    said = look(**nothing, groups_without_signal=1.0)
    assert said[2] == "there was nothing to learn from, so no log p has changed"
    assert "n/a" not in " ".join(said) and set(bad_signs(said)) == {"groups_without_signal"}


def test_a_first_step_of_which_nothing_is_known_is_not_called_healthy():
    """Some of the new log-probabilities are not finite, or no answer was learned from."""
    said = look(moved=None, change_as_meant=None)
    assert "nothing is off" not in said and said[-1] == "no numbers to judge by"


# ---------------------------------------------------------------- first steps of real runs

def test_a_learning_rate_that_is_next_to_nothing_is_found(first_step):
    signs, metrics, _ = first_step("training.learning_rate=1e-30",
                                   "training.warmup_steps=1000000000")
    assert list(signs) == ["moved"]
    assert named(signs["moved"], "training.learning_rate (1e-30)",
                 "training.warmup_steps (1000000000)")
    assert metrics["updated"] == 1 and metrics["moved"] == 0
    assert metrics["moved_as_meant"] is metrics["change_as_meant"] is None


@pytest.mark.parametrize(("value", "difficulty"), [(0, "groups_none_solved"),
                                                   (1, "groups_all_solved")])
def test_a_reward_that_always_is_the_same_is_found(value, difficulty, first_step, tmp_path):
    """0, as where no answer is ever recognised, and 1, as where every answer is. Then nothing is
    learned, and none of the rest is blamed."""
    path = tmp_path / "always_the_same.py"
    path.write_text(f"""from countdown import REPLY_START, SYSTEM_MESSAGE, load

REWARD_WEIGHTS = {{"right": 1.0}}
SOLVED = "right"

def reward_function(completion, row):
    return {{"right": {value}}}
""")
    signs, metrics, said = first_step(f"task.name={path}")
    # A part that all answers get is nothing bad as such: the format, say.
    assert list(signs) == ["reward/right"][value:] + [difficulty, "groups_without_signal"]
    assert f"reward/right is {value} on average" in said
    assert value or named(signs["reward/right"], "reward_function", "task.reward_weights")
    assert named(signs[difficulty], "data.dataset")
    assert value or named(signs[difficulty], "model.name", "training.k_best_of_n")
    assert named(signs["groups_without_signal"], "task.reward_weights", "training.k_best_of_n",
                 "data.dataset")
    assert metrics["updated"] == 0
    assert {metrics[name] for name in CHANGE} == {None} and metrics["grad_norm"] is None


def test_a_stop_token_that_never_comes_is_found(first_step, tmp_path):
    """As in a folder whose settings name another than the model has learned to end with: it goes on
    behind its own until it is truncated."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "tiny" / "model", folder)
    for name, key, other in (("config.json", "eos_token_id", 1),
                             ("generation_config.json", "eos_token_id", 1),
                             ("tokenizer_config.json", "eos_token", "<|pad|>")):
        settings = json.loads((folder / name).read_text())
        assert settings[key] != other
        (folder / name).write_text(json.dumps({**settings, key: other}))
    signs, metrics, _ = first_step(f"model.name={folder}")
    assert list(signs) == ["truncated"] and metrics["truncated"] > 0.9
    assert named(signs["truncated"], "training.max_new_gen_tokens (80)", "stop token",
                 "data.prompt_style (base)")


def test_adapters_that_do_not_learn_are_found(first_step, monkeypatch):
    """The second matrix is 0 at first, and as long as it is so is the gradient of the first."""
    load_model = main.load_model

    def load_frozen(config):
        model, tokenizer = load_model(config)
        frozen = [parameter.requires_grad_(False)
                  for name, parameter in model.named_parameters() if "lora_B" in name]
        assert frozen and not any(parameter.any() for parameter in frozen)
        return model, tokenizer

    monkeypatch.setattr(main, "load_model", load_frozen)
    signs, metrics, _ = first_step("model.lora_rank=4", "model.lora_targets=[q_proj, v_proj]")
    assert list(signs) == ["grad_norm"]
    assert named(signs["grad_norm"], "model.lora_rank (4)",
                 "model.lora_targets (['q_proj', 'v_proj'])")
    assert metrics["updated"] == 1 and metrics["grad_norm"] == 0 == metrics["moved"]


def test_a_sampler_that_is_another_model_is_found(first_step, monkeypatch):
    """It shows in what was sampled, although it is refreshed from then on."""
    prepare = main.prepare

    def prepare_with_a_copy(*arguments):
        run = prepare(*arguments)
        run.sampler = copy.deepcopy(run.sampler)
        with torch.no_grad():
            for parameter in run.sampler.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.03)
        return run

    monkeypatch.setattr(main, "prepare", prepare_with_a_copy)
    signs, metrics, _ = first_step()
    assert list(signs) == ["sampler_gap"] and metrics["sampler_gap"] > 2 * GAP_LIMIT
    assert named(signs["sampler_gap"], "sampling.temperature (1.0)")


def test_a_temperature_that_the_loss_does_not_know_is_found(first_step, monkeypatch):
    class Policy(main.Policy):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.temperature = 1.0

    monkeypatch.setattr(main, "Policy", Policy)
    signs, metrics, _ = first_step("sampling.temperature=1.8")
    assert list(signs) == ["sampler_gap"] and metrics["sampler_gap"] > GAP_LIMIT
    assert named(signs["sampler_gap"], "sampling.temperature (1.8)", "sampling.top_p (1.0)",
                 "sampling.top_k (0)")


def test_a_loss_of_the_wrong_sign_is_found(first_step, monkeypatch):
    policy_loss = main.policy_loss

    def wrong(*arguments):
        loss, watched = policy_loss(*arguments)
        return -loss, watched

    monkeypatch.setattr(main, "policy_loss", wrong)
    signs, metrics, _ = first_step()
    assert list(signs) == ["change"]
    assert named(signs["change"], "training.learning_rate (3e-05)", "policy_loss")
    assert metrics["change_rewarded"] < 0 < metrics["change_punished"]


def test_a_learning_rate_that_ruins_the_model_is_found(first_step):
    """Then all falls, and often answers with a negative advantage further, so that more than a
    chance share of all change goes the way the advantage points."""
    signs, metrics, _ = first_step("training.learning_rate=0.3")
    (said,) = signs.values()  # in the words for either sign of it
    assert metrics["change_rewarded"] < -0.02 and metrics["change_as_meant"] > 0.3
    assert named(said, "became less likely", "training.learning_rate (0.3)")


def test_a_first_step_that_is_skipped_is_not_called_one_of_a_low_learning_rate(
        first_step, monkeypatch):
    policy_loss = main.policy_loss

    def infinite(*arguments):
        loss, watched = policy_loss(*arguments)
        return loss * math.inf, watched

    monkeypatch.setattr(main, "policy_loss", infinite)
    signs, metrics, _ = first_step("model.precision=float32")
    assert list(signs) == ["non_finite"] and metrics["updated"] == 0
    assert named(signs["non_finite"], "model.precision (float32)")


def test_sil_is_looked_at_as_well_and_has_no_negative_advantages(first_step):
    signs, metrics, said = first_step("training.learning_type=sil", "training.k_best_of_n=[2,8]")
    assert not signs and said.endswith(f"\n{NOTHING_OFF}")
    assert metrics["change_punished"] is None
    assert metrics["change_rewarded"] > 0 and metrics["change_as_meant"] > 0.6


def test_a_first_step_without_signal_is_called_that_and_not_one_that_has_moved_nothing(first_step):
    """The reward is neither 0 nor 1, so this alone tells of it."""
    signs, metrics, _ = first_step("task.name=tests/tasks/constant_reward.py",
                                   "training.learning_rate=1e-30")
    assert list(signs) == ["groups_without_signal"]
    assert metrics["groups_without_signal"] == 1 and 0 < metrics["solved"] < 1
    assert metrics["updated"] == 0 and metrics["moved"] is None


def test_only_the_first_step_is_looked_at_and_not_again_after_a_resumption(tmp_path, capsys):
    arguments = [*SHORT, "validation.every=100", "checkpoint.every=100", f"run.dir={tmp_path}",
                 "run.name=a"]
    said = []
    for max_steps in (1, 3):
        assert start([*arguments, f"training.max_steps={max_steps}"]) == 0
        said.append(capsys.readouterr().out)
    assert "resuming from " in said[1]
    for out, steps in zip(said, ([1], [2, 3])):
        lines = out.splitlines()
        for step in steps:
            place, = (i for i, line in enumerate(lines) if line.startswith(f"step    {step} "))
            after = lines[place + 1]
            assert after.startswith("  " if step == 1 else ("step    3 ", "evaluation at "))
    assert "\n  ! " in said[0] or NOTHING_OFF in said[0]
    assert "\n  ! " not in said[1] and NOTHING_OFF not in said[1]
    steps = [entry for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl") if "reward" in entry]
    # Measured in the first step, and where it is evaluated.
    assert [set(entry) & (CHANGE | {"sampler_gap", "sampler_distance"}) for entry in steps] == [
        CHANGE | {"sampler_gap", "sampler_distance"}, set(), CHANGE]


# ---------------------------------------------------------------- the words

def all_texts():
    """All that the advice can say, with the default settings filled in."""
    config = make_config(training__shard=True, model__lora_rank=4)
    texts = [advice.OUT_OF_RANGE, advice.NO_NUMBERS, advice.slow_saving(50.0, 10.0, config)]
    texts += [advice.out_of_memory(phase, config) for phase in phases()]
    texts += advice.notes_on_sharding(config, 1)
    ill = [("truncated", 1), ("reward/answer", 0), ("reward/answer", 1), ("groups_none_solved", 1),
           ("groups_all_solved", 1), ("groups_without_signal", 1), ("non_finite", 1),
           ("grad_norm", 0), ("moved", 0), ("moved", None), ("change_rewarded", -1),
           ("change_as_meant", 0), ("sampler_gap", 1)]
    for metric, value in ill:
        texts += look(**{metric: value})
    texts += look(change_rewarded=None, change_punished=None, change_as_meant=None)
    return texts


def phases():
    """Those that there are in a run."""
    sources = [(ROOT / path).read_text() for path in ("main.py", "machinery/metrics.py")]
    found = set(re.findall(r'log\.phase\("(\w+)"', "".join(sources)))
    assert found == {"read", "prepare", "sample", "score", "refill", "measure", "learn",
                     "evaluate", "save"}
    return sorted(found)


def test_the_advice_speaks_of_keys_and_functions_that_there_are():
    sections = {key.split(".")[0] for key in KEYS}
    keys = {key for text in all_texts()
            for key in re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z_]+", text)}
    assert len(keys) > 15 and keys <= set(KEYS)
    functions = {word for text in all_texts() if text.startswith("! ")
                 for word in re.findall(r"(?<![\w./])[a-z]+_[a-z_]+(?!\w)", text)}
    functions -= {"top_p", "top_k"}  # which the sentence before calls sampling.top_p
    assert functions == {"reward_function", "policy_loss"}
    task = main.load_task(make_config())
    for name in functions:
        assert inspect.isfunction(getattr(main, name, None) or getattr(task, name, None)), name


def test_a_text_says_what_a_setting_is_now():
    config = make_config(training__learning_rate=0.25, sampling__max_rows=7)
    assert named(advice.out_of_memory("sample", config), "sampling.max_rows (7)")
    signs = bad_signs(advice.look_at_first_step({**HEALTHY, "moved": 0}, config))
    assert named(signs["moved"], "training.learning_rate (0.25)")


def test_every_text_of_the_advice_can_be_said():
    """In one line, with nothing left to fill in."""
    texts = all_texts()
    assert all(text and not re.search(r"[{}\n]", text) for text in texts)
    found = {sign for sign, begin in SIGNS.items()
             if any(text.startswith(begin) for text in texts)}
    assert found == SIGNS.keys() - {"reward/right"}  # which is a part of another task


def test_out_of_memory_each_phase_is_told_what_needs_the_memory():
    config = make_config()
    needs = {"read": "training.shard", "prepare": "training.shard", "sample": "sampling.max_rows",
             "refill": "sampling.max_rows", "evaluate": "sampling.max_rows",
             "score": "the task's reward", "measure": "training.tokens_per_micro_batch",
             "learn": "training.tokens_per_micro_batch", "save": "RAM"}
    for phase in phases():
        assert needs[phase] in advice.out_of_memory(phase, config)
