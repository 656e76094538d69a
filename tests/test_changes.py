"""The diffs of changes/: each applies to main.py and comes off, runs, and computes its formula."""

import importlib
import itertools
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

import changed
import conftest
import mistakes
import pytest
import torch
from conftest import (
    GROUP,
    QUESTIONS,
    SMALL,
    TEMPERATURE,
    L,
    as_sampled_from,
    gradient,
    learning_config,
    make_config,
    make_model,
    make_policy,
    make_trajectories,
    outcome,
    read_jsonl,
    relative_error,
    run_without_curves,
)
from processes import ROOT, ranks
from torch.distributed.run import parse_args

import countdown
import main
from machinery.code import MAIN, digest_of

pytestmark = pytest.mark.house
CHANGES = [name for name in changed.all_changes() if "/" not in name]
WITH_CODE = [name for name, path in changed.all_changes().items() if changed.read(path)[1]]
MOST_LINES = {"two-turns": 30}  # and 15 in the others
FACTS = {"paper", "idea", "price", "look at", "as key"}


# ---------------------------------------------------------------- the files

@pytest.mark.parametrize("name", WITH_CODE)
def test_a_change_is_what_git_apply_takes_and_takes_back(name, tmp_path):
    shutil.copy(ROOT / "main.py", tmp_path)
    path = changed.all_changes()[name]
    before = (tmp_path / "main.py").read_text()
    for words in ([], ["-R"]):
        subprocess.run(["git", "apply", *words, path], cwd=tmp_path, check=True,
                       env=os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)})
        text = (tmp_path / "main.py").read_text()
        assert (text == before) == (words == ["-R"])
        assert digest_of({MAIN: text}) != digest_of({MAIN: before}) or words


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_short_and_says_what_it_is(name):
    _, diff = changed.read(changed.all_changes()[name])
    lines = diff.splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert len(added) <= MOST_LINES.get(name, 15)
    assert set(changed.facts_of(changed.all_changes()[name])) >= FACTS
    page = (ROOT / "docs" / "change.md").read_text()
    assert f"[{name}](../changes/{name}.diff) | {len(added)} |" in page


def test_after_an_edit_of_main_py_one_command_makes_all_diffs_again(tmp_path):
    lines = (ROOT / "main.py").read_text().splitlines(keepends=True)
    # A comment above every function, and others that read differently.
    edited = "".join(f"# A comment.\n{line}" if line.startswith("def ") else line for line in lines)
    edited = edited.replace("  # a variant", "  # another way")

    clone, result = again(tmp_path, edited)

    assert result.returncode == 0, result.stdout + result.stderr
    for name in WITH_CODE:
        subprocess.run(["git", "apply", "--check", f"changes/{name}.diff"], cwd=clone, check=True)
    made = (clone / "changes" / "rloo.diff").read_text()
    assert "# another way\n" in made and made.startswith("RLOO")


def test_a_change_that_main_py_contradicts_needs_a_person(tmp_path):
    line = "        answer.advantage = answer.reward - mean_reward\n"
    text = (ROOT / "main.py").read_text()
    assert line in text

    clone, result = again(tmp_path, text.replace(line, "        answer.advantage = 1.0\n"))

    assert result.returncode == 1
    assert "changes/rloo.diff needs a person" in result.stdout
    assert "changes/remax.diff needs" not in result.stdout
    old = (ROOT / "changes" / "rloo.diff").read_text()
    assert (clone / "changes" / "rloo.diff").read_text() == old


def again(folder: Path, text: str) -> tuple[Path, subprocess.CompletedProcess]:
    """A clone in which main.py has this text, and what `--again` came to there."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
    for name in ("changes", "bench"):  # as they are now, committed or not
        shutil.copytree(ROOT / name, clone / name, dirs_exist_ok=True)
    (clone / "main.py").write_text(text)
    # Settings of a user that would change a diff, or stop a commit.
    settings = {"diff.context": "0", "diff.noprefix": "true", "commit.gpgsign": "true"}
    own = os.environ | {"GIT_CONFIG_COUNT": str(len(settings))}
    for i, (key, value) in enumerate(settings.items()):
        own |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
    command = [sys.executable, "bench/changed.py", "--again"]
    return clone, subprocess.run(
        command, cwd=clone, env=own, text=True, capture_output=True, check=False)


def test_a_change_whose_place_is_not_found_is_left_to_a_person(tmp_path):
    """Without context, its lines would land in another function."""
    text = (ROOT / "main.py").read_text()
    for line, edited in (("def questions(", "# Why?\n" * 10 + "def questions("),
                         ("answer.reward = 0.0\n", "answer.reward = 0.0  # at first\n"),
                         ("answer.reward_parts[part]\n", "answer.reward_parts[part]  # a part\n")):
        assert line in text
        text = text.replace(line, edited)

    clone, result = again(tmp_path, text)

    for name in ("overlong-penalty", "mistakes/truncated-0"):
        assert f"changes/{name}.diff needs a person" in result.stdout
        made = (clone / "changes" / f"{name}.diff").read_text()
        assert made == (ROOT / "changes" / f"{name}.diff").read_text()


def test_changes_that_exclude_each_other_end_in_one_line(capsys):
    for first, second in (("rloo", "weak-positives"), ("gspo", "cispo"), ("maxrl", "rloo")):
        with pytest.raises(SystemExit, match=rf"{second}\.diff does not fit"):
            changed.command([first, second])


def test_changes_in_different_places_combine():
    for names in (["maxrl", "overlong-filter"], ["overlong-filter", "gspo"]):
        with changed.tree_with(names) as tree:
            text = (tree / "main.py").read_text()
        for name in names:
            _, diff = changed.read(changed.all_changes()[name])
            added = [line[1:] for line in diff.splitlines() if re.match(r"\+(?!\+)", line)]
            assert added and all(line in text for line in added)


# ---------------------------------------------------------------- they run

def run_changed(name: str, folder: str, *arguments: str):
    """For `ranks`: main.py with a change. The folder of the test has it, as the process ends at
    once."""
    tempfile.tempdir = folder
    with changed.tree_with([name]) as tree:
        sys.path.insert(0, str(tree))
        del sys.modules["main"]
        conftest.main = importlib.import_module("main")
        run_without_curves(f"run.dir={folder}", *arguments)


@pytest.mark.parametrize("name", CHANGES)
def test_two_steps_on_two_ranks_with_a_change_and_nothing_false_is_said(name, tmp_path):
    keys = changed.facts_of(changed.all_changes()[name]).get("keys", "").split()
    result = ranks(2, run_changed, name, str(tmp_path), "run.name=a", "training.max_steps=2",
                   "training.num_samples_per_step=4", "training.seed=3", "validation.best_of_n=2",
                   "data.num_validation=4", "data.max_rows=2000", *keys)

    assert result.returncode == 0, result.stderr
    said = result.stdout
    assert "  ! " not in said and "nothing is off" in said, said
    metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    samples = read_jsonl(tmp_path / "a" / "samples.jsonl")
    assert (tmp_path / "a" / "main.py").read_text() != (ROOT / "main.py").read_text()
    if name == "dynamic-sampling":
        assert [entry["groups_without_signal"] for entry in metrics if "reward" in entry] == [0, 0]
    if name == "greedy-evaluation":
        assert len([entry for entry in metrics if "eval/greedy" in entry]) == 2
    feedback = "</answer>\nThis is wrong. Try again.\n<think>\n"
    has_second_turns = any(sample["prompt"].endswith(feedback) for sample in samples)
    assert has_second_turns == (name == "two-turns")


def run_with_tool_call(folder: str, *arguments: str):
    """For `ranks`: main.py with two turns, and with the `reply_to` that docs/task.md shows."""
    tempfile.tempdir = folder
    page = (ROOT / "docs" / "task.md").read_text()
    tool_call = re.search(r"```python\n(def reply_to.*?)```", page, re.DOTALL)[1]
    with changed.tree_with(["two-turns"]) as tree:
        path = tree / "main.py"
        before, after = path.read_text().split("def reply_to", 1)
        rest = after.partition("def second_turns")[2]
        text = f"{before}{tool_call}\n\ndef second_turns{rest}"
        imports = "import math\nimport re\nimport countdown\n"
        path.write_text(text.replace("import math\n", imports, 1))
        sys.path.insert(0, str(tree))
        del sys.modules["main"]
        conftest.main = importlib.import_module("main")
        run_without_curves(f"run.dir={folder}", *arguments)


def test_the_tool_call_of_the_page_tells_the_model_what_its_expression_makes(tmp_path):
    result = ranks(1, run_with_tool_call, str(tmp_path), "run.name=a", "training.max_steps=1",
                   "training.num_samples_per_step=2", "data.num_validation=8")

    assert result.returncode == 0, result.stderr
    prompts = [sample["prompt"] for sample in read_jsonl(tmp_path / "a" / "samples.jsonl")]
    said = [re.search(r"\nThat makes (.*?)\. Try again\.\n<think>\n$", each) for each in prompts]
    assert any(said)
    for prompt, made in zip(prompts, said, strict=True):
        if made:
            expression = re.findall("<answer>(.*?)</answer>", prompt)[-1]
            assert str(countdown.evaluate_expression(expression)) == made[1]


# ---------------------------------------------------------------- their formulas

REWARDS = [[0.1, 1.1, 0.0, 0.1, 1.1, 0.1, 0.0, 0.1], [0.1] * 8,
           [1.1, 1.1, 1.1, 1.1, 0.1, 1.1, 1.1, 1.1], [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0],
           [-1.0, 1.0, 1.0, -1.0, -0.5, 0.5, 1.0, -1.0]]


def advantages_with(name: str) -> list[list[float]]:
    """What `compute_advantages` of the change makes of these rewards."""
    module = changed.main_with([name])
    groups = [[module.Trajectory(None, [1], "", False, reward=reward) for reward in rewards]
              for rewards in REWARDS]
    module.compute_advantages(groups, make_config().training)
    return [[answer.advantage for answer in group] for group in groups]


def less_mean(rewards: list[float]) -> list[float]:
    return [reward - fmean(rewards) for reward in rewards]


def of_rloo(rewards: list[float]) -> list[float]:
    return [reward - fmean(rewards[:i] + rewards[i + 1:]) for i, reward in enumerate(rewards)]


def of_pass_at_4(rewards: list[float]) -> list[float]:
    """By counting: of the answers sorted by reward, in how many sets is this one the best?"""
    def mean_best(values: list[float], size: int, least: float = -math.inf) -> float:
        ranked = sorted(values)
        total = sum(max(value, least) * math.comb(i, size - 1) for i, value in enumerate(ranked))
        return total / math.comb(len(values), size)
    return [mean_best(rewards[:i] + rewards[i + 1:], 3, reward) - mean_best(rewards, 4)
            for i, reward in enumerate(rewards)]


def of_weak_positives(rewards: list[float]) -> list[float]:
    return [value / 10 if value > 0 else value for value in less_mean(rewards)]


def of_maxrl(rewards: list[float]) -> list[float]:
    return [value / fmean(map(abs, rewards)) for value in less_mean(rewards)]


@pytest.mark.parametrize(("name", "formula"), [
    ("rloo", of_rloo), ("pass-at-k", of_pass_at_4), ("weak-positives", of_weak_positives),
    ("maxrl", of_maxrl)])
def test_advantages_of_a_change_equal_its_formula(name, formula):
    for found, rewards in zip(advantages_with(name), REWARDS, strict=True):
        expected = formula(rewards)
        assert found == pytest.approx(expected, abs=1e-12), rewards
        # An answer that teaches nothing costs no pass.
        assert [value == 0 for value in found] == [abs(value) < 1e-12 for value in expected]


def test_advantages_of_reinforce_plus_plus_have_one_scale_for_the_whole_batch(one_rank):
    expected = [less_mean(rewards) for rewards in REWARDS]
    deviation = pstdev(itertools.chain(*expected))
    for found, values in zip(advantages_with("reinforce-plus-plus"), expected, strict=True):
        assert found == pytest.approx([value / deviation for value in values], abs=1e-6)


def test_the_overlong_penalty_rises_linearly_over_the_last_quarter():
    module = changed.main_with(["overlong-penalty"])
    limit = make_config().training.max_new_gen_tokens
    task = SimpleNamespace(REWARD_WEIGHTS={"answer": 1.0}, SOLVED="answer",
                           reward_function=lambda answer, row: {"answer": 1.0})
    groups = [[module.Trajectory(SimpleNamespace(row={}), [1] * length, "", False)
               for length in (1, limit * 3 // 4, limit * 7 // 8, limit)]]
    module.score(conftest.made_up_run(task=task, config=make_config()), groups)
    assert [answer.reward for answer in groups[0]] == [1.0, 1.0, 0.5, 0.0]


def passes_in_plain_loops(model, answers: list) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Log-probability and entropy of each token of each answer, one answer at a time."""
    found = []
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        of_answer = []
        for t, token in enumerate(answer.completion_ids):
            logits = model(ids).logits[0, len(answer.prompt_ids) + t - 1]
            p = torch.softmax(logits / TEMPERATURE, -1)
            of_answer.append((torch.log(p[token]), -(p * torch.log(p)).sum()))
        found.append(of_answer)
    return found


def objective_of_entropy_bonus(answers, passes):
    for answer, of_answer in zip(answers, passes):
        for log_p, entropy in of_answer:
            yield answer.advantage * log_p + 0.01 * entropy


def objective_of_truncated_importance_sampling(answers, passes):
    for answer, of_answer in zip(answers, passes):
        for (log_p, _), sampled in zip(of_answer, answer.sampler_log_probs.tolist()):
            yield min(math.exp(log_p.item() - sampled), 2.0) * answer.advantage * log_p


def objective_of_high_entropy_tokens(answers, passes):
    learned = [pair for pair in zip(answers, passes) if pair[0].advantage]
    entropies = sorted(entropy.item() for _, of_answer in learned for _, entropy in of_answer)
    place = 0.8 * (len(entropies) - 1)  # The quantile lies between two of them.
    low, high = entropies[math.floor(place)], entropies[math.ceil(place)]
    threshold = low + (high - low) * (place - math.floor(place))
    for answer, of_answer in learned:
        for log_p, entropy in of_answer:
            if entropy.item() >= threshold:
                yield answer.advantage * log_p


def objective_of_gspo(answers, passes):
    for answer, of_answer in zip(answers, passes):
        rho = 1.0  # of the whole answer, to the power of 1 / length
        for (log_p, _), old in zip(of_answer, answer.old_log_probs.tolist()):
            rho = rho * torch.exp((log_p - old) / len(of_answer))
        is_clipped = rho > 1 + HIGH if answer.advantage > 0 else rho < 1 - LOW
        for _ in of_answer:
            yield (rho.detach() if is_clipped else rho) * answer.advantage


def objective_of_cispo(answers, passes):
    for answer, of_answer in zip(answers, passes):
        for (log_p, _), old in zip(of_answer, answer.old_log_probs.tolist()):
            yield min(math.exp(log_p.item() - old), 1 + HIGH) * answer.advantage * log_p


def objective_of_overlong_filter(answers, passes):
    for answer, of_answer in zip(answers, passes):
        for log_p, _ in of_answer:
            if not answer.is_truncated:
                yield answer.advantage * log_p


LOW, HIGH = 0.2, 0.28
# Two updates, of which the first changes no weight in float64.
TWICE = {"training__updates_per_batch": 2, "training__clip": [LOW, HIGH],
         "training__learning_rate": 1e-30}
KEYS = {"gspo": TWICE, "cispo": TWICE}


@pytest.mark.parametrize(("name", "objective"), [
    ("entropy-bonus", objective_of_entropy_bonus),
    ("truncated-importance-sampling", objective_of_truncated_importance_sampling),
    ("high-entropy-tokens", objective_of_high_entropy_tokens),
    ("overlong-filter", objective_of_overlong_filter),
    ("gspo", objective_of_gspo),
    ("cispo", objective_of_cispo)])
def test_the_gradient_of_a_change_equals_plain_loops(name, objective, one_rank, monkeypatch):
    keys = KEYS.get(name, {})
    stream = random.Random(0)
    answers = as_sampled_from(make_model("gpt2", torch.float64), make_trajectories())
    for answer in answers:  # Sampler and policy differ by up to 1 nat, so some weights are cut off.
        answer.sampler_log_probs += torch.tensor(
            [stream.uniform(-1, 1) for _ in answer.completion_ids], dtype=torch.float64)
        if keys:
            answer.old_log_probs = answer.sampler_log_probs
    model = make_model("gpt2", torch.float64)
    loss = -sum(objective(answers, passes_in_plain_loops(model, answers)))
    (loss / (QUESTIONS * GROUP * L)).backward()
    expected = gradient(model)

    monkeypatch.setattr(conftest, "main", changed.main_with([name]))
    learner = make_model("gpt2", torch.float64)
    conftest.main.learn(make_policy(learner, learning_config(**keys)), answers)

    assert relative_error(gradient(learner), expected) < 1e-11
    usual = make_model("gpt2", torch.float64)
    main.learn(make_policy(usual, learning_config(**keys)), answers)
    assert relative_error(gradient(usual), expected) > 1e-3  # The change is no silent nothing.


def test_a_curriculum_that_was_stopped_goes_on_where_it_was(tmp_path):
    """One step and one more equal two, because the target is in `own_state`."""
    def curriculum(name, max_steps):
        keys = [f"run.name={name}", f"training.max_steps={max_steps}", f"run.dir={tmp_path}"]
        assert changed.train_with(["curriculum"], [*SMALL, *keys]) == 0
        return outcome(tmp_path / name)

    curriculum("stopped", 1)
    stopped, whole = curriculum("stopped", 2), curriculum("whole", 2)

    assert 0 < whole["state"][-1]["difficulty"] < 0.5
    assert stopped["state"][-1] == whole["state"][-1] and stopped["tensors"] == whole["tensors"]


def test_what_runs_with_a_change_is_what_is_recorded():
    with changed.tree_with(["mistakes/no-mean"]) as tree:
        program = ("import main; from machinery.code import code_of;"
                   "from machinery.settings import load_config;"
                   "print(code_of(main.main, load_config([])).texts['main.py'])")
        shown = subprocess.run([sys.executable, "-c", program], cwd=tree, text=True,
                               capture_output=True, check=True).stdout
        assert (tree / "main.py").read_text() in shown
    assert (ROOT / "main.py").read_text() not in shown


def test_torchrun_understands_how_a_mistake_on_two_ranks_is_measured():
    _, *words = mistakes.command_of("not-shared", "tree")
    assert parse_args(words[2:]).training_script_args == ["--train", "tree", "not-shared"]
