"""The learner as a page of one file, and its picture.

    python tools/learner.py learn.html     the page: opens from the disk too, and loads nothing
    python tools/learner.py learner.png    a picture of it after 30 updates, made by a Chromium

`node tools/learner.mjs` makes the weights that it begins with.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "learn.html"
SHARED = ("arithmetic", "policy", "learner_step")
MODULES = (*SHARED, "kit", "model", "learner_start", "learner")
HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A model that learns in the page</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 1000px; padding: 8px; font: 16px/1.5 system-ui, sans-serif;
  background: light-dark(#ffffff, #0f1114); color: light-dark(#1b1f24, #e8eaed); }}
h1 {{ font-size: 1.4rem; margin: 4px 0 8px; }}
a {{ color: light-dark(#0067a5, #5ab7f2); }}
{style}
</style>
<main>
<h1>A model that learns in the page</h1>
<div id="learner"></div>
<p>It opens <a href="{site}">a course on GRPO</a>, which says what each box means.</p>
</main>
<script type="text/plain" id="learner-worker">
{worker}
</script>
<script type="module">
{code}
const model = new Model(defaults);
followLink("learner", {{ defaults, legal, inQuery }}, model, defaults);
widget.render({{ model, el: document.getElementById("learner") }});
</script>
</html>
"""


def joined(root, names):
    "Modules as one script that imports nothing."
    folder = root / "grpo_nb/widgets/js"
    code = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in names)
    code = re.sub(r'^import \{[^}]*\} from "\./\w+\.js";\n', "", code, flags=re.M)
    code = re.sub(r"^export default ", "const widget = ", code, flags=re.M)
    return re.sub(r"^export ", "", code, flags=re.M)


def page(root):
    "The page as text."
    style = (root / "grpo_nb/widgets/js/widgets.css").read_text(encoding="utf-8")
    settings = (root / "settings.ini").read_text(encoding="utf-8")
    user, repo = (re.search(rf"^{name} = (\S+)", settings, re.M)[1] for name in ("user", "repo"))
    worker = joined(root, (*SHARED, "learner_worker"))
    return HTML.format(
        style=style,
        site=f"https://{user}.github.io/{repo}/nbs/lessons/01_what_rl_is.html",
        worker=f"(() => {{\n{worker}}})();",  # a reward sees none of its names
        code=joined(root, MODULES),
    )


def picture(out):
    "What the page shows after 30 updates."
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        (Path(folder) / PAGE).write_text(page(ROOT), encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        view = browser.new_page(
            viewport={"width": 760, "height": 1200},
            device_scale_factor=1.25,
            reduced_motion="reduce",
        )
        view.goto(f"{(Path(folder) / PAGE).as_uri()}#learner?seed=7")
        for update in range(1, 31):
            view.get_by_role("button", name="One step").click()
            view.get_by_text(f"update {update}", exact=True).first.wait_for()
        top, bottom = (
            view.locator(f".grpo-learner-viz .{name}").bounding_box()
            for name in ("boxes", "picture")
        )
        height = bottom["y"] + bottom["height"] - top["y"]
        clip = {"x": top["x"], "y": top["y"], "width": top["width"], "height": height}
        view.screenshot(path=out, clip=clip)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).suffix not in (".html", ".png"):
        sys.exit(__doc__)
    if sys.argv[1].endswith(".png"):
        picture(sys.argv[1])
    else:
        Path(sys.argv[1]).write_text(page(ROOT), encoding="utf-8")
