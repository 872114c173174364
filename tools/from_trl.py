"""Write the tables of docs/from_trl.md that the library's own tables say.

    python tools/from_trl.py           write them
    python tools/from_trl.py --check   change nothing; exit 1 when the page is out of date

Each stands between `<!-- NAME -->` and `<!-- /NAME -->`, with a name of TABLES; the rest of the
page is written by hand. The table `gate` comes from docs/trl_gate.json, which tools/trl_gate.py
writes; so does the sentence in index.ipynb with its counts (then run tools/readme.py). The table
`notebooks` comes from docs/notebooks_gate.json, which tools/notebooks_gate.py writes.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_nb.algorithm.losses import LOSSES  # noqa: E402
from grpo_nb.compat.trl import DEFINE_INSTEAD, NOT_HERE  # noqa: E402
from grpo_nb.training.config import (  # noqa: E402
    ALIASES,
    DIFFERENT_FROM_TRL,
    IGNORED_BY_REASON,
    REFUSED_BY_REASON,
)
from tools.notebooks_gate import OUTCOMES  # noqa: E402
from tools.trl_gate import KINDS  # noqa: E402

PAGE = ROOT / "docs/from_trl.md"
GATE = ROOT / "docs/trl_gate.json"
NOTEBOOKS = ROOT / "docs/notebooks_gate.json"
FRONT = ROOT / "index.ipynb"


def table(heads, rows):
    "A table of Markdown."
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def code(*names):
    return ", ".join(f"`{name}`" for name in names)


def reasons(by_reason):
    "Rows of names that have one reason."
    return [(code(*names), reason) for reason, names in by_reason]


def gate_sentence(record):
    "What README says of TRL's own tests."
    counts, trl = record["counts"], record["versions"]["trl"]
    passing = sum(counts.get(kind, 0) for kind in OF_TRL)
    return (
        f"TRL {trl} passes {passing} of its own tests of its trainer on tiny models; with the "
        f"import line changed {counts['passed']} of them pass here, and "
        "[each other one has its reason](docs/from_trl.md#what-trls-own-tests-say)."
    )


OF_TRL = ("passed", "refused", "different", "worded", "private")  # kinds that TRL passes


def gate(record):
    "The section on TRL's own tests: how they were run, counts, and the reason of each other test."
    names = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    days = sorted(collections.Counter(record.get("again", {}).values()).items())
    later = [f"{tests} of the tests again on {day}" for day, tests in days]
    again = f" Run {', and '.join(later)}." if later else ""
    counts = record["counts"]
    kinds = [(str(counts[kind]), words) for kind, words in KINDS.items() if kind in counts]
    reasons = {}
    for name, (kind, reason) in record["tests"].items():
        if kind != "passed":
            test = re.sub(r"\[.*", "", name.split("::")[1])
            reasons.setdefault((kind, reason), {}).setdefault(test, []).append(name)
    order = list(KINDS)
    rows = [
        (
            sum(map(len, tests.values())),
            code(*tests) if kind in OF_TRL else "",
            kind,
            reason,
        )
        for (kind, reason), tests in sorted(reasons.items(), key=lambda r: order.index(r[0][0]))
    ]
    theirs = [(f"{n}: {tests}", reason) for n, tests, kind, reason in rows if kind in OF_TRL]
    neither = [(str(n), reason) for n, _, kind, reason in rows if kind not in OF_TRL]
    return "\n\n".join(
        [
            f"Run on {record['date']} with {names}; the file is {record['source']}.{again}",
            table(("tests", "that"), kinds),
            "Those that this library does not pass and TRL does:",
            table(("tests", "why"), theirs),
            "Those that do not pass with TRL either, or are skipped:",
            table(("tests", "why"), neither),
        ]
    )


def notebooks(record):
    "The section on published notebooks: how they were run, counts, and the reason of each other."
    names = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rows = [(str(record["counts"][kind]), words) for kind, words in OUTCOMES.items()]
    needed = collections.Counter(
        edit for one in record["notebooks"].values() for edit in one["edits"]
    )
    edits = [(code(name), record["edits"][name], str(n)) for name, n in sorted(needed.items())]
    failed = [
        (name.removesuffix(".ipynb").replace("_", " "), one["reason"])
        for name, one in record["notebooks"].items()
        if one["outcome"] == "failed"
    ]
    return "\n\n".join(
        [
            f"Run on {record['date']} with {names}; the notebooks are {record['source']}.",
            table(("notebooks", "that"), rows),
            "The edits:",
            table(("edit", "why", "notebooks"), edits),
            "Those that end in an error:",
            table(("notebook", "why"), failed),
        ]
    )


TABLES = {
    "defaults": table(
        ("setting", "here", "TRL 1.16", "why"),
        [
            (code(name), code(ours), code(theirs), why)
            for name, (ours, theirs, why) in DIFFERENT_FROM_TRL.items()
        ],
    ),
    "losses": table(
        ("`loss_type`", "loss of a token, c its ratio", "reduction", "`importance_sampling_level`"),
        [
            (
                code(name),
                " ".join(loss.per_token.__doc__.split()),
                loss.reduction.__doc__,
                loss.level or ("either" if loss.ratio else "no ratio"),
            )
            for name, loss in LOSSES.items()
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
        reasons(DEFINE_INSTEAD),
    ),
    "names": table(
        ("of the trainer", "instead"),
        [(code(name), instead) for name, instead in NOT_HERE.items()],
    ),
    "gate": gate(json.loads(GATE.read_text())),
    "notebooks": notebooks(json.loads(NOTEBOOKS.read_text())),
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


def counted(text):
    "The front page with what the gate's record says."
    sentence = gate_sentence(json.loads(GATE.read_text()))
    ends = r"TRL [\d.]+ passes \d+ of its own tests .*?#what-trls-own-tests-say\)\."
    text, count = re.subn(ends, lambda _: sentence, text)
    if count != 1:
        raise SystemExit(f"{FRONT.name} has {count} sentences on TRL's own tests, not one")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if out of date"
    )
    check, status = parser.parse_args().check, 0
    for path, made in ((PAGE, renewed), (FRONT, counted)):
        present = path.read_text(encoding="utf-8")
        wanted = made(present)
        if not check:
            path.write_text(wanted, encoding="utf-8")
        elif present != wanted:
            print(f"{path.name} is out of date: run python tools/from_trl.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
