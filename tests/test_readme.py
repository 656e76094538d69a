"""The README keeps its word: what it names exists, and what it tells to run does what it says.

    .venv/bin/python tests/test_readme.py      mends the line numbers of the tour, after main.py
                                               has changed
"""

import json
import re
import shlex

import pytest
import yaml
from conftest import make_config
from processes import ROOT, ranks
from test_resume import run_without_curves
from torch.distributed.run import parse_args

import main

README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
# its names
PROSE = re.sub(r"\| TRL \| here \|\n(\|.*\n)+",
               lambda table: re.sub(r"^\|.*?\|", "|", table[0], flags=re.MULTILINE), PROSE)
BASH = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
        for line in block.splitlines() if line.strip()]
SOURCES = "\n".join(
    path.read_text() for pattern in ("*.py", "*.yaml", "*.txt", ".env.example", "examples/*",
                                     "recipes/*", "bench/*.py", ".ci/*")
    for path in ROOT.glob(pattern))
# What a run leaves, names of other projects and tools, and words of shells and mathematics.
ELSEWHERE = {"runs/<name>/", "checkpoints/step-NNNNNN/", "best/", "tokenizers", "no_sync", "uv",
             "sums.py", "terse.py", "my.yaml", "sha256sum -c SHA256SUMS",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
             "sqlite:///mlflow.db", "from_pretrained"}
SMALL = ["training.max_steps=1", "training.max_new_gen_tokens=8", "training.num_samples_per_step=2",
         "data.num_validation=4", "validation.best_of_n=2", "run.name=a"]


TRAINING = [line for line in BASH if "main.py" in line] + re.findall(
    r"`(\.venv/bin/(?:python|torchrun --nproc-per-node=\d) main\.py)` \|", README)


def ranks_and_arguments(line: str) -> tuple[int, tuple[str, ...]]:
    """Two ranks are enough for any command of torchrun's, which reads its own options here."""
    program, *words = shlex.split(line.rpartition("&&")[2])
    if program.endswith("torchrun"):
        options = parse_args(words)
        assert options.training_script == "main.py"
        return 2, tuple(options.training_script_args)
    assert program.endswith("python") and words[0] == "main.py"
    return 1, tuple(words[1:])


@pytest.mark.parametrize(("num_ranks", "arguments"),
                         sorted(set(map(ranks_and_arguments, TRAINING))), ids=str)
def test_every_command_that_trains_does_so_with_the_keys_it_shows(num_ranks, arguments, tmp_path):
    """In a small form, on ranks as torchrun starts them; a real one does in test_run.py."""
    shown, small = (dict(word.split("=", 1) for word in arguments if "=" in word),
                    [*SMALL, f"run.dir={tmp_path}"])
    if shown.get("task.name") == "sums.py":
        (tmp_path / "sums.py").write_text(
            re.search(r"```python\n(# sums\.py.*?)```", README, re.DOTALL)[1])
        small += [f"task.name={tmp_path / 'sums.py'}"]
        del shown["task.name"]
    if "--config" in arguments:
        small += ["model.name=tiny/model", "data.dataset=tiny/countdown.parquet"]
    if "task.name" not in shown:
        small += ["data.max_rows=200"]
    if "training.learning_type" not in shown:
        small += ["training.k_best_of_n=[2,2]"]
    result = ranks(num_ranks, run_without_curves, *arguments, *small,
                   cwd=tmp_path if "logging.mlflow" in shown else ROOT,  # it writes there
                   MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 1
    settings = main.flatten(main.load_config(["--config", str(tmp_path / "a" / "config.yaml")]))
    replaced = {override.partition("=")[0] for override in small}
    assert {key: settings[key] for key in shown if key not in replaced} == {
        key: yaml.safe_load(value) for key, value in shown.items() if key not in replaced}
    assert (tmp_path / "mlflow.db").exists() == ("logging.mlflow" in shown)


def test_every_other_command_is_run_somewhere():
    """By the test named here, or as the line that .ci/run is made of."""
    tested = {"pytest": "", ".ci/run": "", "examples/ask.py": "test_ask.py",
              "bench/memory.py": "test_cost.py", "mlflow ui": "test_logger.py"}
    for line in BASH:
        if line not in TRAINING:
            found, = {name for name in tested if name in line}
            assert not tested[found] or found.split()[0] in (
                ROOT / "tests" / tested[found]).read_text().replace("memory.py", "bench/memory.py")


def test_every_name_and_path_in_the_readme_exists():
    for span in set(re.findall(r"`([^`\n]+)`", PROSE)) - ELSEWHERE:
        if (re.fullmatch(r"[\w./-]+\.(py|md|yaml|sh|png|jsonl|json|txt|toml|parquet)"
                         r"|[\w./-]+/", span)
                and not span.startswith("runs/")):
            left_by_a_run = span in logger_files()
            assert left_by_a_run or (ROOT / span).exists(), span
        elif (re.fullmatch(r"[a-z]+\.[a-z_]+([=:].*)?", span)
              and span.split(".")[0] in ("training", "model", "data", "sampling", "run",
                                         "checkpoint", "validation", "logging", "task")):
            assert re.split("[=:]", span)[0] in main.flatten(make_config()), span
        elif re.fullmatch(r"[A-Za-z_]\w*(/(<part>|<group>))?|eval/\w+|seconds/\w+", span):
            assert re.split("[/<]", span)[-1 if "<" not in span else 0] in SOURCES, span


def logger_files():
    import logger

    return set(re.findall(r"runs/<name>/([\w.]+)", logger.__doc__))


def with_line_numbers(text: str) -> str:
    lines = {match[1]: number
             for number, line in enumerate((ROOT / "main.py").read_text().splitlines(), start=1)
             if (match := re.match(r"(?:def|class) (\w+)", line))}
    return re.sub(r"\[`(\w+)`\]\(main\.py(#L\d+)?\)",
                  lambda link: f"[`{link[1]}`](main.py#L{lines[link[1]]})", text)


def test_the_tour_leads_through_main_py_in_its_order():
    assert with_line_numbers(README) == README, "run .venv/bin/python tests/test_readme.py"
    names = re.findall(r"\[`(\w+)`\]\(main\.py#L\d+\)", README)
    source = (ROOT / "main.py").read_text()
    places = [re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) for name in names]
    assert len(names) > 25 and None not in places, [
        name for name, place in zip(names, places) if place is None]
    chapters = re.findall(r"^# =+ (.*)$", source, re.MULTILINE)
    tour = README.split("## A tour of main.py")[1].split("\n## ")[0]
    assert [row for row in re.findall(r"^\| ([a-z, ]+) \|", tour, re.MULTILINE)
            if row != "chapter"] == chapters
    bounds = [source.index(f"= {chapter}\n") for chapter in chapters] + [len(source)]
    for chapter, start, end in zip(chapters, bounds, bounds[1:]):
        row = next(row for row in tour.splitlines() if row.startswith(f"| {chapter} |"))
        for name in re.findall(r"\[`(\w+)`\]", row):
            assert (start < re.search(rf"^(def|class) {name}\b", source, re.MULTILINE).start()
                    < end), (chapter, name)


def test_no_function_is_longer_than_a_screen_and_no_line_wider():
    import ast

    for path in (ROOT / "main.py", ROOT / "countdown.py", ROOT / "logger.py"):
        assert max(map(len, path.read_text().splitlines())) <= 130, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path.name, node.name)


if __name__ == "__main__":
    (ROOT / "README.md").write_text(with_line_numbers(README))
