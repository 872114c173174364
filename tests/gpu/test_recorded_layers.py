"""Layers played from CUDA graphs compute what they compute call by call, bit for bit, and give
their memory back. (pytest -m gpu)"""

import gc
import sys
from pathlib import Path

import pytest
import torch

from grpo_nb.model import recorded_layers
from grpo_nb.model.fused_layers import fuse_layers
from grpo_nb.model.loading import load_model
from grpo_nb.model.recorded_layers import record_layers
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.policy_model import checkpoint_layers

sys.path.insert(0, str(Path(__file__).parents[1]))
from dense_models import dense_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
P, T, VOCABULARY = 128, 256, 40


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    "Others may hold most of the card; these models need little of it."
    monkeypatch.setattr(recorded_layers, "SPARE_BYTES", 2**28)


OSS = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=64,
    pad_token_id=0,
    eos_token_id=1,
)


def gpt_oss(in_4_bit=False):
    from transformers import GptOssConfig

    model, _ = load_model(
        GptOssConfig(**OSS), max_seq_length=512, lora_r=4, load_in_4bit=in_4_bit, quiet=True
    )
    fuse_layers(model)
    return model


MODELS = {
    "gpt-oss": gpt_oss,
    "MXFP4": lambda: gpt_oss(in_4_bit=True),
    "Qwen3": lambda: qwen3(),
}


def qwen3():
    "With the attention whose gradients are the same in every run."
    model = dense_model("Qwen3", torch.bfloat16, lora=True, head_dim=64).cuda()
    model.set_attn_implementation("eager")
    return model


def trainable(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)
    checkpoint_layers(model, {"use_reentrant": False})
    return model.train()


def batch_of(seed, rows):
    random = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (2, P), generator=random)[[0, 0, 1][:rows]]
    tokens = torch.randint(2, VOCABULARY, (rows, T), generator=random)
    pads = torch.tensor([seed % 3 + 1, seed % 3 + 1, 7][:rows])[:, None]
    drawn = torch.arange(T) < torch.tensor([T, T - 9, T - 40][:rows])[:, None]
    advantages = torch.randn(rows, generator=random)
    return TrainingBatch(prompts, torch.arange(P) >= pads, tokens, drawn, drawn, advantages).map(
        torch.Tensor.cuda
    )


def training(model, batches):
    "Gradients of each micro-batch, the weights moved after each."
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trained, seen = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for batch in batches:
        with torch.autocast("cuda", torch.bfloat16):
            logps, _ = completion_logps(model, batch)
        (logps * batch.advantages[:, None]).sum().backward()
        seen += [p.grad.clone() for p in trained if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(before, strict=False)
    return seen


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_played_layers_learn_the_same(name, rows):
    model = trainable(MODELS[name]())
    # the row of shared prompts has as many tokens as are not padding
    batches = [batch_of(seed, rows) for seed in ([0, 3, 6, 9] if rows > 1 else range(5))]
    expected, again = training(model, batches), training(model, batches)
    assert all(map(torch.equal, expected, again))
    with record_layers(model) as switch:
        played = training(model, batches)
        layers = [layer for shape in switch.shapes.values() for layer in shape.layers.values()]
        assert switch.refused is None and any(layer.graphs for layer in layers)
        assert switch.bytes > 0
    assert all(map(torch.equal, expected, played))


def test_memory_is_given_back():
    model = trainable(gpt_oss())
    training(model, [batch_of(0, 1)])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with record_layers(model):
        training(model, [batch_of(0, 1)] * 3)
    gc.collect()
    torch.cuda.empty_cache()
    # a library's workspace for the recordings' stream may stay
    assert torch.cuda.memory_allocated() - before[0] < 2**27
    assert torch.cuda.memory_reserved() - before[1] < 2**27


def test_a_layer_that_waits_for_the_card_runs_call_by_call():
    model = dense_model("Qwen2", torch.bfloat16).cuda()
    model.set_attn_implementation("eager")  # its gradients are the same in every run
    model = trainable(model)
    mlp = model.model.layers[0].mlp
    forward = type(mlp).forward
    kind = type(
        "Reads", (type(mlp),), {"forward": lambda m, x: forward(m, x) * float(x.sum() != 0)}
    )
    kind.__module__, mlp.__class__ = "grpo_nb.tests", kind
    batches = [batch_of(0, 1)] * 3
    expected = training(model, batches)
    with record_layers(model) as switch, pytest.warns(UserWarning, match="call by call"):
        assert all(map(torch.equal, training(model, batches), expected))
        assert switch.refused
    torch.rand(3, device="cuda")  # torch's random numbers are not left in a failed recording
