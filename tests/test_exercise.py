"""examples/exercise.py: what it leaves to write, and whether it knows right from wrong."""

import difflib
import inspect
import sys

import pytest
from processes import ROOT, run

import main

sys.path.append(str(ROOT / "examples"))
import exercise

RIGHT = (ROOT / "main.py").read_text()
# what main.py says, what it then says, and where "not yet" shall be said of it
WRONG = {
    "a trace of rounding": ("if max(rewards) > min(rewards):", "if True:", "exactly 0 where"),
    "a mean over answers": ('"sequence": B * own_length', '"sequence": own_length',
                            "loss: loss_normalizer"),
    "low and high exchanged": ("clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)",
                               "loss: clip"),
}


@pytest.fixture
def folder(tmp_path, capsys):
    """As the first call makes it."""
    assert exercise.exercise(["--folder", str(tmp_path / "mine")]) == 0
    assert "call this command again" in capsys.readouterr().out
    return tmp_path / "mine"


def judged(folder, source):
    """What a later call says of such a main.py, as typed, where another main.py is in the way."""
    (folder / "main.py").write_text(source)
    result = run(sys.executable, ROOT / "examples/exercise.py", "--folder", folder,
                 PYTHONPATH=str(ROOT))
    assert (folder / "main.py").read_text() == source
    assert not result.stderr
    return result.returncode, result.stdout.splitlines()[1:]


def test_the_folder_is_a_copy_in_which_two_bodies_are_empty_and_nothing_else(folder):
    left = (folder / "main.py").read_text()
    before, after = (source.splitlines(keepends=True) for source in (RIGHT, left))
    changes = [(before[a:b], after[c:d]) for tag, a, b, c, d in difflib.SequenceMatcher(
        None, before, after, autojunk=False).get_opcodes() if tag != "equal"]
    for (body, empty), function in zip(changes, (main.compute_advantages, main.policy_loss),
                                       strict=True):
        assert empty == ['    raise NotImplementedError("yours to write")\n']
        head, _, rest = inspect.getsource(function).rpartition("".join(body))
        assert head.startswith("def ") and head.endswith('"""\n') and not rest
    for path in ("tests/conftest.py", "tiny/model/config.json", "machinery/advice.yaml"):
        assert (folder / path).read_bytes() == (ROOT / path).read_bytes()
    assert not (folder / "bench" / ".venv").exists() and not (folder / ".git").exists()


def test_the_tests_of_every_stage_exist():
    for test in [test for tests in exercise.STAGES.values() for test in tests]:
        path, _, name = test.partition("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text()


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
    assert code == 1 and lines[0] == f"not yet  {next(iter(exercise.STAGES))}"
    assert "yours to write" in lines[1] and len(lines) == 3
    code, lines = judged(folder, RIGHT)
    assert code == 0 and lines[len(exercise.STAGES)].startswith("All of it is right")
    assert lines[:len(exercise.STAGES)] == [f"right    {stage}" for stage in exercise.STAGES]


@pytest.mark.soak
@pytest.mark.parametrize("what", WRONG)
def test_the_first_stage_that_is_wrong_is_named_and_ends_it(what, folder):
    right, wrong, stage = WRONG[what]
    assert RIGHT.count(right) == 1
    code, lines = judged(folder, RIGHT.replace(right, wrong))
    *before, verdict, test, reason = lines
    assert code == 1 and all(line.startswith("right ") for line in before)
    assert verdict.startswith("not yet ") and stage in verdict
    assert "assert " in test and "which is not so: " in reason


@pytest.mark.soak
def test_a_loop_without_end_is_ended_and_named(folder, monkeypatch, capsys):
    monkeypatch.setattr(exercise, "SECONDS", 5)
    empty = (folder / "main.py").read_text()
    (folder / "main.py").write_text(empty.replace("raise NotImplementedError", "while True: pass#"))
    assert exercise.exercise(["--folder", str(folder)]) == 1
    assert "compute_advantages is not done after 5 s" in capsys.readouterr().out
