"The trainer against plain computations, and against what goes wrong around it."

import asyncio
import copy
import json
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import accelerate.tracking
import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_runs import (
    BY_HAND,
    ROWS,
    digits,
    drawn,
    ids_of,
    plain_logps,
    remember_batches,
    replay,
    small_config,
    small_model,
    small_trainer,
    weights_of,
    without_clocks,
)
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TrainerCallback
from transformers.integrations.integration_utils import rewrite_logs

from grpo_nb import GRPOConfig, GRPOTrainer, RolloutEngine
from grpo_nb.algorithm.losses import LOSSES
from grpo_nb.rollout import sampling
from grpo_nb.rollout.sampler import FunctionSampler
from grpo_nb.training import reporting
from grpo_nb.training.checkpoint import checkpoints
from grpo_nb.training.rewards import RewardError

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def close(a, b, tolerance=1e-5):
    "Whether two sets of weights agree."
    assert a.keys() == b.keys()
    worst = max(float((a[name] - b[name]).abs().max()) for name in a)
    return worst <= tolerance


def moved(model, before):
    "How far the furthest weight has moved."
    return max(
        float((p.detach() - before[name]).abs().max())
        for name, p in model.named_parameters()
        if name in before
    )


# one update after the other against the formulas

LAYOUTS = {  # per-device batch, accumulation, steps per generation, iterations
    "one micro-batch": (16, 1, None, 1),
    "accumulated": (8, 2, None, 1),
    "several updates a cycle": (4, 2, 4, 1),
    "a window of two cycles": (4, 4, 2, 1),
    "twice over": (8, 1, 2, 2),
    "groups cut": (6, 2, 2, 2),
    "all at once": (4, 2, 4, 2),
}
CASES = [(kind, layout) for kind in ("dapo", "grpo") for layout in LAYOUTS] + [
    (kind, "all at once") for kind in BY_HAND[2:]
]


@pytest.mark.filterwarnings("ignore:loss_type")
@pytest.mark.parametrize("kind, layout", CASES)
def test_updates_are_those_of_the_formulas(kind, layout, tmp_path):
    per, accumulation, steps, iterations = LAYOUTS[layout]
    extra = {
        "cispo": dict(epsilon_high=1.01),
        "grpo": dict(delta=1.05, epsilon_high=0.03),
        "luspo": dict(importance_sampling_level="sequence"),
    }.get(kind, {})
    if kind not in ("cispo", "sapo", "vespo", "reinforce"):
        extra["epsilon"] = 0.01
    trainer = small_trainer(
        tmp_path,
        per_device_train_batch_size=per,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=iterations,
        max_steps=5,
        optim="sgd",
        learning_rate=0.3,
        max_grad_norm=0.5,
        loss_type=kind,
        temperature=0.9,
        **extra,
    )
    plain, batches = copy.deepcopy(trainer.model).eval(), remember_batches(trainer)
    before = weights_of(plain)
    trainer.train()
    expected = replay(
        plain,
        batches,
        trainer.config,
        lambda sequences: digits(
            trainer.tokenizer.batch_decode([c for _, c in sequences], skip_special_tokens=True)
        ),
        torch.optim.SGD(plain.parameters(), lr=0.3),
    )
    assert len(trainer.log_history) == len(expected) == 5
    for record, wanted in zip(trainer.log_history, expected):
        for name in wanted:
            assert record[name] == pytest.approx(wanted[name], rel=2e-3, abs=2e-5), (
                record["step"],
                name,
            )
    assert (
        close(weights_of(trainer.model), weights_of(plain), 2e-5)
        and moved(trainer.model, before) > 0.01
    )
    assert max(r["grad_norm"] for r in expected) > 0.5  # clipping of the gradient bit
    if accumulation % ((steps or accumulation) * iterations):
        assert max(abs(r["ratio/max"] - 1) for r in trainer.log_history) > 1e-3


@pytest.mark.parametrize("adapter", [False, True])
def test_the_default_optimizer_and_a_kl_term(adapter, tmp_path):
    model, tokenizer = small_model()
    start = copy.deepcopy(model)
    trainer = small_trainer(
        tmp_path,
        model=model.double(),
        max_steps=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_iterations=2,
        beta=0.3,
        use_bias_correction_kl=False,
        learning_rate=0.02,
        arguments=dict(peft_config=LoraConfig(**LORA)) if adapter else {},
    )
    trainer.model.double()
    plain, batches, before = (
        copy.deepcopy(trainer.model).eval(),
        remember_batches(trainer),
        weights_of(trainer.model),
    )
    trainer.train()
    expected = replay(
        plain,
        batches,
        trainer.config,
        lambda sequences: digits(
            tokenizer.batch_decode([c for _, c in sequences], skip_special_tokens=True)
        ),
        torch.optim.AdamW(
            [p for p in plain.parameters() if p.requires_grad], lr=0.02, weight_decay=0.0
        ),
        reference=start.double().eval(),
    )
    for record, wanted in zip(trainer.log_history, expected):
        for name in wanted:
            assert record[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-6), (
                record["step"],
                name,
            )
    assert (
        close(weights_of(trainer.model), weights_of(plain), 1e-4)
        and moved(trainer.model, before) > 0.01
    )
    assert (
        trainer.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
        and trainer.log_history[-1]["kl"] > 1e-4
    )


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_a_batch_may_be_split(kind, tmp_path):
    runs = []
    for per, accumulation in ((16, 1), (8, 2), (2, 8)):
        trainer = small_trainer(
            tmp_path,
            per_device_train_batch_size=per,
            gradient_accumulation_steps=accumulation,
            loss_type=kind,
            optim="sgd",
            learning_rate=0.3,
            max_steps=3,
        )
        before = weights_of(trainer.model)
        trainer.train()
        runs.append((weights_of(trainer.model), [r["loss"] for r in trainer.log_history]))
        assert moved(trainer.model, before) > 1e-3
    for weights, losses in runs[1:]:
        assert close(weights, runs[0][0], 1e-5) and losses == pytest.approx(runs[0][1], abs=1e-5)


def gradient(trainer, batch):
    "The gradient of one micro-batch that is a window of its own."
    update = trainer.policy_update
    update.begin(trainer.state.max_steps)
    trainer.model.zero_grad()
    update.accumulate(batch, trainer.state.batch)
    return {
        name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None
    }


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    "A trainer that has begun, and its first batch."
    trainer = small_trainer(
        tmp_path_factory.mktemp("run"),
        beta=0.1,
        num_iterations=2,
        max_completion_length=8,
        shuffle_dataset=False,
    )
    trainer.begin(None)
    drawn(trainer)
    with torch.no_grad():
        for p in trainer.policy_update.parameters:
            p.add_(
                0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            )  # so that no ratio is 1
    return trainer, trainer.state.batch


@pytest.mark.parametrize(
    "order",
    [[3, 1, 0, 2, *range(4, 16)], [*range(4, 16), *range(4)], [*range(15, -1, -1)]],
    ids=["inside a group", "groups", "reversed"],
)
def test_the_order_of_completions_does_not_matter(collected, order):
    trainer, batch = collected
    assert close(gradient(trainer, batch.rows(order)), gradient(trainer, batch), 1e-5)


def test_padding_does_not_matter(collected):
    trainer, batch = collected
    alone, padded = gradient(trainer, batch), {}
    for name, tensor in vars(batch).items():
        if tensor is None or tensor.ndim < 2:
            continue
        pad = (3, 0) if name.startswith("prompt") else (0, 5)
        junk = False if tensor.dtype == torch.bool else 9 if tensor.dtype == torch.long else 7.7
        padded[name] = torch.nn.functional.pad(tensor, pad, value=junk)
    again = gradient(trainer, replace(batch, **padded))
    assert close(again, alone, 1e-5) and max(float(g.abs().max()) for g in alone.values()) > 1e-2


def test_what_is_padding_comes_from_lengths_alone(tmp_path):
    histories = []
    for pad in ("<|endoftext|>", "<|return|>", "1"):
        model, tokenizer = small_model()
        tokenizer.pad_token = pad
        trainer = small_trainer(tmp_path, model=model, tokenizer=tokenizer, max_steps=3)
        batches = remember_batches(trainer)
        trainer.train()
        histories.append([v for r in without_clocks(trainer.log_history) for v in r.values()])
        ended = [
            c
            for batch in batches
            for row, drawn, trained in zip(
                batch.completion_ids, batch.completion_mask, batch.loss_mask
            )
            for c in row[drawn & trained].tolist()
            if c == tokenizer.eos_token_id
        ]
        assert len(ended) > 3  # the end of a completion is trained on
    for other in histories[1:]:
        assert other == pytest.approx(histories[0], abs=1e-5)


# batches with nothing to learn


@pytest.mark.filterwarnings("ignore:loss_type", "ignore:With loss_type")
@pytest.mark.parametrize("kind", LOSSES)
def test_everything_truncated_and_masked(kind, tmp_path):
    trainer = small_trainer(
        tmp_path,
        loss_type=kind,
        mask_truncated_completions=True,
        beta=0.1,
        entropy_coef=0.01,
        max_completion_length=3,
        gradient_accumulation_steps=2,
    )
    trainer.sampling = replace(trainer.sampling, stop_token_ids=())
    before = weights_of(trainer.model)
    trainer.train()
    assert moved(trainer.model, before) == 0
    for record in trainer.log_history:
        assert (
            record["completions/clipped_ratio"] == 1
            and record["loss"] == 0
            and record["grad_norm"] == 0
            and record["skipped_updates"] == 0
        )
        assert all(math.isfinite(value) for value in record.values())


def test_truncated_completions_are_left_out(tmp_path):
    trainer = small_trainer(
        tmp_path,
        mask_truncated_completions=True,
        max_completion_length=4,
        max_steps=1,
        optim="sgd",
        shuffle_dataset=False,
        loss_type="grpo",
    )
    plain, batches = copy.deepcopy(trainer.model).eval(), remember_batches(trainer)
    trainer.train()
    sequences, A = ids_of(batches[0]), batches[0].advantages.tolist()
    ended = [c[-1] == trainer.tokenizer.eos_token_id for _, c in sequences]
    assert 0 < sum(ended) < 16 and batches[0].loss_mask.any(1).tolist() == ended
    loss = (
        sum(
            -a * (lp - lp.detach()).exp().mean()
            for s, a, e in zip(sequences, A, ended)
            if e
            for lp in [plain_logps(plain, *s)]
        )
        / 16
    )  # a masked row counts in the mean
    norm = torch.stack(
        [
            g.norm()
            for g in torch.autograd.grad(loss, [p for p in plain.parameters()], allow_unused=True)
            if g is not None
        ]
    ).norm()
    assert trainer.log_history[0]["loss"] == pytest.approx(
        loss.item(), abs=1e-5
    ) and trainer.log_history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_groups_without_spread_teach_nothing(tmp_path):
    trainer = small_trainer(tmp_path, lambda completions, **_: [0.1] * len(completions))
    before = weights_of(trainer.model)
    trainer.train()
    assert moved(trainer.model, before) == 0 and [
        r["frac_reward_zero_std"] for r in trainer.log_history
    ] == [1, 1]


# the other policies


def trained_adapter(model):
    "An adapter that already changes the model."
    wrapped = get_peft_model(model, LoraConfig(**LORA))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    return wrapped


@pytest.mark.parametrize("policy", ["full", "adapter", "trained adapter"])
def test_the_reference_is_the_model_at_the_start(policy, tmp_path):
    model, _ = small_model()
    if policy == "trained adapter":
        model = trained_adapter(model)
    start = copy.deepcopy(model).eval()
    trainer = small_trainer(
        tmp_path,
        model=model,
        beta=0.05,
        max_steps=3,
        learning_rate=0.05,
        arguments=dict(peft_config=LoraConfig(**LORA)) if policy == "adapter" else {},
    )
    batches = remember_batches(trainer)
    trainer.train()
    for batch in batches:
        for (prompt, completion), ref in zip(ids_of(batch), batch.ref_logps):
            with torch.no_grad():
                assert torch.allclose(
                    ref[: len(completion)], plain_logps(start, prompt, completion), atol=2e-5
                )
    now = torch.cat([plain_logps(trainer.model.eval(), *s).detach() for s in ids_of(batches[-1])])
    then = torch.cat([r[: len(c)] for (_, c), r in zip(ids_of(batches[-1]), batches[-1].ref_logps)])
    assert (now - then).abs().max() > 1e-2  # the policy has moved, the reference has not
    assert (trainer.reference.model is None) == (policy != "full")


@pytest.mark.parametrize(
    "changes, calls",
    [
        ({}, 0),
        (dict(per_device_train_batch_size=8, gradient_accumulation_steps=2), 0),
        (
            dict(
                per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=2
            ),
            0,
        ),
        (dict(num_iterations=2), 1),
        (dict(per_device_train_batch_size=8, steps_per_generation=2), 1),
        (dict(top_p=0.9), 0),
        (dict(repetition_penalty=1.1), 1),
        (dict(beta=0.1), 1),
        (dict(beta=0.1, num_iterations=2), 2),
        (dict(repetition_penalty=1.1, vllm_importance_sampling_correction=False), 0),
    ],
)
def test_other_policies_are_asked_only_when_needed(changes, calls, tmp_path):
    trainer = small_trainer(tmp_path, max_steps=2, guard_every=0, **changes)
    batches, asked, logps_of = remember_batches(trainer), [], trainer.policy_update.logps_of
    trainer.policy_update.logps_of = lambda *arguments: asked.append(1) or logps_of(*arguments)
    trainer.train()
    assert len(asked) == calls * len(batches)
    assert (trainer.reference is None) == ("beta" not in changes)


def test_old_log_probs_do_not_depend_on_dropout_or_mode(tmp_path):
    trainer = small_trainer(
        tmp_path,
        num_iterations=2,
        beta=0.1,
        arguments=dict(peft_config=LoraConfig(**LORA, lora_dropout=0.5)),
    )
    trainer.begin(None)
    with torch.no_grad():
        for p in trainer.policy_update.parameters:
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    trainer.model.train()
    batch = drawn(trainer)
    assert trainer.model.training
    trainer.model.eval()
    for (prompt, completion), old, sampled in zip(
        ids_of(batch), batch.old_logps, batch.rollout_logps
    ):
        with torch.no_grad():
            plain = plain_logps(trainer.model, prompt, completion)
        assert torch.allclose(old[: len(completion)], plain, atol=2e-5) and torch.allclose(
            sampled[: len(completion)], plain, atol=2e-5
        )


FILTERS = {
    "top_p": TopPLogitsWarper(0.7),
    "top_k": TopKLogitsWarper(5),
    "min_p": MinPLogitsWarper(0.2),
}


def logps_drawn_from(model, prompt, completion, name):
    "Log-probs at temperature 0.8 over what transformers' filter leaves."
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
    if name in FILTERS:
        left_out = FILTERS[name](None, logits.detach()).isinf()
        logits = logits.masked_fill(left_out, -math.inf)
    return logits.log_softmax(-1)[range(len(completion)), completion]


@pytest.mark.parametrize("room", [128, 2])  # with room for 2, most sets are not kept
@pytest.mark.parametrize(
    "changes",
    [dict(top_p=0.7), dict(top_k=5), dict(min_p=0.2), dict(repetition_penalty=1.5)],
    ids=str,
)
def test_what_is_not_drawn_from_the_policy(changes, room, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_SURVIVORS", room)
    (name,) = changes
    trainer = small_trainer(
        tmp_path, temperature=0.8, max_steps=1, loss_type="grpo", optim="sgd", **changes
    )
    plain, batches = copy.deepcopy(trainer.model).eval(), remember_batches(trainer)
    trainer.train()
    batch, loss, weights = batches[0], 0.0, []
    exact = name in FILTERS and room == 128
    for i, (prompt, completion) in enumerate(ids_of(batch)):
        drawn = batch.rollout_logps[i, : len(completion)]
        logps = logps_drawn_from(plain, prompt, completion, name)
        if name in FILTERS:
            assert torch.allclose(logps, drawn, atol=1e-5)
        weight = (logps.detach() - drawn).exp().clamp(max=2.0)
        loss = loss - (weight * (logps - logps.detach()).exp()).mean() * batch.advantages[i] / 16
        weights.append(weight)
    record = trainer.log_history[0]
    assert ((torch.cat(weights) - 1).abs().max() < 1e-4) == (name in FILTERS)
    assert trainer.corrects == (name not in FILTERS)
    assert record["loss"] == pytest.approx(loss.item(), abs=1e-5)
    if name in FILTERS:
        assert record["sampling/gap_mean"] < 1e-6
        assert (batch.log_mass < 0).any() == (not exact)
    gradients = torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True)
    norm = torch.stack([g.norm() for g in gradients if g is not None]).norm().item()
    same = record["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert same == (exact or name not in FILTERS)


# rewards and advantages


def length(completions, **_):
    return [float(len(c)) for c in completions]


def ones(completions, **_):
    return [float(c.count("1")) for c in completions]


def z(values):
    return [(v - statistics.mean(values)) / (statistics.stdev(values) + 1e-4) for v in values]


def in_groups(values, size=4):
    return [values[i : i + size] for i in range(0, len(values), size)]


def flat(groups):
    return [v for group in groups for v in group]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(scale_rewards="batch"),
        dict(scale_rewards=False),
        dict(reward_weights=[0.5, -2.0]),
        dict(reward_weights=[0.5, 2.0], multi_objective_aggregation="normalize_then_sum"),
    ],
    ids=str,
)
def test_settings_reach_the_advantages(changes, tmp_path):
    trainer = small_trainer(
        tmp_path, [length, digits], shuffle_dataset=False, max_steps=1, **changes
    )
    batches = remember_batches(trainer)
    trainer.train()
    texts = trainer.tokenizer.batch_decode(
        [c for _, c in ids_of(batches[0])], skip_special_tokens=True
    )
    a, b = length(texts), digits(texts)
    weights = changes.get("reward_weights", [1.0, 1.0])
    total = [weights[0] * x + weights[1] * y for x, y in zip(a, b)]
    centred = flat([v - statistics.mean(group) for v in group] for group in in_groups(total))
    expected = flat(map(z, in_groups(total)))
    if changes.get("scale_rewards") == "batch":
        expected = [v / (statistics.stdev(total) + 1e-4) for v in centred]
    if changes.get("scale_rewards") is False:
        expected = centred
    if "multi_objective_aggregation" in changes:
        expected = z(
            [
                weights[0] * x + weights[1] * y
                for x, y in zip(flat(map(z, in_groups(a))), flat(map(z, in_groups(b))))
            ]
        )
    assert (
        batches[0].advantages.tolist() == pytest.approx(expected, abs=1e-4) and max(expected) > 0.5
    )
    record = trainer.log_history[0]
    assert record["reward"] == pytest.approx(statistics.mean(total), abs=1e-5) and record[
        "reward_group_std"
    ] == pytest.approx(statistics.mean(map(statistics.stdev, in_groups(total))), abs=1e-5)
    assert record["reward_std"] == pytest.approx(statistics.stdev(total), abs=1e-5)
    for name, values in (("length", a), ("digits", b)):
        assert record[f"rewards/{name}/mean"] == pytest.approx(statistics.mean(values)) and record[
            f"rewards/{name}/std"
        ] == pytest.approx(statistics.stdev(values), abs=1e-5)


def test_what_reward_functions_are_given(tmp_path):
    seen = []

    async def slow(
        prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **rest
    ):
        await asyncio.sleep(0.01)
        seen.append((prompts, completions, completion_ids, answer, trainer_state.global_step, rest))
        log_metric("judge/mean_answer", len(answer[0]))
        log_extra("gold", answer)
        return digits(completions)

    trainer = small_trainer(tmp_path, [slow, ones])
    batches = remember_batches(trainer)
    trainer.train()
    assert len(seen) == len(batches) == 2 and [s[4] for s in seen] == [0, 1]
    for prompts, completions, ids, answers, _, rest in seen:
        assert rest == {} and len(prompts) == len(completions) == len(ids) == len(answers) == 16
        assert completions == trainer.tokenizer.batch_decode(ids, skip_special_tokens=True)
        gold = {row["prompt"]: row["answer"] for row in ROWS}
        assert answers == [gold[prompt] for prompt in prompts] and all(
            prompts[i] == prompts[i - i % 4] for i in range(16)
        )
    trained = sorted((tuple(p), tuple(c)) for p, c in ids_of(batches[0]))
    assert trained == sorted(
        (tuple(trainer.tokenizer(p).input_ids), tuple(c)) for p, c in zip(seen[0][0], seen[0][2])
    )
    assert trainer.log_history[0]["rewards/slow/mean"] == pytest.approx(
        statistics.mean(digits(seen[0][1]))
    ) and trainer.log_history[0]["judge/mean_answer"] == len(seen[0][3][0])


def test_chat_messages(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in ROWS
    ]
    seen = []

    def told(prompts, completions, **_):
        seen.append((prompts, completions))
        return digits(completions)

    trainer = small_trainer(tmp_path, told, rows=datasets.Dataset.from_list(rows), max_steps=1)
    batches = remember_batches(trainer)
    trainer.train()
    prompts, completions = seen[0]
    assert all(p in [row["prompt"] for row in rows] for p in prompts) and all(
        len(c) == 1 and c[0]["role"] == "assistant" for c in completions
    )
    template = trainer.tokenizer.apply_chat_template(
        prompts[0], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert template in [p for p, _ in ids_of(batches[0])]


class Fails:
    "A reward function that goes wrong in one way at one step."

    __name__ = "fails"

    def __init__(self, how, step=2):
        self.how, self.step = how, step

    def __call__(self, completions, trainer_state, **_):
        if trainer_state.global_step != self.step:
            return digits(completions)
        if self.how == "raises":
            return {}["missing"]
        if self.how == "async":
            return self.later()
        return {
            "short": [1.0],
            "one number": 1.0,
            "all None": [None] * len(completions),
            "all NaN": [math.nan] * len(completions),
            "text": ["good"] * len(completions),
            "infinite": [math.inf] * len(completions),
        }[self.how]

    async def later(self):
        raise KeyError("missing")


@pytest.mark.long
@pytest.mark.parametrize(
    "how, words",
    [
        ("raises", "KeyError: 'missing'"),
        ("async", "KeyError: 'missing'"),
        ("short", "1 rewards for 16"),
        ("one number", "returned 1.0"),
        ("text", "'good'"),
        ("infinite", "inf"),
    ],
)
def test_a_reward_function_that_fails(how, words, tmp_path):
    whole = small_trainer(tmp_path / "whole", Fails("never", None), max_steps=4)
    whole.train()
    trainer = small_trainer(tmp_path / "run", Fails(how), max_steps=4)
    with pytest.raises(RewardError) as caught:
        trainer.train()
    for part in ("'fails'", "step 2", "the first completion", words):
        assert part in str(caught.value)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    again = small_trainer(tmp_path / "run", Fails("never", None), max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert without_clocks(again.log_history) == without_clocks(whole.log_history)
    assert all(
        torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters())
    )


@pytest.mark.parametrize("answer", [None, math.nan])
def test_a_cycle_that_nobody_judged_is_a_warning_and_three_in_a_row_are_the_end(answer, tmp_path):
    judged = iter([True, False, False, True, False, False, False])

    def judge(completions, **_):
        return digits(completions) if next(judged) else [answer] * len(completions)

    trainer = small_trainer(tmp_path, judge, max_steps=20, logging_steps=1)
    with (
        pytest.warns(UserWarning, match="'judge'.*for all 16.*Nothing can be learnt.*give 0"),
        pytest.raises(RewardError, match="3 generations in a row.*'judge'.*give 0 in place"),
    ):
        trainer.train()
    assert [record["step"] for record in trainer.log_history if "reward" in record] == [1, 4]
    still = [r["step"] for r in trainer.log_history if r["frac_reward_zero_std"] == 1]
    assert still == [2, 3, 5, 6] and all(
        r["loss"] == r["grad_norm"] == 0 for r in trainer.log_history if r["step"] in still
    )


def test_a_run_on_a_stream_is_one_on_its_rows_in_their_order(tmp_path):
    class Stream:
        def __iter__(self):
            return iter(ROWS)

    def run(name, rows, max_steps=4, **changes):
        return small_trainer(tmp_path / name, rows=rows, max_steps=max_steps, **changes)

    with pytest.raises(ValueError, match="train_dataset is a stream.*max_steps"):
        run("none", Stream(), max_steps=-1)
    whole = run("list", ROWS, shuffle_dataset=False)
    streamed = run("stream", Stream(), save_strategy="steps", save_steps=2)
    batches = [remember_batches(trainer) for trainer in (whole, streamed)]
    for trainer in (whole, streamed):
        trainer.train()
    prompts = [[{str(p) for p, _ in ids_of(b)} for b in of_run] for of_run in batches]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 4
    again = run("stream", Stream())
    again.train(resume_from_checkpoint=tmp_path / "stream" / "checkpoint-2")
    assert without_clocks(again.log_history) == without_clocks(streamed.log_history)


def test_a_function_may_leave_completions_unscored(tmp_path):
    trainer = small_trainer(
        tmp_path,
        [
            lambda prompts, completions, **_: [
                None if len(p) < 5 else s for p, s in zip(prompts, digits(completions))
            ],
            length,
        ],
        shuffle_dataset=False,
        max_steps=1,
    )
    trainer.train()
    assert all(math.isfinite(v) for v in trainer.log_history[0].values())


# arguments


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(tools=[len]), "tools holds len, which cannot be described"),
        (dict(environment_factory=dict), "made dict, which has no method reset"),
        (dict(tools=[len], rollout_func=print), "rollout_func draws whole completions"),
        (dict(peft_config={"r": 4}), "give peft.LoraConfig\\(\\*\\*{'r': 4}\\)"),
        (dict(quantization_config=object()), "quantization_config is for a model given by name"),
        (
            dict(reward_processing_classes=[None, None]),
            "2 entries and there are 1 reward functions",
        ),
    ],
)
def test_arguments_that_cannot_be_honoured(arguments, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        small_trainer(tmp_path, arguments=arguments)


@pytest.mark.parametrize("given", [3, object(), RolloutEngine, FunctionSampler])
def test_what_draws_is_a_function_or_a_sampler_and_no_class(given, tmp_path):
    with pytest.raises(TypeError, match="no function, and no Sampler"):
        small_trainer(tmp_path, arguments=dict(rollout_func=given))


@pytest.mark.parametrize(
    "rewards, words",
    [
        (None, "No reward source provided.*reward_funcs=.*get_reward"),
        ([], "No reward source provided"),
        (torch.nn.Linear(1, 1), "call it inside a function"),
        (3, "no function, no reward model"),
    ],
)
def test_what_is_no_reward_function(rewards, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        small_trainer(tmp_path, rewards)


def test_mistakes_that_need_the_whole_call(tmp_path):
    model, tokenizer = small_model()
    with pytest.raises(ValueError, match="2 numbers and there are 1"):
        small_trainer(tmp_path, reward_weights=[1, 2])
    with pytest.raises(ValueError, match="not a multiple of"):
        small_trainer(tmp_path, per_device_train_batch_size=6, steps_per_generation=1)
    with pytest.raises(ValueError, match="pass processing_class"):
        GRPOTrainer(model, digits, small_config(tmp_path), ROWS)
    for nothing in (None, 3, torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="which is no model: give a causal model"):
            GRPOTrainer(nothing, digits, small_config(tmp_path), ROWS)
    for settings in ({}, {"model_init_kwargs": {"attn_implementation": "sink"}}):
        for its in (tokenizer, None):
            with pytest.raises(
                ValueError,
                match="model='./no/such/model': it is no folder in .*the hub gave no model of "
                "that name.*local folder",
            ):
                GRPOTrainer(
                    "./no/such/model",
                    digits,
                    small_config(tmp_path, **settings),
                    ROWS,
                    processing_class=its,
                )
    model.config._name_or_path = "./moved/away/since"
    with pytest.raises(
        ValueError,
        match="processing_class is left out and the model came from './moved/away/since': it "
        "is no folder",
    ):
        GRPOTrainer(model, digits, small_config(tmp_path), ROWS)
    with pytest.raises(ValueError, match="model_init_kwargs"):
        small_trainer(tmp_path, model_init_kwargs={"dtype": "float32"})
    other = LoraConfig(**{**LORA, "r": 1 + LORA["r"]})
    with pytest.raises(ValueError, match="the model has an adapter with r="):
        small_trainer(tmp_path, model=trained_adapter(model), arguments=dict(peft_config=other))
    with pytest.raises(ValueError, match="nothing would be trained"):
        small_trainer(tmp_path, model=small_model()[0].requires_grad_(False))
    with pytest.raises(ValueError, match="there is no train_dataset"):
        small_trainer(tmp_path, rows=None).train()
    with pytest.raises(
        ValueError, match="The data set has 3 rows, and one generation cycle draws 4"
    ):
        small_trainer(tmp_path, rows=ROWS[:3]).train()
    with pytest.raises(ValueError, match="The prompt of row 9 has 7 tokens"):
        small_trainer(
            tmp_path,
            model=small_model(max_position_embeddings=12)[0],
            shuffle_dataset=False,
            max_steps=3,
        ).train()
    with pytest.raises(ValueError, match="no whole checkpoint .*empty has none"):
        small_trainer(tmp_path / "empty").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="it holds no training_state.pt: there is no such folder"):
        small_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="there is no eval_dataset"):
        small_trainer(tmp_path).evaluate()
    with pytest.raises(ValueError, match="eval_strategy='steps'.*eval_dataset"):
        small_trainer(tmp_path, eval_strategy="steps")
    with pytest.raises(TypeError, match="nearest is 'learning_rate'"):
        small_trainer(tmp_path, learning_rat=1)


# evaluation, callbacks, trackers, log


def test_evaluation_changes_nothing_but_the_log(tmp_path):
    plain = small_trainer(tmp_path / "a", max_steps=4)
    plain.train()
    watched = small_trainer(
        tmp_path / "b",
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=2,
        per_device_eval_batch_size=5,
        arguments=dict(eval_dataset=ROWS[:6]),
    )
    watched.train()
    evaluations = [r for r in watched.log_history if "eval_reward" in r]
    assert [r["step"] for r in evaluations] == [2, 4]
    assert without_clocks(r for r in watched.log_history if "reward" in r) == without_clocks(
        plain.log_history
    )
    assert all(
        torch.equal(a, b) for a, b in zip(watched.model.parameters(), plain.model.parameters())
    )
    assert set(evaluations[0]) >= {
        "eval_reward",
        "eval_reward_std",
        "eval_rewards/digits/mean",
        "eval_completions/mean_length",
        "eval_completions/clipped_ratio",
        "epoch",
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
    }


def test_evaluation_means_what_it_says(tmp_path):
    trainer = small_trainer(
        tmp_path,
        arguments=dict(eval_dataset=ROWS),
        num_generations_eval=3,
        per_device_eval_batch_size=7,
    )
    seen, score = [], trainer.source.score

    def remembered(rows, rollout, metrics):
        seen.append((rows, rollout))
        return score(rows, rollout, metrics)

    trainer.source.score = remembered
    record = trainer.evaluate(ROWS[:4])
    texts = [t for _, rollout in seen for t in rollout.texts(trainer.tokenizer)]
    rewards = digits(texts)
    assert [row["prompt"] for rows, _ in seen for row in rows] == [
        row["prompt"] for row in ROWS[:4] for _ in range(3)
    ]
    assert record["eval_reward"] == pytest.approx(statistics.mean(rewards)) and record[
        "eval_reward_group_std"
    ] == pytest.approx(statistics.mean(map(statistics.stdev, in_groups(rewards, 3))), abs=1e-5)
    lengths = [n for _, rollout in seen for n in rollout.lengths.tolist()]
    assert record["eval_completions/mean_length"] == pytest.approx(
        statistics.mean(lengths)
    ) and record["eval_completions/max_length"] == max(lengths)
    assert (
        record["step"] == 0
        and trainer.log_history == [record]
        and trainer.state.log_history == trainer.log_history
    )


class Watching(TrainerCallback):
    "Writes down what it is told, and asks for a checkpoint and for the end."

    def __init__(self, save_at=None, stop_at=None):
        self.save_at, self.stop_at, self.told, self.logs = save_at, stop_at, [], []

    def on_train_begin(
        self,
        args,
        state,
        control,
        model=None,
        processing_class=None,
        optimizer=None,
        lr_scheduler=None,
        **_,
    ):
        self.told.append("begin")
        self.complete = None not in (
            model,
            processing_class,
            optimizer,
            lr_scheduler,
        ) and isinstance(args, GRPOConfig)

    def on_step_begin(self, args, state, control, **_):
        self.told.append(f"step {state.global_step} begins")

    def on_step_end(self, args, state, control, **_):
        self.told.append(f"step {state.global_step}")
        control.should_save = control.should_save or state.global_step == self.save_at
        control.should_training_stop = (
            control.should_training_stop or state.global_step == self.stop_at
        )

    def on_epoch_end(self, args, state, control, **_):
        self.told.append(f"epoch {state.epoch:g}")

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(logs)

    def on_save(self, args, state, control, **_):
        self.told.append(f"saved {state.global_step}")

    def on_evaluate(self, args, state, control, metrics=None, **_):
        self.told.append(f"evaluated {metrics['eval_reward']:g}")

    def on_train_end(self, args, state, control, **_):
        self.told.append("end")


def test_callbacks_watch_save_and_stop(tmp_path):
    watching = Watching(save_at=2, stop_at=5)
    trainer = small_trainer(
        tmp_path, max_steps=50, arguments=dict(callbacks=[watching])
    )  # three cycles are an epoch
    result = trainer.train()
    steps = [[f"step {n - 1} begins", f"step {n}"] for n in range(1, 6)]
    assert (
        watching.told
        == [
            "begin",
            *steps[0],
            *steps[1],
            "saved 2",
            *steps[2],
            "epoch 1",
            *steps[3],
            *steps[4],
            "end",
        ]
        and watching.complete
    )
    assert (
        [p.name for p in checkpoints(tmp_path)] == ["checkpoint-2"]
        and result.global_step == 5
        and trainer.state.epoch == pytest.approx(5 / 3)
    )
    assert watching.logs == trainer.state.log_history
    assert [r["step"] for r in watching.logs] == [1, 2, 3, 4, 5, 5]
    assert watching.logs[-1]["train_loss"] == result.training_loss
    assert (
        result.training_loss
        == pytest.approx(statistics.mean(r["loss"] for r in trainer.log_history))
        and result.metrics.items() >= trainer.log_history[-1].items()
    )


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path):
    watching = Watching()
    with pytest.raises(RewardError):
        small_trainer(
            tmp_path,
            Fails("raises"),
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            arguments=dict(callbacks=[watching]),
        ).train()
    assert [told for told in watching.told if told.startswith("saved")] == [
        "saved 1",
        "saved 2",
    ]  # replacing it would leave a moment without any


def test_epochs_decide_how_long_a_run_is(tmp_path):
    trainer = small_trainer(
        tmp_path,
        max_steps=-1,
        num_train_epochs=2,
        save_strategy="epoch",
        eval_strategy="epoch",
        arguments=dict(eval_dataset=ROWS[:2]),
    )
    trainer.train()
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-6"] and [
        r["step"] for r in trainer.log_history if "eval_reward" in r
    ] == [3, 6]
    assert (
        trainer.state.max_steps == 6
        and trainer.state.epoch == 2
        and trainer.log_history[-2]["learning_rate"] == pytest.approx(1e-2 / 6)
    )
    part = small_trainer(tmp_path / "part", max_steps=-1, num_train_epochs=0.5)
    part.train()
    assert part.state.global_step == 2  # half of three, rounded up as transformers does


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_a_window_that_the_epoch_cuts_short(kind, tmp_path):
    trainer = small_trainer(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        steps_per_generation=4,
        max_steps=-1,
        num_train_epochs=2,
        optim="sgd",
        learning_rate=0.3,
        loss_type=kind,
    )
    plain, batches = copy.deepcopy(trainer.model).eval(), remember_batches(trainer)
    trainer.train()
    expected = replay(
        plain,
        batches,
        trainer.config,
        lambda sequences: digits(
            trainer.tokenizer.batch_decode([c for _, c in sequences], skip_special_tokens=True)
        ),
        torch.optim.SGD(plain.parameters(), lr=0.3),
        steps=4,
        epoch=12,
    )  # 12 micro-batches an epoch: windows of 8 and 4
    assert [r["epoch"] for r in trainer.log_history] == pytest.approx(
        [2 / 3, 1, 5 / 3, 2], abs=1e-4
    )
    for record, wanted in zip(trainer.log_history, expected, strict=True):
        for name in wanted:
            assert record[name] == pytest.approx(wanted[name], rel=2e-3, abs=2e-5), (
                record["step"],
                name,
            )
    assert close(weights_of(trainer.model), weights_of(plain), 2e-5)


class FakeTracker(accelerate.tracking.GeneralTracker):
    "Keeps what accelerate hands to a tracker."

    name, requires_logging_directory, main_process_only = "aim", False, True
    kept = []

    def __init__(self, run_name, *_, **__):
        super().__init__()
        self.kept.append(("run", run_name))

    def start(self):
        pass

    @property
    def tracker(self):
        return None

    def store_init_configuration(self, values):
        self.kept.append(("config", values))

    def log(self, values, step, **_):
        self.kept.append((step, values))

    def finish(self):
        self.kept.append("finished")


def test_records_reach_a_tracker(tmp_path, monkeypatch):
    FakeTracker.kept.clear()
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "aim", FakeTracker)
    monkeypatch.setattr(
        accelerate.tracking,
        "_available_trackers",
        [*accelerate.tracking._available_trackers, accelerate.tracking.LoggerType.AIM],
    )
    trainer = small_trainer(
        tmp_path,
        report_to=["aim"],
        arguments=dict(eval_dataset=ROWS[:2]),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    steps = [
        (step, values)
        for step, values in (k for k in FakeTracker.kept if isinstance(k, tuple))
        if isinstance(step, int)
    ]
    assert [step for step, _ in steps] == [1, 2, 2, 2] and [values for _, values in steps] == [
        rewrite_logs(record) for record in trainer.state.log_history
    ]
    assert (
        dict(k for k in FakeTracker.kept if isinstance(k, tuple) and k[0] == "config")["config"][
            "learning_rate"
        ]
        == "0.01"
        and "finished" not in FakeTracker.kept
    )
    trainer.evaluate()
    assert (
        FakeTracker.kept[-1] == (2, rewrite_logs(trainer.log_history[-1]))
        and "eval/reward" in FakeTracker.kept[-1][1]
    ), "an evaluation after the run is told of too"
    trainer.train()
    assert FakeTracker.kept.count("finished") == 1 and len(trainer.accelerator.trackers) == 1


def test_a_tracker_that_is_not_installed(tmp_path):
    missing = next(
        name
        for name in ("clearml", "dvclive", "swanlab", "comet_ml")
        if name not in map(str, accelerate.tracking.get_available_trackers())
    )
    with pytest.raises(ValueError, match=f"{missing}.*not installed"):
        small_trainer(tmp_path, report_to=missing)


DOCUMENTED = {  # what every record of a run holds
    "step",
    "epoch",
    "learning_rate",
    "loss",
    "grad_norm",
    "skipped_updates",
    "reward",
    "reward_std",
    "rewards/digits/mean",
    "rewards/digits/std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "entropy",
    "ratio/mean",
    "ratio/max",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/delta_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
    "guard/gap_mean",
    "guard/gap_max",
    "guard/gap_bound",
    "guard/effect",
    "reward_group_std",
    "seconds/sample",
    "seconds/score",
    "seconds/publish",
    "seconds/train",
    "seconds/update",
    "sampling/gap_mean",
    "sampling/gap_max",
    "sampling/gap_kl",
    "num_tokens",
    "tokens_per_second",
    "step_time",
    "seconds",
    "seconds_left",
    "peak_memory_gib",
    "kl",
}


def test_seconds_of_an_update(tmp_path):
    trainer = small_trainer(
        tmp_path,
        lambda completions, **_: time.sleep(0.2) or digits(completions),
        max_steps=5,
        logging_steps=2,
    )
    trainer.train()
    records = trainer.log_history
    assert all(record["step_time"] >= 0.2 for record in records)
    assert sum(
        record["step_time"] * updates for record, updates in zip(records, (2, 2, 1))
    ) == pytest.approx(records[-1]["seconds"], abs=0.1)


def test_an_evaluation_is_no_time_of_an_update(tmp_path):
    def slow_later(completions, trainer_state, **_):
        if not training:
            time.sleep(0.5)
        return digits(completions)

    trainer = small_trainer(
        tmp_path,
        slow_later,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        arguments=dict(eval_dataset=ROWS[:2]),
    )
    training, evaluate = [1], trainer.evaluate

    def evaluation(*given):
        training.clear()
        try:
            return evaluate(*given)
        finally:
            training.append(1)

    trainer.evaluate = evaluation
    trainer.train()
    updates = [record for record in trainer.log_history if "step_time" in record]
    assert max(record["step_time"] for record in updates) < 0.4 and updates[-1]["seconds"] > 0.5


class Interrupted(list):
    "Ctrl-C in the middle of the first walk through it, or of a later one."

    walks, at = 0, 1

    def __iter__(self):
        self.walks += 1
        for i, pair in enumerate(super().__iter__()):
            if self.walks == self.at and i == 3:
                raise KeyboardInterrupt
            yield pair


def test_ctrl_c_on_the_way_to_the_reference_leaves_the_policy(tmp_path):
    trainer = small_trainer(tmp_path, beta=0.1, arguments=dict(peft_config=LoraConfig(**LORA)))
    trainer.train()
    before, reference = weights_of(trainer.model), trainer.reference

    def same():
        return all(torch.equal(before[name], p) for name, p in weights_of(trainer.model).items())

    reference.start = Interrupted(reference.start)
    reference.start.at = 2  # while they take the policy's place
    with pytest.raises(KeyboardInterrupt), reference.policy(trainer.model):
        pass
    assert reference.start.walks == 2 and same()
    with pytest.raises(KeyboardInterrupt), reference.policy(trainer.model):
        reference.aside = Interrupted(reference.aside)  # on the way back
    assert not same()
    reference.restore()
    assert same() and not reference.aside


def test_the_log(tmp_path):
    trainer = small_trainer(
        tmp_path,
        max_steps=5,
        logging_steps=2,
        guard_every=2,
        beta=0.1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
    )
    batches = remember_batches(trainer)
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == trainer.log_history and [line["step"] for line in lines] == [2, 4, 5]
    summary = trainer.state.log_history[-1]
    of_run = {f"train_{name}" for name in ("loss", "runtime", "samples_per_second")}
    of_run.add("train_steps_per_second")
    of_update = {"loss", "grad_norm", "learning_rate", "num_tokens"}
    assert set(summary) == of_run | DOCUMENTED - of_update
    assert summary["train_loss"] == pytest.approx(statistics.mean(line["loss"] for line in lines))
    assert summary["reward"] == lines[2]["reward"], "no record was due after update 5"
    parts = [sum(v for k, v in line.items() if k.startswith("seconds/")) for line in lines]
    assert all(0 < part <= line["step_time"] + 1e-3 for part, line in zip(parts, lines))
    for line in lines:
        assert set(line) == DOCUMENTED and all(
            isinstance(v, (int, float)) and math.isfinite(v) for v in line.values()
        )
    tokens = [sum(len(p) + len(c) for p, c in ids_of(batch)) for batch in batches]
    assert [line["num_tokens"] for line in lines] == [sum(tokens[:n]) for n in (2, 4, 5)]
    lengths = [[len(c) for _, c in ids_of(batch)] for batch in batches]
    assert lines[0]["completions/mean_length"] == pytest.approx(
        statistics.mean(lengths[0] + lengths[1])
    ) and lines[0]["completions/max_length"] == max(lengths[0] + lengths[1])
    ended = [
        [c[-1] == trainer.tokenizer.eos_token_id for _, c in ids_of(batch)] for batch in batches
    ]
    assert lines[2]["completions/clipped_ratio"] == pytest.approx(1 - statistics.mean(ended[4]))
    assert (
        0 < lines[0]["entropy"] < math.log(trainer.model.config.vocab_size)
        and lines[0]["seconds"] < lines[1]["seconds"] < lines[2]["seconds"]
        and lines[2]["seconds_left"] == 0
    )
    assert 0 <= lines[0]["sampling/gap_max"] < 1e-4


def test_a_new_run_in_the_same_folder_begins_anew(tmp_path):
    first = small_trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    first.train()
    earlier = (tmp_path / "log.jsonl").read_text()
    second = small_trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1
    )
    second.train()
    assert [p.name for p in checkpoints(tmp_path)] == [
        "checkpoint-2"
    ]  # not one of the first run, which would be resumed by mistake
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2 and earlier in [
        p.read_text() for p in tmp_path.rglob("log.jsonl")
    ]
    assert {p.name for p in tmp_path.rglob("checkpoint-*")} == {
        "checkpoint-2",
        "checkpoint-4",
    }  # and the first run's are kept


def test_switches_are_put_back(tmp_path):
    import signal

    numbers = signal.SIGINT, signal.SIGTERM
    handlers = [signal.getsignal(number) for number in numbers]
    seen = []

    def looks(completions, **_):
        seen.append([signal.getsignal(number) for number in numbers])
        return digits(completions)

    for reward in (looks, Fails("raises", 0)):
        if reward is looks:
            small_trainer(tmp_path, reward).train()
        else:
            with pytest.raises(RewardError):
                small_trainer(tmp_path, reward).train()
        assert not torch.are_deterministic_algorithms_enabled()
        assert [signal.getsignal(number) for number in numbers] == handlers
    assert all(during != before for during, before in zip(seen[0], handlers))


def test_the_seed_decides_everything(tmp_path):
    histories = []
    for seed, noise in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(noise)
        trainer = small_trainer(
            tmp_path,
            seed=seed,
            arguments=dict(peft_config=LoraConfig(**LORA, lora_dropout=0.1)),
            learning_rate=0.1,
            max_steps=3,
        )
        trainer.train()
        histories.append(without_clocks(trainer.log_history))
    assert histories[0] == histories[1] != histories[2]


# adapters


@pytest.mark.parametrize(
    "where",
    [
        dict(target_modules=["q_proj", "v_proj"]),
        dict(
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
        dict(target_modules=["q_proj", "lm_head"]),
    ],
    ids=["attention", "experts", "head"],
)
def test_only_the_adapter_learns_and_others_can_load_it(where, tmp_path):
    model, tokenizer = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = small_trainer(
        tmp_path,
        model=model,
        max_steps=3,
        learning_rate=0.05,
        gradient_checkpointing=True,
        arguments=dict(peft_config=LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **where)),
    )
    start = weights_of(trainer.model)
    batches = remember_batches(trainer)
    trainer.train()
    assert start and all("lora_" in name for name in start) and moved(trainer.model, start) > 1e-2
    untouched = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): p
        for name, p in trainer.model.named_parameters()
        if "lora_" not in name
    }
    assert len(untouched) == len(before) and all(
        torch.equal(p, before[name]) for name, p in untouched.items()
    )

    with (
        torch.no_grad()
    ):  # the last rollout was drawn from the adapted policy: it is the one that saw two updates
        fresh = small_model()[0]
        prompt, completion = ids_of(batches[-1])[0]
        assert (
            batches[-1].rollout_logps[0, : len(completion)] - plain_logps(fresh, prompt, completion)
        ).abs().max() > 1e-3
        assert trainer.log_history[-1]["sampling/gap_max"] < 1e-4
        trainer.save_model(tmp_path / "adapter")
        assert not list((tmp_path / "adapter").glob("model*.safetensors"))
        loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
        ids = torch.tensor([tokenizer("12+34=").input_ids])
        assert torch.equal(
            loaded(ids).logits, trainer.model.eval()(ids).logits
        ) and not torch.equal(loaded(ids).logits, small_model()[0](ids).logits)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_recomputed_activations_change_nothing(kwargs, tmp_path):
    runs = []
    for again in (False, True):
        trainer = small_trainer(
            tmp_path,
            gradient_checkpointing=again,
            gradient_checkpointing_kwargs=kwargs if again else None,
            arguments=dict(peft_config=LoraConfig(**LORA)),
            learning_rate=0.05,
        )
        start = weights_of(trainer.model)
        trainer.train()
        assert moved(trainer.model, start) > 1e-2
        runs.append(weights_of(trainer.model))
    assert close(*runs, 1e-6)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_model_by_its_folder_trains_in_float32(kind, tmp_path):
    model, tokenizer = small_model()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(str(tmp_path / "model"), digits, small_config(tmp_path / "run"), ROWS)
    assert {p.dtype for p in trainer.model.parameters()} == {
        torch.float32
    } and trainer.tokenizer.padding_side == "left"  # TRL's default too
    trainer.train()
    half = GRPOTrainer(
        str(tmp_path / "model"),
        digits,
        small_config(tmp_path / "run", model_init_kwargs={"dtype": "bfloat16"}),
        ROWS,
    )
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("quantile", [0.3, 0.0])
def test_only_tokens_of_high_entropy(quantile, tmp_path):
    trainer = small_trainer(
        tmp_path, top_entropy_quantile=quantile, max_steps=1, optim="sgd", loss_type="dapo"
    )
    plain, batches = copy.deepcopy(trainer.model).eval(), remember_batches(trainer)
    trainer.train()
    losses, entropies = [], []
    for (prompt, completion), A in zip(ids_of(batches[0]), batches[0].advantages):
        logs = (
            plain(torch.tensor([prompt + completion]))
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
        )
        lp = logs[range(len(completion)), completion]
        losses.append(-A * (lp - lp.detach()).exp())
        entropies.append(-(logs.exp() * logs).sum(-1).detach())
    losses, entropies = torch.cat(losses), torch.cat(entropies)
    kept = entropies >= torch.quantile(entropies, 1 - quantile) - 1e-6
    loss = (losses * kept).sum() / len(losses)
    norm = torch.stack(
        [
            g.norm()
            for g in torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True)
            if g is not None
        ]
    ).norm()
    assert 0 < kept.sum() < len(kept) and trainer.log_history[0]["grad_norm"] == pytest.approx(
        norm.item(), rel=2e-3
    )


# a script written for TRL

SCRIPT = (
    """
import sys
from datasets import Dataset
from peft import LoraConfig
IMPORT

folder, out, form = sys.argv[1:]
questions = [(a, b) for a in range(1, 5) for b in range(1, 4)]
prompts = [f"{a}+{b}=" for a, b in questions]
"""
    'if form == "chat": prompts = [[{"role": "system", "content": "1"}, {"role": "user", '
    '"content": p}] for p in prompts]\n'
    'data = Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, '
    'b in questions], "level": [a for a, b in questions]})'
    """


def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def right(prompts, completions, answer, **kwargs):
    return [2.0 if text(c) == a else -0.5 * (len(text(c)) > 3) for c, a in zip(completions, answer)]


def brief(completions, completion_ids, level, **kwargs):
    assert len(completion_ids) == len(level)
    return [-0.1 * len(ids) for ids in completion_ids]


args = GRPOConfig(
"""
    '    output_dir=out, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=1, '
    'optim="adamw_torch", weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.99, '
    "max_grad_norm=0.1,\n"
    "    per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4, "
    "max_completion_length=5, temperature=1.0, top_p=1.0, top_k=0, min_p=None,\n"
    "    num_iterations=2, beta=0.04, epsilon=0.2, epsilon_high=0.28, delta=1.5, "
    'loss_type="bnpo", scale_rewards=True, reward_weights=[1.0, 0.5], '
    "mask_truncated_completions=True,\n"
    '    max_steps=4, logging_steps=1, save_strategy="steps", save_steps=2, '
    "save_total_limit=1, bf16=False, fp16=False, gradient_checkpointing=True, "
    'report_to="none", run_name="a run", seed=7,\n'
    "    log_completions=False, shuffle_dataset=True, disable_tqdm=True, "
    "remove_unused_columns=False, use_vllm=False,\n"
    ")\n"
    "trainer = GRPOTrainer(model=folder, reward_funcs=[right, brief], args=args, "
    "train_dataset=data, eval_dataset=data.select(range(4)),\n"
    "                      peft_config=LoraConfig(r=4, lora_alpha=8, "
    'target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))'
    """
result = trainer.train()
trainer.save_model(out + "/final")
"""
)
SAME_NAMES = {
    "reward",
    "reward_std",
    "rewards/right/mean",
    "rewards/right/std",
    "rewards/brief/mean",
    "rewards/brief/std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "entropy",
    "kl",
    "num_tokens",
    "step_time",
    "learning_rate",
    "loss",
    "grad_norm",
    "epoch",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["strings", "chat"])
def test_a_script_for_trl_runs_with_its_import_changed(form, tmp_path, monkeypatch):
    import runpy

    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runs = {}
    for library in ("trl", "grpo_nb"):
        script = tmp_path / f"{library}_script.py"
        script.write_text(
            SCRIPT.replace("IMPORT", f"from {library} import GRPOConfig, GRPOTrainer")
        )
        monkeypatch.setattr(
            sys, "argv", [str(script), str(tmp_path / "model"), str(tmp_path / library), form]
        )
        runs[library] = runpy.run_path(str(script), run_name="__main__")
    theirs, ours = (runs[library]["trainer"] for library in ("trl", "grpo_nb"))
    records = [[r for r in trainer.state.log_history if "loss" in r] for trainer in (theirs, ours)]
    assert len(records[0]) == len(records[1]) == 4 == runs["grpo_nb"]["result"].global_step
    assert SAME_NAMES <= set(records[0][0]) and SAME_NAMES <= set(records[1][0])
    last = [trainer.state.log_history[-1] for trainer in (theirs, ours)]
    assert set(last[0]) - set(last[1]) <= {"total_flos"}
    assert [r["learning_rate"] for r in records[1]] == pytest.approx(
        [r["learning_rate"] for r in records[0]]
    )
    assert [r["epoch"] for r in records[1]] == pytest.approx(
        [r["epoch"] for r in records[0]], abs=1e-4
    )
    assert (
        [p.name for p in checkpoints(tmp_path / "grpo_nb")]
        == [p.name for p in checkpoints(tmp_path / "trl")]
        == ["checkpoint-4"]
    )
    names = [set(weights_of(trainer.model)) for trainer in (theirs, ours)]
    assert names[0] == names[1]
    for library in runs:
        PeftModel.from_pretrained(small_model()[0], tmp_path / library / "final")


def test_a_second_run_is_a_run_of_its_own_and_the_optimizer_goes_on(tmp_path):
    trainer = small_trainer(tmp_path / "run", optim="adamw_torch", save_strategy="steps")
    trainer.train()
    first = [dict(record) for record in trainer.log_history]
    history, state = trainer.state.log_history, trainer.state
    trainer.train()
    second = trainer.log_history
    assert (
        trainer.state.log_history is history and trainer.state is state and state.global_step == 2
    )
    for name in ("step", "epoch", "learning_rate", "num_tokens"):
        assert [r[name] for r in second] == pytest.approx([r[name] for r in first], rel=0.2)
    assert [r["step"] for r in second] == [1, 2]
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {4}
    aside = tmp_path / "run" / "earlier-run-1"
    kept = [json.loads(line) for line in (aside / "log.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in kept] == [r["loss"] for r in first]
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2


def test_bars_of_other_threads_do_not_stop_a_sentence(monkeypatch, capsys):
    "tqdm reads a list of all bars while it writes, and a thread that uploads may change it."

    def changed(sentence, file=None):
        raise RuntimeError("Set changed size during iteration")

    monkeypatch.setattr(reporting.tqdm, "write", changed)
    reporting.say("a checkpoint is being written")
    assert capsys.readouterr().out == "a checkpoint is being written\n"
