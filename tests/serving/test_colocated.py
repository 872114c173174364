"""The server that a trainer starts: it dies with its parent, and a run ends it on every way out."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from small_runs import ROWS, digits, one_thread, small_config  # noqa: F401
from transformers import TrainerCallback

from grpo_nb import GRPOTrainer
from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.packed import PackedWeight, pack
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.serving import colocated
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.colocated import (
    KEEPER,
    TRIED,
    ColocatedVLLM,
    bytes_served,
    check_share,
    check_vllm,
    doubt_of_weights,
    vllm_command,
    vllm_environment,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="vLLM runs on Linux and macOS")
PARENT = """
import os, subprocess, sys
keeper, child = sys.argv[1:3]
kept = subprocess.Popen(
    [sys.executable, "-c", keeper, str(os.getpid()), sys.executable, "-c", child],
    start_new_session=True,
)
print(kept.pid, flush=True)
kept.wait()
"""
CHILD = """
import os, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), engine.pid, flush=True)
time.sleep(600)
"""


def lives(pid):
    "Whether a process runs; a zombie does not."
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


def gone(*pids, within=20):
    late = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < late:
        time.sleep(0.05)
    return not any(map(lives, pids))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_and_what_it_started_die_with_the_parent(end):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, KEEPER, CHILD], stdout=subprocess.PIPE)
    pids = [int(word) for _ in range(2) for word in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(map(lives, pids))
    parent.send_signal(end)
    parent.wait(10)
    assert gone(*pids)
    parent.stdout.close()


def test_the_command_says_what_a_run_needs(monkeypatch):
    command = vllm_command("a/b", 7, python="p", rank=20, max_loras=3, max_length=99, sleeps=True)
    assert command[:5] == ["p", "-m", "vllm.entrypoints.cli.main", "serve", "a/b"]
    flags = " ".join(command)
    for flag in (
        "--enable-lora",
        "--enable-sleep-mode",
        "--host 127.0.0.1 --port 7",
        "--max-lora-rank 32 --max-loras 3",
        "--logprobs-mode processed_logprobs",
        "--max-model-len 99",
    ):
        assert flag in flags
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "ours")
    own = vllm_environment("secret", same_python=False)
    assert own["VLLM_API_KEY"] == "secret" and own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "RANK" not in own and "PYTHONPATH" not in own and "secret" not in flags


def test_without_vllm_the_run_does_not_begin(tmp_path):
    with pytest.raises(ImportError, match="this/python has none .*vllm_python.*vllm_mode='server'"):
        check_vllm("this/python")
    model, tokenizer = tiny_gpt_oss()
    config = small_config(tmp_path, use_vllm=True, vllm_python="this/python")
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ImportError, match="use_vllm=True starts a vLLM"):
        GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer, peft_config=adapter)


def test_a_server_that_fails_is_named_with_the_end_of_its_log(tmp_path):
    words = [sys.executable, "-c", "print('CUDA out of memory'); raise SystemExit(1)"]
    start = time.monotonic()
    with pytest.raises(ServerError, match="has ended. .*CUDA out of memory"):
        ColocatedVLLM(lambda port: words, log=tmp_path / "vllm.log", folder=tmp_path)
    assert time.monotonic() - start < 60


def test_the_last_lines_are_those_of_this_server(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("CUDA out of memory\n" * 3)
    words = [sys.executable, "-c", "print('no such model'); raise SystemExit(1)"]
    with pytest.raises(ServerError, match="the last lines: no such model$"):
        ColocatedVLLM(lambda port: words, log=log, folder=tmp_path)


@pytest.mark.parametrize(
    "share, gpus, dtype, said",
    [
        (0.25, 1, torch.bfloat16, "is 0.25, .* vLLM takes 0.0 without a cache: give 0.35 or more"),
        (0.35, 1, torch.bfloat16, None),
        (0.25, 2, torch.bfloat16, None),  # a half of the weights on each
        (0.35, 1, torch.float32, "give 0.45 or more"),
        (0.9, 1, torch.float64, "vLLM takes 0.0 without a cache: leave use_vllm out"),
    ],
)
def test_a_share_that_holds_no_weights_is_refused(monkeypatch, share, gpus, dtype, said):
    weights = torch.nn.Linear(1024, 1024, bias=False, device="meta")  # a million in float32
    monkeypatch.setattr(colocated, "VLLM_GRAPHS", 4 * 2**20)
    card = type("Card", (), {"total_memory": (20 if dtype != torch.float64 else 12) * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    given = weights, share, torch.device("cuda"), dtype, gpus
    check_share(weights, share, torch.device("cpu"), dtype)
    if said is None:
        return check_share(*given)
    with pytest.raises(ValueError, match=said):
        check_share(*given)


def test_bytes_of_a_model_in_vllm():
    model = torch.nn.Sequential(torch.nn.Linear(32, 4), torch.nn.Linear(8, 4, bias=False))
    plain = 4 * 32 + 4 + 4 * 8
    assert bytes_served(model, torch.bfloat16) == 2 * plain
    model[1].weight = torch.nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), False)
    model[1].__class__ = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn"})
    assert bytes_served(model, torch.bfloat16) == 2 * plain
    model[0].weight = torch.nn.Parameter(pack(torch.randn(2, 32, 64)), requires_grad=False)
    assert isinstance(model[0].weight, PackedWeight)
    packed = 2 * 32 * 64 // 2 + 2 * 32 * 64 // 32
    assert bytes_served(model, torch.bfloat16) == packed + 2 * (4 + 4 * 8)


def served(folder):
    "The command of the stand-in in place of vLLM's."

    def words(self, rank, max_loras, port):
        given = ["--port", str(port), "--lora-dir", str(folder), "--max-loras", str(max_loras)]
        return [sys.executable, "-m", "grpo_nb", "serve", "tiny", *given]

    return words


@pytest.mark.long
def test_a_run_starts_its_server_lets_it_sleep_and_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(colocated.VLLMOfRun, "words", served(tmp_path))
    model, tokenizer = tiny_gpt_oss()
    config = small_config(
        tmp_path, use_vllm=True, vllm_enable_sleep_mode=True, max_steps=3, logging_first_step=True
    )
    adapter = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    trainer = GRPOTrainer(
        model, digits, config, ROWS, processing_class=tokenizer, peft_config=adapter
    )
    keeper, seen = trainer.vllm.keeper, []
    told = trainer.policy_update.prepare

    def prepare(batch):
        seen.append(
            trainer.vllm.servers.tell(trainer.vllm.addresses[0], "/is_sleeping")["is_sleeping"]
        )
        return told(batch)

    trainer.policy_update.prepare = prepare
    trainer.train()
    gaps = [record["sampling/gap_mean"] for record in trainer.log_history]
    assert len(gaps) == 3 and max(gaps) < 1e-6 and seen == [True] * 3
    assert keeper.poll() is not None and trainer.vllm.keeper is None
    assert "tiny at http://127.0.0.1" in (tmp_path / "vllm.log").read_text()
    assert not list((tmp_path / ".vllm_adapters").iterdir())


def on_its_own_server(tmp_path, monkeypatch, **others):
    monkeypatch.setattr(colocated.VLLMOfRun, "words", served(tmp_path))
    settings = dict(use_vllm=True, max_steps=1, max_staleness=others.pop("max_staleness", 0))
    model, tokenizer = tiny_gpt_oss()
    others |= dict(processing_class=tokenizer, peft_config=LoraConfig(target_modules=["q_proj"]))
    return GRPOTrainer(model, digits, small_config(tmp_path, **settings), ROWS, **others)


@pytest.mark.long
def test_what_is_refused_starts_no_server_or_ends_it(tmp_path, monkeypatch):
    started, start = [], colocated.start_kept
    noted = lambda *given: started.append(start(*given)) or started[-1]  # noqa: E731
    monkeypatch.setattr(colocated, "start_kept", noted)

    class Deaf(TrainerCallback):
        def __init__(self, event):
            setattr(self, event, self.fail)

        def fail(self, *given, **others):
            raise OSError("no")

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    with pytest.raises(ValueError, match="tool"):
        on_its_own_server(tmp_path, monkeypatch, tools=[add], max_staleness=1)
    assert not started
    with pytest.raises(OSError, match="no"):
        on_its_own_server(tmp_path, monkeypatch, callbacks=[Deaf("on_init_end")])
    assert started[0].poll() is not None
    trainer = on_its_own_server(tmp_path, monkeypatch)
    with pytest.raises((ValueError, OSError)):
        trainer.train(resume_from_checkpoint=True)
    assert started[1].poll() is not None and not trainer.vllm.runs
    trainer = on_its_own_server(tmp_path, monkeypatch, callbacks=[Deaf("on_train_begin")])
    with pytest.raises(OSError, match="no"):
        trainer.train()
    assert started[2].poll() is not None and not trainer.vllm.runs


@pytest.mark.long
def test_an_evaluation_after_a_run_leaves_no_server(tmp_path, monkeypatch):
    trainer = on_its_own_server(tmp_path, monkeypatch)
    trainer.evaluate(ROWS[:1])
    assert trainer.vllm.runs  # the run that follows needs it
    trainer.train()
    connect, connected = trainer.vllm.connect, []
    trainer.vllm.connect = lambda: connected.append(connect())
    trainer.evaluate({"one": ROWS[:1], "two": ROWS[1:2]})
    assert len(connected) == 1 and not trainer.vllm.runs


def test_a_run_asks_vllm_for_as_many_rows_as_it_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(colocated, "check_vllm", lambda python: None)
    commands = []
    monkeypatch.setattr(
        colocated, "ColocatedVLLM", lambda command, **others: commands.append(command(7))
    )
    model, tokenizer = tiny_gpt_oss()
    model.config._name_or_path = str(tmp_path)
    model = add_adapters(model, 2, resolve_targets(model, ["k_proj"]))
    for batch, judged, rows, recorded in (
        *((2, 8, 64, 64), (96, 8, 96, 96), (100, 8, 100, 104), (264, 8, 264, 272)),
        *((2, 80, 80, 80), (2000, 8, 1024, 512)),
    ):
        config = small_config(
            tmp_path,
            use_vllm=True,
            num_generations=2,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=judged,
        )
        GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer)
        flag = commands[-1].index("--max-num-seqs")
        assert commands[-1][flag + 1] == str(rows)
        assert f"--max-cudagraph-capture-size {recorded}" in " ".join(commands[-1])


def test_a_base_in_nf4_is_not_what_vllm_loads(tmp_path, monkeypatch):
    model, tokenizer = tiny_gpt_oss()
    assert doubt_of_weights(model) is None
    packed = type("Linear4bit", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    for layer in model.model.layers:
        layer.self_attn.q_proj.__class__ = packed
    monkeypatch.setattr(colocated, "ColocatedVLLM", lambda *given, **others: None)
    config = small_config(tmp_path, use_vllm=True, vllm_python="no/such/python")
    model = add_adapters(model, 2, resolve_targets(model, ["k_proj"]))
    with pytest.warns(UserWarning, match="base model in NF4, and the vLLM .* in 16 bits"):
        GRPOTrainer(model, digits, config, ROWS, processing_class=tokenizer)


def test_the_version_that_is_named_is_the_extra_s():
    settings = (Path(__file__).parents[2] / "settings.ini").read_text()
    assert f"\nvllm_requirements = vllm=={TRIED}\n" in settings
    table = (Path(__file__).parents[2] / "docs/beyond_one_machine.md").read_text()
    assert [row.split(" | ")[0] for row in table.splitlines() if "| yes, on cards" in row] == [
        f"| {TRIED}"
    ]
