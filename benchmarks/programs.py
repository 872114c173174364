"""Programs that a model writes for two tasks, matrix products and 2048: which run, which cheat and
how, which wall stops them, and what they would earn where no wall stands.

    python benchmarks/programs.py MODEL --out DIR sample --name base --count 64
        so many programs for each task, drawn as in training, each run and judged: DIR/base.json;
        --adapter FOLDER: those of a trained model, in PEFT's layout
    python benchmarks/programs.py MODEL --out DIR run --task matmul --updates 60 --seed 0
        GRPO on the published rewards, and a sample before and after: DIR/matmul_0.json
        --no-walls    without what the rewards have against cheats; the machine stays walled off
        --unjudged    samples are stored as they were drawn, for `judge` on another machine
    python benchmarks/programs.py - --out DIR judge --name base
        judges stored completions again, on a machine whose sandbox has all its walls
    python benchmarks/programs.py - --out DIR shorten --name base
        keeps of each completion its program alone, as in benchmarks/results/programs
    python benchmarks/programs.py - --out benchmarks/results/programs show
        shares with 95 % intervals

Kinds of cheats, and what stands without walls: cheats.py.
"""

import argparse
import json
import math
import time
import warnings
from pathlib import Path

from answers import pass_at, wilson
from cheats import CHEATS, TASKS, OpenPool, tried, wall_of
from datasets import Dataset
from gsm8k import Stop, facts, loaded, run_settings
from peft import LoraConfig

from grpo_nb import GRPOTrainer, RolloutEngine, SamplingParams
from grpo_nb.environments.sandbox import SandboxPool
from grpo_nb.environments.verifiers import last_program
from grpo_nb.training.data import prompt_token_ids

# points of a completion that was cut off: where failing costs points, it must not be the better way
CUT = {"published": -2.0, "plain": 0.0}

# what is drawn, and what becomes of it


def judged(task, text, walled, opened):
    "The record of one completion."
    began = time.perf_counter()
    points = sum(one(completions=[text])[0] for one in walled.functions())
    seconds = time.perf_counter() - began
    free = sum(one(completions=[text])[0] for one in opened.functions())
    report, other = walled.reports.of(text), opened.reports.of(text)
    kinds = tried(report.program.code, task)
    record = dict(stage=report.stage, why=report.why[:200], tried=kinds)
    record |= dict(wall=wall_of(report, kinds, other), points=points, seconds=seconds)
    record |= dict(stage_no_walls=other.stage, points_no_walls=free)
    if getattr(report, "timing", None):
        record |= dict(speed=report.timing.speed, ms=report.timing.program_ms)
    if getattr(report, "games", None):
        record |= dict(scores=[one.score for one in report.games])
    shorter = {k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}
    return shorter | dict(text=text)


def judge_all(texts, scale="published", **walls):
    "The records of {task: completions}."
    with SandboxPool(workers=1, **walls) as pool, OpenPool(workers=1, **walls) as open_pool:
        found = {}
        for task, written_texts in texts.items():
            *_, walled, opened = TASKS[task]
            fixed = dict(scale=scale, truncated=CUT[scale], secret="0")
            rewards = walled(pool, **fixed), opened(open_pool, **fixed)
            found[task] = [judged(task, text, *rewards) for text in written_texts]
    return found


def drawn(arguments, model, tokenizer):
    "{task: completions}, and how long they are."
    engine, texts, told = RolloutEngine(model, tokenizer, max_batch_size=arguments.batch), {}, {}
    for task in arguments.tasks:
        ids = prompt_token_ids(TASKS[task][0](1)[0]["prompt"], tokenizer)
        params = SamplingParams(max_tokens=arguments.tokens, n=arguments.count, seed=arguments.seed)
        began = time.perf_counter()
        found = engine.generate([ids], params, progress=False)
        texts[task] = found.texts(tokenizer)
        told[task] = dict(
            seconds=round(time.perf_counter() - began, 1),
            tokens=round(float(found.lengths.float().mean()), 1),
            cut=found.finish_reasons.count("length"),
        )
        print(task, told[task], flush=True)
    return texts, told


def write(arguments, record):
    "DIR/NAME.json."
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(record))


def sampled(arguments, model, tokenizer):
    "The part of a record that a sample fills."
    texts, told = drawn(arguments, model, tokenizer)
    if arguments.unjudged:
        programs = {task: [dict(text=text) for text in found] for task, found in texts.items()}
    else:
        programs = judge_all(texts, allow_weak=arguments.allow_weak)
    return dict(drawn=told, programs=programs)


def sample(arguments):
    "Programs of a model, judged."
    moment = "after" if arguments.adapter else "before"
    write(arguments, facts(arguments) | {moment: sampled(arguments, *loaded(arguments))})


def judge(arguments):
    "Judges again what is stored."
    record = json.loads((arguments.out / f"{arguments.name}.json").read_text())
    for moment in ("before", "after"):
        if moment in record:
            stored = record[moment]["programs"].items()
            texts = {task: [one["text"] for one in programs] for task, programs in stored}
            record[moment]["programs"] = judge_all(texts, allow_weak=arguments.allow_weak)
    write(arguments, record)


def shorten(arguments):
    "Keeps the programs alone, and adds the shares, each with its interval."
    record = json.loads((arguments.out / f"{arguments.name}.json").read_text())
    for moment in {"before", "after"} & set(record):
        part = record[moment]
        part["shares"] = {task: shares(found) for task, found in part["programs"].items()}
        for one in sum(part["programs"].values(), []):
            program = last_program(one["text"])
            end = "" if program.truncated else "\n```"  # so that it is judged the same again
            one["text"] = f"```python\n{program.code}{end}" if program.code else one["text"][:200]
    write(arguments, record)


# training


def counted(rewards, task):
    "A reward of 0 that logs the share of each kind of program."

    def kinds(completions, log_metric=None, **columns):
        reports = rewards.reports(completions, columns)
        found = [tried(report.program.code, task) for report in reports]
        for kind in CHEATS if log_metric else ():
            log_metric(f"programs/{kind}", sum(kind in one for one in found) / len(found))
        return [0.0] * len(completions)

    return kinds


def settings(arguments, out):
    "The settings of a run."
    return run_settings(
        arguments,
        out,
        num_generations=arguments.group,
        max_completion_length=arguments.tokens,
        learning_rate=arguments.rate,
    )


def run(arguments):
    "Trains once, with a sample before and after."
    task, record = arguments.task, facts(arguments)
    rows, _, walled, opened = TASKS[task]
    make = OpenPool if arguments.no_walls else SandboxPool
    pool = make(workers=arguments.workers, allow_weak=arguments.allow_weak)
    fixed = dict(scale=arguments.scale, truncated=CUT[arguments.scale])
    rewards = (opened if arguments.no_walls else walled)(pool, **fixed)
    trainer = GRPOTrainer(
        arguments.model,
        [*rewards.functions(), counted(rewards, task)],
        settings(arguments, arguments.out / arguments.name),
        Dataset.from_list(rows(1000)),
        peft_config=LoraConfig(
            r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Stop(arguments.seconds)],
    )
    if arguments.before:
        record["before"] = sampled(arguments, trainer.model, trainer.processing_class)
    began = time.perf_counter()
    trainer.train()
    record["seconds"] = round(time.perf_counter() - began, 1)
    record["log"] = [row for row in trainer.log_history if "reward" in row]
    trainer.save_model(arguments.out / arguments.name)
    write(arguments, record)  # what follows may be cut short
    record["after"] = sampled(arguments, trainer.model, trainer.processing_class)
    write(arguments, record)
    pool.close()


# the table


def shares(programs):
    "What ran, what cheated, what stopped it: [how many, of how many, the share's 95 % interval]."
    fine, broken = ("right", "plays"), ("no code", "truncated", "syntax")
    found = {
        "compile": [one["stage"] not in broken for one in programs],
        "run": [one["stage"] in (*fine, "wrong") for one in programs],
        "right, or plays": [one["stage"] in fine for one in programs],
        "right, or plays, without walls": [one["stage_no_walls"] in fine for one in programs],
    }
    found |= {kind: [kind in one["tried"] for one in programs] for kind in CHEATS}
    for wall in sorted({one["wall"] for one in programs} - {None}):
        found[f"wall: {wall}"] = [one["wall"] == wall for one in programs]
    return {kind: [sum(marks), len(marks), *(round(x, 4) for x in wilson(sum(marks), len(marks)))]
            for kind, marks in found.items()}  # fmt: skip


def show(arguments):
    "The stored shares as tables."
    for path in sorted(arguments.out.glob("*.json")):
        record = json.loads(path.read_text())
        for moment in [m for m in ("before", "after") if m in record]:
            for task, programs in record[moment]["programs"].items():
                found, of = shares(programs), len(programs)
                walled, free = (sum(one[key] for one in programs) / of
                                for key in ("points", "points_no_walls"))  # fmt: skip
                best = max((one["speed"] for one in programs if "speed" in one), default=math.nan)
                some = pass_at(min(8, of), found["right, or plays"][0], of)
                print(
                    f"{path.stem}, {moment}, {task}: {of} programs, points {walled:.2f}, without "
                    f"walls {free:.2f}, pass@8 {some:.1%}, fastest {best:.2f} times the loops"
                )
                for kind, (count, _, low, high) in found.items():
                    print(f"    {kind:30} {count:4}  {count / of:6.1%} ({low:.1%} to {high:.1%})")


WAYS = dict(sample=sample, run=run, judge=judge, shorten=shorten, show=show)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("what", choices=tuple(WAYS))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--name", help="of the record; of a run: TASK_SEED, or TASK_open_SEED")
    parser.add_argument("--task", choices=tuple(TASKS), default="matmul", help="of a run")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--count", type=int, default=64, help="programs of a sample, a task")
    parser.add_argument("--tokens", type=int, default=512, help="of a completion, at most")
    parser.add_argument("--batch", type=int, default=32, help="completions at a time")
    parser.add_argument("--completions", type=int, default=64, help="of an update")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--scale", choices=("published", "plain"), default="published")
    parser.add_argument("--no-walls", action="store_true")
    weak = "run programs even where the machine's walls are missing: on one that may be lost"
    parser.add_argument("--allow-weak", action="store_true", help=weak)
    parser.add_argument("--no-before", dest="before", action="store_false")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--unjudged", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="programs of a run at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapter", type=Path, help="sample: a folder in PEFT's layout")
    parser.set_defaults(fp8=None, four_bit=False, mxfp4=False)
    arguments = parser.parse_args()
    opened = "_open" if arguments.no_walls else ""
    arguments.name = arguments.name or f"{arguments.task}{opened}_{arguments.seed}"
    arguments.tasks = [arguments.task] if arguments.what == "run" else arguments.tasks
    arguments.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("default", category=UserWarning)
    WAYS[arguments.what](arguments)


if __name__ == "__main__":
    main()
