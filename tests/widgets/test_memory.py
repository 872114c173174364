"""The memory widget's figure without a browser: what it plans, and what it says."""

import pytest

from grpo_nb.model.memory_bytes import MODELS, GiB
from grpo_nb.model.memory_fit import CARDS
from grpo_nb.planning.plan import plan
from grpo_nb.widgets.memory import WEIGHTS, memory_figure, memory_widget, planned, rule_of_thumb


def texts(figure):
    return " ".join(" ".join(text.get_text().split()) for text in figure.texts)


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


def test_every_control_is_an_argument():
    box = memory_widget()
    values = {name: control.value for name, control in box.controls.items()}
    assert planned(**values).setup.model is MODELS["gpt-oss-20b"]
