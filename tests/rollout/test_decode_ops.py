"""The operations of a decoding step: slots, tokens appended, a layer written for few calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import decode_ops
from grpo_nb.rollout.decode_ops import (
    DecodeState,
    Projection,
    append_column,
    append_tokens,
    complex_pairs,
    find_slots,
    project,
    rotate,
)
from grpo_nb.rollout.decoder import Decoder
from grpo_nb.rollout.kv_cache import CacheShape, KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_written_for_few_calls_is_the_same_layer(dtype):
    model = tiny_gpt_oss(3)[0].to(dtype)
    layer = Decoder(model).layers[0]
    small = decode_ops.small_layer(layer, kv_heads=2, top=2, eps=1e-5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 128, generator=generator, dtype=torch.float64).to(dtype)
    attended = torch.randn(7, 128, generator=generator, dtype=torch.float64).to(dtype)
    with torch.inference_mode():
        after = project(attended, (layer.output,), residual=x)
        expected, _ = decode_ops.moe(after, layer, layer.norm, top=2, eps=1e-5, dtype=dtype)
        mine = decode_ops.small_moe(x.clone(), attended, small)
    bound = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(mine, expected, atol=bound, rtol=bound)


def test_a_rotation_is_one_multiplication_of_complex_pairs():
    x, angle = torch.randn(3, 2, 8), torch.rand(3, 4)
    pairs = torch.view_as_complex(complex_pairs(x.flatten(1), 8).view(3, 2, 4, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(3, 1, 4), angle[:, None]))
    expected = complex_pairs(rotate(x, angle.cos(), angle.sin()).flatten(1), 8)
    torch.testing.assert_close(turned.reshape(3, -1), expected)


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("position", [0, 3, 4, 10])
def test_the_slot_of_a_token_is_among_those_that_are_read(page, position):
    cache = KVCache(CacheShape((4, None), 1, 1, torch.float32, page), [10, 10], [1, 1], 4, "cpu")
    for layer in cache.layers:
        where, slot, read, count = find_slots(
            layer, slice(0, 2), torch.tensor([position] * 2), position + 1
        )
        layer.keys[where, :, slot] = torch.tensor([1.0, 2.0])[:, None, None]
        keys, _ = decode_ops.read_cache(layer, read, count)
        column = position % 4 if layer.window else position
        assert keys[:, column, 0].tolist() == [1.0, 2.0] and keys.count_nonzero() == 2
        layer.keys.zero_()


def test_adapters_of_some_projections_alone():
    x, weights = torch.randn(3, 8), [torch.randn(n, 8) for n in (4, 2)]
    a, b = torch.randn(2, 8), torch.randn(4, 2)
    both = project(x, (Projection(weights[0], None, a, b, 0.5), Projection(weights[1])))
    torch.testing.assert_close(both[:, :4], x @ (weights[0] + 0.5 * b @ a).T)
    assert torch.equal(both[:, 4:], x @ weights[1].T)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 6),
    stop=st.sampled_from([(), (0,), (0, 1, 2)]),
    seed=st.integers(0, 10**6),
    drop=st.booleans(),
    seen=st.booleans(),
)
def test_a_column_is_appended_as_rows_one_by_one_are(rows, width, stop, seed, drop, seen):
    one, other = (DecodeState.start([3] * rows, width, "cpu") for _ in range(2))
    if seen:
        one.seen, other.seen = torch.zeros(2, rows + 1, 6, dtype=torch.bool)
    generator, stop, which = (
        torch.Generator().manual_seed(seed),
        torch.tensor(stop, dtype=torch.long),
        slice(0, rows),
    )
    for column in range(width):
        if drop:
            which = torch.arange(rows)[one.alive[:rows]]
        count = len(torch.arange(rows)[which])
        tokens, logps = (
            torch.randint(6, (count,), generator=generator),
            torch.rand(count, generator=generator),
        )
        append_tokens(which, tokens, logps, stop, one)
        append_column(which, column, tokens, logps, stop, other)
        for name in ("counts", "lengths", "alive"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        if other.alive.any():
            assert torch.equal(one.last[other.alive], other.last[other.alive])
    mask = torch.arange(width) < one.counts[:, None]
    assert torch.equal(one.ids[mask], other.ids[mask]) and torch.equal(
        one.logps[mask], other.logps[mask]
    )
    assert (
        not other.alive[:rows].any()
        and other.alive[rows] == one.alive[rows]
        and other.counts[rows] == 0
    )
    if seen and drop:
        assert torch.equal(one.seen, other.seen)
