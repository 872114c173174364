"The trainer on a CUDA device, in each number format, stopped and resumed. (pytest -m gpu)"

import json
import os
import subprocess
import sys

import pytest
import torch

from grpo_nb.environments.arithmetic import addition_problems, number_found_reward
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def brief_reward(completion_ids, **kwargs):
    return [(4 - len(ids)) / 4 for ids in completion_ids]


def trainer(folder, **changes):
    model, tokenizer = tiny_gpt_oss()
    config = GRPOConfig(
        **{
            **dict(
                output_dir=str(folder),
                max_completion_length=4,
                per_device_train_batch_size=64,
                learning_rate=2e-3,
                max_steps=20,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                bf16=False,
            ),
            **changes,
        }
    )
    result = GRPOTrainer(
        model,
        [number_found_reward, brief_reward],
        config,
        addition_problems()[0],
        processing_class=tokenizer,
    )
    result.log.show = False
    return result


@pytest.mark.parametrize(
    "precision",
    [dict(bf16=True), dict(fp16=True), dict(bf16=False)],
    ids=["bf16", "fp16", "float32"],
)
def test_learns_on_the_gpu(tmp_path, precision):
    run = trainer(tmp_path, **precision)
    run.train()
    rewards = [record["reward"] for record in run.log_history]
    assert (
        next(run.model.parameters()).is_cuda and rewards[0] < 0.8 and sum(rewards[-5:]) > 5 * 0.97
    )
    assert all(
        record["sampling/gap_mean"] < 0.05 and record["peak_memory_gib"] > 0
        for record in run.log_history
    )


def test_resumed_on_the_gpu_within_tolerance(tmp_path):
    whole = trainer(tmp_path / "whole", max_steps=8)
    whole.train()
    first = trainer(tmp_path / "part", max_steps=8, save_strategy="steps", save_steps=4)
    first.train()
    again = trainer(tmp_path / "part", max_steps=8)
    again.train(resume_from_checkpoint=tmp_path / "part" / "checkpoint-4")
    for a, b in zip(whole.log_history, again.log_history, strict=True):
        assert a["reward"] == pytest.approx(b["reward"], abs=0.05) and a["loss"] == pytest.approx(
            b["loss"], abs=0.02
        )


def test_a_model_given_by_name_in_four_bits_with_an_adapter(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'grpo_nb[gpu]'")
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    model, tokenizer = tiny_gpt_oss()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_completion_length=4,
        per_device_train_batch_size=64,
        learning_rate=1e-2,
        max_steps=30,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
    )
    run = GRPOTrainer(
        str(tmp_path / "model"),
        [number_found_reward, brief_reward],
        config,
        addition_problems()[0],
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    )
    run.log.show = False
    kinds = {type(module).__name__ for module in run.model.modules()}
    run.train()
    rewards = [record["reward"] for record in run.log_history]
    trained = [p for p in run.model.parameters() if p.requires_grad]
    assert "Linear4bit" in kinds and all(p.dtype == torch.float32 for p in trained)
    assert sum(rewards[-5:]) > sum(rewards[:5]) and all(
        record["sampling/gap_mean"] < 0.05 for record in run.log_history
    )


def test_a_reward_model_on_the_gpu(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    model, tokenizer = tiny_gpt_oss()
    judge = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=1,
        )
    )
    config = GRPOConfig(
        output_dir=str(tmp_path),
        max_completion_length=4,
        per_device_train_batch_size=64,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    run = GRPOTrainer(
        model,
        judge,
        config,
        addition_problems()[0],
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
    )
    run.log.show = False
    run.train()
    assert next(judge.parameters()).is_cuda and run.log_history[-1]["reward_group_std"] > 0


FIRST = """
import json, sys, threading
import torch, triton
from transformers import GptOssForCausalLM
from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model import experts_grouped
from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.model.loading import select_experts
from grpo_nb.model.packed import pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

compiled = []

def heard(*, src, cache_hit, **_):
    thread = threading.current_thread().name
    early = not cache_hit and thread == "compile_early"
    alone = not cache_hit and not early and not thread.startswith("ThreadPoolExecutor")
    compiled.append((src.name, alone, early))

def dirty(gib):  # what an empty tensor finds
    used = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_()
    del used

triton.knobs.compilation.listener = heard
experts_grouped.UNPACKED = 2**15  # one expert of a layer at a time
model, tokenizer = tiny_gpt_oss(head_dim=64, sliding_window=16, num_experts=8)
model = GptOssForCausalLM(model.config).to("cuda", torch.bfloat16).requires_grad_(False)
model.set_attn_implementation("sink")
pack_experts(model)
model = add_adapters(model, 4, resolve_targets(model, "all"))
select_experts(model, "routed_lean")
config = GRPOConfig(
    output_dir=sys.argv[1], max_completion_length=64, per_device_train_batch_size=16,
    num_generations=8, max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True,
    bf16=True, gradient_checkpointing=True, seed=int(sys.argv[2]),
)
trainer = GRPOTrainer(
    model, lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids], config,
    addition_problems()[0], processing_class=tokenizer,
)
trainer.log.show = False
dirty(2)
trainer.train()
print(json.dumps(compiled))
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_first_step_compiles_its_kernels_together(tmp_path, seed):
    """Those of drawing and those of training, in a process of its own: modules with kernels are
    imported in its first step, too. Few kernels are left to be compiled when they are reached; and
    what memory holds where no kernel has written does no harm."""
    pytest.importorskip("triton")
    made = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    script = [sys.executable, "-c", FIRST, str(tmp_path / "run"), str(seed)]
    done = subprocess.run(script, env=made, capture_output=True, text=True)
    assert not done.returncode and "one by one" not in done.stderr, done.stderr[-3000:]
    compiled = json.loads(done.stdout.splitlines()[-1])
    alone = [name for name, is_alone, _ in compiled if is_alone]
    assert [name for name, _, early in compiled if early] == ["_softmax"]
    assert len(compiled) - len(alone) >= 8 and len(alone) <= 3, compiled
