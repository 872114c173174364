"""What goes wrong on a free T4, and how `python tools/rehearse.py --forced` makes it happen:
sources that are put before a page's first cell, and the sentence in which the page has to end.

Memory that is short is short: the kernel's limit is lowered as a part of the page begins, and the
allocation is refused by the system. So is the disk: a file fills it. Cards, packages' versions and
the Hub's answers are pretended.
"""

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
WANTS = {  # page -> what makes it ask for a model of the Hub
    "01_first_run": [('MODEL = "tiny"', f'MODEL = "{QWEN}"')],
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
CARD = """
def _pretend_card(name, able, free, whole, everybody):
    import sys
    import torch
    told = dict(is_available=True, get_device_name=name, get_device_capability=able)
    told |= dict(mem_get_info=(int(free * 2**30), int(whole * 2**30)))
    told |= dict(is_bf16_supported=able >= (8, 0))
    for what, answer in told.items():
        def ask(*args, real=getattr(torch.cuda, what), answer=answer, **more):
            who = sys._getframe(1).f_globals.get("__name__")
            seen = everybody or who in ("__main__", "grpo_nb.script")
            return answer if seen else real(*args, **more)
        setattr(torch.cuda, what, ask)
    if everybody:
        def start():
            raise torch.AcceleratorError(
                "CUDA error: no kernel image is available for execution on the device"
            )
        torch.cuda._lazy_init = start
_pretend_card(*{card!r}, everybody={everybody})
"""
LITTLE_MEMORY = """
import psutil as _psutil
_whole = _psutil.virtual_memory
_psutil.virtual_memory = lambda: _whole()._replace(available=2**30)
"""
SHORT = """
def _short(room, *path):
    import importlib, resource, sys
    module = importlib.import_module(room)
    owner = module
    for name in path[:-1]:
        owner = getattr(owner, name)
    real = getattr(owner, path[-1])
    def begins(*args, **more):
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (1, limit[1]))
        try:
            return real(*args, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limit)
    setattr(owner, path[-1], staticmethod(begins) if path[-1] == "from_pretrained" else begins)
_short({where})
"""
LOADING = {
    "01_first_run": '"grpo_nb.model.tiny", "tiny_gpt_oss"',
    "02_gpt_oss_20b_t4": '"grpo_nb.model.loading", "load_model"',
    "03_gsm8k": '"grpo_nb.model.tiny", "tiny_gpt_oss"',
}
UNSLOTH = '"grpo_nb.compat.fast", "FastLanguageModel", "from_pretrained"'
DRAWING = '"grpo_nb.rollout.engine", "RolloutEngine", "generate"'
TRAINING = '"grpo_nb.training.policy_update", "PolicyUpdate", "accumulate"'
FILLED = """
import os, shutil, sys
def _fill(event, args, left=[2], os=os, shutil=shutil, exit=None):
    if event == "open" and str(args[0]).endswith("manifest.json") and "w" in str(args[1]):
        left[0] -= 1
        if not left[0]:
            place = os.path.dirname(args[0])
            with open(os.path.expanduser("~/large"), "wb") as file:
                while room := shutil.disk_usage(place).free:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)
sys.addaudithook(_fill)
"""
HUB = """
import os, socket
_place = socket.socket()
_place.bind(("127.0.0.1", 0))
if {listens}:
    _place.listen(64)
os.environ.update(
    HF_ENDPOINT=f"http://127.0.0.1:{{_place.getsockname()[1]}}", HF_HUB_OFFLINE="0"
)
"""
LARGE_DISK = """
import shutil as _shutil
_disk = _shutil.disk_usage
_shutil.disk_usage = lambda place: _disk(place)._replace(free=70 * 10**9)
"""
AS_A_CARD = """
def _as_a_card(kept=[]):
    import torch, warnings
    def product(name):
        def run(*given, **more):
            half = given[0].dtype == torch.float16
            wide = [x.float() if half and isinstance(x, torch.Tensor) else x for x in given]
            a, b = wide[-2:]
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
            getattr(torch.ops.aten, name).out(*wide, **more, out=out)
            return out.half() if half else out
        return run
    kept.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("mm", "bmm", "addmm"):
            kept[0].impl(name, product(name), "CPU")
_as_a_card()
"""  # few CPUs multiply float16: their own way is up to two hundred times slower
GONE = """
from grpo_nb import script as _script
_script.unreachable = lambda name: ""
"""
VERSIONS = """
import sys, os
for _name, _number in {numbers!r}.items():
    _place = os.path.join(os.environ["HOME"], "packages")
    os.makedirs(f"{{_place}}/{{_name}}-{{_number}}.dist-info", exist_ok=True)
    with open(f"{{_place}}/{{_name}}-{{_number}}.dist-info/METADATA", "w") as _file:
        _file.write(f"Metadata-Version: 2.1\\nName: {{_name}}\\nVersion: {{_number}}\\n")
sys.path.insert(0, _place)
"""
FIRST = r"run the page from its first cell"
SWITCH = "ready("  # the cell that looks


def card(name, everybody=False):
    return CARD.format(card=CARDS[name], everybody=everybody)


# what happens -> (what is put before the page, whether it asks for a model of the Hub, the last
# cell that has to be run (None: all), what the page has to say)
FAULTS = {
    "no GPU was chosen": ("", True, SWITCH, rf"no GPU: .*{FIRST}"),
    "a P100": (card("P100", True), True, None, rf"P100.* too old for the kernels: .*{FIRST}"),
    "an L4": (card("L4"), True, SWITCH, r"here: NVIDIA L4 \(8\.9\)"),
    "little memory beside the card": (
        card("T4") + LITTLE_MEMORY, True, SWITCH,
        r"there are 1\.0, GiB of memory: .*begin at the first cell",
    ),
    "a small disk": (card("T4"), True, SWITCH, r"GB of disk: delete .*run this cell again"),
    "the Hub refuses": (
        card("T4") + LARGE_DISK + HUB.format(listens=False), True, SWITCH,
        r"the Hub did not answer .*run this cell again",
    ),
    "the Hub is silent": (
        card("T4") + LARGE_DISK + HUB.format(listens=True), True, SWITCH,
        r"the Hub did not answer .*run this cell again",
    ),
    "the Hub goes away after the look": (
        card("T4") + LARGE_DISK + HUB.format(listens=False) + GONE, True, None,
        r"Next: .*run this cell again",
    ),
    "newer packages": (
        VERSIONS.format(numbers={"transformers": "9.0.0", "torch": "3.1.0"}), False, SWITCH,
        r"torch 3\.1\.0 is newer than .*begin at the first cell",
    ),
    "an old ipywidgets": (
        VERSIONS.format(numbers={"ipywidgets": "7.6.5"}), False, SWITCH,
        r"ipywidgets 7\.6\.5 is older than .*begin at the first cell",
    ),
    "no memory: loading": (SHORT, False, None, rf"Next: load a smaller model.*{FIRST}"),
    "no memory: drawing": (
        SHORT.format(where=DRAWING), False, None, rf"Next: draw shorter completions.*{FIRST}"
    ),
    "no memory: training": (
        SHORT.format(where=TRAINING), False, None, rf"Next: train in smaller pieces.*{FIRST}"
    ),
    "the disk fills in a checkpoint": (
        FILLED, False, None, r"Next: delete what is not needed, then run this cell again"
    ),
}  # fmt: skip
