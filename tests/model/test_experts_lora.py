"""Adapters on experts against PEFT's own: values, gradients, what is made, saving and merging."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_experts import error, hidden_and_gradients, with_adapters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_nb.model.adapters import (
    RoutedParamWrapper,
    adapted,
    expert_weights,
    route_adapters,
)
from grpo_nb.model.experts_grouped import COMPUTED_AGAIN, SKIP_LAST_PRODUCT
from grpo_nb.model.tiny import tiny_gpt_oss


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


def test_what_cannot_be_routed_says_so():
    model, _ = tiny_gpt_oss()
    with pytest.raises(ValueError, match="'routed_lean'"):
        route_adapters(model, "fast")
    bias = get_peft_model(
        model, LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj_bias"])
    )
    with pytest.raises(ValueError, match="gate_up_proj_bias"):
        route_adapters(bias)
    assert bias.base_model.model.config._experts_implementation == "eager"


def test_another_adapter_can_be_added_after_routing():
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
    import grpo_nb.model.adapters as module

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
    del base.slice_tokens
    for switch in (COMPUTED_AGAIN, SKIP_LAST_PRODUCT):  # the two passes of a checkpointed layer
        calls.clear()
        with switch:
            model(ids)
        assert calls[0] == dict(slice_tokens=4096, recompute=True) and not COMPUTED_AGAIN
