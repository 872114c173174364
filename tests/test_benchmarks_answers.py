"""benchmarks/answers.py: estimators against every subset of what was drawn, and against numpy."""

import itertools
import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy
import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


def test_pass_at_k_is_the_published_product():
    from answers import pass_at

    for right, k in itertools.product((0, 1, 7, 40, 64), (1, 2, 4, 8, 16, 32, 64)):
        product = numpy.prod(1.0 - k / numpy.arange(64 - right + 1, 65))  # Chen et al. 2021
        value = 1.0 if 64 - right < k else 1.0 - product
        assert pass_at(k, right, 64) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("drawn", ["rrwwx", "rrrabcd", "rwwx--", "rrww-x", "www", "-r", "rrr"])
def test_maj_at_k_is_the_share_of_all_subsets_with_a_right_majority(drawn):
    from answers import majority_at

    counts = Counter(drawn)
    right, silent = counts.pop("r", 0), counts.pop("-", 0)
    for k in range(1, len(drawn) + 1):
        shares = []
        for chosen in itertools.combinations(drawn, k):
            votes = Counter(chosen)
            votes.pop("-", None)
            most = [one for one in votes if votes[one] == max(votes.values())]
            shares.append(most.count("r") / len(most) if most else 0.0)
        found = majority_at(k, right, list(counts.values()), silent)
        assert found == pytest.approx(sum(shares) / len(shares)), k


@pytest.mark.parametrize("count, of", [(0, 64), (1, 64), (30, 64), (64, 64)])
def test_the_ends_of_an_interval_are_shares_from_which_the_count_is_just_likely(count, of):
    from answers import Z, wilson

    for end, free in zip(wilson(count, of), (count > 0, count < of)):
        if free:
            assert abs(count / of - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / of))
        else:
            assert end == count / of


def test_a_bootstrap_is_as_wide_as_the_standard_error_says():
    from answers import bootstrap

    rng = random.Random(1)
    values = [rng.random() for _ in range(400)]
    mean, low, high = bootstrap(values)
    error = numpy.std(values, ddof=1) / 20
    assert mean == pytest.approx(numpy.mean(values))
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_an_interval_over_problems_and_seeds_has_the_spread_of_both():
    from answers import interval

    rng, before = random.Random(2), "w" * 400
    one = "".join(rng.choices("rw", [1, 3], k=400))
    mean, low, high = interval([one], before)  # problems alone: the binomial's
    share = one.count("r") / 400
    error = 100 * math.sqrt(share * (1 - share) / 400)
    assert mean == 100 * share and (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)
    found = interval(["r" * 400, before, before], before)  # seeds alone: 0 with 8/27, 100 with 1/27
    assert found == (pytest.approx(100 / 3), 0, 100)
    assert interval([one, before], [one, before]) == (0, 0, 0)  # each over its own
    assert interval([one], [before]) == interval([one], before)


def test_a_base_is_compared_with_bfloat16_of_the_same_seeds():
    from answers import of_bases, row_of_base

    def run(marks, seconds=2.0):
        log = [{"completions/mean_length": 100.0, "seconds/sample": 1.0, "sampling/gap_mean": 0.01}]
        log = [log[0] | {"step_time": 99.0}] * 5 + [log[0] | {"step_time": seconds}] * 3
        given = dict(arguments=dict(completions=8), peak_gib=3.0)
        return given | dict(log=log, after=dict(marks=marks))

    stored = {"before": run("wwwr"), "ours_40": run("rrrr"), "bf16_1": run("rrww")}
    stored |= {"nf4_before": run("wwww"), "nf4_1": run("rrww"), "nf4_2": run("rrrr")}
    stored |= {"fp8_row_0": run("rrrr"), "mxfp4_before": run("wwww")}
    rows = {base: row_of_base(stored, base, *known) for base, *known in of_bases(stored)}
    assert list(rows) == ["bf16", "fp8_row", "nf4"]
    assert rows["bf16"][:6] == ("3.0", "800", "2.0", "0.0100", "25.0 %", "100.0, 50.0 %")
    assert rows["bf16"][6].startswith("+50.0 (") and not rows["bf16"][7]
    assert rows["fp8_row"][4:] == ("", "100.0 %", "", "+0.0 (+0.0 to +0.0)")
    assert rows["nf4"][6].startswith("+75.0 (")
    assert rows["nf4"][7] == "+0.0 (+0.0 to +0.0)"  # seed 1 alone


def test_pages_say_what_fewer_bits_and_more_answers_were_worth(capsys):
    from answers import SAME, of_bases, row_of_base
    from gsm8k import show_samples

    root = Path(__file__).parents[1]
    stored = (root / "benchmarks/results/gsm8k").glob("*.json")
    stored = {path.stem: json.loads(path.read_text()) for path in stored}
    page = (root / "docs/how_fast.md").read_text()
    table = page.split("### In fewer bits")[1].split("\n### ")[0].split("\n| ")[2:]
    for line, (base, *known) in zip(table, of_bases(stored), strict=True):
        told = row_of_base(stored, base, *known)[3:]
        gap = f"{float(told[0]):.4f}".lstrip("0")
        assert all(value.replace("+", "") in line for value in (gap, *told[1:])), (line, told)
    eight = (root / "nbs/model/29_float8.ipynb").read_text()
    for moment in ("before", "0"):
        names = [f"{base}_{moment}" for base in ("bf16", "fp8_block", "nf4", "mxfp4")]
        shares = [100 * stored[SAME.get(name, name)]["after"]["right"] for name in names]
        assert re.search(".{,60}".join(rf"\b{share:.1f}" for share in shares), eight), shares
    before, after = (stored[f"{n}_samples"]["samples"] for n in ("before_votes", "right_3"))
    show_samples("right_3", after, before)
    said = capsys.readouterr().out
    lesson = json.loads((root / "nbs/lessons/10_a_real_run_read.ipynb").read_text())["cells"]
    lesson = "".join("".join(cell["source"]) for cell in lesson)
    spread = r"([-\d.]+) \(([-\d.]+) to ([-\d.]+)\)"
    first, last = (re.search(rf"points more.* {k}: {spread}", said).groups() for k in (1, 64))
    assert "{} points at 1 ({} to {}) and by {} at 64 ({} to {})".format(*first, *last) in lesson
    once, some = (re.search(rf"pass@k of.* {k}: {spread} %", said).groups() for k in (1, 64))
    assert "{} %, {} % ({} to {}) and, by vote,".format(once[0], *some) in page
    told = "{} points more, problem by problem ({} to {}), with 64 still {} ({} to {})"
    assert told.format(*first, *last) in page
    new, _, luck = re.findall(spread, said.splitlines()[-1])
    rounded = [round(float(number)) for number in (*new, *luck)]
    assert "{} of the 76 ({} to {})".format(*rounded[:3]) in lesson
    assert "{} of 76 (95 % interval {} to {})".format(*rounded[3:]) in lesson
    voted = re.search(rf"maj@k of.* 64: {spread}", said).groups()
    assert "{} % ({} to {})".format(*voted) in lesson and "{} % ({} to {})".format(*voted) in page
    assert [before["doubts"], after["doubts"]] == [861, 694] and "in 861 before" in lesson
    shares = [100 * one["doubts"] / 16_384 for one in (before, after)]
    assert "({:.1f} and {:.1f} %;".format(*shares) in lesson


def test_words_of_doubt_are_those_of_the_lesson():
    from answers import DOUBT, doubts

    root = Path(__file__).parents[1]
    cells = json.loads((root / "nbs/lessons/10_a_real_run_read.ipynb").read_text())["cells"]
    assert f'r"{DOUBT.pattern}"' in "".join(line for cell in cells for line in cell["source"])
    runs = [
        json.loads((root / f"benchmarks/results/gsm8k/right_{i}.json").read_text()) for i in "012"
    ]
    texts = [one["completion"] for run in runs for one in run["completions"]]
    assert [len(texts), sum(map(doubts, texts))] == [90, 5]  # as the lesson says


def test_what_is_newly_solved_was_never_solved_before():
    from answers import newly_solved

    assert newly_solved([0, 3, 0, 0], "rrwc") == (3, 1)
