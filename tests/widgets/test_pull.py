"The completions that the widget shows, and the page that stands for it."

import json
from html import unescape

import pytest
import torch

from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.rollout.sampler import drawn_elsewhere
from grpo_nb.widgets.pull import (
    EXAMPLE,
    transcript_html,
    transcript_of,
    transcript_widget,
)


def a_rollout():
    "A completion with two tokens of a tool, and a shorter one."
    output = {
        "prompt_ids": [[2, 3], [4]],
        "completion_ids": [[5, 6, 7, 1], [8, 1]],
        "logprobs": [[-1.5, None, None, -0.25], [-0.5, -1.0]],
        "env_mask": [[True, False, False, True], [True, True]],
    }
    return drawn_elsewhere(output, 2, [1], "cpu")


def test_each_token_has_its_owner_and_its_numbers():
    tokenizer, rollout = tiny_tokenizer("0123456789"), a_rollout()
    logps = torch.tensor([-1.0, -9.0, -8.0, -0.5])
    one = transcript_of(rollout, 0, 1.5, tokenizer, logps=logps, title="a", reader="tool")
    owners = ["prompt"] * 2 + ["policy", "tool", "tool", "policy"]
    assert [token[1] for token in one["tokens"]] == owners
    assert [token[2] for token in one["tokens"]] == [None, None, -1.0, -9.0, -8.0, -0.5]
    assert [token[3] for token in one["tokens"]] == [None, None, -1.5, None, None, -0.25]
    ids = rollout.prompt_ids[0] + rollout.completion_ids[0].tolist()
    assert [token[0] for token in one["tokens"]] == [tokenizer.decode([i]) for i in ids]
    two = transcript_of(rollout, 1, -1.5, tokenizer)
    assert [token[2:] for token in two["tokens"]] == [[None, None], [-0.5, -0.5], [-1.0, -1.0]]
    assert two["title"] == "completion 1"
    with pytest.raises(ValueError, match="zip"):
        transcript_of(rollout, 0, 1.5, tokenizer, logps=logps[:2])


def test_what_has_no_picture_is_refused():
    for completions, which in (([], 0), (EXAMPLE, 2)):
        with pytest.raises(ValueError, match=f"there are {len(completions)}"):
            transcript_widget(completions, completion=which)


def test_the_page_carries_the_data_and_lets_no_token_out_of_its_box():
    rude = ["<script>'\"", "policy", -1.0, -1.0]
    completions = [{"title": "<b>", "advantage": 1.0, "tokens": [rude]}]
    page = transcript_html(completions)
    assert "<script" not in page and "<b>" not in page
    given = page.split("data-values='")[1].split("'")[0]
    assert json.loads(unescape(given)) == {"completions": completions}
    bundle, _ = transcript_widget(completions)._repr_mimebundle_()
    assert bundle["text/html"] == page and "application/vnd.jupyter.widget-view+json" in bundle
