"""Export: merges against PEFT's, reloaded by transformers and by load_model, the model untouched,
interrupted exports that leave the old folder whole."""

import copy
import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from small_mixtures import mixture
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_nb.model import export as exporting
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.export import (
    adapted_weights,
    new_folder,
    quantize_closely,
    save_adapter,
    save_merged,
    save_mxfp4,
)
from grpo_nb.model.loading import load_model
from grpo_nb.model.mxfp4 import dequantize, quantize
from grpo_nb.model.packed import PackedWeight, pack_experts
from grpo_nb.model.stored_weights import read_checkpoint
from grpo_nb.model.tiny import tiny_gpt_oss

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
IDS = torch.randint(7, 20, (3, 12), generator=torch.Generator().manual_seed(0))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {
    "none": None,
    "attention": dict(target_modules=["q_proj", "v_proj", "o_proj"]),
    "experts": dict(target_modules=[], target_parameters=EXPERTS),
    "all": dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=EXPERTS),
    "one matrix": dict(target_modules=[], target_parameters=EXPERTS[:1]),
}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def shake(model, size=0.05, seed=1, name="default"):
    "Second factors that are not 0."
    generator = torch.Generator().manual_seed(seed)
    for key, p in model.named_parameters():
        if "lora_B" in key and f".{name}" in key or "lora_embedding_A" in key:
            p.data = torch.randn(p.shape, generator=generator) * size
    return model


def policy(targets="all", packed=False, **tiny):
    model, _ = tiny_gpt_oss(**tiny)
    if packed:
        pack_experts(model)
    if TARGETS[targets] is None:
        return model
    torch.manual_seed(0)
    model = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=5, use_rslora=True, **TARGETS[targets])
    )
    route_adapters(model)
    return shake(model)


def reload(path, dtype="float32"):
    "As transformers reads it."
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def off(a, b):
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


def state(model):
    def raw(p):
        return (
            torch.cat([p.blocks.flatten(), p.scales.flatten()])
            if isinstance(p, PackedWeight)
            else p.detach().clone()
        )

    return {name: (raw(p), p.requires_grad, type(p.data)) for name, p in model.named_parameters()}


def same_state(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(x[0], b[name][0]) and x[1:] == b[name][1:] for name, x in a.items()
    )


# ---- what other programs read in a folder

# by llama.cpp's converter, for the header of a GGUF file
READ_BY_LLAMA_CPP = (
    "architectures vocab_size num_hidden_layers hidden_size intermediate_size head_dim "
    "num_attention_heads num_key_value_heads num_local_experts num_experts_per_tok "
    "max_position_embeddings sliding_window rms_norm_eps rope_parameters"
).split()


@pytest.mark.parametrize("shard_size", [2**30, 30_000])
@pytest.mark.parametrize("save", [save_merged, save_mxfp4])
def test_a_folder_has_what_llama_cpp_reads(save, shard_size, tmp_path):
    tokenizer = tiny_gpt_oss()[1]
    save(policy("all"), tmp_path / "m", tokenizer=tokenizer, shard_size=shard_size, quiet=True)
    files = {file.name for file in (tmp_path / "m").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= files
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    assert set(READ_BY_LLAMA_CPP) <= set(settings)
    assert settings["architectures"] == ["GptOssForCausalLM"]
    method = settings.get("quantization_config", {}).get("quant_method")
    assert method == ("mxfp4" if save is save_mxfp4 else None)
    parts = {name for name in files if name.startswith("model") and name.endswith(".safetensors")}
    if shard_size < 2**30:
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == parts and len(parts) > 4
    else:
        assert parts == {"model.safetensors"}
    stored = read_checkpoint(tmp_path / "m").values()  # in the order of the files
    experts = [t.name for t in stored if t.name.endswith(("_blocks", "_scales"))]
    assert len(experts) == (8 if save is save_mxfp4 else 0)
    for blocks, scales in zip(experts[::2], experts[1::2]):  # it joins what comes in turn
        assert blocks.removesuffix("_blocks") == scales.removesuffix("_scales")


def test_a_tokenizer_has_names_that_transformers_4_knows(tmp_path):
    tokenizer = tiny_gpt_oss()[1]
    save_merged(policy("none"), tmp_path / "m", tokenizer=tokenizer, quiet=True)
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    again = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "<|start|>u<|message|>1+2=<|end|><|return|>"
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.all_special_ids == tokenizer.all_special_ids
    assert again.chat_template == tokenizer.chat_template


# ---- merges


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
def test_every_way_out(targets, packed, tmp_path):
    model = policy(targets, packed)
    before, expected = state(model), logits(model)
    for name, save, bound in (
        ("f32", lambda p: save_merged(model, p, dtype="float32", quiet=True), 2e-6),
        ("bf16", lambda p: save_merged(model, p, quiet=True), 0.01),
        ("mxfp4", lambda p: save_mxfp4(model, p, quiet=True), 0.2),
    ):
        export = save(tmp_path / name)
        theirs, (ours, _) = (
            reload(export.path),
            load_model(export.path, max_seq_length=64, load_in_4bit=name == "mxfp4", quiet=True),
        )
        difference = off(logits(theirs), expected)
        assert difference < bound and off(logits(ours), logits(theirs)) < 1e-5, (name, difference)
        if name == "mxfp4" and packed and targets in ("none", "attention"):
            assert difference < 0.01
        assert (
            sum(file.stat().st_size for file in export.path.glob("*.safetensors")) - export.nbytes
            < 10_000
        )
    assert same_state(before, state(model)) and torch.equal(logits(model), expected)
    if targets != "none":
        model(IDS).logits.logsumexp(-1).sum().backward()  # training goes on
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_merged_weights_are_those_of_peft(tmp_path):
    model = policy("all")
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    theirs, ours = (
        copy.deepcopy(model).merge_and_unload().state_dict(),
        load_file(tmp_path / "m" / "model.safetensors"),
    )
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], atol=1e-7), name


def test_rounded_once(tmp_path):
    "A bfloat16 base: the sum is made in float32 from the float32 adapter, and rounded then."
    model, _ = tiny_gpt_oss()
    model = shake(get_peft_model(model.bfloat16(), LoraConfig(r=3, **TARGETS["all"])), 0.01)
    export = save_merged(model, tmp_path / "m", quiet=True)
    ours = load_file(tmp_path / "m" / "model.safetensors")
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = (
        layer.base_layer.weight.double()
        + layer.scaling["default"]
        * layer.lora_B["default"].weight.double()
        @ layer.lora_A["default"].weight.double()
    )
    assert (
        ours["model.layers.0.self_attn.q_proj.weight"].double() != exact.bfloat16().double()
    ).float().mean() < 1e-3  # ties of float32 against float64 at most
    assert {row["weight"] for row in export.rows} == {
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        *EXPERTS,
    }


def test_active_adapters_are_added(tmp_path):
    model = get_peft_model(tiny_gpt_oss()[0], LoraConfig(r=3, **TARGETS["all"]))
    model.add_adapter("second", LoraConfig(r=2, **TARGETS["all"]))
    shake(shake(model), seed=5, name="second")
    route_adapters(model)
    for active in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(active)
        save_merged(model, tmp_path / "m", dtype="float32", quiet=True, overwrite=True)
        assert off(logits(reload(tmp_path / "m")), logits(model)) < 2e-6
    with pytest.raises(ValueError, match="default, second are active: say which one"):
        save_adapter(model, tmp_path / "a")
    with model.disable_adapter():
        save_merged(model, tmp_path / "base", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "base")), logits(tiny_gpt_oss()[0])) < 2e-6


def test_merged_already(tmp_path):
    model = policy("all")
    expected = logits(model)
    model.merge_adapter()
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "m")), expected) < 2e-6


def test_one_of_two_merged(tmp_path):
    model = get_peft_model(
        tiny_gpt_oss()[0], LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])
    )
    model.add_adapter("b", LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    model.base_model.set_adapter(["default", "b"])
    model.merge_adapter(["default"])  # and b is active: PEFT computes with what is merged alone
    save_merged(model, tmp_path / "one", dtype="float32", quiet=True)
    assert torch.allclose(logits(reload(tmp_path / "one")), logits(model), atol=1e-4)
    with (
        model.disable_adapter(),
        pytest.raises(
            ValueError, match="merged into its weights and switched off.*unmerge_adapter"
        ),
    ):
        save_merged(model, tmp_path / "off", dtype="float32", quiet=True)
    assert not (tmp_path / "off").exists()


def test_the_folder_of_a_home_is_returned_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = get_peft_model(tiny_gpt_oss()[0], LoraConfig(r=4, target_modules=["q_proj"]))
    assert (
        save_adapter(model, "~/adapter") == tmp_path / "adapter"
        and save_merged(model, "~/merged", quiet=True).path == tmp_path / "merged"
        and (tmp_path / "merged").is_dir()
    )


def test_head_that_was_trained_whole(tmp_path):
    model = get_peft_model(
        tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    shake(model)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "m")), logits(model)) < 2e-6
    with model.disable_adapter():
        save_merged(model, tmp_path / "base", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "base")), logits(tiny_gpt_oss()[0])) < 2e-6


def test_tied_embeddings(tmp_path):
    config = AutoConfig.for_model(
        "llama",
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = shake(
        get_peft_model(
            AutoModelForCausalLM.from_config(config),
            LoraConfig(r=2, target_modules=["q_proj", "down_proj"]),
        ).eval()
    )
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert off(logits(again), logits(model)) < 2e-6 and "lm_head.weight" not in load_file(
        tmp_path / "m" / "model.safetensors"
    )


def tied(family):
    sizes = dict(vocab_size=40) if family == "GPT2" else dict(vocab_size=40)
    return mixture(family, **sizes, tie_word_embeddings=True, initializer_range=0.2)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Lfm2", "GPT2"])
@pytest.mark.parametrize(
    "given, merged_by",
    [
        (dict(modules_to_save=["lm_head"]), "here"),
        (dict(target_modules=["lm_head"]), "here"),
        (dict(modules_to_save=["EMBEDDING"]), "here"),
        (dict(target_modules=["EMBEDDING"]), "here"),
        # with an adapter PEFT adds what one of the two has learnt to the matrix that both share
        (dict(modules_to_save=["lm_head"]), "PEFT"),
        (dict(modules_to_save=["EMBEDDING"]), "PEFT"),
    ],
    ids=str,
)
def test_tied_weights_that_a_run_has_untied(family, given, merged_by, tmp_path):
    "Both are written, and the config says so: transformers reads back what PEFT computes."
    layer = "c_attn" if family == "GPT2" else "q_proj"
    embedding = "wte" if family == "GPT2" else "embed_tokens"
    given = {k: [embedding if n == "EMBEDDING" else n for n in v] for k, v in given.items()}
    given["target_modules"] = [layer, *given.get("target_modules", [])]
    torch.manual_seed(0)
    model = shake(get_peft_model(tied(family), LoraConfig(r=2, **given)).eval())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "modules_to_save" in name:
                p.add_(0.3 * torch.randn_like(p))
    expected = logits(model)
    assert off(expected, logits(tied(family))) > 0.01
    save_merged(
        model if merged_by == "here" else copy.deepcopy(model).merge_and_unload(),
        tmp_path / "m",
        dtype="float32",
        quiet=True,
    )
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    assert not settings.get("tie_word_embeddings")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert not again.config.tie_word_embeddings
    assert again.lm_head.weight is not again.get_input_embeddings().weight
    assert off(logits(again), expected) < 1e-5
    save_adapter(model, tmp_path / "a")
    assert torch.equal(logits(PeftModel.from_pretrained(tied(family), tmp_path / "a")), expected)


EXPERTS_OF = {
    "Qwen3Moe": "mlp.experts.gate_up_proj mlp.experts.down_proj",
    "Mixtral": "mlp.experts.gate_up_proj mlp.experts.down_proj",
    "Qwen3_5MoeText": "mlp.experts.gate_up_proj mlp.experts.down_proj",
    "DeepseekV3": "mlp.experts.gate_up_proj mlp.gate.weight",
    "Llama4Text": "feed_forward.experts.gate_up_proj feed_forward.experts.down_proj",
    "NemotronH": "mixer.experts.up_proj mixer.experts.down_proj",
    "GraniteMoeHybrid": "block_sparse_moe.experts.gate_up_proj",
    "JetMoe": "mlp.input_linear.weight",
}


@pytest.mark.parametrize("family", EXPERTS_OF)
def test_experts_of_other_mixtures(family, tmp_path):
    "Merged as PEFT merges them, under the names that transformers itself saves."
    config = LoraConfig(
        r=2, target_modules=["k_proj"], target_parameters=EXPERTS_OF[family].split()
    )
    if family in ("DeepseekV3", "JetMoe"):
        config.target_modules = {"o_proj" if family == "DeepseekV3" else "kv_proj"}
    torch.manual_seed(0)
    model = shake(get_peft_model(mixture(family), config).eval())
    theirs = copy.deepcopy(model).merge_and_unload()
    theirs.save_pretrained(tmp_path / "theirs")
    export = save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    ours = load_file(tmp_path / "m" / "model.safetensors")
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == wanted.keys() and len(export.rows) > 1
    for name, value in ours.items():
        torch.testing.assert_close(value, wanted[name], atol=2e-6, rtol=1e-5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert off(logits(again), logits(model)) < 2e-6
    assert off(logits(model), logits(mixture(family))) > 0.01


def test_embedding_with_an_adapter(tmp_path):
    model = shake(
        get_peft_model(
            tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"])
        )
    )
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "m")), logits(model)) < 2e-6


SHAPE = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"])
def test_families(family, tmp_path):
    model, _ = load_model(dict(model_type=family, **SHAPE), max_seq_length=32, lora_r=2, quiet=True)
    shake(model)
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    assert off(logits(again), logits(model)) < 5e-6
    again.save_pretrained(tmp_path / "theirs")
    assert (
        load_file(tmp_path / "theirs" / "model.safetensors").keys()
        == load_file(tmp_path / "m" / "model.safetensors").keys()
    )
    with pytest.raises(ValueError, match="has no experts of a gpt-oss"):
        save_mxfp4(model, tmp_path / "x")


def test_embedding_on_the_host(tmp_path):
    model, _ = load_model(
        dict(
            model_type="gpt_oss",
            **SHAPE | dict(intermediate_size=32, num_local_experts=2, num_experts_per_tok=1),
        ),
        max_seq_length=32,
        load_in_4bit=True,
        offload_embedding=True,
        lora_r=2,
        quiet=True,
    )
    shake(model)
    save_merged(model, tmp_path / "m", dtype="float32", quiet=True)
    assert off(logits(reload(tmp_path / "m")), logits(model)) < 5e-6


def test_what_cannot_be_merged(tmp_path):
    dora = get_peft_model(
        tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    )
    with pytest.raises(ValueError, match="is not plain LoRA"):
        save_merged(dora, tmp_path / "x")
    with pytest.raises(ValueError, match="single trained tokens"):
        save_merged(
            get_peft_model(
                tiny_gpt_oss()[0],
                LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3]),
            ),
            tmp_path / "x",
        )
    with pytest.raises(ValueError, match="PROMPT_TUNING, which adds to the prompt"):
        save_merged(
            get_peft_model(
                tiny_gpt_oss()[0], PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
            ),
            tmp_path / "x",
        )
    model = policy("attention")
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight[0, 0] = (
            torch.nan
        )
    with pytest.raises(
        ValueError, match="q_proj.weight has numbers that are infinite or NaN .* look for a NaN"
    ):
        save_merged(model, tmp_path / "x")
    big = policy("none")
    with torch.no_grad():
        big.lm_head.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="merge into bfloat16"):
        save_merged(big, tmp_path / "x", dtype="float16")
    with pytest.raises(ValueError, match="blocks of 32"):
        save_mxfp4(tiny_gpt_oss(intermediate_size=48)[0], tmp_path / "x")
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        save_merged(big, tmp_path / "x", dtype="int4")
    assert list(tmp_path.iterdir()) == []


# ---- MXFP4


def test_bytes_come_back(tmp_path):
    "A packed model without adapters: the released bytes, bit for bit, through loading and saving."
    first = save_mxfp4(policy("none", packed=True), tmp_path / "a", quiet=True)
    model, _ = load_model(
        first.path, max_seq_length=64, load_in_4bit=True, dtype="bfloat16", quiet=True
    )
    second = save_mxfp4(model, tmp_path / "b", quiet=True)
    a, b = (load_file(e.path / "model.safetensors") for e in (first, second))
    assert (
        a.keys() == b.keys()
        and all(torch.equal(a[name], b[name]) for name in a)
        and first.rows == second.rows == []
    )
    assert (
        json.loads((second.path / "config.json").read_text())["quantization_config"]["quant_method"]
        == "mxfp4"
    )


def test_the_layout_of_the_released_checkpoints(tmp_path):
    save_mxfp4(policy("none"), tmp_path / "m", quiet=True)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    p = "model.layers.0.mlp.experts."
    assert {
        n.removeprefix(p): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith(p)
    } == {
        "gate_up_proj_blocks": (torch.uint8, (4, 128, 4, 16)),
        "gate_up_proj_scales": (torch.uint8, (4, 128, 4)),
        "gate_up_proj_bias": (torch.bfloat16, (4, 128)),
        "down_proj_blocks": (torch.uint8, (4, 128, 2, 16)),
        "down_proj_scales": (torch.uint8, (4, 128, 2)),
        "down_proj_bias": (torch.bfloat16, (4, 128)),
    }
    assert all(t.dtype == torch.bfloat16 for name, t in tensors.items() if ".experts." not in name)


@pytest.mark.parametrize("packed", [False, True])
def test_the_table(packed, tmp_path):
    "Every number of it, from the file and the exact sum."
    model = policy("all", packed)
    export = save_mxfp4(model, tmp_path / "m", quiet=True)
    tensors, rows = (
        load_file(tmp_path / "m" / "model.safetensors"),
        {(row["layer"], row["weight"]): row for row in export.rows},
    )
    assert len(rows) == 2 * 6
    for merge in adapted_weights(model):
        if not merge.name.endswith(("gate_up_proj", "down_proj")):
            continue
        exact, change = (torch.stack(x).double() for x in zip(*(merge.exact(e) for e in range(4))))
        weight, written = (
            exact - change,
            dequantize(
                tensors[f"{merge.name}_blocks"], tensors[f"{merge.name}_scales"], torch.float64
            ).mT,
        )
        row = rows[int(merge.name.split(".")[2]), merge.name.split(".", 3)[3]]
        wanted = {
            "error": (written - exact).norm() / exact.norm(),
            "adapter / weight": change.norm() / weight.norm(),
            "survives": ((written - weight) * change).sum() / change.square().sum(),
            "error / adapter": (written - exact).norm() / change.norm(),
        }
        assert (
            all(abs(row[key] - value) < 1e-5 for key, value in wanted.items())
            and row["error"] < 0.15
        )


def test_small_adapters_do_not_survive_in_four_bits(tmp_path):
    model = shake(policy("experts", packed=True), 0.0005)
    rows = save_mxfp4(model, tmp_path / "m", quiet=True).rows
    assert all(abs(row["survives"]) < 0.02 and row["adapter / weight"] < 0.01 for row in rows)
    base, again = (
        policy("none", packed=True),
        load_model(tmp_path / "m", max_seq_length=64, load_in_4bit=True, quiet=True)[0],
    )
    for (name, a), (_, b) in zip(base.named_parameters(), again.named_parameters()):
        if isinstance(a, PackedWeight):
            assert torch.equal(a.dequantize(), b.dequantize()), name


@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 1e30])
def test_quantize_closely(scale):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * scale
    plain, close = (dequantize(*q(weight), torch.float64) for q in (quantize, quantize_closely))

    def error(x):
        return (x - weight.double()).square().unflatten(-1, (-1, 32)).sum(-1)

    assert (error(close) <= error(plain) * (1 + 1e-6)).all() and (error(close) < error(plain)).any()
    for shift in (0, -1e-6, 1e-6):
        on_grid = plain.float()
        assert torch.equal(
            dequantize(*quantize_closely(on_grid * (1 + shift)), torch.float32), on_grid
        )
    assert torch.equal(
        dequantize(*quantize_closely(torch.zeros(4, 32)), torch.float32), torch.zeros(4, 32)
    )
    with pytest.raises(ValueError, match="NaN"):
        quantize_closely(torch.full((1, 32), torch.nan))


# ---- files


def test_shards_and_settings(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    model.set_attn_implementation("sink")
    route_adapters(model)
    model.generation_config = GenerationConfig(temperature=0.7, eos_token_id=[1, 5])
    tokenizer.model_max_length = 77  # a run's limit
    export = save_merged(model, tmp_path / "m", shard_size=200_000, tokenizer=tokenizer, quiet=True)
    files = sorted(file.name for file in export.path.glob("*.safetensors"))
    assert len(files) > 2 and files == export.files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    index = json.loads((export.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == export.nbytes and set(index["weight_map"]) == set(
        model.state_dict()
    )
    assert torch.equal(
        logits(reload(export.path)),
        logits(reload(save_merged(model, tmp_path / "one", quiet=True).path)),
    )
    config = json.loads((export.path / "config.json").read_text())
    assert (
        "sink" not in str(config)
        and "routed" not in str(config)
        and config["dtype"] == "bfloat16"
        and config["architectures"] == ["GptOssForCausalLM"]
        and "quantization_config" not in config
    )
    assert GenerationConfig.from_pretrained(export.path).eos_token_id == [1, 5]
    again = AutoTokenizer.from_pretrained(export.path)
    assert (
        again("1+1=2").input_ids == tokenizer("1+1=2").input_ids
        and again.model_max_length > 1e20
        and tokenizer.model_max_length == 77
    )


def test_what_it_prints(tmp_path, capsys):
    save_mxfp4(policy("all", packed=True), tmp_path / "m")
    said = capsys.readouterr().out
    assert "error of rounding" in said and "of what the adapters changed" in said


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("targets", ["attention", "experts", "all"])
def test_adapter_in_peft(targets, packed, tmp_path):
    model = policy(targets, packed)
    before = state(model)
    save_adapter(model, tmp_path / "a", tokenizer=tiny_gpt_oss()[1])
    base = policy("none", packed)
    again = PeftModel.from_pretrained(base, tmp_path / "a", is_trainable=True)
    route_adapters(again)
    assert torch.equal(logits(again), logits(model)) and same_state(before, state(model))
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert all(
        "lora_" in name and name.startswith("base_model.model.model.layers.") for name in names
    )
    if targets != "attention":  # what vLLM reads: gate_up inside, down outside
        p = "base_model.model.model.layers.0.mlp.experts."
        assert names[f"{p}base_layer.lora_B.weight"].shape == (128, 12) and names[
            f"{p}lora_A.weight"
        ].shape == (12, 64)


def test_one_adapter_of_several(tmp_path):
    model = policy("attention")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"]))
    shake(model, seed=5, name="second")
    save_adapter(model, tmp_path / "a", adapter="second")
    model.set_adapter("second")
    assert (tmp_path / "a" / "adapter_config.json").exists() and off(
        logits(PeftModel.from_pretrained(policy("none"), tmp_path / "a")), logits(model)
    ) < 2e-6
    with pytest.raises(
        ValueError, match="there is no adapter 'third': the model has default, second"
    ):
        save_adapter(model, tmp_path / "b", adapter="third")
    with pytest.raises(ValueError, match="GptOssForCausalLM has no adapter"):
        save_adapter(policy("none"), tmp_path / "b")


# ---- interrupted


def test_folders_that_are_there(tmp_path):
    model = policy("none")
    (tmp_path / "m").mkdir()
    save_merged(model, tmp_path / "m", quiet=True)  # an empty one is taken
    old = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    with pytest.raises(
        ValueError, match="exists and is not empty: give another name, or overwrite=True"
    ):
        save_mxfp4(model, tmp_path / "m")
    assert {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()} == old
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_merged(model, tmp_path / "file", overwrite=True)
    save_mxfp4(model, tmp_path / "m", overwrite=True, quiet=True)
    assert "quantization_config" in (tmp_path / "m" / "config.json").read_text() and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["file", "m"]


def test_no_room(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 2**20})
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        ValueError, match=r"the export takes 0.06 GiB, and the disk of .* has 0.00 GiB left"
    ):
        save_merged(policy("none"), tmp_path / "new" / "m")
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with new_folder(tmp_path / "m") as partial:
            (partial / "half").write_text("")
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


CHILD = (
    r"""
import os, resource, signal, sys
sys.path[:0] = ["tests", "tests/model"]
import test_export
from grpo_nb.model import export
def die_at(module, name, count):
    original, left = getattr(module, name), [count]
    def deadly(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, deadly)
def run(folder, moment):
    name, _, count = moment.partition(" ")
"""
    '    if moment == "disk full": resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, '
    "100_000))       # a write beyond fails\n"
    "    else: die_at(os if hasattr(os, name) else export, name, int(count))\n"
    '    try: export.save_mxfp4(test_export.policy("all", packed=True), folder, '
    'overwrite=True, quiet=True, shard_size=100_000 if moment != "disk full" else 2**30)'
    r"""
    except OSError as error: os._exit(error.errno)
    os._exit(0)
for folder, moment in zip(sys.argv[1::2], sys.argv[2::2]):
    if not (child := os.fork()): run(folder, moment)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)
MOMENTS = [
    "quantize_closely 3",
    "_write_settings 1",
    "fsync 2",
    "replace 1",
    "replace 2",
    "disk full",
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    "Each moment in a process of its own: the folder that it was to replace, and how it ended."
    folders = {moment: tmp_path_factory.mktemp("killed") / "m" for moment in MOMENTS}
    for folder in folders.values():
        save_merged(policy("none"), folder, quiet=True)
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            *(x for moment, folder in folders.items() for x in (folder, moment)),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return {
        moment: (folder, int(code))
        for (moment, folder), code in zip(folders.items(), child.stdout.split(), strict=True)
    }


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(killed, moment):
    folder, code = killed[moment]
    assert code == (errno.EFBIG if moment == "disk full" else -signal.SIGKILL)
    hidden = {p.name: p for p in folder.parent.iterdir() if p.name.startswith(".")}
    if moment == "disk full":
        assert not hidden
    elif moment.startswith("replace"):
        assert (
            hidden[".m.partial"] / "config.json"
        ).exists()  # complete, and about to get its name
    else:
        assert (
            not any(p.name == "config.json" for h in hidden.values() for p in h.iterdir())
            or moment == "fsync 2"
        )
    old = (
        hidden[".m.old"] if moment == "replace 2" else folder
    )  # between the two renames the old one is hidden, and whole
    assert (
        "quantization_config" not in (old / "config.json").read_text()
        and off(logits(reload(old)), logits(policy("none"))) < 0.01
    )
    with pytest.raises(ValueError, match="exists and is not empty"):
        save_merged(policy("none"), folder)  # brought back where it was hidden
    save_mxfp4(policy("none"), folder, overwrite=True, quiet=True)
    assert [p.name for p in folder.parent.iterdir()] == ["m"] and "quantization_config" in (
        folder / "config.json"
    ).read_text()
