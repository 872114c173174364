"""Runs trainings in processes of their own: each line of JSON on standard input is one run, in a
fork of this process (which has imported everything and computed nothing: what a run imports at its
first need is named here, so that no fork imports it again).

It answers with the process id when a run begins, and with the exit status when it has ended.
Started by test_checkpoint.py.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import datasets.packaged_modules  # noqa: F401
import torch
from peft import LoraConfig
from small_runs import ROWS, digits, small_trainer, weights_of

from grpo_nb.training import checkpoint
from grpo_nb.training.leaving import Preempted


def die_at(moment: str) -> None:
    "Let the process be killed by SIGKILL at a certain moment."
    function, _, count = moment.partition(" ")
    module, name = {
        "torch.save": (torch, "save"),
        "rename": (os, "replace"),
        "delete": (checkpoint.shutil, "rmtree"),
        "sync": (os, "fsync"),
    }[function]
    original, left = getattr(module, name), [int(count)]

    def deadly(*arguments, **others):
        if function == "delete" and not Path(arguments[0]).exists():
            return original(*arguments, **others)  # nothing there to be half deleted
        left[0] -= 1
        if left[0] == 0:
            if function == "torch.save":
                Path(arguments[1]).write_bytes(b"half of the state")
            if function == "delete":
                next(iter(Path(arguments[0]).iterdir())).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **others)

    setattr(module, name, deadly)


def pause_at(trainer, at, step, seconds, grace_s=20, folder=None, swallow=False):
    """Sleep once, in a certain place of the loop after `step` updates; a file `paused` says that it
    has begun."""
    part, name = {
        "collect": (trainer.collector, "collect"),
        "accumulate": (trainer.policy_update, "accumulate"),
        "reduce": (trainer.policy_update, "reduce"),
        "step": (trainer.policy_update, "step"),
        "save": (trainer.checkpointer, "save_model"),
        "evaluate": (trainer.evaluator, "evaluate"),
    }[at]
    original = getattr(part, name)
    marker = Path(folder or trainer.config.output_dir) / "paused"
    trainer.leaving.grace_s = grace_s

    def slow(*arguments, **others):
        if trainer.state.global_step == step and not marker.exists():
            marker.touch()
            try:
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(0.02)
            except KeyboardInterrupt:
                if not swallow:
                    raise
        return original(*arguments, **others)

    setattr(part, name, slow)


def build(folder, threads=1, adapter=None, evaluate=False, reward=digits, **settings):
    "The trainer of one training."
    torch.set_num_threads(threads)
    arguments = dict(peft_config=LoraConfig(**adapter)) if adapter else {}
    if evaluate:
        arguments["eval_dataset"] = ROWS[:3]
    trainer = small_trainer(folder, reward, arguments=arguments, **settings)
    if trainer.precision.scaler.is_enabled():
        trainer.precision.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=2
        )  # so that the scale moves
    return trainer


def run(folder, resume=False, die=None, pause=None, **settings):
    "One training; what it ends with is in final.pt."
    trainer = build(folder, **settings)
    if die:
        die_at(die)
    if pause:
        pause_at(trainer, **pause)
    trainer.train(resume_from_checkpoint=resume and bool(checkpoint.checkpoints(folder)))
    torch.save(
        {
            "history": trainer.log_history,
            "weights": weights_of(trainer.model),
            "scale": trainer.precision.scaler.get_scale(),
        },
        Path(folder) / "final.pt",
    )


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        if not (child := os.fork()):
            log = os.open(os.devnull, os.O_RDWR)
            os.dup2(log, 0), os.dup2(log, 1)
            code = 1
            try:
                code = run(**json.loads(line)) or 0
            except KeyboardInterrupt:
                code = 130
            except Preempted as stopped:
                code = stopped.code
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
