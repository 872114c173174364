"""Draw a picture of each table of docs/how_fast.md: docs/images/fast_*.svg.

    python tools/bars.py           write them
    python tools/bars.py --check   change nothing; exit 1 when one is out of date

The numbers are read from the page: a table's picture stands right above it, and says nothing that
the table does not.
"""

import re
import sys
from typing import NamedTuple

from diagrams import ROOT, STYLE, WIDTH, escape, rect, text

PAGE, FOLDER = ROOT / "docs/how_fast.md", ROOT / "docs/images"
COLOURS = ("blue", "orange", "green", "grey")
LEFT, RIGHT = 16, 92  # margins: the right one holds a bar's number
LINE, BAR, LABEL = 20, 17, 26  # heights: of a bar and its gap, of a bar, of a row's name


class Chart(NamedTuple):
    "What is drawn of a table."

    title: str
    columns: dict[str, str]  # its heading in the table: what the legend says
    pick: int | None = None  # which number of a cell that holds several; None: the largest


CHARTS = {
    "decode": Chart(
        "gpt-oss-20b, tokens a second in all",
        {"ours, MXFP4": "ours", "vLLM, MXFP4": "vLLM", "ours, bf16": "ours, bf16"},
    ),
    "adapters": Chart(
        "gpt-oss-20b with adapters, tokens a second",
        {"ours": "ours", "vLLM": "vLLM"},
    ),
    "nf4": Chart(
        "Qwen2.5-1.5B in NF4, tokens a second",
        {
            "ours": "ours",
            "ours through the modules, recorded": "its modules",
            "Unsloth's generate": "Unsloth",
            "transformers' generate": "transformers",
        },
    ),
    "rollouts": Chart(
        "Whole rollouts, tokens a second",
        {"ours, tok/s": "ours", "modules": "its modules", "vLLM 0.25.1": "vLLM"},
    ),
    "filters": Chart(
        "A step with filters, milliseconds",
        {
            "no filter": "no filter",
            "min_p .05": "min_p",
            "top_p .95": "top_p",
            "top_k 50, top_p .95": "top_k, top_p",
        },
    ),
    "lora": Chart(
        "A LoRA step, seconds",
        {
            "ours, bf16": "ours, bf16",
            "ours, MXFP4": "ours, MXFP4",
            "Unsloth, bf16": "Unsloth",
            "transformers, bf16": "transformers",
        },
        0,
    ),
    "first": Chart(
        "A GRPO step of gpt-oss-20b, seconds",
        {
            "first step, empty caches": "first, empty caches",
            "first step, kept caches": "first, kept caches",
            "a later step": "a later one",
        },
    ),
    "short": Chart(
        "A LoRA step of 2,048 tokens, seconds",
        {"call by call": "call by call", "recorded": "recorded"},
    ),
    "sampler": Chart("A GRPO update, seconds", {"an update": "draw, train, hand over"}),
    "dense": Chart(
        "A GRPO step of a dense model, seconds",
        {"drawing": "drawing", "training": "training"},
        1,
    ),
    "length": Chart("The longest training step, tokens", {"tokens": "ours"}),
}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page):
    "Name of the picture above a table -> its heading and its rows."
    lines = page.splitlines()
    for i, line in enumerate(lines):
        if found := re.match(r"!\[.+\]\(images/fast_(\w+)\.svg\)", line):
            end = next(j for j in range(i + 2, len(lines) + 1) if not "".join(lines[j : j + 1]))
            yield found[1], cells(lines[i + 2]), [cells(row) for row in lines[i + 4 : end]]


def number_of(cell, pick):
    "A number of a cell (None: it has none), and how it is written there."
    found = re.findall(r"(?<![\w.])[\d,]*\.?\d+(?![\w.])", cell)
    numbers = [(float(text.replace(",", "")), text) for text in found]
    return None if not numbers else max(numbers) if pick is None else numbers[pick]


def called(heading, row):
    "The name of a row: a bare number with what it counts, else the cell, and a model's name."
    bare = re.fullmatch(r"[\d,]+", row[0])
    name = f"{row[0]} {heading[0].removesuffix('s' if row[0] == '1' else '')}" if bare else row[0]
    return f"{name}: {row[heading.index('model')]}" if "model" in heading else name


def bars(chart, heading, rows):
    "The parts of a picture and its height."
    places = {name: heading.index(name) for name in chart.columns}
    found = [[number_of(row[at], chart.pick) for at in places.values()] for row in rows]
    whole = max(number[0] for row in found for number in row if number)
    parts, y = [text(WIDTH / 2, 26, chart.title, weight=600, size=17)], 40
    x = LEFT
    for colour, name in zip(COLOURS, chart.columns.values(), strict=False):
        if x + 24 + 8.5 * len(name) > WIDTH:
            x, y = LEFT, y + LINE
        parts += [rect(x, y, 14, 14, colour), text(x + 20, y + 13, name, anchor="start")]
        x += 40 + 8.5 * len(name)
    y += LINE
    for row, numbers in zip(rows, found, strict=True):
        if any(numbers):
            name = called(heading, row)
            parts.append(text(LEFT, y + LABEL - 7, name, "soft", anchor="start"))
            y += LABEL
        for colour, number in zip(COLOURS, numbers, strict=False):
            if number:
                width = max(2, (WIDTH - LEFT - RIGHT) * number[0] / whole)
                parts.append(rect(LEFT, y, width, BAR, colour))
                parts.append(text(LEFT + width + 6, y + 14, number[1], anchor="start"))
                y += LINE
    return parts, y + 14


def picture(chart, heading, rows):
    "The whole file."
    parts, height = bars(chart, heading, rows)
    shown = 575
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{shown}" height="{round(shown / WIDTH * height)}" role="img">',
            f"<title>{escape(chart.title)}</title><desc>The table below says it in numbers.</desc>",
            f"<style>{STYLE}</style>",
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" class="card"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main():
    stale, found = [], dict((name, rest) for name, *rest in tables(PAGE.read_text()))
    if missing := CHARTS.keys() ^ found.keys():
        sys.exit(f"docs/how_fast.md and tools/bars.py do not agree on {', '.join(sorted(missing))}")
    for name, chart in CHARTS.items():
        path, drawn = FOLDER / f"fast_{name}.svg", picture(chart, *found[name])
        if not path.exists() or path.read_text() != drawn:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(drawn)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python tools/bars.py")


if __name__ == "__main__":
    main()
