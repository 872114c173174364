"""Tutorials from their first to their last cell with Colab's limits: `python tools/rehearse.py`
for the five that are meant for a T4, or with pages, `--lost` for a session that is lost half way,
`--models DIR` for real models of a folder, in float16 (`--card L4`: bfloat16), `--forced` for what
goes wrong, `--colab DIR` for Colab's versions, `--record FILE` to keep what is found.

Each page runs in a folder of its own, with an empty home, and cannot write elsewhere. The record
says what was enforced, what was imitated and what was neither: a rehearsal is no run on a T4.
"""

import argparse
import copy
import ctypes
import datetime
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nbformat
from forced import CARDS, FAULTS, LATER, SWITCH, WANTS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
NAMES = "01_first_run 02_gpt_oss_20b_t4 03_gsm8k 08_from_unsloth_qwen3 11_qlora"
PAGES = [ROOT / f"nbs/tutorials/{name}.ipynb" for name in NAMES.split()]
MEMORY, CORES, DISK = 12.7, 2, 1  # GiB, cores of a Colab with a T4; its disk is larger
VERSIONS = "the versions of Colab's packages (tests/colab.txt)"
LOST = "the session was lost"
NO_DISK = "a limit of the disk: this system lets nobody mount one"
NO_WALL = "writing outside the folder is not stopped: this kernel has no Landlock"
ENFORCED = [
    f"at most {MEMORY} GiB of data in a process (RLIMIT_DATA)",
    f"at most {CORES} cores (affinity)",
    "an empty home and empty caches of the Hub, Triton and torch",
    "the Hub offline",
    "a new folder as working folder",
]
MISSING = [
    "a T4, its driver and its kernels: cells marked cuda are skipped",
    "CUDA in float16, and its speed",
    "an installation by pip: the library is that of the clone",
]
DRIVE = """
import os
def mount(place):
    os.makedirs(place, exist_ok=True)
    if not os.path.lexists(f"{place}/MyDrive"):
        os.symlink(os.environ["REHEARSED_DRIVE"], f"{place}/MyDrive")
"""
KILLER = """
import os, signal, sys
def die(event, args, left=[2], end=lambda os=os, by=signal.SIGKILL: os.kill(os.getpid(), by)):
    if event == "open" and str(args[0]).endswith("manifest.json") and "w" in str(args[1]):
        left[0] -= 1
        if not left[0]:
            end()
sys.addaudithook(die)
"""  # the second checkpoint has its weights and not its list of files
CALLS = f"import sys; sys.path.append({str(ROOT / 'tools')!r}); import forced\n"
ON_DRIVE = [("DRIVE = False", "DRIVE = True")]
HARMONY = (  # that of the page 02, shortened, which a released model brings along
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% for m in messages "
    "%}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OFTEN = {  # page -> what makes the tiny run write checkpoints on its way
    "02_gpt_oss_20b_t4": [("max_steps=16,", "max_steps=16, save_steps=4,")],
    "08_from_unsloth_qwen3": [("save_steps=100 if TINY else 10", "save_steps=10")],
    "11_qlora": [('save_strategy="no"', "save_steps=10")],
}
SMALL = ("NEW, RANK = 4, 512, 1536, 32", "NEW, RANK = 4, 512, 24, 8")
REAL = {  # page -> what takes a real model of a folder, and makes the run short enough for a CPU
    "01_first_run": [
        ('MODEL = "tiny"', 'MODEL = "{model}"'),
        ("(1, 30), 100, 24", "(1, 30), 8, 16"),
        ("max_steps=12", "max_steps=2"),
        ("gradient_accumulation_steps=4,", "gradient_accumulation_steps=1,"),
    ],
    "03_gsm8k": [
        ('MODEL, OUT = HERE["model"], HERE["folder"]', 'MODEL, OUT = "{model}", HERE["folder"]'),
        ('DATA = "openai/gsm8k"', 'DATA = "{data}"'),
        ('.to("cuda" if GPU else "cpu")', ""),
        ("max_steps=300", "max_steps=2"),
        ("gradient_accumulation_steps=8", "gradient_accumulation_steps=2"),
        ("else 320", "else 24"),
        ("min(200,", "min(20,"),
    ],
    "08_from_unsloth_qwen3": [
        ('MODEL = "tiny"', 'MODEL = "{model}"'),
        ('gsm8k("train", system', 'gsm8k("train", "{data}", system'),
        (  # TRL trains in float16 on a card alone
            "fp16=torch.cuda.is_available() and not BF16,\n        dataloader_pin_memory="
            "torch.cuda.is_available(),",
            "use_cpu=True,",
        ),
        ("max_steps=30 if TINY else 128", "max_steps=2"),
        ("range(25)", "range(2)"),
        ("max_steps=40 if TINY else 100", "max_steps=2"),
        SMALL,
    ],
    "02_gpt_oss_20b_t4": [
        ('"openai/gpt-oss-20b"', '"{small}"'),
        ('gsm8k("test", ', 'gsm8k("test", "{data}", '),
        ('gsm8k("train", ', 'gsm8k("train", "{data}", '),
        ("range(100)", "range(8)"),
        ("problems[:100], problems[100:]", "problems[:8], problems[8:]"),
        ("else 512", "else 16"),
        ("max_steps=100", "max_steps=2"),
    ],
    "11_qlora": [
        ('MODEL = "tiny"', 'MODEL = "{model}"'),
        ('gsm8k("train", system', 'gsm8k("train", "{data}", system'),
        ("max_steps=250", "max_steps=2"),
        ('optim="adamw_8bit"', 'optim="adamw_torch"'),  # bitsandbytes needs a GPU
        ("range(25)", "range(4)"),
        SMALL,
    ],
}


def cannot_write_outside(*folders: Path) -> bool:
    "Landlock: this process and those that it starts write below these folders alone."
    libc, handled = ctypes.CDLL(None, use_errno=True), 0b111111111110010  # all that changes files
    rules = ctypes.c_uint64(handled)
    number = libc.syscall(444, ctypes.byref(rules), 8, 0)
    if number < 0 or libc.prctl(38, 1, 0, 0, 0):
        return False
    for folder in folders:
        place = os.open(folder, os.O_PATH)
        rule = handled.to_bytes(8, "little") + place.to_bytes(4, "little")
        if libc.syscall(445, number, 1, rule, 0):
            return False
    return not libc.syscall(446, number, 0)


def pins() -> list[str]:
    "Colab's versions, as pip takes them."
    return re.findall(r"(?m)^\w+==\S+", (ROOT / "tests/colab.txt").read_text())


def other_versions() -> bool:
    "Whether a package here has another version than Colab's."
    try:
        return any(version(name) != number for name, number in (pin.split("==") for pin in pins()))
    except PackageNotFoundError:
        return True


def with_colabs_versions(home: Path, words: list[str]) -> None:
    "Begin again in an environment with Colab's versions, which is made if it is not there."
    sys.path.insert(0, str(ROOT / "tests"))
    from venvs import layered

    if not (home / "ready").exists():
        if problem := layered(home, *pins()):
            sys.exit(problem)
        (home / "ready").touch()
    python = str(home.absolute() / "bin/python")
    os.execv(python, [python, __file__, *words])


def mounting() -> list[str]:
    "The command before a command that may mount, or nothing."
    for how in (["unshare", "-m"], ["unshare", "-Urm"]):
        mount = [*how, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        if shutil.which("unshare") and not subprocess.run(mount, capture_output=True).returncode:
            return how
    return []


def home_of(folder: Path) -> dict[str, str]:
    "The environment of a machine that is new, below a folder."
    names = "HF_HOME TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TMPDIR JUPYTER_RUNTIME_DIR IPYTHONDIR"
    caches = {name: str(folder / "machine/home" / name.lower()) for name in names.split()}
    kept = {n: os.environ[n] for n in ("PATH", "LANG", "OMP_NUM_THREADS") if n in os.environ}
    own = {
        "HOME": str(folder / "machine/home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    paths = os.pathsep.join([str(ROOT), str(folder / "imitated")])
    return kept | caches | own | {"PYTHONPATH": paths, "REHEARSED_DRIVE": str(folder / "drive")}


def changed(page: Path, changes: list) -> nbformat.NotebookNode:
    "A page whose sources have other words; each has to be there."
    from notebooks import skipped

    notebook = nbformat.read(page, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for old, new in changes:
        assert any(old in cell.source for cell in cells), f"{page.name} has no {old!r}"
        for cell in cells:
            cell.source = cell.source.replace(old, new)
    for cell in cells:
        if skipped(cell, ("notest", "slow", "cuda")) and cell.id not in (
            "colab-install",
            "trl-install",
        ):
            cell.metadata["tags"] = ["skip-execution"]
    return notebook


def stdout_of(cell: nbformat.NotebookNode) -> str:
    "What a cell has printed."
    return "".join(o.text for o in cell.get("outputs", []) if o.get("name") == "stdout")


def errors_of(cell: nbformat.NotebookNode) -> list[str]:
    "The errors that a cell ended in: one, or none."
    return [o.ename for o in cell.get("outputs", []) if o.output_type == "error"]


def session(asked: dict) -> dict:
    "In a process of its own: a page on a new machine, or on one that keeps its Drive."
    folder = Path(asked["folder"])
    missing = []
    if asked["mounts"]:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}g", "tmpfs", folder / "machine"]
        subprocess.run(command, check=True)
    else:
        missing.append(NO_DISK)
    env = home_of(folder)
    for name in (
        "HOME",
        "HF_HOME",
        "TRITON_CACHE_DIR",
        "TMPDIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
    ):
        Path(env[name]).mkdir(parents=True, exist_ok=True)
    (folder / "machine/content").mkdir()
    size = int(MEMORY * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (size, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    tempfile.tempdir = env["TMPDIR"]
    if not cannot_write_outside(folder, Path("/dev")):
        missing.append(NO_WALL)

    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = changed(Path(asked["page"]), asked["changes"])
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if asked["before"]:
        cells[0].source = f"{asked['before']}\n{cells[0].source}"
    place = next((i for i, cell in enumerate(cells) if "ready(" in cell.source), None)
    met = {}  # a fault -> the switch, run once more
    if asked["faults"]:
        notebook.cells = cells[: place + 1]  # later cells are as without a fault
        for name, (calls, *_) in asked["faults"].items():
            met[name] = copy.deepcopy(cells[place])
            around = [nbformat.v4.new_code_cell(x) for x in (CALLS + calls, "forced.undo()")]
            notebook.cells += [around[0], met[name], around[1]]
    if asked["twice"]:
        notebook.cells = [c for one in notebook.cells for c in (one, copy.deepcopy(one))]
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    start, error = time.perf_counter(), None
    where = {"metadata": {"path": folder / "machine/content"}}
    try:
        NotebookClient(notebook, timeout=1200, resources=where).execute(env=env)
    except CellExecutionError as problem:
        error = f"{problem.ename}: {problem.evalue}"
    except DeadKernelError:
        error = LOST
    spoken = [stdout_of(cell) for cell in cells]
    said = "\n".join(spoken)
    told = {name: (place + 1, stdout_of(cell)) for name, cell in met.items()}
    stopped = next((i for i, cell in enumerate(cells) if errors_of(cell)), None)
    return {
        "page": Path(asked["page"]).name,
        "error": error,
        "cells": len(cells),
        "ran": sum(cell.execution_count is not None for cell in cells),
        "seconds": round(time.perf_counter() - start, 1),
        "peak GiB": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "next": [line for line in said.splitlines() if line.startswith("Next: ")],
        "went on": re.findall(r"going on from \S*?(checkpoint-\d+)", said),
        "missing": missing,
        "met": told,
        "stopped": stopped and stopped + 1,
    }


def started(page: Path, folder: Path, changes=(), before="", faults=None, twice=False) -> dict:
    """A session on a new machine; the folder's Drive stays from one to the next. `before`: source
    before the first cell; `faults`: what the page's switch meets, one by one, and then the page
    ends; `twice`: each cell is run again before the next one."""
    shutil.rmtree(folder / "machine", ignore_errors=True)
    for name in ("machine", "drive", "imitated/google/colab"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "imitated/google/colab/drive.py").write_text(DRIVE)
    how = mounting()
    asked = dict(page=str(page), folder=str(folder), changes=list(changes), mounts=bool(how))
    words = json.dumps(asked | dict(before=before, faults=faults, twice=twice))
    done = subprocess.run(
        [*how, sys.executable, __file__, "--session", words],
        capture_output=True,
        text=True,
        env={**os.environ, **home_of(folder)},
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def small_data(folder: Path) -> Path:
    "Rows in the form of GSM8K, for pages with a real model."
    from grpo_nb.environments.gsm8k import word_problems

    rows = [
        (row["prompt"][0]["content"], row["solution"])
        for row in word_problems(0, 56, system_prompt=None)
    ]
    (folder / "data").mkdir()
    for split, part in (("train", rows[:32]), ("test", rows[32:])):
        lines = [json.dumps({"question": one, "answer": two}) for one, two in part]
        (folder / f"data/{split}.jsonl").write_text("\n".join(lines))
    return folder / "data"


def ended(says: str, cell: int | None, said: str, told: dict, error: str | None) -> dict:
    "A row of the record: where a page said the sentence, and whether it ended in it."
    lines = [line for line in said.splitlines() if re.search(says, line)]
    row = {"cell": cell, "said": lines[0] if lines else None, "error": error}
    return row | {"seconds": told["seconds"], "ended well": bool(lines)}


def at_the_switch(page: Path, folder: Path, faults: list[str]) -> dict[str, dict]:
    "What a page's switch says to each of these, in one kernel."
    asked = {fault: SWITCH[fault] for fault in faults}
    told = started(page, folder, WANTS.get(page.stem, []), faults=asked)
    rows = {}
    for fault, (cell, said) in told["met"].items():
        rows[fault] = ended(asked[fault][-1], cell, said, told, told["error"])
    return rows


def later(page: Path, folder: Path, fault: str) -> dict[str, dict]:
    "What a page says when something goes wrong after its switch: it has to stop there."
    calls, wants, says = LATER[fault]
    changes = WANTS.get(page.stem, []) if wants else OFTEN.get(page.stem, [])
    told = started(page, folder, changes, CALLS + calls.format(page=page.stem))
    return {fault: ended(says, told["stopped"], "\n".join(told["next"]), told, told["error"])}


def small_gpt_oss(words: Path, folder: Path) -> Path:
    "A gpt-oss of random weights with the real tokenizer, as a folder like the released one."
    from transformers import AutoTokenizer

    from grpo_nb.model.export import save_mxfp4
    from grpo_nb.model.tiny import tiny_gpt_oss

    tokenizer = AutoTokenizer.from_pretrained(words)
    tokenizer.chat_template = HARMONY
    model, _ = tiny_gpt_oss(0, hidden_size=64)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_mxfp4(model, folder, tokenizer=tokenizer, quiet=True)
    return folder


def with_a_model(page: Path, folder: Path, models: Path) -> list:
    "What is changed in a page for a model of a folder."
    names = {"{model}": models.resolve() / "smollm", "{data}": small_data(folder)}
    if page.stem == "02_gpt_oss_20b_t4":
        words = models.resolve() / "gptoss-tokenizer"
        names["{small}"] = small_gpt_oss(words, folder / "gpt-oss")
    changes = []
    for old, new in REAL[page.stem]:
        for name, value in names.items():
            new = new.replace(name, str(value))
        changes.append((old, new))
    return changes


def rehearse(page: Path, folder: Path, lost=False, models=None, seen="T4", twice=False) -> dict:
    "Run a page, and tell how far it came, under what."
    enforced, imitated, changes, source = [*ENFORCED], [], [], ""
    if models and page.stem in REAL:
        changes = with_a_model(page, folder, models)
        source = f"{CALLS}forced.card({seen!r}); forced.disk(); forced.as_a_card()"
        imitated += [
            "the model: SmolLM2-135M-Instruct (from a 4-bit GGUF), and for the page on gpt-oss one "
            "of random weights in MXFP4 with gpt-oss' own tokenizer; two updates, a few short "
            "completions, problems in the form of GSM8K",
            f"the card: the page and `ready` are told of the {seen} and choose for it; the library "
            "computes on the CPU",
            "products in float16: summed in float32 and rounded once, as a card's are",
        ]
    else:
        imitated.append("the model: the page's tiny one, in float32")
    before = None
    if lost:
        changes = [*changes, *ON_DRIVE, *OFTEN.get(page.stem, [])]
        before = started(page, folder, changes, before=KILLER)
        imitated.append("Google Drive: a folder that outlives the machine")
        enforced.append("SIGKILL as the second checkpoint is written, then a new machine")
    if twice:
        enforced.append("each cell is run a second time before the next one")
    told = started(page, folder, changes, source, twice=twice)
    missing, *_ = (told.pop(name) for name in ("missing", "met", "stopped"))
    if NO_DISK not in missing:
        enforced.append(f"a disk of {DISK} GiB (tmpfs), less than Colab's")
    if NO_WALL not in missing:
        enforced.append(
            "no file is written outside of the page's folder, home and Drive (Landlock)"
        )
    if lost:
        if before["error"] != LOST:
            told["error"] = f"it was not lost: {before['error']}; then {told['error']}"
        told["lost after"] = before["ran"]
    (enforced if not other_versions() else missing).append(VERSIONS)
    number = re.search(r"Python (\d+\.\d+)", (ROOT / "tests/colab.txt").read_text())[1]
    same = platform.python_version().startswith(f"{number}.")
    (enforced if same else missing).append(f"Colab's Python, {number}")
    kinds = {
        "enforced": enforced,
        "imitated": imitated,
        "neither real nor imitated": MISSING + missing,
    }
    return told | kinds


def forced(asked: argparse.Namespace) -> None:
    "Each failure on each page; ends with 1 if one does not end in its sentence."
    words, well, file = asked.forced, [], asked.record
    wanted = [fault for fault in FAULTS if not words or any(word in fault for word in words)]
    first = [fault for fault in wanted if fault in SWITCH]
    for page in asked.pages:
        for fault in [None] * bool(first) + [fault for fault in wanted if fault in LATER]:
            with tempfile.TemporaryDirectory() as folder:
                place = page.resolve(), Path(folder)
                rows = later(*place, fault) if fault else at_the_switch(*place, first)
            well += [row["ended well"] for row in rows.values()]
            print(*(f"{page.stem}: {name}: {row}" for name, row in rows.items()), sep="\n")
            if file:  # minutes of rows are kept one by one
                kept = json.loads(file.read_text()) if file.exists() else {}
                here = kept.setdefault("forced", {"pages": {}})
                here |= {"on": f"{datetime.date.today()}", "with": packages()}
                here["pages"] |= {f"{page.stem}: {name}": row for name, row in rows.items()}
                file.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(not all(well))


def packages() -> str:
    "What the pages ran with."
    found = (f"{name} {version(name)}" for name in ("torch", "transformers", "ipywidgets"))
    return f"Python {platform.python_version()}, {', '.join(found)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    parser.add_argument("--lost", action="store_true", help="SIGKILL half way, then a new session")
    parser.add_argument(
        "--models", type=Path, help="a folder with the folders smollm and gptoss-tokenizer"
    )
    parser.add_argument("--twice", action="store_true", help="each cell two times")
    parser.add_argument("--card", choices=CARDS, default="T4", help="that --models is told of")
    parser.add_argument(
        "--record", type=Path, help="keep the record there, beside those of other ways"
    )
    parser.add_argument(
        "--forced", nargs="*", metavar="WORD", help="what goes wrong, one by one; of these words"
    )
    parser.add_argument("--session", help=argparse.SUPPRESS)
    parser.add_argument("--colab", type=Path, help="an environment with its versions; made there")
    asked = parser.parse_args()
    if asked.colab:
        words = [w for w in sys.argv[1:] if w not in ("--colab", str(asked.colab))]
        with_colabs_versions(asked.colab, words)
    if asked.session:
        return print(json.dumps(session(json.loads(asked.session))))
    if asked.forced is not None:
        return forced(asked)
    way = "models" if asked.card == "T4" else f"models, {asked.card}"
    way = way if asked.models else "twice" if asked.twice else "whole"
    way = "lost" if asked.lost else way
    names = ("enforced", "imitated", "neither real nor imitated")
    file, wrong = asked.record, []
    for page in asked.pages:
        with tempfile.TemporaryDirectory() as folder:
            how = asked.lost, asked.models, asked.card, asked.twice
            row = rehearse(page.resolve(), Path(folder), *how)
        print(
            row["page"],
            f"{row['ran']} of {row['cells']} cells, {row['seconds']} s",
            row["error"] or "",
            *row["next"],
            flush=True,
        )
        wrong += [row["page"]] * bool(row["error"])
        shared = {name: row.pop(name) for name in names}
        if file:
            kept = json.loads(file.read_text()) if file.exists() else {}
            before = kept.get(way, {}).get("pages", [])
            rows = {one["page"]: one for one in [*before, row]}
            told = {"on": f"{datetime.date.today()}", "with": packages(), **shared}
            kept[way] = told | {"pages": [rows[name] for name in sorted(rows)]}
            file.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(shared, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
