"benchmarks/sharded.py and sharded_trl.py with narrow models on two processes."

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def recorded(script, given, out):
    "What two processes write down, of two updates of four times eight completions."
    small = "--cpu --layers 2 --updates 2 --prompt 8 --new 8 --prompts 4".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", FOLDER / script]
    subprocess.run([*launcher, given[0], out, *small, *given[1:]], check=True)
    return json.loads(out.read_text())


@pytest.mark.long
def test_trl_makes_the_same_updates_of_its_shares(tmp_path):
    record = recorded("sharded_trl.py", ["qwen3-32b", "--batch", "8"], tmp_path / "out.json")
    assert record["cards"] == len(record["updates"]) == 2
    assert all(one["drawn"] == 4 * 8 * 8 / 2 for one in record["updates"])  # to their full length
    assert record["placed"] == "(Shard(dim=0),)"  # of every weight
    names = {"sample", "score", "train", "update", "seconds", "drawn"}
    assert all(names <= set(one) for one in record["updates"])
    parts = [sum(one[name] for name in ("sample", "train", "update")) for one in record["updates"]]
    assert all(part < one["seconds"] for part, one in zip(parts, record["updates"]))


@pytest.mark.long
@pytest.mark.parametrize("given", [["qwen3-0.6b"], ["gpt-oss-20b", "--whole"]])
def test_two_processes_make_their_updates(given, tmp_path):
    record = recorded("sharded.py", given, tmp_path / "out.json")
    assert record["cards"] == len(record["updates"]) == len(record["log"]) == 2
    assert all(one["drawn"] == 4 * 8 * 8 / 2 for one in record["updates"])  # its half
    assert set(record["planned"]) == {"rollout", "head", "layer", "update"}
