"A release: the version, the changelog and the table of versions, written by tools."

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = runpy.run_path(str(ROOT / "tools/release.py"))
VERSIONS = runpy.run_path(str(ROOT / "tools/versions.py"))


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "grpo_nb").mkdir()
    for name in ("settings.ini", "CHANGELOG.md", "grpo_nb/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    text = "# Changelog\n\n## [Unreleased]\n\n- A change.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    return tmp_path


def test_a_release_closes_the_part_that_was_open(checkout):
    TOOL["release"](checkout, "99.0.0", "2026-12-24")
    assert (
        "\n## [Unreleased]\n\n## [99.0.0] - 2026-12-24\n\n- A change.\n\n## [0.0.1]"
        in (checkout / "CHANGELOG.md").read_text()
    )
    (left,) = TOOL["differences"](checkout, "99.0.0")  # nbdev_export has not run here
    assert left == "grpo_nb/__init__.py does not say 99.0.0: run nbdev_export"
    assert len(TOOL["differences"](checkout, "99.0.1")) == 3


@pytest.mark.parametrize(
    "version, sentence",
    [("1.0", "give three numbers"), ("0.0.1", "is not above"), ("01.0.0", "give three numbers")],
)
def test_a_version_that_cannot_be_is_refused_and_nothing_written(checkout, version, sentence):
    before = (checkout / "CHANGELOG.md").read_text()
    with pytest.raises(ValueError, match=sentence):
        TOOL["release"](checkout, version, "2026-12-24")
    assert (checkout / "CHANGELOG.md").read_text() == before


def test_an_empty_release_is_refused(checkout):
    (checkout / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n")
    with pytest.raises(ValueError, match="say what has changed"):
        TOOL["release"](checkout, "99.0.0", "2026-12-24")
    assert "version = 99.0.0" not in (checkout / "settings.ini").read_text()


def test_the_oldest_packages_are_the_lower_bounds_and_the_table_has_their_row():
    settings = {
        "requirements": "torch>=2.9 transformers>=5.5 peft>=0.17 datasets>=4.0",
        "dev_requirements": "ruff==1 trl==1.16.0",
    }
    oldest = ["torch==2.9.*", "transformers==5.5.*", "peft==0.17.*", "trl==1.16.0"]
    assert VERSIONS["packages"](settings, "oldest") == oldest
    assert VERSIONS["others"](settings) == ["datasets>=4.0"]
    page = (ROOT / "docs/versions.md").read_text()
    versions = ["3.11.9", "2.9.1", "5.5.4", "0.17.1", "1.16.0"]
    made = VERSIONS["recorded"](page, "oldest", "failure", versions, "2026-12-24")
    row = "| oldest | 3.11.9 | 2.9.1 | 5.5.4 | 0.17.1 | 1.16.0 | **fail** | 2026-12-24 |"
    assert row in made and made.count("| oldest |") == 1 and "| newest |" in made
