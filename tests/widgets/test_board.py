"The drawing of a game of 2048, move by move and as a film."

from xml.etree import ElementTree

import pytest

from grpo_nb.environments.game2048 import play, random_policy
from grpo_nb.widgets.board import (
    board_animation,
    board_svg,
    board_widget,
    example_game,
    frame_texts,
)


def test_a_drawing_of_a_board():
    board = ((2, 0, 131072, 4), (8, 16, 32, 64), (128, 256, 512, 1024), (2048, 4096, 0, 0))
    svg = ElementTree.fromstring(board_svg(board, 1234, "S", "move 3 of 9"))
    words = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert words == [
        "score 1,234",
        "move 3 of 9",
        "next: S (down)",
        *[str(tile) for row in board for tile in row if tile],
    ]
    x, y, width, height = map(float, svg.get("viewBox").split())
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        assert (
            0 <= float(rect.get("x"))
            and float(rect.get("x")) + float(rect.get("width")) <= width
            and float(rect.get("y")) + float(rect.get("height")) <= height
        )
    assert [
        e.text for e in ElementTree.fromstring(board_svg(((0, 0), (0, 0)))).iter() if e.text
    ] == []


def test_the_widget_shows_every_move():
    record = example_game()
    frames, box = frame_texts(record), board_widget(record)
    assert (
        record.end == "lost"
        and frames[-1][:2] == list(record.replay())[-1][:2]
        and frames[-1][3] == f"lost after {len(frames) - 1}"
    )
    slider = box.controls["move"]
    assert (
        (slider.min, slider.max)
        == (0, len(frames) - 1)
        == (box.controls["play"].min, box.controls["play"].max)
    )
    for k in (0, 7, len(frames) - 1):
        slider.value = k
        assert box.drawing.value == board_svg(*frames[k])
    assert (
        "grpo-board-viz" in box._dom_classes
        and board_widget(play(lambda board: None)).drawing.value
    )  # a game without moves


@pytest.mark.parametrize(
    "record",
    [example_game(), play(lambda board: None), play(random_policy(1), 2, size=5)],
    ids=["corner", "no move", "5 x 5"],
)
def test_the_film(record):
    film, frames = board_animation(record), frame_texts(record)
    root = ElementTree.fromstring(film)
    assert len(film) < 200_000 and root.get("viewBox") == ElementTree.fromstring(
        board_svg(frames[0][0])
    ).get("viewBox")
    namespace = "{http://www.w3.org/2000/svg}"
    pull = root.find(f".//{namespace}animateTransform")
    pictures = [g for g in root.iter(f"{namespace}g") if g.get("transform")]
    height = int(root.get("height"))
    assert [g.get("transform") for g in pictures] == [
        f"translate(0 {k * height})" for k in range(len(pictures))
    ] and pull.get("values").split(";") == [f"0 {-k * height}" for k in range(len(pictures))]
    assert (
        len(pictures) <= 130
        and frames[-1][3] in "".join(pictures[-1].itertext())
        and frames[0][3] in "".join(pictures[0].itertext())
    )
    defined = {g.get("id") for g in root.iter(f"{namespace}g") if g.get("id")}
    assert {use.get("href")[1:] for use in root.iter(f"{namespace}use")} == defined
