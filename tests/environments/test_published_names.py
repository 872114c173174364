"""The four published names of environments.sandbox, called as published reward functions call them:
by position, without a pool, with `"error" in info` and bare `except`."""

import math
import warnings

import numpy as np
import pytest

from grpo_nb.environments.game2048 import CORNER, Game2048
from grpo_nb.environments.sandbox import (
    Benchmarker,
    check_only_stdlib_imports,
    create_locked_down_function,
    execute_with_time_limit,
)

HEAD = "def matmul(A, B):\n"
PROGRAMS = {
    "right": HEAD + "    return [[sum(a * b for a, b in zip(r, c)) for c in zip(*B)] for r in A]",
    "wrong": HEAD + "    return [[0.0] * len(B[0]) for _ in A]",
    "numpy": HEAD + "    import numpy as np\n    return np.matmul(A, B).tolist()",
    "os": HEAD + "    import os\n    return [[0.0] * len(B[0]) for _ in A]",
    "raises": HEAD + "    return A[10**6]",
    "fails at its load": HEAD + "    return A\n1 / 0",
    "no Python": HEAD + "    return return",
    "nothing": None,
}
A, B = (np.random.default_rng(seed).uniform(-10, 10, (12, 12)) for seed in (0, 1))


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the walls that this system refuses
        yield


def readable(source):
    "How the published rewards ask whether there is a program."
    if source is None:
        return False
    _, info = check_only_stdlib_imports(source)
    return "error" not in info


def function_works(source):
    if not readable(source):
        return -2.0
    try:
        create_locked_down_function(source)
        return 1.0
    except:  # noqa: E722
        return -0.5


def no_cheating(source):
    ok = source is not None and check_only_stdlib_imports(source)[0]
    return 1.0 if ok else -20.0


def correctness_check(source):
    if not readable(source):
        return 0
    try:
        function = create_locked_down_function(source)
    except:  # noqa: E722
        return 0
    try:
        answer = function(A.tolist().copy(), B.tolist().copy())
    except:  # noqa: E722
        return -2.0
    return 3.0 if np.abs(np.array(answer) - A @ B).max() < 1e-9 else -3.0


def speed_check(source, benchmarker, other):
    if not readable(source):
        return 0
    try:
        function = create_locked_down_function(source)
    except:  # noqa: E722
        return 0
    mine = benchmarker.benchmark(function, [(A.tolist().copy(), B.tolist().copy())])["median_ns"]
    theirs = other["median_ns"]
    score = -(mine / theirs) / 100 if mine >= theirs else (theirs / mine) / 100
    return min(max(score, -10), 10)


def test_the_rewards_of_the_matrix_product():
    table = {
        name: (function_works(source), no_cheating(source), correctness_check(source))
        for name, source in PROGRAMS.items()
    }
    assert table == {
        "right": (1.0, 1.0, 3.0),
        "wrong": (1.0, 1.0, -3.0),
        "numpy": (1.0, -20.0, -2.0),
        "os": (1.0, 1.0, -3.0),
        "raises": (1.0, 1.0, -2.0),
        "fails at its load": (-0.5, 1.0, 0),
        "no Python": (-2.0, -20.0, 0),
        "nothing": (-2.0, -20.0, 0),
    }


def test_the_reward_of_the_speed():
    benchmarker = Benchmarker(trials=3, timeout=10)
    other = benchmarker.benchmark(np.matmul, [(A, B)])
    keys = {"median_ns", "mean_ns", "stdev_ns", "exceptions", "timeouts"}
    assert keys <= set(other) and other["exceptions"] == [] and other["timeouts"] == 0
    assert all(type(other[name]) is int for name in ("median_ns", "mean_ns", "stdev_ns"))
    assert -10 <= speed_check(PROGRAMS["right"], benchmarker, other) < 0  # slower than numpy
    assert speed_check(PROGRAMS["raises"], benchmarker, other) == -10
    assert speed_check(PROGRAMS["no Python"], benchmarker, other) == 0
    assert benchmarker.benchmark(np.matmul, [(A, A[:3])])["median_ns"] == math.inf


@pytest.mark.parametrize(
    "source, ok, info",
    [
        ("import math, os.path", True, (["math", "os"], [], 0)),
        ("from torch.nn import Linear\nimport numpy as np", False, ([], ["numpy", "torch"], 0)),
        ("from . import x\nfrom .. import y", True, ([], [], 2)),
        ("x = 1", True, ([], [], 0)),
    ],
)
def test_what_is_said_of_imports(source, ok, info):
    keys = ("stdlib", "non_stdlib", "relative_imports")
    assert check_only_stdlib_imports(source) == (ok, dict(zip(keys, info)))


def test_what_is_said_of_a_broken_source():
    ok, info = check_only_stdlib_imports("def a")
    assert not ok and info.pop("error").startswith("SyntaxError: ")
    assert info == {"stdlib": [], "non_stdlib": [], "relative_imports": 0}


def strategy_succeeds(source, seconds=5):
    "A game under a time limit, as the published reward plays it."

    @execute_with_time_limit(seconds)
    def play(strategy, game):
        moves = 0
        while not game.over and moves < 1000:
            move = strategy(game.lists())
            moves += 1
            if type(move) is not str:
                return "failed"
            game.move(move)
        return "played"

    try:
        strategy = create_locked_down_function(source)
    except:  # noqa: E722
        return 0
    try:
        return 2.0 if play(strategy, Game2048(seed=1)) == "played" else -2.0
    except TimeoutError:
        return -1.0
    except Exception:
        return -3.0


@pytest.mark.long
@pytest.mark.parametrize(
    "source, points",
    [
        ("def strategy(board): return 'W'", 2.0),
        ("def strategy(board): return 4", -2.0),
        ("def strategy(board):\n    while True: pass", -1.0),
        ("def strategy(board): return board[9]", -3.0),
        ("1 / 0\ndef strategy(board): return 'W'", 0),
        (CORNER, 2.0),
    ],
    ids=["up", "a number", "endless", "raises", "fails at its load", "corner"],
)
def test_the_reward_of_the_game(source, points):
    assert strategy_succeeds(source) == points


def test_a_limited_call_keeps_its_process_and_the_next_has_another():
    counts = create_locked_down_function("n = 0\ndef f():\n    global n\n    n += 1\n    return n")
    limited = execute_with_time_limit(5)(lambda: [counts() for _ in range(3)])
    assert limited() == limited() == [1, 2, 3] and counts() == counts() == 1
    assert len(counts.pool._supervisors) == 1
