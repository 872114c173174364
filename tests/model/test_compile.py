"""The Triton kernels compile for the cards that we name, without one: a T4 (7.5), an A100 (8.0), an
H100 (9.0), and attention's on a card with little shared memory (8.6)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}  # bytes of a block


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


def check(told, capability):
    """Every kernel was launched and every launch compiled (on an old card without a bfloat16), and
    none takes more shared memory than the card has."""
    lines = [line for line in told[0].splitlines() if line.startswith(f"{capability} ")]
    sizes = [re.fullmatch(r"\d+ [\w.]+: (\d+) bytes", line) for line in lines]
    assert lines and all(sizes), "\n".join(told)
    assert max(int(size[1]) for size in sizes) <= SHARED[capability]


@pytest.mark.long
@pytest.mark.parametrize("capability", [75, 90])
def test_kernels_compile_for(oldest_and_newest, capability):
    check(oldest_and_newest, capability)


@pytest.mark.full
@pytest.mark.parametrize("capability", SHARED)
def test_kernels_in_every_tile_compile_for(every, capability):
    check(every, capability)
