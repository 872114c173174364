"The policy that a run began with: whole models and adapters, what a checkpoint needs of it."

import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_runs import small_model

from grpo_nb.training.policy_model import Reference


def policy(kind):
    model, _ = small_model()
    if kind == "full":
        return model
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=kind == "fresh")
    return get_peft_model(model, lora)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[8, 9, 10]])).logits


@torch.no_grad()
def train(model):
    for p in model.parameters():
        if p.requires_grad:
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["full", "fresh", "trained"])
def test_the_start_is_lent_and_given_back(kind):
    model = policy(kind)
    reference, before = Reference(model), logits(model)
    train(model)
    now = logits(model)
    with reference.policy(model) as start:
        assert torch.equal(logits(start), before) and not torch.equal(now, before)
    assert torch.equal(logits(model), now)
    assert (reference.model is None) == (kind != "full")


@pytest.mark.parametrize("kind", ["full", "trained"])
def test_it_is_given_back_after_an_error_too(kind):
    model = policy(kind)
    reference = Reference(model)
    train(model)
    now = logits(model)
    with pytest.raises(KeyError), reference.policy(model):
        raise KeyError
    assert torch.equal(logits(model), now)
    lent = reference.policy(model)
    lent.__enter__()  # an interruption that left before the way out
    reference.restore()
    assert torch.equal(logits(model), now)


@pytest.mark.parametrize("kind", ["full", "trained"])
def test_it_follows_by_a_share(kind):
    model = policy(kind)
    reference = Reference(model)
    kept = [w.clone() for w in reference.weights()]
    train(model)
    own = [p for p in model.parameters() if kind == "full" or p.requires_grad]
    reference.sync(model, share=0.25)
    for before, now, p in zip(kept, reference.weights(), own, strict=True):
        assert torch.allclose(now, 0.75 * before + 0.25 * p.detach(), atol=1e-7)


def test_norms_stand_for_a_copy_alone():
    full, adapted = Reference(policy("full")), Reference(policy("trained"))
    expected = [w.norm().item() for w in full.weights()]
    assert full.norms() == pytest.approx(expected) and adapted.norms() == []


class Interrupt:
    "Raises KeyboardInterrupt at the n-th line that Reference.policy and restore run."

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name not in ("policy", "restore"):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("kind", ["full", "trained"])
def test_ctrl_c_at_any_line_of_the_swap_loses_no_weight(kind):
    model = policy(kind)
    reference, before = Reference(model), logits(model)
    train(model)
    now, interrupted = logits(model), 0
    for n in range(1, 60):
        sys.settrace(Interrupt(n))
        try:
            with reference.policy(model):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        with reference.policy(model) as start:  # used once more, as if nothing had been
            assert torch.equal(logits(start), before), n
        assert torch.equal(logits(model), now), n
    assert interrupted > 5
