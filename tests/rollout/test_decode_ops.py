"""The operations of a decoding step: slots, and adapters of some projections."""

import pytest
import torch

from grpo_nb.rollout import decode_ops
from grpo_nb.rollout.decode_ops import Projection, find_slots, project
from grpo_nb.rollout.kv_cache import CacheShape, KVCache


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
