"The command `grpo-nb`: what it refuses, what it says, and what it leaves behind."

import errno
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from small_runs import small_model

import grpo_nb
from grpo_nb import cli, script
from grpo_nb.model.memory_bytes import MODELS
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.stand_in import StandIn, serving
from grpo_nb.training import checkpoint

ROOT = Path(__file__).resolve().parent.parent


def call(*arguments):
    "A real `grpo-nb` process that may not import anything heavy before it has refused."
    guard = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', "
        "'grpo_nb.demo'])); from grpo_nb.cli import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", guard, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "grpo_nb.demo"]))
from grpo_nb.cli import main
told = []
for words in json.load(sys.stdin):
    out, error, sys.argv = io.StringIO(), io.StringIO(), ["grpo-nb", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main()
        except SystemExit as stop:
            status = stop.code or 0
    told.append((status, out.getvalue(), error.getvalue()))
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def said():
    """(exit status, output, errors) of a command; one process, that may not import anything heavy,
    has run all of REFUSED and HELP."""
    commands = [[*map(str, arguments)] for arguments, _ in (*REFUSED, *HELP)]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return lambda arguments: told[commands.index([*map(str, arguments)])]


@pytest.fixture
def runs(monkeypatch):
    "The calls that reached `run_demo`, which here only remembers them."
    seen = []

    def run_demo(one_run, **arguments):
        assert one_run.path.exists()  # no other run enters meanwhile
        seen.append(arguments)

    monkeypatch.setitem(sys.modules, "grpo_nb.demo", types.SimpleNamespace(run_demo=run_demo))
    return seen


REFUSED = [
    ((), "COMMAND"),
    (("dmeo",), "invalid choice"),
    (("demo", "--steps", "0"), "from 1 to 1000000"),
    (("demo", "--steps", "-3"), "from 1 to 1000000"),
    (("demo", "--steps", "ten"), "'ten' is no whole number"),
    (("demo", "--steps", "2.5"), "'2.5' is no whole number"),
    (("demo", "--seed", "-1"), "from 0 to 4294967295"),
    (("demo", "--seed", 2**32), "from 0 to 4294967295"),
    (("demo", "--seed", "nan"), "'nan' is no whole number"),
    (("demo", "--out", "/dev/null"), "cannot be written"),
    (("demo", "--out", "/dev/null/inside"), "cannot be written"),
    (("demo", "--out", "/proc/grpo"), "cannot be written"),
    (("demo", "--resume", "--out", "/tmp/there-is-no-such-run"), "no run to resume"),
    (("demo", "--save-steps", "0"), "from 1 to"),
    (("doctor", "--jsno"), "--jsno"),
    (("plan", "gpt-5"), "nothing is looked up"),
    (("plan", "Llama-3.1-8B", "--format", "mxfp4"), "has no experts"),
    (("plan", "--format", "int3"), "invalid choice"),
    (("plan", "--card", "H300"), "Give one of T4"),
    (("plan", "--memory", "-1"), "write 16GB"),
    (("plan", "--memory", "0GB"), "more than 0"),
    (("plan", "--memory", "nan"), "write 16GB"),
    (("plan", "Llama-3.1-8B", "--format", "nf4", "--lora-r", "0"), "do not train"),
    (("plan", "--context", "0"), "from 2 on"),
    (("plan", "--context", "512", "--prompt", "512"), "leave room for a completion"),
    (("plan", "Qwen3-4B", "--offload", "embedding"), "cannot be offloaded"),
    (("plan", "--no-checkpointing", "--offload", "layer-inputs"), "leave it on"),
    (("plan", "--sampler", "vllm"), "--sampler"),
    (("plan", "gpt-oss-20b", "--write", "fits.yaml"), "is for a recipe"),
    (("plan", "--cards", "0"), "from 1 on"),
    (("plan", "--cards", "3", "--prompts", "1"), "Set generation_batch_size=24"),
    (("plan", "no_such.yaml"), "no_such.yaml cannot be read"),
    (("train",), "model_name_or_path is missing"),
    (("train", "--config", "no_such.yaml"), "no_such.yaml cannot be read"),
    (("train", "--learning_rte", "1"), "the nearest is 'learning_rate'"),
    (("train", "--learning-rate"), "expected one argument"),
    (("train", "--learning_rat", "1e-5"), "the nearest is 'learning_rate'"),
    (("train", "--beta", "much"), "beta is 'much', but it has to be a number in [0, inf)"),
    (("train", "--ignore_data_skip"), "ignore_data_skip=True cannot be honoured"),
]


@pytest.mark.parametrize("arguments, sentence", REFUSED)
def test_refused_with_a_sentence_before_any_work(arguments, sentence, said):
    status, out, error = said(arguments)
    assert status == 2, error
    assert sentence in error and "Traceback" not in error and not out


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = call("demo", "--out", tmp_path)
    assert done.returncode == 2 and "thesis.tex" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


HELP = [
    (("--help",), ("demo", "plan", "doctor")),
    (
        ("plan", "--help"),
        ("--card", "--context", "--lora-r", "--offload", "--json", "Exit status 0"),
    ),
    (("demo", "--help"), ("--steps", "--seed", "--out", "--resume", "--save-steps")),
    (("doctor", "--help"), ("--json",)),
    (("train", "--help"), ("--config", "--resume", "--lora_r", "--learning_rate", "adapter")),
    (("--version",), (version("grpo_nb"),)),
]


@pytest.mark.parametrize("arguments, words", HELP)
def test_help_needs_nothing_heavy(arguments, words, said):
    status, out, _ = said(arguments)
    assert status == 0 and all(word in out for word in words)


DEFAULTS = dict(seed=0, out="runs/demo", resume=False, quiet=False)
DEFAULTS |= dict.fromkeys(["steps", "save_steps", "model"])


def test_arguments_reach_the_demo(runs, tmp_path):
    out = str(tmp_path / "new" / "run")
    flags = dict(steps=7, seed=3, save_steps=2, out=out, model="tiny")
    words = [word for name, x in flags.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    assert cli.main(["demo", *words, "--quiet"]) == 0
    assert runs == [flags | dict(resume=False, quiet=True, bars=False)]


def test_the_demo_takes_what_it_is_given():
    from grpo_nb.demo import run_demo

    inspect.signature(run_demo).bind(**DEFAULTS, bars=True)


def test_defaults(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main(["demo"]) == 0
    assert runs == [DEFAULTS | dict(bars=True)]


def test_resume_keeps_the_settings_of_the_run(runs, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    cli.main(["demo", "--seed", "3", "--steps", "5", "--save-steps", "2", *out])
    assert cli.main(["demo", "--resume", *out]) == 0
    assert cli.main(["demo", "--resume", "--steps", "9", "--save-steps", "4", *out]) == 0
    assert cli.main(["demo", "--resume", "--seed", "4", *out]) == 2
    assert "--seed 3" in capsys.readouterr().err
    assert [(r["seed"], r["steps"], r["save_steps"], r["resume"]) for r in runs] == [
        (3, 5, 2, False),
        (3, 5, 2, True),
        (3, 9, 4, True),
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_damaged_marker_is_named_and_stays(runs, content, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "demo.json").write_bytes(content)
    assert cli.main(["demo", "--resume", "--out", str(out)]) == 2
    assert "is damaged, so the seed" in capsys.readouterr().err
    assert (out / "demo.json").read_bytes() == content and not runs


def test_a_marker_of_an_earlier_version(runs, tmp_path):
    (tmp_path / "demo.json").write_text('{"seed": 2, "steps": 9}')
    assert cli.main(["demo", "--resume", "--out", str(tmp_path)]) == 0
    assert (runs[0]["seed"], runs[0]["steps"], runs[0]["save_steps"]) == (2, 9, None)


def test_a_second_run_moves_the_first_aside(runs, tmp_path, capsys):
    out = tmp_path / "run"
    for seed in "012":
        cli.main(["demo", "--seed", seed, "--out", str(out)])
    seeds = {p.name: json.loads((p / "demo.json").read_text())["seed"] for p in tmp_path.iterdir()}
    assert seeds == {"run": 2, "run-1": 0, "run-2": 1}
    assert str(tmp_path / "run-2") in capsys.readouterr().out


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    "error, status, words",
    [
        (KeyboardInterrupt(), 130, "Stopped. To go on with what was saved: "),
        (SystemExit(143), 143, "Stopped. To go on with what was saved: "),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full: "),
        (RuntimeError(f"Error while serializing: {FULL}"), 1, "the disk is full: "),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "Permission denied. Then go on: "),
    ],
)
def test_the_last_line_says_how_to_go_on(error, status, words, monkeypatch, tmp_path, capsys):
    def stopped(**_):
        raise error

    monkeypatch.setitem(sys.modules, "grpo_nb.demo", types.SimpleNamespace(run_demo=stopped))
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["demo", "--out", str(tmp_path / "my run")]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert words in last and last.endswith(f"grpo-nb demo --resume --out '{tmp_path}/my run'")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_full_disk_is_not_said_to_be_standard_output(monkeypatch, tmp_path, capsys):
    "A device on which every write fails stands for the disk."

    def full(*_, **__):
        with open("/dev/full", "w") as file:
            file.write("{}")

    run = str(ROOT / "recipes/tiny_arithmetic.yaml")
    assert cli.main(["plan", run, "--card", "H100", "--write", "/dev/full"]) == 2
    assert capsys.readouterr().err.startswith("grpo-nb plan: the disk is full: /dev has")
    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["demo", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"grpo-nb demo: the disk is full: {tmp_path}/run has")


def test_a_value_that_cannot_be_used_is_no_traceback(monkeypatch, tmp_path, capsys):
    def refuses(**_):
        raise ValueError("the data has 3 rows, and had 4")

    monkeypatch.setitem(sys.modules, "grpo_nb.demo", types.SimpleNamespace(run_demo=refuses))
    assert cli.main(["demo", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "grpo-nb demo: the data has 3 rows, and had 4\n"


def test_a_server_that_is_away_is_no_traceback(monkeypatch, tmp_path, capsys):
    def away(*_):
        raise ServerError("no server answers at http://localhost:8000.")

    def said(status):
        assert cli.main(["train", "--config", "run.yaml"]) == status
        return capsys.readouterr().err

    monkeypatch.setattr(cli, "_ready", away)
    sentence = "grpo-nb train: no server answers at http://localhost:8000."
    assert said(2) == f"{sentence}\n"
    recipe = types.SimpleNamespace(config=types.SimpleNamespace(output_dir=tmp_path))
    monkeypatch.setattr(cli, "_ready", lambda _: (None, recipe))
    monkeypatch.setattr(script, "train_and_save", away)
    assert said(1) == f"{sentence[:-1]}\n"  # nothing was saved to go on with
    monkeypatch.setattr(checkpoint, "checkpoints", lambda _: ["checkpoint-1"])
    assert said(1) == f"{sentence} Then go on: grpo-nb train --config run.yaml --resume\n"


def test_the_last_line_of_a_run_says_what_to_look_at(runs, tmp_path, capsys):
    cli.main(["demo", "--out", str(tmp_path / "run")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Next: look at {tmp_path / 'run' / 'curves.png'}")
    lesson = last.split("/blob/main/")[1]
    assert (ROOT / lesson).exists()
    cli.main(["demo", "--quiet", "--out", str(tmp_path / "other")])
    assert capsys.readouterr().out == ""


@pytest.mark.long
@pytest.mark.parametrize(
    "name, status",
    [
        ("SIGINT", 130),
        pytest.param("SIGTERM", 143, marks=pytest.mark.full),
    ],  # by default in training
)
def test_a_signal_in_a_real_warm_up(name, status, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "grpo_nb", "demo", "--steps", "2", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = ""
    while "warming up" not in said and (more := process.stderr.read(1)):
        said += more  # the work has begun
    process.send_signal(getattr(signal, name))
    said = process.communicate(timeout=60)[1]
    assert (
        process.returncode == status
        and f"grpo-nb demo --resume --out {out}" in said
        and "Traceback" not in said
    )


def test_the_token_of_a_server_may_come_by_the_environment(monkeypatch):
    monkeypatch.setenv("GRPO_NB_API_KEY", "of the environment")
    given = cli._parser(["serve"]).parse_args(["serve", "tiny"])
    assert given.api_key == "of the environment"
    words = ["serve", "tiny", "--api-key", "own"]
    assert cli._parser(words).parse_args(words).api_key == "own"
    assert "of the environment" not in repr(cli._parser(["serve"]).format_help())


def test_doctor_reports_what_is_here():
    done = subprocess.run(
        [sys.executable, "-c", "from grpo_nb.cli import main; main(['doctor', '--json'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    found = {row["name"]: row["installed"] for row in facts["packages"]}
    assert {
        "torch",
        "transformers",
        "safetensors",
        "peft",
        "datasets",
        "accelerate",
        "ipywidgets",
        "anywidget",
        "matplotlib",
        "bitsandbytes",
        "vllm",
        "nbdev",
    } == set(found)
    assert found["torch"] == version("torch") and facts["devices"][0]["type"] == "cpu"


def test_doctor_says_where_compiled_kernels_are_kept(monkeypatch, tmp_path):
    "As torch and Triton themselves find the folders, by default and by their variables."
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    for name in (*names, "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    triton = pytest.importorskip("triton.knobs").cache.dir
    by_default = dict(zip(names, map(os.path.abspath, (default_cache_dir(), triton))))
    assert cli.kernel_folders() == by_default
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / names[0]).mkdir()
    lines = cli._lines(cli.report())
    at = lines.index("Compiled kernels are kept in")
    assert lines[at + 1] == f"  {tmp_path / names[0]} ({names[0]})"
    assert lines[at + 2] == f"  {tmp_path / names[1]}, which is not there yet ({names[1]})"


def test_doctor_works_for_a_user_without_a_name(monkeypatch):
    "Whose default folder torch cannot name before 2.13 (pytorch/pytorch#140765)."
    from torch._inductor.runtime import cache_dir_utils

    def fails():
        raise KeyError("getpwuid(): uid not found: 955")

    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", fails)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert list(cli.kernel_folders()) == ["TRITON_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    assert cli.kernel_folders()["TORCHINDUCTOR_CACHE_DIR"] == os.path.abspath("/kept")


def test_doctor_fails_and_says_what_to_type_when_a_requirement_is_too_old(monkeypatch, capsys):
    installed = cli._version
    monkeypatch.setattr(
        cli, "_version", lambda name: {"peft": "0.1.0", "datasets": None}.get(name, installed(name))
    )
    assert cli.main(["doctor"]) == 1
    lines = {
        line.split()[0]: line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert "needs >=0.17" in lines["peft"] and "pip install 'peft>=0.17'" in lines["peft"]
    assert "missing" in lines["datasets"] and "missing" not in lines["torch"]


def test_doctor_names_packages_that_an_index_has(monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda name: None)
    hints = {row["name"]: row["hint"] for row in cli.packages()}
    assert hints["bitsandbytes"] == "pip install 'bitsandbytes>=0.48'"
    assert hints["vllm"] == "pip install vllm==0.25.1"  # the version that was tried
    assert len(hints) == 12 and not [hint for hint in hints.values() if "grpo_nb" in hint]


def test_doctor_looks_at_servers_and_at_another_environment(tmp_path, capsys, monkeypatch):
    def said(*words):
        status = cli.main(["doctor", *words])
        return status, capsys.readouterr().out.split("\nvLLM\n")[1].split("\n\n")[0]

    def stand_in(**settings):
        return serving(StandIn(*small_model(), name="small", **settings))

    with stand_in(lora_dir=tmp_path, api_key="secret", max_loras=3) as one, stand_in() as two:
        status, line = said("--server", one, "--api-key", "secret")
        assert status == 0 and f"{one}: version grpo_nb" in line and "max_loras 3" in line
        assert "a run can use it" in line and not list(tmp_path.iterdir())
        status, line = said("--server", two)
        assert status == 1 and "--enable-lora" in line
        assert said("--server", one)[0] == 1  # without its token
    status, line = said("--server", one)
    assert status == 1 and "no server answers" in line
    monkeypatch.setattr(StandIn, "models", lambda self, asked: "<html>hello")  # of something else
    with stand_in() as page:
        status, line = said("--server", page)
    assert status == 1 and f"{page} is no vLLM server" in line
    status, line = said("--vllm-python", str(tmp_path / "python"))
    assert status == 1 and "has none (No such file or directory)" in line
    made = tmp_path / "python"
    for does, status, words in (("echo 0.25.1", 0, "vllm 0.25.1"), ("exit 1", 1, "vllm==0.25.1")):
        made.write_text(f"#!/bin/sh\n{does}\n")
        made.chmod(0o755)
        found, line = said("--vllm-python", str(made))
        assert found == status and words in line


def alone():
    "A model without its tokenizer."
    return small_model()[0]


def test_serve_says_what_is_wrong_before_it_loads_a_model(tmp_path, monkeypatch, capsys):
    def said(*words):
        assert cli.main(["serve", "tiny", *words]) == 2
        return capsys.readouterr().err.removeprefix("grpo-nb serve: ").strip()

    loaded = []
    monkeypatch.setattr(cli, "_served", loaded.append)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = said("--port", str(port))
    assert line.startswith(f"port {port} at 127.0.0.1 cannot be used (Address already in use): ")
    file = tmp_path / "file"
    file.touch()
    assert said("--port", "0", "--lora-dir", str(file)).endswith("a file: name a folder")
    assert str(file / "below") in said("--port", "0", "--lora-dir", str(file / "below"))
    for host in ("no-such-host.invalid", "a..b", "203.0.113.9"):
        line = said("--port", "0", "--host", host, "--api-key", "x")
        assert line.startswith(f"port 0 at {host} cannot be used (") and "address of this" in line
    assert not loaded


def test_serve_needs_a_tokenizer_of_a_function(capsys):
    name = f"{Path(__file__)}:alone"
    assert cli.main(["serve", name, "--port", "0"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "returns a model without a tokenizer" in line and "(model, tokenizer)" in line


@pytest.mark.parametrize(
    "card, name, asked",
    [(True, "some/model", "auto"), (False, "some/model", None), (True, "module:function", None)],
)
def test_serve_reads_a_model_on_a_card_as_it_is_written(monkeypatch, card, name, asked):
    "A card draws 16 bits by kernels; in float32 no update of 256 completions came in 100 seconds."
    read = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: card)
    monkeypatch.setattr("grpo_nb.script.model_of", lambda recipe: read.append(recipe) or (1, 2))
    assert cli._served(name) == (1, 2)
    assert read[0].model.dtype == asked


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "grpo_nb", "--version"], capture_output=True)
    assert done.stdout.decode().strip() == f"grpo-nb {version('grpo_nb')}"
    wrong = subprocess.run([sys.executable, "-m", "grpo_nb", "dmeo"], capture_output=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith(b"grpo-nb: ")


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (
            ("gpt-oss-20b", "--context", "4096", "--offload", "embedding", "layer-inputs"),
            0,
            ("It fits", "T4", "keys and values", "Host memory"),
        ),
        (
            ("gpt-oss-20b",),
            1,
            (
                "does not fit",
                "GiB by offload_activations=True",
                "and fits",
                "Fits with: --offload",
            ),
        ),
        (
            ("gpt-oss-20b", "--context", "32768"),
            1,
            ("does not fit", "GiB by offload_activations=True", "a context of"),
        ),
        (("openai/gpt-oss-120b", "--card", "h200"), 0, ("116.8 billion", "It fits")),
        (
            ("Llama-3.1-8B", "--card", "L4", "--format", "nf4", "--memory", "8"),
            1,
            ("limited to 8 GiB", "does not fit"),
        ),
    ],
)
def test_a_plan_needs_nothing_heavy_and_its_status_is_the_answer(arguments, status, words):
    done = call("plan", *arguments)
    assert done.returncode == status and not done.stderr, done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


@pytest.mark.parametrize(
    "asked",
    [
        "gpt-oss-20b --card T4",
        "gpt-oss-20b --card T4 --context 131072",
        "Qwen3-4B --lora-r 0 --card L4",
        "Llama-3.1-8B --card 3060 --batch 4",
        "Phi-4 --card 4090 --optimizer adamw --context 8192 --reference",
        "Llama-3.3-70B --card L4",
    ],
)
def test_the_last_line_is_what_a_plan_fits_with(asked, capsys):
    "With its flags it fits; `--fit`, `--json` and the exit code say the same."
    words = asked.split()
    assert cli.main(["plan", *words]) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    needed = last.removeprefix("Fits with: ")
    flags, _, without = needed.partition(", without ")
    left = [word for word in words if word != without]
    assert needed != last and cli.main(["plan", *left, *shlex.split(flags)]) == 0
    assert "It fits" in capsys.readouterr().out
    status = cli.main(["plan", *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 1 and not told["fits"] and told["fits_with"] == needed
    status = cli.main(["plan", *words, "--fit"])  # which keeps the card
    assert status == ("--card" in flags)
    assert ("It fits" in capsys.readouterr().out) != ("--card" in flags)


def test_a_plan_as_json():
    done = call(
        "plan",
        "Phi-4",
        "--card",
        "A100-80",
        "--lora-r",
        "0",
        "--tile",
        "0",
        "--prompts",
        "2",
        "--json",
    )
    facts = json.loads(done.stdout)
    assert (
        done.returncode == (0 if facts["fits"] else 1)
        and facts["peak"] == max(facts["totals"].values())
        and facts["setup"]["model"]["name"] == "Phi-4"
    )
    assert (
        facts["slice_tokens"] is None
        and facts["moments"]["update"]["adapters"] == 12 * sum(MODELS["Phi-4"].parameters.values())
        and facts["usual"] > facts["peak"]
        and (facts["advice"] == []) == facts["fits"] == (facts["fits_with"] is None)
    )


def test_a_plan_of_a_folder(tmp_path):
    sizes = dict(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        vocab_size=192,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    done = call("plan", tmp_path, "--context", "128")
    assert done.returncode == 0 and tmp_path.name in done.stdout
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **sizes, "hidden_size": None})
    )
    assert "has no hidden_size" in call("plan", tmp_path).stderr


def test_a_reader_that_has_read_enough():
    command = (
        f"{sys.executable} -c 'import sys; from grpo_nb.cli import main; "
        'sys.exit(main(["plan", "gpt-oss-20b", "--card", "T4"]))\' | head -n 1'
    )
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=300
    )
    assert (
        result.stdout.count("\n") == 1
        and "BrokenPipe" not in result.stderr
        and "Traceback" not in result.stderr
    )


def test_lessons_are_copied_and_nothing_is_written_over(tmp_path, capsys):
    folder = tmp_path / "course"
    assert cli.main(["lessons", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"{len(list(folder.rglob('*.ipynb')))} notebooks." in said
    assert (folder / "nbs/lessons/01_what_rl_is.ipynb").read_bytes() == (
        ROOT / "nbs/lessons/01_what_rl_is.ipynb"
    ).read_bytes()
    (folder / "index.ipynb").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        cli.main(["lessons", str(folder)])
    assert stop.value.code == 2 and "is not empty" in capsys.readouterr().err
    assert (folder / "index.ipynb").read_text() == "mine"


def test_exercises_are_counted_as_they_were_saved(tmp_path, capsys):
    def saved(name, said):
        "A page with one exercise whose check printed this."
        words = dict(cell_type="markdown", source=["### Exercise: Sort (5 minutes)\n", "Do."])
        shown = [dict(output_type="execute_result", data={"text/plain": [said]})] if said else []
        stub = dict(cell_type="code", source="# your turn\ncheck(f)", outputs=shown)
        after = dict(cell_type="code", source="check", outputs=shown)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"cells": [words, stub, after]}))

    for name, said in {
        "a": "True",
        "b/c": "False",
        "d": "",
        ".ipynb_checkpoints/a": "True",
    }.items():
        saved(f"{name}.ipynb", said)
    assert cli.main(["exercises", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == ["[x] a.ipynb: Sort", "[ ] b/c.ipynb: Sort", "[ ] d.ipynb: Sort"]
    assert last.startswith("1 of 3 are solved.")
    assert cli.main(["exercises", str(tmp_path / "b" / "none")]) == 1
    assert "no exercises in" in capsys.readouterr().err


def linked(page):
    "The targets of a page's links and pictures."
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.findall(r"\]\(([^()\s]+)\)|(?:src|href)=[\"']([^\"']+)", text)


def test_every_link_of_copied_lessons_leads_somewhere(tmp_path):
    copied, home = tmp_path / "course", f"{grpo_nb.__web__}/"
    assert cli.main(["lessons", str(copied)]) == 0
    led_home, kept = set(), set()
    for page in [*copied.rglob("*.ipynb"), *copied.rglob("*.md")]:
        own = {"".join(link) for link in linked(ROOT / page.relative_to(copied))}
        for link in map("".join, linked(page)):
            path = link.partition("#")[0]
            if not re.match(r"\w+:|#", link):
                assert (page.parent / path).exists(), (page, link)
                kept.add(link)
            elif path.startswith(home) and link not in own:
                assert (ROOT / path.removeprefix(home)).exists(), (page, link)
                led_home.add(path.removeprefix(home))
    assert {"CONTRIBUTING.md", "benchmarks", "tests/test_repo.py"} <= led_home
    assert not {"docs/glossary.md", "index.ipynb"} & led_home and len(kept) > 200


def test_lessons_say_where_they_are_when_they_are_not_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli.importlib.resources, "files", lambda name: tmp_path / "grpo_nb")
    assert cli.main(["lessons", str(tmp_path / "course")]) == 1
    assert "git clone https://github.com/grpo-nb/grpo_nb" in capsys.readouterr().err
    assert not (tmp_path / "course").exists()


def grpo_nb_(*words, stdout=subprocess.PIPE, **environment):
    "The command in a process of its own."
    return subprocess.run(
        [sys.executable, "-m", "grpo_nb", *map(str, words)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("words", [("plan",), ("plan", "--json")])
def test_an_output_that_takes_nothing_is_a_sentence(words):
    with open("/dev/full", "w") as full:
        done = grpo_nb_(*words, stdout=full)
    said = done.stderr.decode()
    assert done.returncode == 1 and said.count("\n") == 1
    assert "standard output cannot be written: No space left on device" in said


ASCII = dict(PYTHONIOENCODING="ascii"), dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


@pytest.mark.parametrize("environment", ASCII)
def test_a_folder_that_the_terminal_cannot_name(environment, tmp_path):
    folder = tmp_path / "\u00fcbung"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    done = grpo_nb_("report", folder, **environment)
    assert done.returncode == 0 and done.stdout.startswith(b"open '"), done.stderr
    assert (folder / "report.html").is_file()


def test_names_that_no_file_has_are_sentences(tmp_path, capsys):
    long = tmp_path / ("a" * 300)
    assert cli.main(["demo", "--out", str(long)]) == 2
    assert "File name too long" in capsys.readouterr().err
    assert cli.main(["lessons", str(long)]) == 2
    assert "File name too long" in capsys.readouterr().err
