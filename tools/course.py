"""Keep the course in order: badges, previous/next links and install cells of all notebooks.

    python tools/course.py           write them
    python tools/course.py --check   change nothing; exit 1 and say what is wrong

The order is the tables of index.ipynb: each row that opens with a link to a notebook is one stop of
the course. Inside each folder the numbers of the notebooks rise in that order.
To add a notebook, add a row `| [](nbs/PART/NN_topic.ipynb) | |` where it belongs and run this tool:
it fills in the title and the line under it. In every notebook it maintains the lines between
`<!-- course -->` and `<!-- /course -->` in the first cell, and the second cell, which fetches the
library where it is missing (first_cell.py, folded) with the addresses of settings.ini. A page
whose first cell says `<!-- needs no library -->` has no such cell. Cell ids and outputs stay as
they are.
"""

import argparse
import json
import os
import re
import sys
from configparser import ConfigParser
from pathlib import Path
from string import Template

ROW = re.compile(r"^\| *\[[^\]]*\]\(([^)\s]+\.ipynb)\) *\|.*$", re.M)
BLOCK = re.compile(r"\n*<!-- course -->.*?<!-- /course -->\n*", re.S)
FIRST_CELL = Path(__file__).with_name("first_cell.py")
ALONE = "<!-- needs no library -->"  # in the first cell of a page that imports nothing of ours
FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}  # in Colab, and in Jupyter


def load(path):
    "A notebook as plain JSON, every source one string."
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def dump(notebook):
    "The text of a notebook in the layout that nbdev_clean writes."
    cells = [
        {**cell, "source": cell["source"].splitlines(keepends=True)} for cell in notebook["cells"]
    ]
    return (
        json.dumps({**notebook, "cells": cells}, sort_keys=True, indent=1, ensure_ascii=False)
        + "\n"
    )


def heading(notebook):
    "(title, line) of a notebook that opens with `# title` and `> line`; ValueError if it does not."
    first = notebook["cells"][0] if notebook["cells"] else {"cell_type": None, "source": ""}
    found = (
        re.match(r"# (.+)\n\n> (.+)(\n|$)", first["source"])
        if first["cell_type"] == "markdown"
        else None
    )
    if not found:
        raise ValueError(
            "the first cell must be markdown and open with `# title`, an empty line and `> "
            "one line`"
        )
    return found[1].strip(), found[2].strip()


def course_order(index):
    "The notebooks of the course as index.ipynb lists them, paths from the root."
    return [
        path
        for cell in index["cells"]
        if cell["cell_type"] == "markdown"
        for path in ROW.findall(cell["source"])
    ]


def navigation(path, titles, settings):
    """The maintained lines of one notebook: its badge, and links to its neighbours. `titles`: path
    -> title, in course order, the index first."""

    def link(label, target):
        return (
            f"{label} [{titles[target]}]({os.path.relpath(target, os.path.dirname(path) or '.')})"
        )

    order = list(titles)
    at = order.index(path)
    links = [link("Previous:", order[at - 1])] if at > 1 else []
    links += [link("Course:", order[0])] if at > 0 else []
    if at == 0 and len(order) > 2:
        links = [f"{link('Begin with', order[2])}; if you know some RL, {link('with', order[1])}"]
    elif at + 1 < len(order):
        links.append(link("Next:", order[at + 1]))
    user, repo, branch = settings["user"], settings["repo"], settings["branch"]
    badge = (
        "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"(https://colab.research.google.com/github/{user}/{repo}/blob/{branch}/{path})"
    )
    return f"<!-- course -->\n\n{badge}\n\n{' · '.join(links)}\n\n<!-- /course -->"


def with_navigation(source, lines):
    "The first cell's source with `lines` right under its title and `> line`."
    title, quote, *rest = BLOCK.sub("\n\n", source).strip("\n").split("\n\n", 2)
    return "\n\n".join([title, quote, lines, *(part.strip("\n") for part in rest)])


def install_cell(settings):
    "The source of the cell that fetches the library, with the addresses of `settings`."
    return Template(FIRST_CELL.read_text(encoding="utf-8")).substitute(settings)


def with_install_cell(cells, source):
    """The cells with the install cell second, unless the page needs none; an older one is rewritten
    in place of being doubled."""

    def is_install(cell):
        return (
            cell["cell_type"] == "code"
            and "#| eval: false" in cell["source"]
            and "find_spec(" in cell["source"]
        )

    old = next((cell for cell in cells if is_install(cell)), None)
    new = old or {
        "cell_type": "code",
        "execution_count": None,
        "id": "colab-install",
        "outputs": [],
    }
    first, *rest = [cell for cell in cells if cell is not old]
    if ALONE in first["source"]:
        return [first, *rest]
    return [first, {**new, "metadata": FOLDED, "source": source.rstrip("\n")}, *rest]


def with_titles(source, headings):
    "A cell of the index with the row of each notebook filled from the notebook itself."

    def row(found):
        title, line = (text.replace("|", "\\|") for text in headings[found[1]])
        return f"| [{title}]({found[1]}) | {line} |"

    return ROW.sub(row, source)


def out_of_order(order):
    "A sentence for each notebook whose number is not above that of the one before in its folder."
    problems, last = [], {}  # folder -> the notebook of it that was listed last
    for path in order:
        folder, name = os.path.split(path)
        if number := re.match(r"\d+", name):
            before = last.get(folder)
            if before and int(number[0]) <= int(re.match(r"\d+", os.path.basename(before))[0]):
                problems.append(
                    f"index.ipynb lists {path} after {before}: numbers rise in the order of the "
                    "map, inside each folder"
                )
            last[folder] = path
    return problems


def plan(root):
    "(problems, path -> text that its file should have) for the checkout at `root`."
    settings = ConfigParser(delimiters=["="])
    settings.read(root / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    index = load(root / "index.ipynb")
    order = course_order(index)
    nbs = root / settings["nbs_path"]
    present = {
        str(p.relative_to(root))
        for p in nbs.rglob("*.ipynb")
        if not p.is_symlink()
        and not any(part.startswith((".", "_")) for part in p.relative_to(root).parts)
    }
    problems = [
        f"index.ipynb lists {path} more than once"
        for path in sorted({p for p in order if order.count(p) > 1})
    ]
    problems += [
        f"index.ipynb lists {path}, which does not exist" for path in order if path not in present
    ]
    problems += [f"{path} is not listed in index.ipynb" for path in sorted(present - set(order))]
    problems += out_of_order(order)

    notebooks, headings = {"index.ipynb": index}, {}
    notebooks |= {path: load(root / path) for path in dict.fromkeys(order) if path in present}
    for path, notebook in notebooks.items():
        try:
            headings[path] = heading(notebook)
        except ValueError as error:
            problems.append(f"{path}: {error}")
    if problems:
        return problems, {}

    titles = {path: title for path, (title, _) in headings.items()}
    wanted = {}
    for path, notebook in notebooks.items():
        cells = [dict(cell) for cell in notebook["cells"]]
        if path == "index.ipynb":
            for cell in cells:
                if cell["cell_type"] == "markdown":
                    cell["source"] = with_titles(cell["source"], headings)
        cells[0]["source"] = with_navigation(cells[0]["source"], navigation(path, titles, settings))
        wanted[path] = dump({**notebook, "cells": with_install_cell(cells, install_cell(settings))})
    return [], wanted


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if anything is out of order"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="the checkout (default: this one)",
    )
    args = parser.parse_args()
    problems, wanted = plan(args.root)
    stale = [
        path
        for path, text in wanted.items()
        if (args.root / path).read_text(encoding="utf-8") != text
    ]
    if args.check:
        problems += [
            (
                f"{path}: badge, links, install cell or table row out of date; run python "
                "tools/course.py"
            )
            for path in stale
        ]
    else:
        for path in stale:
            (args.root / path).write_text(wanted[path], encoding="utf-8")
            print("wrote", path)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
