"The cell that fetches the library where it is missing, as it stands in a page, in a bare Python."

import json
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = "nbs/training/01_config.ipynb"
SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini")
SETTINGS = SETTINGS["DEFAULT"]
REPOSITORY = f"git+{SETTINGS['git_url']}@{SETTINGS['branch']}"
NEEDS = [re.match(r"\w+", each)[0] for each in SETTINGS["requirements"].split()]
EMPTY = "came_from = {!r}\ndef open_page(): pass"  # a library without modules
PIP = """
import os, sys
from pathlib import Path
asked = sys.argv[-1]
with open(os.environ["ASKED"], "a") as file:
    print(asked, file=file)
if asked != os.environ["HAS"]:
    sys.exit("ERROR: no such thing, or no network")
package = Path(__file__).parent.parent / "grpo_nb"
package.mkdir()
(package / "__init__.py").write_text("came_from = 'pip'\\ndef open_page(): pass")
"""


def source_of(page=PAGE):
    cells = json.loads((ROOT / page).read_text())["cells"]
    return "".join(cells[1]["source"])


@pytest.fixture
def bare(tmp_path):
    "A Python with empty modules for what the library needs, and a pip that installs little."
    packages, here = tmp_path / "packages", tmp_path / "page"
    (packages / "pip").mkdir(parents=True)
    (packages / "pip/__init__.py").write_text("")
    (packages / "pip/__main__.py").write_text(PIP)
    for name in NEEDS:
        (packages / f"{name}.py").write_text("")
    here.mkdir()

    def run(here=here, has="nothing", without=(), then="", start=()):
        """(what pip was asked for, the sentence that the cell ended with, from where the library
        came) of the cell, run in a folder; pip finds what `has` says."""
        for name in without:
            (packages / f"{name}.py").unlink()
        asked = tmp_path / "asked"
        asked.write_text("")
        found = "print(getattr(grpo_nb, 'came_from', grpo_nb.__file__), flush=True)"
        code = "\n".join([*start, source_of()]) + f"\nimport grpo_nb; {found}{then}"
        env = {
            "PYTHONPATH": str(packages),
            "ASKED": str(asked),
            "HAS": has,
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], cwd=here, env=env, capture_output=True, text=True
        )
        last = done.stderr.strip().splitlines()[-1:]
        return asked.read_text().splitlines(), "".join(last), done.stdout.strip()

    run.packages, run.here = packages, here
    return run


def library_in(folder, name):
    (folder / "grpo_nb").mkdir(parents=True)
    (folder / "grpo_nb/__init__.py").write_text(EMPTY.format(name))
    (folder / "grpo_nb/cli.py").write_text("")


def test_a_library_that_is_there_is_left_alone(bare):
    library_in(bare.packages, "before")
    (bare.here / "nbs").mkdir()
    library_in(bare.here, "the clone")
    assert bare(bare.here / "nbs") == ([], "", "before")


def test_nothing_there_and_no_network_ends_in_a_sentence_with_the_command(bare):
    asked, said, _ = bare()
    assert asked == [REPOSITORY]
    assert said.startswith("ImportError: no clone, no wheel, no network; with one: %pip ")
    assert f"install --no-deps {REPOSITORY}. JupyterLite" in said


def test_a_browser_has_no_pip_and_no_processes_and_says_so(bare):
    "Pyodide's Python: its platform, a call that refuses, and no torch."
    (bare.packages / "sitecustomize.py").write_text(
        "import subprocess, sys\n"
        "def call(*_): raise OSError(138, 'emscripten does not support processes.')\n"
        "subprocess.call, sys.platform = call, 'emscripten'\n"
    )
    asked, said, _ = bare(then="", start=("import sitecustomize",))
    assert not asked and said.endswith("JupyterLite has no pip and no torch: take Colab")


@pytest.mark.parametrize("below", ["", "nbs/training"])
def test_the_clone_that_the_page_lies_in(bare, below):
    library_in(bare.here, "the clone")
    folder = bare.here / below
    folder.mkdir(parents=True, exist_ok=True)
    assert bare(folder) == ([], "", "the clone")


def test_a_clone_beside_the_page_is_not_taken_for_the_library(bare):
    "`git clone` in the page's folder makes a folder grpo_nb that Python would import as it is."
    library_in(bare.here / "grpo_nb", "the clone")
    assert bare() == ([], "", "the clone")


def test_this_clone(bare):
    assert bare(ROOT / "nbs/training") == ([], "", str(ROOT / "grpo_nb/__init__.py"))


def test_the_repository_is_the_last_resort_and_the_index_is_not_asked(bare):
    "Nobody has registered the name there: whoever does could put anything into every page."
    assert bare(has=REPOSITORY) == ([REPOSITORY], "", "pip")


def test_programs_that_a_page_starts_find_its_clone(bare):
    child = "import grpo_nb; print(grpo_nb.__file__)"
    found = bare(ROOT / "nbs/training", then=f"; call([sys.executable, '-S', '-c', {child!r}])")
    assert found == ([], "", "\n".join([str(ROOT / "grpo_nb/__init__.py")] * 2))


def test_a_wheel_beside_the_page_needs_no_network(bare):
    wheel = bare.here / "grpo_nb-0.1.0-py3-none-any.whl"
    wheel.write_text("")
    assert bare(has=str(wheel)) == ([str(wheel)], "", "pip")


def test_what_the_library_needs_is_named_with_the_command(bare):
    asked, said, _ = bare(ROOT / "nbs/training", without=NEEDS)
    assert not asked
    assert said == "ImportError: grpo_nb needs what is not here; run: %pip install " + " ".join(
        NEEDS
    )


@pytest.mark.parametrize("name", ["user", "repo", "branch"])
def test_the_addresses_of_every_page_are_those_of_settings_ini(tmp_path, name):
    (tmp_path / "nbs").symlink_to(ROOT / "nbs")
    (tmp_path / "index.ipynb").symlink_to(ROOT / "index.ipynb")
    text = (ROOT / "settings.ini").read_text()
    changed = re.sub(rf"(?m)^{name} = .*$", f"{name} = another", text)
    (tmp_path / "settings.ini").write_text(changed)
    tool = [sys.executable, ROOT / "tools/course.py", "--check", "--root", tmp_path]
    said = subprocess.run(tool, capture_output=True, text=True).stderr
    assert f"{PAGE}: badge, links, install cell or table row out of date" in said


def test_the_cell_is_folded_in_colab_and_jupyter():
    cell = json.loads((ROOT / PAGE).read_text())["cells"][1]
    assert cell["metadata"] == {"cellView": "form", "jupyter": {"source_hidden": True}}
