"""The decoding kernels one by one, at the sizes of gpt-oss-20b in bf16, with random weights: microseconds, and how fast the weights were read.

    python benchmarks/decode_kernels.py                 1, 8 and 64 rows on a GPU (about 20 s, 13 GiB)

Each kernel is recorded in a CUDA graph over several layers' weights, so that the chip's cache does not help. Beside it, in the same run: what a copy of 4 GiB reaches, and torch's own product (cuBLAS) where there is one.
"""
import argparse
from statistics import median

import torch

from grpo_nb.model.experts import ExpertWeights
from grpo_nb.rollout import kernels
from grpo_nb.rollout.steps import LayerWeights, Projection

H, I, E, V, HEADS, LAYERS = 2880, 2880, 32, 201_088, 4096, 6


def microseconds(functions, repeats=9):
    "The median time of one of `functions`, all of them recorded together."
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for f in functions: f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in functions: f()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(functions))
    return median(times)


def draw(*shape, std=0.02): return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * std


def layers():
    "Six layers' weights."
    for _ in range(LAYERS):
        parts = [Projection(draw(n, k), draw(n)) for n, k in ((HEADS, H), (512, H), (512, H), (H, HEADS))]
        experts = ExpertWeights(draw(E, H, 2 * I), draw(E, 2 * I), draw(E, I, H), draw(E, H), 1.702, 7.0)
        yield LayerWeights(draw(H, std=1.0), *parts, draw(64), draw(H, std=1.0), draw(E, H, std=0.05), draw(E), experts)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    big = torch.randint(256, (2**32,), device="cuda", dtype=torch.uint8)
    copy = 2 * len(big) / microseconds([big.clone]) / 1e6
    del big
    weights, head = list(layers()), draw(V, H)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; a copy moves {copy:.2f} TB/s, read and written\n")
    print("| rows | kernel | MB of weights | us | TB/s | torch's product, us |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for rows in (1, 8, 64):
            x, wide = draw(rows, H, std=1.0), draw(rows, HEADS, std=1.0)
            work = [kernels.schedule(torch.randn(rows, E, device="cuda"), 4, torch.bfloat16) for _ in weights]
            hit = sum(len({e for e in w.items[0].tolist() if e >= 0}) for w in work) / len(work)
            hidden = draw(4 * rows, I, std=1.0)
            up = dict(BN=64 if rows == 1 else 128, BK=64, stages=4)
            down = dict(BN=64, BK=64, stages=5) if rows == 1 else dict(BN=64, BK=128, stages=4) if rows <= 16 else dict(BN=128, BK=64, stages=4)
            cases = {
                "query, key, value": (5120 * H, [lambda l=l: kernels.project(x, (l.query, l.key, l.value)) for l in weights],
                                      [lambda l=l: [torch.nn.functional.linear(x, p.weight, p.bias) for p in (l.query, l.key, l.value)] for l in weights]),
                "output and residual": (H * HEADS, [lambda l=l: kernels.project(wide, (l.output,), x) for l in weights], [lambda l=l: x + torch.nn.functional.linear(wide, l.output.weight, l.output.bias) for l in weights]),
                f"experts, gate and up ({hit:.1f} of {E} used)": (hit * H * 2 * I, [lambda l=l, w=w: kernels._expert_product(
                    x, l.experts.gate_up, w, x.new_empty(4 * rows, I), bias=l.experts.gate_up_bias, gather=True, gated=True, alpha=1.702, limit=7.0, **up) for l, w in zip(weights, work)], None),
                f"experts, down ({hit:.1f} of {E} used)": (hit * I * H, [lambda l=l, w=w: kernels._expert_product(
                    hidden, l.experts.down, w, x.new_empty(4 * rows, H, dtype=torch.float32), bias=l.experts.down_bias, **down) for l, w in zip(weights, work)], None),
                "head": (V * H, [lambda: kernels.project(x, (Projection(head),))], [lambda: torch.nn.functional.linear(x, head)]),
                "a whole second half of a layer (`mix`)": (hit * 3 * I * H, [lambda l=l: kernels.mix(x, l, l.norm, top=4, eps=1e-5, dtype=torch.bfloat16) for l in weights], None),
            }
            for name, (numbers, ours, theirs) in cases.items():
                time = microseconds(ours)
                print(f"| {rows} | {name} | {2 * numbers / 1e6:.1f} | {time:.1f} | {2 * numbers / time / 1e6:.2f} | {'' if theirs is None else f'{microseconds(theirs):.1f}'} |", flush=True)


if __name__ == "__main__": main()
