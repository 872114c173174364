"""Tiny random models of the text families that transformers has, as folders like released ones.

Every family is made from `SIZES`, of which its configuration takes the names that it has, and from
what stands beside its name in `FAMILIES`: a layer or two of each kind, a mixture where it has one.
"""

import inspect
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
)

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    sliding_window=4,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
    initializer_range=0.1,
    # mixtures
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    # linear attention and state spaces
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_expand=2,
)
SLIDING = dict(layer_types=["sliding_attention", "full_attention"])
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
# keys and values from a few numbers (MLA)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
PATCHES = dict(  # a tower for images
    depth=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
    num_position_embeddings=16,
)
SIGLIP = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
)
IN_SECTIONS = dict(
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10_000.0,
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
        partial_rotary_factor=1.0,
    )
)
QWEN_IDS = dict(
    image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63
)

# model_type -> what its configuration gets beside SIZES; `text_config` and `vision_config`: of a
# model that is released with towers
FAMILIES = {
    "llama": {},
    "mistral": {},
    "ministral": SLIDING,
    "ministral3": {},
    "mixtral": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR | IN_SECTIONS,
    "qwen3_5_moe_text": LINEAR | IN_SECTIONS,
    "gemma": {},
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
    ),
    "gemma4_text": SLIDING
    | dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, per_layer_config={}),
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "granite": dict(
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=2.0,
    ),
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": LINEAR,
    "smollm3": dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]),
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": {},
    "olmo_hybrid": LINEAR,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128, init_std=0.1),
    "bloom": {},
    "falcon": {},
    "gpt_oss": SLIDING | dict(intermediate_size=32),
    "deepseek_v2": LATENT | dict(head_dim=8),
    "deepseek_v3": LATENT,
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "lfm2": dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "nemotron": {},
    "nemotron_h": dict(
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=16,
    ),
    "llama4_text": dict(
        intermediate_size_mlp=48,
        attention_chunk_size=4,
        num_hidden_layers=4,
        interleave_moe_layer_step=2,
    ),
    "cohere": dict(logit_scale=1.0),
    "cohere2": SLIDING | dict(logit_scale=1.0),
    "cohere2_moe": SLIDING | dict(logit_scale=1.0),
    "falcon_h1": dict(mamba_d_ssm=64),
    "falcon_mamba": {},
    "mamba": {},
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8),
    "bamba": dict(attn_layer_indices=[1]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    "recurrent_gemma": dict(num_hidden_layers=3, lru_width=32, attention_window_size=8),
    "starcoder2": {},
    "stablelm": {},
    "exaone4": SLIDING,
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "minimax": {},
    "minimax_m2": {},
    "seed_oss": {},
    "apertus": dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
    "arcee": {},
    "helium": {},
    "nanochat": {},
    "vaultgemma": {},
    "dots1": {},
    "cwm": dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
    "afmoe": SLIDING,
    "bitnet": {},
    "diffllama": {},
    "doge": {},
    "exaone_moe": SLIDING,
    "flex_olmo": {},
    "granite_swa": SLIDING | dict(layer_rope_theta=[10_000.0] * 2),
    "hy_v3": {},
    "hyperclovax": {},
    "internlm3": {},
    "jais2": {},
    "jetmoe": {},
    "laguna": {},
    "lfm3": dict(layer_types=["conv", "full_attention"]),
    "mellum": {},
    "mimo_v2_flash": SLIDING,
    "minicpm3": LATENT | dict(scale_emb=1, dim_model_base=32),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=256),
    "persimmon": {},
    "solar_open": {},
    "youtu": LATENT,
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"],
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        chunk_size=8,
        num_mem_blocks=1,
        num_key_value_heads=4,
    ),
    "deepseek_v32": LATENT | dict(index_n_heads=2, index_head_dim=16, index_topk=4),
    "glm_moe_dsa": LATENT | dict(index_n_heads=2, index_head_dim=16, index_topk=4),
    "kimi_linear": LATENT
    | LINEAR
    | dict(linear_head_dim=8, linear_num_heads=4, mlp_layer_types=["dense", "sparse"]),
    # released with a tower for images
    "gemma3": dict(
        text_config=SLIDING, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_id=60
    ),
    "gemma4": dict(
        text_config=SLIDING
        | dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, per_layer_config={}),
        vision_config=None,
        image_token_id=60,
    ),
    "mistral3": dict(
        text_config=dict(model_type="ministral3"),
        vision_config=dict(
            model_type="pixtral",
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=8,
            image_size=16,
            patch_size=4,
        ),
        image_token_id=60,
    ),
    "qwen2_5_vl": dict(
        text_config={"rope_parameters": {k: v for k, v in IN_SECTIONS["rope_parameters"].items()}},
        vision_config=PATCHES | dict(fullatt_block_indexes=[0]),
        **QWEN_IDS,
    ),
    "qwen3_vl": dict(
        text_config=IN_SECTIONS,
        vision_config=PATCHES | dict(deepstack_visual_indexes=[0]),
        **QWEN_IDS,
    ),
    "qwen3_5": dict(text_config=LINEAR | IN_SECTIONS, vision_config=PATCHES, **QWEN_IDS),
    "lfm2_vl": dict(
        text_config=dict(
            model_type="lfm2",
            layer_types=["conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
        ),
        vision_config={k: v for k, v in SIGLIP.items() if k != "image_size"} | dict(num_patches=16),
        image_token_id=60,
    ),
}


def names_of(config_class):
    "The names that a class of configurations takes."
    names = set(getattr(config_class, "attribute_map", {}))
    for kind in config_class.__mro__:
        names |= {*getattr(kind, "__annotations__", {})}
        names |= {*inspect.signature(kind.__init__).parameters}
    return names


def sized(config_class, given):
    "A configuration of the sizes that its class has names for, and of what is given."
    names = names_of(config_class)
    return config_class(**{k: v for k, v in SIZES.items() if k in names} | given)


def tiny_config(
    name,  # of FAMILIES
):  # a configuration of transformers
    "The configuration of a tiny model."
    given, config_class = dict(FAMILIES[name]), CONFIG_MAPPING[name]
    if "text_config" in given:
        text = dict(given["text_config"])
        kind = text.pop("model_type", None)
        of_text = CONFIG_MAPPING[kind] if kind else config_class.sub_configs["text_config"]
        given["text_config"] = sized(of_text, text).to_dict()
        return config_class(**given)
    return sized(config_class, given)


def class_of(
    config,  # of transformers
):  # the class that a model is released as
    "The class of a family's models, with its towers where it has some."
    kind = config.model_type
    return getattr(transformers, WITH_IMAGES.get(kind) or CAUSAL[kind])


def tiny_model(
    name,  # of FAMILIES
):  # in float32, in evaluation mode
    "A random model of a family in which nothing is zero or one."
    torch.manual_seed(0)
    config = tiny_config(name)
    model = class_of(config)(config).float().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].normal_(0, 0.1)
        for p in model.parameters():
            if p.numel() and (p == p.flatten()[0]).all():  # biases, norms, sinks
                p.add_(0.2 * torch.randn_like(p))
    return model


def write_released(
    name,  # of FAMILIES
    tokenizer,  # of transformers
    folder: Path,  # new
):  # the class in its config.architectures
    "Write a tiny model as its makers would."
    model = tiny_model(name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return type(model)
