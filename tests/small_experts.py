"""Small layers of experts for the tests: modules, inputs, adapters, values with gradients."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from grpo_nb.model.tiny import tiny_gpt_oss

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
