"""MXFP4 against exact fractions, against transformers, there and back; what is refused, what memory
it takes."""

import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import grpo_nb.model.mxfp4 as mxfp4
from grpo_nb.model.mxfp4 import dequantize, dequantize_table, e2m1_values, quantize

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MAGNITUDES = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def same_bits(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))
    )


def every_code(scales=255):
    "Rows of 16 blocks that hold all 256 bytes, one row for each scale byte from 0 on."
    return torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(scales, 1, 1), torch.arange(
        scales, dtype=torch.uint8
    )[:, None].repeat(1, 16)


def value(code, scale):
    "The exact number."
    return (-1 if code >= 8 else 1) * MAGNITUDES[code % 8] * Fraction(2) ** (scale - 127)


def exact_block(numbers):
    "(scale byte, codes) of one block by exact arithmetic: the standard's rule."
    numbers = [Fraction(x) for x in numbers]
    amax = max(abs(x) for x in numbers)
    floor_log2 = (
        amax.numerator.bit_length() - amax.denominator.bit_length() if amax else -1000
    )  # the denominator is a power of two
    exponent = min(max(floor_log2 - 2, -127), 127)
    scaled = [min(abs(x) / Fraction(2) ** exponent, Fraction(6)) for x in numbers]
    return exponent + 127, [
        min(range(8), key=lambda code: (abs(x - MAGNITUDES[code]), code % 2)) for x in scaled
    ]


def codes_of(blocks):
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)


# From bytes to weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(dtype):
    "Exact, or the nearest finite number."
    blocks, scales = every_code()
    numbers = torch.tensor(
        [[float(value(code, scale)) for code in range(16)] for scale in range(255)],
        dtype=torch.float64,
    )
    exact = numbers[:, [code for byte in range(256) for code in (byte & 15, byte >> 4)]]
    exact = torch.where(codes_of(blocks) == 8, -0.0, exact)
    largest = torch.finfo(dtype).max
    result = dequantize(blocks, scales, dtype)
    assert result.isfinite().all() and same_bits(result, exact.clamp(-largest, largest).to(dtype))
    if dtype != torch.float16:
        assert torch.equal(result[:252].double(), exact[:252])
    assert (result[0] != 0).any() or dtype == torch.float16


def test_float64_holds_the_whole_format():
    blocks, scales = every_code()
    result = dequantize(blocks, scales, torch.float64)
    assert result.max() == 6 * 2.0**127 and result[result > 0].min() == 2.0**-128


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transformers_unpacks_the_same_bits(dtype):
    blocks, scales = every_code()
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T.contiguous()
    ours, finite = dequantize(blocks, scales, dtype), theirs.isfinite()
    assert finite.float().mean() > 0.5 and torch.equal(
        ours.view(BITS[dtype])[finite], theirs.view(BITS[dtype])[finite]
    )


def test_transformers_layout_of_a_layer():
    g = torch.Generator().manual_seed(0)
    blocks, scales = (
        torch.randint(256, (3, 10, 2, 16), dtype=torch.uint8, generator=g),
        torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8, generator=g),
    )
    theirs = convert_moe_packed_tensors(blocks, scales)
    assert theirs.shape == (3, 64, 10) and same_bits(
        dequantize(blocks, scales).transpose(-1, -2), theirs
    )
    assert same_bits(dequantize(blocks[1], scales[1]), dequantize(blocks, scales)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_table(dtype):
    blocks, scales = quantize(torch.randn(2, 5, 64))
    buffer = torch.full((3, 5, 64), 7.0, dtype=dtype)
    table = dequantize_table(dtype)
    before = table.clone()
    result = dequantize(blocks, scales, dtype, out=buffer[1:], table=table)
    assert (
        result.data_ptr() == buffer[1].data_ptr()
        and same_bits(buffer[1:], dequantize(blocks, scales, dtype))
        and (buffer[0] == 7).all()
    )
    assert torch.equal(table.isnan(), before.isnan()) and torch.equal(
        table.nan_to_num(), before.nan_to_num()
    )


def test_views_of_larger_tensors():
    weight = torch.randn(6, 8, 128)
    blocks, scales = quantize(weight)
    b, s = blocks[::2, :, 1:3], scales[::2, :, 1:3]
    assert (
        not b.is_contiguous()
        and same_bits(dequantize(b, s), dequantize(b.contiguous(), s.contiguous()))
        and same_bits(dequantize(b, s), dequantize(blocks, scales)[::2, :, 32:96])
    )
    turned = weight.transpose(0, 1)
    assert all(
        torch.equal(a, b.transpose(0, 1)) for a, b in zip(quantize(turned), (blocks, scales))
    )
    spread = scales.new_empty(6, 8, 8)[..., ::2].copy_(scales)
    assert torch.equal(quantize(weight, scales=spread)[0], blocks)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8, 9])
def test_pieces(blocks, monkeypatch):
    "The result does not depend on how many blocks are worked on at a time."
    weight = torch.randn(blocks, 32)
    whole = quantize(weight)
    unpacked = dequantize(*whole)
    monkeypatch.setattr(mxfp4, "_blocks_at_a_time", lambda device: 4)
    assert all(torch.equal(a, b) for a, b in zip(quantize(weight), whole)) and same_bits(
        dequantize(*whole), unpacked
    )


def test_more_than_one_real_piece():
    step = mxfp4._blocks_at_a_time(torch.device("cpu"))
    weight = torch.randn(2 * step + 3, 32)
    blocks, scales = quantize(weight)
    for part in (slice(0, 2), slice(step - 1, step + 1), slice(-4, None)):
        assert all(
            torch.equal(a, b[part]) for a, b in zip(quantize(weight[part]), (blocks, scales))
        )
        assert same_bits(dequantize(blocks, scales)[part], dequantize(blocks[part], scales[part]))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32), (32,), (1, 1, 1, 32)])
def test_odd_shapes(shape):
    blocks, scales = quantize(torch.ones(shape))
    assert blocks.shape == (*shape[:-1], shape[-1] // 32, 16) and scales.shape == (
        *shape[:-1],
        shape[-1] // 32,
    )
    assert same_bits(dequantize(blocks, scales), torch.ones(shape, dtype=torch.bfloat16))


def test_meta_tensors_have_shapes():
    blocks, scales = quantize(torch.empty(4, 64, device="meta"))
    assert (
        blocks.shape == (4, 2, 16)
        and dequantize(blocks, scales).shape == (4, 64)
        and scales.is_meta
    )


# From weights to bytes

special = st.sampled_from(
    [
        0.0,
        -0.0,
        0.25,
        0.75,
        1.25,
        1.75,
        2.5,
        3.5,
        5.0,
        6.0,
        7.0,
        4.0,
        2.0**-126,
        2.0**-149,
        3.4e38,
        1e-40,
        -1.0,
    ]
)
blocks_of_numbers = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False)
    | st.floats(-8, 8, width=16)
    | special,
    min_size=32,
    max_size=32,
)


@settings(max_examples=150, deadline=None)
@given(blocks_of_numbers, st.sampled_from([torch.float32, torch.float64]))
def test_quantize_is_the_rule(numbers, dtype):
    blocks, scales = quantize(torch.tensor(numbers, dtype=dtype))
    scale, codes = exact_block(numbers)
    assert scales.tolist() == [scale] and (codes_of(blocks) & 7).tolist() == codes
    assert torch.equal(codes_of(blocks) >= 8, torch.tensor(numbers).signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_every_sixteen_bit_number(dtype):
    """Each of the 65,536 patterns, as float32 and as itself, beside neighbours that give its block
    an exponent."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    numbers = numbers[: len(numbers) // 32 * 32].view(-1, 32)
    for weight in (numbers, numbers.T.contiguous().view(-1, 32)):
        assert all(torch.equal(a, b) for a, b in zip(quantize(weight), quantize(weight.float())))
    weight = numbers[torch.arange(0, len(numbers), 97)]
    blocks, scales = quantize(weight)
    for row, b, s in zip(weight.tolist(), blocks, scales):
        scale, codes = exact_block(row)
        assert s.item() == scale and (codes_of(b) & 7).tolist() == codes


@pytest.mark.parametrize("low", range(-149, 128, 20))
def test_exponents_around_every_power_of_two(low):
    """floor(log2) is exact just below, at and just above a power of two, the smallest numbers of
    float32 included."""
    for exponent in range(low, min(low + 20, 128)):
        power = torch.tensor(2.0**exponent, dtype=torch.float32)
        for amax in (torch.nextafter(power, power * 0), power, torch.nextafter(power, power * 1.5)):
            if not amax.isfinite():
                continue
            weight = torch.cat((amax[None], amax[None] / 3, torch.zeros(30)))
            blocks, scales = quantize(weight)
            scale, codes = exact_block(weight.tolist())
            assert scales.item() == scale and (codes_of(blocks) & 7).tolist() == codes


def test_numbers_beyond_float32():
    "float64 reaches the largest exponent of the format, and is cut at 6 there; more is refused."
    weight = torch.zeros(3, 32, dtype=torch.float64)
    weight[:, 0] = torch.tensor(
        [6 * 2.0**127, 2.0**130 * (1 - 2**-50), 2.0**-300], dtype=torch.float64
    )
    blocks, scales = quantize(weight)
    assert scales.flatten().tolist() == [254, 254, 0]
    assert dequantize(blocks, scales, torch.float64)[:, 0].tolist() == [
        6 * 2.0**127,
        6 * 2.0**127,
        0,
    ]
    with pytest.raises(ValueError, match=r"2\*\*130"):
        quantize(torch.full((32,), 2.0**130, dtype=torch.float64))


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_of_zeros(zero, dtype):
    blocks, scales = quantize(torch.full((2, 32), zero, dtype=dtype))
    assert scales.flatten().tolist() == [0, 0] and same_bits(
        dequantize(blocks, scales, dtype), torch.full((2, 32), zero, dtype=dtype)
    )


def test_one_block_cannot_disturb_another():
    weight = torch.randn(4, 96)
    alone = quantize(weight[:, 32:64])
    weight[:, :32], weight[:, 64:] = 1e30, 0
    blocks, scales = quantize(weight)
    assert torch.equal(blocks[:, 1:2], alone[0]) and torch.equal(scales[:, 1:2], alone[1])


# There and back


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 254), st.integers(0, 254))
def test_round_trips(data, first, second):
    """Weights on the grid never move; bytes come back exactly where a block's largest code is 6 or
    7, or its scale is 0."""
    blocks, scales = (
        torch.tensor(list(data), dtype=torch.uint8).view(2, 1, 16),
        torch.tensor([[first], [second]], dtype=torch.uint8),
    )
    weight = dequantize(blocks, scales, torch.float64)
    again = quantize(weight)
    assert same_bits(dequantize(*again, torch.float64), weight)
    canonical = ((codes_of(blocks) & 7).amax(-1) >= 6) | (scales[:, 0] == 0)
    same = (again[0] == blocks).flatten(1).all(1) & (again[1] == scales).flatten(1).all(1)
    assert torch.equal(same, canonical)
    assert all(
        torch.equal(a, b) for a, b in zip(quantize(dequantize(*again, torch.float64)), again)
    )
    kept = quantize(weight, scales=scales)
    assert torch.equal(kept[0], blocks) and torch.equal(kept[1], scales)


@pytest.mark.parametrize(
    "dtype, low, high",
    [(torch.bfloat16, 0, 252), (torch.float32, 0, 252), (torch.float16, 104, 140)],
    ids=["bf16", "fp32", "fp16"],
)
def test_round_trips_through_narrow_dtypes(dtype, low, high):
    "For every scale under which the dtype holds all codes."
    blocks, scales = (x[low : high + 1] for x in every_code())
    weight = dequantize(blocks, scales, dtype)
    assert torch.equal(weight.double(), dequantize(blocks, scales, torch.float64))
    again = quantize(weight)
    assert (
        same_bits(dequantize(*again, dtype), weight)
        and torch.equal(again[0], blocks)
        and torch.equal(again[1], scales)
    )


def test_what_a_dtype_cannot_hold():
    "One scale more and the largest number is cut; one less and the smallest is rounded."
    for dtype, highest in ((torch.bfloat16, 252), (torch.float32, 252), (torch.float16, 140)):
        blocks, scales = (x[highest + 1 : highest + 2] for x in every_code())
        weight = dequantize(blocks, scales, dtype)
        assert (
            weight.max() == torch.finfo(dtype).max
            and weight.min() == -torch.finfo(dtype).max
            and weight.max() < dequantize(blocks, scales, torch.float64).max()
        )
    blocks, scales = (x[102:104] for x in every_code())
    weight, exact = (
        dequantize(blocks, scales, torch.float16),
        dequantize(blocks, scales, torch.float64),
    )
    assert (
        torch.equal(weight.double(), exact.half().double())
        and (weight.double() != exact).any(1).all()
    )


def test_given_exponents_are_kept():
    torch.manual_seed(0)
    weight = dequantize(*quantize(torch.randn(64, 64)), torch.float64)
    blocks, scales = quantize(weight)
    merged = weight * (1 - 1e-3)
    kept = quantize(merged, scales=scales)
    assert kept[1] is scales and torch.equal(kept[0], blocks)
    assert not torch.equal(quantize(merged)[1], scales)
    for shift in (-3, 2, 60):
        packed = quantize(weight, scales=(scales.int() + shift).to(torch.uint8))
        for row, b, s in zip(
            weight.view(-1, 32).tolist()[:8], packed[0].view(-1, 1, 16), packed[1].flatten()
        ):
            scaled = [
                min(abs(Fraction(x)) / Fraction(2) ** (s.item() - 127), Fraction(6)) for x in row
            ]
            assert (codes_of(b) & 7).tolist() == [
                min(range(8), key=lambda code: (abs(x - MAGNITUDES[code]), code % 2))
                for x in scaled
            ]


# What is refused

packed = quantize(torch.ones(4, 64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_not_finite(bad, dtype):
    weight = torch.randn(4, 64).to(dtype)
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="NaN, an infinity"):
        quantize(weight)


@pytest.mark.parametrize(
    "weight, sentence",
    [
        (torch.ones(4, 33), "divisible by 32"),
        (torch.ones(64, 16), "divisible by 32"),
        (torch.tensor(1.0), "divisible by 32"),
        (torch.ones(4, 32, dtype=torch.int8), "floating-point"),
        (torch.ones(32, dtype=torch.bool), "floating-point"),
    ],
)
def test_weights_that_cannot_be_quantised(weight, sentence):
    with pytest.raises(ValueError, match=sentence):
        quantize(weight)


@pytest.mark.parametrize(
    "scales, sentence",
    [
        (packed[1].int(), "torch.uint8"),
        (packed[1][:2], r"\(4, 2, 16\)"),
        (packed[1].flatten(), "scales"),
        (torch.full((4, 2), 255, dtype=torch.uint8), "8 of 8 scales are 255"),
    ],
)
def test_exponents_that_cannot_be_kept(scales, sentence):
    with pytest.raises(ValueError, match=sentence):
        quantize(torch.ones(4, 64), scales=scales)


@pytest.mark.parametrize(
    "blocks, scales, sentence",
    [
        (packed[0].int(), packed[1], "torch.int32"),
        (packed[0], packed[1].float(), "torch.float32"),
        (packed[0][..., :8], packed[1], r"\(4, 2, 8\)"),
        (packed[0], packed[1][:3], r"\(3, 2\)"),
        (packed[0].flatten(-2), packed[1], r"\(4, 32\)"),
        (packed[0], packed[1].to("meta"), "one device"),
        (packed[0][0, 0], packed[1][0, 0], r"of shape \(16,\)"),
    ],
)
def test_packed_weights_that_are_none(blocks, scales, sentence):
    with pytest.raises(ValueError, match=sentence):
        dequantize(blocks, scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_are_refused(dtype):
    with pytest.raises(ValueError, match="bfloat16"):
        dequantize(*packed, dtype)
    with pytest.raises(ValueError, match="bfloat16"):
        dequantize_table(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scale_that_is_nan(dtype):
    "Refused; without the check its block is NaN and no other."
    blocks, scales = every_code(256)
    with pytest.raises(ValueError, match="16 of 4,096 scales are 255.*NaN"):
        dequantize(blocks, scales, dtype)
    result = dequantize(blocks, scales, dtype, check=False)
    assert result[255].isnan().all() and same_bits(
        result[:255], dequantize(blocks[:255], scales[:255], dtype)
    )


# Around it


def test_nothing_depends_on_the_surroundings():
    weight = torch.randn(4, 64, requires_grad=True)
    blocks, scales = quantize(weight)
    expected = dequantize(blocks, scales)
    assert not expected.requires_grad
    try:
        torch.set_default_dtype(torch.float16)
        assert (
            same_bits(dequantize(blocks, scales), expected)
            and torch.equal(quantize(weight)[0], blocks)
            and e2m1_values().dtype == torch.float64
        )
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        assert same_bits(dequantize(blocks, scales), expected)
    with torch.autocast("cpu"):
        assert same_bits(dequantize(blocks, scales), expected)


class Largest(TorchDispatchMode):
    "The bytes of the largest tensor that is made inside, the given sizes left out."

    def __init__(self, *known):
        super().__init__()
        self.known, self.size = known, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes() not in self.known:
            self.size = max(self.size, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("rows", [3 * 2**11, 3 * 2**13])
def test_temporary_memory_is_bounded(rows):
    """Whatever the size of the weight: the indices of one piece on the way back, one piece of
    float32 on the way there."""
    weight = torch.zeros(rows, 512, dtype=torch.bfloat16)
    blocks, scales = quantize(weight)
    known = [x.nbytes for x in (weight, blocks, scales)]
    with Largest(*known) as largest:
        dequantize(blocks, scales)
    assert largest.size == mxfp4._blocks_at_a_time(torch.device("cpu")) * 16 * 4 == 2**20
    with Largest(*known) as largest:
        quantize(weight)
    assert largest.size <= 2**14 * 32 * 8


def test_bytes_of_gpt_oss_20b():
    "9.45 GiB for the experts, as the released files have it."
    shapes = [(24, 32, 5760, 2880), (24, 32, 2880, 2880)]
    size = sum(
        x.nbytes
        for shape in shapes
        for x in quantize(torch.empty(shape, device="meta", dtype=torch.bfloat16))
    )
    assert (
        size == sum(torch.Size(shape).numel() for shape in shapes) * 17 // 32 == 10_152_345_600
        and round(size / 2**30, 2) == 9.46
    )


def test_faster_than_transformers():
    "About twenty times, measured; two must always be there."
    g = torch.Generator().manual_seed(0)
    blocks, scales = (
        torch.randint(256, (1, 512, 32, 16), dtype=torch.uint8, generator=g),
        torch.randint(110, 125, (1, 512, 32), dtype=torch.uint8, generator=g),
    )

    def best(function):
        def once():
            start = time.process_time()
            function()
            return time.process_time() - start

        return min(once() for _ in range(5))

    assert (
        best(lambda: dequantize(blocks, scales))
        < best(lambda: convert_moe_packed_tensors(blocks, scales)) / 2
    )
