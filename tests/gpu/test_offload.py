"""Tensors on the host on a CUDA device: the same gradients, memory really freed, copies that never
read or write too early, rows of a pinned table inside a CUDA graph. (pytest -m gpu -s)"""

import gc
import time
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_nb.algorithm.logprobs import chunked_hidden_states_selective_log_softmax
from grpo_nb.model import offload
from grpo_nb.model.offload import (
    HostStore,
    gather_rows,
    offload_embedding,
    offload_hidden,
    offload_layers,
    wide_residual,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MiB = 2**20
LAYERS, H = 8, 512


@pytest.fixture(autouse=True)
def exact_products():
    "The same kernels, summing in the same order, on every run."
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):  # the others' backward adds in another order each time
        yield
    torch.use_deterministic_algorithms(False)


def build(dtype=torch.bfloat16, family="gpt_oss", layers=LAYERS, lora=True):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=1000,
        hidden_size=H,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
    )
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    else:
        model = GptOssForCausalLM(
            GptOssConfig(
                **sizes,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=64,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        )
    model = model.to("cuda", dtype)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, p in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(p, 0, 0.05)
    return model.train()


def base_of(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def ids_of(tokens, seed=1):
    return torch.randint(1, 1000, (1, tokens), generator=torch.Generator().manual_seed(seed)).cuda()


def loss_of(model, tokens=256, seed=1):
    return (
        base_of(model)
        .model(ids_of(tokens, seed), use_cache=False)
        .last_hidden_state.float()
        .square()
        .mean()
    )


def gradients(model, loss=loss_of, **options):
    model.zero_grad()
    loss(model, **options).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def recomputed(model):
    base_of(model)._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=lambda function, *inputs: checkpoint(
            function, *inputs, use_reentrant=False
        ),
    )


def same(a, b):
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_gradients_are_those_of_recomputing(family, dtype, lora):
    model = build(dtype, family, lora=lora)
    recomputed(model)
    plain = gradients(model)
    assert same(gradients(model), plain), (
        "the model itself is not deterministic here, so nothing can be compared"
    )
    with offload_layers(model, store=HostStore(page_bytes=65_536)) as switch:
        for _ in range(3):
            assert same(gradients(model), plain)
        assert switch.store.offloaded == 3 * LAYERS and switch.store.used == 0


def test_autocast_in_float16():
    model = build(torch.float16, family="llama")

    def loss(model):
        with torch.autocast("cuda", torch.float16):
            return loss_of(model)

    with wide_residual(model):
        recomputed(model)
        plain = gradients(model, loss)
        with offload_layers(model) as switch:
            assert same(gradients(model, loss), plain) and switch.store.offloaded == LAYERS


def peak(step):
    "The most bytes allocated during the step, beyond those before it."
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_the_memory_is_really_freed():
    "The Python side runs far ahead of the card: what it asks for must not pile up all the same."
    layers, tokens = 24, 4096
    model = build(layers=layers, family="llama")
    base_of(model).set_attn_implementation("sdpa")

    def step():
        gradients(model, tokens=tokens)

    recomputed(model)
    step()
    usual = peak(step)
    with offload_layers(model):
        step()
        ours = peak(step)
    inputs = layers * tokens * H * 2
    print(
        f"\n{torch.cuda.get_device_name()}: {layers} layers, inputs of {inputs / MiB:.0f} "
        f"MiB; peak {usual / MiB:.1f} MiB recomputed, {ours / MiB:.1f} offloaded"
    )
    # all but the one in use, and some slack
    assert usual - ours > 0.85 * (layers - 3) * tokens * H * 2


class Slow(torch.nn.Module):
    """A layer that takes long on the card and no time in Python, so that a copy that does not wait
    would show."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2048, 2048, device="cuda") / 45)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(x @ self.weight)
        return x


@pytest.mark.parametrize("slow_copies", [False, True])
def test_nothing_is_read_or_written_too_early(slow_copies):
    """Deep, with memory used again at once, the queues full; with copies made slower than the
    layers by a busy second stream."""
    torch.manual_seed(0)
    layers, x = [Slow() for _ in range(12)], torch.randn(1024, 2048, device="cuda")

    def run(call):
        for layer in layers:
            layer.weight.grad = None
        y = x
        for layer in layers:
            y = call(layer, y)
        y.square().sum().backward()
        return [layer.weight.grad.clone() for layer in layers]

    plain = run(lambda layer, y: checkpoint(layer, y, use_reentrant=False))
    with offload_layers(build(layers=1), store=HostStore(page_bytes=MiB)) as switch:

        def call(layer, y):
            if slow_copies:
                with torch.cuda.stream(offload._second_stream(y.device)):
                    torch.cuda._sleep(20_000_000)
            return switch(layer, y)

        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(call), plain))
        assert switch.store.used == 0


def pinned():
    "Bytes of pinned memory that torch holds, in use or free."
    stats = torch.cuda.host_memory_stats()
    return stats["allocated_bytes.current"]


def test_torch_gives_the_same_pages_again():
    """Python runs ahead of the card, so a page may be new while the copy from its forerunner is
    still queued; the pinned memory does not grow with the steps all the same."""
    model = build(family="llama")
    with offload_layers(model) as switch:
        for _ in range(3):
            gradients(model, tokens=2048)
        before = pinned()
        for _ in range(10):
            gradients(model, tokens=2048)
        held = switch.store.host_bytes
    print(f"\n{before / MiB:.0f} MiB pinned after 3 steps, {pinned() / MiB:.0f} after 13")
    assert pinned() - before <= held


def test_two_graphs_and_two_models():
    a, b, store = build(family="llama"), build(), HostStore()
    for model in (a, b):
        recomputed(model)
    plain = [gradients(a, seed=1), gradients(a, seed=2), gradients(b)]
    with offload_layers(a, store=store), offload_layers(b, store=store):
        losses = [loss_of(a, seed=1), loss_of(b), loss_of(a, seed=2)]
        for loss, model, expected in (
            (losses[0], a, plain[0]),
            (losses[2], a, plain[1]),
            (losses[1], b, plain[2]),
        ):
            model.zero_grad()
            loss.backward()
            assert same(
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
                expected,
            )
        loss = loss_of(a)
        for last in (False, True):
            a.zero_grad()
            loss.backward(retain_graph=not last)
            assert same(
                {name: p.grad for name, p in a.named_parameters() if p.grad is not None}, plain[0]
            )
    assert store.used == 0
    store.release()
    assert store.pages == 0


class Trouble(Exception):
    pass


def test_errors_in_between():
    """At every layer, forward and backward, and a right step after each; nothing stays on the card
    or in the pages."""
    model = build(family="llama")
    recomputed(model)
    plain = gradients(model)
    with offload_layers(model) as switch:
        gradients(model)
        model.zero_grad()
        gc.collect()
        held = torch.cuda.memory_allocated()
        for calls in range(1, 2 * LAYERS):
            counted = []

            def strike(module, inputs):
                counted.append(1)
                if len(counted) == calls:
                    raise Trouble

            hooks = [
                layer.self_attn.register_forward_pre_hook(strike)
                for layer in base_of(model).model.layers
            ]
            with pytest.raises(Trouble):
                gradients(model)
            for hook in hooks:
                hook.remove()
            model.zero_grad()
            end = time.monotonic() + 10  # autograd's own thread may still hold what it was given
            while switch.store.used and time.monotonic() < end:
                gc.collect()
                time.sleep(0.01)
            gc.collect()
            assert switch.store.used == 0 and torch.cuda.memory_allocated() <= held
            assert same(gradients(model), plain)
            model.zero_grad()
        assert switch.store.pages == LAYERS


def test_the_pages_go_back():
    model = build(family="llama")
    with offload_layers(model) as switch:
        gradients(model)
        assert switch.store.host_bytes == LAYERS * 8 * MiB and switch.store.pages == LAYERS
    assert (
        switch.store.pages == 0 and switch.store.host_bytes == 0
    )  # torch keeps freed pinned pages for the next who asks, so its own counts say nothing here


def test_hidden_states():
    model, ids = build(family="llama", layers=2), ids_of(2048)

    def loss(model, store=None, batches=1):
        base, total = base_of(model), 0
        for _ in range(batches):
            park = (
                (lambda: offload_hidden(model, store, min_bytes=65_536))
                if store
                else torch.enable_grad
            )
            with park():
                hidden = base.model(ids, use_cache=False).last_hidden_state[:, :-1]
            with park():
                total = (
                    total
                    + chunked_hidden_states_selective_log_softmax(
                        hidden, base.lm_head.weight, ids[:, 1:]
                    ).sum()
                )
        return total

    base_of(model).set_attn_implementation("sdpa")
    recomputed(model)
    plain, store = gradients(model, loss), HostStore()

    def alive(store):
        gc.collect()
        before = torch.cuda.memory_allocated()
        total = loss(model, store, 4)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, total

    usual = alive(None)[0]
    with offload_layers(model, store=store):
        assert same(gradients(model, lambda model: loss(model, store)), plain)
        ours, total = alive(store)
        total.backward()
    formula = 4 * (
        2048 * H * (2 * 2 + 6)
    )  # four mini-batches: two layers' inputs, the norm's, the rows
    print(
        f"\n{torch.cuda.get_device_name()}: four mini-batches hold {usual / MiB:.1f} MiB, "
        f"{ours / MiB:.1f} with their tensors on the host; formula {formula / MiB:.1f}"
    )
    assert usual - ours > 0.9 * formula and store.used == 0


def test_within_the_time_of_a_step():
    "Wide enough and long enough that copies hide; generous here, exact in benchmarks/offload.py."
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()

    def seconds():
        torch.cuda.synchronize()
        start = time.perf_counter()
        gradients(model, tokens=8192)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    recomputed(model)
    took = {True: [], False: []}
    for _ in range(5):  # in turns, since others may use the card
        for offloaded in took:
            with offload_layers(model) if offloaded else nullcontext():
                took[offloaded] += [seconds(), seconds()]
    ours, usual = min(took[True]), min(took[False])
    print(
        f"\n{torch.cuda.get_device_name()}: a step of 8,192 tokens takes {usual * 1e3:.1f} "
        f"ms recomputed, {ours * 1e3:.1f} offloaded"
    )
    assert ours < 1.15 * usual


# The embedding


@pytest.mark.parametrize(
    "stored, wanted",
    [(torch.bfloat16, None), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("pinned", [True, False])
def test_rows_of_a_host_table(stored, wanted, pinned):
    weight = torch.randn(5000, 2880).to(stored)
    if pinned:
        weight = weight.pin_memory()
    for shape in ((3, 70), (1,), (0,)):
        ids = torch.randint(5000, shape)
        rows = gather_rows(weight, ids.cuda(), wanted)
        assert (
            rows.is_cuda
            and rows.dtype == (wanted or stored)
            and torch.equal(rows.cpu(), weight[ids].to(wanted or stored))
        )


def test_rows_inside_a_cuda_graph():
    weight, ids = (
        torch.randn(1000, 2880).bfloat16().pin_memory(),
        torch.zeros(8, dtype=torch.long, device="cuda"),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gather_rows(weight, ids, torch.float32)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = gather_rows(weight, ids, torch.float32)
    for seed in range(3):
        wanted = torch.randint(1000, (8,), generator=torch.Generator().manual_seed(seed))
        ids.copy_(wanted)
        weight[wanted[0]] = seed  # the table is read at replay
        graph.replay()
        assert torch.equal(rows.cpu(), weight[wanted].float())


def test_rows_never_wait():
    weight, ids = torch.randn(1000, 512).pin_memory(), torch.randint(1000, (64,), device="cuda")
    gather_rows(weight, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather_rows(weight, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "where", ["cpu", "cuda"], ids=["offloaded before it is moved", "offloaded on the card"]
)
def test_an_embedding_on_the_host(where):
    model = build(lora=False).eval().requires_grad_(False)
    ids = ids_of(64)
    with torch.no_grad():
        before = model(ids).logits
    if where == "cpu":
        model.cpu()
    held = torch.cuda.memory_allocated()
    embedding = offload_embedding(model)
    gc.collect()
    if where == "cuda":
        assert held - torch.cuda.memory_allocated() >= 1000 * H * 2
    model.cuda()
    assert (
        embedding.weight.is_pinned()
        and embedding.weight.device.type == "cpu"
        and model.device.type == "cuda"
    )
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).train()
    with offload_layers(model):
        assert len(gradients(model)) == 2 * LAYERS
    weight = embedding.weight
    model.to(torch.float16)
    assert (
        embedding.weight.dtype == torch.float16
        and embedding.weight.is_pinned()
        and embedding.weight is not weight
    )
