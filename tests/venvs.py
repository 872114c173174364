"""Environments for tests that need other packages than the present one has: made once, and out of
it, so that nothing large is installed again."""

import csv
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_once(folder, make):
    """Call `make(folder)` unless an earlier call came to its end; of several processes that want it
    one makes it, and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "ready").touch()
    return folder


def shared(tmp_path_factory, name):
    "A folder that all workers of this run of pytest mean by this name."
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / name


def pip(home, *arguments):
    "The present pip at work on another environment; what went wrong, or nothing."
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", home / "bin/python", *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    return f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}" if done.returncode else ""


def packages_of(home):
    "Where an environment keeps its packages."
    return Path(sysconfig.get_path("purelib", vars={"base": home, "platbase": home}))


def layered(home, *packages, sees=()):
    """Make an environment that has these packages, and behind them on its path all of the present
    one; what went wrong, or nothing."""
    venv.create(home, clear=True)
    (packages_of(home) / "present.pth").write_text(
        "\n".join([sysconfig.get_path("purelib"), *map(str, sees)])
    )  # after its own packages on the path, so those win
    return pip(home, "install", "-q", "--no-compile", *packages)


def needed_by(requirements):
    """The installed distributions that these requirements lead to, by way of others too;
    PackageNotFoundError if one is missing."""
    found, seen, todo = {}, set(), [(Requirement(text), "") for text in requirements]
    while todo:
        asked, extra = todo.pop()
        if asked.marker and not asked.marker.evaluate({"extra": extra}):
            continue
        made = found[canonicalize_name(asked.name)] = distribution(asked.name)
        for wanted in {"", *asked.extras}:
            if (made.name, wanted) in seen:
                continue
            seen.add((made.name, wanted))
            todo += [(Requirement(text), wanted) for text in made.requires or []]
    return list(found.values())


def files_of(made):
    "What a distribution has put beside others, without its commands."
    names = (row[0] for row in csv.reader((made.read_text("RECORD") or "").splitlines()))
    return [name for name in names if not name.startswith(("../", "/"))]


def bare(home, wheel):
    """Make an environment that has a wheel and what its metadata asks for, as it is installed here,
    and nothing else; what went wrong, or nothing."""
    venv.create(home, clear=True)
    problem = pip(home, "install", "-q", "--no-compile", "--no-deps", "--no-index", wheel)
    if problem:
        return problem
    here, there, owners = Path(sysconfig.get_path("purelib")), packages_of(home), defaultdict(set)
    for made in distributions():
        owner = made.name
        for top in {name.split("/")[0] for name in files_of(made)}:
            owners[top].add(owner)
    (installed,) = distributions(path=[str(there)])
    for made in needed_by(installed.requires):
        for name in {
            top if len(owners[top := name.split("/")[0]]) == 1 else name for name in files_of(made)
        }:  # a whole folder where nobody else has files in it
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            (there / name).symlink_to(here / name)
    return pip(home, "check")
