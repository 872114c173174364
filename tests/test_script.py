"`grpo-nb train`: a recipe becomes a trained model, and a bad start writes nothing."

import html
import json
import os
import re
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from small_runs import CLOCKS, one_thread  # noqa: F401
from transformers import AutoModelForCausalLM

from grpo_nb import cli, script
from grpo_nb.model.memory_bytes import GiB
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.planning.plan import plan
from grpo_nb.recipe import DataSettings, read_recipe, recipe_of
from grpo_nb.script import load_rows, model_of, planned_for, rewards_of, run_card, trainer_of
from grpo_nb.training.reporting import peak_resident_bytes

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "recipes" / "tiny_arithmetic.yaml"
SMALL = "--per_device_train_batch_size 16 --logging_steps 1 --warmup_steps 0".split()


def train(out, *words):
    "`grpo-nb train` with the tiny recipe and flags on top; the exit status."
    return cli.main(["train", "--config", str(TINY), "--output_dir", str(out), *map(str, words)])


def records(out):
    "The log of a run, without its clocks."
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A tiny model and its tokenizer, saved as transformers does."
    path = tmp_path_factory.mktemp("model")
    for part in tiny_gpt_oss():
        part.save_pretrained(path)
    return path


@pytest.mark.long
def test_the_first_recipe_learns(tmp_path):
    words = "--max_steps 36 --logging_steps 1 --warmup_steps 0 --learning_rate 3e-3".split()
    assert train(tmp_path / "run", *words, "--per_device_train_batch_size", 128) == 0
    rewards = [record["reward"] for record in records(tmp_path / "run")]
    assert len(rewards) == 36 and sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    start, _ = tiny_gpt_oss()
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)


def test_resume_goes_on_with_a_run_and_begins_one_where_there_is_none(tmp_path, capsys):
    words = [*SMALL, "--lr_scheduler_type", "constant", "--save_steps", 2]
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for last in steps:
            assert train(tmp_path / name, *words, "--max_steps", last, "--resume") == 0
    whole, parts = ((tmp_path / name) for name in ("whole", "parts"))
    assert [r["reward"] for r in records(whole)] == [r["reward"] for r in records(parts)]
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    assert not list(parts.glob("earlier-run-*"))
    assert train(parts, *words, "--max_steps", 4, "--resume") == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert train(parts, *words, "--max_steps", 2) == 0 and list(parts.glob("earlier-run-*"))


BAD = [
    (["--reward_funcs", "exact_anser_reward"], 2, "the nearest is 'exact_answer_reward'"),
    (["--reward_funcs", "nowhere:score"], 2, "nowhere cannot be read"),
    (["--dataset_name", "no_such.jsonl"], 2, "dataset_name='no_such.jsonl' has no rows"),
    (["--dataset_name", "grpo_nb.demo:greedy_answers"], 2, "cannot be called as it is"),
    (["--model_name_or_path", "no/such/model"], 2, "'no/such/model' is no folder"),
    (["--model_name_or_path", "grpo_nb.model.tiny:tiny_gpt"], 2, "nearest is 'tiny_gpt_oss'"),
    (["--load_in_4bit"], 2, "load_in_4bit=True is for a model that is loaded by its name"),
    (["--use_peft"], 2, "lora_target_modules is missing"),
    (["--use_peft", "--lora_target_modules", "q"], 2, "lora_target_modules names 'q'"),
    (["--use_peft", "--lora_target_modules", "experts"], 2, "set lora_dropout: 0"),
    (["--reward_weights", "1", "2"], 2, "give one weight each"),
    (["--generation_batch_size", "12"], 2, "12"),
    (["--max_completion_length", "4092"], 1, "The prompt of row 0 has 6 tokens"),
    (["--resume_from_checkpoint"], 1, "no whole checkpoint"),
]


@pytest.mark.parametrize("words, status, sentence", BAD, ids=lambda value: str(value)[:40])
def test_a_bad_start_is_a_sentence_and_writes_nothing(words, status, sentence, tmp_path, capsys):
    assert train(tmp_path / "out", *words) == status
    said = capsys.readouterr().err.splitlines()
    assert sentence in said[-1] and said[-1].startswith("grpo-nb train: "), said
    assert not (tmp_path / "out").exists()


def test_rows_of_files_folders_and_functions(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict

    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(4)]
    data = Dataset.from_list(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data.to_csv(tmp_path / "rows.csv")
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "train.jsonl").write_text(lines)
    (tmp_path / "splits" / "test.jsonl").write_text(lines[: lines.index("\n") + 1])
    (tmp_path / "mine.py").write_text(
        f"ROWS = {rows}\n"
        "def rows(): return ROWS\n"
        "def parts(split): return ROWS[:1] if split == 'test' else ROWS\n"
    )
    monkeypatch.chdir(tmp_path)
    names = "rows.jsonl rows.json rows.csv rows.parquet one two splits mine.py:rows mine.py:parts"
    for name in names.split():
        found = load_rows(DataSettings(dataset_name=name), "train")
        assert [dict(row) for row in found] == rows, name
    for name in ("two", "splits", "mine.py:parts"):
        found = load_rows(DataSettings(dataset_name=name), "test")
        assert [dict(row) for row in found] == rows[:1], name
    stream = load_rows(DataSettings(dataset_name="splits", dataset_streaming=True), "train")
    assert not hasattr(stream, "__len__") and list(stream) == rows
    file = DataSettings(dataset_name="rows.jsonl")
    cut = [[dict(r) for r in load_rows(file, f"train[{part}]")] for part in (":75%", "75%:")]
    assert cut == [rows[:3], rows[3:]]
    for name in "rows.jsonl rows.json rows.csv rows.parquet one mine.py:rows".split():
        with pytest.raises(ValueError, match=f"'{name}' has no rows 'test'"):  # those of training
            load_rows(DataSettings(dataset_name=name), "test")
    for name in ("two", "splits"):
        with pytest.raises(ValueError, match=f"dataset_name='{name}' has no rows 'held_out'"):
            load_rows(DataSettings(dataset_name=name), "held_out")


OPEN_R1 = """
model_name_or_path: {folder}
model_revision: main
torch_dtype: bfloat16
attn_implementation: eager
chat_template: "{{% for m in messages %}}{{{{ m['content'] }}}}={{% endfor %}}"
dataset_name: {rows}
dataset_config: default
dataset_prompt_column: problem
system_prompt: "123+"
bf16: true
use_vllm: false
do_eval: false
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_model_id: Tiny-Open-R1-GRPO
hub_strategy: every_save
learning_rate: 2.0e-05
log_completions: true
log_level: warning
logging_first_step: true
logging_steps: 1
logging_strategy: steps
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 512
max_completion_length: 8
max_steps: -1
num_completions_to_print: 0
num_generations: 4
num_train_epochs: 1
output_dir: {out}
overwrite_output_dir: true
overwrite_hub_revision: false
per_device_eval_batch_size: 4
per_device_train_batch_size: 4
push_to_hub: false
push_to_hub_revision: false
report_to:
- wandb
reward_funcs:
- accuracy
- format
- tag_count
reward_weights:
- 1.0
- 1.0
- 0.5
save_strategy: "epoch"
save_total_limit: 1
seed: 42
temperature: 0.7
wandb_log_unique_prompts: true
warmup_ratio: 0.1
"""


@pytest.mark.filterwarnings("ignore:overwrite_output_dir", "ignore:log_level")
def test_a_recipe_of_open_r1s_shape_trains(folder, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    lines = [json.dumps({"problem": f"{n}+1=", "solution": f"${n + 1}$"}) for n in range(4)]
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    text = OPEN_R1.format(folder=folder, rows=tmp_path / "rows", out=tmp_path / "run")
    (tmp_path / "run.yaml").write_text(text)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert cli.main(["train", "--config", str(tmp_path / "run.yaml"), "--use_cpu"]) == 0
    (record,) = records(tmp_path / "run")[:1]
    names = ("accuracy_reward", "think_answer_format_reward", "think_answer_tags_reward")
    assert all(f"rewards/{name}/mean" in record for name in names)
    (shown,) = (tmp_path / "run" / "completions").iterdir()
    import pandas

    assert str(pandas.read_parquet(shown)["prompt"][0]).count("123+") == 1


def test_prompts_of_a_column_with_a_system_message(tmp_path):
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "b"}]
    (tmp_path / "mine.py").write_text(
        f"def rows(): return [dict(question='a', n=1), dict(question={own}, n=2)]"
    )
    asked = dict(dataset_name=f"{tmp_path}/mine.py:rows", system_prompt="S.")
    rows = load_rows(DataSettings(**asked, dataset_prompt_column="question"), "train")
    first = [{"role": "system", "content": "S."}, {"role": "user", "content": "a"}]
    assert [row["prompt"] for row in rows] == [first, own] and rows[1]["n"] == 2
    with pytest.raises(ValueError, match="is 'prompt', and the columns are question, n"):
        load_rows(DataSettings(**asked), "train")


def test_evaluation_takes_the_second_part_and_a_reward_of_a_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "def score(completions, **kw): return [1.0] * len(completions)"
    )
    words = ["--eval_strategy", "steps", "--eval_steps", 2, "--num_generations_eval", 1]
    rewards = ["--reward_funcs", f"{tmp_path}/mine.py:score", "exact_answer_reward"]
    assert train(tmp_path / "run", *SMALL, *words, *rewards, "--max_steps", 2) == 0
    last = records(tmp_path / "run")[-1]
    assert last["eval_rewards/score/mean"] == 1 and "eval_rewards/exact_answer_reward/mean" in last
    model = DataSettings(reward_funcs="proximity_reward", reward_model_name_or_path="judge")
    assert [getattr(one, "__name__", one) for one in rewards_of(model)] == [
        "judge",
        "proximity_reward",
    ]


@pytest.mark.parametrize(
    "trained, test",
    [
        ("train", "train[3:]"),
        ("train", "train"),
        ("train[:3]", "train"),
        ("train[:3]", "train[:3]"),
    ],
)
def test_rows_that_are_trained_on_are_no_evaluation(trained, test, tmp_path, capsys):
    words = ["--eval_strategy", "steps", "--dataset_train_split", trained]
    assert train(tmp_path / "run", *SMALL, *words, "--dataset_test_split", test) != 0
    assert "has rows that are trained on: 'train[:90%]' and" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_adapter_on_a_model_in_4_bits(folder, tmp_path):
    from peft import PeftModel

    lora = "--use_peft --lora_r 4 --lora_alpha 4 --lora_dropout 0 --lora_target_modules all".split()
    words = [*SMALL, "--model_name_or_path", folder, "--load_in_4bit", "--offload_embedding", *lora]
    assert train(tmp_path / "run", *words, "--max_steps", 2) == 0
    settings = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 4, 0)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "run"
    )
    moved = [p.abs().max() for name, p in loaded.named_parameters() if "lora_B" in name]
    assert len(moved) > 4 and all(moved)


def test_settings_of_loading_and_of_the_adapter_are_honoured(folder):
    given = dict(
        model_name_or_path=str(folder),
        dtype="bfloat16",
        attn_implementation="eager",
        chat_template="{{ messages }}",
        use_peft=True,
        lora_target_modules="all-linear",
        lora_modules_to_save=["lm_head"],
        use_rslora=True,
        use_cpu=True,
        seed=3,
    )
    model, tokenizer = model_of(recipe_of(given))
    assert model.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert tokenizer.chat_template == "{{ messages }}"
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (16, 32, 0.05)
    assert settings.use_rslora and settings.modules_to_save == ["lm_head"]
    trained = {
        name.split(".lora_")[0].split(".")[-1]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} < trained and "experts" not in str(trained)


def test_a_model_that_is_shared_out_is_read_to_the_host_in_the_card_s_format(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setenv("LOCAL_RANK", "3")
    asked = []

    def load(name, **given):
        asked.append((str(given["device"]), given["dtype"]))
        raise InterruptedError

    monkeypatch.setattr(script, "load_model", load)
    for fsdp in (None, "full_shard"):
        recipe = recipe_of(dict(model_name_or_path=str(folder), dtype="auto", fsdp=fsdp))
        with pytest.raises(InterruptedError):
            script.named_model(recipe)
    assert asked == [("cuda:3", torch.bfloat16), ("cpu", torch.bfloat16)]


def test_the_last_line_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    from grpo_nb import script

    def stopped(trainer, recipe):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "trainer_of", lambda recipe, tell: types.SimpleNamespace())
    monkeypatch.setattr(script, "train_and_save", stopped)
    assert train(tmp_path / "my run", "--max-steps", 3, "--resume") == 130
    assert capsys.readouterr().err.endswith("Stopped. Nothing was saved.\n")
    (tmp_path / "my run/checkpoint-2").mkdir(parents=True)
    assert train(tmp_path / "my run", "--max-steps", 3, "--resume") == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"Stopped. To go on with what was saved: grpo-nb train --config {TINY}")
    assert last.endswith(f"--output_dir '{tmp_path}/my run' --max_steps 3 --resume")


def piped(*words):
    "`grpo-nb train` with the tiny recipe, whose output goes into a pipe: lines."
    command = [sys.executable, "-m", "grpo_nb", "train", "--config", str(TINY), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.long
def test_in_a_pipe_there_are_lines_of_eighty_columns_and_no_bars(tmp_path):
    words = [*SMALL, "--max_steps", 2, "--disable_tqdm", "null", "--output_dir", tmp_path / "run"]
    (first, *lines), other = piped(*words)
    assert first.startswith("importing torch") and other == ""
    (head,) = [n for n, line in enumerate(lines) if line.startswith(" step")]
    assert lines[head - 4].endswith("completions at once, 16 an update; 9 more with --verbose")
    assert not [line for line in lines if "\r" in line or "\x1b" in line]
    prose = ("hint: ", "diagnosis: ", "The model is in ")  # which a terminal wraps
    assert not [line for line in lines if len(line) > 80 and not line.startswith(prose)]


def test_verbose_prints_each_setting_that_follows_from_others(tmp_path, capsys):
    assert train(tmp_path / "run", *SMALL, "--max_steps", 1, "--verbose") == 0
    said = capsys.readouterr().out
    assert "epsilon_high = 0.2 (from epsilon)\n" in said and "unlike TRL 1.16: " in said
    assert "with --verbose" not in said


def test_a_short_run_without_anything_to_learn_ends_with_a_diagnosis(tmp_path, capsys):
    (tmp_path / "flat.py").write_text(
        "def flat(completions, **_):\n    return [0.5] * len(completions)"
    )
    words = [*SMALL, "--max_steps", 2, "--reward_funcs", tmp_path / "flat.py:flat"]
    assert train(tmp_path / "run", *words) == 0
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("diag", "One"))
    ]
    assert said[0].startswith(
        "diagnosis: In 100% of the groups of the last 2 records all completions"
    )
    assert "the reward function cannot tell good from bad" in said[0]
    assert re.match(
        r"One of the last completions: \[2\] \+0.00  flat 0.5  \| \d+\+\d+= -> ", said[-1]
    )
    hints = [json.loads(line) for line in (tmp_path / "run/hints.jsonl").read_text().splitlines()]
    assert said[0] == f"diagnosis: {hints[0]['hint']}" and hints[0]["step"] == 2
    (stored,) = (tmp_path / "run/completions").iterdir()
    assert stored.name == "completions_00002.parquet"


def test_a_trainer_of_a_recipe_has_written_nothing(tmp_path):
    given = dict(
        model_name_or_path="grpo_nb.model.tiny:tiny_gpt_oss",
        dataset_name="grpo_nb.environments.arithmetic:addition_problems",
        reward_funcs="proximity_reward",
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
    )
    trainer = trainer_of(recipe_of(given))
    assert len(trainer.train_dataset) == 7600 and trainer.eval_dataset is None
    assert not (tmp_path / "out").exists()


def launched(*words, cwd):
    "A command of this Python on the CPU, with a launcher: exit status, and what it printed."
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=cwd,
    )


@pytest.mark.full
def test_two_processes_of_torchrun_train_one_model(tmp_path):
    words = ["--config", TINY, "--output_dir", "run", *SMALL, "--save_steps", "2", "--verbose"]
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 -m grpo_nb train".split()
    done = launched(*launcher, *words, "--max_steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("The model is in run") == 1
    assert "generation_batch_size = 32" in done.stdout  # 2 x 16
    done = launched(*launcher, *words, "--max_steps", "3", "--resume", cwd=tmp_path)
    assert done.returncode == 0 and len(records(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    "names, alone",
    [
        ("ACCELERATE_MIXED_PRECISION MASTER_PORT", True),
        ("ACCELERATE_MIXED_PRECISION MASTER_PORT WORLD_SIZE", False),  # --multi_gpu
        ("ACCELERATE_MIXED_PRECISION MASTER_PORT PMI_SIZE", False),  # MPI
        ("ACCELERATE_MIXED_PRECISION", False),  # one process was asked for
        ("MASTER_PORT WORLD_SIZE", False),  # torchrun
    ],
)
def test_a_process_that_was_to_be_one_of_several_says_so(names, alone, monkeypatch, capsys):
    for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT", *cli._counts):
        monkeypatch.delenv(name, raising=False)
    for name in names.split():
        monkeypatch.setenv(name, "1")
    assert cli.main(["train", "--config", "no_such.yaml"]) == 2
    assert ("has started one process" in capsys.readouterr().err) == alone


@pytest.mark.full
@pytest.mark.parametrize("options, processes", [("--cpu", 1), ("--multi_gpu", 2)])
def test_accelerate_launches_a_recipe(options, processes, tmp_path):
    "Two processes are asked for; accelerate's --cpu starts one, and the other meets on the CPU."
    launcher = f"-m accelerate.commands.launch {options} --num_processes 2 -m grpo_nb train".split()
    words = ["--config", TINY, "--output_dir", "run", *SMALL, "--max_steps", "2", "--verbose"]
    done = launched(*launcher, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(records(tmp_path / "run")) == 2
    assert f"generation_batch_size = {16 * processes}" in done.stdout
    assert ("has started one process" in done.stderr) == (processes == 1)


@pytest.mark.full
def test_sigterm_leaves_a_checkpoint_to_resume_from(tmp_path):
    out, log = tmp_path / "run", tmp_path / "run" / "log.jsonl"
    words = ["-m", "grpo_nb", "train", "--config", TINY, "--output_dir", out, *SMALL]
    process = subprocess.Popen(
        [sys.executable, *map(str, words), "--max_steps", "10000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (log.exists() and len(records(out)) > 2):
        time.sleep(0.1)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "--max_steps 10000 --resume" in said, said
    (checkpoint,) = out.glob("checkpoint-*")
    step = int(checkpoint.name.split("-")[1])
    done = launched(*words, "--max_steps", step + 1, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and records(out)[-1]["step"] == step + 1, done.stderr


def test_a_run_card_has_what_was_predicted_and_measured_and_nothing_personal(tmp_path, monkeypatch):
    home = tmp_path / "alice"
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    small = dict(per_device_train_batch_size="16", logging_steps="1", max_steps="12")
    trainer = trainer_of(read_recipe(TINY, small | {"output_dir": str(home)}))
    trainer.model.config._name_or_path = str(home / "secret")
    trainer.log.show = False
    trainer.train()
    card, planned = (
        run_card(trainer, "T4"),
        plan(trainer.model.config, "T4", trainer.config, lora_r=0),
    )
    page = card._repr_html_()
    link = parse_qs(urlsplit(html.unescape(re.search('href="(.*?)"', page)[1])).query)
    assert link["body"] == [f"```\n{card}\n```\n"] and link["title"] == [card.split("\n")[0]]
    assert not [
        one for one in (str(tmp_path), "alice", "secret", socket.gethostname()) if one in page
    ]
    said = dict(
        zip(("device", "host"), re.findall(r"predicted +([\d.]+), measured +([\d.]+)", card))
    )
    assert float(said["device"][0]) == round(planned.peak / GiB, 2)
    assert float(said["host"][0]) == round(sum(planned.host.values()) / GiB, 2)
    assert 0.1 < float(said["device"][1]) <= peak_resident_bytes() / GiB + 0.01
    steps = [int(line.split()[0]) for line in card.split("\n")[-10:]]
    assert steps[0] == 1 and steps[-1] == 12 and len(set(steps)) == 10
    assert run_card(trainer).count("not planned") == 3  # for a CPU


@pytest.mark.parametrize(
    "names, parts", [("q_proj", ("attention",)), ("all", ("attention", "mlp"))]
)
def test_a_run_card_plans_for_the_adapter_that_was_trained(tmp_path, names, parts):
    words = dict(use_peft="true", lora_r="8", lora_dropout="0", lora_target_modules=names)
    trainer = trainer_of(read_recipe(TINY, words | {"output_dir": str(tmp_path)}))
    setup = planned_for(trainer, "T4").setup
    assert (setup.lora_r, setup.lora_targets, setup.weights) == (8, parts, "fp32")
