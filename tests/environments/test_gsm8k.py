"""environments.gsm8k: files in GSM8K's own form, problems that a second reader solves, and five
rewards against patterns that say the same."""

import json
import re
import time
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import digits, one_thread, small_model, small_trainer  # noqa: F401

from grpo_nb.environments.gsm8k import (
    GSM8K_REWARDS,
    SYSTEM_PROMPT,
    TAGS,
    WORKING_TAGS,
    WORKING_TEMPLATE,
    answer_text,
    answer_value,
    correctness_reward_func,
    gold_answer,
    gsm8k,
    int_reward_func,
    pieces,
    problem_row,
    soft_format_reward_func,
    solution_format_reward,
    solution_proximity_reward,
    strict_format_reward_func,
    word_problems,
    worked_completion,
    xmlcount_reward_func,
)
from grpo_nb.training.data import prompt_token_ids


def form(reasoning="so", answer="18"):
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"


def chat(text):
    return [{"role": "assistant", "content": text}]


# data


@pytest.mark.parametrize(
    "worked, answer",
    [
        ("9 * 2 = <<9*2=18>>18\n#### 18", "18"),
        ("a\n#### 1,234", "1234"),
        ("#### $5 ", "5"),
        ("#### 3\n#### -4\n", "-4"),
        ("####0.5", "0.5"),
    ],
)
def test_the_answer_stands_after_the_mark(worked, answer):
    assert gold_answer(worked) == answer


def test_a_row():
    assert problem_row("1+1?", "#### 2") == {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": "1+1?"},
        ],
        "answer": "2",
        "solution": "#### 2",
    }
    assert problem_row("1+1?", "#### 2", None)["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert all(tag in SYSTEM_PROMPT for tag in TAGS)
    with pytest.raises(ValueError, match="has no line '#### number'"):
        problem_row("1+1?", "2")


def rows(word, count):
    return [{"question": f"{word} {i}?", "answer": f"so it is\n#### {i},000"} for i in range(count)]


@pytest.fixture
def quiet_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_parquet(folder, config):
    for split, count in (("train", 5), ("test", 3)):
        folder.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows(f"{config} {split}", count)).to_parquet(
            folder / f"{split}-00000-of-00001.parquet"
        )


def layout_of_the_hub(folder):
    for config in ("main", "socratic"):
        write_parquet(folder / config, config)
    split = "\n".join(
        f"- config_name: {c}\n  data_files:\n"
        + "\n".join(f"  - split: {s}\n    path: {c}/{s}-*" for s in ("train", "test"))
        for c in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{split}\n---\n# GSM8K\n")


def layout_without_readme(folder):
    for config in ("main", "socratic"):
        write_parquet(folder / config, config)


def layout_of_the_repository(folder):
    for split, count in (("train", 5), ("test", 3)):
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(f"main {split}", count))
        )


@pytest.mark.parametrize(
    "layout",
    [
        layout_of_the_hub,
        layout_without_readme,
        lambda folder: write_parquet(folder, "main"),
        layout_of_the_repository,
    ],
    ids=["hub", "no readme", "parquet", "jsonl"],
)
def test_loading_a_copy(layout, tmp_path, quiet_datasets):
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    layout(folder)
    train, test, part = (
        gsm8k("train", folder),
        gsm8k("test", str(folder), system_prompt=None),
        gsm8k("test[:2]", folder),
    )
    assert (len(train), len(test), len(part)) == (5, 3, 2) and train.column_names == [
        "prompt",
        "answer",
        "solution",
    ]
    assert (
        train[4] == problem_row("main train 4?", "so it is\n#### 4,000")
        and train[4]["answer"] == "4000"
    )
    assert test[0] == problem_row("main test 0?", "so it is\n#### 0,000", None)
    with pytest.raises(ValueError, match="dev"):
        gsm8k("dev", folder)


def test_what_cannot_be_loaded_is_said(tmp_path, quiet_datasets, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for path in ("nobody/no-such-data", str(tmp_path / "missing"), tmp_path / "missing"):
        with pytest.raises(ConnectionError, match="could not be loaded.*word_problems"):
            gsm8k("train", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConnectionError, match="could not be loaded"):
        gsm8k("train", tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text('{"problem": "1+1?"}\n')
    with pytest.raises(
        ValueError, match="has the columns problem, and GSM8K's are question and answer"
    ):
        gsm8k("train", tmp_path / "other")


def solve(question):
    "A second reader: the answer from the words alone."
    have = int(re.search(r"has (\d+)", question)[1])
    for more, away, boxes, each in re.findall(
        r"buys (\d+) more|gives (\d+) away|gets (\d+) boxes with (\d+)", question
    ):
        have += int(more or 0) - int(away or 0) + int(boxes or 0) * int(each or 0)
    bags = re.search(r"into (\d+) bags", question)
    return have / int(bags[1]) if bags else have


@pytest.mark.parametrize(
    "steps, largest, count", [(1, 9, 300), (3, 20, 400), (5, 3, 200), (2, 1, 60)]
)
def test_word_problems_are_right(steps, largest, count):
    problems = word_problems(7, count, steps=steps, largest=largest)
    questions = [p["prompt"][1]["content"] for p in problems]
    assert len(set(questions)) == count == len(problems)
    for question, problem in zip(questions, problems):
        assert solve(question) == int(problem["answer"]) > 0
        lines = problem["solution"].split("\n")
        assert (
            all(
                eval(left) == int(right)
                for left, right in (line.split(" = ") for line in lines[:-1])
            )
            and lines[-1] == f"#### {problem['answer']}"
            and len(lines) >= 2
        )
        assert len(re.findall("buys|gives|gets", question)) in range(1, steps + 1)
        assert max(map(int, re.findall(r"\d+", question))) <= max(largest, 2)


def test_word_problems_by_seed():
    first, again, other = word_problems(1, 50), word_problems(1, 50), word_problems(2, 50)
    assert first[:] == again[:] != other[:] and first.column_names == [
        "prompt",
        "answer",
        "solution",
    ]
    assert word_problems(1, 20)[:] == first.select(range(20))[:]
    assert len(word_problems(0, 3, system_prompt=None)[0]["prompt"]) == 1
    with pytest.raises(
        ValueError,
        match="count is 10000, and only .* different problems were found with steps=1 and "
        "largest=1",
    ):
        word_problems(0, 10_000, steps=1, largest=1)


# rewards

SNIPPETS = st.lists(
    st.sampled_from([*TAGS, *TAGS, "\n", "\n", " ", "18", "-3", "x", "1,200", "so", "$"]),
    max_size=14,
).map("".join)
SHAPED = st.builds(
    lambda a, r, b, n, c: f"{a}<reasoning>{r}</reasoning>{b}<answer>{n}</answer>{c}",
    *[st.lists(st.sampled_from(["\n", "\n", "", " ", "x", "18"]), max_size=3).map("".join)] * 5,
)
STRICT = re.compile(r"<reasoning>\n(.*)\n</reasoning>\n<answer>\n(.*)\n</answer>\n?", re.S)
SOFT = re.compile(r"\s*<reasoning>(.*)</reasoning>\s*<answer>(.*)</answer>\s*", re.S)


def by_pattern(pattern, text):
    "The verdict of a pattern that is allowed to be slow."
    found = pattern.fullmatch(text)
    return (
        bool(found)
        and all(text.count(tag) == 1 for tag in TAGS)
        and all(group.strip() for group in found.groups())
    )


@settings(max_examples=500, deadline=None)
@given(SNIPPETS | SHAPED | st.text(max_size=30))
def test_form_against_patterns(text):
    strict, soft, count = (
        strict_format_reward_func([text])[0],
        soft_format_reward_func([text])[0],
        xmlcount_reward_func([text])[0],
    )
    assert strict == 0.5 * by_pattern(STRICT, text) and soft == 0.5 * by_pattern(SOFT, text)
    assert strict <= soft <= count and 0 <= count <= 0.5
    assert (pieces(text) is not None) == (
        re.fullmatch(".*".join(["", *TAGS, ""]), text, re.S) is not None
        and all(text.count(tag) == 1 for tag in TAGS)
    )
    if pieces(text):
        assert "".join(part + tag for part, tag in zip(pieces(text), [*TAGS, ""])) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(SNIPPETS | SHAPED | st.text(max_size=30), min_size=1, max_size=4))
def test_any_text_gets_points_in_both_forms(texts):
    for reward, most in zip(GSM8K_REWARDS, (2.0, 0.5, 0.5, 0.5, 0.5)):
        points = reward(
            prompts=["?"] * len(texts),
            completions=texts,
            answer=["18"] * len(texts),
            completion_ids=None,
            level=1,
        )
        assert points == reward(
            prompts=["?"] * len(texts),
            completions=[chat(text) for text in texts],
            answer=["18"] * len(texts),
        )
        assert len(points) == len(texts) and all(
            type(p) is float and 0 <= p <= most for p in points
        )


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(-(10**7), 10**7),
    spelling=st.sampled_from(
        ["{}", "{:,}", "{}.0", "${}", "{} dollars", "**{}**", r"\boxed{{{}}}", " {} \n"]
    ),
    off=st.integers(-3, 3),
)
def test_numbers_by_value_and_by_spelling(number, spelling, off):
    text = form(answer=spelling.format(number))
    assert correctness_reward_func(completions=[text], answer=[str(number + off)]) == [
        0.0 if off else 2.0
    ]
    try:
        written = int(spelling.format(number).replace(",", "")) is not None
    except ValueError:
        written = False
    assert int_reward_func([text]) == [0.5 * written]


@pytest.mark.parametrize(
    "answer, right",
    [
        ("17 or 18", 0.0),
        ("18 18", 0.0),
        ("9 + 9 = 18", 0.0),
        ("eighteen", 0.0),
        ("", 0.0),
        ("1/0", 0.0),
        ("36/2", 2.0),
        ("\u221218", 0.0),
        ("18%", 2.0),
    ],
)
def test_one_number_in_the_tags(answer, right):
    assert correctness_reward_func(completions=[form(answer=answer)], answer=["18"]) == [right]


@pytest.mark.parametrize(
    "answer, points",
    [
        ("-3", 0.5),
        ("+3", 0.5),
        ("\u22123", 0.5),
        ("1,200", 0.5),
        ("12,00", 0.0),
        ("1200,", 0.0),
        (",200", 0.0),
        ("3.", 0.0),
        ("3.0", 0.0),
        ("--3", 0.0),
        ("-", 0.0),
        ("", 0.0),
        ("²", 0.0),
        ("٣", 0.0),
        ("3 4", 0.0),
        ("1_000", 0.0),
    ],
)
def test_spelt_as_a_whole_number(answer, points):
    assert int_reward_func([form(answer=answer)]) == [points]


@pytest.mark.parametrize(
    "text, inside",
    [
        ("18", None),
        ("<answer>18", None),
        ("18</answer>", None),
        ("</answer>18<answer>", None),
        ("<answer></answer>", ""),
        ("<answer>17</answer><answer> 18 </answer>", "18"),
        ("<answer>17</answer><answer>18", None),
        ("<answer>1<answer>18</answer>", "18"),
        ("<answer>18</answer>19</answer>", "18"),
    ],
)
def test_the_last_finished_answer_counts(text, inside):
    assert answer_text(text) == inside and (answer_value(text) is None) == (inside in (None, ""))


@pytest.mark.parametrize("hidden", [*TAGS, "<answer>17</answer>", form()])
@pytest.mark.parametrize("place", ["reasoning", "answer"])
def test_tags_inside_of_a_part_are_no_form(hidden, place):
    text = form(**{place: f"18 {hidden} 18"})
    assert (
        pieces(text) is None
        and strict_format_reward_func([text]) == soft_format_reward_func([text]) == [0.0]
        and xmlcount_reward_func([text])[0] < 0.5
    )


def test_the_known_weaknesses():
    many_lines, ten = form("first\n\nthen\n  last"), form() + "<answer>18</answer>" * 9
    assert strict_format_reward_func(
        [many_lines, form().strip(), ten, form("", ""), "x" + form()]
    ) == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert xmlcount_reward_func(
        [
            form(),
            ten,
            form() + "x" * 10,
            form() + "x" * 1000,
            "<answer>",
            "",
            "</answer>" + "x" * 1000,
        ]
    ) == pytest.approx([0.5, 0.25, 0.49, 0.375, 0.125, 0.0, 0.0])
    assert (
        sum(f(prompts=None, completions=[many_lines], answer=["18"])[0] for f in GSM8K_REWARDS)
        == 4.0
    )
    with pytest.raises(ValueError, match="holds no number"):
        correctness_reward_func(completions=[form()], answer=["eighteen"])


@pytest.mark.parametrize(
    "piece",
    [
        *TAGS,
        form(),
        "<answer>1",
        "1 ",
        "\n",
        "<",
        "</answer>\n<answer>\n",
        "</reasoning>\n<answer>\n",
        "x",
    ],
)
def test_long_completions_are_quick(piece):
    text = (
        "<reasoning>\n"
        + piece * (100_000 // len(piece))
        + "\n</reasoning>\n<answer>\n"
        + piece * (100_000 // len(piece))
        + "\n</answer>"
    )
    for reward in GSM8K_REWARDS:
        start = time.thread_time()
        reward(prompts=None, completions=[text], answer=["18"])
        assert time.thread_time() - start < 5  # what grows with the square takes minutes


def test_worked_solutions_earn_full_marks():
    problems = word_problems(3, 60)
    for problem in [
        *problems,
        problem_row("?", "He has 3*4=<<3*4=12>>12 > 5 pens.\nSo <<12-5=7>>7.\n#### 1,007"),
    ]:
        text = worked_completion(problem["solution"])
        assert (
            sum(
                f(prompts=None, completions=[text], answer=[problem["answer"]])[0]
                for f in GSM8K_REWARDS
            )
            == 4.0
        )
    assert text == form("He has 3*4=12 > 5 pens.\nSo 7.", "1007").strip()


# the guide's own tags


def test_solution_rewards():
    right, near, far, late, twice, bare = (
        "7+8<end_working_out><SOLUTION>15</SOLUTION>",
        "7<end_working_out><SOLUTION>14</SOLUTION>",
        "7<end_working_out><SOLUTION>900</SOLUTION>",
        "7<end_working_out>15<SOLUTION>15</SOLUTION>",
        "7<end_working_out><SOLUTION>15</SOLUTION>" * 2,
        "<SOLUTION>15</SOLUTION>",
    )
    texts = [right, WORKING_TAGS[0] + right, near, far, late, twice, bare, ""]
    assert solution_format_reward([chat(text) for text in texts]) == [1, 1, 1, 1, 0, 0, 0, 0]
    points = solution_proximity_reward(texts, answer=["15"] * len(texts))
    assert (
        points[:2] == [1, 1]
        and 0 < points[2] < 0.5
        and -1 < points[3] < -0.9
        and points[4:] == [-1] * 4
    )


def test_the_template_opens_the_working_out():
    _, tokenizer = small_model(characters="0123456789+=ab")
    tokenizer.add_tokens(list(WORKING_TAGS))
    tokenizer.chat_template = WORKING_TEMPLATE
    ids = prompt_token_ids(
        [{"role": "system", "content": "ab"}, {"role": "user", "content": "7+8="}], tokenizer
    )
    assert tokenizer.decode(ids).replace(
        tokenizer.unk_token, "\n"
    ) == "ab\n7+8=<start_working_out>" and ids[-1] == tokenizer.convert_tokens_to_ids(
        "<start_working_out>"
    )


def test_a_run_with_the_five_rewards(tmp_path):
    problems = word_problems(0, 12, steps=1, largest=9, system_prompt=None)
    model, tokenizer = small_model(
        characters="0123456789 .?abcdefghijklmnopqrstuvwxyzABLMORTZHJ<>/\n"
    )
    trainer = small_trainer(
        tmp_path,
        GSM8K_REWARDS,
        rows=problems,
        model=model,
        tokenizer=tokenizer,
        max_completion_length=8,
    )
    trainer.train()
    assert {f"rewards/{f.__name__}/mean" for f in GSM8K_REWARDS} <= set(trainer.log_history[0])


# the tutorial, on its way for a real model

TUTORIAL = Path(__file__).parents[2] / "nbs" / "tutorials" / "03_gsm8k.ipynb"


def tutorial(changes):
    "The code of the tutorial after these replacements, run; its variables."
    cells = [
        cell["source"]
        for cell in json.loads(TUTORIAL.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    source = "\n\n".join(
        "".join(cell) for cell in cells if "#| eval: false" not in "".join(cell)
    ).replace("%matplotlib inline\n", "")
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    variables = {"__name__": "tutorial", "digits": digits}
    exec(compile(source, str(TUTORIAL), "exec"), variables)
    return variables


@pytest.mark.long
def test_the_tutorial_with_a_model_from_a_folder(tmp_path, quiet_datasets, capsys):
    model, tokenizer = small_model(characters="".join(map(chr, range(32, 127))) + "\n")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    problems = word_problems(0, 40, system_prompt=None)
    for split, part in (("train", range(16)), ("test", range(16, 40))):
        (tmp_path / "data" / f"{split}.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "question": problems[i]["prompt"][0]["content"],
                        "answer": problems[i]["solution"],
                    }
                )
                + "\n"
                for i in part
            )
        )
    changes = {
        'MODEL, OUT = HERE["model"], HERE["folder"]': (
            f"MODEL, OUT = {str(tmp_path / 'model')!r}, {str(tmp_path / 'run')!r}"
        ),
        'DATA = "openai/gsm8k"': f"DATA = {str(tmp_path / 'data')!r}",
        "max_steps=300": "max_steps=2",
        "gradient_accumulation_steps=8": "gradient_accumulation_steps=2",
        "else 320": "else 8",
        "(\n    model, GSM8K_REWARDS,": "(\n    model, [*GSM8K_REWARDS, digits],",
    }  # with a spread, which random weights seldom give the others
    first = tutorial(changes)
    assert (
        len(first["train"]) == 16
        and first["train"][0]["prompt"][0]["role"] == "system"
        and first["LORA"] is not None
    )
    assert "adapter_model.safetensors" in [
        path.name for path in (tmp_path / "run" / "final").iterdir()
    ] and all(first["same"])
    trained = [name for name, p in first["trainer"].model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained) and first["result"].global_step == 2
    assert all(
        p.abs().sum() > 0 for name, p in first["loaded"].named_parameters() if "lora_B" in name
    )  # they were 0 before training

    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines()
    assert (
        tutorial(changes)["result"].global_step == 2 and log.read_text().splitlines() == lines
    )  # finished: nothing more is done
    more = tutorial({**changes, "max_steps=300": "max_steps=3"})
    assert (
        more["result"].global_step == 3
        and log.read_text().splitlines()[:2] == lines
        and "checkpoint-2" in capsys.readouterr().out
    )
