"""examples/notebook.ipynb: it is a notebook, and its cells run wherever somebody opens it."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from browser import data_of
from processes import ROOT, run

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
CHANGE = "high-entropy-tokens"
RUNS = ("notebook", f"notebook-{CHANGE}")
# The cells are Python but for their lines with "!". IPython isn't among the packages we require.
IN_PLACE_OF_IPYTHON = """
import subprocess
import sys
from types import ModuleType

def shell(command):
    subprocess.run(command, shell=True, check=True)

display = ModuleType("IPython.display")
display.Image = display.HTML = str
sys.modules["IPython.display"] = display
"""
# The line that installs is left out: the Python that runs the cells here is the one that runs the
# tests, so it has everything in requirements.txt. All else is as a reader runs it, only smaller.
REPLACED = {
    "!{python} -m pip install -q -r requirements.txt": "",
    "training.num_samples_per_step=16":
        "training.num_samples_per_step=2 training.max_steps=2 data.num_validation=4",
}


# ---------------------------------------------------------------- the file

def test_it_is_a_notebook_that_was_run_from_top_to_bottom():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    ids = [cell["id"] for cell in CELLS]
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]

    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", id) for id in ids)
    assert all(cell.keys() >= {"cell_type", "id", "metadata", "source"} for cell in CELLS)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    assert NOTEBOOK.stat().st_size < 600_000


def test_a_cell_of_text_comes_before_each_cell_of_code():
    kinds = [cell["cell_type"] for cell in CELLS]

    assert all("markdown" in pair for pair in pairwise(kinds))


def texts_of(output: dict) -> str:
    """What an output says in words. In a picture's letters, anything may appear by chance."""
    parts = {"text/plain": output.get("text", ""), **output.get("data", {})}
    return "\n".join("".join(part) for kind, part in parts.items() if "image" not in kind)


def test_no_output_names_a_folder_of_the_machine_it_was_run_on():
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]

    assert len(outputs) > 5
    for output in outputs:
        assert not re.search(r"/(work|root|tmp|home|Users)/", texts_of(output))


def test_every_link_leads_somewhere():
    texts = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", texts) if "://" not in link]

    assert len(links) > 4
    assert all((NOTEBOOK.parent / link).exists() for link in links)


# ---------------------------------------------------------------- its cells

def script_of(names: list[str], repository: Path) -> str:
    """The cells as a script. A line with "!" is a command in the shell, as in a notebook."""
    text = "\n".join(CODE[name] for name in names)
    for old, new in {**REPLACED, 'REPOSITORY = ""': f"REPOSITORY = {str(repository)!r}"}.items():
        text = text.replace(old, new)
    lines = [IN_PLACE_OF_IPYTHON]
    for line in text.splitlines():
        indent, mark, command = line.partition("!")
        is_command = mark and not indent.strip()
        lines.append(f"{indent}shell(f{command!r})" if is_command else line)
    return "\n".join(lines)


def git(*words: str, cwd: Path) -> str:
    own = ["-c", "user.name=-", "-c", "user.email=-", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(["git", *own, *words], cwd=cwd, check=True, text=True,
                          capture_output=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A repository of what is here now, committed or not."""
    folder = tmp_path / "repository"
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git("init", "--quiet", cwd=folder)
    git("add", "--all", cwd=folder)
    git("commit", "--quiet", "--no-gpg-sign", "-m", "now", cwd=folder)
    return folder


def check_results(clone: Path) -> None:
    """Both runs have reached their end, there's something to look at, and main.py is as it was."""
    for picture in (clone / "runs/notebook/curves.png", clone / "runs/solved.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000
    page = data_of(clone / "one_step.html")
    assert len(page["answers"]) == 8 and len(page["again"]) == 3
    steps = [json.loads((clone / "runs" / name / "summary.json").read_text())["steps"]
             for name in RUNS]
    assert steps == [2, 2]
    unchanged, changed = ((clone / "runs" / name / "main.py").read_text() for name in RUNS)
    assert unchanged == (clone / "main.py").read_text() == (ROOT / "main.py").read_text()
    assert changed != unchanged
    assert git("status", "--porcelain", cwd=clone) == ""


@pytest.mark.soak
def test_all_cells_run_in_an_empty_folder_and_again_in_the_clone(repository, tmp_path):
    everything = tmp_path / "everything.py"
    everything.write_text(script_of(list(CODE), repository), encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    clone = empty / "onefile-grpo"
    assert all(old in "\n".join(CODE.values()) for old in [*REPLACED, 'REPOSITORY = ""'])

    def run_cells(script: Path, folder: Path) -> str:
        result = run(sys.executable, script, cwd=folder, MPLBACKEND="Agg")
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    said = run_cells(everything, empty)  # As in Colab: the first cell clones.
    assert "of 4 right" in said and "this run has finished" not in said
    check_results(clone)

    said = run_cells(everything, clone / "examples")  # As from a clone: it's the parent folder.
    assert "of 4 right" in said and said.count("this run has finished") == 2
    check_results(clone)

    # As after a cell that was killed: the change is still applied, and Colab's folder is the old.
    git("apply", f"changes/{CHANGE}.diff", cwd=clone)
    rest = tmp_path / "rest.py"
    rest.write_text(script_of(["install", "change"], repository), encoding="utf-8")
    run_cells(rest, empty)
    check_results(clone)
