"""The learner, in a real Chromium: the page of one file from the disk, on a processor slowed six
times. It learns, collapses and recovers, is linked to, and outlives a bad reward."""

import os
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AXE = "axe-core@4.14.1"
SLOW = 6
WORKER = '<script type="text/plain" id="learner-worker">\n'
# Chromium slows the page, and not its workers: a worker waits here until it took six times as long
SLOWED = """
const [slow, post] = [SLOW, self.postMessage.bind(self)];
let began = 0;
self.addEventListener("message", () => (began = performance.now()));
self.postMessage = (message) => {
  const end = began + slow * (performance.now() - began);
  while (performance.now() < end);
  console.log("slowed");
  post(message);
};
""".replace("SLOW", str(SLOW))
pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def html():
    return runpy.run_path(str(ROOT / "tools/learner.py"))["page"](ROOT)


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if not program:
        problem = "no Chromium on this machine (apt-get install chromium)"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        found = playwright.chromium.launch(executable_path=program, args=arguments)
        yield found
        found.close()


@pytest.fixture
def learner(browser, html, tmp_path):
    "A function that opens the page at 360 px, slowed or not; it may ask for nothing."
    pages, wrong = [], []

    def opened(query="", slow=False, scheme="light", motion="reduce", above=""):
        text = html.replace("<main>", f"<main>{above}")
        if slow:
            text = text.replace(WORKER, WORKER + SLOWED, 1)
            assert SLOWED in text
        (tmp_path / "learn.html").write_text(text)
        page = browser.new_page(
            viewport={"width": 360, "height": 800}, color_scheme=scheme, reduced_motion=motion
        )
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "blob:")) or wrong.append(r.url))
        if slow:
            session = page.context.new_cdp_session(page)
            session.send("Emulation.setCPUThrottlingRate", {"rate": SLOW})
        page.goto((tmp_path / "learn.html").as_uri() + query)
        return page

    yield opened
    for page in pages:
        page.close()  # a run of its own goes on otherwise
    assert not wrong


STEPS = "+document.querySelector('.figures').textContent.match(/update (\\d+)/)[1]"
REWARD = "+document.querySelector('.figures .up').textContent.replace('reward ', '')"


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def seconds_until(page, condition, limit=40):
    "How long a run takes from now, in the page's own time."
    return page.evaluate(
        f"""limit => new Promise((done, fail) => {{
          const began = performance.now();
          const look = () => {{
            const seconds = (performance.now() - began) / 1000;
            if ({condition}) return done(seconds);
            if (seconds > limit) return fail(new Error("not within " + limit + " s"));
            setTimeout(look, 50);
          }};
          look();
        }})""",
        limit,
    )


def slide(page, name, value):
    "Move a slider to one of its values, by keys."
    control = page.locator(f"[data-control={name}]")
    control.press("Home")
    for _ in range(40):
        if control.get_attribute("aria-valuetext") == str(value):
            return
        control.press("ArrowRight")
    raise AssertionError(f"{name} has no place {value}")


def test_the_page_is_small(html):
    assert len(html.encode()) < 200_000


def test_it_learns_collapses_and_recovers_on_a_slow_phone(learner):
    page = learner("?seed=3", slow=True)
    with page.expect_console_message(lambda said: said.text == "slowed"):
        press(page, "Run")
    assert seconds_until(page, f"{REWARD} > 0.9") < 40
    slide(page, "rate", 0.1)
    seconds_until(page, f"{REWARD} < 0.1")
    page.get_by_text("Lower the rate, then go back to the best weights").wait_for()
    slide(page, "rate", 0.002)
    press(page, "Best weights")
    assert seconds_until(page, f"{REWARD} > 0.9") < 40


def test_a_reward_is_hacked_and_the_page_says_so(learner):
    page = learner("?reward=order")
    press(page, "Run")
    page.get_by_text("the policy learnt what is paid, not what was meant").wait_for()


def test_a_link_restores_seed_and_sliders(learner):
    page = learner()
    slide(page, "group", 5)
    slide(page, "rate", 0.005)
    slide(page, "temperature", 1.3)
    slide(page, "seed", 9)
    press(page, "Copy a link")
    assert "learn.html#learner?" in page.url
    again = learner("?" + page.url.partition("?")[2])  # as links of old had it
    press(again, "Copy a link")
    again = learner("#" + again.url.partition("#")[2])
    press(again, "One step")
    again.get_by_text("update 1", exact=True).wait_for()
    values = again.locator("input[type=range]").evaluate_all(
        "all => all.map(e => e.getAttribute('aria-valuetext'))"
    )
    assert values == ["5", "0.005", "0.2", "0", "1.3", "9"]
    assert again.locator(".completions li").count() == 5
    press(page, "One step")
    page.get_by_text("update 1", exact=True).wait_for()
    boxes = [p.locator(".boxes").inner_text() for p in (page, again)]
    assert boxes[0] == boxes[1]
    bad = learner("?rate=7&group=1&seed=x&reward=constructor")
    assert bad.locator("[data-control=rate]").get_attribute("aria-valuetext") == "0.002"


def test_it_starts_when_it_is_seen_and_goes_on_when_it_is_back(learner):
    page = learner(motion="no-preference", above="<div style='height: 2000px'></div>")
    page.wait_for_timeout(300)
    assert page.evaluate(STEPS) == 0
    for more in (3, 6):
        page.locator(".boxes").scroll_into_view_if_needed()
        seconds_until(page, f"{STEPS} >= {more}")
        page.evaluate("scrollTo(0, 0)")
        page.get_by_role("button", name="Run", exact=True).wait_for()  # paused


def test_a_run_is_one_loop_however_often_it_is_begun(learner):
    page = learner()
    page.evaluate("for (let i = 0; i < 9; i++) document.querySelector('button.play').click()")
    began, first = page.evaluate(f"[performance.now(), {STEPS}]")
    seconds_until(page, f"{STEPS} >= 12")
    ended, last = page.evaluate(f"[performance.now(), {STEPS}]")
    assert last - first <= (ended - began) / 160 + 2  # a step at a beat, never two


def test_a_prompt_keeps_the_focus_while_boxes_fill(learner):
    page = learner()
    press(page, "One step")
    chip = page.locator(".prompts button").nth(3)
    chip.press("Enter")
    page.evaluate("document.querySelector('button.play').click()")
    seconds_until(page, f"{STEPS} >= 4")
    assert chip.evaluate("chip => chip === document.activeElement")
    assert chip.get_attribute("aria-pressed") == "true"


def write(page, code):
    "Type a reward of one's own, and leave the field."
    if not page.get_by_role("textbox").is_visible():
        page.get_by_text("choose one, or write your own").click()
    page.get_by_role("textbox").fill(code)
    page.get_by_role("textbox").blur()


def test_a_half_written_reward_is_not_run(learner):
    page = learner()
    write(page, "return 0;")
    press(page, "Run")
    seconds_until(page, f"{STEPS} >= 2")
    page.get_by_role("textbox").fill("return answer[0] === (")
    seen = page.evaluate(STEPS)
    seconds_until(page, f"{STEPS} >= {seen + 3}")
    assert not page.get_by_role("alert").is_visible()


@pytest.mark.parametrize(
    "meddling",
    [
        "self.postMessage('hello');",
        "self.postMessage({ policy: null, report: null });",
        "self.postMessage = () => {};",
        "setTimeout(() => { throw new Error('later'); }, 0);",
        "start = 1;",  # a name of the page's own worker
    ],
)
def test_a_reward_that_meddles_with_its_worker_is_paid_all_the_same(learner, meddling):
    page = learner()
    write(page, f"try {{ {meddling} }} catch {{}} return answer[0] === 'a';")
    press(page, "Run")
    seconds_until(page, f"{STEPS} >= 3")
    assert not page.get_by_role("alert").is_visible()


@pytest.mark.parametrize(
    "spoilt",
    ["self.close();", "Float32Array.prototype.subarray = null;"],
)
def test_another_reward_has_a_fresh_worker(learner, spoilt):
    page = learner()
    write(page, f"{spoilt} return 1;")
    press(page, "Run")
    page.get_by_role("alert").wait_for()
    seen = page.evaluate(STEPS)
    write(page, "return 1;")
    assert not page.get_by_role("alert").is_visible()
    press(page, "One step")
    seconds_until(page, f"{STEPS} == {seen + 1}")


def test_words_fit_the_size_and_the_meaning_of_a_reward(learner):
    page = learner("?reward=order&rate=0.0002")
    write(page, "return 50 + 50 * (answer[0] < 'e') + 5 * (answer.charCodeAt(3) % 9);")
    page.evaluate(  # every word that the run says
        "window.said = []; new MutationObserver(() => said.push("
        "document.querySelector('.caption').textContent)).observe("
        "document.querySelector('.caption'), { childList: true })"
    )
    press(page, "Run")
    seconds_until(page, f"{STEPS} >= 20")
    said = page.evaluate("said")
    assert said and not [words for words in said if "fell" in words or "meant" in words]


def test_own_rewards_are_used_and_one_that_hangs_is_ended(learner):
    page = learner()
    page.get_by_text("choose one, or write your own").click()
    written = page.get_by_role("textbox")
    told = page.get_by_role("alert")
    for code, words in (
        ("while (true);", "it took longer than 8 seconds"),
        ("return;", "returned undefined, and no number"),
        ("throw 'mine';", 'instead of returning a number: "mine"'),
        ("return (", "Unexpected token"),
    ):
        written.fill(code)
        press(page, "One step")
        told.get_by_text(words).wait_for()
    written.fill("return [...answer].filter((letter) => letter === 'a').length / 4;")
    press(page, "Run")
    seconds_until(page, f"{REWARD} > 0.9")
    assert not told.is_visible()
    assert "aaaa" in page.locator(".completions").inner_text().replace("\n", "")


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    "The source of axe-core, fetched by npm."
    if not shutil.which("npm"):
        pytest.fail("no npm") if os.environ.get("CI") else pytest.skip("no npm on this machine")
    folder = tmp_path_factory.mktemp("axe")
    subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        return opened.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_filled_page_is_accessible_and_fits(learner, axe, scheme):
    page = learner("?reward=places", scheme=scheme)
    press(page, "One step")
    page.get_by_text("update 1", exact=True).wait_for()
    page.get_by_text("choose one, or write your own").click()
    page.get_by_text("Show me the update").click()
    page.evaluate(axe)
    for width in (1400, 800, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        assert not [
            f"{rule['id']}: {node['html'][:200]}"
            for rule in found
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]
