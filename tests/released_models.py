"Tiny folders that look as multimodal models are released: one class holds towers and text."

from pathlib import Path

import torch
import transformers

from grpo_nb.model.tiny import tiny_tokenizer

TEXT = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
SIGHT = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
    head_dim=8,
)
QWEN_SIGHT = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=32,
    patch_size=8,
    num_position_embeddings=16,
)
MROPE = dict(rope_type="default", rope_theta=10_000.0, mrope_section=[4, 2, 2])
MIXED = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
QWEN3_5 = dict(
    layer_types=["linear_attention", "full_attention"],
    rope_parameters=MROPE | dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.5),
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10_000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    llama_4_scaling_beta=0.1,
)
IMAGES = dict(image_token_id=60, vision_start_token_id=61, vision_end_token_id=62)
RELEASED = {  # name -> model_type, text_config, vision_config, other settings
    "Qwen3.5": ("qwen3_5", QWEN3_5, QWEN_SIGHT, IMAGES | dict(video_token_id=63)),
    "Qwen3-VL": (
        "qwen3_vl",
        dict(rope_parameters=MROPE),
        QWEN_SIGHT | dict(deepstack_visual_indexes=[0]),
        IMAGES | dict(video_token_id=63),
    ),
    "Gemma 3": (
        "gemma3",
        MIXED | dict(query_pre_attn_scalar=16),
        SIGHT,
        dict(image_token_index=60, mm_tokens_per_image=1, tie_word_embeddings=True),
    ),
    "Gemma 4": (
        "gemma4",
        MIXED
        | dict(
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=64,
            global_head_dim=16,
            num_kv_shared_layers=0,
            final_logit_softcapping=3.0,
        ),
        SIGHT | dict(pooling_kernel_size=1, position_embedding_size=8),
        dict(image_token_id=60, video_token_id=61, audio_token_id=62, tie_word_embeddings=True),
    ),
    "Mistral 3": ("mistral3", dict(model_type="mistral"), SIGHT, dict(image_token_index=60)),
    "Ministral 3": (
        "mistral3",
        dict(model_type="ministral3", rope_parameters=YARN),
        SIGHT,
        dict(image_token_index=60),
    ),
}


def released(
    name: str,  # of `RELEASED`
    folder: Path,  # written to
    dtype: torch.dtype = torch.bfloat16,  # of the files
) -> type:  # transformers' class
    "Write such a model with random weights and a tokenizer."
    kind, text, sight, others = RELEASED[name]
    tied = others.get("tie_word_embeddings", False)
    config = transformers.AutoConfig.for_model(
        kind,
        text_config=TEXT | dict(tie_word_embeddings=tied) | text,
        vision_config=sight,
        **dict(tie_word_embeddings=False) | others,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        for key, p in model.named_parameters():  # norms, and towers that are made of zeros
            if p.ndim < 2 or not p.any():
                torch.nn.init.normal_(p, 0.5 if "norm" in key else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return type(model)
