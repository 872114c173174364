"""The memory widget's figure without a browser: what it plans, and what it says."""

import json
import random
from pathlib import Path
from urllib.parse import urlencode

import pytest
from node import run_module

from grpo_nb.model.memory_bytes import MODELS, GiB
from grpo_nb.model.memory_fit import ALL, CARDS, SAMPLERS
from grpo_nb.planning.plan import fitting, plan
from grpo_nb.widgets.memory import (
    WEIGHTS,
    MemoryWidget,
    memory_figure,
    memory_widget,
    planned,
    rule_of_thumb,
)

WIDGET = Path(__file__).resolve().parents[2] / "grpo_nb/widgets/js/memory.js"
RUN = """
const load = (name) => import(new URL(name, `file://${process.argv[1]}`));
const parts = ["memory.js", "planner.js", "kit.js"].map(load);
Promise.all(parts).then(async ([widget, planner, { linkTo, valuesIn }]) => {
  let given = "";
  for await (const part of process.stdin) given += part;
  const { defaults, settle, asValues, inPython } = widget;
  const here = "https://host/page.html";
  const told = JSON.parse(given).map((changes) => {
    const values = { ...defaults, ...changes };
    const plan = planner.planOf(settle(values).setup);
    const found = planner.fitting(plan);
    const mended = found && { ...values, ...asValues(found.changes, plan.setup) };
    const link = linkTo(here, "memory", widget, values);
    return {
      values,
      moments: plan.moments,
      fits: found && planner.planOf(settle(mended).setup).fits,
      mended,
      link,
      read: { ...defaults, ...valuesIn(new URL(link).hash, "memory", widget) },
      python: inPython(values),
    };
  });
  process.stdout.write(JSON.stringify(told));
});
"""


def browser_says(cases):
    return json.loads(run_module(RUN, WIDGET, json.dumps(cases)))


def shown(count, seed=0):
    "What the controls can be set to, those that exclude each other too."
    draw = random.Random(seed)
    for _ in range(count):
        yield dict(
            model=draw.choice(list(MODELS)),
            card=draw.choice(list(CARDS)),
            weights=draw.choice(list(WEIGHTS)),
            context=draw.choice([1024, 1536, 8192, 16_384, 131_072]),
            prompt_length=draw.choice([None, None, 128, 2048]),
            picture_tokens=draw.choice([0, 64, 1024, 4096]),
            train_parts=draw.choice([None, ["text", "tower"]]),
            num_generations=draw.randint(2, 64),
            generation_batch_size=draw.choice([None, 12]),
            per_device_train_batch_size=draw.choice([1, 1, 5]),
            lora_r=draw.choice([0, 16, 64]),
            lora_targets=draw.choice([None, ["attention"], ["attention", "mlp"]]),
            optim=draw.choice(["adamw_torch_fused", "adamw_8bit"]),
            gradient_checkpointing=draw.random() < 0.8,
            offload_embedding=draw.random() < 0.5,
            offload_activations=draw.random() < 0.5,
            slice_tokens=draw.choice([None, ALL]),
            logit_chunk_multiplier=draw.choice([None, 1]),
            share_prompt=draw.random() < 0.3,
            reference=draw.random() < 0.2,
            sampler=draw.choice(SAMPLERS),
        )


def widget_of(values):
    "The widget in Python with these values; a prompt that is all of the context is half of it."
    prompt = values["prompt_length"]
    if prompt and prompt >= values["context"]:
        values = values | {"prompt_length": values["context"] // 2}
    return MemoryWidget(**values)


def test_the_widget_plans_in_the_browser_what_it_plans_in_python():
    cases = list(shown(100))
    mended = 0
    for case, said in zip(cases, browser_says(cases)):
        made = widget_of(case).plan
        assert said["moments"] == made.moments, case
        assert said["read"] == said["values"]  # the link holds them
        ours = fitting(made)
        assert bool(ours) == bool(said["fits"])
        if ours:
            assert widget_of(said["mended"]).plan.fits
            mended += not made.fits
    assert mended > 20


def test_the_code_that_it_shows_prints_the_same_plan(capsys):
    from grpo_nb.planning.plan import describe

    cases = [case for case in shown(12, seed=4) if case["prompt_length"] != 2048]
    for case, said in zip(cases, browser_says(cases)):
        exec(said["python"], {})
        assert capsys.readouterr().out.strip() == describe(widget_of(case).plan).strip(), case


READ = """
const load = (name) => import(new URL(name, `file://${process.argv[1]}`));
Promise.all([load("memory.js"), load("kit.js")]).then(async ([widget, { valuesIn }]) => {
  let link = "";
  for await (const part of process.stdin) link += part;
  process.stdout.write(JSON.stringify(valuesIn(link, "memory", widget)));
});
"""


def read_in(link):
    "What the widget takes from an address."
    return json.loads(run_module(READ, WIDGET, f"#{link}"))


SIZES = "layers hidden intermediate heads kv_heads head_dim vocab".split()


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 2},
        {"layers": 10**9},
        {"windows": ["8"]},
        {"windows": 8},
        {"counted": [["mlp", "x"]]},
        {"vocab": 0.5},
        {"name": "x" * 200},
    ],
)
def test_an_address_that_holds_no_shape_is_left_out(wrong):
    shape = dict.fromkeys(SIZES, 8) | {"name": "x"} | wrong
    found = read_in("memory?" + urlencode({"shape": json.dumps(shape)}))
    assert found == ({"shape": shape, "model": "x"} if wrong == {"layers": 2} else {})


def test_an_address_that_holds_nonsense_is_left_out():
    wrong = "card=H300&context=-4&lora_r=many&offload_embedding=1&weights=constructor&nothing=3"
    said = read_in(f'memory?{wrong}&shape={{"name":"x","layers":2}}&moment=head&sampler=vllm')
    assert said == {"moment": "head", "sampler": "vllm"}


def test_a_folder_is_a_model(tmp_path):
    config = dict(
        model_type="llama",
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        vocab_size=100,
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = memory_widget(tmp_path, card="L4", lora_r=8)
    assert made.model == tmp_path.name and made.shape["hidden"] == 64
    assert made.plan.moments == planned(tmp_path, "L4", lora_r=8).moments
    (said,) = browser_says([{"model": made.model, "shape": made.shape, "card": "L4", "lora_r": 8}])
    assert said["moments"] == made.plan.moments


def texts(figure):
    said = [text.get_text() for text in figure.texts] + [figure.axes[0].get_xlabel()]
    return " ".join(" ".join(said).split())


def test_the_figure_plans_what_the_planner_plans():
    mine = planned("Llama-3.1-8B", "L4", "16 bit", 4096, num_generations=4, chunks=False)
    theirs = plan(
        "Llama-3.1-8B",
        "L4",
        weights="bf16",
        context=4096,
        num_generations=4,
        lora_r=16,
        logit_chunk_multiplier=1,
    )
    assert mine.moments == theirs.moments and mine.room == CARDS["L4"].room


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "Qwen3-4B"])
def test_every_format_is_one_of_the_model(model, weights):
    made = planned(model, weights=weights)
    assert ("mxfp4" in made.setup.weights) == ("4 bit" in weights and MODELS[model].sinks)


def test_the_rule_of_thumb_is_decimal():
    billions = sum(MODELS["Llama-3.1-8B"].parameters.values()) / 1e9
    assert rule_of_thumb(planned("Llama-3.1-8B")) == pytest.approx(billions * 1e9 / GiB)
    assert rule_of_thumb(planned("Llama-3.1-8B", weights="16 bit")) == pytest.approx(
        4 * billions * 1e9 / GiB
    )


def test_switches_that_exclude_each_other_are_told_and_not_refused():
    given = dict(offload_embedding=True, offload_activations=True, gradient_checkpointing=False)
    said = texts(memory_figure("Qwen3-4B", **given))
    assert "stays on the card" in said and "no layer inputs to offload" in said
    assert "was made for 131,072 tokens" in texts(memory_figure(context=262_144))


def test_the_title_says_whether_it_fits():
    assert "does not fit" in texts(memory_figure(context=131_072))
    assert "fits, " in texts(memory_figure("Qwen2.5-1.5B", "H200"))
