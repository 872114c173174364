"""Dense models decoded in place, steps replayed: the same completions as call by call. (pytest -m
gpu)"""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout import module_decoding
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.rollout.sampling import SamplingParams
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.policy_model import quicken
from grpo_nb.training.trainer import GRPOTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIXED = dict(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16
)
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    # with fused layers and this library's attention, as the trainer loads them by name
    "Qwen2 quick": dict(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=16, max_window_layers=2
    ),
    "Qwen3 quick": dict(head_dim=24),
    "Phi3": {},
    "Lfm2": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "Mistral": dict(sliding_window=16),
    "Gemma3": MIXED,
    "Gemma4": MIXED
    | dict(
        num_kv_shared_layers=2,
        global_head_dim=32,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
    ),
    "Gemma2": MIXED | dict(query_pre_attn_scalar=16, attn_implementation="eager"),
    "Qwen3_5": dict(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}
PROMPTS = [
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    [5, 6],
    [7],
    [5, 6],
    [9, 3, 12, 11],
]
GREEDY = SamplingParams(temperature=0, max_tokens=90, stop_token_ids=(1, 2))
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny(family, dtype=torch.float32, **more):
    name = f"{family}Text" if family in ("Gemma3", "Gemma4", "Qwen3_5") else family.split()[0]
    settings = (
        dict(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            initializer_range=0.2,
        )
        | FAMILIES[family]
        | more
    )
    implementation = settings.pop("attn_implementation", "sdpa")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    made = transformers.AutoModelForCausalLM.from_config
    model = made(config, attn_implementation=implementation).to("cuda", dtype).eval()
    assert "quick" not in family or quicken(model, GRPOConfig())
    return model


def engines(model, **options):
    replayed = RolloutEngine(model, None, **options)
    assert "a step recorded" in replayed.way, replayed.way
    return replayed, RolloutEngine(model, None, through_modules=True, **options)


def assert_same(a, b):
    assert torch.equal(a.mask, b.mask) and torch.equal(a.completion_ids, b.completion_ids)
    torch.testing.assert_close(a.logps, b.logps, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_completions(family, monkeypatch):
    replayed, called = engines(tiny(family))
    expected = called.generate(PROMPTS, GREEDY)
    assert_same(replayed.generate(PROMPTS, GREEDY), expected)
    assert expected.lengths.max() > 20
    monkeypatch.setattr(
        module_decoding, "next_reach", lambda columns, room: min(room, columns + 11)
    )  # several recordings
    assert_same(replayed.generate(PROMPTS, GREEDY), expected)
    long = SamplingParams(temperature=0, max_tokens=90, stop_token_ids=(), repetition_penalty=1.2)
    assert_same(replayed.generate(PROMPTS, long), called.generate(PROMPTS, long))


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3 quick", "Gemma3"])
def test_bfloat16_is_as_near_as_call_by_call(family):
    replayed, called = engines(tiny(family, torch.bfloat16))
    a, b = (
        engine.generate(
            [[7, 8, 9], [5]], SamplingParams(temperature=0, max_tokens=1 + 40, stop_token_ids=())
        )
        for engine in (replayed, called)
    )
    same = (a.completion_ids == b.completion_ids).long().cumprod(1).bool()  # until they part
    assert same[:, :3].all() and (a.logps - b.logps)[same].abs().mean() < 0.05


@pytest.mark.parametrize(
    "params",
    [dict(), dict(top_p=0.8, top_k=20), dict(min_p=0.05, temperature=0.7, repetition_penalty=1.1)],
    ids=str,
)
def test_what_is_drawn(params):
    model = tiny("Llama")
    replayed, _ = engines(model)
    params = SamplingParams(n=16, max_tokens=70, seed=3, stop_token_ids=(1,), **params)
    first, again = (replayed.generate(PROMPTS, params) for _ in range(2))
    assert torch.equal(first.completion_ids, again.completion_ids) and torch.equal(
        first.logps, again.logps
    )  # a seed is a seed, through all recordings
    assert len({tuple(ids) for ids in first.completion_ids[:16].tolist()}) > 12
    other = replayed.generate(PROMPTS, SamplingParams(**{**vars(params), "seed": 4}))
    assert first.completion_ids.shape != other.completion_ids.shape or not torch.equal(
        first.completion_ids, other.completion_ids
    )
    if (
        params.top_p == 1 and params.repetition_penalty == 1
    ):  # log-probs as one forward pass has them
        for i in range(0, len(first.prompt_ids), 7):
            ids = torch.tensor(
                [first.prompt_ids[i] + first.completion_ids[i][first.mask[i]].tolist()],
                device="cuda",
            )
            with torch.no_grad():
                logps = (
                    model(ids)
                    .logits[0, :-1]
                    .log_softmax(-1)
                    .gather(-1, ids[0, 1:, None])[len(first.prompt_ids[i]) - 1 :, 0]
                )
            torch.testing.assert_close(first.logps[i][first.mask[i]], logps, atol=2e-4, rtol=0)


def test_draws_follow_the_distribution():
    model = tiny("Llama", vocab_size=8, initializer_range=0.05)
    replayed, _ = engines(model)
    drawn = replayed.generate(
        [[3, 4]], SamplingParams(n=2048, max_tokens=3, stop_token_ids=(), seed=0)
    )
    with torch.no_grad():
        start = torch.cat(
            [torch.tensor([[3, 4]] * 2048, device="cuda"), drawn.completion_ids[:, :2]], 1
        )
        expected = (
            model(start).logits[:, -1].softmax(-1).mean(0)
        )  # of the third token, over all beginnings
    counts = torch.bincount(drawn.completion_ids[:, 2], minlength=8) / 2048
    assert (counts - expected).abs().max() < 0.04


def test_adapters_and_their_changes():
    model = get_peft_model(
        tiny("Qwen2"), LoraConfig(r=4, target_modules=LINEARS, init_lora_weights=False)
    )
    replayed, called = engines(model)
    with_adapter = replayed.generate(PROMPTS, GREEDY)
    assert_same(with_adapter, called.generate(PROMPTS, GREEDY))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.mul_(-1)
    changed = replayed.generate(PROMPTS, GREEDY)
    assert_same(changed, called.generate(PROMPTS, GREEDY))
    assert changed.completion_ids.shape != with_adapter.completion_ids.shape or not torch.equal(
        changed.completion_ids, with_adapter.completion_ids
    )


def test_under_autocast():
    model = tiny("Qwen3").train()
    replayed, called = engines(model, autocast_dtype=torch.bfloat16)
    a, b = (
        engine.generate(
            [[7, 8, 9], [5]], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=())
        )
        for engine in (replayed, called)
    )
    same = (a.completion_ids == b.completion_ids).long().cumprod(1).bool()
    assert same[:, :3].all() and (a.logps - b.logps)[same].abs().mean() < 0.05 and model.training


@pytest.mark.filterwarnings("ignore:completions are drawn slowly")
def test_what_cannot_be_recorded_is_called(monkeypatch):
    model = tiny("Llama")
    expected = RolloutEngine(model, None, through_modules=True).generate(PROMPTS, GREEDY)
    handle = model.model.layers[0].mlp.register_forward_hook(
        lambda module, inputs, output: output * 1.0
    )
    engine = RolloutEngine(model, None)
    assert "not recorded: model.layers.0.mlp has a forward hook" in engine.way
    with pytest.warns(UserWarning, match="drawn slowly.*model.layers.0.mlp has a forward hook"):
        assert_same(engine.generate(PROMPTS, GREEDY), expected)
    handle.remove()
    assert "a step recorded" in engine.way
    inner = type(model.model.rotary_emb).forward

    def asking(self, x, position_ids):
        position_ids.max().item()  # waits for the card, as rotations that depend on the length do
        return inner(self, x, position_ids)

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", asking)
    engine, stream = RolloutEngine(model, None), torch.cuda.current_stream()
    assert "; not recorded: " in engine.way and "a step recorded" not in engine.way
    with pytest.warns(UserWarning, match="drawn slowly"):
        assert_same(engine.generate(PROMPTS, GREEDY), expected)
    for seed in (None, 3):
        assert (
            engine.generate(PROMPTS, SamplingParams(max_tokens=30, seed=seed))
            .logps.isfinite()
            .all()
        )  # random numbers go on
    assert torch.cuda.current_stream() == stream and torch.rand(3, device="cuda").isfinite().all()


def test_a_recording_that_fails_leaves_no_trace():
    model, stream = tiny("Llama"), torch.cuda.current_stream()

    def step():
        torch.rand(2, device="cuda").sum().item()

    with pytest.raises(RuntimeError):
        module_decoding.record_graph(step)
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    assert torch.rand(3, device="cuda").isfinite().all()
    replayed, called = engines(model)
    assert_same(replayed.generate(PROMPTS, GREEDY), called.generate(PROMPTS, GREEDY))


def test_a_model_on_another_card_is_called():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = tiny("Llama").to("cuda:1")
    engine = RolloutEngine(model, None)
    assert "not recorded: it is on cuda:1" in engine.way
    with pytest.warns(UserWarning, match="drawn slowly.*it is on cuda:1"):
        assert engine.generate(PROMPTS, GREEDY).lengths.max() > 20


def test_a_recording_that_fails_later_is_a_warning(monkeypatch):
    model = tiny("Llama")
    replayed, called = engines(model)

    def fails(step):
        raise RuntimeError("no room")

    monkeypatch.setattr(module_decoding, "record_graph", fails)
    with pytest.warns(UserWarning, match="could not be recorded.*no room"):
        rollout = replayed.generate(PROMPTS, GREEDY)
    assert_same(rollout, called.generate(PROMPTS, GREEDY))


def test_four_bits(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'grpo_nb[gpu]'")
    tokenizer = tiny_tokenizer()
    tiny(
        "Qwen2",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_hidden_layers=3,
    ).cpu().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_completion_length=40,
        per_device_train_batch_size=16,
        num_generations=4,
        learning_rate=1e-2,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        bf16=True,
    )
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    run = GRPOTrainer(
        str(tmp_path / "model"),
        lambda completion_ids, **_: [len(ids) + 0.1 * (ids[0] % 5) for ids in completion_ids],
        settings,
        addition_problems()[0],
        peft_config=LoraConfig(r=8, target_modules=LINEARS, init_lora_weights=False),
        quantization_config=quantization,
    )
    run.log.show = False
    assert run.quick and run.model.config._attn_implementation == "sink"
    assert "a step recorded" in run.engine.way, run.engine.way
    run.train()
    assert len(run.log_history) >= 3 and all(
        record["sampling/gap_mean"] < 0.05
        for record in run.log_history
        if "sampling/gap_mean" in record
    )  # the adapter as it is now, in every step
