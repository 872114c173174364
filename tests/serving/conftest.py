"""Servers for the tests of what speaks to them."""

from contextlib import ExitStack

import pytest
from small_runs import small_model

from grpo_nb.serving.stand_in import StandIn, serving


@pytest.fixture
def start(tmp_path):
    "A function that starts a stand-in, which ends with the test."
    with ExitStack() as stack:

        def start(cls=StandIn, **settings):
            given = {"name": "small", "lora_dir": tmp_path, "max_loras": 2, **settings}
            stand_in = cls(*small_model(), **given)
            return stand_in, stack.enter_context(serving(stand_in))

        yield start


@pytest.fixture
def alone(monkeypatch):
    "Each request is drawn alone, so that no clock decides how its log-probs are rounded."
    monkeypatch.setattr("grpo_nb.serving.stand_in.MOST_DRAWN_TOGETHER", 1)
