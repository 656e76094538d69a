"""A run that is interrupted, by whatever it is, ends as the one that is not: tolerance 0."""

import json
import os
import random
import shutil
import signal
import sys

import pytest
from conftest import (
    EVERY_STEP,
    SIL,
    SMALL,
    interrupted,
    outcome,
    run_without_curves,
    start,
    uninterrupted,
)
from processes import ranks

import main
from machinery import on_ctrl_c
from machinery.ranks import RANK  # noqa: F401  The test of own_state names it.
from machinery.runs import newest_first, step_of

# In mixed precision the sampler has weights of its own, which a resumed run has to make anew.
STEPS = [*EVERY_STEP, "model.precision=mixed"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run of three steps on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    uninterrupted(2, folder, *STEPS)
    return folder / "a"


# ---------------------------------------------------------------- SIGKILL and stop signals

def test_a_killed_run_equals_the_uninterrupted_one(whole, tmp_path):
    strikes = [{"rank": 0, "point": "saving: written", "passing": 2},  # The checkpoint of step 1.
               {"rank": 1, "point": "updated", "passing": 3}]  # In step 3.
    for strike in strikes:
        result = interrupted(2, {**strike, "how": "kill all"}, tmp_path, *STEPS)
        assert result.codes == [-signal.SIGKILL] * 2, (strike, result.stderr)

    result = interrupted(2, {}, tmp_path, *STEPS)

    assert result.returncode == 0, result.stderr
    assert "step-000002\n" in result.stdout
    assert outcome(tmp_path / "a") == outcome(whole)


# The first evaluation makes both models. From the second one on, they change hands.
NEW_MODELS = ["model: written", "model: there"]
CHANGING_HANDS = ["model: leaves", "model: left", "model: goes", "model: gone"]
SAVING = ["saving: tensors", "saving: written", "saving: renamed", "saving: synced",
          "saving: removal", "saving: thrown away", "saving: removed"]
ON_ANY_RANK = ["sampling", "learning", "updated", "evaluating"]
POINTS = [*SAVING, *CHANGING_HANDS, *ON_ANY_RANK, *ON_ANY_RANK, "sampling", "sampling", "logging",
          "evaluated"]


@pytest.mark.soak
@pytest.mark.parametrize(("how", "num_ranks", "learning"), [
    ("kill all", 1, []), ("kill all", 2, SIL), ("kill all", 3, ["training.shard=true"]),
    ("SIGINT", 2, [])], ids=str)
def test_a_run_struck_at_every_point_equals_the_uninterrupted_one(
        how, num_ranks, learning, tmp_path):
    stream = random.Random(f"{how} {num_ranks} {learning}")
    steps = [*learning, *EVERY_STEP, "training.max_steps=36"]
    expected = uninterrupted(num_ranks, tmp_path / "whole", *steps)
    # Three ranks start slowly, so they are struck at half of the points.
    points = [*NEW_MODELS, *stream.sample(POINTS, len(POINTS) // (2 if num_ranks == 3 else 1))]
    for point in points:
        once = point.startswith(("model", "eval"))
        strike = {"point": point, "how": how, "passing": 1 if once else stream.choice([1, 2]),
                  "rank": stream.randrange(num_ranks) if point in ON_ANY_RANK else 0}
        result = interrupted(num_ranks, strike, tmp_path / "struck", *steps)
        if how == "kill all":
            assert result.codes == [-signal.SIGKILL] * num_ranks, (strike, result.stderr)
        else:  # `ranks` sends SIGKILL to what resists the signal.
            assert not {0, -signal.SIGKILL} & set(result.codes), (strike, result.stderr)
            assert "Traceback" not in result.stderr

    result = interrupted(num_ranks, {}, tmp_path / "struck", *steps)

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "struck" / "struck").read_text().splitlines() == points
    assert outcome(tmp_path / "struck" / "a") == expected


def press_ctrl_c(command):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.argv[0] = command
    on_ctrl_c()
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("command", "resumes"), [
    ("main.py", "; run the same command again to resume from the newest checkpoint"),
    ("examples/ask.py", "")])
def test_ctrl_c_is_one_line(command, resumes):
    result = ranks(1, press_ctrl_c, command)

    assert result.returncode == 130
    assert result.stderr == f"\nstopped by Ctrl-C{resumes}\n"


# ---------------------------------------------------------------- state of one's own

def count_steps(folder: str, max_steps: str, value: str):
    """Each step adds what it makes of the value before, which each rank starts with at None."""
    def training_step(run):
        run.own_state["seen"] = [*run.own_state.get("seen", []), eval(value)]
        return in_truth(run)

    in_truth = main.training_step
    main.training_step = training_step
    run_without_curves(*SMALL, *EVERY_STEP, f"training.max_steps={max_steps}", f"run.dir={folder}")


def test_a_state_of_ones_own_comes_back_on_all_ranks(tmp_path):
    for max_steps in "12":
        result = ranks(2, count_steps, str(tmp_path), max_steps, "run.step")
        assert result.returncode == 0, result.stderr

    assert outcome(tmp_path / "a")["state"][-1]["seen"] == [0, 1]


@pytest.mark.parametrize("value, says", [
    ("RANK", "the ranks have different values in own_state"),
    ("(1, 2)", "own_state would not come back"),
    ("{1: 2}", "own_state would not come back"),
    ("run", "own_state cannot be saved as JSON")])
def test_a_state_of_ones_own_is_the_same_on_all_ranks_and_what_json_knows(value, says, tmp_path):
    result = ranks(2, count_steps, str(tmp_path), "1", value)

    assert result.codes == [2, 2]
    assert result.stderr.count(says) == result.stderr.count("error: ") == 1, result.stderr


# ---------------------------------------------------------------- damage

@pytest.mark.parametrize(("name", "says"), [
    ("state.json", "is damaged: delete it"), ("tensors-1.safetensors", "cannot be read")])
def test_a_damaged_checkpoint_is_refused_and_once_it_is_deleted_the_one_before_it_is_resumed(
        name, says, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "a")
    path = tmp_path / "a" / "checkpoints" / "step-000003" / name
    path.write_bytes(path.read_bytes()[:-1])
    # One rank with the same batch as that of two.
    settings = [*SMALL, *STEPS, f"run.dir={tmp_path}", "training.num_samples_per_step=4"]

    assert start(settings) == 2
    said = capsys.readouterr().err
    assert said.count(str(path.parent)) == said.count("error: ") == said.count("\n") == 1
    assert says in said

    shutil.rmtree(path.parent)
    assert start(settings) == 0
    assert "step-000002\n" in capsys.readouterr().out


# ---------------------------------------------------------------- a run that an enemy has made

def test_a_run_reads_and_writes_only_in_its_own_folder(whole, tmp_path, capsys):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    folder = tmp_path / "runs" / "a"
    shutil.copytree(whole, folder)
    settings = [*SMALL, *STEPS, f"run.dir={folder.parent}", "training.num_samples_per_step=4",
                "training.max_steps=4"]
    path = folder / "checkpoints" / "step-000003" / "state.json"
    state = json.loads(path.read_text())
    state["models"]["../../victim.txt"] = None
    state["code"]["../../victim.txt"] = "theirs"
    path.write_text(json.dumps(state))

    assert start(settings) == 0
    assert victim.read_text() == "mine"

    for name in ("samples.jsonl", ".lock"):
        (folder / name).rename(folder / "own")
        (folder / name).symlink_to(victim)
        capsys.readouterr()
        assert start([*settings, "training.max_steps=5"]) == 2
        assert f"{folder / name} is a link" in capsys.readouterr().err
        assert victim.read_text() == "mine"
        (folder / "own").replace(folder / name)


# ---------------------------------------------------------------- the best model

def evaluate_as(qualities: str, folder: str, more: str):
    """Each evaluation finds these shares solved. Of the steps, 3 and 6 are saved."""
    values = iter(json.loads(qualities))
    in_truth = main.evaluation_metrics
    main.evaluation_metrics = lambda *of: {**in_truth(*of), "eval/solved": next(values)}
    run_without_curves(*SMALL, f"run.dir={folder}", "training.max_steps=6", "validation.every=1",
                       "checkpoint.every=3", *json.loads(more))


def test_best_is_never_of_a_step_that_was_undone(tmp_path):
    """Steps 4 and 5 are better than step 3, and are not saved. The second start repeats them, and
    they come out worse, as they may with another `sampling.max_rows`."""
    folder = tmp_path / "a"
    ranks(1, evaluate_as, "[0.1, 0.2, 0.25, 0.3, 0.8, 0.9]", str(tmp_path), "[]")  # It fails in 6.
    assert step_of(folder / "best") == 5 and step_of(folder / "best.before") == 3

    result = ranks(1, evaluate_as, "[0.15, 0.25, 0.1]", str(tmp_path), '["sampling.max_rows=3"]')

    assert result.returncode == 0, result.stderr
    summary = json.loads((folder / "summary.json").read_text())
    training = json.loads((folder / "best" / "training.json").read_text())
    assert summary["best"]["step"] == training["step"] == 3
    assert summary["best"]["eval/solved"] == training["eval/solved"] == 0.3
    assert not (folder / "best.before").exists()


def test_a_users_own_folders_are_not_taken_for_ours(tmp_path):
    for name in ("step-mine", "step-1", "step-000007", "step-000012-2", "step-000012"):
        (tmp_path / name).mkdir()

    found = [path.name for path in newest_first(tmp_path)]

    assert found == ["step-000012", "step-000007"]
