"""Does it learn alike in every number format and with every sampler? The sums of
learns_like_trl.py on a GPU, with this library alone.

    python benchmarks/learns_on_a_card.py
        four seeds of each kind; no run begins after 7 minutes; the table comes last
    python benchmarks/learns_on_a_card.py --seeds 2 --updates 2 --every 2 --warm-up 5 --out new.json
        to try it out, also without a GPU

Every kind starts from the same model at a seed: its experts are rounded to MXFP4 before the
warm-up, which leaves them as they are, so that a base in MXFP4 holds the same weights. Heads and
windows are wide enough for the kernels that decode. The kinds, in which float32 and bf16 are what
is computed in:

    all weights train: float32 with the engine's decoder, with the engine through the model's
        modules, and with transformers' generate in a `rollout_func`; bf16
    adapters of rank 16 train on all linear layers and experts: on a base in float32, in bf16, and
        with experts in MXFP4

An interval is the 95 % interval of a mean over seeds; the last lines compare the runs of each seed
with those of the first kind.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from learns_like_trl import (
    SUMS,
    TASK,
    Results,
    arguments,
    learn,
    prompts_of,
    table,
    versions,
    warm_model,
)

import grpo_nb
from grpo_nb.demo import MAX_TOKENS, one_thread
from grpo_nb.environments.arithmetic import addition_problems
from grpo_nb.model.packed import pack

SIZES = dict(num_attention_heads=4, head_dim=32, sliding_window=16)
ADAPTERS = dict(lora_r=16, lora_targets="all")
FASTER = dict(learning_rate=4 * TASK["learning_rate"])  # adapters take larger steps


def drawn_by_generate(prompts, trainer):
    "A rollout function: completions of transformers' own generate, with their log-probs."
    model, tokenizer = trainer.model, trainer.processing_class
    given = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    out = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=MAX_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    drawn = out.sequences[:, given["input_ids"].shape[1] :]  # (B, T)
    logps = torch.stack(out.logits, 1).float().log_softmax(-1)  # (B, T, V)
    logps = logps.gather(-1, drawn[..., None])[..., 0]  # (B, T)
    ends = (drawn == tokenizer.eos_token_id).long()
    lengths = ((ends.cumsum(1) - ends) == 0).sum(1).tolist()  # the end token included
    return {
        "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [ids[:n] for ids, n in zip(drawn.tolist(), lengths)],
        "logprobs": [values[:n] for values, n in zip(logps.tolist(), lengths)],
    }


def through_modules(trainer):
    "Let the engine call the model's modules."
    trainer.engine.through_modules = True


# name -> how the model is loaded, settings of the run, other arguments of `learn`
KINDS = {
    "float32": (dict(dtype="float32"), dict(bf16=False), {}),
    "float32, modules": (
        dict(dtype="float32"),
        dict(bf16=False),
        dict(prepare=through_modules),
    ),
    "float32, generate": (
        dict(dtype="float32"),
        dict(bf16=False),
        dict(rollout_func=drawn_by_generate),
    ),
    "bf16": (dict(dtype="float32"), dict(bf16=True), {}),
    "float32, adapters": (dict(dtype="float32", **ADAPTERS), dict(bf16=False, **FASTER), {}),
    "bf16, adapters": (dict(dtype="bfloat16", **ADAPTERS), dict(bf16=True, **FASTER), {}),
    "MXFP4, adapters": (
        dict(dtype="bfloat16", load_in_4bit=True, **ADAPTERS),
        dict(bf16=True, **FASTER),
        {},
    ),
}


def round_experts(model):
    "Round the experts' weights to MXFP4, and leave them out of the warm-up."
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight.data = pack(weight.data).dequantize()
            weight.requires_grad_(False)


def warm_folder(seed, train, args):
    "A folder with the warmed-up model of a seed, and its tokenizer."
    with one_thread():
        model, tokenizer = warm_model(seed, train, args.warm_up, change=round_experts, **SIZES)
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    return folder, tokenizer


def run_kind(kind, seed, folder, tokenizer, rows, held_out, args):
    "One run."
    loading, settings, arguments = KINDS[kind]
    model, _ = grpo_nb.load_model(
        folder, max_seq_length=64, tokenizer=tokenizer, seed=seed, quiet=True, **loading
    )
    settings = dict(TASK, **settings) | dict(max_steps=args.updates, seed=seed)
    settings["use_cpu"] = not torch.cuda.is_available()
    return learn(grpo_nb, model, tokenizer, rows, held_out, args.every, settings, **arguments)


def main():
    parser = arguments(__doc__, 4, 150, Path("learns_on_a_card.json"))
    parser.add_argument("--minutes", type=float, default=7, help="no run begins after them")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    args, start = parser.parse_args(), time.monotonic()
    train, held_out = addition_problems(**SUMS)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    task = dict(TASK, **SUMS, updates=args.updates, every=args.every, warm_up=args.warm_up)
    results = Results(args.out, {"task": task, "card": card, "versions": versions("peft")})
    end = start + 60 * args.minutes
    for seed in range(args.seeds):
        if results.has(seed, args.only) or time.monotonic() > end:
            continue
        folder, tokenizer = warm_folder(seed, train, args)
        rows = prompts_of(train, seed, args.updates, TASK)
        with folder:
            for kind in args.only:
                if time.monotonic() < end:
                    run = run_kind(kind, seed, folder.name, tokenizer, rows, held_out, args)
                    results.keep(kind, seed, run)
    print(f"{card}, {results.about['versions']}, {time.monotonic() - start:.0f} s")
    for kind, way in {run["name"]: run["way"] for run in results.runs}.items():
        print(f"{kind}: drawn {way or 'by the rollout function'}")
    print(*table(results.runs, "seconds"), sep="\n")


if __name__ == "__main__":
    main()
