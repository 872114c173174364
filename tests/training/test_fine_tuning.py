"Supervised fine-tuning: the batch of written answers, the loss and the loop."

import pytest
import torch
from small_runs import one_thread  # noqa: F401

from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.fine_tuning import (
    adamw_with_warm_up,
    fine_tune,
    fine_tuning_step,
    written_batch,
)

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "12+34=", "answer": "46"}]


@pytest.fixture
def tiny():
    return tiny_gpt_oss()


def test_the_loss_is_transformers_cross_entropy(tiny):
    "Of each row alone, without padding, with the prompt's labels left out."
    model, tokenizer = tiny
    model.eval()
    total, tokens = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"]).input_ids
        answer = [*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        tokens += len(answer)
    batch = written_batch(ROWS, tokenizer)
    loss = fine_tuning_step(model, batch, *adamw_with_warm_up(model, 1e-3))
    assert loss == pytest.approx(total / tokens, rel=1e-5)


def test_prompts_are_padded_on_the_left_and_answers_on_the_right(tiny):
    _, tokenizer = tiny
    batch = written_batch(ROWS, tokenizer)
    assert batch.prompt_mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert batch.completion_mask.int().tolist() == [[1, 1, 0], [1, 1, 1]]
    ends = batch.completion_mask.sum(1) - 1
    assert (batch.completion_ids[torch.arange(2), ends] == tokenizer.eos_token_id).all()


def test_it_learns_by_heart_and_leaves_no_gradient(tiny):
    model, tokenizer = tiny
    model.eval()
    losses = fine_tune(model, tokenizer, ROWS, steps=60, batch_size=2, progress=False)
    assert len(losses) == 60 and losses[-1] < 0.2 * losses[0]
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_the_same_seed_gives_the_same_losses():
    runs = [
        fine_tune(*tiny_gpt_oss(), ROWS * 4, steps=3, batch_size=2, seed=seed, progress=False)
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_stop_is_called_at_its_interval(tiny):
    calls = []

    def stop():
        calls.append(len(calls))
        return len(calls) == 2

    losses = fine_tune(*tiny, ROWS, stop=stop, ask_every=3, steps=50, progress=False)
    assert len(losses) == 6 and len(calls) == 2


def test_the_learning_rate_rises_over_20_steps(tiny):
    model, _ = tiny
    optimizer, schedule = adamw_with_warm_up(model, 0.1)
    rates = []
    for _ in range(22):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1 * min(1, (k + 1) / 20) for k in range(22)])


def test_frozen_parameters_stay(tiny):
    model, tokenizer = tiny
    for p in model.model.layers.parameters():
        p.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fine_tune(model, tokenizer, ROWS, steps=2, progress=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(".layers." in name for name in moved)


def test_no_rows_is_an_error(tiny):
    with pytest.raises(ValueError, match="at least one"):
        fine_tune(*tiny, [])


def test_worked_answers_about_pictures():
    "They become likelier under their own pictures, and the tower moves with the rest."
    from seeing_models import dots

    from grpo_nb.model.pictures import tiny_seer

    model, processor = tiny_seer()
    rows = [
        {
            "prompt": [{"role": "user", "content": "="}],
            "image": dots(1 + 2 * i % 4, seed=i),
            "answer": str(1 + 2 * i % 4),
        }
        for i in range(8)
    ]
    before = model.model.visual.patch_embed.proj.weight.clone()
    losses = fine_tune(model, processor, rows, steps=4, batch_size=8, progress=False)
    assert losses[-1] < losses[0] - 0.5
    assert not torch.equal(before, model.model.visual.patch_embed.proj.weight)
