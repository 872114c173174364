"""benchmarks/decode.py without a GPU: the weights it writes, what it counts, its table, its
processes."""

import argparse
import importlib.util
import inspect
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssForCausalLM, Mxfp4Config

SCRIPT = Path(__file__).parents[1] / "benchmarks/decode.py"


@pytest.fixture(scope="module")
def decode():
    spec = importlib.util.spec_from_file_location("benchmarks_decode", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(decode):
    return decode.build(decode.SMALL, "cpu")


@pytest.fixture
def bench(decode, tmp_path):
    args = argparse.Namespace(
        cases=decode.SMALL_CASES,
        minutes=1,
        small=True,
        device="cpu",
        adapters="none",
        logs=tmp_path / "logs",
        unsloth_site=None,
        vllm_site=None,
    )
    bench = decode.Bench(args, decode.SMALL)
    yield bench
    bench.close()


def told(capsys, decode):
    "The records printed so far."
    return [
        json.loads(line.removeprefix(decode.MARK))
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(decode.MARK)
    ]


def test_both_checkpoints_are_the_model(decode, model, tmp_path):
    decode.write_mxfp4(tmp_path / "mxfp4", decode.SMALL, "cpu")
    decode.write_bf16(tmp_path / "bf16", decode.SMALL, model)
    settings = dict(dtype=torch.bfloat16, attn_implementation="eager")
    four = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mxfp4", quantization_config=Mxfp4Config(dequantize=True), **settings
    )  # by transformers' own code
    sixteen = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", **settings)
    for other in (four, sixteen):
        theirs = dict(other.named_parameters())
        assert theirs.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            assert torch.equal(p, theirs[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "bf16")("t5 t77")["input_ids"] == [5, 77]
    written = sum(p.stat().st_size for p in (tmp_path / "bf16").glob("*.safetensors"))
    assert 0.9 < decode.checkpoint_bytes(decode.SMALL, "bf16") / written <= 1


def test_a_disk_that_is_too_small_is_named(decode, tmp_path):
    with pytest.raises(OSError, match="takes 1000000000 GB"):
        decode.write(tmp_path / "x", decode.SMALL, [], {}, 1e9)
    assert not (tmp_path / "x").exists()


def test_bytes_of_a_step_are_those_of_the_weights(decode):
    with torch.device("meta"):
        full = GptOssForCausalLM(decode.make_config(decode.FULL))

    def count(*ends):
        return sum(p.numel() for name, p in full.named_parameters() if name.endswith(ends))

    attention, head, experts = (
        count("_proj.weight"),
        count("lm_head.weight"),
        count("experts.gate_up_proj", "experts.down_proj"),
    )
    assert decode.step_bytes(decode.FULL, "bf16", 0, 0, 32) == 2 * (attention + head + experts)
    assert decode.step_bytes(decode.FULL, "bf16", 0, 0, 4) == 2 * (attention + head + experts // 8)
    assert (
        decode.step_bytes(decode.FULL, "MXFP4", 0, 0, 32)
        == 2 * (attention + head) + experts * 4.25 / 8
    )
    cache = decode.step_bytes(decode.FULL, "bf16", 3, 1000, 0) - decode.step_bytes(
        decode.FULL, "bf16", 0, 0, 0
    )
    assert cache == 3 * 12 * (1000 + 128) * 2 * 8 * 64 * 2  # 12 layers see all, 12 see 128


def test_experts_used_are_those_that_transformers_routes_to(decode, model):
    prompts = decode.random_prompts(decode.SMALL, 5, 12)
    assert len({tuple(p) for p in prompts}) == 5 and max(map(max, prompts)) < 510
    with torch.no_grad():
        routed = model(input_ids=torch.tensor(prompts), output_router_logits=True).router_logits
    distinct = [logits.view(5, 12, -1)[:, -1].topk(2).indices.unique().numel() for logits in routed]
    assert decode.experts_used(model, prompts) == sum(distinct) / len(distinct)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_prompt_drops_out_of_the_speed(decode, monkeypatch):
    clock, asked = [0.0], []

    def generate(prompts, n):
        asked.append(n)
        clock[0] += (
            5 + 0.01 * n + (100 if len(asked) < 3 else 0)
        )  # the prompt, a step, a slow start

    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])
    assert decode.decode_speed(generate, decode.SMALL, 2, 4, 8, 256, (8, 264)) == pytest.approx(100)
    assert asked == [8, 264, 8, 264]
    with pytest.raises(RuntimeError, match="too noisy"):
        decode.decode_speed(lambda prompts, n: None, decode.SMALL, 2, 4, 8, 256, ())


def test_long_prompts_are_read_three_times(decode, monkeypatch):
    clock, reading = [0.0], iter([5, 5, 5.5, 5, 5, 5.2])

    def generate(prompts, n):
        clock[0] += next(reading) + 0.01 * n

    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(decode, "LONG_READING", 7)
    assert decode.decode_speed(generate, decode.SMALL, 2, 4, 8, 256, ()) == pytest.approx(100)


def test_a_case_that_fails_and_one_that_is_late(decode, capsys):
    def generate(prompts, n):
        if len(prompts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
        raise ValueError("no room\nand more")

    args = argparse.Namespace(
        cases=decode.SMALL_CASES, small=True, device="cpu", deadline=time.time() + 60
    )
    library = decode.Library("ours", "", generate)
    decode.run_cases(library, args, decode.SMALL)
    assert [r.get("error") for r in told(capsys, decode)] == [
        None,
        "out of memory",
        "ValueError: no room",
    ]
    args.deadline = 0
    decode.run_cases(library, args, decode.SMALL)
    assert [r.get("error") for r in told(capsys, decode)] == [None, *["left out: no time left"] * 2]


def test_the_table(decode, bench):
    bench.hear("ours", dict(card="a card", versions={"torch": "9"}, copy=1e12))
    bench.hear("ours", dict(experts={"1": 2.0, "4": 5.5}))
    row = dict(sequences=4, prompt=16, new=6, peak=1.25, reserved=False)
    bench.hear("ours", dict(row, speed=300.0))
    bench.hear("vllm", dict(row, speed=100.0, reserved=True))
    bench.hear("unsloth", dict(row, error="out of memory"))
    bench.hear("transformers", dict(done=True, failed="not | installed"))
    table = bench.table(["ours", "transformers", "unsloth", "vllm"]).splitlines()
    assert {line.count("|") for line in table} == {11}

    def share(kind, speed):
        return f"{speed * decode.step_bytes(decode.SMALL, kind, 4, 16 + 8 + 3, 5.5) / 1e12:.0%}"

    assert (
        f"| ours | bf16 | 4 | 16 | 300.0 | 1,200 | 1.2 | 5.5 | {share('bf16', 300)} |  |" in table
    )
    assert (
        f"| vllm | MXFP4 | 4 | 16 | 100.0 | 400 | 1.2 reserved | 5.5 | {share('MXFP4', 100)} "
        "| 3.00 |"
    ) in table
    assert "| unsloth | bf16 | 4 | 16 | out of memory | | | | | |" in table
    assert "| transformers | bf16 | | | not / installed | | | | | |" in table


def test_children_that_are_missing_fail_or_take_too_long(decode, bench, monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda name: False)
    bench.work(["vllm"])
    assert bench.failed == {"vllm": "not installed"}
    assert bench.run("nonsense", time.time() + 60) is False
    assert (
        bench.failed["nonsense"] == "KeyError: 'nonsense'"
        and "Traceback" in (bench.logs / "nonsense.log").read_text()
    )
    assert bench.run("probe", time.time() - 20) is False
    assert bench.failed["probe"] == "stopped: no time left"


def test_the_last_error_of_a_log(decode):
    assert (
        decode.last_error("a\nValueError: first\ntorch.cuda.OutOfMemoryError: second\n  more\n")
        == "torch.cuda.OutOfMemoryError: second"
    )
    assert (
        decode.last_error("one\n two \n") == "two"
        and decode.last_error("") == "it ended without a word"
    )


def test_checkpoints_are_written_in_time_and_removed(bench, monkeypatch):
    steps = []

    def run(name, deadline, *flags, grace=20):
        steps.append(
            (name, *flags, *sorted(p.name for p in bench.folder.iterdir() if p.name != "logs"))
        )
        wrote = (
            "bf16"
            if "--checkpoint" in flags
            else name.removeprefix("write ")
            if name.startswith("write")
            else None
        )
        if wrote:
            (bench.folder / wrote).mkdir()
        if name in failing:
            bench.hear(name, dict(failed="no space"))
        return name not in failing

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "installed", lambda name: True)
    every = ["ours", "transformers", "unsloth", "vllm"]
    failing = []
    bench.work(every)
    assert steps == [
        ("ours",),
        ("transformers", "--checkpoint"),
        ("unsloth", "bf16"),
        ("write mxfp4",),
        ("vllm", "mxfp4"),
    ]
    steps.clear()
    failing = ["transformers"]  # half a checkpoint, perhaps
    bench.work(every)
    assert steps[1:4] == [("transformers", "--checkpoint"), ("write bf16",), ("unsloth", "bf16")]
    steps.clear()
    failing = ["write mxfp4"]
    bench.work(["vllm"])
    assert (
        steps == [("probe",), ("write mxfp4",)]
        and bench.failed["vllm"] == "no checkpoint: no space"
    )
    assert [p.name for p in bench.folder.iterdir() if p.name != "logs"] == []
    steps.clear()
    bench.args.adapters, failing = "all", []
    bench.work(["vllm"])
    assert steps == [
        ("probe",),
        ("write mxfp4",),
        ("write adapter", "mxfp4"),
        ("vllm", "adapter", "mxfp4"),
    ]
    steps.clear()
    failing = ["write adapter"]
    bench.work(["vllm"])
    assert bench.failed["vllm"] == "no checkpoint: no space" and steps[-1][0] == "write adapter"


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_vllm_reads_the_adapters_that_ours_decodes_with(decode, tmp_path, monkeypatch, targets):
    "vLLM's part by a stand-in, which keeps what it is given."
    args = argparse.Namespace(folder=tmp_path, adapters=targets, device="cpu", probe=False)
    decode.child("write adapter", args, decode.SMALL)
    written = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == decode.RANK
    assert any("experts" in name for name in written) == (targets == "all")
    assert all(tensor.any() for tensor in written.values())

    started = decode.start_ours(args, decode.SMALL, packed=True)
    engine = inspect.getclosurevars(started.generate).nonlocals["engine"]
    held = get_peft_model_state_dict(engine.model)
    assert held.keys() == written.keys() and engine.way.startswith("directly")
    assert all(torch.equal(held[name], written[name]) for name in written)

    given = {}

    class LLM:
        def __init__(self, **settings):
            given.update(settings)

        def generate(self, prompts, params, lora_request, use_tqdm):
            given["adapter"] = lora_request
            tokens = argparse.Namespace(token_ids=[5] * params["max_tokens"])
            return [argparse.Namespace(outputs=[tokens]) for _ in prompts]

    for name, module in {
        "vllm": dict(LLM=LLM, SamplingParams=dict),
        "vllm.lora": {},
        "vllm.lora.request": dict(LoRARequest=lambda *values: values),
    }.items():
        monkeypatch.setitem(sys.modules, name, argparse.Namespace(**module))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2**30))
    monkeypatch.setattr(decode.importlib.metadata, "version", lambda name: "0")
    decode.start_vllm(args, decode.SMALL).generate([[1, 2]], 3)
    assert given["enable_lora"] and given["max_lora_rank"] == decode.RANK
    assert given["adapter"][1:] == (1, str(tmp_path / "adapter"))


def test_who_has_no_adapters_is_named(decode, monkeypatch):
    words = "decode.py --small --device cpu --adapters all --ours --unsloth"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit, match="unsloth cannot be measured with --adapters all"):
        decode.main()


def test_transformers_in_this_process(decode, capsys):
    args = argparse.Namespace(
        cases=decode.SMALL_CASES, small=True, device="cpu", probe=True, deadline=time.time() + 60
    )
    model, _ = decode.start_transformers(args, decode.SMALL)
    card, experts = told(capsys, decode)
    for _ in range(
        5
    ):  # six tokens against two: on a busy machine the difference may drown in noise
        decode.run_cases(model, args, decode.SMALL)
        library, *rows = told(capsys, decode)
        if all("speed" in row for row in rows):
            break
    assert (
        card["copy"] > 0
        and card["versions"]["torch"] == torch.__version__
        and experts["experts"]["1"] == 2
    )
    assert [(r["sequences"], r["prompt"], r["new"]) for r in rows] == [
        (1, 16, 6),
        (4, 16, 6),
    ] and all(r.get("speed", 0) > 0 for r in rows), rows


@pytest.mark.long
def test_the_whole_script(decode, monkeypatch, capsys):
    "In this process, and the child that it starts."
    monkeypatch.setattr(sys, "argv", "decode.py --small --device cpu --ours-mxfp4".split())
    assert not decode.main()
    said = capsys.readouterr().out
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in said.splitlines()
        if line.startswith("|")
    ][2:]
    assert [line[:4] for line in cells] == [["ours_mxfp4", "MXFP4", n, "16"] for n in ("1", "4")]
    assert all(float(line[4]) > 0 and line[8].endswith("%") for line in cells)
    assert "experts used in a layer, of 8:" in said


def test_the_cpu_mode(decode, capsys):
    ratios = decode.cpu([(3, 2, 4)], repeats=1)
    assert len(ratios) == 1 and ratios[0] > 0
    assert f"x {ratios[0]:.2f}" in capsys.readouterr().out
