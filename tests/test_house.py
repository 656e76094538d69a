"""The house: what lives in which room, and which way imports point."""

import ast
import re

import pytest
from processes import ROOT

pytestmark = pytest.mark.house
FILES = ["__init__", "check", "code", "errors", "metrics", "model", "passes", "prompts", "ranks",
         "runs", "sampling", "settings", "sharding", "tasks"]
MACHINERY = [ROOT / "machinery" / f"{name}.py" for name in FILES]
ROOMS = [ROOT / "main.py", ROOT / "logger.py", ROOT / "countdown.py", *MACHINERY]
# They make backward passes and steps in which no weight changes and no gradient is added to.
TEACH_NOTHING = ("warm_up", "find_unreached")


def test_imports_point_one_way():
    """Python itself refuses a circle."""
    for path in ROOMS[1:]:
        source = path.read_text()
        assert not re.search(r"^ *(from|import) (main|logger|countdown)\b", source, re.MULTILINE)
        assert path.name != "countdown.py" or "machinery" not in source


def test_there_is_no_other_file():
    assert {path.name for path in ROOT.glob("*.py")} == {"main.py", "logger.py", "countdown.py"}
    assert sorted((ROOT / "machinery").glob("*.py")) == MACHINERY


def test_nothing_in_the_machinery_learns():
    for path in MACHINERY:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            called = {node.func.attr for node in ast.walk(function)
                      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
            if function.name not in TEACH_NOTHING:
                assert not called & {"backward", "step"}, (path.name, function.name)
