"""Decoders beside the forward pass of transformers: what differs is not believed."""

import copy
import warnings

import pytest
import torch
import transformers
from dense_models import dense_model
from peft import LoraConfig, get_peft_model

from grpo_nb.model.limits import FAMILIES, Family
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import read_layers as trial
from grpo_nb.rollout.decoder import DenseDecoder, open_decoder
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams

PROMPTS = [[5, 9, 3, 12, 11, 4], [7, 8]]


def of_family(name, **changes):
    "A small random model of a family that the table does not have."
    sizes = dict(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def own_logps(model, rollout):
    "Log-probs of what was drawn, each row alone through transformers' forward pass."
    found = torch.zeros_like(rollout.logps)
    for row, (prompt, n) in enumerate(zip(rollout.prompt_ids, rollout.lengths.tolist())):
        ids = rollout.completion_ids[row, :n]
        whole = torch.tensor([[*prompt, *ids.tolist()]])
        with torch.no_grad():
            logps = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found[row, :n] = logps.gather(-1, ids[:, None])[:, 0]
    return found


def drawn_rightly(model, tokens=12, prompts=PROMPTS):
    "The engine after it has drawn what the model's own forward pass says."
    engine = RolloutEngine(model, None)
    params = SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=0)
    rollout = engine.generate(prompts, params)
    torch.testing.assert_close(rollout.logps, own_logps(model, rollout), atol=2e-4, rtol=0)
    return engine


GRANITE = dict(
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.1,
    logits_scaling=4.0,
)


@pytest.mark.parametrize(
    "name, differs, changes, reason",
    [
        ("Granite", {}, GRANITE, "after the prompts its logits are"),
        ("SmolLM3", {}, {}, "after the prompts its logits are"),  # layers without positions
        ("Olmo2", dict(head_norms=True), {}, "has no attribute 'input_layernorm'"),
        ("Cohere", {}, {}, "its layers cannot be read"),
        ("StableLm", {}, {}, "turns a part of each head"),
    ],
)
def test_a_family_that_is_told_wrongly_goes_through_its_modules(
    monkeypatch, name, differs, changes, reason
):
    monkeypatch.setitem(FAMILIES, name, Family(name, **differs))
    model = of_family(name, **changes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = drawn_rightly(model)
        assert engine.way.startswith("through the model's modules: ")
        assert reason in engine.way
    said = [one for one in said if "which is slower" in str(one.message)]
    assert len(said) == (reason != "turns a part of each head")  # refused before it is tried


class Doubled(transformers.models.llama.modeling_llama.LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def own_class(model):
    model.model.layers[0].mlp.__class__ = Doubled


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: 1.2 * out)


def hook_before(model):
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, given: (1.2 * given[0],))


def set_on(model):
    model.model.layers[1].mlp.forward = lambda x: x


def activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def scaling(model):
    model.model.layers[1].self_attn.scaling *= 2


def fewer_layers(model):
    model.config.num_hidden_layers = 1


def around(model):
    forward = model.forward

    def tripled(*given, **others):
        out = forward(*given, **others)
        out.logits = 3 * out.logits
        return out

    model.forward = tripled


def bias(model):
    linear = model.model.layers[0].self_attn.o_proj
    linear.register_forward_hook(lambda module, given, out: out + 0.1)


def attention(model):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def flatter(module, q, k, v, mask, **others):
        return sdpa_attention_forward(module, 0.5 * q, k, v, mask, **others)

    AttentionInterface.register("flatter", flatter)
    AttentionMaskInterface.register("flatter", sdpa_mask)
    model.config._attn_implementation = "flatter"


def norm_without_weight(model):
    norm = model.model.norm
    norm.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:])


PLANTED = (
    own_class,
    hook,
    hook_before,
    set_on,
    activation,
    scaling,
    fewer_layers,
    around,
    bias,
    attention,
    norm_without_weight,
)


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("plant", PLANTED)
def test_what_computes_something_else_goes_through_its_modules(plant, lora):
    model = dense_model("Llama", lora=lora)
    assert RolloutEngine(model, None).way == "directly: plain tensors"
    engine = RolloutEngine(model, None)
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    plant(model.get_base_model() if lora else model)
    assert "logits are" in engine.way  # it was tried before, and is tried again
    drawn_rightly(model)


def epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def slower_rotation(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


@pytest.mark.parametrize("change", [epsilon, slower_rotation])
def test_what_is_read_from_the_modules_is_read_as_it_is(change):
    model = dense_model("Llama")
    change(model)
    assert drawn_rightly(model).way == "directly: plain tensors"


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_a_function_of_transformers_that_was_replaced(monkeypatch):
    "The class, its forward pass and its hooks are what they were; only its numbers tell."
    from transformers.models.llama import modeling_llama

    turn = modeling_llama.apply_rotary_pos_emb
    backwards = lambda q, k, cos, sin, *others: turn(q, k, cos, -sin, *others)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    engine = drawn_rightly(dense_model("Llama"))
    assert "logits are" in engine.way


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.parametrize("where", ["norm", "mlp.router", "self_attn"])
def test_a_gpt_oss_that_computes_something_else(where):
    model, tokenizer = tiny_gpt_oss()
    layer = model.model.layers[1]
    if where == "norm":
        layer.input_layernorm.variance_epsilon = 0.1  # the decoder has the configuration's
    elif where == "self_attn":
        layer.self_attn.scaling *= 2
    else:
        layer.mlp.router.register_forward_hook(
            lambda module, given, out: (out[0], out[1].flip(-1), *out[2:])
        )
    assert "logits are" in RolloutEngine(model, tokenizer).way
    drawn_rightly(model)


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.parametrize("plant", [hook, set_on, scaling, around, norm_without_weight])
def test_in_sixteen_bits_a_fault_is_not_taken_for_rounding(plant):
    model = dense_model("Qwen2", torch.bfloat16)
    assert open_decoder(model)[0] is not None
    if plant is hook:
        model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: 2 * out)
    else:
        plant(model)
    assert open_decoder(model)[0] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_only_rounding_is_believed_also_where_experts_change(dtype):
    "Eight layers of random experts pass each rounding on, until half of all logits is rounding."
    sizes = dict(num_hidden_layers=8, num_experts=16, initializer_range=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            model = tiny_gpt_oss(seed, **sizes)[0].to(dtype)
            decoder, why = open_decoder(model)
            assert decoder is not None, why


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_past_a_window_it_is_tried_by_the_first_batch_that_reaches_it(monkeypatch):
    "A decoder that takes a window of 300 for one of 299."
    real = DenseDecoder._read_layers

    def wrong(self):
        real(self)
        self.windows = tuple(w and w - 1 for w in self.windows)

    model = dense_model("Mistral", sliding_window=300, max_position_embeddings=512)
    right = drawn_rightly(model, 4, [list(range(3, 35)) * 10])
    assert right.way == "directly: plain tensors"
    monkeypatch.setattr(DenseDecoder, "_read_layers", wrong)
    engine = drawn_rightly(model)  # short rows
    assert engine.way == "directly: plain tensors"
    long = [list(range(3, 35)) * 10]
    params = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)
    rollout = engine.generate(long, params)
    torch.testing.assert_close(rollout.logps, own_logps(model, rollout), atol=2e-4, rtol=0)
    assert "(beyond a window of 299)" in engine.way


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_an_adapter_that_is_zero_at_first_is_tried_when_it_is_not():
    model = get_peft_model(
        dense_model("Llama"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    ).eval()
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    forward = type(layer).forward

    class Halved(type(layer)):
        "LoRA, and then half of what it adds."

        def forward(self, x):
            return 0.5 * (forward(self, x) + self.base_layer(x))

    layer.__class__ = Halved
    engine = RolloutEngine(model, None)
    assert engine.way == "directly: plain tensors"  # there is nothing to halve
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    assert "logits are" in engine.way


def test_a_trial_is_made_once_and_again_after_1_2_4_updates(monkeypatch):
    counted, real = [], trial.difference
    monkeypatch.setattr(trial, "difference", lambda *given: counted.append(1) or real(*given))
    model = dense_model("Qwen3", lora=True)
    engine = RolloutEngine(model, None)
    for version in range(9):
        engine.publish(model, version)
        for mode in (True, False):
            model.train(mode)
            engine.generate(PROMPTS, SamplingParams(max_tokens=2))
            assert model.training is mode
    assert len(counted) == 5  # 0, 1, 2, 4, 8


def test_a_trial_draws_no_random_number_and_changes_nothing():
    model = dense_model("Gemma3Text", lora=True).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert open_decoder(model)[0] is not None
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_without_room_for_a_trial_the_modules_are_called_and_it_is_tried_again(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = dense_model("Llama")
    engine = RolloutEngine(model, None)
    with monkeypatch.context() as tight:
        tight.setattr(trial, "difference", full)
        with pytest.warns(UserWarning, match="slower, as there was no room to try its tensors"):
            assert "modules: there was no room to try its tensors: end other" in engine.way
    assert engine.way == "directly: plain tensors"


def test_numbers_that_are_none_are_refused():
    model = dense_model("Llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
    with pytest.warns(UserWarning, match="nan"):
        assert open_decoder(model)[0] is None


def test_attention_that_changes_at_far_positions_is_refused_by_its_class():
    "Ministral 3's queries grow from some position on, which no short row shows."
    yarn = dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=16,
        llama_4_scaling_beta=5.0,
    )
    far = of_family("Ministral3", rope_parameters=yarn, head_dim=16)
    model = dense_model("Llama", rope_parameters=yarn)
    for one, other in zip(model.model.layers, far.model.layers):
        one.self_attn = other.self_attn
    reason = "a Ministral3Attention stands where a LlamaAttention is expected"
    assert open_decoder(model) == (None, reason)


def test_tokens_that_stand_for_pictures_are_not_tried():
    config = transformers.Gemma3Config(image_token_index=7, boi_token_index=8)
    special = trial.special_tokens(config)
    assert {7, 8} <= special
    rows = trial.rows_to_try(12, special=special)
    assert not special & {i for row in rows for i in row} and max(map(max, rows)) < 12
