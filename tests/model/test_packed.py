"""Weights that stay in 4 bits: what each operation does, values and gradients against dense
weights, PEFT, both ways through the experts."""

import contextlib
import copy
import io
import re
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.model import experts_grouped
from grpo_nb.model.adapters import expert_weights, route_adapters
from grpo_nb.model.experts_grouped import UNPACK_ALL, in_turn, routed_experts
from grpo_nb.model.mxfp4 import dequantize, quantize
from grpo_nb.model.packed import EXPERTS, PackedWeight, experts_of, pack, pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return pack(torch.randn(4, 64, 96) / 8)


def dense_twin(model):
    "The same numbers, dense."
    twin = copy.deepcopy(model)
    for experts in experts_of(twin).values():
        for name in EXPERTS:
            setattr(
                experts,
                name,
                torch.nn.Parameter(getattr(experts, name).dequantize(), requires_grad=False),
            )
    return twin


@pytest.mark.parametrize(
    "pick",
    [
        lambda w: w[2],
        lambda w: w[-1],
        lambda w: w[1:3],
        lambda w: w[torch.tensor([3, 0, 3])],
        lambda w: w.index_select(0, torch.tensor([1, 2])),
        lambda w: w[torch.tensor(2)],
        lambda w: w.mT,
        lambda w: w.mT[1],
        lambda w: w[1].mT,
        lambda w: w[1].T,
        lambda w: w.transpose(-1, -2),
        lambda w: w.mT.mT,
        lambda w: w.clone(),
        lambda w: w.detach(),
        lambda w: w.to(torch.float64),
        lambda w: w.bfloat16(),
        lambda w: w.half(),
        lambda w: copy.deepcopy(w),
        lambda w: w.mT.double()[0].mT,
    ],
)
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_stays_packed(weight, pick, mode):
    with mode():
        got, expected = (
            pick(torch.nn.Parameter(weight, requires_grad=False)),
            pick(weight.dequantize()),
        )
    assert (
        isinstance(got, PackedWeight)
        and got.shape == expected.shape
        and got.dtype == expected.dtype
    )
    assert torch.equal(got.dequantize(), expected)


@pytest.mark.parametrize("which", [2, slice(1, 3), slice(3, 9), slice(None)])
def test_some_become_dense(weight, which):
    assert torch.equal(weight.dequantize(which), weight.dequantize()[which]) and torch.equal(
        weight.mT.dequantize(which), weight.dequantize().mT[which]
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: w.sum(),
        lambda w: torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) @ w[1],
        lambda w: w.reshape(-1),
        lambda w: w[:, 3:5],
        lambda w: w.permute(2, 0, 1),
        lambda w: w.transpose(0, 1),
        lambda w: torch.cat([w, w]),
        lambda w: w.abs().amax(-1),
        lambda w: w[torch.tensor([0, 1]), torch.tensor([2, 3])],
        lambda w: torch.empty(4, 64, 96).copy_(w),
        lambda w: w.to(torch.int32),
        lambda w: w[None],
        lambda w: torch.nn.functional.linear(torch.ones(3, 64), w[0].mT),
    ],
)
def test_everything_else_is_dense(weight, use):
    got, expected = use(weight), use(weight.dequantize())
    assert type(got) is torch.Tensor and torch.equal(got, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.copy_(torch.zeros_like(w)),
        lambda w: w.zero_(),
        lambda w: torch.nn.init.normal_(w),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.data.mul_(2),
    ],
)
def test_writing_is_refused(weight, write):
    before = weight.dequantize()
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            "would write to a weight that is stored in 4 bits and frozen: train an adapter, "
            "or unpack it with .dequantize()"
        ),
    ):
        with torch.no_grad():
            write(weight)
    assert torch.equal(weight.dequantize(), before)


def test_modules_carry_it(weight):
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(weight, requires_grad=False)
    blocks = module.w.blocks
    module.to(torch.bfloat16)
    assert (
        type(module.w) is PackedWeight
        and module.w.dtype == torch.bfloat16
        and torch.equal(module.w.blocks, blocks)
        and module.w.blocks.dtype == torch.uint8
    )
    module.to("meta")
    assert module.w.blocks.is_meta and module.w.is_meta and module.w.shape == (4, 64, 96)
    module.w = torch.nn.Parameter(weight, requires_grad=False)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)["w"]
    assert torch.equal(again.blocks, blocks) and torch.equal(again.scales, module.w.scales)


def test_the_layout_is_that_of_the_files(weight):
    dense = torch.randn(2, 3, 64, 32)
    packed = pack(dense)
    blocks, scales = quantize(dense.mT)
    assert (
        torch.equal(packed.blocks, blocks)
        and torch.equal(packed.scales, scales)
        and packed.shape == dense.shape
    )
    assert torch.equal(packed.dequantize(), dequantize(blocks, scales, torch.float32).mT)


def test_no_dense_copy_is_kept(weight):
    x, noted = torch.randn(7, 64, requires_grad=True), []

    def note(t):
        noted.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        (x @ weight[0]).sum()
    assert [type(t) for t in noted] == [PackedWeight] and noted[
        0
    ].blocks.untyped_storage().data_ptr() == weight.blocks.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    model = tiny_gpt_oss()[0]
    pack_experts(model)
    return model.requires_grad_(False), dense_twin(model)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_transformers_computes_with_it(models, implementation):
    ids, results = torch.arange(10)[None], []
    for model in models:
        model.set_experts_implementation(implementation)
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=x).logits
        results.append((logits, *torch.autograd.grad(logits.square().sum(), x)))
        model.set_experts_implementation("eager")
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "path, recompute, grouped, unpacked",
    [
        ("reference", False, False, 0),
        ("in parts", True, True, 2**17),
        ("in parts", True, True, 2**28),
        ("few", False, False, 0),
        ("loop", False, False, 0),
        *(
            ("many", recompute, grouped, unpacked)
            for recompute in (False, True)
            for grouped, unpacked in ((False, 0), (True, 0), (True, 2**17), (True, 2**28))
        ),
    ],
)
def test_routed_experts(models, path, recompute, grouped, unpacked, monkeypatch):
    monkeypatch.setattr("grpo_nb.model.experts_grouped.UNPACKED", unpacked)
    if not grouped:
        monkeypatch.setattr("grpo_nb.model.experts_grouped.can_group", lambda *a: False)
    slice_tokens = 11
    if path == "in parts":
        path, slice_tokens = "many", None
        monkeypatch.setattr("grpo_nb.model.experts_grouped.PAIRS_BACKWARD", 7)
        monkeypatch.setattr("grpo_nb.model.experts_grouped.PAIRS_FORWARD", 25)
    packed, dense = (expert_weights(next(iter(experts_of(m).values()))) for m in models)
    torch.manual_seed(1)
    hidden, indices, weights = (
        torch.randn(30, 128),
        torch.stack([torch.randperm(4)[:2] for _ in range(30)]),
        torch.rand(30, 2),
    )
    results = []
    for experts in (packed, dense):
        h, s = (
            hidden.clone().requires_grad_(path != "loop"),
            weights.clone().requires_grad_(path != "loop"),
        )
        y = routed_experts(
            h, indices, s, experts, path=path, recompute=recompute, slice_tokens=slice_tokens
        )
        results.append(
            (y, *torch.autograd.grad(y.square().sum(), (h, s))) if path != "loop" else (y,)
        )
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped, most", [(True, 1), (False, 2)])
def test_one_piece_of_the_experts_is_dense_at_a_time(models, grouped, most, monkeypatch):
    "Of 4 experts one at a time; where each comes alone, with both of its matrices."
    monkeypatch.setattr("grpo_nb.model.experts_grouped.UNPACKED", 1)
    if not grouped:
        monkeypatch.setattr("grpo_nb.model.experts_grouped.can_group", lambda *a: False)
    made, there, real = [], [], PackedWeight.dequantize

    def dequantize(self, *which):
        dense = real(self, *which)
        made.append(weakref.ref(dense))
        there.append(sum(tensor() is not None for tensor in made))
        return dense

    monkeypatch.setattr(PackedWeight, "dequantize", dequantize)
    torch.manual_seed(1)
    hidden = torch.randn(30, 128, requires_grad=True)
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    routed_experts(
        hidden,
        indices,
        torch.rand(30, 2),
        expert_weights(next(iter(experts_of(models[0]).values()))),
        path="many",
    ).sum().backward()
    assert len(there) == 4 * 4 and max(there) == most


@pytest.mark.parametrize("grouped", [True, False])
def test_in_turn_a_layer_computed_again_reads_rows_that_are_there(models, grouped, monkeypatch):
    "Its router says something else the second time, as where kernels are noted and not launched."
    monkeypatch.setattr(experts_grouped, "UNPACKED", 1)
    seen, given, real = [], [], experts_grouped.grouped_mm
    if not grouped:
        monkeypatch.setattr(experts_grouped, "can_group", lambda *a: False)

    def product(x, weight, offs):
        given.append((len(x), offs.tolist()))
        return real(x, weight, offs.clamp(max=len(x)))

    monkeypatch.setattr(experts_grouped, "grouped_mm", product)
    experts = expert_weights(next(iter(experts_of(models[0]).values())))
    torch.manual_seed(1)
    x, weights = torch.randn(30, 128, requires_grad=True), torch.rand(30, 2)

    def layer(x):
        seen.append(torch.arange(60).view(30, 2) % (2 - len(seen)))  # to two, then all to the first
        return routed_experts(x, seen[-1], weights, experts, path="many", recompute=True)

    def pass_over():
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        torch.autograd.grad(y.sum(), x)
        del seen[:]

    with in_turn(tokens=30):
        pass_over()
    assert all(0 <= end <= rows for rows, ends in given for end in ends)
    assert grouped == bool(given)
    if grouped:  # as a router that says two things would have it
        pass_over()
        assert any(min(ends) < 0 or max(ends) > rows for rows, ends in given)


def test_a_recorded_layer_unpacks_all_experts_and_gate_and_up_once_backward(models, monkeypatch):
    unpacked, real = [], PackedWeight.dequantize

    def dequantize(self, *which):
        unpacked.append((tuple(self.shape), which))
        return real(self, *which)

    monkeypatch.setattr(PackedWeight, "dequantize", dequantize)
    monkeypatch.setattr("grpo_nb.model.experts_grouped.UNPACKED", 1)  # one expert, if not recorded
    torch.manual_seed(1)
    hidden, weights = torch.randn(30, 128), torch.rand(30, 2)
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(30)])
    experts = expert_weights(next(iter(experts_of(models[0]).values())))

    def step(inside):
        x = hidden.clone().requires_grad_()
        with inside:
            y = routed_experts(x, indices, weights, experts, path="many", recompute=True)
        return y, *torch.autograd.grad(y.square().sum(), x)

    plain, count = step(contextlib.nullcontext()), len(unpacked)
    unpacked.clear()
    recorded = step(UNPACK_ALL)
    gate_up, down = tuple(experts.gate_up.shape), tuple(experts.down.shape)
    assert count == 5 * 4 and unpacked == [
        *((shape, ()) for shape in (gate_up, down)),
        *((shape, ()) for shape in (gate_up, down[:1] + down[:0:-1])),
    ]
    for a, b in zip(plain, recorded):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_adapters_train_and_their_gradients_are_those_of_the_dense_model(models):
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    grads = []
    for model, implementation in zip(models, ("routed_lean", None)):
        torch.manual_seed(2)
        adapted = get_peft_model(copy.deepcopy(model), config)
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.05)
        if implementation:
            route_adapters(adapted, implementation)
        adapted(torch.arange(10)[None]).logits.square().mean().backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.requires_grad})
        assert all("lora_" in name for name in grads[-1])
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 2 * (2 * 2 + 4)
    for name, g in grads[0].items():
        assert torch.allclose(g, grads[1][name], rtol=1e-4, atol=1e-6), name


def test_merging_into_packed_experts_is_refused(models):
    adapted = get_peft_model(
        copy.deepcopy(models[0]), LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"])
    )
    with pytest.raises(RuntimeError, match="stored in 4 bits and frozen"):
        adapted.merge_adapter()


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="Linear has no experts of a gpt-oss"):
        pack_experts(torch.nn.Linear(2, 2))
    odd = GptOssForCausalLM(
        GptOssConfig(
            hidden_size=48,
            intermediate_size=64,
            num_local_experts=2,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=16,
        )
    )
    with pytest.raises(ValueError, match=r"\(2, 128, 48\), but blocks of 32 lie along"):
        pack_experts(odd)


def test_packing_twice_changes_nothing(models):
    model = copy.deepcopy(models[0])
    before = {name: e.gate_up_proj.blocks.clone() for name, e in experts_of(model).items()}
    assert pack_experts(model) == sum(
        (e.gate_up_proj.numel() + e.down_proj.numel()) * 17 // 32
        for e in experts_of(model).values()
    )
    assert all(
        torch.equal(e.gate_up_proj.blocks, before[name]) for name, e in experts_of(model).items()
    )
