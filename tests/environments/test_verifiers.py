"""environments.verifiers: numbers as models write them, against Python's own float, int and
Fraction; no text raises, none takes long."""

import random
import re
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_nb.environments.verifiers import (
    Explanation,
    boxed,
    completion_text,
    exact_match,
    explained_by,
    final_number,
    final_number_marks,
    judge_exact,
    last_number,
    last_number_place,
    number_matches,
    numbers_in,
    right_number,
    stated_answer,
    stated_place,
    trimmed,
    value_matches,
)

PIECES = [
    r"\boxed{",
    "}",
    "{",
    r"\{",
    r"\frac{",
    r"\dfrac{1}{0}",
    "1",
    "23",
    "/",
    "0",
    "e",
    "E5",
    "e99999",
    "-",
    "+",
    "$",
    r"\$",
    ",",
    ",000",
    ".",
    "%",
    r"\times",
    "×",
    "*",
    "10^{",
    "10^9",
    " ",
    "\n",
    "\u2212",
    "٣",
    "²",
    "½",
    "é",
    "nan",
    "inf",
    "_",
    r"\,",
    "{,}",
    "(",
    ")",
    "]",
    "x",
]
NASTY = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
AROUND = st.text(
    "abc xyz:!?\n()", max_size=8
)  # holds no digit, brace or slash, and no letter e after a number thanks to the spaces


@settings(max_examples=300, deadline=None)
@given(NASTY, NASTY)
def test_no_text_raises(text, other):
    for found in (final_number(text), *numbers_in(text)):
        assert found is None or isinstance(found, Fraction)
    assert last_number(text) is None or isinstance(last_number(text), float)
    assert (
        number_matches(text, 4) in (True, False)
        and value_matches(text, 4) in (True, False)
        and value_matches(text, "1/3", 0.5) in (True, False)
    )
    inside = boxed(text)
    assert inside is None or inside in text
    numbers = numbers_in(text if inside is None else inside)
    assert final_number(text) == (numbers[-1] if numbers else None)


@settings(max_examples=200, deadline=None)
@given(number=st.floats(allow_nan=False, allow_infinity=False), before=AROUND, after=AROUND)
def test_every_float_that_python_writes_is_read(number, before, after):
    assert float(final_number(f"{before} {number!r} {after}")) == number


@settings(max_examples=200, deadline=None)
@given(
    number=st.decimals(-(10**9), 10**9, places=3),
    form=st.sampled_from(
        [
            "{:f}",
            "{:,f}",
            "${:f}",
            r"\${:,f}",
            "{:f}%",
            "**{:f}**",
            "{:f}.",
            "{:e}",
            r"\boxed{{{:f}}}",
            "({:f})",
        ]
    ),
    other=st.integers(0, 999),
)
def test_decimals_are_exact_in_every_form(number, form, other):
    assert final_number(f"first {other}, then {form.format(number)}") == Fraction(number)


@settings(max_examples=200, deadline=None)
@given(
    top=st.integers(-(10**6), 10**6),
    bottom=st.integers(-(10**6), 10**6),
    form=st.sampled_from(
        [
            r"\frac{{{}}}{{{}}}",
            r"\dfrac{{{}}}{{{}}}",
            r"so \tfrac{{{}}}{{{}}} of it",
            r"\boxed{{\frac{{{}}}{{{}}}}}",
        ]
    ),
)
def test_fractions(top, bottom, form):
    text = form.format(top, bottom)
    assert final_number(text) == (Fraction(top, bottom) if bottom else None)
    if form[:2] in (r"\f", r"\d"):
        assert final_number("= -" + text) == (-Fraction(top, bottom) if bottom else None)
    assert final_number(f"{top}/{abs(bottom)}") == (Fraction(top, abs(bottom)) if bottom else None)


@settings(max_examples=150, deadline=None)
@given(
    mantissa=st.decimals(1, 10, places=2),
    exponent=st.integers(-30, 30),
    form=st.sampled_from(
        [r"{} \times 10^{{{}}}", "{}×10^{{{}}}", "{}*10^{}", r"{} \cdot 10^{}", "{}e{}", "{}E{}"]
    ),
)
def test_powers_of_ten(mantissa, exponent, form):
    assert final_number(form.format(mantissa, exponent)) == Fraction(
        Decimal(mantissa).scaleb(exponent)
    )


BALANCED = st.recursive(
    st.text(r"ab1 \,/", max_size=5).filter(lambda t: not t.endswith("\\")),
    lambda inner: st.lists(inner, max_size=3).map(
        lambda parts: "".join(f"{{{part}}}" for part in parts)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(
    before=st.text("ab1 }", max_size=8),
    inside=BALANCED,
    after=st.text("ab1 }", max_size=8),
    earlier=st.booleans(),
)
def test_the_box_ends_at_its_own_brace(before, inside, after, earlier):
    text = before + (r"\boxed{0}" if earlier else "") + r"\boxed{" + inside + "}" + after
    assert boxed(text) == inside
    assert boxed(text + r" and \boxed{never closed") == inside  # cut off: no answer


@pytest.mark.parametrize(
    "text, inside",
    [
        ("", None),
        ("{}", None),
        (r"\boxed", None),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed {5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{\{5\}}", r"\{5\}"),
        (r"\boxed{1 \boxed{2}}", r"1 \boxed{2}"),
        (r"\boxed{1}{2}", "1"),
        (r"}}\boxed{1}", "1"),
        (r"\boxed{a{b}c} {d}", "a{b}c"),
    ],
)
def test_boxes(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    "text, value",
    [
        ("1,234.50", "1234.5"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        (r"-\$1,000", "-1000"),
        ("€5", "5"),
        ("18.", "18"),
        ("18%", "18"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("+7", "7"),
        ("007", "7"),
        ("1 234", "234"),
        ("1,2345", "2345"),
        ("12,34", "34"),
        ("1,2,3", "3"),
        ("3-5", "5"),
        ("x-3", "3"),
        ("(4)-3", "3"),
        ("= -3", "-3"),
        ("GPT-4", "4"),
        ("v1.2.3", "3"),
        ("1/2/2024", "2024"),
        ("2e", "2"),
        ("3 eggs", "3"),
        (r"1{,}234", "1234"),
        (r"1\,234\,567", "1234567"),
        (r"1,\!234", "1234"),
        (r"2\,3", "3"),
        ("3.4/1.7", "2"),
        ("1/0", None),
        ("5 then 1/0", None),
        ("0/5", "0"),
        ("", None),
        ("none", None),
        ("½", None),
        ("٣", None),
        ("1" * 300, "1" * 300),
        ("1" * 301, None),
        ("1e9999", "1e9999"),
        ("1e10000", None),
        ("1e-99999999999", None),
        (r"\boxed{C} 4", None),
        (r"\boxed{4} 5", "4"),
        ("1_000", "0"),
    ],
)
def test_what_was_decided(text, value):
    assert final_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,111",
        "1,",
        "1.",
        ".1",
        "1e",
        "1e9",
        "-",
        "$",
        "1/",
        "1/1",
        "1 ",
        " ",
        r"\frac{",
        r"\frac{1",
        r"\frac{1}{",
        r"\frac{1}{2}",
        r"\boxed{",
        r"\boxed{}",
        "{",
        "}",
        "{}",
        r"\boxed ",
        r"\, ",
        "1\n",
        "1 \\times",
        "1*10^",
        "1 * ",
        "0",
    ],
)
@pytest.mark.parametrize(
    "ending", ["", "x", *(pytest.param(end, marks=pytest.mark.full) for end in "}1")]
)
def test_fifty_thousand_characters_take_less_than_half_a_second(piece, ending):
    text = (piece * (50_000 // len(piece) + 1))[:50_000] + ending
    for function in (
        final_number,
        boxed,
        last_number,
        lambda text: value_matches(text, 4),
        lambda text: final_number(text + "}" * 15_000),
    ):
        assert any(
            seconds_of(function, text) < 0.5 for _ in range(3)
        )  # a garbage collection or a busy neighbour may spoil one


def seconds_of(function, text):
    start = time.thread_time()
    function(text)
    return time.thread_time() - start


def test_values_and_not_spellings():
    for text in (
        "18",
        "18.0",
        "$18",
        "18 dollars",
        r"\boxed{18}",
        "36/2",
        "1.8e1",
        "so it is **18**.",
        "17 or 18",
    ):
        assert value_matches(text, "18") and value_matches(text, 18) and value_matches(text, 18.0)
    for text in ("", "17", "-18", "18 or 17", "eighteen", "1/0", "181"):
        assert not value_matches(text, "18")
    assert (
        value_matches("0.1", "1/10")
        and value_matches("0.1", 0.1)
        and not value_matches("9007199254740993", "9007199254740992")
    )  # equal as floats
    assert float("9007199254740993") == float("9007199254740992")
    assert value_matches("0.333", "1/3", tolerance=1e-3) and not value_matches("0.333", "1/3")


@pytest.mark.parametrize("answer", ["four", "", "1/0", None, float("nan")])
def test_a_right_answer_without_a_number_is_a_mistake_in_the_data(answer):
    for call in (lambda: right_number(answer), lambda: value_matches("4", answer)):
        with pytest.raises(
            ValueError, match=re.escape(f"the right answer is {answer!r}, which holds no number")
        ):
            call()


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.fractions(max_denominator=1000))
def test_right_answers_of_every_type(answer):
    assume(not isinstance(answer, float) or answer == answer)
    assert right_number(answer) == Fraction(str(answer))


# the plain ones
WORDS = st.text("abc xyz.!?\n", max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    before=WORDS,
    after=WORDS,
    number=st.integers(-(10**9), 10**9),
    form=st.sampled_from(["{}", "{:,}"]),
)
def test_whole_numbers_are_read(before, after, number, form):
    assert last_number(f"{before} {form.format(number)} {after}") == number


@settings(max_examples=100, deadline=None)
@given(number=st.decimals(-(10**6), 10**6, places=3), other=st.integers(0, 999))
def test_the_last_of_several_with_decimals(number, other):
    assert last_number(f"first {other}, then {number:f}") == float(number)


@pytest.mark.parametrize(
    "text, value",
    [
        ("", None),
        ("none", None),
        ("12+34=46", 46),
        ("3-5", 5),
        ("3 -5", -5),
        ("= -5.", -5),
        ("1,234,567.5", 1234567.5),
        ("1,2,3", 3),
        ("12,34", 34),
        ("1,2345", 2345),
        ("-", None),
        ("+7", 7),
        ("the answer is 42!", 42),
        ("$1,000", 1000),
        ("3.", 3),
        ("v1.2.3", 3),
        ("007", 7),
        ("½", None),
    ],
)
def test_numbers_in_odd_company(text, value):
    assert last_number(text) == value


def test_right_or_not():
    assert (
        number_matches("so it is 46", "46")
        and number_matches("46.0", 46)
        and not number_matches("146", 46)
        and not number_matches("46 or 47", 46)
        and not number_matches("", 0)
    )
    assert number_matches("0.3333", 1 / 3, tolerance=1e-3) and not number_matches("0.3333", 1 / 3)
    assert (
        exact_match(" 46\n", "46")
        and exact_match("46", 46)
        and not exact_match("46.", "46")
        and not exact_match("046", "46")
    )


def test_both_forms_of_a_completion():
    assert (
        completion_text("46") == "46"
        and completion_text([{"role": "assistant", "content": "46"}]) == "46"
    )
    assert (
        completion_text(
            [{"role": "assistant", "content": None}, {"role": "assistant", "content": "x"}]
        )
        == "\nx"
        and completion_text([]) == ""
    )


# where an answer stands
@pytest.mark.parametrize(
    "pieces", [PIECES, ["46", " ", "\n", "<answer>", "</answer>", r"\boxed{", "}"]]
)
def test_places_are_where_answers_are_read(pieces):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        place = last_number_place(text)
        assert (place and float(text[slice(*place)].replace(",", ""))) == last_number(text)
        for name, start, end in final_number_marks(text):
            assert 0 <= start <= end <= len(text)
            if name == "number":
                assert final_number(text[start:end]) is not None or final_number(text) is None
        for ways in (("boxed",), ("tags",), ("line",), ("tags", "line")):
            found = stated_place(text, ways)
            assert (found and text[slice(*found[1:])]) == stated_answer(text, ways)
            assert found is None or stated_answer(text, ways) == stated_answer(text, ways).strip()
        start, end = trimmed(text, 0, len(text))
        assert text[start:end] == text.strip() and 0 <= start <= end <= len(text)


def test_a_way_that_is_none():
    with pytest.raises(ValueError, match="'corner'; an answer is looked for in 'boxed', 'tags'"):
        stated_place("46", ("corner",))


def test_a_reward_carries_its_judge():
    def judge(text, /, **row):
        return judge_exact(text, row["answer"])

    @explained_by(judge)
    def reward(completions, answer, **kwargs):
        return [judge(c, answer=a).points for c, a in zip(completions, answer)]

    assert reward([" 46 ", "47"], ["46", "46"]) == [1, 0] and reward.explain is judge
    why = judge(" 46 ", answer="46")
    assert why == Explanation("the text is exactly the answer, '46'", (("all of it", 1, 3),), 1.0)
    assert judge("", answer="46").marks == ()
