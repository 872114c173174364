"2048, Pac-Man and luck: drawings and films, and the browser's games beside Python's."

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
import torch
from node import run_module

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.environments.game2048 import play, random_policy
from grpo_nb.widgets.board import board_animation, board_svg, board_widget, example_game


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


def test_the_widget_holds_a_record():
    record = example_game()
    made = board_widget(record)
    assert record.end == "lost" and made.moves == record.moves and made.seed == "8"
    assert (made.move, made.target, made.size) == (0, 2048, 4)
    assert board_widget().moves == "" and board_widget(play(lambda board: None)).moves == ""


# The same games in the browser

JS = Path(__file__).resolve().parents[2] / "grpo_nb/widgets/js"
RUN = """
import(process.argv[1]).then(async (functions) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  const states = ({ seed, moves, target, size }) => {
    const game = functions.game2048({ seed, target, size });
    for (const move of moves) game.push(move);
    return game.states.map(({ board, score, move }) => [board, score, move]);
  };
  const told = JSON.parse(text).map(([name, args]) =>
    name === "states" ? states(...args) : functions[name](...args));
  process.stdout.write(JSON.stringify(told));
});
"""


def browser_says(module, calls):
    return json.loads(run_module(RUN, JS / f"{module}.js", json.dumps(calls)))


def test_2048_is_the_same_game_in_the_browser():
    seeds = [0, 8, 2**32 + 5, random.Random(1).getrandbits(64)]
    records = [play(random_policy(seed), seed, size=2 + seed % 4) for seed in seeds]
    records.append(example_game())
    calls = [["states", [vars(one) | {"seed": str(one.seed)}]] for one in records]
    for record, told in zip(records, browser_says("games", calls)):
        ours = [
            [[list(row) for row in board], score, move] for board, score, move in record.replay()
        ]
        assert told == ours and len(ours) > 3


@pytest.fixture(scope="module")
def lesson():
    "What the cells of the first lesson define that pushes a policy and moves Pac-Man."
    path = JS.parents[2] / "nbs/lessons/01_what_rl_is.ipynb"
    cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"]]
    wanted = ("def push(", "def babble(", "MAZE = [", "import torch")
    names = {}
    for source in cells:
        if any(word in source for word in wanted):
            kept = [
                line for line in source.splitlines() if not line.startswith(("%", "figure", "axis"))
            ]
            exec("\n".join(kept), names)
    plt.close("all")
    return names


def test_pacman_is_the_same_game_in_the_browser(lesson):
    draw = random.Random(2)
    games = [("".join(draw.choices("udlr", k=40)), draw.randrange(2**32)) for _ in range(40)]
    ended = 0
    for (moves, seed), told in zip(
        games, browser_says("games", [["pacmanGame", g] for g in games])
    ):
        state, rng = lesson["new_game"](), random.Random(seed)
        for move, said in zip(moves, told[1:]):
            state, reward = lesson["step"](state, lesson["LETTERS"][move], rng)
            assert (list(state["pacman"]), list(state["ghost"])) == (said["pacman"], said["ghost"])
            assert state["beans"] == set(map(tuple, said["beans"])) and reward == said["reward"]
        assert state["over"] == told[-1]["over"]
        ended += state["over"]
    assert 5 < ended < 40


def test_luck_pushes_as_the_lesson_does(lesson):
    draw, z = random.Random(3), lesson["babble"](0.01)
    (told,) = browser_says("luck", [["babble", [0.01]]])
    assert told == pytest.approx(z.softmax(-1).tolist(), rel=1e-5)
    V = len(told)
    groups = [draw.choices([V - 1, 0, 3, 9], k=draw.choice([2, 8, 32])) for _ in range(30)]
    for group, said in zip(
        groups, browser_says("luck", [["pushed", [z.tolist(), g, V - 1]] for g in groups])
    ):
        drawn = torch.tensor([group])
        rewards = (drawn == V - 1).float().flatten()
        A = group_advantages(rewards, len(group)).values.view(1, -1)
        ours = z + lesson["push"](z.softmax(-1)[None], drawn, A)[0]
        assert said == pytest.approx(ours.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "record",
    [example_game(), play(lambda board: None), play(random_policy(1), 2, size=5)],
    ids=["corner", "no move", "5 x 5"],
)
def test_the_film(record):
    film, frames = board_animation(record), list(record.replay())
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
        and f"{record.end} after {len(frames) - 1}" in "".join(pictures[-1].itertext())
        and ("move 0 of" in "".join(pictures[0].itertext())) == (len(frames) > 1)
    )
    defined = {g.get("id") for g in root.iter(f"{namespace}g") if g.get("id")}
    assert {use.get("href")[1:] for use in root.iter(f"{namespace}use")} == defined
