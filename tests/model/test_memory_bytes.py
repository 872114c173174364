"""The planner: shapes and bytes against transformers' own models, against a meter of live storages,
and against measurements of an H200."""

import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_nb.algorithm import logprobs
from grpo_nb.model import attention, experts_grouped, experts_lora, loading, memory_bytes  # noqa: F401 (registers attention with transformers)
from grpo_nb.model.fused_layers import adapters_are_fused, fuse_layers
from grpo_nb.model.memory_bytes import (
    CARDS,
    CUDA_CONTEXT,
    FORMATS,
    KERNELS,
    MODELS,
    PREFILL_TOKENS,
    ROWS_OF_ONE,
    ROWS_PER_CHUNK,
    SLICES,
    UNPACKED,
    Card,
    GiB,
    Setup,
    advice_text,
    advise,
    attention_peak,
    attention_scratch,
    describe,
    free_memory,
    head_bytes,
    kv_bytes,
    layer_inputs,
    longest_context,
    longest_sequence,
    lora_parameters,
    mlp_peak,
    plan,
    plan_of,
    read_shape,
    standard,
    step_bytes,
    unpack_bytes,
    weight_bits,
    weight_bytes,
)
from grpo_nb.model.offload import HostStore, offload_layers
from grpo_nb.model.token_slices import slice_mlps
from grpo_nb.rollout import decoder
from grpo_nb.rollout.kv_cache import CacheShape
from grpo_nb.training import policy_logprobs, trainer
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps, plain_completion_logps
from grpo_nb.training.policy_model import checkpoint_layers

RECORDS = json.loads((Path(__file__).parents[1] / "data/memory_h200.json").read_text())["records"]


# Against measurements


@pytest.mark.parametrize("record", [pytest.param(r, id=r["name"]) for r in RECORDS])
def test_the_measured_peak_is_predicted_within_ten_per_cent(record):
    with patch("grpo_nb.model.memory_bytes.UNPACKED", record.get("unpacked", UNPACKED)):
        made = plan(**record["plan"])
    predicted = made.allocated(*record["moments"]) / GiB
    assert abs(predicted / record["peak_gib"] - 1) <= 0.1, (
        f"{predicted:.2f} GiB predicted, {record['peak_gib']:.2f} measured"
    )
    beyond = (
        record["peak_gib"] - sum(made.weights.values()) / GiB
    )  # what is left when the easy part, the weights, is taken off
    assert abs(predicted - record["peak_gib"]) <= 0.25 * beyond + 0.3


def test_there_are_enough_measurements_and_each_says_where_it_is_from():
    assert (
        len(RECORDS) >= 19
        and {r["plan"].get("weights") for r in RECORDS} >= {"bf16", "mxfp4"}
        and all(r["source"] and r["peak_gib"] > 0 and r["moments"] for r in RECORDS)
    )
    assert len({json.dumps(r["plan"], sort_keys=True) for r in RECORDS}) == len(RECORDS)


OLD = dict(
    card=Card("the cap", 14.5, (7, 5)), lora_r=8, offload_layer_inputs=True, offload_embedding=True
)


@pytest.mark.parametrize("tokens, gib", [(2048, 13.13), (19_392, 14.22), (21_312, 14.39)])
def test_an_old_card_s_limits_as_an_h200_measured_them(tokens, gib):
    """benchmarks/context.py --only t4_longest --layers 0, 14.5 GiB in all, by the driver's account:
    a step of one sequence."""
    step = plan(context=tokens, prompt=1, completions=1, offload_hidden=True, **OLD)
    assert max(step.totals["head"], step.totals["layer"]) / GiB == pytest.approx(gib, rel=0.02)


def test_a_whole_step_in_an_old_card_s_limits():
    "benchmarks/context.py --only t4_grpo: 4 prompts x 8 completions drawn and trained, all layers."
    whole = plan(
        context=2048, prompt=1536, completions=8, prompts=4, batch=8, share_prompt=True, **OLD
    )
    assert whole.peak / GiB == pytest.approx(14.06, rel=0.02)


@pytest.mark.parametrize(
    "name, card, settings, gib",
    [
        (
            "Phi-4",
            Card("the cap", 14.5, (7, 5)),
            dict(completions=4, prompts=2, batch=4, offload_embedding=True),
            10.80,
        ),
        ("Qwen2.5-1.5B", Card("the cap", 5, (9, 0)), dict(completions=8, prompts=4, batch=8), 3.05),
    ],
)
def test_whole_steps_of_dense_models_as_an_h200_measured_them(name, card, settings, gib):
    """benchmarks/context.py --only phi4_t4 qwen_5, by the driver's account: a GRPO step, drawing
    and training."""
    made = plan(
        name,
        card,
        weights="nf4",
        lora_r=8,
        context=768,
        prompt=512,
        share_prompt=True,
        offload_layer_inputs=True,
        **settings,
    )
    assert made.peak / GiB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    "kernel, tokens, gib",
    [
        ("flex", 2048, 0.052),
        ("flex", 16_384, 0.414),
        ("flex", 65_536, 1.656),
        ("sink_key", 2048, 0.164),
        ("sink_key", 8192, 0.612),
        ("sink_key", 65_536, 4.825),
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
        tokens * (attention_peak(shape, 2, False, tokens, kernel) - given)
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
    assert plan(str(tmp_path), "L4").fits


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
        ({**SMALL, "vocab_size": "many"}, "whole number"),
        ({**SMALL, "num_hidden_layers": -1}, "at least 1"),
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


def test_constants_are_those_of_the_code():
    assert (memory_bytes.GRADIENT_BYTES, memory_bytes.SHORTEST_CUDNN, memory_bytes.PART_BYTES) == (
        attention.GRADIENT_BYTES,
        attention.SHORTEST_CUDNN,
        attention.PART_BYTES,
    )
    assert (
        memory_bytes.KEPT_FROM
        == inspect.signature(offload_layers).parameters["attention_from"].default
    )
    assert PREFILL_TOKENS == decoder.PREFILL_TOKENS and ROWS_PER_CHUNK == logprobs.ROWS_PER_CHUNK
    shape = MODELS["Llama-3.1-8B"]
    chunk = max(b - a for a, b in logprobs.chunk_rows(1, 5000))
    assert chunk <= head_bytes(shape, 5000, 5000)[1] // (2 * shape.vocab) <= 1024
    assert head_bytes(shape, 8192, 8192, logit_chunk_multiplier=16)[1] == logprobs.logit_bytes(
        1, 8192, shape.vocab, logit_chunk_multiplier=16, element_bytes=2
    )
    assert layer_inputs(shape, 100)[0] == shape.layers * logprobs.hidden_state_bytes(
        1, 100, shape.hidden
    )


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


class CountedStore(HostStore):
    "A store with all its pages from the start, so that a meter can leave the host's memory out."

    def __init__(self, size):
        super().__init__(page_bytes=2**12)
        parked = self.park(torch.zeros(size, dtype=torch.uint8).view(torch.float32))
        self.settle()
        del parked
        self.all = list(next(iter(self.lanes.values())).free)


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
        experts_lora.route_adapters(model, routed)
    if checkpointing:
        checkpoint_layers(model, {"use_reentrant": False})
    if tile:
        slice_mlps(model, tile)
    store = (
        CountedStore(
            2 * tokens * sizes["hidden_size"] * dtype.itemsize * (sizes["num_hidden_layers"] + 1)
        )
        if offload
        else None
    )
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
        *(store.all if store else ()),
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
        assert store.parked > sizes["num_hidden_layers"] and store.pages == len(store.all)
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
            kernel="sink_key",
            repeated=True,
            fused=False,
            one_pass=False,
            tile=4096 if routed == "routed_lean" else None,
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
        2 * tokens,
        2 * (tokens - tokens // 4),
        tokens,
        dtype.itemsize,
        targets=targets,
        checkpointing=checkpointing,
        logit_chunk_multiplier=16,
        logit_element=14 if dtype == bf16 else 9,
        **sink,
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
        512,
        384,
        256,
        dtype.itemsize,
        targets=targets,
        tile=tile,
        offload_layer_inputs=offload,
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
        step_bytes(shape, 512, 384, 256, 2, targets=targets, implementation=name)
        for name in ("transformers", "ours")
    )
    assert sum(usual["layer"].values()) == pytest.approx(measured, rel=0.1) and sum(
        usual["layer"].values()
    ) > sum(usual["head"].values())
    assert sum(usual["layer"].values()) > 1.1 * sum(ours["layer"].values())


# Plans


def test_parts_add_up_and_the_peak_is_the_largest_moment():
    made = plan(
        "gpt-oss-20b",
        "H100",
        context=8192,
        offload_layer_inputs=True,
        offload_embedding=True,
        prompts=4,
    )
    assert (
        made.peak
        == made.totals[made.worst]
        == max(sum(parts.values()) for parts in made.moments.values())
    )
    assert all(
        parts["weights"] == sum(made.weights.values()) and min(parts.values()) >= 0
        for parts in made.moments.values()
    )
    assert (
        made.host["embedding"] == weight_bytes(MODELS["gpt-oss-20b"], "mxfp4")["embedding"]
        and made.weights["embedding"] == 0
    )
    assert made.peak - made.allocated() >= CUDA_CONTEXT
    assert json.loads(json.dumps(made.to_dict()))["peak"] == made.peak


SWITCHES = [  # settings, what they lower
    (dict(), dict(offload_embedding=True)),
    (dict(), dict(offload_layer_inputs=True)),
    (dict(checkpointing=False), dict(checkpointing=True)),
    (dict(tile=None), dict(tile=1024)),
    (dict(batch=4), dict(share_prompt=True)),
    (dict(sampler="vllm"), dict(sampler="vllm_sleep")),
    (dict(sampler="vllm"), dict(sampler="engine")),
    (dict(implementation="transformers"), dict(implementation="ours")),
    (dict(weights="bf16"), dict(weights="mxfp4")),
    (dict(), dict(weights="mxfp4+nf4")),
    (dict(weights="mxfp4+nf4"), dict(double_quant=True)),
    (dict(lora_r=64), dict(lora_r=8)),
    (dict(lora_targets=BOTH), dict(lora_targets=ONE)),
    (dict(optimizer="adamw"), dict(optimizer="sgd")),
    (dict(reference=True), dict(reference=False)),
    (dict(attention="sink_key", tile=4096), dict(attention="flex")),
    (dict(), dict(context=8192)),
    (dict(batch=2), dict(batch=1)),
]


@pytest.mark.parametrize("settings, change", SWITCHES)
def test_each_switch_lowers_the_training_step(settings, change):
    before, after = (
        plan("gpt-oss-20b", "B200", **settings),
        plan("gpt-oss-20b", "B200", **{**settings, **change}),
    )
    assert max(after.totals["head"], after.totals["layer"]) < max(
        before.totals["head"], before.totals["layer"]
    )


def test_hidden_states_and_chunks_lower_the_head():
    settings = dict(context=65_536, batch=4, offload_layer_inputs=True)
    heads = [
        plan("gpt-oss-20b", "B200", **settings, **change).totals["head"]
        for change in (
            {},
            dict(offload_hidden=True, mini_batch=4),
            dict(offload_hidden=True, mini_batch=4, logit_chunk_multiplier=256),
        )
    ]
    assert heads[0] > heads[1] > heads[2]


def test_offloading_moves_bytes_and_loses_none():
    here, there = (
        plan("Llama-3.1-8B", "H200"),
        plan("Llama-3.1-8B", "H200", offload_layer_inputs=True),
    )
    one = 16_384 * 4096 * 2
    assert (
        here.moments["layer"]["hidden"] - there.moments["layer"]["hidden"] == 30 * one
        and there.host["layer inputs"] == 32 * one
    )


def test_the_engine_draws_fewer_rows_where_memory_is_short():
    rows = {
        card: plan("gpt-oss-20b", card, context=16_384, prompts=8).rows
        for card in ("T4", "L4", "H200")
    }
    assert 1 <= rows["T4"] < rows["L4"] < rows["H200"] == 64
    assert all(
        plan("gpt-oss-20b", card, context=16_384, prompts=8).totals["rollout"]
        <= CARDS[card].usable * GiB
        for card in rows
    )


def test_the_usual_practice_costs_more():
    for name in MODELS:
        made = plan(name, "B200", context=8192, weights="mxfp4" if MODELS[name].sinks else "nf4")
        assert standard(made.setup).peak > 1.5 * made.peak
    assert standard(plan("gpt-oss-20b", "T4").setup).setup.weights == "fp16"


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(context=0), "context is 0"),
        (dict(context=True), "context is True"),
        (dict(context=100, prompt=100), "leave room"),
        (dict(lora_r=-1), "lora_r is -1"),
        (dict(weights="int8"), "give one of"),
        (dict(model="Llama-3.1-8B", weights="mxfp4"), "has no experts"),
        (dict(lora_targets="experts"), "attention, mlp"),
        (dict(optimizer="lion"), "adamw"),
        (dict(model="Qwen3-4B", offload_embedding=True), "cannot be offloaded"),
        (dict(checkpointing=False, offload_layer_inputs=True), "leave checkpointing on"),
        (dict(attention="flex"), "compute capability"),
        (dict(card="H300"), "H200"),
        (dict(sampler="sglang"), "vllm_sleep"),
        (dict(tile=0), "tile is 0"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        plan(**settings)


def test_an_unknown_keyword():
    with pytest.raises(TypeError):
        plan(contxt=5)


# The inverse, and advice

SETTINGS = st.fixed_dictionaries(
    {},
    optional=dict(
        context=st.sampled_from([64, 1024, 20_480, 131_072]),
        batch=st.integers(1, 9),
        completions=st.integers(1, 16),
        prompts=st.integers(1, 9),
        lora_r=st.sampled_from([0, 1, 64]),
        checkpointing=st.booleans(),
        tile=st.sampled_from([None, 1, 4096]),
        share_prompt=st.booleans(),
        offload_hidden=st.booleans(),
        mini_batch=st.integers(1, 4),
        sampler=st.sampled_from(["engine", "vllm", "vllm_sleep"]),
        optimizer=st.sampled_from(["adamw", "adamw_8bit", "sgd"]),
        reference=st.booleans(),
        implementation=st.sampled_from(["ours", "transformers"]),
        attention=st.sampled_from([None, "sink_key", "eager"]),
        prompt=st.sampled_from([None, 0, 63]),
    ),
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(CARDS)), SETTINGS)
def test_any_plan_can_be_made_told_and_mended(model, card, given):
    made = plan(model, card, **given)
    assert (
        made.peak > 0
        and made.rows >= 1
        and all(
            isinstance(size, int) and size >= 0
            for parts in (*made.moments.values(), made.host)
            for size in parts.values()
        )
    )
    assert ("It fits" in describe(made)) == made.fits and all(
        len(line) < 400 for line in describe(made).splitlines()
    )
    found = advise(made)
    assert bool(found) <= (not made.fits) and all(a.saves > 0 for a in found)
    before = made.peak
    for a in found:
        assert before - a.plan.peak == a.saves
        before = a.plan.peak
    assert all(not a.plan.fits for a in found[:-1])
    text = advice_text(made)
    assert ("Nothing has to be changed" in text) == made.fits and ("too much" in text) == (
        not made.fits and not (found and found[-1].plan.fits)
    )


@pytest.mark.parametrize(
    "model, card, settings",
    [
        ("gpt-oss-20b", "T4", dict(offload_embedding=True, offload_layer_inputs=True)),
        ("gpt-oss-20b", "H200", {}),
        ("Llama-3.1-8B", "L4", dict(weights="nf4")),
        ("Phi-4", "A100-80", dict(batch=3, share_prompt=True)),
        ("gpt-oss-20b", "H100", dict(implementation="transformers", attention="eager")),
    ],
)
def test_the_longest_context_is_the_longest(model, card, settings):
    n = longest_context(model, card, **settings)
    assert (
        n > 0
        and n % 64 == 0
        and plan(model, card, context=n, **settings).fits
        and not plan(model, card, context=n + 64, **settings).fits
    )


def test_no_context_is_short_enough_and_none_too_long():
    assert longest_context("gpt-oss-120b", "T4") == 0
    assert longest_context("Qwen2.5-1.5B", "B200", most=4096) == 4096
    assert longest_context("gpt-oss-20b", Card("small", 12.0, (8, 0))) == 0


def test_advice_begins_with_the_largest_saving():
    for model, card, choices in (
        ("Llama-3.1-8B", "T4", dict(context=8192, batch=2, checkpointing=False, sampler="vllm")),
        ("gpt-oss-20b", "T4", dict(context=16_384)),
        ("Llama-3.1-8B", "L4", dict(context=20_480, batch=8)),
    ):
        made = plan(model, card, **choices)
        for start in (made, standard(made.setup)):
            found = advise(start)
            left = [a.change for a in found]
            assert (
                found
                and [a.saves for a in found] == sorted((a.saves for a in found), reverse=True)
                and len(set(left)) == len(left)
            )
            lines = advice_text(start).splitlines()
            assert "saves most comes first" in lines[0] and all(
                f"{a.saves / GiB:.2f} GiB by {a.change}. {a.cost}" in line
                for a, line in zip(found, lines[1:])
            )


def test_advice_knows_every_switch_of_the_usual_practice():
    usual, mended = (
        standard(plan("gpt-oss-20b", "T4", context=32_768).setup),
        plan(
            "gpt-oss-20b",
            "T4",
            context=32_768,
            offload_embedding=True,
            offload_layer_inputs=True,
            lora_r=8,
        ),
    )
    mended = plan_of(replace(mended.setup, optimizer="adamw_8bit"))
    assert advise(usual)[-1].plan.peak == mended.peak and usual.setup.attention == "eager"
    assert any(
        "reference=False" in a.change
        for a in advise(plan("gpt-oss-20b", "T4", context=4096, reference=True))
    )


def test_advice_takes_cheap_switches_and_leaves_out_what_is_not_needed():
    found = advise(
        plan("Phi-4", "T4", weights="nf4", context=8192, offload_embedding=True, tile=1024)
    )
    assert [a.change for a in found] == [
        "offload_layer_inputs=True"
    ]  # not the rank, not the adapters' places
    made = plan("Llama-3.1-8B", "L4", context=20_480, batch=8)
    found = advise(made)
    for a in found:  # without any one of them it does not fit
        changes = {
            key: value
            for other in found
            if other is not a
            for key, value in eval(f"dict({other.change})").items()
        }
        assert not plan_of(replace(made.setup, **changes)).fits, a.change


# What is unpacked, what is free


def test_unpacked_experts_are_counted():
    shape = MODELS["gpt-oss-20b"]
    assert UNPACKED == experts_grouped.UNPACKED and ROWS_OF_ONE == experts_grouped.ROWS_OF_ONE
    one = 2 * shape.hidden * shape.intermediate * 2
    count = experts_grouped.UNPACKED // one
    assert (
        unpack_bytes(shape, "mxfp4") == count * one
        and 1 < count < shape.experts
        and unpack_bytes(shape, "mxfp4", grouped=False) == one * 3 // 2
        and unpack_bytes(shape, "bf16") == 0
    )
    assert (
        unpack_bytes(replace(shape, intermediate=2**20), "mxfp4") == 2 * shape.hidden * 2**20 * 2
    )  # at least one expert
    new, old = (
        plan("gpt-oss-20b", card, weights="mxfp4")
        for card in (Card("new", 160, (8, 0)), Card("old", 160, (7, 5)))
    )
    dense = plan("gpt-oss-20b", Card("new", 160, (8, 0)), weights="bf16")
    for moment in ("rollout", "layer"):
        assert new.moments[moment]["mlp"] - dense.moments[moment]["mlp"] == count * one
    assert old.moments["rollout"]["mlp"] - dense.moments["rollout"]["mlp"] == one * 3 // 2


@pytest.mark.parametrize(
    "fraction, driver, reserved, allocated, free",
    [
        (1.0, 9, 6, 4, 11),
        (0.5, 9, 6, 4, 4),
        (0.25, 9, 6, 4, 0),
        (0.2, 9, 6, 4, 0),
        (0.9, 1, 6, 4, 3),
        (1.0, 0, 6, 6, 0),
    ],
)
def test_free_memory_keeps_to_the_share_of_the_process(fraction, driver, reserved, allocated, free):
    figures = dict(
        mem_get_info=(driver * GiB, 16 * GiB),
        memory_reserved=reserved * GiB,
        memory_allocated=allocated * GiB,
        get_per_process_memory_fraction=fraction,
        get_device_properties=SimpleNamespace(total_memory=16 * GiB),
    )
    with patch.multiple(
        "torch.cuda", **{name: lambda *_, value=value: value for name, value in figures.items()}
    ):
        assert free_memory("cuda") == free_memory(torch.device("cuda", 0)) == free * GiB
        assert (
            loading.free_memory(torch.device("cuda")) == free * GiB
            and trainer.free_memory(torch.device("cuda")) == free * GiB
            and policy_logprobs.free_memory(torch.device("cuda")) == free * GiB
        )
        asked = []
        with patch(
            "torch.cuda.get_per_process_memory_fraction",
            lambda device: asked.append(device) or fraction,
        ):
            free_memory("cuda"), free_memory("cuda:0")
        assert asked == [None, 0]  # torch takes "cuda" without a number everywhere but there
    assert free_memory("cpu") > 2**20


def test_the_documents_llama():
    made = plan(
        "Llama-3.1-8B",
        "H200",
        weights="nf4",
        context=20_480,
        prompt=0,
        batch=8,
        tile=4096,
        offload_embedding=True,
        offload_layer_inputs=True,
    )
    assert max(made.totals["head"], made.totals["layer"]) < 54.3 * GiB
    assert kv_bytes(MODELS["Llama-3.1-8B"], 1, 20_480, paged=False) == 2.5 * GiB


def test_the_module_is_light():
    code = "import sys; import grpo_nb.model.memory_bytes, grpo_nb.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "numpy", "transformers", "matplotlib"} & set(loaded)


def test_setups_are_plain_values():
    made = plan("Phi-4", "L4")
    assert (
        plan_of(replace(made.setup)) == made
        and {f.name for f in fields(Setup)} == set(made.to_dict()["setup"])
        and set(KERNELS) >= {"flex", "sdpa"}
        and "nf4" in FORMATS
    )
    assert mlp_peak(MODELS["Phi-4"], 2, True, 4096, 1024) < mlp_peak(MODELS["Phi-4"], 2, True, 4096)


def test_a_micro_batch_that_is_too_large_is_told_in_pieces():
    made = plan("gpt-oss-20b", "L4", context=8192, batch=8)
    words = next(
        line for line in describe(made).splitlines() if "cuts a micro-batch by itself" in line
    )
    pieces = int(words.split(": in ")[1].split()[0])
    fewer, enough = (
        plan("gpt-oss-20b", "L4", context=8192, batch=-(-8 // n)) for n in (pieces - 1, pieces)
    )
    assert (
        not made.fits and not fewer.fits and enough.fits and f"{enough.peak / GiB:.2f} GiB" in words
    )
    assert "pieces" not in describe(
        plan("gpt-oss-20b", "H200", context=8192, batch=8)
    ) and "pieces" not in describe(plan("gpt-oss-120b", "T4", batch=2))


def test_words_near_a_card_s_line_and_without_adapters():
    n = longest_context("gpt-oss-20b", "L4")
    for context, close in ((n, True), (n + 64, True), (n // 2, False), (4 * n, False)):
        assert ("That is close" in describe(plan("gpt-oss-20b", "L4", context=context))) == close
    assert "needs 0.00 GiB" not in describe(plan("gpt-oss-20b", "L4", context=n + 64))
    assert (
        "trains every weight" in describe(plan("Llama-3.1-8B", "H100", lora_r=0))
    ) and "trains every weight" not in describe(plan("Llama-3.1-8B", "H100"))


def test_advice_knows_the_format_of_the_experts_and_cards_that_need_no_advice():
    assert [
        a.change
        for a in advise(plan("gpt-oss-20b", "L4", weights="nf4", double_quant=True, context=4096))
    ] == ["weights='mxfp4', double_quant=False"]
    text = advice_text(
        plan(
            "gpt-oss-20b", "L4", context=131_072, offload_embedding=True, offload_layer_inputs=True
        )
    )
    assert (
        "a card like the A100-40, which takes it as it was asked for" in text
    )  # a compute capability below the L4's, and enough memory
    assert plan(
        "gpt-oss-20b", "A100-40", context=131_072, offload_embedding=True, offload_layer_inputs=True
    ).fits


def test_slices_are_chosen_as_in_training_and_anew_when_there_is_more_room():
    tight, roomy = (
        plan(
            "gpt-oss-20b", card, context=131_072, offload_embedding=True, offload_layer_inputs=True
        )
        for card in ("L4", "H200")
    )
    assert (
        roomy.tile == SLICES[0] > tight.tile == SLICES[-1]
        and not tight.fits
        and plan("Llama-3.1-8B", "H200").tile is None
    )
    assert plan("gpt-oss-20b", "H200", tile=4096, context=131_072).tile == 4096
    full = plan("Llama-3.1-8B", "T4", weights="bf16")
    assert (
        not full.fits
        and all("tile" not in a.change for a in advise(full))
        and full.tile == SLICES[-1] < advise(full)[-1].plan.tile
    )  # in 4 bits larger ones fit


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
        512,
        384,
        256,
        dtype.itemsize,
        targets=("attention",),
        checkpointing=checkpointing,
        logit_chunk_multiplier=16,
        logit_element=14 if dtype == bf16 else 9,
        kernel="sink_key",
        repeated=True,
        fused=False,
    )
    assert 0.99 <= max(sum(parts.values()) for parts in predicted.values()) / measured <= 1.08


def test_what_is_said_of_a_rollout_and_of_a_card_without_bfloat16():
    none, some = (
        plan("Llama-3.1-8B", "T4", weights="bf16"),
        plan("Llama-3.1-8B", "L4", weights="nf4", completions=64, context=32_768),
    )
    assert (
        none.totals["rollout"] > none.card_bytes
        and "not one drawn together" in describe(none)
        and "max_batch_size" not in describe(none)
        and "A T4 has no bfloat16" in describe(none)
    )
    assert (
        some.rows < 64
        and f"{some.rows} drawn together" in describe(some)
        and "max_batch_size" not in describe(some)
        and "bfloat16" not in describe(some)
    )


def test_offloading_hidden_states_of_a_single_piece_is_told_to_be_idle():
    one, two = (
        plan("gpt-oss-20b", "L4", context=8192, batch=2, offload_hidden=True, mini_batch=n)
        for n in (1, 2)
    )
    assert one.host["hidden states"] == 0 < two.host["hidden states"]
    assert "offload_hidden changes nothing" in describe(one) and "offload_hidden" not in describe(
        two
    )
