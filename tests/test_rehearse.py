"The rehearsal of a tutorial keeps its limits, and says which cell of a page failed."

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.colab
LOOK = """
import json, os, resource
from pathlib import Path
told = os.environ["HOME"], os.listdir(os.environ["HF_HOME"]), len(os.sched_getaffinity(0))
assert Path.home().parent == Path.cwd().parent and told[1:] == ([], min(2, os.cpu_count()))
"""
OUTSIDE = f"open({str(ROOT / 'written')!r}, 'w')"
FILL = """
try:
    with open("large", "wb") as file:
        for _ in range(24):
            file.write(bytes(64 << 20))
except OSError as error:
    assert error.errno == 28
else:
    raise ValueError("no limit")
"""
LOST = """
from pathlib import Path
DRIVE = False
if DRIVE:
    from google.colab import drive
    drive.mount(str(Path("drive").absolute()))
at = Path("drive/MyDrive")
print(f"going on from checkpoint-{len(list(at.iterdir()))}")
for i in range(4):
    (at / f"part-{i}").write_text("")
    open(at / f"{i}-manifest.json", "w").close()
"""


def rehearsed(page, tmp_path, *more):
    "The exit status and the record of a page."
    record = tmp_path / "record.json"
    command = [sys.executable, ROOT / "tools/rehearse.py", page, "--record", record, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert record.exists(), done.stderr
    (told,) = json.loads(record.read_text()).values()
    return done.returncode, told


def page_of(cells, tmp_path):
    page = tmp_path / "page.ipynb"
    code = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=code), page)
    return page


@pytest.mark.parametrize(
    "cell, error",
    [
        ("taken = bytearray(2 << 30)", None),
        ("taken = bytearray(13 << 30)", "MemoryError"),
        (OUTSIDE, "PermissionError"),
        (FILL, None),
    ],
    ids=["memory", "more memory", "outside", "disk"],
)
def test_the_limits_hold(tmp_path, cell, error):
    status, told = rehearsed(page_of([LOOK, cell, "1"], tmp_path), tmp_path)
    (row,), left = told["pages"], " ".join(told["neither real nor imitated"])
    if ("Landlock" in left and cell == OUTSIDE) or ("a disk" in left and cell == FILL):
        pytest.skip(left)
    assert (row["error"] or "").startswith(error or "") and bool(row["error"]) == bool(error)
    assert status == bool(error) and row["ran"] == (2 if error else 3)
    assert not (ROOT / "written").exists()


def test_a_lost_session_keeps_its_drive(tmp_path):
    status, told = rehearsed(page_of(["1", LOST, "1"], tmp_path), tmp_path, "--lost")
    (row,) = told["pages"]
    assert status == 0 and row["ran"] == 3 and row["lost after"] < 3
    assert row["went on"] == ["checkpoint-3"]  # files: the second list was not begun


def test_a_tutorial_comes_to_its_last_cell(tmp_path):
    status, told = rehearsed(ROOT / "nbs/tutorials/11_qlora.ipynb", tmp_path)
    (row,) = told["pages"]
    assert status == 0 and row["error"] is None and row["ran"] == row["cells"] > 15
    assert row["peak GiB"] < 12.7 and told["neither real nor imitated"]


def test_memory_and_disk_that_end_are_followed_by_the_next_cell(tmp_path):
    "Refused by the system, on a page."
    words = ["--forced", "drawing", "fills"]
    status, told = rehearsed(ROOT / "nbs/tutorials/11_qlora.ipynb", tmp_path, *words)
    drawing, filled = told["pages"].values()
    assert status == 0 and drawing["ended well"] and "shorter completions" in drawing["said"]
    assert "disk is full" in filled["error"] and "delete" in filled["said"]
