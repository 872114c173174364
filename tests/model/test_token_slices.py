"""MLPs in slices: values, gradients, copies, adapters, what is refused."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_nb.model import adapters
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.fused_layers import (
    SlicedMLP,
    dense_mlps,
    experts_in_slices,
    slice_layers,
    slice_mlps,
    slice_tokens_of,
)
from grpo_nb.model.packed import pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=24,
    head_dim=16,
    pad_token_id=0,
)
FAMILIES = [
    (LlamaForCausalLM, LlamaConfig),
    (Qwen3ForCausalLM, Qwen3Config),
    (Phi3ForCausalLM, Phi3Config),
    (Gemma3ForCausalLM, Gemma3TextConfig),
]


@pytest.mark.parametrize("kind, config", FAMILIES)
@pytest.mark.parametrize("lora", [False, True])
def test_values_and_gradients(kind, config, lora):
    torch.manual_seed(0)
    model = kind(config(**SIZES)).double().train()
    if lora:
        model = get_peft_model(
            model,
            LoraConfig(
                r=2,
                target_modules=[
                    "gate_up_proj" if kind is Phi3ForCausalLM else "up_proj",
                    "down_proj",
                ],
            ),
        )
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
    ids, results, names = (
        torch.randint(1, 24, (3, 7)),
        [],
        [name for name, _ in model.named_parameters()],
    )
    for tokens in (None, 1, 5, 100, None):
        assert slice_mlps(model, tokens) == 2
        model.zero_grad()
        loss = model(input_ids=ids).logits.square().sum()
        loss.backward()
        results.append(
            [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
    assert [name for name, _ in model.named_parameters()] == names and not any(
        isinstance(m, SlicedMLP) for m in model.modules()
    )


def test_a_copy_has_its_own_weights():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    slice_mlps(model, 2)
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        torch.nn.init.zeros_(p)
    ids = torch.arange(1, 8)[None]
    assert (
        model(input_ids=ids).logits.abs().sum() > 0 and twin(input_ids=ids).logits.abs().sum() == 0
    )
    assert twin.state_dict().keys() == model.state_dict().keys()


def test_with_checkpointing_and_without_gradients():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    ids, gradients = torch.arange(1, 8)[None], []
    for tokens in (None, 3):
        slice_mlps(model, tokens)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(input_ids=ids).logits.square().sum().backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
        with torch.inference_mode():
            model(input_ids=ids)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    gpt_oss = tiny_gpt_oss()[0]
    assert not dense_mlps(gpt_oss)
    with pytest.raises(
        ValueError,
        match=(
            "has no dense MLP to slice; the experts of a gpt-oss are sliced by "
            r"route_adapters\(model, 'routed_lean'\)"
        ),
    ):
        slice_mlps(gpt_oss)


# Experts


@pytest.mark.parametrize("packed", [False, True])
def test_experts_work_on_slices_of_the_size_that_is_set(monkeypatch, packed):
    model, seen, results = tiny_gpt_oss()[0].train(), [], []
    if packed:
        pack_experts(model)
    model = get_peft_model(
        model,
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    route_adapters(model, "routed_lean")
    plain = adapters.routed_experts

    def spy(*args, **options):
        seen.append(options["slice_tokens"])
        return plain(*args, **options)

    monkeypatch.setattr(adapters, "routed_experts", spy)
    ids = torch.randint(8, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    for tokens in (None, 1, 5, 16_384, None):
        assert slice_layers(model, tokens) == 2 and slice_tokens_of(model) == (tokens or 4096)
        model.zero_grad()
        seen.clear()
        loss = model(input_ids=ids).logits.square().mean()
        loss.backward()
        assert seen and set(seen) == {tokens or 4096}
        results.append(
            [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_slices_a_model_has():
    model, _ = tiny_gpt_oss()
    assert not experts_in_slices(model) and slice_tokens_of(model) is None
    with pytest.raises(
        ValueError,
        match=r"those of this model are 'eager': call route_adapters\(model, 'routed_lean'\)",
    ):
        model.set_experts_implementation("eager")
        slice_layers(model, 512)
    route_adapters(model, "routed_lean")
    slice_layers(model, 512)
    assert slice_tokens_of(copy.deepcopy(model)) == 512
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert (
        slice_layers(dense, 3) == 2
        and slice_tokens_of(dense) == 3
        and slice_layers(dense, None) == 2
        and slice_tokens_of(dense) is None
    )
