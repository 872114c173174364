"Python in the sandbox as a tool, and 2048 played move by move."

import importlib.util
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from small_runs import one_thread, small_trainer  # noqa: F401

from grpo_nb.environments.game2048 import Game2048
from grpo_nb.environments.played import PlayedGame, ProgramError, RemoteGame, observed, python_tool
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


class Client:
    "A client that says what it was asked, and ends an episode at its third step."

    def __init__(self):
        self.asked = []

    def reset(self, **options):
        self.asked = [options]
        return SimpleNamespace(observation="begin", reward=None, done=False)

    def step(self, action):
        self.asked.append(action)
        seen = {"steps": len(self.asked) - 1}
        return SimpleNamespace(observation=seen, reward=0.25, done=len(self.asked) == 4)

    def close(self):
        self.asked = None


class Steps(RemoteGame):
    made = 0

    def _connect(self):
        Steps.made += 1
        return Client()

    def go(self, word: str) -> str:
        """
        Go on.

        Args:
            word: anything
        """
        return self._step({"word": word})


def test_a_game_on_a_server():
    with Environments(Steps) as environments:
        assert [s["function"]["name"] for s in environments.schemas[None]] == ["go"]
        (one,) = environments.take([{"prompt": "p"}])
        assert one.reset(options={"seed": 3}, prompt="p") == "\nbegin"
        said = [one.go("a"), one.go("b"), one.go("c"), one.go("d")]
        assert said[0] == '{"steps": 1}' and said[2] == '{"steps": 3}\nthe episode is over'
        assert said[3] == "the episode is over"
        assert one.client.asked == [{"seed": 3}, *({"word": w} for w in "abc")]
        assert environments.rewards()[0](environments=[one]) == [0.75]
        one.reset()
        assert one.get_reward() == 0 and Steps.made == 1
    assert one.client is None
    with pytest.raises(NotImplementedError, match="define _connect"):
        RemoteGame().reset()


def test_observations_are_text():
    assert observed("a\nb") == "a\nb" and observed([1, {"a": None}]) == '[1, {"a": null}]'
    model = SimpleNamespace(model_dump=lambda: {"x": 1})
    assert observed(model) == '{"x": 1}'


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    number: int

class Hint(Observation):
    hint: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **options):
        self.number = seed or 5
        return Hint(hint="1 to 9", done=False, reward=None)
    def step(self, action, timeout_s=None, **options):
        right = action.number == self.number
        return Hint(hint="right" if right else "wrong", done=right, reward=float(right))
    @property
    def state(self):
        return State()

uvicorn.run(create_app(Game, Guess, Hint), port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.full
def test_a_server_of_openenv(tmp_path):
    "With the package itself, where it is installed: uv pip install openenv-core==0.3.0"
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv-core is not installed")
    from openenv.core import GenericEnvClient

    class Guesses(RemoteGame):
        def _connect(self):
            return GenericEnvClient(base_url="http://127.0.0.1:8391").sync()

    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), "8391"]
    with subprocess.Popen(command, env={**os.environ, "ENABLE_WEB_INTERFACE": "false"}) as server:
        try:
            one, ends = Guesses(), time.monotonic() + 120
            while True:
                try:
                    first = one.reset(options={"seed": 7})
                    break
                except (OSError, ConnectionError):
                    assert time.monotonic() < ends, "the server did not come"
                    time.sleep(0.5)
            assert "1 to 9" in first and "wrong" in one._step({"number": 3})
            assert one.get_reward() == 0 and not one.done
            assert "right" in one._step({"number": 7}) and one.get_reward() == 1 and one.done
            one.close()
        finally:
            server.terminate()
