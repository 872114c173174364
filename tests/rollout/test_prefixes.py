"""Turns that read their new tokens only: the same tokens, the same log-probs, nothing left over."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from dense_models import dense_model
from live_bytes import LiveBytes
from small_decoders import ENDS, KINDS, as_recorded, in_pages, parts_of
from small_runs import one_thread, small_model  # noqa: F401

from grpo_nb.rollout import decoder as decoders
from grpo_nb.rollout import engine as engines
from grpo_nb.rollout.arrivals import BehindPrefixes, Prefix, Prefixes
from grpo_nb.rollout.continuous_batching import RowsInTurn
from grpo_nb.rollout.decoder import Decoder, DenseDecoder
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.kv_cache import SlotCache
from grpo_nb.rollout.sampling import SamplingParams, stream_keys
from grpo_nb.rollout.turns import TurnSampler
from grpo_nb.serving.server import VLLMServer
from grpo_nb.serving.stand_in import StandIn, serving


@pytest.fixture
def read(monkeypatch):
    "Tokens of prompts that are read, of each pass."
    counts = []

    class Counted(BehindPrefixes):
        def __init__(self, *given):
            super().__init__(*given)
            counts.append(sum(map(len, self.new)))

    monkeypatch.setattr(decoders, "BehindPrefixes", Counted)
    return counts


def talk(engine, params, prefixes):
    """What is drawn in four turns of rows that get replies of different lengths, and how many
    tokens are new to each turn. Before the third one a row leaves, and the first token of another
    is changed."""
    rows = [[5, 6, 7], [8], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5], [8]]
    drawn, new = [], [len(row) for row in rows]
    for turn in range(4):
        if turn == 2:
            rows, prefixes = rows[1:], prefixes and prefixes[1:]
            rows[0][0] = 9
            new[-3] = len(rows[0])
            del new[-4]
        given = {} if prefixes is None else {"prefixes": prefixes}
        rollout = engine.generate(rows, replace(params, seed=turn), **given)
        for i, row in enumerate(rows):
            size, reply = int(rollout.lengths[i]), [7, 8, 9, 6, 5][: 1 + (turn + 2 * i) % 5]
            drawn.append((rollout.completion_ids[i, :size].tolist(), rollout.logps[i, :size]))
            row += drawn[-1][0] + reply
            new.append(1 + len(reply))  # the last token of a turn was drawn, and not read
    return drawn, sum(new[: -len(rows)])


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kind, page", [(k, p) for k in KINDS for p in (None, 4)])
def test_turns_read_what_is_new_and_draw_the_same(kind, page, temperature, read, monkeypatch):
    if page:
        in_pages(monkeypatch)
    engine = RolloutEngine(KINDS[kind](), small_model()[1], max_batch_size=3)  # fewer than rows
    assert engine.way.startswith("directly")
    cut = dict(top_k=9, repetition_penalty=1.1) if temperature else {}
    params = SamplingParams(max_tokens=9, temperature=temperature, stop_token_ids=ENDS, **cut)
    again, new = talk(engine, params, None)
    assert sum(read) > 1.7 * new
    read.clear()
    drawn, _ = talk(engine, params, [None] * 4)
    assert [ids for ids, _ in drawn] == [ids for ids, _ in again]
    for (_, logps), (_, expected) in zip(drawn, again):
        torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    # a prompt of one token is asked for twice, and read twice only in different batches
    assert sum(read) == new - 1


def test_what_is_over_the_bound_or_has_no_decoder_is_read_again(read, monkeypatch):
    model, tokenizer = KINDS["gpt-oss"](), small_model()[1]
    params = SamplingParams(max_tokens=9, stop_token_ids=ENDS)
    again, new = talk(RolloutEngine(model, tokenizer), params, None)
    read.clear()
    modules = RolloutEngine(model, tokenizer, through_modules=True)
    prefixes = [None] * 2
    modules.generate([[5], [6]], params, prefixes=prefixes)
    assert prefixes == [None] * 2 and not read
    size = RolloutEngine(model, tokenizer)._open()[0].shape.prefix_bytes(12)
    monkeypatch.setattr("grpo_nb.rollout.engine.free_memory", lambda device: 2**40)
    monkeypatch.setattr(
        "grpo_nb.rollout.engine.Prefixes", lambda known, rows, *_: Prefixes(known, rows, size)
    )
    drawn, _ = talk(RolloutEngine(model, tokenizer), params, [None] * 4)
    assert [ids for ids, _ in drawn] == [ids for ids, _ in again] and sum(read) > new


def test_a_prefix_of_other_weights_is_not_used(read):
    engine, prefixes, counts = RolloutEngine(*small_model()), [None], []
    ids, greedy = [5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=3, stop_token_ids=())
    for version in (0, 0, 1, 1):
        engine.publish(engine.model, version)
        ids = ids + engine.generate([ids], greedy, prefixes=prefixes).completion_ids[0].tolist()
        counts.append(read[-1])
    assert counts == [4, 1, 10, 1]


def test_a_row_that_is_fed_on_after_its_end_leaves_its_prefix_whole(monkeypatch):
    "As on a GPU, where the host looks at flags that are a turn of the loop old."

    class Late(RowsInTurn):
        def step(self):
            for _ in range(3):
                super().step()

        def retire(self, look):
            late, self.late = getattr(self, "late", None), look
            return super().retire(late)

    in_pages(monkeypatch)
    decoder, prompts = Decoder(KINDS["gpt-oss"]()), [[5, 6, 7], [8, 9] * 6]
    params = SamplingParams(max_tokens=12, temperature=0)
    stop, keys = torch.tensor(ENDS), stream_keys(2, 0)
    kept = Prefixes([None] * 2, prompts)
    rows = Late(decoder, prompts, [1, 1], params, stop, keys, 2, 20, prefixes=kept)
    with torch.inference_mode():
        done = rows.run()
        assert len(rows.cache.free) == 19 and not rows.cache.tables  # all pages are back
        for i, prompt in enumerate(prompts):
            ids = prompt + done.ids[i, : done.counts[i]].tolist()
            known, whole = Prefix(tuple(ids[:-1]), kept.held[i]), [*ids, 6, 7, 8]
            read = [
                decoder.prefill(decoder.cache([len(whole)], [1], 1), [0], [whole], [one])
                for one in (known, None)
            ]
            torch.testing.assert_close(*read, rtol=0, atol=1e-5)


def call(*given):
    "A parser for which every turn is a call of a tool that is not there."
    function = {"name": "nobody", "arguments": {}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def conversation(sampler, tokenizer, **others):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{% for c in m.tool_calls or [] %}7{% endfor %}"
        "{{ m.content }}<|return|>{% endfor %}{% if add_generation_prompt %}+{% endif %}"
    )
    return TurnSampler(sampler, tokenizer, max_tool_calling_iterations=3, parser=call, **others)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_when_a_rollout_ends_or_fails(fails, monkeypatch):
    class InRounds(RolloutEngine):
        def generate(self, prompts, params, prefixes=None, keys=None):
            return super().generate(prompts, params, prefixes=prefixes, keys=keys)

    engine, kept, turns = InRounds(*small_model()), [], []
    copy, finish = SlotCache.prefix, engines.finish

    def noted(*given):
        layers = copy(*given)
        kept.extend(map(weakref.ref, layers))
        return layers

    def third_fails(*given):
        turns.append(sum(note() is not None for note in kept))
        if fails and len(turns) == 3:
            raise MemoryError("in the third turn")
        return finish(*given)

    monkeypatch.setattr(SlotCache, "prefix", noted)
    monkeypatch.setattr(engines, "finish", third_fails)
    sampler = conversation(engine, engine.tokenizer, stop_token_ids=ENDS)
    params = SamplingParams(max_tokens=200, n=3, seed=0)
    if fails:
        with pytest.raises(MemoryError) as caught:
            sampler.generate([[5, 6]], params)
        assert caught.tb  # whose frames are alive, and hold nothing
    else:
        assert set(sampler.generate([[5, 6]], params).calls) == {3}
    gc.collect()
    # three rows of two layers in each turn, and of the turn before nothing once it is read
    assert turns == [6] * (3 if fails else 4)
    assert not any(note() is not None for note in kept)


def test_of_several_servers_a_row_goes_back_to_the_one_that_has_read_it(tmp_path):
    prompts, drawn_by = [[5, 6, 7, 8] * 5, [9], [8]], {5: [], 9: [], 8: []}

    class Noting(VLLMServer):
        def generate(self, prompts, params, version=None, prefixes=None, keys=None):
            rollout = super().generate(prompts, params, version, prefixes, keys)
            drawn_by[prompts[0][0]] += [address.url for address in prefixes]
            return rollout

    stand_ins = [StandIn(*small_model(), name="small", lora_dir=tmp_path) for _ in "ab"]
    with serving(stand_ins[0]) as a, serving(stand_ins[1]) as b:
        server = Noting([a, b], folder=tmp_path / "run", stop_token_ids=ENDS)
        turns = conversation(server, small_model()[1], stop_token_ids=ENDS)
        turns.generate(prompts, SamplingParams(max_tokens=150, seed=0))
    assert {row[0] for row in drawn_by.values()} == {a, b}
    assert all(row == [row[0]] * 4 for row in drawn_by.values())


@pytest.mark.parametrize("size", [4, 7])  # tokens of a part: a page of these caches, and not
@pytest.mark.parametrize(
    "kind, page, recorded",
    [("gpt-oss", None, False), ("gpt-oss", 4, True), ("Gemma3Text", 4, False)],
)
def test_a_long_prompt_is_read_in_parts(kind, page, recorded, size, read, monkeypatch):
    if page:
        in_pages(monkeypatch)
    if recorded:
        as_recorded(monkeypatch)
    model, prompts = KINDS[kind](), [[5 + i % 7 for i in range(23)], [6, 7], [8] * 5]
    parts_of(size, monkeypatch)
    greedy = SamplingParams(temperature=0, max_tokens=9, n=2, stop_token_ids=())
    engine = RolloutEngine(model, small_model()[1])
    engine.generate(prompts, greedy)  # the trial reads, too
    read.clear()
    drawn = engine.generate(prompts, greedy)
    assert max(read) == size and sum(read) == 30  # nothing is read twice
    for i, prompt in enumerate(prompts):  # transformers reads it whole
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
        for row in (2 * i, 2 * i + 1):
            made = drawn.completion_ids[row]
            assert made.tolist()[: whole.shape[1] - len(prompt)] == whole[0, len(prompt) :].tolist()


def test_a_prompt_behind_a_prefix_is_read_in_parts_too(read):
    decoder = Decoder(KINDS["gpt-oss"]())
    ids = [5 + i % 7 for i in range(23)]
    hidden, begun = [], decoder.cache([9], [1], 1)
    with torch.inference_mode():
        decoder.prefill(begun, [0], [ids[:9]])
        for size in (23, 4):
            cache = decoder.cache([23], [1], 1)
            known = Prefixes([Prefix(tuple(ids[:9]), begun.prefix(0, 9))], [ids])
            hidden.append(decoders.read_prompts(decoder, cache, [ids], size, known))
        whole = decoder.inner(torch.tensor([ids])).last_hidden_state[:, -1]
    assert read == [9, 14, 4, 4, 4, 2]
    torch.testing.assert_close(hidden[0], whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[1], whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt-oss", "Qwen3"])
def test_what_reading_in_parts_takes_is_what_is_reckoned(kind, monkeypatch):
    "Attention's own memory aside, which on a CPU is another."
    in_pages(monkeypatch)
    made = (
        DenseDecoder(dense_model(kind, max_position_embeddings=4096)) if kind == "Qwen3" else None
    )
    decoder, params = made or Decoder(KINDS[kind]()), SamplingParams(max_tokens=2)
    nothing = lambda number, q, k, v, pad_lens=None: torch.zeros_like(q)  # noqa: E731
    monkeypatch.setattr(decoder, "attend_prompts", nothing)
    taken, reckoned = [], []
    for length in (1024, 2048):
        ids = [5 + i % 7 for i in range(length)]
        with torch.inference_mode():
            cache = decoder.cache([length], [1], 2)
            with LiveBytes() as live:
                decoders.read_prompts(decoder, cache, [ids], 128)
        taken.append(live.peak)
        with monkeypatch.context() as told:  # a card, where prompts of 128 tokens are long
            told.setattr(decoder, "device", torch.device("cuda"))
            told.setattr(engines, "PREFILL_TOKENS", 128)
            reckoned.append(engines.memory_of_decoder(decoder, [ids], params, 2**40).fixed_bytes)
    more = [sizes[1] - sizes[0] for sizes in (taken, reckoned)]
    assert 0.8 < more[1] / more[0] < 1.3
