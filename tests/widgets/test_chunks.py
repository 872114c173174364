"The drawing of a batch in chunks: what is cut, and what it weighs."

import pytest

from grpo_nb.algorithm.logprobs import hidden_state_bytes, logit_bytes
from grpo_nb.widgets.masks import chunks_figure


def test_the_bars_are_the_equations():
    sizes = dict(batch=4, length=1024, vocab=32_000, hidden=2048)
    memory = chunks_figure(**sizes, mini_batch=2, logit_chunk_multiplier=8).axes[1]
    logits = (4, 1024, 32_000)
    expected = [
        logit_bytes(*logits),
        logit_bytes(*logits, mini_batch=4),
        logit_bytes(*logits, mini_batch=2, logit_chunk_multiplier=8),
        hidden_state_bytes(4, 1024, 2048, element_bytes=4),
        hidden_state_bytes(4, 1024, 2048, mini_batch=2, element_bytes=4),
    ]
    drawn = [bar.get_width() * 2**30 for bar in memory.patches]
    assert drawn == pytest.approx(expected)
    assert expected[0] == 4 * 1024 * 32_000 * 4 == 16 * expected[2]


@pytest.mark.parametrize(
    "cut, title",
    [
        ((1, 1), "1 piece, 1 chunks of up to 8,192 tokens"),
        ((4, 4), "4 pieces, 16 chunks of up to 512 tokens"),
        ((16, 1), "4 pieces, 4 chunks of up to 2,048 tokens"),
    ],
)
def test_the_title_counts_pieces_and_chunks(cut, title):
    pieces = chunks_figure(4, 2048, mini_batch=cut[0], logit_chunk_multiplier=cut[1]).axes[0]
    assert pieces.get_title() == title
