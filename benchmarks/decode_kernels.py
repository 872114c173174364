"""The decoding kernels one by one, at the sizes of gpt-oss-20b in bf16, with random weights:
microseconds, and how fast the weights were read.

    python benchmarks/decode_kernels.py            1, 8 and 64 rows on a GPU (about 20 s, 13 GiB)
    python benchmarks/decode_kernels.py --packed   experts in 4 bits alone, 1 to 256 rows: the
                                                   kernel in Triton and the one in Gluon
    python benchmarks/decode_kernels.py --tiles    the one in Gluon with tiles of 16, 32 and 64
                                                   rows, 64 to 512 rows in all;
                                                   `expert_kernel.tile` holds the choice

Each kernel is recorded in a CUDA graph over several layers' weights, so that the chip's cache does
not help. Beside it, in the same run: what a copy of 4 GiB reaches, and torch's own product (cuBLAS)
where there is one.
"""

import argparse
from functools import partial
from statistics import median

import torch

from grpo_nb.model.experts import ExpertWeights
from grpo_nb.model.packed import PackedWeight
from grpo_nb.rollout import decode_kernels
from grpo_nb.rollout.decode_ops import LayerWeights, Projection

H, INNER, E, V, HEADS, LAYERS = 2880, 2880, 32, 201_088, 4096, 6


def microseconds(functions, repeats=9):
    "The median time of one of `functions`, all of them recorded together."
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for f in functions:
            f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in functions:
            f()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(functions))
    return median(times)


def draw(*shape, std=0.02):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * std


def layers():
    "Six layers' weights."
    for _ in range(LAYERS):
        parts = [
            Projection(draw(n, k), draw(n)) for n, k in ((HEADS, H), (512, H), (512, H), (H, HEADS))
        ]
        experts = ExpertWeights(
            draw(E, H, 2 * INNER), draw(E, 2 * INNER), draw(E, INNER, H), draw(E, H), 1.702, 7.0
        )
        yield LayerWeights(
            draw(H, std=1.0),
            *parts,
            draw(64),
            draw(H, std=1.0),
            draw(E, H, std=0.05),
            draw(E),
            experts,
        )


def packed(K, N, layers=8):
    "So many layers' matrices in 4 bits, with numbers of the size of gpt-oss's."
    for _ in range(layers):
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, device="cuda")
        yield PackedWeight(
            blocks,
            torch.randint(118, 123, blocks.shape[:-1], dtype=torch.uint8, device="cuda"),
            torch.bfloat16,
        )


def packed_experts():
    "A line for each batch and matrix: both kernels in turn."
    from grpo_nb.rollout import expert_kernel as gluon

    matrices = dict(gate_up=list(packed(H, 2 * INNER)), down=list(packed(INNER, H)))
    print(
        "| rows | matrix | experts used | MB of weights | Triton, us | TB/s | Gluon, us | "
        "TB/s |\n|---|---|---|---|---|---|---|---|"
    )
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        logits = [torch.randn(rows, E, device="cuda") for _ in range(8)]
        works = [
            [decode_kernels.schedule(z, 4, torch.bfloat16, tile) for z in logits]
            for tile in (None, gluon.tile(rows)[0])
        ]
        hit = sum(len({e for e in w.items[0].tolist() if e >= 0}) for w in works[0]) / len(works[0])
        for name, weights in matrices.items():
            gated = name == "gate_up"
            x, bias = draw(rows if gated else 4 * rows, H, std=1.0), draw(E, weights[0].shape[2])
            out = x.new_empty(4 * rows, INNER, dtype=torch.bfloat16 if gated else torch.float32)
            options = dict(
                bias=bias,
                **(dict(gather=True, gated=True, alpha=1.702, limit=7.0) if gated else {}),
            )
            times = [
                microseconds(
                    [
                        lambda w=w, q=q: decode_kernels.expert_product(
                            x, w, q, out, 64, 64, 4, **options
                        )
                        for w, q in zip(weights, works[0])
                    ]
                ),
                microseconds(
                    [
                        lambda w=w, q=q: gluon.expert_product(x, w, q, out, **options)
                        for w, q in zip(weights, works[1])
                    ]
                ),
            ]
            mb = (
                hit * H * weights[0].shape[2] * 17 / 32 / 1e6
            )  # 4 bits a number, and 8 for 32 of them
            print(
                f"| {rows} | {name} | {hit:.1f} | {mb:.1f} | "
                + " | ".join(f"{t:.1f} | {mb / t:.2f}" for t in times)
                + " |",
                flush=True,
            )


def tiles(batches=(64, 128, 256, 512), sizes=(16, 32, 64)):
    """A line for each batch and matrix: microseconds by rows of a tile, and of the Triton kernel.
    All tiles must give the same numbers, bit for bit."""
    from grpo_nb.rollout import expert_kernel as gluon

    matrices = dict(gate_up=list(packed(H, 2 * INNER)), down=list(packed(INNER, H)))
    print("| rows | matrix | in use | " + " | ".join(f"{n} rows, us" for n in sizes), end=" | ")
    print("in Triton, us |\n" + "|---" * (len(sizes) + 4) + "|")
    for rows in batches:
        logits = [torch.randn(rows, E, device="cuda") for _ in matrices["down"]]
        works = {
            size: [decode_kernels.schedule(z, 4, torch.bfloat16, size) for z in logits]
            for size in (*sizes, None)
        }
        for name, weights in matrices.items():
            gated = name == "gate_up"
            x, bias = draw(rows if gated else 4 * rows, H, std=1.0), draw(E, weights[0].shape[2])
            options = dict(bias=bias)
            if gated:
                options |= dict(gather=True, gated=True, alpha=1.702, limit=7.0)
            times, first = [], None
            for size, work in works.items():
                out = x.new_empty(4 * rows, INNER, dtype=x.dtype if gated else torch.float32)
                by = gluon.expert_product
                if size is None:
                    by = partial(decode_kernels.expert_product, BN=64, BK=64, stages=4)
                calls = [partial(by, x, w, q, out, **options) for w, q in zip(weights, work)]
                times.append(microseconds(calls))
                first = out if first is None else first
                if size and not torch.equal(out, first):
                    raise RuntimeError(f"tiles of {size} rows give other numbers than {sizes[0]}")
            used = gluon.tile(rows)[0]
            used = used if rows <= gluon.MOST_ROWS[used] else "in Triton"
            print(f"| {rows} | {name} | {used} | ", end="")
            print(" | ".join(f"{t:.1f}" for t in times) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packed", action="store_true", help="experts in 4 bits alone")
    parser.add_argument("--tiles", action="store_true", help="rows of a tile, experts in 4 bits")
    args = parser.parse_args()
    torch.manual_seed(0)
    big = torch.randint(256, (2**32,), device="cuda", dtype=torch.uint8)
    copy = 2 * len(big) / microseconds([big.clone]) / 1e6
    del big
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; a copy moves "
        f"{copy:.2f} TB/s, read and written\n"
    )
    if args.packed or args.tiles:
        return packed_experts() if args.packed else tiles()
    weights, head = list(layers()), draw(V, H)
    print(
        "| rows | kernel | MB of weights | us | TB/s | torch's product, us |\n"
        "|---|---|---|---|---|---|"
    )
    with torch.no_grad():
        for rows in (1, 8, 64):
            x, wide = draw(rows, H, std=1.0), draw(rows, HEADS, std=1.0)
            work = [
                decode_kernels.schedule(torch.randn(rows, E, device="cuda"), 4, torch.bfloat16)
                for _ in weights
            ]
            hit = sum(len({e for e in w.items[0].tolist() if e >= 0}) for w in work) / len(work)
            hidden = draw(4 * rows, INNER, std=1.0)
            up = dict(BN=64 if rows == 1 else 128, BK=64, stages=4)
            down = (
                dict(BN=64, BK=64, stages=5)
                if rows == 1
                else dict(BN=64, BK=128, stages=4)
                if rows <= 16
                else dict(BN=128, BK=64, stages=4)
            )
            cases = {
                "query, key, value": (
                    5120 * H,
                    [
                        lambda layer=layer: decode_kernels.project(
                            x, (layer.query, layer.key, layer.value)
                        )
                        for layer in weights
                    ],
                    [
                        lambda layer=layer: [
                            torch.nn.functional.linear(x, p.weight, p.bias)
                            for p in (layer.query, layer.key, layer.value)
                        ]
                        for layer in weights
                    ],
                ),
                "output and residual": (
                    H * HEADS,
                    [
                        lambda layer=layer: decode_kernels.project(wide, (layer.output,), x)
                        for layer in weights
                    ],
                    [
                        lambda layer=layer: (
                            x
                            + torch.nn.functional.linear(
                                wide, layer.output.weight, layer.output.bias
                            )
                        )
                        for layer in weights
                    ],
                ),
                f"experts, gate and up ({hit:.1f} of {E} used)": (
                    hit * H * 2 * INNER,
                    [
                        lambda layer=layer, w=w: decode_kernels.expert_product(
                            x,
                            layer.experts.gate_up,
                            w,
                            x.new_empty(4 * rows, INNER),
                            bias=layer.experts.gate_up_bias,
                            gather=True,
                            gated=True,
                            alpha=1.702,
                            limit=7.0,
                            **up,
                        )
                        for layer, w in zip(weights, work)
                    ],
                    None,
                ),
                f"experts, down ({hit:.1f} of {E} used)": (
                    hit * INNER * H,
                    [
                        lambda layer=layer, w=w: decode_kernels.expert_product(
                            hidden,
                            layer.experts.down,
                            w,
                            x.new_empty(4 * rows, H, dtype=torch.float32),
                            bias=layer.experts.down_bias,
                            **down,
                        )
                        for layer, w in zip(weights, work)
                    ],
                    None,
                ),
                "head": (
                    V * H,
                    [lambda: decode_kernels.project(x, (Projection(head),))],
                    [lambda: torch.nn.functional.linear(x, head)],
                ),
                "a whole second half of a layer (`moe`)": (
                    hit * 3 * INNER * H,
                    [
                        lambda layer=layer: decode_kernels.moe(
                            x, layer, layer.norm, top=4, eps=1e-5, dtype=torch.bfloat16
                        )
                        for layer in weights
                    ],
                    None,
                ),
            }
            for name, (numbers, ours, theirs) in cases.items():
                time = microseconds(ours)
                print(
                    f"| {rows} | {name} | {2 * numbers / 1e6:.1f} | {time:.1f} | "
                    f"{2 * numbers / time / 1e6:.2f} | "
                    f"{'' if theirs is None else f'{microseconds(theirs):.1f}'} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
