"What the lesson on a real run says of the stored runs is what their logs say."

import json
import re
from html import unescape
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stored(name):
    return json.loads((ROOT / f"benchmarks/results/gsm8k/{name}.json").read_text())


RUNS = [stored(f"right_{seed}") for seed in range(3)]
CELLS = json.loads((ROOT / "nbs/lessons/10_a_real_run_read.ipynb").read_text())["cells"]
PAGE = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
BEFORE = RUNS[0]["before"]["marks"]
OUTPUTS = [output for cell in CELLS for output in cell.get("outputs", ())]
COUNTS = stored("before_samples")["samples"]["counts"]


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
    best = stored("prompts")["teacher"]["right"]
    assert f"the best of five prompts {best:.1%}".replace("%", " %") in PAGE


def told(share):
    return f"{100 * share:.1f} %"


def test_the_controls_are_those_of_the_logs():
    after = ", ".join(told(run["after"]["right"]).removesuffix(" %") for run in RUNS)
    rows = {"three seeds": f"{after} %"}
    words = {"a coin": "random_0", "number in a box": "box_0", "worked solutions": "supervised_0"}
    rows |= {name: told(stored(run)["after"]["right"]) for name, run in words.items()}
    for name, shares in rows.items():
        assert re.search(rf"\| .*{name} \| {re.escape(shares)} \|", PAGE), name
    numbers = [run["after_new_numbers"]["right"] for run in (stored("before"), RUNS[2])]
    assert "{} right before, {} after".format(*map(told, numbers)) in PAGE


def test_the_only_cure_of_the_collapse_is_that_of_the_logs():
    path = ROOT / "nbs/lessons/02_when_the_reward_does_not_rise.ipynb"
    page = "".join(sum((cell["source"] for cell in json.loads(path.read_text())["cells"]), []))
    cured, before = stored("no_form_0"), stored("prompts")["line"]
    shares = told(cured["after"]["right"]), told(before["right"])
    assert "{} of the test problems are right, {} before".format(*shares) in page
    assert min(one["completions/mean_length"] for one in cured["log"]) > 150
    for name in ("form", "form_batch", "form_beta", "form_slow", "anywhere", "gated"):
        run = stored(f"{name}_0")
        assert run["log"][-1]["completions/mean_length"] < 7, name
        assert run["after"]["right"] < before["right"] / 2, name


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
