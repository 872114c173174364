"""Draw the diagrams of the course: docs/diagrams/*.svg.

    python tools/diagrams.py           write them
    python tools/diagrams.py --check   change nothing; exit 1 when one is out of date

Each is a card that is legible from 360 pixels on, with colours for light and for dark. What can be
computed (advantages, masks, softmaxes, curves) is computed here and not drawn by eye.
"""

import argparse
import json
import math
import re
import statistics
import sys
from configparser import ConfigParser
from html import escape
from pathlib import Path

from course import INSIDE, PATHS, heading, load, sections

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from answers import interval, wilson  # noqa: E402

FOLDER = ROOT / "docs/diagrams"
WIDTH = 460  # of every drawing, in its own units
SIZE = 16  # of its text: 11 pixels and more on a telephone, where a drawing is 330 wide
DIAGRAMS = {}  # name -> the function that draws it

COLOURS = {  # class -> (fill, line) in light, (fill, line) in dark
    "blue": (("#dcebf7", "#0072b2"), ("#12344d", "#56b4e9")),
    "orange": (("#fde6d3", "#b84d00"), ("#4a2712", "#f0955a")),
    "green": (("#d9f0e6", "#00694d"), ("#123c30", "#3ecf9f")),
    "grey": (("#eceae4", "#77726a"), ("#2c323a", "#8b949e")),
    "card": (("#fdfcf9", "#d8d4ca"), ("#1b2027", "#3d444d")),
}
INK = {"ink": ("#22272e", "#e8e8e8"), "soft": ("#57606a", "#b1bac4")}


def rules(dark):
    "The style of all classes, for a light page or a dark one."
    for name, both in COLOURS.items():
        fill, line = both[dark]
        yield f".{name}{{fill:{fill};stroke:{line}}}.{name}-line{{stroke:{line};fill:none}}"
        yield f".{name}-text{{fill:{line}}}.{name}-full{{fill:{line}}}"
    for name, both in INK.items():
        yield f".{name}{{fill:{both[dark]}}}.{name}-line{{stroke:{both[dark]};fill:none}}"


STYLE = (
    "text{font-family:system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
    + "".join(rules(False))
    + "@media (prefers-color-scheme:dark){"
    + "".join(rules(True))
    + "}"
)


def diagram(height, title, words, shown=575):
    """Register a function that yields the parts of a drawing; `words` say what it shows, and it is
    `shown` pixels wide where there is room."""

    def register(draw):
        def whole():
            heads = "".join(
                f'<marker id="{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="{c}"/></marker>'
                for c in ("soft", "orange-full", "blue-full", "green-full")
            )
            card = (
                f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10" '
                'class="card"/>'
            )
            return "\n".join(
                [
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                    f'width="{shown}" height="{round(shown / WIDTH * height)}" role="img">',
                    f"<title>{escape(title)}</title><desc>{escape(words)}</desc>",
                    f"<style>{STYLE}</style><defs>{heads}</defs>",
                    card,
                    text(WIDTH / 2, 26, title, weight=600, size=17),
                    *draw(),
                    "</svg>\n",
                ]
            )

        whole.words = words
        DIAGRAMS[draw.__name__] = whole
        return whole

    return register


def number(x):
    return f"{x:.1f}".rstrip("0").rstrip(".")


def text(x, y, words, cls="ink", size=SIZE, anchor="middle", weight=400):
    return (
        f'<text x="{number(x)}" y="{number(y)}" class="{cls}" font-size="{size}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
    )


def rect(x, y, w, h, cls="grey", rx=3):
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" '
        f'rx="{rx}" class="{cls}"/>'
    )


def box(x, y, w, h, *lines, cls="blue", size=SIZE):
    "A box with lines of text in its middle, the first of them bold."
    first = y + h / 2 + 5 - 8.5 * (len(lines) - 1)
    return rect(x, y, w, h, cls, 6) + "".join(
        text(x + w / 2, first + 17 * i, line, size=size, weight=600 if i == 0 else 400)
        for i, line in enumerate(lines)
    )


def path(d, cls="soft-line", width=1.6, head=None, dash=None):
    extra = f' marker-end="url(#{head})"' if head else ""
    extra += f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{d}" class="{cls}" stroke-width="{width}"{extra}/>'


def arrow(x1, y1, x2, y2, colour=None):
    cls, head = (f"{colour}-line", f"{colour}-full") if colour else ("soft-line", "soft")
    return path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", cls, 1.8, head)


def softmax(scores):
    top = [math.exp(score) for score in scores]
    return [each / sum(top) for each in top]


@diagram(
    360,
    "The loop of GRPO",
    "Prompts become groups of completions, completions get rewards, rewards become advantages, "
    "advantages a loss, the loss moves the weights, and the next completions are drawn with them.",
    shown=412,
)
def loop():
    rows = [(("prompts", "12+34="), ("completions", "46  47  46  ?"), ("rewards", "1  0  1  0"))]
    rows += [(("weights", "move a little"), ("loss", "one number"), ("advantages", "+  −  +  −"))]
    for row, cells in enumerate(rows):
        for column, (name, example) in enumerate(cells):
            colour = {"weights": "orange", "completions": "green"}.get(name, "blue")
            yield box(20 + 148 * column, 66 + 160 * row, 124, 64, name, example, cls=colour)
    yield arrow(146, 98, 165, 98) + arrow(294, 98, 313, 98)
    yield arrow(378, 132, 378, 222)
    yield arrow(314, 258, 295, 258) + arrow(166, 258, 147, 258)
    yield path("M82 224C82 160 195 205 208 134", "orange-line", 2, "orange-full")
    yield text(222, 172, "drawn with", "orange-text", anchor="start")
    yield text(222, 190, "the new weights", "orange-text", anchor="start")
    yield text(WIDTH / 2, 330, "And again, some hundred times.", "soft")


@diagram(
    280,
    "A group: one prompt, compared with itself",
    "Four completions of one prompt with rewards 1, 0, 0, 0. Their mean is 0.25. The right one has "
    "the advantage +1.5 and is pushed up, the three others have -0.5 and are pushed down.",
)
def group():
    answers, rewards = ("46", "47", "64", "?"), (1, 0, 0, 0)
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    yield box(16, 116, 84, 46, "12+34=", cls="grey")
    for x, words in ((178, "completion"), (262, "reward"), (372, "advantage")):
        yield text(x, 54, words, "soft")
    yield path("M372 62L372 222", "soft-line", 1, dash="3 3")
    for i, (answer, reward) in enumerate(zip(answers, rewards)):
        y, advantage = 84 + 38 * i, (reward - mean) / deviation
        colour = "green" if advantage > 0 else "orange"
        yield arrow(102, 139, 135, y)
        yield box(140, y - 14, 76, 28, answer, cls="blue")
        yield text(262, y + 5, str(reward))
        end = 372 + 46 * advantage
        yield path(f"M372 {y}L{number(end)} {y}", f"{colour}-line", 5, None)
        sign = "+" if advantage > 0 else "−"
        beside = (366, "end") if advantage > 0 else (378, "start")
        yield text(beside[0], y + 5, f"{sign}{abs(advantage):.1f}", f"{colour}-text", SIZE,
                   beside[1], 600)  # fmt: skip
    yield text(16, 264, f"mean {mean:g}, standard deviation {deviation:g}", "soft", anchor="start")
    yield text(446, 238, "likelier →", "green-text", anchor="end")
    yield text(346, 238, "← rarer", "orange-text", anchor="end")


@diagram(
    268,
    "The clip: how far a token may go",
    "The objective of one token against its ratio. With a positive advantage it rises until the "
    "ratio is 1.2 and is flat above. With a negative one it is flat below 0.8 and falls above.",
)
def clip():
    for left, advantage, colour in ((18, 1, "green"), (244, -1, "orange")):

        def place(c):
            score = min(c * advantage, min(max(c, 0.8), 1.2) * advantage)
            return left + 8 + 94 * c, 140 - 46 * score  # noqa: B023

        points = [place(c / 50) for c in range(100)]
        line = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        sign = "+" if advantage > 0 else "−"
        name = "a good token" if advantage > 0 else "a bad token"
        yield text(left + 102, 54, f"{name}, A = {sign}1", f"{colour}-text", weight=600)
        yield path(f"M{left + 8} 140L{left + 200} 140", width=1)
        for c in (0.8, 1, 1.2):
            x, edge = left + 8 + 94 * c, c != 1
            yield path(
                f"M{number(x)} 66L{number(x)} 222", "grey-line", 1, dash="3 3" if edge else None
            )
        yield text(left + 8 + 94 * 0.74, 238, "0.8", "soft")
        yield text(left + 8 + 94, 238, "1", "soft")
        yield text(left + 8 + 94 * 1.26, 238, "1.2", "soft")
        yield path(line, f"{colour}-line", 4)
        x, y = (left + 172, 104) if advantage > 0 else (left + 38, 194)
        yield text(x, y, "flat: it has", "soft") + text(x, y + 17, "moved far", "soft")
    yield text(WIDTH / 2, 258, "ratio: probability now / when it was drawn", "soft")


def grid(left, top, cell, size, seen):
    for query in range(size):
        for key in range(size):
            cls = "blue-full" if seen(query, key) else "grey"
            yield rect(left + cell * key, top + cell * query, cell - 1.5, cell - 1.5, cls, 1.5)


@diagram(
    212,
    "Masks: who may look at whom",
    "Three grids of queries and keys, joined by and: the key is no padding, it is not in the "
    "future, it is in the window of three. The fourth grid is what remains.",
)
def masks():
    rules_of = {
        "no padding": lambda q, k: k >= 2,
        "no future": lambda q, k: k <= q,
        "window of 3": lambda q, k: q - k < 3,
    }
    both = {**rules_of, "may look": lambda q, k: all(rule(q, k) for rule in rules_of.values())}
    for i, (name, rule) in enumerate(both.items()):
        left = 32 + 109 * i
        yield from grid(left, 52, 14.5, 6, rule)
        yield text(left + 43, 160, name, weight=600 if i == 3 else 400)
        if i:
            yield text(left - 11.5, 101, "=" if i == 3 else "&", "soft", 17)
    yield text(16, 100, "query", "soft").replace("<text ", '<text transform="rotate(-90 16 100)" ')
    yield text(75, 45, "key →", "soft")
    yield text(WIDTH / 2, 184, "The first two places are padding: their rows", "soft")
    yield text(WIDTH / 2, 201, "see nothing, and nothing is read from them.", "soft")


@diagram(
    226,
    "A sink: attention that may look away",
    "The weights of four keys add up to one. With a sink, a fifth score joins the softmax and "
    "takes a part of the weight, and nothing is read for it: the keys share what is left.",
)
def sinks():
    scores, sink = (1.2, 0.5, 0.2, 0), 1.5
    bars = {"softmax": softmax(scores), "with a sink": softmax((*scores, sink))}
    for row, (name, weights) in enumerate(bars.items()):
        y, x = 62 + 74 * row, 20
        yield text(20, y - 8, name, anchor="start", weight=600)
        for i, weight in enumerate(weights):
            width = 420 * weight
            yield rect(x, y, width - 2, 34, "grey" if i == 4 else "blue", 4)
            label = (
                f"sink {weight:.2f}".replace("0.", ".") if i == 4 else f"{weight:.2f}".lstrip("0")
            )
            yield text(x + width / 2 - 1, y + 22, label)
            x += width
    kept = 1 - bars["with a sink"][4]
    yield text(20 + 210 * kept, 188, f"{kept:.2f} is read".replace("0.", "."), "blue-text")
    yield text(20 + 420 * (kept + 1) / 2, 188, "nothing is read", "soft")
    yield text(WIDTH / 2, 212, "The sink is one learnt number for each head.", "soft")


@diagram(
    296,
    "Packed experts: 4 bits kept, 16 for a moment",
    "A block of MXFP4 has 32 numbers of four bits and one shared exponent, 17 bytes. The experts "
    "stay packed on the card; one part at a time is unpacked, multiplied and thrown away.",
)
def experts():
    for i in range(32):
        yield rect(20 + 12.6 * (i % 32) * 0.86, 52, 10, 24, "blue", 2)
    yield rect(374, 52, 26, 24, "orange", 3)
    yield text(190, 94, "32 numbers of 4 bits", "blue-text")
    yield text(449, 94, "exponent, 8 bits", "orange-text", anchor="end")
    yield text(448, 70, "17 B", "soft", anchor="end")
    yield text(70, 124, "on the card", "soft")
    for i in range(4):
        for j in range(3):
            chosen = (i, j) == (1, 1)
            yield rect(22 + 26 * i, 134 + 34 * j, 22, 28, "orange" if chosen else "blue", 3)
    yield text(70, 254, "all, packed")
    yield arrow(126, 184, 160, 184)
    yield box(166, 150, 124, 68, "one part", "unpacked to", "16 bits", cls="orange")
    yield arrow(294, 184, 322, 184)
    yield box(328, 158, 112, 52, "times", "its tokens", cls="green")
    yield path("M228 222C228 262 170 270 150 258", "soft-line", 1.6, "soft")
    yield text(236, 252, "then thrown away", "soft", anchor="start")
    yield text(WIDTH / 2, 282, "Backward unpacks it again: time for memory.", "soft")


@diagram(
    316,
    "Pages of the cache, and a ring",
    "Two sequences keep lists of pages of four tokens each, in any order, so that a finished one "
    "leaves whole pages behind. A layer with a window of four keeps a ring: token 5 replaces 1.",
)
def pages():
    yield text(20, 54, "Layers that keep every token: pages", anchor="start", weight=600)
    sequences = {"A": ("blue", 7, [0, 3]), "B": ("green", 5, [4, 1])}
    owner = {
        page: (name, i) for name, (_, _, pages) in sequences.items() for i, page in enumerate(pages)
    }
    for page in range(6):
        x = 20 + 71 * page
        name, part = owner.get(page, (None, 0))
        for token in range(4):
            used = name and 4 * part + token < sequences[name][1]
            yield rect(x + 16 * token, 122, 15, 26, sequences[name][0] if used else "grey", 2)
            if used:
                yield text(x + 16 * token + 7.5, 140, str(4 * part + token + 1))
        yield text(x + 31, 166, f"page {page}" if name else "free", "soft")
    for i, (name, (colour, tokens, held)) in enumerate(sequences.items()):
        y = 68
        yield box(
            20 + 230 * i,
            y,
            190,
            26,
            f"{name}, {tokens} tokens",
            cls=colour,
        )
        for page in held:
            yield path(
                f"M{115 + 230 * i} {y + 27}L{51 + 71 * page} 119", f"{colour}-line", 1.4,
                f"{colour}-full",
            )  # fmt: skip
    yield text(20, 202, "Layers with a window: a ring", anchor="start", weight=600)
    for state, x, held in (
        ("after 4 tokens", 30, (1, 2, 3, 4)),
        ("after 5", 186, (5, 2, 3, 4)),
        ("after 6", 342, (5, 6, 3, 4)),
    ):
        for i, token in enumerate(held):
            yield rect(x + 24 * i, 216, 22, 30, "orange" if token > 4 else "blue", 3)
            yield text(x + 24 * i + 11, 236, str(token))
        yield text(x + 47, 266, state, "soft")
    yield arrow(134, 231, 178, 231) + arrow(290, 231, 334, 231)
    yield text(WIDTH / 2, 298, "A page is handed back whole; a ring never grows.", "soft")


@diagram(
    330,
    "Where memory goes in a step",
    "Weights, adapter and optimizer are there all the time. Drawing adds the cache, the head adds "
    "the logits of a chunk, a layer adds its own work and the inputs of all layers.",
)
def memory():
    top, base = 62, 226
    columns = {
        "drawing": [("cache", 52, "green"), ("logits", 26, "orange")],
        "the head": [("inputs", 46, "green"), ("logits", 62, "orange")],
        "a layer": [("inputs", 46, "green"), ("its work", 40, "orange")],
    }
    for i, (name, parts) in enumerate(columns.items()):
        x, y = 92 + 122 * i, base
        for part, height, colour in parts:
            y -= height
            yield rect(x, y, 104, height - 2, colour, 4)
            yield text(x + 52, y + height / 2 + 5, part)
        yield text(x + 52, 290, name, weight=600)
    yield rect(92, base, 348, 40, "blue", 4)
    yield text(266, base + 25, "weights, adapter, optimizer: always")
    yield path(f"M78 {top + 12}L448 {top + 12}", "soft-line", 1.8, None, "6 4")
    yield text(446, top + 4, "what the card has", "soft", anchor="end")
    yield arrow(70, 266, 70, 72)
    yield text(44, 160, "bytes", "soft")
    yield text(WIDTH / 2, 314, "Only the highest column has to fit. (Not to scale.)", "soft")


@diagram(
    344,
    "Who holds which weights",
    "Usually trainer, sampler and reference each hold a set of weights, and the trained ones are "
    "copied to the sampler after every update. With one set of weights all three read the same "
    "tensors, and the reference is the model with its adapter switched off.",
)
def weights():
    yield text(20, 54, "The usual way: three sets", anchor="start", weight=600)
    for i, (name, colour) in enumerate(
        (("trainer", "orange"), ("sampler", "blue"), ("reference", "grey"))
    ):
        yield box(20 + 150 * i, 66, 120, 62, name, "all weights", cls=colour)
    yield path("M80 130C90 162 220 162 230 132", "orange-line", 2, "orange-full")
    yield text(155, 172, "copied after every update", "orange-text")
    yield text(380, 146, "never moves", "soft")
    yield text(20, 204, "Here, with an adapter: one set", anchor="start", weight=600)
    yield box(20, 254, 258, 40, "frozen weights, once", cls="blue")
    yield box(290, 254, 150, 40, "adapter", cls="orange")
    yield text(WIDTH / 2, 228, "sampler and trainer read both", "ink")
    yield path("M20 248V240H440V248", "soft-line", 1.6)
    yield path("M20 300V308H278V300", "soft-line", 1.6)
    yield text(149, 326, "the reference reads this alone", "ink")


def lane(x, y, spans, colour, height=26):
    for start, width, label in spans:
        yield rect(x + start, y, width - 2, height, colour, 4)
        yield text(x + start + width / 2 - 1, y + 18, label)


@diagram(
    292,
    "Batches in flight",
    "Synchronous: sampler and trainer take turns, and one of them always waits. In flight: the "
    "sampler draws the next batch with weights one version old while the trainer trains.",
)
def in_flight():
    yield text(20, 54, "One after the other: somebody always waits", anchor="start", weight=600)
    yield text(20, 84, "sampler", "soft", anchor="start") + text(
        20, 116, "trainer", "soft", anchor="start"
    )
    yield from lane(94, 66, ((0, 90, "with v0"), (150, 90, "with v1"), (300, 60, "v2")), "blue")
    yield from lane(94, 98, ((90, 60, "→ v1"), (240, 60, "→ v2")), "orange")
    yield text(
        20, 160, "In flight: both work, the data is one version old", anchor="start", weight=600
    )
    yield text(20, 190, "sampler", "soft", anchor="start") + text(
        20, 222, "trainer", "soft", anchor="start"
    )
    spans = ((0, 90, "with v0"), (90, 90, "with v0"), (180, 90, "with v1"), (270, 90, "with v2"))
    yield from lane(94, 172, spans, "blue")
    yield from lane(94, 204, ((90, 60, "→ v1"), (180, 60, "→ v2"), (270, 60, "→ v3")), "orange")
    yield arrow(94, 246, 450, 246) + text(440, 264, "time", "soft", anchor="end")
    yield text(94, 264, "The ratio corrects for the age.", "soft", anchor="start")


@diagram(
    248,
    "Turns: what is trained, and what is only read",
    "A conversation in one row of tokens: prompt, a call that the model writes, the result that "
    "the tool writes, the model's answer. The mask is 1 where the model wrote.",
)
def turns():
    spans = (
        ("prompt", 74, "grey", 0),
        ("calls a tool", 104, "green", 1),
        ("its result", 94, "grey", 0),
        ("answer", 86, "green", 1),
    )
    x, places = 20, []
    for name, width, colour, trained in spans:
        yield rect(x, 96, width - 3, 40, colour, 5)
        yield text(x + width / 2 - 1, 121, name)
        yield text(
            x + width / 2 - 1,
            164,
            str(trained),
            "green-text" if trained else "soft",
            16,
            weight=600,
        )
        places.append(x + width / 2)
        x += width
    yield text(446, 121, "reward", "orange-text", anchor="end", weight=600)
    yield text(446, 164, "mask", "soft", anchor="end")
    for a, who in ((0, "you"), (1, "model"), (2, "tool"), (3, "model")):
        yield text(places[a], 87, who, "soft")
    yield path(f"M420 106V54H{number(places[1])}V68", "orange-line", 2, "orange-full")
    yield path(f"M{number(places[3])} 54V68", "orange-line", 2, "orange-full")
    yield text(WIDTH / 2, 200, "One reward at the end moves all that the model", "soft")
    yield text(WIDTH / 2, 218, "wrote; the words of the tool teach it nothing.", "soft")


MINUTES = re.compile(r"^\*\*(\d+) minutes\*\*", re.M)


def the_map():
    "(the two paths: name -> [(title, address, minutes)]; branches: name, address, how many)."
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    settings = settings["DEFAULT"]
    web = settings["git_url"] % {"user": settings["user"], "repo": settings["repo"]}
    web += f"/blob/{settings['branch']}/"
    parts = sections(ROOT)
    stops = {name: [] for name in PATHS}
    for name in stops:
        (pages,) = [paths for _, caption, paths in parts if caption == name]
        for page in pages:
            notebook = load(ROOT / page)
            minutes = MINUTES.search(notebook["cells"][0]["source"])
            stops[name].append((heading(notebook)[0], web + page, int(minutes[1])))
    branches = [
        (name, web + paths[0], len(paths))
        for index, name, paths in parts[1:]
        if index == "index.ipynb" and name not in PATHS
    ]
    inside = sum(len(paths) for index, _, paths in parts if index == INSIDE)
    return stops, [*branches, ("Inside the library", web + INSIDE, inside)]


def linked(address, *parts):
    return f'<a href="{escape(address)}">{"".join(parts)}</a>'


SHORT = {
    "A gradient in ten minutes": "A gradient",
    "When the reward does not rise": "A flat reward",
    "The trainer, in five versions": "Trainer, 5 versions",
    "Log-softmax in pieces": "Log-softmax",
    "gpt-oss-20b on a free T4": "gpt-oss-20b on a T4",
}


@diagram(
    558,
    "The map: two paths, and branches",
    "Two columns of lessons with their minutes: the afternoon, and build it, from masks to "
    "gpt-oss-20b on a free T4. Under them the branches, each with its number of notebooks. The "
    "tables below have links.",
    shown=412,
)
def course_map():
    stops, branches = the_map()
    for x, (path_name, lessons) in zip((14, 232), stops.items()):
        yield text(x, 58, path_name, "soft", anchor="start")
        yield path(f"M{x + 13} 88V{88 + 46 * (len(lessons) - 1)}", "blue-line", 3)
        for i, (title, address, minutes) in enumerate(lessons):
            y = 88 + 46 * i
            name = SHORT.get(title, title)
            yield linked(
                address,
                f'<rect x="{x}" y="{y - 18}" width="206" height="44" fill="transparent"/>',
                f'<circle cx="{x + 13}" cy="{y}" r="13" class="blue"/>',
                text(x + 13, y + 5, str(i + 1), weight=600),
                text(x + 31, y, name, anchor="start", weight=600),
                text(x + 31, y + 18, f"{minutes} minutes", "soft", SIZE, "start"),
            )
    for i, (name, address, count) in enumerate(branches):
        x, y = 14 + 218 * (i % 2), 456 + 44 * (i // 2)
        yield linked(
            address,
            rect(x, y, 210, 36, "grey", 6),
            text(x + 8, y + 24, name, anchor="start"),
            text(x + 202, y + 24, str(count), "soft", SIZE, "end"),
        )


RESULTS = ROOT / "benchmarks/results/gsm8k"
WORDS = {  # what prompts.json calls them, when the model was not trained
    "box": "before, the trained prompt",
    "teacher": "before, best of five prompts",
    "eight worked problems": "before, 8 examples",
}
TRAINED = {  # kinds of runs under the trained prompt
    "right": "1 for the right number, 4 seeds",
    "random": "1 or 0 by a coin",
    "box": "1 for any number in a box",
    "supervised": "imitating solutions",
}
FORMS = {  # and under the prompt that asks for a last line `#### number`
    "form": ".1 for the form of the last line",
    "form_batch": "by the batch's spread",
    "form_beta": "beta = 0.1",
    "form_slow": "a fifth of the rate",
    "anywhere": "1 for a right number anywhere",
    "gated": "the form, where it is right",
}


def gsm8k_run(name):
    "A record of RESULTS."
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def seeds_of(kind):
    "The records of all seeds of a kind of run."
    return [gsm8k_run(p.stem) for p in sorted(RESULTS.glob(f"{kind}_[0-9].json"))]


def marks_of(kinds):
    "A letter for each test problem of every seed, by the words for a kind of run."
    return {words: [r["after"]["marks"] for r in seeds_of(kind)] for kind, words in kinds.items()}


def smooth(values, width=9):
    "The mean of each value and its neighbours."
    half = width // 2
    return [statistics.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def chart(title, curves, top, most, shape, last=None):
    "Lines from 0 to `most`, each a colour, its values and, if not an update apart, their places."
    left, height, width = 58, 128, 386
    base = top + 14 + height
    yield text(left, top, title, "soft", anchor="start")
    for share in (0.0, most / 2, most):
        y = base - share / most * height
        dash = "2 4" if share else None
        yield path(f"M{left} {number(y)}H{left + width}", "grey-line", 1, dash=dash)
        yield text(left - 8, y + 5, shape.format(share), "soft", anchor="end")
    for colour, values, *places in curves:
        places = places[0] if places else [i / (len(values) - 1) for i in range(len(values))]
        points = [
            f"{number(left + x * width)} {number(base - v / most * height)}"
            for x, v in zip(places, values)
        ]
        yield path("M" + "L".join(points), f"{colour}-line", 2.2 if len(curves) < 4 else 1.4)
    last = last or f"update {len(values)}"
    first = "1" if last.startswith("update") else "0"
    yield text(left, base + 20, first, "soft", anchor="start")
    yield text(left + width, base + 20, last, "soft", anchor="end")


def beside(name, wide, end=0):
    "Where a name begins: inside its bar, or behind it and, if there is room, its interval."
    if 8 + 8 * len(name) < wide:
        return 24
    return 24 + (max(wide, end) if end + 8 * len(name) < 370 else wide)


def shares(top, right, widest, colour):
    """A bar for each share of the test problems, the mean of its seeds, from {name: their marks};
    on its foot the 95 % interval over problems and seeds, and a dot for each of several seeds."""
    for i, (name, marks) in enumerate(right.items()):
        y, wide, count = top + 28 * i, 428 / widest, len(marks[0])
        each = [one.count("r") / count for one in marks]
        share = statistics.mean(each)
        low, high = wilson(count * share, count)
        if len(marks) > 1:
            low, high = (end / 100 for end in interval(marks, "w" * count, 400)[1:])
        yield rect(16, y, share * wide, 22, colour(name))
        yield path(
            f"M{number(16 + low * wide)} {y + 21.5}H{number(16 + high * wide)}", "soft-line", 3
        )
        for one in each if len(marks) > 1 else ():
            yield f'<circle cx="{number(16 + one * wide)}" cy="{y + 21.5}" r="3.5" class="ink"/>'
        yield text(beside(name, share * wide, high * wide), y + 16, name, anchor="start")
        yield text(444, y + 16, f"{share:.1%}", anchor="end", weight=600)


@diagram(
    456,
    "A trained model learns school maths",
    "Qwen2.5-Coder-0.5B-Instruct on GSM8K, four seeds. The share of right completions rises over "
    "110 updates from a fifth to two fifths. Below, the share of the 1,319 test problems that is "
    "answered right: about a quarter before, with the best of five prompts 28 percent, after "
    "training 38 percent, each seed between 37 and 39; and the means of three seeds with rewards "
    "by a coin 17 (8, 18 and 24), paid for any number in a box 10, and after imitating worked "
    "solutions 19 percent.",
    shown=412,
)
def trained_run():
    logs = [run["log"] for run in seeds_of("right")]
    curves = [("green", smooth([one["rewards/right/mean"] for one in log])) for log in logs]
    title = "right in training, means of 9 updates"
    yield from chart(title, curves, 50, 0.5, "{:.0%}")
    title = "1,319 test problems, answered right; a dot is a seed"
    yield text(16, 236, title, "soft", anchor="start")
    asked = gsm8k_run("prompts")
    right = {words: [asked[name]["marks"]] for name, words in WORDS.items()} | marks_of(TRAINED)
    colours = dict.fromkeys(WORDS.values(), "grey") | {TRAINED["right"]: "green"}
    yield from shares(248, right, 0.476, lambda name: colours.get(name, "orange"))


@diagram(
    480,
    "Paid for the form, it stops thinking",
    "The same model under a prompt that asks for a last line '#### number', three seeds of "
    "everything. Paid 1 for the right number alone, its completions keep some 250 tokens, and it "
    "answers 34 percent of the test problems right, 17 before. Paid .1 for the form of that line "
    "too, completions shrink to a tenth within twelve updates in all six tries. Seventeen of these "
    "eighteen runs stay there and answer 2 to 6 percent right. One, paid for the form only where "
    "the number is right, comes back after the fifteenth update and answers 33 percent.",
    shown=412,
)
def collapsed_run():
    logs = {kind: [run["log"] for run in seeds_of(kind)] for kind in [*reversed(FORMS), "no_form"]}
    curves = [
        (
            "blue" if kind == "no_form" else "orange",
            [one["completions/mean_length"] for one in log],
            [i / 39 for i in range(len(log))],
        )
        for kind, runs in logs.items()
        for log in runs
    ]
    title = "tokens of a completion, three seeds of each"
    yield from chart(title, curves, 50, 400, "{:.0f}", "update 40")
    yield text(444, 92, "paid for the number alone", "blue-text", anchor="end")
    yield text(444, 171, "one of these 18 came back", "orange-text", anchor="end")
    yield text(444, 152, "for the form too: six tries", "orange-text", anchor="end")
    right = {"before": [gsm8k_run("prompts")["line"]["marks"]]}
    right |= marks_of({"no_form": "the number alone"} | FORMS)
    yield text(
        16, 236, "1,319 test problems, answered right; a dot is a seed", "soft", anchor="start"
    )
    colours = {"before": "grey", "the number alone": "blue"}
    yield from shares(248, right, 0.476, lambda name: colours.get(name, "orange"))


PEERS = {"ours_40": ("grpo_nb", "blue"), "trl_40": ("TRL with vLLM", "orange")}
PEERS |= {"unsloth_40": ("Unsloth with vLLM", "green")}


def seconds_of(run):
    "When each update of a run ended, since its training began."
    return run.get("times") or [one["seconds"] for one in run["log"]]


def an_update(run):
    "The median seconds of an update, without the first five."
    times = seconds_of(run)
    return statistics.median([b - a for a, b in zip(times[4:], times[5:])])


@diagram(
    440,
    "The same task by grpo_nb, TRL and Unsloth",
    "Qwen2.5-Coder-0.5B-Instruct on GSM8K, each on one card of one machine. Above, the share of "
    "right completions in training against seconds: grpo_nb's 40 updates are over after 100. An "
    "update takes 2.3 seconds, TRL's with vLLM 8.9, Unsloth's with vLLM 15.0. Of the 1,319 test "
    "problems 30.8, 30.8 and 29.5 percent are answered right, after 40, 39 and 19 updates.",
    shown=412,
)
def beside_peers():
    runs = {name: gsm8k_run(name) for name in PEERS}
    most = max(seconds_of(run)[-1] for run in runs.values())
    curves = [
        (
            PEERS[name][1],
            smooth([one["rewards/right/mean"] for one in run["log"]]),
            [second / most for second in seconds_of(run)],
        )
        for name, run in runs.items()
    ]
    title = "right in training by seconds, means of nine"
    yield from chart(title, curves, 50, 0.5, "{:.0%}", f"{most:.0f} s")
    yield text(16, 236, "seconds of an update", "soft", anchor="start")
    taken = {name: an_update(run) for name, run in runs.items()}
    for i, (name, seconds) in enumerate(taken.items()):
        (words, colour), y = PEERS[name], 248 + 24 * i
        wide = seconds / max(taken.values()) * 380
        yield rect(16, y, wide, 18, colour)
        yield text(beside(words, wide), y + 14, words, anchor="start")
        yield text(444, y + 14, f"{seconds:.1f}", anchor="end", weight=600)
    yield text(16, 340, "1,319 test problems, answered right after", "soft", anchor="start")
    told = {
        f"{len(run['log'])} updates, {seconds_of(run)[-1]:.0f} s": name
        for name, run in runs.items()
    }
    right = {words: [runs[name]["after"]["marks"]] for words, name in told.items()}
    yield from shares(352, right, 0.476, lambda words: PEERS[told[words]][1])


TWO_CARDS = ROOT / "benchmarks/results/two_cards"
PARTS = {"sample": "blue", "train": "orange", "rest": "grey"}  # of an update, and their colours


def two_cards_run(name):
    "A record of TWO_CARDS."
    return json.loads((TWO_CARDS / f"{name}.json").read_text("utf-8"))


def parts_of(name, skipped=5):
    "Mean seconds of an update: drawing, training, the rest; without the first updates."
    log = two_cards_run(name)["log"][skipped:]
    mean = {
        part: statistics.mean(one[key] for one in log)
        for part, key in (("sample", "seconds/sample"), ("train", "seconds/train"))
    }
    return mean | {"rest": statistics.mean(one["step_time"] for one in log) - sum(mean.values())}


def parts_of_shares(name):
    "Median seconds of an update in two shares by part, without the first."
    clocks = two_cards_run(name)["updates"][1:]
    parts = {key: statistics.median(one[key] for one in clocks) for key in ("sample", "train")}
    whole = statistics.median(one["seconds"] for one in clocks)
    return parts | {"rest": whole - sum(parts.values())}


def stacked(y, name, parts, scale):
    "A bar of parts in seconds, and their sum."
    yield text(16, y - 7, name, anchor="start")
    x = 16
    for part, seconds in parts.items():
        yield rect(x, y, max(seconds * scale - 1, 1), 20, PARTS[part])
        x += seconds * scale
    yield text(x + 8, y + 16, f"{sum(parts.values()):.1f} s", anchor="start", weight=600)


def busy(y, name, shares, seconds=20):
    "How busy a card was, a bar every half second."
    yield text(16, y + 27, name, anchor="start")
    wide = 330 / (2 * seconds)
    yield path(f"M114 {y + 34}H444", "grey-line", 1)
    for i, share in enumerate(shares[: 2 * seconds]):
        if share:
            height = share / 100 * 34
            yield rect(114 + i * wide, y + 34 - height, wide - 1, height, "green", 0)


def planned_beside(y, name, planned, torch_peak, driver, scale):
    "The plan's GiB as a bar, and a line from torch's peak to the driver's."
    yield text(16, y - 7, name, anchor="start")
    yield rect(16, y, planned * scale, 20, "grey")
    x, end = 16 + torch_peak * scale, 16 + driver * scale
    yield path(f"M{number(x)} {y + 10}H{number(end)}", "orange-line", 7)
    words = f"{planned:.1f}: {torch_peak:.1f} to {driver:.1f}"
    yield text(444, y + 16, words, anchor="end", weight=600)


@diagram(
    862,
    "Two cards",
    "Two H200. Above: seconds of an update of a 0.5B on GSM8K, by part. One card with 256 "
    "completions takes 2.2, two with 256 together 2.1, two with 512 together 2.5, one that "
    "trains beside one on which vLLM draws, an update behind, 5.2 and once more 5.1. Then an "
    "update of Qwen3-32B in two shares: grpo_nb's 7, TRL's 26. In the middle: while vLLM draws, "
    "the card that trains is busy in short bursts, the other most of the time at about a third. "
    "Below: GiB on a card, as planned and as measured, of Qwen3-32B and gpt-oss-120b in two shares "
    "and of gpt-oss-20b on both.",
    shown=412,
)
def two_cards():
    yield text(16, 48, "seconds:", "soft", anchor="start")
    for x, part, words in (
        (110, "blue", "drawing"),
        (220, "orange", "training"),
        (330, "grey", "rest"),
    ):
        yield rect(x, 36, 12, 12, part) + text(x + 18, 48, words, "soft", anchor="start")
    again = sum(parts_of("vllm_1_again", 3).values())
    names = {
        ("one_256", 5): "one card, 256 completions",
        ("ddp_256", 5): "two cards, 256 together",
        ("ddp_512", 5): "two cards, 512 together",
        ("vllm_1", 3): f"one trains, vLLM draws; once more: {again:.1f} s",
    }
    for i, (run, name) in enumerate(names.items()):
        yield from stacked(82 + 50 * i, name, parts_of(*run), 66)
    shared = {
        "fsdp_32b_64": "Qwen3-32B in two shares (another scale)",
        "trl_32b_64": "TRL, the same",
    }
    for i, (run, name) in enumerate(shared.items()):
        yield from stacked(282 + 50 * i, name, parts_of_shares(run), 13.5)
    yield text(16, 382, "busy, the last 20 seconds of vLLM's run", "soft", anchor="start")
    trains, draws = two_cards_run("vllm_1")["busy"]
    start = len(trains) - 44  # two seconds at the end are the process's own
    yield from busy(390, "trains", trains[start:])
    yield from busy(434, "draws", draws[start:])
    yield text(16, 504, "GiB on a card, planned: measured", "soft", anchor="start")
    y = 536
    models = {
        "fsdp_32b": "Qwen3-32B, shares",
        "fsdp_120b": "gpt-oss-120b, shares",
        "oss_two": "gpt-oss-20b, whole",
    }
    for run, model in models.items():
        record = two_cards_run(run)
        for part, moment, words in (("sample", "rollout", "draws"), ("train", "layer", "trains")):
            peaks = (record["peaks"][f"{part} {kind}"] for kind in ("peak", "driver"))
            yield from planned_beside(
                y, f"{model}, {words}", record["planned"][moment], *peaks, 2.4
            )
            y += 48
    yield text(
        16, y, "Measured: torch's peak to what the driver gave away,", "soft", anchor="start"
    )
    yield text(16, y + 22, "the larger of the two cards.", "soft", anchor="start")


LAPTOP = ROOT / "benchmarks/results/laptop"


def measured(y, name, share, count, colour):
    "A bar of a share, and its interval in figures."
    low, high = wilson(share * count, count)
    yield rect(16, y, share * 220, 22, colour)
    yield text(beside(name, share * 220), y + 16, name, anchor="start")
    yield text(444, y + 16, f"{share:.0%} ({low:.0%} to {high:.0%})", anchor="end", weight=600)


@diagram(
    618,
    "A trained model on a laptop's processor",
    "SmolLM2-135M-Instruct on two cores. Above: sentences become JSON, three seeds; the share of "
    "sampled completions that are right rises in ten updates from an eighth to three quarters and "
    "more. In the middle: sums in words, where it rises in twelve from a twentieth to a half. "
    "Below: problems that were held out, before and after, with 95 percent intervals.",
    shown=412,
)
def laptop_run():
    runs = [json.loads(p.read_text("utf-8")) for p in sorted(LAPTOP.glob("json_*.json"))]
    sums = json.loads((LAPTOP / "sums.json").read_text("utf-8"))
    fewest = min(len(run["log"]) for run in runs)
    curves = {
        colour: [one["reward"] for one in run["log"][:fewest]]
        for run, colour in zip(runs, ("blue", "orange", "green"))
    }
    yield from chart("a sentence becomes JSON: right completions", curves.items(), 50, 1, "{:.0%}")
    right = {"grey": [(one["reward"] + 3) / 6 for one in sums["log"]]}
    yield from chart("sums in words: right completions", right.items(), 246, 1, "{:.0%}")
    y = 434
    yield text(16, y, "100 problems held out (seed 2: 200), greedily", "soft", anchor="start")
    count = runs[0]["settings"]["held_out"]
    yield from measured(y + 12, "JSON, before", runs[0]["before"]["greedy"], count, "grey")
    for i, (run, colour) in enumerate(zip(runs, curves)):
        count = run["settings"]["held_out"]
        name = f"JSON, after, seed {run['settings']['seed']}"
        yield from measured(y + 40 + 28 * i, name, run["after"]["greedy"], count, colour)
    y += 40 + 28 * len(runs)
    yield from measured(y, "sums, before", sums["accuracy_before"], sums["held_out"], "grey")
    yield from measured(y + 28, "sums, after", sums["accuracy_after"], sums["held_out"], "grey")


@diagram(
    286,
    "The page's own loop, on a trained model",
    "SmolLM2-135M-Instruct, all weights, two cores, one run. The share of right completions rises "
    "in twelve steps from a fifth to three fifths and more. Below, 100 sums held out, 10 percent "
    "right before and 61 after, with 95 percent intervals.",
    shown=412,
)
def one_page_run():
    run = json.loads((LAPTOP / "one_page.json").read_text("utf-8"))
    curves = [("blue", [one["reward"] for one in run["log"]])]
    yield from chart("right completions, 64 a step", curves, 50, 1, "{:.0%}")
    yield from measured(224, "before", run["before"], run["answered"], "grey")
    yield from measured(252, "after", run["after"], run["answered"], "green")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if anything is out of date"
    )
    check = parser.parse_args().check
    wanted = {FOLDER / f"{name}.svg": draw() for name, draw in DIAGRAMS.items()}
    stale = [p for p, made in wanted.items() if not p.exists() or p.read_text("utf-8") != made]
    left = [p for p in FOLDER.glob("*.svg") if p not in wanted]
    if check:
        names = " ".join(p.name for p in (*stale, *left))
        if names:
            print(f"out of date: {names}; run python tools/diagrams.py", file=sys.stderr)
        return 1 if names else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for p in stale:
        p.write_text(wanted[p], "utf-8")
        print("wrote", p.relative_to(ROOT))
    for p in left:
        p.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
