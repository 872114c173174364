"Decoding with packed experts: which kernel does what, and its tiles."

from dataclasses import replace

import pytest
import torch

from grpo_nb.model.experts import ExpertWeights, LowRank
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


def test_who_suits(monkeypatch):
    experts = a_layer().experts
    assert not expert_kernel.suits(experts, 1, torch.bfloat16)  # no GPU
    monkeypatch.setattr(expert_kernel, "works", lambda device: True)
    most = expert_kernel.MOST_ROWS
    assert expert_kernel.suits(experts, 1, torch.bfloat16) and expert_kernel.suits(
        experts, most, torch.bfloat16
    )
    assert not expert_kernel.suits(experts, most + 1, torch.bfloat16)
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
        assert not expert_kernel.works.__wrapped__(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not expert_kernel.works.__wrapped__(torch.device("cuda", 0)) and not expert_kernel.works(
        torch.device("cpu")
    )
