"""Samplers: the protocol, rollout functions alone, and a run whose completions a function draws."""

import math

import pytest
import torch
from small_runs import (
    digits,
    one_thread,  # noqa: F401
    remember_batches,
    small_model,
    small_trainer,
    weights_of,
    without_clocks,
)

from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampler import FunctionSampler, Sampler, drawn_elsewhere
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.checkpoint import checkpoints


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def constant(prompts, caller):
    "One completion of two tokens for each prompt; the caller's number among them."
    return {
        "prompt_ids": [[len(prompt)] for prompt in prompts],
        "completion_ids": [[caller, 1] for _ in prompts],
        "logprobs": [[-1.0, -2.0] for _ in prompts],
        "asked": list(prompts),
    }


# the protocol


def test_the_engine_and_a_rollout_function_are_samplers():
    engine, function = RolloutEngine(*small_model()), FunctionSampler(constant, 7, [1], "cpu")
    for sampler, takes_token_ids in ((engine, True), (function, False)):
        assert isinstance(sampler, Sampler) and sampler.takes_token_ids is takes_token_ids
    assert not isinstance(constant, Sampler) and not isinstance(small_model()[0], Sampler)


def test_every_completion_has_the_version_that_was_published_last():
    model, tokenizer = small_model()
    engine = RolloutEngine(model, tokenizer, max_batch_size=2)
    for sampler, prompts in (
        (engine, [[7], [8, 9], [7, 7]]),
        (FunctionSampler(constant, 7, [1], "cpu"), ["1+1=", "2", "3"]),
    ):
        params, versions = SamplingParams(max_tokens=3, n=2, seed=0), []
        for version in (None, 5, 2):
            if version is not None:
                assert sampler.publish(model, version) is None
            versions.append(sampler.generate(prompts, params).versions)
        assert [v.tolist() for v in versions] == [[0] * 6, [5] * 6, [2] * 6]
        assert versions[0].dtype == torch.int64 and sampler.close() is None


def test_publishing_to_the_engine_changes_no_completion():
    model, tokenizer = small_model()
    engine, params = RolloutEngine(model, tokenizer), SamplingParams(max_tokens=9, seed=0)
    before = engine.generate([[7, 8]], params)
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    unpublished = engine.generate([[7, 8]], params)
    engine.publish(model, 1)
    published = engine.generate([[7, 8]], params)
    assert torch.equal(unpublished.completion_ids, published.completion_ids)
    assert before.completion_ids.tolist() != published.completion_ids.tolist()


# a rollout function alone


def test_a_function_gets_a_prompt_for_each_completion_and_its_caller():
    sampler = FunctionSampler(constant, 7, [1], "cpu")
    rollout = sampler.generate(["1+1=", "2"], SamplingParams(max_tokens=2, n=3))
    assert rollout.columns == {"asked": ["1+1="] * 3 + ["2"] * 3}
    assert rollout.prompt_ids == [[4]] * 3 + [[1]] * 3
    assert rollout.completion_ids.tolist() == [[7, 1]] * 6
    assert rollout.finish_reasons == ["stop"] * 6 and rollout.written is None


@pytest.mark.parametrize("variables", [[{"effort": "low"}, {}], None])
def test_a_function_that_asks_for_it_gets_the_templates_variables_too(variables):
    def writing(prompts, caller, chat_template_kwargs):
        return {**constant(prompts, caller), "variables": chat_template_kwargs}

    sampler = FunctionSampler(writing, 7, [1], "cpu")
    params = SamplingParams(max_tokens=2, n=2)
    rollout = sampler.generate(["1+1=", "2"], params, variables)
    first, second = variables or [{}, {}]
    assert rollout.columns["variables"] == [first, first, second, second]


def test_rows_of_unlike_lengths_become_a_rollout():
    rollout = drawn_elsewhere(
        {
            "prompt_ids": [[5], torch.tensor([5, 6])],
            "completion_ids": [torch.tensor([7, 8, 9]), [1]],
            "logprobs": [[-1.0, None, -3.0], torch.tensor([-4.0])],
            "env_mask": [[1, 1, 0], [1]],
        },
        2,
        [1],
    )
    assert rollout.prompt_ids == [[5], [5, 6]] and rollout.finish_reasons == ["length", "stop"]
    assert rollout.completion_ids.tolist() == [[7, 8, 9], [1, 0, 0]]
    assert rollout.mask.tolist() == [[True] * 3, [True, False, False]]
    assert rollout.written.tolist() == [[True, True, False], [True, False, False]]
    assert rollout.logps.isnan().tolist() == [[False, True, True], [False] * 3]
    assert rollout.logps[1].tolist() == [-4.0, 0.0, 0.0] and rollout.versions is None


def test_what_is_no_mask_of_the_environment_is_refused():
    output = constant(["1", "2"], 7)
    with pytest.raises(ValueError, match="completion 1 .* has 2 tokens and 1 env_mask"):
        drawn_elsewhere({**output, "env_mask": [[1, 1], [1]]}, 2, [1])
    with pytest.raises(ValueError, match="'env_mask' with no entries for 2 prompts"):
        drawn_elsewhere({**output, "env_mask": None}, 2, [1])


# runs


def from_the_engine(prompts, trainer):
    "What the trainer does itself."
    rollout = trainer.engine.generate(prompts, trainer.sampling, progress=False)
    pairs = list(zip(rollout.completion_ids, rollout.logps, rollout.mask))
    return {
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": [ids[m].tolist() for ids, _, m in pairs],
        "logprobs": [logps[m].tolist() for _, logps, m in pairs],
    }


def test_a_rollout_function_that_does_what_the_engine_does(tmp_path):
    settings = dict(vllm_importance_sampling_correction=False, max_steps=3)
    one, other = (
        small_trainer(tmp_path / "a", **settings),
        small_trainer(tmp_path / "b", **settings, arguments=dict(rollout_func=from_the_engine)),
    )
    one.train(), other.train()
    assert same(weights_of(one.model), weights_of(other.model)) and without_clocks(
        one.log_history
    ) == without_clocks(other.log_history)


def test_tokens_from_outside_are_read_and_not_learnt(tmp_path):
    seen = []

    def with_replies(prompts, trainer):
        output = from_the_engine(prompts, trainer)
        own = output["completion_ids"]
        output["completion_ids"] = [ids[:1] + [9, 9] + ids[1:] for ids in own]
        output["logprobs"] = [logps[:1] + [0.0, 0.0] + logps[1:] for logps in output["logprobs"]]
        output["env_mask"] = [[1, 0, 0] + [1] * (len(ids) - 1) for ids in own]
        output["turns"] = list(range(len(prompts)))
        return output

    def reward(completions, turns, **columns):
        seen.append(turns)
        return digits(completions)

    trainer = small_trainer(
        tmp_path,
        reward,
        arguments=dict(rollout_func=with_replies),
        max_steps=1,
        guard_every=0,  # the engine had not seen the replies when it drew what follows them
        shuffle_dataset=False,
    )
    batches = remember_batches(trainer)
    trainer.train()
    batch = batches[0]
    assert seen == [list(range(16))] and trainer.corrects
    assert (
        (batch.completion_ids[:, 1:3] == 9).all()
        and batch.completion_mask[:, 1:3].all()
        and not batch.loss_mask[:, 1:3].any()
    )
    assert (batch.loss_mask.sum(-1) == batch.completion_mask.sum(-1) - 2).all()


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_mask"])
@pytest.mark.parametrize("logp", [0.0, math.nan])
def test_replies_of_an_environment_weigh_no_completion_down(tmp_path, mode, logp):
    def with_replies(prompts, trainer):
        output = from_the_engine(prompts, trainer)
        output["env_mask"] = [[1] * len(ids) + [0] * 3 for ids in output["completion_ids"]]
        output["completion_ids"] = [ids + [9] * 3 for ids in output["completion_ids"]]
        output["logprobs"] = [logps + [logp] * 3 for logps in output["logprobs"]]
        return output

    trainer = small_trainer(
        tmp_path,
        arguments=dict(rollout_func=with_replies),
        max_steps=1,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.5,
    )
    batches = remember_batches(trainer)
    trainer.train()
    assert (
        torch.allclose(batches[0].rollout_weights, torch.ones(()), atol=1e-4)
        and trainer.log_history[-1]["sampling/gap_mean"] < 1e-4
        and trainer.log_history[-1]["grad_norm"] > 0
    )


def test_a_sampler_may_leave_log_probs_out(tmp_path):
    def without(prompts, trainer):
        output = from_the_engine(prompts, trainer)
        return {**output, "logprobs": [[math.nan] * len(ids) for ids in output["completion_ids"]]}

    trainer = small_trainer(tmp_path, arguments=dict(rollout_func=without), max_steps=1)
    trainer.train()
    assert (
        trainer.log_history[-1]["sampling/gap_mean"] == 0
        and trainer.log_history[-1]["grad_norm"] > 0
    )


@pytest.mark.parametrize("form", ["no log-probs", "None for some", "tensors"])
def test_the_forms_in_which_a_rollout_function_may_answer(form, tmp_path):
    def answer(prompts, trainer):
        assert (
            trainer.num_generations,
            trainer.num_generations_eval,
            trainer.max_completion_length,
            trainer.temperature,
            trainer.beta,
            trainer.reward_func_names,
        ) == (4, 4, 6, 1.0, 0.0, ["digits"])
        output = from_the_engine(prompts, trainer)
        if form == "no log-probs":
            return {**output, "logprobs": None}
        if form == "None for some":
            return {**output, "logprobs": [[None, *row[1:]] for row in output["logprobs"]]}
        return {name: [torch.tensor(row) for row in rows] for name, rows in output.items()}

    trainer = small_trainer(tmp_path, arguments=dict(rollout_func=answer), max_steps=1)
    trainer.train()
    plain = small_trainer(
        tmp_path / "plain", arguments=dict(rollout_func=from_the_engine), max_steps=1
    )
    plain.train()
    record, expected = trainer.log_history[0], plain.log_history[0]
    assert (
        record["reward"] == expected["reward"]
        and record["grad_norm"] > 0
        and (record["sampling/gap_mean"] == 0) == (form == "no log-probs")
    )
    if form == "tensors":
        assert without_clocks(trainer.log_history) == without_clocks(plain.log_history)


@pytest.mark.parametrize(
    "output, words",
    [
        (None, "returned NoneType"),
        ({"prompt_ids": []}, "must return a dict with the keys"),
        (
            {"prompt_ids": [[1]], "completion_ids": [[1]], "logprobs": [[0.0]]},
            "1 entries for 16 prompts",
        ),
        (
            {
                "prompt_ids": [[1]] * 16,
                "completion_ids": [[1]] * 16,
                "logprobs": [[-math.inf]] * 16,
            },
            "an infinite log-prob",
        ),
        (
            {"prompt_ids": [[1]] * 16, "completion_ids": [[1, 2]] * 16, "logprobs": [[0.0]] * 16},
            "2 tokens and 1 logprobs",
        ),
        (
            {"prompt_ids": [[1]] * 16, "completion_ids": [[]] * 16, "logprobs": [[]] * 16},
            "no tokens",
        ),
    ],
)
def test_a_rollout_function_that_returns_nonsense(output, words, tmp_path):
    trainer = small_trainer(tmp_path, arguments=dict(rollout_func=lambda prompts, trainer: output))
    before = weights_of(trainer.model)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert same(before, weights_of(trainer.model)) and not checkpoints(
        tmp_path
    )  # nothing was learnt, so there is nothing to go on from
