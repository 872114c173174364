"Models as a run takes them: what is wrapped, frozen, recomputed, refused."

import warnings

import pytest
import torch
from dense_models import dense_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from small_mixtures import mixture
from small_runs import small_model

from grpo_nb import GRPOConfig
from grpo_nb.training.policy_logprobs import (
    TrainingBatch,
    completion_logps,
    plain_completion_logps,
    reads_a_row,
)
from grpo_nb.training.policy_model import (
    Precision,
    describe_trainable,
    load_policy,
    quicken,
    recompute_layers,
)

PLAIN = GRPOConfig(gradient_checkpointing=False)
LORA = LoraConfig(r=2, target_modules=["q_proj"])


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_an_adapter_freezes_the_rest():
    full = load_policy(small_model()[0], PLAIN)
    adapted = load_policy(small_model()[0], PLAIN, LORA)
    assert len(trainable(full)) == len(list(full.parameters()))
    assert trainable(adapted) and all(".lora_" in name for name in trainable(adapted))
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert describe_trainable(adapted).startswith(f"{count:,} of ")
    assert describe_trainable(adapted).endswith("adapters on q_proj")
    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # the second wraps the first
    experts = load_policy(small_model()[0], PLAIN, LoraConfig(r=2, target_parameters=both))
    assert describe_trainable(experts).endswith("adapters on experts")


@pytest.mark.parametrize("adapter", [None, LORA])
def test_layers_are_recomputed_as_the_settings_say_now(adapter):
    model = load_policy(small_model()[0], GRPOConfig(gradient_checkpointing=True), adapter)

    def on():
        return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())

    assert on()
    recompute_layers(model, PLAIN)
    assert not on()


def test_a_folder_is_loaded_in_float32(tmp_path):
    small_model()[0].to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path), PLAIN)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_what_would_not_train_or_not_be_saved_is_refused():
    frozen = small_model()[0].requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        load_policy(frozen, PLAIN)
    beside = get_peft_model(small_model()[0], LORA)
    next(p for name, p in beside.named_parameters() if "norm" in name).requires_grad_(True)
    with pytest.raises(ValueError, match="1 weights of the model itself train beside"):
        load_policy(beside, PLAIN)
    prompts = get_peft_model(
        small_model()[0], PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ValueError, match="writes tokens of its own before a prompt"):
        load_policy(prompts, PLAIN)
    other = LoraConfig(r=3, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="the model has an adapter with r="):
        load_policy(get_peft_model(small_model()[0], LORA), PLAIN, other)
    with pytest.raises(ValueError, match="model_init_kwargs is for a model given by name"):
        load_policy(small_model()[0], GRPOConfig(model_init_kwargs={"dtype": "bfloat16"}))


def test_a_head_in_float32_is_one_linear_layer():
    wide = GRPOConfig(gradient_checkpointing=False, cast_lm_head_to_fp32=True)
    load_policy(small_model()[0], wide, LORA)
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=True needs a head"):
        load_policy(small_model()[0], wide, LoraConfig(r=2, target_modules=["lm_head"]))


def test_two_weights_that_are_called_one_are_refused(tmp_path):
    "Set free in the config, transformers reads both back."
    model = mixture("Lfm2", vocab_size=40, tie_word_embeddings=True)
    load_policy(model, PLAIN)
    model.lm_head.weight = torch.nn.Parameter(1.5 * model.lm_head.weight.detach())
    with pytest.raises(ValueError, match="are two weights, and the model's config says"):
        load_policy(model, PLAIN)
    model.config.tie_word_embeddings = False
    load_policy(model, PLAIN).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)


def some_completions():
    "Two groups of three completions of unlike lengths, with prompts of unlike lengths."
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 40, (2, 9), generator=generator).repeat_interleave(3, 0)
    there = torch.arange(9) >= torch.tensor([0, 4]).repeat_interleave(3)[:, None]
    drawn = torch.arange(8) < torch.tensor([8, 3, 5, 1, 7, 8])[:, None]
    ids = torch.randint(3, 40, (6, 8), generator=generator) * drawn
    return TrainingBatch(prompts * there, there, ids, drawn, drawn, torch.ones(6))


@pytest.mark.parametrize("name", ["Llama", "Qwen2 windows", "Qwen3", "Mistral"])
def test_a_quick_model_gives_the_log_probs_and_gradients_of_transformers_own_pass(name):
    batch, found = some_completions(), []
    weights = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    for quick in (False, True):
        model = dense_model(name, torch.float64, lora=True)
        if quick:
            assert quicken(model, GRPOConfig()) and reads_a_row(model)
        compute = completion_logps if quick else plain_completion_logps
        logps = compute(model, batch)
        logps = logps[0] if quick else logps
        (logps * weights).sum().backward()
        found.append([logps.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for plain, quick in zip(*found):
        torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-4)  # norms are in float32


@pytest.mark.parametrize("name", ["Phi3", "Gemma3Text", "Llama"])
def test_another_family_or_a_named_attention_stays_as_it_is(name):
    model = dense_model(name)
    before = model.config._attn_implementation
    named = {"attn_implementation": "sdpa"} if name == "Llama" else None
    assert not quicken(model, GRPOConfig(model_init_kwargs=named))
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("asked", [None, False])
def test_float32_on_a_card_without_bfloat16_is_said_if_nobody_asked(bfloat16, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        precision = Precision(GRPOConfig(bf16=asked), torch.device("cuda"))
    assert precision.name == ("bf16" if bfloat16 and asked is None else "no")
    slow = not bfloat16 and asked is None
    assert ["fp16=True is much faster" in str(one.message) for one in said] == [True] * slow


def four_bit_twins():
    "A Qwen2, which has biases, with its layers in NF4, and one with torch's of the same values."
    bitsandbytes = pytest.importorskip(
        "bitsandbytes", reason="needs bitsandbytes: pip install grpo_nb[gpu]"
    )
    sizes = dict(hidden_size=128, intermediate_size=128, head_dim=32)
    models = dense_model("Qwen2", **sizes), dense_model("Qwen2", **sizes)
    for name, linear in list(models[0].model.named_modules()):
        if isinstance(linear, torch.nn.Linear):
            packed = bitsandbytes.nn.Linear4bit(
                *(linear.in_features, linear.out_features, linear.bias is not None),
                quant_type="nf4",
            )
            packed.load_state_dict(linear.state_dict())
            models[0].model.set_submodule(name, packed.to("cpu"))
            known = packed.weight.data, packed.weight.quant_state
            exact = bitsandbytes.functional.dequantize_4bit(*known)
            models[1].model.get_submodule(name).weight.data = exact.float()
    return models


@pytest.mark.full  # with the extra [gpu], whose bitsandbytes computes on a CPU too
@pytest.mark.parametrize("drawn_before", [False, True])
def test_an_adapter_on_four_bits_has_its_gradient_behind_a_completion(drawn_before):
    "bitsandbytes' product for drawing on a CPU has none."
    ids, found = torch.arange(4, 20)[None], []
    for model in four_bit_twins():
        if drawn_before:
            with torch.no_grad():
                model.eval()(ids)
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(0)
        policy = load_policy(model, PLAIN, lora).eval()
        with torch.no_grad():
            policy(ids)
        policy(ids, labels=ids).loss.backward()
        found.append([p.grad for p in policy.parameters() if p.requires_grad])
    off = 0.1 if drawn_before else 1e-3  # laying out rounds scales to bfloat16
    for own, exact in zip(*found, strict=True):
        assert (own - exact).norm() < off * exact.norm()


@pytest.mark.full
def test_layers_in_four_bits_round_as_torchs():
    """In bfloat16 most of what an adapter adds after a few updates is lost in the last digit, on
    the trainer and on the sampler alike. bitsandbytes' layers keep the float32 of their input."""
    ids, found = torch.arange(4, 36)[None], []
    for model in four_bit_twins():
        torch.manual_seed(0)
        policy = load_policy(model, PLAIN, LoraConfig(r=2, target_modules="all-linear")).eval()
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=1e-3)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(policy(ids).logits)
    torch.testing.assert_close(*found, rtol=0, atol=0)
