"The guard: a sampler that serves another policy stops the run, a healthy one does not."

import statistics
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dense_models import CHANGING, dense_model
from peft import LoraConfig
from small_runs import one_thread, small_model, small_trainer, weights_of, without_clocks

from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import concatenate
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training.guard import (
    Comparison,
    Guard,
    SamplerMismatch,
    cause_of,
    slope_is_wrong,
)

__all__ = ["one_thread"]
LORA = dict(
    r=4,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)


class Planted:
    "The engine, with something wrong."

    takes_token_ids = True

    def __init__(self, trainer):
        self.trainer, self.engine, self.model = trainer, trainer.engine, trainer.model
        self.kept = []  # the adapter of every version

    def publish(self, model, version):
        self.kept.append(weights_of(model))
        self.engine.publish(model, version)

    @contextmanager
    def serving(self, change):
        "The adapter with `change(name, tensor)` in its place."
        now = weights_of(self.model)
        parameters = {n: p for n, p in self.model.named_parameters() if n in now}
        for name, p in parameters.items():
            p.data = change(name, now[name])
        yield
        for name, p in parameters.items():
            p.data = now[name]

    def generate(self, prompts, params):
        return self.engine.generate(prompts, params)

    def close(self):
        pass


class Raw(Planted):
    "Log-probs of the plain softmax, whatever the temperature."

    def generate(self, prompts, params):
        rollout = self.engine.generate(prompts, params)
        for row, (prompt, n) in enumerate(zip(rollout.prompt_ids, rollout.lengths.tolist())):
            ids = rollout.completion_ids[row, :n]
            with torch.no_grad():
                logits = self.model(input_ids=torch.cat([torch.tensor(prompt), ids])[None]).logits
            logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            rollout.logps[row, :n] = logps.gather(1, ids[:, None])[:, 0]
        return rollout


class ThreeVersionsAgo(Planted):
    def generate(self, prompts, params):
        old = self.kept[-4 if len(self.kept) > 4 else -1]
        with self.serving(lambda name, now: old[name]):
            return self.engine.generate(prompts, params)


class NoAdapter(Planted):
    def generate(self, prompts, params):
        with self.serving(lambda name, now: torch.zeros_like(now)):
            return self.engine.generate(prompts, params)


class NoExperts(Planted):
    def generate(self, prompts, params):
        with self.serving(lambda name, now: now * ("experts" not in name)):
            return self.engine.generate(prompts, params)


class ExpertsMixed(Planted):
    "The experts' adapters in another layout: rows of one factor belong to other columns."

    def generate(self, prompts, params):
        with self.serving(lambda name, now: now.flip(0) if "experts" in name else now):
            return self.engine.generate(prompts, params)


class OtherBase(Planted):
    def generate(self, prompts, params):
        return RolloutEngine(small_model(1)[0], self.engine.tokenizer).generate(prompts, params)


class OneOfThree(Planted):
    "A third of the prompts go to a server that has another model."

    def generate(self, prompts, params):
        third = len(prompts) // 3
        other = RolloutEngine(small_model(1)[0], self.engine.tokenizer)
        parts = (
            self.engine.generate(prompts[third:], params),
            other.generate(prompts[:third], params),
        )
        return concatenate([*parts])


class Scrambled(Planted):
    def generate(self, prompts, params):
        rollout = self.engine.generate(prompts, params)
        whole = rollout.mask.all(1)
        rollout.logps[whole] = rollout.logps[whole].flip(1)
        return rollout


class Placeholders(Planted):
    def generate(self, prompts, params):
        rollout = self.engine.generate(prompts, params)
        return replace(rollout, logps=-1.0 * rollout.mask)


def trainer_with(folder, sampler=Planted, seed=0, **settings):
    "A run of updates large enough for its adapter to be seen, checked at each."
    config = dict(max_steps=6, guard_every=1, learning_rate=3e-2, seed=seed) | settings
    made = small_trainer(folder, arguments=dict(peft_config=LoraConfig(**LORA)), **config)
    made.source.use(sampler=sampler(made))
    return made


class WithoutTheCut(Planted):
    "Log-probs over the whole vocabulary, although top_k left few tokens to draw from."

    def generate(self, prompts, params):
        rollout = Raw.generate(self, prompts, params)
        assert rollout.survivors is not None
        return rollout


class CutElsewhere(Planted):
    "A top_k that the config does not name."

    def generate(self, prompts, params):
        rollout = self.engine.generate(prompts, replace(params, top_k=3))
        return replace(rollout, survivors=None, log_mass=None)


class ScaledOtherwise(Planted):
    def generate(self, prompts, params):
        with self.serving(lambda name, now: now * (1.5 if "lora_B" in name else 1)):
            return self.engine.generate(prompts, params)


class BehindOnPurpose(Planted):
    "Two versions behind, and says so."

    def generate(self, prompts, params):
        version = max(len(self.kept) - 3, 0)
        with self.serving(lambda name, now: self.kept[version][name]):
            rollout = self.engine.generate(prompts, params)
        return replace(rollout, versions=torch.full_like(rollout.versions, version))


PLANTED = {
    WithoutTheCut: ("before its truncation", dict(top_k=4)),
    CutElsewhere: ("does not name", {}),
    ScaledOtherwise: ("scaled otherwise", {}),
    Raw: ("before its temperature", dict(temperature=2.0)),
    ThreeVersionsAgo: ("older version", {}),
    NoAdapter: ("serves the base", {}),
    NoExperts: ("that of the experts is not", {}),
    ExpertsMixed: ("that of the experts is not", dict(seed=1)),  # 24 tokens: 4 seeds of 6 tell
    OtherBase: ("An older adapter does not explain it", {}),
    OneOfThree: ("one of several servers", {}),
    Scrambled: ("stand at other tokens", {}),
    Placeholders: ("are all the same", {}),
}


@pytest.mark.parametrize("sampler", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_cause_is_named(tmp_path, sampler):
    said, settings = PLANTED[sampler]
    trainer = trainer_with(tmp_path, sampler, **settings)
    with pytest.raises(SamplerMismatch, match=said) as stopped:
        trainer.train()
    assert f"before update {trainer.state.global_step + 1}:" in str(stopped.value)


def test_whatever_gap_is_allowed_the_slope_is_judged(tmp_path):
    trainer = trainer_with(tmp_path, NoAdapter, guard_max_gap=1e9)
    with pytest.raises(SamplerMismatch, match="serves the base"):
        trainer.train()


@pytest.mark.parametrize(
    "share, said", [(0.5, "older version"), (0.0, "serves the base"), (1.6, "scaled otherwise")]
)
def test_among_many_tokens_an_adapter_is_not_taken_for_another_order(share, said):
    "Sorted, thousands of log-probs are alike whichever adapter they come from."
    g = torch.Generator().manual_seed(0)
    base, effect = -1 - 4 * torch.rand(4000, generator=g), 0.2 * torch.randn(4000, generator=g)
    noise = 0.01 * torch.randn(4000, generator=g)
    found = Comparison(base + share * effect + noise, base + effect, base)
    assert said in cause_of(found, 0.1, lambda name: None)


def simulated(effect, share, generator, rounding=0.02):
    "Eight completions of 250 tokens; tokens differ in how far any change moves them."
    t4 = torch.distributions.Chi2(torch.tensor(4.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        far = (1.2 * torch.randn(2000)).exp()
        drawn = torch.randn(4, 2000) / (t4.sample((4, 2000)) / 2).sqrt()
    added, *rounded = (far / far.square().mean().sqrt() * drawn).double()
    sampler, trainer, base = (rounding * one for one in rounded)
    completion = torch.arange(8).repeat_interleave(250)
    return Comparison(share * effect * added + sampler, effect * added + trainer, base, completion)


@pytest.mark.parametrize("effect", [0.01, 0.02, 0.03, 0.06, 0.2])
def test_rounding_alone_stops_nothing(effect):
    generator = torch.Generator().manual_seed(0)
    found = [simulated(effect, 1.0, generator) for _ in range(60)]
    assert sum(slope_is_wrong(one, 0.1, 0.25) for one in found) <= 2


@pytest.mark.parametrize("share, least", [(0.0, 50), (0.5, 50), (0.6, 40)])
def test_a_share_of_an_adapter_is_found_where_it_is_three_times_the_rounding(share, least):
    generator = torch.Generator().manual_seed(0)
    found = [simulated(0.06, share, generator) for _ in range(60)]
    assert sum(slope_is_wrong(one, 0.1, 0.25) for one in found) >= least


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bf16", [False, True])
def test_a_healthy_run_is_left_alone(tmp_path, seed, bf16):
    trainer = trainer_with(tmp_path, seed=seed, bf16=bf16)
    trainer.train()
    records = trainer.log_history
    assert records[0]["guard/effect"] == 0 and "guard/slope" not in records[0]
    assert all(0 <= r["guard/gap_mean"] <= r["guard/gap_max"] for r in records)
    assert records[0]["guard/gap_bound"] == (0.1 if bf16 else 0.001)
    slopes = [r["guard/slope"] for r in records if "guard/slope" in r]
    assert abs(statistics.median(slopes) - 1) < (0.05 if bf16 else 1e-4)


def test_nothing_is_drawn_and_a_resumed_run_logs_the_same(tmp_path):
    saving = dict(save_strategy="steps", save_steps=1, save_only_model=False, guard_every=3)
    whole = trainer_with(tmp_path / "whole", max_steps=4, **saving)
    whole.train()
    again = trainer_with(tmp_path / "whole", max_steps=4, **saving)
    checked, check = [], again.guard.judge
    again.guard.judge = lambda *found: checked.append(found[-1]) or check(*found)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert checked == [2, 3]  # the first batch after a start, and the third one
    assert without_clocks(again.log_history) == without_clocks(whole.log_history)
    assert [r["step"] for r in whole.log_history if "guard/gap_mean" in r] == [1, 4]
    without = trainer_with(tmp_path / "without", max_steps=4, guard_every=0)
    without.train()
    for name, weight in weights_of(whole.model).items():
        assert torch.equal(weight, weights_of(again.model)[name])
        assert torch.equal(weight, weights_of(without.model)[name])
    assert not any("guard/gap_mean" in record for record in without.log_history)


def test_rollouts_that_are_behind_on_purpose(tmp_path):
    trainer = trainer_with(tmp_path, BehindOnPurpose, learning_rate=3e-3)
    trainer.train()
    later = trainer.log_history[2:]
    assert all(0.001 < r["guard/gap_mean"] < 0.3 == r["guard/gap_bound"] for r in later)
    assert not any("guard/slope" in record for record in later)


class ServesTheBase(StandIn):
    "Whatever adapter it is asked for."

    def adapter_of(self, asked):
        return None


def served(folder, kind=StandIn, seed=0, **settings):
    "A run on a server, to its end."
    with serving(kind(*small_model(seed), lora_dir=folder, max_loras=4)) as url:
        server = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
        config = dict(max_steps=6, guard_every=1, learning_rate=1e-2) | server | settings
        made = small_trainer(folder, arguments=dict(peft_config=LoraConfig(**LORA)), **config)
        made.train()
        return made.log_history


def test_the_slope_of_the_version_that_drew(tmp_path):
    "Rollouts in flight are one version behind, and judged under it."
    records = served(tmp_path / "right", max_staleness=1)
    assert all(r["guard/gap_bound"] == 0.001 and r["guard/gap_mean"] < 1e-4 for r in records)
    assert abs(records[-1]["guard/slope"] - 1) < 1e-3
    with pytest.raises(SamplerMismatch, match="serves the base"):
        served(tmp_path / "wrong", ServesTheBase, max_staleness=1, learning_rate=1e-4)


def test_ctrl_c_waits_until_the_adapter_is_put_back(tmp_path):
    trainer, reached = trainer_with(tmp_path), []
    now = weights_of(trainer.model)
    trainer.guard.past[0] = [torch.zeros_like(p) for p in trainer.guard.adapter()]
    with pytest.raises(KeyboardInterrupt), trainer.guard.as_it_was(0):
        assert not any(p.any() for p in trainer.guard.adapter())
        trainer.leaving.pressed()
        reached.append(True)
    assert reached and all(torch.equal(x, now[n]) for n, x in weights_of(trainer.model).items())
    with trainer.guard.as_it_was(None):  # nothing is put in: a hanging sampler can be left
        assert trainer.leaving.phase == "between"


def test_processes_compare_under_one_version():
    "One that all have completions of; else none is known."
    others = iter([[[1, 0]], [[0, 0]]])
    group = SimpleNamespace(num_processes=2, device="cpu")
    group.gather = lambda mine: torch.cat([mine, torch.tensor(next(others))])
    guard = SimpleNamespace(accelerator=group)
    batch = SimpleNamespace(versions=torch.tensor([4, 5, 5]))
    assert [Guard.agreed(guard, [4, 5], batch) for _ in range(2)] == [[4], [-1]]
    group.num_processes = 1
    assert Guard.agreed(guard, [4, 5], batch) == [4, 5]


def test_a_server_that_does_not_say_what_a_cut_has_left_is_asked_without_it(tmp_path):
    with pytest.warns(UserWarning, match="top_p, top_k or min_p leave tokens out"):
        records = served(tmp_path / "right", top_p=0.9)
    assert all(r["guard/gap_mean"] < 1e-4 for r in records)
    assert abs(records[-1]["guard/slope"] - 1) < 1e-3
    for settings in (dict(top_p=0.9), dict(repetition_penalty=1.2)):
        with pytest.raises(SamplerMismatch, match="before update 1.*another base model"):
            served(tmp_path / "other", seed=1, **settings)


def test_what_cannot_be_compared_is_told_once(tmp_path):
    def without(prompts, trainer):
        drawn = trainer.engine.generate([trainer.tokenizer(p).input_ids for p in prompts])
        ids = [row[m].tolist() for row, m in zip(drawn.completion_ids, drawn.mask)]
        return {"prompt_ids": drawn.prompt_ids, "completion_ids": ids, "logprobs": None}

    trainer = small_trainer(
        tmp_path, arguments=dict(rollout_func=without), max_steps=2, guard_every=1
    )
    with pytest.warns(UserWarning, match="the sampler gives no log-probs") as said:
        trainer.train()
    assert sum("guard" in str(one.message) for one in said) == 1


def scaled(name, tokenizer):
    "A model with angles that change beyond 24 tokens."
    return dense_model(name, vocab_size=len(tokenizer), **CHANGING[name])


class FarPositions(Planted):
    "A server that takes the angles of long sequences for all, as transformers computes them."

    def generate(self, prompts, params):
        rollout = self.engine.generate(prompts, params)
        for row, (prompt, n) in enumerate(zip(rollout.prompt_ids, rollout.lengths.tolist())):
            ids = rollout.completion_ids[row, :n]
            whole = torch.cat([torch.tensor(prompt), ids])[None]
            shifted = torch.arange(whole.shape[1])[None] + 96 - whole.shape[1]
            with torch.no_grad():
                logits = self.model(input_ids=whole, position_ids=shifted).logits
            logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            rollout.logps[row, :n] = logps.gather(1, ids[:, None])[:, 0]
        return rollout


LINEAR = LoraConfig(r=4, target_modules=["o_proj", "down_proj"])


@pytest.mark.parametrize("name", CHANGING)
def test_position_scaling_is_named_where_it_is_the_cause(name, tmp_path):
    model = scaled(name, small_model()[1])
    settings = dict(max_steps=2, guard_every=1, max_completion_length=8)
    made = small_trainer(tmp_path, model=model, arguments=dict(peft_config=LINEAR), **settings)
    made.train()
    assert made.state.log_history[0]["guard/gap_mean"] < 1e-4
    made = small_trainer(
        tmp_path / "far",
        model=scaled(name, small_model()[1]),
        arguments=dict(peft_config=LINEAR),
        **settings,
    )
    made.source.use(sampler=FarPositions(made))
    with pytest.raises(SamplerMismatch, match="with its positions scaled as for long sequences"):
        made.train()


@pytest.mark.parametrize("name", CHANGING)
def test_beyond_the_border_of_scaled_positions_no_run_begins(name, tmp_path):
    "Also without the guard."
    model = scaled(name, small_model()[1])
    made = small_trainer(tmp_path, model=model, guard_every=0, max_completion_length=24)
    with pytest.raises(ValueError, match="longest sequence is 24 .beyond it .*, its position"):
        made.train()
    assert not made.state.log_history
