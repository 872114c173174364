"The wheel, alone in an empty environment: what a user gets from pip."

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from venvs import bare, make_once, shared

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.wheel


def run(*command, **options):
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=env, **options
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the source distribution of a copy of the checkout, so that nothing left over from
    an earlier build gets in."""

    def make(out):
        source = out / "source/grpo_nb"
        shutil.copytree(
            ROOT,
            source,
            symlinks=True,
            ignore=shutil.ignore_patterns(
                ".*", "build", "dist", "runs", "*.egg-info", "__pycache__"
            ),
        )
        run(sys.executable, "-m", "build", "--outdir", out, source)

    (made,) = make_once(shared(tmp_path_factory, "dist"), make).glob("*.whl")
    return made


def course():
    "The files that `grpo-nb lessons` copies out of a clone, as it names them."
    from grpo_nb.cli import _course

    paths = [ROOT / "index.ipynb", *(p for name in _course for p in (ROOT / name).rglob("*"))]
    return {
        str(p.relative_to(ROOT))
        for p in paths
        if p.is_file()
        and not p.is_symlink()
        and not {".ipynb_checkpoints", "__pycache__", "site"} & set(p.relative_to(ROOT).parts)
    }


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of commands of an environment that has the wheel and, in the versions that are
    installed here, what the wheel asks for."""

    def make(home):
        problem = bare(home, wheel)
        assert not problem, problem

    return make_once(shared(tmp_path_factory, "empty"), make) / "bin"


def test_wheel_holds_the_library_the_course_and_nothing_else(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    library = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "grpo_nb").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert inside == library | {f"grpo_nb/course/{name}" for name in course()}


def test_an_index_would_take_the_files(wheel):
    "twine reads the metadata, and draws the README as the index does."
    done = run(sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.glob("grpo_nb-*"))
    assert done.count("PASSED") == 2


def test_links_and_pictures_of_the_description_lead_to_the_repository(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [n for n in opened.namelist() if n.endswith("/METADATA")]
        description = opened.read(name).decode().partition("\n\n")[2]
    targets = re.findall(r"\]\(([^()\s]+)\)", re.sub(r"```.*?```", "", description, flags=re.S))
    assert len(targets) > 20 and all(re.match("https:|#|mailto:", to) for to in targets)


def test_lessons_are_copied_out_of_the_wheel(installed, tmp_path):
    said = run(installed / "grpo-nb", "lessons", "course", cwd=tmp_path)
    copied = {str(p.relative_to(tmp_path / "course")) for p in (tmp_path / "course").rglob("*.*")}
    assert course() <= copied and said.endswith("jupyter lab course/index.ipynb\n")


IMPORT_EVERYTHING = (
    """
import grpo_nb, importlib, importlib.util, json, pkgutil
names, refused = [m.name for m in pkgutil.walk_packages(grpo_nb.__path__, "grpo_nb.")], {}
for name in names:
    try: importlib.import_module(name)
    except ImportError as error: refused[name] = str(error)
"""
    'print(json.dumps([len(names), grpo_nb.__file__, [n for n in ("nbdev", "fastcore", '
    '"trl", "pytest") if importlib.util.find_spec(n)], refused]))\n'
)


def test_every_module_imports_without_the_tools_that_wrote_it(installed, tmp_path):
    "Triton is not there on a machine without CUDA, and some modules are made of it."
    count, path, tools, refused = json.loads(
        run(installed / "python", "-c", IMPORT_EVERYTHING, cwd=tmp_path).splitlines()[-1]
    )
    assert count > 10 and path.startswith(str(installed.parent)) and tools == []
    assert {
        "grpo_nb.kernels.training_kernels",
        "grpo_nb.rollout.decode_kernels",
    } <= refused.keys() and all("triton" in sentence for sentence in refused.values())


DEMO_WITHOUT_WARM_UP = """
import sys
from grpo_nb import cli, demo
demo.warmed_up_model = lambda seed, *_, **__: demo.tiny_gpt_oss(seed)
sys.exit(cli.main(["demo", "--steps", "1", "--quiet", "--out", sys.argv[1]]))
"""


def test_demo_runs(installed, tmp_path):
    "Everything that it uses is there; test_demo.py sees it learn."
    run(installed / "python", "-c", DEMO_WITHOUT_WARM_UP, tmp_path / "run", cwd=tmp_path)
    assert {"accuracy_before", "accuracy_after"} <= json.loads(
        (tmp_path / "run/summary.json").read_text()
    ).keys()


def test_doctor_finds_nothing_missing(installed, tmp_path):
    facts = json.loads(run(installed / "grpo-nb", "doctor", "--json", cwd=tmp_path))
    assert all(row["ok"] for row in facts["packages"] if not row["optional"])


def test_the_first_cell_of_a_page_installs_the_wheel_beside_it(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    shutil.copy(wheel, tmp_path)
    page = json.loads((ROOT / "nbs/00_front.ipynb").read_text())
    cell = "".join(page["cells"][1]["source"])
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", cell],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: grpo_nb needs what is not here; run: %pip install torch")
    found = run(
        tmp_path / "venv/bin/python",
        "-c",
        "import grpo_nb; print(grpo_nb.__file__)",
        cwd=tmp_path,
    )
    assert found.startswith(str(tmp_path / "venv"))
