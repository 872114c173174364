"What holds for all tests, in every process that runs some."

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        # without a GPU Triton interprets kernels; it reads this when it is imported, so before any
        # test does
        "1"
    )
if "PYTEST_XDIST_WORKER" in os.environ:
    # a core for each process, and for those that it starts: two with two threads each wait for one
    # another for many times as long as they compute
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores Ctrl-C for what it starts with `&`, and children inherit that


LONG = [
    ["test_demo.py", "test_colab.py", "test_wheel.py"],
    ["test_repo.py", "test_browser.py"],
]  # two shares that take about the same time


@pytest.hookimpl(trylast=True)  # when the tests that are not asked for have gone
def pytest_collection_modifyitems(items):
    """With two processes (-n 2 --dist worksteal) each is given half of the list: both begin with
    long tests, so that short ones are what is left to share out in the end."""
    first, second = (
        [item for name in share for item in items if item.path.name == name] for share in LONG
    )
    short = [item for item in items if item.path.name not in sum(LONG, [])]
    middle = max(len(items) // 2 - len(first), 0)
    items[:] = [*first, *short[:middle], *second, *short[middle:]]
