"""What the widgets compute in the browser, beside the library: thousands of random settings, in a
few calls of node."""

import json
import math
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from node import run_module

from grpo_nb.algorithm.advantages import SCALES, group_advantages
from grpo_nb.algorithm.batching import BatchLayout, random_order
from grpo_nb.algorithm.logprobs import chunk_rows, hidden_state_bytes, logit_bytes
from grpo_nb.algorithm.losses import LOSSES, check_loss_settings, grpo_loss
from grpo_nb.model.masks import attention_mask
from grpo_nb.widgets.masks import keys_read, naive_mask
from grpo_nb.widgets.pull import DRAWN, clipping_curves

ARITHMETIC = Path(__file__).resolve().parents[2] / "grpo_nb/widgets/js/arithmetic.js"
RUN = """
import(process.argv[1]).then(async (functions) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  const told = JSON.parse(text).map(([name, args]) => functions[name](...args));
  process.stdout.write(JSON.stringify(told));
});
"""
random.seed(0)


def groups(count=1000):
    "Rewards of several groups: spread, equal, equal but for rounding, 0 and 1."
    for _ in range(count):
        G, P = random.randint(2, 12), random.randint(1, 4)
        level = random.choice([0.1, 0.7, -3.0])
        kinds = (lambda: random.uniform(-2, 2), lambda: random.randint(0, 1), lambda: level)
        kind = random.choice(kinds)
        yield [float(kind()) for _ in range(G * P)], G, random.choice(SCALES)


def losses(count=3000):
    "A loss, its settings, an advantage and a ratio, borders and ratio 1 among them."
    for _ in range(count):
        epsilon, high = round(random.uniform(0, 1.1), 2), round(random.uniform(0, 5), 2)
        delta = random.choice([None, round(random.uniform(0.5, 3), 2)])
        ratio = random.choice([1.0, random.uniform(0.01, 3), 1 + high, delta or 1.0])
        settings = dict(epsilon=epsilon, epsilon_high=high, delta=delta)
        yield ratio, random.choice([1.0, -1.0]), random.choice(DRAWN), settings


def layouts(count=800):
    "Settings within what the sliders reach, most of them illegal."
    top = dict(
        per_device_train_batch_size=8,
        num_generations=8,
        gradient_accumulation_steps=8,
        steps_per_generation=8,
        num_iterations=2,
        num_processes=4,
    )
    for _ in range(count):
        low = {"num_generations": 2}
        yield {name: random.randint(low.get(name, 1), high) for name, high in top.items()}


def batches(count=400):
    "Two prompts, a step and a window."
    for _ in range(count):
        names = dict(prompt_a=(1, 8), prompt_b=(1, 8), step=(0, 6), window=(0, 8))
        yield {name: random.randint(*ends) for name, ends in names.items()}


def cuts(count=600):
    "A batch, and how it is cut."
    for _ in range(count):
        yield dict(
            batch=random.randint(1, 16),
            length=random.randint(1, 3000),
            vocab=random.choice([32_000, 201_088]),
            hidden=random.choice([1024, 2880]),
            mini_batch=random.randint(1, 16),
            logit_chunk_multiplier=random.randint(1, 32),
            element_bytes=random.choice([1, 2, 4]),
        )


def browser_says(calls):
    "What functions of arithmetic.js return, for many calls: [name, arguments]."
    return json.loads(run_module(RUN, ARITHMETIC, json.dumps(calls)))


def near(a, b):
    return a == pytest.approx(b, rel=1e-9, abs=1e-9)


def test_advantages():
    cases = list(groups())
    told = browser_says([["groupAdvantages", case] for case in cases])
    for (rewards, G, scale), said in zip(cases, told):
        ours = group_advantages(torch.tensor(rewards, dtype=torch.float64), G, scale=scale)
        assert near(said["values"], ours.values.tolist()), (rewards, G, scale)
        assert near(said["mean"], ours.group_mean.tolist())
        assert near(said["std"], ours.group_std.tolist())


def test_clipping():
    cases = list(losses())
    told = browser_says([["clippingPoint", case] for case in cases])
    for (ratio, A, loss_type, settings), said in zip(cases, told):
        at = torch.tensor([ratio], dtype=torch.float64)
        ours = [curve.item() for curve in clipping_curves(at, A, loss_type, **settings)]
        edges = [1 - settings["epsilon"], 1 + settings["epsilon_high"], settings["delta"]]
        on_edge = any(edge is not None and abs(ratio - edge) < 1e-12 for edge in edges)
        # exp(log(c)) falls to either side of a border that c lies on: the curve has a jump there
        assert near(said[0], ours[0]) and (on_edge or near(said[1], ours[1])), (ratio, settings)


def test_what_is_said_of_clipping():
    cases = [(loss_type, settings) for _, _, loss_type, settings in islice(losses(), 1000)]
    borders, doubts, read = (
        browser_says([[name, case] for case in cases])
        for name in ("clippingBorders", "clippingDoubts", "settingsRead")
    )
    for (loss_type, settings), lines, said, names in zip(cases, borders, doubts, read):
        finite = {b for b in LOSSES[loss_type].borders(**settings) if b and b < math.inf}
        # with epsilon 1 the lower border is 0, which the record has too
        assert {border for border in lines.values() if border} == finite
        assert set(names) == LOSSES[loss_type].reads & {"epsilon", "epsilon_high", "delta"}
        ours = check_loss_settings(loss_type, max_completion_length=1, **settings)
        kept = [s for s in ours if not ("has no effect" in s or "importance_sampling" in s)]
        assert [doubt["sentence"] for doubt in said] == kept


def test_tokens_of_a_transcript():
    cases = [case for case in losses() if case[3]["epsilon"] < 1]
    rows = [(random.uniform(-12, -4), ratio, A * random.random(), s) for ratio, A, _, s in cases]
    settings = [{"epsilon": s["epsilon"], "epsilon_high": s["epsilon_high"]} for *_, s in cases]
    calls = [
        ["tokenTerms", [sampler + math.log(ratio), sampler, advantage, borders]]
        for (sampler, ratio, advantage, _), borders in zip(rows, settings)
    ]
    for (sampler, ratio, advantage, _), borders, said in zip(rows, settings, browser_says(calls)):
        old = torch.tensor([[sampler]], dtype=torch.float64)
        new = (old + math.log(ratio)).requires_grad_()
        mask = torch.ones(1, 1, dtype=torch.bool)
        at = torch.tensor([advantage], dtype=torch.float64)
        loss = grpo_loss(new, at, mask, old_logps=old, loss_type="dapo", **borders).loss
        loss.backward()
        assert near(said["ratio"], (new - old).exp().item())
        assert near(said["objective"], -loss.item())
        edges = [1 - borders["epsilon"], 1 + borders["epsilon_high"]]
        on_edge = any(abs(ratio - edge) < 1e-9 for edge in edges)
        assert on_edge or near(said["pull"], -new.grad.item())
    assert browser_says([["tokenTerms", [-1.0, None, 1.0, {"epsilon": 0.2}]]]) == [None]


def test_batches():
    cases = list(layouts())
    told = browser_says([["batchProblem", [settings]] for settings in cases])
    legal = []
    for settings, said in zip(cases, told):
        try:
            legal.append((settings, BatchLayout(**settings)))
        except ValueError as error:
            assert said["sentence"] == str(error)
            for change in said["changes"]:
                BatchLayout(**settings | change)  # every chip is legal
        else:
            assert said is None
    assert 150 < len(legal) < 650
    for shuffle in (False, True):
        told = browser_says([["schedule", [settings, 2, shuffle, 0]] for settings, _ in legal])
        for (_, layout), said in zip(legal, told):
            ours = layout.schedule(2, shuffle, 0)
            names = ("cycle", "step", "process", "prompts", "update")
            assert [[b[name] for name in names] for b in said] == [
                [getattr(b, name) for name in names] for b in ours
            ]
    sizes = browser_says([["batchSizes", [settings]] for settings, _ in legal])
    for (_, layout), said in zip(legal, sizes):
        assert said == {name: pytest.approx(getattr(layout, name)) for name in said}


def test_random_order_is_torchs():
    cases = [(random.randint(1, 700), random.randint(0, 3), random.randint(0, 99)) for _ in "1234"]
    told = browser_says([["randomOrder", case] for case in cases])
    assert told == [random_order(*case) for case in cases]


def test_masks():
    cases = list(batches())
    told = browser_says([["masks", [case]] for case in cases])
    rows = []
    for case, said in zip(cases, told):
        longest, window = max(case["prompt_a"], case["prompt_b"]), case["window"] or None
        size, step = longest + case["step"], case["step"]
        pads = torch.tensor([longest - case["prompt_a"], longest - case["prompt_b"]])
        assert said["right"] == attention_mask(pads, size, size, window=window).tolist()
        assert said["first"] == (size - 1 if step else 0)
        naive = [naive_mask(longest, longest, window)]
        naive += [naive_mask(1, longest + n, window) for n in range(1, step + 1)]
        pad = torch.nn.functional.pad
        wanted = torch.cat([pad(part, (0, size - part.shape[1])) for part in naive])
        assert said["naive"] == wanted.tolist()
        rows.append(said["right"][1][-1])
    words = browser_says([["keysRead", [row]] for row in rows])
    assert words == [keys_read(torch.tensor(row)) for row in rows]


def test_chunks():
    cases = list(cuts())
    names = ("batch", "length", "mini_batch", "logit_chunk_multiplier")
    arguments = [[case[name] for name in names] for case in cases]
    told = browser_says([["chunkRows", each] for each in arguments])
    weights = browser_says([["chunkBytes", [case]] for case in cases])
    for case, each, rows, said in zip(cases, arguments, told, weights):
        assert [tuple(row) for row in rows] == chunk_rows(*each)
        logits = [case[name] for name in ("batch", "length", "vocab")]
        states = [case[name] for name in ("batch", "length", "hidden")]
        size, cut = dict(element_bytes=case["element_bytes"]), dict(mini_batch=case["mini_batch"])
        multiplier = dict(logit_chunk_multiplier=case["logit_chunk_multiplier"])
        assert said == {
            "all_logits": logit_bytes(*logits, **size),
            "sequence_logits": logit_bytes(*logits, mini_batch=case["batch"], **size),
            "chunk_logits": logit_bytes(*logits, **cut, **multiplier, **size),
            "all_states": hidden_state_bytes(*states, **size),
            "piece_states": hidden_state_bytes(*states, **cut, **size),
        }
