"""What the tests of the trainer share: a very small gpt-oss, data, a reward, settings, and a plain
computation of the updates."""

import math
import statistics

import pytest
import torch

from grpo_nb import GRPOConfig, GRPOTrainer
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.reporting import PARTS

CLOCKS = (
    "seconds",
    "seconds_left",
    "step_time",
    "tokens_per_second",
    "peak_memory_gib",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    *(f"seconds/{part}" for part in PARTS),
)  # the only numbers of a record that may differ between equal runs
ROWS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (7, 12, 345) for b in (1, 20, 6, 99)
]  # prompts of several lengths


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For the module that imports it: these models are too small for more, and two threads wait for
    one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(seed=0, **changes):
    "A gpt-oss with 15,000 parameters whose distributions are far from uniform, and its tokenizer."
    return tiny_gpt_oss(
        seed,
        **{
            **dict(
                hidden_size=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=16,
                num_experts=2,
                experts_per_token=1,
                initializer_range=0.25,
            ),
            **changes,
        },
    )


def digits(completions, **columns):
    "A reward with spread: one for each digit, a tenth for each other character."
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(1.0 if character.isdigit() else 0.1 for character in text) for text in texts]


def small_config(folder, **changes):
    "Two updates with four prompts each, on the CPU in float32."
    return GRPOConfig(
        **{
            **dict(
                output_dir=str(folder),
                max_steps=2,
                per_device_train_batch_size=16,
                num_generations=4,
                max_completion_length=6,
                learning_rate=1e-2,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
            ),
            **changes,
        }
    )


def small_trainer(
    folder,
    reward_funcs=digits,
    *,
    rows=ROWS,
    model=None,
    tokenizer=None,
    trainer=GRPOTrainer,
    arguments=None,
    **changes,
):
    "A trainer for a small run; the keywords are settings."
    mine, its = small_model()
    made = trainer(
        model or mine,
        reward_funcs,
        small_config(folder, **changes),
        rows,
        processing_class=tokenizer or its,
        **(arguments or {}),
    )
    made.log.show = False
    return made


def weights_of(model):
    "The parameters that train, by name, copied; whole where each process has a share."
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {
        n: p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for n, p in trained.items()
    }


def without_clocks(history):
    "The records of a run without the numbers that depend on the time of day."
    return [
        {name: value for name, value in record.items() if name not in CLOCKS} for record in history
    ]


def remember_batches(trainer):
    "A list that receives the batch of each cycle, with the log-probs of other policies."
    batches, prepare = [], trainer.policy_update.prepare

    def preparing(batch):
        batches.append(prepare(batch))
        return batches[-1]

    trainer.policy_update.prepare = preparing
    return batches


def drawn(trainer):
    "The batch of the present cycle, drawn and held as the loop does it."
    trainer.state.hold(trainer.policy_update.prepare(trainer.collector.collect(trainer.state)))
    return trainer.state.batch


# a plain computation: one sequence at a time, without padding, through the logits


def ids_of(batch):
    "Prompts and completions of a batch as lists of token ids."
    return [
        (p[m].tolist(), c[d].tolist())
        for p, m, c, d in zip(
            batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
        )
    ]


def plain_logps(model, prompt, completion, temperature=1.0):
    "Log-probs of one completion."
    logits = (
        model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    )
    return logits.log_softmax(-1)[range(len(completion)), completion]


def plain_advantages(sequences, rewards):
    "(r - mean) / (std + 1e-4) inside each group of equal prompts."
    groups = {}
    for (prompt, _), reward in zip(sequences, rewards):
        groups.setdefault(tuple(prompt), []).append(reward)
    return [
        (reward - statistics.mean(groups[tuple(prompt)]))
        / (statistics.stdev(groups[tuple(prompt)]) + 1e-4)
        for (prompt, _), reward in zip(sequences, rewards)
    ]


BY_HAND = "dapo grpo bnpo dr_grpo luspo cispo sapo vespo reinforce".split()  # what follows has them


def token_losses(kind, logps, old, A, config):
    "Losses of one completion's tokens."
    if kind == "reinforce":
        return -A * logps
    c = (logps - old).exp()
    if config.importance_sampling_level == "sequence":
        c = (logps - old).mean().exp().expand_as(logps)
    low, high = 1 - config.epsilon, 1 + config.used("epsilon_high")
    if kind == "cispo":
        return -c.clamp(max=config.epsilon_high).detach() * A * logps
    if kind == "sapo":
        tau = 1.0 if A > 0 else 1.05
        return -torch.sigmoid(tau * (c - 1)) * 4 / tau * A
    if kind == "vespo":
        k, lam = (2, 3) if A >= 0 else (3, 2)
        log_w = (logps - old).detach().sum()
        return -torch.exp(lam + k * log_w - lam * log_w.exp()) * A * logps
    free = c if config.delta is None else c.clamp(max=config.delta)
    return -torch.minimum(free * A, c.clamp(low, high) * A)


def window_loss(kind, micro_batches, config):
    """The loss of an accumulation window: micro-batches are lists of completions, each (token
    losses, how many of them count)."""
    if kind in ("dapo", "cispo", "vespo", "reinforce"):
        return sum(tokens.sum() for batch in micro_batches for tokens in batch) / max(
            sum(len(tokens) for batch in micro_batches for tokens in batch), 1
        )
    means = []
    for batch in micro_batches:
        if kind == "bnpo":
            means.append(sum(tokens.sum() for tokens in batch) / max(sum(map(len, batch)), 1))
        elif kind == "dr_grpo":
            means.append(
                sum(tokens.sum() for tokens in batch) / (len(batch) * config.max_completion_length)
            )
        elif kind == "luspo":
            means.append(sum(tokens.sum() for tokens in batch) / len(batch))
        else:
            means.append(sum(tokens.mean() for tokens in batch if len(tokens)) / len(batch))
    return sum(means) / len(means)


def replay(model, batches, config, rewards_of, optimizer, reference=None, steps=None, epoch=None):
    """Train `model` on remembered batches by the formulas alone, an update every
    `gradient_accumulation_steps` micro-batches and at the end of an epoch of so many; losses and
    gradient norms."""
    per, accumulate, steps = (
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps,
        steps or config.max_steps,
    )
    window, records, done = [], [], 0
    for batch in batches:
        sequences = ids_of(batch)
        advantages = plain_advantages(sequences, rewards_of(sequences))
        with torch.no_grad():
            old = [plain_logps(model, *s, config.temperature) for s in sequences]
            ref = (
                [plain_logps(reference, *s, config.temperature) for s in sequences]
                if reference
                else None
            )
        for start in [*range(0, len(sequences), per)] * config.num_iterations:
            window.append(
                [
                    (sequences[i], old[i], advantages[i], ref[i] if ref else None)
                    for i in range(start, start + per)
                ]
            )
            done += 1
            if len(window) < accumulate and not (epoch and done % epoch == 0):
                continue
            if len(records) == steps:
                return records
            losses = []
            for part in window:
                losses.append([])
                for sequence, before, A, at_start in part:
                    logps = plain_logps(model, *sequence, config.temperature)
                    tokens = token_losses(config.loss_type, logps, before, A, config)
                    if at_start is not None:
                        tokens = tokens + config.beta * (
                            (at_start - logps).exp() - (at_start - logps) - 1
                        )
                    losses[-1].append(tokens)
            loss = window_loss(config.loss_type, losses, config)
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = [
                torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients)
            ]
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            for p, g in zip(parameters, gradients):
                p.grad = g * min(1.0, (config.max_grad_norm or math.inf) / norm)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * (steps - len(records)) / steps
            optimizer.step()
            records.append(
                {
                    "loss": loss.item(),
                    "grad_norm": norm,
                    "learning_rate": optimizer.param_groups[0]["lr"],
                }
            )
            window = []
    return records
