"""How large the library is, and what stands against its ceilings: `python tools/size.py`, or
`python tools/size.py --against COMMIT` for the difference to another commit.

A code line holds code: blank lines, comments, docstrings and nbdev's index are none.
"""

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOISE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NOISE |= {tokenize.ENCODING, tokenize.ENDMARKER}
SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
# what may only fall; an issue that asks for a feature says by how much one may rise
CEILINGS = {
    "code lines": 38_300,
    "functions over 60 lines": 8,
    "export cells over 60 lines": 32,  # Triton 140, tables and fields 100
    "notebooks": 130,
    "first cells over 13 lines": 0,
    "lines of the trainer's page": 500,
    "words in README": 1_200,
}


def docstrings(tree: ast.AST) -> set[int]:
    "The numbers of the lines that hold docstrings."
    found = set()
    for node in [tree, *ast.walk(tree)]:
        if (
            isinstance(node, (ast.Module, *SCOPES))
            and ast.get_docstring(node, clean=False) is not None
        ):
            found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def code_lines(
    text: str,  # of a module or a cell
    tree: ast.AST | None = None,  # its syntax tree, where it is at hand
) -> set[int]:  # the numbers of the lines that hold code
    "Blank lines, comments and docstrings are none."
    held = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOISE:
            held.update(range(token.start[0], token.end[0] + 1))
    return held - docstrings(tree or ast.parse(text))


def python_code(cell: dict) -> str:
    "The Python of a cell, without directives, magics and lines for the shell."
    lines = "".join(cell["source"]).splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith(("%", "!")))


def cells_of(
    notebook: Path,
) -> list[tuple[str, int]]:  # (code, its lines of code) of each code cell that can be parsed
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            text = python_code(cell)
            try:
                found.append((text, len(code_lines(text))))
            except (SyntaxError, tokenize.TokenError):
                found.append((text, 0))
    return found


def longest(
    text: str,  # of a cell
) -> int:  # lines
    "How long an export cell may be: a kernel of Triton 140, a table or fields alone 100, else 60."
    body = ast.parse(text).body
    if any(
        "jit" in ast.unparse(one) for node in body for one in getattr(node, "decorator_list", ())
    ):
        return 140
    fields = [
        part
        for node in body
        for part in (node.body if isinstance(node, ast.ClassDef) else [node])
        if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
    ]
    return 100 if all(isinstance(one, (ast.Assign, ast.AnnAssign)) for one in fields) else 60


def exported(text: str) -> bool:
    return any(line.startswith("#| export") for line in text.splitlines()[:3])


def measured(root: Path) -> dict[str, int]:
    "Every figure of a checkout, by name."
    rooms, figures = Counter(), Counter()
    for path in sorted((root / "grpo_nb").rglob("*.py")):
        if path.name == "_modidx.py":
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = code_lines(text, tree)
        parts = path.relative_to(root / "grpo_nb").parts
        rooms[parts[0] if len(parts) > 1 else "(top)"] += len(lines)
        for node in ast.walk(tree):
            if isinstance(node, SCOPES[:2]):
                figures["functions"] += 1
                figures["functions over 60 lines"] += node.end_lineno - node.lineno + 1 > 60
    notebooks = [p for p in root.glob("nbs/**/*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    pages = {}
    for path in notebooks:
        cells = cells_of(path)
        out = [(text, count) for text, count in cells if exported(text)]
        figures["export cells"] += len(out)
        figures["export cells over 60 lines"] += sum(n > 60 and n > longest(t) for t, n in out)
        pages[str(path.relative_to(root / "nbs"))] = sum(count for _, count in out)
        first = next((count for text, count in cells if "# @title The library" in text), 0)
        figures["first cells over 13 lines"] += first > 13
    figures["lines of the trainer's page"] = pages["training/19_trainer.ipynb"]
    figures["code lines"] = sum(rooms.values())
    figures["notebooks"] = len(notebooks)
    figures["words in README"] = len((root / "README.md").read_text(encoding="utf-8").split())
    return {
        **{f"  {name}": count for name, count in rooms.most_common()},
        **dict(sorted(figures.items())),
        **{
            f"exported by {name}": count
            for name, count in sorted(pages.items(), key=lambda one: -one[1])[:8]
        },
    }


def with_tests(root: Path) -> dict[str, int]:
    "Every figure, and the code lines of tests, which have no ceiling and take as long to count."
    texts = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")]
    return measured(root) | {"code lines of tests": sum(len(code_lines(text)) for text in texts)}


def at_commit(commit: str) -> dict[str, int]:
    "The figures of another commit of this repository."
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return with_tests(Path(folder))


def too_large(figures: dict[str, int]) -> list[str]:
    "A sentence for each figure above its ceiling."
    return [
        f"{name}: {figures[name]:,}, and the ceiling in tools/size.py is {most:,}"
        for name, most in CEILINGS.items()
        if figures[name] > most
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="print the difference to it too")
    asked = parser.parse_args()
    now = with_tests(ROOT)
    before = at_commit(asked.against) if asked.against else {}
    for name, count in now.items():
        change = f"{count - before.get(name, 0):+8,}" if before else ""
        ceiling = f"   at most {CEILINGS[name]:,}" if name in CEILINGS else ""
        print(f"{name:<48}{count:>8,}{change}{ceiling}")
    if complaints := too_large(now):
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
