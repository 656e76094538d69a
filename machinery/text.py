"""What fits a screen: lines that are not too wide, with nothing in them that moves the cursor, and
the bar of a phase."""

import io
import os
import re
import shutil
import sys
import textwrap
from typing import Any

from tqdm.std import TRLock, tqdm

tqdm.monitor_interval = 0  # No thread that looks after bars.
tqdm.set_lock(TRLock())  # No lock that the processes of a reward would share.
SECONDS_BETWEEN_PROGRESS_LINES = 30  # Where stdout is not a terminal.


def visible(text: str) -> str:
    """Returns the text with an escape for each character that has no shape of its own."""
    characters = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def shortened(text: str, most: int) -> str:
    """Returns at most so many characters of the text, by leaving out its middle."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)  # As in http://user:password@server.


def without_shared_words(texts: list[str]) -> list[str]:
    """Returns the texts without the words with which all of them begin, or end."""
    all_words = [text.split() for text in texts]
    num_before = len(os.path.commonprefix(all_words))
    num_after = len(os.path.commonprefix([words[::-1] for words in all_words]))
    shorter = []
    for words in all_words:
        own_words = words[num_before:len(words) - num_after]
        shorter.append(" ".join(own_words or words))
    return shorter


def columns() -> int:
    """Returns how many characters a line may have: 79 where the width is not known."""
    return shutil.get_terminal_size().columns - 1


def wrap(text: str, indent: str = "") -> str:
    """Returns the text as indented lines that fit the screen."""
    lines = []
    for line in visible(text).split("\n"):
        lines.append(textwrap.fill(
            line,
            width=max(40, columns()),
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        ))
    return "\n".join(lines)


def bold(text: str, is_terminal: bool) -> str:
    is_plain = not is_terminal or os.environ.get("NO_COLOR")
    return text if is_plain else f"\033[1m{text}\033[0m"


def fit_fields(fields: list[str]) -> str:
    """Returns a line of as many fields as fit. The first field is always there."""
    line = fields[0]
    for field in fields[1:]:
        longer = f"{line}  {field}"
        if len(longer) > columns():
            break
        line = longer
    return line


# ------------------------------------------------------------ the lines of a run

def start_lines(run: Any, num_ranks: int, device: str) -> str:
    """Returns the size of a run, and where its settings are."""
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    num_questions = run.config.training.num_samples_per_step
    group_size = run.config.training.group_size
    return wrap(
        f"{num_parameters / 1e6:,.1f} M parameters on {num_ranks} x {device}. "
        f"{len(run.training_questions):,} questions to train on, "
        f"{num_questions} x {num_ranks} per step with {group_size} answers to each. "
        f"{len(run.validation_questions):,} questions are held out. "
        f"Every setting is in {run.folder.path / 'config.yaml'}")


def step_line(step: int, seconds: float, metrics: dict[str, float | None]) -> str:
    """Returns as much of the metrics of a step as one line holds."""
    fields = [f"step {step:>4}"]
    if not metrics["updated"] and metrics["non_finite"]:
        fields.append("skipped: the gradient is not finite")
    elif not metrics["updated"]:
        fields.append("nothing to learn from")
    fields += [
        f"reward {metrics['reward']:.3f}",
        f"solved {metrics['solved']:.3f}",
        f"length {metrics['completion_length']:3.0f}",
        f"{seconds:4.1f} s",
        f"no signal {metrics['groups_without_signal']:.2f}",
        f"truncated {metrics['truncated']:.2f}",
    ]
    if metrics["updated"]:
        fields.append(f"entropy {metrics['entropy']:.3f}")
        fields.append(f"grad {metrics['grad_norm']:.3f}")
    fields.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
    return fit_fields(fields)


def evaluation_line(step: int, best_of_n: int, metrics: dict[str, float]) -> str:
    """Returns as much of the metrics of an evaluation as one line holds."""
    return fit_fields([
        f"evaluation at step {step}:",
        f"solved {with_interval(metrics, 'eval/solved')}",
        f"best of {best_of_n} {metrics['eval/best_of_n']:.3f}",
        f"length {metrics['eval/completion_length']:.0f}",
    ])


def with_interval(metrics: dict[str, float] | None, name: str) -> str:
    """Returns a metric with its 95 % interval, like 0.396 (0.356–0.438)."""
    if metrics is None:
        return "unknown"
    value = metrics[name]
    low = metrics[f"{name}_low"]
    high = metrics[f"{name}_high"]
    return f"{value:.3f} ({low:.3f}–{high:.3f})"


def answer_lines(prompt: str, answer: Any) -> str:
    """Returns a prompt, an answer to it, and its rewards."""
    parts = [f"{name} {value:.2f}" for name, value in answer.reward_parts.items()]
    return "\n".join([
        wrap(prompt, "  "),
        wrap(shortened(answer.completion.strip(), 600), "    "),
        wrap(f"-> reward {answer.reward:.2f} ({', '.join(parts)})", "    "),
    ])


def result_lines(summary: dict[str, Any], best_of_n: int) -> str:
    """Returns what a run has gained."""
    labels = {"solved": "solved", "reward": "reward", "best_of_n": f"best of {best_of_n}"}
    gains = []
    for name, label in labels.items():
        first = "unknown"
        if summary["first"]:
            first = f"{summary['first'][f'eval/{name}']:.3f}"
        last = summary["last"][f"eval/{name}"]
        gains.append(f"{label} {first} -> {last:.3f}")
    return wrap(f"{', '.join(gains)}, in {summary['steps']} steps and {summary['seconds']:,.0f} s")


# ------------------------------------------------------------ bars

class PlainLines(io.StringIO):
    """What tqdm writes to without a terminal. A bar becomes a line, and wiping it out nothing."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip())
        return len(text)


def progress_bar(name: str, total: int, is_terminal: bool) -> tqdm:
    """Returns a bar that moves on `update`. It shows nothing where the total is 0."""
    return tqdm(
        desc=name,
        total=total,
        disable=total == 0,
        file=sys.stdout if is_terminal else PlainLines(),
        mininterval=0.2 if is_terminal else SECONDS_BETWEEN_PROGRESS_LINES,
        miniters=1,
        delay=0.2,
        leave=False,
        ncols=min(59, columns()),
        nrows=24,  # A terminal may not know its height.
        bar_format="{desc} {n_fmt}/{total_fmt} [{bar:16}] {rate_fmt}, {remaining} left",
    )
