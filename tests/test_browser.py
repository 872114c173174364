"""The widgets in a real JupyterLab in a real Chromium: each is shown, moved with the keyboard, and
draws something else; a run is steered by its dashboard."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
WIDGETS = sorted(
    p.stem
    for p in (ROOT / "grpo_nb/widgets").glob("[a-z]*.py")
    if f"def {p.stem}_widget" in p.read_text()
)
LESSONS = [
    p
    for p in sorted((ROOT / "nbs").rglob("[0-9]*.ipynb"))
    if p.parent.name not in ("widgets", ".ipynb_checkpoints")
    and any(f"{name}_widget(" in p.read_text() for name in WIDGETS)
]
# no news, no pop-ups, and no cells taken out of the page because they are scrolled away
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
KERNEL = {
    "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}
}  # without it JupyterLab asks
pytestmark = pytest.mark.browser

# what a reader sees of a drawing: matplotlib's SVG has a date and random ids, which are not part of
# the picture
SEEN = (
    "box => [...box.querySelectorAll('.widget-html-content svg :is(path, use, text, tspan), "
    ".widget-html-content p')]\n"
    "    .filter(e => !e.closest('defs, metadata'))\n"
    "    .map(e => [e.tagName, e.getAttribute('d'), e.getAttribute('x'), "
    "e.getAttribute('y'), e.getAttribute('transform'), e.getAttribute('style'), "
    "e.textContent].join())\n"
    "    .join(';')"
)


@pytest.fixture(scope="module")
def chromium():
    "A browser that is installed on this machine."
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not program:
        problem = (
            "no Chromium on this machine (apt-get install chromium), so the widgets are not "
            "tried in a browser"
        )
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        # one for all: what JupyterLab's pages are made of is loaded once
        yield browser.new_context()
        browser.close()


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):
    """A JupyterLab of its own, for as long as the tests run: (its address, the folder that it
    shows)."""
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    for name, values in SETTINGS.items():
        path = home / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": str(ROOT),
    }
    log = (home / "log").open("w+")
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--LabApp.expose_app_in_browser=True",
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options], env=env, stdout=log, stderr=log
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/api").close()
                break
            except OSError:
                time.sleep(0.5)
            if server.poll() is not None:
                break
        else:
            pytest.fail("JupyterLab did not start:\n" + Path(log.name).read_text()[-3000:])
        yield address, folder
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def assert_no_error(page):
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    assert failed.count() == 0, failed.first.inner_text()


@pytest.fixture
def run_notebook(chromium, lab):
    """A function: open a notebook in JupyterLab, run all of its cells, return the page
    (`wait=False`: while they run)."""
    address, folder = lab
    page = chromium.new_page()
    page.set_default_timeout(180_000)
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def run(notebook, wait=True):
        (folder / "lesson.ipynb").write_text(nbformat.writes(notebook))
        page.goto(f"{address}/lab/tree/lesson.ipynb?reset")
        page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status "
            "=== 'idle'"
        )
        page.evaluate(
            ("" if wait else "void ") + "jupyterapp.commands.execute('notebook:run-all-cells')"
        )
        assert_no_error(page)
        return page

    yield run
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    assert not complaints


def move_every_slider(page, name):
    """Press an arrow key on each slider of a widget and press the other to come back; at least one
    must change the picture."""
    from playwright.sync_api import TimeoutError

    box = page.locator(f".grpo-{name}-viz").first
    box.locator("svg").first.wait_for()
    start, moved = box.evaluate(SEEN), 0
    assert start
    for handle in box.locator(".noUi-handle").all():
        at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        there, back = ("ArrowLeft", "ArrowRight") if at_end else ("ArrowRight", "ArrowLeft")
        handle.focus()
        page.keyboard.press(there)
        try:
            page.wait_for_function(
                f"([box, start]) => ({SEEN})(box) !== start",
                arg=[box.element_handle(), start],
                timeout=2_500,
            )
        except TimeoutError:
            pass  # this one may have nothing to say at these values; the sum is checked below
        else:
            moved += box.locator("svg").count()
        assert box.evaluate(SEEN), f"the drawing of {name}_widget is gone"
        page.keyboard.press(back)
        page.wait_for_function(
            f"([box, start]) => ({SEEN})(box) === start", arg=[box.element_handle(), start]
        )
    assert moved, f"no slider of {name}_widget changes the picture"


def test_every_widget_follows_its_sliders(run_notebook):
    "All of them in one notebook, as in a lesson that shows several."
    cells = [
        nbformat.v4.new_code_cell(
            f"from grpo_nb.widgets.{name} import {name}_widget\n{name}_widget()"
        )
        for name in WIDGETS
    ]
    page = run_notebook(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL))
    assert {"advantages", "batch", "board", "chunks", "clipping", "masks", "memory"} <= set(WIDGETS)
    for name in WIDGETS:
        move_every_slider(page, name)


def test_memory_widget_follows_its_lists_and_switches(run_notebook):
    cells = [
        nbformat.v4.new_code_cell(
            "from grpo_nb.widgets.memory import memory_widget\nmemory_widget()"
        )
    ]
    page = run_notebook(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL))
    box = page.locator(".grpo-memory-viz").first

    def shown(words):
        page.wait_for_function(
            "([box, words]) => box.querySelector('svg')?.textContent.includes(words)",
            arg=[box.element_handle(), words],
        )

    shown("gpt-oss-20b, mxfp4, 8,192 tokens: does not fit")
    for label in ("offload the embedding", "offload layer inputs"):
        box.get_by_label(label).or_(box.locator("label", has_text=label)).first.click()
    shown("gpt-oss-20b, mxfp4, 8,192 tokens: fits")
    for list_number, option, words in (
        (0, "Phi-4", "Phi-4, nf4"),
        (1, "H200", "H200: 139.8 GiB"),
        (2, "16 bit", "Phi-4, bf16"),
    ):
        box.locator("select").nth(list_number).select_option(option)
        shown(words)


def test_rewards_widget_judges_what_is_pasted(run_notebook):
    cells = [
        nbformat.v4.new_code_cell(
            "from grpo_nb.widgets.rewards import rewards_widget\nrewards_widget()"
        )
    ]
    page = run_notebook(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL))
    box = page.locator(".grpo-rewards-viz").first

    def shown(words):
        page.wait_for_function(
            "([box, words]) => box.querySelector('table')?.innerText.includes(words)",
            arg=[box.element_handle(), words],
        )

    shown("the last number is 7, and 46 is right")
    box.locator("select").nth(1).select_option("right")
    shown("the last number is 46, which is right")
    row, completion = (box.locator("textarea").nth(k) for k in (0, 1))
    page.wait_for_function(
        "area => area.value.includes('46')", arg=completion.element_handle()
    )  # the example stands in the box before it is overwritten
    completion.fill('<img src=x onerror="document.title=1"> 12')
    completion.dispatch_event("change")  # what leaving the field does
    box.get_by_role("button", name="Judge").click()
    shown("the last number is 12, and 46 is right")
    assert (
        box.locator("img").count() == 0 and "<img src=x" in box.locator("mark").first.inner_text()
    )
    row.fill('{"answer": "12"}')
    completion.focus()  # leaving the field is enough
    shown("the last number is 12, which is right")
    box.locator("select").nth(0).select_option("GSM8K")
    shown("it is the form of the prompt, line by line")
    box.locator("select").nth(1).select_option("all of them, as a group")
    shown("advantage")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=str(p.relative_to(ROOT)), marks=[pytest.mark.full] * (p != LESSONS[0]))
        for p in LESSONS
    ],
)
def test_lesson_runs_in_jupyterlab_and_shows_its_widget(run_notebook, path):
    """One of them always: what the others run is run by test_repo.py, and each widget is moved
    above."""
    notebook = nbformat.read(path, 4)
    page = run_notebook(notebook)
    source = "\n".join(
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and not cell.source.startswith("#| export")
    )
    for name in WIDGETS:
        if f"{name}_widget(" in source:
            page.locator(f".grpo-{name}-viz svg").first.wait_for()


TRAIN = """
import sys
sys.path.insert(0, {tests!r})
import torch
from grpo_nb.widgets.dashboard import Dashboard
from small_runs import small_trainer

torch.set_num_threads(1)
trainer = small_trainer("run", max_steps=100_000)
dashboard = Dashboard(every=0.2)
dashboard.run(trainer)
"""


def click(page, name):
    page.locator(f".grpo-dashboard-viz button.grpo-{name}").click()


def label(page, pattern):
    "Wait until the dashboard's label matches a regular expression; the step that it shows."
    page.wait_for_function(
        "pattern => document.querySelector("
        "\"[data-mime-type='application/vnd.jupyter.error']\")\n"
        "                              || new RegExp(pattern)"
        ".test(document.querySelector('.grpo-dashboard-viz .grpo-status')?.textContent)",
        arg=pattern,
    )
    assert_no_error(page)
    return int(re.search(r"step (\d+) of", page.locator(".grpo-status").inner_text())[1])


def wait_for_another_picture(page):
    box = page.locator(".grpo-dashboard-viz")
    box.locator("svg").wait_for()
    page.wait_for_function(
        f"([box, start]) => ({SEEN})(box) !== start", arg=[box.element_handle(), box.evaluate(SEEN)]
    )


def test_dashboard_steers_a_run(run_notebook, lab):
    cells = [
        TRAIN.format(tests=str(ROOT / "tests")),
        "output = await dashboard.ended()",
        "output.global_step",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL
    )
    page = run_notebook(notebook, wait=False)
    label(page, r"training.*step [1-9]\d* of")
    wait_for_another_picture(page)
    wait_for_another_picture(page)
    assert page.locator(".grpo-dashboard-viz td").count() > 4  # a heading and completions

    click(page, "pause")  # while the second cell waits
    at = label(page, r"^paused at step (\d+)[^\d].*step \1 of")
    time.sleep(1)
    assert (
        label(page, "^paused") == at and page.locator("button.grpo-pause").inner_text() == "Resume"
    )
    click(page, "pause")
    assert label(page, rf"^training.*step (?!{at} )\d+ of") > at

    click(page, "stop")
    stopped = label(page, "^stopped at step")
    page.locator(
        ".jp-OutputArea-executeResult", has_text=re.compile(rf"\b{stopped}$")
    ).wait_for()  # the cell after the one that waited
    folder = lab[1] / "run"
    assert [p.name for p in folder.glob("checkpoint-*")] == [f"checkpoint-{stopped}"]

    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
    page.get_by_text(f"going on from run/checkpoint-{stopped}").wait_for()
    assert label(page, r"^training.*step (?!0 )\d+ of") >= stopped
    click(page, "stop")
    assert label(page, "^stopped at step") > stopped
    assert len(list(folder.glob("checkpoint-*"))) == 2
