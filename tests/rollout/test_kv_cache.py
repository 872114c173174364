"""The cache of keys and values: sizes, pages and rings."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.rollout.kv_cache import CacheShape, KVCache, rows_that_fit

PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=6)


def test_rows_that_fit_never_exceed_what_is_free():
    shape = CacheShape((128, None) * 12, 8, 64, torch.bfloat16)
    lengths = [100 * (i % 7 + 1) for i in range(300)]
    for free in (2**28, 2**30, 2**33):
        rows = rows_that_fit(shape, lengths, 500, free, row_bytes=2**20, fixed_bytes=2**26)

        def need(n):
            return 2**26 + n * 2**20 + shape.bytes(lengths[:n], [1] * n, 500)

        assert need(rows) <= free and (rows == 300 or need(rows + 1) > free)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from([None, 1, 4, 8]),
)
def test_the_cache_takes_what_was_announced_and_no_page_is_written_by_two_rows(prompts, new, page):
    lengths, groups = zip(*prompts)
    shape = CacheShape((4, None, 4, None), 2, 4, torch.float32, page)
    cache = KVCache(shape, lengths, groups, new, "cpu")
    assert sum(
        x.numel() * 4 for layer in cache.layers for x in (layer.keys, layer.values)
    ) == shape.bytes(lengths, groups, new)
    if page is None:
        return
    row, writers = 0, {}
    for length, group in zip(lengths, groups):
        for _ in range(group):
            table = cache.tables[row]
            assert len(table) == len(set(table)) == shape.width(length, new) and 0 not in table
            for position in range(length, length + new - 1):
                writers.setdefault(table[position // page], set()).add(row)
            row += 1
    assert all(len(rows) == 1 for rows in writers.values())


def numbered_tokens(lengths):
    "Keys (T, 1, 1) of packed prompts: 100 for each prompt before, 1 more for each token; never 0."
    return torch.cat([100 * u + 1 + torch.arange(n) for u, n in enumerate(lengths)])[:, None, None]


@settings(max_examples=50, deadline=None)
@given(PROMPTS, st.integers(1, 9), st.sampled_from([None, 1, 4, 8]), st.integers(1, 6))
def test_every_row_reads_its_prompt_back(prompts, new, page, window):
    lengths, groups = zip(*prompts)
    shape = CacheShape((window, None), 1, 1, torch.float32, page)
    cache = KVCache(shape, lengths, groups, new, "cpu")
    tokens = numbered_tokens(lengths).float()
    for layer in (0, 1):
        cache.store(layer, tokens, -tokens, cache.slots(range(len(lengths))))
    ring, full = cache.layers
    starts = [sum(lengths[:u]) for u, group in enumerate(groups) for _ in range(group)]
    owner = [u for u, group in enumerate(groups) for _ in range(group)]
    for row, (u, start) in enumerate(zip(owner, starts)):
        prompt = tokens[start : start + lengths[u], 0, 0].tolist()
        pages = cache.tables[row]
        held = torch.cat([full.keys[p, 0, :, 0] for p in pages]).tolist()
        assert held[: len(prompt)] == prompt and not any(held[len(prompt) :])
        newest = prompt[-window:]
        assert sorted(x for x in ring.keys[row, 0, :, 0].tolist() if x) == newest
        for position in range(max(0, len(prompt) - window), len(prompt)):
            assert ring.keys[row, 0, position % window, 0] == prompt[position]
    assert torch.equal(full.values, -full.keys) and torch.equal(ring.values, -ring.keys)
    assert not ring.keys[-1].any()  # the spare row


def test_completions_of_a_prompt_share_its_whole_pages_alone():
    shape = CacheShape((None,), 1, 1, torch.float32, page=4)
    tables = list(KVCache(shape, [9, 4], [2, 2], 5, "cpu").tables.values())
    shared = [len(set(a) & set(b)) for a, b in (tables[:2], tables[2:])]
    assert shared == [2, 1] and not set(tables[0]) & set(tables[2])
    assert [len(table) for table in tables] == [4, 4, 2, 2]
