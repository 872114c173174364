"""widgets.rewards: an explanation says what the score says, for every reward of the library; faults
and hanging functions are sentences; nothing that is shown can be markup; totals and advantages are
the trainer's."""

import functools
import html
import json
import math
import random
import re
import textwrap
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from node import run_module

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.environments import arithmetic, gsm8k, procedural
from grpo_nb.environments.game2048 import CORNER, OnceABatch, StrategyRewards
from grpo_nb.environments.isolated_rewards import isolated
from grpo_nb.environments.matmul import MatmulRewards
from grpo_nb.environments.rubric import Rubric, length_penalty, readability_penalty
from grpo_nb.environments.verifiers import (
    Explanation,
    final_channel,
    last_number,
    last_program,
    program_marks,
)
from grpo_nb.widgets import rewards as room
from grpo_nb.widgets.rewards import (
    NEXT,
    TASKS,
    Judgement,
    RewardTask,
    ask,
    explainer,
    explanation,
    group_html,
    held_task,
    judge_group,
    read_row,
    rewards_widget,
    said_of,
    split_group,
    total,
)

PIECES = [
    "46",
    "45",
    "-46",
    "4",
    " ",
    "\n",
    ".",
    "46.0",
    "1/0",
    "92/2",
    r"\boxed{46}",
    r"\boxed{",
    "}",
    r"\frac{92}{2}",
    "1{,}000",
    r"4.6 \times 10^{1}",
    "1e9999",
    "page",
    "please",
    "=",
    "+",
    "20+26",
    "(2*23)",
    "é",
    "\u2212",
    "$46",
    *gsm8k.TAGS,
    *gsm8k.TAGS,
    *gsm8k.WORKING_TAGS,
    "<answer>46</answer>",
    "<answer>\n46\n</answer>",
    "<reasoning>\nso\n</reasoning>\n<answer>\n46\n</answer>",
    "<start_working_out>so<end_working_out><SOLUTION>46</SOLUTION>",
]
ROW = {"answer": "46", "numbers": [20, 26, 2, 23], "target": 46, "use_all": False}


def texts(count, pieces=PIECES, seed=0):
    rng = random.Random(seed)
    return [
        "",
        " ",
        *pieces,
        *("".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(count)),
    ]


def score_and_why(function, text, row=ROW):
    [score] = function(
        prompts=[""], completions=[text], **{name: [value] for name, value in row.items()}
    )
    why = explanation(function, text, row, 5.0)
    assert why.reason and not why.reason.startswith("(its explanation"), (function, text, why)
    assert all(0 <= start < end <= len(text) for _, start, end in why.marks)
    return score, why


# what is said is what was decided

RIGHT = {  # function -> (full marks, what the reason says then and only then)
    arithmetic.number_found_reward: (1.0, "the last number is"),
    arithmetic.correct_number_reward: (3.0, "which is right"),
    arithmetic.exact_answer_reward: (1.0, "is exactly"),
    arithmetic.proximity_reward: (1.0, "which is right"),
    gsm8k.correctness_reward_func: (2.0, "which is right"),
    gsm8k.int_reward_func: (0.5, " is spelt"),
    gsm8k.strict_format_reward_func: (0.5, "line by line"),
    gsm8k.soft_format_reward_func: (0.5, "all tags are there once"),
    gsm8k.solution_format_reward: (1.0, "all tags are there once"),
    gsm8k.solution_proximity_reward: (1.0, "which is right"),
    arithmetic.countdown_format_reward: (1.0, "it keeps the rules"),
    arithmetic.countdown_correct_reward: (1.0, "which is right"),
    arithmetic.countdown_closeness_reward: (1.0, "which is right"),
}


@pytest.mark.parametrize("function", RIGHT, ids=lambda f: f.__name__)
def test_the_reason_says_what_the_score_says(function):
    full, words = RIGHT[function]
    seen = set()
    for text in texts(600):
        score, why = score_and_why(function, text)
        assert (score == full) == (words in why.reason), (text, score, why)
        seen.add(score == full)
    assert seen == {True, False}


def test_what_is_marked_is_what_was_read():
    for text in texts(600):

        def marked(function):
            return [text[start:end] for _, start, end in score_and_why(function, text)[1].marks]

        number = marked(arithmetic.correct_number_reward)
        assert [last_number(piece) for piece in number] == (
            [] if last_number(text) is None else [last_number(text)]
        )
        answer = gsm8k.answer_text(text)
        assert marked(gsm8k.int_reward_func) == ([answer] if answer else [])
        assert marked(arithmetic.countdown_format_reward) == (
            [procedural.stated_answer(text)] if procedural.stated_answer(text) else []
        )
        assert len(marked(gsm8k.xmlcount_reward_func)) == sum(text.count(tag) for tag in gsm8k.TAGS)


def test_counted_tags():
    seen = set()
    for text in texts(500):
        score, why = score_and_why(gsm8k.xmlcount_reward_func, text)
        late = "after the end" in why.reason
        assert late or int(why.reason[0]) == score / 0.125
        seen.add(late)
    assert seen == {True, False}


def test_mathematics_and_procedural_tasks():
    how = explainer(procedural.math_points)
    assert how(r"7 \boxed{\frac{1}{2}}", answer="1/2") == Explanation(
        "what stands in the last box is compared with '1/2' by math-verify", (("box", 9, 20),)
    )
    assert "no box" in how("1/2", answer="1/2").reason
    entry = explainer(functools.partial(procedural.procedural_reward, ways=("tags",)))
    assert entry("<answer> 4 </answer>", task="leg_counting", config="{}", entry="{}").marks == (
        ("answer tags", 9, 10),
    )
    assert (
        entry("4", task="leg_counting").reason == "it states no answer"
        and "not shown to" in entry("<answer>exit()</answer>", task="n_queens").reason
    )


def test_rubric_and_readability():
    rubric = Rubric(
        {
            "polite": (lambda text: "please" in text, 2.0),
            "near": (lambda text, answer: 0.25 * (answer in text), 4.0),
        }
    )
    assert explanation(rubric, "46, please", ROW, 1.0).reason == "polite: 2 of 2; near: 1 of 4"
    assert (
        "long words"
        in explanation(readability_penalty, "incomprehensibilities " * 30, ROW, 1.0).reason
    )


def test_every_reward_function_of_the_library_is_explained():
    for module in (arithmetic, gsm8k):
        functions = [
            value
            for name, value in vars(module).items()
            if re.search("_reward(_func)?$", name)
            and getattr(value, "__module__", "") == module.__name__
        ]
        assert functions and all(explainer(function) for function in functions)
    assert explainer(length_penalty(1, 2)) is None and explainer(print) is None


# programs

BLOCKS = [
    "```python\n",
    "```\n",
    "~~~py\n",
    "~~~\n",
    "x = 1\n",
    "    y = 2\n",
    "```bash\nls\n```\n",
    "words ",
    "analysis",
    "assistantfinal",
    "<|channel|>final<|message|>",
    "<|channel|>analysis<|message|>",
    "<|return|>",
    "<|end|>",
    "\n",
    "\r\n",
    "`",
    "```",
]


def test_marks_of_programs():
    seen = set()
    for text in texts(2000, BLOCKS):
        found, marks, channel = (
            last_program(text),
            {name: text[start:end] for name, start, end in program_marks(text)},
            final_channel(text),
        )
        code = None if "program" not in marks else textwrap.dedent(marks["program"]).rstrip() + "\n"
        assert (
            code == found.code
            and marks.get("final channel", text if channel is not None else None) == channel
        )
        seen.add((code is None, "final channel" in marks))
    assert len(seen) == 4


def test_a_report_is_asked_for_again_and_not_judged_again():
    judged = []
    once = OnceABatch(lambda texts, step: [judged.append(text) or text.upper() for text in texts])
    assert (
        once(["a", "b"], {}) == ["A", "B"]
        and once.of("b") == "B"
        and judged == ["a", "b"]
        and once.of("c") == "C"
        and judged == ["a", "b", "c"]
    )


@pytest.mark.parametrize(
    "rewards, good, stage",
    [
        (StrategyRewards(games=1, secret="0", game_s=3.0), CORNER, "plays"),
        (
            MatmulRewards(secret="0", size=16, trials=2),
            TASKS["matrices"]().examples["three loops"].strip("`").removeprefix("python\n"),
            "right",
        ),
    ],
    ids=["2048", "matrices"],
)
def test_programs_are_judged_once_and_explained(rewards, good, stage):
    good, bad = f"assistantfinal```python\n{good}```", "```python\nimport numpy\n```"
    calls, judge = [], rewards.judge
    rewards.reports.judge = lambda texts, step: calls.append(texts) or judge(texts, step)
    first, second, third = judge_group(RewardTask(rewards.functions()), [good, bad, "I give up."])
    assert calls == [[good, bad, "I give up."]]
    assert all(
        one.why.reason.startswith(f"{stage}: ")
        and one.score >= 0
        and [name for name, _, _ in one.why.marks] == ["final channel", "program"]
        for one in first
    )
    assert all(
        one.score == 0
        and one.why.reason == "cheats: it imports more than the standard library: numpy"
        for one in second
    )
    assert third[0].why == Explanation("no code: there is no fenced block of Python")


# asking


def silent(completions, **columns):
    return [None for _ in completions]


def broken(completions, **columns):
    raise KeyError("<b>no</b>")


def words(completions, **columns):
    return "very good"


def too_few(completions, **columns):
    return [1.0]


def infinite(completions, **columns):
    return [math.inf for _ in completions]


def sleepy(completions, **columns):
    time.sleep(30)


def leaves(completions, **columns):
    raise SystemExit(3)


def narrow(completions):
    return [1.0 for _ in completions]


def odd(completions, **columns):
    return SimpleNamespace(tolist=lambda: 1 / 0)


def mixed(completions, **columns):
    return [1.0, None]


async def later(completions, **columns):
    return [2.0 for _ in completions]


async def never(completions, **columns):
    raise ValueError("not today")


@pytest.mark.parametrize(
    "function, expected",
    [
        (silent, ""),
        (mixed, ""),
        (later, ""),
        (broken, "it raised KeyError"),
        (words, "'words' returned 'very good'; it must return a list with one number"),
        (too_few, "returned 1 rewards for 2 completions"),
        (infinite, "inf"),
        (leaves, "it raised SystemExit"),
        (narrow, "it raised TypeError"),
        (never, "it raised ValueError: not today"),
        (odd, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_is_a_sentence(function, expected):
    scores, fault = ask(
        function, {"prompts": ["", ""], "completions": ["a", "b"], "answer": ["1", "1"]}, 5.0
    )
    assert len(scores) == 2 and expected in fault and bool(fault) == bool(expected)
    assert not fault or all(map(math.isnan, scores))
    judged = judge_group(
        RewardTask([function, arithmetic.number_found_reward], "", {"answer": "1"}), ["a", "b"]
    )
    assert [total(said, [1.0, 1.0]) for said in judged] == [
        -1.0 + (0.0 if math.isnan(score) else score) for score in scores
    ]
    assert group_html(["a", "b"], judged, [1.0, 1.0])


def test_a_function_that_hangs_holds_nobody_up():
    def explains_for_ever(text, **row):
        time.sleep(30)

    class Slow:
        explain = staticmethod(explains_for_ever)

        def __call__(self, completions, **columns):
            return [1.0 for _ in completions]

    began = time.monotonic()
    judged = judge_group(RewardTask([sleepy, sleepy, Slow()]), ["a", "b"], timeout_s=0.2)
    assert time.monotonic() - began < 10
    assert all(
        "not done after 0.2 s" in one.fault and "isolated" in one.fault
        for said in judged
        for one in said[:2]
    )
    assert [said[2].score for said in judged] == [1.0, 1.0] and "0.2 s" in judged[0][2].why.reason


def test_isolated_functions_are_explained_and_their_faults_named():
    with (
        isolated("grpo_nb.environments.gsm8k:int_reward_func") as good,
        isolated("time:sleep") as bad,
        pytest.warns(UserWarning, match="sleep"),
    ):
        [(one, two)] = judge_group(RewardTask([good, bad]), ["<answer>46</answer>"])
    assert (
        one
        == Judgement(
            "int_reward_func",
            0.5,
            Explanation("'46' is spelt as a whole number", (("answer", 8, 10),)),
        )
        and "TypeError" in two.fault
    )
    with isolated(
        "grpo_nb.environments.procedural:procedural_reward", arguments={"ways": ("tags",)}
    ) as tags:
        assert (
            explanation(tags, "46", {"task": "leg_counting"}, 1.0).reason == "it states no answer"
        )


def test_functions_are_given_what_the_trainer_gives():
    seen = []

    def look(
        prompts,
        completions,
        completion_ids,
        trainer_state,
        log_metric,
        log_extra,
        answer,
        **columns,
    ):
        seen.append((prompts, completions, completion_ids, answer, columns))
        log_metric("m", 1.0)
        log_extra("remark", [f"about {text[0]['content']}" for text in completions])
        return [float(trainer_state.global_step) for _ in completions]

    prompt = [{"role": "user", "content": "?"}]

    def tokenizer(text, add_special_tokens):
        return {"input_ids": list(text.encode())}

    judged = judge_group(
        RewardTask(look, prompt, {"answer": "1", "more": [1, 2]}, tokenizer=tokenizer), ["a", "b"]
    )
    assert seen == [
        (
            [prompt] * 2,
            [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]],
            [[97], [98]],
            ["1", "1"],
            {"more": [[1, 2], [1, 2]]},
        )
    ]
    assert [said[0].why.reason for said in judged] == ["remark: about a", "remark: about b"]
    assert (
        judge_group(RewardTask(length_penalty(0, 4), "", tokenizer=tokenizer), ["abcd"])[0][0].score
        == -1
    )


# explanations of others


class Own:
    def __init__(self, found):
        self.found = found

    def reward(self, completions, **columns):
        return [1.0 for _ in completions]

    def explain(self, text, **row):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    "found, expected",
    [
        ("a string", Explanation("a string")),
        (Explanation("good", (("x", 0, 1),)), Explanation("good", (("x", 0, 1),))),
        (
            Explanation("far", (("x", 0, 9), ("y", -1, 1), ("z", 1, 1), ("w", 1, 2))),
            Explanation("far", (("w", 1, 2),)),
        ),
        (None, "must be an Explanation or a string"),
        (7, "must be an Explanation or a string"),
        (Explanation("bad", (("x", "0", None),)), "must be an Explanation"),
        (Explanation("bad", 3), "must be an Explanation"),
        (ValueError("oh"), "raised ValueError: oh"),
    ],
)
def test_explanations_that_others_write(found, expected):
    for function in (Own(found).reward, functools.partial(Own(found).reward)):
        why = explanation(function, "ab", {"answer": "1"}, 1.0)
        assert (
            why == expected
            if isinstance(expected, Explanation)
            else expected in why.reason and not why.marks
        )


def test_a_function_that_empties_its_lists_harms_no_other():
    def empties(completions, answer, log_extra, **columns):
        completions.clear(), answer.clear(), log_extra("remark", None), log_extra("short", ["one"])
        return [1.0, 1.0]

    judged = judge_group(
        RewardTask([empties, arithmetic.correct_number_reward], "", {"answer": "46"}), ["46", "1"]
    )
    assert [[one.score for one in said] for said in judged] == [
        [1.0, 3.0],
        [1.0, -3.0],
    ] and not judged[0][0].why.reason


def test_a_column_may_have_any_name():
    row = {
        "text": "t",
        "self": "s",
        "function": "f",
        "answer": "46",
        "prompts": "p",
        "completions": "c",
    }
    judged = judge_group(RewardTask([arithmetic.correct_number_reward], "?", row), ["46"])
    assert judged[0][0].score == 3 and "which is right" in judged[0][0].why.reason


# the page


class Page(HTMLParser):
    "Tags and text of a page."

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.text += data


OURS = {"div", "mark", "span", "table", "tr", "th", "td", "svg", "path", "b", "br", "i"}


def test_nothing_that_is_said_becomes_markup():
    nasty = '<script>alert(1)</script><img src=x onerror="alert(2)">"\'&amp;</div></td>'

    def reward(completions, **columns):
        return [1.0 for _ in completions]

    def fails(completions, **columns):
        raise ValueError(nasty)

    reward.__name__ = fails.__name__ = nasty
    reward.explain = lambda text, **row: Explanation(nasty, ((nasty, 0, len(text)), ("<b>", 3, 9)))
    for group in ([nasty], [nasty, nasty * 2]):
        page = Page(group_html(group, judge_group(RewardTask([reward, fails]), group), [1.0, 1.0]))
        assert set(page.tags) <= OURS and set(page.attributes) <= {
            "style",
            "class",
            "title",
            "role",
            "aria-label",
            "viewbox",
            "width",
            "height",
            "d",
            "fill",
            "stroke",
            "stroke-width",
        }
        assert page.text.count(nasty) >= 3 * len(group)
    box = rewards_widget(RewardTask([reward], nasty, {}, {"one": nasty}))
    page = box._repr_mimebundle_()[0]["text/html"]
    assert set(Page(page).tags) <= OURS and nasty in Page(page).text
    held = json.loads(html.unescape(re.search("data-values='([^']*)'", page)[1]))
    assert held["tasks"]["yours"]["examples"] == {"one": nasty} and held["text"] == nasty
    box.row = nasty
    assert "JSON" in box.problem


# the widget


def test_the_widget_follows_every_control():
    box = rewards_widget()
    assert "the last number is 7" in box.judged[0][0][1] and box.tasks["sums"]["prompt"] == "12+34="
    box.row = '{"answer": 7}'
    assert "which is right" in box.judged[0][1][1]
    box.text = f"1\n {NEXT} \n2\n{NEXT}\n7"
    assert [said[1][0] for said in box.judged] == [-3.0, -3.0, 3.0]
    before = box.judged
    for wrong in ("46", "[1]", "{"):
        box.row = wrong
        assert "JSON" in box.problem and box.judged == before
    box.row = '{"answer": "2"}'
    assert not box.problem and [said[1][0] for said in box.judged] == [-3.0, 3.0, -3.0]
    for name in ("countdown", "GSM8K", "e-mail", "sums"):
        box.task = name
        task = TASKS[name]()
        first = next(iter(task.examples.values()))
        assert box.text == first and box.weights == task.weights
        assert read_row(box.row) == task.row
        (said,) = judge_group(task, [first])
        assert box.judged == [said_of(said)]
        read = any(marks for _, _, marks, _ in box.judged[0])
        assert read == (name != "e-mail")  # a rubric marks nothing


JUDGE = """import(process.argv[1]).then(async ({ judge }) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  const told = JSON.parse(text).map((one) => judge(...one));
  process.stdout.write(JSON.stringify(told));
})"""
SCRIPTS = Path(room.__file__).parent / "js"
SUMS = [
    arithmetic.number_found_reward,
    arithmetic.correct_number_reward,
    arithmetic.exact_answer_reward,
    arithmetic.proximity_reward,
]


@pytest.mark.parametrize("function", [*SUMS, *gsm8k.GSM8K_REWARDS], ids=lambda f: f.__name__)
def test_the_browser_pays_what_the_library_pays(function):
    pieces = [*PIECES, "<answer>", "</answer>", ".5", "-", "/", "$", ","]
    drawn = texts(900, pieces, seed=1)
    cases = [[function.__name__, text, {"answer": "46"}] for text in drawn]
    told = json.loads(run_module(JUDGE, SCRIPTS / "judges.js", json.dumps(cases)))
    for text, said in zip(drawn, told, strict=True):
        why = function.explain(text, answer="46")
        assert said["points"] == pytest.approx(why.points, abs=1e-9), text
        if function is not arithmetic.proximity_reward:  # a box and LaTeX are not marked
            assert said["marks"] == [list(mark) for mark in why.marks], text


HERE = """import(process.argv[1]).then(async ({ advantagesOf, judgeHere, splitGroup, totalOf }) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  const told = JSON.parse(text).map((values) => {
    const texts = splitGroup(values.text);
    const totals = judgeHere(values, texts).map((said) => totalOf(said, values.weights));
    return { texts, totals, advantages: advantagesOf(totals) };
  });
  process.stdout.write(JSON.stringify(told));
})"""


def test_a_page_without_python_has_the_same_totals_and_advantages():
    "Sums and GSM8K by its own judges, the others by what is stored of their examples."
    tasks = {name: TASKS[name]() for name in ("sums", "GSM8K", "countdown", "e-mail")}
    held = {name: held_task(task, 5.0) for name, task in tasks.items()}
    cases = [
        {
            "tasks": held,
            "task": name,
            "row": held[name]["row"],
            "text": f"\n{NEXT}\n".join(task.examples.values()),
            "weights": [1.0, 0.5, 2.0, -1.0, 1.0][: len(task.functions)],
        }
        for name, task in tasks.items()
    ]
    told = json.loads(run_module(HERE, SCRIPTS / "rewards.js", json.dumps(cases)))
    for values, said, task in zip(cases, told, tasks.values(), strict=True):
        assert said["texts"] == split_group(values["text"]) == list(task.examples.values())
        judged = judge_group(task, said["texts"])
        totals = [total(one, values["weights"]) for one in judged]
        assert said["totals"] == pytest.approx(totals)
        scores = [[one.score for one in row] for row in judged]
        ours = group_advantages(scores, len(scores), weights=values["weights"]).values
        assert said["advantages"] == pytest.approx(ours.tolist(), abs=1e-4)


def test_a_task_that_cannot_be_made_says_why(monkeypatch):
    def missing():
        raise ImportError("math_verify cannot be imported; pip install 'grpo_nb[tasks]'")

    monkeypatch.setitem(TASKS, "mathematics", missing)
    box = rewards_widget()
    box.task = "mathematics"
    assert "grpo_nb[tasks]" in box.problem and "mathematics" not in box.tasks
    box.task = "sums"
    assert not box.problem and "the last number is 7" in box.judged[0][0][1]


def test_a_task_of_ones_own():
    box = rewards_widget(RewardTask([silent, too_few], "?", weights=[0.0, -3.0]))
    assert box.names == ["yours"] and not box.text and box.weights == [0.0, -3.0]
    assert box.judged[0][0][0] is None
    box.text = f"a\n{NEXT}\nb"
    assert "returned 1 rewards for 2 completions" in box.judged[0][1][3]
    with pytest.raises(ValueError, match="there is no task 'chess'; there are 'sums'"):
        rewards_widget("chess")
    with pytest.raises(ValueError, match="1 weights and 2 reward functions"):
        RewardTask([silent, broken], weights=[1.0])
    with pytest.raises(ValueError, match="No reward source"):
        RewardTask([])


def test_pasted_groups():
    assert (
        split_group("") == [""]
        and split_group("a\n====\nb") == ["a\n====\nb"]
        and split_group(f"{NEXT}\na\n{NEXT}") == ["", "a", ""]
    )
    assert read_row("") == {} and room.NEXT not in "".join(
        text
        for name in ("sums", "GSM8K", "countdown", "e-mail")
        for text in TASKS[name]().examples.values()
    )


def test_a_task_that_loads_says_so(monkeypatch):
    shown = []

    def slow():
        shown.append(box.problem)
        raise ImportError("it is not installed")

    monkeypatch.setitem(room.TASKS, "slow", slow)
    box = rewards_widget("sums")
    box.task = "slow"
    assert shown == ["loading slow …"] and box.problem == "it is not installed"
    box.text = "46"
    assert box.problem == "it is not installed"
    assert "it is not installed" in Page(box.page()).text
