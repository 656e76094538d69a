"""An exercise: write the two functions that are the algorithm, and see how far they are right.

    .venv/bin/python examples/exercise.py    makes exercise/ to write them in; then tests it
"""

import argparse
import ast
import os
import re
import sys
from pathlib import Path
from shutil import copytree
from subprocess import PIPE, STDOUT, run
from textwrap import shorten

ROOT = Path(__file__).resolve().parent.parent
COPIED = {"logger.py", "countdown.py", "config.yaml", "pyproject.toml", "README.md", "machinery",
          "tests", "tiny", "examples", "bench"}
SECONDS = 60  # for one test; the slowest is done in three
LEARNING, FAMILY = "tests/test_learning.py::test_", "tests/test_family.py::test_"
VARIANT = f"{FAMILY}loss_and_gradient_of_each_published_variant_equal_the_plain_formula"
# What is asked for, in the order in which one writes it, and the tests that know.
STAGES = {
    "advantage: the reward less the mean of its group":
        [f"{LEARNING}the_advantage_is_the_reward_less_the_mean_of_its_group"],
    "advantage: exactly 0 where all rewards of a group are equal":
        [f"{LEARNING}equal_rewards_mean_an_advantage_of_exactly_zero"],
    "advantage: scale_rewards=group, over the deviation, of G - 1, plus 1e-4":
        [f"{FAMILY}scaled_advantages_are_those_of_grpo_and_still_exactly_zero_without_spread"],
    "advantage: learning_type=sil, where `stream` decides among equals; what is returned":
        [f"{LEARNING}sil_imitates_the_k_best_and_nothing_that_earned_nothing",
         f"{FAMILY}sil_learns_from_the_k_best_alone_whatever_the_normaliser_counts"],
    "loss: one update per batch, Z = B L (expected: plain_loss of tests/conftest.py)":
        [f"{LEARNING}loss_and_gradient_equal_the_plain_formula_for_any_micro_batch_size"],
    "loss: loss_normalizer": [f"{VARIANT}[{Z}-no KL-unclipped-1-dtype1]" for Z in ("GRPO", "DAPO")],
    "loss: updates_per_batch=2, with rho": [f"{VARIANT}[Dr. GRPO-no KL-unclipped-2-dtype1]"],
    "loss: clip, with rho; to watch: 'clipped', the number of tokens whose gain it lowers":
        [f"{VARIANT}[DAPO-no KL-clipped-{updates}-dtype1]" for updates in (1, 2)],
    "loss: kl_beta with kl_in=reward; to watch: 'kl' too, the sum of KL over the tokens":
        [f"{VARIANT}[{name}-dtype1]" for name in ("GRPO-KL-unclipped-1", "DAPO-KL-clipped-2")],
    "loss: kl_in=loss": [f"{VARIANT}[GRPO-KL in the loss-{mu}-dtype1]"
                         for mu in ("unclipped-1", "clipped-2")]}


def copy_all_but_main(folder: Path) -> None:
    copytree(ROOT, folder, ignore=lambda path, names: {"__pycache__", ".venv"} | (
        set(names) - COPIED if Path(path) == ROOT else set()))


def make(folder: Path) -> None:
    copy_all_but_main(folder)
    lines = (ROOT / "main.py").read_text().splitlines(keepends=True)
    for node in reversed(ast.parse("".join(lines)).body):  # what is above one keeps its place
        if getattr(node, "name", "") in ("compute_advantages", "policy_loss"):
            lines[node.body[0].end_lineno:node.end_lineno] = [  # after the docstring
                '    raise NotImplementedError("yours to write")\n']
    (folder / "main.py").write_text("".join(lines))  # the last: where it is, the rest is too


def complaint(said: str) -> str:
    """What is of use in pytest's words: the place in main.py, or else in a test, and the reason."""
    if hung := re.search(r"main\.py\", (line \d+) in (compute_advantages|policy_loss)", said):
        return f"main.py, {hung[1]}: {hung[2]} is not done after {SECONDS} s"
    frames = re.findall(r"\n(\S+\.py):(\d+): in .*\n +(.*)", said)
    error = re.search(r"\nE +(?:AssertionError: )?(.*)", said)
    if not frames or not error:
        return said.strip().rpartition("\n")[2]
    file, line, code = ([frame for frame in frames if frame[0] == "main.py"] or frames)[-1]
    reason = re.sub("^assert ", "which is not so: ", error[1])
    return f"{file}, line {line}: {code}\n         {shorten(reason, 200, placeholder=' ...')}"


def exercise(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "exercise")
    folder = Path(os.path.relpath(parser.parse_args(arguments).folder))
    if not folder.exists():
        make(folder)
        print(f"In {folder}/main.py `compute_advantages` and `policy_loss` are empty. Write them:\n"
              "its head has the formulas, README.md what they mean, under 5 and \"The family, and\n"
              "SIL\" (its 4 shows a part of what is asked for). Begin with as little as you like,\n"
              "and call this command again to see how far it is right.")
        return 0
    print(f"testing {folder}/, 10 to 30 seconds ... (to begin anew, delete it)", flush=True)
    try:
        compile((folder / "main.py").read_bytes(), folder / "main.py", "exec")
    except (OSError, SyntaxError, ValueError) as error:
        sys.exit(f"error: {error}")
    result = run([sys.executable, "-m", "pytest", "-o", "addopts=", "-vvx", "--tb=short",
                  "--color=no", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={SECONDS}",
                  *(test for tests in STAGES.values() for test in tests)],
                 cwd=folder, env={**os.environ, "PYTHONPATH": "", "PYTEST_ADDOPTS": ""},
                 text=True, stdout=PIPE, stderr=STDOUT, check=False)
    begun = re.findall(r"\n(tests/\S+::.*)", result.stdout) or next(iter(STAGES.values()))
    for stage, tests in STAGES.items():
        if result.returncode != 0 and begun[-1].startswith(tuple(tests)):  # none after it is run
            print(f"not yet  {stage}\n         {complaint(result.stdout)}")
            return 1
        print(f"right    {stage}")
    print("All of it is right. To see it beside the original, and to train with it:\n"
          f"    diff {os.path.relpath(ROOT)}/main.py {folder}/main.py\n"
          f"    cd {folder} && {os.path.relpath(sys.prefix, folder)}/bin/torchrun"
          " --nproc-per-node=2 main.py")
    return 0


if __name__ == "__main__":
    sys.exit(exercise(sys.argv[1:]))
