"The drawing of a group's rewards and advantages."

import pytest

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.widgets.advantages import DOWN, NEUTRAL, UP, advantages_figure, advantages_widget


def test_widget_follows_every_control():
    box = advantages_widget([1.0, 0.0, 0.0, 0.0, 0.5])
    assert "grpo-advantages-viz" in box._dom_classes and len(box.controls) == 6
    seen = {box.drawing.value}
    for name, value in [
        ("reward_0", 0.5),
        ("reward_4", 0.0),
        ("scale", "batch"),
        ("scale", "none"),
        ("reward_0", 0.0),
    ]:
        box.controls[name].value = value
        assert box.drawing.value not in seen
        seen.add(box.drawing.value)
    assert "nothing to learn" in box.drawing.value


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
