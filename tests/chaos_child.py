"""Trains again and again in one process while things go wrong, and counts what is left behind.

chaos_child.py FOLDER SEED SECONDS; started by test_chaos.py. Each round is a run of one scenario
that is disturbed until it has survived three faults, and compared with a run that nobody disturbed.
Standard output is one line of JSON a round.
"""

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
from chaos_reward import scores
from run_child import build
from small_runs import CLOCKS, weights_of
from test_checkpoint import SCENARIOS

from grpo_nb.environments.isolated_rewards import isolated
from grpo_nb.training.leaving import Preempted
from grpo_nb.training.rewards import RewardError

NAMES = ("every step", "inside a cycle", "windows of two cycles", "log every third step")
FAULTS = ("raise", "inf", "hang", "SIGTERM", "SIGINT", "disk", "worker")


class Fault:
    "A reward function that fails once, and everything else that goes wrong once."

    def __init__(self, kind, step, chance, isolated_scores, folder):
        self.kind, self.step, self.chance, self.folder = kind, step, chance, folder
        self.score, self.ballast, self.met = isolated_scores, folder / "ballast", False
        self.__name__ = "reward"

    def __call__(self, completions, trainer_state, **columns):
        if not self.met and trainer_state.global_step >= self.step:
            self.met = True
            if self.kind == "raise":
                raise OSError("the judge is gone")
            if self.kind == "inf":  # NaN would say that it did not judge, as None
                return [float("inf")] * len(completions)
            if self.kind == "hang":
                signal_in(0.05, signal.SIGTERM)
                threading.Event().wait(120)
            if self.kind in ("SIGTERM", "SIGINT"):
                signal_in(self.chance.uniform(0, 0.2), getattr(signal, self.kind))
            if self.kind == "disk":
                fill(self.ballast)
            if self.kind == "worker":
                for child in children():
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.05)
        found = list(self.score(columns["prompts"], completions))
        if None in found:  # else the run would go on without the scores of this batch
            raise OSError("the reward's process was killed")
        return found


def signal_in(seconds, number):
    "Send this process a signal in a moment, if it still trains then."

    def send():
        if any(thread.name == "preemption" for thread in threading.enumerate()):
            os.kill(os.getpid(), number)

    timer = threading.Timer(seconds, send)
    timer.daemon = True
    timer.start()


def fill(path):
    "Fill the disk to the last byte."
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def children():
    "The ids of this process's own children."
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return [int(number) for number in found.split()]


def counts():
    "What must not grow: memory (MiB), open files, threads, processes."
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return dict(
        memory=round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        processes=len(children()),
    )


def outcome(trainer):
    "What two runs have to share to the last bit."
    history = [{k: v for k, v in r.items() if k not in CLOCKS} for r in trainer.log_history]
    return history, weights_of(trainer.model)


def same(one, other):
    "Whether two outcomes agree in every bit."
    (history, weights), (expected, wanted) = one, other
    return history == expected and all(torch.equal(weights[n], wanted[n]) for n in wanted)


def disturbed(folder, name, kinds, chance, isolated_scores):
    "One run, disturbed by each fault in turn; its outcome, and how each attempt ended."
    ended = []
    for kind in [*kinds, None]:
        settings = SCENARIOS[name]
        step = chance.randrange(settings["max_steps"])
        fault = Fault(kind, step, chance, isolated_scores, folder)
        trainer = build(folder, reward=fault, **settings)
        try:
            trainer.train(resume_from_checkpoint="auto")
            ended.append(f"{kind}: done")
        except (RewardError, OSError, RuntimeError, Preempted, KeyboardInterrupt) as error:
            ended.append(f"{kind}: {type(error).__name__}")
        time.sleep(0.25)  # until a late signal has come
        fault.ballast.unlink(missing_ok=True)
    return outcome(trainer), ended


def late_rewards(folder):
    "A reward beyond its deadline does not stop the run, and its thread ends with it."
    free = threading.Event()

    def hangs(completions, **_):
        free.wait(120)

    trainer = build(folder, reward=[reward, hangs], max_steps=2, reward_timeout_s=0.1)
    trainer.train()
    free.set()
    return trainer.state.global_step == 2


def main(folder, seed, seconds):
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, said = open(os.devnull, "w"), sys.stdout
    chance, end, rounds, before, whole = (
        random.Random(seed),
        time.monotonic() + seconds,
        0,
        None,
        {},
    )
    while time.monotonic() < end or not before:
        name, kinds = chance.choice(NAMES), chance.sample(FAULTS, 3)
        if name not in whole:
            with tempfile.TemporaryDirectory() as place:
                trainer = build(place, reward=reward, **SCENARIOS[name])
                trainer.train()
                whole[name] = outcome(trainer)
        run = Path(folder) / "run"
        run.mkdir()
        with isolated("chaos_reward:scores", timeout_s=60, name="reward") as isolated_scores:
            found, ended = disturbed(run, name, kinds, chance, isolated_scores)
        right, late = same(found, whole[name]), late_rewards(tempfile.mkdtemp(dir=folder))
        for path in Path(folder).iterdir():
            shutil.rmtree(path)
        del found, trainer
        trainer = None
        rounds += 1
        now = counts()
        if rounds == 4:  # everything has been imported, and every cache is filled
            before = now
        report = dict(name=name, ended=ended, same=right, late=late, counts=now)
        print(json.dumps(report), file=said, flush=True)


def reward(completions, **_):
    "The score in this process, under the name that the run uses."
    return scores(completions)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
