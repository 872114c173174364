"""One run, one folder. What is right is asked of the operating system: its own flock says how many
are inside, its own kill ends them."""

import datetime
import errno
import fcntl
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset, IterableDataset, load_from_disk
from small_runs import ROWS, digits, one_thread, small_trainer  # noqa: F401
from transformers import TrainerCallback

from grpo_nb import cli
from grpo_nb.training.data import check_dataset, digest_of
from grpo_nb.training.one_run import OneRun

CHILD = """
import sys
from grpo_nb.training.one_run import OneRun
one_run = OneRun(sys.argv[1])
one_run.take()
print("in", flush=True)
sys.stdin.read()
one_run.give_back()
assert "torch" not in sys.modules
"""


def process(code, *arguments):
    "A Python of its own."
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def holder(folder):
    "A process that is in the folder."
    child = process(CHILD, folder)
    assert child.stdout.readline() == "in\n"
    return child


def killed(folder):
    "The folder of a process that was killed; nobody has asked for its status yet."
    child = holder(folder)
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    return child


def changed(one_run, **entries):
    "Change the record that is in the folder."
    record = json.loads(one_run.path.read_text()) | entries
    one_run.path.write_text(json.dumps(record))


def silent(one_run, seconds):
    "Let the last sign of life be older."
    then = time.time() - seconds
    os.utime(one_run.path, (then, then))


def enters(folder, waits=False, **times):
    "Whether a run may enter."
    try:
        with OneRun(folder, **times).held(waits):
            return True
    except ValueError:
        return False


def files_in(folder):
    "Every file below a folder with its bytes."
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


TWO_AT_ONCE = """
import fcntl, json, os, sys, time
from pathlib import Path
from grpo_nb.training.one_run import OneRun

def start(folder, door, word):
    one_run = OneRun(folder)
    door.read(1)
    try:
        one_run.take()
    except ValueError as error:
        os.write(word, (json.dumps([os.getpid(), "refused", str(error)]) + "\\n").encode())
        os._exit(0)
    alone = open(folder + ".inside", "w")
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = "in"
    except BlockingIOError:
        found = "beside another"
    os.write(word, (json.dumps([os.getpid(), found, ""]) + "\\n").encode())
    sys.stdin.buffer.peek(1)  # until all have asked
    if os.getpid() % 2:
        one_run.give_back()
    os._exit(0)  # else as killed

for number in range(int(sys.argv[2])):
    folder = sys.argv[1]  # new at first, then left by an earlier pair
    door, opened = os.pipe()
    answers, word = os.pipe()
    more, end = os.pipe()
    pids = []
    for _ in range(2):
        if not (pid := os.fork()):
            os.close(opened), os.close(end)
            os.dup2(more, 0)
            start(folder, os.fdopen(door, "rb", buffering=0), word)
        pids.append(pid)
    time.sleep(0.002)
    os.write(opened, b"..")
    with os.fdopen(answers) as lines:
        print(json.dumps([json.loads(lines.readline()) for _ in pids]), flush=True)
    os.close(end), os.close(opened), os.close(door), os.close(more), os.close(word)
    for pid in pids:
        os.waitpid(pid, 0)
"""


def test_of_two_that_start_at_the_same_moment_one_enters(tmp_path):
    children = [process(TWO_AT_ONCE, tmp_path / str(k), 10) for k in range(3)]
    told = [child.communicate(timeout=100)[0] for child in children]
    pairs = [json.loads(line) for out in told for line in out.splitlines()]
    assert len(pairs) == 30 and not any(child.returncode for child in children)
    for pair in pairs:
        (first, _, _), (second, _, said) = sorted(pair, key=lambda one: one[1])
        assert sorted(word for _, word, _ in pair) == ["in", "refused"], pair
        assert f"process {first} on " in said and f"process {second} on " not in said


def test_of_two_threads_one_enters(tmp_path):
    for _ in range(10):
        found, door = [], threading.Barrier(2)
        stay = threading.Barrier(2)

        def start(found=found, door=door, stay=stay):
            one_run = OneRun(tmp_path / "run")
            door.wait()
            try:
                one_run.take()
                found.append("in")
            except ValueError:
                found.append("refused")
            stay.wait()
            one_run.give_back()

        both = [threading.Thread(target=start) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert sorted(found) == ["in", "refused"]
    assert not (tmp_path / "run" / ".running").exists()


def test_the_refusal_names_the_first_and_what_to_do(tmp_path):
    child, second = holder(tmp_path), OneRun(tmp_path)
    began = time.strftime("%Y-%m-%d %H:")
    for waits in (False, True):  # it is seen to live: nothing to wait for
        with pytest.raises(ValueError) as refused:
            second.take(waits)
        said = str(refused.value)
        for word in (repr(str(tmp_path)), f"process {child.pid} on {os.uname().nodename}", began):
            assert word in said, said
        assert said.endswith(f"where that run is gone, remove {str(second.path)!r}")
    with pytest.raises(ValueError, match=f"process {child.pid} on"):
        second.check_free()
    child.communicate("")
    assert child.returncode == 0 and not second.path.exists()
    second.check_free()
    assert enters(tmp_path)


def test_after_a_kill_the_next_enters_at_once(tmp_path):
    child, began = killed(tmp_path), time.monotonic()
    OneRun(tmp_path).check_free()
    assert enters(tmp_path) and time.monotonic() - began < 1
    child.wait()
    assert not list(tmp_path.iterdir())


def test_the_same_number_elsewhere_is_another_run(tmp_path, capsys):
    mine, elsewhere = OneRun(tmp_path), dict(host="another machine")
    with mine.held():
        left = mine.path.read_text()
    mine.path.write_text(left)
    changed(mine, **elsewhere, pid=os.getpid())  # whose lock does not reach this one
    assert not enters(tmp_path)  # it may live
    silent(mine, 58)
    assert not enters(tmp_path) and not capsys.readouterr().out
    silent(mine, 62)
    assert enters(tmp_path)
    mine.path.write_text(left)
    changed(mine, **elsewhere)
    silent(mine, 59.5)
    began = time.monotonic()
    assert enters(tmp_path, waits=True) and 0.2 < time.monotonic() - began < 5
    assert "It may be dead: waiting" in capsys.readouterr().out


def test_signs_of_life_during_a_long_step(tmp_path):
    mine, times = OneRun(tmp_path, beat_s=0.05), set()
    with mine.held():
        changed(mine, host="another machine")
        fcntl.flock(mine.file, fcntl.LOCK_UN)  # so that it cannot be seen
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # Python's lock is never given away by will
            times.add(mine.path.stat().st_mtime_ns)
        assert len(times) > 5
        began = time.monotonic()
        assert not enters(tmp_path, waits=True, beat_s=0.3, stale_s=0.8)
        assert 0.5 < time.monotonic() - began < 4
    assert enters(tmp_path)


def test_a_copy_of_the_process_keeps_nothing_and_releases_nothing(tmp_path):
    fork = 'import os, time; copy = os.fork(); os.write(1, b"in " if copy else b"-- ")'
    code = CHILD.replace('print("in", flush=True)', fork).replace(
        "sys.stdin.read()", "copy and sys.stdin.read()"
    )
    code += "time.sleep(60)"
    child = process(code, tmp_path)
    assert set(child.stdout.read(6).split()) == {"in", "--"}
    time.sleep(0.2)
    (copy,) = psutil.Process(child.pid).children()
    assert not enters(tmp_path)  # the copy has left the block, and the run goes on
    child.kill()
    child.wait()
    assert copy.is_running() and enters(tmp_path)
    copy.kill()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    mine = OneRun(tmp_path, beat_s=0.02)
    with pytest.warns(UserWarning, match="file system without locks .*No locks available") as seen:
        with mine.held():
            time.sleep(0.2)  # several signs of life
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = holder(tmp_path)
        assert not enters(tmp_path)  # the record is believed
        child.kill()
        child.wait()
        assert not enters(tmp_path)  # for a minute
        silent(mine, 61)
        assert enters(tmp_path)


# trainers


class At(TrainerCallback):
    "Does something after the first update."

    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.act()


def test_a_trainer_holds_its_folder_from_beginning_to_end(tmp_path):
    seen, inside = [], OneRun(tmp_path)

    def look():
        seen.append(json.loads(inside.path.read_text())["pid"])
        with pytest.raises(ValueError, match="another trainer of this process"):
            small_trainer(tmp_path).train()

    trainer = small_trainer(tmp_path, arguments=dict(callbacks=[At(look)]))
    trainer.evaluate(ROWS[:2])
    assert not list(tmp_path.iterdir()) or not inside.path.exists()
    trainer.train()
    trainer.train()  # again
    small_trainer(tmp_path).train()  # as a notebook does
    assert seen == [os.getpid()] * 2 and not inside.path.exists()


def test_an_error_gives_the_folder_back(tmp_path):
    def fails():
        raise KeyError("mine")

    trainer = small_trainer(tmp_path, arguments=dict(callbacks=[At(fails)]))
    with pytest.raises(KeyError):
        trainer.train()
    assert not trainer.one_run.path.exists()
    with pytest.raises(ValueError, match="there is no whole checkpoint"):
        small_trainer(tmp_path / "new").train(resume_from_checkpoint=True)
    assert not (tmp_path / "new").exists()


def test_a_living_run_keeps_its_files_and_a_dead_one_is_resumed(tmp_path):
    small_trainer(tmp_path, save_strategy="steps", save_steps=1).train()
    half = tmp_path / ".checkpoint-3.partial-1"
    half.mkdir()
    (half / "weights").write_text("being written")
    child = holder(tmp_path)
    before = files_in(tmp_path)
    for resume in (None, True, "auto", tmp_path / "checkpoint-1"):
        with pytest.raises(ValueError, match=f"process {child.pid} on"):
            small_trainer(tmp_path).train(resume_from_checkpoint=resume)
    assert files_in(tmp_path) == before
    small_trainer(tmp_path).evaluate(ROWS[:2])
    os.kill(child.pid, signal.SIGKILL)  # nobody has asked for its status
    resumed = small_trainer(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.first_step == 2 and resumed.state.global_step == 3
    child.wait()


# the command line


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_second_demo_is_refused_before_it_does_anything(tmp_path, words, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "demo.json").write_text('{"seed": 1}')
    child = holder(out)
    before = files_in(tmp_path)
    assert cli.main(["demo", "--out", str(out), *words]) == 2
    said = capsys.readouterr()
    assert f"process {child.pid} on" in said.err and not said.out
    assert files_in(tmp_path) == before
    child.communicate("")


def test_ctrl_c_while_a_demo_waits_is_no_traceback(tmp_path):
    (tmp_path / "demo.json").write_text('{"seed": 1}')
    one_run = OneRun(tmp_path)
    one_run.take()
    changed(one_run, host="another machine")
    fcntl.flock(one_run.file, fcntl.LOCK_UN)
    command = [sys.executable, "-m", "grpo_nb", "demo", "--resume", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as child:
        assert "waiting" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=30) == ("", "\nStopped.\n") and child.returncode == 130
    assert json.loads(one_run.path.read_text())["host"] == "another machine"
    one_run.give_back()


def test_a_second_training_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    child = holder(tmp_path / "run")
    before = files_in(tmp_path)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = dict(
        model_name_or_path="/no/such/model", dataset_name=data, output_dir=tmp_path / "run"
    )
    flags = [word for name, x in words.items() for word in (f"--{name}", str(x))]
    rewards = ["--reward_funcs", "grpo_nb.environments.arithmetic.exact_answer_reward"]
    assert cli.main(["train", *flags, *rewards]) == 2
    assert f"process {child.pid} on" in capsys.readouterr().err
    assert files_in(tmp_path) == before | {data: data.read_bytes()}
    child.communicate("")


# what is resumed is what it says

OTHERS = [dict(row, answer=str(int(row["answer"]) + 1)) for row in ROWS]


@pytest.fixture(scope="module")
def resumable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    small_trainer(folder, save_strategy="steps", save_steps=1).train()
    return folder


def resumed(folder, rows=ROWS, checkpoint=True):
    "What a run says as it goes on."
    with redirect_stdout(io.StringIO()) as said:
        small_trainer(folder, rows=rows).train(resume_from_checkpoint=checkpoint)
    return said.getvalue()


def test_other_rows_of_equal_number_are_refused(resumable):
    for others in (OTHERS, ROWS[::-1], Dataset.from_list(OTHERS)):
        with pytest.raises(ValueError, match="would be lost: digest of the rows is"):
            resumed(resumable, others)
    for same in (ROWS, [dict(reversed(row.items())) for row in ROWS], Dataset.from_list(ROWS)):
        assert "compared" not in resumed(resumable, same)


def test_a_checkpoint_without_a_digest_goes_on_and_says_so(tmp_path):
    small_trainer(tmp_path, save_strategy="steps", save_steps=1).train()
    folder = tmp_path / "checkpoint-2"
    state = torch.load(folder / "training_state.pt")
    del state["data"]
    torch.save(state, folder / "training_state.pt")
    (folder / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="has no manifest"):
        said = resumed(tmp_path, OTHERS)
    assert said.count("whether the rows are the same was not compared") == 1


def test_a_stream_says_that_it_has_no_digest(tmp_path):
    rows = IterableDataset.from_generator(lambda: iter(ROWS))
    small_trainer(tmp_path, rows=rows, save_strategy="steps", save_steps=1).train()
    assert "a stream has no digest" in resumed(tmp_path, rows)


def test_a_digest_is_of_what_rows_hold_and_not_of_their_objects(tmp_path):
    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "data")
    read = load_from_disk(tmp_path / "data")
    shuffled = read.select(range(11, -1, -1)).select(range(11, -1, -1))  # the same rows by indices
    assert digest_of(ROWS) == digest_of(data) == digest_of(read) == digest_of(shuffled)

    def odd(raw=b"a"):
        at = datetime.date(2026, 1, 2)
        return [{"prompt": "a", "of": {"b", "c"}, "at": at, "by": object(), "raw": raw}]

    assert digest_of(odd()) == digest_of(odd()) != digest_of(odd(b"b"))


def test_a_digest_of_rows_that_are_made_anew():
    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, number):
            if number > 1:
                raise IndexError
            return {"prompt": str(random.random())}

    assert digest_of(check_dataset(Rows())) is None


def test_a_digest_of_a_large_table_takes_no_time():
    large = [{"prompt": f"{number}+1="} for number in range(300_000)]
    table = Dataset.from_list(large)
    began = time.perf_counter()
    first = digest_of(large)
    assert digest_of(table) == first and time.perf_counter() - began < 2
    assert digest_of(large[:-1]) != first and digest_of(large[:-1] + [{"prompt": "0"}]) != first
    assert digest_of([{"prompt": f"{number}+2="} for number in range(300_000)]) != first
