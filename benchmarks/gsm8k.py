"""A trained model on GSM8K: what it can before, GRPO with several rewards, supervised steps, what
it can after; every answer to the 1,319 test problems is judged, before and after alike.

    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR prompts
        greedy answers under five prompts and behind eight worked examples: the best is what a run
        has to beat
    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR run --reward right --seed 0
        one run, judged at its end; its adapter stays in DIR/NAME
        --reward right     1 for the right number in a box
                 random    1 or 0 by a coin: what the form of training alone brings
                 box       1 for any number in a box
                 form      as `collapse` in the tutorial: .1 for a last line '#### number', 1 for a
                           right number there, another prompt and a higher rate
                 gated     the same, with the .1 only where the number is right
                 anywhere  as `form`, with the 1 for a right number wherever it is
                 no_form   as `anywhere`, and nothing for the last line
        --supervised       the same rows and seconds, imitating GSM8K's worked solutions
        --scale, --beta, --rate, --group, --mask-truncated   what guides advise to change
        --only-gib 14.5    as much of the card's memory as a T4 has
        --server URL --staleness N   completions from a vLLM or `grpo-nb serve`
        --save N, --resume checkpoints, and on from the newest (`two_cards_lost.sh`)
    torchrun --nproc-per-node 2 benchmarks/gsm8k.py ... run
        the same completions in all, shared by two cards
    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR judge --adapter FOLDER --name trl_0
        an adapter in PEFT's layout, or the model without one, judged as at the end of a run
    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR samples --adapter FOLDER --name NAME
        64 sampled answers to each of the first 256 test problems, for pass@k and maj@k;
        --temperature .6: surer ones
    python benchmarks/gsm8k.py - --out DIR publish --name right_0 --adapter DIR/right_0
        a model card in an adapter's folder, of DIR/NAME.json and DIR/prompts.json: base, data,
        settings, before and after with intervals, failures; --to OWNER/NAME uploads the folder
    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR profile
        eight updates and the seconds of their parts; --kernels: the kernels of one of them

    python benchmarks/gsm8k.py - --out benchmarks/results/gsm8k show
        the table of what is stored, with 95 % intervals over problems and seeds

MODEL is a folder in transformers' form. FOLDER holds GSM8K's train.jsonl and test.jsonl. Each run
leaves DIR/NAME.json: settings, versions, card, the log of every update, completions of a few
updates, and a letter for each test problem (r right, w wrong, n no number, c cut): answered
greedily in 400 tokens (`after`) and in 1,024, sampled at temperature 1, and 581 of them greedily
with other numbers (`fresh_numbers.py`). In benchmarks/results/gsm8k logs and completions are
shortened to what pages read.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import random
import re
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from answers import (
    BASES,
    bootstrap,
    doubts,
    interval,
    majority_at,
    newly_solved,
    of_bases,
    pass_at,
    row_of_base,
)
from datasets import Dataset
from fresh_numbers import fresh_numbers
from peft import LoraConfig
from transformers import TrainerCallback

from grpo_nb import GRPOConfig, GRPOTrainer, RolloutEngine, SamplingParams
from grpo_nb.environments.gsm8k import gsm8k
from grpo_nb.environments.verifiers import final_number, right_number
from grpo_nb.training.data import prompt_token_ids
from grpo_nb.training.fine_tuning import adamw_with_warm_up, fine_tuning_step, written_batch

BOX = (
    "You are a helpful assistant. Reason step by step, and put your final answer within \\boxed{}."
)
LINE = "Solve the problem. End with a line '#### number' that holds the answer alone."
PROMPTS = {  # what the model is told, before the question and after it
    "box": (BOX, ""),
    "question alone": (None, ""),
    "step by step": (None, "\n\nLet's think step by step."),
    "line": (LINE, ""),
    "teacher": (
        "You teach arithmetic. Write down each calculation in a line of its own, check it, and "
        "then give the answer as a number.",
        "\nGive the final number in \\boxed{}.",
    ),
}
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
FIRST = os.environ.get("RANK", "0") == "0"  # the process that answers and writes
SHOTS = 8  # worked problems of the training rows that nobody trains on, as turns
LAST_LINE = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)\s*$")
FORMS = ("form", "gated", "anywhere", "no_form")  # under the prompt that asks for a last line
REWARDS = {
    "right": "1 for the right number",
    "random": "1 or 0 by a coin",
    "box": "1 for any number in a box",
    "form": ".1 for a last line `#### number`, 1 for a right number there",
    "anywhere": ".1 for a last line `#### number`, 1 for a right number anywhere",
    "no_form": "1 for a right number anywhere",
    "gated": "1.1 for a last line `#### number` with the right number",
}
KEPT = (0, 1, 5, 10, 20, 50, 80, 109)  # updates whose first completions are stored
KEPT_PROMPTS = 2


def conversation(row, system, after, shots=()):
    "A problem as chat messages, behind worked problems if there are any."
    head = [{"role": "system", "content": system}] if system else []
    for shot in shots:
        head += [
            {"role": "user", "content": shot["prompt"][-1]["content"] + after},
            {"role": "assistant", "content": re.sub(r"<<.*?>>", "", shot["solution"])},
        ]
    return [*head, {"role": "user", "content": row["prompt"][-1]["content"] + after}]


def judged(text, answer, cut):
    "One letter: right, wrong, no number, or cut before one that is right."
    value = final_number(text)
    if value is not None and value == right_number(answer):
        return "r"
    return "c" if cut else "n" if value is None else "w"


def answered(model, tokenizer, prompts, answers, most=400, temperature=0.0, batch=660):
    "Completions of all prompts, and a string with a letter for each."
    engine = RolloutEngine(model, tokenizer, max_batch_size=batch)
    ids = [prompt_token_ids(prompt, tokenizer) for prompt in prompts]
    began = time.perf_counter()
    params = SamplingParams(temperature=temperature, max_tokens=most, seed=0)
    drawn = engine.generate(ids, params, progress=False)
    texts = drawn.texts(tokenizer)
    marks = "".join(
        judged(text, answer, reason == "length")
        for text, answer, reason in zip(texts, answers, drawn.finish_reasons)
    )
    record = dict(
        marks=marks,
        right=round(marks.count("r") / len(marks), 6),
        tokens=round(float(drawn.lengths.float().mean()), 1),
        doubts=sum(map(doubts, texts)),
        most=most,
        seconds=round(time.perf_counter() - began, 1),
        way=engine.way,
    )
    return record, texts


# rewards


def text_of(completion):
    "The text of a completion, which is a string or chat messages."
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions, answer, **columns):
    "1 for the right number."
    texts = map(text_of, completions)
    return [float(final_number(t) == right_number(a)) for t, a in zip(texts, answer)]


def right_line(completions, answer, **columns):
    "1 for a last line '#### number' with the right number."
    found = [LAST_LINE.search(text_of(c)) for c in completions]
    return [float(bool(f) and final_number(f[1]) == right_number(a)) for f, a in zip(found, answer)]


def form_line(completions, **columns):
    "0.1 for a last line '#### number', whatever the number."
    return [0.1 * bool(LAST_LINE.search(text_of(c))) for c in completions]


def gated_line(completions, answer, **columns):
    "0.1 for a last line '#### number' that holds the right number."
    return [0.1 * one for one in right_line(completions, answer)]


def box(completions, **columns):
    "1 for a number in a box."
    return [
        float("\\boxed{" in text_of(c) and final_number(text_of(c)) is not None)
        for c in completions
    ]


class Coin:
    "1 or 0, whatever was answered."

    __name__ = "coin"

    def __init__(self, seed):
        self.random = random.Random(seed)

    def __call__(self, completions, **columns):
        return [float(self.random.random() < 0.5) for _ in completions]


class Kept:
    "A reward of 0 that keeps the first completions of a few updates."

    __name__ = "kept"

    def __init__(self, group):
        self.group, self.seen, self.rows = group, 0, []

    def __call__(self, prompts, completions, answer, **columns):
        if self.seen in KEPT:
            most = KEPT_PROMPTS * self.group
            self.rows += [
                dict(update=self.seen, question=p[-1]["content"], answer=a, completion=text_of(c))
                for p, c, a in zip(prompts[:most], completions, answer)
            ]
        self.seen += 1
        return [0.0] * len(completions)


class Stop(TrainerCallback):
    "Ends a run after so many seconds, and prints a line an update."

    def __init__(self, seconds):
        self.seconds, self.start, self.times = seconds, None, []

    def on_train_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(round(time.perf_counter() - self.start, 2))
        control.should_training_stop |= self.times[-1] > self.seconds

    def on_log(self, args, state, control, logs=None, **kwargs):
        names = ("reward", "completions/mean_length", "entropy", "step_time")
        if logs and "reward" in logs:
            told = (f"{name} {float(logs.get(name, 'nan')):.3f}" for name in names)
            print(state.global_step, *told, flush=True)


# runs


def run_settings(arguments, out, **own):
    "What runs of trained models share: rate held after five updates, small steps, one log a step."
    card = torch.cuda.is_available()
    shared = dict(
        output_dir=str(out),
        max_steps=arguments.updates,
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.completions // arguments.batch // PROCESSES,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        use_cpu=not card,
        bf16=card,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=arguments.checkpointing,
        seed=arguments.seed,
        report_to="none",
        max_grad_norm=0.2,
        adam_beta2=0.99,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    return GRPOConfig(**shared | own)


def settings(arguments, out):
    "The settings of a run; those of `form` are another prompt's, rate's and length's."
    form = arguments.reward in FORMS
    attention = {"attn_implementation": "sdpa"} if arguments.plain else {}
    saved = dict(save_strategy="steps", save_steps=arguments.save) if arguments.save else {}
    return run_settings(
        arguments,
        out,
        num_generations=arguments.group,
        max_completion_length=min(arguments.tokens, 300 if form else 400),
        learning_rate=arguments.rate or (5e-5 if form else 2e-5),
        beta=arguments.beta,
        scale_rewards=arguments.scale,
        mask_truncated_completions=arguments.mask_truncated,
        use_vllm=bool(arguments.server),
        vllm_mode="server",
        vllm_server_base_url=arguments.server,
        max_staleness=arguments.staleness,
        model_init_kwargs=None if other_base(arguments) else {"dtype": "bfloat16"} | attention,
        **saved,
    )


def prompt_of(arguments):
    "What the model is told, before the question and after it."
    return PROMPTS["line" if arguments.reward in FORMS else "box"]


def rows_of(data, count, system, after):
    "The first training rows with their prompts; a few are repeated until they fill a batch."
    rows = gsm8k("train", data, system_prompt=None).select(range(count))
    asked = [dict(row, prompt=conversation(row, system, after)) for row in rows]
    return Dataset.from_list(asked * max(1, 64 // count))


def make_trainer(arguments, out):
    "A trainer of the run that the arguments name, and what keeps completions."
    system, after = prompt_of(arguments)
    rows = rows_of(arguments.data, arguments.rows, system, after)
    rewards = {
        "right": [right],
        "random": [Coin(arguments.seed)],
        "box": [box],
        "form": [form_line, right_line],
        "anywhere": [form_line, right],
        "no_form": [right],
        "gated": [gated_line, right_line],
    }[arguments.reward]
    kept, stop = Kept(arguments.group), Stop(arguments.seconds)
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        fewer_bits(arguments) or arguments.model,
        [*rewards, kept],
        settings(arguments, out),
        rows,
        peft_config=lora,
        callbacks=[stop],
    )
    return trainer, kept, (system, after)


def imitate(trainer, arguments):
    "Supervised steps on the same rows for the same seconds; their losses."
    model, tokenizer = trainer.model, trainer.processing_class
    rows = [
        dict(
            prompt=tokenizer.apply_chat_template(
                row["prompt"], tokenize=False, add_generation_prompt=True
            ),
            answer=re.sub(r"<<.*?>>", "", row["solution"]).replace("\n#### ", "\n\\boxed{") + "}",
        )
        for row in trainer.train_dataset
    ]
    optimizer, schedule = adamw_with_warm_up(model, 2e-5)
    rng, losses, began = random.Random(arguments.seed), [], time.perf_counter()
    model.train()
    while time.perf_counter() - began < arguments.seconds:
        batch = written_batch(rng.sample(rows, 32), tokenizer, model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            losses.append(fine_tuning_step(model, batch, optimizer, schedule))
    model.eval()
    return losses


def facts(arguments):
    "What a reader needs to do it again."
    packages = ("torch", "transformers", "peft", "triton")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    names = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    names.update(model=Path(arguments.model).name)
    for name in ("data", "out", "server", "adapter"):
        names.pop(name, None)
    return dict(
        arguments=names,
        card=card,
        day=datetime.date.today().isoformat(),
        versions={name: importlib.metadata.version(name) for name in packages},
    )


def test_prompts(arguments, system, after, shots=()):
    "The test problems as conversations, and their answers."
    rows = gsm8k("test", arguments.data, system_prompt=None)
    rows = rows.select(range(min(arguments.problems, len(rows))))
    return [conversation(row, system, after, shots) for row in rows], rows["answer"]


def fresh_prompts(arguments, system, after):
    "Test problems as they are and with other numbers: two times (conversations, answers)."
    with open(arguments.data / "test.jsonl", encoding="utf-8") as file:
        rows = fresh_numbers([json.loads(line) for line in file])[: arguments.problems]
    for which in ("old", "new"):
        asked = [dict(prompt=[{"content": row[which]}]) for row in rows]
        answers = [row[f"{which}_answer"] for row in rows]
        yield which, [conversation(row, system, after) for row in asked], answers


def judgements(arguments, model, tokenizer, prompt):
    "A record for each way in which a model answers the test problems, and its greedy answers."
    asked, answers = test_prompts(arguments, *prompt)
    record = {}
    record["after"], texts = answered(model, tokenizer, asked, answers)
    if arguments.greedy:
        return record, texts
    record["after_1024"], _ = answered(model, tokenizer, asked, answers, most=1024)
    record["after_sampled"], _ = answered(model, tokenizer, asked, answers, temperature=1.0)
    for which, fresh, right_ones in fresh_prompts(arguments, *prompt):
        record[f"after_{which}_numbers"], _ = answered(model, tokenizer, fresh, right_ones)
    return record, texts


def changes(arguments, prompt, before, texts, marks, later):
    "Problems won and lost, four of each, with both answers."
    asked, answers = test_prompts(arguments, *prompt)
    for kind, which in (("won", ("w", "r")), ("lost", ("r", "w"))):
        found = [i for i, pair in enumerate(zip(before, marks)) if pair == which][:4]
        yield kind, [
            dict(problem=i, question=asked[i][-1]["content"], answer=answers[i],
                 before=texts[i], after=later[i])
            for i in found
        ]  # fmt: skip


def name_of(arguments):
    "A run's name: its reward and seed, unless it was given one."
    kind = "supervised" if arguments.supervised else arguments.reward
    return arguments.name or f"{kind}_{arguments.seed}"


def write(arguments, record):
    "DIR/NAME.json."
    (arguments.out / f"{name_of(arguments)}.json").write_text(json.dumps(record))


def run(arguments):
    "Train once; answers before and after."
    name, record, prompt = name_of(arguments), facts(arguments), prompt_of(arguments)
    if arguments.only_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.only_gib * 2**30 / total)
    trainer, kept, _ = make_trainer(arguments, arguments.out / name)
    model, tokenizer = trainer.model, trainer.processing_class
    if arguments.before and FIRST:
        record["before"], texts = answered(model, tokenizer, *test_prompts(arguments, *prompt))
        print(name, "before", record["before"]["right"], record["before"]["way"], flush=True)
    began = time.perf_counter()
    if arguments.supervised:
        record["losses"] = [round(x, 4) for x in imitate(trainer, arguments)]
    else:
        trainer.train(resume_from_checkpoint=arguments.resume)
        record["log"] = [row for row in trainer.log_history if "reward" in row]
        record["completions"] = kept.rows
    record["seconds"] = round(time.perf_counter() - began, 1)
    record["processes"] = PROCESSES
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        record["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        record["card_gib"] = round((total - free) / 2**30, 2)
    if not arguments.supervised:
        trainer.save_model(arguments.out / name)
    elif FIRST:
        model.save_pretrained(arguments.out / name)
    if not FIRST:
        return
    write(arguments, record)  # what follows may be cut short
    if arguments.after:
        judged_now, later = judgements(arguments, model, tokenizer, prompt)
        record |= judged_now
        if arguments.before:
            marks = record["before"]["marks"], texts, record["after"]["marks"], later
            record |= changes(arguments, prompt, *marks)
        write(arguments, record)
        print(name, {k: v["right"] for k, v in judged_now.items()}, flush=True)
    print(name, "seconds", record["seconds"], "GiB", record.get("peak_gib"), flush=True)


def other_base(arguments):
    "Whether the base's weights are asked for in fewer than 16 bits."
    return arguments.fp8 or arguments.four_bit or arguments.mxfp4


def fewer_bits(arguments):
    "The model whose weights are held in float8, NF4 or MXFP4, as asked; None if in 16 bits."
    if not other_base(arguments):
        return None
    from grpo_nb import load_model
    from grpo_nb.model import mxfp4

    model, _ = load_model(
        arguments.model,
        **dict(max_seq_length=2048, dtype="bfloat16", quiet=True),
        **dict(load_in_fp8=arguments.fp8 or False, load_in_4bit=arguments.four_bit),
    )
    if arguments.mxfp4:  # the library holds experts so, a dense model only its values
        for name, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and ".layers." in name:
                rounded = mxfp4.dequantize(*mxfp4.quantize(linear.weight.data), torch.bfloat16)
                linear.weight.data.copy_(rounded)
    return model


def loaded(arguments):
    "The model with its adapter, if one is named, and its tokenizer."
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = fewer_bits(arguments)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.adapter:
        model = PeftModel.from_pretrained(model, arguments.adapter)
    return model, AutoTokenizer.from_pretrained(arguments.model)


def judge(arguments):
    "An adapter's answers; what its training printed or logged stays with who trained it."
    prompt = prompt_of(arguments)
    record, _ = judgements(arguments, *loaded(arguments), prompt)
    print(arguments.name, {k: v["right"] for k, v in record.items()}, flush=True)
    path = arguments.out / f"{arguments.name}.json"
    known = json.loads(path.read_text()) if path.exists() else facts(arguments)
    path.write_text(json.dumps(known | record))


def votes_of(texts, answer):
    "[right answers, counts of the different wrong ones, answers without a number] of a problem."
    said = Counter(map(final_number, texts))
    silent, right_ones = said.pop(None, 0), said.pop(right_number(answer), 0)
    return [right_ones, sorted(said.values(), reverse=True), silent]


def samples(arguments):
    "What 64 sampled answers say, for each of 256 problems."
    asked, answers = test_prompts(arguments, *prompt_of(arguments))
    asked, answers, model = asked[:256], answers[:256], loaded(arguments)
    repeated = [a for a in answers for _ in range(64)]
    asked = [p for p in asked for _ in range(64)]
    found, texts = answered(*model, asked, repeated, temperature=arguments.temperature, batch=1024)
    found.pop("marks")
    votes = [votes_of(texts[64 * i : 64 * i + 64], answer) for i, answer in enumerate(answers)]
    print(arguments.name, found, flush=True)
    found |= dict(counts=[right_ones for right_ones, _, _ in votes], each=64, votes=votes)
    record = facts(arguments) | dict(samples=found)
    (arguments.out / f"{arguments.name}_samples.json").write_text(json.dumps(record))


def prompts(arguments):
    "Greedy answers of the untrained model under each prompt."
    record, (model, tokenizer) = facts(arguments), loaded(arguments)
    rows = gsm8k("train", arguments.data, system_prompt=None)
    shots = list(rows.select(range(len(rows) - SHOTS, len(rows))))
    ways = {name: (*told, ()) for name, told in PROMPTS.items()}
    ways["eight worked problems"] = (None, "", shots)
    for most in (400, 1024):
        names = ways if most == 400 else ("box", max(ways, key=lambda n: record[n]["right"]))
        for name in dict.fromkeys(names):
            asked, answers = test_prompts(arguments, *ways[name])
            found, texts = answered(model, tokenizer, asked, answers, most=most)
            record[name if most == 400 else f"{name}, {most}"] = found | {"texts": texts[:4]}
            print(name, most, found["right"], {m: found["marks"].count(m) for m in "rwnc"},
                  found["tokens"], found["seconds"], flush=True)  # fmt: skip
    (arguments.out / "prompts.json").write_text(json.dumps(record))


def profile(arguments):
    "Where the time of an update goes."
    arguments.updates, arguments.reward = 8, "right"
    trainer, *_ = make_trainer(arguments, arguments.out / "profile")

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                self.seen = torch.profiler.profile(activities=[
                    torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
                ])  # fmt: skip
                self.seen.start()
            if state.global_step == 6:
                torch.cuda.synchronize()
                self.seen.stop()
                table = self.seen.key_averages().table(
                    sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70
                )
                (arguments.out / "profile.txt").write_text(table)

    if arguments.kernels:
        trainer.add_callback(Look())
    trainer.train()
    for row in trainer.log_history:
        if "reward" in row:
            print({k: row[k] for k in row if k.startswith("seconds/") or k == "step_time"})
    print("peak GiB", torch.cuda.max_memory_allocated() / 2**30)


WAYS_ASKED = {
    "after": "greedily, 400 tokens",
    "after_1024": "greedily, 1,024 tokens",
    "after_sampled": "sampled, 400 tokens",
    "after_old_numbers": "581 of them, greedily",
    "after_new_numbers": "with other numbers",
}


KS = (1, 2, 4, 8, 16, 32, 64)


def chances(found):
    "way -> k -> the chance of each problem, of stored answers."
    ways = {"pass": {k: [pass_at(k, c, found["each"]) for c in found["counts"]] for k in KS}}
    if "votes" in found:
        ways["maj"] = {k: [majority_at(k, *one) for one in found["votes"]] for k in KS}
    return ways


def spread(values, times=100.0):
    "A mean, and its 95 % by a bootstrap over problems."
    mean, low, high = (times * one for one in bootstrap(values))
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def show_samples(name, found, before=None):
    """pass@k and maj@k of stored answers; beside those before training the differences, problem by
    problem, and what 32 answers solve newly and no longer, beside 32 others of before."""
    ways = chances(found)
    for way, by_k in ways.items():
        told = ", ".join(f"{k}: {spread(values)} %" for k, values in by_k.items())
        print(f"{name:8} {way}@k of {len(found['counts'])} problems: {told}")
    if before is None:
        return
    old = chances(before)
    for way in ways:
        gains = {k: [a - b for a, b in zip(ways[way][k], old[way][k])] for k in KS}
        told = ", ".join(f"{k}: {spread(values)}" for k, values in gains.items())
        print(f"{name:8} {way}@k, points more than before: {told}")
    now, then, twice = ways["pass"][32], old["pass"][32], old["pass"][64]
    moves = {
        "solved, and not before": [a * (1 - b) for a, b in zip(now, then)],
        "not solved, and before": [(1 - a) * b for a, b in zip(now, then)],
        "either, by 32 more of before": [b - a for a, b in zip(then, twice)],
    }
    told = ", ".join(f"{kind}: {spread(one, len(one))}" for kind, one in moves.items())
    print(f"{name:8} problems in 32 answers, {told}")


def show_new(counts, runs):
    "What stored runs solve of what was never solved before, and how often they doubt."
    for name, record in runs.items():
        if "after" not in record:
            continue
        never, now = newly_solved(counts, record["after"]["marks"])
        told = [f"{name:14} {now} of {never} problems without a right answer in 64 before"]
        kept = record.get("completions", ())
        for update in dict.fromkeys(row["update"] for row in (*kept[:1], *kept[-1:])):
            texts = [row["completion"] for row in kept if row["update"] == update]
            doubtful = sum(map(doubts, texts))
            told.append(f"words of doubt at update {update}: {doubtful} of {len(texts)} answers")
        print("; ".join(told))


def show_bases(stored):
    "The same updates on bases of fewer bits; their records leave `stored`."
    found = [*of_bases(stored)]
    if len(found) > 1:
        print("base: GiB, tokens/s, s an update, gap, right before, after, gained, over bfloat16")
        for base, *known in found:
            print(f"{BASES[base]:26} " + " | ".join(row_of_base(stored, base, *known)))
    for name in [*stored]:
        if name.rpartition("_")[0] in BASES:
            del stored[name]


def show(arguments):
    "The stored prompts and runs as a table."
    stored = {p.stem: json.loads(p.read_text()) for p in sorted(arguments.out.glob("*.json"))}
    show_bases(stored)
    drawn = {name: stored.pop(name)["samples"] for name in [*stored] if "samples" in stored[name]}
    untrained = drawn.get("before_votes_samples")
    for name, found in drawn.items():
        trained = "votes" in found and found is not untrained
        show_samples(name.removesuffix("_samples"), found, untrained if trained else None)
    if "before_votes_samples" in drawn:
        show_new(drawn["before_votes_samples"]["counts"], stored)
    prompts = {n: r for n, r in stored["prompts"].items() if "marks" in r and r["most"] == 400}
    best = max(prompts, key=lambda n: prompts[n]["right"])
    print(stored["prompts"]["arguments"]["model"])
    for name, r in prompts.items():
        print(f"{name:22} {r['right']:6.1%} at 400 tokens" + " (the best)" * (name == best))
    asked, given = stored.pop("prompts"), stored.pop("before")
    told = {"after": asked[best], "after_1024": asked[f"{best}, 1024"]}  # the others: one prompt
    told |= {way: given[way] for way in WAYS_ASKED if way not in told}
    for kind in dict.fromkeys(n.rpartition("_")[0] for n in stored):
        runs = [r for n, r in stored.items() if n.rpartition("_")[0] == kind]
        seconds = ", ".join(f"{r['seconds']:.0f} s" for r in runs)
        counts = ", ".join(str(len(r.get("log") or r["losses"])) for r in runs)
        print(f"{kind}: {len(runs)} seed(s), {counts} updates in {seconds}")
        for way, words in WAYS_ASKED.items():
            judged_runs = [r[way] for r in runs if way in r]
            if judged_runs:
                marks = [r["marks"] for r in judged_runs]
                gain = "{:+.1f} points ({:+.1f} to {:+.1f})".format(
                    *interval(marks, told[way]["marks"])
                )
                rights = ", ".join(f"{r['right']:.1%}" for r in judged_runs)
                print(f"    {words:24} {rights}; {gain} over {told[way]['right']:.1%}")


BASE = "Qwen/Qwen2.5-Coder-0.5B-Instruct"  # what the GGUF's weights are near to
SOURCE = (
    "weights of `qwen2.5-coder-0.5b-instruct-q4_k_m.gguf` of Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF "
    "(sha256 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32), taken back to "
    "bfloat16: near the released ones and not equal; the adapter was not tried on those"
)
LETTERS = {"w": "wrong", "n": "no number found", "c": "cut before a right one"}


def told_of(record, asked):
    "What a card says of a run: what -> value. `asked` holds the prompts before training."
    given, log, told = record["arguments"], record["log"], {"base": SOURCE}
    told["rows"] = f"the first {given['rows']:,} training rows of GSM8K"
    told["reward"] = f"`{given['reward']}`: {REWARDS[given['reward']]}"
    told["updates"] = (
        f"{len(log)} of {given['completions']} completions, {record['seconds']:.0f} s on one "
        f"{record['card']}, {record['day']}, seed {given['seed']}"
    )
    told["ran with"] = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    prompts = {n: r for n, r in asked.items() if "marks" in r and r["most"] == 400}
    best = max(prompts, key=lambda name: prompts[name]["right"])
    for most, key in ((400, "after"), (1024, "after_1024")):
        before = asked[best if most == 400 else f"{best}, {most}"]["marks"]
        gain, low, high = interval([record[key]["marks"]], before)
        told[f"right of {len(before):,} test problems, greedily, {most:,} tokens"] = (
            f"{record[key]['right']:.1%}; {before.count('r') / len(before):.1%} before with the "
            f"best of {len(prompts)} prompts: {gain:+.1f} points ({low:+.1f} to {high:+.1f}, 95 % "
            "over problems, one seed)"
        )
        marks = record[key]["marks"]
        told[f"not right, {most:,} tokens"] = ", ".join(
            f"{words} {marks.count(letter)}" for letter, words in LETTERS.items()
        )
    return told


def publish(arguments):
    "A model card with the curve in an adapter's folder, which is uploaded if asked for."
    from types import SimpleNamespace

    from huggingface_hub import EvalResult

    from grpo_nb.training.hub import Repository, model_card, shown_settings, write_card

    stored = [arguments.out / f"{name}.json" for name in (arguments.name, "prompts")]
    record, asked = (json.loads(path.read_text()) for path in stored)
    base = SimpleNamespace(config=SimpleNamespace(_name_or_path=BASE), peft_config={})
    base.get_base_model = lambda: base
    local = "use_cpu", "bf16", "vllm_mode"  # of the machine that writes the card
    log = [{"num_tokens": None} | row for row in record["log"]]  # what tells updates in a log
    ran = argparse.Namespace(**vars(arguments) | record["arguments"])
    card = model_card(
        arguments.to or arguments.name,
        base,
        told_of(record, asked),
        history=log,
        settings={k: v for k, v in shown_settings(settings(ran, "out")).items() if k not in local},
        dataset_name="openai/gsm8k",
        license="apache-2.0",
        language="en",
    )
    card.data.eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="openai/gsm8k",
            dataset_name="GSM8K",
            dataset_config="main",
            dataset_split="test",
            metric_type="accuracy",
            metric_name=f"greedy accuracy, {record[key]['most']:,} tokens",
            metric_value=record[key]["right"],
        )
        for key in ("after", "after_1024")
    ]
    write_card(card, arguments.adapter, log)
    print(arguments.adapter / "README.md")
    if arguments.to:
        Repository(arguments.to).upload(arguments.adapter, "Upload an adapter")


WAYS = dict(prompts=prompts, run=run, judge=judge, samples=samples, publish=publish)
WAYS |= dict(profile=profile, show=show)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("what", choices=tuple(WAYS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--reward", choices=tuple(REWARDS), default="right")
    parser.add_argument("--supervised", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=110)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rows", type=int, default=2000, help="training rows, the first ones")
    parser.add_argument("--batch", type=int, default=64, help="completions of a micro-batch")
    parser.add_argument("--completions", type=int, default=256, help="of an update")
    parser.add_argument("--group", type=int, default=8, help="completions of a problem")
    parser.add_argument("--tokens", type=int, default=400, help="of a completion, at most")
    parser.add_argument("--mask-truncated", action="store_true", help="cut ones are not trained on")
    parser.add_argument("--problems", type=int, default=1319, help="test problems, the first ones")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="a table of kernels (profile)")
    parser.add_argument(
        "--no-before", dest="before", action="store_false", help="it was answered by `prompts`"
    )
    parser.add_argument("--plain", action="store_true", help="transformers' attention and layers")
    parser.add_argument("--no-after", dest="after", action="store_false", help="train alone")
    parser.add_argument("--greedy", action="store_true", help="judged greedily in 400 tokens alone")
    parser.add_argument("--scale", choices=("group", "batch", "none"), default="group")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--only-gib", type=float)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--server", help="address of a vLLM or `grpo-nb serve` that draws")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--save", type=int, default=0, help="updates between checkpoints; 0: none")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    parser.add_argument("--adapter", type=Path, help="judge, samples: a folder in PEFT's layout")
    parser.add_argument("--fp8", choices=("row", "block"), help="the base in float8")
    parser.add_argument("--four-bit", action="store_true", help="the base in NF4")
    parser.add_argument("--mxfp4", action="store_true", help="the base's values in MXFP4")
    parser.add_argument("--name", help="of the record")
    parser.add_argument("--to", help="publish: a repository on the hub, OWNER/NAME")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("default", category=UserWarning)
    WAYS[arguments.what](arguments)


if __name__ == "__main__":
    main()
