"""Routed experts against transformers' eager experts and PEFT's own adapters: values, gradients,
what is computed and what is kept."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo_nb.model import experts
from grpo_nb.model.experts import (
    FEW_ELEMENTS,
    LowRank,
    RoutedParamWrapper,
    adapted,
    expert_weights,
    route_adapters,
    routed_experts,
    swiglu,
)
from grpo_nb.model.tiny import tiny_gpt_oss

WAYS = {
    "reference": dict(path="reference"),
    "few": dict(path="few"),
    "many": dict(path="many"),
    "recompute": dict(path="many", recompute=True),
    "slices": dict(path="many", recompute=True, slice_tokens=3),
}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def experts_module(H, inner, E, dtype=torch.float64, seed=0, spread=4):
    config = GptOssConfig(
        hidden_size=H, intermediate_size=inner, num_local_experts=E, experts_implementation="eager"
    )
    module = GptOssExperts(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    # spread 4: gate and up large enough that both clamps act; 1: none does, so that rounding flips
    # no clamp
    with torch.no_grad():
        for parameter, scale in zip(
            module.parameters(), (spread / H**0.5, 1.0, 1 / inner**0.5, 0.3)
        ):
            parameter.copy_(
                scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return module


def inputs(T, H, E, K, routing="random", dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    indices = (
        torch.rand(T, E, generator=generator).argsort(1)[:, :K]
        if routing == "random"
        else torch.arange(K).expand(T, K)
    )
    weights = (
        torch.randn(T, K, generator=generator, dtype=torch.float64)
        .softmax(-1)
        .to(dtype)
        .requires_grad_()
    )
    return hidden, indices, weights


def value_and_gradients(function, leaves, seed=1):
    y = function()
    gradient = torch.randn(
        y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient, materialize_grads=True)]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12))


@settings(deadline=None, max_examples=60)
@given(
    T=st.integers(0, 9),
    H=st.sampled_from([3, 8, 24]),
    inner=st.sampled_from([1, 8, 16]),
    E=st.integers(2, 6),
    data=st.data(),
    routing=st.sampled_from(["random", "to the first"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_equals_transformers(T, H, inner, E, data, routing, dtype, seed):
    K = data.draw(st.integers(1, min(E, 4)))
    module, (hidden, indices, weights) = (
        experts_module(H, inner, E, dtype, seed),
        inputs(T, H, E, K, routing, dtype, seed),
    )
    leaves = [hidden, weights, *module.parameters()]
    if T == 0:  # eager's answer has no gradient then
        for way in WAYS.values():
            assert routed_experts(
                hidden, indices, weights, expert_weights(module), **way
            ).shape == (0, H)
        return
    theirs = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    for name, way in WAYS.items():
        ours = value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, expert_weights(module), **way), leaves
        )
        for a, b in zip(ours, theirs):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(
                a,
                b,
                rtol=1e-9 if dtype == torch.float64 else 1e-4,
                atol=1e-9 if dtype == torch.float64 else 1e-4,
                msg=lambda m: f"{name}: {m}",
            )


@pytest.mark.parametrize("way", ["few", "many", "slices"])
@pytest.mark.parametrize("sizes", [(32, 24), (20, 12)], ids=["grouped", "loop"])
def test_bf16_is_as_near_the_truth_as_eager(way, sizes):
    module, (hidden, indices, weights) = (
        experts_module(*sizes, 8, torch.bfloat16, spread=1),
        inputs(64, sizes[0], 8, 4, dtype=torch.bfloat16),
    )
    exact, (hidden64, weights64) = (
        copy.deepcopy(module).double(),
        (x.detach().double().requires_grad_() for x in (hidden, weights)),
    )
    truth = value_and_gradients(
        lambda: exact(hidden64, indices, weights64), [hidden64, weights64, *exact.parameters()]
    )
    leaves = (
        [hidden, weights] if way == "few" else [hidden, weights, *module.parameters()]
    )  # few is not for training: weights gathered, gradients added in bf16
    theirs = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    options = {
        **WAYS[way],
        **(dict(slice_tokens=32) if way == "slices" else {}),
    }  # the gradients of slices are added in bf16 too
    ours = value_and_gradients(
        lambda: routed_experts(hidden, indices, weights, expert_weights(module), **options), leaves
    )
    for a, b, exact_value in zip(ours, theirs, truth):
        assert error(a, exact_value) < max(1.15 * error(b, exact_value), 0.004)


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_gradients_of_factors_by_finite_differences(way):
    torch.manual_seed(0)
    weights, (hidden, indices, shares) = (
        expert_weights(experts_module(4, 3, 3).requires_grad_(False)),
        inputs(4, 4, 3, 2),
    )
    a, b, c, d = (
        0.3 * torch.randn(*shape, dtype=torch.float64)
        for shape in ((3, 4, 2), (3, 2, 6), (3, 3, 2), (3, 2, 4))
    )

    def function(hidden, shares, a, b, c, d):
        experts = type(weights)(
            **{
                **weights.__dict__,
                "gate_up_lora": (LowRank(a, b, 0.5),),
                "down_lora": (LowRank(c, d, 2.0),),
            }
        )
        return routed_experts(hidden, indices, shares, experts, **WAYS[way])

    assert torch.autograd.gradcheck(
        function, [x.detach().requires_grad_() for x in (hidden, shares, a, b, c, d)]
    )


class Sizes(TorchDispatchMode):
    "The number of elements of every tensor that is made."

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        self.seen += [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old
        ]
        return result


def with_adapters(names=("default",), r=4, dtype=torch.float64, swap=False, **sizes):
    model, _ = tiny_gpt_oss(
        **{
            **dict(
                hidden_size=32,
                intermediate_size=24,
                num_experts=6,
                num_attention_heads=2,
                num_key_value_heads=1,
            ),
            **sizes,
        }
    )
    model.to(dtype)
    if swap:  # the layout that PEFT 0.19 gives gpt-oss
        for layer in model.model.layers:
            layer.mlp.experts.is_transposed = False
    for number, name in enumerate(names):
        config = LoraConfig(
            r=r + number, lora_alpha=8, target_modules=[], target_parameters=TARGETS
        )
        if number:
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            ).to(dtype)
    return model


def hidden_and_gradients(model, seed=0):
    "What the experts of layer 0 answer, and the gradients of all that is trained there."
    experts, base = (
        model.base_model.model.model.layers[0].mlp.experts,
        model.base_model.model.config,
    )
    hidden, indices, weights = inputs(
        11,
        base.hidden_size,
        base.num_local_experts,
        base.num_experts_per_tok,
        dtype=next(experts.parameters()).dtype,
        seed=seed,
    )
    return value_and_gradients(
        lambda: experts(hidden, indices, weights),
        [hidden, weights, *(p for p in experts.parameters() if p.requires_grad)],
    )


@pytest.mark.parametrize("implementation", ["routed", "routed_lean"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("active", [["default"], ["second"], ["default", "second"]], ids="+".join)
def test_adapters_equal_peft(active, swap, implementation):
    model = with_adapters(("default", "second"), swap=swap)
    model.base_model.set_adapter(active)
    theirs = hidden_and_gradients(model)
    assert route_adapters(model, implementation) == 2
    ours = hidden_and_gradients(model)
    assert len(ours) == 3 + 4 * len(active) and error(ours[0], theirs[0]) < 1e-12
    assert all(error(a, b) < 1e-12 for a, b in zip(ours, theirs))
    with model.disable_adapter():
        assert error(hidden_and_gradients(model)[0], theirs[0]) > 0.01
    model.set_experts_implementation("eager")
    assert torch.equal(hidden_and_gradients(model)[0], theirs[0])


def test_no_delta_is_made_and_frozen_weights_get_no_gradient():
    model = with_adapters()
    full = model.base_model.model.model.layers[0].mlp.experts.get_base_layer().gate_up_proj.numel()
    with Sizes() as theirs:
        hidden_and_gradients(model)
    route_adapters(model)
    with Sizes() as ours:
        hidden_and_gradients(model)
    assert theirs.seen.count(full) >= 2 and max(ours.seen) < full / 2


def test_hooks_of_the_experts_run():
    model, seen = with_adapters(), []
    route_adapters(model)
    base = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    base.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    hidden_and_gradients(model)
    assert seen == [(11, 32)]


def test_views_not_copies():
    model = with_adapters(("default", "second"))
    model.base_model.set_adapter(["default", "second"])
    outer = model.base_model.model.model.layers[0].mlp.experts
    weights, known = (
        expert_weights(outer),
        {p.untyped_storage().data_ptr() for p in outer.parameters()},
    )
    tensors = [weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias] + [
        x for f in weights.gate_up_lora + weights.down_lora for x in (f.a, f.b)
    ]
    assert len(tensors) == 12 and all(x.untyped_storage().data_ptr() in known for x in tensors)
    base = outer.get_base_layer()
    delta = {
        w.parameter_name: sum(w.get_delta_weight(n) for n in ("default", "second"))
        for w in (outer, outer.base_layer)
    }
    for lora, name in ((weights.gate_up_lora, "gate_up_proj"), (weights.down_lora, "down_proj")):
        torch.testing.assert_close(sum(f.scaling * f.a @ f.b for f in lora), delta[name])
    assert weights.gate_up is base.gate_up_proj


def test_saving_merging_and_reloading_by_peft(tmp_path):
    model, prompt = with_adapters(), torch.arange(7, 19)[None]
    keys, plain = set(model.state_dict()), model(prompt).logits
    route_adapters(model)
    routed = model(prompt).logits
    torch.testing.assert_close(routed, plain, rtol=1e-5, atol=1e-5)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        with_adapters().unload(), tmp_path, autocast_adapter_dtype=False
    )
    torch.testing.assert_close(again(prompt).logits, routed, rtol=1e-5, atol=1e-5)
    model.merge_adapter()
    assert expert_weights(model.base_model.model.model.layers[0].mlp.experts).gate_up_lora == ()
    torch.testing.assert_close(model(prompt).logits, routed, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():  # PEFT unmerges here
        assert (model(prompt).logits - routed).abs().max() > 1e-3
    torch.testing.assert_close(model(prompt).logits, routed, rtol=1e-5, atol=1e-5)
    copied = copy.deepcopy(model)
    assert any(isinstance(m, RoutedParamWrapper) for m in copied.modules())
    torch.testing.assert_close(copied(prompt).logits, routed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        model.merge_and_unload()(prompt).logits, routed, rtol=1e-5, atol=1e-5
    )


def test_without_route_adapters_the_delta_is_used_but_right():
    model = with_adapters()
    theirs = hidden_and_gradients(model)
    model.base_model.model.config._experts_implementation = "routed"
    assert all(error(a, b) < 1e-12 for a, b in zip(hidden_and_gradients(model), theirs))


@pytest.mark.parametrize("implementation", ["routed", "routed_lean"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_trains_through_the_registry(implementation, checkpointing):
    gradients = []
    for name in ("eager", implementation):
        model, _ = tiny_gpt_oss(
            hidden_size=32, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1
        )
        if name != "eager":
            assert route_adapters(model, name) == 0
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        model(torch.arange(7, 19)[None]).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(error(b, a) < 1e-4 for a, b in zip(*gradients))


@pytest.mark.parametrize("way", ["few", "many"])
def test_only_what_is_routed_is_computed(way):
    T, K, E, H, inner = 7, 2, 16, 12, 10
    module, (hidden, indices, weights) = experts_module(H, inner, E), inputs(T, H, E, K)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert counter.get_total_flops() == 2 * T * K * (H * 2 * inner + inner * H)


def loud(dtype, scale_up=3e4, scale_down=3e4):
    """Experts whose gate_up and whose answers exceed 65,504, and shares with which their sum does
    not."""
    module = experts_module(16, 8, 4)
    with torch.no_grad():
        module.gate_up_proj.mul_(scale_up / 4)
        module.down_proj.mul_(scale_down)
        for parameter in module.parameters():
            parameter.clamp_(-6e4, 6e4)
    return module.to(dtype)


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_activations_beyond_float16(way):
    module, (hidden, indices, weights) = (
        loud(torch.float16),
        inputs(12, 16, 4, 2, dtype=torch.float16),
    )
    weights = (weights.detach() / 256).requires_grad_()
    exact = copy.deepcopy(module).double()
    hidden64, weights64 = (x.detach().double().requires_grad_() for x in (hidden, weights))
    pre = hidden64.detach() @ exact.gate_up_proj.detach()
    assert pre.abs().max() > 65504 and (swiglu(pre) @ exact.down_proj.detach()).abs().max() > 65504
    assert not module(hidden, indices, weights).isfinite().all()  # eager
    truth = exact(hidden64, indices, weights64).detach()
    ours = routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert (
        ours.dtype == torch.float16
        and truth.abs().max().item() < 65504
        and error(ours, truth) < 0.002
    )
    small = 1e-9 * torch.randn_like(truth)
    theirs = torch.autograd.grad(exact(hidden64, indices, weights64), weights64, small * 1e6)[0]
    gradient = torch.autograd.grad(ours, weights, (small * 1e6).half())[0]
    assert gradient.isfinite().all() and error(gradient, theirs) < 0.02


@pytest.mark.parametrize("way", ["few", "many"])
def test_a_float32_residual_beside_float16_weights_keeps_large_answers(way):
    module, (hidden, indices, weights) = (
        loud(torch.float16),
        inputs(12, 16, 4, 2, dtype=torch.float16),
    )
    hidden, weights = hidden.detach().float(), weights.detach().float()
    truth = (
        copy.deepcopy(module)
        .double()
        .requires_grad_(False)(hidden.double(), indices, weights.double())
    )
    ours = routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way])
    assert (
        ours.dtype == torch.float32
        and truth.abs().max() > 65504
        and ours.isfinite().all()
        and error(ours, truth) < 0.01
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_autocast_is_honoured(way, dtype):
    module, (hidden, indices, weights) = (
        experts_module(32, 24, 8, torch.float32, spread=1),
        inputs(40, 32, 8, 4, dtype=torch.float32),
    )
    leaves = [hidden, weights, *module.parameters()]
    truth = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    with torch.autocast("cpu", dtype):
        eager, ours = (
            module(hidden, indices, weights),
            routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way]),
        )
    assert ours.dtype == torch.float32 and error(eager, truth[0]) / 3 < error(
        ours, truth[0]
    ) < 1.5 * error(eager, truth[0])
    gradient = torch.randn(
        ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).float()
    for a, b in zip(torch.autograd.grad(ours, leaves, gradient), truth[1:]):
        assert a.dtype == torch.float32 and error(a, b) < 0.02


@pytest.mark.parametrize("way", ["few", "many", "slices"])
def test_a_token_may_name_an_expert_twice_and_runs_repeat_bit_for_bit(way):
    module, (hidden, _, weights) = (
        experts_module(16, 8, 4, torch.float32),
        inputs(6, 16, 4, 3, dtype=torch.float32),
    )
    indices = torch.tensor([[1, 1, 2]]).repeat(6, 1)
    results = [
        value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, expert_weights(module), **WAYS[way]),
            [hidden, weights, *module.parameters()],
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    reference = value_and_gradients(
        lambda: routed_experts(hidden, indices, weights, expert_weights(module), path="reference"),
        [hidden, weights, *module.parameters()],
    )
    assert all(error(a, b) < 1e-5 for a, b in zip(results[0], reference))


def test_recomputing_keeps_the_input_only():
    module, (hidden, indices, weights) = (
        experts_module(16, 32, 4).requires_grad_(False),
        inputs(64, 16, 4, 2),
    )

    def kept(**options):
        known, seen = (
            {x.untyped_storage().data_ptr() for x in (hidden, weights, *module.parameters())},
            [],
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
            routed_experts(hidden, indices, weights, expert_weights(module), path="many", **options)
        new = [x for x in seen if x.untyped_storage().data_ptr() not in known]
        return sum(x.numel() for x in new if x.is_floating_point()), sum(
            x.numel() for x in new if not x.is_floating_point()
        )

    places = (
        4 * 64 * 2 + 4
    )  # each pair's expert, token and row, there and back; where each expert's rows end
    assert kept(recompute=True) == (0, places) and kept() == (
        64 * 2 * 64,
        places,
    )  # gate_up of every pair


@pytest.mark.parametrize("routing", ["random", "to the first"])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_experts_rows_some_at_a_time(recompute, routing, monkeypatch):
    """One expert after the other; with a router that sends all to the same ones, its rows are as
    many as there are tokens."""
    module, (hidden, indices, weights) = (
        experts_module(16, 8, 4, dtype=torch.float64),
        inputs(23, 16, 4, 2, routing),
    )
    torch.manual_seed(0)
    factors = [
        (0.3 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        for shape in ((4, 16, 2), (4, 2, 16), (4, 8, 2), (4, 2, 16))
    ]
    leaves = [hidden, weights, *module.parameters(), *factors]

    def run(path):
        given = type(expert_weights(module))(
            **{
                **expert_weights(module).__dict__,
                "gate_up_lora": (LowRank(*factors[:2], 0.5),),
                "down_lora": (LowRank(*factors[2:], 2.0),),
            }
        )
        return value_and_gradients(
            lambda: routed_experts(hidden, indices, weights, given, path=path, recompute=recompute),
            leaves,
        )

    truth = run("reference")
    monkeypatch.setattr(experts, "can_group", lambda *given: False)
    for rows in (23, 5, 1):
        monkeypatch.setattr(experts, "ROWS_OF_ONE", rows)
        for a, b in zip(run("many"), truth):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    out = routed_experts(
        hidden, indices, weights, expert_weights(module), path="many", recompute=recompute
    )
    first, second = (
        torch.autograd.grad(out.sin().sum(), leaves[:3], retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_does_not_depend_on_the_router(recompute, monkeypatch):
    """One expert after the other: a router that sends all tokens to the same ones takes no more
    than an even one."""
    monkeypatch.setattr(experts, "can_group", lambda *given: False)
    monkeypatch.setattr(experts, "ROWS_OF_ONE", 32)
    module, peaks = experts_module(16, 16, 8, torch.float32).requires_grad_(False), []
    for indices in (
        (torch.arange(2) + 2 * torch.arange(256)[:, None]) % 8,
        torch.arange(2).expand(256, 2),
    ):
        hidden, _, weights = inputs(256, 16, 8, 2, dtype=torch.float32)
        with LiveBytes(hidden, indices, weights, *module.parameters()) as live:
            routed_experts(
                hidden, indices, weights, expert_weights(module), path="many", recompute=recompute
            ).sum().backward()
        peaks.append(live.peak)
    assert peaks[1] <= 1.02 * peaks[0], peaks


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", ["many", "recompute", "slices"])
def test_the_graph_may_be_walked_again(way, checkpointed):
    "The first backward pass takes the memory of what was kept; the second one computes it again."
    module, (hidden, indices, weights) = experts_module(16, 8, 4), inputs(20, 16, 4, 2)
    leaves = [hidden, weights, *module.parameters()]

    def run(h, w):
        return routed_experts(h, indices, w, expert_weights(module), **WAYS[way])

    out = (
        torch.utils.checkpoint.checkpoint(run, hidden, weights, use_reentrant=False)
        if checkpointed
        else run(hidden, weights)
    )
    first, second = (
        torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_auto_takes_few_for_a_handful_without_gradients(monkeypatch):
    module, (hidden, indices, weights) = experts_module(16, 8, 4), inputs(4, 16, 4, 2)
    taken = []
    for name in ("_few", "_many"):
        monkeypatch.setattr(
            f"grpo_nb.model.experts.{name}",
            lambda hidden, *rest, name=name: taken.append(name) or hidden,
        )
    routed_experts(hidden, indices, weights, expert_weights(module))
    with torch.no_grad():
        routed_experts(hidden, indices, weights, expert_weights(module))
        T = FEW_ELEMENTS["cpu"] // (2 * (16 * 16 + 8 * 16)) + 1
        routed_experts(*inputs(T, 16, 4, 2), expert_weights(module))
    assert taken == ["_many", "_few", "_many"]


def test_adapted_counts_what_peft_counts():
    model = with_adapters(("default", "second"))
    rows = {row["weight"]: row for row in adapted(model)}
    trainable, total = model.get_nb_trainable_parameters()
    assert sum(row["trainable"] for row in rows.values()) == trainable
    assert (
        rows["model.layers.*.mlp.experts.down_proj"]["adapters"] == "default, second"
        and rows["model.layers.*.self_attn.q_proj.weight"]["adapter parameters"] == 0
    )
    assert sum(row["adapter parameters"] for row in rows.values()) == sum(
        p.numel() for n, p in model.named_parameters() if "lora_" in n
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(indices=torch.zeros(5, 3, dtype=torch.long)), "one row a token"),
        (dict(hidden=torch.zeros(5, 7, dtype=torch.float64)), "7 wide"),
        (dict(indices=torch.full((5, 2), 4)), "experts 0 to 3"),
        (dict(path="fast"), "'fast'"),
        (dict(slice_tokens=0), "slice_tokens is 0"),
    ],
)
def test_errors_are_sentences(change, words):
    hidden, indices, weights = inputs(5, 16, 4, 2)
    arguments = {
        **dict(
            hidden=hidden,
            indices=indices,
            weights=weights,
            experts=expert_weights(experts_module(16, 8, 4)),
        ),
        **change,
    }
    with pytest.raises(ValueError, match=words):
        routed_experts(**arguments)


def test_what_cannot_be_routed_says_so():
    model, _ = tiny_gpt_oss()
    with pytest.raises(ValueError, match="GptOssMLP has no gate_up_proj"):
        expert_weights(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="'routed_lean'"):
        route_adapters(model, "fast")
    bias = get_peft_model(
        model, LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj_bias"])
    )
    with pytest.raises(ValueError, match="gate_up_proj_bias"):
        route_adapters(bias)
    assert bias.base_model.model.config._experts_implementation == "eager"
    model, _ = tiny_gpt_oss()
    route_adapters(model)
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="expert parallel"):
        model(torch.arange(7, 9)[None])


def test_another_adapter_can_be_added_after_routing():
    from grpo_nb.model.tiny import tiny_gpt_oss

    config = LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = get_peft_model(tiny_gpt_oss()[0], config)
    route_adapters(model)
    model.add_adapter("second", config)
    model.set_adapter("second")
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(p, std=0.1)
    ids, logits = torch.arange(8)[None], []
    for implementation in ("routed", "eager"):
        model.get_base_model().set_experts_implementation(implementation)
        logits.append(model(ids).logits)
    with model.disable_adapter():
        plain = model(ids).logits
    assert torch.allclose(*logits, atol=1e-4) and (logits[0] - plain).abs().max() > 1e-3


def test_one_slice_is_kept_and_several_are_computed_again(monkeypatch):
    "`slice_tokens` of a layer's experts, as they are attached to a model."
    model = with_adapters()
    route_adapters(model, "routed_lean")
    layer, calls = model.get_base_model().model.layers[0].mlp.experts, []
    base = layer
    while hasattr(base, "base_layer"):
        base = base.base_layer
    import grpo_nb.model.experts as module

    real = module.routed_experts
    monkeypatch.setattr(
        module,
        "routed_experts",
        lambda *args, **options: calls.append(options) or real(*args, **options),
    )
    ids = torch.arange(2, 12)[None]
    model(ids)
    assert calls[0] == dict(slice_tokens=4096, recompute=False)
    base.slice_tokens = 3
    calls.clear()
    model(ids)
    assert calls[0] == dict(slice_tokens=3, recompute=True)
