"What the lesson on a real run says of the stored runs is what their logs say."

import ast
import json
import math
import re
from html import unescape
from itertools import combinations, product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stored(name):
    return json.loads((ROOT / f"benchmarks/results/gsm8k/{name}.json").read_text())


RUNS = [stored(f"right_{seed}") for seed in range(3)]
CELLS = json.loads((ROOT / "nbs/lessons/10_a_real_run_read.ipynb").read_text())["cells"]
PAGE = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
CELLS_OF_NEXT = json.loads(
    (ROOT / "nbs/lessons/02_when_the_reward_does_not_rise.ipynb").read_text()
)["cells"]
NEXT = "".join("".join(cell["source"]) for cell in CELLS_OF_NEXT)
BEFORE = RUNS[0]["before"]["marks"]
OUTPUTS = [output for cell in CELLS for output in cell.get("outputs", ())]
UNTRAINED = stored("before_votes_samples")["samples"]
COUNTS = UNTRAINED["counts"]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def pairs_of(run):
    "(right before, right after) of each test problem."
    return [(a == "r", b == "r") for a, b in zip(BEFORE, run["after"]["marks"], strict=True)]


def test_gains_and_losses_are_those_of_the_logs():
    pairs = pairs_of(RUNS[0])
    before, after = (sum(part) for part in zip(*pairs))
    won, lost = pairs.count((False, True)), pairs.count((True, False))
    assert f"answers {before} of {len(pairs):,} test problems before and {after} after" in PAGE
    assert f"{lost}. It won {won} and lost {lost}." in PAGE
    lengths = [RUNS[0]["log"][i]["completions/mean_length"] for i in (0, -1)]
    assert "{:.0f} tokens in the first update and {:.0f} in the last".format(*lengths) in PAGE


def test_what_was_won_was_mostly_solved_before():
    told = []
    for run in RUNS:
        won = [i for i, pair in enumerate(pairs_of(run)[:256]) if pair == (False, True)]
        told.append(f"{sum(COUNTS[i] > 0 for i in won)} of {len(won)}")
    assert f"{told[0]}, {told[1]} and {told[2]} had been solved before" in PAGE
    assert f"Of the 256 problems, {COUNTS.count(0)} were never solved" in PAGE
    never = [i for i, count in enumerate(COUNTS) if count == 0]
    right = [sum(run["after"]["marks"][i] == "r" for i in never) for run in RUNS]
    already = sum(BEFORE[i] == "r" for i in never)
    assert f"{right[0]}, {right[1]} and {right[2]} are right afterwards, and {already} were" in PAGE


def test_what_half_of_the_answers_miss_the_other_half_finds(scripts):
    "The control of the lesson: three in ten, without any training."
    from answers import bootstrap, pass_at

    half, all_of_them = (sum(1 - pass_at(k, c, 64) for c in COUNTS) for k in (32, 64))
    assert all_of_them == COUNTS.count(0) and round(1 - all_of_them / half, 1) == 0.3
    told = ["".join(o.get("data", {}).get("text/plain", ())) for o in OUTPUTS]
    (told,) = [ast.literal_eval(text) for text in told if text.startswith("{'never in 32'")]
    later = stored("right_3_samples")["samples"]["counts"]
    more = [pass_at(64, c, 64) - pass_at(32, c, 64) for c in COUNTS]
    new = [pass_at(32, b, 64) * (1 - pass_at(32, a, 64)) for a, b in zip(COUNTS, later)]
    solved = sum(a == 0 < b for a, b in zip(COUNTS, later))
    lost = sum(b == 0 < a for a, b in zip(COUNTS, later))
    one_by_one = (half, all_of_them, sum(new), all_of_them, solved, lost)
    assert [*told.values()] == [round(number, 1) for number in one_by_one]
    over = [256 * x for x in bootstrap([b - a for a, b in zip(more, new)])]
    assert "{:.0f} more ({:.0f} to {:.0f})".format(*over) in PAGE
    assert (
        f"{solved} of the {all_of_them:.0f} are solved now, and {lost} of the other "
        f"{256 - all_of_them:.0f} no longer" in PAGE
    )


def test_wrong_answers_are_less_different_than_before():
    "Of 20 wrong ones, where both models have as many: the mean over all choices."
    votes = UNTRAINED["votes"], stored("right_3_samples")["samples"]["votes"]
    pairs = [(a, b) for (_, a, _), (_, b, _) in zip(*votes) if min(sum(a), sum(b)) >= 20]

    def different(counts, k=20):
        return sum(1 - math.comb(sum(counts) - c, k) / math.comb(sum(counts), k) for c in counts)

    means = [sum(map(different, one)) / len(pairs) for one in zip(*pairs)]
    assert "{:.1f} were different numbers, and now {:.1f} are".format(*means) in PAGE


def test_the_votes_that_the_lesson_draws_are_those_of_the_formula(scripts):
    "A hundred draws each, whose mean over 256 problems has an error of some .3 points."
    import random
    from collections import Counter

    from answers import majority_at

    (source,) = ["".join(c["source"]) for c in CELLS if "def vote_at(" in "".join(c["source"])]
    names = {"random": random, "Counter": Counter}
    exec("def vote_at" + source.split("def vote_at")[1].split("\n\n\n")[0], names)
    random.seed(1)
    for k in (1, 8, 64):
        drawn, exact = (
            sum(function(k, *one) for one in UNTRAINED["votes"]) / 256
            for function in (names["vote_at"], majority_at)
        )
        assert drawn == pytest.approx(exact, abs=0.015), k


def test_five_texts_of_ninety_have_a_word_of_doubt():
    (pattern,) = re.findall(
        r're\.compile\(r"(.+)", re\.I\)', "".join(sum((c["source"] for c in CELLS), []))
    )
    texts = [one for run in RUNS for one in run["completions"]]
    doubts = [one for one in texts if re.search(pattern, one["completion"], re.I)]
    assert len(texts) == 90 and [one["update"] + 1 for one in doubts] == [6, 6, 6, 110, 110]
    thought = re.findall(r'follows a number that cannot be: \*"(.+?)"\*', PAGE)[0]
    assert any(thought in one["completion"] for one in doubts)


def test_the_second_problem_lost_is_the_one_that_is_told():
    beeswax = RUNS[0]["lost"][1]
    assert "One pound of beeswax" in beeswax["question"] and "20 candles" in beeswax["question"]
    assert beeswax["answer"] == "20" and "-160" in beeswax["after"]
    assert "egg" in RUNS[0]["won"][0]["question"]


def test_the_run_that_stopped_thinking():
    run = stored("form_0")
    assert f"from {run['log'][0]['reward']:.2f}".replace("0.", ".") in PAGE
    shares = [100 * run[when]["right"] for when in ("before", "after")]
    assert "it falls from {:.0f} % to {:.0f} %".format(*shares) in PAGE
    later = [100 * stored(f"form_{seed}")["after"]["right"] for seed in (1, 2)]
    assert "two more seeds: to {:.1f} and {:.1f} %".format(*later) in PAGE
    best = stored("prompts")["teacher"]["right"]
    assert f"the best of five prompts {best:.1%}".replace("%", " %") in PAGE


WORDS = {  # kind of run -> (how the lessons' tables name it, how that of how_fast.md does)
    "right": ("1 for the right number", "after 110 updates"),
    "random": ("1 or 0 by a coin", "control: 1 or 0 by a coin"),
    "box": ("1 for any number in a box", "control: 1 for any number in a box"),
    "supervised": ("no rewards: 285 seconds", "control: 285 s of imitating"),
}
FORMS = {
    "form": (".1 for the line, 1 for the right number in it", ".1 for a last line, 1 for the ri"),
    "form_beta": ("... with `beta=0.1`", "... with `beta=0.1`"),
    "form_slow": ("... at a fifth of the learning rate", "... at a fifth of the rate"),
    "form_batch": ("... with advantages divided", "... divided by the spread"),
    "anywhere": (
        ".1 for the line, 1 for a right number *any",
        ".1 for a last line, 1 for a right n",
    ),
    "gated": ("1.1 for the line *where", "... the .1 only where"),
    "no_form": ("1 for a right number anywhere, nothing", "1 for a right number anywhere, 40"),
}


def row_of(page, words):
    "The cells of the table's row that begins so."
    (found,) = [line for line in page.splitlines() if line.startswith(f"| {words}")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def told(*shares):
    return ", ".join(f"{100 * share:.1f}" for share in shares) + " %"


@pytest.mark.parametrize("kind", WORDS | FORMS)
def test_the_tables_are_those_of_the_logs(kind, scripts):
    "Every seed, and intervals over problems and seeds."
    from answers import interval

    def said(before, unit):
        mean, low, high = interval(marks, before)
        return f"{mean:.1f}{unit} ({low:.1f} to {high:.1f})"

    runs = [stored(f"{kind}_{seed}") for seed in range(4 if kind == "right" else 3)]
    marks, best = [run["after"]["marks"] for run in runs], stored("prompts")["teacher"]["marks"]
    shares = told(*(run["after"]["right"] for run in runs))
    lesson, fast = (WORDS | FORMS)[kind]
    wide = told(*(run["after_1024"]["right"] for run in runs))
    page = (ROOT / "docs/how_fast.md").read_text()
    assert row_of(page, fast) == [shares, said(best, ""), wide]
    if kind in WORDS:
        assert row_of(PAGE, lesson) == [shares, said(best, "")]
    else:
        assert row_of(NEXT, lesson) == [shares, said("w" * len(best), " %")]


def test_other_pages_say_the_same_gains(scripts):
    from answers import interval

    best = stored("prompts")["teacher"]["marks"]

    def gain(kind, count=3):
        return interval([stored(f"{kind}_{i}")["after"]["marks"] for i in range(count)], best)

    _, low, high = gain("right", 4)
    tutorial = (ROOT / "nbs/tutorials/03_gsm8k.ipynb").read_text()
    recipe = re.sub(r"\s*# ", " ", (ROOT / "recipes/qwen_coder_gsm8k.yaml").read_text())
    for page in (tutorial, recipe, (ROOT / "README.md").read_text()):
        assert f"interval {low:.1f} to {high:.1f}, over problems" in page
    for kind, words in {"random": "loses", "box": "loses", "supervised": "costs"}.items():
        mean, low, high = gain(kind)
        assert re.search(f"{words} {-mean:.1f} (points )?\\({-high:.1f} to {-low:.1f}\\)", tutorial)


def test_numbers_changed_and_a_vote_are_those_of_the_logs(scripts):
    from answers import bootstrap, interval, majority_at

    marks = [stored(f"right_{seed}")["after_new_numbers"]["marks"] for seed in (2, 3)]
    before = stored("before")["after_new_numbers"]["marks"]
    shares = [told(*(m.count("r") / len(m) for m in some)) for some in ([before], marks)]
    mean, low, high = interval(marks, before)
    sentence = "{} right before, {} after".format(*shares).replace("39.1, 40.1", "39.1 and 40.1")
    assert sentence in PAGE and f"a gain of {mean:.1f} points ({low:.1f} to {high:.1f})" in PAGE
    votes = [majority_at(64, *one) for one in UNTRAINED["votes"]]
    mean, low, high = (100 * x for x in bootstrap(votes))
    assert (
        f"right for {mean:.1f} % of the 256 problems (95 % interval {low:.1f} to {high:.1f})"
        in PAGE
    )
    greedy = [m[:256].count("r") / 256 for m in (BEFORE, *(run["after"]["marks"] for run in RUNS))]
    assert f"one greedy answer for {told(greedy[0])}." in PAGE
    assert (
        f"right for {told(*greedy[1:])}: about as good".replace("39.1, 37.1", "39.1 and 37.1")
        in PAGE
    )


def test_the_form_shortens_all_eighteen_runs_and_one_comes_back():
    """As the figure says: a tenth of the tokens within twelve updates, and one returns, in which
    long completions never die out."""
    back = []
    for kind, seed in product(set(FORMS) - {"no_form"}, range(3)):
        run = stored(f"{kind}_{seed}")
        lengths = [one["completions/mean_length"] for one in run["log"]]
        assert min(lengths[:12]) < lengths[0] / 10, (kind, seed)
        if run["after"]["right"] > stored("prompts")["line"]["right"] / 2:
            back.append((kind, seed))
        else:
            assert lengths[-1] < 9 and 0.019 < run["after"]["right"] < 0.063, (kind, seed)
    assert back == [("gated", 1)]
    cut = [[r["completions/clipped_ratio"] for r in stored(f"gated_{i}")["log"]] for i in range(3)]
    assert min(cut[1]) * 256 == pytest.approx(2, abs=0.05)
    assert cut[0][5] > 0 < cut[2][5] and max(cut[0][6:] + cut[2][6:]) == 0
    lengths = [one["completions/mean_length"] for one in stored("gated_1")["log"]]
    assert (round(min(lengths)), round(lengths[20], -2)) == (16, 200)
    texts = [(one["update"], one["completion"]) for one in stored("gated_1")["completions"]]
    assert (10, "#### 63") in texts
    assert any("85 - (25 + 50)" in text and text.endswith("#### 10") for _, text in texts[-3:])
    for seed in range(3):
        assert min(one["completions/mean_length"] for one in stored(f"no_form_{seed}")["log"]) > 150
        first = stored(f"form_{seed}")["log"][0]
        assert 0.17 < 10 * first["rewards/form_line/mean"] < 0.27
        assert round(256 * first["rewards/right_line/mean"]) <= 3


@pytest.mark.parametrize("c", range(7))
def test_pass_at_k_of_the_lesson_is_the_share_of_all_subsets(c):
    (source,) = ["".join(x["source"]) for x in CELLS if "def pass_at(" in "".join(x["source"])]
    names = {"math": __import__("math")}
    exec("def pass_at" + source.split("def pass_at")[1].split("\n\n\n")[0], names)
    answers = [True] * c + [False] * (6 - c)
    for k in range(1, 7):
        drawn = [any(some) for some in combinations(answers, k)]
        assert names["pass_at"](k, c, 6) == pytest.approx(sum(drawn) / len(drawn))


def test_the_board_of_the_page_holds_the_stored_logs():
    pages = ["".join(o.get("data", {}).get("text/html", "")) for o in OUTPUTS]
    (held,) = [found[1] for page in pages if (found := re.search("data-values='([^']*)'", page))]
    runs = json.loads(unescape(held))["runs"]
    logs = [run["log"] for run in (*RUNS, stored("random_0"), stored("form_0"))]
    assert len(runs) == len(logs)
    for run, log in zip(runs, logs):
        assert run["curves"]["reward"] == [[one["step"], one["reward"]] for one in log]
        assert {one["step"] for one in run["samples"]} <= {one["step"] for one in log}
    problem = RUNS[0]["lost"][1]
    assert runs[0]["lost"][1]["before"] == problem["before"]


def test_a_verdict_has_three_seeds_or_runs_that_wait(scripts):
    "The table of advice: logs of so many seeds, or no verdict and three runs in the list."
    from on_cards import read

    waiting = [name for _, _, name, _, _ in read(ROOT / "benchmarks/gsm8k_runs.txt")]
    table = NEXT.split("### The advice on a trained model")[1].split("### ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 8
    for advice, _, seeds, names in rows:
        for pattern in re.findall(r"`(\w+_)\*`", names):
            logs = [p for p in (ROOT / "benchmarks/results/gsm8k").glob(f"{pattern}*.json")
                    if re.fullmatch(rf"{pattern}\d", p.stem)]  # fmt: skip
            assert len(logs) == int(seeds.split()[0]) and len(logs) in (0, 3, 4), advice
            if not logs:
                runs = [name for name in waiting if re.fullmatch(rf"{pattern}\d", name)]
                assert len(runs) >= (2 if pattern == "coder15_" else 3), advice
