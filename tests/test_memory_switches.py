"""Every switch that saves memory on, against all of them off: the same losses; pieces of a micro-batch; activations on the host."""
import copy

import pytest
import torch
from peft import LoraConfig

from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model.experts import route_adapters
from grpo_nb.model.offload import offload_embedding
from grpo_nb.model.packed import EXPERTS, experts_of, pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training import trainer as trainer_module
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer
from datasets import Dataset


def reward(completions, **columns): return [(len(c) * 7 + ord(c[0]) if c else 0) % 5 / 4 for c in completions]


def run(tmp_path, model, tokenizer, peft=True, **settings):
    config = GRPOConfig(**{**dict(output_dir=str(tmp_path), max_steps=3, num_generations=4, per_device_train_batch_size=8, max_completion_length=6, learning_rate=1e-3, logging_steps=1, report_to="none", seed=1,
                                  save_strategy="no", disable_tqdm=True, temperature=0.9), **settings})
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in addition_problems()[0][:16]])
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]) if peft else None
    trainer = GRPOTrainer(model, reward, config, data, processing_class=tokenizer, peft_config=lora)
    return trainer, config


def losses(trainer):
    trainer.train()
    return [(record["loss"], record["grad_norm"], record["sampling/gap_mean"]) for record in trainer.log_history if "loss" in record]


def gpt_oss(packed):
    torch.manual_seed(0)
    model, tokenizer = tiny_gpt_oss()
    pack_experts(model)
    if not packed:
        for experts in experts_of(model).values():
            for name in EXPERTS: setattr(experts, name, torch.nn.Parameter(getattr(experts, name).dequantize().contiguous()))
    return model, tokenizer


def test_all_switches_on_and_off(tmp_path):
    plain, _ = run(tmp_path / "off", *gpt_oss(packed=False), gradient_checkpointing=False, mini_batch=1, logit_chunk_multiplier=1)
    plain.model.get_base_model().set_attn_implementation("eager")
    plain.model.get_base_model().set_experts_implementation("eager")
    model, tokenizer = gpt_oss(packed=True)
    model.requires_grad_(False)
    offload_embedding(model)
    model.set_attn_implementation("sink_lean")
    lean, _ = run(tmp_path / "on", model, tokenizer, offload_activations=True, mini_batch=4, logit_chunk_multiplier=3)
    assert route_adapters(lean.model, "routed_lean") == 2
    for a, b in zip(losses(plain), losses(lean), strict=True): assert a == pytest.approx(b, rel=2e-3, abs=2e-5)
    assert lean.store.parked > 0 and lean.store.host_bytes == 0  # given back at the end


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_pieces_make_the_same_gradient(tmp_path, loss_type):
    gradients = []
    for pieces in (1, 3):
        model, tokenizer = tiny_gpt_oss()
        level = "sequence" if loss_type == "luspo" else "token"
        trainer, _ = run(tmp_path / str(pieces), model, tokenizer, peft=False, mini_batch=pieces, loss_type=loss_type, importance_sampling_level=level, epsilon_high=5.0 if loss_type == "cispo" else None, max_steps=1)
        trainer.begin(None)
        trainer.open_window()
        trainer.batch = trainer.collect()
        assert len(trainer.pieces(trainer.batch)) == pieces
        trainer.accumulate(trainer.batch)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.parameters if p.grad is not None]))
    assert gradients[0].norm() > 0 and ((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 1e-4


def test_pieces_choose_themselves(tmp_path, monkeypatch):
    model, tokenizer = tiny_gpt_oss()
    trainer, _ = run(tmp_path, model, tokenizer, max_steps=1)
    trainer.begin(None)
    batch = trainer.collect()
    counts = []
    for free in (10**12, 3_000_000, 1):
        monkeypatch.setattr(trainer_module, "free_memory", lambda device: free)
        counts.append(len(trainer.pieces(batch)))
    assert counts[0] == 1 and counts[-1] == len(batch) == 8 and counts == sorted(counts)


def test_what_needs_all_tokens_is_not_split(tmp_path):
    model, tokenizer = tiny_gpt_oss()
    for settings in (dict(top_entropy_quantile=0.5), dict(entropy_coef=0.01, loss_type="grpo")):
        trainer, _ = run(tmp_path, copy.deepcopy(model), tokenizer, mini_batch=4, max_steps=1, **settings)
        trainer.begin(None)
        assert len(trainer.pieces(trainer.collect())) == 1


def test_offloading_wants_checkpointing():
    with pytest.raises(ValueError, match="offload_activations=True moves what gradient checkpointing keeps"): GRPOConfig(offload_activations=True, gradient_checkpointing=False)
