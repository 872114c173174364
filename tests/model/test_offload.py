"""Tensors on the host: the same gradients to the last bit, nothing left behind by errors, a store
that keeps its limits, an embedding that everything else still works with."""

import copy
import functools
import gc
import warnings
import weakref
from collections import defaultdict
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_nb.algorithm.logprobs import chunked_hidden_states_selective_log_softmax
from grpo_nb.model import attention, offload
from grpo_nb.model.offload import (
    HostCopy,
    HostEmbedding,
    HostStore,
    gather_rows,
    offload_embedding,
    offload_hidden,
    offload_layers,
    wide_residual,
)
from grpo_nb.model.packed import pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss

KiB = 2**10
SIZES = dict(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


def build(family="gpt_oss", lora=True, layers=4, seed=0, dropout=0.0, **options):
    "A small model in training mode, its adapters filled with random numbers."
    torch.manual_seed(seed)
    sizes = SIZES | dict(num_hidden_layers=layers) | options
    if family == "gpt_oss":
        config = GptOssConfig(
            **sizes,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            experts_implementation="eager",
            attn_implementation="eager",
        )
        model = GptOssForCausalLM(config)
    else:
        model = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}[family](
            {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**sizes, tie_word_embeddings=False)
        )
    if lora:
        model = adapt(model, dropout)
    return model.float().train()


def adapt(model, dropout=0.0):
    model = get_peft_model(model, LoraConfig(r=2, target_modules=list(ALL), lora_dropout=dropout))
    for name, p in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, 0, 0.05)
    return model.train()


def tokens(batch=2, length=12, seed=1):
    ids = torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left
    return dict(input_ids=ids, attention_mask=mask, use_cache=False)


def loss_of(model, seed=1, length=12):
    return model(**tokens(seed=seed, length=length)).logits.float().square().mean()


def gradients(model, loss=loss_of, **options):
    model.zero_grad()
    torch.manual_seed(5)  # for dropout
    loss(model, **options).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(a, b):
    return a.keys() == b.keys() and len(a) > 0 and all(torch.equal(a[name], b[name]) for name in a)


def base_of(model):
    return model.get_base_model() if isinstance(model, PeftModel) else model


# The input of every layer


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen3"])
def test_gradients_are_the_same_to_the_last_bit(family, lora):
    model = build(family, lora)
    plain = gradients(model)
    with offload_layers(
        model, store=HostStore(page_bytes=KiB)
    ) as switch:  # an input takes several pages
        assert same(gradients(model), plain) and same(gradients(model), plain)
        assert (
            switch.store.offloaded == 8 and switch.store.used == 0 and switch.store.pages == 4 * 6
        )
    assert same(gradients(model), plain) and switch.store.offloaded == 8


def test_the_tiny_model_of_the_lessons():
    model = adapt(tiny_gpt_oss()[0])

    def loss(model):
        return model(torch.arange(18).view(2, 9), use_cache=False).logits.square().sum()

    plain = gradients(model, loss)
    with offload_layers(model):
        assert same(gradients(model, loss), plain)


# What attention computed


def forward_kernels(compute):
    "What `compute()` returns, and the calls of the flash kernel's forward pass."
    with mock.patch.object(attention, "_flash_forward", wraps=attention._flash_forward) as kernel:
        return compute(), kernel.call_count


def long_loss(model):
    return loss_of(model, length=20)  # 16 queries and fewer are given to the formula


def flash_model():
    model = build()
    base_of(model).set_attn_implementation("sink_lse")
    return model, base_of(model).config.layer_types.count("full_attention")


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_attention_is_not_computed_again(autocast):
    model, full = flash_model()

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return long_loss(model)

    plain, calls = forward_kernels(lambda: gradients(model, loss))
    assert calls == full
    for start, expected in ((1, full), (20, full), (21, 2 * full), (None, 2 * full)):
        with offload_layers(model, store=HostStore(page_bytes=KiB), attention_from=start) as switch:
            for _ in range(2):
                result, calls = forward_kernels(lambda: gradients(model, loss))
                assert same(result, plain) and calls == expected and switch.store.used == 0


def test_attention_is_computed_again_where_the_host_has_no_room(recwarn):
    model, full = flash_model()
    plain = gradients(model, long_loss)
    inputs = 4 * 10 * KiB
    with offload_layers(
        model, store=HostStore(max_bytes=inputs, page_bytes=KiB), attention_from=1
    ) as switch:
        result, calls = forward_kernels(lambda: gradients(model, long_loss))
        assert same(result, plain) and full < calls <= 2 * full and switch.store.used == 0


def test_attention_is_remembered_through_two_backward_passes_and_an_error():
    model, full = flash_model()
    plain = gradients(model, long_loss)
    with offload_layers(model, attention_from=1) as switch:
        loss = long_loss(model)
        model.zero_grad()
        loss.backward(retain_graph=True)
        hook = (
            base_of(model)
            .model.layers[1]
            .register_full_backward_pre_hook(
                lambda *_: (_ for _ in ()).throw(MemoryError("in the middle"))
            )
        )
        with pytest.raises(MemoryError):
            long_loss(model).backward()
        hook.remove()
        model.zero_grad()
        result, calls = forward_kernels(loss.backward)
        assert calls == 0 and same(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, plain
        )
        del loss
        assert switch.store.used == 0


def test_dropout_draws_the_same_numbers_again():
    model = build(dropout=0.3)
    plain = gradients(model)
    with offload_layers(model):
        assert same(gradients(model), plain)
    assert not same(gradients(build()), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_number_formats(dtype):
    model = build("llama").to(dtype)
    plain = gradients(model)
    with offload_layers(model) as switch:
        assert same(gradients(model), plain) and switch.store.offloaded == 4


def test_autocast_is_on_again_when_a_layer_is_computed_again():
    model = build()

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    plain = gradients(model, loss)
    assert not same(plain, gradients(model))
    with offload_layers(model):
        assert same(gradients(model, loss), plain)


def test_gradients_asked_for_in_part():
    model = build()
    wanted = [p for name, p in model.named_parameters() if "layers.2" in name and "lora_B" in name]
    plain = torch.autograd.grad(loss_of(model), wanted)
    with offload_layers(model) as switch:
        assert all(
            torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss_of(model), wanted), plain)
        )
        assert switch.store.used == 0


def test_adapters_in_the_upper_layers_only():
    "Below the first adapter nothing needs a gradient, and nothing is kept."
    model = build(lora=False).requires_grad_(False)
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[2, 3])
    ).train()
    plain = gradients(model)
    with offload_layers(model) as switch:
        loss = loss_of(model)
        assert switch.store.used == 2
        loss.backward()
        assert same(gradients(model), plain)


@pytest.mark.parametrize(
    "wrap",
    [lambda y: y, lambda y: (y, None), lambda y: (y, y * 2, "words"), lambda y: {"y": y}],
    ids=["tensor", "pair", "triple", "dictionary"],
)
def test_a_layer_may_return_what_it_likes(wrap):
    weight, scale = (
        torch.randn(8, 8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    )  # `scale` comes by keyword

    def layer(x, times=None, scale=None):
        return wrap(torch.tanh(x @ weight) * times * scale)

    def leaf(y):
        return (
            y
            if isinstance(y, torch.Tensor)
            else next(t for t in (y.values() if isinstance(y, dict) else y))
        )

    with offload_layers(build("llama")) as switch:
        for x in (torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)):
            leaves = [t for t in (x, weight, scale) if t.requires_grad]
            ours = switch(functools.partial(layer, times=3, scale=scale), x)
            theirs = layer(x, times=3, scale=scale)
            assert type(ours) is type(theirs)
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    torch.autograd.grad(leaf(ours).sum(), leaves),
                    torch.autograd.grad(leaf(theirs).sum(), leaves),
                )
            )


def test_nothing_moves_without_gradients_or_in_evaluation():
    model = build()
    with offload_layers(model) as switch:
        with torch.no_grad():
            loss_of(model)
        with torch.inference_mode():
            loss_of(model)
        model.eval()
        loss_of(model).backward()
        assert switch.store.offloaded == 0 and switch.store.pages == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_alive(order):
    model = build()
    plain = [gradients(model, seed=seed) for seed in (1, 2)]
    with offload_layers(model) as switch:
        losses = [loss_of(model, seed=seed) for seed in (1, 2)]
        assert switch.store.used == 8
        for i in order:
            model.zero_grad()
            losses[i].backward()
            assert same(
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
                plain[i],
            )
        assert switch.store.used == 0


def test_one_backward_through_two_graphs():
    model = build()

    def loss(model):
        return loss_of(model, seed=1) + loss_of(model, seed=2, length=20)

    plain = gradients(model, loss)
    with offload_layers(model) as switch:
        assert same(gradients(model, loss), plain) and switch.store.used == 0


def test_backward_twice():
    model = build()
    plain = gradients(model)
    with offload_layers(model) as switch:
        loss = loss_of(model)
        for last in (False, False, True):
            model.zero_grad()
            loss.backward(retain_graph=not last)
            assert same(
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, plain
            )
            assert switch.store.used == (0 if last else 4)


def test_two_models_one_store():
    a, b, store = build("llama"), build("gpt_oss"), HostStore()
    plain = [gradients(a), gradients(b)]
    with offload_layers(a, store=store), offload_layers(b, store=store):
        losses = [loss_of(a), loss_of(b)]
        a.zero_grad(), b.zero_grad()
        (losses[0] + losses[1]).backward()
        assert same({n: p.grad for n, p in a.named_parameters() if p.grad is not None}, plain[0])
        assert same({n: p.grad for n, p in b.named_parameters() if p.grad is not None}, plain[1])
    assert store.used == 0 and store.pages == 8  # it is not the switches' to release


class Trouble(Exception):
    pass


@pytest.mark.parametrize("calls", (1, 3, 4, 5, 7), ids=lambda calls: f"at layer call {calls}")
def test_an_error_in_the_middle_leaves_nothing(calls):
    "Calls 1 to 4 are forward, 5 to 8 backward; the layers are hit inside, where both pass."
    model, counted = build(), []
    plain = gradients(model)

    def strike(module, inputs):
        counted.append(1)
        if len(counted) == calls:
            raise Trouble

    with offload_layers(model) as switch:
        hooks = [
            layer.self_attn.register_forward_pre_hook(strike)
            for layer in base_of(model).model.layers
        ]
        with pytest.raises(Trouble):
            gradients(model)
        for hook in hooks:
            hook.remove()
        gc.collect()
        assert switch.store.used == 0
        assert same(gradients(model), plain) and switch.store.pages == 4


def test_the_pool_is_used_again_at_other_lengths():
    model = build()
    with offload_layers(model, store=HostStore(page_bytes=KiB)) as switch:
        gradients(model, length=40)
        pages = switch.store.pages
        for length in (12, 39, 25, 40):
            gradients(model, length=length)
        assert switch.store.pages == pages == 4 * 20 and switch.store.host_bytes == pages * KiB
    switch.store.release()
    assert switch.store.pages == 0


def test_the_budget_is_kept_and_said():
    model = build()
    plain = gradients(model)
    with pytest.warns(UserWarning, match="max_bytes is 14,336") as said:
        with offload_layers(
            model, store=HostStore(max_bytes=14 * KiB, page_bytes=KiB)
        ) as switch:  # two inputs of 6 KiB and a bit
            assert same(gradients(model), plain) and same(gradients(model), plain)
            assert (
                (switch.store.offloaded, switch.store.stayed) == (4, 4)
                and switch.store.host_bytes <= 14 * KiB
                and len(said) == 1
            )
    with (
        pytest.warns(UserWarning, match="stay on the device"),
        offload_layers(model, max_host_bytes=0) as switch,
    ):
        assert same(gradients(model), plain) and (
            switch.store.offloaded,
            switch.store.stayed,
            switch.store.pages,
        ) == (0, 4, 0)


def test_pages_that_come_back_after_the_switch_is_gone():
    model = build()
    plain, switch = gradients(model), offload_layers(model)
    model.zero_grad()
    loss = loss_of(model)
    switch.remove()
    switch.remove()  # a second time does nothing
    assert switch.store.pages == switch.store.used == 4
    loss.backward()
    assert (
        same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, plain)
        and switch.store.used == 0
    )


def test_the_model_is_put_back_as_it_was():
    model = build()
    modules = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    before = [dict(vars(m)) for m in modules]
    offload_layers(model).remove()
    assert [dict(vars(m)) for m in modules] == before
    theirs = functools.partial(checkpoint, use_reentrant=False)
    base_of(model)._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=theirs)
    with offload_layers(model):
        pass
    assert all(
        m.gradient_checkpointing and m._gradient_checkpointing_func is theirs for m in modules
    )


def test_a_copy_shares_the_switch():
    model = build()
    with offload_layers(model):
        twin = copy.deepcopy(model)
        assert same(gradients(twin), gradients(model))


# The store


def test_what_is_parked_comes_back_as_it_lay_in_memory():
    store = HostStore(page_bytes=64)
    for x in (
        torch.randn(5),
        torch.randn(3, 40).T,
        torch.randn(2, 3, 4)[:, 1],
        torch.randn(7, 1).expand(7, 9),
        torch.randn(()),
        torch.randn(9, 9).half(),
        torch.randn(2, 5, 3, 8).transpose(1, 2),
    ):
        copies = store.offload(x)
        y = copies.fetch()
        assert isinstance(copies, HostCopy) and torch.equal(x, y) and y.dtype == x.dtype
        assert y.stride() == torch.empty_like(x).stride()
    del copies
    assert store.used == 0
    for x in (
        torch.arange(5),
        torch.empty(0),
        torch.ones(3, dtype=torch.bool),
        torch.nn.Parameter(torch.ones(3)),
    ):
        assert store.offload(x) is x


class Stream:
    "A CUDA stream without CUDA: what it has done or waited for, as a number for each stream."

    def __init__(self):
        self.done = {self: 0}

    def wait_event(self, event):
        self.done = {s: max(self.done.get(s, 0), event.get(s, 0)) for s in {*self.done, *event}}

    def wait_stream(self, other):
        self.wait_event(other.done)

    def record_event(self):
        return dict(self.done)


class Order(TorchDispatchMode):
    """Fails where an operation in one stream does not wait for one in another that has written what
    it reads, or used what it writes; memory goes back to the stream that it was taken for."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.computing, self.side = Stream(), Stream()
        self.now, self.uses, self.back = self.computing, {}, defaultdict(list)
        monkeypatch.setattr(offload, "_second_stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.switch)

    @contextmanager
    def switch(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def forget(self, at):
        home, reads, writes = self.uses.pop(at)
        self.back[home] += reads + writes if home else []

    def check(self, uses):
        assert all(self.now.done.get(stream, 0) >= number for stream, number in uses)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.now.done[self.now] += 1
        use, given = (self.now, self.now.done[self.now]), operation._schema.arguments
        for argument, values in zip(given, args):
            for x in filter(torch.is_tensor, tree_leaves(values)):
                at = x.untyped_storage().data_ptr()
                if at in self.uses:
                    _, reads, writes = self.uses[at]
                    self.check(writes)
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        self.check(reads)
                        writes.append(use)
                    elif not operation.is_view:
                        reads.append(use)
        result = operation(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self.uses:
                # the allocator of pages (uint8) looks after them itself
                home = self.now if x.dtype != torch.uint8 else None
                self.check(self.back[home])
                self.uses[storage.data_ptr()] = home, [], [use]
                weakref.finalize(storage, self.forget, storage.data_ptr())
        return result


@pytest.mark.parametrize("start, late", [(None, 1), (1, 3)])  # of the last layer, which is full
def test_with_a_second_stream_nothing_is_read_or_written_too_early(start, late, monkeypatch):
    """The order of a card's streams, checked without one. All but what the last layer needs is on
    its way when it is fetched, and nothing comes twice."""
    model, _ = flash_model()
    plain, arrived, fetched = gradients(model, long_loss), [], []
    arrive, fetch = HostCopy.arrive, HostCopy.fetch
    monkeypatch.setattr(HostCopy, "arrive", lambda copy: arrived.append(copy.shape) or arrive(copy))
    monkeypatch.setattr(HostCopy, "fetch", lambda c: fetched.append(c.arriving) or fetch(c))
    with offload_layers(model, store=HostStore(page_bytes=KiB), attention_from=start) as switch:
        with Order(monkeypatch):
            for _ in range(2):
                assert same(gradients(model, long_loss), plain) and switch.store.used == 0
    assert len(arrived) == len(fetched) == switch.store.offloaded
    assert fetched.count(None) == 2 * late


def test_all_inputs_of_a_layer_are_on_their_way_and_none_comes_twice(monkeypatch):
    "Gemma 4 gives each of its layers two."
    layers, inputs = [torch.nn.Bilinear(8, 8, 8) for _ in range(4)], torch.randn(2, 3, 5, 8)

    def run(call):
        x, y = leaves = [x.clone().requires_grad_() for x in inputs]
        for layer in layers:
            x = call(layer, x, y)
        return torch.autograd.grad(x.sin().sum(), [*leaves, *(layer.weight for layer in layers)])

    plain, arrived, fetched = run(functools.partial(checkpoint, use_reentrant=False)), [], []
    arrive, fetch = HostCopy.arrive, HostCopy.fetch
    monkeypatch.setattr(HostCopy, "arrive", lambda copy: arrived.append(copy.shape) or arrive(copy))
    monkeypatch.setattr(HostCopy, "fetch", lambda c: fetched.append(c.arriving) or fetch(c))
    with offload_layers(build(layers=1), store=HostStore(page_bytes=KiB)) as switch:
        with Order(monkeypatch):
            assert all(torch.equal(a, b) for a, b in zip(run(switch), plain, strict=True))
    assert len(arrived) == len(fetched) == switch.store.offloaded == 8
    assert fetched.count(None) == 2  # of the last layer


def test_a_change_in_place_after_the_copy_changes_no_gradient():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return x.mul_(2).square() * 3

    def gradient(call):
        x = torch.arange(4.0, requires_grad=True)
        call(Layer(), x * 1.0).sum().backward()
        return x.grad

    with offload_layers(build("llama")) as switch:
        assert torch.equal(gradient(switch), gradient(lambda layer, x: layer(x)))
        assert switch.store.offloaded == 1 and switch.store.used == 0


# What lies between the model and the head


def hidden_loss(model, ids, switch, entropy):
    base = base_of(model)
    park = (
        (lambda: offload_hidden(model, switch.store, min_bytes=64)) if switch else torch.enable_grad
    )
    with park():
        hidden = base.model(ids, use_cache=False).last_hidden_state[:, :-1]
    with park():
        result = chunked_hidden_states_selective_log_softmax(
            hidden, base.lm_head.weight, ids[:, 1:], return_entropy=entropy
        )
    return (result[0].sum() + 0.1 * result[1].sum()) if entropy else result.sum()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "all weights"])
def test_hidden_states_on_the_host(lora, entropy):
    model, ids = build(lora=lora), tokens()["input_ids"]
    plain = gradients(model, lambda model: hidden_loss(model, ids, None, entropy))
    with offload_layers(model) as switch:
        assert same(gradients(model, lambda model: hidden_loss(model, ids, switch, entropy)), plain)
        assert switch.store.offloaded > 4 and switch.store.used == 0
        loss = sum(hidden_loss(model, ids, switch, entropy) for _ in range(3))
        held = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: held.append(x.nbytes) or x, lambda x: x
        ):
            hidden_loss(model, ids, switch, entropy)
        assert sum(held) == 0
        loss.backward()


def test_experts_in_four_bits():
    "Their weights are tensors without a storage of their own."
    model = build(lora=False, intermediate_size=64)
    pack_experts(model)
    model, ids = adapt(model), tokens()["input_ids"]
    plain = gradients(model, lambda model: hidden_loss(model, ids, None, False))
    with offload_layers(model) as switch:
        assert same(gradients(model, lambda model: hidden_loss(model, ids, switch, False)), plain)


def test_weights_and_small_tensors_stay():
    store, model = HostStore(page_bytes=64), torch.nn.Linear(8, 8)
    x = torch.randn(100, 8, requires_grad=True)
    with offload_hidden(model, store, min_bytes=200):
        y = model(x).tanh().mean()
    assert (store.offloaded, store.used) == (
        2,
        100,
    )  # x and the tanh of 3,200 bytes each; not the weight
    y.backward()
    plain = torch.autograd.grad(model(x).tanh().mean(), x)[0]
    assert torch.equal(x.grad, plain)


def test_without_the_switch_everything_big_is_parked():
    model = build("llama")
    plain, store = gradients(model), HostStore(page_bytes=KiB)

    def loss(model):
        with offload_hidden(model, store, min_bytes=64):
            return loss_of(model)

    assert same(gradients(model, loss), plain) and store.offloaded > 20 and store.used == 0


def test_an_error_while_hidden_states_leave():
    model, store = build("llama"), HostStore()
    with pytest.raises(Trouble), offload_hidden(model, store, min_bytes=64):
        loss = loss_of(model)
        raise Trouble
    del loss
    gc.collect()
    assert store.used == 0


# The embedding


def freeze(model):
    model.get_input_embeddings().requires_grad_(False)
    return model


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "qwen3"])
@pytest.mark.parametrize("first", ["adapter", "embedding"])
def test_embedding_on_the_host(family, first, tmp_path):
    reference, model = build(family), freeze(build(family, lora=False))
    if first == "embedding":
        names, device, dtype = set(model.state_dict()), model.device, model.dtype
        embedding = offload_embedding(model)
        assert set(model.state_dict()) == names and (model.device, model.dtype) == (device, dtype)
    model = adapt(model)
    if first == "adapter":
        embedding = offload_embedding(model)
    assert (
        isinstance(embedding, HostEmbedding)
        and base_of(model).get_input_embeddings() is embedding
        and embedding.padding_idx == 0
    )
    model.load_state_dict(reference.state_dict())
    assert torch.equal(model(**tokens()).logits, reference(**tokens()).logits)
    with offload_layers(model):
        assert same(gradients(model), gradients(reference))
    model.eval(), reference.eval()
    prompt = dict(tokens(), use_cache=True, max_new_tokens=5, do_sample=False)
    assert torch.equal(model.generate(**prompt), reference.generate(**prompt))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(build(family, lora=False).eval(), tmp_path / "adapter")
    assert torch.equal(again(**tokens()).logits, model(**tokens()).logits)


def test_a_saved_model_has_its_embedding(tmp_path):
    model = freeze(build(lora=False)).eval()
    offload_embedding(model)
    model.save_pretrained(tmp_path)
    again = GptOssForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    assert torch.equal(
        again.get_input_embeddings().weight, model.get_input_embeddings().weight
    ) and torch.equal(again(**tokens()).logits, model(**tokens()).logits)


def test_gradient_checkpointing_of_transformers_still_works():
    "enable_input_require_grads puts a hook on the embedding."
    model, reference = adapt(freeze(build(lora=False))), build()
    model.load_state_dict(reference.state_dict())
    offload_embedding(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base_of(model).gradient_checkpointing_enable({"use_reentrant": True})
    assert same(gradients(model), gradients(reference))


def test_moving_and_converting_the_model():
    model = freeze(build("llama", lora=False))
    embedding = offload_embedding(model)
    model.to(torch.bfloat16)
    assert (
        embedding.weight.dtype == torch.bfloat16
        and model(**tokens()).logits.dtype == torch.bfloat16
    )
    model.to("meta")
    assert embedding.weight.device.type == "cpu" and next(model.parameters()).device.type == "meta"


def test_embeddings_that_cannot_be_moved():
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).requires_grad_(False)
    with pytest.raises(ValueError, match="tied"):
        offload_embedding(tied)
    scaled = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=4)).requires_grad_(False)
    with pytest.raises(ValueError, match="Gemma3TextScaledWordEmbedding"):
        offload_embedding(scaled)
    model = freeze(build(lora=False))
    offload_embedding(model)
    with pytest.raises(ValueError, match="HostEmbedding"):
        offload_embedding(model)
    with pytest.raises(ValueError, match="frozen"):
        freeze(model).get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="HostEmbedding"):
        get_peft_model(freeze_embedding(), LoraConfig(r=2, target_modules=["embed_tokens"]))
    adapted = get_peft_model(build(lora=False), LoraConfig(r=2, target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="with more to it"):
        offload_embedding(adapted)


def freeze_embedding():
    model = freeze(build(lora=False))
    offload_embedding(model)
    return model


@pytest.mark.parametrize(
    "stored, wanted",
    [
        (torch.float32, None),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_rows(stored, wanted):
    "By index and by the kernel (interpreted), more columns than a block has."
    weight, ids = torch.randn(30, 1100).to(stored), torch.randint(30, (3, 4))
    expected = weight[ids].to(wanted or stored)
    assert torch.equal(gather_rows(weight, ids, wanted), expected) and gather_rows(
        weight, ids[:, :0]
    ).shape == (3, 0, 1100)
    assert torch.equal(
        offload._gather(weight, ids.T, wanted or stored).view(4, 3, -1), expected.transpose(0, 1)
    )
    assert torch.equal(
        offload._gather(weight, ids.int(), wanted or stored).view(expected.shape), expected
    )
    assert offload._gather(weight, ids[:0], stored).shape == (0, 1100)


def test_ids_outside_the_table():
    weight = torch.randn(5, 8)
    with pytest.raises(IndexError):
        gather_rows(weight, torch.tensor([5]))
    rows = offload._gather(weight, torch.tensor([4, 5, -1]), torch.float32)
    assert torch.equal(rows[0], weight[4]) and rows[1:].isnan().all()


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_float32_residual_stream(offloaded):
    model = freeze(build(lora=False).half().eval())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias[:2] = 30_000
    seen, inputs = [], tokens()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(output))

    def run():
        seen.clear()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            return model(**inputs).logits

    assert not run().isfinite().all()
    if offloaded:
        offload_embedding(model, output_dtype=torch.float32)
    handle = None if offloaded else wide_residual(model)
    logits, largest = run(), seen[-1].abs().max()
    assert all(x.dtype == torch.float32 for x in seen) and largest > 65_504
    exact = copy.deepcopy(model)
    exact.get_input_embeddings()._forward_hooks.clear()
    for layer in exact.model.layers:
        layer._forward_hooks.clear()
    with torch.no_grad():
        truth = exact.float()(**inputs).logits
    assert (logits.float() - truth).norm() < 0.02 * truth.norm()
    if handle is not None:
        handle.remove()
        assert not run().isfinite().all()
