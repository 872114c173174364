"""Bytes of weights, cache and activations: against transformers' own models, and against a meter of
live storages."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo_nb.algorithm import logprobs
from grpo_nb.model import adapters, loading  # noqa: F401 (registers attention with transformers)
from grpo_nb.model.fused_layers import adapters_are_fused, fuse_layers, slice_mlps
from grpo_nb.model.limits import KERNELS, UNPACKED
from grpo_nb.model.memory_bytes import (
    FORMATS,
    MODELS,
    QUERIES,
    STATES,
    Computation,
    GiB,
    attention_peak,
    attention_scratch,
    head_bytes,
    kv_bytes,
    layer_inputs,
    longest_sequence,
    lora_parameters,
    mlp_peak,
    read_shape,
    released_shape,
    state_bytes,
    step_bytes,
    unpack_bytes,
    weight_bits,
    weight_bytes,
)
from grpo_nb.model.offload import HostStore, offload_layers
from grpo_nb.rollout.kv_cache import CacheShape
from grpo_nb.training.config import OPTIMIZERS
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps, plain_completion_logps
from grpo_nb.training.policy_model import checkpoint_layers


@pytest.mark.parametrize(
    "kernel, tokens, gib",
    [
        ("flex", 2048, 0.052),
        ("flex", 16_384, 0.414),
        ("flex", 65_536, 1.656),
        ("sdpa", 2048, 0.164),
        ("sdpa", 8192, 0.612),
        ("sdpa", 65_536, 4.825),
        ("flash", 4096, 0.199),
        ("flash", 8192, 0.396),
        ("flash", 32_768, 0.986),
        ("flash", 131_072, 3.129),
        ("eager", 2048, 2.049),
        ("eager", 4096, 8.098),
        ("eager", 8192, 32.199),
    ],
)
def test_attention_as_an_h200_measured_it(kernel, tokens, gib):
    shape = MODELS["gpt-oss-20b"]
    given = (
        2 * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim + 4 * shape.heads
    )  # q, k, v and the gradient that comes in; what sums keep
    assert (
        tokens * (attention_peak(shape, Computation(targets=(), kernel=kernel), tokens) - given)
        + attention_scratch(shape, 2, tokens, kernel)
    ) / GiB == pytest.approx(gib, rel=0.08)


# Shapes, against transformers' models on the device `meta`

SMALL = dict(
    vocab_size=192,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


FAMILIES = {
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2),
    "llama": dict(tie_word_embeddings=True),
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": dict(pad_token_id=0, head_dim=16),
    "gemma2": {},
    "gemma3_text": {},
    "mixtral": dict(num_local_experts=4),
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=48),
    "smollm3": dict(pad_token_id=0),
}
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
TOWERS = {  # the text part of models that also read images
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
    "gemma3": {},
    "gemma4": dict(
        global_head_dim=64,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=192,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "mistral3": {},
}


def count(config):
    "Numbers in a model of transformers by our kinds."
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kinds = dict.fromkeys(("embedding", "head", "attention", "mlp", "rest"), 0)
    for name, p in model.named_parameters():
        matrix = (
            p.dim() > 1
            and not name.endswith("bias")
            and "router" not in name
            and "shared_expert_gate" not in name
            and not name.endswith("mlp.gate.weight")
        )
        kind = (
            "embedding"
            if "embed_tokens" in name
            else "head"
            if "lm_head" in name
            else "attention"
            if "attn" in name
            else "mlp"
        )
        kinds[kind if matrix else "rest"] += p.numel()
    return kinds


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_a_family(kind):
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})
    assert read_shape(config).parameters == count(config)
    assert read_shape(config.to_dict()) == read_shape(config)


@pytest.mark.parametrize("kind", TOWERS)
def test_a_model_with_a_tower_is_planned_as_its_text_part(kind, tmp_path):
    "From its config.json alone; what is counted are the released class' own tensors."
    tower = {"gemma4": {"vision_config": {}}, "mistral3": {"tie_word_embeddings": False}}
    config = AutoConfig.for_model(kind, text_config=SMALL | TOWERS[kind], **tower.get(kind, {}))
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(whole).__name__]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = released_shape(tmp_path)
    counted = {kind: n for kind, n in shape.parameters.items() if kind != "towers"}
    assert counted == count(config.get_text_config())
    numbers = sum(p.numel() for p in whole.parameters())
    assert shape.towers and sum(shape.parameters.values()) == numbers
    assert sum(weight_bytes(shape, "bf16").values()) == 2 * numbers
    layers = shape.windows or (None,) * shape.layers
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    assert layers.count(0) == sum("linear" in one for one in kinds)


def test_layers_with_linear_attention_keep_a_state_and_no_keys():
    shape = MODELS["Qwen3.5-9B"]
    more = kv_bytes(shape, 1, 2048, paged=False) - kv_bytes(shape, 1, 1024, paged=False)
    assert more == 1024 * 2 * shape.kv_heads * shape.head_dim * 2 * 8  # every fourth of 32 layers
    assert kv_bytes(shape, 3, 1024) > 3 * 24 * 4 * 32 * 128 * 128


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gpt-oss-20b", 20.914757184),
        ("gpt-oss-120b", 116.829156672),
        ("Llama-3.1-8B", 8.030261248),
        ("Llama-3.3-70B", 70.553706496),
        ("Qwen3-8B", 8.190735360),
        ("Qwen3-4B", 4.022468096),
        ("Phi-4", 14.659507200),
        ("Qwen2.5-1.5B", 1.543714304),
        ("Qwen2.5-3B", 3.085938688),
        ("Qwen2.5-7B", 7.615616512),
        ("Qwen3-0.6B", 0.596049920),
        ("Qwen3-1.7B", 1.720574976),
        ("Qwen3-14B", 14.768307200),
        ("Qwen3-32B", 32.762123264),
        ("DeepSeek-R1-0528-Qwen3-8B", 8.190735360),
        ("Llama-3.2-1B", 1.235814400),
        ("Llama-3.2-3B", 3.212749824),
        ("Mistral-7B-v0.3", 7.248023552),
        ("Gemma-3-1B", 0.999885952),
        ("Gemma-3-270M", 0.268098176),
        ("SmolLM2-135M", 0.134515008),
        ("SmolLM2-360M", 0.361821120),
        ("SmolLM2-1.7B", 1.711376384),
        ("SmolLM3-3B", 3.075098624),
        ("Qwen2.5-0.5B", 0.494032768),
        ("Qwen3-30B-A3B", 30.532122624),
    ],
)
def test_parameters_of_the_models_that_are_known(name, billions):
    assert sum(MODELS[name].parameters.values()) == round(billions * 1e9)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_full_size_gpt_oss_has_these_weights(name):
    shape = MODELS[name]
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=shape.layers, num_local_experts=shape.experts
    )
    assert count(config) == shape.parameters and replace(read_shape(config), name=name) == shape


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", "openai/gpt-oss-20b", "GPT-OSS-20B", "unsloth/gpt-oss-20b-bf16"]
)
def test_names(name):
    assert read_shape(name) is MODELS["gpt-oss-20b"]
    assert read_shape("meta-llama/Llama-3.1-8B-Instruct") is MODELS["Llama-3.1-8B"]
    assert read_shape("mistralai/Mistral-7B-Instruct-v0.3") is MODELS["Mistral-7B-v0.3"]
    assert read_shape("unsloth/gemma-3-1b-it-bnb-4bit") is MODELS["Gemma-3-1B"]


def test_a_folder_and_a_nested_configuration(tmp_path):
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 192,
        "use_sliding_window": False,
        "sliding_window": 4096,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "some_vl", "text_config": config})
    )
    shape = read_shape(tmp_path)
    assert (
        shape == read_shape(str(tmp_path / "config.json"))
        and shape.qkv_bias
        and shape.kv_heads == 4
        and shape.windows == ()
    )


@pytest.mark.parametrize(
    "model, words",
    [
        ("gpt-5", "nothing is looked up"),
        (3.5, "float is no model"),
        ({}, "has no num_hidden_layers"),
        ({"model_type": "gpt2", "n_embd": 768}, "has no num_hidden_layers"),
        ({**SMALL, "kv_lora_rank": 512}, "latent attention"),
        ({**SMALL, "n_shared_experts": 1}, "every token goes to"),
        ({**SMALL, "model_type": "phi"}, "two matrices"),
        ({**SMALL, "intermediate_size": [96, 96]}, "it is a count"),
    ],
)
def test_models_that_cannot_be_planned(model, words):
    with pytest.raises(ValueError, match=words):
        read_shape(model)


@pytest.mark.parametrize(
    "config, longest",
    [
        (AutoConfig.for_model("gpt_oss"), 131_072),
        (AutoConfig.for_model("gpt_oss", max_position_embeddings=64), 64),
        ({}, None),
        (dict(max_position_embeddings=4096), 4096),
        (
            AutoConfig.for_model(
                "qwen3",
                max_position_embeddings=40_960,
                rope_scaling={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32_768,
                },
            ),
            131_072,
        ),
        (
            AutoConfig.for_model(
                "llama",
                max_position_embeddings=131_072,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            ),
            131_072,
        ),
        (dict(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 2.0}), 8192),
        (AutoConfig.for_model("gemma3_text"), 131_072),
        (dict(text_config=dict(max_position_embeddings=77)), 77),
        # as config.json of a Phi-4-mini
        (
            dict(
                max_position_embeddings=131_072,
                original_max_position_embeddings=4096,
                rope_scaling={"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]},
            ),
            4096,
        ),
        (
            AutoConfig.for_model(
                "phi3",
                pad_token_id=0,
                max_position_embeddings=131_072,
                original_max_position_embeddings=4096,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10_000.0,
                    "long_factor": [2.0] * 48,
                    "short_factor": [1.0] * 48,
                },
            ),
            4096,
        ),
        (
            AutoConfig.for_model(
                "llama",
                max_position_embeddings=4096,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
            ),
            4096,
        ),
    ],
)
def test_where_positions_end(config, longest):
    assert longest_sequence(config) == longest
    if longest and not isinstance(config, dict):
        assert read_shape(config).max_positions == longest


def test_a_broken_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        read_shape(tmp_path)


# Bytes of weights, adapters and cache


def test_bits_of_packed_weights():
    shape = MODELS["gpt-oss-20b"]
    E, H, inner = shape.experts, shape.hidden, shape.intermediate
    released = shape.layers * (
        E * 2 * inner * H // 32 * 17 + E * H * inner // 32 * 17
    )  # blocks of 16 bytes, scales of one
    assert weight_bytes(shape, "mxfp4")["mlp"] == released
    assert (
        weight_bits(MODELS["Qwen3-8B"], "nf4", True)["mlp"] == 4 + 0.125 + 32 / 16384
        and weight_bits(MODELS["Qwen3-8B"], "nf4")["head"] == 16
    )
    assert (
        weight_bits(shape, "nf4")["mlp"] == 16
        and weight_bits(shape, "mxfp4+nf4")["attention"] == 4.5
    )


def test_packing_agrees_with_the_module_that_packs():
    from grpo_nb.model.packed import pack

    shape = replace(MODELS["gpt-oss-20b"], layers=1, hidden=64, intermediate=96, experts=2)
    packed = [pack(torch.randn(2, 64, 192)), pack(torch.randn(2, 96, 64))]
    assert (
        sum(p.blocks.numel() + p.scales.numel() for p in packed)
        == weight_bytes(shape, "mxfp4")["mlp"]
    )


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("targets", [("attention",), ("mlp",), ("attention", "mlp")])
def test_adapters_as_peft_makes_them(kind, targets):
    config = AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"] * ("attention" in targets) + [
        "gate_proj",
        "up_proj",
        "down_proj",
    ] * ("mlp" in targets and kind == "llama")
    inside = (
        ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        if "mlp" in targets and kind == "gpt_oss"
        else None
    )
    model = get_peft_model(model, LoraConfig(r=8, target_modules=modules, target_parameters=inside))
    assert lora_parameters(read_shape(config), 8, targets) == sum(
        p.numel() for n, p in model.named_parameters() if "lora_" in n
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(1, 900),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([None, 128]),
)
def test_cache_bytes_are_the_engine_s(prompt, most, groups, group, page):
    shape = MODELS["gpt-oss-20b"]
    if page:
        theirs = CacheShape(
            shape.windows, shape.kv_heads, shape.head_dim, torch.bfloat16, page
        ).bytes([prompt] * groups, [group] * groups, most)
    else:
        theirs = (
            2
            * shape.kv_heads
            * shape.head_dim
            * 2
            * shape.layers
            * groups
            * group
            * (prompt + most)
        )  # transformers' cache
    assert (
        kv_bytes(shape, groups * group, prompt + most, prompt=prompt, group=group, paged=bool(page))
        == theirs
    )


def test_chunks_and_states_are_those_of_the_code():
    shape = MODELS["Llama-3.1-8B"]
    chunk = max(b - a for a, b in logprobs.chunk_rows(1, 5000))
    assert chunk <= head_bytes(shape, 5000, 5000)[1] // (2 * shape.vocab) <= 1024
    assert head_bytes(shape, 8192, 8192, logit_chunk_multiplier=16)[1] == logprobs.logit_bytes(
        1, 8192, shape.vocab, logit_chunk_multiplier=16, element_bytes=2
    )
    assert layer_inputs(shape, 100)[0] == shape.layers * logprobs.hidden_state_bytes(
        1, 100, shape.hidden
    )


def test_unpacked_experts_are_counted():
    shape = MODELS["gpt-oss-20b"]
    one = 2 * shape.hidden * shape.intermediate * 2
    count = UNPACKED // one
    assert (
        unpack_bytes(shape, "mxfp4") == count * one
        and 1 < count < shape.experts
        and unpack_bytes(shape, "mxfp4", grouped=False) == one * 3 // 2
        and unpack_bytes(shape, "bf16") == 0
    )
    assert (
        unpack_bytes(replace(shape, intermediate=2**20), "mxfp4") == 2 * shape.hidden * 2**20 * 2
    )  # at least one expert


# Activations, against a meter


def adapted(kind, dtype, targets, sizes):
    "A small model with LoRA of rank 4."
    torch.manual_seed(0)
    attention, mlp = (
        (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"])
        if kind == "phi3"
        else (["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"])
    )
    modules = attention * ("attention" in targets) + mlp * ("mlp" in targets)
    return get_peft_model(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(dtype),
        LoraConfig(r=4, target_modules=modules),
    ).train()


class UnseenStore(HostStore):
    "A store whose pages a meter does not see, so that the host's memory is left out."

    def offload_beside(self, x):
        with _disable_current_modes():
            return super().offload_beside(x)


def measured_step(
    kind,
    dtype,
    targets,
    checkpointing,
    routed,
    sizes,
    tokens,
    tile=None,
    offload=False,
    implementation="ours",
):
    """(shape, bytes that one step of a small model adds at its peak), as the trainer takes it or as
    it is usually done: PEFT converts, and all logits are there."""
    model, ours = adapted(kind, dtype, targets, sizes), implementation == "ours"
    if kind == "gpt_oss":
        adapters.route_adapters(model, routed)
    if checkpointing:
        checkpoint_layers(model, {"use_reentrant": False})
    if tile:
        slice_mlps(model, tile)
    store = UnseenStore(page_bytes=2**12)
    if offload:
        offload_layers(model, store=store)
    ids = torch.randint(0, sizes["vocab_size"], (2, tokens))
    seen, P = torch.ones_like(ids, dtype=torch.bool), tokens // 4
    batch = TrainingBatch(
        ids[:, :P], seen[:, :P], ids[:, P:], seen[:, P:], seen[:, P:], torch.ones(2)
    )
    known = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in vars(batch).values() if x is not None),
    ]
    with (
        LiveBytes(*known) as live,
        disable_input_dtype_casting(model, active=ours and dtype == torch.bfloat16),
    ):
        with torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else nullcontext():
            with patch(
                "grpo_nb.training.policy_logprobs.reads_a_row", lambda model: False
            ):  # the formulas count rows; all in one row takes less
                logps = (
                    completion_logps(model, batch, mini_batch=1, logit_chunk_multiplier=16)[0]
                    if ours
                    else plain_completion_logps(model, batch)
                )
        logps.mean().backward()
    if offload:
        assert store.offloaded >= sizes["num_hidden_layers"] and store.pages > 0
    return read_shape(model.config), live.peak


WIDE = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
)


FLAT = dict(
    vocab_size=2048,
    hidden_size=96,
    intermediate_size=128,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
)


OSS = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=128,
    pad_token_id=0,
    attn_implementation="sink_key",
)


BOTH, ONE, f32, bf16 = ("attention", "mlp"), ("attention",), torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    "kind, dtype, targets, checkpointing, routed, sizes",
    [
        ("llama", f32, BOTH, False, None, WIDE),
        ("llama", f32, BOTH, True, None, WIDE),
        ("llama", f32, ONE, True, None, WIDE),
        ("llama", bf16, BOTH, False, None, WIDE),
        ("llama", bf16, BOTH, True, None, WIDE),
        ("llama", bf16, ONE, False, None, WIDE),
        ("llama", bf16, ONE, True, None, WIDE),
        ("llama", f32, BOTH, False, None, FLAT),
        ("llama", bf16, BOTH, True, None, FLAT),
        ("llama", bf16, BOTH, False, None, FLAT),
        ("gpt_oss", f32, ONE, False, "routed", WIDE),
        ("gpt_oss", f32, ONE, True, "routed_lean", WIDE),
        ("gpt_oss", bf16, ONE, False, "routed", WIDE),
        ("gpt_oss", bf16, ONE, True, "routed", WIDE),
        ("gpt_oss", bf16, ONE, True, "routed_lean", WIDE),
        ("gpt_oss", bf16, ONE, True, "routed_lean", FLAT),
        ("gpt_oss", f32, ONE, False, "routed", FLAT),
        ("gpt_oss", f32, ONE, False, "routed_lean", WIDE),
    ],
)
def test_a_step_costs_what_the_meter_says(kind, dtype, targets, checkpointing, routed, sizes):
    tokens, sink = (
        256,
        dict(
            repeated=True,
            fused=False,
            one_pass=False,
            slice_tokens=4096 if routed == "routed_lean" else None,
        )
        if kind == "gpt_oss"
        else {},
    )
    shape, measured = measured_step(
        kind,
        dtype,
        targets,
        checkpointing,
        routed,
        sizes | (OSS if kind == "gpt_oss" else {}),
        tokens,
    )
    predicted = step_bytes(
        shape,
        Computation(element=dtype.itemsize, targets=targets, **dict(fused=False) | sink),
        2 * tokens,
        2 * (tokens - tokens // 4),
        tokens,
        gradient_checkpointing=checkpointing,
        logit_chunk_multiplier=16,
        logit_element=14 if dtype == bf16 else 9,
    )
    assert max(sum(parts.values()) for parts in predicted.values()) == pytest.approx(
        measured, rel=0.1 if kind == "gpt_oss" else 0.06
    )


LLAMA = dict(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=32,
    pad_token_id=0,
)  # the proportions of Llama-3.1-8B


@pytest.mark.parametrize(
    "kind, dtype, targets, sizes, tile, offload",
    [
        ("llama", bf16, BOTH, LLAMA, None, False),
        ("llama", bf16, BOTH, LLAMA, None, True),
        ("llama", bf16, BOTH, LLAMA, 64, True),
        ("llama", bf16, ONE, LLAMA, 64, True),
        ("llama", f32, BOTH, LLAMA, 64, True),
        ("llama", bf16, BOTH, WIDE, 100, True),
        ("qwen3", bf16, BOTH, LLAMA, None, True),
        ("qwen3", bf16, BOTH, LLAMA, 64, True),
        ("phi3", bf16, BOTH, LLAMA, None, True),
        ("phi3", bf16, BOTH, LLAMA, 64, True),
    ],
)
def test_slices_and_inputs_on_the_host_cost_what_the_meter_says(
    kind, dtype, targets, sizes, tile, offload
):
    "512 tokens: slices of 64 are eight of them, of 100 six."
    shape, measured = measured_step(
        kind, dtype, targets, True, None, sizes | dict(pad_token_id=0), 256, tile, offload
    )
    predicted = step_bytes(
        shape,
        Computation(element=dtype.itemsize, targets=targets, slice_tokens=tile, fused=False),
        512,
        384,
        256,
        offload_activations=offload,
        logit_chunk_multiplier=16,
        logit_element=14 if dtype == bf16 else 9,
    )
    assert max(sum(parts.values()) for parts in predicted.values()) == pytest.approx(
        measured, rel=0.06
    )


@pytest.mark.parametrize("targets, sizes", [(BOTH, WIDE), (ONE, WIDE), (BOTH, LLAMA), (BOTH, FLAT)])
def test_the_usual_step_costs_what_the_meter_says(targets, sizes):
    "PEFT's float32 copies, which transformers and PEFT make and the trainer does not."
    shape, measured = measured_step(
        "llama",
        bf16,
        targets,
        True,
        None,
        sizes | dict(vocab_size=64, pad_token_id=0),
        256,
        implementation="transformers",
    )
    usual, ours = (
        step_bytes(
            shape, Computation(targets=targets, implementation=name, fused=False), 512, 384, 256
        )
        for name in ("transformers", "ours")
    )
    assert sum(usual["layer"].values()) == pytest.approx(measured, rel=0.1) and sum(
        usual["layer"].values()
    ) > sum(usual["head"].values())
    assert sum(usual["layer"].values()) > 1.1 * sum(ours["layer"].values())


class _SavesItsInput(torch.autograd.Function):
    "A norm that keeps what torch's fused one keeps on a GPU."

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, weight)
        return (x.float() * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, scale, weight = ctx.saved_tensors
        g, x32 = gradient.float() * weight.float(), x.float()
        return (
            (scale * (g - x32 * scale * scale * (g * x32).mean(-1, keepdim=True))).to(x.dtype),
            None,
            None,
        )


@pytest.mark.parametrize("dtype", [bf16, torch.float32])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_model_in_one_pass_costs_what_the_meter_says(dtype, checkpointing, monkeypatch):
    "Norms and adapters as load_model makes them on a GPU: too little is never promised."

    def one_pass_of(*args, made=adapted, **kwargs):
        model = made(*args, **kwargs)
        assert fuse_layers(model) and adapters_are_fused(model)
        return model

    monkeypatch.setattr(sys.modules[__name__], "adapted", one_pass_of)
    monkeypatch.setattr(
        torch.nn.RMSNorm, "forward", lambda self, x: _SavesItsInput.apply(x, self.weight, self.eps)
    )
    sizes = {**WIDE, **OSS, "num_hidden_layers": 6}
    shape, measured = measured_step(
        "gpt_oss", dtype, ("attention",), checkpointing, "routed", sizes, 256
    )
    predicted = step_bytes(
        shape,
        Computation(element=dtype.itemsize, targets=("attention",), repeated=True, fused=False),
        512,
        384,
        256,
        gradient_checkpointing=checkpointing,
        logit_chunk_multiplier=16,
        logit_element=14 if dtype == bf16 else 9,
    )
    assert 0.99 <= max(sum(parts.values()) for parts in predicted.values()) / measured <= 1.08


def test_every_kernel_and_every_optimizer_is_counted():
    assert set(QUERIES) == set(KERNELS) and "nf4" in FORMATS
    assert all(any(part in name for name in OPTIMIZERS) for part in STATES)
    held = {name: state_bytes(name) for name in ("adamw_torch", "paged_adamw_8bit", "sgd")}
    assert held == {"adamw_torch": 8, "paged_adamw_8bit": 2, "sgd": 0}


def test_slices_lower_the_peak_of_an_mlp():
    shape, how = MODELS["Phi-4"], Computation()
    assert mlp_peak(shape, replace(how, slice_tokens=1024), 4096) < mlp_peak(shape, how, 4096)


def test_the_sequence_of_the_documents_llama():
    assert kv_bytes(MODELS["Llama-3.1-8B"], 1, 20_480, paged=False) == 2.5 * GiB


def test_the_module_is_light():
    code = (
        "import sys; import grpo_nb.model.memory_bytes, grpo_nb.model.memory_fit, "
        "grpo_nb.planning.plan, grpo_nb.cli; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "transformers", "matplotlib"} & set(loaded)
