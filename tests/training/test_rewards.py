"training.rewards against TRL's calls of reward functions, and what functions do wrong."

import asyncio
import functools
import inspect
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import trl

from grpo_nb.environments.isolated_rewards import descendants
from grpo_nb.training.rewards import (
    RewardError,
    TooLate,
    as_scores,
    reward_name,
    reward_names,
    run_coroutines,
    score_completions,
)

PROMPTS, COMPLETIONS = ["a", "a", "b"], ["x", "yy", "zzz"]


def length(completions, **_):
    return [len(c) for c in completions]


def some(completions, **_):
    return [None, 0.5, None]


async def slowly(completions, bonus, **_):
    await asyncio.sleep(0.01)
    return [len(c) + b for c, b in zip(completions, bonus)]


class Named:
    __name__ = "first"

    def __call__(self, **_):
        return [1]


class Judge:
    def __call__(self, prompts, **_):
        return (1, 2, 3)


def by_trl(functions, rows):
    "The table that TRL makes."
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[reward_name(f) for f in functions],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
    )
    if any(inspect.iscoroutinefunction(f) for f in functions):
        trainer.async_loop = asyncio.new_event_loop()
        threading.Thread(target=trainer.async_loop.run_forever, daemon=True).start()
    if hasattr(trl.GRPOTrainer, "_run_async_funcs"):
        trainer._run_async_funcs = functools.partial(trl.GRPOTrainer._run_async_funcs, trainer)
    return trl.GRPOTrainer._calculate_rewards(trainer, rows, PROMPTS, COMPLETIONS, [[1], [2], [3]])


def test_the_table_is_trls():
    functions, rows = (
        [length, some, lambda completions, **_: [0.25] * 3],
        [{"prompt": p, "bonus": b} for p, b in zip(PROMPTS, (1, 2, 3))],
    )
    theirs = by_trl(functions, rows)
    ours = score_completions(functions, PROMPTS, COMPLETIONS, bonus=[1, 2, 3])
    assert (
        torch.equal(ours.nan_to_num(-7), theirs.nan_to_num(-7))
        and ours.dtype == torch.float32
        and ours.shape == (3, 3)
    )


def test_every_function_gets_everything():
    seen = []
    functions = [lambda **given: seen.append(given) or [0, 0, 0], length]
    score_completions(functions, PROMPTS, COMPLETIONS, 4, level=[1, 2, 3], trainer_state="state")
    assert seen == [
        dict(prompts=PROMPTS, completions=COMPLETIONS, level=[1, 2, 3], trainer_state="state")
    ]


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1, 2.5, None], [1, 2.5, math.nan]),
        ((True, False, 3), [1, 0, 3]),
        (numpy.array([1, 2, 3]), [1, 2, 3]),
        (torch.tensor([1.0, math.nan, 3]), [1, math.nan, 3]),
        ([numpy.float32(0.5), numpy.int64(2), numpy.bool_(True)], [0.5, 2, 1]),
        ([torch.tensor(1.5), torch.tensor(2), 3], [1.5, 2, 3]),
        ([Fraction(1, 2), 0, 0], [0.5, 0, 0]),
        (torch.tensor([1.0, 2, 3], requires_grad=True), [1, 2, 3]),
    ],
)
def test_numbers_of_many_kinds(values, expected):
    scores = as_scores(values, 3, "f")
    assert scores == pytest.approx(expected, nan_ok=True) and all(
        type(score) is float for score in scores
    )


@pytest.mark.parametrize(
    "values, words",
    [
        (1.0, "returned 1.0; it must return a list"),
        (None, "returned None; it must return a list"),
        ({"a": 1}, "must return a list"),
        ("abc", "returned 'abc'; it must return a list"),
        ([1, 2], "2 rewards for 3 completions"),
        ([1, 2, 3, 4], "4 rewards for 3"),
        ([], "0 rewards for 3"),
        ([1, 2, "3"], "'3' among its rewards"),
        ([[1], [2], [3]], "\\[1\\] among its rewards"),
        ([1, 2, math.inf], "inf among its rewards"),
        ([1, -math.inf, 2], "-inf"),
        (numpy.ones((3, 1)), "\\[1.0\\] among"),
        (torch.tensor(1.0), "must return a list"),
        (range(3), "must return a list"),
    ],
)
def test_answers_that_are_none(values, words):
    with pytest.raises(
        RewardError, match=f"reward function 'f' returned .*{words}|reward function 'f' {words}"
    ):
        as_scores(values, 3, "f")


def wrong(how):
    "A function that fails."

    def helpful(completions, **_):
        if how == "raises":
            raise ZeroDivisionError("by zero")
        return how

    async def helpful_later(completions, **_):
        return helpful(completions)

    helpful_later.__name__ = "helpful"
    return [helpful, helpful_later]


@pytest.mark.parametrize(
    "how, words",
    [
        ("raises", "raised ZeroDivisionError: by zero"),
        ([1.0], "1 rewards for 3"),
        (3, "must return a list"),
    ],
)
@pytest.mark.parametrize("kind", [0, 1], ids=["plain", "async"])
def test_a_failure_is_named(how, words, kind):
    with pytest.raises(RewardError) as caught:
        score_completions(
            [length, wrong(how)[kind], slowly], PROMPTS, COMPLETIONS, 17, bonus=[1, 2, 3]
        )
    for part in ("'helpful'", words, "at step 17", "'x'"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (how == "raises")


def test_a_count_that_is_wrong_does_not_read_as_one_that_depends_on_the_step():
    with pytest.raises(
        RewardError,
        match="None for one it cannot judge \\(at step 3; the first completion it was given is "
        "'x'\\)$",
    ):
        score_completions(wrong([1.0])[:1], PROMPTS, COMPLETIONS, 3)


async def later(completions, solution, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda completions, solution, **_: [0] * 3, "missing .*'solution'"),
        (later, "missing .*'solution'"),
        (lambda completions: [0] * 3, "unexpected keyword argument"),
        (lambda completions, **kw: [len(a) for a in kw.get("solution")], "NoneType"),
    ],
)
@pytest.mark.parametrize(
    "columns, listed", [(dict(answer=[1, 2, 3], level=[1, 2, 3]), "answer, level;"), ({}, "none;")]
)
def test_a_column_that_is_not_there(function, words, columns, listed):
    with pytest.raises(
        RewardError,
        match=f"raised TypeError: .*{words}.* at step 0.*keywords prompts, completions, "
        f"completion_ids, trainer_state and the data's other columns, here {listed}",
    ):
        score_completions(
            [function],
            PROMPTS,
            COMPLETIONS,
            completion_ids=[[1]] * 3,
            trainer_state=None,
            **columns,
        )


def test_a_column_that_is_not_among_the_keywords():
    with pytest.raises(
        RewardError, match="raised KeyError: 'solutoin' .*the data's other columns, here solution;"
    ):
        score_completions(
            [lambda completions, **kw: kw["solutoin"]], PROMPTS, COMPLETIONS, solution=[1, 2, 3]
        )
    with pytest.raises(RewardError) as caught:
        score_completions(
            [lambda completions, **kw: {}["solution"]], PROMPTS, COMPLETIONS, solution=[1, 2, 3]
        )
    assert "keywords" not in str(caught.value)


def test_a_type_error_of_another_kind_has_no_word_about_columns():
    with pytest.raises(RewardError) as caught:
        score_completions([lambda completions, **_: 1 + "a"], PROMPTS, COMPLETIONS)
    assert "keywords" not in str(caught.value)


@pytest.mark.parametrize("nothing", [[None] * 3, [math.nan] * 3], ids=["None", "NaN"])
def test_a_function_that_judges_nothing_is_reported(nothing):
    with pytest.warns(
        UserWarning, match="'helpful' judged no completion .*all 3.* at step 17.*'x'"
    ):
        table = score_completions(
            [length, wrong(nothing)[0]], PROMPTS, COMPLETIONS, 17, bonus=[1, 2, 3]
        )
    assert table[:, 1].isnan().all() and not table[:, 0].isnan().any()
    with pytest.warns(
        UserWarning, match="no reward function judged any completion: 'helpful'.*at step 17.*'x'"
    ):
        table = score_completions([wrong(nothing)[0]], PROMPTS, COMPLETIONS, 17)
    assert table.shape == (3, 1) and table.isnan().all()


def test_the_first_that_failed_is_named():
    with pytest.raises(RewardError, match="'first' .* 1 rewards"):
        score_completions(
            [length, lambda **_: [1, 2, 3], Named(), *wrong("raises")], PROMPTS, COMPLETIONS
        )


@pytest.mark.parametrize("nothing", [[None] * 3, [math.nan] * 3, (None, math.nan, None)], ids=str)
@pytest.mark.parametrize("kind", [0, 1], ids=["plain", "async"])
def test_one_silent_function_is_told_of_and_so_are_all(nothing, kind):
    silent = wrong(nothing)[kind]
    with pytest.warns(
        UserWarning, match="'helpful' judged no completion .*all 3.* at step 17.*'x'"
    ):
        table = score_completions([length, silent], PROMPTS, COMPLETIONS, 17)
    assert table[:, 0].tolist() == [1, 2, 3] and table[:, 1].isnan().all()
    with pytest.warns(
        UserWarning, match="'helpful'.*all 3.* at step 17.*'x'.*Nothing can be learnt"
    ):
        assert score_completions([silent], PROMPTS, COMPLETIONS, 17).isnan().all()


def test_async_functions_wait_together():
    async def waits(completions, **_):
        await asyncio.sleep(0.3)
        return [threading.get_ident()] * 3

    began = time.monotonic()
    table = score_completions([waits, length, waits, waits], PROMPTS, COMPLETIONS)
    assert (
        time.monotonic() - began < 0.8
        and table[:, 1].tolist() == [1, 2, 3]
        and (table[:, 0] == table[:, 3]).all()
    )


def test_inside_an_event_loop_that_runs():
    async def notebook():
        return score_completions([slowly], PROMPTS, COMPLETIONS, bonus=[1, 2, 3])

    tables = []  # in a thread of its own: other tests may have left a loop running in this one
    thread = threading.Thread(target=lambda: tables.append(asyncio.run(notebook())))
    thread.start()
    thread.join(30)
    assert tables[0].tolist() == [[2], [4], [6]]


def test_an_object_or_a_partial_may_be_async():
    class Later:
        async def __call__(self, completions, **_):
            return [1, 2, 3]

    table = score_completions(
        [Later(), functools.partial(slowly, bonus=[0, 0, 0])], PROMPTS, COMPLETIONS
    )
    assert table.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_a_coroutine_that_ends_its_loop():
    async def leaves(completions, **_):
        raise SystemExit(3)

    with pytest.raises(RewardError, match="'leaves' raised SystemExit"):
        score_completions([leaves, slowly], PROMPTS, COMPLETIONS, bonus=[1, 2, 3])


def test_ctrl_c_is_not_a_failure_of_the_function():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_completions([interrupted], PROMPTS, COMPLETIONS)


def test_coroutines_return_in_order():
    async def after(seconds):
        return await asyncio.sleep(seconds, seconds)

    async def fails():
        raise KeyError(1)

    results = run_coroutines([after(0.05), fails(), after(0.01)])
    assert results[0] == 0.05 and isinstance(results[1], KeyError) and results[2] == 0.01


def test_names():
    assert [
        reward_name(f)
        for f in (
            length,
            functools.partial(length),
            Judge(),
            lambda **_: 0,
            functools.partial(Judge()),
        )
    ] == ["length", "length", "Judge", "<lambda>", "Judge"]


# One loop for all steps, names, columns


def test_what_belongs_to_an_event_loop_lives_for_all_steps():
    semaphore, loops = asyncio.Semaphore(1), []

    async def judge(completions, **_):
        async def one(text):
            async with semaphore:
                await asyncio.sleep(0.001)
            loops.append(asyncio.get_running_loop())
            return len(text)

        return await asyncio.gather(*map(one, completions))

    for step in range(3):
        assert score_completions([judge], PROMPTS, COMPLETIONS, step)[:, 0].tolist() == [
            len(text) for text in COMPLETIONS
        ]
    assert len(loops) == 9 and len(set(map(id, loops))) == 1


def test_a_blocked_loop_is_left_behind():
    async def blocks():
        time.sleep(1.2)

    async def answers():
        return 1

    assert isinstance(run_coroutines([blocks()], timeout_s=0.1)[0], TooLate)
    began = time.monotonic()
    assert run_coroutines([answers()], timeout_s=0.5) == [1] and time.monotonic() - began < 0.5


def test_coroutines_may_wait_for_others():
    async def inner(k):
        return k

    async def outer():
        return run_coroutines([inner(1), inner(2)])

    async def outermost():
        return run_coroutines([outer()])

    assert run_coroutines([outer(), outermost()], timeout_s=5) == [[1, 2], [[1, 2]]]


def test_functions_of_one_name_are_told_apart():
    def made(value):
        def reward(completions, **_):
            return [value] * len(completions)

        return reward

    assert reward_names([made(1), length, made(2), made(3)]) == [
        "reward",
        "length",
        "reward_2",
        "reward_3",
    ]
    with pytest.raises(RewardError, match="'reward_2'"):
        score_completions([made(1), made("no number")], PROMPTS, COMPLETIONS)


def test_columns_may_have_any_name():
    def reward(completions, step, functions, reward_timeout_s, **_):
        return [s + f + r for s, f, r in zip(step, functions, reward_timeout_s)]

    assert score_completions(
        [reward],
        PROMPTS,
        COMPLETIONS,
        4,
        data=dict(step=[1, 2, 3], functions=[10] * 3, reward_timeout_s=[100] * 3),
    )[:, 0].tolist() == [111, 112, 113]


def stuck_in_c(completions, **columns):
    "Half a minute inside one regular expression, which holds Python's lock."
    re.match(r"(a|a)*$", "a" * 28 + "b")
    return [0.0] * len(completions)


def in_time(completions, log_metric=None, log_extra=None, **columns):
    if log_metric:
        log_metric("seen", len(completions))
        log_extra("text", list(completions))
    return torch.tensor([1.0] * len(completions))


async def waits(completions, **columns):
    await asyncio.sleep(0.05)
    return [2.0] * len(completions)


def processes():
    "The processes that this one has started and not collected."
    return descendants(os.getpid())


@pytest.mark.long
def test_a_reward_that_hangs_in_c_holds_the_trainer_no_longer_than_its_deadline():
    before, metrics, extra = processes(), {}, {}
    began = time.monotonic()
    with pytest.warns(UserWarning, match="stuck_in_c.*at step 4.*3 s.*was killed"):
        scores = score_completions(
            [stuck_in_c, in_time, waits, stuck_in_c],
            ["p", "p"],
            ["a", "b"],
            step=4,
            reward_timeout_s=3,
            log_metric=metrics.__setitem__,
            log_extra=extra.__setitem__,
        )
    assert time.monotonic() - began < 9, "two that hang, and each of them would take minutes"
    assert scores[:, [0, 3]].isnan().all() and scores[:, [1, 2]].tolist() == [[1, 2], [1, 2]]
    assert metrics["seen"] == 2 and extra == {"text": ["a", "b"]}
    assert metrics["stuck_in_c/failed"] == 1 and metrics["in_time/failed"] == 0
    assert processes() == before, "every copy was ended and collected"


def test_an_answer_in_time_is_kept_behind_one_that_is_late():
    def hangs(completions, **columns):
        time.sleep(60)

    def long_answer(completions, log_extra, **columns):  # more than a pipe holds
        log_extra("text", ["x" * 1_000_000] * len(completions))
        return [1.0] * len(completions)

    extra = {}
    given = dict(reward_timeout_s=1.5, log_extra=extra.__setitem__)
    with pytest.warns(UserWarning, match="hangs.*was killed"):
        scores = score_completions([hangs, long_answer, hangs, in_time], ["p"], ["a"], **given)
    assert scores.isnan().tolist() == [[True, False, True, False]]
    assert len(extra["text"][0]) == 1_000_000


def test_what_a_copy_started_ends_with_it():
    def leaves_a_child(completions, folder, **columns):
        child = subprocess.Popen(["sleep", "60"])
        (Path(folder[0]) / "pid").write_text(str(child.pid))
        time.sleep(60)

    with tempfile.TemporaryDirectory() as folder, pytest.warns(UserWarning, match="was killed"):
        answered = dict(folder=[folder], reward_timeout_s=1.0)
        score_completions([leaves_a_child, in_time], ["p"], ["a"], **answered)
        pid = (Path(folder) / "pid").read_text()
    ended = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < ended:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # killed, and not collected by whoever adopted it
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}").exists()


class Odd(Exception):
    "An exception that cannot be read back."

    def __init__(self, one, two):
        super().__init__(one)


def fails_oddly(completions, **columns):
    raise Odd("of its own kind", 2)


def leaves(completions, **columns):
    sys.exit(3)


def dies(completions, **columns):
    os.kill(os.getpid(), signal.SIGSEGV)


def returns_a_lock(completions, **columns):
    return [threading.Lock()] * len(completions)


@pytest.mark.parametrize(
    "function, limit, said",
    [
        (leaves, None, "'leaves' raised SystemExit: 3 at step 5"),
        (leaves, 30, "'leaves' raised SystemExit: 3 at step 5"),
        (fails_oddly, 30, "of its own kind"),
        (dies, 30, "ended with status -11"),
        (returns_a_lock, 30, "cannot pickle"),
    ],
)
def test_what_a_reward_does_to_its_process_is_a_sentence(function, limit, said):
    with pytest.raises(RewardError, match=said):
        score_completions([function], ["p"], ["a"], step=5, reward_timeout_s=limit)


def test_a_limit_says_what_it_cannot_do_for_an_object_with_a_state():
    class Judge:
        calls = 0

        def __call__(self, completions, **columns):
            self.calls += 1
            return [float(self.calls)] * len(completions)

    judge = Judge()
    with pytest.warns(UserWarning, match="'Judge' is an object with a state.*holds the run"):
        for calls in (1, 2):
            scores = score_completions([judge], ["p"], ["a"], reward_timeout_s=5)
            assert scores.tolist() == [[calls]]


def test_without_fork_a_function_gets_a_thread_and_a_warning(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.warns(UserWarning, match="cannot be copied on this system"):
        assert score_completions([in_time], ["p"], ["a"], reward_timeout_s=5).tolist() == [[1]]
