"What holds for all tests, in every process that runs some."
import os
import signal

import torch

if not torch.cuda.is_available(): os.environ["TRITON_INTERPRET"] = "1"  # without a GPU Triton interprets kernels; it reads this when it is imported, so before any test does
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores Ctrl-C for what it starts with `&`, and children inherit that


LONG = ["test_demo.py", "test_colab.py", "test_wheel.py", "test_repo.py", "test_browser.py"]


def pytest_collection_modifyitems(items):
    "Long tests first, so that with two processes (-n 2 --dist worksteal) the short ones are what is left to share out in the end."
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
