"What scripts for Unsloth or TRL import: functions that are here, errors that say where others are."

import os
import signal
import subprocess
import sys

import pytest
import trl

import grpo_nb
from grpo_nb import _elsewhere as ADVICE
from grpo_nb import advice
from grpo_nb.compat.trl import GameServer, launch_openenv

SERVED = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

at = sys.argv.index("--port")
HTTPServer(("127.0.0.1", int(sys.argv[at + 1])), Quiet).serve_forever()
"""


@pytest.mark.parametrize("name", grpo_nb._theirs)
def test_names_that_notebooks_import_are_here(name):
    assert callable(getattr(grpo_nb, name))


@pytest.mark.parametrize("name", trl._import_structure and [n for n in dir(trl) if n[0] != "_"])
def test_every_name_of_trl_is_here_or_its_place_is_said(name):
    if getattr(trl, name).__class__.__name__ in ("module", "_LazyModule"):
        return
    if name in grpo_nb._rooms:
        assert callable(getattr(grpo_nb, name))
        return
    with pytest.raises(
        ImportError, match=f"grpo_nb has no {name}: .*(from trl import {name}|does)"
    ):
        exec(f"from grpo_nb import {name}")


def test_other_names_keep_pythons_error():
    with pytest.raises(ImportError, match="cannot import name 'nothing_of_theirs'"):
        from grpo_nb import nothing_of_theirs  # noqa: F401
    assert not hasattr(grpo_nb, "nothing_of_theirs") and advice("numpy") is None
    names = ("FastQwen3Model", "PatchFastRL", "UnslothTrainer", "standardize_sharegpt")
    assert all(advice(name) for name in names)
    assert len(ADVICE) < 30


def test_a_game_server_comes_up_is_kept_and_ends(tmp_path):
    (tmp_path / "uvicorn.py").write_text(SERVED)
    given = dict(
        working_directory=tmp_path, server="game:app", openenv_class=lambda base_url: base_url
    )
    port, game = launch_openenv(18471, None, **given)
    assert isinstance(game, GameServer) and game.endswith(str(port))
    assert launch_openenv(port, game, **given) == (port, game)
    os.kill(game.process.pid, signal.SIGKILL)
    game.process.wait()
    other, again = launch_openenv(port, game, **given)
    assert again is not game and again.process.poll() is None
    process = again.process
    del again
    assert process.wait(10) == -signal.SIGKILL


def test_a_game_server_that_does_not_come_up_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="no server came up; `uvicorn nowhere:app .* says why"):
        launch_openenv(18571, None, tmp_path, "nowhere:app")


def test_hasattr_of_a_submodule_imports_nothing_heavy():
    code = "import sys, grpo_nb; hasattr(grpo_nb, 'cli'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
