"""Loading: equal to transformers' loader bit for bit, little host memory, every architecture,
adapters, errors that leave nothing behind."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from grpo_nb.model.loading import (
    adaptable,
    free_memory,
    load_model,
    parts,
    read_checkpoint,
    read_header,
    resolve_targets,
)
from grpo_nb.model.mxfp4 import quantize
from grpo_nb.model.packed import EXPERTS, PackedWeight, experts_of, pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss, tiny_tokenizer

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
IDS = torch.randint(3, 20, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
)


def same(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)  # several threads may sum in another order


def load(source, **settings):
    model, tokenizer = load_model(source, **{"max_seq_length": 128, "quiet": True} | settings)
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def write_released(folder, shards=3, seed=0, **changes):
    """A tiny checkpoint in the released layout, blocks and scales of some weights in different
    shards."""
    config, torch_random = GptOssConfig(**SMALL | changes), torch.Generator().manual_seed(seed)
    model, tensors = AutoModelForCausalLM.from_config(config), {}
    for name, p in model.state_dict().items():
        value = torch.randn(p.shape, generator=torch_random) * (0.3 if p.dim() > 1 else 0.1) + (
            "norm" in name
        )
        if name.endswith(EXPERTS):
            tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), quantize(value.mT)))
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[name] = value.bfloat16()
    folder.mkdir()
    settings = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    names = sorted(tensors)
    places = {
        name: f"model-{i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file(
            {n: tensors[n] for n in names if places[n] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return write_released(tmp_path_factory.mktemp("released") / "model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    "What transformers itself saves, in bfloat16."
    folder = tmp_path_factory.mktemp("plain")
    model, tokenizer = tiny_gpt_oss()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- equal to transformers


@pytest.mark.parametrize("four_bit", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_released_layout_against_transformers(released, four_bit, dtype):
    theirs = AutoModelForCausalLM.from_pretrained(
        released, dtype=dtype, attn_implementation="sink", experts_implementation="eager"
    ).eval()
    ours = load(released, load_in_4bit=four_bit, dtype=dtype, experts_implementation="eager")
    assert same(logits(ours), logits(theirs))
    stored, theirs = (
        {k: v for file in released.glob("*.safetensors") for k, v in load_file(file).items()},
        theirs.state_dict(),
    )
    for name, p in ours.named_parameters():
        if isinstance(p, PackedWeight):
            assert (
                torch.equal(p.blocks, stored[f"{name}_blocks"])
                and torch.equal(p.scales, stored[f"{name}_scales"])
                and not p.requires_grad
            )
        else:
            assert (
                torch.equal(p, theirs[name])
                and p.dtype == getattr(torch, dtype)
                and p.is_contiguous()
            )
    packed = [p for p in ours.parameters() if isinstance(p, PackedWeight)]
    assert len(packed) == (4 if four_bit else 0)


def test_routed_experts_agree(released):
    model = load(released, load_in_4bit=True)
    assert (
        model.config._experts_implementation == "routed_lean"
        and model.config._attn_implementation == "sink"
        and not model.training
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        released, dtype="float32", attn_implementation="eager", experts_implementation="eager"
    )
    assert torch.allclose(logits(model), logits(theirs), atol=1e-4, rtol=1e-4)


def test_bf16_checkpoint(plain):
    dense, packed = load(plain), load(plain, load_in_4bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        plain, dtype="float32", attn_implementation="sink"
    )
    theirs.set_experts_implementation("routed_lean")
    assert same(logits(dense), logits(theirs)) and all(p.requires_grad for p in dense.parameters())
    pack_experts(theirs)
    assert same(logits(packed), logits(theirs)) and not any(
        p.requires_grad for p in packed.parameters()
    )
    assert dense.generation_config.eos_token_id == theirs.generation_config.eos_token_id == 1


def test_saved_by_us_and_read_by_transformers(released, tmp_path):
    model = load(released)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sink", experts_implementation="routed_lean", dtype="float32"
    )
    assert same(logits(again), logits(model))


def test_tied_gpt_oss(tmp_path):
    folder = write_released(tmp_path / "m", tie_word_embeddings=True)
    model = load(folder, load_in_4bit=True, experts_implementation="eager")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(
        logits(model),
        logits(
            AutoModelForCausalLM.from_pretrained(
                folder, dtype="float32", attn_implementation="sink", experts_implementation="eager"
            )
        ),
    )
    with pytest.raises(ValueError, match="is tied to its embedding"):
        load(folder, offload_embedding=True)


# ---- other architectures

SHAPE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "llama": {},
    "llama tied": dict(tie_word_embeddings=True),
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "phi3": {},
    "gemma3_text": {},
}


def family(name):
    return dict(model_type=name.split()[0], **SHAPE | FAMILIES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    model = load(family(name), seed=3)
    assert (
        all(p.isfinite().all() for p in model.parameters())
        and model.config.model_type == name.split()[0]
    )
    assert same(logits(model), logits(load(family(name), seed=3))) and not torch.equal(
        logits(model), logits(load(family(name), seed=4))
    )
    model.save_pretrained(tmp_path)
    again = load(tmp_path, lora_r=2)
    assert same(logits(again), logits(model))  # the second factors are 0
    kinds = {kind for target, kind in adaptable(model).items() if kind != "other"}
    adapted_layers = sum(p.requires_grad for p in again.parameters()) // 2
    assert kinds == {"attention", "mlp"} and adapted_layers == 2 * (4 if name == "phi3" else 7)
    again(IDS).logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is cut off"):
        load(tmp_path)


def test_random_weights_are_as_transformers_initialises(tmp_path):
    model = load(family("gemma3_text"))
    theirs = AutoModelForCausalLM.from_config(model.config)
    for (name, ours), (_, other) in zip(model.named_parameters(), theirs.named_parameters()):
        assert (
            abs(ours.std() - other.std()) < 0.3 * other.std() + 1e-9
            and abs(ours.mean() - other.mean()) < 0.01
        ), name
    assert {n: b.tolist() for n, b in model.named_buffers()} == {
        n: b.tolist() for n, b in theirs.named_buffers()
    }


def test_no_bitsandbytes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    load(family("qwen3")).save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="pip install 'grpo_nb.gpu.'"):
        load(tmp_path, load_in_4bit=True)
    with pytest.raises(ImportError, match="pip install 'grpo_nb.gpu.'"):
        load(dict(model_type="gpt_oss", **SMALL), attention_4bit=True)
    with pytest.raises(ValueError, match="attention_4bit is for gpt-oss"):
        load(tmp_path, attention_4bit=True)


# ---- random weights of a gpt-oss


def test_random_gpt_oss():
    config = GptOssConfig(**SMALL | dict(hidden_size=256, intermediate_size=128))
    model = load(config, load_in_4bit=True)
    for experts in experts_of(model).values():
        for p in EXPERTS:
            weight = getattr(experts, p)
            assert (
                isinstance(weight, PackedWeight)
                and 0.014 < weight.float().std() < 0.026
                and set(weight.scales.unique().tolist()) == {119, 120}
            )
    assert logits(model).isfinite().all() and not hasattr(model.config, "quantization_config")
    assert torch.equal(
        model.model.rotary_emb.inv_freq,
        AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq,
    )
    assert (
        config.to_dict()
        == GptOssConfig(**SMALL | dict(hidden_size=256, intermediate_size=128)).to_dict()
    )  # the caller's is as it was
    before = torch.get_rng_state()
    assert same(logits(load(config, load_in_4bit=True)), logits(model)) and torch.equal(
        torch.get_rng_state(), before
    )


def test_float16_keeps_norms_and_the_residual_stream_wide(released):
    model = load(released, load_in_4bit=True, dtype="float16")
    dtypes = {name.rsplit(".", 2)[-2]: p.dtype for name, p in model.named_parameters()}
    assert (
        dtypes["norm"] == dtypes["input_layernorm"] == torch.float32
        and dtypes["q_proj"] == dtypes["lm_head"] == torch.float16
    )
    seen = []
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: seen.append(output.dtype)
    )
    with torch.autocast("cpu", torch.float16):
        out = logits(model)
    assert seen == [torch.float32] and out.isfinite().all()
    assert torch.allclose(out.float(), logits(load(released)), atol=0.3)


# ---- adapters


def test_adapters_on_everything(released):
    base, model = load(released, load_in_4bit=True), load(released, load_in_4bit=True, lora_r=3)
    assert same(logits(model), logits(base))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    H, inner, E, q, kv = 64, 32, 4, 64, 32
    assert all(p.dtype == torch.float32 and "lora" in name for name, p in trained.items())
    assert sum(p.numel() for p in trained.values()) == 2 * 3 * (
        2 * (H + q) + 2 * (H + kv) + E * (H + 2 * inner) + E * (inner + H)
    )
    assert (
        model.peft_config["default"].lora_alpha == 6
        and load(released, lora_r=3, lora_alpha=5).peft_config["default"].lora_alpha == 5
    )
    model(IDS).logits.logsumexp(-1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == set(trained) and all(
        g.abs().sum() > 0 for name, g in grads.items() if "lora_B" in name
    )


def test_adapters_are_float32_over_bf16(released):
    model = load(released, load_in_4bit=True, lora_r=2, dtype="bfloat16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {
        torch.float32
    } and model.max_seq_length == 128


@pytest.mark.parametrize(
    "targets, count",
    [
        ("attention", 8),
        ("experts", 4),
        (["q_proj", "mlp.experts.down_proj"], 4),
        (["attention", "experts"], 12),
        ("o_proj", 2),
        ("model.layers.1.self_attn.q_proj", 1),
        ("model.layers.1.mlp.experts.down_proj", 1),
    ],
)
def test_targets(released, targets, count):
    model = load(released, load_in_4bit=True, lora_r=2, lora_targets=targets)
    assert sum(p.requires_grad for p in model.parameters()) == 2 * count


def test_targets_that_match_nothing(released):
    with pytest.raises(
        ValueError,
        match="'gate_proj', which matches nothing in GptOssForCausalLM: there are "
        "mlp.experts.down_proj, mlp.experts.gate_up_proj, self_attn.k_proj",
    ):
        load(released, lora_r=2, lora_targets=["q_proj", "gate_proj"])
    with pytest.raises(ValueError, match="'experts', which matches nothing in Llama"):
        load(family("llama"), lora_r=2, lora_targets="experts")
    assert resolve_targets(tiny_gpt_oss()[0], ["o_proj", "attention"])[0].endswith(
        "layers.0.self_attn.o_proj"
    )


def test_offloaded_embedding(released):
    model = load(released, load_in_4bit=True, offload_embedding=True, lora_r=2)
    assert "on the host" in repr(model.get_input_embeddings()) and same(
        logits(model), logits(load(released, load_in_4bit=True))
    )
    assert {row["part"] for row in parts(model)} == {
        "experts",
        "attention",
        "embedding",
        "head",
        "norms, router",
        "adapters",
    }
    model = load(released, offload_embedding=True, dtype="float16")
    assert model.get_input_embeddings()(IDS).dtype == torch.float32


# ---- what it says and keeps


def test_what_it_prints(plain, capsys):
    model, tokenizer = load_model(plain, max_seq_length=64, load_in_4bit=True, lora_r=4)
    said = capsys.readouterr().out
    rows = {row["part"]: row for row in parts(model)}
    assert rows["experts"]["bytes"] == sum(
        p.blocks.nbytes + p.scales.nbytes for p in model.parameters() if isinstance(p, PackedWeight)
    ) + sum(p.nbytes for n, p in model.named_parameters() if "proj_bias" in n)
    assert sum(row["parameters"] for row in rows.values()) == sum(
        p.numel() for p in model.parameters()
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (
        "MXFP4" in rows["experts"]["stored as"]
        and f"{trained:,} parameters train" in said
        and "mlp.experts.gate_up_proj (2)" in said
        and "attention: sink, experts: routed_lean" in said
    )
    assert (
        tokenizer.model_max_length == model.max_seq_length == 64
        and str(plain) == model.name_or_path
    )
    load_model(plain, max_seq_length=64, quiet=True)
    assert capsys.readouterr().out == ""


def test_tokenizers(released, plain):
    given = tiny_tokenizer()
    assert load_model(released, max_seq_length=8, quiet=True)[1] is None
    assert load_model(released, max_seq_length=8, quiet=True, tokenizer=given)[1] is given
    assert (
        load_model(plain, max_seq_length=8, quiet=True)[1]("1+1").input_ids
        == given("1+1").input_ids
    )


def test_longer_than_the_model_knows(plain, tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            "max_seq_length is 5,000, and the model's longest sequence is 4,096 "
            ".*stretch its positions in config.json"
        ),
    ):
        load(plain, max_seq_length=5000)
    load(plain, max_seq_length=4096)
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((plain / "config.json").read_text())
    settings["rope_parameters"] = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    load(tmp_path, max_seq_length=8192)  # the config's rope scaling permits it
    with pytest.raises(ValueError, match="longest sequence is 8,192"):
        load(tmp_path, max_seq_length=8193)
    with pytest.warns(
        UserWarning,
        match="max_seq_length is 5,000, and the model's longest sequence is 256: beyond it a "
        "run shows",
    ):
        load(
            GptOssConfig(**SMALL, max_position_embeddings=256), max_seq_length=5000
        )  # random weights have nothing to lose


# ---- errors


def broken(tmp_path, change, **settings):
    folder = write_released(tmp_path / "m", **settings)
    change(folder)
    return folder


def edit(folder, **changes):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def rewrite(folder, name, value):
    "Another tensor under a name; None: none."
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors or value is not None and file.name.startswith("model-00000"):
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
            save_file(tensors, file, metadata={"format": "pt"})
            places = json.loads((folder / "model.safetensors.index.json").read_text())
            if value is None:
                places["weight_map"].pop(name)
            else:
                places["weight_map"][name] = file.name
            (folder / "model.safetensors.index.json").write_text(json.dumps(places))
            return


BLOCKS, SCALES = (
    "model.layers.1.mlp.experts.down_proj_blocks",
    "model.layers.1.mlp.experts.down_proj_scales",
)
FAULTS = {
    "a shard is missing": (
        lambda f: (f / "model-00001-of-00003.safetensors").unlink(),
        "names 3 files, and 1 of them are not in .*model-00001-of-00003",
    ),
    "a shard is cut off": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(
            (f / "model-00001-of-00003.safetensors").read_bytes()[:-1]
        ),
        "is cut off: it has .* end at byte",
    ),
    "cut off in its header": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(
            (f / "model-00001-of-00003.safetensors").read_bytes()[:50]
        ),
        "no safetensors header",
    ),
    "a shard is empty": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(b""),
        "no safetensors header",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "pointer of Git LFS",
    ),
    "a damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "the tokenizer in .* cannot be read",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config cut off": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt'),
        "is no JSON",
    ),
    "no weights": (
        lambda f: [p.unlink() for p in f.glob("model*")],
        "has neither model.safetensors nor .* it has config.json",
    ),
    "unknown architecture": (
        lambda f: edit(f, model_type="gpt_oss_9"),
        "'gpt_oss_9', which transformers .* does not know",
    ),
    "no causal model": (
        lambda f: edit(f, model_type="clip_vision_model"),
        "'clip_vision_model' is no language model",
    ),
    "another quantisation": (
        lambda f: edit(f, quantization_config={"quant_method": "bitsandbytes"}),
        "quantised by 'bitsandbytes'",
    ),
    "a tensor is missing": (
        lambda f: rewrite(f, "model.layers.1.self_attn.sinks", None),
        r"1 are missing \(model.layers.1.self_attn.sinks\)",
    ),
    "blocks without scales": (
        lambda f: rewrite(f, SCALES, None),
        (
            r"1 are missing \(model.layers.1.mlp.experts.down_proj\) "
            r"and 1 belong to nothing in it \(model.layers.1.mlp.experts.down_proj_blocks\)"
        ),
    ),
    "a tensor too many": (
        lambda f: rewrite(f, "model.extra", torch.zeros(3)),
        r"1 belong to nothing in it \(model.extra\)",
    ),
    "another shape": (
        lambda f: edit(f, vocab_size=128),
        r"shape \(64, 64\) in .*, but config.json asks for \(128, 64\)",
    ),
    "another expert shape": (
        lambda f: rewrite(f, BLOCKS, torch.zeros(4, 64, 2, 16, dtype=torch.uint8)),
        r"down_proj_blocks has shape \(4, 64, 2, 16\) .* \(4, 64, 1, 16\)",
    ),
    "another dtype": (
        lambda f: rewrite(f, "lm_head.weight", torch.zeros(64, 64, dtype=torch.int8)),
        "stored as I8",
    ),
    "damaged scales": (
        lambda f: rewrite(f, SCALES, torch.full((4, 64, 1), 255, dtype=torch.uint8)),
        "scales of 255",
    ),
    "a tensor that the index invents": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            (f / "model.safetensors.index.json")
            .read_text()
            .replace('"lm_head.weight"', '"lm_head.wait"')
        ),
        "different checkpoints",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints(fault, tmp_path):
    change, sentence = FAULTS[fault]
    with pytest.raises(ValueError, match=sentence) as caught:
        load(broken(tmp_path, change), load_in_4bit=True)
    assert len(str(caught.value)) < 500


def test_what_is_no_model(tmp_path, plain):
    (tmp_path / "file").write_text("")
    for source, sentence in (
        (tmp_path / "nowhere", "there is no folder"),
        ("./nowhere", "there is no folder"),
        (tmp_path / "file", "is a file"),
        ("someone/some-model", "is no folder in .*, and the hub gave no model"),
        (3, "given as a int"),
        ({"hidden_size": 3}, "model_type is None"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load(source)
    load(plain, lora_r=2).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds an adapter and no model"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(max_seq_length=0), "max_seq_length is 0"),
        (dict(dtype="int8"), "dtype is 'int8'"),
        (dict(lora_r=-1), "lora_r is -1"),
        (dict(device="cuda"), "no GPU"),
        (dict(attn_implementation="sdpa"), "cannot train this model, whose attention has sinks"),
    ],
)
def test_arguments(released, settings, sentence):
    if "device" in settings and torch.cuda.is_available():
        settings, sentence = dict(dtype=3), "dtype is 3"
    with pytest.raises(ValueError, match=sentence):
        load(released, **settings)
    with pytest.raises(TypeError):
        load_model(released, max_seq_length=8, load_in_4_bit=True)


def test_indivisible_sizes():
    with pytest.raises(ValueError, match="blocks of 32"):
        load(dict(model_type="gpt_oss", **SMALL | dict(intermediate_size=48)), load_in_4bit=True)


def test_not_enough_memory(released, monkeypatch):
    huge = dict(model_type="gpt_oss", num_hidden_layers=36, num_local_experts=4096)
    with pytest.raises(
        ValueError,
        match=(
            r"needs [\d,.]+ GiB on cpu, where [\d.]+ GiB are free: "
            r"load_in_4bit=True needs [\d,.]+ GiB, or close other programs. Nothing was loaded"
        ),
    ):
        load(huge)
    with pytest.raises(ValueError, match="are free: close other programs"):
        load(huge, load_in_4bit=True)
    assert free_memory(torch.device("cpu")) > 0


def living():
    "Bytes of all tensors that Python knows."
    gc.collect()
    return sum(
        t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor) and type(t) is not PackedWeight and not t.is_meta
    )


def test_nothing_is_left_of_a_failed_attempt(tmp_path):
    folder = broken(
        tmp_path,
        lambda f: rewrite(
            f,
            "model.layers.1.mlp.experts.gate_up_proj_scales",
            torch.full((4, 1024, 16), 255, dtype=torch.uint8),
        ),
        hidden_size=512,
        intermediate_size=512,
    )
    load(write_released(tmp_path / "warm"), load_in_4bit=True)  # imports and registries
    before = living()
    with pytest.raises(ValueError, match="scales of 255") as caught:
        load(folder, load_in_4bit=True)
    assert (
        living() - before < 100_000 and caught.value.__traceback__ is not None
    )  # the error is still held


def test_headers(plain, tmp_path):
    stored, tensors = read_checkpoint(plain), load_file(plain / "model.safetensors")
    raw = (plain / "model.safetensors").read_bytes()
    assert {name: s.shape for name, s in stored.items()} == {
        name: tuple(t.shape) for name, t in tensors.items()
    }
    for name, s in stored.items():
        assert (
            raw[s.begin : s.begin + s.nbytes] == tensors[name].view(torch.uint8).numpy().tobytes()
        )
    (tmp_path / "long.safetensors").write_bytes(raw + b"0")
    with pytest.raises(ValueError, match="longer than its header says"):
        read_header(tmp_path / "long.safetensors")


# ---- host memory

CHILD = (
    r"""
import ctypes, gc, sys, threading
from pathlib import Path
import torch
from safetensors.torch import load_file
from grpo_nb.model.loading import load_model, read_checkpoint, skeleton, read_config
from grpo_nb.model.packed import PackedWeight
"""
    "def anonymous(): return next(int(line.split()[1]) * 1024 for line in "
    'open("/proc/self/status") if line.startswith("RssAnon"))'
    r"""
def peak(work):
    gc.collect(); ctypes.CDLL(None).malloc_trim(0)
    before, seen, done = anonymous(), [0], threading.Event()
    def look():
        while not done.wait(0.002): seen[0] = max(seen[0], anonymous())
    thread = threading.Thread(target=look); thread.start()
    try: model = work()
    finally: done.set(); thread.join()
    return max(seen[0], anonymous()) - before
folder = Path(sys.argv[1])
def naive():
"""
    '    state = {name: t.clone() for file in folder.glob("*.safetensors") for name, '
    "t in load_file(file).items()}"
    r"""
    model = skeleton(read_config(folder)[0], torch.bfloat16)
    for name, p in model.named_parameters():
"""
    '        value = PackedWeight(state[name + "_blocks"].clone(), '
    'state[name + "_scales"].clone()) if name + "_blocks" in state else state[name].clone()'
    r"""
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._parameters[last] = torch.nn.Parameter(value, requires_grad=False)
    return model
"""
    'load_model(dict(model_type="gpt_oss", vocab_size=64, hidden_size=64, '
    "intermediate_size=32, num_hidden_layers=1, num_local_experts=2, "
    "num_experts_per_tok=1), max_seq_length=8, quiet=True)\n"
    "print(peak(lambda: load_model(folder, max_seq_length=64, load_in_4bit=True, "
    'dtype="bfloat16", quiet=True)), peak(naive))\n'
)


def test_host_memory(tmp_path):
    """400 MB in shards: ours stays within the model's own bytes and a few more, a loader that reads
    first and builds then does not."""
    config, folder = (
        GptOssConfig(
            **SMALL
            | dict(
                hidden_size=1024, intermediate_size=1024, num_hidden_layers=6, num_local_experts=40
            )
        ),
        tmp_path / "m",
    )
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    places, noise = {}, torch.randint(256, (40, 2048, 32, 16), dtype=torch.uint8)
    for shard, prefix in enumerate([*(f"model.layers.{i}." for i in range(6)), ""]):
        tensors = {}
        for name, p in model.named_parameters():
            if not name.startswith(prefix) or name in places or f"{name}_blocks" in places:
                continue
            if name.endswith(EXPERTS):
                tensors |= {
                    f"{name}_blocks": noise[:, : p.shape[2]].contiguous(),
                    f"{name}_scales": torch.full((40, p.shape[2], 32), 120, dtype=torch.uint8),
                }
            else:
                tensors[name] = torch.ones(p.shape, dtype=torch.bfloat16)
        places |= dict.fromkeys(tensors, f"{shard}.safetensors")
        save_file(tensors, folder / f"{shard}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, folder],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.returncode == 0, child.stderr
    ours, naive = (int(number) for number in child.stdout.split())
    print(
        f"\n{size / 1e6:.0f} MB on the disk: anonymous memory {ours / 1e6:.0f} MB, read "
        f"first and build then {naive / 1e6:.0f} MB"
    )
    assert size > 350e6 and ours < size + 60e6 < 1.5 * size < naive
