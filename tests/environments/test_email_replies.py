"""environments.email_replies: what counts as saying a word, the five checks, the texts that try to
cheat them, and the data."""

import asyncio
import inspect
import math
import re
import unicodedata
from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import one_thread, small_trainer  # noqa: F401

from grpo_nb.environments.email_replies import (
    EMAIL_REWARDS,
    KINDS,
    NAMES,
    SHOPS,
    exact_reply_reward,
    keywords_reward,
    mentions,
    recipient_reward,
    reply_problems,
    signature_reward,
    too_long_reward,
)
from grpo_nb.training.data import check_dataset
from grpo_nb.training.rewards import RewardError, score_completions

ROWS = reply_problems(60, seed=3)
LETTERS = st.text("abcdeéßøŁ", min_size=1, max_size=6)
FORMS = pytest.mark.parametrize(
    "form",
    [lambda text: text, lambda text: [{"role": "assistant", "content": text}]],
    ids=["strings", "chat"],
)


def scores(text, row, form=lambda text: text):
    "The five rewards of one reply."
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    return [
        f(
            prompts=[row["prompt"]],
            completions=[form(text)],
            completion_ids=[[1]],
            trainer_state=None,
            **columns,
        )[0]
        for f in EMAIL_REWARDS
    ]


# Words


@settings(max_examples=200, deadline=None)
@given(
    word=LETTERS,
    before=st.sampled_from(["", "dear ", "(", "\n", "…", "1. "]),
    after=st.sampled_from(["", "!", " x", "'s", ",", ")", "\n", "."]),
    how=st.sampled_from([str.upper, str.lower, str.title, str]),
    form=st.sampled_from(["NFC", "NFD", "NFKD"]),
)
def test_a_word_is_found_in_any_spelling(word, before, after, how, form):
    assert mentions(unicodedata.normalize(form, before + how(word) + after), word) == 1


@settings(max_examples=200, deadline=None)
@given(word=LETTERS, glued=st.sampled_from(["a", "9", "é", "-x", "\u0301", "ß"]))
def test_a_piece_of_a_word_is_not(word, glued):
    assert mentions(f"so {word}{glued} it", word) == 0
    assert (
        mentions(f"so {glued[::-1]}{word}", word) == 0 or glued == "\u0301"
    )  # an accent at the beginning belongs to the space before it


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab -.!\n", max_size=30), phrase=st.text("ab ", min_size=1, max_size=4))
def test_as_a_pattern_counts(text, phrase):
    words = phrase.split()
    pattern = r"(?<![\w-])(?=(" + r"\s+".join(words) + r")(?![\w-]))"
    assert mentions(text, phrase) == (
        sum(not re.match(r"^$", phrase.strip()) for _ in re.finditer(pattern, text)) if words else 0
    )


@pytest.mark.parametrize(
    "text, phrase, count",
    [
        ("Happy Anniversary", "Ann", 0),
        ("ANN, Ann and ann", "Ann", 3),
        ("Ann-Marie", "Ann", 0),
        ("Marie-Ann", "Ann", 0),
        ("Dear Ann - thanks", "Ann", 1),
        ("Ann’s and Ann's", "ann", 2),
        ("D’Arcy", "D'Arcy", 1),
        ("Strasse", "Straße", 1),
        ("STRASSE", "straße", 1),
        ("Renee", "Renée", 0),
        ("Renée", "Renee", 0),
        ("rene\u0301e", "RENÉE", 1),
        ("5\u00a0working\n days", "5 working days", 1),
        ("15 working days", "5 working days", 0),
        ("3-5 working days", "5 working days", 0),
        ("order 1234.", "1234", 1),
        ("order 12345", "1234", 0),
        ("a+b", "a+b", 1),
        ("axb", "a.b", 0),
        ("", "a", 0),
        ("a", "", 0),
        ("a", "  ", 0),
        ("a a a", "a a", 2),
        ("नमस्ते", "नमस्त", 0),
        ("+44 20 1", "+44 20 1", 1),
        ("", "", 0),
    ],
)
def test_mentions(text, phrase, count):
    assert mentions(text, phrase) == count


# The checks


@FORMS
def test_wanted_replies_earn_all_the_points(form):
    for row in ROWS:
        assert scores(row["reply"], row, form) == [1, 1, 0, 1, 1]


@FORMS
def test_replies_to_others_do_not(form):
    for row, other in zip(ROWS, ROWS[1:]):
        keywords, exact, long, name, sign = scores(other["reply"], row, form)
        assert (
            (keywords, exact, long) == (0, 0, 0)
            and name == (row["recipient"] == other["recipient"])
            and sign == (row["signature"] == other["signature"])
        )


def test_each_part_earns_its_own_point():
    for row in ROWS[:20]:
        greeting, _, thanks_and_answer, _, *end = row["reply"].split("\n")
        sign = "\n".join(row["signature"])
        assert scores(f"{greeting}\nbye", row) == [0, 0, 0, 1, 0]
        assert scores(f"Hello,\n{thanks_and_answer}\nbye", row) == [1, 0, 0, 0, 0]
        assert scores(f"Hello,\nbye\n{sign}", row) == [0, 0, 0, 0, 1]
        assert (
            scores(row["reply"] + "\n ", row) == [1, 1, 0, 1, 1]
            and scores(row["reply"] + ".", row)[1] == 0
        )
        for missing in range(3):  # any of phone, e-mail, address
            part = [p for i, p in enumerate(row["signature"]) if i != missing]
            assert scores("Hello\n" + "\n".join(part), row)[4] == 0
        wrong = [
            row["signature"][0][:-1] + ("1" if row["signature"][0][-1] != "1" else "2"),
            *row["signature"][1:],
        ]
        assert scores("Hello\n" + "\n".join(wrong), row)[4] == 0


@pytest.mark.parametrize(
    "text, points",
    [
        ("{k}", 0),
        ("{k}. {k}. {k}.", 0),
        ("> the mail said {k} and so on and on and on\n> and more", 0),
        ("This is about {k}, as you know well by now.", 1),
        ("{r}\n{k}", 0),
        (
            (
                "I write to you about {first}, as promised some time ago.\nThe other thing is "
                "{second}, which you can rely on."
            ),
            1,
        ),
        ("I write to you about {first}, as promised some time ago.", 0),
    ],
)
def test_keywords_are_said_in_sentences(text, points):
    row = ROWS[0]
    first, second = row["keywords"]
    assert (
        scores(
            text.format(
                k=f"{first} {second}", first=first, second=second, r=row["reply"].split("\n")[0]
            ),
            row,
        )[0]
        == points
    )


@pytest.mark.parametrize(
    "text, points",
    [
        ("{n}", 1),
        ("Dear {n},\nhello", 1),
        ("\n\n  dear {N}!\n", 1),
        ("{n} {n}", 0),
        ("Hello,\n{n}", 0),
        ("> {n}\nHello", 0),
        ("> quoted\nDear {n}", 1),
        ("{n}iversary", 0),
        ("", 0),
    ],
)
def test_the_name_is_in_the_greeting_once(text, points):
    for name in NAMES:
        assert recipient_reward([text.format(n=name, N=name.upper())], [name]) == [points]


def test_ann_is_not_ann_marie():
    assert recipient_reward(["Dear Ann-Marie,", "Dear Ann,"], ["Ann", "Ann-Marie"]) == [0, 0]


def test_a_signature_stands_at_the_end():
    sign = ROWS[0]["signature"]
    block = "\n".join(sign)
    texts = [
        f"Hello\n{block}",
        f"Hello\n{block}\n\nShop",
        f"Phone: {sign[0]}, e-mail: {sign[1]}, address: {sign[2]}",
        f"{block}\nand\nthen\nmore\ntext",
        "\n".join(f"> {part}" for part in sign),
        block.upper(),
        block.replace(" ", "\n"),
    ]
    assert signature_reward(texts, [sign] * len(texts)) == [1, 1, 1, 0, 0, 1, 0]


def test_length_in_characters():
    assert (
        too_long_reward(["x" * 10, "x" * 11, "a b c d e f g", ""], [10, 10, 10, 10])
        == [0, -1, -1, 0]
        and math.copysign(1, too_long_reward([""], [1])[0]) == 1
    )


def test_a_row_that_asks_for_nothing_is_not_judged():
    for function, value in (
        (keywords_reward, []),
        (keywords_reward, None),
        (recipient_reward, ""),
        (recipient_reward, None),
        (signature_reward, None),
        (too_long_reward, None),
        (exact_reply_reward, None),
    ):
        column = list(inspect.signature(function).parameters)[1]
        assert function(completions=["a"], **{column: [value]}) == [None]
    assert too_long_reward(["", "a"], [0, 0]) == [0, -1]


def test_one_keyword_may_be_a_string():
    assert keywords_reward(
        ["It is about a refund.", "It is about a fund."], ["refund", "refund"]
    ) == [1, 0]
    assert signature_reward(["call +44 1\nme@b.example"], ["+44 1\nme@b.example"]) == [1]


@FORMS
def test_any_text_has_five_numbers(form):
    for text in (
        "",
        "\n",
        ">",
        "\x00",
        "a" * 100_000,
        "Ann " * 20_000,
        "\u0301",
        "🙂",
        "\\",
        "(",
        "[a-z]+",
    ):
        assert all(
            type(score) is float and score in (-1, 0, 1) for score in scores(text, ROWS[0], form)
        )


# The tricks


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_trick_earns_what_a_letter_earns(seed):
    rows = reply_problems(200, seed)
    for row in rows[:10]:
        k, name, sign = " ".join(row["keywords"]), row["recipient"], "\n".join(row["signature"])
        tricks = [
            k,
            f"{k} " * 20,
            f"{name} " * 20,
            f"{k} {name}",
            f"{name}\n{k}",
            sign,
            row["prompt"][1]["content"],
            "\n".join(m["content"] for m in row["prompt"]),
            f"{k} a@b.example 0000 street " + f"{name} " * 30,
            "\n".join(f"> {line}" for line in row["reply"].split("\n")),
        ]
        assert all(sum(scores(trick, row)) <= 1 for trick in tricks)
        assert (
            sum(scores("\n\n".join(r["reply"] for r in rows), row)) <= 2
        )  # its first name and its last signature may be right
        assert (
            sum(
                scores(
                    f"Hi {name},\nit is about {row['keywords'][0]} that you ask: it will be "
                    f"{row['keywords'][1]}, I promise.\nYours,\n{sign}",
                    row,
                )
            )
            == 3
        )


# The data


def test_rows():
    assert (
        len(ROWS) == 60
        and ROWS == reply_problems(60, 3) != reply_problems(60, 4)
        and len({row["keywords"][0] for row in ROWS}) == 60
    )
    every = reply_problems(9_000)
    for row in every:
        assert row.keys() == {
            "prompt",
            "keywords",
            "recipient",
            "signature",
            "max_length",
            "reply",
        } and [m["role"] for m in row["prompt"]] == ["system", "user"]
        system, mail = (m["content"] for m in row["prompt"])
        assert (
            all(mentions(system, part) for part in row["signature"])
            and mentions(system, row["keywords"][1])
            and mentions(mail, row["keywords"][0])
        )  # everything can be found
        assert (
            mentions(mail, row["recipient"]) == 1
            and not mentions(mail, row["keywords"][1])
            and len(row["reply"]) <= row["max_length"]
            and not re.search(r"[{}]", system + mail + row["reply"])
        )
    assert {row["recipient"] for row in every} == set(NAMES) and len(
        {row["signature"][0] for row in every}
    ) == len(SHOPS)
    shapes = {
        re.sub(r"\d+|\w+day", "#", row["prompt"][1]["content"].split("\n")[1]) for row in every
    }
    assert len(shapes) == len(KINDS)


@pytest.mark.parametrize("count", [0, -1, 9_001])
def test_too_many_or_no_mails(count):
    with pytest.raises(ValueError, match=f"count is {count}, .*1 to 9,000"):
        reply_problems(count)


def test_the_rows_are_a_data_set():
    table = datasets.Dataset.from_list(ROWS)
    assert (
        check_dataset(table) is table
        and check_dataset(ROWS) is ROWS
        and table[0]["keywords"] == ROWS[0]["keywords"]
    )


# In the trainer's hands


def test_trl_makes_the_same_table():
    rows = [
        {**row, "keywords": row["keywords"] if i % 2 else None} for i, row in enumerate(ROWS[:6])
    ]
    prompts, completions = (
        [row["prompt"] for row in rows],
        [
            [{"role": "assistant", "content": text}]
            for text in [
                rows[0]["reply"],
                rows[1]["reply"],
                "Dear Ann",
                "x" * 500,
                rows[0]["reply"],
                "",
            ]
        ],
    )
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        reward_funcs=EMAIL_REWARDS,
        reward_processing_classes=[None] * 5,
        reward_func_names=[f.__name__ for f in EMAIL_REWARDS],
        state=SimpleNamespace(global_step=0),
        environments=None,
        _log_completion_extra=None,
        _log_metric=None,
        args=SimpleNamespace(report_to=[]),
    )
    if hasattr(trl.GRPOTrainer, "_run_async_funcs"):
        trainer._run_async_funcs = lambda *_, **__: asyncio.run(asyncio.sleep(0))
    theirs = trl.GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, [[1]] * 6)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    ours = score_completions(EMAIL_REWARDS, prompts, completions, **columns)
    assert torch.equal(ours.nan_to_num(-7), theirs.nan_to_num(-7)) and ours[1].tolist() == [
        1,
        1,
        0,
        1,
        1,
    ]


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="'recipient_reward'.*recipient"):
        score_completions(EMAIL_REWARDS[3:], ["p"], ["a"], signature=[["a"]])


def test_a_training_run(tmp_path):
    trainer = small_trainer(
        tmp_path,
        EMAIL_REWARDS,
        rows=ROWS[:8],
        max_steps=1,
        per_device_train_batch_size=4,
        max_completion_length=3,
    )
    trainer.train()
    record = trainer.log_history[0]
    assert record["reward"] == sum(record[f"rewards/{f.__name__}/mean"] for f in EMAIL_REWARDS)
