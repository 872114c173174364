"""The planner: a configuration in, bytes and advice in words out."""

import inspect
import json
import shlex
from dataclasses import fields, replace

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.cli import _parser
from grpo_nb.model.limits import SLICES
from grpo_nb.model.loading import load_model
from grpo_nb.model.memory_bytes import MODELS, GiB, kv_bytes, lora_parameters, weight_bytes
from grpo_nb.model.memory_fit import ALL, CARDS, CUDA_CONTEXT, UNTIL_CUT, VLLM_SHARE, Card
from grpo_nb.planning.plan import (
    NO_SETTING,
    Setup,
    advice_text,
    advise,
    crossing,
    describe,
    fitting,
    launch_line,
    plan,
    plan_of,
    server_lines,
    server_urls,
    setup_of,
    standard,
)
from grpo_nb.training.config import GRPOConfig

BOTH, ONE = ("attention", "mlp"), ("attention",)


def test_parts_add_up_and_the_peak_is_the_largest_moment():
    made = plan(
        "gpt-oss-20b",
        "H100",
        context=8192,
        offload_activations=True,
        offload_embedding=True,
        generation_batch_size=32,
    )
    assert (
        made.peak
        == made.totals[made.worst]
        == max(sum(parts.values()) for parts in made.moments.values())
    )
    assert all(
        parts["weights"] == sum(made.weights.values()) and min(parts.values()) >= 0
        for parts in made.moments.values()
    )
    assert (
        made.host["embedding"] == weight_bytes(MODELS["gpt-oss-20b"], "mxfp4")["embedding"]
        and made.weights["embedding"] == 0
    )
    assert made.peak - made.allocated() >= CUDA_CONTEXT
    assert json.loads(json.dumps(made.to_dict()))["peak"] == made.peak


SWITCHES = [  # settings, what they lower
    (dict(), dict(offload_embedding=True)),
    (dict(), dict(offload_activations=True)),
    (dict(gradient_checkpointing=False), dict(gradient_checkpointing=True)),
    (dict(slice_tokens=ALL), dict(slice_tokens=1024)),
    (dict(per_device_train_batch_size=4), dict(share_prompt=True)),
    (dict(sampler="vllm"), dict(sampler="vllm_sleep")),
    (dict(sampler="vllm"), dict(sampler="engine")),
    (dict(implementation="transformers"), dict(implementation="ours")),
    (dict(weights="bf16"), dict(weights="mxfp4")),
    (dict(), dict(weights="mxfp4+nf4")),
    (dict(weights="mxfp4+nf4"), dict(double_quant=True)),
    (dict(lora_r=64), dict(lora_r=8)),
    (dict(lora_targets=BOTH), dict(lora_targets=ONE)),
    (dict(optim="adamw_torch"), dict(optim="sgd")),
    (dict(reference=True), dict(reference=False)),
    (dict(attention="sdpa", slice_tokens=4096), dict(attention="flex")),
    (dict(), dict(context=8192)),
    (dict(per_device_train_batch_size=2), dict(per_device_train_batch_size=1)),
]


@pytest.mark.parametrize("settings, change", SWITCHES)
def test_each_switch_lowers_the_training_step(settings, change):
    before, after = (
        plan("gpt-oss-20b", "B200", **settings),
        plan("gpt-oss-20b", "B200", **{**settings, **change}),
    )
    assert max(after.totals["head"], after.totals["layer"]) < max(
        before.totals["head"], before.totals["layer"]
    )


def test_hidden_states_and_chunks_lower_the_head():
    settings = dict(context=65_536, per_device_train_batch_size=4, offload_activations=True)
    heads = [
        plan("gpt-oss-20b", "B200", **settings, **change).totals["head"]
        for change in (
            {},
            dict(offload_hidden=True, mini_batch=4),
            dict(offload_hidden=True, mini_batch=4, logit_chunk_multiplier=256),
        )
    ]
    assert heads[0] > heads[1] > heads[2]


def test_offloading_moves_bytes_and_loses_none():
    here, there = (
        plan("Llama-3.1-8B", "H200"),
        plan("Llama-3.1-8B", "H200", offload_activations=True),
    )
    one = 16_384 * 4096 * 2
    assert (
        here.moments["layer"]["hidden"] - there.moments["layer"]["hidden"] == 30 * one
        and there.host["layer inputs"] == 32 * one
    )


def test_the_engine_draws_fewer_rows_where_memory_is_short():
    rows = {
        card: plan("gpt-oss-20b", card, context=16_384, generation_batch_size=64).rows
        for card in ("T4", "L4", "H200")
    }
    assert 1 <= rows["T4"] < rows["L4"] < rows["H200"] == 64
    assert all(
        plan("gpt-oss-20b", card, context=16_384, generation_batch_size=64).totals["rollout"]
        <= CARDS[card].usable * GiB
        for card in rows
    )


def test_the_usual_practice_costs_more():
    for name in MODELS:
        made = plan(name, "B200", context=8192, weights="mxfp4" if MODELS[name].sinks else "nf4")
        assert standard(made.setup).peak > 1.5 * made.peak
    assert standard(setup_of("gpt-oss-20b", "T4")).setup.weights == "fp16"


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(context=0), "context is 0"),
        (dict(context=True), "context is True"),
        (dict(context=100, prompt_length=100), "leave room"),
        (dict(lora_r=-1), "lora_r is -1"),
        (dict(weights="int8"), "give one of"),
        (dict(model="Llama-3.1-8B", weights="mxfp4"), "has no experts"),
        (dict(lora_targets="experts"), "attention, mlp"),
        (dict(optim="lion"), "adamw"),
        (dict(model="Qwen3-4B", offload_embedding=True), "cannot be offloaded"),
        (dict(gradient_checkpointing=False, offload_activations=True), "leave it on"),
        (dict(attention="flex"), "compute capability"),
        (dict(card="H300"), "H200"),
        (dict(sampler="sglang"), "vllm_sleep"),
        (dict(slice_tokens=0), "slice_tokens is 0"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ValueError, match=words):
        plan(**settings)


def test_an_unknown_keyword():
    with pytest.raises(TypeError):
        plan(contxt=5)


SETTINGS = st.fixed_dictionaries(
    {},
    optional=dict(
        context=st.sampled_from([64, 1024, 20_480, 131_072]),
        per_device_train_batch_size=st.integers(1, 9),
        num_generations=st.integers(2, 16),
        generation_batch_size=st.integers(1, 144),
        lora_r=st.sampled_from([0, 1, 64]),
        gradient_checkpointing=st.booleans(),
        slice_tokens=st.sampled_from([None, ALL, 1, 4096]),
        share_prompt=st.booleans(),
        offload_hidden=st.booleans(),
        mini_batch=st.integers(1, 4),
        sampler=st.sampled_from(["engine", "vllm", "vllm_sleep"]),
        optim=st.sampled_from(["adamw_torch", "adamw_8bit", "sgd"]),
        reference=st.booleans(),
        implementation=st.sampled_from(["ours", "transformers"]),
        attention=st.sampled_from(["auto", "sink_key", "eager"]),
        prompt_length=st.sampled_from([None, 0, 63]),
    ),
)


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(CARDS)), SETTINGS)
def test_any_plan_can_be_made_told_and_mended(model, card, given):
    made = plan(model, card, **given)
    assert (
        made.peak > 0
        and made.rows >= 1
        and all(
            isinstance(size, int) and size >= 0
            for parts in (*made.moments.values(), made.host)
            for size in parts.values()
        )
    )
    assert ("It fits" in describe(made)) == made.fits and all(
        len(line) < 400 for line in describe(made).splitlines()
    )
    found = advise(made)
    assert bool(found) <= (not made.fits) and all(a.saves > 0 for a in found)
    before = made.peak
    for a in found:
        assert before - a.plan.peak == a.saves
        before = a.plan.peak
    assert all(not a.plan.fits for a in found[:-1])
    text = advice_text(made)
    assert ("Nothing has to be changed" in text) == made.fits and ("too much" in text) == (
        not made.fits and not (found and found[-1].plan.fits)
    )


def test_all_weights_cost_what_arithmetic_says():
    "16 bytes a number with Adam in float32: what a frozen model's two passes take is not enough."
    numbers = sum(MODELS["Qwen3-4B"].parameters.values())
    made = plan("Qwen3-4B", "L4", lora_r=0)
    assert not made.fits and made.setup.weights == "fp32"
    assert 16 * numbers <= made.peak and round(16 * numbers / GiB) == 60
    step = made.moments["update"]
    assert step["weights"] + step["adapters"] == 16 * numbers
    for change, each in (
        (dict(weights="bf16"), 2 + 2 + 4),
        (dict(weights="bf16", optim="sgd"), 2 + 2),
        (dict(weights="bf16", optim="adamw_torch"), 2 + 2 + 4 + 2),
        (dict(optim="adamw_8bit"), 4 + 4 + 2),
        (dict(optim="adamw_torch"), 4 + 4 + 8 + 4),
    ):
        step = plan("Qwen3-4B", "H200", lora_r=0, **change).moments["update"]
        assert step["weights"] + step["adapters"] == each * numbers, change
    whole, shared = (
        plan("Qwen3-4B", "H100", lora_r=0, cards=4, fsdp=f).moments["update"]
        for f in (None, "full_shard")
    )
    for part in ("weights", "adapters"):
        assert shared[part] == pytest.approx(whole[part] / 4, rel=1e-3)
    assert plan("Qwen3-4B", "H200", lora_r=0, beta=0.04).setup.reference


def test_what_makes_a_plan_fit():
    made = plan("Qwen3-4B", "L4", lora_r=0)
    better, changes = fitting(made)
    assert better.fits and plan_of(made.setup.changed(**changes)) == better
    assert changes["lora_r"] and better.setup.weights == "bf16"
    shorter, changes = fitting(plan("gpt-oss-20b", "T4", context=131_072))
    assert shorter.fits and changes["max_completion_length"] == shorter.setup.step.context - 512
    larger, changes = fitting(plan("Llama-3.3-70B", "T4"))
    assert larger.fits and changes["card"] is larger.setup.card
    assert fitting(plan(replace(MODELS["Llama-3.3-70B"], layers=1000), "T4")) is None


@pytest.mark.parametrize(
    "model, card, settings",
    [
        ("gpt-oss-20b", "T4", dict(offload_embedding=True, offload_activations=True)),
        ("gpt-oss-20b", "H200", {}),
        ("Llama-3.1-8B", "L4", dict(weights="nf4")),
        ("Phi-4", "A100-80", dict(per_device_train_batch_size=3, share_prompt=True)),
        ("gpt-oss-20b", "H100", dict(implementation="transformers", attention="eager")),
    ],
)
def test_the_longest_context_is_the_longest(model, card, settings):
    n = setup_of(model, card, **settings).longest_context()
    assert (
        n > 0
        and n % 64 == 0
        and plan(model, card, context=n, **settings).fits
        and not plan(model, card, context=n + 64, **settings).fits
    )


def test_no_context_is_short_enough_and_none_too_long():
    assert setup_of("gpt-oss-120b", "T4").longest_context() == 0
    assert setup_of("Qwen2.5-1.5B", "B200").longest_context(most=4096) == 4096
    assert setup_of("gpt-oss-20b", Card("small", 12.0, (8, 0))).longest_context() == 0


def test_advice_begins_with_the_largest_saving():
    for model, card, choices in (
        (
            "Llama-3.1-8B",
            "T4",
            dict(
                context=8192,
                per_device_train_batch_size=2,
                gradient_checkpointing=False,
                sampler="vllm",
            ),
        ),
        ("gpt-oss-20b", "T4", dict(context=16_384)),
        ("Llama-3.1-8B", "L4", dict(context=20_480, per_device_train_batch_size=8)),
    ):
        made = plan(model, card, **choices)
        for start in (made, standard(made.setup)):
            found = advise(start)
            left = [a.change for a in found]
            assert (
                found
                and [a.saves for a in found] == sorted((a.saves for a in found), reverse=True)
                and len(set(left)) == len(left)
            )
            lines = advice_text(start).splitlines()
            assert "saves most comes first" in lines[0] and all(
                f"{a.saves / GiB:.2f} GiB by {a.change}. {a.cost}" in line
                for a, line in zip(found, lines[1:])
            )


def test_advice_knows_every_switch_of_the_usual_practice():
    usual, mended = (
        standard(plan("gpt-oss-20b", "T4", context=32_768).setup),
        plan(
            "gpt-oss-20b",
            "T4",
            context=32_768,
            offload_embedding=True,
            offload_activations=True,
            lora_r=8,
        ),
    )
    mended = plan_of(mended.setup.changed(optim="adamw_8bit"))
    assert advise(usual)[-1].plan.peak == mended.peak and usual.setup.attention == "eager"
    assert any(
        "no second model" in a.change
        for a in advise(plan("gpt-oss-20b", "T4", context=4096, reference=True))
    )


def test_advice_takes_cheap_switches_and_leaves_out_what_is_not_needed():
    found = advise(
        plan("Phi-4", "T4", weights="nf4", context=8192, offload_embedding=True, slice_tokens=1024)
    )
    assert [a.change for a in found] == [
        "offload_activations=True"
    ]  # not the rank, not the adapters' places
    made = plan("Llama-3.1-8B", "L4", context=20_480, per_device_train_batch_size=8)
    found = advise(made)
    for a in found:  # without any one of them it does not fit
        changes = {k: v for other in found if other is not a for k, v in other.changes.items()}
        assert not plan_of(made.setup.changed(**changes)).fits, a.change


def test_the_documents_llama():
    made = plan(
        "Llama-3.1-8B",
        "H200",
        weights="nf4",
        context=20_480,
        prompt_length=0,
        per_device_train_batch_size=8,
        slice_tokens=4096,
        offload_embedding=True,
        offload_activations=True,
    )
    assert max(made.totals["head"], made.totals["layer"]) < 54.3 * GiB


def test_setups_are_plain_values():
    made = plan("Phi-4", "L4")
    told = json.loads(json.dumps(made.to_dict()))
    assert plan_of(made.setup.changed()) == made and told["peak"] == made.peak
    assert {f.name for f in fields(Setup)} == set(told["setup"])
    assert told["setup"]["config"]["generation_batch_size"] == 8


def test_a_setup_holds_the_configuration_of_a_run():
    config = GRPOConfig(
        num_generations=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_completion_length=1024,
        mini_batch=2,
        offload_activations=True,
        optim="paged_adamw_8bit",
    )
    setup = setup_of("gpt-oss-20b", "L4", config, prompt_length=100)
    step = setup.step
    assert setup.config is not config and setup.config == config and step.context == 1124
    assert (step.generation_batch_size, step.num_generations, step.mini_batch) == (8, 4, 2)
    assert step.offload_activations and step.optimizer_bytes == 2
    other = setup.changed(offload_activations=False, lora_r=4)
    assert other.differences(setup) == dict(offload_activations=False, lora_r=4)
    assert config.offload_activations  # which is left as it was


def test_a_group_of_one_is_refused_as_in_training():
    with pytest.raises(ValueError, match="nothing to be compared with"):
        plan("gpt-oss-20b", "T4", num_generations=1)


@pytest.mark.parametrize("context", [64, 700, 999, 1023, 1024, 1025, 8191])
def test_a_context_is_kept_to_the_token(context):
    step = setup_of("gpt-oss-20b", "T4", context=context).step
    assert step.context == context and step.prompt_length == min(512, context // 2)


@pytest.mark.long
def test_advice_speaks_the_words_of_config_and_loader():
    known = {*vars(GRPOConfig()), *inspect.signature(load_model).parameters}
    others = {*NO_SETTING.values()}
    for model in MODELS:
        for start in (
            dict(sampler="vllm", reference=True, attention="eager", slice_tokens=8192),
            dict(gradient_checkpointing=False, weights="nf4", double_quant=True),
            dict(per_device_train_batch_size=4, implementation="transformers"),
        ):
            for a in advise(plan(model, "T4", **start)):
                parts = {*a.change.split(", ")} - others
                assert {part.split("=")[0] for part in parts} <= known, a.change


def test_a_micro_batch_that_is_too_large_is_told_in_pieces():
    made = plan("gpt-oss-20b", "L4", context=8192, per_device_train_batch_size=8)
    words = next(
        line for line in describe(made).splitlines() if "cuts a micro-batch by itself" in line
    )
    pieces = int(words.split(": in ")[1].split()[0])
    fewer, enough = (
        plan("gpt-oss-20b", "L4", context=8192, per_device_train_batch_size=-(-8 // n))
        for n in (pieces - 1, pieces)
    )
    assert (
        not made.fits and not fewer.fits and enough.fits and f"{enough.peak / GiB:.2f} GiB" in words
    )
    assert "pieces" not in describe(
        plan("gpt-oss-20b", "H200", context=8192, per_device_train_batch_size=8)
    ) and "pieces" not in describe(plan("gpt-oss-120b", "T4", per_device_train_batch_size=2))


def test_words_near_a_card_s_line_and_without_adapters():
    n = setup_of("gpt-oss-20b", "L4").longest_context()
    for context, close in ((n, True), (n + 64, True), (n // 2, False), (4 * n, False)):
        assert ("That is close" in describe(plan("gpt-oss-20b", "L4", context=context))) == close
    assert "needs 0.00 GiB" not in describe(plan("gpt-oss-20b", "L4", context=n + 64))
    assert (
        "trains every weight" in describe(plan("Llama-3.1-8B", "H100", lora_r=0))
    ) and "trains every weight" not in describe(plan("Llama-3.1-8B", "H100"))


def test_advice_knows_the_format_of_the_experts_and_cards_that_need_no_advice():
    assert [
        a.change
        for a in advise(plan("gpt-oss-20b", "L4", weights="nf4", double_quant=True, context=4096))
    ] == ["load_in_4bit=True"]
    text = advice_text(
        plan("gpt-oss-20b", "L4", context=240_000, offload_embedding=True, offload_activations=True)
    )
    assert (
        "a card like the A100-40, which takes it as it was asked for" in text
    )  # a compute capability below the L4's, and enough memory
    assert plan(
        "gpt-oss-20b", "A100-40", context=240_000, offload_embedding=True, offload_activations=True
    ).fits


def test_slices_are_chosen_as_in_training_and_anew_when_there_is_more_room():
    tight, roomy = (
        plan("gpt-oss-20b", card, context=200_000, offload_embedding=True, offload_activations=True)
        for card in ("L4", "H200")
    )
    assert (
        roomy.slice_tokens == SLICES[0] > tight.slice_tokens == SLICES[-1]
        and not tight.fits
        and plan("Llama-3.1-8B", "H200").slice_tokens is None
    )
    assert plan("gpt-oss-20b", "H200", slice_tokens=4096, context=131_072).slice_tokens == 4096
    full = plan("Llama-3.1-8B", "T4", weights="bf16")
    assert (
        not full.fits
        and all("slice_tokens" not in a.change for a in advise(full))
        and full.slice_tokens == SLICES[-1] < advise(full)[-1].plan.slice_tokens
    )  # in 4 bits larger ones fit


def test_what_is_said_of_a_rollout_and_of_a_card_without_bfloat16():
    none, some = (
        plan("Llama-3.1-8B", "T4", weights="bf16"),
        plan("Llama-3.1-8B", "L4", weights="nf4", num_generations=64, context=32_768),
    )
    assert (
        none.totals["rollout"] > none.room
        and "not one drawn together" in describe(none)
        and "max_batch_size" not in describe(none)
        and "A T4 has no bfloat16" in describe(none)
    )
    assert (
        some.rows < 64
        and f"{some.rows} drawn together" in describe(some)
        and "max_batch_size" not in describe(some)
        and "bfloat16" not in describe(some)
    )


def test_offloading_hidden_states_of_a_single_piece_is_told_to_be_idle():
    one, two = (
        plan(
            "gpt-oss-20b",
            "L4",
            context=8192,
            per_device_train_batch_size=2,
            offload_hidden=True,
            mini_batch=n,
        )
        for n in (1, 2)
    )
    assert one.host["hidden states"] == 0 < two.host["hidden states"]
    assert "offload_hidden changes nothing" in describe(one) and "offload_hidden" not in describe(
        two
    )


def test_several_cards_share_the_batch_and_not_the_model():
    one, four = (plan("gpt-oss-20b", "H100", context=4096, cards=n) for n in (1, 4))
    assert four.moments == one.moments and four.peak == one.peak and four.host == one.host
    told = four.to_dict()["setup"]
    assert told["cards"] == 4 and told["config"]["generation_batch_size"] == 32
    words = describe(four)
    assert "on each of 4 H100" in words and "together they draw 32 completions" in words
    assert f"{4 * sum(four.host.values()) / GiB:.1f} GiB in all" in words
    assert "cards" not in describe(one)
    shared = plan("gpt-oss-20b", "H100", context=4096, cards=4, generation_batch_size=32)
    alone = plan("gpt-oss-20b", "H100", context=4096, generation_batch_size=32)
    assert shared.totals["rollout"] < alone.totals["rollout"]  # a card draws 8 of them


def test_a_batch_that_the_cards_cannot_share_is_refused_with_one_that_they_can():
    wanted = "3 cards cannot share 8 completions.*Set generation_batch_size=24"
    with pytest.raises(ValueError, match=wanted):
        plan("Qwen3-4B", "L4", cards=3, generation_batch_size=8)
    assert (
        plan("Qwen3-4B", "L4", cards=3, generation_batch_size=24).setup.step.generation_batch_size
        == 8
    )
    config = GRPOConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    for cards in (1, 2, 4):  # each card draws as many, and the update is of so many more
        setup = setup_of("Qwen3-4B", "L4", config, cards=cards)
        assert setup.step.generation_batch_size == 8
        assert f"learn from {8 * cards}" in describe(plan_of(setup)) or cards == 1


def test_advice_for_several_cards_is_the_same_update():
    made = plan("Llama-3.1-8B", "L4", context=20_480, per_device_train_batch_size=8, cards=4)
    after = advise(made)[-1].plan.setup
    assert not made.fits and plan_of(after).fits
    for name in ("generation_batch_size", "effective_batch_size"):
        assert getattr(after.config.layout(4), name) == getattr(made.setup.config.layout(4), name)


def test_cards_that_share_the_weights_hold_a_part_and_gather_the_rest():
    settings = dict(context=8192, cards=8, sampler="server", lora_r=16)
    whole, shared = (plan("Qwen3-32B", "H100", fsdp=f, **settings) for f in (None, "full_shard"))
    for part in ("weights", "adapters"):  # every tensor has rows for all eight, but norms of heads
        assert whole.moments["layer"][part] / 8 == pytest.approx(
            shared.moments["layer"][part], rel=1e-4
        )
    two = 2 * sum(whole.weights[k] for k in ("attention", "mlp", "rest")) / 64
    two += (
        whole.weights["embedding"]
        + whole.weights["head"]
        + 2 * whole.moments["layer"]["adapters"] / 4 / 64
    )  # an adapter's weights without gradient and moments
    assert shared.moments["layer"]["copies"] == pytest.approx(two, rel=1e-3)
    assert shared.moments["rollout"]["copies"] == 0  # a server draws
    kept = plan("Qwen3-32B", "H100", fsdp="shard_grad_op", **settings)
    alone = plan("Qwen3-32B", "H100", fsdp="full_shard", **{**settings, "sampler": "engine"})
    everything = sum(whole.weights.values()) + whole.moments["layer"]["adapters"] / 4
    for held in (kept.moments["layer"]["copies"], alone.moments["rollout"]["copies"]):
        assert held == pytest.approx(everything, rel=1e-6)
    assert shared.host[UNTIL_CUT] == sum(whole.weights.values())
    assert "24.0 GiB in all. Until it is cut, the first process has the model too: 61.0 GiB" in (
        describe(shared)
    )
    assert "share the weights out" in describe(shared) and "share" not in describe(whole)
    tight = plan("Qwen3-32B", "L40S", fsdp="shard_grad_op", **settings)
    assert [a.changes for a in advise(tight)] == [{"fsdp": "full_shard"}]
    assert "a share of the weights on each of the 8 cards" in advice_text(
        plan("Llama-3.3-70B", "A100-40", weights="bf16", reference=True, **settings)
    )


def test_what_a_card_receives_is_what_it_has_no_share_of():
    asked = dict(cards=4, sampler="server", fsdp="full_shard", generation_batch_size=32)
    setup = setup_of("Qwen3-4B", "H100", gradient_accumulation_steps=8, **asked)
    weights = 2 * sum(setup.model.parameters.values()) + 4 * lora_parameters(setup.model, 32)
    received = crossing(setup)
    assert received["forward passes"] == pytest.approx(8 * weights * 3 / 4, rel=1e-4)
    assert received["forward passes"] == received["backward passes"] and not received["drawing"]
    assert received["log-probs before"] == received["forward passes"]  # a server's are corrected
    own = crossing(setup.changed(sampler="engine", num_generations=4))
    assert own["drawing"] == pytest.approx(weights * 3 / 4, rel=1e-4)
    assert own["log-probs before"] == 0 and crossing(setup.changed(fsdp=None)) == {}
    kept = crossing(setup.changed(fsdp="shard_grad_op"))
    assert kept["backward passes"] < received["backward passes"] / 5


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(cards=1), "one card would hold all"),
        (dict(optim="adamw_8bit"), "take adamw_torch"),
        (dict(weights="nf4"), "nf4 is not shared out"),
        (dict(offload_activations=True), "offload_activations does not go with it: leave it out"),
    ],
)
def test_shares_refuse_what_a_run_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        plan("Llama-3.1-8B", "H100", **{"cards": 2, "fsdp": "full_shard", **settings})


def test_cards_that_only_draw_hold_what_those_that_train_do_not():
    settings = dict(context=4096, cards=2, generation_batch_size=32)
    made = plan("gpt-oss-20b", "H100", samplers=2, **settings)
    alone, parts = plan("gpt-oss-20b", "H100", **settings), made.setup.on_vllm()
    assert made.moments["rollout"]["kv"] == 0 < alone.moments["rollout"]["kv"]
    assert made.totals["layer"] == alone.totals["layer"] and made.weights == alone.weights
    assert sum(parts.values()) == int(VLLM_SHARE * CARDS["H100"].room)
    step, rows = made.setup.step, made.setup.served()
    lengths = dict(prompt=step.prompt_length, group=step.num_generations)
    held, more = (kv_bytes(step.shape, n, step.context, 2, **lengths) for n in (rows, rows + 1))
    assert held <= parts["kv"] < more
    assert "2 more H100 only draw, 16 of 32 completions each" in describe(made)
    assert made.to_dict()["card_that_draws"] == parts and alone.to_dict()["card_that_draws"] is None
    stale = plan("gpt-oss-20b", "H100", samplers=2, max_staleness=2, **settings).setup.on_vllm()
    assert stale["adapters"] == 2 * parts["adapters"]  # four versions for two
    assert standard(made.setup).setup.samplers == 0
    with pytest.raises(ValueError, match="L4 does not hold gpt-oss-120b under vLLM"):
        plan("gpt-oss-120b", "L4", samplers=1)


def test_the_commands_name_each_card_once():
    setup = setup_of("gpt-oss-20b", "H100", cards=3, samplers=2, lora_r=20, context=4096)
    lines = [*server_lines(setup, "openai/gpt-oss-20b"), launch_line(setup, "my run.yaml")]
    cards = [line.split()[0].removeprefix("CUDA_VISIBLE_DEVICES=") for line in lines]
    assert cards == ["0", "1", "2,3,4"]
    for line, url in zip(lines, server_urls(setup)):
        port = line.split("--port ")[1].split()[0]
        assert url.endswith(f":{port}") and "--max-lora-rank 32 " in line and " 4096" in line
    words = shlex.split(lines[-1])[1:]
    assert words[:4] == ["torchrun", "--nproc-per-node", "3", "-m"] and words[-1] == "my run.yaml"
    own = server_lines(setup, "my_models:small")[1]
    args = _parser([]).parse_args(shlex.split(own)[1:])
    assert (args.model, args.port, args.max_lora_rank) == ("my_models:small", 8001, 32)


def test_vllm_beside_the_trainer_takes_its_share():
    def made(**settings):
        return plan("Qwen3-4B", "A100-80", context=2048, **settings)

    awake = made(sampler="vllm", vllm_share=0.3)
    asleep = made(sampler="vllm_sleep", vllm_share=0.3)
    share = int(0.3 * CARDS["A100-80"].room)
    for one, moment, held in (
        (awake, "rollout", share),
        (awake, "layer", share),
        (asleep, "rollout", share),
        (asleep, "layer", 0),
    ):
        assert one.moments[moment]["copies"] + one.moments[moment]["kv"] == held
    assert "vLLM takes 30% of the card: 7.5 GiB of weights" in describe(awake)
    assert "gives it back while the trainer trains" in describe(asleep)
    with pytest.raises(ValueError, match="raise vllm_gpu_memory_utilization, or leave use_vllm"):
        made(sampler="vllm", vllm_share=0.1)
    packed = made(sampler="vllm", vllm_share=0.3, weights="nf4")
    assert "different policies" in describe(packed)
    tight = plan("Qwen3-4B", "L4", context=8192, sampler="vllm", vllm_share=0.6)
    assert "use_vllm=False" in advice_text(tight)


@pytest.mark.parametrize("name", ["Jamba", "NemotronH", "Zamba2", "RecurrentGemma", "FalconH1"])
def test_no_plan_is_made_of_what_no_formula_counts(name, tmp_path):
    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a state of their own .*no plan can be made"):
        plan(tmp_path, "H200")
