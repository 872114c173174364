"""GRPO of a model that FSDP2 shares out over the cards: seconds and memory by part, beside the
plan. Random weights of full size, adapters r=8, the engine that gathers the weights to draw.

    torchrun --nproc-per-node 2 benchmarks/sharded.py qwen3-32b OUT.json
        20 updates; every card draws and trains its share of 8 prompts x 8 completions
    torchrun --nproc-per-node 2 benchmarks/sharded.py gpt-oss-120b OUT.json --updates 10
        experts in MXFP4
    torchrun --nproc-per-node 2 benchmarks/sharded.py qwen3-0.6b OUT.json --whole
        the same by DDP, each card with the whole model
    torchrun --nproc-per-node 2 benchmarks/sharded.py qwen3-32b OUT.json --layers 2 --cpu
        a narrow one of two layers, to try it out

The first process makes the weights in host memory, the others get their shares from it. A random
model hardly ever draws its end token, so every completion has its full length. "peak" is torch's
and "driver" what the driver has given away, both the largest over the cards, for drawing and for
training apart; "planned" are the planner's bytes of the same moments.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from grpo_step import letters_reward, prompts_of, timed_trainer
from train_step import GiB, clear, peaks, synchronize, versions, word_tokenizer

from grpo_nb import GRPOConfig, load_model
from grpo_nb.planning.plan import plan

GPT_OSS = dict(model_type="gpt_oss", vocab_size=201_088, pad_token_id=199_999, eos_token_id=200_002)
QWEN = dict(model_type="qwen3", vocab_size=151_936, pad_token_id=151_643, eos_token_id=151_645)
QWEN |= dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960)
SHAPES = {
    "gpt-oss-120b": GPT_OSS | dict(num_hidden_layers=36, num_local_experts=128),
    "gpt-oss-20b": GPT_OSS | dict(num_hidden_layers=24, num_local_experts=32),
    "qwen3-32b": QWEN
    | dict(hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64)
    | dict(num_attention_heads=64, tie_word_embeddings=False),
    "qwen3-8b": QWEN
    | dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36)
    | dict(num_attention_heads=32, tie_word_embeddings=False),
    "qwen3-0.6b": QWEN
    | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    | dict(num_attention_heads=16, tie_word_embeddings=True),
}
NARROW = dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
NARROW |= dict(head_dim=16, vocab_size=512, pad_token_id=510, eos_token_id=511)
BLOCK = 1 << 22


def repeated(tensor, block):
    "The tensor, filled with copies of the block."
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), BLOCK):
        flat[start : start + BLOCK] = block[: flat.numel() - start]
    return tensor


@contextmanager
def quickly():
    "Random numbers as a repeated block: seconds, not minutes, for 60 GiB on the host."
    randint, normals = torch.randint, torch.randn(BLOCK)

    def normal(tensor, mean=0.0, std=1.0, **given):
        with torch.no_grad():
            return repeated(tensor, (normals * std + mean).to(tensor.dtype))

    def integers(*bounds_and_size, **given):
        *bounds, size = bounds_and_size
        block = randint(*bounds, (BLOCK,), **given)
        return repeated(torch.empty(size, **given), block)

    with (
        mock.patch.object(torch.Tensor, "normal_", normal),
        mock.patch.object(torch, "randint", integers),
    ):
        yield


def shape_of(arguments):
    "The configuration's settings that the command line names."
    shape = dict(SHAPES[arguments.shape])
    shape |= {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    return shape | (NARROW if arguments.cpu else {})


def model_of(arguments, device):
    "The model, whole in the first process, without memory in the others of a sharded run."
    shape = shape_of(arguments)
    first = int(os.environ.get("RANK", 0)) == 0 or arguments.whole
    with quickly():
        model, _ = load_model(
            shape,
            max_seq_length=arguments.prompt + arguments.new,
            load_in_4bit=shape["model_type"] == "gpt_oss",
            dtype=torch.float32 if arguments.cpu else torch.bfloat16,
            device=(device if arguments.whole else "cpu") if first else "meta",
            lora_r=8,
            lora_targets="attention",
            quiet=True,
        )
    return model


def watched(trainer_class):
    "The trainer whose clock also keeps the peaks of drawing and of training."

    class Watched(trainer_class):
        def timed(self, part, function, last=False):
            timed = super().timed(part, function, last)

            def call(*given):
                clear()
                result = timed(*given)
                clock = self.clocks[-1]
                for name, value in peaks().items():
                    clock[f"{part} {name}"] = max(clock.get(f"{part} {name}", 0), value or 0)
                return result

            return call if part in ("sample", "train") else timed

    return Watched


def trained(arguments, model, tokenizer, rows, folder):
    "The clocks and the log of the updates."
    drawn = arguments.prompts * arguments.completions // int(os.environ["WORLD_SIZE"])
    config = GRPOConfig(
        output_dir=folder,
        guard_max_gap=100.0,  # random weights enlarge every rounding
        max_steps=arguments.updates,
        num_generations=arguments.completions,
        per_device_train_batch_size=min(arguments.batch, drawn),
        gradient_accumulation_steps=drawn // min(arguments.batch, drawn),
        max_completion_length=arguments.new,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=arguments.cpu,
        fsdp=None if arguments.whole else "full_shard",
    )
    trainer = watched(timed_trainer())(model, letters_reward, config, rows, None, tokenizer)
    trainer.log.show = False
    trainer.train()
    return trainer


def planned(model, config, cards):
    "GiB of the planner's moments on one card."
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = plan(
        model.config,
        "H200" if "H200" in name else "H100",
        config,
        weights="mxfp4" if model.config.model_type == "gpt_oss" else "bf16",
        lora_r=8,
        lora_targets="attention",
        cards=cards,
    )
    return {moment: round(size / GiB, 2) for moment, size in found.totals.items()}


def gathered(value):
    "The values of all processes."
    found = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(found, value)
    return found


def parsed(description, shapes):
    "What the command line says."
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("out", type=Path)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--batch", type=int, default=4, help="completions of a micro-batch")
    parser.add_argument("--layers", type=int, help="in place of all")
    parser.add_argument("--whole", action="store_true", help="DDP: each card has the whole model")
    parser.add_argument("--cpu", action="store_true", help="a narrow model, on the CPU")
    arguments = parser.parse_args()
    if not arguments.cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return arguments


def told(arguments, clocks, **more):
    "Write down what the processes' clocks say, and more: the first process alone."
    clocks = gathered(clocks)
    synchronize()
    record = dict(
        command=" ".join(sys.argv[1:]),
        cards=len(clocks),
        updates=[{k: round(v, 3) for k, v in one.items()} for one in clocks[0]],
        peaks={
            name: max(clock.get(name, 0) for one in clocks for clock in one)
            for name in ("sample peak", "sample driver", "train peak", "train driver")
        },
        **more,
    )
    if int(os.environ["RANK"]) == 0:
        arguments.out.write_text(json.dumps(record) + "\n")
        print(json.dumps({k: record.get(k) for k in ("cards", "peaks", "planned")}), flush=True)
        print(json.dumps(record["updates"][-1]), flush=True)


def main():
    arguments = parsed(__doc__, SHAPES)
    start = time.perf_counter()
    model = model_of(arguments, "cpu" if arguments.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    loaded, sizes = time.perf_counter() - start, model.config.to_dict()
    rows = prompts_of(sizes, arguments.prompts, arguments.prompt)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trained(arguments, model, word_tokenizer(sizes), rows, folder)
    told(
        arguments,
        trainer.clocks,
        loaded_s=round(loaded, 1),
        planned=planned(trainer.model, trainer.config, int(os.environ["WORLD_SIZE"])),
        log=trainer.log_history,
        **versions(),
    )


if __name__ == "__main__":
    main()
