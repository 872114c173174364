"The command `grpo-nb`: what it refuses, what it says, and what it leaves behind."

import inspect
import json
import signal
import subprocess
import sys
import types
from importlib.metadata import version

import pytest

from grpo_nb import cli


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


@pytest.fixture
def runs(monkeypatch):
    "The calls that reached `run_demo`, which here only remembers them."
    seen = []

    def run_demo(**arguments):
        seen.append(arguments)

    monkeypatch.setitem(sys.modules, "grpo_nb.demo", types.SimpleNamespace(run_demo=run_demo))
    return seen


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((), "COMMAND"),
        (("dmeo",), "invalid choice"),
        (("demo", "--steps", "0"), "at least 1 step"),
        (("demo", "--steps", "-3"), "at least 1 step"),
        (("demo", "--steps", "ten"), "'ten' is not a whole number"),
        (("demo", "--steps", "2.5"), "'2.5' is not a whole number"),
        (("demo", "--seed", "-1"), "seeds go from 0"),
        (("demo", "--seed", 2**32), "seeds go from 0"),
        (("demo", "--seed", "nan"), "'nan' is not a whole number"),
        (("demo", "--out", "/dev/null"), "is a file"),
        (("demo", "--out", "/dev/null/inside"), "cannot be written"),
        (("demo", "--out", "/proc/grpo"), "cannot be written"),
        (("demo", "--resume", "--out", "/tmp/there-is-no-such-run"), "no run to resume"),
        (("doctor", "--jsno"), "--jsno"),
        (("plan", "gpt-5"), "nothing is looked up"),
        (("plan", "Llama-3.1-8B", "--format", "mxfp4"), "has no experts"),
        (("plan", "--format", "int3"), "invalid choice"),
        (("plan", "--card", "H300"), "give one of T4"),
        (("plan", "--memory", "-1"), "more than 0"),
        (("plan", "--memory", "nan"), "more than 0"),
        (("plan", "--context", "0"), "at least 2 tokens"),
        (("plan", "--context", "512", "--prompt", "512"), "leave room for a completion"),
        (("plan", "Qwen3-4B", "--offload", "embedding"), "cannot be offloaded"),
        (("plan", "--no-checkpointing", "--offload", "layer-inputs"), "leave it on"),
    ],
)
def test_refused_with_a_sentence_before_any_work(arguments, sentence):
    done = call(*arguments)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = call("demo", "--out", tmp_path)
    assert done.returncode == 2 and "thesis.tex" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--help",), ("demo", "plan", "doctor")),
        (
            ("plan", "--help"),
            ("--card", "--context", "--lora-r", "--offload", "--json", "Exit status 0"),
        ),
        (("demo", "--help"), ("--steps", "--seed", "--out", "--resume")),
        (("doctor", "--help"), ("--json",)),
        (("--version",), (version("grpo_nb"),)),
    ],
)
def test_help_needs_nothing_heavy(arguments, words):
    done = call(*arguments)
    assert done.returncode == 0 and all(word in done.stdout for word in words)


def test_arguments_reach_the_demo(runs, tmp_path):
    assert (
        cli.main(
            [
                "demo",
                "--steps",
                "7",
                "--seed",
                "3",
                "--out",
                str(tmp_path / "new" / "run"),
                "--quiet",
            ]
        )
        == 0
    )
    assert runs == [
        dict(steps=7, seed=3, out=str(tmp_path / "new" / "run"), resume=False, quiet=True)
    ]


def test_the_demo_takes_what_it_is_given():
    from grpo_nb.demo import run_demo

    inspect.signature(run_demo).bind(steps=None, seed=0, out="runs/demo", resume=False, quiet=False)


def test_defaults(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    assert runs == [dict(steps=None, seed=0, out="runs/demo", resume=False, quiet=False)]


def test_resume_keeps_the_seed_of_the_run(runs, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    cli.main(["demo", "--seed", "3", "--steps", "5", *out])
    assert cli.main(["demo", "--resume", *out]) == 0
    assert cli.main(["demo", "--resume", "--steps", "9", *out]) == 0
    assert cli.main(["demo", "--resume", "--seed", "4", *out]) == 2
    assert "--seed 3" in capsys.readouterr().err
    assert [(r["seed"], r["steps"], r["resume"]) for r in runs] == [
        (3, 5, False),
        (3, 5, True),
        (3, 9, True),
    ]


def test_a_second_run_moves_the_first_aside(runs, tmp_path, capsys):
    out = tmp_path / "run"
    for seed in "012":
        cli.main(["demo", "--seed", seed, "--out", str(out)])
    seeds = {p.name: json.loads((p / "demo.json").read_text())["seed"] for p in tmp_path.iterdir()}
    assert seeds == {"run": 2, "run-1": 0, "run-2": 1}
    assert str(tmp_path / "run-2") in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "grpo_nb.demo", types.SimpleNamespace(run_demo=interrupted))
    assert cli.main(["demo", "--out", str(tmp_path / "my run")]) == 130
    assert f"grpo-nb demo --resume --out '{tmp_path}/my run'" in capsys.readouterr().err


def test_ctrl_c_in_a_real_run(tmp_path):
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "import sys; from grpo_nb.cli import main; sys.exit(main())",
        "demo",
        "--steps",
        "2",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = ""
    while "loss=" not in said and (more := process.stderr.read(1)):
        said += more  # the bar of the warm-up: the work has begun
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert (
        process.returncode == 130
        and f"grpo-nb demo --resume --out {out}" in said
        and "Traceback" not in said
    )


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
        "peft",
        "datasets",
        "accelerate",
        "ipywidgets",
        "matplotlib",
        "bitsandbytes",
        "vllm",
        "nbdev",
    } == set(found)
    assert found["torch"] == version("torch") and facts["devices"][0]["type"] == "cpu"


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
                "As flags of this command: --offload",
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
        and facts["moments"]["layer"]["adapters"] == 0
        and facts["usual"] > facts["peak"]
        and (facts["advice"] == []) == facts["fits"]
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
