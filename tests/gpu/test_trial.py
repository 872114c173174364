"""A decoder of kernels is believed by its trial on a GPU, a wrong one is not. (pytest -m gpu -s)"""

import time
import warnings

import pytest
import torch
from dense_models import dense_model
from peft import LoraConfig, get_peft_model

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import read_layers as trial
from grpo_nb.rollout.decoder import open_decoder
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# what the kernels take: heads of at least 32, windows of at least 16
SIZES = dict(head_dim=64, hidden_size=96, max_position_embeddings=512)
WINDOWS = {"Qwen2 windows": 16, "Mistral": 32, "Phi3": 16, "Gemma3Text": 16}
KINDS = ("Llama", "Qwen2", "Qwen2 windows", "Qwen3", "Mistral", "Phi3", "Gemma3Text", "gpt-oss")


def model_of(name, dtype, layers=8):
    "Of eight random layers, as rounding grows from layer to layer, with an adapter that is not 0."
    if name == "gpt-oss":
        model, _ = tiny_gpt_oss(
            num_hidden_layers=layers,
            head_dim=64,
            num_attention_heads=8,
            num_key_value_heads=2,
            sliding_window=16,
            num_experts=8,
            initializer_range=0.1,
        )
        lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        return get_peft_model(model.to("cuda", dtype), lora).to(dtype).eval()
    kinds = {}
    if name == "Gemma3Text":
        kinds = dict(layer_types=["sliding_attention", "full_attention"] * (layers // 2))
    windows = dict(sliding_window=WINDOWS[name]) if name in WINDOWS else {}
    changes = SIZES | windows | kinds | dict(num_hidden_layers=layers)
    return dense_model(name, lora=True, **changes).to("cuda", dtype)


def numbers(model, autocast=None):
    "How far two passes of the model and the decoder are apart, to be printed."
    decoder, _ = open_decoder(model, autocast)
    window = max([w for w in decoder.windows if w], default=0)
    special = trial.special_tokens(model.config)
    rows = trial.rows_to_try(decoder.head.weight.shape[0], window, special)
    with torch.no_grad(), torch.autocast("cuda", autocast or torch.bfloat16, autocast is not None):
        own = trial.own_logits(model, rows)
        again = trial.own_logits(model, rows, torch.finfo(decoder.dtype).eps)
        off = [
            trial.apart(y, x).mean().item()
            for x, y in zip(own, trial.decoded_logits(decoder, rows))
        ]
    return trial.apart(again, own).mean().item(), max(off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", KINDS)
def test_the_fast_way_is_not_lost(name, dtype):
    model = model_of(name, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is drawn from through its modules")
        engine = RolloutEngine(model, None)
        assert "Triton" in engine.way, engine.way
    start = time.perf_counter()
    assert open_decoder(model)[0] is not None  # with kernels compiled
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    spread, off = numbers(model)
    print(f"\n{name} {dtype}: two passes {spread:.1e}, decoder {off:.1e}, {took:.2f} s")
    assert took < 2


@pytest.mark.parametrize("name", ["Qwen3", "gpt-oss"])
def test_a_float32_model_under_autocast_is_believed(name):
    model = model_of(name, torch.float32)
    engine = RolloutEngine(model, None, autocast_dtype=torch.bfloat16)
    assert "Triton" in engine.way, engine.way
    print("\ntwo passes {:.1e}, decoder {:.1e}".format(*numbers(model, torch.bfloat16)))


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.filterwarnings("ignore:completions are drawn slowly")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "gpt-oss"])
def test_a_fault_is_found_and_what_is_drawn_is_the_modules(name, dtype):
    model = model_of(name, dtype, layers=4)
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way, engine.way
    layers = model.get_base_model().model.layers
    handle = layers[1].self_attn.register_forward_hook(
        lambda module, given, out: (4 * out[0], *out[1:])
    )
    assert engine.way.startswith("through the model's modules") and "logits are" in engine.way
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=())
    rollout = engine.generate([[5, 6, 7], [8]], params)
    theirs = RolloutEngine(model, None, through_modules=True).generate([[5, 6, 7], [8]], params)
    assert torch.equal(rollout.completion_ids[:, 0], theirs.completion_ids[:, 0])
    handle.remove()
    assert "Triton" in engine.way
