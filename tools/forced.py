"""What goes wrong on a free T4, and how `python tools/rehearse.py --forced` makes it happen: a cell
before a page's first one calls functions of this file, and the page has to end in a sentence.

While a model is loaded nothing more is given by the system; in drawing and training one allocation
is too large for it; a file fills the disk. Cards, packages' versions and the Hub are pretended.
"""

import ctypes
import importlib
import os
import resource
import shutil
import socket
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

WANTS = {  # page -> what makes it ask for a model of the Hub
    "01_first_run": [('MODEL = "tiny"', 'MODEL = "Qwen/Qwen2.5-0.5B-Instruct"')],
    "08_from_unsloth_qwen3": [('MODEL = "tiny"', 'MODEL = "Qwen/Qwen3-4B-Base"')],
    "11_qlora": [
        ('MODEL = "tiny"', 'MODEL = "Qwen/Qwen2.5-3B-Instruct"'),
        ('packages="bitsandbytes"', 'packages=""'),
    ],
}
CARDS = {  # name, capability, free and whole memory in GiB: as CUDA reports them
    "P100": ("Tesla P100-PCIE-16GB", (6, 0), 15.6, 15.89),
    "T4": ("Tesla T4", (7, 5), 14.5, 14.74),
    "L4": ("NVIDIA L4", (8, 9), 21.9, 22.16),
}


def card(name: str, everybody: bool = False) -> None:
    """The page and `ready` are told of a card, and the library stays on the CPU; or everybody is,
    and the first use of the card fails as that of one for which PyTorch was not built."""
    import torch

    full, able, free, whole = CARDS[name]
    told = dict(is_available=True, get_device_name=full, get_device_capability=able)
    told |= dict(mem_get_info=(int(free * 2**30), int(whole * 2**30)))
    told |= dict(is_bf16_supported=able >= (8, 0))

    def instead(real, answer):
        def ask(*args, **more):
            who = sys._getframe(1).f_globals.get("__name__")
            seen = everybody or who in ("__main__", "grpo_nb.script")
            return answer if seen else real(*args, **more)

        return ask

    for what, answer in told.items():
        patch.object(torch.cuda, what, instead(getattr(torch.cuda, what), answer)).start()
    if everybody:
        words = "CUDA error: no kernel image is available for execution on the device"
        patch.object(torch.cuda, "_lazy_init", side_effect=torch.AcceleratorError(words)).start()


def little_memory() -> None:
    "1 GiB of memory is free beside the card."
    import psutil

    whole = psutil.virtual_memory
    patch.object(psutil, "virtual_memory", lambda: whole()._replace(available=2**30)).start()


def disk(free: float = 7e10) -> None:
    "So many bytes are free; on Colab 70 GB."
    room = shutil.disk_usage
    patch.object(shutil, "disk_usage", lambda place: room(place)._replace(free=free)).start()


def hub(listens: bool) -> None:
    "The Hub's address is one of this machine, which refuses, or accepts and never answers."
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    if listens:
        place.listen(64)
    where = f"http://127.0.0.1:{place.getsockname()[1]}"
    os.environ.update(HF_ENDPOINT=where, HF_HUB_OFFLINE="0")  # for what is imported later
    from huggingface_hub import constants

    for name, value in dict(ENDPOINT=where, HF_HUB_OFFLINE=False, place=place).items():
        patch.object(constants, name, value, create=name == "place").start()


def gone() -> None:
    "It answered when `ready` asked."
    from grpo_nb import script

    patch.object(script, "unreachable", lambda name: "").start()


def versions(**numbers: str) -> None:
    "Packages say that they have other versions."
    place = Path.home() / "packages"
    for name, number in numbers.items():
        folder = place / f"{name}-{number}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (folder / "METADATA").write_text(told)
    patch.object(sys, "path", [str(place), *sys.path]).start()


def begins(room: str, path: str, how) -> None:
    "A function of a room of the library begins with something else."
    *owners, name = path.split(".")
    owner = importlib.import_module(room)
    for one in owners:
        owner = getattr(owner, one)
    real = getattr(owner, name)

    def changed(*args, **more):
        with how():
            return real(*args, **more)

    setattr(owner, name, staticmethod(changed) if name == "from_pretrained" else changed)


class Starved:
    "While it is entered the system gives this process no more memory."

    def __enter__(self):
        self.limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (1, self.limit[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_DATA, self.limit)


def too_large():
    "While it is entered, the next operation of torch asks for 16 TiB."
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return torch.empty(2**44, dtype=torch.uint8)

    return Large()


def no_memory_to_load(page: str) -> None:
    "Of the page's model."
    ctypes.CDLL(None).mallopt(-3, 16384)  # what is larger is asked of the system, and given back
    unsloth = "grpo_nb.compat.fast", "FastLanguageModel.from_pretrained"
    rooms = {
        "01_first_run": ("grpo_nb.model.tiny", "tiny_gpt_oss"),
        "02_gpt_oss_20b_t4": ("grpo_nb.model.loading", "load_model"),
        "03_gsm8k": ("grpo_nb.model.tiny", "tiny_gpt_oss"),
    }
    begins(*rooms.get(page, unsloth), Starved)


def no_memory_to_draw() -> None:
    begins("grpo_nb.rollout.engine", "RolloutEngine.generate", too_large)


def no_memory_to_train() -> None:
    begins("grpo_nb.training.policy_update", "PolicyUpdate.accumulate", too_large)


def full_disk() -> None:
    "A file takes all that is left as the second checkpoint is written."
    left = [2]

    def fill(event, args):
        if event == "open" and str(args[0]).endswith("manifest.json") and "w" in str(args[1]):
            left[0] -= 1
            if not left[0]:
                place = os.path.dirname(args[0])
                with open(Path.home() / "large", "wb") as file:
                    while room := shutil.disk_usage(place).free:
                        size = os.fstat(file.fileno()).st_size
                        os.posix_fallocate(file.fileno(), size, room)

    sys.addaudithook(fill)


def as_a_card() -> None:
    """Products in float16 are summed in float32 and rounded once, as a card's. Few CPUs multiply
    float16: their own way does the same, up to two hundred times slower."""
    import torch

    def product(name):
        def run(*given, **more):
            half = given[0].dtype == torch.float16
            wide = [x.float() if half and isinstance(x, torch.Tensor) else x for x in given]
            a, b = wide[-2:]
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
            getattr(torch.ops.aten, name).out(*wide, **more, out=out)
            return out.half() if half else out

        return run

    as_a_card.kept = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("mm", "bmm", "addmm"):
            as_a_card.kept.impl(name, product(name), "CPU")


def undo() -> None:
    "What is pretended ends."
    patch.stopall()


NEAR = "forced.card('T4'); forced.disk(); "
FIRST = "run the page from its first cell"
HUB_AWAY = r"the Hub did not answer .*run this cell again"
# what a page's switch meets: (what is called, whether the page asks for a model of the Hub, the
# line that it has to print). One kernel a page runs the switch once more for each
SWITCH = {
    "no GPU was chosen": ("", True, rf"no GPU: .*{FIRST}"),
    "an L4": ("forced.card('L4')", True, r"here: NVIDIA L4 \(8\.9\)"),
    "little memory beside the card": (
        NEAR + "forced.little_memory()", True,
        r"there are 1\.0, GiB of memory: .*begin at the first cell",
    ),
    "a small disk": (
        "forced.card('T4'); forced.disk(5e8)", True,
        r"GB of disk: delete .*run this cell again",
    ),
    "the Hub refuses": (NEAR + "forced.hub(listens=False)", True, HUB_AWAY),
    "the Hub is silent": (NEAR + "forced.hub(listens=True)", True, HUB_AWAY),
    "newer packages": (
        "forced.versions(transformers='9.0.0', torch='3.1.0')", True,
        r"torch 3\.1\.0 is newer than .*begin at the first cell",
    ),
    "an old ipywidgets": (
        "forced.versions(ipywidgets='7.6.5')", True,
        r"ipywidgets 7\.6\.5 is older than .*begin at the first cell",
    ),
}  # fmt: skip
# what happens later, in a kernel of its own. `{page}` is the page's name
LATER = {
    "a P100": ("forced.card('P100', everybody=True)", True, rf"Next: .*{FIRST}"),
    "the Hub goes away after the look": (
        NEAR + "forced.hub(listens=False); forced.gone()", True,
        r"Next: .*run this cell again",
    ),
    "no memory: loading": (
        "forced.no_memory_to_load('{page}')", False, rf"Next: load a smaller model.*{FIRST}"
    ),
    "no memory: drawing": (
        "forced.no_memory_to_draw()", False, rf"Next: draw shorter completions.*{FIRST}"
    ),
    "no memory: training": (
        "forced.no_memory_to_train()", False, rf"Next: train in smaller pieces.*{FIRST}"
    ),
    "the disk fills in a checkpoint": (
        "forced.full_disk()", False, r"Next: delete what is not needed, then run this cell again"
    ),
}  # fmt: skip
FAULTS = SWITCH | LATER
