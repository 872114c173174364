"""The formulas of a dense layer, where the families differ."""

import pytest
import torch
import transformers
from dense_models import dense_model

from grpo_nb.rollout.decode_ops import Norm, family_norm


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_norms_are_the_modules_for_every_pair_of_formats(stream, weight):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).to(stream)
    for name, gemma in (("Llama", False), ("Gemma3Text", True)):
        module = dense_model(name).model.norm.to(weight)
        gamma = 1 + module.weight.float() if gemma else module.weight
        mine = family_norm(x, Norm(gamma, 1e-6, not gemma), torch.float32)
        assert torch.equal(mine, module(x).float())


def test_every_family_of_the_table_is_a_class_of_transformers(monkeypatch):
    from grpo_nb.model.limits import FAMILIES, Family, family_of_type

    monkeypatch.setitem(FAMILIES, "SeedOss", Family("SeedOss"))  # of type seed_oss
    for name, family in FAMILIES.items():
        kind = getattr(transformers, f"{name}ForCausalLM").config_class
        kinds = (
            kind.model_type,
            getattr(kind, "sub_configs", {}).get("text_config", kind).model_type,
        )
        assert [family_of_type(one) for one in kinds] == [family] * 2
