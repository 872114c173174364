"""Experts in 4 bits on a CUDA device: unpacking, training, decoding from the packed bytes at
gpt-oss-20b's sizes, speed. (pytest -m gpu -s)"""

import time
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.experts import ExpertWeights, LowRank
from grpo_nb.model.experts_grouped import routed_experts
from grpo_nb.model.mxfp4 import dequantize
from grpo_nb.model.packed import PackedWeight, experts_of, pack_experts, unpack
from grpo_nb.rollout import decode_kernels, decode_ops, expert_kernel
from grpo_nb.rollout.decode_ops import LayerWeights, Projection
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def random_packed(E, inside, out, dtype=torch.bfloat16, seed=0, spread=3):
    g = torch.Generator("cuda").manual_seed(seed)
    blocks = torch.randint(
        0, 256, (E, out, inside // 32, 16), dtype=torch.uint8, device="cuda", generator=g
    )
    return PackedWeight(
        blocks,
        torch.randint(
            120 - spread,
            121 + spread,
            blocks.shape[:-1],
            dtype=torch.uint8,
            device="cuda",
            generator=g,
        ),
        dtype,
    )


def packed_layer(E=32, H=2880, inner=2880, dtype=torch.bfloat16, rank=0):
    def draw(*shape, std=0.1):
        return (torch.randn(*shape, device="cuda") * std).to(dtype)

    torch.manual_seed(0)

    def lora(n, m):
        return (LowRank(draw(E, n, rank, std=n**-0.5), draw(E, rank, m), 0.5),) if rank else ()

    return ExpertWeights(
        random_packed(E, H, 2 * inner, dtype),
        draw(E, 2 * inner),
        random_packed(E, inner, H, dtype, 1),
        draw(E, H),
        1.702,
        7.0,
        lora(H, 2 * inner),
        lora(inner, H),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_unpack(dtype):
    weight = random_packed(4, 2880, 5760, dtype, spread=100)
    assert torch.equal(
        unpack(weight.blocks, weight.scales, dtype), dequantize(weight.blocks, weight.scales, dtype)
    )
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            unpack(weight.blocks, weight.scales, dtype)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / 10)
    print(
        f"\nunpack 4 experts to {dtype}: {min(seconds) * 1e6:.0f} µs, "
        f"{weight.numel() * (dtype.itemsize + 0.53) / min(seconds) / 1e12:.2f} TB/s"
    )


def a_product(B, K, N, E, rank=0, gated=True, scales=(118, 123), top=4):
    "Arguments of `expert_product` for random numbers, and what it should give, in float64."
    torch.manual_seed(B + K)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda").to(dtype)

    blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, device="cuda")
    w = PackedWeight(
        blocks,
        torch.randint(*scales, blocks.shape[:-1], dtype=torch.uint8, device="cuda"),
        torch.bfloat16,
    )
    work = decode_kernels.schedule(
        draw(B, E, dtype=torch.float32), top, torch.bfloat16, expert_kernel.tile(B, rank)[0]
    )
    x, bias = draw(B if gated else B * top, K), draw(E, N)
    lora = (
        dict(t=draw(B * top, rank, dtype=torch.float32), up=draw(E, N, rank).mT, scale=0.5)
        if rank
        else {}
    )
    expert = torch.zeros(B * top, dtype=torch.long, device="cuda")
    for e, a, b in work.items.T.tolist():
        if e >= 0:
            expert[a:b] = e
    source = x[work.token.long()] if gated else x
    y = torch.stack(
        [
            row.double() @ dequantize(w.blocks[e], w.scales[e], torch.float64).T
            for row, e in zip(source, expert.tolist())
        ]
    )
    if rank:
        y = y + 0.5 * (lora["t"].double()[:, None] @ lora["up"][expert].double())[:, 0]
    y = y + bias[expert].double()
    if gated:
        gate, upper = y[:, ::2].clamp(max=7.0), y[:, 1::2].clamp(-7.0, 7.0)
        y = (upper + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        y = y * work.weight.double()[:, None]
    options = dict(
        bias=bias,
        **lora,
        **(dict(gather=True, gated=True, alpha=1.702, limit=7.0) if gated else {}),
    )
    return (
        (
            x,
            w,
            work,
            torch.full(
                y.shape, torch.nan, device="cuda", dtype=torch.bfloat16 if gated else torch.float32
            ),
        ),
        options,
        y,
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "B, K, N, E, rank, scales",
    [
        (1, 2880, 5760, 32, 0, (118, 123)),
        (16, 2880, 2880, 32, 0, (118, 123)),
        (33, 2880, 2880, 32, 8, (118, 123)),
        (64, 2880, 5760, 32, 0, (112, 128)),
        (128, 2880, 5760, 32, 0, (118, 123)),
        (256, 2880, 2880, 32, 8, (118, 123)),
        (8, 2880, 5760, 128, 8, (118, 123)),
        (40, 2880, 2880, 128, 0, (118, 123)),  # gpt-oss-120b
        (3, 32, 64, 8, 0, (118, 123)),
        (9, 544, 192, 8, 1, (118, 123)),
        (20, 128, 64, 8, 32, (118, 123)),
        (16, 512, 32, 8, 5, (118, 123)),
    ],
    ids=str,
)
def test_the_kernel_in_gluon(B, K, N, E, rank, scales, gated):
    assert expert_kernel.works(torch.device("cuda", 0))
    arguments, options, expected = a_product(B, K, N, E, rank, gated, scales)
    assert error(expert_kernel.expert_product(*arguments, **options), expected) < 0.006


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rank", [0, 8])
def test_no_tile_changes_a_number(rank, gated, monkeypatch):
    found = {}
    for rows in (16, 32, 64):
        monkeypatch.setattr(expert_kernel, "tile", lambda B, rank: (rows, None))
        arguments, options, expected = a_product(200, 2880, 2880, 32, rank, gated)
        found[rows] = expert_kernel.expert_product(*arguments, **options)
    assert error(found[16], expected) < 0.006
    assert torch.equal(found[16], found[32]) and torch.equal(found[16], found[64])


@pytest.mark.parametrize("B", [8, 40])
def test_scales_from_tiny_to_huge(B):
    "Each column has its own scale, from 2 ** -47 to 2 ** 43, and is judged by itself."
    (x, w, work, out), options, _ = a_product(B, 2880, 2880, 8, gated=False, scales=(0, 6))
    w.scales.add_(torch.randint(80, 166, (8, 2880, 1), dtype=torch.uint8, device="cuda"))
    options["bias"] = torch.zeros_like(options["bias"])
    got = expert_kernel.expert_product(x, w, work, out, **options)
    for e, a, b in work.items.T.tolist():
        if e < 0:
            continue
        expected = (
            x[a:b].double()
            @ dequantize(w.blocks[e], w.scales[e], torch.float64).T
            * work.weight[a:b].double()[:, None]
        )
        assert ((got[a:b] - expected).norm(dim=0) / expected.norm(dim=0)).max() < 0.01


def test_who_decodes_what():
    experts = packed_layer(E=8, H=512, inner=512)
    assert expert_kernel.suits(
        experts, expert_kernel.MOST_ROWS[32], torch.bfloat16
    ) and not expert_kernel.suits(experts, expert_kernel.MOST_ROWS[32] + 1, torch.bfloat16)
    assert not expert_kernel.suits(experts, 1, torch.float16)


@pytest.mark.parametrize("B", [1, 2, 8, 16, 33, 40, 64, 128, 200, 256, 384])
@pytest.mark.parametrize("rank", [0, 8])
def test_decode_reads_the_packed_bytes(B, rank):
    experts = packed_layer(rank=rank)
    nothing, H = Projection(torch.empty(0)), 2880
    torch.manual_seed(B)
    layer = LayerWeights(
        torch.empty(0),
        nothing,
        nothing,
        nothing,
        nothing,
        torch.empty(0),
        torch.rand(H, device="cuda").bfloat16(),
        (torch.randn(32, H, device="cuda") * 0.05).bfloat16(),
        torch.randn(32, device="cuda").bfloat16(),
        experts,
    )
    x, gamma = torch.randn(B, H, device="cuda").bfloat16(), torch.rand(H, device="cuda").bfloat16()
    settings = dict(top=4, eps=1e-5, dtype=torch.bfloat16)
    ours, formula = (
        decode_kernels.moe(x, layer, gamma, **settings),
        decode_ops.moe(x, layer, gamma, path="many", **settings),
    )
    dense = replace(
        layer,
        experts=replace(
            experts, gate_up=experts.gate_up.dequantize(), down=experts.down.dequantize()
        ),
    )
    of_dense = decode_kernels.moe(x, dense, gamma, **settings)
    rows = (
        ((ours[0] - formula[0]).float().norm(dim=1) / formula[0].float().norm(dim=1)).sort().values
    )
    assert (
        rows[int(0.9 * (B - 1))] < 0.02
    )  # a row whose fifth expert is nearly its fourth may choose otherwise
    assert error(ours[0], of_dense[0]) < 0.01
    seconds = {}
    for name, which in (("packed", layer), ("dense", dense)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode_kernels.moe(x, which, gamma, **settings)
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        seconds[name] = (time.perf_counter() - start) / 20
    print(
        f"\nmix of {B} rows, rank {rank}: packed {seconds['packed'] * 1e6:.0f} µs, dense "
        f"{seconds['dense'] * 1e6:.0f} µs"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [0, 8])
def test_training(dtype, rank):
    experts = packed_layer(E=8, H=512, inner=384, dtype=dtype, rank=rank)
    torch.manual_seed(1)
    hidden, weights = (
        torch.randn(300, 512, device="cuda").to(dtype).requires_grad_(),
        torch.rand(300, 4, device="cuda").to(dtype).requires_grad_(),
    )
    indices = torch.rand(300, 8, device="cuda").argsort(1)[:, :4]
    leaves = [
        hidden,
        weights,
        *(t.requires_grad_() for f in experts.gate_up_lora + experts.down_lora for t in (f.a, f.b)),
    ]
    dense = replace(experts, gate_up=experts.gate_up.dequantize(), down=experts.down.dequantize())
    results = []
    for which in (experts, dense):
        y = routed_experts(
            hidden, indices, weights, which, path="many", recompute=True, slice_tokens=128
        )
        results.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for a, b in zip(*results):
        assert error(a, b) < 0.01 and a.isfinite().all()


def test_a_model_rolls_out_and_trains():
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=8,
        hidden_size=512,
        intermediate_size=512,
        vocab_size=2048,
        attn_implementation="sink",
    )
    with torch.device("cuda"):
        model = GptOssForCausalLM(config).bfloat16().requires_grad_(False)
    pack_experts(model)
    model = get_peft_model(
        model,
        LoraConfig(
            r=8,
            target_modules=["q_proj", "v_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    route_adapters(model, "routed_lean")
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way
    prompts = [torch.randint(0, 2048, (n,)).tolist() for n in (5, 90, 300)]
    rollout = engine.generate(
        prompts, SamplingParams(max_tokens=32, n=4, stop_token_ids=(), seed=0)
    )
    other = RolloutEngine(model, None, through_modules=True).generate(
        prompts, SamplingParams(max_tokens=32, n=4, stop_token_ids=(), seed=0)
    )
    assert (
        rollout.logps[:, 0] - other.logps[:, 0]
    ).abs().median() < 1.0 and rollout.logps.isfinite().all()
    ids = torch.tensor(
        [rollout.prompt_ids[-1] + rollout.completion_ids[-1].tolist()], device="cuda"
    )
    model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for p in model.parameters()
        if p.requires_grad
    )
    assert all(type(e.gate_up_proj) is PackedWeight for e in experts_of(model).values())
