"The drawing of a group's rewards and advantages."

import pytest
from traitlets import TraitError

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.widgets.pull import DOWN, NEUTRAL, UP, advantages_figure, advantages_widget


def test_the_widget_refuses_what_has_no_advantage():
    assert advantages_widget([1.0, 0.0], "none").rewards == [1.0, 0.0]
    with pytest.raises(TraitError):
        advantages_widget([1.0])
    with pytest.raises(TraitError):
        advantages_widget(scale="all")


def bars(axes):
    "(height, colour) of every bar, from left to right."
    from matplotlib.colors import to_hex

    found = sorted(axes.patches, key=lambda bar: bar.get_x())
    return [(bar.get_height(), to_hex(bar.get_facecolor()).upper()) for bar in found]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_bars_are_the_advantages(scale):
    rewards = [1.0, 0.0, 0.5, 0.0]
    shown = rewards + [1.0, 0.0, 1.0, 0.0] * (scale == "batch")
    values = group_advantages(shown, 4, scale=scale).values.tolist()
    left, right = advantages_figure(rewards, scale).axes
    assert [height for height, _ in bars(left)] == shown
    assert [height for height, _ in bars(right)] == pytest.approx(values)
    colors = [UP if v > 0 else DOWN if v < 0 else NEUTRAL for v in values[:4]]
    assert [color for _, color in bars(right)] == colors + [NEUTRAL] * (len(shown) - 4)
