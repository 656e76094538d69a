"""What countdown.py promises: exact arithmetic, a grader that cannot be fooled, and data that is
checked value by value."""

import itertools
import json
import operator
import random
import re
import time
from collections import Counter
from fractions import Fraction

import datasets
import pyarrow
import pyarrow.parquet
import pytest

import countdown
from countdown import (
    answer_reward_function,
    evaluate_expression,
    format_reward_function,
    generate_prompt,
    load,
    reward_function,
)

# on Fractions, so exact
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SECONDS_FOR_HOSTILE_TEXT = 0.1


def seconds(function, *arguments) -> float:
    """Of computing, in this thread: a busy machine does not look like a slow function."""
    start = time.thread_time()
    function(*arguments)
    return time.thread_time() - start


def shown(text: str) -> str:
    """A test id for a text that may be a million characters long."""
    return ascii(text) if len(text) <= 40 else f"{text[:12]!a}...{len(text)}-characters"


# ---------------------------------------------------------------- exact arithmetic

VALUES = [
    ("0", 0), ("7", 7), ("10", 10), ("(((5)))", 5), ("0+0", 0), ("0/3", 0), ("5-7", -2),
    ("12345678901234567890*10", 123456789012345678900),
    ("2+3*4", 14), ("2*3+4", 10), ("(2+3)*4", 20), ("2+6/4", Fraction(7, 2)), ("2*(3+(4-1)*2)", 18),
    ("1-(2-(3-(4-5)))", 3), ("10-4-3", 3), ("10-(4-3)", 9), ("8/4/2", 1), ("8/(4/2)", 4),
    ("7-2+5", 10), ("6/2*3", 9), ("2*7/14*3", 3), ("1-2*3-4", -9), ("1/3", Fraction(1, 3)),
    ("1/3+1/6", Fraction(1, 2)), ("8/(3-8/3)", 24), ("1/49*49", 1), ("1/(2-5)", Fraction(-1, 3)),
    (" 1 +\t2\n*\r\n( 3 - 1 ) \n", 5), ("\n7\n", 7), ("((1)+(2))*((3))", 9),
]


@pytest.mark.parametrize("text, value", VALUES, ids=[shown(text) for text, _ in VALUES])
def test_expressions_have_their_exact_value(text, value):
    result = evaluate_expression(text)
    assert isinstance(result, Fraction) and result == value


# Each with the numbers and the target for which a careless grader would pay: Python's eval, one
# that deletes what it does not know, one that reads every run of digits as a number, one that stops
# at the first complete expression.
NO_EXPRESSION = [
    ("", [1, 2], 3), (" \n", [1, 2], 0), ("2**3", [2, 3], 8), ("2* *3", [2, 3], 6),
    ("7//2", [7, 2], 3), ("1.5*2", [1, 5, 2], 3), ("1.5*2", [5, 2, 1], 10), ("5.+2", [5, 2], 7),
    (".5*2", [5, 2], 1), ("1e2", [1, 2], 100), ("1_0+2", [10, 2], 12), ("0x1+2", [0, 1, 2], 3),
    ("7%4", [7, 4], 3), ("6^3", [6, 3], 5), ("6|3", [6, 3], 7), ("1<<2", [1, 2], 4),
    ("~1+2", [1, 2], 0), ("1 2", [1, 2], 12), ("1 2+3", [1, 2, 3], 15), ("1\n2", [1, 2], 12),
    ("007+1", [7, 1], 8), ("00+1", [0, 1], 1), ("01+2", [1, 2], 3), ("-1+2", [1, 2], 1),
    ("+1+2", [1, 2], 3), ("2*-3", [2, 3], -6), ("2--3", [2, 3], 5), ("2+(-3)", [2, 3], -1),
    ("2-+3", [2, 3], -1), ("2(3)", [2, 3], 6), ("(2)(3)", [2, 3], 6), ("(2)3", [2, 3], 6),
    ("()", [1, 2], 0), ("()1+2", [1, 2], 3), ("1+2()", [1, 2], 3), (")(", [1, 2], 0),
    ("(1+2", [1, 2], 3), ("1+2)", [1, 2], 3), ("(1+2))", [1, 2], 3), ("1)+(2", [1, 2], 3),
    ("(1+)2", [1, 2], 3), ("1+", [1, 2], 1), ("*1+2", [1, 2], 3), ("+", [1, 2], 0),
    ("1+2,", [1, 2], 3), ("1+2.", [1, 2], 3), ("1+2;", [1, 2], 3), ("1+2 # sum", [1, 2], 3),
    ("[1+2]", [1, 2], 3), ("{1+2}", [1, 2], 3), ("$1+2$", [1, 2], 3), ("1+two", [1, 2], 3),
    ("2x3", [2, 3], 6), ("abs(1-2)", [1, 2], 1), ("__import__('os')", [1, 2], 3),
    ("1+2\0", [1, 2], 3), ("1+2\\n", [1, 2], 3), ("1/0", [1, 0], 0), ("0/0", [0, 0], 0),
    ("1/(2-2)", [1, 2, 2], 0), ("0*(1/0)", [0, 1, 0], 0), ("3+1/(2/2-1)", [3, 1, 2, 2, 1], 3),
    # Unicode: Arabic-Indic 1, fullwidth 1, superscript 2, circled 2, fraction 1/2; times, division,
    # minus, fullwidth plus, fraction slash; fullwidth parentheses; non-breaking, em, ideographic
    # and zero-width space, line separator, next line, file separator.
    *[(text, [1, 2], target) for text, target in [
        ("\u0661+2", 3), ("\uff11+2", 3), ("1+\u00b2", 3), ("1+\u2461", 3), ("\u00bd", 2),
        ("1\u00d72", 2), ("2\u00f71", 2), ("2\u22121", 1), ("1\uff0b2", 3), ("2\u20441", 2),
        ("\uff081+2\uff09", 3), ("1+\u00a02", 3), ("1\u2003+2", 3), ("1+2\u3000", 3),
        ("1+\u200b2", 3), ("1+2\u2028", 3), ("1+2\u0085", 3), ("1+2\x1c", 3), ("\ufeff1+2", 3)]],
]
HOSTILE = [
    ("99**98**97", [99, 98, 97], 1), ("(" * 100_000 + "1+2" + ")" * 100_000, [1, 2], 3),
    ("(" * 100_000, [1, 2], 3), (")" * 100_000, [1, 2], 3), ("9" * 1_000_000, [9, 9], 9),
    ("9" * 1_000_000 + "+1", [9, 1], 10), ("0" * 1_000_000, [0, 0], 0),
    ("1+2" + "+0" * 500_000, [1, 2], 3), ("1/3+" * 200_000 + "1", [1, 3], 1),
    ("-" * 1_000_000 + "1", [1, 1], 1), (" " * 1_000_000 + "1+", [1, 2], 1),
    ("9" * 5_000 + "-" + "9" * 5_000, [9, 9], 0), ("1+2" + " " * 1_000_000 + "x", [1, 2], 3),
]


@pytest.mark.parametrize("text, nums, target", NO_EXPRESSION + HOSTILE,
                         ids=[shown(row[0]) for row in NO_EXPRESSION + HOSTILE])
def test_anything_else_is_no_expression_and_is_never_paid(text, nums, target):
    assert evaluate_expression(text) is None
    assert answer_reward_function(
        f"Let me see.</think><answer>{text}</answer>", nums, target) == 0.0


@pytest.mark.parametrize("text, nums, target", HOSTILE, ids=[shown(row[0]) for row in HOSTILE])
def test_a_hostile_expression_costs_no_time(text, nums, target):
    assert seconds(evaluate_expression, text) < SECONDS_FOR_HOSTILE_TEXT
    assert (seconds(answer_reward_function, f"</think><answer>{text}</answer>", nums, target)
            < SECONDS_FOR_HOSTILE_TEXT)


@pytest.mark.parametrize("expression", [
    "+".join(f"1/{denominator}" for denominator in range(11, 171)), "*".join(["9" * 99] * 10),
    "(" * 400 + "1" + ")" * 400, "-".join(["1"] * 499), "/".join(["7"] * 499)], ids=shown)
def test_a_hostile_expression_that_is_short_enough_to_be_computed_costs_no_time(expression):
    assert seconds(evaluate_expression, expression) < SECONDS_FOR_HOSTILE_TEXT


def random_tree(rng: random.Random, leaves: int):
    """A number, or (operator, left tree, right tree)."""
    if leaves == 1:
        return rng.choice([0, 1, 2, 3, rng.randint(0, 99), rng.randint(0, 9999)])
    left = rng.randint(1, leaves - 1)
    return rng.choice("+-*/"), random_tree(rng, left), random_tree(rng, leaves - left)


def tree_value(tree) -> Fraction | None:
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = tree_value(tree[1]), tree_value(tree[2])
    if left is None or right is None or (tree[0] == "/" and right == 0):
        return None
    return OPERATIONS[tree[0]](left, right)


def tree_text(rng: random.Random, tree) -> str:
    """The tree as text: parentheses where they are needed, now and then where they are not, and
    white space anywhere."""
    # floor: the strength with which the neighbouring operator pulls
    def render(tree, floor: int) -> str:
        space = rng.choice(["", "", " ", "\n", "\t "])
        if isinstance(tree, int):
            text, strength = str(tree), 3
        else:
            strength = 1 if tree[0] in "+-" else 2
            text = (f"{render(tree[1], strength)}{space}{tree[0]}{space}"
                    f"{render(tree[2], strength + 1)}")
        return f"({space}{text}{space})" if strength < floor or rng.random() < 0.1 else text
    return render(tree, 0)


def test_evaluation_agrees_with_an_independent_evaluator_on_random_expressions():
    rng = random.Random(0)
    undefined = 0
    for _ in range(3000):
        tree = random_tree(rng, rng.randint(1, 12))
        text = tree_text(rng, tree)
        assert evaluate_expression(text) == tree_value(tree), text
        undefined += tree_value(tree) is None
    assert 100 < undefined < 1500  # both kinds were really met


# ---------------------------------------------------------------- rewards

PIECES = ["<think>", "</think>", "<answer>", "</answer>", "(", ")", "+", "-", "*", "/", "**", "//",
          "=", " ", "\n", "\t", "0", "1", "7", "12", "007", "1.5", "1e3", "1_0", "\u0661", "\u00b2",
          "x", "__import__('os')", "no", "9" * 50, "\x00", "\ud800", "\U0001f600", "\r"]


def fuzzed_completion(rng: random.Random, expression: str) -> str:
    """A right completion with pieces put in, taken out, repeated and cut."""
    pieces = ["12-4=8 no\n", "</think>", "\n", "<answer>", expression, "</answer>"]
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        place = rng.randrange(len(pieces) + 1)
        if rng.random() < 0.6:
            pieces.insert(place, rng.choice(PIECES) * rng.choice([1, 1, 1, 3]))
        elif place < len(pieces):
            pieces[place] = rng.choice(["", pieces[place] * 2,
                                        pieces[place][:rng.randrange(len(pieces[place]) + 1)]])
    return "".join(pieces)


@pytest.mark.soak
def test_a_million_made_up_completions_are_graded_without_error_and_every_valid_expression_right():
    rng = random.Random(1)
    paid = refused = 0
    for _ in range(1_000_000):
        tree = random_tree(rng, rng.randint(2, 4))
        expression, value = tree_text(rng, tree), tree_value(tree)
        nums = [int(number) for number in re.findall("[0-9]+", expression)]
        target = (int(value) if value is not None and value == int(value) and rng.random() < 0.7
                  else rng.randint(-5, 99))
        completion = fuzzed_completion(rng, expression)
        parts = reward_function(completion, {"nums": nums, "target": target})
        assert 0 <= parts["format"] <= 1 and parts["answer"] in (0, 1)
        if completion == f"12-4=8 no\n</think>\n<answer>{expression}</answer>":
            assert parts == {"format": 1.0, "answer": float(value == target)}, (
                expression, nums, target)
            paid += value == target
            refused += value != target
        # whatever was put in, what is paid for is an answer with the given numbers that makes
        # the target
        if parts["answer"]:
            answer = (completion.rpartition("<answer>")[2].partition("</answer>")[0]
                      .partition("=")[0])
            assert (re.fullmatch(r"[-+*/()0-9\s]+", answer)
                    and sorted(re.findall("[0-9]+", answer)) == sorted(map(str, nums)))
            # Python's own arithmetic
            assert eval(re.sub("([0-9]+)", r"Fraction(\1)", " ".join(answer.split()))) == target
    assert paid > 50_000 and refused > 50_000


@pytest.mark.soak
def test_no_made_up_completion_of_ten_thousand_characters_takes_ten_milliseconds():
    rng = random.Random(2)
    for _ in range(20_000):
        alphabet = rng.sample(PIECES, rng.randint(1, 8))
        text = "".join(rng.choices(alphabet, k=10_000))[:10_000]
        completion = rng.choice(["{}", "</think><answer>{}</answer>",
                                 "</think><answer>1+2={}</answer>"]).format(text)[:10_000]
        quickest = min(seconds(reward_function, completion, {"nums": [1, 2], "target": 3})
                       for _ in range(3))
        assert quickest < 0.010, completion[:200]


@pytest.mark.parametrize("completion, nums, target, reward", [
    # right
    ("sum</think><answer>1+2</answer>", [1, 2], 3, 1.0),
    ("sum</think>\n<answer>2 + 1</answer>", [1, 2], 3, 1.0),
    ("sum</think>\n\n<answer>\n1 + 2\n</answer>\n", [1, 2], 3, 1.0),
    ("</think><answer>(1+2)</answer>", [1, 2], 3, 1.0),
    ("sum</think><answer>1+2 = 3</answer>", [1, 2], 3, 1.0),
    ("sum</think><answer>1+2=3\n</answer>", [1, 2], 3, 1.0),
    ("sum</think><answer>1-3 = -2</answer>", [3, 1], -2, 1.0),
    ("sum</think><answer>8/(3-8/3)</answer>", [3, 3, 8, 8], 24, 1.0),
    ("sum</think><answer>5*5-1</answer>", [5, 1, 5], 24, 1.0),
    ("sum</think><answer>1*0</answer>", [0, 1], 0, 1.0),
    ("sum</think> I say <answer>1+2</answer> and that is it.", [1, 2], 3, 1.0),
    ("Is it <answer>2-1</answer>? No.</think><answer>1+2</answer>", [1, 2], 3, 1.0),
    # wrong value
    ("sum</think><answer>1+2</answer>", [1, 2], 4, 0.0),
    ("sum</think><answer>2-1</answer>", [1, 2], -1, 0.0),
    ("sum</think><answer>7/2</answer>", [7, 2], 3, 0.0),
    ("sum</think><answer>1/3*3000000000000000000000/1000</answer>",
     [1, 3, 3000000000000000000000, 1000], 10**18 + 1, 0.0),
    # the claimed result: an integer, and the target
    ("sum</think><answer>1+2 = 99</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2 = 99</answer>", [1, 2], 99, 0.0),
    ("sum</think><answer>1+2 =</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2 == 3</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2 = 3 = 3</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2 = 2+1</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2 = \u0663</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>99 = 3</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>= 3</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>3</answer>", [1, 2], 3, 0.0),
    # every number exactly once
    ("sum</think><answer>1+2</answer>", [1, 2, 3], 3, 0.0),
    ("sum</think><answer>1+2+2-2</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2+0</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>5-1</answer>", [5, 1, 5], 4, 0.0),
    ("sum</think><answer>1+1+5</answer>", [5, 1, 5], 7, 0.0),
    ("sum</think><answer>12</answer>", [1, 2], 12, 0.0),
    ("sum</think><answer>1+23</answer>", [12, 3], 24, 0.0),
    # exactly one answer, after the thinking
    ("sum</think><answer></answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>\n</answer>", [1, 2], 3, 0.0),
    ("sum</think>1+2", [1, 2], 3, 0.0),
    ("sum", [1, 2], 3, 0.0),
    ("", [1, 2], 3, 0.0),
    ("<answer>1+2</answer>", [1, 2], 3, 0.0),
    ("sum <answer>1+2</answer></think>", [1, 2], 3, 0.0),
    ("sum <answer>1+2</answer></think> done", [1, 2], 3, 0.0),
    ("sum <answer>1+2</answer></think><answer>2-1</answer>", [1, 2], 3, 0.0),
    ("a</think><answer>1+2</answer></think>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2</answer><answer>1+2</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>2-1</answer><answer>1+2</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2</answer> or <answer>2-1</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer><answer>1+2</answer></answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>2-1<answer>1+2</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2</answer>2-1</answer>", [1, 2], 3, 0.0),
    ("sum</think></answer><answer>1+2", [1, 2], 3, 0.0),
    ("sum</think><answer>1+2", [1, 2], 3, 0.0),
    ("sum</think>1+2</answer>", [1, 2], 3, 0.0),
    ("sum <answer>1+</think>2</answer>", [1, 2], 3, 0.0),
    ("sum</think><answer>1+</think>2</answer>", [1, 2], 3, 0.0),
    ("sum</think><ANSWER>1+2</ANSWER>", [1, 2], 3, 0.0),
])
def test_only_one_right_answer_after_the_thinking_is_paid(completion, nums, target, reward):
    assert answer_reward_function(completion, nums, target) == reward


@pytest.mark.parametrize("completion, reward", [
    # thinking, one answer block, nothing else: what stands in the block is not the format's
    # business
    ("sum</think><answer>1+2</answer>", 1.0),
    ("sum</think>\n \t<answer>1+2</answer>\n\n", 1.0),
    ("several\nlines\n</think>\n<answer>\n1+2\n</answer>", 1.0),
    ("</think><answer>wrong = 99</answer>", 1.0),
    # closed thinking and an answer block, but not so
    ("sum</think> so <answer>1+2</answer>", 0.6),
    ("sum</think><answer>1+2</answer> is my answer", 0.6),
    ("sum</think><answer>1+2</answer><answer>1+2</answer>", 0.6),
    ("sum</think><answer><answer>1+2</answer></answer>", 0.6),
    ("sum</think><answer>1+<answer>1+2</answer>", 0.6),
    ("sum</think><answer>1+2</answer></answer>", 0.6),
    ("a</think>b</think><answer>1+2</answer>", 0.6),
    ("a</think></think><answer>1+2</answer>", 0.6),
    ("a</think><answer>1+2</answer></think>", 0.6),
    ("a</think><answer>1</think>+2</answer>", 0.6),
    ("<answer>1+2</answer></think>", 0.6),
    # an answer block alone
    ("<answer>1+2</answer>", 0.5),
    ("sum <answer>1+2</answer> done", 0.5),
    ("<think>sum<answer>1+2</answer>", 0.5),
    ("sum</think <answer>1+2</answer>", 0.5),
    # closed thinking alone
    ("sum</think>", 0.1),
    ("sum</think>1+2", 0.1),
    ("sum</think><answer>1+2", 0.1),
    ("sum</think>1+2</answer>", 0.1),
    ("sum</think></answer>1+2<answer>", 0.1),
    ("a</think>b</think>", 0.1),
    # neither
    ("", 0.0), ("sum", 0.0), ("<think>", 0.0), ("<answer>1+2", 0.0), ("1+2</answer>", 0.0),
    ("</answer>1+2<answer>", 0.0),
])
def test_the_format_is_graded_in_the_five_steps_that_are_documented(completion, reward):
    assert format_reward_function(completion) == pytest.approx(reward, abs=1e-12)
    assert (format_reward_function(completion) == 1.0) == (reward == 1.0)


@pytest.mark.parametrize("completion", [
    "</think>" * 100_000, "</think>" + "<answer>" * 100_000, "</think>" + "</answer>" * 100_000,
    "<answer>" * 100_000 + "</answer>" * 100_000, "</think>" + "<answer>1+2</answer>" * 50_000,
    "</think><answer>1+2</answer>" + " " * 1_000_000 + "x",
    "</think><answer>1+2" + "=3" * 500_000 + "</answer>",
], ids=shown)
def test_a_hostile_completion_costs_no_time_and_earns_no_answer(completion):
    assert seconds(format_reward_function, completion) < SECONDS_FOR_HOSTILE_TEXT
    assert seconds(answer_reward_function, completion, [1, 2], 4) < SECONDS_FOR_HOSTILE_TEXT
    assert answer_reward_function(completion, [1, 2], 4) == 0.0


@pytest.mark.parametrize("completion, format_part, answer_part, total", [
    ("sum</think>\n<answer>1+2</answer>", 1.0, 1.0, 1.1),
    ("sum</think>\n<answer>2-1</answer>", 1.0, 0.0, 0.1),
    ("sum</think> so <answer>1+2</answer>", 0.6, 1.0, 1.06),
    ("<answer>1+2</answer>", 0.5, 0.0, 0.05),
    ("sum</think>", 0.1, 0.0, 0.01),
    ("sum", 0.0, 0.0, 0.0),
])
def test_the_reward_is_a_tenth_of_the_format_plus_the_answer(
        completion, format_part, answer_part, total):
    parts = reward_function(completion, {"nums": [1, 2], "target": 3, "other": "field"})
    assert parts == {"format": pytest.approx(format_part), "answer": answer_part}
    assert sum(weight * parts[part]
               for part, weight in countdown.REWARD_WEIGHTS.items()) == pytest.approx(total)
    assert parts.keys() == countdown.REWARD_WEIGHTS.keys() and countdown.SOLVED == "answer"


def every_expression_of_three(nums):
    """(text, value) of all orders, operators and ways to bracket, also without brackets; the value
    is None where it divides by 0."""
    def value(symbol, left, right):
        return (None if left is None or right is None or (symbol == "/" and right == 0)
                else OPERATIONS[symbol](left, right))

    for a, b, c in itertools.permutations(nums):
        for first, second in itertools.product("+-*/", repeat=2):
            left_first = value(second, value(first, Fraction(a), Fraction(b)), Fraction(c))
            right_first = value(first, Fraction(a), value(second, Fraction(b), Fraction(c)))
            yield f"({a} {first} {b}) {second} {c}", left_first
            yield f"{a} {first} ({b} {second} {c})", right_first
            yield f"{a}{first}{b}{second}{c}", (
                right_first if first in "+-" and second in "*/" else left_first)


def test_the_grader_agrees_with_brute_force_on_200_problems_of_three_numbers():
    rng = random.Random(1)
    solvable = 0
    for problem in range(200):
        nums = [rng.randint(1, 30) for _ in range(3)]
        expressions = list(every_expression_of_three(nums))
        reachable = sorted({int(value) for _, value in expressions
                            if value is not None and value.denominator == 1})
        target = rng.choice(reachable) if problem % 2 else rng.randint(1, 100)
        accepted = 0
        for text, value in expressions:
            reward = answer_reward_function(f"try</think>\n<answer>{text}</answer>", nums, target)
            assert reward == float(value == target), (nums, target, text, value)
            accepted += reward == 1.0
        assert (accepted > 0) == (target in reachable)
        solvable += accepted > 0
    assert 100 <= solvable <= 180  # both kinds were really met


# ---------------------------------------------------------------- prompt

@pytest.mark.parametrize("nums, target", [
    ([44, 57, 19], 98), ([5, 5], 25), ([8, 100, 77, 77, 77, 6], 952)])
def test_the_prompt_says_all_that_is_needed_and_opens_the_thinking(nums, target):
    prompt = generate_prompt(nums, target)
    assert Counter(map(str, [*nums, target])) <= Counter(re.findall(r"\d+", prompt))
    assert prompt.endswith("<think>") and "<think>" in prompt[:-len("<think>")]
    assert {"</think>", "<answer>", "</answer>"} <= set(re.findall(r"</?\w+>", prompt))
    assert "once" in prompt
    # the signs must be named, not only stand in the example
    instructions = re.sub(r"<answer>[^<]*</answer>|</?\w+>", "", prompt)
    assert all(sign in instructions for sign in "+-*/")
    examples = [inside for inside in re.findall(r"<answer>([^<]*)</answer>", prompt)
                if inside.strip()]
    assert examples and all(evaluate_expression(example) is not None for example in examples)


# ---------------------------------------------------------------- data

@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """load_dataset may read local files, into a cache of this test's own; asking it for a name is
    asking the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def local_only(name, *args, **kwargs):
        if name not in ("parquet", "json"):
            pytest.fail(f"the hub was asked for {name!r}")
        return datasets.load_dataset(name, *args, **kwargs)
    monkeypatch.setattr(countdown, "load_dataset", local_only)


def write(path, rows, schema=None):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problems(rows):
    return [(row["nums"], row["target"]) for row in rows]


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])


@SUFFIXES
def test_rows_carry_their_prompt_group_problem_and_every_extra_column(tmp_path, suffix):
    rows = load(write(tmp_path / f"data{suffix}", [
        {"nums": [3, 11, 2], "target": 35, "source": "é a"},
        {"nums": [2, 3, 11], "target": 35, "source": "b"},
        {"nums": [2, 3, 11], "target": 36, "source": "c"},
        {"nums": [2, 2, 3, 3], "target": -1, "source": "d"},
        {"nums": [2, 3, 3, 3], "target": -1, "source": "e"},
        {"nums": [7, 0], "target": 0, "source": "f"}]), None)
    assert problems(rows) == [([3, 11, 2], 35), ([2, 3, 11], 35), ([2, 3, 11], 36),
                              ([2, 2, 3, 3], -1), ([2, 3, 3, 3], -1), ([7, 0], 0)]
    assert [row["source"] for row in rows] == ["é a", "b", "c", "d", "e", "f"]
    assert [row["group"] for row in rows] == [3, 3, 3, 4, 4, 2]
    assert all(row["prompt"] == generate_prompt(row["nums"], row["target"]) for row in rows)
    assert rows[0]["problem"] == rows[1]["problem"]
    # all the others differ, and can be members of a set
    assert len({row["problem"] for row in rows}) == 5
    assert answer_reward_function(
        "</think><answer>3*11+2</answer>", rows[0]["nums"], rows[0]["target"]) == 1.0


@SUFFIXES
def test_response_stands_for_target(tmp_path, suffix):
    rows = load(write(tmp_path / f"data{suffix}", [
        {"nums": [3, 4], "response": 12}, {"nums": [5, 6], "response": 11}]), None)
    assert problems(rows) == [([3, 4], 12), ([5, 6], 11)]
    assert reward_function("</think><answer>3*4</answer>", rows[0]) == {
        "format": 1.0, "answer": 1.0}


@SUFFIXES
def test_max_rows_is_the_number_of_rows_read(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}",
                 [{"nums": [1, 2], "target": target} for target in range(5)])
    for max_rows, expected in [(None, 5), (1, 1), (3, 3), (5, 5), (99, 5)]:
        assert [row["target"] for row in load(path, max_rows)] == list(range(expected))


def test_a_folder_is_all_its_files_one_after_the_other(tmp_path):
    folder = tmp_path / "folder"
    write(folder / "b.parquet", [{"nums": [5, 6], "target": 11}, {"nums": [7, 8], "target": 15}])
    write(folder / "a.jsonl", [{"nums": [1, 2], "target": 3}, {"nums": [3, 4], "response": 7}])
    (folder / "README.md").write_text("not data")
    assert problems(load(str(folder), None)) == [
        ([1, 2], 3), ([3, 4], 7), ([5, 6], 11), ([7, 8], 15)]
    assert problems(load(str(folder), 3)) == [([1, 2], 3), ([3, 4], 7), ([5, 6], 11)]
    assert problems(load(str(folder), 2)) == [([1, 2], 3), ([3, 4], 7)]
    # the order is that of the names, not the order in which the disk lists them
    for target in (4, 9, 2, 7, 5, 0, 8, 3, 6, 1):
        write(tmp_path / "many" / f"{target}.jsonl", [{"nums": [1, 2], "target": target}])
    assert [row["target"] for row in load(str(tmp_path / "many"), None)] == list(range(10))


def test_a_json_line_may_be_anything_that_json_allows(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        '{"nums":[1,2],"target":3,"note":"é"}\r\n\n  {"target": 3.0, "nums": [ 1, 2.0 ]}'.encode())
    assert problems(load(str(path), None)) == [([1, 2], 3)] * 2
    # as Windows' editors begin a file
    path.write_text('{"nums":[1,2],"target":3}\n', encoding="utf-8-sig")
    assert problems(load(str(path), None)) == [([1, 2], 3)]
    # as json.dumps(ensure_ascii=False) writes it
    path.write_text('{"nums":[1,2],"target":3,"note":"a\u2028b\u0085c"}\n', encoding="utf-8")
    assert load(str(path), None)[0]["note"] == "a\u2028b\u0085c"


@SUFFIXES
@pytest.mark.parametrize("name", [
    "with space", "problems[1]", "what?", "a*b", "train-00000-of-00001"])
def test_a_file_name_is_taken_literally(tmp_path, suffix, name):
    assert problems(load(write(
        tmp_path / f"{name}{suffix}", [{"nums": [1, 2], "target": 3}]), None)) == [([1, 2], 3)]


def test_a_column_of_whole_floats_counts_as_integers(tmp_path):
    rows = load(write(tmp_path / "data.parquet", [
        {"nums": [1.0, 2.0], "target": 3.0}, {"nums": [4.0, 5.0], "target": 20.0}]), None)
    assert problems(rows) == [([1, 2], 3), ([4, 5], 20)]
    assert all(type(value) is int for row in rows for value in [*row["nums"], row["target"]])
    assert rows[0]["prompt"] == generate_prompt([1, 2], 3)


GOOD = {"nums": [1, 2], "target": 3}
# name: (the row, whether a parquet table can hold it beside good rows;
# else it is all the table holds)
BAD_ROWS = {
    "a fraction in nums": ({"nums": [1, 2.5], "target": 3}, True),
    "a fraction as target": ({"nums": [1, 2], "target": 2.5}, True),
    "true in nums": ({"nums": [True, True], "target": 3}, False),
    "true as target": ({"nums": [1, 2], "target": True}, False),
    "null in nums": ({"nums": [1, None], "target": 3}, True),
    "null as target": ({"nums": [1, 2], "target": None}, True),
    "null as nums": ({"nums": None, "target": 3}, True),
    "a string in nums": ({"nums": ["1", "2"], "target": 3}, False),
    "a string as target": ({"nums": [1, 2], "target": "3"}, False),
    "a string as response": ({"nums": [1, 2], "response": "3"}, False),
    "one number": ({"nums": [3], "target": 3}, True),
    "no number": ({"nums": [], "target": 3}, True),
    "a number as nums": ({"nums": 12, "target": 3}, False),
    "a string as nums": ({"nums": "12", "target": 3}, False),
    "an object as nums": ({"nums": {"a": 1, "b": 2}, "target": 3}, False),
    "a list in nums": ({"nums": [[1], [2]], "target": 3}, False),
    "a list as target": ({"nums": [1, 2], "target": [3]}, False),
    "a negative number": ({"nums": [5, -2], "target": 3}, True),
    "no nums": ({"target": 3}, False), "no target": ({"nums": [1, 2]}, False),
    "other columns": ({"question": "x"}, False),
    "infinity": ({"nums": [1, float("inf")], "target": 3}, True),
    "not a number": ({"nums": [1, 2], "target": float("nan")}, True),
}


@SUFFIXES
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_value_is_an_error_that_names_the_row(tmp_path, suffix, name):
    bad, mixes = BAD_ROWS[name]
    rows, number = ([GOOD, GOOD, bad, GOOD], 3) if mixes or suffix == ".jsonl" else ([bad], 1)
    with pytest.raises(ValueError, match=rf"row {number}\b") as raised:
        load(write(tmp_path / f"data{suffix}", rows), None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("line", [
    "true", "2.5", "null", '"3"', "[1, 2]", "12", '"nums target"', '"two\\nlines"',
    '{"nums": [true, 2], "target": 3}', '{"nums": [1, "2"], "target": 3}',
    '{"nums": [2.5, 2], "target": 3}'])
def test_a_json_line_that_is_no_problem_is_an_error_that_names_the_row(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD)}\n")
    with pytest.raises(ValueError, match=r"row 2\b") as raised:
        load(str(path), None)
    assert "\n" not in str(raised.value)


EMPTY_TABLE = pyarrow.schema([("nums", pyarrow.list_(pyarrow.int64())),
                              ("target", pyarrow.int64())])


UNREADABLE = {  # name: (how to make it, what the message must say besides data.dataset)
    "missing.jsonl": (lambda path: None, "no file .*missing.jsonl"),
    "missing.parquet": (lambda path: None, "no file .*missing.parquet"),
    "missing/folder.jsonl": (lambda path: None, "no file .*missing/folder.jsonl"),
    "nothing.jsonl": (lambda path: path.touch(), "no rows|empty"),
    "blank.jsonl": (lambda path: path.write_text("\n \n"), "no rows|empty"),
    "nothing.parquet": (lambda path: write(path, [], EMPTY_TABLE), "no rows|empty"),
    "folder": (lambda path: path.mkdir(), "no .*file"),
    "folder.jsonl": (lambda path: path.mkdir(), "no .*file"),
    "words.jsonl": (lambda path: path.write_text(f"{json.dumps(GOOD)}\nnums: 1, 2\n"),
                    "line 2 .*not JSON"),
    "cut.jsonl": (lambda path: path.write_text(
        f'{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n{{"nums": [1, 2], "tar'), "line 3 .*not JSON"),
    "latin-1.jsonl": (lambda path: path.write_bytes(
        b'{"nums": [1, 2], "target": 3, "note": "\xe9"}\n'), "latin-1.jsonl"),
    "long.jsonl": (lambda path: path.write_text(
        '{"nums": [1, 2], "target": ' + "9" * 5000 + "}\n"), "long.jsonl|row 1|line 1"),
    "zero-bytes.parquet": (lambda path: path.touch(), "zero-bytes.parquet"),
    "words.parquet": (lambda path: path.write_text("not a table"), "words.parquet"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_data_set_that_cannot_be_read_is_one_clear_line(tmp_path, name):
    make, reason = UNREADABLE[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^data\.dataset.*({reason})") as raised:
        load(str(tmp_path / name), None)
    assert "\n" not in str(raised.value)


def test_any_other_name_is_the_train_split_of_a_hub_data_set(monkeypatch):
    def hub(name, configuration, split):
        assert (name, configuration, split) == ("someone/countdown", None, "train")
        return datasets.Dataset.from_list([
            {"nums": [1, 2], "target": 3, "id": 7}, {"nums": [3, 4], "target": 12, "id": 8}])
    monkeypatch.setattr(countdown, "load_dataset", hub)
    rows = load("someone/countdown", None)
    assert problems(rows) == [([1, 2], 3), ([3, 4], 12)] and [row["id"] for row in rows] == [7, 8]
    assert problems(load("someone/countdown", 1)) == [([1, 2], 3)]


@pytest.mark.parametrize("error", [ConnectionError("no network\nmore about it"),
                                   ValueError("Config name is missing.\nPlease pick one"),
                                   StopIteration()], ids=lambda error: type(error).__name__)
def test_a_hub_data_set_that_cannot_be_had_is_one_line_naming_it(monkeypatch, error):
    def hub(*args, **kwargs):
        raise error
    monkeypatch.setattr(countdown, "load_dataset", hub)
    with pytest.raises(ValueError, match=r"^data\.dataset.*someone/countdown") as raised:
        load("someone/countdown", None)
    assert "\n" not in str(raised.value)
