"""examples/exercise.py: what it leaves to write, and whether it knows right from wrong."""

import ast
import difflib
import importlib.util
import inspect
import sys

import pytest
from conftest import make_config
from processes import ROOT, run

import main

sys.path.append(str(ROOT / "examples"))
import exercise

RIGHT = (ROOT / "main.py").read_text()
ASKED = [stage.asked for stage in exercise.STAGES]
# what main.py says, what it then says, and where "not yet" shall be said of it
WRONG = {
    "a trace of rounding": ("if max(rewards) == min(rewards):", "if False:", "exactly 0 if"),
    "the k worst": ("stream.random()), reverse=True)", "stream.random()))", "imitate_best: "),
    "a mean over answers": ("return num_answers * lengths", "return lengths",
                            "variant_normalizer: "),
    "low and high exchanged": ("clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)",
                               "ratio_objective: clip"),
    "the other sign of KL": ("return (token_log_probs - reference_log_probs).detach()",
                             "return (reference_log_probs - token_log_probs).detach()",
                             "kl_in_reward: "),
}


@pytest.fixture
def folder(tmp_path, capsys):
    """As the first call makes it."""
    assert exercise.exercise(["--folder", str(tmp_path / "mine")]) == 0
    assert "Call this command again" in capsys.readouterr().out
    return tmp_path / "mine"


def judged(folder, source):
    """What a later call says of such a main.py, as typed, where another main.py is in the way."""
    (folder / "main.py").write_text(source)
    result = run(sys.executable, ROOT / "examples/exercise.py", "--folder", folder,
                 PYTHONPATH=str(ROOT))
    assert (folder / "main.py").read_text() == source
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()[1:]


def functions_of(source: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(source).body
            if isinstance(each, ast.FunctionDef)}


def test_the_folder_is_a_copy_in_which_the_bodies_of_the_functions_are_empty_and_nothing_else(
        folder):
    left = (folder / "main.py").read_text()
    empty = "    " + exercise.PLACEHOLDER + "\n"
    before, after = (source.splitlines(keepends=True) for source in (RIGHT, left))
    changes = [(before[a:b], after[c:d]) for tag, a, b, c, d in difflib.SequenceMatcher(
        None, before, after, autojunk=False).get_opcodes() if tag != "equal"]
    assert all(put in ([], [empty]) for _, put in changes)
    names = exercise.DEFAULT + exercise.VARIANTS
    assert left.count(empty) == len(names) == len(set(names)) == 9
    was, now = functions_of(RIGHT), functions_of(left)
    for name in names:  # Each has its docstring still, and of its code what is said below.
        assert inspect.getdoc(getattr(main, name)) == inspect.cleandoc(ast.get_docstring(now[name]))
        assert ast.unparse(was[name].args) == ast.unparse(now[name].args)
        statements = [ast.unparse(each) for each in now[name].body[1:]]
        statements.remove(exercise.PLACEHOLDER.replace('"', "'"))
        assert not statements or name in exercise.DEFAULT
    removed = sum(len(taken) for taken, _ in changes)
    assert removed > 40 and len(before) - removed + 9 == len(after)
    for path in ("tests/conftest.py", "tiny/model/config.json", "machinery/advice.py"):
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes()
    assert not (folder / "bench" / ".venv").exists() and not (folder / ".git").exists()


def test_the_empty_default_path_still_calls_the_variants_and_does_nothing_else(
        folder, monkeypatch):
    """So a variant can be written without touching what was right before."""
    spec = importlib.util.spec_from_file_location("mine", folder / "main.py")
    mine = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine", mine)
    spec.loader.exec_module(mine)
    for name in exercise.VARIANTS:
        monkeypatch.setattr(mine, name, lambda *_, name=name: name)
    sil = make_config(training__learning_type="sil", training__k_best_of_n=[2, 8]).training
    assert mine.compute_advantages([], sil, None) == "imitate_best"
    for key, value in (("loss_normalizer", "tokens"), ("updates_per_batch", 2), ("kl_beta", 0.1)):
        training = make_config(**{f"training__{key}": value}).training
        assert mine.policy_loss(None, [], 1, 1, training) == "variant_loss"
    default = make_config().training
    with pytest.raises(NotImplementedError, match="yours to write"):
        mine.compute_advantages([], default, None)
    with pytest.raises(NotImplementedError, match="yours to write"):
        mine.policy_loss(None, [], 1, 1, default)
    assert "scale_advantages(group, training)" in inspect.getsource(mine.compute_advantages)


def test_the_tests_of_every_stage_exist():
    tests = [test for stage in exercise.STAGES for test in stage.tests]
    assert len(tests) == len(set(tests)) > len(exercise.STAGES)
    for test in tests:
        path, _, name = test.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_every_function_is_asked_for_the_default_first():
    names = exercise.DEFAULT + exercise.VARIANTS
    places = [min(i for i, asked in enumerate(ASKED) if name in asked.partition(":")[0])
              for name in names]
    assert places == sorted(places) and len(ASKED) == len(set(ASKED))
    assert all(callable(getattr(main, name)) for name in names)


@pytest.mark.parametrize(("source", "says"), [
    (b"def main(:\n    pass\n", "invalid syntax (main.py, line 1)"),
    (b"def main():\nreturn\n", "(main.py, line 2)"), (b"return\n", "'return' outside function"),
    (None, "No such file")])
def test_what_is_no_python_is_one_line_and_stays_as_it_is(folder, source, says, capsys):
    path = folder / "main.py"
    path.unlink() if source is None else path.write_bytes(source)
    with pytest.raises(SystemExit) as end:
        exercise.exercise(["--folder", str(folder)])
    assert end.value.code.startswith("error: ") and says in end.value.code
    assert "\n" not in end.value.code and len(capsys.readouterr().out.splitlines()) == 1
    assert source is None or path.read_bytes() == source


@pytest.mark.soak
def test_the_functions_of_main_py_are_right_and_the_empty_ones_are_not(folder):
    code, lines = judged(folder, (folder / "main.py").read_text())
    assert code == 1 and lines[0] == f"not yet  {ASKED[0]}"
    assert "yours to write" in lines[1] and len(lines) == 3
    code, lines = judged(folder, RIGHT)
    assert code == 0 and lines[len(ASKED)].startswith("All of it is right")
    assert lines[:len(ASKED)] == [f"right    {asked}" for asked in ASKED]


@pytest.mark.soak
def test_with_the_two_default_functions_alone_the_default_is_right_and_the_first_variant_not_yet(
        folder):
    was, lines = functions_of(RIGHT), RIGHT.splitlines(keepends=True)
    for name in reversed([name for name in was if name in exercise.VARIANTS]):
        first, last = was[name].body[1].lineno - 1, was[name].end_lineno
        lines[first:last] = [f"    {exercise.PLACEHOLDER}\n"]
    code, said = judged(folder, "".join(lines))
    num_right = sum(asked.startswith(exercise.DEFAULT) for asked in ASKED)
    assert code == 1 and num_right == 3
    assert said[:num_right] == [f"right    {asked}" for asked in ASKED[:num_right]]
    assert said[num_right] == f"not yet  {ASKED[num_right]}" and "imitate_best" in said[num_right]
    assert "yours to write" in said[num_right + 1]


@pytest.mark.soak
@pytest.mark.parametrize("what", WRONG)
def test_the_first_stage_that_is_wrong_is_named_and_ends_it(what, folder):
    right, wrong, stage = WRONG[what]
    assert RIGHT.count(right) == 1
    code, lines = judged(folder, RIGHT.replace(right, wrong))
    *before, verdict, test, reason = lines
    assert code == 1 and all(line.startswith("right ") for line in before)
    assert verdict.startswith("not yet ") and stage in verdict
    assert "assert " in test and "this is not so: " in reason


@pytest.mark.soak
def test_a_loop_without_end_is_ended_and_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "SECONDS", 5)
    empty = (folder / "main.py").read_text()
    (folder / "main.py").write_text(empty.replace("raise NotImplementedError", "while True: pass#"))
    assert exercise.exercise(["--folder", str(folder)]) == 1
    assert "compute_advantages has not ended after 5 s" in capsys.readouterr().out
