"Two processes with a card each (NCCL, started by torchrun) do what one card does."

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two cards are needed"),
]
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))
from distributed_child import CASES, scripted  # noqa: E402
from small_runs import weights_of  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    "What both processes found."
    out = tmp_path_factory.mktemp("two")
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = [str(TESTS / "distributed_child.py"), str(out), "equal"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc_per_node", "2", *child],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=400,
    )
    return [torch.load(out / f"rank{rank}.pt", map_location="cpu") for rank in (0, 1)]


@pytest.mark.parametrize("name", CASES)
def test_two_cards_make_the_updates_of_one(name, ranks, tmp_path):
    first, second = ranks
    trainer = scripted(tmp_path, name, 1)
    trainer.train()
    # a micro-batch of another size rounds otherwise: a token at the quantile may fall beside it
    tolerance = 2e-3 if name in ("float16", "quantile") else 1e-5
    for key, weight in weights_of(trainer.model).items():
        assert torch.equal(first[name]["weights"][key], second[name]["weights"][key])
        torch.testing.assert_close(
            first[name]["weights"][key], weight.cpu(), atol=tolerance, rtol=0
        )


def test_a_run_with_real_sampling_is_resumed_to_the_bit(ranks):
    for rank in ranks:
        for key, weight in rank["sampled"]["weights"].items():
            assert torch.equal(weight, rank["sampled again"]["weights"][key]), key
