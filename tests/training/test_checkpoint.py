"""A run that is killed at any moment and resumed is the run that was not: bit for bit, on the CPU,
with the same number of threads."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_runs import (
    ROWS,
    digits,
    remember_batches,
    small_model,
    small_trainer,
    weights_of,
    without_clocks,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback

from grpo_nb.environments.sandbox import SandboxPool
from grpo_nb.model.export import new_folder
from grpo_nb.training.checkpoint import (
    checkpoints,
    find_checkpoint,
    load_weights,
    newest_whole_checkpoint,
    remove_old_checkpoints,
    set_aside,
    shared_out,
    write_manifest,
)
from grpo_nb.training.reporting import Log
from grpo_nb.training.rewards import RewardError

LORA = dict(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
)
SAVING = dict(save_strategy="steps", save_steps=1)
SCENARIOS = {
    "every step": dict(max_steps=7, **SAVING),
    "inside a cycle": dict(
        max_steps=7,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        num_iterations=2,
        save_strategy="steps",
        save_steps=3,
        threads=2,
    ),
    "windows of two cycles": dict(
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        num_iterations=1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        **SAVING,
    ),
    "log every third step": dict(
        max_steps=8,
        logging_steps=3,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        beta=0.1,
        evaluate=True,
        eval_strategy="steps",
        eval_steps=2,
    ),
    "float16": dict(max_steps=6, fp16=True, num_iterations=2, optim="adamw_torch", **SAVING),
    "an adapter": dict(
        max_steps=6,
        adapter=LORA,
        num_iterations=2,
        beta=0.05,
        lr_scheduler_type="cosine",
        learning_rate=0.05,
        top_p=0.9,
        **SAVING,
    ),
}


class Runner:
    "Starts runs as processes of their own."

    def __init__(self):
        script = Path(__file__).parents[1] / "run_child.py"
        self.process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # of two threads, one that waits for the other leaves the core to it
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
        assert self.process.stdout.readline() == "ready\n"

    def start(self, **run):
        "The id of the new process."
        self.process.stdin.write(json.dumps(run) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        "Its exit status, or minus the signal that ended it, once it has ended."
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))

    def __call__(self, **run):
        self.start(**run)
        return self.end()


@pytest.fixture(scope="module")
def runner():
    runner = Runner()
    yield runner
    runner.process.stdin.close()
    runner.process.wait(timeout=60)


def outcome(folder):
    "History (without clocks), weights and log of a finished run."
    final = torch.load(folder / "final.pt")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert lines == final["history"]
    return without_clocks(final["history"]), final["weights"], final["scale"]


def assert_same(folder, whole):
    (history, weights, scale), (expected, wanted, true_scale) = outcome(folder), outcome(whole)
    assert [r["step"] for r in history] == [r["step"] for r in expected]  # each step once
    for a, b in zip(history, expected):
        assert a == b
    assert (
        weights.keys() == wanted.keys()
        and all(torch.equal(weights[name], wanted[name]) for name in wanted)
        and scale == true_scale
    )


@pytest.fixture(scope="module")
def whole(runner, tmp_path_factory):
    "The folder of each scenario's run that nobody disturbed, and how long it took."
    runs = {}

    def of(name):
        if name not in runs:
            folder, began = tmp_path_factory.mktemp("whole"), time.perf_counter()
            assert runner(folder=str(folder), **SCENARIOS[name]) == 0
            runs[name] = folder, time.perf_counter() - began
        return runs[name]

    return of


@pytest.mark.long
@pytest.mark.parametrize("most", [2, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_random_moments(name, most, runner, whole, tmp_path):
    (expected, seconds), chance, kills = whole(name), random.Random(name), 0
    for attempt in range(60):
        if not kills:
            folder = tmp_path / str(attempt)
        pid = runner.start(folder=str(folder), resume=True, **SCENARIOS[name])
        if kills < most:
            time.sleep(chance.uniform(0.1, 0.8) * seconds)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                seconds *= 0.8  # it was faster than the undisturbed run
        status = runner.end()
        assert status in (0, -signal.SIGKILL)
        kills += status == -signal.SIGKILL
        if status == 0 and kills:
            break
    assert status == 0
    assert_same(folder, expected)


MOMENTS = ["torch.save 2", "sync 3", "rename 3", "delete 2", "delete 4"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_a_checkpoint_is_written(moment, runner, whole, tmp_path):
    settings = {**SCENARIOS["every step"], "save_total_limit": 2}
    assert runner(folder=str(tmp_path), die=moment, **settings) == -signal.SIGKILL
    there = checkpoints(tmp_path)
    for folder in there:
        assert isinstance(
            torch.load(folder / "training_state.pt"), dict
        )  # what bears the name is whole
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".checkpoint")]
    assert left or moment.startswith("rename")
    assert runner(folder=str(tmp_path), resume=True, **settings) == 0
    assert_same(tmp_path, whole("every step")[0])
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-7"] and not [
        p for p in tmp_path.iterdir() if p.name.startswith(".checkpoint")
    ]


def test_ctrl_c(runner, whole, tmp_path):
    expected, seconds = whole("inside a cycle")
    settings = {**SCENARIOS["inside a cycle"], "save_strategy": "no"}
    pid = runner.start(folder=str(tmp_path), **settings)
    while (
        not (tmp_path / "log.jsonl").exists()
        or len((tmp_path / "log.jsonl").read_text().splitlines()) < 2
    ):
        time.sleep(0.002)
    os.kill(pid, signal.SIGINT)
    assert runner.end() == 130
    (found,) = checkpoints(tmp_path)
    assert 2 <= int(found.name.split("-")[1]) < 7
    assert runner(folder=str(tmp_path), resume=True, **SCENARIOS["inside a cycle"]) == 0
    assert_same(tmp_path, expected)


def test_a_finished_run_is_not_gone_through_again(runner, whole, tmp_path):
    settings = SCENARIOS["every step"]
    assert runner(folder=str(tmp_path), **settings) == 0
    assert runner(folder=str(tmp_path), resume=True, **settings) == 0
    assert_same(tmp_path, whole("every step")[0])


def test_more_steps_and_an_older_checkpoint(tmp_path):
    small_trainer(tmp_path, max_steps=4, lr_scheduler_type="constant", **SAVING).train()
    longer = small_trainer(tmp_path, max_steps=6, lr_scheduler_type="constant", **SAVING)
    longer.train(resume_from_checkpoint=True)
    whole = small_trainer(tmp_path / "whole", max_steps=6, lr_scheduler_type="constant")
    whole.train()
    assert without_clocks(longer.log_history) == without_clocks(whole.log_history)
    other = small_trainer(
        tmp_path, max_steps=4, lr_scheduler_type="constant", temperature=0.7, **SAVING
    )
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [p.name for p in checkpoints(tmp_path)] == [
        f"checkpoint-{n}" for n in (1, 2, 3, 4)
    ]  # 3 to 6 of the other course would be taken for this one's
    again = small_trainer(tmp_path, max_steps=4, lr_scheduler_type="constant", temperature=0.7)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (
        without_clocks(again.log_history)[3]
        == without_clocks(other.log_history)[3]
        != without_clocks(whole.log_history)[3]
    )


def test_what_has_changed_since_is_said(tmp_path, capsys):
    small_trainer(tmp_path, lr_scheduler_type="constant", **SAVING).train()
    trainer = small_trainer(tmp_path, lr_scheduler_type="constant", max_steps=3, learning_rate=0.5)
    trainer.train(resume_from_checkpoint=True)
    said = capsys.readouterr().out
    assert (
        "max_steps is 3, and was 2 when the checkpoint was written\n" in said
        and (
            "learning_rate is 0.5, and was 0.01 when the checkpoint was written; "
            "the optimizer keeps the old value"
        )
        in said
    )
    assert trainer.log_history[-1]["learning_rate"] == 0.01


def test_no_new_rollout_inside_a_cycle(tmp_path):
    settings = dict(
        per_device_train_batch_size=8, steps_per_generation=2, num_iterations=2, max_steps=4
    )
    small_trainer(tmp_path, save_strategy="steps", save_steps=3, **settings).train()
    trainer = small_trainer(tmp_path, **settings)
    batches = remember_batches(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert batches == [] and trainer.state.global_step == 4


def test_the_number_of_processes_is_checked(tmp_path):
    small_trainer(tmp_path, **SAVING).train()
    state = torch.load(tmp_path / "checkpoint-2" / "training_state.pt")
    torch.save(
        {**state, "processes": state["processes"] * 2},
        tmp_path / "checkpoint-2" / "training_state.pt",
    )
    write_manifest(tmp_path / "checkpoint-2")
    with pytest.raises(ValueError, match="written by 2 processes and this run has 1"):
        small_trainer(tmp_path).train(resume_from_checkpoint=True)


def test_between_two_generations_a_batch_may_be_cut_otherwise(tmp_path):
    small_trainer(tmp_path, **SAVING).train()
    cut = dict(per_device_train_batch_size=8, max_steps=3)
    with pytest.raises(ValueError, match="would be lost: completions at a time is 8, and was 16"):
        small_trainer(tmp_path, **cut).train(resume_from_checkpoint=True)
    trainer = small_trainer(tmp_path, gradient_accumulation_steps=2, **cut)
    trainer.train(resume_from_checkpoint=True)
    assert (trainer.state.global_step, trainer.state.cycle) == (3, 3)


def test_rewards_draw_from_a_secret_that_only_the_checkpoint_holds(tmp_path):
    seen = []

    def reward(completions, trainer_state, **columns):
        seen.append(trainer_state.secret)
        assert trainer_state.secret not in repr(trainer_state)
        return digits(completions)

    settings = dict(SAVING, seed=1)
    for folder in ("one", "other"):
        small_trainer(tmp_path / folder, reward, **settings).train()
    small_trainer(tmp_path / "one", reward, **{**settings, "max_steps": 3}).train(
        resume_from_checkpoint=True
    )
    one, same, other, _, again = seen
    assert one == same == again != other and len(bytes.fromhex(one)) == 16
    holding = [
        path
        for path in (tmp_path / "one").rglob("*")
        if path.is_file() and (one.encode() in path.read_bytes())
    ]
    assert {path.name for path in holding} == {"training_state.pt"} and len(holding) == 3
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}
    with SandboxPool(workers=1, allow_weak=True) as pool:
        reads = "import random\ndef read(path): return random._os.open(path, 0)"
        assert pool.run(reads, entry="read", args=(str(holding[0]),)).kind == "forbidden"


def test_a_checkpoint_from_before_there_was_a_secret_gets_one(tmp_path):
    small_trainer(tmp_path, **SAVING).train()
    path = tmp_path / "checkpoint-2" / "training_state.pt"
    saved = torch.load(path)
    del saved["processes"][0]["state"]["secret"]
    torch.save(saved, path)
    write_manifest(path.parent)
    trainer = small_trainer(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.state.secret) == 32


def test_another_models_checkpoint(tmp_path):
    small_trainer(tmp_path, **SAVING).train()
    deeper = small_trainer(tmp_path, model=small_model(num_hidden_layers=3)[0])
    with pytest.raises(ValueError, match="are of another model, .*layers.2.* is missing there"):
        deeper.train(resume_from_checkpoint=True)


def test_a_model_whose_files_have_other_names_than_its_weights(tmp_path):
    tokenizer = small_model()[1]
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        experts_implementation="eager",
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model, other = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    trainer = small_trainer(tmp_path, model=model, tokenizer=tokenizer, **SAVING)
    trainer.train()
    load_weights(other, tmp_path / "checkpoint-2")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values())
    )


# the pieces


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError):
        with new_folder(tmp_path / "checkpoint-1", overwrite=True) as partial:
            (partial / "training_state.pt").write_text("half")
            assert checkpoints(tmp_path) == []
            raise KeyError
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second"):
        with new_folder(tmp_path / "checkpoint-1", overwrite=True) as partial:
            (partial / "a").write_text(text)
    assert (tmp_path / "checkpoint-1" / "a").read_text() == "second" and len(
        list(tmp_path.iterdir())
    ) == 1


def test_which_checkpoint_is_meant(tmp_path):
    for name in (
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-best",
        ".checkpoint-11.partial-3",
        "checkpoint-12x",
    ):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="there is no whole checkpoint .* save_only_model"):
        find_checkpoint(True, tmp_path)  # folders of models alone, or of another library
    assert find_checkpoint("auto", tmp_path) is None
    torch.save({}, tmp_path / "checkpoint-10" / "training_state.pt")
    write_manifest(tmp_path / "checkpoint-10")
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert (
        find_checkpoint(True, tmp_path)
        == find_checkpoint("auto", tmp_path)
        == tmp_path / "checkpoint-10"
        and find_checkpoint(False, tmp_path) is find_checkpoint(None, tmp_path) is None
    )
    with pytest.raises(ValueError, match="no training_state.pt"):
        find_checkpoint(tmp_path / "checkpoint-9", tmp_path)
    remove_old_checkpoints(tmp_path, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-10",
        "checkpoint-12x",
        "checkpoint-9",
        "checkpoint-best",
    ]
    remove_old_checkpoints(tmp_path, 1)
    assert [p.name for p in checkpoints(tmp_path)] == ["checkpoint-10"]


def test_what_is_set_aside_is_never_overwritten(tmp_path):
    for n in (1, 2):
        (tmp_path / "checkpoint-5").mkdir()
        (tmp_path / "log.jsonl").write_text(str(n))
        assert set_aside(tmp_path) == tmp_path / f"earlier-run-{n}"
    assert [(tmp_path / f"earlier-run-{n}" / "log.jsonl").read_text() for n in (1, 2)] == [
        "1",
        "2",
    ] and set_aside(tmp_path) is None


def test_the_log_forgets_later_steps_and_half_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "loss": 0.1}\n{"step": 2, "eval_reward": 1}\n'
        '{"step": 3, "loss": 0.2}\n{"step": 4, "lo'
    )
    log, history = Log(path, show=False), [{"step": 1, "loss": 0.1}, {"step": 2, "eval_reward": 1}]
    log.rewrite(history)
    assert path.read_text() == '{"step": 1, "loss": 0.1}\n{"step": 2, "eval_reward": 1}\n'


def test_what_was_logged_after_the_checkpoint_stands_there_once(tmp_path):
    "A run that is killed between an evaluation and the next checkpoint evaluates again."
    settings = dict(save_strategy="steps", save_steps=2)
    small_trainer(tmp_path, max_steps=2, **settings).train()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "eval_reward": 0.5}\n')
    again = small_trainer(tmp_path, max_steps=3, **settings)
    again.train(resume_from_checkpoint=True)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == again.log_history and "eval_reward" not in str(lines)


# What an earlier run left, and ways out


def saved_weights(folder):
    return {name: p for file in folder.glob("*.safetensors") for name, p in load_file(file).items()}


@pytest.mark.parametrize("before", ["nothing", "evaluate", "log", "train"])
def test_a_checkpoint_holds_this_run_whatever_lies_in_the_folder(tmp_path, before):
    folder = tmp_path / "run"
    for seed in (1, 2):
        trainer = small_trainer(
            folder,
            seed=seed,
            save_strategy="steps",
            save_steps=1,
            arguments=dict(eval_dataset=ROWS[:2]),
        )
        if before == "evaluate":
            trainer.evaluate()
        if before == "log":
            trainer.log({"note": 1.0})
        if before == "train":
            trainer.train()
        trainer.train()
        kept = saved_weights(folder / "checkpoint-2")
        assert kept and all(
            torch.equal(p, kept[name])
            for name, p in trainer.model.named_parameters()
            if name in kept
        )
        assert [
            json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()
        ] == json.loads(json.dumps(trainer.log_history))
    aside = sorted(path.name for path in folder.glob("earlier-run-*"))
    assert aside == [f"earlier-run-{n + 1}" for n in range(3 if before == "train" else 1)] and all(
        len(checkpoints(folder / name)) == 2 for name in aside
    )


def test_a_fresh_folder_is_left_alone(tmp_path):
    trainer = small_trainer(tmp_path / "run", arguments=dict(eval_dataset=ROWS[:2]))
    trainer.evaluate()
    trainer.train()
    assert (
        not list((tmp_path / "run").glob("earlier-run-*"))
        and len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3
    )


def test_more_signals_wait_for_the_checkpoint(tmp_path, capsys, monkeypatch):
    trainer = small_trainer(tmp_path / "run", max_steps=4)
    real = trainer.checkpointer.save_model

    def pressed_again(*args, **kwargs):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        real(*args, **kwargs)

    monkeypatch.setattr(trainer.checkpointer, "save_model", pressed_again)
    collect = trainer.collector.collect

    def pressed(state):
        if trainer.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return collect(state)

    monkeypatch.setattr(trainer.collector, "collect", pressed)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    said = capsys.readouterr().out
    assert (
        "stopped at step 2, and writing a checkpoint" in said
        and "then the run ends" in said
        and (tmp_path / "run" / "checkpoint-2" / "training_state.pt").is_file()
    )
    again = small_trainer(tmp_path / "run", max_steps=4)
    assert again.train(resume_from_checkpoint=True).global_step == 4


def test_a_reward_that_swallows_a_signal_does_not_make_the_run_deaf(tmp_path):
    pressed = []

    def swallows(completions, **columns):
        try:
            pressed.append(len(pressed))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        except BaseException:
            if len(pressed) > 1:
                raise
        return [1.0] * len(completions)

    with pytest.raises(KeyboardInterrupt):
        small_trainer(tmp_path / "run", swallows, max_steps=4).train()
    assert pressed == [0, 1] and (tmp_path / "run" / "checkpoint-1" / "training_state.pt").is_file()


def test_what_keeps_only_the_model_promises_no_more(tmp_path, capsys):
    def fails(completions, trainer_state, **columns):
        return {0: [float(len(c)) for c in completions]}[trainer_state.global_step]

    with pytest.raises(RewardError):
        small_trainer(tmp_path / "run", fails, save_only_model=True).train()
    said = capsys.readouterr().out
    assert (
        "save_only_model=True keeps nothing to go on from" in said
        and "resume_from_checkpoint" not in said
    )


def test_a_run_that_fails_before_its_first_update_leaves_no_checkpoint(tmp_path, capsys):
    def fails(completions, **columns):
        raise KeyError("x")

    with pytest.raises(RewardError):
        small_trainer(tmp_path / "run", fails).train()
    assert not checkpoints(tmp_path / "run") and "checkpoint" not in capsys.readouterr().out
    small_trainer(tmp_path / "run").train()
    assert not list((tmp_path / "run").glob("earlier-run-*"))


class Means(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        logs |= {"mine": numpy.float64(1.5), "pair": numpy.ones(2), "tensor": torch.tensor(2)}


def test_numbers_of_a_callback_do_not_spoil_a_checkpoint(tmp_path):
    def run(**changes):
        return small_trainer(
            tmp_path / "run",
            save_strategy="steps",
            save_steps=1,
            arguments=dict(callbacks=[Means()]),
            **changes,
        )

    run().train()
    more = run(max_steps=3)
    more.train(resume_from_checkpoint=True)
    assert [
        (record["mine"], record["pair"], record["tensor"]) for record in more.log_history
    ] == 3 * [(1.5, [1.0, 1.0], 2)]


@pytest.mark.parametrize("size", [0, 1 / 2])
def test_a_damaged_state_is_passed_over_and_named(tmp_path, size):
    small_trainer(tmp_path / "run", save_strategy="steps", save_steps=1).train()
    newest, older = (tmp_path / "run" / f"checkpoint-{n}" for n in (2, 1))
    path = newest / "training_state.pt"
    path.write_bytes(path.read_bytes()[: int(size * path.stat().st_size)])
    found, passed_over = newest_whole_checkpoint(tmp_path / "run")
    assert found == older and [path for path, _ in passed_over] == [newest]
    with pytest.raises(
        ValueError, match=r"checkpoint-2 \(training_state.pt has .*there are .*checkpoint-1 b"
    ):
        small_trainer(tmp_path / "run").train(resume_from_checkpoint=newest)
    trainer = small_trainer(tmp_path / "run", max_steps=3)
    with pytest.warns(UserWarning, match=r"going on from checkpoint-1.*checkpoint-2 \(training_st"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert (tmp_path / "run" / "earlier-run-1" / "checkpoint-2").is_dir()
    shutil.rmtree(tmp_path / "run" / "earlier-run-1")
    (older / "config.json").unlink()
    for resume in (True, "auto"):
        with pytest.raises(ValueError, match=r"whole .*checkpoint-1 \(config.json is gone\)"):
            small_trainer(tmp_path / "run").train(resume_from_checkpoint=resume)


@pytest.mark.parametrize("place", ["/proc/nobody/run", "file"])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_drawn(tmp_path, place):
    (tmp_path / "file").write_text("")
    trainer = small_trainer(tmp_path / place)
    trainer.collector.collect = None
    with pytest.raises(
        ValueError, match=f"output_dir='.*{place}' cannot be written: .*; name another folder"
    ):
        trainer.train()


# Adapters by name, the best checkpoint

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def two_adapters(model):
    model = get_peft_model(model, LoraConfig(**LORA))
    model.add_adapter("grpo", LoraConfig(**LORA))
    for name, p in model.named_parameters():
        if "lora_B.default" in name:
            torch.nn.init.normal_(p, std=0.3)
    model.set_adapter("grpo")
    return model


def both_adapters(model):
    both = two_adapters(model)
    both.base_model.set_adapter(["default", "grpo"])
    return both


def of_transformers(name):
    def add(model):
        model.add_adapter(LoraConfig(**LORA), **name)
        return model

    return add


@pytest.mark.parametrize(
    "adapt",
    [
        two_adapters,
        both_adapters,
        lambda model: get_peft_model(model, LoraConfig(**LORA), adapter_name="mine"),
        of_transformers({}),
        of_transformers(dict(adapter_name="mine")),
    ],
    ids=["two", "both active", "another name", "transformers", "transformers, another name"],
)
def test_a_run_resumes_with_the_adapter_that_it_trained(tmp_path, adapt, peft_as_it_is):
    def run():
        torch.manual_seed(0)
        model, tokenizer = small_model()
        return small_trainer(
            tmp_path / "run",
            model=adapt(model),
            tokenizer=tokenizer,
            save_strategy="steps",
            save_steps=2,
        )

    first = run()
    first.train()
    again = run()
    again.train(resume_from_checkpoint=True)
    before, now = weights_of(first.model), weights_of(again.model)
    assert (
        len(now) in (16, 32)
        and all(torch.equal(before[name], now[name]) for name in now)
        and any(p.abs().sum() > 0 for name, p in now.items() if "lora_B" in name)
    )


def test_weights_of_another_size_are_refused(tmp_path):
    trainer = small_trainer(tmp_path / "run", save_strategy="steps", save_steps=2)
    trainer.train()
    other = small_model(intermediate_size=32)[0]
    with pytest.raises(
        ValueError,
        match=r"of another model, .*experts.*_proj.* is \(.*\) of .* there and \(.*\) of .* here",
    ):
        load_weights(other, tmp_path / "run" / "checkpoint-2")


def test_adapters_that_cannot_be_loaded_are_refused(tmp_path):
    trainer = small_trainer(
        tmp_path / "run",
        model=get_peft_model(
            small_model()[0], LoraConfig(**{**LORA, "target_modules": ["q_proj"]})
        ),
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-2"
    with pytest.raises(ValueError, match="are of another model, .*k_proj.* is missing there"):
        load_weights(get_peft_model(small_model()[0], LoraConfig(**LORA)), folder)
    with pytest.raises(ValueError, match="there is no folder .*nowhere"):
        load_weights(trainer.model, tmp_path / "nowhere")
    for changed, words in (
        (dict(r=7), "r of the adapter is 7, and it is 4 in .*checkpoint-2'"),
        (dict(lora_alpha=99), "lora_alpha of the adapter is 99, and it is"),
        (dict(use_rslora=True), "use_rslora of the adapter is True, and it is False"),
    ):
        other = get_peft_model(
            small_model()[0], LoraConfig(**{**LORA, "target_modules": ["q_proj"], **changed})
        )
        before = weights_of(other)
        with pytest.raises(ValueError, match=words):
            load_weights(other, folder)
        assert all(torch.equal(before[name], p) for name, p in weights_of(other).items())
    full = small_trainer(tmp_path / "full", save_strategy="steps", save_steps=2)
    full.train()
    with pytest.raises(
        ValueError, match="checkpoint-2' holds no adapter, but weights of the model itself"
    ):
        load_weights(
            get_peft_model(small_model()[0], LoraConfig(**LORA)), tmp_path / "full" / "checkpoint-2"
        )


@pytest.mark.parametrize("moved", [False, True])
def test_a_resumed_run_knows_its_best_checkpoint(tmp_path, moved):
    scores = {
        0: 9.0,
        2: 1.0,
        4: 5.0,
        6: math.nan,
        8: -1.0,
    }  # nothing before the run is a best checkpoint, and no number is not better than one

    def run(folder):
        made = small_trainer(
            folder,
            max_steps=8,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="reward",
            save_total_limit=1,
            eval_on_start=True,
            arguments=dict(eval_dataset=ROWS[:2]),
        )
        evaluate = made.evaluate

        def evaluation(*args):
            record = evaluate(*args)
            return {**record, "eval_reward": scores[record["step"]]}

        made.evaluate = evaluation
        return made

    cut, folder = run(tmp_path / "run"), tmp_path / "run"
    collect = cut.collector.collect

    def stops(state):
        if state.global_step == 4:
            raise RuntimeError("cut")
        return collect(state)

    cut.collector.collect = stops
    with pytest.raises(RuntimeError, match="cut"):
        cut.train()
    if moved:
        folder = folder.rename(tmp_path / "elsewhere")
    trainer = run(folder)
    trainer.train(resume_from_checkpoint=True)
    kept = saved_weights(folder / "checkpoint-4")
    assert (
        trainer.state.best_global_step,
        trainer.state.best_metric,
        trainer.state.best_model_checkpoint,
    ) == (4, 5.0, str(folder / "checkpoint-4"))
    assert all(
        torch.equal(p, kept[name]) for name, p in trainer.model.named_parameters() if name in kept
    )


def test_an_evaluation_that_fails_leaves_the_run_as_it_was(tmp_path):
    def fails(completions, trainer_state, **columns):
        return [1.0] * len(completions) if columns["answer"][0] else 1 / 0

    trainer = small_trainer(tmp_path / "run", fails)
    trainer.train()
    collected, state = trainer.metrics.state_dict(), torch.get_rng_state()
    with pytest.raises(RewardError):
        trainer.evaluate([{"prompt": "1+1=", "answer": ""}])
    assert trainer.metrics.state_dict() == collected and torch.equal(torch.get_rng_state(), state)


def test_a_second_run_begins_with_its_own_best(tmp_path):
    trainer = small_trainer(tmp_path / "run", use_adaptive_entropy=True, entropy_coef=0.1)
    trainer.train()
    (
        trainer.state.best_metric,
        trainer.state.best_global_step,
        trainer.policy_update.entropy_bonus.coef,
    ) = (
        9.0,
        1,
        0.7,
    )
    trainer.train()
    assert trainer.state.best_metric is None and trainer.policy_update.entropy_bonus.coef < 0.7


# what a run goes on from


def resumed_with(folder, model, **changes):
    return small_trainer(folder, model=model, beta=0.1, max_steps=4, learning_rate=0.05, **changes)


def test_the_reference_is_the_policy_that_the_run_began_with(tmp_path):
    def adapted():
        torch.manual_seed(0)
        return get_peft_model(small_model()[0], LoraConfig(**LORA))

    whole = resumed_with(tmp_path / "whole", adapted(), save_strategy="steps", save_steps=2)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    moved = PeftModel.from_pretrained(
        small_model()[0], checkpoint, is_trainable=True
    )  # its adapter is no start
    again = resumed_with(tmp_path / "again", moved)
    again.train(resume_from_checkpoint=checkpoint)
    assert [r["kl"] for r in again.log_history] == [
        r["kl"] for r in whole.log_history
    ] and whole.log_history[-1]["kl"] > 1e-4


def test_a_reference_that_no_checkpoint_holds_is_asked_for(tmp_path):
    small_trainer(
        tmp_path, beta=0.1, max_steps=2, learning_rate=0.05, save_strategy="steps", save_steps=2
    ).train()
    checkpoint = tmp_path / "checkpoint-2"
    moved = type(small_model()[0]).from_pretrained(checkpoint)
    with pytest.raises(
        ValueError, match="began with another one: give the model that it began with"
    ):
        resumed_with(tmp_path, moved).train(resume_from_checkpoint=True)
    resumed_with(tmp_path, small_model()[0]).train(resume_from_checkpoint=True)


def test_the_best_checkpoint_stays_however_its_path_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best, worse, newest = (Path("run") / f"checkpoint-{n}" for n in (1, 2, 3))
    for folder in (best, worse, newest):
        folder.mkdir(parents=True)
    remove_old_checkpoints("run", 1, best.resolve())
    assert [p.name for p in checkpoints("run")] == ["checkpoint-1", "checkpoint-3"]


def test_a_run_that_moves_keeps_what_lay_there_apart(tmp_path):
    for name, rate in (("A", 0.01), ("B", 0.02)):
        small_trainer(
            tmp_path / name,
            max_steps=2,
            learning_rate=rate,
            save_strategy="steps",
            save_steps=1,
            log_completions=True,
            num_completions_to_print=1,
        ).train()
    (tmp_path / "B" / "hints.jsonl").touch()  # if there was nothing to hint at
    moved = small_trainer(tmp_path / "B", max_steps=3, learning_rate=0.01)
    moved.train(resume_from_checkpoint=tmp_path / "A" / "checkpoint-2")
    # its own hints, if it gave any
    names = {p.name for p in (tmp_path / "B").iterdir()} - {"hints.jsonl"}
    assert names == {"earlier-run-1", "log.jsonl", "completions"}
    assert sorted(p.name for p in (tmp_path / "B" / "earlier-run-1").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "completions",
        "hints.jsonl",
        "log.jsonl",
    ]
    assert [
        json.loads(line) for line in (tmp_path / "B" / "log.jsonl").read_text().splitlines()
    ] == moved.log_history and len(moved.log_history) == 3


def test_an_evaluation_that_was_interrupted_is_made_when_the_run_goes_on(tmp_path):
    def run(folder, stops=False):
        made = small_trainer(
            folder,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=4,
            arguments=dict(eval_dataset=ROWS[:2]),
        )
        if stops:
            made.evaluate = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        return made

    whole = run(tmp_path / "whole")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", stops=True).train()
    again = run(tmp_path / "cut")
    again.train(resume_from_checkpoint=True)
    assert (
        without_clocks(again.log_history) == without_clocks(whole.log_history)
        and sum("eval_reward" in record for record in again.log_history) == 2
    )
    assert again.state.best_global_step == whole.state.best_global_step
    assert not list((tmp_path / "cut").glob("checkpoint-3"))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(optim="sgd"), "optim is 'sgd', and was 'adamw_torch"),
        (dict(weight_decay=0.1), "the optimizer's state .* does not fit this run"),
    ],
)
def test_an_optimizer_that_cannot_go_on(tmp_path, changes, words):
    small_trainer(tmp_path, save_strategy="steps", save_steps=2, weight_decay=0.0).train()
    with pytest.raises(ValueError, match=words):
        small_trainer(tmp_path, max_steps=3, **changes).train(resume_from_checkpoint=True)


def test_optimizers_that_are_one_go_on(tmp_path):
    small_trainer(tmp_path, save_strategy="steps", save_steps=2, optim="adamw_torch_fused").train()
    small_trainer(tmp_path, optim="adamw_torch", max_steps=3).train(resume_from_checkpoint=True)


def test_a_resume_that_fails_changes_no_weight(tmp_path):
    def adapted(*names):
        torch.manual_seed(0)
        return get_peft_model(
            small_model()[0], LoraConfig(**{**LORA, "target_modules": list(names)})
        )

    small_trainer(
        tmp_path / "lora", model=adapted("q_proj", "v_proj"), save_strategy="steps", save_steps=2
    ).train()
    small_trainer(tmp_path / "full", save_strategy="steps", save_steps=2, weight_decay=0.0).train()
    for trainer, words in (
        (
            small_trainer(tmp_path / "lora", model=adapted("q_proj")),
            "v_proj.* missing here.* Give the model, or the peft_config, that was saved",
        ),
        (small_trainer(tmp_path / "full", weight_decay=0.1), "does not fit this run"),
    ):
        before = weights_of(trainer.model)
        with pytest.raises(ValueError, match=words):
            trainer.train(resume_from_checkpoint=True)
        assert all(torch.equal(before[name], p) for name, p in weights_of(trainer.model).items())


@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_damaged_weights_say_which_file(tmp_path, damage):
    def adapted():
        torch.manual_seed(0)
        return get_peft_model(small_model()[0], LoraConfig(**LORA))

    small_trainer(tmp_path, model=adapted(), save_strategy="steps", save_steps=2).train()
    file = tmp_path / "checkpoint-2" / "adapter_model.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])
    for resume in (True, tmp_path / "checkpoint-2"):
        with pytest.raises(
            ValueError, match="checkpoint-2.*adapter_model.safetensors (has|is gone)"
        ):
            small_trainer(tmp_path, model=adapted()).train(resume_from_checkpoint=resume)
    with pytest.raises(ValueError, match="the weights in .* are damaged, cut off or gone"):
        load_weights(adapted(), tmp_path / "checkpoint-2")


def test_a_checkpoint_beyond_max_steps_says_so(tmp_path, capsys):
    small_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    small_trainer(tmp_path, max_steps=1).train(resume_from_checkpoint=True)
    assert "is of step 2 and max_steps is 1: nothing is left to do" in capsys.readouterr().out


def test_a_reference_that_is_not_wanted_any_more(tmp_path):
    small_trainer(
        tmp_path,
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        save_strategy="steps",
        save_steps=2,
    ).train()
    small_trainer(tmp_path, beta=0.0, max_steps=3).train(resume_from_checkpoint=True)


def test_what_no_adapter_file_could_hold_is_refused(tmp_path):
    model = get_peft_model(small_model()[0], LoraConfig(**LORA))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(
        ValueError,
        match=(
            "1 weights of the model itself train beside the adapter, "
            ".*model.norm.weight.*modules_to_save"
        ),
    ):
        small_trainer(tmp_path, model=model)
    torch.manual_seed(0)
    saved = get_peft_model(
        small_model()[0], LoraConfig(**LORA, modules_to_save=["norm"], bias="lora_only")
    )
    small_trainer(tmp_path, model=saved, save_strategy="steps", save_steps=2).train()
    norm = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")[
        "base_model.model.model.norm.weight"
    ]
    assert torch.equal(
        norm, saved.base_model.model.model.norm.modules_to_save["default"].weight
    ) and not torch.equal(norm, torch.ones_like(norm))
    merged = get_peft_model(small_model()[0], LoraConfig(**LORA))
    merged.merge_adapter()
    with pytest.raises(ValueError, match="call model.unmerge_adapter"):
        small_trainer(tmp_path, model=merged)


def test_an_adapter_that_writes_tokens_of_its_own_is_refused(tmp_path):
    from peft import PromptTuningConfig

    with pytest.raises(
        ValueError,
        match=(
            "of the prompt-learning kind PROMPT_TUNING, which writes tokens of its own before a "
            "prompt.*LoraConfig"
        ),
    ):
        small_trainer(
            tmp_path,
            arguments=dict(
                peft_config=PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
            ),
        )


def test_a_checkpoint_of_transformers_is_called_that(tmp_path):
    "Its own trainer writes one; ours says how to start from its weights, and does."
    from transformers import Trainer, TrainingArguments

    model = small_model()[0]
    rows = [dict(input_ids=[3, 4, 5], labels=[3, 4, 5])] * 2
    args = TrainingArguments(str(tmp_path / "run"), max_steps=1, report_to="none", use_cpu=True)
    Trainer(model, args, train_dataset=rows).train()
    folder = tmp_path / "run" / "checkpoint-1"
    for resume, output_dir in ((folder, tmp_path / "mine"), (True, tmp_path / "run")):
        trainer = small_trainer(output_dir)
        with pytest.raises(ValueError) as caught:
            trainer.train(resume_from_checkpoint=resume)
        said = str(caught.value)
        assert f"{folder} (it holds no training_state.pt" in said
        assert "written with save_only_model=True or by TRL or transformers" in said
        assert "give it to GRPOTrainer as the model" in said
    trainer = small_trainer(tmp_path / "on", model=str(folder))
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), model.parameters()))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_no_token_is_lost_or_counted_twice_by_another_number_of_processes(processes):
    entries = [{"state": {"tokens": n, "cycle": 5}, "callbacks": {}} for n in (30, 4)]
    shared = shared_out(entries, processes)
    assert len(shared) == processes and sum(one["state"]["tokens"] for one in shared) == 34
    assert all(one["state"]["cycle"] == 5 and one.keys() == entries[0].keys() for one in shared)
