"benchmarks/large.py with narrow models of each family, and its list of runs."

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from grpo_nb.model import limits
from grpo_nb.model.memory_bytes import MODELS, GiB, longest_sequence, read_shape
from grpo_nb.model.stored_weights import read_config

FOLDER = Path(__file__).parents[1] / "benchmarks"
RECORDS = [json.loads(file.read_text()) for file in sorted((FOLDER / "results/large").glob("*"))]


@pytest.fixture(scope="module")
def large():
    "The script as a module."
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    with torch.compiler.set_stance("force_eager"):
        yield importlib.import_module("large")
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.long
@pytest.mark.parametrize("name", ["oss_380k", "oss_262k", "llama_70b", "qwen3_110k"])
def test_each_family_makes_its_step(large, name):
    record = large.about(name, large.ROWS[name])
    large.step(large.ROWS[name], record, Namespace(cpu=True))
    assert record["way"].startswith("directly") and record["drawn"] == 2 * 6
    assert {"sample", "train", "update"} <= record["measured"].keys()
    assert 0 < record["log"]["grad_norm"] and record["log"]["sampling/gap_mean"] < 1e-4
    json.dumps(record)


def test_a_row_has_its_models_shape_and_positions_enough(large):
    for row in large.ROWS.values():
        config, _ = read_config(large.config_of(row, narrow=False))
        assert read_shape(config).parameters == MODELS[row.model].parameters
        assert longest_sequence(config) >= row.prompt + row.new
        made = large.planned(row)
        assert made.fits and made.rows == row.completions and row.completions % row.batch == 0


def test_what_is_planned_stands_beside_what_torch_counts(large):
    told = large.about("llama_70b", large.ROWS["llama_70b"])
    layer = sum(told["planned"]["layer"].values())
    assert told["planned_at"] == "layer" and layer == pytest.approx(told["planned_peak"], abs=0.1)
    moments = told["planned"]["update"]["adapters"] / 2  # a first step has none yet
    assert 0.5 < layer - moments - told["as_torch_counts"]["train"] < 1.5  # CUDA's own, and gaps


def test_a_run_whose_time_is_over_says_where_it_was(large, tmp_path):
    record, left = dict(part="train", measured={}), []
    thread = large.witness(record, tmp_path / "out.json", 0.02, leave=left.append)
    thread.join(10)
    told = json.loads((tmp_path / "out.json").read_text())
    assert left == [3] and told["ended"] is False and told["error"].endswith("s in train")


def test_each_line_of_the_list_is_a_row_or_a_script(large):
    on_cards = importlib.import_module("on_cards")
    runs = on_cards.read(FOLDER / "large_runs.txt")
    names = {name for *_, name, _, command in runs if "large.py" in command}
    assert names == large.ROWS.keys() - {record["row"] for record in RECORDS}
    for cards, minutes, name, _, command in runs:
        assert cards == 1 and minutes < 10 and "$OUT/$NAME.json" in command
        if name in large.ROWS:
            assert minutes == large.ROWS[name].minutes and minutes < float(command.split()[-1]) < 10
        script = next(word for word in command.split() if word.endswith(".py"))
        assert (FOLDER.parent / script).exists()


RUN = pytest.mark.parametrize("record", [pytest.param(r, id=r["row"]) for r in RECORDS])


@RUN
def test_a_row_that_was_run_is_told_as_its_record_and_the_planner_have_it(large, record):
    row, parts = large.ROWS[record["row"]], record["measured"]
    planned = large.about(record["row"], row)["as_torch_counts"]
    gib = [f"{planned[k]:.1f}, {one['peak']:.1f}, {one['driver']:.1f}" for k, one in parts.items()]
    seconds = [*(one["seconds"] for one in parts.values()), record["step_s"]]
    cells = [
        f"{row.model}, {row.weights.upper()}",
        f"{row.gib}",
        f"{row.prompt:,} + {row.new:,}",
        f"{row.completions}",
        *(f"{one:.1f}" for one in seconds),
        *gib,
    ]
    assert f"| {' | '.join(cells)} |" in (FOLDER.parent / "docs/how_fast.md").read_text()


HELD = {"oss_380k", "oss_116k", "qwen3_110k"}  # measured when compiling held all parts of a prompt


def held_by_compiling(name, row):
    """GiB that the first draw held of a prompt in parts then: of one full layer each part's queries
    and outputs, and the keys and values up to its end."""
    shape, part = MODELS[row.model], limits.PREFILL_TOKENS
    if name not in HELD:
        return 0
    keys = sum(range(part, row.prompt, part)) + row.prompt
    numbers = 2 * shape.heads * row.prompt + 2 * shape.kv_heads * keys
    return 2 * shape.head_dim * numbers / GiB


@RUN
def test_the_plan_is_within_ten_per_cent_of_what_was_measured(large, record):
    row = large.ROWS[record["row"]]
    planned = large.about(record["row"], row)["as_torch_counts"]
    drawn = planned["sample"] + held_by_compiling(record["row"], row)
    assert drawn == pytest.approx(record["measured"]["sample"]["peak"], rel=0.1)
    assert planned["train"] == pytest.approx(record["measured"]["train"]["peak"], rel=0.1)
