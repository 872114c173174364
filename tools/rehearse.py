"""A tutorial from its first to its last cell with some of Colab's limits:
`python tools/rehearse.py nbs/tutorials/11_qlora.ipynb [--record FILE]`.

The page runs in a folder of its own, with an empty home. The record says what was enforced, and
what was neither real nor imitated: a rehearsal is no run on a T4.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
MEMORY, CORES = 12.7, 2  # GiB and cores of Colab's machine with a T4
ENFORCED = (
    f"at most {MEMORY} GiB of data in a process (RLIMIT_DATA)",
    f"at most {CORES} cores (affinity)",
    "an empty home and empty caches of the Hub, Triton and torch",
    "the Hub offline",
    "a new folder as working folder",
)
MISSING = (
    "a T4: cells marked cuda are skipped, and the page takes its tiny model",
    "float16 and capability 7.5",
    "the versions of Colab's packages (pytest -m colab has them)",
    "an installation by pip: the library is that of the clone",
    "a limit of the disk",
    "writing outside the folder is not stopped",
    "a lost session",
)


def limited(home: Path) -> dict[str, str]:
    "Limit this process and those that it starts; the environment of the kernel."
    size = int(MEMORY * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    caches = dict.fromkeys(("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"))
    for name in caches:
        caches[name] = str(home / name.lower())
        Path(caches[name]).mkdir()
    kept = {
        name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ
    }
    return kept | caches | {"HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def rehearse(page: Path, folder: Path) -> dict:
    "Run a page, and tell how far it came."
    from notebooks import skipped

    content, home = folder / "content", folder / "home"
    content.mkdir()
    home.mkdir()
    notebook = nbformat.read(page, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        if skipped(cell, ("notest", "slow", "cuda")) and cell.id != "colab-install":
            cell.metadata["tags"] = ["skip-execution"]
    start, error = time.perf_counter(), None
    client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": content}})
    try:
        client.execute(env=limited(home))
    except CellExecutionError as problem:
        error = f"{problem.ename}: {problem.evalue}"
    return {
        "page": page.name,
        "error": error,
        "cells": len(cells),
        "ran": sum(cell.execution_count is not None for cell in cells),
        "seconds": round(time.perf_counter() - start, 1),
        "peak GiB": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "enforced": ENFORCED,
        "neither real nor imitated": MISSING,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--record", type=Path, help="write the record there too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = rehearse(asked.page, Path(folder))
    text = json.dumps(told, indent=1)
    print(text)
    if asked.record:
        asked.record.write_text(text + "\n")
    sys.exit(told["error"] is not None)


if __name__ == "__main__":
    main()
