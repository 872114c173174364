"Metrics, records, callbacks and what they write, each by itself."

import io
import json
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from matplotlib.backends.backend_agg import FigureCanvasAgg
from transformers import TrainerCallback, TrainerState

from grpo_nb import GRPOConfig
from grpo_nb.training.hints import Hints
from grpo_nb.training.reporting import (
    OWN,
    Callbacks,
    HintWriter,
    Log,
    Metrics,
    ProgressBar,
    Recorder,
    SampleWriter,
    Trackers,
    make_handler,
    of_updates,
    run_figure,
    say,
    table_row,
)


def test_metrics_are_means_by_weight_and_extremes():
    metrics = Metrics()
    metrics.add({"loss": 1.0, "ratio/max": 2.0, "ratio/min": 0.5}, weight=1)
    metrics.add({"loss": torch.tensor(3.0), "ratio/max": 1.0, "ratio/min": 0.1}, weight=3)
    saved = metrics.state_dict()
    assert metrics.take() == {"loss": 2.5, "ratio/max": 2.0, "ratio/min": 0.1}
    assert metrics.take() == {}
    metrics.load_state_dict(saved)
    assert metrics.take()["loss"] == 2.5 and len(saved["loss"]) == 2


def run_state(**changes):
    return SimpleNamespace(
        **{
            **dict(global_step=4, first_step=2, max_steps=10, epoch=0.25, tokens=900),
            **dict(started=time.perf_counter() - 4, seconds=lambda: 7.0),
            **changes,
        }
    )


def test_a_record_counts_from_the_last_one():
    state, metrics = run_state(), Metrics()
    recorder = Recorder(Accelerator(cpu=True), metrics, state)
    recorder.load_state_dict({"total_tokens": 300})
    recorder.begin()
    state.global_step = 6
    metrics.add({"reward": 0.5})
    record = recorder.record(0.125)
    assert record["num_tokens"] == 900 and record["learning_rate"] == 0.125
    assert record["reward"] == 0.5 and record["seconds"] == 7.0 and metrics.take() == {}
    assert 3.9 < record["seconds_left"] < 4.5  # two updates... four left at a second each
    assert recorder.state_dict() == {"total_tokens": 900}


def test_evaluations_take_no_time_of_the_updates():
    recorder = Recorder(Accelerator(cpu=True), Metrics(), run_state())
    recorder.since -= 100
    recorder.pause(100)
    assert recorder.record(0.1)["step_time"] < 1


class Adds(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        logs["mine"] = torch.tensor(2.0)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = True


def told(callbacks, **settings):
    config, state = GRPOConfig(**settings), TrainerState(max_steps=10)
    return Callbacks(config, state, make_handler(callbacks, None, None, None))


def test_what_callbacks_add_becomes_plain_numbers():
    record = {"step": 1}
    told([Adds()]).tell_record(record)
    assert record == {"step": 1, "mine": 2.0} and type(record["mine"]) is float


def test_flags_are_asked_kept_and_put_back():
    first = told([Adds()], save_strategy="no")
    first.tell("on_step_end")
    assert first.state_dict() == {"should_evaluate": True, "should_save": False}
    first.ask(should_save=True, should_evaluate=False)
    second = told([])
    second.load_state_dict(first.state_dict())
    assert second.control.should_save and not second.control.should_evaluate
    second.begin("a schedule")
    assert not second.control.should_save and second.handler.lr_scheduler == "a schedule"


def test_numbers_of_a_script_leave_the_runs_record_due():
    callbacks = told([])
    callbacks.ask(should_log=True)
    callbacks.tell_numbers({"step": 1, "mine": 1.0})
    assert callbacks.control.should_log
    callbacks.tell_record({"step": 1})
    assert not callbacks.control.should_log


def test_the_log_hears_of_records_and_evaluations(tmp_path):
    log = Log(tmp_path / "log.jsonl", show=False)
    callbacks = told([log])
    callbacks.tell_record({"step": 1, "num_tokens": 5})
    callbacks.tell("on_evaluate", {"step": 1, "eval_reward": 0.5})
    log({"step": 1, "note": 3})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == log.history and len(lines) == 3
    assert of_updates(lines) == [{"step": 1, "num_tokens": 5}]
    kept = log.history
    log.rewrite(lines[:1])
    assert log.history is kept and len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_the_reward_of_an_evaluation_is_a_line_in_the_terminal():
    screen = io.StringIO()
    found = {"step": 4, "eval_reward": 0.5, "eval_rewards/right/mean": 0.5, "eval_runtime": 2.0}
    told([Log(None, out=screen)]).tell("on_evaluate", found)
    told([Log(None, out=screen)]).tell("on_evaluate", {"step": 4, "test_unjudged": 1.0})
    assert screen.getvalue() == "evaluation at step 4: eval_reward 0.500\n"


def test_hints_are_said_once_and_not_again_after_a_resume():
    stuck = [
        {
            "step": s,
            "num_tokens": s,
            "reward": 0.0,
            "reward_group_std": 0.0,
            "frac_reward_zero_std": 1.0,
        }
        for s in range(1, 30)
    ]
    log = Log(None, show=False)
    whole, resumed = (HintWriter(partial(Hints, GRPOConfig()), log) for _ in range(2))
    for record in stuck:
        whole.on_log(None, None, None, logs=record)
    whole.on_log(None, None, None, logs={"step": 30, "note": 1.0})  # no record of training
    resumed.replay(stuck[:20])
    said = list(resumed.given)
    for record in stuck[20:]:
        resumed.on_log(None, None, None, logs=record)
    assert whole.given == resumed.given and said == whole.given and whole.given


def test_samples_are_written_where_they_are_asked_for(tmp_path):
    sample = {"step": 1, "prompt": "1+1=", "completion": "2", "advantage": 0.5}
    collector = SimpleNamespace(samples=[{**sample, "rewards": {"right": 1.0}, "extra": {}}])
    for asked in (False, True):
        config = GRPOConfig(output_dir=str(tmp_path), log_completions=asked)
        writer = SampleWriter(config, Accelerator(cpu=True), collector, Log(None, show=False))
        writer.on_log(config, TrainerState(global_step=3), None, logs={"note": 1.0})
        assert not list(tmp_path.rglob("*.parquet"))
        writer.on_log(config, TrainerState(global_step=3), None, logs={"num_tokens": 1})
        assert len(list(tmp_path.rglob("completions_00003.parquet"))) == asked


@pytest.fixture(autouse=True)
def nothing_was_told():
    Callbacks(None, None, SimpleNamespace()).begin(None)


def test_reporting_that_fails_is_one_warning(tmp_path):
    class Gone:
        name, asked = "gone", 0

        def log(self, values, step):
            Gone.asked += 1
            raise ConnectionError("nobody\n answers")

        def log_table(self, name, columns, data, step):
            raise ConnectionError("nobody answers")

    there = SimpleNamespace(name="there", got=[], log=lambda values, step: there.got.append(step))
    sample = {"step": 1, "prompt": "1+1=", "completion": "2", "advantage": 0.5}
    collector = SimpleNamespace(samples=[{**sample, "rewards": {"right": 1.0}, "extra": {}}])
    config = GRPOConfig(output_dir=str(tmp_path), log_completions=True, report_to="tensorboard")
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = [Gone(), there]
    writer = SampleWriter(config, accelerator, collector, Log(None, show=False))
    (tmp_path / "completions").write_text("a file in the folder's place")
    with pytest.warns(UserWarning) as said:
        for step in (1, 2):
            run = TrainerState(global_step=step)
            writer.on_log(config, run, None, logs={"num_tokens": 1})
            Trackers(config, accelerator).on_log(config, run, None, logs={"reward": 1.0})
    texts = [str(one.message) for one in said]
    assert len(texts) == 3 and all("the run goes on without it" in text for text in texts)
    assert texts[0].startswith("a table of completions cannot be written (")
    assert texts[2].startswith("the tracker gone takes no record (ConnectionError: nobody answers)")
    assert Gone.asked == 2 and there.got == [1, 2]


def test_hints_without_a_file_are_said(tmp_path):
    (tmp_path / "hints.jsonl").mkdir()
    writer = HintWriter(partial(Hints, GRPOConfig()), Log(tmp_path / "log.jsonl", show=False))
    stuck = [{"step": i, "frac_reward_zero_std": 1.0, "reward": 0.0} for i in range(40)]
    with pytest.warns(UserWarning, match="hints.jsonl cannot be written"):
        for record in stuck:
            writer.note(record)
    assert writer.given


def test_a_terminal_that_takes_nothing_ends_nothing():
    full = open("/dev/full", "w", buffering=1)
    with pytest.warns(UserWarning) as told:
        for _ in range(3):
            say("a line", full)
    with suppress(OSError):
        full.close()
    assert [str(one.message)[:38] for one in told] == ["what the run prints cannot be written "]


def test_a_record_may_hold_anything(tmp_path):
    log = Log(tmp_path / "log.jsonl", show=True, out=open("/dev/null", "w"))
    log.write({"step": 1, "reward": "high", "by": object, "half": "\ud83d"})
    stored = json.loads((tmp_path / "log.jsonl").read_text())
    assert stored["reward"] == "high" and stored["by"] == "<class 'object'>"
    log.rewrite(log.history)
    assert json.loads((tmp_path / "log.jsonl").read_text()) == stored
    assert "high" in table_row(log.history[0])


def test_the_bar_goes_on_where_the_run_does():
    notes = {"held-out accuracy": "0.5"}
    bar = ProgressBar(GRPOConfig(disable_tqdm=True), notes)
    bar.on_log(None, None, None, logs={"num_tokens": 1, "reward": 0.25})  # before it is there
    bar.on_train_begin(None, TrainerState(global_step=3, max_steps=10), None)
    assert bar.bar.total == 10 and bar.bar.disable
    bar.on_step_end(None, None, None)
    assert notes == {"held-out accuracy": "0.5", "reward": "0.250"}
    bar.close()


@pytest.mark.parametrize("records", [[], [{"step": 1, "reward": 0.5}]])
def test_a_short_run_has_a_figure_too(records):
    assert len(run_figure(records).axes) == 3


def test_a_log_on_a_full_disk_says_where():
    with pytest.raises(OSError, match="the disk is full: /dev has .* MiB left"):
        Log("/dev/full", show=False).write({"step": 1})


def test_every_name_of_a_record_is_the_trainers_own(tmp_path):
    "What a run logs by itself cannot be logged by a reward function."
    from small_runs import small_trainer

    trainer = small_trainer(tmp_path, beta=0.1, max_steps=1, logging_steps=1)
    trainer.train()
    own = set().union(*trainer.log_history)
    assert "kl" in own and len(own) > 20
    assert not [name for name in own if not OWN.fullmatch(name)]


def test_the_axes_of_the_figure_end_where_the_numbers_do():
    "The legend is beside the curves and not in room made for it: a share never seems to pass 1."
    records = [{"step": n, "reward": n / 50, "reward_group_std": 0.3} for n in range(51)]
    axes = run_figure(records, {0: 0.0, 50: 1.0}).axes[0]
    assert -0.06 < axes.get_ylim()[0] and axes.get_ylim()[1] < 1.06
    FigureCanvasAgg(axes.figure).draw()
    legend, panel = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.y1 <= panel.y0 and legend.y0 >= 0  # under the panel, inside the picture
