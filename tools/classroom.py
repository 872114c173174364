"""Student and solution notebooks from the lessons, and the scores of notebooks that came back.

    python tools/classroom.py build DIR [PAGE ...]
        DIR/student: no outputs, no solutions, a last cell that prints a score
        DIR/solutions: outputs kept, each stub filled with its solution
        (no PAGE: every lesson with a file in nbs/solutions, and GRPO on one page)
    python tools/classroom.py score NOTEBOOK ...
        a line for each notebook: what its last cell printed when it was run

An exercise is a cell that opens with `# your turn` and ends with a call of its check. The cells
above it name the exercise (`### Exercise: TITLE (10 minutes)`) and link its file of solutions,
in which the first code under `## TITLE` is the solution. A folded `<details>` with solutions is
taken out of the student's page, and so is the code that follows it, but for the check itself.
"""

import argparse
import ast
import json
import re
import sys
from configparser import ConfigParser
from os.path import normpath
from pathlib import Path

from course import dump, load

ROOT = Path(__file__).resolve().parent.parent
ONE_PAGE = "nbs/lessons/00_grpo_on_one_page.ipynb"
STUB = "# your turn"
EXERCISE = re.compile(r"^### Exercise: (.+?) \(\d+ minutes\)$", re.M)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")  # to a file beside the page
SOLUTION_LINK = re.compile(r"\s*\[[^\]]*\]\((\.\./solutions/[^)]+)\) has a file of its own\.")
FOLDED = re.compile(r"<details><summary>(?:A )?[Ss]olutions?</summary>.*?</details>\n*", re.S)
SCORE = """# Run this cell last: your score
import matplotlib.pyplot as plt


def is_right(check):
    "Whether a check says yes; an error is a no."
    try:
        return bool(check())
    except Exception:
        return False


checks = [
    {checks},
]
right = [is_right(check) for check in checks]
plt.close("all")
print(f"{{sum(right)}} of {{len(right)}} exercises are right")"""


def is_stub(cell):
    "Whether a cell is where a student writes."
    return cell["cell_type"] == "code" and cell["source"].startswith(STUB)


def call_of(stub):
    "The call of the check, with which a stub ends."
    last = ast.parse(stub).body[-1]
    return ast.get_source_segment(stub, last)


def checks_alone(source):
    "The functions `check_...` of a cell, without what calls them."
    found = [node for node in ast.parse(source).body if getattr(node, "name", "")[:6] == "check_"]
    return "\n\n\n".join(ast.get_source_segment(source, node) for node in found)


def without_open_solutions(cells):
    "The cells without folded solutions, and without the code that runs them."
    kept, after = [], False
    for cell in cells:
        source = cell["source"]
        if cell["cell_type"] == "markdown":
            after = bool(FOLDED.search(source))
            source = SOLUTION_LINK.sub("", FOLDED.sub("", source))
        elif after and not is_stub(cell):
            source = checks_alone(source)
        if source.strip():
            kept.append({**cell, "source": source})
    return kept


def score_cell(stubs):
    "The cell that repeats every check and counts."
    checks = ",\n    ".join(f"lambda: {call_of(stub['source'])}" for stub in stubs)
    source = SCORE.format(checks=checks)
    return dict(cell_type="code", execution_count=None, id="score", metadata={}, outputs=[]) | {
        "source": source
    }


def student(cells):
    "The cells that a student gets."
    cells = without_open_solutions(cells)
    empty = {"outputs": [], "execution_count": None}
    cells = [cell | empty if cell["cell_type"] == "code" else cell for cell in cells]
    stubs = [cell for cell in cells if is_stub(cell)]
    return [*cells, score_cell(stubs)] if stubs else cells


def solution_of(text, title):
    "The first code under `## TITLE` of a file of solutions; ValueError if there is none."
    for section in text.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        if name.strip() == title and (code := re.search(r"```python\n(.+?)\n```", rest, re.S)):
            return code[1]
    raise ValueError(f"no code stands under '## {title}' in the file of solutions")


def filled(cells, folder):
    "The cells with each stub replaced by its solution; `folder` is that of the page."
    done, title, file = [], None, None
    for cell in cells:
        source = cell["source"]
        if cell["cell_type"] == "markdown" and (found := EXERCISE.search(source)):
            title, file = found[1], SOLUTION_LINK.search(source)[1]
        if is_stub(cell):
            code = solution_of((folder / file).read_text(encoding="utf-8"), title)
            call = call_of(source)
            source = f"# a solution\n{code}" + f"\n\n\n{call}" * (call not in code)
            cell = cell | {"source": source, "outputs": [], "execution_count": None}
        done.append(cell)
    return done


def with_addresses(cells, page, pages, address):
    "Links to pages that are not in the folder lead to the repository."

    def absolute(found):
        path, hash_, part = found[1].partition("#")
        target = normpath(Path(page).parent / path)
        return found[0] if target in pages else f"]({address}/{target}{hash_}{part})"

    return [
        {**cell, "source": LINK.sub(absolute, cell["source"])}
        if cell["cell_type"] == "markdown"
        else cell
        for cell in cells
    ]


def build(folder, pages, root=ROOT):
    "Write both versions of the pages; the number of exercises of each page."
    settings = ConfigParser(delimiters=["="])
    settings.read(root / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    address, counts = f"{settings['git_url']}/blob/{settings['branch']}", {}
    for page in pages:
        notebook = load(root / page)
        cells = notebook["cells"]
        made = {"student": student(cells), "solutions": filled(cells, (root / page).parent)}
        for version, cells in made.items():
            path = folder / version / page
            path.parent.mkdir(parents=True, exist_ok=True)
            cells = with_addresses(cells, page, pages, address)
            path.write_text(dump({**notebook, "cells": cells}), encoding="utf-8")
        counts[page] = sum(map(is_stub, notebook["cells"]))
    return counts


def usual_pages(root=ROOT):
    "GRPO on one page, and every page that links a file of solutions."
    linked = [
        path.relative_to(root).as_posix()
        for path in sorted((root / "nbs").rglob("*.ipynb"))
        if not path.is_symlink() and SOLUTION_LINK.search(path.read_text(encoding="utf-8"))
    ]
    return [ONE_PAGE, *linked]


def score(path):
    "What the last cell of a notebook printed; a sentence if it was not run."
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    printed = "".join("".join(out.get("text", "")) for out in outputs)
    found = re.findall(r"\d+ of \d+ exercises are right", printed)
    return found[-1] if found else "its last cell was not run"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["build", "score"])
    parser.add_argument("paths", nargs="+", help="build: DIR [PAGE ...]; score: NOTEBOOK ...")
    args = parser.parse_args()
    if args.do == "score":
        for path in args.paths:
            print(f"{path}: {score(path)}")
        return 0
    folder, *pages = args.paths
    for page, count in build(Path(folder), pages or usual_pages()).items():
        print(f"{page}: {count} exercises")
    return 0


if __name__ == "__main__":
    sys.exit(main())
