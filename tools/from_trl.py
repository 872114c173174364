"""Write the tables of docs/from_trl.md that the library's own tables say.

    python tools/from_trl.py           write them
    python tools/from_trl.py --check   change nothing; exit 1 when the page is out of date

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`, with a name of TABLES; the rest of the
page is written by hand.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_nb.training.config import (  # noqa: E402
    ALIASES,
    DIFFERENT_FROM_TRL,
    IGNORED_BY_REASON,
    REFUSED_BY_REASON,
)
from grpo_nb.training.trainer import NOT_CALLED, NOT_HERE  # noqa: E402

PAGE = ROOT / "docs/from_trl.md"


def table(heads, rows):
    "A table of Markdown."
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def code(*names):
    return ", ".join(f"`{name}`" for name in names)


def reasons(by_reason):
    "Rows of names that have one reason."
    return [(code(*names), reason) for reason, names in by_reason]


TABLES = {
    "defaults": table(
        ("setting", "here", "TRL 1.16", "why"),
        [
            (code(name), code(ours), code(theirs), why)
            for name, (ours, theirs, why) in DIFFERENT_FROM_TRL.items()
        ],
    ),
    "refused": table(("setting", "why, and what to write"), reasons(REFUSED_BY_REASON)),
    "ignored": table(("setting", "why it changes nothing"), reasons(IGNORED_BY_REASON)),
    "aliases": table(
        ("name there", "name here"),
        [(code(name), code(ours)) for name, ours in ALIASES.items()],
    ),
    "hooks": table(
        ("method of your subclass", "define here"),
        [(code(name), instead) for name, instead in NOT_CALLED.items()],
    ),
    "names": table(
        ("of the trainer", "instead"),
        [(code(name), instead) for name, instead in NOT_HERE.items()],
    ),
}


def renewed(text):
    "The page with its tables as the library says them."
    for name, rows in TABLES.items():
        block = f"<!-- {name} -->\n\n{rows}\n\n<!-- /{name} -->"
        text, count = re.subn(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _: block, text, flags=re.S
        )
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for the table {name!r}, not one")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if out of date"
    )
    present = PAGE.read_text(encoding="utf-8")
    wanted = renewed(present)
    if not parser.parse_args().check:
        PAGE.write_text(wanted, encoding="utf-8")
    elif present != wanted:
        print("docs/from_trl.md is out of date: run python tools/from_trl.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
