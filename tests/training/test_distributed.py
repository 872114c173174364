"Two processes on the CPU (gloo, started by torchrun) do what one does."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed_child import CASES, scripted
from small_runs import CLOCKS, drawn, weights_of, without_clocks

from grpo_nb.training.checkpoint import checkpoints

pytestmark = pytest.mark.long
HERE = Path(__file__).parents[1]


def launch(*arguments, child="distributed_child.py"):
    "torchrun with two processes, as a user starts it: a Popen."
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(HERE / child),
        *map(str, arguments),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def end(process):
    "End a launcher that is still there, by the signal on which it ends its processes too."
    if process.poll() is None:
        process.terminate()
        process.wait(60)


def torchrun(*arguments, timeout, child="distributed_child.py"):
    "Both processes from their start to their end: exit status, what they printed."
    process = launch(*arguments, child=child)
    try:
        said = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


@pytest.fixture(scope="module")
def launched(stopped, tmp_path_factory):
    """One launch for several checks, since two processes import everything for as long as all of
    these runs take: its folder, how it ended, and when."""
    out = tmp_path_factory.mktemp("two")
    folders = json.dumps([str(folder) for folder, _ in stopped.values()])
    done = torchrun(out, "equal,resumed,fails", folders, timeout=360)
    return out, done, time.time()


@pytest.fixture(scope="module")
def ranks(launched):
    "What both processes found, and the folder of their runs."
    out, done, _ = launched
    assert (out / "failing").exists(), done.stderr[-4000:]
    return [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)], out


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_updates_of_one(name, ranks, tmp_path):
    (first, second), out = ranks
    trainer = scripted(tmp_path, name, 1)
    start = weights_of(trainer.model)
    trainer.train()
    expected = weights_of(trainer.model)
    tolerance = 2e-3 if name == "float16" else 2e-5
    for key, weight in expected.items():
        assert torch.equal(first[name]["weights"][key], second[name]["weights"][key])
        assert torch.allclose(first[name]["weights"][key], weight, atol=tolerance), key
    assert max(float((expected[key] - start[key]).abs().max()) for key in start) > 1e-2
    for one, two in zip(trainer.log_history, first[name]["history"], strict=True):
        assert set(one) == set(two)
        for key in (
            {"loss", "grad_norm", "reward"} if name == "quantile" else set(one) - set(CLOCKS)
        ):  # rewards, lengths, tokens, entropy, ratios, loss and gradient: all of both processes
            assert two[key] == pytest.approx(
                one[key],
                rel=1e-3 if name != "float16" else 0.05,
                abs=1e-4 if name != "float16" else 0.02,
            ), (one["step"], key)
    lines = [json.loads(line) for line in (out / name / "log.jsonl").read_text().splitlines()]
    assert lines == first[name]["history"]  # written once, by one process


def test_tokens_are_unequal_so_that_the_cases_mean_something(tmp_path):
    trainer = scripted(tmp_path, "dapo", 1)
    trainer.begin(None)
    mask = drawn(trainer).loss_mask
    assert mask[:6].sum() < 0.8 * mask[6:].sum()


def test_processes_sample_differently_and_stay_together(ranks):
    (first, second), _ = ranks
    for key, weight in first["sampled"]["weights"].items():
        assert torch.equal(weight, second["sampled"]["weights"][key])
    assert first["sampled"]["ids"].shape != second["sampled"]["ids"].shape or not torch.equal(
        first["sampled"]["ids"], second["sampled"]["ids"]
    )
    assert (
        first["sampled"]["evaluation"]["eval_reward"]
        == second["sampled"]["evaluation"]["eval_reward"]
    )


def test_two_processes_resume_bit_for_bit(ranks):
    for rank in ranks[0]:
        whole, resumed = rank["sampled"], rank["sampled again"]
        assert all(
            torch.equal(whole["weights"][key], resumed["weights"][key]) for key in whole["weights"]
        )
        assert [
            {k: v for k, v in r.items() if k not in CLOCKS}
            for r in resumed["history"]
            if "loss" in r
        ] == [
            {k: v for k, v in r.items() if k not in CLOCKS} for r in whole["history"] if "loss" in r
        ]


def test_the_secret_of_the_rewards_is_one_in_both_and_goes_on(ranks):
    secrets = {rank[name]["secret"] for rank in ranks[0] for name in ("sampled", "sampled again")}
    assert len(secrets) == 1 and len(*secrets) == 32


def test_an_overflow_in_one_process_is_one_in_both(ranks):
    first, second = (rank["overflow"] for rank in ranks[0])
    assert (
        [r["skipped_updates"] for r in first["history"]]
        == [r["skipped_updates"] for r in second["history"]]
        == [0, 1, 0]
    )
    assert first["scale"] == second["scale"] == 2.0**15 and all(
        torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"]
    )


def test_a_failure_in_one_process_ends_both(launched):
    out, done, ended = launched
    seconds = ended - (out / "failing").stat().st_mtime
    assert done.returncode != 0 and seconds < 110  # a collective call waits longer
    assert "reward function 'reward' raised KeyError: 'only here' at step 1" in done.stderr


# SIGTERM, in real processes


def preempted(folder, send, **options):
    """A run of which one process pauses, and then `send(the launcher, the ranks' ids)`: the steps
    of its checkpoints, the seconds from there to its end, what it printed, its exit status."""
    process = launch(folder, "preempted", json.dumps(options))
    try:
        while not (folder / "paused").exists():
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.02)
        began = time.monotonic()
        send(process, [int((folder / f"pid{rank}").read_text()) for rank in (0, 1)])
        said = "".join(process.communicate(timeout=100))
    finally:
        end(process)
    steps = [int(path.name.split("-")[1]) for path in checkpoints(folder)]
    return steps, time.monotonic() - began, said, process.returncode


def stop_all(launcher, ranks):
    "As a scheduler does: the launcher hands the signal on to every rank."
    launcher.terminate()


def stop_one(launcher, ranks):
    "As if one of several machines were taken away."
    os.kill(ranks[1], signal.SIGTERM)


def die(launcher, ranks):
    "One rank is gone without a word; the launcher notices, and stops the others."
    os.kill(ranks[1], signal.SIGKILL)


# which rank pauses where, who gets the signal, and the update of the checkpoint; the other rank
# waits in a collective call for the one that pauses
STOPPED = {
    "one draws, one waits": (dict(at="collect", step=2, seconds=90), 1, stop_all, 2),
    "the first one draws": (dict(at="collect", step=2, seconds=90), 0, stop_all, 2),
    "an update that ends": (dict(at="accumulate", step=2, seconds=1), 1, stop_all, 3),
    "an update that does not": (dict(at="accumulate", step=2, seconds=90), 0, stop_all, 2),
    "before the gradients are added": (dict(at="reduce", step=2, seconds=1.5), 1, stop_all, 3),
    "one machine alone": (dict(at="accumulate", step=2, seconds=1), 1, stop_one, 3),
    "a rank dies": (dict(at="collect", step=3, seconds=90), 0, die, 2),
}
# a launch each; test_leaving.py has what does not end, and ranks that never come, in one process
SHORT = ("one draws, one waits",)


def stop(case, folder):
    "Start the run of a case and stop it: what `preempted` says of it."
    pause, rank, send, _ = STOPPED[case]
    grace_s = 2 if case == "an update that does not" else 20
    options = dict(rank=rank, grace_s=grace_s, save_steps=2 if send is die else 100)
    return preempted(folder, send, pause={**pause, "grace_s": grace_s}, **options)


@pytest.fixture(scope="module")
def stopped(request, tmp_path_factory):
    "case -> (its folder, what `preempted` says), for the cases that are asked for."
    this = test_all_ranks_leave_with_a_checkpoint_of_one_step.__name__
    asked = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in asked if item.originalname == this]
    folders = {case: tmp_path_factory.mktemp("stopped") for case in cases}
    return {case: (folder, stop(case, folder)) for case, folder in folders.items()}


def goes_on(folder, out):
    "Every bit of a resumed run is that of the undisturbed one."
    for rank in (0, 1):
        final, expected = (torch.load(path / f"final{rank}.pt") for path in (folder, out / "whole"))
        assert without_clocks(final["history"]) == without_clocks(expected["history"])
        for name, weight in expected["weights"].items():
            assert torch.equal(final["weights"][name], weight), name


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.full) for c in STOPPED]
)
def test_all_ranks_leave_with_a_checkpoint_of_one_step(case, stopped, ranks):
    folder, (steps, seconds, said, status) = stopped[case]
    assert steps == [STOPPED[case][3]] and status == 1 and seconds < 40, said[-3000:]
    if case == "a rank dies":
        assert "the last periodic checkpoint is the one to resume from" in said
    goes_on(folder, ranks[1])
