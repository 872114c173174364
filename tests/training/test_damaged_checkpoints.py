"""A checkpoint is checked before it is believed: files that were changed, contents that were
doctored and given a new manifest. What is wrong is a sentence, and nothing of the run has changed.
"""

import copy
import json
import random
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_runs import small_model, small_trainer

from grpo_nb.training.checkpoint import (
    find_checkpoint,
    load_weights,
    newest_whole_checkpoint,
    write_manifest,
)
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
        if path.name != "manifest.json":  # a blank in it says nothing about a file
            assert path.name in refused(trainer, folder)
        path.write_bytes(data)


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
    adapted = {"another rank": lambda folder: changed_config(folder, r=3)}
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


def test_an_old_checkpoint_without_a_manifest(saved, tmp_path):
    whole, trainer = saved
    folder = shutil.copytree(whole, tmp_path / "checkpoint-3")
    (folder / "manifest.json").unlink()
    contents = torch.load(folder / "training_state.pt")
    del contents["shared"]["update"]["moved"], contents["data"]  # of later versions
    torch.save(contents, folder / "training_state.pt")
    with pytest.warns(UserWarning, match="has no manifest.json"):
        assert find_checkpoint(True, tmp_path) == folder
    assert trainer.checkpointer.read(folder, 12).folder == folder


def test_moments_of_another_optimizer_are_refused(tmp_path):
    "One that a script has made, of which no setting says anything."

    def run(kind, folder, **changes):
        model, tokenizer = small_model()
        given = dict(optimizers=(kind(model.parameters(), lr=0.01), None))
        how = dict(model=model, tokenizer=tokenizer, arguments=given)
        return small_trainer(tmp_path / folder, **how, **changes)

    run(torch.optim.AdamW, "one", save_strategy="steps", save_steps=2).train()
    with pytest.raises(ValueError, match="it is of AdamW with groups of .* and here is SGD"):
        run(torch.optim.SGD, "other").train(resume_from_checkpoint=tmp_path / "one/checkpoint-2")


def test_float16_that_is_new_begins_with_a_scale_of_its_own(tmp_path):
    small_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    trainer = small_trainer(tmp_path, max_steps=3, fp16=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and trainer.precision.scaler.get_scale() > 1


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


def test_a_damaged_log_is_restored(tmp_path):
    first = make(tmp_path, save_strategy="steps", save_steps=3)
    first.train()
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines()
    path.write_bytes(lines[0].encode() + b"\n{\xff\xfe")
    again = make(tmp_path)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
    assert path.read_text().splitlines()[:3] == lines[:3]
    assert len(path.read_text().splitlines()) == len(lines)
