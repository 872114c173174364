"Number formats of a run on the CPU: float16 with a scaled loss and an overflow, bfloat16, float32."

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig
from small_runs import remember_batches, small_model, small_trainer, weights_of

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def products(model):
    "The dtypes that the model's linear layers have computed in so far."
    seen = set()
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    return seen


@pytest.mark.parametrize(
    "changes, dtype",
    [
        ({}, torch.float32),
        (dict(bf16=False), torch.float32),
        (dict(bf16=True), torch.bfloat16),
        (dict(fp16=True), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("adapter", [False, True])
def test_a_run_in_each_format(changes, dtype, adapter, tmp_path):
    trainer = small_trainer(
        tmp_path,
        max_steps=4,
        num_iterations=2,
        beta=0.05,
        gradient_checkpointing=True,
        arguments=dict(peft_config=LoraConfig(**LORA)) if adapter else {},
        **changes,
    )
    before, seen, batches = (
        weights_of(trainer.model),
        products(trainer.model),
        remember_batches(trainer),
    )
    trainer.train()
    assert seen == {dtype}  # sampling, old log-probs and training
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32} and batches[
        0
    ].old_logps.dtype == torch.float32
    assert all(
        v.dtype == torch.float32
        for state in trainer.optimizer.state.values()
        for v in state.values()
    )
    assert (
        max(float((p - before[name]).abs().max()) for name, p in weights_of(trainer.model).items())
        > 1e-3
    )
    for record in trainer.log_history:
        assert all(math.isfinite(v) for v in record.values()) and record["skipped_updates"] == 0
    assert trainer.precision.scaler.is_enabled() == (dtype == torch.float16)
    # the mean: one token whose experts are others in a narrow format is far off
    tolerance = {torch.float32: 1e-5, torch.float16: 0.005, torch.bfloat16: 0.05}[dtype]
    assert trainer.log_history[0]["sampling/gap_mean"] < tolerance


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_scale_leaves_the_gradient_as_it_is(accumulation, tmp_path):
    runs = []
    for scale in (1.0, 2.0**10):
        trainer = small_trainer(
            tmp_path,
            fp16=True,
            max_steps=1,
            optim="sgd",
            learning_rate=0.1,
            per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation,
        )
        trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer.train()
        runs.append((trainer.log_history[0], weights_of(trainer.model)))
    (a, before), (b, after) = runs
    assert (
        b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.02)
        and a["grad_norm"] > 0.1
        and b["loss"] == pytest.approx(a["loss"], abs=1e-3)
    )
    assert all(torch.allclose(before[name], after[name], atol=2e-3) for name in before)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_an_overflow_skips_the_update_and_the_run_goes_on(optim, tmp_path):
    trainer = small_trainer(tmp_path, fp16=True, max_steps=12, optim=optim)
    trainer.precision.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**28, backoff_factor=2.0**-4
    )
    seen, update = [], trainer.policy_update.step

    def watched(number):
        before = weights_of(trainer.model)
        update(number)
        seen.append(
            (
                all(torch.equal(before[name], p) for name, p in weights_of(trainer.model).items()),
                trainer.precision.scaler.get_scale(),
            )
        )

    trainer.policy_update.step = watched
    trainer.train()
    skipped = [record["skipped_updates"] for record in trainer.log_history]
    first = skipped.index(0)
    assert 1 <= first < 8 and skipped == [1] * first + [0] * (12 - first)
    assert [unmoved for unmoved, _ in seen] == [True] * first + [False] * (12 - first - 1) + [
        seen[-1][0]
    ]
    assert [scale for _, scale in seen[:first]] == [
        2.0 ** (28 - 4 * n) for n in range(1, first + 1)
    ]
    wrong = {
        (record["step"], name)
        for record in trainer.log_history
        for name, value in record.items()
        if not math.isfinite(value)
    }
    assert wrong == {(step, "grad_norm") for step in range(1, first + 1)}
    assert all(p.isfinite().all() for p in trainer.model.parameters()) and all(
        s.isfinite().all()
        for state in trainer.optimizer.state.values()
        for s in state.values()
        if torch.is_tensor(s)
    )
    rates = [record["learning_rate"] for record in trainer.log_history]
    assert (
        rates[: first + 1] == [rates[0]] * (first + 1) and rates[first + 1] < rates[0]
    )  # the schedule waits for an update


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("changes", [{}, dict(bf16=True), dict(fp16=True)], ids=str)
def test_a_gradient_that_is_not_finite_is_never_applied(bad, changes, tmp_path):
    trainer = small_trainer(tmp_path, max_steps=3, **changes)
    accumulate, before = trainer.policy_update.accumulate, {}

    def poisoned(*given):
        accumulate(*given)
        if trainer.state.global_step == 1:
            trainer.policy_update.parameters[-1].grad[0] = bad
            before.update(weights_of(trainer.model))

    trainer.policy_update.accumulate = poisoned
    after_update, seen = trainer.after_update, []
    trainer.after_update = lambda: (seen.append(weights_of(trainer.model)), after_update())
    trainer.train()
    assert [record["skipped_updates"] for record in trainer.log_history] == [
        0,
        1,
        0,
    ]
    norms = [record["grad_norm"] for record in trainer.log_history]
    assert str(norms[1]) == str(bad) and all(math.isfinite(norm) for norm in norms[::2])
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [record["grad_norm"] for record in records] == [norms[0], None, norms[2]]
    assert all(torch.equal(seen[1][name], before[name]) for name in before) and any(
        not torch.equal(seen[2][name], before[name]) for name in before
    )
    others = (v for record in trainer.log_history for n, v in record.items() if n != "grad_norm")
    assert all(map(math.isfinite, others))


def test_activations_beyond_the_range_stop_with_a_sentence(tmp_path):
    model, _ = small_model()
    with torch.no_grad():
        (
            model.model.embed_tokens.weight.mul_(1e3),
            model.model.layers[0].self_attn.o_proj.weight.mul_(1e6),
        )
    start = {name: p.clone() for name, p in weights_of(model).items()}
    trainer = small_trainer(tmp_path, model=model, fp16=True)
    with pytest.raises(FloatingPointError, match="not finite.*bfloat16 or float32"):
        trainer.train()
    assert all(torch.equal(start[name], p) for name, p in weights_of(model).items())


def test_float16_weights_that_train_are_refused(tmp_path):
    model, _ = small_model()
    half = copy.deepcopy(model).half()
    with pytest.raises(ValueError, match="trainable weights in float16.*Load the model in float32"):
        small_trainer(tmp_path, model=half, fp16=True)
    trainer = small_trainer(
        tmp_path, model=half, fp16=True, arguments=dict(peft_config=LoraConfig(**LORA)), max_steps=3
    )  # PEFT keeps the adapter in float32
    trainer.train()
    assert (
        trainer.log_history[-1]["skipped_updates"] == 0 and trainer.log_history[-1]["grad_norm"] > 0
    )


def test_formats_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        small_trainer(tmp_path, fp16=True, bf16=True)
