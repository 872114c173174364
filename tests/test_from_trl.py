"docs/from_trl.md: every line of the column *here*, and every block, on a tiny model."

import ast
import collections
import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
import transformers
import trl

from grpo_nb.compat.trl import NOT_CALLED, NOT_HERE, GRPOTrainer
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.config import DIFFERENT_FROM_TRL, FROM_TRL, HELD

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/from_trl.md").read_text()
HAND_WRITTEN = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", PAGE, flags=re.S)
PARTS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", HAND_WRITTEN, re.M | re.S))
NOT_RUN = ("the same, with a network", "nothing")


def lines_of(part):
    "The Python of a part of the page, in its order: blocks, and the column *here* of its tables."
    for block, row in re.findall(r"^```python\n(.*?)^```$|^\| (`[^\n]+) \|$", part, re.M | re.S):
        theirs, ours = re.split(r" \| ?", row)[:2] if row else ("", "")
        if block:
            yield block
        elif ours not in NOT_RUN and not ours.startswith("`grpo-nb"):
            yield (theirs if ours == "the same" else ours).strip("`")


def folder_with_a_model(folder):
    model, tokenizer = tiny_gpt_oss(hidden_size=64, num_attention_heads=4, head_dim=16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    "What the lines of the page find: a model in a folder, and what a reader brings along."
    home, before = tmp_path_factory.mktemp("page"), os.getcwd()
    folder_with_a_model(home / "path/to/a/model")
    given = {}
    exec("from peft import LoraConfig\nfrom transformers import PrinterCallback", given)
    exec("from trl import TrlParser", given)
    given["length"] = lambda completions, **columns: [float(len(text)) for text in completions]
    given["draw"] = lambda prompts, trainer: {}
    os.chdir(home)
    yield given
    os.chdir(before)


@pytest.mark.parametrize(
    "part", ["A script", "Calls of TRL", "Subclasses and attributes", "Calls of Unsloth"]
)
def test_lines_of_the_page_run(names, part):
    lines = list(lines_of(PARTS[part]))
    assert lines
    for line in lines:
        try:
            exec(line, names)
        except Exception as error:
            raise AssertionError(f"{part}: {line!r} raised {error!r}") from error


def test_every_row_of_a_table_of_calls_is_run_or_says_why_not():
    rows = re.findall(r"^\| (`.+`) \| (.+?) \| .*\|$", HAND_WRITTEN, re.M)
    assert len(rows) > 25
    for theirs, ours in rows:
        assert ours == "the same" or ours in NOT_RUN or re.fullmatch(r"`[^`]+`", ours), theirs


def test_the_command_of_the_page_is_there():
    from grpo_nb import cli

    (line,) = re.findall(r"`(grpo-nb [^`]+)`", PARTS["Calls of TRL"])
    with pytest.raises(SystemExit) as ended:
        cli.main([line.split()[1], "--help"])
    assert ended.value.code == 0


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """The tool at work on a page with this text: call it with its options, get (exit status, the
    page)."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import from_trl

    page = tmp_path / "page.md"
    monkeypatch.setattr(from_trl, "PAGE", page)
    front = tmp_path / "index.ipynb"
    front.write_text(from_trl.FRONT.read_text())
    monkeypatch.setattr(from_trl, "FRONT", front)

    def call(text, *options):
        page.write_text(text)
        monkeypatch.setattr(sys, "argv", ["from_trl.py", *options])
        return from_trl.main(), page.read_text()

    return call


def test_the_tables_are_the_librarys(tool):
    assert tool(PAGE, "--check") == (0, PAGE), "run python tools/from_trl.py"
    for name in (*DIFFERENT_FROM_TRL, *HELD, *NOT_CALLED, *NOT_HERE):
        assert f"`{name}`" in PAGE, name


def test_no_method_of_trls_trainer_is_overridden_in_vain():
    theirs = {name for name, value in vars(trl.GRPOTrainer).items() if callable(value)}
    silent = {n for n in theirs if not n.startswith("__") and not hasattr(GRPOTrainer, n)}
    assert len(theirs) > 20 and silent <= NOT_CALLED.keys()


def test_a_table_that_is_out_of_date_is_found_and_renewed(tool):
    old = PAGE.replace("`sequence_mask`", "`token_mask`")
    assert tool(old, "--check") == (1, old) and tool(old) == (0, PAGE)
    with pytest.raises(SystemExit, match="0 places for the table 'hooks'"):
        tool(PAGE.replace("<!-- hooks -->", ""))


def test_what_is_refused_names_the_page(names):
    assert FROM_TRL.endswith("/docs/from_trl.md") and (ROOT / "docs/from_trl.md").exists()
    exec(PARTS["A script"].split("```python\n")[1].split("trainer = ")[0], names)
    config, model = names["GRPOConfig"], "path/to/a/model"
    given = model, names["correct"], names["args"], names["rows"]
    with pytest.raises(ValueError, match=f"fp16_full_eval=True .*{FROM_TRL}"):
        config(fp16_full_eval=True)
    with pytest.raises(TypeError, match=f"Mine defines compute_loss.*{FROM_TRL}"):
        type("Mine", (GRPOTrainer,), {"compute_loss": lambda self: None})
    with pytest.raises(AttributeError, match=f"has no 'predict'.*{FROM_TRL}"):
        GRPOTrainer(*given).predict(names["rows"])


def test_the_page_counts_the_settings_of_the_versions_that_it_names():
    kinds = trl.GRPOConfig, transformers.TrainingArguments
    theirs, base = ({field.name for field in dataclasses.fields(kind)} for kind in kinds)
    versions = [".".join(one.__version__.split(".")[:2]) for one in (trl, transformers)]
    said = f"TRL {versions[0]}, whose {len(theirs)} settings contain the {len(base)} of"
    if versions == ["1.16", "5.23"]:
        assert base <= theirs and f"{said} transformers {versions[1]}" in PAGE


@pytest.mark.parametrize("page", ["README.md", "index.ipynb"])
def test_the_front_page_links_to_it(page):
    assert "](docs/from_trl.md)" in (ROOT / page).read_text()


@pytest.mark.parametrize("page", ["README.md", "index.ipynb"])
def test_the_front_page_says_what_the_gate_found(page, tool):
    import from_trl

    record = json.loads(from_trl.GATE.read_text())
    assert from_trl.gate_sentence(record) in (ROOT / page).read_text()
    kinds = collections.Counter(kind for kind, _ in record["tests"].values())
    assert kinds == record["counts"] and "unexplained" not in kinds
    assert all(bool(reason) == (kind != "passed") for kind, reason in record["tests"].values())


def test_the_gate_names_what_differs_without_a_reason(tool):
    from trl_gate import REASONS, verdict

    kind, reason, (test, *_) = next(one for one in REASONS if one[0] == "private")
    named, fine, wrong = f"TestGRPOTrainer::{test}[x]", ("passed", ""), ("failed", "it differs")
    assert verdict(named, fine, fine) == ("passed", "")
    assert verdict(named, wrong, fine) == (kind, reason)
    assert verdict("T::test_other", wrong, fine) == ("unexplained", "it differs")
    assert verdict(named, wrong, wrong)[0] == "unexplained"
    assert verdict(named, fine, ("skipped", "needs a GPU")) == ("skipped", "needs a GPU")


def test_tests_that_are_run_again_replace_their_entries(tool):
    from trl_gate import counted_again

    before = {
        "date": "2026-01-01",
        "counts": {"passed": 1, "private": 1},
        "tests": {"T::a": ["passed", ""], "T::b": ["private", "why"]},
    }
    now = {"date": "2026-01-02", "tests": {"T::b": ("passed", "")}}
    after = counted_again(now, before)
    assert after["date"] == "2026-01-01" and after["again"] == {"T::b": "2026-01-02"}
    assert after["counts"] == {"passed": 2} and list(after["tests"]) == ["T::a", "T::b"]


WANTS = json.loads((ROOT / "tests/data/trl_wants.json").read_text())
PINNED = ("passed", "worded", "different", "refused")  # kinds with a want that is ours, too


def functions_of(path):
    "The names of a file's functions, read without running it."
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_what_trls_tests_want_is_held_by_tests_of_ours():
    record = json.loads((ROOT / "docs/trl_gate.json").read_text())["tests"]
    kinds = {}
    for name, (kind, _) in record.items():
        kinds.setdefault(name.split("[")[0], set()).add(kind)
    wanted = {name for name, of_it in kinds.items() if of_it & {*PINNED}}
    assert wanted <= WANTS.keys() <= kinds.keys(), "tests/data/trl_wants.json lacks or invents some"
    entries = [
        one for said in WANTS.values() for one in ([said] if isinstance(said, str) else said)
    ]
    nodes = [entry.split("::") for entry in entries if entry.startswith("tests/")]
    assert len(nodes) > 60 and all(len(entry.split()) > 5 for entry in entries if "::" not in entry)
    there = {path: functions_of(path) for path in {path for path, _ in nodes}}
    assert [f"{path}::{name}" for path, name in nodes if name not in there[path]] == []
