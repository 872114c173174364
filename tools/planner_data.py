"""What the planner knows, for the memory widget, which has no Python.

    python tools/planner_data.py     write grpo_nb/widgets/js/planner_data.js

Models, cards, families and limits have their home in the library, and a test says when the file has
to be made of them again.
"""

import json
import sys
from configparser import ConfigParser
from dataclasses import asdict, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_nb.model import limits, memory_bytes, memory_fit  # noqa: E402
from grpo_nb.model.limits import FAMILIES  # noqa: E402
from grpo_nb.planning import plan  # noqa: E402

OUT = ROOT / "grpo_nb/widgets/js/planner_data.js"
USED = (  # constants that the port reads
    (memory_bytes, "GiB QUERIES SINK_KEY SINK_KEY_REPEATED PEFT_SUMS NORM_ROWS BUFFERS"),
    (memory_bytes, "OWN_FORMAT IN_PLACE"),
    (memory_fit, "CUDA_CONTEXT LIBRARIES FRAGMENTATION VLLM_GRAPHS HOST_PROCESS PARTS ALL"),
    (memory_fit, "LARGE_CARDS"),
    (plan, "LEAST_SAVING LEAST_CONTEXT"),
)
LIMITS = (
    "PART_BYTES GRADIENT_BYTES KEPT_FROM UNPACKED ROWS_OF_ONE PAIRS_BACKWARD SLICES PREFILL_TOKENS "
    "ROWS_PER_CHUNK PAGE MOST_DRAWN_TOGETHER LARGEST_HEAD SHORTEST_CUDNN RECORDED_TOKENS"
).split()


def rounds(values):
    "The few values that go round through a list."
    return next(
        (
            values[:n]
            for n in range(1, len(values))
            if all(v == values[i % n] for i, v in enumerate(values))
        ),
        values,
    )


def short(shape):
    "What a shape has that is not usual."
    usual = {field.name: field.default for field in fields(shape)}
    found = {name: value for name, value in asdict(shape).items() if value != usual[name]}
    return found | ({"windows": rounds(shape.windows)} if shape.windows else {})


def held(card):
    "What fits on a card is no question of its rates."
    return {name: getattr(card, name) for name in ("name", "usable", "capability")}


def family(one):
    names = "name head_norms gemma qkv_bias full_every".split()
    return {name: getattr(one, name) for name in names} | {"joined": len(one.qkv) == 1}


def made():
    "The module as text."
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    user, repo = (settings["DEFAULT"][name] for name in ("user", "repo"))
    constants = {n: getattr(module, n) for module, names in USED for n in names.split()}
    constants["STATES"] = list(memory_bytes.STATES.items())
    constants["limits"] = {name: getattr(limits, name) for name in LIMITS}
    constants["SITE"] = f"https://{user}.github.io/{repo}/nbs/widgets/06_memory.html"
    refused = {
        "needed": memory_bytes._needed,
        "unlike": memory_bytes._unlike,
        "plain_mlp": memory_bytes._plain_mlp,
        "exact": memory_bytes._exact,
        "recurrent": memory_bytes.RECURRENT,
    }
    parts = {
        "CONSTANTS": constants,
        "CARDS": {name: held(card) for name, card in memory_fit.CARDS.items()},
        "MODELS": {name: short(shape) for name, shape in memory_bytes.MODELS.items()},
        "FAMILIES": [family(one) for one in FAMILIES.values()],
        "REFUSED": refused,
    }
    lines = [
        "// Made by tools/planner_data.py of what the library knows: run it, edit nothing here."
    ]
    for name, value in parts.items():
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        listed = isinstance(value, list)
        inside = [
            f"  {json.dumps(one)}," if listed else f"  {json.dumps(key)}: {json.dumps(one)},"
            for key, one in rows
        ]
        begin, end = "[]" if listed else "{}"
        lines += [f"export const {name} = {begin}", *inside, f"{end};"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(made(), encoding="utf-8")
