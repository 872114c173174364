"""All the set-up after `git clone`, in .venv beside this file:

    python start.py          the library, then its demo: a tiny model learns sums
    python start.py tests    also what the tests need, then the tests

Both may be given again: what is installed stays. Words behind them go to the demo or to pytest.
"""

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU = "https://download.pytorch.org/whl/cpu"  # builds of torch without CUDA
PROGRAMS = HERE / ".venv" / ("Scripts" if sys.platform == "win32" else "bin")


def answers(url):
    "Whether an address can be reached from here."
    try:
        urllib.request.urlopen(f"{url}/torch/", timeout=10).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def source_of_torch():
    "What pip is told about torch, and the sentence that a reader is told."
    if sys.platform != "linux":
        return [], "torch from the package index (on Windows and macOS it has no CUDA)"
    if shutil.which("nvidia-smi"):
        return [], "torch with CUDA, for the NVIDIA card of this machine (6.1 GB in all)"
    if answers(CPU):
        return [
            "--index-url",
            CPU,
        ], "torch for the CPU, since there is no NVIDIA card (1.6 GB in all)"
    unreached = f"{CPU} does not answer, so torch comes from the package index"
    return [], f"{unreached}, whose build for Linux has CUDA (6.1 GB in all)"


def run(*words):
    "A program of .venv; its exit status ends this one if it is not 0."
    program, *rest = words
    if status := subprocess.call([str(PROGRAMS / program), *rest], cwd=HERE):
        sys.exit(status)


def installed(name):
    "Whether .venv has a module."
    looked = f"import importlib.util as u; u.find_spec({name!r}) or exit(1)"
    return subprocess.call([str(PROGRAMS / "python"), "-I", "-c", looked]) == 0


def main(words):
    "Make the environment, then run the demo or the tests."
    if words[:1] in (["-h"], ["--help"]):
        return print(__doc__.strip())
    if not (3, 11) <= sys.version_info < (3, 14):
        sys.exit(
            f"This is Python {sys.version.split()[0]}; 3.11 to 3.13 is needed: python3.12 start.py"
        )
    tests = words[:1] == ["tests"]
    if not PROGRAMS.exists():
        venv.create(HERE / ".venv", with_pip=True)
    if not installed("torch"):
        where, sentence = source_of_torch()
        print(f"{sentence}: some minutes", flush=True)
        run("python", "-m", "pip", "install", "-q", "torch", *where)
    if not installed("trl" if tests else "grpo_nb"):
        run("python", "-m", "pip", "install", "-q", "-e", ".[dev]" if tests else ".")
    run(*(["pytest", "-n", "2", *words[1:]] if tests else ["grpo-nb", "demo", *words]))


if __name__ == "__main__":
    main(sys.argv[1:])
