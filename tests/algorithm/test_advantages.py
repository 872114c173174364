"""The advantages against TRL's own lines, the symmetries they must have, and what is refused."""

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.algorithm.advantages import AGGREGATIONS, SCALES, group_advantages

NAN = math.nan
WAYS = [(scale, "sum_then_normalize") for scale in SCALES] + [("group", "normalize_then_sum")]
ways = pytest.mark.parametrize("scale, aggregation", WAYS)


def trl_source(name):
    return ast.parse(
        Path(importlib.util.find_spec("trl").origin).with_name("trainer").joinpath(name).read_text()
    )


def assigned(statement):
    return (
        statement.targets[0].id
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        else None
    )


def trl_code():
    """TRL's nanstd, and the block of its trainer from `unscorable_mask = ...` to `advantages =
    torch.nan_to_num(...)`, compiled as they stand."""
    nanstd = next(
        node for node in trl_source("utils.py").body if getattr(node, "name", "") == "nanstd"
    )
    method = next(
        node
        for node in ast.walk(trl_source("grpo_trainer.py"))
        if getattr(node, "name", "") == "_generate_and_score_completions"
    )
    names = [assigned(statement) for statement in method.body]
    start = names.index("unscorable_mask")
    block = method.body[start : names.index("advantages", start) + 1]
    return compile(ast.Module([nanstd, *block], []), "trl", "exec")


TRL = trl_code()


def trl_advantages(rewards, num_generations, weights, scale, aggregation):
    trainer = SimpleNamespace(
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
        reward_weights=weights,
        reward_funcs=[None] * rewards.shape[1],
    )
    scope = dict(
        torch=torch,
        self=trainer,
        rewards_per_func=rewards.clone(),
        num_generations=num_generations,
        device=rewards.device,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(
        rewards.dtype
    )  # its Bessel factor is a quotient of integers, which takes the default type
    try:
        exec(TRL, scope)
    finally:
        torch.set_default_dtype(default)
    return scope["advantages"], scope["is_std_zero"].double().mean().item()


def random_rewards(seed, groups=5, G=4, K=3, missing=0.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rewards = (
        torch.randn(groups * G, K, generator=generator, dtype=dtype)
        * torch.tensor([0.1, 1.0, 30.0], dtype=dtype)[:K]
    )
    rewards[torch.rand(rewards.shape, generator=generator) < missing] = NAN
    return rewards


def advantages(rewards, G, scale, aggregation, **kwargs):
    return group_advantages(rewards, G, scale=scale, aggregation=aggregation, **kwargs).values


# ---- against TRL


@pytest.mark.filterwarnings("ignore:scale=")
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("scale", SCALES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 6),
    G=st.integers(2, 9),
    K=st.integers(1, 3),
    missing=st.sampled_from([0.0, 0.2, 0.6]),
    weights=st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=3, max_size=3),
)
def test_same_as_trl(scale, aggregation, seed, groups, G, K, missing, weights):
    rewards, weights = (
        random_rewards(seed, groups, G, K, missing),
        torch.tensor(weights[:K], dtype=torch.float64),
    )
    theirs, _ = trl_advantages(rewards, G, weights, scale, aggregation)
    ours = advantages(rewards, G, scale, aggregation, weights=weights)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_zero_std_fraction_is_trls_when_all_is_scored(scale):
    rewards = torch.randint(0, 2, (200, 1), generator=torch.Generator().manual_seed(0)).float()
    _, theirs = trl_advantages(rewards, 4, torch.ones(1), scale, "sum_then_normalize")
    assert 0 < theirs < 1
    assert group_advantages(rewards, 4, scale=scale).zero_std_fraction == pytest.approx(theirs)


def test_statistics_are_those_of_the_weighted_sum():
    rewards, weights = random_rewards(0), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    total = (rewards @ weights).view(5, 4)
    for scale, aggregation in WAYS:
        result = group_advantages(rewards, 4, weights=weights, scale=scale, aggregation=aggregation)
        torch.testing.assert_close(result.group_mean, total.mean(1))
        torch.testing.assert_close(result.group_std, total.std(1))


# ---- symmetries


@ways
def test_shift_of_a_reward_function_changes_nothing(scale, aggregation):
    rewards = random_rewards(1)
    shifted = rewards + torch.tensor([5.0, -3.0, 100.0], dtype=torch.float64)
    torch.testing.assert_close(
        advantages(shifted, 4, scale, aggregation),
        advantages(rewards, 4, scale, aggregation),
        atol=1e-9,
        rtol=1e-9,
    )


def test_shift_of_one_group_changes_nothing_unless_the_batch_scales():
    rewards = random_rewards(2, K=1)
    shifted = rewards + torch.arange(5.0, dtype=torch.float64).repeat_interleave(4)[:, None]
    for scale in ("group", "none"):
        torch.testing.assert_close(
            group_advantages(shifted, 4, scale=scale).values,
            group_advantages(rewards, 4, scale=scale).values,
        )
    assert (
        group_advantages(shifted, 4, scale="batch").values.abs()
        < group_advantages(rewards, 4, scale="batch").values.abs()
    ).all()


@pytest.mark.parametrize("factor", [0.01, 7.0, 1000.0])
def test_units_of_the_reward(factor):
    rewards = random_rewards(3)
    for scale, aggregation in WAYS:
        before, after = (
            advantages(r, 4, scale, aggregation, eps=0.0) for r in (rewards, factor * rewards)
        )
        torch.testing.assert_close(after, before * (factor if scale == "none" else 1))
    bound = (
        1e-4 / (factor * group_advantages(rewards, 4).group_std.min())
        + 1e-4 / group_advantages(rewards, 4).group_std.min()
    )
    ratio = group_advantages(factor * rewards, 4).values / group_advantages(rewards, 4).values
    assert (ratio - 1).abs().max() <= bound  # what eps = 1e-4 may change


@ways
def test_order_inside_a_group_and_of_the_groups(scale, aggregation):
    rewards, generator = random_rewards(4, missing=0.2), torch.Generator().manual_seed(4)
    inside = torch.cat([4 * g + torch.randperm(4, generator=generator) for g in range(5)])
    groups = (4 * torch.randperm(5, generator=generator)[:, None] + torch.arange(4)).flatten()
    for order in (inside, groups):
        torch.testing.assert_close(
            advantages(rewards[order], 4, scale, aggregation),
            advantages(rewards, 4, scale, aggregation)[order],
        )


@ways
def test_an_unscored_completion_might_as_well_be_absent(scale, aggregation):
    rewards, present = (
        random_rewards(5, G=6),
        torch.tensor([True, False, True, True, False, True]).repeat(5),
    )
    with_gaps = torch.where(present[:, None], rewards, NAN)
    values = advantages(with_gaps, 6, scale, aggregation)
    torch.testing.assert_close(values[present], advantages(rewards[present], 4, scale, aggregation))
    assert (values[~present] == 0).all()


@ways
def test_each_group_sums_to_zero(scale, aggregation):
    values = advantages(random_rewards(6, missing=0.3), 4, scale, aggregation)
    torch.testing.assert_close(values.view(5, 4).sum(1), torch.zeros(5, dtype=torch.float64))
    assert values.abs().sum() > 1


# ---- groups that teach nothing


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.3, 1e6 + 0.1, 1e12])
def test_equal_rewards_give_exactly_zero(scale, aggregation, dtype, value):
    for G in range(2, 17):
        rewards = torch.cat([torch.full((G,), value, dtype=dtype), torch.arange(G).to(dtype)])
        result = group_advantages(rewards, G, scale=scale, aggregation=aggregation, eps=0.0)
        assert (result.values[:G] == 0).all() and (result.values[G:] != 0).any()
        assert result.group_std[0] == 0 and result.zero_std_fraction == 0.5


def test_rewards_that_differ_by_rounding_alone_are_equal():
    rewards = torch.full((4,), 1000.1)
    rewards[0] = torch.nextafter(rewards[0], torch.tensor(math.inf))
    assert rewards[0] > rewards[1]
    result = group_advantages(rewards, 4)
    assert (
        (result.values == 0).all()
        and result.group_std.item() == 0
        and result.zero_std_fraction == 1
    )


def test_a_small_but_real_difference_counts():
    result = group_advantages(torch.tensor([1000.0, 1000.1, 1000.0, 1000.0]), 4)
    assert result.values[1] > 1.4 and result.zero_std_fraction == 0


@ways
@pytest.mark.parametrize(
    "group", [[NAN] * 4, [5.0, NAN, NAN, NAN]], ids=["none scored", "one scored"]
)
def test_fewer_than_two_scored(scale, aggregation, group):
    result = group_advantages([*group, 1.0, 0.0, 0.0, 2.0], 4, scale=scale, aggregation=aggregation)
    assert (result.values[:4] == 0).all() and (result.values[4:] != 0).all()
    assert result.group_mean[0] == (0 if math.isnan(group[0]) else 5) and result.group_std[0] == 0
    assert (
        result.group_mean.isfinite().all()
        and result.group_std.isfinite().all()
        and result.zero_std_fraction == 0.5
    )


@ways
def test_nothing_scored_at_all_is_finite(scale, aggregation):
    result = group_advantages([[None, None]] * 4, 2, scale=scale, aggregation=aggregation, eps=0.0)
    assert (
        (result.values == 0).all()
        and (result.group_mean == 0).all()
        and (result.group_std == 0).all()
        and result.zero_std_fraction == 1
    )


# ---- types


@pytest.mark.parametrize(
    "given_as, comes_as",
    [
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_and_shapes(given_as, comes_as):
    result = group_advantages(torch.tensor([1, 0, 0, 0, 1, 1]).to(given_as), 3)
    assert result.values.dtype == result.group_mean.dtype == result.group_std.dtype == comes_as
    assert (
        result.values.shape == (6,)
        and result.group_mean.shape == result.group_std.shape == (2,)
        and isinstance(result.zero_std_fraction, float)
    )
    torch.testing.assert_close(
        result.values[:3].float(), torch.tensor([1.1545, -0.5773, -0.5773]), atol=1e-4, rtol=0
    )


def test_float16_rewards_do_not_overflow():
    values = group_advantages(
        torch.tensor([60000.0, 0.0, 60000.0, 0.0], dtype=torch.float16), 4, weights=[10.0]
    ).values
    torch.testing.assert_close(values, torch.tensor([1.0, -1.0, 1.0, -1.0]) * 0.75**0.5)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_largest_rewards_have_the_advantages_of_small_ones(scale):
    "In float32 the squares of 1e20 are infinite, those of 1e16 are not."
    large, small = (
        group_advantages([size, 0.0, 0.0, 0.0], 4, scale=scale, eps=0.0).values
        for size in (1e16, 1.0)
    )
    torch.testing.assert_close(large, small)
    torch.testing.assert_close(small, torch.tensor([1.5, -0.5, -0.5, -0.5]))


def test_lists_and_tensors_agree():
    rows = [[1.0, None], [0.0, 2.0], [0.5, 1.0], [None, None]]
    tensor = torch.tensor([[NAN if r is None else r for r in row] for row in rows])
    assert torch.equal(
        group_advantages(rows, 4, weights=[1, 2]).values,
        group_advantages(tensor, 4, weights=torch.tensor([1, 2])).values,
    )


def test_the_input_is_left_alone_and_no_gradient_flows():
    rewards, weights = (
        random_rewards(7, missing=0.2).requires_grad_(),
        torch.ones(3, dtype=torch.float64, requires_grad=True),
    )
    before = rewards.detach().clone()
    for scale, aggregation in WAYS:
        result = group_advantages(rewards, 4, weights=weights, scale=scale, aggregation=aggregation)
        assert not any(
            t.requires_grad for t in (result.values, result.group_mean, result.group_std)
        )
    torch.testing.assert_close(rewards.detach(), before, equal_nan=True, atol=0, rtol=0)


# ---- refusals


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (dict(rewards=[1.0, 0.0], num_generations=1), "num_generations is 1.*from 2 on"),
        (dict(rewards=[1.0, 0.0], num_generations=0), "num_generations is 0"),
        (dict(rewards=[1.0, 0.0], num_generations=2.0), "num_generations is 2.0.*whole number"),
        (dict(rewards=[], num_generations=2), "at least one"),
        (dict(rewards=torch.zeros(4, 0), num_generations=2), "at least one"),
        (dict(rewards=torch.zeros(2, 2, 2), num_generations=2), r"\(2, 2, 2\).*\(N, K\)"),
        (dict(rewards=1.0, num_generations=2), r"\(N,\)"),
        (
            dict(rewards=[0.0] * 10, num_generations=4),
            (
                "10 completions do not fill groups of 4; nearest: 8 or 12 completions, or "
                "num_generations=2 or 5"
            ),
        ),
        (
            dict(rewards=[0.0] * 3, num_generations=8),
            "nearest: 8 completions, or num_generations=3$",
        ),
        (dict(rewards=[0.0], num_generations=2), "nearest: 2 completions$"),
        (dict(rewards=[[0.0, 1.0]] * 2, num_generations=2, weights=[1.0]), "2 reward function"),
        (dict(rewards=[0.0, 1.0], num_generations=2, weights=[1.0, 1.0]), "1 reward function"),
        (dict(rewards=[0.0, 1.0], num_generations=2, weights=[math.inf]), "weights.*finite"),
        (dict(rewards=[0.0, 1.0], num_generations=2, weights=[NAN]), "weights.*finite"),
        (dict(rewards=[0.0, -math.inf], num_generations=2), "completion 1.*-inf"),
        (
            dict(rewards=[[0.0, math.inf], [0.0, 1.0]], num_generations=2, weights=[1.0, 0.0]),
            "completion 0.*inf",
        ),
        (dict(rewards=[0.0, 1e30], num_generations=2), "completion 1.*squares"),
        (dict(rewards=[1e20, 0, 0, 0], num_generations=4), "completion 0.*squares"),
        (dict(rewards=[0.0, 1.0], num_generations=2, weights=[1e30]), "completion 1.*squares"),
        (
            dict(rewards=[0.0, 1.0], num_generations=2, scale="std"),
            "scale is 'std'.*'group', 'batch', 'none'",
        ),
        (dict(rewards=[0.0, 1.0], num_generations=2, scale=False), "scale is False"),
        (
            dict(rewards=[0.0, 1.0], num_generations=2, aggregation="sum"),
            "aggregation is 'sum'.*normalize_then_sum",
        ),
        (dict(rewards=[0.0, 1.0], num_generations=2, eps=-1.0), "eps is -1.0"),
        (dict(rewards=[0.0, 1.0], num_generations=2, eps=NAN), "eps is nan"),
    ],
)
def test_refusals_are_sentences(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        group_advantages(**arguments)


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_a_scale_without_effect_is_said(scale):
    with pytest.warns(UserWarning, match=f"scale='{scale}' has no effect"):
        values = group_advantages(
            [1.0, 0.0, 0.0, 0.0], 4, scale=scale, aggregation="normalize_then_sum"
        ).values
    assert torch.equal(
        values, group_advantages([1.0, 0.0, 0.0, 0.0], 4, aggregation="normalize_then_sum").values
    )
