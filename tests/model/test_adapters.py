"""Adapters: on exactly the layers that are named, counted before they are there, in float32."""

import pytest
import torch
from checkpoints import SMALL, load
from peft import LoraConfig, PeftModel, get_peft_model
from small_mixtures import FAMILIES, mixture
from transformers import GptOssConfig, LlamaConfig

from grpo_nb.model.adapters import (
    adaptable,
    adapter_bytes,
    add_adapters,
    describe_adapters,
    resolve_targets,
    short_name,
)
from grpo_nb.model.export import save_adapter
from grpo_nb.model.stored_weights import skeleton
from grpo_nb.model.tiny import tiny_gpt_oss

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
LLAMA = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
TARGETS = [
    "all",
    "attention",
    "experts",
    ["o_proj", "mlp.experts.down_proj"],
    ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj"],
]


def test_kinds():
    kinds = adaptable(skeleton(GptOssConfig(**SMALL), torch.bfloat16))
    assert kinds["lm_head"] == "other"
    assert [name for name, kind in kinds.items() if "router" in name and kind != "other"] == []
    assert sorted(kinds.values()).count("experts") == 4  # two matrices in each of two layers
    kinds = adaptable(skeleton(LLAMA, torch.bfloat16))
    assert {short_name(name) for name, kind in kinds.items() if kind == "mlp"} == {
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }


@pytest.mark.parametrize("targets", TARGETS)
def test_bytes_and_places(targets):
    "As many bytes as predicted, on the targets and nowhere else."
    model = tiny_gpt_oss()[0].bfloat16()
    names = resolve_targets(model, targets)
    predicted = adapter_bytes(model, names, 3)
    model = add_adapters(model, 3, names)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert predicted == sum(p.nbytes for p in trained.values())
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert len(trained) == 2 * len(names)
    assert f"{predicted // 4:,} parameters train" in describe_adapters(model)


def test_the_seed_and_alpha():
    def first(seed, alpha=None):
        model = tiny_gpt_oss()[0]
        model = add_adapters(model, 2, resolve_targets(model, "q_proj"), alpha, seed)
        return model, next(p for p in model.parameters() if p.requires_grad)

    before = torch.get_rng_state()
    (model, a), (_, b), (other, c) = first(1), first(1), first(2, alpha=5)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.peft_config["default"].lora_alpha for m in (model, other)] == [4, 5]


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
        load(LLAMA, lora_r=2, lora_targets="experts")
    assert resolve_targets(tiny_gpt_oss()[0], ["o_proj", "attention"])[0].endswith(
        "layers.0.self_attn.o_proj"
    )


def conv_kernels(model):
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv1d)
    }


IDS = torch.arange(3, 27)[None]


@pytest.mark.filterwarnings("ignore:without an adapter")
@pytest.mark.parametrize("targets", ["all", "attention"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_and_reads_back(name, targets, tmp_path):
    "Every adapter gets a gradient, none is on a convolution, and PEFT reads the saved ones back."
    model = mixture(name)
    names = resolve_targets(model, targets)
    assert not conv_kernels(model) & {*adaptable(model)}
    assert {name.split(".")[2] for name in names} >= {"0", "1"}  # something in every layer
    model = add_adapters(model, 2, names)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    for _ in range(2):  # the first step moves the second factors off 0
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        dead = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
        optimizer.step()
    assert dead == []
    save_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        ours, base = model.eval()(IDS).logits, mixture(name)
        before = base(IDS).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits
    assert torch.equal(ours, theirs) and not torch.allclose(ours, before, atol=1e-4)


@pytest.mark.parametrize(
    "name, target, why",
    [
        ("NemotronH", "out_proj", "NemotronHMamba2Mixer reads its weight past the adapter"),
        ("Qwen3Next", "shared_expert.up_proj", "PEFT takes the name for the experts of a qwen3_n"),
        ("Llama4Text", "router", "Llama4Router is more than a product"),
    ],
)
def test_layers_that_cannot_have_an_adapter(name, target, why):
    model = mixture(name)
    with pytest.raises(ValueError, match=rf"{target}', which cannot have an adapter \(.*{why}"):
        resolve_targets(model, target)
    with pytest.warns(UserWarning, match=f"without an adapter: .*{target}.*{why}"):
        assert not any(found.endswith(target) for found in resolve_targets(model, "all"))


def test_what_peft_does_with_the_names_that_are_left_out():
    "PEFT itself refuses the one, and puts the other on the experts alone."
    with pytest.raises(ValueError, match="incompatible with Mamba-based models"):
        get_peft_model(mixture("NemotronH"), LoraConfig(target_modules=["out_proj"]))
    three = ["gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(mixture("Qwen3Next"), LoraConfig(target_modules=three))
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapted and all(".experts." in name for name in adapted)
