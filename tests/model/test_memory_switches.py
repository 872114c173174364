"""Every switch that saves memory on, against all of them off: the same losses; pieces of a
micro-batch; activations on the host."""

import copy
import pickle
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from small_runs import drawn
from torch.utils.checkpoint import noop_context_fn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from grpo_nb.algorithm.losses import LOSSES
from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model import experts_grouped
from grpo_nb.model.adapters import route_adapters
from grpo_nb.model.experts_grouped import checkpoint_contexts
from grpo_nb.model.fused_layers import slice_layers, slice_tokens_of
from grpo_nb.model.offload import offload_embedding, offload_layers
from grpo_nb.model.packed import EXPERTS, experts_of, pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training import policy_update as update_module
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.micro_batches import LARGE, SMALL
from grpo_nb.training.policy_model import checkpoint_layers
from grpo_nb.training.trainer import GRPOTrainer


def reward(completions, **columns):
    return [(len(c) * 7 + ord(c[0]) if c else 0) % 5 / 4 for c in completions]


def run(tmp_path, model, tokenizer, peft=True, **settings):
    config = GRPOConfig(
        **{
            **dict(
                output_dir=str(tmp_path),
                max_steps=3,
                num_generations=4,
                per_device_train_batch_size=8,
                max_completion_length=6,
                learning_rate=1e-3,
                logging_steps=1,
                report_to="none",
                seed=1,
                save_strategy="no",
                disable_tqdm=True,
                temperature=0.9,
            ),
            **settings,
        }
    )
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in addition_problems()[0][:16]])
    lora = (
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        if peft
        else None
    )
    trainer = GRPOTrainer(model, reward, config, data, processing_class=tokenizer, peft_config=lora)
    return trainer, config


def losses(trainer):
    trainer.train()
    return [
        (record["loss"], record["grad_norm"], record["sampling/gap_mean"])
        for record in trainer.log_history
        if "loss" in record
    ]


def gpt_oss(packed):
    torch.manual_seed(0)
    model, tokenizer = tiny_gpt_oss()
    pack_experts(model)
    if not packed:
        for experts in experts_of(model).values():
            for name in EXPERTS:
                setattr(
                    experts,
                    name,
                    torch.nn.Parameter(getattr(experts, name).dequantize().contiguous()),
                )
    return model, tokenizer


def test_weights_that_no_checkpoint_could_hold_are_refused_at_the_start(tmp_path):
    model, tokenizer = gpt_oss(packed=True)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match="in MXFP4 or float8, and no checkpoint .*: train an adapter"
    ):
        run(tmp_path, model, tokenizer, peft=False)


def test_all_switches_on_and_off(tmp_path, monkeypatch):
    plain, _ = run(
        tmp_path / "off",
        *gpt_oss(packed=False),
        gradient_checkpointing=False,
        mini_batch=1,
        logit_chunk_multiplier=1,
    )
    plain.model.get_base_model().set_attn_implementation("eager")
    plain.model.get_base_model().set_experts_implementation("eager")
    model, tokenizer = gpt_oss(packed=True)
    model.requires_grad_(False)
    offload_embedding(model)
    model.set_attn_implementation("sink_lean")
    lean, _ = run(
        tmp_path / "on",
        model,
        tokenizer,
        offload_activations=True,
        mini_batch=4,
        logit_chunk_multiplier=3,
    )
    assert route_adapters(lean.model, "routed_lean") == 2
    for a, b in zip(losses(plain), losses(lean), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=2e-5)
    store = lean.policy_update.store
    assert store.offloaded > 0 and store.host_bytes == 0  # given back at the end


@pytest.mark.parametrize("loss_type", LOSSES)
def test_pieces_make_the_same_gradient(tmp_path, loss_type):
    gradients = []
    for pieces in (1, 3):
        model, tokenizer = tiny_gpt_oss()
        level = LOSSES[loss_type].level or "token"
        trainer, _ = run(
            tmp_path / str(pieces),
            model,
            tokenizer,
            peft=False,
            mini_batch=pieces,
            loss_type=loss_type,
            importance_sampling_level=level,
            epsilon_high=5.0 if LOSSES[loss_type].caps else None,
            max_steps=1,
        )
        trainer.begin(None)
        batch = drawn(trainer)
        assert len(trainer.policy_update.fitter.pieces(batch)) == pieces
        trainer.policy_update.accumulate(batch, batch)
        gradients.append(
            torch.cat(
                [p.grad.flatten() for p in trainer.policy_update.parameters if p.grad is not None]
            )
        )
    assert (
        gradients[0].norm() > 0
        and ((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-4
    )


def test_pieces_choose_themselves(tmp_path, monkeypatch):
    model, tokenizer = tiny_gpt_oss()
    trainer, _ = run(tmp_path, model, tokenizer, max_steps=1)
    trainer.begin(None)
    batch = drawn(trainer)
    counts = []
    for free in (10**12, 3_000_000, 1):
        monkeypatch.setattr(update_module, "free_memory", lambda device: free)
        counts.append(len(trainer.policy_update.fitter.pieces(batch)))
    assert counts[0] == 1 and counts[-1] == len(batch) == 8 and counts == sorted(counts)


def test_what_needs_all_tokens_is_not_split(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    settings = dict(top_entropy_quantile=0.5, mini_batch=4, max_steps=1)
    trainer, _ = run(tmp_path, model, tokenizer, **settings)
    trainer.begin(None)
    assert len(trainer.policy_update.fitter.pieces(drawn(trainer))) == 1


def test_offloading_wants_checkpointing():
    with pytest.raises(
        ValueError, match="offload_activations=True moves what gradient checkpointing keeps"
    ):
        GRPOConfig(offload_activations=True, gradient_checkpointing=False)


# Slices


def llama(tokenizer, **changes):
    return LlamaForCausalLM(
        LlamaConfig(
            **dict(
                hidden_size=32,
                intermediate_size=4096,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=len(tokenizer),
                pad_token_id=0,
            )
            | changes
        )
    )


def test_slices_choose_themselves_and_again_for_another_length(tmp_path, monkeypatch):
    model, tokenizer = tiny_gpt_oss(intermediate_size=1024)  # experts that dominate
    model.set_attn_implementation("sink_key")
    route_adapters(model, "routed_lean")
    trainer, _ = run(tmp_path, model, tokenizer, max_steps=1)
    trainer.begin(None)
    batch, chosen = drawn(trainer), []

    def ask(batch, free):
        monkeypatch.setattr(update_module, "free_memory", lambda device: free)
        return len(trainer.policy_update.fitter.pieces(batch)), slice_tokens_of(trainer.model)

    for free in (10**12, 5_000_000, 1):
        chosen.append(ask(batch, free))
    assert (
        chosen[0] == (1, LARGE[0])
        and chosen[1][0] > 1
        and chosen[1][1] in LARGE
        and chosen[2] == (8, SMALL[-1])
    )
    long = copy.deepcopy(batch.rows(slice(0, 1)))  # one completion of 30,000 tokens
    for name in ("completion_ids", "completion_mask", "loss_mask", "rollout_logps"):
        setattr(long, name, getattr(long, name)[:, :1].expand(1, 30_000))
    assert [ask(long, free * 2**20)[1] for free in (4000, 436, 431, 400, 1)] == [
        16_384,
        8192,
        4096,
        2048,
        512,
    ]
    assert ask(batch, 10**12) == (1, LARGE[0])  # and back


def test_a_reference_of_its_own_is_cut_as_the_policy_is(tmp_path):
    torch.manual_seed(0)
    model, tokenizer = tiny_gpt_oss()
    route_adapters(model, "routed_lean")
    trainer, _ = run(tmp_path, model, tokenizer, peft=False, beta=0.1, max_steps=1, slice_tokens=3)
    used, logps = [], trainer.policy_update.completion_logps
    trainer.policy_update.completion_logps = lambda policy, *given, **more: (
        used.append((policy is trainer.model, slice_tokens_of(policy))),
        logps(policy, *given, **more),
    )[1]
    trainer.train()
    assert set(used) == {(True, 3), (False, 3)} and slice_tokens_of(trainer.reference.model) != 3


def test_layers_are_computed_as_this_trainer_says(tmp_path):
    torch.manual_seed(0)
    model, tokenizer = tiny_gpt_oss()
    first, _ = run(tmp_path / "first", model, tokenizer, max_steps=1, offload_activations=True)
    second, _ = run(
        tmp_path / "second",
        first.model,
        tokenizer,
        peft=False,
        max_steps=1,
        gradient_checkpointing=False,
    )
    first.train()  # it was built before the other one
    parked = first.policy_update.store.offloaded
    assert parked > 0
    second.train()
    assert first.policy_update.store.offloaded == parked and not any(
        getattr(module, "gradient_checkpointing", False) for module in second.model.modules()
    )


def test_slices_can_be_set(tmp_path):
    results = []
    for given in (dict(), dict(slice_tokens=3)):
        torch.manual_seed(0)
        model, tokenizer = tiny_gpt_oss()
        route_adapters(model, "routed_lean")
        before = slice_tokens_of(model)
        trainer, _ = run(tmp_path / str(len(results)), model, tokenizer, max_steps=2, **given)
        used, pieces = [], trainer.policy_update.fitter.pieces
        trainer.policy_update.fitter.pieces = lambda batch: (
            pieces(batch),
            used.append(slice_tokens_of(trainer.model)),
        )[0]
        results.append(losses(trainer))
        assert set(used) == {given.get("slice_tokens", LARGE[0])}
        assert (
            slice_tokens_of(trainer.model) == before
        )  # what was chosen for this run binds no other one
    for a, b in zip(*results, strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=2e-5)
    model, tokenizer = tiny_gpt_oss()
    route_adapters(model, "routed_lean")
    slice_layers(model, 700)  # by hand: it stays
    trainer, _ = run(tmp_path / "hand", model, tokenizer, max_steps=1)
    losses(trainer)
    assert slice_tokens_of(trainer.model) == 700
    model, tokenizer = tiny_gpt_oss()
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="call route_adapters"):
        run(tmp_path / "eager", model, tokenizer, slice_tokens=512)
    with pytest.raises(ValueError, match="slice_tokens is 0"):
        GRPOConfig(slice_tokens=0)


def test_a_dense_model_is_sliced_for_want_of_memory_only(tmp_path, monkeypatch):
    _, tokenizer = tiny_gpt_oss()
    trainer, _ = run(tmp_path, llama(tokenizer), tokenizer, peft=False, max_steps=1)
    trainer.begin(None)
    batch, found = drawn(trainer), []
    for free in (10**12, 1, 10**12):
        monkeypatch.setattr(update_module, "free_memory", lambda device: free)
        found.append(
            (len(trainer.policy_update.fitter.pieces(batch)), slice_tokens_of(trainer.model))
        )
    assert found == [(1, None), (8, SMALL[-1]), (1, None)]
    monkeypatch.undo()
    whole = losses(trainer)
    sliced, _ = run(
        tmp_path / "s", llama(tokenizer), tokenizer, peft=False, max_steps=1, slice_tokens=2
    )
    assert slice_tokens_of(sliced.model) == 2 and len(losses(sliced)) == len(whole) == 1


# What the trainer hands on, and what it refuses


def test_the_sampler_s_batch_is_handed_on(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    trainer, _ = run(tmp_path, model, tokenizer, max_batch_size=3, max_steps=1)
    assert (
        trainer.engine.max_batch_size == 3
        and len(trainer.engine.batches([[9]] * 8, trainer.sampling, None)[0]) == 3
    )
    assert len(losses(trainer)) == 1
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        GRPOConfig(max_batch_size=0)


def test_log_probs_of_a_cycle_are_as_wide_as_the_model(tmp_path):
    for dtype in (torch.float64, torch.float32):
        model, tokenizer = tiny_gpt_oss()
        trainer, _ = run(tmp_path / str(dtype), model.to(dtype), tokenizer, peft=False, max_steps=1)
        trainer.begin(None)
        batch = drawn(trainer)
        logps = trainer.policy_update.logps_of(trainer.model, batch)
        direct, _ = trainer.policy_update.completion_logps(trainer.model, batch)
        assert logps.dtype == direct.dtype == dtype and logps.shape == batch.rollout_logps.shape
        assert (logps[:, : direct.shape[1]] - direct).abs().max() < (
            1e-12 if dtype == torch.float64 else 1e-5
        )


GEMMA = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=24,
    pad_token_id=0,
    sliding_window=8,
)


def test_gemma_3_without_caps_takes_sinks_attention(tmp_path):
    _, tokenizer = tiny_gpt_oss()
    model = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))
    model.set_attn_implementation("sink")
    run(tmp_path, model, tokenizer, peft=False)


def test_an_embedding_on_the_host_is_not_trained_silently(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    model.requires_grad_(False)
    offload_embedding(model)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    config = GRPOConfig(output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=8)
    data = Dataset.from_list([{"prompt": "1+1="}] * 8)
    with pytest.raises(
        ValueError,
        match="modules_to_save asks to train the input embedding, which is in host memory",
    ):
        GRPOTrainer(model, reward, config, data, processing_class=tokenizer, peft_config=lora)
    model, tokenizer = tiny_gpt_oss()
    model = get_peft_model(model, lora)
    with pytest.raises(ValueError, match="a ModulesToSaveWrapper with more to it"):
        offload_embedding(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_embedding_s_output_is_kept_for_no_gradient_unless_it_is_needed(reentrant):
    model = get_peft_model(tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["q_proj"])).train()
    checkpoint_layers(model, {"use_reentrant": reentrant})
    seen = []
    model.get_base_model().get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(output.requires_grad)
    )
    model(torch.arange(8)[None], use_cache=False).logits.sum().backward()
    assert seen[0] == reentrant and all(
        p.grad is not None for name, p in model.named_parameters() if "lora_" in name
    )


def second_pass_of(model, offload, count):
    "Loss, gradients and matrix products of experts in a step."
    counted = []

    def product(*args, **kwargs):
        counted.append(1)
        return count(*args, **kwargs)

    ids = torch.randint(14, (2, 50), generator=torch.Generator().manual_seed(1))
    with (
        patch.object(experts_grouped, count.__name__, product),
        offload_layers(model, attention_from=offload) if offload else nullcontext(),
    ):
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    return (
        loss.item(),
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        len(counted),
    )


class Never(type(experts_grouped.SKIP_LAST_PRODUCT)):
    "A switch that stays off."

    def __bool__(self):
        return False


@pytest.mark.parametrize(
    "offload", [None, 32, 64], ids=["on the device", "on the host, attention too", "on the host"]
)
@pytest.mark.parametrize("tokens, fewer", [(None, 2), (40, 6)])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", ["dense", "packed", "adapted"])
def test_the_recomputation_skips_the_experts_last_product(
    monkeypatch, kind, each, tokens, fewer, offload
):
    """The same bits with fewer products: in the second pass none, as gate and up are computed in
    the backward pass (40 tokens: in three slices)."""
    if each:
        monkeypatch.setattr(experts_grouped, "can_group", lambda *a: False)
    results = []
    for everything in (False, True):
        model = tiny_gpt_oss()[0].requires_grad_(False)
        if kind == "packed":
            pack_experts(model)
        torch.manual_seed(0)
        targets = (
            dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
            if kind == "adapted"
            else {}
        )
        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False, **targets)
        ).train()
        route_adapters(model, "routed_lean")
        slice_layers(model, tokens)
        if everything:
            monkeypatch.setattr(experts_grouped, "SKIP_LAST_PRODUCT", Never())
        if not offload:
            checkpoint_layers(model, {"use_reentrant": False})
        results.append(
            second_pass_of(
                model, offload, experts_grouped._product if each else experts_grouped.grouped_mm
            )
        )
    (loss, grads, products), (expected, wanted, usual) = results
    assert (
        loss == expected
        and grads.keys() == wanted.keys()
        and len(grads) == (12 if kind == "adapted" else 4)
    )
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted) and all(
        g.abs().max() > 0 for g in grads.values()
    )
    assert products < usual
    if not each and kind != "adapted":
        assert usual - products == 2 * fewer  # two layers


def test_other_models_skip_nothing_and_a_context_of_ones_own_is_kept():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    assert checkpoint_contexts(model) is noop_context_fn
    contexts = checkpoint_contexts(
        get_peft_model(tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["q_proj"]))
    )
    assert (
        contexts() == (experts_grouped.COMPUTED_AGAIN, experts_grouped.SKIP_LAST_PRODUCT)
        and pickle.loads(pickle.dumps(copy.deepcopy(contexts)))()[1].depth == 0
    )
    model, calls = tiny_gpt_oss()[0].train(), []

    def mine():
        calls.append(1)
        return nullcontext(), nullcontext()

    checkpoint_layers(model, {"use_reentrant": False, "context_fn": mine})
    model(torch.arange(8)[None], use_cache=False).logits.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("where", ["layer", "mlp", "experts"])
def test_who_listens_to_the_experts_hears_them(where, offload):
    "A forward hook that is trained sees the same answers in the second pass."
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(
            tiny_gpt_oss()[0].requires_grad_(False),
            LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False),
        ).train()
        route_adapters(model, "routed_lean")
        if checkpointing and not offload:
            checkpoint_layers(model, {"use_reentrant": False})
        scale = torch.nn.Parameter(torch.ones(()))

        def listen(module, inputs, output):
            return (output[0] * scale, *output[1:]) if isinstance(output, tuple) else output * scale

        with offload_layers(model) if checkpointing and offload else nullcontext():
            for layer in model.get_base_model().model.layers:
                {"layer": layer, "mlp": layer.mlp, "experts": layer.mlp.experts}[
                    where
                ].register_forward_hook(listen)
            ids = torch.arange(12)[None]
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(scale.grad)
    assert gradients[0] == gradients[1] != 0
