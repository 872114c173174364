"""Routed experts against transformers' eager experts: values, gradients, what is computed and what
is kept."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from small_experts import error, experts_module, inputs, value_and_gradients
from torch.utils.flop_counter import FlopCounterMode

from grpo_nb.model import experts_grouped, limits
from grpo_nb.model.adapters import expert_weights
from grpo_nb.model.experts import LowRank, swiglu
from grpo_nb.model.experts_grouped import (
    FEW_ELEMENTS,
    UNPACK_ALL,
    PairOrder,
    in_turn,
    routed_experts,
)
from grpo_nb.model.memory_bytes import MODELS, Computation, mlp_peak

WAYS = {
    "reference": dict(path="reference"),
    "few": dict(path="few"),
    "many": dict(path="many"),
    "recompute": dict(path="many", recompute=True),
    "slices": dict(path="many", recompute=True, slice_tokens=3),
}


@settings(deadline=None, max_examples=60)
@given(
    T=st.integers(0, 9),
    H=st.sampled_from([3, 8, 24]),
    inner=st.sampled_from([1, 8, 16]),
    E=st.integers(2, 6),
    data=st.data(),
    routing=st.sampled_from(["random", "to the first"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_equals_transformers(T, H, inner, E, data, routing, dtype, seed):
    K = data.draw(st.integers(1, min(E, 4)))
    module, (hidden, indices, weights) = (
        experts_module(H, inner, E, dtype, seed),
        inputs(T, H, E, K, routing, dtype, seed),
    )
    leaves = [hidden, weights, *module.parameters()]
    if T == 0:  # eager's answer has no gradient then
        for way in WAYS.values():
            assert routed_experts(
                hidden, indices, weights, expert_weights(module), **way
            ).shape == (0, H)
        return
    theirs = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    for name, way in WAYS.items():
        ours = value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, expert_weights(module), **way), leaves
        )
        for a, b in zip(ours, theirs):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(
                a,
                b,
                rtol=1e-9 if dtype == torch.float64 else 1e-4,
                atol=1e-9 if dtype == torch.float64 else 1e-4,
                msg=lambda m: f"{name}: {m}",
            )


@pytest.mark.parametrize("way", ["few", "many", "slices"])
@pytest.mark.parametrize("sizes", [(32, 24), (20, 12)], ids=["grouped", "loop"])
def test_bf16_is_as_near_the_truth_as_eager(way, sizes):
    "In the median of several draws: one is noise."
    draws = torch.tensor([errors_in_bf16(way, sizes, seed) for seed in range(7)])  # (7, 2, tensors)
    for ours, theirs in draws.median(0).values.T.tolist():
        assert ours < max(1.15 * theirs, 0.004)


def errors_in_bf16(way, sizes, seed):
    "(ours, eager's) of the result and of each gradient."
    module, (hidden, indices, weights) = (
        experts_module(*sizes, 8, torch.bfloat16, seed=seed, spread=1),
        inputs(64, sizes[0], 8, 4, dtype=torch.bfloat16, seed=seed),
    )
    exact, (hidden64, weights64) = (
        copy.deepcopy(module).double(),
        (x.detach().double().requires_grad_() for x in (hidden, weights)),
    )
    truth = value_and_gradients(
        lambda: exact(hidden64, indices, weights64), [hidden64, weights64, *exact.parameters()]
    )
    leaves = (
        [hidden, weights] if way == "few" else [hidden, weights, *module.parameters()]
    )  # few is not for training: weights gathered, gradients added in bf16
    theirs = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    options = {
        **WAYS[way],
        **(dict(slice_tokens=32) if way == "slices" else {}),
    }  # the gradients of slices are added in bf16 too
    ours = value_and_gradients(
        lambda: routed_experts(hidden, indices, weights, expert_weights(module), **options), leaves
    )
    return tuple([error(a, b) for a, b in zip(results, truth)] for results in (ours, theirs))


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_gradients_of_factors_by_finite_differences(way):
    torch.manual_seed(0)
    weights, (hidden, indices, shares) = (
        expert_weights(experts_module(4, 3, 3).requires_grad_(False)),
        inputs(4, 4, 3, 2),
    )
    a, b, c, d = (
        0.3 * torch.randn(*shape, dtype=torch.float64)
        for shape in ((3, 4, 2), (3, 2, 6), (3, 3, 2), (3, 2, 4))
    )

    def function(hidden, shares, a, b, c, d):
        experts = type(weights)(
            **{
                **weights.__dict__,
                "gate_up_lora": (LowRank(a, b, 0.5),),
                "down_lora": (LowRank(c, d, 2.0),),
            }
        )
        return routed_experts(hidden, indices, shares, experts, **WAYS[way])

    assert torch.autograd.gradcheck(
        function, [x.detach().requires_grad_() for x in (hidden, shares, a, b, c, d)]
    )


@pytest.mark.parametrize("way", ["few", "many"])
def test_only_what_is_routed_is_computed(way):
    T, K, E, H, inner = 7, 2, 16, 12, 10
    module, (hidden, indices, weights) = experts_module(H, inner, E), inputs(T, H, E, K)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert counter.get_total_flops() == 2 * T * K * (H * 2 * inner + inner * H)


def loud(dtype, scale_up=3e4, scale_down=3e4):
    """Experts whose gate_up and whose answers exceed 65,504, and shares with which their sum does
    not."""
    module = experts_module(16, 8, 4)
    with torch.no_grad():
        module.gate_up_proj.mul_(scale_up / 4)
        module.down_proj.mul_(scale_down)
        for parameter in module.parameters():
            parameter.clamp_(-6e4, 6e4)
    return module.to(dtype)


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_activations_beyond_float16(way):
    module, (hidden, indices, weights) = (
        loud(torch.float16),
        inputs(12, 16, 4, 2, dtype=torch.float16),
    )
    weights = (weights.detach() / 256).requires_grad_()
    exact = copy.deepcopy(module).double()
    hidden64, weights64 = (x.detach().double().requires_grad_() for x in (hidden, weights))
    pre = hidden64.detach() @ exact.gate_up_proj.detach()
    assert pre.abs().max() > 65504 and (swiglu(pre) @ exact.down_proj.detach()).abs().max() > 65504
    assert not module(hidden, indices, weights).isfinite().all()  # eager
    truth = exact(hidden64, indices, weights64).detach()
    ours = routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert (
        ours.dtype == torch.float16
        and truth.abs().max().item() < 65504
        and error(ours, truth) < 0.002
    )
    small = 1e-9 * torch.randn_like(truth)
    theirs = torch.autograd.grad(exact(hidden64, indices, weights64), weights64, small * 1e6)[0]
    gradient = torch.autograd.grad(ours, weights, (small * 1e6).half())[0]
    assert gradient.isfinite().all() and error(gradient, theirs) < 0.02


@pytest.mark.parametrize("way", ["few", "many"])
def test_a_float32_residual_beside_float16_weights_keeps_large_answers(way):
    module, (hidden, indices, weights) = (
        loud(torch.float16),
        inputs(12, 16, 4, 2, dtype=torch.float16),
    )
    hidden, weights = hidden.detach().float(), weights.detach().float()
    truth = (
        copy.deepcopy(module)
        .double()
        .requires_grad_(False)(hidden.double(), indices, weights.double())
    )
    ours = routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert (
        ours.dtype == torch.float32
        and truth.abs().max() > 65504
        and ours.isfinite().all()
        and error(ours, truth) < 0.01
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_autocast_is_honoured(way, dtype):
    ratios = []
    for seed in range(7):  # one draw is noise
        module, (hidden, indices, weights) = (
            experts_module(32, 24, 8, torch.float32, seed=seed, spread=1),
            inputs(40, 32, 8, 4, dtype=torch.float32, seed=seed),
        )
        leaves = [hidden, weights, *module.parameters()]
        truth = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
        with torch.autocast("cpu", dtype):
            eager, ours = (
                module(hidden, indices, weights),
                routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way]),
            )
        assert ours.dtype == torch.float32
        ratios.append(error(ours, truth[0]) / error(eager, truth[0]))
    assert 1 / 3 < sorted(ratios)[3] < 1.5
    gradient = torch.randn(
        ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).float()
    for a, b in zip(torch.autograd.grad(ours, leaves, gradient), truth[1:]):
        assert a.dtype == torch.float32 and error(a, b) < 0.02


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_a_token_may_name_an_expert_twice_and_runs_repeat_bit_for_bit(way):
    module, (hidden, _, weights) = (
        experts_module(16, 8, 4, torch.float32),
        inputs(6, 16, 4, 3, dtype=torch.float32),
    )
    indices = torch.tensor([[1, 1, 2]]).repeat(6, 1)
    results = [
        value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way]),
            [hidden, weights, *module.parameters()],
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    reference = value_and_gradients(
        lambda: routed_experts(hidden, indices, weights, expert_weights(module), path="reference"),
        [hidden, weights, *module.parameters()],
    )
    assert all(error(a, b) < 1e-5 for a, b in zip(results[0], reference))


def test_recomputing_keeps_the_input_only():
    module, (hidden, indices, weights) = (
        experts_module(16, 32, 4).requires_grad_(False),
        inputs(64, 16, 4, 2),
    )

    def kept(**options):
        known, seen = (
            {x.untyped_storage().data_ptr() for x in (hidden, weights, *module.parameters())},
            [],
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            routed_experts(hidden, indices, weights, expert_weights(module), path="many", **options)
        new = [x for x in seen if x.untyped_storage().data_ptr() not in known]
        return sum(x.numel() for x in new if x.is_floating_point()), sum(
            x.numel() for x in new if not x.is_floating_point()
        )

    places = (
        4 * 64 * 2 + 4
    )  # each pair's expert, token and row, there and back; where each expert's rows end
    assert kept(recompute=True) == (0, places) and kept() == (
        64 * 2 * 64,
        places,
    )  # gate_up of every pair


@pytest.mark.parametrize("routing", ["random", "to the first"])
@pytest.mark.parametrize("trained", ["nothing", "biases", "matrices"])
def test_sorted_rows_in_parts(trained, routing, monkeypatch):
    """Values and gradients, adapters included, of some rows at a time; where matrices train, only
    the forward pass is in parts."""
    module, (hidden, indices, weights) = (
        experts_module(16, 8, 4, torch.float32).requires_grad_(False),
        inputs(23, 16, 4, 2, routing, torch.float32),
    )
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained == "matrices" or trained in name + "es")
    torch.manual_seed(0)
    factors = [
        (0.3 * torch.randn(*shape)).requires_grad_()
        for shape in ((4, 16, 2), (4, 2, 16), (4, 8, 2), (4, 2, 16))
    ]
    leaves = [hidden, weights, *factors, *(p for p in module.parameters() if p.requires_grad)]
    assert len(leaves) == 6 + {"nothing": 0, "biases": 2, "matrices": 4}[trained]
    low = dict(gate_up_lora=(LowRank(*factors[:2], 0.5),), down_lora=(LowRank(*factors[2:], 2.0),))
    made, plain = [], experts_grouped.grouped_mm

    def product(x, weight, offs):
        if weight.dim() == 3:  # not the sum over an expert's rows
            made.append(len(x))
        return plain(x, weight, offs)

    monkeypatch.setattr(experts_grouped, "grouped_mm", product)

    def run(**options):
        made.clear()
        given = replace(expert_weights(module), **low)
        return value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, given, **options), leaves
        )

    truth = run(path="reference")
    for backward, forward in ((46, 46), (45, 30), (20, 46), (7, 20), (1, 1)):
        monkeypatch.setattr(experts_grouped, "PAIRS_BACKWARD", backward)
        monkeypatch.setattr(experts_grouped, "PAIRS_FORWARD", forward)
        results = run(path="many", recompute=True)
        for a, b in zip(results, truth):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert max(made) <= (46 if trained == "matrices" else -(-max(backward, forward) // 16) * 16)
        assert all(map(torch.equal, run(path="many", recompute=True), results))
    run(path="many")
    assert set(made) == {46}  # gate and up are kept: all rows at once


def test_parts_of_an_order():
    indices = torch.tensor([[3, 0], [0, 1], [3, 3], [3, 1], [0, 0]] * 5)
    pairs = PairOrder(indices, 5)
    assert pairs.parts(None) == pairs.parts(50) == [pairs]
    for most, sizes in ((49, [32, 18]), (32, [32, 18]), (20, [32, 18]), (16, [16, 16, 16, 2])):
        parts, first = pairs.parts(most), 0
        assert [len(part.ids) for part in parts] == sizes
        for part in parts:
            assert part.first == first and part.bounds == [0, *part.ends.tolist()]
            assert [e for e, a, b in part.spans for _ in range(a, b)] == part.ids.tolist()
            first += len(part.ids)
        for name in ("ids", "order", "tokens"):
            joined = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(joined, getattr(pairs, name))
    with UNPACK_ALL:  # a recorded layer
        assert len(PairOrder(indices, 5).parts(4)) == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", [False, True], ids=["frozen", "adapters"])
def test_memory_in_parts_is_what_the_planner_says(dtype, adapters, monkeypatch):
    "Of one layer, forward and backward: it does not grow with the pairs, beside their sums."
    E, H, inner, K, T = 8, 64, 64, 4, 512
    module = experts_module(H, inner, E, dtype).requires_grad_(False)
    shape = replace(
        MODELS["gpt-oss-20b"], hidden=H, intermediate=inner, experts=E, experts_per_token=K
    )
    how = Computation(dtype.itemsize, targets=("mlp",) * adapters, slice_tokens=T)
    ratio, experts, factors = limits.PAIRS_FORWARD / limits.PAIRS_BACKWARD, {}, []
    if adapters:
        sizes = ((E, H, 4), (E, 4, 2 * inner), (E, inner, 4), (E, 4, H))
        factors = [torch.randn(*size, dtype=dtype, requires_grad=True) for size in sizes]
        experts = dict(gate_up_lora=(LowRank(*factors[:2], 0.5),))
        experts |= dict(down_lora=(LowRank(*factors[2:], 2.0),))
    for home in (experts_grouped, limits):
        monkeypatch.setattr(home, "WIDE_PAIRS", 16)
    peaks = []
    for rows in (K * T, K * T // 4, K * T // 16):
        for home in (experts_grouped, limits):
            monkeypatch.setattr(home, "PAIRS_BACKWARD", rows)
        monkeypatch.setattr(experts_grouped, "PAIRS_FORWARD", int(rows * ratio))
        hidden, indices, weights = inputs(T, H, E, K, dtype=dtype)
        given = replace(expert_weights(module), **experts)
        with LiveBytes(hidden, indices, weights, *module.parameters(), *factors) as live:
            y = routed_experts(hidden, indices, weights, given, path="many", recompute=True)
            y.backward(y.detach())
        peaks.append(live.peak)
        # the input and the norm's copy of it are counted there, result and gradient elsewhere
        beside = T * H * (how.element + how.stream) - 2 * T * H * dtype.itemsize
        predicted = mlp_peak(shape, how, T) - beside
        # rows as tall as a test's make adapters count for more than they do in a model
        least = 0.8 if adapters else 0.9
        assert least < predicted / live.peak < 1.15, (rows, predicted, live.peak)
    assert peaks[1] < 0.6 * peaks[0] and peaks[2] < 0.5 * peaks[0]


@pytest.mark.parametrize("routing", ["random", "to the first"])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_experts_rows_some_at_a_time(recompute, routing, monkeypatch):
    """One expert after the other; with a router that sends all to the same ones, its rows are as
    many as there are tokens."""
    module, (hidden, indices, weights) = (
        experts_module(16, 8, 4, dtype=torch.float64),
        inputs(23, 16, 4, 2, routing),
    )
    torch.manual_seed(0)
    factors = [
        (0.3 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        for shape in ((4, 16, 2), (4, 2, 16), (4, 8, 2), (4, 2, 16))
    ]
    leaves = [hidden, weights, *module.parameters(), *factors]

    def run(path):
        given = type(expert_weights(module))(
            **{
                **expert_weights(module).__dict__,
                "gate_up_lora": (LowRank(*factors[:2], 0.5),),
                "down_lora": (LowRank(*factors[2:], 2.0),),
            }
        )
        return value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, given, path=path, recompute=recompute),
            leaves,
        )

    truth = run("reference")
    monkeypatch.setattr(experts_grouped, "can_group", lambda *given: False)
    for rows in (23, 5, 1):
        monkeypatch.setattr(experts_grouped, "ROWS_OF_ONE", rows)
        for a, b in zip(run("many"), truth):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    out = routed_experts(
        hidden, indices, weights, expert_weights(module), path="many", recompute=recompute
    )
    first, second = (
        torch.autograd.grad(out.sin().sum(), leaves[:3], retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_does_not_depend_on_the_router(recompute, monkeypatch):
    """One expert after the other: a router that sends all tokens to the same ones takes no more
    than an even one."""
    monkeypatch.setattr(experts_grouped, "can_group", lambda *given: False)
    monkeypatch.setattr(experts_grouped, "ROWS_OF_ONE", 32)
    module, peaks = experts_module(16, 16, 8, torch.float32).requires_grad_(False), []
    for indices in (
        (torch.arange(2) + 2 * torch.arange(256)[:, None]) % 8,
        torch.arange(2).expand(256, 2),
    ):
        hidden, _, weights = inputs(256, 16, 8, 2, dtype=torch.float32)
        with LiveBytes(hidden, indices, weights, *module.parameters()) as live:
            routed_experts(
                hidden, indices, weights, expert_weights(module), path="many", recompute=recompute
            ).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] <= 1.02 * peaks[0], peaks


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", ["many", "recompute", "slices"])
def test_the_graph_may_be_walked_again(way, checkpointed):
    "The first backward pass takes the memory of what was kept; the second one computes it again."
    module, (hidden, indices, weights) = experts_module(16, 8, 4), inputs(20, 16, 4, 2)
    leaves = [hidden, weights, *module.parameters()]

    def run(h, w):
        return routed_experts(h, indices, w, expert_weights(module), **WAYS[way])

    out = (
        torch.utils.checkpoint.checkpoint(run, hidden, weights, use_reentrant=False)
        if checkpointed
        else run(hidden, weights)
    )
    first, second = (
        torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_auto_takes_few_for_a_handful_without_gradients(monkeypatch):
    module, (hidden, indices, weights) = experts_module(16, 8, 4), inputs(4, 16, 4, 2)
    taken = []

    def noted(name):
        return lambda hidden, *rest: taken.append(name) or hidden

    monkeypatch.setitem(experts_grouped.PLAIN_FORMS, "few", noted("gathered_experts"))
    monkeypatch.setattr(experts_grouped, "_many", noted("_many"))
    routed_experts(hidden, indices, weights, expert_weights(module))
    with torch.no_grad():
        routed_experts(hidden, indices, weights, expert_weights(module))
        T = FEW_ELEMENTS["cpu"] // (2 * (16 * 16 + 8 * 16)) + 1
        routed_experts(*inputs(T, 16, 4, 2), expert_weights(module))
    assert taken == ["_many", "gathered_experts", "_many"]


def test_few_tokens_come_in_parts_if_all_will():
    "While kernels are compiled; the experts get theirs in turn, and again as routed after that."
    few = torch.full((48, 2), 3)
    with in_turn(101):
        pairs = PairOrder(few, 4)
        assert [len(part.ids) for part in pairs.parts(200)] == [32, 32, 32]
        assert [len(part.ids) for part in pairs.parts(None)] == [96]
        with in_turn(100):
            assert [len(part.ids) for part in pairs.parts(200)] == [96]
            assert [len(part.ids) for part in pairs.parts(50)] == [32, 32, 32]
        assert len(pairs.parts(200)) == 3 and len(PairOrder(few[:0], 4).parts(200)) == 1
    assert pairs.ends.tolist() == [24, 48, 72, 96] and PairOrder(few, 4).ends.tolist()[2:] == [
        0,
        96,
    ]
    assert len(PairOrder(few, 4).parts(200)) == 1
