"""The least time of a step: every part recomputed by hand, and what the planner prints of it."""

import argparse
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb.model.memory_bytes import MODELS, lora_parameters, weight_bytes
from grpo_nb.model.memory_fit import CARDS, drawing_work, pairs, training_work
from grpo_nb.planning.plan import describe, plan, standard

ROOT, T4 = Path(__file__).parents[2], CARDS["T4"]


def training_seconds(shape, *given, targets=("attention",), **more):
    "Seconds of each part on a T4, where a gpt-oss with adapters on attention goes by heads."
    by_heads = shape.sinks and "attention" in targets
    work = training_work(shape, *given, targets=targets, by_heads=by_heads, **more)
    return {part: T4.seconds(*each) for part, each in work.items()}


def number(text):
    "Of a page: 1,294 or .19."
    return float(text.replace(",", "")) if "." in text else int(text.replace(",", ""))


def drawing_seconds(*given):
    return sum(T4.seconds(*work) for work in drawing_work(*given).values())


def test_the_estimate_of_training_on_a_t4():
    def seconds(*given, **more):
        return sum(training_seconds(*given, **more).values())

    shape = MODELS["gpt-oss-20b"]
    short, long = (seconds(shape, "bf16", [(1, 0, n)]) for n in (2048, 16_384))
    floor = 6 * 3.6e9 / 65e12  # seconds a token: three passes through 3.6 billion active parameters
    assert (
        0.8 * floor * 2048 < short < 2 * floor * 2048
        and 0.8 * floor * 16_384 < long < 4 * floor * 16_384
    )
    parts = training_seconds(
        shape, "mxfp4", [(8, 0, 2048)], r=0
    )  # long enough for the arithmetic to be what takes time
    assert parts["mlp"] == pytest.approx(
        (6 - 2 / 3) * 24 * 4 * 3 * 2880**2 * 16_384 / 65e12
    ) and parts["projections"] == pytest.approx(
        8 * 24 * 2 * 2880 * (4096 + 512) * 16_384 / 65e12
    )  # the last product not in the second pass; by heads once more
    plain = training_seconds(shape, "mxfp4", [(8, 0, 2048)], r=0, targets=())
    assert (
        plain["projections"] == pytest.approx(0.75 * parts["projections"])
        and plain["mlp"] == parts["mlp"]
    )
    assert parts["head"] == pytest.approx(4 * 201_088 * 2880 * 16_384 / 65e12)
    one = training_seconds(shape, "mxfp4", [(1, 0, 1)], r=0)  # a single token: bytes alone
    assert one["mlp"] == pytest.approx(
        8 / 3 * 24 * 32 * 3 * 2880**2 * (4.25 / 8 + 4) / 320e9, rel=1e-3
    )
    eight, phi = [(1, 0, 8192)], MODELS["Phi-4"]
    assert (
        training_seconds(shape, "mxfp4", eight, batches=8)["mlp"]
        > 7 * one["mlp"]
        > training_seconds(shape, "mxfp4", eight)["mlp"]
        == training_seconds(shape, "mxfp4", eight, tile=1024)["mlp"]
    )
    assert (
        training_seconds(phi, "nf4", eight, tile=1, r=0)["mlp"]
        > training_seconds(phi, "nf4", eight, r=0)["mlp"]
    )  # a dense model's MLP is unpacked for each slice
    assert seconds(shape, "mxfp4", [(4, 0, 1536), (32, 1536, 512)]) < seconds(
        shape, "mxfp4", [(32, 0, 2048)]
    )  # prompts computed once
    assert (
        seconds(MODELS["Phi-4"], "nf4", [(1, 0, 4096)], targets=("attention", "mlp"))
        > seconds(MODELS["Phi-4"], "nf4", [(1, 0, 4096)], r=0)
        > 6 * 14e9 * 4096 / 65e12
    )


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Qwen3-8B"])
@pytest.mark.parametrize("before, length", [(0, 300), (200, 100), (1, 1), (50, 20)])
def test_pairs_of_queries_and_keys(name, before, length):
    shape = MODELS[name]
    counted = sum(
        min(t + 1, w or t + 1)
        for w in shape.windows or (None,) * shape.layers
        for t in range(before, before + length)
    )
    assert pairs(shape, length, before) == pytest.approx(counted, abs=shape.layers * length)


def test_the_estimate_of_drawing_on_a_t4():
    shape, qwen = MODELS["gpt-oss-20b"], MODELS["Qwen3-8B"]

    def token(rows, prompt=1):
        return drawing_seconds(shape, "mxfp4", 1, rows, prompt, 1000, rows) / 1000

    read = (
        24 * (4 * 3 * 2880**2 * 4.25 / 8 + 2 * 2 * 2880 * 4608) + 2 * 201_088 * 2880
    )  # four experts of each layer, attention, the head
    assert token(1) == pytest.approx(read / 320e9, rel=0.03)
    assert token(16) - token(1) == pytest.approx(
        24 * (32 * (1 - (7 / 8) ** 16) - 4) * 3 * 2880**2 * 4.25 / 8 / 320e9, rel=0.03
    )  # 16 rows: 88 % of the experts
    assert token(64, 30_000) - token(64) == pytest.approx(
        64 * 12 * 2 * 2 * 8 * 64 * 30_000 / 320e9, rel=0.05
    )  # keys and values of the full layers
    assert drawing_seconds(shape, "mxfp4", 4, 8, 512, 512, 8) > 2 * drawing_seconds(
        shape, "mxfp4", 4, 8, 512, 512, 32
    )
    assert drawing_seconds(qwen, "bf16", 1, 1, 1, 1000, 1) / 1000 == pytest.approx(
        2 * (8.19e9 - 151_936 * 4096) / 320e9, rel=0.05
    )


def test_the_tutorial_estimates_alike():
    cells = [
        "".join(cell["source"])
        for cell in json.loads((ROOT / "nbs/tutorials/02_gpt_oss_20b_t4.ipynb").read_text())[
            "cells"
        ]
    ]
    scope = dict(
        pd=pd,
        MODELS=MODELS,
        lora_parameters=lora_parameters,
        weight_bytes=weight_bytes,
        T4=argparse.Namespace(rows=16),
    )
    exec(next(cell for cell in cells if cell.startswith("FLOPS, BYTES = ")), scope)
    trained = training_seconds(scope["m"], "mxfp4", [(4, 0, 256), (32, 256, 768)], batches=4, r=16)
    assert scope["table"].loc["training", "s at least"].tolist() == pytest.approx(
        list(trained.values())
    )
    assert scope["seconds"]["drawing"] == pytest.approx(
        drawing_seconds(scope["m"], "mxfp4", 4, 8, 256, 768, 16), rel=1e-3
    )


# What the planner prints


def test_a_step_of_qwen3_4b_by_hand():
    found = plan("Qwen3-4B", "T4", context=1024, lora_r=8, per_device_train_batch_size=8)
    layers, H, inner, q, k, V = 36, 2560, 9728, 4096, 1024, 151_936
    numbers = layers * (3 * H * inner + 2 * H * (q + k))  # in every layer
    seen = layers * (1024**2 - 512**2) / 2  # keys seen by 512 new tokens behind 512
    drawing = (512 * 2 * (numbers + V * H) + 8 * 4 * k * seen) / 320e9
    adapter = 8 * layers * (2 * (H + q) + 2 * (H + k) + 3 * (H + inner))  # A and B of each
    tokens = 8 * 1024
    training = tokens * (6 * numbers + 8 * adapter + 4 * V * H)
    training += 8 * layers * 4.5 * 4 * q * 1024**2 / 2
    seconds = found.seconds()
    assert found.rows == 8 and seconds["drawing"] == pytest.approx(drawing)
    assert seconds["training"] == pytest.approx(training / 65e12)
    reading = 512 * 2 * numbers + 2 * V * H + 4 * q * layers * 512**2 / 2
    assert seconds["reading"] == pytest.approx(reading / 65e12)
    whole = f"at least {sum(seconds.values()):.0f} s"
    assert whole in describe(found) and "no measurement" in describe(found)


def test_a_step_of_gpt_oss_20b_by_hand():
    found = plan("gpt-oss-20b", "T4", context=1024, lora_r=8)
    layers, H, q, k, V, expert = 24, 2880, 4096, 512, 201_088, 3 * 2880**2 * 4.25 / 8
    rows = found.rows
    rounds = [min(rows, 8 - first) for first in range(0, 8, rows)]
    experts = sum(32 * (1 - (28 / 32) ** B) for B in rounds) * layers * expert
    rest = len(rounds) * 2 * (layers * 2 * H * (q + k) + V * H)
    full, window = (1024**2 - 512**2) / 2, 128 * 512
    cache = 8 * 4 * k * 12 * (full + window)
    seconds = found.seconds()
    assert seconds["drawing"] == pytest.approx((512 * (experts + rest) + cache) / 320e9)
    # one completion after the other: each of its three passes reads all experts, less a third of
    # the second, from 4 bits, writes them in 16 and reads them again
    unpacking = 8 * 8 / 3 * layers * 32 * 3 * 2880**2 * (4.25 / 8 + 4) / 320e9
    assert unpacking < seconds["training"] < 2 * unpacking


def test_no_time_is_said_where_none_is_known():
    assert plan("gpt-oss-20b", "RTX 4090", context=1024).seconds() is None
    assert standard(plan("Qwen3-4B", "H200", context=1024).setup).seconds() is None
    assert plan("Qwen3-4B", "H200", context=1024, lora_r=0).seconds() is None
    assert plan("Llama-3.3-70B", "T4", context=1024).seconds() is None  # does not fit
    elsewhere = plan("gpt-oss-20b", "H200", context=1024, samplers=1)
    assert elsewhere.seconds().keys() == {"training"}
    assert "at least" not in describe(plan("gpt-oss-20b", "RTX 4090", context=1024))


def test_the_floors_of_the_page_on_speed():
    page, shape, h200 = (
        (ROOT / "docs/how_fast.md").read_text(),
        MODELS["gpt-oss-20b"],
        CARDS["H200"],
    )
    drawn = re.findall(r"^\| (\d+) x ([\d,]+) \|.*\| (\S+) \| \S+ \| (\S+) \|$", page, re.M)
    assert len(drawn) == 5
    for rows, prompt, *floors in drawn:
        rows, prompt = int(rows), number(prompt)
        for weights, floor in zip(("mxfp4", "bf16"), floors):
            work = drawing_work(shape, weights, rows, 1, prompt, 256, rows)["drawing"]
            assert rows * 256 / h200.seconds(*work) == pytest.approx(number(floor), rel=1e-3)
    trained = re.findall(r"^\| ([\d,]+) \| .* \| (\S+) s \|$", page, re.M)
    assert len(trained) == 3
    for tokens, floor in trained:
        work = training_work(shape, "bf16", [(1, 0, number(tokens))]).values()
        found = sum(h200.seconds(*each) for each in work)
        assert found == pytest.approx(number(floor), rel=0.03)
