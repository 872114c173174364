"""What TRL's own tests of its trainer want and no other test here looks at: each want is a check.
tests/data/trl_wants.json says which test of ours holds which want."""

import copy
import dataclasses
import json
import math
import pickle

import datasets
import pytest
import torch
import transformers
import trl
import yaml
from peft import LoraConfig, get_peft_model
from small_runs import ROWS, digits, small_model, small_trainer, weights_of
from transformers import HfArgumentParser

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.training import policy_update

SIZES = dict(
    vocab_size=0,  # the tokenizer's
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.25,
)


def family(name, **changes):
    "A small model of another family, with random weights, and its tokenizer."
    torch.manual_seed(0)
    tokenizer = small_model()[1]
    ends = dict(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    sizes = {**SIZES, "vocab_size": len(tokenizer), **ends, **changes}
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config), tokenizer


def stored(model_and_tokenizer, folder):
    "The folder, with a model and its tokenizer in it, as a name."
    for part in model_and_tokenizer:
        part.save_pretrained(folder)
    return str(folder)


def judge():
    "A small reward model and its tokenizer."
    model, tokenizer = family("Qwen2")
    config = transformers.Qwen2Config(**{**model.config.to_dict(), "num_labels": 1})
    return transformers.Qwen2ForSequenceClassification(config), tokenizer


def one_update(folder, reward_funcs=digits, **given):
    "A trainer that has made one update, or as many as `max_steps` says."
    trainer = small_trainer(folder, reward_funcs, **{"max_steps": 1, **given})
    trainer.train()
    return trainer


# what the constructor takes


def test_three_arguments_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, scores = stored(small_model(), tmp_path / "model"), stored(judge(), tmp_path / "judge")
    trainer = GRPOTrainer(model=model, reward_funcs=scores, train_dataset=ROWS)
    assert trainer.reward_names == ["judge"] and trainer.eval_dataset is None
    assert trainer.args == GRPOConfig(output_dir=str(tmp_path / "trainer_output"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge", "model"]


def test_each_reward_model_has_a_tokenizer(tmp_path):
    (one, its), (two, other) = judge(), judge()
    makes = lambda rewards, classes: small_trainer(  # noqa: E731
        tmp_path, rewards, arguments=dict(reward_processing_classes=classes)
    )
    assert makes(one, its).reward_processing_classes == [its]
    both = makes([one, two, digits], [its, other, None])
    assert [t is its for t in both.reward_processing_classes] == [True, False, False]
    assert both.reward_processing_classes[1:] == [other, None]
    with pytest.raises(ValueError, match="must match"):
        makes([one, two], its)


def data_for_evaluation(form):
    "Two rows in each form in which TRL takes them, alone or as two parts."
    rows = datasets.Dataset.from_list(ROWS[:2])
    rows = rows.to_iterable_dataset() if "stream" in form else rows
    parts = {"easy": rows, "hard": rows}
    kinds = {
        "DatasetDict": datasets.DatasetDict,
        "streams in an IterableDatasetDict": datasets.IterableDatasetDict,
        "dict": dict,
        "dict of streams": dict,
    }
    return kinds[form](parts) if form in kinds else rows


FORMS = ["Dataset", "stream", "DatasetDict", "streams in an IterableDatasetDict"]
FORMS += ["dict", "dict of streams"]


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    "A trainer without evaluation data, for tests that only evaluate."
    return small_trainer(tmp_path_factory.mktemp("untrained"), max_completion_length=3)


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_data_in_every_form(form, untrained, tmp_path):
    data = data_for_evaluation(form)
    kept = small_trainer(tmp_path, arguments=dict(eval_dataset=data)).eval_dataset
    found = untrained.evaluate(eval_dataset=data)
    if "Dict" in form or "dict" in form:
        assert list(kept) == ["easy", "hard"]
        assert all(len(part) == 2 and list(part) == ROWS[:2] for part in kept.values())
        names = ["eval_easy_loss", "eval_hard_loss"]
    else:
        assert kept is data or (form == "stream" and kept == ROWS[:2])
        names = ["eval_loss"]
    assert [name for name in found if name.endswith("_loss")] == names
    assert all(math.isfinite(found[name]) for name in names)


# what a run does with its settings

ADAPTERS = {"peft_config": False, "an adapter": False, "recomputed layers": True}


@pytest.mark.parametrize("given", ADAPTERS)
def test_an_adapter_with_pefts_defaults_trains_alone(given, tmp_path):
    model, tokenizer = family("Qwen2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adapter = LoraConfig(task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, adapter) if given == "an adapter" else model
    arguments = {} if given == "an adapter" else dict(peft_config=adapter)
    trainer = small_trainer(
        tmp_path,
        model=wrapped,
        tokenizer=tokenizer,
        arguments=arguments,
        gradient_checkpointing=ADAPTERS[given],
    )
    start = weights_of(trainer.model)
    assert start and all("lora_" in name for name in start)
    trainer.train()
    after = weights_of(trainer.model)
    assert not any(torch.equal(after[name], start[name]) for name in start)
    base = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): p
        for name, p in trainer.model.named_parameters()
        if "lora_" not in name
    }
    assert base.keys() == before.keys()
    assert all(torch.equal(base[name], before[name]) for name in base)


EXPERTS = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0
)


@pytest.mark.parametrize("name, sizes", [("Cohere2", {}), ("Glm4Moe", EXPERTS)])
def test_other_families_train(name, sizes, tmp_path):
    model, tokenizer = family(name, **sizes)
    before = weights_of(model)
    trainer = one_update(tmp_path, model=model, tokenizer=tokenizer)
    after = weights_of(trainer.model)
    still = [n for n in before if torch.equal(before[n], after[n])]
    assert not still, still
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_float32_is_felt_in_a_run(tied, tmp_path):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for wide in (False, True):
            model, tokenizer = family("Qwen2", tie_word_embeddings=tied)
            given = dict(model=model.to(dtype), tokenizer=tokenizer, cast_lm_head_to_fp32=wide)
            trainer = one_update(tmp_path, **given)
            assert trainer.model.lm_head.weight.dtype == dtype
            found[dtype, wide] = trainer.log_history[0]["entropy"]
    assert found[torch.float32, False] == found[torch.float32, True]
    assert found[torch.bfloat16, False] != found[torch.bfloat16, True]


def test_groups_larger_than_a_batch(tmp_path):
    changes = dict(per_device_train_batch_size=3, gradient_accumulation_steps=2)
    trainer = small_trainer(tmp_path, num_generations=6, max_steps=1, **changes)
    before = weights_of(trainer.model)
    trainer.train()
    assert len(trainer.samples) == 6 and len({s["prompt"] for s in trainer.samples}) == 1
    assert any(not torch.equal(p, before[n]) for n, p in weights_of(trainer.model).items())


def test_what_only_moves_data_changes_no_weight(tmp_path):
    plain = one_update(tmp_path / "plain")
    with pytest.warns(UserWarning, match="changes nothing here"):
        asked = one_update(tmp_path / "asked", pad_to_multiple_of=8, dataloader_num_workers=2)
    after = weights_of(asked.model)
    assert all(torch.equal(p, after[name]) for name, p in weights_of(plain.model).items())


ASKED = dict(
    beta=0.1,
    use_bias_correction_kl=True,
    off_policy_mask_threshold=0.5,
    delta=2.0,
    importance_sampling_level="sequence",
    epsilon=0.11,
    epsilon_high=0.33,
    loss_type="grpo",
)


def test_settings_of_the_loss_reach_it(tmp_path, monkeypatch):
    seen, loss = [], policy_update.grpo_loss

    def watched(*tensors, **settings):
        seen.append(settings)
        return loss(*tensors, **settings)

    monkeypatch.setattr(policy_update, "grpo_loss", watched)
    one_update(tmp_path, num_iterations=2, max_steps=2, **ASKED)
    assert len(seen) >= 2
    for settings in seen:
        assert {name: settings[name] for name in ASKED} == ASKED
        assert settings["ref_logps"] is not None and settings["old_logps"] is not None


def test_the_reference_can_be_looked_at_and_follows(tmp_path):
    settings = dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    trainer = small_trainer(tmp_path, ref_model_mixup_alpha=0.5, **settings)
    assert trainer.ref_model is not None and small_trainer(tmp_path).ref_model is None
    start = {n: trainer.ref_model.get_parameter(n).clone() for n in weights_of(trainer.model)}
    trainer.train()
    now = weights_of(trainer.model)
    for name, before in start.items():
        middle = (before + now[name]) / 2
        assert torch.allclose(trainer.ref_model.get_parameter(name), middle, atol=1e-6), name
    assert any(not torch.equal(now[name], before) for name, before in start.items())


# the entropy bonus


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo"])
def test_every_loss_has_the_same_bonus(loss_type, tmp_path):
    level = "sequence" if loss_type == "luspo" else "token"
    settings = dict(loss_type=loss_type, importance_sampling_level=level)
    (record,) = one_update(tmp_path, entropy_coef=0.5, **settings).log_history
    bonus = record["policy_loss"] - record["loss"]
    assert bonus == pytest.approx(0.5 * record["entropy"], rel=1e-4) and bonus > 0.1
    assert record["entropy_coef"] == 0.5


def test_the_weight_of_the_bonus_moves_once_an_update(tmp_path):
    trainer = one_update(
        tmp_path,
        max_steps=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_target=15.0,  # more than any policy has, so that the weight only grows
        entropy_coef_delta=0.005,
    )
    assert trainer.entropy_coef == pytest.approx(0.01 + 3 * 0.005)
    assert trainer.state.log_history[-2]["entropy_coef"] == pytest.approx(trainer.entropy_coef)


# the settings: other names, every route


def test_completions_that_are_stored_and_not_printed(tmp_path, capsys):
    trainer = small_trainer(tmp_path, log_completions=True, num_completions_to_print=0, max_steps=1)
    trainer.log.show = True
    trainer.train()
    assert " -> " not in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "completions").iterdir()] == [
        "completions_00001.parquet"
    ]


def test_words_for_the_scale_of_rewards():
    scales = {False: "none", True: "group", "none": "none", "group": "group", "batch": "batch"}
    assert {given: GRPOConfig(scale_rewards=given).scale_rewards for given in scales} == scales


@dataclasses.dataclass
class Mine(GRPOConfig):
    flag: bool = False
    words: list[str] = dataclasses.field(default_factory=list)


def test_a_subclass_is_copied_pickled_and_replaced():
    config = Mine(beta=0.1, flag=True, words=["a"], vllm_importance_sampling_cap=3.5)
    assert config.vllm_importance_sampling_clip_max == 3.5
    for again in (
        pickle.loads(pickle.dumps(config)),
        copy.copy(config),
        copy.deepcopy(config),
        dataclasses.replace(config),
    ):
        assert type(again) is Mine and again == config
        assert (again.flag, again.words, again.beta) == (True, ["a"], 0.1)
    changed = dataclasses.replace(config, flag=False, beta=0.2)
    assert (changed.flag, changed.beta, changed.words) == (False, 0.2, ["a"])
    assert copy.deepcopy(config).words is not config.words


def by_flags(kind, values, folder):
    line = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return HfArgumentParser(kind).parse_args_into_dataclasses(line)[0]


def by_dict(kind, values, folder):
    return HfArgumentParser(kind).parse_dict(values)[0]


def by_json(kind, values, folder):
    (folder / "run.json").write_text(json.dumps(values))
    return HfArgumentParser(kind).parse_json_file(str(folder / "run.json"))[0]


def by_yaml(kind, values, folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return HfArgumentParser(kind).parse_yaml_file(str(folder / "run.yaml"))[0]


def by_trl_flags(kind, values, folder):
    line = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return trl.TrlParser(kind).parse_args_and_config(line)[0]


def by_trl_yaml(kind, values, folder):
    (folder / "trl.yaml").write_text(yaml.safe_dump(values))
    return trl.TrlParser(kind).parse_args_and_config(["--config", str(folder / "trl.yaml")])[0]


ROUTES = [by_flags, by_dict, by_json, by_yaml, by_trl_flags, by_trl_yaml]


@pytest.mark.parametrize("kind", [GRPOConfig, Mine])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_every_route_gives_the_same_config_or_the_same_sentence(route, kind, tmp_path):
    good = dict(beta=0.1, vllm_importance_sampling_cap=3.5, num_completions_to_print=0)
    config = route(kind, good, tmp_path)
    assert type(config) is kind and config == kind(**good)
    assert config.vllm_importance_sampling_clip_max == 3.5 and config.num_completions_to_print == 0
    for wish in ({"beta": -1.0}, {"auto_find_batch_size": True}, {"full_determinism": True}):
        with pytest.raises(ValueError) as here:
            kind(**wish)
        with pytest.raises(ValueError) as there:
            route(kind, wish, tmp_path)
        assert str(there.value) == str(here.value)
