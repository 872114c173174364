"""What the model reads and where it stops, by every route: beside transformers' own rendering and
its stopping criterion, and TRL's helper against what `datasets` fills in."""

import json
from http.client import HTTPConnection

import datasets
import pytest
import torch
from chat_templates import TEMPLATES, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import digits, one_thread, small_model, small_trainer  # noqa: F401
from transformers.generation.stopping_criteria import EosTokenCriteria
from trl.trainer.utils import remove_none_values

from grpo_nb.compat.fast import FastLanguageModel
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import takes
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.turns import appended
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training.data import (
    check_long_prompts,
    completion_as_given,
    prompt_token_ids,
    stops_by_name,
)
from grpo_nb.training.rewards import ModelReward

START, END = "<s>", "</s>"
TOKENIZERS = {name: byte_tokenizer(text, END, START) for name, text in TEMPLATES.items()}
STRINGS = sorted(name for name, one in TOKENIZERS.items() if takes(one, False))
PARTS = sorted(name for name, one in TOKENIZERS.items() if takes(one, True))
CALLING = ["qwen2_5", "qwen3", "llama3_1", "glm4moe", "lfm2_v2", "nemotron_3_nano", "gemma4"]
WORDS = st.text("ab+= ", min_size=1, max_size=5).map(lambda text: f"q{text}q")


def conversation(words):
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(words)
    ]


def in_parts(messages):
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def plain(messages, tokenizer, **variables):
    "The ids as transformers makes them."
    found = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **variables
    )
    return list(found["input_ids"])


TALKS = st.integers(0, 1).flatmap(
    lambda more: st.lists(WORDS, min_size=1 + 2 * more, max_size=1 + 2 * more)
)


@settings(max_examples=60, deadline=None)
@given(TALKS, st.sampled_from(STRINGS), st.booleans())
def test_random_conversations_are_read_as_transformers_writes_them(words, name, adds):
    tokenizer, messages = TOKENIZERS[name], conversation(words)
    ids = plain(messages, tokenizer)
    assert prompt_token_ids(messages, tokenizer) == ids
    table = datasets.Dataset.from_list(  # of which every message has every field
        [{"prompt": messages}, {"prompt": [{"role": "tool", "content": "1", "name": "look"}]}]
    )
    assert table[0]["prompt"] != messages
    assert prompt_token_ids(table[0]["prompt"], tokenizer) == ids
    if name not in PARTS:
        assert prompt_token_ids(in_parts(messages), tokenizer) == ids
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    adding = byte_tokenizer(TEMPLATES[name], END, START, add_bos_token=adds, add_eos_token=adds)
    first = [adding.bos_token_id] * (adds and not text.startswith(START))
    assert prompt_token_ids(text, adding) == first + ids


@settings(max_examples=30, deadline=None)
@given(TALKS, st.sampled_from(PARTS))
def test_templates_of_parts_get_parts(words, name):
    tokenizer, messages = TOKENIZERS[name], conversation(words)
    ids = plain(in_parts(messages), tokenizer)
    assert prompt_token_ids(in_parts(messages), tokenizer) == ids
    if name not in STRINGS:
        assert prompt_token_ids(messages, tokenizer) == ids
        assert words[-1] in tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["phi3", "llama3", "qwen2_5"])
def test_several_parts_under_a_template_of_strings_are_refused_with_the_row(name):
    several = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = [{"prompt": conversation(["a"])}, {"prompt": [{"role": "user", "content": several}]}]
    with pytest.raises(ValueError, match="row 1 .*message 0 .*Write its content as one string"):
        check_long_prompts(rows, TOKENIZERS[name], 8, 4096)
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    one = in_parts(conversation(["a"]))
    with pytest.raises(ValueError, match="row 2 .*reads texts alone"):
        check_long_prompts([{"prompt": p} for p in (one, one, picture)], TOKENIZERS[name], 8, 4096)


def test_a_number_is_no_content():
    rows = [{"prompt": conversation(["a"])}, {"prompt": [{"role": "user", "content": 5}]}]
    with pytest.raises(
        ValueError, match="row 1 .*message 0 .*content 5, a int: write it as text, '5'"
    ):
        check_long_prompts(rows, TOKENIZERS["qwen2_5"], 8, 4096)


def a_call(**arguments):
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


def called(**arguments):
    asked = {"role": "user", "content": "where?"}
    answer = {"role": "tool", "name": "look", "content": "there", "tool_call_id": "abcdefghi"}
    return [asked, a_call(**arguments), answer]


@pytest.mark.parametrize("name", CALLING)
def test_no_none_of_datasets_is_read(name):
    tokenizer = TOKENIZERS[name]
    asked = [called(city="Rome"), called(query="b", limits={"most": 3})]
    table = datasets.Dataset.from_list([{"prompt": one} for one in asked])
    assert table[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["query"] is None
    for row, messages in zip(table, asked):
        ids = plain(messages, tokenizer)
        assert prompt_token_ids(row["prompt"], tokenizer) == ids
        assert plain(remove_none_values(row)["prompt"], tokenizer) == ids


def test_a_null_that_is_meant_is_written_as_text():
    messages = called(city="Rome")
    messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": None})
    assert "null" in TOKENIZERS["qwen3"].decode(prompt_token_ids(messages, TOKENIZERS["qwen3"]))


def test_a_content_of_none_is_no_word():
    template = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(template, END)
    nothing, empty = ([{"role": "user", "content": text}] for text in (None, ""))
    assert prompt_token_ids(nothing, tokenizer) == plain(empty, tokenizer)
    begun = {"role": "assistant", "content": [{"type": "text", "text": "1"}]}
    assert completion_as_given([*nothing, begun], "2") == [{"role": "assistant", "content": "12"}]


def test_a_run_whose_rows_hold_parts_trains_as_with_strings(tmp_path):
    found = []
    for folder, rows in (("a", ROWS), ("b", [{"prompt": in_parts(r["prompt"])} for r in ROWS])):
        trainer = small_trainer(tmp_path / folder, rows=rows)
        trainer.train()
        found.append([(one["prompt"], one["completion"]) for one in trainer.samples])
    assert found[0] == found[1]
    assert appended(in_parts(ROWS[0]["prompt"]), "9") == [{"role": "user", "content": "0+1=9"}]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_a_reward_model_reads_neither_none_nor_brackets(name):
    reward = object.__new__(ModelReward)
    reward.tokenizer, reward.chat_template_kwargs = TOKENIZERS[name], {}
    asked = [called(city="Rome"), called(query="b")]
    table = datasets.Dataset.from_list([{"prompt": one} for one in asked])
    answer = {"role": "assistant", "content": "there"}
    for row, messages in zip(table, asked):
        expected = TOKENIZERS[name].apply_chat_template([*messages, answer], tokenize=False)
        assert reward.text(row["prompt"], in_parts([answer])) == expected


# where it stops, by every route

TURNS = "{% for m in messages %}{{ m.thinking }}<|start|>{{ m.content }}<|message|>{% endfor %}"


def closing():
    "A model whose template closes turns with a token that nothing names."
    model, tokenizer = small_model()
    tokenizer.chat_template = TURNS + "{% if add_generation_prompt %}<|start|>={% endif %}"
    return model, tokenizer


def ends_as_in_transformers(completions, tokenizer, most):
    "Whether each row ends at the first token at which transformers would stop."
    named = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|message|>")]
    ended = EosTokenCriteria(torch.tensor(named))
    for ids in completions:
        stops = [bool(ended(torch.tensor([ids[: t + 1]]), None)) for t in range(len(ids))]
        assert not any(stops[:-1]) and (stops[-1] or len(ids) == most)
    return any(ids[-1] == named[1] for ids in completions)


def rows_of(rollout):
    sizes = rollout.lengths.tolist()
    return [ids[:size] for ids, size in zip(rollout.completion_ids.tolist(), sizes)]


def test_the_engine_stops_at_the_end_of_a_turn():
    model, tokenizer = closing()
    ids = prompt_token_ids([{"role": "user", "content": "1+1="}], tokenizer)
    drawn = RolloutEngine(model, tokenizer).generate([ids], SamplingParams(n=64, max_tokens=24))
    assert ends_as_in_transformers(rows_of(drawn), tokenizer, 24)


def test_fast_generate_stops_at_the_end_of_a_turn(tmp_path):
    model, tokenizer = closing()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = dict(max_seq_length=128, load_in_4bit=False, quiet=True, fast_inference=True)
    model, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path), **given)
    sampling = SamplingParams(n=64, max_tokens=24)

    class Theirs:  # the attributes of vLLM's
        n, max_tokens, temperature = 64, 24, 1.0

    for params in (sampling, Theirs()):
        (found,) = model.fast_generate([[{"role": "user", "content": "1"}]], params)
        rows = [list(one.token_ids) for one in found.outputs]
        assert ends_as_in_transformers(rows, tokenizer, 24)


def test_the_server_stops_at_the_end_of_a_turn():
    model, tokenizer = closing()
    asked = {"prompt": "1+1=", "n": 64, "max_tokens": 24, "return_token_ids": True}
    with serving(StandIn(model, tokenizer, name="small")) as url:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        found = json.loads(connection.getresponse().read())
        connection.close()
    rows = [one["token_ids"] for one in found["choices"]]
    assert ends_as_in_transformers(rows, tokenizer, 24)


ROWS = [{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(8)]


def test_a_run_and_its_evaluation_stop_at_the_end_of_a_turn(tmp_path):
    model, tokenizer = closing()
    seen = []

    def watching(completions, completion_ids, **columns):
        seen.extend(completion_ids)
        return digits(completions)

    settings = dict(model=model, tokenizer=tokenizer, max_completion_length=24, max_steps=2)
    trainer = small_trainer(tmp_path, watching, rows=ROWS, **settings)
    trainer.train()
    assert ends_as_in_transformers(seen, tokenizer, 24)
    seen.clear()
    trainer.evaluate(ROWS)
    assert seen and ends_as_in_transformers(seen, tokenizer, 24)


@pytest.mark.long
def test_turns_with_tools_stop_at_the_same_tokens(tmp_path, capsys):
    tokenizer = byte_tokenizer(TEMPLATES["qwen3"])
    model = small_model()[0]
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id

    def look(place: str) -> str:
        """Look somewhere.

        Args:
            place: where
        """
        return place

    settings = dict(model=model, tokenizer=tokenizer, rows=ROWS, max_completion_length=40)
    trainer = small_trainer(tmp_path, arguments={"tools": [look]}, **settings)
    prompt, stops, _ = start_of(trainer, capsys)
    assert prompt.startswith("<|im_start|>system") and prompt.endswith("<|im_start|>assistant\\n")
    told = stops_by_name(trainer.sampler.stop_token_ids, None, tokenizer)
    assert told == stops.partition(" (added")[0] == "<|endoftext|>, <|im_end|>"


def test_a_server_names_the_stop_that_it_added():
    model, tokenizer = closing()
    assert "<|message|>" in StandIn(model, tokenizer, name="small").added_stop()
    assert StandIn(*small_model(), name="small").added_stop() == ""


# what the start of a run says


def start_of(trainer, capsys):
    trainer.log.show = True
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith(("first prompt: ", "stops: ", "room: "))]
    assert [line.partition(":")[0] for line in found] == ["first prompt", "stops", "room"]
    return [line.partition(": ")[2] for line in found]


def test_a_run_begins_with_its_prompt_its_stops_and_its_room(tmp_path, capsys):
    model, tokenizer = closing()
    trainer = small_trainer(tmp_path, rows=ROWS, model=model, tokenizer=tokenizer)
    prompt, stops, room = start_of(trainer, capsys)
    written = tokenizer.apply_chat_template(
        ROWS[0]["prompt"], add_generation_prompt=True, tokenize=False
    )
    size = len(tokenizer(written, add_special_tokens=False)["input_ids"])
    most = model.config.max_position_embeddings
    assert prompt == written
    assert stops.startswith("<|return|>, <|message|> (added: ") and "chat template" in stops
    assert room.startswith(f"{size} tokens of this prompt and 6 of a completion")
    assert f"{most - size - 6:,} left of {most:,}" in room


def test_what_is_named_is_not_called_added(tmp_path, capsys):
    _, stops, _ = start_of(small_trainer(tmp_path), capsys)
    assert stops == "<|return|>"
    model, tokenizer = closing()
    ends = {"generation_kwargs": {"eos_token_id": 5}}
    trainer = small_trainer(tmp_path / "own", model=model, tokenizer=tokenizer, **ends)
    _, stops, _ = start_of(trainer, capsys)
    assert stops == tokenizer.convert_ids_to_tokens(5)


def test_a_long_prompt_is_cut_in_the_middle_and_shows_no_control_characters(tmp_path, capsys):
    tokenizer = byte_tokenizer(None, END)
    model = small_model(max_position_embeddings=512)[0]
    model.resize_token_embeddings(len(tokenizer))
    rows = [{"prompt": "begin\x1b[31m\n" + "x" * 400 + "\nend"}] * 8
    trainer = small_trainer(tmp_path, rows=rows, model=model, tokenizer=tokenizer)
    prompt, _, _ = start_of(trainer, capsys)
    assert len(prompt) < 170 and prompt.startswith("begin\\x1b[31m\\nxx")
    assert prompt.endswith("xx\\nend") and " ... " in prompt


def test_a_function_that_draws_decides_itself(tmp_path, capsys):
    def drawing(prompts, trainer):
        ids = [[9, 1]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}

    model, tokenizer = small_model()
    tokenizer.chat_template = None  # nothing here writes conversations
    settings = dict(rows=ROWS, model=model, tokenizer=tokenizer)
    trainer = small_trainer(tmp_path, arguments={"rollout_func": drawing}, **settings)
    trainer.log.show = True
    trainer.train()
    assert "stops: " not in capsys.readouterr().out


def test_the_hint_looks_inside_of_what_was_cut_before_it_blames_the_model(tmp_path):
    model, tokenizer = closing()
    tokenizer.eos_token = "<|end|>"
    others = "".join(sorted({*tokenizer.all_special_tokens, "<|return|>"} - {"<|end|>"}))
    tokenizer.chat_template = TURNS.replace("<|start|>", others)  # all inside of a turn
    settings = dict(max_completion_length=60, max_steps=9, generation_kwargs={"eos_token_id": []})
    trainer = small_trainer(tmp_path, model=model, tokenizer=tokenizer, rows=ROWS, **settings)
    trainer.train()
    cut = [hint for hint in trainer.hints_given if "were cut at" in hint]
    assert len(cut) == 1 and "stands <|end|>" in cut[0] and "has not learnt" not in cut[0]
