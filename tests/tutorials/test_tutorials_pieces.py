"""Pieces of the tutorials that train nothing: two grammars, a clock that counts, a reward for a
language, the values of NF4, and the script that runs two pages for several seeds."""

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import random
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from grpo_nb.environments import sandbox
from grpo_nb.environments.game2048 import trusted
from grpo_nb.environments.matmul import NAIVE, MatmulRewards, answer_errors, product, random_matrix

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "nbs/tutorials"
CLOCK = dict(  # what the cell with the clock has from the imports of its page
    cache=functools.cache,
    contextmanager=contextlib.contextmanager,
    deepcopy=copy.deepcopy,
    replace=dataclasses.replace,
    sys=sys,
    SandboxResult=sandbox.SandboxResult,
    SimpleNamespace=types.SimpleNamespace,
)


def cells(page):
    "The code cells of a page."
    notebook = json.loads((PAGES / page).read_text())
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def names_of(page, marks, **names):
    "What the cells define that hold these lines, each mark in exactly one cell."
    for mark in marks:
        found = [source for source in cells(page) if mark in source]
        assert len(found) == 1, (mark, len(found))
        exec(compile(found[0], f"{page}, {mark}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def grammar():
    page = "06_game2048_gpt_oss.ipynb"
    return names_of(page, ["def random_program("], random=random, SEED=0, TINY=True)


@pytest.fixture(scope="module")
def kernels():
    names = dict(random=random, SEED=0, TINY=True, allowed={}, trusted=trusted, **CLOCK)
    return names_of("07_matmul_gpt_oss.ipynb", ["def random_program(", "class Here:"], **names)


@pytest.mark.parametrize("name", ["grammar", "kernels"])
def test_programs_of_the_grammar_are_made_of_its_words(name, request):
    grammar = request.getfixturevalue(name)
    words = sorted(map(re.escape, grammar["WORDS"]), key=len, reverse=True)
    for code in grammar["WRITTEN"]:
        assert re.fullmatch("|".join(words).join(["(?:", ")+"]), code)
    assert len(set(grammar["WRITTEN"])) > 100  # the short ones come more than once


def test_strategies_of_the_grammar_are_python(grammar):
    for code in grammar["WRITTEN"]:
        ast.parse(code)


def test_kernels_without_a_slip_are_right(kernels):
    rng = random.Random(1)
    (a, b), words = (random_matrix(3, 10, rng), random_matrix(10, 4, rng)), set()
    for _ in range(200):
        written = kernels["random_words"](rng)
        words |= {*written}
        found = trusted("".join(written), "matmul")(a, b)
        assert answer_errors(found, product(a, b))[0] < 1e-12, "".join(written)
    assert words == {*kernels["WORDS"]} - {kernels["NUMPY"]}  # and each word can be right


def test_the_count_is_the_same_each_time_and_ranks_as_the_clock_does(kernels):
    count, before = kernels["count"].__wrapped__, sys.gettrace()
    begin = "def matmul(A, B):\n    T = [*zip(*B)]\n    return [["
    entries = "sum([x * y for x, y in zip(a, t)])", "sum(map(float.__mul__, a, t))"
    quick = [begin + entry + " for t in T] for a in A]" for entry in entries]
    counts = [count(code, 8) for code in (NAIVE, *quick)]
    assert counts == [count(code, 8) for code in (NAIVE, *quick)]
    assert counts[0] > counts[1] > counts[2] > 15 * 8**3 and sys.gettrace() is before


def test_a_program_in_this_process_is_paid_by_its_count(kernels):
    rewards = MatmulRewards(kernels["Here"](), secret="0", size=16, trials=1)
    quick = "from operator import mul\n\ndef matmul(A, B):\n    return [[sum(map(mul, a, t)) "
    texts = [NAIVE, quick + "for t in zip(*B)] for a in A]", "def matmul(A, B): return C"]
    erases = (
        "def matmul(A, B):\n    for a in A: a[:] = [0.0 for _ in a]\n"  # zeros are then the product
    )
    texts.append(erases + "    return [[0.0 for _ in B[0]] for _ in A]")
    reports = rewards.judge([f"```python\n{text}\n```" for text in texts], "0")
    assert [report.stage for report in reports] == ["right", "right", "fails", "wrong"]
    ratio = kernels["count"](NAIVE, 16) / kernels["count"](reports[1].program.code, 16)
    assert reports[0].timing.speed == 1 and reports[1].timing.speed == pytest.approx(ratio)


def test_the_ten_measures_say_what_the_table_says(grammar):
    names = {}
    exec(grammar["TESTS"], names)
    board = ((1, 1, 0), (0, 2, 0), (3, 0, 0))  # doublings: tiles 2 2 . / . 4 . / 8 . .
    assert {name: names[name](board) for name in grammar["NAMES"]} == {
        "free": 5,
        "pairs": 1,  # the two 2s
        "steps": 1,  # from 2 down to 4
        "bends": 3,  # the row with the 4 alone in the middle, and the left and middle columns
        "kinds": 4,  # 2, 4, 8 and nothing
        "largest": 3,
        "corner": 3,
        "floor": 3,
        "left": 4,
        "middle": 2,
    }
    names["value"] = names["free"]
    assert names["strategy"]([[2, 0, 2], [0, 4, 0], [0, 0, 0]]) in "AD"  # which merges


def test_the_cured_language_reward_pays_nothing_for_silence():
    import pandas as pd

    from grpo_nb.environments.verifiers import number_matches

    names = names_of(
        "10_deepseek_r1_qwen3.ipynb",
        ["def counts(", "def no_other_language(", "def wanted_language("],
        re=re,
        pd=pd,
        number_matches=number_matches,
        WANTED="Indonesian",
        TINY=True,
    )
    silent, asked = ["</think>3"], ["dua tambah satu adalah tiga</think>3"]
    assert names["no_other_language"](silent) == [1] and names["wanted_language"](silent) == [0]
    assert names["wanted_language"](asked) == [1]
    assert names["right"](silent + asked, answer=["3", "4"]) == [1, 0]


def test_nf4_has_the_published_values():
    levels = names_of("11_qlora.ipynb", ["def quantiles("], torch=torch)["NF4"]
    published = (
        "-1 -.6961928 -.5250731 -.3949175 -.2844414 -.1847734 -.0910500 0 "
        ".0795803 .1609302 .2461123 .3379152 .4407098 .5626170 .7229568 1"
    )
    torch.testing.assert_close(
        levels, torch.tensor([*map(float, published.split())]), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("page", ["06_game2048_gpt_oss.ipynb", "07_matmul_gpt_oss.ipynb"])
def test_the_script_finds_what_it_changes(monkeypatch, page):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("written_programs")
    before = list(script.sources(page))
    after = [script.changed(source, seed=7, updates=1) for source in before]
    text = "\n".join(filter(None, after))
    assert text.count("SEED = 7\n") == 1 and text.count("max_steps=1,") == 1
    assert text.count("output = trainer.train()") == 1 and "await " not in text
    assert script.LAST[page] in before[-1]
    sys.modules.pop("written_programs")
    names = "best shown", "best kept back", "likeliest", "best of 100"
    values = dict(zip(names, (0.2, 0.5, 0.3, 0.4)))
    row = dict(seed=0, count=values)
    lines = script.table([row, dict(seed=1, count=values | {"best of 100": 0.6})], "count")
    assert lines[-2].startswith("best of 100 over best shown: +0.30 +- 1.27")
