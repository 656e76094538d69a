"""The README keeps its word: what it names exists, and what it tells to run does what it says."""

import json
import re
import shlex

import pytest
import yaml
from conftest import make_config
from processes import ROOT, ranks
from test_resume import run_without_curves
from torch.distributed.run import parse_args

from machinery.settings import flatten, load_config

README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
# its names
PROSE = re.sub(r"\| TRL \| here \|\n(\|.*\n)+",
               lambda table: re.sub(r"^\|.*?\|", "|", table[0], flags=re.MULTILINE), PROSE)
BASH = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
        for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.strip()]
SOURCES = "\n".join(
    path.read_text() for pattern in ("*.py", "machinery/*.py", "*.yaml", "*.txt", ".env.example",
                                     "examples/*.py", "recipes/*", "bench/*.py", ".ci/*")
    for path in ROOT.glob(pattern))
# What a run leaves, names of other projects and tools, and words of shells and mathematics.
ELSEWHERE = {"runs/<name>/", "checkpoints/step-NNNNNN/", "best/", "tokenizers", "no_sync", "uv",
             "sums.py", "terse.py", "my.yaml", "exercise/", "exercise/main.py",
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
    settings = flatten(load_config(["--config", str(tmp_path / "a" / "config.yaml")]))
    replaced = {override.partition("=")[0] for override in small}
    assert {key: settings[key] for key in shown if key not in replaced} == {
        key: yaml.safe_load(value) for key, value in shown.items() if key not in replaced}
    assert (tmp_path / "mlflow.db").exists() == ("logging.mlflow" in shown)


def test_every_other_command_is_run_somewhere():
    """By the test named here, or as the line that .ci/run is made of."""
    tested = {"pytest": "", ".ci/run": "", "examples/ask.py": "test_ask.py",
              "examples/one_step.py": "test_one_step.py",
              "examples/exercise.py": "test_exercise.py",
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
            assert re.split("[=:]", span)[0] in flatten(make_config()), span
        elif re.fullmatch(r"[A-Za-z_]\w*(/(<part>|<group>))?|eval/\w+|seconds/\w+", span):
            assert re.split("[/<]", span)[-1 if "<" not in span else 0] in SOURCES, span


def logger_files():
    import logger

    return set(re.findall(r"runs/<name>/([\w.]+)", logger.__doc__))
