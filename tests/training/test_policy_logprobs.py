"""training.policy: log-probs of completions under any head, against transformers' logits; batches,
and the gap."""

import math

import pytest
import torch
from accelerate.hooks import attach_align_device_hook_on_blocks
from dense_models import dense_model
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from small_runs import small_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from grpo_nb.rollout.rollout import pad_left
from grpo_nb.training.policy_logprobs import (
    TrainingBatch,
    base_causal_model,
    completion_logps,
    find_head,
    plain_completion_logps,
    positions,
    predicting_states,
    rollout_gap,
)

V = 24
SMALL = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)


def adapted(**where):
    model = get_peft_model(small_model()[0], LoraConfig(r=2, task_type="CAUSAL_LM", **where))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(0, 0.2)
    return model.eval()


def of(model_class, config_class, **changes):
    model = model_class(config_class(**{**SMALL, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    return model.eval()


MODELS = {
    "gpt-oss": lambda: small_model()[0],
    "tied": lambda: of(CohereForCausalLM, CohereConfig, logit_scale=0.25, tie_word_embeddings=True),
    "scaled": lambda: of(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0),
    "capped": lambda: of(
        Gemma2ForCausalLM,
        Gemma2Config,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
        sliding_window=4,
        attn_implementation="eager",
    ),
    "with a bias": lambda: of(PhiForCausalLM, PhiConfig),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
        )
    ).eval(),
    "adapter": lambda: adapted(target_modules=["q_proj", "v_proj"]),
    "adapter on the head": lambda: adapted(target_modules=["q_proj", "lm_head"]),
    "a copied head": lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "adapter on the experts": lambda: adapted(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    ),
}


def make_batch(seed=0, prompts=(3, 5, 1, 4), completions=(4, 1, 6, 2), extra=0):
    "Completions of unequal lengths; what is padding holds legal ids that mean nothing."
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(3, 20, (n,), generator=g).tolist()

    prompt_ids, prompt_mask = pad_left([draw(n) for n in prompts], pad_token_id=7)
    T = max(completions) + extra
    drawn = [draw(n) for n in completions]
    ids = torch.tensor([c + [5] * (T - len(c)) for c in drawn])
    mask = torch.arange(T) < torch.tensor(completions)[:, None]
    if extra:
        prompt_ids, prompt_mask = (
            torch.nn.functional.pad(prompt_ids, (extra, 0), value=11),
            torch.nn.functional.pad(prompt_mask, (extra, 0)),
        )
    return TrainingBatch(
        prompt_ids,
        prompt_mask,
        ids,
        mask,
        mask,
        torch.ones(len(prompts)),
        rollout_logps=torch.randn(mask.shape, generator=g),
    )


def one_by_one(model, batch, temperature=1.0):
    "Log-probs and entropies by transformers and TRL, a sequence at a time, without padding."
    logps, entropies = (
        torch.zeros(batch.completion_ids.shape),
        torch.zeros(batch.completion_ids.shape),
    )
    for i in range(len(batch)):
        prompt, completion = (
            batch.prompt_ids[i][batch.prompt_mask[i]],
            batch.completion_ids[i][batch.completion_mask[i]],
        )
        logits = (
            model(torch.cat([prompt, completion])[None]).logits[:, len(prompt) - 1 : -1]
            / temperature
        )
        logps[i, : len(completion)], entropies[i, : len(completion)] = (
            selective_log_softmax(logits, completion[None])[0],
            entropy_from_logits(logits)[0],
        )
    return logps, entropies


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_of_every_kind_of_head(name):
    torch.manual_seed(0)
    model, batch = MODELS[name](), make_batch()
    logps, entropies = completion_logps(model, batch, temperature=0.7, return_entropy=True)
    expected, spread = one_by_one(model, batch, 0.7)
    assert (
        torch.allclose(logps, expected, atol=2e-5)
        and torch.allclose(entropies, spread, atol=2e-5)
        and spread.max() > 1
    )
    assert torch.allclose(plain_completion_logps(model, batch, 0.7), expected, atol=2e-5)
    assert (logps[~batch.completion_mask] == 0).all() and (
        entropies[~batch.completion_mask] == 0
    ).all()

    parameters = [p for p in model.parameters() if p.requires_grad]
    weights = torch.randn(logps.shape)
    ours, theirs = (
        torch.autograd.grad((lp * weights).sum() + e.sum(), parameters, allow_unused=True)
        for lp, e in ((logps, entropies), (expected, spread))
    )
    for a, b in zip(ours, theirs):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-4))
    assert any(g is not None and g.abs().max() > 1e-3 for g in ours)


def test_which_heads_are_taken_apart():
    torch.manual_seed(0)
    heads = {name: find_head(make()) for name, make in MODELS.items()}
    assert {name for name, head in heads.items() if head is None} == {
        "adapter on the head",
        "a copied head",
    }
    assert (
        heads["tied"].scale == 0.25
        and heads["scaled"].scale == pytest.approx(1 / 3)
        and heads["capped"].softcap == 2.0
        and heads["with a bias"].bias is not None
    )
    model = MODELS["adapter"]()
    assert base_causal_model(model) is model.get_base_model() and heads["adapter"].weight.shape == (
        24,
        32,
    )


@pytest.mark.parametrize("pieces, chunks", [(1, 1), (2, 3), (4, 100), (None, None)])
def test_the_split_of_the_head_changes_nothing(pieces, chunks):
    model, batch = small_model()[0].double(), make_batch()
    expected = plain_completion_logps(model, batch)
    logps, none = completion_logps(model, batch, mini_batch=pieces, logit_chunk_multiplier=chunks)
    assert (
        none is None
        and logps.dtype == torch.float64
        and torch.allclose(logps, expected, atol=1e-12)
    )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5),
    extra=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_padding_and_company_do_not_matter(lengths, extra, seed):
    model = small_model()[0].double()
    prompts, completions = zip(*lengths)
    if not any(completions):
        return
    with torch.no_grad():
        batch, wider = (
            make_batch(seed, prompts, completions),
            make_batch(seed, prompts, completions, extra),
        )
        together, padded = completion_logps(model, batch)[0], completion_logps(model, wider)[0]
        assert (
            torch.allclose(together, padded[:, : together.shape[1]], atol=1e-10)
            and (padded[:, together.shape[1] :] == 0).all()
        )
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(
            completion_logps(model, batch.rows(order))[0], together[order], atol=1e-10
        )
        for i in range(len(batch)):
            alone = batch.rows([i])
            assert alone.prompt_ids.shape == (1, prompts[i]) and alone.completion_ids.shape == (
                1,
                max(completions[i], 1),
            )
            assert torch.allclose(
                completion_logps(model, alone)[0][0, : completions[i]],
                together[i, : completions[i]],
                atol=1e-10,
            )


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_under_autocast_the_result_is_float32(dtype, tolerance):
    model, batch = small_model()[0], make_batch()
    with torch.autocast("cpu", dtype=dtype):
        logps, entropies = completion_logps(model, batch, return_entropy=True)
    assert logps.dtype == entropies.dtype == torch.float32
    expected = one_by_one(model, batch)[0]
    assert torch.allclose(logps, expected, atol=tolerance) and not torch.allclose(
        logps, expected, atol=1e-6
    )


@pytest.mark.parametrize("autocast", [True, False])
def test_a_head_in_float32(autocast):
    model, batch = small_model()[0].bfloat16(), make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        rough = completion_logps(model, batch)[0]
        fine = completion_logps(model, batch, float32_head=True)[0]
        hidden, _, _ = predicting_states(model, batch)
    logits = hidden.float() @ model.lm_head.weight.float().T
    exact = selective_log_softmax(logits, batch.completion_ids) * batch.completion_mask
    assert torch.allclose(fine, exact, atol=1e-5) and not torch.allclose(rough, exact, atol=1e-4)
    fine.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16 and model.lm_head.weight.grad.any()


def test_rows_keeps_everything_together():
    batch = make_batch()
    batch.old_logps, batch.rollout_weights, batch.advantages = (
        batch.rollout_logps + 1,
        torch.arange(4.0)[:, None],
        torch.arange(4.0),
    )
    part = batch.rows([3, 0])
    assert (
        len(part) == 2
        and part.advantages.tolist() == [3, 0]
        and part.rollout_weights.tolist() == [[3], [0]]
        and part.ref_logps is None
    )
    assert part.prompt_ids.shape == (2, 4) and part.prompt_mask.tolist() == [
        [True] * 4,
        [False] + [True] * 3,
    ]
    assert part.completion_ids.shape == part.loss_mask.shape == part.old_logps.shape == (
        2,
        4,
    ) and torch.equal(part.old_logps, batch.old_logps[[3, 0], :4])
    assert batch.completion_ids.shape == (4, 6)  # the whole is left as it was
    assert torch.equal(batch.rows(slice(1, 3)).completion_ids, batch.rows([1, 2]).completion_ids)


def test_positions_and_prompts():
    ids, mask = pad_left([[4], [5, 6, 7]], pad_token_id=9)
    assert ids.tolist() == [[9, 9, 4], [5, 6, 7]] and mask.tolist() == [
        [False, False, True],
        [True] * 3,
    ]
    assert positions(
        torch.cat([mask, torch.tensor([[True, True], [True, False]])], 1)
    ).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]


def test_the_gap():
    ours, theirs, mask = (
        torch.tensor([[-1.0, -2.0, math.nan]]),
        torch.tensor([[-1.5, -1.0, 3.0]]),
        torch.tensor([[True, True, False]]),
    )
    gap = rollout_gap(ours, theirs, mask)
    assert gap["mean"] == pytest.approx(0.75) and gap["max"] == pytest.approx(1.0)
    assert gap["kl"] == pytest.approx(((math.exp(0.5) - 1.5) + (math.exp(-1) - 0)) / 2)
    assert rollout_gap(ours, theirs, mask & False) == {"mean": 0.0, "max": 0.0, "kl": 0.0}


def test_the_gap_estimates_the_divergence():
    torch.manual_seed(0)
    p, q = torch.randn(30).log_softmax(0), torch.randn(30).log_softmax(0)
    drawn = torch.multinomial(p.exp(), 400_000, replacement=True)[None]
    gap = rollout_gap(q[drawn], p[drawn], torch.ones_like(drawn))
    assert gap["kl"] == pytest.approx(
        torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item(), rel=0.03
    )


@pytest.mark.parametrize("lora", [False, True])
def test_a_head_whose_forward_pass_computes_the_same_is_found(lora):
    "accelerate fetches weights before it, torch compiles it; somebody else's is another one."
    hooked, compiled, own = (dense_model("Llama", lora=lora) for _ in range(3))
    assert find_head(hooked) is not None
    attach_align_device_hook_on_blocks(hooked, execution_device={"": "cpu"})
    compiled.forward = torch.compile(compiled.forward)
    assert find_head(hooked) is not None and find_head(compiled) is not None
    plain = own.forward
    own.forward = lambda *given, **others: plain(*given, **others)
    assert find_head(own) is None
