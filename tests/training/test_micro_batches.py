"""Pieces of a micro-batch: what a row of completions takes against a meter of live storages, and
the room that is left."""

import pytest
import torch
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.model import attention, limits, shared_prefix
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.fused_layers import can_go_by_heads, fuse_layers
from grpo_nb.model.masks import Mask
from grpo_nb.model.memory_bytes import GiB
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.micro_batches import LARGE, SMALL, ModelPieces
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps, reads_a_row
from grpo_nb.training.policy_model import checkpoint_layers

MiB = 2**20


def group(prompt, completions):
    "Completions of these lengths behind one prompt."
    torch.manual_seed(0)
    B, T = len(completions), max(completions)
    ids, drawn = (
        torch.randint(1, 64, (1, prompt)).expand(B, prompt),
        torch.arange(T) < torch.tensor(completions)[:, None],
    )
    return TrainingBatch(
        ids,
        torch.ones(B, prompt, dtype=torch.bool),
        torch.randint(1, 64, (B, T)),
        drawn,
        drawn,
        torch.ones(B),
    )


def few_layers(kinds, heads, kv_heads, head_dim, by_heads=False):
    "A gpt-oss in which attention takes most, with adapters on it."
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=[f"{kind}_attention" for kind in kinds],
        sliding_window=64,
        pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        attn_implementation="sink_lean",
    )
    model = get_peft_model(
        GptOssForCausalLM(config),
        LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    ).train()
    route_adapters(model, "routed_lean")
    checkpoint_layers(model, {"use_reentrant": False})
    if by_heads:
        fuse_layers(model)
    return model


BOTH = ("sliding", "full")


@pytest.mark.parametrize(
    "by_heads, kinds, heads, prompt, completions, least, most",
    [
        (False, ["sliding"], (16, 8, 32), 96, [32] * 6, 0.97, 1.7),
        (False, ["sliding"], (8, 8, 32), 48, [80] * 4, 0.97, 1.7),
        (
            False,
            ["sliding"],
            (8, 8, 32),
            60,
            [70, 70, 60, 50],
            0.97,
            1.7,
        ),  # the rectangles are a third and more of these
        (False, ["full"], (16, 2, 32), 192, [64] * 8, 0.97, 1.7),
        (False, ["full"], (16, 2, 32), 384, [32] * 8, 0.97, 1.7),
        (
            False,
            ["full"],
            (8, 2, 32),
            48,
            [80] * 4,
            0.97,
            1.7,
        ),  # one key head is larger than a part
        (True, ["full"], (16, 2, 32), 192, [64] * 8, 0.97, 1.6),
        (True, ["full"], (16, 2, 32), 384, [32] * 8, 0.97, 1.6),
        (True, ["full"], (8, 2, 32), 48, [80] * 4, 0.97, 1.6),
        (True, BOTH, (16, 8, 32), 96, [32] * 6, 0.97, 1.6),
        (True, BOTH, (16, 2, 32), 192, [64, 64, 40, 8], 0.97, 1.6),
        (True, BOTH, (16, 2, 32), 192, [64], 0.97, 1.6),
        (True, ["sliding"], (8, 8, 32), 48, [80] * 4, 0.97, 1.6),
        (True, ["sliding"], (8, 8, 32), 60, [70, 70, 60, 50], 0.75, 1.6),
    ],
)  # 60 and 70 tokens fill two blocks of 64; a full layer takes more than that
def test_a_row_takes_what_is_predicted(
    by_heads, kinds, heads, prompt, completions, least, most, monkeypatch
):
    # an old card's way in miniature: some heads at a time
    monkeypatch.setattr(limits, "PART_BYTES", 2**16)
    model, batch = few_layers(kinds, *heads, by_heads), group(prompt, completions)
    config = GRPOConfig(
        num_generations=max(2, len(batch)),
        per_device_train_batch_size=max(2, len(batch)),
        logit_chunk_multiplier=16,
    )
    predicted = ModelPieces(model, config).bytes(batch)
    assert reads_a_row(model) and can_go_by_heads(model) == by_heads
    with LiveBytes(
        *model.parameters(), *model.buffers(), *(x for x in vars(batch).values() if x is not None)
    ) as live:
        logps, _ = completion_logps(model, batch, mini_batch=1, logit_chunk_multiplier=16)
        logps.mean().backward()
    assert least * live.peak <= predicted <= most * live.peak, (
        f"{predicted:,} predicted, {live.peak:,} measured"
    )


@pytest.mark.parametrize("padded", [False, True])
def test_a_shared_row_s_masks_are_made_once_for_each_kind_of_layer(padded, monkeypatch):
    "Not once a layer, nor again when layers are computed again."
    made = []
    monkeypatch.setattr(
        shared_prefix, "Mask", lambda *given, **more: made.append(given) or Mask(*given, **more)
    )
    model, batch = few_layers(("sliding", "full") * 3, 4, 2, 16), group(40, [30, 20, 10, 30])
    if padded:
        batch.prompt_mask[2:, :7] = False  # two prompts, one of them shorter
    logps, _ = completion_logps(model, batch, mini_batch=1, logit_chunk_multiplier=4)
    logps.mean().backward()
    assert len(made) == 2 * 2 and all((given[0] is not None) == padded for given in made)


@pytest.mark.parametrize("name", ["sink_key", "sink_lean", "sink_eager"])
def test_checkpointed_layers_keep_their_inputs_alone(name, monkeypatch):
    "Not what attention's own checkpoints close over, nor where the experts' rows are."
    monkeypatch.setattr(limits, "PART_BYTES", 2**16)
    monkeypatch.setattr(attention, "ROWS_PER_PIECE", 16)
    batch, kept = group(48, [40] * 6), []
    for layers in (1, 3):
        model = full_layers(layers, name)
        with LiveBytes(
            *model.parameters(),
            *model.buffers(),
            *(x for x in vars(batch).values() if x is not None),
        ) as live:
            logps, _ = completion_logps(model, batch, mini_batch=1, logit_chunk_multiplier=4)
            kept.append(live.now)
    inputs = (48 + 6 * 40) * 64 * 4
    assert inputs <= (kept[1] - kept[0]) / 2 <= 1.05 * inputs, (
        f"{(kept[1] - kept[0]) // 2:,} bytes a layer, {inputs:,} are its input"
    )
    assert logps.requires_grad


def full_layers(count, attention_name):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=count,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"] * count,
        pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
        attn_implementation=attention_name,
    )
    model = get_peft_model(
        GptOssForCausalLM(config),
        LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    ).train()
    route_adapters(model, "routed_lean")
    checkpoint_layers(model, {"use_reentrant": False})
    return model


@pytest.fixture(scope="module")
def large():
    "gpt-oss-20b without memory, as it trains."
    with torch.device("meta"):
        model = GptOssForCausalLM(
            GptOssConfig(num_local_experts=32, num_hidden_layers=24)
        ).bfloat16()
    route_adapters(model, "routed_lean")
    model.config._attn_implementation = "sink"
    return model


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_room_is_left_for_gaps_and_for_what_is_unknown(large, length):
    "A tenth of what is free and 128 MiB; of less than 1.28 GiB a fifth."
    batch, config = (
        group(512, [length] * 8),
        GRPOConfig(num_generations=8, per_device_train_batch_size=8, offload_activations=True),
    )
    pieces = ModelPieces(large, config)
    pieces.residual = 2  # as where an adapter trains
    assert pieces.slices == (LARGE, SMALL)
    for count in (1, 2, 4):
        part = batch.rows(slice(0, len(batch) // count))
        least = min(pieces.bytes(part, tokens) for tokens in LARGE)

        def chosen(free):
            return pieces.choose(batch, free)

        free = least / 0.8 if least <= 0.8 * 1.28 * GiB else (least + 128 * MiB) / 0.9
        assert chosen(int(free) + 1000)[0] <= count < chosen(int(free) - MiB)[0]
        assert chosen(int(least / 0.9) + MiB)[0] > count  # nine tenths alone are not enough
