"""All weights train on a card: what is planned, and `max_memory_allocated`. (pytest -m gpu)"""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_nb.model.memory_bytes import read_shape
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.planning.plan import plan_of, setup_of
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = dict(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    pad_token_id=0,
)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"])
def test_a_run_takes_what_was_planned(optim, dtype, checkpointing, tmp_path):
    "Two updates of some 400 million numbers; 512 tokens a completion."
    config = GRPOConfig(
        output_dir=str(tmp_path),
        optim=optim,
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=512,
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
    )
    kind = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(kind)
    model = model.to("cuda", torch.float32 if dtype == "fp32" else torch.bfloat16)
    trainer = GRPOTrainer(
        model,
        [lambda completion_ids, **_: [float(i) for i in range(len(completion_ids))]],
        config,
        [{"prompt": "1+1="}] * 8,
        processing_class=tiny_gpt_oss()[1],
    )
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    measured = torch.cuda.max_memory_allocated()
    setup = setup_of(read_shape(kind), "H100", config, weights=dtype, lora_r=0, prompt_length=4)
    assert plan_of(setup).allocated() == pytest.approx(measured, rel=0.1)
