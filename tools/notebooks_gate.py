"""Run the code of published notebooks with this library, and record how far each one comes.

    python tools/notebooks_gate.py FOLDER [-k WORD] [--record docs/notebooks_gate.json]

FOLDER holds notebooks that somebody has fetched: those of Unsloth are in nb/ of
github.com/unslothai/notebooks. They are not kept here, and neither is a line of them. What is
replaced stands in RULES: import lines, installing, the model (a tiny random one of the same
family), the data (a few rows with the columns of the real ones; a game with the calls of
OpenEnv's client), the card, the tracker, sizes, and a keyword of TRL's SFTTrainer. Every other
change is an EDIT, which a reader of from_trl.md would make, too; a notebook counts as passing with
at most one. All code cells run in their order in one process, on a CPU; the first error ends it.

Five minutes on two cores for 31 notebooks. Packages that they install themselves have to be here:
pip install langid uvicorn; those on pictures install torchvision, too. The record has counts,
outcomes and errors; docs/from_trl.md has a section made of it (tools/from_trl.py).
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = {  # name -> [(pattern, replacement)] of every cell
    "import": [
        (r"from unsloth import", "from grpo_nb import"),
        (r"from vllm import SamplingParams", "from grpo_nb import SamplingParams"),
        (r"from trl import (GRPO\w+(?:, GRPO\w+)*)", r"from grpo_nb import \1"),
    ],
    "install": [
        (r"(?m)^(\s*)[!%](?:.*\\\n)*.*", r"\1pass"),
    ],
    "model": [
        (
            r"((?:model_name|MODEL_NAME)\s*=\s*|from_pretrained\(\s*)"
            r"""["']((?:unsloth|meta-llama)/[^"']+)["']""",
            r'\1__import__("stand_ins").model("\2")',
        ),
    ],
    "data": [
        (
            r"from datasets import (Dataset, )?load_dataset(, Dataset)?",
            "from stand_ins import load_dataset; from datasets import Dataset",
        ),
        (r"from unsloth_zoo.utils import Version", "from stand_ins import Version"),
    ],
    "card": [
        (r"(?s)\A(?!.*gpt-oss)(.*?)load_in_4bit\s*=\s*True", r"\1load_in_4bit = False"),
        (r'"cuda"', '"cpu"'),
        (r'"(?:paged_)?adamw_8bit"', '"adamw_torch"'),
        (r"SFTConfig\(\n", "SFTConfig(\n    use_cpu = True, bf16 = False,\n"),
        (r"torch\.cuda\.(device_count|max_memory_reserved)\(\)", "1"),
        (
            r"torch\.cuda\.get_device_properties\(\w\)",
            '__import__("types").SimpleNamespace(total_memory=2**34, name="T4")',
        ),
    ],
    "tracker": [(r'report_to = "trackio"', 'report_to = "none"')],
    "versions": [  # SFTTrainer is TRL's own, which no longer takes tokenizer=; Python 3.12's quotes
        (r"""(?m)(^.*f"[^"\n]*\{[^"\n]*)\["(\w+)"\]""", r"\1['\2']"),
        (r"(SFTTrainer\([^()]*?)tokenizer(\s*=\s*tokenizer)", r"\1processing_class\2"),
    ],
    "sizes": [
        (r"(?m)^(\s+)(?:max_steps|num_train_epochs)\s*=\s*[\d.]+", r"\1max_steps = 2"),
        (r"(max_new_tokens|max_tokens)\s*=\s*\w+", r"\1 = 8"),
        (r"(?m)^(\s+max_completion_length)\s*=\s*[^,\n]+,", r"\1 = 24,"),
        (r"np\.zeros\(2 \* 1024 \* 1024 \* 1024", "np.zeros(2**20"),
    ],
}
EDITS = {  # name -> (pattern, replacement, why)
    "return_dict=False": (
        r"(?s)(apply_chat_template\([^()]*?tokenize\s*=\s*True)",
        r"\1, return_dict = False",
        "transformers 5 returns a dict where tokenize=True",
    ),
    "use_vllm=False": (
        r"use_vllm\s*=\s*True",
        "use_vllm = False",
        "no vLLM is installed here, and FastLanguageModel draws on the trained tensors",
    ),
    "apply_chat_template": (
        r"""(prompt = )(train_dataset\[\d+\]\["prompt"\])(\n\ninputs = tokenizer)""",
        r"\1tokenizer.apply_chat_template(\2, tokenize = False)\3",
        "transformers' processors read texts, and the rows have conversations",
    ),
}
PICTURES = ("Vision", "_VL_")  # notebooks that train on pictures
LIMIT = 400  # seconds for one notebook
VOCABULARY = 2_000


def code_cells(path):
    "The code cells of a notebook, as text."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def changed(cells):
    "The cells with every rule and edit applied, and the names of those that changed something."
    rules, edits, new = set(), set(), []
    for cell in cells:
        for name, pairs in RULES.items():
            for pattern, by in pairs:
                cell, count = re.subn(pattern, by, cell)
                rules |= {name} if count else set()
        for name, (pattern, by, _) in EDITS.items():
            cell, count = re.subn(pattern, by, cell)
            edits |= {name} if count else set()
        new.append(cell)
    return new, sorted(rules), sorted(edits)


def family_of(name, seeing=False):
    "The tiny family that stands in for a released model."
    for word, family in (SEEING if seeing else FAMILY).items():
        if word in name.lower():
            return family
    return "llama"


SEEING = {  # the same of tests/seeing_models.py
    "qwen3.5": "qwen3_5",
    "qwen3": "qwen3_vl",
    "qwen2": "qwen2_5_vl",
    "gemma-3": "gemma3",
}
FAMILY = {  # a word of a model's name -> of tools/tiny_families.py
    "gpt-oss": "gpt_oss",
    "qwen3.5": "qwen3_5_text",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
    "gemma-3": "gemma3_text",
    "gemma-4": "gemma4_text",
    "lfm2": "lfm2",
    "ministral-3": "ministral3",
    "mistral": "mistral",
    "phi": "phi3",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = {  # the last part of a data set's name -> a row with the columns of the real ones
    "gsm8k": {"question": "How much is {a} and {b}?", "answer": "{a}+{b}\n#### {c}"},
    "OpenMathReasoning-mini": {
        "expected_answer": "{c}",
        "problem": "How much is {a} and {b}?",
        "generated_solution": "<think>{a}+{b} is {c}</think>It is {c}.",
    },
    "DAPO-Math-17k-Processed": {"prompt": "How much is {a} and {b}?", "solution": "{c}"},
    "DeepScaleR-Preview-Dataset": {"problem": "How much is {a} and {b}?", "answer": "{c}"},
    "MathVista": {"question": "How many dots are in {a} rows of {b}?", "answer": "{c}"},
}
STAND_INS = """
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import datasets
from packaging import version as versions
from PIL import Image

HERE = Path(__file__).parent
FOLDERS, ROWS, PINS = json.loads((HERE / "stand_ins.json").read_text())


def model(name):
    return FOLDERS[name]


def Version(name):
    try:
        return versions.Version(PINS.get(name) or version(name))
    except PackageNotFoundError:
        return versions.Version(name)


def load_dataset(name, *args, split=None, **others):
    row, sees = ROWS[name.rpartition("/")[2]], name.endswith("MathVista")
    pairs = [(a, b) for a in range(1, 8) for b in range(1, 8)] * (4 if sees else 1)
    made = [{k: v.format(a=a, b=b, c=a + b) for k, v in row.items()} for a, b in pairs]
    if sees:
        for (a, b), one in zip(pairs, made):
            picture = Image.new("RGB", (8 * a, 8 * b), (30 * a, 30 * b, 90))
            one |= dict(image=f"images/{a}.jpg", decoded_image=picture)
    rows = datasets.Dataset.from_list(made)
    return rows if split else datasets.DatasetDict(train=rows, test=rows)
"""
RUN = """
import json
import sys
import traceback
from pathlib import Path

cells, names = json.loads(Path("cells.json").read_text()), {"__name__": "__main__"}
at = 0
try:
    for at, cell in enumerate(cells):
        exec(compile(cell, f"cell {at}", "exec"), names)
    told = None
except BaseException as error:
    traceback.print_exc()
    told = f"{type(error).__name__}: {error}"
Path("told.json").write_text(json.dumps({"at": at, "error": told}))
"""


def tokenizer_of(texts):
    "A byte-level tokenizer with a vocabulary made of texts, and a chat template."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=special[0], eos_token=special[1]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


GAME = """
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen


def OpenSpielAction(action_id, game_name):
    return action_id


OpenSpielObservation = SimpleNamespace


class OpenSpielEnv:
    def __init__(self, base_url):
        self.url = base_url

    def reset(self):
        self.steps = 0
        return self.step(0)

    def step(self, action):
        assert urlopen(self.url).read() == b"here"
        self.steps += 1
        board = [random.choice([0.0, 2.0, 4.0]) for _ in range(16)]
        seen = dict(info_state=board, legal_actions=[0, 1, 2, 3], done=self.steps > 20)
        return SimpleNamespace(observation=SimpleNamespace(**seen), reward=0.0)


async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})
"""  # of OpenEnv, with the calls of its client and a server that answers


def write_game(folder):
    "The game's package, where a notebook that clones OpenEnv imports it and starts its server."
    for name in ("envs", "envs/openspiel_env", "envs/openspiel_env/server"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text("")
    (folder / "envs/openspiel_env/__init__.py").write_text(GAME)
    (folder / "envs/openspiel_env/models.py").write_text("from envs.openspiel_env import *\n")
    (folder / "envs/openspiel_env/server/app.py").write_text("from envs.openspiel_env import app\n")


def write_seers(names, folder):
    "The same for models that see, with processors that read pictures."
    sys.path.insert(0, str(ROOT / "tests"))
    from seeing_models import TEXT, processor_of, processor_of_transformers, seeing

    TEXT.update(max_position_embeddings=32_768)
    folders, own = {}, find_spec("torchvision") is not None
    for name in sorted(names):
        family = family_of(name, seeing=True)
        if not (folder / family).exists():
            seeing(family)[0].save_pretrained(folder / family)
            processor = processor_of_transformers(family) if own else processor_of(family)
            processor.save_pretrained(folder / family)
        folders[name] = str(folder / family)
    return folders


def write_models(names, tokenizer, folder):
    "A tiny model for each name; name -> its folder."
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_families

    tiny_families.SIZES.update(vocab_size=VOCABULARY, max_position_embeddings=32_768)
    tiny_families.FAMILIES["gemma4_text"]["vocab_size_per_layer_input"] = VOCABULARY
    folders = {}
    for name in sorted(names):
        family = family_of(name)
        if not (folder / family).exists():
            tiny_families.write_released(family, tokenizer, folder / family)
        folders[name] = str(folder / family)
    return folders


def run_notebook(path, cells, stand_ins, folder):
    "Where a notebook ended: the number of its last cell, and the error or None."
    place = folder / path.stem
    place.mkdir()
    (place / "stand_ins.py").write_text(STAND_INS)
    (place / "stand_ins.json").write_text(json.dumps(stand_ins))
    (place / "cells.json").write_text(json.dumps(cells))
    (place / "run.py").write_text(RUN)
    write_game(place)
    with open(place / "log.txt", "w") as log:
        told = place / "told.json"
        try:
            subprocess.run(
                [sys.executable, "run.py"], cwd=place, stdout=log, stderr=log, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return {"at": None, "error": f"not done after {LIMIT} s"}
    return json.loads(told.read_text()) if told.exists() else {"at": None, "error": "it crashed"}


NOT_OURS = {  # a word of a notebook's name -> why it cannot run here, whoever trains
    "Muse": "it wants one version of transformers, and replaces functions inside Unsloth's package",
    "Openenv_wordle": "its game is a server on the web, drawn for by a function of TRL's trainer",
}


def sees(path):
    "Whether a notebook trains on pictures."
    return any(word in path.name for word in PICTURES)


def outcome(path, edits, told):
    "One of OUTCOMES."
    if told["error"]:
        return "failed"
    return ("ran", "one edit", "edits")[min(len(edits), 2)]


OUTCOMES = {
    "ran": "run whole, with another import line",
    "one edit": "run whole with one edit",
    "edits": "run whole with several edits",
    "failed": "end in an error",
}


def gate(paths, folder):
    "The record of each notebook."
    every = {path: code_cells(path) for path in paths}
    asked = {
        path: {name for _, name in re.findall(RULES["model"][0][0], "\n".join(cells))}
        for path, cells in every.items()
    }
    tokenizer = tokenizer_of([cell for cells in every.values() for cell in cells])
    blind = set().union(*(names for path, names in asked.items() if not sees(path)))
    folders = write_models(blind, tokenizer, folder / "models")
    write_game(folder / "OpenEnv/src")
    record = {}
    for path, cells in every.items():
        began = time.perf_counter()
        pins = dict(re.findall(r"\b([\w-]+)==([\d.]+)", "\n".join(cells)))  # it asks for these
        cells, rules, edits = changed(cells)
        own = write_seers(asked[path], folder / "seeing") if sees(path) else folders
        told = run_notebook(path, cells, (own, ROWS, pins), folder)
        found = outcome(path, edits, told)
        record[path.name] = {
            "outcome": found,
            "cells": len(cells),
            "edits": edits,
            "rules": rules,
        }
        if told["error"]:
            short = told["error"].splitlines()[0].replace(str(folder), "")[:200]
            reason = next((why for word, why in NOT_OURS.items() if word in path.name), short)
            record[path.name] |= {"cell": told["at"], "error": short, "reason": reason}
        seconds = round(time.perf_counter() - began)
        print(f"{found:9} {seconds:4} s  {path.name}  {told['error'] or ''}"[:200], flush=True)
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "-k", default="", help="only notebooks whose name has this word; others stay in the record"
    )
    parser.add_argument("--record", type=Path, help="write the record to this file")
    parser.add_argument("--source", default="", help="where the notebooks are from, and of when")
    args = parser.parse_args()
    paths = [path for path in sorted(args.folder.glob("*.ipynb")) if args.k in path.name]
    folder = Path(tempfile.mkdtemp())  # stays: it has each notebook's log
    print(folder)
    record = gate(paths, folder)
    if args.k and args.record and args.record.exists():  # the others stay as they were
        before = json.loads(args.record.read_text())
        record = dict(sorted((before["notebooks"] | record).items()))
        args.source = args.source or before["source"]
    counts = {name: sum(one["outcome"] == name for one in record.values()) for name in OUTCOMES}
    print(counts)
    if args.record:
        names = ("transformers", "torch", "trl", "datasets")
        made = {
            "date": datetime.date.today().isoformat(),
            "source": args.source,
            "versions": {name: version(name) for name in names},
            "counts": counts,
            "edits": {name: why for name, (_, _, why) in EDITS.items()},
            "notebooks": record,
        }
        args.record.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
