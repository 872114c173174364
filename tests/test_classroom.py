"tools/classroom.py: the student's page has no solution in it, the teacher's has all of them."

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
classroom = pytest.importorskip("classroom")
PAGE = "nbs/part/01_twice.ipynb"


def cell(kind, source, **others):
    return {"cell_type": kind, "id": "00000000", "metadata": {}, "source": source, **others}


def code(source, *printed):
    outputs = [{"output_type": "stream", "name": "stdout", "text": list(printed)}]
    return cell("code", source, execution_count=3, outputs=outputs)


CELLS = [
    cell(
        "markdown",
        "# twice\n\n> A page\n\n[there](../other/02_far.ipynb#part) [here](01_twice.ipynb)",
    ),
    code("def check_twice(twice):\n    return twice(4) == 8"),
    cell(
        "markdown",
        "### Exercise: Twice (5 minutes)\n\nDouble it.\n\n"
        "The check says `True`. [A solution](../solutions/twice.md) has a file of its own.",
    ),
    code("# your turn: twice x\ndef twice(x):\n    return x\n\n\ncheck_twice(twice)", "False"),
    cell(
        "markdown",
        "Half?\n\n<details><summary>Solution</summary>\n\nSECRET\n\n</details>\n\nGo on.",
    ),
    code(
        "def check_half(half):\n    return half(4) == 2\n\n\n"
        "assert check_half(lambda SECRET: SECRET / 2)"
    ),
    cell("markdown", "The end."),
    code("kept = 1"),
]
SOLUTIONS = """# twice

## Another

```python
no
```

## Twice

Add.

```python
def twice(x):
    return x + x
```
"""


@pytest.fixture
def built(tmp_path):
    "Both versions of a small page: lists of (kind, source, outputs)."
    root = tmp_path / "root"
    (root / "nbs/part").mkdir(parents=True), (root / "nbs/solutions").mkdir()
    (root / "settings.ini").write_text((ROOT / "settings.ini").read_text())
    notebook = {"cells": CELLS, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (root / PAGE).write_text(json.dumps(notebook))
    (root / "nbs/solutions/twice.md").write_text(SOLUTIONS)
    assert classroom.build(tmp_path / "out", [PAGE], root) == {PAGE: 1}
    assert classroom.usual_pages(root) == [classroom.ONE_PAGE, PAGE]

    def read(version):
        cells = json.loads((tmp_path / "out" / version / PAGE).read_text())["cells"]
        return [(c["cell_type"], "".join(c["source"]), c.get("outputs")) for c in cells]

    return read


def names_after(cells):
    names = {}
    printed = []
    for kind, source, _ in cells:
        if kind == "code":
            exec(source, names | {"print": printed.append} if "# Run this" in source else names)
    return names, printed


def test_the_student_gets_neither_solution_nor_output(built):
    cells = built("student")
    text = "\n".join(source for _, source, _ in cells)
    assert "SECRET" not in text and "x + x" not in text and "solutions" not in text
    assert not any(outputs for _, _, outputs in cells)
    assert "def check_half" in text and "Go on." in text and "kept = 1" in text
    assert "# your turn" in text and "return x" in text


def test_the_last_cell_prints_a_score(built, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = built("student")
    assert names_after(cells)[1] == ["0 of 1 exercises are right"]
    right = [(kind, source.replace("return x", "return 2 * x"), out) for kind, source, out in cells]
    assert names_after(right)[1] == ["1 of 1 exercises are right"]
    broken = [(kind, source.replace("(4) == 8", "(None / 4)"), out) for kind, source, out in cells]
    stubs = [cell for cell in broken if "# your turn" not in cell[1]]
    assert names_after(stubs)[1] == ["0 of 1 exercises are right"]


def test_the_teacher_gets_the_solution_in_the_place_of_the_stub(built):
    cells = built("solutions")
    stub = next(source for _, source, _ in cells if source.startswith("# a solution"))
    assert stub.endswith("check_twice(twice)") and "return x + x" in stub
    assert names_after(cells)[0]["twice"](4) == 8
    assert "SECRET" in "\n".join(source for _, source, _ in cells)


def test_links_to_pages_that_are_not_there_lead_to_the_repository(built):
    for version in ("student", "solutions"):
        title = built(version)[0][1]
        assert "[here](01_twice.ipynb)" in title
        assert "/blob/main/nbs/other/02_far.ipynb#part)" in title and "https://" in title


def test_an_exercise_without_a_solution_is_refused():
    with pytest.raises(ValueError, match="no code stands under '## Thrice'"):
        classroom.solution_of(SOLUTIONS, "Thrice")


def test_scores_of_notebooks_that_came_back(tmp_path):
    back, empty = tmp_path / "ada.ipynb", tmp_path / "bob.ipynb"
    back.write_text(json.dumps({"cells": [code("", "1 of 4 exercises are right\n")]}))
    empty.write_text(json.dumps({"cells": CELLS}))
    tool = [sys.executable, ROOT / "tools/classroom.py", "score", back, empty]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [f"{back}: 1 of 4 exercises are right", f"{empty}: its last cell was not run"]
