"""Layers that are played are the layers that were recorded: the same numbers, gradients and errors
as call by call. The recordings are calls played again in place, as there is no CUDA here."""

import gc
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from recorded_calls import RecordedCalls

from grpo_nb.algorithm.losses import grpo_loss
from grpo_nb.model import experts_grouped, recorded_layers
from grpo_nb.model.experts_grouped import draws_numbers
from grpo_nb.model.fused_layers import fuse_layers
from grpo_nb.model.loading import load_model
from grpo_nb.model.masks import Mask
from grpo_nb.model.packed import experts_of
from grpo_nb.model.recorded_layers import (
    fresh_leaves,
    quiet_collector,
    record_layers,
)
from grpo_nb.model.shared_prefix import share
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.policy_model import checkpoint_layers

sys.path.insert(0, str(Path(__file__).parents[1]))
from dense_models import dense_model

P, T, VOCABULARY = 6, 12, 40
OSS = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=0,
    eos_token_id=1,
)


def gpt_oss(in_4_bit=False):
    "Two layers, one with a window, adapters on attention and experts."
    from transformers import GptOssConfig

    model, _ = load_model(
        GptOssConfig(**OSS), max_seq_length=64, lora_r=4, load_in_4bit=in_4_bit, quiet=True
    )
    fuse_layers(model)
    return model


def trainable(model):
    "A model in training, layers computed again, adapters not zero."
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)
    checkpoint_layers(model, {"use_reentrant": False})
    return model.train()


MODELS = {
    "gpt-oss": gpt_oss,
    "MXFP4": lambda: gpt_oss(in_4_bit=True),
    "Qwen3": lambda: dense_model("Qwen3", lora=True),
    "Gemma3": lambda: dense_model("Gemma3Text", lora=True),
}


def batch_of(seed, rows):
    "Completions of unlike lengths, prompts of unlike lengths; of three rows two share a prompt."
    random = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=random)

    prompts, owners = draw(2, VOCABULARY, rows, P), [0, 0, 1][:rows]
    pads, drawn = draw(0, 3, rows), torch.arange(T) < draw(4, T, rows)[:, None]
    real = torch.arange(P) >= pads[owners, None]
    tokens = draw(2, VOCABULARY, rows, T)
    advantages = torch.randn(rows, generator=random)
    return TrainingBatch(prompts[owners], real, tokens, drawn, drawn, advantages)


def micro_batch(model, batch, beta=0.0):
    "Add a micro-batch's gradients; its loss."
    reference = batch.advantages[:, None].tanh() - 3.0
    logps, _ = completion_logps(model, batch, free_bytes=2**30)
    loss = grpo_loss(
        logps,
        batch.advantages,
        batch.loss_mask,
        beta=beta,
        ref_logps=reference.expand_as(logps) if beta else None,
    ).loss
    loss.backward()
    return loss.detach()


def training(model, batches, beta=0.0):
    "Losses and gradients of micro-batches, the weights moved after every second."
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trained, seen = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for i, batch in enumerate(batches):
        seen.append(micro_batch(model, batch, beta))
        if i % 2:
            seen += [p.grad.clone() for p in trained if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    model.load_state_dict(before, strict=False)
    return seen


def recordings(switch):
    layers = [layer for shape in switch.shapes.values() for layer in shape.layers.values()]
    return [graph for layer in layers for graph in layer.graphs]


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_played_layers_learn_the_same(name, rows):
    model = trainable(MODELS[name]())
    seeds = [1, 2, 1, 2, 1, 2] if rows > 1 else range(6)  # shared prompts: lengths are shapes
    batches = [batch_of(seed, rows) for seed in seeds]
    expected = training(model, batches, beta=0.1)
    with record_layers(model, record=RecordedCalls) as switch:
        assert equal(training(model, batches, beta=0.1), expected)
        assert switch.refused is None and max(graph.replays for graph in recordings(switch)) > 1


@pytest.mark.parametrize("name, rows", [("gpt-oss", 1), ("gpt-oss", 3), ("Gemma3", 3)])
def test_rows_are_padded_to_a_common_length(name, rows, monkeypatch):
    "Many lengths, one shape or two; the padding changes nothing but the order of sums."
    monkeypatch.setattr(recorded_layers, "MOST_PADDING", 4)
    model = trainable(MODELS[name]())
    batches = [batch_of(seed, rows).rows(slice(None)) for seed in range(8)]
    lengths = {(b.prompt_mask.sum().item(), b.completion_mask.sum().item()) for b in batches}
    expected = training(model, batches)
    with record_layers(model, multiple=24, record=RecordedCalls) as switch:
        found = training(model, batches)
        assert switch.refused is None and len(switch.shapes) <= 2 < len(lengths)
        assert max(graph.replays for graph in recordings(switch)) > 1
    for a, b in zip(expected, found):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


def test_a_recording_meets_parameters_that_nothing_has_used():
    # autograd waits for the stream of a parameter's first use, which an older graph keeps alive
    model = trainable(gpt_oss())
    batch, originals, met = batch_of(0, 1), set(), []
    completion_logps(model, batch)[0].sum()
    layers = [m for m in model.modules() if type(m).__name__ == "GptOssDecoderLayer"]
    originals = {id(p) for layer in layers for p in layer.parameters() if p.requires_grad}

    def record(work):
        now = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        met.append(len(now) - sum(id(p) in originals for p in now))
        return RecordedCalls(work)

    with record_layers(model, record=record):
        training(model, [batch] * 2)
    assert met == [len(originals) // len(layers)] * 4  # a layer at a time, forward and backward
    now = {id(p) for layer in layers for p in layer.parameters() if p.requires_grad}
    assert now == originals


def test_fresh_leaves_are_the_same_memory():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layer[1].weight = layer[0].weight  # shared
    layer[0].bias.requires_grad_(False)
    before = dict(layer.named_parameters())
    with fresh_leaves(layer) as leaves:
        assert len(leaves) == 2 and leaves[0] is layer[0].weight is layer[1].weight
        trained = [p for p in layer.parameters() if p.requires_grad]
        assert all(a is b for a, b in zip(leaves, trained, strict=True))
        assert leaves[0].data_ptr() == before["0.weight"].data_ptr()
        assert leaves[0] is not before["0.weight"] and layer[0].bias is before["0.bias"]
    assert all(p is before[name] for name, p in layer.named_parameters())


def test_lengths_alternate_and_backward_comes_late():
    "Two micro-batches forward, then both backward: each has its own mask and its own input."
    model = trainable(dense_model("Qwen2", lora=True))

    def both(seed):
        losses = [completion_logps(model, batch_of(seed + i, 3))[0].sum() for i in range(2)]
        model.zero_grad()
        sum(losses).backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = [both(seed) for seed in (0, 2, 4)]
    with record_layers(model, record=RecordedCalls) as switch:
        assert all(map(equal, [both(seed) for seed in (0, 2, 4)], expected))
        assert recordings(switch)


def test_packed_experts_are_unpacked_together(monkeypatch):
    "Two at a time, Python would read where the rows of each part end."
    monkeypatch.setattr(experts_grouped, "UNPACKED", 2 * 64 * 128 * 4)
    model = trainable(gpt_oss(in_4_bit=True))
    experts = next(iter(experts_of(model).values()))
    assert experts_grouped.experts_at_a_time(experts.gate_up_proj, torch.float32) == 2
    batches = [batch_of(1, 1)] * 4
    expected = training(model, batches)
    with record_layers(model, record=RecordedCalls) as switch:
        assert equal(training(model, batches), expected)
        assert switch.refused is None and recordings(switch)


def switch_off(model):
    model.disable_adapter_layers()


def another(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("other")


def elsewhere(model):
    for p in model.parameters():
        p.data = p.data.clone() * 1.5


def frozen(model):
    for name, p in model.named_parameters():
        if "q_proj" in name:
            p.requires_grad_(False)


def rescaled(model):
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling.update(default=0.25)


@pytest.mark.parametrize("change", [switch_off, another, elsewhere, frozen, rescaled])
def test_a_changed_layer_is_not_played(change):
    model = trainable(dense_model("Qwen2", lora=True))
    batch = batch_of(1, 1)

    def gradients():
        model.zero_grad()
        (completion_logps(model, batch)[0].sum() + 0 * next(model.parameters()).sum()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model.get_base_model().model.norm.weight.requires_grad_(True)  # so that something is trained
    with record_layers(model, record=RecordedCalls) as switch:
        for _ in range(3):
            gradients()
        assert recordings(switch)
        change(model)
        played = gradients()
        switch.remove()
        assert equal(played, gradients())


def add_hook(layer):
    layer.mlp.register_forward_hook(lambda module, given, result: 2 * result)


def add_dropout(layer):
    layer.self_attn.attention_dropout = 0.1


def read_a_number(layer):
    forward = type(layer.mlp).forward
    layer.mlp.__class__ = type(
        "Reads", (type(layer.mlp),), {"forward": lambda m, x: forward(m, x) * (x.sum().item() > 0)}
    )
    layer.mlp.__class__.__module__ = "grpo_nb.tests"


@pytest.mark.parametrize(
    "change, why",
    [(add_hook, "hooks"), (add_dropout, "random"), (read_a_number, "waits for the device")],
)
def test_what_cannot_be_recorded_runs_as_before(change, why):
    model = trainable(dense_model("Qwen2"))
    change(model.model.layers[0])
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    expected = training(model, [batch_of(1, 1)] * 4)
    with record_layers(model, record=RecordedCalls) as switch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        assert equal(training(model, [batch_of(1, 1)] * 4), expected)
        assert why in switch.refused


def test_only_a_failure_is_told_where_nobody_asked():
    "The trainer records by itself: dropout is no news there, a layer that waits is."
    for change, told in ((add_dropout, False), (read_a_number, True)):
        model = trainable(dense_model("Qwen2"))
        change(model.model.layers[0])
        model.set_attn_implementation("eager")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with record_layers(model, record=RecordedCalls, tells=False) as switch:
                training(model, [batch_of(1, 1)] * 3)
            assert switch.refused
        assert any("call by call" in str(one.message) for one in heard) == told


def test_a_recording_that_fails_is_not_tried_again():
    "Neither in other layers nor for other shapes; no memory is held for it."
    model, tried = trainable(dense_model("Qwen2", lora=True)), []

    def broken(work):
        tried.append(work)
        raise torch.OutOfMemoryError("no room")

    expected = training(model, [batch_of(1, 1)] * 4)
    with record_layers(model, record=broken) as switch:
        with pytest.warns(UserWarning, match="call by call: memory ran out: end other"):
            assert equal(training(model, [batch_of(1, 1)] * 4), expected)
        training(model, [batch_of(1, 2)] * 4)
        assert len(tried) == 1 and not any(shape.tensors for shape in switch.shapes.values())


def test_a_group_of_one_process_records(tmp_path):
    "torchrun with one process makes one."
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        record_layers(trainable(dense_model("Qwen2", lora=True)), record=RecordedCalls).remove()
    finally:
        torch.distributed.destroy_process_group()


def test_where_nothing_is_recorded():
    model = trainable(dense_model("Qwen2", lora=True))
    with record_layers(model) as switch:  # on a CPU
        training(model, [batch_of(1, 1)] * 3)
        assert not switch.shapes
    with record_layers(model, most_tokens=P + T - 1, record=RecordedCalls) as switch:
        training(model, [batch_of(1, 1)] * 3)
        assert not switch.shapes
    with record_layers(model, record=RecordedCalls) as switch, torch.no_grad():
        completion_logps(model, batch_of(1, 1))
        assert not switch.shapes
    model.gradient_checkpointing_disable()
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        record_layers(dense_model("Qwen2"))


def test_few_shapes_are_recorded_and_few_remembered(monkeypatch):
    monkeypatch.setattr(recorded_layers, "MOST_SHAPES", 1)
    monkeypatch.setattr(recorded_layers, "SEEN_SHAPES", 2)
    model = trainable(dense_model("Qwen2", lora=True))
    texts = [torch.randint(2, VOCABULARY, (1, n)) for n in (5, 6, 7, 8)]
    with record_layers(model, record=RecordedCalls) as switch:
        for ids in texts:
            model(ids)
        assert len(switch.shapes) == 2
        for ids in 2 * texts[2:]:
            model(ids)
        assert [shape.recorded for shape in switch.shapes.values()].count(True) == 1
        switch.drop()
        assert not switch.shapes


def test_a_shape_that_no_longer_comes_makes_room(monkeypatch):
    "After eight calls of two layers; before that it keeps its place. Numbers stay the same."
    monkeypatch.setattr(recorded_layers, "MOST_SHAPES", 1)
    monkeypatch.setattr(recorded_layers, "STALE_CALLS", 8)
    model = trainable(dense_model("Qwen2", lora=True))
    old, new = (torch.randint(2, VOCABULARY, (1, n)) for n in (5, 6))

    def logits_of(ids):
        return model(ids).logits.detach()

    expected = logits_of(new)
    with record_layers(model, record=RecordedCalls) as switch:
        for ids in (old, old, new, new, new):
            logits_of(ids)
        first = [shape.recorded for shape in switch.shapes.values()]
        assert first == [True, False]
        for _ in range(4):
            assert torch.equal(logits_of(new), expected)
        assert [shape.recorded for shape in switch.shapes.values()] == [True]
        assert len(recordings(switch)) == 2 * len(model.base_model.model.model.layers)


@pytest.mark.parametrize("processors, large", [(40, False), (58, False), (108, True), (132, True)])
def test_a_t4_and_an_l4_are_small(monkeypatch, processors, large):
    made = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made)
    assert recorded_layers.is_large(torch.device("cuda")) is large
    assert not recorded_layers.is_large(torch.device("cpu"))


def test_derived_tensors_of_masks_are_refilled():
    for make in (
        lambda seed: Mask(torch.tensor([seed, 3 - seed]), 256, 256, window=40),
        lambda seed: share(
            *(
                getattr(batch_of(3, 3), name)
                for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
            )
        ),
    ):
        first, second = make(1), make(2)
        static = recorded_layers.static_copy(first)
        for mask in (static,) if isinstance(static, Mask) else static.masks(4):
            mask.dense(), mask.block()
        recorded_layers.refill(static, second)
        pairs = (
            [(static, second)]
            if isinstance(static, Mask)
            else zip(static.masks(4), second.masks(4))
        )
        for mask, other in pairs:
            assert torch.equal(mask.dense(), other.dense())
            ours, theirs = mask.block(), other.block()
            for name, x in vars(theirs).items():
                assert not torch.is_tensor(x) or torch.equal(getattr(ours, name), x)


def test_the_collector_is_given_back():
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            with pytest.raises(KeyError), quiet_collector():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == on
        finally:
            gc.enable()


def test_random_states_are_kept_where_numbers_are_drawn():
    plain = dense_model("Qwen2", lora=True)
    assert not draws_numbers(plain)
    checkpoint_layers(plain, {"use_reentrant": False})
    kept = plain.get_base_model().model.layers[0]._gradient_checkpointing_func.keywords
    assert kept["preserve_rng_state"] is False
    for model in (dense_model("Qwen2", attention_dropout=0.1), torch.nn.Dropout(0.1)):
        assert draws_numbers(model)
