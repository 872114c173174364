"""The demo as its user runs it: a short one is killed, damaged and put on a disk that is too small.
Under the marker `full` it has its whole length: interrupted, resumed, and what it reaches in the
end, with every seed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_child import SHORTER
from safetensors.torch import load_file
from small_runs import without_clocks

import grpo_nb.demo
from grpo_nb import cli
from grpo_nb.demo import read_before

WHOLE = [str(Path(sys.executable).with_name("grpo-nb"))]
SHORT = [sys.executable, str(Path(__file__).with_name("demo_child.py"))]


def demo(*args, program=WHOLE, **environment):
    command = [*program, "demo", *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


def wait_for_lines(path, lines, process, seconds=900):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"the demo did not reach step {lines}: {process.communicate()[0]}")


def records(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def curve(out):
    "The held-out accuracy, by step."
    name = "held_out_accuracy"
    return {record["step"]: record[name] for record in records(out) if name in record}


def learned(out):
    "What two runs have in common if they are the same, to the bit."
    numbers = without_clocks(records(out))
    weights = load_file(out / "model" / "model.safetensors")
    return numbers, {name: x.tolist() for name, x in weights.items()}, curve(out)


@pytest.mark.full
def test_interrupted_and_resumed_it_learns_what_it_promises(tmp_path):
    out = tmp_path / "run"
    first = demo("--out", out)
    wait_for_lines(out / "log.jsonl", 3, first)
    first.send_signal(signal.SIGINT)
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 130, printed
    assert "--resume" in printed
    done = len((out / "log.jsonl").read_text().splitlines())
    assert 3 <= done < grpo_nb.demo.STEPS and not (out / "summary.json").exists()

    second = demo("--out", out, "--resume")
    printed, _ = second.communicate(timeout=1200)
    assert second.returncode == 0, printed
    assert "warming up" not in printed and "\r" not in printed
    assert len(printed.splitlines()) < 30 and printed.splitlines()[-1].startswith("Next: ")
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, grpo_nb.demo.STEPS + 1)) and sorted(curve(out)) == list(
        range(25, grpo_nb.demo.STEPS + 1, 25)
    )
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


# A short one

STEPS = 8


@pytest.fixture
def shorter(monkeypatch):
    "The demo of this process is as short as that of the children."
    for name, value in SHORTER.items():
        monkeypatch.setattr(grpo_nb.demo, name, value)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORTER.items():
            patch.setattr(grpo_nb.demo, name, value)
        return run_undisturbed(tmp_path_factory)


def run_undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    assert cli.main(["demo", "--steps", str(STEPS), "--save-steps", "2", "--out", str(out)]) == 0
    return out


def copy(undisturbed, folder):
    "The same run, as if killed before its results."
    shutil.copytree(undisturbed, folder)
    for name in ("summary.json", "samples.json", "curves.png"):
        (folder / name).unlink()
    shutil.rmtree(folder / "model")
    return folder


def resume(out, capsys, *more):
    "(exit status, what was printed)"
    capsys.readouterr()
    status = cli.main(["demo", "--resume", "--out", str(out), *more])
    said = capsys.readouterr()
    return status, said.out + said.err


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_settings_of_a_short_one(undisturbed):
    names = sorted(p.name for p in undisturbed.glob("checkpoint-*"))
    assert names == ["checkpoint-6", "checkpoint-8"]
    assert sorted(curve(undisturbed)) == [2, 4, 6, 8] and any(curve(undisturbed).values())
    assert any(record["grad_norm"] for record in records(undisturbed))  # it learns something


def wait_for(path, process, seconds=300):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.long
def test_killed_after_its_warm_up_and_ended_in_its_training(undisturbed, shorter, tmp_path, capsys):
    out = tmp_path / "run"
    first = demo("--steps", STEPS, "--save-steps", 100, "--out", out, program=SHORT, PAUSE="1")
    wait_for(out / "checkpoint-0", first)
    first.kill()
    assert "a warm-up is made" in first.communicate(timeout=60)[0]

    second = demo("--resume", "--save-steps", 2, "--out", out, program=SHORT, PAUSE="1")
    wait_for(out / "checkpoint-2", second)
    second.terminate()
    printed = second.communicate(timeout=60)[0]
    assert second.returncode == 143 and "a warm-up is made" not in printed, printed
    assert "going on from" in printed and "checkpoint-0" in printed
    assert printed.splitlines()[-1].endswith(f"grpo-nb demo --resume --out {out}")

    status, printed = resume(out, capsys)
    assert status == 0 and "a warm-up is made" not in printed, printed
    assert learned(out) == learned(undisturbed)


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt"])
def test_a_damaged_checkpoint_is_named_and_passed_over(
    name, undisturbed, shorter, tmp_path, capsys
):
    out = copy(undisturbed, tmp_path / "run")
    flip_a_bit(out / "checkpoint-8" / name)
    status, printed = resume(out, capsys)
    assert status == 0, printed
    assert f"{out / 'checkpoint-8'} is damaged and was passed over: " in printed and name in printed
    assert f"going on from {out / 'checkpoint-6'}" in printed
    assert learned(out) == learned(undisturbed)


def test_what_is_left_of_the_log_does_not_matter(undisturbed, shorter, tmp_path, capsys):
    out = copy(undisturbed, tmp_path / "run")
    log = (out / "log.jsonl").read_text()
    (out / "log.jsonl").write_text(log[len(log) // 3 : len(log) // 2])
    shutil.rmtree(out / "checkpoint-8")
    status, printed = resume(out, capsys)
    assert status == 0, printed
    assert learned(out) == learned(undisturbed)


def test_damaged_numbers_of_the_start_are_named(tmp_path):
    (tmp_path / "before.json").write_text('{"accuracy"')
    with pytest.raises(ValueError, match="before.json is damaged: leave --resume out"):
        read_before(tmp_path)


def test_without_a_whole_checkpoint_it_begins_anew(undisturbed, shorter, tmp_path, capsys):
    out = copy(undisturbed, tmp_path / "run")
    for checkpoint in out.glob("checkpoint-*"):
        (checkpoint / "training_state.pt").write_bytes(b"")
    status, printed = resume(out, capsys)
    assert status == 0 and "there is no whole checkpoint" in printed, printed
    assert "checkpoint-6 is damaged" in printed and "checkpoint-8 is damaged" in printed
    assert learned(out) == learned(undisturbed)


def test_a_disk_that_is_full_and_then_has_room(undisturbed, shorter, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(p.stat().st_size for p in (undisturbed / "checkpoint-8").iterdir())

    def mount(checkpoints, *options):
        options = ",".join([*options, f"size={int(checkpoints * size / 1024)}k"])
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk]
        return subprocess.run(command, capture_output=True).returncode

    if mount(2.5):
        pytest.skip("only the administrator may mount a small disk")
    try:
        out = disk / "run"
        words = ["demo", "--steps", str(STEPS), "--save-steps", "2", "--out", str(out)]
        assert cli.main(words) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("grpo-nb demo: the disk is full: ") and " MiB left" in last
        assert last.endswith(f"Then go on: grpo-nb demo --resume --out {out}")
        assert not mount(20, "remount")
        status, printed = resume(out, capsys)
        assert status == 0 and "going on from" in printed, printed
        assert learned(out) == learned(undisturbed)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.full
def test_killed_at_random_moments(undisturbed, tmp_path, kills=12):
    out, rng = tmp_path / "run", random.Random(0)
    words = ["--steps", STEPS, "--save-steps", 2, "--out", out]
    for _ in range(kills):
        more = ["--resume"] if (out / "demo.json").exists() else []
        process = demo(*words, *more, program=SHORT)
        try:
            process.wait(rng.uniform(0, 20))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    last = demo(*words, "--resume", program=SHORT)
    printed = last.communicate(timeout=300)[0]
    assert last.returncode == 0, printed
    assert learned(out) == learned(undisturbed)


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


def has_a_one(completions, **row):
    return [float("1" in one[0]["content"]) for one in completions]


@pytest.mark.long
def test_a_trained_model_learns_by_an_adapter_and_goes_on(tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM
    from test_one_page import saved_qwen3
    from transformers import AutoTokenizer

    base, out = tmp_path / "base", tmp_path / "run"
    saved_qwen3(base)
    before = load_file(base / "model.safetensors")
    fewer = dict(per_device_train_batch_size=4, num_generations=4, warmup_steps=0)
    monkeypatch.setattr(grpo_nb.demo, "REAL", grpo_nb.demo.REAL | fewer)
    monkeypatch.setattr(grpo_nb.demo, "number_matches", lambda text, answer: "1" in text)
    monkeypatch.setattr(grpo_nb.demo, "correct_number_reward", has_a_one)
    words = ["demo", "--model", str(base), "--out", str(out), "--save-steps", "1", "--quiet"]
    assert cli.main([*words, "--steps", "2"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    model = AutoPeftModelForCausalLM.from_pretrained(out / "model").eval()
    rows = grpo_nb.demo.asked_in_words(0)[1]
    (said,) = rows[0]["prompt"]
    a, b = re.fullmatch(
        r"What is (\d+)\+(\d+)\? Answer with the number\.", said["content"]
    ).groups()
    assert said["role"] == "user" and int(a) + int(b) == int(rows[0]["answer"])
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert grpo_nb.demo.greedy_accuracy(model, tokenizer, rows) == summary["accuracy_after"]
    adapter = load_file(out / "model" / "adapter_model.safetensors")
    assert any(x.abs().max() > 0 for name, x in adapter.items() if "lora_B" in name)
    after = load_file(base / "model.safetensors")
    assert all((after[name] == x).all() for name, x in before.items())
    (out / "summary.json").unlink()
    shutil.rmtree(out / "checkpoint-2")
    assert cli.main(["demo", "--resume", "--out", str(out), "--quiet"]) == 0  # the marker knows
    again = json.loads((out / "summary.json").read_text())
    assert again["accuracy_after"] == summary["accuracy_after"] and again["steps"] == 2
    assert cli.main(["demo", "--resume", "--out", str(out), "--model", "other"]) == 2
