"""Rewards to build a task from. Each takes a completion and returns a number; what they are worth
in sum is for the task, or for `task.reward_weights`, to say.

The values are those of the recipes they are known from: `format_strict`, `tag_count` and
`reasoning_steps` of the tutorials that train on GSM8K from scratch, `format_r1`, `cosine` and
`repetition` of ms-swift. All expect a completion that opens its own <think>; where the prompt has
opened it already, hand them "<think>" + completion. Whether two LaTeX formulas are equal none of
them can say.
"""

import math
import re
from fractions import Fraction

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")  # 7, -7, 1,234, 0.5, .5
STEP = re.compile(r"Step \d+:|^\d+\.|^[-*]|First,|Second,|Next,|Finally,", re.MULTILINE)


# ---------------------------------------------------------------- the answer

def answer_block(completion: str) -> str | None:
    """What stands in the one <answer>...</answer> after the thinking. None where there is none, or
    a second of either."""
    thinking, closed, rest = completion.partition("</think>")
    rest = rest if closed else thinking
    before, opening, inside = rest.partition("<answer>")
    inside, closing, after = inside.partition("</answer>")
    once = opening and closing and not any(tag in part for tag in TAGS
                                           for part in (before, inside, after))
    return inside if once else None


def number(text: str) -> Fraction | None:
    """The one number in a text, like -7 or $1,234.50 or "18 dollars."; None where there is none or
    more than one."""
    found = [match[0] for match in NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")[:200])
             if match[0]]
    return Fraction(found[0].replace(",", "")) if len(found) == 1 else None


def accuracy(completion: str, answer: str) -> float:
    """1.0 where the number in the answer block equals the number in `answer`."""
    expected = number(answer)
    if expected is None:
        raise ValueError(f"the answer to compare with holds no number, or several: {answer!r}")
    return float(number(answer_block(completion) or "") == expected)


# ---------------------------------------------------------------- the form

def format_r1(completion: str) -> float:
    """1.0 for <think>...</think><answer>...</answer>, with nothing but blanks around and between,
    each tag once."""
    shape = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", completion, re.DOTALL)
    return float(bool(shape) and all(completion.count(tag) == 1 for tag in TAGS))


def format_strict(completion: str) -> float:
    """The same, with every tag on a line of its own."""
    shape = re.fullmatch(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>\n?", completion,
                         re.DOTALL)
    return float(bool(shape) and all(completion.count(tag) == 1 for tag in TAGS))


def tag_count(completion: str) -> float:
    """0.25 for each of the four tags that stands exactly once on a line of its own: part of the way
    to `format_strict`."""
    return 0.25 * sum(completion.count(tag) == 1 for tag in (
        "<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>"))


def reasoning_steps(completion: str) -> float:
    """A third for each sign of a step, like "Step 1:", "1." or "-" at the start of a line,
    "First,"; 1.0 for three or more."""
    return min(1.0, len(STEP.findall(completion)) / 3)


# ---------------------------------------------------------------- the length

def cosine(correct: bool, length: int, max_length: int, wrong: tuple[float, float] = (-0.5, 0.0),
           right: tuple[float, float] = (1.0, 0.5)) -> float:
    """Half a cosine from the first value, at length 0, to the second, at `max_length` and beyond:
    the shorter a right answer the better, the longer a wrong one has tried the better."""
    at_zero, at_most = right if correct else wrong
    return at_most + (at_zero - at_most) * (
        1 + math.cos(math.pi * min(length, max_length) / max_length)) / 2


def repetition(completion: str, n: int = 3, max_penalty: float = -1.0) -> float:
    """`max_penalty` times the share of runs of n words that have stood in the text before."""
    words = completion.lower().split()
    runs = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    return max_penalty * (1 - len(set(runs)) / len(runs)) if runs else 0.0


# ---------------------------------------------------------------- a reward model

class RewardModel:
    """A sequence classifier of transformers, by path or hub id. Where it has one label, what it
    returns is that one's logit, else the probability of the `label` named. In a task:

        judge = RewardModel("path/to/classifier")

        def reward_function(completion, row):
            return {"judge": judge(row["prompt"], completion), ...}
    """

    def __init__(self, path: str, label: str | None = None):
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True)
        if loading["missing_keys"]:
            raise ValueError(f"{path!r} is no trained classifier: it lacks "
                             f"{', '.join(sorted(loading['missing_keys'])[:3])}")
        self.model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        labels = self.model.config.label2id
        if label not in labels and (label is not None or len(labels) > 1):
            raise ValueError(f"{path!r} knows the labels {', '.join(labels)}: say which one to "
                             "reward")
        self.place = labels[label] if label is not None else 0

    @torch.no_grad()
    def __call__(self, prompt: str, completion: str) -> float:
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt},
                        {"role": "assistant", "content": completion}]
            encoded = self.tokenizer(
                self.tokenizer.apply_chat_template(messages, tokenize=False),
                add_special_tokens=False, return_tensors="pt")
        else:
            encoded = self.tokenizer(prompt, completion, return_tensors="pt")
        logits = self.model(**encoded.to(self.model.device)).logits[0].float()  # (labels,)
        return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[self.place])
