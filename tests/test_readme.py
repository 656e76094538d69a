"""README and docs/ keep their word: the commands that they show are understood, the task that they
show is trained on, the README's code is that of main.py, its answers are sampled, and all links
lead somewhere, also those in the code, the recipes and the diffs. (That every metric is explained
is in test_run.py.)"""

import json
import re
import shlex
from pathlib import Path

import experiments
import mistakes
import pytest
import runs
from conftest import run_without_curves
from processes import ROOT, ranks, run
from torch.distributed.run import parse_args

import main
from machinery.ranks import RANK
from machinery.settings import load_config
from machinery.tasks import load_task

pytestmark = pytest.mark.house
README = (ROOT / "README.md").read_text()
PAGES = "\n".join([README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))])


def commands() -> list[str]:
    """Every command in the pages' blocks of bash, continued lines joined, and those of tables."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGES, re.DOTALL)
    blocks += re.findall(r"`(\.venv/bin/(?:python|torchrun) [^`]+)`", PAGES)
    keys = re.findall(r"^\|.*?\| `('?(?:training|task)\.\w+=[^`]+)`", PAGES, re.MULTILINE)
    blocks += [f".venv/bin/python main.py {each}" for each in keys]
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def arguments_of(command: str) -> list[str]:
    """What comes behind main.py."""
    words = shlex.split(command.rpartition("&&")[2])
    if words[0].endswith("torchrun"):
        return parse_args(words[1:]).training_script_args
    return words[2:]


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """A folder with the tasks of docs/task.md, and mine.csv as the command there makes it."""
    page = (ROOT / "docs" / "task.md").read_text()
    tasks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert {name for name, _ in tasks} >= {"mytask.py", "four.py", "terse.py"}
    for name, text in tasks:
        (tmp_path / name).write_text(text)
    makes_data = re.search(r"```bash\n([^`]*?> mine\.csv\n)", page, re.DOTALL)[1]
    assert run("bash", "-c", makes_data, cwd=tmp_path).returncode == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_that_is_shown_has_settings_that_are_understood_and_scripts_that_exist(
        own_task):
    (own_task / "my.yaml").write_text("training:\n  learning_rate: 0.00001\n")
    (own_task / "recipes").symlink_to(ROOT / "recipes")
    assert len(commands()) > 50
    for command in commands():
        for script in re.findall(r"\b(?:examples|bench|tests)/\w+\.py", command):
            assert (ROOT / script).exists(), command
        if "main.py" in command:
            config = load_config([*arguments_of(command), "model.device=null"])
            if config.task.name != "countdown":
                load_task(config)


def test_the_task_that_docs_show_is_trained_on(own_task):
    result = ranks(2, run_without_curves, "task.name=mytask.py", "data.dataset=mine.csv",
                   "training.max_steps=1", "training.max_new_gen_tokens=8",
                   "training.num_samples_per_step=2", "data.num_validation=4",
                   "validation.best_of_n=2", f"run.dir={own_task}", cwd=own_task)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1


# ---------------------------------------------------------------- links

def without_code(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Where a link may lead on a page: its headings, as the hosting site writes them in a link."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_pages_and_of_the_program_leads_somewhere():
    links = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        links += [(page.parent, page, link)
                  for link in re.findall(r"\]\(\s*([^)\s]+)\)", without_code(page))]
    notebook = ROOT / "examples" / "notebook.ipynb"
    links += [(notebook.parent, notebook, link)
              for link in re.findall(r"\]\((\.\./[^)\s]+)\)", notebook.read_text())]
    kinds = ("*.py", "*/*.py", "*.yaml", "*/*.yaml", "*/*.sh", "*/*.html", "*/*.diff",
             "changes/*/*.diff", "*.md", "*/*.md")
    for source in [path for kind in kinds for path in ROOT.glob(kind)]:
        links += [(ROOT, source, link)
                  for link in re.findall(r"\bdocs/[\w-]+\.\w+(?:#[\w-]+)?", source.read_text())]
    assert len(links) > 200
    for folder, page, link in links:
        path, _, anchor = link.partition("#")
        if path.startswith(("http", "../../actions")):  # The badge is a page of the hosting site.
            continue
        target = folder / path if path else page
        assert target.exists(), (page, link)
        assert not anchor or anchor in anchors_of(target), (page, link)


# ---------------------------------------------------------------- code and answers that are shown

def test_all_code_in_the_readme_stands_in_main_py_in_this_order():
    source = (ROOT / "main.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) > 4
    for block in blocks:
        place = 0
        for line in block.splitlines():
            if line.strip() != "...":
                place = source.index(f"{line}\n", place)


def test_the_file_of_results_has_all_planned_runs_and_no_others():
    planned = {f"{name} seed {seed}" for name, seed in runs.planned()}
    assert json.loads(experiments.DATA.read_text()).keys() == planned


@pytest.mark.parametrize("page", experiments.TABLES)
def test_the_tables_of_a_page_come_from_the_runs(page):
    known = json.loads(experiments.DATA.read_text())
    text = " ".join((ROOT / page).read_text().split())
    for each in experiments.TABLES[page]:
        assert " ".join(each(known).split()) in text


def test_the_tables_of_mistakes_come_from_the_runs(capsys):
    mistakes.show_tables(mistakes.results())
    tables = capsys.readouterr().out.split("\n\n")
    assert len(tables) == 3
    text = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    for table in tables:
        assert " ".join(table.split()) in text


def show_first_group(folder: str, *arguments: str):
    """A run that writes down the first group of rank 0, with its advantages."""
    compare = main.compute_advantages

    def compare_and_show(groups, *others):
        answers = compare(groups, *others)
        if RANK == 0:
            first = [[answer.completion, answer.num_tokens, answer.reward, answer.advantage]
                     for answer in groups[0]]
            Path(folder, "group.json").write_text(json.dumps(first))
        return answers

    main.compute_advantages = compare_and_show
    run_without_curves(*arguments)


@pytest.mark.mathematics
def test_the_answers_in_the_readme_are_those_of_the_first_step(tmp_path):
    result = ranks(2, show_first_group, str(tmp_path), "training.max_steps=1",
                   "validation.best_of_n=1", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    answers = json.loads((tmp_path / "group.json").read_text())
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \| `(.*)` \| (\d+) \| (.*) \| (.*) \|$", README,
                      re.MULTILINE)
    shown = {}
    for numbers, thinking, expression, length, reward, advantage in rows:
        tries = "\n".join(re.findall("`(.*?)`", thinking))
        for number in map(int, numbers.split(", ")):
            shown[number] = [f"{tries}\n</think>\n<answer>{expression}</answer>",
                             *map(pytest.approx, (int(length), float(reward), float(advantage)))]
    assert [shown[number] for number in range(1, 9)] == answers
