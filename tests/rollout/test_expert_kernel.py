"Decoding with packed experts: which kernel does what, and its tiles."

from dataclasses import replace

import pytest
import torch

from grpo_nb.kernels.compile_together import noted_launches
from grpo_nb.model.experts import ExpertWeights, LowRank
from grpo_nb.model.mxfp4 import e2m1_values
from grpo_nb.model.packed import pack
from grpo_nb.rollout import decode_kernels, decode_ops, expert_kernel
from grpo_nb.rollout.decode_ops import LayerWeights, Projection


def a_layer(E=4, H=64, inner=64, rank=0, dtype=torch.bfloat16):
    torch.manual_seed(0)

    def draw(*shape, std=0.1):
        return (torch.randn(*shape) * std).to(dtype)

    def lora(n, m):
        return (LowRank(draw(E, n, rank), draw(E, rank, m), 0.5),) if rank else ()

    experts = ExpertWeights(
        pack(draw(E, H, 2 * inner)),
        draw(E, 2 * inner),
        pack(draw(E, inner, H)),
        draw(E, H),
        1.702,
        7.0,
        lora(H, 2 * inner),
        lora(inner, H),
    )
    nothing = Projection(torch.empty(0))
    return LayerWeights(
        torch.empty(0),
        nothing,
        nothing,
        nothing,
        nothing,
        torch.empty(0),
        torch.rand(H).to(dtype),
        draw(E, H),
        draw(E),
        experts,
    )


EXPECTED = {1: 8, 9: 8, 16: 8, 17: 16, 130: 32}  # rows of a batch -> of a tile


def plain_product(
    x,
    weight,
    work,
    out,
    bias,
    t=None,
    up=None,
    scale=1.0,
    gather=False,
    gated=False,
    alpha=0.0,
    limit=0.0,
):
    "`expert_kernel.expert_product`, a tile at a time."
    assert work.rows == EXPECTED[len(work.slot) // 2]
    dense, out = weight.dequantize(), out.fill_(torch.nan)
    for e, a, b in work.items.T.tolist():
        if e < 0:
            continue
        assert 0 < b - a <= work.rows
        y = (x[work.token[a:b].long()] if gather else x[a:b]) @ dense[e] + bias[e]
        if up is not None:
            y = y + scale * t[a:b] @ up[e]
        if gated:
            gate, upper = y.unflatten(1, (-1, 2)).unbind(-1)
            y = (
                (upper.clamp(-limit, limit) + 1)
                * gate.clamp(max=limit)
                * torch.sigmoid(alpha * gate.clamp(max=limit))
            )
        else:
            y = y * work.weight[a:b, None]
        out[a:b] = y
    return out


@pytest.mark.parametrize("B, rank", [(1, 4), (9, 0), (16, 4), (17, 0), (130, 0), (130, 4)])
def test_tiles_serve_each_pair_once(monkeypatch, B, rank):
    "In float32, which Triton's interpreter multiplies rightly."
    monkeypatch.setattr(expert_kernel, "suits", lambda experts, B, dtype: True)
    monkeypatch.setattr(expert_kernel, "expert_product", plain_product)
    layer, x, gamma = a_layer(rank=rank, dtype=torch.float32), torch.randn(B, 64), torch.rand(64)
    settings = dict(top=2, eps=1e-5, dtype=torch.float32)
    for mine, formula in zip(
        decode_kernels.moe(x, layer, gamma, **settings), decode_ops.moe(x, layer, gamma, **settings)
    ):
        assert (mine - formula).norm() < 1e-5 * formula.norm()


class Pointer:
    "Where the kernel reads: a tensor and places in it."

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor.flatten(), at

    def __add__(self, more):
        return Pointer(self.tensor, self.at + more)


class PlainGluon:
    "What a product says to Gluon, in plain tensors, one addition after the other."

    float32, int32, int64, bfloat16 = torch.float32, torch.int32, torch.int64, torch.bfloat16
    static_range, broadcast = range, staticmethod(torch.broadcast_tensors)
    nvidia = property(lambda self: self)
    ampere = nvidia

    def SliceLayout(self, *of):
        return None

    DotOperandLayout = SliceLayout

    def convert_layout(self, x, layout, assert_trivial=False):
        return x

    def arange(self, start, end, layout):
        return torch.arange(start, end)

    def zeros(self, shape, dtype, layout):
        return torch.zeros(shape, dtype=dtype)

    def minimum(self, x, most):
        return x.clamp(max=most)

    def load(self, pointer, mask=None, other=0):
        found = pointer.tensor[pointer.at]
        return found if mask is None else torch.where(mask, found, other)

    def join(self, x, y):
        return torch.stack([x, y], -1)

    def inline_asm_elementwise(self, code, registers, inputs, dtype, is_pure, pack):
        """As `_unpack_ptx` does for two words that are neighbours: register p has the codes p and
        p + 4 of the first, register 4 + p of the second."""
        words, factor = inputs
        factor = 2.0 ** ((factor.double() % 2**16) // 128 - 127)  # a bfloat16 without mantissa
        codes = words.long().unflatten(-1, (-1, 2))[..., None] >> 4 * torch.arange(8) & 15
        numbers = e2m1_values().double()[codes].unflatten(-1, (2, 4))  # (..., word, half, p)
        numbers = numbers * 2.0**-126 * factor.unflatten(-1, (-1, 2))[..., None, None]
        registers = numbers.transpose(-3, -2).flatten(-2)  # (..., pair, half, register)
        return [registers[..., i].flatten(-2).to(dtype[i]) for i in range(8)]

    def mma_v2(self, a, b, acc):
        for k in range(a.shape[-1]):
            acc = acc + a[:, :, k, None].float() * b[:, None, k].float()
        return acc

    def sum(self, x, axis):
        return x[0] + x[1] + x[2] + x[3]


def test_each_tile_computes_the_same_product(monkeypatch):
    "The kernel's own lines in plain tensors: 32 rows in tiles of 8, 16, 32 and 64, bit for bit."
    for name in ("_unpack_words", "_permute_inputs", "_last_dimension", "_blocks", "_load_step"):
        monkeypatch.setattr(expert_kernel, name, getattr(expert_kernel, name).fn)
    monkeypatch.setattr(expert_kernel, "gl", PlainGluon())
    monkeypatch.setattr(expert_kernel, "_WARPS", expert_kernel.WARPS)
    monkeypatch.setattr(expert_kernel, "_EIGHT", (torch.bfloat16,) * 8)
    torch.manual_seed(0)
    K = 544  # a warp's last step has no blocks left
    weight, x = pack(torch.randn(1, K, 64)), torch.randn(32, K).bfloat16()
    words = Pointer(weight.blocks.view(torch.int32))

    def product(rows, columns):
        found = torch.empty(64, 32)
        for n in range(0, 64, columns):
            for m in range(0, 32, rows):
                source = (m + torch.arange(rows)).clamp(max=31)
                y = expert_kernel._split_product.fn(
                    Pointer(x),
                    words,
                    Pointer(weight.scales),
                    source,
                    n,
                    K,
                    rows,
                    columns,
                    *[None] * 4,
                )
                found[n : n + columns, m : m + rows] = y[:, : 32 - m]
        return found

    first, *others = [product(*tile) for tile in expert_kernel.COLUMNS.items()]
    exact = weight.dequantize()[0].double().T @ x.double().T
    assert (first - exact).norm() < 1e-6 * exact.norm()
    assert all(torch.equal(first, other) for other in others)


def test_who_suits(monkeypatch):
    experts = a_layer().experts
    assert not expert_kernel.suits(experts, 1, torch.bfloat16)  # no GPU
    monkeypatch.setattr(expert_kernel, "works", lambda device: True)
    most = expert_kernel.MOST_ROWS[32]
    assert expert_kernel.suits(experts, 1, torch.bfloat16) and expert_kernel.suits(
        experts, most, torch.bfloat16
    )
    assert not expert_kernel.suits(experts, most + 1, torch.bfloat16)
    wide, most = a_layer(rank=24).experts, expert_kernel.MOST_ROWS[16]
    assert expert_kernel.suits(wide, most, torch.bfloat16)
    assert not expert_kernel.suits(wide, most + 1, torch.bfloat16)
    assert not expert_kernel.suits(experts, 1, torch.float16) and not expert_kernel.suits(
        experts, 1, torch.float32
    )
    assert not expert_kernel.suits(
        replace(experts, down=experts.down.dequantize()), 1, torch.bfloat16
    )
    narrow = a_layer(H=32, inner=32).experts  # 64 and 32 columns
    assert expert_kernel.suits(narrow, 16, torch.bfloat16) and not expert_kernel.suits(
        narrow, 17, torch.bfloat16
    )
    limit = expert_kernel.MOST_RANK
    assert expert_kernel.suits(
        a_layer(rank=limit).experts, 1, torch.bfloat16
    ) and not expert_kernel.suits(a_layer(rank=limit + 1).experts, 1, torch.bfloat16)


def test_adapters_of_a_high_rank_leave_no_registers_for_32_rows():
    assert expert_kernel.tile(127) == (16, 64) and expert_kernel.tile(128) == (32, 64)
    experts = a_layer(rank=24).experts
    assert expert_kernel.rank(experts) == 24 and expert_kernel.rank(a_layer().experts) == 0
    assert [expert_kernel.tile(256, rank) for rank in (0, 16, 24)] == [(32, 64), (32, 64), (16, 64)]


def test_a_triton_that_cannot_compile_it_is_told_of(monkeypatch):
    class Changed:
        def warmup(self, *arguments, **settings):
            raise TypeError("warmup() wants something else")

    monkeypatch.setattr(expert_kernel, "_experts_kernel", Changed())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    with pytest.warns(
        UserWarning, match="cannot compile the kernel for packed experts .*wants something else"
    ):
        assert not expert_kernel.compiles.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setattr(expert_kernel, "compiles", lambda device: pytest.fail("compiled"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not expert_kernel.works(torch.device("cuda", 0))
    assert not expert_kernel.works(torch.device("cpu"))


def test_where_launches_are_noted_it_is_noted_too(monkeypatch):
    "And compiled with the others; what a Triton refuses is found when the first step is launched."
    asked = []

    class Kernel:
        def warmup(self, *arguments, **settings):
            asked.append(settings)

    monkeypatch.setattr(expert_kernel, "_experts_kernel", Kernel())
    monkeypatch.setattr(expert_kernel, "compiles", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with noted_launches():
        assert expert_kernel.works(torch.device("cuda", 0)) and len(asked) == 1
    assert not expert_kernel.works(torch.device("cuda", 0)) and len(asked) == 1
