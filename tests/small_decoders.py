"""Tiny models of each way of decoding, and decoders on a CPU that work as on a GPU."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import torch
from dense_models import dense_model

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import continuous_batching, decode_ops, engine
from grpo_nb.rollout.continuous_batching import RowsInTurn
from grpo_nb.rollout.decoder import Decoder, RecordedSteps
from grpo_nb.rollout.kv_cache import CacheShape
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import sample_tokens

ENDS = tuple(range(12, 18))

KINDS = {
    "gpt-oss": lambda: tiny_gpt_oss(0, num_experts=8, sliding_window=4, initializer_range=0.25)[0],
    "Gemma3Text": lambda: dense_model("Gemma3Text"),
}


def in_pages(monkeypatch):
    "Give decoders on a CPU pages of four tokens, as on a GPU of 128."

    def shape(self):
        return CacheShape(self.windows, self.kv_heads, self.head_dim, self.dtype, 4)

    monkeypatch.setattr(Decoder, "shape", property(shape))


def as_recorded(monkeypatch):
    "A stand-in for recordings, so that rows that have ended are fed on."

    def record(self, size, advance):
        "In place of a CUDA graph, which holds no function either."
        static, step = torch.full((size,), self.spare), weakref.WeakMethod(advance)
        return SimpleNamespace(replay=lambda: step()(static)), static

    def look(turns):
        turns.looks += 1
        return turns.state.alive.clone(), turns.looks, None

    def draw(decoder, logits, params, seen, uniform):
        return *sample_tokens(logits, params, seen, uniform=uniform), None

    make = RowsInTurn.__init__

    def recorded(self, decoder, *given, **others):
        decoder.ops = SimpleNamespace(**vars(decode_ops))
        make(self, decoder, *given, **others)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(RecordedSteps, "_record", record)
    monkeypatch.setattr(continuous_batching, "draw_tokens", draw)
    monkeypatch.setattr(RowsInTurn, "look", look)
    monkeypatch.setattr(RowsInTurn, "__init__", recorded)


def by_modules(model, rollout):
    "Log-probs of a rollout in one pass over whole sequences, (N, T)."
    ids, mask = pad_left(rollout.prompt_ids, device=model.device)
    ids, mask = torch.cat([ids, rollout.completion_ids], 1), torch.cat([mask, rollout.mask], 1)
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits
    start = ids.shape[1] - rollout.completion_ids.shape[1]
    logps = logits[:, start - 1 : -1].float().log_softmax(-1)
    return logps.gather(-1, rollout.completion_ids[..., None])[..., 0] * rollout.mask


def parts_of(size, monkeypatch):
    "Engines read prompts so many tokens at a time, as where no more fits."
    memory = engine.memory_of_decoder
    monkeypatch.setattr(
        engine, "memory_of_decoder", lambda *given: replace(memory(*given), prefill_tokens=size)
    )
