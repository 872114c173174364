"Run a notebook in the environment of this Python and say which packages it met; python colab_child.py NOTEBOOK FOLDER."
import json
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from notebooks import skipped  # noqa: E402

notebook = nbformat.read(sys.argv[1], 4)
for cell in notebook.cells:
    if skipped(cell, ("notest", "slow", "cuda")): cell.metadata["tags"] = ["skip-execution"]
versions = nbformat.v4.new_code_cell("import json, sys\nfrom importlib.metadata import version\nprint(json.dumps({name: version(name) for name in ('ipykernel', 'ipywidgets', 'IPython', 'transformers')}))")
notebook.cells.append(versions)
NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
widgets = sum("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)
print(json.dumps({"versions": json.loads(notebook.cells[-1].outputs[0].text), "widgets": widgets, "cells": sum(cell.cell_type == "code" for cell in notebook.cells)}))
