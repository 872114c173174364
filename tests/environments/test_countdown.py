"""Countdown: the reader against Python's own arithmetic, attacks on it, problems
against a solver that tries everything."""

import ast
import functools
import itertools
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies

from grpo_nb.environments.arithmetic import (
    Attempt,
    NotAnExpression,
    attempt,
    countdown_closeness_reward,
    countdown_correct_reward,
    countdown_format_reward,
    countdown_problems,
    countdown_prompt,
    read_expression,
)

NUMBERS, TARGET = [3, 5, 7, 20], 24


def expressions(depth=4):
    "Random expressions as text, with all kinds of spaces and brackets."
    leaf = strategies.integers(0, 999).map(str)

    def grown(children):
        both = strategies.tuples(
            children,
            strategies.sampled_from(["+", "-", "*", "/", " + ", " -", "* ", "\n/"]),
            children,
        ).map("".join)
        return both | both.map(lambda text: f"({text})") | children.map(lambda text: f"( {text} )")

    return strategies.recursive(leaf, grown, max_leaves=12)


def by_python(text):
    "The value by Python's parser and exact fractions; None where it divides by zero."

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        left, right = value(node.left), value(node.right)
        return {
            ast.Add: left.__add__,
            ast.Sub: left.__sub__,
            ast.Mult: left.__mul__,
            ast.Div: left.__truediv__,
        }[type(node.op)](right)

    try:
        return value(ast.parse(text.strip().replace("\n", " "), mode="eval").body)
    except ZeroDivisionError:
        return None


@settings(max_examples=500, deadline=None)
@given(expressions())
def test_values_are_pythons(text):
    if len(text) > 200:
        return
    try:
        value, numbers = read_expression(text)
    except NotAnExpression as error:
        assert "divides by zero" in str(error) and by_python(text) is None
    else:
        constants = [
            node.value
            for node in ast.walk(ast.parse(text.strip().replace("\n", " "), mode="eval"))
            if isinstance(node, ast.Constant)
        ]
        assert value == by_python(text) and sorted(numbers) == sorted(constants)


@settings(max_examples=1000, deadline=None)
@given(
    strategies.text(alphabet="0123456789+-*/() .=_eE٣７×÷x\t\n", max_size=40)
    | strategies.text(max_size=60)
)
def test_any_text_is_read_or_refused(text):
    found = attempt(text, NUMBERS)
    assert isinstance(found, Attempt) and (found.fault is None) == (found.value is not None)
    if found.fault is None:
        assert isinstance(found.value, Fraction) and not set(found.used) - set(NUMBERS)


ATTACKS = {
    "power": ["99**99", "3**5**7**20", "3 * *5", "3^5", "pow(3,5)", "9**9**9**9**9"],
    "other operators": [
        "20//7",
        "20%7",
        "20@7",
        "3<<20",
        "3|5",
        "~3+5",
        "3 and 5",
        "3 if 5 else 7",
        "not 3",
        "3:=5",
        "20///7",
    ],
    "signs": ["-3+27", "+3+5", "3+-5", "3--5", "(-3)+5", "3*(+5)"],
    "unicode": [
        "３+５",
        "٣+5",
        "3²+5",
        "½+20",
        "3⁺5",
        "３",
        "Ⅴ+3",
        "3+𝟓",
        "3\u200b+5",
        "3\u00a0+5",
        "3＋5",
        "৩+5",
    ],
    "numerals": [
        "2_0+3",
        "0x14+3",
        "0b11+5",
        "0o3+5",
        "2e1+3",
        "3.+5",
        ".5+3",
        "20.0+3",
        "3j+5",
        "3l+5",
        "007+20",
        "00+3",
        "03+5",
    ],
    "huge": [
        "9" * 10 + "+3",
        "9" * 5000,
        "1" * 199 + "*9",
        "+".join(["3"] * 5000),
        "3*" * 100_000 + "3",
        "(" * 10_000 + "3" + ")" * 10_000,
        "(" * 99 + "3+5" + ")" * 99,
        " " * 10**6 + "3" * 500,
    ],
    "brackets": [
        "((3+5)",
        "(3+5))",
        ")3+5(",
        "()",
        "3()",
        "()3",
        "(3)(5)",
        "3(5)",
        "[3+5]",
        "{3+5}",
        "(3,5)",
        "(3+5",
    ],
    "concatenation": ["2 0+3", "3 5", "3\n5", "(3) 5", "3 (5)", "2\t0"],
    "names and calls": [
        "a+3",
        "exit()",
        "__import__('os').system('true')",
        "(lambda: 24)()",
        "''.__class__",
        "sum([3,5])",
        "max(3,5)",
        "int('24')",
        "3 .__add__(5)",
        "open('/etc/passwd')",
        "x",
        "True+3",
        "None",
        "inf",
        "nan",
        "e",
    ],
    "strings and comments": [
        "'24'",
        "f'{3}'",
        "24#3+5",
        "3+5#",
        '"3"+5',
        "3+5 // comment",
        "3+5;7",
        "3+5\\",
        "`3`",
    ],
    "comparisons": [
        "3==3",
        "3<5",
        "3<5<7",
        "3!=5",
        "3>=5",
        "3+5==8",
        "24=24=24",
        "3+5=8=8",
        "=24",
        "3+5=",
        "3+5=5+3",
        "24=20+7-3",
        "3+5=(8)",
        "3+5=8.0",
        "3+5=９",
        "3+5=8 8",
    ],
    "false equations": ["3+5=24", "20+5=24", "20*7=24"],
    "numbers not given": [
        "24",
        "12+12",
        "20+4",
        "3+3",
        "20+5+5",
        "4*6",
        "20+7-3+0",
        "24+0",
        "1*24",
        "5+5+7+7",
    ],
    "division by zero": ["3/(5-5)", "3/(20-20)", "7/((3+5)-(3+5))", "3/0", "0/0"],
    "nothing": ["", " ", "+", "()", "$$", "=", "\\boxed{}"],
}


@pytest.mark.parametrize("family", ATTACKS)
def test_attacks_score_nothing(family):
    for answer in ATTACKS[family]:
        for completion in (
            answer,
            rf"\boxed{{{answer}}}",
            f"so\n<answer>{answer}</answer>",
            [{"role": "assistant", "content": answer}],
        ):
            given, began = (
                dict(completions=[completion], numbers=[NUMBERS], target=[TARGET]),
                time.process_time(),
            )
            assert countdown_correct_reward(**given) == [0.0], completion
            assert countdown_format_reward(**given) == [0.0] and countdown_closeness_reward(
                **given
            ) == [-1.0], completion
            assert time.process_time() - began < 2


def test_there_are_many_attacks():
    assert sum(map(len, ATTACKS.values())) >= 100 and len(set(sum(ATTACKS.values(), []))) >= 100


@pytest.mark.parametrize(
    "answer",
    [
        "(20-5-7)*3",
        "( 20 - 5 - 7 ) * 3",
        "3*(20-(5+7))",
        "20+7-3",
        "$20+7-3$",
        "20+7-3 = 24",
        r"\left(20-5-7\right) \times 3",
        r"3 \cdot (20-5-7)",
        "3×(20−5−7)",
        "((((20))+(7)))-(3)",
    ],
)
def test_right_answers(answer):
    given = dict(completions=[answer], numbers=[NUMBERS], target=[TARGET])
    assert (
        countdown_correct_reward(**given)
        == [1.0]
        == countdown_format_reward(**given)
        == countdown_closeness_reward(**given)
    )


def test_values_are_exact():
    assert (
        read_expression("1/3*3")[0] == 1
        and read_expression("999999999*999999999*999999999")[0] == 999999999**3
        and read_expression("1/3+1/3+1/3")[0] == 1
    )
    assert attempt("8/3*3", [3, 3, 8]).value == 8 and countdown_correct_reward(
        ["100/3"], [[100, 3]], [33]
    ) == [0.0]
    assert (
        read_expression("20-7-3")[0] == 10
        and read_expression("20/5/2")[0] == 2
        and read_expression("2+3*4")[0] == 14
    )


def test_how_often_a_number_may_be_used():
    assert attempt("3+3", [3, 3]).value == 6 and "2 times" in attempt("3+3", [3, 5]).fault
    assert (
        attempt("20+7-3", NUMBERS).fault is None
        and "5 is not used" in attempt("20+7-3", NUMBERS, use_all=True).fault
    )
    given = dict(
        completions=["20+7-3"] * 2,
        numbers=[NUMBERS] * 2,
        target=[TARGET] * 2,
        use_all=[False, True],
    )
    assert (
        countdown_correct_reward(**given) == [1, 0]
        and countdown_format_reward(**given) == [1, 0]
        and countdown_closeness_reward(**given) == [1, -1]
    )


def test_the_nearer_the_better():
    scores = countdown_closeness_reward(
        completions=["20+7-3", "20+5-3", "20+3", "20*7*5*3", "nothing"],
        numbers=[NUMBERS] * 5,
        target=[TARGET] * 5,
    )
    assert scores[0] == 1 and 0.5 > scores[2] > scores[1] > scores[3] > scores[4] == -1


def test_other_signs_and_long_texts():
    assert read_expression("(20−5)÷3") == (5, [20, 5, 3])
    with pytest.raises(NotAnExpression, match="201 characters"):
        read_expression("1" * 201)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(use_all=True),
        dict(count=3, operations="+-", targets=(1, 40)),
        dict(count=2, operations="*", targets=(1, 600)),
        dict(count=5, largest=50, targets=(100, 999)),
    ],
    ids=str,
)
def test_every_problem_has_a_solution(settings):
    rows = countdown_problems(100, seed=3, **settings)
    assert (
        len(rows) == 100 and len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == 100
    )
    assert (
        rows
        == countdown_problems(100, seed=3, **settings)
        != countdown_problems(100, seed=4, **settings)
    )
    low, high = settings.get("targets", (10, 100))
    for row in rows:
        found = attempt(row["answer"], row["numbers"], row["use_all"])
        assert (
            found.value == row["target"]
            and row["target"] not in row["numbers"]
            and low <= row["target"] <= high
            and len(row["numbers"]) == settings.get("count", 4)
        )
        assert set(row["answer"]) - set("0123456789()") <= set(
            settings.get("operations", "+-*/")
        ) and row["prompt"] == countdown_prompt(row["numbers"], row["target"], row["use_all"])


@functools.cache
def reachable(numbers, use_all):
    "Every value that can be made of a tuple of numbers, by trying everything."
    found = set() if use_all and len(numbers) > 1 else set(numbers)
    for a, b in itertools.permutations(range(len(numbers)), 2):
        rest = [number for i, number in enumerate(numbers) if i not in (a, b)]
        a, b = numbers[a], numbers[b]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            found |= reachable(tuple(sorted([*rest, value])), use_all)
    return found


@pytest.mark.parametrize("use_all", [False, True])
def test_problems_have_a_solution(use_all):
    for row in countdown_problems(10, use_all=use_all, seed=1):
        numbers = tuple(sorted(map(Fraction, row["numbers"])))
        assert row["target"] in reachable(numbers, use_all)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(count=1), "count is 1"),
        (dict(smallest=0), "numbers go from 0"),
        (dict(smallest=9, largest=3), "from 9 to 3"),
        (dict(targets=(9, 3)), "targets from 9 to 3"),
        (dict(operations="+^"), "operations is '\\+\\^'"),
        (dict(operations=""), "operations"),
        (dict(count=2, largest=2, targets=(3, 3)), "only 1 of 5 puzzles"),
    ],
)
def test_problems_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        countdown_problems(5, **settings)


def test_a_prompt_of_ones_own():
    row = countdown_problems(
        1, prompt=lambda numbers, target, use_all: "+".join(map(str, numbers)) + f"={target}"
    )[0]
    assert row["prompt"].endswith(f"={row['target']}")
