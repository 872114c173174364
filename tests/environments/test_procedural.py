"""environments.procedural: every task of reasoning-gym through the adapter, answers that are
programs, mathematics in a worker."""

import functools
import inspect
import json
import math
import re
import sys
import threading
import time
import warnings

import pytest

from grpo_nb.environments.isolated_rewards import IsolatedReward
from grpo_nb.environments.procedural import (
    EVALUATES_FORMULAS,
    EVALUATES_LISTS,
    Task,
    from_json,
    harmless,
    make_task,
    math_points,
    math_reward,
    problems,
    procedural,
    procedural_reward,
    shares,
    stated_answer,
    task_names,
    task_score,
    to_json,
)

NAMES = task_names()
QUIET = dict(size=2, isolate=False, unique=False)
SMALL = {"min_terms": 2, "max_terms": 2}
SLOW = {"knight_swap"}  # a second for each problem


def columns(data):
    return {name: data[name][:] for name in ("task", "config", "entry")}


# Every task


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name) for name in NAMES if name not in SLOW]
)
def test_every_task_becomes_data_and_a_reward(name):
    data, reward = procedural(name, **QUIET)
    assert (
        data.column_names == ["prompt", "answer", "task", "config", "entry"]
        and len(data) == 2
        and set(data["task"]) == {name}
    )
    for row in data:
        entry, theirs = from_json(row["entry"]), make_task(name, {}, size=2, seed=0)
        assert row["prompt"] == entry["question"] and json.loads(row["entry"])
        for answer in (row["answer"], "junk", "12", "", None, "[[1, 2], [3]]", "x" * 500):
            if answer is not None and harmless(name, answer):
                try:
                    expected = float(theirs.score_answer(answer, entry))
                except Exception:
                    expected = 0.0
                assert (
                    task_score(name, row["config"], row["entry"], answer)
                    == (expected if answer else 0.0)
                    and 0 <= expected <= 1
                )
    honest = [answer for answer in data["answer"] if answer is not None]
    if honest:
        assert all(
            task_score(row["task"], row["config"], row["entry"], row["answer"]) == 1
            for row in data
            if row["answer"] is not None
        )
    assert len(reward(completions=["junk"] * 2, **columns(data))) == 2


def test_entries_survive_being_text():
    for name in ("arc_agi", "rearc", "chain_sum", "family_relationships"):
        entry = make_task(name, {}, size=1, seed=0)[0]
        assert from_json(to_json(entry)) == entry
    for value in (
        None,
        1,
        0.5,
        "x",
        [],
        (),
        {},
        [(1, [2, (3,)])],
        {1: 2, (1, 2): "x", None: ()},
        {"__tuple__": [1]},
        {"a": {"__dict__": 3}},
    ):
        assert from_json(to_json(value)) == value
    with pytest.raises(TypeError):
        to_json({1, 2})


# What is evaluated, and is not


def test_every_scorer_that_evaluates_an_answer_is_known():
    "A new version of the library may bring others."
    found = set()
    for name in NAMES:
        cls = type(make_task(name, {}, size=1, seed=0))
        if re.search(
            r"(\beval|\bexec|parse_expr|sympify|parse_latex|literal_code)\(\s*(user_)?answer",
            inspect.getsource(sys.modules[cls.__module__]),
        ):
            found.add(name)
    assert found == set(EVALUATES_LISTS) | set(EVALUATES_FORMULAS)


PROGRAMS = [
    "open({file!r}, 'w')",
    "[open({file!r}, 'w')]",
    "__import__('os').system('touch {file}')",
    "[__import__('pathlib').Path({file!r}).touch()]",
    "(lambda: open({file!r}, 'w'))()",
    "exec('open({file!r}, chr(119))')",
    "[x for x in [open({file!r}, 'w')]]",
    "f\"{{open({file!r}, 'w')}}\"",
    "x + open({file!r}, 'w')",
    "[].__class__",
    "().__class__.__base__.__subclasses__()",
    "print(1)",
    "exit()",
    "quit()",
    "getattr(x, 'y')",
    "eval('1')",
    "globals()",
    "sympify('1')",
    "lambdify(x, x)",
    "Symbol('x')",
    "x.func",
    "x .func",
    "(x).func",
    "sin(x).diff(x)",
    "preview(x)",
    "input()",
    "breakpoint()",
    "a:=1",
    "'a'",
    '"a"',
    "x;y",
    "__builtins__",
    "ｅxit()",
    "e\u0301val(1)",
    "x\\\n+1",
    "[1][0]",
    "{{1: 2}}",
    "@x",
    "1 if x else 2",
    "not x",
    "x!=y",
    "`x`",
    "$x$",
    "yield x",
]


@pytest.mark.parametrize("name", [*EVALUATES_LISTS, *EVALUATES_FORMULAS])
def test_programs_are_answers_that_are_wrong(name, tmp_path):
    data, _ = procedural(name, **QUIET)
    for program in PROGRAMS:
        answer = program.format(file=str(tmp_path / "was here"))
        assert task_score(name, data[0]["config"], data[0]["entry"], answer) < 1, answer
        if name in EVALUATES_FORMULAS or "(" in answer:
            assert not harmless(name, answer), answer
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, answers",
    [
        (
            "simple_integration",
            [
                "x**2/2 + 3*x + C",
                "-2*cos(x)/3 + 1.5*x**3 + C",
                "exp(x) + log(x)*sqrt(2) + C",
                "2.5e3*x",
            ],
        ),
        ("puzzle24", ["(8 - 4) * 6", "8/(3-8/3)"]),
        ("polynomial_multiplication", ["6*x**2 - 5*x*y + 1", "12*k**3"]),
        ("spiral_matrix", ["1 2 3", "[1, 2, 3]", "(1, 2)"]),
        ("n_queens", ["[['Q', '_'], ['_', 'Q']]"]),
        ("string_insertion", ["['A', 'B']", "AABB"]),
        ("chain_sum", ["anything(goes).here"]),
    ],
)
def test_honest_answers_are_harmless(name, answers):
    assert all(harmless(name, answer) for answer in answers)


@pytest.mark.parametrize("name", [*EVALUATES_LISTS, *EVALUATES_FORMULAS])
def test_the_tasks_own_answers_are_harmless(name):
    entries = list(make_task(name, {}, size=15, seed=0))
    assert all(
        harmless(name, entry["answer"]) or "Integral" in entry["answer"] for entry in entries
    )
    assert all(harmless(name, entry["answer"]) for entry in problems(Task(name), 5, 0, False))


def test_a_question_in_other_words_is_no_answer():
    made = make_task("intermediate_integration", {}, size=40, seed=0)
    for entry in (made[i] for i in range(40)):
        if "Integral" in entry["answer"]:
            break
    assert (
        made.score_answer(entry["answer"], entry) == 1
        and task_score("intermediate_integration", "{}", to_json(entry), entry["answer"]) == 0
    )
    assert not any(
        "Integral" in row["answer"]
        for row in procedural("intermediate_integration", size=15, isolate=False)[0]
    )


# Answers in completions


@pytest.mark.parametrize(
    "text, ways, answer",
    [
        (r"\boxed{7} then \boxed{8}", None, "8"),
        (r"\boxed{\frac{1}{2}}", None, r"\frac{1}{2}"),
        ("<answer>7</answer><answer> 8\n</answer>", None, "8"),
        ("a\nb\n\n", None, "b"),
        ("", None, ""),
        ("", ("tags",), None),
        (r"<answer>7</answer> \boxed{8}", None, "8"),
        (r"<answer>7</answer> \boxed{8}", ("tags", "boxed"), "7"),
        ("x", ("boxed", "tags"), None),
        ("<answer>7", ("tags",), None),
        ("<answer>6<answer>7</answer>", ("tags",), "7"),
        ("<answer>one\ntwo</answer>", ("tags",), "one\ntwo"),
        (r"\boxed{7", ("boxed", "line"), r"\boxed{7"),
    ],
)
def test_where_an_answer_is_looked_for(text, ways, answer):
    assert stated_answer(text, *([ways] if ways else [])) == answer


def test_long_texts_are_searched_quickly():
    began = time.process_time()
    for text in ("<answer>" * 20_000, r"\boxed{" * 20_000, "<answer>" + "x" * 200_000):
        stated_answer(text)
    assert time.process_time() - began < 5


# Mixtures


def test_a_mixture_has_the_shares_and_the_right_scorers():
    data, reward = procedural(
        [Task("chain_sum", 3, SMALL), "gcd", Task("count_bits", 0.5)], size=90, isolate=False
    )
    assert {name: data["task"][:].count(name) for name in set(data["task"])} == {
        "chain_sum": 60,
        "gcd": 20,
        "count_bits": 10,
    }
    assert len(set(data["prompt"])) == 90 and data["task"][:60] != ["chain_sum"] * 60
    assert reward(completions=data["answer"][:], **columns(data)) == [1.0] * 90
    assert sum(reward(completions=data["answer"][1:] + data["answer"][:1], **columns(data))) < 45
    half = data.shuffle(seed=1).select(range(40)).filter(lambda row: row["task"] != "gcd")
    assert reward(completions=half["answer"][:], **columns(half)) == [1.0] * len(half)


def test_the_same_seed_the_same_data():
    def make(seed):
        return procedural(["gcd", "chain_sum"], size=20, seed=seed, isolate=False)[0].to_list()

    assert make(5) == make(5) != make(6)


def test_shares():
    for total in (1, 7, 100):
        for weights in ([1], [1, 1, 1], [0.1, 5, 2.5], [1e-9, 1]):
            assert sum(shares(total, weights)) == total and all(
                abs(n - total * w / sum(weights)) < 1
                for n, w in zip(shares(total, weights), weights)
            )


def test_prompts_as_they_are_wanted():
    task = Task(
        "chain_sum",
        config=SMALL,
        prompt=lambda entry: entry["metadata"]["expression"].replace(" ", "") + "=",
    )
    data, _ = procedural(task, size=5, isolate=False, instruction=" Go!")
    assert all(re.fullmatch(r"-?\d+[+-]\d+= Go!", prompt) for prompt in data["prompt"])
    chat, reward = procedural(task, size=5, isolate=False, chat=True)
    assert chat[0]["prompt"] == [
        {"role": "user", "content": data[0]["prompt"].removesuffix(" Go!")}
    ]
    assert (
        reward(
            completions=[
                [{"role": "assistant", "content": rf"\boxed{{{answer}}}"}]
                for answer in chat["answer"]
            ],
            **columns(chat),
        )
        == [1.0] * 5
    )


def test_partial_credit_and_ways_are_settings():
    data, lenient = procedural(Task("chain_sum", config=SMALL), size=3, isolate=False)
    _, strict = procedural(
        Task("chain_sum", config=SMALL), size=3, isolate=False, partial=False, ways=("boxed",)
    )
    near = [f"{answer} or so" for answer in data["answer"]]
    assert (
        all(0 < score < 1 for score in lenient(completions=near, **columns(data)))
        and strict(completions=near, **columns(data)) == [0.0] * 3
    )
    assert (
        strict(completions=[rf"\boxed{{{answer}}}" for answer in data["answer"]], **columns(data))
        == [1.0] * 3
        and strict(completions=data["answer"][:], **columns(data)) == [0.0] * 3
    )
    assert isinstance(strict, functools.partial) and strict.func is procedural_reward


@pytest.mark.parametrize(
    "tasks, settings, words",
    [
        ("chainsum", {}, "no task 'chainsum'; the closest are 'chain_sum'"),
        ("", {}, "no task ''"),
        (
            Task("chain_sum", config={"max_term": 2}),
            {},
            "'max_term'. It has .*max_terms",
        ),
        (Task("chain_sum", config={"min_terms": 9, "max_terms": 2}), {}, "refuses the settings"),
        (Task("chain_sum", config={"seed": 1}), {}, "values for keyword argument 'seed'. It has"),
        ([], {}, "give a task or several"),
        (Task("gcd", 0), {}, r"weights \[0\] gets one"),
        (Task("gcd", -1), {}, r"weights \[-1\] gets one"),
        (Task("gcd", math.inf), {}, r"weights \[inf\] gets one"),
        (["gcd", "lcm"], dict(size=1), "of 1 rows not each of the tasks"),
        ([Task("gcd", 1e-9), "lcm"], {}, "rows enough for the smallest"),
        ("gcd", dict(ways=("box",)), "ways holds 'box'"),
        (
            Task("chain_sum", config={**SMALL, "max_digits": 1}),
            dict(size=500),
            "different questions",
        ),
    ],
)
def test_what_is_refused(tasks, settings, words):
    with pytest.raises(ValueError, match=words):
        procedural(tasks, **{"size": 10, "isolate": False, **settings})


@pytest.mark.parametrize(
    "module, ask",
    [
        ("reasoning_gym", lambda: procedural("gcd")),
        ("reasoning_gym", task_names),
        ("math_verify", math_reward),
    ],
)
def test_without_the_libraries_the_error_says_what_to_install(monkeypatch, module, ask):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=rf"{module} cannot be imported .*pip install 'grpo_nb\[tasks\]'"
    ):
        ask()


def test_neighbouring_seeds_overlap_and_unique_data_do_not():
    "The trap that the notebook warns of is still there."
    first, second = (
        {entry["question"] for entry in make_task("chain_sum", {}, size=50, seed=seed)}
        for seed in (0, 1)
    )
    assert len(first & second) >= 45
    data = procedural("chain_sum", size=200, isolate=False)[0]
    assert len(set(data["prompt"])) == 200


# In a worker


@pytest.mark.long
def test_isolated_scores_are_the_same_and_a_hanging_scorer_costs_one():
    settings = dict(size=6, seed=2)
    data, reward = procedural(["countdown", "arc_agi"], each_timeout_s=3, **settings)
    with reward:
        assert isinstance(reward, IsolatedReward) and reward.__name__ == "procedural_reward"
        given, honest = (
            dict(prompts=data["prompt"][:], **columns(data)),
            [f"<answer>\n{answer}\n</answer>" for answer in data["answer"]],
        )
        assert reward(completions=honest, **given) == [1.0] * 6
        bad = data["task"][:].index("countdown")
        hostile = ["9**9**9**9" if i == bad else answer for i, answer in enumerate(honest)]
        with pytest.warns(UserWarning, match="1 of 6"):
            scores = reward(completions=hostile, **given)
        assert scores == [None if i == bad else 1.0 for i in range(6)]


RIGHT = [
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"$\frac12$", "It is $1/2$."),
    (r"\boxed{\frac{1}{2}}", r"\boxed{50\%}"),
    ("18", "18"),
    (18, r"\boxed{18.0}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}"),
    ("(1,2)", r"\boxed{(1,2)}"),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
    ("1,000", r"\boxed{1000}"),
    ("18", [{"role": "assistant", "content": r"\boxed{18}"}]),
    ("7", r"\boxed{3}, no, \boxed{7}"),
    ("2\\pi", r"\boxed{\pi \cdot 2}"),
]
WRONG = [
    ("18", ""),
    ("18", "no idea"),
    ("18", r"\boxed{}"),
    ("18", r"\boxed{17} \boxed{19}"),
    ("18", r"\boxed{17, 18, 19}"),
    ("18", r"18 \boxed{17}"),
    ("7", r"\boxed{9^{9^{9^{9}}}}"),
    ("7", r"\boxed{99999999!}"),
    ("18", r"\boxed{\infty}"),
    ("18", r"\boxed{x}"),
    ("18", r"\boxed{\frac{18}{0}}"),
    ("18", "{" * 3000),
    ("18", r"\boxed{" * 500),
    ("18", "\\" * 5000),
    ("18", "٣" * 100),
    ("0.333", r"\boxed{\frac13}"),
]


def test_mathematical_answers():
    with math_reward(timeout_s=120, each_timeout_s=20) as reward:
        assert reward.__name__ == "math_reward"
        assert reward(
            prompts=[""] * len(RIGHT),
            completions=[given for _, given in RIGHT],
            answer=[right for right, _ in RIGHT],
        ) == [1.0] * len(RIGHT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = reward(
                prompts=[""] * len(WRONG),
                completions=[given for _, given in WRONG],
                answer=[right for right, _ in WRONG],
            )
            unreadable = reward(prompts=["", ""], completions=["18", "18"], answer=["", "18"])
        assert set(scores) <= {0.0, None} and scores.count(None) <= 2 and unreadable == [None, 1.0]
        said = []
        thread = threading.Thread(
            target=lambda: said.append(
                reward(prompts=[""], completions=[RIGHT[0][1]], answer=[RIGHT[0][0]])
            )
        )
        thread.start()
        thread.join()
        assert said == [[1.0]]


def test_math_verify_refuses_to_work_in_a_thread():
    "The reason for the worker is still there."
    said = []

    def ask():
        try:
            math_points(["$1$"], ["1"])
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(said) == 1 and "thread" in said[0]
