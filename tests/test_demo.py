"""The demo as its user runs it, at its full length: interrupted, resumed, and what it reaches in
the end; with every seed under the marker `full`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def demo(*args):
    command = [str(Path(sys.executable).with_name("grpo-nb")), "demo", *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def wait_for_lines(path, lines, process, seconds=900):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the demo did not reach step {lines}: {process.communicate()[0]}")


def test_interrupted_and_resumed_it_learns_what_it_promises(tmp_path):
    out = tmp_path / "run"
    first = demo("--out", out)
    wait_for_lines(out / "log.jsonl", 3, first)
    first.send_signal(signal.SIGINT)
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 130, printed
    assert "--resume" in printed
    done = len((out / "log.jsonl").read_text().splitlines())
    assert 3 <= done < 400 and not (out / "summary.json").exists()

    second = demo("--out", out, "--resume")
    printed, _ = second.communicate(timeout=1200)
    assert second.returncode == 0, printed
    assert "warm-up" not in printed
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 401))
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["accuracy_before"] <= 0.65
        and summary["accuracy_after"] >= 0.93
        and summary["seed"] == 0
        and summary["seconds"] > 0
    )
    assert len(json.loads((out / "samples.json").read_text())) == 20
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_nb.demo import greedy_accuracy
    from grpo_nb.environments.arithmetic import addition_problems

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(out / "model"),
        AutoTokenizer.from_pretrained(out / "model"),
    )
    assert (
        greedy_accuracy(model.eval(), tokenizer, addition_problems(0)[1])
        == summary["accuracy_after"]
    )


@pytest.mark.full
def test_every_seed_learns(tmp_path):
    summaries = []
    for seed in range(5):
        process = demo("--seed", seed, "--out", tmp_path / str(seed))
        printed, _ = process.communicate(timeout=900)
        assert process.returncode == 0, printed
        summaries.append(json.loads((tmp_path / str(seed) / "summary.json").read_text()))
        print(summaries[-1])
    assert all(s["accuracy_before"] <= 0.65 for s in summaries)
    assert all(s["accuracy_after"] >= 0.93 for s in summaries)
    assert sum(s["accuracy_after"] for s in summaries) / 5 >= 0.95
