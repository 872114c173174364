"The drawing of the clipped objective: the formula's values, its gradient, its borders."

import pytest
import torch
from traitlets import TraitError

from grpo_nb.algorithm.losses import LOSSES
from grpo_nb.widgets.pull import DRAWN, clipping_curves, clipping_figure, clipping_widget


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_curves_are_the_formula(advantage):
    ratio = torch.tensor([0.1, 0.5, 0.79, 1.0, 1.27, 1.29, 1.6, 2.5])
    settings = dict(epsilon=0.2, epsilon_high=0.28, delta=1.5)
    objective, pull = clipping_curves(ratio, advantage, "dapo", **settings)
    for c, value, slope in zip(ratio.tolist(), objective.tolist(), pull.tolist()):
        clipped = min(max(c, 0.8), 1.28)
        assert value == pytest.approx(min(min(c, 1.5) * advantage, clipped * advantage))
        free = c < 1.28 if advantage > 0 else 0.8 < c < 1.5
        assert slope == pytest.approx(c * advantage if free else 0.0)


@pytest.mark.parametrize("loss_type", DRAWN)
def test_the_pull_is_the_slope_of_the_objective(loss_type):
    "By finite differences in log pi; cispo and vespo hold their weight constant, so theirs is not."
    settings = dict(epsilon=0.2, epsilon_high=0.28, delta=None)
    ratio = torch.tensor([0.6, 0.9, 1.1, 1.7], dtype=torch.float64)
    objective, pull = clipping_curves(ratio, 1.0, loss_type, **settings)
    assert objective.shape == pull.shape == ratio.shape
    if loss_type in ("cispo", "vespo"):
        return
    step = 1e-6
    up, down = (
        clipping_curves(
            ratio * torch.tensor(sign * step, dtype=torch.float64).exp(), 1.0, loss_type, **settings
        )[0]
        for sign in (1, -1)
    )
    torch.testing.assert_close((up - down) / (2 * step), pull, rtol=1e-4, atol=1e-6)


def test_the_borders_are_named_where_they_are():
    panel = clipping_figure("dapo", 0.2, 0.28, 1.5).axes[0]
    names = {text.get_text(): text.xy[0] for text in panel.texts}
    assert names == pytest.approx({"1 - ε": 0.8, "1 + ε_high": 1.28, "δ": 1.5})
    capped = clipping_figure("cispo", 0.2, 2.0).axes[0]
    assert {text.get_text() for text in capped.texts} == {"cap"}


def test_the_widget_begins_with_what_it_is_given():
    assert clipping_widget("cispo", delta=2.0).delta == 2.0
    assert set(DRAWN) <= set(LOSSES)
    with pytest.raises(TraitError):
        clipping_widget("ppo")


def test_an_unknown_loss_is_named():
    with pytest.raises(ValueError, match="'ppo', and it must be one of grpo"):
        clipping_figure("ppo")
