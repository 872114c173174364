"""Versions of this project in turns on one card: what became slower or faster, by the same calls.

    python benchmarks/versions.py old=../old now=. --out DIR --model MODEL --data FOLDER
        two checkouts, the first one the base; some ten minutes on an H200
        --cases draw step grpo   needs no trained model; --small: tiny, also without a GPU
        --profile   kernels by time too, in DIR/NAME_CASE.txt: of a call of `rows` with at most 64
                    tokens each, and of an `update`
    python benchmarks/versions.py --show benchmarks/results/versions.json     stored ones

Each version is a process that keeps its models, with its own library, train_step.py and
grpo_step.py (commits from 9023e129 on work), caches of compiled code and a log in DIR. One works
while the others wait, the order turned round every round. Two turns of all at once, which compile,
are not counted. The cases:

    draw    8 and 64 completions of 256 tokens: gpt-oss-20b, random, its experts in MXFP4
    step    forward and backward of it: 2,048 tokens, recorded; 8,192, layer inputs on the host
    grpo    a whole step of it, 8 prompts x 8 completions of 256 tokens
    rows    512 completions of at most 400 tokens of MODEL (a folder), 256 at a time
    update  of MODEL on GSM8K (train.jsonl in FOLDER), 256 completions of at most 400 tokens. The
            reward is the place in the group, so all groups have a spread, and the learning rate is
            next to nothing, so versions go on drawing alike: equal work

DIR/versions.json and the table have seconds, ratios to the first version (the median over rounds,
95 % by a bootstrap over them: a few rounds say little), and what shows equal work: tokens drawn,
steps of the sampler where it counts them, the share of groups without spread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from importlib import import_module
from itertools import count
from pathlib import Path

import torch
from answers import bootstrap
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import DEVICE, Turns, ask, start

PARTS = {  # name -> its case, and rows or tokens, those of --small too
    "draw, 8 rows": ("draw", 8, 2),
    "draw, 64 rows": ("draw", 64, 3),
    "step, 2,048 tokens recorded": ("step", 2048, 16),
    "step, 8,192 tokens offloaded": ("step", 8192, 32),
    "grpo, 64 completions": ("grpo", 256, 6),
    "rows, 512 completions": ("rows", 400, 8),
    "rows, 64 tokens": ("rows", 64, 4),  # for its kernels alone
    "update, 256 completions": ("update", 400, 6),
}
CASES = [*dict.fromkeys(case for case, *_ in PARTS.values())]
SHORT = "rows, 64 tokens"
WORK = ("tokens", "steps", "without_spread")


def place(completions, **columns):
    "A reward: the place in the group."
    return [number % 8 / 7 for number in range(len(completions))]


class Worker:
    "A version in its process; each case yields a call, or a run that stands still by itself."

    def __init__(self, args, folder, turns):
        self.args, self.turns = args, turns
        sys.path.insert(0, folder)
        self.gsm8k = import_module("gsm8k")  # this folder's: older ones lack its settings
        sys.path.insert(0, f"{folder}/benchmarks")
        self.train_step, self.grpo_step = map(import_module, ("train_step", "grpo_step"))
        for module in (import_module("grpo_nb"), self.train_step):
            assert Path(module.__file__).is_relative_to(folder), module.__file__
        self.sizes = self.train_step.SMALL if args.small else self.train_step.FULL
        with suppress(ImportError, AttributeError):
            turns.count(import_module("grpo_nb.rollout.continuous_batching").RowsInTurn)

    @cached_property
    def gpt_oss(self):
        torch.manual_seed(0)
        model = self.train_step.gpt_oss(self.sizes, "mxfp4", 64 if self.args.small else 8192)
        return model, self.train_step.word_tokenizer(self.sizes)

    @cached_property
    def trained(self):
        rows = self.gsm8k.rows_of(self.args.data, 2000, *self.gsm8k.PROMPTS["box"])
        return AutoTokenizer.from_pretrained(self.args.model), rows

    def drawing(self, model, tokenizer, ids, size=None, **params):
        "A call that draws completions; every version has the seeds 0, 1, 2, .. in this order."
        engine = self.gsm8k.RolloutEngine(model.eval(), tokenizer, max_batch_size=size)
        drawn = (
            engine.generate(
                ids,
                self.gsm8k.SamplingParams(temperature=1.0, seed=seed, **params),
                progress=False,
            )
            for seed in count()
        )
        return lambda: dict(tokens=int(next(drawn).lengths.sum()))

    def run(self, model, reward, rows, tokenizer, sizes, lora=None, **own):
        "A run with gsm8k.py's settings; sizes: completions of a micro-batch, and of an update."
        given = dict(updates=1000, batch=sizes[0], completions=sizes[1], checkpointing=False)
        given = argparse.Namespace(**given, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            config = self.gsm8k.run_settings(given, folder, num_generations=8, **own)
            given = dict(processing_class=tokenizer, peft_config=lora, callbacks=[self.turns])
            yield self.gsm8k.GRPOTrainer(model, reward, config, rows, **given).train

    def draw(self, rows):
        tokens, prompt = (4, 8) if self.args.small else (256, 128)
        ids = self.train_step.random_ids(self.sizes, prompt, "cpu", rows).tolist()
        yield self.drawing(*self.gpt_oss, ids, max_tokens=tokens)

    def step(self, tokens):
        model, recorded = self.gpt_oss[0], tokens in PARTS["step, 2,048 tokens recorded"]
        layers = import_module("grpo_nb.model.recorded_layers")
        ids = self.train_step.random_ids(self.sizes, tokens, model.device)
        batch = self.train_step.batch_of(ids)
        step = self.train_step.Step(model, offload=not recorded)
        with layers.record_layers(model) if recorded else nullcontext():
            yield lambda: self.train_step.timed(lambda: step(batch), 6 if recorded else 3)
        step.close()

    def grpo(self, tokens):
        model, tokenizer = self.gpt_oss
        rows = self.grpo_step.prompts_of(self.sizes, 8, 8 if self.args.small else 128)
        own = dict(gradient_checkpointing=True, model_init_kwargs=None)
        own |= dict(guard_max_gap=100.0, max_completion_length=tokens)  # random weights: large gaps
        return self.run(model, self.grpo_step.letters_reward, rows, tokenizer, (8, 64), **own)

    def rows(self, tokens):
        tokenizer, problems = self.trained
        count, size = (1, 4) if self.args.small else (64, 256)
        ids = [self.gsm8k.prompt_token_ids(p, tokenizer) for p in problems["prompt"][:count]]
        model = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.bfloat16)
        yield self.drawing(model.to(DEVICE), tokenizer, ids, size, n=8, max_tokens=tokens)

    def update(self, tokens):
        (tokenizer, rows), sizes = self.trained, (2, 8) if self.args.small else (64, 256)
        lora = dict(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
        own = dict(learning_rate=1e-9, max_completion_length=tokens)
        return self.run(
            self.args.model, place, rows, tokenizer, sizes, self.gsm8k.LoraConfig(**lora), **own
        )

    def serve(self, part):
        "Do a part of a case as often as the parent asks."
        case, *sizes = PARTS[part]
        for call in getattr(self, case)(sizes[self.args.small]):
            call() if case in ("grpo", "update") else self.turns.serve(call)


def work(pipe, args, folder):
    "The process of a version."
    worker = Worker(args, folder, Turns(pipe))
    pipe.send(worker.train_step.versions())
    while part := pipe.recv():
        _, error = worker.train_step.attempt(partial(worker.serve, part))
        pipe.send(dict(error=error) if error else {})
        worker.train_step.clear()


def commit(folder):
    "The commit of a checkout, and whether it was changed."
    git = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def measure(args, versions, part):
    "A part by every version, in turns; what each told of it."
    found = {version.name: {} for version in versions}
    for order in (part, (True, None), (True, None)):
        versions = [version for version, _ in ask(versions, order)]
    for turn in range(0 if part == SHORT else args.rounds):
        for version in versions[:: 1 - turn % 2 * 2]:
            for _, told in ask([version], (True, None)):
                for name in ("seconds", *WORK):
                    if told.get(name) is not None:
                        found[version.name].setdefault(name, []).append(told[name])
    if args.profile and (part == SHORT or PARTS[part][0] == "update"):
        for version in versions:
            ask([version], (True, args.out / f"{version.name}_{PARTS[part][0]}.txt"))
    ask(versions, (False, None))
    return found


def show(record):
    "A record as a table: seconds, their ratio to the first version, and the work."
    print(json.dumps({name: value for name, value in record.items() if name != "cases"}))
    for part, found in record["cases"].items():
        base = next(iter(found.values()))["seconds"]
        for name, told in found.items():
            s, text = told["seconds"], ""
            if s is not base:
                ratios = [a / b for a, b in zip(s, base)]
                middle, *ends = bootstrap(ratios, of=statistics.median)
                text = "; x {:.3f} ({:.3f} to {:.3f})".format(middle, *ends)
            text += "".join(f"; {w} {statistics.mean(told[w]):,.6g}" for w in WORK if w in told)
            if any(told.get("steps", [])) and PARTS[part][0] in ("draw", "rows"):
                text += f"; {1e3 * sum(s) / sum(told['steps']):.3f} ms a step"
            print(f"{part:29}{name:6}{statistics.median(s):8.4f} s, least {min(s):.4f}{text}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="NAME=CHECKOUT")
    parser.add_argument("--out", type=Path, default=Path("versions"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--show", type=Path)
    args = parser.parse_args()
    if args.show:
        for record in json.loads(args.show.read_text()):
            show(record)
        return
    if not args.versions:
        parser.error("name a checkout or more: old=../old now=.")
    if {"rows", "update"} & {*args.cases} and not (args.model and args.data):
        parser.error("rows and update need --model and --data; --cases names others")
    args.out.mkdir(parents=True, exist_ok=True)
    folders = {name: str(Path(x).resolve()) for name, x in (g.split("=", 1) for g in args.versions)}
    versions = [start(work, name, args.out, args, folder) for name, folder in folders.items()]
    told = [version.pipe.recv() for version in versions]
    commits = {name: commit(folder) for name, folder in folders.items()}
    record = dict(date=time.strftime("%Y-%m-%d"), **told[0], commits=commits, cases={})
    for part, (case, *_) in PARTS.items():
        if case in args.cases and (args.profile or part != SHORT):
            found = measure(args, versions, part)
            if all(found.values()):
                record["cases"][part] = found
            (args.out / "versions.json").write_text(json.dumps([record], indent=1))
    for version in versions:
        version.pipe.send(None)
    show(record)


if __name__ == "__main__":
    main()
