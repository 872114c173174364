"""Pieces of the tutorials that train nothing: a reward for a language, and the values of NF4."""

import json
import re
from pathlib import Path

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
