"""Log-probs at gpt-oss-20b's head (2,880 x 201,088, frozen), forward and backward to the hidden
states: ours beside plain torch and Liger.

    python benchmarks/logprobs.py                       65,536 rows in bf16 on a GPU
    python benchmarks/logprobs.py --device cpu --small  the same steps at a size for a laptop

Each line: milliseconds (median), memory beyond the inputs at its peak (GPU only), and the two as
ratios to ours.
"two products" is the floor: the two matrix products of our function at the same chunk size, nothing
else.
"""

import argparse
import gc
import time

import torch

from grpo_nb.algorithm.logprobs import (
    chunk_rows,
    chunked_hidden_states_selective_log_softmax,
    selective_log_softmax,
)


def ours(multiplier):
    def step(h, W, index, g):
        logps = chunked_hidden_states_selective_log_softmax(
            h[None], W, index[None], logit_chunk_multiplier=multiplier
        )
        (logps[0] * g).sum().backward()

    return step


def two_products(multiplier):
    def step(h, W, index, g):
        chunks = chunk_rows(1, len(h), None, multiplier)
        buffer, rows = W.new_empty(max(b - a for a, b in chunks), len(W)), torch.empty_like(h)
        with torch.no_grad():
            for a, b in chunks:
                torch.mm(h[a:b], W.T, out=buffer[: b - a])
                torch.mm(buffer[: b - a], W, out=rows[a:b])

    return step


def plain(h, W, index, g):
    (selective_log_softmax(h @ W.T, index) * g).sum().backward()


def liger():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo")

    def step(h, W, index, g):
        batch = max(1, len(h) // 8192)
        index = index.view(batch, -1)
        loss(h.view(batch, -1, h.shape[-1]), W, index, torch.ones_like(index), g[:batch])[
            0
        ].backward()

    return step


def measure(step, rows, W, repeats):
    "Median milliseconds and peak GiB beyond the inputs; None for what cannot be measured."
    cuda = W.is_cuda
    h = torch.randn(rows, W.shape[1], device=W.device, dtype=W.dtype, requires_grad=True)
    index, g = torch.randint(len(W), (rows,), device=W.device), torch.randn(rows, device=W.device)
    step(h, W, index, g)  # compile, and let cuBLAS take its workspace
    h.grad = None
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(h, W, index, g)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        h.grad = None
    return sorted(times)[repeats // 2] * 1e3, (
        torch.cuda.max_memory_allocated() - before
    ) / 2**30 if cuda else None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="512 rows, 64 x 4,096, float32")
    parser.add_argument(
        "--multipliers",
        type=int,
        nargs="+",
        default=[32, 64, 128],
        help="chunks that the rows are split into",
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows, hidden, vocab, dtype = (
        (512, 64, 4096, torch.float32) if args.small else (65_536, 2880, 201_088, torch.bfloat16)
    )
    torch.manual_seed(0)
    W = torch.randn(vocab, hidden, device=args.device, dtype=dtype) * 0.02
    print(
        f"{torch.cuda.get_device_name() if W.is_cuda else 'CPU'}, torch {torch.__version__}, "
        f"head {hidden:,} x {vocab:,}, {dtype}",
        flush=True,
    )

    cases = [
        case
        for m in args.multipliers
        for case in (
            (f"ours, {m} chunks", ours(m), rows),
            (f"two products, {m} chunks", two_products(m), rows),
        )
    ]
    cases += [
        ("ours, default chunks, a quarter", ours(None), rows // 4),
        ("plain torch, a quarter", plain, rows // 4),
    ]
    try:
        cases.append(("Liger fused GRPO", liger(), rows))
    except ImportError as error:
        print(f"Liger is left out: {error}")
    results = {}
    for name, step, n in cases:
        try:
            ms, GiB = results[name] = measure(step, n, W, args.repeats)
        except Exception as error:
            print(f"{name:34s} {n:7,d} rows  failed: {str(error)[:160]!r}", flush=True)
        else:
            print(
                f"{name:34s} {n:7,d} rows  {ms:9.1f} ms"
                + (f"  {GiB:7.2f} GiB" if GiB is not None else ""),
                flush=True,
            )
        gc.collect()
        if W.is_cuda:
            torch.cuda.empty_cache()

    best = min(
        (name for name in results if name.startswith("ours") and "quarter" not in name),
        key=lambda name: results[name][0],
    )
    pairs = [
        (best, best.replace("ours", "two products")),
        (best, "Liger fused GRPO"),
        ("ours, default chunks, a quarter", "plain torch, a quarter"),
    ]
    for mine, other in pairs:
        if mine not in results or other not in results:
            continue
        (ms, GiB), (their_ms, their_GiB) = results[mine], results[other]
        print(
            f"{other} / {mine}: time x {their_ms / ms:.2f}"
            + (f", memory x {their_GiB / GiB:.2f}" if GiB else "")
        )


if __name__ == "__main__":
    main()
