"""What scripts written for TRL ask of a trainer beside the algorithm: reward models,
trackers, stored completions, evaluations, callbacks, the best model, what is printed and
stored after a run."""

import json
import math
import statistics
import time
import types

import datasets
import pandas
import pytest
import torch
import transformers
import trl
from small_runs import (
    ROWS,
    digits,
    remember_batches,
    small_config,
    small_model,
    small_trainer,
    weights_of,
    without_clocks,
)
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.training.checkpoint import checkpoints
from grpo_nb.training.optimizer import make_optimizer
from grpo_nb.training.policy_model import loading_arguments
from grpo_nb.training.rewards import ModelReward


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# reward models


def judge(seed=0, labels=1, characters="0123456789+-*="):
    "A small classifier with random weights and its tokenizer."
    tokenizer = tiny_tokenizer(characters)
    torch.manual_seed(seed)
    size = dict(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForSequenceClassification(
        LlamaConfig(**size, num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    ), tokenizer


@pytest.fixture
def judge_folder(tmp_path):
    model, tokenizer = judge(labels=1)
    model.save_pretrained(tmp_path / "my-judge")
    tokenizer.save_pretrained(tmp_path / "my-judge")
    return str(tmp_path / "my-judge")


def plain_score(model, tokenizer, text):
    "One text alone, without padding: the head at the last token."
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        return model.score(model.model(ids).last_hidden_state[:, -1])[0, 0].item()


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_model_reads_its_score_at_the_last_token(chat):
    model, tokenizer = judge()
    tokenizer.pad_token = tokenizer.eos_token  # what many tokenizers do
    prompts = [
        [{"role": "user", "content": row["prompt"]}] if chat else row["prompt"] for row in ROWS
    ]
    answers = [row["answer"] + "" if chat else row["answer"] + tokenizer.eos_token for row in ROWS]
    completions = [[{"role": "assistant", "content": a}] if chat else a for a in answers]
    texts = [
        tokenizer.apply_chat_template(p + c, tokenize=False) if chat else p + c
        for p, c in zip(prompts, completions)
    ]
    expected = [plain_score(model, tokenizer, text) for text in texts]
    for batch_size in (1, 5, 100):
        assert ModelReward(model, tokenizer, batch_size=batch_size)(
            prompts, completions, answer=None
        ) == pytest.approx(expected, abs=1e-5)
    assert (
        len({round(x, 4) for x in expected}) > 5
        and model.config.pad_token_id == tiny_tokenizer().pad_token_id
    )


def test_a_reward_model_whose_vocabulary_is_used_up():
    model, tokenizer = judge(characters="01")
    texts = [tokenizer.decode(range(len(tokenizer))), "01", "0"]
    model.config.pad_token_id = 0
    got = ModelReward(model, tokenizer)(["", "", ""], texts)
    assert got == pytest.approx([plain_score(model, tokenizer, text) for text in texts], abs=1e-5)


@pytest.mark.parametrize("how", ["name", "object", "list"])
def test_a_run_with_a_reward_model(how, judge_folder, tmp_path):
    model, tokenizer = judge()
    rewards = {"name": judge_folder, "object": model, "list": [digits, judge_folder]}[how]
    classes = {"name": None, "object": tokenizer, "list": [None, None]}[how]
    trainer = small_trainer(tmp_path, rewards, arguments=dict(reward_processing_classes=classes))
    trainer.train()
    name = "LlamaForSequenceClassification" if how == "object" else "my-judge"
    assert trainer.reward_names == (["digits", name] if how == "list" else [name])
    by_hand = [
        plain_score(model, tokenizer, s["prompt"] + s["completion"]) for s in trainer.samples
    ]
    assert [s["rewards"][name] for s in trainer.samples] == pytest.approx(
        by_hand, abs=1e-4
    ) and trainer.log_history[-1][f"rewards/{name}/std"] > 0


def test_what_is_no_reward_model(judge_folder, tmp_path):
    with pytest.raises(ValueError, match="has 2 outputs"):
        small_trainer(
            tmp_path, judge(labels=2)[0], arguments=dict(reward_processing_classes=judge()[1])
        )
    with pytest.raises(ValueError, match="its tokenizer is not known"):
        small_trainer(tmp_path, judge()[0])
    with pytest.raises(ValueError, match="2 entries and there are 1"):
        small_trainer(
            tmp_path, judge_folder, arguments=dict(reward_processing_classes=[None, None])
        )
    with pytest.raises(
        ValueError,
        match="reward_funcs holds './my/judge': it is no folder in .*give the function itself",
    ):
        small_trainer(tmp_path, "./my/judge")
    (tmp_path / "my-judge" / "model.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match="my-judge': that folder lacks something.*model.safetensors.*Look into the folder",
    ):
        small_trainer(tmp_path, judge_folder)


def test_rewards_are_averaged_over_what_was_judged(tmp_path):
    """Cycles in which a function judged nothing are no zeros, and a name with `min` in it is a mean
    all the same."""

    def min_length_reward(completions, trainer_state, log_metric, **_):
        log_metric("tool_max_calls", trainer_state.global_step)
        log_metric("calls_max", trainer_state.global_step)
        return [trainer_state.global_step + 1.0] * len(completions)

    def sometimes(completions, trainer_state, **_):
        return [1.0 if trainer_state.global_step == 1 else None] * len(completions)

    trainer = small_trainer(tmp_path, [min_length_reward, sometimes], max_steps=4, logging_steps=4)
    with pytest.warns(UserWarning, match="'sometimes' judged no completion"):
        trainer.train()
    record = trainer.log_history[0]
    assert (
        record["rewards/min_length_reward/mean"],
        record["rewards/sometimes/mean"],
        record["tool_max_calls"],
        record["calls_max"],
    ) == (2.5, 1.0, 1.5, 3.0)
    lengths = [record[f"completions/{name}_terminated_length"] for name in ("min", "mean", "max")]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    "name, data, words",
    [
        (
            None,
            {"a": ROWS[:2], "b": ROWS[:2]},
            (
                "is 'reward', and each of the 2 evaluation sets has one: say which, "
                "for instance a_reward"
            ),
        ),
    ],
)
def test_a_metric_that_no_evaluation_will_have(name, data, words, tmp_path):
    given = dict(
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        arguments=dict(eval_dataset=data),
    )
    with pytest.raises(ValueError, match=words):
        small_trainer(tmp_path, metric_for_best_model=name, **given)
    small_trainer(
        tmp_path,
        metric_for_best_model="eval_a_reward" if isinstance(data, dict) else "rewards/digits/mean",
        **given,
    ).train()


# models given by name


def test_what_from_pretrained_is_given(tmp_path, monkeypatch):
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked, load = [], transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(name, **given):
        asked.append(given)
        return load(name, **{k: v for k, v in given.items() if k != "quantization_config"})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    wanted = object()
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        digits,
        small_config(tmp_path, trust_remote_code=True, use_cpu=True),
        ROWS,
        quantization_config=wanted,
    )
    assert (
        asked == [{"dtype": "float32", "trust_remote_code": True, "quantization_config": wanted}]
        and trainer.device.type == "cpu"
    )
    older = small_config(tmp_path, model_init_kwargs={"torch_dtype": "bfloat16"})
    assert loading_arguments(older) == {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match="give it once"):
        GRPOTrainer(
            str(tmp_path / "model"),
            digits,
            small_config(tmp_path, model_init_kwargs={"quantization_config": wanted}),
            ROWS,
            quantization_config=wanted,
        )


def test_a_processor_is_asked_for_its_tokenizer(tmp_path):
    _, tokenizer = small_model()
    trainer = small_trainer(tmp_path, tokenizer=types.SimpleNamespace(tokenizer=tokenizer))
    assert trainer.tokenizer is tokenizer and trainer.processing_class.tokenizer is tokenizer


# chat templates and prompts


def test_reasoning_effort_reaches_the_template(tmp_path):
    model, tokenizer = small_model()
    tokenizer.chat_template = (
        "{{ {'low': '1', 'high': '999'}[reasoning_effort] }}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    for effort, start in (("low", "1"), ("high", "999")):
        trainer = small_trainer(
            tmp_path / effort,
            lambda completions, **_: digits(completions),
            rows=rows,
            model=model,
            tokenizer=tokenizer,
            chat_template_kwargs={"reasoning_effort": effort},
            max_steps=1,
        )
        batches = remember_batches(trainer)
        trainer.train()
        prompts = [
            tokenizer.decode(ids[mask])
            for ids, mask in zip(batches[0].prompt_ids, batches[0].prompt_mask)
        ]
        assert all(prompt.startswith(start) and prompt.endswith("=") for prompt in prompts)


EFFORTS = {"low": "1", "high": "999", "medium": "55"}


def speaking(tmp_path, **others):
    "A trainer whose rows ask for an effort each, one for none; the texts to prompt with."
    model, tokenizer = small_model()
    tokenizer.chat_template = (
        "{{ " + repr(EFFORTS) + "[reasoning_effort] }}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}="}], "reasoning_effort": effort}
        for i, effort in enumerate(["low", "high", None, "low"])
    ]
    seen = []

    def reward(prompts, completions, reasoning_effort, **columns):
        seen.extend((prompt[0]["content"], e) for prompt, e in zip(prompts, reasoning_effort))
        return digits(completions)

    trainer = small_trainer(
        tmp_path,
        reward,
        rows=rows,
        model=model,
        tokenizer=tokenizer,
        chat_template_kwargs={"reasoning_effort": "medium"},
        max_steps=1,
        **others,
    )
    wanted = {
        EFFORTS[row["reasoning_effort"] or "medium"] + row["prompt"][0]["content"] for row in rows
    }
    columns = {(row["prompt"][0]["content"], row["reasoning_effort"]) for row in rows}
    return trainer, wanted, lambda: set(seen) == columns


@pytest.mark.parametrize("route", ["train", "evaluate"])
def test_each_row_reaches_the_engine_with_its_own_effort(tmp_path, route):
    trainer, wanted, scored = speaking(tmp_path)
    asked, generate = set(), trainer.engine.generate

    def remember(prompts, *args, **others):
        asked.update(map(trainer.tokenizer.decode, prompts))
        return generate(prompts, *args, **others)

    trainer.engine.generate = remember
    trainer.train() if route == "train" else trainer.evaluate(trainer.train_dataset)
    assert asked == wanted and scored()


def test_a_rollout_function_is_given_each_rows_variables(tmp_path):
    asked = set()

    def draw(prompts, trainer, chat_template_kwargs):
        tokenizer = trainer.processing_class
        ids = [
            tokenizer.apply_chat_template(prompt, **variables, return_dict=False)
            for prompt, variables in zip(prompts, chat_template_kwargs, strict=True)
        ]
        asked.update(map(tokenizer.decode, ids))
        rollout = trainer.engine.generate(ids, trainer.sampling, progress=False)
        return {
            "prompt_ids": ids,
            "completion_ids": [x[m].tolist() for x, m in zip(rollout.completion_ids, rollout.mask)],
            "logprobs": [x[m].tolist() for x, m in zip(rollout.logps, rollout.mask)],
        }

    trainer, wanted, scored = speaking(tmp_path, arguments={"rollout_func": draw})
    trainer.train()
    assert asked == wanted and scored()
    asked.clear()
    trainer.evaluate(trainer.train_dataset)
    assert asked == wanted


def test_a_rollout_function_without_that_argument_is_named_once(tmp_path):
    with pytest.warns(UserWarning, match="reasoning_effort .*argument chat_template_kwargs") as met:
        speaking(tmp_path, arguments={"rollout_func": lambda prompts, trainer: {}})
    assert len(met) == 1


def test_a_column_that_looks_like_a_setting_is_named_once(tmp_path):
    rows = [{**row, "temperature": 0.1} for row in ROWS]
    with pytest.warns(UserWarning, match="column 'temperature' has the name of a setting") as met:
        small_trainer(tmp_path, rows=rows, arguments={"eval_dataset": rows}, max_steps=1).train()
    assert len(met) == 1


def test_a_prompt_that_is_too_long_is_found_before_the_first_update(tmp_path):
    rows = [*ROWS, {"prompt": "1+" * 300 + "1=", "answer": "301"}]
    trainer = small_trainer(tmp_path, rows=rows, max_steps=1)
    trainer.source.max_positions = 256
    with pytest.raises(ValueError, match="prompt of row 12 has 602 tokens"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_tokens_that_end_a_completion(tmp_path):
    _, tokenizer = small_model()
    five, six = tokenizer("56").input_ids
    assert GRPOConfig(
        generation_kwargs={"eos_token_id": five}
    ).sampling_params().stop_token_ids == (five,)
    trainer = small_trainer(
        tmp_path,
        generation_kwargs={"eos_token_id": [five, six]},
        max_steps=1,
        max_completion_length=12,
    )
    trainer.train()
    texts = [sample["completion"] for sample in trainer.samples]
    assert any(text.endswith(("5", "6")) for text in texts) and not any(
        c in text[:-1] for text in texts for c in "56"
    )


def test_texts_that_end_a_completion(tmp_path):
    trainer = small_trainer(
        tmp_path,
        generation_kwargs={"stop_strings": ["5", "12"]},
        max_steps=1,
        max_completion_length=12,
    )
    trainer.train()
    texts = [sample["completion"] for sample in trainer.samples]
    assert any(text.endswith(("5", "12")) for text in texts)
    assert not any(end in text[:-1] for text in texts for end in ("5", "12"))


def test_the_order_of_the_prompts_has_its_own_seed(tmp_path):
    def prompts(**settings):
        trainer = small_trainer(tmp_path, **settings, max_steps=1)
        trainer.train()
        return [sample["prompt"] for sample in trainer.samples]

    assert (
        prompts(seed=1, data_seed=5)
        == prompts(seed=2, data_seed=5)
        == prompts(seed=5)
        != prompts(seed=1)
    )


# completions stored and sent to trackers


def test_completions_are_stored_as_trl_stores_them(tmp_path, capsys):
    def reward(completions, log_extra, **columns):
        log_extra("digits seen", [str(len(c)) for c in completions])
        return digits(completions)

    trainer = small_trainer(
        tmp_path,
        reward,
        log_completions=True,
        num_completions_to_print=2,
        max_steps=4,
        logging_steps=2,
    )
    trainer.log.show = True
    trainer.train()
    tables = {path.name: pandas.read_parquet(path) for path in (tmp_path / "completions").iterdir()}
    assert sorted(tables) == ["completions_00002.parquet", "completions_00004.parquet"]
    table = tables["completions_00004.parquet"]
    assert (
        list(table) == ["step", "prompt", "completion", "reward", "digits seen", "advantage"]
        and len(table) == 16
        and set(table.step) == {4}
    )
    assert (
        table.reward.tolist() == pytest.approx(digits(table.completion), abs=1e-6)
        and table.groupby("prompt").advantage.sum().abs().max() < 1e-4
    )
    assert table.to_dict("records")[0] == {
        **{k: trainer.samples[0][k] for k in ("step", "prompt", "completion", "advantage")},
        "reward": trainer.samples[0]["rewards"]["reward"],
        "digits seen": trainer.samples[0]["extra"]["digits seen"],
    }
    assert capsys.readouterr().out.count(" -> ") == 4, "two completions at each of two log lines"


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = small_trainer(tmp_path, report_to="tensorboard", project="sums", max_steps=3)
    trainer.train()
    events = EventAccumulator(str(next((tmp_path / "sums").glob("events*")).parent)).Reload()
    for name in ("reward", "loss", "completions/mean_length"):
        assert [(event.step, event.value) for event in events.Scalars(f"train/{name}")] == [
            (r["step"], pytest.approx(r[name], rel=1e-5, abs=1e-6)) for r in trainer.log_history
        ]


def test_wandb_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "w"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # what an earlier test started keeps the environment of its time
    (tmp_path / "w").mkdir()
    trainer = small_trainer(
        tmp_path / "run",
        report_to=["wandb"],
        run_name="first",
        project="sums",
        log_completions=True,
        log_unique_prompts=True,
        max_steps=1,
    )
    trainer.train()
    trainer.log({"mine": 0.5})
    trainer.accelerator.end_training()
    folder = next((tmp_path / "w" / "wandb").glob("offline-run-*"))
    for _ in range(200):  # W&B's own process may still be writing
        stored = next(folder.glob("*.wandb")).read_bytes()
        if b"rewards/digits/mean" in stored:
            break
        time.sleep(0.1)
    assert (
        b"sums" in stored
        and b"first" in stored
        and b"mine" in stored
        and b"rewards/digits/mean" in stored
    )
    table = json.loads(
        next((folder / "files" / "media" / "table").rglob("completions*.json")).read_text()
    )
    assert table["columns"] == ["step", "prompt", "completion", "digits", "advantage"] and len(
        table["data"]
    ) == 4 == len({row[1] for row in table["data"]})


def test_a_tracker_is_open_after_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = small_trainer(
        tmp_path,
        report_to="tensorboard",
        project="sums",
        max_steps=1,
        arguments=dict(eval_dataset=ROWS[:2]),
    )
    trainer.train()
    trainer.log({"mine": 0.5})
    value = trainer.evaluate()["eval_reward"]
    trainer.train()
    assert len(trainer.accelerator.trackers) == 1
    scalars = EventAccumulator(str(next((tmp_path / "sums").glob("events*")).parent)).Reload()
    assert [event.value for event in scalars.Scalars("train/mine")] == [0.5] and [
        event.value for event in scalars.Scalars("eval/reward")
    ] == [pytest.approx(value)]


# evaluations, the best model, when to log


def test_several_data_sets_are_evaluated_each_under_its_name(tmp_path):
    easy, hard = ROWS[:2], datasets.Dataset.from_list(ROWS[2:5])
    trainer = small_trainer(
        tmp_path,
        arguments=dict(eval_dataset=datasets.DatasetDict(hard=hard) | {"easy": easy}),
        eval_strategy="steps",
        eval_steps=2,
        num_generations_eval=1,
        eval_on_start=True,
    )
    trainer.train()
    evaluations = [record for record in trainer.log_history if "loss" not in record]
    assert [
        (r["step"], next(iter(set(r) & {"eval_easy_reward", "eval_hard_reward"})))
        for r in evaluations
    ] == [(s, f"eval_{n}_reward") for s in (0, 2) for n in ("hard", "easy")]
    together = trainer.evaluate()
    assert {"eval_easy_reward", "eval_hard_reward"} <= set(together) and trainer.evaluate(
        ROWS[:1], metric_key_prefix="test"
    )["test_reward"] >= 0
    with pytest.raises(ValueError, match="no column 'prompt'"):
        trainer.evaluate({"bad": [{"question": "1"}]})


class Scripted:
    "A reward function whose evaluations come out as they are told."

    __name__ = "scripted"

    def __init__(self, values):
        self.values = iter(values)

    def __call__(self, completions, **columns):
        if len(completions) == 16:
            return digits(completions)  # training
        return [next(self.values)] * len(completions)


def test_the_best_model_is_kept_and_loaded(tmp_path):
    weights = {}

    class Remember(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            weights[state.global_step] = weights_of(model)

    settings = dict(
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        max_steps=5,
        load_best_model_at_end=True,
        save_strategy="best",
        save_total_limit=1,
    )
    trainer = small_trainer(
        tmp_path,
        Scripted([1.0, 3.0, 2.0, 3.0, 0.0]),
        arguments=dict(eval_dataset=ROWS[:2], callbacks=[Remember()]),
        **settings,
    )
    trainer.train()
    assert (
        trainer.state.best_metric == 3.0
        and trainer.state.best_global_step == 2
        and [p.name for p in checkpoints(tmp_path)] == ["checkpoint-2"]
    )
    assert same(weights_of(trainer.model), weights[2]) and trainer.state.global_step == 5


def test_every_checkpoint_but_the_best_gives_way(tmp_path):
    settings = dict(
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        max_steps=4,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        metric_for_best_model="scripted_loss",
    )
    with pytest.raises(ValueError, match="'eval_scripted_loss', which no evaluation has"):
        small_trainer(
            tmp_path / "a", Scripted([1.0] * 9), arguments=dict(eval_dataset=ROWS[:2]), **settings
        ).train()
    settings["metric_for_best_model"], settings["greater_is_better"] = (
        "eval_rewards/scripted/mean",
        False,
    )
    trainer = small_trainer(
        tmp_path / "b",
        Scripted([1.0, 0.5, 2.0, 0.7]),
        arguments=dict(eval_dataset=ROWS[:2]),
        **settings,
    )
    trainer.train()
    assert [p.name for p in checkpoints(tmp_path / "b")] == [
        "checkpoint-2",
        "checkpoint-4",
    ] and trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    again = small_trainer(
        tmp_path / "b",
        Scripted([0.1] * 4),
        arguments=dict(eval_dataset=ROWS[:2]),
        **{**settings, "max_steps": 5},
    )
    again.train(resume_from_checkpoint=True)
    assert (again.state.best_metric, again.state.best_global_step) == (pytest.approx(0.1), 5)


@pytest.mark.parametrize("given", [{"metric_for_best_model": "reward"}, {}])
def test_transformers_early_stopping(given, tmp_path):
    "The callback reads both settings of the config, which follow from what is given."
    settings = dict(
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        max_steps=9,
        load_best_model_at_end=True,
        save_strategy="best",
        **given,
    )
    trainer = small_trainer(
        tmp_path,
        Scripted([1.0, 2.0, 1.5, 1.5, 1.5, 1.5, 9.0, 9.0, 9.0]),
        arguments=dict(
            eval_dataset=ROWS[:2], callbacks=[EarlyStoppingCallback(early_stopping_patience=2)]
        ),
        **settings,
    )
    trainer.train()
    assert trainer.state.global_step == 4


def steps_of(trainer, part):
    return [record["step"] for record in trainer.log_history if part in record]


@pytest.mark.parametrize(
    "settings, logged, evaluated",
    [
        (dict(logging_steps=2), [2, 4, 6, 7], []),
        (dict(logging_steps=3, logging_first_step=True), [1, 3, 6, 7], []),
        (dict(logging_strategy="epoch"), [3, 6, 7], []),
        (dict(logging_strategy="no"), [7], []),
        (dict(eval_strategy="steps", eval_steps=2, eval_delay=3, logging_steps=7), [7], [4, 6, 7]),
        (dict(eval_strategy="epoch", eval_delay=2, logging_steps=7), [7], [6]),
        (dict(eval_strategy="epoch", eval_on_start=True, logging_steps=7), [7], [0, 3, 6]),
    ],
)
def test_when_a_run_logs_and_evaluates(settings, logged, evaluated, tmp_path):
    "Twelve prompts, four an update: an epoch is three updates."
    trainer = small_trainer(
        tmp_path,
        arguments=dict(eval_dataset=ROWS[:1]),
        max_steps=7,
        num_generations_eval=1,
        **settings,
    )
    trainer.train()
    assert steps_of(trainer, "loss") == logged and steps_of(trainer, "eval_reward") == evaluated


def test_an_evaluation_at_the_start_changes_nothing(tmp_path):
    one, other = (
        small_trainer(tmp_path / "a"),
        small_trainer(
            tmp_path / "b",
            arguments=dict(eval_dataset=ROWS[:2]),
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start=True,
            log_completions=True,
        ),
    )
    one.train(), other.train()
    assert same(weights_of(one.model), weights_of(other.model)) and without_clocks(
        one.log_history
    ) == without_clocks([r for r in other.log_history if "loss" in r])


def test_callbacks_come_and_go(tmp_path):
    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

    trainer, counter = small_trainer(tmp_path), Count()
    trainer.add_callback(counter)
    trainer.train()
    trainer.remove_callback(counter)
    trainer.train()
    assert counter.steps == 2
    trainer.add_callback(Count)
    assert isinstance(trainer.pop_callback(Count), Count) and trainer.pop_callback(Count) is None
    trainer.add_callback(Count)
    trainer.remove_callback(Count)


def test_checkpoints_of_the_model_alone(tmp_path):
    trainer = small_trainer(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True)
    trainer.train()
    assert not list(tmp_path.rglob("training_state.pt")) and len(checkpoints(tmp_path)) == 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert same(weights_of(again), weights_of(trainer.model))
    with pytest.raises(ValueError, match="save_only_model"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_auto_begins_and_goes_on(tmp_path):
    whole = small_trainer(tmp_path / "whole", max_steps=4)
    whole.train()
    for steps in (1, 3, 4, 4):  # a notebook that is run again, each time for longer
        trainer = small_trainer(
            tmp_path / "run",
            max_steps=steps,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train(resume_from_checkpoint="auto")
        assert trainer.state.global_step == steps
    assert [r["step"] for r in trainer.log_history] == [1, 2, 3, 4] and [
        r["reward"] for r in trainer.log_history
    ][0] == whole.log_history[0]["reward"]
    assert not list((tmp_path / "run").glob("earlier-run*"))


# what is printed and stored after a run


def test_what_a_run_gives_back(tmp_path):
    trainer = small_trainer(
        tmp_path, max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=8
    )
    began = time.perf_counter()
    result = trainer.train()
    took, metrics = time.perf_counter() - began, result.metrics
    assert {
        name: value for name, value in metrics.items() if not name.startswith("train_")
    } == trainer.log_history[-1]
    assert (
        metrics["train_loss"]
        == result.training_loss
        == pytest.approx(sum(r["loss"] for r in trainer.log_history) / 3)
    )
    assert 0 < metrics["train_runtime"] < took and metrics[
        "train_steps_per_second"
    ] == pytest.approx(3 / metrics["train_runtime"], rel=0.01)
    assert metrics["train_samples_per_second"] == pytest.approx(
        48 / metrics["train_runtime"], rel=0.01
    )


def test_numbers_are_printed_and_stored_as_transformers_stores_them(tmp_path, capsys):
    trainer = small_trainer(tmp_path / "ours", arguments=dict(eval_dataset=ROWS[:2]))
    theirs = transformers.Trainer(
        small_model()[0],
        transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", save_strategy="no"
        ),
    )
    (tmp_path / "theirs").mkdir(exist_ok=True)
    numbers = {"train": trainer.train().metrics | {"train_samples": 80}, "eval": trainer.evaluate()}
    for split, metrics in numbers.items():
        for one in (trainer, theirs):
            one.save_metrics(split, metrics)
    for name in ("train_results.json", "eval_results.json", "all_results.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )
    trainer.save_metrics("test", {"x": 1}, combined=False)
    assert "x" not in json.loads((tmp_path / "ours" / "all_results.json").read_text())
    capsys.readouterr()
    trainer.log_metrics("train", numbers["train"])
    ours = capsys.readouterr().out
    theirs.log_metrics("train", numbers["train"])
    assert ours == capsys.readouterr().out
    trainer.save_state()
    state = transformers.TrainerState.load_from_json(str(tmp_path / "ours" / "trainer_state.json"))
    assert (
        state.global_step == 2
        and state.log_history == trainer.state.log_history
        and trainer.is_world_process_zero()
        and trainer.is_local_process_zero()
    )


def test_a_script_logs_numbers_of_its_own(tmp_path):
    told = []

    class Hear(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            told.append(logs)

        def on_step_end(self, args, state, control, **_):
            trainer.log(
                {"mine": torch.tensor(float(state.global_step)), "loss": 9.0}, start_time=1.0
            )

    settings = dict(max_steps=4, save_strategy="steps", save_steps=2)
    trainer = small_trainer(tmp_path / "run", arguments=dict(callbacks=[Hear()]), **settings)
    metrics = trainer.train().metrics
    own = [record for record in trainer.log_history if "mine" in record]
    assert (
        own
        == [
            {"mine": float(n), "loss": 9.0, "step": n, "epoch": round(n / 3, 4)}
            for n in (1, 2, 3, 4)
        ]
        and [r for r in told if "mine" in r] == own
    )
    assert (
        [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
        == trainer.log_history
        == trainer.state.log_history[:-1]
    )
    plain = small_trainer(tmp_path / "plain", max_steps=4)
    assert [r["step"] for r in trainer.log_history] == [1, 1, 2, 2, 3, 3, 4, 4], (
        "the run's own records are there too"
    )
    assert metrics["train_loss"] == plain.train().metrics["train_loss"] and same(
        weights_of(trainer.model), weights_of(plain.model)
    )
    resumed = small_trainer(tmp_path / "run", max_steps=4)
    resumed.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
    assert [r["mine"] for r in resumed.log_history if "mine" in r] == [
        1.0,
        2.0,
    ] and resumed.hints_given == trainer.hints_given == plain.hints_given
    assert (
        trainer.lr_scheduler is trainer.policy_update.schedule
        and small_trainer(tmp_path / "new").lr_scheduler is None
    )


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    model = small_trainer(tmp_path / "run").model
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError,
        match="no tokenizer can be made of what is there .*or pass processing_class=tokenizer",
    ):
        GRPOTrainer(
            str(tmp_path / "model"),
            lambda completions, **columns: [0.0] * len(completions),
            train_dataset=[{"prompt": "1"}],
        )


@pytest.mark.parametrize("adapter", [False, True])
def test_an_attention_chosen_later_is_refused_too(adapter, tmp_path):
    from peft import LoraConfig

    trainer = small_trainer(
        tmp_path,
        arguments=dict(peft_config=LoraConfig(r=2, target_modules=["q_proj"])) if adapter else {},
        max_steps=1,
    )
    before, kind = weights_of(trainer.model), trainer.model.config._attn_implementation
    trainer.model.config._attn_implementation = "sdpa"
    with pytest.raises(
        ValueError, match="attn_implementation='sdpa' cannot train this model.*'sink'"
    ):
        trainer.train()
    assert (
        same(before, weights_of(trainer.model))
        and trainer.state.global_step == 0
        and not list(tmp_path.iterdir())
    )
    trainer.model.config._attn_implementation = kind
    trainer.train()
    assert trainer.state.global_step == 1


# the optimizer, the reference, the entropy


def test_weight_decay_falls_on_what_transformers_lets_it_fall_on(tmp_path):
    model, _ = small_model()
    plain = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            weight_decay=0.1,
            report_to="none",
            save_strategy="no",
        ),
    )
    theirs = set(plain.get_decay_parameter_names(model))
    groups = make_optimizer(
        GRPOConfig(weight_decay=0.1), dict(model.named_parameters())
    ).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert (
        decayed == theirs
        and 0 < len(theirs) < len(names)
        and sum(len(group["params"]) for group in groups) == len(names)
    )


@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_follows_the_policy(adapter, tmp_path):
    from peft import LoraConfig

    settings = dict(
        beta=0.5,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
        max_steps=5,
        save_strategy="steps",
        save_steps=3,
    )

    def arguments():
        if not adapter:
            return {}
        return dict(peft_config=LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    trainer = small_trainer(tmp_path / "whole", arguments=arguments(), **settings)
    expected, seen = [w.clone() for w in trainer.reference.weights()], []

    class Follow(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            if state.global_step % 2 == 0:
                now = (
                    [p for p in model.parameters() if p.requires_grad]
                    if adapter
                    else list(model.parameters())
                )
                expected[:] = [0.75 * kept + 0.25 * p.detach() for kept, p in zip(expected, now)]
            seen.append(
                all(
                    torch.allclose(a, b, atol=1e-7)
                    for a, b in zip(expected, trainer.reference.weights())
                )
            )

    trainer.add_callback(Follow())
    trainer.train()
    assert seen == [True] * 5
    resumed = small_trainer(tmp_path / "resumed", arguments=arguments(), **settings)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert same(weights_of(resumed.model), weights_of(trainer.model)) and all(
        torch.equal(a, b) for a, b in zip(resumed.reference.weights(), trainer.reference.weights())
    )


def test_the_entropy_bonus_regulates_itself(tmp_path):
    settings = dict(
        use_adaptive_entropy=True,
        entropy_coef=0.02,
        entropy_coef_delta=0.05,
        entropy_coef_max=0.1,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
    )
    free = small_trainer(tmp_path / "free", max_steps=6)
    free.train()
    target = statistics.median(r["entropy"] for r in free.log_history)  # between two of the six
    trainer = small_trainer(tmp_path / "whole", entropy_target=target, **settings)
    trainer.train()
    coef, last, after, bonus = 0.02, math.inf, [], []
    for record in (
        trainer.log_history
    ):  # as TRL's trainer does it: regulated after each update, applied at low entropy alone
        bonus.append((coef if last <= target else 0.0) * record["entropy"])
        coef = min(coef + 0.05, 0.1) if record["entropy"] <= target else max(coef - 0.05, 0.0)
        last = record["entropy"]
        after.append(coef)
    assert [r["entropy_coef"] for r in trainer.log_history] == pytest.approx(after)
    assert [r["policy_loss"] - r["loss"] for r in trainer.log_history] == pytest.approx(
        bonus, abs=1e-6
    ) and len(set(bonus)) > 1
    resumed = small_trainer(tmp_path / "resumed", entropy_target=target, **settings)
    resumed.train(resume_from_checkpoint=tmp_path / "whole" / "checkpoint-3")
    assert without_clocks(resumed.log_history) == without_clocks(trainer.log_history) and same(
        weights_of(resumed.model), weights_of(trainer.model)
    )


@pytest.mark.parametrize(
    "args", [{"beta": 0.1}, "run", ROWS, trl.GRPOConfig(output_dir="run", use_cpu=True, bf16=False)]
)
def test_settings_of_another_kind_are_refused_by_name(args):
    model, tokenizer = small_model()
    with pytest.raises(
        TypeError, match=f"args is .*{type(args).__qualname__}: pass a grpo_nb.GRPOConfig"
    ):
        GRPOTrainer(model, digits, args, ROWS, processing_class=tokenizer)


def test_a_long_prompt_of_the_evaluation_data_is_named_by_its_row(tmp_path):
    rows = ROWS[:5] + [{"prompt": "1+" * 4000, "answer": "0"}] + ROWS[5:]
    for changes in ({}, dict(eval_strategy="steps", eval_steps=1)):
        trainer = small_trainer(
            tmp_path / "run", arguments=dict(eval_dataset={"sums": rows}), **changes
        )
        trainer.collector.collect = None  # nothing is drawn first
        with pytest.raises(
            ValueError, match="^evaluation data: The prompt of row 5 has 8000 tokens"
        ):
            trainer.train() if changes else trainer.evaluate()


def test_columns_of_the_data_may_be_called_like_anything(tmp_path):
    def reward(completions, step, functions, **columns):
        assert set(functions) == {"f"}
        return [s + len(text) for s, text in zip(step, completions)]

    assert (
        small_trainer(
            tmp_path / "run",
            reward,
            rows=[{**row, "step": k, "functions": "f"} for k, row in enumerate(ROWS)],
        )
        .train()
        .global_step
        == 2
    )


def test_two_rewards_of_one_name_have_a_column_each(tmp_path):
    def made(value):
        def reward(completions, **columns):
            return [value] * len(completions)

        return reward

    trainer = small_trainer(tmp_path / "run", [made(1.0), made(3.0)])
    trainer.train()
    record = trainer.log_history[-1]
    assert (record["rewards/reward/mean"], record["rewards/reward_2/mean"], record["reward"]) == (
        1,
        3,
        4,
    ) and {"reward", "reward_2"} <= set(trainer.samples[0]["rewards"])


def test_processes_that_would_train_alone_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a cluster sets it, without a launcher
    small_trainer(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="2 processes were started.*alone.*set use_cpu=True"):
        small_trainer(tmp_path)
