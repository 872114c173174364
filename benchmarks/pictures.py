"""A GRPO step with pictures under a cap on the card's memory: what the planner says, beside what is
measured. Random weights of a released Qwen3-VL's size, all layers, NF4, LoRA r=8.

    python benchmarks/pictures.py
        Qwen3-VL-8B: 32,768 tokens, of them 30,720 of pictures, in 24 GiB
    python benchmarks/pictures.py --model Qwen3-VL-2B --tokens 8192 --cap 8
        another size
    python benchmarks/pictures.py --tower
        the tower trains too (its adapters)
    python benchmarks/pictures.py --cpu
        a tiny model, to try it out: nothing is measured

Pictures have 1,024 by 1,024 pixels, which are 1,024 tokens each: as many as the prompt has room
for. A step of GRPOTrainer has two peaks (torch.cuda.max_memory_allocated), of the rollout and of
all after it, and each stands beside the plan's for the same moments. The last line is JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from context import Limits
from grpo_step import grpo_step
from train_step import GiB, clear, device_of, synchronize, versions

SIZES = {  # text: layers, width, MLP, heads, heads of keys; tower: layers, width, MLP, DeepStack
    "Qwen3-VL-2B": (28, 2048, 6144, 16, 8, 24, 1024, 4096, [5, 11, 17]),
    "Qwen3-VL-4B": (36, 2560, 9728, 32, 8, 24, 1024, 4096, [5, 11, 17]),
    "Qwen3-VL-8B": (36, 4096, 12_288, 32, 8, 27, 1152, 4304, [8, 16, 24]),
}
MARKS = {"<|vision_start|>": 151_652, "<|vision_end|>": 151_653, "<|image_pad|>": 151_655}
SIDE, A_PICTURE, WORDS = 1024, 1024, 1024  # pixels, tokens of a picture, tokens drawn
MARK = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def config_of(name):
    "The configuration of a released size."
    from transformers import AutoConfig

    layers, width, inner, heads, keys, deep, eyes, wide, stack = SIZES[name]
    text = dict(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=262_144,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20]),
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    tower = dict(depth=deep, hidden_size=eyes, intermediate_size=wide, out_hidden_size=width)
    tied = {"tie_word_embeddings": name != "Qwen3-VL-8B"}
    tower["deepstack_visual_indexes"] = stack
    marks = dict(
        zip(("vision_start_token_id", "vision_end_token_id", "image_token_id"), MARKS.values())
    )
    return AutoConfig.for_model(
        "qwen3_vl", text_config=text | tied, vision_config=tower, **tied, **marks
    )


def processor_of(vocabulary):
    "One word for each token, and the image processor of the family."
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

    from grpo_nb.model.pictures import PictureProcessor

    names = {number: mark for mark, number in MARKS.items()}
    words = {names.get(i, f"t{i}"): i for i in range(vocabulary)}
    made = Tokenizer(models.WordLevel(words, unk_token="t2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="t0", eos_token="t1", unk_token="t2", padding_side="left"
    )
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    images = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size)
    return PictureProcessor(tokenizer, images, "qwen3_vl")


def rows_of(pictures, side, words, count=1):
    "Prompts with noise to look at."
    import numpy as np
    from PIL import Image

    found = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        images = [
            Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8))
            for _ in range(pictures)
        ]
        found.append({"prompt": "".join(MARK) * pictures + words, "images": images})
    return found


def watched(limits, found):
    "RolloutEngine.generate, which tells its peak and begins to count anew."
    from grpo_nb.rollout.engine import RolloutEngine

    draw = RolloutEngine.generate

    def generate(self, *given, **named):
        clear()
        start = time.perf_counter()
        drawn = draw(self, *given, **named)
        synchronize()
        found.append(dict(seconds=round(time.perf_counter() - start, 1), **limits.peaks()))
        print(json.dumps(found[-1]), flush=True)
        clear()
        return drawn

    return mock.patch.object(RolloutEngine, "generate", generate)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="Qwen3-VL-8B")
    parser.add_argument("--tokens", type=int, default=32_768, help="prompt and completion")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB in all")
    parser.add_argument("--completions", type=int, default=2, help="of the prompt")
    parser.add_argument("--tower", action="store_true", help="adapters on the tower too")
    parser.add_argument("--cpu", action="store_true", help="a tiny model")
    parser.add_argument("--out", help="a file for the last line")
    args = parser.parse_args()
    device_of(args)

    from peft import LoraConfig, get_peft_model

    from grpo_nb.model.loading import load_model
    from grpo_nb.model.memory_fit import Card
    from grpo_nb.model.pictures import tiny_seer, with_pictures
    from grpo_nb.planning.plan import describe, plan
    from grpo_nb.training.data import many_prompt_token_ids

    new = 8 if args.cpu else WORDS
    pictures = 2 if args.cpu else (args.tokens - new) // (A_PICTURE + 2)
    settings = dict(
        context=args.tokens,
        prompt_length=args.tokens - new,
        picture_tokens=pictures * A_PICTURE,
        weights="nf4",
        double_quant=True,
        lora_r=8,
        num_generations=args.completions,
        generation_batch_size=args.completions,
        offload_activations=True,
        train_parts=["text", "tower"] if args.tower else None,
    )
    card = Card(f"{args.cap:g} GiB", args.cap, (9, 0))
    made = plan(args.model, card, **settings)
    print(describe(made), flush=True)
    rows = rows_of(pictures, 16 if args.cpu else SIDE, "1" if args.cpu else "t3 t4")
    with Limits(args.cap, False) as limits:
        if args.cpu:
            model, processor = tiny_seer()
        else:
            config = config_of(args.model)
            processor = processor_of(config.get_text_config().vocab_size)
            model, _ = load_model(config, max_seq_length=args.tokens, load_in_4bit=True, quiet=True)
        prompts = many_prompt_token_ids([with_pictures(row) for row in rows], processor)
        print(
            f"a prompt has {len(prompts[0]):,} tokens, {pictures} pictures among them", flush=True
        )
        wanted = r".*(q|k|v|o|gate|up|down)_proj" + (r"|.*(qkv|attn.proj|linear_fc\d)" * args.tower)
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=wanted))
        limits.tighten()
        drawn, away = [], not args.cpu
        if args.cpu:
            more = dict(use_cpu=True, bf16=False, gradient_checkpointing=False)
        with watched(limits, drawn):
            step = grpo_step(
                model,
                processor,
                rows,
                completions=args.completions,
                new_tokens=new,
                batch=1,
                steps=1,
                offload_activations=away,
                **(more if args.cpu else {}),
            )
        found = {"rollout": drawn[0], "training": step}
    moments = {"rollout": ("rollout",), "training": ("head", "layer", "reading", "update")}
    for what, record in found.items():
        record["planned"] = round(made.allocated(*moments[what]) / GiB, 3)
        peak = record["peak"]
        ratio = f", planned / measured {record['planned'] / peak:.2f}" if peak else ""
        print(f"{what}: {peak} GiB{ratio}; the plan says {record['planned']}", flush=True)
    last = json.dumps(
        dict(about=versions(), model=args.model, cap=args.cap, **settings, rows=found)
    )
    print(last)
    if args.out:
        Path(args.out).write_text(last + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
