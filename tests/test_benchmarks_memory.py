"""benchmarks/train_step.py, context.py, at_size.py, grpo_step.py, decode_modules.py and versions.py
without a GPU: every path with a tiny model, the search, the tables, the children."""

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from grpo_nb.model import attention, limits

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = ("train_step", "grpo_step", "context", "at_size", "decode_modules", "vllm_reads")
NAMES += ("dense_step", "pictures", "on_cards", "versions")  # the last two read arguments first


@pytest.fixture(scope="module", autouse=True)
def scripts():
    "The scripts as modules, which import one another as they do when they are run."
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    with torch.compiler.set_stance("force_eager"):
        yield {
            name: importlib.import_module(name) for name in NAMES
        }  # compiling would take longer than all else
    sys.path[:] = path
    for name in (*NAMES, "decode"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.fixture
def train_step(scripts):
    return scripts["train_step"]


@pytest.fixture
def context(scripts):
    return scripts["context"]


def told(capsys):
    "The records printed so far."
    return [
        json.loads(line.removeprefix("@record "))
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("@record ")
    ]


def settings(**changes):
    return argparse.Namespace(
        **{
            **dict(
                cpu=True,
                lengths=[32],
                offload=[False, True],
                offload_embedding=False,
                way="trainer",
                adapters="float32",
                repeats=1,
                profile=False,
                record=False,
                tokens=None,
                search=True,
                tries=2,
                layers=2,
                confirm=True,
                deadline=time.time() + 60,
            ),
            **changes,
        }
    )


@pytest.mark.long
@pytest.mark.parametrize("way", ["trainer", "plain"])
def test_our_steps(train_step, capsys, way):
    train_step.run_ours(settings(way=way), train_step.SMALL, "mxfp4")
    loaded, *rows = told(capsys)
    assert loaded["loaded"] == "mxfp4" and loaded["torch"] == torch.__version__
    assert [(r["tokens"], r["offload"]) for r in rows] == [(32, False), (32, True)] and all(
        r["seconds"] > 0 for r in rows
    )


@pytest.mark.long
@pytest.mark.parametrize("weights", ["bf16", "dense"])
def test_steps_with_and_without_recordings(train_step, capsys, weights):
    train_step.run_ours(settings(record=True), train_step.SMALL, weights)
    _, row = told(capsys)
    assert "gradients that differ: 0 of" in row["text"] and "not recorded" not in row["text"]
    assert row["profile"]["after"]["seconds"] > 0 < row["profile"]["before"]["sent_ms"]


def test_both_ways_and_transformers_have_one_gradient(train_step):
    torch.manual_seed(0)
    model, ids, found = (
        train_step.gpt_oss(train_step.SMALL, "bf16", 64),
        train_step.random_ids(train_step.SMALL, 40, "cpu"),
        [],
    )
    for way, offload in (("trainer", False), ("plain", False), ("plain", True)):
        step = train_step.Step(model, offload=offload, way=way)
        step(train_step.batch_of(ids))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
        step.close()
        assert all(p.grad is None for p in model.parameters())
    model.get_base_model().set_attn_implementation("eager")
    logits = model(input_ids=ids).logits
    (-torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean()).backward()
    found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    for g in found[:-1]:
        assert (g - found[-1]).norm() < 1e-4 * found[-1].norm()


def test_the_kernels_of_a_step(train_step, capsys):
    train_step.run_ours(settings(profile=True, lengths=[32]), train_step.SMALL, "mxfp4")
    record = told(capsys)[-1]
    assert (
        record["profile"]["tokens"] == 32
        and len(record["profile"]["top"]) == 25
        and "GroupedExperts" in record["text"]
    )


def test_transformers_steps(train_step, capsys):
    train_step.run_transformers(settings(lengths=[48, 32]), train_step.SMALL)
    assert [r["tokens"] for r in told(capsys) if "seconds" in r] == [32, 48]


def test_an_attempt_that_fails_says_why(train_step):
    def short():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    def cublas():
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    def wrong():
        raise ValueError("no room\nand more")

    assert [train_step.attempt(f)[1] for f in (short, cublas, wrong)] == [
        "out of memory",
        "out of memory",
        "ValueError: no room",
    ] and train_step.attempt(lambda: 3) == (3, None)


def test_the_rows_and_the_records_of_the_planner(train_step, capsys):
    table = train_step.Table(argparse.Namespace(cpu=False, offload_embedding=False))
    table.hear(
        dict(
            loaded="mxfp4",
            seconds=9.0,
            peak=13.0,
            driver=13.5,
            card="a card",
            torch="2.11",
            transformers="5.17",
        )
    )
    table.hear(
        dict(
            library="mxfp4",
            tokens=2048,
            offload=True,
            seconds=0.2,
            peak=13.9,
            driver=14.4,
            host=0.3,
        )
    )
    table.hear(
        dict(
            library="mxfp4",
            tokens=8192,
            offload=True,
            seconds=0.4,
            peak=14.5,
            driver=15.1,
            host=1.1,
        )
    )
    table.hear(
        dict(
            library="bf16", tokens=8192, offload=False, seconds=0.5, peak=41.0, driver=41.5, host=0
        )
    )
    table.hear(dict(library="transformers", tokens=8192, seconds=1.0, peak=61.7, driver=70.0))
    table.hear(dict(library="unsloth", tokens=8192, error="out of memory"))
    table.ratios()
    text = capsys.readouterr().out
    assert (
        "budget 15 GiB: kept" in text
        and "budget 0.45 s, 40.5 GiB: missed" in text
        and "102 KiB a token since 2,048" in text
        and "transformers / this: time x 2.50, memory x 4.26" in text
    )
    assert [r["peak_gib"] for r in table.records] == [13.9, 14.5, 41.0, 61.7]
    for record in table.records:
        assert train_step.planned(record) == pytest.approx(record["peak_gib"], rel=0.15)
    stored = json.loads((Path(__file__).parent / "data/memory_h200.json").read_text())["records"]
    assert {frozenset(r) for r in table.records} == {frozenset(stored[0])}


def test_children_that_end_badly(train_step, tmp_path, capsys):
    script, heard = tmp_path / "script.py", []
    script.write_text(
        "import sys, time\nname = sys.argv[-1]\nprint('@record {\"x\": 1}', flush=True)\nif "
        "name == 'slow': time.sleep(60)\nif name == 'good': print('@record {\"done\": "
        "true}', flush=True)\nelse: raise ValueError('broken')\n"
    )
    start = time.time()
    assert train_step.run_child(script, "good", [], limit_s=20, hear=heard.append) is None
    assert (
        train_step.run_child(script, "bad", [], limit_s=20, hear=heard.append)
        == "it ended without a word"
    )
    assert (
        train_step.run_child(script, "slow", [], limit_s=2, hear=heard.append)
        == "stopped after 2 s"
    )
    assert (
        heard == [{"x": 1}] * 3
        and time.time() - start < 30
        and "ValueError: broken" in capsys.readouterr().out
    )


# context.py


def test_the_search(context):
    def card(limit):
        return lambda n: {"seconds": n / 1000} if n <= limit else {"error": "out of memory"}

    def found(limit, start, **options):
        return context.search(
            start, card(limit), **{**dict(tries=9, seconds_left=lambda: 1e9), **options}
        )[:2]

    assert found(1500, 1000) == (1408, 1536)
    assert found(800, 1000) == (704, 832)
    assert found(10_000, 1000, tries=2) == (1024, None)
    assert found(10, 128) == (None, 64)
    assert (
        found(5000, 1000, jump=6000) == (4736, 5312)
        and found(5000, 1000, jump=6000, tries=2) == (960, 5952)
        and found(7000, 1000, jump=6000) == (6528, 7168)
    )
    assert found(10_000, 1000, first_that_fits=True) == (960, None)
    assert found(10_000, 1000, seconds_left=lambda: 0.5) == (960, None)
    assert context.search(
        640, lambda n: {"error": "ValueError: x"}, tries=9, seconds_left=lambda: 9
    )[:2] == (None, None)


def test_a_t4_is_reported_to_the_library_only(context):

    real, triton = torch.cuda.get_device_capability, attention.BACKENDS["triton"]
    asked = context.told_to_us(lambda device=None: (9, 0), (7, 5))
    scope = {"asked": asked, "__name__": "grpo_nb.somewhere"}
    exec("inside = asked()", scope)
    assert scope["inside"] == (7, 5) and asked() == (9, 0)
    with context.Limits(14.5, True):
        assert torch.cuda.get_device_capability is not real
        with pytest.raises(RuntimeError, match="8.0"):
            attention.BACKENDS["triton"]()
    assert torch.cuda.get_device_capability is real and attention.BACKENDS["triton"] is triton
    with context.NoBFloat16():
        torch.ones(2).half()
        with pytest.raises(RuntimeError, match="bfloat16"):
            torch.ones(2).bfloat16()


def test_a_smaller_card(context, monkeypatch):
    GiB, fraction = 2**30, []
    limits = context.Limits(14.5, False)
    limits.cap, limits.told = (
        int(14.5 * GiB),
        lambda device=None: (129 * GiB, 140 * GiB),
    )  # 11 GiB are used, 10.4 of them by torch
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: int(10.4 * GiB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limits.tighten(spare=0.1)
    assert limits.mem_get_info() == (int(3.5 * GiB), int(14.5 * GiB)) and fraction[
        0
    ] * 140 == pytest.approx(14.5 - 0.6 - 0.1)
    assert limits.kept()
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 14 * GiB)
    assert not limits.kept()


@pytest.mark.parametrize(
    "name, least",
    [
        ("t4_longest", 8000),
        ("mxfp4_24", 40_000),
        ("bf16_80", 100_000),
        ("mxfp4_141", 250_000),
        ("qwen3_80", 60_000),
    ],
)
def test_where_a_search_begins(context, name, least):
    limits = argparse.Namespace(cap=int(context.CASES[name].cap * 2**30), total=0)
    training, all_ = context.planned_length(context.CASES[name], settings(cpu=False), limits)
    assert least < training < 2**21 and all_ <= training


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "t4_longest",
        "t4_grpo",
        "qwen3_80",
        "llama_20k",
        "phi4_t4",
        "qwen_5",
        "chunks_8192",
        "batch_oss_transformers",
    ],
)
def test_every_kind_of_case(context, capsys, name):
    context.run_case(settings(), name)
    _, *rows = told(capsys)
    assert (
        not [r for r in rows if r.get("error")]
        and any("seconds" in r for r in rows)
        and all(context.line_of(r) for r in rows)
    )
    if context.CASES[name].kind == "longest":
        assert rows[-1]["longest"] == 192 and rows[-1]["confirmed"]
    if context.CASES[name].t4:
        assert any(r.get("note", "").endswith(": yes") for r in rows)
        assert "not measured: training " in context.line_of(rows[-1]) and (
            "drawing" in rows[-1]["t4_estimate"]
        ) == (context.CASES[name].kind == "grpo")


def test_the_cases_have_models(context):
    from grpo_nb.model.memory_bytes import MODELS

    for case in context.CASES.values():
        assert (
            case.kind in context.WORK
            and case.model in MODELS
            and case.prompts * case.completions % case.batch == 0
        )


def fake_unsloth(monkeypatch, calls):
    """What context.py asks of Unsloth, done by transformers and PEFT; its log-softmax here takes
    logits where the true one takes hidden states."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    class FastLanguageModel:
        def from_pretrained(folder, **settings):
            calls.append(settings)
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), None

        def get_peft_model(model, r, lora_alpha, target_modules, **settings):
            calls.append(dict(settings, targets=target_modules))
            return get_peft_model(
                model,
                LoraConfig(
                    r=r, lora_alpha=lora_alpha, target_modules=target_modules, task_type="CAUSAL_LM"
                ),
            )

        def for_training(model):
            model.train()

    def chunked(hidden, head, ids, chunks):
        calls.append((tuple(hidden.shape), tuple(head.shape), tuple(ids.shape), chunks))
        return torch.log_softmax(hidden, -1).gather(-1, ids[..., None])[..., 0]

    monkeypatch.setitem(
        sys.modules, "unsloth", argparse.Namespace(FastLanguageModel=FastLanguageModel)
    )
    monkeypatch.setitem(sys.modules, "unsloth_zoo", argparse.Namespace())
    monkeypatch.setitem(
        sys.modules,
        "unsloth_zoo.rl_replacements",
        argparse.Namespace(RL_REPLACEMENTS={"grpo_selective_log_softmax": chunked}),
    )
    monkeypatch.setenv("UNSLOTH_RETURN_HIDDEN_STATES", "0")


@pytest.mark.parametrize(
    "name, vocab, targets", [("batch_oss_unsloth", 512, 4), ("batch_qwen_unsloth", 256, 7)]
)
def test_unsloths_batches(context, capsys, monkeypatch, tmp_path, name, vocab, targets):
    calls, args = [], settings(checkpoint=str(tmp_path / "there"))
    fake_unsloth(monkeypatch, calls)
    context.write_for_unsloth(context.CASES[name], args)
    folder = context.checkpoint_of(context.CASES[name], args)
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert (
        folder.name.endswith("-tiny")
        and {"config.json", "tokenizer.json"} < set(written)
        and [path.name for path in tmp_path.iterdir()] == [folder.name]
    )
    context.write_for_unsloth(context.CASES[name], args)  # it is there
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    context.run_case(args, name)
    _, *rows = told(capsys)
    assert [(r["tokens"], r["batch"]) for r in rows] == [(32, 4), (64, 4)] and all(
        r["seconds"] > 0 for r in rows
    )
    loaded, adapted, *steps = calls
    assert (
        loaded["load_in_4bit"] == (name == "batch_qwen_unsloth")
        and len(adapted["targets"]) == targets
        and adapted["use_gradient_checkpointing"] == "unsloth"
    )
    assert (
        steps == [((4, n - 1, vocab), (vocab, 64), (4, n - 1), 4) for n in (32, 64)]
        and os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] == "1"
    )


def run_context(context, monkeypatch, tmp_path, children, *names):
    "context.py's main, its children noted and answered."
    monkeypatch.setattr(
        context,
        "run_child",
        lambda script, name, argv, sites=(), hear=None, **more: (
            children.append((name, [site.name for site in sites]))
            or hear(
                dict(
                    tokens=1024 if "_" in name else 1,
                    batch=4,
                    seconds=1.0,
                    peak=30.0 if "_unsloth" in name else 20.0,
                )
            )
        ),
    )
    monkeypatch.setattr(
        sys, "argv", ["context.py", "--cpu", "--sites", str(tmp_path), "--only", *names]
    )
    return context.main()


def test_without_unsloth_there_is_a_line(context, capsys, monkeypatch, tmp_path):
    children = []
    monkeypatch.setattr(context.importlib.util, "find_spec", lambda name: None)
    assert (
        run_context(
            context, monkeypatch, tmp_path, children, "batch_oss_unsloth", "batch_qwen_unsloth"
        )
        == 1
        and not children
    )
    text = capsys.readouterr().out
    assert (
        text.count("left out: Unsloth is not installed, nor is it in") == 2
        and str(tmp_path / "site-unsloth") in text
    )
    assert json.loads(text.splitlines()[-1])["cases"] == {
        name: [{"error": "Unsloth is not installed"}]
        for name in ("batch_oss_unsloth", "batch_qwen_unsloth")
    }


def test_unsloth_runs_in_a_child_of_its_own_folder(context, capsys, monkeypatch, tmp_path):
    children = []
    (tmp_path / "site-unsloth/unsloth").mkdir(parents=True)
    assert (
        run_context(context, monkeypatch, tmp_path, children, "batch_qwen", "batch_qwen_unsloth")
        == 0
    )
    assert children == [
        ("batch_qwen", ["site-bitsandbytes", "site-unsloth"]),
        ("write batch_qwen_unsloth", []),
        ("batch_qwen_unsloth", ["site-unsloth", "site-bitsandbytes"]),
    ]
    assert (
        "batch of 4, qwen: in unsloth's 30.0 GiB (1,024 tokens) ours has 1,024 tokens of "
        "those measured: x 1.0"
    ) in capsys.readouterr().out


# grpo_step.py and at_size.py


def test_a_whole_step_has_its_parts(scripts, capsys, monkeypatch):
    sizes = dict(prompts=2, completions=2, prompt=6, new=4, batch=2, steps=2)
    args = settings(**sizes, offload=True, mini_batch=None, record=64)
    monkeypatch.setattr(limits, "RECORDED_TOKENS", 0)  # puts back what the script sets
    scripts["grpo_step"].measure_ours(args, scripts["train_step"].SMALL, "mxfp4")
    row = told(capsys)[-1]
    assert limits.RECORDED_TOKENS == 64
    assert (
        row["drawn"] == 16
        and row["seconds"] >= row["sample"] + row["train"]
        and row["log"]["grad_norm"] > 0
    )
    with pytest.raises(ValueError, match="do not divide"):
        scripts["grpo_step"].grpo_step(None, None, [1], completions=3, new_tokens=1, batch=2)


@pytest.mark.long
def test_three_ways_through_the_modules(scripts, capsys):
    args = settings(only=["modules", "replayed", "generate"], rows=[1, 3], prompt=6, new=5)
    scripts["decode_modules"].measure(args, "Qwen2.5-1.5B:bf16", "ours")
    rows = [row for row in told(capsys) if "way" in row]
    assert [(row["way"], row["rows"]) for row in rows] == [
        (way, n) for way in args.only for n in args.rows
    ] and all(row["rate"] > 0 for row in rows)
    assert rows[0]["how"] == "through the model's modules: as asked" and "error" in scripts[
        "decode_modules"
    ].whole(lambda ids, new: 1, [[1]], 2)


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
def test_at_size_when_all_is_well(scripts, capsys, weights):
    scripts["at_size"].compare(settings(tokens=32), scripts["train_step"].SMALL, weights, 2)
    row = told(capsys)[-1]
    assert (
        row["within"]
        and row["rows"]["ours, wide"]["gradient_error"] < 1e-12
        and 0 < row["rows"]["ours"]["gradient_error"] < 1e-4
    )


def test_at_size_finds_a_mistake(scripts, capsys, monkeypatch):
    at_size = scripts["at_size"]
    right = at_size.compute_ours

    def wrong(*given):
        loss, grads, choices = right(*given)
        return (
            loss,
            {name: g * 1.02 if "q_proj" in name else g for name, g in grads.items()},
            choices,
        )

    monkeypatch.setattr(at_size, "compute_ours", wrong)
    at_size.compare(settings(tokens=32), scripts["train_step"].SMALL, "bf16", 2)
    row = told(capsys)[-1]
    assert (
        not row["within"]
        and "ours in the truth's format" in row["outside"]
        and "q_proj" in row["rows"]["ours, wide"]["worst"]
    )


# As they are run


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_say_what_they_do(scripts, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        scripts[name].main()
    assert ended.value.code == 0 and f"benchmarks/{name}.py" in capsys.readouterr().out


def test_a_dense_models_step_is_ours_on_the_checkpoint_that_peers_read(scripts, tmp_path, capsys):
    script, folder = scripts["dense_step"], str(tmp_path / "model")
    args = settings(checkpoint=folder, cpu=True, prompts=2, completions=2, prompt=8, new=6)
    vars(args).update(batch=2, steps=2)
    script.write_dense(args, script.TINY)
    script.measure_ours(args, script.TINY, with_vllm=False)
    loaded, row = told(capsys)
    assert loaded["loaded"] == row["library"] == "own" and len(row["steps"]) == 2
    assert 0 < row["sample"] + row["train"] <= row["seconds"]
    assert "s a step" in script.line(row)


def test_one_script_makes_every_table_of_the_page():
    listed = subprocess.run(
        [sys.executable, str(FOLDER / "how_fast.py"), "--list"], capture_output=True, text=True
    ).stdout
    found = dict(re.findall(r"(\w+): python benchmarks/(\w+\.py)", listed))
    assert all((FOLDER / script).exists() for script in found.values()), found
    page = (FOLDER.parent / "docs/how_fast.md").read_text()
    assert set(re.findall(r"images/fast_(\w+)\.svg", page)) <= found.keys()
    assert not [script for script in found.values() if f"benchmarks/{script}" not in page]


def test_the_page_says_of_versions_what_was_stored(scripts, capsys):
    page = (FOLDER.parent / "docs/how_fast.md").read_text()
    page = page.split("## Before and after")[1].split("\n## ")[0]
    (record,) = json.loads((FOLDER / "results/versions.json").read_text())
    scripts["versions"].show(record)
    assert all(commit in page for commit in record["commits"].values())
    ratios = re.findall(r"x ([\d.]+) \(([\d.]+) to ([\d.]+)\)", capsys.readouterr().out)
    for found, ratio in zip(record["cases"].values(), ratios, strict=True):
        assert found["old"].get("tokens") == found["now"].get("tokens")
        old, now = (statistics.median(found[name]["seconds"]) for name in ("old", "now"))
        shown = [f"{s:.3f}".lstrip("0") if s < 1 else f"{s:.2f}" for s in (old, now)]
        middle, low, high = (number.removeprefix("0") for number in ratio)
        assert "| {} | {} | {} ({} to {}) |".format(*shown, middle, low, high) in page, found


@pytest.mark.long
def test_two_versions_take_turns(tmp_path):
    root = FOLDER.parent
    command = [sys.executable, str(FOLDER / "versions.py"), f"old={root}", f"now={root}"]
    command += ["--out", str(tmp_path), "--small", "--cases", "draw", "grpo", "--rounds", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert not ran.returncode, ran.stderr + (tmp_path / "old.log").read_text()
    (record,) = json.loads((tmp_path / "versions.json").read_text())
    assert list(record["cases"]) == ["draw, 8 rows", "draw, 64 rows", "grpo, 64 completions"]
    for found in record["cases"].values():
        assert list(found) == ["old", "now"] and found["old"]["tokens"] == found["now"]["tokens"]
        assert all(
            len(told["seconds"]) == 2 and min(told["seconds"]) > 0 for told in found.values()
        )
    assert len(re.findall(r"; x [\d.]+ \(", ran.stdout)) == 3
    assert ran.stdout.count(" ms a step\n") == 4  # of what draws alone


def test_every_table_of_the_page_names_machine_versions_and_day():
    parts = (FOLDER.parent / "docs/how_fast.md").read_text().split("\n\n")
    pictures = [n for n, part in enumerate(parts) if part.startswith("![")]
    assert len(pictures) > 5
    for n in pictures:
        below = parts[n + 2]  # the picture, the table, its line
        assert parts[n + 1].startswith("| ") and re.match("One H[12]00", below), below
        assert re.search(r"torch 2\.\d+", below) and re.search(r"2026-\d\d-\d\d", below), below


@pytest.mark.parametrize("name", NAMES[:-2])
def test_without_a_card_there_is_a_sentence(scripts, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match="--cpu tries"):
        scripts[name].main()


@pytest.mark.long
def test_a_whole_run(train_step, monkeypatch, capsys):
    "The script in this process, and the child that it starts."
    words = "--cpu --only bf16 --lengths 32 --offload off --repeats 1".split()
    monkeypatch.setattr(sys, "argv", ["train_step.py", *words])
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not train_step.main()
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["rows"][0]["tokens"] == 32, said


def test_what_vllm_is_to_read_is_what_transformers_reads(scripts, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_reads.py", "--cpu"])
    assert scripts["vllm_reads"].main() == 0
    said = capsys.readouterr().out
    assert "the adapter's file has the layout that vLLM reads" in said
    rows = json.loads(said.splitlines()[-1])["rows"]
    assert len(rows) == 5 and all(
        row["error"] == "vLLM was not asked"
        and max(row["floor_ours"], row["floor_transformers"]) < 0.002
        for row in rows
    )
    assert all(
        0.98 < row["slope_ours"] < 1.02 and row["moved"] > 5 * row["floor_ours"] for row in rows[1:]
    )


def test_vllm_needs_a_card(scripts, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm_reads.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--cpu"):
        scripts["vllm_reads"].main()


def test_pictures_beside_the_plan(scripts, capsys, monkeypatch, tmp_path):
    "With a tiny model; the sizes are those of the released models, and each line of the list runs."
    from grpo_nb.model.memory_bytes import MODELS, released_shape

    pictures, out = scripts["pictures"], tmp_path / "found.json"
    for name in pictures.SIZES:
        shape, known = released_shape(pictures.config_of(name)), MODELS[name]
        assert (shape.tower, shape.parameters) == (known.tower, known.parameters)
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--cpu", "--out", str(out)])
    assert pictures.main() == 0
    said = capsys.readouterr().out
    assert "2 pictures among them" in said and "training: None GiB; the plan says" in said
    assert json.loads(out.read_text())["rows"]["training"]["planned"] > 10
    for _, minutes, _, first, line in scripts["on_cards"].read(FOLDER / "pictures_runs.txt"):
        script, *given = line.split()[1:]
        assert script == "benchmarks/pictures.py" and minutes <= 10 and first is None
        flags = {word for word in given if word.startswith("--")}
        assert flags <= {"--out", "--tower", "--tokens", "--cap", "--model"}
