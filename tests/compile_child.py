"""Compiles the Triton kernels for cards that are not here (compute capabilities on the command line), and prints a line for each: name, shared memory, or the error."""
import inspect
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from grpo_nb.model import fused
from grpo_nb.rollout import kernels, packed_experts

ALIGNED = set("I N K H V count se sk sn ue ur un NA NB NC".split())  # sizes that are multiples of 16 in gpt-oss


def signature(kernel, kinds, constants):
    "A type for each parameter: a pointer where `kinds` names one, else a number."
    names = inspect.signature(kernel.fn).parameters
    return {name: "constexpr" if name in constants else kinds.get(name, "fp32" if name in FLOATS else "i32") for name in names}


FLOATS = {"alpha", "limit", "largest", "scale", "eps", "inverse_temperature", "SA", "SB", "SC"}


def cases(half):
    "(name, kernel, pointers, constants, warps, stages) at gpt-oss-20b's sizes; `half` is the card's 16-bit format."
    p, f, i, l = f"*{half}", "*fp32", "*i32", "*i64"
    yield "unpack", fused._unpack, dict(blocks="*u8", scales="*u8", out=p), dict(BB=128), 4, 3
    rows = dict(z=p, ids=l, bias=p, out=p)
    yield "activate", fused._activate, rows, dict(BI=1024), 4, 3
    yield "activate_backward", fused._activate_backward, dict(rows, gradient=p, share=f, sums=f), dict(BI=512), 4, 3
    yield "combine", fused._combine, dict(y=p, place=l, weights=f, indices=l, bias=p, out=f), dict(K=4, HAS_WEIGHTS=True, HAS_BIAS=True, BN=1024), 4, 3
    if half == "fp16": return  # the decoding kernels ask for compute capability 8.0
    for packed in (False, True):
        for rank in (0, 8):
            for BM, BN, BK, stages in ((16, 64, 256, 4), (32, 128, 128, 4), (64, 128, 128, 4)) if packed else ((16, 64, 64, 4), (32, 128, 64, 4), (64, 128, 64, 4)):
                pointers = dict(x=p, token_of=i, weight_of=f, w="*u8" if packed else p, scales="*u8" if packed else p, bias=p, t=f if rank else p, up=p, out=p, item_expert=i, item_start=i, item_end=i)
                constants = dict(GATHER=True, GATED=True, HAS_BIAS=True, ROUND=True, R=rank, RP=16, PACKED=packed, PTX=packed, IEEE=False, BM=BM, BN=BN, BK=BK)
                yield f"experts {'packed' if packed else 'dense'} rank {rank} tile {BM}x{BN}x{BK}", kernels._experts, pointers, constants, 4, stages


def packed_cases():
    "(name, pointers, constants) of the kernel in Gluon, at gpt-oss-20b's sizes."
    short = dict(bfloat16="*bf16", int32="*i32", float32="*fp32", uint8="*u8")
    for rows, rank, gated in ((8, 0, True), (16, 8, False)):
        pointers = {name: short[kind] for name, kind in packed_experts.POINTERS.items()}
        if rank: pointers["t"] = "*fp32"
        if not gated: pointers["out"] = "*fp32"
        yield f"packed experts rank {rank} tile {rows}", pointers, packed_experts.constants(2880, 5760 if gated else 2880, rows, rank, gated, gated)


def compile_packed(capability):
    "A line for each, after a look whether warps wait for each other before the sum is done."
    kernel = packed_experts._experts
    names = list(inspect.signature(kernel.fn).parameters)
    for name, pointers, constants in packed_cases():
        types = signature(kernel, pointers, constants)
        aligned = {(n,): [["tt.divisibility", 16]] for n, (key, kind) in enumerate(types.items()) if kind[0] == "*" or key in ALIGNED}
        try:
            source = GluonASTSource(kernel, types, {(names.index(key),): value for key, value in constants.items()}, aligned)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=packed_experts.WARPS))
            body = compiled.asm["ptx"]
            assert not re.search(r"(ld|st)\.shared|bar\.sync", body[: body.rindex("mma.sync")]), "the loop goes through shared memory"
            print(f"{capability} {name}: {compiled.metadata.shared} bytes", flush=True)
        except Exception as error: print(f"{capability} {name}: FAILED {error!r}"[:500], flush=True)


def main():
    for capability in map(int, sys.argv[1:]):
        for name, kernel, pointers, constants, warps, stages in cases("fp16" if capability < 80 else "bf16"):
            types = signature(kernel, pointers, constants)
            aligned = {(n,): [["tt.divisibility", 16]] for n, (key, kind) in enumerate(types.items()) if kind[0] == "*" or key in ALIGNED}
            try:
                compiled = triton.compile(ASTSource(kernel, types, constants, aligned), target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps, num_stages=stages))
                print(f"{capability} {name}: {compiled.metadata.shared} bytes", flush=True)
            except Exception as error: print(f"{capability} {name}: FAILED {error!r}"[:500], flush=True)
        if capability >= 80: compile_packed(capability)


if __name__ == "__main__": main()
