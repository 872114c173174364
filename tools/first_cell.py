#| hide
#| eval: false
# @title The library, where it is missing: from a clone, a wheel or the repository
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import call

at, git = Path.cwd(), "git+$git_url@$branch"
sys.path += [str(p) for p in (at, *at.parents, at / "$repo") if (p / "$lib_path/cli.py").exists()]
pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-input", "--retries=1"]
found = [*at.glob("$lib_name-*.whl"), *Path("/kaggle/input").rglob("$lib_name-*.whl"), git]
if not getattr(find_spec("$lib_name"), "origin", None):
    if sys.platform == "emscripten" or all(call([*pip, place]) for place in found):
        no = "no clone, no wheel, no network; with one: %pip install --no-deps"
        raise ImportError(f"{no} {git}. JupyterLite has no pip and no torch: take Colab")
__import__("$lib_name").open_page()
