"""Stored weights: headers against the safetensors library, every fault of a folder in a sentence,
each way from a file to a parameter."""

from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from checkpoints import (
    SMALL,
    broken,
    edit,
    load,
    rewrite,
)
from packaging.requirements import Requirement
from safetensors.torch import load_file
from transformers import GptOssConfig

from grpo_nb.model.mxfp4 import dequantize, quantize
from grpo_nb.model.packed import EXPERTS, PackedWeight
from grpo_nb.model.stored_weights import (
    Form,
    forms,
    match,
    read_checkpoint,
    read_config,
    read_header,
    read_parameter,
    read_tokenizer,
    round_like_torch,
    skeleton,
)
from grpo_nb.rollout.read_layers import changed_forward

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]
CPU = torch.device("cpu")


def test_the_oldest_safetensors_that_is_asked_for_has_the_order_of_a_file():
    "transformers 5.9 is content with 0.4.3, and `safe_open(...).offset_keys` came with 0.6.1."
    settings = ConfigParser(delimiters=["="])
    settings.read(Path(__file__).parents[2] / "settings.ini")
    asked = map(Requirement, settings["DEFAULT"]["requirements"].split())
    (least,) = (one.specifier for one in asked if one.name == "safetensors")
    assert "0.6.1" in least and "0.5.3" not in least


def test_headers(plain, tmp_path):
    stored, tensors = read_checkpoint(plain), load_file(plain / "model.safetensors")
    file = plain / "model.safetensors"
    raw = file.read_bytes()
    at = len(raw) - sum(s.nbytes for s in stored.values())
    assert {name: s.shape for name, s in stored.items()} == {
        name: tuple(t.shape) for name, t in tensors.items()
    }
    for name, s in stored.items():  # in the order of the file
        assert raw[at : at + s.nbytes] == tensors[name].view(torch.uint8).numpy().tobytes()
        at += s.nbytes
    (tmp_path / "long.safetensors").write_bytes(raw + b"0")
    with pytest.raises(ValueError, match="file not fully covered.* Fetch it again"):
        read_header(tmp_path / "long.safetensors")


# ---- from headers to steps


def test_forms_and_their_bytes():
    model = skeleton(GptOssConfig(**SMALL), torch.float16)
    wanted = forms(model, torch.float16, load_in_4bit=True)
    kinds = {name: (form.kind, form.dtype) for name, form in wanted.items()}
    assert kinds["model.layers.0.mlp.experts.down_proj"] == ("mxfp4", torch.float16)
    assert kinds["model.layers.0.mlp.experts.down_proj_bias"] == ("dense", torch.float16)
    assert kinds["model.layers.0.input_layernorm.weight"] == ("dense", torch.float32)
    packed = PackedWeight(*quantize(torch.randn(4, 64, 32)), torch.float16)
    assert wanted["model.layers.0.mlp.experts.down_proj"].nbytes(4 * 64 * 32) == (
        packed.blocks.nbytes + packed.scales.nbytes
    )
    assert Form("dense", torch.bfloat16).nbytes(10) == 20
    assert Form("nf4", torch.bfloat16).nbytes(1024) == 512 + 17  # bytes of scales included
    attention = forms(model, torch.bfloat16, attention_4bit=True)
    assert {name for name, form in attention.items() if form.kind == "nf4"} == {
        name for name in attention if "proj.weight" in name and "attn" in name
    }


def test_steps_are_in_the_order_of_the_files(released):
    stored = read_checkpoint(released)
    model = skeleton(read_config(released)[0], torch.bfloat16)
    steps = match(model, stored, forms(model, torch.bfloat16))
    order = list(stored)
    places = [(str(step.sources[0].file), order.index(step.sources[0].name)) for step in steps]
    assert places == sorted(places) and len({file for file, _ in places}) == 3
    assert {step.name for step in steps} == dict(model.named_parameters()).keys()
    assert sum(step.nbytes for step in steps) == sum(s.nbytes for s in stored.values())


@pytest.mark.parametrize("four_bit", [True, False])
def test_four_ways_into_memory(released, plain, four_bit):
    "Packed or dense in the file, packed or dense in memory; no way leaves pages of the file in it."
    for folder in (released, plain):
        stored, config = read_checkpoint(folder), read_config(folder)[0]
        model = skeleton(config, torch.float32)
        tensors = {}
        for file in {s.file for s in stored.values()}:
            tensors |= load_file(file)
        steps = match(model, stored, forms(model, torch.float32, load_in_4bit=four_bit))
        for step in [step for step in steps if step.name.endswith(EXPERTS)]:
            read = read_parameter(step, CPU)
            if folder == released:
                both = [tensors[f"{step.name}_{x}"] for x in ("blocks", "scales")]
                truth = dequantize(*both, torch.float32).mT
            else:
                truth = tensors[step.name].float()
                if four_bit:
                    truth = dequantize(*quantize(truth.mT), torch.float32).mT
            assert isinstance(read, PackedWeight) == four_bit
            assert torch.equal(read.dequantize() if four_bit else read, truth)


def test_a_skeleton_has_no_memory():
    model = skeleton(GptOssConfig(**SMALL | dict(num_local_experts=10_000)), torch.bfloat16)
    assert all(p.is_meta for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_configs(released, plain, tmp_path):
    config, folder = read_config(released)
    assert folder == released and not hasattr(config, "quantization_config")
    given = GptOssConfig(**SMALL)
    mine, nothing = read_config(given)
    assert mine is not given and mine.to_dict() == given.to_dict() and nothing is None
    assert read_tokenizer(released, 8) is None and read_tokenizer(None, 8) is None
    assert read_tokenizer(plain, 8).model_max_length == 8


# ---- errors

BLOCKS, SCALES = (
    "model.layers.1.mlp.experts.down_proj_blocks",
    "model.layers.1.mlp.experts.down_proj_scales",
)
FAULTS = {
    "a shard is missing": (
        lambda f: (f / "model-00001-of-00003.safetensors").unlink(),
        "names 3 files, and 1 of them are not in .*model-00001-of-00003",
    ),
    "a shard is cut off": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(
            (f / "model-00001-of-00003.safetensors").read_bytes()[:-1]
        ),
        "file not fully covered.* it was cut off",
    ),
    "cut off in its header": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(
            (f / "model-00001-of-00003.safetensors").read_bytes()[:50]
        ),
        "cannot be read .* it was cut off",
    ),
    "a shard is empty": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(b""),
        "cannot be read .* it was cut off",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "pointer of Git LFS",
    ),
    "a damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "the tokenizer in .* cannot be read",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config cut off": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt'),
        "not a valid JSON file",
    ),
    "no weights": (
        lambda f: [p.unlink() for p in f.glob("model*")],
        "has neither model.safetensors nor .* it has config.json",
    ),
    "unknown architecture": (
        lambda f: edit(f, model_type="gpt_oss_9"),
        "model type `gpt_oss_9` but Transformers does not recognize",
    ),
    "no causal model": (
        lambda f: edit(f, model_type="clip_vision_model"),
        "'clip_vision_model' is no language model",
    ),
    "another quantisation": (
        lambda f: edit(f, quantization_config={"quant_method": "bitsandbytes"}),
        "quantised by 'bitsandbytes'",
    ),
    "a tensor is missing": (
        lambda f: rewrite(f, "model.layers.1.self_attn.sinks", None),
        r"1 are missing \(model.layers.1.self_attn.sinks \(4,\)\)",
    ),
    "blocks without scales": (
        lambda f: rewrite(f, SCALES, None),
        (
            r"1 are missing \(model.layers.1.mlp.experts.down_proj \(4, 32, 64\)\) and 1 belong to "
            r"nothing in it \(model.layers.1.mlp.experts.down_proj_blocks \(4, 64, 1, 16\) U8\)"
        ),
    ),
    "a tensor too many": (
        lambda f: rewrite(f, "model.extra", torch.zeros(3)),
        r"1 belong to nothing in it \(model.extra \(3,\) F32\)",
    ),
    "another shape": (
        lambda f: edit(f, vocab_size=128),
        r"lm_head.weight \(128, 64\)\) and .*lm_head.weight \(64, 64\) BF16",
    ),
    "another expert shape": (
        lambda f: rewrite(f, BLOCKS, torch.zeros(4, 64, 2, 16, dtype=torch.uint8)),
        r"down_proj_blocks \(4, 64, 2, 16\)",
    ),
    "another dtype": (
        lambda f: rewrite(f, "lm_head.weight", torch.zeros(64, 64, dtype=torch.int8)),
        r"lm_head.weight \(64, 64\) I8",
    ),
    "damaged scales": (
        lambda f: rewrite(f, SCALES, torch.full((4, 64, 1), 255, dtype=torch.uint8)),
        "scales of 255",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints(fault, tmp_path):
    change, sentence = FAULTS[fault]
    with pytest.raises((ValueError, OSError), match=sentence) as caught:
        load(broken(tmp_path, change), load_in_4bit=True)
    assert len(str(caught.value)) < 700  # the longest is of transformers


def test_what_is_no_model(tmp_path, plain):
    (tmp_path / "file").write_text("")
    for source, sentence in (
        (tmp_path / "nowhere", "is no folder in .*, and the hub gave no model"),
        ("./nowhere", "is no folder in .*, and the hub gave no model"),
        (tmp_path / "file", "is a file"),
        ("someone/some-model", "is no folder in .*, and the hub gave no model"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load(source)
    load(plain, lora_r=2).save_pretrained(tmp_path / "adapter")
    assert load(tmp_path / "adapter").peft_config["default"].r == 2  # gone on from


def test_a_layer_that_keeps_its_inputs_format_rounds_as_torchs_under_autocast():
    "A stand-in for bitsandbytes' Linear4bit, which is not installed everywhere."

    class Linear4bit(torch.nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                y = torch.nn.functional.linear(x.bfloat16(), self.weight.bfloat16())
            return y.to(x.dtype)

    plain, layer = (kind(8, 4, bias=False) for kind in (torch.nn.Linear, Linear4bit))
    layer.load_state_dict(plain.state_dict())
    layer.weight.quant_state = None  # what bitsandbytes' weights have
    for _ in range(2):
        round_like_torch(torch.nn.ModuleList([plain, layer]))
    assert len(layer._forward_pre_hooks) == 1 and not plain._forward_pre_hooks
    assert changed_forward(layer) is None  # so that steps through it may be recorded
    x = torch.randn(3, 8)
    assert layer(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for given in (layer(x), layer(x=x)):
            torch.testing.assert_close(given, plain(input=x), rtol=0, atol=0)


def test_a_table_in_four_bits_still_takes_token_ids():
    "As bitsandbytes' Embedding4bit, which is no linear layer."
    table, ids = torch.nn.Embedding(5, 4), torch.tensor([3, 1])
    expected = torch.nn.functional.embedding(ids, table.weight)
    table.weight.quant_state = None
    round_like_torch(table)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(table(ids), expected, rtol=0, atol=0)
