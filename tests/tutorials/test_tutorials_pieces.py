"""Pieces of the tutorials that train nothing: a grammar, a reward for a language, the values of
NF4, and the script that runs the page on 2048 for several seeds."""

import ast
import importlib
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "nbs/tutorials"


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


def test_programs_of_the_grammar_are_python_and_made_of_its_words(grammar):
    words = sorted(map(re.escape, grammar["WORDS"]), key=len, reverse=True)
    for code in grammar["WRITTEN"]:
        ast.parse(code)
        assert re.fullmatch("|".join(words).join(["(?:", ")+"]), code)
    assert len(set(grammar["WRITTEN"])) > 100  # the short ones come more than once


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


def test_the_script_finds_what_it_changes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("written_programs")
    before = list(script.sources())
    after = [script.changed(source, seed=7, updates=1) for source in before]
    text = "\n".join(filter(None, after))
    assert text.count("SEED = 7\n") == 1 and text.count("max_steps=1,") == 1
    assert text.count("output = trainer.train()") == 1 and "await " not in text
    assert script.LAST in before[-1]
    sys.modules.pop("written_programs")
    row = dict(seed=0, best_shown=0.2, best_kept_back=0.5, likeliest=0.3, chosen=0.4)
    lines = script.table([row, row | {"chosen": 0.6}])
    assert lines[-2].startswith("chosen over best_shown: +0.30 +- 1.27")
