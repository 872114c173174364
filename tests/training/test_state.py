"The place in a run: against BatchLayout's own schedule, there and back, the best evaluation."

import json
import math
import random

import numpy
import pytest
import torch
from transformers import TrainerState

from grpo_nb import GRPOConfig
from grpo_nb.algorithm.batching import BatchLayout
from grpo_nb.training.policy_logprobs import TrainingBatch
from grpo_nb.training.state import TrainState, random_state, set_random_state

LAYOUTS = [
    BatchLayout(3, 3, gradient_accumulation_steps=2, steps_per_generation=4),
    BatchLayout(3, 3, gradient_accumulation_steps=4, steps_per_generation=4, num_iterations=2),
    BatchLayout(4, 2, gradient_accumulation_steps=3, steps_per_generation=1),
]


def config_of(layout, **changes):
    return GRPOConfig(
        per_device_train_batch_size=layout.per_device_train_batch_size,
        num_generations=layout.num_generations,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        steps_per_generation=layout.steps_per_generation,
        num_iterations=layout.num_iterations,
        **changes,
    )


def batch_of(layout, cycle):
    "Completion i of a cycle has the one token 100 * cycle + i."
    count = layout.generation_batch_size
    ids = torch.arange(count)[:, None] + 100 * cycle
    ones = torch.ones(count, 1, dtype=torch.bool)
    return TrainingBatch(ids, ones, ids, ones, ones, torch.zeros(count))


def walk(state):
    "Every micro-batch until the run is over: (cycle, micro-batch, its tokens, update follows)."
    while not state.finished:
        if state.batch is None:
            state.hold(batch_of(state.layout, state.cycle))
        place, ids = (state.cycle, state.micro_step), state.micro_batch().completion_ids
        follows = state.advance()
        if follows:
            state.updated()
        yield (*place, ids[:, 0].tolist(), follows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_walk_is_the_schedule(layout):
    state = TrainState(layout=layout)
    state.begin(config_of(layout, max_steps=6), rows=100 * layout.prompts_per_generation)
    walked, size = list(walk(state)), layout.per_device_train_batch_size
    cycles = walked[-1][0] + 1
    schedule = layout.schedule(cycles=cycles)[: len(walked)]
    assert [(c, m, u) for c, m, _, u in walked] == [(b.cycle, b.step, b.update) for b in schedule]
    for cycle, micro_step, ids, _ in walked:
        first = micro_step % layout.steps_per_generation * size
        assert ids == [100 * cycle + first + i for i in range(size)]
    assert state.global_step == 6


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_epoch_closes_its_last_window(layout):
    state = TrainState(layout=layout)
    rows = 3 * layout.prompts_per_generation
    state.begin(config_of(layout, num_train_epochs=2), rows=rows)
    seen = []
    while not state.finished:
        if state.batch is None:
            state.hold(batch_of(layout, state.cycle))
        opens = state.opens_epoch
        if state.advance():
            state.updated()
        seen.append((opens, state.closed_epoch, state.epoch))
    assert sum(opens for opens, _, _ in seen) == 2 and sum(ends for _, ends, _ in seen) == 2
    assert seen[-1][1:] == (True, 2.0)
    assert state.global_step == state.max_steps == 2 * layout.updates_per_epoch(rows)


def test_a_state_goes_there_and_back_in_the_middle_of_a_cycle():
    layout = LAYOUTS[0]
    whole, first, second = (TrainState(layout=layout) for _ in range(3))
    for state in (whole, first, second):
        state.begin(config_of(layout, max_steps=5), rows=40)
    walked = list(walk(whole))
    for _ in range(3):
        if first.batch is None:
            first.hold(batch_of(layout, first.cycle))
        if first.advance():
            first.updated()
    first.count(17)
    torch.manual_seed(5)
    saved = first.state_dict()
    drawn = torch.rand(3), random.random(), numpy.random.rand()
    second.load_state_dict(saved)
    assert (torch.rand(3), random.random(), numpy.random.rand())[1:] == drawn[1:]
    assert second.tokens == 17 and second.first_step == second.global_step == 1
    assert second.seconds() >= saved["seconds"]
    assert list(walk(second)) == walked[3:]


def test_what_is_written_for_others_is_what_transformers_writes(tmp_path):
    state = TrainState(layout=LAYOUTS[0], log_history=[{"step": 1, "reward": 0.5}])
    state.begin(config_of(LAYOUTS[0], max_steps=5), rows=40)
    state.hold(batch_of(LAYOUTS[0], 0))
    state.save_to_json(str(tmp_path / "state.json"))
    written = TrainerState.load_from_json(str(tmp_path / "state.json"))
    assert written.max_steps == 5 and written.log_history == state.log_history
    assert "batch" not in json.loads((tmp_path / "state.json").read_text())


def test_a_new_run_stands_at_the_beginning():
    state = TrainState(layout=LAYOUTS[0])
    state.begin(config_of(LAYOUTS[0], max_steps=5), rows=40)
    list(walk(state))
    state.is_best(3.0)
    state.best_is_in("somewhere")
    state.count(9)
    state.begin(config_of(LAYOUTS[0], max_steps=2), rows=40)
    there = (state.global_step, state.cycle, state.micro_step, state.tokens, state.epoch)
    assert there == (0, 0, 0, 0, 0.0) and state.max_steps == 2 and state.batch is None
    assert state.best_metric is state.best_global_step is state.best_model_checkpoint is None


def test_too_little_data_is_a_sentence():
    state = TrainState(layout=LAYOUTS[0])
    with pytest.raises(ValueError, match="draws 4 different prompts"):
        state.begin(config_of(LAYOUTS[0]), rows=3)


@pytest.mark.parametrize(
    "values, greater, best",
    [
        ([0.1, 0.5, 0.5, 0.2], True, 1),
        ([3.0, 2.0, 4.0, 1.0], False, 3),
        ([math.nan, 0.1, None, 0.0], True, 1),
    ],
)
def test_the_best_is_the_first_of_the_best(values, greater, best):
    state = TrainState()
    taken = []
    for state.global_step, value in enumerate(values):
        if state.is_best(value, greater):
            taken.append(state.global_step)
    assert taken[-1] == state.best_global_step == best and state.best_metric == values[best]


def test_all_generators_are_put_back():
    kept = random_state()
    first = torch.rand(4), random.random(), numpy.random.rand()
    set_random_state(kept)
    second = torch.rand(4), random.random(), numpy.random.rand()
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


def test_the_random_state_of_apple_silicon_is_kept_too(monkeypatch):
    "With the device's two functions replaced by a generator of the CPU's."
    device = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda *_: device.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, *_: device.set_state(state))
    kept = random_state()
    drawn = torch.rand(4, generator=device)
    set_random_state(kept)
    assert torch.equal(torch.rand(4, generator=device), drawn)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    set_random_state(kept)  # a checkpoint of a Mac goes on elsewhere
    del kept["mps"]
    set_random_state(kept)  # one that was written before it was kept
    assert random_state()["mps"] is None


def test_the_random_state_can_be_read_without_running_code(tmp_path):
    random.gauss(0, 1), numpy.random.randn(1)  # both keep a second number for later
    torch.save(random_state(), tmp_path / "random.pt")
    kept = torch.load(tmp_path / "random.pt", weights_only=True)
    drawn = random.gauss(0, 1), numpy.random.randn(3).tolist(), torch.rand(3).tolist()
    set_random_state(kept)
    assert drawn == (random.gauss(0, 1), numpy.random.randn(3).tolist(), torch.rand(3).tolist())
