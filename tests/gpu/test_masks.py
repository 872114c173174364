"""Masks on a CUDA device: compiled FlexAttention forward and backward, no waiting for the device,
one compilation, memory at 128k. (pytest -m gpu tests/gpu/test_masks.py)"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from grpo_nb.model.masks import Mask, block_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def plain(q, k, v, mask):
    "Softmax over the matrix, in float64; rows that see nothing are 0."
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    allowed = mask.dense()[:, None]
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e30).softmax(
        -1
    ) * allowed.any(-1, keepdim=True)
    return weights @ v


@pytest.mark.parametrize(
    "pads, q_len, kv_len, offset, window",
    [
        (None, 384, 384, 0, None),
        ([0, 100, 383], 384, 384, 0, None),
        ([0, 100, 300], 500, 500, 0, 128),
        ([7, 0], 130, 700, 570, 128),
        ([7, 0], 1, 700, 570, None),
    ],
)
def test_forward_and_backward_of_compiled_flex_attention(pads, q_len, kv_len, offset, window):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mask = Mask(
        None if pads is None else torch.tensor(pads, device="cuda"),
        q_len,
        kv_len,
        torch.tensor(offset, device="cuda"),
        window,
    )
    batch = 2 if pads is None else len(pads)
    q, k, v = (
        torch.randn(batch, heads, length, 64, device="cuda", requires_grad=True)
        for heads, length in ((8, q_len), (2, kv_len), (2, kv_len))
    )
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, truth = (
        torch.compile(flex_attention)(q, k, v, block_mask=mask.block(), enable_gqa=True),
        plain(*wide, mask),
    )
    seen = mask.dense().any(-1)[:, None, :, None]
    upstream = torch.randn_like(out) * seen
    assert ((out - truth) * seen).abs().max() < 5e-3
    if q_len == 1:
        return
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), upstream),
        torch.autograd.grad(truth, wide, upstream.double()),
    ):
        assert (mine - theirs).norm() / theirs.norm() < 5e-3


def test_building_does_not_wait_for_the_device_and_can_be_captured():
    pads, offset = torch.tensor([0, 5], device="cuda"), torch.tensor(300, device="cuda")
    Mask(pads, 1, 1024, offset, 128).block()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = Mask(pads, 1, 1024, offset, 128)
        mask.block(), mask.dense()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = Mask(pads, 1, 1024, offset, 128)
        blocks = mask.block()
    for place in (300, 900):
        offset.fill_(place)
        graph.replay()
        fresh = Mask(pads, 1, 1024, torch.tensor(place, device="cuda"), 128).block()
        assert torch.equal(blocks.kv_num_blocks, fresh.kv_num_blocks) and torch.equal(
            blocks.kv_indices, fresh.kv_indices
        )


def test_1000_decode_steps_compile_once_for_each_kind_of_layer():
    torch._dynamo.reset()
    counters.clear()
    attend = torch.compile(flex_attention)
    q, k, v = (
        torch.randn(2, heads, length, 64, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((8, 1), (2, 2048), (2, 2048))
    )
    pads, offset = torch.tensor([3, 0], device="cuda"), torch.tensor(0, device="cuda")
    for step in range(1000):
        offset.fill_(step)
        for window in (None, 128):
            attend(q, k, v, block_mask=Mask(pads, 1, 2048, offset, window).block(), enable_gqa=True)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("window", [None, 128])
def test_128k_tokens_take_less_than_64_mb(window):
    pads = torch.tensor([1000], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block_mask(pads, 131_072, 131_072, window=window)
    assert torch.cuda.max_memory_allocated() - before < 64e6
