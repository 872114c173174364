"Everything that other people's scripts import is there, and is called as it was."

import json
from importlib import import_module

import pytest
from public_names import RECORD, as_before, described, imported, shown_code

import grpo_nb

KEPT = json.loads(RECORD.read_text())


def test_public_names_are_called_as_before():
    found = {path: described(path) for path in KEPT}
    changed = {path: found[path] for path in KEPT if not as_before(KEPT[path], found[path])}
    assert not changed, {path: KEPT[path] for path in changed}


@pytest.mark.parametrize(
    "now, same",
    [
        ("(a, b=1, *, c=2)", True),
        ("(a, b=1, d=3, *, c=2, e=None)", True),
        ("(a, b=1, *others, c=2, **more)", True),
        ("(a, b=1, c=2)", False),  # it had no place
        ("(a, d=3, b=1, *, c=2)", False),  # another place
        ("(a, b=2, *, c=2)", False),  # another default
        ("(a, b=1, *, c=2, d)", False),  # more is wanted
        ("(a, *, c=2)", False),
        ("", False),
    ],
)
def test_what_is_added_may_be_left_out(now, same):
    assert as_before({"": "(a, b=1, *, c=2)"}, {"": now, ".more": "(self)"}) is same


def test_a_path_of_the_last_release_gives_the_module_itself():
    for old, room in grpo_nb._moved.items():
        module = import_module(f"grpo_nb.{room}.{old.rpartition('.')[2]}")
        assert import_module(f"grpo_nb.{old}") is module
        assert module.__spec__.name == module.__name__
    for old, now in grpo_nb._joined.items():
        assert import_module(f"grpo_nb.{old}") is import_module(f"grpo_nb.{now}")


def test_what_pages_import_is_recorded():
    found = {path for code in shown_code() for path in imported(code)}
    assert not found - set(KEPT), "run python tests/public_names.py"
