"""examples/notebook.ipynb: it is a notebook, and its cells run wherever somebody opens it."""

import json
import re
import sys

import pytest
from browser import data_of
from processes import ROOT, run

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = {cell["id"]: "".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"}
RUNS = ("notebook", "notebook-high-entropy-tokens")
# The cells are Python, except for lines that start with "!". We don't require IPython.
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
    'REPOSITORY = ""': f"REPOSITORY = {str(ROOT)!r}",
    "!{python} -m pip install -q -r requirements.txt": "",
    "training.num_samples_per_step=16":
        "training.num_samples_per_step=2 training.max_steps=2 data.num_validation=4",
}


# ---------------------------------------------------------------- the file

def test_it_was_run_from_top_to_bottom_and_names_no_folder_of_that_machine():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]

    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len(outputs) > 5 and all(output["output_type"] != "error" for output in outputs)
    for output in outputs:
        parts = {"text/plain": output.get("text", ""), **output.get("data", {})}
        for kind, part in parts.items():  # In a picture's letters, anything may appear by chance.
            assert "image" in kind or not re.search(r"/(work|root|tmp|home|Users)/", "".join(part))


def test_every_link_leads_somewhere():
    texts = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", texts) if "://" not in link]

    assert len(links) > 4
    assert all((NOTEBOOK.parent / link).exists() for link in links)


# ---------------------------------------------------------------- its cells

def script() -> str:
    """The cells as a script. A line with "!" is a command in the shell, as in a notebook."""
    text = "\n".join(CODE.values())
    for old, new in REPLACED.items():
        assert old in text
        text = text.replace(old, new)
    lines = [IN_PLACE_OF_IPYTHON]
    for line in text.splitlines():
        indent, mark, command = line.partition("!")
        is_command = mark and not indent.strip()
        lines.append(f"{indent}shell(f{command!r})" if is_command else line)
    return "\n".join(lines)


@pytest.mark.soak
def test_all_cells_run_in_an_empty_folder_and_again_in_the_clone(tmp_path):
    path = tmp_path / "notebook.py"
    path.write_text(script(), encoding="utf-8")
    clone = tmp_path / "onefile-grpo"
    # As in Colab, the first cell clones, from what's committed here. Then as from a clone.
    for folder, num_finished in ((tmp_path, 0), (clone / "examples", 2)):
        result = run(sys.executable, path, cwd=folder, MPLBACKEND="Agg")

        assert result.returncode == 0, result.stdout + result.stderr
        assert "of 4 right" in result.stdout
        assert result.stdout.count("this run has finished") == num_finished
        assert (clone / "runs/solved.png").read_bytes().startswith(b"\x89PNG")
        assert len(data_of(clone / "one_step.html")["answers"]) == 8
        (clone / "runs/solved.png").unlink()
        (clone / "one_step.html").unlink()
        unchanged, changed = (
            (clone / "runs" / name / "main.py").read_text() for name in RUNS)
        assert unchanged == (clone / "main.py").read_text() != changed
