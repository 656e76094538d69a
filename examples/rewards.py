"""Rewards to build a task from. Each takes a completion and returns a number.

The task, or `task.reward_weights`, says how much each of them counts. Their values come from
well-known recipes: `format_strict`, `tag_count` and `reasoning_steps` from tutorials that train on
GSM8K from scratch, `format_r1`, `cosine` and `repetition` from ms-swift.

All of them expect a completion that opens its own <think>. If the prompt has already opened it, put
the end of the prompt before the completion, like "<think>\\n". None of them can tell whether two
LaTeX formulas are equal.
"""

import math
import re
from fractions import Fraction

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from machinery.ranks import DEVICE

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")  # 7, -7, 1,234, 0.5, .5
STEP = re.compile(r"Step \d+:|^\d+\.|^[-*]|First,|Second,|Next,|Finally,", re.MULTILINE)


# ---------------------------------------------------------------- the answer

def answer_block(completion: str) -> str | None:
    """Returns what's inside the one <answer>...</answer> after the thinking. Returns None if there
    is none, or if a tag appears twice."""
    thinking, closed, text = completion.partition("</think>")
    if not closed:
        text = thinking
    if "<think>" in text or "</think>" in text:
        return None
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    _, _, rest = text.partition("<answer>")
    inside, closing, _ = rest.partition("</answer>")
    return inside if closing else None


def number(text: str) -> Fraction | None:
    """Returns the one number in a text, like -7 or $1,234.50 or "18 dollars.". Returns None if
    there's none, or more than one."""
    text = text.replace("\N{MINUS SIGN}", "-")[:200]
    found = [digits for digits in NUMBER.findall(text) if digits]
    if len(found) != 1:
        return None
    return Fraction(found[0].replace(",", ""))


def accuracy(completion: str, answer: str) -> float:
    """Returns 1.0 if the number in the answer block equals the number in `answer`."""
    expected = number(answer)
    if expected is None:
        raise ValueError(f"the answer to compare with must contain one number, not {answer!r}")
    given = number(answer_block(completion) or "")
    return float(given == expected)


# ---------------------------------------------------------------- the format

def format_r1(completion: str) -> float:
    """Returns 1.0 for <think>...</think><answer>...</answer>, with each tag once and nothing but
    whitespace around and between the two blocks."""
    return matches_once(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", completion)


def format_strict(completion: str) -> float:
    """Returns 1.0 for the same format, if every tag is on a line of its own."""
    return matches_once(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>\n?", completion)


def matches_once(pattern: str, completion: str) -> float:
    if not re.fullmatch(pattern, completion, re.DOTALL):
        return 0.0
    return float(all(completion.count(tag) == 1 for tag in TAGS))


def tag_count(completion: str) -> float:
    """Returns 0.25 for each of the four tags that appears exactly once, on a line of its own. This
    is part of the way to `format_strict`."""
    reward = 0.0
    for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"):
        if completion.count(tag) == 1:
            reward += 0.25
    return reward


def reasoning_steps(completion: str) -> float:
    """Returns a third for each sign of a step, and at most 1.0. Signs are "Step 1:", "First,", and
    "1." or "-" at the start of a line."""
    num_steps = len(STEP.findall(completion))
    return min(1.0, num_steps / 3)


# ---------------------------------------------------------------- the length

def cosine(
    correct: bool,
    length: int,
    max_length: int,
    wrong: tuple[float, float] = (-0.5, 0.0),
    right: tuple[float, float] = (1.0, 0.5),
) -> float:
    """Returns a reward that depends on the length. A right answer should be short, and a wrong one
    should at least have tried for long.

    `wrong` and `right` are the rewards at length 0, and at `max_length` and beyond. Between them
    lies half a cosine."""
    at_zero, at_most = right if correct else wrong
    angle = math.pi * min(length, max_length) / max_length
    height = (1 + math.cos(angle)) / 2  # It falls from 1 to 0.
    return at_most + (at_zero - at_most) * height


def repetition(completion: str, n: int = 3, max_penalty: float = -1.0) -> float:
    """Returns `max_penalty` times the share of runs of n words that have occurred before."""
    words = completion.lower().split()
    runs = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    if not runs:
        return 0.0
    return max_penalty * (1 - len(set(runs)) / len(runs))


# ---------------------------------------------------------------- a reward model

class RewardModel:
    """A transformers sequence classifier, by path or hub id.

    If it has one label, the reward is that label's logit. If it has several, the reward is the
    probability of the `label` you name. If a text is longer than its tokenizer allows
    (`model_max_length`), prompt and answer lose their beginnings. In a task:

        judge = RewardModel("path/to/classifier")

        def reward_function(completion, row):
            return {"judge": judge(row["prompt"], completion), ...}
    """

    def __init__(self, path: str, label: str | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True)
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(
                f"{path!r} is not a trained classifier: it lacks {', '.join(missing[:3])}")
        self.model.eval()
        self.model.to(DEVICE)
        labels = self.model.config.label2id
        needs_label = len(labels) > 1 or label is not None
        if needs_label and label not in labels:
            raise ValueError(f"{path!r} has the labels {', '.join(labels)}: say which one to "
                             "reward")
        self.place = labels[label] if needs_label else 0

    @torch.no_grad()
    def __call__(self, prompt: str, completion: str) -> float:
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": completion},
                ],
                tokenize=False,
            )
            # The template has already added all special tokens.
            encoded = self.tokenizer(
                text, add_special_tokens=False, truncation=True, return_tensors="pt")
        else:
            encoded = self.tokenizer(prompt, completion, truncation=True, return_tensors="pt")
        logits = self.model(**encoded.to(self.model.device)).logits[0].float()  # (labels,)
        if len(logits) == 1:
            return float(logits[0])
        return float(logits.softmax(-1)[self.place])
