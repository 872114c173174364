"""The reader of PEFT's layers: the formula made of what it reads, against PEFT's own forward pass,
over the states and variants that a layer can be in; and what each caller makes of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_nb.model.adapters import AdaptedLayer, Adapter, expert_weights, read_lora
from grpo_nb.model.export import check_mergeable
from grpo_nb.model.fused_layers import plain_lora
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.decoder import CannotRead, read_projection

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def adapted(config=None, module=None, names=("default",), **settings):
    "A module wrapped by PEFT, with every adapter's numbers drawn at random; and its model."
    torch.manual_seed(1)
    inner = nn.ModuleDict({"it": module or nn.Linear(6, 4)})
    made = config or LoraConfig(target_modules=["it"], **{"r": 2, "lora_alpha": 3, **settings})
    model = get_peft_model(inner, made, adapter_name=names[0])
    for number, name in enumerate(names[1:], start=3):
        model.add_adapter(name, LoraConfig(target_modules=["it"], r=number, lora_alpha=5))
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data = torch.randn_like(parameter)
    return model.double().eval(), model.base_model.model["it"]


def formula(layer, x):
    "The base layer and the adapters in use."
    y = layer.base(x)
    for adapter in layer.in_use:
        y = y + adapter.scaling * (x @ adapter.down.T) @ adapter.up.T
    return y


@settings(deadline=None, max_examples=60)
@given(
    rslora=st.booleans(),
    bias=st.booleans(),
    state=st.sampled_from(["in use", "disabled", "merged"]),
    names=st.sampled_from([("default",), ("first", "second"), ("first", "second", "third")]),
    data=st.data(),
)
def test_the_formula_of_what_is_read_is_peft_s_forward(rslora, bias, state, names, data):
    model, module = adapted(module=nn.Linear(6, 4, bias=bias), names=names, use_rslora=rslora)
    active = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    model.base_model.set_adapter(active)
    if state == "disabled":
        model.base_model.disable_adapter_layers()
    if state == "merged":
        model.merge_adapter()
    layer = read_lora(module)
    assert isinstance(layer, AdaptedLayer)
    assert [adapter.name for adapter in layer.active] == active
    assert layer.in_use == (layer.active if state == "in use" else ())
    torch.testing.assert_close(formula(layer, X), module(X), rtol=1e-10, atol=1e-10)
    for adapter in layer.active:
        delta = module.get_delta_weight(adapter.name)
        torch.testing.assert_close(adapter.delta().double(), delta, rtol=1e-5, atol=1e-5)


def test_nothing_is_copied():
    _, module = adapted()
    (adapter,) = read_lora(module).in_use
    assert adapter.down is module.lora_A["default"].weight
    assert adapter.up is module.lora_B["default"].weight
    assert adapter.factors == (module.lora_A["default"], module.lora_B["default"])
    assert read_lora(module).base is module.base_layer


def test_a_reading_follows_the_layer():
    model, module = adapted()
    layer = read_lora(module)
    assert layer.in_use == (Adapter(module, "default"),)
    model.merge_adapter()
    assert layer.in_use == ()
    model.unmerge_adapter()
    with model.disable_adapter():
        assert layer.in_use == ()
    assert layer.in_use


def test_merged_and_disabled_is_a_contradiction():
    model, module = adapted()
    model.merge_adapter()
    assert not read_lora(module).merged_but_disabled
    module._disable_adapters = True
    assert read_lora(module).merged_but_disabled and read_lora(module).in_use == ()


def test_dropout_counts_while_a_layer_trains():
    model, module = adapted(lora_dropout=0.25)
    (adapter,) = read_lora(module).in_use
    assert adapter.dropout == 0.0
    model.train()
    assert adapter.dropout == 0.25
    model, module = adapted(lora_dropout=0.0)
    model.train()
    assert read_lora(module).in_use[0].dropout == 0.0


def test_an_adapter_that_is_active_elsewhere_is_not_listed():
    inner = nn.ModuleDict({"one": nn.Linear(6, 4), "two": nn.Linear(6, 4)})
    model = get_peft_model(inner, LoraConfig(target_modules=["one"], r=2), adapter_name="first")
    model.add_adapter("second", LoraConfig(target_modules=["two"], r=2))
    model.base_model.set_adapter(["first", "second"])
    one, two = (model.base_model.model[name] for name in ("one", "two"))
    assert [adapter.name for adapter in read_lora(one).active] == ["first"]
    assert [adapter.name for adapter in read_lora(two).active] == ["second"]


@pytest.mark.parametrize("module", [nn.Linear(6, 4), nn.Embedding(4, 3), nn.LayerNorm(6)])
def test_what_peft_has_not_wrapped_has_no_reading(module):
    assert read_lora(module) is None


def test_another_kind_of_adapter_has_no_reading():
    _, module = adapted(IA3Config(target_modules=["it"], feedforward_modules=[]))
    assert read_lora(module) is None


def test_an_embedding_s_factors():
    _, module = adapted(module=nn.Embedding(10, 4))
    (adapter,) = read_lora(module).in_use
    assert adapter.down.shape == (2, 10) and adapter.up.shape == (4, 2)
    assert adapter.variant is None
    ids = torch.arange(10)
    expected = module.base_layer.weight + adapter.delta().T
    torch.testing.assert_close(expected, module(ids), rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_stored_the_other_way_round():
    _, module = adapted(module=Conv1D(4, 6), fan_in_fan_out=True)
    layer = read_lora(module)
    assert module.fan_in_fan_out and plain_lora(module, torch.float64) is None
    torch.testing.assert_close(formula(layer, X), module(X), rtol=1e-10, atol=1e-10)


VARIANTS = {
    "DoRA": (dict(use_dora=True), "DoRA"),
    "a trained bias": (dict(lora_bias=True), "a trained bias"),
    "AdaLoRA": (
        dict(config=AdaLoraConfig(target_modules=["it"], init_r=2, total_step=10)),
        "a factor of the kind Parameter",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_named(name):
    config, words = VARIANTS[name]
    _, module = adapted(**config)
    layer = read_lora(module)
    assert [adapter.variant for adapter in layer.in_use] == [words]
    assert read_lora(adapted()[1]).in_use[0].variant is None
    with pytest.raises(CannotRead, match=r"variant of LoRA \(DoRA, AdaLoRA, a trained bias\)"):
        read_projection(module)
    assert plain_lora(module, torch.float64) is None
    with pytest.raises(ValueError, match="is not plain LoRA|kind SVDLinear"):
        check_mergeable("it", module)


def test_a_variant_beside_a_plain_adapter():
    model, module = adapted()
    dora = LoraConfig(target_modules=["it"], r=2, use_dora=True)
    model.add_adapter("dora", dora)
    model.base_model.set_adapter(["default", "dora"])
    assert [adapter.variant for adapter in read_lora(module).in_use] == [None, "DoRA"]
    model.base_model.set_adapter("default")
    assert [adapter.variant for adapter in read_lora(module).in_use] == [None]


STATES = {  # what is done to a model, and whether its layers can still be fused
    "in use": (lambda model: None, True),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), False),
    "merged": (lambda model: model.merge_adapter(), False),
    "trains with dropout": (lambda model: model.train(), False),
}


@pytest.mark.parametrize("state", STATES)
def test_what_callers_make_of_a_state(state):
    change, fuses = STATES[state]
    model, module = adapted(lora_dropout=0.5)
    module.base_layer.requires_grad_(False)
    change(model)
    assert (read_projection(module).a is not None) == bool(read_lora(module).in_use)
    assert (plain_lora(module, torch.float64) is not None) == fuses
    check_mergeable("it", module)


def test_what_callers_say_to_a_merged_adapter_that_is_switched_off():
    model, module = adapted()
    model.merge_adapter()
    module._disable_adapters = True
    with pytest.raises(CannotRead, match="a merged adapter is switched off"):
        read_projection(module)
    with pytest.raises(ValueError, match=r"call unmerge_adapter\(\) first"):
        check_mergeable("it", module)
    assert plain_lora(module, torch.float64) is None


def test_two_adapters_decode_as_one_of_both_ranks():
    model, module = adapted(names=("first", "second"))
    model.base_model.set_adapter(["first", "second"])
    p = read_projection(module)
    assert p.a.shape == (5, 6) and p.b.shape == (4, 5)
    y = X @ p.weight.T + p.bias + p.scaling * (X @ p.a.T) @ p.b.T
    torch.testing.assert_close(y, module(X), rtol=1e-10, atol=1e-10)
    assert plain_lora(module, torch.float64) is None


def test_experts_are_read_by_the_same_reader():
    model = get_peft_model(
        tiny_gpt_oss()[0],
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    for name, parameter in wrapper.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    (adapter,) = read_lora(wrapper).in_use
    assert adapter.variant is None and adapter.scaling == 3 and adapter.dropout == 0.0
    weights = expert_weights(wrapper)
    (factors,) = (
        weights.gate_up_lora if wrapper.parameter_name == "gate_up_proj" else weights.down_lora
    )
    delta = wrapper.get_delta_weight("default")
    torch.testing.assert_close(factors.scaling * factors.a @ factors.b, delta)
    model.merge_adapter()
    assert read_lora(wrapper).in_use == () and expert_weights(wrapper).gate_up_lora == ()
    for layer in (wrapper, wrapper.base_layer):
        layer._disable_adapters = True
    with pytest.raises(ValueError, match="disabled but merged into the experts' weights"):
        expert_weights(wrapper)
