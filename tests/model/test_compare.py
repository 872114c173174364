"""compare_layers: changes whose place and size are known are found there, with that size; nothing
is left on the models; what cannot be compared is refused."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_nb.model.compare import compare_layers, model_parts, watch
from grpo_nb.model.tiny import tiny_gpt_oss

PARTS = ("layer", "attention", "mlp")


@pytest.fixture(scope="module")
def model():
    return tiny_gpt_oss(
        num_hidden_layers=4, hidden_size=32, num_attention_heads=4, intermediate_size=16
    )[0].double()


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(7, 20, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def changed(model, change):
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other.model.layers)
    return other


def hooks(model):
    return [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]


def where(comparison, part, **which):
    return [
        layer for layer, value in enumerate(comparison.relative(part, **which)) if value > 1e-12
    ]


def test_equal_models_do_not_differ_at_all(model, batch):
    found = compare_layers(model, copy.deepcopy(model), batch, gradients=True)
    assert len(found.records) == 2 * 2 * 3 * 4 and not any(
        r["relative"] or r["largest"] for r in found.records
    )


def test_a_change_of_the_attention_is_found_where_it_is(model, batch):
    found = compare_layers(
        model,
        changed(
            model, lambda layers: [p.mul_(1.25) for p in layers[1].self_attn.o_proj.parameters()]
        ),
        batch,
        gradients=True,
    )
    assert (
        where(found, "layer", fed="own") == [1, 2, 3]
        and where(found, "layer") == where(found, "attention") == [1]
        and where(found, "mlp") == []
    )
    assert found.relative("attention")[1] == pytest.approx(0.25, abs=1e-12)
    assert found.relative("attention", what="gradient")[1] == pytest.approx(0.25, abs=1e-12)
    assert (
        where(found, "attention", what="gradient") == where(found, "layer", what="gradient") == [1]
        and where(found, "mlp", what="gradient") == []
    )
    assert where(found, "layer", fed="own", what="gradient") == [0, 1, 2, 3]


def test_a_change_of_the_experts_is_found_where_it_is(model, batch):
    def change(layers):
        layers[2].mlp.experts.down_proj.mul_(1.5)
        layers[2].mlp.experts.down_proj_bias.mul_(1.5)

    found = compare_layers(model, changed(model, change), batch)
    assert (
        where(found, "mlp") == where(found, "layer") == [2]
        and where(found, "attention") == []
        and found.relative("mlp")[2] == pytest.approx(0.5)
    )
    assert where(found, "attention", fed="own") == [3]


def test_the_same_column_is_each_layer_run_by_hand(model, batch):
    """The layer of the other model, called with the states of the first, differs by what the table
    says."""
    other = changed(model, lambda layers: [layer.self_attn.sinks.add_(1.0) for layer in layers])
    found, real = compare_layers(model, other, batch), batch["attention_mask"].bool()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        for number in range(3):  # the last of hidden_states is normalised
            with watch([other.model.layers[number]], [states[number]]) as (_, out):
                other(**batch)
            difference = (out[0] - states[number + 1])[real]
            record = next(
                r
                for r in found.records
                if (r["layer"], r["part"], r["fed"]) == (number, "layer", "same")
            )
            assert (
                record["relative"]
                == pytest.approx((difference.norm() / states[number + 1][real].norm()).item())
                and record["relative"] > 1e-3
            )
            assert record["largest"] == pytest.approx(difference.abs().max().item())


def test_gradients_are_those_of_the_models_own_loss(model, batch):
    "Doubling what one layer passes back shows with its size; the loss is transformers' loss."
    from grpo_nb.model.compare import _run_own

    real = batch["attention_mask"].bool()
    run = _run_own(model, batch, real, True)
    ids = batch["input_ids"].masked_fill(~real, -100)
    ids[1, 5] = -100  # the first real token has no real token before it
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    model(
        inputs_embeds=embedded, attention_mask=batch["attention_mask"], labels=ids
    ).loss.backward()
    assert torch.allclose(
        run.input_gradients["layer"][0], embedded.grad, rtol=1e-4, atol=1e-8
    )  # transformers computes its loss in float32
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.output_gradients["layer"], run.input_gradients["layer"][1:])
    )
    model.zero_grad()


def test_padding_is_not_compared(model, batch):
    noisy = {**batch, "input_ids": batch["input_ids"].clone()}
    noisy["input_ids"][1, :5] = 9
    found = compare_layers(
        model, changed(model, lambda layers: layers[0].self_attn.sinks.add_(1)), batch
    )
    again = compare_layers(
        model, changed(model, lambda layers: layers[0].self_attn.sinks.add_(1)), noisy
    )
    assert found.relative() == pytest.approx(again.relative(), rel=1e-9)


def test_models_are_left_as_they_were(model, batch):
    model.train()
    model.model.layers[0].mlp.eval()
    other = copy.deepcopy(model)
    before = hooks(model), hooks(other)  # transformers may have put some of its own
    compare_layers(model, other, batch, gradients=True)
    assert (hooks(model), hooks(other)) == before
    for m in (model, other):
        assert (
            all(p.grad is None for p in m.parameters())
            and m.training
            and not m.model.layers[0].mlp.training
        )
    with pytest.raises(RuntimeError), watch(model_parts(model)["layer"]):
        raise RuntimeError
    assert hooks(model) == before[0]
    model.eval()


def test_dtypes_adapters_other_models_and_plain_ids(model, batch):
    halved = copy.deepcopy(model).bfloat16()
    found = compare_layers(model, halved, batch, gradients=True)
    assert all(
        1e-4 < r["relative"] < 0.2
        for r in found.records
        if r["part"] == "attention" and r["fed"] == "same"
    )
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    assert (
        where(compare_layers(model, adapted, batch, gradients=True), "attention") == [0, 1, 2, 3]
        and where(compare_layers(model, adapted, batch), "mlp") == []
    )
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    ).eval()
    assert compare_layers(llama, llama, batch["input_ids"]).relative("mlp", "own") == [0, 0]


def test_table_and_figure(model, batch):
    found = compare_layers(
        model,
        changed(model, lambda layers: layers[1].self_attn.sinks.add_(1)),
        batch,
        gradients=True,
    )
    lines = found.table().splitlines()
    assert (
        len(lines) == 3 + 4
        and lines[0].split() == ["output"] * 6 + ["gradient"] * 6
        and lines[1].split() == (["own"] * 3 + ["same"] * 3) * 2
        and lines[2].split() == list(PARTS) * 4
    )
    assert [float(line.split()[4]) for line in lines[3:]] == pytest.approx(
        found.relative(), rel=0.06
    ) and str(found) == found.table()
    figure = found.figure()
    assert [panel.get_title() for panel in figure.axes] == ["output", "gradient"] and len(
        figure.axes[0].lines
    ) == 4
    assert list(figure.axes[0].lines[2].get_ydata()) == [
        max(value, 1e-9) for value in found.relative("attention")
    ]
    assert len(compare_layers(model, model, batch).figure().axes) == 1


def test_errors_are_sentences(model, batch):
    short = tiny_gpt_oss(num_hidden_layers=2)[0]
    with pytest.raises(ValueError, match="model_a has 4 layers .* model_b 2 layers"):
        compare_layers(model, short, batch)
    with pytest.raises(ValueError, match="no list of layers"):
        compare_layers(torch.nn.Linear(2, 2), model, batch)
    with pytest.raises(ValueError, match="input_ids are needed"):
        compare_layers(model, model, {"attention_mask": batch["attention_mask"]})
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 3\)"):
        compare_layers(model, model, {**batch, "attention_mask": torch.ones(2, 3)})
    with pytest.raises(ValueError, match="32 wide .* 128 wide"):
        compare_layers(model, tiny_gpt_oss(num_hidden_layers=4)[0], batch)
    with pytest.raises(ValueError, match="must be one of"):
        compare_layers(model, model, batch).relative("experts")
