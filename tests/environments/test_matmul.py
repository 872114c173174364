"""environments.matmul: truth against numpy, what counts as an answer, programs that are right,
wrong, fast and crooked, both scales of rewards."""

import math
import random
import time
import types
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.environments import matmul
from grpo_nb.environments.game2048 import Program, trusted
from grpo_nb.environments.matmul import (
    HONEST,
    NAIVE,
    WORKS,
    MatmulReport,
    MatmulRewards,
    Timing,
    answer_errors,
    answer_fault,
    clock_of,
    correct_points,
    counted_ms,
    fast_points,
    judge_matmul,
    ladder_points,
    matmul_problems,
    product,
    random_cases,
    random_matrix,
    speed_steps,
    time_program,
    timing_of,
)
from grpo_nb.environments.sandbox import SandboxPool, SandboxResult
from grpo_nb.training.rewards import score_completions

FAST = (
    "from operator import mul\n\ndef matmul(A, B):\n    columns = list(zip(*B))\n    return "
    "[[sum(map(mul, row, column), 0.0) for column in columns] for row in A]\n"
)
SLOW = NAIVE.replace(
    "def matmul(A, B):\n",
    "def matmul(A, B):\n    naive(A, B); naive(A, B); naive(A, B)\n    return naive(A, B)\n\n"
    "def naive(A, B):\n",
)
WRONG = "def matmul(A, B): return [[0.0] * len(B[0]) for _ in A]\n"
RETURNS_AN_INPUT = "def matmul(A, B): return A\n"
MISSING = "import subprocess\n" + NAIVE


def fenced(code):
    return f"So:\n```python\n{code}\n```\nDone."


def program(lines, before=""):
    return f"{before}\ndef matmul(A, B):\n    " + lines.replace("\n", "\n    ") + "\n"


@pytest.fixture(scope="module")
def pool():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the walls that this system refuses
        with SandboxPool(workers=1) as pool:
            yield pool


def judged(source, pool, seed=0, **settings):
    return judge_matmul(
        fenced(source), pool, random.Random(seed), **{"size": 24, "trials": 2, **settings}
    )


# truth and answers


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 9, 1), (7, 1, 5), (3, 4, 5), (40, 40, 40)])
def test_the_truth(shape):
    rng, (n, k, m) = random.Random(sum(shape)), shape
    a, b = random_matrix(n, k, rng), random_matrix(k, m, rng)
    right = np.array(a) @ np.array(b)
    assert np.abs(np.array(product(a, b)) - right).max() < 1e-13 and np.array(
        product(a, b)
    ).shape == (n, m)
    for source in (NAIVE, FAST, SLOW):
        error, squared, fault = answer_errors(trusted(source, "matmul")(a, b), product(a, b))
        assert error < 1e-13 and squared <= error**2 and fault is None


class Number(float):
    def __sub__(self, other):
        return 0.0

    __rsub__ = __sub__

    def __eq__(self, other):
        return True

    __hash__ = float.__hash__


class Rows(list):
    def __eq__(self, other):
        return True

    __hash__ = None


TRUTH = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    "answer, words",
    [
        ([[math.nan] * 3] * 2, "NaN or an infinity"),
        ([[1.0, 2.0, math.inf], [4.0, 5.0, 6.0]], "NaN or an infinity"),
        ([[1.0, 2.0, -math.inf], [4.0, 5.0, 6.0]], "NaN or an infinity"),
        ([[1, 2, 3], [4, 5, 6]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, True]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, None]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, "6"]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, 6 + 0j]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, Number(6.0)]], "no float"),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, np.float64(6.0)]], "no float"),
        (Rows(TRUTH), "no list of lists"),
        ([TRUTH[0], Rows(TRUTH[1])], "no list of lists"),
        (tuple(TRUTH), "no list of lists"),
        ([(1.0, 2.0, 3.0), [4.0, 5.0, 6.0]], "no list of lists"),
        (np.array(TRUTH), "no list of lists"),
        (None, "no list of lists"),
        (5.0, "no list of lists"),
        ("ab", "no list of lists"),
        ({}, "no list of lists"),
        ((row for row in TRUTH), "no list of lists"),
        ([1.0, 2.0], "no list of lists"),
        ([], "shape is not 2 x 3"),
        ([[], []], "shape is not 2 x 3"),
        (TRUTH[:1], "shape is not 2 x 3"),
        ([*TRUTH, TRUTH[0]], "shape is not 2 x 3"),
        ([[1.0, 2.0], [4.0, 5.0, 6.0]], "shape is not 2 x 3"),
        ([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], "shape is not 2 x 3"),
        ([[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 6.0, 0.0]], "shape is not 2 x 3"),
    ],
)
def test_what_is_no_answer(answer, words):
    assert words in answer_fault(answer, 2, 3)
    error, squared, fault = answer_errors(answer, TRUTH)
    assert error == squared == math.inf and words in fault


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=6, max_size=6))
def test_errors_are_absolute(values):
    answer = [values[:3], values[3:]]
    error, squared, fault = answer_errors(answer, TRUTH)
    differences = [abs(x - y) for x, y in zip(values, sum(TRUTH, []))]
    assert fault is None and error == max(differences) and squared >= 0 and not math.isnan(squared)
    assert (error == 0) == (answer == TRUTH) and error <= 1e150 or squared == math.inf


def test_cases_have_many_shapes_and_new_numbers():
    shapes, numbers = set(), set()
    for seed in range(40):
        cases = random_cases(random.Random(seed))
        for a, b in cases:
            assert (
                len(a[0]) == len(b)
                and all(len(row) == len(a[0]) for row in a)
                and all(len(row) == len(b[0]) for row in b)
            )
            assert all(type(x) is float and -1 <= x <= 1 for row in a + b for x in row)
            shapes.add((len(a), len(b), len(b[0])))
            numbers.add(a[0][0])
        kinds = [(len(a), len(b), len(b[0])) for a, b in cases]
        assert (
            kinds[0] == (1, 1, 1)
            and kinds[1][0] == kinds[1][2] == 1 < kinds[1][1]
            and kinds[2][1] == 1 < kinds[2][0]
            and len(set(kinds[3])) == 1
        )
    assert (
        len(shapes) > 80
        and len(numbers) == 240
        and random_cases(random.Random(3)) == random_cases(random.Random(3))
    )


# programs


@pytest.mark.parametrize(
    "source, stage, words",
    [
        (NAIVE, "right", "times as fast"),
        (FAST, "right", "times as fast"),
        (WRONG, "wrong", "an entry is off by"),
        (
            (
                "def matmul(A, B):\n    n = len(A)\n    return [[sum(A[i][k] * B[k][j] for k in "
                "range(n)) for j in range(n)] for i in range(n)]\n"
            ),
            "fails",
            "IndexError",
        ),
        (
            program(
                "return [[sum(x * y for x, y in zip(r, c)) + 1e-6 for c in zip(*B)] for r in A]"
            ),
            "wrong",
            "off by 1e-06",
        ),
        (
            program("return [[sum(x * y for x, y in zip(r, c)) for c in zip(*A)] for r in B]"),
            "wrong",
            "cases are right",
        ),
        (
            program(
                "if len(A) > 20: return [[0.0] * len(A) for _ in A]\n"
                + NAIVE.partition("\n")[2].replace("\n    ", "\n").strip()
            ),
            "wrong",
            "off by",
        ),
        (
            program(
                "if len(A) > 20: return 1 / 0\n"
                + NAIVE.partition("\n")[2].replace("\n    ", "\n").strip()
            ),
            "fails",
            "on larger matrices",
        ),
        (
            program(
                "return [[sum(x * y for x, y in zip(r, c)) for c in zip(*B)] for r in A] if "
                "len(A) == 1 else [[1]]"
            ),
            "wrong",
            "its shape is not",
        ),
        ("def matmul(A, B) return A", "syntax", "SyntaxError"),
        ("def multiply(A, B): return A", "fails", "defines no function"),
        ("import numpy\n" + NAIVE, "cheats", "numpy"),
        (program("import random\nrandom._os.fork()"), "cheats", "forbidden"),
        (program("import os\nos.fork()"), "unavailable", "os.fork is not available"),
        (MISSING, "unavailable", "no module 'subprocess' here; there are"),
        (program("from math import no_such\nreturn A"), "unavailable", "no_such"),
        ("import importlib\n" + NAIVE, "unavailable", "importlib"),
        (program("raise PermissionError(13, 'squares only')"), "fails", "squares only"),
        (program("exit()"), "fails", "SystemExit"),
        (
            "import os, io, types, warnings, timeit, threading, inspect, csv, zlib, pprint\n"
            + NAIVE,
            "right",
            "times as fast",
        ),
        (f"exec({NAIVE!r})\nnaive = matmul\n" + program("return naive(A, B)"), "right", "fast"),
        (program("while True: pass"), "fails", "timeout"),
        (program("return [[0.0] * 10**9]"), "fails", "memory"),
        ("return 1", "syntax", "outside function"),
        (program("for row in A: yield row"), "fails", "generator"),
        (program("return A, B"), "wrong", "no list of lists"),
        (program("return 'x' * 5_000_000"), "fails", "output"),
        ("from . import x\n" + NAIVE, "unavailable", "no module '.'"),
    ],
)
def test_how_far_a_program_comes(pool, source, stage, words):
    report = judged(source, pool, timeout_s=0.5 if "while True" in source else 10.0)
    assert (report.stage, words in report.why) == (stage, True), (report.stage, report.why)
    assert (
        (report.timing is not None) == (stage == "right")
        and (report.share == 1.0) == (stage == "right")
        and 0 <= report.share <= 1
    )
    if stage == "right":
        assert report.error < 1e-12 and report.squared < 1e-24


@pytest.mark.parametrize(
    "completion, stage",
    [
        ("A times B", "no code"),
        (fenced(NAIVE)[:100], "truncated"),
        ("analysisLet me see", "truncated"),
        (f"analysis{fenced(WRONG)}assistantfinal{fenced(NAIVE)}", "right"),
        (f"{fenced(NAIVE)}{fenced(WRONG)}", "wrong"),
    ],
)
def test_what_a_completion_holds(pool, completion, stage):
    assert judge_matmul(completion, pool, random.Random(0), size=24, trials=1).stage == stage
    assert (
        judge_matmul(
            [{"role": "assistant", "content": completion}],
            pool,
            random.Random(0),
            size=24,
            trials=1,
        ).stage
        == stage
    )


SUBCLASSES = "[].__class__.__base__.__subclasses__()"
ZEROS = "[[0.0] * len(B[0]) for _ in A]"
ATTACKS = {
    "NaN": program("return [[math.nan] * len(B[0]) for _ in A]", "import math"),
    "infinities": program("return [[1e999] * len(B[0]) for _ in A]"),
    "far below": program("return [[-1e300] * len(B[0]) for _ in A]"),
    "nothing": program("return []"),
    "empty rows": program("return [[] for _ in A]"),
    "one entry": program("return [[A[0][0] * B[0][0]]]"),
    "integers": program("return [[0] * len(B[0]) for _ in A]"),
    "booleans": program("return [[True] * len(B[0]) for _ in A]"),
    "equal to everything": program(
        "return Any()",
        "class Any:\n    def __eq__(self, other): return True\n    def __float__(self): "
        "return 0.0\n    def __len__(self): return 3",
    ),
    "a float of its own kind": program(
        "return [[Any(0.0)] * len(B[0]) for _ in A]",
        "class Any(float):\n    def __eq__(self, other): return True\n    def __sub__(self, "
        "other): return 0.0\n    __rsub__ = __sub__\n    __abs__ = lambda self: 0.0",
    ),
    "a list of its own kind": program(
        f"return Rows({ZEROS})",
        "class Rows(list):\n    def __eq__(self, other): return True\n    def "
        "__iter__(self): return iter([])\n    def __len__(self): return 0",
    ),
    "rows of their own kind": program(
        f"return [Rows(row) for row in {ZEROS}]",
        "class Rows(list):\n    def __getitem__(self, i): return 0.0",
    ),
    "a generator": program("for row in A: yield row"),
    "a map": program("return map(list, A)"),
    "tuples": program("return tuple((0.0,) * len(B[0]) for _ in A)"),
    "a dictionary": program("return {i: row for i, row in enumerate(A)}"),
    "one row many times": program("row = [0.0] * len(B[0])\nreturn [row] * len(A)"),
    "a ring": program("C = []\nC.append(C)\nreturn C"),
    "zeroes the inputs": program(
        f"for M in (A, B):\n    for row in M: row[:] = [0.0] * len(row)\nreturn {ZEROS}"
    ),
    "clears the inputs": program("A.clear(); B.clear()\nreturn []"),
    "returns an input": program("return A"),
    "remembers the last call": program(
        f"memory.append((A, B))\nreturn memory[-2][0] if len(memory) > 1 else {ZEROS}",
        "memory = []",
    ),
    "remembers in a default": program(f"seen.append(A)\nreturn {ZEROS}").replace(
        "(A, B)", "(A, B, seen=[])"
    ),
    "a cache": program(
        "return cached(str(A))",
        "import functools\n@functools.cache\ndef cached(key): return [[0.0]]",
    ),
    "a cache in a module": program("import math\nreturn math.__dict__.setdefault('answer', A)"),
    "stops the clock": program(
        f"return {ZEROS}",
        "import time\ntime.perf_counter = time.perf_counter_ns = time.process_time = "
        "time.monotonic = lambda: 0",
    ),
    "sets the clock": program(f"time.clock_settime(0, 0)\nreturn {ZEROS}", "import time"),
    "looks in the frames": program("import sys\nreturn sys._getframe(1).f_locals['truth']"),
    "walks the frames of an exception": program(
        "try: 1 / 0\nexcept Exception as e:\n    f = e.__traceback__.tb_frame\n    while f:\n"
        "        for v in list(f.f_locals.values()):\n            if type(v) is list and "
        "len(v) == len(A) and v is not A and v is not B: return v\n        f = f.f_back\n"
        "return A"
    ),
    "looks among the globals": program("return globals().get('truth') or vars().get('C') or A"),
    "looks among all objects": program(
        "import gc\nreturn [o for o in gc.get_objects() if type(o) is list and len(o) == "
        "len(A)][-1]"
    ),
    "a hidden loader": program(
        f"l = [c for c in {SUBCLASSES} if c.__name__ == 'BuiltinImporter'][0]\nreturn "
        "l.load_module('numpy').matmul(A, B)"
    ),
    "numpy": program("return (numpy.array(A) @ numpy.array(B)).tolist()", "import numpy"),
    "torch": program("from torch import tensor\nreturn (tensor(A) @ tensor(B)).tolist()"),
    "numpy by another route": program(
        "return n.dot(A, B).tolist()", "n = __import__('num' + 'py')"
    ),
    "importlib": program("return A", "import importlib\nn = importlib.import_module('numpy')"),
    "builtins": program("return __builtins__['__import__']('numpy').dot(A, B)"),
    "a C library": program("return A", "import ctypes\nctypes.CDLL(None)"),
    "a file": program("return open('/tmp/answer').read()"),
    "eval": program("return eval('A')"),
    "a second process": program("return A if os.fork() else B", "import os"),
    "threads": program("return A", "import threading"),
    "says so": program("print('correct: True')\nreturn True"),
    "text": program("return 'correct'"),
    "overrides the grader": program(
        f"global max, abs, zip\nmax = abs = lambda *x, **k: 0.0\nreturn {ZEROS}"
    ),
    "overrides it for all": program(
        f"import builtins\nbuiltins.max = lambda *x: 0.0\nreturn {ZEROS}"
    ),
    "huge": program("return [[10.0 ** 308] * len(B[0]) for _ in A]"),
    "leaves": program("raise SystemExit(0)"),
    "forges an answer on the line": program("return A", "import os\nos.write(3, b'v' * 50)"),
    "changes numbers": program(f"A[0][0].__class__.__sub__ = lambda a, b: 0.0\nreturn {ZEROS}"),
}


RAISES = program("raise ValueError")


@pytest.fixture(scope="module")
def judged_once(pool):
    "Three honest failures, an honest success and all attacks."
    return MatmulRewards(pool, size=24, trials=1), [
        fenced(source) for source in (WRONG, RAISES, MISSING, NAIVE, *ATTACKS.values())
    ]


@pytest.mark.parametrize("scale", ["plain", "published"])
def test_no_attack_earns_more_than_an_honest_failure(judged_once, scale):
    once, texts = judged_once
    rewards = MatmulRewards(scale=scale)
    rewards.reports = once.reports
    wrong, raises, missing, honest, *attacks = [
        sum(points)
        for points in zip(*(reward(completions=texts) for reward in rewards.functions()))
    ]
    bar, stages = max(wrong, raises), [report.stage for report in rewards.reports(texts, {})[4:]]
    assert missing <= wrong < honest
    most = {name: min(total, bar) for name, total in zip(ATTACKS, attacks)}
    assert dict(zip(ATTACKS, attacks)) == most
    assert len(ATTACKS) > 45 and "right" not in stages and stages.count("unavailable") < 12


def test_an_attack_that_is_right_has_what_it_deserves(pool):
    for before in ("import time\ntime.perf_counter = lambda: 0\n", "memory = {}\n"):
        assert judged(before + FAST, pool).stage == "right"
    mutates = NAIVE.replace(
        "    return C", "    for row in A + B: row[:] = [0.0] * len(row)\n    return C"
    )
    assert judged(mutates, pool).stage == "right"  # on its own copy


# speed


def test_fast_and_slow_are_told_apart(pool):
    def speed(source, tries, good):
        for seed in range(tries):
            rng = random.Random(seed)
            timing = time_program(
                source,
                pool,
                [(random_matrix(32, 32, rng), random_matrix(32, 32, rng)) for _ in range(3)],
            )
            if good(timing.speed):
                return timing
        raise AssertionError(f"{timing}")

    fast, naive, slow = (
        speed(FAST, 6, lambda s: s > 1.3),
        speed(NAIVE, 6, lambda s: 0.8 < s < 1.25),
        speed(SLOW, 6, lambda s: 0.1 < s < 0.6),
    )
    assert (
        fast.program_ms < fast.naive_ms
        and slow.program_ms > slow.naive_ms
        and fast.fault is None
        and len(fast.answers) == 3
    )
    assert all(
        answer_fault(answer, 32, 32) is None
        for timing in (fast, naive, slow)
        for answer in timing.answers
    )


def test_speed_has_a_ceiling_and_a_floor(pool):
    rng = random.Random(0)
    inputs = [(random_matrix(32, 32, rng), random_matrix(32, 32, rng))] * 2
    # nothing is faster than the way there and back, which is not subtracted
    assert 2 < time_program(RETURNS_AN_INPUT, pool, inputs).speed < 20
    failed = time_program(program("raise ValueError('no')"), pool, inputs)
    assert failed.speed == 0.0 and "no" in failed.fault and failed.answers == [None]
    assert "timeout" in time_program(program("while True: pass"), pool, inputs, timeout_s=0.2).fault


def test_nothing_is_subtracted_and_waiting_counts():
    """So a program that shortens its own way there and back gains what it saves, and not twice."""

    def call(ms, wall_ms=None):
        return SandboxResult(True, [[1.0]], None, "ok", (wall_ms or ms) / 1e3, ms / 1e3)

    def speed(**ms):
        return timing_of([{"naive": call(10.0), "program": call(**ms)}], "processor").speed

    assert speed(ms=2.5) == pytest.approx(4.0)
    assert speed(ms=1.7) / speed(ms=2.5) == pytest.approx(2.5 / 1.7)
    assert counted_ms(call(2.0, wall_ms=7.0), "processor") == pytest.approx(2.0)  # a busy machine
    assert counted_ms(call(2.0, wall_ms=102.0), "processor") == pytest.approx(10.2)  # it slept
    assert counted_ms(call(2.0, wall_ms=7.0), "wall") == pytest.approx(7.0)
    late = SandboxResult(False, None, "no answer", "timeout", 1.0)
    for calls in ({"naive": late, "program": call(1.0)}, {"naive": call(1.0), "program": late}):
        timing = timing_of([calls], "processor")
        assert timing.speed == 0.0 and timing.fault == "timeout: no answer"


def slow(line):
    return NAIVE.replace("    rows,", f"    {line}\n    rows,", 1)


SLEEPS = "import time\n" + slow("time.sleep(0.4)")
SPINS = "import time\n" + slow("end = time.time() + 0.4\n    while time.time() < end: pass")


@pytest.mark.long
def test_a_batch_takes_no_longer_than_its_deadlines():
    """Right programs that sleep or compute a little in each of their eleven calls, or while they
    are loaded, among endless ones and honest ones; one after the other."""
    sources = {
        "sleeps": (SLEEPS, "fails"),
        "spins": (SPINS, "fails"),
        "sleeps at its load": ("import time\ntime.sleep(0.4)\n" + NAIVE, "fails"),
        "sleeps on large ones": (
            slow("len(A) == 16 == len(B) and __import__('time').sleep(9)"),
            "fails",
        ),
        "endless": (program("while True: pass"), "fails"),
        "wrong": (WRONG, "wrong"),
        "right": (NAIVE, "right"),
    }
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with SandboxPool(workers=1) as pool:
            start = time.monotonic() - begin
            rewards = MatmulRewards(pool, size=16, trials=5, deadline_s=1.5, timeout_s=60)
            begin = time.monotonic()
            reports = rewards.judge([fenced(source) for source, _ in sources.values()], "0 None")
            spent = time.monotonic() - begin
    assert [r.stage for r in reports] == [stage for _, stage in sources.values()]
    assert all("timeout: all calls may take 1.5 s" == r.why for r in reports[:5])
    assert spent <= len(sources) * 1.5 + start


def test_waiting_is_not_working_and_the_other_clock_sees_it():
    sleeps = program(
        "time.sleep(0.1)\nreturn [[sum(map(mul, r, c), 0.0) for c in zip(*B)] for r in A]",
        "import time\nfrom operator import mul",
    )
    rng = random.Random(0)
    inputs = [(random_matrix(24, 24, rng), random_matrix(24, 24, rng))] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with SandboxPool(workers=1, without=("processes",)) as pool:
            timing = time_program(sleeps, pool, inputs)
            assert (
                clock_of(pool) == timing.clock == "wall"
                and timing.program_ms > 100
                and timing.speed < 0.5
            )
    wall = (
        types.SimpleNamespace(name="processes", on=True),
        types.SimpleNamespace(name="syscalls", on=True),
        types.SimpleNamespace(name="network", on=False),
    )
    assert clock_of(types.SimpleNamespace(protections=wall)) == "processor"


def test_steps_of_half_a_doubling():
    assert [speed_steps(2**x) for x in (-3, -0.3, 0, 0.24, 0.26, 0.74, 0.76, 1, 2.1, 4.9, 30)] == [
        0,
        0,
        0,
        0,
        0.5,
        0.5,
        1.0,
        1.0,
        2.0,
        5.0,
        5.0,
    ]
    assert (
        speed_steps(0.0) == 0.0
        and speed_steps(1e300, most=3.0) == 3.0
        and all(type(speed_steps(x)) is float for x in (0.5, 1.0, 3.0))
    )


# rewards


def report(stage, error=math.inf, squared=math.inf, share=0.0, speed=None):
    return MatmulReport(
        Program(NAIVE),
        stage,
        "",
        error,
        squared,
        share,
        Timing(speed, 1.0, 1.0, "wall", []) if speed else None,
    )


@pytest.mark.parametrize(
    "error, points",
    [
        (math.inf, -3.0),
        (3.0, -3.0),
        (2.5, -2.5),
        (1.5, -2.0),
        (0.7, -1.0),
        (0.3, 0.0),
        (1e-11, 0.0),
        (1e-12, 1.0),
        (1e-13, 1.0),
        (1e-14, 3.0),
        (0.0, 3.0),
        (math.nan, -3.0),
    ],
)
def test_the_ladder(error, points):
    assert ladder_points(error) == points


STAGES = ["no code", "syntax", "cheats", "unavailable", "fails", "wrong", "right"]


def test_the_published_scale():
    reports = [
        report(
            stage, *(dict(wrong=(2.2, 1.2, 0.3), right=(1e-15, 1e-30, 1.0, 250.0)).get(stage, ()))
        )
        for stage in STAGES
    ]
    assert [WORKS["published"][r.stage] for r in reports] == [-2, -2, -0.5, -2, -0.5, 1, 1]
    assert [HONEST["published"][r.stage] for r in reports] == [0, 0, -20, 0, 1, 1, 1]
    assert [correct_points(r, "published") for r in reports] == [0, 0, 0, -2, -2, -4.5, 6]
    assert [fast_points(r, "published") for r in reports] == [0.0] * 6 + [2.5]
    assert [
        fast_points(report("right", 0, 0, 1.0, speed), "published")
        for speed in (1.0, 0.5, 0.01, 1e-9, 1e9)
    ] == [0.01, -0.02, -1.0, -10.0, 10.0]
    assert correct_points(report("wrong"), "published") == -6.0  # NaN, once worth 6


def test_the_plain_scale():
    reports = [
        report(stage, *(dict(wrong=(2.2, 1.2, 0.3), right=(1e-15, 1e-30, 1.0, 4.0)).get(stage, ())))
        for stage in STAGES
    ]
    for count, expected in (
        (correct_points, [0, 0, 0, 0, 0, 0, 1]),
        (fast_points, [0, 0, 0, 0, 0, 0, 2]),
    ):
        assert [count(r, "plain") for r in reports] == expected
    assert [WORKS["plain"][r.stage] for r in reports] == [0, 0, 0, 0, 0, 1, 1]
    assert HONEST["plain"] == WORKS["plain"]


@pytest.mark.parametrize("scale", ["plain", "published"])
def test_a_completion_that_was_cut_off_is_scored_apart(pool, scale):
    texts = [fenced(WRONG), fenced(NAIVE)[:60], "analysisLet me think"]
    for truncated, rest in ((None, None), (-0.5, 0.0), (0.0, 0.0)):
        rewards = MatmulRewards(pool, scale=scale, truncated=truncated)
        assert [f(completions=texts)[1:] for f in rewards.functions()] == [
            [truncated] * 2,
            [rest] * 2,
            [rest] * 2,
            [rest] * 2,
        ]
        assert None not in [f(completions=texts)[0] for f in rewards.functions()]


def test_a_batch_is_judged_once_with_matrices_that_nobody_can_foresee(pool, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        matmul,
        "judge_matmul",
        lambda text, pool, rng, **settings: drawn.append((text, rng.random())) or report("syntax"),
    )

    def step(rewards, k):
        return [
            f(completions=["a", "b", "a"], trainer_state=types.SimpleNamespace(global_step=k))
            for f in rewards.functions()
        ]

    rewards = MatmulRewards(pool)
    step(rewards, 0)
    assert [text for text, _ in drawn] == ["a", "b"] and drawn[0][1] == drawn[1][
        1
    ]  # the same for a group
    step(rewards, 1)
    assert len(drawn) == 4 and drawn[2][1] != drawn[0][1]
    for k in (0, 0, 1):
        step(MatmulRewards(pool, secret="four"), k)
    assert drawn[4:6] == drawn[6:8] != drawn[8:10]  # on two processes; at the next step


def test_the_trainers_secret_is_what_matrices_are_drawn_from(pool, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        matmul,
        "judge_matmul",
        lambda text, pool, rng, **settings: drawn.append(rng.random()) or report("syntax"),
    )
    for secret, own in (("a", None), ("a", None), ("b", None), ("b", "mine"), ("c", "mine")):
        state = types.SimpleNamespace(global_step=3, secret=secret)
        MatmulRewards(pool, secret=own).function_works(["x"], trainer_state=state)
    assert drawn[0] == drawn[1] != drawn[2] != drawn[3] == drawn[4]
    with pytest.raises(TypeError, match="no settings of these names: seed"):
        MatmulRewards(pool, seed=0)


def test_work_that_is_done_while_a_program_is_read_counts(pool):
    "It draws the matrices itself, and multiplies them before the call."
    rng = random.Random("told")
    inputs = [(random_matrix(24, 24, rng), random_matrix(24, 24, rng)) for _ in range(3)]
    draws = NAIVE.replace("matmul", "naive") + (
        "import random\nrng = random.Random('told')\ndef draw():\n    return "
        "[[rng.uniform(-1.0, 1.0) for _ in range(24)] for _ in range(24)]\n"
        "pairs = [(draw(), draw()) for _ in range(3)]\n"
        "table = {A[0][0]: naive(A, B) for A, B in pairs}\n"
        "def matmul(A, B): return table[A[0][0]]\n"
    )
    timing = time_program(draws, pool, inputs)
    assert timing.fault is None and timing.answers[0] == trusted(NAIVE, "matmul")(*inputs[0])
    assert timing.speed < 1.2


def test_under_the_trainers_eyes(pool):
    rewards, logged = MatmulRewards(pool, size=24, trials=2), {}
    completions = [
        [{"role": "assistant", "content": fenced(source)}]
        for source in (FAST, WRONG, "def matmul(A, B) return A")
    ]
    table = score_completions(
        rewards.functions(),
        matmul_problems(3),
        completions,
        completion_ids=None,
        log_metric=lambda name, value: logged.update({name: value}),
    )
    assert (
        table[0, :3].tolist() == [1.0, 1.0, 1.0]
        and table[1].tolist() == [1.0, 1.0, 0.0, 0.0]
        and table[2].tolist() == [0.0] * 4
    )
    assert logged["matmul/speed"] == rewards.reports(completions, {})[0].timing.speed > 0
    assert [f.__name__ for f in rewards.functions()] == [
        "function_works",
        "no_cheating",
        "correctness_check",
        "speed_check",
    ]


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="scale is 'nice', and it must be one of plain, published"):
        MatmulRewards(scale="nice")
    with pytest.raises(TypeError, match="no settings of these names: games; there are size"):
        MatmulRewards(games=4)
    with pytest.raises(ValueError, match="size is 8, and below 16 the clock measures little"):
        MatmulRewards(size=8)


def test_the_problems(pool):
    rows = matmul_problems(2, size=40)
    text = rows[0]["prompt"][0]["content"]
    assert len(rows) == 2 and "40 rows" in text
    listed = text.partition("These modules exist: ")[2].partition(".\n")[0].split()
    assert {"math", "os", "operator", "zlib"} <= set(listed)
    for name in listed:
        assert pool.run(f"import {name}\ndef f(): return 1", entry="f").value == 1, name
    assert (
        judge_matmul(rows[0]["prompt"], pool, random.Random(0)).stage == "fails"
    )  # the example in the prompt is a gap to be filled
