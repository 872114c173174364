"docs/models.md: what works with which family, as tools/models_table.py found it on tiny models."

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))  # tests are on it

import models_table as tool  # noqa: E402
from tiny_families import FAMILIES  # noqa: E402

RECORD = json.loads((ROOT / "docs/models.json").read_text())
ROWS = RECORD["families"]


def test_the_page_and_the_front_page_say_what_the_record_says():
    assert (ROOT / "docs/models.md").read_text() == tool.page_of(RECORD), "python " + tool.__file__
    for page in ("README.md", "index.ipynb"):
        assert tool.front_sentence(RECORD) in (ROOT / page).read_text()


def test_every_family_has_a_row():
    assert list(ROWS) == list(FAMILIES) and len(ROWS) > 60
    for name, row in ROWS.items():
        assert row.keys() == {"class", *tool.COLUMNS} and tool.cell(row, "drawn"), name


@pytest.fixture
def llama(tmp_path):
    family = tool.Family("llama", tmp_path)
    family.loads()
    family.trains()
    return family


@pytest.mark.parametrize("name", ["llama", "bamba", "qwen3_vl"])
def test_a_family_has_the_row_that_is_stored(name, tmp_path):
    assert without_numbers(tool.row_of(name, tmp_path, {})) == without_numbers(ROWS[name])


def test_a_released_model_that_is_another_one_is_a_no(llama):
    assert llama.adapter() == llama.merge() == "yes"
    other = llama.theirs.from_pretrained(llama.released)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 4] += 0.1
    other.save_pretrained(llama.released)
    with pytest.raises(tool.Fault, match="logits of PEFT on LlamaForCausalLM differ by"):
        llama.adapter()
    llama.ours = [logits + 0.01 for logits in llama.ours]
    with pytest.raises(tool.Fault, match="logits of LlamaForCausalLM differ by"):
        llama.merge()


def test_an_adapter_under_other_names_is_a_no(llama):
    from safetensors.torch import load_file, save_file

    llama.adapter()
    file = llama.home / "adapter/adapter_model.safetensors"
    renamed = {k.replace(".layers.", ".blocks."): v for k, v in load_file(file).items()}
    save_file(renamed, file)
    with pytest.raises(tool.Fault, match="names model.blocks.0.* which no released file has"):
        llama.served()
    llama.trainer.save_model = lambda folder: None
    with pytest.raises(tool.Fault, match="missing adapter keys"):
        llama.adapter()


def test_completions_of_another_policy_are_a_no(llama, monkeypatch):
    assert llama.drawn().startswith("directly")
    plain = tool.logits_of
    monkeypatch.setattr(tool, "logits_of", lambda *given: [1.01 * x for x in plain(*given)])
    with pytest.raises(tool.Fault, match="log-probs differ by"):
        llama.drawn()


def test_the_templates_have_the_tools_that_are_stored():
    assert tool.tools_of_templates() == RECORD["tools"]


def without_numbers(row):
    "A row whose sentences have no measured numbers."
    return {k: said and re.sub(r"\d[\d.e-]*", "#", said) for k, said in row.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_row_that_is_stored(name, tmp_path):
    assert without_numbers(tool.row_of(name, tmp_path, {})) == without_numbers(ROWS[name])
