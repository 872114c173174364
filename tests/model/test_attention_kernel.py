"""Attention with sinks by the Triton kernels, interpreted, beside the formula: output and every
gradient, for tiles that are seen whole, partly and not at all. The cards' own tests are in
tests/gpu/test_attention.py."""

import itertools

import pytest
import torch

from grpo_nb.kernels.compile_together import noted_launches
from grpo_nb.model import attention_kernel
from grpo_nb.model.attention import BACKENDS, eager, sink_attention
from grpo_nb.model.attention_kernel import SMALL_TILES, TILES, attend, tile
from grpo_nb.model.masks import Mask

triton = pytest.importorskip("triton")

CASES = {  # B, Hq, Hk, Lq, Lk, D, offset, window, padding of each sequence
    "full": (1, 2, 1, 70, 70, 16, 0, None, None),
    "window, padded": (2, 2, 1, 45, 45, 16, 0, 9, (3, 40)),
    "window, offset, a head size between two": (1, 2, 1, 30, 75, 24, 45, 33, None),
    "a sequence of padding alone": (2, 1, 1, 40, 40, 16, 0, None, (0, 40)),
    "offset, padding beyond it": (2, 2, 1, 33, 66, 16, 33, None, (40, 5)),
    "a window that is longer": (1, 2, 1, 50, 50, 16, 0, 64, None),
    "one query": (2, 4, 2, 1, 40, 16, 39, 8, (4, 0)),
    "all together": (2, 2, 1, 40, 90, 16, 47, 35, (2, 60)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    "Several of each kind in a short sequence."
    tiles = {name: {256: (32, 16, 4, 2)} for name in TILES}
    monkeypatch.setattr(attention_kernel, "TILES", tiles | {"dkv": {256: (16, 32, 4, 2)}})


def inputs(B, Hq, Hk, Lq, Lk, D, dtype=torch.float32):
    torch.manual_seed(0)
    heads = ((Hq, Lq), (Hk, Lk), (Hk, Lk))
    tensors = [torch.randn(B, length, h, D, dtype=dtype).transpose(1, 2) for h, length in heads]
    return [x.requires_grad_() for x in (*tensors, torch.randn(Hq))]


def both(tensors, mask, scale):
    "Output and gradients: ours, the formula's."
    leaves = [x for x in tensors if x is not None]
    formula = eager(*tensors, mask, scale)
    upstream = torch.randn(formula.shape, generator=torch.Generator().manual_seed(1))
    mine = attend(*tensors, mask, scale)
    return [
        [out, *torch.autograd.grad(out, leaves, upstream, retain_graph=True)]
        for out in (mine, formula)
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "with_sinks, as_tensor", [(True, False), (False, True)], ids=["sinks", "offset as tensor"]
)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_the_formula_s(name, with_sinks, as_tensor):
    *sizes, offset, window, pads = CASES[name]
    q, k, v, sinks = inputs(*sizes)
    mask = Mask(
        None if pads is None else torch.tensor(pads),
        *sizes[3:5],
        torch.tensor(offset) if as_tensor else offset,
        window,
        device="cpu",
    )
    mine, formula = both([q, k, v, sinks if with_sinks else None], mask, sizes[5] ** -0.5)
    for a, b in zip(mine, formula, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_tile_computes_the_same(monkeypatch):
    q, k, v, sinks = inputs(1, 1, 1, 140, 140, 16)
    mask, found = Mask(torch.tensor([5]), 140, 140, 0, 40), []
    for table, size in itertools.product((TILES, SMALL_TILES), (64, 128, 256)):
        monkeypatch.setattr(
            attention_kernel, "TILES", {name: {16: sizes[size]} for name, sizes in table.items()}
        )
        found += both([q, k, v, sinks], mask, 0.25)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_tile_is_that_of_the_next_head_size(monkeypatch):
    monkeypatch.setattr(attention_kernel, "TILES", TILES)
    for kernel, (small, table) in itertools.product(TILES, ((False, TILES), (True, SMALL_TILES))):
        found = [tile(kernel, D, small) for D in (8, 64, 80, 128, 192, 256)]
        assert found == [table[kernel][size] for size in (64, 64, 128, 128, 256, 256)]


def test_sinks_and_padding_of_any_stride():
    q, k, v, _ = inputs(2, 2, 1, 20, 20, 16)
    sinks, pads = torch.randn(2, 3)[:, 0], torch.tensor([[3, 9], [7, 9]])[:, 0]
    for given in ((sinks, pads), (sinks, torch.tensor([4]).expand(2)), (sinks[:1].expand(2), pads)):
        mask = Mask(given[1], 20, 20)
        mine, formula = (way(q, k, v, given[0], mask, 0.25) for way in (attend, eager))
        torch.testing.assert_close(mine, formula, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_a_sink_that_takes_nothing(window):
    q, k, v, _ = inputs(2, 2, 1, 45, 45, 16)
    sinks = torch.tensor([-torch.inf, -1e30])
    mask = Mask(torch.tensor([0, 30]), 45, 45, window=window)
    out = attend(q, k, v, sinks, mask, 0.25)
    plain = eager(q, k, v, None, mask, 0.25)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
    found = [torch.autograd.grad(x.sin().sum(), [q, k, v]) for x in (out, plain)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_heads_laid_out_in_any_way_and_padding_of_32_bits():
    q, k, v, sinks = inputs(2, 2, 1, 20, 20, 16)
    mask = Mask(torch.tensor([3, 7], dtype=torch.int32), 20, 20)
    given = [q, k, v]
    results = [attend(*given, sinks, mask, 0.25)]
    results.append(attend(*(x.contiguous() for x in given), sinks, mask, 0.25))
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in given]
    assert turned[0].stride(-1) != 1
    results.append(attend(*turned, sinks, mask, 0.25))
    gradients = [torch.autograd.grad(out.sin().sum(), given) for out in results]
    for out, found in zip(results[1:], gradients[1:], strict=True):
        assert torch.equal(out, results[0]) and all(map(torch.equal, found, gradients[0]))
    assert results[0].transpose(1, 2).is_contiguous()  # as the next product wants it


def test_what_it_cannot_compute_is_said(monkeypatch):
    wide = [torch.zeros(1, 1, 20, 320) for _ in range(3)]
    with pytest.raises(ValueError, match="heads of up to 256, and these are 320. Choose 'sdpa'"):
        sink_attention(*wide, torch.zeros(1), backend="triton")
    monkeypatch.setattr(triton, "JITFunction", type(attention_kernel._forward_kernel))  # compiled
    narrow = [torch.zeros(1, 1, 20, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="run on a GPU, and the tensors are on cpu"):
        sink_attention(*narrow, torch.zeros(1), backend="triton")
    assert "triton" in BACKENDS


def test_a_frozen_layer_and_a_second_pass():
    "Gradients for some inputs only, and none are asked for the sinks."
    q, k, v, sinks = inputs(1, 2, 2, 30, 30, 16)
    k.requires_grad_(False), sinks.requires_grad_(False)
    mask = Mask(None, 30, 30, device="cpu")
    found = [
        torch.autograd.grad(way(q, k, v, sinks, mask, 0.25).sin().sum(), [q, v])
        for way in (attend, eager)
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_first_call_knows_what_it_will_compile(monkeypatch):
    "Both passes, and exactly the kernels that are launched afterwards."
    seen = []

    def noting(work):
        with noted_launches() as noted:
            work()
        seen.append({launch.kernel.fn.__name__ for launch in noted})

    monkeypatch.setattr(attention_kernel, "compile_together", noting)
    kinds = torch.device("cpu"), torch.float32, (4, 2, 16), torch.float32, torch.int64, None
    attention_kernel.prepare(*kinds)
    attention_kernel.prepare(*kinds)
    with noted_launches() as noted:
        q, k, v, sinks = inputs(2, 4, 2, 40, 40, 16)
        out = attend(q, k, v, sinks, Mask(torch.tensor([3, 7]), 40, 40), 0.25)
        out.sum().backward()
    assert seen == [{launch.kernel.fn.__name__ for launch in noted}] and len(noted) == 3
