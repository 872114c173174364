"The completions of a cycle: as rows, as lines of text, as a file, as a tracker's table."

import json

import pandas
import pyarrow.parquet
import pytest
import torch

from grpo_nb.training.samples import (
    first_of_each_prompt,
    plain_text,
    sample_rows,
    samples_text,
    shortened,
    tracker_table,
    write_samples,
)

ASKED = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
DATA = [{"prompt": "1+2="}, {"prompt": "1+2="}, {"prompt": ASKED}, {"prompt": ASKED}]
WRITTEN = ["3", "4", [{"role": "assistant", "content": "2"}], [{"role": "assistant"}]]
SCORES = torch.tensor([[1.0, 0.5], [0.0, float("nan")], [1.0, 0.25], [0.0, 0.0]])


@pytest.fixture
def samples():
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    extra = {"length": [1, 1, 1, 0], "note": ["a", "b", "c", "d"]}
    return sample_rows(7, DATA, WRITTEN, ["right", "form"], SCORES, advantages, extra)


def test_a_row_is_what_was_written_and_what_it_earned(samples):
    assert samples[0] == {
        "step": 7,
        "prompt": "1+2=",
        "completion": "3",
        "advantage": 1.0,
        "rewards": {"right": 1.0, "form": 0.5},
        "extra": {"length": 1, "note": "a"},
        "turns": None,
    }
    assert samples[1]["rewards"] == {"right": 0.0, "form": None}
    assert samples[2]["prompt"] == "system: Add.\nuser: 1+1=" and samples[2]["completion"] == "2"
    assert samples[3]["completion"] == ""


def test_messages_as_text():
    assert plain_text("as it is") == "as it is"
    assert plain_text([{"role": "user", "content": "hi"}]) == "user: hi"
    assert plain_text([{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize("width", [20, 40, 41])
def test_a_long_text_is_cut_in_its_middle(width):
    text = "begin" + "x" * 100 + "end"
    cut = shortened(text, width)
    assert len(cut) in (width, width - 1) and cut.startswith("begin") and cut.endswith("end")
    assert shortened("a\nb", width) == "a\\nb"


def test_one_line_a_completion(samples):
    lines = samples_text(samples).splitlines()
    assert len(lines) == 4
    assert lines[0] == "[7] +1.00  right 1  form 0.5  length 1  | 1+2= -> 3"
    assert lines[1] == "[7] -1.00  right 0  form -  length 1  | 1+2= -> 4"
    assert samples_text(samples, count=1) == lines[0]
    assert samples_text(samples, unique=True).splitlines() == [lines[0], lines[2]]


def test_the_first_completion_of_each_prompt(samples):
    assert first_of_each_prompt(samples) == [samples[0], samples[2]]


def test_a_file_holds_the_table(samples, tmp_path):
    path = write_samples(samples, tmp_path / "new", 7)
    assert path == tmp_path / "new" / "completions_00007.parquet"
    table = pandas.read_parquet(path)
    assert list(table) == [
        "step", "prompt", "completion", "right", "form", "length", "note", "advantage",
    ]  # fmt: skip
    assert table.right.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert table.form.isna().tolist() == [False, True, False, False]
    assert table.note.tolist() == ["a", "b", "c", "d"]


def test_a_trackers_table(samples):
    table = tracker_table(samples, unique=True)
    assert len(table["data"]) == 2 and all(len(r) == len(table["columns"]) for r in table["data"])
    assert dict(zip(table["columns"], table["data"][0]))["completion"] == "3"


def test_a_file_tells_who_said_what(tmp_path):
    call = {"function": {"name": "times", "arguments": {"a": 6}}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    rows = sample_rows(
        1, [{"prompt": "6*7="}] * 2, [said, "42"], ["r"], torch.ones(2, 1), torch.zeros(2)
    )
    table = pyarrow.parquet.read_table(write_samples(rows, tmp_path, 1)).to_pydict()
    turns = [["assistant", 'times({"a": 6})'], ["tool", "42"], ["assistant", "42"]]
    assert json.loads(table["turns"][0]) == turns and table["turns"][1] is None
    write_samples(rows[1:], tmp_path, 2)
    assert "turns" not in pandas.read_parquet(tmp_path / "completions_00002.parquet")
