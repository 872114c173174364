"SIGTERM: what a run that is preempted leaves behind, and that nothing else changes."

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from small_runs import digits, one_thread, small_trainer  # noqa: F401
from test_checkpoint import SCENARIOS, assert_same, runner, whole  # noqa: F401

from grpo_nb.training import leaving as leaving_module
from grpo_nb.training.checkpoint import checkpoints
from grpo_nb.training.leaving import ECHO_S, Agreement, Preempted, Preemption

HERE = Path(__file__).parents[1]
UPDATES = dict(
    max_steps=5,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_generations=4,
    max_completion_length=4,
)


def until(condition, seconds=60):
    "Wait until something is true."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def alive(pid):
    "Whether a process is there and no zombie."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def steps_of(folder):
    "The updates that there are checkpoints of."
    return [int(path.name.split("-")[1]) for path in checkpoints(folder)]


def preempt(runner, folder, again_after=(), **run):  # noqa: F811
    "Start a run and send SIGTERM while it pauses; its exit status, and how many seconds it took."
    pid = runner.start(folder=str(folder), **run)
    until((folder / "paused").exists)
    began = time.monotonic()
    for wait in (0, *again_after):
        time.sleep(wait)
        os.kill(pid, signal.SIGTERM)
    return runner.end(), time.monotonic() - began


@pytest.fixture(scope="module")
def undisturbed(runner, tmp_path_factory):  # noqa: F811
    "The folder of the run that got no signal."
    folder = tmp_path_factory.mktemp("undisturbed")
    assert runner(folder=str(folder), **UPDATES) == 0
    return folder


# where the loop is -> the pause, what the checkpoint is of, and after how long it is there at most
PLACES = {
    "completions are drawn": (dict(at="collect", step=3, seconds=60), 3, 5),
    "a reward swallows it": (dict(at="collect", step=3, seconds=60, swallow=True), 3, 5),
    "an update that ends": (dict(at="accumulate", step=3, seconds=0.5), 4, 5),
    "an update that does not": (dict(at="accumulate", step=3, seconds=60, grace_s=1), 3, 6),
    "the weights move": (dict(at="step", step=3, seconds=1.5, grace_s=0.1), 4, 6),
    "a checkpoint is written": (dict(at="save", step=4, seconds=1.5, grace_s=0.1), 4, 6),
}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_a_preempted_run_goes_on_with_the_same_bits(place, runner, undisturbed, tmp_path):  # noqa: F811
    pause, step, most = PLACES[place]
    saving = dict(save_strategy="steps", save_steps=4) if pause["at"] == "save" else {}
    status, seconds = preempt(runner, tmp_path, pause=pause, **UPDATES, **saving)
    assert status == 143 and steps_of(tmp_path) == [step] and seconds < most
    assert runner(folder=str(tmp_path), resume=True, **UPDATES, **saving) == 0
    assert_same(tmp_path, undisturbed)


def test_an_evaluation_is_left_and_made_on_resuming(runner, tmp_path):  # noqa: F811
    settings = {**UPDATES, "evaluate": True, "eval_strategy": "steps", "eval_steps": 2}
    assert runner(folder=str(tmp_path / "whole"), **settings) == 0
    pause = dict(at="evaluate", step=4, seconds=60)
    status, seconds = preempt(runner, tmp_path, pause=pause, **settings)
    assert status == 143 and steps_of(tmp_path) == [4] and seconds < 5
    assert runner(folder=str(tmp_path), resume=True, **settings) == 0
    assert_same(tmp_path, tmp_path / "whole")


def lines_of(folder):
    "How many records the log has."
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("name", ["windows of two cycles", "an adapter"])
def test_preempted_at_random_moments(name, runner, whole, tmp_path):  # noqa: F811
    (expected, seconds), chance, ended = whole(name), random.Random(name), []
    settings = {**SCENARIOS[name], "save_strategy": "no"}
    for attempt in range(20):
        if 143 not in ended:  # none yet, or it was faster than the signal
            folder, ended = tmp_path / str(attempt), []
        before = lines_of(folder)
        pid = runner.start(folder=str(folder), resume=True, **settings)
        if ended.count(143) < 4:
            until(lambda: lines_of(folder) > before or not alive(pid))
            time.sleep(chance.uniform(0, 0.1) * seconds)
            if alive(pid):
                os.kill(pid, signal.SIGTERM)
        code = runner.end()
        # behind the last update the process is one like any other, and is started again
        over = code == -signal.SIGTERM and lines_of(folder) >= lines_of(expected)
        ended.append(143 if over else code)
        if ended[-1] == 0 and 143 in ended:
            break
    assert ended[-1] == 0 and set(ended) == {0, 143}
    assert_same(folder, expected)


def test_a_second_signal_ends_the_process_at_once(runner, undisturbed, tmp_path):  # noqa: F811
    pause = dict(at="accumulate", step=3, seconds=60, grace_s=60)
    again = (0.3, ECHO_S)  # the launcher's repetition of the first does not count
    settings = {**UPDATES, "save_strategy": "steps", "save_steps": 2}
    status, seconds = preempt(runner, tmp_path, again, pause=pause, **settings)
    assert status == 143 and ECHO_S < seconds < ECHO_S + 2 and steps_of(tmp_path) == [2]
    assert runner(folder=str(tmp_path), resume=True, **settings) == 0
    assert_same(tmp_path, undisturbed)


def test_a_second_signal_while_the_last_checkpoint_is_written(runner, undisturbed, tmp_path):  # noqa: F811
    pause = dict(at="save", step=4, seconds=60)
    settings = {**UPDATES, "save_strategy": "steps", "save_steps": 2}
    status, seconds = preempt(runner, tmp_path, (ECHO_S + 0.3,), pause=pause, **settings)
    assert status == 143 and seconds < ECHO_S + 3 and steps_of(tmp_path) == [2]
    assert runner(folder=str(tmp_path), resume=True, **settings) == 0
    assert_same(tmp_path, undisturbed)


# what a script sees


def test_what_a_script_catches(tmp_path, capsys):
    def preempted(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return digits(completions)

    trainer = small_trainer(tmp_path, preempted)
    with pytest.raises(Preempted) as caught:
        trainer.train()
    assert caught.value.code == 143 and isinstance(caught.value, SystemExit)
    assert "stopped at step 1, and writing a checkpoint" in capsys.readouterr().out
    assert steps_of(tmp_path) == [1]
    assert "preemption" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_error_after_the_signal_is_told(tmp_path, capsys):
    def fails(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                raise ValueError("the worker was killed") from None
        return digits(completions)

    with pytest.raises(Preempted):
        small_trainer(tmp_path, fails).train()
    said = capsys.readouterr().out
    assert "after SIGTERM came RewardError" in said and "the worker was killed" in said
    assert steps_of(tmp_path) == [1]


def test_before_the_first_update_there_is_nothing_to_write(tmp_path):
    def preempted(completions, **_):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted):
        small_trainer(tmp_path, preempted).train()
    assert steps_of(tmp_path) == []


def test_a_handler_of_the_script_stays(tmp_path):
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append(signal.getsignal(signal.SIGTERM)))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        trainer = small_trainer(tmp_path, lambda completions, **_: called(completions))

        def called(completions):
            signal.raise_signal(signal.SIGTERM)
            return digits(completions)

        assert trainer.train().global_step == 2 and calls == [handler] * 2
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_thread_leaves_the_signal_alone(tmp_path):
    seen = []

    def reward(completions, **_):
        names = {thread.name for thread in threading.enumerate()}
        seen.append((signal.getsignal(signal.SIGTERM), "preemption" in names))
        return digits(completions)

    thread = threading.Thread(target=small_trainer(tmp_path, reward).train)
    thread.start()
    thread.join()
    assert seen == [(signal.SIG_DFL, False)] * 2


def test_what_a_reward_forks_dies_of_the_signal():
    with Preemption() as preemption:
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not preemption.asked


def test_a_signal_that_comes_as_the_loop_ends_is_not_lost():
    if not (child := os.fork()):
        with Preemption() as preemption:
            preemption.leave()
            signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_without_pthread_kill_a_late_update_is_left_too(monkeypatch):
    monkeypatch.delattr(signal, "pthread_kill")  # Windows
    with pytest.raises(KeyboardInterrupt), Preemption(grace_s=0.2) as preemption:
        preemption.begin_update()
        signal.raise_signal(signal.SIGTERM)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.01)
    assert time.monotonic() < end - 20


def test_an_orphan_is_told_from_a_detached_run(monkeypatch):
    "Only a launcher that hands nothing on is watched: a shell that ends leaves its runs alone."
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    assert leaving_module.launcher() is None
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert leaving_module.launcher() == os.getppid()
    monkeypatch.setenv("RANK", "0")
    assert leaving_module.launcher() is None


LAUNCHED = """
import json, os, sys
import torch
from run_child import pause_at
from small_runs import small_trainer

torch.set_num_threads(1)
folder, settings = sys.argv[1], json.loads(sys.argv[2])
open(folder + "/pid", "w").write(str(os.getpid()))
trainer = small_trainer(folder, **settings)
pause_at(trainer, at="collect", step=3, seconds=120)
trainer.train()
"""


@pytest.mark.long
def test_accelerate_launch_dies_and_its_run_notices(runner, undisturbed, tmp_path):  # noqa: F811
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(LAUNCHED)
    folder.mkdir()
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu"]
    command += ["--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    with open(tmp_path / "said", "w") as log:
        process = subprocess.Popen(
            [*command, str(script), str(folder), json.dumps(UPDATES)],
            env=environment,
            stdout=log,
            stderr=log,
        )
    until((folder / "paused").exists, 180)
    run = int((folder / "pid").read_text())
    assert run != process.pid and alive(run)
    process.terminate()
    process.wait(30)
    until(lambda: not alive(run), 20)
    assert steps_of(folder) == [3], (tmp_path / "said").read_text()
    assert runner(folder=str(folder), resume=True, **UPDATES) == 0
    assert_same(folder, undisturbed)


IN_A_CELL = """
import sys
sys.path[:0] = {path!r}
from run_child import pause_at
from small_runs import small_trainer
trainer = small_trainer({folder!r}, **{settings!r})
pause_at(trainer, at="collect", step=1, seconds=120)
trainer.train()
"""


def raised_in_a_cell(number, manager, client, folder):
    "The name of what a cell that trains raises when its kernel gets a signal."
    paths = [str(HERE), str(HERE.parent)]
    asked = client.execute(IN_A_CELL.format(path=paths, folder=str(folder), settings=UPDATES))
    until((folder / "paused").exists, 180)
    manager.signal_kernel(number)
    while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != asked:
        pass
    return reply["content"]["ename"]


@pytest.mark.long
def test_in_a_notebook_the_cell_ends_and_the_kernel_goes_on(tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=180)
    try:
        for number, raised in (
            (signal.SIGTERM, "Preempted"),
            (signal.SIGINT, "KeyboardInterrupt"),
            (signal.SIGTERM, "Preempted"),
        ):
            folder = tmp_path / str(time.monotonic())
            folder.mkdir()
            assert raised_in_a_cell(number, manager, client, folder) == raised
            assert steps_of(folder) == [1]
            for _ in range(20):  # right after an error a kernel turns away what was sent meanwhile
                after = client.execute_interactive("assert 1 + 1 == 2", timeout=60)
                if after["content"]["status"] != "aborted":
                    break
                time.sleep(0.5)
            assert after["content"]["status"] == "ok" and manager.is_alive()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# several processes: the store (real ones are in test_distributed.py)


def meet(store, *steps, wait_s=0.2, size=1):
    "What each rank gets, from threads; a step of 'dead' is a rank that never comes."
    found = {}

    def leave(rank, step):
        part = {"rank": rank, "tokens": torch.full((size,), rank)}
        found[rank] = Agreement(rank, len(steps), store, wait_s=wait_s).meet(step, part)

    threads = [
        threading.Thread(target=leave, args=(rank, step))
        for rank, step in enumerate(steps)
        if step != "dead"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_parts_larger_than_a_value_of_the_store():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    found = meet(store, 5, 5, 5, wait_s=20, size=2**21)  # 16 MiB each, of int64
    assert [part["rank"] for part in found[0]] == [0, 1, 2] and found[1] == found[2] == []
    assert all(bool((part["tokens"] == part["rank"]).all()) for part in found[0])


@pytest.mark.long
@pytest.mark.parametrize("steps", [(5, 4), (5, "dead"), ("dead", 5), (None, 5), (None, None)])
def test_no_agreement(steps):
    assert set(meet(torch.distributed.HashStore(), *steps).values()) == {None}


def test_a_store_that_is_gone():
    class Gone:
        def check(self, *given):
            raise torch.distributed.DistNetworkError("connection refused")

        set = get = check

    agreement = Agreement(0, 2, Gone(), wait_s=0.1)
    assert not agreement.heard() and agreement.meet(3, {}) is None
