"""The Triton kernels compile for the cards that we name, without one: a T4 (7.5), an A100 (8.0), an
H100 (9.0)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {75: 64 * 1024, 80: 163 * 1024, 90: 227 * 1024}  # bytes that a block may have


def compiled(*words):
    "What a child without the interpreter says: its lines, and its errors."
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = [sys.executable, Path(__file__).parents[1] / "compile_child.py", *map(str, words)]
    done = subprocess.run(child, capture_output=True, text=True, env=environment, timeout=600)
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def oldest_and_newest():
    return compiled(75, 90)


@pytest.fixture(scope="module")
def every():
    return compiled("all", *SHARED)


def check(told, capability, kernels):
    "So many kernels were compiled, and none takes more shared memory than the card has."
    sizes = re.findall(rf"^{capability} (.*): (\d+) bytes$", told[0], re.M)
    assert len(sizes) == kernels, "\n".join(told)
    assert max(int(size) for _, size in sizes) <= SHARED[capability]


@pytest.mark.parametrize("capability, kernels", [(75, 31), (90, 14)])
def test_kernels_compile_for(oldest_and_newest, capability, kernels):
    check(oldest_and_newest, capability, kernels)


@pytest.mark.full
@pytest.mark.parametrize("capability, kernels", [(75, 39), (80, 18), (90, 18)])
def test_kernels_in_every_tile_compile_for(every, capability, kernels):
    check(every, capability, kernels)
