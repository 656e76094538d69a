"""The code of a run: main.py and the task's file. It belongs to the experiment, just as the
settings do. Whatever they import doesn't, but a run says so if machinery/ or logger.py changes."""

import ast
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from machinery.settings import ROOT, Config
from machinery.tasks import task_file, task_text

MAIN, TASK = "main.py", "task.py"  # The task's file has this name, whatever it's called elsewhere.


@dataclass(frozen=True)
class Code:
    texts: dict[str, str]   # by MAIN and TASK
    paths: dict[str, Path]  # where they come from
    trainer: str            # a digest of machinery/ and logger.py


def code_of(main: Callable, config: Config) -> Code:
    """Returns the code of this process. `main` is any function of main.py."""
    lines, _ = inspect.findsource(main)  # the lines that run, even if the file has changed since
    task = task_file(config.task.name)
    texts = {MAIN: "".join(lines), TASK: task_text(task)}
    trainer = hashlib.sha256()
    for path in (ROOT / "logger.py", *sorted(ROOT.glob("machinery/[!.]*.py"))):
        trainer.update(path.read_bytes())
    return Code(texts, {MAIN: Path(inspect.getfile(main)), TASK: task}, trainer.hexdigest()[:8])


# ---------------------------------------------------------------- what code means

def meaning(name: str, text: str) -> str:
    """Returns what Python reads in the text, so comments and line breaks don't count. Neither do
    the docstrings of main.py, but a task's docstring may be its prompt."""
    tree = ast.parse(text, name)
    if name == MAIN:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [part for part in node.body if not is_docstring(part)] or [ast.Pass()]
    return written(tree)


def is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is nothing but a string."""
    return (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str))


def written(part: object) -> str:
    """Returns a part of a syntax tree as text. Unlike what `ast.dump` and `ast.unparse` return,
    it's the same in Python 3.11 to 3.13, except for some nested f-strings."""
    if isinstance(part, ast.AST):
        fields = []
        for name, value in ast.iter_fields(part):
            if value not in (None, []):  # Newer versions have more fields, which are empty.
                fields.append(f"{name}={written(value)}")
        return f"{type(part).__name__}({' '.join(fields)})"
    if isinstance(part, list):
        return f"[{' '.join(map(written, part))}]"
    return ascii(part)  # What `repr` escapes depends on the version.


def digest_of(texts: dict[str, str]) -> str:
    """Returns a short digest of what the texts mean. YAML never reads it as a number."""
    text = "\n".join(meaning(name, text) for name, text in sorted(texts.items()))
    return f"c{hashlib.sha256(text.encode()).hexdigest()[:7]}"


def changed_files(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns the names of the texts whose meaning has changed."""
    changed = []
    for name, text in now.items():
        if text != then[name] and meaning(name, text) != meaning(name, then[name]):
            changed.append(name)
    return changed
