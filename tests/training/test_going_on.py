"""Going on from a saved adapter by every route, names that match nothing, and dropout."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_mixtures import mixture
from small_runs import small_model, small_trainer, weights_of

from grpo_nb import FastLanguageModel, load_model
from grpo_nb.model.adapters import keep_adapter, unmatched
from grpo_nb.recipe import recipe_of
from grpo_nb.script import model_of
from grpo_nb.training.policy_model import dropouts

GIVEN = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    "A model, and an adapter of it that PEFT saved, moved off its beginning."
    root = tmp_path_factory.mktemp("adapter")
    model, tokenizer = small_model()
    model.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "base")
    adapted = get_peft_model(base, LoraConfig(**GIVEN, task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            p.data.normal_()
    adapted.save_pretrained(root / "adapter")
    return root


def saved(root):
    tensors = load_file(root / "adapter" / "adapter_model.safetensors")
    return [tensors[name] for name in sorted(tensors)]


def trained(model):
    weights = weights_of(model)
    return [weights[name] for name in sorted(weights)]


def goes_on(model, root):
    mine, theirs = trained(model), saved(root)
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def loaded(root, **given):
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "base")
    return PeftModel.from_pretrained(base, root / "adapter", **given)


def from_trainer(root, tmp_path, model, **given):
    trainer = small_trainer(tmp_path, model=model, max_steps=1, arguments=given)
    assert goes_on(trainer.model, root)
    trainer.train()
    assert not goes_on(trainer.model, root)  # it trains


@pytest.mark.parametrize("config", [None, LoraConfig(**GIVEN, task_type="CAUSAL_LM")])
@pytest.mark.parametrize("route", ["a folder", "a PeftModel"])
def test_the_trainer_goes_on(route, config, folders, tmp_path, capsys):
    model = str(folders / "adapter") if route == "a folder" else loaded(folders, is_trainable=True)
    from_trainer(folders, tmp_path, model, peft_config=config)
    assert ("it goes on with its weights" in capsys.readouterr().out) == bool(config)


def test_a_frozen_adapter_is_called_that_and_trains_where_it_is_asked_for(folders, tmp_path):
    with pytest.raises(ValueError, match=r"adapter is frozen.*is_trainable=True"):
        small_trainer(tmp_path, model=loaded(folders))
    from_trainer(folders, tmp_path, loaded(folders), peft_config=LoraConfig(**GIVEN))


def test_an_adapter_that_transformers_attached_says_how_to_go_on(folders, tmp_path, peft_as_it_is):
    attached = transformers.AutoModelForCausalLM.from_pretrained(folders / "adapter")
    with pytest.raises(ValueError, match="give the trainer the folder itself"):
        small_trainer(tmp_path, model=attached, arguments=dict(peft_config=LoraConfig(**GIVEN)))


def test_the_tokenizer_is_the_base_models(folders, tmp_path):
    from grpo_nb.training.policy_model import tokenizer_of

    assert len(tokenizer_of(str(folders / "adapter"))) == len(small_model()[1])


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(r=8), "r=4, and one with 8"),
        (dict(lora_alpha=4), "lora_alpha=8, and one with 4"),
        (dict(target_modules=["q_proj"]), "on other weights.*v_proj"),
        (dict(target_modules="all-linear"), "on other weights.*"),
        (dict(modules_to_save=["lm_head"]), "on other weights.*lm_head"),
        (dict(lora_dropout=0.1), "lora_dropout=0.0, and one with 0.1"),
    ],
)
def test_another_adapter_is_a_sentence(changes, said, folders):
    with pytest.raises(ValueError, match=f"the model has an adapter .*{said}.*to begin a new one"):
        keep_adapter(loaded(folders, is_trainable=True), LoraConfig(**{**GIVEN, **changes}))


def test_the_same_places_by_other_words_are_the_same(folders):
    model = loaded(folders)
    keep_adapter(model, LoraConfig(**{**GIVEN, "target_modules": r".*self_attn\.[qv]_proj"}))
    assert goes_on(model, folders)


@pytest.mark.parametrize("route", ["load_model", "FastLanguageModel"])
def test_loading_goes_on(route, folders, capsys):
    if route == "load_model":
        model, _ = load_model(folders / "adapter", max_seq_length=64)
        with pytest.raises(ValueError, match="is an adapter, and lora_r=4 asks for another"):
            load_model(folders / "adapter", max_seq_length=64, lora_r=4)
    else:
        model, _ = FastLanguageModel.from_pretrained(
            folders / "adapter", max_seq_length=64, load_in_4bit=False
        )
    assert "adapters on self_attn.q_proj" in capsys.readouterr().out and goes_on(model, folders)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        theirs = loaded(folders).eval()(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, theirs, atol=1e-5, rtol=1e-5)
    if route == "FastLanguageModel":
        again = FastLanguageModel.get_peft_model(model, **GIVEN)
        assert again is model and goes_on(again, folders)
        assert "it goes on with its weights" in capsys.readouterr().out
        with pytest.raises(ValueError, match="r=4, and one with 16 is asked for"):
            FastLanguageModel.get_peft_model(model, **{**GIVEN, "r": 16})


def test_an_adapter_without_a_base_says_so(tmp_path):
    get_peft_model(small_model()[0], LoraConfig(**GIVEN)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not say which model it was trained on"):
        load_model(tmp_path, max_seq_length=64)


# ---- names that match nothing


USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_names_that_match_nothing_are_named(tmp_path):
    config = LoraConfig(r=2, target_modules=USUAL, modules_to_save=["score"])
    with pytest.warns(UserWarning) as caught:
        small_trainer(tmp_path, arguments=dict(peft_config=config))
    (said,) = [str(w.message) for w in caught if "target_modules names" in str(w.message)]
    assert "names down_proj, gate_proj, up_proj, where nothing" in said
    assert "modules_to_save names score" in said
    written = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert f"target_parameters={written}" in said
    linear = ["q_proj", "k_proj", "v_proj", "o_proj"]
    right = LoraConfig(r=2, target_modules=linear, target_parameters=written)
    assert unmatched(get_peft_model(small_model()[0], right)) is None


@pytest.mark.parametrize("name", ["Qwen3Moe", "Lfm2", "Qwen3Next", "GPT2"])
@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q_proj|in_proj.*)"])
def test_what_matches_is_not_named(name, targets):
    if name == "GPT2":
        targets = ["c_attn"]
    model = get_peft_model(mixture(name), LoraConfig(r=2, target_modules=targets))
    assert unmatched(model) is None


# ---- dropout


GPT2 = dict(n_positions=64, initializer_range=0.4)


def dropping(tmp_path, model=None, config=None, **changes):
    vocabulary = len(small_model()[1])
    model = model or mixture("GPT2", vocab_size=vocabulary, **GPT2)
    return small_trainer(tmp_path, model=model, arguments=dict(peft_config=config), **changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(num_iterations=2), "ratios begin away from 1, and tokens are clipped"),
        ({}, "sampling/gap_mean shows by how much"),
    ],
)
def test_dropout_is_said_at_the_start(changes, said, tmp_path):
    with pytest.warns(UserWarning, match=f"dropout of 0.1 .*{said}.*disable_dropout=True"):
        trainer = dropping(tmp_path, **changes)
    assert trainer.hint_writer.hints.dropout == 0.1


def test_dropout_of_an_adapter_is_said(tmp_path):
    config = LoraConfig(**GIVEN, lora_dropout=0.2)
    with pytest.warns(UserWarning, match=r"dropout of 0.2 \(q_proj, v_proj\).*lora_dropout=0 or"):
        small_trainer(tmp_path, arguments=dict(peft_config=config))


def test_dropout_that_is_switched_off_is_off(tmp_path, recwarn):
    "That of a layer's own number too, which is no module: two passes are then alike."
    llama = dict(
        vocab_size=len(small_model()[1]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        attention_dropout=0.5,
    )
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)).train()
    ids = torch.arange(3, 20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits) and len(dropouts(model)) == 1
    trainer = dropping(tmp_path, model, disable_dropout=True)
    assert torch.equal(trainer.model.train()(ids).logits, trainer.model(ids).logits)
    assert not [w for w in recwarn if "dropout" in str(w.message)]


def test_dropout_clips_what_has_not_moved(tmp_path):
    "At a learning rate of 0 nothing moves, and tokens are clipped all the same; off, none is."
    clipped = {}
    for off in (False, True):
        changes = dict(learning_rate=0.0, num_iterations=2, disable_dropout=off)
        trainer = dropping(tmp_path / str(off), **changes)
        trainer.train()
        clipped[off] = [r["clip_ratio/region_mean"] for r in trainer.log_history[:2]]
    assert clipped[True] == [0, 0] and min(clipped[False]) > 0


def test_a_recipe_goes_on(folders, capsys):
    "With a description of the same adapter, or none; another one is a sentence."
    same = dict(use_peft=True, lora_r=4, lora_alpha=8, lora_dropout=0.0)
    same["lora_target_modules"] = ["q_proj", "v_proj"]
    for adapter in ({}, same, same | {"lora_r": 2}):
        recipe = recipe_of({"model_name_or_path": str(folders / "adapter"), **adapter})
        if adapter.get("lora_r") == 2:
            with pytest.raises(ValueError, match="r=4, and one with 2 is asked for"):
                model_of(recipe)
        else:
            assert goes_on(model_of(recipe)[0], folders)
    assert "it goes on with its weights" in capsys.readouterr().out
