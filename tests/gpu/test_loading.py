"""Loading and export of a full-size gpt-oss-20b on a CUDA device: seconds, memory of card and host,
the same bytes and logits after a round trip over the disk; errors that leave the card as it was.

(pytest -m gpu -s tests/gpu/test_loading.py; 15 GB of disk for the folder that pytest makes,
--basetemp says where. The NF4 tests need bitsandbytes.)
"""

import gc
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from grpo_nb.model.export import save_merged, save_mxfp4
from grpo_nb.model.loading import load_model, memory_by_part
from grpo_nb.model.packed import PackedWeight
from grpo_nb.model.stored_weights import read_checkpoint
from grpo_nb.rollout.engine import RolloutEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GiB = 2**30


def config(layers=24, **changes):
    return GptOssConfig(
        **dict(num_hidden_layers=layers, num_local_experts=32, initializer_range=0.02) | changes
    )


def load(source, **settings):
    return load_model(source, **dict(max_seq_length=4096, quiet=True) | settings)[0]


def anonymous():
    return next(
        int(line.split()[1]) * 1024
        for line in open("/proc/self/status")
        if line.startswith("RssAnon")
    )


def measured(work):
    """What `work` returns, seconds, GiB at the card's peak beyond what was there, GiB of anonymous
    host memory likewise."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, before, seen, done, start = (
        torch.cuda.memory_allocated(),
        anonymous(),
        [0],
        threading.Event(),
        time.perf_counter(),
    )

    def look():
        while not done.wait(0.01):
            seen[0] = max(seen[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    torch.cuda.synchronize()
    return (
        result,
        time.perf_counter() - start,
        (torch.cuda.max_memory_allocated() - held) / GiB,
        (max(seen[0], anonymous()) - before) / GiB,
    )


def told(what, seconds, card, host):
    print(
        f"\n{torch.cuda.get_device_name()}, {what}: {seconds:.1f} s, {card:.2f} GiB on the "
        f"card at the peak, {host:.2f} GiB of anonymous host memory"
    )


def logits(model, length=64):
    ids = torch.arange(length, device="cuda")[None] * 37 % 200_000
    with torch.no_grad():
        return model(ids).logits


def off(a, b):
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).median())


def test_20b_over_the_disk_and_back(tmp_path):
    torch.zeros(1, device="cuda")
    model, *figures = measured(lambda: load(config(), load_in_4bit=True))
    told("random 20b in MXFP4", *figures)
    assert figures[0] < 120 and figures[1] < 13.5 and figures[2] < 2
    assert (
        abs({row["part"]: row["bytes"] for row in memory_by_part(model)}["experts"] / GiB - 9.45)
        < 0.05
    )
    expected = logits(model)
    assert expected.isfinite().all()

    export, *figures = measured(lambda: save_mxfp4(model, tmp_path / "m", quiet=True))
    told(f"save_mxfp4, {export.nbytes / 1e9:.1f} GB in {len(export.files)} files", *figures)
    assert figures[1] < 0.5 and figures[2] < 2.5
    first = model.model.layers[23].mlp.experts.gate_up_proj.blocks.cpu()
    del model
    model, *figures = measured(lambda: load(export.path, load_in_4bit=True, lora_r=8))
    told("load_model in MXFP4 with adapters of rank 8", *figures)
    assert figures[1] < 14.5 and figures[2] < 2.5
    base = model.get_base_model()
    assert (
        torch.equal(
            base.model.layers[23].mlp.experts.base_layer.base_layer.gate_up_proj.blocks.cpu(), first
        )
        and off(logits(model), expected) < 0.01
    )
    del model, base
    model, *figures = measured(
        lambda: load(
            export.path,
            load_in_4bit=True,
            offload_embedding=True,
            dtype="float16",
            lora_r=4,
            lora_targets="attention",
        )
    )
    told("load_model as for a T4: float16, the embedding on the host", *figures)
    assert figures[1] < 12.5 and figures[2] < 4
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.arange(256, device="cuda")[None]).logits.float().logsumexp(-1).mean()
        loss.backward()
    assert loss.isfinite() and all(
        p.grad.isfinite().all() for p in model.parameters() if p.requires_grad
    )
    del model
    if torch.cuda.mem_get_info()[1] > 45 * GiB:
        model, *figures = measured(lambda: load(export.path))
        told("load_model unpacked to bfloat16", *figures)
        assert figures[1] < 39.5 and figures[2] < 2.5 and off(logits(model), expected) < 0.02


def test_two_layers_against_transformers(tmp_path):
    model = load(config(2), load_in_4bit=True)
    save_mxfp4(model, tmp_path / "m", quiet=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m",
        dtype="bfloat16",
        device_map={"": 0},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    difference = off(logits(model), logits(theirs))
    print(f"\nlogits off by {difference:.1e} (median token)")
    assert difference < 0.02
    save_merged(model, tmp_path / "dense", quiet=True)
    again = load(tmp_path / "dense", load_in_4bit=True)  # packed on the way, from 16 bit
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters()):
        if isinstance(a, PackedWeight):
            assert torch.equal(a[:4].dequantize(), b[:4].dequantize()), name


def test_an_error_leaves_the_card_as_it_was(tmp_path):
    save_mxfp4(load(config(2), load_in_4bit=True), tmp_path / "m", quiet=True)
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    file = next(iter({s.file for s in read_checkpoint(tmp_path / "m").values() if s.name == name}))
    tensors = load_file(file)
    tensors[name].fill_(255)
    save_file(tensors, file, metadata={"format": "pt"})
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with pytest.raises(ValueError, match="scales of 255") as caught:
        load(tmp_path / "m", load_in_4bit=True)
    assert (
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
    ) == before and caught.value is not None
    with pytest.raises(
        ValueError, match=r"GiB on cuda:0, where [\d.]+ GiB are free: load_in_4bit=True needs"
    ):
        load(config(36, num_local_experts=512))
    assert torch.cuda.memory_allocated() == before[0]


def test_nf4(tmp_path):
    dense = dict(
        model_type="qwen3",
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    load(dense, dtype="bfloat16").save_pretrained(tmp_path / "m")
    stored, random = (
        load(tmp_path / "m", load_in_4bit=True, lora_r=4),
        load(dense, load_in_4bit=True, lora_r=4),
    )
    for model in (stored, random):
        rows = {row["part"]: row for row in memory_by_part(model)}
        assert (
            rows["MLP"]["stored as"] == "NF4"
            and abs(rows["MLP"]["bytes"] / rows["MLP"]["parameters"] - 0.516) < 0.005
        )
        logits(model)
        model(torch.arange(64, device="cuda")[None]).logits.float().logsumexp(-1).mean().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for key, p in stored.named_parameters():
        if "lora_B" in key:
            p.data.normal_(std=0.02)
    save_merged(stored, tmp_path / "merged", quiet=True)
    again = load(tmp_path / "merged")
    with torch.no_grad():
        ids = torch.arange(64, device="cuda")[None]
        assert off(again(ids).logits, stored(ids).logits) < 0.05
    assert "quantization_config" not in json.loads(
        (tmp_path / "merged" / "config.json").read_text()
    )
    model = load(config(1), load_in_4bit=True, attention_4bit=True, lora_r=4)
    rows = {row["part"]: row for row in memory_by_part(model)}
    assert (
        rows["attention"]["stored as"] == "NF4"
        and rows["experts"]["stored as"] == "MXFP4"
        and logits(model).isfinite().all()
    )


def test_what_is_loaded_is_sampled_from_as_it_lies():
    """Norms and rotations in one pass, packed experts, adapters: none of it sends the sampler the
    slow way through the modules."""
    small = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=8,
        hidden_size=512,
        intermediate_size=512,
        vocab_size=2048,
    )
    for settings in (
        dict(load_in_4bit=True, lora_r=4),
        dict(load_in_4bit=True, lora_r=4, offload_embedding=True),
        dict(lora_r=4, lora_targets="attention"),
    ):
        assert "Triton" in RolloutEngine(load(small, **settings), None).way
