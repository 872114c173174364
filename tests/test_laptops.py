"""The library on systems that are not here to try, each pretended in a process of its own
(laptop_child.py): Windows, and a device without float64 like Apple's GPU. The job `laptops` of the
workflow is the real thing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml

from grpo_nb.model import export, loading
from grpo_nb.training import reporting

ROOT = Path(__file__).parent.parent
# what `pip install .` cannot bring to Windows and macOS: modules that are Triton kernels throughout
KERNELS = {
    "grpo_nb.model.attention_kernel",
    "grpo_nb.kernels.training_kernels",
    "grpo_nb.rollout.decode_kernels",
    "grpo_nb.rollout.dense_kernels",
    "grpo_nb.rollout.expert_kernel",
    "grpo_nb.rollout.filter_kernels",
}
SPINE = [
    "lessons/01_what_rl_is",
    "algorithm/01_advantages",
    "algorithm/02_losses",
    "algorithm/03_batching",
    "tutorials/01_first_run",
    "lessons/02_when_the_reward_does_not_rise",
    "planning/01_plan",
    "tutorials/02_gpt_oss_20b_t4",
]


QUICK = "algorithm/01_advantages"


def notebook(name):
    return ROOT / "nbs" / f"{name}.ipynb"


def pretend(system, *arguments):
    "What a process on a pretended system found; text files are in ASCII there, output in cp1252."
    narrow = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "laptop_child.py"), system, *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **narrow, "PYTHONIOENCODING": "cp1252", "MPLBACKEND": "agg"},
        timeout=1200,
    )
    printed = done.stdout.decode("cp1252")
    assert done.returncode == 0, printed[-2000:] + done.stderr.decode("cp1252")[-6000:]
    return json.loads(printed.rpartition("RESULT")[2])


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    "What one process found that imports all modules, runs the demo and then a lesson."
    words = ["import", "demo", tmp_path_factory.mktemp("windows") / "run"]
    return pretend("windows", *words, "lesson", notebook(QUICK))


@pytest.mark.long
def test_windows_imports_everything_but_kernels(windows):
    failed = windows["import"]
    assert failed.keys() <= KERNELS
    assert all("triton" in sentence for sentence in failed.values())


def test_windows_runs_the_demo_and_resumes_it(windows):
    "Checkpoints are written, renamed, deleted and read with nothing of theirs still open."
    found = windows["demo"]
    assert found["same"] and found["first"]["accuracy_after"] == found["second"]["accuracy_after"]


def test_windows_runs_a_lesson(windows):
    assert windows["lesson"] > 3


@pytest.mark.full
@pytest.mark.parametrize("name", SPINE)
def test_windows_runs_the_eight_lessons(name):
    assert pretend("windows", "lesson", notebook(name))["lesson"] > 3


def test_the_eight_lessons_are_on_the_two_paths():
    text = "".join(
        "".join(cell["source"])
        for cell in json.loads((ROOT / "index.ipynb").read_text(encoding="utf-8"))["cells"]
    )
    tables = text.partition("<b>The afternoon</b>")[2].partition("<b>Subjects</b>")[0]
    assert set(SPINE) <= {part.partition(".ipynb")[0] for part in tables.split("](nbs/")[1:]}


@pytest.fixture(scope="module")
def apple(tmp_path_factory):
    "What one process found that computes and then trains."
    return pretend("apple", "numbers", "train", tmp_path_factory.mktemp("apple"))


@pytest.mark.long
def test_a_device_without_float64_computes_the_same_numbers(apple):
    "Tokens, packed weights and tables are those of the CPU, where the float64 is."
    found = dict(apple["numbers"])
    assert found.pop("float64") is False
    dtype, low, high, mean = found.pop("uniform")
    assert dtype == "torch.float64" and 0 <= low < 1e-3 and 0.999 < high < 1
    assert abs(mean - 0.5) < 4 / math.sqrt(12 * 100_000)
    assert found.pop("finer than float32") > 0.9
    assert all(found.values()), found


def test_a_run_uses_apples_gpu_only_where_it_is_asked_to(apple):
    found = apple["train"]
    assert found["here"]["device"] == "cpu" and loading.LEFT_ALONE in found["here"]["says"]
    there = found["there"]
    assert there["device"] == "apple" and loading.LEFT_ALONE not in there["says"]
    assert [record["step"] for record in there["records"]] == [1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in there["records"])
    # the sampler's log-probs are the trainer's, but for what top_p = 0.95 divides by
    gaps = [record["sampling/gap_max"] for record in there["records"]]
    assert max(gaps) <= -math.log(0.95) + 1e-5
    assert there["same"]  # from its checkpoint the run ends with the same bits


def test_without_apples_gpu_nothing_is_left_alone(monkeypatch):
    there, here = (SimpleNamespace(device=torch.device(d)) for d in ("mps", "cpu"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert not any(map(loading.stays_on_cpu, (there, here, "a/name")))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [*map(loading.stays_on_cpu, (there, here, "a/name"))] == [False, True, True]


def test_memory_is_measured_without_the_module_resource(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert 0.05 < reporting.peak_memory_gib() < 64
    windows = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1, peak_wset=2**31))
    monkeypatch.setattr(psutil, "Process", lambda: windows)
    assert reporting.peak_memory_gib() == 2


def test_memory_of_apples_gpu_is_what_torch_holds(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * 2**29)
    assert reporting.peak_memory_gib("mps") == 1.5


def test_a_flush_asks_windows_for_what_it_can_do(tmp_path, monkeypatch):
    "No folder is opened, and files are opened for writing."
    opened = []
    (tmp_path / "file").touch()
    system = SimpleNamespace(name="nt", O_RDWR=os.O_RDWR, O_RDONLY=os.O_RDONLY)
    system.open = lambda path, flags: opened.append((path.name, flags)) or 7
    system.fsync = system.close = lambda descriptor: None
    monkeypatch.setattr(export, "os", system)
    export._sync(tmp_path), export._sync(tmp_path / "file")
    assert opened == [("file", os.O_RDWR)]


def test_the_workflow_tries_what_is_pretended_here():
    "The jobs import the library, run the demo and a lesson on real systems."
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["laptops"]
    assert {"macos-latest", "windows-latest"} <= set(job["strategy"]["matrix"]["os"])
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    for part in ("import grpo_nb", "grpo-nb demo", "tools/notebooks.py run"):
        assert part in commands
