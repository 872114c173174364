"""The tables of docs/where_it_runs.md, from the record of the rehearsal and from run cards:
`python tools/where_it_runs.py`, or with `--card FILE` to take in a card that somebody has sent.

Of a card its own lines alone are kept; whatever else stands in the text is left out.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from forced import FAULTS, LATER  # noqa: E402

PAGE, RECORD, CARDS = (
    ROOT / "docs" / name for name in ("where_it_runs.md", "rehearsal.json", "run_cards")
)
NUMBER = r"([\d.]+|not planned|not known)(?: at least)?"
CARD = re.compile(
    r"^Run card: (?P<model>[\w.-]+) on (?P<card>[\w. -]+)\n"
    r"(?P<machine>[\w.-]+, \d+ cores, [\d.]+ GiB(?:, on the card [\d.]+ GiB \(\d+\.\d+\))?)\n"
    r"(?P<versions>\w+ [\w.+-]+(?:, \w+ [\w.+-]+)*)\n"
    r"(?P<trained>[\d,]+) numbers are trained; predicted for [\w. -]+\n"
    r"(?P<updates>\d+ of \d+) updates\n"
    rf"GiB on the device +predicted +{NUMBER}, measured +([\d.]+)\n"
    rf"GiB on the host +predicted +{NUMBER}, measured +([\d.]+)\n"
    rf"seconds, last update +predicted +{NUMBER}, measured +([\d.]+)\n"
    r"(?P<log>(?:[^\n`|<]*\n?){0,11})",
    re.M,
)
COLUMNS = (
    "card",
    "model",
    "machine",
    "versions",
    "updates",
    "GiB of the card, predicted / measured",
    "GiB beside it",
    "seconds of an update",
)
WAYS = {
    "whole": "From the first cell to the last",
    "lost": "The session lost half way, and a new machine",
    "models": "With a real model of a folder, as on a T4",
    "models, L4": "With a real model of a folder, as on an L4",
}


def read_card(text: str) -> re.Match:  # ValueError: it is none
    "The card in a text, such as an issue's."
    found = CARD.search(text.replace("\r", ""))
    if found is None:
        raise ValueError(
            "there is no run card in it: its first line is 'Run card: MODEL on CARD', and others "
            "follow as grpo_nb.run_card writes them"
        )
    return found


def row_of(text: str) -> str:
    "A row of the page for a card."
    found = read_card(text)
    said = found.groups()
    device, host, seconds = (f"{one} / {two}" for one, two in zip(*[iter(said[6:12])] * 2))
    names = "card", "model", "machine", "versions", "updates"
    return f"| {' | '.join([*(found[name] for name in names), device, host, seconds])} |"


def card_table(cards: list[str]) -> str:
    "All cards, a row each."
    if not cards:
        return "Nobody has sent a run card yet."
    head = f"| {' | '.join(COLUMNS)} |"
    return "\n".join([head, "|---" * len(COLUMNS) + "|", *map(row_of, cards)])


def rehearsal_table(record: dict) -> str:
    "Each way that the tutorials were rehearsed in."
    parts = []
    for way, title in WAYS.items():
        if way not in record:
            continue
        told = record[way]
        lines = [f"### {title}", "", f"On {told['on']}, with {told['with']}.", ""]
        lines += ["| page | cells | seconds | GiB at most | |", "|---|---|---|---|---|"]
        for row in told["pages"]:
            went = row["error"] or ""
            if row.get("lost after") is not None:
                number = row["lost after"] + 1
                went += f"lost in its cell {number}"
                went += f"; went on from {row['went on'][0]}" if row["went on"] else ""
            page, ran = row["page"].removesuffix(".ipynb"), f"{row['ran']} of {row['cells']}"
            lines.append(f"| {page} | {ran} | {row['seconds']:.0f} | {row['peak GiB']} | {went} |")
        lines.append("")
        for name in ("enforced", "imitated", "neither real nor imitated"):
            lines.append(f"- **{name[0].upper()}{name[1:]}**: {'; '.join(told[name])}.")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def forced_table(record: dict) -> str:
    "What goes wrong: the cell of each page that says what to do, and what it says on one of them."
    rows, found = record.get("forced", {"pages": {}})["pages"], {}
    for name, row in rows.items():
        page, _, fault = name.partition(": ")
        found.setdefault(fault, {})[page] = row
    pages = sorted({page for told in found.values() for page in told})
    lines = [f"| | {' | '.join(page[:2] for page in pages)} | what is said |"]
    lines.append("|---" * (len(pages) + 2) + "|")
    for fault in (name for name in FAULTS if name in found):
        told = found[fault]
        cells = [
            str(told[page]["cell"]) if page in told and told[page]["ended well"] else "nothing"
            for page in pages
        ]
        said = next((row["said"] for row in told.values() if row["said"]), "").replace("|", "\\|")
        stops = ", *stops*" if fault in LATER else ""
        lines.append(f"| {fault}{stops} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines)


def written(text: str, record: dict, cards: list[str]) -> str:
    "The page with its tables made anew."
    tables = {"rehearsal": rehearsal_table(record), "forced": forced_table(record)}
    for name, table in (tables | {"run cards": card_table(cards)}).items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--card", type=Path, help="a file with a run card in it")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    asked = parser.parse_args()
    if asked.card:
        found = read_card(asked.card.read_text(encoding="utf-8"))
        CARDS.mkdir(exist_ok=True)
        name = re.sub(r"\W+", "_", f"{found['card']}_{found['model']}".lower())
        number = 1 + len(list(CARDS.glob(f"{name}_*.txt")))
        (CARDS / f"{name}_{number}.txt").write_text(found[0].rstrip() + "\n", encoding="utf-8")
    cards = [path.read_text(encoding="utf-8") for path in sorted(CARDS.glob("*.txt"))]
    old = PAGE.read_text(encoding="utf-8")
    new = written(old, json.loads(RECORD.read_text()), cards)
    if asked.check and new != old:
        sys.exit("docs/where_it_runs.md is out of date: run python tools/where_it_runs.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
