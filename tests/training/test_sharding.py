"Processes that each hold a share of the weights (FSDP2, gloo) make the updates of one."

import json

import pytest
import torch
from sharded_child import SHARDED, run_of
from small_runs import CLOCKS, weights_of
from test_distributed import torchrun

QUICK = ("dapo", "packed experts", "adapter and kl", "unequal pieces")


def started(*arguments, timeout=400):
    "Two processes of sharded_child.py."
    done = torchrun(*arguments, timeout=timeout, child="sharded_child.py")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    "What both processes ended with, of the cases that are asked for: one launch."
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    out = tmp_path_factory.mktemp("sharded")
    started(out, "equal", json.dumps([name for name in SHARDED if name in cases]))
    return [torch.load(out / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in SHARDED]
)
def test_shards_make_the_updates_of_whole_weights(name, ranks, tmp_path):
    first, second = (rank[name] for rank in ranks)
    trainer = run_of(tmp_path, name, 1)
    start = weights_of(trainer.model)
    trainer.train()
    for key, weight in weights_of(trainer.model).items():
        assert torch.equal(first["weights"][key], second["weights"][key])
        far = float((first["weights"][key] - weight).abs().max())
        assert far < (2e-3 if name == "float16" else 1e-5), (key, far)
    moved = [float((w - start[n]).abs().max()) for n, w in weights_of(trainer.model).items()]
    assert max(moved) > 1e-2
    total = sum(w.numel() for w in start.values())
    assert first["held"] + second["held"] == total and second["held"] > 0.4 * total
    for one, two in zip(trainer.log_history, first["history"], strict=True):
        for key in (
            {"loss", "grad_norm", "reward"} if name == "quantile" else set(one) - set(CLOCKS)
        ):
            close = dict(rel=0.05, abs=0.02) if name == "float16" else dict(rel=1e-3, abs=1e-4)
            assert two[key] == pytest.approx(one[key], **close), (one["step"], key)
