"""environments.sandbox: deadlines, limits, walls that are missing, sessions, lost supervisors, and
the documents' four names."""

import ast
import contextlib
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path

import pytest
import yaml

from grpo_nb import cli
from grpo_nb.environments import sandbox, supervisor
from grpo_nb.environments.sandbox import (
    Benchmarker,
    MemoryGroup,
    SandboxError,
    SandboxPool,
    SandboxResult,
    SandboxTimeout,
    WallsMissing,
    check_only_stdlib_imports,
    create_locked_down_function,
    execute_with_time_limit,
    run_python,
)
from grpo_nb.environments.supervisor import Protections, encode

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = "def f(x): return 2 * x"
LOOP = "def f():\n    while True: pass"
OS = "import random\nos = random._os\n"


@pytest.fixture(scope="module")
def pool():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with SandboxPool(workers=2) as pool:
            yield pool


def descendants(pid=None):
    "All processes below this one; what ends while we look is left out."
    found, pid = [], pid or os.getpid()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found += [int(child), *descendants(int(child))]
    return found


def open_files(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has just ended


def used_ticks(pid):
    try:
        return sum(
            map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
        )
    except (FileNotFoundError, ProcessLookupError):
        return 0


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition, seconds=10.0):
    "Whether something becomes true; processes need a moment to end."
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def result(pool, source, *args, **options):
    return pool.run(source, entry="f", args=args, **options)


# values
def same(a, b):
    "Equal, of the same types, floats to the bit."
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    if type(a) is dict:
        return same(list(a.items()), list(b.items()))
    return len(a) == len(b) and all(map(same, a, b)) if type(a) in (list, tuple) else a == b


# running programs
def test_values_in_and_out(pool):
    for value in (
        None,
        True,
        3,
        -2.5,
        math.inf,
        "né\ud800",
        [1, [2.0, "x"]],
        (1, (2,)),
        {"a": {1: None}},
        [],
        2**80,
        -0.0,
    ):
        assert same(result(pool, "def f(x): return x", value).value, value)
    assert math.isnan(result(pool, "def f(x): return x", math.nan).value)
    assert result(pool, "def f(*args): return len(args)", 1, 2, 3).value == 3
    matrix = [[float(i * j) for j in range(100)] for i in range(100)]
    assert result(pool, "def f(a): return [list(row) for row in zip(*a)]", matrix).value == [
        list(row) for row in zip(*matrix)
    ]


def test_the_result_of_an_honest_program(pool):
    good = result(pool, DOUBLE, 21)
    assert (
        good == SandboxResult(True, 42, None, "ok", good.seconds, good.cpu_seconds)
        and 0 < good.seconds < 5
    )
    bad = result(pool, "def f():\n    x = 1\n    return x / 0")
    assert (bad.ok, bad.value, bad.kind) == (
        False,
        None,
        "exception",
    ) and bad.error == "ZeroDivisionError: division by zero (line 3)"


@pytest.mark.parametrize(
    "body",
    [
        (
            "import math, random, itertools, functools, collections, heapq, bisect, re, string, "
            "statistics, decimal, fractions, operator, copy, dataclasses, typing, enum, numbers, "
            "array\n    return math.comb(5, 2)"
        ),
        (
            "from collections import abc, Counter, defaultdict, deque\n    return "
            "len(Counter('aab')) + 8"
        ),
        "import collections.abc\n    return 10 if isinstance([], collections.abc.Sequence) else 0",
        (
            "from dataclasses import dataclass, field\n    @dataclass(order=True)\n    class P:\n"
            "        x: int\n        y: list = field(default_factory=list)\n    return P(10).x"
        ),
        "from collections import namedtuple\n    return sum(namedtuple('P', 'x y')(4, 6))",
        (
            "import statistics, fractions, decimal\n    return "
            "int(statistics.mean([fractions.Fraction(5), 15])) + int(decimal.Decimal(0))"
        ),
        "import enum\n    class E(enum.Enum):\n        A = 10\n    return E.A.value",
        "import functools\n    @functools.singledispatch\n    def g(x): return 10\n    return g(1)",
        (
            "import json, re, datetime, textwrap, string\n    return json.loads('[10]')[0] + "
            "len(re.findall('z', 'abc')) + 0 * datetime.datetime.strptime('2020', '%Y').year"
        ),
        (
            "import sys, time\n    sys.setrecursionlimit(5000)\n    def g(n): return 0 if n == 0 "
            "else 1 + g(n - 1)\n    return g(3000) // 300"
        ),
        "print('hello', 3, sep='-', end='')\n    return 10",
        "class A:\n        @property\n        def x(self): return 10\n    return A().x",
        "import random\n    random.seed(3)\n    return 10 if random.shuffle([1, 2]) is None else 0",
        "return max(10, *[hash(str(i)) % 2 for i in range(9)])",
        (
            "import hashlib, struct, contextlib, graphlib\n    return "
            "len(hashlib.sha256(b'x').digest()) - 22"
        ),
        "return int('１０') if 'é'.upper() == 'É' else 0",
        "import copy, typing\n    return copy.deepcopy({'a': [10]})['a'][0]",
    ],
)
def test_honest_code_runs(pool, body):
    got = result(pool, "def f():\n    " + body)
    assert got.value == 10, got


# what programs asked for that were called cheats: 36 modules, of which 10 could be had
ASKED = """
    os types io warnings timeit threading inspect csv zlib pprint base64 binascii ast contextvars
    difflib dis gc getopt gzip hmac logging pickle queue secrets traceback weakref unittest argparse
    math random itertools functools operator array collections time
""".split()


def test_the_standard_library_is_there_or_unavailable(pool):
    "No module is an attack: each can be had, or is said to be missing."
    kinds = {
        name: result(pool, f"import {name}\ndef f(): return 1").kind
        for name in sorted(sys.stdlib_module_names)
        if name not in ("antigravity", "this")
    }
    assert set(kinds.values()) == {"ok", "unavailable"}
    there = {name for name, kind in kinds.items() if kind == "ok"}
    assert set(ASKED) <= there and len(ASKED) == 36 and len(there) > 80
    assert not there & {"subprocess", "ctypes", "socket", "multiprocessing", "asyncio", "signal"}


@pytest.mark.parametrize(
    "source, kind",
    [
        ("from math import no_such_function\ndef f(): return 1", "unavailable"),
        ("import os\ndef f(): return os.fork()", "unavailable"),
        ("from os import fork\ndef f(): return 1", "unavailable"),
        ("def f(): return input()", "unavailable"),
        ("def f():\n    try: import numpy\n    except ImportError: return 1", "ok"),
        ("def f(): exec('x = 1', names := {}); return names['x']", "ok"),
        ("def f(): return eval('1', {'__builtins__': {}})", "ok"),
        ("def f():\n    exec(compile('x = 1', 'g', 'exec'), n := {})\n    return n['x']", "ok"),
        ("def f(): exec('import numpy')", "unavailable"),
        ("def f(): exec('open(1)')", "forbidden"),
        ("def f(): raise PermissionError(13, 'squares only')", "exception"),
        ("def f(): exit()", "exception"),
        ("import sys\ndef f(): sys.exit(1)", "exception"),
        ("import random\ndef f(): return random._os.listdir('/')", "forbidden"),
    ],
)
def test_what_is_missing_is_not_what_is_forbidden(pool, source, kind):
    got = result(pool, source)
    assert got.kind == kind and (not got.ok or got.value == 1), got


def test_one_deadline_for_many_calls(pool):
    sleeps = "import time\ndef f(): time.sleep(0.15)"
    begin, kinds = time.monotonic(), []
    with sandbox.deadline(0.5):
        while not sandbox.time_is_up():
            kinds.append(result(pool, sleeps, timeout_s=5).kind)
        late = result(pool, LOOP, timeout_s=5)
    assert kinds[0] == "ok" and late.kind == "timeout" and time.monotonic() - begin < 1.5
    assert result(pool, "import time\ndef f(): return time.sleep(0.6)", timeout_s=5).ok
    with sandbox.deadline(0.3), pool.open(LOOP, "f", timeout_s=60) as session:
        spins = session.call()
    assert spins.kind == "timeout" and spins.seconds < 1 and spins.cpu_seconds <= 0.35
    with sandbox.deadline(0.2), sandbox.deadline(60):
        assert result(pool, LOOP, timeout_s=5).seconds < 1  # the nearest one holds
    with pytest.raises(ValueError, match="positive"):
        with sandbox.deadline(0):
            pass


def test_waiting_for_a_supervisor_is_part_of_the_deadline():
    with SandboxPool(workers=1) as narrow:
        thread, _ = in_background(lambda: result(narrow, LOOP, timeout_s=0.6))
        assert eventually(lambda: narrow._idle.empty())
        with sandbox.deadline(0.5):
            assert result(narrow, LOOP, timeout_s=5).seconds < 0.4
        thread.join()


def test_each_program_has_numbers_of_its_own(pool):
    drawn = [result(pool, "import random\ndef f(): return random.random()").value for _ in range(4)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (dict(args=(object(),)), ValueError, "object"),
        (dict(args=({1, 2},)), ValueError, "tolist"),
        (dict(timeout_s=0), ValueError, "timeout_s"),
        (dict(timeout_s=math.nan), ValueError, "timeout_s"),
        (dict(memory_mb=10), ValueError, "at least 64"),
        (dict(source=b"x"), TypeError, "source"),
        (dict(entry=None), TypeError, "entry"),
        (dict(timeout=3), TypeError, "timeout"),
    ],
)
def test_arguments_that_cannot_be(pool, wrong, error, says):
    with pytest.raises(error, match=says):
        pool.run(**{"source": DOUBLE, "entry": "f", **wrong})


def test_arrays_are_refused_with_advice(pool):
    import numpy as np

    with pytest.raises(ValueError, match="tolist"):
        result(pool, DOUBLE, np.zeros(3))
    with pytest.raises(ValueError, match="float64"):
        result(pool, DOUBLE, np.float64(3))


def test_a_pool_that_cannot_be():
    with pytest.raises(ValueError, match="workers"):
        SandboxPool(workers=0)
    with pytest.raises(ValueError, match="moat"):
        SandboxPool(without=("moat",))
    with SandboxPool(workers=1) as closed:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        closed.run(DOUBLE, entry="f", args=(1,))


def test_a_source_without_end_is_a_syntax_error(pool):
    assert result(pool, "#" * 2_000_000).kind == "syntax"


def test_deadline(pool):
    for seconds in (0.1, 0.4):
        before = set(descendants())
        runs = [result(pool, LOOP, timeout_s=seconds) for _ in range(5)]
        assert {late.kind for late in runs} == {"timeout"}
        assert seconds <= min(late.seconds for late in runs) < seconds + 0.3
        assert max(late.cpu_seconds for late in runs) > seconds / 20  # the machine may be busy
        assert eventually(lambda: set(descendants()) <= before)


@pytest.mark.parametrize("megabytes", [96, 256])
def test_memory_is_bounded(pool, megabytes):
    grow = (
        "def f():\n    blocks = []\n    try:\n        while True: "
        "blocks.append(bytearray(2**20))\n    except MemoryError: return len(blocks)"
    )
    got = result(pool, grow, memory_mb=megabytes)
    assert megabytes / 2 < got.value <= megabytes
    assert (
        result(
            pool,
            "def f():\n    blocks = []\n    while True: blocks.append(bytearray(2**20))",
            memory_mb=megabytes,
        ).kind
        == "memory"
    )


def test_many_threads(pool):
    answers = {}

    def work(i):
        answers[i] = [
            result(pool, "def f(i, k): return i * 1000 + k", i, k).value for k in range(8)
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: [i * 1000 + k for k in range(8)] for i in range(10)}


def test_nothing_of_ours_is_in_there(pool, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with SandboxPool(workers=1) as fresh:
        look = OS + (
            "def f(): return [dict(os.environ), os.sys.argv[1:], sorted(m for m in "
            "os.sys.modules if 'grpo' in m or 'torch' in m), os.getppid()]"
        )
        environment, argv, modules, parent = result(fresh, look).value
    assert (
        "secret" not in json.dumps(environment)
        and not set(environment) - {"LC_CTYPE", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
        and argv == ["serve"]
        and modules == []
    )


def test_a_supervisor_keeps_nothing_of_a_program():
    """Its memory is what the next program inherits: no source, no argument and no answer may be in
    it."""

    def memory(pid):
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as file:
            for line in maps:
                span, rights = line.split()[:2]
                if rights.startswith("rw") and "[v" not in line:
                    begin, end = (int(x, 16) for x in span.split("-"))
                    file.seek(begin)
                    yield file.read(end - begin)

    def mark():
        return "".join(random.choices("abcdefgh", k=24))

    in_source, in_argument, in_error = mark(), mark(), mark()
    with SandboxPool(
        workers=1, without=("network",)
    ) as pool:  # (a network of its own, for a user who is not root, closes its memory to us)
        (line,) = pool._supervisors.values()
        assert (
            result(pool, f"def f(x): return [x + '{in_source}'] * 50", in_argument).value
            == [in_argument + in_source] * 50
        )
        assert (
            result(pool, f"def f(x): raise ValueError('{in_error}')", in_argument).kind
            == "exception"
        )

        def found():
            return [
                word
                for word in (in_source, in_argument, in_error)
                if any(word.encode() in part for part in memory(line.process.pid))
            ]

        assert any(b"supervisor" in part for part in memory(line.process.pid))
        assert eventually(lambda: not found()), (
            found()
        )  # it wipes after it has answered, and before it forks again


def test_no_leak(pool):
    for _ in range(5):
        result(pool, DOUBLE, 1)
    gc.collect()
    before = (
        len(os.listdir("/proc/self/fd")),
        len(descendants()),
        [open_files(pid) for pid in descendants()],
    )
    for source in (
        DOUBLE,
        "def f(x",
        "def f(x): return open('x')",
        OS + "def f(x): os._exit(1)",
        OS + "def f(x): os.fork()",
    ) * 20:
        result(pool, source, 1)
    for _ in range(5):
        with pool.open(DOUBLE, "f") as session:
            session.call(1)

    def after():
        return (
            len(os.listdir("/proc/self/fd")),
            len(descendants()),
            [open_files(pid) for pid in descendants()],
        )

    assert eventually(
        lambda: result(pool, DOUBLE, 1).ok and result(pool, DOUBLE, 1).ok and after() == before
    )


def test_a_program_is_cheap(pool):
    """200 a second on 2 cores are 10 ms of processor for each, on both sides together; half as much
    again for a machine that is busy."""

    def used():
        return time.process_time() + sum(map(used_ticks, descendants())) / os.sysconf("SC_CLK_TCK")

    def once(n=50):
        begin = used()
        for i in range(n):
            result(pool, DOUBLE, i)
        return (used() - begin) / n

    assert min(once() for _ in range(4)) < 0.015


def test_run_python_without_a_pool():
    before = (
        len(os.listdir("/proc/self/fd")),
        len([child for child in descendants() if alive(child)]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            run_python(DOUBLE, entry="f", args=(4,)).value == 8
            and run_python(LOOP, entry="f", timeout_s=0.1).kind == "timeout"
        )
    assert eventually(
        lambda: (
            (
                len(os.listdir("/proc/self/fd")),
                len([child for child in descendants() if alive(child)]),
            )
            <= before
        )
    )


# supervisors that are lost
def in_background(action):
    box = []
    thread = threading.Thread(target=lambda: box.append(action()))
    thread.start()
    return thread, box


def test_a_killed_supervisor_costs_one_program():
    with SandboxPool(workers=1) as pool:
        (first,) = [line.process.pid for line in pool._supervisors.values()]
        thread, box = in_background(lambda: result(pool, LOOP, timeout_s=20))
        assert eventually(lambda: len(descendants(first)) == 1)
        (program,) = descendants(first)
        os.kill(first, signal.SIGKILL)
        thread.join()
        assert box[0].kind == "crash" and "supervisor was lost" in box[0].error
        assert eventually(lambda: not alive(program) and not alive(first))
        assert result(pool, DOUBLE, 3).value == 6 and [
            line.process.pid for line in pool._supervisors.values()
        ] != [first]


@pytest.mark.parametrize("garbage", [b"v" + b"\xff" * 20, b"?" + b"\0" * 20, b"half", b""])
def test_garbage_on_the_line_costs_one_program(garbage):
    with SandboxPool(workers=1) as pool:
        ours, theirs = socket.socketpair()
        pool._supervisors[0].socket.close()
        pool._supervisors[0].socket = ours
        theirs.sendall(garbage)
        theirs.shutdown(socket.SHUT_WR)
        assert result(pool, DOUBLE, 3).kind == "crash" and result(pool, DOUBLE, 3).value == 6
        theirs.close()


def test_an_interrupted_call_costs_one_supervisor(monkeypatch):
    with SandboxPool(workers=1) as pool:

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as m:
            m.setattr(sandbox.SupervisorConnection, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                result(pool, DOUBLE, 3)
        assert result(pool, DOUBLE, 3).value == 6


CHILD = (
    """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
from grpo_nb.environments.sandbox import SandboxPool
pool = SandboxPool(workers=2)
session = pool.open("def f():\\n    while True: pass", "f")
"""
    'threading.Thread(target=lambda: pool.run("def f():\\n    while True: pass", '
    'entry="f", timeout_s=100), daemon=True).start()'
    """
threading.Thread(target=lambda: session.call(timeout_s=100), daemon=True).start()
time.sleep(0.5)
print(os.getpid(), flush=True)
{end}
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os._exit(1)",
        "sys.exit(0)",
        "raise ValueError",
        "time.sleep(100)",
    ],
)
def test_nothing_is_left_when_the_training_process_ends(end):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CHILD.replace("{end}", end if end != "time.sleep(100)" else "sys.stdin.read()"),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    found = set()

    def look():
        try:
            found.update(descendants(process.pid))
        except (FileNotFoundError, ProcessLookupError):
            pass
        return len(found) >= 5  # two supervisors, one for the session, two programs

    assert eventually(look, 30)
    process.stdout.readline()
    if end == "time.sleep(100)":
        process.kill()
    process.wait(10)
    assert eventually(lambda: not any(map(alive, found)))
    process.stdin.close(), process.stdout.close()


def test_a_pool_that_is_closed_while_it_is_used():
    pool = SandboxPool(workers=1)
    (line,) = pool._supervisors.values()
    running, box = in_background(lambda: result(pool, LOOP, timeout_s=60))
    assert eventually(lambda: descendants(line.process.pid))

    def waits():
        try:
            return result(pool, LOOP, timeout_s=60)
        except RuntimeError as error:
            return error

    waiting, second = in_background(waits)
    time.sleep(0.1)
    pool.close()
    running.join(), waiting.join()
    assert box[0].kind == "crash" and "closed" in str(second[0]) and not alive(line.process.pid)


def test_a_pool_is_for_the_process_that_made_it():
    code = (
        "import os, warnings\nwarnings.simplefilter('ignore')\nfrom "
        "grpo_nb.environments.sandbox import SandboxPool\npool = SandboxPool(workers=1)\n"
        "if os.fork() == 0:\n    try: pool.run('def f(): return 1', entry='f')\n    except "
        "RuntimeError as e: print(e, flush=True)\n    pool.close()\n    os._exit(0)\n"
        "os.wait()\nprint(pool.run('def f(): return 5', entry='f').value)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "made in another process" in said and said.endswith("5\n")


# walls that are missing
UNPRIVILEGED = (
    """
import json, os, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from grpo_nb.environments.sandbox import SandboxPool
    pool = SandboxPool(workers=2)
os_ = "import random\\nos = random._os\\n"
programs = {
"""
    '    "ok": "def f(): return 7", "timeout": "def f():\\n    while True: pass", '
    '"memory": "def f(): return bytearray(10**9)", "forbidden": "def f(): '
    "return open('/etc/passwd')\",\n"
    '    "fork": os_ + "def f(): return os.fork()", "kill": os_ + "def f(): os.kill(%d, '
    '9)" % os.getpid(), "read": os_ + "def f(): return os.open(\'/etc/passwd\', 0)",\n'
    '    "crash": os_ + "def f(): os._exit(0)", "socket": os_ + "def f(): '
    'return os.sys.modules[\'_socket\'].socket()", "output": "def f():\\n    while True: '
    "print('x' * 1000)\",\n"
    "}\n"
    'kinds = {name: pool.run(source, entry="f", timeout_s=0.5, '
    "memory_mb=256).kind for name, source in programs.items()}\n"
    'with pool.open("n = []\\ndef f(x):\\n    n.append(x)\\n    return sum(n)", '
    '"f") as session: calls = [session.call(i).value for i in range(4)]\n'
    'print(json.dumps({"uid": os.geteuid(), "missing": {p.name: '
    'p.missing for p in pool.protections if not p.on}, "warnings": '
    '[str(w.message) for w in seen], "stopped": [t.stopped for t in pool.trials], "kinds": kinds, '
    '"calls": calls}))\n'
)


def test_as_an_unprivileged_user():
    """Root becomes nobody here, and keeps the one right that it needs to find an interpreter in
    root's folder."""
    command = [sys.executable, "-c", UNPRIVILEGED]
    if os.geteuid() == 0:
        command = [
            shutil.which("setpriv"),
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=+dac_read_search",
            "--ambient-caps=+dac_read_search",
            "--bounding-set=-all,+dac_read_search",
            *command,
        ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (
        said["uid"] != 0
        and {"user", "pids"} <= set(said["missing"])
        and "memory" not in said["missing"]
        and "files" not in said["missing"]
        and "processes" not in said["missing"]
    )
    assert said["stopped"] == [True] * 9 and said["warnings"] == []
    assert said["kinds"] == {
        "ok": "ok",
        "timeout": "timeout",
        "memory": "memory",
        "forbidden": "forbidden",
        "fork": "forbidden",
        "kill": "forbidden",
        "read": "forbidden",
        "crash": "crash",
        "socket": "forbidden",
        "output": "output",
    } and said["calls"] == [0, 1, 3, 6]


# the walls are tried
WEAK = {  # trial -> walls that have to be left off until it gets through
    "read": ("syscalls", "files"),
    "write": ("syscalls", "files"),
    "unlink": ("syscalls",),
    "rename": ("syscalls",),
    "symlink": ("syscalls",),
    "kill": ("syscalls", "pids", "user"),
    "socket": ("syscalls", "files"),
    "fork": ("syscalls", "processes"),
    "memory": ("memory",),
}
PROGRAMS = {  # trial -> what an attacker would write
    "read": "return os.read(os.open(folder + '/a', 0), 9)[:0].decode() + 'done'",
    "write": "return 'done' * (os.open(folder + '/a', os.O_WRONLY) > 0)",
    "unlink": "return os.unlink(folder + '/a') or 'done'",
    "rename": "return os.rename(folder + '/a', folder + '/b') or 'done'",
    "symlink": "return os.symlink('/', folder + '/c') or 'done'",
    "kill": "return os.kill(pid, 9) or 'done'",
    "socket": "return os.sys.modules['_socket'].socket() and 'done'",
    "fork": "return 'done' if os.fork() else os._exit(0)",
    "memory": "return len(bytes(2**30)) and 'done'",
}


def quietly(**options):
    "A pool that may be weak, without its warning."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return SandboxPool(workers=1, allow_weak=True, **options)


def test_every_trial_has_a_program_that_does_the_same():
    assert set(WEAK) == set(PROGRAMS) == set(supervisor.HARM)


@pytest.fixture
def machine(tmp_path):
    "A folder that anyone may write to, and a process to lose."
    folder = tmp_path / "open"
    folder.mkdir()
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path.stat().st_mode & 0o111 != 0o111:
            path.chmod(path.stat().st_mode | 0o111)
    (folder / "a").write_text("alive")
    folder.chmod(0o777), (folder / "a").chmod(0o666)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield folder, process
    process.kill(), process.wait()


@pytest.mark.parametrize("name", WEAK)
def test_a_pool_starts_only_if_programs_are_stopped(name, pool, machine):
    """With all walls a program fails to do it. With the walls left off that stop it, the trial says
    so, the pool refuses to start, and a program of a weak pool does what the trial says."""
    folder, process = machine
    source = OS + f"def f(folder, pid):\n    {PROGRAMS[name]}"
    args = (str(folder), process.pid)

    def untouched():
        names = sorted(path.name for path in folder.iterdir())
        return names == ["a"] and process.poll() is None

    assert result(pool, source, *args).kind in ("forbidden", "memory") and untouched()
    with pytest.raises(WallsMissing, match=f"{name}: done.*{WEAK[name][0]}") as refused:
        SandboxPool(workers=1, without=WEAK[name])
    assert supervisor.HARM[name] in str(refused.value)
    with quietly(without=WEAK[name]) as weak:
        assert name in [trial.name for trial in weak.trials if not trial.stopped]
        assert result(weak, source, *args, memory_mb=256).value == "done"
    if name in ("unlink", "rename", "symlink"):
        assert not untouched()
    if name == "kill":
        assert process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("wall", supervisor.WALLS)
def test_a_missing_wall_refuses_the_start_only_if_nothing_stands_behind_it(wall):
    "Nothing stands behind these three; without `privileges` the kernel takes no filter."
    if wall in ("syscalls", "memory", "privileges"):
        with pytest.raises(WallsMissing, match=rf"{wall} \(left off on request\)"):
            SandboxPool(workers=1, without=(wall,))
    else:
        with SandboxPool(workers=1, without=(wall,)) as pool:
            assert all(trial.stopped for trial in pool.trials)
            assert [p.name for p in pool.protections if p.missing == "left off on request"] == [
                wall
            ]


def test_a_weak_pool_warns_of_what_its_programs_can_do(recwarn):
    with SandboxPool(workers=1, allow_weak=True) as strong:
        assert all(trial.stopped for trial in strong.trials) and not recwarn.list
    with SandboxPool(workers=1, without=("syscalls",), allow_weak=True):
        (warned,) = recwarn.list
    assert warned.category is RuntimeWarning and all(
        word in str(warned.message) for word in ("delete files", "rename files", "syscalls")
    )


STRICT = r"""
import json, sys, warnings
from grpo_nb.environments import sandbox
from grpo_nb.environments.game2048 import StrategyRewards
from grpo_nb.environments.matmul import MatmulRewards
from grpo_nb.environments.sandbox import SandboxPool, create_locked_down_function, run_python

answer = [{"role": "assistant", "content": "```python\ndef strategy(board): return 'W'\n```"}]
product = [{"role": "assistant", "content": "```python\ndef matmul(A, B): return A\n```"}]
starts = {
    "pool": lambda: SandboxPool(workers=1),
    "run_python": lambda: run_python("def f(): pass", entry="f"),
    "function": lambda: create_locked_down_function("def f(): pass"),
    "2048": lambda: StrategyRewards(games=1).functions()[0]([answer]),
    "matmul": lambda: MatmulRewards().functions()[0]([product]),
}
said = {}
for name, start in starts.items():
    try:
        start()
        said[name] = "started"
    except sandbox.WallsMissing as error:
        said[name] = str(error)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    pool = SandboxPool(workers=1, allow_weak=True)
said["warned"] = [str(w.message) for w in seen]
said["weak"] = [
    run_python("def f(): return 5", entry="f", allow_weak=True).value,
    create_locked_down_function("def f(): return 6", pool=pool)(),
]
said["value"] = pool.run("def f(x): return 2 * x", entry="f", args=(4,)).value
delete = "import random\ndef f(path): return random._os.unlink(path)"
said["deleted"] = pool.run(delete, entry="f", args=(sys.argv[1],), timeout_s=20).error
print(json.dumps(said))
"""


def test_a_container_that_refuses_seccomp_is_refused(machine):
    "A real one: the kernel answers EPERM to a filter and to a namespace."
    folder, _ = machine
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/no_seccomp.py"),
            sys.executable,
            "-c",
            STRICT,
            str(folder / "a"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for name in ("pool", "run_python", "function", "2048", "matmul"):
        assert "does not start" in said[name] and "delete files (unlink: done)" in said[name], name
        assert "syscalls (Operation not permitted)" in said[name], name
    assert len(said["warned"]) == 1 and "delete files" in said["warned"][0]
    assert said["weak"] == [5, 6] and said["value"] == 8
    assert said["deleted"] is None and not (folder / "a").exists()


def test_doctor_says_what_was_tried(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    (stopped,) = [line for line in said.splitlines() if "tried and stopped" in line]
    assert all(name in stopped for name in supervisor.HARM) and "does not start" not in said


def test_doctor_says_why_the_sandbox_is_refused():
    command = [sys.executable, "-c", "from grpo_nb.cli import main; main(['doctor'])"]
    said = subprocess.run(
        [sys.executable, str(ROOT / "tests/no_seccomp.py"), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "tried, and it worked  unlink, rename, symlink" in said
    assert "does not start" in said and "syscalls (Operation not permitted)" in said


def test_a_page_says_where_the_walls_were_tried():
    "As long as no aarch64 machine has run them, it says so; the workflow has a job for one."
    (line,) = [
        line
        for line in (ROOT / "docs/where_it_runs.md").read_text().splitlines()
        if line.startswith("| Linux on aarch64")
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    arms = [job for job in workflow["jobs"].values() if "arm" in str(job["runs-on"])]
    runs = " ".join(step.get("run", "") for job in arms for step in job["steps"])
    assert "tests/environments/test_sandbox.py" in runs and "attacks" in runs
    assert "no aarch64 machine has run it yet" in line


PAGES = [
    "environments/07_sandbox",
    "environments/12_game2048",
    "environments/13_matmul",
    "environments/14_played",
    "tutorials/05_laboratory",
    "tutorials/06_game2048_gpt_oss",
    "tutorials/07_matmul_gpt_oss",
    "tutorials/09_from_unsloth_gpt_oss_2048",
    "widgets/09_rewards",
]


def pools_of(page):
    "Every call of `SandboxPool` in a page that is not in a module's cell."
    for cell in json.loads(page.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not re.search(r"^#\|\s*export|^\s*%", source, re.M):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SandboxPool":
                    yield ast.unparse(node)


def test_pages_say_in_one_cell_what_they_give_up():
    "All pages that make a pool, and in each the one cell, its words before it, and every pool."
    pages = {path: list(pools_of(path)) for path in (ROOT / "nbs").rglob("*.ipynb")}
    assert {str(p.relative_to(ROOT / "nbs"))[:-6] for p, pools in pages.items() if pools} == set(
        PAGES
    )
    for page, pools in pages.items():
        cells = ["".join(c["source"]) for c in json.loads(page.read_text())["cells"]]
        switches = [i for i, cell in enumerate(cells) if cell.startswith("ALLOW_WEAK = ")]
        assert len(switches) == bool(pools), page
        for i in switches:
            assert cells[i - 1].startswith("**What is given up where a wall is missing.**"), page
        for pool in pools:
            assert "allow_weak=" in pool or pool.endswith("without=('syscalls',))"), (page, pool)


@pytest.mark.full
@pytest.mark.parametrize("name", PAGES)
def test_notebooks_run_where_seccomp_is_refused(name, tmp_path):
    page = shutil.copy(ROOT / f"nbs/{name}.ipynb", tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")  # what pages read of a clone
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/no_seccomp.py"),
            sys.executable,
            str(ROOT / "tools/notebooks.py"),
            "run",
            page,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_system_without_fork_is_refused(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(WallsMissing, match="no os.fork.*delete files.*WSL.*allow_weak=True"):
        SandboxPool()
    report = sandbox.wall_report()
    assert not any(trial["stopped"] for trial in report["trials"].values())
    assert "no os.fork" in "\n".join(sandbox.wall_lines(report))


def test_a_weak_pool_without_fork_runs_programs(monkeypatch, recwarn):
    monkeypatch.delattr(os, "fork")
    programs = {
        "ok": "def f(): return [1, {'two': None}]",
        "syntax": "def f(",
        "exception": "def f(): 1 / 0",
        "timeout": "def f():\n    while True: pass",
        "memory": "def f(): return [0] * 10**15",
        "forbidden": "def f(): open('x')",
        "output": "def f():\n    while True: print('x' * 1000)",
        "crash": OS + "def f(): os._exit(3)",
    }
    before = set(descendants())
    with SandboxPool(workers=2, allow_weak=True) as bare:
        assert "Walls that are missing: all (this system has no os.fork)" in str(recwarn[0].message)
        for kind, source in programs.items():
            assert result(bare, source, timeout_s=1.0).kind == kind
        assert result(bare, "def f(x): return x", [0.5] * 1000).value == [0.5] * 1000
        assert result(bare, OS + "def f(): return os.write(3, b'?' * 9)").kind == "crash"
        remember = (
            "seen = []\ndef f(x):\n    seen.append(x)\n    while x == 3: pass\n    return seen"
        )
        with bare.open(remember, "f", timeout_s=0.5) as session, bare.open(DOUBLE, "f") as other:
            assert [session.call(x).value for x in (1, 2)] == [[1], [1, 2]]
            assert [session.call(3).kind for _ in range(2)] == ["timeout", "timeout"]
            assert other.call(4).value == 8
        assert bare.open("def f(", "f").loaded.kind == "syntax"
        slow = result(bare, "import time\ndef f(): time.sleep(0.05)")
        assert slow.cpu_seconds == slow.seconds > 0.05 and "nothing limits it" in bare.memory_bound
    assert eventually(lambda: set(descendants()) <= before)


def test_a_processor_without_a_table_has_no_filter(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="riscv64"))
    walls = Protections()
    walls.build("syscalls", walls.prepare_filter)
    assert "riscv64" in walls.missing["syscalls"]


def test_a_supervisor_that_is_replaced_is_tried_again():
    with SandboxPool(workers=1) as pool:
        (line,) = pool._supervisors.values()
        pool._without = ("syscalls",)  # as if the system had changed meanwhile
        os.kill(line.process.pid, signal.SIGKILL)
        assert result(pool, DOUBLE, 1).kind == "crash"
        with pytest.raises(WallsMissing, match="delete files"):
            result(pool, DOUBLE, 1)


def test_trials_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with quietly() as pool:
        (line,) = pool._supervisors.values()
        assert list(tmp_path.iterdir()) == [] and descendants(line.process.pid) == []
    with quietly(without=tuple(supervisor.WALLS)) as pool:
        (line,) = pool._supervisors.values()
        assert list(tmp_path.iterdir()) == [] and descendants(line.process.pid) == []


@pytest.mark.parametrize(
    "said, status, stopped",
    [
        (b"ready:srefused: no memory", 0, True),
        (b"ready:tdone", 0, False),
        (b"ready:fNo such file or directory", 0, False),
        (b"ready:", signal.SIGSYS, True),
        (b"ready:", signal.SIGSEGV, False),
        (b"ready:", 0, False),
        (b"", signal.SIGSYS, False),
        (b"", 0, False),
    ],
)
def test_only_a_refusal_of_the_kernel_counts_as_stopped(said, status, stopped):
    words, found = supervisor.verdict(said, status)
    assert found is stopped and words


# one limit for all programs
def a_group(limit_mb=256):
    try:
        return MemoryGroup(limit_mb)
    except OSError as error:
        pytest.skip(f"no cgroup may be made here: {error}")


def test_all_programs_together_have_one_limit():
    a_group().close()
    hold = "import time\ndef f():\n    x = bytearray(200 << 20)\n    time.sleep(0.5)\n    return 1"
    with SandboxPool(workers=2, total_mb=300) as pool:
        assert "300 MB" in pool.memory_bound
        assert result(pool, hold).value == 1
        pairs = [in_background(lambda: result(pool, hold)) for _ in range(2)]
        for thread, _ in pairs:
            thread.join()
        assert sorted(box[0].kind for _, box in pairs) in (["memory", "ok"], ["memory", "memory"])
        assert result(pool, DOUBLE, 3).value == 6
        folder = pool._group.folder
        assert folder.exists()
    assert not folder.exists()


@pytest.mark.parametrize(
    "listing, parents, limit_file",
    [
        ("9:cpu:/a\n4:memory:/a/b\n0::/", ["memory/a/b"], "memory.limit_in_bytes"),
        ("0::/user/shell", ["user/shell", "user"], "memory.max"),
        ("0::/", ["."], "memory.max"),
        ("3:cpu,cpuacct:/", [], None),
    ],
)
def test_places_for_a_group(tmp_path, listing, parents, limit_file):
    (tmp_path / "listing").write_text(listing)
    if limit_file == "memory.max":  # the second version has this file, and a mixture has not
        (tmp_path / "cgroup.controllers").touch()
    found = list(MemoryGroup.places(tmp_path / "listing", tmp_path))
    assert [place.relative_to(tmp_path) for place, _ in found] == [Path(p) for p in parents]
    assert {name for _, name in found} <= {limit_file}


def test_without_a_group_the_bound_is_stated(tmp_path, monkeypatch):
    (tmp_path / "listing").write_text("0::/"), (tmp_path / "cgroup.controllers").touch()
    with pytest.raises(OSError, match="No such file"):  # a folder that is no cgroup has no limit
        MemoryGroup(100, str(tmp_path / "listing"), str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(OSError, match="no cgroups"):
        MemoryGroup(100, str(tmp_path / "nothing"), str(tmp_path))
    monkeypatch.setattr(sandbox, "MemoryGroup", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with SandboxPool(workers=1) as pool:
        assert "memory_mb for each of 1 programs" in pool.memory_bound
        assert result(pool, DOUBLE, 3).value == 6


def test_a_group_of_a_process_that_was_killed_is_removed():
    group = a_group()
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = group.folder.with_name(f"grpo_nb-{ended.pid}-00000000")
    left.mkdir()
    group.close(), a_group().close()
    assert not left.exists() and not group.folder.exists()


def test_everything_works_without_walls():
    with quietly(without=tuple(supervisor.WALLS)) as bare:
        kinds = [
            result(bare, source, timeout_s=0.3).kind
            for source in (
                "def f(): return 1",
                "def f(",
                LOOP,
                "def f(): open('x')",
                "def f(): 1 / 0",
                OS + "def f(): os._exit(1)",
            )
        ]
        assert kinds == ["ok", "syntax", "timeout", "forbidden", "exception", "crash"]
        with bare.open(DOUBLE, "f") as session:
            assert session.call(4).value == 8


@pytest.mark.long
@pytest.mark.parametrize(
    "without",
    [
        ("syscalls", "processes"),
        ("syscalls", "processes", "pids"),
        ("syscalls", "processes", "pids", "privileges", "user"),
    ],
)
def test_whatever_a_program_started_ends_with_it(without):
    """Children in a session of their own, whose parent is gone: the process namespace ends them,
    or, without one, the supervisor, to whom they come."""
    escape = OS + (
        "def f(wait):\n    for _ in range(3):\n        if os.fork() == 0:\n            "
        "os.setsid()\n            if os.fork() == 0:\n                while True: pass\n "
        "           os._exit(0)\n    while wait: pass\n    return 'started'"
    )
    with quietly(without=without) as bare:
        (line,) = bare._supervisors.values()
        for wait, kind in ((False, "ok"), (True, "timeout")):
            thread, box = in_background(lambda: result(bare, escape, wait, timeout_s=1.0))
            thread.join()
            assert box[0].kind == kind
            assert eventually(
                lambda: not [pid for pid in descendants(line.process.pid) if alive(pid)], 2.0
            )


def test_a_wall_that_falls_later_stops_everything(monkeypatch):
    """Fail closed: the process of a program says nothing if it cannot wall itself in, and the
    supervisor gives up."""
    walls = Protections()
    walls.missing = {name: "x" for name in supervisor.WALLS if name != "memory"}
    monkeypatch.setattr(supervisor, "limit", lambda *a: (_ for _ in ()).throw(OSError("no")))
    ours, theirs = socket.socketpair()
    body = encode([DOUBLE, "f", [1]])
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            supervisor.Supervisor(theirs, walls).serve()
        except OSError:
            os._exit(7)
        finally:
            os._exit(8)
    theirs.close()
    ours.sendall(supervisor.REQUEST.pack(supervisor.RUN, 1.0, 256, len(body)) + body)
    assert ours.recv(100) == b"" and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    ours.close()


# sessions
def test_a_session_remembers(pool):
    with pool.open("seen = []\ndef f(x):\n    seen.append(x)\n    return seen", "f") as session:
        assert session.loaded.ok and [session.call(i).value for i in range(3)] == [
            [0],
            [0, 1],
            [0, 1, 2],
        ]
        with pool.open("seen = []\ndef f(x):\n    seen.append(x)\n    return seen", "f") as other:
            assert other.call(9).value == [9]
        assert session.call(3).value == [0, 1, 2, 3]


def test_a_session_survives_what_its_program_survives(pool):
    with pool.open(
        "def f(x):\n    if x == 'memory': return bytearray(10**10)\n    if x == 'output': "
        "return {1}\n    if x == 'forbidden': return open('x')\n    return 1 / x",
        "f",
    ) as session:
        assert [session.call(x).kind for x in (0, "memory", "output", "forbidden", 1)] == [
            "exception",
            "memory",
            "output",
            "forbidden",
            "ok",
        ]
        with pytest.raises(ValueError, match="args"):
            session.call(object())
        assert session.call(2).value == 0.5


@pytest.mark.parametrize(
    "source, first, then",
    [
        ("def f():\n    while True: pass", "timeout", "timeout"),
        (OS + "def f(): os._exit(0)", "crash", "crash"),
        (OS + "def f(): os.fork()", "forbidden", "crash"),
        ("def f():\n    while True: print('x' * 1000)", "output", "crash"),
        (OS + "def f(): os.abort()", "crash", "crash"),
    ],
)
def test_a_dead_session_says_so(pool, source, first, then):
    with pool.open(source, "f", timeout_s=0.3) as session:
        assert [session.call().kind for _ in range(3)] == [first, then, then]


@pytest.mark.parametrize(
    "source, kind",
    [
        ("def f(", "syntax"),
        ("1 / 0", "exception"),
        ("x = 1", "exception"),
        ("while True: pass", "timeout"),
        ("import numpy", "unavailable"),
    ],
)
def test_a_session_that_does_not_open(pool, source, kind):
    with pool.open(source, "f", timeout_s=0.3) as session:
        assert session.loaded.kind == kind and not session.loaded.ok and session.call().kind == kind


def test_a_closed_session(pool):
    session = pool.open(DOUBLE, "f")
    session.close()
    session.close()
    assert session.call(1).kind == "crash" and "closed" in session.call(1).error


def test_many_sessions_on_one_supervisor():
    with SandboxPool(workers=1) as pool:
        (line,) = pool._supervisors.values()
        sessions = [pool.open(f"def f(x): return x + {i}", "f") for i in range(12)]
        assert [s.call(100).value for s in sessions] == [100 + i for i in range(12)] and [
            s.call(1).value for s in reversed(sessions)
        ] == [1 + i for i in reversed(range(12))]
        assert result(pool, DOUBLE, 1).value == 2
        for session in sessions[:6]:
            session.close()
        del sessions, session  # the others end when nobody holds them
        gc.collect()
        assert eventually(
            lambda: result(pool, DOUBLE, 1).ok and descendants(line.process.pid) == []
        )


def test_a_program_sleeps_between_calls():
    "It cannot work while nobody counts."
    with (
        SandboxPool(workers=1) as pool,
        pool.open(
            OS
            + (
                "frame = b'v\\x09\\0\\0\\0f' + bytes(8)\ndef f():\n    os.write(3, frame)\n  "
                "  n = 0\n    while True: n += 1"
            ),
            "f",
        ) as session,
    ):
        assert session.call().value == 0.0
        (line,) = pool._supervisors.values()

        def cpu(pid):
            return sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
            )

        program = descendants(line.process.pid)[-1]
        assert eventually(
            lambda: Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
        before = cpu(program)
        time.sleep(0.3)
        assert cpu(program) == before


def test_large_arguments_and_answers_of_a_session(pool):
    with pool.open("def f(x): return x", "f") as session:
        for n in (10, 100_000, 400_000):
            assert session.call([0.5] * n).value == [0.5] * n
        assert session.call([0.5] * 700_000).kind == "output"


# the four names
@pytest.mark.parametrize(
    "source, ok, found",
    [
        ("import math\nimport os.path, sys", True, {"stdlib": ["math", "os", "sys"]}),
        ("from numpy.linalg import norm", False, {"non_stdlib": ["numpy"]}),
        (
            "def f():\n    import torch as t\n    from collections import deque",
            False,
            {"non_stdlib": ["torch"], "stdlib": ["collections"]},
        ),
        ("from . import x\nfrom ..y import z", True, {"relative_imports": 2}),
        ("m = __import__('numpy')", False, {"non_stdlib": ["numpy"]}),
        ("m = __import__('math')", True, {"stdlib": ["math"]}),
        ("m = __import__('num' + 'py')", False, {"dynamic": ["__import__"]}),
        (
            "import importlib\nnp = importlib.import_module('numpy')",
            False,
            {"non_stdlib": ["numpy"], "stdlib": ["importlib"]},
        ),
        ("getattr(x, '__import__')('numpy')", False, {"dynamic": ["__import__"]}),
        ("exec(code, {'__builtins__': {}})", True, {}),
        ("", True, {}),
    ],
)
def test_check_only_stdlib_imports(source, ok, found):
    assert check_only_stdlib_imports(source) == (
        ok,
        {"stdlib": [], "non_stdlib": [], "relative_imports": 0, **found},
    )


@pytest.mark.parametrize(
    "source",
    [
        "import (",
        "\0",
        "x = '\ud800'",
        "#" * 200_000,
        "(" * 5000,
        "-" * 50_000 + "1",
        "def f():\n\treturn 1\n        return 2",
    ],
    ids=["bracket", "null", "surrogate", "long", "deep", "minuses", "tabs"],
)
def test_check_of_a_source_that_cannot_be_read(source):
    ok, info = check_only_stdlib_imports(source)
    assert ok is not ("error" in info) and (info.get("error") or source.startswith("-"))


def test_locked_down_function(pool):
    function = create_locked_down_function(
        "def helper(x): return x + 1\ndef g(x, y): return helper(x) * y", pool=pool
    )
    assert (
        function.entry == "g"
        and function(2, 5) == 15
        and create_locked_down_function(function.source, entry="helper", pool=pool)(1) == 2
    )
    with pytest.raises(SandboxError, match="exception: TypeError") as caught:
        function(1)
    assert caught.value.result.kind == "exception" and not isinstance(caught.value, TimeoutError)
    with pytest.raises(TimeoutError) as late:
        create_locked_down_function(LOOP, timeout_s=0.1, pool=pool)()
    assert isinstance(late.value, SandboxTimeout) and late.value.result.kind == "timeout"
    with pytest.raises(SyntaxError):
        create_locked_down_function("def f(", pool=pool)
    with pytest.raises(ValueError, match="no function"):
        create_locked_down_function("f = 3", pool=pool)
    with function.open() as session:
        assert session.call(1, 1).value == 2


def test_a_locked_down_function_without_a_pool_ends_its_supervisor():
    function = create_locked_down_function(DOUBLE)
    (line,) = function.pool._supervisors.values()
    assert function(4) == 8 and line.process.pid in descendants()
    del function
    gc.collect()
    assert eventually(lambda: line.process.pid not in descendants())


def in_thread(action):
    box = []

    def work():
        try:
            box.append(action())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=work)
    thread.start(), thread.join()
    return box[0]


def test_time_limit_of_a_host_function(pool):
    ended = threading.Event()

    @execute_with_time_limit(0.2)
    def slow(seconds):
        "Says how long."
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.001)
            return seconds
        finally:
            ended.set()

    assert slow.__name__ == "slow" and slow.__doc__ == "Says how long."
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="slow took more than 0.2 s"):
        slow(60)
    assert time.monotonic() - begin < 10 and ended.wait(10)  # the loop is ended too
    assert isinstance(in_thread(lambda: slow(60)), TimeoutError) and in_thread(lambda: slow(0)) == 0
    with pytest.raises(ZeroDivisionError):
        execute_with_time_limit(5)(lambda: 1 / 0)()
    assert execute_with_time_limit(5)(lambda *a, **k: (a, k))(1, b=2) == ((1,), {"b": 2})
    with pytest.raises(ValueError, match="positive"):
        execute_with_time_limit(0)


def test_time_limit_reaches_into_the_sandbox(pool):
    function = create_locked_down_function(
        "def f(wait):\n    while wait: pass\n    return 3", timeout_s=60, pool=pool
    )
    with pytest.raises(TimeoutError):
        execute_with_time_limit(0.2)(function)(True)
    assert execute_with_time_limit(5)(function)(False) == 3
    before = set(descendants())
    with pytest.raises(TimeoutError):
        execute_with_time_limit(0.2)(lambda: function(True))()
    # killed, and not after its own 60 s
    assert eventually(lambda: set(filter(alive, descendants())) <= before)
    assert function(False) == 3


def test_benchmark_keys_and_kinds(pool):
    report = Benchmarker(trials=3, loops=2, flush_mb=1).benchmark(
        create_locked_down_function(DOUBLE, pool=pool), (4,)
    )
    assert {"median_ns", "mean_ns", "stdev_ns", "exceptions", "timeouts"} <= set(report) and report[
        "results"
    ] == [8] * 6
    assert (
        0 < report["median_ns"] < 1e9
        and report["exceptions"] == []
        and report["timeouts"] == 0
        and report["overhead_ns"] > 0
    )
    bad = Benchmarker(trials=2, flush_mb=1).benchmark(
        create_locked_down_function("def f(x): return 1 / 0", pool=pool), (4,)
    )
    assert (
        bad["median_ns"] == bad["mean_ns"] == bad["stdev_ns"] == math.inf
        and len(bad["exceptions"]) == 2
        and bad["results"] == [None, None]
    )
    late = Benchmarker(trials=2, flush_mb=1).benchmark(
        create_locked_down_function("def f(x):\n    while True: pass", timeout_s=0.1, pool=pool),
        (4,),
    )
    assert late["timeouts"] == 2 and late["median_ns"] == math.inf
    broken = sandbox.LockedDownFunction("1 / 0\ndef f(): pass", "f", pool)
    assert len(Benchmarker(trials=1, flush_mb=1).benchmark(broken, ())["exceptions"]) == 1
    with pytest.raises(SandboxError, match="ZeroDivisionError"):
        create_locked_down_function(broken.source, pool=pool)


def test_benchmark_arguments(pool):
    keep = create_locked_down_function(
        "kept = []\ndef f(x):\n    kept.append(x)\n    return kept", pool=pool
    )
    marks = Benchmarker(trials=2, loops=2, flush_mb=1)
    assert marks.benchmark(keep, [(1,), (2,)])["results"] == [[1], [2], [1], [2]]
    assert marks.benchmark(keep, lambda trial, loop: (10 * trial + loop,))["results"] == [
        [0],
        [1],
        [10],
        [11],
    ]
    with pytest.raises(TypeError, match="tuple"):
        marks.benchmark(keep, [1, 2])
    with pytest.raises(ValueError, match="trials"):
        Benchmarker(trials=0)


def test_benchmark_of_a_trusted_function():
    given = [3, 1, 2]
    report = Benchmarker(trials=3, flush_mb=1).benchmark(lambda x: x.sort() or x, (given,))
    assert (
        given == [3, 1, 2]
        and report["results"] == [[1, 2, 3]] * 3
        and 0 < report["median_ns"] < 1e9
        and gc.isenabled()
    )

    def fails():
        raise KeyError("x")

    assert Benchmarker(trials=1, flush_mb=1).benchmark(fails, ())["exceptions"] == ["KeyError: 'x'"]


def test_benchmark_with_a_time_limit(pool):
    marks = Benchmarker(1, 1, 0.2, flush_mb=1)
    slow = create_locked_down_function("import time\ndef f(): time.sleep(2)", pool=pool)
    for function in (slow, lambda: time.sleep(2)):
        report = marks.benchmark(function, [()])
        assert report["timeouts"] == 1 and report["median_ns"] == math.inf
    assert gc.isenabled()
    quick = marks.benchmark(sorted, [([2, 1],)])
    assert type(quick["median_ns"]) is int and quick["results"] == [[1, 2]]
    with pytest.raises(ValueError, match="timeout must be"):
        Benchmarker(timeout=0)


def test_benchmark_measures_work(pool):
    work = create_locked_down_function(
        "def f(n):\n    t = 0\n    for i in range(n): t += i\n    return t", pool=pool
    )
    marks = Benchmarker(trials=5, flush_mb=1)
    few, many = (marks.benchmark(work, (n,))["cpu_ns"] for n in (100_000, 1_000_000))
    assert 4 < many / few < 25


def test_docstrings_say_what_they_do_not_protect_from():
    assert (
        "protects from nothing" in check_only_stdlib_imports.__doc__
        and "check types and values" in create_locked_down_function.__doc__
    )
    assert (
        "left behind" in execute_with_time_limit.__doc__
        and "does not check answers" in " ".join(Benchmarker.benchmark.__doc__.split())
    )
