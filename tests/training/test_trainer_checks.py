"What a trainer refuses before a model is loaded, beside what the tests of the trainer ask."

import pytest

from grpo_nb import GRPOConfig
from grpo_nb.training import trainer_parts as checks


def test_what_is_no_model_is_named():
    with pytest.raises(ValueError, match="model is None, which is no model"):
        checks.check_config(GRPOConfig(), None, None)


def test_a_folder_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = checks.at_home(GRPOConfig(output_dir="run"))
    assert moved.output_dir == str(tmp_path / "run") and checks.at_home(moved) is moved


def test_evaluations_need_data():
    config = GRPOConfig(eval_strategy="epoch")
    checks.check_evaluation(config, [1])
    with pytest.raises(ValueError, match="there is no eval_dataset"):
        checks.check_evaluation(config, None)


def test_a_sampler_without_all_of_its_names_is_told_them():
    class Mine:
        takes_token_ids = True

        def generate(self, prompts, params): ...

        def publish(self, model, version): ...

    with pytest.raises(TypeError, match="no Sampler, which has takes_token_ids, .* and close"):
        checks.check_drawn_one_way(Mine(), None, None)
    Mine.close = lambda self: None
    for drawn in (Mine(), print, None):
        checks.check_drawn_one_way(drawn, None, None)
