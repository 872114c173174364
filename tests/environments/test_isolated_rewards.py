"""environments.pool: functions that hang, crash, flood and lie, what is left of them afterwards,
and who may be asked at all."""

import asyncio
import concurrent.futures
import copy
import functools
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from grpo_nb.environments import gsm8k
from grpo_nb.environments.isolated_rewards import (
    LARGEST,
    IsolatedReward,
    NotScored,
    isolated,
    plain_scores,
    reachable,
)
from grpo_nb.training.rewards import RewardError, as_scores, run_coroutines, score_completions

MODULE = (
    """
    import asyncio, ctypes, datetime, json, math, os, signal, subprocess, sys, threading, time
    from pathlib import Path

    loaded = []
    def honest(completions, **columns): return [len(c) for c in completions]
    def busy(completions, **columns):
        while True: pass
    def sleeps(completions, seconds=60, **columns):
        time.sleep(seconds)
        return [0.0] * len(completions)
    def deaf(completions, **columns):
"""
    "        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM): "
    "signal.signal(number, signal.SIG_IGN)"
    """
        while True:
            try: time.sleep(60)
            except BaseException: pass
    def stops_itself(completions, **columns): os.kill(os.getpid(), signal.SIGSTOP)
    def raises(completions, **columns): raise KeyError("no such thing")
    def raises_badly(completions, **columns):
        class Bad(Exception):
            def __str__(self): raise RuntimeError
        raise Bad
    def recurses(completions, **columns): return recurses(completions)
    def exits(completions, **columns): sys.exit(0)
    def leaves(completions, **columns): os._exit(7)
    def segfaults(completions, **columns): ctypes.string_at(0)
    def kills_parent(completions, **columns): os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
    def closes_all(completions, **columns): os.closerange(0, 256); time.sleep(60)
    def floods(completions, **columns):
"""
    '        for _ in range(3000): print("x" * 1000); sys.stderr.write("y" * 1000); '
    'os.write(1, b"z" * 1000)\n'
    "        return [1.0] * len(completions)\n"
    "    def reads_input(completions, **columns): return [float(len(sys.stdin.read()))] * "
    "len(completions)"
    """
    def forks(completions, **columns):
        os.fork()
        return [2.0] * len(completions)
    def returns(completions, what, **columns):
        return eval(what[0])
    def tells(completions, log_metric, log_extra, trainer_state, **columns):
        log_metric("length", sum(map(len, completions)) / len(completions))
        log_extra("seen", [c.upper() for c in completions])
        return [trainer_state.global_step] * len(completions)
"""
    "    def needs_them_not(completions, log_metric=None, **columns): "
    "return [float(log_metric is None)] * len(completions)\n"
    "    def sees(completions, prompts, **columns):\n"
    '        return [float(columns["when"][i].year + len(columns["ids"][i]) + '
    'prompts[i][0]["content"].count("q")) for i in range(len(completions))]'
    """
    async def waits(completions, **columns):
        await asyncio.sleep(0.1)
        return [3.0] * len(completions)
    def hard_hangs(completions, **columns):
        while "hard" in completions: pass
        return [len(c) for c in completions]
    def one_is_nan(completions, **columns): return [math.nan, 1.0]
    def starts(completions, folder, **columns):
        "Three programs that leave the session, and lose their parent."
        for i in range(3):
            if os.fork() == 0:
                os.setsid()
"""
    '                if os.fork() == 0: os.execv("/bin/sh", ["sh", "-c", \'echo $$ > "$1"; '
    'exec sleep 300\', "sh", folder[0] + f"/{i}"])'
    """
                os._exit(0)
        while len([p for p in Path(folder[0]).iterdir() if p.read_text()]) < 3: time.sleep(0.01)
        Path(folder[0], "all").write_text("0")
        time.sleep(300)
    def prepare(): loaded.append(True)
    def is_prepared(completions, **columns): return [float(len(loaded))] * len(completions)
    def settings(completions, factor, **columns): return [factor * len(c) for c in completions]
    def process(completions, **columns): return [float(os.getpid())] * len(completions)
    def count_calls(completions, **columns):
        loaded.append(1)
        return [float(len(loaded))] * len(completions)
    class Judge:
        def __call__(self, completions, **columns): return [5.0] * len(completions)
    judge = Judge()
    constant = 3
"""
)
GIVEN = dict(prompts=["p", "p"], completions=["a", "bcd"])


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "rewards_in_a_file.py").write_text(textwrap.dedent(MODULE))
    (folder / "breaks_at_import.py").write_text("import os; os._exit(5)")
    (folder / "raises_at_import.py").write_text("raise ImportError('a part is missing')")
    (folder / "hangs_at_import.py").write_text("import time; time.sleep(60)")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def made(function, **settings):
    return isolated(f"rewards_in_a_file:{function}", **{"timeout_s": 20, **settings})


def asked(reward, **given):
    "Scores, warnings and seconds of a call."
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.monotonic()
        scores = reward(**{**GIVEN, **given})
        return (
            scores,
            [str(w.message) for w in told if "gave no score" in str(w.message)],
            time.monotonic() - began,
        )


def children():
    return {int(p.name) for p in Path("/proc").glob("[0-9]*") if parent(p) == os.getpid()}


def parent(folder):
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


# What a fault costs


@pytest.mark.long
@pytest.mark.parametrize("name", ["busy", "sleeps", "deaf", "stops_itself"])
def test_a_function_that_hangs_is_killed_at_the_deadline(name):
    with made(name, timeout_s=0.4) as reward:
        times = []
        for _ in range(3):
            scores, told, seconds = asked(reward)
            assert (
                scores == [None, None]
                and isinstance(scores, NotScored)
                and "not done after 0.4 s" in scores.reason
            )
            assert len(told) == 1 and f"'{name}'" in told[0] and "2 of 2" in told[0]
            times.append(seconds)
        assert 0.4 <= min(times) < 0.9  # the best of three, for a busy machine


@pytest.mark.parametrize(
    "name, reason",
    [
        ("raises", "KeyError: 'no such thing' (rewards_in_a_file.py, line"),
        ("raises_badly", "it raised Bad"),
        ("recurses", "RecursionError"),
        ("exits", "SystemExit"),
        ("leaves", "exit code 7"),
        ("segfaults", "SIGSEGV"),
        ("kills_parent", "watchdog ended"),
        ("closes_all", ""),
    ],
)
def test_a_function_that_fails_costs_its_own_score_at_once(name, reason):
    with made(name) as reward, made("honest") as other:
        scores, told, seconds = asked(reward)
        assert scores == [None, None] and reason in scores.reason and told and seconds < 10
        assert asked(reward)[0] == [None, None] and asked(other)[0] == [
            1,
            3,
        ]  # again, and its neighbour is well


@pytest.fixture(scope="module")
def returns(module):
    with made("returns") as reward:
        yield reward


@pytest.mark.parametrize(
    "what, reason",
    [
        ("[1.0]", "1 rewards for 2 completions"),
        ("[1, 2, 3]", "3 rewards"),
        ("1.0", "must return a list"),
        ("None", "returned None"),
        ("'ab'", "must return a list"),
        ("['1', '2']", "'1' among"),
        ("[[1], [2]]", "[1] among"),
        ("[1, math.inf]", "inf among"),
        ("[1, -math.inf]", "-inf among"),
        ("[1e300, 0]", "1e+300 among"),
        ("[10**400, 0]", "among its rewards"),
        ("[1j, 0]", "1j among"),
        ("{1: 2}", "must return a list"),
        ("[object(), 1]", "among"),
        ("'x' * 10**7", "must return a list"),
        ("(x for x in [1, 2])", "must return a list"),
        ("[b'1', 2]", "among"),
    ],
)
def test_nonsense_is_no_score(returns, what, reason):
    scores, told, _ = asked(returns, what=[what] * 2)
    assert (
        scores == [None, None]
        and reason in scores.reason
        and len(scores.reason) < 600
        and len(told) == 1
    )


@pytest.mark.parametrize(
    "what, scores",
    [
        ("[1, None]", [1.0, None]),
        ("(True, 0.5)", [1.0, 0.5]),
        ("[math.nan, 2]", [None, 2.0]),
        ("__import__('numpy').array([1, 2])", [1.0, 2.0]),
        ("__import__('fractions').Fraction(1, 2), 1", [0.5, 1.0]),
        ("[None, None]", [None, None]),
    ],
)
def test_numbers_of_many_kinds_are_scores(returns, what, scores):
    found, told, _ = asked(returns, what=[what] * 2)
    assert found == scores and not told and not isinstance(found, NotScored)


def test_output_goes_nowhere_and_input_is_empty(capfd):
    with made("floods") as reward, made("reads_input") as other:
        assert asked(reward)[0] == [1.0, 1.0] and asked(other)[0] == [0.0, 0.0]
    assert capfd.readouterr() == ("", "")


def test_a_copy_made_with_fork_says_nothing():
    with made("forks") as reward:
        assert [asked(reward)[0] for _ in range(3)] == [[2.0, 2.0]] * 3


def test_scores_are_checked_like_those_of_the_training_process():
    for values in ([1], "ab", [1, math.inf], [1, 1e300], [1, 10**400], ["1", 2]):
        with pytest.raises(ValueError):
            plain_scores(values, 2)
        with pytest.raises(RewardError, match="reward function 'f' returned"):
            as_scores(values, 2, "f")
    assert plain_scores(torch.tensor([1.0, math.nan]), 2) == [1.0, None] and plain_scores(
        [numpy.float32(1), LARGEST], 2
    ) == [1.0, LARGEST]


# One completion at a time


def test_each_completion_pays_for_itself():
    with made("hard_hangs", timeout_s=60, each_timeout_s=0.4, workers=2) as reward:
        scores, told, _ = asked(
            reward, prompts=["p"] * 6, completions=["a", "hard", "bc", "hard", "def", "g"]
        )
        assert (
            scores == [1, None, 2, None, 3, 1]
            and not isinstance(scores, NotScored)
            and "2 of 6" in told[0]
        )


def test_the_deadline_of_the_call_holds_for_all_of_them():
    with made("hard_hangs", timeout_s=0.9, each_timeout_s=0.4) as reward:
        scores, told, seconds = min(
            (asked(reward, prompts=["p"] * 9, completions=["a"] + ["hard"] * 8) for _ in range(3)),
            key=lambda answer: answer[2],
        )
        assert scores == [1] + [None] * 8 and seconds < 2.5  # and not nine times as long


def test_columns_are_cut_and_settings_are_not():
    with made("settings", each_timeout_s=10, arguments={"factor": 2}) as reward:
        assert asked(reward)[0] == [2, 6]
    with made("sees", each_timeout_s=10) as reward:
        import datetime

        when, prompts = (
            [datetime.date(2000 + i, 1, 1) for i in range(2)],
            [[{"role": "user", "content": "q" * i}] for i in range(2)],
        )
        assert asked(reward, prompts=prompts, when=when, ids=[[1, 2], [3]])[0] == [2002, 2003]


def test_no_completions():
    for settings in ({}, {"each_timeout_s": 1}):
        with made("honest", **settings) as reward:
            assert asked(reward, prompts=[], completions=[])[:2] == ([], [])


# What the trainer gives, and is told


class State:
    def __init__(self):
        self.global_step, self.epoch, self.log_history, self.function = (
            7,
            0.5,
            [{}] * 3,
            lambda: None,
        )


@pytest.mark.parametrize("settings", [{}, {"each_timeout_s": 10}])
def test_metrics_and_columns_arrive(settings):
    metrics, extra = [], {}
    with made("tells", **settings) as reward:
        scores, _, _ = asked(
            reward,
            log_metric=lambda name, value: metrics.append((name, value)),
            log_extra=extra.__setitem__,
            trainer_state=State(),
        )
    lengths = [("length", 2.0)] if not settings else [("length", 1.0), ("length", 3.0)]
    assert (
        scores == [7, 7]
        and metrics == [*lengths, ("tells/failed", 0.0)]
        and extra == {"seen": ["A", "BCD"]}
    )
    with made("needs_them_not") as reward:
        assert asked(reward)[0] == [1.0, 1.0]


def test_failures_are_logged():
    metrics = []
    with made("hard_hangs", each_timeout_s=0.3) as reward:
        asked(reward, completions=["hard", "a"], log_metric=lambda *pair: metrics.append(pair))
    assert metrics == [("hard_hangs/failed", 0.5)]


def test_what_cannot_be_sent_is_named():
    with (
        made("honest") as reward,
        pytest.raises(ValueError, match="the column 'tool' holds something that cannot be sent"),
    ):
        asked(reward, tool=[lambda: None] * 2)


def test_a_large_question_and_a_large_answer():
    with made("honest") as reward:
        assert asked(reward, completions=["x" * 10_000_000, "y"])[0] == [10_000_000, 1]


# Who may be asked


def in_the_test(completions, **columns):
    return [0.0]


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda completions: [0.0], "cannot find '.*<lambda>': it is a lambda"),
        (functools.partial(in_the_test), r"cannot find functools.partial.* holds a state"),
        ([].append, "cannot find 'list.append'"),
        ("rewards.length", "does not name a function"),
        ("rewards:", "does not name"),
        ("", "does not name"),
        ("a b:c", "does not name"),
        (3, "is no function"),
        (None, "is no function"),
    ],
)
def test_who_is_refused(function, words):
    with pytest.raises(ValueError, match=words):
        isolated(function)


def test_closures_and_the_main_script_are_refused_with_advice():
    def closure(completions, **columns):
        return [0.0]

    with pytest.raises(
        ValueError, match="inside another function.*isolated\\('rewards:closure'\\)"
    ):
        isolated(closure)
    script = {"__name__": "__main__"}
    exec("def typed(completions, **columns): return [0.0]", script)
    with pytest.raises(ValueError, match="notebook.*isolated\\('rewards:typed'\\)"):
        isolated(script["typed"])
    hidden = type(in_the_test)(in_the_test.__code__, {}, "in_the_test")
    hidden.__module__ = __name__
    with pytest.raises(ValueError, match="cannot find 'in_the_test'"):
        isolated(hidden)
    assert reachable(gsm8k.int_reward_func) == "grpo_nb.environments.gsm8k:int_reward_func"


@pytest.mark.parametrize(
    "target, words",
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("rewards_in_a_file:nothing", "no attribute 'nothing'"),
        ("rewards_in_a_file:constant", "no function"),
        ("breaks_at_import:f", "exit code 5"),
        ("raises_at_import:f", "a part is missing"),
        ("hangs_at_import:f", "not ready after 1 s"),
    ],
)
def test_what_cannot_be_imported_is_said_at_once(target, words):
    with pytest.raises(RuntimeError, match=words):
        isolated(target, start_timeout_s=1 if "hangs" in target else 30)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(timeout_s=0), "timeout_s is 0"),
        (dict(timeout_s=math.inf), "timeout_s is inf"),
        (dict(workers=0), "workers is 0"),
        (dict(each_timeout_s=-1), "each_timeout_s is -1"),
        (dict(each_timeout_s=30), "ends after timeout_s=10: raise"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ValueError, match=words):
        isolated("rewards_in_a_file:honest", **settings)


def test_functions_objects_and_names():
    with isolated(gsm8k.int_reward_func) as reward:
        assert reward.__name__ == "int_reward_func" and asked(
            reward, completions=["<answer>3</answer>", "x"]
        )[0] == gsm8k.int_reward_func(completions=["<answer>3</answer>", "x"])
    with made("judge", name="my judge") as reward:
        assert reward.__name__ == "my judge" and asked(reward)[0] == [5.0, 5.0]
    with made("waits") as reward:
        assert asked(reward)[0] == [3.0, 3.0]
    with made("is_prepared", prepare="rewards_in_a_file:prepare") as reward:
        assert asked(reward)[0] == [1.0, 1.0]


# Workers


def test_a_worker_stays_and_a_fresh_one_follows_a_fault():
    with made("count_calls") as reward:
        assert [asked(reward)[0][0] for _ in range(3)] == [1, 2, 3]
    with made("process") as reward:
        first, again = asked(reward)[0][0], asked(reward)[0][0]
        os.kill(int(first), signal.SIGKILL)  # while nobody asks
        assert (
            first == again
            and soon(lambda: not alive(int(first)))
            and asked(reward)[0][0] not in (None, first)
        )


def test_from_threads_and_event_loops():
    with made("honest", workers=2) as reward, concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda n: reward(prompts=["p"], completions=["x" * n]), range(40))
        )
        assert answers == [[n] for n in range(40)]
    with (
        made("sleeps", arguments={"seconds": 1.5}) as one,
        made("sleeps", arguments={"seconds": 1.5}) as two,
    ):
        began = time.monotonic()

        async def both():
            return await asyncio.gather(one.later(**GIVEN), two.later(**GIVEN))

        assert (
            run_coroutines([both()]) == [[[0.0, 0.0], [0.0, 0.0]]]
            and time.monotonic() - began < 2.9
        )


def test_a_copy_has_workers_of_its_own():
    with made("process", each_timeout_s=10, workers=1, arguments={"x": 1}) as reward:
        for other in (copy.deepcopy(reward), pickle.loads(pickle.dumps(reward))):
            with other:
                assert (
                    isinstance(other, IsolatedReward)
                    and other.arguments == {"x": 1}
                    and other.__name__ == "process"
                    and asked(other)[0][0] != asked(reward)[0][0]
                )


def test_closed_and_asked_again():
    reward = made("honest")
    reward.close()
    reward.close()
    assert asked(reward)[0] == [1, 3]
    reward.close()


def test_after_a_fork_each_process_has_its_own_workers(tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from grpo_nb.environments.isolated_rewards import isolated
        reward = isolated("rewards_in_a_file:process")
        mine = reward(prompts=["p"], completions=["c"])
        child = os.fork()
        theirs = reward(prompts=["p"], completions=["c"])
        if child == 0:
            reward.close()
            os._exit(0 if theirs != mine and theirs[0] else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(status or (theirs != mine) or (reward(prompts=["p"], completions=["c"]) != mine))
    """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, str(script)], env=environment, timeout=60).returncode == 0
    )


# What is left behind: nothing


def test_everything_that_it_started_is_killed(tmp_path):
    with made("starts", timeout_s=2) as reward:
        assert asked(reward, folder=[str(tmp_path)] * 2)[0] == [None, None]
        assert (tmp_path / "all").exists()
        pids = [int((tmp_path / str(i)).read_text()) for i in range(3)]
        assert len(set(pids)) == 3 and soon(lambda: not any(map(alive, pids)), 2)


def test_nothing_is_left_when_it_is_dropped():
    gc.collect()
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))
    for name in ("honest", "leaves", "busy"):
        reward = made(name, timeout_s=0.2, workers=2)
        asked(reward)
        del reward
        gc.collect()
    assert (
        soon(lambda: children() <= before) and len(os.listdir("/proc/self/fd")) <= descriptors + 1
    )


@pytest.mark.parametrize("how", ["end", "kill", "exception"])
def test_nothing_is_left_when_the_trainer_ends(tmp_path, how):
    script = tmp_path / "training.py"
    script.write_text(
        textwrap.dedent(
            """
        import os, sys, threading, time
        from grpo_nb.environments.isolated_rewards import isolated
        reward = isolated("rewards_in_a_file:starts", timeout_s=100)
"""
            '        threading.Thread(target=lambda: reward(prompts=["p"], '
            f'completions=["c"], folder=[{str(tmp_path)!r}]), daemon=True).start()'
            f"""
        def is_there(name):
            path = os.path.join({str(tmp_path)!r}, name)
            return os.path.exists(path) and (name == "all" or os.path.getsize(path))
        while not all(map(is_there, ("all", "0", "1", "2"))): time.sleep(0.01)
        print(reward.all[0].process.pid, flush=True)
        if {how!r} == "kill": os.kill(os.getpid(), 9)
        if {how!r} == "exception": raise SystemExit(3)
    """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, timeout=60, capture_output=True, text=True
    )
    pids = [int(done.stdout), *(int((tmp_path / str(i)).read_text()) for i in range(3))]
    assert soon(lambda: not any(map(alive, pids))), (done, pids)


def test_an_interrupt_leaves_no_answer_for_the_next_question():
    with made("sleeps") as reward:
        timer = threading.Timer(
            0.3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        )
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            reward(**GIVEN, seconds=30)
        timer.join()
        assert asked(reward, seconds=0)[0] == [0.0, 0.0]


# In the table of all rewards


def length(completions, **_):
    return [len(c) for c in completions]


def hangs_here(completions, **_):
    time.sleep(4)
    return [0.0] * len(completions)


async def hangs_the_loop(completions, **_):
    return hangs_here(completions)


async def never(completions, **_):
    await asyncio.sleep(60)


def table(functions, **given):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.monotonic()
        scores = score_completions(functions, ["p", "p"], ["a", "bcd"], 7, **given)
        return (
            scores,
            [str(w.message) for w in told if "reward function" in str(w.message)],
            time.monotonic() - began,
        )


def test_isolated_functions_work_side_by_side():
    with (
        made("sleeps", arguments={"seconds": 0.6}) as one,
        made("sleeps", arguments={"seconds": 0.6}) as two,
        made("busy", timeout_s=0.6) as three,
    ):
        tries = [table([one, length, three, two]) for _ in range(3)]
        scores, told, seconds = min(tries, key=lambda answer: answer[2])
        assert (
            scores[:, 1].tolist() == [1, 3]
            and scores[:, 0].tolist() == [0, 0] == scores[:, 3].tolist()
            and scores[:, 2].isnan().all()
        )
        assert (
            len(told) == 1 and "'busy'" in told[0] and seconds < 1.7
        )  # one after the other they would take 1.8


def test_a_fault_of_the_only_function_and_its_silence_are_told():
    with made("returns") as reward:
        assert table([reward], what=["os._exit(1)"] * 2)[0].isnan().all()
        scores, told, _ = table([reward], what=["[None, None]"] * 2)
        assert scores.isnan().all() and "no reward function judged" in told[0]


@pytest.mark.parametrize("function", [hangs_here, hangs_the_loop, never])
def test_over_the_limit_in_the_training_process(function):
    metrics = {}
    scores, told, seconds = table(
        [length, function], reward_timeout_s=0.3, log_metric=metrics.__setitem__
    )
    assert scores[:, 0].tolist() == [1, 3] and scores[:, 1].isnan().all() and seconds < 3.5
    assert (
        len(told) == 1
        and f"'{function.__name__}'" in told[0]
        and "step 7" in told[0]
        and "killed" in told[0]
    )
    assert metrics == {"length/failed": 0.0, f"{function.__name__}/failed": 1.0}


def test_a_function_that_is_still_busy_is_not_called_again():
    calls = []

    class Slow:
        "An object with a state is not copied: it is called in a thread."

        __name__ = "slow"

        def __call__(self, completions, **_):
            calls.append(1)
            time.sleep(1)
            return [1.0] * len(completions)

    slow = Slow()
    began = time.monotonic()
    for _ in range(3):
        assert table([length, slow], reward_timeout_s=0.2)[0][:, 1].isnan().all()
    if time.monotonic() - began < 0.9:
        assert len(calls) == 1  # unless the machine was so slow that the first call was done
    assert soon(lambda: not any(thread.name == "reward slow" for thread in threading.enumerate()))
    assert table([slow], reward_timeout_s=30)[0].tolist() == [[1.0], [1.0]]


def test_without_a_limit_it_is_called_in_the_thread_that_trains_and_with_one_in_a_copy():
    seen = []

    def where(completions, **_):
        seen.append((threading.get_ident(), os.getpid()))
        return [float(os.getpid())] * len(completions)

    table([where])
    assert seen == [(threading.get_ident(), os.getpid())]
    scores, _, _ = table([where], reward_timeout_s=30)
    assert len(seen) == 1 and scores[0, 0] != torch.tensor(float(os.getpid()))


def test_an_exception_is_still_an_error_with_a_limit():
    def fails(completions, **_):
        raise ZeroDivisionError("by zero")

    async def its_own(completions, **_):
        raise TimeoutError("of a server")

    for function in (fails, its_own):
        with pytest.raises(RewardError, match="by zero|of a server"):
            table([length, function], reward_timeout_s=30)
