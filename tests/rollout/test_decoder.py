"""The direct way of the engine, on the model's own tensors, against the way through the modules and
against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from transformers import GptOssForCausalLM

from grpo_nb.model.experts_grouped import routed_experts
from grpo_nb.model.fused_layers import fuse_layers
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import engine as engine_module
from grpo_nb.rollout.continuous_batching import RowsInTurn
from grpo_nb.rollout.decoder import (
    CannotRead,
    Decoder,
    batches_of_prompts,
    open_decoder,
    read_projection,
)
from grpo_nb.rollout.engine import RolloutEngine, share_prompts
from grpo_nb.rollout.kv_cache import CacheShape
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import SamplingParams, stream_keys
from grpo_nb.training.policy_logprobs import TrainingBatch, completion_logps, find_head

TEXTS = ["12+34=", "7*8=", "1+1+1+1+1+1+1+1+1+1+1=", "100-99=", "7*8="]


def adapted_model(seed=0, **config):
    model, tokenizer = tiny_gpt_oss(seed, num_hidden_layers=4)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, **config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.1)
    return model.eval(), tokenizer


def both_ways(model, tokenizer, prompts, params, **options):
    direct, modules = (
        RolloutEngine(model, tokenizer, **options),
        RolloutEngine(model, tokenizer, through_modules=True, **options),
    )
    assert direct.way.startswith("directly") and modules.way.startswith(
        "through the model's modules"
    )
    return direct.generate(prompts, params), modules.generate(prompts, params)


def all_at_once(decoder, prompts, groups, new, stop=()):
    "Greedy completions, none of which waits for a row or a page."
    rows, shape = sum(groups), decoder.shape_for(max(map(len, prompts)) + new)
    pages = shape.pages([*map(len, prompts)], groups, new)
    pages = max(pages, shape.pages([max(map(len, prompts))], [1], new))
    greedy, stop = SamplingParams(temperature=0, max_tokens=new), torch.tensor(stop).long()
    keys = stream_keys(rows, 0)
    return RowsInTurn(decoder, prompts, groups, greedy, stop, keys, rows, pages).run()


def assert_same(a, b, atol=2e-4):
    assert torch.equal(a.completion_ids, b.completion_ids) and torch.equal(a.mask, b.mask)
    assert a.finish_reasons == b.finish_reasons and a.prompt_ids == b.prompt_ids
    torch.testing.assert_close(a.logps, b.logps, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0),
        dict(temperature=0, repetition_penalty=1.3),
        dict(seed=1),
        dict(seed=1, n=3, temperature=0.7, top_k=5),
        dict(seed=2, n=2, top_p=0.8, min_p=0.02),
        dict(seed=3, n=4, repetition_penalty=1.2),
        dict(seed=0, n=8, stop_token_ids=(7, 8, 9)),
        dict(seed=0, max_tokens=1),
    ],
    ids=str,
)
def test_both_ways_draw_the_same(params):
    model, tokenizer = tiny_gpt_oss(0, num_hidden_layers=4)
    assert_same(
        *both_ways(model, tokenizer, TEXTS[:4], SamplingParams(**{"max_tokens": 30, **params}))
    )


@pytest.mark.parametrize(
    "config",
    [
        dict(target_modules=["q_proj", "v_proj"]),
        dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], use_rslora=True),
        dict(
            target_modules=["o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    ],
    ids=["q v", "all of attention", "experts"],
)
def test_adapters(config):
    model, tokenizer = adapted_model(**config)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with_adapter = both_ways(model, tokenizer, TEXTS, greedy)
    assert_same(*with_adapter)
    with model.disable_adapter():
        without = both_ways(model, tokenizer, TEXTS, greedy)
    assert_same(*without)
    assert not torch.equal(with_adapter[0].logps[:, 0], without[0].logps[:, 0])


def test_two_active_adapters():
    model, tokenizer = adapted_model(target_modules=["q_proj", "v_proj"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj", "o_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "second" in name:
                p.normal_(std=0.2)
    model.base_model.set_adapter(["default", "second"])
    assert_same(*both_ways(model, tokenizer, TEXTS, SamplingParams(temperature=0, max_tokens=16)))


def test_the_next_rollout_follows_the_weights():
    """Nothing is copied: a change of the training module's tensors, in place, is what the same
    engine samples from."""
    model, tokenizer = adapted_model(target_modules=["q_proj"])
    engine = RolloutEngine(model, tokenizer)
    before = engine.generate(TEXTS, SamplingParams(temperature=0, max_tokens=8))
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.mul_(-3)
    after = engine.generate(TEXTS, SamplingParams(temperature=0, max_tokens=8))
    assert not torch.allclose(before.logps[:, 0], after.logps[:, 0])
    assert_same(
        after,
        RolloutEngine(model, tokenizer, through_modules=True).generate(
            TEXTS, SamplingParams(temperature=0, max_tokens=8)
        ),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    groups=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    new=st.integers(1, 12),
    page=st.sampled_from([None, 1, 4, 16]),
)
def test_any_lengths_groups_and_pages(lengths, groups, new, page):
    model, _ = tiny_gpt_oss(1, num_hidden_layers=4)
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(7, 20, (n,), generator=generator).tolist() for n in lengths]
    decoder = Decoder(model)
    paged = type(
        "Paged",
        (Decoder,),
        {
            "shape": property(
                lambda self: CacheShape(
                    self.windows, self.kv_heads, self.head_dim, self.dtype, page
                )
            )
        },
    )
    decoder.__class__ = paged
    with torch.no_grad():
        state = all_at_once(decoder, prompts, groups[: len(prompts)], new)
    expected = RolloutEngine(model, None, through_modules=True).generate(
        [p for p, g in zip(prompts, groups) for _ in range(g)],
        SamplingParams(temperature=0, max_tokens=new, stop_token_ids=()),
    )
    assert torch.equal(state.ids[:-1], expected.completion_ids) and not state.alive.any()
    torch.testing.assert_close(state.logps[:-1], expected.logps, atol=1e-4, rtol=0)


def test_prompts_that_return_are_read_once_and_rows_keep_their_order():
    model, tokenizer = tiny_gpt_oss(0)
    ids = [tokenizer(t).input_ids for t in TEXTS]
    shuffled = [ids[i] for i in (4, 0, 1, 2, 0, 1)]
    assert len(share_prompts(shuffled)[0]) == 3
    assert_same(
        *both_ways(model, tokenizer, shuffled, SamplingParams(temperature=0, max_tokens=12))
    )


def test_rows_that_end_are_dropped_and_change_nothing():
    model, tokenizer = tiny_gpt_oss(3)
    texts = [f"{a}*{b}=" for a in (1, 22, 333) for b in (4, 55, 666, 7777)]
    free = RolloutEngine(model, tokenizer).generate(
        texts, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=())
    )
    stop = free.completion_ids[[0, 1, 2], [3, 9, 15]].tolist()
    sizes = []
    step = Decoder.step

    class Watched(Decoder):
        def step(self, cache, state, rows, reach):
            sizes.append(len(state.last[rows]))
            return step(self, cache, state, rows, reach)

    unique, _ = share_prompts([tokenizer(t).input_ids for t in texts])
    with torch.no_grad():
        state = all_at_once(Watched(model), unique, [1] * 12, 40, stop)
    assert min(sizes) < 12 and sizes == sorted(sizes, reverse=True)
    for i, row in enumerate(free.completion_ids.tolist()):
        length = next((t + 1 for t, token in enumerate(row) if token in stop), 40)
        assert state.counts[i] == length and state.ids[i, :length].tolist() == row[:length]


def test_under_autocast_it_errs_no_more_than_the_modules():
    """Over five seeds, by the median: rounding that sends a token to another expert, on either
    side, says nothing of the sampler."""
    ours, theirs = [], []
    for seed in range(5):
        model, tokenizer = tiny_gpt_oss(seed)
        rollout = RolloutEngine(model, tokenizer, autocast_dtype=torch.bfloat16).generate(
            TEXTS, SamplingParams(max_tokens=5, seed=seed, stop_token_ids=())
        )
        for prompt, ids, logps in zip(
            rollout.prompt_ids, rollout.completion_ids.tolist(), rollout.logps
        ):

            def by_modules(bfloat16, prompt=prompt, ids=ids, model=model):
                whole = torch.tensor([prompt + ids])
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
                return logits.float().log_softmax(-1)[range(5), ids]

            exact = by_modules(False)
            ours.append(logps - exact)
            theirs.append(by_modules(True) - exact)
    ours, theirs = torch.cat(ours).abs().median(), torch.cat(theirs).abs().median()
    assert 0 < ours < 1.5 * theirs  # not 0: it was computed in bfloat16


def test_the_training_state_is_left_alone():
    model, tokenizer = adapted_model(target_modules=["q_proj"])
    model.train()
    model.gradient_checkpointing_enable()
    rollout = RolloutEngine(model, tokenizer).generate(TEXTS, SamplingParams(max_tokens=4))
    assert (
        all(m.training for m in model.modules())
        and torch.is_grad_enabled()
        and not rollout.logps.requires_grad
    )


def test_numbers_that_are_none_are_reported():
    model, tokenizer = tiny_gpt_oss(0)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    for temperature in (0, 1.0):
        with pytest.raises(FloatingPointError, match="token 0 of completion 0"):
            RolloutEngine(model, tokenizer).generate(
                TEXTS, SamplingParams(temperature=temperature, max_tokens=3)
            )


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
def test_what_cannot_be_read_goes_through_the_modules():
    from transformers import OlmoConfig, OlmoForCausalLM

    olmo = OlmoForCausalLM(
        OlmoConfig(
            vocab_size=24,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    dora = get_peft_model(
        tiny_gpt_oss()[0], LoraConfig(r=2, use_dora=True, target_modules=["q_proj"])
    )
    head = get_peft_model(
        tiny_gpt_oss()[0], LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    mixed = tiny_gpt_oss()[0]
    mixed.lm_head.to(torch.bfloat16)
    packed = tiny_gpt_oss()[0]
    experts = packed.model.layers[1].mlp.experts
    held = experts.down_proj.detach().as_subclass(type("Packed", (torch.Tensor,), {}))
    experts.down_proj = torch.nn.Parameter(held)
    for model, reason in (
        (olmo, "OlmoForCausalLM"),
        (dora, "DoRA"),
        (head, "the head is a ModulesToSaveWrapper"),
        (mixed, "a trial ended in RuntimeError"),
        (packed, "model.layers.1.mlp.experts has weights in a Packed"),
    ):
        decoder, why = open_decoder(model)
        assert decoder is None and reason in why
    rollout = RolloutEngine(olmo, None).generate(
        [[3, 4], [5]], SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)
    )
    assert rollout.lengths.tolist() == [4, 4]
    with pytest.raises(CannotRead, match="Embedding"):
        read_projection(torch.nn.Embedding(2, 2))


class Doubled(GptOssForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output


def times(factor, forward):
    "A forward pass whose result is multiplied."

    def multiplied(*args, **kwargs):
        out = forward(*args, **kwargs)
        if hasattr(out, "logits"):
            out.logits = factor * out.logits
            return out
        return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out

    return multiplied


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.parametrize("set_on", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        "model.layers.0",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp",
        "model.norm",
        "lm_head",
        "",
    ],
)
def test_what_changes_a_forward_pass_changes_what_is_drawn(where, set_on):
    "A hook, or a forward pass of one's own: the sampler's log-probs are those of the trainer."
    model, tokenizer = tiny_gpt_oss()
    module = model.get_submodule(where)
    if set_on:
        module.forward = times(1.5, module.forward)
    elif where == "":
        model.__class__ = Doubled
    else:
        module.register_forward_hook(lambda module, given, out: times(1.5, lambda: out)())
    assert open_decoder(model)[0] is None
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)
    )
    batch = TrainingBatch(
        *pad_left(rollout.prompt_ids),
        rollout.completion_ids,
        rollout.mask,
        rollout.mask,
        torch.zeros(len(rollout.mask)),
    )
    logps, entropy = completion_logps(model, batch, return_entropy=True)
    assert (logps - rollout.logps).abs().max() < 1e-4
    if where in ("lm_head", ""):
        assert find_head(model) is None
    plain = completion_logps(tiny_gpt_oss()[0], batch)[0]
    assert (logps - plain).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:A .* is drawn from through its modules")
@pytest.mark.parametrize("set_on", [False, True])
def test_what_changes_a_wrapper_changes_what_is_drawn(set_on):
    adapted, tokenizer = adapted_model(target_modules=["q_proj"])
    assert open_decoder(adapted)[0] is not None and find_head(adapted) is not None
    if set_on:
        adapted.forward = times(1.5, adapted.forward)
    else:
        adapted.register_forward_hook(lambda module, given, out: times(1.5, lambda: out)())
    assert open_decoder(adapted)[0] is None and find_head(adapted) is None


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_in_one_pass_is_read(adapted):
    """As load_model makes it on a GPU: its classes compute the same, and the sampler must not take
    the slow way."""
    model, tokenizer = tiny_gpt_oss()
    plain = RolloutEngine(model, tokenizer).generate(TEXTS, SamplingParams(max_tokens=4, seed=0))
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert fuse_layers(model) > 0
    engine = RolloutEngine(model, tokenizer)
    assert (
        engine.way.startswith("directly")
        and open_decoder(model)[0] is not None
        and find_head(model) is not None
    )
    assert (
        engine.generate(TEXTS, SamplingParams(max_tokens=4, seed=0)).completion_ids.tolist()
        == plain.completion_ids.tolist()
    )


def test_what_transformers_hooks_in_to_collect_outputs_changes_nothing():
    model = tiny_gpt_oss()[0]
    assert (
        len(model(torch.arange(4)[None], output_hidden_states=True).hidden_states) == 3
        and open_decoder(model)[0] is not None
    )


def test_a_merged_adapter_that_is_switched_off_is_not_there():
    model, tokenizer = adapted_model(target_modules=["q_proj", "o_proj"])
    params = SamplingParams(max_tokens=6, temperature=0)
    with model.disable_adapter():
        plain = RolloutEngine(model, tokenizer).generate(["12+3="], params)
    model.merge_adapter()
    with model.disable_adapter():
        engine = RolloutEngine(model, tokenizer)
        assert "switched off" in engine.way  # until a pass through the modules has unmerged it
        merged = engine.generate(["12+3="], params)
    assert torch.equal(plain.completion_ids, merged.completion_ids) and torch.allclose(
        plain.logps, merged.logps, atol=1e-4
    )


def test_adalora_goes_through_the_modules():
    model, tokenizer = tiny_gpt_oss()
    engine = RolloutEngine(
        get_peft_model(model, AdaLoraConfig(target_modules=["q_proj"], init_r=4, total_step=10)),
        tokenizer,
    )
    engine.generate(["1+2="], SamplingParams(max_tokens=3))
    assert "AdaLoRA" in engine.way


def test_a_batch_that_does_not_fit_is_drawn_in_parts(monkeypatch):
    model, tokenizer = tiny_gpt_oss(0)
    params = SamplingParams(temperature=0, max_tokens=8)
    whole = RolloutEngine(model, tokenizer).generate(TEXTS, params)
    shape = Decoder(model).shape
    longest = max(len(tokenizer(t).input_ids) for t in TEXTS)
    free = shape.bytes([longest] * 2, [1] * 2, 8)
    monkeypatch.setattr(engine_module, "free_memory", lambda device: free)
    engine = RolloutEngine(model, tokenizer)
    parts = engine.batches([tokenizer(t).input_ids for t in TEXTS], params, Decoder(model))[0]
    assert len(parts) > 1 and sum(map(len, parts)) == 5
    assert_same(whole, engine.generate(TEXTS, params))
    monkeypatch.setattr(engine_module, "free_memory", lambda device: 1000)
    with pytest.raises(
        MemoryError,
        match=(
            "a completion of up to 8 tokens after a prompt of 22 needs .* GiB .* and 0.00 GiB "
            "are free"
        ),
    ):
        engine.generate(TEXTS, params)


def test_prompts_are_read_in_batches_of_similar_length():
    batches = batches_of_prompts([5, 100, 7, 90, 300, 6], most=200)
    assert sorted(n for b in batches for n in b) == list(range(6)) and [4] in batches
    assert all(
        len(b) == 1 or len(b) * max([5, 100, 7, 90, 300, 6][n] for n in b) <= 200 for b in batches
    )


def test_what_comes_back_may_be_trained_on():
    model, tokenizer = tiny_gpt_oss(0)
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(max_tokens=4, seed=0, repetition_penalty=1.1)
    )
    assert not any(x.is_inference() for x in (rollout.completion_ids, rollout.mask, rollout.logps))
    ratio = torch.zeros_like(rollout.logps, requires_grad=True)
    (ratio * rollout.logps).sum().backward()
    torch.testing.assert_close(ratio.grad, rollout.logps)


@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_loop_over_experts(dtype, bound, tokens):
    model, _ = adapted_model(
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    experts = Decoder(model.to(dtype)).layers[0].experts
    generator = torch.Generator().manual_seed(tokens)
    hidden, indices = (
        torch.randn(tokens, 128, generator=generator, dtype=torch.float64).to(dtype),
        torch.rand(tokens, 3, generator=generator).topk(2).indices + 1,
    )  # nobody asks expert 0
    weights = torch.rand(tokens, 2, generator=generator).to(dtype)
    with torch.inference_mode():
        loop, expected, auto = (
            routed_experts(hidden, indices, weights, experts, path=path)
            for path in ("loop", "reference", "auto")
        )
    assert loop.dtype == dtype and len(experts.gate_up_lora) == len(experts.down_lora) == 1
    assert (loop - expected).norm() <= bound * expected.norm() and (
        auto - expected
    ).norm() <= bound * expected.norm()
    with pytest.raises(RuntimeError):  # torch refuses gradients of what is written in place
        routed_experts(hidden, indices, weights.requires_grad_(), experts, path="loop")


def test_rotations_looked_up_are_those_computed():
    decoder = Decoder(tiny_gpt_oss()[0])
    for positions, reach in (
        (torch.tensor([3, 0], dtype=torch.int32), 4),
        (torch.tensor([90, 7]), 91),
        (torch.tensor([5]), 6),
    ):
        for looked_up, computed in zip(
            decoder.rotation_at(positions, reach), decoder.rotation(positions)
        ):
            assert torch.equal(looked_up, computed)


def test_experts_of_a_long_prompt_work_in_slices(monkeypatch):
    from grpo_nb.model import experts_grouped
    from grpo_nb.rollout import decode_ops

    decoder = Decoder(tiny_gpt_oss(0)[0])
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(0))
    sizes, many = [], experts_grouped._many

    def watched(hidden, *arguments):
        sizes.append(len(hidden))
        return many(hidden, *arguments)

    monkeypatch.setattr(experts_grouped, "_many", watched)

    def mixed():
        with torch.no_grad():
            return decode_ops.moe(
                x, decoder.layers[0], decoder.norms[0], **decoder.moe_settings, path="many"
            )[0]

    whole = mixed()
    monkeypatch.setattr(decode_ops, "PREFILL_TOKENS", 64)
    torch.testing.assert_close(mixed(), whole)
    assert sizes == [300, 64, 64, 64, 64, 44]


def test_an_adapter_that_transformers_itself_attached(peft_as_it_is):
    model, tokenizer = tiny_gpt_oss(0)
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.1)
    plain, _ = tiny_gpt_oss(0)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    mine, theirs = both_ways(model.eval(), tokenizer, TEXTS, greedy)
    assert_same(mine, theirs)
    assert not torch.allclose(
        mine.logps[:, 0], RolloutEngine(plain, tokenizer).generate(TEXTS, greedy).logps[:, 0]
    )
