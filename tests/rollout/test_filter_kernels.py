"""Thresholds beside the sorting form, in Triton's interpreter (on a GPU: on the card)."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from grpo_nb.rollout import decode_kernels, filter_kernels  # noqa: E402
from grpo_nb.rollout.sampling import (  # noqa: E402
    SamplingParams,
    processed_log_probs,
    sample_recorded,
    stream_keys,
    stream_numbers,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SOME = [
    (torch.bfloat16, dict(top_k=7)),
    (torch.bfloat16, dict(top_p=0.9)),
    (torch.bfloat16, dict(top_k=20, top_p=0.8, min_p=0.02, temperature=1.3)),
    (torch.float32, dict(top_k=9, top_p=0.95)),
]
MORE = [(dtype, chosen) for dtype in (torch.float32, torch.float16) for _, chosen in SOME[:3]]


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, chosen, block",
    [
        *((*some, 32) for some in SOME),
        (torch.float16, dict(top_k=5, top_p=0.9), 512),  # two chunks a block, most of them left out
        *(pytest.param(*more, 1024, marks=pytest.mark.full) for more in MORE),
    ],
    ids=str,
)
def test_as_by_sorting(dtype, chosen, block, monkeypatch):
    "A flat row, one with tokens that cannot be drawn, one with ties; three blocks."
    if DEVICE == "cpu":  # a small block, as the interpreter is slow
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: block)
        monkeypatch.setattr(filter_kernels, "tiles_of_a_part", lambda rows: 2)  # the last has one
    else:
        block = 4096
    size, generator = 2 * block + 11, torch.Generator().manual_seed(0)
    params = SamplingParams(**chosen)
    logits = (4 * torch.randn(3, size, generator=generator)).to(dtype)
    logits[0], logits[1, ::3] = torch.linspace(-1, 1, size).to(dtype), -torch.inf
    logits[2, 10:30] = logits[2].max()
    uniform = torch.rand(3, dtype=torch.float64, generator=generator)
    logits, uniform = logits.to(DEVICE), uniform.to(DEVICE)
    tokens, logps, left = filter_kernels.draw(logits, params, uniform)
    expected = sample_recorded(logits, params, uniform=uniform)
    looks = filter_kernels.look(logits, params.temperature)
    least = filter_kernels.least_kept(logits, params, looks)
    kept = processed_log_probs(logits, params).isfinite()
    assert torch.equal((logits >= least[:, None]) & logits.isfinite(), kept)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logps, expected[1], atol=1e-5, rtol=0)
    for mine, plain in zip(left.ids.tolist(), expected[2].ids.tolist()):
        assert sorted(i for i in mine if i >= 0) == sorted(i for i in plain if i >= 0)
    torch.testing.assert_close(left.log_mass, expected[2].log_mass, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("min_p, temperatures", [(1.0, (0.6, 2.5)), (0.9999999, (0.7, 1.0))])
def test_the_largest_logit_is_kept_at_every_temperature(min_p, temperatures, monkeypatch):
    "Divided by a temperature and multiplied by it, a logit may come out larger than it was."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 32)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(32, 40, generator=generator)).bfloat16().to(DEVICE)
    uniform = torch.rand(32, dtype=torch.float64, generator=generator).to(DEVICE)
    for temperature in temperatures:
        params = SamplingParams(min_p=min_p, temperature=temperature)
        tokens, logps, left = filter_kernels.draw(logits, params, uniform)
        expected = sample_recorded(logits, params, uniform=uniform)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(logps, expected[1], atol=1e-5, rtol=0)
        assert (left.ids >= 0).any(-1).all()


@pytest.mark.long
def test_chunks_without_a_large_logit_and_zeros_of_both_signs(monkeypatch):
    "A negative zero ties with zero; one chunk holds all that is large; nothing but ties."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 512)
    logits = torch.full((3, 1100), -3.0, device=DEVICE)
    logits[0, 600:620], logits[0, 610:614], logits[0, 5] = -0.0, 0.0, 2.0
    logits[1, 1090:] = torch.arange(10.0, device=DEVICE)
    for half in (torch.bfloat16, torch.float32):
        z = logits.to(half)
        looks = filter_kernels.look(z)
        for k in (3, 6, 9):  # of five chunks, and one that has no logit
            params = SamplingParams(top_k=k, top_p=0.5)
            kept = processed_log_probs(z, params).isfinite()
            least = filter_kernels.least_kept(z, params, looks)
            assert torch.equal(z >= least[:, None], kept)


def test_a_look_is_the_sums_of_blocks_with_tops_and_shares(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 512)
    logits = 3 * torch.randn(2, 1100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    looks = filter_kernels.look(logits, 0.7)
    each = torch.nn.functional.pad(
        logits, (0, 2 * looks.tops.shape[1] * 128 - 1100), value=-torch.inf
    )
    sums, blocks = looks.sums, each.view(2, looks.sums.largest.shape[1], -1) / 0.7
    torch.testing.assert_close(sums.largest, blocks.amax(-1))
    torch.testing.assert_close(sums.largest + sums.total.log(), blocks.logsumexp(-1))
    each = each.view(2, -1, 256)
    assert torch.equal(looks.tops, each.amax(-1))
    blocks = looks.shares.view(2, sums.largest.shape[1], -1)
    found = blocks.log() + sums.largest[..., None]
    torch.testing.assert_close(found.view(2, -1), (each / 0.7).logsumexp(-1))


def test_only_chunks_that_reach_the_bound_are_looked_through(monkeypatch):
    "So a top that says too little hides its chunk."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 512)
    logits = torch.arange(1100.0, device=DEVICE).repeat(2, 1)
    looks = filter_kernels.look(logits)
    assert looks.tops[0, :5].tolist() == [255, 511, 767, 1023, 1099]
    assert (looks.tops[:, 5:] == -torch.inf).all()
    start = filter_kernels.begin(looks, 1100, wanted=3)
    assert start.counts.tolist() == [3, 3] and start.chunks[0, :3].tolist() == [2, 3, 4]
    looks.tops[1, 4] = -torch.inf
    assert filter_kernels.search(logits, looks, wanted=3).tolist() == [1097, 1021]
    assert filter_kernels.begin(looks, 1100, wanted=9).counts.tolist() == [5, 5]  # all of them


def test_a_cut_of_minus_zero_leaves_what_is_below_it_out(monkeypatch):
    "The largest number below zero is no part of the probability that top-p takes its share of."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 512)
    z = torch.nextafter(torch.zeros(1, 1002), torch.tensor(-1.0)).to(DEVICE)
    z[0, 0], z[0, 1:3] = 1.0, -0.0
    params = SamplingParams(top_k=2, top_p=0.55)
    kept = z >= filter_kernels.least_kept(z, params, filter_kernels.look(z))[:, None]
    assert kept[0].tolist() == processed_log_probs(z, params)[0].isfinite().tolist()
    assert kept.sum() == 1


def test_the_smallest_share_keeps_the_largest_logit(monkeypatch):
    "1e-300 is zero as float32, in which a card is given it."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 32)
    z = torch.arange(40.0, device=DEVICE)[None]
    for share in (1e-300, 0.0):
        found = filter_kernels.search(z, filter_kernels.look(z), share=share)
        assert found.tolist() == [39.0]


@pytest.mark.long
@pytest.mark.parametrize(
    "share, dtype",  # each share, and each format with a share below and above .99
    [
        (0.3, torch.float32),
        (0.95, torch.bfloat16),
        (0.999999, torch.float32),
        (1 - 1e-9, torch.bfloat16),
    ],
)
def test_no_threshold_lies_below_its_bound(share, dtype, monkeypatch):
    "Flat rows, sure ones, one logit above all, and chunks that are all alike."
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_kernels, "block_of", lambda columns: 512)
    logits = torch.randn(6, 1100, generator=torch.Generator().manual_seed(0))
    logits *= torch.tensor([0.01, 1, 3, 9, 3, 0])[:, None]
    logits[4, 700] = 40.0
    logits, listed = logits.to(DEVICE, dtype), []
    for temperature in (0.5, 1.0):
        looks = filter_kernels.look(logits, temperature)
        start = filter_kernels.begin(looks, 1100, share=share, temperature=temperature)
        found = filter_kernels.search(logits, looks, share=share, temperature=temperature)
        kept = logits >= found[:, None]
        for row, count in enumerate(start.counts.tolist()):
            chunks = set(start.chunks[row, :count].tolist())
            assert {i // 256 for i in kept[row].nonzero()[:, 0].tolist()} <= chunks
            listed.append(count)
        mass = (logits.double() / temperature).softmax(-1)
        above = torch.where(kept, mass, 0.0).sum(-1)
        more = logits > found[:, None]  # without the tokens that tie with the last one
        assert (above >= share - 2e-6).all()
        assert (torch.where(more, mass, 0.0).sum(-1) <= share + 2e-6).all()
    assert max(listed) == 5 and (min(listed) == 1 or share > 0.9)


@pytest.mark.parametrize("seed", [-9, 0, 2**62])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_numbers_of_a_stream_are_those_of_the_formula(seed, dtype):
    keys = stream_keys(300, seed, DEVICE)
    positions = torch.arange(300, device=DEVICE).mul(7_158_278).to(dtype)  # up to 2**31
    numbers = decode_kernels.stream_numbers(keys, positions)
    assert torch.equal(numbers, stream_numbers(keys, positions))


@pytest.mark.long
def test_the_trial_of_drawing_finds_what_is_drawn_wrongly(monkeypatch):
    device = torch.device(DEVICE)
    filter_kernels.works.cache_clear()
    assert filter_kernels.works(device, torch.float16)
    real = filter_kernels.least_kept
    for module, name, wrong in (
        (filter_kernels, "least_kept", lambda *a: real(*a) + 0.1),  # a few ids less
        (decode_kernels, "draw", lambda logits, uniform: (logits.argmax(-1), logits.amax(-1))),
        (decode_kernels, "stream_numbers", lambda keys, at: torch.full_like(keys, 0.5).double()),
    ):
        filter_kernels.works.cache_clear()
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="drawn otherwise"):
            patch.setattr(module, name, wrong)
            assert not filter_kernels.works(device, torch.float16)
    filter_kernels.works.cache_clear()
