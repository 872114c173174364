"""The oldest and the newest packages that the library is tried with, and the table that says so.

    python tools/versions.py packages oldest    what to install: the lower bounds of settings.ini
    python tools/versions.py packages newest    what to install: the newest there are
    python tools/versions.py others             the other packages that the library asks for
    python tools/versions.py installed          the versions that are installed here
    python tools/versions.py record oldest success 3.11.9 2.9.0 ...   write the row of
                                                docs/versions.md from these and how the tests ended

.github/workflows/versions.yml does all of it once a week; its job that may write installs nothing.
"""

import argparse
import datetime
import platform
import re
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/versions.md"
NAMED = ("torch", "transformers", "peft", "trl")


def named(settings):
    "package -> its requirement, for those of NAMED; TRL's is that of the extra `dev`."
    asked = [*settings["requirements"].split(), *settings["dev_requirements"].split()]
    by_name = {re.match(r"[\w-]+", text)[0]: text for text in reversed(asked)}
    return {name: by_name[name] for name in NAMED}


def packages(settings, which):
    "What to give pip."
    if which == "newest":
        return list(NAMED)
    return [re.sub(r">=(.*)", r"==\1.*", text) for text in named(settings).values()]


def others(settings):
    "The requirements that are not in NAMED."
    chosen = named(settings).values()
    return [text for text in settings["requirements"].split() if text not in chosen]


def recorded(text, which, outcome, versions, day):
    "The page with a new row for `which`; the versions were said by a job that runs other's code."
    if odd := [one for one in versions if not re.fullmatch(r"\d[\w.+]{0,39}", one, re.A)]:
        raise ValueError(f"{odd[0][:40]!r} is no version: give what `installed` prints")
    if len(versions) != 1 + len(NAMED):
        raise ValueError(f"{len(versions)} versions, and there are {1 + len(NAMED)} columns")
    said = "pass" if outcome == "success" else "**fail**"
    row = f"| {which} | {' | '.join(versions)} | {said} | {day} |"
    found, count = re.subn(rf"^\| {which} \|.*$", row, text, flags=re.M)
    if count != 1:
        raise ValueError(f"docs/versions.md has {count} rows that begin with | {which} |: keep one")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("packages", "record"):
        commands.add_parser(name).add_argument("which", choices=("oldest", "newest"))
    commands.choices["record"].add_argument("outcome", choices=("success", "failure"))
    commands.choices["record"].add_argument("versions", nargs="+")
    commands.add_parser("others"), commands.add_parser("installed")
    args = parser.parse_args()
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    if args.command == "packages":
        print(*packages(settings, args.which))
    elif args.command == "others":
        print(*others(settings))
    elif args.command == "installed":
        print(platform.python_version(), *(version(name) for name in NAMED))
    else:
        day = datetime.date.today().isoformat()
        text = TABLE.read_text(encoding="utf-8")
        text = recorded(text, args.which, args.outcome, args.versions, day)
        TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
