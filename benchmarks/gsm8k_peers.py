"""The run of `gsm8k.py` by TRL's and Unsloth's trainers, each with vLLM in its process: the same
weights, rows, completions and number of updates. What `settings` does not name is each one's
default: Unsloth's optimizer is `adamw_8bit` with a weight decay of .001.

    python benchmarks/gsm8k_peers.py trl MODEL --data FOLDER --out DIR
        TRL's GRPOTrainer with vLLM in its process; --liger: Liger's fused loss
    python benchmarks/gsm8k_peers.py unsloth MODEL --data FOLDER --out DIR
        Unsloth's, with fast_inference (vLLM in its process); --slow: with its own generate
    python benchmarks/gsm8k.py MODEL --data FOLDER --out DIR judge --adapter DIR/trl_0 --name trl_0
        what the adapter can, by the evaluator of ours; it adds to the record

Leaves DIR/NAME.json (settings, versions, card, log, seconds of each update) and the adapter.
"""

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path

LORA = dict(r=32, lora_alpha=64)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def unsloth_model(arguments):
    "Unsloth's model and tokenizer; imported first, since it patches what comes after."
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        arguments.model,
        max_seq_length=1024,
        load_in_4bit=False,
        fast_inference=not arguments.slow,
        max_lora_rank=32,
        gpu_memory_utilization=arguments.share,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        target_modules=LINEAR,
        use_gradient_checkpointing=False,
        random_state=arguments.seed,
        **LORA,
    )
    return model, tokenizer


def settings(arguments, ours):
    "The settings of `ours`, in TRL's names, and the peer's own for speed."
    from trl import GRPOConfig

    same = (
        "output_dir max_steps num_generations max_completion_length learning_rate "
        "lr_scheduler_type warmup_steps bf16 logging_steps seed max_grad_norm adam_beta2 beta "
        "disable_tqdm gradient_checkpointing"
    ).split()
    own = dict(
        per_device_train_batch_size=arguments.batch,
        gradient_accumulation_steps=arguments.completions // arguments.batch,
        report_to="none",
        save_strategy="no",
        use_cpu=ours.use_cpu,
    )
    if arguments.who == "trl":
        own |= dict(
            use_vllm=not arguments.slow,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=arguments.share,
            vllm_max_model_length=1024,
            use_liger_kernel=arguments.liger,
            model_init_kwargs={"dtype": "bfloat16"},
        )
    else:
        own |= dict(use_vllm=not arguments.slow)
    return GRPOConfig(**{name: getattr(ours, name) for name in same}, **own)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("who", choices=("trl", "unsloth"))
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=110)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="completions of a micro-batch")
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--share", type=float, default=0.35, help="of the card, for vLLM")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--slow", action="store_true", help="without vLLM")
    parser.add_argument("--name")
    arguments = parser.parse_args()
    name = arguments.name or f"{arguments.who}_{arguments.seed}"
    out = arguments.out / name
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    given = unsloth_model(arguments) if arguments.who == "unsloth" else None

    import gsm8k
    import torch
    from peft import LoraConfig
    from trl import GRPOTrainer

    arguments.reward, arguments.supervised = "right", False
    for missing, value in dict(
        checkpointing=False, plain=True, rate=None, beta=0.0, scale="group", server=None,
        staleness=0, save=0, group=8, mask_truncated=False,
    ).items():  # fmt: skip
        setattr(arguments, missing, value)
    rows = gsm8k.rows_of(arguments.data, arguments.rows, *gsm8k.PROMPTS["box"])
    stop = gsm8k.Stop(arguments.seconds)
    common = dict(
        reward_funcs=[gsm8k.right],
        args=settings(arguments, gsm8k.settings(arguments, out)),
        train_dataset=rows,
        callbacks=[stop],
    )
    if given:
        trainer = GRPOTrainer(given[0], processing_class=given[1], **common)
    else:
        lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **LORA)
        trainer = GRPOTrainer(arguments.model, peft_config=lora, **common)
    began = time.perf_counter()
    trainer.train()
    record = gsm8k.facts(arguments) | dict(
        seconds=round(time.perf_counter() - began, 1),
        times=stop.times,
        log=[row for row in trainer.state.log_history if "reward" in row],
        effective={
            name: value
            for name, value in trainer.args.to_dict().items()
            if isinstance(value, (bool, int, float, str))
        },
    )
    for package in ("trl", "vllm", "unsloth", "unsloth_zoo", "liger_kernel"):
        try:
            record["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        record["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        record["card_gib"] = round((total - free) / 2**30, 2)
    (arguments.out / f"{name}.json").write_text(json.dumps(record, default=str))
    trainer.model.save_pretrained(out)
    print(name, len(record["log"]), "updates", record["seconds"], "seconds", flush=True)


if __name__ == "__main__":
    main()
