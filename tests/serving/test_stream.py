"Batches in flight: the schedule, what it depends on, and every way out of a run."

import os
import random
import signal
import threading
import time

import pytest
import torch
from small_runs import (
    digits,
    one_thread,  # noqa: F401
    small_model,
    small_trainer,
    weights_of,
    without_clocks,
)

from grpo_nb import GRPOConfig
from grpo_nb.rollout.rollout import Rollout
from grpo_nb.rollout.sampler import Sampler
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.turns import TurnSampler
from grpo_nb.serving.stream import (
    CopySampler,
    ProcessSampler,
    RolloutStream,
    check_in_flight,
    cycle_seed,
)
from grpo_nb.training.checkpoint import checkpoints
from grpo_nb.training.leaving import Preempted
from grpo_nb.training.state import TrainState

PARAMS = SamplingParams(max_tokens=3)


class Scripted:
    "A sampler that draws its version and its seed; `before(request number)` is called first."

    takes_token_ids = holds_weights = True

    def __init__(self, before=lambda number: None, serves=lambda version: version):
        self.before, self.serves, self.seen = before, serves, []

    def generate(self, prompts, params, version=None):
        self.seen.append((version, params.seed))
        self.before(len(self.seen) - 1)
        ids = torch.full((len(prompts), 1), version)
        versions = torch.full((len(prompts),), self.serves(version))
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Rollout(prompts, ids, mask, -ids.float(), ["stop"] * len(prompts), versions=versions)

    def publish(self, model, version):
        pass

    def close(self):
        pass


def cycles(stream, count, last=None, per_cycle=1):
    "What drew each of so many cycles, with `per_cycle` updates in each."
    last = count - 1 if last is None else last
    drawn = [
        stream.take(c, per_cycle * c, last, lambda cycle: ([[cycle]] * 4, PARAMS))
        for c in range(count)
    ]
    assert [r.prompt_ids[0] for r in drawn] == [[c] for c in range(count)]
    return [int(r.versions[0]) for r in drawn]


def no_thread():
    return "rollouts" not in [thread.name for thread in threading.enumerate()]


def run(folder, staleness=2, sampler=None, reward=digits, resume=None, **settings):
    "A small run with completions in flight, four updates unless told otherwise."
    model, tokenizer = small_model()
    sampler = sampler or CopySampler(tokenizer)
    made = small_trainer(
        folder,
        reward,
        model=model,
        tokenizer=tokenizer,
        arguments={"rollout_func": sampler},
        max_staleness=staleness,
        **{"max_steps": 4, "per_device_train_batch_size": 8, **settings},
    )
    made.train(resume_from_checkpoint=resume)
    assert no_thread()
    return made


def same(a, b):
    a, b = weights_of(a.model), weights_of(b.model)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the schedule


@pytest.mark.parametrize("staleness, expected", [(1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])])
def test_a_cycle_is_drawn_with_the_weights_it_was_asked_of(staleness, expected):
    sampler = Scripted(lambda number: time.sleep(0.01 * (number % 2)))
    with RolloutStream(sampler, staleness, seed=3) as stream:
        assert cycles(stream, 5) == expected
    assert sampler.seen == [(v, cycle_seed(3, c)) for c, v in enumerate(expected)]  # and no more
    assert stream.dropped == 0 and no_thread()


def test_the_last_cycle_is_the_one_in_which_the_run_ends():
    for steps, accumulate, iterations, updates, rows in [
        (1, 1, 1, 7, 6),
        (4, 2, 1, 7, 12),
        (2, 4, 1, 5, 6),
        (3, 2, 2, 11, 10),
        (2, 3, 1, 4, 10),
    ]:
        config = GRPOConfig(
            per_device_train_batch_size=2,
            num_generations=2,
            steps_per_generation=steps,
            gradient_accumulation_steps=accumulate,
            num_iterations=iterations,
            max_steps=updates,
        )
        state = TrainState(layout=config.layout())
        state.begin(config, rows)
        expected = state.last_cycle()
        while not state.finished:
            reached = state.cycle
            if state.advance():
                state.updated()
        assert expected == reached


def test_what_is_too_old_is_dropped_and_drawn_again():
    late = Scripted(serves=lambda version: 0 if len(late.seen) < 5 else version)
    with RolloutStream(late, 1) as stream:
        # cycle 2 may be of version 1 and cycle 3 of version 2, and both come with version 0
        assert cycles(stream, 4) == [0, 0, 2, 3]
        assert stream.dropped == 8  # cycles 2 and 3, four completions each


def test_a_sampler_that_never_loads_what_is_published_ends_the_run():
    with RolloutStream(Scripted(serves=lambda version: 0), 1) as stream:
        with pytest.raises(RuntimeError, match="asked twice for completions of version 2, and"):
            cycles(stream, 4)


def test_a_run_that_goes_elsewhere_drops_what_it_asked_for():
    with RolloutStream(Scripted(), 2) as stream:
        take = [stream.take(c, c, 99, lambda cycle: ([[cycle]], PARAMS)) for c in (0, 10, 11)]
    assert [int(r.versions[0]) for r in take] == [0, 10, 10] and stream.dropped == 2


# ---- in a run


def test_nothing_depends_on_how_long_anything_takes(tmp_path):
    pauses = random.Random(0)

    class Slow(CopySampler):
        def draw(self, *task):
            time.sleep(0.03 * pauses.random())
            return super().draw(*task)

    quick = run(tmp_path / "a")
    slow = run(tmp_path / "b", sampler=Slow(quick.tokenizer))
    assert without_clocks(quick.log_history) == without_clocks(slow.log_history)
    assert same(quick, slow)
    ages = [record["sampling/staleness_max"] for record in quick.log_history]
    assert ages == [0, 1, 2, 2] and quick.log_history[-1]["sampling/dropped"] == 0
    gaps = [record["sampling/gap_mean"] for record in quick.log_history]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-2  # the first is fresh, the others old
    assert all(
        record["sampling/importance_sampling_ratio/max"] <= 2 for record in quick.log_history
    )


def test_an_evaluation_in_between_draws_with_the_present_weights(tmp_path):
    model, tokenizer = small_model()
    seen = []

    class Watched(CopySampler):
        def generate(self, prompts, params, version=None):
            rollout = super().generate(prompts, params, version)
            if version is None:
                seen.append(int(rollout.versions[0]))
            return rollout

    plain = run(tmp_path / "a")
    made = small_trainer(
        tmp_path / "b",
        model=model,
        tokenizer=tokenizer,
        arguments={"rollout_func": Watched(tokenizer), "eval_dataset": [{"prompt": "1+1="}] * 2},
        max_staleness=2,
        max_steps=4,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
    )
    made.train()
    assert same(plain, made) and sorted(set(seen)) == [1, 2, 3, 4]


def test_a_resumed_run_draws_again_and_is_the_same_each_time(tmp_path):
    whole = run(tmp_path / "a", max_steps=6, save_strategy="steps", save_steps=3)
    again = [
        run(tmp_path / name, max_steps=6, resume=str(tmp_path / "a" / "checkpoint-3"))
        for name in "bc"
    ]
    logs = [without_clocks(one.log_history) for one in again]
    assert same(*again) and logs[0] == logs[1]
    assert logs[0][:3] == without_clocks(whole.log_history)[:3]
    ages = [record["sampling/staleness_max"] for record in logs[0]]
    assert ages == [0, 1, 2, 0, 1, 2]  # the weights of before are gone: fresh after the resume


def test_dppo_masks_stale_tokens(tmp_path):
    records = run(tmp_path, dppo_divergence="tv", dppo_threshold=0.05).log_history
    assert records[0]["dppo/masked"] == 0 and max(r["dppo/masked"] for r in records) > 0


# ---- the ways out


def boom(number):
    if number == 2:
        raise OSError("the GPU has left the building")


def leave(by):
    "A reward function that ends the run in its third call."
    calls = []

    def reward(completions, **columns):
        calls.append(0)
        if len(calls) == 3:
            by()
        return digits(completions)

    return reward


def fail():
    raise ZeroDivisionError("no such reward")


@pytest.mark.parametrize(
    "by, error",
    [
        (fail, "no such reward"),
        (lambda: signal.raise_signal(signal.SIGINT), None),
        (lambda: signal.raise_signal(signal.SIGTERM), "143"),
    ],
)
def test_every_way_out_ends_the_thread_and_leaves_a_checkpoint(tmp_path, by, error):
    with pytest.raises(BaseException, match=error) as caught:
        run(tmp_path, reward=leave(by))
    assert not isinstance(caught.value, AssertionError) and no_thread()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert isinstance(caught.value, Preempted) == (error == "143")


def test_an_error_of_the_sampler_arrives_as_it_is(tmp_path):
    class Broken(CopySampler):
        def draw(self, *task):
            boom(len(drawn))
            drawn.append(0)
            return super().draw(*task)

    drawn = []
    with pytest.raises(OSError, match="the GPU has left the building"):
        run(tmp_path, sampler=Broken(small_model()[1]))
    assert no_thread() and [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_sampler_that_is_drawing_is_interrupted():
    asleep, woken = threading.Event(), threading.Event()
    sampler = Scripted(lambda number: number == 1 and (asleep.set(), woken.wait(60)))
    sampler.interrupt = woken.set
    with RolloutStream(sampler, 1) as stream:
        cycles(stream, 1, last=9)
        assert asleep.wait(60)
    assert no_thread() and woken.is_set()


def test_who_has_no_weights_of_its_own_is_refused(tmp_path):
    for rollout_func, who in ((None, "RolloutEngine"), (lambda prompts, trainer: 0, "Function")):
        with pytest.raises(ValueError, match=f"{who}.* no weights of its own .*use_vllm=True"):
            small_trainer(tmp_path, arguments={"rollout_func": rollout_func}, max_staleness=1)
    with pytest.raises(ValueError, match="tools and environments are called in the thread"):
        check_in_flight(object.__new__(TurnSampler), 1)
    check_in_flight(object(), 0)
    assert small_trainer(tmp_path).collector.stream is None


def test_a_version_that_is_gone():
    model, tokenizer = small_model()
    sampler = CopySampler(tokenizer, keep=2)
    with pytest.raises(ValueError, match="the sampler has none"):
        sampler.generate([[1]], PARAMS)
    for version in range(3):
        sampler.publish(model, version)
    with pytest.raises(ValueError, match="version 0 of the weights is not here.* has 1, 2: pub"):
        sampler.generate([[1]], PARAMS, version=0)


# ---- a process


@pytest.mark.long
def test_a_process_draws_the_same_and_its_end_is_a_sentence(tmp_path):
    model, tokenizer = small_model()
    with ProcessSampler(tokenizer) as there:
        assert isinstance(there, Sampler)
        model.__deepcopy__ = int  # which fails: the process needs no second copy
        there.publish(model, 0)
        with pytest.raises(RuntimeError, match="the sampling process: ValueError: prompt 0 holds"):
            there.generate([[10**6]], PARAMS, 0)
        here = run(tmp_path / "a")
        elsewhere = run(tmp_path / "b", sampler=there)
        assert same(here, elsewhere)
        assert without_clocks(here.log_history) == without_clocks(elsewhere.log_history)

        kill = leave(lambda: os.kill(there.process.pid, signal.SIGKILL))
        with pytest.raises(RuntimeError, match="draws completions ended with code -9"):
            run(tmp_path / "c", sampler=there, reward=kill, max_steps=9)
        assert checkpoints(tmp_path / "c") and there.process is None
        assert no_thread()
