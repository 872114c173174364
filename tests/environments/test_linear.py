"""Whatever reads a completion takes time in proportion to its length, on hostile texts too.

A model writes the text, and rewards run inside the training process: a regular expression that
tries every way to share n spaces holds the run. The functions are collected from the modules
themselves, so that a new one is timed without being named here; a pattern is timed where it is
used, by the functions that use it."""

import gc
import importlib
import inspect
import itertools
import pkgutil
import re
import time
import warnings
from contextlib import suppress
from random import Random

import pytest

import grpo_nb.environments as environments
from grpo_nb.environments.game2048 import StrategyRewards
from grpo_nb.environments.gsm8k import xmlcount_reward_func
from grpo_nb.environments.judge import Judge, judge_messages
from grpo_nb.environments.matmul import MatmulRewards
from grpo_nb.environments.procedural import (
    EVALUATES_FORMULAS,
    EVALUATES_LISTS,
    explain_task,
    harmless,
)
from grpo_nb.environments.rubric import Rubric, length_penalty
from grpo_nb.environments.sandbox import SandboxResult, check_only_stdlib_imports, parsed
from grpo_nb.environments.verifiers import Explanation, fenced_blocks
from grpo_nb.rollout.turns import FORMATS, HERMES, parse_hermes, parse_llama, typed
from grpo_nb.training.report import sample_html
from grpo_nb.training.reporting import samples_text, several_turns
from grpo_nb.widgets.dashboard import samples_table
from grpo_nb.widgets.rewards import Judgement, group_html

# parameters that hold what a model wrote
READS = ("text", "texts", "completion", "completions")
# parameters that hold what the author of a run or the data wrote, or what was read from a text
OURS = set(
    "answer api_key base_url clock config entry header instruction instructions keywords "
    "location log_metric message model move name names no numeral operations options param path "
    "phrase prepare prompt question reason recipient reply scale signature solution source split "
    "status system_prompt tags target task tasks things value wanted ways what why worked "
    "yes".split()
)
# the modules of which no function is called with a completion: programs are text to them, which
# a process of its own reads under a deadline
ELSEWHERE = {"supervisor", "isolated_rewards"}
# read by math-verify, which is another's library, in a process of its own with a deadline
ISOLATED = {"procedural.math_points", "procedural.procedural_reward"}

ROW = {
    "answer": "46",
    "numbers": [2, 3, 5, 7],
    "target": 10,
    "use_all": False,
    "task": "countdown",
    "wanted": ["Ann", "7"],
    "met": True,
    "yes": "{}",
    "no": "{}",
    "name": "mark",
    "phrase": "3 working days",
    "place": 5,
    "start": 0,
    "end": 1 << 30,
    "seeds": (1,),
    "drawn_from": "0",
    "rng": Random(0),
}


class NoSandbox:
    "A pool whose programs all fail, so that the time is that of the training process."

    protections = ()
    failed = loaded = SandboxResult(False, None, "no program is run here", "exception", 0.0)

    def run(self, *args, **settings):
        return self.failed

    def open(self, *args, **settings):
        return self

    call = run

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    close = __exit__


POOL = NoSandbox()
OBJECTS = {  # of the classes whose methods read completions; made for each text: some keep reports
    "Rubric": lambda: Rubric({"fenced": (lambda text: bool(fenced_blocks(text)), 1.0)}),
    "StrategyRewards": lambda: StrategyRewards(POOL, scale="published", secret="0"),
    "MatmulRewards": lambda: MatmulRewards(POOL, secret="0"),
    "ProgramRewards": lambda: StrategyRewards(POOL, scale="published", secret="0"),
    "OnceABatch": lambda: StrategyRewards(POOL, scale="published", secret="0").reports,
    "Judge": lambda: Judge(*"umikcl", 1, (0, 1), 1.0, 1.0, {}, "judge"),
}
OF_TEXT = {}  # class -> the text that was read last, and the object that has read it


def object_for(kind, text):
    "The object that reads a text, one for all methods: what the first has done is done."
    if OF_TEXT.get(kind, [None])[0] is not text:
        OF_TEXT[kind] = text, OBJECTS[kind]()
    return OF_TEXT[kind][1]


MADE = {  # what is made by a call, or takes a completion under another name
    "rubric.length_penalty()": lambda text: length_penalty(10, 20)(completion_ids=[text]),
    "judge.judge_messages": lambda text: judge_messages("question", text, "instructions"),
    "procedural.harmless lists": lambda text: harmless(EVALUATES_LISTS[0], text),
    "procedural.harmless formulas": lambda text: harmless(EVALUATES_FORMULAS[0], text),
    "procedural.explain_task": lambda text: explain_task(text, task=EVALUATES_FORMULAS[0]),
    "procedural.harmless literal": lambda text: harmless(EVALUATES_LISTS[0], f"[({text})]"),
}


def sample_of(text):
    "A completion as the log has it, in which a reward function quotes it."
    return {"step": 1, "prompt": text, "completion": text, "rewards": {"right": 1.0}} | {
        "extra": {"said": text},
        "advantage": 0.5,
        "turns": several_turns([{"role": "assistant", "content": text}] * 2),
    }


def seen(text):
    "A completion in the table of rewards."
    marks = xmlcount_reward_func.explain(text).marks
    one = [Judgement("tags", 1.0, Explanation(text, marks))]
    group_html([text, "4"], [one, one], [1.0])


MADE |= {  # parsers of calls, and what shows completions
    **{
        f"turns.format {i}": lambda text, parse=parse: parse(text)
        for i, parse in enumerate(FORMATS)
    },
    **{
        f"turns.call {i}": lambda text, parse=parse, marks=marks: parse(text.join(marks))
        for i, (parse, marks) in enumerate(
            [
                (parse_hermes, HERMES),
                (parse_hermes, (HERMES[0] + '{"name": "f", "arguments": {"x": ', "}}" + HERMES[1])),
                (parse_hermes, (HERMES[0] + "[f(x=", ")]" + HERMES[1])),
                (FORMATS[-2], ("<|tool_call_start|>[f(x=", ")]<|tool_call_end|>")),
                (parse_hermes, (HERMES[0] + "<function=f><parameter=x>", HERMES[1])),
                (parse_llama, ('{"name": "f", "parameters": {"x": ', "}}")),
                (FORMATS[0], ("<|channel|>commentary to=functions.f<|message|>", "<|call|>")),
            ]
        )
    },
    "turns.typed": lambda text: typed(text, ["object", "integer"]),
    "samples.samples_text": lambda text: samples_text([sample_of(text)]),
    "report.sample_html": lambda text: sample_html(sample_of(text), ["right"]),
    "dashboard.samples_table": lambda text: samples_table([sample_of(text)]),
    "reward_table.tables": seen,
}


def reads_completions(function):
    return any(name in READS for name in inspect.signature(function).parameters)


def caller(function, of=None):
    """A function of one text that calls `function` with it, and with the row's columns by name.
    of: text -> the same method of the object for that text."""
    parameters = inspect.signature(function).parameters
    many = "completions" in parameters
    several = many or getattr(function, "__qualname__", "").endswith("Rewards.judge")
    given = {"pool": POOL} if "pool" in parameters else {}
    if many and "columns" in parameters and not varied(parameters["columns"]):
        given["columns"] = {}
    for name, parameter in parameters.items():
        if name in ROW and name not in READS and parameter.default in (parameter.empty, None):
            given[name] = [ROW[name]] if many else ROW[name]
    return lambda text: (of(text) if of else function)([text] if several else text, **given)


def varied(parameter):
    "Whether it takes any keyword."
    return parameter.kind == parameter.VAR_KEYWORD


def public(module):
    "(name, object) of what a module defines: functions, and objects that are called."
    for name in module.__all__:
        found = getattr(module, name)
        ours = callable(found) and type(found).__module__.startswith("grpo_nb")
        if inspect.isfunction(found) or ours:
            yield name, found


def methods(module):
    "(class, method, function) of each method that reads a completion."
    for name in module.__all__:
        kind = getattr(module, name)
        members = inspect.getmembers(kind, inspect.isfunction) if inspect.isclass(kind) else ()
        for method, function in members:
            if not re.match("_(?!_call__)", method) and reads_completions(function):
                assert name in OBJECTS, f"{name}.{method} reads completions: add it to OBJECTS"
                yield name, method, getattr(OBJECTS[name](), method)


def rooms():
    "Every module in which something reads a completion."
    for info in pkgutil.iter_modules(environments.__path__):
        if info.name not in ELSEWHERE:
            yield info.name, importlib.import_module(f"{environments.__name__}.{info.name}")


def collected():
    "name -> function of one text, for everything that reads a completion."
    found = dict(MADE)
    for room, module in rooms():
        for name, thing in public(module):
            name = f"{room}.{name}"
            if name not in ISOLATED and name not in MADE and reads_completions(thing):
                reward = "completions" in inspect.signature(thing).parameters
                found[name] = (
                    caller(thing) if reward or inspect.isfunction(thing) else with_row(thing)
                )
        for kind, method, bound in methods(module):
            found[f"{room}.{kind}.{method}"] = caller(
                bound,
                lambda text, kind=kind, method=method: getattr(object_for(kind, text), method),
            )
    return found


def with_row(check):
    "A check of a mail, which finds its column in the row."
    return lambda text: check(text, **ROW)


READERS = collected()

# fmt: off
PIECES = [  # repeated to the length that is asked for
    " ", "\t", "\n", "a", "a ", "a\n", "_", "1", "1 ", ".", "1.", ",111", "1/", "-", "e1", "$",
    "`", "```\n", "```python\n", "~~~", "{", "}", "(", "[", "\\", "\\boxed{", "\\boxed ",
    "\\frac{1", "\\frac{1}{2}", "1\\times ", "10^", "{,}", "<", "<answer>", "</answer>",
    "<reasoning>", "</SOLUTION>", "<|channel|>", "<|channel|>final", "<|end|>", "analysis",
    "assistantfinal", "score", "score: 1\n", '{"score', '{"score(', ", ", "> ", "= ", "1+",
    "3 working ", "\u0301", "\u0316\u0301", "\u0f73",
]
AROUND = [
    ("```", "?"), ("1", "x"), ("\\boxed{", "1"), ("<answer>", "\n"), ('{"score"', "?"), ("_", "!"),
]
# fmt: on
TEXTS = {repr(piece): (("", piece, "")) for piece in PIECES} | {
    f"{before!r}, {piece!r}, {after!r}": (before, piece, after)
    for (before, after), piece in itertools.product(AROUND, (" ", "_", "1", "(", "`", "a "))
}
PROGRAM = [  # repeated inside of a program, and of an argument of a call
    "\u0316\u0301",
    "\u0f73\u0f71",
    "\uff9e\u0301",
    "\ufdfa",
    "(",
    "[",
    "{0:",
    "-",
    "not ",
    "lambda:",
    "f(a=class A(",
    "x=",
    "if x:\n ",
    "'a' ",
    "'\\d'\n",
    "9",
    "0x",
    "1e",
    "\\N{",
    "\\\n",
    "f'{",
    "@a\n",
    "*a,",
    "a.",
    "'x',$=",
    '"x",',
    "<parameter=x>",
    "</parameter>",
    '<|"|>',
    "\\u0000",
    "\ud800",
]
TEXTS |= {f"program {piece!r}": ("```python\nx", piece, "\n```\n") for piece in PROGRAM}
TEXTS["thoughts that never end"] = ("<think>\n", "\n</think>\n<answer>\n", "?")
FITTING = {  # reader -> a text that it takes, where it refuses any other at once
    "procedural.from_json": "[1, 2]",
    "arithmetic.read_expression": "20 - 5",
    "turns.format 0": "<|channel|>final<|message|>4",
    "turns.call 1": "[1]",
    "turns.call 2": "[1]",
    "turns.call 3": "'it's'",
    "turns.call 4": "1</parameter>",
    "turns.call 5": "[1]",
    "turns.call 6": '{"x": 1}',
}
LEAST_S = 0.005  # of processor time: below that it is noise
MOST_S = 0.5  # of processor time, for one text of `SHORT` characters
SHORT = 1 << 13  # characters
LONGEST = 1 << 17  # characters; what is done in 5 ms at that length holds nobody


def written(kind, length):
    "A hostile text of some characters."
    before, piece, after = TEXTS[kind]
    middle = piece * (length // len(piece) + 1)
    return before + middle[: length - len(before) - len(after)] + after


def seconds(function, text, tries, anew=True):
    "Processor time, the least of some tries; anew: nothing is known of the text."
    times = []
    for _ in range(tries):
        if anew:
            OF_TEXT.clear()
        began = time.process_time()
        with suppress(ValueError, RecursionError, MemoryError):
            function(text)
        times.append(time.process_time() - began)
    return min(times)


def growth(function, make, longest=LONGEST, tries=5, least_s=LEAST_S):
    """How much longer twice the text takes: the least of `tries`; where that is over 2.5, the least
    of five, there and at two and four times the length, since a text that outgrows a cache takes a
    single step. 0.0 for what is done in `least_s` at every length."""
    length = 64
    while seconds(function, make(length), 1) < least_s:
        length *= 2
        if length > longest:
            return 0.0
    for n, least_of in ((length, tries), (length, 5), (2 * length, 5), (4 * length, 5)):
        ratio = seconds(function, make(2 * n), least_of) / seconds(function, make(n), least_of)
        if ratio <= 2.5:
            break
    return ratio


def too_slow(name, longest):
    "kind -> growth, of the texts that take this reader more than linear time."
    grows = {}
    for kind in TEXTS:
        ratio = growth(READERS[name], lambda length: written(kind, length), longest)
        if ratio > 2.5:
            grows[kind] = round(ratio, 1)
    return grows


@pytest.fixture(autouse=True)
def no_garbage_collection():
    "Its passes come when they like, and count as processor time."
    gc.disable()
    yield
    gc.enable()


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_twice_the_text_takes_no_more_than_two_and_a_half_times_as_long(name):
    assert not too_slow(name, LONGEST)


@pytest.mark.long
@pytest.mark.parametrize("room", sorted({name.split(".")[0] for name in READERS}))
def test_what_a_completion_may_hold_takes_linear_time(room):
    """The same in seconds: only what takes 10 ms at all, at a length of 2,000 tokens, and more than
    two and a half times as long as half of it."""
    names = [name for name in READERS if name.split(".")[0] == room]
    slow = {}
    for kind in TEXTS:
        text, half = written(kind, SHORT), written(kind, SHORT // 2)
        for name in names:
            took = seconds(READERS[name], text, 1, anew=False)
            if took >= 2 * LEAST_S and took > 2.5 * seconds(READERS[name], half, 1):
                ratio = growth(READERS[name], lambda n, kind=kind: written(kind, n), SHORT, 1)
                if ratio > 2.5:
                    slow[f"{name} on {kind}"] = round(ratio, 1), round(took, 2)
            if took > MOST_S:
                slow[f"{name} on {kind}"] = round(took, 2)
    assert not slow


@pytest.mark.parametrize("piece", ["\u0316\u0301", "\u0f73", "\uff9e\u0301"])
def test_marks_on_a_name_of_a_program_hold_nobody(piece):
    "A source is spelt as Python spells it, or refused; at four lengths, each twice the last."
    sources = [f"x{piece * (n // len(piece))} = 1" for n in (8_000, 16_000, 32_000, 64_000)]
    assert max(seconds(check_only_stdlib_imports, source, 1) for source in sources) < 0.25
    assert "marks on one letter" in check_only_stdlib_imports(sources[0])[1]["error"]
    few = f"x{piece * (20 // len(piece))}"  # as in a word of any language
    assert check_only_stdlib_imports(f"import math\n{few} = 'a{piece * 9}'")[0]
    assert not harmless(EVALUATES_LISTS[0], f"[(x{piece * 20_000})]")
    assert harmless(EVALUATES_LISTS[0], "[(1, 2)]")


def test_a_source_that_python_warns_of_is_read_in_silence(capfd):
    "Warnings of a program are no lines of a run's log, and no errors where warnings are."
    for shown in ("always", "error"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter(shown)
            tree, error = parsed('"\\d"\n' * 9)
        assert tree is not None and not said, error
    assert not capfd.readouterr().err


def test_a_pattern_that_gives_back_is_found_out():
    "The clock sees what it is there to see: two patterns as they were, and a run of marks."
    import unicodedata

    opening = re.compile(r"\s*(`{3,}|~{3,})[ \t]*([\w+-]*)\s*$")
    score = re.compile(r"^[ \t>*_`-]*(?:\w+ ){0,2}score", re.M)
    for function, kind in ((opening.match, "'```', ' ', '?'"), (score.search, "'_'")):
        # far from linear, so that short times show it
        assert growth(function, lambda n, kind=kind: written(kind, n), least_s=LEAST_S / 20) > 2.5
    marks = lambda text: unicodedata.normalize("NFC", text)  # noqa: E731
    text = lambda n: written(repr("\u0316\u0301"), n)  # noqa: E731
    assert growth(marks, text, least_s=LEAST_S / 20) > 2.5


@pytest.mark.parametrize("name", READERS)
def test_a_reader_is_called_and_answers(name):
    "What raises at once would be timed at nothing."
    READERS[name](FITTING.get(name, "Dear Ann. <answer>\n15\n</answer>\n```python\nx = 1\n```"))


def test_no_reader_is_forgotten():
    "A parameter that holds a text is known: what a model wrote, or what somebody else did."
    unknown = []
    for room, module in rooms():
        for name, thing in public(module) if room != "sandbox" else ():
            if not inspect.isfunction(thing):
                continue
            for parameter in inspect.signature(thing).parameters.values():
                kind = getattr(parameter.annotation, "__name__", str(parameter.annotation))
                known = parameter.name in READS or parameter.name in OURS or parameter.name in ROW
                if "str" in re.findall(r"\w+", kind) and not known:
                    unknown.append(f"{room}.{name}({parameter.name})")
    assert not unknown, f"who writes these texts? Add the parameters to READS or OURS: {unknown}"
    rewards = [name for name in READERS if "reward" in name.lower()]
    assert len(READERS) > 100 and len(rewards) > 20
