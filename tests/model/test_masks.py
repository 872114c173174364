"""Masks against loops, against transformers' own, against create_block_mask; what they cost, how
often they compile."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from grpo_nb.model.masks import (
    Mask,
    at_offset,
    attention_mask,
    block_mask,
    causal,
    left_padding,
    sliding_window,
)
from grpo_nb.model.tiny import tiny_gpt_oss

SIDES = ("kv", "full_kv", "q", "full_q")


@st.composite
def masks(draw, longest=45):
    """Small masks of every sort: a batch with padding or None, more keys than queries or fewer, a
    window or none, the offset a number or a tensor."""
    q_len, kv_len = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    pads = draw(st.none() | st.lists(st.integers(-2, kv_len + 2), min_size=1, max_size=3))
    offset = draw(st.sampled_from([0, max(kv_len - q_len, 0)]) | st.integers(0, longest))
    if draw(st.booleans()):
        offset = torch.tensor(offset, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return Mask(
        None if pads is None else torch.tensor(pads),
        q_len,
        kv_len,
        offset,
        draw(st.none() | st.integers(1, longest)),
    )


def lists(mask, side):
    """What a kernel reads of one side of a BlockMask: a list of block numbers for each row, in
    order."""
    counts, order = getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")
    assert (
        counts.dtype == order.dtype == torch.int32
        and order.is_contiguous()
        and (order >= 0).all()
        and (order < order.shape[-1]).all()
    )
    return [row[:count].tolist() for row, count in zip(order.flatten(0, 2), counts.flatten())]


# The dense form


@settings(max_examples=60, deadline=None)
@given(masks(longest=14))
def test_dense_is_the_formula(mask):
    offset, window = int(mask.offset), mask.window or 10**6
    pads = [0] if mask.pad_lens is None else mask.pad_lens.tolist()
    loops = [
        [
            [pad <= j <= i + offset and j > i + offset - window for j in range(mask.kv_len)]
            for i in range(mask.q_len)
        ]
        for pad in pads
    ]
    assert mask.dense().dtype == torch.bool and mask.dense().tolist() == loops
    assert torch.equal(
        attention_mask(
            mask.pad_lens, mask.q_len, mask.kv_len, offset=mask.offset, window=mask.window
        ),
        mask.dense(),
    )


@settings(max_examples=40, deadline=None)
@given(masks(longest=20))
def test_dense_is_transformers_mask(mask):
    pads = torch.zeros(1, dtype=torch.long) if mask.pad_lens is None else mask.pad_lens
    rule = (
        causal_mask_function
        if mask.window is None
        else sliding_window_causal_mask_function(mask.window)
    )
    theirs = sdpa_mask(
        batch_size=len(pads),
        q_length=mask.q_len,
        kv_length=mask.kv_len,
        q_offset=int(mask.offset),
        kv_offset=0,
        mask_function=rule,
        attention_mask=torch.arange(mask.kv_len) >= pads[:, None],
        allow_is_causal_skip=False,
    )
    assert torch.equal(mask.dense(), theirs[:, 0])


def test_decode_rows_are_the_last_rows_of_prefill():
    pads = torch.tensor([0, 3, 7])
    for window in (None, 1, 4, 100):
        whole = attention_mask(pads, 12, 12, window=window)
        for q_len in (1, 2, 5):
            assert torch.equal(
                attention_mask(pads, q_len, 12, offset=12 - q_len, window=window), whole[:, -q_len:]
            )


def test_predicates_compose_and_broadcast():
    q, kv, b = torch.arange(6)[:, None], torch.arange(9), torch.tensor(1)
    rule = and_masks(
        at_offset(and_masks(causal, sliding_window(4)), 3), left_padding(torch.tensor([0, 5]))
    )
    assert torch.equal(
        rule(b, None, q, kv), attention_mask(torch.tensor([5]), 6, 9, offset=3, window=4)[0]
    )
    assert rule(b, None, torch.tensor(2), torch.tensor(5)).item() is True and and_masks(causal)(
        b, None, q, kv
    ).shape == (6, 9)


def test_rows_of_pure_padding_are_false():
    mask = Mask(torch.tensor([0, 4, 6]), 6, 6)
    assert mask.dense().any(-1).sum(-1).tolist() == [6, 2, 0]
    block = mask.block(2)
    assert block.kv_num_blocks[2].sum() == block.full_kv_num_blocks[2].sum() == 0


# The block form


@settings(max_examples=150, deadline=None)
@given(masks(), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_blocks_are_those_of_create_block_mask(mask, size):
    ours, batch = mask.block(size), 1 if mask.pad_lens is None else len(mask.pad_lens)
    theirs = create_block_mask(
        mask.predicate, batch, None, mask.q_len, mask.kv_len, device="cpu", BLOCK_SIZE=size
    )
    for side in SIDES:
        assert getattr(ours, f"{side}_indices").shape == getattr(theirs, f"{side}_indices").shape
        assert lists(ours, side) == lists(theirs, side), side
    assert (
        ours.shape == theirs.shape
        and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
        and ours.seq_lengths == theirs.seq_lengths
    )


@pytest.mark.parametrize(
    "pads, q_len, kv_len, offset, window",
    [
        (None, 700, 700, 0, None),
        ([0, 130, 699], 700, 700, 0, None),
        ([0, 130], 700, 700, 0, 128),
        ([5], 129, 1000, 871, 128),
        ([0, 300], 1, 640, 500, None),
        ([0, 300], 1, 640, 500, 128),
        (None, 256, 256, 0, 1),
        ([256], 256, 256, 0, 128),
    ],
)
def test_blocks_of_128(pads, q_len, kv_len, offset, window):
    mask = Mask(None if pads is None else torch.tensor(pads), q_len, kv_len, offset, window)
    theirs = create_block_mask(
        mask.predicate, 1 if pads is None else len(pads), None, q_len, kv_len, device="cpu"
    )
    assert (
        all(lists(mask.block(), side) == lists(theirs, side) for side in SIDES)
        and mask.block().sparsity() == theirs.sparsity()
    )
    assert torch.equal(mask.block().to_dense(), theirs.to_dense())


@pytest.mark.long
def test_attention_through_blocks_is_attention_through_the_matrix(window=300):
    """Compiled: without torch.compile FlexAttention asks the predicate alone and would not notice
    wrong blocks."""
    torch._dynamo.reset()
    attend, full = torch.compile(flex_attention, dynamic=False), 0
    for seed, (pads, offset) in enumerate(
        [
            ([0, 0, 0], 0),
            ([0, 130, 299], 0),
            ([0, 130, 499], 200),
            ([128, 256, 500], 200),
            ([1, 127, 2], 73),
            ([0, 400, 0], 400),
        ]
    ):
        torch.manual_seed(seed)
        mask = Mask(torch.tensor(pads), 300, 500, torch.tensor(offset), window)
        q, k, v = torch.randn(3, 4, 300, 16), torch.randn(3, 2, 500, 16), torch.randn(3, 2, 500, 16)
        scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(
            ~mask.dense()[:, None], -torch.inf
        )
        expected = scores.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1)
        assert torch.allclose(
            attend(q, k, v, block_mask=mask.block(), enable_gqa=True), expected, atol=1e-5
        )
        full += mask.block().full_kv_num_blocks.sum().item()
    assert full > 0


def most_held(work):
    "The most bytes that were allocated at a time."
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as record:
        work()
    events = record.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return torch.tensor([size for _, size in changes]).cumsum(0).max().item()


def test_128k_tokens_take_less_than_64_mb(capfd):
    "With `capfd`, since the profiler talks to stderr."
    tables, n = 16 * 1024**2, 131_072
    for pads, window in ((None, None), ([1000], 128), ([1000], None)):
        pads = None if pads is None else torch.tensor(pads)
        peak = most_held(lambda: block_mask(pads, n, n, window=window))
        assert tables <= peak < min(64e6, 2 * tables)


def test_nothing_is_read_from_the_device():
    mask = Mask(
        torch.empty(2, dtype=torch.long, device="meta"),
        300,
        700,
        torch.empty((), dtype=torch.long, device="meta"),
        128,
    )
    assert mask.dense().shape == (2, 300, 700) and mask.block().kv_indices.shape == (2, 1, 3, 6)
    assert {
        x.device.type
        for x in (mask.dense(), mask.block().kv_indices, mask.block().full_q_num_blocks)
    } == {"meta"}


def test_a_mask_is_built_once_and_does_not_change(monkeypatch):
    mask = Mask(torch.tensor([0, 2]), 4, 4, window=2)
    built = []
    monkeypatch.setattr(
        Mask,
        "predicate",
        property(lambda self, get=Mask.predicate.fget: built.append(1) or get(self)),
    )
    for _ in range(24):
        assert mask.dense() is mask.dense() and mask.block() is mask.block()
    assert len(built) == 2 and mask.block(16) is not mask.block(128)
    with pytest.raises(FrozenInstanceError):
        mask.q_len = 5


def test_without_padding_batch_and_heads_broadcast():
    mask = Mask(None, 200, 200)
    assert (
        mask.dense().shape == (1, 200, 200)
        and mask.block().shape == (1, 1, 200, 200)
        and mask.device == torch.device("cpu")
    )
    assert Mask(torch.tensor([0, 0]), 200, 200).block().shape == (2, 1, 200, 200)
    assert (
        block_mask(None, 5, 5, block_size=8, device="meta").kv_indices.is_meta
        and attention_mask(None, 5, 5, device="meta").is_meta
    )


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(q_len=0), "q_len=0, kv_len=2"),
        (dict(kv_len=2.0), "kv_len=2.0"),
        (dict(q_len=True), "q_len=True"),
        (dict(window=0), "window=0"),
        (dict(offset=-1), "offset=-1"),
        (dict(offset=torch.tensor([1, 2])), "offset=torch.int64 of shape (2,)"),
        (dict(offset=torch.tensor(1.0)), "offset=torch.float32 of shape ()"),
        (dict(pad_lens=[0, 1]), "pad_lens=[0, 1]"),
        (dict(pad_lens=torch.zeros(2)), "pad_lens=torch.float32"),
        (dict(pad_lens=torch.zeros(2, 1, dtype=torch.long)), "of shape (2, 1)"),
        (dict(offset=torch.empty((), dtype=torch.long, device="meta")), "one device"),
        (dict(device="meta"), "device is meta"),
    ],
)
def test_errors_are_sentences(change, said):
    with pytest.raises(ValueError) as error:
        Mask(**{**dict(pad_lens=torch.tensor([0, 1]), q_len=2, kv_len=2), **change})
    assert said in str(error.value)


# Nothing recompiles


def decode(offset_at, steps, kv_len=256, **options):
    """Run decode steps through compiled FlexAttention: (how many graphs were compiled, worst
    difference to a plain softmax)."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    attend = torch.compile(flex_attention, **options)
    pads, worst = torch.tensor([3, 0]), 0.0
    for step in range(steps):
        q, k, v = (
            torch.randn(2, 4, 1, 16),
            torch.randn(2, 2, kv_len, 16),
            torch.randn(2, 2, kv_len, 16),
        )
        mask = Mask(pads, 1, kv_len, offset_at(step % kv_len), window=32)
        out = attend(q, k, v, block_mask=mask.block(), enable_gqa=True)
        if step % 50:
            continue
        scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(
            ~mask.dense()[:, None], -torch.inf
        )
        worst = max(
            worst,
            (out - scores.softmax(-1).nan_to_num() @ v.repeat_interleave(2, 1)).abs().max().item(),
        )
    return counters["stats"]["unique_graphs"], worst


@pytest.mark.long
def test_1000_decode_steps_compile_once():
    graphs, worst = decode(torch.tensor, 1000, dynamic=False)
    assert graphs == 1 and worst < 1e-5


@pytest.mark.filterwarnings("ignore:.*flex_attention called without.*")
def test_an_offset_that_is_an_int_compiles_again():
    assert (
        decode(int, 6, dynamic=False, backend="eager")[0] == 6
        and decode(int, 6, backend="eager")[0] == 2
    )
    assert decode(torch.tensor, 6, backend="eager")[0] == 1


# In a model


@torch.no_grad()
def decoded_logits(offset_of, steps):
    """Logits (steps, 2, V) of a padded batch, token by token over a cache, beside those of each
    sequence alone and whole."""
    model, tokenizer = tiny_gpt_oss()
    texts = ["2+2=412+34=46", "12+34+5=5112+34="]
    ids = [tokenizer(text).input_ids for text in texts]
    length = max(map(len, ids)) - steps
    pads = torch.tensor([length + steps - len(x) for x in ids])
    whole = torch.tensor(
        [[tokenizer.pad_token_id] * int(pad) + x for pad, x in zip(pads, ids)]
    )  # (2, length + steps)

    def run(chunk, q_len, kv_len, offset, place, cache):
        allowed = {
            name: attention_mask(pads, q_len, kv_len, offset=offset, window=window)[:, None]
            for name, window in (("full_attention", None), ("sliding_attention", 8))
        }
        allowed = {
            name: torch.where(mask, 0.0, torch.finfo(torch.float32).min)
            for name, mask in allowed.items()
        }
        positions = (torch.arange(place, place + q_len) - pads[:, None]).clamp(min=0)
        return model(
            chunk, attention_mask=allowed, position_ids=positions, past_key_values=cache
        ).logits[:, -1]

    cache = DynamicCache()
    run(whole[:, :length], length, length, 0, 0, cache)
    batched = [
        run(whole[:, t : t + 1], 1, t + 1, offset_of(t), t, cache)
        for t in range(length, length + steps)
    ]
    alone = [model(torch.tensor([x])).logits[0, -steps:] for x in ids]
    return torch.stack(batched), torch.stack(alone, dim=1)


def test_decode_of_a_padded_batch_is_each_sequence_alone():
    batched, alone = decoded_logits(lambda t: t, steps=8)
    assert (batched - alone).abs().max() < 1e-5


def test_the_naive_decode_mask_is_wrong_for_every_sequence_and_step():
    batched, alone = decoded_logits(lambda t: 0, steps=8)
    assert (batched - alone).abs().amax(-1).min() > 0.1
