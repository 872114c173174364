"""Uploads to the Hugging Face Hub: to a server on this machine that speaks the plain routes, LFS
and regular commits. Xet, the other way of the client for large files, is switched off."""

import dataclasses
import os
import pickle
import re
import shlex
import subprocess
import sys
import threading
from configparser import ConfigParser
from pathlib import Path

import datasets
import pytest
import torch
import trl
from accelerate import Accelerator, PartialState
from huggingface_hub import HfApi, ModelCard, constants
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from small_runs import ROWS, digits, small_model, small_trainer, weights_of
from transformers import AutoModelForCausalLM, HfArgumentParser, TrainerCallback
from transformers.trainer_utils import HubStrategy

from grpo_nb import GRPOConfig
from grpo_nb.training import hub as room
from grpo_nb.training.checkpoint import MANIFEST, STATE, THEIR_STATE, checkpoints, file_fault
from grpo_nb.training.hub import (
    LocalHub,
    Repository,
    UploadError,
    check_token,
    dataset_of,
    model_card,
    shown_settings,
    upload_model,
)

ROOT = Path(__file__).parents[2]
TOKEN = "hf_local"
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


class Hub(LocalHub):
    "A server that can hold commits back, and keeps what a repository was made with."

    def __init__(self, folder):
        super().__init__(folder)
        self.gate, self.made = threading.Event(), []
        self.gate.set()

    def create(self, **asked):
        self.made.append(asked)
        return super().create(**asked)

    def commit(self, *request):
        assert self.gate.wait(60)
        return super().commit(*request)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    with Hub(tmp_path / "hub") as started:
        yield started
        started.gate.set()


@pytest.fixture(autouse=True)
def small_curve(request, monkeypatch):
    "The curve beside a card takes longer to draw than the run does: it is whole in one test."
    if request.node.name != test_the_card.__name__:
        monkeypatch.setattr(room, "run_figure", lambda history: Figure(figsize=(1, 1)))


def uploading(folder, reward=digits, **changes):
    "A small run that uploads; every upload is made, though the run is short."
    settings = dict(
        push_to_hub=True, hub_token=TOKEN, hub_model_id="me/adder", hub_always_push=True
    )
    settings |= dict(save_strategy="steps", save_steps=1, save_total_limit=None, max_steps=2)
    return small_trainer(folder, reward, **{**settings, **changes})


def wait_for_uploads(trainer):
    "Until all that are in the line are done, and what they print is printed."
    trainer.hub.repository.api.run_as_future(int).result()


def contents(folder):
    "name -> bytes of all files below a folder."
    folder = Path(folder)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def model_files(folder):
    "What of a checkpoint is the model."
    return {
        name: data
        for name, data in contents(folder).items()
        if name not in (STATE, THEIR_STATE, MANIFEST, "README.md")
    }


def arrived(hub, name="me/adder", branch="main"):
    return contents(hub.folder / name / branch)


# settings


def test_settings_are_trls_and_come_by_every_route(tmp_path):
    theirs = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False)
    names = [name for name in GRPOConfig.specs if "hub" in name]
    assert len(names) == 7
    for name in names:
        assert getattr(GRPOConfig(), name) == getattr(theirs, name), name
    words = ["--push_to_hub", "--hub_strategy", "checkpoint", "--hub_private_repo", "true"]
    (config,) = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses(words)
    same = GRPOConfig(push_to_hub=True, hub_strategy=HubStrategy.CHECKPOINT, hub_private_repo=True)
    assert config == same and config.hub_strategy == "checkpoint"
    (tmp_path / "run.yaml").write_text("push_to_hub: true\nhub_model_id: me/adder\n")
    parser = trl.TrlParser((GRPOConfig,))
    (config,) = parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml")])
    assert (config.push_to_hub, config.hub_model_id) == (True, "me/adder")
    with pytest.raises(ValueError, match="hub_strategy is 'each_save'.*'every_save'"):
        GRPOConfig(hub_strategy="each_save")


def test_a_token_is_not_shown():
    config = GRPOConfig(hub_token="hf_secret", model_init_kwargs={"token": "hf_own", "a": 1})
    shown = [repr(config), str(config), config.to_json(), str(config.to_dict())]
    shown += [str(config.to_sanitized_dict()), config.describe(), str(config.training_arguments())]
    shown += [str(config.differences(GRPOConfig())), str(config.changed())]
    for given in (["hf_secret"], b"hf_secret"):
        with pytest.raises(ValueError, match="hub_token is a ") as error:
            GRPOConfig(hub_token=given)
        shown.append(str(error.value))

    @dataclasses.dataclass
    class Mine(GRPOConfig):
        rows: str

    shown.append(repr(Mine(rows="mine", **vars(config))))
    assert repr(Mine(rows="mine", beta=0.5)) == "Mine(beta=0.5, rows='mine')"
    assert not [text for text in shown if "hf_secret" in text or "hf_own" in text]
    assert config.model_init_kwargs == {"token": "hf_own", "a": 1}
    assert pickle.loads(pickle.dumps(config)).hub_token == "hf_secret"


def test_an_address_and_its_password_are_not_shown():
    place = "http://user:PASSWORD@internal.example:8000"
    server = dict(use_vllm=True, vllm_mode="server")
    for names in (dict(vllm_server_base_url=place), dict(vllm_server_host="internal.example")):
        config = GRPOConfig(**server, **names)
        shown = [repr(config), str(config), config.to_json(), str(config.to_dict())]
        shown += [str(config.to_sanitized_dict()), str(shown_settings(config))]
        shown += [config.describe(), str(config.differences(GRPOConfig()))]
        assert not [text for text in shown if "PASSWORD" in text or "internal" in text]
        assert "internal" in config.server_urls()[0]
        assert GRPOConfig.from_dict(config.to_dict()).vllm_mode == "server"


# the token


def test_without_a_token_there_is_a_sentence_before_anything_is_done(hub, tmp_path):
    for token in (None, "", " \n"):
        with pytest.raises(ValueError, match="no token to upload with: run `hf auth login`"):
            uploading(tmp_path / "run", hub_token=token)
    assert not (tmp_path / "run").exists() and not hub.requests
    small_trainer(tmp_path / "run")  # without push_to_hub none is needed


def test_the_token_of_the_environment_and_of_a_login(hub, tmp_path, monkeypatch):
    (tmp_path / "no-login").write_text(f"{TOKEN}\n")
    assert check_token(None) == TOKEN
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert check_token("") == "hf_environment"
    assert check_token(f" {TOKEN}\n") == TOKEN
    (tmp_path / "no-login").unlink()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    uploading(tmp_path / "run", hub_token=None)
    assert hub.made == [{"name": "adder", "organization": "me"}]


@pytest.mark.parametrize("token", ["hf_a hf_b", "hf_ä", "hf_a\nhf_b"])
def test_what_can_be_no_token_is_refused_unseen(token):
    with pytest.raises(ValueError, match="copy it again") as error:
        check_token(token)
    assert "hf_" not in str(error.value)


def test_what_the_hub_refuses_is_said_when_the_trainer_is_built(hub, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'me/adder' cannot be made .*401 Unauth.*no account"):
        uploading(tmp_path / "run", hub_token="hf_another")
    with pytest.raises(ValueError, match="'a/b/c' cannot be made or opened"):
        uploading(tmp_path / "run", hub_model_id="a/b/c")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="OfflineModeIsEnabled"):
        uploading(tmp_path / "run")


# a run


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_strategies(hub, tmp_path, strategy):
    trainer = uploading(tmp_path / "run", hub_strategy=strategy)
    trainer.train()
    first, last = checkpoints(tmp_path / "run")
    if strategy == "end":
        assert hub.commits == [] and not arrived(hub)
        trainer.save_model()
        assert hub.commits == ["Model save"]
    else:
        assert hub.commits == [
            "Training in progress, step 1",
            "Training in progress, step 2",
            "End of training",
        ]
    places = {"checkpoint": {"last-checkpoint": last}}
    places["all_checkpoints"] = {"checkpoint-1": first, "checkpoint-2": last}
    uploaded = arrived(hub)
    for place, folder in places.get(strategy, {}).items():
        for name, data in contents(folder).items():
            assert uploaded.pop(f"{place}/{name}") == data
    there = contents(tmp_path / "run")
    kept = {name for name in there if not name.startswith(("checkpoint-", "completions/"))}
    assert uploaded == {name: there[name] for name in kept}
    assert {"README.md", "curve.png", "config.json", "tokenizer.json", "log.jsonl"} <= kept
    assert model_files(last).items() <= uploaded.items()


def test_what_arrives_in_the_middle_of_a_run_is_the_checkpoint(hub, tmp_path):
    "The run deletes a checkpoint while its upload waits, and writes the next one."
    hub.gate.clear()
    seen = {}

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            (only,) = checkpoints(args.output_dir)
            seen[state.global_step] = model_files(only)

    trainer = uploading(tmp_path / "run", save_total_limit=1, max_steps=3, hub_strategy="end")
    trainer.config.hub_strategy = "every_save"
    trainer.add_callback(Look)
    commit, found = hub.commit, {}

    def commit_and_look(*request):
        answer = commit(*request)
        found[hub.commits[-1]] = arrived(hub)
        return answer

    hub.commit = commit_and_look
    opening = threading.Timer(1.5, hub.gate.set)
    opening.start()
    trainer.train()
    for step in (1, 2, 3):
        assert seen[step].items() <= found[f"Training in progress, step {step}"].items()
    assert seen[1] != seen[2] and len(found) == 4
    assert [p.name for p in (tmp_path / "run").glob(".*")] == []  # the staged files are gone


def test_a_save_is_passed_over_while_an_upload_is_on_its_way(hub, tmp_path):
    hub.gate.clear()

    class OpenAtTheEnd(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            hub.gate.set()

    trainer = uploading(tmp_path / "run", hub_always_push=False, max_steps=4)
    trainer.add_callback(OpenAtTheEnd)
    trainer.train()
    assert hub.commits == ["Training in progress, step 1", "End of training"]
    assert model_files(tmp_path / "run/checkpoint-4").items() <= arrived(hub).items()


def test_an_adapter_and_its_readme(hub, tmp_path):
    "PEFT writes a README into each checkpoint: it stays there, and ours is the repository's."
    trainer = uploading(
        tmp_path / "run", hub_strategy="checkpoint", arguments={"peft_config": LORA}
    )
    trainer.train()
    uploaded = arrived(hub)
    for folder in checkpoints(tmp_path / "run"):
        assert file_fault(folder) is None and b"grpo_nb" not in (folder / "README.md").read_bytes()
    assert file_fault(hub.folder / "me/adder/main/last-checkpoint") is None
    assert b"grpo_nb" in uploaded["README.md"]
    assert "adapter_model.safetensors" in uploaded and "model.safetensors" not in uploaded


def test_the_uploaded_checkpoint_goes_on(hub, tmp_path):
    whole = uploading(tmp_path / "whole", push_to_hub=False, max_steps=4)
    whole.train()

    def interrupt(completions, trainer_state, **columns):
        if trainer_state.global_step == 2:
            raise KeyboardInterrupt
        return digits(completions)

    interrupt.__name__ = "digits"
    stopped = uploading(tmp_path / "run", interrupt, hub_strategy="checkpoint", max_steps=4)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    wait_for_uploads(stopped)
    assert hub.commits[-1] == "Training in progress, step 2"
    resumed = uploading(tmp_path / "elsewhere", push_to_hub=False, max_steps=4)
    resumed.train(resume_from_checkpoint=hub.folder / "me/adder/main/last-checkpoint")
    expected, found = weights_of(whole.model), weights_of(resumed.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_best_model_is_what_is_uploaded_at_the_end(hub, tmp_path):
    trainer = uploading(
        tmp_path / "run",
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        learning_rate=0.1,
        metric_for_best_model="completions/mean_length",
        greater_is_better=False,
        max_steps=3,
        arguments={"eval_dataset": ROWS[:4]},
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert model_files(best)["model.safetensors"] == arrived(hub)["model.safetensors"]
    card = ModelCard.load(hub.folder / "me/adder/main/README.md")
    assert "evaluation | mean reward" in card.text


# failures


def test_a_failed_upload_in_the_middle_is_a_warning(hub, tmp_path):
    hub.refuses = "the account is full"

    class Recover(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            wait_for_uploads(trainer)  # that of step 2 has failed too
            hub.refuses = None

    trainer = uploading(tmp_path / "run")
    trainer.add_callback(Recover)
    with pytest.warns(
        UserWarning, match="step 1' to me/adder failed .*the account is full"
    ) as said:
        trainer.train()
    assert sum("failed" in str(one.message) for one in said) == 2
    assert hub.commits == ["End of training"] and trainer.state.global_step == 2


def test_a_failed_upload_at_the_end_is_an_error_with_the_command(hub, tmp_path):
    "The command is run as it stands."
    hub.refuses = "the account is full"
    trainer = uploading(tmp_path / "my run", save_strategy="no", hub_revision="a-branch")
    with pytest.raises(
        UploadError, match="my run could not be uploaded to me/adder .*full"
    ) as said:
        trainer.train()
    hub.refuses = None
    command = str(said.value).rpartition("uploads it: ")[2]
    assert command.startswith("hf upload me/adder ")
    environment = dict(HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0")
    environment |= dict(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1")
    program = [str(Path(sys.executable).parent / "hf"), *shlex.split(command)[1:]]
    subprocess.run(program, env=os.environ | environment, check=True, capture_output=True)
    there = contents(tmp_path / "my run")
    there = {name: data for name, data in there.items() if not name.startswith("completions/")}
    assert arrived(hub, branch="a-branch") == there and "model.safetensors" in there


def test_a_full_disk_is_a_warning(hub, tmp_path, monkeypatch):
    def full(*arguments, **others):
        raise OSError("No space left on device")

    monkeypatch.setattr(room, "stage", full)
    trainer = uploading(tmp_path / "run")
    with pytest.warns(UserWarning, match="step 1: nothing is uploaded .*No space left"):
        trainer.train()
    assert hub.commits == ["End of training"]


def test_where_there_are_no_hard_links_files_are_copied(hub, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("no links here")

    monkeypatch.setattr(room.os, "link", refuse)
    uploading(tmp_path / "run", hub_strategy="checkpoint").train()
    last = checkpoints(tmp_path / "run")[-1]
    uploaded = arrived(hub)
    assert all(uploaded[f"last-checkpoint/{name}"] == d for name, d in contents(last).items())


def test_what_a_killed_process_left_is_removed(hub, tmp_path):
    for left in (".upload-0-abc", f".upload-{os.getpid()}-abc"):  # the second is being uploaded
        (tmp_path / "run" / left).mkdir(parents=True)
    trainer = uploading(tmp_path / "run")
    assert len(list((tmp_path / "run").iterdir())) == 2  # there may be a living run in the folder
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob(".upload-[0-9]*-abc")] == [left]


# what scripts call


def test_pushing_by_hand(hub, tmp_path):
    trainer = uploading(tmp_path / "adder-of-mine", push_to_hub=False, hub_model_id=None)
    trainer.train()
    assert not hub.requests
    info = trainer.push_to_hub(dataset_name="someone/sums", tags=["sums"], model_name="Adder")
    assert info.commit_message == "End of training" and hub.commits == ["End of training"]
    assert hub.made == [{"name": "adder-of-mine", "organization": None} | hub.made[0]]
    card = ModelCard.load(hub.folder / "me/adder-of-mine/main/README.md")
    assert card.data.datasets == ["someone/sums"] and "sums" in card.data.tags
    assert card.text.lstrip().startswith("# Adder\n")
    assert not [name for name in arrived(hub, "me/adder-of-mine") if "checkpoint" in name]
    future = trainer.push_to_hub("Again", blocking=False, license="mit")
    assert future.result().commit_message == "Again"
    trainer.push_to_hub("Elsewhere", revision="draft", private=True)
    assert hub.made[-1]["visibility"] == "private"
    assert "license: mit" not in arrived(hub, "me/adder-of-mine", "draft")["README.md"].decode()
    assert "license: mit" in arrived(hub, "me/adder-of-mine")["README.md"].decode()
    hub.refuses = "no"
    with pytest.warns(UserWarning, match="'Lost' to me/adder-of-mine failed"):
        trainer.push_to_hub("Lost", blocking=False, tags="lost")
        wait_for_uploads(trainer)


def test_branch_and_privacy_are_asked_for(hub, tmp_path):
    trainer = uploading(tmp_path / "run", hub_revision="v2", hub_private_repo=True)
    trainer.train()
    assert hub.made[0]["visibility"] == "private"
    assert not arrived(hub) and "model.safetensors" in arrived(hub, branch="v2")


def test_saving_elsewhere_uploads_what_was_saved(hub, tmp_path):
    trainer = uploading(tmp_path / "run", hub_strategy="end")
    trainer.save_model(tmp_path / "other")
    assert arrived(hub) == contents(tmp_path / "other")


def test_completions_are_not_uploaded(hub, tmp_path):
    uploading(tmp_path / "run", log_completions=True, num_completions_to_print=0).train()
    assert list((tmp_path / "run/completions").iterdir())
    assert not [name for name in arrived(hub) if "completions" in name]


def test_no_token_in_any_file_or_line(hub, tmp_path, capfd):
    secret = hub.token = "hf_a_secret_of_mine"
    trainer = uploading(
        tmp_path / "run",
        hub_token=secret,
        hub_strategy="checkpoint",
        report_to="tensorboard",
        arguments={"peft_config": LORA},
    )
    trainer.log.show = True
    trainer.train()
    trainer.save_state()
    hub.refuses = "no"
    with pytest.raises(UploadError) as error:
        trainer.push_to_hub(tags="another")
    printed = "".join(capfd.readouterr()) + str(error.value) + repr(trainer.config)
    assert secret not in printed and "spread" in printed
    files = {**contents(tmp_path / "run"), **arrived(hub)}
    assert len(files) > 20
    assert not [name for name, data in files.items() if secret.encode() in data]


# the card


def test_the_card(hub, tmp_path):
    trainer = uploading(tmp_path / "run", push_to_hub=False, epsilon_high=0.28, run_name="mine")
    trainer.train()
    trainer.create_model_card(license="apache-2.0", language="en", tags="arithmetic")
    card = ModelCard.load(tmp_path / "run/README.md")
    data = card.data.to_dict()
    assert data["tags"] == ["grpo", "grpo_nb", "arithmetic"] and "base_model" not in data
    assert (data["license"], data["language"]) == ("apache-2.0", "en")
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    text = card.text
    first, last = trainer.log_history[0], trainer.log_history[-1]
    assert f"{first['reward']:.3f} at update 1 and {last['reward']:.3f} at update 2" in text
    assert "reward functions | `digits` |" in text and "2, each of 16 completions" in text
    assert f"{last['num_tokens']:,}" in text and "epsilon_high: 0.28" in text
    for hidden in ("run_name", "output_dir", str(tmp_path), "hub_"):
        assert hidden not in text
    for name in ("grpo_nb 0", f"torch {torch.__version__}", "transformers", "peft"):
        assert name in text
    assert "(curve.png)" in text and (tmp_path / "run/curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_card_before_any_update_has_no_curve(tmp_path):
    trainer = small_trainer(tmp_path / "run")
    trainer.create_model_card()
    assert contents(tmp_path / "run").keys() == {"README.md"}
    assert "mean reward" not in (tmp_path / "run/README.md").read_text()


def test_the_base_model_is_named_only_where_the_hub_knows_it(tmp_path):
    model, _ = small_model()
    model.config._name_or_path = "someone/base"
    assert model_card("me/x", model).data.base_model == "someone/base"
    (tmp_path / "my-model").mkdir()
    for folder in (str(tmp_path / "my-model"), str(tmp_path / "gone" / "my-model")):
        model.config._name_or_path = folder
        card = model_card("me/x", model)
        assert card.data.base_model is None and str(tmp_path) not in card.content
        assert "`my-model`" in card.text
    (tmp_path / "my-model/README.md").write_text("---\nlicense: mit\n---\n\nA card.\n")
    model.config._name_or_path = str(tmp_path / "my-model")
    assert model_card("me/x", model).data.license == "mit"
    assert model_card("me/x", model, license="apache-2.0").data.license == "apache-2.0"
    card = model_card("me/x", model, dataset_name=str(tmp_path / "rows"))
    assert card.data.datasets is None and "data | `rows` |" in card.text


def test_a_merged_model_is_uploaded_with_a_card_for_transformers(hub, tmp_path):
    model = get_peft_model(small_model()[0], LORA)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    for folder, library in (("adapter", "peft"), ("merged", "transformers")):
        upload_model(tmp_path / folder, f"me/{folder}", model, token=TOKEN, license="mit")
        data = ModelCard.load(hub.folder / f"me/{folder}/main/README.md").data
        assert (data.library_name, data.license) == (library, "mit")
        assert arrived(hub, f"me/{folder}") == contents(tmp_path / folder)


def test_the_data_sets_name_comes_from_its_files():
    rows = datasets.Dataset.from_list(ROWS)
    assert dataset_of(rows) is None and dataset_of(ROWS) is None
    part = "hf://datasets/openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee/main/{}.parquet"
    rows.info.download_checksums = {part.format(n): {} for n in (1, 2)}
    assert dataset_of(rows.map(lambda row: row)) == "openai/gsm8k"


@pytest.mark.parametrize("adapter", [False, True])
def test_the_lines_in_the_card_load_the_model(hub, tmp_path, adapter, monkeypatch):
    model, tokenizer = small_model()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = small_trainer(
        tmp_path / "run",
        model=str(tmp_path / "base"),
        arguments={"peft_config": LORA} if adapter else {},
        learning_rate=0.1,
    )
    trainer.train()
    trainer.push_to_hub(token=TOKEN)
    text = ModelCard.load(hub.folder / "me/run/main/README.md").text
    lines = re.search(r"```python\n(.+?)```", text, re.S)[1]
    assert '"me/run"' in lines
    found = {}
    monkeypatch.chdir(hub.folder)
    exec(lines.replace("me/run", "me/run/main"), found)
    ids = torch.tensor([found["tokenizer"]("12+7=").input_ids])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        assert torch.allclose(found["model"].eval()(ids).logits, expected, atol=1e-6)
        start = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        assert not torch.allclose(start(ids).logits, expected, atol=1e-3)


def test_the_address_is_that_of_the_settings():
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini")
    assert settings["DEFAULT"]["git_url"] == room.HOME


# several processes, with the environment alone


def test_a_later_process_uploads_nothing(hub, tmp_path, monkeypatch):
    "As one of several sees itself; real processes are tried below."
    monkeypatch.setattr(PartialState, "is_main_process", property(lambda self: False))
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda self: False))
    trainer = uploading(tmp_path / "run", max_steps=1)
    trainer.train()
    assert trainer.push_to_hub(tags="both") is None
    assert trainer.repository is None and hub.requests == []


@pytest.mark.full  # half a minute of a core: a launcher, and two processes that import everything
def test_only_the_first_process_uploads(hub, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "from small_runs import small_trainer\n"
        f"trainer = small_trainer({str(tmp_path / 'run')!r}, push_to_hub=True, max_steps=1,\n"
        "    per_device_train_batch_size=8, hub_model_id='me/adder', save_strategy='steps',\n"
        "    save_steps=1, use_cpu=True)\n"
        "trainer.train()\n"
        "trainer.push_to_hub(tags='both')\n"
    )
    environment = dict(HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HUB_OFFLINE="0")
    environment |= dict(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        command, env=os.environ | environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert hub.made == [{"name": "adder", "organization": "me"}]
    messages = ["Training in progress, step 1", "End of training", "End of training"]
    assert hub.commits == messages
    there = contents(tmp_path / "run")
    kept_here = "checkpoint-", "completions/"
    assert arrived(hub) == {n: d for n, d in there.items() if not n.startswith(kept_here)}


# the server


def test_the_local_hub_puts_the_client_back(tmp_path):
    before = (constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET)
    with LocalHub(tmp_path) as hub:
        assert constants.ENDPOINT == hub.url and HfApi().endpoint == hub.url
        assert hub.put("0" * 64, b"other bytes")[0] == 400
        with pytest.raises(ValueError, match="'me/there' cannot be made .*401 Unauth"):
            Repository("me/there", token="hf_wrong")
    assert before == (constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET)


def test_an_unchanged_folder_is_not_sent_again(hub, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/model.safetensors").write_bytes(os.urandom(10_000))
    (tmp_path / "a/notes.txt").write_text("x")
    repository = Repository("me/adder", token=TOKEN)
    repository.upload(tmp_path / "a", "First")
    repository.upload(tmp_path / "a", "Second")
    assert hub.commits == ["First"]
    assert [method for method, _, _ in hub.requests].count("PUT") == 1
    assert arrived(hub) == contents(tmp_path / "a")
