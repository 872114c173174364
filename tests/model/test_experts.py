"""The formula of experts and its plain forms, against transformers and against one another."""

import copy

import pytest
import torch
from small_experts import error, experts_module, inputs, value_and_gradients

from grpo_nb.model.adapters import expert_weights
from grpo_nb.model.experts import (
    LowRank,
    at_least_float32,
    clamp_float16_,
    expert_answer,
    gathered_experts,
    looped_experts,
    reference_experts,
    swiglu,
)
from grpo_nb.model.experts_grouped import routed_experts


def with_factors(module, seed=0):
    "The module's weights and a low-rank addition to each matrix, in float64."
    E, H, inner = len(module.gate_up_proj), module.hidden_size, module.gate_up_proj.shape[2] // 2
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return 0.3 * torch.randn(shape, generator=g, dtype=torch.float64)

    weights = expert_weights(module)
    return type(weights)(
        **{
            **vars(weights),
            "gate_up_lora": (LowRank(draw(E, H, 2), draw(E, 2, 2 * inner), 0.5),),
            "down_lora": (LowRank(draw(E, inner, 3), draw(E, 3, H), 2.0),),
        }
    )


def summed(module, weights):
    "A copy of the module in which the additions are part of the matrices."
    module = copy.deepcopy(module).requires_grad_(False)
    for f, name in ((weights.gate_up_lora[0], "gate_up_proj"), (weights.down_lora[0], "down_proj")):
        getattr(module, name).add_(f.scaling * f.a @ f.b)
    return module


def test_float64_stays_and_16_bits_become_float32():
    assert at_least_float32(torch.float64) == torch.float64
    assert {at_least_float32(d) for d in (torch.float16, torch.bfloat16, torch.float32)} == {
        torch.float32
    }


def test_only_float16_is_clamped():
    infinite = torch.tensor([float("inf"), -float("inf"), 1.0])
    assert clamp_float16_(infinite.half()).tolist() == [65504.0, -65504.0, 1.0]
    assert clamp_float16_(infinite.clone()).equal(infinite)
    assert clamp_float16_(infinite.bfloat16()).isinf().sum() == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_swiglu_is_transformers_(dtype):
    module = experts_module(8, 6, 2, dtype)
    z = 5 * torch.randn(7, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs = module._apply_gate(z.double()).to(dtype)
    torch.testing.assert_close(swiglu(z, module.alpha, module.limit), theirs)


@pytest.mark.parametrize("routing", ["random", "to the first"])
@pytest.mark.parametrize("form", [reference_experts, gathered_experts, looped_experts])
def test_plain_forms_are_transformers_experts(form, routing):
    module = experts_module(16, 8, 5)
    hidden, indices, weights = inputs(9, 16, 5, 3, routing)
    given = with_factors(module)
    dtype = () if form is reference_experts else (torch.float64,)
    with torch.no_grad():
        ours = form(hidden, indices, weights, given, *dtype)
        theirs = summed(module, given)(hidden, indices, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", [reference_experts, gathered_experts])
def test_plain_forms_have_the_gradients_of_transformers(form):
    module = experts_module(16, 8, 5)
    hidden, indices, weights = inputs(9, 16, 5, 3)
    leaves = [hidden, weights, *module.parameters()]
    dtype = () if form is reference_experts else (torch.float64,)
    ours = value_and_gradients(
        lambda: form(hidden, indices, weights, expert_weights(module), *dtype), leaves
    )
    theirs = value_and_gradients(lambda: module(hidden, indices, weights), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_answer_of_one_expert_alone():
    module = experts_module(16, 8, 5)
    hidden, _, _ = inputs(3, 16, 5, 1)
    alone = module(hidden, torch.full((3, 1), 4), torch.ones(3, 1, dtype=torch.float64))
    ours = torch.stack([expert_answer(x, 4, expert_weights(module)) for x in hidden])
    torch.testing.assert_close(ours, alone)


def test_the_reference_computes_16_bits_in_float32():
    module = experts_module(16, 8, 5, torch.bfloat16, spread=1)
    hidden, indices, weights = inputs(9, 16, 5, 3, dtype=torch.bfloat16)
    exact = copy.deepcopy(module).double()(hidden.double(), indices, weights.double())
    ours = reference_experts(hidden, indices, weights, expert_weights(module))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, exact.bfloat16())


@pytest.mark.parametrize("form", [gathered_experts, looped_experts])
def test_float16_answers_beyond_its_range_are_summed_in_float32(form):
    module = experts_module(16, 8, 4)
    with torch.no_grad():
        module.down_proj.mul_(3e4).clamp_(-6e4, 6e4)
    module = module.half()
    hidden, indices, weights = inputs(12, 16, 4, 2, dtype=torch.float16)
    hidden, weights = hidden.detach().float(), weights.detach().float()
    exact = copy.deepcopy(module).double()(hidden.double(), indices, weights.double()).detach()
    with torch.no_grad():
        ours = form(hidden, indices, weights, expert_weights(module), torch.float16)
    assert exact.abs().max() > 65504 and ours.isfinite().all() and error(ours, exact) < 0.01


def test_the_loop_has_no_gradients_and_says_so():
    module, (hidden, indices, weights) = experts_module(16, 8, 4), inputs(5, 16, 4, 2)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        routed_experts(hidden, indices, weights, expert_weights(module), path="loop")
