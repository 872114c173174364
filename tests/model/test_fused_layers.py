"""Norms and rotations in one pass: against transformers', against the formula, in a model with
adapters and a cache."""

import statistics
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm, apply_rotary_pos_emb

from grpo_nb.kernels import training_kernels
from grpo_nb.model import attention, fused_layers
from grpo_nb.model.fused_layers import (
    FusedAttention,
    fuse_layers,
    fused_norm,
    project,
    rotate,
    rotate_reference,
)
from grpo_nb.model.offload import wide_residual
from grpo_nb.model.shared_prefix import share

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(dtype=torch.float64, experts="eager", **more):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(GptOssConfig(**{**sizes, **more})).to(DEVICE, dtype).eval()
    model.set_experts_implementation(experts)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(p, 1.0, 0.3)
    return model


def heads(B, T, count, D, dtype=torch.float32, batched=False):
    torch.manual_seed(B + T)
    x = torch.randn(B, T, count, D, dtype=torch.float64).to(DEVICE, dtype)
    angle = 6 * torch.rand(B if batched else 1, T, D // 2, dtype=torch.float64, device=DEVICE)
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "B, T, count, D, batched",
    [
        (1, 7, 64, 64, False),
        (2, 5, 8, 64, True),
        (3, 1, 5, 12, True),
        (2, 4, 40, 2, False),
        (0, 4, 2, 8, False),
    ],
)
def test_the_kernel_is_the_formula(B, T, count, D, batched, dtype):
    x, cos, sin = heads(B, T, count, D, dtype, batched)
    torch.testing.assert_close(
        training_kernels.rotate(x, cos, sin),
        rotate_reference(x, cos, sin),
        atol=1e-6,
        rtol={torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype],
    )


def test_the_kernel_reads_any_strides():
    x, cos, sin = heads(2, 6, 4, 16, batched=True)
    expected = rotate_reference(x, cos, sin)
    for view in (
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    ):
        assert not view.is_contiguous()
        torch.testing.assert_close(training_kernels.rotate(view, cos, sin), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_against_transformers(dtype):
    x, cos, sin = heads(2, 9, 4, 16, dtype, batched=True)
    x.requires_grad_()
    ours = rotate(x, cos, sin)
    wide = x.detach().double().requires_grad_()
    theirs = apply_rotary_pos_emb(
        wide.transpose(1, 2), wide.transpose(1, 2), cos.double(), sin.double()
    )[0].transpose(1, 2)
    weights = torch.randn_like(theirs)
    mine, right = (
        torch.autograd.grad((ours * weights).sum(), x)[0],
        torch.autograd.grad((theirs * weights).sum(), wide)[0],
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    assert (ours - theirs).norm() < tolerance * theirs.norm() and (
        mine - right
    ).norm() < tolerance * right.norm()


def test_nothing_but_cosine_and_sine_is_kept():
    x, cos, sin = heads(1, 50, 4, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        rotate(x.requires_grad_(), cos, sin)
    assert sum(kept) == cos.numel() + sin.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm(dtype):
    torch.manual_seed(0)
    norm = GptOssRMSNorm(48, 1e-5).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 48).to(DEVICE, dtype)
    torch.testing.assert_close(
        fused_norm(norm)(x), norm(x), atol=0, rtol=4 * torch.finfo(dtype).eps
    )


def test_a_float32_residual_beside_float16_weights():
    norm, x = GptOssRMSNorm(48, 1e-5).half().to(DEVICE), 1e5 * torch.randn(5, 48, device=DEVICE)
    assert fused_norm(norm)(x).dtype == norm(x).dtype == torch.float32
    torch.testing.assert_close(fused_norm(norm)(x), norm(x))


@pytest.mark.parametrize("attention", ["eager", "sink"])
def test_a_model_with_padding_adapters_and_a_cache(attention):
    model = get_peft_model(
        build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.get_base_model().set_attn_implementation(attention)
    ids, seen = (
        torch.randint(2, 64, (2, 11), device=DEVICE),
        torch.ones(2, 11, dtype=torch.long, device=DEVICE),
    )
    seen[0, :4] = 0

    def answer():
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=seen).logits[seen.bool()]
        logits.sin().sum().backward()
        return [
            logits.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]

    before, names, text = (
        answer(),
        list(model.state_dict()),
        model.generate(input_ids=ids, attention_mask=seen, max_new_tokens=6, do_sample=False),
    )
    assert fuse_layers(model) == 2 * 2 + 1 + 2 and fuse_layers(model) == 0
    assert (
        all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(answer(), before))
        and list(model.state_dict()) == names
    )
    assert torch.equal(
        model.generate(input_ids=ids, attention_mask=seen, max_new_tokens=6, do_sample=False), text
    )
    assert {type(layer.self_attn).__name__ for layer in model.get_base_model().model.layers} == {
        "GptOssAttention"
    }


def test_it_is_saved_and_read_as_before(tmp_path):
    model = build(torch.float32)
    expected = model(torch.arange(2, 12, device=DEVICE)[None]).logits
    fuse_layers(model)
    model.save_pretrained(tmp_path)
    again = GptOssForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert not isinstance(again.model.layers[0].self_attn, FusedAttention)
    torch.testing.assert_close(again(torch.arange(2, 12, device=DEVICE)[None]).logits, expected)


# Linear layers with adapters


def three(bias=True, dtype=torch.float64, adapters=None, **config):
    torch.manual_seed(0)
    layers = torch.nn.ModuleDict(
        {name: torch.nn.Linear(16, n, bias=bias) for name, n in (("q", 24), ("k", 8), ("v", 8))}
    ).to(DEVICE, dtype)
    model = get_peft_model(
        layers,
        LoraConfig(
            **{
                **dict(r=4, lora_alpha=8, target_modules=["q", "k", "v"], init_lora_weights=False),
                **config,
            }
        ),
    )
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.to(adapters or dtype)
    return model, list(model.base_model.model.values())


def outcome(function, x, linears):
    "Results, and gradients of the input and of all that is trained."
    leaves = [x, *(p for linear in linears for p in linear.parameters() if p.requires_grad)]
    results = function(x)
    return [
        *results,
        *torch.autograd.grad(
            sum(
                (
                    y.double() * torch.arange(1, 1 + y.shape[-1], device=y.device).double().sin()
                ).sum()
                for y in results
            ),
            leaves,
        ),
    ]


def is_ours(x, linears):
    return "FusedLoraLinears" in type(project(x, *linears)[0].grad_fn.next_functions[0][0]).__name__


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (1, 1, 16)])
def test_adapters_as_peft_computes_them(shape, bias, count):
    _, linears = three(bias)
    linears = linears[:count]
    x = torch.randn(*shape, dtype=torch.float64, device=DEVICE).requires_grad_()
    ours, theirs = (
        outcome(lambda x: project(x, *linears), x, linears),
        outcome(lambda x: [linear(x) for linear in linears], x, linears),
    )
    assert is_ours(x, linears)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "frozen, adapters, x_dtype",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_adapters_under_autocast_are_no_less_exact(frozen, adapters, x_dtype):
    _, linears = three(dtype=frozen, adapters=adapters)
    _, exact = three(dtype=frozen, adapters=adapters)
    for linear in exact:
        linear.double()
    errors = []  # of each draw: (ours, theirs, size) of each tensor, squared
    for _ in range(9):
        x = torch.randn(64, 16, device=DEVICE).to(x_dtype).requires_grad_()
        truth = outcome(
            lambda x: [linear(x) for linear in exact], x.detach().double().requires_grad_(), exact
        )
        with torch.autocast(DEVICE, torch.bfloat16):
            assert is_ours(x, linears)
            ours, theirs = (
                outcome(lambda x: project(x, *linears), x, linears),
                outcome(lambda x: [linear(x) for linear in linears], x, linears),
            )
        assert [a.dtype for a in ours] == [b.dtype for b in theirs]
        errors.append(
            [
                [float(y.double().square().sum()) for y in (a.double() - c, b.double() - c, c)]
                for a, b, c in zip(ours, theirs, truth, strict=True)
            ]
        )
    for ours, theirs, size in torch.tensor(errors).sum(0).sqrt().tolist():
        assert ours <= 1.3 * theirs + 1e-3 * size


@pytest.mark.parametrize(
    "why",
    [
        "dropout",
        "dora",
        "two adapters",
        "disabled",
        "merged",
        "hook",
        "trained weight",
        "a bias of the adapter",
        "other numbers",
        "no adapter",
    ],
)
def test_what_is_more_than_plain_lora_is_asked_of_the_module(why):
    config = {
        "dropout": dict(lora_dropout=0.5),
        "dora": dict(use_dora=True),
        "a bias of the adapter": dict(lora_bias=True),
    }.get(why, {})
    model, linears = three(adapters=torch.float32 if why == "other numbers" else None, **config)
    if why == "two adapters":
        model.add_adapter(
            "second", LoraConfig(r=2, target_modules=["q", "k", "v"], init_lora_weights=False)
        )
        model.double().base_model.set_adapter(["default", "second"])
    if why == "disabled":
        model.base_model.disable_adapter_layers()
    if why == "merged":
        model.merge_adapter()
    if why == "hook":
        linears[1].register_forward_hook(lambda module, inputs, output: output * 2)
    if why == "trained weight":
        linears[0].base_layer.weight.requires_grad_()
    if why == "no adapter":
        linears = [linears[0], torch.nn.Linear(16, 8).double().to(DEVICE)]
    x = torch.randn(4, 16, dtype=torch.float64, device=DEVICE)
    torch.manual_seed(3)
    ours = project(x, *linears)
    torch.manual_seed(3)
    assert all(
        torch.equal(a, b) for a, b in zip(ours, [linear(x) for linear in linears], strict=True)
    )
    if why == "dropout":
        assert is_ours(x, [linear.eval() for linear in linears])


def test_an_output_that_nobody_uses_and_an_input_without_gradient():
    _, linears = three()
    x = torch.randn(4, 16, dtype=torch.float64, device=DEVICE)
    leaves = [p for linear in linears for p in linear.parameters() if p.requires_grad]

    def gradients(results):
        return torch.autograd.grad(results[1].sin().sum(), leaves, allow_unused=True)

    for a, b in zip(gradients(project(x, *linears)), gradients([linear(x) for linear in linears])):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)
    with torch.no_grad():
        assert all(torch.allclose(a, linear(x)) for a, linear in zip(project(x, *linears), linears))


# A layer, some heads at a time


def by_heads(sinks=True, bias=True, experts="eager", **more):
    model = build(
        num_attention_heads=8, num_key_value_heads=4, attention_bias=bias, experts=experts, **more
    )
    model = get_peft_model(
        model,
        LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            init_lora_weights=False,
        ),
    )
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "sinks" in name and not sinks)
    model.get_base_model().set_attn_implementation("sink_lean")
    assert fuse_layers(model)
    return model


@pytest.fixture
def together(monkeypatch):
    "Set how many key heads are a part; what was taken together since."
    taken, of_heads = [], fused_layers._heads_output
    monkeypatch.setattr(
        fused_layers,
        "_heads_output",
        lambda x, begin, end, *rest: taken.append((begin, end)) or of_heads(x, begin, end, *rest),
    )

    def set_to(heads):
        monkeypatch.setattr(attention, "heads_at_a_time", lambda *sizes: heads)
        taken.clear()
        return taken

    return set_to


def trained(model, ids, seen=None, sharing=None):
    model.zero_grad()
    y = model(
        input_ids=ids,
        attention_mask=seen,
        use_cache=False,
        **({} if sharing is None else dict(sharing=sharing, position_ids=sharing.positions)),
    ).logits
    y = y if seen is None else y[seen.bool()]
    y.double().sin().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "heads, parts",
    [(1, [(0, 1), (1, 2), (2, 3), (3, 4)]), (2, [(0, 2), (2, 4)]), (3, [(0, 3), (3, 4)])],
)
def test_a_layer_is_the_sum_of_its_heads(together, heads, parts, bias, checkpointing):
    model = by_heads(bias=bias)
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable()
    model.train()
    ids, seen = (
        torch.randint(2, 64, (2, 21), device=DEVICE),
        torch.ones(2, 21, dtype=torch.long, device=DEVICE),
    )
    seen[0, :6] = 0
    together(4)
    right = trained(model, ids, seen)
    taken = together(heads)
    ours = trained(model, ids, seen)
    assert taken[: len(parts)] == parts and len(taken) == len(parts) * 2 * (
        3 if checkpointing else 2
    )  # two layers; each forward, and again for gradients
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_prompts_that_are_read_once_by_heads(together):
    model = by_heads()
    prompts, completions = (
        torch.randint(2, 64, (4, 9), device=DEVICE),
        torch.randint(2, 64, (4, 12), device=DEVICE),
    )
    prompts[:2], prompts[2:] = prompts[0], prompts[2]
    there, drawn = (
        torch.ones(4, 9, dtype=torch.bool, device=DEVICE),
        torch.arange(12, device=DEVICE) < torch.tensor([12, 3, 7, 9], device=DEVICE)[:, None],
    )
    there[:2, :4] = False
    sharing = share(prompts, there, completions, drawn)
    together(4)
    right = trained(model, sharing.ids, sharing=sharing)
    taken = together(1)
    for a, b in zip(trained(model, sharing.ids, sharing=sharing), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert len(taken) == 4 * 2 * 2


def test_heads_under_autocast_beside_a_float32_residual(together):
    """As on a card without bfloat16; compared with the same layer in float64, in the median of
    several batches (one is noise)."""
    model = by_heads()
    half = by_heads(dtype=torch.float16)
    for name, p in half.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    for p, q in zip(half.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    wide_residual(half.get_base_model())

    def error(ids, heads):
        taken = together(heads)
        right = trained(model, ids)
        with torch.autocast(DEVICE, torch.float16):
            results = trained(half, ids)
        assert taken or heads == 4
        return max(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(results, right, strict=True)
        )

    batches = [torch.randint(2, 64, (2, 30), device=DEVICE) for _ in range(9)]
    in_parts, at_once = ([error(ids, heads) for ids in batches] for heads in (1, 4))
    assert statistics.median(a / b for a, b in zip(in_parts, at_once)) < 1.5
    assert statistics.median(in_parts) < 0.05


@pytest.mark.parametrize("why", ["trained sinks", "a cache", "no adapters", "another kernel"])
def test_what_does_not_go_by_heads(together, why):
    model = by_heads(sinks=why != "trained sinks")
    if why == "no adapters":
        model = model.merge_and_unload()
    if why == "another kernel":
        model.get_base_model().set_attn_implementation("sink_key")
    ids = torch.randint(2, 64, (1, 20), device=DEVICE)
    taken = together(1)
    if why == "a cache":
        model(input_ids=ids, use_cache=True)
    elif why == "no adapters":
        model(input_ids=ids, use_cache=False)
    else:
        trained(model, ids)
    assert not taken


class Alive(TorchDispatchMode):
    "Bytes of the tensors that operations made and that are still there."

    def __init__(self, known):
        super().__init__()
        self.now, self.most, self.there, self.known = (
            0,
            0,
            {},
            {t.untyped_storage()._cdata for t in known},
        )

    def gone(self, key):
        self.now -= self.there.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in {
            t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)
        }:
            if storage._cdata in self.known or id(storage) in self.there:
                continue
            self.there[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self.gone, id(storage))
            self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        return result


def test_what_is_alive_does_not_grow_with_the_heads(together):
    "Six times the layer's input, and one part, whatever the number of heads."

    def most(key_heads, heads_in_a_part, T=256, H=64):
        config = GptOssConfig(
            vocab_size=64,
            hidden_size=H,
            intermediate_size=8,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            num_attention_heads=4 * key_heads,
            num_key_value_heads=key_heads,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
        model = get_peft_model(
            GptOssForCausalLM(config),
            LoraConfig(r=1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
        ).to(DEVICE)
        model.get_base_model().set_attn_implementation("sink_lean")
        fuse_layers(model)
        layer, x = (
            model.get_base_model().model.layers[0].self_attn,
            torch.randn(1, T, H, device=DEVICE, requires_grad=True),
        )
        layer.sinks.requires_grad_(False)
        angles = model.get_base_model().model.rotary_emb(x, torch.arange(T, device=DEVICE)[None])
        together(heads_in_a_part)
        with Alive([*model.parameters(), x, *angles]) as alive:
            layer(x, angles, attention.transformers_mask(q_length=T, kv_length=T, device=DEVICE))[
                0
            ].sum().backward()
        return alive.most / (T * H * 4)

    few, many = most(2, 1), most(8, 1)
    assert many < few + 1 and most(8, 8) > 2 * many
