"Everything that other people's scripts import is there, and is called as it was."

import json
from importlib import import_module

from public_names import RECORD, described, imported, shown_code

import grpo_nb

KEPT = json.loads(RECORD.read_text())


def test_public_names_are_called_as_before():
    changed = {path: found for path in KEPT if (found := described(path)) != KEPT[path]}
    assert not changed, {path: KEPT[path] for path in changed}


def test_a_path_of_the_last_release_gives_the_module_itself():
    for old, room in grpo_nb._moved.items():
        module = import_module(f"grpo_nb.{room}.{old.rpartition('.')[2]}")
        assert import_module(f"grpo_nb.{old}") is module
        assert module.__spec__.name == module.__name__


def test_what_pages_import_is_recorded():
    found = {path for code in shown_code() for path in imported(code)}
    assert not found - set(KEPT), "run python tests/public_names.py"
