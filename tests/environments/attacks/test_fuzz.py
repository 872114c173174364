"""Programs that nobody wrote: attacks and honest programs, mutated at random. Whatever they do, the
process that asked goes on, and keeps nothing of them."""

import gc
import os
import random
import re
import resource
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from test_attacks import ATTACKS, HONEST, LETTERS, SLOW, children

from grpo_nb.environments.sandbox import SandboxPool, check_only_stdlib_imports
from grpo_nb.environments.supervisor import KINDS, Unsendable, decode, encode

HONEST_PROGRAMS = [
    HONEST,
    SLOW + "total = slow\n",
    "def total(numbers): return sum(sorted(numbers))",
    "import math\ndef total(numbers):\n    return math.fsum(x for x in numbers if x == x)",
    (
        "from functools import reduce\nimport operator\ndef total(numbers): return "
        "reduce(operator.add, numbers, 0.0)"
    ),
    (
        "def total(numbers):\n    if not numbers: return 0.0\n    half = len(numbers) // 2\n    "
        "return numbers[half] + total(numbers[:half]) + total(numbers[half + 1:])"
    ),
    (
        "from collections import deque\ndef total(numbers):\n    queue = deque(numbers)\n    "
        "result = 0.0\n    while queue:\n        result += queue.popleft()\n    return result"
    ),
    (
        "class Sum:\n    def __init__(self): self.value = 0.0\n    def add(self, x):\n        "
        "self.value += x\n        return self\ndef total(numbers):\n    s = Sum()\n    for x in "
        "numbers: s.add(x)\n    return s.value"
    ),
    (
        "def total(numbers):\n    board = [[int(x) % 3 for x in numbers[i:i + 4]] for i in "
        "range(0, 16, 4)]\n    return {'moves': [''.join('WASD'[c] for c in row) for row in "
        "board], 'score': (1, 2.5, None, True)}"
    ),
]
PIECES = re.compile(r"\w+|[^\w\s]|\s+")
SPICE = [
    "0",
    "-1",
    "None",
    "True",
    "[]",
    "{}",
    "()",
    "lambda",
    "yield",
    "async",
    "await",
    "while",
    "for",
    "try:",
    "except:",
    "finally:",
    "raise",
    "return",
    "global",
    "del",
    "*",
    "**",
    "@",
    ":=",
    "10**9",
    "1e308",
    "'\\0'",
    '"""',
    "\\",
    "\n",
    "\t",
    "\0",
    "\ud800",
    "\u202e",
    "\x0c",
    "\xa0",
    "é",
    "self",
    "__class__",
    "__builtins__",
    "sys",
    "print",
    "type",
    "object",
    "super()",
    "numbers",
    "total",
]


def corpus():
    """Programs to start from; those that only end at the deadline are a small part, for the sake of
    time."""
    attacks = [(source, 1 if "timeout" in kinds else 4) for _, _, kinds, source in ATTACKS]
    programs = attacks + [(source, 40) for source in HONEST_PROGRAMS]
    fill = {
        **LETTERS,
        "canary": "/nowhere/canary",
        "folder": "/nowhere",
        "pid": "1",
        "port": "9",
        "brackets": "((()))",
        "minuses": "---",
        "additions": "+1+1",
    }
    for name, value in fill.items():
        programs = [
            (source.replace("{" + name + "}", value), weight) for source, weight in programs
        ]
    return zip(*programs)


def mutated(source, others, rng):
    "A few random changes of words, or of characters."
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        parts = PIECES.findall(source) if rng.random() < 0.7 else list(source)
        if not parts:
            return source
        i, j = sorted(rng.randrange(len(parts)) for _ in range(2))
        donor = PIECES.findall(rng.choice(others)) or [""]
        k = rng.randrange(len(donor))
        change = rng.randrange(7)
        if change == 0:
            del parts[i]
        elif change == 1:
            parts[i], parts[j] = parts[j], parts[i]
        elif change == 2:
            parts[i] = rng.choice(SPICE)
        elif change == 3:
            parts.insert(i, rng.choice(SPICE))
        elif change == 4:
            parts[i : i + 3] = donor[k : k + rng.randrange(1, 8)]
        elif change == 5:
            parts[i:j] = parts[i:j][:20] * rng.choice([0, 2, 3])
        else:
            parts[i] = chr(rng.choice([rng.randrange(128), rng.randrange(0x3000)]))
        source = "".join(parts)
    return source


def program(sources, weights, rng):
    "A mutated program: usually one that can still be read as Python."
    tries = rng.choice([1, 10, 10, 10])
    for _ in range(tries):
        source = mutated(rng.choices(sources, weights)[0], sources, rng)
        if check_only_stdlib_imports(source)[1].get("error") is None:
            break
    return source


def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def fuzz(count, timeout_s, seed):
    """Runs so many mutated programs on two supervisors; how often each kind came, and what this
    process keeps of it."""
    sources, weights = corpus()
    before = len(os.listdir("/proc/self/fd")), len(children())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SandboxPool(workers=2) as pool:
            supervisors, kinds, problems = children(), Counter(), []

            def work(rng, number):
                try:
                    for _ in range(number):
                        source = program(sources, weights, rng)
                        begin = time.monotonic()
                        result = pool.run(
                            source,
                            entry="total",
                            args=([1.0, 2.0, 5.0],),
                            timeout_s=timeout_s,
                            memory_mb=128,
                        )
                        spent = time.monotonic() - begin
                        kinds[result.kind] += 1
                        if (
                            spent > timeout_s + 4
                            or (result.error or "").startswith("the supervisor was lost")
                            or result.ok != (result.kind == "ok")
                        ):
                            problems.append((source, spent, result))
                except BaseException as error:
                    problems.append((source, error))

            def both(number):
                threads = [
                    threading.Thread(
                        target=work, args=(random.Random(1000 * seed + i), number // 2)
                    )
                    for i in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

            both(min(100, count // 2))
            gc.collect()
            memory, middle = resident_mb(), len(os.listdir("/proc/self/fd"))
            both(count - min(100, count // 2))
            gc.collect()
            grown = resident_mb() - memory
            assert children() == supervisors and len(os.listdir("/proc/self/fd")) == middle
            assert pool.run(HONEST, entry="total", args=([1.0, 2.0, 5.0],)).value == 8.0
    assert (len(os.listdir("/proc/self/fd")), len(children())) == before
    assert not problems, problems[:3]
    return kinds, grown


def check_fuzz(count, timeout_s, seed):
    kinds, grown = fuzz(count, timeout_s, seed)
    print(f"{count} mutated programs: {dict(kinds.most_common())}; memory grew by {grown:.1f} MB")
    assert sum(kinds.values()) == count and set(kinds) <= set(KINDS.values())
    assert (
        min(kinds["ok"], kinds["syntax"], kinds["exception"], kinds["forbidden"], kinds["output"])
        >= count // 200
    )  # the mutations reach every corner
    assert grown < 40


@pytest.mark.long
def test_a_thousand_mutated_programs():
    check_fuzz(1000, 0.15, seed=1)


@pytest.mark.full
def test_ten_thousand_mutated_programs():
    check_fuzz(10_000, 0.25, seed=2)


def test_mutated_answers():
    "The reader of answers raises Unsendable or gives plain values, whatever the bytes are."
    rng = random.Random(3)
    values = [
        None,
        [1.0, 2.0],
        {"a": [1, (2, "x")], 3: {}},
        [[0.5] * 5] * 5,
        "text é",
        10**50,
        [True, None, -1],
        {"k" * 9: [{"n": 1}]},
        {(1, "a"): 2.0},
    ]
    messages, outcomes = [encode(value) for value in values], Counter()
    plain = {type(None), bool, int, float, str, list, tuple, dict}

    def types_of(value):
        yield type(value)
        for part in (
            [*value, *value.values()]
            if type(value) is dict
            else value
            if type(value) in (list, tuple)
            else ()
        ):
            yield from types_of(part)

    for _ in range(30_000):
        data = bytearray(rng.choice(messages))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.6 and at < len(data):
                data[at] = rng.choice([rng.randrange(256), *b"NTFifsltdDQ"])
            elif rng.random() < 0.5:
                data[at:at] = rng.choice(messages)
            else:
                del data[at : at + rng.randrange(1, 5)]
        try:
            found = set(types_of(decode(bytes(data))))
        except Unsendable:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert found <= plain
    assert min(outcomes.values()) > 1000
