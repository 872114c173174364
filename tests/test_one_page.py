"""GRPO on one page is the method of the library: the same rollouts give the same advantages, loss,
gradients and weights."""

import ast
import copy
import json
import re
from pathlib import Path

import matplotlib
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.algorithm.logprobs import selective_log_softmax
from grpo_nb.algorithm.losses import grpo_loss
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.trainer import GRPOTrainer

PAGE = Path(__file__).resolve().parent.parent / "nbs/lessons/00_grpo_on_one_page.ipynb"
CELLS = [
    "".join(cell["source"])
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
SMALL = {"STEPS": "2", "PROMPTS, G": "(4, 4)", "ROWS": "7", "MAX_TOKENS": "4"}
NUMBERS = dict(rtol=0, atol=1e-6)


def run_page(**settings):
    "The names of the page after a run of all its cells, with other settings and a short warm-up."
    matplotlib.use("Agg")
    source = "\n".join(CELLS).replace("steps=300", "steps=3").replace("n=300", "n=20")
    for name, value in {**SMALL, **settings}.items():
        source, found = re.subn(rf"(?m)^{name} = [^#\n]*", f"{name} = {value}  ", source)
        assert found == 1, f"the page sets {name} {found} times"
    names = {}
    exec(compile(source, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def page():
    with torch.random.fork_rng():
        return run_page()


def test_the_page_is_short_and_narrow():
    lines = [line for cell in CELLS for line in cell.splitlines() if line.strip()]
    assert len(lines) <= 200 and max(map(len, lines)) <= 100
    title = "".join(json.loads(PAGE.read_text(encoding="utf-8"))["cells"][0]["source"])
    assert f"in {len(lines)} lines" in title


def test_the_page_imports_nothing_of_the_library():
    nodes = [node for cell in CELLS for node in ast.walk(ast.parse(cell))]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in named} == {
        *("matplotlib", "random", "re", "time", "torch", "transformers")
    }


def test_a_whole_run_moves_the_weights_and_keeps_a_log(page):
    assert len(page["log"]) == 2
    assert 0 <= page["before"] <= 1 and 0 <= page["after"] <= 1
    assert len(page["figure"].axes) == 1


def test_held_out_sums_are_not_trained_on(page):
    trained, _ = page["problems"](3000)
    held_out, _ = page["problems"](1000, held_out=True)
    assert len(set(trained)) > 800 and len(set(held_out)) > 90
    assert not set(trained) & set(held_out)


def random_batch(rows=12, T=5):
    "logps, old_logps, mask (N, T) and rewards (N,), with ratios that are clipped on both sides."
    chance = torch.Generator().manual_seed(0)
    logps, drift = torch.randn(2, rows, T, generator=chance)
    lengths = torch.randint(1, T + 1, (rows, 1), generator=chance)
    rewards = torch.randint(0, 3, (rows,), generator=chance).float()
    rewards[:4] = 1.0  # a group that teaches nothing
    return logps - 3, logps - 3 + 0.3 * drift, torch.arange(T) < lengths, rewards


def test_the_same_rewards_give_the_same_advantages(page):
    rewards = random_batch()[-1]
    ours = group_advantages(rewards, num_generations=4).values
    assert ours.abs().max() > 0.5
    torch.testing.assert_close(page["advantages_of"](rewards, 4), ours, **NUMBERS)


def test_the_same_log_probs_give_the_same_loss_and_gradients(page):
    logps, old_logps, mask, rewards = random_batch()
    A = group_advantages(rewards, num_generations=4).values
    a, b = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    theirs = page["grpo_loss"](a, old_logps, A, mask, mask.sum())
    ours = grpo_loss(b, A, mask, old_logps=old_logps)
    assert ours.metrics["clip_ratio/low_mean"] > 0 and ours.metrics["clip_ratio/high_mean"] > 0
    (theirs, ours) = (theirs, ours.loss)
    theirs.backward(), ours.backward()
    torch.testing.assert_close(theirs, ours, **NUMBERS)
    torch.testing.assert_close(a.grad, b.grad, **NUMBERS)


def test_log_probs_are_those_of_each_row_without_padding(page):
    prompts = ["1+2=", "34+5=", "67+8="]
    prompt_ids, prompt_mask, completion_ids, mask = rollout = page["sample"](prompts, 4)
    assert not prompt_mask.all() and mask.any(1).all()
    logps = page["log_probs"](*rollout).detach()
    for i, length in enumerate(mask.sum(1).tolist()):
        prompt, drawn = prompt_ids[i][prompt_mask[i]], completion_ids[i, :length]
        logits = page["model"](torch.cat([prompt, drawn])[None]).logits[:, -length - 1 : -1]
        ours = selective_log_softmax(logits.detach(), drawn[None])[0]
        torch.testing.assert_close(logps[i, :length], ours, rtol=0, atol=1e-5)


def test_the_mask_ends_with_the_end_which_counts(page):
    *_, completion_ids, mask = page["sample"](["1+2="], 400)
    ended = completion_ids == page["tokenizer"].eos_token_id
    for ids, counts in zip(ended.tolist(), mask.tolist()):
        length = ids.index(True) + 1 if True in ids else len(ids)
        assert counts == [True] * length + [False] * (len(ids) - length)
    assert 0 < ended.any(1).sum() < 400


def recorded(page, steps):
    "(rows, rollouts, weights) of a few steps of the page on rewards that differ inside groups."
    rows, rollouts, sample = [], [], page["sample"]

    def keep(prompts, G):
        prompt_ids, prompt_mask, completion_ids, mask = drawn = sample(prompts, G)
        rows.extend({"prompt": prompt} for prompt in prompts)
        rollouts.append(
            {
                "prompt_ids": [ids[real].tolist() for ids, real in zip(prompt_ids, prompt_mask)],
                "completion_ids": [ids[real].tolist() for ids, real in zip(completion_ids, mask)],
                "logprobs": None,
            }
        )
        return drawn

    page |= {"sample": keep, "rewards_of": lambda texts, answers: torch.tensor(worth(texts))}
    for _ in range(steps):
        page["step"]()
    return rows, rollouts, page["model"].state_dict()


def worth(texts):
    "A reward that a nearly random model gets, too."
    return [float(sum(map(ord, text)) % 5) for text in texts]


def test_the_same_rollouts_give_the_same_weights(tmp_path):
    "Steps of two updates each, in pieces of seven rows there and in one piece here."
    steps, page = 4, run_page(STEPS="1", LR="1e-3", EPSILON="0.01")
    model = copy.deepcopy(page["model"])
    began = copy.deepcopy(model.state_dict())
    page["optimizer"] = torch.optim.AdamW(page["model"].parameters(), lr=1e-3, weight_decay=0.0)
    rows, rollouts, theirs = recorded(page, steps)
    given = iter(rollouts)
    trainer = GRPOTrainer(
        model,
        lambda completions, **_: worth(completions),
        GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=16,
            num_generations=4,
            num_iterations=2,
            max_completion_length=4,
            max_steps=2 * steps,
            learning_rate=1e-3,
            epsilon=0.01,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
        ),
        rows,
        processing_class=page["tokenizer"],
        rollout_func=lambda prompts, trainer: next(given),
    )
    trainer.train()
    ours = trainer.model.state_dict()
    assert any(record["clip_ratio/region_mean"] > 0 for record in trainer.log_history)
    assert max((ours[name] - began[name]).abs().max() for name in ours) > 2e-3
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-5, msg=name)


def saved_qwen3(folder):
    "A Qwen3 with random weights and a tokenizer with a chat template, as the hub has them."
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["What is 1 * 2? Reply with the number alone."], 300, 1, False, special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token=special[0], eos_token=special[2]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_switch_runs_a_model_from_a_folder(tmp_path, dtype):
    saved_qwen3(tmp_path)
    page = run_page(MODEL=repr(str(tmp_path)), LR="1e-2", dtype=f"torch.{dtype}")
    prompt_ids, prompt_mask = page["encode"](["What is 1 * 2?", "What is 11 * 22?"])
    text = page["tokenizer"].decode(prompt_ids[0][prompt_mask[0]])
    assert text.startswith("<|im_start|>user\nWhat is 1 * 2?<|im_end|>")
    assert text.endswith("<think>\n\n</think>\n\n")
    assert not prompt_mask[0, 0] and prompt_mask[:, -1].all()
    began = Qwen3ForCausalLM.from_pretrained(tmp_path).state_dict()
    page["rewards_of"] = lambda texts, answers: torch.tensor(worth(texts))
    page["step"]()
    moved = {name: (w - began[name]).abs().max() for name, w in page["model"].state_dict().items()}
    assert all(w.dtype == torch.float32 for w in page["model"].parameters())
    assert max(moved.values()) > 1e-3 and all(m.isfinite() for m in moved.values())
