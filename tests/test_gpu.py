"The trainer on a CUDA device, in each number format, stopped and resumed. (pytest -m gpu)"
import pytest
import torch

from grpo_nb.environments.arithmetic import addition_problems, number_found_reward
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def brief_reward(completion_ids, **kwargs): return [(4 - len(ids)) / 4 for ids in completion_ids]


def trainer(folder, **changes):
    model, tokenizer = tiny_gpt_oss()
    config = GRPOConfig(**{**dict(output_dir=str(folder), max_completion_length=4, per_device_train_batch_size=64, learning_rate=2e-3, max_steps=20, logging_steps=1,
                                  save_strategy="no", disable_tqdm=True, bf16=False), **changes})
    result = GRPOTrainer(model, [number_found_reward, brief_reward], config, addition_problems()[0], processing_class=tokenizer)
    result.log.show = False
    return result


@pytest.mark.parametrize("precision", [dict(bf16=True), dict(fp16=True), dict(bf16=False)], ids=["bf16", "fp16", "float32"])
def test_learns_on_the_gpu(tmp_path, precision):
    run = trainer(tmp_path, **precision)
    run.train()
    rewards = [record["reward"] for record in run.log_history]
    assert next(run.model.parameters()).is_cuda and rewards[0] < 0.8 and sum(rewards[-5:]) > 5 * 0.97
    assert all(record["sampling/gap_mean"] < 0.05 and record["peak_memory_gib"] > 0 for record in run.log_history)


def test_resumed_on_the_gpu_within_tolerance(tmp_path):
    whole = trainer(tmp_path / "whole", max_steps=8)
    whole.train()
    first = trainer(tmp_path / "part", max_steps=8, save_strategy="steps", save_steps=4)
    first.train()
    again = trainer(tmp_path / "part", max_steps=8)
    again.train(resume_from_checkpoint=tmp_path / "part" / "checkpoint-4")
    for a, b in zip(whole.log_history, again.log_history, strict=True):
        assert a["reward"] == pytest.approx(b["reward"], abs=0.05) and a["loss"] == pytest.approx(b["loss"], abs=0.02)
