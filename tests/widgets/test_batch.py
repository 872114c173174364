"The drawing of a schedule: every square, every update, the formulas under it."

import pytest

from grpo_nb.algorithm.batching import BatchLayout
from grpo_nb.widgets.batch import batch_figure, batch_widget, derived_text, prompt_grid


def test_the_widget_begins_with_what_it_is_given():
    assert batch_widget(num_generations=6).num_generations == 6
    with pytest.raises(TypeError, match="no setting num_generation"):
        batch_widget(num_generation=6)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_figure_shows_the_schedule(shuffle):
    layout = BatchLayout(
        3,
        4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        num_processes=2,
    )
    axes = batch_figure(3, 4, 2, 4, 2, 2, shuffle).axes[0]
    drawn = {
        (t.get_position()[0], t.get_position()[1]): int(t.get_text())
        for t in axes.texts
        if t.get_text().isdigit()
    }
    schedule = layout.schedule(2, shuffle, 0)
    wanted = {
        (b.cycle * 8 + b.step + 0.5, 3 * b.process + row + 0.5): prompt
        for b in schedule
        for row, prompt in enumerate(b.prompts)
    }
    assert drawn == wanted
    triangles = next(line.get_xdata() for line in axes.lines if line.get_marker() == "^")
    assert list(triangles) == [
        b.cycle * 8 + b.step + 1 for b in schedule if b.update and b.process == 0
    ]


def test_the_grid_has_a_column_a_step_and_a_row_a_completion():
    layout = BatchLayout(2, 4, steps_per_generation=2, num_processes=2)
    grid = prompt_grid(layout, cycles=2)
    first = [[0, 0, 2, 2]] * 2  # process 0 has one prompt of each cycle, process 1 the other
    assert grid.tolist() == first + [[1, 1, 3, 3]] * 2


def test_the_formulas_hold():
    layout = BatchLayout(3, 4, gradient_accumulation_steps=2, steps_per_generation=4)
    for line in derived_text(layout).splitlines():
        name, sides = line.split(" = ", 1)
        formula, result = sides.split(" = ")
        value = float(result.split()[0])
        assert value == getattr(layout, name) == eval(formula.replace("x", "*"))
