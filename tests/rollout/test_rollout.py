"""The record of a rollout: padding, masks, lengths, reasons, versions, and parts put together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.rollout import (
    Rollout,
    concatenate,
    default_stop_token_ids,
    end_at_text,
    finish,
    pad_left,
)

PROMPTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=6)


def drawn(lengths, stops, start=10, room=6):
    """A rollout of completions with these lengths, each of tokens of its own; rows in `stops` end
    with token 1."""
    ids = torch.arange(start, start + len(lengths) * room).view(-1, room)
    for row in stops:
        ids[row, lengths[row] - 1] = 1
    return finish(
        [[row + 1] for row in range(len(lengths))],
        ids,
        -ids.float(),
        torch.tensor(lengths),
        torch.tensor([1, 2]),
    )


@given(PROMPTS, st.integers(0, 99))
def test_padding_on_the_left_keeps_every_prompt(prompts, pad_token_id):
    ids, mask = pad_left(prompts, pad_token_id)
    assert ids.shape == mask.shape == (len(prompts), max(map(len, prompts)))
    assert [row[keep].tolist() for row, keep in zip(ids, mask)] == prompts
    assert mask[:, -1].all() and (ids[~mask] == pad_token_id).all()
    assert (mask[:, 1:] >= mask[:, :-1]).all()  # the padding is in one piece, on the left


def test_what_is_behind_a_completion_is_cleared():
    rollout = drawn([2, 4], stops=[0])
    assert rollout.completion_ids.tolist() == [[10, 1, 0, 0], [16, 17, 18, 19]]
    assert rollout.logps.tolist() == [[-10, -1, 0, 0], [-16, -17, -18, -19]]
    assert rollout.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert rollout.lengths.tolist() == [2, 4] and rollout.versions is None


def test_a_stop_token_in_the_middle_is_no_end():
    "Only the last token of a completion says why it ended."
    ids = torch.tensor([[1, 7, 8]])
    rollout = finish([[5]], ids, torch.zeros(1, 3), torch.tensor([3]), torch.tensor([1]))
    assert rollout.finish_reasons == ["length"] and rollout.truncated.tolist() == [True]


def test_without_stop_tokens_every_completion_is_cut():
    none = torch.zeros(0, dtype=torch.long)
    rollout = finish([[5]], torch.tensor([[7, 1]]), torch.zeros(1, 2), torch.tensor([2]), none)
    assert rollout.finish_reasons == ["length"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_not_finite_is_reported_inside_a_completion_only(value):
    ids, lengths, stop = torch.full((2, 3), 7), torch.tensor([3, 1]), torch.tensor([1])
    logps = torch.zeros(2, 3)
    logps[1, 2] = value  # behind the end of completion 1
    assert finish([[5]] * 2, ids, logps, lengths, stop).logps.isfinite().all()
    logps[0, 1] = value
    with pytest.raises(FloatingPointError, match="token 1 of completion 0"):
        finish([[5]] * 2, ids, logps, lengths, stop)


def test_parts_put_together_are_the_whole():
    lengths, whole = [2, 4, 1, 6], drawn([2, 4, 1, 6], stops=[0, 3])
    parts = [drawn(lengths[:2], stops=[0]), drawn(lengths[2:], stops=[1], start=22)]
    together = concatenate(parts)
    assert together.prompt_ids == [[1], [2], [1], [2]]
    assert torch.equal(together.completion_ids, whole.completion_ids)
    assert torch.equal(together.mask, whole.mask) and torch.equal(together.logps, whole.logps)
    assert together.finish_reasons == whole.finish_reasons == ["stop", "length", "length", "stop"]
    assert concatenate(parts[:1]) is parts[0]


def test_versions_are_kept_if_every_part_has_them():
    parts = [drawn([2, 1], stops=[]), drawn([3], stops=[])]
    assert concatenate(parts).versions is None
    parts[0].versions = torch.tensor([4, 4])
    assert concatenate(parts).versions is None
    parts[1].versions = torch.tensor([5])
    assert concatenate(parts).versions.tolist() == [4, 4, 5]


def test_texts_end_where_the_completions_end():
    _, tokenizer = tiny_gpt_oss()
    ids = tokenizer("12+345").input_ids
    stop = tokenizer.eos_token_id
    rollout = Rollout(
        prompt_ids=[[7], [7]],
        completion_ids=torch.tensor([[*ids[:2], stop, *ids[3:]], ids]),
        mask=torch.tensor([[True] * 3 + [False] * 3, [True] * 6]),
        logps=torch.zeros(2, 6),
        finish_reasons=["stop", "length"],
    )
    assert rollout.texts(tokenizer) == ["12", "12+345"]
    assert rollout.texts(tokenizer, skip_special_tokens=False)[0] == "12" + tokenizer.eos_token


def test_stop_tokens_are_named_in_three_places():
    model, tokenizer = tiny_gpt_oss(0)
    model.generation_config.eos_token_id, model.config.eos_token_id = [5, 1], 9
    assert default_stop_token_ids(model, tokenizer) == (1, 5, 9)
    assert default_stop_token_ids(model, None) == (1, 5, 9)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    tokenizer.chat_template = None  # which names an end as well
    assert default_stop_token_ids(model, tokenizer) == ()


@given(
    st.lists(st.text("12=", min_size=1, max_size=12), min_size=1, max_size=5),
    st.lists(st.text("12=", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_rows_end_where_the_first_stop_text_is_complete(texts, stop):
    _, tokenizer = tiny_gpt_oss(0)
    rows = tokenizer(texts)["input_ids"]
    ids, mask = (x.flip(-1) for x in pad_left([row[::-1] for row in rows]))
    rollout = Rollout([[5]] * len(rows), ids, mask, -mask.float(), ["length"] * len(rows))
    ended = end_at_text(rollout, tokenizer, stop)
    for whole, kept, reason in zip(texts, ended.texts(tokenizer), ended.finish_reasons):
        ends = [t for t in range(len(whole)) if any(whole[: t + 1].endswith(end) for end in stop)]
        assert kept == (whole[: ends[0] + 1] if ends else whole)
        assert reason == ("stop" if ends else "length")
    assert torch.equal(ended.logps, -ended.mask.float())
    assert not ended.completion_ids[~ended.mask].any()


def test_parts_keep_everything_and_rows_can_be_taken_out():
    one, two = drawn([2, 4], stops=[0]), drawn([3], stops=[])
    one.columns, two.columns = {"a": [1, 2]}, {"a": [3]}
    two.written = torch.tensor([[True, False, True]])
    both = concatenate([one, two])
    assert both.columns == {"a": [1, 2, 3]} and both.drawn.tolist() == [2, 4, 2]
    some = both.rows([2, 0])
    assert some.prompt_ids == [two.prompt_ids[0], one.prompt_ids[0]]
    assert some.columns == {"a": [3, 1]} and some.lengths.tolist() == [3, 2]
    assert some.written[0].tolist() == [True, False, True, False] and some.versions is None
    assert one.written is None and one.drawn.tolist() == [2, 4]  # the parts are as they were
