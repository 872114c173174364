"""Processes that take turns on one card, for versions.py: each keeps its models, and makes a call
or an update of a run when it is told to over a pipe, while the others wait."""

import multiprocessing
import os
import time
from argparse import Namespace

import torch
from transformers import TrainerCallback

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Turns(TrainerCallback):
    "What a process is let to do: `serve` for calls; as a callback, a run stands still by itself."

    def __init__(self, pipe):
        self.pipe, self.steps = pipe, 0

    def begin(self):
        "Wait for an order: whether to go on, and where to write a table of kernels."
        go_on, self.table = self.pipe.recv()
        if self.table:
            kind = getattr(torch.profiler.ProfilerActivity, DEVICE.upper())
            self.seen = torch.profiler.profile(activities=[kind])
            self.seen.start()
        self.steps, self.start = 0, time.perf_counter()
        return go_on

    def end(self, **work):
        "Tell the seconds since `begin`, or those that were measured otherwise, and the work."
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        work = dict(seconds=time.perf_counter() - self.start, steps=self.steps) | work
        if self.table:
            self.seen.stop()
            shown = dict(row_limit=40, max_name_column_width=90)
            kernels = self.seen.key_averages().table(f"self_{DEVICE}_time_total", **shown)
            self.table.write_text(kernels)
        self.pipe.send(work)

    def serve(self, call):
        "Make a call as often as it is wanted; it gives what it did."
        self.pipe.send({})
        while self.begin():
            self.end(**call())

    def on_train_begin(self, args, state, control, **kwargs):
        self.pipe.send({})
        control.should_training_stop |= not self.begin()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in (logs or {}):  # not the line after the last update
            drawn = args.per_device_train_batch_size * args.gradient_accumulation_steps
            tokens = round(drawn * logs["completions/mean_length"])
            self.end(tokens=tokens, without_spread=logs["frac_reward_zero_std"])
            control.should_training_stop |= not self.begin()

    def count(self, loop):
        "Add up the steps of a sampler's loop, a class whose `run` counts them."

        def run(rows, *given, plain=loop.run):
            done = plain(rows, *given)
            self.steps += rows.steps
            return done

        loop.run = run


def start(work, name, out, *given):
    "A process that does work(pipe, *given), with caches of compiled code and a log of its own."
    for cache in ("TRITON", "TORCHINDUCTOR"):
        os.environ[f"{cache}_CACHE_DIR"] = str(out.resolve() / f"{name}_{cache.lower()}")
    pipe, theirs = multiprocessing.Pipe()
    given = work, theirs, out / f"{name}.log", *given
    multiprocessing.get_context("spawn").Process(target=logged, args=given).start()
    theirs.close()
    return Namespace(name=name, pipe=pipe)


def logged(work, pipe, log, *given):
    "The process: what it prints goes to its log."
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work(pipe, *given)


def ask(processes, order):
    "What all do at once; (process, answer) of those that could."
    for process in processes:
        process.pipe.send(order)
    answers = [(process, process.pipe.recv()) for process in processes]
    for process, told in answers:
        if "error" in told:
            print(f"{process.name}: {told['error']}", flush=True)
    return [(process, told) for process, told in answers if "error" not in told]
