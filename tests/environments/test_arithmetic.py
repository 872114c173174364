"""environments.arithmetic: the sums, the judges, and the rewards that are trained on."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.environments.arithmetic import (
    addition_problems,
    correct_number_reward,
    exact_answer_reward,
    number_found_reward,
    proximity,
    proximity_reward,
)
from grpo_nb.model.tiny import tiny_tokenizer


@pytest.mark.parametrize(
    "form",
    [lambda text: text, lambda text: [{"role": "assistant", "content": text}]],
    ids=["strings", "chat"],
)
def test_rewards(form):
    completions, answer = [form(t) for t in ("46", "it is 46", "45", "?", "46=", " 46")], ["46"] * 6
    assert number_found_reward(completions, answer=answer, prompts=None) == [1, 1, 1, -1, 1, 1]
    assert correct_number_reward(completions, answer=answer) == [3, 3, -3, -3, 3, 3]
    assert exact_answer_reward(completions, answer=answer, level=1) == [1, 0, 0, 0, 0, 1]
    assert all(
        type(score) is float
        for f in (number_found_reward, correct_number_reward, exact_answer_reward)
        for score in f(completions, answer=answer)
    )


def test_sums():
    train, held_out = addition_problems(3)
    assert len(held_out) == 500 and len(train) == 90 * 90 - 500
    prompts = [row["prompt"] for row in train + held_out]
    assert len(set(prompts)) == 8100  # nothing held out is trained on
    for row in train[::37] + held_out:
        a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups())
        assert row["answer"] == str(a + b) and 10 <= a <= 99 and 10 <= b <= 99
    assert (
        addition_problems(3) == (train, held_out) != addition_problems(4)
        and addition_problems(3)[1] != addition_problems(4)[1]
    )
    assert sorted(prompts) != prompts
    tokenizer = tiny_tokenizer()
    assert all(
        tokenizer.unk_token_id not in tokenizer(row["prompt"] + row["answer"]).input_ids
        for row in held_out[:50]
    )


def test_the_split():
    train, held_out = addition_problems(0, held_out=0, smallest=1, largest=3)
    assert held_out == [] and sorted(row["prompt"] for row in train) == sorted(
        f"{a}+{b}=" for a in (1, 2, 3) for b in (1, 2, 3)
    )
    for count in (9, -1):
        with pytest.raises(ValueError, match="9 sums of numbers from 1 to 3"):
            addition_problems(0, held_out=count, smallest=1, largest=3)


NUMBERS = st.integers(-(10**6), 10**6) | st.fractions(-(10**6), 10**6, max_denominator=50)


@settings(max_examples=300, deadline=None)
@given(answer=NUMBERS, value=NUMBERS, further=NUMBERS)
def test_nearer_is_better(answer, value, further):
    if abs(value - answer) > abs(further - answer):
        value, further = further, value
    near, far = proximity(value, answer), proximity(further, answer)
    assert (
        1 >= near >= far > -1 and proximity(answer, answer) == 1 and proximity(None, answer) == -1
    )
    assert near > far or abs(value - answer) == abs(further - answer)
    assert (near == 1) == (value == answer) and (value == answer or near < 0.5)
    assert proximity(2 * answer - value, answer) == near  # too much is as bad as too little
    half = Fraction(max(abs(answer), 1)) / 2
    assert proximity(answer + half, answer) == 0 and proximity(answer - 2 * half, answer) < 0


@pytest.mark.parametrize("answer", ["10", "0", "-10", "3/4", "1e300"])
def test_proximity_reward_reads_any_text(answer):
    texts = [
        answer,
        f"\\boxed{{{answer}}}",
        "9",
        "3",
        "1e9999",
        "-1e9999",
        "1/0",
        "none",
        "",
        "9" * 5000,
    ]
    points = proximity_reward(
        [[{"role": "assistant", "content": text}] for text in texts], [answer] * len(texts), level=1
    )
    assert points == proximity_reward(texts, [answer] * len(texts)) and all(
        type(p) is float and -1 <= p <= 1 for p in points
    )
    assert points[:2] == [1, 1] and points[4] < 0 and points[5] < 0 and points[6:] == [-1] * 4


def test_the_examples_of_the_guide():
    nine, three, outlier = proximity_reward(["9", "3", "900"], ["10"] * 3)
    assert nine > 0 > three > outlier
    with pytest.raises(ValueError, match="'ten', which holds no number"):
        proximity_reward(["10"], ["ten"])


def test_a_judge_says_what_was_paid():
    assert correct_number_reward.explain("so 46.", answer="46").marks == (("number", 3, 5),)
    assert "and 46 is right" in correct_number_reward.explain("45", answer="46").reason
    assert correct_number_reward.explain("none", answer="46").points == -3
    assert proximity_reward.explain(r"page 7: \boxed{46}", answer="46").marks == (
        ("box", 15, 17),
        ("number", 15, 17),
    )
    for reward in (
        number_found_reward,
        correct_number_reward,
        exact_answer_reward,
        proximity_reward,
    ):
        for text in ("46", "45", "none", "", r"\frac{92}{2}", "1e9999", "1/0"):
            why = reward.explain(text, answer="46", level=1)
            assert why.points == reward([text], answer=["46"])[0] and why.reason
