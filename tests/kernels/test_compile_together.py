"""A pass that launches nothing lists what a step launches and leaves its tensors alone; what is
listed is compiled at once. (How long that takes is a card's to say: tests/gpu/test_decoder.py.)"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_nb.kernels import compile_together as module
from grpo_nb.kernels.compile_together import compile_early, compile_together, noted_launches
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout import decode_kernels, decode_ops, filter_kernels
from grpo_nb.rollout.decode_ops import DecodeState
from grpo_nb.rollout.decoder import Decoder
from grpo_nb.rollout.sampling import SamplingParams

triton = pytest.importorskip("triton")
CPU = torch.device("cpu")
FOLDER = Path(module.__file__).parents[1]


PLAIN = SamplingParams(max_tokens=4)


def a_step(params=PLAIN):
    "One layer of a gpt-oss, a token drawn and appended: a function of the two ways, and its state."
    lengths = [5, 9, 2]
    decoder = Decoder(tiny_gpt_oss(num_hidden_layers=1, head_dim=32, sliding_window=16)[0])
    cache, state = decoder.cache(lengths, [1] * 3, 4), DecodeState.start(lengths, 4, CPU)
    state.keys, state.last = torch.arange(4), torch.full((4,), 5)
    rows, stop = torch.arange(3), torch.tensor([1])

    def step(ops=decode_kernels):
        decoder.ops = ops
        with torch.no_grad():
            logits = decoder.logits(decoder.step(cache, state, rows, 16))
        uniform = ops.stream_numbers(state.keys[rows], state.counts[rows])
        tokens, logps, *_ = (
            filter_kernels.draw(logits, params, uniform)
            if params.top_k
            else decode_kernels.draw(logits, uniform)
        )
        ops.append_tokens(rows, tokens, logps, stop, state)

    return step, [
        cache.layers[0].keys,
        state.ids,
        state.last,
        state.lengths,
        state.alive,
        state.counts,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, top_k=3, top_p=0.9)],
    ids=["plain", "filters"],
)
def test_nothing_is_launched_and_nothing_changes(params):
    step, tensors = a_step(params)
    before = [x.clone() for x in tensors]
    with noted_launches() as noted:
        step()
    assert all(map(torch.equal, tensors, before))
    names = {launch.kernel.fn.__name__ for launch in noted}
    assert {"_attend_kernel", "_schedule_kernel", "_append_kernel"} <= names and len(names) >= 9
    step()  # afterwards they run, and are those that were listed
    assert not all(map(torch.equal, tensors, before))
    launched = []
    kernels = module.kernels_in_use()
    assert not any("run" in vars(kernel) for kernel in kernels)
    with noted_launches() as again:
        step()
        launched += [launch.kernel for launch in again]
    assert {id(launch.kernel) for launch in noted} == set(map(id, launched))


def test_other_threads_and_compilations_go_on():
    step, tensors = a_step()
    before = [x.clone() for x in tensors]
    with noted_launches() as noted:
        other = threading.Thread(target=step)
        other.start()
        other.join()
        assert not noted and not all(map(torch.equal, tensors, before))


def test_two_threads_that_note_do_not_launch_for_one_another():
    "The second begins when the first is done; neither loses a launch to the other."
    steps, found, first_is_in = [a_step() for _ in range(2)], {}, threading.Event()

    def note(name, step):
        with noted_launches() as noted:
            first_is_in.set()
            step()
            time.sleep(0.05)
            step()
            found[name] = len(noted)

    threads = [threading.Thread(target=note, args=(n, step)) for n, (step, _) in enumerate(steps)]
    before = [[x.clone() for x in tensors] for _, tensors in steps]
    threads[0].start()
    assert first_is_in.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] > 10
    for (_, tensors), old in zip(steps, before, strict=True):
        assert all(map(torch.equal, tensors, old))


def test_kernels_are_given_back_after_an_error():
    step, _ = a_step()

    def broken():
        step()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        compile_together(broken)
    assert not any("run" in vars(kernel) for kernel in module.kernels_in_use())


def test_what_is_listed_is_compiled_once(monkeypatch):
    "With a compiler that writes down what it was asked for."
    asked, modes = [], []

    class Kernel:
        fn, arg_names = SimpleNamespace(__name__="kernel", __annotations__={}), "xyz"

        def run(self, *args, grid, warmup, **constants):
            asked.append((args, warmup, constants, modes[-1].active))
            modes[-1].raw_futures.append(modes[-1].pool.submit(int))

    class Mode:
        def __init__(self, pool, ignore_errors):
            assert ignore_errors  # a kernel that is never launched need not compile
            self.pool, self.raw_futures, self.active = pool, [], False
            modes.append(self)

        def __enter__(self):
            self.active = True
            return self

        def __exit__(self, *error):
            self.active = False

    kernel = Kernel()
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    monkeypatch.setattr(triton, "AsyncCompileMode", Mode)
    monkeypatch.setattr(module, "kernels_in_use", lambda: [kernel])

    def work():
        kernel.run(1, grid=(5,), warmup=False, BM=16)
        kernel.run(2, grid=(7,), warmup=False, BM=16)

    assert compile_together(work, threads=2) == 2
    assert asked == [((1,), True, {"BM": 16}, True), ((2,), True, {"BM": 16}, True)]


class Compiled:
    "What a compiler returns: made ready for launches when `run` is looked up."

    def __init__(self, loads=True):
        self.loads, self.threads = loads, []

    @property
    def run(self):
        self.threads.append(threading.get_ident())
        if not self.loads:
            raise RuntimeError("out of shared memory")
        return lambda: None


@pytest.mark.parametrize("loads", [True, False])
def test_what_is_compiled_is_loaded_in_the_same_thread(loads):
    "The launch would load it, and wait; what cannot be loaded says so there, not here."
    kernel, compiled_in = Compiled(loads), []

    def compile():
        compiled_in.append(threading.get_ident())
        return kernel

    with module._Pool(2) as pool:
        assert pool.submit(compile).result() is kernel
    assert kernel.threads == compiled_in != [threading.get_ident()]


WIRED = """
import json, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from grpo_nb.kernels.training_kernels import compile_softmax
from grpo_nb.kernels import compile_together as module

class Card:  # an H100 that is not here
    utils = type("", (), dict(
        launch=None, load_binary=staticmethod(lambda *_: (1, 1, 32, 0, 1024)),
        get_device_properties=staticmethod(lambda _: {"max_shared_mem": 2**17}),
    ))
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = get_current_stream = lambda self, *_: 0
    launcher_cls = lambda self, src, metadata: (lambda *_: None)

triton.runtime.driver.set_active(Card())
heard, early = [], threading.Event()

def listener(*, cache_hit, **_):
    heard.append((cache_hit, threading.current_thread().name))

triton.knobs.compilation.listener = listener
module.compile_early(lambda: compile_softmax(torch.float32, 7))

def work():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for V in (100, 101, 96):
            compile_softmax(dtype, V)

count = module.compile_together(work, threads=4)
print(json.dumps([count, module.compile_together(work, threads=4), heard]))
"""


@pytest.mark.long
def test_threads_compile_what_was_not_compiled_early(tmp_path):
    "With Triton's own compiler, for a card that is not here."
    made = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    made |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = [sys.executable, "-c", WIRED]
    done = subprocess.run(script, env=made, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-3000:]
    count, again, heard = json.loads(done.stdout.splitlines()[-1])
    (cached, thread), *others = heard
    assert not cached and thread == "compile_early"
    assert count == len(others) == 5 and not again  # V that 16 divides or not; one was early
    assert all(not hit and name.startswith("ThreadPoolExecutor") for hit, name in others)


def test_an_interruption_ends_it(monkeypatch):
    "Ctrl-C while threads compile: what has not begun is not compiled."
    kernel, begun, go = Launched(), [], threading.Event()

    class Mode:
        def __init__(self, pool, ignore_errors):
            self.pool, self.raw_futures = pool, []

        def __enter__(self):
            return self

        def __exit__(self, *error):
            go.set()
            first, second = self.raw_futures
            assert first.result(30) is None and isinstance(second.exception(30), CancelledError)

    def run(self, number, *, grid, warmup):
        made.raw_futures.append(
            made.pool.submit(lambda: begun.append(number) or go.wait(30) and None)
        )

    def enter(pool, ignore_errors):
        nonlocal made
        made = Mode(pool, ignore_errors)
        return made

    def interrupted(*_):
        raise KeyboardInterrupt

    def work():
        kernel.run(1, grid=(1,), warmup=False)
        kernel.run(2, grid=(1,), warmup=False)

    made = None
    monkeypatch.setattr(Launched, "run", run)
    monkeypatch.setattr(triton, "JITFunction", Launched)
    monkeypatch.setattr(triton, "AsyncCompileMode", enter)
    monkeypatch.setattr(module, "kernels_in_use", lambda: [kernel])
    monkeypatch.setattr(module, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile_together(work, threads=1)
    assert begun == [1]


def test_what_is_compiled_early_is_waited_for(monkeypatch):
    "Each of the threads would prepare the same again."
    go, kernel, order = threading.Event(), Launched(), []
    compile_early(lambda: order.append("early") if go.wait(30) else None)
    compile_early(partial(int, "an error stays there"))
    monkeypatch.setattr(triton, "JITFunction", Launched)
    monkeypatch.setattr(module, "kernels_in_use", lambda: [kernel])
    monkeypatch.setattr(
        module, "_Pool", lambda count: order.append(count) or ThreadPoolExecutor(count)
    )
    threading.Timer(0.3, go.set).start()
    assert compile_together(lambda: kernel.run(1, grid=(1,), warmup=False), threads=2) == 0
    assert order == ["early", 2]


class Launched:
    "A kernel that is compiled before anybody asks."

    fn, arg_names = lambda number: number, ["number"]

    def run(self, *args, grid, warmup, **constants):
        pass


def test_inside_a_noted_pass_launches_are_noted_there():
    "Attention compiles its passes so, and a step calls attention."
    step, tensors = a_step()
    before = [x.clone() for x in tensors]
    with noted_launches() as noted:
        assert compile_together(step) == 0
        inside = len(noted)
        step()
    assert inside == len(noted) > 8 and all(map(torch.equal, tensors, before))
    with noted_launches() as again:
        pass
    assert not again and not module._inside.noting


def test_what_cannot_be_loaded_is_loaded_again_at_its_launch():
    "Triton sets the launcher first; one without a function in the card's memory would be called."
    kernel = Compiled(loads=False)
    kernel._run = "a launcher"
    assert module._loaded(lambda: kernel) is kernel and kernel._run is None
    kernel._run = told = partial(int, "7")  # in its place, where Triton knows what is wrong
    assert module._loaded(lambda: kernel)._run is told


def test_every_module_with_kernels_is_known():
    "One that is imported inside a noted pass would launch."
    with_kernels = {
        ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
        if re.search(r"@\w+\.jit\b.*\n\s*def \w+", path.read_text())
    }
    assert with_kernels == set(module.MODULES)


def test_a_backward_pass_is_noted_in_the_same_thread():
    step, tensors = a_step()
    x, seen = torch.ones(2, requires_grad=True), []

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(threading.get_ident())
            step()
            return gradient

    before = [t.clone() for t in tensors]
    assert compile_together(lambda: Launches.apply(x).sum().backward()) == 0
    assert seen == [threading.get_ident()] and all(map(torch.equal, tensors, before))


def test_numbers_are_told_apart_as_triton_does():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    specialize = getattr(triton.runtime.jit, "native_specialize_impl", None)
    if specialize is None:
        pytest.skip("this Triton does it in Python")
    backend = make_backend(GPUTarget("cuda", 90, 32))
    kernel = SimpleNamespace(fn=lambda x: x, arg_names=["x"])
    numbers = 0, 1, 2, 7, 16, 17, 4096, 2**31 - 1, 2**31, 2**31 + 1, -1, -16, True, False
    for one in numbers:
        for other in numbers:
            theirs = [specialize(backend, x, False, True, True) for x in (one, other)]
            ours = [module.compiled_for(kernel, (x,), {}) for x in (one, other)]
            assert theirs[0] == theirs[1] or ours[0] != ours[1], (one, other)
    assert len({module.compiled_for(kernel, (n,), {}) for n in (16, 4096, 2**20)}) == 1


def test_parts_of_a_long_prompt_hold_the_tensors_of_one():
    "Each is read behind a longer copy of the cache, by the same kernel."
    from grpo_nb.model import attention_kernel as attention

    q, keys = torch.zeros(1, 4, 32, 32), [torch.zeros(1, 2, n, 32) for n in (32, 64, 4096, 33)]
    with noted_launches() as noted:
        for k in keys:
            attention.forward(q, k, k, None, None, k.shape[2] - 32, attention.NO_WINDOW, 1.0)
    held = [launch.args[1] for launch in noted]
    # 32 tokens behind none, behind some, and a number that is no multiple of 16
    assert [k.shape[2] for k in held] == [32, 33]


def test_interpreted_kernels_need_no_compiler():
    step, _ = a_step()
    assert compile_together(step) == 0


def test_the_formulas_launch_nothing():
    step, _ = a_step()
    with noted_launches() as noted:
        a_step()[0](decode_ops)
    assert {launch.kernel.fn.__name__ for launch in noted} <= {
        "_look_kernel",
        "_pick_token_kernel",
    }
