"""gpt-oss' prompts, calls and channels, token by token, as openai-harmony writes and reads them."""

import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
from gpt_oss_tokenizer import gpt_oss_tokenizer, harmony_encoding
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
)
from tool_templates import Nothing, look_up, shipped

from grpo_nb.environments.matmul import NAIVE, matmul_problems
from grpo_nb.rollout.rollout import turn_closer
from grpo_nb.rollout.sampler import drawn_elsewhere
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.rollout.turns import TurnSampler, as_call, tool_schemas
from grpo_nb.training.data import prompt_token_ids

FUNCTION = tool_schemas([look_up])[0]["function"]
ASKED = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What is naïve about 'x' in 北京?"},
]


@pytest.fixture(scope="module")
def encoding(tmp_path_factory):
    return harmony_encoding(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def tokenizer(encoding):
    return gpt_oss_tokenizer(encoding, shipped()["gptoss"])


def before(tools=True, effort=ReasoningEffort.MEDIUM):
    "System, developer and user of a conversation."
    system = SystemContent.new().with_reasoning_effort(effort)
    system = system.with_conversation_start_date(datetime.now().strftime("%Y-%m-%d"))
    end = "" if tools else "\n\n"  # which OpenAI's template has, and the package has not
    developer = DeveloperContent.new().with_instructions(ASKED[0]["content"] + end)
    if tools:
        names = FUNCTION["name"], FUNCTION["description"]
        tool = ToolDescription.new(*names, parameters=FUNCTION["parameters"])
        developer = developer.with_function_tools([tool])
    return [
        Message.from_role_and_content(Role.SYSTEM, system),
        Message.from_role_and_content(Role.DEVELOPER, developer),
        Message.from_role_and_content(Role.USER, ASKED[1]["content"]),
    ]


def said(text, channel, to=None):
    "One of the messages of an assistant's turn."
    message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
    return (
        message if to is None else message.with_recipient(to).with_content_type("<|constrain|>json")
    )


def prompt_of(encoding, messages):
    conversation = Conversation.from_messages(messages)
    return encoding.render_conversation_for_completion(conversation, Role.ASSISTANT)


def drawn(encoding, messages):
    "The tokens that a model draws for these messages, behind `<|start|>assistant`."
    whole = RenderConversationConfig(auto_drop_analysis=False)
    ids = encoding.render_conversation(Conversation.from_messages(messages), whole)
    start = encoding.encode("<|start|>assistant", allowed_special="all")
    assert ids[: len(start)] == start
    last = encoding.encode("<|end|>", allowed_special="all")
    ends = encoding.encode("<|return|>", allowed_special="all")
    return ids[len(start) : -1] + (ends if ids[-1:] == last else ids[-1:])


def test_the_tokenizer_is_gpt_oss_own(encoding, tokenizer):
    texts = [
        Path(__file__).read_text(),
        "naïve 北京 🎉 don't WON'T 12345 \r\n\t x  y ",
        "<|start|>a",
    ]
    for text in texts:
        assert tokenizer(text).input_ids == encoding.encode(text, allowed_special="all")
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("named", [(), ("<|return|>",), ("<|return|>", "<|call|>")])
def test_a_turn_ends_where_harmony_says_and_not_with_a_message(encoding, tokenizer, named):
    "`<|end|>` ends a thought, and the template writes it after an answer of the past too."
    stops = encoding.stop_tokens_for_assistant_actions()
    closer = turn_closer(tokenizer, [tokenizer.convert_tokens_to_ids(one) for one in named])
    assert closer is None or closer in stops


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_prompts_are_harmonys(encoding, tokenizer, tools, effort):
    variables = {"reasoning_effort": effort} | ({"tools": tool_schemas([look_up])} if tools else {})
    ours = prompt_token_ids(ASKED, tokenizer, variables)
    theirs = prompt_of(encoding, before(tools, ReasoningEffort[effort.upper()]))
    assert tokenizer.decode(ours) == tokenizer.decode(theirs) and ours == theirs


ARGUMENTS = {"word": "7", "count": 7}
CALL = json.dumps(ARGUMENTS)
TURNS = {
    "final": [said("It is 7.", "final")],
    "analysis, final": [said("Hm.\n\nWell.", "analysis"), said("7", "final")],
    "call": [said(CALL, "commentary", "functions.look_up")],
    "analysis, call": [said("I look.", "analysis"), said(CALL, "commentary", "functions.look_up")],
    "preamble, call": [
        said("Hm.", "analysis"),
        said("I shall look it up.", "commentary"),
        said(CALL, "commentary", "functions.look_up"),
    ],
    "two thoughts": [said("a", "analysis"), said("b", "analysis"), said("c", "final")],
}


def as_ours(messages):
    "What openai-harmony has read, as a chat message."
    texts = {"thinking": [], "content": []}
    calls = []
    for message in messages:
        text = message.content[0].text
        if message.recipient:
            calls.append(as_call(message.recipient.removeprefix("functions."), json.loads(text)))
        else:
            texts["thinking" if message.channel == "analysis" else "content"].append(text)
    texts = {name: "\n".join(each) for name, each in texts.items() if each}
    read = {"role": "assistant", "content": "", **texts}
    return read | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("name", TURNS)
def test_turns_are_read_as_harmony_reads_them(encoding, tokenizer, name):
    ids = drawn(encoding, TURNS[name])
    sampler = TurnSampler(Nothing(), tokenizer, [look_up], stop_token_ids=[200002])
    theirs = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    read = sampler.read(ids, [], sampler.tools.schemas)
    assert read == as_ours(theirs)
    assert len(theirs) == len(TURNS[name]) and ("tool_calls" in read) == ("call" in name)
    assert {sampler.end, *sampler.stop_token_ids} == {*encoding.stop_tokens_for_assistant_actions()}


def test_a_call_as_the_template_writes_it_is_read_as_harmony_reads_it(encoding, tokenizer):
    text = f" to=functions.look_up<|channel|>commentary json<|message|>{CALL}<|call|>"
    ids = tokenizer(text).input_ids
    theirs = encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    sampler = TurnSampler(Nothing(), tokenizer, [look_up], stop_token_ids=[200002])
    assert sampler.read(ids, [], sampler.tools.schemas) == as_ours(theirs)
    assert as_ours(theirs)["tool_calls"] == [as_call("look_up", ARGUMENTS)]


class Draws:
    "A sampler that draws one turn after the other."

    takes_token_ids = True

    def __init__(self, turns):
        self.turns, self.prompts = list(turns), []

    def generate(self, prompts, params):
        self.prompts += [list(prompt) for prompt in prompts]
        ids = [self.turns.pop(0) for _ in prompts]
        output = {"prompt_ids": prompts, "completion_ids": ids}
        output["logprobs"] = [[-1.0] * len(row) for row in ids]
        return drawn_elsewhere(output, len(prompts), params.stop_token_ids)


def test_a_conversation_with_a_tool_is_token_for_token_harmonys(encoding, tokenizer):
    first, last = TURNS["preamble, call"], TURNS["analysis, final"]
    sampler = Draws([drawn(encoding, first), drawn(encoding, last)])
    turns = TurnSampler(sampler, tokenizer, [look_up], stop_token_ids=[200002])
    prompt = prompt_token_ids(ASKED, tokenizer, {"tools": turns.tools.schemas})
    rollout = turns.generate([prompt], SamplingParams(max_tokens=500))
    answer = Message.from_author_and_content(
        Author.new(Role.TOOL, "functions.look_up"),
        json.dumps("7 of 7"),  # the template writes answers as JSON
    )
    answer = answer.with_channel("commentary").with_recipient("assistant")
    assert sampler.prompts[0] == prompt_of(encoding, before())
    whole = prompt_of(encoding, [*before(), *first, answer])
    assert tokenizer.decode(sampler.prompts[1]) == tokenizer.decode(whole)
    assert sampler.prompts[1] == whole
    assert (rollout.calls, rollout.failures, rollout.finish_reasons) == ([1], [0], ["stop"])
    assert rollout.messages[0][-1] == {
        "role": "assistant",
        "content": "7",
        "thinking": "Hm.\n\nWell.",
    }


ROOT = Path(__file__).parents[2]
MARKS = (
    "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|><|return|>"
)


def counts_in(page):
    "The first number of each row of a page's table of tokens."
    cells = json.loads((ROOT / f"nbs/tutorials/{page}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (table,) = [text for text in texts if "gpt-oss' own tokenizer" in text]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def tokens(tokenizer, *messages):
    asked = [{"role": role, "content": text} for role, text in messages]
    return len(prompt_token_ids(asked, tokenizer, {"reasoning_effort": "low"}))


def test_tutorials_show_counts_of_the_real_tokenizer(tokenizer):
    ours = counts_in("02_gpt_oss_20b_t4")
    system = ("system", "Solve the problem. End with the number alone.")
    marks = len(tokenizer(MARKS).input_ids)
    assert tokens(tokenizer, system, ("user", "")) == 84
    assert list(ours.values()) == [84, 106, 18, marks]  # prompts and solutions are GSM8K's
    ours = counts_in("07_matmul_gpt_oss")
    task = matmul_problems(1, size=48)[0]["prompt"][0]["content"]
    assert ours["the template, without the task"] == tokens(tokenizer, ("user", ""))
    # the list of modules is the one of the Python that the page was stored with
    if sys.version_info[:2] == (3, 11):
        assert ours["the prompt, template and task"] == tokens(tokenizer, ("user", task))
    assert ours["the marks of both channels and the end"] == marks
    block = f"```python\n{NAIVE}\n```"
    assert ours["three loops, in its block"] == len(tokenizer(block).input_ids)
