"""Hints: each speaks where its symptom has lasted, is silent where it has not, says so once, and
never troubles a healthy run."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import one_thread  # noqa: F401

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.demo import greedy_accuracy
from grpo_nb.environments.arithmetic import addition_problems, exact_answer_reward
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.fine_tuning import fine_tune
from grpo_nb.training.hints import HINTS, Hints, RunHistory, shrunk

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/gsm8k"
CONFIG = dict(logging_steps=1, per_device_train_batch_size=64, num_generations=8)


def line(start, end):
    "From one number to another over a run."
    return lambda t: start + (end - start) * t


def fade(start, end):
    return lambda t: start * (end / start) ** t


# name -> number, or a function of how far the run is: a run in which everything goes as it should
WELL = {
    "learning_rate": 1e-3,
    "frac_reward_zero_std": line(0.1, 0.7),
    "completions/mean_length": 4.0,
    "completions/clipped_ratio": 0.02,
    "rewards/right/mean": line(0.3, 0.95),
    "rewards/right/std": line(0.46, 0.22),
    "reward": line(0.3, 0.95),
    "reward_group_std": line(0.4, 0.15),
    "sampling/gap_mean": 2e-7,
    "ratio/mean": 1.0,
    "ratio/max": 1.0,
    "clip_ratio/region_mean": 0.0,
    "entropy": fade(0.6, 0.08),
    "kl": line(0.0, 0.3),
    "loss": 0.001,
    "grad_norm": line(1.0, 5.0),
    "skipped_updates": 0.0,
}
FLAT = {
    "reward": 0.2,
    "rewards/right/mean": 0.2,
    "rewards/right/std": 0.4,
    "reward_group_std": 0.3,
    "entropy": 0.5,
    "frac_reward_zero_std": 0.4,
}
UNEVEN = {"completions/min_length": 1.0, "completions/max_length": 4.0}
ALIKE = {"frac_reward_zero_std": 1.0, "reward_group_std": 0.0}
SICK = {  # hint -> [(settings, what differs from a good run, what the sentence has to mention)]
    "loss prints 0": [
        ({}, {}, ["0.0010", "1"]),
        ({}, {"loss": 0.0164, **UNEVEN}, ["0.0164", "differ in length"]),
    ],
    "no spread in any group": [
        (
            {},
            {**ALIKE, "reward": 0.0, "rewards/right/mean": 0.0, "rewards/right/std": 0.0},
            ["right stands at 0.00", "warm-up", "easier"],
        ),
        (
            {},
            {
                **ALIKE,
                "reward": -2.0,
                "rewards/right/mean": -3.0,
                "rewards/right/std": 0.0,
                "rewards/form/mean": 1.0,
                "rewards/form/std": 0.0,
            },
            ["right stands at -3.00"],
        ),
        (
            {},
            {**ALIKE, "reward": 1.0, "rewards/right/mean": 1.0, "rewards/right/std": 0.0},
            ["1.00", "harder"],
        ),
        (
            {"temperature": 0.1},
            {
                **ALIKE,
                "reward": 0.5,
                "rewards/right/mean": 0.5,
                "rewards/right/std": 0.5,
                "entropy": 0.5,
            },
            ["one answer", "temperature (now 0.1)"],
        ),
    ],
    "nearly all truncated": [
        (
            {"max_completion_length": 16},
            {"completions/clipped_ratio": 0.97},
            ["97%", "max_completion_length=16"],
        ),
        (
            {"mask_truncated_completions": True},
            {"completions/clipped_ratio": 1.0},
            ["mask_truncated_completions=True"],
        ),
    ],
    "format and nothing else": [
        (
            {},
            {
                "rewards/form/mean": line(-1.0, 1.0),
                "rewards/form/std": line(0.3, 0.05),
                "rewards/right/mean": -3.0,
                "rewards/right/std": 0.0,
            },
            ["form from", "right from -3.00 to -3.00"],
        )
    ],
    "completions shrink": [
        (
            {},
            {
                "completions/mean_length": fade(160.0, 5.0),
                "rewards/right/mean": 0.02,
                "rewards/right/std": 0.15,
            },
            ["from 1", "tokens", "right has not risen"],
        )
    ],
    "collapse": [
        (
            {"learning_rate": 1e-2},
            {
                "entropy": fade(0.6, 0.01),
                "frac_reward_zero_std": line(0.1, 1.0),
                "rewards/right/mean": 0.3,
                "rewards/right/std": 0.46,
                "reward": 0.3,
            },
            ["0.01", "right stands at 0.30", "beta"],
        )
    ],
    "KL runs away": [({"beta": 0.001}, {"kl": line(0.0, 4.0)}, ["beta (now 0.001)"])],
    "gradient explodes": [
        ({}, {"grad_norm": 30.0}, ["30", "max_grad_norm=1"]),
        ({}, {"grad_norm": fade(0.01, 5.0)}, ["learning_rate"]),
        ({"max_grad_norm": 0}, {"grad_norm": fade(1.0, 1e4)}, ["max_grad_norm=0"]),
    ],
    "no gradient": [
        (
            {"mask_truncated_completions": True},
            {"grad_norm": 0.0, "frac_reward_zero_std": 0.3},
            ["masked"],
        )
    ],
    "updates skipped": [
        ({"fp16": True}, {"skipped_updates": 0.5}, ["50%", "bf16"]),
        ({}, {"skipped_updates": 1.0}, ["NaN"]),
    ],
    "sampler and trainer differ": [
        ({}, {"sampling/gap_mean": 0.3}, ["0.3 nats", "vllm_importance_sampling_correction"]),
        ({"top_p": 0.8, "min_p": 0.1}, {"sampling/gap_mean": 0.3}, ["top_p=0.8", "min_p=0.1"]),
    ],
    "the guard is near its bound": [
        (
            {},
            {"guard/gap_mean": 0.07, "guard/gap_bound": 0.1},
            ["0.07 nats", "guard_max_gap"],
        )
    ],
    "mostly clipped": [
        ({"num_iterations": 8}, {"clip_ratio/region_mean": 0.5}, ["50%", "num_iterations is 8"])
    ],
    "nothing moves": [
        ({"learning_rate": 1e-9}, FLAT, ["learning_rate (now 1e-09)", "0.200"]),
        ({"learning_rate": 0.0}, {"learning_rate": 0.0}, ["learning rate has been 0"]),
    ],
}
CASES = [
    pytest.param(name, *case, id=f"{name}-{i}")
    for name, cases in SICK.items()
    for i, case in enumerate(cases)
]


def run(changes=(), n=150):
    "Records of a made-up run."
    numbers = {**WELL, **dict(changes)}
    return [
        {
            "step": i + 1,
            **{
                name: value(i / (n - 1)) if callable(value) else value
                for name, value in numbers.items()
            },
        }
        for i in range(n)
    ]


def told(records, **config):
    "[(step, sentence)] and the hints."
    hints = Hints(GRPOConfig(**{**CONFIG, **config}))
    return [
        (record.get("step"), sentence) for record in records for sentence in hints.look(record)
    ], hints


def test_every_hint_has_a_case():
    assert set(SICK) == set(HINTS)


def test_a_good_run_hears_one_sentence():
    said, hints = told(run())
    assert list(hints.said) == ["loss prints 0"] and [step for step, _ in said] == [1]


@pytest.mark.parametrize("name, config, changes, mentions", CASES)
def test_a_symptom_is_named_with_its_numbers(name, config, changes, mentions):
    said, hints = told(run(changes), **config)
    assert name in hints.said
    assert [sentence for _, sentence in said].count(hints.said[name]) == 1
    assert not [words for words in mentions if words not in hints.said[name]], hints.said[name]
    assert all(
        isinstance(sentence, str) and sentence.endswith(".") and len(sentence) < 700
        for _, sentence in said
    )


@pytest.mark.parametrize(
    "name, config, changes, mentions", [case for case in CASES if not case.id.startswith("loss")]
)
def test_a_symptom_has_to_last(name, config, changes, mentions):
    good, sick = run(), run(changes)
    brief = [sick[i] if i in (20, 21, 22, 23) else record for i, record in enumerate(good)]
    assert (
        name not in told(good, **{k: v for k, v in config.items() if k != "learning_rate"})[1].said
    )
    assert name not in told(brief, **config)[1].said


@pytest.mark.parametrize("name, config, changes, mentions", CASES)
def test_words_that_look_like_settings_are_settings(name, config, changes, mentions):
    words = set(
        re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", told(run(changes), **config)[1].said[name])
    )
    assert words <= set(GRPOConfig.specs), words - set(GRPOConfig.specs)


# what is near a symptom and is none


def test_a_run_that_has_learnt_its_easy_rewards_is_not_called_collapsed():
    said = told(
        run(
            {
                "entropy": fade(0.6, 0.01),
                "frac_reward_zero_std": line(0.1, 0.97),
                "rewards/right/mean": line(0.3, 0.99),
                "rewards/right/std": line(0.46, 0.1),
                "reward": line(0.3, 0.99),
            }
        )
    )[1].said
    assert list(said) == ["loss prints 0"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards/form/mean": 1.0, "rewards/form/std": 0.0},  # full from the first record
        {
            "rewards/form/mean": line(-1.0, 1.0),
            "rewards/form/std": line(0.3, 0.05),
        },  # learnt, and the other rises too
        {
            "rewards/form/mean": line(-1.0, 0.2),
            "rewards/form/std": 0.9,
            "rewards/right/mean": -3.0,
            "rewards/right/std": 0.0,
        },  # still being learnt
    ],
)
def test_format_is_not_blamed(changes):
    assert "format and nothing else" not in told(run(changes))[1].said


@pytest.mark.parametrize("settings", [{"loss_type": "sapo"}, {"entropy_coef": 0.01}])
def test_no_word_about_a_loss_that_is_not_0_by_itself(settings):
    assert "loss prints 0" not in told(run({"loss": -0.03}, 3), **settings)[1].said


@pytest.mark.parametrize("changes", [{"ratio/max": 1.4}, {"loss": 0.4}, {"grad_norm": 0.0}])
def test_no_word_about_the_loss_where_it_would_be_wrong(changes):
    assert "loss prints 0" not in told(run(changes, 3))[1].said


@pytest.mark.parametrize(
    "changes, settings, said",
    [
        ({"loss": 0.0164, **UNEVEN}, {}, True),
        ({"loss": 0.0164, **UNEVEN}, {"loss_type": "bnpo"}, True),
        ({"loss": -0.0164, **UNEVEN}, {}, True),
        ({"loss": 0.0004, **UNEVEN}, {}, False),
        ({"loss": 0.0164, **UNEVEN}, {"loss_type": "grpo"}, False),
        ({"loss": 0.0164}, {}, False),
        ({"loss": 0.0164, **UNEVEN, "completions/max_length": 1.0}, {}, False),
    ],
)
def test_why_a_loss_is_not_exactly_zero(changes, settings, said):
    assert (
        "differ in length" in told(run(changes, 2), **settings)[1].said["loss prints 0"]
    ) == said


@pytest.mark.parametrize(
    "precision, settings, said",
    [
        ("fp16", {}, "65,504"),
        (None, {"fp16": True}, "65,504"),
        ("bf16", {}, "NaN or an infinity"),
        (None, {}, "NaN or an infinity"),
    ],
)
def test_skipped_updates_are_explained_by_the_format_that_the_run_chose(precision, settings, said):
    hints = Hints(GRPOConfig(**{**CONFIG, **settings}), precision)
    for record in run({"skipped_updates": 1.0}):
        hints.look(record)
    assert said in hints.said["updates skipped"]


@pytest.mark.parametrize(
    "limit, said", [(1.0, "set by the clip"), (0.0, "nothing limits an update: set max_grad_norm")]
)
def test_a_gradient_that_explodes_with_a_limit_and_without(limit, said):
    assert (
        said
        in told(run({"grad_norm": lambda x: 1.0 if x < 0.3 else 500.0}), max_grad_norm=limit)[
            1
        ].said["gradient explodes"]
    )


def test_a_loss_scale_that_finds_its_size_is_normal():
    records = [{**record, "skipped_updates": float(record["step"] <= 12)} for record in run()]
    assert "updates skipped" not in told(records, fp16=True)[1].said


def test_one_group_a_record_needs_more_records():
    "With one prompt a step, five records without spread mean nothing."
    one = dict(logging_steps=1, per_device_train_batch_size=8, num_generations=8)
    assert [
        RunHistory(GRPOConfig(**{**one, **more})).patience
        for more in (
            {},
            {"per_device_train_batch_size": 64},
            {"logging_steps": 10},
            {"gradient_accumulation_steps": 4},
            {"per_device_train_batch_size": 1},
        )
    ] == [32, 5, 5, 8, 32]
    records = run(
        {**ALIKE, "rewards/right/mean": 0.0, "rewards/right/std": 0.0, "reward": 0.0}, n=40
    )
    steps = [
        step for step, sentence in told(records, **one)[0] if "every advantage is 0" in sentence
    ]
    assert steps == [32]


# records as they come


def test_evaluations_are_passed_over():
    sick = run({"completions/clipped_ratio": 1.0})
    assert (
        told(
            [
                {"step": r["step"], **{f"eval_{name}": value for name, value in r.items()}}
                for r in sick
            ]
        )[0]
        == []
    )
    mixed = [
        part
        for record in run()
        for part in (
            record,
            {"step": record["step"], "eval_reward": 0.0, "eval_completions/clipped_ratio": 1.0},
        )
    ]
    assert list(told(mixed)[1].said) == ["loss prints 0"]


@pytest.mark.parametrize("name, config, changes, mentions", CASES)
def test_missing_names_and_odd_numbers_are_no_error(name, config, changes, mentions):
    for gone in list(WELL):
        told(
            [{k: v for k, v in record.items() if k != gone} for record in run(changes, 40)],
            **config,
        )
        odd = (math.nan, math.inf, -math.inf, None, "words")
        told([{**record, gone: odd[i % 5]} for i, record in enumerate(run(changes, 40))], **config)


@pytest.mark.parametrize(
    "name, config, changes, mentions", [case for case in CASES if not case.id.startswith("loss")]
)
def test_a_nan_now_and_then_hides_nothing(name, config, changes, mentions):
    records = [
        {k: math.nan if i % 7 == 3 and k != "step" else v for k, v in record.items()}
        for i, record in enumerate(run(changes, 300))
    ]
    assert name in told(records, **config)[1].said


names = st.sampled_from([*WELL, "rewards/form/mean", "rewards/form/std", "step", "note"])
values = st.one_of(
    st.floats(),
    st.floats(-5, 5),
    st.sampled_from([0.0, 1.0, -1.0]),
    st.integers(-3, 10**6),
    st.none(),
    st.text(max_size=3),
    st.booleans(),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.dictionaries(names, values, max_size=12), max_size=60), st.sampled_from([8, 64]))
def test_any_records_at_all(records, batch):
    before = copy.deepcopy(records)
    said, hints = told(records, per_device_train_batch_size=batch)
    assert repr(records) == repr(before), "the records are the log's"
    assert len(said) == len(hints.said) and all(isinstance(sentence, str) for _, sentence in said)


@pytest.mark.parametrize("stop", [1, 17, 60])
@pytest.mark.parametrize("name, config, changes, mentions", CASES)
def test_a_resumed_run_says_what_was_left_to_say(name, config, changes, mentions, stop):
    records = run(changes)
    through, _ = told(records, **config)
    resumed = Hints(GRPOConfig(**{**CONFIG, **config}))
    for record in records[:stop]:
        resumed.look(record)  # the old records, read again
    rest = [
        (record["step"], sentence) for record in records[stop:] for sentence in resumed.look(record)
    ]
    assert rest == [(step, sentence) for step, sentence in through if step > stop]


def test_nothing_heavy_is_imported():
    code = "import sys, grpo_nb.training.hints; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "grpo_nb.training.hints" in modules and not {
        "torch",
        "transformers",
        "numpy",
        "datasets",
        "accelerate",
    } & set(modules)


# real runs


@pytest.mark.long
@pytest.mark.parametrize(
    "seed, changes",
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {"num_iterations": 2, "beta": 0.04}),
        (4, {"logging_steps": 3, "num_generations": 4, "loss_type": "grpo"}),
    ],
    ids=["seed 0", "seed 1", "seed 2", "off-policy", "small groups"],
)
def test_healthy_runs_hear_at_most_the_word_about_the_loss(tmp_path, seed, changes):
    rows, _ = addition_problems(held_out=0, smallest=50, largest=54)
    model, tokenizer = tiny_gpt_oss(
        seed,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=32,
        num_experts=2,
        experts_per_token=1,
        initializer_range=0.1,
    )
    fine_tune(
        model,
        tokenizer,
        rows,
        stop=lambda: greedy_accuracy(model, tokenizer, rows) >= 0.5,
        ask_every=5,
        batch_size=64,
        seed=seed,
        progress=False,
    )
    config = GRPOConfig(
        **{
            **dict(
                output_dir=str(tmp_path),
                max_steps=36,
                seed=seed,
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=4,
                learning_rate=1e-3,
                warmup_steps=10,
                adam_beta2=0.98,
                logging_steps=1,
                gradient_checkpointing=False,
                save_strategy="no",
                disable_tqdm=True,
                bf16=False,
            ),
            **changes,
        }
    )
    trainer = GRPOTrainer(model, exact_answer_reward, config, rows, processing_class=tokenizer)
    trainer.log.show = False
    trainer.train()
    hints = Hints(config)
    for record in trainer.log_history:
        hints.look(record)
    assert set(hints.said) <= {"loss prints 0"}, hints.said


@pytest.mark.parametrize(
    "numbers, changes",
    [
        ({"sampling/gap_mean": 0.3}, {}),
        ({"clip_ratio/region_mean": 0.4}, dict(num_iterations=2)),
    ],
)
def test_dropout_is_the_first_cause_that_is_named(numbers, changes):
    found = {}
    for dropout in (0.0, 0.1):
        hints = Hints(GRPOConfig(output_dir="x", **changes), dropout=dropout)
        said = [hint for step in range(60) for hint in hints.look({"step": step, **numbers})]
        found[dropout] = next(s for s in said if "differ" in s or "clipped" in s)
    first = "First of all there is dropout of 0.1"
    assert first in found[0.1] and "dropout" not in found[0.0]
    rest = ("number formats", "Draw more often")
    assert max(map(found[0.1].find, rest)) > found[0.1].index(first)


COLLAPSED = dict(form=8, form_batch=8, form_beta=8, gated=9, anywhere=9, form_slow=11)
SOUND = dict.fromkeys(["right", "no_form", "random", "box"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name, when", (COLLAPSED | SOUND).items())
def test_stored_runs_of_a_trained_model_are_told_what_went_wrong(name, when, seed):
    "A form that is paid for ended the reasoning; where it was not, completions stayed long."
    found = json.loads((RESULTS / f"{name}_{seed}.json").read_text())
    made = dict(per_device_train_batch_size=256, num_generations=8, max_completion_length=400)
    history, told = RunHistory(GRPOConfig(logging_steps=1, **made)), None
    for record in found["log"]:
        history.add(record)
        told = told or (shrunk(history) and record["step"])
    assert told == when


def test_at_the_end_of_a_short_run_symptoms_of_all_its_records_are_said_once():
    bad = {"frac_reward_zero_std": 1.0, "reward": 0.5, "rewards/right/mean": 0.5}
    bad |= {"rewards/right/std": 0.0, "completions/clipped_ratio": 0.2}
    hints = Hints(GRPOConfig(**CONFIG))
    assert hints.at_end() == []
    for step in (1, 2):
        assert hints.look({"step": step, **bad}) == []
    (found,) = hints.at_end()
    assert "of the last 2 records all completions earned the same" in found
    assert hints.at_end() == [] and hints.patience == 5
    well = Hints(GRPOConfig(**CONFIG))
    well.look({"step": 1, **bad, "frac_reward_zero_std": 0.5})
    assert well.at_end() == []
    cut = Hints(GRPOConfig(**CONFIG))
    cut.look({"step": 1, **bad, "frac_reward_zero_std": 0.5, "completions/clipped_ratio": 1.0})
    assert len(cut.at_end()) == 1
    risen = Hints(GRPOConfig(**CONFIG))
    for step, reward in ((1, 0.1), (2, 0.6)):
        cut = {"completions/clipped_ratio": 1.0, "reward_group_std": 0.3, "reward": reward}
        risen.look({"step": step, **bad, "frac_reward_zero_std": 0.5, **cut})
    assert risen.at_end() == []
    long = Hints(GRPOConfig(**CONFIG))
    for step in range(6):
        long.look({"step": step, **bad})
    assert long.at_end() == [] and long.said
