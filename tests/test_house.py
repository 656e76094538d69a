"""The house: what lives in which room, which way imports point, and how large a room may grow."""

import ast
import re

from processes import ROOT

FILES = ["__init__", "check", "errors", "metrics", "model", "passes", "prompts", "ranks", "runs",
         "sampling", "settings", "sharding", "tasks"]
MACHINERY = [ROOT / "machinery" / f"{name}.py" for name in FILES]
ROOMS = [ROOT / "main.py", ROOT / "logger.py", ROOT / "countdown.py", *MACHINERY]
LINES = {"main.py": 640, "logger.py": 360, "countdown.py": 250}
LINES_BEFORE_VARIANTS = 500
LINES_OF_MACHINERY = 2400
LINES_OF_A_FUNCTION = 45
# They make backward passes and steps in which no weight changes and no gradient is added to.
TEACH_NOTHING = ("warm_up", "find_unreached")


def test_imports_point_one_way():
    """Python itself refuses a circle."""
    for path in ROOMS[1:]:
        source = path.read_text()
        assert not re.search(r"^ *(from|import) (main|logger|countdown)\b", source, re.MULTILINE)
        assert path.name != "countdown.py" or "machinery" not in source


def test_there_is_no_other_file_and_none_is_longer_than_it_should_be():
    assert {path.name for path in ROOT.glob("*.py")} == set(LINES)
    assert sorted((ROOT / "machinery").glob("*.py")) == MACHINERY
    lengths = {path: len(path.read_text().splitlines()) for path in ROOMS}
    for name, most in LINES.items():
        assert lengths[ROOT / name] <= most, name
    assert sum(lengths[path] for path in MACHINERY) <= LINES_OF_MACHINERY
    before_variants, _ = re.split(r"\n# -+ Variants\n", (ROOT / "main.py").read_text())
    assert len(before_variants.splitlines()) <= LINES_BEFORE_VARIANTS


def test_no_function_is_longer_than_a_screen_and_none_in_the_machinery_learns():
    for path in ROOMS:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            length = function.end_lineno - function.lineno + 1
            assert length <= LINES_OF_A_FUNCTION, (path.name, function.name)
            attributes = {node.attr for node in ast.walk(function)
                          if isinstance(node, ast.Attribute)}
            if path in MACHINERY and function.name not in TEACH_NOTHING:
                assert not attributes & {"backward", "step"}, (path.name, function.name)
