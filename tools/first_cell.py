#| hide
#| eval: false
# @title The library, where it is missing: from a clone, a wheel or the repository
import os
import subprocess
import sys
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path


def missing(*names):
    "Those of the modules that cannot be imported."
    invalidate_caches()
    return [name for name in names if not getattr(find_spec(name), "origin", None)]


if missing("$lib_name"):
    here = Path.cwd()
    for clone in (here, *here.parents, here / "$repo"):
        if missing("$lib_name") and (clone / "$lib_path/__init__.py").exists():
            sys.path.insert(0, str(clone))
            os.environ["PYTHONPATH"] = str(clone)  # for programs that a page starts
    wheels = [*here.glob("$lib_name-*.whl"), *Path("/kaggle/input").rglob("$lib_name-*.whl")]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--retries=1"]
    for source in (*wheels, "git+$git_url@$branch"):
        if missing("$lib_name"):
            subprocess.run([*pip, source], stdin=subprocess.DEVNULL, capture_output=True)
if missing("$lib_name"):
    raise ImportError(
        "$lib_name is not installed, this page lies in no clone of it, there is no wheel of it "
        "beside the page, and pip could not fetch it. With a network (on Kaggle: Settings, "
        "Internet on) run: %pip install --no-deps git+$git_url@$branch"
    )
needs = "$needs"
if absent := missing(*needs.split()):
    raise ImportError(f"$lib_name needs what is not here; run: %pip install {' '.join(absent)}")
