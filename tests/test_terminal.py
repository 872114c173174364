"""What a model wrote, and what names hold, cannot give a terminal orders: by every way on which it
is printed. The right value is Unicode's: no character of the classes of controls, formats (which
turn the direction of writing), lone surrogates and separators of lines, line breaks aside."""

import unicodedata
import warnings
from functools import partial
from html.parser import HTMLParser

import pytest
from chat_templates import byte_tokenizer
from small_runs import one_thread, small_model, small_trainer  # noqa: F401

from grpo_nb import cli
from grpo_nb.environments import judge
from grpo_nb.environments.game2048 import checked_program
from grpo_nb.environments.isolated_rewards import describe, short
from grpo_nb.environments.sandbox import SandboxError, SandboxPool, create_locked_down_function
from grpo_nb.environments.verifiers import Explanation, Program
from grpo_nb.rollout.turns import DEEPEST, as_call, parse_hermes
from grpo_nb.training import config
from grpo_nb.training.hints import Hints
from grpo_nb.training.report import sample_html
from grpo_nb.training.reporting import (
    HintWriter,
    Log,
    message_text,
    samples_text,
    say,
)
from grpo_nb.training.rewards import RewardError, score_completions
from grpo_nb.widgets.dashboard import dashboard_html, run_of, samples_table
from grpo_nb.widgets.pull import transcript_html
from grpo_nb.widgets.rewards import Judgement, highlighted, judgements_table

# a title, a cleared screen, a colour, a bell, an overwritten line; one byte as an escape; letters
# from right to left; line breaks of Unicode's; what hides
ORDERS = "\x1b]0;owned\x07\x1b[2J\x1b[31m\r\x08\x00\x7f\x9b31m\x85"
ORDERS += "\u202eabc\u2066\u2069\u2028\u2029\u200b"


def orders_in(text):
    "The characters of a text that a terminal would obey."
    classes = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return [c for c in text if c != "\n" and unicodedata.category(c) in classes]


def shows(text):
    "Whether a text shows all of `ORDERS`, and nothing is left to be obeyed."
    return not orders_in(text) and "\\x1b[2J" in text and "\\u202eabc" in text


def test_the_measure_sees_every_order():
    assert len(orders_in(ORDERS)) == len(ORDERS) - len("]0;owned[2J[31m31mabc")
    assert not shows(ORDERS) and not orders_in("line\nline, žluťoučký 東京 👍")


def right(completions, log_extra, log_metric, **columns):
    log_extra(f"extra {ORDERS}", [1.0] * len(completions))
    log_metric(f"metric {ORDERS}", 1.0)
    return [float(i % 2) for i, _ in enumerate(completions)]


right.__name__ = f"right {ORDERS}"


def test_a_run_prints_what_was_drawn_and_names_without_their_orders(tmp_path, capfd):
    tokenizer, model = byte_tokenizer(None, "</s>"), small_model(max_position_embeddings=1024)[0]
    model.resize_token_embeddings(len(tokenizer))
    drawn = tokenizer(ORDERS).input_ids

    def drawing(prompts, trainer):
        ids = [[9, 1]] * len(prompts)
        logprobs = [[-1.0] * len(drawn)] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": [drawn] * len(prompts), "logprobs": logprobs}

    trainer = small_trainer(
        tmp_path,
        right,
        rows=[{"prompt": f"p{ORDERS}", f"column {ORDERS}": 1}] * 8,
        model=model,
        tokenizer=tokenizer,
        arguments={"rollout_func": drawing},
        log_completions=True,
        max_completion_length=len(drawn) + 1,
        max_steps=1,
        logging_steps=1,
        guard_every=0,
    )
    trainer.log.show = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    printed = capfd.readouterr()
    assert shows(printed.out) and not orders_in(printed.err)
    for part in ("right ", "extra "):
        assert f"{part}\\x1b]0;owned" in printed.out
    assert not any(orders_in(str(one.message)) for one in told)


def test_lines_of_the_log_and_hints(capsys):
    say(f"hint: {ORDERS}\nsecond line")
    printed = capsys.readouterr().out
    assert shows(printed) and printed.count("\n") == 2
    hints = partial(Hints, small_config_of(), passed_over=lambda: ORDERS)
    writer = HintWriter(hints, Log(None))
    for step in range(40):
        logs = {"step": step, "num_tokens": 1, "completions/clipped_ratio": 1.0}
        writer.on_log(None, None, None, logs=logs)
    assert shows(capsys.readouterr().out)


def small_config_of():
    return config.GRPOConfig("unused", max_completion_length=8, use_cpu=True, report_to="none")


def test_samples_as_text():
    sample = {"step": 1, "prompt": ORDERS, "completion": ORDERS, "advantage": 1.0}
    sample |= {"rewards": {ORDERS: 1.0}, "extra": {}}
    text = samples_text([sample], width=1000)
    assert shows(text) and text.count("\n") == 0
    honest = {**sample, "rewards": {"r": 1.0}, "prompt": "\\frac{1}{2}", "completion": "it's é"}
    assert samples_text([honest]).endswith("r 1  | \\frac{1}{2} -> it's é")


def test_errors_of_reward_functions():
    def fails(completions, **columns):
        raise ValueError(f"cannot read {completions[0]}")

    with pytest.raises(RewardError) as caught:
        score_completions([fails], ["p"], [ORDERS])
    assert shows(str(caught.value))
    assert shows(describe(ValueError(ORDERS)))
    assert not orders_in(short(ORDERS * 100)) and shows(short(ORDERS * 100))
    assert short("x" * 1000) == "'" + "x" * 199 + "..." and short("it's") == repr("it's")
    silent = lambda completions, **columns: [None]  # noqa: E731
    with pytest.warns(UserWarning) as told:
        score_completions([silent], ["p"], [ORDERS])
    assert all(shows(str(one.message)) for one in told)


def test_warnings_of_the_trainer_and_of_a_judge():
    with pytest.warns(UserWarning) as told:
        config.warn(ORDERS)
        judge.report("judge", [judge.Verdict(None, ORDERS, 0.0)], None, None)
    assert len(told) == 2 and all(shows(str(one.message)) for one in told)


def test_errors_of_programs():
    with warnings.catch_warnings(), SandboxPool(1, allow_weak=True) as pool:
        warnings.simplefilter("ignore")
        result = pool.run(f"def f(): raise ValueError({ORDERS!r})", entry="f")
        assert result.kind == "exception" and shows(result.error)
        source = f"raise ValueError({ORDERS!r})\ndef f(): pass"
        with pytest.raises(SandboxError) as caught:
            create_locked_down_function(source, pool=pool)
        assert shows(str(caught.value))
    stage, why = checked_program(Program(f"__import__({ORDERS!r})"))
    assert stage == "cheats" and shows(why)


def test_the_command_line(monkeypatch, capsys, tmp_path):
    assert cli.main(["plan", f"model {ORDERS.replace(chr(0), '')}", "--card", "T4"]) != 0
    assert shows("".join(capsys.readouterr()))

    def ends(args):
        raise RewardError(f"the first completion is {ORDERS}")

    monkeypatch.setitem(cli._COMMANDS, "demo", (ends, *cli._COMMANDS["demo"][1:]))
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert shows(said) and "Traceback" in said and said.count("\n") > 3


class Page(HTMLParser):
    "The tags of a page, its text, and the attributes of which some code is run."

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.code = set(), "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.code += [name for name, _ in attributes if name.startswith("on")]

    def handle_data(self, text):
        self.text += text


def test_pages_show_tags_as_text():
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    sample = {"step": 1, "prompt": attack, "completion": attack, "advantage": 1.0}
    one = [Judgement(attack, 1.0, Explanation(attack, ((attack, 0, 9),)))]
    tokens = {"title": attack, "advantage": 1.0, "tokens": [[attack, "policy", -0.1, 1.0]]}
    pages = [
        samples_table([{**sample, "rewards": {attack: 1.0}}]),
        sample_html({**sample, attack: 1.0}, [attack]),
        dashboard_html({"runs": [run_of([], name=attack)]}),
        highlighted(attack, one),
        judgements_table(one, [1.0]),
        transcript_html([tokens]),
    ]
    for page in map(Page, pages):
        assert not page.tags & {"script", "img"} and not page.code
        assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize("depth", [10, 90, 300, 600, 900, 985, 990])
def test_arguments_that_lie_in_each_other_end_no_run(depth):
    "A turn with such a call is an answer like any other; what is a call can be written down."
    nested = "[" * depth + "]" * depth
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {nested}}}}}</tool_call>'

    def deeper(levels, action):
        return action() if not levels else deeper(levels - 1, action)

    try:
        message = parse_hermes(text)
    except (ValueError, RecursionError):
        assert depth > DEEPEST
        return
    assert nested in deeper(200, lambda: message_text(message)) and depth < DEEPEST
    assert as_call("f", {"x": [1]})["function"]["arguments"] == {"x": [1]}
