"""widgets.reward_table: a completion is shown as it is; totals and advantages are the
trainer's."""

import math
import random
from html.parser import HTMLParser

import pytest

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.environments.verifiers import Explanation
from grpo_nb.widgets.rewards import (
    Judgement,
    group_html,
    highlighted,
    total,
)

PIECES = ["46", " ", "\n", r"\boxed{46}", "<answer>", "</answer>", "é", "$46", "&", '"', "'"]


class Page(HTMLParser):
    "The text of a page."

    def __init__(self, page):
        super().__init__()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_data(self, data):
        self.text += data


def texts(count, pieces, seed=0):
    rng = random.Random(seed)
    drawn = ("".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(count))
    return ["", " ", *pieces, *drawn]


def test_a_completion_is_shown_as_it_is():
    rng = random.Random(0)
    for text in texts(300, [*PIECES, "<b>", "&lt;", "\x00", "\u202e"]):
        said = [
            Judgement(
                "f",
                1.0,
                Explanation(
                    "",
                    tuple(
                        (name, *sorted(rng.sample(range(len(text) + 1), 2)))
                        for name in "abc"
                        if len(text)
                    ),
                ),
            )
        ]
        shown = Page(highlighted(text, said))
        assert shown.text == (text or "(nothing)").replace(
            "\x00", shown.text[text.index("\x00")] if "\x00" in text else ""
        )
    long = highlighted("x" * 50_000, [])
    assert "30,000 more characters" in long and len(long) < 21_000
    assert (
        highlighted(
            "x" * 50_000,
            [Judgement("f", 1.0, Explanation("", (("end", 19_000, 50_000),)))],
        ).count("<mark")
        == 1
    )


# totals


@pytest.mark.parametrize("seed", range(20))
def test_totals_and_advantages_are_the_trainers(seed):
    rng = random.Random(seed)
    weights = [rng.choice([0.0, 0.5, 1.0, -2.0]) for _ in range(3)]
    scores = [[rng.choice([math.nan, 0.0, 1.0, -0.25]) for _ in range(3)] for _ in range(4)]
    judged = [
        [Judgement(f"f{k}", score, Explanation("")) for k, score in enumerate(row)]
        for row in scores
    ]
    sums = [total(said, weights) for said in judged]
    expected = group_advantages(scores, 4, weights=weights)
    known = [value for value in sums if not math.isnan(value)]
    assert expected.group_mean.item() == pytest.approx(
        sum(known) / len(known) if known else 0.0, abs=1e-6
    )
    page = group_html(["a", "b", "c", "d"], judged, weights)
    assert all(f"{value:+.2f}" in page for value in expected.values.tolist()) and page.count(
        "left out of its group"
    ) == len(sums) - len(known)
