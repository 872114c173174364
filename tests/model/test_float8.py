"""Weights of eight bits: bytes against transformers' fine-grained FP8, values and gradients against
the dequantised weights, checkpoints, both ways of decoding, products in float8, what is refused."""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_models import float8_weights
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import (
    Fp8Dequantize,
    Fp8Quantize,
    _dequantize_fp8_weight,
)

from grpo_nb import GRPOConfig, GRPOTrainer, SamplingParams, load_model
from grpo_nb.model import float8
from grpo_nb.model.export import save_adapter, save_merged
from grpo_nb.model.float8 import (
    BLOCK,
    Float8Weight,
    as_float8,
    dequantize,
    quantize,
)
from grpo_nb.model.loading import Layout, memory_by_part
from grpo_nb.model.memory_bytes import MODELS, read_shape, weight_bits, weight_bytes
from grpo_nb.model.stored_weights import skeleton
from grpo_nb.model.tiny import tiny_gpt_oss, tiny_tokenizer
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.read_layers import read_projection

SIZES = dict(
    **dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2),
    **dict(num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=256),
)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


def bits(t):
    return t.view(torch.uint8)


def theirs(block):
    "transformers' own rounding and unrounding."
    settings = FineGrainedFP8Config(weight_block_size=block)
    told = SimpleNamespace(quantization_config=settings)
    return Fp8Quantize(told), Fp8Dequantize(told)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "Checkpoints as transformers saves them, in 32 bits and with its own rounding to float8."
    root = tmp_path_factory.mktemp("float8")
    torch.manual_seed(0)
    made = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.1)),
        "mixture": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE, initializer_range=0.1)),
    }
    for name, model in made.items():
        model.save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
        rounded, (round_it, _) = {}, theirs(BLOCK)
        for key, weight in load_file(root / name / "model.safetensors").items():
            plain = "layers" not in key or "norm" in key or "mlp.gate." in key
            rounded |= {key: weight} if plain else round_it.convert({key: weight})
        (root / f"{name} fp8").mkdir()
        save_file(rounded, root / f"{name} fp8/model.safetensors", {"format": "pt"})
        settings = json.loads((root / name / "config.json").read_text())
        settings["quantization_config"] = FineGrainedFP8Config().to_dict()
        settings["quantization_config"]["quant_method"] = "fp8"
        (root / f"{name} fp8/config.json").write_text(json.dumps(settings))
    return root


def load(folder, **given):
    return load_model(str(folder), max_seq_length=64, quiet=True, **given)[0]


def dense_twin(model):
    "The same numbers, dense."
    twin = copy.deepcopy(model)
    for name, p in float8_weights(twin).items():
        path, _, last = name.rpartition(".")
        whole = torch.nn.Parameter(p.dequantize().contiguous(), requires_grad=False)
        twin.get_submodule(path)._parameters[last] = whole
    return twin


# ---- bytes


@pytest.mark.parametrize("block", [BLOCK, (1, 256), (384, 256), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_transformers(block, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(384, 256) * torch.rand(384, 1) * 3).to(dtype)
    weight[:128, :128] = 0
    round_it, unround_it = theirs(block)
    made = round_it.convert({"x.weight": weight})
    codes, scales = quantize(weight, block)
    assert torch.equal(bits(codes), bits(made["x.weight"]))
    assert torch.equal(scales, made["x.weight_scale_inv"])
    for to in (torch.float32, torch.bfloat16, torch.float16):
        one = unround_it._dequantize_one(codes, scales, output_dtype=to)
        assert torch.equal(dequantize(codes, scales, to, block), one)


def test_experts_are_rounded_one_by_one():
    weight = torch.randn(3, 256, 128)
    codes, scales = quantize(weight)
    made = theirs(BLOCK)[0].convert({"gate_up_proj": weight})
    assert torch.equal(bits(codes), bits(made["gate_up_proj"]))
    assert torch.equal(scales, made["gate_up_proj_scale_inv"])


@pytest.mark.parametrize("shape", [(200, 320), (128, 130), (1, 1), (300, 64)])
def test_blocks_at_the_edges(shape):
    "Blocks that a matrix cuts: as transformers unpacks them, and as a padded matrix is rounded."
    weight = torch.randn(shape)
    codes, scales = quantize(weight)
    padded = torch.zeros(384, 384)
    padded[: shape[0], : shape[1]] = weight
    whole = theirs(BLOCK)[0].convert({"x.weight": padded})
    assert torch.equal(bits(codes), bits(whole["x.weight"][: shape[0], : shape[1]]))
    assert torch.equal(
        dequantize(codes, scales, torch.float32),
        _dequantize_fp8_weight(codes, scales, list(BLOCK), torch.float32),
    )


def test_in_parts(monkeypatch):
    "Rounded and unpacked a few rows at a time, all is as in one go."
    weight = torch.randn(2, 300, 200)
    whole = [quantize(weight), quantize(weight, (1, 200))]
    parts = float8._parts
    monkeypatch.setattr(float8, "_parts", lambda *given: _one_block(parts, *given))
    for block, (codes, scales) in zip((BLOCK, (1, 200)), whole):
        again = quantize(weight, block)
        assert torch.equal(bits(again[0]), bits(codes)) and torch.equal(again[1], scales)
        assert torch.equal(
            dequantize(codes, scales, torch.float32, block),
            torch.stack([dequantize(c, s, torch.float32, block) for c, s in zip(codes, scales)]),
        )


def _one_block(parts, codes, scales, rows, *others):
    "What `_parts` yields where little memory is at hand."
    for of_blocks, *some in parts(codes, scales, rows, *others):
        for i in range(len(of_blocks)):
            yield of_blocks[i : i + 1], *(x[i * rows : (i + 1) * rows] for x in some)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(number):
    weight = torch.ones(4, 4)
    weight[1, 2] = number
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantize(weight)
    assert dequantize(*quantize(torch.full((2, 2), 1e-44))).isfinite().all()


# ---- checkpoints


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_float8_is_read_bit_for_bit(folders, name, dtype):
    model = load(folders / f"{name} fp8", dtype=dtype)
    stored = load_file(folders / f"{name} fp8/model.safetensors")
    found = float8_weights(model)
    for path, p in found.items():
        if path in stored:
            assert torch.equal(bits(p.blocks), bits(stored[path])), path
            assert torch.equal(p.scales, stored[f"{path}_scale_inv"])
    experts = [path for path in found if "experts" in path]
    assert len(found) == (14 if name == "dense" else 12) and bool(experts) == (name == "mixture")
    for path in experts:
        place, _, last = path.rpartition(".")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for e in range(4):
            parts = [f"{place}.{e}.{one}.weight" for one in names]
            whole = torch.cat([bits(stored[part]) for part in parts])
            assert torch.equal(bits(found[path].blocks[e]), whole)
            scales = torch.cat([stored[f"{part}_scale_inv"] for part in parts])
            assert torch.equal(found[path].scales[e], scales)
    reference = AutoModelForCausalLM.from_pretrained(folders / f"{name} fp8", dtype=dtype)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, reference(IDS).logits)
    plain = load(folders / f"{name} fp8", dtype=dtype, load_in_fp8=False)
    assert not float8_weights(plain)
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, reference(IDS).logits)


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_rounding_at_load_gives_what_transformers_saves(folders, name):
    "A dense checkpoint rounded by blocks at load has the bytes of the one rounded beforehand."
    rounded = load(folders / name, load_in_fp8="block")
    read = float8_weights(load(folders / f"{name} fp8"))
    found = float8_weights(rounded)
    assert found.keys() == read.keys()
    for path, p in found.items():
        assert torch.equal(bits(p.blocks), bits(read[path].blocks)), path
        assert torch.equal(p.scales, read[path].scales)
        assert not p.requires_grad


def test_one_scale_for_a_whole_matrix(folders, tmp_path):
    "weight_block_size null: transformers' form of one scale a matrix."
    settings = json.loads((folders / "dense fp8/config.json").read_text())
    settings["quantization_config"]["weight_block_size"] = None
    (tmp_path / "config.json").write_text(json.dumps(settings))
    stored = load_file(folders / "dense fp8/model.safetensors")
    for key in [key for key in stored if key.endswith("_scale_inv")]:
        stored[key] = torch.tensor(0.02)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = load(tmp_path)
    p = model.model.layers[0].self_attn.q_proj.weight
    assert p.block == (128, 128) and torch.equal(p.scales, torch.tensor([[0.02]]))
    assert torch.equal(p.dequantize(), p.blocks.float() * torch.tensor(0.02))


@pytest.mark.parametrize("family, count", [("bloom", 8), ("gemma3n_text", 24), ("llama4_text", 32)])
def test_families(family, count, tmp_path):
    "Layers of other names, matrices too small to be stored so, and experts that lie turned."
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    import tiny_families

    tiny_families.write_released(family, tiny_tokenizer(), tmp_path)
    model = load(tmp_path, load_in_fp8=True)
    found = float8_weights(model)
    assert len(found) == count and min(min(p.shape[-2:]) for p in found.values()) >= 16
    with torch.no_grad():
        assert torch.allclose(model(IDS % 16).logits, dense_twin(model)(IDS % 16).logits, atol=1e-6)
    with pytest.raises(ValueError, match="a gpt2 has no linear layers"):
        load_model(GPT2Config(n_layer=1, n_embd=32, n_head=2), max_seq_length=8, load_in_fp8=True)


@pytest.mark.parametrize("kind", ["row", "block"])
def test_bytes_are_counted_before_anything_is_read(folders, kind):
    for name in ("dense", "mixture"):
        model = load(folders / name, load_in_fp8=kind)
        config = model.config
        cpu = torch.device("cpu")
        layout = Layout(
            *(skeleton(config, torch.float32), config, folders / name, torch.float32, cpu),
            load_in_fp8=kind,
        )
        rows = memory_by_part(model)
        assert layout.nbytes() == {cpu: sum(row["bytes"] for row in rows)}
        assert "float8" in {row["stored as"] for row in rows}


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_the_planner_counts_these_bytes(folders, name):
    "Each row's scale at most: never less than there is, and not 3 % more, with rows this short."
    model = load(folders / name, load_in_fp8=True)
    held = {row["part"]: row["bytes"] for row in memory_by_part(model)}
    planned = weight_bytes(read_shape(model.config.to_dict()), "fp8")
    for kind, part in (
        ("attention", "attention"),
        ("mlp", "MLP" if name == "dense" else "experts"),
    ):
        assert held[part] <= planned[kind] <= 1.03 * held[part]
    assert weight_bits(MODELS["Qwen3-8B"], "fp8")["mlp"] == pytest.approx(8, rel=1e-2)
    assert weight_bits(MODELS["Qwen3-8B"], "fp8")["head"] == 16


# ---- training


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_gradients_are_those_through_the_dequantised_weight(folders, name, kind):
    model = load(folders / name, load_in_fp8=kind, lora_r=4, lora_targets="attention")
    for key, p in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.05)
    twin, saved = dense_twin(model), []

    def note(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        logits = model(IDS).logits
    expected = twin(IDS).logits
    assert torch.equal(logits, expected)
    for x in (logits, expected):
        x.logsumexp(-1).sum().backward()
    trained = [(p, q) for p, q in zip(model.parameters(), twin.parameters()) if p.requires_grad]
    assert len(trained) == 16
    assert all(torch.equal(p.grad, q.grad) for p, q in trained)
    held = {p.blocks.data_ptr() for p in float8_weights(model).values()}
    frozen = [t for t in saved if isinstance(t, Float8Weight)]
    assert frozen and {t.blocks.data_ptr() for t in frozen} <= held  # codes, and no copy of them
    sizes = {tuple(sorted(p.shape[-2:])) for p in float8_weights(model).values()}
    inside = [t for t in saved if type(t) is torch.Tensor and t.dim() == 2 and not t.requires_grad]
    assert name == "mixture" or not sizes & {tuple(sorted(t.shape)) for t in inside}


def test_experts_of_a_gpt_oss(tmp_path):
    "Experts and attention in float8: values and gradients of the dequantised model."
    model, _ = tiny_gpt_oss()
    model.save_pretrained(tmp_path)
    for kind in ("row", "block"):
        made = load(tmp_path, load_in_fp8=kind, lora_r=2)
        for key, p in made.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(p, std=0.05)
        twin, ids = dense_twin(made), IDS % 16
        logits, expected = made(ids).logits, twin(ids).logits
        assert torch.allclose(logits, expected, atol=1e-5)
        for x in (logits, expected):
            x.logsumexp(-1).sum().backward()
        for p, q in zip(made.parameters(), twin.parameters()):
            if p.requires_grad:
                assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        kinds = {type(p) for key, p in made.named_parameters() if ".experts." in key}
        assert Float8Weight in kinds


@pytest.mark.parametrize("name", ["dense", "mixture", "gpt_oss"])
def test_completions_are_drawn_from_what_is_trained(folders, name, tmp_path):
    tokenizer, folder = tiny_tokenizer(), folders / name
    if name == "gpt_oss":
        tiny_gpt_oss()[0].save_pretrained(folder := tmp_path)
    model = load(folder, load_in_fp8=True, lora_r=4, lora_targets="attention")
    engine = RolloutEngine(model, tokenizer)
    params = SamplingParams(max_tokens=6, n=2, seed=1, stop_token_ids=())
    rollout = engine.generate([[5, 6, 7, 3], [8, 9]], params)
    for i, prompt in enumerate(rollout.prompt_ids):
        ids = torch.tensor([prompt + rollout.completion_ids[i].tolist()])
        with torch.no_grad():
            own = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[-6:, 0]
        assert torch.allclose(own, rollout.logps[i], atol=1e-5)
    assert engine.way.startswith("through" if name == "mixture" else "directly")


def test_a_run_trains_the_adapter_and_leaves_the_bytes(folders, tmp_path):
    model, tokenizer = load_model(
        str(folders / "dense"), max_seq_length=64, load_in_fp8=True, lora_r=4, quiet=True
    )
    before = {k: bits(p.blocks).clone() for k, p in float8_weights(model).items()}
    config = GRPOConfig(
        **dict(output_dir=str(tmp_path), max_steps=2, num_generations=4, learning_rate=1e-3),
        **dict(per_device_train_batch_size=4, max_completion_length=4, report_to="none"),
        **dict(bf16=False, use_cpu=True, logging_steps=1, save_strategy="no"),
    )
    rows = [{"prompt": "1+1="}, {"prompt": "2+1="}]
    reward = lambda completions, **_: [float(len(set(c))) for c in completions]  # noqa: E731
    trainer = GRPOTrainer(model, reward, config, rows, processing_class=tokenizer)
    trainer.train()
    after = float8_weights(trainer.model)
    assert all(torch.equal(bits(p.blocks), before[k]) for k, p in after.items()) and before
    ups = [p for k, p in trainer.model.named_parameters() if "lora_B" in k]
    assert any(p.abs().sum() > 0 for p in ups)


# ---- saving


@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_a_merge_is_the_dequantised_weight_with_its_adapter(folders, name, tmp_path):
    model = load(folders / name, load_in_fp8=True, lora_r=4, lora_targets="attention")
    for key, p in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.05)
    save_merged(model, tmp_path / "ours", quiet=True)
    dense_twin(model).merge_and_unload().bfloat16().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / one / "model.safetensors") for one in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    save_adapter(model, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folders / name)
    again = load(tmp_path / "adapter", load_in_fp8=True)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


# ---- one tensor


def test_still_packed():
    w = as_float8(torch.randn(4, 256, 128), "block")
    for pick in (lambda w: w[2], lambda w: w[1:3], lambda w: w.mT, lambda w: w.bfloat16()):
        assert type(pick(w)) is Float8Weight
        assert torch.equal(pick(w).dequantize(), pick(w.dequantize()))
    assert torch.equal(torch.stack([w[0], w[1]]).dequantize(), w[:2].dequantize())
    rows = torch.cat([w, w], 1)
    assert type(rows) is Float8Weight
    assert torch.equal(rows.dequantize(), torch.cat([w.dequantize()] * 2, 1))
    sides = torch.cat([w.mT, w.mT], 2)  # of matrices that lie as (in, out)
    assert type(sides) is Float8Weight
    assert torch.equal(sides.dequantize(), torch.cat([w.dequantize().mT] * 2, 2))
    linear = torch.nn.Linear(128, 256)
    linear.weight = torch.nn.Parameter(w[0], requires_grad=False)
    assert read_projection(linear).module is linear  # no kernel reads the codes
    cut = as_float8(torch.randn(100, 128), "block")
    assert type(torch.cat([cut, cut])) is torch.Tensor  # a block would be cut
    with pytest.raises(RuntimeError, match="stored in 8 bits and frozen"):
        w += 1
    assert "Float8Weight((4, 256, 128)" in repr(w)


def test_products_of_rounded_inputs_are_those_of_torch(monkeypatch):
    "What eight_bits.py has as `products too`."
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from eight_bits import round_inputs

    w, x = as_float8(torch.randn(48, 64), "row"), torch.randn(2, 5, 64, requires_grad=True)
    linear = torch.nn.Linear(64, 48, bias=False)
    linear.weight = torch.nn.Parameter(w, requires_grad=False)
    linear.register_forward_pre_hook(round_inputs)
    codes, scales = float8.quantize(x.detach()[1], (1, 64))
    scales = dict(scale_a=scales, scale_b=w.scales.T.contiguous())
    theirs = torch._scaled_mm(codes, w.blocks.T, **scales, out_dtype=torch.float32)
    assert torch.allclose(linear(x)[1], theirs, atol=1e-5)
    linear(x).sum().backward()  # the backward pass unpacks the weight
    assert torch.allclose(x.grad, w.dequantize().sum(0).expand_as(x), atol=1e-5)


# ---- what is refused


def test_refusals(folders, tmp_path):
    with pytest.raises(ValueError, match="load_in_fp8 is 'tensor': give 'row'"):
        load(folders / "dense", load_in_fp8="tensor")
    with pytest.raises(ValueError, match="give one of load_in_4bit and load_in_fp8"):
        load(folders / "dense", load_in_fp8=True, load_in_4bit=True)
    with pytest.raises(ValueError, match="the checkpoint is in float8"):
        load(folders / "dense fp8", load_in_4bit=True)
    stored = load_file(folders / "dense fp8/model.safetensors")
    lost = [k for k in stored if k.endswith("_scale_inv")][0]
    stored.pop(lost)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders / "dense fp8/config.json").read_text())
    with pytest.raises(ValueError, match=f"1 of 14 weights in float8 have no scales.*{lost}"):
        load(tmp_path)
