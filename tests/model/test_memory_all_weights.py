"""All weights train: what is planned, against the bytes that torch's own tracker counts."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_nb.model.memory_bytes import read_shape, state_bytes, update_bytes
from grpo_nb.model.memory_fit import ALL, Step, fit
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.optimizer import make_optimizer
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.policy_model import checkpoint_layers

LAYERS = dict(pad_token_id=0, num_attention_heads=4)
SIZES = {
    "llama": dict(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "qwen3": dict(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    ),
    "gemma3_text": dict(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=64,
    ),
}
ROWS, TOKENS, CHUNKS = 2, 96, 16


def optimizer_of(name, model):
    "As a run makes it; torch's AdamW loops over all tensors together, as it does on a GPU."
    parameters = dict(model.named_parameters())
    if name == "adamw_torch":
        return torch.optim.AdamW(parameters.values(), foreach=True)
    return make_optimizer(GRPOConfig(optim=name, bf16=False), parameters)


def tracked(kind, dtype, autocast, checkpointing, optim, micro_batches):
    "(shape, the peak in bytes) of the second update of a small model."
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **LAYERS, **SIZES[kind])
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    if checkpointing:
        checkpoint_layers(model, {"use_reentrant": False})
    optimizer, P = optimizer_of(optim, model), TOKENS // 4
    ids = torch.randint(0, config.vocab_size, (ROWS, TOKENS))
    seen = torch.ones_like(ids, dtype=torch.bool)
    batch = TrainingBatch(
        ids[:, :P], seen[:, :P], ids[:, P:], seen[:, P:], seen[:, P:], torch.ones(ROWS)
    )

    def update(between=lambda: None):
        for _ in range(micro_batches):
            with (
                torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
                patch("grpo_nb.training.policy_logprobs.reads_a_row", lambda model: False),
            ):
                logps, entropies = completion_logps(
                    model, batch, mini_batch=1, logit_chunk_multiplier=CHUNKS, return_entropy=True
                )
            logps.mean().backward()
            between()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    update()  # the states are there
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        update(tracker.reset_mod_stats)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return read_shape(config), peak["Total"]


def planned(shape, dtype, autocast, checkpointing, optim, micro_batches):
    "The same by arithmetic, without CUDA's own memory and without gaps."
    each = dtype.itemsize
    step = Step(
        shape,
        (9, 0),
        "fp32" if each == 4 else "bf16",
        lora_r=0,
        all_weights=True,
        optimizer_bytes=state_bytes(optim, each),
        update_bytes=update_bytes(optim, shape.tensors, each),
        accumulates=micro_batches > 1,
        autocast=autocast,
        prompt_length=TOKENS // 4,
        max_completion_length=TOKENS - TOKENS // 4,
        num_generations=ROWS,
        generation_batch_size=ROWS,
        per_device_train_batch_size=ROWS,
        logit_chunk_multiplier=CHUNKS,
        gradient_checkpointing=checkpointing,
        slice_tokens=ALL,
        attention="sdpa",
        sampler="server",
    )
    moments = fit(step, 2**40).moments.values()
    return max(sum(parts.values()) - parts["context"] for parts in moments)


f32, bf16 = torch.float32, torch.bfloat16
HOW = {  # optimizer -> weights, autocast, checkpointing, micro-batches
    "adamw_torch": (bf16, True, True, 1),
    "adamw_torch_fused": (f32, True, True, 2),
    "adafactor": (bf16, True, True, 2),
    "sgd": (f32, True, False, 1),
}
MORE = [  # the other corners
    ("qwen3", "sgd", (f32, False, True, 2)),
    ("gemma3_text", "sgd", (bf16, True, False, 2)),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, optim, how", [(kind, o, how) for kind in SIZES for o, how in HOW.items()] + MORE
)
def test_a_step_that_trains_all_weights_costs_what_torch_counts(kind, optim, how):
    dtype, autocast, checkpointing, micro_batches = how
    args = dtype, autocast, checkpointing, optim, micro_batches
    shape, measured = tracked(kind, *args)
    assert planned(shape, *args) == pytest.approx(measured, rel=0.1)
