"What holds for all tests, in every process that runs some."

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # images for containers set it, and every process that a test starts would compile torch and
    # transformers for itself, which takes twice as long as to import them; installed packages stay
    # as they are, and the processes of -n, which start after this, have it too
    home = Path(__file__).parent.parent / ".cache" / "bytecode"
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(home))
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


# the files that take longest, the longest first: at their end no process is left with one alone
LONG = """test_repo test_colab test_distributed test_leaving test_sharding test_browser test_ready
test_compile test_colocated test_rehearse test_sandbox test_trainer test_checkpoint test_laptops
test_benchmarks_sharded test_isolated_rewards test_procedural test_demo test_filter_kernels
test_dashboard test_wheel test_judge test_game2048 test_hints test_server test_stand_in test_export
test_attention test_loading test_stream test_damaged_checkpoints test_cli test_dense_kernels
test_masks test_attacks""".split()


@pytest.hookimpl(trylast=True)  # when the tests that are not asked for have gone
def pytest_collection_modifyitems(items):
    "With -n, whole files are given out in the order of this list (--dist loadfile)."
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    """What all these modules have imported stays: from here on no garbage collection looks at it
    again, which takes half a second each time."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # modules in C want to be taken apart in the end


@pytest.fixture
def peft_as_it_is(monkeypatch):
    """transformers' own methods for adapters ask for a PEFT that the package index may not have
    yet; what they attach is the same."""
    import peft
    from transformers.integrations import peft as attaching

    monkeypatch.setattr(attaching, "MIN_PEFT_VERSION", peft.__version__)
