"The drawing of the masks of a padded batch, beside the naive ones."

import pytest
import torch
from traitlets import TraitError

from grpo_nb.model.masks import attention_mask
from grpo_nb.widgets.masks import (
    MISSED,
    MISTAKE,
    READ,
    key_range,
    keys_read,
    masks_figure,
    masks_widget,
    naive_mask,
)


def cells(panel):
    "(row, column) -> colour of every filled cell of a panel."
    from matplotlib.colors import to_hex

    squares = panel.collections[0]
    kinds = squares.get_array()
    colours = squares.to_rgba(kinds.ravel()).reshape(*kinds.shape, 4)
    filled = zip(*kinds.nonzero())
    return {(int(i), int(j)): to_hex(colours[i, j]).upper() for i, j in filled}


@pytest.mark.parametrize("step, window", [(0, 0), (0, 3), (1, 0), (4, 4), (6, 8)])
def test_the_figure_draws_the_masks(step, window):
    figure = masks_figure(7, 4, step, window)
    size = 7 + step
    right = attention_mask(torch.tensor([0, 3]), size, size, window=window or None)
    for row in range(2):
        drawn, naive = (cells(panel) for panel in figure.axes[2 * row : 2 * row + 2])
        assert drawn == {(i, j): READ for i, j in right[row].nonzero().tolist()}
        rows = torch.arange(7 + step - 1, size) if step else torch.arange(size)
        expected = naive_mask(1 if step else 7, size, window or None)
        for i, wrong in zip(rows.tolist(), expected):
            for j in range(size):
                colour = (
                    READ
                    if right[row, i, j] and wrong[j]
                    else MISTAKE
                    if wrong[j]
                    else MISSED
                    if right[row, i, j]
                    else None
                )
                assert naive.get((i, j)) == colour
        beside = figure.axes[2 * row].child_axes[0].get_yticklabels()
        assert [label.get_text() for label in beside] == [key_range(keys) for keys in right[row]]
    assert (
        figure.axes[0].get_xlabel()
        == f"query {size - 1} ({'=' if not step else 'abcdef'[step - 1]}) {keys_read(right[0, -1])}"
    )


def test_keys_in_words():
    assert [keys_read(torch.tensor(row, dtype=torch.bool)) for row in ([0, 0], [0, 1], [1, 1])] == [
        "reads nothing",
        "reads key 1 alone",
        "reads keys 0 to 1 (2)",
    ]
    assert [
        key_range(torch.tensor(row, dtype=torch.bool)) for row in ([0, 0], [0, 1], [0, 1, 1])
    ] == ["–", "1", "1–2"]


def test_what_has_no_picture_is_refused():
    assert masks_widget(step=6).step == 6
    with pytest.raises(TraitError):
        masks_widget(step=9)
