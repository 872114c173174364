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


def rehearsed(page, tmp_path):
    "The exit status and the record of a page."
    record = tmp_path / "record.json"
    command = [sys.executable, ROOT / "tools/rehearse.py", page, "--record", record]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert record.exists(), done.stderr
    return done.returncode, json.loads(record.read_text())


@pytest.mark.parametrize("size, error", [(2, None), (13, "MemoryError")])
def test_the_limits_hold(tmp_path, size, error):
    cells = [LOOK, f"taken = bytearray({size} << 30)", "1"]
    page = tmp_path / "page.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), page
    )
    status, told = rehearsed(page, tmp_path)
    assert (told["error"] or "").startswith(error or "") and bool(told["error"]) == bool(error)
    assert status == bool(error) and told["ran"] == (2 if error else 3)


def test_a_tutorial_comes_to_its_last_cell(tmp_path):
    status, told = rehearsed(ROOT / "nbs/tutorials/11_qlora.ipynb", tmp_path)
    assert status == 0 and told["error"] is None and told["ran"] == told["cells"] > 15
    assert told["peak GiB"] < 12.7 and told["neither real nor imitated"]
