"""README and docs/ keep their word: the commands that they show are understood, what they name
exists, and their tables are what the scripts make."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import estimators
import experiments
import pytest
from conftest import make_config, run_without_curves, write_own_task
from processes import ROOT, ranks
from torch.distributed.run import parse_args

import logger
import main
from machinery.settings import flatten, load_config

README = (ROOT / "README.md").read_text()
PAGES = "\n".join([README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))])
SOURCES = "\n".join(
    path.read_text() for pattern in ("*.py", "machinery/*.py", "*.yaml", "*.txt", ".env.example",
                                     "examples/*.py", "recipes/*", "bench/*.py", ".ci/*")
    for path in ROOT.glob(pattern))
# What a run leaves, names of other projects and tools, and words of shells and mathematics.
ELSEWHERE = {"runs/<name>/", "checkpoints/step-NNNNNN/", "best/", "tokenizers", "no_sync",
             "mine.jsonl", "spawn", "forkserver", "mytask.py", "GLOO_SOCKET_IFNAME",
             "NCCL_SOCKET_IFNAME"}


def bash_of(page: str) -> list[str]:
    """Every command in the page's blocks of bash, continued lines joined."""
    commands = []
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.strip():
                commands.append(line)
    return commands


def arguments_of(command: str) -> list[str]:
    """What comes behind main.py, or behind another script of ours that takes the same keys."""
    words = shlex.split(command.rpartition("&&")[2])
    if words[0].endswith("torchrun"):
        return parse_args(words[1:]).training_script_args
    return words[2:]


COMMANDS = sorted(set(bash_of(PAGES)))


@pytest.mark.parametrize("command", [line for line in COMMANDS if "main.py" in line])
def test_every_command_that_trains_has_settings_that_are_understood(command, tmp_path, monkeypatch):
    write_own_task(tmp_path)
    (tmp_path / "my.yaml").write_text("training:\n  learning_rate: 0.00001\n")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)

    config = load_config(arguments_of(command))

    if config.task.name != "countdown":
        main.load_task(config)


def test_every_script_that_is_shown_exists():
    for command in COMMANDS:
        for script in re.findall(r"\b(?:examples|bench|tests)/\w+\.py", command):
            assert (ROOT / script).exists(), command


def test_the_task_that_docs_show_is_trained_on(tmp_path):
    write_own_task(tmp_path)
    result = ranks(2, run_without_curves, "task.name=mytask.py", "data.dataset=mine.jsonl",
                   "training.max_steps=1", "training.max_new_gen_tokens=8",
                   "training.num_samples_per_step=2", "data.num_validation=4",
                   "validation.best_of_n=2", f"run.dir={tmp_path}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1


def test_the_page_on_experiments_shows_what_the_gradient_foretells():
    page = (ROOT / "docs" / "experiments.md").read_text()
    known = json.loads((ROOT / "docs" / "estimators.json").read_text())
    records = json.loads((ROOT / "docs" / "experiments.json").read_text())
    assert estimators.verdicts_table(known["after 20 steps"]["estimators"], records) in page


def test_the_page_on_experiments_shows_what_its_script_makes_of_the_runs(capsys):
    page = (ROOT / "docs" / "experiments.md").read_text()
    known = json.loads((ROOT / "docs" / "experiments.json").read_text())
    runs = [name for name in experiments.RUNS if f"{name} seed 2" in known]
    claims = [claim for claim in experiments.CLAIMS if {claim.more, claim.less} <= set(runs)]
    options = SimpleNamespace(keys=[], seeds=[0, 1, 2])
    experiments.show_runs(runs, known, options)
    experiments.show_claims(claims, known, options)
    for table in capsys.readouterr().out.split("\n\n"):
        assert table and table in page


def test_each_metric_has_its_meaning_and_no_other_has(tmp_path):
    result = ranks(1, run_without_curves, "training.max_steps=1", "training.max_new_gen_tokens=24",
                   "training.num_samples_per_step=2", "data.num_validation=8",
                   f"run.dir={tmp_path}", "run.name=a")
    assert result.returncode == 0, result.stderr
    measured = set()
    for line in Path(tmp_path, "a", "metrics.jsonl").read_text().splitlines():
        for name in json.loads(line):
            name = re.sub(r"/(format|answer)$", "/<part>", name)
            name = re.sub(r"^eval/solved/\d+$", "eval/solved/<group>", name)
            name = re.sub(r"pass_at_\d+", "pass_at_<k>", name)
            if not name.endswith(("_low", "_high")):
                measured.add(name)

    page = (ROOT / "docs" / "numbers.md").read_text()
    chapter = page.split("## Every metric\n")[1].split("\n## ")[0]
    explained = {"loss", "learning_rate"}
    for line in re.findall(r"^- (`.*?):[ \n]", f"{chapter}\n", re.MULTILINE):
        explained |= set(re.findall("`(.*?)`", line))

    assert measured - explained == {"step"}
    assert explained - measured == {"kl", "clipped"}  # They need other settings.


def test_what_this_is_is_said_in_one_sentence_everywhere():
    sentence = main.__doc__.splitlines()[0].removesuffix(".")
    for name in ("README.md", "pyproject.toml"):
        assert sentence in " ".join((ROOT / name).read_text().split()), name


def test_every_key_path_and_name_in_the_pages_exists():
    prose = re.sub(r"```.*?```", "", PAGES, flags=re.DOTALL)
    # The first column of these tables holds the names of others.
    prose = re.sub(r"\| (TRL|verl) \| here \|\n(\|.*\n)+",
                   lambda table: re.sub(r"^\|.*?\|", "|", table[0], flags=re.MULTILINE), prose)
    left_by_a_run = set(re.findall(r"runs/<name>/([\w.]+)", logger.__doc__))
    keys = flatten(make_config())
    sections = {key.split(".")[0] for key in keys}
    for span in set(re.findall(r"`([^`\n]+)`", prose)) - ELSEWHERE - left_by_a_run:
        if re.fullmatch("[0-9a-f]{7}", span):
            continue  # a commit
        is_path = re.fullmatch(
            r"[\w./-]+\.(py|md|yaml|sh|png|jsonl|json|txt|toml|parquet)|[\w./-]+/", span)
        if is_path and not span.startswith("runs/"):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"[a-z]+\.[a-z_]+([=:].*)?", span) and span.split(".")[0] in sections:
            assert re.split("[=:]", span)[0] in keys, span
        elif re.fullmatch(r"[A-Za-z_]\w*(/(<part>|<group>))?|eval/\w+|seconds/\w+", span):
            assert re.split("[/<]", span)[-1 if "<" not in span else 0] in SOURCES, span


def anchors_of(page: Path) -> set[str]:
    """Where a link may lead on a page: its headings, as the hosting site writes them in a link."""
    without_code = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_between_the_pages_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(\s*([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if path.startswith(("http", "../../")):  # The badge is a page of the hosting site.
                continue
            target = (page.parent / path) if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors_of(target), (page.name, link)
    # What the program and its settings say leads somewhere, too.
    for path, _, anchor in re.findall(r"(docs/[\w-]+\.md)(#([\w-]+))?", SOURCES):
        assert (ROOT / path).exists(), path
        assert not anchor or anchor in anchors_of(ROOT / path), (path, anchor)


@pytest.mark.mathematics
def test_the_answers_in_the_readme_are_those_of_the_first_step(tmp_path):
    result = ranks(2, show_first_group, str(tmp_path), "training.max_steps=1",
                   "validation.best_of_n=1", f"run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    answers = json.loads((tmp_path / "group.json").read_text())
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \| `(.*)` \| (\d+) \| (.*) \| (.*) \|$", README,
                      re.MULTILINE)
    numbered = set()
    for numbers, thinking, expression, length, reward, advantage in rows:
        tries = "\n".join(re.findall("`(.*?)`", thinking))
        completion = f"{tries}\n</think>\n<answer>{expression}</answer>"
        figures = pytest.approx([int(length), float(reward), float(advantage)])
        for number in map(int, numbers.split(", ")):
            numbered.add(number)
            assert answers[number - 1][0] == completion
            assert answers[number - 1][1:] == figures
    assert numbered == set(range(1, 9))


def show_first_group(folder: str, *arguments: str):
    """A run that writes down the first group of rank 0, with its advantages."""
    compare, groups = main.compute_advantages, []

    def compare_and_show(group, *others):
        chosen = compare(group, *others)
        groups.append([[answer.completion, answer.num_tokens, answer.reward, answer.advantage]
                       for answer in group])
        if main.RANK == 0 and len(groups) == 1:
            Path(folder, "group.json").write_text(json.dumps(groups[0]))
        return chosen

    main.compute_advantages = compare_and_show
    run_without_curves(*arguments)
