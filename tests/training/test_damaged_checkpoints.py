"""A checkpoint is checked before it is believed: files that were changed, contents that were
doctored and given a new manifest. What is wrong is a sentence, and nothing of the run has changed.
"""

import copy
import json
import math
import random
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_runs import small_model, small_trainer

from grpo_nb.training.checkpoint import (
    file_fault,
    find_checkpoint,
    load_weights,
    newest_whole_checkpoint,
    write_manifest,
)
from grpo_nb.training.optimizer import Inspector, check_optimizer_state, make_optimizer
from grpo_nb.training.state import random_state

LORA = dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SETTINGS = dict(  # the checkpoint lies inside a cycle: its completions are in it
    max_steps=5,
    per_device_train_batch_size=8,
    steps_per_generation=2,
    num_iterations=2,
    beta=0.1,
    weight_decay=0.1,
    optim="adamw_torch",
    use_adaptive_entropy=True,
    entropy_coef=0.1,
)


def make(folder, adapted=True, **changes):
    model, tokenizer = small_model()
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(**LORA)) if adapted else model
    return small_trainer(folder, model=model, tokenizer=tokenizer, **{**SETTINGS, **changes})


@pytest.fixture(scope="module", params=[True, False], ids=["an adapter", "a whole model"])
def saved(request, tmp_path_factory):
    "A checkpoint, and a trainer that has trained for a while and is to load damaged copies of it."
    first = make(
        tmp_path_factory.mktemp("saved"), request.param, save_strategy="steps", save_steps=3
    )
    first.train()
    torch.manual_seed(1)
    trainer = make(tmp_path_factory.mktemp("loading"), request.param, max_steps=1, seed=3)
    trainer.train()
    trainer.config.max_steps, trainer.config.seed = 5, first.config.seed
    return first.checkpointer.config.output_dir + "/checkpoint-3", trainer


def everything(trainer):
    "All that a load may change, copied."
    return copy.deepcopy(
        {
            "model": dict(trainer.model.state_dict()),
            "update": trainer.policy_update.state_dict(),
            "parts": {name: part.state_dict() for name, part in trainer.checkpointer.own.items()}
            | {"seconds": None},
            "run": (trainer.state.max_steps, trainer.state.first_step, trainer.hints_given),
            "history": trainer.log_history,
            "log": trainer.log.path.read_bytes(),
            "files": sorted(map(str, trainer.log.path.parent.rglob("*"))),
            "random": random_state(),
        }
    )


def same(a, b):
    if isinstance(a, dict):
        names = a.keys() - {"seconds"}  # a clock
        return names == b.keys() - {"seconds"} and all(same(a[name], b[name]) for name in names)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or a != a and b != b


def refused(trainer, folder):
    "What the trainer says; nothing of it has changed."
    before = everything(trainer)
    with pytest.raises(ValueError) as caught:
        trainer.train(resume_from_checkpoint=folder)
    assert same(before, everything(trainer)), "the run was changed"
    assert str(folder) in str(caught.value), "the sentence does not name the checkpoint"
    return str(caught.value)


def test_a_whole_one_is_loaded(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "checkpoint-3")
    checkpointer = saved[1].checkpointer
    assert checkpointer.read(folder, 12).contents["rows"] == 12


def test_flipped_bytes_and_cut_tails(saved, tmp_path):
    whole, trainer = saved
    folder, chance = shutil.copytree(whole, tmp_path / "checkpoint-3"), random.Random(7)
    files = sorted(path for path in folder.rglob("*") if path.stat().st_size)
    assert {"manifest.json", "training_state.pt", "tokenizer.json"} < {p.name for p in files}
    for attempt in range(60):  # for each of two checkpoints: 100 flipped, 20 cut
        path = chance.choice(files)
        data = path.read_bytes()
        place = chance.randrange(len(data))
        if attempt < 50:
            other = data[place] ^ chance.randrange(1, 256)
            path.write_bytes(data[:place] + bytes([other]) + data[place + 1 :])
        else:
            path.write_bytes(data[:place])
        assert path.name in refused(trainer, folder) or path.name == "manifest.json"
        path.write_bytes(data)


def put(*path_and_value):
    "A change of a nested entry: the path to it, and the value or a function of the old one."
    *path, name, value = path_and_value

    def change(contents):
        for key in path:
            contents = contents[key]
        contents[name] = value(contents[name]) if callable(value) else value

    return change


def drop(*path):
    def change(contents):
        for key in path[:-1]:
            contents = contents[key]
        del contents[path[-1]]

    return change


STATE, BATCH = ("processes", 0, "state"), ("processes", 0, "state", "batch")
RANDOM, OPTIMIZER = (*STATE, "random"), ("shared", "update", "optimizer")
GROUP, MOMENTS = (*OPTIMIZER, "param_groups", 0), (*OPTIMIZER, "state", 0)
SCHEDULE, BONUS = ("shared", "update", "schedule"), ("shared", "update", "entropy_bonus")


def numpy_at(index, value):
    return lambda old: tuple(value if i == index else part for i, part in enumerate(old))


DOCTORED = {
    "a later update": put(*STATE, "global_step", 999),
    "no update yet": put(*STATE, "global_step", 0),
    "a negative update": put(*STATE, "global_step", -1),
    "an update in words": put(*STATE, "global_step", "three"),
    "half an update": put(*STATE, "global_step", 2.5),
    "another cycle": put(*STATE, "cycle", 7),
    "a negative cycle": put(*STATE, "cycle", -2),
    "a place beyond the cycle": put(*STATE, "micro_step", 99),
    "another place": put(*STATE, "micro_step", 1),
    "another epoch": put(*STATE, "epoch", 5.0),
    "an epoch that is NaN": put(*STATE, "epoch", math.nan),
    "negative tokens": put(*STATE, "tokens", -5),
    "seconds that are NaN": put(*STATE, "seconds", math.nan),
    "a best evaluation in the future": put(*STATE, "best_global_step", 77),
    "a best evaluation in words": put(*STATE, "best_metric", "high"),
    "a best checkpoint that is none": put(*STATE, "best_model_checkpoint", 5),
    "no cycle": drop(*STATE, "cycle"),
    "an entry that hides a method": put(*STATE, "advance", 1),
    "no state": drop(*STATE),
    "a state that is a list": put(*STATE, []),
    "no random state of NumPy": drop(*RANDOM, "numpy"),
    "NumPy past its end": put(*RANDOM, "numpy", numpy_at(2, 10**9)),
    "too few numbers for NumPy": put(*RANDOM, "numpy", numpy_at(1, [1, 2, 3])),
    "a short state of torch": put(*RANDOM, "torch", lambda old: old[:-8]),
    "floats as the state of torch": put(*RANDOM, "torch", lambda old: old.float()),
    "a short state of Python": put(*RANDOM, "python", (3, (1, 2), None)),
    "no completions": put(*STATE, "batch", None),
    "a row too few": put(
        *BATCH, lambda old: {name: x[1:] for name, x in old.items() if x is not None}
    ),
    "an unknown token": put(*BATCH, "completion_ids", lambda old: old + 10**9),
    "a negative token": put(*BATCH, "prompt_ids", lambda old: old - 10**9),
    "tokens that are floats": put(*BATCH, "prompt_ids", lambda old: old.float()),
    "one advantage too many": put(*BATCH, "advantages", lambda old: torch.cat([old, old[:1]])),
    "an advantage that is NaN": put(*BATCH, "advantages", lambda old: old * math.nan),
    "log-probs of other tokens": put(*BATCH, "rollout_logps", lambda old: old[:, 1:]),
    "padding inside": put(*BATCH, "completion_mask", lambda old: old.flip(1).logical_not()),
    "a mask of numbers": put(*BATCH, "loss_mask", lambda old: old.long()),
    "no mask": drop(*BATCH, "loss_mask"),
    "an unknown column": put(*BATCH, "more", torch.ones(1)),
    "metrics in words": put("processes", 0, "metrics", "loss", [("low", 1.0)]),
    "metrics without weights": put("processes", 0, "metrics", "loss", [1.0]),
    "tokens of the log below zero": put("processes", 0, "recorder", "total_tokens", -1),
    "a flag in words": put("processes", 0, "callbacks", "should_save", "yes"),
    "a missing flag": drop("processes", 0, "callbacks", "should_evaluate"),
    "moments of another shape": put(*MOMENTS, "exp_avg", lambda old: old[:-1]),
    "moments of another size": put(*MOMENTS, "exp_avg_sq", torch.zeros(3)),
    "moments that are whole numbers": put(*MOMENTS, "exp_avg", lambda old: old.long()),
    "moments that are NaN": put(*MOMENTS, "exp_avg", lambda old: old * math.nan),
    "negative squares": put(*MOMENTS, "exp_avg_sq", lambda old: old - 1),
    "a step below zero": put(*MOMENTS, "step", torch.tensor(-1.0)),
    "an infinite step": put(*MOMENTS, "step", torch.tensor(math.inf)),
    "a step that is a row": put(*MOMENTS, "step", torch.ones(5)),
    "no moments": drop(*MOMENTS, "exp_avg"),
    "moments under another name": put(*MOMENTS, "more", torch.ones(1)),
    "empty moments": put(*MOMENTS, {}),
    "moments gone": drop(*MOMENTS),
    "moments of a parameter that is not there": put(*OPTIMIZER, "state", 999, {}),
    "no state of the optimizer": put(*OPTIMIZER, "state", {}),
    "an optimizer that is empty": put(*OPTIMIZER, {}),
    "no groups": put(*OPTIMIZER, "param_groups", []),
    "parameters in another order": put(*GROUP, "params", lambda old: old[::-1]),
    "a negative rate": put(*GROUP, "lr", -1.0),
    "a rate that is NaN": put(*GROUP, "lr", math.nan),
    "a beta above one": put(*GROUP, "betas", (0.9, 1.5)),
    "three betas": put(*GROUP, "betas", (0.9, 0.9, 0.9)),
    "an epsilon in words": put(*GROUP, "eps", "small"),
    "no decay": drop(*GROUP, "weight_decay"),
    "uphill": put(*GROUP, "maximize", True),
    "another kind of moments": put(*GROUP, "amsgrad", True),
    "a schedule at its end": put(*SCHEDULE, "last_epoch", 999),
    "a schedule before its beginning": put(*SCHEDULE, "last_epoch", -1),
    "a schedule that stands elsewhere": put(*SCHEDULE, "last_epoch", 1),
    "no place in the schedule": drop(*SCHEDULE, "last_epoch"),
    "no rates": put(*SCHEDULE, "_last_lr", []),
    "another first rate": put(*SCHEDULE, "base_lrs", lambda old: [9.0 for _ in old]),
    "no functions": drop(*SCHEDULE, "lr_lambdas"),
    "an entry that hides the schedule's step": put(*SCHEDULE, "step", 3),
    "a bonus that is NaN": put(*BONUS, "coef", math.nan),
    "no bonus": drop(*BONUS, "last"),
    "no scaler": drop("shared", "update", "scaler"),
    "a record of the future": put("history", 0, "step", 999),
    "a record without a step": drop("history", 0, "step"),
    "a reward in words": put("history", 0, "reward", "good"),
    "a log that is a number": put("history", 5),
    "settings cut off": put("config", lambda old: old[: len(old) // 2]),
    "unknown settings": put("config", lambda old: json.dumps({**json.loads(old), "more": 1})),
    "impossible settings": put("config", lambda old: json.dumps({**json.loads(old), "beta": -1})),
    "other data": put("rows", 13),
    "rows in words": put("rows", "twelve"),
    "no processes": put("processes", []),
    "two processes": put("processes", lambda old: old * 2),
    "no log": drop("history"),
    "an unknown entry": put("more", 1),
}


def doctor(folder, change):
    contents = torch.load(folder / "training_state.pt")
    change(contents)
    torch.save(contents, folder / "training_state.pt")
    write_manifest(folder)


@pytest.mark.long
def test_doctored_contents_with_a_new_manifest(saved, tmp_path):
    whole, trainer = saved
    assert len(DOCTORED) >= 50
    silent = []
    for name, change in DOCTORED.items():
        folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
        doctor(folder, change)
        try:
            refused(trainer, folder)
        except BaseException as error:
            silent.append(f"{name}: {type(error).__name__}: {error}"[:300])
        shutil.rmtree(folder)
    assert not silent, "\n".join(silent)


def doctored_reference(folder):
    doctor(folder, put("shared", "update", "reference", lambda old: (old or [torch.ones(1)])[:-1]))


def changed_weights(change):
    def damage(folder):
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        change(tensors, max(tensors))
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


def text_in(name, text):
    return lambda folder: (folder / name).write_text(text)


FILES = {
    "another shape": changed_weights(lambda t, name: t.update({name: t[name][:-1].clone()})),
    "another type": changed_weights(lambda t, name: t.update({name: t[name].half()})),
    "NaN": changed_weights(lambda t, name: t.update({name: t[name] * math.nan})),
    "a weight gone": changed_weights(lambda t, name: t.pop(name)),
    "another name": changed_weights(lambda t, name: t.update({name + "x": t.pop(name)})),
    "weights that are text": lambda folder: next(folder.glob("*.safetensors")).write_text("{}"),
    "no weights": lambda folder: next(folder.glob("*.safetensors")).unlink(),
    "no state": lambda folder: (folder / "training_state.pt").unlink(),
    "a state that is text": text_in("training_state.pt", "{}"),
    "a state that is a number": lambda folder: torch.save(5, folder / "training_state.pt"),
    "a state with code": lambda folder: torch.save(print, folder / "training_state.pt"),
}


def test_doctored_files_with_a_new_manifest(saved, tmp_path):
    whole, trainer = saved
    adapted = {
        "another rank": lambda folder: changed_config(folder, r=3),
        "settings of an adapter that are a list": text_in("adapter_config.json", "[]"),
        "settings of an adapter cut off": text_in("adapter_config.json", '{"r": '),
        "a reference with a weight too few": doctored_reference,
        "no reference": lambda f: doctor(f, put("shared", "update", "reference", None)),
    }
    damages = FILES | (adapted if hasattr(trainer.model, "peft_config") else {})
    for name, damage in damages.items():
        folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
        damage(folder)
        write_manifest(folder)
        assert refused(trainer, folder), name
        shutil.rmtree(folder)


def changed_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_manifests_that_lead_elsewhere(saved, tmp_path):
    whole, trainer = saved
    folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
    (tmp_path / "outside").write_text("x")
    text = (folder / "manifest.json").read_text()

    def manifest(change):
        files = json.loads(text)["files"]
        change(files)
        plain = {"version": 1, "files": files}
        (folder / "manifest.json").write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")

    nothing = {"bytes": 1, "sha256": "0" * 64}
    manifest(lambda files: files.update({"../outside": nothing}))
    assert "outside the checkpoint" in refused(trainer, folder)
    manifest(lambda files: files.update({"sub": nothing}))
    (folder / "sub").mkdir()
    assert "is no file" in refused(trainer, folder)
    manifest(lambda files: files.clear())
    assert "training_state.pt is not in manifest.json" in refused(trainer, folder)
    (folder / "manifest.json").write_text(text)
    shutil.copy(next(folder.glob("*.safetensors")), folder / "more.safetensors")
    assert "more.safetensors is not in manifest.json" in refused(trainer, folder)


def test_links_are_followed(saved, tmp_path):
    whole, trainer = saved
    folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
    (weights,) = folder.glob("*.safetensors")
    moved = weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(moved)
    link = tmp_path / "runs" / "checkpoint-3"
    link.parent.mkdir()
    link.symlink_to(folder)
    assert newest_whole_checkpoint(link.parent) == (link, [])
    data = bytearray(moved.read_bytes())
    data[-1] ^= 1
    moved.write_bytes(data)
    assert weights.name in refused(trainer, link)
    moved.unlink()
    assert "is gone" in refused(trainer, link)


def test_an_old_checkpoint_without_a_manifest(saved, tmp_path):
    whole, trainer = saved
    folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
    doctor(folder, drop("shared", "update", "trained"))  # of later versions
    (folder / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="has no manifest.json"):
        assert find_checkpoint(True, tmp_path) == folder
    assert trainer.checkpointer.read(folder, 12).folder == folder
    state, chance = folder / "training_state.pt", random.Random(3)
    data = state.read_bytes()
    noticed = 0
    for _ in range(20):  # in the middle of an archive whose parts have checksums
        place = chance.randrange(len(data) // 4, len(data) // 2)
        state.write_bytes(data[:place] + bytes([data[place] ^ 5]) + data[place + 1 :])
        noticed += "training_state.pt" in (file_fault(folder) or "")
        state.write_bytes(data)
    assert noticed >= 15 and file_fault(folder) is None  # the others are padding between parts
    doctor_state = torch.load(state)
    doctor_state["processes"][0]["state"]["global_step"] = 999
    torch.save(doctor_state, state)
    with pytest.warns(UserWarning, match="has no manifest.json"):
        assert "global_step" in refused(trainer, folder)


def test_the_best_model_is_checked_before_it_is_loaded(tmp_path):
    first = make(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True, max_steps=2)
    first.train()
    folder = tmp_path / "checkpoint-2"
    load_weights(first.model, folder)
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match="adapter_model.safetensors is not what was written"):
        load_weights(first.model, folder)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_fits_is_accepted(name, dtype, tmp_path):
    "Each optimizer's own state, after steps and after a way through a file, on every shape."
    shapes = {"a": (6, 4), "b": (3, 6, 4), "norm": (6,), "unused": (2, 2)}
    config = make(tmp_path / "run", optim=name).config
    weights = {n: torch.nn.Parameter(torch.ones(s, dtype=dtype)) for n, s in shapes.items()}
    optimizer, state = make_optimizer(config, weights), None
    for _ in range(2):
        for key, p in weights.items():
            p.grad = None if key == "unused" else torch.randn_like(p)
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt")
        check_optimizer_state(optimizer, state, Inspector("'there'"))
        optimizer.load_state_dict(state)
    check_optimizer_state(make_optimizer(config, weights), state, Inspector("'there'"))
    for number, entry in state["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                wrong = {**entry, key: torch.ones(7, 7)}
                doctored = {**state, "state": {**state["state"], number: wrong}}
                with pytest.raises(ValueError, match=key):
                    check_optimizer_state(optimizer, doctored, Inspector("'there'"))


def test_the_scaler_of_float16(tmp_path):
    first = make(tmp_path / "half", fp16=True, save_strategy="steps", save_steps=3)
    first.train()
    folder, trainer = tmp_path / "half" / "checkpoint-3", make(tmp_path / "on", fp16=True)
    trainer.checkpointer.read(folder, 12)
    for change in (
        put("shared", "update", "scaler", {}),
        put("shared", "update", "scaler", "scale", math.nan),
        put("shared", "update", "scaler", "scale", -1.0),
        put("shared", "update", "scaler", "_growth_tracker", "high"),
    ):
        copied = shutil.copytree(folder, tmp_path / "checkpoint-3")
        doctor(copied, change)
        with pytest.raises(ValueError, match="scale"):
            trainer.train(resume_from_checkpoint=copied)
        shutil.rmtree(copied)


def test_a_damaged_log_is_restored(tmp_path, capsys):
    first = make(tmp_path, save_strategy="steps", save_steps=3)
    first.train()
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes(lines[0].encode() + b"\n{\xff\xfe")
    again = make(tmp_path)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
    assert path.read_text().splitlines()[:3] == lines[:3] and "log.jsonl was damaged" in (
        capsys.readouterr().out
    )
    assert len(path.read_text().splitlines()) == len(lines)
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="log.jsonl is a folder.*move it away"):
        make(tmp_path).train(resume_from_checkpoint=tmp_path / "checkpoint-3")
