"""Where a completion ends: the token that closes a turn in released chat templates, beside what TRL
trains on and what transformers stops at, and the texts of prompts."""

from types import SimpleNamespace

import pytest
import torch
from chat_templates import TEMPLATES, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.rollout.rollout import (
    Rollout,
    default_stop_token_ids,
    passed_over,
    takes,
    text_token_ids,
    turn_closer,
)
from grpo_nb.rollout.turns import turn_end

TRAINED = sorted(name for name in TEMPLATES if name.endswith("_training"))


def trained_end(tokenizer):
    "The first special token behind an answer, of those that TRL trains on."
    form = (lambda text: text) if takes(tokenizer, False) else in_parts
    turns = [("user", "ask"), ("assistant", "say")]
    found = tokenizer.apply_chat_template(
        [{"role": role, "content": form(text)} for role, text in turns],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = [i for i, own in zip(found["input_ids"], found["assistant_masks"]) if own]
    behind = tokenizer.tokenize(tokenizer.decode(ids).partition("say")[2])
    added = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    return next(token for token in behind if token in added)


def in_parts(text):
    return [{"type": "text", "text": text}]


def stops_of(tokenizer, *named):
    "The stops of a model that names these tokens in its generation_config."
    ids = tokenizer.convert_tokens_to_ids(list(named))
    config = SimpleNamespace(eos_token_id=None)
    config.get_text_config = lambda: config
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids), config=config)
    return tokenizer.convert_ids_to_tokens(default_stop_token_ids(model, tokenizer))


@pytest.mark.parametrize("marked", [True, False])
def test_the_end_of_a_turn_need_not_be_marked_as_special(marked):
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=marked)
    tokenizer.chat_template = TEMPLATES["qwen3"]
    assert stops_of(tokenizer) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_turn_ends_where_trl_ends_it(name):
    tokenizer = byte_tokenizer(TEMPLATES[name], eos="<|other|>", bos="<s>")
    end = trained_end(tokenizer)
    assert tokenizer.convert_ids_to_tokens(turn_closer(tokenizer)) == end
    if name != "glm4moe_training":  # the released one writes no end
        template = TEMPLATES[name.removesuffix("_training")]
        released = byte_tokenizer(template, eos="<|other|>", bos="<s>")
        assert released.convert_ids_to_tokens(turn_closer(released)) == end


def test_glm_is_stopped_by_the_next_speaker_and_not_behind_its_thoughts():
    tokenizer = byte_tokenizer(TEMPLATES["glm4moe"], additional_special_tokens=["</think>"])
    assert turn_closer(tokenizer) is None
    named = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert sorted(stops_of(tokenizer, *named)) == sorted(named)


@pytest.mark.parametrize("name", ["phi3", "phi3_5"])
def test_phi_ends_a_turn_before_it_ends_a_text(name):
    tokenizer = byte_tokenizer(TEMPLATES[name])
    assert set(stops_of(tokenizer)) == {"<|endoftext|>", "<|end|>"}


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_gpt_oss_reaches_its_final_channel(name):
    tokenizer = byte_tokenizer(TEMPLATES[name], eos="<|return|>")
    assert stops_of(tokenizer) == ["<|return|>"]
    middle = TEMPLATES[name].replace("<|return|>", "<|end|>")  # as in turns that others follow
    assert stops_of(byte_tokenizer(middle, eos="<|return|>")) == ["<|return|>"]


def test_nothing_is_added_where_the_turn_ends_with_a_named_token():
    tokenizer = byte_tokenizer(TEMPLATES["cohere2"], eos="<|END_OF_TURN_TOKEN|>")
    assert stops_of(tokenizer) == ["<|END_OF_TURN_TOKEN|>"]  # and not <|END_RESPONSE|> before it
    chatml = byte_tokenizer(TEMPLATES["qwen3"])
    assert stops_of(chatml, "<|im_end|>") == stops_of(chatml)


@pytest.mark.parametrize("template", [None, "", "{{ raise_exception('no') }}", "{{ messages }}"])
def test_without_a_template_or_with_a_broken_one_nothing_is_added(template):
    assert stops_of(byte_tokenizer(template)) == ["<|endoftext|>"]


def test_a_line_break_that_is_a_token_ends_no_call():
    tokenizer = byte_tokenizer(TEMPLATES["qwen3"])
    assert "\n" in tokenizer.get_added_vocab()
    assert tokenizer.convert_ids_to_tokens(turn_end(tokenizer, "look", {})[0]) == "<|im_end|>"


START, END = "<s>", "</s>"
TEXTS = st.builds(
    lambda start, text, end: start * START + text + end * END,
    st.booleans(),
    st.text("ab \n", max_size=6),
    st.booleans(),
)


@settings(deadline=None)
@given(TEXTS, st.booleans(), st.booleans())
def test_a_text_has_one_start_and_no_end_but_its_own(text, starts, ends):
    tokenizer = byte_tokenizer(None, END, START, add_bos_token=starts, add_eos_token=ends)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = starts and not text.startswith(START)
    assert text_token_ids(text, tokenizer) == [tokenizer.bos_token_id] * begun + plain


def a_rollout(rows, cut):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    reasons = ["length" if one else "stop" for one in cut]
    return Rollout([[1]] * len(rows), ids, mask, torch.zeros(ids.shape), reasons)


def test_an_end_inside_of_what_was_cut_is_found():
    tokenizer = byte_tokenizer(TEMPLATES["gptoss"], eos="<|return|>")
    ids = tokenizer("<|channel|>analysis<|message|>a<|end|><|start|>b<|call|>c")["input_ids"]
    plain = tokenizer("abc")["input_ids"]
    assert passed_over(a_rollout([ids, ids, plain], [1, 1, 1]), tokenizer) == "<|call|>"
    assert passed_over(a_rollout([ids, plain, plain], [1, 1, 1]), tokenizer) is None
    assert passed_over(a_rollout([ids, ids], [0, 0]), tokenizer) is None
    base = byte_tokenizer(None, additional_special_tokens=["<|im_end|>"])
    answered = base("yes<|im_end|>\nuser\nmore")["input_ids"]
    assert passed_over(a_rollout([answered] * 2, [1, 1]), base) == "<|im_end|>"
    calls = a_rollout([answered] * 2, [1, 1])
    calls.written = calls.mask.clone()
    assert passed_over(calls, base) is None  # a template's own turns stand inside of several
