"""Dense layers whose small steps are fused compute what transformers' layers compute, forward and
backward, with adapters and without. Kernels are interpreted without a GPU."""

import copy

import pytest
import torch
from dense_models import dense_model
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from grpo_nb.model import fused_layers, loading
from grpo_nb.model.fused_layers import FUSED, PARTS, SlicedMLP, fuse_dense_layers, slice_mlps
from grpo_nb.model.limits import FAMILIES
from grpo_nb.model.loading import load_model
from grpo_nb.rollout.decoder import open_decoder
from grpo_nb.rollout.read_layers import family_of
from grpo_nb.training.policy_model import checkpoint_layers

kernels = pytest.importorskip("grpo_nb.kernels.training_kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(3, 24), (2, 5, 128), (4, 300), (1, 5000)]


def error(a, b):
    "Relative, in the norm."
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.fixture
def by_kernels(monkeypatch):
    "The kernels take part on a CPU, too; how often each was launched."
    counts = dict.fromkeys(("norm", "norm_backward", "gate", "gate_backward", "rotate"), 0)

    class Counted:
        def __getattr__(self, name):
            def call(*given):
                counts[name] += 1
                return getattr(kernels, name)(*given)

            return call

    counted = Counted()
    monkeypatch.setattr(fused_layers, "kernels_for", lambda x: counted)
    monkeypatch.setattr(fused_layers, "_rotation_for", lambda x: counted.rotate)
    return counts


# The kernels


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_and_its_gradient(shape, dtype):
    torch.manual_seed(0)
    x, g = (torch.randn(shape).to(DEVICE, dtype) for _ in range(2))
    gamma, leaf = (torch.rand(shape[-1]) + 0.5).to(DEVICE, dtype), x.clone().requires_grad_()
    wide = leaf.float()
    theirs = gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + 1e-6)).to(dtype)
    theirs.backward(g)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert error(kernels.norm(x, gamma, 1e-6), theirs) < bound
    assert error(kernels.norm_backward(g, x, gamma, 1e-6), leaf.grad) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gate_and_its_gradients(dtype):
    torch.manual_seed(0)
    z, up, g = (3 * torch.randn(3, 700).to(DEVICE, dtype) for _ in range(3))
    z[0, :4] = torch.tensor([0.0, 60.0, -60.0, -1e4])
    leaves = [t.clone().requires_grad_() for t in (z, up)]
    theirs = F.silu(leaves[0]) * leaves[1]
    theirs.backward(g)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    assert error(kernels.gate(z, up), theirs) < bound
    for ours, leaf in zip(kernels.gate_backward(g, z, up), leaves):
        assert torch.isfinite(ours).all() and error(ours, leaf.grad) < bound


def test_nothing_is_nothing():
    x, gamma = torch.empty(0, 24, device=DEVICE), torch.ones(24, device=DEVICE)
    assert kernels.norm(x, gamma, 1e-6).shape == kernels.gate(x, x).shape == (0, 24)
    assert kernels.norm_backward(x, x, gamma, 1e-6).shape == (0, 24)


def test_angles_that_are_half_of_a_row():
    "transformers gives each angle twice; half of a row is read where it lies."
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    x, cos, sin = (t.to(DEVICE) for t in (x, cos, sin))
    halves = cos[..., :4], sin[..., :4]
    expected = fused_layers.rotate_reference(x, *halves)
    assert torch.allclose(kernels.rotate(x, *halves), expected, atol=1e-6)
    uneven = halves[0], halves[1].contiguous()
    assert torch.allclose(kernels.rotate(x, *uneven), expected, atol=1e-6)
    first = fused_layers.rotate_reference(x, *(t[:1] for t in halves))
    assert torch.allclose(kernels.rotate(x, *(t[:1] for t in halves)), first, atol=1e-6)


# The layers


def model_of(family, adapters=True, **settings):
    model = dense_model(family, torch.float32, **settings).requires_grad_(not adapters)
    if adapters:
        torch.manual_seed(1)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        model = get_peft_model(model, lora)
    return model.to(DEVICE).train()


def step_of(model, padded=False):
    "Logits and the gradients of what is trained."
    torch.manual_seed(2)
    ids = torch.randint(2, 40, (2, 11), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :3] = not padded
    logits = model(ids, attention_mask=mask).logits
    logits.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return logits.detach()[mask.bool()], grads


@pytest.mark.long
@pytest.mark.parametrize("family", [*FUSED, "Llama tied", "Qwen2 windows"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_fused_model_computes_the_same(family, attention, by_kernels):
    model = model_of(family)
    model.set_attn_implementation(attention)
    expected, gradients = step_of(model, padded=True)
    state = list(model.state_dict())
    assert fuse_dense_layers(model) >= 7 and fuse_dense_layers(model) == 0
    assert list(model.state_dict()) == state
    logits, found = step_of(model, padded=True)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert found.keys() == gradients.keys() and len(found) > 10
    for name, gradient in gradients.items():
        assert error(found[name], gradient) < 1e-4, name
    layers, own = len(model.base_model.model.model.layers), (4 if family == "Qwen3" else 2)
    assert by_kernels["norm"] == own * layers + 1 and by_kernels["gate"] == layers
    assert by_kernels["norm_backward"] == by_kernels["norm"] - 1  # layer 0 has no gradient below
    assert by_kernels["rotate"] == 4 * layers and by_kernels["gate_backward"] == layers


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_all_weights_trained_and_layers_computed_again(family, by_kernels):
    "A norm whose weight is trained goes its own way; the rest is fused."
    model = model_of(family, adapters=False)
    expected, gradients = step_of(model)
    fuse_dense_layers(model)
    checkpoint_layers(model, {"use_reentrant": False})
    logits, found = step_of(model)
    assert torch.allclose(logits, expected, atol=1e-5)
    assert all(error(found[name], g) < 1e-4 for name, g in gradients.items())
    assert not by_kernels["norm"] and by_kernels["gate"] > by_kernels["gate_backward"] > 0


@pytest.mark.parametrize("replaced", [False, True])
def test_another_activation_stays(by_kernels, replaced):
    model = model_of("Llama", hidden_act="silu" if replaced else "gelu")
    for layer in model.get_base_model().model.layers if replaced else ():
        layer.mlp.act_fn = torch.nn.Tanh()
    expected, _ = step_of(model)
    fuse_dense_layers(model)
    assert torch.allclose(step_of(model)[0], expected, atol=1e-5) and not by_kernels["gate"]


def test_generation_with_a_cache(by_kernels):
    model = model_of("Qwen2").eval()
    ids = torch.randint(2, 40, (2, 5), device=DEVICE)
    settings = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    expected = model.generate(ids, **settings)
    fuse_dense_layers(model)
    assert torch.equal(model.generate(ids, **settings), expected) and by_kernels["norm"]


def test_slices_stand_before_what_is_fused(by_kernels):
    model = model_of("Qwen2")
    expected, gradients = step_of(model)
    fuse_dense_layers(model)
    slice_mlps(model, 7)
    mlp = model.base_model.model.model.layers[0].mlp
    assert isinstance(mlp, SlicedMLP) and isinstance(mlp, PARTS["MLP"])
    logits, found = step_of(model)
    assert torch.allclose(logits, expected, atol=1e-5) and by_kernels["gate"] > 2
    assert all(error(found[name], g) < 1e-4 for name, g in gradients.items())
    slice_mlps(model, None)
    assert isinstance(mlp, PARTS["MLP"]) and not isinstance(mlp, SlicedMLP)


@pytest.mark.parametrize("family", FUSED)
def test_the_decoder_still_reads_it(family):
    model = model_of(family, adapters=False).requires_grad_(False)
    fuse_dense_layers(model)
    assert family_of(model) is FAMILIES[family]
    decoder, why = open_decoder(model)
    assert decoder is not None, why


def test_other_models_and_changed_modules_are_left_alone():
    assert fuse_dense_layers(model_of("Phi3", adapters=False)) == 0
    assert fuse_dense_layers(model_of("Gemma3Text", adapters=False)) == 0
    model = model_of("Llama", adapters=False)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x
    fuse_dense_layers(model)
    assert not isinstance(mlp, PARTS["MLP"]) and isinstance(model.model.layers[1].mlp, PARTS["MLP"])


def test_a_sliced_mlp_is_left_alone(by_kernels):
    model = model_of("Qwen2")
    expected, _ = step_of(model)
    slice_mlps(model, 7)
    fuse_dense_layers(model)
    mlp = model.base_model.model.model.layers[0].mlp
    assert isinstance(mlp, SlicedMLP) and not isinstance(mlp, PARTS["MLP"])
    assert torch.allclose(step_of(model)[0], expected, atol=1e-5) and by_kernels["norm"]


class Cache:
    "As transformers calls one: from 5.24 on it is told what else the layer was given."

    def __init__(self):
        self.told = []

    def update(self, key, value, layer, **more):
        self.told.append(more)
        return key, value


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_called_as_its_version_of_transformers_does(name):
    model, cache = model_of("Llama", adapters=False), Cache()
    fuse_dense_layers(model)
    x = torch.randn(1, 3, 64, device=DEVICE)
    angles = model.model.rotary_emb(x, torch.arange(3, device=DEVICE)[None])
    model.model.layers[0].self_attn(x, angles, **{name: cache}, is_causal=True)
    assert cache.told == [{"kwargs": {"is_causal": True}} if name == "cache" else {}]


@pytest.mark.parametrize("family", FUSED)
def test_only_who_has_a_window_is_told_of_one(family):
    model = model_of(family, adapters=False, **({"sliding_window": 5} if family == "Llama" else {}))
    fuse_dense_layers(model)
    told = model.model.layers[0].self_attn.window()
    assert set(told) == (set() if family == "Llama" else {"sliding_window"})


def test_a_fused_model_is_copied():
    model = model_of("Llama", adapters=False)
    fuse_dense_layers(model)
    twin = copy.deepcopy(model)
    assert isinstance(twin.model.layers[0].self_attn, PARTS["Attention"])
    assert torch.equal(step_of(twin)[0], step_of(model)[0])


def test_without_a_gpu_no_kernel_is_asked_for():
    assert DEVICE == "cuda" or fused_layers.kernels_for(torch.zeros(2)) is None


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_model_is_fused_where_it_is_loaded_on_a_gpu(monkeypatch, on_gpu):
    from transformers import Qwen3Config

    monkeypatch.setattr(loading, "_is_on_gpu", lambda model: on_gpu or DEVICE == "cuda")
    sizes = dict(vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0)
    model, _ = load_model(Qwen3Config(**sizes, **heads), max_seq_length=32, lora_r=4, quiet=True)
    layer = model.get_base_model().model.layers[-1]
    parts = layer.self_attn, layer.mlp, layer.input_layernorm
    fused = [
        isinstance(part, PARTS[name]) for part, name in zip(parts, ("Attention", "MLP", "RMSNorm"))
    ]
    assert fused == [on_gpu or DEVICE == "cuda"] * 3
    ids = torch.arange(3, 12, device=DEVICE)[None]
    assert torch.isfinite(model(input_ids=ids).logits).all()
