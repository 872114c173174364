"""Which adapters a server holds, under which names, and which cannot be served."""

import threading
import time

import pytest
import torch
import transformers
from serving.test_server import PARAMS, PROMPTS, sampler_of
from serving.test_stand_in import moved
from small_runs import one_thread, small_model  # noqa: F401

from grpo_nb.model.adapters import add_adapters, resolve_targets
from grpo_nb.serving.adapter_versions import served_config
from grpo_nb.serving.addresses import ServerError
from grpo_nb.serving.stand_in import StandIn


def test_versions_leave_the_server_before_their_files_leave_the_disk(start, tmp_path):
    stand_in, url = start(max_loras=3)
    sampler, model = sampler_of(url, tmp_path, max_loras=3), moved(small_model()[0])
    names = []
    for version in (0, 2, 4, 6):
        sampler.publish(model, version)
        names.append(sampler.versions.current[0])
        sampler.publish(model, version)  # an evaluation of the same weights
        assert sampler.versions.current[0] == names[-1]
    assert list(stand_in.adapters.folders) == names[2:] and len(set(names)) == 4
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(names[1:])
    assert set(sampler.generate([[7]], PARAMS, version=4).versions.tolist()) == {4}
    with pytest.raises(ValueError, match="version 2 is no longer on the servers, which hold 4, 6"):
        sampler.generate([[7]], PARAMS, version=2)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(1)
    sampler.publish(model, 6)  # other weights under the same count
    assert sampler.versions.current[0] not in names
    sampler.close()
    assert not stand_in.adapters.folders and not list((tmp_path / "run").iterdir())
    sampler.publish(model, 0)  # a second run counts from 0 again
    assert (
        sampler.versions.current[0] not in names
        and sampler.generate([[7]], PARAMS).versions[0] == 0
    )


def test_a_version_that_is_drawn_with_is_not_unloaded(start, tmp_path):
    stand_in, url = start(max_loras=3)
    sampler, model = sampler_of(url, tmp_path), moved(small_model()[0])
    sampler.publish(model, 0)
    before = sampler.generate(PROMPTS, PARAMS)
    old = sampler.versions.current[0]
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(sampler.generate(PROMPTS, PARAMS)))
    with stand_in.lock:
        thread.start()
        while not sampler.versions.users[old]:
            time.sleep(0.01)
    sampler.publish(model, 1)
    thread.join()
    assert torch.equal(drawn[0].completion_ids, before.completion_ids)
    assert drawn[0].versions.tolist() == [0] * 8
    sampler.publish(moved(small_model()[0], 2), 2)
    assert old not in stand_in.adapters.folders


@pytest.mark.parametrize("theirs", [1, 2])
def test_a_server_that_others_have_filled_is_refused_at_the_first_version(start, tmp_path, theirs):
    stand_in, url = start(api_key="secret")
    other = sampler_of(url, tmp_path / "other", max_loras=3, api_key="secret")
    other.versions.check_settings = other.versions.check_room = lambda *given: None
    for version in range(theirs):
        other.publish(moved(small_model()[0]), version)
    names = list(stand_in.adapters.folders)
    sampler = sampler_of(url, tmp_path, api_key="secret")
    with pytest.raises(ServerError, match="which is all it holds") as caught:
        sampler.publish(moved(small_model()[0]), 0)
    said = str(caught.value)
    assert f"It has {', '.join(names)}, which this run" in said and "Is it started" not in said
    assert f"curl {url}/v1/unload_lora_adapter -H 'Authorization: Bearer TOKEN'" in said
    assert "secret" not in said and list(stand_in.adapters.folders) == names
    other.close()
    sampler.close()
    sampler.publish(moved(small_model()[0]), 0)


def test_a_server_that_makes_room_by_itself_is_drawn_with(start, tmp_path):
    class MakesRoom(StandIn):
        "Holds more on the host than it tells, as vLLM does."

        def server_info(self, asked):
            info = super().server_info(asked)
            info["vllm_config"]["lora_config"]["max_loras"] = 2
            return info

    stand_in, url = start(MakesRoom, max_loras=9)
    sampler_of(url, tmp_path / "other").publish(moved(small_model()[0]), 0)
    sampler = sampler_of(url, tmp_path)
    for version in (0, 1, 2):
        sampler.publish(moved(small_model()[0]), version)
    assert len(stand_in.adapters.folders) == 2  # the newest of either, and nothing that was tried


def test_what_cannot_be_served_is_refused(start, tmp_path):
    _, url = start()
    sampler = sampler_of(url, tmp_path)
    with pytest.raises(ValueError, match="GptOssForCausalLM is trained as a whole"):
        sampler.publish(small_model()[0], 0)
    for others, sentence in (
        (dict(use_dora=True), "use_dora=True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
    ):
        model = small_model()[0]
        model = add_adapters(model, 2, resolve_targets(model, ["q_proj"]), **others)
        with pytest.raises(ValueError, match=sentence):
            sampler.publish(model, 0)
    model = small_model()[0]
    model = add_adapters(model, 2, resolve_targets(model, ["mlp.experts.down_proj"]))
    with pytest.raises(ValueError, match="both matrices or of none"):
        sampler.publish(model, 0)


def test_adapters_of_experts_that_files_store_one_by_one_are_refused():
    config = transformers.Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    for targets, refused in (("all", True), ("attention", False)):
        model = transformers.Qwen3MoeForCausalLM(config)
        model = add_adapters(model, 2, resolve_targets(model, targets))
        if refused:
            with pytest.raises(
                ValueError, match="experts of a qwen3_moe.*lora_targets='attention'"
            ):
                served_config(model)
        else:
            assert not served_config(model).target_parameters


def test_only_the_first_process_writes_and_all_draw_with_its_version(start, tmp_path):
    stand_in, url = start(max_loras=3)
    said, model = [], moved(small_model()[0])

    def tell(value):
        said.append(value)
        return value

    first = sampler_of(url, tmp_path, share=tell)
    other = sampler_of(url, tmp_path, process=1, share=lambda value: said[-1])
    for version in (0, 1, 2):
        for one in (first, other):
            one.publish(model, version)
        assert other.generate([[7]], PARAMS).versions.tolist() == [version] * 2
    assert other.versions.current == first.versions.current and list(stand_in.adapters.folders) == [
        first.versions.current[0]
    ]
    said.append((None, "the disk is full"))
    with pytest.raises(ServerError, match="the disk is full"):
        other.publish(model, 3)
    other.close()
    assert stand_in.adapters.folders and first.generate([[7]], PARAMS).versions[0] == 2
