"""One attention layer of gpt-oss-20b (64 query heads, 8 key heads of 64, sinks), forward and
backward: our backends beside transformers' FlexAttention path and its eager one.

    python benchmarks/attention.py                    bf16 on a GPU, 2k to 128k tokens, a full layer
                                                      and one with a window of 128
    python benchmarks/attention.py --dtype float16    what a card without bf16 would run (flex still
                                                      needs compute capability 8.0)
    python benchmarks/attention.py --forward          forward only, without gradients, as a rollout
                                                      reads its prompts
    python benchmarks/attention.py --padding 0.25     a quarter of each sequence is padding on its
                                                      left
    python benchmarks/attention.py --device cpu --small
                                                      the same steps at a size for a laptop; flex
                                                      has no backward pass there

Each line: milliseconds (median) and GiB beyond q, k, v and the gradient that comes in, at the peak,
with both as ratios to the fastest of ours.
Masks are made once and shared by all layers of a kind, so they are made outside the clock. Where a
contender runs out of memory it is left out of the longer lengths.
The last line is all of it as JSON, for the plot in nbs/model/03_attention.ipynb.
"""

import argparse
import gc
import json
import time
from types import SimpleNamespace

import torch
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    flex_attention_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from grpo_nb.model.attention import sink_attention
from grpo_nb.model.masks import Mask


def ours(backend):
    def make(L, window, pad_lens, heads, device, dtype):
        mask = Mask(pad_lens, L, L, 0, window, device=device)
        return lambda q, k, v, sinks: sink_attention(q, k, v, sinks, mask=mask, backend=backend)

    return make


def real_tokens(L, pad_lens, device):
    return None if pad_lens is None else torch.arange(L, device=device) >= pad_lens[:, None]


def transformers_flex(L, window, pad_lens, heads, device, dtype):
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    block = flex_attention_mask(
        batch_size=1,
        q_length=L,
        kv_length=L,
        mask_function=rule,
        attention_mask=real_tokens(L, pad_lens, device),
        device=device,
    )
    module = SimpleNamespace(training=True)
    return lambda q, k, v, sinks: flex_attention_forward(
        module, q, k, v, block, scaling=q.shape[-1] ** -0.5, s_aux=sinks
    )[0].transpose(1, 2)


def transformers_eager(L, window, pad_lens, heads, device, dtype):
    added = torch.zeros(1, 1, L, L, dtype=dtype, device=device).masked_fill_(
        ~Mask(pad_lens, L, L, 0, window, device=device).dense()[:, None], torch.finfo(dtype).min
    )

    def step(q, k, v, sinks):
        module = SimpleNamespace(
            num_key_value_groups=heads[0] // heads[1], sinks=sinks, training=True
        )
        return eager_attention_forward(module, q, k, v, added, q.shape[-1] ** -0.5)[0].transpose(
            1, 2
        )

    return step


CONTENDERS = {
    "ours, triton": ours("triton"),
    "ours, sdpa": ours("sdpa"),
    "ours, flash": ours("flash"),
    "transformers, flex": transformers_flex,
    "transformers, eager": transformers_eager,
}


def measure(make, L, window, heads, args):
    "Median milliseconds and peak GiB (None on a CPU) of one layer."
    cuda = args.device.startswith("cuda")
    g = torch.Generator(args.device).manual_seed(0)

    def draw(count):
        return torch.randn(
            1, count, L, args.head_dim, generator=g, device=args.device, dtype=args.dtype
        ).requires_grad_(not args.forward)

    q, k, v, upstream = draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0]).detach()
    sinks = torch.randn(heads[0], generator=g, device=args.device, dtype=args.dtype).requires_grad_(
        not args.forward
    )
    pad_lens = torch.tensor([int(args.padding * L)], device=args.device) if args.padding else None
    attend = make(L, window, pad_lens, heads, args.device, args.dtype)

    def step():
        with torch.set_grad_enabled(not args.forward):
            out = attend(q, k, v, sinks)
        if not args.forward:
            out.backward(upstream)
        for x in (q, k, v, sinks):
            x.grad = None

    step()
    step()  # compile, and let libraries take their workspaces
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[args.repeats // 2] * 1e3, (
        torch.cuda.max_memory_allocated() - before
    ) / 2**30 if cuda else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(11, 18)])
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[0, 128], help="0 is a full layer"
    )
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument(
        "--padding",
        type=float,
        default=0.0,
        help="share of each sequence that is padding on its left",
    )
    parser.add_argument("--forward", action="store_true", help="forward only, without gradients")
    parser.add_argument(
        "--small",
        action="store_true",
        help="256 to 1,024 tokens, 8 query heads and 2 key heads of 16, float32",
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    heads, args.head_dim = (64, 8), 64
    if args.small:
        heads, args.head_dim, args.dtype, args.lengths = (8, 2), 16, "float32", [256, 512, 1024]
    args.dtype = getattr(torch, args.dtype)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(
        f"{device}, torch {torch.__version__}, {heads[0]} query and {heads[1]} key heads of "
        f"{args.head_dim}, {args.dtype}, "
        f"{'forward' if args.forward else 'forward + backward'}, padding {args.padding:.0%}",
        flush=True,
    )
    records, failed = [], set()
    for window in args.windows:
        for L in args.lengths:
            results = {}
            for name in args.only:
                if (name, window) in failed:
                    continue
                try:
                    results[name] = measure(CONTENDERS[name], L, window or None, heads, args)
                except Exception as error:
                    failed.add((name, window))
                    said = str(error)
                    why = "out of memory" if "out of memory" in said else said[:200]
                    print(f"  {name}: {why!r} at {L:,} tokens", flush=True)
                gc.collect()
                if device != "CPU":
                    torch.cuda.empty_cache()
            best = min((r for name, r in results.items() if name.startswith("ours")), default=None)
            for name, (ms, GiB) in results.items():
                records.append(
                    dict(
                        device=device,
                        window=window,
                        tokens=L,
                        name=name,
                        ms=round(ms, 3),
                        GiB=None if GiB is None else round(GiB, 4),
                    )
                )
                line = (
                    f"{f'window {window}' if window else 'full':11s}{L:8,d} tokens  "
                    f"{name:20s}{ms:10.2f} ms"
                )
                if best:
                    line += f"  x {ms / best[0]:5.2f}"
                if GiB is not None:
                    line += f"  {GiB:8.3f} GiB" + (
                        f"  x {GiB / best[1]:5.2f}" if best and best[1] else ""
                    )
                print(line, flush=True)
    print(json.dumps(records))


if __name__ == "__main__":
    main()
