"""The training kernels against the plain tensors that they replace; interpreted without a GPU."""

from dataclasses import replace

import pytest
import torch

from grpo_nb.kernels import training_kernels
from grpo_nb.model import experts_grouped as experts
from grpo_nb.model.experts import LowRank
from grpo_nb.model.mxfp4 import dequantize, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(a, b):
    "Relative, in the norm."
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unpack_every_code_under_every_scale(dtype):
    blocks = (
        torch.arange(256, dtype=torch.uint8)
        .view(16, 16)
        .repeat(256, 1)
        .view(256, 16, 16)
        .to(DEVICE)
    )
    scales = torch.arange(256).to(torch.uint8)[:, None].expand(256, 16).contiguous().to(DEVICE)
    ours, plain = (
        training_kernels.unpack(blocks, scales, dtype),
        dequantize(blocks, scales, dtype, check=False),
    )
    assert torch.equal(ours.isnan(), plain.isnan()) and ours.isnan().all(-1).sum() == 1
    same = ours.nan_to_num() == plain.nan_to_num()
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        same |= (
            plain.abs() < torch.finfo(dtype).tiny
        )  # the interpreter makes subnormal bfloat16 zero
    assert same.all()
    assert torch.equal(torch.signbit(ours[:255]), torch.signbit(plain[:255]))


@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 96), (2, 64)])
def test_unpack_any_shape(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    blocks, scales = quantize(weight)
    assert torch.equal(
        training_kernels.unpack(blocks, scales, torch.float32),
        dequantize(blocks, scales, torch.float32),
    )
    assert training_kernels.unpack(blocks[:0], scales[:0], torch.float32).shape == (0, *shape[1:])


def rows(dtype, P=13, inner=40, E=3, loud=False):
    torch.manual_seed(0)
    z = (4 * torch.randn(P, 2 * inner)).to(dtype)
    if loud:
        z[::3] = torch.inf
    if loud:
        z[1::3] = -torch.inf
    return (
        t.to(DEVICE)
        for t in (
            z,
            torch.randint(0, E, (P,)),
            torch.randn(E, 2 * inner).to(dtype),
            torch.randn(P, inner).to(dtype),
            torch.rand(P),
        )
    )


@pytest.mark.parametrize("inner", [1, 40, 520, 1030])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 6e-2), (torch.float16, 1e-3)]
)  # the interpreter cuts where a GPU rounds to bfloat16
def test_activation_both_ways(dtype, tolerance, inner):
    z, ids, bias, gradient, share = rows(dtype, inner=inner)
    ours, plain = (m.activate(z, ids, bias, 1.702, 7.0) for m in (training_kernels, experts))
    assert ours.dtype == dtype and error(ours, plain) < tolerance
    results = []
    for m in (training_kernels, experts):
        act, out = gradient.clone(), torch.empty_like(z)
        results.append((*m.activate_backward(z, ids, bias, act, share, 1.702, 7.0, out), act))
    for a, b in zip(*results):
        assert a.dtype == b.dtype and error(a, b) < tolerance


def test_gradients_into_the_input_itself():
    z, ids, bias, gradient, share = rows(torch.float32)
    expected, _ = training_kernels.activate_backward(
        z, ids, bias, gradient.clone(), share, 1.702, 7.0, torch.empty_like(z)
    )
    result, _ = training_kernels.activate_backward(
        z, ids, bias, gradient.clone(), share, 1.702, 7.0, z
    )
    assert result is z and torch.equal(result, expected)


def test_overflow_of_float16():
    z, ids, bias, gradient, share = rows(torch.float16, loud=True)
    for m in (training_kernels, experts):
        act = gradient.clone()
        dz, sums = m.activate_backward(z, ids, bias, act, share, 1.702, 7.0, torch.empty_like(z))
        assert all(
            t.isfinite().all() for t in (m.activate(z, ids, bias, 1.702, 7.0), dz, sums, act)
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n", [1, 96, 1030])
def test_combine(weighted, biased, n):
    torch.manual_seed(0)
    T, K, E = 7, 4, 5
    y, place, indices = (
        torch.randn(T * K, n),
        torch.randperm(T * K).view(T, K),
        torch.randint(0, E, (T, K)),
    )
    y, place, weights, indices, bias = (
        t.to(DEVICE) if t is not None else None
        for t in (
            y,
            place,
            torch.rand(T, K) if weighted else None,
            indices if biased else None,
            torch.randn(E, n) if biased else None,
        )
    )
    assert torch.allclose(
        training_kernels.combine(y, place, weights, indices, bias),
        experts.combine(y, place, weights, indices, bias),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.long
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [1, 96, 1030])
def test_combine_some_rows_at_a_time(weighted, n):
    "Rows that are not there are not read: a NaN after the last one of them changes nothing."
    torch.manual_seed(0)
    T, K, E = 7, 4, 5
    y, place, indices = torch.randn(T * K, n), torch.randperm(T * K), torch.randint(0, E, (T, K))
    place[: 2 * K] = place[: 2 * K].sort().values  # tokens without a row in some part
    y, place, indices, bias, weights = (
        x.to(DEVICE) for x in (y, place.view(T, K), indices, torch.randn(E, n), torch.rand(T, K))
    )
    rest = (weights, indices, bias) if weighted else ()
    whole = experts.combine(y, place, *rest)
    for module in (training_kernels, experts):
        for rows in (1, 5, 27):
            out, wide = None, torch.full((T * K + 1, n), torch.nan, device=DEVICE)
            for first in range(0, T * K, rows):
                part = wide[: min(rows, T * K - first)].copy_(y[first : first + rows])
                given = dict(zip(("weights", "indices", "bias"), rest))
                again = module.combine(part, place, **given, first=first, out=out)
                assert out is None or again is out
                out = again
            assert torch.allclose(out, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_trains_through_the_kernels(dtype, packed, monkeypatch):
    from grpo_nb.model.packed import pack

    torch.manual_seed(0)
    E, H, inner, T, K = 4, 64, 32, 9, 2
    gate_up, down = torch.randn(E, H, 2 * inner) / 8, torch.randn(E, inner, H) / 6
    weights = experts.ExpertWeights(
        *(
            t.to(DEVICE, dtype)
            for t in (gate_up, torch.randn(E, 2 * inner), down, torch.randn(E, H))
        ),
        1.702,
        7.0,
    )
    if packed:
        weights = replace(weights, gate_up=pack(weights.gate_up), down=pack(weights.down))
    hidden, shares, indices = (
        torch.randn(T, H).to(DEVICE, dtype),
        torch.rand(T, K).to(DEVICE, dtype),
        torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(DEVICE),
    )
    factors = [
        (
            0.1
            * torch.randn(E, 4 if side else n, 2 * inner if n == H and side else H if side else 4)
        ).to(DEVICE)
        for n in (H, inner)
        for side in (0, 1)
    ]

    def run(operations):
        monkeypatch.setattr(experts, "_row_operations", lambda device: operations)
        leaves = [t.clone().requires_grad_() for t in (hidden, shares, *factors)]
        low = dict(
            gate_up_lora=(LowRank(leaves[2], leaves[3], 0.5),),
            down_lora=(LowRank(leaves[4], leaves[5], 0.5),),
        )
        y = experts.routed_experts(
            leaves[0],
            indices,
            leaves[1],
            replace(weights, **low),
            path="many",
            recompute=True,
        )
        return y, *torch.autograd.grad(y.float().square().sum(), leaves)

    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(
        run(
            (
                training_kernels.activate,
                training_kernels.activate_backward,
                training_kernels.combine,
            )
        ),
        run((experts.activate, experts.activate_backward, experts.combine)),
    ):
        assert error(a, b) < tolerance
