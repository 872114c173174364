"""Several turns in one completion: parsers, the template, the loop, tools, environments."""

import asyncio
import json
import threading
import time
import warnings
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import (
    one_thread,  # noqa: F401
    remember_batches,
    small_model,
    small_trainer,
    weights_of,
)
from tool_templates import Nothing, look_up, renders, shipped, tokenizer_for, verdicts

from grpo_nb.algorithm.logprobs import selective_log_softmax
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout import turns
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampler import Sampler, drawn_elsewhere
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.turns import (
    Environments,
    TurnSampler,
    as_call,
    begin,
    choose_parser,
    event_loop,
    parse_harmony,
    parse_hermes,
    parse_llama,
    rendered,
    run_calls,
    suffix_ids,
    tool_schemas,
    toolset,
)

TEMPLATE = (
    "{% if tools %}<|start|>s<|message|>{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "<|end|>{% endif %}{% for m in messages %}<|start|>{{ m.role[0] }}<|message|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>a<|message|>{% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|call|>", "<|eot_id|>", "<|start_header_id|>"]
MARKS += ["<|end_header_id|>", "<|begin_of_text|>", "<|constrain|>"]


def letters(template=TEMPLATE, eos="<|return|>"):
    "A tokenizer with one token a character, and one a mark of the families' templates."
    tokenizer = tiny_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<|end|>", "<|start|>"]})
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    return tokenizer


def times(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


async def later(word: str) -> str:
    """
    Say a word.

    Args:
        word: what to say
    """
    await asyncio.sleep(0.01)
    return word


def fails() -> str:
    "Fail."
    raise RuntimeError("no")


class Recites:
    "A sampler that draws what a function of the tokens so far says, each with its own log-prob."

    takes_token_ids = True

    def __init__(self, say):
        self.say, self.asked = say, []

    def generate(self, prompts, params):
        self.asked.append(len(prompts))
        ids = [self.say(list(prompt))[: params.max_tokens] for prompt in prompts]
        logprobs = [[-(len(p) + t) / 1000 for t in range(len(row))] for p, row in zip(prompts, ids)]
        output = {"prompt_ids": list(prompts), "completion_ids": ids, "logprobs": logprobs}
        return drawn_elsewhere(output, len(prompts), params.stop_token_ids)

    def publish(self, model, version):
        self.version = version

    def close(self):
        self.closed = True


def in_texts(tokenizer, say, end="<|end|>"):
    "The same from a function of text to text."
    return Recites(lambda ids: tokenizer(say(tokenizer.decode(ids)) + end).input_ids)


def completion(rollout, row):
    return rollout.completion_ids[row][rollout.mask[row]].tolist()


# parsers

CALL = as_call("times", {"a": 6, "b": 7})
HERMES = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
HARMONY = ' to=functions.times<|channel|>commentary json<|message|>{"a": 6, "b": 7}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    "parse, text, content, calls",
    [
        (parse_hermes, "42", "42", []),
        (parse_hermes, f"so\n{HERMES}\n{HERMES}", "so", [CALL, CALL]),
        (parse_hermes, f"<think>{HERMES}</think>42", "42", []),
        (parse_hermes, '<tool_call>{"name": "now"}</tool_call>', "", [as_call("now", {})]),
        (parse_hermes, "<tool_call>[times(a=6, b = 7)]</tool_call>", "", [CALL]),
        (parse_hermes, "<tool_call>call:times{a:6,b:7}</tool_call>", "", [CALL]),
        (parse_llama, '{"name": "times", "parameters": {"a": 6, "b": 7}}<|eot_id|>', "", [CALL]),
        (parse_llama, '{"answer": 42}', '{"answer": 42}', []),
        (parse_llama, "42", "42", []),
        (parse_harmony, "<|channel|>final<|message|>42<|return|>", "42", []),
        (parse_harmony, f"{THOUGHT}{HARMONY}", "", [CALL]),
        (parse_harmony, f"{THOUGHT}<|channel|>commentary{HARMONY}", "", [CALL]),
    ],
)
def test_what_the_parsers_read(parse, text, content, calls):
    message = parse(text)
    assert message["role"] == "assistant" and message["content"] == content
    assert message.get("tool_calls", []) == calls
    assert message.get("thinking", "hm" if parse is parse_harmony else None) in ("hm", None)


LISTED = "<tool_call>[times(a=6, b=7)]</tool_call>"
BROKEN = [
    (parse_hermes, LISTED.replace("6", "times(a=1, b=2)")),
    (parse_hermes, LISTED.replace("a=6", "6")),
    (parse_hermes, LISTED.replace(")]", "]")),
    (parse_hermes, LISTED.replace("6", "'6")),
    (parse_hermes, "<tool_call>call:times[6]</tool_call>"),
    (parse_hermes, "<tool_call>call:times{a=6}</tool_call>"),
    (parse_hermes, "<tool_call>{</tool_call>"),
    (parse_hermes, HERMES[:-4]),
    (parse_hermes, "<tool_call>[1]</tool_call>"),
    (parse_hermes, HERMES.replace("times", "").replace('""', "7")),
    (parse_llama, '{"name": "times", "parameters": {"a"'),
    (parse_llama, '{"name": 7}'),
    (parse_harmony, HARMONY.replace("6", "")),
    (parse_harmony, ' to=functions.times<|channel|>commentary<|message|>"a"<|call|>'),
    (parse_harmony, "<|channel|>final"),
]


@pytest.mark.parametrize("parse, text", BROKEN)
def test_a_broken_call_is_an_error_of_the_parser_and_an_answer_of_the_loop(parse, text):
    with pytest.raises(ValueError):
        parse(text)
    tokenizer = letters()
    read = turns.on_text(parse, tokenizer)
    sampler = TurnSampler(
        in_texts(tokenizer, lambda _: text), tokenizer, [times], stop_token_ids=[1], parser=read
    )
    rollout = sampler.generate([[5]], SamplingParams(max_tokens=500))
    assert rollout.calls == [0] and len(rollout.messages[0]) == 1
    assert set(rollout.messages[0][0]) == {"role", "content"}


@pytest.mark.parametrize("parse", [parse_hermes, parse_llama, parse_harmony])
@pytest.mark.parametrize(
    "piece", ["<tool_call>", '{"name":', "[", "<|start|>", "to=", "</think>", '"\\']
)
def test_parsers_take_time_in_proportion_to_the_text(parse, piece):
    began = time.perf_counter()
    with suppress(ValueError, RecursionError):
        parse(piece * 100_000)
    assert time.perf_counter() - began < 2


OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>a<|message|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def test_the_tokenizers_own_description_comes_first_if_it_gives_back_what_was_written():
    tokenizer = letters()
    tokenizer.response_template = OWN
    before = tokenizer("<|start|>a<|message|>").input_ids
    ids = tokenizer(f"so {HERMES} well<|end|>").input_ids
    read = choose_parser(tokenizer)(ids, before, [])
    assert read == tokenizer.parse_response(ids, prefix=before) and read["content"] == "well"
    wrong = {**OWN["fields"], "tool_calls": {**OWN["fields"]["tool_calls"], "open": "<call>"}}
    tokenizer.response_template = {**OWN, "fields": wrong}
    with pytest.warns(UserWarning, match="does not give back the call .* came back: no call"):
        read = choose_parser(tokenizer)(ids, before, [])
    assert read["tool_calls"] == [CALL] and read["content"] == "so\nwell<|end|>"
    del tokenizer.response_template["start_anchor"]
    with pytest.raises(ValueError, match="start_anchor"):
        choose_parser(tokenizer)


CALLS_AS = "{{ c.function | tojson }}"


@pytest.mark.parametrize(
    "template, words",
    [
        ("plain", "the chat template writes no calls: take"),
        ("{{ raise_exception('no tools here') }}", "writes no calls .*no tools here"),
        (TEMPLATE.replace(CALLS_AS, "{{ c.function.name }}"), "came back: .*'arguments': {}"),
        (TEMPLATE.replace(CALLS_AS, "{{ c.function }}"), "came back: JSONDecodeError"),
        (
            TEMPLATE.replace("<tool_call>", "<say>"),
            r"came back: no call",
        ),
        # of several calls it writes the last one whole, and of the others the names
        (
            TEMPLATE.replace(
                CALLS_AS, "{% if loop.last %}" + CALLS_AS + '{% else %}{"name": "x"}{% endif %}'
            ),
            "came back: .*'name': 'x'",
        ),
    ],
)
def test_a_parser_that_gives_back_something_else_is_not_taken(template, words):
    with pytest.raises(ValueError, match=words):
        choose_parser(letters(template))


TEMPLATES = shipped()
WITH_TOOLS = {n: t for n, t in TEMPLATES.items() if renders(tokenizer_for(t))}
STRINGS = [
    "7",
    "true",
    "null",
    "",
    " a  b ",
    "\n  x = 'y'\n",
    "it's",
    'say "hi"',
    "C:\\new",
    "z=1, y)",
]
WHERES = [{}, {"a": None, "b": {"c": [1.5, "2", [], {"d": False}]}}, {"k": 'it\'s "q" \\ \n'}]


def test_each_of_trls_templates_gives_back_its_calls_or_is_refused_in_a_sentence():
    found = verdicts()
    assert len(WITH_TOOLS) == 27  # of the version that this is tried with
    assert {n for n, verdict in found.items() if verdict == "round-trips"} == {*WITH_TOOLS}
    refused = [verdict for verdict in found.values() if verdict != "round-trips"]
    assert all("chat template" in one and ": take" in one for one in refused)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_a_template_of_trls_writes_is_read_as_it_was_and_as_trl_reads_it(name):
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer, theirs = tokenizer_for(TEMPLATES[name]), tokenizer_for(TEMPLATES[name])
    with suppress(ValueError):  # two families TRL cannot read
        add_response_schema(theirs)
    several = name not in ("llama3_1", "llama3_2", "gptoss")  # these write one call a turn
    parser = choose_parser(tokenizer)
    written = [dict(word=word, count=-3, exact=False, words=["7", word]) for word in STRINGS]
    written += [dict(word="w", where=where) for where in WHERES]
    same = 0
    for one in written:
        calls = [as_call("look_up", one), *[as_call("look_up", {"count": 8})] * several]
        before, turn = turns.turn_with(calls, tokenizer, {})
        found = parser(turn, before, [turns.LOOK_UP])
        assert found["tool_calls"] == calls
        if getattr(theirs, "response_template", None):
            read = parse_response(theirs, turn, prefix=before, tools=[turns.LOOK_UP])
            same += read.get("tool_calls") == calls
    assert same >= 2 or name in ("muse_glimmer", "diffusion_gemma")


SAID = {  # a thought, words before a call and words behind it, as each family would write them
    "qwen3": "<think>hm</think>so{}well<|im_end|>",
    "qwen3_5_think": "hm</think>so{}well<|im_end|>",
    "glm4moe": "<think>hm</think>so{}well<|user|>",
    "gemma4": "<|channel>thought\nhm<channel|>so{}well<turn|>",
    "lfm2_2_5": "<think>hm</think>so{}well<|im_end|>",
    "llama3_1": "{}so\nwell<|eot_id|>",
    "gptoss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>so<|end|><|start|>assistant{}<|start|>assistant<|channel|>final<|message|>well"
    "<|return|>",
    "muse_glimmer": " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>so<|eom|>"
    "<|start|>assistant{}<|start|>assistant to=user<|message|>well<|eot|>",
}


@pytest.mark.parametrize("name", SAID)
def test_what_stands_around_a_call_reaches_the_reward(name):
    tokenizer = tokenizer_for(TEMPLATES[name])
    calls = [as_call("look_up", {"word": "7", "count": 7})]
    text = tokenizer.decode(turns.turn_with(calls, tokenizer, {})[1])
    text = text.rpartition("</think>")[2].replace("<|im_end|>", "").replace("<|eot_id|>", "")
    text = text.removesuffix("<|tool_response>").strip("\n")
    sampler = TurnSampler(Nothing(), tokenizer, [look_up], stop_token_ids=[1])
    ids = tokenizer(SAID[name].format(text)).input_ids
    message = sampler.read(ids, [], sampler.tools.schemas)
    assert message["content"] == "so\nwell" and message["tool_calls"] == calls
    thought = message.get("thinking") or message.get("reasoning_content")
    assert thought == (None if name == "llama3_1" else "hm")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tool_is_called_and_the_conversation_goes_on_as_the_template_writes_it(name):
    "The replay is the template's own rendering of the call, the answer and the question."
    tokenizer = tokenizer_for(TEMPLATES[name])
    asked = [{"role": "user", "content": "q"}]
    called = turns.as_message("", [as_call("look_up", {"word": "7", "count": 7})])
    replied = {"role": "tool", "name": "look_up", "content": "7 of 7"}
    sampler = TurnSampler(Recites(None), tokenizer, [look_up], stop_token_ids=[1])
    given = {"tools": sampler.tools.schemas}
    prompt = rendered(asked, tokenizer, given, True)
    whole = rendered([*asked, called, replied], tokenizer, given, True)
    _, turn = turns.turn_with(called["tool_calls"], tokenizer, {})
    if name == "glm4moe":
        turn = [*turn, tokenizer.convert_tokens_to_ids("<|observation|>")]
    turn = turn[: len(turn) - turn[::-1].index(sampler.end)]
    sampler.sampler.say = lambda ids: turn if ids == prompt else [tokenizer.eos_token_id]
    rollout = sampler.generate([prompt], SamplingParams(max_tokens=1000))
    assert (rollout.calls, rollout.failures) == ([1], [0])
    assert rollout.messages[0][1] == replied
    suffix = completion(rollout, 0)[len(turn) : -1]
    assert whole[-len(suffix) :] == suffix and "7 of 7" in tokenizer.decode(suffix)
    assert whole[-len(suffix) - 1] == turn[-1] == sampler.end


KINDS = [["integer"], ["number"], ["boolean"], ["null"], ["object"], ["array"], ["string"], []]
KINDS += [["integer", "null"], ["number", "string"], ["boolean", "integer"]]
TEXTS = ["7", "-2.5", "3.0", "true", "1", "null", "None", '{"a": [1]}', "[]", "seven", "", " 7 "]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_types_are_those_of_transformers(kinds):
    from transformers.utils.chat_parsing.response_parser import _coerce

    ours, theirs = ([read(t, tuple(kinds)) for t in TEXTS] for read in (turns.typed, _coerce))
    assert list(map(repr, ours)) == list(map(repr, theirs))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(),
        lambda some: st.lists(some) | st.dictionaries(st.text(), some),
        max_leaves=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_values_are_read_as_json_and_python_write_them(value):
    for text in (json.dumps(value), repr(value)):
        assert json.loads(turns.as_json(text)) == value


# what the template adds


def template_of_trl(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


@pytest.mark.parametrize(
    "name, eos, end",
    [
        ("qwen3", "<|im_end|>", "<|im_end|>"),
        ("qwen2_5", "<|im_end|>", "<|im_end|>"),
        ("gptoss", "<|return|>", "<|call|>"),
        ("llama3_1", "<|eot_id|>", "<|eot_id|>"),
    ],
)
def test_the_suffix_is_what_trl_adds_and_what_the_families_write(name, eos, end):
    from trl.chat_template_utils import (
        get_training_chat_template,
        is_chat_template_prefix_preserving,
    )
    from trl.trainer.grpo_trainer import GRPOTrainer as Theirs

    tokenizer = letters(template_of_trl(name), eos)
    replies = [{"role": "tool", "name": "times", "content": "42"}]
    own = suffix_ids(replies, tokenizer)
    asked = {"role": "user", "content": "What is 6*7?"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    whole = tokenizer.decode(rendered([asked, called, *replies], tokenizer, {}, True))
    written = whole.rpartition("}" if name != "gptoss" else '{"a": 6, "b": 7}')[2]
    assert tokenizer.decode(own) == written.partition(end)[2] and "42" in written
    theirs = SimpleNamespace(
        _is_vlm=False, _tokenizer=tokenizer, processing_class=tokenizer, chat_template_kwargs={}
    )
    preserving = is_chat_template_prefix_preserving(tokenizer)
    theirs.chat_template = None if preserving else get_training_chat_template(tokenizer)
    assert own == Theirs._get_tool_suffix_ids(theirs, replies)


@pytest.mark.parametrize(
    "template, words",
    [
        (TEMPLATE.replace("<|end|>", "."), "ends the turn of a call with no special token"),
        (
            TEMPLATE.split("{% if add")[0].replace("<|end|>{% endfor %}", "{% endfor %}<|end|>"),
            "nothing",
        ),
        (TEMPLATE.replace("{{ m.content }}", ""), "does not write what a tool answered"),
        (TEMPLATE.split("{% endif %}", 1)[1], "does not mention the tools"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(template, words):
    with pytest.raises(ValueError, match=words):
        TurnSampler(Recites(None), letters(template), [times], stop_token_ids=[1])


# running the tools


def test_with_a_deadline_calls_of_one_row_run_in_order_and_rows_side_by_side():
    seen, both = [], threading.Barrier(2, timeout=5)

    def note(i: int):
        if i == 0:
            both.wait()  # passes only while the other row runs, too
        seen.append(i)
        return i

    calls = [[as_call("note", {"i": i}) for i in range(5)]] * 2
    results = run_calls(calls, [{"note": note}] * 2, 10.0, event_loop())
    assert [[m["content"] for m, *_ in row] for row in results] == [list("01234")] * 2
    assert sorted(seen) == sorted([*range(5)] * 2)


def test_errors_late_answers_and_async_tools_are_texts():
    hangs = threading.Event()
    tools = {"times": times, "later": later, "fails": fails, "hangs": hangs.wait}
    tools["leaves"] = lambda: exit(3)
    names = ["later", "later", "fails", "leaves", "nobody", "times", "hangs", "times"]
    calls = [as_call(n, {"word": "hi"} if n == "later" else {}) for n in names]
    began = time.perf_counter()
    (row,) = run_calls([calls], [tools], 0.3, event_loop())
    assert time.perf_counter() - began < 3
    texts = [m["content"] for m, *_ in row]
    assert texts[:5] == ["hi", "hi", "{'error': 'no'}", "{'error': '3'}", texts[4]]
    assert "Tool nobody not found" in texts[4] and "missing 2 required" in texts[5]
    assert "no answer after 0.3 seconds" in texts[6] and texts[7] == texts[6]
    assert [failed for _, failed, _ in row] == [False] * 2 + [True] * 6
    assert [late for *_, late in row] == [False] * 6 + [True] * 2
    hangs.set()


def test_plain_tools_run_here_and_in_order_and_async_ones_behind_them():
    seen, here = [], threading.current_thread()

    def plain(i: int):
        seen.append((i, threading.current_thread() is here))
        return i

    async def waits(i: int):
        both.append(i)
        while len(both) < 2:
            await asyncio.sleep(0.001)
        seen.append((i, threading.current_thread() is here))
        return i

    both = []
    calls = [as_call(name, {"i": i}) for i, name in enumerate(["waits", "plain", "waits", "plain"])]
    rows = run_calls(
        [calls, calls[1:2]], [{"plain": plain, "waits": waits}] * 2, None, event_loop()
    )
    assert [[m["content"] for m, *_ in row] for row in rows] == [list("0123"), ["1"]]
    plainly = [one for one in seen if one[1]]
    assert plainly == [(1, True), (3, True), (1, True)]
    assert sorted(one for one in seen if not one[1]) == [(0, False), (2, False)]
    assert seen.index((0, False)) > 1 and seen.index((2, False)) > 1
    with pytest.raises(KeyboardInterrupt):
        run_calls([calls[1:2]], [{"plain": interrupted}], None, event_loop())


def interrupted(i):
    raise KeyboardInterrupt


def test_a_tool_that_takes_long_is_named_once():
    async def sleeps() -> str:
        "Sleep."
        await asyncio.sleep(0.3)
        return "x"

    def naps() -> str:
        "Nap."
        time.sleep(0.3)
        return "x"

    for tool, name in ((naps, "naps"), (sleeps, "sleeps"), (times, None)):
        tokenizer = letters()
        call = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{}}}}</tool_call>'
        say = in_texts(tokenizer, lambda text, call=call: "ok" if "<|start|>t" in text else call)
        sampler = TurnSampler(say, tokenizer, [tool], stop_token_ids=[1])
        sampler.long_s = 0.05
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sampler.generate([[5], [6]], SamplingParams(max_tokens=300))
        told = [str(one.message) for one in told if "has been running" in str(one.message)]
        assert len(told) == (name is not None)
        assert not told or f"the tool {name} has" in told[0] and "tool_timeout_s=N" in told[0]
        sampler.close()


def test_one_error_of_all_calls_of_a_batch_is_said_once():
    tokenizer = letters()
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    names = {5: "fails", 6: "fails", 7: "later"}
    sampler = TurnSampler(
        Recites(lambda ids: tokenizer(call % names[ids[0]] + "<|end|>").input_ids),
        tokenizer,
        [fails, later],
        stop_token_ids=[1],
        max_tool_calling_iterations=2,
    )

    def told(*rows):
        with warnings.catch_warnings(record=True) as all_of_them:
            warnings.simplefilter("always")
            sampler.generate([[row] for row in rows], SamplingParams(max_tokens=2000))
        # loops of other tests may be collected in between
        return [str(one.message) for one in all_of_them if one.category is not ResourceWarning]

    assert told(5, 7) == []  # two errors
    (one,) = told(5, 6)
    assert "all 4 calls of tools in this batch ended in the same error, {'error': 'no'}" in one
    assert told(5, 6) == []


def test_tools_that_cannot_be_described_are_refused():
    with pytest.raises(ValueError, match="tools holds len, which cannot be described"):
        tool_schemas([len])
    with pytest.raises(ValueError, match="two tools have the name 'times'"):
        toolset([times, times])


# the loop


def always(name, **arguments):
    "A parser for which every turn is a call."
    return lambda *_: {"role": "assistant", "content": "", "tool_calls": [as_call(name, arguments)]}


@pytest.mark.parametrize("seed, cut", [(0, {}), (1, {}), (2, {}), (3, dict(top_k=4, top_p=0.9))])
def test_log_probs_of_three_turns_are_those_of_one_pass(seed, cut):
    model, _ = small_model(seed, characters="".join(map(chr, range(32, 127))) + "\n")
    tokenizer = letters()
    model.resize_token_embeddings(len(tokenizer))
    sampler = TurnSampler(
        RolloutEngine(model, tokenizer),
        tokenizer,
        [later],
        max_tool_calling_iterations=2,
        parser=always("later", word="4 2"),
        stop_token_ids=list(range(10, 60)),
    )
    prompts = [tokenizer(text).input_ids for text in ("12", "1+2+3=", "7")]
    rollout = sampler.generate(prompts, SamplingParams(max_tokens=80, n=4, seed=seed, **cut))
    assert (rollout.survivors is not None) == bool(cut)
    assert isinstance(sampler, Sampler) and set(rollout.calls) == {2}
    assert rollout.versions.tolist() == [0] * 12
    for row in range(12):
        ids = rollout.prompt_ids[row] + completion(rollout, row)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits
        size, own = len(rollout.prompt_ids[row]), rollout.written[row][rollout.mask[row]]
        left = rollout.survivors[row][rollout.mask[row]] if cut else None
        one_pass = selective_log_softmax(
            logits[0, size - 1 : -1], torch.tensor(ids[size:]), survivors=left
        )
        kept = rollout.logps[row][rollout.mask[row]]
        torch.testing.assert_close(kept[own], one_pass[own], rtol=1e-5, atol=1e-5)
        assert kept[~own].isnan().all() and 0 < own.sum() < len(own)


def test_every_turn_draws_random_numbers_of_its_own():
    model, tokenizer = small_model(0, initializer_range=1e-4)
    tokenizer.chat_template = TEMPLATE
    seeds = []

    class Noted(RolloutEngine):
        def generate(self, prompts, params):
            seeds.append(params.seed)
            return super().generate(prompts, params)

    sampler = TurnSampler(
        Noted(model, tokenizer),
        tokenizer,
        max_tool_calling_iterations=2,
        parser=always("nobody"),
        stop_token_ids=range(len(tokenizer)),
    )
    first, again = (sampler.generate([[9]], SamplingParams(max_tokens=200, seed=4)) for _ in "12")
    assert seeds[0] == 4 and len(set(seeds[:3])) == 3 and seeds[:3] == seeds[3:]
    assert completion(first, 0) == completion(again, 0)


ENDS, STARTS = ("<|end|>", "<|im_end|>", "<|eot_id|>"), ("<|start|>", "<|im_start|>", "")
WORDS = st.text("abc 019\n", max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    end=st.sampled_from(ENDS),
    start=st.sampled_from(STARTS),
    frame=st.tuples(WORDS, WORDS, st.text(" \n", max_size=2)),
    answers=st.lists(st.text("xyz<|end>\n", max_size=8) | st.none(), min_size=1, max_size=4),
    script=st.lists(
        st.tuples(st.lists(st.integers(20, 60), max_size=9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    max_tokens=st.integers(1, 90),
    limit=st.none() | st.integers(0, 3),
)
def test_a_transcript_is_what_was_drawn_and_what_the_template_adds(
    end, start, frame, answers, script, max_tokens, limit
):
    """Over random templates, answers of tools (None: the tool fails) and stop points: tokens and
    owners of a row are those of a replay by hand, whatever the tokens spell."""
    before, middle, after = frame
    # as expressions, since Jinja drops a line's end behind a tag
    s, h, m, e, a = (
        "{{ " + json.dumps(text) + " }}" for text in (start, before, middle, end, after)
    )
    template = (
        "{% for m in messages %}" + s + h + "{{ m.role[0] }}" + m + "{{ m.content }}"
        "{% for c in m.tool_calls or [] %}CALL{% endfor %}" + e + a + "{% endfor %}"
        "{% if add_generation_prompt %}" + s + h + "a" + m + "{% endif %}"
    )
    tokenizer = letters(template)
    (stop,) = tokenizer(end).input_ids
    drawn, given_to, replies = [], [], cycle(answers)

    def say(ids):
        body, ends, _ = script[len(drawn) % len(script)]
        given_to.append(ids)
        drawn.append((body + [stop] * ends)[:max_tokens] or [20])
        return drawn[-1]

    def parse(ids, *_):
        _, _, calls = script[(len(drawn) - 1) % len(script)]
        return {"content": "", "tool_calls": [as_call("tool", {})] * calls}

    contents = []

    def tool():
        text = next(replies)
        contents.append("{'error': 'no'}" if text is None else text)
        if text is None:
            raise ValueError("no")
        return text

    sampler = TurnSampler(
        Recites(say),
        tokenizer,
        stop_token_ids=[stop],
        parser=parse,
        max_tool_calling_iterations=limit,
    )
    tools = turns.Toolset({"tool": tool})
    if end in "".join(a or "" for a in answers):
        return  # a tool that writes the end token is another test
    rollout = sampler.generate([[5, 6]], SamplingParams(max_tokens=max_tokens), [tools])

    ids, own, said = [], [], []
    for turn, its in enumerate(drawn):
        room = max_tokens - len(ids)
        assert given_to[turn] == [5, 6] + ids
        ids, own = ids + its[:room], own + [True] * len(its[:room])
        said.append("assistant")
        calls = script[turn % len(script)][2]
        if not calls or its[:room][-1] != stop or (limit is not None and turn >= limit):
            assert turn == len(drawn) - 1
            break
        text = contents[turn]
        suffix = f"{after}{start}{before}t{middle}{text}{end}{after}{start}{before}a{middle}"
        suffix = tokenizer(suffix).input_ids
        if len(ids) + len(suffix) > max_tokens:
            assert turn == len(drawn) - 1
            break
        ids, own, said = ids + suffix, own + [False] * len(suffix), [*said, "tool"]
    assert completion(rollout, 0) == ids and len(ids) <= max_tokens
    assert rollout.written[0][rollout.mask[0]].tolist() == own
    assert [m["role"] for m in rollout.messages[0]] == said
    assert rollout.calls == [len(contents)]
    wanted = [-(2 + t) / 1000 for t, o in enumerate(own) if o]
    kept = [x for x, o in zip(rollout.logps[0].tolist(), own) if o]
    assert kept == pytest.approx(wanted, abs=1e-6)


def test_a_tool_that_writes_the_end_of_a_turn_moves_no_owner():
    tokenizer = letters()
    text = "1<|end|><|start|>a<|message|>2"
    suffix = suffix_ids([{"role": "tool", "name": "x", "content": text}], tokenizer)
    framed = f"<|start|>t<|message|>{text}<|end|><|start|>a<|message|>"
    assert suffix == tokenizer(framed).input_ids


def test_rows_leave_when_they_make_no_call_and_n_completions_stand_side_by_side():
    tokenizer = letters()

    def say(text):
        return HERMES if "call" in text and text.count("<|start|>t") < 2 else "done"

    inner = in_texts(tokenizer, say)
    sampler = TurnSampler(inner, tokenizer, [times], stop_token_ids=[1])
    prompts = [tokenizer(text).input_ids for text in ("call", "greet")]
    rollout = sampler.generate(prompts, SamplingParams(max_tokens=400, n=2))
    assert inner.asked == [4, 2, 2] and rollout.calls == [2, 2, 0, 0]
    assert rollout.prompt_ids == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [len(m) for m in rollout.messages] == [5, 5, 1, 1]
    assert rollout.messages[0][1] == {"role": "tool", "name": "times", "content": "42"}
    sampler.publish(None, 3)
    sampler.close()
    assert inner.version == 3 and inner.closed


def test_the_loop_does_what_trls_does():
    "The same scripted model, tools and response template, through TRL's own loop."
    trl = pytest.importorskip("trl")
    from trl.chat_template_utils import add_response_schema, parse_response

    tokenizer = add_response_schema(letters(template_of_trl("qwen3"), "<|im_end|>"))
    tokenizer.chat_template = template_of_trl("qwen3_training")
    fail, unknown = HERMES.replace("times", "fails").replace('"a": 6, "b": 7', ""), "nobody"
    unknown = HERMES.replace("times", unknown)
    scripts = {  # the prompt's last letter -> its turns
        "A": ["42"],
        "B": [HERMES, "42"],
        "C": [HERMES + "\n" + HERMES, fail, unknown, HERMES, "x"],
        "D": [HERMES[:-3]],
        "E": ["x" * 900],
        "F": [HERMES, "x" * 900],
        "G": [HERMES, HERMES, HERMES, "42"],
    }

    def say(ids):
        text = tokenizer.decode(ids)
        turn = text.count("<tool_response>") - text.count("</tool_response>\n<tool_response>")
        return tokenizer(scripts[text[0]][turn] + "<|im_end|>").input_ids

    prompts = [tokenizer(letter + "<|im_start|>assistant\n").input_ids for letter in scripts]
    limit, room = 3, 700
    own = TurnSampler(
        Recites(say),
        tokenizer,
        [times, fails],
        stop_token_ids=[],
        max_tool_calling_iterations=limit,
    ).generate(prompts, SamplingParams(max_tokens=room))

    drawn = [say(ids)[:room] for ids in prompts]
    tools = {"times": times, "fails": fails}
    theirs = SimpleNamespace(
        _is_vlm=False,
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        chat_template_kwargs={},
        chat_template=None,
        use_vllm=False,
        vllm_mode=None,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        max_tool_calling_iterations=limit,
        max_completion_length=room,
        environment_factories=None,
        tools=list(tools.values()),
        _sync_tool_dicts=[tools] * len(prompts),
        _async_tool_dicts=[{}] * len(prompts),
        _generate_single_turn=lambda ids, *_, **__: ([say(row)[:room] for row in ids], None),
    )
    theirs._get_tool_suffix_ids = lambda messages: trl.GRPOTrainer._get_tool_suffix_ids(
        theirs, messages
    )
    messages = [
        [parse_response(tokenizer, ids, prefix=before, tools=theirs.tools)]
        for ids, before in zip(drawn, prompts)
    ]
    mask, messages, ids, _, calls, failures, _ = trl.GRPOTrainer._tool_call_loop(
        theirs, [[] for _ in prompts], prompts, drawn, messages, None, None, {}
    )
    for row in range(len(prompts)):
        assert completion(own, row) == ids[row]
        assert own.written[row][own.mask[row]].int().tolist() == mask[row]
        assert own.messages[row] == messages[row]
    assert (sum(own.calls), sum(own.failures)) == (calls, failures) and failures == 2


# environments


class Door:
    "An environment with a state."

    made, closed = [], []

    def __init__(self):
        self.made.append(self)

    def reset(self, key=None, **row):
        self.key, self.open = key, False
        return None if key is None else f" The key is {key}."

    def turn(self, key: str) -> bool:
        """
        Turn a key.

        Args:
            key: which one
        """
        self.open = key == self.key
        return self.open

    def get_reward(self):
        return float(self.open)

    def close(self):
        self.closed.append(self)

    def _hidden(self):
        pass


class Quiet:
    def reset(self, **row):
        self.row = row


class Alone:
    def reset(self):
        return "Say something."


def test_environments_are_made_once_reset_often_and_closed_on_every_way_out():
    Door.made.clear(), Door.closed.clear()
    rows = [{"prompt": [{"role": "user", "content": "Open."}], "key": k} for k in ("a", "b")]
    environments = Environments(Door, [times])
    with pytest.raises(KeyboardInterrupt), environments:
        with environments:
            first = begin(rows, toolset([]), environments)
            assert begin(rows[:1], toolset([]), environments).environments == [Door.made[0]]
        assert len(Door.made) == 2 and not Door.closed  # the outer block is still open
        raise KeyboardInterrupt
    assert sorted(map(id, Door.closed)) == sorted(map(id, Door.made))
    assert [p[-1]["content"] for p in first.prompts] == [
        "Open. The key is a.",
        "Open. The key is b.",
    ]
    assert rows[0]["prompt"][-1]["content"] == "Open."
    assert list(first.tools[0].functions) == ["times", "turn"]
    with environments:
        begin(rows, toolset([]), environments)
        environments.drop(Door.made[2])
        assert Door.made[2] in Door.closed
        assert Door.made[2] not in environments.take(rows)


def test_a_column_chooses_the_environment():
    environments = Environments({"door": Door, "quiet": Quiet, "another door": Door})
    prompt = [{"role": "user", "content": "Go."}]
    rows = [{"prompt": prompt, "environment": name, "x": 1} for name in ("quiet", "door", "quiet")]
    started = begin(rows, toolset([]), environments)
    assert [type(e) for e in started.environments] == [Quiet, Door, Quiet]
    assert started.environments[0] is not started.environments[2]
    assert started.environments[0].row == {"prompt": prompt, "x": 1}
    assert [list(t.functions) for t in started.tools] == [[], ["turn"], []]
    (reward,) = environments.rewards()
    assert reward.__name__ == "Door" and reward(environments=started.environments) == [
        None,
        0.0,
        None,
    ]
    with pytest.raises(
        ValueError, match="environment='none', which is not among the environments.*'door'"
    ):
        environments.take([{"environment": "none"}])
    with pytest.raises(ValueError, match="made int, which has no method reset"):
        Environments(int)
    with pytest.raises(ValueError, match="prompt is the string 'hi'"):
        begin([{"prompt": "hi"}], toolset([]), None)


def test_calls_reach_the_environment_of_their_own_row():
    tokenizer = letters()
    call = '<tool_call>{"name": "turn", "arguments": {"key": "a"}}</tool_call>'
    inner = in_texts(tokenizer, lambda text: "ok" if "<|start|>t" in text else call)
    environments = Environments(Door)
    rows = [{"prompt": [{"role": "user", "content": "q"}], "key": k} for k in ("a", "b", "a")]
    started = begin(rows, toolset([]), environments)
    sampler = TurnSampler(inner, tokenizer, stop_token_ids=[1], environments=environments)
    prompts = [rendered(p, tokenizer, {}, True) for p in started.prompts]
    rollout = sampler.generate(prompts, SamplingParams(max_tokens=400), started.tools)
    assert [m[1]["content"] for m in rollout.messages] == ["True", "False", "True"]
    assert environments.rewards()[0](environments=started.environments) == [1.0, 0.0, 1.0]


# in a run


def question(text, **columns):
    return {"prompt": [{"role": "user", "content": text}], **columns}


def agent(folder, reward_funcs=None, *, arguments, rows=None, **changes):
    "A small trainer whose model calls a tool in every turn that begins with an odd token."
    model, _ = small_model(0)
    tokenizer = letters()
    model.resize_token_embeddings(len(tokenizer))
    rows = [question(str(n), key=str(n % 2)) for n in range(8)] if rows is None else rows
    config = dict(
        generation_kwargs={"eos_token_id": list(range(10, 60))},
        max_completion_length=60,
        max_tool_calling_iterations=2,
        **changes,
    )
    trainer = small_trainer(
        folder,
        reward_funcs,
        model=model,
        tokenizer=tokenizer,
        rows=rows or None,
        arguments=arguments,
        **config,
    )
    name = "turn" if "environment_factory" in arguments else "times"
    given_ = {"key": "1"} if name == "turn" else {"a": 6, "b": 7}

    def parse(ids, *_):
        calls = [as_call(name, given_)] if ids[0] % 2 else []
        return {"content": tokenizer.decode(ids), "tool_calls": calls}

    trainer.sampler.parser = parse
    return trainer


def length(completions, **columns):
    "The number of the answer's characters, a tenth each."
    return [len(messages[-1]["content"]) / 10 for messages in completions]


def test_a_function_that_draws_cannot_come_later_beside_tools(tmp_path):
    trainer = agent(tmp_path, length, arguments=dict(tools=[times]), max_steps=1)
    with pytest.raises(ValueError, match="rollout_func draws whole completions"):
        trainer.rollout_func = print
    assert trainer.rollout_func is None


@pytest.mark.parametrize("cut", [{}, dict(top_k=5)], ids=str)
def test_a_run_with_tools_learns_from_the_models_own_tokens(tmp_path, cut):
    seen = []

    def reward(completions, completion_ids, key, **columns):
        seen.append((completions, completion_ids, key))
        return length(completions)

    trainer = agent(tmp_path, reward, arguments=dict(tools=[times]), max_steps=1, **cut)
    assert isinstance(trainer.sampler, TurnSampler) and trainer.tools == [times]
    batches = remember_batches(trainer)
    trainer.train()
    (batch,), (record,) = batches, trainer.log_history
    completions, ids, keys = seen[0]
    called = [messages for messages in completions if len(messages) > 1]
    assert called and len(keys) == 16
    for messages in called:
        assert messages[0]["tool_calls"] == [as_call("times", {"a": 6, "b": 7})]
        assert messages[1] == {"role": "tool", "name": "times", "content": "42"}
    frame = len(suffix_ids([{"role": "tool", "name": "times", "content": "42"}], letters()))
    replies = sorted(frame * sum(m["role"] == "tool" for m in messages) for messages in completions)
    assert replies == sorted((batch.completion_mask & ~batch.loss_mask).sum(-1).tolist())
    assert sorted(map(len, ids)) == sorted(batch.completion_mask.sum(-1).tolist())
    calls = sum(m["role"] == "tool" for messages in completions for m in messages)
    assert record["tools/call_frequency"] >= calls / 16 > 0
    assert record["tools/failure_frequency"] == 0 and record["sampling/gap_mean"] < 1e-5
    assert record["grad_norm"] > 0 and "times(" in str(trainer.samples)
    found = trainer.evaluate([question("1", key="0")])
    assert found["eval_tools/call_frequency"] >= 0 and "eval_reward" in found


def test_a_run_with_tools_goes_on_with_the_same_bits(tmp_path):
    def run(folder, resume=None, **changes):
        trainer = agent(folder, length, arguments=dict(tools=[times]), save_steps=1, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return weights_of(trainer.model)

    settings = dict(save_strategy="steps", gradient_accumulation_steps=1, steps_per_generation=2)
    whole = run(tmp_path / "a", max_steps=3, **settings)
    run(tmp_path / "b", max_steps=3, **settings)
    resumed = run(tmp_path / "b", str(tmp_path / "b/checkpoint-1"), max_steps=3, **settings)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_run_in_an_environment(tmp_path):
    Door.made.clear(), Door.closed.clear()
    seen = []

    def bonus(prompts, environments, **columns):
        seen.append((prompts, environments))
        return [0.1] * len(environments)

    trainer = agent(
        tmp_path,
        bonus,
        arguments=dict(environment_factory=Door, tools=[times]),
        max_steps=2,
        reward_weights=[2.0],
    )
    assert trainer.reward_names == ["bonus", "Door"] and trainer.config.reward_weights == [2.0, 1.0]
    trainer.train()
    prompts, environments = seen[0]
    assert len(set(map(id, environments))) == 16 == len(Door.made) == len(Door.closed)
    assert all(
        p[-1]["content"].endswith(f" The key is {e.key}.") for p, e in zip(prompts, environments)
    )
    record = trainer.log_history[-1]
    assert 0 < record["rewards/Door/mean"] < 1 and record["tools/call_frequency"] > 0
    assert record["reward"] == pytest.approx(0.2 + record["rewards/Door/mean"])
    trainer.evaluate([question("1", key="1")])
    assert len(Door.closed) == len(Door.made) == 16 + trainer.config.used("num_generations_eval")


def test_an_environment_that_seeds_moves_nothing_of_the_run(tmp_path):
    class Seeds(Door):
        def reset(self, key=None, **row):
            torch.manual_seed(0)
            return super().reset(key)

        def turn(self, key: str) -> bool:
            """
            Turn a key.

            Args:
                key: which one
            """
            torch.manual_seed(1)
            return super().turn(key)

    Seeds.__name__, found = "Door", []
    for number, made in enumerate((Door, Seeds)):
        given = dict(environment_factory=made)
        trainer = agent(tmp_path / str(number), length, arguments=given, max_steps=3)
        trainer.train()
        drawn = [sample["completion"] for sample in trainer.samples]
        found.append((drawn, weights_of(trainer.model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_environments_are_closed_when_a_run_fails(tmp_path):
    Door.made.clear(), Door.closed.clear()

    def fails(**columns):
        raise OSError("full")

    trainer = agent(tmp_path, fails, arguments=dict(environment_factory=Door))
    with pytest.raises(Exception, match="full"):
        trainer.train()
    assert len(Door.made) == len(Door.closed) == 16


def test_an_environment_may_own_the_data_and_the_reward(tmp_path):
    class Own(Door):
        def reset(self, **row):
            super().reset(key="1")
            return "Open the door."

    trainer = agent(tmp_path, arguments=dict(environment_factory=Own), rows=[], max_steps=1)
    trainer.train()
    assert trainer.reward_names == ["Own"] and trainer.log_history[0]["rewards/Own/mean"] > 0
    assert trainer.samples[0]["prompt"] == "user: Open the door."
    assert trainer.reward_weights.tolist() == [1.0]
    with pytest.raises(ValueError, match="have no end.*set max_steps"):
        agent(tmp_path, arguments=dict(environment_factory=Own), rows=[], max_steps=-1)
    with pytest.raises(ValueError, match="requires a `train_dataset` that has this column"):
        agent(tmp_path, arguments=dict(environment_factory={"own": Own}), rows=[], max_steps=1)


def test_rows_may_only_choose_the_environment(tmp_path):
    rows = [{"environment": name} for name in ("door", "alone", "door", "alone")]
    arguments = dict(environment_factory={"door": Door, "alone": Alone}, tools=[times])
    trainer = agent(
        tmp_path, length, arguments=arguments, rows=rows, reward_weights=[0.5], max_steps=1
    )
    assert trainer.train_dataset[0]["prompt"] == [{"role": "user", "content": ""}]
    assert trainer.reward_func_names == ["length", "Door"]
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert [tool.__name__ for tool in trainer.tools] == ["times", "turn"]
    trainer.train()  # `reset` of Alone takes nothing, so it is given no prompt
    assert {sample["prompt"] for sample in trainer.samples} == {"user: ", "user: Say something."}


def test_string_prompts_are_refused_with_tools(tmp_path):
    trainer = agent(tmp_path, length, arguments=dict(tools=[times]), rows=[{"prompt": "1+1="}] * 4)
    with pytest.raises(ValueError, match="prompt is the string '1\\+1='"):
        trainer.train()
