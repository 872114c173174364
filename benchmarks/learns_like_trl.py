"""Does it learn as TRL's trainer does? A tiny gpt-oss learns sums, with this library's trainer and
with TRL's: the same settings, warmed-up models, prompts and reward, and as many seeds.

    python benchmarks/learns_like_trl.py
        12 seeds of each on the CPU; goes on where it stopped, each run is stored when it ends
    python benchmarks/learns_like_trl.py --show
        the table of what is stored
    python benchmarks/learns_like_trl.py --seeds 2 --updates 4 --warm-up 5 --out new.json
        to try it out

A run is a seed's: of the random weights, of the warm-up on worked sums, of the prompts' order and
of the sampling. TRL draws with transformers' generate, ours with its engine, so completions differ
and curves do too; what has to agree is where they lead. Sums that nobody trains on are answered
greedily before, between and after, by the same code for both. An interval is the 95 % interval of
a mean over seeds (Student's t); the last line compares the two runs of each seed. "Last rewards"
is the mean reward of a run's last 20 updates; its seconds hold the measurements.

One setting is not TRL's default: `router_aux_loss_coef` is 0, as it is here; TRL would add
0.001 times the router's load-balancing loss to a gpt-oss' loss. Results are kept in
benchmarks/results/learns_like_trl.json; those that stand there were made by a process for each run.
"""

import argparse
import contextlib
import copy
import datetime
import importlib
import importlib.metadata
import io
import json
import math
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import transformers

from grpo_nb.demo import MAX_TOKENS, greedy_accuracy, one_thread
from grpo_nb.environments.arithmetic import addition_problems, exact_answer_reward
from grpo_nb.model.limits import write_json
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.training.fine_tuning import fine_tune

RESULTS = Path(__file__).resolve().parent / "results/learns_like_trl.json"
LIBRARIES = ("grpo_nb", "trl")
SUMS = dict(smallest=1, largest=49, held_out=400)  # 2,001 to train on
TASK = dict(
    learning_rate=5e-4,
    warmup_steps=10,
    adam_beta2=0.98,
    per_device_train_batch_size=128,  # 16 sums, 8 answers to each
    num_generations=8,
    max_completion_length=MAX_TOKENS,
)
QUIET = dict(
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    gradient_checkpointing=False,
    shuffle_dataset=False,
)
# what 95 % of Student's t keep to, by degrees of freedom from 1
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


class HeldOut(transformers.TrainerCallback):
    "Greedy accuracy on held-out sums, before training and every few updates."

    def __init__(self, model, tokenizer, rows, every):
        self.model, self.tokenizer, self.rows, self.every = model, tokenizer, rows, every
        self.curve = {}

    def measure(self, state):
        self.curve[state.global_step] = greedy_accuracy(self.model, self.tokenizer, self.rows)

    def on_train_begin(self, args, state, control, **kwargs):
        self.measure(state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == args.max_steps:
            self.measure(state)


def warm_model(seed, train, steps=1000, target=0.4, change=lambda model: None, **sizes):
    "A tiny gpt-oss that is right about four times in ten."
    model, tokenizer = tiny_gpt_oss(seed, **sizes)
    change(model)
    fine_tune(
        model,
        tokenizer,
        train,
        steps=steps,
        stop=lambda: greedy_accuracy(model, tokenizer, train[:400]) >= target,
        ask_every=10,
        seed=seed,
        progress=False,
    )
    return model, tokenizer


def prompts_of(train, seed, updates, settings):
    "The rows of a run, in the order in which both libraries take them."
    each = settings["per_device_train_batch_size"] // settings["num_generations"]
    return random.Random(seed).choices(train, k=each * updates)


def learn(
    library, model, tokenizer, rows, held_out, every, settings, prepare=lambda t: None, **arguments
):
    "Train `model`; what it was rewarded with, and how well it did on held-out sums."
    watch = HeldOut(model, tokenizer, held_out, every)
    cpu, wall = time.process_time(), time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trainer = library.GRPOTrainer(
            model,
            exact_answer_reward,
            library.GRPOConfig(output_dir=folder, **QUIET, **settings),
            rows,
            processing_class=tokenizer,
            callbacks=[watch],
            **arguments,
        )
        prepare(trainer)
        trainer.train()
        way = "" if arguments else str(getattr(getattr(trainer, "engine", None), "way", ""))
    records = [record for record in trainer.state.log_history if "reward" in record]
    return {
        "held_out": {step: round(value, 4) for step, value in watch.curve.items()},
        "reward": [round(float(record["reward"]), 4) for record in records],
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.perf_counter() - wall, 1),
        "way": way,
    }


def compare(seed, args, keep):
    "Both libraries' runs of a seed; `keep` is called with each."
    import datasets

    train, held_out = addition_problems(**SUMS)
    model, tokenizer = warm_model(seed, train, args.warm_up)
    rows = datasets.Dataset.from_list(prompts_of(train, seed, args.updates, TASK))
    for name in LIBRARIES:
        settings = dict(TASK, max_steps=args.updates, seed=seed, use_cpu=True, bf16=False)
        if name == "trl":
            settings["router_aux_loss_coef"] = 0.0
        library, mine = importlib.import_module(name), copy.deepcopy(model)
        keep(name, seed, learn(library, mine, tokenizer, rows, held_out, args.every, settings))


def interval(values):
    "Mean, and half of its 95 % interval over seeds."
    if len(values) < 2:
        return statistics.mean(values), math.nan
    t = T95[min(len(values) - 2, len(T95) - 1)]
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def summary(runs):
    "Mean and half interval of the held-out accuracy: {name: {update: [mean, half]}}."
    curves = {}
    for run in runs:
        for step, value in run["held_out"].items():
            curves.setdefault(run["name"], {}).setdefault(int(step), []).append(value)
    return {
        name: {step: [round(x, 3) for x in interval(values)] for step, values in curve.items()}
        for name, curve in curves.items()
    }


def shown(values, form="{:.3f} ± {:.3f}"):
    "A mean with its interval as text."
    return form.format(*interval(values)).removesuffix(" ± nan")


def paired(runs, one, other):
    "By how much the last accuracy of `one` differs from that of `other`, seed by seed."
    last = {(run["name"], run["seed"]): [*run["held_out"].values()][-1] for run in runs}
    both = [seed for name, seed in last if name == one and (other, seed) in last]
    return [last[one, seed] - last[other, seed] for seed in both]


def table(runs, clock="cpu_seconds"):
    "Lines of a table: held-out accuracy of each name before and after, and the reward at the end."
    names = list(dict.fromkeys(run["name"] for run in runs))
    heads = f"{'before':>16}{'after':>16}{'last rewards':>16}{clock.replace('_', ' '):>13}"
    lines = [f"{'':20}{'seeds':>6}{heads}"]
    for name in names:
        mine = [run for run in runs if run["name"] == name]
        first, *_, last = zip(*(run["held_out"].values() for run in mine))
        reward = [statistics.mean(run["reward"][-20:]) for run in mine]
        cells = "".join(f"{shown(values):>16}" for values in (first, last, reward))
        seconds = statistics.mean(run[clock] for run in mine)
        lines.append(f"{name:20}{len(mine):6}{cells}{seconds:13.0f}")
    for name in names[1:]:
        if differ := paired(runs, name, names[0]):
            lines.append(f"after, {name} - {names[0]}: {shown(differ, '{:+.3f} ± {:.3f}')}")
    return lines


def versions(*names):
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", *names)}


class Results:
    "Runs in a file, which is written anew after each of them."

    def __init__(self, path, about):
        self.path, self.about, self.runs = path, about, []
        if not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        if differ := [name for name in about if stored[name] != about[name]]:
            raise SystemExit(
                f"{path} holds runs whose {' and '.join(differ)} differ from those asked for now: "
                "give another file with --out, or remove it"
            )
        self.runs = stored["runs"]

    def has(self, seed, names):
        done = {run["name"] for run in self.runs if run["seed"] == seed}
        return done >= set(names)

    def keep(self, name, seed, run):
        self.runs = [r for r in self.runs if (r["name"], r["seed"]) != (name, seed)]
        self.runs.append({"name": name, "seed": seed, **run})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = {**self.about, "date": str(datetime.date.today())}
        record |= {"held_out": summary(self.runs), "runs": self.runs}
        write_json(self.path, record, indent=None)
        last = [*run["held_out"].values()]
        print(f"{name}, seed {seed}: {last[0]:.3f} -> {last[-1]:.3f}", flush=True)


def arguments(about, seeds, updates, out):
    "The options that both scripts have."
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of each kind")
    parser.add_argument("--updates", type=int, default=updates, help="of a run")
    parser.add_argument("--every", type=int, default=20, help="updates between two measurements")
    parser.add_argument("--warm-up", type=int, default=1000, help="steps of it at most")
    parser.add_argument("--out", type=Path, default=out, help="a JSON file")
    return parser


def main():
    parser = arguments(__doc__, 12, 400, RESULTS)
    parser.add_argument("--show", action="store_true", help="print what is stored, run nothing")
    args = parser.parse_args()
    if args.show:
        return print(*table(json.loads(args.out.read_text(encoding="utf-8"))["runs"]), sep="\n")
    task = dict(TASK, **SUMS, updates=args.updates, every=args.every, warm_up=args.warm_up)
    results = Results(args.out, {"task": task, "versions": versions("trl")})
    with one_thread():
        for seed in range(args.seeds):
            if not results.has(seed, LIBRARIES):
                compare(seed, args, results.keep)
    print(*table(results.runs), sep="\n")


if __name__ == "__main__":
    main()
