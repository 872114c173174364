"""Dense families on a GPU: kernels and recorded steps beside the modules. (pytest -m gpu)"""

import pytest
import torch
from dense_models import dense_model
from peft import LoraConfig, get_peft_model
from small_decoders import by_modules, parts_of

from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model.loading import load_model
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# what the kernels take: heads of at least 32, windows of at least 16
SIZES = dict(head_dim=64, hidden_size=96, max_position_embeddings=512)
WINDOWS = {"Qwen2 windows": 16, "Mistral": 32, "Phi3": 16, "Gemma3Text": 16}


@pytest.mark.parametrize("rows", [1, 3, 40, 100])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "name", ["Llama", "Qwen2", "Qwen2 windows", "Qwen3", "Mistral", "Phi3", "Gemma3Text"]
)
def test_float32_equals_the_modules(name, lora, rows):
    windows = dict(sliding_window=WINDOWS[name]) if name in WINDOWS else {}
    model = dense_model(name, lora=lora, **SIZES, **windows).to("cuda")
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 40, (1 + 37 * i % 300,), generator=generator).tolist() for i in range(rows)
    ]
    rollout = engine.generate(prompts, SamplingParams(max_tokens=30, stop_token_ids=(7,), seed=0))
    torch.testing.assert_close(by_modules(model, rollout), rollout.logps, atol=2e-3, rtol=0)


@pytest.mark.parametrize("bits", ["sixteen", "load_in_4bit", "load_in_fp8"])
def test_the_sampler_follows_the_adapter(bits, tmp_path):
    "Large steps, so that rounding is small beside what the adapter does, in every update."
    if bits == "load_in_4bit":
        pytest.importorskip("bitsandbytes")
    tokenizer = tiny_tokenizer()
    ends = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    kind = dict(num_hidden_layers=3, vocab_size=len(tokenizer), **ends)
    dense_model("Qwen2", torch.bfloat16, **SIZES | kind).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    held = {} if bits == "sixteen" else {bits: True}
    given = dict(max_seq_length=256, dtype="bfloat16", quiet=True)
    model, _ = load_model(tmp_path / "model", **given, **held)
    settings = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_completion_length=40,
        per_device_train_batch_size=64,
        num_generations=4,
        learning_rate=3e-3,
        max_steps=12,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        guard_every=1,
        guard_max_gap=10.0,
        guard_slope_margin=10.0,
    )
    run = GRPOTrainer(
        model,
        lambda completion_ids, **_: [len(ids) + 0.1 * (ids[0] % 5) for ids in completion_ids],
        settings,
        addition_problems()[0],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    run.log.show = False
    run.train()
    slopes = [row["guard/slope"] for row in run.log_history if "guard/slope" in row]
    assert len(slopes) >= 6 and all(abs(slope - 1) < 0.1 for slope in slopes), slopes


@pytest.mark.parametrize("rows", [3, 100])
def test_weights_in_nf4_with_adapters(rows, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dense_model("Qwen3", torch.bfloat16, **SIZES).save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bits, dtype=torch.bfloat16, device_map={"": 0}
    )
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora).eval()
    engine = RolloutEngine(model, None)
    if "accelerate" in engine.way:
        pytest.skip("accelerate keeps hooks on the model")
    assert "Triton" in engine.way
    rollout = engine.generate(
        [[3 + i % 30, 5, 9] for i in range(rows)],
        SamplingParams(max_tokens=20, stop_token_ids=(), seed=0),
    )
    assert (by_modules(model, rollout) - rollout.logps).abs().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Qwen2 windows", "Gemma3Text"])
def test_a_long_prompt_is_read_in_parts(name, dtype, monkeypatch):
    windows = dict(sliding_window=WINDOWS[name]) if name in WINDOWS else {}
    model = dense_model(name, dtype, **SIZES, **windows).to("cuda")
    parts_of(128, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in (300, 40, 257)]
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way
    params = SamplingParams(max_tokens=30, stop_token_ids=(7,), seed=0, n=2)
    rollout = engine.generate(prompts, params)
    apart = (by_modules(model, rollout) - rollout.logps).abs()
    assert apart.max() < 2e-3 if dtype == torch.float32 else apart.mean() < 0.05
