"""Small random dense models, with norms and biases that do something."""

import torch
import transformers
from peft import LoraConfig, get_peft_model

from grpo_nb.model.float8 import Float8Weight

MIXED = dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# scaling of positions whose angles change for all tokens beyond 24
CHANGING = {
    "Phi3": dict(
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10_000.0,
            short_factor=[1.0 + i / 8 for i in range(8)],
            long_factor=[3.0 + i for i in range(8)],
        ),
        original_max_position_embeddings=24,
        max_position_embeddings=96,
    ),
    "Llama": dict(
        rope_parameters=dict(rope_type="dynamic", rope_theta=10_000.0, factor=4.0),
        max_position_embeddings=24,
    ),
}
FAMILIES = {
    "Llama": dict(rope_parameters=LLAMA3),
    "Llama tied": dict(tie_word_embeddings=True, attention_bias=True),
    "Qwen2": {},
    "Qwen2 windows": dict(use_sliding_window=True, max_window_layers=1, sliding_window=6),
    "Qwen3": dict(tie_word_embeddings=True),
    "Mistral": dict(sliding_window=6),
    "Phi3": dict(sliding_window=7),
    "Gemma3Text": MIXED | dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0),
}


def dense_model(name, dtype=torch.float32, lora=False, **changes):
    "A model of the family by its name above, with adapters on all linear layers or without."
    family = name.split()[0]
    sizes = dict(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        initializer_range=0.15,
    )
    config = getattr(transformers, f"{family}Config")(**{**sizes, **FAMILIES[name], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn_like(p))
        model = model.to(dtype)
        if lora:
            adapters = LoraConfig(
                r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
            )
            model = get_peft_model(model, adapters)
    return model.eval()


def float8_weights(model):
    "The weights of a model that are stored in float8, by the parameter's name."
    return {name: p for name, p in model.named_parameters() if isinstance(p, Float8Weight)}
