"""Dense models in NF4 through bitsandbytes: one GRPO step moves the adapter and leaves the weights
in four bits as they were. (pytest -m gpu)"""

import pytest
import torch

from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.policy_logprobs import find_head
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) + 0.1 * (ids[0] % 5) for ids in completion_ids]


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_one_step_on_a_dense_model_in_nf4(family, tmp_path):
    bitsandbytes = pytest.importorskip(
        "bitsandbytes", reason="needs bitsandbytes: pip install 'grpo_nb[gpu]'"
    )
    import transformers
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    tokenizer = tiny_tokenizer()
    config = getattr(transformers, family + "Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    getattr(transformers, family + "ForCausalLM")(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    settings = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_completion_length=8,
        per_device_train_batch_size=16,
        num_generations=4,
        learning_rate=1e-2,
        max_steps=1,
        temperature=0.8,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
    )
    run = GRPOTrainer(
        str(tmp_path / "model"),
        length_reward,
        settings,
        addition_problems()[0],
        peft_config=LoraConfig(r=8, target_modules=LINEARS, init_lora_weights=False),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    )
    run.log.show = False
    packed = {
        name: module
        for name, module in run.model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    }
    assert len(packed) == 2 * len(LINEARS) and all(
        m.weight.dtype == torch.uint8
        and m.weight.quant_state.quant_type == "nf4"
        and m.weight.quant_state.nested
        for m in packed.values()
    )
    assert (
        find_head(run.model) is not None
    )  # the head is in 16 bits or more, so no whole logits are needed
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}

    run.train()
    (record,) = run.log_history
    assert (
        all(
            torch.isfinite(torch.tensor(float(record[name])))
            for name in ("loss", "grad_norm", "entropy")
        )
        and record["grad_norm"] > 0
        and record["skipped_updates"] == 0
    )
    assert record["sampling/gap_mean"] < 0.05 and record["reward_group_std"] > 0
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_" in name} and len(moved) == 2 * len(
        packed
    )  # every adapter, and nothing in four bits
