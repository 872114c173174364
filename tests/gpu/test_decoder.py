"""The engine's direct way on a GPU: kernels against formulas, recorded steps against the modules,
memory over many rollouts, a full-size model's numbers. (pytest -m gpu -s prints them)"""

import gc
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_decoders import parts_of
from transformers import GptOssConfig, GptOssForCausalLM

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import continuous_batching
from grpo_nb.rollout.arrivals import Arrivals, Asked
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small(dtype=torch.float32, **changes):
    "Heads of 64, windows of 16, 4 layers: what the kernels want, small."
    model, tokenizer = tiny_gpt_oss(
        num_hidden_layers=4,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=16,
        num_experts=8,
        **changes,
    )
    return model.to("cuda", dtype), tokenizer


def prompts_of(lengths, vocabulary=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(7, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def trainer_logps(model, rollout):
    "Log-probs of a rollout in one pass over whole sequences, (N, T)."
    ids, mask = pad_left(rollout.prompt_ids, device="cuda")
    ids, mask = torch.cat([ids, rollout.completion_ids], 1), torch.cat([mask, rollout.mask], 1)
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    start = ids.shape[1] - rollout.completion_ids.shape[1]
    return (
        logits[:, start - 1 : -1]
        .float()
        .log_softmax(-1)
        .gather(-1, rollout.completion_ids[..., None])[..., 0]
        * rollout.mask
    )


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("rows", [1, 3, 40, 100])
@pytest.mark.parametrize("adapters", [False, True])
def test_float32_equals_the_modules(rows, adapters):
    model, tokenizer = small()
    if adapters:
        model = get_peft_model(
            model,
            LoraConfig(
                r=4,
                target_modules=["q_proj", "v_proj", "o_proj"],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ),
        )
        torch.manual_seed(0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.normal_(std=0.1)
        model.eval()
    engine = RolloutEngine(model, tokenizer)
    assert "Triton" in engine.way
    prompts = prompts_of([1 + 37 * i % 300 for i in range(rows)])
    rollout = engine.generate(prompts, SamplingParams(max_tokens=40, stop_token_ids=(), seed=0))
    torch.testing.assert_close(trainer_logps(model, rollout), rollout.logps, atol=2e-3, rtol=0)
    greedy = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=())
    mine, theirs = (
        engine.generate(prompts, greedy),
        RolloutEngine(model, tokenizer, through_modules=True).generate(prompts, greedy),
    )
    assert (mine.completion_ids == theirs.completion_ids).all(
        1
    ).float().mean() > 0.95  # a near tie may turn out differently


def test_a_first_step_compiles_its_kernels_together(monkeypatch):
    "All of them before any is launched, and the step itself compiles no other."
    import triton

    compiled, together = [], continuous_batching.compile_together

    def heard(*, src, **_):
        compiled.append(src.name)

    def watched(work):
        before = len(compiled)
        count = together(work)
        compiled.append(("together", count, len(compiled) - before))
        return count

    monkeypatch.setattr(triton.knobs.compilation, "listener", heard)
    monkeypatch.setattr(continuous_batching, "compile_together", watched)
    model, tokenizer = small(torch.bfloat16, hidden_size=320)  # a size that no other test has
    params = SamplingParams(max_tokens=6, stop_token_ids=(), seed=0)
    rollout = RolloutEngine(model, tokenizer).generate(prompts_of([5, 9, 30]), params)
    at = next(n for n, x in enumerate(compiled) if isinstance(x, tuple))
    _, count, heard_of = compiled[at]
    print(compiled)
    assert count == heard_of > 5
    # only attention, with which prompts are read, compiles its own
    assert set(compiled[at + 1 :]) <= {f"_{x}_kernel" for x in ("forward", "delta", "dkv", "dq")}
    again = RolloutEngine(model, tokenizer).generate(prompts_of([5, 9, 30]), params)
    assert torch.equal(again.completion_ids, rollout.completion_ids)


@pytest.mark.parametrize("rows", [3, 100])
def test_turns_behind_their_prefixes_equal_one_pass(rows):
    model, tokenizer = small(initializer_range=0.2)
    engine, prompts = RolloutEngine(model, tokenizer), prompts_of([5 + i % 40 for i in range(rows)])
    prefixes = [None] * rows
    for turn in range(3):
        params = SamplingParams(max_tokens=40, seed=turn, stop_token_ids=tuple(range(16, 20)))
        rollout = engine.generate(prompts, params, prefixes=prefixes)
        expected = trainer_logps(model, rollout)
        torch.testing.assert_close(rollout.logps, expected, rtol=0, atol=2e-3)
        for i, (row, one) in enumerate(zip(prompts, prefixes)):
            ids = row + rollout.completion_ids[i, : rollout.lengths[i]].tolist()
            assert one.ids == tuple(ids[:-1])
            prompts[i] = ids + [7 + i % 9] * (1 + i % 30)


@pytest.mark.parametrize("rows, most", [(40, None), (100, 24)])
def test_rows_that_come_back_equal_one_pass(rows, most):
    "Rows join a batch that is being decoded, after tools of different speed."
    model, tokenizer = small(initializer_range=0.2)
    engine = RolloutEngine(model, tokenizer, max_batch_size=most)
    prompts, turns = prompts_of([5 + i % 40 for i in range(rows)]), [0] * rows
    whole, drawn = [list(ids) for ids in prompts], []

    def asked(i):
        room = 90 - len(whole[i]) + len(prompts[i])
        return Asked(i, list(whole[i]), room, 1 + i + 1000 * turns[i], kept.pop(i, None))

    def read(i, rollout, place, prefix):
        length = int(rollout.lengths[place])
        assert length <= asked_for[i].max_tokens
        ids, logps = rollout.completion_ids[place, :length], rollout.logps[place, :length]
        drawn.append((list(whole[i]), ids.tolist(), logps.cpu()))
        whole[i] += ids.tolist() + [7 + i % 9] * (1 + i % 12)
        turns[i], kept[i] = turns[i] + 1, prefix
        if turns[i] == 4 or len(whole[i]) - len(prompts[i]) > 80:
            return None
        calls = SimpleNamespace(ended=False, deadline=math.inf)

        def end():
            calls.ended = True
            arrivals.wake()

        threading.Timer(i % 5 * 0.02, end).start()
        return calls

    def go_on(i, calls):
        asked_for[i] = asked(i)
        return asked_for[i]

    kept: dict = {}
    asked_for = {i: asked(i) for i in range(rows)}
    arrivals = Arrivals(asked_for.values(), read, go_on)
    params = SamplingParams(max_tokens=90, stop_token_ids=tuple(range(16, 20)))
    assert engine.draw_arrivals(arrivals, params) == model.device
    assert all(count == 4 or len(ids) > 80 for count, ids in zip(turns, whole))
    for before, ids, logps in drawn:
        with torch.no_grad():
            logits = model(torch.tensor([before + ids], device=model.device)).logits[0]
        scores = logits[len(before) - 1 : -1].float().log_softmax(-1).cpu()
        one_pass = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(logps, one_pass, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "params",
    [
        dict(top_k=5),
        dict(top_p=0.8),
        dict(min_p=0.1),
        dict(repetition_penalty=1.3),
        dict(temperature=0, repetition_penalty=1.3),
        dict(temperature=0.6),
    ],
    ids=str,
)
def test_filters_and_stops(params):
    model, tokenizer = small()
    params = SamplingParams(max_tokens=60, n=8, seed=1, stop_token_ids=(7, 8), **params)
    rollout, again = (
        RolloutEngine(model, tokenizer).generate(prompts_of([5, 30, 150]), params) for _ in range(2)
    )
    assert torch.equal(rollout.completion_ids, again.completion_ids)  # a seed is a seed
    for ids, length, reason in zip(
        rollout.completion_ids.tolist(), rollout.lengths.tolist(), rollout.finish_reasons
    ):
        stops = [t for t, i in enumerate(ids[:length]) if i in (7, 8)]
        assert stops == ([length - 1] if reason == "stop" else []) and (
            reason == "stop" or length == 60
        )
    assert (rollout.logps[rollout.mask] <= 1e-6).all() and rollout.logps.isfinite().all()


def test_what_is_drawn_follows_the_distribution():
    model, tokenizer = small()
    prompt, count = prompts_of([9]), 40_000
    with torch.no_grad():
        expected = model(torch.tensor(prompt, device="cuda")).logits[0, -1].float().softmax(-1)
    drawn = [
        RolloutEngine(model, tokenizer).generate(
            prompt, SamplingParams(n=512, max_tokens=2, stop_token_ids=())
        )
        for _ in range(count // 512)
    ]
    first = torch.cat([r.completion_ids[:, 0] for r in drawn])
    seen = torch.bincount(first, minlength=len(expected)) / len(first)
    assert (seen - expected).abs().max() < 5 * (0.25 / len(first)) ** 0.5
    second = torch.cat(
        [r.completion_ids[:, 1] for r in drawn]
    )  # the recorded step draws anew at each replay
    assert len(second.unique()) > 5


def test_nothing_waits_inside_a_step():
    model, tokenizer = small()
    engine, params = (
        RolloutEngine(model, tokenizer),
        SamplingParams(max_tokens=200, stop_token_ids=()),
    )
    engine.generate(prompts_of([8] * 16), params)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        engine.generate(prompts_of([8] * 16), params)
    calls = {e.key: e.count for e in trace.key_averages()}
    assert (
        calls.get("cudaGraphLaunch", 0) >= 199
        and calls.get("cudaStreamSynchronize", 0) + calls.get("cudaEventSynchronize", 0) < 60
    )


def test_memory_is_given_back_over_200_cycles():
    model, tokenizer = small(torch.bfloat16)
    engine = RolloutEngine(model, tokenizer)

    def cycle(i):
        engine.generate(
            prompts_of([40 + i % 50] * 8),
            SamplingParams(max_tokens=64 + i % 30, n=4, stop_token_ids=()),
        )
        held = torch.randn(
            2**22 + 2**10 * (i % 7), device="cuda", requires_grad=True
        )  # training in between
        (held * 2).sum().backward()

    for i in range(5):
        cycle(i)
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(200):
        cycle(i)
    gc.collect()
    torch.cuda.empty_cache()
    assert (
        torch.cuda.memory_allocated() <= allocated + 2**20
        and torch.cuda.memory_reserved() <= reserved + 2**22
    )


def test_a_budget_that_does_not_fit_is_a_sentence_and_nothing_is_allocated():
    model, tokenizer = small(torch.bfloat16, max_position_embeddings=2**31)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with pytest.raises(MemoryError, match="GiB are free"):
        RolloutEngine(model, tokenizer).generate(prompts_of([8]), SamplingParams(max_tokens=2**30))
    assert torch.cuda.max_memory_allocated() <= before + 2**12  # the stop tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_as_near_to_float32_as_the_modules(dtype):
    exact, tokenizer = small()
    model, _ = small(dtype)
    prompts = prompts_of([1 + 23 * i % 100 for i in range(32)])
    rollout = RolloutEngine(model, tokenizer).generate(
        prompts, SamplingParams(max_tokens=64, stop_token_ids=(), seed=0)
    )
    truth = trainer_logps(exact, rollout)
    mine, theirs = (
        (rollout.logps - truth).abs().mean().item(),
        (trainer_logps(model, rollout) - truth).abs().mean().item(),
    )
    print(f"\n{dtype}: mean error of log-probs, engine {mine:.2e}, modules {theirs:.2e}")
    assert mine < 1.3 * theirs


def full_size(residual_scale=1.0):
    "gpt-oss-20b with random weights, made on the GPU."
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = GptOssForCausalLM(
                GptOssConfig(
                    num_hidden_layers=24,
                    num_local_experts=32,
                    attn_implementation="sink",
                    experts_implementation="routed",
                )
            )
    finally:
        torch.set_default_dtype(default)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed" in name or "sinks" in name:
                p.normal_()
            elif "norm" in name:
                p.fill_(1)
            elif "bias" in name:
                p.zero_()
            else:
                p.normal_(
                    std=0.05
                    if "router" in name
                    else 0.02 * (residual_scale if "o_proj" in name or "down_proj" in name else 1)
                )
    return model.eval()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30,
    reason="needs a GPU with 60 GiB: gpt-oss-20b in bfloat16 takes 39",
)
@pytest.mark.parametrize(
    "residual_scale", [1.0, 48**-0.5], ids=["all 0.02", "residual projections / sqrt(48), as GPT-2"]
)
def test_the_gap_of_a_full_size_model(residual_scale):
    """Random weights pass every rounding on: the yardstick is what two batch shapes of the
    trainer's own pass differ by."""
    import grpo_nb.model.adapters  # registers "sink" and "routed"  # noqa: F401
    from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps

    model = full_size(residual_scale)
    ids = torch.randint(model.config.vocab_size, (4, 32), device="cuda")
    with torch.no_grad():
        logits = model(ids).logits.float()
    low, high = 1e-3, 1e3
    for _ in range(30):  # scale the head until the entropy is 2 nats
        scale = (low * high) ** 0.5
        logps = (logits * scale).log_softmax(-1)
        low, high = (scale, high) if -(logps.exp() * logps).sum(-1).mean() > 2 else (low, scale)
    del logits, logps
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    rollout = RolloutEngine(model, None).generate(
        prompts_of([20 + 7 * i % 100 for i in range(32)], vocabulary=199_000),
        SamplingParams(max_tokens=64, stop_token_ids=(), seed=0),
    )
    batch = TrainingBatch(
        *pad_left(rollout.prompt_ids, device="cuda"),
        rollout.completion_ids,
        rollout.mask,
        rollout.mask,
        torch.zeros(32, device="cuda"),
    )
    with torch.no_grad():
        together, entropy = completion_logps(model, batch, return_entropy=True)
        fours = torch.cat(
            [completion_logps(model, batch.rows(slice(i, i + 4)))[0] for i in range(0, 32, 4)]
        )
    gap, own = (
        (together - rollout.logps).abs().mean().item(),
        (together - fours).abs().mean().item(),
    )
    print(
        f"\n{torch.cuda.get_device_name()}: entropy {entropy.mean():.2f} nats; mean "
        f"|difference| of log-probs: engine and trainer {gap:.4f}, trainer with 32 and with "
        f"4 rows {own:.4f}"
    )
    assert gap < 6 * own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_prompt_is_read_in_parts(dtype, monkeypatch):
    model, tokenizer = small(dtype)
    parts_of(128, monkeypatch)
    params = SamplingParams(max_tokens=30, n=2, seed=0)
    rollout = RolloutEngine(model, tokenizer).generate(prompts_of((300, 40, 257)), params)
    apart = (trainer_logps(model, rollout) - rollout.logps).abs()
    assert apart.max() < 2e-3 if dtype == torch.float32 else apart.mean() < 0.05
