"""The Triton kernels compile for the cards that we name, without one: a T4 (7.5), an A100 (8.0), an H100 (9.0)."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024}  # bytes that a block may have


@pytest.mark.parametrize("capability, kernels", [(75, 4), (80, 16), (90, 16)])
def test_kernels_compile_for(capability, kernels):
    child = Path(__file__).with_name("compile_child.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, child, str(capability)], capture_output=True, text=True, env=environment, timeout=300)
    sizes = re.findall(rf"^{capability} (.*): (\d+) bytes$", done.stdout, re.M)
    assert len(sizes) == kernels, done.stdout + done.stderr
    assert max(int(size) for _, size in sizes) <= SHARED[capability]
