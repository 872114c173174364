"""The dashboard without a browser: runs in threads, orders given at any moment, failures,
interrupts, and what is shown."""

import asyncio
import html
import html.parser
import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node import run_module
from small_runs import digits, small_model, small_trainer, weights_of, without_clocks

from grpo_nb.training.checkpoint import checkpoints
from grpo_nb.training.hints import Hints
from grpo_nb.training.report import smoothed
from grpo_nb.training.rewards import RewardError
from grpo_nb.widgets import dashboard as module
from grpo_nb.widgets.dashboard import (
    PANELS,
    Dashboard,
    Gate,
    curves_of,
    dashboard_figure,
    dashboard_html,
    dashboard_widget,
    progress_line,
    run_of,
    samples_table,
    shown_text,
    stored_run,
    thinned,
)

ENDLESS = 100_000


def until(condition, seconds=30):
    "Wait for something that another thread does."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def at_step(dashboard, step):
    until(lambda: dashboard.began and dashboard.state.global_step >= step or dashboard.outcome)
    assert not dashboard.outcome


@pytest.fixture
def dashboard():
    "One whose run does not outlive the test."
    made = Dashboard()
    yield made
    made.gate.set("stop")
    if made.thread:
        made.thread.join(30)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Eight updates in the main thread, without a dashboard."
    trainer = small_trainer(tmp_path_factory.mktemp("whole"), max_steps=8)
    trainer.train()
    return without_clocks(trainer.log_history), weights_of(trainer.model)


def assert_equal_runs(trainer, whole):
    history, weights = whole
    assert without_clocks(trainer.log_history) == history
    assert all((value == weights[name]).all() for name, value in weights_of(trainer.model).items())


# orders


def test_a_run_under_the_dashboard_is_the_run_without_it(dashboard, whole, tmp_path, capsys):
    trainer = small_trainer(tmp_path, max_steps=8, disable_tqdm=False)
    trainer.log.show = True
    box = dashboard.run(trainer)
    assert box is dashboard.box and dashboard.running
    assert (
        dashboard.wait().global_step == 8
        and dashboard.status == "finished"
        and not dashboard.running
    )
    assert_equal_runs(trainer, whole)
    assert (
        trainer.log.show
        and not trainer.config.disable_tqdm
        and dashboard not in trainer.callbacks.handler.callbacks
    )  # all put back
    assert capsys.readouterr() == ("", "")  # neither table nor bar
    assert not box.state["steered"] and not dashboard.problem


def test_pause_stands_still_and_changes_nothing(dashboard, whole, tmp_path):
    trainer = small_trainer(tmp_path, max_steps=8)
    dashboard.pause()  # nothing runs: forgotten when something does
    began = time.perf_counter()
    dashboard.run(trainer)
    dashboard.box.order = "pause"
    until(lambda: "paused at step" in dashboard.box.state["status"])
    at = trainer.state.global_step
    assert dashboard.status == f"paused at step {at}" == dashboard.box.state["status"]
    time.sleep(0.5)
    assert trainer.state.global_step == at and dashboard.held
    dashboard.box.order = "go"
    assert dashboard.wait().global_step == 8
    assert_equal_runs(trainer, whole)
    assert (
        dashboard.points[-1][0] - dashboard.points[0][0] < time.perf_counter() - began - 0.5
    )  # the pause is not a part of the run's time


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_stop_leaves_a_checkpoint_and_the_next_run_goes_on(dashboard, whole, tmp_path, paused):
    trainer = small_trainer(tmp_path, max_steps=8)
    dashboard.run(trainer)
    if paused:
        dashboard.pause()
        until(lambda: dashboard.held)
    else:
        at_step(dashboard, 1)
    dashboard.box.order = "stop"
    stopped = dashboard.wait().global_step
    assert 1 <= stopped < 8 and dashboard.status == f"stopped at step {stopped}"
    assert [p.name for p in checkpoints(tmp_path)] == [f"checkpoint-{stopped}"]
    dashboard.resume()  # too late, and nothing happens
    assert dashboard.status == f"stopped at step {stopped}" and not dashboard.running

    again, other = small_trainer(tmp_path, max_steps=8), Dashboard()
    other.run(again)
    assert other.wait().global_step == 8 and other.status == "finished"
    assert_equal_runs(again, whole)


def test_the_same_trainer_and_dashboard_go_on_too(dashboard, whole, tmp_path):
    trainer = small_trainer(tmp_path, max_steps=8)
    dashboard.run(trainer)
    dashboard.stop()
    assert dashboard.wait().global_step == 1
    dashboard.run(trainer)
    assert dashboard.wait().global_step == 8
    assert_equal_runs(trainer, whole)


def test_no_order_after_stop_is_heard():
    gate = Gate()
    gate.set("pause")
    asker = threading.Thread(target=gate.wait)
    asker.start()
    asker.join(0.1)
    assert asker.is_alive()
    for order in ("stop", "go", "pause"):
        gate.set(order)
    asker.join(5)
    assert not asker.is_alive() and gate.wait() == "stop"


def test_many_clicks_from_many_threads(dashboard, tmp_path):
    dashboard.run(small_trainer(tmp_path, max_steps=ENDLESS))

    def click():
        for _ in range(21):
            dashboard.box.order = "go" if dashboard.box.order == "pause" else "pause"

    clickers = [threading.Thread(target=click) for _ in range(3)]
    for clicker in clickers:
        clicker.start()
    for clicker in clickers:
        clicker.join(30)
    dashboard.stop()
    dashboard.wait()
    assert (
        dashboard.status == f"stopped at step {dashboard.state.global_step}"
        and not dashboard.problem
    )
    assert re.fullmatch(r"stopped at step \d+", dashboard.box.state["status"])


# what goes wrong


def test_a_failure_is_shown_and_raised(dashboard, tmp_path, capsys):
    def fails_later(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            raise KeyError("<i>who?</i>")
        return digits(completions)

    trainer = small_trainer(tmp_path, fails_later, max_steps=8)
    dashboard.run(trainer)
    for _ in range(2):
        with pytest.raises(RewardError, match="'fails_later' raised KeyError"):
            dashboard.wait()
    assert (
        dashboard.status.startswith("failed: RewardError: reward function 'fails_later'")
        and not dashboard.box.state["steered"]
    )
    assert "<i>who?" in dashboard.box.state["status"]  # the browser shows it as text
    assert [p.name for p in checkpoints(tmp_path)] == [
        "checkpoint-2"
    ] and "goes on from" in capsys.readouterr().out
    trainer.reward_funcs = [digits]
    dashboard.run(trainer)  # the mistake is corrected
    assert dashboard.wait().global_step == 8


def test_leaving_python_in_a_reward_function_is_a_failure_too(dashboard, tmp_path):
    def leaves(completions, **kwargs):
        sys.exit(3)

    dashboard.run(small_trainer(tmp_path, leaves))
    with pytest.raises(RewardError, match="'leaves' raised SystemExit: 3"):
        dashboard.wait()
    assert dashboard.status.startswith("failed: RewardError: reward function 'leaves' raised")


def test_two_runs_at_once_are_refused(dashboard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dashboard.run(small_trainer("here", max_steps=ENDLESS))
    with pytest.raises(RuntimeError, match="this dashboard has a run already"):
        dashboard.run(small_trainer("elsewhere"))
    with pytest.raises(ValueError, match="here' is the folder of a run .* trainer of this process"):
        Dashboard().run(small_trainer(tmp_path / "x" / ".." / "here"))
    with pytest.raises(RuntimeError, match="no run to wait for"):
        Dashboard().wait()
    other = Dashboard()
    other.run(small_trainer("elsewhere"))
    assert other.wait().global_step == 2 and dashboard.running
    dashboard.stop()
    dashboard.wait()


def test_a_closed_box_does_not_end_the_run(dashboard, tmp_path):
    box = dashboard.run(small_trainer(tmp_path, max_steps=ENDLESS))
    at_step(dashboard, 1)
    box.close()
    step = dashboard.state.global_step
    at_step(dashboard, step + 3)
    dashboard.stop()
    assert dashboard.wait().global_step >= step + 3
    assert dashboard.run(small_trainer(tmp_path / "next")) is dashboard.box is not box
    dashboard.wait()
    assert dashboard.box.comm is not None and dashboard.box.state["status"] == "finished"


def test_what_cannot_be_drawn_does_not_end_the_run(dashboard, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("the browser is gone")

    monkeypatch.setattr(module, "run_of", broken)
    dashboard.run(small_trainer(tmp_path))
    with pytest.warns(UserWarning, match="run is not affected.*the browser is gone"):
        assert dashboard.wait().global_step == 2


CHILD = """
import asyncio, sys
import torch
from grpo_nb.widgets.dashboard import Dashboard
from small_runs import small_trainer

torch.set_num_threads(1)
for how in ("wait", "ended", None):
    dashboard = Dashboard()
    dashboard.run(small_trainer(sys.argv[1], max_steps=100_000))
    while not dashboard.points or len(dashboard.points) < 3: dashboard.over.wait(0.01)
    print("step", dashboard.state.global_step, flush=True)
    try:
        if how == "wait": dashboard.wait()
        if how == "ended": asyncio.run(dashboard.ended())
    except KeyboardInterrupt: print(dashboard.status, flush=True)
print("leaving", flush=True)
"""


@pytest.mark.long
def test_an_interrupt_leaves_a_run_to_go_on_with_and_so_does_the_end_of_the_process(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=Path(__file__).parents[1],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    steps, stopped = [], []
    for line in child.stdout:
        if line.startswith("step"):
            steps.append(int(line.split()[1]))
            if len(steps) < 3:
                time.sleep(0.3)
                child.send_signal(signal.SIGINT)
        if match := re.fullmatch(r"stopped at step (\d+)\n", line):
            stopped.append(int(match[1]))
    assert child.wait(30) == 0, child.stderr.read()
    child.stdout.close(), child.stderr.close()
    kept = [int(p.name.split("-")[1]) for p in checkpoints(tmp_path)]
    assert (
        len(steps) == 3
        and len(stopped) == 2
        and steps[0] <= stopped[0] < steps[1] <= stopped[1] < steps[2] <= kept[2]
    )
    assert kept[:2] == stopped and len(kept) == 3


def test_ended_raises_and_returns_as_wait_does(dashboard, tmp_path):
    def raises(completions, **kwargs):
        raise ValueError("no")

    dashboard.run(small_trainer(tmp_path / "1"))
    assert asyncio.run(dashboard.ended()).global_step == 2
    dashboard.run(small_trainer(tmp_path / "2", raises))
    with pytest.raises(RewardError):
        asyncio.run(dashboard.ended())


# the tutorial with a model that is not the tiny one


def test_first_run_with_a_model_by_name(tmp_path, monkeypatch):
    notebook = json.loads(
        (Path(__file__).parents[2] / "nbs/tutorials/01_first_run.ipynb").read_text()
    )
    assert (
        notebook["metadata"]["accelerator"] == "GPU"
        and notebook["metadata"]["colab"]["gpuType"] == "T4"
    )
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    source = "\n".join(
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "eval: false" not in "".join(cell["source"])
    )
    for here, there in {
        'MODEL = "tiny"': f"MODEL = {str(tmp_path / 'model')!r}",
        'MODEL, OUTPUT = HERE["model"], HERE["folder"]': f"OUTPUT = {str(tmp_path / 'run')!r}",
        "max_steps=12": "max_steps=2",
        "await dashboard.ended()": "dashboard.wait()",
        "%matplotlib inline": "",
        "(1, 30), 100, 24": "(9_990, 9_999), 6, 4",
    }.items():
        assert here in source, here
        source = source.replace(here, there)
    names = {}
    exec(source, names)
    assert (
        names["output"].global_step == 2
        and names["dashboard"].status == "finished"
        and 0 <= names["accuracy_after"] <= 1
    )
    assert (tmp_path / "run/model/adapter_config.json").exists() and [
        p.name for p in checkpoints(tmp_path / "run")
    ] == ["checkpoint-2"]
    assert names["train"][0]["prompt"][0]["role"] == "user" and names["trainer"].samples[0][
        "prompt"
    ].startswith("user: What is 99")


# what is shown


def test_as_a_plain_callback_it_draws(tmp_path):
    board = Dashboard(every=0)
    trainer = small_trainer(tmp_path, arguments={"callbacks": [board]})
    for _ in range(2):
        trainer.train()
        assert (
            board.status == "finished"
            and "step 2 of 2" in board.box.state["line"]
            and len(board.box.runs[0]["curves"]["reward"]) == 2
        )


def test_drawing_takes_a_small_part_of_the_time(tmp_path, monkeypatch):
    drawn = []

    def slow(history, samples):
        drawn.append(len(history))
        time.sleep(0.02)
        return run_of(history, samples)

    monkeypatch.setattr(module, "run_of", slow)
    board = Dashboard(every=0)
    drawn.clear()
    began = time.perf_counter()
    board.run(small_trainer(tmp_path, max_steps=40))
    board.wait()
    elapsed = time.perf_counter() - began
    assert (
        drawn[0] == 0 and drawn[-1] == 41 and len(drawn) - 2 <= elapsed / (11 * 0.02)
    )  # besides the first and the last
    board = Dashboard(every=1_000)
    drawn.clear()
    board.run(small_trainer(tmp_path / "seldom", max_steps=20))
    board.wait()
    assert drawn == [0, 21]  # twenty updates and the summary of the run


def test_samples_and_hints_are_those_of_the_trainer(dashboard, tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path, max_steps=3)
    monkeypatch.setattr(Hints, "look", lambda self, record: ["look <here> & there"])
    dashboard.run(trainer)
    dashboard.wait()
    assert dashboard.box.state["hints"][-1] == "look <here> & there"
    (run,) = dashboard.box.runs
    last = [sample for sample in run["samples"] if sample["step"] == trainer.samples[0]["step"]]
    drawn = [(one["completion"], one["advantage"]) for one in trainer.samples]
    assert last and all((one["completion"], one["advantage"]) in drawn for one in last[:8])
    assert run["samples"][0]["step"] == 1  # and those of the first update, to compare
    assert run["curves"] == {
        name: [(r["step"], r[name]) for r in trainer.log_history if name in r]
        for name in PANELS
        if name in trainer.log_history[0]
    }


class Text(html.parser.HTMLParser):
    "What a browser would show of a page, and its tags."

    def __init__(self, page):
        super().__init__()
        self.text, self.tags = "", set()
        self.feed(page)
        self.close()

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)


nasty = st.text(alphabet=st.sampled_from("<>&\"'/!-;# ab\n=script"), max_size=40) | st.sampled_from(
    ["<script>alert(1)</script>", "</td></table><img src=x onerror=y>", "&lt;", "<!--", "]]>"]
)


@settings(max_examples=60, deadline=None)
@given(nasty, nasty, nasty)
def test_texts_of_a_model_are_shown_as_text(prompt, completion, name):
    page = Text(
        samples_table(
            [
                {
                    "step": 1,
                    "prompt": prompt,
                    "completion": completion,
                    "rewards": {name: 0.5},
                    "advantage": -1.0,
                }
            ]
        )
    )
    assert page.tags == {"div", "table", "tr", "th", "td", "span"}
    assert page.text == (
        f"completions of step 1, 1 of 1promptcompletion{name}advantage{prompt}{completion}0.5-1.00"
    )


def test_long_texts_and_missing_numbers():
    assert Text(shown_text("<" * 1_500)).text == "<" * 300 + " … (1,200 more characters)"
    samples = [
        {
            "step": 3,
            "prompt": "",
            "completion": str(i),
            "rewards": {"a": None, "b": math.nan},
            "advantage": 0.0,
        }
        for i in range(20)
    ]
    assert Text(
        samples_table(samples, 5)
    ).text == "completions of step 3, 5 of 20promptcompletionabadvantage" + "".join(
        f"{i}––+0.00" for i in range(5)
    )
    assert samples_table([]) == ""


def test_the_table_begins_where_there_is_something_to_learn():
    samples = [
        {
            "step": 3,
            "prompt": "p",
            "completion": f"<{i}>",
            "rewards": {},
            "advantage": (i >= 4) * (-1.0) ** i,
        }
        for i in range(8)
    ]
    assert re.findall(r"<(\d)>", Text(samples_table(samples, 3)).text) == ["4", "5", "6"]
    assert re.findall(r"<(\d)>", Text(samples_table(samples, 30)).text) == ["4", "5", "6", "7"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), max_size=80), st.integers(1, 30))
def test_curves_against_pandas(values, n):
    assert smoothed(values, n) == pytest.approx(
        pd.Series(values, dtype=float).rolling(n, min_periods=1).mean().tolist(), abs=1e-6
    )
    points = list(enumerate(values))
    size = max(1, math.ceil(len(values) / n))
    assert len(thinned(points, n)) <= n
    expected = (
        pd.DataFrame(points, columns=["x", "y"], dtype=float).groupby(lambda i: i // size).mean()
    )
    assert [list(point) for point in thinned(points, n)] == [
        pytest.approx(row, abs=1e-9) for row in expected.to_numpy().tolist()
    ]


def a_log(updates=30):
    return [
        {"step": s, "reward": s / 2, "entropy": 2.0, "completions/mean_length": 3.0 + s % 7}
        for s in range(1, updates + 1)
    ] + [{"step": updates, "eval_reward": 9.0, "reward": None}]


def test_the_figure_shows_the_log():
    reward, *others = dashboard_figure(a_log()).axes
    faint, strong = reward.lines
    assert list(faint.get_ydata()) == [s / 2 for s in range(1, 31)]
    assert list(strong.get_ydata()) == smoothed([s / 2 for s in range(1, 31)], 2)
    assert [axes.lines[0].get_ydata()[0] for axes in others] == [4.0, 2.0]
    assert all(not axes.lines for axes in dashboard_figure([]).axes)


READ = """import(process.argv[1]).then(async ({ readLog }) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  console.log(JSON.stringify(readLog(text, "a name")));
})"""
SCRIPTS = Path(module.__file__).parent / "js"


@pytest.mark.parametrize("updates", [1, 30, 777])
def test_a_log_is_read_in_the_browser_as_in_python(updates):
    log = a_log(updates)
    lines = "\n".join(json.dumps(record) for record in log)
    expected = json.loads(json.dumps({"name": "a name", "curves": curves_of(log)}))
    for text in (lines, json.dumps(log), json.dumps({"log_history": log, "epoch": 1.0})):
        found = json.loads(run_module(READ, SCRIPTS / "arithmetic.js", text))
        assert found["curves"].keys() == expected["curves"].keys()
        for name, points in expected["curves"].items():
            assert found["curves"][name] == [pytest.approx(point) for point in points]


def test_a_run_of_another_day_is_shown(tmp_path):
    trainer = small_trainer(tmp_path / "run", max_steps=3, log_completions=True)
    trainer.train()
    board = dashboard_widget(tmp_path / "run", run_of(a_log(), name="<b>", before=0.25, after=0.5))
    first, second = board.runs
    assert first["name"] == "run" and first == stored_run(tmp_path / "run")
    assert [value for _, value in first["curves"]["reward"]] == pytest.approx(
        [record["reward"] for record in trainer.log_history if "reward" in record], abs=1e-4
    )
    assert {sample["step"] for sample in first["samples"]} == {1, 2, 3}
    assert set(first["samples"][0]["rewards"]) == {"digits"}
    page = board._repr_mimebundle_()[0]["text/html"]
    assert (
        Text(page).tags >= {"table", "tr", "th"}
        and "<b>" in Text(dashboard_html({"runs": [second]})).text
    )
    held = re.search("data-values='([^']*)'", page)[1]
    assert json.loads(html.unescape(held))["runs"] == json.loads(json.dumps(board.runs))
    with pytest.raises(ValueError, match="run is 2, and there are 2 runs"):
        dashboard_widget(first, second, run=2)
    with pytest.raises(ValueError, match="no log.jsonl"):
        dashboard_widget(tmp_path)


def test_the_line_knows_only_what_was_measured():
    assert progress_line(0, 10, []) == progress_line(0, 10, [(5.0, 0, 0)]) == "step 0 of 10"
    assert (
        progress_line(4, 10, [(5.0, 2, 100), (9.0, 4, 300)])
        == "step 4 of 10 · 0:12 left · 50 tokens a second"
    )
    assert (
        progress_line(10, 10, [(5.0, 2, 100), (9.0, 10, 300)])
        == "step 10 of 10 · 50 tokens a second"
    )
