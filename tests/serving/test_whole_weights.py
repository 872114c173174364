"Whole weights over HTTP: what a server holds, what it draws, and what cannot be sent."

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from serving.test_server import PARAMS, PROMPTS, sampler_of, trainer_on
from serving.test_stand_in import ask, moved
from small_runs import ROWS, one_thread, small_model, weights_of, without_clocks  # noqa: F401
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_nb.model.packed import pack_experts
from grpo_nb.model.tiny import tiny_gpt_oss
from grpo_nb.rollout.engine import RolloutEngine
from grpo_nb.serving.adapter_versions import check_whole, in_format
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.colocated import vllm_command


def shaken(model, seed=0):
    "Every weight moved a little."
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def greedy(sampler):
    return sampler.generate(PROMPTS, replace(PARAMS, temperature=0, stop_token_ids=(1,)))


def test_a_server_draws_with_the_newest_weights_and_with_no_others(start, tmp_path):
    stand_in, url = start()
    sampler, (model, tokenizer) = sampler_of(url, tmp_path, whole=True), small_model()
    for version in (0, 3):
        sampler.publish(shaken(model, version), version)
        drawn, here = greedy(sampler), greedy(RolloutEngine(model, tokenizer))
        assert torch.equal(drawn.completion_ids, here.completion_ids)
        torch.testing.assert_close(drawn.logps, here.logps, atol=1e-5, rtol=0)
        assert set(drawn.versions.tolist()) == {version}
        held = stand_in.adapters.model.state_dict()
        assert all(torch.equal(x, held[name]) for name, x in model.state_dict().items())
        (folder,) = (tmp_path / "run").iterdir()  # the one before is gone
        assert folder.name.endswith(f"-v{version}")
    with pytest.raises(ValueError, match="version 3 alone, and version 0 is asked for"):
        sampler.generate(PROMPTS, PARAMS, version=0)
    with (
        sampler.versions.drawing(),
        pytest.raises(ValueError, match="replaced in place: wait for them"),
    ):
        sampler.publish(shaken(model), 4)
    sampler.close()
    assert not list((tmp_path / "run").iterdir())


def test_a_server_that_was_away_reads_the_weights_before_it_is_asked(start, tmp_path):
    (_, one), (second, other) = start(), start()
    sampler, model = sampler_of([one, other], tmp_path, whole=True), shaken(small_model()[0])
    sampler.publish(model, 1)
    second.adapters.model.load_state_dict(small_model()[0].state_dict())  # as a restart does
    sampler.addresses[1].ready = False
    drawn = greedy(sampler)
    assert torch.equal(second.adapters.model.lm_head.weight, model.lm_head.weight) and torch.equal(
        greedy(sampler).completion_ids, drawn.completion_ids
    )


def held_by(stand_in):
    return {name: x.clone() for name, x in stand_in.adapters.model.state_dict().items()}


def test_a_server_that_goes_on_is_given_its_own_weights_back(start, tmp_path):
    stand_in, url = start()
    sampler, own = sampler_of(url, tmp_path, whole=True), held_by(stand_in)
    sampler.publish(shaken(small_model()[0]), 1)
    assert not torch.equal(held_by(stand_in)["lm_head.weight"], own["lm_head.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sampler.close()
    assert all(torch.equal(x, own[name]) for name, x in held_by(stand_in).items())
    assert not list((tmp_path / "run").iterdir())
    sampler.publish(shaken(small_model()[0]), 1)  # as an evaluation does
    stand_in.lora_dir = None
    folder, read = tmp_path / "run", sampler.versions.ask_to_read

    def while_files_are_there(*given):
        assert list(folder.iterdir())
        return read(*given)

    sampler.versions.ask_to_read = while_files_are_there
    with pytest.warns(UserWarning, match=f"{url} may still have the weights .*404.*restart it"):
        sampler.close()
    assert not list(folder.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sampler.close()  # nothing was sent since
        sampler.versions.replaced.add(sampler.addresses[0])
        sampler.servers.progress = lambda: 0  # of a server that the run ends itself
        sampler.close()


def test_what_is_written_has_the_format_that_is_asked_for(tmp_path):
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    config = Qwen2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True
    )
    model = Qwen2ForCausalLM(config)
    half = in_format(model, torch.bfloat16)
    assert half["lm_head.weight"] is half["model.embed_tokens.weight"]
    assert {x.dtype for x in half.values()} == {torch.bfloat16}
    assert in_format(model, torch.float32) is None
    model.save_pretrained(tmp_path, state_dict=dict(half))
    read = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(x, half[name]) for name, x in read.state_dict().items())


def test_what_cannot_be_sent_is_refused(start, tmp_path):
    _, url = start(lora_dir=None)
    with pytest.raises(ServerError, match="did not load the weights .*VLLM_SERVER_DEV_MODE=1"):
        sampler_of(url, tmp_path, whole=True).publish(small_model()[0], 0)
    _, url = start()
    sampler = sampler_of(url, tmp_path, whole=True)
    with pytest.raises(ValueError, match="has an adapter: leave whole=True out"):
        sampler.publish(moved(small_model()[0]), 0)
    settings = {}, {"quantization": "mxfp4"}, {"data_parallel_size": 2}
    assert [text.split()[0] for text in sampler.versions.faults(settings, 0)] == ["a", "its"]
    packed, _ = tiny_gpt_oss(hidden_size=32, intermediate_size=32)
    pack_experts(packed)
    with pytest.raises(ValueError, match="weights are in MXFP4 or float8"):
        check_whole(packed)
    with pytest.raises(ValueError, match="max_staleness=1 draws while the weights move"):
        trainer_on(url, tmp_path / "late", whole=True, max_staleness=1)


@pytest.mark.parametrize(
    "body, said",
    [
        ({"method": "shutdown"}, "'shutdown' is not done here"),
        ({"method": "reload_weights", "kwargs": {"weights_path": "/etc"}}, "is not below"),
        ({"method": "reload_weights"}, "is not below"),
    ],
)
def test_the_stand_in_reads_weights_from_its_folder_alone(start, body, said):
    status, answer = ask(start()[1], "/collective_rpc", body)
    assert status == 400 and said in answer["error"]["message"]


def test_the_command_of_a_server_of_whole_weights_has_no_adapters():
    words = " ".join(vllm_command("a/b", 7, rank=None, sleeps=True))
    assert "lora" not in words and "--enable-sleep-mode" in words


def test_a_run_of_whole_weights_samples_from_the_server_and_goes_on_after_a_stop(
    start, alone, tmp_path
):
    _, url = start()
    given = dict(max_steps=3, save_strategy="steps", save_steps=2, whole=True, learning_rate=1e-3)
    through = trainer_on(url, tmp_path / "run", **given)
    through.train()
    records = without_clocks(through.log_history)
    assert len(records) == 3 and all(one["sampling/gap_mean"] < 1e-6 for one in records)
    assert not list((tmp_path / "run/.vllm_adapters").iterdir())
    more = trainer_on(url, tmp_path / "run", **given)
    more.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert without_clocks(more.log_history) == records
    for name, weight in weights_of(through.model).items():
        assert torch.equal(weight, weights_of(more.model)[name])


def written(folder, change=lambda tensors: None):
    "A checkpoint of the small model, with its tensors changed."
    model = small_model(1)[0]
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    model.save_pretrained(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def reload(url, folder):
    "Status and sentence of a server that is told to read a folder."
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    status, answer = ask(url, "/collective_rpc", body)
    return status, answer["error"]["message"] if status != 200 else None


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda tensors: tensors.pop(BIAS), f"{BIAS} is missing: send a whole"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "more is not one of the model's"),
        (lambda tensors: tensors.update({BIAS: torch.zeros(3)}), f"{BIAS} has another shape"),
    ],
)
def test_a_checkpoint_of_other_tensors_is_refused(start, tmp_path, change, said):
    stand_in, url = start()
    before = weights_of(stand_in.adapters.model)
    status, sentence = reload(url, written(tmp_path / "changed", change))
    assert status == 400 and said in sentence
    after = weights_of(stand_in.adapters.model)
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert reload(url, written(tmp_path / "whole"))[0] == 200
    head = stand_in.adapters.model.lm_head.weight
    assert torch.equal(head, small_model(1)[0].lm_head.weight)


def test_no_file_of_a_checkpoint_leads_out_of_the_folder(start, tmp_path):
    root = tmp_path / "root"
    stand_in, url = start(lora_dir=root)
    outside, before = written(tmp_path / "outside"), weights_of(stand_in.adapters.model)
    linked, indexed, adapter = (root / name for name in ("linked", "indexed", "adapter"))
    for folder in (linked, indexed, adapter):
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes((outside / "config.json").read_bytes())
    (linked / "model.safetensors").symlink_to(outside / "model.safetensors")
    for name in ("../../outside/model.safetensors", str(outside / "model.safetensors")):
        weight_map = dict.fromkeys(before, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
        status, sentence = reload(url, indexed)
        assert status == 400 and "is not below the folder" in sentence
    assert reload(url, linked)[0] == 400
    base = {"peft_type": "LORA", "base_model_name_or_path": str(outside)}
    (adapter / "adapter_config.json").write_text(json.dumps(base))
    assert reload(url, adapter)[0] == 400  # transformers would read the base in its place
    after = weights_of(stand_in.adapters.model)
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_a_checkpoint_in_several_files_is_read_and_a_broken_one_is_refused(start, tmp_path):
    stand_in, url = start()
    model = small_model(1)[0]
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert reload(url, tmp_path / "parts") == (200, None)
    held = stand_in.adapters.model.state_dict()
    assert all(torch.equal(x, held[name]) for name, x in model.state_dict().items())
    index = tmp_path / "parts/model.safetensors.index.json"
    for text in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        index.write_text(text)
        assert reload(url, tmp_path / "parts")[0] == 400, text
    (tmp_path / "parts/model.safetensors").write_bytes(b"no tensors")
    for folder in (tmp_path / "parts", "a\0b", "\ud800", "x" * 5000):
        assert reload(url, folder)[0] == 400, folder
    assert reload(url, tmp_path / "none")[0] == 404
