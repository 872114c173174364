"""benchmarks/tutorials_at_size.py without a GPU: cells of the tutorials on 2048 and matrix
multiplication as they stand, with a tiny model, and what the script would complain about."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def script():
    "The script as a module."
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    with torch.compiler.set_stance("force_eager"):
        yield importlib.import_module("tutorials_at_size")
    sys.path[:] = path
    for name in ("tutorials_at_size", "grpo_step", "train_step", "decode"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.long
@pytest.mark.parametrize("page", ["2048", "matmul"])
def test_a_page_at_another_size(script, tmp_path, page):
    row = script.measure(
        page, argparse.Namespace(steps=1, new=4, cpu=True), script.SMALL, {}, tmp_path
    )
    assert (
        row["faults"] == []
        and row["steps"] == 1
        and row["greedy"] in ("no code", "truncated")
        and set(row["moved"]) == {"attention", "experts"}
    )
    assert list(row["rewards"]) == [
        "function_works",
        "no_cheating",
        *(["strategy_succeeds"] if page == "2048" else ["correctness_check", "speed_check"]),
    ]
    assert (
        tmp_path / page / "adapter/adapter_model.safetensors"
    ).exists() and page in script.table([row])[1]


def test_the_cells_are_there_for_a_reader_too(script):
    for page in script.PAGES:
        for mark in (
            "from grpo_nb import GRPOConfig",
            "problems = ",
            "model, tokenizer = ",
            "rewards = ",
            "RUN = ",
            "trainer = ",
            "def ask(",
            "save_adapter(",
        ):
            assert script.cell(page, mark)
        assert "pandas" not in script.cell(
            page, "from grpo_nb import GRPOConfig"
        )  # the GPU machine has none
    with pytest.raises(
        ValueError, match="has 0 cells of code with a line that begins with 'no such'"
    ):
        script.cell("2048", "no such")


@pytest.mark.parametrize("sizes", ["SMALL", "FULL"])
def test_the_tokenizer(script, sizes):
    sizes = getattr(script, sizes)
    tokenizer = script.character_tokenizer(sizes)
    text = script.harmony("def f(x):\n    return x[0] + 1  # ~\n")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert (
        len(tokenizer) == sizes["vocab_size"]
        and tokenizer.pad_token_id == sizes["pad_token_id"]
        and ids[-1] == tokenizer.eos_token_id == sizes["eos_token_id"]
    )
    assert tokenizer.decode(ids) == text and tokenizer.decode(
        ids, skip_special_tokens=True
    ).startswith("analysisA plan.assistantfinal```python")
    assert (
        ids[0]
        == tokenizer.convert_tokens_to_ids("<|channel|>")
        == (200_005 if sizes is script.FULL else 506)
    )


def test_what_is_complained_about(script):
    good = {
        "step": 1,
        "loss": 0.1,
        "grad_norm": 0.2,
        "frac_reward_zero_std": 0.0,
        "sampling/gap_mean": 0.01,
        "rewards/a/std": 0.5,
        "rewards/b/std": 0.5,
    }

    def found(change=None, moved=None, untouched=True, saved=True):
        return script.faults(
            "page",
            SimpleNamespace(log_history=[good | (change or {})], reward_names=["a", "b"]),
            moved or {"attention": 0.1},
            untouched,
            saved,
        )

    assert found() == []
    assert found({"rewards/b/std": 0.0}) == ["page, step 1: b has no spread"] and found(
        {"grad_norm": 0.0}
    ) == ["page, step 1: no gradient"] == found({"skipped_updates": 1.0})
    assert (
        found({"loss": float("nan")}) == ["page, step 1: loss is nan"]
        and "equal rewards" in found({"frac_reward_zero_std": 0.5})[0]
        and "nats apart" in found({"sampling/gap_mean": 0.2})[0]
    )
    assert (
        "have not moved" in found(moved={"experts": 0.0})[0]
        and "packed" in found(untouched=False)[0]
        and "saved" in found(saved=False)[0]
    )


def test_without_a_card_there_is_a_sentence(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tutorials_at_size.py"])
    with pytest.raises(SystemExit, match="--cpu tries the script out"):
        script.main()
