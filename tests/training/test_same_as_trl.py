"""The same rollouts go to TRL 1.16's trainer and to this one: after 20 updates in float32 both have
the same weights, and logged the same numbers."""

import random

import pytest
import torch
import transformers
import trl
from small_runs import ROWS, digits, small_model, weights_of

import grpo_nb

SETTINGS = {
    "the defaults": {},
    "a KL term, accumulated": dict(
        loss_type="grpo", beta=0.1, gradient_accumulation_steps=2, scale_rewards="none"
    ),
    "several updates of a cycle": dict(
        loss_type="dr_grpo", num_iterations=2, epsilon_high=0.28, scale_rewards="batch"
    ),
    "an entropy bonus, accumulated": dict(
        loss_type="bnpo", entropy_coef=0.05, gradient_accumulation_steps=2
    ),
    "sequence ratios": dict(
        loss_type="luspo", importance_sampling_level="sequence", steps_per_generation=2
    ),
    "balanced experts, accumulated": dict(
        loss_type="grpo", router_aux_loss_coef=0.5, gradient_accumulation_steps=2
    ),
}
SHARED = (
    "loss policy_loss grad_norm learning_rate reward reward_std frac_reward_zero_std entropy kl"
    " completions/mean_length clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean"
    " aux_loss"
).split()


def fresh_model(settings):
    "A Qwen with 10,000 parameters; one of experts where the settings are about them."
    torch.manual_seed(0)
    tokenizer = small_model()[1]
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    if "router_aux_loss_coef" not in settings:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)), tokenizer
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    config = transformers.Qwen3MoeConfig(**sizes, **experts)
    return transformers.Qwen3MoeForCausalLM(config), tokenizer


def loaded(folder, settings):
    "The model from a folder: TRL loads its reference from where the model came from."
    model, tokenizer = fresh_model(settings)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder), tokenizer


def written_before():
    "A rollout function that gives the same completions in every run."
    chance = random.Random(0)

    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        digit_ids = tokenizer("0123456789")["input_ids"]
        drawn = [chance.choices(digit_ids, k=chance.randint(1, 6)) for _ in prompts]
        completions = [ids + [tokenizer.eos_token_id] for ids in drawn]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
        }

    return rollout


def trained(library, folder, **settings):
    "Weights after 20 updates, and the records of the updates."
    model, tokenizer = loaded(folder / "model", settings)
    usual = dict(
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=20,
        learning_rate=1e-3,
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        vllm_importance_sampling_correction=False,
    )
    trainer = library.GRPOTrainer(
        model,
        lambda completions, **_: digits(completions),
        args=library.GRPOConfig(output_dir=str(folder), **{**usual, **settings}),
        train_dataset=table(library),
        processing_class=tokenizer,
        rollout_func=written_before(),
    )
    trainer.train()
    return weights_of(trainer.model), [r for r in trainer.state.log_history if "loss" in r]


def table(library):
    "The rows as each library takes them."
    import datasets

    return ROWS if library is grpo_nb else datasets.Dataset.from_list(ROWS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_rollouts_give_the_same_weights(name, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    theirs, their_log = trained(trl, tmp_path / "trl", **SETTINGS[name])
    ours, our_log = trained(grpo_nb, tmp_path / "grpo_nb", **SETTINGS[name])
    began = weights_of(fresh_model(SETTINGS[name])[0])
    assert ours.keys() == theirs.keys() and len(our_log) == len(their_log) == 20
    for weight in ours:
        torch.testing.assert_close(ours[weight], theirs[weight], rtol=0, atol=1e-5, msg=weight)
    moved = max((ours[weight] - began[weight]).abs().max() for weight in ours)
    assert moved > 0.005, "the weights moved much farther than they differ"
    for step, (mine, its) in enumerate(zip(our_log, their_log), 1):
        shared = [number for number in SHARED if number in mine and number in its]
        assert len(shared) >= (11 if "reward" in its else 7)
        for number in shared:
            assert mine[number] == pytest.approx(its[number], abs=2e-4), (step, number)
