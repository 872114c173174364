"Tiny random models of families that mix positions in several ways, or route tokens to experts."

import torch
import transformers

SIZES = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.2,
)
HEADS = dict(head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    **HEADS,
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
FAMILIES = {
    "Qwen3Moe": EXPERTS | HEADS,
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    "Qwen3Next": DELTA | EXPERTS | dict(shared_expert_intermediate_size=16),
    "Lfm2": dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "Lfm2Moe": EXPERTS | dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "Llama4Text": HEADS
    | LOCAL
    | dict(
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        use_qk_norm=False,
        attention_chunk_size=64,
    ),
    "NemotronH": HEADS
    | dict(
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
    ),
    "GraniteMoeHybrid": LOCAL
    | MAMBA
    | dict(shared_intermediate_size=16, layer_types=["mamba", "attention"], mamba_chunk_size=16),
    "DeepseekV3": dict(
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "JetMoe": LOCAL | dict(kv_channels=8),
    "Mixtral": LOCAL,
    "FalconH1": HEADS | MAMBA | dict(mamba_n_heads=4, mamba_d_ssm=32, mamba_chunk_size=16),
    "GPT2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def mixture(name, seed=0, **changes):
    "A model of the family by its name above, in float32."
    sizes = FAMILIES[name] if name == "GPT2" else SIZES | FAMILIES[name]
    few = dict(vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, f"{name}Config")(**{**few, **sizes, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()
