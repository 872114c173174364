"""Compiles every Triton kernel of the package for cards that are not here (compute capabilities on
the command line), and prints a line for each launch: kernel, shared memory, or the error.

Launches are recorded, not written down: the functions that launch are called with tensors without
memory, at a gpt-oss-20b's and a Qwen3-4B's sizes. A kernel that none of them launches is named as
missing. Below compute capability 8.0 numbers are float16, and a bfloat16 in the code is an error.
With the first word `all`, more sizes of batches; without it, of a newer card only the products
with experts, which are other code there."""

import pkgutil
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import grpo_nb
from grpo_nb.kernels import training_kernels
from grpo_nb.kernels.compile_together import compiled_for
from grpo_nb.model import attention_kernel, offload
from grpo_nb.model.experts import ExpertWeights, LowRank
from grpo_nb.model.packed import PackedWeight
from grpo_nb.rollout import decode_kernels, dense_kernels, expert_kernel, filter_kernels
from grpo_nb.rollout.decode_ops import DecodeState, LayerWeights, Norm, Projection
from grpo_nb.rollout.kv_cache import LayerCache
from grpo_nb.rollout.sampling import SamplingParams

# Which kernels there are


def called_by(kernel):
    "The kernels that a kernel calls by name."
    names = [kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names]
    return [found for found in names if isinstance(found, JITFunction)]


def kernels():
    "Name -> kernel, of every module of the package that holds the decorator."
    found = {}
    for module in pkgutil.walk_packages(grpo_nb.__path__, "grpo_nb."):
        place = module.module_finder.find_spec(module.name).origin
        decorated = re.findall(r"@\w+\.jit\b.*\n\s*def (\w+)", Path(place).read_text())
        for name in decorated:  # one inside a function has no such name: an error here
            found[f"{module.name}.{name}"] = getattr(import_module(module.name), name)
    return found


def missing(launched, capability):
    "Names of kernels that are neither launched nor called by one that is."
    reached, left = set(), list(launched)
    while left:
        kernel = left.pop()
        if kernel not in reached:
            reached.add(kernel)
            left += called_by(kernel)
    newer = vars(attention_kernel).values()  # kernels that an old card does not use
    return [
        name
        for name, kernel in kernels().items()
        if kernel not in reached
        and (capability >= 80 or not (kernel.is_gluon() or kernel in newer))
    ]


# What launches them


class Recorder:
    "In place of a launch: its kernel, arguments, constants and options, once for each compilation."

    def __init__(self, half):
        self.half, self.seen = half, {}

    def __enter__(self):
        def note(kernel, *args, grid, warmup=False, **given):
            if given.get("PACKED"):  # on a card, which a tensor without memory is not on
                given["PTX"] = self.half == torch.bfloat16
            self.seen[compiled_for(kernel, args, given)] = kernel, args, given

        self.patch = mock.patch.object(JITFunction, "run", note)
        self.patch.start()
        return self

    def __exit__(self, *error):
        self.patch.stop()


class Card:
    "In place of a driver: it says which card this is. Triton keeps what it compiles by device."

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


class Sizes:
    "Makes tensors without memory, and layers of them, in a card's 16-bit format."

    def __init__(self, half):
        self.half = half
        self.wide = torch.float32 if half == torch.float16 else half  # of a gpt-oss' residual

    def t(self, *shape, dtype=None):
        return torch.empty(*shape, dtype=dtype or self.half, device="meta")

    def ints(self, *shape):
        return self.t(*shape, dtype=torch.int32)

    def longs(self, *shape):
        return self.t(*shape, dtype=torch.int64)

    def floats(self, *shape):
        return self.t(*shape, dtype=torch.float32)

    def linear(self, n, k, rank=8, bias=True):
        adapter = (self.t(rank, k), self.t(n, rank), 2.0) if rank else ()
        return Projection(self.t(n, k), self.t(n) if bias else None, *adapter)

    def experts(self, packed, rank, E=32, H=2880):
        def matrix(n):
            if not packed:
                return self.t(E, H, n)
            blocks, scales = (E, n, H // 32, 16), (E, n, H // 32)
            return PackedWeight(
                *(self.t(*shape, dtype=torch.uint8) for shape in (blocks, scales)), self.half
            )

        def lora(n):
            return (LowRank(self.t(E, H, rank), self.t(E, rank, n), 2.0),) if rank else ()

        return ExpertWeights(
            matrix(2 * H),
            self.t(E, 2 * H),
            matrix(H),
            self.t(E, H),
            1.702,
            7.0,
            lora(2 * H),
            lora(H),
        )

    def layer(self, packed, rank, H=2880):
        return LayerWeights(
            self.t(H),
            self.linear(4096, H),
            self.linear(512, H),
            self.linear(512, H),
            self.linear(H, 4096),
            self.t(64),
            self.t(H),
            self.t(32, H),
            self.t(32),
            self.experts(packed, rank),
        )


def gpt_oss_step(s, B, packed=True, rank=8, H=2880):
    "One layer of gpt-oss-20b and its head, for one token of each of B rows."
    layer, x = s.layer(packed, rank), s.t(B, H, dtype=s.wide)
    rows, lengths = s.longs(B), s.ints(33)
    qkv = decode_kernels.project(s.t(B, H), (layer.query, layer.key, layer.value))
    for cache in (
        LayerCache(s.t(50, 8, 128, 64), s.t(50, 8, 128, 64), None, s.ints(33, 4)),
        LayerCache(s.t(33, 8, 128, 64), s.t(33, 8, 128, 64), 128, None),
    ):
        turns = s.t(B, 32, dtype=s.wide), s.t(B, 32, dtype=s.wide)
        inputs = qkv, *turns, cache, rows, lengths, s.t(64)
        out = decode_kernels.attend(*inputs, kv_heads=8, scale=0.125)
    decode_kernels.project(out, (layer.output,), residual=x)
    _, normed = decode_kernels.moe(x, layer, s.t(H), top=4, eps=1e-5, dtype=s.half)
    logits = decode_kernels.project(normed, (s.linear(201_088, H, 0, bias=False),))
    decode_kernels.draw(logits, s.t(B, dtype=torch.float64))


def dense_step(s, B, residual, H=2560, inner=9728, D=128):
    "One layer of Qwen3-4B, and the norms and the activation of other families."
    x, y, eps = s.t(B, H, dtype=residual), s.t(B, H), 1e-6
    _, normed = dense_kernels.add_norm(x, y, Norm(s.t(H), eps), None, s.half)
    dense_kernels.add_norm(x, y, *[Norm(s.floats(H), eps, rounds_first=False)] * 2, s.half)
    heads = [s.linear(n * D, H, bias=False) for n in (32, 8, 8)]
    dense_kernels.products(normed, heads)
    qkv = s.t(B, 48 * D)
    dense_kernels.norm_heads(qkv, (Norm(s.t(D), eps), Norm(s.t(D), eps)), 8, D)
    cache = LayerCache(s.t(50, 8, 128, D), s.t(50, 8, 128, D), None, s.ints(B + 1, 4))
    inputs = qkv, s.t(B, D // 2), s.t(B, D // 2), cache, s.longs(B), s.ints(B + 1), s.t(32)
    out = dense_kernels.project(
        decode_kernels.attend(*inputs, kv_heads=8, scale=D**-0.5), (s.linear(H, 32 * D),)
    )
    wide = dense_kernels.products(out, [s.linear(inner, H, bias=False) for _ in range(2)])
    gate, up = wide if len(wide) == 2 else wide[0].chunk(2, -1)
    for activation in ("silu", "gelu_pytorch_tanh"):
        out = dense_kernels.activate(gate, up, activation)
    dense_kernels.products(out, [s.linear(H, inner, bias=False)])


def drawing(s, B, V=151_936):
    "The filters of a draw, a row's stream of numbers, and what is written down."
    params = SamplingParams(top_k=50, top_p=0.95, min_p=0.05, temperature=0.7)
    uniform = s.t(B, dtype=torch.float64)
    tokens, logps, _ = filter_kernels.draw(s.t(B, V), params, uniform)
    alive = s.t(B + 1, dtype=torch.bool)
    kept = s.longs(B + 1, 512), s.floats(B + 1, 512), s.longs(B + 1)
    state = DecodeState(*kept, s.ints(B + 1), s.ints(B + 1), alive)
    decode_kernels.stream_numbers(s.longs(B), s.ints(B))
    decode_kernels.append_tokens(s.longs(B), tokens, logps, s.longs(2), state)


def training(s, T=2048, E=32, H=2880):
    "What training puts between its products."
    blocks, scales = (s.t(*shape, dtype=torch.uint8) for shape in ((H, 90, 16), (H, 90)))
    training_kernels.unpack(blocks, scales, s.half)
    z, ids, bias = s.t(4 * T, 2 * H), s.longs(4 * T), s.t(E, 2 * H)
    gradient = training_kernels.activate(z, ids, bias, 1.702, 7.0)
    training_kernels.activate_backward(z, ids, bias, gradient, s.floats(4 * T), 1.702, 7.0, z)
    y, place = s.t(4 * T, H), s.longs(T, 4)
    training_kernels.combine(y, place, s.floats(T, 4), place, s.t(E, H))
    training_kernels.combine(y, place)
    part = s.t(T, H)
    sums = training_kernels.combine(part, place, s.floats(T, 4), place, s.t(E, H), first=T)
    training_kernels.combine(part, place, s.floats(T, 4), place, s.t(E, H), 2 * T, sums)
    training_kernels.combine(part, place, first=T, out=sums)
    turns = s.t(1, T, 32), s.t(1, T, 32)
    for back in (False, True):
        training_kernels.rotate(s.t(1, T, 64, 64), *turns, back)
    for shape in ((1, T, 2560), (1, T, 32, 128)):  # a Qwen3-4B's rows, and its heads
        x, gamma = s.t(*shape), s.t(shape[-1])
        training_kernels.norm_backward(training_kernels.norm(x, gamma, 1e-6), x, gamma, 1e-6)
    wide = s.t(1, T, 9728)
    training_kernels.gate_backward(training_kernels.gate(wide, wide), wide, wide)
    logits = s.t(512, 201_088)
    training_kernels.softmax_chunk(logits, s.longs(512))
    training_kernels.softmax_chunk(logits, s.longs(512), s.floats(512), entropy=True)
    offload._gather(s.t(201_088, H), s.longs(T), s.half)


def attention(s, heads=(64, 8), D=64, L=2048):
    "Both passes of a layer of gpt-oss-20b, and of one with other heads, padded, offset as data."
    (Hq, Hk), numbers = heads, (attention_kernel.NO_WINDOW, D**-0.5)
    q, k, v = (s.t(2, L, n, D).transpose(1, 2) for n in (Hq, Hk, Hk))
    for sinks, pads, offset in ((s.t(Hq), None, 0), (None, s.longs(2), s.longs(1)[0])):
        out, lse = attention_kernel.forward(q, k, v, sinks, pads, offset, *numbers)
        attention_kernel.backward(out, q, k, v, pads, out, lse, offset, *numbers)


def attentions(s):
    "Of each size of heads for which there is a tile, and of one between two."
    for heads, D in (((64, 8), 64), ((32, 8), 128), ((8, 4), 256), ((8, 4), 96)):
        attention(s, heads, D)


SMALL = (86,)  # cards with little shared memory, of which only attention has tiles of its own


def launches(capability, every):
    "What is launched on a card of this compute capability."
    s = Sizes(torch.float16 if capability < 80 else torch.bfloat16)
    old = s.half == torch.float16
    with Recorder(s.half) as recorder:
        if capability in SMALL:
            with mock.patch.object(attention_kernel, "has_small_blocks", lambda device: True):
                attentions(s)
            return recorder.seen.values()
        training(s)
        drawing(s, 8)
        gpt_oss_step(s, 1, packed=False, rank=0)
        gpt_oss_step(s, 32)
        for B in (1, 8, 100) if every else ():
            gpt_oss_step(s, B)
        for B in (1, 8, 32, 100) if every else (100,):  # with 100 rows, products are cuBLAS's
            dense_step(s, B, torch.float32 if old and B == 32 else s.half)
        if not old:
            attentions(s)
        if not old:  # a tensor without memory cannot say that it is on a card
            with mock.patch.object(expert_kernel, "works", lambda device: True):
                for B, rank in ((8, 0), (32, 8), (256, 16)):
                    gpt_oss_step(s, B, rank=rank)
    return recorder.seen.values()


# Compiling


def spilled(cubin):
    "Bytes a thread that do not fit into its registers."
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    return int(re.search(r"STACK:(\d+)", told)[1])


def compiled(kernel, args, given, capability):
    "A launch as the card would get it; an AssertionError where the code is not as it should be."
    done = kernel.run(*args, grid=(1,), warmup=True, **given)
    body = done.asm["ptx"]
    if kernel.is_gluon():  # warps do not wait for one another before the sum is done
        loop = body[: body.rindex("mma.sync")]
        assert not re.search(r"(ld|st)\.shared|bar\.sync", loop), "shared memory in the loop"
        assert not spilled(done.asm["cubin"]), "registers spilled to memory"
    if capability < 80:
        for name in ("ttir", "ptx"):
            assert "bf16" not in done.asm[name], f"bfloat16 in the {name}"
    return done


def main():
    every = sys.argv[1] == "all"
    for capability in map(int, sys.argv[1 + every :]):
        launched = launches(capability, every)
        left = (
            [] if capability in SMALL else missing([kernel for kernel, *_ in launched], capability)
        )
        for name in left:
            print(f"{capability} {name}: MISSING: no launch of it was recorded", flush=True)
        driver.set_active(Card(capability))
        for kernel, args, given in launched:
            newest = kernel.fn.__name__ == "_experts_kernel" or given.get("D") == 64
            if not (every or capability < 80 or newest):
                continue
            name = f"{capability} {kernel.fn.__module__}.{kernel.fn.__name__}"
            try:
                done = compiled(kernel, args, given, capability)
                print(f"{name}: {done.metadata.shared} bytes", flush=True)
            except Exception as error:
                print(f"{name} {given}: FAILED {error!r}"[:900], flush=True)


if __name__ == "__main__":
    main()
