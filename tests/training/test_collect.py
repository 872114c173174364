"Sample, score, compare, with a sampler that is scripted and rewards that are counted."

import pytest
import torch
from accelerate import Accelerator
from small_runs import plain_advantages

from grpo_nb import GRPOConfig
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout.rollout import Rollout
from grpo_nb.rollout.sampler import Sampler
from grpo_nb.training.collect import CompletionSource, RolloutCollector
from grpo_nb.training.reporting import Metrics
from grpo_nb.training.rewards import RewardError
from grpo_nb.training.state import TrainState

TOKENIZER = tiny_tokenizer()
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


class Scripted:
    "A sampler whose i-th completion of a call has i % 3 + 1 digits; the longest are cut."

    takes_token_ids = True

    def __init__(self):
        self.asked, self.published = [], []

    def generate(self, prompts, params):
        self.asked.append(prompts)
        lengths = torch.tensor([i % 3 + 1 for i in range(len(prompts))])
        mask = torch.arange(3) < lengths[:, None]
        ids = torch.tensor(TOKENIZER("123").input_ids).expand(len(prompts), 3) * mask
        reasons = ["length" if n == 3 else "stop" for n in lengths.tolist()]
        ids_of = prompts if self.takes_token_ids else [TOKENIZER(p).input_ids for p in prompts]
        return Rollout(ids_of, ids, mask, -torch.ones(mask.shape) * mask, reasons)

    def publish(self, model, version):
        self.published.append(version)

    def close(self):
        pass


class Text(Scripted):
    takes_token_ids = False


def length_reward(completions, log_metric, log_extra, **columns):
    log_metric("digits", sum(map(len, completions)))
    log_extra("digits", [len(c) for c in completions])
    return [float(len(c)) for c in completions]


def parts(sampler=None, **changes):
    settings = dict(
        num_generations=3, per_device_train_batch_size=6, max_completion_length=3, use_cpu=True
    )
    config = GRPOConfig(**{**settings, **changes})
    state = TrainState(layout=config.layout())
    state.begin(config, len(ROWS))
    sampler = sampler or Scripted()
    source = CompletionSource(
        config, sampler, config.sampling_params(), TOKENIZER, [length_reward], state, 64
    )
    collector = RolloutCollector(
        config, config.layout(), Accelerator(cpu=True), source, ["length"], Metrics()
    )
    collector.begin(ROWS)
    return sampler, source, collector, state


def test_the_script_is_a_sampler():
    assert isinstance(Scripted(), Sampler) and isinstance(Text(), Sampler)


def test_groups_are_compared_and_shuffled_together():
    sampler, _, collector, state = parts()
    batch = collector.collect(state)
    rewards = [float(n) for n in batch.completion_mask.sum(1)]
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask)]
    expected = plain_advantages([(tuple(p), None) for p in prompts], rewards)
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-5)
    asked = sorted(map(tuple, sampler.asked[0]))
    assert asked == sorted(map(tuple, prompts)) and len(set(asked)) == 2
    assert state.tokens == sum(map(len, asked)) + int(sum(rewards))


def test_the_weights_of_the_rewards_reach_the_advantages():
    plain, turned = (parts(reward_weights=[w])[2:] for w in (1.0, -1.0))
    plain, turned = (collector.collect(state).advantages for collector, state in (plain, turned))
    assert plain.abs().max() > 0.9
    torch.testing.assert_close(turned, -plain)


def test_completions_are_trained_on_in_the_order_of_torchs_permutation():
    for seed in (3, 4):
        _, _, collector, state = parts(seed=seed)
        lengths = collector.collect(state).completion_mask.sum(1)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        assert lengths.tolist() == torch.tensor([1, 2, 3, 1, 2, 3])[order].tolist()
    _, _, collector, state = parts(shuffle_dataset=False)
    assert collector.collect(state).completion_mask.sum(1).tolist() == [1, 2, 3, 1, 2, 3]


def test_only_cycles_without_any_score_end_a_run():
    _, source, collector, state = parts()
    source.use(reward_funcs=[lambda completions, **_: [1.0, *[None] * (len(completions) - 1)]])
    for _ in range(4):  # one that was judged is enough
        collector.collect(state)
    nothing = lambda completions, **_: [None] * len(completions)  # noqa: E731
    source.use(reward_funcs=[nothing])
    with pytest.warns(UserWarning, match="no reward function judged any completion"):
        collector.collect(state)
    collector.collect(state)
    with pytest.raises(RewardError, match="no reward function judged .* 3 generations in a row"):
        collector.collect(state)


def test_what_was_drawn_can_be_looked_at():
    _, _, collector, state = parts()
    collector.collect(state)
    assert [sample["step"] for sample in collector.samples] == [1] * 6
    assert [sample["rewards"]["length"] for sample in collector.samples] == [1.0, 2.0, 3.0] * 2
    assert [sample["extra"]["digits"] for sample in collector.samples] == [1, 2, 3, 1, 2, 3]
    numbers = collector.metrics.take()
    assert numbers["reward"] == 2.0 and numbers["digits"] == 12
    assert numbers["completions/clipped_ratio"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_completions_may_be_left_out_of_the_loss(masked):
    _, _, collector, state = parts(mask_truncated_completions=masked)
    batch = collector.collect(state)
    cut = batch.completion_mask.sum(1) == 3
    assert torch.equal(batch.loss_mask[~cut], batch.completion_mask[~cut])
    assert bool(batch.loss_mask[cut].any()) != masked


def test_each_row_is_drawn_once_an_epoch_and_the_order_follows_from_the_seed():
    cycles = [[parts(seed=seed)[2].draw_rows(c) for c in range(3)] for seed in (1, 1, 2)]
    assert cycles[0] == cycles[1] != cycles[2]
    for drawn in cycles:
        assert sorted(n for cycle in drawn for n in cycle[::3]) == list(range(6))
        assert all(cycle[i] == cycle[i - i % 3] for cycle in drawn for i in range(6))


def test_a_sampler_that_reads_text_gets_the_datas_own_prompts():
    sampler, _, collector, state = parts(Text())
    collector.collect(state)
    assert set(sampler.asked[0]) <= {row["prompt"] for row in ROWS}


def test_a_sampler_may_be_given_the_variables_of_each_row():
    class Writing(Text):
        takes_template_kwargs = True

        def generate(self, prompts, params, variables):
            self.variables = variables
            return super().generate(prompts, params)

    of_run = {"reasoning_effort": "high", "date": "1"}
    sampler, source, *_ = parts(Writing(), chat_template_kwargs=of_run)
    rows = [{**ROWS[0], "reasoning_effort": effort} for effort in ("low", None)]
    source.draw(rows)
    assert sampler.variables == [{"reasoning_effort": "low", "date": "1"}, of_run]
    assert not source.doubts(rows)
    source.use(sampler=Text())
    source.draw(rows)  # with two arguments, as the protocol has it
    (said,) = source.doubts({"a": rows})
    assert "reasoning_effort" in said and "argument chat_template_kwargs" in said
    assert not source.doubts(ROWS) and not source.doubts(None)


def test_publishing_is_the_samplers():
    sampler, source, _, _ = parts()
    source.publish(None, 7)
    assert sampler.published == [7]


def test_a_prompt_without_room_is_refused_by_its_row():
    rows = [*ROWS, {"prompt": "1+" * 40, "answer": ""}]
    _, source, collector, state = parts()
    with pytest.raises(ValueError, match="^data: .*row 6 has 80 tokens"):
        source.check_room({"a": ROWS, "b": rows}, "data: ")
    source.check_room(ROWS)
    source.check_room(None)
    parts(Text())[1].check_room(rows)  # who reads text checks it
    with pytest.raises(ValueError, match="80 tokens"):
        source.draw([rows[-1]], [6])
    assert not source.sampler.asked and state.tokens == 0


def scored(reward):
    "The metrics after one call of a reward function."
    _, source, collector, _ = parts()
    source.use(reward_funcs=[reward])
    rows = [ROWS[0]] * 3
    metrics = Metrics()
    source.score(rows, source.draw(rows), metrics)
    return metrics.take()


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("loss", 77, "log_metric\\('loss', ...\\): the trainer logs a number of that name itself"),
        ("rewards/length/mean", 1.0, "take another, for example 'my_reward/rewards/length/mean'"),
        ("completions/mean_length", 1.0, "itself"),
        (3, 1.0, "itself"),
        (
            "mine",
            "many",
            "log_metric\\('mine', 'many'\\): could not convert string to float: 'many'",
        ),
        ("mine", 10**400, "int too large to convert to float"),
        ("mine", [1.0], "a real number, not 'list' at step 0; the first completion .* is [^.]*$"),
        # no word of the arguments of a reward function
        ("mine", None, "log_metric\\('mine', None\\): .*not 'NoneType' at step 0; the [^.]*$"),
    ],
)
def test_a_reward_cannot_write_over_the_trainers_numbers(name, value, said):
    def reward(completions, log_metric, **columns):
        log_metric(name, value)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=said):
        scored(reward)


def test_a_reward_logs_its_own_numbers():
    def reward(completions, log_metric, **columns):
        for name in ("mine", "reward/mine", "train", "length/loss", "ratio_of_words"):
            log_metric(name, torch.tensor(2))
        return [1.0] * len(completions)

    assert set(scored(reward).values()) == {2.0}


@pytest.mark.parametrize("values", [[1, 2], [1] * 4, "abc", 5, {1: 1, 2: 2, 3: 3}, None])
def test_a_column_of_another_length_is_a_sentence(values):
    def reward(completions, log_extra, **columns):
        log_extra("seen", values)
        return [1.0] * len(completions)

    with pytest.raises(
        RewardError, match="log_extra\\('seen', ...\\) was given .* for 3 completions"
    ):
        scored(reward)


@pytest.mark.parametrize("name", ["completion", "advantage", "reward"])
def test_a_column_of_the_tables_own_is_refused_at_the_first_call(name):
    def reward(completions, log_extra, **columns):
        log_extra(name, [0] * len(completions))
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=f"log_extra\\('{name}', ...\\): .*take another"):
        scored(reward)
