"The gate of published notebooks: what it replaces, how it runs one, and what its record says."

import collections
import json
from pathlib import Path

import pytest

from tools.notebooks_gate import (
    EDITS,
    NOT_OURS,
    OUTCOMES,
    changed,
    code_cells,
    family_of,
    outcome,
    run_notebook,
)

ROOT = Path(__file__).resolve().parent.parent
RECORD = json.loads((ROOT / "docs/notebooks_gate.json").read_text())
CELLS = {  # what somebody might write -> what is run, and the rules or edits that did it
    "from unsloth import FastModel": ("from grpo_nb import FastModel", ["import"], []),
    "from trl import GRPOConfig, GRPOTrainer": (
        "from grpo_nb import GRPOConfig, GRPOTrainer",
        ["import"],
        [],
    ),
    "from trl import SFTTrainer": ("from trl import SFTTrainer", [], []),
    "%%capture\nif True:\n    !pip install \\\n      unsloth\nx = 1": (
        "pass\nif True:\n    pass\nx = 1",
        ["install"],
        [],
    ),
    "x = load(model_name = 'unsloth/Some-4B')": (
        'x = load(model_name = __import__("stand_ins").model("unsloth/Some-4B"))',
        ["model"],
        [],
    ),
    "Config(\n    max_steps = 500,\n    optim = 'x')": (
        "Config(\n    max_steps = 2,\n    optim = 'x')",
        ["sizes"],
        [],
    ),
    "    # max_steps = 500": ("    # max_steps = 500", [], []),
    "t.apply_chat_template(x, tokenize = True)": (
        "t.apply_chat_template(x, tokenize = True, return_dict = False)",
        [],
        ["return_dict=False"],
    ),
    'x = f"{d[1]["a"]}: {b}"': ("x = f\"{d[1]['a']}: {b}\"", ["versions"], []),
    'prompt = train_dataset[1]["prompt"]\n\ninputs = tokenizer(': (
        'prompt = tokenizer.apply_chat_template(train_dataset[1]["prompt"], tokenize = False)'
        "\n\ninputs = tokenizer(",
        [],
        ["apply_chat_template"],
    ),
    "t.apply_chat_template(x, tokenize = False)": (
        "t.apply_chat_template(x, tokenize = False)",
        [],
        [],
    ),
}


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_replaced_in_a_cell(cell):
    wanted, rules, edits = CELLS[cell]
    assert changed([cell]) == ([wanted], rules, edits)


@pytest.mark.parametrize(
    "cells, at, error",
    [
        (["x = 1", "assert x == 1"], 1, None),
        (["x = 1", "1 / 0", "x = 2"], 1, "ZeroDivisionError: division by zero"),
        (["from stand_ins import model", "assert model('a') == 'b'"], 1, None),
        (["from stand_ins import Version", "assert Version('x') < Version('1.10')"], 1, None),
        (["import sys", "sys.exit(3)"], 1, "SystemExit: 3"),
    ],
)
def test_a_notebook_runs_in_order_and_ends_at_its_first_error(tmp_path, cells, at, error):
    path = tmp_path / "one.ipynb"
    made = [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["x"]}, *made]}))
    assert code_cells(path) == cells
    told = run_notebook(path, cells, ({"a": "b"}, {}, {"x": "1.2"}), tmp_path)
    assert told == {"at": at, "error": error}
    assert outcome(path, [], told) == ("failed" if error else "ran")
    assert outcome(path, ["return_dict=False"], told) == ("failed" if error else "one edit")


def test_a_model_is_stood_in_for_by_its_family():
    assert family_of("unsloth/gpt-oss-20b-BF16") == "gpt_oss"
    assert family_of("meta-llama/Llama-3.2-3B-Instruct") == "llama"
    assert family_of("unsloth/mistral-7b-instruct-v0.3-bnb-4bit") == "mistral"
    assert family_of("unsloth/Qwen3-VL-8B-Instruct", seeing=True) == "qwen3_vl"


def test_the_record_counts_what_it_holds():
    every = RECORD["notebooks"].values()
    assert RECORD["counts"] == {
        name: sum(one["outcome"] == name for one in every) for name in OUTCOMES
    }
    assert len(every) == 31 and RECORD["edits"].keys() == EDITS.keys()
    edits = collections.Counter(edit for one in every for edit in one["edits"])
    assert edits.keys() <= EDITS.keys()
    failed = {name for name, one in RECORD["notebooks"].items() if one["outcome"] == "failed"}
    assert {one["reason"] for one in every if "reason" in one} and len(failed) < 4
    assert all("/tmp" not in one.get("error", "") for one in every)
    assert all(any(word in name for name in failed) for word in NOT_OURS)


def test_the_front_page_says_what_the_record_counts():
    counts = RECORD["counts"]
    passing = counts["ran"] + counts["one edit"]
    every = sum(counts.values())
    said = f"Of the {every} notebooks on GRPO that Unsloth publishes {passing} run whole"
    assert said in (ROOT / "README.md").read_text()
