"""Losses against TRL's own `_compute_loss`, and what must not change them."""

import ast
import inspect
import itertools
import math
import textwrap
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.grpo_trainer import GRPOTrainer

from grpo_nb.algorithm.losses import (
    LOSSES,
    WINDOW_TOKEN_LOSSES,
    check_loss_settings,
    clipped_loss,
    constant_mean,
    divergence_mask,
    grpo_loss,
    high_entropy_mask,
    k3,
    mean_of_means,
    mean_of_sums,
    off_policy_mask,
    rollout_correction,
)

TRL_DEFAULTS = dict(
    loss_type="dapo",
    importance_sampling_level="token",
    beta=0.0,
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    use_bias_correction_kl=False,
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    entropy_coef=0.0,
    sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
)
MAX_LENGTH = 9
LOSS_TYPES = list(LOSSES)
# of those, TRL has the ones that its method names
TRLS = [kind for kind in LOSSES if f'"{kind}"' in inspect.getsource(GRPOTrainer._compute_loss)]


def ours(batch, **options):
    "`grpo_loss` of a batch, without its warnings about odd settings (they have their own test)."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return grpo_loss(**batch, max_completion_length=MAX_LENGTH, **options)


def make_batch(seed=0, B=5, T=7, lengths=(7, 4, 1, 0, 5), spread=0.4):
    """A batch in float64: ragged, with one fully masked row, both signs of the advantage, ratios on
    both sides of the borders."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = (-randn(B, T).abs() - 0.05).requires_grad_()

    def gap():
        return logps.detach() + spread * randn(B, T)

    return dict(
        logps=logps,
        advantages=randn(B),
        mask=torch.arange(T) < torch.tensor(lengths)[:, None],
        old_logps=gap(),
        ref_logps=gap(),
        rollout_logps=gap(),
        # float32 values, because TRL's quantile is taken in float32
        entropies=(randn(B, T).abs().float().double()).requires_grad_(),
    )


class TorchWorld:
    "What TRL asks of accelerate, for one process."

    num_processes, sync_gradients = 1, False
    gather = gather_for_metrics = staticmethod(lambda x: x)
    pad_across_processes = staticmethod(lambda x, dim, pad_index: x)
    reduce = staticmethod(lambda x, reduction: x)


def trl(
    batch,
    *,
    num_items=None,
    rollout_weights=None,
    accumulation=1,
    steps_per_generation=1,
    **options,
):
    "TRL's loss and metrics, its method run with a stand-in self."
    assert set(options) <= set(TRL_DEFAULTS)
    o = SimpleNamespace(**{**TRL_DEFAULTS, **options}, steps_per_generation=steps_per_generation)
    metrics = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        args=o,
        accelerator=TorchWorld(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics=metrics,
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            batch["logps"],
            batch["entropies"],
            None,
        ),
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=MAX_LENGTH,
        use_vllm=rollout_weights is not None,
        vllm_importance_sampling_correction=rollout_weights is not None,
        epsilon_low=o.epsilon,
        loss_type=o.loss_type,
        importance_sampling_level=o.importance_sampling_level,
        beta=o.beta,
        off_policy_mask_threshold=o.off_policy_mask_threshold,
        top_entropy_quantile=o.top_entropy_quantile,
        entropy_coef=o.entropy_coef,
        _entropy_bonus_enabled=o.entropy_coef != 0,
        use_adaptive_entropy=False,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    trainer.epsilon_high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    trainer.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a)
    mask = batch["mask"].long()
    ids = torch.zeros_like(mask)
    inputs = dict(
        prompt_ids=ids,
        prompt_mask=ids,
        completion_ids=ids,
        completion_mask=mask,
        advantages=batch["advantages"],
        num_items_in_batch=mask.sum() if num_items is None else torch.as_tensor(num_items),
        importance_sampling_ratio=rollout_weights,
    )
    for name, theirs in (
        ("old_logps", "old_per_token_logps"),
        ("ref_logps", "ref_per_token_logps"),
        ("rollout_logps", "sampling_per_token_logps"),
    ):
        if batch.get(name) is not None:
            inputs[theirs] = batch[name]
    torch.set_default_dtype(torch.float64)  # its temperatures would be rounded to float32 otherwise
    try:
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    return loss, {name: values[0] for name, values in metrics["train"].items()}


def gradients(loss, batch, *names):
    return torch.autograd.grad(
        loss,
        [batch[name] for name in names],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


def assert_same_as_trl(batch, options, *, num_items=None, rollout_weights=None):
    theirs, their_metrics = trl(
        batch, num_items=num_items, rollout_weights=rollout_weights, **options
    )
    output = ours({**batch, "rollout_weights": rollout_weights, "num_items": num_items}, **options)
    torch.testing.assert_close(output.loss, theirs, rtol=0, atol=1e-9)
    for a, b in zip(
        gradients(output.loss, batch, "logps", "entropies"),
        gradients(theirs, batch, "logps", "entropies"),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    return output, their_metrics


# ---- TRL


def test_every_loss_of_trl_is_here():
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    asked = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and "loss_type" in ast.dump(n)]
    names = {n.value for one in asked for n in ast.walk(one) if isinstance(n, ast.Constant)}
    assert names == {*TRLS} and len(names) >= 8


GRID = list(
    itertools.product(TRLS, ["token", "sequence"], [0.0, 0.1], [None, 1.5], [None, 0.28, 5.0])
)


@pytest.mark.parametrize("loss_type,level,beta,delta,epsilon_high", GRID)
def test_every_loss_is_trls(loss_type, level, beta, delta, epsilon_high):
    options = dict(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        delta=delta,
        epsilon_high=epsilon_high,
    )
    output, _ = assert_same_as_trl(make_batch(), options)
    assert output.loss != 0


OPTIONS = {
    "off-policy mask": dict(off_policy_mask_threshold=0.05),
    "entropy mask": dict(top_entropy_quantile=0.4),
    "entropy mask, one token": dict(top_entropy_quantile=0.0),
    "bias-corrected KL": dict(beta=0.3, use_bias_correction_kl=True),
    "entropy bonus": dict(entropy_coef=0.05),
    "entropy bonus on the entropy mask": dict(entropy_coef=0.05, top_entropy_quantile=0.4),
    "other sapo": dict(sapo_temperature_pos=1.3, sapo_temperature_neg=2.0),
    "other vespo": dict(
        vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=2.2, vespo_lambda_neg=0.7
    ),
}
OPTIONS["all at once"] = {
    name: value for option in OPTIONS.values() for name, value in option.items()
}


@pytest.mark.parametrize("loss_type", TRLS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_trls(loss_type, level, option):
    assert_same_as_trl(
        make_batch(1), dict(loss_type=loss_type, importance_sampling_level=level, **OPTIONS[option])
    )


@pytest.mark.parametrize("loss_type", TRLS)
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_rollout_weights_are_trls(loss_type, mode):
    batch = make_batch(2)
    weights = rollout_correction(
        batch["old_logps"],
        batch["rollout_logps"],
        batch["mask"],
        mode=mode,
        clip_max=1.4,
        clip_min=0.5,
    )
    options = dict(loss_type=loss_type, beta=0.1)
    if loss_type == "vespo" and mode.startswith("sequence"):
        with pytest.raises(ValueError, match="token_truncate"):
            ours({**batch, "rollout_weights": weights}, **options)
    else:
        assert_same_as_trl(batch, options, rollout_weights=weights)


def _trl_weights(batch, mode, clip_max, clip_min):
    "The piece of TRL's `_generate_and_score_completions` that makes the weights, run as it stands."
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start, end = (
        source.index("per_token_logps_diff = ("),
        source.index("# Compute the per-token log probabilities for the reference model"),
    )
    lines = source[source.rindex("\n", 0, start) : source.rindex("\n", 0, end)]
    scope = dict(
        torch=torch,
        math=math,
        old_per_token_logps=batch["old_logps"],
        sampling_per_token_logps=batch["rollout_logps"],
        mask=batch["mask"],
        self=SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=clip_max,
            vllm_importance_sampling_clip_min=clip_min,
        ),
    )
    exec(textwrap.dedent(lines), scope)
    return scope["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("clip_max,clip_min", [(2.0, None), (1.2, 0.8), (None, 0.9)])
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_rollout_correction_is_trls(mode, clip_max, clip_min):
    batch = make_batch(3)
    batch["rollout_logps"][0, 2] = float("nan")  # the sampler gave no log-prob
    weights = rollout_correction(
        batch["old_logps"],
        batch["rollout_logps"],
        batch["mask"],
        mode=mode,
        clip_max=clip_max,
        clip_min=clip_min,
    )
    torch.testing.assert_close(
        weights, _trl_weights(batch, mode, clip_max, clip_min), rtol=0, atol=1e-12
    )
    assert not torch.allclose(weights, torch.ones_like(weights))


@pytest.mark.parametrize("loss_type", TRLS)
@pytest.mark.parametrize("option", [{}, OPTIONS["all at once"]])
def test_nothing_active_is_trls_and_zero(loss_type, option):
    batch = make_batch(4, lengths=(0,) * 5)
    output, _ = assert_same_as_trl(batch, dict(loss_type=loss_type, **option))
    assert output.loss == 0
    assert all(x.isfinite() and x == 0 for x in output.metrics.values())
    assert "kl" in output.metrics and "entropy" in output.metrics


@pytest.mark.parametrize("loss_type", TRLS)
def test_without_old_logps_is_trls(loss_type):
    batch = {**make_batch(5), "old_logps": None, "rollout_logps": None}
    output, _ = assert_same_as_trl(
        batch, dict(loss_type=loss_type, epsilon_high=5.0, off_policy_mask_threshold=0.1)
    )
    assert output.metrics["ratio/mean"] == output.metrics["ratio/max"] == 1


@pytest.mark.long
@given(
    seed=st.integers(0, 10_000),
    loss_type=st.sampled_from(TRLS),
    level=st.sampled_from(["token", "sequence"]),
    beta=st.sampled_from([0.0, 0.04, 1.0]),
    epsilon=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
    epsilon_high=st.sampled_from([None, 0.28, 5.0]),
    delta=st.sampled_from([None, 1.1, 1.5, 4.0]),
    bias=st.booleans(),
    threshold=st.sampled_from([None, 0.0, 0.1]),
    top=st.sampled_from([1.0, 0.5, 0.2]),
    coef=st.sampled_from([0.0, 0.01]),
    weighted=st.booleans(),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    spread=st.sampled_from([0.05, 0.5, 2.0]),
)
@settings(max_examples=300, deadline=None)
def test_any_mixture_is_trls(
    seed,
    loss_type,
    level,
    beta,
    epsilon,
    epsilon_high,
    delta,
    bias,
    threshold,
    top,
    coef,
    weighted,
    lengths,
    spread,
):
    batch = make_batch(seed, B=len(lengths), T=6, lengths=lengths, spread=spread)
    weights = (
        rollout_correction(
            batch["old_logps"],
            batch["rollout_logps"],
            batch["mask"],
            mode="token_mask",
            clip_min=0.2,
        )
        if weighted
        else None
    )
    assert_same_as_trl(
        batch,
        dict(
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=beta,
            epsilon=epsilon,
            epsilon_high=epsilon_high,
            delta=delta,
            use_bias_correction_kl=bias,
            off_policy_mask_threshold=threshold,
            top_entropy_quantile=top,
            entropy_coef=coef,
        ),
        rollout_weights=weights,
    )


@pytest.mark.parametrize("loss_type", TRLS)
def test_metrics_are_trls(loss_type):
    output, theirs = assert_same_as_trl(
        # TRL counts an empty completion in phi's mean, and here it counts in none
        make_batch(6, spread=0.6, lengths=(7, 4, 1, 3 if loss_type == "vespo" else 0, 5)),
        dict(loss_type=loss_type, beta=0.1, epsilon_high=0.9 if loss_type == "cispo" else 0.28),
    )
    names = {
        "kl": "kl",
        "entropy": "entropy",
        "clip_ratio/low_mean": "clip_ratio/low_mean",
        "clip_ratio/low_min": "clip_ratio/low_min",
        "clip_ratio/high_max": "clip_ratio/high_max",
        "clip_ratio/high_mean": "clip_ratio/high_mean",
        "clip_ratio/region_mean": "clip_ratio/region_mean",
        "cispo_clip_ratio": "clip_ratio/high_mean",
        "vespo/phi_seq_mean": "vespo/phi_seq_mean",
    }
    assert ("vespo/phi_seq_mean" in output.metrics) == (loss_type == "vespo")
    shared = {theirs_: name for theirs_, name in names.items() if theirs_ in theirs}
    assert len(shared) >= (5 if LOSSES[loss_type].per_token is clipped_loss else 2)
    for their_name, name in shared.items():
        assert output.metrics[name].item() == pytest.approx(theirs[their_name], abs=1e-7), name
    if LOSSES[loss_type].per_token is clipped_loss:
        assert (
            output.metrics["clip_ratio/low_mean"] > 0 and output.metrics["clip_ratio/high_mean"] > 0
        )


# ---- where TRL differs, on purpose


def test_trl_divides_dapo_by_a_share_of_the_generation_batch_and_we_by_the_window():
    """4 micro-batches a generation, accumulation 2, unequal lengths: TRL guesses the window's
    tokens as half of all; ours are counted."""
    batches = [
        make_batch(i, lengths=lengths)
        for i, lengths in enumerate([(7, 7, 7, 7, 7), (6,) * 5, (1,) * 5, (2,) * 5])
    ]
    tokens = [int(b["mask"].sum()) for b in batches]
    window = sum(tokens[:2])
    theirs = sum(
        trl(b, num_items=sum(tokens), accumulation=2, steps_per_generation=4)[0]
        for b in batches[:2]
    )
    exact = sum(ours(b, num_items=window).loss for b in batches[:2])
    torch.testing.assert_close(theirs * (sum(tokens) / 2), exact * window)
    assert not torch.isclose(theirs, exact, rtol=0.1)


def test_luspo_with_kl_does_not_see_padding_as_older_trl_did():
    "Multiplying by the length before masking counts the KL of the padding (trl#6654)."
    batch = make_batch(7)
    batch["ref_logps"] = batch["ref_logps"].masked_fill(
        ~batch["mask"], 0.0
    )  # padding, far from the policy's
    options = dict(loss_type="luspo", importance_sampling_level="sequence", beta=0.1)
    output, _ = assert_same_as_trl(batch, options)
    ratio = (
        ((batch["logps"] - batch["old_logps"]) * batch["mask"])
        .sum(-1, keepdim=True)
        .div(batch["mask"].sum(-1, keepdim=True).clamp(min=1))
        .exp()
    )
    token_loss = clipped_loss(ratio=ratio, advantages=batch["advantages"][:, None]) + 0.1 * k3(
        batch["logps"], batch["ref_logps"]
    )
    torch.testing.assert_close(output.loss, (token_loss * batch["mask"]).sum(-1).mean())
    leaking = (token_loss * batch["mask"].sum(-1, keepdim=True)).mean()
    assert not torch.isclose(output.loss, leaking, rtol=0.05)


def test_bias_correction_is_off_here_and_on_in_trl():
    from trl import GRPOConfig

    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    batch = make_batch(8)
    default, off, on = (
        ours(batch, beta=0.5),
        ours(batch, beta=0.5, use_bias_correction_kl=False),
        ours(batch, beta=0.5, use_bias_correction_kl=True),
    )
    assert default.loss == off.loss and not torch.isclose(off.loss, on.loss)


# ---- what must not change a loss

EVERYTHING = dict(
    beta=0.1,
    delta=1.5,
    off_policy_mask_threshold=0.1,
    dppo_divergence="kl",
    dppo_threshold=0.01,
    top_entropy_quantile=0.6,
    entropy_coef=0.02,
)


def rows(batch, index):
    return {name: x[index] for name, x in batch.items()}


@pytest.mark.parametrize("fill", [0.0, 1e30, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_changes_nothing_whatever_it_holds(loss_type, level, fill):
    batch = make_batch(9)
    weights = rollout_correction(batch["old_logps"], batch["rollout_logps"], batch["mask"])
    options = dict(loss_type=loss_type, importance_sampling_level=level, **EVERYTHING)
    short = ours({**batch, "rollout_weights": weights}, **options)

    def pad(x):
        filled = x.detach().masked_fill(~batch["mask"], fill)
        return torch.cat([filled, torch.full((5, 3), fill, dtype=x.dtype)], 1)

    long = {
        **{
            name: pad(x)
            for name, x in {**batch, "rollout_weights": weights}.items()
            if name not in ("advantages", "mask")
        },
        "advantages": batch["advantages"],
        "mask": torch.cat([batch["mask"], torch.zeros(5, 3, dtype=torch.bool)], 1),
    }
    long["logps"].requires_grad_(), long["entropies"].requires_grad_()
    padded = ours(long, **options)
    torch.testing.assert_close(padded.loss, short.loss, rtol=0, atol=1e-12)
    for wide, narrow in zip(
        gradients(padded.loss, long, "logps", "entropies"),
        gradients(short.loss, batch, "logps", "entropies"),
    ):
        torch.testing.assert_close(wide[:, :7], narrow, rtol=0, atol=1e-12)
        assert (wide[:, 7:] == 0).all()
    for name in short.metrics:
        torch.testing.assert_close(padded.metrics[name], short.metrics[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_order_of_sequences_changes_nothing(loss_type, level):
    batch, order = make_batch(10), torch.tensor([3, 0, 4, 1, 2])
    options = dict(loss_type=loss_type, importance_sampling_level=level, **EVERYTHING)
    a, b = ours(batch, **options), ours(rows(batch, order), **options)
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(
        *gradients(a.loss, batch, "logps"), *gradients(b.loss, batch, "logps")
    )


SPLITS = [[[0, 1, 2], [3, 4, 5]], [[5, 0], [1, 4], [2, 3]], [[i] for i in range(6)]]


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("loss_type", WINDOW_TOKEN_LOSSES)
def test_window_losses_do_not_feel_the_cut_into_micro_batches(loss_type, parts):
    "Masked sums (num_items=1), gradients added and divided once: exact, with KL and entropy bonus."
    batch = make_batch(11, B=6, lengths=(7, 2, 5, 0, 1, 6))
    options = dict(loss_type=loss_type, beta=0.1, entropy_coef=0.02, epsilon_high=5.0)
    whole = ours(batch, **options)
    tokens = batch["mask"].sum()
    known = sum(ours(rows(batch, part), num_items=tokens, **options).loss for part in parts)
    summed = sum(ours(rows(batch, part), num_items=1, **options).loss for part in parts)
    torch.testing.assert_close(known, whole.loss)
    for a, b, c in zip(
        *(gradients(x, batch, "logps", "entropies") for x in (whole.loss, known, summed))
    ):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-15)
        torch.testing.assert_close(c / tokens, a, rtol=0, atol=1e-15)


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "sapo"])
def test_sequence_losses_are_means_over_equal_micro_batches(loss_type, parts):
    batch = make_batch(11, B=6, lengths=(7, 2, 5, 0, 1, 6))
    options = dict(
        loss_type=loss_type,
        importance_sampling_level="sequence" if loss_type == "luspo" else "token",
        beta=0.1,
    )
    mean = sum(ours(rows(batch, part), **options).loss for part in parts) / len(parts)
    torch.testing.assert_close(mean, ours(batch, **options).loss)


def test_bnpo_feels_the_cut_and_is_grpo_one_sequence_at_a_time():
    batch = make_batch(11, B=6, lengths=(7, 2, 5, 0, 1, 6))
    one_by_one = sum(ours(rows(batch, [i]), loss_type="bnpo").loss for i in range(6)) / 6
    torch.testing.assert_close(one_by_one, ours(batch, loss_type="grpo").loss)
    assert not torch.isclose(one_by_one, ours(batch, loss_type="bnpo").loss)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_fully_masked_row_adds_nothing_to_the_sums_and_counts_among_the_rows(loss_type, level):
    batch, options = (
        make_batch(12),
        dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.01),
    )
    without = ours(rows(batch, [0, 1, 2, 4]), **options)
    assert not batch["mask"][3].any()
    counts_rows = LOSSES[loss_type].reduction in (mean_of_means, mean_of_sums, constant_mean)
    plain = dict(
        loss_type=loss_type, importance_sampling_level=level, beta=0.1
    )  # the bonus is a mean over tokens in every loss
    torch.testing.assert_close(
        ours(batch, **plain).loss,
        ours(rows(batch, [0, 1, 2, 4]), **plain).loss * (4 / 5 if counts_rows else 1),
    )
    for name, value in ours(batch, **options).metrics.items():
        torch.testing.assert_close(value, without.metrics[name], msg=name)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_is_linear_in_what_comes_from_above(loss_type):
    batch = make_batch(13)
    loss = ours(batch, loss_type=loss_type, **EVERYTHING).loss
    torch.testing.assert_close(
        *gradients(2 * loss, batch, "logps"), 2 * gradients(loss, batch, "logps")[0]
    )


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_at_ratio_one_the_gradient_is_the_policy_gradient_and_the_group_loss_is_zero(loss_type):
    batch = {
        name: x
        for name, x in make_batch(14, lengths=(4,) * 5).items()
        if name in ("logps", "advantages", "mask")
    }
    batch["advantages"] = batch["advantages"] - batch["advantages"].mean()
    loss = ours(batch, loss_type=loss_type, epsilon_high=5.0).loss
    divisors = {constant_mean: 5 * MAX_LENGTH, mean_of_sums: 5}
    divisor = divisors.get(LOSSES[loss_type].reduction, 20)
    policy_gradient = (
        -(batch["advantages"][:, None] * batch["logps"] * batch["mask"]).sum() / divisor
    )
    torch.testing.assert_close(
        *gradients(loss, batch, "logps"), *gradients(policy_gradient, batch, "logps")
    )
    # cispo, vespo, reinforce carry log-probs in their value, sapo 2/tau, which differs by sign
    assert (abs(loss.item()) < 1e-15) == LOSSES[loss_type].zero_at_start


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_narrow_floats_are_computed_in_float32(loss_type, dtype):
    batch = {
        name: x.detach() if x.dtype == torch.bool else x.detach().to(dtype)
        for name, x in make_batch(15).items()
    }
    wide = {name: x if x.dtype == torch.bool else x.double() for name, x in batch.items()}
    batch["logps"].requires_grad_()
    output = ours(batch, loss_type=loss_type, beta=0.1)
    assert output.loss.dtype == torch.float32 and all(
        x.dtype == torch.float32 and not x.requires_grad and x.dim() == 0
        for x in output.metrics.values()
    )
    torch.testing.assert_close(
        output.loss.double(), ours(wide, loss_type=loss_type, beta=0.1).loss, rtol=1e-5, atol=1e-6
    )
    assert gradients(output.loss, batch, "logps")[0].isfinite().all()


def test_without_beta_the_reference_is_only_measured():
    batch = make_batch(20)
    batch["ref_logps"][0, 0] = 1e4  # the KL overflows
    assert ours(batch).loss == ours({**batch, "ref_logps": None}).loss
    assert "kl" not in ours({**batch, "ref_logps": None}).metrics


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_the_mask_may_be_bool_or_numbers(kind):
    batch = make_batch(16)
    assert ours({**batch, "mask": batch["mask"].to(kind)}).loss == ours(batch).loss


@pytest.mark.parametrize("name", ["old_logps", "ref_logps", "rollout_logps"])
def test_other_policies_are_constants(name):
    batch = make_batch(17)
    loss = ours(
        {**batch, name: batch[name].requires_grad_()}, beta=0.1, off_policy_mask_threshold=0.1
    ).loss
    assert (gradients(loss, batch, name)[0] == 0).all()


@given(seed=st.integers(0, 10_000), epsilon=st.floats(0.01, 0.5), extra=st.floats(-0.9, 2.0))
@settings(max_examples=60, deadline=None)
def test_clip_metrics_count_the_tokens_without_a_gradient(seed, epsilon, extra):
    batch = make_batch(seed, spread=0.8)
    output = ours(batch, epsilon=epsilon, delta=1 + epsilon + extra)
    (gradient,) = gradients(output.loss, batch, "logps")
    silent = ((gradient == 0) & batch["mask"]).sum() / batch["mask"].sum()
    assert (
        output.metrics["clip_ratio/region_mean"] + output.metrics["clip_ratio/delta_mean"]
    ).item() == pytest.approx(silent.item())


def test_delta_bites_only_bad_tokens_beyond_it():
    ratio = torch.tensor([[0.1], [1.0], [1.6], [9.0]], dtype=torch.float64).repeat(2, 1)
    advantages = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4, dtype=torch.float64)
    differs = clipped_loss(ratio=ratio, advantages=advantages, delta=1.5) != clipped_loss(
        ratio=ratio, advantages=advantages
    )
    assert differs.squeeze(1).tolist() == [False] * 6 + [True] * 2


# ---- masks of tokens and completions


@given(
    seed=st.integers(0, 1000),
    top=st.floats(0, 1),
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_high_entropy_mask_is_trls(seed, top, lengths):
    batch = make_batch(seed, B=len(lengths), T=6, lengths=lengths)
    entropies = batch["entropies"].detach().float()
    wanted = GRPOTrainer.get_high_entropy_mask(
        SimpleNamespace(accelerator=TorchWorld()), entropies, batch["mask"].long(), 1 - top
    )
    assert torch.equal(high_entropy_mask(entropies, batch["mask"], top), wanted)


def test_entropy_threshold_may_come_from_all_processes():
    batch = make_batch(18)
    entropies, mask = batch["entropies"].detach(), batch["mask"]
    everywhere = torch.cat([entropies[mask], torch.full((500,), 100.0)])
    assert high_entropy_mask(entropies, mask, 0.5).sum() == round(mask.sum().item() / 2 + 0.25)
    assert not high_entropy_mask(entropies, mask, 0.5, gathered=everywhere).any()
    ready = high_entropy_mask(entropies, mask, 0.5)
    assert ours({**batch, "entropy_mask": ready}).loss == ours(batch, top_entropy_quantile=0.5).loss
    assert (
        ours({**batch, "entropy_mask": ready, "entropies": None}, top_entropy_quantile=0.5).loss
        == ours(batch, top_entropy_quantile=0.5).loss
    )


def test_off_policy_mask_is_trls():
    batch = make_batch(19)
    batch["rollout_logps"][1, 1] = float("nan")
    A, mask = batch["advantages"][:, None], batch["mask"]
    for threshold in (0.0, 0.1, 0.3):
        kept = off_policy_mask(batch["logps"], batch["rollout_logps"], A, mask, threshold)
        assert torch.equal(
            kept.long(),
            GRPOTrainer.get_off_policy_mask(
                A, batch["logps"], batch["rollout_logps"], mask.long(), threshold
            ),
        )


def plain_divergence(kind, q, p):
    "Of two coins, by the definitions: half the sum of differences, and the sum of q log(q / p)."
    pairs = [(q, p), (1 - q, 1 - p)]
    if kind == "tv":
        return sum(abs(a - b) for a, b in pairs) / 2
    return sum(a * math.log(a / b) for a, b in pairs)


@pytest.mark.parametrize("kind, threshold", [("tv", 0.1), ("kl", 0.02)])
def test_divergence_mask_by_its_definition(kind, threshold):
    batch = make_batch(19)
    logps, sampled = (batch[n].detach().clamp(max=-0.01) for n in ("logps", "rollout_logps"))
    A = batch["advantages"]
    sampled[0, 2] = float("nan")
    kept = divergence_mask(logps, sampled, A[:, None], kind, threshold)
    for i, t in itertools.product(range(5), range(7)):
        p, q = math.exp(logps[i, t]), math.exp(sampled[i, t])
        away = A[i] > 0 and p > q or A[i] < 0 and p < q
        far = (i, t) != (0, 2) and plain_divergence(kind, q, p) > threshold
        assert bool(kept[i, t]) == (not (away and far))
    assert kept.any() and not kept.all()


def test_masked_tokens_have_no_gradient_and_the_others_that_of_the_loss_without_the_mask():
    batch = make_batch(20)
    batch["logps"].requires_grad_()
    A = batch["advantages"][:, None]
    kept = divergence_mask(batch["logps"], batch["rollout_logps"], A, "tv", 0.05)
    settings = [dict(dppo_divergence="tv", dppo_threshold=0.05), {}]
    outputs = [ours(batch, num_items=10, **one) for one in settings]
    masked, plain = (torch.autograd.grad(o.loss, batch["logps"])[0] for o in outputs)
    assert torch.equal(masked, plain * kept) and not torch.equal(masked, plain)
    share = (~kept & batch["mask"].bool()).sum() / batch["mask"].sum()
    assert float(outputs[0].metrics["dppo/masked"]) == pytest.approx(float(share))


def test_probabilities_of_one_are_no_distance():
    for kind in ("tv", "kl"):
        near = torch.tensor([[0.0, -1e-9]]), torch.tensor([[-1e-9, 0.0]])
        assert divergence_mask(*near, torch.tensor([[1.0, -1.0]]), kind, 0.01).all()
    with pytest.raises(ValueError, match="dppo_divergence is 'js', and it must be one of"):
        check_loss_settings(dppo_divergence="js")


# ---- rollout weights


def test_rollout_weights_stay_finite_on_a_long_completion():
    old, rollout, mask = (
        torch.full((1, 4000), -1.0),
        torch.full((1, 4000), -3.0),
        torch.ones(1, 4000),
    )
    assert rollout_correction(old, rollout, mask, mode="sequence_truncate").item() == 2
    assert rollout_correction(old, rollout, mask, mode="sequence_mask").item() == 0
    assert rollout_correction(old.half(), rollout.half(), mask).dtype == torch.float32


@given(seed=st.integers(0, 1000), clip_max=st.floats(1.0, 4.0))
@settings(max_examples=30, deadline=None)
def test_untruncated_weights_turn_the_samplers_mean_into_the_trainers(seed, clip_max):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = (
        torch.randn(1, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    f, every = torch.randn(1, 50, generator=generator, dtype=torch.float64), torch.ones(1, 50)
    weights = rollout_correction(old, rollout, every, clip_max=1e9)
    torch.testing.assert_close((rollout.exp() * weights * f).sum(), (old.exp() * f).sum())
    assert rollout_correction(old, rollout, every, clip_max=clip_max).max() <= clip_max


# ---- sentences

LOGPS, A, MASK = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(loss_type="dr-grpo"), "Did you mean 'dr_grpo'"),
        (dict(loss_type="DAPO"), "must be one of 'grpo'"),
        (dict(loss_type="dr_grpo"), "max_completion_length"),
        (dict(importance_sampling_level="tokens"), "Did you mean 'token'"),
        (dict(beta=0.1), "ref_logps"),
        (dict(beta=-0.1, ref_logps=LOGPS), "beta is -0.1"),
        (dict(epsilon=-0.2), "epsilon is -0.2"),
        (dict(epsilon=float("nan")), "epsilon is nan"),
        (dict(epsilon_high=-0.2), "epsilon_high is -0.2"),
        (dict(delta=0.0), "delta is 0.0"),
        (dict(sapo_temperature_neg=0.0), "sapo_temperature_neg is 0.0"),
        (dict(vespo_lambda_pos=0.0), "vespo_lambda_pos is 0.0"),
        (dict(top_entropy_quantile=1.2), "from 0 to 1"),
        (dict(top_entropy_quantile=0.2), "needs entropies"),
        (dict(entropy_coef=0.1), "needs entropies"),
        (dict(old_logps=torch.zeros(2, 4)), "old_logps has shape (2, 4)"),
        (dict(ref_logps=torch.zeros(3)), "ref_logps has shape (3,)"),
        (dict(mask=torch.ones(2)), "mask has shape (2,)"),
        (dict(advantages=torch.zeros(3)), "advantages has shape (3,)"),
        (dict(advantages=torch.zeros(2, 1)), "advantages has shape (2, 1)"),
        (dict(rollout_weights=torch.zeros(2)), "rollout_weights has shape (2,)"),
        (dict(logps=torch.zeros(3)), "logps has shape (3,)"),
        (dict(logps=torch.zeros(2, 0), mask=torch.ones(2, 0)), "at least one"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, words):
    with pytest.raises(ValueError) as error:
        grpo_loss(**{**dict(logps=LOGPS, advantages=A, mask=MASK), **arguments})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (dict(mode="tokens_truncate"), "Did you mean 'token_truncate'"),
        (dict(clip_max=None), "at least one"),
        (dict(clip_max=1.0, clip_min=1.0), "clip_min < clip_max"),
        (dict(clip_max=-1.0), "clip_max > 0"),
        (dict(mask=torch.ones(2)), "must have one shape"),
    ],
)
def test_bad_corrections_get_a_sentence(arguments, words):
    with pytest.raises(ValueError) as error:
        rollout_correction(**{**dict(old_logps=LOGPS, rollout_logps=LOGPS, mask=MASK), **arguments})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(delta=1.2), "delta is 1.2"),
        (dict(delta=1.25, epsilon_high=0.28), "delta is 1.25"),
        (dict(loss_type="sapo", delta=1.5), "delta has no effect"),
        (dict(epsilon=1.2), "never negative"),
        (dict(loss_type="cispo"), "5.0 is recommended"),
        (dict(loss_type="luspo"), "'sequence'"),
        (dict(loss_type="reinforce", epsilon=0.1), "epsilon has no effect"),
        (
            dict(loss_type="reinforce", importance_sampling_level="sequence"),
            "importance_sampling_level has no effect",
        ),
        (
            dict(loss_type="vespo", importance_sampling_level="sequence"),
            "leave importance_sampling_level",
        ),
        (dict(loss_type="dapo", importance_sampling_level="sequence"), "use loss_type 'grpo'"),
    ],
)
def test_odd_settings_warn(options, words):
    with pytest.warns(UserWarning) as caught:
        grpo_loss(LOGPS, A, MASK, **options)
    assert any(words in str(w.message) for w in caught)
    assert any(words in sentence for sentence in check_loss_settings(**options))


def test_an_entropy_bonus_that_trains_nothing_warns():
    with pytest.warns(UserWarning, match="trains nothing"):
        grpo_loss(LOGPS.clone().requires_grad_(), A, MASK, entropies=LOGPS, entropy_coef=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(delta=1.5),
        dict(epsilon_high=0.28, delta=1.5, loss_type="bnpo"),
        dict(loss_type="cispo", epsilon_high=5.0),
        dict(loss_type="sapo"),
        dict(loss_type="vespo"),
        dict(loss_type="reinforce"),
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        dict(loss_type="grpo", importance_sampling_level="sequence"),
        dict(loss_type="dr_grpo", max_completion_length=8),
    ],
)
def test_usual_settings_do_not_warn(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grpo_loss(LOGPS, A, MASK, **options)
