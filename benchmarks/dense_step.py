"""Seconds of a whole GRPO step of a dense model (random weights in the shape of Qwen3-4B, bf16,
LoRA r=8 on attention): 8 prompts x 8 completions x 1,024 tokens drawn, rewarded and trained.

    python benchmarks/dense_step.py
        ours with its own engine
    python benchmarks/dense_step.py --only own trl --trl-site DIR --vllm-site DIR
        beside TRL with vLLM in its process, each library in a folder of its own (pip install
        --target DIR); writes the checkpoint that vLLM reads first (8 GiB)
    python benchmarks/dense_step.py --only own vllm --vllm-python PY
        beside ours with a vLLM of its own environment, which sleeps while the model trains
    python benchmarks/dense_step.py --only own unsloth --sites DIR
        beside Unsloth with fast_inference, from DIR/site-unsloth and the folder of --vllm-site
    python benchmarks/dense_step.py --cpu --only own trl
        a tiny model, to try it out; TRL draws with generate there

All start from the same checkpoint, train one micro-batch of --batch completions at a time and draw
every completion to its full length. The first step, in which kernels are compiled, is not counted;
of the others the last one is. "sample" is drawing (with handing the weights over, where there is
another engine), "train" all the rest but the rewards. "peak" is torch's in the trainer's process,
"card" what all processes together hold at the end. The last line is JSON.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from grpo_step import grpo_step, letters_reward, prompts_of
from train_step import (
    ATTENTION,
    GiB,
    arguments,
    child,
    clear,
    device_of,
    peaks,
    run_child,
    shown,
    synchronize,
    tell,
    versions,
    word_tokenizer,
)

SIDES = ("own", "vllm", "trl", "unsloth")
QWEN3_4B = dict(vocab_size=151_936, hidden_size=2560, intermediate_size=9728)
QWEN3_4B |= dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
QWEN3_4B |= dict(pad_token_id=151_643, eos_token_id=151_645, max_position_embeddings=40_960)
TINY = dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TINY |= dict(pad_token_id=510, eos_token_id=511, max_position_embeddings=4096)


def write_dense(args, sizes):
    "The checkpoint with its tokenizer, unless it is there."
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = Path(args.checkpoint)
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device(device_of(args)):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).bfloat16()
    model.save_pretrained(folder)
    word_tokenizer(sizes).save_pretrained(folder)


def card_gib():
    "GiB of the card that all processes together hold; None without one."
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / GiB, 1)


def vllm_settings(args):
    "A vLLM that the trainer starts, and that sleeps while it trains."
    return dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_python=args.vllm_python,
        vllm_gpu_memory_utilization=args.share,
        vllm_enable_sleep_mode=True,
    )


def measure_ours(args, sizes, with_vllm):
    "Our trainer, with its own engine or with a vLLM that sleeps in between."
    from grpo_nb import load_model

    model, tokenizer = load_model(
        args.checkpoint,
        max_seq_length=args.prompt + args.new,
        lora_r=8,
        lora_targets="attention",
        quiet=True,
    )
    tell(loaded="own", **peaks(), **versions())
    result = grpo_step(
        model,
        tokenizer,
        prompts_of(sizes, args.prompts, args.prompt),
        completions=args.completions,
        new_tokens=args.new,
        batch=args.batch,
        steps=args.steps,
        **(vllm_settings(args) if with_vllm else {}),
    )
    first, last = result["steps"][0], result["steps"][-1]
    name = "vllm" if with_vllm else "own"
    tell(library=name, **last, first=first, card=card_gib(), **result)


def timed_parts(trainer, clock):
    "Add seconds to clock['sample'] whenever TRL's trainer draws or hands weights over."
    import functools

    def timed(function):
        @functools.wraps(function)
        def call(*given, **named):
            synchronize()
            start = time.perf_counter()
            result = function(*given, **named)
            synchronize()
            clock["sample"] = clock.get("sample", 0.0) + time.perf_counter() - start
            return result

        return call

    if (engine := getattr(trainer, "vllm_generation", None)) is not None:
        engine.generate = timed(engine.generate)
        engine.sync_weights = timed(engine.sync_weights)
    else:
        trainer._generate = timed(trainer._generate)


def measure_trl(args, sizes, model, tokenizer, name, **more):
    "TRL's GRPOTrainer, or Unsloth's, which is made of it."
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    drawn, ends, clock = args.prompts * args.completions, [], {}
    parts = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            synchronize()
            ends.append(time.perf_counter())
            parts.append(dict(clock, seconds=ends[-1] - ([start] + ends)[-2]))
            clock.clear()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=args.steps,
            num_generations=args.completions,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=drawn // args.batch,
            max_completion_length=args.new,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=not args.cpu,
            disable_tqdm=True,
            **({} if args.cpu else dict(use_vllm=True, vllm_mode="colocate")),
            **({} if args.cpu else dict(vllm_gpu_memory_utilization=args.share)),
            **({} if args.cpu else dict(vllm_max_model_length=args.prompt + args.new + 64)),
            **({} if args.cpu else dict(generation_kwargs=dict(ignore_eos=True))),
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[letters_reward],
            args=config,
            train_dataset=Dataset.from_list(prompts_of(sizes, args.prompts, args.prompt)),
            **more,
        )
        timed_parts(trainer, clock)
        trainer.add_callback(Clock())
        clear()
        start = time.perf_counter()
        trainer.train()
    for part in parts:
        part["train"] = part["seconds"] - part.get("sample", 0.0)
    rounded = [{key: round(value, 3) for key, value in part.items()} for part in parts]
    tell(library=name, **rounded[-1], first=rounded[0], steps=rounded, card=card_gib(), **peaks())


def run_trl(args, sizes):
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    tell(loaded="trl", **peaks(), **versions("trl", "vllm"))
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION, task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    measure_trl(args, sizes, model.to(device_of(args)), tokenizer, "trl", peft_config=adapters)


def run_unsloth(args, sizes):
    from unsloth import FastLanguageModel  # before transformers, as it asks

    model, tokenizer = FastLanguageModel.from_pretrained(
        args.checkpoint,
        max_seq_length=args.prompt + args.new + 64,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=8,
        gpu_memory_utilization=args.share,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=8,
        lora_alpha=16,
        target_modules=ATTENTION,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    tell(loaded="unsloth", **peaks(), **versions("unsloth", "trl", "vllm"))
    measure_trl(args, sizes, model, tokenizer, "unsloth")


def line(record):
    "A side's numbers as a line."
    parts = ", ".join(f"{k} {record[k]:.2f}" for k in ("sample", "train") if k in record)
    return (
        f"{record['library']:8s}{record['seconds']:8.2f} s a step  ({parts})  "
        f"{shown(record['peak'])} GiB, card {shown(record['card'], '.1f')}  first step "
        f"{record['first']['seconds']:.1f} s"
    )


def main():
    parser = arguments(__doc__)
    parser.set_defaults(checkpoint="/tmp/qwen3-4b-random")
    parser.add_argument("--only", nargs="+", default=["own"], choices=SIDES)
    parser.add_argument("--trl-site", help="a folder with TRL")
    parser.add_argument("--vllm-site", help="a folder with vLLM, for TRL's and Unsloth's process")
    parser.add_argument("--vllm-python", help="a Python that has vLLM, for ours")
    parser.add_argument("--share", type=float, default=0.3, help="of the card, for vLLM")
    for name, value in (
        *(("prompts", 8), ("completions", 8), ("prompt", 128), ("new", 1024)),
        *(("batch", 8), ("steps", 3)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = TINY if args.cpu else QWEN3_4B
    if args.cpu:
        args.prompts, args.completions, args.prompt, args.new, args.batch = 2, 2, 8, 6, 2
    if args.child:
        work = {
            "write": lambda: write_dense(args, sizes),
            "own": lambda: measure_ours(args, sizes, with_vllm=False),
            "vllm": lambda: measure_ours(args, sizes, with_vllm=True),
            "trl": lambda: run_trl(args, sizes),
            "unsloth": lambda: run_unsloth(args, sizes),
        }
        return child(work[args.child])
    device_of(args)
    rows, end = [], time.time() + 60 * args.minutes

    def hear(record):
        if "loaded" in record:
            return print(f"{record.pop('loaded')}: {record}", flush=True)
        rows.append(record)
        print(line(record), flush=True)
        print("    every step: " + json.dumps(record["steps"]), flush=True)

    print(
        f"{args.prompts} prompts of {args.prompt} tokens x {args.completions} completions of "
        f"{args.new}, micro-batches of {args.batch}",
        flush=True,
    )
    vllm = [args.vllm_site] if args.vllm_site else []
    sites = {
        "trl": [*([args.trl_site] if args.trl_site else []), *vllm],
        "unsloth": [Path(args.sites) / "site-unsloth", *vllm],
    }
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    for name in ("write", *args.only):
        failed = run_child(
            __file__,
            name,
            sys.argv[1:],
            sites=sites.get(name, []),
            limit_s=end - time.time(),
            hear=hear,
            environment={**quiet, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if name in sites else None,
        )
        if failed:
            rows.append(dict(library=name, error=failed))
    ours = next((row for row in rows if row["library"] == "own" and "seconds" in row), None)
    for row in rows:
        if ours and row is not ours and "seconds" in row:
            print(f"{row['library']} / own: time x {row['seconds'] / ours['seconds']:.2f}")
    print(json.dumps(rows))
    return 0 if any("seconds" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
