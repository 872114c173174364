"""What each process of a distributed run does; started by test_distributed.py through torchrun, and
imported by it for the same run in one process.

torchrun --nproc_per_node 2 distributed_child.py OUT equal,resumed,fails|preempted [JSON]
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig
from run_child import pause_at
from small_runs import digits, drawn, small_model, small_trainer, weights_of

from grpo_nb import GRPOTrainer
from grpo_nb.rollout.rollout import Rollout
from grpo_nb.training.collect import CompletionSource

SETTINGS = dict(
    guard_every=0,  # the completions are scripted
    num_generations=4,
    max_completion_length=7,
    shuffle_dataset=False,
    optim="sgd",
    learning_rate=0.3,
    max_steps=3,
    epsilon=0.01,
)
# name -> settings; a process takes six completions at a time, so that two processes share the
# middle one of three groups
CASES = {
    **{
        kind: dict(loss_type=kind, num_iterations=2) for kind in ("dapo", "grpo", "bnpo", "dr_grpo")
    },
    "quantile": dict(loss_type="dapo", top_entropy_quantile=0.4),
    "kl and entropy": dict(
        loss_type="dapo", beta=0.2, entropy_coef=0.05, num_iterations=2, scale_rewards="batch"
    ),
    "truncated": dict(loss_type="dapo", mask_truncated_completions=True),
    "float16": dict(loss_type="dapo", fp16=True),
    "adapter": dict(loss_type="dapo", learning_rate=1.0),
}


class ScriptedSource(CompletionSource):
    """Draws the same completions whichever process does it: a function of the row and of the
    completion's place in its group."""

    def draw(self, rows, numbers=None):
        first = PartialState().process_index * len(numbers)
        generators = [
            torch.Generator().manual_seed(1000 * self.state.cycle + 10 * number + (first + i) % 4)
            for i, number in enumerate(numbers)
        ]
        lengths = [
            int(torch.randint(1, 4 if number % 3 == 0 else 8, (), generator=g))
            for g, number in zip(generators, numbers)
        ]  # short in the first process, long in the second
        ids = [torch.randint(7, 21, (max(lengths),), generator=g) for g in generators]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        reasons = ["length" if n == 7 else "stop" for n in lengths]
        drawn = torch.stack(ids) * mask, mask, torch.zeros(mask.shape)
        return Rollout(
            [self.tokenizer(row["prompt"]).input_ids for row in rows],
            *(each.to(PartialState().device) for each in drawn),
            reasons,
        )


class Scripted(GRPOTrainer):
    "A trainer whose completions are scripted."

    source_class = ScriptedSource


def scripted(out, name, processes, trainer=Scripted, **changes):
    """A trainer of one case: with one process, it takes as many micro-batches as the other way has
    processes."""
    arguments = (
        dict(
            peft_config=LoraConfig(
                r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            )
        )
        if name == "adapter"
        else {}
    )
    model, tokenizer = small_model()
    model, tokenizer = changes.pop("model", model), changes.pop("tokenizer", tokenizer)
    arguments |= changes.pop("arguments", {})
    size = dict(per_device_train_batch_size=6)
    if processes == 1:
        size = (
            dict(per_device_train_batch_size=12)
            if name == "quantile"
            else dict(per_device_train_batch_size=6, gradient_accumulation_steps=2)
        )  # a quantile is that of a whole step
    return small_trainer(
        Path(out) / name,
        model=model,
        tokenizer=tokenizer,
        trainer=trainer,
        arguments=arguments,
        **{**size, **SETTINGS, **CASES.get(name, {}), **changes},
    )


def equal(out, rank):
    "Every case, and a run with real sampling that is resumed."
    results = {}
    for name in CASES:
        trainer = scripted(out, name, 2)
        trainer.train()
        results[name] = dict(history=trainer.log_history, weights=weights_of(trainer.model))
    changes = dict(
        max_steps=4,
        optim="adamw_torch",
        learning_rate=0.01,
        num_iterations=2,
        seed=3,
        save_strategy="steps",
        save_steps=3,
    )
    for name in ("sampled", "sampled again"):
        trainer = scripted(
            out, "adapter", 2, trainer=GRPOTrainer, output_dir=str(Path(out) / "sampled"), **changes
        )
        with torch.no_grad():
            trainer.policy_update.parameters[0].add_(
                rank
            )  # the processes may be given different weights: the first one's count
        trainer.train(
            resume_from_checkpoint=str(Path(out) / "sampled" / "checkpoint-3")
            if results.get("sampled")
            else None
        )
        results[name] = dict(
            history=trainer.log_history,
            secret=trainer.state.secret,
            weights=weights_of(trainer.model),
            evaluation=trainer.evaluate([{"prompt": "1+1="}] * 3),
            ids=drawn(trainer).completion_ids,
        )
    trainer = scripted(out, "float16", 2, output_dir=str(Path(out) / "overflow"))
    accumulate = trainer.policy_update.accumulate

    def overflows(*given):
        accumulate(*given)
        if rank == 1 and trainer.state.global_step == 1:
            trainer.policy_update.parameters[-1].grad[0] = float("inf")

    trainer.policy_update.accumulate = overflows
    trainer.train()
    results["overflow"] = dict(
        history=trainer.log_history,
        weights=weights_of(trainer.model),
        scale=trainer.precision.scaler.get_scale(),
    )
    torch.save(results, Path(out) / f"rank{rank}.pt")


def fails(out, rank):
    "A reward function that raises in one process; a file says that it has come to this."
    Path(out, "failing").touch()

    def reward(completions, trainer_state, **_):
        if rank == 1 and trainer_state.global_step == 1:
            raise KeyError("only here")
        return digits(completions)

    trainer = small_trainer(
        Path(out) / "fails", reward, per_device_train_batch_size=8, num_generations=4, max_steps=4
    )
    trainer.train()


def four_updates(out, save_steps=100, **settings):
    "The trainer of the runs that are stopped and resumed."
    return small_trainer(
        out,
        max_steps=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=save_steps,
        **settings,
    )


def preempted(out, rank):
    "A run that pauses in one process, for the test to send signals."
    options = json.loads(sys.argv[3])
    (Path(out) / f"pid{rank}").write_text(str(os.getpid()))
    trainer = four_updates(out, options.get("save_steps", 100), **options.get("settings", {}))
    if rank == options.get("rank", 0) and "pause" in options:
        pause_at(trainer, **options["pause"])
    trainer.leaving.grace_s = options.get("grace_s", 20)
    trainer.train()


def resumed(out, rank):
    "An undisturbed run in `out/whole`, and then each of the runs in other folders to its end."
    whole = str(Path(out) / "whole")
    for folder in [whole, *json.loads(sys.argv[3])]:
        trainer = four_updates(folder, **json.loads((sys.argv[4:] or ["{}"])[0]))
        trainer.train(resume_from_checkpoint=folder != whole)
        final = dict(history=trainer.log_history, weights=weights_of(trainer.model))
        torch.save(final, Path(folder) / f"final{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2].split(","):
        globals()[name](sys.argv[1], int(os.environ["RANK"]))
    torch.distributed.destroy_process_group()
