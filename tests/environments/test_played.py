"Python in the sandbox as a tool, and 2048 played move by move."

import time

import pytest
from small_runs import one_thread, small_trainer  # noqa: F401

from grpo_nb.environments.game2048 import Game2048
from grpo_nb.environments.played import PlayedGame, ProgramError, python_tool
from grpo_nb.environments.sandbox import SandboxPool
from grpo_nb.rollout.turns import Environments, as_call, event_loop, run_calls, tool_schemas


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(workers=2) as made:
        yield made


@pytest.mark.parametrize(
    "code, said",
    [
        ("47*86", "4042\n"),
        ("print(1, 2, sep='-', end='')\n'a'", "1-2'a'\n"),
        ("x = 3", ""),
        ("None", ""),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(10)", "3628800\n"),
        ("from fractions import Fraction\nFraction(1, 3) + 1", "Fraction(4, 3)\n"),
        ("", ""),
    ],
)
def test_what_is_printed_and_the_last_value_come_back(pool, code, said):
    assert python_tool(pool)(code) == said


@pytest.mark.parametrize(
    "code, said",
    [
        ("a = 1\n\nb = a / 0", "ZeroDivisionError: division by zero .line 3."),
        ("x = (1", "SyntaxError"),
        ("open('/etc/passwd')", "ForbiddenCall"),
        ("import socket", "no module 'socket'"),
        ("exit(3)", "3"),
        ("1 +\x00 1", "null bytes|source code"),
    ],
)
def test_a_program_that_fails_says_why(pool, code, said):
    with pytest.raises(ProgramError, match=said):
        python_tool(pool)(code)


def test_a_program_begins_anew_and_is_ended_at_its_deadline(pool):
    tool = python_tool(pool, most=5)
    assert tool("x = 1\n'abcdefgh'") == "'abcd ... (6 more characters)"
    with pytest.raises(ProgramError, match="NameError"):
        tool("x")
    tool = python_tool(pool, timeout_s=1)
    began = time.monotonic()
    calls = [[as_call("python", {"code": "while True: pass"})], [as_call("python", {"code": "2"})]]
    late, quick = run_calls(calls, [{"python": tool}] * 2, 30, event_loop())
    assert time.monotonic() - began < 20 and not late[0][2]
    assert late[0][1] and "no answer within 1 s" in late[0][0]["content"]
    assert quick[0][0]["content"] == "2\n"


def test_the_tools_describe_themselves(pool):
    (schema,) = tool_schemas([python_tool(pool)])
    assert schema["function"]["name"] == "python"
    (schema,) = Environments(PlayedGame).schemas[None]
    assert list(schema["function"]["parameters"]["properties"]) == ["direction"]


def test_a_game_is_that_of_its_seed():
    one, same = PlayedGame(), Game2048(seed=5, target=32, size=3)
    shown = one.reset(seed=5, target=32, size=3, prompt="unused")
    for word, move in (("left", "A"), (" Up", "W"), ("RIGHT", "D"), ("down", "S")) * 4:
        if same.over:
            break
        moved = same.move(move)
        answer = one.move(word)
        assert one.game.board == same.board and answer.startswith("nothing moved") != moved
    digits = [row.split() for row in one._board().strip().split("\n")]
    assert digits == [[str(t) if t else "." for t in row] for row in same.board]
    assert one.reset(seed=5, target=32, size=3) == shown and one.moves == ""


@pytest.mark.parametrize(
    "best, target, reward",
    [(2, 64, 0), (4, 64, 0), (16, 64, 0.5), (64, 64, 1), (128, 64, 1), (8, 16, 0.5)],
)
def test_doublings_count_alike(best, target, reward):
    one = PlayedGame()
    one.reset(target=target)
    one.game.board = ((best, 0, 0, 0), *one.game.board[1:3], (0, 0, 0, 2))
    one.game.board = tuple(tuple(min(t, best) for t in row) for row in one.game.board)
    assert one.get_reward() == pytest.approx(reward)


def test_a_game_that_is_over_stands_still():
    one = PlayedGame()
    one.reset(target=8, size=2)
    with pytest.raises(ValueError, match="one of up, left, down, right, not 'north'"):
        one.move("north")
    said = ""
    for turn in range(200):
        said = one.move(["left", "down", "right", "up"][turn % 4])
        if said == "the game is over":
            break
    board = one.game.board
    assert said == one.move("left") == "the game is over" and one.game.board == board
    assert one.game.over or one.game.won
