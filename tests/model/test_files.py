"""Files that are complete or not there, and a disk that is really full: one of two megabytes, where
this machine may mount it."""

import contextlib
import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from grpo_nb.model import files
from grpo_nb.model.export import new_folder
from grpo_nb.model.limits import DiskFull, has_room, naming_a_full_disk, write_json, write_text


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only the administrator may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_the_module_needs_nothing_heavy():
    code = "import sys, grpo_nb.model.limits; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


ENDS = {  # where a process ends
    "before the text": "files.os.fsync = lambda number: os._exit(9)",
    "before the rename": "files.os.replace = lambda *names: os._exit(9)",
}


@pytest.mark.parametrize("where", ENDS)
def test_the_earlier_file_stays_until_the_new_one_is_complete(where, tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"steps": 1})
    code = f"import os, sys; from grpo_nb.model import files; {ENDS[where]}; "
    code += "files.write_json(sys.argv[1], {'steps': 2})"
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == 9
    assert json.loads(path.read_text()) == {"steps": 1}
    write_json(path, {"steps": 3}, indent=None)
    assert path.read_text() == '{"steps": 3}\n' and os.listdir(tmp_path) == ["summary.json"]


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "text", "\ud800")
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(tmp_path / "json", {"a": object()})
    assert os.listdir(tmp_path) == []


def fill(folder):
    with contextlib.suppress(OSError), open(folder / "ballast", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


WRITERS = {
    "torch": lambda path: torch.save(torch.ones(2**20), path),
    "torch, a small file": lambda path: torch.save({"step": 1}, path),
    "safetensors": lambda path: save_file({"w": torch.ones(2**20)}, path),
    "text": lambda path: path.write_text("a" * 2**22),
    "the standard library": lambda path: write_text(path, "a" * 2**22),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_called_so_and_can_be_emptied(writer, small_disk):
    if "small" in writer:
        fill(small_disk)
    before = os.listdir(small_disk)
    with pytest.raises(DiskFull, match="^the disk is full: .* MiB left; make room there$"):
        with new_folder(small_disk / "model") as partial:
            WRITERS[writer](partial / "file")
    assert os.listdir(small_disk) == before  # no half of it, and its room is free again
    for name in before:
        (small_disk / name).unlink()
    with new_folder(small_disk / "model") as partial:
        torch.save({"step": 1}, partial / "file")
    assert torch.load(small_disk / "model" / "file") == {"step": 1}


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    cut = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598. ")
    for error in (cut, PermissionError(errno.EACCES, "no"), ValueError("unexpected pos")):
        with pytest.raises(type(error)) as caught, naming_a_full_disk(tmp_path):
            raise error
        assert caught.value is error
    with pytest.raises(KeyboardInterrupt), naming_a_full_disk(tmp_path):
        raise KeyboardInterrupt
    monkeypatch.setattr(files, "has_room", lambda folder: False)
    with pytest.raises(DiskFull) as caught, naming_a_full_disk(tmp_path / "not" / "there"):
        raise cut
    assert caught.value.errno == errno.ENOSPC and caught.value.__cause__ is cut


def test_the_error_that_another_came_from_counts(tmp_path):
    with pytest.raises(DiskFull), naming_a_full_disk(tmp_path):
        try:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        except OSError as error:
            raise ValueError("the tokenizer could not be saved") from error


def test_room(tmp_path, small_disk):
    assert has_room(tmp_path) and has_room(small_disk)
    assert not has_room(small_disk, 2**22) and os.listdir(small_disk) == []
