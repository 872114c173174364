"""What fewer bits a weight cost a policy: log-probs, and the direction of its gradient.

    python benchmarks/eight_bits.py MODEL [--completions 8] [--tokens 48]

MODEL is the folder of a dense model. It draws completions in float32. Then the linear layers of its
decoder are rounded to each format, everything is computed in float32, and the same tokens are
scored: so only the rounding of weights differs. `products too` rounds the inputs of each product
to float8 as well, each row with a scale of its own, as cards from compute capability 8.9 on can do.
The gradient is that of all-linear LoRA with r = 8 where it begins (its second factors), of
sum(A log p) with A = 1 for every other completion and -1 for the rest. MXFP4 and NF4 are rounded
and unrounded: neither is how this library trains that model on a CPU. NF4 needs bitsandbytes.
Printed as a table in markdown.
"""

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_nb import RolloutEngine, SamplingParams, load_model
from grpo_nb.model import mxfp4
from grpo_nb.model.float8 import Float8Weight, dequantize, quantize
from grpo_nb.model.loading import memory_by_part

PROMPTS = (
    "Question: Anna has 12 apples and gives away 5. How many are left?\nAnswer:",
    "The capital of France is",
    "def is_prime(n):\n",
    "Question: A train goes 60 km in one hour. How far does it go in 3 hours?\nAnswer:",
)
RANK = 8


def to_mxfp4(weight):
    return mxfp4.dequantize(*mxfp4.quantize(weight), torch.float32)


def to_nf4(weight):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight, quant_type="nf4"))


FORMATS = {  # name -> (bits a weight, load_in_fp8, how a dense weight is rounded, products too)
    "float32": (32, None, None, False),
    "bfloat16": (16, None, lambda w: w.bfloat16().float(), False),
    "float8, a scale for a row": (8, "row", None, False),
    "float8, for 128 x 128": (8, "block", None, False),
    "float8, for a row, products too": (8, "row", None, True),
    "MXFP4": (4.25, None, to_mxfp4, False),
    "NF4": (4.5, None, to_nf4, False),
}


def round_inputs(module, given):
    "Before a product: its inputs in float8, each row with a scale; gradients pass."
    (x,) = given
    block = 1, x.shape[-1]
    rounded = dequantize(*quantize(x.detach(), block), x.dtype, block)
    return x + (rounded - x).detach()


def build(folder, name):
    "The model in a format, with adapters that change nothing yet."
    _, in_fp8, rounded, products = FORMATS[name]
    model, tokenizer = load_model(
        folder,
        **dict(max_seq_length=512, dtype="float32", load_in_fp8=in_fp8, quiet=True),
        **dict(lora_r=RANK, lora_alpha=2 * RANK),
    )
    base = model.get_base_model()
    for key, p in base.named_parameters():
        if rounded and key.endswith("base_layer.weight"):
            p.data = rounded(p.data)
    for module in model.modules() if products else ():
        if isinstance(getattr(module, "weight", None), Float8Weight):
            module.register_forward_pre_hook(round_inputs)
    return model.eval(), tokenizer


def scored(model, rows):
    "(log-probs of the drawn tokens, all log-probs there) of each completion, one at a time."
    for prompt, drawn in rows:
        ids = torch.tensor([prompt + drawn])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        yield logits.gather(-1, ids[0, len(prompt) :, None])[:, 0], logits


def gradient(model, rows):
    "The gradient of the adapters' second factors, as one vector."
    for i, (own, _) in enumerate(scored(model, rows)):
        (own.sum() * (-1) ** i).backward()
    parts = [p.grad.flatten() for k, p in model.named_parameters() if "lora_B" in k]
    return torch.cat(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model, tokenizer = build(args.model, "float32")
    params = SamplingParams(
        max_tokens=args.tokens, n=args.completions // len(PROMPTS), seed=0, stop_token_ids=()
    )
    rollout = RolloutEngine(model, tokenizer).generate(list(PROMPTS), params)
    rows = list(zip(rollout.prompt_ids, rollout.completion_ids.tolist()))
    print(f"{args.model.name}: {len(rows)} completions of {args.tokens} tokens")
    print("| weights | MiB | mean gap, nats | KL, nats | same best token | cosine | norm | s |")
    print("|---|---|---|---|---|---|---|---|")
    reference = None
    for name in FORMATS:
        if name == "NF4" and not find_spec("bitsandbytes"):
            continue
        if reference is not None:
            model, _ = build(args.model, name)
        with torch.no_grad():
            began = time.perf_counter()
            own, whole = (torch.cat(x) for x in zip(*scored(model, rows)))
            seconds = time.perf_counter() - began
        grad = gradient(model, rows)
        reference = reference or (own, whole, grad)
        of_own, of_whole, of_grad = reference
        kinds = memory_by_part(model)
        held = sum(x["bytes"] for x in kinds if x["part"] in ("attention", "MLP"))
        numbers = sum(x["parameters"] for x in kinds if x["part"] in ("attention", "MLP"))
        bits = held if name.startswith(("float8", "float32")) else numbers * FORMATS[name][0] / 8
        kl = (of_whole.exp() * (of_whole - whole)).sum(-1).mean()
        same = (of_whole.argmax(-1) == whole.argmax(-1)).float().mean()
        cosine = torch.nn.functional.cosine_similarity(grad.double(), of_grad.double(), dim=0)
        print(
            f"| {name} | {bits / 2**20:.1f} | {(own - of_own).abs().mean():.5f} | {kl:.6f} | "
            f"{same:.1%} | {cosine:.4f} | {grad.norm() / of_grad.norm():.3f} | {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
