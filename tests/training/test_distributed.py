"Two processes on the CPU (gloo, started by torchrun) do what one does."

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed_child import CASES, scripted
from small_runs import CLOCKS, drawn, weights_of

HERE = Path(__file__).parents[1]


def torchrun(*arguments, timeout):
    "Both processes, started as a user starts them."
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
        str(HERE / "distributed_child.py"),
        *map(str, arguments),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "What both processes ended with."
    out = tmp_path_factory.mktemp("two")
    done = torchrun(out, "equal", timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
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


def test_a_failure_in_one_process_ends_both(tmp_path):
    began = time.monotonic()
    done = torchrun(tmp_path, "fails", timeout=120)
    assert done.returncode != 0 and time.monotonic() - began < 60
    assert "reward function 'reward' raised KeyError: 'only here' at step 1" in done.stderr
