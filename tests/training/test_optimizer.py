"Optimizers by name, what decays, and the rate over a run beside transformers' own schedules."

import pytest
import torch
from small_runs import ROWS, digits, small_config, small_model
from transformers import get_scheduler

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.optimizer import (
    check_given_optimizer,
    decay_groups,
    make_optimizer,
    make_schedule,
)


@pytest.fixture(scope="module")
def parameters():
    return dict(tiny_gpt_oss()[0].named_parameters())


@pytest.mark.parametrize(
    "name, kind",
    [
        ("adamw_torch", torch.optim.AdamW),
        ("adamw_torch_fused", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
    ],
)
def test_an_optimizer_has_the_settings(name, kind, parameters):
    settings = dict(learning_rate=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-5)
    made = make_optimizer(GRPOConfig(optim=name, **settings), parameters)
    group = made.param_groups[0]
    assert type(made) is kind and group["lr"] == 0.3
    if kind is torch.optim.AdamW:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-5)
        assert bool(group["fused"]) == (name == "adamw_torch_fused")


def test_adafactor_is_transformers(parameters):
    made = make_optimizer(GRPOConfig(optim="adafactor", learning_rate=0.3), parameters)
    assert type(made).__name__ == "Adafactor" and made.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_without_bitsandbytes_there_is_a_sentence(name, parameters, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="install `bitsandbytes`.*pip install"):
        make_optimizer(GRPOConfig(optim=name), parameters)


def test_norms_and_biases_do_not_decay(parameters):
    decayed, spared = decay_groups(parameters, 0.1)
    names = {id(p): name for name, p in parameters.items()}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[id(p)] or "bias" in names[id(p)] for p in spared["params"])
    assert not any("norm" in names[id(p)] or "bias" in names[id(p)] for p in decayed["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(parameters)
    assert len(decay_groups(parameters, 0.0)) == 1


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_the_rate_is_transformers(kind):
    def rates(schedule_of):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        schedule, seen = schedule_of(optimizer), []
        for _ in range(20):
            seen.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return seen

    config = GRPOConfig(lr_scheduler_type=kind, warmup_steps=4, learning_rate=0.5)
    ours = rates(lambda optimizer: make_schedule(config, optimizer, 20))
    assert ours == rates(lambda optimizer: get_scheduler(kind, optimizer, 4, 20))


def test_an_optimizer_of_other_weights_is_refused(tmp_path):
    (model, tokenizer), weights = small_model(), small_model()[0].parameters()
    given = dict(train_dataset=ROWS, processing_class=tokenizer)
    for_another = torch.optim.SGD(weights, 1e-2)
    with pytest.raises(ValueError, match="holds none of the weights that train.*get_peft_model"):
        GRPOTrainer(model, digits, small_config(tmp_path), **given, optimizers=(for_another, None))
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    some = torch.optim.SGD(norms, 1e-2)
    with pytest.warns(UserWarning, match="leaves out .* tensors that train.*: model.embed_tokens"):
        GRPOTrainer(model, digits, small_config(tmp_path), **given, optimizers=(some, None))
    check_given_optimizer(torch.optim.SGD(model.parameters(), 1e-2), dict(model.named_parameters()))
