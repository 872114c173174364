"start.py: which torch it fetches, what it installs, what it runs, without fetching anything."

import runpy
import sys
from pathlib import Path

import pytest

START = Path(__file__).resolve().parent.parent / "start.py"


@pytest.fixture
def start(monkeypatch, tmp_path):
    "Its names, as of a machine that has nothing yet; `ran` holds the commands."
    names = runpy.run_path(str(START))["main"].__globals__
    monkeypatch.setitem(names, "HERE", tmp_path)
    monkeypatch.setitem(names, "PROGRAMS", tmp_path / ".venv/bin")
    monkeypatch.setattr("venv.create", lambda path, with_pip: (path / "bin").mkdir(parents=True))
    names["ran"] = []

    def call(words, **options):
        if words[1:2] == ["-I"]:
            return 1  # not installed
        names["ran"].append([Path(words[0]).name, *words[1:]])
        return 0

    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.setattr(sys, "platform", "linux")
    return names


@pytest.mark.parametrize(
    "platform, card, reached, index, said",
    [
        ("linux", None, True, True, "for the CPU"),
        ("linux", None, False, False, "does not answer"),
        ("linux", "/usr/bin/nvidia-smi", True, False, "with CUDA, for the NVIDIA card"),
        ("darwin", None, True, False, "no CUDA"),
    ],
)
def test_torch_is_that_of_the_machine(
    start, monkeypatch, capsys, platform, card, reached, index, said
):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("shutil.which", lambda name: card)
    monkeypatch.setitem(start, "answers", lambda url: reached)
    start["main"]([])
    torch, library, demo = start["ran"]
    assert torch[:6] == ["python", "-m", "pip", "install", "-q", "torch"]
    assert torch[6:] == ["--index-url", start["CPU"]] * index and said in capsys.readouterr().out
    assert library[-2:] == ["-e", "."] and demo == ["grpo-nb", "demo"]


def test_the_tests_need_more_and_get_their_words(start, monkeypatch):
    monkeypatch.setitem(start, "answers", lambda url: True)
    start["main"](["tests", "-k", "losses"])
    assert start["ran"][1][-1] == ".[dev]"
    assert start["ran"][2] == ["pytest", "-n", "2", "-k", "losses"]


def test_a_step_that_fails_ends_it_and_other_pythons_are_refused(start, monkeypatch):
    monkeypatch.setitem(start, "answers", lambda url: False)
    monkeypatch.setattr("subprocess.call", lambda words, **options: 3)
    with pytest.raises(SystemExit) as left:
        start["main"]([])
    assert left.value.code == 3
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match="3.11 to 3.13 is needed"):
        start["main"]([])


def test_an_address_that_does_not_answer_is_no_error(start):
    assert not start["answers"]("http://127.0.0.1:9")
