"""Make README.md from index.ipynb.

    python tools/readme.py           write README.md, and the pictures of index.ipynb into
                                     docs/images/
    python tools/readme.py --check   change nothing; exit 1 when README.md or a picture is out of
                                     date

Cells above the one with `<!-- README ends here -->` make it. Markdown cells are copied. Code cells
are shown with their stored outputs: text as it stands,
pictures as PNG files.
Cells with `#| hide` are left out; `#| echo: false` shows the outputs alone; `#| fig-alt: words`
describes a picture.
"""

import argparse
import base64
import json
import re
import sys
from pathlib import Path

NOTE = "<!-- Made from index.ipynb by tools/readme.py: change it there. -->"
IMAGES = "docs/images"
END = "<!-- README ends here -->"  # the index goes on: it is the complete map


def directives(source):
    """({name: value} of the leading `#| name: value` lines, the source below them). A value `>-`
    stands for the indented lines below it, joined by spaces, as in YAML."""
    lines = source.split("\n")
    count = next((i for i, line in enumerate(lines) if not line.startswith("#|")), len(lines))
    options, folded = {}, None
    for line in lines[:count]:
        if folded and line.startswith("#|  "):
            options[folded] = f"{options[folded]} {line[2:].strip()}".strip()
            continue
        name, _, value = (part.strip() for part in line[2:].strip().partition(":"))
        folded = name if value == ">-" else None
        options[name] = "" if folded else value
    return options, "\n".join(lines[count:]).strip("\n")


def fence(text, language=""):
    return f"```{language}\n{text}\n```"


def shown(cell, images):
    """What a code cell contributes to the README; its pictures are added to `images`, file name ->
    bytes."""
    options, source = directives("".join(cell["source"]))
    if "hide" in options:
        return []
    parts = [] if options.get("echo") == "false" or not source else [fence(source, "python")]
    for number, output in enumerate(cell["outputs"]):
        data = {
            kind: "".join(content)
            for kind, content in output.get("data", {}).items()
            if isinstance(content, (str, list))
        }
        if "image/png" in data:
            name = f"{IMAGES}/index-{cell['id']}-{number}.png"
            images[name] = base64.b64decode(data["image/png"])
            parts.append(
                f"![{options.get('fig-alt', 'the figure that the cell above draws')}]({name})"
            )
        elif "text/markdown" in data:
            parts.append(data["text/markdown"].strip("\n"))
        elif "text/plain" in data:
            parts.append(fence(data["text/plain"].strip("\n")))
        elif output["output_type"] == "stream" and output["name"] == "stdout":
            parts.append(fence("".join(output["text"]).strip("\n")))
    return parts


def render(root):
    "file name -> bytes: README.md and its pictures."
    notebook = json.loads((root / "index.ipynb").read_text(encoding="utf-8"))
    parts, images = [NOTE], {}
    for cell in notebook["cells"]:
        if END in "".join(cell["source"]):
            break
        if cell["cell_type"] == "markdown":
            source = re.sub(r"<!--.*?-->\n*", "", "".join(cell["source"]), flags=re.S).strip("\n")
            parts.append(
                re.sub(r"\]\(#([^)]*)\)", lambda link: f"](#{link[1].lower()})", source)
            )  # GitHub's ids are in lower case, Jupyter's are not
        elif cell["cell_type"] == "code":
            parts += shown(cell, images)
    return {"README.md": ("\n\n".join(part for part in parts if part) + "\n").encode(), **images}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if anything is out of date"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="the checkout (default: this one)",
    )
    args = parser.parse_args()
    root, wanted = args.root, render(args.root)
    stale = [
        name
        for name, content in wanted.items()
        if not (root / name).is_file() or (root / name).read_bytes() != content
    ]
    left = [
        str(path.relative_to(root))
        for path in sorted((root / IMAGES).glob("index-*.png"))
        if str(path.relative_to(root)) not in wanted
    ]
    if args.check:
        if stale or left:
            print(
                "out of step with index.ipynb:",
                *stale,
                *left,
                "(run python tools/readme.py)",
                file=sys.stderr,
            )
        return 1 if stale or left else 0
    for name in stale:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(wanted[name])
        print("wrote", name)
    for name in left:
        (root / name).unlink()
        print("removed", name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
