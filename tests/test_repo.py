"""The repository as a whole: every notebook runs, and everything that is made from something else
is in step with it."""

import ast
import base64
import contextlib
import functools
import io
import json
import multiprocessing
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from configparser import ConfigParser
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib import pyplot
from venvs import layered, make_once

import grpo_nb

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [
    ROOT / "index.ipynb",
    *sorted(
        p
        for p in (ROOT / "nbs").rglob("*.ipynb")
        if not p.is_symlink()
        and not any(part.startswith((".", "_")) for part in p.relative_to(ROOT).parts)
    ),
]
MODULES = sorted((ROOT / "grpo_nb").rglob("*.py"))
SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini")
SETTINGS = SETTINGS["DEFAULT"]


def offenders(paths, fault_of):
    "File -> what is wrong with it, of those with which something is."
    found = {str(path.relative_to(ROOT)): fault_of(path) for path in paths}
    return {name: fault for name, fault in found.items() if fault}


def test_nothing_is_larger_than_its_ceiling():
    size = runpy.run_path(str(ROOT / "tools/size.py"))
    assert not size["too_large"](size["measured"](ROOT))


# Every notebook runs


def run_notebook(path, flags, answer):
    """In a process of its own: run the cells of a notebook as nbdev_test does, send back what went
    wrong."""
    from nbdev.test import test_nb

    os.environ["IN_TEST"] = "1"
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        passed, _ = test_nb(path, skip_flags=flags, basepath=ROOT)
    answer.send(None if passed else printed.getvalue()[-6000:])


@pytest.fixture(scope="module")
def server():
    """Processes forked from one that has imported the slow packages but has run nothing: a fresh
    state for each notebook, in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "transformers",
            "peft",
            "datasets",
            "pandas",
            "matplotlib.pyplot",
            "ipywidgets",
            "nbdev.test",
        ]
    )
    return context


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "notebook",  # test_one_page.py runs the page that is left out, with fewer steps
    [
        pytest.param(p, id=str(p.relative_to(ROOT)))
        for p in NOTEBOOKS
        if p.name != "00_grpo_on_one_page.ipynb"
    ],
)
def test_notebook_runs(server, notebook, minutes=10):
    mine, theirs = server.Pipe(duplex=False)
    process = server.Process(
        target=run_notebook, args=(notebook, SETTINGS["tst_flags"].split(), theirs)
    )
    process.start()
    theirs.close()
    if not mine.poll(60 * minutes):
        process.kill()
        pytest.fail(f"still running after {minutes} minutes")
    try:
        failure = mine.recv()
    except EOFError:
        failure = "the process that ran the notebook died"
    process.join(10)
    if process.is_alive():
        process.kill()
    if failure:
        pytest.fail(failure, pytrace=False)


def test_tutorials_ask_colab_for_a_t4():
    def fault(notebook):
        metadata = json.loads(notebook.read_text())["metadata"]
        asked = metadata.get("accelerator"), metadata.get("colab", {}).get("gpuType")
        return asked != ("GPU", "T4") and asked

    tutorials = [p for p in NOTEBOOKS if p.parent.name == "tutorials"]
    assert tutorials and not offenders(tutorials, fault)


# Notebooks and library are in step


@pytest.fixture
def checkout(tmp_path):
    "A copy of what nbdev reads, with no library in it."
    for name in ("settings.ini", "pyproject.toml", "index.ipynb"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "nbs",
        tmp_path / "nbs",
        symlinks=True,
        ignore=shutil.ignore_patterns(".ipynb_checkpoints"),
    )
    return tmp_path


def contents(folder, pattern):
    return {
        str(p.relative_to(folder)): p.read_text()
        for p in sorted(folder.rglob(pattern))
        if not any(part.startswith(".") for part in p.parts[-2:])
    }


def assert_same(made, kept, advice):
    different = sorted(
        name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name)
    )
    assert not different, f"{advice}: {', '.join(different)}"


def run(command, folder):
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_export_from_nothing_gives_the_library(checkout):
    run([Path(sys.executable).parent / "nbdev_export"], checkout)
    assert_same(
        contents(checkout / "grpo_nb", "*.py"),
        contents(ROOT / "grpo_nb", "*.py"),
        "run nbdev_export (or remove what no notebook exports)",
    )


def test_notebooks_are_clean(checkout):
    run([Path(sys.executable).parent / "nbdev_clean"], checkout)
    assert_same(
        contents(checkout, "*.ipynb"),
        {str(p.relative_to(ROOT)): p.read_text() for p in [*NOTEBOOKS, ROOT / "nbs/index.ipynb"]},
        "run nbdev_clean",
    )


@pytest.fixture(scope="session")
def nbdev3():
    "Commands of nbdev 3, in an environment that is made once."

    def make(home):
        problem = layered(home, "nbdev==3.3.26")
        if not problem:
            return
        problem = f"nbdev 3.3.26 could not be installed, so its export is not compared:\n{problem}"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)

    return (
        make_once(ROOT / ".cache" / "nbdev-3.3.26-py{}{}".format(*sys.version_info), make) / "bin"
    )


def test_nbdev_3_exports_the_same_library(checkout, nbdev3):
    run([nbdev3 / "nbdev-export"], checkout)
    assert_same(
        contents(checkout / "grpo_nb", "*.py"),
        contents(ROOT / "grpo_nb", "*.py"),
        "nbdev 3 exports something else",
    )


def test_version_is_written_once():
    front = json.loads((ROOT / "nbs/00_front.ipynb").read_text())
    written = re.search(
        r'^__version__ = "(.+)"$',
        "\n".join("".join(cell["source"]) for cell in front["cells"]),
        re.M,
    )
    assert grpo_nb.__version__ == SETTINGS["version"] == written[1]


def test_addresses_are_written_once():
    address = SETTINGS["git_url"] % {"user": SETTINGS["user"], "repo": SETTINGS["repo"]}
    assert grpo_nb.__web__ == f"{address}/blob/{SETTINGS['branch']}"
    assert f'Repository = "{address}"' in (ROOT / "pyproject.toml").read_text()  # for nbdev 3
    by_hand = [ROOT / "setup.py", *(ROOT / "tools").glob("*.py")]
    assert not [path for path in by_hand if address in path.read_text()]


# Made from the notebooks


@pytest.mark.parametrize("tool", ["readme.py", "course.py", "diagrams.py", "bars.py"])
def test_made_files_are_in_step(tool):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def course(checkout):
    """The course tool at work on a copy: call it with its options, get (exit status, what it
    complains about)."""

    def call(*options):
        done = subprocess.run(
            [sys.executable, ROOT / "tools/course.py", "--root", checkout, *options],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    assert call()[0] == 0
    return call


def edit(path, change):
    "Write a notebook back after `change(cells)`, as an editor would."
    notebook = json.loads(path.read_text())
    change(notebook["cells"])
    path.write_text(json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n")


def test_course_tool_is_idempotent_and_keeps_ids_and_outputs(checkout, course):
    before = contents(checkout, "*.ipynb")
    assert (
        course() == (0, "")
        and course("--check") == (0, "")
        and contents(checkout, "*.ipynb") == before
    )
    front = checkout / "nbs/00_front.ipynb"
    edit(
        front,
        lambda cells: (
            cells[0].update(source=["# Front\n", "\n", "> A line\n", "\n", "And more."]),
            cells.pop(1),
        ),
    )
    ids = [cell["id"] for cell in json.loads(front.read_text())["cells"]]
    assert course("--check")[0] == 1 and course() == (0, "")
    cells = json.loads(front.read_text())["cells"]
    assert [cell["id"] for cell in cells if cell["id"] != "colab-install"] == ids and cells[1][
        "id"
    ] == "colab-install"
    source = "".join(cells[0]["source"])
    assert source.startswith(
        "# Front\n\n> A line\n\n<!-- course -->\n\n[![Open In Colab]"
    ) and source.endswith("<!-- /course -->\n\nAnd more.")
    assert any(cell.get("outputs") for cell in cells)


@pytest.mark.parametrize(
    "harm, complaint",
    [
        (
            lambda root: (
                (root / "nbs/lessons").mkdir(exist_ok=True)
                or shutil.copy(root / "nbs/00_front.ipynb", root / "nbs/lessons/99_new.ipynb")
            ),
            "nbs/lessons/99_new.ipynb is not listed",
        ),
        (
            lambda root: (root / "nbs/00_front.ipynb").unlink(),
            "nbs/00_front.ipynb, which does not exist",
        ),
        (
            lambda root: edit(
                root / "index.ipynb",
                lambda cells: cells.append(
                    {**cells[0], "source": ["| [x](nbs/00_front.ipynb) | |"]}
                ),
            ),
            "more than once",
        ),
        (
            lambda root: edit(
                root / "nbs/00_front.ipynb",
                lambda cells: cells[0].update(source=["# front\n", "A line\n"]),
            ),
            "must be markdown and open with",
        ),
        (
            lambda root: edit(
                root / "nbs/00_front.ipynb",
                lambda cells: cells[0].update(source=["# Back\n", "\n", "> A line\n"]),
            ),
            "out of date",
        ),
        (
            lambda root: edit(
                root / "nbs/00_front.ipynb",
                lambda cells: cells[0].update(source=["# back\n", "\n", "> A line\n"]),
            ),
            "opens with a small letter",
        ),
        (
            lambda root: edit(
                root / "nbs/00_front.ipynb",
                lambda cells: cells[0].update(source=["# Losses\n", "\n", "> A line\n"]),
            ),
            "have one title, 'Losses'",
        ),
        (
            lambda root: edit(
                root / "index.ipynb",
                lambda cells: [
                    cell.update(
                        source="".join(cell["source"])
                        .replace("widgets/01_pull", "widgets/0x")
                        .replace("widgets/03_batch", "widgets/01_pull")
                        .replace("widgets/0x", "widgets/03_batch")
                    )
                    for cell in cells
                ],
            ),
            "lists nbs/widgets/01_pull.ipynb after nbs/widgets/03_batch.ipynb",
        ),
    ],
    ids=["unlisted", "missing", "twice", "no title", "renamed", "small", "taken", "numbers"],
)
def test_course_check_finds(checkout, course, harm, complaint):
    harm(checkout)
    status, said = course("--check")
    assert status == 1 and complaint in said


def test_readme_check_finds_a_change(checkout):
    tool = [sys.executable, ROOT / "tools/readme.py", "--root", checkout]
    subprocess.run(tool, check=True, capture_output=True)
    assert subprocess.run([*tool, "--check"]).returncode == 0
    edit(checkout / "index.ipynb", lambda cells: cells[0].update(source=["# another title"]))
    assert subprocess.run([*tool, "--check"], capture_output=True).returncode == 1


def test_the_script_in_the_readme_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(script.replace("max_steps=100", "max_steps=30"), {})
    log = (tmp_path / "sums/log.jsonl").read_text().splitlines()
    shares = [json.loads(line)["reward"] for line in log if '"reward"' in line]
    assert shares[0] < 0.1 and shares[-1] > 4 * shares[0]


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / "README.md").read_text())
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_what_an_index_shows_has_no_relative_links(monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **settings: given.update(settings))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    links = re.findall(r"\]\(([^)\s]+)", given["long_description"])
    relative = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / "README.md").read_text())
    assert relative and all(re.match(r"https?://|#", link) for link in links)
    web = SETTINGS["git_url"] % {"user": SETTINGS["user"], "repo": SETTINGS["repo"]}
    ours = re.findall(rf"{web}/(?:blob|raw)/main/([^)#\s]+)", given["long_description"])
    assert set(relative) <= set(ours)
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", given["long_description"])
    assert any("/raw/main/docs/diagrams/" in picture for picture in pictures)
    assert not [picture for picture in pictures if "/blob/" in picture]


def paths_of(page):
    "Every path in a page, from the root: of its links, and in the commands that it gives."
    text = page.read_text()
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    yield from ((page.parent / link).resolve() for link in links)
    for code in re.findall(r"`([^`]+)`", text):
        yield from (
            ROOT / word for word in code.split() if re.match(r"(tests|nbs|tools|bench)", word)
        )


def test_paths_of_where_do_i_change_lead_somewhere():
    paths = list(paths_of(ROOT / "docs/where.md"))
    assert len(paths) > 50 and not [path for path in paths if not path.exists()]
    for page in ("CONTRIBUTING.md", "README.md"):
        assert "docs/where.md" in (ROOT / page).read_text()


# What is stored in a notebook


def is_xml(data):
    "Whether a drawing among the forms of an output, if there is one, can be read."
    try:
        return ElementTree.fromstring("".join(data.get("image/svg+xml", "<svg/>"))) is not None
    except ElementTree.ParseError:
        return False


def faults_of_outputs(notebook):
    "What a reader of a page would stumble over."
    stored = json.loads(notebook.read_text())
    outputs = [output for cell in stored["cells"] for output in cell.get("outputs", [])]
    text, shown = json.dumps(outputs), [output.get("data", {}) for output in outputs]
    opening = "".join(stored["cells"][0]["source"])
    faults = {
        "no stored output: run python tools/notebooks.py run on it": not outputs,
        "a stored traceback": any(o["output_type"] == "error" for o in outputs),
        "temporary folders: run python tools/notebooks.py shorten on it": re.search(
            r"/(?:tmp|T)/tmp[a-z0-9_]{8}\b", text
        ),
        "stored widget state, which GitHub refuses to draw": "widgets" in stored["metadata"],
        "a stored widget, empty without a kernel": any(
            "application/vnd.jupyter.widget-view+json" in data for data in shown
        ),
        "a stored path of the machine it was run on": "site-packages" in text,
        "a drawing that is no XML": not all(map(is_xml, shown)),
        "a figure that JupyterLab shows on trusted pages alone": any(
            "<Figure" in "".join(d.get("text/plain", "")) and "image/png" not in d for d in shown
        ),
        "no opening of `# title`, an empty line, `> one line`": not re.match(
            r"# .+\n\n> .+(\n|$)", opening
        ),
    }
    return [fault for fault, there in faults.items() if there]


def test_notebooks_read_well_without_running():
    assert len(NOTEBOOKS) > 50 and not offenders(NOTEBOOKS, faults_of_outputs)


def drawn(drawing):
    "How often each element is there, and what is written, of a drawing without its metadata."
    parts = list(ElementTree.fromstring(re.sub("(?s)<metadata>.*</metadata>", "", drawing)).iter())
    return Counter(part.tag for part in parts), [(part.text or "").strip() for part in parts]


@pytest.mark.parametrize("count", [3, 3000])
def test_a_figure_is_stored_as_lines_too_where_they_are_few_with_all_that_is_drawn(count):
    tools, dots = runpy.run_path(str(ROOT / "tools/notebooks.py")), random.Random(0)
    figure, axes = pyplot.subplots(figsize=(3, 2))
    axes.scatter(*([dots.random() for _ in range(count)] for _ in "xy"))
    axes.set(title="two lines\nof $x^2$", xlabel="1.2345 & more", yticks=[0.1255, 0.9275])
    forms = {"png": io.BytesIO(), "svg": io.BytesIO()}
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        for kind, stream in forms.items():
            figure.savefig(stream, format=kind)
    pyplot.close(figure)
    drawing = forms["svg"].getvalue().decode()
    points = base64.b64encode(forms["png"].getvalue()).decode()
    data = {"image/png": points, "image/svg+xml": drawing}
    tools["with_lines"]({"data": data})
    assert data.pop("image/png") == points and len(data) == (count == 3)
    short = tools["shorter"](drawing)
    assert drawn(short) == drawn(drawing) and len(short) < 0.9 * len(drawing)


# Every module has a name and a test file of its own

IN_PARTS = [p for p in MODULES if len(p.relative_to(ROOT).parts) == 3 and p.stem != "__init__"]


def test_modules_have_a_test_file_of_their_name():
    def fault(module):
        path = ROOT / "tests" / module.parent.name / f"test_{module.stem}.py"
        if not path.exists():
            return f"no {path.relative_to(ROOT)}"
        tests = any(is_test(node) for node in ast.walk(ast.parse(path.read_text())))
        return None if tests else f"no test in {path.relative_to(ROOT)}"

    assert len(IN_PARTS) > 50 and not offenders(IN_PARTS, fault)


def is_test(node):
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def test_no_two_modules_have_one_name():
    "A widget may have the name of what it shows."
    names = [p.stem for p in IN_PARTS if p.parent.name != "widgets"]
    assert sorted(names) == sorted(set(names))


# What may import what (data and imports flow one way)

ARROWS = {  # subpackage -> what it may import of ours, besides itself
    "kernels": [],
    "algorithm": ["kernels"],
    "model": ["kernels"],
    "rollout": ["model", "kernels", "algorithm.logprobs"],
    "serving": ["rollout", "model", "algorithm.logprobs"],
    "environments": [],
    "training": ["kernels", "algorithm", "model", "rollout", "serving", "environments"],
    "planning": ["model", "training.config"],
    "compat": ["rollout", "serving", "model", "training", "environments.sandbox"],
    "widgets": ["algorithm", "model", "rollout", "environments", "training", "planning"],
}


@functools.cache
def imports(path):
    "The full names of all modules that a file imports anywhere, `from a import b` as a and a.b."
    return [*imported(path)]


def imported(path):
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def packages(path):
    "The names that stand before the first dot in a file's imports."
    return {name.split(".")[0] for name in imports(path)}


def test_the_library_does_not_need_the_tools_that_write_it():
    tools = {"nbdev", "fastcore", "execnb", "trl", "pytest", "IPython"}
    assert len(MODULES) > 50 and not offenders(MODULES, lambda path: packages(path) & tools)


def upward(path):
    "Imports of a module from rooms that its own may not use."
    inside = path.relative_to(ROOT / "grpo_nb").parts
    if len(inside) == 1:
        return []  # the front door, the commands and the demo may use every room
    ours = {name.removeprefix("grpo_nb.") for name in imports(path) if name.startswith("grpo_nb.")}
    name = f"{inside[0]}.{path.stem}"
    allowed = [inside[0], *ARROWS[inside[0]], *ARROWS.get(name, [])]
    return sorted(
        name for name in ours if not any(f"{name}.".startswith(f"{room}.") for room in allowed)
    )


def test_imports_point_one_way():
    assert not offenders(MODULES, upward)


def uses(path):
    "Modules of ours that one imports, in functions too; a name of the front door is its module's."
    door = {f"grpo_nb.{name}": f"grpo_nb.{module}" for name, module in grpo_nb._rooms.items()}
    return {door.get(name, name) for name in imports(path)}


BY_NAME = {  # modules that import ours by a name in a string, and why
    "grpo_nb": "the front door looks a name up for whoever asks, and needs nothing itself",
    "grpo_nb.kernels.compile_together": "a kernel first met while launches are noted would be run",
}


def test_no_imports_in_a_circle():
    graph, by_name = {}, set()
    for path in MODULES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = uses(path)
        by_name |= {name} if re.search(r'import_module\(f?"grpo_nb', path.read_text()) else set()
    circle = None
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle is None and "grpo_nb.rollout.module_decoding" in graph["grpo_nb.rollout.engine"]
    assert by_name == set(BY_NAME)


def test_algorithm_is_torch_and_the_standard_library():
    allowed = {"torch", "grpo_nb", *sys.stdlib_module_names}
    own = [path for path in MODULES if path.parent.name == "algorithm"]
    assert own and not offenders(own, lambda path: packages(path) - allowed)


# The front door


def test_import_is_instant_and_loads_nothing_heavy():
    code = (
        "import time; t = time.perf_counter(); import grpo_nb, sys; "
        "print(time.perf_counter() - t, *sys.modules)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert min(float(run[0]) for run in runs) < 0.5
    assert not {
        "torch",
        "transformers",
        "peft",
        "datasets",
        "accelerate",
        "matplotlib",
        "ipywidgets",
        "numpy",
    } & set(runs[0][1:])


def test_public_names_resolve():
    def whole(name):
        found, place = getattr(grpo_nb, name), f"grpo_nb.{grpo_nb._rooms[name]}"
        there = found is getattr(import_module(place), name) and name in dir(grpo_nb)
        return there and found.__module__ == place and found.__doc__

    assert grpo_nb.__all__ and not [name for name in grpo_nb.__all__ if not whole(name)]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrane'"):
        _ = grpo_nb.GRPOTrane
