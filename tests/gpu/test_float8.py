"""Weights in float8 on a GPU: a CPU's bytes, kernels beside the modules, gradients and memory.
(pytest -m gpu tests/gpu/test_float8.py)"""

import copy

import pytest
import torch
from dense_models import float8_weights
from small_decoders import by_modules
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_nb import RolloutEngine, SamplingParams, load_model
from grpo_nb.model.float8 import as_float8
from grpo_nb.model.tiny import tiny_gpt_oss

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = dict(
    **dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.1),
)
PARAMS = SamplingParams(max_tokens=20, stop_token_ids=(7,), seed=0)
PROMPTS = [[5, 6, 7, 3], [8, 9], [11] * 30]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("float8")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(root / "dense")
    mixture = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128
    )
    Qwen3MoeForCausalLM(mixture).save_pretrained(root / "mixture")
    tiny_gpt_oss()[0].save_pretrained(root / "gpt_oss")
    return root


def load(folder, device=DEVICE, **given):
    return load_model(str(folder), max_seq_length=128, device=device, quiet=True, **given)[0]


def dense_twin(model):
    twin = copy.deepcopy(model)
    for name, p in float8_weights(twin).items():
        path, _, last = name.rpartition(".")
        whole = torch.nn.Parameter(p.dequantize().contiguous(), requires_grad=False)
        twin.get_submodule(path)._parameters[last] = whole
    return twin


@pytest.mark.parametrize("name", ["dense", "mixture", "gpt_oss"])
@pytest.mark.parametrize("kind", ["row", "block"])
def test_bytes_are_those_of_a_cpu(folders, name, kind):
    here = float8_weights(load(folders / name, load_in_fp8=kind, dtype="bfloat16"))
    there = float8_weights(load(folders / name, "cpu", load_in_fp8=kind, dtype="bfloat16"))
    assert here.keys() == there.keys() and here
    for key, p in here.items():
        q = there[key]
        assert torch.equal(p.blocks.view(torch.uint8).cpu(), q.blocks.view(torch.uint8)), key
        assert torch.equal(p.scales.cpu(), q.scales)
        assert torch.equal(p.dequantize().cpu(), q.dequantize())


@pytest.mark.parametrize("kind", ["row", "block"])
def test_a_dense_model_is_decoded_by_kernels(folders, kind):
    model = load(folders / "dense", load_in_fp8=kind, dtype="float32", lora_r=4)
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way
    rollout = engine.generate(PROMPTS, PARAMS)
    assert torch.allclose(by_modules(model, rollout), rollout.logps * rollout.mask, atol=1e-3)


@pytest.mark.parametrize("name", ["mixture", "gpt_oss"])
def test_mixtures_are_decoded_without_kernels_for_their_experts(folders, name):
    model = load(folders / name, load_in_fp8=True, dtype="float32", lora_r=4)
    engine = RolloutEngine(model, None)
    prompts = [[i % 16 for i in prompt] for prompt in PROMPTS]
    rollout = engine.generate(prompts, PARAMS)
    assert torch.allclose(by_modules(model, rollout), rollout.logps * rollout.mask, atol=1e-3)


@pytest.mark.parametrize("name", ["dense", "mixture", "gpt_oss"])
def test_gradients_are_those_of_the_dequantised_model(folders, name):
    model = load(folders / name, load_in_fp8="block", dtype="bfloat16", lora_r=4)
    for key, p in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.05)
    ids = torch.randint(3, 16, (2, 24), device=DEVICE)
    twin = dense_twin(model)
    for one in (model, twin):
        with torch.autocast(DEVICE, torch.bfloat16):
            one(ids).logits.float().logsumexp(-1).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        if p.requires_grad:
            assert (p.grad - q.grad).norm() <= 0.02 * q.grad.norm() + 1e-6


def test_no_dense_copy_is_kept():
    "Behind a forward pass, what is held is the input and codes that were there before."
    weight = as_float8(torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16), "block")
    x = torch.randn(16, 4096, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = torch.nn.functional.linear(x, weight)
    assert torch.cuda.memory_allocated() - before < 2**20
    y.sum().backward()
