"What TRL's trainer has and ours gives in another way: advice, and subclasses that are refused."

import inspect
import re

import datasets
import pytest
import transformers
import trl
from small_runs import small_trainer

from grpo_nb import GRPOTrainer
from grpo_nb.compat.trl import NOT_CALLED, NOT_HERE
from grpo_nb.training import trainer as plain


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_has_no_meaning_here_says_what_to_do(name, tmp_path):
    trainer = small_trainer(tmp_path)
    with pytest.raises(AttributeError, match=f"GRPOTrainer has no '{name}': "):
        getattr(trainer, name)
    assert (
        not hasattr(trainer, name)
        and not hasattr(trainer, "schedule")
        and getattr(trainer, "nothing", 5) == 5
    )
    assert hasattr(transformers.Trainer, name) or name in (
        "data_collator",
        "callback_handler",
        "_metrics",
    ), "a name of transformers, or of TRL"
    for word in re.findall(r"(?<![\w.])(\w+)\(", NOT_HERE[name]):
        assert callable(getattr(trainer, word))
    for part, method in re.findall(r"\b(policy_update|collector|engine)\.(\w+)\(", NOT_HERE[name]):
        assert callable(getattr(getattr(trainer, part), method))
    with pytest.raises(AttributeError, match="'GRPOTrainer' object has no attribute 'nothing'"):
        _ = trainer.nothing


@pytest.mark.parametrize("name", NOT_CALLED)
def test_a_subclass_whose_method_nothing_would_call_is_refused(name):
    method = {name: lambda self, *args, **kwargs: None}
    with pytest.raises(
        TypeError, match=f"Mine defines {name}, which this trainer never calls: define "
    ):
        type("Mine", (GRPOTrainer,), method)
    with pytest.raises(TypeError, match=f"Mine defines {name}"):
        type("Mine", (type("Mixin", (), method), GRPOTrainer), {})
    pattern = r"(\w+)\((.*)\) in a subclass of (\w+), .* in (\w+)"
    named = re.fullmatch(pattern, NOT_CALLED[name])
    if not named:
        assert re.match("nothing, (and pass|since) ", NOT_CALLED[name])
        return
    method, given, part, attribute = named.groups()
    kind = getattr(GRPOTrainer, attribute)
    _, *parameters = inspect.signature(getattr(kind, method)).parameters.values()
    assert kind.__name__ == part
    assert given == ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    mine = type("Mine", (kind,), {method: lambda self, *args: None})
    type("Mine", (GRPOTrainer,), {attribute: mine})


def test_callbacks_of_trl_run(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "1+2="}, {"prompt": "12+3="}])
    trainer = small_trainer(tmp_path, arguments={"eval_dataset": rows}, max_steps=2)
    told = trl.LogCompletionsCallback(
        trainer, transformers.GenerationConfig(max_new_tokens=3), num_prompts=1, freq=1
    )
    trainer.add_callback(told)
    trainer.add_callback(trl.BEMACallback(update_after=0, update_freq=1, device="cpu"))
    trainer.train()
    assert [row[:2] for row in told.table] == [("1", "1+2="), ("2", "1+2=")]
    assert trainer.model_wrapped is trainer.model
    assert (tmp_path / "bema").exists()


def test_each_checkpoint_has_the_state_that_scripts_read(tmp_path):
    trainer = small_trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True
    )
    trainer.train()
    for step in (1, 2):
        path = tmp_path / f"checkpoint-{step}/trainer_state.json"
        theirs = transformers.TrainerState.load_from_json(str(path))
        assert theirs.global_step == step and theirs.max_steps == 2
        assert [record["step"] for record in theirs.log_history] == [*range(1, step + 1)]
    with pytest.raises(ValueError, match="has the model alone, written with save_only_model=True"):
        small_trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_prompts_longer_than_a_script_thinks_are_used_whole(tmp_path):
    rows = [{"prompt": "1+2=", "digits": "3"}, {"prompt": "100+200+300=", "digits": "6"}] * 2
    short = dict(rows=rows, max_steps=1, max_prompt_length=5)
    with pytest.warns(UserWarning, match="2 of 4 rows .*max_prompt_length=5; .*row 1, has 12 tok"):
        trainer = small_trainer(tmp_path / "whole", lengths, **short)
        trainer.train()
    assert {len(sample["prompt"]) for sample in trainer.samples} <= {4, 12}
    short |= dict(max_completion_length=4090)
    with pytest.raises(ValueError, match="The prompt of row 1 has 12 tokens; with max_completion"):
        small_trainer(tmp_path / "refused", lengths, **short).train()


def lengths(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_the_plain_trainer_knows_nothing_of_it(tmp_path):
    assert GRPOTrainer.train is plain.GRPOTrainer.train
    assert not {"args", "log_metrics", "save_state", "ref_model"} & set(dir(plain.GRPOTrainer))
    assert small_trainer(tmp_path).args.output_dir == str(tmp_path)
