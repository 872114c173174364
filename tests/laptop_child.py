"""Systems that are not here to try, pretended in a process of its own: `python laptop_child.py
windows|apple ACTION [PATH] ACTION [PATH] ...`. Started by test_laptops.py.

windows: grpo_nb and the cells of a notebook do without what Windows lacks. Modules, functions of
`os`, signals and kinds of sockets are gone; a folder cannot be opened as a file; nothing can be
renamed, replaced or deleted while it, or a file in it, is open or mapped; a text file without a
named encoding is an error; output is written in cp1252.

apple: a device without float64 on which every operation runs, by the CPU behind it, and which
accelerate takes by itself. What it cannot show is whether mps has each operation, and has it right.
"""

import builtins
import errno
import inspect
import json
import os
import pkgutil
import shutil
import sys
import types
import warnings
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import torch

# what Windows lacks

MODULES = "resource fcntl pwd grp termios pty tty syslog readline posix triton".split()
NAMES = {
    "os": """fork forkpty register_at_fork getuid geteuid getgid getegid getgroups setuid setgid
        setsid getsid getpgid getpgrp setpgid killpg nice uname sysconf getloadavg statvfs fstatvfs
        mkfifo mknod chown fchown lchown fchmod openpty wait wait3 wait4 waitid WNOHANG WIFSIGNALED
        WTERMSIG WIFEXITED WEXITSTATUS sched_getaffinity sched_setaffinity pread pwrite preadv
        pidfd_open memfd_create eventfd setns unshare O_CLOEXEC O_NONBLOCK O_DIRECTORY O_NOFOLLOW
        posix_spawn sync fdatasync chroot pipe2 sendfile""",
    "signal": """SIGKILL SIGALRM SIGCHLD SIGSTOP SIGCONT SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGPIPE
        SIGSYS SIGXCPU SIGTSTP alarm setitimer getitimer ITIMER_REAL pthread_sigmask pthread_kill
        sigwait sigpending siginterrupt set_wakeup_fd pause""",
    "select": "poll epoll POLLIN POLLOUT POLLHUP kqueue",
    "socket": "AF_UNIX AF_NETLINK send_fds recv_fds",
    "time": "clock_gettime clock_gettime_ns pthread_getcpuclockid tzset CLOCK_MONOTONIC",
}


class Without(types.ModuleType):
    "A module without some of its names, and with others changed."

    def __init__(self, module, absent, **changed):
        super().__init__(module.__name__)
        self.__dict__.update(changed, _module=module, _absent=set(absent.split()))

    def __getattr__(self, name):
        if name in self._absent:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)


def refused(path):
    return PermissionError(errno.EACCES, "in use, or a folder opened as a file", str(path))


def held(path):
    "Whether this process has a path, or a file below it, open or mapped."
    path, used = os.path.realpath(path), []
    for number in os.listdir("/proc/self/fd"):
        try:
            used.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        used += [line.split(maxsplit=5)[5].strip() for line in maps if "/" in line]
    return any(name == path or name.startswith(path + "/") for name in used)


def guarded(function, count):
    "A function of `os` or `shutil` that refuses what is in use; `count`: of its arguments, paths."

    def call(*arguments, **others):
        if not others.get("dir_fd"):
            for path in arguments[:count]:
                if held(path):
                    raise refused(path)
            if count == 2 and os.path.isdir(arguments[1]):
                raise refused(arguments[1])
        return function(*arguments, **others)

    return call


def open_file(path, flags, *others, **named):
    if os.path.isdir(path):
        raise refused(path)
    return os.open(path, flags, *others, **named)


def fsync(descriptor):
    import fcntl

    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "a file that is open for reading only cannot be flushed")
    return os.fsync(descriptor)


def become_windows():
    "From now on grpo_nb, and code with the module name `lesson`, sees Windows."
    import accelerate  # noqa: F401  (others look for themselves what their system has)
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    before = builtins.__import__
    changed = {"os": dict(name="nt", open=open_file, fsync=fsync), "sys": dict(platform="win32")}
    NAMES["sys"] = "getrefcount_"
    modules = {
        name: Without(before(name), absent, **changed.get(name, {}))
        for name, absent in NAMES.items()
    }

    def looked_up(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        if level == 0 and importer.split(".")[0] in ("grpo_nb", "lesson"):
            if name.split(".")[0] in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in modules:
                return modules[name]
        return before(name, globals, locals, fromlist, level)

    builtins.__import__ = looked_up
    for name in ("rename", "replace"):
        setattr(os, name, guarded(getattr(os, name), 2))
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, guarded(getattr(os, name), 1))
    shutil.rmtree = guarded(shutil.rmtree, 1)
    for module in (r"grpo_nb\b", "lesson"):
        warnings.filterwarnings("error", category=EncodingWarning, module=module)
    return nullcontext()


# what Apple's GPU lacks


def become_apple():
    "From now on there is a device `apple`, and accelerate takes it by itself."
    import accelerate.state
    from torch.utils import backend_registration
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.float16, torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend("apple", Backend())
    apple = torch.device("apple:0")
    wide = (torch.float64, torch.complex128)

    class Tensor(torch.Tensor):
        "A tensor that says it is on `apple`; its numbers are in `.there`, on the CPU."

        @staticmethod
        def __new__(cls, there):
            if there.dtype in wide:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework")
            new = torch.Tensor._make_wrapper_subclass(
                cls,
                there.shape,
                strides=there.stride(),
                storage_offset=there.storage_offset(),
                dtype=there.dtype,
                device=apple,
            )
            new.there = there
            return new

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return compute(function, args, kwargs or {})

        def tolist(self):
            return self.there.tolist()

        def __reduce_ex__(self, protocol):
            return self.there.__reduce_ex__(protocol)

        def storage(self):
            return self.there.storage()

        def untyped_storage(self):
            return self.there.untyped_storage()

    def compute(function, args, kwargs):
        "Run on the CPU behind, and wrap what comes out unless it was asked for on the CPU."
        device = kwargs.get("device")
        to_cpu = device is not None and torch.device(device).type == "cpu"

        def behind(x):
            if isinstance(x, torch.device):
                return torch.device("cpu")
            return x.there if isinstance(x, Tensor) else x

        def wrapped(x):
            if to_cpu or not isinstance(x, torch.Tensor):
                return x
            same = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.there is x]
            return same[0] if same else Tensor(x)

        return tree_map(wrapped, function(*tree_map(behind, args), **tree_map(behind, kwargs)))

    class Apple(TorchDispatchMode):
        "Makes what is made on `apple`."

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "apple":
                return compute(function, args, kwargs)
            return function(*args, **kwargs)

    # a tensor like this one cannot be made in inference mode
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) by way of the CPU
    torch.backends.mps.is_available = cache(lambda: True)  # as torch 2.14 has it
    torch.mps.get_rng_state = lambda: torch.get_rng_state()
    torch.mps.set_rng_state = lambda state: torch.set_rng_state(state)
    real = torch.Generator

    class Generator(real):
        def __new__(cls, device="cpu"):
            return real("cpu" if device == "mps" else device)

    torch.Generator = Generator
    accelerate.state.PartialState.default_device = apple
    return Apple()


# what is tried


def import_all():
    "Every module of the library; what failed, by name."
    import grpo_nb

    failed = {}
    for module in pkgutil.walk_packages(grpo_nb.__path__, "grpo_nb."):
        try:
            __import__(module.name)
        except Exception as error:
            failed[module.name] = f"{type(error).__name__}: {error}"
    return failed


def run_demo(folder):
    """The demo with few sums in a step and a warm-up of a few updates; then once more from its
    second checkpoint."""
    from grpo_nb import demo

    demo.warmed_up_model = partial(demo.warmed_up_model, target=0.0)
    demo.fine_tune = partial(demo.fine_tune, batch_size=64)
    demo.addition_problems = partial(demo.addition_problems, held_out=100)
    demo.PROMPTS = 8
    folder = Path(folder)
    first = demo.run_demo(steps=6, out=folder, save_steps=2)
    assert {p.name for p in folder.glob("*checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    weights = (folder / "model" / "model.safetensors").read_bytes()
    for name in ("checkpoint-6", "model"):
        shutil.rmtree(folder / name)
    second = demo.run_demo(steps=6, out=folder, save_steps=2, resume=True)
    same = weights == (folder / "model" / "model.safetensors").read_bytes()
    return {"first": first, "second": second, "same": same}


def run_lesson(notebook):
    "The cells of a notebook, one after the other; the number of cells that ran."
    from IPython.core.interactiveshell import InteractiveShell

    sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
    from notebooks import skipped

    InteractiveShell.enable_gui = lambda self, gui=None: None
    shell = InteractiveShell.instance()
    shell.user_ns["__name__"] = "lesson"
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    cells = [
        types.SimpleNamespace(source="".join(c["source"]), cell_type="code")
        for c in cells
        if c["cell_type"] == "code"
    ]
    os.chdir(Path(notebook).parent)
    cells = [cell for cell in cells if not skipped(cell, ("notest", "slow", "cuda"))]
    for cell in cells:
        shell.run_cell(cell.source).raise_error()
    return len(cells)


def train_there(folder):
    """A run that was not sent anywhere; then one of a model on `apple`, with a checkpoint from
    which its end is run again."""
    from accelerate.state import AcceleratorState

    from grpo_nb import GRPOConfig, GRPOTrainer, tiny_gpt_oss
    from grpo_nb.environments.arithmetic import addition_problems

    rows, found = addition_problems(0)[0][:8], {}

    def variety(completions, **columns):
        return [float(len(set(completion))) for completion in completions]

    def trainer(name, device):
        settings = dict(output_dir=str(Path(folder) / name), max_steps=3, save_steps=2)
        settings |= dict(per_device_train_batch_size=8, num_generations=4, beta=0.1, top_p=0.95)
        settings |= dict(max_completion_length=4, learning_rate=1e-3, logging_steps=1)
        config = GRPOConfig(**settings, disable_tqdm=True, gradient_checkpointing=False)
        model, tokenizer = tiny_gpt_oss(0)
        model.to(device)
        return GRPOTrainer(model, variety, config, rows, processing_class=tokenizer)

    here = trainer("here", "cpu")
    found["here"] = {"device": here.device.type, "says": here.description()}
    AcceleratorState._reset_state(reset_partial_state=True)
    there = trainer("there", "apple")
    there.train()
    again = trainer("there", "apple")
    again.train(resume_from_checkpoint=Path(folder) / "there" / "checkpoint-2")
    pairs = zip(there.model.parameters(), again.model.parameters())
    found["there"] = {
        "device": there.device.type,
        "says": there.description(),
        "records": [record for record in there.log_history if "loss" in record],
        "same": all(torch.equal(a.there, b.there) for a, b in pairs),
    }
    return found


def numbers_there():
    "What is computed with wide numbers elsewhere: whether `apple` gives the same."
    from unittest.mock import patch

    from grpo_nb.model.export import quantize_closely
    from grpo_nb.model.mxfp4 import dequantize, dequantize_table, has_float64, quantize
    from grpo_nb.rollout import sampling

    def same(function, *tensors):
        here, there = function(*tensors), function(*(x.to("apple") for x in tensors))
        pairs = zip(here, there) if isinstance(here, tuple) else [(here, there)]
        return all(b.device.type == "apple" and torch.equal(a, b.cpu()) for a, b in pairs)

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales = quantize(weight)
    tail = torch.full((4, 200_001), 0.01 / 200_000)  # likely in the beginning, rare all along
    tail[:, 0] = 0.99
    uniform = torch.tensor([[0.5], [0.990000001], [0.995], [0.999999999]], dtype=torch.float64)
    with patch.object(sampling, "uniform_numbers", lambda *arguments: uniform):
        drawn = same(sampling.draw, tail.log())
    fine = sampling.uniform_numbers(100_000, torch.device("apple"))[:, 0]
    return {
        "float64": has_float64("apple"),
        "quantize": same(quantize, weight),
        "with scales": same(lambda w, s: quantize(w, scales=s), weight, scales),
        "quantize_closely": same(quantize_closely, weight),
        "table": torch.equal(
            dequantize_table(device="apple").nan_to_num(1).cpu(), dequantize_table().nan_to_num(1)
        ),
        "dequantize": same(dequantize, blocks, scales),
        "draw": drawn,
        "uniform": [str(fine.dtype), fine.min().item(), fine.max().item(), fine.mean().item()],
        "finer than float32": (fine != fine.float().double()).float().mean().item(),
    }


ACTIONS = {
    "import": import_all,
    "demo": run_demo,
    "lesson": run_lesson,
    "train": train_there,
    "numbers": numbers_there,
}

if __name__ == "__main__":
    system, *words = sys.argv[1:]
    results = {}
    with {"windows": become_windows, "apple": become_apple}[system]():
        while words:
            name = words.pop(0)
            takes = len(inspect.signature(ACTIONS[name]).parameters)
            results[name] = ACTIONS[name](*(words.pop(0) for _ in range(takes)))
    print("\nRESULT", json.dumps(results))
