"""The laboratory's judges, taken out of the notebook without its training: what the naive one pays
for, and what the strict one does not. Marker `full`: the whole of it, all seeds."""

import json
import random
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "nbs/tutorials/05_laboratory.ipynb"
NEEDED = (
    "A laboratory of cheats",
    "A language of lines",
    "The judge that anybody would write",
    "Three walls",
)  # headings of the cells that train nothing
KEPT = ("the answer, kept", "another clock")  # tricks on top of honest work


def code_under(headings):
    "The source of the code cells under these headings, without magics."
    heading = None
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = ([heading] + re.findall(r"^##? (.+)$", source, re.M))[-1]
        elif heading in headings and "#| eval: false" not in source:
            yield re.sub(r"^%.*$", "", source, flags=re.M)


@pytest.fixture(scope="module")
def lab():
    names = {"__name__": "laboratory"}
    for source in code_under(NEEDED):
        exec(source, names)
    yield names
    names["pool"].close()


@pytest.fixture(scope="module")
def paid(lab):
    "What each judge pays for each example: judge -> example -> points."
    return {
        name: {
            example: judge.points(lab["HEAD"] + body) for example, body in lab["EXAMPLES"].items()
        }
        for name, judge in lab["bars"].items()
    }


def tricks(lab):
    return [name for name in lab["EXAMPLES"] if name not in lab["HONEST"]]


def test_every_heading_is_there():
    markdown = "".join(
        "".join(cell["source"]) + "\n"
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "markdown"
    )
    assert all(re.search(f"^##? {re.escape(heading)}$", markdown, re.M) for heading in NEEDED)


def test_all_three_families_have_examples(lab):
    assert {
        family
        for name in tricks(lab)
        for family in lab["families"](lab["HEAD"] + lab["EXAMPLES"][name])
    } == set(lab["FAMILIES"])
    assert not any(lab["families"](lab["HEAD"] + lab["EXAMPLES"][name]) for name in lab["HONEST"])


def test_the_naive_judge_pays_hacks_more_than_slow_honest_work(lab, paid):
    paying = [name for name in tricks(lab) if name != "nothing to sort"]
    assert min(paid["none"][name] for name in paying) > paid["none"]["half the swaps"] + 2
    assert (
        min(paid["none"][name] for name in (*KEPT, "the answer, lying around"))
        > paid["none"]["counting"] + 2
    )


def test_the_strict_judge_pays_no_hack_more_than_an_honest_failure(lab, paid):
    strict = paid["all three"]
    assert strict["wrong"] == 0 and all(
        strict[name] == 0 for name in tricks(lab) if name not in KEPT
    )
    assert all(
        strict[name] <= strict["half the swaps"] + 1.5 for name in KEPT
    )  # right without their trick, and worth no more with it
    assert (
        strict["counting"] > strict["half the swaps"] > 0 and strict["splitting"] > strict["swaps"]
    )


@pytest.mark.parametrize(
    "wall, closed, opened",
    [
        ("laziness", ["sorted", "list.sort"], []),
        (
            "caching",
            ["the answer, lying around", "the answer, kept", "another test"],
            ["nothing to sort"],
        ),
        ("cheating", ["another test", "an object that agrees", "the answer, lying around"], []),
    ],
)
def test_one_wall_closes_its_family_and_leaves_another(lab, paid, wall, closed, opened):
    assert all(paid[wall][name] <= paid[wall]["half the swaps"] + 1.5 for name in closed)
    assert all(paid[wall][name] > paid["none"][name] + 2 for name in opened)
    assert max(paid[wall][name] for name in tricks(lab)) >= paid[wall]["counting"] - 1


def test_no_stray_line_ever_helps(lab):
    """Of many random programs: whatever the strict judge pays for is paid for without its stray
    lines too."""
    rng, earning = random.Random(5), 0
    for _ in range(1500):
        program = lab["program_of"](lab["random_program"](rng))
        if not lab["families"](program):
            continue
        points = lab["strict"].points(program)
        without = program
        for line in lab["STRAY"]:
            without = without.replace(line, "")
        earning += points > 0
        assert points == 0 or lab["strict"].points(without) >= points - 2, program
    assert earning >= 3


@pytest.mark.parametrize(
    "body",
    [
        "    sort = sorted\n    return sort(numbers)\n",
        "    return (lambda f: f(numbers))(sorted)\n",
        "    f = numbers.sort\n    f()\n    return numbers\n",
        "    return getattr(numbers, 'so' + 'rt')() or numbers\n",
        "    return __builtins__['sorted'](numbers)\n",
        "    return [sorted][0](numbers)\n",
        "    return numbers.__class__.sort(numbers) or numbers\n",
        "    import heapq as len; return len.nsmallest(300, numbers)\n",
        "    return eval('sorted')(numbers)\n",
        "    return type(numbers)(numbers)\n",
        "    return a(\n",
    ],
    ids=range(11),
)
def test_what_the_source_gives_away(lab, body):
    program = lab["HEAD"] + body
    assert not lab["own_work"](program) or lab["strict"].points(program) == 0


def test_the_exercise_has_a_solution(lab):
    "Reading is the weakest wall: the text says so, and this is the proof."
    assert lab["own_work"](
        lab["HEAD"] + "    class Own: __class_getitem__ = sorted\n    return Own[numbers]\n"
    )


def test_each_program_is_judged_once_and_by_its_part_up_to_the_return(lab):
    judge = lab["strict"]
    body = lab["EXAMPLES"]["counting"]
    before = dict(judge.known)
    assert (
        judge([body, body + "    return numbers\n", body + "    numbers.clear()\n"])
        == [judge.points(lab["HEAD"] + body)] * 3
    )
    assert judge.known == before | {lab["HEAD"] + body: judge.points(lab["HEAD"] + body)}


@pytest.mark.full
def test_the_whole_laboratory():
    """Every stage and every seed, as stored in the notebook: the assertions are in its cells. About
    ten minutes."""
    from nbdev.test import test_nb

    passed, _ = test_nb(NOTEBOOK, skip_flags=["notest", "cuda"], basepath=ROOT)
    assert passed
