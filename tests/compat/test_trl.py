"What TRL's trainer has and ours gives in another way: advice, and subclasses that are refused."

import inspect
import re

import pytest
import transformers
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
        "model_wrapped",
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


def test_the_plain_trainer_knows_nothing_of_it(tmp_path):
    assert GRPOTrainer.train is plain.GRPOTrainer.train
    assert not {"args", "log_metrics", "save_state", "ref_model"} & set(dir(plain.GRPOTrainer))
    assert small_trainer(tmp_path).args.output_dir == str(tmp_path)
