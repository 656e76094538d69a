"""An exercise: write the functions that make up the algorithm, and see how far they're right.

    .venv/bin/python examples/exercise.py
        the first call creates exercise/, where you write them; every later call tests them
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = {"logger.py", "countdown.py", "config.yaml", "pyproject.toml", "README.md", "machinery",
          "tests", "tiny", "examples", "bench"}
SECONDS = 60  # for one test; the slowest takes three
DEFAULT = ("compare_with_group", "policy_loss")
VARIANTS = ("imitate_best", "scale_advantages", "variant_normalizer", "variant_objective",
            "ratio_objective", "reference_advantages", "kl_estimate")
PLACEHOLDER = 'raise NotImplementedError("yours to write")'
LEARNING = "tests/test_learning.py::test_"
FAMILY = "tests/test_family.py::test_"
PUBLISHED = f"{FAMILY}loss_and_gradient_of_each_published_variant_equal_the_plain_formula"


class Stage(NamedTuple):
    """A part of what you're asked to write, and the tests that know whether it's right."""

    asked: str
    tests: list[str]


# In the order in which you write them.
STAGES = [
    Stage("compare_with_group: the reward minus the mean reward of the group", [
        f"{LEARNING}the_advantage_is_the_reward_less_the_mean_of_its_group"]),
    Stage("compare_with_group: exactly 0 if all rewards of a group are equal", [
        f"{LEARNING}equal_rewards_mean_an_advantage_of_exactly_zero"]),
    Stage("policy_loss: the formula in the comment above it", [
        f"{LEARNING}loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size"]),
    Stage("imitate_best: learning_type=sil. Among answers of equal reward the first ones count", [
        f"{LEARNING}sil_imitates_the_k_best_and_nothing_that_earned_nothing",
        f"{LEARNING}only_the_answers_that_sil_imitates_count_in_the_normalizer"]),
    Stage("scale_advantages: scale_rewards=group, with 1e-4 added to the standard deviation", [
        f"{LEARNING}advantages_of_grpo_are_divided_by_the_groups_standard_deviation"]),
    Stage("variant_normalizer: loss_normalizer=tokens, and =sequence", [
        f"{PUBLISHED}[DAPO-no KL-unclipped-1]",
        f"{PUBLISHED}[GRPO-no KL-unclipped-1]"]),
    Stage("variant_objective and ratio_objective: updates_per_batch=2", [
        f"{PUBLISHED}[Dr. GRPO-no KL-unclipped-2]"]),
    Stage("ratio_objective: clip. variant_objective returns how many tokens are 'clipped'", [
        f"{PUBLISHED}[DAPO-no KL-clipped-1]",
        f"{PUBLISHED}[DAPO-no KL-clipped-2]"]),
    Stage("reference_advantages: kl_in=reward. variant_objective returns the sum of kl_estimate as "
          "'kl'", [
        f"{PUBLISHED}[GRPO-KL-unclipped-1]",
        f"{PUBLISHED}[DAPO-KL-clipped-2]"]),
    Stage("kl_estimate: kl_in=loss", [
        f"{PUBLISHED}[GRPO-KL in the loss-unclipped-1]",
        f"{PUBLISHED}[GRPO-KL in the loss-clipped-2]"]),
]


# ---------------------------------------------------------------- the folder to write in

def left_out(folder: str, names: list[str]) -> set[str]:
    """Returns which files of a folder aren't copied."""
    ignored = {"__pycache__", ".venv"}
    if Path(folder) == ROOT:
        ignored |= set(names) - COPIED
    return ignored


def copy_all_but_main(folder: Path) -> None:
    shutil.copytree(ROOT, folder, ignore=left_out)


def names_in(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def calls_of_variants(function: ast.FunctionDef) -> list[ast.stmt]:
    """Returns the statements of the default path that call a variant, like `if ...: return
    imitate_best(...)`, and the assignments that their conditions need."""
    found = []
    needed = set()
    for statement in reversed(function.body):
        if isinstance(statement, ast.If) and names_in(statement) & set(VARIANTS):
            found.insert(0, statement)
            needed |= names_in(statement.test)
        elif isinstance(statement, ast.Assign) and names_in(statement.targets[0]) & needed:
            found.insert(0, statement)
    return found


def emptied(source: str) -> str:
    """Returns main.py with a placeholder instead of the code of each function you're asked for.
    Their docstrings stay, and so do the calls of variants in the default path. If code is missing
    after such a call, a comment marks the place."""
    lines = source.splitlines(keepends=True)
    for function in reversed(ast.parse(source).body):  # So the lines above keep their numbers.
        if not isinstance(function, ast.FunctionDef) or function.name not in DEFAULT + VARIANTS:
            continue
        docstring, *statements = function.body
        kept = calls_of_variants(function) if function.name in DEFAULT else []
        body = []
        mark = PLACEHOLDER
        is_marked = False
        for statement in statements:
            if statement in kept:
                body += lines[statement.lineno - 1:statement.end_lineno]
                is_marked = False
            elif not is_marked:
                body.append(f"    {mark}\n")
                mark = "# and here"
                is_marked = True
        lines[docstring.end_lineno:function.end_lineno] = body
    return "".join(lines)


def make(folder: Path) -> None:
    copy_all_but_main(folder)
    source = (ROOT / "main.py").read_text(encoding="utf-8")
    # This file comes last, so if it's there, all the others are, too.
    (folder / "main.py").write_text(emptied(source), encoding="utf-8")


# ---------------------------------------------------------------- the tests

def command(stages: Iterable[Stage]) -> list[str]:
    """Returns the command that runs the tests of these stages until one fails."""
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-vvx", "--tb=short",
              "--color=no", "-p", "no:cacheprovider", "-p", "no:randomly", f"--timeout={SECONDS}"]
    for stage in stages:
        pytest += stage.tests
    return pytest


def run_tests(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(STAGES),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def failed_stage(output: str) -> Stage:
    """Returns the stage of the last test that has begun. After a failure no other test begins."""
    begun = re.findall(r"\n(tests/\S+::.*)", output)
    for stage in STAGES:
        if begun and begun[-1].startswith(tuple(stage.tests)):
            return stage
    return STAGES[0]


def complaint(output: str) -> str:
    """Returns the useful part of pytest's output: a line of main.py or of a test, and the error."""
    frames = re.findall(r"\n(\S+\.py):(\d+): in .*\n +(.*)", output)
    error = re.search(r"\nE +(?:AssertionError: )?(.*)", output)
    if not frames or not error:
        return output.strip().rpartition("\n")[2]
    frames_of_main = [frame for frame in frames if frame[0] == "main.py"]
    file, line, code = (frames_of_main or frames)[-1]
    reason = re.sub("^assert ", "this does not hold: ", error[1])
    return f"{file}, line {line}: {code}\n         {shorten(reason, 200, placeholder=' ...')}"


def report(result: subprocess.CompletedProcess) -> int:
    """Prints which stages are right, up to the first that isn't. Returns the exit code."""
    failed = None if result.returncode == 0 else failed_stage(result.stdout)
    for stage in STAGES:
        if stage is failed:
            print(f"not yet  {stage.asked}\n         {complaint(result.stdout)}")
            return 1
        print(f"right    {stage.asked}")
    return 0


# ---------------------------------------------------------------- the command

def exercise(arguments: list[str]) -> int:
    """Creates the folder, or tests what's in it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "exercise")
    folder = Path(os.path.relpath(parser.parse_args(arguments).folder))
    if not folder.exists():
        make(folder)
        print(f"In {folder}/main.py, {len(DEFAULT + VARIANTS)} functions are empty. Their "
              "docstrings say what they do.\nBegin with `compare_with_group` and `policy_loss`: "
              "they are Dr. GRPO, the default.\nThe others are variants, at the end of the file. "
              "README and docs/change.md explain them.\nRun this command again to see how far "
              "you've got.")
        return 0
    print(f"testing {folder}/, 10 to 30 seconds ... (to start over, delete it)", flush=True)
    path = folder / "main.py"
    try:
        compile(path.read_bytes(), path, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"error: {error}")
    code = report(run_tests(folder))
    if code == 0:
        bin_folder = Path(os.path.relpath(sys.prefix, folder), "bin")
        print("Everything is right. To compare it with the original, and to train with it:\n"
              f"    diff {os.path.relpath(ROOT)}/main.py {path}\n"
              f"    cd {folder} && {bin_folder}/torchrun --nproc-per-node=2 main.py")
    return code


if __name__ == "__main__":
    sys.exit(exercise(sys.argv[1:]))
