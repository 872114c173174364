"""Tutorials and widgets with the versions that Colab has (colab.txt), in an environment of their
own; everything else meets the present ones."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import nbformat
import pytest
from venvs import layered, make_once, packages_of, shared

ROOT = Path(__file__).resolve().parent.parent
PINS = re.findall(r"(?m)^\w+==\S+", (ROOT / "tests/colab.txt").read_text())
NOTEBOOKS = sorted(
    [*(ROOT / "nbs/tutorials").glob("*.ipynb"), *(ROOT / "nbs/widgets").glob("*.ipynb")]
)
WIDGETS = sorted(
    p.stem
    for p in (ROOT / "grpo_nb/widgets").glob("[a-z]*.py")
    if f"def {p.stem}_widget" in p.read_text()
)
pytestmark = pytest.mark.colab


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An environment with Colab's packages; what is not pinned (torch, nbclient, this library) is
    taken from the present one."""

    def make(folder):
        problem = layered(folder, *PINS, sees=[ROOT])
        assert not problem, problem

    return make_once(shared(tmp_path_factory, "colab"), make)


@pytest.fixture(scope="module")
def run(home, tmp_path_factory):
    """A function: run a notebook in a kernel of that environment and get what colab_child.py tells
    about it."""
    folder = tmp_path_factory.mktemp("jupyter")
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    }
    env |= {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_PATH": str(home / "share/jupyter"),
    }
    log = (folder / "log").open("w+")
    child = subprocess.Popen(
        [home / "bin/python", ROOT / "tests/colab_child.py", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=env,
    )

    def run(notebook, where):
        child.stdin.write(json.dumps([str(notebook), str(where)]) + "\n")
        child.stdin.flush()
        told = child.stdout.readline()
        assert told, (
            "the process that runs the notebooks died: " + Path(log.name).read_text()[-4000:]
        )
        return json.loads(told)

    yield run
    child.stdin.close()
    child.wait(60)
    log.close()


def test_the_environment_has_the_pins(home):
    own, present = (
        {
            made.metadata["Name"].replace("-", "_").lower(): made.version
            for made in distributions(path=[str(place)])
        }
        for place in (packages_of(home), sysconfig.get_path("purelib"))
    )
    found = present | own  # a version that is the present one is not installed again
    assert {pin: found.get(pin.split("==")[0]) for pin in PINS} == {
        pin: pin.split("==")[1] for pin in PINS
    }


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in NOTEBOOKS])
def test_notebook_runs_with_colabs_versions(run, path, tmp_path):
    # what a page reads from the repository, which Colab reaches
    shutil.copytree(ROOT / "benchmarks/results/programs", tmp_path / "benchmarks/results/programs")
    met = run(path, tmp_path)
    assert not met["error"], met["error"]
    pins = {name.lower(): number for name, number in (pin.split("==") for pin in PINS)}
    assert met["versions"] == {name: pins[name.lower()] for name in met["versions"]}
    source = "\n".join(
        cell.source
        for cell in nbformat.read(path, 4).cells
        if cell.cell_type == "code" and not cell.source.startswith("#| export")
    )
    shows = any(f"{name}_widget()" in source for name in WIDGETS)
    assert met["widgets"] >= shows
