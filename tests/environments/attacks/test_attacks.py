"""Programs that try to score without doing the work, or to do harm: one file for each family in
programs/.

Each entry is `=== name | kinds`, then the program. All of them stand in for `total(numbers)`, the
sum of a list that they cannot know beforehand. Each must score no more than an honest failure,
leave everything around it as it was, be reported by one of its kinds, and not disturb the program
after it.
"""

import os
import re
import resource
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import pytest

from grpo_nb.environments.game2048 import StrategyRewards
from grpo_nb.environments.matmul import MatmulRewards
from grpo_nb.environments.sandbox import (
    Benchmarker,
    LockedDownFunction,
    SandboxPool,
    create_locked_down_function,
)
from grpo_nb.environments.supervisor import ALLOWED_MODULES

FOLDER = Path(__file__).parent / "programs"
NUMBERS = [float(i * i % 17) for i in range(300)]
HONEST = (
    "def total(numbers):\n    result = 0.0\n    for x in numbers: result += x\n    return result\n"
)
SECRET = HONEST + 'SECRET = ["SECRET_OF_THE_ONE_BEFORE"] * 3\n'
SLOW = (
    "def slow(numbers):\n    result = 0.0\n    for _ in range(60):\n        result = 0.0\n   "
    "     for x in numbers: result += x\n    return result\n"
)
TIMED = ("timers", "caches")  # families that go for the time: they are graded by it
LETTERS = {
    "fullwidth_open": "\uff4f\uff50\uff45\uff4e",
    "cyrillic_o": "\u043e",
    "right_to_left": "\u202e",
    "isolate": "\u2066",
    "zero_width": "\u200b",
    "line_separator": "\u2028",
    "form_feed": "\f",
    "null": "\0",
    "surrogate": "\ud800",
    "brackets": "(" * 1000 + ")" * 1000,
    "minuses": "-" * 100_000,
    "additions": "+1" * 100_000,
}


def attacks():
    "(family, name, kinds, source) of every attack."
    for path in sorted(FOLDER.glob("*.txt")):
        for entry in re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            head, _, source = entry.partition("\n")
            name, kinds = head.split(" | ")
            yield path.stem, name, tuple(kinds.split()), source


ATTACKS = list(attacks())
CANARY_LIST = [1.0, 2.0]  # a global of the training process


class Surroundings:
    "What attacks could damage, and a look at whether they did."

    def __init__(self, folder):
        folder.chmod(0o777)
        self.folder, self.canary = folder, folder / "canary"
        self.canary.write_text("alive")
        self.canary.chmod(0o666)
        module = folder / "canary_module.py"
        module.write_text("total = sum\n")
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.before = self.state()

    def source(self, text):
        names = {
            **LETTERS,
            "canary": str(self.canary),
            "folder": str(self.folder),
            "pid": str(os.getpid()),
            "port": str(self.server.getsockname()[1]),
        }
        for name, value in names.items():
            text = text.replace("{" + name + "}", value)
        return text

    def connections(self):
        try:
            return self.server.accept()
        except BlockingIOError:
            return None

    def state(self):
        return {
            "files": sorted(
                (p.name, p.stat().st_mode, p.read_bytes()) for p in self.folder.iterdir()
            ),
            "connections": self.connections(),
            "environment": {
                name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
            },
            "globals": list(CANARY_LIST),
            "clocks": [
                time.time,
                time.perf_counter,
                time.perf_counter_ns,
                time.monotonic,
                time.monotonic_ns,
                time.process_time,
            ],
            "builtins": [sum, abs, isinstance, len, print, open],
            "handlers": [
                signal.getsignal(n)
                for n in (
                    signal.SIGALRM,
                    signal.SIGTERM,
                    signal.SIGINT,
                    signal.SIGCHLD,
                    signal.SIGSEGV,
                )
            ],
            "alarm": signal.getitimer(signal.ITIMER_REAL),
            "limits": resource.getrlimit(resource.RLIMIT_AS),
            "user": os.getresuid(),
            "folder": os.getcwd(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "processors": os.sched_getaffinity(0),
            "recursion": sys.getrecursionlimit(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "children": children(),
        }


def children():
    "The processes that this one has started."
    return sorted(
        int(pid)
        for task in os.listdir("/proc/self/task")
        for pid in Path(f"/proc/self/task/{task}/children").read_text().split()
    )


@pytest.fixture(scope="module")
def pool():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the walls that this system refuses
        with SandboxPool(workers=1) as pool:
            yield pool


@pytest.fixture(scope="module")
def surroundings(pool, tmp_path_factory):
    os.environ["GRPO_NB_CANARY"] = "123.0"
    yield Surroundings(tmp_path_factory.mktemp("attacks"))
    del os.environ["GRPO_NB_CANARY"]


def right(value, answer):
    "The check of a grader: a plain finite number, near the answer."
    return type(value) in (int, float) and abs(value) < 1e300 and abs(value - answer) < 1e-9


def score(result, answer):
    "1 for the right sum, else 0, whatever the reason."
    return 1.0 if result.ok and right(result.value, answer) else 0.0


@pytest.fixture(scope="module")
def honest_cpu(pool):
    "What the slow, honest work costs, in ns of processor."
    return Benchmarker(trials=3, flush_mb=1).benchmark(
        create_locked_down_function(SLOW + "total = slow\n", entry="total", pool=pool), (NUMBERS,)
    )["cpu_ns"]


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len(ATTACKS) >= 80 and len({(family, name) for family, name, _, _ in ATTACKS}) == len(
        ATTACKS
    )
    kinds = set("ok syntax exception unavailable timeout memory forbidden output crash".split())
    assert {kind for _, _, allowed, _ in ATTACKS for kind in allowed} == kinds


def test_honest_work_scores_and_an_honest_failure_does_not(pool):
    assert score(pool.run(HONEST, entry="total", args=(NUMBERS,)), sum(NUMBERS)) == 1.0
    assert (
        score(
            pool.run("def total(numbers): return 0.0", entry="total", args=(NUMBERS,)), sum(NUMBERS)
        )
        == 0.0
    )


@pytest.mark.parametrize(
    "family, name, kinds, source",
    [pytest.param(*a, id=f"{a[0]}: {a[1]}") for a in ATTACKS if a[0] not in TIMED],
)
def test_attack(family, name, kinds, source, pool, surroundings):
    numbers, supervisors = list(NUMBERS), children()
    if family == "frames":
        pool.run(SECRET, entry="total", args=(numbers,))
    begin = time.monotonic()
    result = pool.run(
        surroundings.source(source),
        entry="total",
        args=(numbers,),
        timeout_s=(limit := 0.3 if "timeout" in kinds else 5.0),
        memory_mb=256,
    )
    spent = time.monotonic() - begin
    assert result.kind in kinds, result
    assert score(result, sum(NUMBERS)) == 0.0
    assert result.value != 123.0 and len(str(result.error)) < 3000
    assert result.seconds < limit + 1.0 and spent < limit + 4.0
    assert numbers == NUMBERS and surroundings.state() == surroundings.before
    assert (
        score(pool.run(HONEST, entry="total", args=(numbers,)), sum(NUMBERS)) == 1.0
        and children() == supervisors
    )  # the next one is not touched


@pytest.mark.parametrize(
    "family, name, kinds, source",
    [pytest.param(*a, id=f"{a[0]}: {a[1]}") for a in ATTACKS if a[0] in TIMED],
)
def test_attack_on_the_time(family, name, kinds, source, pool, surroundings, honest_cpu):
    """Whoever gives right answers has done the work for each of them, in the time that the sandbox
    counts."""
    function = LockedDownFunction(SLOW + surroundings.source(source), "total", pool, timeout_s=2.0)
    report = Benchmarker(trials=3, flush_mb=1).benchmark(function, (NUMBERS,))
    results = [function.run(NUMBERS) for _ in range(2)]
    assert {result.kind for result in results} <= set(kinds), results
    if all(right(value, sum(NUMBERS)) for value in report["results"]):
        assert report["cpu_ns"] > 0.4 * honest_cpu and report["median_ns"] > 0.4 * honest_cpu
    else:
        assert not any(score(result, sum(NUMBERS)) for result in results)
    assert surroundings.state() == surroundings.before


GRADED = {  # a page's rewards, and honest programs that run: the worst that were thought of
    "2048": (
        lambda pool, scale: StrategyRewards(pool, games=2, workers=1, scale=scale),
        "strategy",
        ["return 'W'", "return 'S'", "return 'WASD'[sum(map(sum, board)) % 3]"],
    ),
    "matmul": (
        lambda pool, scale: MatmulRewards(pool, size=16, trials=1, scale=scale),
        "matmul",
        ["return [[0.0] * len(B[0]) for _ in A]", "return []", "return [[9e9] * len(B[0])] * 2"],
    ),
}


@pytest.mark.parametrize("scale", ["plain", "published"])
@pytest.mark.parametrize("page", GRADED)
def test_no_refusal_earns_more_than_the_least_honest_program_that_ran(pool, page, scale):
    rewards, entry, honest = GRADED[page]
    given = "board" if entry == "strategy" else "A, B"
    refusals = [source for family, _, _, source in ATTACKS if family == "refusals"]
    programs = [f"def {entry}({given}): {line}" for line in honest]
    programs += [f"{source}\n{entry} = total\n" for source in refusals]
    texts = [f"```python\n{source}\n```" for source in programs]
    made = rewards(pool, scale)
    totals = [sum(points) for points in zip(*(f(completions=texts) for f in made.functions()))]
    stages = [report.stage for report in made.reports(texts, {})]
    least = min(totals[: len(honest)])
    assert set(stages[: len(honest)]) <= {"plays", "wrong"} and len(refusals) >= 50
    assert stages.count("unavailable") >= 45 and set(stages[3:]) <= {"unavailable", "fails"}
    above = [
        (total, stage, text)
        for total, stage, text in zip(totals[3:], stages[3:], texts[3:])
        if total > least and (stage == "unavailable" or scale == "plain")
    ]
    assert not above  # on the published scale an exception has the points that were published


ROUTES = """
import sys, types
REAL = {"os", "posix", "io", "_io", "builtins", "nt"}
TRIES = {
    "read": lambda m: m.open("{canary}", 0 if m.__name__ in ("os", "posix") else "r"),
    "write": lambda m: m.open("{canary}", 1 if m.__name__ in ("os", "posix") else "w"),
    "unlink": lambda m: m.unlink("{canary}"),
    "rename": lambda m: m.rename("{canary}", "{canary}.gone"),
    "link": lambda m: m.symlink("/etc/passwd", "{folder}/link"),
    "list": lambda m: m.listdir("/"),
    "pipe": lambda m: m.pipe(),
}

def modules_below(path, module, depth, seen):
    for name in sorted(vars(module)):
        found = vars(module)[name]
        if isinstance(found, types.ModuleType) and id(found) not in seen:
            seen.add(id(found))
            yield f"{path}.{name}", found
            if depth: yield from modules_below(f"{path}.{name}", found, depth - 1, seen)

def total(names):
    routes, open_ways = 0, []
    for start in names:
        module = __import__(start, fromlist=["*"])
        for path, found in modules_below(start, module, 2, set()):
            if type(found) is not types.ModuleType or found.__name__ not in REAL: continue
            routes += 1
            for name, action in TRIES.items():
                try: action(found)
                except (OSError, AttributeError): continue
                open_ways.append(f"{path}: {name}")
    return [routes, open_ways]
"""


def test_no_route_from_a_module_gets_past_the_walls(pool, surroundings):
    "Each module leads to `os` or the builtins sooner or later; there the walls stand."
    names = [[name for name in ALLOWED_MODULES if name != "bz2"]]
    result = pool.run(surroundings.source(ROUTES), entry="total", args=tuple(names), timeout_s=30)
    assert result.ok, result
    routes, open_ways = result.value
    assert open_ways == [] and routes > 50
    assert surroundings.state() == surroundings.before
