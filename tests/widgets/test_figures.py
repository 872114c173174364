"A matplotlib figure as SVG, and the box that redraws it."

import json
from xml.etree import ElementTree

import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from node import run_module

from grpo_nb.widgets.batch import BatchWidget
from grpo_nb.widgets.board import BoardWidget, LuckWidget, PacmanWidget
from grpo_nb.widgets.dashboard import DashboardWidget
from grpo_nb.widgets.figures import figure_svg, interactive_figure, joined
from grpo_nb.widgets.masks import ChunksWidget, MasksWidget
from grpo_nb.widgets.memory import MemoryWidget
from grpo_nb.widgets.pull import AdvantagesWidget, ClippingWidget, TranscriptWidget
from grpo_nb.widgets.rewards import RewardsWidget

COMPONENTS = {
    "advantages": AdvantagesWidget,
    "batch": BatchWidget,
    "board": BoardWidget,
    "chunks": ChunksWidget,
    "clipping": ClippingWidget,
    "dashboard": DashboardWidget,
    "luck": LuckWidget,
    "masks": MasksWidget,
    "memory": MemoryWidget,
    "pacman": PacmanWidget,
    "rewards": RewardsWidget,
    "transcript": TranscriptWidget,
}
TELL = "import(process.argv[1]).then((m) => console.log(JSON.stringify(m.defaults)))"


def titled(text):
    figure = Figure(figsize=(2, 1))
    figure.subplots().set_title(text)
    return figure


def test_text_stays_text_and_the_width_is_free():
    before, figures = matplotlib.rcParams["svg.fonttype"], plt.get_fignums()
    root = ElementTree.fromstring(figure_svg(titled("A & B")))
    assert root.tag.endswith("svg") and "max-width:100%" in root.get("style")
    assert root.get("width") is None and root.get("height") is None and root.get("viewBox")
    assert "A & B" in [element.text for element in root.iter() if element.text]
    assert matplotlib.rcParams["svg.fonttype"] == before
    assert plt.get_fignums() == figures  # others may have left some open


def test_the_drawing_follows_its_controls_and_shows_errors():
    calls = []

    def draw(size, name):
        calls.append((size, name))
        if size > 4:
            raise ValueError(f"{size} is too many")
        return titled(f"{name} {size}")

    box = interactive_figure(
        draw,
        "some-class",
        size=ipywidgets.IntSlider(1, 0, 9),
        name=ipywidgets.Dropdown(options=["a", "b"]),
    )
    assert calls == [(1, "a")] and "a 1" in box.drawing.value and "some-class" in box._dom_classes
    box.controls["name"].value = "b"
    assert calls[-1] == (1, "b") and "b 1" in box.drawing.value
    box.controls["size"].value = 7
    assert "7 is too many" in box.drawing.value and "<svg" not in box.drawing.value
    box.controls["size"].value = 3
    assert "b 3" in box.drawing.value
    assert box.children == (box.controls["size"], box.controls["name"], box.drawing)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_is_one_module_with_the_values_of_its_class(name, tmp_path):
    module = tmp_path / "module.mjs"
    module.write_text(joined(name))
    own, traits = COMPONENTS[name].value_names, COMPONENTS[name].class_traits(sync=True)
    assert json.loads(run_module(TELL, module)) == {key: traits[key].default() for key in own}
