"""Dense families read from their own tensors, beside their modules."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from dense_models import CHANGING, FAMILIES, dense_model
from peft import LoraConfig, get_peft_model

from grpo_nb.rollout.decoder import open_decoder
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.read_layers import kind_of_tensor
from grpo_nb.rollout.sampling import SamplingParams, sample_tokens, stream_keys, stream_numbers

PROMPTS = [list(range(3, 16)), [5, 6], [7], [5, 6], [9, 3, 12, 11]]  # two of them equal
GREEDY = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(20, 21))


def both_ways(model, params=GREEDY, prompts=PROMPTS, **options):
    direct = RolloutEngine(model, None, **options)
    assert direct.way == "directly: plain tensors"
    modules = RolloutEngine(model, None, through_modules=True, **options)
    return direct.generate(prompts, params), modules.generate(prompts, params)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_draws_what_its_modules_draw(name, lora):
    "In float64 bit for bit (the log-probs are float32), in float32 to the order of the sums."
    for dtype, bound in ((torch.float64, 0), (torch.float32, 1e-5)):
        mine, theirs = both_ways(dense_model(name, dtype, lora))
        assert torch.equal(mine.completion_ids, theirs.completion_ids)
        assert mine.finish_reasons == theirs.finish_reasons
        torch.testing.assert_close(mine.logps, theirs.logps, atol=bound, rtol=0)
    assert 0 < theirs.lengths.min() and theirs.lengths.max() > 20


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3Text"])
@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bits_err_as_the_modules_do(name, autocast):
    "The distance of both ways from float64, over the same completions."
    exact, model = dense_model(name, torch.float64), dense_model(name)
    options = dict(autocast_dtype=torch.bfloat16) if autocast else {}
    model = model if autocast else model.bfloat16()
    engine = RolloutEngine(model, None, **options)
    rollout = engine.generate(PROMPTS, SamplingParams(max_tokens=20, stop_token_ids=(), seed=0))
    ours, theirs = [], []
    for prompt, ids, logps in zip(
        rollout.prompt_ids, rollout.completion_ids.tolist(), rollout.logps
    ):
        whole = torch.tensor([prompt + ids])

        def by(model, autocast=False, whole=whole, prompt=prompt, ids=ids):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
            return logits.double().log_softmax(-1)[range(len(ids)), ids]

        ours.append(logps - by(exact))
        theirs.append(by(model, autocast) - by(exact))
    ours, theirs = (torch.cat(gaps).square().mean().sqrt() for gaps in (ours, theirs))
    assert 1e-4 < ours < 1.3 * theirs


def test_what_is_drawn_with_filters_and_a_seed():
    "Each token is the one that its stream's number picks from the modules' distribution."
    model = dense_model("Qwen2", lora=True)
    for filters in (dict(n=3, top_p=0.8, seed=1), dict(repetition_penalty=1.3, top_k=9, seed=2)):
        params = SamplingParams(max_tokens=12, stop_token_ids=(20,), **filters)
        rollout = RolloutEngine(model, None).generate(PROMPTS[:3], params)
        keys = stream_keys(len(rollout.mask), params.seed)
        for i, (prompt, n) in enumerate(zip(rollout.prompt_ids, rollout.lengths.tolist())):
            whole = torch.tensor([[*prompt, *rollout.completion_ids[i, :n].tolist()]])
            with torch.no_grad():
                logits = model(whole).logits[0, len(prompt) - 1 : -1]
            seen = torch.zeros(n, logits.shape[-1], dtype=torch.bool)
            for t in range(n):
                seen[t, whole[0, : len(prompt) + t]] = True
            uniform = stream_numbers(keys[i].expand(n), torch.arange(n))
            tokens, logps = sample_tokens(logits, params, seen, uniform=uniform)
            assert torch.equal(tokens, rollout.completion_ids[i, :n])
            torch.testing.assert_close(logps, rollout.logps[i, :n], atol=1e-4, rtol=0)


def test_adapters_that_are_switched_off_merged_or_changed():
    model = dense_model("Llama", lora=True)
    engine = RolloutEngine(model, None)
    before = engine.generate(PROMPTS, GREEDY).logps
    with model.disable_adapter():
        mine, theirs = both_ways(model)
    assert torch.equal(mine.completion_ids, theirs.completion_ids)
    assert not torch.allclose(mine.logps[:, 0], before[:, 0])
    with torch.no_grad():
        layer = model.get_base_model().model.layers[1]
        layer.mlp.down_proj.lora_B["default"].weight.mul_(-2)
    assert not torch.allclose(engine.generate(PROMPTS, GREEDY).logps[:, 0], before[:, 0])
    mine, _ = both_ways(model)
    model.merge_adapter()
    merged, _ = both_ways(model)
    torch.testing.assert_close(mine.logps, merged.logps, atol=1e-3, rtol=0)


def test_models_that_cannot_be_read_are_refused():
    dora, saved = (dense_model("Llama") for _ in range(2))
    dora = get_peft_model(dora, LoraConfig(r=2, use_dora=True, target_modules=["up_proj"]))
    norms = dict(target_modules=["up_proj"], modules_to_save=["input_layernorm"])
    saved = get_peft_model(saved, LoraConfig(r=2, **norms))
    part = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    for model, reason in (
        (dora, "DoRA"),
        (saved, "a norm is a ModulesToSaveWrapper"),
        (dense_model("Llama", hidden_act="gelu"), "its activation is 'gelu'"),
        (dense_model("Phi3", rope_parameters=part), "turns a part of each head"),
    ):
        decoder, why = open_decoder(model)
        assert decoder is None and reason in why


def test_a_module_that_computes_the_same_is_read():
    replaced = dense_model("Llama")
    replaced.model.layers[1].mlp = dense_model("Mistral").model.layers[1].mlp
    mine, theirs = both_ways(replaced)
    assert torch.equal(mine.completion_ids, theirs.completion_ids)
    torch.testing.assert_close(mine.logps, theirs.logps, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_layers_that_do_not_run_are_not_read():
    "transformers runs as many layers as the configuration says, and all if there are fewer."
    fewer, appended, short = (dense_model("Llama", num_hidden_layers=4) for _ in range(3))
    fewer.config.num_hidden_layers = 2
    appended.model.layers.append(appended.model.layers[0])
    assert open_decoder(fewer)[0] is None and open_decoder(appended)[0] is None
    del short.model.layers[2:]
    mine, theirs = both_ways(short)
    assert torch.equal(mine.completion_ids, theirs.completion_ids)
    del fewer.model.layers[2:]
    assert torch.equal(both_ways(fewer)[0].logps, mine.logps)


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_layers_that_differ_from_the_first_or_from_how_they_were_made_are_not_read():
    first, second, both = (dense_model("Llama") for _ in range(3))
    for model, changed in ((first, [0]), (second, [1]), (both, [0, 1])):
        for number in changed:
            model.model.layers[number].self_attn.scaling *= 2
    assert open_decoder(first)[0] is None and open_decoder(second)[0] is None
    mine, theirs = both_ways(both)
    torch.testing.assert_close(mine.logps, theirs.logps, atol=1e-5, rtol=0)
    shifted = dense_model("Gemma3Text")
    del shifted.model.layers[0]
    assert open_decoder(shifted)[0] is None


def test_the_forward_pass_of_a_prepared_model_is_its_own_in_another_format(monkeypatch):
    "accelerate sets one on the model; what was set before it counts."
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})  # another test's has its format
    prepare = Accelerator(mixed_precision="bf16", cpu=True).prepare
    prepared, adapted = dense_model("Llama"), dense_model("Llama", lora=True)
    for model in (prepared, adapted):
        prepare(prepare(model))
        decoder, why = open_decoder(model, torch.bfloat16)
        assert "forward" in vars(model) and decoder is not None, why
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
        assert open_decoder(model)[0] is not None
    both = dense_model("Llama")
    real = both.forward

    @functools.wraps(real)
    def doubled(*args, **given):
        out = real(*args, **given)
        out.logits = 2 * out.logits
        return out

    both.forward = doubled
    prepare(both)
    with pytest.warns(UserWarning, match="its tensors alone give something else"):
        assert open_decoder(both, torch.bfloat16)[0] is None


class Packed(torch.Tensor):
    "A quantizer's tensor: it looks like its weights, and may hold them in any layout."


@pytest.mark.parametrize(
    "where",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.up_proj.base_layer.weight",
        "model.layers.0.self_attn.k_proj.base_layer.bias",
        "model.layers.0.self_attn.k_proj.lora_A.default.weight",
    ],
)
def test_weights_in_another_kind_of_tensor_are_not_read(where):
    model = dense_model("Qwen2", lora=True)
    base = model.get_base_model()
    name, attribute = where.rsplit(".", 1)
    module = base.get_submodule(name)
    held = getattr(module, attribute).detach().as_subclass(Packed)
    setattr(module, attribute, torch.nn.Parameter(held, requires_grad=False))
    assert type(getattr(module, attribute)) is Packed
    assert open_decoder(model) == (None, f"{name} has weights in a Packed")


def test_a_layer_in_four_bits_keeps_its_own_kind_of_tensor():
    "Its module computes the product."
    in_four_bits = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn"})
    for kind, expected in ((in_four_bits, None), (torch.nn.Linear, "Packed")):
        linear = kind(4, 4)
        linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Packed))
        assert kind_of_tensor(linear) == expected


def test_a_window_that_no_row_outgrows_takes_no_ring():
    decoder = open_decoder(dense_model("Mistral", sliding_window=64))[0]
    assert decoder.shape_for(64).windows == (None, None)
    assert decoder.shape_for(65).windows == (64, 64)


@pytest.mark.full  # with the extra [gpu], whose bitsandbytes computes on a CPU too
def test_weights_in_four_bits_go_through_their_own_product():
    bitsandbytes = pytest.importorskip(
        "bitsandbytes", reason="needs bitsandbytes: pip install grpo_nb[gpu]"
    )
    model = dense_model("Llama", hidden_size=128, intermediate_size=128, head_dim=32)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    packed = bitsandbytes.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, quant_type="nf4"
                    )
                    packed.load_state_dict(linear.state_dict())
                    setattr(part, name, packed.to("cpu"))
    exact = dense_model("Llama", hidden_size=128, intermediate_size=128, head_dim=32)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).eval()
    mine, theirs = both_ways(model)
    assert torch.equal(mine.completion_ids, theirs.completion_ids)
    # on some processors the product rounds to bfloat16
    assert (mine.logps - theirs.logps).abs().mean() < 5e-3
    assert not torch.allclose(mine.logps[:, 0], both_ways(exact)[0].logps[:, 0], atol=1e-3)


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_up_to_the_border_of_scaled_positions_what_is_drawn_is_right(name, modules):
    "Beyond it every key would be turned otherwise, and it is refused."
    model = dense_model(name, lora=True, **CHANGING[name])
    engine = RolloutEngine(model, None, through_modules=modules)
    params = SamplingParams(max_tokens=12, stop_token_ids=(), seed=0)
    rollout = engine.generate([list(range(3, 15)), [5, 6]], params)
    assert engine.way.startswith("through" if modules else "directly")
    for prompt, ids, logps in zip(rollout.prompt_ids, rollout.completion_ids, rollout.logps):
        whole = torch.tensor([[*prompt, *ids.tolist()]])
        with torch.no_grad():
            own = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = own.gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(logps, expected, atol=1e-4, rtol=0)
    kind = CHANGING[name]["rope_parameters"]["rope_type"]
    with pytest.raises(ValueError, match=f"longest sequence is 24 .beyond it {kind}, its position"):
        engine.generate([list(range(3, 16))], params)
