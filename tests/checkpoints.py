"""What the tests of loading share: a tiny checkpoint in the released layout, ways to damage it, and
a call of `load_model` with short settings."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from grpo_nb.model.loading import load_model
from grpo_nb.model.mxfp4 import quantize
from grpo_nb.model.packed import EXPERTS

SMALL = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
)


def load(source, **settings):
    model, tokenizer = load_model(source, **{"max_seq_length": 128, "quiet": True} | settings)
    return model


def write_released(folder, shards=3, seed=0, **changes):
    """A tiny checkpoint in the released layout, blocks and scales of some weights in different
    shards."""
    config, torch_random = GptOssConfig(**SMALL | changes), torch.Generator().manual_seed(seed)
    model, tensors = AutoModelForCausalLM.from_config(config), {}
    for name, p in model.state_dict().items():
        value = torch.randn(p.shape, generator=torch_random) * (0.3 if p.dim() > 1 else 0.1) + (
            "norm" in name
        )
        if name.endswith(EXPERTS):
            tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), quantize(value.mT)))
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[name] = value.bfloat16()
    folder.mkdir()
    settings = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    names = sorted(tensors)
    places = {
        name: f"model-{i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in set(places.values()):
        save_file(
            {n: tensors[n] for n in names if places[n] == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


def broken(tmp_path, change, **settings):
    folder = write_released(tmp_path / "m", **settings)
    change(folder)
    return folder


def edit(folder, **changes):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def rewrite(folder, name, value):
    "Another tensor under a name; None: none."
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors or value is not None and file.name.startswith("model-00000"):
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
            save_file(tensors, file, metadata={"format": "pt"})
            places = json.loads((folder / "model.safetensors.index.json").read_text())
            if value is None:
                places["weight_map"].pop(name)
            else:
                places["weight_map"][name] = file.name
            (folder / "model.safetensors.index.json").write_text(json.dumps(places))
            return
