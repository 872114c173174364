"Every variant that can be chosen has a row in docs/decisions.md, and a row names what is there."

import re
from pathlib import Path

import pytest

from grpo_nb.kernels.compile_together import MODULES
from grpo_nb.model.adapters import IMPLEMENTATIONS
from grpo_nb.model.attention import BACKENDS
from grpo_nb.model.experts_grouped import PLAIN_FORMS
from grpo_nb.model.limits import KERNELS
from grpo_nb.rollout.decoder import Decoder

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/decisions.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
NAMED = {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])}
LINKED = set(re.findall(r"/\d\d_(\w+)\.ipynb", PAGE))


def kinds(of):
    "Names of a class and of those of the library that inherit from it."
    ours = [one for one in of.__subclasses__() if one.__module__.startswith("grpo_nb.")]
    return {of.__name__}.union(*map(kinds, ours))


CHOSEN = {
    "attention": {*KERNELS, *BACKENDS},
    "experts": {"reference", "many", *PLAIN_FORMS},
    "implementations": set(IMPLEMENTATIONS),
    "decoders": kinds(Decoder),
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_each_variant_has_a_row(kind):
    assert len(CHOSEN[kind]) > 1 and not CHOSEN[kind] - NAMED


def test_each_module_with_kernels_is_linked():
    assert not {name.rpartition(".")[2] for name in MODULES} - LINKED


def test_rows_name_what_is_there():
    source = " ".join(p.read_text() for p in (ROOT / "grpo_nb").rglob("*.py"))
    assert len(NAMED) > 20 and not [n for n in NAMED if not re.search(rf"\b{n}\b", source)]


def test_each_row_says_what_was_measured_or_that_nothing_was():
    rows = [row for row in ROWS if row[0] not in ("variant", "---")]
    assert rows and all(len(row) == 4 for row in rows), [row[0] for row in rows if len(row) != 4]
    say = re.compile(
        r"\d|by counting|not (timed|measured)|none|see |the formula|as above|always right|compared"
    )
    assert not [row[0] for row in rows if not say.search(row[3])]
