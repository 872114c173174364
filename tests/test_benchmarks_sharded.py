"benchmarks/sharded.py with narrow models on two processes, shared out and whole."

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/sharded.py"


@pytest.mark.long
@pytest.mark.parametrize("given", [["qwen3-0.6b"], ["gpt-oss-20b", "--whole"]])
def test_two_processes_make_their_updates(given, tmp_path):
    out = tmp_path / "out.json"
    small = "--cpu --layers 2 --updates 2 --prompt 8 --new 8 --prompts 4".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "2", SCRIPT, given[0], out, *small, *given[1:]], check=True
    )
    record = json.loads(out.read_text())
    assert record["cards"] == len(record["updates"]) == len(record["log"]) == 2
    assert all(one["drawn"] == 4 * 8 * 8 / 2 for one in record["updates"])  # its half
    assert set(record["planned"]) == {"rollout", "head", "layer", "update"}
