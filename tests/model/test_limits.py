"""Numbers that more than one module needs: one home, and every reader reads it."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb.algorithm import logprobs
from grpo_nb.model import limits
from grpo_nb.model.offload import offload_layers
from grpo_nb.rollout import decode_ops, decoder
from grpo_nb.rollout.kv_cache import CacheShape

PACKAGE = Path(limits.__file__).parents[1]


def test_the_module_imports_the_standard_library_alone():
    code = "import sys; before = set(sys.modules); import grpo_nb.model.limits; "
    code += "print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert {name.split(".")[0] for name in loaded.split()} <= {"grpo_nb", *sys.stdlib_module_names}


@pytest.fixture(scope="module")
def homes():
    "name -> the modules that assign it."
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, set()).add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize("name", [name for name in vars(limits) if name.isupper()])
def test_no_other_module_defines_it(name, homes):
    allowed = {"algorithm/logprobs.py"} if name == "ROWS_PER_CHUNK" else set()
    assert homes[name] - allowed == {"model/limits.py"}


def test_algorithm_which_imports_nothing_of_ours_has_the_same_rows():
    assert limits.ROWS_PER_CHUNK == logprobs.ROWS_PER_CHUNK


def test_defaults_are_these_numbers():
    def default(function, name):
        return inspect.signature(function).parameters[name].default

    assert default(offload_layers, "attention_from") == limits.KEPT_FROM
    assert default(CacheShape, "page") == limits.PAGE
    assert default(decoder.batches_of_prompts, "most") == limits.PREFILL_TOKENS
    assert decode_ops.PREFILL_TOKENS == limits.PREFILL_TOKENS
    assert decoder.SIZES[-1] == limits.MOST_DRAWN_TOGETHER == max(decoder.SIZES)
    assert limits.SLICES == tuple(sorted(limits.SLICES, reverse=True))
