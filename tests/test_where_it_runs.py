"The tables of docs/where_it_runs.md are those of their records, and a run card becomes a row."

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import where_it_runs as tool  # noqa: E402
from forced import FAULTS  # noqa: E402
from rehearse import PAGES  # noqa: E402

from grpo_nb import run_card  # noqa: E402
from grpo_nb.recipe import read_recipe  # noqa: E402
from grpo_nb.script import trainer_of  # noqa: E402


def test_the_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/where_it_runs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_five_tutorials_came_to_their_last_cell():
    "As they are now: a cell that was added since needs `python tools/rehearse.py` again."
    rows = json.loads((ROOT / "docs/rehearsal.json").read_text())["whole"]["pages"]
    assert len(rows) == 5
    for row in rows:
        cells = nbformat.read(ROOT / "nbs/tutorials" / row["page"], 4).cells
        number = sum(cell.cell_type == "code" for cell in cells)
        assert (row["error"], row["ran"], row["cells"]) == (None, number, number), row["page"]


def test_each_failure_ended_in_a_sentence_on_each_page():
    "`python tools/rehearse.py --forced --record docs/rehearsal.json` runs what is not there yet."
    rows = json.loads((ROOT / "docs/rehearsal.json").read_text())["forced"]["pages"]
    assert rows.keys() == {f"{page.stem}: {fault}" for page in PAGES for fault in FAULTS}
    for name, row in rows.items():
        assert row["ended well"] and re.search(FAULTS[name.partition(": ")[2]][-1], row["said"])


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    "Of a run, as its page would show it on a T4."
    words = dict(per_device_train_batch_size="16", logging_steps="1", max_steps="3")
    folder = tmp_path_factory.mktemp("run")
    recipe = read_recipe(ROOT / "recipes/tiny_arithmetic.yaml", words | {"output_dir": str(folder)})
    trainer = trainer_of(recipe)
    trainer.log.show = False
    trainer.train()
    return run_card(trainer, "T4")


def test_a_card_becomes_a_row(card):
    row = [cell.strip() for cell in tool.row_of(card).strip("|").split("|")]
    assert len(row) == 8 and row[:2] == ["CPU", "gpt_oss"] and row[4] == "3 of 3"
    device, host = (re.fullmatch(r"[\d.]+ / [\d.]+", cell) for cell in row[5:7])
    assert device and host and "torch " in row[3]
    assert len(tool.card_table([card]).splitlines()[0].split("|")) == 10


def test_what_else_stands_in_an_issue_is_left_out(card):
    issue = f"Hello, I am Alice, /home/alice\n```\n{card}\n```\n<img src=x> | a | b |\n"
    kept = tool.read_card(issue)[0]
    assert kept.strip() == str(card).strip()
    with pytest.raises(ValueError, match="no run card in it"):
        tool.read_card("Run card: something on my card")
    with pytest.raises(ValueError, match="no run card in it"):
        tool.read_card(str(card).replace("on CPU", "on <b>CPU</b>"))


def test_the_lesson_on_precision_says_what_was_measured():
    told = json.loads((ROOT / "benchmarks/results/precision.json").read_text())
    cells = json.loads((ROOT / "nbs/lessons/04_precision.ipynb").read_text())["cells"]
    (text,) = ("".join(c["source"]) for c in cells if c["id"] == "trained-formats")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    page = {row[0]: [re.findall(r"\d*\.?\d+", cell) for cell in row[1:]] for row in rows[1:]}
    said = {name: [[float(n) for n in cell] for cell in cells] for name, cells in page.items()}
    off = [told["log-probs off by"][name] for name in ("bfloat16", "float16")]
    measured = [[round(one["mean"], 3), round(one["max"], 2)] for one in off]
    assert said["log-probs off by, nats: mean, most"] == measured
    for updates in (1, 4, 12):
        drift = [[round(100 * told["drift"][n][updates - 1])] for n in ("bfloat16", "float16")]
        (row,) = (v for k, v in said.items() if re.search(rf"after {updates} update", k))
        assert row == drift
    assert f"{told['largest activation']['between layers']:,.0f}" in text
    assert told["skipped"] == {"bfloat16": 0, "float16": 1}
