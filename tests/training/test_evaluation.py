"An evaluation answers every row as often as asked, and leaves no trace."

import pytest
import torch
from accelerate import Accelerator
from test_collect import ROWS, parts

from grpo_nb.training.evaluation import Evaluator
from grpo_nb.training.reporting import Metrics


def evaluator(**changes):
    sampler, source, collector, state = parts(**changes)
    made = Evaluator(source.config, Accelerator(cpu=True), source, ["length"])
    return sampler, made, collector, state


@pytest.mark.parametrize("times, size", [(1, 2), (3, 4), (3, 100)])
def test_every_row_is_answered_as_often_as_asked(times, size):
    sampler, made, _, _ = evaluator(num_generations_eval=times, per_device_eval_batch_size=size)
    found = made.evaluate(ROWS[:4])
    asked = [ids for call in sampler.asked for ids in call]
    assert len(asked) == 4 * times and all(len(call) <= size for call in sampler.asked)
    assert all(asked[i] == asked[i - i % times] for i in range(len(asked)))
    lengths = [i % 3 + 1 for call in sampler.asked for i in range(len(call))]
    assert found["reward"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_the_run_does_not_move():
    _, made, collector, state = evaluator(num_generations_eval=2)
    collector.metrics.add({"reward": 0.25})
    torch.manual_seed(3)
    before, place = torch.get_rng_state(), state.state_dict()["cycle"]
    drawn = made.source.sampler.generate

    def draws(prompts, params):
        torch.rand(5)
        return drawn(prompts, params)

    made.source.sampler.generate = draws
    found = made.evaluate(ROWS[:2])
    assert torch.equal(torch.get_rng_state(), before) and state.cycle == place
    assert collector.metrics.take() == {"reward": 0.25} and found["digits"] > 0


def test_a_failure_leaves_no_trace_either():
    _, made, _, _ = evaluator()
    made.source.score = lambda rows, rollout, metrics: 1 / 0
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        made.evaluate(ROWS)
    assert torch.equal(torch.get_rng_state(), before)


def test_metrics_of_rewards_are_the_evaluations_own():
    _, made, _, _ = evaluator(num_generations_eval=1)
    metrics = Metrics()
    made.answers(ROWS[:3], metrics)
    assert metrics.take() == {"digits": 6.0}
