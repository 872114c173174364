"""One GRPO step of a tiny random model of each family, against the same step written with
transformers' logits and the formulas alone."""

import copy
import math
import statistics
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from peft import LoraConfig
from small_runs import digits, ids_of, plain_logps, remember_batches, small_trainer
from transformers import TrainerCallback

from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.training.policy_logprobs import (
    TrainingBatch,
    base_causal_model,
    completion_logps,
    find_head,
)

TOKENIZER = tiny_tokenizer()
ROWS = [
    {"prompt": prompt} for prompt in ("7=", "12+345=", "6*7-1=", "99-9+100*20=")
]  # 2 to 12 tokens
SIZES = dict(
    vocab_size=len(TOKENIZER) + 7,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=TOKENIZER.pad_token_id,
    eos_token_id=TOKENIZER.eos_token_id,
    bos_token_id=2,
    initializer_range=0.25,
)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rope(theta):
    return dict(rope_type="default", rope_theta=theta)


def llama3_rope(factor):
    return dict(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


@dataclass
class Family:
    "How a family is made small, and what sets it apart."

    name: str  # NAMEConfig and NAMEForCausalLM of transformers
    config: dict  # beside SIZES
    # changes of the config, or names of parameters to set to 0: each takes away something that sets
    # the family apart
    marks: list
    adapter: dict = field(default_factory=lambda: dict(target_modules=LINEARS))
    dtype: torch.dtype = torch.float64


FAMILIES = {
    "Llama 3": Family(
        "Llama",
        dict(rope_parameters=llama3_rope(8.0), tie_word_embeddings=False),
        [dict(rope_parameters=rope(500_000.0))],
    ),
    "Llama 3.2": Family(
        "Llama",
        dict(rope_parameters=llama3_rope(32.0), tie_word_embeddings=True),
        [dict(rope_parameters=llama3_rope(8.0))],
    ),
    "Qwen 2.5": Family("Qwen2", {}, ["q_proj.bias", "k_proj.bias", "v_proj.bias"]),
    "Qwen 3": Family("Qwen3", {}, ["q_norm", "k_norm"]),
    "Mistral": Family("Mistral", dict(sliding_window=4), [dict(sliding_window=None)]),
    "Phi-4": Family(
        "Phi3",
        dict(rope_parameters=rope(250_000.0)),
        [dict(rope_parameters=rope(100.0))],
        adapter=dict(target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    ),
    "Gemma 3": Family(
        "Gemma3Text",
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=16,
            final_logit_softcapping=3.0,
        ),
        [
            dict(sliding_window=100),
            dict(query_pre_attn_scalar=8),
            dict(final_logit_softcapping=None),
            "pre_feedforward_layernorm",
            "q_norm",
        ],
    ),
    "Gemma 2": Family(
        "Gemma2",
        dict(
            sliding_window=4,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=3.0,
        ),
        [
            dict(sliding_window=100),
            dict(attn_logit_softcapping=None),
            dict(final_logit_softcapping=None),
        ],
        # in float64, transformers' eager attention makes NaN of padding that sees nothing inside
        # its window
        dtype=torch.float32,
    ),
    "Cohere": Family(
        "Cohere", dict(logit_scale=0.5, use_qk_norm=True), [dict(logit_scale=1.0), "q_norm"]
    ),
    "Granite": Family(
        "Granite",
        dict(
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.25,
            logits_scaling=2.0,
        ),
        [
            dict(embedding_multiplier=1.0),
            dict(residual_multiplier=1.0),
            dict(attention_multiplier=1.0),
            dict(logits_scaling=1.0),
        ],
    ),
    "gpt-oss": Family(
        "GptOss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            rope_parameters=rope(10_000.0),
            attn_implementation="eager",
            experts_implementation="eager",
        ),
        [dict(sliding_window=100), dict(num_experts_per_tok=4), "sinks", "proj_bias"],
        adapter=dict(
            target_modules=LINEARS[:4],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ),
}
CAPPED = "Gemma 2"
TIED = {"Llama 3.2", "Gemma 3", "Gemma 2", "Cohere"}  # the head is the embedding
# norms compute in float32 in every model; what is left is nearer to 1e-15 wherever they see the
# same bits
TOLERANCE = {
    torch.float64: 5e-6,
    torch.float32: 5e-5,
}


def tiny(name, **changes):
    "A model of the family; biases, norms and sinks are random too."
    family = FAMILIES[name]
    config = getattr(transformers, family.name + "Config")(**{**SIZES, **family.config, **changes})
    model_class = getattr(transformers, family.name.removesuffix("Text") + "ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).to(family.dtype)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if p.ndim == 1 or "bias" in n:
                    p.add_(0.3 * torch.randn_like(p))
    return model.eval()


class Gradients(TrainerCallback):
    "Keeps the gradients of each update, as clipping left them."

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )


def family_trainer(name, folder, adapter, **changes):
    """A trainer of the family's model or of an adapter on it, with two micro-batches to an update;
    the batches that it collects and the gradients of its updates."""
    keep = Gradients()
    settings = dict(
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        num_generations=3,
        max_completion_length=8,
        max_steps=1,
        temperature=0.8,
        max_grad_norm=0.05,
        weight_decay=0.1,
        adam_epsilon=1e-3,
        generation_kwargs={"eos_token_id": [TOKENIZER.eos_token_id, *range(14, 20)]},
    )
    lora = (
        LoraConfig(
            r=4,
            lora_alpha=8,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **FAMILIES[name].adapter,
        )
        if adapter
        else None
    )
    trainer = small_trainer(
        folder,
        rows=ROWS,
        model=tiny(name),
        tokenizer=TOKENIZER,
        arguments=dict(peft_config=lora, callbacks=[keep]),
        **{**settings, **changes},
    )
    trainer.model.to(FAMILIES[name].dtype)  # PEFT makes adapters in float32
    return trainer, remember_batches(trainer), keep.seen


def rewards_of(sequences):
    return digits(
        TOKENIZER.batch_decode(
            [completion for _, completion in sequences], skip_special_tokens=True
        )
    )


# the step, by the formulas


def advantages_of(sequences):
    "(r - mean) / (std + 1e-4) in groups of equal prompts."
    rewards, groups = rewards_of(sequences), {}
    for (prompt, _), r in zip(sequences, rewards):
        groups.setdefault(tuple(prompt), []).append(r)
    return torch.tensor(
        [
            (r - statistics.mean(groups[tuple(p)])) / (statistics.stdev(groups[tuple(p)]) + 1e-4)
            for (p, _), r in zip(sequences, rewards)
        ]
    )


def plain_loss(kind, logps, A):
    "`dapo`, or `grpo` with a ratio a sequence; the policy that sampled is the policy itself."
    before = [p.detach() for p in logps]
    if kind == "dapo":
        ratios = [(p - b).exp() for p, b in zip(logps, before)]
        losses = [-torch.minimum(c * a, c.clamp(0.8, 1.2) * a) for c, a in zip(ratios, A)]
        return sum(loss.sum() for loss in losses) / sum(map(len, losses))
    ratios = [(p - b).mean().exp() for p, b in zip(logps, before)]
    return sum(-torch.minimum(c * a, c.clamp(0.8, 1.2) * a) for c, a in zip(ratios, A)) / len(
        ratios
    )


def plain_step(model, loss, config):
    """The norm of the gradients, the gradients clipped, and how AdamW moves the weights in its
    first update."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(weights, found) if g is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    clipped = {
        name: g * min(1.0, config.max_grad_norm / (norm + 1e-6)) for name, g in gradients.items()
    }
    moves = {}
    for name, g in clipped.items():
        decay = 0.0 if "bias" in name or "norm" in name else config.weight_decay
        moves[name] = -config.learning_rate * (
            g / (g.abs() + config.adam_epsilon) + decay * weights[name].detach()
        )  # the averages, corrected for their start at 0, are g and g^2
    return norm, clipped, moves


def furthest(a, b):
    """The largest difference between two sets of tensors, each relative to the largest number of
    its tensor."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


# what trains, the loss, the attention; with "sink" a group's prompt is read once and nothing is
# padded
STEPS = {
    "full": (False, "dapo", None),
    "LoRA": (True, "grpo", "sink"),
    "full, by sequences": (False, "grpo", "sink"),
    "LoRA, by tokens": (True, "dapo", None),
}
CASES = [
    (name, step)
    for name in FAMILIES
    for step in STEPS
    if step in ("full", "LoRA") or name == "Llama 3.2"
]


@pytest.mark.parametrize("name, step", CASES)
def test_one_step_is_that_of_the_formulas(name, step, tmp_path):
    (adapter, kind, attention), tolerance = STEPS[step], TOLERANCE[FAMILIES[name].dtype]
    trainer, batches, gradients = family_trainer(
        name,
        tmp_path,
        adapter,
        loss_type=kind,
        importance_sampling_level="sequence" if kind == "grpo" else "token",
    )
    config, model = trainer.config, copy.deepcopy(trainer.model).eval()
    if attention and name != CAPPED:
        base_causal_model(trainer.model).set_attn_implementation(attention)
    trainer.train()
    (batch,), (clipped,), (record,) = batches, gradients, trainer.log_history
    sequences = ids_of(batch)
    assert (
        len({len(p) for p, _ in sequences}) == 4 and len({len(c) for _, c in sequences}) > 2
    )  # padding on both sides

    logps = [
        plain_logps(model, *s, config.temperature) for s in sequences
    ]  # one completion at a time, without padding
    drawn = torch.cat(logps).detach()
    sampled = batch.rollout_logps[batch.completion_mask].to(drawn)  # float32
    assert (
        drawn.std() > 0.3
        and torch.allclose(sampled, drawn, atol=1e-5)
        and record["sampling/gap_max"] < 1e-5
    )

    A = advantages_of(sequences)
    assert torch.allclose(batch.advantages, A, atol=1e-5) and A.abs().max() > 1
    loss = plain_loss(kind, logps, batch.advantages.to(drawn))
    norm, expected, moves = plain_step(model, loss, config)
    assert (
        record["loss"] == pytest.approx(loss.item(), abs=1e-6)
        and record["grad_norm"] == pytest.approx(norm, rel=tolerance)
        and norm > 4 * config.max_grad_norm
    )
    assert furthest(clipped, expected) < tolerance

    before, after = dict(model.named_parameters()), dict(trainer.model.named_parameters())
    moved = {n: (p - before[n]).detach() for n, p in after.items() if not torch.equal(p, before[n])}
    assert furthest(moved, moves) < tolerance  # these weights, and no others
    assert not adapter or all("lora_" in n for n in moved)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_sets_a_family_apart_is_there(name):
    model = tiny(name)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (
        name in TIED
    ) and find_head(model) is not None
    ids = torch.tensor([TOKENIZER("12+345=6*7-1=99-9")["input_ids"]])
    with torch.no_grad():
        logps = model(ids).logits.log_softmax(-1)
        for mark in FAMILIES[name].marks:
            other = tiny(name, **mark) if isinstance(mark, dict) else tiny(name)
            for n, p in other.named_parameters():
                if isinstance(mark, str) and mark in n:
                    p.zero_()
            assert (other(ids).logits.log_softmax(-1) - logps).abs().max() > 0.05, mark


def test_capped_scores_are_refused_by_attention_that_has_no_cap(tmp_path):
    trainer, _, _ = family_trainer(CAPPED, tmp_path, False)
    trainer.model.set_attn_implementation("sink")
    with pytest.raises(ValueError, match="caps its scores.*'eager'"):
        trainer.train()


OTHER_HEADS = {  # what is between the body and the logits, beside a matrix
    "RecurrentGemma": dict(logits_soft_cap=2.0, attention_window_size=8, num_hidden_layers=3),
    "FalconH1": dict(
        lm_head_multiplier=0.5,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    "Mpt": dict(
        logit_scale=0.5, d_model=32, n_heads=4, n_layers=2, max_seq_len=64
    ),  # in MPT this setting scales nothing
    "ModernBertDecoder": dict(local_attention=8),
}


@pytest.mark.parametrize("name", OTHER_HEADS)
def test_heads_that_are_more_than_a_matrix_are_not_taken_apart(name):
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(
        **({} if name == "Mpt" else SIZES)
        | dict(vocab_size=SIZES["vocab_size"])
        | OTHER_HEADS[name]
    )
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    lengths = (5, 2, 4)
    ids, mask = torch.randint(3, 24, (3, 9)), torch.ones(3, 4, dtype=torch.bool)
    drawn = torch.arange(5) < torch.tensor(lengths)[:, None]
    batch = TrainingBatch(ids[:, :4], mask, ids[:, 4:], drawn, drawn, torch.ones(3))
    with torch.no_grad():
        logps, _ = completion_logps(model, batch, temperature=0.7)
        expected = [plain_logps(model, *sequence, 0.7) for sequence in ids_of(batch)]
    assert (
        find_head(model) is None
        and torch.allclose(logps[drawn], torch.cat(expected), atol=1e-4)
        and torch.cat(expected).std() > 0.1
    )
