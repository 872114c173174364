"""Rows continued in place against the cache that grows: families, windows, padding, rows that end,
penalties, adapters; what is not recorded, and why."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from recorded_calls import RecordedCalls
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import LinearAttentionLayer

from grpo_nb.rollout import engine as engines
from grpo_nb.rollout import module_decoding
from grpo_nb.rollout.engine import ModuleRows, RolloutEngine, complete
from grpo_nb.rollout.module_decoding import (
    ModuleDecoder,
    cannot_record,
    extra_bytes,
    next_reach,
    try_to_record,
    visible_slots,
)
from grpo_nb.rollout.sampling import SamplingParams, stream_keys
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.policy_model import quicken

MIXED = dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=6
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    "Llama": {},
    "Llama eager": {},
    "Qwen2": {},
    "Qwen2 windows": dict(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "Qwen3": {},
    # with fused layers and this library's attention, as the trainer loads them by name on a GPU
    "Qwen2 quick": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "Qwen3 quick": dict(head_dim=24),
    "Mistral": dict(sliding_window=6),
    "Phi3": dict(sliding_window=7),
    "Gemma3Text": MIXED,
    "Gemma2 eager": MIXED | dict(query_pre_attn_scalar=8),
    "Gemma4Text": MIXED  # the last two layers have no cache, and read the keys of the two before
    | dict(
        num_kv_shared_layers=2,
        global_head_dim=16,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
    ),
    "Qwen3Moe": EXPERTS,
    "GptOss eager": dict(sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    "Olmo2": {},
    "Cohere": {},
    "GPT2": {},
    "Lfm2": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "Qwen3_5Text": dict(
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 6], [7], [5, 6], [9, 3, 2, 1]]
STOP = torch.tensor([0, 1, 2, 3])
UNREAD = dict(hidden_act="relu")  # no decoder reads such a model
WHY = "its activation is 'relu', and silu or gelu_pytorch_tanh can be read"


def tiny(name, **more):
    torch.manual_seed(0)
    if name == "GPT2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=256,
                initializer_range=0.3,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).eval()
    kind, _, variant = name.partition(" ")
    settings = (
        dict(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
        )
        | FAMILIES[name]
        | more
    )
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if variant == "eager" else "sdpa"
    ).eval()
    assert variant != "quick" or quicken(model, GRPOConfig())
    return model


@torch.no_grad()
def both(model, params, stop=STOP, seed=None):
    def draw(in_place):
        return complete(
            model,
            PROMPTS,
            params,
            stop,
            keys=None if seed is None else stream_keys(len(PROMPTS), seed),
            in_place=in_place,
        )

    return draw(True), draw(False)


def assert_same(a, b):
    assert (
        torch.equal(a.mask, b.mask)
        and torch.equal(a.completion_ids, b.completion_ids)
        and a.finish_reasons == b.finish_reasons
    )
    torch.testing.assert_close(a.logps, b.logps, atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_as_with_a_cache_that_grows(name, monkeypatch):
    model = tiny(name)
    for params in (
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.3),
    ):
        mine, free = both(model, params, STOP[:0])
        assert_same(mine, free)
        mine, theirs = both(
            model, params, free.completion_ids[[0, 2, 4], [4, 0, 20]]
        )  # some rows end
        assert_same(mine, theirs)
        assert len(set(theirs.lengths.tolist())) > 1
    monkeypatch.setattr(module_decoding, "next_reach", lambda columns, room: min(room, columns + 5))
    assert_same(*both(model, SamplingParams(temperature=0, max_tokens=40), STOP[:0]))


def test_draws_are_those_of_the_other_loop_while_the_batch_is_the_same():
    assert_same(
        *both(
            tiny("Qwen3"),
            SamplingParams(max_tokens=30, top_p=0.9, top_k=30, temperature=0.8),
            STOP[:0],
            seed=5,
        )
    )


@pytest.mark.parametrize("way", ["grows", "in place"])
def test_what_is_drawn_does_not_depend_on_the_company(way, as_on_a_gpu):
    "Each completion has its own random numbers, the same as where tensors are read directly."
    model, drawn = tiny("Llama"), []
    stop = tuple(range(1, 8))
    params = SamplingParams(max_tokens=20, n=3, seed=4, temperature=0.8, stop_token_ids=stop)
    for rows in (None, 1, 4):
        engine = RolloutEngine(model, None, through_modules=True, max_batch_size=rows)
        if way == "in place":
            engine._not_recorded = lambda: None
        drawn.append(engine.generate(PROMPTS, params))
    drawn.append(RolloutEngine(model, None).generate(PROMPTS, params))
    assert len(set(drawn[0].lengths.tolist())) > 3
    for other in drawn[1:]:
        assert_same(other, drawn[0])
    again = RolloutEngine(model, None, through_modules=True)
    other = again.generate(PROMPTS, replace(params, seed=5))
    assert other.completion_ids.tolist() != drawn[0].completion_ids.tolist()


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 33])
def test_every_length(tokens):
    steps = []
    model = tiny("Llama")
    with torch.no_grad():
        rollout = complete(
            model,
            PROMPTS,
            SamplingParams(temperature=0, max_tokens=tokens),
            STOP[:0],
            on_tokens=steps.append,
            in_place=True,
        )
    assert rollout.lengths.tolist() == [tokens] * 5 and sum(steps) == tokens
    assert_same(rollout, both(model, SamplingParams(temperature=0, max_tokens=tokens), STOP[:0])[1])


def test_adapters():
    model = get_peft_model(
        tiny("Qwen2"),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    ).eval()
    params = SamplingParams(temperature=0, max_tokens=20)
    adapted = both(model, params)
    assert_same(*adapted)
    with model.disable_adapter():
        assert not torch.equal(both(model, params)[0].logps[:, 0], adapted[0].logps[:, 0])


def test_ended_rows_are_dropped_where_they_are(monkeypatch):
    model, kept = tiny("Llama"), []
    keep = ModuleDecoder.keep

    def noted(self, index):
        before = [layer.keys.data_ptr() for layer in self.batch.cache.layers]
        keep(self, index)
        kept.append(
            (
                len(index),
                before == [layer.keys.data_ptr() for layer in self.batch.cache.layers],
                {len(layer.keys) for layer in self.batch.cache.layers},
            )
        )

    monkeypatch.setattr(ModuleDecoder, "keep", noted)
    both(model, SamplingParams(temperature=0, max_tokens=40))
    assert (
        kept
        and all(same and sizes == {count} for count, same, sizes in kept)
        and [count for count, _, _ in kept] == sorted((count for count, _, _ in kept), reverse=True)
    )


def test_places_that_are_seen():
    for window in (3, 5, 16):
        for column in range(2, 14):
            for first in (0, 1, 2):
                seen = visible_slots(torch.tensor([column]), torch.tensor([[first]]), window)[
                    0, 0, 0
                ]
                expected = {c % window for c in range(max(first, column - window + 1), column + 1)}
                assert set(seen.nonzero()[:, 0].tolist()) == expected


@pytest.mark.parametrize("room", [8, 640, 700, 40_000])
def test_reach_grows_by_steps_that_pay(room):
    columns, recordings = 1, 0
    while columns <= room:
        reach = next_reach(columns, room)
        assert columns <= reach <= room and (reach == room or reach >= columns + 400)
        assert reach <= max(1.25 * columns, columns + 512)
        columns, recordings = reach + 1, recordings + 1
    assert recordings <= 2 + room / 2000


class Replayed:
    "Stands for a recording, on a CPU."

    def __init__(self, step):
        self.replay = step


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(module_decoding, "record_graph", Replayed)
    monkeypatch.setattr(module_decoding, "cannot_record", lambda model: None)


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Qwen2 quick",
        "Gemma3Text",
        "Gemma2 eager",
        "Gemma4Text",
        "Qwen3Moe",
        "GPT2",
        "Lfm2",
        "Qwen3_5Text",
    ],
)
def test_a_trial_that_succeeds(name, as_on_a_gpu):
    assert try_to_record(tiny(name)) is None


@pytest.mark.parametrize("name", ["Llama", "Qwen3 quick", "Gemma3Text", "Lfm2", "Qwen3_5Text"])
@torch.no_grad()
def test_a_step_is_the_same_calls_on_the_same_tensors(name):
    "What a recording needs: calls that are played again, and none of Python, make the next token."
    model, given = tiny(name), SamplingParams(temperature=0, max_tokens=12)

    def started():
        batch, logits = engines.prefill(model, PROMPTS)
        rows = ModuleDecoder(model, batch, given, STOP)
        rows.reach = rows.room
        rows.draw(logits)
        return rows, rows.step

    (mine, step), (expected, other) = started(), started()
    played = RecordedCalls(step)  # two steps
    for _ in range(11):
        other()
    for _ in range(9):
        played.replay()
    assert torch.equal(mine.ids, expected.ids) and int(mine.drawn) == int(expected.drawn) == 12
    torch.testing.assert_close(mine.logps, expected.logps)


class Captured:
    "A recording as a GPU makes it: its calls are noted, and nothing is computed."

    def __init__(self, rows, step):
        layers = [vars(layer) for layer in rows.batch.cache.layers]
        states = [
            state
            for layer in layers
            for x in layer.values()
            if isinstance(x, dict)
            for state in x.values()
        ]
        held = [x for one in (*layers, vars(rows)) for x in one.values()] + states
        held = [(x, x.clone()) for x in held if torch.is_tensor(x)]
        works = iter([lambda: None, step])  # `RecordedCalls` does it once before it notes it
        self.replay = RecordedCalls(lambda: next(works)()).replay
        for x, before in held:
            x.copy_(before)


@pytest.mark.parametrize("assigned", [False, True])
@torch.no_grad()
def test_a_trial_notices_a_state_in_other_memory_each_time(assigned, as_on_a_gpu, monkeypatch):
    held, real = [], module_decoding.trial_steps
    monkeypatch.setattr(
        module_decoding, "trial_steps", lambda rows, logits: held.append(rows) or real(rows, logits)
    )
    monkeypatch.setattr(module_decoding, "record_graph", lambda step: Captured(held[-1], step))
    model = tiny("Qwen3_5Text")
    if assigned:

        def update(self, states, state_idx=0, **kwargs):
            self.recurrent_states[state_idx] = states
            self.is_recurrent_states_initialized[state_idx] = True
            return states

        monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", update)
    reason = try_to_record(model)
    assert (reason or "").startswith("its steps are computed otherwise") == assigned
    assert assigned or reason is None


def test_a_trial_judges_by_the_narrowest_format(as_on_a_gpu, monkeypatch):
    model, inner = tiny("Qwen3").bfloat16(), transformers.Qwen3ForCausalLM.forward

    def forward(self, *args, **kwargs):
        out = inner(self, *args, **kwargs)
        out.logits = out.logits.float()
        return out

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "forward", forward)
    assert try_to_record(model) is None


def test_a_recording_that_does_nothing_is_noticed(as_on_a_gpu, monkeypatch):
    class Empty:
        def __init__(self, step):
            step()  # as for a model on another device: it runs, and nothing is kept

        def replay(self):
            pass

    monkeypatch.setattr(module_decoding, "record_graph", Empty)
    assert try_to_record(tiny("Llama")) == "what was recorded does nothing when it is replayed"


def test_no_room_to_try_is_no_verdict(as_on_a_gpu, monkeypatch):
    model = tiny("Llama")
    engine, inner = RolloutEngine(model, None), transformers.LlamaForCausalLM.forward

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", full)
    assert engine._not_recorded().startswith("there was no room to try it: ") and not engine.tried
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", inner)
    assert engine._not_recorded() is None and len(engine.tried) == 1


class Full(TorchDispatchMode):
    "Memory runs out in the n-th operation, once; in words of cuBLAS, or by torch's own class."

    def __init__(self, n=-1, kind=torch.OutOfMemoryError):
        super().__init__()
        self.left, self.count, self.kind = n, 0, kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.left:
            raise self.kind("CUDA error: CUBLAS_STATUS_ALLOC_FAILED, or CUDA out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("way", ["directly", "in place", "growing"])
def test_memory_that_ran_out_is_said_and_leaves_nothing(way, kind, as_on_a_gpu):
    "Wherever it is: the drawing ends in the error or says what it does instead, and is whole."
    model = tiny("Llama").train()
    params = SamplingParams(max_tokens=6, n=3, seed=4, temperature=0.8)

    def new():
        engine = RolloutEngine(model, None, through_modules=way == "growing")
        if way == "in place":
            engine._open = lambda reach=0: (None, "as asked")
        return engine

    new().generate(PROMPTS, params)  # what a process does once
    engine, ended, otherwise = new(), 0, 0
    with Full() as counting:
        expected = engine.generate(PROMPTS, params)
    found = engine.trials.found
    for n in range(1, counting.count, counting.count // 16):
        engine = new()
        state = torch.get_rng_state()
        try:
            with Full(n, kind), warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                assert_same(engine.generate(PROMPTS, params), expected)
        except kind:
            ended += 1
        else:
            otherwise += 1
            said = [str(w.message) for w in heard if "drawn from through" in str(w.message)]
            assert way == "in place" or len(said) == 1 and "lower vllm_gpu_memory" in said[0]
        assert model.training and torch.equal(torch.get_rng_state(), state)
        assert_same(engine.generate(PROMPTS, params), expected)
        assert engine.trials.found == found and not any(engine.tried.values())
    assert ended and (otherwise or way == "growing")


@pytest.mark.filterwarnings("ignore:completions are drawn slowly")
def test_without_room_the_cache_grows(as_on_a_gpu, monkeypatch):
    model, placed, steps = tiny("GPT2"), [], []
    init = ModuleDecoder.__init__
    monkeypatch.setattr(
        ModuleDecoder,
        "__init__",
        lambda self, *args, **kwargs: placed.append(1) or init(self, *args, **kwargs),
    )
    params = SamplingParams(temperature=0, max_tokens=30)
    layer = 2 * 5 * 32 * 4  # bytes of a column, keys and values of five rows
    batch, _ = engines.prefill(model, PROMPTS)
    assert extra_bytes(batch.cache, 11, 30) == 2 * layer * 30 + layer * 41
    for room, expected in ((2 * layer * 30 + layer * 41 - 1, 0), (2 * layer * 30 + layer * 41, 1)):
        monkeypatch.setattr(engines, "free_memory", lambda device: room)
        placed.clear(), steps.clear()
        with torch.no_grad():
            told = dict(on_tokens=steps.append, in_place=True)
            with (
                nullcontext() if expected else pytest.warns(UserWarning, match="of full size: end")
            ):
                rollout = complete(model, PROMPTS, params, STOP[:0], **told)
        assert len(placed) == expected and sum(steps) == 30
        assert_same(rollout, both(model, params, STOP[:0])[1])


def test_a_part_has_room_for_what_a_step_takes(monkeypatch):
    model = tiny("Llama")
    engine, params, rows = RolloutEngine(model, None), SamplingParams(max_tokens=20), [[5] * 8] * 64
    monkeypatch.setattr(engines, "free_memory", lambda device: 200_000)
    growing, placed = (
        len(engine.batches(rows, params, None, in_place)[0][0]) for in_place in (False, True)
    )
    assert 1 < placed < growing < 64


def test_a_completion_that_fits_only_a_cache_that_grows(as_on_a_gpu, monkeypatch):
    model = tiny("Llama", **UNREAD)
    engine, params, ways, slow = (
        RolloutEngine(model, None),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=()),
        [],
        [],
    )
    monkeypatch.setattr(engine, "_warn_slow", slow.append)
    run = ModuleRows.run
    monkeypatch.setattr(
        ModuleRows, "run", lambda self, *args: ways.append(type(self)) or run(self, *args)
    )
    need = (
        engines.growing_shape(model.config, torch.float32).bytes([11], [1], 20)
        + 12 * 20
        + engines.logits_bytes(64, 4, params)
    )
    monkeypatch.setattr(engines, "free_memory", lambda device: need)
    engine.generate(PROMPTS[:1], params)
    monkeypatch.setattr(engines, "free_memory", lambda device: 2 * need)
    engine.generate(PROMPTS[:1], params)
    monkeypatch.setattr(engines, "free_memory", lambda device: need - 1)
    with pytest.raises(MemoryError, match="up to 20 tokens after a prompt of 11"):
        engine.generate(PROMPTS[:1], params)
    assert ways == [ModuleRows, ModuleDecoder]
    assert slow == [engines.NOT_WHOLE, None]


def test_a_trial_that_does_not(as_on_a_gpu, monkeypatch):
    model, inner = tiny("Llama", **UNREAD), transformers.LlamaForCausalLM.forward

    def with_mask(change):
        def forward(self, *args, attention_mask=None, **kwargs):
            return inner(self, *args, attention_mask=change(attention_mask), **kwargs)

        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)

    with_mask(
        lambda mask: None if mask.ndim == 4 else mask
    )  # does not look at a mask that is ready
    assert try_to_record(model).startswith("its steps are computed otherwise, logits differ by ")

    def refuse(mask):
        if mask.ndim == 4:
            raise TypeError("a mask (B, L) is needed\nand more")
        return mask

    with_mask(refuse)
    assert try_to_record(model) == "TypeError: a mask (B, L) is needed"
    engine = RolloutEngine(model, None)
    assert engine.way == f"through the model's modules: {WHY}"
    assert (
        engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5)).lengths.max() <= 5
    )  # by the loop that works


def test_the_engine_takes_this_way(as_on_a_gpu, monkeypatch):
    model, tried = tiny("Qwen2", **UNREAD).train(), []
    monkeypatch.setattr(
        module_decoding,
        "try_to_record",
        lambda model: tried.append((model.training, torch.is_grad_enabled())),
    )
    engine, params = (
        RolloutEngine(model, None),
        SamplingParams(temperature=0, max_tokens=20, n=2, stop_token_ids=(0, 1)),
    )
    assert engine.way == f"through the model's modules, a step recorded: {WHY}"
    called, advance = [], ModuleDecoder.advance
    monkeypatch.setattr(
        ModuleDecoder, "advance", lambda self, done: called.append(1) or advance(self, done)
    )
    rollout = engine.generate(PROMPTS, params)
    assert tried == [(False, False)] and called and model.training  # tried once, as it draws
    assert_same(rollout, RolloutEngine(model, None, through_modules=True).generate(PROMPTS, params))
    model.set_attn_implementation("eager")
    engine.generate(PROMPTS, params)
    assert (
        len(tried) == 2 and ("eager", torch.float32, None) in engine.tried
    )  # another attention, another trial
    assert (
        RolloutEngine(model, None, through_modules=True).way
        == "through the model's modules: as asked"
    )


def test_a_gpu_that_draws_slowly_says_so(monkeypatch):
    model, slow = tiny("Llama", **UNREAD), []
    engine = RolloutEngine(model, None)
    monkeypatch.setattr(engine, "_warn_slow", slow.append)
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    assert slow == [cannot_record(model)]
    monkeypatch.undo()
    engine.model = SimpleNamespace(device=torch.device("cuda"))
    with pytest.warns(
        UserWarning, match="drawn slowly, no step is recorded: it has a hook"
    ) as warned:
        for engine.through_modules in (False, True):
            engine._warn_slow("it has a hook")
            engine._warn_slow(None)
    assert len(warned) == 1


def test_a_recording_that_fails_is_a_warning(monkeypatch):
    def fails(step):
        raise RuntimeError("no room")

    monkeypatch.setattr(module_decoding, "record_graph", fails)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    model, params = tiny("Llama"), SamplingParams(temperature=0, max_tokens=40)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="could not be recorded.*no room") as warned:
            mine = complete(model, PROMPTS, params, STOP, in_place=True)
    monkeypatch.undo()
    assert len(warned) == 1
    assert_same(mine, both(model, params)[1])


def test_what_speaks_against_it(monkeypatch):
    model = tiny("Llama")
    assert cannot_record(model) == "it is not on a GPU"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(type(model), "device", torch.device("cuda:1"))
    assert cannot_record(model) == "it is on cuda:1, and the current device is cuda:0"
    monkeypatch.setattr(type(model), "device", torch.device("cuda:0"))
    assert cannot_record(model) is None
    model.enable_input_require_grads()  # transformers' own hook
    assert cannot_record(model) is None
    handle = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + 0
    )
    assert cannot_record(model) == "model.embed_tokens has a forward hook"
    handle.remove()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert cannot_record(adapted) is None
    handle = adapted.register_forward_hook(lambda module, inputs, output: None)
    assert cannot_record(adapted) == "the model has a forward hook"
    handle.remove()
    model = adapted.unload()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: None)
    assert cannot_record(model) == "model.layers.1.mlp has a forward hook"
    handle.remove()
    model.config._attn_implementation = "flash_attention_2"
    assert "'sdpa' or 'eager' take a mask" in cannot_record(model)
    model.config._attn_implementation = "sink"
    others = tiny("Qwen3 quick"), tiny("GptOss eager")
    monkeypatch.setattr(transformers.PreTrainedModel, "device", torch.device("cuda:0"))
    quick, with_sinks = others
    assert cannot_record(model) is None and cannot_record(quick) is None
    with_sinks.config._attn_implementation = "sink"  # its mask is not made for a ring of slots
    assert "'sdpa' or 'eager' take a mask" in cannot_record(with_sinks)
    model.config._attn_implementation = "sdpa"
    model.config.layer_types = ["chunked_attention", "full_attention"]
    assert cannot_record(model) == "it has layers of another kind: chunked_attention"
    del model.config.layer_types
    model.config.attention_chunk_size = 8
    assert "attention in chunks" in cannot_record(model)

    class Own(transformers.LlamaForCausalLM):
        pass

    own = Own(model.config)
    monkeypatch.setattr(type(own), "device", torch.device("cuda:0"))
    assert cannot_record(own) == "Own is not one of transformers' classes"
