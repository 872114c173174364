"Tutorials and widgets once more with the versions that Colab has (August 2026), in an environment of their own."
import json, os, subprocess, sys, sysconfig, venv
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
PINS = ("ipywidgets==7.7.1 widgetsnbextension==3.6.10 ipykernel==6.17.1 ipython==7.34.0 traitlets==5.7.1 jupyter_client==7.4.9 tornado==6.5.1 "
        "transformers==5.15.0 tokenizers==0.22.2 huggingface_hub==1.27.0 peft==0.20.0 accelerate==1.14.0 datasets==4.0.0 numpy==2.1.3 pandas==2.2.3 matplotlib==3.10.0").split()
NOTEBOOKS = sorted([*(ROOT / "nbs/tutorials").glob("*.ipynb"), *(ROOT / "nbs/widgets").glob("*.ipynb")])
pytestmark = pytest.mark.colab


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    "An interpreter with Colab's packages; what is not pinned (torch, nbclient, this library) is taken from the present environment."
    home = tmp_path_factory.mktemp("colab")
    venv.create(home, with_pip=True)
    folder = Path(sysconfig.get_path("purelib", vars={"base": home, "platbase": home}))
    pip = [home / "bin/python", "-m", "pip", "install", "-q", "--no-compile"]
    done = subprocess.run([*pip, *PINS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "present.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")  # after its own packages on the path, so the pins win
    return home / "bin/python"


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in NOTEBOOKS])
def test_notebook_runs_with_colabs_versions(python, path, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    env |= {"JUPYTER_PATH": str(python.parent.parent / "share/jupyter"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "JUPYTER_DATA_DIR": str(tmp_path / "data"), "IPYTHONDIR": str(tmp_path / "ipython")}
    done = subprocess.run([python, ROOT / "tests/colab_child.py", path, tmp_path], capture_output=True, text=True, env=env, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    met = json.loads(done.stdout.splitlines()[-1])
    assert met["versions"] == {"ipykernel": "6.17.1", "ipywidgets": "7.7.1", "IPython": "7.34.0", "transformers": "5.15.0"}
    source = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code" and not cell.source.startswith("#| export"))
    shows = any(f"{name}_widget()" in source for name in ("batch", "advantages", "chunks", "clipping"))
    assert met["widgets"] >= shows
