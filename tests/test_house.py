"""The house: what lives in which room, which way imports point, and how large a room may grow."""

import ast
import re
import subprocess

import pytest
from processes import ROOT

FILES = ["__init__", "check", "errors", "metrics", "model", "passes", "prompts", "ranks", "runs",
         "sampling", "settings", "sharding", "tasks"]
MACHINERY = [ROOT / "machinery" / f"{name}.py" for name in FILES]
ROOMS = [ROOT / "main.py", ROOT / "logger.py", ROOT / "countdown.py", *MACHINERY]
LINES = {"main.py": 640, "logger.py": 360, "countdown.py": 250}
LINES_BEFORE_VARIANTS = 500
LINES_OF_MACHINERY = 2400
LINES_OF_A_FUNCTION = 45
COLUMNS = 100
# They make backward passes and steps in which no weight changes and no gradient is added to.
TEACH_NOTHING = ("warm_up", "find_unreached")


def imported(path) -> set[str]:
    """The rooms that a room imports, at its top or anywhere inside."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name and (ROOT / f"{name.replace('.', '/')}.py").exists()}


def room(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_point_one_way_and_in_no_circle():
    needs = {room(path): imported(path) for path in ROOMS}
    assert not needs["countdown"]
    assert needs["logger"] and all(name.startswith("machinery.") for name in needs["logger"])
    for path in MACHINERY:
        assert all(name.startswith("machinery.") for name in needs[room(path)]), path.name
    assert "logger" in needs["main"] and "countdown" not in needs["main"]
    below: list[str] = []  # each room after all that it imports
    while len(below) < len(needs):
        free = [name for name in needs if name not in below and needs[name] <= set(below)]
        assert free, f"a circle: {set(needs) - set(below)}"
        below += free
    assert below[-1] == "main"


def test_main_py_can_be_read_in_one_sitting():
    source = (ROOT / "main.py").read_text()
    before_variants, _ = re.split(r"^# -+ Variants\n", source, flags=re.MULTILINE)
    assert len(before_variants.splitlines()) <= LINES_BEFORE_VARIANTS


def test_there_is_no_other_file_and_none_is_longer_than_it_should_be():
    assert {path.name for path in ROOT.glob("*.py")} == set(LINES)
    assert sorted((ROOT / "machinery").glob("*.py")) == MACHINERY
    lengths = {path: len(path.read_text().splitlines()) for path in ROOMS}
    for name, most in LINES.items():
        assert lengths[ROOT / name] <= most, name
    assert sum(lengths[path] for path in MACHINERY) <= LINES_OF_MACHINERY


def test_no_function_of_the_machinery_takes_a_whole_run():
    for path in MACHINERY:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arguments):
                names = {argument.arg for argument in (*node.args, *node.kwonlyargs)}
                assert "run" not in names, path.name


def test_no_line_is_too_wide_and_no_function_longer_than_a_screen():
    """In code, YAML and Markdown: code and page stand side by side on a laptop."""
    tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                             cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    suffixes = (".py", ".yaml", ".md", ".toml", ".sh", ".example", "/run")
    paths = {ROOT / name for name in tracked if name.endswith(suffixes)} & set(ROOT.rglob("*"))
    for path in {*paths, *ROOMS}:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            # A row of a table is one line. So is a command of the Quickstart, to be pasted as one.
            may_be_wider = line.startswith(("python3 -m venv .venv && ", "| "))
            assert len(line) <= COLUMNS or may_be_wider, f"{path.relative_to(ROOT)}:{number}"
    for path in ROOMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= LINES_OF_A_FUNCTION, (path.name, node.name)


def test_nothing_in_the_machinery_learns_and_no_room_hides_code():
    for path in ROOMS:
        tree = ast.parse(path.read_text())
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not {"exec", "eval", "compile"} & {call.id for call in calls
                                                  if isinstance(call, ast.Name)}, path.name
        assert not re.search(r";\s*$|;\s+\w+ =", path.read_text(), re.MULTILINE), path.name
    for path in MACHINERY:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name not in TEACH_NOTHING:
                attributes = {node.func.attr for node in ast.walk(function) if isinstance(
                    node, ast.Call) and isinstance(node.func, ast.Attribute)}
                assert not attributes & {"backward", "step"}, (path.name, function.name)


@pytest.mark.parametrize("path", MACHINERY, ids=lambda path: path.name)
def test_the_first_line_of_each_room_says_what_to_believe(path):
    first = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    assert len(first) > 30 and path.read_text().startswith('"""')
    if path.name != "__init__.py":
        assert f"machinery/{path.name}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_six_numbers_of_the_head_stand_over_the_sections_and_in_training_step():
    source = (ROOT / "main.py").read_text()
    head = ast.get_docstring(ast.parse(source))
    steps = re.findall(r"^  (\d)\. (\w+)  ", head, re.MULTILINE)
    assert [number for number, _ in steps] == list("123456")
    sections = dict(re.findall(r"^# -+ (\d)\. (.*?)(?=^# --)", source, re.MULTILINE | re.DOTALL))
    assert list(sections) == list("123456")
    assert all(f"\ndef {function}(" in sections[number] for number, function in steps)
    body = source[source.index("def training_step"):]
    comments = re.findall(r"^    # (\d\..*)", body[:body.index("\ndef ")], re.MULTILINE)
    assert re.findall(r"(\d)\.", " ".join(comments)) == list("123456")


def test_the_readmes_walk_goes_through_main_py_in_its_order_and_quotes_what_stands_there():
    """A line of dots in a quotation stands for lines left out."""
    readme, source = ((ROOT / name).read_text() for name in ("README.md", "main.py"))
    walk = readme.split("## One question, one step\n")[1].split("\n## ")[0]
    chapters = re.split(r"^### (.*)\n", walk, flags=re.MULTILINE)[1:]
    sections = re.split(r"^# -{60,} (.*)\n", source, flags=re.MULTILINE)[1:]
    titles = sections[::2]
    assert titles[0] == "the algorithm" and titles[-2:] == ["the training loop", "Variants"]
    assert [title.lower() for title in chapters[::2]] == titles[1:-2]
    for title, chapter, section in zip(chapters[::2], chapters[1::2], sections[3::2]):
        for quotation in re.findall(r"```python\n(.*?)```", chapter, re.DOTALL):
            place = 0
            for piece in re.split(r"^ *\.\.\.\n", quotation, flags=re.MULTILINE):
                assert piece in section[place:], (title, piece)
                place = section.index(piece, place) + len(piece)
