"""environments.rubric: many criteria as one reward function, penalties for length (against TRL's)
and for what is hard to read."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import one_thread, small_trainer  # noqa: F401
from trl.rewards import get_soft_overlong_punishment

from grpo_nb.environments.rubric import (
    Rubric,
    length_penalty,
    mastered_length_penalty,
    pass_rates,
    readability_faults,
    readability_penalty,
)
from grpo_nb.training.rewards import reward_name

COMPLETIONS = ["Ann has a cat", "Ben", ""]
names = {
    "names the owner": (lambda text, owner: owner in text, 2.0),
    "short": (lambda text: len(text) < 5, 0.5),
    "shouts": (str.isupper, -1.0),
}


@pytest.mark.parametrize(
    "form",
    [lambda text: text, lambda text: [{"role": "assistant", "content": text}]],
    ids=["strings", "chat"],
)
def test_points_are_summed_and_criteria_logged(form):
    logged = {}
    reward = Rubric(names, "owners")
    points = reward(
        prompts=["?"] * 3,
        completions=[form(c) for c in COMPLETIONS],
        owner=["Ann", "Ann", "Ann"],
        completion_ids=[[1]] * 3,
        trainer_state=object(),
        log_extra=print,
        log_metric=logged.__setitem__,
    )
    assert points == [2.0, 0.5, 0.5] and all(type(p) is float for p in points)
    assert logged == {
        "owners/names the owner": pytest.approx(1 / 3),
        "owners/short": pytest.approx(2 / 3),
        "owners/shouts": 0.0,
    }
    assert reward([form("ANN")], owner=["ANN"]) == [2.0 + 0.5 - 1.0]


def test_a_share_is_a_part_of_the_points():
    assert Rubric({"half": (lambda text: 0.5, 3.0)})(["x", "y"]) == [1.5, 1.5]


def test_columns_reach_checks_by_name():
    seen = []

    def check(text, owner, prompts, text_column="default", *, level, **rest):
        seen.append((text, owner, prompts, text_column, level, rest))
        return True

    assert Rubric({"all": (check, 1.0)})(
        ["a", "b"], prompts=["p", "q"], owner=["A", "B"], level=[1, 2], text=["t", "u"]
    ) == [1.0, 1.0]
    assert seen == [("a", "A", "p", "default", 1, {}), ("b", "B", "q", "default", 2, {})]


def test_mistakes_are_sentences():
    with pytest.raises(ValueError, match="the rubric has no criteria"):
        Rubric({})
    with pytest.raises(
        ValueError,
        match="check of 'names the owner' asks for 'owner', and the data has the columns 'name'",
    ):
        Rubric(names)(["x"], name=["Ann"])
    for bad in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"check of 'odd' returned .* share in \[0, 1\]"):
            Rubric({"odd": (lambda text: bad, 1.0)})(["x"])


def test_it_is_a_reward_function_of_a_run(tmp_path):
    rubric = Rubric(
        {
            "a nine": (lambda text, answer: "9" in text, 1.0),
            "digits": (lambda text: sum(c.isdigit() for c in text) / max(len(text), 1), 1.0),
        },
        "sums",
    )
    trainer = small_trainer(tmp_path, [rubric, length_penalty(2, 6), readability_penalty])
    trainer.train()
    assert reward_name(rubric) == "sums"
    for record in trainer.log_history[:2]:
        assert record["rewards/sums/mean"] == pytest.approx(
            record["sums/a nine"] + record["sums/digits"], abs=1e-5
        )
        assert record["rewards/length_penalty/mean"] <= 0 and record["readability/repetition"] >= 0


def test_no_completions():
    assert (
        Rubric(names)([], owner=[], log_metric=None)
        == []
        == readability_penalty([])
        == length_penalty(1, 2)(completion_ids=[])
    )


@settings(max_examples=100, deadline=None)
@given(worst=st.integers(2, 400), data=st.data())
def test_length_against_trl(worst, data):
    soft = data.draw(st.integers(1, worst - 1))
    ids = [[0] * n for n in data.draw(st.lists(st.integers(0, 500), min_size=1, max_size=6))]
    ours, theirs = (
        length_penalty(worst - soft, worst)(completions=None, completion_ids=ids),
        get_soft_overlong_punishment(worst, soft)(completion_ids=ids),
    )
    assert ours == pytest.approx(theirs) and min(ours) >= -1
    assert length_penalty(worst - soft, worst, 3.0)(completion_ids=ids) == pytest.approx(
        [3 * value for value in theirs]
    )


@pytest.mark.parametrize("free, worst", [(5, 5), (6, 5), (-1, 5)])
def test_length_without_room_is_refused(free, worst):
    with pytest.raises(ValueError, match=f"free is {free} and worst is {worst}"):
        length_penalty(free, worst)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_has_faults_between_0_and_1(text):
    assert all(0 <= value <= 1 for value in readability_faults(text).values())
    assert -1 <= readability_penalty([text])[0] <= 0 == readability_penalty([""])[0]


def test_each_fault_is_seen_alone():
    plain = "The cat sat on the mat. Then it went to the door and slept. Nobody saw it go."
    cases = {
        "long sentences": " ".join(f"{a}at {a}in {a}o" for a in "bcdfghjklmnprstw"),
        "long words": "Notwithstanding considerable multidirectional attenuation.",
        "repetition": "It is so and it is so. " * 4,
    }
    assert set(readability_faults(plain).values()) == {0.0}
    for fault, text in cases.items():
        faults = readability_faults(text)
        assert faults[fault] > 0.5 and sum(faults.values()) == faults[fault]


def test_long_texts_are_quick():
    for text in ("a" * 100_000, "a " * 50_000, "." * 100_000, "a." * 50_000, "\n" * 100_000):
        start = time.thread_time()
        readability_faults(text)
        assert time.thread_time() - start < 5


def test_the_pass_rate_of_a_prompt_scales_its_price_for_length():
    chat = [{"role": "user", "content": "b"}]
    prompts, right = ["a", "a", "a", "a", chat, chat, "c"], [1, 1, 1, 0, None, 0.0, None]
    assert pass_rates(prompts, right) == [0.75] * 4 + [0, 0, 0]
    asked = []

    def outcome(prompts, completions, answer, **columns):
        asked.append(columns.keys())
        return right

    reward = mastered_length_penalty(outcome, free=10, worst=30, points=2.0)
    ids = [[0] * n for n in (10, 20, 30, 99, 99, 99, 99)]
    told = dict(answer=right, trainer_state=None, log_metric=print, log_extra=print)
    points = reward(prompts, ["x"] * 7, ids, **told)
    assert points == [0, -0.75, -1.5, -1.5, 0, 0, 0]  # 2 x .75 x ramp
    assert asked == [{"completion_ids", "trainer_state"}]
    assert reward_name(reward) == "mastered_length_penalty"
