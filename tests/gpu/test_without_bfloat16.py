"""A T4's way on whatever card this is: float16, the library is told of compute capability 7.5, and
whatever makes a tensor in bfloat16 is an error. (pytest -m gpu -s prints the errors)"""

import copy
import gc
import importlib.util
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from dense_models import dense_model

from grpo_nb.environments.arithmetic import addition_problems, exact_answer_reward
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import dense_kernels, filter_kernels
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.rollout import pad_left
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks/context.py"


@pytest.fixture(scope="module")
def context():
    "The benchmark that has a T4's limits."
    spec = importlib.util.spec_from_file_location("context_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def t4(context):
    """A T4's abilities without its memory, and no bfloat16. As on a T4 drawing is tried before its
    kernels are used, and no answer is known or kept."""
    with context.Limits(None, True), context.NoBFloat16():
        filter_kernels.works.cache_clear()
        yield
    filter_kernels.works.cache_clear()


def gpt_oss():
    "What the kernels take: heads of 64, windows of 16."
    sizes = dict(num_hidden_layers=4, head_dim=64, num_key_value_heads=2, sliding_window=16)
    return tiny_gpt_oss(num_experts=8, **sizes)[0]


def dense(name, lora, head_dim=64):
    sizes = dict(head_dim=head_dim, hidden_size=96, max_position_embeddings=512)
    return dense_model(name, lora=lora, **sizes)


MODELS = {
    "gpt-oss": gpt_oss,
    "Qwen3": lambda: dense("Qwen3", False),
    "Qwen3 with adapters": lambda: dense("Qwen3", True),
    "Llama": lambda: dense("Llama", True),
}


@torch.no_grad()
def logits_of(model, rollout):
    "Scores of a rollout's tokens in one pass over whole sequences, (N, T, V) float32."
    ids, mask = pad_left(rollout.prompt_ids, device="cuda")
    ids, mask = torch.cat([ids, rollout.completion_ids], 1), torch.cat([mask, rollout.mask], 1)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)
    start = ids.shape[1] - rollout.completion_ids.shape[1]
    return out.logits[:, start - 1 : -1].float()


def logps_of(model, rollout):
    "Their log-probs where nothing is cut, (N, T)."
    logps = logits_of(model, rollout).log_softmax(-1)
    return logps.gather(-1, rollout.completion_ids[..., None])[..., 0] * rollout.mask


@pytest.mark.parametrize("rows", [1, 40, 100])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_in_float16_are_as_near_to_float32_as_the_modules(t4, name, rows):
    exact = MODELS[name]().to("cuda")
    model = copy.deepcopy(exact).half()
    engine = RolloutEngine(model, None)
    assert "Triton" in engine.way
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + 23 * i % 100 for i in range(rows)]
    prompts = [torch.randint(7, 20, (n,), generator=generator).tolist() for n in lengths]
    params = SamplingParams(max_tokens=48, stop_token_ids=(), seed=0)
    rollout = engine.generate(prompts, params)
    truth = logps_of(exact, rollout)
    mine = (rollout.logps - truth).abs().mean().item()
    theirs = (logps_of(model, rollout) - truth).abs().mean().item()
    print(f"\n{name}, {rows} rows: mean error of log-probs {mine:.2e}, modules {theirs:.2e}")
    assert 0 < mine < 2 * theirs  # rounding; what is computed wrongly is off by far more


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_the_trials_pass_in_float16(t4, head_dim):
    model, start = dense("Qwen3", True, head_dim=head_dim).to("cuda").half(), time.perf_counter()
    assert "Triton" in RolloutEngine(model, None).way
    print(f"\nheads of {head_dim}: {time.perf_counter() - start:.1f} s, compilers included")


@pytest.mark.parametrize("rows", [1, 100])
def test_weights_in_nf4(t4, rows, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    MODELS["Qwen3"]().half().save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bits, dtype=torch.float16, device_map={"": 0}
    ).eval()
    engine = RolloutEngine(model, None)
    if "accelerate" in engine.way:
        pytest.skip("accelerate keeps hooks on the model")
    assert "Triton" in engine.way
    params = SamplingParams(max_tokens=20, stop_token_ids=(), seed=0)
    rollout = engine.generate([[3 + i % 30, 5, 9] for i in range(rows)], params)
    assert (logps_of(model, rollout) - rollout.logps).abs().mean() < 0.05


def test_a_wrong_kernel_sends_a_dense_model_through_its_modules(t4, monkeypatch):
    real = dense_kernels.activate
    monkeypatch.setattr(dense_kernels, "activate", lambda *given: 1.1 * real(*given))
    engine = RolloutEngine(MODELS["Qwen3"]().to("cuda").half(), None)
    with pytest.warns(UserWarning, match="its tensors alone give something else"):
        way = engine.way
    assert way.startswith("through the model's modules") and "logits are" in way
    params = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)
    assert engine.generate([[3, 5, 9]], params).completion_ids.shape == (1, 4)


def test_a_trial_without_memory_leaves_no_error(t4, monkeypatch):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)  # of the card: less than torch takes at once
    held = []  # what earlier tests have left room for
    try:
        for size in (2**20, 2**12, 2**9):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.warns(UserWarning, match="OutOfMemoryError"):
            assert not filter_kernels.works(torch.device("cuda", 0), torch.float16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.ones(2, device="cuda").sum() == 2


def test_filters_in_float16_leave_what_they_should(t4):
    model = MODELS["Qwen3"]().to("cuda").half()
    params = SamplingParams(max_tokens=16, stop_token_ids=(), seed=0, top_k=5)
    rollout = RolloutEngine(model, None).generate([[3 + i, 5, 9] for i in range(20)], params)
    logits = logits_of(model, rollout)
    chosen = logits.gather(-1, rollout.completion_ids[..., None])[..., 0]
    fifth = logits.topk(5).values[..., -1]
    assert (chosen >= fifth - 0.01 * logits.abs().amax()).all()  # rounding may swap neighbours


def test_a_step_of_training_in_float16(t4, tmp_path):
    model, tokenizer = tiny_gpt_oss()
    config = GRPOConfig(
        output_dir=str(tmp_path),
        max_completion_length=4,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        fp16=True,
        bf16=False,
    )
    run = GRPOTrainer(
        model, exact_answer_reward, config, addition_problems()[0], processing_class=tokenizer
    )
    run.log.show = False
    run.train()
    assert all(record["sampling/gap_mean"] < 0.05 for record in run.log_history[:3])


def test_a_bfloat16_is_an_error(t4):
    with pytest.raises(RuntimeError, match="bfloat16"):
        torch.ones(2, device="cuda").bfloat16()
