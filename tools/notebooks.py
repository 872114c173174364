"""Run notebooks and store their outputs, or turn them into plain text and back.

    python tools/notebooks.py run nbs/algorithm/03_batching.ipynb ...
        execute, store outputs, clean
        (--flags cuda slow: the cells marked so as well, which are left alone otherwise)
    python tools/notebooks.py text nbs/algorithm/03_batching.ipynb
        print it as text, for an editor
    python tools/notebooks.py build lesson.txt nbs/algorithm/03_batching.ipynb
        make the notebook from that text
    python tools/notebooks.py shorten nbs/algorithm/03_batching.ipynb ...
        take temporary folders out of the stored outputs, as `run` does

In the text form a line `%%md` opens a markdown cell and a line `%%code` a code cell. Cell ids
survive a round trip.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import nbformat
from nbclient import NotebookClient

# a folder of `tempfile`, which has another name in every run, on Linux and macOS
TEMPORARY = re.compile(r"(?:/private)?/(?:tmp|var/folders/\w+/\w+/T)/tmp[a-z0-9_]{8}\b")
MARKS = {"%%md": "markdown", "%%code": "code"}


def to_text(notebook):
    "The cells of a notebook, one after the other, each under its mark."
    mark = {kind: m for m, kind in MARKS.items()}
    return "\n".join(f"{mark[c.cell_type]}\n{c.source}\n" for c in notebook.cells)


def parse(text):
    "(kind, source) of each cell in a text."
    parts = re.split(r"^(%%md|%%code)[ \t]*$", text, flags=re.M)[1:]
    return [(MARKS[m], body.strip("\n")) for m, body in zip(parts[::2], parts[1::2])]


def build(text, old=None):
    "A notebook from text; cells that `old` has too keep their ids and outputs."
    cells = []
    for kind, source in parse(text):
        make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
        cells.append(
            make(source, id=hashlib.sha1(f"{len(cells)}{source}".encode()).hexdigest()[:8])
        )
    if old is not None:
        a, b = (
            [(c.cell_type, c.source) for c in old.cells],
            [(c.cell_type, c.source) for c in cells],
        )
        for tag, i0, i1, j0, j1 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if tag == "equal" or (tag == "replace" and i1 - i0 == j1 - j0):
                for i, j in zip(range(i0, i1), range(j0, j1)):
                    if old.cells[i].cell_type == cells[j].cell_type:
                        cells[j].id = old.cells[i].id
                        if tag == "equal" and cells[j].cell_type == "code":
                            cells[j].outputs = old.cells[i].outputs
    metadata = dict(old.metadata) if old is not None else {}
    metadata.setdefault(
        "kernelspec", {"display_name": "python3", "language": "python", "name": "python3"}
    )
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def skipped(cell, flags):
    """Whether a cell is left alone: marked `#| eval: false`, or with one of the flags (cells that
    need a GPU, a long time, ...)."""
    marks = (
        re.findall(r"^#\|[ \t]*(.+?)[ \t]*$", cell.source, re.M) if cell.cell_type == "code" else []
    )
    return any(re.fullmatch(r"eval: *false", mark) or mark.split()[0] in flags for mark in marks)


def without_temporary_paths(value):
    "An output, or a part of one, with `...` in place of temporary folders."
    if isinstance(value, str):
        return TEMPORARY.sub("...", value)
    if isinstance(value, list):
        return [without_temporary_paths(part) for part in value]
    if isinstance(value, dict):
        return type(value)((key, without_temporary_paths(part)) for key, part in value.items())
    return value


def shorten(notebook):
    "Take temporary folders out of all stored outputs."
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                nbformat.from_dict(without_temporary_paths(output)) for output in cell.outputs
            ]


def stays_without_kernel(output):
    "Whether an output is to be stored. A widget goes, but for the page that it brings along."
    data = output.get("data", {})
    return data.pop("application/vnd.jupyter.widget-view+json", None) is None or "text/html" in data


# what a kernel is told: each figure twice, as points and as lines, with letters as letters
FIGURES = [
    "--InlineBackend.figure_formats={'png','svg'}",
    "--InlineBackend.rc={'svg.fonttype':'none','svg.hashsalt':'','font.family':'sans-serif'}",
]


def shorter(drawing):
    "A drawing of matplotlib without its date, lists of fonts, and decimals that nobody can see."
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.S)
    drawing = re.sub(r"'[^';\"]+', (?=[^;\"]*sans-serif)", "", drawing)
    drawing = re.sub(r"(?:\b(?:Geneva|Lucid|Arial|Avant Garde), )+(?=sans-serif)", "", drawing)
    drawing = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), drawing)
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", drawing))


def with_lines(output):
    """A figure that is there as points and as lines: the lines stay beside the points if they take
    less room. JupyterLab shows points until a page is trusted, and the site lines."""
    data = output.get("data", {})
    if {"image/png", "image/svg+xml"} <= data.keys():
        data["image/svg+xml"] = shorter(data["image/svg+xml"])
        if len(data["image/svg+xml"]) > len(data["image/png"]):
            del data["image/svg+xml"]
    return output


def run(path, flags=("notest", "slow", "cuda"), timeout=1200):
    """Execute a notebook where it stands and store its outputs, without widget state and without
    execution counts; skipped cells keep what they have."""
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if skipped(cell, flags):
            cell.metadata["tags"] = ["skip-execution"]
    NotebookClient(
        notebook,
        timeout=timeout,
        resources={"metadata": {"path": Path(path).resolve().parent}},
        store_widget_state=False,
        extra_arguments=FIGURES,
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("tags", None)  # nbdev_clean keeps what settings.ini allows
        if cell.cell_type == "code":
            cell.outputs = [with_lines(o) for o in cell.outputs if stays_without_kernel(o)]
    notebook.metadata.pop("widgets", None)
    shorten(notebook)
    nbformat.write(notebook, path)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "from nbdev.clean import nbdev_clean; import sys; nbdev_clean(fname=sys.argv[1])",
            str(path),
        ],
        check=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    execute = commands.add_parser("run")
    execute.add_argument("notebooks", nargs="+", type=Path)
    execute.add_argument(
        "--flags", nargs="*", default=[], metavar="FLAG", help="run the cells with these flags too"
    )
    commands.add_parser("text").add_argument("notebook", type=Path)
    commands.add_parser("shorten").add_argument("notebooks", nargs="+", type=Path)
    make = commands.add_parser("build")
    make.add_argument("text", type=Path)
    make.add_argument("notebook", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore::FutureWarning"
    )  # notices of other libraries, with paths of this machine, are no outputs to store
    if args.command == "run":
        for path in args.notebooks:
            print(path, flush=True)
            run(path, {"notest", "slow", "cuda"} - set(args.flags))
    elif args.command == "shorten":
        for path in args.notebooks:
            notebook = nbformat.read(path, 4)
            shorten(notebook)
            nbformat.write(notebook, path)
    elif args.command == "text":
        print(to_text(nbformat.read(args.notebook, 4)))
    else:
        old = nbformat.read(args.notebook, 4) if args.notebook.exists() else None
        args.notebook.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(build(args.text.read_text(), old), args.notebook)


if __name__ == "__main__":
    main()
