"The objects that a trainer makes before its loop: which sampler it draws from, whom it tells."

import pytest
from small_runs import one_thread, small_trainer  # noqa: F401
from transformers import TrainerCallback

from grpo_nb import GRPOTrainer
from grpo_nb.rollout.sampler import FunctionSampler
from grpo_nb.training.collect import RolloutCollector
from grpo_nb.training.hub import HubWriter
from grpo_nb.training.trainer_parts import Given


class Own(TrainerCallback):
    "A user's."


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return small_trainer(tmp_path_factory.mktemp("run"), arguments=dict(callbacks=[Own()]))


def test_a_sampler_is_taken_as_it_is_and_a_function_wrapped(trainer):
    def draws(prompts, trainer):
        return {}

    wrapped = trainer.sampler_of(draws)
    assert isinstance(wrapped, FunctionSampler)
    assert (wrapped.function, wrapped.caller) == (draws, trainer)
    assert list(wrapped.stop_token_ids) == list(trainer.stops())
    assert trainer.sampler_of(wrapped) is wrapped
    assert trainer.sampler_of(None) is trainer.engine is trainer.sampler
    assert trainer.engine.model is trainer.model


def test_callbacks_of_the_run_come_before_those_of_a_user_and_what_saves_last(trainer):
    kinds = [type(one) for one in trainer.callbacks.handler.callbacks]
    ours = [type(one) for one in (trainer.log, trainer.hint_writer, trainer.bar)]
    places = [kinds.index(kind) for kind in (*ours, Own, HubWriter)]
    assert places == sorted(places) and trainer.checkpointer.own["callbacks"] is trainer.callbacks


def test_a_subclass_names_the_class_of_a_part(tmp_path):
    class Collector(RolloutCollector):
        pass

    class Trainer(GRPOTrainer):
        collector_class = Collector

    made = small_trainer(tmp_path / "own", trainer=Trainer)
    assert type(made.collector) is Collector and made.evaluator.source is made.source


def test_steps_need_no_model():
    given = Given()
    given.take_tools([len], None, None)
    assert given.tools == [len] and given.environments is None
    with pytest.raises(ValueError, match="rollout_func"):
        given.take_tools([len], None, lambda prompts, trainer: {})
