"""The kernels of dense layers against their formulas, in Triton's interpreter where there is no
GPU."""

from dataclasses import replace

import pytest
import torch
from dense_models import dense_model

from grpo_nb.rollout import (
    decode_kernels,
    decode_ops,
    decoder,
    dense_kernels,
    filter_kernels,
    trial,
)
from grpo_nb.rollout.decode_ops import DecodeState, Norm
from grpo_nb.rollout.decoder import DenseDecoder
from grpo_nb.rollout.kv_cache import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Paged(DenseDecoder):
    "Pages of 16 tokens on any device."

    def shape_for(self, reach):
        return replace(super().shape_for(reach), page=16)


def after_a_step(model, kernels, lengths=(5, 20, 1)):
    "The logits of three rows after their prompts and one token more."
    prompts = [list(range(3, 3 + n)) for n in lengths]
    with torch.inference_mode():
        decoder = Paged(model, kernels=kernels)
        cache = KVCache(decoder.shape_for(24), lengths, [1, 1, 1], 4, DEVICE)
        state = DecodeState.start([n + 1 for n in lengths], 4, DEVICE)  # one was drawn
        state.last[:] = 11
        decoder.prefill(cache, [0, 1, 2], prompts)
        return decoder.logits(decoder.step(cache, state, torch.arange(3, device=DEVICE), 24))


@pytest.mark.parametrize("name, few", [("Qwen3", True), ("Phi3", False), ("Gemma3Text", False)])
def test_a_step_by_kernels_is_the_step_by_formulas(name, few, monkeypatch):
    "With adapters; by the kernels for few rows and by those for many."
    monkeypatch.setattr(decode_kernels, "_splits", lambda programs: 2)
    if not few:
        monkeypatch.setattr(decode_kernels, "MANY_ROWS", 0)
    sizes = dict(head_dim=32, hidden_size=48, intermediate_size=64, num_hidden_layers=1)
    windows = dict(sliding_window=16, layer_types=["sliding_attention"])
    sizes |= windows if name == "Gemma3Text" else {}
    model = dense_model(name, lora=True, **sizes).to(DEVICE)
    formulas, kernels = after_a_step(model, False), after_a_step(model, True)
    assert formulas.std() > 0.1
    torch.testing.assert_close(kernels, formulas, atol=2e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name, dtype", [("Qwen3", torch.float16), ("Gemma3Text", torch.float32)])
def test_a_decoder_of_kernels_passes_its_trial_and_a_wrong_one_does_not(name, dtype):
    sizes = dict(head_dim=32, hidden_size=48, intermediate_size=64, num_hidden_layers=1)
    windows = dict(sliding_window=16, layer_types=["sliding_attention"])
    sizes |= windows if name == "Gemma3Text" else {}
    model = dense_model(name, dtype, lora=True, **sizes).to(DEVICE)
    window = 16 if name == "Gemma3Text" else 0
    rows = trial.rows_to_try(40, window)
    with torch.no_grad():
        decoder = Paged(model, kernels=True)
        assert trial.difference(model, decoder, rows, window) is None
        decoder.scale *= 2
        assert "logits are" in trial.difference(model, decoder, rows, window)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_norms_round_where_the_formulas_do(first, after):
    """In 16 bits another place of rounding would change every third number. (Triton's interpreter
    does not round to bfloat16 as a card does, so these are of float16.)"""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape, dtype=torch.float16):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    gamma = torch.float16 if first else torch.float32
    by, other = (Norm(random(48, dtype=gamma), 1e-6, first) for _ in range(2))
    x, y = random(9, 48), random(9, 48)
    settings = by, other if after else None, torch.float16
    for mine, formula in zip(
        dense_kernels.add_norm(x, y, *settings), decode_ops.add_norm(x, y, *settings)
    ):
        assert (mine != formula).float().mean() < 0.02
    qkv, heads = random(5, 6 * 16), tuple(replace(n, gamma=n.gamma[:16]) for n in (by, other))
    formula = decode_ops.norm_heads(qkv, heads, 2, 16)
    mine = dense_kernels.norm_heads(qkv.clone(), heads, 2, 16)
    assert (mine != formula).float().mean() < 0.02 and not torch.equal(mine, qkv)


@pytest.mark.parametrize("name", decode_ops.ACTIVATIONS)
@pytest.mark.parametrize("together", [True, False])
def test_the_activation(name, together):
    both = 3 * torch.randn(3, 2 * 1100, device=DEVICE)
    gate, up = both.chunk(2, -1) if together else both.view(3, 2, -1).transpose(0, 1).clone()
    formula = decode_ops.ACTIVATIONS[name](gate) * up
    mine = dense_kernels.activate(gate, up, name)
    torch.testing.assert_close(mine, formula, atol=1e-5, rtol=1e-5)


def small(name="Qwen3"):
    sizes = dict(head_dim=32, hidden_size=48, intermediate_size=64, num_hidden_layers=1)
    return dense_model(name, lora=True, **sizes).to(DEVICE)


def otherwise(function, few=1000):
    "Its result for at most so many rows, a tenth too large."

    def changed(x, *a, **k):
        result = function(x, *a, **k)
        return 1.1 * result if len(x) <= few else result

    return changed


WRONG = [(decode_kernels, "attend"), (dense_kernels, "activate")]


@pytest.mark.parametrize("module, name", WRONG, ids=[name for _, name in WRONG])
def test_the_trial_finds_a_wrong_kernel(module, name, monkeypatch):
    monkeypatch.setattr(module, name, otherwise(getattr(module, name)))
    model = small()
    said = trial.tried(model, Paged(model, kernels=True))
    assert "logits are" in said


def test_the_trial_finds_a_kernel_that_is_wrong_for_one_row(monkeypatch):
    monkeypatch.setattr(decode_kernels, "attend", otherwise(decode_kernels.attend, few=1))
    model = small()
    assert trial.tried(model, Paged(model, kernels=True)).startswith("after token 2 its logits are")


def test_no_error_leaves_the_trial(monkeypatch):
    def broken(*a, **k):
        raise SyntaxError("line 1")

    monkeypatch.setattr(decode_kernels, "_launch_linear", broken)
    model = small()
    said = trial.tried(model, Paged(model, kernels=True))
    assert said == "a trial ended in SyntaxError: line 1"


def test_an_old_card_is_asked_to_draw_and_a_new_one_is_not(monkeypatch):
    "What is said of it. (Without a GPU the trial itself finds that there is none.)"
    tried, works, card = [], [True], torch.device("cuda", 0)
    monkeypatch.setattr(filter_kernels, "works", lambda *given: tried.append(given) or works[0])

    def why(capability, experts, head_dim=64):
        tried.clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return decoder.why_no_kernels(card, torch.float16, head_dim, experts, (None, 128))

    assert why((8, 0), None) is None and not tried
    for experts in (None, 32):
        assert why((7, 5), experts) is None and tried == [(card, torch.float16)]
    assert "sizes" in why((7, 5), None, head_dim=96) and not tried
    works[0] = False
    assert why((7, 5), None) == "a trial of the kernels that draw failed on this card"


def test_kernels_do_not_decode_on_a_card_that_is_not_the_current_one(monkeypatch):
    "Triton launches on the current one, and a step would be recorded there."
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    given = torch.float16, 64, None, (None,)
    said = decoder.why_no_kernels(torch.device("cuda", 1), *given)
    assert said == "it is on cuda:1, and the current device is cuda:0"


@pytest.mark.skipif(DEVICE == "cuda", reason="is about a card that is not there")
def test_a_card_that_fails_at_once():
    filter_kernels.works.cache_clear()
    with pytest.warns(UserWarning, match="do not work on this device"):
        assert not filter_kernels.works(torch.device("cuda", 0), torch.float16)
