"""examples/exercise.py: what it leaves to write, and whether it knows right from wrong."""

import ast
import sys

import exercise
import pytest
from processes import ROOT, run

pytestmark = pytest.mark.house  # The exercise is a patch of main.py.
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
        assert ast.get_docstring(function) == ast.get_docstring(was[name])
        if name in exercise.VARIANTS:
            assert len(function.body) == 2  # the docstring and the placeholder
        elif name not in exercise.DEFAULT:
            assert ast.unparse(function) == ast.unparse(was[name])
    for call in ("imitate_best(group", "scale_advantages(group)", "variant_objective(advantages"):
        assert call in left
    assert (folder / "machinery/errors.py").exists() and not (folder / ".git").exists()


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
