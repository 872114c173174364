"The node that playwright brings, for what the widgets compute: no other one has to be installed."

import subprocess
from pathlib import Path

import playwright

NODE = next((Path(playwright.__file__).parent / "driver").glob("node*"))


def run_module(program, module, given=""):
    "What a program prints that may import `process.argv[1]`, a path."
    done = subprocess.run(
        [NODE, "-e", program, module], input=given, capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    return done.stdout
