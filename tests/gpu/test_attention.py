"""Attention with sinks on a CUDA device: every backend against the formula in float64, against
transformers' FlexAttention path, memory, recompilations. (pytest -m gpu)"""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.flex_attention import flex_attention_forward

import grpo_nb.model.attention as attention
from grpo_nb.model import limits
from grpo_nb.model.attention import choose_backend, sink_attention
from grpo_nb.model.masks import Mask
from grpo_nb.model.tiny import tiny_gpt_oss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAST = ["triton", "sdpa", "sdpa_lean", "flash"]


def tensors(B, Hq, Hk, Lq, Lk, D, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, device="cuda").to(dtype)

    return [draw(B, Hq, Lq, D), draw(B, Hk, Lk, D), draw(B, Hk, Lk, D), 2 * draw(Hq)], draw(
        B, Hq, Lq, D
    )


def value_and_gradients(function, inputs, upstream, **options):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs, **options)
    return [out.detach(), *torch.autograd.grad((out * upstream.to(out.dtype)).sum(), inputs)]


def errors(result, truth):
    "Relative error of the output, dq, dk, dv and dsinks."
    assert all(x.isfinite().all() for x in result)
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(result, truth, strict=True)]


CASES = {
    "full": dict(),
    "window": dict(window=128),
    "padded": dict(pad_lens=[0, 300]),
    "window, padded": dict(window=128, pad_lens=[700, 5]),
    "offset": dict(offset=200),
    "window, offset": dict(window=128, offset=200),
    "tensor offset": dict(offset=200, as_tensor=True),
    "all padding": dict(pad_lens=[777, 3]),
}


def case(name, dtype, D=64):
    given = dict(CASES[name])
    offset = given.pop("offset", 0)
    inputs, upstream = tensors(2, 8, 2, 777, 777 + offset, D, dtype)
    options = dict(
        window=given.get("window"),
        offset=torch.tensor(offset, device="cuda") if given.get("as_tensor") else offset,
    )
    if "pad_lens" in given:
        options["pad_lens"] = torch.tensor(given["pad_lens"], device="cuda")
    return inputs, upstream, options


@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.bfloat16, 0.01), (torch.float16, 0.002), (torch.float32, 2e-3)],
    ids=["bf16", "fp16", "fp32"],
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", FAST)
def test_values_and_gradients_against_float64(backend, name, dtype, bound):
    "Flex hands float32 to sdpa."
    inputs, upstream, options = case(name, dtype)
    if backend == "triton" and dtype == torch.float32:
        with pytest.raises(ValueError, match="16 bits"):
            sink_attention(*inputs, backend=backend, **options)
        return
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    ours = errors(
        value_and_gradients(sink_attention, inputs, upstream, backend=backend, **options), truth
    )
    assert max(ours) < bound, ours


LONG = {
    "full": (1024, {}),
    "a length that is rounded up": (777, {}),
    "padded": (777, dict(pad_lens=[0, 300])),
    "after a short prompt": (777, dict(offset=150)),
    "after a long one": (777, dict(offset=300)),
    # dense models that are loaded by name have none
    "without sinks, padded": (777, dict(pad_lens=[0, 300])),
    "without sinks, after a short prompt": (777, dict(offset=150)),
}


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="cuDNN's kernel is taken from compute capability 9.0 on",
)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.bfloat16, 0.01), (torch.float16, 0.002)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", LONG)
def test_long_full_layers_by_cudnn(name, dtype, bound, parts, monkeypatch):
    "All heads at once, and some at a time."
    length, given = LONG[name]
    offset = given.get("offset", 0)
    inputs, upstream = tensors(2, 16, 4, length, length + offset, 64, dtype)
    attend = sink_attention
    if name.startswith("without sinks"):
        inputs, attend = inputs[:3], functools.partial(sink_attention, sinks=None)
    options = {
        key: torch.tensor(value, device="cuda") if key == "pad_lens" else value
        for key, value in given.items()
    }
    monkeypatch.setattr(limits, "SHORTEST_CUDNN", 512)
    monkeypatch.setattr(
        limits, "GRADIENT_BYTES", 4 // parts * attention._gradient_bytes(inputs[0], inputs[1])
    )
    expected = "triton" if name == "after a long one" else "flash"
    assert (
        choose_backend(
            *inputs[:2],
            Mask(options.get("pad_lens"), length, length + offset, offset, None, device="cuda"),
        )[0]
        == expected
    )
    truth = value_and_gradients(
        attend, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours = errors(
            value_and_gradients(attend, inputs, upstream, backend="flash", **options), truth
        )
    calls = {
        event.key: event.count for event in profile.key_averages() if "cudnn_attention" in event.key
    }
    assert max(ours) < bound, ours
    assert (name == "after a long one") == (not calls), calls
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose_backend(*inputs[:2])[0] == "triton"


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("D", [16, 128])
def test_other_head_sizes(backend, D):
    inputs, upstream, options = case("padded", torch.bfloat16, D)
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    assert (
        max(
            errors(
                value_and_gradients(sink_attention, inputs, upstream, backend=backend, **options),
                truth,
            )
        )
        < 0.01
    )


@pytest.mark.parametrize("window", [None, 128])
def test_no_less_exact_than_transformers_flex(window):
    inputs, upstream = tensors(1, 64, 8, 2048, 2048, 64, torch.bfloat16)
    mask = Mask(None, 2048, 2048, 0, window, device="cuda")
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), mask=mask, backend="eager"
    )

    def theirs(q, k, v, sinks):
        return flex_attention_forward(
            SimpleNamespace(training=True), q, k, v, mask.block(), scaling=64**-0.5, s_aux=sinks
        )[0].transpose(1, 2)

    their = errors(value_and_gradients(theirs, inputs, upstream), truth)
    for backend in FAST:
        ours = errors(
            value_and_gradients(sink_attention, inputs, upstream, mask=mask, backend=backend), truth
        )
        print(
            f"window {window}, {backend}: {[f'{e:.4f}' for e in ours]}, transformers' flex: "
            f"{[f'{e:.4f}' for e in their]}"
        )
        assert all(a <= 1.02 * b for a, b in zip(ours, their)), backend


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", FAST)
def test_memory_grows_with_the_length_alone(backend, window, padded):
    def peak(L):
        inputs, upstream = tensors(1, 64, 8, L, L, 64, torch.bfloat16)
        mask = Mask(
            torch.tensor([L // 3], device="cuda") if padded else None,
            L,
            L,
            0,
            window,
            device="cuda",
        )
        value_and_gradients(sink_attention, inputs, upstream, mask=mask, backend=backend)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value_and_gradients(sink_attention, inputs, upstream, mask=mask, backend=backend)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(8192), peak(16384)
    assert long < 2.2 * short < 2.2 * 64 * 8192**2  # less than a byte a score


@pytest.mark.parametrize("window", [None, 128])
def test_the_kernel_of_a_t4(window, monkeypatch):
    """float16 through the memory-efficient kernel alone, keys copied for each query head, as a card
    of compute capability 7.5 runs it."""
    monkeypatch.setattr(attention, "_kernel_shares_keys", lambda q, k, v: False)
    monkeypatch.setattr(
        attention, "_linear_kernels", lambda q, masked: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    )
    monkeypatch.setattr(attention, "_value_width", lambda q: q.shape[-1])
    inputs, upstream, options = case("padded", torch.float16)
    options["window"] = window
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    assert (
        max(
            errors(
                value_and_gradients(sink_attention, inputs, upstream, backend="sdpa", **options),
                truth,
            )
        )
        < 0.003
    )


@pytest.mark.parametrize("name", ["full", "window", "padded", "window, padded", "tensor offset"])
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_reading_a_prompt_never_waits_for_the_gpu(backend, name):
    inputs, _, options = case(name, torch.bfloat16)
    with torch.no_grad():
        sink_attention(*inputs, backend=backend, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sink_attention(*inputs, backend=backend, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_on_a_card_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs, upstream, options = case("padded", torch.bfloat16)
    here = value_and_gradients(sink_attention, inputs, upstream, backend="triton", **options)
    there = [x.to("cuda:1") for x in (*inputs, upstream, options["pad_lens"])]
    *inputs, upstream, pads = there
    options |= dict(pad_lens=pads, backend="triton")
    assert torch.cuda.current_device() == 0
    for a, b in zip(here, value_and_gradients(sink_attention, inputs, upstream, **options)):
        assert torch.equal(a, b.to(a.device))


def test_auto_is_triton_here_and_trains():
    inputs, upstream, options = case("full", torch.bfloat16)
    assert choose_backend(*inputs[:2])[0] == (
        "triton" if torch.cuda.get_device_capability() >= (8, 0) else "sdpa_lean"
    )
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    assert (
        max(errors(value_and_gradients(sink_attention, inputs, upstream, **options), truth)) < 0.01
    )


@pytest.mark.parametrize(
    "name, dtype, bound",
    [
        (name, *kind)
        for kind in ((torch.float32, 1e-2), (torch.bfloat16, 0.1))
        for name in ("sink", "sink_triton", "sink_flex", "sink_key", "sink_lse")
        if kind[0] != torch.float32 or name != "sink_triton"
    ],
    ids=str,
)
def test_a_model_on_the_gpu(name, dtype, bound):
    "Triton's kernels know 16 bits only."
    model, tokenizer = tiny_gpt_oss(num_hidden_layers=3)
    model = model.to("cuda", dtype)
    batch = tokenizer(["1+2=" * 15, "12+34=" * 17, "7"], padding=True, return_tensors="pt").to(
        "cuda"
    )
    real = batch["attention_mask"].bool()

    def asked(implementation):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits[real].float()
        logits.log_softmax(-1)[:, 3].sum().backward()
        return (
            logits.detach(),
            model.model.layers[1].self_attn.sinks.grad.float().clone(),
            model.generate(
                **batch, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
        )

    logits, sinks, written = asked("eager")
    ours, our_sinks, our_text = asked(name)
    assert (
        ours.isfinite().all()
        and (ours - logits).abs().median() < bound * logits.std()
        and (our_sinks - sinks).norm() < 3 * bound * sinks.norm()
    )
    if dtype == torch.float32:
        assert (our_text == written).float().mean() > 0.99
