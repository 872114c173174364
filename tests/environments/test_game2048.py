"""environments.game2048: the rules against a second implementation, what random play reaches,
programs that play and programs that cheat, both scales of rewards."""

import contextlib
import math
import random
import re
import statistics
import threading
import time
import types
import warnings
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.environments import game2048
from grpo_nb.environments.game2048 import (
    CORNER,
    MOVES,
    Game2048,
    GameRecord,
    OnceABatch,
    StrategyFault,
    StrategyReport,
    StrategyRewards,
    game2048_problems,
    game_points,
    judge_strategy,
    last_program,
    play,
    play_program,
    progress,
    random_level,
    random_policy,
    shift,
    slide,
    success_points,
    trusted,
)
from grpo_nb.environments.sandbox import SandboxPool
from grpo_nb.environments.verifiers import Program, fenced_blocks, final_channel
from grpo_nb.training.rewards import score_completions

TILE = st.sampled_from([0, 0, 2, 2, 4, 4, 8, 16, 1024])
BOARD = st.tuples(*[st.tuples(*[TILE] * 4)] * 4)


def fenced(code):
    return f"So:\n```python\n{code}\n```\nDone."


def program(answer, before=""):
    return f"{before}\ndef strategy(board):\n    {answer}\n"


ALWAYS_UP = program("return 'W'")
MISSING = program("return 'W'", "import subprocess")


@pytest.fixture(scope="module")
def pool():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the walls that this system refuses
        with SandboxPool(workers=2) as pool:
            yield pool


# the rules


def pushed(row):
    "A row pushed to the front, letter by letter: a second implementation."
    text = "".join(
        chr(65 + tile.bit_length()) for tile in row if tile
    )  # equal letters, equal tiles
    merged = re.sub(r"(.)\1", lambda pair: pair[1].lower(), text)
    tiles = [2 ** (ord(letter.upper()) - 66 + letter.islower()) for letter in merged]
    return tuple(tiles + [0] * (len(row) - len(tiles))), sum(
        tile for tile, letter in zip(tiles, merged) if letter.islower()
    )


def test_rows_against_a_second_implementation():
    for row in product((0, 2, 4, 8, 16), repeat=4):
        assert slide(row) == pushed(row)
    assert slide((2, 2, 2, 2, 2, 2)) == ((4, 4, 4, 0, 0, 0), 12) and slide((1024, 1024, 0, 0)) == (
        (2048, 0, 0, 0),
        2048,
    )


def turned(board):
    "A quarter turn to the left: what was at the right is at the top."
    return tuple(zip(*[row[::-1] for row in board]))


@settings(max_examples=300, deadline=None)
@given(BOARD)
def test_the_four_directions_are_one_turned(board):
    left = tuple(pushed(row)[0] for row in board), sum(pushed(row)[1] for row in board)
    assert shift(board, "A") == left
    for before, after in zip(
        "WDS", "AWD"
    ):  # a push up before the turn is one to the left after it, and so on
        result, points = shift(board, before)
        assert (turned(result), points) == shift(turned(board), after)
    for move in MOVES:
        assert sum(map(sum, shift(board, move)[0])) == sum(map(sum, board))


@settings(max_examples=300, deadline=None)
@given(
    BOARD.filter(lambda board: any(map(any, board)))
    | st.tuples(*[st.tuples(*[st.sampled_from([2, 4, 8, 16, 32, 64, 128])] * 4)] * 4)
)
def test_a_game_is_over_when_nothing_moves(board):
    game = Game2048()
    game.board = board
    assert game.over == all(shift(board, move)[0] == board for move in MOVES)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_books_balance(size, seed):
    game, rng = Game2048(seed, size=size), random.Random(seed + 100)
    new = [tile for row in game.board for tile in row if tile]
    assert len(new) == 2 and set(new) <= {2, 4}
    while not game.over:
        before, score, move = game.board, game.score, rng.choice(MOVES)
        shifted, points = shift(before, move)
        moved = game.move(move)
        assert moved == (shifted != before) and game.score == score + (points if moved else 0)
        added = [
            (a, b) for row, other in zip(shifted, game.board) for a, b in zip(row, other) if a != b
        ]
        assert len(added) == moved and all(a == 0 and b in (2, 4) for a, b in added)
        new += [b for _, b in added]
    tiles = [tile for row in game.board for tile in row]
    assert sum(tiles) == sum(new) and game.best == max(tiles)
    assert game.score == sum(
        (tile.bit_length() - 2) * tile for tile in tiles if tile
    ) - 4 * new.count(
        4
    )  # a tile of 2**k has brought (k - 1) 2**k, but for the 4s that fell from the sky


def test_new_tiles_fall_everywhere_and_one_in_ten_is_a_4():
    places, tiles = Counter(), Counter()
    for seed in range(3000):
        for r, row in enumerate(Game2048(seed).board):
            for c, tile in enumerate(row):
                if tile:
                    places[r, c] += 1
                    tiles[tile] += 1
    assert len(places) == 16 and all(abs(count - 375) < 4 * 375**0.5 for count in places.values())
    assert abs(tiles[4] / 6000 - 0.1) < 4 * (0.09 / 6000) ** 0.5 and tiles[2] + tiles[4] == 6000


def test_a_seed_is_a_game():
    def boards(seed):
        game = Game2048(seed)
        for move in "ASDWASDWASDW":
            game.move(move)
        return game.board, game.score

    assert (
        boards(2**63 + 1) == boards(2**63 + 1) and len({boards(seed) for seed in range(50)}) == 50
    )


def test_the_board_cannot_be_written_on():
    game = Game2048(1)
    with pytest.raises(TypeError):
        game.board[0][0] = 2048
    copy = game.lists()
    copy[0][0] = 2048
    assert (
        not game.won
        and game.lists() != copy
        and all(type(row) is list and all(type(tile) is int for tile in row) for row in copy)
    )
    with pytest.raises(ValueError, match="a move is one of W, A, S, D, not 'w'"):
        game.move("w")
    for refused in (dict(size=1), dict(target=100), dict(target=4)):
        with pytest.raises(ValueError, match="power of two"):
            Game2048(**refused)


# playing


@pytest.mark.parametrize(
    "answer",
    [
        "w",
        "",
        "WA",
        "W ",
        "up",
        None,
        0,
        True,
        1.0,
        ["W"],
        ("W",),
        {"W": 1},
        b"W",
        "\u0457",
        "W" * 10_000,
    ],
)
def test_what_is_no_move_ends_the_game(answer):
    record = play(lambda board: answer)
    assert (
        record.end == "illegal"
        and record.faulty
        and record.moves == ""
        and record.score == 0
        and record.error.startswith("it answered ")
        and len(record.error) < 200
    )


def test_a_string_of_its_own_kind_is_no_move():
    class Any(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    assert play(lambda board: Any("W")).end == "illegal"


@pytest.mark.parametrize("patience", [1, 3, 100])
def test_moves_that_move_nothing(patience):
    record = play(lambda board: "W", seed=2, patience=patience)
    assert (
        record.end == "stuck"
        and not record.faulty
        and record.error is None
        and record.moves.endswith("W" * patience)
    )
    game = Game2048(2)
    effective = [game.move(move) for move in record.moves]
    assert (
        not any(effective[-patience:])
        and (len(effective) == patience or effective[-patience - 1])
        and game.score == record.score
    )
    assert len(list(record.replay())) == sum(effective) + 1
    calls = iter(
        record.moves[:-1] + "A" + "W" * 1000
    )  # one that moves something, and the count begins again
    longer = play(lambda board: next(calls), seed=2, patience=patience)
    assert len(longer.moves) > len(record.moves) or longer.moves[-1] == "A"


def test_a_strategy_may_write_on_its_copy():
    corner = trusted(CORNER)

    def vandal(board):
        answer = corner([row[:] for row in board])
        for row in board:
            row[:] = [2048] * 4
        board.clear()
        return answer

    assert play(vandal, 4) == play(trusted(CORNER), 4)


def test_ends_and_records():
    won = play(trusted(CORNER), 1, target=16)
    assert won.end == "won" and won.best == 16 and not won.faulty

    def fails(board):
        raise StrategyFault("timeout", "too slow")

    assert (play(fails).end, play(fails).error) == ("timeout", "too slow")
    with pytest.raises(ZeroDivisionError):
        play(lambda board: 1 / 0)  # trusted code: its faults are ours
    record = play(trusted(CORNER), 7)
    board, score, move = list(record.replay())[-1]
    assert (
        record.end == "lost"
        and score == record.score
        and max(map(max, board)) == record.best
        and move is None
    )
    frames = list(record.replay())
    assert all(shift(board, move)[0] != board for board, _, move in frames[:-1]) and [
        score for _, score, _ in frames
    ] == sorted(score for _, score, _ in frames)


# what play is worth


def test_20_000_moves_a_second():
    def speed():
        begin = time.process_time()
        moves = sum(len(play(random_policy(seed), seed).moves) for seed in range(40))
        return moves / (time.process_time() - begin)

    assert max(speed() for _ in range(4)) > 20_000


def test_random_play_loses_on_4_and_wins_on_6():
    assert not any(play(random_policy(seed), seed).end == "won" for seed in range(100))
    assert sum(play(random_policy(seed), seed, size=6).end == "won" for seed in range(5)) >= 4


def test_the_corner_is_better_than_chance():
    gains = [
        progress(play(trusted(CORNER), seed).score)
        - progress(play(random_policy(seed), seed).score)
        for seed in range(120)
    ]
    mean, error = statistics.mean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    assert mean - 3 * error > 0.1


def test_progress():
    level = math.exp(random_level())
    assert (
        850 < level < 1150
        and progress(20480) == 1.0
        and progress(10**9) == 1.0
        and progress(0) == progress(1) == -1.0
    )
    assert abs(progress(round(level))) < 0.001 and progress(500) < 0 < progress(2000) < progress(
        4000
    )
    assert progress(4000) - progress(2000) == pytest.approx(
        progress(2000) - progress(1000)
    )  # doublings
    fresh = [progress(play(random_policy(seed), seed).score) for seed in range(5000, 5200)]
    assert abs(statistics.mean(fresh)) < 4 * statistics.stdev(fresh) / 200**0.5 * 2**0.5
    with pytest.raises(ValueError, match="nothing to learn; raise target or take a smaller board"):
        progress(100, target=64)
    assert (
        progress(0, target=512)
        == -1.0
        < progress(1000, target=512)
        < 1.0
        == progress(8 * 512, target=512)
    )


# from a completion to a program

CODE = "def strategy(board):\n    return 'W'\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"```python\n{CODE}```", Program(CODE)),
        (f"```py\n{CODE}\n```", Program(CODE)),
        (f"```\n{CODE}\n```", Program(CODE)),
        (f"```Python3\n{CODE}\n```\n", Program(CODE)),
        (f"~~~python\n{CODE}\n~~~", Program(CODE)),
        (f"````python\n{CODE}\n```\n````", Program(CODE + "\n```\n")),
        (f"```python\nx = 1\n```\nno:\n```python\n{CODE}\n```", Program(CODE)),
        (f"```python\n{CODE}\n```\nRun it:\n```bash\npython play.py\n```", Program(CODE)),
        ("```bash\nls\n```", Program(None)),
        (CODE, Program(None)),
        ("", Program(None)),
        ("use ``` for code", Program(None)),
        (
            "1. so:\n   ```python\n   def strategy(board):\n       return 'W'\n   ```",
            Program(CODE),
        ),
        ("```python\nreturn 1```", Program("return 1\n")),
        ("```python\n```", Program("\n")),
        (f"```python\n{CODE}", Program(CODE, True)),
        ("```python\ndef strat", Program("def strat\n", True)),
        (f"```python\n{CODE}\n```\nBetter:\n```python\ndef stra", Program("def stra\n", True)),
        ("```python", Program("\n", True)),
        (f"```python\n{CODE}\n```\n```text\nan unfinished note", Program(CODE)),
        ("```python\r\n" + CODE.replace("\n", "\r\n") + "```\r\n", Program(CODE)),
    ],
)
def test_the_last_python_block(text, expected):
    found = last_program(text)
    assert Program(found.code and found.code.replace("\r", ""), found.truncated) == expected
    assert last_program([{"role": "assistant", "content": text}]) == found


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain", "plain"),
        (
            "<|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>",
            "answer",
        ),
        ("analysisthinkingassistantfinalanswer", "answer"),
        ("analysisI will write assistantfinal later assistantfinalanswer", "answer"),
        ("analysisthinking and thinking", None),
        ("<|channel|>analysis<|message|>thinking", None),
        ("<|channel|>final<|message|>answer", "answer"),
        ("answer<|return|>", "answer"),
        ("", ""),
        (
            (
                "<|channel|>analysis<|message|>a<|end|>"
                "<|start|>assistant<|channel|>final<|message|>half an ans"
            ),
            "half an ans",
        ),
    ],
)
def test_the_final_channel(text, expected):
    assert final_channel(text) == expected


def test_a_draft_in_the_thoughts_is_no_answer():
    draft = f"analysisMaybe\n```python\n{CODE}\n```\nor"
    assert last_program(draft) == Program(None, True) and last_program(
        draft + "assistantfinalI give up."
    ) == Program(None)
    assert last_program(f"{draft}assistantfinal```python\nx = 1\n```").code == "x = 1\n"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "```",
                "```python",
                "````",
                "~~~",
                "x = 1",
                "",
                " ",
                "text",
                "```x",
                "assistantfinal",
                "analysis",
                "<|return|>",
            ]
        ),
        max_size=12,
    ).map("\n".join)
    | st.text(max_size=40)
)
def test_any_text_has_a_program_or_none(text):
    found = last_program(text)
    assert found.code is None or type(found.code) is str
    assert (
        all(type(closed) is bool for _, _, closed in fenced_blocks(text))
        and sum(not closed for _, _, closed in fenced_blocks(text)) <= 1
    )


# players in the sandbox


def test_a_game_in_the_sandbox_is_the_same_game(pool):
    for seed in (0, 2**64 - 1):
        assert play_program(CORNER, pool, seed, game_s=60) == play(trusted(CORNER), seed)
    assert play_program(CORNER, pool, 3, target=32, size=3, game_s=60) == play(
        trusted(CORNER), 3, target=32, size=3
    )


def test_the_board_comes_by_value_as_plain_lists(pool):
    checks = program(
        "assert type(board) is list and all(type(row) is list and all(type(tile) is int for "
        "tile in row) for row in board), board\n    board[0][0] = 2048; board.append(1)\n    "
        "return 'W'"
    )
    assert play_program(checks, pool, 2) == play(lambda board: "W", 2)


def test_memory_lasts_for_one_game(pool):
    counts = program(
        "global n\n    n += 1\n    if n > 40: return 'first'\n    return 'WASD'[n % 4]", "n = 0"
    )
    records = [play_program(counts, pool, 2) for _ in range(2)]
    assert records[0] == records[1] and records[0].end == "illegal" and len(records[0].moves) == 40


@pytest.mark.parametrize(
    "source, end",
    [
        (program("while True: pass"), "timeout"),
        (program("return 'W'", "while True: pass"), "timeout"),
        (program("return board[9]"), "exception"),
        (program("return 'W'", "1 / 0"), "exception"),
        (program("raise SystemExit"), "exception"),
        (program("return 'W' * 10**10"), "memory"),
        (program("return 'W'", "import numpy"), "unavailable"),
        (program("return 'W'", "import asyncio"), "unavailable"),
        (program("import os; return os.fork()"), "unavailable"),
        (program("raise PermissionError(13, 'no')"), "exception"),
        (program("open('/etc/passwd')"), "forbidden"),
        (program("yield 'W'"), "output"),
        ("def strategy(board) return 1", "syntax"),
        ("strategy = 5", "exception"),
        ("def play(board): return 'W'", "exception"),
        (program("return board"), "illegal"),
        (program("return lambda: 'W'"), "output"),
        ("async def strategy(board): return 'W'", "output"),
        ("", "exception"),
        ("def strategy(): return 'W'", "exception"),
        (program("import random; random._os.fork()"), "forbidden"),
        (program("import os; os._exit(0)"), "exception"),
        (program("print('x' * 10**9)"), "output"),
        (program("return strategy(board)"), "exception"),
    ],
)
def test_faults(pool, source, end):
    move_s = 0.3 if end == "timeout" else 5.0
    record = play_program(source, pool, move_s=move_s, game_s=30)
    ends = {end, "memory"} if "10**9" in source else {end}
    assert record.end in ends and record.faulty and record.moves == "" and record.error
    report = judge_strategy(fenced(source), pool, move_s=move_s, game_s=30)
    stages = {"syntax": "syntax", "forbidden": "cheats", "unavailable": "unavailable"}
    stage = "cheats" if "numpy" in source else stages.get(end, "fails")
    assert report.stage == stage and len(report.games) <= 1


def test_a_whole_game_has_a_time_limit(pool):
    sleeps = program("time.sleep(0.05)\n    return random.choice('WASD')", "import random, time")
    begin = time.perf_counter()
    record = play_program(sleeps, pool, move_s=5, game_s=0.5)
    assert (
        record.end == "timeout"
        and 1 <= len(record.moves) <= 10
        and time.perf_counter() - begin < 20
    )
    report = judge_strategy(fenced(sleeps), pool, move_s=5, game_s=0.5)
    assert (
        report.stage == "plays"
        and len(report.games) == 1
        and success_points(report, "plain") == -1.0
    )  # the other games are not played


@pytest.mark.long
def test_a_batch_takes_no_longer_than_its_deadlines():
    """Strategies that sleep or compute in each move or while they are loaded, endless ones, and
    honest ones among them, on two workers."""
    spin = "end = time.time() + 0.05\n    while time.time() < end: pass\n    return 'WASD'[n() % 4]"
    counts = "import itertools, time\nn = itertools.count().__next__"
    sources = {
        "sleeps": program("time.sleep(0.05); return 'WASD'[n() % 4]", counts),
        "spins": program(spin, counts),
        "sleeps at its load": program("return 'WASD'[n() % 4]", counts + "\ntime.sleep(0.5)"),
        "endless": program("while True: pass"),
        "endless at its load": program("return 'W'", "while True: pass"),
        "sleeps for ever": program("time.sleep(99)", "import time"),
        "honest": CORNER,
        "bad": ALWAYS_UP,
        "wrong": program("return 5"),
    }
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with SandboxPool(workers=2) as pool:
            start = time.monotonic() - begin
            limits = dict(move_s=60, game_s=60, deadline_s=1.5)
            rewards = StrategyRewards(pool, games=4, size=3, target=256, **limits)
            begin = time.monotonic()
            reports = rewards.judge([fenced(source) for source in sources.values()], "0 None")
            spent = time.monotonic() - begin
    found = dict(zip(sources, reports))
    assert {name for name, report in found.items() if "may take 1.5 s" in report.why} == {
        name for name in sources if name not in ("honest", "bad", "wrong")
    }
    assert found["honest"].stage == "plays" and len(found["honest"].games) == 4
    assert all(len(report.games) <= 4 for report in reports)
    assert spent <= math.ceil(len(sources) / 2) * 1.5 + start


def test_a_deadline_follows_from_the_games(pool, monkeypatch):
    seen = []
    monkeypatch.setattr(
        game2048, "deadline", lambda seconds: seen.append(seconds) or contextlib.nullcontext()
    )
    judge_strategy(fenced(ALWAYS_UP), pool, (0, 1), game_s=3.0)
    judge_strategy(fenced(ALWAYS_UP), pool, (0, 1), deadline_s=9)
    assert seen == [6.0, 9]


SUBCLASSES = "[].__class__.__base__.__subclasses__()"
ATTACKS = {
    "writes on the board": program("board[0][0] = 2048\n    return 'W'"),
    "replaces the rows": program("board[:] = [[2048] * 4] * 4\n    return 'W'"),
    "finds the game in the frames": program(
        "import sys\n    sys._getframe(1).f_locals['game'].target = 4\n    return 'W'"
    ),
    "walks the frames of an exception": program(
        "try: 1 / 0\n    except Exception as e:\n        f = e.__traceback__.tb_frame\n      "
        "  while f:\n            for v in list(f.f_locals.values()):\n                if "
        "hasattr(v, 'target'): v.target = 4\n            f = f.f_back\n    return 'W'"
    ),
    "looks among all classes": program(
        f"for c in {SUBCLASSES}:\n        if c.__name__ == 'Game2048': c.won = True\n    return 'W'"
    ),
    "changes the tiles to come": program(
        "random.random = lambda: 0.0\n    random.seed(0)\n    return 'W'", "import random"
    ),
    "changes the table of rows": program(
        "import functools\n    functools.cache = None\n    return 'W'"
    ),
    "loads a module by the loader": program(
        f"[c for c in {SUBCLASSES} if c.__name__ == "
        "'BuiltinImporter'][0].load_module('posix').system('true')\n    return 'W'"
    ),
    "forges an answer on the line": program("os.write(3, b'v' * 100)\n    return 'W'", "import os"),
    "claims to have won": program("return 'won'"),
    "returns the winning board": program("return [[2048] * 4] * 4"),
    "a long answer": program("return 'W' * 4_000_000"),
    "a string of its own kind": program(
        "return Move('W')",
        "class Move(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__",
    ),
    "numpy": program("return 'W'", "import numpy"),
    "numpy by another route": program("return 'W'", "__import__('num' + 'py')"),
    "threads": program("return 'W'", "import threading"),
    "plays, then fails": program(
        "global n\n    n += 1\n    if n > 3: raise ValueError\n    return 'WASD'[n % 4]", "n = 0"
    ),
    "stops in time": program(
        "global n\n    n += 1\n    if n > 100: raise SystemExit\n    return 'WASD'[n % 4]", "n = 0"
    ),
    "a dictionary that collides": program("return {i * (2**61 - 1): 1 for i in range(100)}"),
    "prints": program("print('won', flush=True)\n    return 'W'"),
}


@pytest.fixture(scope="module")
def judged_once(pool):
    "An honest failure, chance, a good strategy and all attacks."
    texts = [
        fenced(source)
        for source in (
            ALWAYS_UP,
            MISSING,
            program("return random.choice('WASD')", "import random\nrandom.seed(0)"),
            CORNER,
            *ATTACKS.values(),
        )
    ]
    return StrategyRewards(pool, secret="5", move_s=5.0, game_s=30), texts


@pytest.mark.parametrize("scale", ["plain", "published"])
def test_no_attack_earns_more_than_an_honest_failure(judged_once, scale):
    once, texts = judged_once
    rewards = StrategyRewards(scale=scale)
    rewards.reports = once.reports
    totals = [
        sum(points)
        for points in zip(*(reward(completions=texts) for reward in rewards.functions()))
    ]
    bar, missing, chance, corner, *attacks = totals
    stages = [report.stage for report in rewards.reports(texts, {})[4:]]
    most = {name: min(total, bar) for name, total in zip(ATTACKS, attacks)}
    assert dict(zip(ATTACKS, attacks)) == most and stages.count("unavailable") < 4
    assert missing < bar < chance and (corner > chance or scale == "published")


# rewards


def test_the_published_scale(pool):
    winner, texts = (
        program("return random.choice('WASD')", "import random\nrandom.seed(0)"),
        {},
    )  # seeded: one game in some hundreds is lost by chance
    texts.update(
        won=fenced(winner),
        up=fenced(ALWAYS_UP),
        fails=fenced(program("1 / 0")),
        endless=fenced(program("while True: pass")),
        numpy=fenced("import numpy\n" + ALWAYS_UP),
        missing=fenced(MISSING),
        syntax=fenced("def strategy(board) return 1"),
        nothing="Push.",
        cut=fenced(CORNER)[:50],
        illegal=fenced(program("return 5")),
    )
    rewards = StrategyRewards(pool, scale="published", target=32, secret="3", move_s=1.0)
    by_name = {
        f.__name__: dict(
            zip(
                texts,
                f(
                    prompts=["?"] * len(texts),
                    completions=list(texts.values()),
                    completion_ids=None,
                ),
            )
        )
        for f in rewards.functions()
    }
    assert by_name["function_works"] == dict(
        won=1.0,
        up=1.0,
        fails=-0.5,
        endless=-0.5,
        numpy=-0.5,
        missing=-2.0,
        syntax=-2.0,
        nothing=-2.0,
        cut=0.0,
        illegal=-0.5,
    )
    assert by_name["no_cheating"] == dict(
        won=1.0,
        up=1.0,
        fails=1.0,
        endless=1.0,
        numpy=-20.0,
        missing=-1.0,
        syntax=-1.0,
        nothing=-1.0,
        cut=0.0,
        illegal=1.0,
    )
    assert by_name["strategy_succeeds"] == dict(
        won=20.0,
        up=-1.0,
        fails=-3.0,
        endless=-1.0,
        numpy=0.0,
        missing=0.0,
        syntax=0.0,
        nothing=0.0,
        cut=0.0,
        illegal=-3.0,
    )
    totals = {name: sum(points[name] for points in by_name.values()) for name in texts}
    assert totals["missing"] <= min(totals[name] for name in texts if name != "numpy")
    lost = GameRecord(0, "W", 4, 4, "lost")
    assert [
        game_points(GameRecord(0, "W", 4, 4, end), "published")
        for end in ("lost", "memory", "output", "crash", "stuck")
    ] == [2.0, -3.0, -3.0, -3.0, -1.0]
    assert (
        game_points(GameRecord(0, "W", 20480, 2048, "won"), "plain") == 2.0
        and game_points(lost, "plain") == -1.0
    )


def test_the_plain_scale(pool):
    texts = [
        fenced(CORNER),
        fenced(ALWAYS_UP),
        fenced(program("1 / 0")),
        fenced("import numpy\n" + CORNER),
        "Push.",
        fenced(CORNER)[:50],
        fenced(CORNER),
        fenced(MISSING),
    ]
    rewards = StrategyRewards(pool, secret="3", games=2, game_s=30)
    works, honest, success = (f(completions=texts) for f in rewards.functions())
    assert works[:7] == honest[:7] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert (works[7], honest[7], success[7]) == (0.0, 0.0, 0.0)
    seeds = [game.seed for game in rewards.reports(texts, {})[0].games]
    expected, up = (
        statistics.mean(progress(play(trusted(source), seed).score) for seed in seeds)
        for source in (CORNER, ALWAYS_UP)
    )
    assert (
        success == pytest.approx([expected, up, 0.0, 0.0, 0.0, 0.0, expected, 0.0])
        and up < -0.9
        and len(set(seeds)) == 2
    )


@pytest.mark.parametrize("scale", ["plain", "published"])
def test_a_completion_that_was_cut_off_is_scored_apart(pool, scale):
    texts = [fenced(ALWAYS_UP), fenced(CORNER)[:50], "analysisLet me think"]
    for truncated, rest in ((None, None), (-0.5, 0.0), (0.0, 0.0)):
        rewards = StrategyRewards(pool, scale=scale, truncated=truncated, games=1)
        assert [f(completions=texts)[1:] for f in rewards.functions()] == [
            [truncated] * 2,
            [rest] * 2,
            [rest] * 2,
        ]
        assert None not in [f(completions=texts)[0] for f in rewards.functions()]


def test_a_batch_is_judged_once_and_the_next_one_anew(pool, monkeypatch):
    judged = []
    monkeypatch.setattr(
        game2048,
        "judge_strategy",
        lambda text, pool, seeds, **settings: (
            judged.append((text, seeds)) or StrategyReport(Program(None), "no code", "")
        ),
    )
    rewards = StrategyRewards(pool, games=3)
    texts = ["a", "b", "a", "c"]

    def step(k):
        return [
            f(completions=texts, trainer_state=types.SimpleNamespace(global_step=k))
            for f in rewards.functions()
        ]

    step(0)
    assert (
        sorted(text for text, _ in judged) == ["a", "b", "c"]
        and len({seeds for _, seeds in judged}) == 1
        and len(judged[0][1]) == 3
    )
    step(1)
    assert (
        len(judged) == 6 and len({seeds for _, seeds in judged}) == 2
    )  # other games at the next step
    first, second = (StrategyRewards(pool, secret="nine") for _ in range(2))
    for rewards, at in ((first, 4), (second, 4), (first, 5)):
        rewards.reports(["a"], {"trainer_state": types.SimpleNamespace(global_step=at)})
    assert judged[-3] == judged[-2] != judged[-1]  # on two processes; at the next step


def test_reward_functions_that_ask_at_the_same_time():
    calls = []
    once = OnceABatch(
        lambda texts, drawn_from: (
            calls.append(texts),
            time.sleep(0.05),
            [text.upper() for text in texts],
        )[2]
    )
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(once(["a", "b", "a"], {}))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [["a", "b"]] and found == [["A", "B", "A"]] * 4


def test_a_judge_that_fails_is_asked_again():
    answers = iter([RuntimeError("no"), ["A"]])

    def judge(texts, drawn_from):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    once = OnceABatch(judge)
    with pytest.raises(RuntimeError):
        once(["a"], {})
    assert once(["a"], {}) == ["A"]


def test_under_the_trainers_eyes(pool):
    rewards, logged = StrategyRewards(pool, games=1, secret="1"), {}
    completions = [
        [{"role": "assistant", "content": fenced(CORNER)}],
        [{"role": "assistant", "content": "no"}],
    ]
    table = score_completions(
        rewards.functions(),
        game2048_problems(2),
        completions,
        completion_ids=None,
        log_metric=lambda name, value: logged.update({name: value}),
    )
    assert (
        table.shape == (2, 3)
        and table[0, :2].tolist() == [1.0, 1.0]
        and table[1].tolist() == [0.0, 0.0, 0.0]
    )
    assert (
        logged["game2048/won"] == 0.0
        and logged["game2048/score"] == rewards.reports(completions, {})[0].games[0].score
    )
    assert [f.__name__ for f in rewards.functions()] == [
        "function_works",
        "no_cheating",
        "strategy_succeeds",
    ]


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="scale is 'nice', and it must be one of plain, published"):
        StrategyRewards(scale="nice")
    with pytest.raises(ValueError, match="games and workers must be at least 1, not 0 and 2"):
        StrategyRewards(games=0)
    with pytest.raises(TypeError, match="no settings of these names: speed; there are target"):
        StrategyRewards(speed=1)
    with pytest.raises(TypeError, match="no settings of these names: seed"):
        StrategyRewards(seed=1)
    with pytest.raises(ValueError, match="nothing to learn"):
        StrategyRewards(target=64)
    assert (
        StrategyRewards(target=64, scale="published").pool is None
    )  # a pool of its own starts with the first batch


def test_a_pool_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rewards = StrategyRewards(games=1, workers=1)
        assert rewards.function_works(completions=[fenced(ALWAYS_UP)]) == [1.0]
    rewards.pool.close()


def test_the_problems_and_their_example(pool):
    rows = game2048_problems(3, target=512, size=5, game_s=2)
    assert (
        len(rows) == 3
        and "5 x 5" in rows[0]["prompt"][0]["content"]
        and "512" in rows[0]["prompt"][0]["content"]
    )
    assert judge_strategy(rows[0]["prompt"], pool, size=5).stage == "plays"
