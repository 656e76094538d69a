"""The README keeps its word: what it names exists, and what it tells to run does what it says.

    .venv/bin/python tests/test_readme.py      mends the line numbers of the tour, after main.py has changed
"""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from conftest import make_config, run_script
from processes import ROOT, ranks, run

import main

README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
PROSE = re.sub(r"\| TRL \| here \|\n(\|.*\n)+", lambda table: re.sub(r"^\|.*?\|", "|", table[0], flags=re.MULTILINE), PROSE)  # its names
BASH = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line.strip()]
SOURCES = "\n".join(path.read_text() for pattern in ("*.py", "*.yaml", "*.txt", ".env.example", "examples/*", "recipes/*", "bench/*.py", ".ci/*")
                    for path in ROOT.glob(pattern))
# What a run leaves, names of other projects and tools, and words of shells and mathematics.
ELSEWHERE = {"runs/<name>/", "checkpoints/step-NNNNNN/", "best/", "tokenizers", "no_sync", "uv", "sums.py", "terse.py", "my.yaml", "sha256sum -c SHA256SUMS",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "sqlite:///mlflow.db", "from_pretrained"}
SMALL = ["training.max_steps=1", "training.max_new_gen_tokens=8", "training.num_samples_per_step=2", "data.num_validation=4",
         "validation.best_of_n=2", "run.name=a"]


def small_form(line: str, folder: Path) -> tuple[list[str], list[str]]:
    """The command with this environment's programs and no second machine, and the small keys it gets besides."""
    words = [word.replace(".venv/bin/", f"{Path(sys.executable).parent}/") for word in shlex.split(line.rpartition("&&")[2])]
    words = [f"{Path(sys.executable).parent}/torchrun" if word == "torchrun" else word for word in words]
    smaller = {"--nproc-per-node=4": "--nproc-per-node=2", "--nnodes=2": "--nnodes=1",
               "--rdzv-endpoint=first-machine:29500": "--rdzv-endpoint=127.0.0.1:0"}
    more = [*SMALL, f"run.dir={folder}"]
    if "recipes/" in line:
        more += ["model.name=tiny/model", "data.dataset=tiny/countdown.parquet", "data.max_rows=200"]
    if "task.name" not in line:
        more += ["data.max_rows=200"]
    if "learning_type=sil" not in line:
        more += ["training.k_best_of_n=[2,2]"]
    return [smaller.get(word, word) for word in words], more


TRAINING = [line for line in BASH if "main.py" in line] + re.findall(r"`(\.venv/bin/(?:python|torchrun --nproc-per-node=\d) main\.py)` \|", README)


@pytest.mark.parametrize("line", TRAINING)
def test_every_command_that_trains_does_so_with_the_keys_it_shows(line, tmp_path):
    if "sums.py" in line:
        (tmp_path / "sums.py").write_text(re.search(r"```python\n(# sums\.py.*?)```", README, re.DOTALL)[1])
        line = line.replace("sums.py", str(tmp_path / "sums.py"))
    command, more = small_form(line, tmp_path)
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    if "--nnodes" in line:  # one of them as it stands
        result = run(*command, *more, **store)
    else:  # the others without torchrun: two ranks if it is there, however many it asks for
        place = command.index("main.py")
        where = tmp_path if "mlflow" in line else ROOT  # MLflow puts files below
        script = str(ROOT / command[place])
        result = ranks(2 if "torchrun" in line else 1, run_script, script, *command[place + 1:], *more, cwd=where, **store)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1
    smaller = {override.partition("=")[0] for override in SMALL}
    settings = main.flatten(main.load_config(["--config", str(tmp_path / "a" / "config.yaml")]))
    for word in command:
        key, equals, value = word.partition("=")
        if equals and key in settings and key not in smaller:
            assert settings[key] == yaml.safe_load(value)
    assert (tmp_path / "mlflow.db").exists() == ("logging.mlflow=true" in line)


def test_every_other_command_is_run_somewhere():
    """By the test named here, or as the line that .ci/run is made of."""
    tested = {"pytest": "", ".ci/run": "", "examples/ask.py": "test_ask.py", "bench/memory.py": "test_cost.py", "mlflow ui": "test_logger.py"}
    for line in BASH:
        if line not in TRAINING:
            found, = {name for name in tested if name in line}
            assert not tested[found] or found.split()[0] in (ROOT / "tests" / tested[found]).read_text().replace("memory.py", "bench/memory.py")


def test_every_name_and_path_in_the_readme_exists():
    for span in set(re.findall(r"`([^`\n]+)`", PROSE)) - ELSEWHERE:
        if re.fullmatch(r"[\w./-]+\.(py|md|yaml|sh|png|jsonl|json|txt|toml|parquet)|[\w./-]+/", span) and not span.startswith("runs/"):
            left_by_a_run = span in logger_files()
            assert left_by_a_run or (ROOT / span).exists(), span
        elif re.fullmatch(r"[a-z]+\.[a-z_]+([=:].*)?", span) and span.split(".")[0] in ("training", "model", "data", "sampling", "run", "checkpoint",
                                                                                        "validation", "logging", "task"):
            assert re.split("[=:]", span)[0] in main.flatten(make_config()), span
        elif re.fullmatch(r"[A-Za-z_]\w*(/(<part>|<group>))?|eval/\w+|seconds/\w+", span):
            assert re.split("[/<]", span)[-1 if "<" not in span else 0] in SOURCES, span


def logger_files():
    import logger

    return set(re.findall(r"runs/<name>/([\w.]+)", logger.__doc__))


def with_line_numbers(text: str) -> str:
    lines = {match[1]: number for number, line in enumerate((ROOT / "main.py").read_text().splitlines(), start=1)
             if (match := re.match(r"(?:def|class) (\w+)", line))}
    return re.sub(r"\[`(\w+)`\]\(main\.py(#L\d+)?\)", lambda link: f"[`{link[1]}`](main.py#L{lines[link[1]]})", text)


def test_the_tour_leads_through_main_py_in_its_order():
    assert with_line_numbers(README) == README, "run .venv/bin/python tests/test_readme.py"
    names = re.findall(r"\[`(\w+)`\]\(main\.py#L\d+\)", README)
    source = (ROOT / "main.py").read_text()
    places = [re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) for name in names]
    assert len(names) > 25 and None not in places, [name for name, place in zip(names, places) if place is None]
    chapters = re.findall(r"^# =+ (.*)$", source, re.MULTILINE)
    tour = README.split("## A tour of main.py")[1].split("\n## ")[0]
    assert [row for row in re.findall(r"^\| ([a-z, ]+) \|", tour, re.MULTILINE) if row != "chapter"] == chapters
    bounds = [source.index(f"= {chapter}\n") for chapter in chapters] + [len(source)]
    for chapter, start, end in zip(chapters, bounds, bounds[1:]):
        row = next(row for row in tour.splitlines() if row.startswith(f"| {chapter} |"))
        for name in re.findall(r"\[`(\w+)`\]", row):
            assert start < re.search(rf"^(def|class) {name}\b", source, re.MULTILINE).start() < end, (chapter, name)


def test_no_function_is_longer_than_a_screen_and_no_line_wider():
    import ast

    for path in (ROOT / "main.py", ROOT / "countdown.py", ROOT / "logger.py"):
        assert max(map(len, path.read_text().splitlines())) <= 130, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path.name, node.name)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_line_numbers(README))
