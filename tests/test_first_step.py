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
    NO_BAR,
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
from test_logger import make_logger
from test_run import CHANGE, SHORT
from test_sampling import PROMPTS, sample_from, sampling_run, tokenizer_of

import main
from machinery.launch import leave
from machinery.model import add_adapters
from machinery.ranks import join, part
from machinery.settings import ADVICE, KEYS

KL = {"training__kl_beta": 0.04}
MASK = {"training__mask_truncated": True}
TWICE = {"training__updates_per_batch": 2, "training__clip": [0.2, 0.28]}
TINY_RATE = 3e-7  # some tokens then change by more than what counts as moved, and some by less
# What both sides compute in float64 differs by 1e-15 in each token's change, which is some 1e-6.
NEAR = {"rel": 1e-5, "nan_ok": True}
SIGNS = [sign for topic in ADVICE["first_step"] for sign in topic["signs"]]
BAD_SIGNS = [sign for sign in SIGNS if sign[3].startswith("! ")]
GAP_LIMIT, = (low for sign, low, *_ in BAD_SIGNS if sign == "sampler_gap")


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
        if main.policy_gradient(run, answers, NO_BAR)["updated"]:
            optimizer.step()
    return model, main.change_metrics(run, main.learned_from(answers, config.training))


def plain_change(model, trajectories, mask_truncated=False):
    """The same in plain loops, from the logits of the model before and after."""
    before = plain_logprobs(make_model("gpt2", torch.float64), trajectories, TEMPERATURE)
    after = plain_logprobs(model, trajectories, TEMPERATURE)
    moved = moved_as_meant = 0
    all_change, as_meant, rewarded, punished = [], [], [], []
    for trajectory, old, new in zip(trajectories, before, after, strict=True):
        if mask_truncated and trajectory.truncated:
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
        return dict.fromkeys(CHANGE, math.nan) | {"sampler_stale": 0.0}
    return {"moved": moved / len(all_change), "moved_as_meant": moved_as_meant / moved,
            "change_as_meant": sum(as_meant) / sum(all_change),
            "change_rewarded": sum(rewarded) / len(rewarded),
            "change_punished": sum(punished) / len(punished), "sampler_stale": 0.0}


@pytest.mark.mathematics
@pytest.mark.parametrize("keys", [{}, MASK, KL, {**MASK, **KL}, TWICE, {**TWICE, **MASK, **KL}],
                         ids=str)
def test_the_change_of_log_pi_is_that_from_the_models_logits_before_and_after(keys, one_rank):
    """Of answers of ragged lengths, from some of which nothing is learned."""
    trajectories = make_trajectories(QUESTIONS * GROUP)
    assert len({len(trajectory.completion_ids) for trajectory in trajectories}) > 5
    assert {(trajectory.advantage == 0, trajectory.truncated) for trajectory in trajectories} >= {
        (False, False), (False, True), (True, False)}
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
    measured = main.sampler_metrics(run, answers)
    assert measured["sampler_distance"] == 0
    return measured["sampler_gap"]


def measure_shares(folder, cases):
    """Each rank learns from its share of a batch, and leaves behind what it measures."""
    join()
    found = []
    for num_idle, keys in cases:
        batch = batch_of(num_idle)
        share = batch[main.RANK * len(batch) // main.WORLD_SIZE:
                      (main.RANK + 1) * len(batch) // main.WORLD_SIZE]
        model = make_model("gpt2", torch.float64)
        gap = measured_gap(make_policy(model, learning_config()), share)
        found.append(updated(share, **keys)[1] | {"sampler_gap": gap})
    (folder / f"{main.RANK}.json").write_text(json.dumps(found))
    part()
    leave(0)


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


@pytest.mark.parametrize(("precision", "lacks"), [("mixed", 2), ("float32", 0)])
def test_a_sampler_is_stale_by_the_weights_that_it_lacks_and_by_no_rounding(
        precision, lacks, one_rank):
    """In mixed precision it has them in bfloat16, which is not another weight; else it shares
    them."""
    config = make_config(model__precision=precision)
    run = make_policy(make_model(), config)
    run.model = run.policy.module.model
    run.sampler = main.make_sampler(run.model, tokenizer_of(0, 0), config)

    def stale():
        return main.change_metrics(run, [])["sampler_stale"]

    assert stale() == 0
    with torch.no_grad():
        run.model.model.norm.weight += 0.37
        run.model.model.embed_tokens.weight[3, 3] += 0.37
    assert stale() == lacks
    main.refresh_sampler(run.sampler, run.model)
    assert stale() == 0


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
    run.model, run.sampler = model, main.make_sampler(model, tokenizer_of(0, 0), config)
    torch.manual_seed(0)
    answers = sample_from(sampling_run(run.sampler, training__max_new_gen_tokens=20), PROMPTS, 40)
    measured = main.sampler_metrics(run, answers)
    expected = []
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        with torch.no_grad():
            drawn_from = run.sampler(ids).logits[0].double().log_softmax(-1)
            with torch.autocast("cpu", torch.bfloat16):
                learner = model(ids).logits[0].double().log_softmax(-1)
        for t, token in enumerate(answer.completion_ids, start=len(answer.prompt_ids) - 1):
            expected.append(abs(float(drawn_from[t, token] - learner[t, token])))
    # reading each prompt once, and rows side by side, rounds otherwise in bfloat16
    assert measured["sampler_distance"] == pytest.approx(fmean(expected), rel=0.2, abs=1e-3)
    # frozen weights, and so all that is computed, are bfloat16 on both sides
    assert measured["sampler_gap"] == 0 and (fmean(expected) < 1e-3) == (lora_rank > 0)

    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in run.sampler.parameters():
            parameter += torch.randn_like(parameter) * 0.02 * parameter.std()
    noisy = main.sampler_metrics(run, answers)
    assert noisy["sampler_distance"] > 2 * measured["sampler_distance"] + 0.01


# ---------------------------------------------------------------- groups

def test_groups_are_all_or_none_solved_by_the_solved_part_and_not_by_their_rewards(one_rank):
    task = SimpleNamespace(REWARD_WEIGHTS={"style": 1.0}, SOLVED="right")  # which pays nothing
    groups = [[main.Trajectory({}, [], [0], "", False, {"right": right, "style": style}, style)
               for right, style in group] for group in [
        [(1, 0.0), (1, 1.0)], [(1, 0.5), (1, 0.5)], [(1, 0.0), (2, 0.0)],     # all
        [(0, 0.0), (0, 1.0)], [(0, 1.0), (-1, 1.0)],                          # none
        [(1, 1.0), (0, 1.0)], [(0, 0.0), (1, 0.0)], [(0.5, 1.0), (0.9, 1.0)]  # some, or by halves
    ]]
    seconds = {"sample": 1.0, "score": 1.0, "refill": 0.0, "learn": 1.0}
    run = SimpleNamespace(task=task, log=SimpleNamespace(seconds=seconds),
                          optimizer=SimpleNamespace(param_groups=[{"lr": 1.0}]))
    update = {"loss": 0.0, "learned": 1, "updated": 1, "non_finite": 0}
    metrics = main.step_metrics(run, groups, groups, [update], {})
    assert metrics["groups_all_solved"] == 3 / 8 and metrics["groups_none_solved"] == 2 / 8
    assert metrics["groups_without_signal"] == 6 / 8


# ---------------------------------------------------------------- what is said of it

QUICK = ["training.num_samples_per_step=4", "training.max_new_gen_tokens=80",
         "training.max_steps=1", "training.seed=6", "validation.best_of_n=1",
         "data.num_validation=1", "data.max_rows=2000"]
NOTHING_OFF = "  nothing is off"


@pytest.fixture
def first_step(tmp_path, monkeypatch, capsys):
    """A function that runs main.py for a step. Returns the bad signs that it names, each with what
    is said of it (the other signs are only said); the metrics of that step; and all that is said
    below its line."""
    monkeypatch.setenv("COLUMNS", "1000")  # a line for each sign

    def run(*more):
        arguments = [*QUICK, *more, f"run.dir={tmp_path}", "run.name=a"]
        assert start(arguments) == 0
        out = capsys.readouterr().out
        _, below = out.split("\nstep    1 ")
        lines = below[:below.index("\nevaluation at step 1:")].splitlines()[1:]
        metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")[1]
        texts = {f"  {look.format(name=name, **dict(main.load_config(arguments)))}": name
                 for sign, _, _, look in SIGNS for name in metrics if re.fullmatch(sign, name)}
        topics, looks = lines[:len(ADVICE["first_step"])], lines[len(ADVICE["first_step"]):]
        signs = {texts[line]: line for line in looks if line.startswith("  ! ")}
        assert (looks[-1] == NOTHING_OFF) == (not signs)
        assert all(line in texts for line in (looks if signs else looks[:-1]))
        assert out.count("\n  ! ") == len(signs) and "nan" not in "".join(topics)
        return signs, metrics, "\n".join(lines)

    return run


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_of_a_healthy_run_it_is_said_that_nothing_is_off(precision, first_step):
    """In mixed precision the sampler has weights of its own."""
    signs, metrics, said = first_step(f"model.precision={precision}")
    assert not signs and said.endswith(f"\n{NOTHING_OFF}")
    assert metrics["change_rewarded"] > 0 > metrics["change_punished"]
    # What is shown is what is measured.
    for topic, line in zip(ADVICE["first_step"], said.splitlines()):
        names = re.findall(r"{(.*?):", topic["says"])
        shown = [float(number) / (100 if percent else 1)
                 for number, percent in re.findall(r"([-+]?\d+(?:\.\d+)?)(%?)", line)]
        assert shown == pytest.approx([metrics[name] for name in names], rel=0.01, abs=0.005)
    # All that the advice speaks of is measured,
    for sign, low, high, _ in BAD_SIGNS:  # and none of it is near
        names = [name for name in metrics if re.fullmatch(sign, name)]
        assert names and low <= high, sign
        assert all(not low <= metrics[name] <= high for name in names), names


def named(line, *keys):
    """Whether it says to look there."""
    return all(key in line for key in keys)


def test_what_has_no_number_is_shown_as_that(tmp_path, capsys):
    log = make_logger(tmp_path, is_terminal=False)
    metrics = {name: 1.0 for topic in ADVICE["first_step"]
               for name in re.findall(r"{(.*?):", topic["says"])}
    log._look_at({**metrics, "change_rewarded": -12.3456, "change_punished": None,
                  "groups_none_solved": 0.125, "moved": 1.0})
    said = " ".join(capsys.readouterr().out.split())
    assert "100%" in said and "12%" in said and " -12.34560 " in said and "n/a in punished" in said


def test_where_nothing_was_learned_no_change_is_told(tmp_path, capsys):
    log = make_logger(tmp_path, is_terminal=False)
    metrics = {name: 0.0 for topic in ADVICE["first_step"]
               for name in re.findall(r"{(.*?):", topic["says"])}
    log._look_at({name: None if name.startswith("change") else value
                  for name, value in metrics.items()})
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing was learned from, so no log p has changed" in said and "n/a" not in said


def test_a_first_step_of_which_nothing_is_known_is_not_called_healthy(tmp_path, capsys):
    """Some of the new log-probabilities are not finite, or no answer was learned from."""
    log = make_logger(tmp_path, is_terminal=False)
    metrics = {name: 0.0 for topic in ADVICE["first_step"]
               for name in re.findall(r"{(.*?):", topic["says"])}
    log._look_at({**metrics, "moved": None, "change_as_meant": None})
    said = capsys.readouterr().out
    assert "nothing is off" not in said and said.endswith("\n  no numbers to judge by\n")


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
    # A part that all answers get is nothing bad as such: the form, say.
    assert list(signs) == ["reward/right"][value:] + [difficulty, "groups_without_signal"]
    assert f"reward/right is {value} on average" in said
    assert value or named(signs["reward/right"], "reward_function", "task.reward_weights")
    assert named(signs[difficulty], "data.dataset")
    assert value or named(signs[difficulty], "model.name", "training.k_best_of_n")
    assert named(signs["groups_without_signal"], "task.reward_weights", "training.k_best_of_n",
                 "data.dataset")
    assert metrics["updated"] == 0
    assert {metrics[name] for name in CHANGE - {"sampler_stale"}} == {None}
    assert metrics["sampler_stale"] == 0 and metrics["grad_norm"] is None


def test_a_stop_token_that_never_comes_is_found(first_step, tmp_path):
    """As in a folder whose settings name another than the model has learned to end with: it goes on
    behind its own until it is cut off."""
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


@pytest.mark.parametrize(("noise", "refreshed", "sign"), [
    (0.0, False, "sampler_stale"), (0.03, False, "sampler_stale"), (0.03, True, "sampler_gap")])
def test_a_sampler_with_weights_of_its_own_is_found(
        noise, refreshed, sign, first_step, monkeypatch):
    """A copy that is never refreshed is stale after the first update. One that was another model
    from the start shows in what it has sampled, also where it is refreshed from then on. Of the two
    the first is said, since it tells why."""
    prepare = main.prepare

    def prepare_with_a_copy(*arguments):
        run = prepare(*arguments)
        run.sampler = copy.deepcopy(run.sampler)
        with torch.no_grad():
            for parameter in run.sampler.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=noise)
        return run

    monkeypatch.setattr(main, "prepare", prepare_with_a_copy)
    if not refreshed:
        monkeypatch.setattr(main, "refresh_sampler", lambda sampler, model: None)
    signs, metrics, _ = first_step()
    assert list(signs) == [sign]
    assert named(signs[sign], *{"sampler_stale": ["refresh_sampler", "model.precision (float32)"],
                                "sampler_gap": ["sampling.temperature (1.0)"]}[sign])
    assert metrics["sampler_gap"] > 2 * GAP_LIMIT if noise else metrics["sampler_gap"] == 0
    assert (metrics["sampler_stale"] > 0) == (not refreshed)


def test_a_temperature_that_the_loss_does_not_know_is_found(first_step, monkeypatch):
    class Policy(main.Policy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.temperature = 1.0

    monkeypatch.setattr(main, "Policy", Policy)
    signs, metrics, _ = first_step("sampling.temperature=1.8")
    assert list(signs) == ["sampler_gap"] and metrics["sampler_stale"] == 0
    assert named(signs["sampler_gap"], "sampling.temperature (1.8)", "sampling.top_p (1.0)",
                 "sampling.top_k (0)")


def test_a_loss_of_the_wrong_sign_is_found(first_step, monkeypatch):
    policy_loss = main.policy_loss

    def wrong(*arguments):
        loss, watched = policy_loss(*arguments)
        return -loss, watched

    monkeypatch.setattr(main, "policy_loss", wrong)
    signs, metrics, _ = first_step()
    assert list(signs) == ["change_as_meant"]
    assert named(signs["change_as_meant"], "training.learning_rate (3e-05)", "policy_loss")
    assert metrics["change_rewarded"] < 0 < metrics["change_punished"]


def test_a_learning_rate_that_ruins_the_model_is_found(first_step):
    """Then all falls, and often the punished answers further, so that of all change more than a
    chance share is as meant."""
    signs, metrics, _ = first_step("training.learning_rate=0.3")
    (said,) = signs.values()  # in the words for either sign of it
    assert metrics["change_rewarded"] < -0.02 and metrics["change_as_meant"] > 0.3
    assert named(said, "has become rarer", "training.learning_rate (0.3)")


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


def test_sil_is_looked_at_as_well_and_punishes_nothing(first_step):
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
    assert "going on from " in said[1]
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

def texts_of(tree):
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from texts_of(each)


def test_the_advice_speaks_of_keys_and_functions_that_there_are():
    sections = {key.split(".")[0] for key in KEYS}
    keys = {key for text in texts_of(ADVICE)
            for key in re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z_]+", text)}
    assert len(keys) > 15 and keys <= set(KEYS)
    functions = {word for sign in BAD_SIGNS
                 for word in re.findall(r"(?<![\w.{])[a-z]+_[a-z_]+(?![\w.])", sign[3])}
    assert functions >= {"refresh_sampler", "policy_loss"}
    task = main.load_task(make_config())
    for name in functions:
        assert inspect.isfunction(getattr(main, name, None) or getattr(task, name, None)), name


def test_every_text_of_the_advice_can_be_said():
    """With the default settings filled in where it names them, and in one line."""
    config = dict(make_config())
    phases = ("score", "read", "prepare", "sample", "refill", "learn", "evaluate", "save")
    said = [look.format(name="reward/answer", **config) for *_, look in SIGNS]
    said += [ADVICE["out_of_memory"][phase].format(**config) for phase in phases]
    said += [ADVICE["out_of_range"], ADVICE["no_numbers"]]
    said += [each.format(**config) for each in ADVICE["shard"].values()]
    said += [topic["without"] for topic in ADVICE["first_step"] if "without" in topic]
    said += [ADVICE["slow_saving"].format(**config, saving=2.5, step=10.0, rarer=5)]
    assert all(text and not re.search(r"[{}\n]", text) for text in said)
    assert set(ADVICE["out_of_memory"]) == set(phases) and all(ADVICE["settings"].values())
