"Gradients of a window against one large batch, the factor of a short window, what a step refuses."

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from recorded_calls import RecordedCalls
from small_runs import small_model, weights_of
from torch.utils.checkpoint import CheckpointError
from transformers import GptOssConfig, Qwen2Config
from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func
from trl.trainer.callbacks import SyncRefModelCallback

from grpo_nb import GRPOConfig
from grpo_nb.algorithm.losses import LOSSES
from grpo_nb.kernels import training_kernels
from grpo_nb.kernels.compile_together import noted_launches
from grpo_nb.model import experts_grouped, limits
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.recorded_layers import record_layers
from grpo_nb.training import policy_update
from grpo_nb.training.optimizer import make_optimizer
from grpo_nb.training.policy_logprobs import TrainingBatch
from grpo_nb.training.policy_model import Precision, Reference, load_policy
from grpo_nb.training.policy_update import (
    EntropyBonus,
    PolicyUpdate,
    Window,
    balance_weight,
    load_balance_loss,
    may_be_cut,
    sum_over_all,
)
from grpo_nb.training.reporting import Metrics


def update_of(told=None, corrects=False, **changes):
    "An update of a small model, and its first batch: eight completions of unlike lengths."
    settings = dict(
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=6,
        gradient_checkpointing=False,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0,
    )
    config = GRPOConfig(**{**settings, **changes})
    model, _ = small_model()
    policy, accelerator = load_policy(model, config), Accelerator(cpu=True)
    made = PolicyUpdate(
        config,
        config.layout(),
        accelerator,
        policy,
        make_optimizer(config, dict(policy.named_parameters())),
        Precision(config, accelerator.device),
        Metrics(),
        reference=Reference(policy) if config.beta else None,
        corrects=corrects,
        tell=(lambda event: None) if told is None else told.append,
    )
    made.begin(total_steps=10)
    return made, batch_for(made)


def batch_for(update, count=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=g)
    lengths[0] = 6
    mask = torch.arange(6) < lengths[:, None]
    ids = torch.randint(7, 17, (count, 6), generator=g) * mask
    prompt = torch.randint(7, 17, (count, 3), generator=g)
    advantages = torch.randn(count, generator=g)
    batch = TrainingBatch(
        prompt, torch.ones_like(prompt, dtype=torch.bool), ids, mask, mask.clone(), advantages
    )
    batch.rollout_logps = torch.zeros(mask.shape)
    with torch.no_grad():
        batch.rollout_logps = update.completion_logps(update.model, batch)[0].detach()
    return batch


def gradients(update):
    return {n: p.grad.clone() for n, p in update.model.named_parameters() if p.grad is not None}


def close(a, b, tolerance=1e-6):
    return a.keys() == b.keys() and all((a[n] - b[n]).abs().max() < tolerance for n in a)


@pytest.mark.parametrize("loss_type", list(LOSSES))
def test_completions_without_an_advantage_need_no_backward_pass(loss_type, monkeypatch):
    "The gradient and the metrics are those of a pass that computes every completion's."
    extra = {"epsilon_high": 5.0} if LOSSES[loss_type].caps else {}
    found = []
    for everything in (True, False):
        update, batch = update_of(loss_type=loss_type, **extra)
        batch.advantages[[1, 4, 5]] = 0.0
        batch.loss_mask[2] = False  # its completion was cut
        if everything:
            monkeypatch.setattr(policy_update, "moving_rows", lambda b: torch.ones(len(b)) > 0)
        else:
            monkeypatch.undo()
        update.accumulate(batch, batch)
        found.append((gradients(update), update.metrics.take(), update.window.sums))
    assert close(found[0][0], found[1][0]) and any(g.any() for g in found[1][0].values())
    for name, value in found[0][1].items():
        if not name.startswith(("seconds", "ratio/max")):
            assert found[1][1][name] == pytest.approx(value, abs=1e-5), name
    for name, value in found[0][2].items():
        assert float(found[1][2][name]) == pytest.approx(float(value), abs=1e-5), name


@pytest.mark.parametrize("change", [{}, {"beta": 0.1}, {"entropy_coef": 0.01}])
def test_every_completion_has_a_gradient_with_a_kl_term_or_an_entropy_bonus(change):
    update, batch = update_of(**change)
    batch.advantages[:4] = 0.0
    sizes = [(len(part), moves) for part, moves in update.parts(batch)]
    assert sizes == ([(8, True)] if change else [(4, True), (4, False)])
    batch.advantages[:] = 0.0  # the optimizer's moments move the weights on
    assert [moves for _, moves in update.parts(batch)] == [True]
    batch.advantages = torch.zeros(8, 6)
    batch.advantages[3, 0] = 1.0
    assert [len(part) for part, _ in update.parts(batch)] == ([8] if change else [1, 7])


def test_the_reference_follows_at_every_second_update_as_trls_does():
    moving = dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    update, batch = update_of(beta=0.1, **moving)
    theirs = copy.deepcopy(update.reference.model)
    for number in range(1, 5):
        update.accumulate(update.prepare(batch), batch)
        update.step(number)
        if number % 2 == 0:
            SyncRefModelCallback._sync_target_model(update.model, theirs, 0.25)
        for kept, expected in zip(update.reference.model.parameters(), theirs.parameters()):
            torch.testing.assert_close(kept, expected)
    began = [p.detach() for p in small_model()[0].parameters()]
    moved = [(p.detach() - start).abs().max() for p, start in zip(theirs.parameters(), began)]
    assert max(moved) > 1e-4


@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_entropy_bonus_is_the_mean_of_those_of_the_micro_batches(accumulated):
    "A completion's advantage is 0, so that nothing else moves the weights."
    update, batch = update_of(
        entropy_coef=0.05,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=2,
    )
    batch.advantages[:] = 0.0
    batch.completion_mask = batch.loss_mask = torch.ones(8, 6, dtype=torch.bool)
    batch = update.prepare(batch)
    used = [batch.rows(slice(4 * i, 4 * i + 4)) for i in range(accumulated)]
    entropies = [update.completion_logps(update.model, one, entropy=True)[1] for one in used]
    bonus = 0.05 * torch.stack([each.mean() for each in entropies]).mean()
    expected = torch.autograd.grad(bonus, update.parameters, materialize_grads=True)
    before = [p.detach().clone() for p in update.parameters]
    for one in used:
        update.accumulate(one, batch)
    update.step(1)
    for p, start, gradient in zip(update.parameters, before, expected):
        torch.testing.assert_close((p.detach() - start) / 0.1, gradient, rtol=1e-3, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-4


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_four_micro_batches_make_the_gradient_of_one(loss_type):
    found = []
    for pieces in (1, 4):
        extra = {"epsilon_high": 5.0} if LOSSES[loss_type].caps else {}
        update, batch = update_of(
            loss_type=loss_type,
            per_device_train_batch_size=8 // pieces,
            gradient_accumulation_steps=pieces,
            **extra,
        )
        for i in range(pieces):
            part = batch.rows(slice(8 // pieces * i, 8 // pieces * (i + 1)))
            update.accumulate(part, batch)
        update.clip(
            update.window.factor(update.config.loss_type, update.layout.gradient_accumulation_steps)
        )
        found.append(gradients(update))
    assert close(*found)


def test_a_short_window_is_divided_by_what_it_held():
    "Two of four announced micro-batches: as if only two had been announced."
    found = []
    for announced in (2, 4):
        update, batch = update_of(
            loss_type="grpo",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=announced,
            steps_per_generation=2,
        )
        for i in (0, 4):
            update.accumulate(batch.rows(slice(i, i + 4)), batch)
        update.clip(
            update.window.factor(update.config.loss_type, update.layout.gradient_accumulation_steps)
        )
        found.append(gradients(update))
    assert close(*found)


def test_the_window_is_empty_after_a_step_and_weights_moved():
    told = []
    update, batch = update_of(told)
    before, rate = weights_of(update.model), update.learning_rate
    update.accumulate(batch, batch)
    assert not update.window_is_empty
    update.step(1)
    assert update.window_is_empty and told == ["on_pre_optimizer_step", "on_optimizer_step"]
    assert not close(weights_of(update.model), before, 1e-9) and update.learning_rate == rate
    assert not gradients(update)
    update.accumulate(batch, batch)
    update.step(2)
    assert update.learning_rate == pytest.approx(0.9 * rate)  # the schedule's second value


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(bad):
    told = []
    update, batch = update_of(told)
    update.accumulate(batch, batch)
    update.parameters[0].grad.view(-1)[0] = bad
    before = weights_of(update.model)
    update.step(1)
    assert close(weights_of(update.model), before, 1e-30) and told == []
    assert update.metrics.take()["skipped_updates"] == 1.0


def test_other_policies_are_asked_where_the_loss_needs_them():
    update, batch = update_of()
    assert update.prepare(batch).old_logps is None and batch.ref_logps is None
    update, batch = update_of(num_iterations=2, beta=0.1)
    with torch.no_grad():
        for p in update.parameters:
            p.mul_(1.01)
    update.prepare(batch)
    now = update.completion_logps(update.model, batch)[0].detach()
    assert torch.allclose(batch.old_logps, now, atol=1e-6)
    assert (batch.ref_logps - batch.rollout_logps).abs().max() < 1e-5  # the reference stayed
    assert (batch.old_logps - batch.ref_logps).abs().max() > 1e-4


def test_completions_from_elsewhere_are_weighed():
    update, batch = update_of(corrects=True)
    shifted = replace(batch, rollout_logps=batch.rollout_logps - 0.5 * batch.completion_mask)
    weights = update.prepare(shifted).rollout_weights
    inside = batch.completion_mask
    assert torch.allclose(weights[inside], torch.tensor(math.exp(0.5)), atol=1e-4)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_the_weights_of_the_correction_stand_under_trls_names(mode):
    update, batch = update_of(
        corrects=True, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=9.0
    )
    gap = torch.rand(batch.rollout_logps.shape, generator=torch.Generator().manual_seed(0))
    drawn, gap = batch.completion_mask, gap * batch.completion_mask
    batch.rollout_logps = batch.rollout_logps - gap
    update.accumulate(update.prepare(batch), batch)
    wanted = gap[drawn].exp() if mode == "token_truncate" else gap.sum(1).exp().clamp(max=9.0)
    found = update.metrics.take()
    for name in ("min", "mean", "max"):
        value = found[f"sampling/importance_sampling_ratio/{name}"]
        assert value == pytest.approx(getattr(wanted, name)().item(), rel=1e-4)
    for name in ("mean", "max"):
        value = found[f"sampling/sampling_logp_difference/{name}"]
        assert value == pytest.approx(getattr(gap[drawn], name)().item(), rel=1e-4)
    plain, batch = update_of()
    plain.accumulate(batch, batch)
    assert not [name for name in plain.metrics.take() if "importance" in name]


# experts


def test_the_balancing_loss_is_transformers_own():
    g = torch.Generator().manual_seed(0)
    routers = [torch.randn(10, 4, generator=g) for _ in range(3)]
    mask = torch.arange(5) >= torch.tensor([[2], [0]])
    theirs = load_balancing_loss_func(tuple(routers), 4, 2, mask)
    assert load_balance_loss(routers, 2, mask).item() == pytest.approx(theirs.item(), rel=1e-6)
    one_expert = torch.tensor([[9.0, 0, 0, 0]]).expand(10, 4)
    assert load_balance_loss([one_expert], 1, mask) == pytest.approx(4.0, rel=1e-2)


@pytest.mark.parametrize("attention", ["eager", "sink"])
def test_experts_are_balanced_where_it_is_asked(attention):
    found = []
    for weight in (0.0, 0.25):
        update, batch = update_of(router_aux_loss_coef=weight)
        update.model.set_attn_implementation(attention)
        update.accumulate(batch, batch)
        found.append((gradients(update), update.metrics.take(), update.loss_without_update(batch)))
    (without, plain, plain_loss), (balanced, numbers, loss) = found
    model = update.model
    model.zero_grad()
    asked = dict(
        input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], 1),
        attention_mask=torch.cat([batch.prompt_mask, batch.completion_mask], 1).long(),
    )
    theirs = model(**asked, output_router_logits=True).aux_loss
    theirs.backward()
    added = {n: without[n] + 0.25 * gradients(update).get(n, torch.tensor(0.0)) for n in without}
    assert close(balanced, added) and not close(balanced, without, 1e-4)
    assert "aux_loss" not in plain and numbers["aux_loss"] == pytest.approx(theirs.item(), rel=1e-5)
    assert loss - plain_loss == pytest.approx(0.25 * theirs.item(), rel=1e-4)


def test_the_weight_of_the_balancing_loss():
    gpt_oss, dense = GptOssConfig(router_aux_loss_coef=0.9), Qwen2Config()
    assert balance_weight(GRPOConfig(), gpt_oss) == 0.0
    assert balance_weight(GRPOConfig(router_aux_loss_coef=None), gpt_oss) == 0.9
    assert balance_weight(GRPOConfig(router_aux_loss_coef=0.1), gpt_oss) == 0.1
    assert balance_weight(GRPOConfig(router_aux_loss_coef=None), dense) == 0.0
    with pytest.raises(ValueError, match="no router whose logits it returns"):
        balance_weight(GRPOConfig(router_aux_loss_coef=0.1), dense)


def test_a_state_goes_there_and_back():
    first, batch = update_of(optim="adamw_torch", use_adaptive_entropy=True, entropy_coef=0.1)
    for number in (1, 2):
        first.accumulate(batch, batch)
        first.step(number)
    saved = copy.deepcopy(first.state_dict())  # as a file would be
    second, _ = update_of(optim="adamw_torch", use_adaptive_entropy=True, entropy_coef=0.1)
    second.model.load_state_dict(first.model.state_dict())
    second.check_state_dict(saved, "'there'")
    second.load_state_dict(saved)
    for update in (first, second):
        update.accumulate(batch, batch)
        update.step(3)
    assert close(weights_of(first.model), weights_of(second.model), 1e-30)
    assert first.entropy_bonus.state_dict() == second.entropy_bonus.state_dict()


def test_what_does_not_fit_is_refused_and_changes_nothing():
    first, batch = update_of(optim="adamw_torch", beta=0.1)
    first.prepare(batch)
    first.accumulate(batch, batch)
    first.step(1)
    other, _ = update_of(optim="adamw_torch", beta=0.1, weight_decay=0.1)
    before = other.optimizer.state_dict()
    with pytest.raises(ValueError, match="optimizer's state in 'there' does not fit this run"):
        other.check_state_dict(first.state_dict(), "'there'")
    assert other.optimizer.state_dict() == before
    with torch.no_grad():
        for p in first.reference.model.parameters():
            p.mul_(1.5)
    same, _ = update_of(optim="adamw_torch", beta=0.1)
    with pytest.raises(ValueError, match="began with another one"):
        same.check_state_dict(first.state_dict(), "'there'")


def test_a_new_run_keeps_the_moments_and_has_a_fresh_schedule():
    update, batch = update_of(optim="adamw_torch")
    for number in range(1, 6):
        update.accumulate(batch, batch)
        update.step(number)
    moments = [s["exp_avg"].clone() for s in update.optimizer.state.values()]
    update.accumulate(batch, batch)  # a window that an error left open
    update.end()
    update.begin(total_steps=10)
    assert update.window_is_empty and update.learning_rate == 0.1 and not gradients(update)
    kept = [s["exp_avg"] for s in update.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


def test_windows_add_up_and_count():
    window = Window("cpu")
    window.expect(10.0)
    for tokens in (4, 8):
        window.add(loss=torch.tensor(0.5), tokens=torch.tensor(tokens))
        window.add(entropy=torch.tensor(3.0), entropy_tokens=torch.tensor(2))
        window.close_micro_batch()
    assert window.factor("dapo", 1) == pytest.approx(10 / 12)
    assert window.factor("grpo", 4) == 2.0
    assert window.mean_entropy() == 1.5


@pytest.mark.parametrize(
    "settings, cut",
    [
        ({}, True),
        ({"top_entropy_quantile": 0.5}, False),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, True),
        ({"entropy_coef": 0.1}, True),
        ({"loss_type": "grpo"}, True),
    ],
)
def test_what_may_be_cut(settings, cut):
    assert may_be_cut(GRPOConfig(**settings)) is cut
    assert may_be_cut(GRPOConfig(**settings), balance=0.1) is False


def test_the_entropy_bonus_stays_inside_its_borders():
    settings = dict(entropy_coef_delta=0.4, entropy_coef_max=1.0, entropy_target=0.2)
    bonus = EntropyBonus(GRPOConfig(use_adaptive_entropy=True, entropy_coef=0.5, **settings))
    weights = []
    for entropy in (0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9):
        bonus.see(entropy)
        weights.append((round(bonus.coef, 6), bonus.weight() > 0))
    assert weights == [
        (0.9, True),
        (1.0, True),
        (1.0, True),
        (0.6, False),
        (0.2, False),
        (0.0, False),
        (0.0, False),
    ]


@pytest.mark.parametrize(
    "changes, large, recorded",
    [
        ({}, True, True),
        ({}, False, False),  # a small GPU is busy with short steps, too
        (dict(gradient_checkpointing=False), True, False),
        (dict(use_vllm=True), True, True),
        (dict(use_vllm=True, vllm_enable_sleep_mode=True), True, False),  # it wants the memory back
    ],
)
def test_where_layers_are_recorded(monkeypatch, changes, large, recorded):
    update, _ = update_of(gradient_checkpointing=True)
    monkeypatch.setattr(policy_update, "is_large", lambda device: large)
    for name, value in changes.items():
        monkeypatch.setattr(update.config, name, value)
    assert update.may_record() is recorded
    monkeypatch.setattr(limits, "RECORDED_TOKENS", 0)
    assert not update.may_record()


def test_compiling_first_leaves_nothing_behind(monkeypatch):
    "Two completions go forward and backward once; weights, gradients, modes, draws are as before."
    update, _ = update_of(gradient_checkpointing=True)
    batch, passes, tokens = batch_for(update), [], []

    def work_of(work):
        before = torch.get_rng_state()
        torch.rand(3)  # as dropout draws
        work()
        passes.append(before)

    monkeypatch.setattr(policy_update, "compile_together", work_of)
    update.compile_first(batch)
    assert not update.compiles and not passes  # on a CPU there is nothing to compile
    seen = []
    update.completion_logps = watched(update.completion_logps, seen)
    update.model.register_forward_pre_hook(
        lambda *_: tokens.append(experts_grouped._rehearsal.tokens)
    )
    update.model.eval()
    modes = [m.training for m in update.model.modules()]
    weights, state = weights_of(update.model), torch.get_rng_state()
    update.compiles = True
    with torch.no_grad():  # as inside the guard
        update.compile_first(batch)
        update.compile_first(batch)
    assert (
        len(passes) == 1
        and seen == [(2, True)]
        and tokens == [int(batch.prompt_mask.sum() + batch.completion_mask.sum())]
    )
    assert experts_grouped._rehearsal.tokens is None
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in update.model.modules()] == modes
    assert all(p.grad is None for p in update.model.parameters())
    after = weights_of(update.model)
    assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_the_beginning_of_some_completions():
    update, _ = update_of()
    batch = batch_for(update)
    batch.prompt_mask[0, :2] = False
    part = policy_update.beginning_of(batch, 2, 2)
    assert len(part) == 2 and part.completion_ids.shape == part.loss_mask.shape == (2, 2)
    assert torch.equal(part.completion_ids, batch.completion_ids[:2, :2])
    assert torch.equal(part.prompt_ids, batch.prompt_ids[:2, -2:])
    assert part.prompt_mask.tolist() == [[False, True], [True, True]]
    whole = policy_update.beginning_of(batch, 99, 99)
    assert torch.equal(whole.completion_ids, batch.completion_ids) and len(whole) == len(batch)


def watched(function, seen):
    "Writes down how many completions it was given, and whether its result has a gradient."

    def call(model, batch, *given, **named):
        result = function(model, batch, *given, **named)
        seen.append((len(batch), result[0].requires_grad))
        return result

    return call


def test_reentrant_layers_compile_nothing_first(monkeypatch):
    "They refuse the gradients of a part of the graph, so the pass would only warn."
    update, _ = update_of(gradient_checkpointing=True)
    monkeypatch.setattr(policy_update, "compile_together", lambda work: pytest.fail("compiled"))
    update.config.gradient_checkpointing_kwargs = {"use_reentrant": True}
    update.compiles = True
    update.compile_first(batch_for(update))


def test_what_is_noted_before_routes_part_is_compiled(monkeypatch):
    """Where experts are a loop, a router that read what no kernel wrote sends tokens elsewhere the
    second time, and the checkpoint says so; that is no reason to compile one by one."""
    update, _ = update_of(gradient_checkpointing=True)

    def parted(*_, **__):
        raise CheckpointError("different metadata")

    monkeypatch.setattr(policy_update, "compile_together", lambda work: work())
    monkeypatch.setattr(torch.autograd, "grad", parted)
    update.compiles = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update.compile_first(batch_for(update))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_is_compiled_early_is_the_one_that_is_launched(dtype, monkeypatch):
    pytest.importorskip("triton")
    update, _ = update_of()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    update.precision.dtype = dtype
    with noted_launches() as noted:
        update.compile_logps()
        update.config.cast_lm_head_to_fp32 = True
        update.compile_logps()
        logits = torch.zeros(3, update.model.config.vocab_size, dtype=dtype)
        training_kernels.softmax_chunk(logits, torch.zeros(3, dtype=torch.int64))
    assert len(noted) == 1 + (dtype != torch.float32)


def test_kernels_that_cannot_be_compiled_together_stop_no_run(monkeypatch):
    update, _ = update_of()
    batch = batch_for(update)

    def broken(work):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(policy_update, "compile_together", broken)
    update.compiles, mode = True, update.model.training
    with pytest.warns(UserWarning, match="one by one: RuntimeError: no compiler"):
        update.compile_first(batch)
    assert update.model.training == mode and not update.compiles


def test_a_run_of_recorded_layers_learns_the_same_and_gives_them_back(monkeypatch):
    def run():
        update, _ = update_of(gradient_checkpointing=True, per_device_train_batch_size=4)
        route_adapters(update.model)
        for seed in (1, 2, 1, 2):
            batch = batch_for(update, 4, seed)
            update.accumulate(batch, batch)
            update.step(1)
        kept = update.fitter.recorded
        layers = (
            [x for shape in kept.shapes.values() for x in shape.layers.values()] if kept else []
        )
        update.end()
        return weights_of(update.model), kept, update.model, sum(bool(x.graphs) for x in layers)

    expected, kept, _, count = run()
    assert kept is None and not count
    monkeypatch.setattr(PolicyUpdate, "may_record", lambda self: True)
    switches = []

    def record(model, *sizes, tells):
        assert not tells and sizes == (limits.RECORDED_TOKENS, limits.RECORDED_MULTIPLE)
        switches.append(record_layers(model, record=RecordedCalls))
        return switches[-1]

    monkeypatch.setattr(policy_update, "record_layers", record)
    played, switch, model, count = run()
    assert switch is switches[-1] and switch.refused is None and count
    assert all(torch.equal(expected[name], played[name]) for name in expected)
    functions = {vars(m).get("_gradient_checkpointing_func") for m in model.modules()}
    assert not switch.shapes and switch not in functions


class Doubling:
    "An accelerator of two processes that hold the same."

    def __init__(self):
        self.messages = []

    def reduce(self, tensor, reduction):
        assert reduction == "sum"
        self.messages.append(tensor.numel())
        return 2 * tensor


def test_many_tensors_are_summed_in_few_messages():
    sizes = [(3, 4), (5,), (2, 2), (40,), (), (7,)]
    tensors = [torch.randn(size) for size in sizes] + [torch.randn(3).bfloat16()]
    wanted, accelerator = [2 * tensor for tensor in tensors], Doubling()
    sum_over_all(tensors, accelerator, most=22)
    assert all(map(torch.equal, tensors, wanted))
    assert accelerator.messages == [21, 40, 8, 3]  # a large one alone, another dtype apart
