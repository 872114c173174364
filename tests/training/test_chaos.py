"""Ten minutes of faults: rewards that raise, hang, are infinite or whose process is killed, a disk
that fills and empties, signals at random moments. Every run ends with the bits of one that nobody
disturbed, and nothing is left behind. The seed is printed; GRPO_NB_CHAOS_SECONDS is the time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_checkpoint import SCENARIOS, assert_same, runner  # noqa: F401

HERE = Path(__file__).parents[1]
SECONDS = float(os.environ.get("GRPO_NB_CHAOS_SECONDS", 600))
pytestmark = pytest.mark.full


@pytest.fixture
def seed(request):
    "A new seed for each time; it is printed where a test fails, or with -s."
    number = int(os.environ.get("GRPO_NB_CHAOS_SEED", time.time_ns() % 10**6))
    print(f"seed {number}: GRPO_NB_CHAOS_SEED={number} gives the same choices")
    return number


@contextmanager
def small_disk(folder):
    "A disk of eight MiB; a skip where it cannot be made."
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("a small disk is made by mount, which only root may do")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_faults_in_one_process(seed, tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE, HERE / "training"))),
    }
    with small_disk(tmp_path / "disk") as disk:
        command = [sys.executable, HERE / "chaos_child.py", disk, str(seed), str(SECONDS / 2)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    print(Counter(end for report in reports for end in report["ended"]))
    print(reports[3]["counts"], reports[-1]["counts"])
    assert all(report["same"] and report["late"] for report in reports), reports
    before, after = reports[3]["counts"], reports[-1]["counts"]
    assert after["memory"] < before["memory"] + 40
    assert {**after, "memory": 0} == {**before, "memory": 0}


def counts_of(pid):
    "Open files, threads and children of a process."
    task = Path(f"/proc/{pid}/task")
    return dict(
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=len(os.listdir(task)),
        children=(task / str(pid) / "children").read_text().split(),
    )


def test_killed_at_random_moments_for_minutes(seed, runner, tmp_path):  # noqa: F811
    chance, end, whole, ended = random.Random(seed), time.monotonic() + SECONDS / 2, {}, Counter()
    before, runs = counts_of(runner.process.pid), 0
    while time.monotonic() < end:
        name = chance.choice(sorted(SCENARIOS))
        if name not in whole:
            folder, began = tmp_path / f"whole {name}", time.monotonic()
            assert runner(folder=str(folder), **SCENARIOS[name]) == 0
            whole[name] = folder, time.monotonic() - began
        expected, seconds = whole[name]
        folder, status = tmp_path / f"run {runs}", None
        kills = chance.choices((signal.SIGKILL, signal.SIGTERM, signal.SIGINT), (3, 1, 1), k=3)
        while status != 0:
            pid = runner.start(folder=str(folder), resume=True, **SCENARIOS[name])
            if kills:
                time.sleep(chance.uniform(0.2, 1) * seconds)
                try:
                    os.kill(pid, kills.pop())
                except ProcessLookupError:
                    pass
            status = runner.end()
            ended[status] += 1
        assert_same(folder, expected)
        runs += 1
    print(f"{runs} runs, exit statuses {dict(ended)}")
    assert set(ended) <= {0, 143, 130, -signal.SIGKILL, -signal.SIGTERM} and runs
    after = counts_of(runner.process.pid)
    assert after["children"] == before["children"]
    assert all(after[name] <= before[name] for name in ("files", "threads")), (before, after)
