"""Runs notebooks in the environment of this Python: python colab_child.py FOLDER, then a line of
JSON, [notebook, folder to run it in], for each.

Answers with a line each: what went wrong, the versions that the kernel met, how many widgets were
shown. Kernels are forks of one process that has imported the slow packages and computed nothing: a
fresh state for each notebook, without waiting for torch and transformers again.
"""

import json
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path

SLOW = (
    "torch",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "peft",
    "datasets",
    "pandas",
    "matplotlib.pyplot",
)
VERSIONS = (
    "import json, sys\nfrom importlib.metadata import version\nprint(json.dumps({name: "
    "version(name) for name in ('ipykernel', 'ipywidgets', 'IPython', 'transformers')}))"
)


def fork_kernels(server):
    "Be a kernel, in a fork, for everyone who asks at this socket."
    os.dup2(2, 1)
    os.environ["MPLBACKEND"] = (
        # as a kernel sets it, before matplotlib is imported
        "module://matplotlib_inline.backend_inline"
    )
    for name in SLOW:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        asker, _ = server.accept()
        if not os.fork():
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            be_kernel(asker)
        asker.close()


def be_kernel(asker):
    "A kernel that lives as long as who asked for it."
    folder, connection_file = json.loads(asker.makefile().readline())
    os.chdir(folder)

    def leave_with_asker():
        asker.recv(1)
        os._exit(1)

    threading.Thread(target=leave_with_asker, daemon=True).start()
    try:
        import_module("ipykernel.kernelapp").IPKernelApp.launch_instance(
            argv=["-f", connection_file]
        )
    finally:
        os._exit(0)


def ask_for_kernel(address, connection_file):
    "What Jupyter starts: it ends with the kernel, and the kernel with it."
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(address)
        asker.sendall(json.dumps([os.getcwd(), connection_file]).encode() + b"\n")
        asker.recv(1)


def run(path, folder):
    "What is told of a notebook."
    import nbformat
    from nbclient import NotebookClient
    from notebooks import skipped

    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if skipped(cell, ("notest", "slow", "cuda")):
            cell.metadata["tags"] = ["skip-execution"]
    notebook.cells.append(nbformat.v4.new_code_cell(VERSIONS))
    error = None
    try:
        NotebookClient(
            notebook,
            timeout=900,
            startup_timeout=600,
            kernel_name="forked",
            resources={"metadata": {"path": folder}},
        ).execute()
    except Exception as problem:
        error = str(problem)[-4000:]
    widgets = sum(
        "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.get("outputs", [])
    )
    return {
        "error": error,
        "widgets": widgets,
        "versions": None if error else json.loads(notebook.cells[-1].outputs[0].text),
    }


def main(folder):
    address = f"{folder}/kernels"
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    if not (forker := os.fork()):
        try:
            fork_kernels(server)
        finally:
            os._exit(1)
    spec = Path(os.environ["JUPYTER_DATA_DIR"], "kernels/forked/kernel.json")
    spec.parent.mkdir(parents=True)
    spec.write_text(
        json.dumps(
            {
                "argv": [sys.executable, __file__, "--kernel", address, "{connection_file}"],
                "display_name": "forked",
                "language": "python",
            }
        )
    )
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
    try:
        for line in sys.stdin:
            print(json.dumps(run(*json.loads(line))), flush=True)
    finally:
        os.kill(forker, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "--kernel":
        ask_for_kernel(*sys.argv[2:])
    else:
        main(sys.argv[1])
