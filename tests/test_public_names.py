"Everything that other people's scripts import is there, and is called as it was."

import json

from public_names import RECORD, described, imported, shown_code

KEPT = json.loads(RECORD.read_text())


def test_public_names_are_called_as_before():
    changed = {path: found for path in KEPT if (found := described(path)) != KEPT[path]}
    assert not changed, {path: KEPT[path] for path in changed}


def test_what_pages_import_is_recorded():
    found = {path for code in shown_code() for path in imported(code)}
    assert not found - set(KEPT), "run python tests/public_names.py"
