"""Log-probs: the plain formula against torch and TRL, the chunked form against the plain one, and
what is kept in memory."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_nb.algorithm.logprobs import (
    Chunks,
    choose_chunks,
    chunk_rows,
    hidden_state_bytes,
    logit_bytes,
    selective_log_softmax,
)
from grpo_nb.algorithm.logprobs import (
    chunked_hidden_states_selective_log_softmax as chunked,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(h, W, index, bias=None, temperature=1.0, softcap=None, scale=1.0):
    "Log-probs and entropy by torch's log_softmax over all logits."
    z = h @ W.T if bias is None else h @ W.T + bias
    z = z * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.nn.functional.log_softmax(
        z.to(torch.promote_types(z.dtype, torch.float32)) / temperature, dim=-1
    )
    return logp.gather(-1, index[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def inputs(B, T, H, V, dtype=torch.float64, trained=False, bias=False, seed=0):
    make = torch.Generator().manual_seed(seed)
    h = torch.randn(B, T, H, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
    W = torch.randn(V, H, generator=make, dtype=torch.float64).to(dtype).requires_grad_(trained)
    b = (
        torch.randn(V, generator=make, dtype=torch.float64).to(dtype).requires_grad_(trained)
        if bias
        else None
    )
    return (
        h,
        W,
        torch.randint(V, (B, T), generator=make),
        b,
        torch.randn(B, T, generator=make, dtype=torch.float64),
    )


class Live(TorchDispatchMode):
    "Bytes of the storages that are made: the `largest`, those alive `now`, and their `peak`."

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.alive = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for storage in (
            x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ):
            key, size = storage.data_ptr(), storage.nbytes()
            if key in self.alive or not size:
                continue
            self.alive.add(key)
            self.now += size
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
            weakref.finalize(storage, self.forget, key, size)
        return result

    def forget(self, key, size):
        self.alive.discard(key)
        self.now -= size


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    "Tensors this small are slower with several."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved_bytes(function, *known):
    "Bytes that `function()` keeps for its backward pass, beyond the storages of `known`."
    known, saved = {x.untyped_storage().data_ptr() for x in known}, {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    return sum(saved.values()), result


# ---- selective_log_softmax


@pytest.mark.parametrize(
    "dtype, atol",
    [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_selective_is_torch_log_softmax(dtype, atol, temperature):
    torch.manual_seed(0)
    logits, index = (3 * torch.randn(2, 7, 50)).to(dtype), torch.randint(50, (2, 7))
    ours, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = selective_log_softmax(ours, index, temperature=temperature)
    want = (wide / temperature).log_softmax(-1).gather(-1, index[..., None]).squeeze(-1)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)
    weights = torch.randn(2, 7, dtype=torch.float64)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.grad.double(), wide.grad, atol=max(atol, 4 * eps), rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selective_is_trl(temperature):
    from trl.trainer.utils import selective_log_softmax as trl

    torch.manual_seed(0)
    logits, index = torch.randn(3, 5, 40), torch.randint(40, (3, 5))
    torch.testing.assert_close(
        selective_log_softmax(logits, index, temperature=temperature),
        trl(logits, index, temperature=temperature),
        atol=1e-5,
        rtol=0,
    )


def test_selective_survives_huge_logits_and_takes_empty_rows():
    logits = torch.tensor([[[1e4, -1e4, 0.0], [-math.inf, 0.0, 0.0]]])
    assert torch.allclose(
        selective_log_softmax(logits, torch.tensor([[0, 1]])), torch.tensor([[0.0, -math.log(2)]])
    )
    assert selective_log_softmax(
        torch.zeros(2, 0, 3), torch.zeros(2, 0, dtype=torch.long)
    ).shape == (2, 0)


# ---- the chunked form


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_chunked_is_the_plain_formula(data):
    draw = data.draw
    B, T, H, V = (draw(st.integers(low, high)) for low, high in ((1, 4), (0, 6), (1, 5), (2, 9)))
    trained, bias = draw(st.booleans()), draw(st.booleans())
    options = dict(temperature=draw(st.sampled_from([1.0, 0.5, 1.7])))
    softcap, scale = draw(st.sampled_from([None, 1.5, 30.0])), draw(st.sampled_from([1.0, 0.25]))
    split = dict(
        mini_batch=draw(st.none() | st.integers(1, 6)),
        logit_chunk_multiplier=draw(st.none() | st.integers(1, 30)),
    )
    h, W, index, b, weights = inputs(
        B, T, H, V, trained=trained, bias=bias, seed=draw(st.integers(0, 99))
    )
    bonus = draw(
        st.sampled_from([None, 0.0, 0.3])
    )  # None: no entropy asked for; 0.0: asked for, not in the loss

    logps, entropy = reference(h, W, index, b, softcap=softcap, scale=scale, **options)
    ours = chunked(
        h,
        W,
        index,
        bias=b,
        logit_softcapping=softcap,
        logit_scale=scale,
        return_entropy=bonus is not None,
        **split,
        **options,
    )
    got, got_entropy = ours if bonus is not None else (ours, None)
    torch.testing.assert_close(got, logps, atol=1e-12, rtol=1e-12)
    loss, expected = (got * weights).sum(), (logps * weights).sum()
    if bonus is not None:
        torch.testing.assert_close(got_entropy, entropy, atol=1e-12, rtol=1e-12)
    if bonus:
        loss, expected = (
            loss + bonus * (got_entropy * weights.roll(1)).sum(),
            expected + bonus * (entropy * weights.roll(1)).sum(),
        )
    leaves = [x for x in (h, W, b) if x is not None and x.requires_grad]
    for mine, theirs in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("softcap, scale, temperature", [(None, 1.0, 1.0), (5.0, 0.5, 0.7)])
def test_chunked_is_trl(trained, softcap, scale, temperature):
    from trl.kernels import ChunkedLogProbFunction

    h, W, index, b, weights = inputs(2, 5, 8, 30, dtype=torch.float32, trained=trained, bias=True)
    theirs, their_entropy = ChunkedLogProbFunction.apply(
        h.view(-1, 8), W, b, index.view(-1), temperature, 16, softcap, scale, ("entropy",)
    )[:2]
    ours, entropy = chunked(
        h,
        W,
        index,
        bias=b,
        temperature=temperature,
        logit_softcapping=softcap,
        logit_scale=scale,
        logit_chunk_multiplier=3,
        return_entropy=True,
    )
    torch.testing.assert_close(ours.view(-1), theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.view(-1), their_entropy, atol=1e-5, rtol=0)
    weights, leaves = weights.float(), [x for x in (h, W, b) if x.requires_grad]
    loss, their_loss = (
        (ours * weights + 0.1 * entropy).sum(),
        (theirs * weights.view(-1) + 0.1 * their_entropy).sum(),
    )
    for mine, other in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(their_loss, leaves)
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["GptOss", "Gemma2", "Cohere"])
def test_chunked_is_what_transformers_models_compute(family):
    """Gemma 2 caps its logits, Cohere scales them (and ties its head to the embedding), gpt-oss
    leaves them alone."""
    import transformers

    sizes = dict(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    extra = {
        "GptOss": dict(num_local_experts=2, num_experts_per_tok=1),
        "Gemma2": dict(final_logit_softcapping=0.05),
        "Cohere": dict(logit_scale=3.0),
    }[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    ids = torch.randint(60, (2, 6))
    logits = model(ids, use_cache=False).logits[:, :-1]
    states = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    ours = chunked(
        states,
        model.lm_head.weight,
        ids[:, 1:],
        mini_batch=2,
        logit_chunk_multiplier=2,
        temperature=0.9,
        logit_softcapping=getattr(config, "final_logit_softcapping", None),
        logit_scale=getattr(config, "logit_scale", 1.0),
    )
    theirs = (logits / 0.9).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    parameters = [model.model.embed_tokens.weight, model.lm_head.weight]
    for mine, other in zip(
        torch.autograd.grad(ours.sum(), parameters, retain_graph=True),
        torch.autograd.grad(theirs.sum(), parameters),
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
def test_bf16_is_as_exact_as_all_logits_at_once(trained):
    "In the root mean square of several draws: one is noise."
    leaves = [0, 1] if trained else [0]

    def grads(function, h, W, weights):
        logps = function(h, W)
        return [logps.detach().double()] + [
            g.double()
            for g in torch.autograd.grad((logps * weights).sum(), [(h, W)[i] for i in leaves])
        ]

    def errors(seed, chunks):
        "Squared: of ours and of the plain way in each tensor, and its size."
        h, W, index, _, weights = inputs(
            2, 64, 32, 500, dtype=torch.bfloat16, trained=trained, seed=seed
        )
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in (h, W)]
        truth = grads(lambda h, W: reference(h, W, index)[0], *exact, weights)
        plain = grads(lambda h, W: reference(h, W, index)[0], h, W, weights)
        ours = grads(
            lambda h, W: chunked(h, W, index, logit_chunk_multiplier=chunks), h, W, weights
        )
        return [
            [float(y.square().sum()) for y in (mine - right, other - right, right)]
            for mine, other, right in zip(ours, plain, truth, strict=True)
        ]

    for chunks in (1, 64):
        summed = torch.tensor([errors(seed, chunks) for seed in range(7)]).sum(0).sqrt()
        for mine, other, size in summed.tolist():
            assert mine <= 1.2 * other + 1e-6 * size


@pytest.mark.parametrize("seed", range(5))
def test_gradient_of_a_sure_token_keeps_its_digits_in_bf16(seed):
    "1 - p is 1e-4 here: W[y] - p W from rounded parts would be all rounding."
    h, W, index, *_ = inputs(1, 1, 16, 100, seed=seed, dtype=torch.bfloat16)
    y = index[0, 0]
    with torch.no_grad():
        sure = W[y].float() / W[y].float().norm()
        others = torch.arange(100) != y
        W[others] -= (W[others].float() @ sure)[:, None].to(W) * sure.to(W)  # logits of about 0
        h.copy_((9.2 + math.log(99)) * sure / W[y].float().norm())
    wide = h.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(reference(wide, W.double(), index)[0].sum(), wide)
    logp = chunked(h, W, index)
    (mine,) = torch.autograd.grad(logp.sum(), h)
    assert -1e-3 < logp.item() < -1e-5
    assert (mine.double() - truth).norm() < 0.1 * truth.norm()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_incoming_gradient_is_respected(trained, entropy):
    h, W, index, b, weights = inputs(2, 4, 3, 7, trained=trained)

    def grad(factor, times=1):
        out = chunked(h, W, index, return_entropy=True)
        loss = factor * ((out[0] + out[1] if entropy else out[0]) * weights).sum()
        h.grad = None
        for _ in range(times):
            loss.backward(retain_graph=True)
        return h.grad

    torch.testing.assert_close(grad(2.0), 2 * grad(1.0))
    torch.testing.assert_close(grad(-1.0, times=3), -3 * grad(1.0))


def test_entropy_alone_can_be_the_loss():
    h, W, index, *_ = inputs(2, 3, 4, 6)
    (mine,) = torch.autograd.grad(chunked(h, W, index, return_entropy=True)[1].sum(), h)
    (right,) = torch.autograd.grad(reference(h, W, index)[1].sum(), h)
    torch.testing.assert_close(mine, right)


def test_a_forbidden_word_makes_nothing_nan():
    h, W, index, b, _ = inputs(1, 3, 4, 6, bias=True)
    b[5] = -math.inf
    index.clamp_(max=4)
    logps, entropy = chunked(h, W, index, bias=b, return_entropy=True)
    (grad,) = torch.autograd.grad((logps + entropy).sum(), h)
    want, want_entropy = reference(h, W[:5], index, b[:5])
    torch.testing.assert_close(logps, want)
    torch.testing.assert_close(entropy, want_entropy)
    torch.testing.assert_close(grad, torch.autograd.grad((want + want_entropy).sum(), h)[0])


def test_tied_embedding_gets_both_gradients():
    _, E, index, *_ = inputs(2, 4, 3, 7, trained=True)
    (mine,) = torch.autograd.grad(chunked(E[index].tanh(), E, index.roll(1, 1)).sum(), E)
    (right,) = torch.autograd.grad(reference(E[index].tanh(), E, index.roll(1, 1))[0].sum(), E)
    torch.testing.assert_close(mine, right)


def test_a_sequence_does_not_depend_on_its_neighbours():
    h, W, index, *_ = inputs(3, 8, 4, 9)
    whole = chunked(h, W, index, mini_batch=2, logit_chunk_multiplier=5)
    torch.testing.assert_close(
        whole[1:2, 2:5], chunked(h[1:2, 2:5], W, index[1:2, 2:5]), atol=1e-13, rtol=0
    )


def test_views_of_other_tensors_are_taken():
    h, W, index, _, weights = inputs(4, 6, 5, 9, trained=True)
    views = h.transpose(0, 1)[1:, ::2], torch.cat([W, W], 1)[:, ::2], index.T[1:, ::2]
    assert not any(x.is_contiguous() for x in views)
    mine, right = chunked(*views, logit_chunk_multiplier=3), reference(*views)[0]
    torch.testing.assert_close(mine, right)
    for a, b in zip(
        torch.autograd.grad(mine.sum(), (h, W)), torch.autograd.grad(right.sum(), (h, W))
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
@pytest.mark.parametrize("trained", [False, True])
def test_empty_batches_have_empty_results_and_zero_gradients(shape, trained):
    h, W, index, *_ = inputs(*shape, 4, 6, trained=trained)
    logps, entropy = chunked(
        h, W, index, return_entropy=True, mini_batch=2, logit_chunk_multiplier=3
    )
    assert logps.shape == entropy.shape == shape
    (logps + entropy).sum().backward()
    assert h.grad.shape == h.shape and (W.grad is None or not W.grad.any())


def test_a_second_derivative_is_refused():
    h, W, index, *_ = inputs(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="no second derivative.*selective_log_softmax"):
        torch.autograd.grad(chunked(h, W, index).sum(), h, create_graph=True)


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_lowers_the_products_and_nothing_else(trained):
    h, W, index, _, weights = inputs(2, 8, 16, 40, dtype=torch.float32, trained=trained)
    low_h, low_W = (x.detach().bfloat16().requires_grad_(x.requires_grad) for x in (h, W))
    leaves, low = ([h, W], [low_h, low_W]) if trained else ([h], [low_h])
    wanted = chunked(low_h, low_W, index, logit_chunk_multiplier=4)
    with torch.autocast("cpu", torch.bfloat16):
        got = chunked(h, W, index, logit_chunk_multiplier=4)
        inside = torch.autograd.grad((got * weights).sum(), leaves, retain_graph=True)
    outside = torch.autograd.grad((got * weights).sum(), leaves)
    assert got.dtype == torch.float32 and torch.equal(got, wanted)
    for a, b, c in zip(inside, outside, torch.autograd.grad((wanted * weights).sum(), low)):
        assert a.dtype == torch.float32 and torch.equal(a, b)
        torch.testing.assert_close(a, c.float(), atol=1e-6, rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert chunked(h.double(), W.double(), index).dtype == torch.float64


# ---- memory


@pytest.mark.parametrize("chunks", [1, 4, 32])
@pytest.mark.parametrize("V", [40, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_depends_on_neither_chunks_nor_vocabulary(chunks, V, dtype):
    for trained, expected in ((False, 2 * 64 * 8 * dtype.itemsize), (True, 0)):
        h, W, index, *_ = inputs(2, 64, 8, V, dtype=dtype, trained=trained)
        kept, result = saved_bytes(
            lambda: chunked(h, W, index, logit_chunk_multiplier=chunks), h, W, index
        )
        assert kept == expected and result.requires_grad


def test_nothing_is_kept_when_no_gradient_is_wanted():
    h, W, index, *_ = inputs(2, 64, 8, 40, trained=True)
    with torch.no_grad():
        kept, result = saved_bytes(lambda: chunked(h, W, index), h, W, index)
    assert kept == 0 and not result.requires_grad
    kept, result = saved_bytes(lambda: chunked(h.detach(), W.detach(), index), h, W, index)
    assert kept == 0 and not result.requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_no_tensor_is_larger_than_one_chunk(trained):
    h, W, index, _, weights = inputs(2, 64, 8, 1000, dtype=torch.float32, trained=trained)
    with Live(h, W, index, weights) as live:
        logps, entropy = chunked(
            h, W, index, mini_batch=2, logit_chunk_multiplier=8, return_entropy=True
        )
        (logps * weights + entropy).sum().backward()
    assert live.largest == logit_bytes(2, 64, 1000, mini_batch=2, logit_chunk_multiplier=8)


# ---- splitting


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(0, 40),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 50),
)
def test_chunks_cover_every_row_once_and_none_is_larger_than_predicted(
    batch, length, mini_batch, multiplier
):
    chunks = chunk_rows(batch, length, mini_batch, multiplier)
    assert [row for start, stop in chunks for row in range(start, stop)] == list(
        range(batch * length)
    )
    assert all(start < stop for start, stop in chunks)
    if chunks:
        assert max(b - a for a, b in chunks) == logit_bytes(
            batch,
            length,
            1,
            mini_batch=min(mini_batch or 1, batch),
            logit_chunk_multiplier=multiplier or 4,
            element_bytes=1,
        )
    if mini_batch:
        assert all(
            any(start <= edge <= stop for start, stop in chunks)
            for edge in (
                batch * i // min(mini_batch, batch or 1) * length
                for i in range(min(mini_batch, batch))
            )
            if chunks
        )


def test_long_sequences_are_chunked_finely_by_default():
    assert max(b - a for a, b in chunk_rows(1, 65_536)) == 1024
    assert len(chunk_rows(8, 10)) == 4


def test_equations_of_the_documents():
    "Printed without bytes an element; their ratios hold."
    one, two, three = (
        logit_bytes(4, 8192, 128_000, mini_batch=m, logit_chunk_multiplier=k, element_bytes=1)
        / 2**30
        for m, k in ((1, 1), (4, 1), (4, 4))
    )
    assert (round(one, 3), one / two, two / three) == (3.906, 4, 4)
    assert round(hidden_state_bytes(8, 64_000, 4096, element_bytes=1) / 2**30, 3) == 1.953
    assert (
        round(hidden_state_bytes(8, 64_000, 4096, mini_batch=8, element_bytes=1) / 2**30, 3)
        == 0.244
    )


sizes = st.tuples(
    st.integers(1, 16),
    st.integers(1, 100_000),
    st.sampled_from([16, 2880]),
    st.sampled_from([50, 201_088]),
)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(0, 2**36), st.integers(0, 2**36))
def test_less_memory_never_gives_fewer_chunks(sizes, first, second):
    less, more = sorted((first, second))
    try:
        tight = choose_chunks(*sizes, less)
    except ValueError:
        return
    loose = choose_chunks(*sizes, more)
    assert tight.bytes <= less and loose.bytes <= more
    assert (
        tight.mini_batch >= loose.mini_batch
        and tight.logit_chunk_multiplier >= loose.logit_chunk_multiplier
    )


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(0, 2**34))
def test_it_gives_up_only_when_one_sequence_and_one_row_do_not_fit(sizes, free):
    batch, length, hidden, vocab = sizes
    least = length * hidden * 6 + vocab * 10
    if free >= least:
        assert choose_chunks(*sizes, free).bytes <= free
    else:
        with pytest.raises(ValueError, match=r"needs [\d.]+ GiB .* are free.*GiB more"):
            choose_chunks(*sizes, free)


def test_choices():
    assert choose_chunks(4, 8192, 2880, 201_088, 2**40).logit_chunk_multiplier == 4
    assert choose_chunks(4, 65_536, 2880, 201_088, 2**40) == Chunks(
        1, 16, 4 * 65_536 * 2880 * 6 + 4 * 65_536 // 16 * 201_088 * 10
    )
    assert (
        choose_chunks(
            4, 65_536, 2880, 201_088, 2**40, mini_batch=3, logit_chunk_multiplier=7
        ).mini_batch
        == 3
    )
    assert choose_chunks(4, 8192, 2880, 201_088, 2**30, mini_batch=2).mini_batch == 2
    with pytest.raises(ValueError, match="mini_batch is 0"):
        choose_chunks(4, 8192, 2880, 201_088, 2**40, mini_batch=0)
    with pytest.raises(ValueError, match="leave mini_batch and logit_chunk_multiplier"):
        choose_chunks(4, 8192, 2880, 201_088, 2**30, logit_chunk_multiplier=1)


def test_a_choice_is_enough_in_practice():
    "The bytes of a choice cover what one bf16 piece really needs, forward and backward."
    h, W, index, *_ = inputs(1, 512, 32, 2000, dtype=torch.bfloat16)
    choice = choose_chunks(1, 512, 32, 2000, 1_000_000)
    with Live(W, index) as live:
        states = h.detach().clone().requires_grad_()
        chunked(
            states,
            W,
            index,
            mini_batch=choice.mini_batch,
            logit_chunk_multiplier=choice.logit_chunk_multiplier,
        ).sum().backward()
    small = (
        16 * 512 + 8 * 2000
    )  # a few numbers a token, and the row of positions that the one-hot is compared with
    assert 0.7 * choice.bytes < live.peak < choice.bytes + small


# ---- errors


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(index=torch.tensor([[0, 9]])), "values from 0 to 9.*5 entries 0 to 4"),
        (dict(index=torch.tensor([[0, -100]])), "from -100 to 0.*mask"),
        (
            dict(index=torch.zeros(1, 3, dtype=torch.long)),
            r"index has shape \(1, 3\).*need \(1, 2\)",
        ),
        (dict(hidden_states=torch.zeros(1, 2, 5)), "these are logits already"),
        (dict(bias=torch.zeros(3)), r"bias has shape \(3,\).*needs \(5,\)"),
        (
            dict(lm_head=torch.zeros(5, 4, dtype=torch.bfloat16)),
            "float32 and lm_head is torch.bfloat16.*autocast",
        ),
        (dict(temperature=0.0), "temperature is 0.0.*above 0"),
        (dict(logit_softcapping=0.0), "or None for no soft cap"),
        (dict(mini_batch=0), "mini_batch is 0.*at least 1"),
        (dict(logit_chunk_multiplier=2.5), "logit_chunk_multiplier is 2.5.*whole number"),
    ],
)
def test_errors_are_sentences(change, message):
    arguments = (
        dict(
            hidden_states=torch.zeros(1, 2, 4),
            lm_head=torch.zeros(5, 4),
            index=torch.zeros(1, 2, dtype=torch.long),
        )
        | change
    )
    with pytest.raises(ValueError, match=message):
        chunked(**arguments)


def test_errors_of_the_plain_form():
    with pytest.raises(ValueError, match="vocabulary has the 3 entries 0 to 2"):
        selective_log_softmax(torch.zeros(1, 1, 3), torch.tensor([[3]]))
    with pytest.raises(ValueError, match=r"need one of shape \(1, 2\)"):
        selective_log_softmax(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature is -1"):
        selective_log_softmax(torch.zeros(1, 1, 3), torch.tensor([[0]]), temperature=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_on_a_gpu(trained, softcap):
    "The compiled softmax, in bf16, chunks of several sizes, against float64."
    h, W, index, _, weights = (
        x if x is None else x.cuda() for x in inputs(2, 301, 64, 5000, dtype=torch.bfloat16)
    )
    h, W, index, weights = (
        h.detach().mul(0.3).requires_grad_(),
        W.requires_grad_(trained),
        index,
        weights.float(),
    )
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (h, W)]
    logps, entropy = chunked(
        h,
        W,
        index,
        logit_softcapping=softcap,
        mini_batch=2,
        logit_chunk_multiplier=4,
        return_entropy=True,
    )
    right, right_entropy = reference(*wide, index, softcap=softcap)
    torch.testing.assert_close(logps.double(), right, atol=0.1, rtol=0.01)
    torch.testing.assert_close(entropy.double(), right_entropy, atol=0.1, rtol=0.01)
    for bonus in (0.0, 0.1):
        loss = (logps * weights).sum() + (bonus * (entropy * weights).sum() if bonus else 0)
        truth = (right * weights).sum() + bonus * (right_entropy * weights).sum()
        leaves = [i for i, x in enumerate(wide) if x.requires_grad]
        mine = torch.autograd.grad(loss, [(h, W)[i] for i in leaves], retain_graph=True)
        for a, b in zip(
            mine, torch.autograd.grad(truth, [wide[i] for i in leaves], retain_graph=True)
        ):
            assert (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_only_some_tokens_could_be_drawn(softcap, trained, entropy):
    h, W, index, b, weights = inputs(3, 7, 5, 11, trained=trained, bias=True)
    others = torch.rand(3, 7, 11).argsort(-1)[..., :3]
    left = torch.cat([index[..., None], others], -1)
    left[0, :, 2:] = -1  # two are left, in the first row
    left[1, 3:] = -1  # nothing is known of these
    kept = torch.zeros(3, 7, 11, dtype=torch.bool)
    for i, t, k in (left >= 0).nonzero().tolist():
        kept[i, t, left[i, t, k]] = True
    kept[1, 3:] = True

    z = h @ W.T + b
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = (z / 0.7).masked_fill(~kept, -math.inf).log_softmax(-1)
    plain = logp.gather(-1, index[..., None])[..., 0]
    ours = chunked(
        h,
        W,
        index,
        bias=b,
        temperature=0.7,
        logit_softcapping=softcap,
        survivors=left,
        mini_batch=2,
        return_entropy=entropy,
    )
    total, other = (weights * plain).sum(), weights * (ours[0] if entropy else ours)
    if entropy:
        uncertain = -(logp.exp() * logp.masked_fill(~kept, 0)).sum(-1)
        torch.testing.assert_close(ours[1], uncertain)
        total, other = (
            total + (weights.flip(1) * uncertain).sum(),
            other + weights.flip(1) * ours[1],
        )
    torch.testing.assert_close(ours[0] if entropy else ours, plain)
    if softcap is None:
        of_logits = selective_log_softmax(h @ W.T + b, index, temperature=0.7, survivors=left)
        torch.testing.assert_close(of_logits, plain)
    leaves = [h, W, b] if trained else [h]
    for mine, its in zip(
        torch.autograd.grad(other.sum(), leaves), torch.autograd.grad(total, leaves)
    ):
        torch.testing.assert_close(mine, its)
