"""Compiles the Triton kernels for cards that are not here (compute capabilities on the command
line), and prints a line for each: name, shared memory, or the error. Of a kernel in several tiles
only the smallest and the largest in use, unless the first word is `all`."""

import inspect
import re
import sys
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from grpo_nb.model import training_kernels
from grpo_nb.model.experts import ExpertWeights, LowRank
from grpo_nb.model.packed import PackedWeight
from grpo_nb.rollout import decode_kernels, expert_kernel
from grpo_nb.rollout.decode_ops import LayerWeights, Projection
from grpo_nb.rollout.kv_cache import LayerCache

ALIGNED = set(
    "I N K H V count se sk sn ue ur un NA NB NC".split()
)  # sizes that are multiples of 16 in gpt-oss


def signature(kernel, kinds, constants):
    "A type for each parameter: a pointer where `kinds` names one, else a number."
    names = inspect.signature(kernel.fn).parameters
    return {
        name: "constexpr"
        if name in constants
        else kinds.get(name, "fp32" if name in FLOATS else "i32")
        for name in names
    }


FLOATS = {"alpha", "limit", "largest", "scale", "eps", "inverse_temperature", "SA", "SB", "SC"}


def multiples_of_16(types):
    "Triton's word for the pointers and sizes of which it may assume that."
    return {
        (n,): [["tt.divisibility", 16]]
        for n, (name, kind) in enumerate(types.items())
        if kind[0] == "*" or name in ALIGNED and kind != "constexpr"
    }


def cases(half, every):
    """(name, kernel, pointers, constants, warps, stages) at gpt-oss-20b's sizes; `half` is the
    card's 16-bit format; `every`: experts in the tiles between, too."""
    p, f, i, long = f"*{half}", "*fp32", "*i32", "*i64"
    yield (
        "unpack",
        training_kernels._unpack,
        dict(blocks="*u8", scales="*u8", out=p),
        dict(BB=128),
        4,
        3,
    )
    rows = dict(z=p, ids=long, bias=p, out=p)
    yield "activate", training_kernels._activate, rows, dict(BI=1024), 4, 3
    yield (
        "activate_backward",
        training_kernels._activate_backward,
        dict(rows, gradient=p, share=f, sums=f),
        dict(BI=512),
        4,
        3,
    )
    yield (
        "combine",
        training_kernels._combine,
        dict(y=p, place=long, weights=f, indices=long, bias=p, out=f),
        dict(K=4, HAS_WEIGHTS=True, HAS_BIAS=True, BN=1024),
        4,
        3,
    )
    if half == "fp16":
        return  # `steps` has these for older cards
    for packed in (False, True):
        for rank in (0, 8):
            for BM, BN, BK, stages in (
                ((16, 64, 256, 4), (32, 128, 128, 4), (64, 128, 128, 4))
                if packed
                else ((16, 64, 64, 4), (32, 128, 64, 4), (64, 128, 64, 4))
            ):
                if BM == 32 and not every:
                    continue
                pointers = dict(
                    x=p,
                    token_of=i,
                    weight_of=f,
                    w="*u8" if packed else p,
                    scales="*u8" if packed else p,
                    bias=p,
                    t=f if rank else p,
                    up=p,
                    out=p,
                    item_expert=i,
                    item_start=i,
                    item_end=i,
                )
                constants = dict(
                    GATHER=True,
                    GATED=True,
                    HAS_BIAS=True,
                    ROUND=True,
                    R=rank,
                    RP=16,
                    PACKED=packed,
                    PTX=packed,
                    IEEE=False,
                    BM=BM,
                    BN=BN,
                    BK=BK,
                )
                yield (
                    f"experts {'packed' if packed else 'dense'} rank {rank} tile {BM}x{BN}x{BK}",
                    decode_kernels._experts_kernel,
                    pointers,
                    constants,
                    4,
                    stages,
                )


def steps(half, batches):
    """The launches of decoding steps of gpt-oss-20b: (kernel, types, constants, what is a multiple
    of 16, options), from tensors without memory. In float16 the residual stream is float32."""
    dtype, wide = (
        (torch.float16, torch.float32) if half == "fp16" else (torch.bfloat16, torch.bfloat16)
    )
    short = {
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.uint8: "u8",
        torch.bool: "i1",
    }
    seen = {}

    def note(kernel, *args, grid, warmup=False, num_warps=4, num_stages=3, **given):
        values = dict(zip(inspect.signature(kernel.fn).parameters, args)) | given
        constants = {
            name: value
            for name, value in values.items()
            if kernel.params[list(values).index(name)].is_constexpr
        }
        types = {
            name: "constexpr"
            if name in constants
            else f"*{short[x.dtype]}"
            if torch.is_tensor(x)
            else "fp32"
            if isinstance(x, float)
            else "i32"
            for name, x in values.items()
        }
        aligned = {
            (n,): [["tt.divisibility", 16]]
            for n, (name, x) in enumerate(values.items())
            if name not in constants and (torch.is_tensor(x) or isinstance(x, int) and x % 16 == 0)
        }
        seen[kernel.fn.__name__, str(types), str(constants)] = (
            kernel,
            types,
            constants,
            aligned,
            dict(num_warps=num_warps, num_stages=num_stages),
        )

    def t(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def linear(n, k, rank=8):
        return (
            Projection(t(n, k), t(n), t(rank, k), t(n, rank), 2.0)
            if rank
            else Projection(t(n, k), t(n))
        )

    H = inner = 2880
    experts = ExpertWeights(
        PackedWeight(
            t(32, 2 * inner, H // 32, 16, dtype=torch.uint8),
            t(32, 2 * inner, H // 32, dtype=torch.uint8),
            dtype,
        ),
        t(32, 2 * inner),
        PackedWeight(
            t(32, H, inner // 32, 16, dtype=torch.uint8),
            t(32, H, inner // 32, dtype=torch.uint8),
            dtype,
        ),
        t(32, H),
        1.702,
        7.0,
        (LowRank(t(32, H, 8), t(32, 8, 2 * inner), 2.0),),
    )
    layer = LayerWeights(
        t(H),
        linear(4096, H),
        linear(512, H),
        linear(512, H),
        linear(H, 4096),
        t(64),
        t(H),
        t(32, H),
        t(32),
        experts,
    )
    caches = [
        LayerCache(t(50, 8, 128, 64), t(50, 8, 128, 64), None, t(33, 4, dtype=torch.int32)),
        LayerCache(t(33, 8, 128, 64), t(33, 8, 128, 64), 128, None),
    ]
    with mock.patch.object(triton.runtime.jit.JITFunction, "run", note):
        for B in batches:
            x, lengths, rows = t(B, H, dtype=wide), t(33, dtype=torch.int32), t(B, dtype=torch.long)
            qkv = decode_kernels.project(t(B, H), (layer.query, layer.key, layer.value))
            for cache in caches:
                out = decode_kernels.attend(
                    qkv,
                    t(B, 32, dtype=wide),
                    t(B, 32, dtype=wide),
                    cache,
                    rows,
                    lengths,
                    t(64),
                    kv_heads=8,
                    scale=0.125,
                )
            decode_kernels.project(out, (layer.output,), residual=x)
            _, normed = decode_kernels.moe(x, layer, t(H), top=4, eps=1e-5, dtype=dtype)
            logits = decode_kernels.project(normed, (linear(201_088, H, 0),))
            decode_kernels.draw(logits, t(B, dtype=torch.float64))
    return seen.values()


def packed_cases():
    "(name, pointers, constants) of the kernel in Gluon, at gpt-oss-20b's sizes."
    short = dict(bfloat16="*bf16", int32="*i32", float32="*fp32", uint8="*u8")
    for rows, rank, gated in ((8, 0, True), (16, 8, False)):
        pointers = {name: short[kind] for name, kind in expert_kernel.POINTERS.items()}
        if rank:
            pointers["t"] = "*fp32"
        if not gated:
            pointers["out"] = "*fp32"
        yield (
            f"packed experts rank {rank} tile {rows}",
            pointers,
            expert_kernel.constants(2880, 5760 if gated else 2880, rows, rank, gated, gated),
        )


def compile_packed(capability):
    "A line for each, after a look whether warps wait for each other before the sum is done."
    kernel = expert_kernel._experts_kernel
    names = list(inspect.signature(kernel.fn).parameters)
    for name, pointers, constants in packed_cases():
        types = signature(kernel, pointers, constants)
        aligned = multiples_of_16(types)
        try:
            source = GluonASTSource(
                kernel,
                types,
                {(names.index(key),): value for key, value in constants.items()},
                aligned,
            )
            compiled = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options=dict(num_warps=expert_kernel.WARPS),
            )
            body = compiled.asm["ptx"]
            assert not re.search(r"(ld|st)\.shared|bar\.sync", body[: body.rindex("mma.sync")]), (
                "the loop goes through shared memory"
            )
            print(f"{capability} {name}: {compiled.metadata.shared} bytes", flush=True)
        except Exception as error:
            print(f"{capability} {name}: FAILED {error!r}"[:500], flush=True)


def main():
    every = sys.argv[1] == "all"
    batches = (1, 8, 32) if every else (1, 32)
    for capability in map(int, sys.argv[1 + every :]):
        for name, kernel, pointers, constants, warps, stages in cases(
            "fp16" if capability < 80 else "bf16", every
        ):
            types = signature(kernel, pointers, constants)
            aligned = multiples_of_16(types)
            try:
                compiled = triton.compile(
                    ASTSource(kernel, types, constants, aligned),
                    target=GPUTarget("cuda", capability, 32),
                    options=dict(num_warps=warps, num_stages=stages),
                )
                print(f"{capability} {name}: {compiled.metadata.shared} bytes", flush=True)
            except Exception as error:
                print(f"{capability} {name}: FAILED {error!r}"[:500], flush=True)
        decoding = steps("fp16", batches) if capability < 80 else ()
        for kernel, types, constants, aligned, options in decoding:
            try:
                compiled = triton.compile(
                    ASTSource(kernel, types, constants, aligned),
                    target=GPUTarget("cuda", capability, 32),
                    options=options,
                )
                print(
                    f"{capability} step: {kernel.fn.__name__}: {compiled.metadata.shared} bytes",
                    flush=True,
                )
            except Exception as error:
                print(
                    f"{capability} step: {kernel.fn.__name__} {constants}: FAILED {error!r}"[:600],
                    flush=True,
                )
        if capability >= 80:
            compile_packed(capability)


if __name__ == "__main__":
    main()
