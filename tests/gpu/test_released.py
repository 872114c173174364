"Models released with towers, on a GPU: one step in bfloat16 and in NF4. (pytest -m gpu)"

import pytest
import torch
from peft import LoraConfig
from released_models import RELEASED, released

from grpo_nb import GRPOConfig, GRPOTrainer, load_model
from grpo_nb.model.stored_weights import towers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = [{"prompt": f"{a}+{b}="} for a in (7, 12) for b in (1, 345)]


def alternating(completions, **others):
    "A reward that differs inside every group."
    return [float(number % 2) for number in range(len(completions))]


def step(model, folder, **given):
    "A trainer after two steps; what draws and what trains agree in them."
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=16,
        max_steps=2,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        bf16=True,
    )
    trainer = GRPOTrainer(model, alternating, config, ROWS, **given)
    trainer.train()
    assert all(record["grad_norm"] > 0 for record in trainer.log_history if "grad_norm" in record)
    assert trainer.log_history[0]["sampling/gap_mean"] < 0.05
    return trainer


@pytest.mark.parametrize("name", RELEASED)
def test_a_step_in_bfloat16(name, tmp_path):
    released(name, tmp_path / "model")
    adapter = LoraConfig(r=4, target_modules="all-linear")
    trainer = step(str(tmp_path / "model"), tmp_path / "run", peft_config=adapter)
    print(name, trainer.sampler.way if hasattr(trainer.sampler, "way") else trainer.sampler)


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral 3", "Qwen3-VL"])
def test_towers_stay_in_16_bits(name, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    released(name, tmp_path / "model")
    model, tokenizer = load_model(
        tmp_path / "model", max_seq_length=64, load_in_4bit=True, lora_r=4, quiet=True
    )
    kinds = {
        inside: any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in part.modules())
        for inside, part in [
            ("text", model.get_base_model().get_decoder()),
            *towers(model.get_base_model()).items(),
        ]
    }
    assert kinds.pop("text") and not any(kinds.values())
    step(model, tmp_path / "run", processing_class=tokenizer)
