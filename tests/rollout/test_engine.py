"""The rollout engine against transformers' `generate`, transformers' logits processors and full
forward passes."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_nb.model.memory_bytes import kv_bytes, read_shape
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import sampling
from grpo_nb.rollout.engine import (
    RolloutEngine,
    cache_name,
    complete,
    growing_shape,
    memory_through_modules,
    state_bytes,
)
from grpo_nb.rollout.sampling import SamplingParams

torch.set_num_threads(1)
GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXTS = [
    "1+2=",
    "7",
    "123456789+987654321=",
    "55*4=",
    "1-1-1-1-1=",
]  # from 1 token to beyond the window of 8


def other_model(kind):
    "A random model of another family, with the tiny tokenizer's vocabulary."
    _, tokenizer = tiny_gpt_oss()
    common = dict(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.2,
    )
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, **sizes)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**common, **sizes)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**common, **sizes, sliding_window=6)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        ),
    }[kind]()
    return model.eval(), tokenizer


def generate(model, tokenizer, texts, **settings):
    "transformers' completions of a left-padded batch."
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return model.generate(**batch, **settings)[:, batch.input_ids.shape[1] :]


def rows_fed(model, log):
    "Log the (rows, columns) of every forward pass."
    return model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: log.append(tuple(inputs[0].shape))
    )


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_transformers_generate(seed):
    model, tokenizer = tiny_gpt_oss(seed)
    rollout = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    expected = generate(model, tokenizer, TEXTS, max_new_tokens=40, do_sample=False)
    assert torch.equal(rollout.completion_ids, expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gpt2"])
def test_other_causal_models(kind):
    model, tokenizer = other_model(kind)
    rollout = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    assert torch.equal(
        rollout.completion_ids,
        generate(model, tokenizer, TEXTS, max_new_tokens=40, do_sample=False),
    )


@pytest.mark.parametrize("seed", range(3))
def test_greedy_with_a_repetition_penalty_is_transformers_generate(seed):
    model, tokenizer = tiny_gpt_oss(seed)
    for text in TEXTS:  # one at a time: older transformers count padding as seen
        rollout = RolloutEngine(model, tokenizer).generate(
            [text], SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3)
        )
        assert torch.equal(
            rollout.completion_ids,
            generate(
                model, tokenizer, [text], max_new_tokens=20, do_sample=False, repetition_penalty=1.3
            ),
        )


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_neighbours_and_parts_do_not_change_a_row(penalty):
    model, tokenizer = tiny_gpt_oss(1)
    params = SamplingParams(temperature=0, max_tokens=25, repetition_penalty=penalty)
    together = RolloutEngine(model, tokenizer).generate(TEXTS, params)
    parts = RolloutEngine(model, tokenizer, max_batch_size=2).generate(TEXTS, params)
    assert torch.equal(together.completion_ids, parts.completion_ids) and torch.equal(
        together.mask, parts.mask
    )
    torch.testing.assert_close(together.logps, parts.logps)
    for i, text in enumerate(TEXTS):
        alone = RolloutEngine(model, tokenizer).generate([text], params)
        assert (
            alone.completion_ids[0].tolist()
            == together.completion_ids[i, : alone.lengths[0]].tolist()
            and alone.lengths[0] == together.lengths[i]
        )


def test_generation_config_defaults_are_not_inherited():
    model, tokenizer = tiny_gpt_oss(0)
    expected = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(seed=0, max_tokens=10)
    )
    model.generation_config.update(
        temperature=0.1,
        top_k=2,
        top_p=0.5,
        repetition_penalty=3.0,
        max_new_tokens=3,
        do_sample=True,
    )
    again = RolloutEngine(model, tokenizer).generate(TEXTS, SamplingParams(seed=0, max_tokens=10))
    assert torch.equal(again.completion_ids, expected.completion_ids) and torch.equal(
        again.logps, expected.logps
    )


@pytest.mark.parametrize(
    "chosen",
    [
        dict(),
        dict(temperature=0.7),
        dict(repetition_penalty=1.5),
        dict(temperature=1.3, top_k=9, top_p=0.9, repetition_penalty=0.8),
    ],
)
def test_logps_are_those_of_a_full_forward_pass(chosen):
    model, tokenizer = tiny_gpt_oss(2)
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(n=3, max_tokens=15, seed=0, **chosen)
    )
    full = dict(temperature=1.0, top_k=None, top_p=1.0, repetition_penalty=1.0) | chosen
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(full["repetition_penalty"]),
            TemperatureLogitsWarper(full["temperature"]),
        ]
    )
    if full["top_k"]:
        processors.append(TopKLogitsWarper(full["top_k"]))
    if full["top_p"] < 1:
        processors.append(TopPLogitsWarper(full["top_p"]))
    for prompt, ids, logps, length in zip(
        rollout.prompt_ids, rollout.completion_ids.tolist(), rollout.logps, rollout.lengths.tolist()
    ):
        whole = torch.tensor([prompt + ids[:length]])
        with torch.no_grad():
            logits = model(input_ids=whole).logits[0]
        for t in range(length):
            before = len(prompt) + t
            expected = processors(whole[:, :before], logits[None, before - 1]).log_softmax(-1)[
                0, ids[t]
            ]
            assert abs(logps[t] - expected) < 1e-4
        assert (logps[length:] == 0).all()


def test_greedy_logps_are_those_of_the_plain_softmax():
    model, tokenizer = tiny_gpt_oss(2)
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS[2:3], SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.5)
    )
    whole = torch.tensor([rollout.prompt_ids[0] + rollout.completion_ids[0].tolist()])
    with torch.no_grad():
        full = model(input_ids=whole).logits.log_softmax(-1)[0, len(rollout.prompt_ids[0]) - 1 : -1]
    torch.testing.assert_close(
        rollout.logps[0],
        full.gather(-1, rollout.completion_ids[0, :, None])[:, 0],
        atol=1e-4,
        rtol=0,
    )


def test_first_tokens_follow_the_models_distribution():
    model, tokenizer = tiny_gpt_oss(0)
    count = 20_000
    rollout = RolloutEngine(model, tokenizer).generate(
        ["8*7="], SamplingParams(n=count, max_tokens=1, seed=0, temperature=0.5)
    )
    with torch.no_grad():
        p = (model(**tokenizer("8*7=", return_tensors="pt")).logits[0, -1] / 0.5).softmax(-1)
    chi_square = (
        (rollout.completion_ids[:, 0].bincount(minlength=len(p)) - count * p) ** 2 / (count * p)
    ).sum()
    assert chi_square < (len(p) - 1) + 4 * math.sqrt(2 * (len(p) - 1))


def test_equal_prompts_are_read_once_however_they_are_given():
    model, tokenizer = tiny_gpt_oss(0)
    engine, ids, log = (
        RolloutEngine(model, tokenizer, through_modules=True),
        [tokenizer(t).input_ids for t in TEXTS[:2]],
        [],
    )
    hook = rows_fed(model, log)
    ways = [
        engine.generate(TEXTS[:2], SamplingParams(n=4, max_tokens=6, seed=5)),
        engine.generate([TEXTS[0]] * 4 + [ids[1]] * 4, SamplingParams(max_tokens=6, seed=5)),
    ]
    assert [shape for shape in log if shape[1] > 1] == [(2, 4), (2, 4)]
    assert torch.equal(ways[0].completion_ids, ways[1].completion_ids) and torch.equal(
        ways[0].logps, ways[1].logps
    )
    assert ways[0].prompt_ids == ways[1].prompt_ids == [ids[0]] * 4 + [ids[1]] * 4
    straddling = engine.generate(
        [ids[1], ids[0], ids[1]], SamplingParams(temperature=0, max_tokens=6)
    )
    assert (
        torch.equal(straddling.completion_ids[0], straddling.completion_ids[2])
        and log[-6] == (2, 4)
        and log[-1] == (3, 1)
    )
    hook.remove()


@pytest.mark.long
@pytest.mark.parametrize("params", [dict(), dict(top_p=0.9), dict(top_k=4, temperature=1.3)])
def test_the_company_of_a_completion_changes_nothing(params):
    """Alone, in eights, 512 together, and through the modules: the same numbers are drawn, and in
    float32 the same tokens but where a draw lies at a border."""
    model, tokenizer = tiny_gpt_oss(0)
    params = SamplingParams(n=103, max_tokens=12, seed=3, **params)
    settings = [dict(), dict(max_batch_size=8), dict(through_modules=True)]
    engines = [RolloutEngine(model, tokenizer, **given) for given in settings]
    assert engines[0].way.startswith("directly: plain tensors")
    whole, *others = [engine.generate(TEXTS, params) for engine in engines]
    assert len(whole.mask) >= 512 and len(set(whole.lengths.tolist())) > 5
    for other in others:
        differ = (whole.completion_ids != other.completion_ids).any(1)
        assert differ.sum() <= 2
        torch.testing.assert_close(whole.logps[~differ], other.logps[~differ], atol=1e-5, rtol=0)
    few = replace(params, n=3)  # alone
    alone = RolloutEngine(model, tokenizer, max_batch_size=1).generate(TEXTS, few)
    assert torch.equal(alone.completion_ids, engines[0].generate(TEXTS, few).completion_ids)


def test_max_batch_size_bounds_the_rows():
    model, tokenizer = tiny_gpt_oss(0)
    log = []
    hook = rows_fed(model, log)
    rollout = RolloutEngine(model, tokenizer, max_batch_size=3, through_modules=True).generate(
        TEXTS, SamplingParams(n=4, max_tokens=3, seed=0, stop_token_ids=())
    )
    hook.remove()
    assert (
        max(rows for rows, _ in log) == 3
        and rollout.completion_ids.shape == (20, 3)
        and rollout.mask.all()
    )


@pytest.mark.parametrize("padded_with_eos", [False, True])
def test_stop_tokens_masks_and_reasons(padded_with_eos):
    model, tokenizer = tiny_gpt_oss(0)
    if padded_with_eos:
        tokenizer.pad_token = tokenizer.eos_token
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(n=20, max_tokens=20, seed=0)
    )
    for ids, mask, logps, reason, length, truncated in zip(
        rollout.completion_ids.tolist(),
        rollout.mask.tolist(),
        rollout.logps,
        rollout.finish_reasons,
        rollout.lengths.tolist(),
        rollout.truncated.tolist(),
    ):
        stops = [t for t, token in enumerate(ids) if token == 1]
        assert reason == ("stop" if stops else "length") and truncated == (not stops)
        assert length == (stops[0] + 1 if stops else 20)
        assert mask == [True] * length + [False] * (20 - length)
        assert (
            all(i == tokenizer.pad_token_id for i in ids[length:])
            and (logps[:length] < 0).all()
            and (logps[length:] == 0).all()
        )
    assert set(rollout.finish_reasons) == {"stop", "length"}


def test_a_stop_token_as_the_very_last_token_is_a_stop():
    model, tokenizer = tiny_gpt_oss(
        0, initializer_range=0.06
    )  # its answer does not repeat one token
    free = RolloutEngine(model, tokenizer).generate(
        ["1+2="], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=())
    )
    ids = free.completion_ids[0].tolist()
    last = next(t for t in range(1, 8) if ids[t] not in ids[:t])
    rollout = RolloutEngine(model, tokenizer).generate(
        ["1+2="], SamplingParams(temperature=0, max_tokens=last + 1, stop_token_ids=ids[last])
    )
    assert (
        rollout.finish_reasons == ["stop"] and rollout.completion_ids[0].tolist() == ids[: last + 1]
    )


def test_t_is_the_longest_completion():
    model, tokenizer = tiny_gpt_oss(0)
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(max_tokens=50, seed=0, stop_token_ids=range(2, 20))
    )
    assert rollout.completion_ids.shape[1] == rollout.lengths.max() < 50


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_dropping_finished_rows_changes_nothing(penalty):
    model, tokenizer = tiny_gpt_oss(3)
    texts = [f"{a}*{b}=" for a in (1, 22, 333) for b in (4, 55, 666, 7777)]
    params = dict(temperature=0, max_tokens=40, repetition_penalty=penalty)
    free = RolloutEngine(model, tokenizer, through_modules=True).generate(
        texts, SamplingParams(**params, stop_token_ids=())
    )
    log, stop = [], free.completion_ids[[0, 1, 2], [3, 9, 15]].tolist()
    hook = rows_fed(model, log)
    rollout = RolloutEngine(model, tokenizer, through_modules=True).generate(
        texts, SamplingParams(**params, stop_token_ids=stop)
    )
    hook.remove()
    assert 2 <= len({rows for rows, columns in log if columns == 1})  # rows were dropped
    assert len(set(rollout.lengths.tolist())) > 2
    for i, row in enumerate(free.completion_ids.tolist()):
        length = next((t + 1 for t, token in enumerate(row) if token in stop), 40)
        assert (
            rollout.lengths[i] == length
            and rollout.completion_ids[i, :length].tolist() == row[:length]
        )
        torch.testing.assert_close(rollout.logps[i, :length], free.logps[i, :length])


def test_every_stop_token_that_is_named_ends_a_completion():
    model, tokenizer = tiny_gpt_oss(0)
    model.generation_config.eos_token_id, model.config.eos_token_id = [5, 1], 9
    rollout = RolloutEngine(model, tokenizer).generate(
        TEXTS, SamplingParams(n=20, max_tokens=30, seed=0)
    )
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1)[~rollout.truncated]
    assert set(last.flatten().tolist()) == {1, 5, 9}


def test_a_tokenizer_without_a_pad_token():
    model, tokenizer = tiny_gpt_oss(0)
    with_pad = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    tokenizer.pad_token = None
    without = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    assert torch.equal(with_pad.completion_ids[with_pad.mask], without.completion_ids[without.mask])


def test_seeds_repeat_and_leave_the_global_generator_alone():
    model, tokenizer = tiny_gpt_oss(0)
    engine = RolloutEngine(model, tokenizer)
    state = torch.get_rng_state()
    one, two, three = (
        engine.generate(TEXTS, SamplingParams(n=3, max_tokens=12, seed=s)) for s in (1, 1, 2)
    )
    assert (
        torch.equal(one.completion_ids, two.completion_ids)
        and torch.equal(one.logps, two.logps)
        and one.completion_ids.tolist() != three.completion_ids.tolist()
    )
    assert torch.equal(torch.get_rng_state(), state)
    first = engine.generate(TEXTS, SamplingParams(n=3, max_tokens=12))
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    assert torch.equal(
        engine.generate(TEXTS, SamplingParams(n=3, max_tokens=12)).completion_ids,
        first.completion_ids,
    )


def test_strings_and_ids_are_the_same_prompts():
    model, tokenizer = tiny_gpt_oss(0)
    engine, ids = RolloutEngine(model, tokenizer), [tokenizer(t).input_ids for t in TEXTS]
    results = [
        engine.generate(p, SamplingParams(max_tokens=9, seed=0))
        for p in (TEXTS, ids, [torch.tensor(i) for i in ids], [TEXTS[0], *ids[1:]])
    ]
    assert all(
        torch.equal(r.completion_ids, results[0].completion_ids) and r.prompt_ids == ids
        for r in results
    )
    kept = [
        [i for i, m in zip(*pair) if m]
        for pair in zip(results[0].completion_ids.tolist(), results[0].mask.tolist())
    ]
    assert results[0].texts(tokenizer) == tokenizer.batch_decode(kept, skip_special_tokens=True)
    assert results[0].texts(tokenizer, skip_special_tokens=False) == [
        "".join(tokenizer.convert_ids_to_tokens(k)) for k in kept
    ]


def test_one_string_is_one_prompt():
    engine = RolloutEngine(*tiny_gpt_oss(0))
    params = SamplingParams(max_tokens=6, seed=0)
    one, listed = engine.generate("1+2=", params), engine.generate(["1+2="], params)
    assert one.prompt_ids == listed.prompt_ids and len(one.prompt_ids) == 1
    assert torch.equal(one.completion_ids, listed.completion_ids)


@pytest.mark.parametrize("through_modules", [False, True])
def test_a_row_ends_with_the_token_that_completes_a_stop_text(through_modules):
    model, tokenizer = tiny_gpt_oss(0)
    engine = RolloutEngine(model, tokenizer, through_modules=through_modules)
    params = dict(max_tokens=30, n=16, seed=0, stop_token_ids=())
    free, stop = engine.generate(TEXTS, SamplingParams(**params)), ("12", "=")
    cut = engine.generate(TEXTS, SamplingParams(**params, stop=stop))
    texts = zip(free.texts(tokenizer, False), cut.texts(tokenizer, False), cut.finish_reasons)
    found = []
    for whole, kept, reason in texts:
        ends = [whole.find(text) + len(text) for text in stop if text in whole]
        assert kept == whole[: min(ends, default=len(whole))]
        assert reason == ("stop" if ends else "length")
        found.append(bool(ends))
    assert any(found) and not all(found)
    T = cut.completion_ids.shape[1]
    assert torch.equal(cut.completion_ids, free.completion_ids[:, :T].masked_fill(~cut.mask, 0))
    assert torch.equal(cut.logps, free.logps[:, :T].masked_fill(~cut.mask, 0.0))
    assert cut.versions.tolist() == free.versions.tolist()


@pytest.mark.parametrize(
    "prompts, max_tokens, sentence",
    [
        ([], 4, "prompts is empty"),
        (["1+2=", ""], 4, "prompt 1 has no tokens"),
        ([[7], []], 4, "prompt 1 has no tokens"),
        ([[7], [7, 24]], 4, "prompt 1 holds token ids from 7 to 24"),
        ([[-1]], 4, "prompt 0 holds"),
        ([[7], [8] * 60], 5, "prompt 1 has 60 tokens .* set max_tokens to at most 4"),
        ([[8] * 64], 5, "shorten the prompt, as both together may have at most 64"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_the_model_runs(prompts, max_tokens, sentence):
    model, tokenizer = tiny_gpt_oss(0, max_position_embeddings=64)
    log = []
    hook = rows_fed(model, log)
    with pytest.raises(ValueError, match=sentence):
        RolloutEngine(model, tokenizer).generate(prompts, SamplingParams(max_tokens=max_tokens))
    hook.remove()
    assert log == []


def test_a_prompt_may_fill_the_models_positions_exactly():
    model, tokenizer = tiny_gpt_oss(0, max_position_embeddings=64)
    assert RolloutEngine(model, tokenizer).generate(
        [[8] * 60], SamplingParams(max_tokens=4, stop_token_ids=())
    ).lengths.tolist() == [4]


def test_bad_engine_settings_are_refused():
    model, tokenizer = tiny_gpt_oss(0)
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        RolloutEngine(model, tokenizer, max_batch_size=0)
    prompt_tuned = get_peft_model(
        model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="learned prompt"):
        RolloutEngine(prompt_tuned, tokenizer)


def test_the_adapter_is_sampled_from():
    model, tokenizer = tiny_gpt_oss(0)
    base = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    torch.manual_seed(0)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj", "o_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data *= 10
    rollout = RolloutEngine(adapted, tokenizer).generate(TEXTS, GREEDY)
    assert torch.equal(
        rollout.completion_ids,
        generate(adapted, tokenizer, TEXTS, max_new_tokens=40, do_sample=False),
    )
    assert rollout.completion_ids.tolist() != base.completion_ids.tolist()
    with adapted.disable_adapter():
        without = RolloutEngine(adapted, tokenizer).generate(TEXTS, GREEDY)
    assert torch.equal(without.completion_ids, base.completion_ids)


def test_training_state_is_put_back():
    model, tokenizer = tiny_gpt_oss(0)
    expected = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    model.train()
    model.model.layers[0].eval()  # frozen by hand
    model.gradient_checkpointing_enable()
    model.config.use_cache, model.config.attention_dropout = False, 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    before = modes(model)
    rollout = RolloutEngine(model, tokenizer).generate(TEXTS, GREEDY)
    assert (
        torch.equal(rollout.completion_ids, expected.completion_ids)
        and not rollout.logps.requires_grad
    )
    assert (
        modes(model) == before
        and model.is_gradient_checkpointing
        and model.config.use_cache is False
        and torch.is_grad_enabled()
    )


def test_training_state_is_put_back_after_an_error():
    model, tokenizer = tiny_gpt_oss(0)
    model.train()
    model.model.norm.eval()
    before, calls = modes(model), []

    def fail(module, inputs, output):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a fault in the third pass")

    hook = model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="third pass"):
        RolloutEngine(model, tokenizer, through_modules=True).generate(TEXTS, GREEDY)
    hook.remove()
    assert modes(model) == before and torch.is_grad_enabled()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_reported(temperature):
    model, tokenizer = tiny_gpt_oss(0)

    def poison(module, inputs, output):
        output = output.clone()
        output[1] = math.nan
        return output

    hook = model.lm_head.register_forward_hook(poison)
    with pytest.raises(FloatingPointError, match="token 0 of completion 1"):
        RolloutEngine(model, tokenizer, through_modules=True).generate(
            TEXTS, SamplingParams(temperature=temperature, max_tokens=3)
        )
    hook.remove()


def test_autocast():
    model, tokenizer = tiny_gpt_oss(0)
    dtypes = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    rollout = RolloutEngine(
        model, tokenizer, autocast_dtype=torch.bfloat16, through_modules=True
    ).generate(TEXTS, SamplingParams(max_tokens=5, seed=0, stop_token_ids=()))
    hook.remove()
    assert (
        set(dtypes) == {torch.bfloat16}
        and rollout.logps.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
    for prompt, ids, logps in zip(
        rollout.prompt_ids, rollout.completion_ids.tolist(), rollout.logps
    ):
        with torch.no_grad():
            full = (
                model(input_ids=torch.tensor([prompt + ids]))
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
        torch.testing.assert_close(logps, full[range(5), ids], atol=0.1, rtol=0)


def test_the_progress_bar_is_off_for_short_work_and_on_when_asked(capsys):
    model, tokenizer = tiny_gpt_oss(0)
    engine = RolloutEngine(model, tokenizer, through_modules=True)
    for progress in (None, False):
        engine.generate(TEXTS, SamplingParams(max_tokens=2), progress=progress)
    assert capsys.readouterr().err == ""
    engine.generate(TEXTS, SamplingParams(max_tokens=2), progress=True)
    said = capsys.readouterr().err
    assert "tokens" in said and f"/{2 * len(TEXTS)} [" in said  # of all completions
    always = RolloutEngine(model, tokenizer, progress=True)
    always.generate(TEXTS, SamplingParams(max_tokens=2), progress=False)
    assert capsys.readouterr().err == ""
    always.generate(TEXTS, SamplingParams(max_tokens=2))
    assert "completions" in capsys.readouterr().err  # which end one by one on the model's tensors


# Models that are decoded through their modules: memory


def cache_of_a_pass(model, rows, length):
    "Bytes of keys and values after so many positions."
    with torch.no_grad():
        cache = model(input_ids=torch.full((rows, length), 7), use_cache=True).past_key_values
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_cache_of_the_modules_is_counted(kind):
    model, _ = other_model(kind)
    shape = growing_shape(model.config, torch.float32)
    assert (
        shape.bytes([3, 20], [2, 3], 11)
        == cache_of_a_pass(model, 5, 30)
        == kv_bytes(read_shape(model.config), 5, 30, 4, paged=False)
    )
    assert growing_shape(model.config, torch.bfloat16).bytes(
        [3, 20], [2, 3], 11
    ) * 2 == shape.bytes([3, 20], [2, 3], 11)


def test_the_cache_of_the_modules_with_windows_is_counted():
    model, _ = other_model("mistral")
    shape, place = (
        growing_shape(model.config, torch.float32),
        2 * 2 * 8 * 4,
    )  # a key and a value of one layer
    assert shape.windows == (6, 6)
    assert shape.bytes([4], [3], 2) == cache_of_a_pass(model, 3, 5) == 3 * 2 * 5 * place
    assert (
        shape.bytes([30], [3], 9)
        == cache_of_a_pass(model, 3, 38) + 3 * 2 * place
        == 3 * 2 * 6 * place
    )  # transformers keeps one less than the window
    hybrid = Qwen2Config(
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        hidden_size=16,
        layer_types=["full_attention"] * 3,
    )
    hybrid.layer_types = ["full_attention", "linear_attention", "conv"]
    assert growing_shape(hybrid, torch.float32).windows == (None,)
    assert (
        growing_shape(other_model("gpt2")[0].config, torch.float32).bytes([30], [3], 9) == 0
    )  # names its sizes otherwise


def test_a_linear_layers_state_is_counted_and_attention_beside_it():
    "As transformers' cache holds them, of a model whose experts the planner does not know, too."
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=4,
        linear_value_head_dim=8,
    )
    experts = dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    for name, more in (("Qwen3_5Text", dict(intermediate_size=16)), ("Qwen3_5MoeText", experts)):
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        out = model(torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]), use_cache=True)
        layers = getattr(out, cache_name(model)).layers
        held = [*layers[0].conv_states.values(), *layers[0].recurrent_states.values()]
        assert sum(x.nbytes for x in held) == 2 * state_bytes(config, torch.float32)
        keys = layers[1].keys.nbytes + layers[1].values.nbytes
        assert growing_shape(config, torch.float32).bytes([5, 5], [1, 1], 1) == keys
        params = SamplingParams(max_tokens=1)
        row = memory_through_modules(config, torch.float32, params, True).row_bytes
        config.layer_types = ["full_attention"] * 3
        whole = memory_through_modules(config, torch.float32, params, True).row_bytes
        assert row - whole == (2 + 4) * state_bytes(config, torch.float32)
    assert state_bytes(other_model("gpt2")[0].config, torch.float32) == 0


def test_keys_of_another_number_than_the_completions_are_refused():
    model, tokenizer = tiny_gpt_oss(0)
    engine = RolloutEngine(model, tokenizer, through_modules=True)
    with pytest.raises(ValueError, match="3 keys for 4 completions: give one for each"):
        engine.generate(["1+1="], SamplingParams(n=4, max_tokens=2), keys=[1, 2, 3])
    before = torch.get_rng_state()
    for one in (engine, RolloutEngine(model, tokenizer)):
        one.generate(["1+1="], SamplingParams(temperature=0, max_tokens=2))
        assert torch.equal(before, torch.get_rng_state())  # greedy: no number is drawn


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_more_than_the_memory_is_refused_before_the_model_runs(kind, monkeypatch):
    monkeypatch.setattr("grpo_nb.rollout.engine.free_memory", lambda device: 64 * 2**30)
    model, tokenizer = other_model(kind)
    model.config.max_position_embeddings = 2**40
    log = []
    hook = rows_fed(model, log)
    with pytest.raises(
        MemoryError,
        match="a completion of up to 17,179,869,184 tokens after a prompt of 4 needs .* GiB "
        "beside the model .* 64.00 GiB are free: ask for fewer tokens",
    ):
        RolloutEngine(model, tokenizer, through_modules=True).generate(
            TEXTS[:1], SamplingParams(max_tokens=2**34)
        )
    hook.remove()
    assert log == []


def test_rows_through_modules_are_as_many_as_fit(monkeypatch):
    model, tokenizer = other_model("qwen2")
    engine, params = (
        RolloutEngine(model, tokenizer, through_modules=True),
        SamplingParams(n=2, temperature=0, max_tokens=12, stop_token_ids=()),
    )
    expected = engine.generate(TEXTS, params)
    longest, vocab = max(len(tokenizer(t).input_ids) for t in TEXTS), len(tokenizer)
    row = (
        2 * 2 * 2 * 8 * 4 * (longest + 11) + 12 * 12 + vocab * (4 + 32)
    )  # key and value of 2 layers, ids and log-probs, greedy logits
    log = []
    monkeypatch.setattr("grpo_nb.rollout.engine.free_memory", lambda device: 3 * row)
    hook = rows_fed(model, log)
    rollout = engine.generate(TEXTS, params)
    hook.remove()
    assert torch.equal(rollout.completion_ids, expected.completion_ids)
    assert (
        3 <= max(rows for rows, columns in log if columns == 1) < 10
    )  # rows of short prompts are smaller
    tight = RolloutEngine(model, tokenizer, through_modules=True, max_batch_size=2)
    assert [len(part) for part in tight.batches([[7] * 4] * 5, params, None)[0]] == [2, 2, 1]
    rows = [[7] * longest] * 7
    assert [len(part) for part in engine.batches(rows, params, None)[0]] == [3, 3, 1]
    monkeypatch.setattr("grpo_nb.rollout.engine.free_memory", lambda device: row - 1)
    with pytest.raises(MemoryError, match=f"up to 12 tokens after a prompt of {longest} needs"):
        engine.batches(rows, params, None)


def test_a_model_without_keys_and_values_is_refused():
    _, tokenizer = tiny_gpt_oss()
    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=1,
            state_size=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=0,
        )
    ).train()
    with pytest.raises(ValueError, match="MambaForCausalLM returns no keys and values"):
        RolloutEngine(model, tokenizer).generate(TEXTS, SamplingParams(max_tokens=3))
    assert model.training


def test_memory_is_given_back_after_an_error_too(monkeypatch):
    model, tokenizer = other_model("qwen2")
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(1))
    engine = RolloutEngine(model, tokenizer, through_modules=True)
    engine.generate(TEXTS, SamplingParams(max_tokens=2))

    def fail(module, inputs, output):
        raise RuntimeError("a fault")

    hook = model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a fault"):
        engine.generate(TEXTS, SamplingParams(max_tokens=2))
    hook.remove()
    assert given == [1, 1]


FILTERS = {"top_k": (4, TopKLogitsWarper), "top_p": (0.6, TopPLogitsWarper)}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("way", ["direct", "modules", "in place"])
def test_what_was_left_to_draw_from_is_recorded(name, way):
    model, tokenizer = tiny_gpt_oss(initializer_range=0.2)
    value, warper = FILTERS[name]
    params = SamplingParams(max_tokens=7, seed=3, temperature=0.9, **{name: value})
    prompts = [[8, 9, 10], [11], [8, 9, 10], [12, 13]]
    if way == "in place":
        stop = torch.tensor([tokenizer.eos_token_id])
        with torch.no_grad():
            drawn = complete(model.eval(), prompts, params, stop, in_place=True)
    else:
        engine = RolloutEngine(model, tokenizer, through_modules=way == "modules", max_batch_size=3)
        drawn = engine.generate(prompts, params)
    assert drawn.survivors.shape[:2] == drawn.log_mass.shape == drawn.mask.shape
    assert (drawn.survivors[~drawn.mask] == -1).all() and (drawn.log_mass == 0).all()
    for i, (prompt, n) in enumerate(zip(drawn.prompt_ids, drawn.lengths.tolist())):
        ids = drawn.completion_ids[i, :n]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([torch.tensor(prompt), ids])[None]).logits[0]
        kept = warper(value)(None, logits[len(prompt) - 1 : -1] / 0.9).isfinite()
        for t in range(n):
            left = drawn.survivors[i, t]
            assert sorted(left[left >= 0].tolist()) == kept[t].nonzero()[:, 0].tolist()
            assert ids[t] in left


def test_of_a_flat_distribution_only_its_mass_is_kept(monkeypatch):
    monkeypatch.setattr(sampling, "MOST_SURVIVORS", 2)
    logits = torch.tensor([[5.0, 4.0, -9.0, -9.0], [0.3, 0.2, 0.1, 0.0]])
    params = SamplingParams(top_p=0.9)
    _, logps, left = sampling.sample_recorded(logits, params)
    assert sorted(left.ids[0].tolist()) == [0, 1] and left.ids[1].tolist() == [-1, -1]
    kept = sampling.processed_log_probs(logits, params).isfinite()
    mass = (logits.softmax(-1) * kept).sum(-1).log()
    torch.testing.assert_close(left.log_mass, torch.tensor([0.0, mass[1]]))
