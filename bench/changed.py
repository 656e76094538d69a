"""Runs main.py with changes from changes/, while the file itself stays as it is.

    .venv/bin/python bench/changed.py
        lists all changes and mistakes
    .venv/bin/python bench/changed.py rloo --config recipes/lab.yaml
        trains with one change or several, as `git apply` and main.py would
    .venv/bin/python bench/changed.py --again
        regenerates all diffs after an edit of main.py, and says which of them need a person"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES = ROOT / "changes"
FIRST_LINE = "diff --git "
# So that nobody's own git settings change what's written.
SETTINGS = ["core.abbrev=12", "core.hooksPath=/dev/null", "diff.noprefix=false",
            "diff.mnemonicPrefix=false", "diff.interHunkContext=0",
            "diff.suppressBlankEmpty=false", "diff.algorithm=default"]


def all_changes() -> dict[str, Path]:
    """Returns {name: file}. Mistakes come last, and are called mistakes/NAME."""
    paths = [*sorted(CHANGES.glob("*.diff")), *sorted(CHANGES.glob("mistakes/*.diff"))]
    return {str(path.relative_to(CHANGES).with_suffix("")): path for path in paths}


def read(path: Path) -> tuple[str, str]:
    """Returns what the file says, and its diff, which is empty if it only sets keys."""
    head, mark, diff = path.read_text().partition(FIRST_LINE)
    return head, mark + diff


def facts_of(path: Path) -> dict[str, str]:
    """Returns what the head says in lines like `keys: model.check=warn`."""
    head, _ = read(path)
    lines = head.replace("\n         ", " ").splitlines()  # A long fact continues below.
    facts = dict(line.split(": ", 1) for line in lines if ": " in line)
    return {name: fact.strip() for name, fact in facts.items()}


@contextlib.contextmanager
def tree_with(names: list[str]) -> Iterator[Path]:
    """Makes a folder with everything that's here, but with these changes in main.py. Everything
    else is a link, so runs and models are where they were."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for path in ROOT.iterdir():
            if path.name not in ("main.py", "__pycache__"):  # where Python keeps main.py compiled
                (tree / path.name).symlink_to(path)
        shutil.copy(ROOT / "main.py", tree)
        for name in names:
            path = all_changes()[name]
            _, diff = read(path)
            # With no repository around it, git takes the paths as they are.
            outside = os.environ | {"GIT_DIR": str(tree / "none")}
            if diff and subprocess.run(["git", "apply"], input=diff, text=True, cwd=tree,
                                       env=outside, check=False).returncode:
                sys.exit(f"{path.relative_to(ROOT)} does not fit main.py, or what was applied "
                         "before it")
        yield tree


def main_with(names: list[str]) -> types.ModuleType:
    """Returns main.py with these changes, as a module of its own."""
    module = types.ModuleType("main")
    with tree_with(names) as tree:
        text = (tree / "main.py").read_text()
    exec(compile(text, "+".join(names), "exec"), module.__dict__)  # noqa: S102
    return module


def command_with(ranks: int, words: list[str]) -> list[str]:
    """Returns the command that makes Python run this on this many ranks."""
    if ranks == 1:
        return [sys.executable, *words]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", *words]


def train_with(names: list[str], keys: list[str]) -> int:
    """Trains, and returns the exit code."""
    facts = [facts_of(all_changes()[name]) for name in names]
    ranks = max(int(each.get("ranks", 1)) for each in facts)
    own_keys = [f"run.name={'+'.join(Path(name).name for name in names)}"]
    for each in facts:
        own_keys += each.get("keys", "").split()
    with tree_with(names) as tree:
        # What the user says comes last, so it counts.
        return call(command_with(ranks, [str(tree / "main.py"), *own_keys, *keys]))


def call(command: list[str]) -> int:
    """Returns the exit code. Ctrl-C reaches the command too, which then exits by itself."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()


# ---------------------------------------------------------------- after an edit of main.py

def make_again() -> dict[str, str]:
    """Regenerates each diff for the current main.py. Returns {name: what's left for a person to
    do}."""
    to_do = {}
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        settings = [word for setting in SETTINGS for word in ("-c", setting)]

        def git(*words: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess:
            return subprocess.run(["git", *settings, *words], cwd=folder, input=stdin, text=True,
                                  capture_output=True, check=check, env=own)

        # The clone has every version of main.py, so git can merge three ways.
        git("clone", "--quiet", "--shared", str(ROOT), ".")
        shutil.copy(ROOT / "main.py", folder)
        git("-c", "user.name=-", "-c", "user.email=-", "commit", "--quiet", "--no-gpg-sign",
            "--allow-empty", "-am", "now")
        for name, path in all_changes().items():
            head, diff = read(path)
            if not diff:
                continue
            for way in ("--3way", "-C0"):  # The second one needs no context, in case there's none.
                is_applied = git("apply", way, stdin=diff, check=False).returncode == 0
                made = git("diff", "-U3", "--no-ext-diff", "--no-color", "HEAD").stdout
                git("reset", "--hard", "--quiet")
                if is_applied and what_changes(made) == what_changes(diff):
                    path.write_text(head + made)
                    if way == "-C0":
                        to_do[name] = "was regenerated, but check that it's in the right place"
                    break
            else:
                to_do[name] = "needs a person"
    return to_do


def what_changes(diff: str) -> list[str]:
    """Returns the lines that a diff adds and removes, and the functions they're in."""
    found = []
    for line in diff.splitlines():
        if line.startswith("@@"):
            found.append(line.split("@@")[2])
        elif re.match(r"[+-](?!\+\+|--)", line):
            found.append(line)
    return found


def command(words: list[str]) -> int:
    if words == ["--again"]:
        to_do = make_again()
        for name, this in to_do.items():
            print(f"{all_changes()[name].relative_to(ROOT)} {this}")
        print(f"{len(all_changes()) - len(to_do)} others fit the current main.py")
        return bool("needs a person" in to_do.values())
    names = [word for word in words if word in all_changes()]
    if names:
        return train_with(names, [word for word in words if word not in names])
    print(__doc__)
    for name, path in all_changes().items():
        title = facts_of(path).get("fault") or "".join(path.read_text().splitlines()[:1])
        print(f"{name:<30} {title}")
    return bool(words)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
