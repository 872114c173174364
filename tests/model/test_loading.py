"""Loading: equal to transformers' loader bit for bit, little host memory, every architecture,
adapters, errors that leave nothing behind."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import (
    SMALL,
    broken,
    load,
    rewrite,
    write_released,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from grpo_nb.model.adapters import adaptable
from grpo_nb.model.loading import Layout, free_memory, load_model, memory_by_part
from grpo_nb.model.packed import EXPERTS, PackedWeight, experts_of, pack_experts
from grpo_nb.model.stored_weights import skeleton
from grpo_nb.model.tiny import tiny_tokenizer

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
IDS = torch.randint(3, 20, (2, 12), generator=torch.Generator().manual_seed(0))


def same(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)  # several threads may sum in another order


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


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
    with pytest.raises(ValueError, match="is tied to the input embedding"):
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
    with pytest.raises(ValueError, match="was cut off"):
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


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_without_weights_are_those_of_transformers(tied):
    model = load(family("qwen3") | dict(tie_word_embeddings=tied), device="meta")
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(model.config)
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert all(p.is_meta for p in model.parameters())


def test_no_bitsandbytes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    load(family("qwen3")).save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="bitsandbytes"):
        load(tmp_path, load_in_4bit=True)
    with pytest.raises(ImportError, match="bitsandbytes"):
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


def test_offloaded_embedding(released):
    model = load(released, load_in_4bit=True, offload_embedding=True, lora_r=2)
    assert "on the host" in repr(model.get_input_embeddings()) and same(
        logits(model), logits(load(released, load_in_4bit=True))
    )
    assert {row["part"] for row in memory_by_part(model)} == {
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
    rows = {row["part"]: row for row in memory_by_part(model)}
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


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(max_seq_length=0), "max_seq_length is 0"),
        (dict(dtype="int8"), "dtype is 'int8'"),
        (dict(attn_implementation="sdpa"), "cannot train this model, whose attention has sinks"),
    ],
)
def test_arguments(released, settings, sentence):
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
            r"load_in_4bit=True needs [\d,.]+ GiB, or "
            r"load_in_fp8=True needs [\d,.]+ GiB, or close other programs. Nothing was loaded"
        ),
    ):
        load(huge)
    with pytest.raises(ValueError, match="are free: close other programs"):
        load(huge, load_in_4bit=True)
    assert free_memory(torch.device("cpu")) > 0


def test_a_layout_counts_what_is_loaded(released):
    "By device, before a weight is read; as many bytes as the loaded model has."
    config, cpu, gpu = GptOssConfig(**SMALL), torch.device("cpu"), torch.device("cuda", 0)
    model = skeleton(config, torch.bfloat16)
    layout = Layout(model, config, released, torch.bfloat16, cpu, load_in_4bit=True)
    loaded = load(released, load_in_4bit=True, dtype="bfloat16")
    assert layout.nbytes() == {cpu: sum(row["bytes"] for row in memory_by_part(loaded))}
    assert {step.name for step in layout.steps} == layout.forms.keys() == layout.devices.keys()
    apart = Layout(
        model, config, None, torch.bfloat16, gpu, load_in_4bit=True, offload_embedding=True
    )
    embedding = model.get_input_embeddings().weight.numel() * 2
    assert apart.nbytes() == {cpu: embedding, gpu: layout.nbytes()[cpu] - embedding}
    assert apart.steps == [] and all(p.is_meta for p in model.parameters())


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


# ---- host memory

CHILD = (
    r"""
import ctypes, gc, sys, threading
from pathlib import Path
import torch
from safetensors.torch import load_file
from grpo_nb.model.loading import load_model
from grpo_nb.model.stored_weights import read_config, skeleton
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


@pytest.mark.long
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
