"""examples/exercise.py: what it leaves to write, and whether it knows right from wrong."""

import ast
import importlib.util
import inspect
import sys

import exercise
import pytest
from conftest import make_config
from processes import ROOT, run

import main

RIGHT = (ROOT / "main.py").read_text()
NAMES = exercise.DEFAULT + exercise.VARIANTS
ASKED = [stage.asked for stage in exercise.STAGES]


@pytest.fixture
def folder(tmp_path):
    """As the first call makes it."""
    assert exercise.exercise(["--folder", str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


def functions_of(source: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)}


def test_the_folder_has_all_of_main_py_but_the_code_of_the_functions_to_write(folder):
    left = (folder / "main.py").read_text()
    was, now = functions_of(RIGHT), functions_of(left)

    assert left.count(exercise.PLACEHOLDER) == len(NAMES) == 9
    assert list(now) == list(was)
    for name, function in now.items():
        assert ast.unparse(function.args) == ast.unparse(was[name].args)
        assert ast.get_docstring(function) == ast.get_docstring(was[name])
        if name in exercise.VARIANTS:
            assert len(function.body) == 2  # the docstring and the placeholder
        elif name not in exercise.DEFAULT:
            assert ast.unparse(function) == ast.unparse(was[name])
    assert (folder / "machinery/errors.py").exists() and not (folder / ".git").exists()


def test_the_empty_default_path_still_calls_the_variants_and_does_nothing_else(
        folder, monkeypatch):
    spec = importlib.util.spec_from_file_location("mine", folder / "main.py")
    mine = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", mine)
    spec.loader.exec_module(mine)
    monkeypatch.setattr(mine, "imitate_best", lambda *_: "imitated")
    monkeypatch.setattr(mine, "variant_loss", lambda *_: "variant")
    default = make_config().training

    sil = make_config(training__learning_type="sil", training__k_best_of_n=[2, 8]).training
    assert mine.compute_advantages([], sil) == "imitated"
    for key, value in (("loss_normalizer", "tokens"), ("updates_per_batch", 2), ("kl_beta", 0.1)):
        training = make_config(**{f"training__{key}": value}).training
        assert mine.policy_loss(None, [], {}, training) == "variant"
    with pytest.raises(NotImplementedError):
        mine.compute_advantages([], default)
    with pytest.raises(NotImplementedError):
        mine.policy_loss(None, [], {}, default)
    assert "scale_advantages(group, training)" in inspect.getsource(mine.compute_advantages)


def test_every_function_is_asked_for_in_order_by_tests_that_exist():
    places = []
    for name in NAMES:
        assert callable(getattr(main, name))
        places.append(min(i for i, asked in enumerate(ASKED) if name in asked.partition(":")[0]))
    assert places == sorted(places)

    for stage in exercise.STAGES:
        for test in stage.tests:
            path, name = test.partition("[")[0].split("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), test


@pytest.mark.parametrize(("source", "says"), [
    ("def main(:\n    pass\n", "invalid syntax (main.py, line 1)"),
    ("return\n", "'return' outside function"), (None, "No such file")])
def test_what_is_no_python_is_one_line_and_stays_as_it_is(source, says, folder):
    path = folder / "main.py"
    path.unlink()
    if source is not None:
        path.write_text(source)

    with pytest.raises(SystemExit, match="^error: .*$") as end:
        exercise.exercise(["--folder", str(folder)])

    assert says in end.value.code and "\n" not in end.value.code
    assert source is None or path.read_text() == source


# ---------------------------------------------------------------- right and wrong

def judged(folder, source: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a later call, with this as main.py in the folder."""
    (folder / "main.py").write_text(source)
    result = run(sys.executable, ROOT / "examples/exercise.py", "--folder", folder)
    assert not result.stderr and (folder / "main.py").read_text() == source
    return result.returncode, result.stdout.splitlines()[1:]


@pytest.mark.soak
def test_main_py_is_right_and_with_its_default_alone_the_first_variant_is_not_yet(folder):
    lines = RIGHT.splitlines(keepends=True)
    for name, function in reversed(functions_of(RIGHT).items()):
        if name in exercise.VARIANTS:
            first = function.body[1].lineno - 1
            lines[first:function.end_lineno] = [f"    {exercise.PLACEHOLDER}\n"]

    code, said = judged(folder, RIGHT)
    assert code == 0 and said[:len(ASKED)] == [f"right    {asked}" for asked in ASKED]
    code, said = judged(folder, "".join(lines))
    assert code == 1 and said[:3] == [f"right    {asked}" for asked in ASKED[:3]]
    assert said[3] == f"not yet  {ASKED[3]}" and "yours to write" in said[4]


@pytest.mark.soak
@pytest.mark.parametrize(("right", "wrong", "stage"), [
    ("answer.advantage = answer.reward - mean_reward", "answer.advantage = answer.reward",
     "compute_advantages: the reward"),
    ("if max(rewards) == min(rewards):", "if False:", "exactly 0 if"),
    ("return -(advantages * token_log", "return (advantages * token_log", "policy_loss"),
    ("answer.reward, reverse=True)", "answer.reward)", "imitate_best"),
    ("stdev(rewards) + 1e-4", "stdev(rewards)", "scale_rewards=group"),
    ("sum(abs(reward) for reward in rewards) / len(rewards)", "1.0", "scale_rewards=mean"),
    ('return totals["answers"] * lengths', "return lengths", "variant_normalizer"),
    ("ratio = log_ratio.exp()", "ratio = log_ratio + 1", "updates_per_batch=2"),
    ("clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)", "ratio_objective: clip"),
    ("of_answer.mean()", "of_answer.sum()", "ratio=sequence"),
    ("return (token_log_probs - reference_log_probs)", "return (reference_log_probs)",
     "kl_in_reward"),
    ("objective - training.kl_beta * kl", "objective + training.kl_beta * kl", "kl_in_loss"),
])
def test_each_stage_that_is_wrong_is_the_first_that_is_not_yet_right(right, wrong, stage, folder):
    assert RIGHT.count(right) == 1

    code, lines = judged(folder, RIGHT.replace(right, wrong))

    *before, verdict, _, _ = lines
    assert code == 1 and all(line.startswith("right ") for line in before)
    assert verdict.startswith("not yet ") and stage in verdict


@pytest.mark.soak
def test_a_loop_without_end_is_ended_and_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "SECONDS", 5)
    empty = (folder / "main.py").read_text()
    (folder / "main.py").write_text(empty.replace("raise NotImplementedError", "while True: pass#"))

    assert exercise.exercise(["--folder", str(folder)]) == 1

    said = capsys.readouterr().out
    assert "while True" in said and "Timeout (>5.0s)" in said
