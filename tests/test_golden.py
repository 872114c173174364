"The five runs of golden.py give what they gave when their record was made."

import json

import pytest
from golden import RECORD, RUNS, probe
from small_runs import one_thread  # noqa: F401

KEPT = json.loads(RECORD.read_text())


def close(found, kept) -> bool:
    "Whether two records differ by no more than the roundings of another processor."
    if isinstance(kept, dict):
        return found.keys() == kept.keys() and all(close(found[k], kept[k]) for k in kept)
    if isinstance(kept, list):
        return len(found) == len(kept) and all(map(close, found, kept))
    return found == (pytest.approx(kept, rel=2e-3, abs=1e-4) if isinstance(kept, float) else kept)


@pytest.mark.parametrize("name", RUNS)
def test_a_seeded_run_is_the_one_that_was_recorded(name, tmp_path):
    found = json.loads(json.dumps(RUNS[name](str(tmp_path))))
    if probe() == KEPT["probe"]:
        assert found == KEPT[name]
    else:
        kept = {**KEPT[name], "bits": found["bits"]}
        assert close(found, kept)


def test_the_record_can_tell_a_change():
    "A reward one hundredth larger is another run."
    changed = json.loads(json.dumps(KEPT["dense"]))
    changed["log"][0]["reward"] *= 1.01
    assert close(KEPT["dense"], KEPT["dense"]) and not close(changed, KEPT["dense"])


def test_the_tool_is_called_in_it():
    assert all(one["tools/call_frequency"] > 1 for one in KEPT["tools"]["log"])
