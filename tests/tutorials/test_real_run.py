"What the tutorial on GSM8K says of the stored runs is what their logs say."

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = [
    json.loads((ROOT / f"benchmarks/results/gsm8k/right_{seed}.json").read_text())
    for seed in (0, 1)
]
PAGE = "".join(
    "".join(cell["source"])
    for cell in json.loads((ROOT / "nbs/tutorials/03_gsm8k.ipynb").read_text())["cells"]
)


def test_gains_and_losses_are_those_of_the_logs():
    before = RUNS[0]["before"]["marks"]
    for run in RUNS:
        pairs = list(zip(before, run["after"]["marks"]))
        gained = sum(a != "r" and b == "r" for a, b in pairs)
        lost = sum(a == "r" and b != "r" for a, b in pairs)
        assert len(pairs) == 1319
        assert f"seed {run['arguments']['seed']} gains {gained} and loses {lost}" in PAGE


def test_the_table_is_that_of_the_log():
    first, late = RUNS[0]["log"][0], RUNS[0]["log"][105]
    rows = {
        "tokens of a completion": ("completions/mean_length", "{:.0f}"),
        "entropy, nats a token": ("entropy", "{:.2f}"),
        "groups without spread": ("frac_reward_zero_std", "{:.0%}"),
        "gap of sampler and trainer, nats": ("sampling/gap_mean", "{:.4f}"),
    }
    assert late["step"] == 106
    for name, (key, shape) in rows.items():
        shown = [shape.format(one[key]).lstrip("0").replace("%", " %") for one in (first, late)]
        assert f"| {name} | {shown[0]} | {shown[1]} |" in PAGE
