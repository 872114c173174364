"""Keep the course in order: badges, previous/next links and install cells of all notebooks.

    python tools/course.py           write them
    python tools/course.py --check   change nothing; exit 1 and say what is wrong

The map is the tables of index.ipynb, which are the course, and those of nbs/inside.md, the index
of the rest: each row that opens with a link to a notebook is one stop. Inside each folder the
numbers of the notebooks rise in every section but the two paths, which follow their subject. To
add a notebook, add a row `| [](nbs/PART/NN_topic.ipynb) | |` (in nbs/inside.md without `nbs/`)
where it belongs and run this tool: it fills in the title and the line under it. A title opens with
a capital letter, is no file's name and stands on one page only. In every notebook it maintains the
lines between `<!-- course -->` and `<!-- /course -->` in the first cell, and the second cell,
which fetches the library where it is missing (first_cell.py, folded) with the addresses of
settings.ini. A page whose first cell says `<!-- needs no library -->` has no such cell. Cells that
open with `# @title` or have `#| fold` are folded in Colab and Jupyter. Cell ids and outputs stay
as they are.
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
SECTION = re.compile(r"^## ([^\n]+)|^\*\*([^*\n]+)\*\*|<summary><b>([^<\n]+)</b>", re.M)
PATHS = "The afternoon", "Build it"  # sections in the order of their subject
INSIDE = "nbs/inside.md"  # the index of the rest
BLOCK = re.compile(r"\n*<!-- course -->.*?<!-- /course -->\n*", re.S)
FIRST_CELL = Path(__file__).with_name("first_cell.py")
ALONE = "<!-- needs no library -->"  # in the first cell of a page that imports nothing of ours
FOLD = re.compile(r"^(# @title|#\| fold)", re.M)  # among the first lines of a cell
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


def sections(root):
    "[(index, caption, the paths of its notebooks)]: the map in its order, paths from the root."
    texts = [
        ("index.ipynb", cell["source"])
        for cell in load(root / "index.ipynb")["cells"]
        if cell["cell_type"] == "markdown"
    ]
    if (root / INSIDE).exists():
        texts.append((INSIDE, (root / INSIDE).read_text(encoding="utf-8")))
    found = []
    for index, text in texts:
        captions = [(m.start(), m[1] or m[2] or m[3]) for m in SECTION.finditer(text)]
        for row in ROW.finditer(text):
            caption = [name for at, name in captions if at < row.start()][-1:] or ["Lessons"]
            if not found or found[-1][:2] != (index, *caption):
                found.append((index, *caption, []))
            found[-1][2].append(from_root(row[1], index))
    return found


def from_root(target, index):
    "A path in a row of an index, from the root."
    return os.path.normpath(os.path.join(os.path.dirname(index), target))


def course_order(root):
    "All notebooks in the order of the map."
    return [path for _, _, paths in sections(root) for path in paths]


def navigation(path, titles, settings, home="index.ipynb"):
    """The maintained lines of one notebook: its badge, and links to its neighbours. `titles`: path
    -> title, in the order of the index `home`, that index first."""

    def link(label, target):
        return (
            f"{label} [{titles[target]}]({os.path.relpath(target, os.path.dirname(path) or '.')})"
        )

    order = list(titles)
    at = order.index(path)
    links = [link("Previous:", order[at - 1])] if at > 1 else []
    links += [link("Course:" if home == "index.ipynb" else "Index:", order[0])] if at > 0 else []
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


def folded(cell):
    "The cell with the metadata that fold it, where it asks for that."
    top = "\n".join(cell["source"].split("\n")[:3])
    asks = cell["cell_type"] == "code" and FOLD.search(top)
    return {**cell, "metadata": {**cell["metadata"], **FOLDED}} if asks else cell


def with_titles(source, headings, index="index.ipynb"):
    "The text of an index with the row of each notebook filled from the notebook itself."

    def row(found):
        title, line = (text.replace("|", "\\|") for text in headings[from_root(found[1], index)])
        return f"| [{title}]({found[1]}) | {line} |"

    return ROW.sub(row, source)


def out_of_order(parts):
    """A sentence for each notebook whose number is not above that of the one before in its folder,
    section by section."""
    problems = []
    for _, caption, paths in parts:
        last = {}  # folder -> the notebook of it that was listed last
        for path in paths if caption not in PATHS else ():
            folder, name = os.path.split(path)
            if number := re.match(r"\d+", name):
                before = last.get(folder)
                if before and int(number[0]) <= int(re.match(r"\d+", os.path.basename(before))[0]):
                    problems.append(
                        f"the map lists {path} after {before}: numbers rise in the order of the "
                        "map, inside each folder and section"
                    )
                last[folder] = path
    return problems


def faulty_titles(titles):
    "A sentence for each title that is none: in lower case, the name of a file, or on two pages."
    for path, title in titles.items():
        if path != "index.ipynb" and (title[0].islower() and "gpt-oss" not in title[:7]):
            yield f"{path}: the title {title!r} opens with a small letter"
        if path != "index.ipynb" and "_" in title:
            yield f"{path}: the title {title!r} is a name, and no title"
    for title in {t for t in titles.values() if list(titles.values()).count(t) > 1}:
        yield f"{' and '.join(p for p in titles if titles[p] == title)} have one title, {title!r}"


def plan(root):
    "(problems, path -> text that its file should have) for the checkout at `root`."
    settings = ConfigParser(delimiters=["="])
    settings.read(root / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    index = load(root / "index.ipynb")
    parts = sections(root)
    order = [path for _, _, paths in parts for path in paths]
    nbs = root / settings["nbs_path"]
    present = {
        str(p.relative_to(root))
        for p in nbs.rglob("*.ipynb")
        if not p.is_symlink()
        and not any(part.startswith((".", "_")) for part in p.relative_to(root).parts)
    }
    problems = [
        f"the map lists {path} more than once"
        for path in sorted({p for p in order if order.count(p) > 1})
    ]
    problems += [
        f"the map lists {path}, which does not exist" for path in order if path not in present
    ]
    problems += [
        f"{path} is not listed in index.ipynb or {INSIDE}" for path in sorted(present - set(order))
    ]
    problems += out_of_order(parts)

    notebooks, headings = {"index.ipynb": index}, {}
    notebooks |= {path: load(root / path) for path in dict.fromkeys(order) if path in present}
    for path, notebook in notebooks.items():
        try:
            headings[path] = heading(notebook)
        except ValueError as error:
            problems.append(f"{path}: {error}")
    problems += faulty_titles({path: title for path, (title, _) in headings.items()})
    if problems:
        return problems, {}

    wanted = {}
    inside = {path for index, _, paths in parts if index == INSIDE for path in paths}
    lists = {  # index -> its title, and those of its pages
        "index.ipynb": {p: t for p, (t, _) in headings.items() if p not in inside},
        INSIDE: {INSIDE: "Inside the library"} | {p: headings[p][0] for p in order if p in inside},
    }
    for path, notebook in notebooks.items():
        cells = [dict(cell) for cell in notebook["cells"]]
        if path == "index.ipynb":
            for cell in cells:
                if cell["cell_type"] == "markdown":
                    cell["source"] = with_titles(cell["source"], headings)
        home = INSIDE if path in inside else "index.ipynb"
        lines = navigation(path, lists[home], settings, home)
        cells[0]["source"] = with_navigation(cells[0]["source"], lines)
        cells = with_install_cell([folded(cell) for cell in cells], install_cell(settings))
        wanted[path] = dump({**notebook, "cells": cells})
    if inside:
        text = (root / INSIDE).read_text(encoding="utf-8")
        wanted[INSIDE] = with_titles(text, headings, INSIDE)
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
