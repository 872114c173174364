"The completions of a cycle: as rows, as lines of text, as a file, as a tracker's table."

import json

import numpy
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch

from grpo_nb.training.reporting import (
    check_column,
    first_of_each_prompt,
    plain,
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


class Refuses:
    "A value of a reward function's that has no text."

    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


ROUND = []
ROUND.append(ROUND)
UNEVEN = [
    ([1, "two", None, 3.5], ["1", "two", None, "3.5"]),
    ([1, 10**30, None, 2], ["1", str(10**30), None, "2"]),
    ([10**5000, 0, 0, 0], ["<int without a text (ValueError)>", "0", "0", "0"]),
    (["half \ud83d", "a", "b", "c"], ["half \\ud83d", "a", "b", "c"]),
    ([numpy.float32(0.5), torch.tensor(1.5), 2, None], [0.5, 1.5, 2.0, None]),
    (torch.tensor([1, 2, 3, 4]), [1, 2, 3, 4]),
    ([{}, {}, {}, {}], ["{}", "{}", "{}", "{}"]),  # no file has a column without fields
    ([{"a": 1}, {"a": "x"}, [1], None], ["{'a': 1}", "{'a': 'x'}", "[1]", None]),
    ([[1, 2], [], [3], None], [[1, 2], [], [3], None]),
    ([ROUND, 1, Refuses(), {(1, 2): 3}], ["[[...]]", "1", None, "{(1, 2): 3}"]),
    (
        [b"\xff", object, True, numpy.array(["a"])],
        ["b'\\xff'", "<class 'object'>", "True", "['a']"],
    ),
]


@pytest.mark.parametrize("given, read", UNEVEN)
def test_what_a_column_cannot_hold_becomes_text(given, read, tmp_path):
    rows = sample_rows(1, DATA, WRITTEN, ["right", "form"], SCORES, torch.zeros(4), {"note": given})
    there = pandas.read_parquet(write_samples(rows, tmp_path, 1))
    found = pyarrow.parquet.read_table(tmp_path / "completions_00001.parquet").to_pydict()["note"]
    if read[2] is None and isinstance(given, list) and isinstance(given[2], Refuses):
        assert "<Refuses without a text" in found[2]
        read = [*read[:2], found[2], read[3]]
    assert found == read and list(there.completion) == ["3", "4", "2", ""]
    table = tracker_table(rows)
    assert [row[table["columns"].index("note")] for row in table["data"]] == read
    assert len(samples_text(rows).splitlines()) == 4


def test_a_completion_with_half_a_character_is_stored(tmp_path):
    rows = sample_rows(1, DATA[:1], ["\ud83d!"], ["r"], torch.ones(1, 1), torch.zeros(1))
    assert pandas.read_parquet(write_samples(rows, tmp_path, 1)).completion[0] == "\\ud83d!"


@pytest.mark.parametrize("name", ["step", "prompt", "completion", "turns", "advantage", "right"])
def test_a_column_cannot_take_the_place_of_another(name):
    with pytest.raises(ValueError, match=f"log_extra\\('{name}', ...\\): .* 'my_{name}'"):
        check_column(name, [1, 2], 2, ["right"])
    for other in (3, "half \ud83d"):
        with pytest.raises(ValueError, match="a column has a name of its own, a text"):
            check_column(other, [1, 2], 2)
    check_column(f"my_{name}", [1, 2], 2, ["right"])


def test_plain_values_stay_what_they_are():
    for value in (1, 0.5, True, None, "text", [1, [2]], {"a": [None]}, 2**63 - 1):
        assert plain(value) == value and type(plain(value)) is type(value)
    assert plain(numpy.float64(0.5)) == 0.5 and type(plain(numpy.float64(0.5))) is float


def test_a_table_has_its_name_when_it_is_whole(samples, tmp_path, monkeypatch):
    def half(table, path):
        open(path, "w").write("PAR1")
        raise OSError(28, "No space left on device")

    before = write_samples(samples, tmp_path, 7).read_bytes()
    monkeypatch.setattr(pyarrow.parquet, "write_table", half)
    with pytest.raises(OSError, match="the disk is full"):
        write_samples(samples, tmp_path, 7)
    assert (tmp_path / "completions_00007.parquet").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
