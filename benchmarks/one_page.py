"""*GRPO on one page* with its switch on a real model: the page's own cells, and their log.

python benchmarks/one_page.py MODEL OUT.json
python benchmarks/one_page.py MODEL OUT.json --set STEPS=2 --set "PROMPTS, G=(2, 4)"
"""

import argparse
import json
import re
import time
from pathlib import Path

import matplotlib
import torch
from laptop import facts

PAGE = Path(__file__).parents[1] / "nbs/lessons/00_grpo_on_one_page.ipynb"

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, another setting")
parser.add_argument("--threads", type=int, default=2)
given = parser.parse_args()

cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
source = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
for name, _, value in [one.partition("=") for one in [f"MODEL={given.model!r}", *given.set]]:
    source, found = re.subn(rf"(?m)^{name} = [^#\n]*", f"{name} = {value}  ", source)
    assert found == 1, f"the page sets {name} {found} times"
torch.set_num_threads(given.threads)
matplotlib.use("Agg")
page, began = {}, time.perf_counter()
exec(compile(source, str(PAGE), "exec"), page)
asked, answers = page["problems"](8, held_out=True)
texts = page["texts_of"](*page["sample"](asked, 1)[2:])
used = {name: page[name] for name in ("PROMPTS", "G", "STEPS", "EPOCHS", "MAX_TOKENS", "LR")}
record = facts(given) | dict(
    settings=used,
    before=round(page["before"], 4),
    after=round(page["after"], 4),
    answered=100,  # held-out sums, one sampled completion each
    seconds=round(time.perf_counter() - began, 1),
    log=[{name: round(value, 4) for name, value in row.items()} for row in page["log"]],
    completions=[dict(asked=a, answer=b, said=c) for a, b, c in zip(asked, answers, texts)],
)
given.out.parent.mkdir(parents=True, exist_ok=True)
given.out.write_text(json.dumps(record, indent=1) + "\n")
print({name: record[name] for name in ("before", "after", "seconds")})
