"A release: the version, the changelog and the table of versions, written by tools."

import re
import runpy
import shutil
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize(
    "versions, sentence",
    [
        (["3.11.9", "2.9.0", "5.5.0", "0.17.0"], "4 versions, and there are 5"),
        (["3.11.9", "2.9.0", "5.5.0", "0.17.0", "1|[x](http://y)"], "is no version"),
        (["3.11.9", "2.9.0", "5.5.0", "0.17.0", "$(true)"], "is no version"),
        (["3.11.9", "2.9.0", "5.5.0", "0.17.0", "9" * 50], "is no version"),
    ],
)
def test_what_a_job_with_other_peoples_code_says_is_a_row_of_versions(versions, sentence):
    page = (ROOT / "docs/versions.md").read_text()
    with pytest.raises(ValueError, match=sentence):
        VERSIONS["recorded"](page, "oldest", "success", versions, "2026-12-24")


WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
RUNS_OTHERS = re.compile(r"\b(pip|uv|pipx|conda|npm|curl|wget|pytest|build|grpo-nb|\.ci/run)\b")


def steps_of(name, job):
    return WORKFLOWS[name]["jobs"][job]["steps"]


def may_write(name, job):
    rights = WORKFLOWS[name]["jobs"][job].get("permissions", WORKFLOWS[name]["permissions"])
    return rights == "write-all" or "write" in rights.values()


@pytest.mark.parametrize("name, job", JOBS)
def test_what_installs_packages_or_runs_them_writes_nothing(name, job):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in steps_of(name, job) if "run" in step]
    writes = may_write(name, job)
    assert not (writes and RUNS_OTHERS.search("\n".join(commands)))
    for step in steps_of(name, job):
        if step.get("uses", "").startswith("actions/checkout@") and not writes:
            assert step["with"]["persist-credentials"] is False
    assert not any("${{ needs" in command for command in commands)  # it comes by the environment


@pytest.mark.parametrize("name", WORKFLOWS)
def test_an_action_is_a_commit_and_its_release_stands_beside_it(name):
    text = (ROOT / ".github/workflows" / name).read_text()
    used = re.findall(r"uses: *(.*)", text)
    assert used and all(
        re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used
    )


def test_the_index_gets_what_was_made_where_nothing_else_ran():
    made = steps_of("release.yml", "build")
    commands = [step["run"].split(" ")[:3] for step in made if "run" in step]
    assert [" ".join(words[:3]) for words in commands] == [
        "python tools/release.py --check",
        "pip install -q",
        "python -m build",
    ] and made[-2]["run"] == "python -m build"
    assert made[-1]["uses"].startswith("actions/upload-artifact@")
    others = [job for name, job in JOBS if name == "release.yml" and job != "build"]
    for job in others:
        assert not any("upload-artifact" in str(step) for step in steps_of("release.yml", job))
    assert WORKFLOWS["release.yml"]["jobs"]["publish"]["needs"] == ["build", "check"]
    site = [str(step) for step in steps_of("pages.yml", "site")]
    uploaded = next(i for i, step in enumerate(site) if "upload-pages-artifact" in step)
    assert uploaded < next(i for i, step in enumerate(site) if "'pytest " in step)
