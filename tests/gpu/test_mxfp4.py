"""MXFP4 on a CUDA device: the CPU's bits, no wait, little memory, CUDA graphs; the lesson's NF4
against bitsandbytes. (pytest -m gpu)"""

import json
from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from grpo_nb.model.mxfp4 import dequantize, dequantize_table, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
MiB = 2**20


def same_bits(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(
            a.cpu().contiguous().view(BITS[a.dtype]), b.cpu().contiguous().view(BITS[b.dtype])
        )
    )


def every_code(scales=255):
    "Rows of 16 blocks that hold all 256 bytes, one row for each scale byte from 0 on."
    return torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(scales, 1, 1), torch.arange(
        scales, dtype=torch.uint8
    )[:, None].repeat(1, 16)


def random_bytes(rows, cols):
    g = torch.Generator("cuda").manual_seed(0)
    return (
        torch.randint(256, (rows, cols // 32, 16), dtype=torch.uint8, device="cuda", generator=g),
        torch.randint(110, 125, (rows, cols // 32), dtype=torch.uint8, device="cuda", generator=g),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_under_every_scale(dtype):
    "The smallest and largest results as well."
    blocks, scales = every_code()
    result = dequantize(blocks.cuda(), scales.cuda(), dtype)
    assert result.is_cuda and same_bits(result, dequantize(blocks, scales, dtype))
    table, expected = dequantize_table(dtype, "cuda"), dequantize_table(dtype)
    assert same_bits(table[: 255 * 256], expected[: 255 * 256]) and table[255 * 256 :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transformers_unpacks_the_same_bits(dtype):
    blocks, scales = (x.cuda() for x in every_code())
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T.contiguous()
    ours, normal = (
        dequantize(blocks, scales, dtype),
        theirs.isfinite() & (theirs.abs() >= torch.finfo(dtype).tiny),
    )
    assert normal.float().mean() > 0.09 and torch.equal(ours[normal], theirs[normal])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize(dtype):
    """Weights of every size, ties, zeros, powers of two and their neighbours; on the grid and off
    it."""
    g = torch.Generator().manual_seed(0)
    low, high = (-20, 12) if dtype == torch.float16 else (-149, 120)
    weight = torch.randn(2048, 64, generator=g, dtype=torch.float64) * 2.0 ** torch.randint(
        low, high, (2048, 1), generator=g
    )
    powers = 2.0 ** torch.arange(low, high, dtype=torch.float64)
    edges = torch.cat([torch.nextafter(powers, powers * 0), powers, powers * 1.25, powers * 1.75])[
        :, None
    ].repeat(1, 64) * torch.linspace(-1, 1, 64, dtype=torch.float64)
    ties = torch.arange(-64, 64, dtype=torch.float64).view(2, 64) / 8
    for case in (
        weight,
        edges,
        ties,
        torch.zeros(2, 64, dtype=torch.float64),
        dequantize(*quantize(weight), torch.float64),
    ):
        case = case.to(dtype)
        blocks, scales = quantize(case)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(quantize(case.cuda()), (blocks, scales)))
        kept = quantize(case.cuda(), scales=(scales + 1).cuda())
        assert torch.equal(kept[0].cpu(), quantize(case, scales=scales + 1)[0])


def test_every_bfloat16():
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    numbers = numbers[: len(numbers) // 32 * 32].view(-1, 32)
    for weight in (numbers, numbers.T.contiguous().view(-1, 32)):
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip(quantize(weight.cuda()), quantize(weight))
        )


def test_round_trip_of_many_pieces():
    weight = dequantize(*random_bytes(9000, 2880))
    blocks, scales = quantize(weight)
    assert same_bits(dequantize(blocks, scales), weight) and same_bits(
        dequantize(blocks.cpu(), scales.cpu()), weight
    )


def test_a_scale_that_is_nan_and_damaged_weights():
    blocks, scales = random_bytes(8, 64)
    scales[3, 1] = 255
    with pytest.raises(ValueError, match="1 of 16 scales are 255"):
        dequantize(blocks, scales)
    with pytest.raises(ValueError, match="one device"):
        dequantize(blocks, scales.cpu())
    result = dequantize(blocks, scales, check=False)
    assert result[3, 32:].isnan().all() and result.isnan().sum() == 32
    with pytest.raises(ValueError, match="NaN, an infinity"):
        quantize(result)


def test_without_the_check_nothing_waits():
    blocks, scales = random_bytes(5760, 2880)
    expected = dequantize(blocks, scales)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = dequantize(blocks, scales, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(result, expected)


@pytest.mark.parametrize("experts", [1, 8])
def test_memory(experts):
    """Beyond the weight: one piece of indices (32 MiB), its exponents and the table, whatever the
    size; nothing but that with `out`."""
    blocks, scales = random_bytes(experts * 5760, 2880)
    table, out = (
        dequantize_table(device="cuda"),
        torch.empty(experts * 5760, 2880, dtype=torch.bfloat16, device="cuda"),
    )
    for keywords, weight in (({}, out.nbytes), ({"out": out, "table": table}, 0)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = dequantize(blocks, scales, check=False, **keywords)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - weight
        assert extra < 42 * MiB, f"{extra / MiB:.1f} MiB"
        del result
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantize(out)
    assert torch.cuda.max_memory_allocated() - before < blocks.nbytes + scales.nbytes + 512 * MiB


@pytest.mark.parametrize("given", [False, True], ids=["table made inside", "table given"])
def test_cuda_graph(given):
    "Recorded once, replayed on other bytes."
    blocks, scales = random_bytes(256, 2880)
    out, table = (
        torch.empty(256, 2880, dtype=torch.bfloat16, device="cuda"),
        dequantize_table(device="cuda") if given else None,
    )
    dequantize(blocks, scales, out=out, table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dequantize(blocks, scales, out=out, table=table)
    for shift in (1, 2):
        blocks.add_(shift)
        scales.add_(shift)
        out.zero_()
        graph.replay()
        assert same_bits(out, dequantize(blocks, scales))


def lesson(*definitions):
    "What the cells of the notebook that hold these definitions define."
    notebook, names = (
        json.loads(
            (Path(__file__).parents[2] / "nbs/model/07_mxfp4.ipynb").read_text(encoding="utf-8")
        ),
        {"torch": torch},
    )
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and any(f"def {name}(" in source for name in definitions):
            exec(source, names)
    return [names[name] for name in definitions]


def test_the_lessons_nf4_is_that_of_bitsandbytes():
    """The levels; whole tensors without double quantisation; the error with it, whose 8-bit format
    is another."""
    functional = pytest.importorskip("bitsandbytes.functional")
    nf4_levels, to_nf4 = lesson("nf4_levels", "to_nf4")
    assert torch.allclose(nf4_levels(), functional.get_4bit_type("nf4", "cpu").double(), atol=1e-6)
    g = torch.Generator().manual_seed(0)
    for weight in (
        torch.randn(512, 1024, generator=g),
        dequantize(*quantize(torch.randn(512, 1024, generator=g)), torch.float32),
    ):
        errors = []
        for double in (False, True):
            packed, state = functional.quantize_4bit(
                weight.cuda(), blocksize=64, quant_type="nf4", compress_statistics=double
            )
            theirs, ours = (
                functional.dequantize_4bit(packed, state).cpu().double(),
                to_nf4(weight, double=double),
            )
            if not double:
                assert torch.isclose(ours, theirs, atol=1e-5).double().mean() > 0.9999
            errors.append([((x - weight).norm() / weight.norm()).item() for x in (ours, theirs)])
        assert all(abs(ours / theirs - 1) < 0.02 for ours, theirs in errors), errors
