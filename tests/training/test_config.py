"""training.config against TRL 1.16, transformers and accelerate: names, defaults, what raises, what
is derived."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import subprocess
import sys
import types
import typing
import warnings

import numpy
import pytest
import torch
import trl
from accelerate.utils import LoggerType, PrecisionType
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from grpo_nb import GRPOTrainer
from grpo_nb.algorithm.losses import (
    CORRECTION_MODES,
    LEVELS,
    LOSS_DEFAULTS,
    LOSSES,
    check_loss_settings,
)
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training import config as room
from grpo_nb.training.config import (
    ALIASES,
    ALSO_NEUTRAL,
    DIFFERENT_FROM_TRL,
    IGNORED,
    LOSS_TYPES,
    NEUTRAL,
    REFUSED,
    SECRETS,
    GRPOConfig,
)
from grpo_nb.training.state import TrainState

OURS = GRPOConfig.specs
UNIONS = (typing.Union, types.UnionType)
OLDER = {
    "max_prompt_length",
    "logging_dir",
    "overwrite_output_dir",
    "save_safetensors",
    "vllm_sampling_params",
}  # dropped by TRL and transformers, or Unsloth's: still in many scripts
TRL = {
    field.name: field.default
    if field.default is not dataclasses.MISSING
    else field.default_factory()
    for field in dataclasses.fields(trl.GRPOConfig)
}


def outcome(function, *args, **given):
    "What a call gives, or the error that it raises."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **given)
        except Exception as error:
            return error


# names and defaults


def test_every_keyword_of_trl_is_a_setting_an_alias_refused_or_without_effect():
    here = set(OURS) | set(ALIASES) | set(REFUSED) | set(IGNORED)
    assert here | {"vllm_sampling_params"} == set(GRPOConfig.__dataclass_fields__)
    assert set(TRL) <= here
    assert {*REFUSED, *IGNORED} <= set(TRL) | OLDER  # a setting of our own is honoured


def test_every_field_has_trls_type():
    def plain(hint):
        "Kinds alone: int for int | None, str for an enum that may be given as a string."
        parts = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
        return {typing.get_origin(part) or part for part in parts} - {type(None)}

    theirs, ours = (
        {f.name: f.type for f in dataclasses.fields(c)} for c in (trl.GRPOConfig, GRPOConfig)
    )
    differing = {name for name in theirs if not plain(ours[name]) <= plain(theirs[name])}
    assert differing == {"parallelism_config"}  # a class of accelerate's, which has no text


def test_no_keyword_has_two_meanings():
    tables = [OURS, REFUSED, IGNORED, ALIASES]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert (
        set(ALIASES.values()) <= set(OURS)
        and set(NEUTRAL) == set(REFUSED) | set(IGNORED)
        and set(ALSO_NEUTRAL) <= set(NEUTRAL)
    )
    assert sum(len(names) for _, names in room.REFUSED_BY_REASON + room.IGNORED_BY_REASON) == len(
        NEUTRAL
    )


def test_defaults_are_trls_except_where_the_table_says_so():
    differing = {
        name: (OURS[name].default, TRL[name])
        for name in OURS
        if name in TRL and OURS[name].default != TRL[name]
    }
    assert differing == {
        name: (ours, theirs) for name, (ours, theirs, why) in DIFFERENT_FROM_TRL.items()
    }
    assert all(len(why) > 20 for _, _, why in DIFFERENT_FROM_TRL.values())


def test_refused_keywords_are_held_at_trls_default():
    assert {name: value for name, value in NEUTRAL.items() if name not in OLDER} == {
        name: TRL[name] for name in NEUTRAL if name not in OLDER
    }


def test_all_defaults_of_trl_at_once_are_accepted():
    config = GRPOConfig(**TRL)
    assert set(config.differences(GRPOConfig())) == set(DIFFERENT_FROM_TRL) - {"output_dir"}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(name):
    assert GRPOConfig(**{name: NEUTRAL[name]}) == GRPOConfig()
    also = ALSO_NEUTRAL.get(name, NEUTRAL[name])
    assert getattr(GRPOConfig(**{name: also}), name) == also
    asked = "something else"
    for attempt in (
        lambda: GRPOConfig(**{name: asked}),
        lambda: setattr(GRPOConfig(), name, asked),
    ):
        error = outcome(attempt)
        assert (
            type(error) is ValueError
            and name in str(error)
            and asked in str(error)
            and REFUSED[name] in str(error)
        )
    assert getattr(GRPOConfig(), name) == NEUTRAL[name]


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_without_effect(name):
    assert GRPOConfig(**{name: NEUTRAL[name]}) == GRPOConfig()
    for attempt in (
        lambda: GRPOConfig(**{name: "something else"}),
        lambda: setattr(GRPOConfig(), name, "something else"),
    ):
        with pytest.warns(UserWarning) as caught:
            config = attempt()
        assert config is None or getattr(config, name) == "something else"
        assert config is None or config.differences(GRPOConfig()) == {}
        assert (
            len(caught) == 1
            and f"{name}='something else' changes nothing here: {IGNORED[name]}"
            == str(caught[0].message)
            and caught[0].filename == __file__
        )
    assert getattr(GRPOConfig(), name) == NEUTRAL[name]


def test_a_script_that_reads_its_config_from_a_command_line(tmp_path):
    "TRL's own parser, with its other two dataclasses beside ours, and a YAML file."
    from transformers import HfArgumentParser

    (tmp_path / "run.yaml").write_text("beta: 0.1\nreport_to: none\n")
    parser = trl.TrlParser((trl.ScriptArguments, GRPOConfig, trl.ModelConfig))
    line = [
        "--config",
        str(tmp_path / "run.yaml"),
        "--dataset_name",
        "x",
        "--output_dir",
        "out",
        "--learning_rate",
        "1e-5",
        "--scale_rewards",
        "none",
        "--bf16",
        "false",
        "--reward_weights",
        "1.0",
        "0.5",
        "--chat_template_kwargs",
        '{"reasoning_effort": "low"}',
        "--mask_truncated_completions",
        "--top_k",
        "5",
        "--epsilon_high",
        "0.28",
    ]
    _, config, _ = parser.parse_args_and_config(line)
    assert config == GRPOConfig(
        output_dir="out",
        learning_rate=1e-5,
        scale_rewards="none",
        bf16=False,
        reward_weights=[1.0, 0.5],
        chat_template_kwargs={"reasoning_effort": "low"},
        mask_truncated_completions=True,
        top_k=5,
        epsilon_high=0.28,
        beta=0.1,
    )
    assert HfArgumentParser(GRPOConfig).parse_args_into_dataclasses([]) == (GRPOConfig(),)
    assert "a number in [0, inf) or None" in HfArgumentParser(GRPOConfig).format_help()
    assert (
        isinstance(outcome(GRPOConfig, epsilon_high=-1), ValueError)
        and GRPOConfig(epsilon_high=None).epsilon_high is None
    ), "the parser must not change the class"


def test_a_config_can_be_extended():
    @dataclasses.dataclass(kw_only=True)
    class Mine(GRPOConfig):
        beta: float = 0.04

    assert (
        Mine().beta == 0.04
        and isinstance(outcome(Mine, beta=-1), ValueError)
        and Mine(epsilon=0.1).used("epsilon_high") == 0.1
    )


def test_a_switch_that_is_off_may_be_given_as_enum_or_bool():
    GRPOConfig(logging_strategy=IntervalStrategy.STEPS, tf32=None, deepspeed=None)
    assert "bf16_full_eval=True" in str(outcome(GRPOConfig, bf16_full_eval=True))
    with pytest.warns(UserWarning, match="tf32=True changes nothing here: .*set_float32_matmul"):
        GRPOConfig(tf32=True)


@pytest.mark.parametrize("given", [{}, {"bf16": True}, {"fp16": True}])
def test_what_transformers_derives_is_there_on_a_cpu_too(given):
    config, theirs = GRPOConfig(**given), TrainingArguments(use_cpu=True)
    for name in ("device", "n_gpu", "world_size", "process_index", "parallel_mode", "should_save"):
        assert getattr(config, name) == getattr(theirs, name)
    config.distributed_state.wait_for_everyone()
    assert config.distributed_state.is_main_process


@pytest.mark.parametrize(
    "given, nearest",
    [
        ("learning_rte", "learning_rate"),
        ("epsilon_hi", "epsilon_high"),
        ("max_completions_length", "max_completion_length"),
        ("evaluation_strategy", "eval_strategy"),
        ("unsloth_grpo_minibatch", "unsloth_grpo_mini_batch"),
        ("max_new_tokens", "max_completion_length"),
        ("lr", "learning_rate"),
        ("num_ppo_epochs", "num_iterations"),
        ("clip_ratio", "epsilon"),
        ("use_liger_loss", "use_liger_kernel"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(given, nearest):
    error = outcome(GRPOConfig, **{given: 1})
    assert type(error) is TypeError and given in str(error) and f"'{nearest}'" in str(error)
    assert (
        type(outcome(setattr, GRPOConfig(), given, 1)) is AttributeError
        and type(outcome(getattr, GRPOConfig(), given)) is AttributeError
    )


def test_words_are_those_of_transformers_and_accelerate():
    assert set(room.SCHEDULES) == {kind.value for kind in SchedulerType}
    theirs = {name.value for name in OptimizerNames}
    assert all(
        any(word in name for word in ("galore", "apollo", "lomo", "schedule_free"))
        for name in theirs - set(room.OPTIMIZERS)
    )
    assert set(room.OPTIMIZERS) <= theirs
    assert set(room.TRACKERS) == {name.value for name in LoggerType} - {"all"}
    assert {
        GRPOConfig(**choice).precision(True) for choice in ({}, {"bf16": False}, {"fp16": True})
    } <= {kind.value for kind in PrecisionType}


# other names


@pytest.mark.parametrize("other, name", sorted(ALIASES.items()))
def test_alias(other, name):
    value = {
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }.get(other, 4)
    config = GRPOConfig(**{other: value})
    assert getattr(config, name) == value and config == GRPOConfig(**{name: value})
    assert (
        GRPOConfig(**{other: value, name: value}) == config
        and GRPOConfig(**{other: None}) == GRPOConfig()
        and GRPOConfig(**{other: value, name: OURS[name].default}) == config
    ), "a parser gives every field, most of them at their defaults"
    if other != "activation_checkpointing":
        clash = {"activation_checkpointing_kwargs": {"a": 1}}.get(other, 5)
        for order in ({other: value, name: clash}, {name: clash, other: value}):
            error = outcome(GRPOConfig, **order)
            assert type(error) is ValueError and other in str(error) and name in str(error)
    later = GRPOConfig()
    setattr(later, other, value)
    assert later == config
    changed = dataclasses.replace(config, **{name: OURS[name].default})
    assert changed == GRPOConfig()


def test_sampling_params_of_vllm():
    "As published notebooks pass them, and as objects of our own."
    given = SamplingParams(min_p=0.1, top_p=0.9, top_k=20, temperature=0.7, max_tokens=99)
    config = GRPOConfig(vllm_sampling_params=given)
    assert config == GRPOConfig(
        min_p=0.1, top_p=0.9, top_k=20, temperature=0.7, max_completion_length=99
    )

    @dataclasses.dataclass
    class Theirs:  # the attributes of vLLM's
        temperature: float = 1.0
        top_k: int = 0
        min_p: float = 0.0
        seed: int | None = None
        presence_penalty: float = 0.0
        stop: str | list[str] | None = None
        max_tokens: int | None = 16

    config = GRPOConfig(
        vllm_sampling_params=Theirs(top_k=-1, min_p=0.1, seed=3407), temperature=0.5
    )
    assert (config.top_k, config.min_p, config.temperature) == (0, 0.1, 0.5)
    assert config.max_completion_length == 512
    for stop in ("</s>", ["</s>"], ("</s>",)):
        config = GRPOConfig(vllm_sampling_params=Theirs(stop=stop))
        assert config.sampling_params().stop == ("</s>",)
    assert config.generation_kwargs == {"stop_strings": ["</s>"]}
    with pytest.raises(ValueError, match="give the texts there, as 'stop_strings'"):
        GRPOConfig(vllm_sampling_params=Theirs(stop="x"), generation_kwargs={"eos_token_id": 7})
    with pytest.raises(ValueError, match="has presence_penalty=0.5, which cannot be honoured"):
        GRPOConfig(vllm_sampling_params=Theirs(presence_penalty=0.5))
    with pytest.raises(
        ValueError, match="stop_token_ids=.7,., .*generation_kwargs={'eos_token_id'"
    ):
        GRPOConfig(vllm_sampling_params=SamplingParams(stop_token_ids=[7]))


def test_generation_kwargs_that_ask_for_this_sampler():
    asked = {"do_sample": True, "num_beams": 1, "pad_token_id": 3, "length_penalty": -0.1}
    config = GRPOConfig(generation_kwargs=asked | {"top_k": 50, "min_p": 0.1}, top_k=10, top_p=0.9)
    drawn = config.sampling_params()
    assert (drawn.top_k, drawn.min_p, drawn.top_p) == (50, 0.1, 0.9)  # theirs win, as in TRL
    same = {"temperature": 0.7, "max_new_tokens": 9, "top_k": None, "eos_token_id": 5}
    config = GRPOConfig(generation_kwargs=same, temperature=0.7, max_completion_length=9)
    assert config.sampling_params().stop_token_ids == (5,) and not config.sampling_params().top_k
    for asked, words in (
        ({"do_sample": False}, "'do_sample': False"),
        ({"num_beams": 2}, "token by token"),
        ({"suppress_tokens": [5]}, "'suppress_tokens'"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 0.7}, "set temperature"),
        ({"max_new_tokens": 9}, "set max_completion_length"),
    ):
        with pytest.raises(ValueError, match=words):
            GRPOConfig(generation_kwargs=asked)


# single values

NUMBERS = {name: spec.allowed for name, spec in OURS.items() if isinstance(spec.allowed, str)}
WORDS = {
    name: spec.allowed
    for name, spec in OURS.items()
    if isinstance(spec.allowed, tuple) and list not in spec.types
}


@pytest.mark.parametrize("name", sorted(OURS.keys() - {*SECRETS}))  # which are never shown
def test_nonsense_is_refused_with_what_is_possible(name):
    nonsense = [math.nan, math.inf, -math.inf, object(), {1}]
    if list not in OURS[name].types:
        nonsense.append([])
    words = (
        "output_dir",
        "run_name",
        "report_to",
        "project",
        "metric_for_best_model",
        "optim_args",
        "hub_model_id",
        "hub_revision",
        "dynamic_sampling",
        "curriculum",
        "vllm_python",
        "vllm_server_base_url",
        "vllm_server_host",
    )
    if name not in words:
        nonsense.append("1e-6")
    for value in nonsense:
        error = outcome(GRPOConfig, **{name: value})
        assert (
            type(error) is ValueError
            and name in str(error)
            and repr(value) in str(error)
            and f"The default is {OURS[name].default!r}" in str(error)
        ), (value, error)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_the_ends_of_every_interval(name):
    low, high = (float(end) for end in NUMBERS[name][1:-1].split(","))
    whole = float not in OURS[name].types or OURS[name].share
    step = 1 if whole else 1e-9
    others = {"max_steps": {-1: -1, 0: 1}}.get(name, {})
    inner = others.get(low, low) if NUMBERS[name][0] == "[" else low + step
    inner = inner if math.isfinite(inner) else -1.0  # the interval has no lower end
    if OURS[name].share:
        assert getattr(outcome(GRPOConfig, **{name: 0.25}), name) == 0.25
    alone = {"vllm_importance_sampling_clip_max": {"vllm_importance_sampling_clip_min": None}}.get(
        name, {}
    )
    accepted = outcome(GRPOConfig, **{name: inner}, **alone)
    assert (
        isinstance(accepted, GRPOConfig)
        and getattr(accepted, name) == inner
        and isinstance(getattr(accepted, name), int if whole else float)
    )
    outside = low - step if NUMBERS[name][0] == "[" else low
    if (name, outside) != ("top_k", 0):
        assert isinstance(outcome(GRPOConfig, **{name: outside}), ValueError)
    if math.isfinite(high):
        assert isinstance(outcome(GRPOConfig, **{name: high}), GRPOConfig) == (
            NUMBERS[name][-1] == "]"
        )
        assert isinstance(outcome(GRPOConfig, **{name: high + 1}), ValueError)
    if bool not in OURS[name].types:
        assert isinstance(outcome(GRPOConfig, **{name: True}), ValueError)
    if whole:
        assert isinstance(outcome(GRPOConfig, **{name: max(low, 1) + 0.5}), ValueError)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(1e-3, 0.999), total=st.integers(1, 3000))
def test_shares_of_a_run_are_as_many_updates_as_in_transformers(share, total):
    from transformers.trainer_callback import TrainerState

    theirs = TrainerState()
    names = {"logging_steps": share, "save_steps": share, "eval_steps": share}
    theirs.compute_steps(TrainingArguments(use_cpu=True, **names), total)
    config = GRPOConfig(max_steps=total, eval_strategy="steps", **names)
    ours = TrainState(layout=config.layout())
    ours.begin(config, rows=64)
    assert {name: getattr(ours, name) for name in names} == {
        name: getattr(theirs, name) for name in names
    }


@pytest.mark.parametrize(
    "name",
    [name for name, field in OURS.items() if bool in field.types and name != "scale_rewards"],
)
@pytest.mark.parametrize("value", ["False", 0, 1])
def test_a_switch_takes_true_and_false_alone(name, value):
    assert isinstance(outcome(GRPOConfig, **{name: value}), ValueError)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_words(name):
    others = (
        {"eval_strategy": "steps"} if name in ("save_strategy", "lr_scheduler_type") else {}
    )  # some need evaluations
    for word in WORDS[name]:
        assert getattr(outcome(GRPOConfig, **{name: word}, **others), name) == word
    error = outcome(GRPOConfig, **{name: WORDS[name][0] + "x"})
    assert isinstance(error, ValueError) and f"The nearest is {WORDS[name][0]!r}" in str(error)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(top_k=-2), None),
        (dict(temperature=0), None),
        (dict(learning_rate=-1), None),
        (dict(save_steps=1.5), "a whole number in (0, inf), or below 1 a share of the run"),
        (dict(model="x"), "none is spelt nearly so"),
        (dict(stop="x"), "none is spelt nearly so"),
        (dict(optim="adamw"), None),
        (dict(lr_scheduler_type="linear_with_warmup"), None),
        (dict(loss_type="rloo"), None),
    ],
)
def test_no_advice_is_better_than_a_wrong_one(given, words):
    error = outcome(GRPOConfig, **given)
    assert (
        isinstance(error, (TypeError, ValueError))
        and "nearest" not in str(error)
        and (words or "") in str(error)
    )


def test_a_switch_from_a_command_line():
    assert (
        outcome(GRPOConfig, scale_rewards="False").scale_rewards == "none"
        and outcome(GRPOConfig, scale_rewards="True").scale_rewards == "group"
    )
    assert isinstance(outcome(GRPOConfig, bf16="False"), ValueError)


@pytest.mark.parametrize(
    "word, told",
    [
        ("DAPO", "The nearest is 'dapo'"),
        ("GSPO", "GSPO is loss_type='grpo' with importance_sampling_level='sequence'"),
        ("dr-grpo", "The nearest is 'dr_grpo'"),
    ],
)
def test_a_loss_by_another_name(word, told):
    error = outcome(GRPOConfig, loss_type=word)
    assert (
        isinstance(error, ValueError)
        and told in str(error)
        and str(error).count("nearest") == told.count("nearest")
    )


def test_values_of_other_libraries_become_plain_ones(tmp_path):
    config = GRPOConfig(
        learning_rate=numpy.float32(0.5),
        num_generations=numpy.int64(4),
        lr_scheduler_type=SchedulerType.COSINE,
        optim=OptimizerNames.SGD,
        save_strategy=IntervalStrategy.EPOCH,
        output_dir=tmp_path,
        logging_steps=5.0,
        reward_weights=(1.0, 2),
        top_k=0,
        scale_rewards=False,
    )
    assert json.loads(config.to_json()) == {
        **GRPOConfig().to_dict(),
        "learning_rate": 0.5,
        "num_generations": 4,
        "lr_scheduler_type": "cosine",
        "optim": "sgd",
        "save_strategy": "epoch",
        "output_dir": str(tmp_path),
        "logging_steps": 5,
        "reward_weights": [1.0, 2],
        "scale_rewards": "none",
    }


@pytest.mark.parametrize("weights", [[], [1.0, math.nan], ["1"], [True]])
def test_reward_weights_are_finite_numbers(weights):
    assert "one finite number for each reward function" in str(
        outcome(GRPOConfig, reward_weights=weights)
    )


# values that contradict each other


@pytest.mark.parametrize(
    "given, words",
    [
        ({"bf16": True, "fp16": True}, "exclude each other"),
        ({"steps_per_generation": 4, "generation_batch_size": 32}, "in two ways"),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, "in two ways"),
        ({"warmup_steps": 10.5}, "whole number"),
        ({"max_steps": 0}, "nothing would be trained"),
        ({"load_best_model_at_end": True}, "needs evaluations"),
        ({"save_strategy": "best"}, "needs evaluations"),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 3,
                "save_steps": 10,
            },
            "save_steps to a multiple of eval_steps",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "epoch"},
            "set save_strategy='best'",
        ),
        ({"sync_ref_model": True}, "with beta=0.0 there is none"),
        ({"generation_kwargs": {"num_beams": 4}}, "'num_beams'"),
        ({"chat_template_kwargs": "{low}"}, "a dict (or its JSON"),
        ({"report_to": ["wandb", "tensorbord"]}, "'tensorboard'"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "'token_mask'"),
    ],
)
def test_contradictions(given, words):
    error = outcome(GRPOConfig, **given)
    assert type(error) is ValueError and words in str(error)


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("low", [None, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("high", [None, 2.0])
@pytest.mark.parametrize("correction", [True, False])
def test_bounds_of_the_rollout_correction_raise_where_trls_do(
    mode, low, high, correction, tmp_path
):
    given = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        "vllm_importance_sampling_correction": correction,
    }
    theirs = outcome(trl.GRPOConfig, output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    assert isinstance(outcome(GRPOConfig, **given), ValueError) == isinstance(theirs, ValueError)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 8),
    group=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    steps=st.none() | st.integers(1, 4),
    size=st.none() | st.integers(1, 48),
    iterations=st.integers(1, 2),
)
def test_batches_are_derived_and_refused_as_in_trl(
    batch, group, accumulation, steps, size, iterations
):
    given = {
        "per_device_train_batch_size": batch,
        "num_generations": group,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": steps,
        "generation_batch_size": size,
        "num_iterations": iterations,
    }
    theirs = outcome(trl.GRPOConfig, use_cpu=True, bf16=False, **given)
    ours = outcome(lambda: GRPOConfig(**given).layout())
    at_once = batch * accumulation
    if steps is None and size is None and group > 1 and at_once % group:
        raised = ours.gradient_accumulation_steps
        assert isinstance(theirs, ValueError) and not ours.generation_batch_size % group
        wanted = accumulation * group / batch  # so many micro-batches give each G completions
        assert wanted <= raised < wanted + group / math.gcd(batch, group)
        assert "groups stay whole" in GRPOConfig(**given).describe()
        return
    assert isinstance(ours, ValueError) == isinstance(theirs, ValueError)
    if not isinstance(ours, ValueError):
        assert (ours.steps_per_generation, ours.generation_batch_size) == (
            theirs.steps_per_generation,
            theirs.generation_batch_size,
        )
        config = GRPOConfig(**given)
        rows = {row["setting"]: row["value"] for row in config.derived()}
        assert (
            rows["generation_batch_size"] == theirs.generation_batch_size
            and rows.get("steps_per_generation", steps) == theirs.steps_per_generation
        )
        assert config.steps_per_generation == steps and all(
            f"{name} = " in config.describe() for name in rows
        )


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 2000), warmup=st.one_of(st.integers(0, 300), st.floats(0, 0.999)))
def test_warm_up_is_as_long_as_transformers_says(total, warmup):
    arguments = outcome(TrainingArguments, use_cpu=True, warmup_steps=warmup)
    assert GRPOConfig(warmup_steps=warmup).num_warmup_steps(total) == arguments.get_warmup_steps(
        total
    )
    if warmup < 1:
        assert GRPOConfig(warmup_ratio=warmup).num_warmup_steps(
            total
        ) == arguments.get_warmup_steps(total)


@pytest.mark.parametrize(
    "given, available, expected",
    [
        ({}, True, "bf16"),
        ({}, False, "no"),
        ({"bf16": True}, True, "bf16"),
        ({"bf16": False}, True, "no"),
        ({"fp16": True}, True, "fp16"),
        ({"fp16": True}, False, "fp16"),
        ({"fp16": True, "bf16": False}, False, "fp16"),
    ],
)
def test_precision(given, available, expected):
    assert GRPOConfig(**given).precision(available) == expected
    assert isinstance(outcome(GRPOConfig(bf16=True).precision, False), ValueError)


def test_what_is_left_open_follows_another_setting():
    config = outcome(GRPOConfig, epsilon=0.1, logging_steps=7, num_generations=4)
    assert (
        config.used("epsilon_high"),
        config.used("eval_steps"),
        config.used("num_generations_eval"),
        config.used("beta"),
    ) == (0.1, 7, 4, 0.0)
    assert config.epsilon_high is None and config.eval_steps is None
    given = outcome(GRPOConfig, epsilon_high=0.0, eval_steps=3, num_generations_eval=1)
    assert (
        given.used("epsilon_high"),
        given.used("eval_steps"),
        given.used("num_generations_eval"),
    ) == (0.0, 3, 1)


@pytest.mark.parametrize(
    "given, expected",
    [
        ("none", []),
        (None, []),
        ([], []),
        ("wandb", ["wandb"]),
        (["tensorboard", "wandb"], ["tensorboard", "wandb"]),
        ("all", ["all"]),
        (["none"], []),
    ],
)
def test_trackers(given, expected):
    assert GRPOConfig(report_to=given).trackers() == expected


def test_sampling_params():
    config = GRPOConfig(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        max_completion_length=99,
    )
    assert config.sampling_params() == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=99
    )
    assert GRPOConfig(top_k=0).sampling_params(n=3, temperature=0, seed=5) == SamplingParams(
        temperature=0, max_tokens=512, n=3, seed=5
    )


# doubts


def test_the_guides_settings_run_without_a_doubt():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = GRPOConfig(
            epsilon=0.2,
            epsilon_high=0.28,
            delta=1.5,
            loss_type="bnpo",
            mask_truncated_completions=True,
        )
        for loss_type in ("grpo", "dr_grpo"):
            dataclasses.replace(config, loss_type=loss_type)
        GRPOConfig(vllm_importance_sampling_correction=True, vllm_importance_sampling_cap=2.0)
    assert (
        config.epsilon,
        config.epsilon_high,
        config.delta,
        config.loss_type,
        config.mask_truncated_completions,
    ) == (0.2, 0.28, 1.5, "bnpo", True)


@settings(max_examples=100, deadline=None)
@given(epsilon=st.floats(0, 1), high=st.none() | st.floats(0, 2), delta=st.floats(0.01, 4))
def test_delta_within_the_clip_range_is_doubted(epsilon, high, delta):
    cautions = outcome(GRPOConfig, epsilon=epsilon, epsilon_high=high, delta=delta).cautions()
    upper = 1 + max(epsilon, epsilon if high is None else high)
    assert any(sentence.startswith("delta") for sentence in cautions) == (delta <= upper)


THEIRS = inspect.getsource(trl.GRPOTrainer._compute_loss)


@pytest.mark.parametrize("loss_type", [kind for kind in LOSS_TYPES if f'"{kind}"' in THEIRS])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_levels_that_do_not_fit_the_loss_are_doubted(loss_type, level):
    "The combinations that TRL's trainer warns about, as its __init__ has them."
    theirs = inspect.getsource(trl.GRPOTrainer.__init__)
    assert 'args.loss_type == "luspo" and args.importance_sampling_level != "sequence"' in theirs
    assert 'args.loss_type == "vespo" and args.importance_sampling_level != "token"' in theirs
    assert (
        'args.importance_sampling_level == "sequence" and args.loss_type in ["bnpo", '
        '"dr_grpo", "dapo", "cispo"]'
    ) in theirs
    expected = (loss_type, level) in {
        ("luspo", "token"),
        ("vespo", "sequence"),
        *((kind, "sequence") for kind in ("bnpo", "dr_grpo", "dapo", "cispo")),
    }
    cautions = outcome(
        GRPOConfig,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_high=5.0 if LOSSES[loss_type].caps else None,
    ).cautions()
    assert bool(cautions) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "sapo", "delta": 1.5},
        {"vespo_k_pos": 1.0},
        {"loss_type": "cispo", "epsilon_high": 5.0, "epsilon": 0.1},
        {"loss_type": "cispo"},
        {"eval_steps": 5},
    ],
)
def test_settings_without_effect_are_doubted(given):
    with pytest.warns(UserWarning) as caught:
        config = GRPOConfig(**given)
    assert [str(warning.message) for warning in caught] == config.cautions() and len(caught) == 1
    assert caught[0].filename == __file__


# the rules of the losses stand in algorithm.losses


def test_words_are_those_of_the_losses():
    assert LOSS_TYPES == tuple(LOSSES)
    assert OURS["importance_sampling_level"].allowed == tuple(LEVELS)
    assert OURS["vllm_importance_sampling_mode"].allowed == CORRECTION_MODES
    shared = LOSS_DEFAULTS.keys() - {"max_completion_length"}
    assert {name: OURS[name].default for name in shared} == {
        name: LOSS_DEFAULTS[name] for name in shared
    }


@pytest.mark.parametrize("name", sorted(LOSS_DEFAULTS.keys() & NUMBERS.keys()))
def test_what_the_config_allows_the_losses_take(name):
    low, high = (float(end) for end in NUMBERS[name][1:-1].split(","))
    ends = (low if NUMBERS[name][0] == "[" else low + 1e-9, min(high, 1e6))
    assert all(isinstance(check_loss_settings(**{name: end}), list) for end in ends)


def test_a_run_repeats_no_caution_of_its_config(tmp_path):
    "The loss of a run would otherwise give the sentence again, once for each place in the code."
    model, tokenizer = tiny_gpt_oss()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = GRPOConfig(
            output_dir=str(tmp_path),
            loss_type="luspo",
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=2,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"prompt": "1+1="}] * 2
        GRPOTrainer(
            model,
            lambda completions, **_: [float(len(c)) for c in completions],
            config,
            data,
            processing_class=tokenizer,
        ).train()
    said = [str(one.message) for one in caught if "luspo" in str(one.message)]
    assert said == config.cautions() and len(said) == 1


def test_the_defaults_need_no_torch():
    code = (
        "import sys; from grpo_nb.training.config import GRPOConfig; GRPOConfig(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# stored and compared

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": st.floats(0, 1),
        "num_generations": st.integers(2, 64),
        "epsilon_high": st.none() | st.floats(0, 2),
        "loss_type": st.sampled_from(LOSS_TYPES),
        "bf16": st.none() | st.booleans(),
        "reward_weights": st.none() | st.lists(st.floats(-3, 3), min_size=1, max_size=3),
        "lr_scheduler_kwargs": st.none() | st.dictionaries(TEXT, st.integers()),
        "run_name": st.none() | TEXT,
        "report_to": st.sampled_from(["none", "all", ["wandb"], None]),
        "max_steps": st.integers(1, 10**6),
    },
)


@settings(max_examples=60, deadline=None)
@given(a=CHANGES, b=CHANGES)
def test_stored_and_read_back(a, b):
    one, other = outcome(GRPOConfig, **a), outcome(GRPOConfig, **b)
    again = outcome(GRPOConfig.from_dict, json.loads(one.to_json()))
    assert (
        again == one == outcome(GRPOConfig.from_dict, one.to_dict())
        and one.differences(again) == {}
    )
    expected = {
        name: (getattr(one, name), getattr(other, name))
        for name in OURS
        if getattr(one, name) != getattr(other, name)
    }
    assert one.differences(other) == expected and other.differences(one) == {
        name: pair[::-1] for name, pair in expected.items()
    }
    assert outcome(eval, repr(one), {"GRPOConfig": GRPOConfig}) == one


def test_a_dtype_is_stored_by_its_name():
    config = GRPOConfig(model_init_kwargs={"dtype": torch.bfloat16})
    again = GRPOConfig.from_dict(json.loads(config.to_json()))
    assert again.model_init_kwargs == {"dtype": "bfloat16"} and config.differences(again) == {}


def test_copied_pickled_and_replaced():
    config = GRPOConfig(epsilon_high=0.28, reward_weights=[1.0, 2.0])
    assert (
        pickle.loads(pickle.dumps(config))
        == copy.copy(config)
        == copy.deepcopy(config)
        == dataclasses.replace(config)
        == config
    )
    changed = dataclasses.replace(config, beta=0.1)
    assert config.differences(changed) == {"beta": (0.0, 0.1)}


def test_the_signature_shows_every_setting():
    names = list(inspect.signature(GRPOConfig).parameters)
    assert names == [*OURS, "vllm_sampling_params"]


def test_importing_the_config_loads_no_library():
    code = (
        "import sys, grpo_nb.training.config; print([name for name in ('torch', "
        "'transformers', 'numpy', 'datasets', 'accelerate', 'matplotlib') if name in "
        "sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@dataclasses.dataclass
class Mine(GRPOConfig):
    flag: bool = False
    words: list = dataclasses.field(default_factory=list, metadata={"help": "of my own"})


def test_a_subclass_has_fields_of_its_own():
    config = Mine(output_dir="run", flag=True, beta=0.1, learning_rate=1e-3)
    assert (
        config.flag is True
        and config.words == []
        and (config.beta, config.learning_rate) == (0.1, 1e-3)
    )
    config.flag = "anything"
    assert (
        config.flag == "anything"
        and config.to_dict()["flag"] == "anything"
        and "effective_batch_size" in config.describe()
        and Mine.from_dict(config.to_dict()) == config
    )
    with pytest.raises(ValueError, match="beta is -1"):
        Mine(beta=-1)


def test_what_scripts_and_callbacks_of_transformers_ask_of_the_settings():
    config = GRPOConfig(output_dir="run")
    assert json.loads(config.to_json_string()) == json.loads(config.to_json()) and all(
        isinstance(value, (bool, int, float, str)) for value in config.to_sanitized_dict().values()
    )
    assert (config.world_size, config.process_index, config.should_save) == (1, 0, True)
    theirs = TrainingArguments(output_dir="run")
    for name in ("device", "n_gpu", "local_process_index", "train_batch_size", "should_log"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.get_process_log_level() == theirs.get_process_log_level()
    with config.main_process_first():
        pass


def test_a_recipe_in_the_shape_of_open_r1s(tmp_path):
    "A dataclass with fields and defaults of its own, and a YAML file with keywords of many kinds."

    @dataclasses.dataclass
    class Recipe(GRPOConfig):
        benchmarks: list[str] = dataclasses.field(default_factory=list, metadata={"help": "after"})
        chat_template: str | None = None
        num_completions_to_print: int = 0
        overwrite_hub_revision: bool = False
        system_prompt: str | None = None
        wandb_log_unique_prompts: bool = True

    recipe = """
bf16: true
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_strategy: every_save
learning_rate: 2.0e-05
log_completions: true
log_level: info
logging_first_step: true
logging_strategy: steps
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 512
max_completion_length: 2048
max_steps: -1
num_generations: 16
num_train_epochs: 1
output_dir: data
overwrite_output_dir: true
per_device_eval_batch_size: 16
per_device_train_batch_size: 16
push_to_hub: false
report_to:
- wandb
reward_weights:
- 1.0
- 0.5
save_strategy: "epoch"
save_total_limit: 1
seed: 42
system_prompt: "Think first."
ignore_data_skip: false
warmup_ratio: 0.1
"""
    (tmp_path / "recipe.yaml").write_text(recipe)
    parser = trl.TrlParser((trl.ScriptArguments, Recipe, trl.ModelConfig))
    line = ["--config", str(tmp_path / "recipe.yaml"), "--dataset_name", "x"]
    _, config, _ = parser.parse_args_and_config(line)
    assert config.max_prompt_length == 512 and config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert config.num_completions_to_print == 0 and config.system_prompt == "Think first."
    for copied in (pickle.loads(pickle.dumps(GRPOConfig(log_level="info"))), copy.copy(config)):
        assert copied.log_level == "info"
    for asked, told in (
        ("ignore_data_skip", "stood in the data"),
        ("auto_find_batch_size", "whole groups"),
    ):
        wish = recipe.replace(f"{asked}: false", "") + f"{asked}: true\n"
        (tmp_path / "recipe.yaml").write_text(wish)
        error = outcome(parser.parse_args_and_config, line)
        assert type(error) is ValueError and asked in str(error) and told in str(error)
        for route in (
            lambda: dataclasses.replace(config, **{asked: True}),
            lambda: Recipe(**{asked: True}),
        ):
            assert told in str(outcome(route))


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(seed=2**40), "seed is 1099511627776, .*a whole number in \\[0, 4294967295\\]"),
        (dict(seed=-1), "seed is -1"),
        (dict(data_seed=2**70), "data_seed is 1180591620717411303424"),
    ],
)
def test_what_the_system_would_refuse_is_a_sentence(given, said):
    with pytest.raises(ValueError, match=said):
        GRPOConfig(**given)


def test_the_largest_seed_is_what_numpy_takes():
    largest = GRPOConfig(seed=2**32 - 1, output_dir="\u00fc" * 127).seed
    numpy.random.RandomState(largest)
    with pytest.raises(ValueError):
        numpy.random.RandomState(largest + 1)


def test_a_folder_of_the_users_is_where_transformers_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("~/runs", "~", "runs/~", "~nobody/x"):
        theirs = TrainingArguments(output_dir=folder, use_cpu=True).output_dir
        assert GRPOConfig(output_dir=folder).output_dir == theirs


def test_a_number_beyond_all_floats_is_a_sentence():
    with pytest.raises(ValueError, match="^learning_rate is 10{400}, but it has to be a number"):
        GRPOConfig(learning_rate=10**400)
