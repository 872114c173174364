"An evaluation answers every row as often as asked, and leaves no trace."

import math

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from small_runs import ROWS as SUMS
from small_runs import digits, small_model, small_trainer
from test_collect import ROWS, parts

from grpo_nb.training.collect import Evaluator
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


def test_the_loss_of_an_evaluation_is_that_of_its_completions(tmp_path):
    settings = dict(num_generations_eval=3, loss_type="dapo", scale_rewards="none")
    losses, drawn = {}, []
    for size in (12, 5):  # all at once; in batches that cut groups
        trainer = small_trainer(tmp_path, per_device_eval_batch_size=size, **settings)
        generate = trainer.engine.generate
        trainer.engine.generate = lambda *a, **k: drawn.append(generate(*a, **k)) or drawn[-1]
        torch.manual_seed(0)
        losses[size] = trainer.evaluate(SUMS[:4])["eval_loss"]
        assert all(p.grad is None for p in trainer.model.parameters())
        assert trainer.policy_update.window_is_empty
    parts = [(r.texts(trainer.tokenizer), r.lengths) for r in drawn]
    rewards = torch.tensor(digits([t for texts, _ in parts[:1] for t in texts])).view(4, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    lengths = parts[0][1].float()
    expected = -(advantages * lengths).sum() / lengths.sum()
    assert losses[12] == pytest.approx(expected.item(), abs=1e-5)
    assert abs(losses[12]) > 1e-3
    rewards = torch.tensor(digits([t for texts, _ in parts[1:] for t in texts])).view(4, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().split([5, 5, 2])
    each = [-(a * n).sum() / n.sum() * len(n) for a, (_, n) in zip(advantages, parts[1:])]
    assert losses[5] == pytest.approx(sum(each).item() / 12, abs=1e-5)


def test_an_evaluation_takes_no_seconds_of_an_update(tmp_path):
    trainer = small_trainer(tmp_path, beta=0.1, num_generations_eval=2)
    trainer.metrics.seconds = {"train": 1.5}
    assert math.isfinite(trainer.evaluate(SUMS[:2])["eval_loss"])
    assert trainer.metrics.seconds == {"train": 1.5}


def as_one(completions, **columns):
    "The same points for every answer: no advantage, and no loss but the reference's."
    return [1.0 for _ in completions]


def test_an_evaluation_logs_what_trl_logs(tmp_path):
    given = dict(beta=0.1, num_generations_eval=2, router_aux_loss_coef=0.5, loss_type="dapo")
    trainer = small_trainer(tmp_path, as_one, per_device_eval_batch_size=3, **given)
    with torch.no_grad():
        trainer.model.lm_head.weight.zero_()  # every token is as likely as any other
    trainer.state.tokens = 7
    found = trainer.evaluate(SUMS[:4])
    assert found["eval_entropy"] == pytest.approx(math.log(trainer.model.config.vocab_size))
    assert found["eval_frac_reward_zero_std"] == 1 and found["eval_num_tokens"] == 7
    assert found["eval_clip_ratio/region_mean"] == 0 and found["eval_kl"] > 1e-3
    kept = trainer.evaluate(SUMS[:1])  # one batch, whose means are over its tokens alone
    assert kept["eval_loss"] == pytest.approx(
        0.1 * kept["eval_kl"] + 0.5 * kept["eval_aux_loss"], rel=1e-4
    )
    assert "kl" not in trainer.metrics.take()
    assert {f"eval_{name}" for name in logged_by_trl(tmp_path, given)} <= found.keys()


def logged_by_trl(folder, given):
    "The names that TRL's trainer collects in an evaluation, of the same model and settings."
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = small_model()
    model.save_pretrained(folder / "model")
    batch = dict(per_device_train_batch_size=2, num_generations=2, per_device_eval_batch_size=2)
    args = GRPOConfig(
        str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", **batch, **given
    )
    rows = Dataset.from_list(SUMS[:1])
    theirs = GRPOTrainer(str(folder / "model"), as_one, args, rows, rows, tokenizer)
    return {name.removeprefix("eval_") for name in theirs.evaluate()} - {"epoch"}
