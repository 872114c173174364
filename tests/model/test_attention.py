"""Attention with sinks: every backend against the formula, the formula and whole models against
transformers' own, and what is refused."""

import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import grpo_nb.model.attention as attention
from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model import limits
from grpo_nb.model.attention import (
    check_attention,
    choose_backend,
    has_sinks,
    sink_attention,
    transformers_attention,
    transformers_mask,
)
from grpo_nb.model.masks import Mask
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps
from grpo_nb.training.policy_model import load_policy
from grpo_nb.training.trainer import GRPOTrainer

OURS = ["sink", "sink_eager", "sink_key", "sink_lean", "sink_lse"]


def tensors(seed, B, Hk, G, Lq, Lk, D, sinks=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return [
        draw(B, Hk * G, Lq, D),
        draw(B, Hk, Lk, D),
        draw(B, Hk, Lk, D),
        3 * draw(Hk * G) if sinks else None,
    ], draw(B, Hk * G, Lq, D)


def value_and_gradients(function, inputs, upstream, **options):
    inputs = [x if x is None else x.clone().requires_grad_() for x in inputs]
    out = function(*inputs, **options)
    return [
        out.detach(),
        *torch.autograd.grad(
            (out * upstream.to(out.dtype)).sum(), [x for x in inputs if x is not None]
        ),
    ]


def largest_difference(a, b):
    assert all(x.isfinite().all() for x in [*a, *b])
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def all_paths(patch):
    "Short calls take the backend that was asked for, and pieces are short."
    patch.setattr(attention, "FEW_QUERIES", 0)
    patch.setattr(attention, "ROWS_PER_PIECE", 16)
    patch.setattr(limits, "PART_BYTES", 0)


@pytest.fixture
def never_few(monkeypatch):
    all_paths(monkeypatch)


problems = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 10_000),
        B=st.integers(1, 3),
        Hk=st.integers(1, 2),
        G=st.sampled_from([1, 2, 4]),
        D=st.sampled_from([4, 5, 16]),
        Lq=st.integers(1, 140),
        offset=st.sampled_from([0, 0, 1, 7, 70]),
        beyond=st.sampled_from([0, 0, 5]),
        window=st.sampled_from([None, None, 1, 8, 63, 64, 100, 300]),
        padded=st.booleans(),
        sinks=st.sampled_from([True, True, True, False]),
        as_tensor=st.booleans(),
    )
)


def problem(p):
    Lk = p["offset"] + p["Lq"] + p["beyond"]
    inputs, upstream = tensors(p["seed"], p["B"], p["Hk"], p["G"], p["Lq"], Lk, p["D"], p["sinks"])
    pad_lens = (
        torch.randint(0, Lk + 1, (p["B"],), generator=torch.Generator().manual_seed(p["seed"]))
        if p["padded"]
        else None
    )
    return (
        inputs,
        upstream,
        dict(
            pad_lens=pad_lens,
            offset=torch.tensor(p["offset"]) if p["as_tensor"] else p["offset"],
            window=p["window"],
        ),
    )


@settings(max_examples=50, deadline=None)
@given(problems)
def test_fast_forms_equal_the_formula_with_gradients(p):
    inputs, upstream, options = problem(p)
    with pytest.MonkeyPatch.context() as patch:
        all_paths(patch)
        truth = value_and_gradients(sink_attention, inputs, upstream, backend="eager", **options)
        assert all(x.dtype == torch.float64 for x in truth)
        for backend in ("sdpa", "sdpa_lean", "flash"):
            assert (
                largest_difference(
                    value_and_gradients(
                        sink_attention, inputs, upstream, backend=backend, **options
                    ),
                    truth,
                )
                < 1e-10
            )


@settings(max_examples=30, deadline=None)
@given(problems)
def test_the_formula_equals_transformers(p):
    "Rows that see something; theirs gives the others a uniform softmax of masked scores."
    inputs, upstream, options = problem({**p, "sinks": True})
    mask = Mask(
        options["pad_lens"], p["Lq"], inputs[1].shape[2], options["offset"], options["window"]
    ).dense()  # (B or 1, Lq, Lk)
    seen = mask.any(-1)[:, None, :, None]
    upstream = upstream * seen

    def theirs(q, k, v, sinks):
        module = SimpleNamespace(num_key_value_groups=p["G"], sinks=sinks, training=False)
        added = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)[
            :, None
        ]
        return (
            eager_attention_forward(module, q, k, v, added, p["D"] ** -0.5)[0].transpose(1, 2)
            * seen
        )

    assert (
        largest_difference(
            value_and_gradients(sink_attention, inputs, upstream, backend="eager", **options),
            value_and_gradients(theirs, inputs, upstream),
        )
        < 1e-10
    )


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sinks", [True, False])
def test_rows_that_see_nothing_are_zero_and_their_gradients_finite(never_few, window, sinks):
    inputs, upstream = tensors(0, 3, 2, 2, 70, 70, 16, sinks)
    pad_lens = torch.tensor([70, 69, 0])
    for backend in ("eager", "sdpa", "sdpa_lean", "flash"):
        out, *gradients = value_and_gradients(
            sink_attention, inputs, upstream, pad_lens=pad_lens, window=window, backend=backend
        )
        assert (out[0] == 0).all() and (out[1, :, :69] == 0).all() and (out[1, :, 69] != 0).all()
        assert all(x.isfinite().all() for x in gradients) and all(
            (x[0] == 0).all() for x in gradients[:3]
        )


def test_a_kernel_without_sinks_takes_padding_too(never_few, monkeypatch):
    "And not in pieces of queries, which a dense model's long rows would be cut into."
    inputs, upstream = tensors(0, 2, 2, 2, 70, 70, 16, False)
    options = dict(pad_lens=torch.tensor([0, 30]))
    truth = value_and_gradients(sink_attention, inputs, upstream, backend="eager", **options)
    monkeypatch.setattr(attention, "sdpa", None)
    ours = value_and_gradients(sink_attention, inputs, upstream, backend="flash", **options)
    assert largest_difference(ours, truth) < 1e-10


@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)]
)
@pytest.mark.parametrize("window", [None, 24])
def test_narrow_formats(never_few, dtype, bound, window):
    inputs, upstream = tensors(1, 2, 2, 4, 200, 200, 64, dtype=dtype)
    options = dict(pad_lens=torch.tensor([5, 150]), window=window)
    truth = value_and_gradients(
        sink_attention, [x.double() for x in inputs], upstream.double(), backend="eager", **options
    )
    for backend in ("eager", "sdpa", "sdpa_lean", "flash"):
        ours = value_and_gradients(sink_attention, inputs, upstream, backend=backend, **options)
        assert all(x.dtype == dtype for x in ours)
        assert all(
            ((x.double() - y).norm() / y.norm()).item() < bound
            for x, y in zip(ours, truth, strict=True)
        )


def test_the_sinks_rounding_is_not_felt_in_16_bits(never_few):
    """With a scale that is no power of two, s / scale has more digits than bf16 holds; two columns
    carry them."""
    inputs, _ = tensors(2, 1, 1, 4, 64, 64, 16, dtype=torch.bfloat16)
    inputs[0] = torch.zeros_like(inputs[0])  # all scores 0: the sink alone decides
    inputs[2] = torch.ones_like(inputs[2])
    inputs[3] = torch.tensor([4.111, 5.222, 6.333, 7.444])  # float32 sinks of a float32 parameter
    truth = sink_attention(*[x.double() for x in inputs], scale=0.3, backend="eager")

    def error(*inputs, backend):
        return (
            ((sink_attention(*inputs, scale=0.3, backend=backend).double() - truth) / truth)
            .abs()
            .max()
        )

    one_column = (inputs[3] / 0.3).bfloat16().double() * 0.3
    assert (
        error(*inputs, backend="sdpa")
        < 0.008
        < error(*[x.double() for x in inputs[:3]], one_column, backend="eager")
    )


class Largest(TorchDispatchMode):
    "Elements of the largest tensor that any operation returns."

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.elements = max(
            [
                self.elements,
                *(
                    x.untyped_storage().nbytes() // x.element_size()
                    for x in tree_leaves(result)
                    if isinstance(x, torch.Tensor)
                ),
            ]
        )
        return result


@pytest.mark.parametrize("backend", ["sdpa", "flash"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window=128),
        dict(pad_lens=torch.tensor([500])),
        dict(window=128, pad_lens=torch.tensor([500])),
    ],
    ids=["full", "window", "padded", "window, padded"],
)
def test_no_tensor_grows_with_the_square(backend, options):
    def largest(L, name):
        inputs, upstream = tensors(0, 1, 1, 2, L, L, 16, dtype=torch.float32)
        with Largest() as seen:
            value_and_gradients(sink_attention, inputs, upstream, backend=name, **options)
        return seen.elements

    assert largest(2048, backend) <= 2.1 * largest(1024, backend) < 1024**2 / 2
    assert largest(1024, "eager") >= 2 * 1024**2


def test_auto_says_once_why(capsys):
    attention._announce.cache_clear()
    inputs, _ = tensors(0, 1, 1, 2, 40, 40, 16, dtype=torch.float32)
    for _ in range(3):
        sink_attention(*inputs)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "'eager'" in said
    q = torch.empty(1, 64, 4096, 64, device="meta")
    assert choose_backend(q, q[:, :8])[0] == "sdpa"
    sink_attention(*tensors(0, 1, 1, 2, 1, 40, 16, dtype=torch.float32)[0], offset=39)
    assert capsys.readouterr().out == ""  # few queries are no choice


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_gradients_of_some_heads_at_a_time(heads, monkeypatch):
    inputs, upstream = tensors(0, 2, 5, 1, 40, 40, 16)
    whole = value_and_gradients(sink_attention, inputs, upstream, backend="flash")
    calls, real = [], attention._flash_gradients
    monkeypatch.setattr(
        limits, "GRADIENT_BYTES", heads * attention._gradient_bytes(inputs[0], inputs[1])
    )
    monkeypatch.setattr(
        attention,
        "_flash_gradients",
        lambda d_out, *rest: calls.append(d_out.shape[1]) or real(d_out, *rest),
    )
    for a, b in zip(value_and_gradients(sink_attention, inputs, upstream, backend="flash"), whole):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert calls == {1: [1] * 5, 3: [3, 2], 5: [5]}[heads]


def test_the_trial_of_cudnn_s_kernel(monkeypatch):
    """With tensors that have shapes only: the operators take what they are given. And where there
    is none, a sentence."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    attention._cudnn_works.cache_clear()
    with FakeTensorMode():
        assert attention._cudnn_works(torch.device("cuda", 0), torch.bfloat16, 8, 64)
    attention._cudnn_works.cache_clear()
    with pytest.warns(
        UserWarning, match="8 query heads of 64 to a key head in torch.bfloat16 .* on a card"
    ):
        assert not attention._cudnn_works(torch.device("cpu"), torch.bfloat16, 8, 64)
    attention._cudnn_works.cache_clear()


def test_a_full_card_is_no_answer_about_cudnn(monkeypatch):
    def full(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    attention._cudnn_works.cache_clear()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros", full)
        attention._cudnn_works(torch.device("cpu"), torch.bfloat16, 8, 64)
    assert attention._cudnn_works.cache_info().currsize == 0


def test_flex_is_auto_and_says_so(capsys):
    attention._announce.cache_clear()
    inputs, _ = tensors(0, 1, 2, 2, 20, 20, 8)
    given, auto = (sink_attention(*inputs, backend=name) for name in ("flex", "auto"))
    assert torch.equal(given, auto) and "'flex' means 'auto'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=(2, 3, 20, 8)), "Hq a multiple of Hk"),
        (dict(k=(1, 2, 20, 8)), r"\(2, 4, 20, 8\), \(1, 2, 20, 8\)"),
        (dict(q=(2, 4, 20)), r"\(2, 4, 20\)"),
        (dict(sinks=(3,)), r"and \(3,\): give"),
        (
            dict(backend="magic"),
            "there are 'eager', 'triton', 'sdpa', 'sdpa_lean', 'flash' and 'auto'",
        ),
        (dict(offset=3), "20 queries from position 3 on and 20 keys"),
        (dict(pad_lens=torch.zeros(3, dtype=torch.long)), "the mask is for 3 sequences"),
        (dict(window=0), "window=0"),
        (dict(mask=Mask(None, 5, 5)), "5 queries from position 0 on and 5 keys"),
        (dict(mask=Mask(None, 20, 20), window=4), "mask is given, and so are"),
    ],
)
def test_refusals_are_sentences(change, message):
    shapes = dict(q=(2, 4, 20, 8), k=(2, 2, 20, 8), sinks=(4,)) | {
        name: value for name, value in change.items() if name in ("q", "k", "sinks")
    }
    options = {name: value for name, value in change.items() if name not in shapes}
    with pytest.raises(ValueError, match=message):
        sink_attention(
            torch.zeros(shapes["q"]),
            torch.zeros(shapes["k"]),
            torch.zeros(shapes["k"]),
            torch.zeros(shapes["sinks"]),
            **options,
        )


# whole models


def padded_batch(tokenizer):
    return tokenizer(["1+2=" * 5, "12+34=" * 7, "7"], padding=True, return_tensors="pt")


def answers(model, batch, implementation, checkpointing=False):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    model.train(checkpointing)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    real = batch["attention_mask"].bool()
    logits = model(**batch, use_cache=False).logits[real]
    logits.log_softmax(-1)[:, 3].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if checkpointing:
        model.gradient_checkpointing_disable()
    model.eval()
    return logits.detach(), gradients


@pytest.fixture(scope="module")
def tiny():
    return tiny_gpt_oss(num_hidden_layers=3)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_equals_transformers_eager(tiny, name, checkpointing, monkeypatch):
    model, tokenizer = tiny
    batch = padded_batch(tokenizer)
    logits, gradients = answers(model, batch, "eager")
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    ours, our_gradients = answers(model, batch, name, checkpointing)
    assert (ours - logits).abs().max() < 2e-5 and ours.isfinite().all()
    assert any("sinks" in key for key in gradients) and gradients.keys() == our_gradients.keys()
    for key, gradient in gradients.items():
        assert (our_gradients[key] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-6, key


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generate_equals_transformers_eager(tiny, name, cache, monkeypatch):
    "Past the window of 8, prompts padded on the left."
    model, tokenizer = tiny
    options = dict(
        max_new_tokens=14,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    options |= dict(use_cache=False) if cache is None else dict(cache_implementation=cache)
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    written = {}
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        written[implementation] = model.generate(**padded_batch(tokenizer), **options)
    assert torch.equal(written["eager"].sequences, written[name].sequences)
    assert (
        torch.stack(written["eager"].logits) - torch.stack(written[name].logits)
    ).abs().max() < 5e-5


@pytest.mark.parametrize("name", OURS)
def test_a_prompt_in_pieces(tiny, name, monkeypatch):
    """Chunked prefill with transformers' cache: each piece begins at an offset, and sliding layers
    have dropped what is out of sight."""
    model, tokenizer = tiny
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    batch = padded_batch(tokenizer)

    def read(implementation):
        model.set_attn_implementation(implementation)
        cache, pieces = None, []
        for start, end in ((0, 15), (15, 18), (18, batch.input_ids.shape[1])):
            with torch.no_grad():
                out = model(
                    input_ids=batch.input_ids[:, start:end],
                    attention_mask=batch.attention_mask[:, :end],
                    past_key_values=cache,
                    use_cache=True,
                )
            cache = out.past_key_values
            pieces.append(out.logits)
        return torch.cat(pieces, 1)[batch.attention_mask.bool()]

    assert (read(name) - read("eager")).abs().max() < 2e-5


@pytest.mark.parametrize("name", OURS)
def test_the_trainers_batches(tiny, name, monkeypatch):
    """Prompts padded on the left, completions on the right; under autocast no further from the
    truth than transformers' own, in the median of several batches (one batch is noise)."""
    model, tokenizer = tiny
    prompts = tokenizer(["1+2=", "12+34-5="], padding=True, return_tensors="pt")
    mask = torch.arange(30) < torch.tensor([[30], [11]])
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)

    def logps(implementation, seed):
        ids = torch.randint(7, 20, (2, 30), generator=torch.Generator().manual_seed(seed))
        batch = TrainingBatch(
            prompts.input_ids, prompts.attention_mask.bool(), ids, mask, mask, torch.ones(2)
        )
        model.set_attn_implementation(implementation)
        return completion_logps(model, batch)[0].detach()

    ratios = []
    for seed in range(15):
        truth = logps("eager", seed)
        assert (logps(name, seed) - truth).abs().max() < 2e-5
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (
                (logps(x, seed) - truth)[mask].abs().median() for x in (name, "eager")
            )  # a router that changes its mind moves a token far
        assert ours > 0
        ratios.append((ours / theirs).item())
    assert statistics.median(ratios) < 1.5


@pytest.mark.parametrize("name", OURS)
def test_a_model_without_sinks(name, monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    ).eval()
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)
    batch = dict(
        input_ids=torch.randint(20, (2, 30)),
        attention_mask=(torch.arange(30) >= torch.tensor([[0], [12]])).long(),
    )
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits, gradients = answers(model, batch, "eager")
    ours, our_gradients = answers(model, batch, name)
    assert (ours - logits).abs().max() < 1e-5 and all(
        (our_gradients[key] - g).norm() <= 1e-5 * g.norm() + 1e-6 for key, g in gradients.items()
    )
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    prompts = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    written = model.generate(**prompts, **options, cache_implementation="static")
    model.set_attn_implementation("eager")
    assert torch.equal(written, model.generate(**prompts, **options))
    model.set_attn_implementation(name)
    with pytest.raises(ValueError, match="one sequence a row"):
        model(
            input_ids=batch["input_ids"],
            position_ids=torch.arange(15).repeat(2)[None].expand(2, -1),
            use_cache=False,
        )


def test_masks_that_are_not_ours_are_refused(tiny):
    model, _ = tiny
    model.set_attn_implementation("sink")
    ids = torch.full((1, 20), 8)
    with pytest.raises(ValueError, match="between two 1s"):
        model(input_ids=ids, attention_mask=torch.tensor([[1] * 5 + [0] + [1] * 14]))
    with pytest.raises(ValueError, match="made for another attention"):
        model(input_ids=ids, attention_mask=torch.zeros(1, 1, 20, 20))
    with pytest.raises(ValueError, match="chunks of 16"):
        transformers_mask(
            q_length=32, kv_length=32, local_size=16, config=SimpleNamespace(sliding_window=None)
        )
    q = torch.zeros(1, 2, 20, 8)
    with pytest.raises(ValueError, match="dropout is 0.1"):
        transformers_attention("auto")(None, q, q, q, None, dropout=0.1)
    with pytest.raises(ValueError, match="softcap 30"):
        transformers_attention("auto")(None, q, q, q, None, softcap=30)


def test_an_empty_row_and_right_padding():
    mask = transformers_mask(
        q_length=4,
        kv_length=4,
        attention_mask=torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]),
    )
    assert mask.pad_lens.tolist() == [4, 0, 1]
    assert (
        transformers_mask(
            q_length=4, kv_length=4, attention_mask=torch.tensor([[1, 1, 1, 0]])
        ).pad_lens
        is None
    )
    late = transformers_mask(
        q_length=1,
        kv_length=3,
        q_offset=6,
        kv_offset=4,
        attention_mask=torch.tensor([[0] * 5 + [1] * 2, [0] + [1] * 6]),
        local_size=3,
    )
    assert late.pad_lens.tolist() == [1, 0] and late.offset == 2


UNFIT = [
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "kernels-community/vllm-flash-attn3",
    "paged|flash_attention_2",
    "sdpa",
]


@pytest.mark.parametrize("name", UNFIT)
def test_kernels_that_cannot_train_sinks_are_refused(name, tmp_path):
    model, _ = tiny_gpt_oss()
    assert has_sinks(model) and has_sinks(model.config)
    with pytest.raises(ValueError, match="cannot train this model, whose attention has sinks"):
        check_attention(model, name)
    model.config._attn_implementation = name
    for policy in (model, get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))):
        with pytest.raises(ValueError, match="Choose 'sink'"):
            load_policy(policy, GRPOConfig(gradient_checkpointing=False))
    model.config.save_pretrained(tmp_path)  # no weights: refused before they are looked for
    with pytest.raises(ValueError, match="Choose 'sink'"):
        load_policy(
            str(tmp_path),
            GRPOConfig(
                gradient_checkpointing=False, model_init_kwargs={"attn_implementation": name}
            ),
        )
    llama = LlamaConfig()
    check_attention(llama, name)  # no sinks, no objection


def test_what_can_train_sinks_is_let_through(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    for name in ("eager", "flex_attention", *OURS, "sink_flex", None):
        check_attention(model, name)
    model.save_pretrained(tmp_path)
    loaded = load_policy(
        str(tmp_path),
        GRPOConfig(gradient_checkpointing=False, model_init_kwargs={"attn_implementation": "sink"}),
    )
    assert loaded.config._attn_implementation == "sink"
    assert (
        load_policy(model, GRPOConfig(gradient_checkpointing=False)).config._attn_implementation
        == "eager"
    )  # the user's choice stays


def test_a_run_of_the_trainer_is_the_same(tmp_path, monkeypatch):
    """Same completions, losses and gradients as through transformers' eager attention, activations
    recomputed."""
    monkeypatch.setattr(attention, "FEW_QUERIES", 0)

    def run(name):
        model, tokenizer = tiny_gpt_oss()
        model.set_attn_implementation(name)
        config = GRPOConfig(
            output_dir=str(tmp_path / name),
            max_completion_length=20,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
        )
        trainer = GRPOTrainer(
            model,
            lambda completion_ids, **_: [len(set(ids)) for ids in completion_ids],
            config,
            addition_problems()[0],
            processing_class=tokenizer,
        )
        trainer.log.show = False
        trainer.train()
        return trainer.log_history

    for a, b in zip(run("eager"), run("sink_key"), strict=True):
        assert (
            a["reward"] == b["reward"]
            and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
            and b["sampling/gap_mean"] < 1e-6
        )


def test_a_mask_of_another_device_is_moved_once():
    mask = Mask(torch.tensor([3]), 20, 20, torch.tensor(0), 4)
    assert attention._on_device(mask, torch.device("cpu")) is mask
    moved = attention._on_device(mask, torch.device("meta"))
    assert (
        moved.pad_lens.is_meta
        and moved.offset.is_meta
        and moved.window == 4
        and attention._on_device(mask, torch.device("meta")) is moved
    )
