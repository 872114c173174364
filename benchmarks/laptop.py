"""A trained model on a laptop: SmolLM2-135M or one like it learns a small task on two cores.

    python benchmarks/laptop.py MODEL OUT.json --task json --seed 0 --seconds 960
        one run: MODEL is a folder in transformers' form. OUT.json gets the settings, the versions,
        the log of every update, held-out accuracy before and after (greedy, and sampled at
        temperature 1) and answers to the same problems before and after

The task `json`: a sentence about a person becomes JSON, right if it is nothing but JSON with the
same values, the age as a number. Names and places of the problems held out are in none trained on.
Others are in TASKS.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import random
import re
import tempfile
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from grpo_nb import GRPOConfig, GRPOTrainer, RolloutEngine, SamplingParams, load_model
from grpo_nb.training.data import prompt_token_ids

NAMES = (
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nick Olga Paul Rosa Sam "
    "Tina Victor Wendy Alan Bella Carl Diana Eric Fiona George Helen Ivan Julia Kevin"
).split()
PLACES = (
    "Paris London Rome Berlin Madrid Vienna Oslo Prague Lisbon Dublin Athens Warsaw Boston Chicago "
    "Tokyo Cairo Sydney Toronto Milan Geneva Hamburg Seattle Denver Lima"
).split()
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "{name}, aged {age}, has moved to {city}.",
    "At the age of {age}, {name} works in {city}.",
)


def largest(draw, count=4, most=100):
    "The largest of some numbers."
    numbers = draw.sample(range(10, most), count)
    return (
        f"Which is the largest of these numbers: {', '.join(map(str, numbers))}? "
        "Answer with the number only.",
        str(max(numbers)),
    )


def after(draw):
    "The next number."
    number = draw.randint(10, 9_998)
    return f"Which number comes after {number}?", str(number + 1)


def record_of_person(draw, held_out, keys=("name", "age", "city"), only=""):
    "What a sentence tells, as JSON; those held out have names and places of their own."
    part = slice(1, None, 2) if held_out else slice(None, None, 2)
    facts = dict(
        name=draw.choice(NAMES[part]), age=draw.randint(18, 90), city=draw.choice(PLACES[part])
    )
    told = draw.choice(SENTENCES).format(**facts)
    named = ", ".join(f'"{key}"' for key in keys[:-1]) + f' and "{keys[-1]}"'
    answer = json.dumps({key: facts[key] for key in keys})
    return f"Write this as JSON with the keys {named}: {told}{only}", answer


TASKS = {  # a problem and its answer
    "json": record_of_person,
    "json only": lambda draw, held_out: record_of_person(
        draw, held_out, only=" Answer with the JSON only."
    ),
    "json short": lambda draw, held_out: record_of_person(draw, held_out, ("name", "age")),
    "largest": lambda draw, held_out: largest(draw),
    "largest of 3": lambda draw, held_out: largest(draw, 3),
    "after": lambda draw, held_out: after(draw),
}


def problems(task, count, seed, shots=0, held_out=False, without=()):
    "Rows with a prompt as chat messages, behind `shots` solved problems, the same in all rows."
    draw, of = random.Random(seed), TASKS[task]
    head = [of(random.Random(f"shot {i}"), False) for i in range(shots)]
    roles = ("user", "assistant")
    turns = [{"role": r, "content": text} for shot in head for r, text in zip(roles, shot)]
    rows, seen = [], {asked for asked, _ in head} | set(without)
    for _ in range(20 * count):  # a task with few problems gives fewer
        asked, answer = of(draw, held_out)
        if asked not in seen and len(rows) < count:
            prompt = [*turns, {"role": "user", "content": asked}]
            rows.append(dict(prompt=prompt, asked=asked, answer=answer))
            seen.add(asked)
    return rows


FENCE = re.compile(r"^```(?:json)?\s|\s```$")


def is_right(text, answer):
    "Whether the answer stands alone: JSON with the same values, or a text but for a full stop."
    text = text.strip()
    if not answer.startswith("{"):
        return text.rstrip(".").strip() == answer
    try:
        return json.loads(FENCE.sub("", text)) == json.loads(answer)
    except ValueError:
        return False


def right(completions, answer, **columns):
    "1 for the answer and nothing else."
    texts = (c if isinstance(c, str) else c[-1]["content"] for c in completions)
    return [float(is_right(text, a)) for text, a in zip(texts, answer)]


def measured(model, tokenizer, rows, tokens, temperature=0.0):
    "The share answered right, and the answers."
    engine = RolloutEngine(model, tokenizer, max_batch_size=100)
    ids = [prompt_token_ids(row["prompt"], tokenizer) for row in rows]
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=0)
    texts = engine.generate(ids, params, progress=False).texts(tokenizer)
    return sum(is_right(t, row["answer"]) for t, row in zip(texts, rows)) / len(rows), texts


class Watch(TrainerCallback):
    "Ends a run after so many seconds, and measures held-out problems on the way."

    def __init__(self, rows, arguments, record):
        self.rows, self.given, self.record, self.away = rows, arguments, record, 0.0

    def on_train_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        began = time.perf_counter()
        control.should_training_stop |= began - self.start - self.away > self.given.seconds
        if state.global_step % self.given.every == 0:
            right, _ = measured(model, processing_class, self.rows, self.given.tokens)
            self.record["held_out_100"][state.global_step] = round(right, 4)
            self.record["log"] = [row for row in state.log_history if "reward" in row]
            write(self.record, self.given)  # a run that is cut off has left its log
            self.away += time.perf_counter() - began
            print(state.global_step, "held out", round(right, 3), flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            names = ("reward", "completions/mean_length", "entropy", "step_time")
            print(state.global_step, *(f"{n} {logs.get(n, 0):.3f}" for n in names), flush=True)


def settings(given, out):
    "The settings of a run."
    return GRPOConfig(
        output_dir=str(out),
        max_steps=given.updates,
        per_device_train_batch_size=given.rows or given.prompts * given.group,
        gradient_accumulation_steps=given.prompts * given.group // given.rows if given.rows else 1,
        num_generations=given.group,
        max_completion_length=given.tokens,
        temperature=given.temperature,
        learning_rate=given.rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        max_grad_norm=given.norm,
        adam_beta2=0.98,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        seed=given.seed,
        disable_tqdm=True,
    )


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("out", type=Path)
    add("--task", choices=list(TASKS), default="json")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=960.0, help="of training, measuring left out")
    add("--updates", type=int, default=10_000)
    add("--prompts", type=int, default=8, help="problems in an update")
    add("--group", type=int, default=8, help="answers to each")
    add(
        "--rows",
        type=int,
        help="answers that are trained on at a time: the same update, less memory",
    )
    add("--tokens", type=int, default=40, help="of an answer at most")
    add("--shots", type=int, default=0, help="solved problems before each")
    add("--rate", type=float, default=5e-4)
    add("--norm", type=float, default=0.5, help="the gradient's at most")
    add("--rank", type=int, default=16, help="of the adapters; 0: all weights train")
    add("--temperature", type=float, default=1.0)
    add("--held-out", type=int, default=200)
    add("--every", type=int, default=10, help="updates from one measurement to the next")
    add("--threads", type=int, default=2)
    return parser.parse_args()


def facts(given):
    "What a reader needs to do it again."
    names = ("torch", "transformers", "peft")
    cpu = None
    with contextlib.suppress(OSError):
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return dict(
        settings={k: v for k, v in vars(given).items() if k not in ("model", "out")},
        model=Path(given.model).resolve().name,
        cpu=cpu[1] if cpu else platform.processor(),
        day=datetime.date.today().isoformat(),
        versions={name: importlib.metadata.version(name) for name in names},
    )


def write(record, given):
    "Leave the record in a file, whole or as it was."
    given.out.parent.mkdir(parents=True, exist_ok=True)
    part = given.out.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1))
    part.replace(given.out)


def main(given):
    "Train once, measure before and after, write one file."
    torch.set_num_threads(given.threads)
    began = time.perf_counter()
    model, tokenizer = load_model(
        given.model, max_seq_length=512, dtype="float32", lora_r=given.rank
    )
    held_out = problems(given.task, given.held_out, 10_000, given.shots, True)
    asked = [row["asked"] for row in held_out]
    train = problems(given.task, 2_000, given.seed, given.shots, False, asked)
    record = facts(given) | dict(before={}, after={}, held_out_100={})
    watch = Watch(held_out[:100], given, record)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model, right, settings(given, folder), train, processing_class=tokenizer,
            callbacks=[watch],
        )  # fmt: skip
        texts = {}
        for when in ("before", "after"):
            for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                share, texts[when, name] = measured(
                    trainer.model, tokenizer, held_out, given.tokens, temperature
                )
                record[when][name] = round(share, 4)
            print(when, record[when], flush=True)
            if when == "before":
                start = time.perf_counter()
                trainer.train()
                record["training_seconds"] = round(time.perf_counter() - start - watch.away, 1)
    record["log"] = [row for row in trainer.log_history if "reward" in row]
    record["answers"] = [
        dict(asked=row["asked"], answer=row["answer"])
        | {f"{when} {name}": texts[when, name][i] for when, name in texts}
        for i, row in enumerate(held_out[:30])
    ]
    record["seconds"] = round(time.perf_counter() - began, 1)
    write(record, given)


if __name__ == "__main__":
    main(parsed())
