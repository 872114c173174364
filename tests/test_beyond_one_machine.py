"""Several nodes: the files of recipes/ that start them, run with made-up commands, and as two nodes
on one machine."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser

from grpo_nb import GRPOTrainer, cli
from grpo_nb.model.memory_bytes import TARGETS, GiB
from grpo_nb.planning.plan import crossing, plan
from grpo_nb.recipe import read_recipe
from grpo_nb.script import model_of

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "recipes"
SHARED = (None, "full_shard")
PAGE = (ROOT / "docs/beyond_one_machine.md").read_text(encoding="utf-8")


def bash(words, cwd, **environment):
    done = subprocess.run(
        ["bash", *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    "Commands that write down how they are called, first on the path."
    called, commands = tmp_path / "called", tmp_path / "bin"
    commands.mkdir()
    tell = f'echo "$CUDA_VISIBLE_DEVICES $(basename $0) $@" >> {called}'
    for name, does in {
        "vllm": tell,
        "torchrun": f"sleep .2; {tell}",
        "srun": 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "scontrol": "printf 'n0\\nn1\\n'",
        "openssl": "echo secret",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{does}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return lambda: [line.split(" ", 2) for line in called.read_text().splitlines()]


def check_two_nodes(calls):
    "Four servers with a card and an address each; two launchers that name all of them."
    servers = [one for one in calls if one[1] == "vllm"]
    launchers = [one for one in calls if one[1] == "torchrun"]
    where = re.compile(r"--host (\S+) --port (\d+) --api-key secret")
    urls = {"http://{}:{}".format(*where.search(one[2]).groups()) for one in servers}
    assert urls == {f"http://n{node}:{port}" for node in (0, 1) for port in (8000, 8001)}
    assert sorted(one[0] for one in servers) == ["0", "0", "1", "1"]
    for node, (cards, _, words) in enumerate(launchers):
        assert cards == "2,3,4,5,6,7"
        given = get_args_parser().parse_args(shlex.split(words))
        assert (given.nnodes, given.node_rank, given.nproc_per_node) == ("2", node, "6")
        assert given.rdzv_endpoint == "n0:29500" and given.module
        train = given.training_script_args
        args = cli._parser(train).parse_args(train)
        assert args.resume and args.run is cli.train
        names = [name for name in vars(args) if name.startswith(("use_vllm", "vllm"))]
        config = read_recipe(args.config, {name: getattr(args, name) for name in names}).config
        assert set(config.server_urls()) == urls and config.vllm_server_api_key == "secret"


def test_a_slurm_job_starts_servers_and_trainers_on_every_node(made_up):
    bash(["-n", FILES / "node.sh"], ROOT)
    bash([FILES / "two_nodes.slurm", "recipes/qwen3_gsm8k.yaml"], ROOT, SLURM_JOB_NODELIST="n[0-1]")
    check_two_nodes(made_up())
    text = (FILES / "two_nodes.slurm").read_text()
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --ntasks-per-node=1\n" in text


def test_a_node_ends_after_its_trainers_have_written(tmp_path):
    "SLURM sends SIGTERM to all processes of a task, and kills what its first one leaves behind."
    for name, does in {
        "vllm": "exec sleep 60",
        "torchrun": "trap 'sleep .5; touch written; exit 1' TERM; touch up; "
        "for i in {1..600}; do sleep .1; done",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = dict(HOSTS="n0", NODE="0", SERVERS="1", TRAINERS="1", RUN="run.yaml")
    given |= dict(SERVE="vllm serve", VLLM_API_KEY="secret")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command, environment = ["bash", str(FILES / "node.sh")], {**os.environ, **given, "PATH": path}
    node = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        while not (tmp_path / "up").exists():
            assert node.poll() is None
            time.sleep(0.01)
        os.killpg(node.pid, signal.SIGTERM)
        assert node.wait(20) == 1 and (tmp_path / "written").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)


def test_skypilot_starts_the_same(made_up, tmp_path):
    task = yaml.safe_load((FILES / "two_nodes.yml").read_text())
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"].endswith(":8")
    assert [
        name for name, value in {**task["envs"], **task["secrets"]}.items() if value is None
    ] == [
        "RUN",
        "VLLM_API_KEY",
    ]
    given = {name: str(value) for name, value in task["envs"].items()}
    given |= {"RUN": "recipes/qwen3_gsm8k.yaml", "VLLM_API_KEY": "secret"}
    given["SERVE"] = given["SERVE"].replace("vllm/bin/", "")
    for node in range(2):
        native = {"SKYPILOT_NODE_IPS": "n0\nn1", "SKYPILOT_NODE_RANK": str(node)}
        bash(["-c", task["run"]], ROOT, **given, **native)
    check_two_nodes(made_up())


def test_what_the_page_says_to_type_can_be_typed():
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    commands = [
        shlex.split(re.sub(r"^(\w+=\S+ +)+", "", line), comments=True)
        for line in lines
        if line.strip()
    ]
    ours = [words[1:] for words in commands if words[0] == "grpo-nb"]
    ours += [words[words.index("grpo_nb") + 1 :] for words in commands if "grpo_nb" in words]
    assert len(ours) > 7
    for words in ours:
        cli._parser(words).parse_args(words)
    for words in commands:
        if words[0] == "torchrun":
            get_args_parser().parse_args(words[1:])
    for path in re.findall(r"\brecipes/[\w./]+\w", PAGE):
        assert (ROOT / path).exists(), path


def test_the_table_of_shares_is_the_planner_s():
    rows = re.findall(r"^\| ([\w.-]+) in (\w+), ([\w ]+) \|(.*)\|$", PAGE, re.M)
    assert len(rows) == 4
    for name, weights, adapted, numbers in rows:
        targets = ("attention",) if adapted == "attention" else TARGETS
        asked = dict(weights=weights.lower(), lora_targets=targets, lora_r=8, context=8192, cards=8)
        asked |= dict(generation_batch_size=64, gradient_accumulation_steps=8)
        whole, shared = (plan(name, "H100", sampler="server", fsdp=f, **asked) for f in SHARED)
        alone = plan(name, "H100", fsdp="full_shard", **asked)
        parts = shared.moments[shared.worst]
        kept = [parts[part] for part in ("weights", "adapters", "copies")]
        active = sum(parts[part] for part in ("kv", "hidden", "attention", "mlp", "logits"))
        received = sum(crossing(shared.setup).values())
        told = [whole.peak, *kept, active, parts["context"], shared.peak, alone.totals["rollout"]]
        expected = [f"{size / GiB:.1f}" for size in told] + [f"{received / GiB:,.0f}"]
        assert [one.strip() for one in numbers.split("|")] == expected, name


RUN = """
model_name_or_path: grpo_nb.model.tiny:tiny_gpt_oss
dataset_name: grpo_nb.environments.arithmetic:addition_problems
reward_funcs: ["{file}:score"]
use_peft: true
lora_r: 4
lora_dropout: 0.0
lora_target_modules: all
output_dir: {out}
max_steps: 2
learning_rate: 1.0
optim: sgd  # Adam makes whole steps of gradients that are rounding alone
per_device_train_batch_size: 16
num_generations: 8
max_completion_length: 5
gradient_checkpointing: false
save_strategy: "no"
use_cpu: true
logging_steps: 1
disable_tqdm: true
"""
SCORE = """
import json, os

def score(prompts, completions, completion_ids, trainer_state, **columns):
    "A point for each digit, and a note of what was drawn where."
    with open(os.environ["NOTES"] + os.environ.get("RANK", "0"), "a") as file:
        for prompt, ids in zip(prompts, completion_ids):
            note = trainer_state.global_step, prompt, ids, os.environ.get("GROUP_RANK")
            file.write(json.dumps(note) + "\\n")
    return [sum(letter.isdigit() for letter in text) for text in completions]
"""


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.full
def test_two_nodes_on_one_machine_and_the_same_update_in_one_process(tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(SCORE)
    run, out, notes = tmp_path / "run.yaml", tmp_path / "out", tmp_path / "notes"
    run.write_text(RUN.format(file=tmp_path / "rewards.py", out=out))
    port, meet = free_ports(2)
    serve = f"{sys.executable} -m grpo_nb serve tiny --lora-dir {out}"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **dict(HOSTS="127.0.0.1 127.0.0.2", SERVERS="1", TRAINERS="1", RUN=str(run), SERVE=serve),
        **dict(VLLM_API_KEY="secret", PORT=str(port), MASTER_PORT=str(meet), NOTES=str(notes)),
        **dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true"),
    }
    command = ["bash", str(FILES / "node.sh")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    nodes = [
        subprocess.Popen(command, env={**environment, "NODE": str(node)}, cwd=tmp_path, **pipes)
        for node in range(2)
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    updates = [one for one in log if "loss" in one]
    assert len(updates) == 2 and all(one["sampling/gap_mean"] < 1e-6 for one in updates)
    assert not list((out / ".vllm_adapters").iterdir())

    drawn, nodes_of = defaultdict(list), set()
    for rank in range(2):
        for line in Path(f"{notes}{rank}").read_text().splitlines():
            step, prompt, ids, node = json.loads(line)
            drawn[step, prompt].append(ids)
            nodes_of.add((rank, node))
    assert nodes_of == {(0, "0"), (1, "1")} and sum(map(len, drawn.values())) == 64

    def again(prompts, trainer):
        "What the two nodes drew."
        ids = [drawn[trainer.state.global_step, prompt].pop(0) for prompt in prompts]
        tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {
            "prompt_ids": tokens,
            "completion_ids": ids,
            "logprobs": [[0.0] * len(one) for one in ids],
        }

    monkeypatch.setenv("NOTES", str(tmp_path / "more"))
    changes = {"per_device_train_batch_size": "32", "guard_every": "0", "output_dir": f"{out}1"}
    changes["vllm_importance_sampling_correction"] = "false"
    recipe = read_recipe(run, changes)
    model, tokenizer = model_of(recipe)
    trainer = GRPOTrainer(
        model,
        lambda completions, **_: [sum(one.isdigit() for one in text) for text in completions],
        recipe.config,
        [{"prompt": prompt} for prompt in rows_of(recipe)],
        processing_class=tokenizer,
        rollout_func=again,
    )
    trainer.log.show = False
    trainer.train()
    trainer.save_model()
    two, one = (load_file(path / "adapter_model.safetensors") for path in (out, Path(f"{out}1")))
    assert two.keys() == one.keys()
    assert max((two[name] - one[name]).abs().max() for name in two) < 1e-6
    assert any(value.abs().max() > 0 for name, value in two.items() if "lora_B" in name)
    torch.manual_seed(0)


def rows_of(recipe):
    "The prompts of a recipe's rows, in order."
    from grpo_nb.script import load_rows

    return [row["prompt"] for row in load_rows(recipe.data, "train")]
