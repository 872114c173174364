"""Make a release of what stands in the checkout: its version, and its part of the changelog.

    python tools/release.py 0.2.0           write the version into settings.ini and the library, and
                                            close the changelog's part `Unreleased` under it
    python tools/release.py --check 0.2.0   change nothing; exit 1 unless all three say 0.2.0

Nothing is committed. What follows is said at the end: a commit, and a tag, from which
.github/workflows/release.yml builds and publishes.
"""

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"^version = (\S+)$", re.M)
OPEN = "## [Unreleased]\n"


def numbers(version):
    "The three numbers of a version, to be compared."
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ValueError(f"{version!r} is no version: give three numbers, such as 0.2.0")
    return tuple(map(int, version.split(".")))


def with_version(settings, version):
    "settings.ini with another version, which must be above its own."
    before = VERSION.search(settings)[1]
    if numbers(version) <= numbers(before):
        raise ValueError(f"{version} is not above {before}, the version in settings.ini")
    return VERSION.sub(f"version = {version}", settings)


def with_part(changelog, version, day):
    "The changelog with what is unreleased closed under a version, and an empty part above."
    if OPEN not in changelog:
        raise ValueError(f"CHANGELOG.md has no line {OPEN.strip()!r} to close")
    if f"## [{version}]" in changelog:
        raise ValueError(f"CHANGELOG.md has a part for {version} already")
    part = changelog.split(OPEN)[1].split("\n## [")[0]
    if not part.strip():
        raise ValueError("nothing stands under [Unreleased] in CHANGELOG.md: say what has changed")
    return changelog.replace(OPEN, f"{OPEN}\n## [{version}] - {day}\n", 1)


def differences(root, version):
    "A sentence for each place that does not say this version."
    settings = VERSION.search((root / "settings.ini").read_text(encoding="utf-8"))[1]
    front = (root / "grpo_nb/__init__.py").read_text(encoding="utf-8")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = []
    if settings != version:
        problems.append(f"settings.ini says {settings}, not {version}")
    if f'__version__ = "{version}"' not in front:
        problems.append(f"grpo_nb/__init__.py does not say {version}: run nbdev_export")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M):
        problems.append(f"CHANGELOG.md has no part for {version} with its day")
    return problems


def release(root, version, day):
    "Write a version and its part of the changelog; nothing is written where one is refused."
    wanted = {
        "settings.ini": lambda text: with_version(text, version),
        "CHANGELOG.md": lambda text: with_part(text, version, day),
    }
    made = {name: make((root / name).read_text(encoding="utf-8")) for name, make in wanted.items()}
    for name, text in made.items():
        (root / name).write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    if args.check:
        problems = differences(ROOT, args.version)
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
        return 1 if problems else 0
    try:
        release(ROOT, args.version, datetime.date.today().isoformat())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    subprocess.run(["nbdev_export"], cwd=ROOT, check=True)  # writes the version into the library
    tag = f"v{args.version}"
    print(f"git commit -am 'Version {args.version}' && git tag {tag} && git push origin main {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
