"""The widgets in a real Chromium. Those that need no kernel stand on a page without one: every
control moves the picture, at every width. In a real JupyterLab each is shown, moved with the
keyboard, and draws something else; a run is steered by its dashboard."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
WIDGETS = {  # name -> the module that holds it
    name: p.stem
    for p in sorted((ROOT / "grpo_nb/widgets").glob("[a-z]*.py"))
    for name in re.findall(r"^def ([a-z]\w*)_widget\(", p.read_text(), re.M)
}
COMPONENTS = sorted(WIDGETS)  # none needs a kernel
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
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # what lessons read of a clone
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


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory):
    """A page without a kernel that shows the components, as any site can: (page, its
    complaints)."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "grpo_nb/widgets/js", folder / "js")
    places = "".join(f'<div data-widget="{name}">{name}</div>' for name in COMPONENTS)
    (folder / "index.html").write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>widgets</title>{places}'
        '<script type="module" src="js/mount.js"></script>'
    )
    (folder / "favicon.ico").touch()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page, complaints = chromium.new_page(), []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    address = f"http://127.0.0.1:{server.server_port}/"
    page.on("request", lambda r: r.url.startswith(address) or complaints.append(r.url))
    page.goto(address)
    page.wait_for_function(
        f"document.querySelectorAll('[data-mounted]').length === {len(COMPONENTS)}"
    )
    yield page
    page.close()
    server.shutdown()
    assert not complaints


def a_run(name, updates, start, won=2):
    "A run as the board holds it, whose reward rises and whose completions shrink."
    steps = range(1, updates + 1)
    drawn = [{"rewards": {"right": float(k)}, "advantage": k - 0.5} for k in range(2)]
    texts = [{"step": s, "prompt": "2+3=", "completion": f"<b>{s}</b>"} for s in (1, updates)]
    problem = {"prompt": "12 eggs?", "answer": "18", "before": "3 + 4 <i>", "after": "16 - 7"}
    run = {
        "name": name,
        "curves": {
            "reward": [[s, start + s / updates / 2] for s in steps],
            "completions/mean_length": [[s, 40 / s] for s in steps],
            "entropy": [[s, 1 / (s + 3)] for s in steps],
            "frac_reward_zero_std": [[s, 0.4] for s in steps],
        },
        "samples": [text | one for text in texts for one in drawn],
    }
    judged = {"before": 0.25, "after": 0.5, "of": "20 problems", "won": [problem] * won}
    return run | judged | {"lost": [problem | {"after": "lost"}]} if won else run


TASK = {
    "words": "go to the first update with fewer than 5 tokens.",
    "done": "Nine updates.",
    "run": 1,
    "curve": "completions/mean_length",
    "below": 5,
}
SUMS = {
    "prompt": "12+34=",
    "row": '{"answer": "46"}',
    "functions": [f"{name}_reward" for name in ("number_found", "correct_number", "exact_answer")],
    "weights": [1, 1, 1],
    "examples": {"talkative": "46, as on page 7.", "right": "46"},
}
STORED = {  # of a task whose functions need Python
    **SUMS,
    "functions": ["of_python", "of_another"],
    "weights": [2, 1],
    "examples": {"one": "a text", "other": "another"},
    "judged": {"one": [[0.5, "a reason", [["place", 2, 6]], ""], [0, "none", [], ""]]},
}
START = {"dashboard": {"runs": [a_run("one", 12, 0.1), a_run("two", 30, 0.3)], "task": TASK}}
START["board"] = {"moves": "SADW" * 9}
START["rewards"] = {
    "tasks": {"sums": SUMS, "stored": STORED},
    "names": ["sums", "stored"],
    "text": "46, as on page 7.",
    "weights": [1, 1, 1],
}


@pytest.fixture
def widget(site):
    "A function: name -> its root, begun anew."

    def begin(name, **values):
        values = START.get(name, {}) | values
        site.set_viewport_size({"width": 800, "height": 900})
        site.evaluate(
            """async ([name, values]) => {
              const { mount } = await import('/js/mount.js');
              const place = document.querySelector(`[data-widget=${name}]`);
              window.model = await mount(place, name, values);
            }""",
            [name, values],
        )
        root = site.locator(f".grpo-{name}-viz")
        root.locator("details").evaluate_all("all => all.forEach(fold => { fold.open = true; })")
        return root

    return begin


def settled(root):
    "What a reader sees, once all that was changed is drawn."
    return root.evaluate(
        """async root => {
          const frame = () => new Promise(requestAnimationFrame);
          await frame(); await frame();
          return root.querySelector('.picture').innerHTML + root.innerText;
        }"""
    )


MOVED = dict(
    advantages=6,
    batch=7,
    board=1,
    chunks=7,
    clipping=11,
    dashboard=4,
    luck=2,
    masks=4,
    memory=20,
    pacman=0,  # it has buttons
    transcript=4,
    rewards=5,
)


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_control_moves_a_component(widget, name):
    root = widget(name, **({"delta": 2.0} if name == "clipping" else {}))
    moved, start = 0, settled(root)
    for control in root.locator("input:not([type=file]), select, [role=slider]").all():
        kind = control.evaluate("e => e.type || e.getAttribute('role')")
        if kind == "checkbox":
            control.click()
        elif kind == "select-one":
            control.select_option(index=1)
        else:
            control.focus()
            before = float(control.get_attribute("aria-valuenow") or control.input_value())
            most = float(control.get_attribute("aria-valuemax") or control.get_attribute("max"))
            control.press("ArrowLeft" if before >= most else "ArrowRight")
        seen = settled(root)
        assert seen != start, control.evaluate("e => e.outerHTML")
        assert root.locator("svg :is(rect, path, polyline, line)").count() > 4
        root, moved = widget(name, **({"delta": 2.0} if name == "clipping" else {})), moved + 1
        assert settled(root) == start
    assert moved >= MOVED[name]


def test_rewards_are_dragged(widget, site):
    root = widget("advantages", rewards=[1, 0, 0, 0])
    grip = root.get_by_role("slider", name="reward of completion 2")
    root.scroll_into_view_if_needed()
    box = grip.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    site.mouse.move(x, y)
    site.mouse.down()
    site.mouse.move(x, y - 70)  # half of the picture's height
    site.mouse.up()
    settled(root)
    assert site.evaluate("model.get('rewards')") == [1, 0, 0.5, 0]
    assert "Completion 2: reward 0.50, +0.13 from the mean" in root.locator(".detail").inner_text()
    root.get_by_role("button", name="All are equal").click()
    settled(root)
    assert "nothing to learn" in root.locator(".caption").inner_text()


def test_a_border_is_dragged_and_a_doubt_is_mended(widget, site):
    root = widget("clipping", delta=2.0)
    grip = root.get_by_role("slider", name="border δ").first
    root.scroll_into_view_if_needed()
    box = grip.locator("circle").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    site.mouse.move(x, y)
    site.mouse.down()
    site.mouse.move(x - 84, y)
    site.mouse.up()
    settled(root)
    delta = site.evaluate("model.get('delta')")
    assert 1.0 <= delta < 1.28
    assert f"delta is {delta:g}, not above 1 + epsilon" in root.get_by_role("alert").inner_text()
    root.get_by_role("button", name="delta = None").click()
    settled(root)
    assert site.evaluate("model.get('delta')") is None and root.get_by_role("alert").count() == 0
    site.mouse.move(x, y - 100)
    settled(root)
    assert re.search(r"At ratio \d\.\d\d: A = \+1: objective", root.inner_text())


def test_an_illegal_batch_keeps_its_picture_and_is_mended_by_a_chip(widget, site):
    root = widget("batch")
    settled(root)
    picture = root.locator(".picture").inner_html()
    root.locator("[data-control=num_generations]").press("ArrowRight")
    settled(root)
    assert root.locator(".picture").inner_html() == picture
    assert "refused" in root.get_attribute("class")
    assert "which is not a multiple of num_generations 5" in root.get_by_role("alert").inner_text()
    root.get_by_role("button", name="num_generations = 6").click()
    settled(root)
    assert "refused" not in root.get_attribute("class")
    assert root.locator(".picture").inner_html() != picture


def test_a_square_is_pointed_at_and_the_micro_batches_are_played(widget, site):
    root = widget("batch")
    picture = root.get_by_role("application")
    picture.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        picture.press(key)
    settled(root)
    said = root.locator(".detail").inner_text()
    pattern = r"Completion 0 of prompt 1: reward [01], advantage [+−][\d.]+\. Process 0, cycle 0"
    assert re.match(pattern, said) and "step 1; it counts in update 1" in said
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    site.mouse.move(box["x"] + 40, box["y"] + 36)
    settled(root)
    assert root.locator(".detail").inner_text().startswith("Completion 0 of prompt 0")
    picture.press("Escape")
    step = root.get_by_role("button", name="Step")
    said = []
    for _ in range(4):
        step.click()
        settled(root)
        said.append(root.locator(".detail").inner_text())
    assert "1 of 4 micro-batches" in said[0] and "moved 0 times" in said[2]
    assert "the weights move (1 time by now)" in said[3]
    root.get_by_role("button", name="Play").click()
    assert root.get_by_role("button", name="Pause").count() == 1
    site.wait_for_function(
        "document.querySelector('.grpo-batch-viz .detail').innerText.includes('Cycle 1, step 1')"
    )
    root.get_by_role("button", name="Show all").click()
    assert root.get_by_role("button", name="Play").count() == 1


def test_a_query_tells_its_keys_and_a_chunk_its_bytes(widget, site):
    root = widget("masks")
    picture = root.get_by_role("application")
    picture.press("ArrowUp")
    settled(root)
    assert "Prompt B, query 8 (“a”) reads keys 3 to 8 (6); the naive mask reads key 0 alone." == (
        root.locator(".detail").inner_text()
    )
    root.get_by_role("button", name="Play").click()
    site.wait_for_function("model.get('step') === 3")
    root.get_by_role("button", name="Pause").click()
    root = widget("chunks")
    root.get_by_role("application").press("ArrowDown")
    root.get_by_role("application").press("ArrowDown")
    settled(root)
    said = root.locator(".detail").inner_text()
    assert said.startswith("Chunk 1 of piece 0: rows 2,048 to 4,095 (sequence 0), 2,048 tokens")


def test_a_token_tells_its_owner_and_its_ratio(widget, site):
    root = widget("transcript")
    picture = root.get_by_role("application")

    def detail():
        settled(root)
        return root.locator(".detail").inner_text()

    picture.press("ArrowDown")
    assert detail().startswith("Token 1 of 36, “<|channel|>”, by prompt: nobody drew it")
    picture.press("ArrowDown")
    said = detail()
    assert said.startswith("Token 14 of 36, “c”, by policy: log-prob −0.83 under the policy")
    assert "ratio 1.48" in said and said.endswith("the clip leaves no pull.")
    assert "The clip silences 1." in root.locator(".caption").inner_text()
    root.locator("[data-control=epsilon_high]").fill("0.6")
    assert detail().endswith("Advantage +1.21, pull +1.78.")
    picture.scroll_into_view_if_needed()
    tool = picture.get_by_text("t", exact=True)  # behind <|start|>
    tool.hover()
    assert "by calculator: nobody drew it" in detail()
    for colour, words in (("loss", "not in the loss"), ("pull", "pull +1.21 to +1.78")):
        root.locator("select").select_option(colour)
        settled(root)
        assert words in " ".join(picture.locator("text.quiet").all_text_contents())
    picture.press("Escape")
    assert detail().startswith("Point at a token")


def test_a_card_is_emptied_by_switches_and_the_task_is_checked(widget, site):
    root = widget("memory")

    def said(kind):
        settled(root)
        return root.locator(kind).inner_text()

    assert said(".task").startswith("Your task: fit gpt-oss-20b")
    assert "does not fit" in said(".caption")
    inputs = root.locator("[data-control=offload_activations]")
    site.wait_for_function(
        "document.querySelector('.grpo-memory-viz .gain.frees')?.textContent == '−4.0 GiB'"
    )
    inputs.click()
    assert re.match(r"offload_activations frees 4\.02 GiB: the fullest moment", said(".detail"))
    assert "In host memory: layer inputs 4.2 GiB" in said(".caption")
    root.get_by_role("button", name="Make it fit").click()
    assert said(".task").startswith("Done. gpt-oss-20b with 16,384 tokens fits a T4.")
    assert "It fits" in said(".caption")
    assert site.evaluate("model.get('offload_embedding')")
    root.get_by_role("button", name="Use it").click()
    assert site.evaluate("model.get('context')") > 16_384 and "It fits" in said(".caption")
    root.locator("[data-control=context]").press("Home")
    assert said(".task").startswith("Your task: fit")


def test_a_block_says_its_formula_and_the_step_is_played(widget, site):
    root = widget("memory", moment="load")
    picture = root.get_by_role("application")
    picture.press("ArrowUp")
    settled(root)
    said = root.locator(".detail").inner_text()
    assert said.startswith(
        "weights at “load”: 12.82 GiB. embedding: 0.58 billion numbers × 16 bits"
    )
    assert "experts: 19.11 billion numbers × 4.25 bits = 9.46" in said
    picture.press("ArrowRight")
    picture.press("ArrowUp")
    picture.press("ArrowUp")
    settled(root)
    assert root.locator(".detail").inner_text().startswith("keys and values at “draw”: 0.75 GiB.")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    site.mouse.move(box["x"] + box["width"] * 0.96, box["y"] + 200)
    settled(root)
    assert "in the usual practice" in root.locator(".detail").inner_text()
    site.mouse.move(box["x"] + box["width"] * 0.53, box["y"] + 200)
    site.mouse.down()
    assert site.evaluate("model.get('moment')") == "load"
    site.mouse.move(box["x"] + box["width"] * 0.73, box["y"] + 200)
    site.mouse.up()
    assert site.evaluate("model.get('moment')") == "head"
    root.get_by_role("button", name="Play the step").click()
    site.wait_for_function("model.get('moment') === 'update'")
    site.wait_for_function(
        "document.querySelector('.grpo-memory-viz .play').textContent === 'Play the step'"
    )


DROP = """([root, text]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([text], 'config.json', { type: 'application/json' }));
  root.dispatchEvent(new DragEvent('drop', { dataTransfer: transfer, bubbles: true }));
}"""


def bare(site):
    "The page's address without what other tests have moved, which is written a moment later."
    site.wait_for_timeout(400)
    site.evaluate("history.replaceState(null, '', '/')")


def test_a_dropped_configuration_is_a_model_and_a_link_holds_it(widget, site):
    bare(site)
    config = dict(
        model_type="llama",
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28_672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        _name_or_path="someone/<b>own</b>-70B",
    )
    root = widget("memory", card="H100")
    site.evaluate(DROP, [root.element_handle(), json.dumps(config)])
    root.locator(".caption", has_text="b>-70B in nf4 on a H100").wait_for()
    assert root.locator(".caption b").count() == 0
    root.get_by_role("button", name="Copy a link").click()
    address = site.url
    assert "shape=" in address and "card=H100" in address and "model=" not in address
    before = root.locator(".facts").inner_text()
    site.evaluate("delete document.querySelector('[data-widget=memory]').dataset.mounted")
    root = widget("memory")
    settled(root)
    assert root.locator(".facts").inner_text() == before
    site.evaluate(DROP, [root.element_handle(), '{"model_type": "bert"}'])
    root.locator(".told", has_text="has no num_hidden_layers").wait_for()
    bare(site)


def test_one_change_moves_batch_and_memory(widget, site):
    widget("batch")
    site.evaluate("window.batch = model")
    root = widget("memory")
    root.locator("[data-control=num_generations]").fill("6")
    assert site.evaluate("batch.get('num_generations')") == 6
    site.locator(".grpo-batch-viz [data-control=steps_per_generation]").press("ArrowRight")
    assert site.evaluate("model.get('generation_batch_size')") == 15
    root.locator("[data-control=num_generations]").fill("16")
    assert site.evaluate("batch.get('num_generations')") == 6  # as far as its slider goes


def test_a_run_is_read_update_by_update(widget, site):
    root = widget("dashboard")
    picture = root.get_by_role("application")

    def said(part):
        settled(root)
        return root.locator(part).first.inner_text()

    assert said(".caption").startswith("one, update 12 of 12: reward 0.6; length, tokens 3.33")
    assert said(".result") == "20 problems: 25.0 % before, 50.0 % after."
    picture.press("Home")
    picture.press("ArrowRight")
    assert said(".caption").startswith("one, update 2 of 12: reward 0.183; length, tokens 20")
    assert "completions of update 1 (kept of updates 1, 12)" in said(".samples")
    root.locator("[data-control=run]").press("ArrowRight")
    assert said(".caption").startswith("two, update 30 of 30: reward 0.8;")
    root.locator("[data-control=pair]").press("End")
    assert said("pre") == "3 + 4 <i>" and "lost 1 of 1" in root.inner_text()
    assert root.locator("pre i, pre b").count() == 0  # what a model wrote is text
    assert said(".task") == f"Your task: {TASK['words']}"
    picture.press("Home")
    for _ in range(8):
        picture.press("ArrowRight")
    assert said(".task") == "Done. Nine updates."
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    site.mouse.click(box["x"] + 146, box["y"] + 100)
    assert re.match(r"two, update (1\d|2\d) of 30", said(".caption"))
    assert said(".detail").startswith("reward near update")


def test_what_is_shown_stands_in_the_address(widget, site):
    bare(site)
    place = "document.querySelector('[data-widget=dashboard]')"
    root = widget("dashboard")
    root.locator("[data-control=run]").press("ArrowRight")
    root.get_by_role("application").press("Home")
    site.wait_for_function("location.hash === '#dashboard?run=1&step=1'")
    site.evaluate(f"delete {place}.dataset.mounted")
    root = widget("dashboard")  # as on a page that is opened by that link
    settled(root)
    assert root.locator(".caption").inner_text().startswith("two, update 1 of 30")
    root.locator("[data-control=run]").press("ArrowLeft")
    site.wait_for_function("location.hash === ''")
    for wrong in ("dashboard?run=x", "dashboard?run=%22a%22&order=%22stop%22", "other?run=1"):
        site.evaluate("hash => history.replaceState(null, '', '#' + hash)", wrong)
        site.evaluate(f"delete {place}.dataset.mounted")
        widget("dashboard")
        assert site.evaluate("[model.get('run'), model.get('order')]") == [0, "go"]
    site.evaluate("history.replaceState(null, '', '/')")


def test_a_link_holds_the_widgets_of_a_page(widget, site):
    bare(site)
    root = widget("clipping")
    root.locator("[data-control=epsilon_high]").fill("0.5")
    other = widget("masks")
    other.locator("[data-control=step]").press("End")
    other.get_by_role("button", name="Copy a link").click()
    both = "clipping?epsilon_high=0.5 masks?step=6"
    site.wait_for_function(
        "both => location.hash.slice(1).split('/').sort().join(' ') === both", arg=both
    )
    for name in ("clipping", "masks"):
        site.evaluate(f"delete document.querySelector('[data-widget={name}]').dataset.mounted")
    for name, key, value in (("clipping", "epsilon_high", 0.5), ("masks", "step", 6)):
        widget(name)
        assert site.evaluate("key => model.get(key)", key) == value
    site.evaluate("location.hash = '#masks?step=3'")  # a link on the page itself
    site.wait_for_function("model.get('step') === 3")
    site.evaluate("history.replaceState(null, '', '/')")
    wrong = "batch?num_generations=99&shuffle=1/clipping?delta=%22a%22/advantages?rewards=[1]"
    site.evaluate("hash => history.replaceState(null, '', '#' + hash)", wrong)
    for name in ("batch", "clipping", "advantages"):
        site.evaluate(f"delete document.querySelector('[data-widget={name}]').dataset.mounted")
        before = settled(widget(name))
        assert settled(widget(name)) == before
    site.evaluate("history.replaceState(null, '', '/')")


SOLVED = {  # values that a widget's task asks for
    "advantages": {"rewards": [1] + [0] * 10},
    "batch": {"steps_per_generation": 8},
    "chunks": {"length": 32_768, "logit_chunk_multiplier": 32},
    "clipping": {"epsilon": 1},
    "luck": {"p": 0.00501, "G": 32},
    "masks": {"step": 0, "prompt_a": 5},
    "pacman": {"moves": "ddrruulrdrrururllddrru"},
    "transcript": {"colour": "pull", "epsilon_high": 0.6},
}


@pytest.mark.parametrize("name", SOLVED)
def test_a_task_is_checked_by_the_page(widget, name):
    root = widget(name)
    settled(root)
    assert root.locator(".task").inner_text().startswith("Your task: ")
    root = widget(name, **SOLVED[name])
    settled(root)
    assert root.locator(".task.done").inner_text().startswith("Done. ")


def swipe(site, box, right, down):
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    site.mouse.move(x, y)
    site.mouse.down()
    site.mouse.move(x + right, y + down, steps=3)
    site.mouse.up()


def test_games_are_played_by_keys_swipes_and_buttons(widget, site):
    for name, moves in (("pacman", "rdl"), ("board", "DSA")):
        root = widget(name, moves="")
        picture = root.get_by_role("application")
        picture.scroll_into_view_if_needed()
        picture.press("ArrowRight")
        settled(root)
        swipe(site, picture.bounding_box(), 5, 60)
        settled(root)
        root.get_by_role("button", name="left", exact=True).click()
        assert site.evaluate("model.get('moves')") == moves
    at = "[model.get('moves'), model.get('move')]"
    root.locator("[data-control=move]").press("Home")
    picture.press("ArrowDown")  # from an earlier move another game begins
    assert site.evaluate(at) == ["S", 1]
    root.get_by_role("button", name="play").click()
    site.wait_for_function("model.get('move') > 4")
    root.get_by_role("button", name="Pause").click()
    root = widget("pacman", moves="rrr")
    root.get_by_role("button", name="Take a move back").click()
    assert site.evaluate("model.get('moves')") == "rr"


def test_a_finger_drags_and_swipes_and_the_page_stays(site):
    phone = site.context.browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    page = phone.new_page()
    page.goto(site.url.partition("#")[0])
    page.wait_for_function(
        f"document.querySelectorAll('[data-mounted]').length === {len(COMPONENTS)}"
    )
    send = phone.new_cdp_session(page).send

    def touch(kind, *points):
        send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": list(points)})

    def moved(name, part, down):
        "What the address says of a widget after a stroke from a part of it."
        shape = page.locator(f".grpo-{name}-viz {part}").first
        shape.scroll_into_view_if_needed()
        box, height = shape.bounding_box(), page.evaluate("scrollY")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        touch("touchStart", {"x": x, "y": y})
        for k in range(1, 7):
            touch("touchMove", {"x": x, "y": y + down * k / 6})
        touch("touchEnd")
        page.wait_for_function(f"location.hash.includes('{name}?')")
        assert page.evaluate("scrollY") == height
        return page.evaluate("decodeURIComponent(location.hash)")

    assert "advantages?rewards=[0.5,0,0,0]" in moved("advantages", ".knob", 70)
    assert "board?moves=S&move=1" in moved("board", ".picture svg", 80)
    assert "pacman?moves=d" in moved("pacman", ".picture svg", 60)
    phone.close()


def test_a_log_of_ones_own_is_read_in_the_page(widget, tmp_path):
    root = widget("dashboard")
    records = [{"step": s, "reward": s / 10, "other": "x"} for s in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "not.json").write_text("{")
    root.locator("input[type=file]").set_input_files(tmp_path / "log.jsonl")
    root.locator(".caption", has_text="log.jsonl, update 3 of 3: reward 0.3").wait_for()
    root.locator("input[type=file]").set_input_files(tmp_path / "not.json")
    root.locator(".grpo-status", has_text="not.json cannot be read").wait_for()


def test_a_live_board_has_buttons(widget, site):
    state = {"status": "training", "line": "step 3 of 9", "steered": True, "hints": ["<b>look</b>"]}
    root = widget("dashboard", runs=[a_run("one", 3, 0.1, won=0)], state=state, task={})
    settled(root)
    assert "training · step 3 of 9" in root.inner_text() and "<b>look</b>" in root.inner_text()
    assert "Reward: 0.267 in the first update, 0.6 in the last." in root.inner_text()
    assert "the best of updates 1 and 3" in root.inner_text()
    root.get_by_role("button", name="Pause").click()
    root.get_by_role("button", name="Resume").click()
    assert site.evaluate("model.get('order')") == "go"
    root.get_by_role("button", name="Stop").click()
    settled(root)
    assert root.get_by_role("button", name="Stop").is_disabled()
    assert root.get_by_role("button", name="Read a log of yours").count() == 0
    empty = widget("dashboard", runs=[], task={})
    settled(empty)
    assert "Curves appear after the first update." in empty.inner_text()


def test_a_completion_is_written_and_judged_without_python(widget):
    root = widget("rewards")

    def said(part):
        settled(root)
        return root.locator(part).first.inner_text()

    assert said(".caption") == "Completion 1 of 1 earns −2 points."
    assert "correct_number_reward: the last number is 7, and 46 is right" in said(".reasons")
    assert said(".task").startswith("Your task: earn the full 3 points")
    box = root.get_by_label("completion", exact=True)
    box.fill("<img src=x> 46")
    assert said(".task").startswith("Done.") and root.locator("img").count() == 0
    assert said("mark") == "<img src=x> " and root.locator("mark").last.inner_text() == "46"
    root.locator("[data-control=weight_1]").fill("0")
    assert said(".caption") == "Completion 1 of 1 earns 1 points."
    box.fill("46\n=== next completion ===\n45")
    assert said(".caption") == "Completion 1 of 2 earns 2 points. Its advantage is +0.71."
    root.get_by_role("button", name="Next completion").click()
    assert said(".caption").endswith("Its advantage is −0.71.")
    root.get_by_label("the other columns of the row").fill("[")
    settled(root)
    assert "no JSON object" in root.get_by_role("alert").inner_text()
    root.locator("[data-control=task]").select_option("stored")
    assert said(".caption") == "Completion 1 of 1 earns 1 points." and said("mark") == "text"
    box.fill("changed")
    assert "it needs Python: only the examples are stored here" in said(".reasons")


LONG = [[text, "policy", -1.0, -1.5] for text in "abc<|end|>"] + [["\n", "a tool", -9.0, None]]
LARGEST = {
    "advantages": {"rewards": [0.5, 1.0] * 6, "scale": "batch"},
    "board": {"moves": "SADW" * 400, "move": 900},
    "batch": dict(
        per_device_train_batch_size=8,
        num_generations=8,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        num_iterations=2,
        num_processes=4,
        shuffle=True,
    ),
    "chunks": {"batch": 16, "mini_batch": 16, "logit_chunk_multiplier": 32},
    "clipping": {"delta": 1.1},
    "dashboard": {"runs": [a_run("x" * 40, 200, 0.1, won=9) for _ in range(5)]},
    "luck": {"p": 0.0794, "G": 31},
    "masks": {"step": 6, "window": 5},
    "memory": {"model": "gpt-oss-120b", "num_generations": 64, "per_device_train_batch_size": 16},
    "pacman": {"moves": "rl" * 200},
    "rewards": {"text": "\n=== next completion ===\n".join(["x" * 200 + " 46", "45"] * 4)},
    "transcript": {
        "completions": [
            {
                "title": title,
                "advantage": 1.0,
                "tokens": [["x" * 200, "prompt", None, None], *LONG * 35],
            }
            for title in "ab"
        ]
    },
}
SIZES = """root => {
  const texts = [...root.querySelectorAll('*')].filter(e => e.checkVisibility()
    && [...e.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));
  const inside = e => e.closest('svg, pre, table') !== null;
  return texts.map(e => [parseFloat(getComputedStyle(e).fontSize), inside(e)]);
}"""

OUTSIDE = """root => {
  const box = root.getBoundingClientRect();
  return [...root.querySelectorAll('svg text')].filter(e => {
    const { left, right, bottom } = e.getBoundingClientRect();
    return left < box.left || right > box.right || bottom > box.bottom;
  }).map(e => e.textContent);
}"""


@pytest.mark.parametrize("width", [360, 800, 1400])
def test_components_are_legible_at_every_width(widget, site, width):
    for name, values in LARGEST.items():
        for root in (widget(name, **values), widget(name)):
            site.set_viewport_size({"width": width, "height": 900})
            settled(root)
            sizes = root.evaluate(SIZES)  # [px, whether a picture, a table or code has it]
            assert len(sizes) > 9 and 12 <= min(sizes)[0] and max(sizes)[0] <= 32, name
            assert {size for size, inside in sizes if not inside} == {16}, name
            assert root.evaluate(OUTSIDE) == [], f"{name} at {width} px"
    assert site.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_answers_at_once(widget, name):
    """From a new value to the picture, its layout included, in the largest setting; the fastest of
    nine, for others use the machine too."""
    root = widget(name, **LARGEST[name])
    times = root.evaluate(
        """async root => {
          const input = root.querySelector('input[type=range]');
          const press = root.querySelectorAll('.pad button');
          const times = [];
          for (let i = 0; i < 9; i++) {
            await new Promise(requestAnimationFrame);
            const start = performance.now();
            if (input) input.value = +input.value + (i % 2 ? 1 : -1);
            if (input) input.dispatchEvent(new Event('input'));
            else press[i % 2 ? 1 : 3].click();
            await new Promise(requestAnimationFrame);  // the widget's own is called before this one
            root.getBoundingClientRect();
            times.push(performance.now() - start);
          }
          return times.sort((a, b) => a - b);
        }"""
    )
    assert times[0] < 50, times


def test_components_say_what_they_are(widget, site):
    "A name for everything that can be reached with Tab, and a sentence for every picture."
    for name in COMPONENTS:
        root = widget(name)
        settled(root)
        names = root.evaluate(
            """root => [...root.querySelectorAll('input, select, button, [tabindex]')].map(e =>
              e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || '')"""
        )
        assert len(names) >= 4 and all(names)
        assert len(root.get_by_role("status").inner_text()) > 30
        assert root.get_attribute("aria-label")
        live = root.locator("[aria-live=polite]").count()
        assert live >= 1


def test_components_follow_the_theme(widget, site):
    root = widget("clipping")
    paper = "root => getComputedStyle(root).backgroundColor"
    site.emulate_media(color_scheme="dark")
    assert root.evaluate(paper) == "rgb(22, 25, 29)"
    site.evaluate("document.documentElement.dataset.theme = 'light'")
    assert root.evaluate(paper) == "rgb(255, 255, 255)"
    site.emulate_media(color_scheme="light")
    site.evaluate("delete document.documentElement.dataset.theme")
    site.evaluate("document.body.dataset.jpThemeLight = 'false'")
    assert root.evaluate(paper) == "rgb(22, 25, 29)"
    site.evaluate("delete document.body.dataset.jpThemeLight")


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
    # JupyterLab's own, where its kernel goes before an answer
    assert not [one for one in complaints if "create_subshell_request" not in one]


IN_PYTHON = """async code => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code });
  let told = "";
  future.onIOPub = message => { told += message.content.text ?? ""; };
  await future.done;
  return told.trim();
}"""


def test_every_widget_follows_its_reader(run_notebook):
    """All of them in one notebook, as in a lesson that shows several; components and Python have
    the same values."""
    cells = [
        f"from grpo_nb.widgets.{module} import {name}_widget\n{name} = {name}_widget()\n{name}"
        for name, module in WIDGETS.items()
    ]
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    page = run_notebook(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL))
    for name in COMPONENTS:
        page.locator(f".grpo-{name}-viz svg").first.wait_for()
    page.evaluate(IN_PYTHON, "clipping.epsilon_high = 0.5; advantages.rewards = [0.5, 0.5, 0.5]")
    page.locator(".grpo-clipping-viz", has_text="is silent above 1.50").wait_for()
    page.locator(".grpo-advantages-viz", has_text="there is nothing to learn").wait_for()
    page.locator(".grpo-batch-viz [data-control=num_iterations]").press("ArrowRight")
    page.locator(".grpo-batch-viz", has_text="4 × 2 / 4 = 2").wait_for()
    assert page.evaluate(IN_PYTHON, "print(batch.num_iterations)") == "2"
    page.evaluate(IN_PYTHON, "memory.card = 'L4'")
    page.locator(".grpo-memory-viz .caption", has_text="on a L4").wait_for()
    page.locator(".grpo-memory-viz [data-control=offload_activations]").click()
    page.locator(".grpo-memory-viz .caption", has_text="layer inputs 2.1 GiB").wait_for()
    peak = page.evaluate(IN_PYTHON, "print(f'{memory.plan.totals[\"layer\"] / 2**30:.2f}')")
    assert peak in page.locator(".grpo-memory-viz .facts").inner_text()
    page.locator(".grpo-memory-viz button", has_text="Copy a link").click()
    page.locator(
        ".grpo-memory-viz .told", has_text="06_memory.html#memory?card=L4&offload"
    ).wait_for()
    page.evaluate(IN_PYTHON, "pacman.moves = 'rrd'")
    page.locator(".grpo-pacman-viz .caption", has_text="3 moves").wait_for()
    page.locator(".grpo-board-viz").get_by_role("button", name="left", exact=True).click()
    page.locator(".grpo-board-viz .caption", has_text="Move 1 of 1").wait_for()
    assert page.evaluate(IN_PYTHON, "print(board.moves)") == "A"


def test_rewards_widget_judges_what_is_pasted(run_notebook):
    cells = [
        nbformat.v4.new_code_cell(
            "from grpo_nb.widgets.rewards import rewards_widget\nrewards_widget()"
        )
    ]
    page = run_notebook(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL))
    box = page.locator(".grpo-rewards-viz").first

    def shown(words):
        box.locator(".reasons", has_text=words).wait_for()

    shown("the last number is 7, and 46 is right")
    box.locator("[data-control=example]").select_option("right")
    shown("the last number is 46, which is right")
    box.get_by_label("completion", exact=True).fill('<img src=x onerror="document.title=1"> 12')
    shown("the last number is 12, and 46 is right")
    assert box.locator("img").count() == 0
    box.get_by_label("the other columns of the row").fill('{"answer": "12"}')
    shown("the last number is 12, which is right")
    box.locator("[data-control=task]").select_option("GSM8K")  # Python makes it
    shown("it is the form of the prompt, line by line")
    box.locator("[data-control=example]").select_option("all of them, as a group")
    box.locator("svg", has_text="advantages in the group").wait_for()


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
        if re.search(rf"\b{name}_widget\(", source):  # a board is no dashboard
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
    seen = "document.querySelector('.grpo-dashboard-viz .caption')?.textContent"
    page.wait_for_function(f"/update \\d/.test({seen})")
    page.wait_for_function(f"before => {seen} !== before", arg=page.evaluate(seen))


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
    assert page.locator(".grpo-dashboard-viz .samples details").count() > 4

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

    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    page.reload()  # the kernel holds the board, and the page finds it again
    page.locator(".grpo-dashboard-viz .samples details").first.wait_for()
    assert label(page, "^stopped at step") == stopped
    page.wait_for_function(
        "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
    )
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
    page.get_by_text(re.compile(rf"going on from .*run/checkpoint-{stopped}\b")).wait_for()
    assert label(page, r"^training.*step (?!0 )\d+ of") >= stopped
    click(page, "stop")
    assert label(page, "^stopped at step") > stopped
    assert len(list(folder.glob("checkpoint-*"))) == 2
