"""Routed experts on a CUDA device: grouped products against float64, no waiting for the device,
CUDA graphs, memory and time at gpt-oss-20b's size. (pytest -m gpu -s)"""

import copy
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssForCausalLM

from grpo_nb.model.adapters import expert_weights, route_adapters
from grpo_nb.model.experts_grouped import routed_experts
from grpo_nb.model.packed import EXPERTS, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GiB = 2**30


def experts_module(H, inner, E, dtype):
    torch.manual_seed(0)
    module = GptOssExperts(
        GptOssConfig(
            hidden_size=H,
            intermediate_size=inner,
            num_local_experts=E,
            experts_implementation="eager",
        )
    ).cuda()
    with torch.no_grad():
        for parameter, scale in zip(module.parameters(), (1 / H**0.5, 0.3, 1 / inner**0.5, 0.3)):
            parameter.normal_(0, scale)
    return module.to(dtype)


def inputs(T, H, E, K, dtype):
    torch.manual_seed(1)
    hidden = torch.randn(T, H, device="cuda").to(dtype).requires_grad_()
    return (
        hidden,
        torch.rand(T, E, device="cuda").argsort(1)[:, :K],
        torch.randn(T, K, device="cuda").softmax(-1).to(dtype).requires_grad_(),
    )


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [dict(path="few"), dict(path="many"), dict(path="many", recompute=True, slice_tokens=40)],
    ids=str,
)
def test_values_and_gradients(dtype, options):
    module, (hidden, indices, weights) = (
        experts_module(256, 192, 16, dtype),
        inputs(100, 256, 16, 4, dtype),
    )
    indices = indices % 12  # experts without tokens; some tokens name an expert twice
    leaves, exact = [hidden, weights, *module.parameters()], copy.deepcopy(module).double()
    exact_leaves = [
        hidden.detach().double().requires_grad_(),
        weights.detach().double().requires_grad_(),
        *exact.parameters(),
    ]
    gradient = torch.randn(100, 256, device="cuda")
    truth = routed_experts(
        exact_leaves[0], indices, exact_leaves[1], expert_weights(exact), path="reference"
    )
    ours = routed_experts(hidden, indices, weights, expert_weights(module), **options)
    tolerance = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 0.002}[dtype]
    assert error(ours, truth) < tolerance
    for a, b in zip(
        torch.autograd.grad(ours, leaves, gradient.to(dtype)),
        torch.autograd.grad(truth, exact_leaves, gradient.double()),
    ):
        assert a.dtype == dtype and error(a, b) < tolerance


@pytest.mark.parametrize("options", [dict(path="few"), dict(path="many")], ids=str)
def test_float16_beyond_its_range(options):
    module, (hidden, indices, weights) = (
        experts_module(256, 192, 16, torch.float16),
        inputs(60, 256, 16, 4, torch.float16),
    )
    with torch.no_grad():
        module.gate_up_proj.mul_(3e4).clamp_(-6e4, 6e4)
        module.down_proj.mul_(3e4).clamp_(-6e4, 6e4)
    weights = (weights / 256).detach()
    truth = routed_experts(
        hidden.detach().double(),
        indices,
        weights.double(),
        expert_weights(copy.deepcopy(module).double()),
        path="reference",
    )
    assert not module(hidden, indices, weights).isfinite().all() and truth.abs().max() < 65504
    assert (
        error(routed_experts(hidden, indices, weights, expert_weights(module), **options), truth)
        < 0.01
    )


def test_bf16_never_waits_for_the_device():
    module, (hidden, indices, weights) = (
        experts_module(256, 192, 16, torch.bfloat16).requires_grad_(False),
        inputs(64, 256, 16, 4, torch.bfloat16),
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in (
            dict(path="few"),
            dict(path="many"),
            dict(path="many", recompute=True, slice_tokens=32),
        ):
            routed_experts(
                hidden, indices, weights, expert_weights(module), **options
            ).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_packed_experts_wait_for_their_bounds_only(monkeypatch):
    module, (hidden, indices, weights) = (
        experts_module(256, 192, 16, torch.bfloat16).requires_grad_(False),
        inputs(64, 256, 16, 4, torch.bfloat16),
    )
    for name in EXPERTS:
        setattr(module, name, torch.nn.Parameter(pack(getattr(module, name)), requires_grad=False))
    whole = routed_experts(hidden, indices, weights, expert_weights(module), path="many")
    wanted = torch.autograd.grad(whole.float().square().sum(), (hidden, weights))
    monkeypatch.setattr(
        "grpo_nb.model.experts_grouped.UNPACKED", 5 * 256 * 384 * 2
    )  # five of sixteen at a time
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = routed_experts(hidden, indices, weights, expert_weights(module), path="many")
        got = torch.autograd.grad(parts.float().square().sum(), (hidden, weights))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip((parts, *got), (whole, *wanted)):
        assert error(a, b) < 0.005


@pytest.mark.parametrize("path", ["few", "many"])
def test_in_a_cuda_graph(path):
    module, (hidden, indices, weights) = (
        experts_module(256, 192, 16, torch.bfloat16).requires_grad_(False),
        inputs(8, 256, 16, 4, torch.bfloat16),
    )
    hidden, weights = hidden.detach(), weights.detach()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            routed_experts(hidden, indices, weights, expert_weights(module), path=path)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = routed_experts(hidden, indices, weights, expert_weights(module), path=path)
        indices.copy_(indices.flip(0).roll(1, 1))
        hidden.copy_(torch.randn_like(hidden))
        graph.replay()
        assert (
            error(
                captured,
                routed_experts(hidden, indices, weights, expert_weights(module), path=path),
            )
            < 1e-6
        )


def measured(step):
    "Milliseconds (best of 3) and GiB beyond what was held before."
    step()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held, start = torch.cuda.memory_allocated(), time.perf_counter()
        step()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, (torch.cuda.max_memory_allocated() - held) / GiB


def test_a_layer_of_20b_with_adapters():
    """A step through one layer's experts, 8,192 tokens, LoRA of rank 8 on both matrices:
    transformers' grouped_mm under PEFT, routed, routed_lean."""
    config = GptOssConfig(
        num_hidden_layers=1, layer_types=["full_attention"], vocab_size=512, dtype="bfloat16"
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GptOssForCausalLM(config).bfloat16()
    model = get_peft_model(
        model,
        LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.01)
    mlp, hidden = (
        model.base_model.model.model.layers[0].mlp,
        torch.randn(8192, 2880, device="cuda", dtype=torch.bfloat16),
    )
    rows, gradients = {}, {}
    for name in ("grouped_mm", "routed", "routed_lean"):
        if name == "grouped_mm":
            model.set_experts_implementation(name)
        else:
            route_adapters(model, name)

        def step():
            for p in model.parameters():
                p.grad = None
            x = hidden.clone().requires_grad_()
            _, shares, indices = mlp.router(x)
            mlp.experts(x, indices, shares).square().sum().backward()
            return x.grad

        x_grad = step()
        gradients[name] = [x_grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        rows[name] = measured(step)
        print(
            f"\n{torch.cuda.get_device_name()}, 8,192 tokens, {name}: {rows[name][0]:.1f} "
            f"ms, {rows[name][1]:.2f} GiB more at the peak"
        )
    for name in ("routed", "routed_lean"):
        assert all(error(a, b) < 0.05 for a, b in zip(gradients[name], gradients["grouped_mm"]))
    assert (
        rows["routed"][0] < rows["grouped_mm"][0]
        and rows["routed"][1] < rows["grouped_mm"][1]
        and rows["routed_lean"][1] < 1.0
    )


def test_few_and_many_in_decode():
    """Milliseconds of one layer's experts of 20b without gradients, by the number of tokens: where
    auto should change over."""
    module = experts_module(2880, 2880, 32, torch.bfloat16).requires_grad_(False)
    for T in (1, 2, 4, 8, 16):
        hidden, indices, weights = (x.detach() for x in inputs(T, 2880, 32, 4, torch.bfloat16))
        with torch.no_grad():
            times = {
                path: measured(
                    lambda: [
                        routed_experts(hidden, indices, weights, expert_weights(module), path=path)
                        for _ in range(20)
                    ]
                )[0]
                / 20
                for path in ("few", "many")
            }
            a, b = (
                routed_experts(hidden, indices, weights, expert_weights(module), path=path)
                for path in ("few", "many")
            )
        print(
            f"\n{torch.cuda.get_device_name()}, {T} tokens: "
            + ", ".join(f"{path} {ms:.3f} ms" for path, ms in times.items())
        )
        assert error(a, b) < 0.02
