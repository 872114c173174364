"""environments.supervisor: values as bytes and back, what its reader refuses, its system calls, and
what it makes of a process's answer."""

import ast
import errno
import os
import re
import resource
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.environments import supervisor
from grpo_nb.environments.supervisor import (
    CLAIMS,
    COUNT,
    FRAME,
    KINDS,
    Program,
    Unsendable,
    call_table,
    decode,
    encode,
    how_it_ended,
    outcome,
    reported,
)

# values
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs"])),
    lambda v: (
        st.lists(v)
        | st.lists(st.floats())
        | st.lists(v).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), v)
    ),
    max_leaves=30,
)


def same(a, b):
    "Equal, of the same types, floats to the bit."
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    if type(a) is dict:
        return same(list(a.items()), list(b.items()))
    return len(a) == len(b) and all(map(same, a, b)) if type(a) in (list, tuple) else a == b


@settings(max_examples=100, deadline=None)
@given(values)
def test_values_come_back_as_they_were(value):
    assert same(decode(encode(value)), value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    try:
        decode(data)
    except Unsendable:
        pass


@pytest.mark.parametrize(
    "value",
    [
        1j,
        b"x",
        {1},
        object(),
        range(3),
        [1, {2}],
        {"a": print},
        type("L", (list,), {})(),
        type("F", (float,), {})(1.0),
        True.__class__,
        2**20_000,
        {(1, 2.0): object()},
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused(value):
    with pytest.raises(Unsendable):
        encode(value)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_limits_of_messages():
    assert decode(encode(nested(60))) == nested(60)
    with pytest.raises(Unsendable, match="nested"):
        encode(nested(70))
    with pytest.raises(Unsendable, match="200000"):
        encode([None] * 200_001)
    assert len(decode(encode([0.5] * 500_000))) == 500_000  # one block
    assert decode(encode(10**4200)) == 10**4200 and len(str(10**4200)) == 4201
    for data in (
        b"l" + COUNT.pack(2**32 - 1),
        b"D" + COUNT.pack(2**30) + b"x" * 8,
        b"i" + COUNT.pack(5000) + b"1" * 5000,
        b"l\1\0\0\0" * 500 + b"N",
        b"l" + COUNT.pack(300_000) + b"N" * 300_000,
    ):
        with pytest.raises(Unsendable):
            decode(data)


def test_colliding_keys_cost_no_time():
    def dictionary(keys):
        return b"d" + COUNT.pack(len(keys)) + b"".join(encode(key) + b"N" for key in keys)

    begin = time.process_time()
    with pytest.raises(Unsendable, match="collide"):
        decode(dictionary([i * (2**61 - 1) for i in range(1, 50_000)]))
    assert time.process_time() - begin < 2.0  # all of them, inserted, take minutes
    assert len(decode(dictionary(list(range(50_000))))) == 50_000


# the supervisor's script
def test_supervisor_needs_the_standard_library_alone():
    names = {
        alias.name
        for node in ast.walk(ast.parse(Path(supervisor.__file__).read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    froms = [
        node
        for node in ast.walk(ast.parse(Path(supervisor.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    assert names <= set(sys.stdlib_module_names) and not froms
    loaded = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            (
                "import sys; sys.path.insert(0, sys.argv[1]); import supervisor; "
                "print(sorted(sys.modules))"
            ),
            str(Path(supervisor.__file__).parent),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert not {"torch", "numpy", "grpo_nb"} & set(ast.literal_eval(loaded))


@pytest.mark.parametrize(
    "name", ["getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid"]
)
def test_numbers_of_system_calls(name):
    "Those that can be asked without harm say what Python says."
    column = supervisor.MACHINES[os.uname().machine][1]
    assert (
        supervisor.LIBC.syscall(supervisor.COMPUTING[name][column])
        == getattr(os, name, threading.get_native_id)()
    )


def test_tables_of_system_calls_do_not_overlap():
    for column in range(2):
        numbers = [
            n[column]
            for table in (supervisor.COMPUTING, supervisor.UNLESS_EXECUTABLE, supervisor.DEADLY)
            for n in table.values()
            if n[column] is not None
        ]
        assert len(numbers) == len(set(numbers))
    with pytest.raises(OSError, match="riscv"):
        supervisor.syscall_filter("riscv64")


SYSTEM_CALLS = [
    line.split()
    for line in (Path(__file__).parents[1] / "data/system_calls.txt").read_text().splitlines()
    if not line.startswith("#")
]
KERNEL = {  # machine -> number -> name, from the kernel's headers and not from our tables
    machine: {int(row[column]): row[0] for row in SYSTEM_CALLS if row[column] != "-"}
    for machine, column in (("x86_64", 1), ("aarch64", 2))
}
REACHES_OUT = re.compile(  # parts of the names of calls that reach files, processes or the network
    "open|creat|link|rename|mk|rmdir|chmod|chown|truncate|xattr|utime|access|stat(?!$)|getdents|"
    "mount|chroot|sock|connect|accept|bind|listen|send|recv|splice|copy_file|kill|sigqueue|fork|"
    "clone|exec|ptrace|process_|pidfd|io_|bpf|perf|shm|msg|sem|mq_|set[ug]id|setre|setgroups|"
    "limit|ioctl|fcntl|dup|pipe|eventfd|signalfd|timerfd|epoll|memfd|userfault|inotify|fanotify|"
    "seccomp|prctl|unshare|setns|landlock|key|module|kexec|reboot|personality|sync|chdir|quota|"
    "swap|acct|capset|sched_set|setprior|mlock|name_to_handle|pkey|mmap|mprotect"
)


def run_filter(program, machine, number, code=None, protection=0):
    "What the kernel's filter machine does with a call."
    words = {0: number, 4: supervisor.MACHINES[machine][0] if code is None else code}
    words[32] = protection  # the low word of the third argument; nothing else may be read
    at, register = 0, None
    while True:
        operation, on_true, on_false, k = program[at]
        at += 1
        if operation == 0x06:
            return k
        if operation == 0x20:
            register = words[k]
        elif operation == 0x15:
            at += on_true if register == k else on_false
        elif operation == 0x35:
            at += on_true if register >= k else on_false
        else:
            assert operation == 0x45
            at += on_true if register & k else on_false


def instructions(machine):
    "The filter program as plain numbers."
    return [
        (line.code, line.jump_true, line.jump_false, line.k)
        for line in supervisor.syscall_filter(machine)
    ]


ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000  # as in linux/seccomp.h; EPERM is 1


@pytest.mark.parametrize("machine", KERNEL)
def test_the_filter_program_on_every_system_call(machine):
    """Each number that the program compares with, and its neighbours, stands for all between two of
    them: so these are all 2**32 numbers. Names are those of the kernel's headers."""
    program, names = instructions(machine), KERNEL[machine]
    edges = {n for *_, k in program for n in (k - 1, k, k + 1)}
    numbers = {*range(1024), *edges, *(2**k for k in range(32)), 2**32 - 1}
    seen = {}
    for number in sorted(n for n in numbers if 0 <= n < 2**32):
        name = names.get(number)
        verdicts = {run_filter(program, machine, number, protection=p) for p in (0, 3, 7)}
        if machine == "x86_64" and number & 0x40000000 or number >= 0x80000000:
            assert verdicts <= ({KILLED} if machine == "x86_64" else {REFUSED}), number
        elif name in ("mmap", "mprotect"):
            for protection in range(16):  # 4 is PROT_EXEC
                wanted = REFUSED if protection & 4 else ALLOWED
                assert run_filter(program, machine, number, protection=protection) == wanted
        else:
            (verdict,) = verdicts
            seen[name] = verdict
            if verdict == ALLOWED:
                assert name in supervisor.COMPUTING and not REACHES_OUT.search(name), name
            if verdict == KILLED:
                assert name in supervisor.DEADLY
    there = set(names.values())
    assert {n for n, v in seen.items() if v == ALLOWED} == set(supervisor.COMPUTING) & there
    assert {n for n, v in seen.items() if v == KILLED} == set(supervisor.DEADLY) & there
    assert seen[None] == REFUSED  # numbers that no kernel of today knows


@pytest.mark.parametrize("machine", KERNEL)
def test_the_filter_ends_every_other_table_of_system_calls(machine):
    "Other machines' codes (linux/audit.h), 32 bits beside 64, and the x32 table of x86-64."
    program, own = instructions(machine), supervisor.MACHINES[machine][0]
    for elf_machine in range(300):
        for flags in range(0, 16, 2):  # 64 bits, little-endian, N32
            code = elf_machine | flags << 28
            if code != own:
                for number in (0, 1, 9, 57, 63, 220, 222, 0x40000000):
                    assert run_filter(program, machine, number, code) == KILLED
    if machine == "x86_64":
        for number in range(1024):
            assert run_filter(program, machine, 0x40000000 | number) == KILLED


@pytest.mark.parametrize("machine", KERNEL)
def test_the_kernel_would_take_the_filter(machine):
    "At most 4,096 instructions, known ones, jumps that stay inside, and a verdict at the end."
    program = instructions(machine)
    assert len(program) <= 4096 and program[-1][0] == 0x06
    for at, (operation, on_true, on_false, k) in enumerate(program):
        assert operation in (0x06, 0x20, 0x15, 0x35, 0x45)
        assert operation != 0x20 or k % 4 == 0 and k < 64
        assert operation == 0x06 or at + 1 + max(on_true, on_false) < len(program)


@pytest.mark.parametrize("machine, column", [("x86_64", 0), ("aarch64", 1)])
def test_numbers_are_those_of_the_kernel(machine, column):
    names = {name: number for number, name in KERNEL[machine].items()}
    for table in (supervisor.COMPUTING, supervisor.UNLESS_EXECUTABLE, supervisor.DEADLY):
        for name, numbers in table.items():
            assert numbers[column] == names.get(name), name


def test_a_table_is_names_and_two_numbers():
    assert call_table("read 0 63  fork 57 -") == {"read": (0, 63), "fork": (57, None)}
    for wrong in ("read 0", "read 0 x", "fork - 57"):
        with pytest.raises(ValueError):
            call_table(wrong)


# one process
@pytest.mark.parametrize("tag", CLAIMS)
def test_an_answer_is_whole_or_none(tag):
    body = b"12345"
    buffer = bytearray(FRAME.pack(tag, len(body)) + body + b"more")
    whole = FRAME.size + len(body)
    assert [reported(buffer, n) for n in range(whole)] == [None] * whole
    assert reported(buffer, whole) == tag
    assert reported(buffer, whole + 1) == b"c"
    assert bytes(Program(0, None, 1.0).answer_of(tag, buffer)[1]) == body


@pytest.mark.parametrize("tag", [b"t", b"c", b"?", b"\0"])
def test_a_program_cannot_report_what_the_supervisor_finds(tag):
    buffer = bytearray(FRAME.pack(tag, 0))
    assert reported(buffer, len(buffer)) == b"c"


def test_an_answer_that_is_too_long_is_not_read():
    buffer = bytearray(FRAME.pack(b"v", supervisor.RESULT_BYTES + 1))
    assert reported(buffer, len(buffer)) == b"o"
    assert b"more than" in Program(0, None, 1.0).answer_of(b"o", buffer)[1]


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system does not say how a process ended")
@pytest.mark.parametrize(
    "command, kind, says",
    [
        ("exit 3", "crash", b"exit code 3"),
        ("kill -KILL $$", "memory", b"memory"),
        ("kill -SEGV $$", "crash", b"SIGSEGV"),
        ("kill -SYS $$", "forbidden", b"system call"),
    ],
)
def test_how_a_process_ended(command, kind, says):
    process = subprocess.Popen(["sh", "-c", command])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    tag, words = how_it_ended(process.pid)
    process.wait()
    assert KINDS[tag] == kind and says in words


def test_outcomes():
    def unfriendly():
        class Mine(Exception):
            def __str__(self):
                raise KeyboardInterrupt

        raise Mine

    assert outcome(lambda: [1, 2.0]) == (b"v", encode([1, 2.0]))
    assert outcome(lambda: object())[0] == b"o"
    assert outcome(unfriendly) == (b"x", b"an exception that cannot be described")
    assert outcome(lambda: sys.exit("bye")) == (b"x", b"SystemExit: bye")
    assert outcome(lambda: [0] * 2**62) == (b"m", b"out of memory")
    modules = supervisor.load_modules()
    builtins = supervisor.locked_builtins(modules, lambda text: None)
    assert outcome(lambda: builtins["__import__"]("numpy"))[0] == b"u"
    assert outcome(lambda: builtins["input"]())[0] == b"u"
    assert outcome(lambda: builtins["open"]("x"))[0] == b"f"
    assert outcome(lambda: builtins["exit"](3)) == (b"x", b"SystemExit: 3")
    assert builtins["__import__"]("math") is modules["math"]


@pytest.mark.parametrize("number", supervisor.REFUSALS)
def test_a_refusal_of_its_own_is_an_exception(number):
    def refuses():
        raise PermissionError(number, "only squares")

    def hands_on():
        try:
            refuses()
        except OSError as error:
            raise error

    assert outcome(refuses)[0] == outcome(hands_on)[0] == b"x"


def test_a_refusal_of_the_system_is_told_from_a_raise():
    "Raised again or from inside the library: what counts is where it began."

    def refused():
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            os.open(os.devnull, os.O_RDONLY)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def again():
        try:
            refused()
        except OSError as error:
            raise error

    def another():
        try:
            refused()
        except OSError:
            raise PermissionError(errno.EPERM, "mine") from None

    assert [outcome(action)[0] for action in (refused, again, another)] == [b"f", b"f", b"x"]


def test_parts_of_modules():
    modules = supervisor.load_modules()
    assert set(supervisor.ALLOWED_MODULES) - {"bz2", "lzma", "zlib"} <= set(modules)
    assert modules["os"].cpu_count() == 1 and modules["os"].environ == {}
    assert modules["io"].StringIO("x").read() == "x"
    for module, name in (
        ("os", "fork"),
        ("io", "open"),
        ("threading", "Thread"),
        ("sys", "modules"),
    ):
        assert not hasattr(modules[module], name)
        with pytest.raises(supervisor.Unavailable, match=f"{module}.{name} is not available"):
            getattr(modules[module], name)
    with pytest.raises(AttributeError) as private:
        getattr(modules["sys"], "_getframe")  # noqa: B009
    assert not isinstance(private.value, supervisor.Unavailable)
