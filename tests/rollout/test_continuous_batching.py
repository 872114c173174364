"""Rows that come and go: every completion is what it is alone, whoever is drawn beside it."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from dense_models import dense_model
from small_decoders import as_recorded

from grpo_nb.kernels.compile_together import noted_launches
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import continuous_batching
from grpo_nb.rollout import engine as engine_module
from grpo_nb.rollout.continuous_batching import RowsInTurn
from grpo_nb.rollout.decoder import Decoder, DenseDecoder, RecordedSteps
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.kv_cache import CacheShape, SlotCache, slots_that_fit
from grpo_nb.rollout.sampling import SamplingParams, stream_keys, stream_numbers

PAGE = 4


def paged(model, kind=Decoder):
    "A decoder whose cache has small pages, as on a GPU, by plain tensors."

    def shape(self):
        return CacheShape(self.windows, self.kv_heads, self.head_dim, self.dtype, PAGE)

    decoder = kind(model)
    decoder.__class__ = type("Paged", (kind,), {"shape": property(shape)})
    return decoder


def prompts_of(count, low=1, high=12):
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(7, 20, (n,), generator=generator).tolist() for n in lengths]


def complete(decoder, prompts, groups, params, rows, pages=200, keys=None, stop=(8, 9)):
    keys = stream_keys(sum(groups), 0) if keys is None else keys
    stop = torch.tensor(stop, dtype=torch.long)
    return RowsInTurn(decoder, prompts, groups, params, stop, keys, rows, pages).run()


@pytest.mark.parametrize(
    "kind",
    ["gpt-oss", "Qwen3"],
)
@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(temperature=0.8, top_p=0.9, top_k=12),
        dict(repetition_penalty=1.3),
        dict(temperature=0),
    ],
    ids=str,
)
def test_company_changes_nothing(kind, params):
    "12 rows and few pages, 40 completions, against each drawn alone."
    if kind == "gpt-oss":
        decoder = paged(tiny_gpt_oss(0, num_hidden_layers=2)[0])
    else:
        decoder = paged(dense_model(kind), DenseDecoder)
    prompts, params = prompts_of(10), SamplingParams(max_tokens=9, **params)
    groups, keys = [4] * 10, stream_keys(40, 0)
    together = complete(decoder, prompts, groups, params, rows=12, pages=40)
    assert together.counts[:40].float().std() > 0 or params.temperature == 0
    for number in range(0, 40, 3):
        prompt = [prompts[number // 4]]
        alone = complete(decoder, prompt, [1], params, rows=1, keys=keys[number : number + 1])
        n = int(alone.counts[0])
        assert together.counts[number] == n
        assert torch.equal(together.ids[number, :n], alone.ids[0, :n])
        difference = together.logps[number, :n] - alone.logps[0, :n]
        assert difference.abs().max() < 1e-4


def test_the_same_random_numbers_beside_512_rows_and_a_difference_only_at_a_border(monkeypatch):
    "Numbers are recorded as they are used. A first other token lies within 1e-5 of a border."
    decoder = Decoder(tiny_gpt_oss(0, num_hidden_layers=2)[0])
    prompts, keys = prompts_of(64, 3, 4), stream_keys(512, 5)
    used, params = {}, SamplingParams(max_tokens=4)
    draw = continuous_batching.draw_tokens

    class Watched(RowsInTurn):
        def draw(self, rows, normed):
            self.now = torch.arange(len(self.state.keys))[rows]
            super().draw(rows, normed)

    def watched(decoder, logits, params, seen, uniform):
        state, rows = turns.state, turns.now
        for key, at, u, z in zip(
            state.keys[rows].tolist(), state.counts[rows].tolist(), uniform.tolist(), logits
        ):
            used.setdefault((key, at), []).append((u, z))
        return draw(decoder, logits, params, seen, uniform)

    monkeypatch.setattr(continuous_batching, "draw_tokens", watched)
    ids, stop = {}, torch.tensor([], dtype=torch.long)
    for rows, count in ((512, 512), (8, 64), (1, 16)):
        groups = [8] * (count // 8)
        turns = Watched(
            decoder, prompts[: count // 8], groups, params, stop, keys[:count], rows, 600
        )
        with torch.inference_mode():
            ids[rows] = turns.run().ids[:count]
    assert len(used) == 512 * 4
    assert all(len({u for u, _ in draws}) == 1 for draws in used.values())
    assert used[int(keys[3]), 2][0][0] == stream_numbers(keys[3:4], torch.tensor([2])).item()
    for rows in (8, 1):
        for number in (ids[rows] != ids[512][: len(ids[rows])]).any(1).nonzero()[:, 0].tolist():
            at = int((ids[rows][number] != ids[512][number]).nonzero()[0])
            u, logits = used[int(keys[number]), at][0]
            ends = logits.double().softmax(-1).cumsum(-1)
            assert (ends - u).abs().min() < 1e-5


def test_an_engine_with_memory_for_twelve_rows(monkeypatch):
    "All finish, every page is free at the end, and an error in the middle leaves it usable."
    model = tiny_gpt_oss(0, num_hidden_layers=2)[0]
    engine, watched = RolloutEngine(model, None), []
    engine._open = lambda reach: (paged(model), "pages")
    prompts, params = (
        prompts_of(10, 5, 6),
        SamplingParams(max_tokens=9, n=4, seed=2, stop_token_ids=(8, 9)),
    )
    plenty = engine.generate(prompts, params)
    size = paged(model).shape.size(12, 12 * 4 + 1, 13) + 40 * engine_module.result_bytes(params)
    monkeypatch.setattr(engine_module, "free_memory", lambda device: size)
    run = RowsInTurn.run

    def watch(turns, on_done):
        watched.append(turns)
        return run(turns, on_done)

    monkeypatch.setattr(RowsInTurn, "run", watch)
    few = engine.generate(prompts, params)
    assert torch.equal(few.completion_ids, plenty.completion_ids)
    (turns,) = watched
    assert 12 <= len(turns.state.alive) - 1 < 20 and not turns.owner and not turns.waiting
    assert sorted(turns.cache.free) == list(range(1, 1 + len(turns.cache.free)))
    assert not any(turns.cache.users.values())
    step, calls = Decoder.step, []

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(Decoder, "step", interrupted)
    model.train()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params)
    assert all(module.training for module in model.modules()) and torch.is_grad_enabled()
    again = engine.generate(prompts, params)
    assert torch.equal(again.completion_ids, plenty.completion_ids)


def test_pages_that_are_never_enough_are_refused():
    decoder = paged(tiny_gpt_oss(0)[0])
    with pytest.raises(MemoryError, match="5 pages do not hold a completion of up to 20 tokens"):
        complete(decoder, [[7] * 6], [1], SamplingParams(max_tokens=20), rows=2, pages=5)


@pytest.mark.parametrize("page", [None, 1, 4])
def test_rows_and_pages_stay_within_what_is_free(page):
    shape = CacheShape((8, None), 2, 16, torch.float32, page)
    lengths, groups = [5, 17, 3, 9], [4, 1, 8, 2]
    least = shape.bytes([17], [1], 6) + 150
    for free in (least, 2 * least, 5 * least, 100 * least):
        rows, pages = slots_that_fit(shape, lengths, groups, 6, free, 12, 50, 100)
        assert 1 <= rows <= 12 and shape.size(rows, pages, 22) + 50 * rows + 100 <= free
        cache = SlotCache(shape, rows, pages, 23, "cpu")
        assert sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)) <= free
        assert cache.room(17, 6) >= 1
    assert rows == 12
    with pytest.raises(MemoryError, match="a prompt of 17"):
        slots_that_fit(shape, lengths, groups, 6, least - 1, 12, 50, 100)


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_kernels_of_a_first_step_are_compiled_before_anything_is_drawn(monkeypatch, penalty):
    "In a pass over the spare row; where a drawn token is an index, not at all."
    asked = []

    def compile_together(work):
        before = turns.state.alive.clone(), turns.state.lengths[:-1].clone()
        work()
        assert torch.equal(turns.state.alive, before[0])
        assert torch.equal(turns.state.lengths[:-1], before[1]) and not turns.rows
        asked.append(len(turns.owner))

    model = tiny_gpt_oss(0, num_hidden_layers=2)[0]
    params = SamplingParams(max_tokens=6, repetition_penalty=penalty)
    given = prompts_of(3), [4] * 3, params, torch.tensor([8, 9]), stream_keys(12, 0), 6, 60
    plain = complete(paged(model), *given[:3], rows=6, pages=60)
    as_recorded(monkeypatch)
    monkeypatch.setattr(continuous_batching, "compile_together", compile_together)
    turns = RowsInTurn(paged(model), *given)
    with torch.inference_mode():
        done = turns.run()
    assert asked == ([6] if penalty == 1 else [])
    assert penalty != 1 or torch.equal(done.counts[:12], plain.counts[:12])


def test_the_steps_of_fewer_rows_are_compiled_too(monkeypatch):
    "Rows end one after the other; a pass that fails costs the rollout nothing."
    stepped, real = [], Decoder.step

    def step(self, cache, state, rows, reach):
        stepped.append((len(rows), len(self.layers)))
        return real(self, cache, state, rows, reach)

    def compile_together(work):
        stepped.clear()
        work()
        counts.extend(stepped)
        raise RuntimeError("no compiler")

    counts, params = [], SamplingParams(max_tokens=4)
    as_recorded(monkeypatch)
    monkeypatch.setattr(Decoder, "step", step)
    monkeypatch.setattr(continuous_batching, "compile_together", compile_together)
    given = prompts_of(3), [4] * 3, params, torch.tensor([8, 9]), stream_keys(12, 0), 6, 60
    with (
        torch.inference_mode(),
        pytest.warns(UserWarning, match="one by one: RuntimeError: no compiler"),
    ):
        done = RowsInTurn(paged(tiny_gpt_oss(0, num_hidden_layers=3)[0]), *given).run()
    assert counts == [(8, 3), (1, 2), (2, 2), (4, 2)]
    assert all(done.counts[:12] > 0)


def test_a_pass_that_compiles_takes_no_prefix(monkeypatch):
    "It reads with two layers; what is known of the prompts is left for the reading that counts."
    read, asked, real = [], [], continuous_batching.read_prompts

    class Known:
        def of(self, prompts):
            asked.append(len(prompts))

        def keep(self, *given):
            pass

    def watched(decoder, cache, prompts, tokens, prefixes=None):
        read.append(len(decoder.layers))
        return real(decoder, cache, prompts, tokens, prefixes)

    as_recorded(monkeypatch)
    monkeypatch.setattr(continuous_batching, "read_prompts", watched)
    monkeypatch.setattr(continuous_batching, "compile_together", lambda work: work())
    params = SamplingParams(max_tokens=4)
    given = prompts_of(3), [2] * 3, params, torch.tensor([8, 9]), stream_keys(6, 0), 6, 60, 1000
    model = tiny_gpt_oss(0, num_hidden_layers=3)[0]
    with torch.inference_mode():
        RowsInTurn(paged(model), *given, Known()).run()
    assert read == [2, 3] and asked == [3]


def with_kernels(model, monkeypatch, compile_together):
    "What a decoder with interpreted kernels draws; steps are played as on a GPU."
    pytest.importorskip("triton")
    from grpo_nb.rollout import decode_kernels

    def record(self, size, advance):
        static, step = torch.full((size,), self.spare), weakref.WeakMethod(advance)
        return SimpleNamespace(replay=lambda: step()(static)), static

    def look(turns):
        turns.looks += 1
        return turns.state.alive.clone(), turns.looks, None

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(RecordedSteps, "_record", record)
    monkeypatch.setattr(RowsInTurn, "look", look)
    monkeypatch.setattr(continuous_batching, "compile_together", compile_together)
    continuous_batching.COMPILED.clear()
    kind = Decoder if model.config.model_type == "gpt_oss" else DenseDecoder
    decoder, params = paged(model, kind), SamplingParams(max_tokens=2, top_k=5, top_p=0.9)
    decoder.ops = decode_kernels
    given = [[7, 8, 9], [12, 9]], [1] * 2, params, torch.tensor([2]), stream_keys(2, 0), 2, 20
    with torch.inference_mode():
        return RowsInTurn(decoder, *given).run()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt-oss", "Qwen3"])
def test_a_pass_without_launches_changes_nothing_that_is_drawn(kind, monkeypatch):
    "With interpreted kernels, and a filter."
    sizes = dict(head_dim=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    small = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=1)
    model = dense_model("Qwen3", head_dim=32, **small)
    if kind == "gpt-oss":
        model = tiny_gpt_oss(**sizes, sliding_window=16, num_experts=4)[0]
    found = []

    def noting(work):
        with noted_launches() as noted:
            work()
        found.append({launch.kernel.fn.__name__ for launch in noted})

    plain = with_kernels(model, monkeypatch, lambda work: None)
    drawn = with_kernels(model, monkeypatch, noting)
    assert torch.equal(plain.ids, drawn.ids) and torch.equal(plain.logps, drawn.logps)
    assert len(found) == 1 and len(found[0]) >= 12


def test_recorded_steps_read_flags_late_and_hold_nothing_back(monkeypatch):
    model = tiny_gpt_oss(0, num_hidden_layers=2)[0]
    prompts, params = prompts_of(10), SamplingParams(max_tokens=20)
    plain = complete(paged(model), prompts, [4] * 10, params, rows=12, pages=60)
    as_recorded(monkeypatch)
    decoder = paged(model)
    turns = RowsInTurn(
        decoder, prompts, [4] * 10, params, torch.tensor([8, 9]), stream_keys(40, 0), 12, 60
    )
    with torch.inference_mode():
        late = turns.run()
    assert torch.equal(late.counts[:40], plain.counts[:40])
    drawn = torch.arange(20) < plain.counts[:40, None]
    assert torch.equal(late.ids[:40][drawn], plain.ids[:40][drawn])
    cache, held = weakref.ref(turns.cache), gc.isenabled()
    gc.disable()  # it is gone at once, not when cycles are looked for
    try:
        del turns
        assert cache() is None
    finally:
        if held:
            gc.enable()
