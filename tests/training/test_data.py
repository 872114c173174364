"training.data against transformers' chat templates and the helpers of TRL 1.16."

from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from trl.data_utils import apply_chat_template
from trl.data_utils import is_conversational as trl_is_conversational

from grpo_nb.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
from grpo_nb.training.data import (
    check_columns,
    check_dataset,
    check_evaluation_data,
    check_long_prompts,
    check_prompt_lengths,
    completion_as_given,
    is_conversational,
    many_prompt_token_ids,
    prompt_token_ids,
    reward_columns,
    template_kwargs,
    unread_settings,
    unread_variables,
)

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '=' + m['content'] }}{% if not "
    "(loop.last and continue_final_message) %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant=' }}{% if effort is defined %}{{ "
    "effort }}{% endif %}{% endif %}"
)
WITH_START = "{{ bos_token }}" + CHAT_TEMPLATE


def make_tokenizer(template, starts=False):
    "The tiny tokenizer with another template; `starts`: it begins every text with a special token."
    tokenizer = tiny_tokenizer("0123456789+-*= abcdefghijklmnopqrstuvwxyz")
    tokenizer.chat_template = template
    if starts:
        tokenizer.bos_token = "<|endoftext|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A",
            special_tokens=[("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))],
        )
    return tokenizer


TOKENIZERS = {
    "tiny": make_tokenizer(CHAT_TEMPLATE),
    "chatml": make_tokenizer(CHATML),
    "starting": make_tokenizer(WITH_START, starts=True),
}
TEXT = st.text("0123456789+-*=", min_size=1, max_size=6)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}
    ),
    max_size=3,
)
PROMPTS = TEXT | st.builds(
    lambda turns, last: [*turns, {"role": "user", "content": last}], TURNS, TEXT
)
PREFILLED = st.builds(
    lambda turns, ask, begun: [
        *turns,
        {"role": "user", "content": ask},
        {"role": "assistant", "content": begun},
    ],
    TURNS,
    TEXT,
    TEXT,
)


def trl_prompt_ids(prompts, tokenizer, **kwargs):
    "What TRL's trainer makes of prompts."
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _is_vlm=False,
        environment_factories=None,
        tools=None,
        chat_template=None,
        chat_template_kwargs=kwargs,
    )
    return trl.GRPOTrainer._tokenize_prompts(trainer, prompts)[0]


@settings(max_examples=60, deadline=None)
@given(prompt=PROMPTS, name=st.sampled_from(sorted(TOKENIZERS)))
def test_prompts_are_tokenized_as_by_trls_trainer(prompt, name):
    ids = prompt_token_ids(prompt, TOKENIZERS[name])
    assert (
        ids == list(trl_prompt_ids([prompt], TOKENIZERS[name])[0])
        and isinstance(ids, list)
        and all(type(token) is int for token in ids)
    )
    assert is_conversational(prompt) == trl_is_conversational({"prompt": prompt})


def test_a_column_whose_name_is_no_text_is_refused():
    with pytest.raises(ValueError, match="has a column 5, a int, .* call it '5', or drop it"):
        check_columns(["prompt", 5])


def test_variables_reach_the_template():
    prompt = [{"role": "user", "content": "1"}]
    tokenizer = TOKENIZERS["chatml"]
    ids = prompt_token_ids(prompt, tokenizer, {"effort": "low"})
    assert ids == list(trl_prompt_ids([prompt], tokenizer, effort="low")[0]) and tokenizer.decode(
        ids
    ).endswith("assistant=low")


@pytest.mark.parametrize(
    "row, run, same_as",  # the last: what TRL's helper is given for the same text
    [
        ({"chat_template_kwargs": {"effort": "low"}}, None, {"effort": "low"}),
        ({"chat_template_kwargs": {"effort": "low"}}, {"effort": "high"}, {"effort": "low"}),
        ({"chat_template_kwargs": {}}, {"effort": "high"}, {"effort": "high"}),
        ({"chat_template_kwargs": {"effort": None}}, {"effort": "high"}, {"effort": "high"}),
        ({"chat_template_kwargs": None}, {"effort": "high"}, {"effort": "high"}),
        ({"chat_template_kwargs": {"other": 1}}, {"effort": "high"}, {"effort": "high"}),
        ({}, {"effort": "high"}, {"effort": "high"}),
    ],
)
def test_a_row_is_rendered_as_by_trls_helper(row, run, same_as):
    tokenizer, prompt = TOKENIZERS["chatml"], [{"role": "user", "content": "1"}]
    text = apply_chat_template({"prompt": prompt, "chat_template_kwargs": same_as}, tokenizer)
    ids = prompt_token_ids(prompt, tokenizer, template_kwargs({"prompt": prompt, **row}, run))
    assert ids == tokenizer(text["prompt"], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).endswith(f"assistant={same_as['effort']}")


@pytest.mark.parametrize(
    "row, run, effort",
    [
        ({"reasoning_effort": "low"}, None, "low"),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, "low"),
        ({"reasoning_effort": None}, {"reasoning_effort": "high"}, "high"),
        (
            {"reasoning_effort": None, "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"reasoning_effort": "high"},
            "low",
        ),
    ],
)
def test_reasoning_effort_is_one_variable(row, run, effort):
    assert template_kwargs(row, run) == {"reasoning_effort": effort}


def test_arrow_fills_the_dicts_of_a_column_with_none():
    chat = [{"role": "user", "content": "1"}]
    given = [{"effort": "low"}, {"other": "x"}, None]
    rows = [{"prompt": chat, "chat_template_kwargs": kwargs} for kwargs in given]
    table = check_dataset(datasets.Dataset.from_list(rows))
    assert table[0]["chat_template_kwargs"] == {"effort": "low", "other": None}
    assert [template_kwargs(row) for row in table] == [{"effort": "low"}, {"other": "x"}, {}]


def test_equal_prompts_of_unlike_rows_are_not_taken_for_one():
    chat, tokenizer = [{"role": "user", "content": "1"}], TOKENIZERS["chatml"]
    variables = [{"effort": effort} for effort in ("low", "low", "high")]
    ids = many_prompt_token_ids([chat] * 3, tokenizer, variables)
    assert ids == [prompt_token_ids(chat, tokenizer, each) for each in variables]
    assert ids[0] == ids[1] != ids[2]


def test_a_template_is_tried_with_every_effort_before_a_run():
    tokenizer, chat = tiny_tokenizer(), [{"role": "user", "content": "1"}]
    tokenizer.chat_template = "{{ {'low': 1, 'high': 3}[reasoning_effort] + 0 }}"
    rows = [{"prompt": chat, "reasoning_effort": effort} for effort in ["low"] * 3 + ["high"]]
    assert check_long_prompts(check_dataset(rows), tokenizer, 4, None) == 2
    with pytest.raises(ValueError, match="row 4 cannot be tokenized .*extreme"):
        check_long_prompts([*rows, {**rows[0], "reasoning_effort": "extreme"}], tokenizer, 4, None)


def test_what_a_row_adds_to_its_prompt_counts_as_length():
    tokenizer, chat = tiny_tokenizer(), [{"role": "user", "content": "1"}]
    tokenizer.chat_template = "{{ more }}" + CHAT_TEMPLATE
    rows = [{"prompt": chat, "chat_template_kwargs": {"more": "1" * n}} for n in (1, 9, 5000)]
    with pytest.raises(ValueError, match="row 2 has 5008 tokens"):
        check_long_prompts(check_dataset(rows), tokenizer, 4, 4096)


def reads_seed(completions, seed, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "column, advice",
    [
        ("temperature", "set temperature in"),
        ("max_tokens", "set max_completion_length in"),
        ("lr", "set learning_rate in"),
        ("top_p", "set top_p in"),
        ("answer", None),
        ("seed", None),  # the reward function has an argument of that name
        ("reasoning_effort", None),
        ("chat_template_kwargs", None),
    ],
)
def test_a_column_that_looks_like_a_setting(column, advice):
    sentences = unread_settings([{"prompt": "1", column: None}], [reads_seed])
    assert len(sentences) == (advice is not None)
    assert all(repr(column) in said and advice in said for said in sentences)


def test_variables_that_no_template_reads():
    chat, template = [{"role": "user", "content": "1"}], TOKENIZERS["chatml"].chat_template
    row = {"prompt": chat, "chat_template_kwargs": {"effort": "low", "thinking": True}}
    (said,) = unread_variables([row], template)
    assert "'thinking'" in said and "no such variable" in said
    assert not unread_variables([{**row, "chat_template_kwargs": {"effort": "low"}}], template)
    assert not unread_variables([{**row, "chat_template_kwargs": None}], template)
    (said,) = unread_variables([{**row, "prompt": "1"}], template)
    assert "effort, thinking" in said and "are strings" in said


@settings(max_examples=60, deadline=None)
@given(prompt=PREFILLED, text=TEXT, name=st.sampled_from(sorted(TOKENIZERS)))
def test_an_answer_that_has_begun_goes_on(prompt, text, name):
    tokenizer = TOKENIZERS[name]
    ids = prompt_token_ids(prompt, tokenizer)
    rendered = apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    whole = tokenizer.apply_chat_template(
        prompt[:-1] + completion_as_given(prompt, text), tokenize=False
    )
    assert whole.startswith(rendered + text)


@settings(max_examples=60, deadline=None)
@given(prompt=PROMPTS, text=TEXT)
def test_prompt_and_completion_together_are_the_conversation(prompt, text):
    tokenizer = TOKENIZERS["tiny"]
    completion = completion_as_given(prompt, text)
    if isinstance(prompt, str):
        assert completion == text
    else:
        assert tokenizer.apply_chat_template(prompt + completion, tokenize=False).startswith(
            apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] + text
        )


def test_the_prompt_is_left_as_it_was():
    prompt = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    before = [dict(message) for message in prompt]
    prompt_token_ids(prompt, TOKENIZERS["tiny"])
    completion_as_given(prompt, "3")
    assert prompt == before


def test_a_conversation_without_a_template_says_what_to_do():
    bare = make_tokenizer(None)
    with pytest.raises(ValueError, match="no chat template.*tokenizer.chat_template"):
        prompt_token_ids([{"role": "user", "content": "1"}], bare)
    assert prompt_token_ids("1+1", bare) == bare("1+1")["input_ids"]


@pytest.mark.parametrize(
    "prompt",
    [None, 3, [], [1, 2], [{"content": "no role"}], {"role": "user", "content": "1"}, b"1"],
)
def test_what_is_no_prompt(prompt):
    with pytest.raises(ValueError, match="has to be a string, or a list"):
        prompt_token_ids(prompt, TOKENIZERS["tiny"])


def test_a_prompt_without_tokens():
    with pytest.raises(ValueError, match="no tokens"):
        prompt_token_ids("", TOKENIZERS["tiny"])


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=6),
    completion=st.integers(1, 20),
    limit=st.integers(1, 60),
)
def test_lengths(lengths, completion, limit):
    rows = [100 + 7 * i for i in range(len(lengths))]
    prompts = [[0] * length for length in lengths]
    too_long = [(row, length) for row, length in zip(rows, lengths) if length + completion > limit]
    check_prompt_lengths(prompts, completion, None, rows)
    if not too_long:
        return check_prompt_lengths(iter(prompts), completion, limit, rows)
    row, length = too_long[0]
    with pytest.raises(ValueError) as caught:
        check_prompt_lengths(iter(prompts), completion, limit, rows)
    for number in (
        f"row {row} ",
        f"{length} tokens",
        str(length + completion),
        f"longest sequence is {limit}",
    ):
        assert number in str(caught.value)
    if length < limit:
        check_prompt_lengths([[0] * length], limit - length, limit)
    assert ("lower max_completion_length" in str(caught.value)) == (length < limit)


def test_rows_are_counted_from_0():
    with pytest.raises(ValueError, match="row 1 has 9 tokens"):
        check_prompt_lengths([[0], [0] * 9], 2, 10)


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "1", "answer": "a", "n": 1}, {"prompt": "2", "answer": "b", "n": None}],
        [
            {"answer": ["x"], "prompt": "1", "completion": "dropped", "completion_ids": [1]},
            {"answer": [], "prompt": "2", "completion": "dropped", "completion_ids": [2]},
        ],
        [{"prompt": "1"}, {"prompt": "1"}],
    ],
)
def test_reward_functions_receive_the_columns_that_trl_gives_them(rows):
    received = {}

    def reward(
        prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns
    ):
        received.update(columns)
        return [0.0] * len(prompts)

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        reward_funcs=[reward],
        reward_processing_classes=[None],
        reward_func_names=["reward"],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
    )
    trl.GRPOTrainer._calculate_rewards(
        trainer, rows, [row["prompt"] for row in rows], ["c"] * len(rows), [[0]] * len(rows)
    )
    assert reward_columns(rows) == received and reward_columns([]) == {}


GOOD = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
CHATS = [
    {"prompt": [{"role": "user", "content": "1"}]},
    {"prompt": [{"role": "system", "content": "2"}, {"role": "user", "content": "3"}]},
]


@pytest.mark.parametrize("rows", [GOOD, CHATS])
def test_datasets_and_lists_are_taken_as_they_are(rows):
    table = datasets.Dataset.from_list(rows)
    assert (
        check_dataset(table) is table
        and check_dataset(rows) is rows
        and check_dataset(tuple(rows)) == tuple(rows)
    )
    for ours, row in zip(table, rows):
        assert prompt_token_ids(ours["prompt"], TOKENIZERS["tiny"]) == prompt_token_ids(
            row["prompt"], TOKENIZERS["tiny"]
        )


@pytest.mark.parametrize(
    "dataset, words",
    [
        ([], "no rows"),
        (datasets.Dataset.from_list([]), "no rows"),
        ([{"question": "1", "answer": "2"}], "'question', 'answer'"),
        (datasets.Dataset.from_list([{"question": "1"}]), "'question'"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(GOOD)), "dataset\\['train'\\]"),
        (
            datasets.IterableDatasetDict(
                test=datasets.Dataset.from_list(GOOD).to_iterable_dataset()
            ),
            "dataset\\['test'\\]",
        ),
        ({"prompt": ["1"]}, "Dataset.from_dict"),
        (
            datasets.Dataset.from_list([{"question": "1"}]).to_iterable_dataset(),
            "no column 'prompt'.*'question'",
        ),
        (datasets.IterableDataset.from_generator(lambda: iter([])), "stream without rows"),
        ((row for row in GOOD), "generator.*cannot be counted"),
        ("gsm8k", "str.*cannot be counted"),
        ([GOOD[0], "2+2="], "Row 1 .* is a str"),
        ([GOOD[0], {"prompt": "2+2="}], "Row 1 .*\\['prompt'\\].*\\['answer', 'prompt'\\]"),
        ([{"prompt": "1"}, {"prompt": None}], "Row 1 of the dataset: A prompt is None"),
        (
            datasets.Dataset.from_list([{"prompt": "1"}, {"prompt": None}]),
            "Row 1 of the dataset: A prompt is None",
        ),
        ([{"prompt": "1"}, CHATS[0]], "Row 1 of the dataset is a conversation and row 0 a string"),
        ([{"prompt": "1", "completions": "2"}], "'completions'"),
        ([{"prompt": "1", "trainer_state": "2"}], "'trainer_state'"),
    ],
)
def test_mistakes_are_named(dataset, words):
    with pytest.raises(ValueError, match=words):
        check_dataset(dataset)


def stream_of(rows):
    "A stream, and a list that receives what is read of it."
    read = []

    def rows_of():
        for row in rows:
            read.append(row["prompt"])
            yield row

    return datasets.IterableDataset.from_generator(rows_of), read


def test_a_stream_is_read_once_and_begins_again_when_it_ends():
    stream, read = stream_of([{"prompt": str(n)} for n in range(5)])
    rows = check_dataset(stream)
    assert [rows[n]["prompt"] for n in (0, 3, 1, 2, 4, 5, 6, 3)] == list("03124013")
    assert read == list("0123401")  # 3, asked for again, was kept
    assert check_evaluation_data({"a": stream})["a"] == [{"prompt": str(n)} for n in range(5)]


@pytest.mark.parametrize("name", [5, None, (1, 2)])
def test_a_column_without_a_name_is_a_sentence(name):
    with pytest.raises(ValueError, match="a column .*call it"):
        check_dataset([{"prompt": "1", name: 1}])
    with pytest.raises(ValueError, match="Row 1 of the dataset has the columns"):
        check_dataset([{"prompt": "1", name: 1}, {"prompt": "1"}])


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "2", "more": 1}, "Row 1 of the stream is .*'more'.*the same columns"),
        ("2", "Row 1 of the stream is '2'"),
        ({"prompt": [{"role": "user", "content": "2"}]}, "Row 1 of the stream.*conversations"),
    ],
)
def test_a_row_of_a_stream_that_differs_is_named(row, words):
    class Stream:
        def __iter__(self):
            yield from ({"prompt": "1"}, row)

    rows = check_dataset(Stream())
    with pytest.raises(ValueError, match=words):
        rows[1]


@pytest.mark.parametrize("limit", [None, 10_000])
def test_prompts_that_the_tokenizer_refuses_are_found_before_a_run(limit):
    tokenizer = tiny_tokenizer()
    assert (
        check_long_prompts(check_dataset([{"prompt": "1+1="}] * 50), tokenizer, 4, limit) == 1
    )  # one of a kind
    with pytest.raises(ValueError, match="The prompt of row 2 cannot be tokenized .*no tokens"):
        check_long_prompts(
            check_dataset([{"prompt": "1"}, {"prompt": "2"}, {"prompt": ""}]), tokenizer, 4, limit
        )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System "
        "role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    plain, system = (
        [{"role": "user", "content": "1"}],
        [{"role": "system", "content": "2"}, {"role": "user", "content": "1"}],
    )
    with pytest.raises(
        ValueError, match="The prompt of row 3 cannot be tokenized .*System role not supported"
    ):
        check_long_prompts(
            check_dataset([{"prompt": plain}] * 3 + [{"prompt": system}]), tokenizer, 4, limit
        )


@pytest.mark.parametrize(
    "data, words",
    [
        ([], r"^eval_dataset: The dataset \(list\) has no rows"),
        (
            {"easy": [{"prompt": "1"}], "hard": [{"question": "1"}]},
            r"^eval_dataset\['hard'\]: The dataset has no column 'prompt'",
        ),
    ],
)
def test_which_evaluation_data_is_wrong(data, words):
    with pytest.raises(ValueError, match=words):
        check_evaluation_data(data)
    parts = {"a": [{"prompt": "1"}]}
    assert check_evaluation_data(parts) == parts and check_evaluation_data(parts["a"]) is parts["a"]


def test_a_message_without_content_is_refused():
    with pytest.raises(ValueError, match="Message 0 of a prompt has the keys 'role', 'text' and"):
        is_conversational([{"role": "user", "text": "2+3="}])
    call = dict(role="assistant", tool_calls=[])
    assert is_conversational([{"role": "user", "content": "2+3="}, call])
