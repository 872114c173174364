"Groups without a difference are drawn again elsewhere; a curriculum prefers what is half known."

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from small_runs import (
    ROWS,
    one_thread,  # noqa: F401
    small_trainer,
    weights_of,
    without_clocks,
)

from grpo_nb.algorithm.batching import BatchLayout
from grpo_nb.training.collect import RolloutCollector
from grpo_nb.training.prompt_choice import Curriculum, idle_groups, spare_rows

NAN = float("nan")


def right(prompts, completions, **columns):
    "Rows with 7+ are never solved, those with 345+ always, those with 12+ every other time."
    times = {"7": lambda i: 0.0, "3": lambda i: 1.0, "1": lambda i: float(i % 2)}
    return [times[prompt[0]](i) for i, prompt in enumerate(prompts)]


def length(completions, **columns):
    return [len(text) / 10 for text in completions]


def trainer(folder, **changes):
    settings = dict(dynamic_sampling="right", reward_weights=[1.0, 0.1], max_steps=3)
    return small_trainer(folder, [right, length], **{**settings, **changes})


@pytest.mark.parametrize(
    "scores, idle",
    [
        ([1, 1, 0, 0], [0, 1]),
        ([1, 0, 0, 0], [1]),
        ([NAN, NAN, 0, 1], []),  # nobody judged the first group
        ([NAN, 1, 0.5, 0.25], [0]),
    ],
)
def test_which_groups_are_idle(scores, idle):
    assert idle_groups(torch.tensor(scores, dtype=torch.float32), 2) == idle


def test_idle_groups_are_replaced_from_the_rest_of_the_data(tmp_path):
    made = trainer(tmp_path, dynamic_sampling_rounds=5)
    state, collector = made.state, made.collector
    made.begin(None)
    for cycle in range(3):
        state.cycle = cycle
        first = collector.prompts(cycle)
        batch = collector.collect(state)
        shown = [sample["prompt"] for sample in collector.samples]
        numbers = made.metrics.take()
        solvable = sum(ROWS[n]["prompt"].startswith("12+") for n in first)
        assert all(prompt.startswith("12+") for prompt in shown)  # 4 of 12 rows, and 4 are drawn
        assert numbers["dynamic_sampling/idle_before"] == 1 - solvable / 4
        assert numbers["dynamic_sampling/idle_after"] == 0 and numbers["dynamic_sampling/kept"] == 4
        assert len(set(shown)) == 4 and (batch.advantages != 0).all()
        asked = 4 * numbers["dynamic_sampling/drawn"]
        assert asked >= 16 + 4 * (4 - solvable) and numbers["dynamic_sampling/rounds"] >= 1


def test_rounds_are_bounded_and_the_rest_stays(tmp_path):
    def never(completions, **columns):
        return [0.0] * len(completions)

    made = small_trainer(tmp_path, [never, length], dynamic_sampling="never")
    for rounds, drawn in ((1, 8), (2, 12), (3, 12)):  # of 12 rows 4 are drawn at a time
        made.config.dynamic_sampling_rounds = rounds
        made.begin(None)
        made.collector.collect(made.state)
        numbers = made.metrics.take()
        assert numbers["dynamic_sampling/drawn"] == drawn
        assert numbers["dynamic_sampling/rounds"] == min(rounds, 2)
        assert numbers["dynamic_sampling/idle_after"] == 1 and numbers["frac_reward_zero_std"] < 1
        names = {sample["prompt"] for sample in made.collector.samples}
        assert names == {ROWS[n]["prompt"] for n in made.collector.prompts(0)}


def test_the_sum_of_rewards_hides_what_the_outcome_shows(tmp_path):
    made = trainer(tmp_path, dynamic_sampling=None)
    made.begin(None)
    made.collector.collect(made.state)
    scores = torch.tensor([sample["rewards"]["right"] for sample in made.collector.samples])
    assert idle_groups(scores, 4) and made.metrics.take()["frac_reward_zero_std"] == 0


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path):
    settings = dict(save_strategy="steps", save_steps=1, max_steps=3, num_iterations=2)
    settings |= dict(curriculum="right", dynamic_sampling_rounds=2)
    whole = trainer(tmp_path / "a", **settings)
    whole.train()
    for step in (1, 2):  # inside a cycle, and between two
        rest = trainer(tmp_path / "a", **settings)
        rest.train(resume_from_checkpoint=tmp_path / f"a/checkpoint-{step}")
        assert rest.collector.curriculum.rates == whole.collector.curriculum.rates != {}
        for name, weight in weights_of(whole.model).items():
            assert torch.equal(weight, weights_of(rest.model)[name])
        assert without_clocks(rest.log_history) == without_clocks(whole.log_history)


def test_what_is_half_known_comes_first():
    made = Curriculum(seed=3)
    made.record([(0, 0.0, 4), (1, 4.0, 4), (2, 1.0, 2), (2, 1.0, 2)])  # row 2 in two parts
    assert made.rates == {0: 0.0, 1: 1.0, 2: 0.5}
    orders = [made.order(3, cycle) for cycle in range(400)]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    firsts = [sum(order[0] == row for order in orders) / 400 for row in range(3)]
    assert firsts == pytest.approx([0.02 / 0.31, 0.02 / 0.31, 0.27 / 0.31], abs=0.05)
    again = Curriculum(seed=3)
    again.load_state_dict(made.state_dict())
    assert [again.order(3, cycle) for cycle in range(400)] == orders
    assert [Curriculum(seed=4).order(9, 0)] != [Curriculum(seed=3).order(9, 0)]


def test_processes_deal_the_rows_out():
    shares = [spare_rows(list(range(10)), [0, 9], process, 3) for process in range(3)]
    assert sorted(row for share in shares for row in share) == list(range(1, 9))


def test_what_cannot_be_chosen_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="dynamic_sampling is 'rihgt', and .* 'right', 'length'"):
        trainer(tmp_path, dynamic_sampling="rihgt")
    with pytest.raises(ValueError, match="curriculum is 'sum', and"):
        trainer(tmp_path, curriculum="sum")
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ValueError, match="train_dataset is a stream"):
        trainer(tmp_path, rows=stream).train()
    config = trainer(tmp_path).config
    halves = BatchLayout(2, 4, gradient_accumulation_steps=3, num_processes=2)
    with pytest.raises(ValueError, match="draws 6 completions, which cut groups of 4"):
        RolloutCollector(config, halves, None, None, ["right"], SimpleNamespace())


@pytest.mark.full
def test_two_processes_refill_their_own_groups(tmp_path):
    child = Path(__file__).parents[1] / "prompt_choice_child.py"
    begun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*begun, str(child), str(tmp_path)], env=environment, check=True, timeout=500)
    one, two = (json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert one["rates"] == two["rates"] and {rate for _, rate in one["rates"]} == {0.0, 0.5}
    assert one["idle"] == [0, 0, 0] and any(one["rounds"])
    prompts = one["prompts"] + two["prompts"]
    assert len(set(prompts)) == 4 and all(prompts.count(p) == 4 for p in prompts)
